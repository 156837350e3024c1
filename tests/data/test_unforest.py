"""A laid-out batch back as rows: nothing is lost on the way there and back."""

import pytest
import torch

from posttrain.data.forest import Layout, collate, halves, to_rows, unbatched_answers
from posttrain.errors import DataError
from posttrain.types import Row
from tests.losses.properties import toy_rows

TREE, PADDED = Layout("tree", row_tokens=64), Layout("padded", row_tokens=10_000)


def flat(rows):
    """Every completion with all that belongs to it, in an order of its own."""
    found = []
    for row in rows:
        for i, ids in enumerate(row.completions):
            numbers = {k: [round(x, 5) for x in v[i]] for k, v in row.token_columns.items()}
            single = {k: round(v[i], 5) for k, v in row.sequence_columns.items()}
            found.append((tuple(row.prompt_ids), tuple(ids), tuple(row.loss_masks[i]), str(numbers), str(single)))
    return sorted(found)


@pytest.mark.parametrize("layout", [TREE, PADDED, Layout("tree", row_tokens=1)])
def test_rows_come_back_as_they_went(layout):
    rows = toy_rows()
    batches = collate(rows, pad_token_id=0, layout=layout)
    assert flat([row for batch in batches for row in to_rows(batch)]) == flat(rows)


def test_a_trained_prompt_keeps_its_mask():
    row = Row([5, 6, 7], [[1, 2]], [[1, 1]], prompt_mask=[0, 1, 1])
    (batch,) = collate([row], pad_token_id=0, layout=TREE)
    (back,) = to_rows(batch)
    assert back.prompt_mask == [0, 1, 1]
    assert halves(batch, pad_token_id=0, layout=TREE) == [batch]


@pytest.mark.parametrize("layout", [TREE, PADDED])
def test_halves_hold_every_completion_once_and_are_smaller(layout):
    rows = toy_rows(groups=4)
    for batch in collate(rows, pad_token_id=0, layout=layout):
        parts = halves(batch, pad_token_id=0, layout=layout)
        assert len(parts) >= 2
        assert flat([row for part in parts for row in to_rows(part)]) == flat(to_rows(batch))
        assert max(part.input_ids.numel() for part in parts) < batch.input_ids.numel()
        assert sum(part.num_sequences for part in parts) == batch.num_sequences
        assert sum(part.num_loss_tokens for part in parts) == batch.num_loss_tokens


def test_one_tree_is_divided_between_its_completions_only_where_they_are_not_compared():
    (batch,) = collate(toy_rows(groups=1), pad_token_id=0, layout=TREE)
    parts = halves(batch, pad_token_id=0, layout=TREE)
    assert [part.num_sequences for part in parts] == [2, 2]
    assert halves(batch, pad_token_id=0, layout=TREE, whole_rows=True) == [batch]


def test_pairs_stay_together():
    (batch,) = collate(toy_rows(groups=3), pad_token_id=0, layout=Layout("tree", row_tokens=1000), whole_rows=True)
    parts = halves(batch, pad_token_id=0, layout=TREE, whole_rows=True)
    assert all(part.num_sequences % 4 == 0 for part in parts)
    padded = collate(toy_rows(), pad_token_id=0, layout=PADDED, whole_rows=True)
    assert halves(padded[0], pad_token_id=0, layout=PADDED, whole_rows=True) == [padded[0]]


def test_what_cannot_be_divided_comes_back():
    (single,) = collate([Row([1, 2], [[3]], [[1]])], pad_token_id=0, layout=TREE)
    assert halves(single, pad_token_id=0, layout=TREE) == [single]
    row = Row([1, 2], [[3], [4]], [[1], [1]], model_kwargs={"pixel_values": torch.ones(1)})
    (image,) = collate([row], pad_token_id=0, layout=TREE)
    assert halves(image, pad_token_id=0, layout=TREE) == [image]


def test_answers_of_a_pair_keep_their_order_where_the_first_is_empty():
    """In the trie an answer without tokens comes last; of a pair the first one is the chosen one all the same."""
    pairs = [Row(list(range(n, n + 20)), [[], [5, 6]], [[], [1, 1]], {"rank": [0.0, 1.0]}) for n in (3, 40)]
    (batch,) = collate(pairs, pad_token_id=0, layout=Layout("tree", row_tokens=1000), whole_rows=True)
    assert [row.completions for row in to_rows(batch)] == [[[], [5, 6]]] * 2
    for part in halves(batch, pad_token_id=0, layout=TREE, whole_rows=True):
        assert part.grouped(part.columns["rank"], 2).tolist() == [[0.0, 1.0]]


def test_a_collator_of_answers_that_does_not_tell_their_prompts_is_refused():
    """Its rows begin with the prompt, which would stand before them once more, and be trained as an answer."""
    examples = [{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}]
    batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 8]]), "attention_mask": torch.ones(2, 3)}
    with pytest.raises(DataError, match="no completion_mask"):
        unbatched_answers(batch, examples, ("chosen", "rejected"))
    told = unbatched_answers(
        {**batch, "completion_mask": torch.tensor([[0, 0, 1]] * 2)}, examples, ("chosen", "rejected")
    )
    assert [told[0][name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [[5, 6], [7], [8]]
