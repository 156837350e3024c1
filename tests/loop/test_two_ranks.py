"""Two gloo processes equal one with twice the accumulation: gradients, loss and metrics."""

import pytest

from tests.ranks import FREE, assert_same_step, run_ranks


def run(kind, folder, processes, batch, accumulation):
    return run_ranks("tests.methods.rank_worker", kind, folder, batch, accumulation, processes=processes, folder=folder)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["sft", "dapo", "grpo", "a2po", "gkd"])
def test_two_ranks_equal_one_with_twice_the_accumulation(kind, tmp_path):
    one = run(kind, tmp_path / "one", 1, 4, 2)
    two = run(kind, tmp_path / "two", 2, 4, 1)
    assert_same_step(one, two)
    several = {name for name in two["logs"] if name.startswith("balance/")}  # What ranks have among themselves.
    assert set(one["logs"]) == set(two["logs"]) - several
    for name, value in one["logs"].items():
        if not any(part in name for part in FREE):
            assert two["logs"][name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


@pytest.mark.distributed
def test_the_table_of_completions_names_the_worst_tokens_of_every_rank(tmp_path):
    one, two = run("gkd", tmp_path / "one", 1, 4, 2), run("gkd", tmp_path / "two", 2, 4, 1)
    values = [
        [float(token.rsplit(" ", 1)[1]) for row in found["worst"] for token in row.split("  ") if token]
        for found in (one, two)
    ]
    assert len(two["worst"]) == 8 and any(two["worst"][:4]) and any(two["worst"][4:])
    assert len(values[0]) == len(values[1]) == 10 and max(values[0]) == max(values[1])


@pytest.mark.distributed
def test_t25_evaluation_on_two_ranks_is_that_of_one(tmp_path):
    """Five rows in batches of two: the last round has one row, and the other rank must not count the first ones again."""
    one, two = run("evaluation", tmp_path / "one", 1, 2, 1), run("evaluation", tmp_path / "two", 2, 2, 1)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["trained"] == one["trained"] == one["truth"]  # Every row once, in the order of the dataset.
