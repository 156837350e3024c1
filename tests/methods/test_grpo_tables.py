"""What people see of completions: files, the terminal, trackers, the hub; training and evaluation apart."""

import io
import logging
import sys
import types

import pyarrow.parquet as pq
import pytest

from posttrain import RewardError
from posttrain.report import completions as rollout_table
from posttrain.report.completions import CompletionsHubCallback, print_prompt_completions_sample
from tests.methods.helpers import count_a, grpo, prompts, scripted


@pytest.fixture
def tracker(monkeypatch):
    """A wandb that remembers its tables."""
    sent = []
    module = types.ModuleType("wandb")
    module.run = object()
    module.Table = lambda columns, data: (columns, data)
    module.log = sent.append
    monkeypatch.setitem(sys.modules, "wandb", module)
    return sent


def sometimes(completions, **_):
    """None for every completion of some prompts."""
    return [None if len(c[0]["content"]) % 3 == 0 else 1.0 for c in completions]


def test_r11_training_and_evaluation_at_one_step_have_files_and_tables_of_their_own(
    tiny_tokenizer, tmp_path, tracker, capsys
):
    trainer = grpo(
        tmp_path, tiny_tokenizer, log_completions=True, num_completions_to_print=2, eval_dataset=prompts(2),
        per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1, max_steps=1,
    )  # fmt: skip
    trainer.args.report_to = ["wandb"]
    trainer.train()
    names = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert names == ["completions_00001.parquet", "eval_completions_00001.parquet"]
    assert len(pq.read_table(tmp_path / "completions" / names[0])) == 8
    assert len(pq.read_table(tmp_path / "completions" / names[1])) == 8  # Two prompts of four.
    tables = {name: table for entry in tracker for name, table in entry.items()}
    assert set(tables) == {"completions", "eval_completions"}
    columns, data = tables["completions"]
    assert columns == ["step", "prompt", "completion", "count_a", "advantage"]
    assert len(data) == 8
    shown = capsys.readouterr().out
    assert shown.count("Step 1") == 2
    assert "count_a" in shown


def test_unscored_rewards_are_none_everywhere(tiny_tokenizer, tmp_path, tracker):
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=[sometimes, count_a], log_completions=True, max_steps=1)
    trainer.args.report_to = ["wandb"]
    trainer.train()
    values = pq.read_table(tmp_path / "completions.parquet")["sometimes"].to_pylist()
    assert None in values
    assert 1.0 in values
    columns, data = tracker[0]["completions"]
    assert None in [row[columns.index("sometimes")] for row in data]


def test_columns_of_the_same_name_and_columns_of_some_batches_do_not_shift(tiny_tokenizer, tmp_path):
    def one(completions, log_extra=None, **_):
        log_extra("seen", [f"one {i}" for i in range(len(completions))])
        return [float(i) for i in range(len(completions))]

    def two(completions, trainer_state, log_extra=None, **_):
        log_extra("seen", [f"two {i}" for i in range(len(completions))])
        if trainer_state is not None and trainer_state.global_step == 1:
            log_extra("late", list(range(len(completions))))
        return [0.0] * len(completions)

    grpo(tmp_path, tiny_tokenizer, rewards=[one, two], max_steps=2, check_rewards=False).train()
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert [row["seen"] for row in rows] == [f"one {i}" for i in range(8)] * 2
    assert [row["two/seen"] for row in rows] == [f"two {i}" for i in range(8)] * 2
    assert [row["late"] for row in rows] == [None] * 8 + list(range(8))


def test_one_row_a_prompt_where_that_is_asked_for(tiny_tokenizer, tmp_path, tracker):
    trainer = grpo(tmp_path, tiny_tokenizer, log_completions=True, log_unique_prompts=True, max_steps=1)
    trainer.args.report_to = ["wandb"]
    trainer.train()
    assert len(tracker[0]["completions"][1]) == 2
    assert len(pq.read_table(tmp_path / "completions.parquet")) == 8  # The file has them all.


def test_a_table_that_fails_is_told_once_and_does_not_stop_training(tiny_tokenizer, tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise OSError("no space")

    monkeypatch.setitem(rollout_table.TRACKERS, "wandb", broken)
    trainer = grpo(tmp_path, tiny_tokenizer, log_completions=True, num_completions_to_print=0, max_steps=3)
    trainer.args.report_to = ["wandb"]
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("could not be sent to wandb: OSError: no space") == 1


def test_the_printed_table_has_two_decimals_and_no_more_rows_than_asked(capsys):
    args = (["p1", "p2", "p3"], ["c1", "c2", "c3"], {"right": [1.0, None, 0.125]}, [0.5, -0.5, 0.0])
    print_prompt_completions_sample(*args, step=7)
    shown = capsys.readouterr().out
    assert "Step 7" in shown
    assert "0.12" in shown and "0.125" not in shown
    assert "nan" not in shown.lower()
    print_prompt_completions_sample(*args, step=7, num_samples=1)
    assert sum(f"p{i}" in capsys.readouterr().out for i in (1,)) <= 1
    print_prompt_completions_sample(*args, step=7, num_samples=0)
    assert capsys.readouterr().out == ""


ATTACK = "\x1b]52;c;Y2xpcGJvYXJk\x07\x1b]0;title\x07\x1b[2J"  # Clipboard, title, clear.


def test_the_printed_table_writes_terminal_escapes_as_text(capsys):
    print_prompt_completions_sample([[{"role": "user", "content": ATTACK}]], [ATTACK], {ATTACK: [1.0]}, [0.0], step=1)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]52" in shown.replace("\n", "")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_the_printed_table_needs_no_encoding_of_its_own(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    print_prompt_completions_sample(["Zürich 東京"], ["ок"], {"r": [1.0]}, [0.0], step=1)
    sys.stdout.flush()
    assert b"rich ??" in raw.getvalue()


def test_completions_go_to_the_hub_in_the_background_and_at_the_end(tiny_tokenizer, tmp_path, monkeypatch):
    import huggingface_hub

    made = []

    class Scheduler:
        def __init__(self, **given):
            self.given, self.pushed, self.stopped = given, 0, False
            made.append(self)

        def trigger(self):
            self.pushed += 1
            return types.SimpleNamespace(result=lambda: None)

        def stop(self):
            self.stopped = True

    monkeypatch.setattr(huggingface_hub, "CommitScheduler", Scheduler)
    trainer = grpo(tmp_path, tiny_tokenizer, log_completions=True, log_completions_hub_repo="me/rows", max_steps=1)
    assert any(isinstance(c, CompletionsHubCallback) for c in trainer.callback_handler.callbacks)
    trainer.train()
    (scheduler,) = made
    assert scheduler.given["repo_id"] == "me/rows"
    assert scheduler.given["repo_type"] == "dataset"
    assert scheduler.given["every"] == 2
    assert scheduler.given["allow_patterns"] == ["*.parquet"]
    assert (scheduler.pushed, scheduler.stopped) == (1, True)


def test_lengths_of_ended_completions_are_zero_where_none_ended(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, engine=scripted(stop=5), max_steps=1)
    trainer.train()
    row = trainer.state.log_history[0]
    assert [row[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")] == [0.0, 0.0, 0.0]
    assert row["completions/clipped_ratio"] == 1.0


def test_a_reward_whose_column_is_removed_is_refused(tiny_tokenizer, tmp_path):
    def needs(completions, answer):
        return [float(a) for a in answer]

    with pytest.raises(RewardError, match="'needs' needs the column 'answer'"):
        grpo(tmp_path, tiny_tokenizer, rewards=needs, remove_unused_columns=True)
