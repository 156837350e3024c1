"""Preference rows as ids: the prompt ends where the tokens of all answers part, and everything lost is counted."""

import datasets
import pytest

from posttrain.data.preference import AnswerOptions, answer_rows, prepare_answers
from posttrain.errors import DataError
from tests.wordings import raises

U = [{"role": "user", "content": "What is 2?"}]


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(text):
    return [{"role": "assistant", "content": text}]


def prepared(rows, tokenizer, **options):
    keep = options.pop("keep", ())
    data = datasets.Dataset.from_list(rows)
    return prepare_answers(data, tokenizer, AnswerOptions(**options), keep=keep)


def test_prompt_and_answers_join_to_what_was_said(tiny_tokenizer):
    rows = [{"prompt": "Say a number: ", "chosen": "two", "rejected": "three"}]
    (row,), _ = prepared(rows, tiny_tokenizer)
    for side in ("chosen", "rejected"):
        whole = tiny_tokenizer.decode(row["prompt_ids"] + row[f"{side}_ids"])
        assert whole == rows[0]["prompt"] + rows[0][side] + "<|im_end|>"


def test_a_token_that_merges_over_the_boundary_belongs_to_the_answers(tiny_tokenizer):
    """'the' + 'se' is one token in some tokenizers: the prompt is cut at the common prefix over both answers."""
    (row,), report = prepared([{"prompt": "What is the", "chosen": "se", "rejected": " sum"}], tiny_tokenizer)
    assert tiny_tokenizer.decode(row["prompt_ids"] + row["chosen_ids"]) == "What is these<|im_end|>"
    alone = tiny_tokenizer("What is the")["input_ids"]
    assert row["prompt_ids"] == alone[: len(row["prompt_ids"])]
    assert report.diverged == int(len(row["prompt_ids"]) < len(alone))


def test_conversations_share_the_generation_prompt(tiny_tokenizer):
    (row,), _ = prepared([{"prompt": U, "chosen": say("two"), "rejected": say("three")}], tiny_tokenizer)
    assert tiny_tokenizer.decode(row["prompt_ids"]).endswith("assistant\n")
    assert tiny_tokenizer.decode(row["chosen_ids"]).startswith("two<|im_end|>")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": U + say("two"), "rejected": U + say("three")},
        {"prompt": U, "chosen": U + say("two"), "rejected": U + say("three")},
        {"prompt": "What is 2?", "chosen": U + say("two"), "rejected": U + say("three")},
    ],
)
def test_p24_p26_a_prompt_that_is_implicit_or_repeated_is_read_once(tiny_tokenizer, row):
    (got,), _ = prepared([row], tiny_tokenizer)
    (explicit,), _ = prepared([{"prompt": U, "chosen": say("two"), "rejected": say("three")}], tiny_tokenizer)
    assert got == explicit


def test_the_end_of_answers_is_cut_or_the_beginning_of_the_shared_prompt(tiny_tokenizer):
    rows = [{"prompt": "What is the sum of two numbers? ", "chosen": "abcdef", "rejected": "xy"}]
    (whole,), _ = prepared(rows, tiny_tokenizer)
    p, c = len(whole["prompt_ids"]), len(whole["chosen_ids"])
    limit = p + c - 2
    (start,), report = prepared(rows, tiny_tokenizer, max_length=limit)
    assert start["chosen_ids"] == whole["chosen_ids"][: c - 2]
    assert start["rejected_ids"] == whole["rejected_ids"]
    assert report.truncated == 1
    (end,), _ = prepared(rows, tiny_tokenizer, max_length=limit, truncation_mode="keep_end")
    assert end["prompt_ids"] == whole["prompt_ids"][2:]
    assert end["chosen_ids"] == whole["chosen_ids"]


def test_p2_p9_equal_and_full_rows_are_dropped_and_counted(tiny_tokenizer, caplog):
    good = {"prompt": "q ", "chosen": "a", "rejected": "b"}
    equal = {"prompt": "q ", "chosen": "c", "rejected": "c"}
    full = {"prompt": "long " * 30, "chosen": "a", "rejected": "b"}
    rows, report = prepared([good] * 8 + [equal, full], tiny_tokenizer, max_length=20)
    assert len(rows) == 8
    assert report.dropped == {"whose prompt fills max_length": 1, "with equal answers": 1}
    assert "dropped 2 of 10 rows" in caplog.text
    rows, _ = prepared([good, good, equal, equal], tiny_tokenizer)  # However many they are.
    assert len(rows) == 2 and "dropped 2 of 4 rows" in caplog.text
    for options in ({"max_length": 20}, {"max_length": 1, "truncation_mode": "keep_end"}):
        with raises(DataError, "1"):
            prepared([full], tiny_tokenizer, **options)


def test_p1_rows_whose_prompt_is_lost_are_refused(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if add_generation_prompt %}now think {% endif %}" + tiny_tokenizer.chat_template
    rows = [{"prompt": U, "chosen": say("two"), "rejected": say("three")}] * 3
    with raises(DataError, "3"):
        prepared(rows, tiny_tokenizer)


