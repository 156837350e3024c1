"""Preparing supervised rows: what bad input does, by row number, and what a report counts."""

import datasets
import pytest

from posttrain.data.supervised import SupervisedOptions, document_rows, prepare_sft_dataset
from posttrain.errors import DataError


def prepare(rows, tokenizer, **options):
    return prepare_sft_dataset(datasets.Dataset.from_list(rows), tokenizer, SupervisedOptions(**options))


def test_a_row_of_two_hundred_thousand_tokens_is_cut_and_told(tiny_tokenizer, caplog):
    long = "0 1 2 3 " * 50_000
    (row, short), report = prepare([{"text": long}, {"text": "a"}], tiny_tokenizer, max_length=64)
    assert len(row["input_ids"]) == 64
    assert report.truncated == 1
    assert report.cut_tokens > 199_000
    assert "1 of 2 rows were cut at max_length=64" in caplog.text
    assert short["input_ids"][-1] == tiny_tokenizer.eos_token_id


def test_lone_surrogates_are_refused_with_the_rows_they_are_among(tiny_tokenizer):
    # Arrow itself refuses them; a generator of Python strings reaches the tokenizer.
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"text": "fine"}, {"text": "bad \ud800"}]))
    out, _ = prepare_sft_dataset(stream, tiny_tokenizer, SupervisedOptions())
    with pytest.raises(DataError, match=r"rows 0 to 1: row 1 of the batch holds text that is not valid Unicode"):
        list(out)


def test_a_template_that_raises_names_the_row(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('must begin with the user') }}{% endif %}{{ messages[0].content }}"
    good, bad = [{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]
    with pytest.raises(DataError, match=r"row 1: the chat template refused .*must begin with the user"):
        prepare([{"messages": good}, {"messages": bad}], tiny_tokenizer)


def test_a_dataset_where_every_row_is_filtered_out_is_refused_with_the_counts(tiny_tokenizer):
    rows = [{"prompt": "word " * 60, "completion": "a"}] * 3
    with pytest.raises(
        DataError, match=r"no row of the train dataset is left: of 3, 3 have no trained token \(3 were cut"
    ):
        prepare(rows, tiny_tokenizer, max_length=16)


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
    with pytest.raises(DataError, match="row 0: a label is neither its token nor -100"):
        document_rows([{"input_ids": [1, 2], "labels": [2, 3]}])


def test_tool_schemas_may_be_json_text_and_an_empty_list_is_none(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}" + tiny_tokenizer.chat_template
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": turns, "tools": '[{"name": "f"}]'}, {"messages": turns, "tools": "[]"}]
    one, two = prepare(rows, tiny_tokenizer)[0]
    assert tiny_tokenizer.decode(one["input_ids"]).startswith("[f]<|im_start|>")
    assert tiny_tokenizer.decode(two["input_ids"]).startswith("<|im_start|>")
