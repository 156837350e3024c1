"""Preparing supervised rows: what bad input does, by row number, and what a report counts."""

import datasets
import pytest

from posttrain.data.sft import SupervisedOptions, document_rows, label_batch, prepare_sft_dataset
from posttrain.errors import ArgumentTypeError, DataError, ModelError
from tests.wordings import raises


def prepare(rows, tokenizer, **options):
    return prepare_sft_dataset(datasets.Dataset.from_list(rows), tokenizer, SupervisedOptions(**options))


def test_a_row_of_two_hundred_thousand_tokens_is_cut_and_told(tiny_tokenizer, caplog):
    long = "0 1 2 3 " * 50_000
    (row, short), report = prepare([{"text": long}, {"text": "a"}], tiny_tokenizer, max_length=64)
    assert len(row["input_ids"]) == 64
    assert report.truncated == 1
    assert report.cut_tokens > 199_000
    assert "1 of 2 rows were truncated to max_length=64" in caplog.text
    assert short["input_ids"][-1] == tiny_tokenizer.eos_token_id


def test_lone_surrogates_are_refused_by_row_before_a_stream_trains(tiny_tokenizer):
    # Arrow itself refuses them; a generator of Python strings reaches the tokenizer.
    def refused(*rows):
        stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
        with raises(DataError, "row 1", "ud800") as told:
            prepare_sft_dataset(stream, tiny_tokenizer, SupervisedOptions())
        return str(told.value)

    assert "text.encode('utf-8', 'replace')" in refused({"text": "fine"}, {"text": "bad \ud800"})
    turns = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in ("a", "bad \ud800")]
    refused(*({"messages": messages} for messages in turns))
    refused(*({"prompt": messages[:1], "completion": messages[1:]} for messages in turns))


