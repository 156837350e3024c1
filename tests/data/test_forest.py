"""The token forest: every completion exactly once, prompts shared, predictors right, budgets kept."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.forest import Layout, collate, split_by_sequence
from posttrain.errors import DataError
from posttrain.types import Row
from tests.wordings import raises


def row(prompt, *completions, **columns):
    masks = [[1] * len(c) for c in completions]
    return Row(list(prompt), [list(c) for c in completions], masks, **columns)


def test_a_group_is_one_tree_that_shares_its_prompt():
    (batch,) = collate([row([7, 8, 9], [1, 2], [3, 4, 5])], pad_token_id=0)
    assert batch.input_ids.tolist() == [[7, 8, 9, 1, 2, 3, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert batch.seen_until.tolist() == [[8, 8, 8, 5, 5, 8, 8, 8]]
    assert batch.sequence.tolist() == [[-1, -1, -1, 0, 0, 1, 1, 1]]
    assert batch.predictor[0, 3:].tolist() == [
        2,
        3,
        2,
        5,
        6,
    ]  # both branches are predicted from the prompt's last token
    assert batch.num_sequences == 2
    assert batch.num_loss_tokens == 5


def test_a_sequence_without_prompt_never_trains_its_first_token():
    (batch,) = collate([row([], [5, 6, 7])], pad_token_id=0)
    assert batch.loss_mask.tolist() == [[False, True, True]]
    assert batch.predictor[0, 1:].tolist() == [0, 1]


def test_padded_layout_repeats_the_prompt_and_pads_right():
    layout = Layout("padded", row_tokens=64)
    (batch,) = collate([row([7, 8], [1], [2, 3, 4])], pad_token_id=99, layout=layout)
    assert batch.input_ids.tolist() == [[7, 8, 2, 3, 4], [7, 8, 1, 99, 99]]
    assert batch.seen_until.tolist() == [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0]]
    assert batch.one_sequence_a_row
    assert batch.origin == [1, 0]


def test_a_group_longer_than_the_limit_is_split_with_its_prompt():
    layout = Layout(row_tokens=8, max_tree_tokens=8)
    batches = collate([row([1, 2], [3] * 3, [4] * 3, [5] * 3)], pad_token_id=0, layout=layout)
    assert sorted(i for b in batches for i in b.origin) == [0, 1, 2]
    assert sorted(b.num_tokens for b in batches) == [5, 8]


def test_wrong_lengths_are_named_with_both_numbers():
    with raises(DataError, "2", "1"):
        collate([Row([1], [[2, 3]], [[1]])], pad_token_id=0)
    with raises(DataError, "'advantages'", "1", "2"):
        collate([row([1], [2], [3], sequence_columns={"advantages": [0.5]})], pad_token_id=0)
    with raises(DataError):
        collate([], pad_token_id=0)


ids = st.lists(st.integers(3, 50), min_size=0, max_size=9)
groups = st.tuples(ids, st.lists(st.lists(st.integers(3, 50), min_size=1, max_size=9), min_size=1, max_size=5))


@settings(max_examples=150, deadline=None)
@given(st.lists(groups, min_size=1, max_size=6), st.sampled_from(["tree", "padded"]), st.integers(4, 40))
def test_no_completion_is_lost_doubled_or_changed(examples, kind, budget):
    rows = [
        row(
            p,
            *cs,
            sequence_columns={"advantages": [float(i) for i in range(len(cs))]},
            token_columns={"old_logp": [[float(t) for t in c] for c in cs]},
        )
        for p, cs in examples
    ]
    flat = [(p, c, float(i)) for p, cs in examples for i, c in enumerate(cs)]
    batches = collate(rows, pad_token_id=0, layout=Layout(kind, row_tokens=budget, max_tree_tokens=2 * budget))
    seen = {}
    for batch in batches:
        tokens = split_by_sequence(batch.input_ids, batch)
        logps = split_by_sequence(batch.old_logp, batch)
        for s, where in enumerate(batch.origin):
            seen[where] = tokens[s].tolist()
            assert logps[s].tolist() == [float(t) for t in tokens[s]]
            assert batch.advantages[s].item() == flat[where][2]
            _walk_back(batch, s, *flat[where][:2])
        if kind == "tree":
            assert batch.num_tokens == batch.input_ids.numel()  # nothing is padded
    assert seen == {i: c for i, (_, c, _) in enumerate(flat)}


def _walk_back(batch, s, prompt, completion):
    """Following predictors from the last token must spell the whole sequence backwards, at decreasing positions."""
    b, t = (batch.sequence == s).nonzero()[-1].tolist()
    walked = [batch.input_ids[b, t].item()]
    position = batch.position_ids[b, t].item()
    while position > 0:
        t = batch.predictor[b, t].item()
        position -= 1
        assert batch.position_ids[b, t].item() == position
        walked.append(batch.input_ids[b, t].item())
    assert walked[::-1] == prompt + completion


def test_to_moves_every_tensor_and_keeps_the_rest():
    (batch,) = collate([row([1], [2], sequence_columns={"margin": [1.0]})], pad_token_id=0)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta"
    assert moved.columns["margin"].device.type == "meta"
    assert moved.origin == batch.origin
    assert torch.equal(batch.input_ids, torch.tensor([[1, 2]]))
