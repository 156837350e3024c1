"""Images on several processes, of which one has rows without any."""

import pytest

from tests.ranks import assert_same_step, run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "checkpointing", "freeze"),
    [
        ("smolvlm", True, "auto"),
        ("qwen2_vl", False, "auto"),
        ("mllama", True, "auto"),
        ("mllama", True, True),
        ("llava", True, False),
        ("llava_next", True, False),
    ],
)
def test_a_rank_without_pictures_neither_stops_the_others_nor_changes_the_gradient(
    name, checkpointing, freeze, tmp_path
):
    one, two = (
        run_ranks(
            "tests.methods.vision_rank_worker", tmp_path / str(n), name, 4 // n, checkpointing, freeze,
            processes=n, folder=tmp_path / str(n), timeout=60,
        )
        for n in (1, 2)
    )  # fmt: skip
    assert_same_step(one, two)
    assert two["logs"]["loss"] == pytest.approx(one["logs"]["loss"], abs=1e-5)
