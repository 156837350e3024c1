"""Pairs as text: flipped ones, those their scores contradict, and those that hardly differ."""

from __future__ import annotations

import json
import random

import datasets
import pytest

from posttrain.checks.pairs import PairScan, nearly_equal, prompt_left_over, scan_pairs, score_columns
from posttrain.checks.registry import Context
from posttrain.checks.rows import SUSPECTS, note_suspects


def pair(index, *, flipped=False, **more):
    sides = [f"right answer {index}", f"another one {index}"]
    chosen, rejected = reversed(sides) if flipped else sides
    return {"prompt": f"question {index}", "chosen": chosen, "rejected": rejected, **more}


def test_pairs_that_appear_both_ways_round_are_found_with_their_rows():
    rows = [pair(i) for i in range(50)] + [pair(3, flipped=True), pair(7, flipped=True), pair(9)]
    scan = scan_pairs(rows)
    assert scan.swapped == [3, 7, 50, 51]
    (found,) = scan.findings()
    assert found.code == "PT-D035" and found.what.startswith(
        "4 of 53 rows (7.55 %) appear with chosen and rejected swapped"
    )
    assert "suspect_pairs.jsonl" in found.fix and "label_smoothing" in found.fix
    assert set(scan.suspects.values()) == {"the pair also appears with both sides swapped"}
    assert scan_pairs([pair(i) for i in range(50)]).findings() == []


@pytest.mark.parametrize("name", ["question", "Instruction"])
def test_a_column_that_looks_like_the_prompt_of_text_pairs_is_named(name):
    rows = [{name: f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(3)]
    context = Context("dpo", None, train_dataset=datasets.Dataset.from_list(rows))
    (found,) = prompt_left_over(context)
    assert found.code == "PT-D037" and f"'{name}'" in found.what and f"rename_column('{name}', 'prompt')" in found.fix
    # The answers hold the question, a prompt is there, or the column is something else.
    whole = [row | {"chosen": row[name] + row["chosen"], "rejected": row[name] + row["rejected"]} for row in rows]
    prompted = [row | {"prompt": row[name]} for row in rows]
    other = [{"source": row[name], "chosen": "a", "rejected": "b"} for row in rows]
    for fine in (whole, prompted, other):
        assert not list(prompt_left_over(Context("dpo", None, train_dataset=datasets.Dataset.from_list(fine))))


def test_scores_that_say_the_opposite_are_counted():
    rows = [pair(i, chosen_score=5, rejected_score=4 if i % 10 else 9) for i in range(100)]
    scan = scan_pairs(rows, score_columns(rows[0]))
    assert scan.contradicted == list(range(0, 100, 10))
    (found,) = scan.findings()
    assert found.code == "PT-D034" and "10 of 100 rows (10 %) contradict their own scores" in found.what
    assert "Estimated flip rate 10 %" in found.what and "label_smoothing=0.10" in found.fix


def test_score_columns_go_by_both_orders_of_their_names():
    assert score_columns(["chosen_rating", "rejected_rating"]) == ("chosen_rating", "rejected_rating")
    assert score_columns(["score_chosen", "score_rejected", "x"]) == ("score_chosen", "score_rejected")
    assert score_columns(["chosen_score", "score_rejected"]) is None


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_the_flip_rate_is_estimated_from_pairs_that_were_judged_twice(rate):
    """Each of 4000 pairs is judged twice, each judgement flipped with the same probability."""
    draw = random.Random(0)
    rows = [pair(i, flipped=draw.random() < rate) for i in range(4000) for _ in range(2)]
    low, high = scan_pairs(rows).flip_rate()
    assert low == high == pytest.approx(rate, abs=0.02)
    assert PairScan(total=3).flip_rate() is None


def test_answers_that_differ_by_a_word_in_a_hundred_are_nearly_equal():
    text = " ".join(f"word{i}" for i in range(100))
    assert nearly_equal(text, text.replace("word50", "w0rd50").upper())
    assert not nearly_equal(text, text.replace("word5", "something"))
    assert not nearly_equal("4", "5") and not nearly_equal("yes, I can", "no, I cannot")
    scan = scan_pairs([{"chosen": text, "rejected": text + "."}, pair(1)])
    assert scan.near == [0] and [f.code for f in scan.findings()] == ["PT-D033"]


def test_suspects_whose_texts_hold_other_line_ends_are_kept_when_more_come(tmp_path):
    for reason in ("a", "b", "a"):
        note_suspects(str(tmp_path), reason, [{"row": 0, "prompt": "one\u2028two\x85three"}])
    found = [json.loads(line) for line in (tmp_path / SUSPECTS).read_text(encoding="utf-8").split("\n") if line]
    assert sorted(line["reason"] for line in found) == ["a", "b"]