def test_a_template_that_raises_names_the_row(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with the user') }}{% endif %}{{ messages[0].content }}"
    good, bad = [{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]
    with raises(DataError, "row 1"):
        prepare([{"messages": good}, {"messages": bad}], tiny_tokenizer)


def test_a_template_that_is_no_jinja_is_told_by_line(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% for m in messages %}\n{{ m['content'] "
    with raises(ModelError, "2", "chat_template_path"):
        prepare([{"messages": [{"role": "user", "content": "q"}]}], tiny_tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dataset_where_every_row_is_filtered_out_is_refused_with_the_counts_why(tiny_tokenizer, stream):
    rows = [{"prompt": "word " * 60, "completion": "a"}] * 3 + [{"prompt": "q", "completion": ""}]
    data = datasets.Dataset.from_list(rows)
    data = data.to_iterable_dataset() if stream else data
    of = "the first 4 rows of the train dataset are all" if stream else "all 4 rows of the train dataset are"
    match = rf"{of} dropped: 3 truncated at max_length before .*token, 1 with an empty completion"
    with pytest.raises(DataError, match=match):
        prepare_sft_dataset(data, tiny_tokenizer, SupervisedOptions(max_length=16))


def test_rows_are_dropped_by_reason(tiny_tokenizer, caplog):
    ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    _, report = prepare([{"messages": [ask]}, {"messages": [ask, answer]}], tiny_tokenizer, assistant_only_loss=True)
    assert report.dropped == {"without an assistant turn": 1}
    assert "dropped 1 of 2 rows (1 without an assistant turn)." in caplog.text
    assert prepare([{"text": ""}, {"text": "a"}], tiny_tokenizer)[1].dropped == {"empty": 1}
    given = [{"input_ids": [5, 6], "completion_mask": [1, 0]}, {"input_ids": [5, 6], "completion_mask": [0, 1]}]
    assert prepare(given, tiny_tokenizer)[1].dropped == {"without a trained token": 1}


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"text": 3}, r"row 1: column 'text' must be a string, not int: '3'"),
        ({"text": None}, r"row 1: the row needs one of: .*Columns \['text'\] are None in this row"),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]}, "row 1: prompt and completion .*str and list"),
        ({"messages": [{"role": "user", "text": "q"}]}, r"row 1: message 0 \(role 'user'\) has no content. .*\['role', 'text'\]"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"row 1: message 0 \(role 'assistant'\) has no content"),
        ({"messages": [{"content": "q"}]}, "row 1: column 'messages' must be a list of messages with a role"),
        ({"messages": [{"role": "user", "content": "q"}, "a"]}, "row 1: message 1 must be a mapping with a role .* it is str"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": "[{"}, "row 1: column 'tools' contains text that is not valid JSON"),
        ({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {"tokenize": 1}}, "sets \\['tokenize'\\], which"),
        ({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": "x"}, "row 1: .*must be a mapping .* str: 'x'"),
        ({"input_ids": [5, 9999]}, r"row 1: column 'input_ids' contains the id 9999, but the tokenizer's ids are 0 to"),
        ({"input_ids": [5, -3]}, r"row 1: column 'input_ids' contains the id -3"),
        ({"input_ids": [5.0, 3.5]}, r"row 1: .*integers\), but it contains '5.0'"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, "row 1: column 'labels' has 6 at position 0, but the token there is 5. .*not shift"),
    ],
)  # fmt: skip
def test_bad_rows_say_where_what_and_how_to_fix_it(tiny_tokenizer, row, match):
    good = {k: v for k, v in {"messages": [{"role": "user", "content": "q"}], "text": "a"}.items() if k in row}
    good = good or ({"input_ids": [5, 6]} if "input_ids" in row else {"prompt": "q", "completion": "a"})
    batch = {name: [good.get(name), row.get(name)] for name in {**good, **row}}
    with pytest.raises(DataError, match=match):
        label_batch(batch, [0, 1], tiny_tokenizer, SupervisedOptions())


def test_an_empty_conversation_is_called_empty_and_not_plain_text(tiny_tokenizer):
    good = {"messages": [{"role": "user", "content": "q"}]}
    for odd, said in (([], r"\[\]"), (None, "None")):
        with pytest.raises(
            DataError, match=rf"row 1, column 'messages': it is {said}, but every row needs .*dataset\.filter"
        ):
            prepare([good, {"messages": odd}], tiny_tokenizer)


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_given_labels_do_not_train_what_a_mask_beside_them_leaves_out(tiny_tokenizer, mask):
    """As in TRL's collator: a token is trained where labels and masks say so."""
    end = tiny_tokenizer.eos_token_id
    row = {"input_ids": [5, 6, 7, end], "labels": [5, -100, 7, end], mask: [0, 1, 0, 1]}
    data, report = prepare([row], tiny_tokenizer)
    assert data[0]["labels"] == [-100, -100, -100, end] and report.trained_tokens == 1


def test_formatting_that_fails_or_gives_no_text_is_told_by_row(tiny_tokenizer):
    def formatted(function):
        return prepare_sft_dataset(datasets.Dataset.from_list([{"x": "a"}]), tiny_tokenizer, formatting_func=function)

    with raises(DataError, "row 0", "formatting_func", "'a'"):
        formatted(lambda row: [row["x"]])
    with raises(DataError, "row 0", "formatting_func", "'y'", "has the columns ['"):
        formatted(lambda row: row["y"])


def test_a_formatting_function_of_batches_gives_one_text_per_row(tiny_tokenizer):
    def batched(rows):
        return [f"Q: {rows['q'][i]} A: {rows['a'][i]}" for i in range(len(rows["q"]))]

    def single(row):
        return f"Q: {row['q']} A: {row['a']}"

    data = datasets.Dataset.from_list([{"q": "one", "a": "two"}, {"q": "three", "a": "four"}])
    got, expected = (prepare_sft_dataset(data, tiny_tokenizer, formatting_func=f)[0] for f in (batched, single))
    assert got["input_ids"] == expected["input_ids"] and len(got) == 2
    cut = prepare_sft_dataset(data, tiny_tokenizer, formatting_func=lambda row: row["q"][:1])[0]
    assert tiny_tokenizer.decode(cut["input_ids"][0], skip_special_tokens=True) == "o"


def test_a_prompt_without_messages_is_called_empty(tiny_tokenizer):
    answer = {"role": "assistant", "content": "a"}
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "completion": [answer]},
        {"prompt": [], "completion": [answer]},
    ]
    with raises(DataError, "row 1", "'prompt' is an empty list"):
        prepare(rows, tiny_tokenizer)


def test_images_are_refused_and_never_left_out_in_silence(tiny_tokenizer):
    row = {"messages": [{"role": "user", "content": "What is it?"}], "images": []}
    with raises(DataError, "'images'"):
        prepare([row], tiny_tokenizer)


def test_what_is_no_dataset_is_told_how_to_become_one(tiny_tokenizer):
    with raises(ArgumentTypeError, "from_list"):
        prepare_sft_dataset([{"text": "a"}], tiny_tokenizer, name="eval")


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_t10_t29_packing_cuts_documents_first_so_that_none_without_a_trained_token_is_packed(
    tiny_tokenizer, mode, caplog
):
    rows = [{"prompt": "word " * 60, "completion": "a"}, {"prompt": "q", "completion": " a b c"}]
    packed, report = prepare(rows, tiny_tokenizer, max_length=16, packing="bfd", truncation_mode=mode)
    assert report.truncated == 1
    assert "1 of 2 rows were truncated to max_length=16" in caplog.text
    assert sum(map(len, packed["seq_lengths"])) == (1 if mode == "keep_start" else 2)
    assert all(any(label != -100 for label in row["labels"][1:]) for row in packed)


def test_text_that_was_rendered_before_keeps_one_bos_and_one_eos(tiny_tokenizer, caplog):
    from transformers import PreTrainedTokenizerFast

    assert isinstance(tiny_tokenizer, PreTrainedTokenizerFast)
    (row,), _ = prepare([{"text": "<|im_start|>user\nq<|im_end|>\n"}], tiny_tokenizer)
    assert row["input_ids"].count(tiny_tokenizer.eos_token_id) == 1
    assert row["input_ids"][-1] == tiny_tokenizer.eos_token_id


def test_packed_examples_come_apart_into_documents():
    (a, b) = document_rows([{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]}])
    assert (a.completions, a.loss_masks) == ([[1, 2, 3]], [[0, 1, 1]])
    assert (b.completions, b.loss_masks) == ([[4, 5]], [[0, 1]])
    with raises(DataError, "row 0", "-100"):
        document_rows([{"input_ids": [1, 2], "labels": [2, 3]}])


