"""Preference rows: where the prompt ends, and pairs taken apart."""

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from posttrain import DPOConfig, DPOTrainer
from posttrain.data.formats import undecoded, united
from posttrain.data.preference import (
    extract_and_unpair,
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from posttrain.errors import DataError, PreflightError
from posttrain.values import strip_none
from tests.conftest import build_model
from tests.wordings import raises

U, A = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
B = {"role": "assistant", "content": "b"}
STRING, NOTHING = datasets.Value("string"), datasets.Value("null")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue", "The sky is black", "The sky is"),
        ("abc ", "xyz", ""),
        ("abc", "abcdef", ""),
        ("The sky is blue", "The sky is blue today", "The sky is"),
        ("2+2= 4", "2+2= 5", "2+2="),
        ("天空是蓝色", "天空是黑色", "天空是"),
        ([U, A], [U, B], [U]),
        ([U, A], [U, A, U, B], [U]),
    ],
)
def test_the_shared_prompt_ends_at_a_word_or_a_message(chosen, rejected, prompt):
    out = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert out["prompt"] == prompt
    assert out["prompt"] + out["chosen"] == chosen
    assert out["prompt"] + out["rejected"] == rejected


@example("  a", "  ,")
@example("x   a", "x   b")
@given(st.text("ab ,蓝", min_size=1, max_size=12), st.text("ab ,蓝", min_size=1, max_size=12))
def test_nothing_is_lost_and_no_answer_is_empty(chosen, rejected):
    if chosen == rejected:
        return
    out = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert (out["prompt"] + out["chosen"], out["prompt"] + out["rejected"]) == (chosen, rejected)
    assert out["chosen"] and out["rejected"]
    assert not out["prompt"].endswith(" ")


@pytest.mark.parametrize(
    ("chosen", "rejected", "match"),
    [
        ("a", "a", "no preference"),
        ("", "a", "chosen is empty"),
        ("a", "", "rejected is empty"),
        ([U], [A], "first message"),
    ],
)
def test_rows_without_a_pair_are_refused(chosen, rejected, match):
    with pytest.raises(DataError, match=match):
        extract_prompt({"chosen": chosen, "rejected": rejected})


def test_a_prompt_that_the_answers_repeat_is_taken_off_them():
    assert maybe_extract_prompt({"prompt": [U], "chosen": [U, A], "rejected": [U, B]}) == {
        "prompt": [U],
        "chosen": [A],
        "rejected": [B],
    }
    row = {"prompt": "q", "chosen": [U, A], "rejected": [U, B], "score": 1}
    assert maybe_extract_prompt(row) == {"prompt": [U], "chosen": [A], "rejected": [B], "score": 1}
    for untouched in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        {"text": "a"},
    ):
        assert maybe_extract_prompt(untouched) == untouched


def pairs(n=3):
    return datasets.Dataset.from_dict(
        {"prompt": list("pqr")[:n], "chosen": list("abc")[:n], "rejected": list("xyz")[:n]}
    )


@pytest.mark.parametrize("stream", [False, True])
def test_unpairing_puts_both_answers_side_by_side(stream):
    data = pairs().to_iterable_dataset() if stream else pairs()
    rows = list(maybe_unpair_preference_dataset(data, num_proc=1, desc="unpair"))
    assert [(r["prompt"], r["completion"], r["label"]) for r in rows] == [
        ("p", "a", True), ("p", "x", False), ("q", "b", True), ("q", "y", False), ("r", "c", True), ("r", "z", False),
    ]  # fmt: skip


def test_the_other_order_and_untouched_data():
    assert unpair_preference_dataset(pairs(), interleave=False)["completion"][:] == list("abcxyz")
    plain = datasets.Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})
    assert maybe_unpair_preference_dataset(plain) is plain
    both = datasets.DatasetDict(train=pairs(), test=pairs(1))
    assert len(unpair_preference_dataset(both)["test"]) == 2


def test_columns_that_would_be_overwritten_are_named():
    with raises(DataError, "'label'"):
        unpair_preference_dataset(pairs().add_column("label", [1, 2, 3]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{"prompt": [U]}, {}])
