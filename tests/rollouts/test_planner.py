"""Samples to rows of processes: within the budget, none empty, loads even."""

from hypothesis import given
from hypothesis import strategies as st

from posttrain.rollouts.workers.ledger import RowPlanner, balanced_rows, plan_step
from posttrain.rollouts.workers.samples import RolloutSample, sample_rows


def test_budget_eight_and_lengths_three_give_rows_of_two():
    """Budget 8, W = 2: three, three | three+three, three+three; the fifth has no room, and both rows are handed over."""
    planner = RowPlanner(8, 2)
    handed = [planner.add(i, 3) for i in range(5)]
    assert handed == [[], [], [], [], [[0, 2], [1, 3]]]
    assert planner.flush() == [[4], []]


def test_a_sample_beyond_the_budget_is_set_aside():
    planner = RowPlanner(8, 1)
    assert planner.add("a", 12) == []
    assert planner.too_long == ["a"]
    assert planner.flush() == [[]]


def test_lengths_four_three_two_one_in_two_rows_load_sixteen_and_fourteen():
    lengths = [4, 3, 2, 1]
    rows = balanced_rows(lengths, 2)
    assert [sum(lengths[i] ** 2 for i in row) for row in rows] == [16, 14]


@given(st.lists(st.integers(1, 8), min_size=4, max_size=40), st.integers(1, 4), st.sampled_from([0, 8, 11]))
def test_a_step_gives_every_sample_to_one_process_within_the_budget_and_every_process_some(lengths, world, budget):
    plan = plan_step(lengths, budget=budget, world=world)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(lengths)))
    assert all(rows and all(rows) for rows in plan)
    if budget:
        assert all(sum(lengths[i] for i in row) <= budget for rows in plan for row in rows)


def test_completions_of_a_group_share_their_prompt_and_others_do_not():
    def sample(group, context, written):
        ids = context + written
        mask = [0] * len(context) + [1] * len(written)
        return RolloutSample("p", "c", ids, mask, [-0.5 * m for m in mask], 0.25 * group, 1, group)

    rows = sample_rows([sample(0, [1, 2], [3]), sample(1, [1, 2], [4]), sample(0, [1, 2], [5, 6])])
    assert [(row.prompt_ids, row.completions) for row in rows] == [([1, 2], [[3], [5, 6]]), ([1, 2], [[4]])]
    assert rows[0].token_columns["rollout_logp"] == [[-0.5], [-0.5, -0.5]]
    assert rows[1].sequence_columns["advantages"] == [0.25]