def test_tool_schemas_may_be_json_text_and_an_empty_list_is_none(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}" + tiny_tokenizer.chat_template
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": turns, "tools": '[{"name": "f"}]'}, {"messages": turns, "tools": "[]"}]
    one, two = prepare(rows, tiny_tokenizer)[0]
    assert tiny_tokenizer.decode(one["input_ids"]).startswith("[f]<|im_start|>")
    assert tiny_tokenizer.decode(two["input_ids"]).startswith("<|im_start|>")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_prompt_whose_answer_stands_beside_it_may_end_with_any_role(tiny_tokenizer, role):
    """TRL's trainers train such rows; where the answer is still to come, nobody is asked and the prompt is refused."""
    asked, answer = {"role": role, "content": "Be kind."}, {"role": "assistant", "content": "Hello."}
    (row,), _ = prepare([{"prompt": [asked], "completion": [answer]}], tiny_tokenizer)
    whole = tiny_tokenizer.apply_chat_template([asked, answer], return_dict=True)["input_ids"]
    head = tiny_tokenizer.apply_chat_template([asked], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert row["input_ids"] == whole and [label == -100 for label in row["labels"]].count(True) == len(head)


def test_of_rows_with_several_forms_a_warning_names_the_one_that_is_trained(tiny_tokenizer, caplog):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"input_ids": [5, 6, 7], "messages": turns, "prompt": "p", "completion": "c", "text": "t"}
    for form, trained in {"input_ids": [5, 6, 7], "messages": None, "prompt": None, "text": None}.items():
        caplog.clear()
        (prepared,), _ = prepare([row], tiny_tokenizer)
        alone = {name: row[name] for name in ((form, "completion") if form == "prompt" else (form,))}
        assert prepared == prepare([alone], tiny_tokenizer)[0][0]
        assert trained is None or prepared["input_ids"] == trained
        warned = [record.getMessage() for record in caplog.records if "the rest is ignored" in record.message]
        others = [name for name in row if name != form and name not in alone]
        assert len(warned) == bool(others) and all(name in warned[0] for name in (form, *others) if others)
        row = {name: value for name, value in row.items() if name not in alone}
    (prepared,), _ = prepare([{"text": "t", "input_ids": None}], tiny_tokenizer)  # What is None is no form.
    assert prepared["input_ids"] and "input_ids and" not in caplog.text
