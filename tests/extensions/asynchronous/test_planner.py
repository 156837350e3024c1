"""Samples to processes: none without work, loads even; and their rows share contexts."""

from hypothesis import given
from hypothesis import strategies as st

from posttrain.extensions.asynchronous.ledger import balanced_shares
from posttrain.extensions.asynchronous.rollouts import by_context, rollout_batch
from posttrain.extensions.asynchronous.samples import RolloutSample


def test_lengths_four_three_two_one_in_two_shares_load_sixteen_and_fourteen():
    lengths = [4, 3, 2, 1]
    shares = balanced_shares(lengths, 2)
    assert [sum(lengths[i] ** 2 for i in share) for share in shares] == [16, 14]


@given(st.lists(st.integers(1, 8), min_size=4, max_size=40), st.integers(1, 4))
def test_a_step_gives_every_sample_to_one_process_and_every_process_some(lengths, world):
    shares = balanced_shares(lengths, world)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(shares)


def sample(group, context, written, mask=None):
    ids, mask = context + written, [0] * len(context) + (mask or [1] * len(written))
    return RolloutSample("p", "c", ids, mask, [-0.5 * m for m in mask], 0.25 * group, 1, group)


def test_completions_of_a_context_share_its_row_and_keep_their_numbers():
    samples = [sample(0, [1, 2], [3]), sample(1, [9], [4]), sample(0, [1, 2], [5, 6])]
    rows = rollout_batch(by_context(samples)).every_row()
    assert [(row.prompt_ids, row.completions) for row in rows] == [([1, 2], [[3], [5, 6]]), ([9], [[4]])]
    assert rows[0].token_columns["rollout_logp"] == [[-0.5], [-0.5, -0.5]]
    assert rows[1].sequence_columns["advantages"] == [0.25]


def test_tokens_that_the_model_did_not_write_carry_no_loss():
    (row,) = rollout_batch([sample(0, [1, 2], [3, 8, 4], mask=[1, 0, 1])]).every_row()
    assert (row.completions, row.loss_masks) == ([[3, 8, 4]], [[1, 0, 1]])
