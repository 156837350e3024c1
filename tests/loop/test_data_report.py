"""The data report, ``strict_data`` and the deprecation of ``keep_end``."""

import json
import logging
import time
import warnings

import datasets
import pytest

from posttrain import DataError, DPOConfig, DPOTrainer, KTOConfig, SFTConfig, SFTTrainer
from posttrain.checks.rows import check_rows
from posttrain.data.formats import plain_rows
from posttrain.data.samplers import longest_examples
from posttrain.types import Row
from tests.methods.every_trainer import data, every
from tests.wordings import raises


def chat(n, answer="The answer is {}."):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + 1?"},
                {"role": "assistant", "content": answer.format(i)},
            ]
        }
        for i in range(n)
    ]
    return datasets.Dataset.from_list(rows)


def trainer_of(model, tokenizer, folder, dataset, **options):
    args = SFTConfig(str(folder), max_steps=1, per_device_train_batch_size=2, report_to="none", **options)
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)


def test_the_report_counts_what_an_independent_look_counts(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, chat(20), assistant_only_loss=True)
    start = time.perf_counter()
    report = trainer.data_report()
    assert time.perf_counter() - start < 2
    labels = [row["labels"] for row in trainer.train_dataset]
    assert (report.rows_in, report.rows_out, report.sampled) == (20, 20, 20)
    assert report.trained_tokens == sum(label != -100 for row in labels for label in row[1:])
    assert report.tokens == sum(map(len, labels))
    assert report.lengths["max"] == max(map(len, labels)) and report.lengths["min"] == min(map(len, labels))
    assert report.last_trained == {"<|im_end|>": 20} and list(report.first_trained) == ["The"]
    shown = report.shown[0]
    assert "".join(text for text, trained in shown if trained) == "The answer is 0.<|im_end|>"
    assert "[[The answer is 0.<|im_end|>]]" in str(report) and "20 of 20 rows" in str(report)


def test_packed_rows_report_their_fill_and_dropped_rows_their_reasons(tiny_model, tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list(
        [*chat(20).to_list(), {"messages": [{"role": "user", "content": "Nobody answers"}]}]
    )
    trainer = trainer_of(
        tiny_model, tiny_tokenizer, tmp_path, rows, assistant_only_loss=True, packing=True, max_length=128
    )
    report = trainer.data_report()
    filled = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    assert report.packing_fill == pytest.approx(sum(filled) / len(filled) / 128)
    assert (report.rows_in, report.rows_out) == (21, 20)
    assert report.dropped == {"without an assistant turn": 1}


def test_the_report_is_logged_and_kept_when_training_begins(tiny_model, tiny_tokenizer, tmp_path, caplog):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, chat(8))
    with caplog.at_level(logging.INFO, logger="posttrain"):
        trainer.train()
    assert "tokens contribute to the loss" in caplog.text and "lengths in tokens" in caplog.text
    kept = json.loads((tmp_path / "data_report.json").read_text())
    assert kept["rows_out"] == 8 and kept["trained_share"] > 0.9 and kept["shown"]


def test_pairs_have_a_report(tiny_model, tiny_tokenizer, tmp_path):
    pairs = datasets.Dataset.from_list(
        [{"prompt": f"{i} + 1 =", "chosen": " two", "rejected": " six"} for i in range(6)]
    )
    args = DPOConfig(str(tmp_path), report_to="none")
    trainer = DPOTrainer(tiny_model, args=args, train_dataset=pairs, processing_class=tiny_tokenizer)
    report = trainer.data_report()
    assert report.sampled == 6 and len(report.shown) == 3 and report.equal_pairs == 0


@pytest.mark.parametrize("strict", [False, True])
def test_strict_data_makes_warnings_of_preparation_errors(tiny_model, tiny_tokenizer, tmp_path, strict):
    rows = chat(12, "A long answer that goes on and on, {}" + " and on" * 10)
    if not strict:
        trainer_of(tiny_model, tiny_tokenizer, tmp_path, rows, max_length=60)
        return
    with raises(DataError, "max_length=60"):
        trainer_of(tiny_model, tiny_tokenizer, tmp_path, rows, max_length=60, strict_data=True)


