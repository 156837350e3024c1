"""Asynchronous GRPO on two processes: the rollouts of one, dealt to both."""

import pytest

from tests.ranks import assert_same_step, run_ranks


@pytest.mark.distributed
def test_trap_s36_two_ranks_take_the_steps_of_one_however_unequal_their_tokens(tmp_path):
    one, two = (
        run_ranks(
            "tests.extensions.asynchronous.rank_worker",
            tmp_path / f"{n}",
            4 // n,
            processes=n,
            folder=tmp_path / f"{n}",
        )
        for n in (1, 2)
    )
    assert_same_step(one, two)
    for name in ("loss", "grad_norm", "ratio", "kl", "num_tokens", "async/trained"):
        assert two["logs"][name] == pytest.approx(one["logs"][name], rel=1e-4, abs=1e-6), name
    assert two["calls"] == one["calls"]
    assert "again" in two["calls"]  # All ranks left the wait for rollouts together.
    assert two["account"] == one["account"]
    assert two["account"]["async/trained"] == 12