def test_p1_a_prompt_that_the_assistant_began_is_continued_and_opens_no_turn_of_its_own(tiny_tokenizer):
    """With a generation header after the begun turn, the prompt would be no prefix of prompt and answer."""
    begun = [*U, *say("The number is")]
    rows = [{"prompt": begun, "chosen": say("two"), "rejected": say("three")}]
    (row,), report = prepared(rows, tiny_tokenizer)
    assert report.diverged == 0
    assert tiny_tokenizer.decode(row["prompt_ids"]).endswith("<|im_start|>assistant\nThe number is")
    whole = tiny_tokenizer.apply_chat_template(begun + say("two"), tokenize=False)
    assert tiny_tokenizer.decode(row["prompt_ids"] + row["chosen_ids"]) == whole


CALLED = [
    {"role": "assistant", "content": "I ask."},
    {"role": "user", "content": "It is two."},
    {"role": "assistant", "content": "So two."},
]


@pytest.mark.parametrize("markers", [False, True])
def test_p25_turns_of_others_within_an_answer_are_told_and_masked_where_asked(tiny_tokenizer, caplog, markers):
    if markers:
        tiny_tokenizer.chat_template = MARKED
    rows = [
        {"prompt": U, "chosen": CALLED, "rejected": say("three")},
        {"prompt": U, "chosen": say("two"), "rejected": say("one")},
    ]
    data, report = prepared(rows, tiny_tokenizer)
    assert report.inner == 1
    assert "in 1 of 2 rows, an answer contains user or tool turns" in caplog.text
    assert "chosen_mask" not in data.column_names
    caplog.clear()
    data, _ = prepared(rows, tiny_tokenizer, mask_inner_turns=True)
    assert not caplog.text
    called, plain = answer_rows(data, ("chosen", "rejected"))
    said = [i for i, kept in zip(called.completions[0], called.loss_masks[0], strict=True) if kept]
    assert tiny_tokenizer.decode(said) == "I ask.<|im_end|>So two.<|im_end|>"
    assert all(all(mask) for mask in (called.loss_masks[1], *plain.loss_masks))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_p25_the_mask_is_cut_as_the_answer_is(tiny_tokenizer, mode):
    options = {"mask_inner_turns": True, "truncation_mode": mode}
    whole = answer_rows(
        prepared([{"prompt": U, "chosen": CALLED, "rejected": say("three")}], tiny_tokenizer, **options)[0], ("chosen",)
    )[0]
    size = len(whole.prompt_ids) + len(whole.completions[0])
    (row,), _ = prepared(
        [{"prompt": U, "chosen": CALLED, "rejected": say("three")}], tiny_tokenizer, max_length=size - 3, **options
    )
    kept = slice(None, -3) if mode == "keep_start" else slice(-len(row["chosen_ids"]), None)
    assert row["chosen_ids"] == whole.completions[0][kept]
    assert row["chosen_mask"] == whole.loss_masks[0][kept]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "q", "chosen": "a"}, r"\['rejected'\] is not in \['chosen', 'prompt'\]"),
        ({"prompt": U, "chosen": "a", "rejected": "b"}, "column 'chosen' is 'a'"),
        (
            {"prompt": U, "chosen": U, "rejected": say("b")},
            "role 'user'. The last message of an answer must have role 'assistant'",
        ),
    ],
)
def test_bad_rows_are_named(tiny_tokenizer, row, match):
    with pytest.raises(DataError, match=match):
        prepared([row], tiny_tokenizer)


def test_other_branches_and_kept_columns(tiny_tokenizer):
    rows = [{"prompt": "q ", "completion": "a", "label": True, "junk": 1}]
    data, _ = prepared(rows, tiny_tokenizer, branches=("completion",), keep=("label",))
    assert set(data.column_names) == {"prompt_ids", "completion_ids", "label"}
    again, _ = prepare_answers(data, tiny_tokenizer, AnswerOptions(("completion",)))
    assert again is data


def test_precomputed_columns_become_sequence_columns(tiny_tokenizer):
    example = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7], "a": -1.0, "b": -2.0}
    (row,) = answer_rows([example], ("chosen", "rejected"), {"ref_logps": ("a", "b")})
    assert row.sequence_columns == {"ref_logps": [-1.0, -2.0]}
    with raises(DataError, "row 0", "rejected_ids"):
        answer_rows([example | {"rejected_ids": []}], ("chosen", "rejected"))


def test_a_prompt_whose_answers_stand_beside_it_may_end_with_any_role(tiny_tokenizer):
    asked = {"role": "system", "content": "Be kind."}
    sides = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "Hello."), ("rejected", "No."))
    }
    rows, _ = prepared([{"prompt": [asked], **sides}], tiny_tokenizer)
    head = tiny_tokenizer.apply_chat_template([asked], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert rows[0]["prompt_ids"] == head
