"""The four moments of checks on real trainers: broken runs are told or stopped, healthy ones are silent."""

from __future__ import annotations

import json

import datasets
import pytest
import torch

import posttrain
from posttrain import ConfigError, PreflightError, RewardError
from posttrain.checks import registry as core
from tests.conftest import build_model
from tests.methods.helpers import grpo, prompts, sft
from tests.methods.test_dpo import dpo, pairs
from tests.ranks import run_ranks
from tests.wordings import raises


def read(folder, name="preflight.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def rows_of(folder):
    return {row["code"]: row for row in read(folder)["checks"]}


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chats(count=40, bad=()):
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three."}]
    return datasets.Dataset.from_list(
        [
            {
                "messages": []
                if i in bad
                else [turns[0] | {"content": f"Count to {i}."}, turns[1] | {"content": f"1 to {i}."}]
            }
            for i in range(count)
        ],
        features=datasets.Features(
            {"messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
        ),
    )


def test_a_healthy_run_writes_what_was_looked_for_and_tells_nothing(tiny_tokenizer, tmp_path, caplog):
    trainer = sft(tmp_path, tiny_tokenizer, data=chats())
    trainer.train()
    found = read(tmp_path)
    assert found["preflight"] == "error" and not found["refused"] and found["versions"]["torch"]
    assert {"config", "data", "first_batch", "log_step"} <= set(found["seconds"])
    ran = {row["code"] for row in found["checks"] if row["runs"]}
    assert {"PT-C001", "PT-D001", "PT-D030", "PT-B003", "PT-L001", "PT-T001", "PT-T002", "PT-T003"} <= ran
    assert {row["outcome"] for row in found["checks"] if not row["findings"]} == {"nothing found"}
    assert all(row["runs"] for row in found["checks"])
    told = [f for row in found["checks"] for f in row["findings"] if f["severity"] != "info"]
    assert told == [] and "PT-" not in caplog.text


def test_b_rows_without_messages_are_refused_with_counts_and_numbers(tiny_tokenizer, tmp_path):
    with pytest.raises(PreflightError) as caught:
        sft(tmp_path, tiny_tokenizer, data=chats(bad=(3, 17)))
    said = str(caught.value)
    assert "PT-D030: 2 of 40 rows (5 %) cannot be trained: 2 empty `messages`. First rows: 3, 17." in said
    assert "bad_rows='drop'" in said and isinstance(caught.value, ConfigError)
    assert read(tmp_path)["refused"] and rows_of(tmp_path)["PT-D030"]["findings"][0]["where"] == "the training set"


def test_b_bad_rows_are_dropped_and_listed(tiny_tokenizer, tmp_path, caplog):
    trainer = sft(tmp_path, tiny_tokenizer, data=chats(bad=(3, 17)), bad_rows="drop")
    trainer.train()
    assert trainer.state.global_step == 2 and "2 of 40 rows (5 %) were dropped" in caplog.text
    assert [(line["row"], line["reason"]) for line in lines(tmp_path / "bad_rows.jsonl")] == [
        (3, "empty `messages`"), (17, "empty `messages`"),
    ]  # fmt: skip
    with raises(PreflightError, "PT-D032", "3", "40", "7.5"):
        sft(tmp_path / "more", tiny_tokenizer, data=chats(bad=(3, 17, 20)), bad_rows="drop")
    sft(tmp_path / "all", tiny_tokenizer, data=chats(bad=(3, 17, 20)), bad_rows="drop", bad_rows_max=0.1)


def test_b_a_stream_drops_bad_rows_as_they_come(tiny_tokenizer, tmp_path):
    stream = chats(bad=(0, 3)).to_iterable_dataset()
    with raises(PreflightError):
        sft(tmp_path, tiny_tokenizer, data=stream)
    sft(tmp_path / "dropped", tiny_tokenizer, data=stream, bad_rows="drop").train()


def test_b_a_reward_that_needs_a_missing_column_is_refused_before_anything_is_generated(tiny_tokenizer, tmp_path):
    def right(completions, solution, **kwargs):
        return [0.0] * len(completions)

    with raises(RewardError, "'right'", "'solution'", "'answer'"):
        grpo(tmp_path, tiny_tokenizer, rewards=right)
    grpo(tmp_path / "fine", tiny_tokenizer, rewards=right, data=prompts().rename_column("answer", "solution"))


def test_c_a_policy_that_left_its_sampler_behind_is_told(tiny_tokenizer, tmp_path, caplog):
    trainer = grpo(tmp_path, tiny_tokenizer)
    for step in range(1, 61):
        trainer.state.log_history.append({"step": step, "loss": 0.0, "sampling/kl": 0.004 * step})
        trainer.checks.report_from_main(lambda: trainer.checks.log_findings(trainer.state.log_history))
    assert "PT-R024: the policy mismatch KL" in caplog.text and "learning_rate" in caplog.text


def test_f_swapped_pairs_are_told_listed_and_dropped_where_that_is_asked(tiny_tokenizer, tmp_path, caplog):
    rows = list(pairs(30))
    swapped = rows[4] | {"chosen": rows[4]["rejected"], "rejected": rows[4]["chosen"]}
    data = datasets.Dataset.from_list([*rows, swapped])
    dpo(tmp_path, tiny_tokenizer, data=data)
    assert "PT-D035: 2 of 31 rows (6.45 %) appear with chosen and rejected swapped" in caplog.text
    assert "loss_type='robust'" in caplog.text
    suspects = lines(tmp_path / "suspect_pairs.jsonl")
    assert [line["row"] for line in suspects] == [4, 30] and suspects[0]["chosen"] == rows[4]["chosen"]
    dropped = dpo(tmp_path / "dropped", tiny_tokenizer, data=data, bad_rows="drop", bad_rows_max=0.1)
    assert len(dropped.train_dataset) == 29
    caplog.clear()
    dpo(tmp_path / "fine", tiny_tokenizer, data=pairs(30))
    assert "PT-D03" not in caplog.text and not (tmp_path / "fine" / "suspect_pairs.jsonl").exists()


def test_pairs_of_methods_without_a_reference_are_looked_at_too(tiny_tokenizer, tmp_path, caplog):
    """Their configs have a max_completion_length, which nothing reads: their completions are not sampled."""
    rows = list(pairs(30))
    swapped = rows[4] | {"chosen": rows[4]["rejected"], "rejected": rows[4]["chosen"]}
    data = datasets.Dataset.from_list([*rows, swapped])
    for kind, config in ((posttrain.CPOTrainer, posttrain.CPOConfig), (posttrain.ORPOTrainer, posttrain.ORPOConfig)):
        caplog.clear()
        args = config(str(tmp_path / kind.__name__), report_to="none", bf16=False)
        kind(build_model(len(tiny_tokenizer)), args, train_dataset=data, processing_class=tiny_tokenizer)
        assert "PT-D035: 2 of 31 rows (6.45 %) appear with chosen and rejected swapped" in caplog.text


def test_j_a_game_score_beside_small_rewards_is_told_at_the_first_generation(tiny_tokenizer, tmp_path, caplog):
    def game_score(completions, **_):
        return [4.0 + 614.0 * (i % 31) for i, _ in enumerate(completions)]

    def tidy(completions, **_):
        return [float(i % 2) for i, _ in enumerate(completions)]

    grpo(tmp_path, tiny_tokenizer, rewards=[game_score, tidy], max_steps=1).train()
    assert "PT-R027: `game_score` ranges from 4 to" in caplog.text and "other functions: 0 to 1" in caplog.text
    assert "reward_transform='log1p'" in caplog.text
    assert read(tmp_path)["rewards"]["game_score"]["count"] == 8
    caplog.clear()
    weighted = grpo(
        tmp_path / "fine", tiny_tokenizer, rewards=[game_score, tidy], max_steps=1, reward_weights=[1e-3, 1.0]
    )
    weighted.train()
    assert "PT-R027" not in caplog.text


def test_warn_goes_on_where_error_stops(tiny_tokenizer, tmp_path, caplog):
    trainer = sft(tmp_path, tiny_tokenizer, preflight="warn")
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)
    trainer.train()
    assert trainer.state.global_step == 2 and "PT-B003" in caplog.text
    assert rows_of(tmp_path)["PT-B003"]["findings"][0]["severity"] == "error"


def test_a_silenced_finding_stops_nothing_and_is_kept_with_its_reason(tiny_tokenizer, tmp_path, caplog):
    silence = '{"train-no-gradient": "a dry run"}'  # As a command line gives it.
    trainer = sft(tmp_path, tiny_tokenizer, silence_findings=silence)
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)
    trainer.train()
    row = rows_of(tmp_path)["PT-B003"]
    assert row["silenced"] == "a dry run" and len(row["findings"]) == 1 and "PT-B003" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preflight": "warning"}, "preflight='warning' is not known \\(did you mean 'warn'"),
        ({"bad_rows": "skip"}, "bad_rows='skip' is not known"),
        ({"bad_rows_max": 5}, "bad_rows_max=5 must be at least 0 and at most 1"),
        ({"silence_findings": {"PT-Q001": "x"}}, "'PT-Q001' is neither the code nor the name"),
        ({"silence_findings": "loud"}, "silence_findings='loud' must be a mapping"),
        (
            {"silence_findings": ["data-pair-identical"]},
            "silence_findings=\\['data-pair-identical'\\] must be a mapping",
        ),
        ({"model_init_kwargs": {"num_labels": 2}}, "model_init_kwargs sets num_labels, which the trainer sets itself"),
        ({"model_init_kwargs": 3}, "model_init_kwargs=3 must be a mapping"),
        ({"model_init_kwargs": {"dtype": "float99"}}, "dtype='float99' is not known \\(did you mean 'float32'"),
        ({"accelerator_config": 10}, "accelerator_config=10 must be a mapping.*the path of a JSON file"),
        ({"accelerator_config": {"split_batch": True}}, "'split_batch' is not known \\(did you mean 'split_batches'"),
        ({"accelerator_config": '{"split_batch": true}'}, "'split_batch' is not known \\(did you mean 'split_batches'"),
        ({"fsdp_config": [1]}, "fsdp_config=\\[1\\] must be a mapping"),
        ({"learning_rate": "1e-5"}, "learning_rate='1e-5' must be a finite number of at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a finite number of at least 0"),
        ({"label_smoothing_factor": float("nan")}, "label_smoothing_factor=nan must be a finite number"),
        ({"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0}, "prefetch_factor=0 must be at least 1"),
        (
            {"gradient_checkpointing_kwargs": {"use_rentrant": True}},
            "'use_rentrant' is not known \\(did you mean 'use_r",
        ),
        ({"gradient_checkpointing_kwargs": '{"nope": 1}'}, "gradient_checkpointing_kwargs='nope' is not known"),
        ({"label_smoothing_factor": 2.0}, "label_smoothing_factor=2.0 must be from 0 to 1"),
        ({"neftune_noise_alpha": -5.0}, "neftune_noise_alpha=-5.0 must be a finite number of at least 0"),
        ({"max_steps": 0}, "max_steps=0 and num_train_epochs=3.0 give a run without steps"),
        ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs=0 give a run without steps"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be a finite number of at least 0"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "needs evaluations to find the best model"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny_tokenizer, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        sft(tmp_path, tiny_tokenizer, **settings)


def test_off_looks_at_nothing(tiny_tokenizer, tmp_path):
    sft(tmp_path, tiny_tokenizer, preflight="off").train()
    assert read(tmp_path)["checks"] == []


def test_a_probe_that_joins_is_called_by_every_trainer(tiny_tokenizer, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(core, "PROBES", dict(core.PROBES))
    monkeypatch.setattr("posttrain.checks.registry.PROBES", core.PROBES)
    for moment in ("config", "data", "first_batch", "log_step"):

        @core.probe(moment, "PT-D001")
        def look(context, moment=moment):
            seen.append((moment, context.trainer, context.model is not None, bool(context.rows)))
            return []

        core.PROBES[moment] = core.PROBES.pop(list(core.PROBES)[-1])
    sft(tmp_path, tiny_tokenizer, max_steps=1).train()
    assert [entry[:2] for entry in seen] == [
        (m, "sft") for m in ("config", "data", "first_batch", "log_step", "log_step")
    ]
    assert [entry[2] for entry in seen] == [False, True, True, True, True] and seen[1][3]


@pytest.mark.distributed
def test_an_error_that_only_the_main_process_sees_ends_all_ranks(tmp_path):
    found = run_ranks("tests.methods.preflight_worker", "batch", tmp_path, processes=2, folder=tmp_path)
    assert [line["code"] for line in found] == ["PT-D001", "PT-D001"]
    assert [line["looked"] for line in found] == [True, False]
    assert found[0]["said"] == found[1]["said"] and "seen by one" in found[0]["said"]


@pytest.mark.distributed
def test_rows_that_the_main_process_cannot_prepare_end_all_ranks(tmp_path):
    found = run_ranks("tests.methods.preflight_worker", "data", tmp_path, processes=2, folder=tmp_path)
    assert len(found) == 2 and all("99999" in line["said"] for line in found)


@pytest.mark.distributed
def test_rows_that_another_process_alone_cannot_prepare_end_all_ranks_by_its_number(tmp_path):
    """The main process is through with its rows by then, and would wait for the other one in its next collective."""
    found = run_ranks("tests.methods.preflight_worker", "alone", tmp_path, processes=2, folder=tmp_path)
    assert len(found) == 2
    assert all(line["said"].startswith("process 1: ") and "txt" in line["said"] for line in found)
    assert all(line["seconds"] < 30 for line in found)
    assert [line["kind"] for line in found] == ["PosttrainError", "Local"]  # What cannot be sent is told in words.
    assert [line["then"] for line in found] == [
        "process 1: Local: of process one alone",
        "process 1: of process one alone",
    ]


@pytest.mark.parametrize("options", [{"eval_strategy": "steps", "eval_steps": 1}, {"eval_on_start": True}])
def test_an_evaluation_without_a_set_is_refused_before_the_model_is_loaded(tmp_path, tiny_tokenizer, options):
    option = next(iter(options))
    with pytest.raises(ConfigError, match=f"{option}=.* needs eval_dataset, but it is None. Fix: pass eval_dataset"):
        sft(tmp_path, tiny_tokenizer, **options)


@pytest.mark.parametrize(("given", "value"), [("true", True), ("False", False)])
def test_fsdp_may_be_a_word_of_a_yaml_file(tmp_path, given, value):
    assert posttrain.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", fsdp=given).fsdp is value


@pytest.mark.parametrize(("rows", "name"), [(None, "eval"), ({"late": None}, "late")])
def test_an_error_of_an_evaluation_row_names_its_set(tiny_tokenizer, tmp_path, rows, name):
    broken = datasets.Dataset.from_list([*chats(4).to_list(), {"messages": []}])
    evaluation = broken if rows is None else dict.fromkeys(rows, broken)
    with pytest.raises(posttrain.DataError, match=rf"^{name}: row 4, column 'messages'"):
        sft(tmp_path, tiny_tokenizer, eval_dataset=evaluation)


def test_an_optimizer_of_another_model_is_refused(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "updates none of the trained parameters"):
        sft(tmp_path, tiny_tokenizer, optimizers=(torch.optim.SGD(build_model(37).parameters(), lr=0.1), None))
    model = build_model(len(tiny_tokenizer))
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sft(tmp_path, tiny_tokenizer, model=model, optimizers=(own, None)).optimizer is own


def test_an_empty_dict_of_evaluation_sets_is_no_evaluation_set(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "needs eval_dataset, but it is {}"):
        sft(tmp_path, tiny_tokenizer, eval_dataset={}, eval_strategy="steps", eval_steps=1)


def test_the_folder_of_the_model_as_output_dir_is_a_warning(tiny_tokenizer, tiny_model_dir, caplog):
    sft(tiny_model_dir, tiny_tokenizer, model=tiny_model_dir)
    assert "is the folder of the model, so the run replaces the model's files" in caplog.text