def test_strict_data_makes_findings_about_rows_errors_and_lets_clean_rows_train(tiny_model, tiny_tokenizer, tmp_path):
    twice = datasets.concatenate_datasets([chat(4), chat(4)])
    with raises(DataError, "PT-D007", "4", "8"):
        trainer_of(tiny_model, tiny_tokenizer, tmp_path, twice, strict_data=True, assistant_only_loss=True)
    trainer_of(tiny_model, tiny_tokenizer, tmp_path, chat(8), strict_data=True, assistant_only_loss=True).train()


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_only_packing_that_truncates_documents_reports_it_with_the_strategies_that_split(
    strategy, tiny_model, tiny_tokenizer, tmp_path
):
    rows = datasets.Dataset.from_list([{"text": f"{i} apples and " * 30} for i in range(6)])
    options = {"packing": True, "packing_strategy": strategy, "max_length": 16}
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, rows, **options)
    found = {finding.code: finding.fix for finding in trainer.data_report().findings}
    if strategy == "bfd":
        assert "bfd_split" in found["PT-D011"] and "wrapped" in found["PT-D011"]
    else:  # Pieces without an end are no rows without one.
        warned = {code for code, result in trainer.preflight.results.items() if result.findings}
        assert not {"PT-D004", "PT-D006", "PT-D011"} & (warned | set(found))


def test_keep_end_is_deprecated_where_it_is_and_no_finding_recommends_it(tiny_tokenizer, tmp_path):
    for config in (SFTConfig, DPOConfig):
        with pytest.warns(FutureWarning, match="keep_end.*deprecated"):
            config(str(tmp_path), truncation_mode="keep_end")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        KTOConfig(str(tmp_path), truncation_mode="keep_end")
    rows = [Row([3, 4], [[5, 6]], [[0, 0]]), Row([], [[7] * 9], [[1] * 9])]
    found = check_rows(rows, tiny_tokenizer, limit=8)
    assert found and not any("keep_end" in finding.fix for finding in found)


def test_plain_rows_have_no_format_and_the_columns_that_it_showed():
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "text": "x"}])
    shown = plain_rows({"a": rows.with_format("torch", columns=["input_ids"]), "b": rows.with_format("numpy")})
    assert (shown["a"][0], shown["b"][0]) == ({"input_ids": [1, 2]}, rows[0])
    every = rows.with_format("torch", columns=["input_ids"], output_all_columns=True)
    assert plain_rows(every)[0] == rows[0]
    changed = rows.with_transform(lambda batch: batch)
    assert plain_rows(changed) is changed and plain_rows(None) is None and plain_rows(rows) is rows


LEFTOVER = {
    "ids": [1, 2, 3] * 30,
    "beyond": [10**6],
    "none": None,
    "text": "abc",
    "nested": [[1], [2]],
    "half": [1, None],
}


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online_dpo"])
@pytest.mark.parametrize("left", sorted(LEFTOVER))
def test_id_columns_that_training_does_not_read_are_not_checked_and_not_counted(kind, left, tiny_tokenizer, tmp_path):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    plain = data(kind, 8)
    columns = dict.fromkeys(("input_ids", "prompt_ids", "chosen_ids"), [LEFTOVER[left]] * len(plain))
    rows = datasets.Dataset.from_dict({**plain.to_dict(), **columns})
    settings = {"dry_step": True, "preflight": "error"}
    runs = [
        every(kind, tmp_path / str(i), tiny_tokenizer, train=one, **settings) for i, one in enumerate((plain, rows))
    ]
    reports = [run.data_report().to_dict() for run in runs]
    assert reports[0] == reports[1]
    found = [{code for code, result in run.preflight.results.items() if result.findings} for run in runs]
    assert found[0] == found[1]
    longest = [longest_examples(run.train_dataset, 2, run.method.traits.id_columns) for run in runs]
    assert [row["prompt"] for row in longest[0]] == [row["prompt"] for row in longest[1]]