def test_a_key_that_other_messages_have_hides_no_shared_prompt(given, stream):
    """Arrow gives every message of a column the keys of all: of a prompt that both columns hold, one has a None more."""
    data = datasets.Dataset.from_list([given | {"chosen": [U, A | {"thinking": "t"}], "rejected": [U, B]}])
    assert data[0]["chosen"][0] != data[0]["rejected"][0]
    rows = [strip_none(row) for row in extract_and_unpair(data.to_iterable_dataset() if stream else data)]
    assert rows == [
        {"prompt": [U], "completion": [A | {"thinking": "t"}], "label": True},
        {"prompt": [U], "completion": [B], "label": False},
    ]
    assert [strip_none(row) for row in data.map(maybe_extract_prompt)] == [
        {"prompt": [U], "chosen": [A | {"thinking": "t"}], "rejected": [B]}
    ]


LATE = 1001  # `map` takes a new column's type from 1,000 rows.


@pytest.mark.parametrize("start", [{"prompt": [U]}, {}, {"prompt": [U | {"name": "n"}]}])
def test_a_key_may_come_first_in_a_late_row(start):
    pair = start | {"chosen": [U, A], "rejected": [U, B]} if start == {} else start | {"chosen": [A], "rejected": [B]}
    late = [U | {"thinking": "t"}, U | {"thinking": "t", "weight": 1.5}]
    last = {"chosen": [*late, A], "rejected": [*late, B | {"tool": [{"name": "n"}]}]}
    data = datasets.Dataset.from_list([*[pair] * LATE, last])
    rows = extract_and_unpair(data)
    assert len(rows) == 2 * (LATE + 1)
    assert strip_none(rows[-2]) == {"prompt": late, "completion": [A], "label": True}
    assert strip_none(rows[-1]) == {"prompt": late, "completion": [last["rejected"][-1]], "label": False}
    assert strip_none(rows[0]) == {"prompt": start.get("prompt", [U]), "completion": [A], "label": True}


@pytest.mark.parametrize(
    ("kinds", "one"),
    [
        ([{"a": STRING}, {"b": STRING}], {"a": STRING, "b": STRING}),
        ([NOTHING, STRING, NOTHING], STRING),
        ([datasets.List({"a": NOTHING}), datasets.List({"a": STRING})], datasets.List({"a": STRING})),
        ([STRING, datasets.List(STRING)], None),
        ([datasets.List({"a": STRING}), datasets.List({"a": datasets.Value("int64")})], None),
        ([datasets.Image(), datasets.Image()], datasets.Image()),
    ],
)
def test_a_type_that_holds_all_of_several(kinds, one):
    assert united(*kinds) == one


def test_two_answers_that_differ_by_a_key_without_a_value_are_equal():
    with pytest.raises(DataError, match="no preference"):
        extract_prompt({"chosen": [U, A | {"thinking": None}], "rejected": [U, A]})


def test_images_of_pairs_stay_the_bytes_that_they_were():
    """A JPEG that is read to be written anew loses some of what it showed."""
    held = {"bytes": b"read by nobody", "path": None}
    rows = datasets.Dataset.from_list([{"chosen": [U, A], "rejected": [U, B], "images": [held]}])
    data = rows.cast_column("images", datasets.List(datasets.Image()))
    for rows in (data, data.to_iterable_dataset()):
        made = undecoded(extract_and_unpair(rows))
        assert [row["images"] for row in made] == [[held]] * 2


def test_pairs_whose_prompt_column_has_another_name_get_their_columns_named():
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    with pytest.raises(DataError, match=r"columns \['chosen', 'question', 'rejected'\]"):
        extract_prompt({"question": "Is it?", "chosen": chosen, "rejected": rejected})


def test_a_text_prompt_beside_answers_of_messages_is_named_as_that():
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    with raises(DataError, "column 'prompt' is text ('What is 1?')", "convert the prompt to messages"):
        maybe_extract_prompt({"prompt": "What is 1?", **answers})


def test_a_list_of_texts_as_answer_is_refused_by_the_data_checks(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": f"q {i}", "chosen": "a", "rejected": ["b"]} for i in range(8)])
    with pytest.raises(PreflightError, match="a message of `rejected` without a role"):
        DPOTrainer(
            build_model(len(tiny_tokenizer)), args=DPOConfig(str(tmp_path), use_cpu=True, report_to=[]), train_dataset=rows,
            processing_class=tiny_tokenizer,
        )  # fmt: skip
