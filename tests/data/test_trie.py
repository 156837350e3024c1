"""Tries of rows: what sequences begin with is computed once at any depth, and a trained token is never shared."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import trie
from posttrain.data.forest import Layout, collate, sequences, split_by_sequence, to_rows
from posttrain.data.trie import check_segments
from posttrain.models.forward import forward, sequence_logps
from posttrain.types import Row
from tests.conftest import build_model

WIDE = Layout(row_tokens=4096)


def run(start, count):
    return [3 + (start + 7 * i) % 90 for i in range(count)]


def row(prompt, *completions, **columns):
    return Row(list(prompt), [list(c) for c in completions], [[1] * len(c) for c in completions], **columns)


def collated(rows, layout=WIDE):
    (batch,) = collate(rows, pad_token_id=0, layout=layout)
    check_segments(batch.segments, batch.input_ids.shape[1])
    return batch


def test_a_shared_system_prompt_is_computed_once():
    system = run(0, 40)
    batch = collated([row(system + run(10 + i, 5), run(50 + i, 6), run(60 + i, 4)) for i in range(3)])
    assert batch.num_tokens == 40 + 3 * (5 + 6 + 4)
    assert batch.num_sequence_tokens == 6 * 45 + 3 * 10
    assert [one.parent for one in batch.segments] == [-1, 0, 1, 1, 0, 4, 4, 0, 7, 7]


def test_a_turn_that_begins_with_another_rows_answer_runs_through_it():
    """Its tokens are trained where they were sampled, and context where the next turn reads them."""
    prompt, answer = run(0, 30), run(31, 20)
    first, second = row(prompt, answer, run(77, 5)), row(prompt + answer + run(60, 4), run(80, 6))
    for rows in ([first, second], [second, first]):
        batch = collated(rows)
        assert batch.num_tokens == 30 + 20 + 5 + 4 + 6
        assert batch.num_loss_tokens == 20 + 5 + 6
        told = {
            origin: x.tolist()
            for origin, x in zip(batch.origin, split_by_sequence(batch.input_ids, batch), strict=True)
        }
        assert [told[i] for i in range(3)] == [c for one in rows for c in one.completions]


def test_a_history_that_was_rendered_anew_forks_where_it_differs():
    thought = run(0, 24)
    first = row(thought, run(30, 40))
    cut = row(thought + run(30, 25) + run(5, 6), run(70, 5))
    batch = collated([first, cut])
    assert batch.num_tokens == 24 + 40 + 6 + 5
    assert [one.parent for one in batch.segments] == [-1, 0, 0]
    assert [batch.leaves[i].length for i in range(2)] == [64, 60]


def test_answers_that_agree_are_kept_apart():
    """Each trains its tokens with numbers of its own."""
    rows = [row(run(0, 20), run(30, 20), sequence_columns={"advantages": [a]}) for a in (1.0, -1.0)]
    batch = collated(rows)
    assert batch.num_tokens == 20 + 2 * 20
    assert batch.num_loss_tokens == 40


@pytest.mark.parametrize(
    "other",
    [
        row(run(0, 10), run(50, 4)),
        Row(run(0, 40), [run(50, 4)], [[1] * 4], prompt_mask=[0] + [1] * 39),
        Row(run(0, 40), [run(50, 4)], [[1] * 4], model_kwargs={"pixels": torch.zeros(1, 2)}),
    ],
    ids=["too little in common", "a prompt that is trained", "inputs of its own"],
)
def test_rows_that_must_be_alone_are(other):
    mine = row(run(0, 40), run(60, 5))
    batch = collated([mine, other])
    assert batch.num_tokens == 45 + len(other.prompt_ids) + 4


def test_a_layout_may_forbid_to_join_rows_and_bounds_what_they_make():
    rows = [row(run(0, 40), run(i, 10)) for i in range(4)]
    (batch,) = collate(rows, pad_token_id=0, layout=Layout(row_tokens=4096, joins_rows=False))
    assert batch.num_tokens == 4 * 50
    batches = collate(rows, pad_token_id=0, layout=Layout(row_tokens=65))
    assert sorted(one.num_tokens for one in batches) == [60, 60]


def test_answers_without_tokens_are_counted_and_lose_nothing():
    batch = collated([row(run(0, 20), [], run(30, 5), []), row(run(0, 20) + run(30, 5) + run(2, 20), [])])
    assert batch.num_sequences == 4
    assert [len(x) for x in split_by_sequence(batch.input_ids, batch)] != []
    lengths = dict(zip(batch.origin, map(len, split_by_sequence(batch.input_ids, batch)), strict=True))
    assert lengths == {0: 0, 1: 5, 2: 0, 3: 0}


@st.composite
def episodes(draw):
    """Rows whose prompts run through what other rows hold: turns, forks, shared beginnings."""
    rows = [row(run(0, draw(st.integers(16, 40))), *[run(20 + i, draw(st.integers(0, 30))) for i in range(2)])]
    for number in range(draw(st.integers(0, 6))):
        before = draw(st.sampled_from(rows))
        path = before.prompt_ids + before.completions[draw(st.integers(0, len(before.completions) - 1))]
        keep = draw(st.integers(0, len(path)))
        prompt = path[:keep] + run(number, draw(st.integers(0, 20)))
        answers = [run(40 + number + i, draw(st.integers(0, 12))) for i in range(draw(st.integers(1, 3)))]
        rows.append(row(prompt, *answers, sequence_columns={}, token_columns={}))
    return draw(st.permutations(rows))


@settings(max_examples=120, deadline=None)
@given(episodes(), st.sampled_from([1, 30, 80, 4096]))
def test_every_token_comes_back_whatever_was_folded(rows, budget):
    rows = [
        replace(
            one,
            sequence_columns={"advantages": [float(len(c)) for c in one.completions]},
            token_columns={"old_logp": [[float(t) for t in c] for c in one.completions]},
        )
        for one in rows
    ]
    flat = [(one.prompt_ids, c) for one in rows for c in one.completions]
    found = {}
    for batch in collate(rows, pad_token_id=0, layout=Layout(row_tokens=budget)):
        if batch.segments:
            check_segments(batch.segments, batch.input_ids.shape[1])
        for number, (back, origin) in enumerate(zip(sequences(batch), batch.origin, strict=True)):
            prompt, completion = flat[origin]
            assert (back.prompt_ids, back.completions) == (prompt, [completion])
            # The first token of a sequence without a prompt follows nothing.
            assert back.loss_masks == [[int(bool(prompt or i)) for i in range(len(completion))]]
            assert back.sequence_columns == {"advantages": [float(len(completion))]}
            assert back.token_columns == {"old_logp": [[float(t) for t in completion]]}
            assert [c for r in batch.path(number) for c in r] == walked(batch, number)
            found[origin] = True
        assert sum(len(one.completions) for one in to_rows(batch)) == batch.num_sequences
    assert len(found) == len(flat)


def walked(batch, number):
    """Columns of a sequence, by following predictors back from its last token."""
    leaf = batch.leaves[number]
    if leaf.segment < 0 or not leaf.length:
        return []
    segment = batch.segments[leaf.segment]
    column = segment.start + leaf.length - 1 - segment.position
    columns = [column]
    while batch.position_ids[segment.row, column] > 0:
        column = int(batch.predictor[segment.row, column])
        columns.append(column)
    return columns[::-1]


@settings(max_examples=10, deadline=None)
@given(episodes())
def test_log_probs_of_folded_rows_equal_each_sequence_alone(rows):
    model = build_model(97).eval()
    truth = sequence_logps(model, rows)
    for batch in collate(rows, pad_token_id=0, layout=WIDE):
        with torch.no_grad():
            logp = forward(model, batch).logp
        for origin, found in zip(batch.origin, split_by_sequence(logp, batch), strict=True):
            wanted = truth[origin]
            assert torch.allclose(found, wanted, atol=1e-5)


def test_gradients_of_folded_rows_equal_each_row_alone():
    rows = [
        row(run(0, 30), run(31, 20), run(77, 5)),
        row(run(0, 30) + run(31, 20) + run(60, 4), run(80, 6)),
        row(run(0, 30) + run(31, 18) + run(8, 7), run(3, 9), run(4, 3)),
    ]
    grads = []
    for layout in (WIDE, Layout(row_tokens=1), Layout("padded", row_tokens=500)):
        model = build_model(97)
        for batch in collate(rows, pad_token_id=0, layout=layout):
            forward(model, batch).logp.square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert collated(rows).num_tokens == 30 + 20 + 5 + 4 + 6 + 7 + 9 + 3
    for other in grads[1:]:
        assert (grads[0] - other).abs().max() <= 1e-5 * other.abs().max()


def test_trees_are_in_the_order_of_their_first_rows():
    members = [trie.Member(row(run(n, 20 + n), [1]), n, 0, n) for n in (3, 1, 2, 0)]
    members = [trie.Member(one.row, number, 0, number) for number, one in enumerate(members)]
    assert [tree.members[0].number for tree in trie.grow(members, most=1000, joined=0)] == [0, 1, 2, 3]


def test_a_long_group_is_split_where_its_prompt_is_a_small_part_of_it():
    """Memory grows with a pass; what is computed twice for it is a tenth at most."""
    layout = Layout(row_tokens=200)
    short = collate([row(run(0, 40), *(run(9 * i, 100) for i in range(8)))], pad_token_id=0, layout=layout)
    assert sorted(batch.num_tokens for batch in short) == [240, 340, 340]
    assert sorted(n for batch in short for n in batch.origin) == list(range(8))
    long = collate([row(run(0, 400), *(run(9 * i, 100) for i in range(8)))], pad_token_id=0, layout=layout)
    assert [batch.num_tokens for batch in long] == [1200]


def test_a_long_group_whose_loss_compares_its_completions_stays_whole():
    group = row(run(0, 40), *(run(9 * i, 100) for i in range(8)))
    (batch,) = collate([group], pad_token_id=0, layout=Layout(row_tokens=200), whole_rows=True)
    assert batch.num_tokens == 840
    (batch,) = collate([group], pad_token_id=0, layout=Layout(row_tokens=200, dense_mask=True))
    assert batch.num_tokens == 840
