"""Images on several processes, of which one has rows without any."""

import pytest

from tests.ranks import assert_same_step, run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("name", "checkpointing"), [("smolvlm", True), ("qwen2_vl", False)])
def test_a_rank_without_pictures_neither_stops_the_others_nor_changes_the_gradient(name, checkpointing, tmp_path):
    one, two = (
        run_ranks(
            "tests.algorithms.vision_rank_worker", tmp_path / str(n), name, 4 // n, checkpointing,
            processes=n, folder=tmp_path / str(n), timeout=60,
        )
        for n in (1, 2)
    )  # fmt: skip
    assert_same_step(one, two)
    assert two["logs"]["loss"] == pytest.approx(one["logs"]["loss"], abs=1e-5)
