"""`posttrain check`: what can be known without training, on one screen, with an exit code for CI."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import pytest
import yaml

from posttrain.checks import registry
from posttrain.cli.check import Checkup, Stage, show
from posttrain.cli.main import main
from posttrain.cli.train import named_object
from posttrain.types import Finding
from tests import forks


@pytest.fixture
def folder(unread_model, tmp_path, sums):
    """Configs and data of two commands; the model's folder has no weights to read."""
    write("chats.jsonl", sums)
    write("broken.jsonl", [*sums, {"messages": []}])
    write("prompts.jsonl", [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(8)])
    shared = f"model_name_or_path: {unread_model}\noutput_dir: out\nbf16: false\nreport_to: none\n"
    Path("sft.yaml").write_text(shared + "dataset_name: chats.jsonl\nper_device_train_batch_size: 4\n")
    Path("grpo.yaml").write_text(
        shared + "dataset_name: prompts.jsonl\nnum_generations: 4\nper_device_train_batch_size: 4\n"
        "reward_funcs: accuracy_reward\n"
    )
    return tmp_path


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def checked(capsys, *argv):
    code = main(["check", *argv, "--no-model", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_command_that_would_train_is_ready_and_nothing_is_written(folder, capsys):
    before = sorted(folder.iterdir())
    assert main(["check", "sft", "--config", "sft.yaml", "--no-model"]) == 0
    out = capsys.readouterr().out
    assert (
        "sft: no problems found. Without the model" in out
        and "12 rows, split 'train'" in out
        and "LlamaForCausalLM" in out
    )
    assert "learning rate 2e-05" in out and "with a chat template" in out and "12 rows of" in out
    assert sorted(folder.iterdir()) == before
    assert len(out.splitlines()) < 40


def test_what_a_start_refuses_before_its_model_is_refused_without_the_model(folder, capsys):
    code, found = checked(
        capsys, "sft", "--config", "sft.yaml", "--dataloader_drop_last", "true", "--per_device_train_batch_size", "16"
    )
    start = found["stages"][-1]
    assert (
        code == 78 and start["name"] == "start" and "dataloader_drop_last=True drops the only batch" in start["error"]
    )


def test_null_in_a_file_leaves_report_to_at_its_default(folder, capsys):
    config = Path("sft.yaml")
    config.write_text(config.read_text().replace("report_to: none", "report_to: null"))
    code, found = checked(capsys, "sft", "--config", "sft.yaml")
    assert code == 0, found


def test_names_of_columns_and_rows_cannot_act_on_the_terminal(capsys):
    attack = "\x1b]0;title\x07"
    found = Finding("PT-D001", "error", f"row {attack}", attack, attack, attack)
    show(Checkup("sft", [], stages=[Stage("data", f"columns {attack}"), Stage("x", error=attack)], findings=[found]))
    out = capsys.readouterr().out
    assert "\x1b]" not in out and "\x07" not in out and out.count("\\x1b]0;title") == 6


def test_the_data_line_names_both_splits(folder, capsys):
    Path("data").mkdir()
    for split, count in (("train", 6), ("test", 2)):
        write(f"data/{split}.jsonl", [{"prompt": f"{i}:", "completion": f" {i}"} for i in range(count)])
    for strategy, end in (("steps", ""), ("no", ", not evaluated (eval_strategy='no')")):
        flags = ("--dataset_name", "data", "--eval_strategy", strategy)
        _, found = checked(capsys, "sft", "--config", "sft.yaml", *flags)
        (said,) = [stage["result"] for stage in found["stages"] if stage["name"] == "data"]
        assert said == f"6 rows, split 'train'; 2 rows, split 'test'{end}; columns prompt, completion"


def test_a_share_of_one_file_is_its_test_split(folder, capsys):
    flags = ("--test_split_size", "0.25", "--eval_strategy", "steps", "--eval_steps", "1")
    code, found = checked(capsys, "sft", "--config", "sft.yaml", *flags)
    (said,) = [stage["result"] for stage in found["stages"] if stage["name"] == "data"]
    assert code == 0 and said.startswith("9 rows, split 'train'; 3 rows, split 'test'")
    code, found = checked(capsys, "sft", "--config", "sft.yaml", *flags, "--dataset_test_split", "train")
    assert code == 78 and "would create a split 'train'" in str(found["stages"])


def test_json_holds_every_check_with_its_seconds(folder, capsys):
    code, found = checked(capsys, "sft", "--config", "sft.yaml")
    assert code == 0 and not found["refused"] and [stage["name"] for stage in found["stages"]] == [
        "config", "model", "tokenizer", "data", "settings", "rows", "start",
    ]  # fmt: skip
    ran = {row["code"]: row for row in found["checks"] if row["runs"]}
    assert {"PT-D001", "PT-D030"} <= set(ran) and all(row["seconds"] >= 0 for row in ran.values())


def test_a_refused_command_exits_with_78_and_says_why(folder, capsys):
    assert main(["check", "sft", "--config", "sft.yaml", "--dataset_name", "broken.jsonl"]) == 78
    out = capsys.readouterr().out
    assert "PT-D030 bad-rows" in out and "1 empty `messages`. First rows: 12." in " ".join(out.split())
    assert "sft: refused (1 errors" in out or "sft: refused (2 errors" in out
    code, found = checked(capsys, "sft", "--config", "sft.yaml", "--dataset_name", "broken.jsonl", "--bad_rows", "drop",
                          "--bad_rows_max", "0.1")  # fmt: skip
    assert code == 0 and next(f["code"] for f in found["findings"]) == "PT-D030"


def test_a_reward_without_its_column_refuses_grpo(folder, capsys):
    code, found = checked(capsys, "grpo", "--config", "grpo.yaml")
    assert code == 78
    (finding,) = [f for f in found["findings"] if f["severity"] == "error"]
    assert finding["code"] == "PT-R029" and "`accuracy_reward` needs the column `solution`" in finding["what"]
    code, found = checked(capsys, "grpo", "--config", "grpo.yaml", "--reward_funcs", "think_format_reward")
    assert code == 0 and found["stages"][3]["result"] == "think_format_reward"


def test_one_stage_that_fails_does_not_hide_the_others(folder, capsys):
    code, found = checked(capsys, "sft", "--config", "sft.yaml", "--model_name_or_path", "nowhere/at-all")
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert code == 78 and "nowhere/at-all" in stages["model"]["error"] and not stages["data"]["error"]
    code, found = checked(capsys, "sft", "--config", "sft.yaml", "--silence_findings", '{"PT-X": "y"}')
    assert code == 78 and "'PT-X' is neither the code nor the name" in found["stages"][0]["error"]


def test_a_folder_that_cannot_be_written_a_missing_checkpoint_and_a_hub_that_does_not_answer_are_refused(
    folder, capsys, monkeypatch
):
    Path("file").write_text("x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for flags, said in (
        (("--output_dir", "file/run"), "cannot be written: "),
        (("--output_dir", "/proc/run"), "cannot be written: "),  # Root may write there, but the file system cannot.
        (("--output_dir", ""), "output_dir is empty"),
        (("--output_dir", "~no-such-user/run"), "output_dir='~no-such-user/run' names no folder"),
        (("--output_dir", "new/" + "a" * 300), "File name too long"),
        (("--resume_from_checkpoint", "true"), "there is no complete checkpoint in 'out'"),
        (("--push_to_hub", "true"), "push_to_hub=True, but the Hub refuses this run: "),
    ):
        code, found = checked(capsys, "sft", "--config", "sft.yaml", *flags)
        (error,) = [stage["error"] for stage in found["stages"] if stage["error"]]
        assert code == 78 and said in error and not Path("new").exists()


def test_a_training_command_that_is_refused_exits_with_78(folder, capsys):
    argv = ["sft", "--config", "sft.yaml", "--dataset_name", "broken.jsonl"]
    assert main(argv) == 78
    assert "error: PT-D030: 1 of 13 rows" in capsys.readouterr().err


def test_an_unknown_command_names_the_closest(folder, capsys):
    assert main(["check", "gpro", "--config", "grpo.yaml"]) == 1
    assert "did you mean 'grpo'" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_launched_processes_hand_their_exit_code_on(folder):
    """A launcher makes 1 of every failure; the command says 78 all the same."""
    argv = [
        "sft",
        "--config",
        "sft.yaml",
        "--dataset_name",
        "broken.jsonl",
        "--num_processes",
        "2",
        "--use_cpu",
        "true",
    ]
    done = forks.run(["-m", "posttrain.cli.main", *argv], cwd=os.getcwd(), timeout=200)
    assert done.returncode == 78, done.stderr[-2000:]
    assert "PT-D030: 1 of 13 rows" in done.stderr


def test_what_trl_would_do_otherwise_is_said_once_with_what_restores_it(folder, capsys):
    write("judged.jsonl", [{"prompt": f"{i}?", "completion": str(i), "label": bool(i % 2)} for i in range(8)])
    _, found = checked(capsys, "kto", "--config", "sft.yaml", "--dataset_name", "judged.jsonl")
    (stage,) = [stage for stage in found["stages"] if stage["name"] == "from TRL"]
    assert 'train_sampling_strategy="sequential"' in stage["result"] and not stage["error"]
    _, found = checked(
        capsys,
        "kto",
        "--config",
        "sft.yaml",
        "--dataset_name",
        "judged.jsonl",
        "--train_sampling_strategy",
        "sequential",
    )
    assert not [stage for stage in found["stages"] if stage["name"] == "from TRL"]


def test_the_defaults_that_differ_on_purpose_are_those_of_the_configs(tmp_path):
    import posttrain
    from posttrain.cli.check import DIFFERENT

    for (kind, field), (theirs, _, _) in DIFFERENT.items():
        config = getattr(posttrain, f"{kind}Config")(str(tmp_path), use_cpu=True)
        assert getattr(config, field) != theirs, (kind, field)


@pytest.mark.parametrize("broken", ["", "torn", "cut"])
def test_rows_of_images_are_read_as_their_trainer_reads_them(pictured, broken, capsys):
    import datasets

    from tests.methods.test_vision_trainers import png
    from tests.vision_families import noise

    rows = datasets.load_dataset("parquet", data_files="answers.parquet")["train"]
    rows = rows.cast_column("images", datasets.List(datasets.Image(decode=False))).to_list()
    if broken == "torn":
        data = png(noise(84, 56, 9))["bytes"]
        rows[4]["images"] = [{"bytes": data[: len(data) // 2], "path": None}]
    elif broken == "cut":
        rows[4]["prompt"][0]["content"][-1]["text"] = "x" * 300
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    dataset.to_parquet("rows.parquet")
    flags = ["--output_dir", "o", "--model_name_or_path", "model", "--report_to", "none", "--bf16", "False"]
    limit = ["--max_length", "250"] if broken == "cut" else []
    code, found = checked(capsys, "sft", *flags, *limit, "--dataset_name", "rows.parquet")
    told = [stage["error"] for stage in found["stages"] if stage["error"]]
    codes = {(one["code"], one["severity"]) for one in found["findings"]}
    assert code == (78 if broken else 0), (told, codes)
    if broken == "torn":
        assert "row 4" in told[0] and "PT-G003" in told[0], (told, codes)
    elif broken == "cut":
        assert "PT-G001" in told[0]
    else:
        assert not told and not any(severity == "error" for _, severity in codes)
        assert any("rows of" in stage["result"] for stage in found["stages"])


def test_a_teacher_that_is_not_there_is_told_without_training(folder, capsys):
    write("p.jsonl", [{"prompt": "a"}] * 8)
    teacher = ["--dataset_name", "p.jsonl", "--teacher_model_name_or_path"]
    code, found = checked(capsys, "distill", "--config", "sft.yaml", *teacher, "./nowhere")
    (stage,) = [stage for stage in found["stages"] if stage["name"] == "teacher"]
    assert code == 78 and "model './nowhere' was not found" in stage["error"]


def test_memory_and_versions_are_judged_by_the_model_options_of_the_command(folder, capsys, tiny_model):
    """Without them bfloat16 was counted as float32, and an adapter's plan was no plan at all."""
    limit = str(9 * sum(parameter.numel() for parameter in tiny_model.parameters()) / 2**30)
    asked = ["sft", "--config", "sft.yaml", "--learning_rate", "1e-2", "--memory_limit_gib", limit]
    _, found = checked(capsys, *asked)
    assert "PT-M001" in [finding["code"] for finding in found["findings"]]
    for options in (["--dtype", "bfloat16"], ["--use_peft", "--lora_r", "1", "--lora_target_modules", "q_proj"]):
        _, found = checked(capsys, *asked, *options)
        assert "PT-M001" not in [finding["code"] for finding in found["findings"]]
        assert {row["outcome"] for row in found["checks"] if row["code"].startswith("PT-M00")} <= {
            "found",
            "nothing found",
        }
    _, found = checked(capsys, "sft", "--config", "sft.yaml", "--attn_implementation", "flash_attention_2")
    assert "PT-V001" in [finding["code"] for finding in found["findings"]]


@pytest.fixture
def trainable(tiny_model_dir, tmp_path, monkeypatch, sums):
    """Configs and data of two commands, with a model that can be loaded."""
    monkeypatch.chdir(tmp_path)
    write("chats.jsonl", sums)
    Path("data").mkdir()
    write("data/train.jsonl", sums)
    write("data/test.jsonl", sums[:4])
    write("prompts.jsonl", [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(8)])
    shared = f"model_name_or_path: {tiny_model_dir}\noutput_dir: out\nbf16: false\nreport_to: none\nmax_length: 64\n"
    Path("sft.yaml").write_text(shared + "dataset_name: chats.jsonl\nper_device_train_batch_size: 4\n")
    Path("grpo.yaml").write_text(
        shared.replace("max_length: 64\n", "")
        + "dataset_name: prompts.jsonl\nnum_generations: 4\nper_device_train_batch_size: 4\n"
        "max_completion_length: 64\nreward_funcs: think_format_reward\n"
    )
    return tmp_path


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_command_that_took_a_step_is_ready_and_nothing_is_written(command, trainable, capsys):
    before = sorted(trainable.rglob("*"))
    assert main(["check", command, "--config", f"{command}.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"{command}: ready to train" in out and "one step" in out
    assert sorted(trainable.rglob("*")) == before


def test_warnings_of_the_config_are_counted_once(trainable, capsys):
    assert main(["check", "sft", "--config", "sft.yaml", "--learning_rate", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("learning_rate=0") == 1 and "(0 errors, 1 warnings" in out


def test_the_folder_of_the_model_as_output_dir_is_a_warning(trainable, capsys):
    shutil.copytree(yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"], "model")
    argv = ["--config", "sft.yaml", "--model_name_or_path", "model", "--output_dir", "model"]
    assert main(["check", "sft", *argv, "--no-model", "--json"]) == 0
    assert "is the folder of the model" in str(json.loads(capsys.readouterr().out)["warnings"])


def test_warnings_of_the_first_step_are_shown(trainable, capsys):
    options = ["--use_peft", "true", "--lora_modules_to_save", "nothing"]
    config = Path("model/config.json")
    shutil.copytree(yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"], "model")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 8}))
    assert main(["check", "sft", "--json", "--config", "sft.yaml", "--model_name_or_path", "model", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "PT-T003" in [finding["code"] for finding in found["findings"]]
    assert any("modules_to_save: ['nothing'] match no module" in text for text in found["warnings"])
    assert main(["check", "grpo", "--config", "grpo.yaml"]) == 0
    assert (
        "(0 errors, 0 warnings" in capsys.readouterr().out
    )  # The trial's completions are cut, those of the run are not.


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_findings_and_warnings_from_before_the_first_step_are_reported(command, trainable, capsys, monkeypatch):
    early = [code for code, one in registry.load().items() if one.moment != "log_step" and not code.startswith("PT-L")]

    def step(trainer, resume):
        trainer.preflight.report(registry.finding(code, "warning", "what", "here", "why", "fix") for code in early)
        logging.getLogger("posttrain.loop.step").warning("PT-K003: a code without a finding")

    monkeypatch.setattr("posttrain.cli.check.try_step", step)
    assert main(["check", command, "--config", f"{command}.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["code"] for one in found["findings"]} >= set(early)
    assert found["warnings"] == ["PT-K003: a code without a finding"]


def test_a_penalty_that_no_completion_reaches_is_reported(trainable, capsys):
    Path("penalty.py").write_text(
        "from posttrain.rewards import get_soft_overlong_punishment\nlong = get_soft_overlong_punishment(500, 100)\n"
    )
    argv = ["--config", "grpo.yaml", "--reward_funcs", "think_format_reward", "penalty.py:long", "--json"]
    for flags in ([], ["--no-model"]):
        assert main(["check", "grpo", *argv, *flags]) == 0
        assert [one["code"] for one in json.loads(capsys.readouterr().out)["findings"]].count("PT-R021") == 1


def test_a_teacher_with_another_chat_template_is_reported(trainable, capsys):
    shutil.copytree(yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"], "teacher")
    template = Path("teacher/chat_template.jinja")
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|>the "))
    argv = ["--config", "sft.yaml", "--teacher_model_name_or_path", "teacher", "--max_completion_length", "8", "--json"]
    assert main(["check", "gkd", *argv]) == 0
    assert "PT-K003" in [one["code"] for one in json.loads(capsys.readouterr().out)["findings"]]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_tokens_of_the_saved_model_are_checked(trainable, capsys, method):
    """The pad token of the tiny tokenizer ends texts."""
    argv = ["check", method, "--json", "--config", f"{method}.yaml"]
    assert main(argv) == 0
    assert "PT-K101" in [one["code"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert main([*argv, "--pad_token", "<|im_start|>"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "PT-K101" not in [one["code"] for one in found["findings"]]
    assert any("aligned accordingly" in text for text in found["warnings"])  # A run logs it too.


def test_reward_functions_of_a_file_can_be_sent_to_workers(tmp_path):
    file = tmp_path / "paid_by_length.py"
    file.write_text("def paid(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n")
    first, again = (named_object(f"{file}:paid", "reward_funcs") for _ in range(2))
    assert first is again and pickle.loads(pickle.dumps(again)) is first


EVALUATES = ("--eval_strategy", "steps", "--eval_steps", "2")


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("sft", EVALUATES, "eval_strategy='steps' needs a split 'test'"),
        ("grpo", EVALUATES, "eval_strategy='steps' needs a split 'test'"),
        (
            "sft",
            ("--use_peft", "true", "--lora_target_modules", "query"),
            "target_modules={'query'} of peft_config match no",
        ),
        (
            "sft",
            (
                *EVALUATES,
                "--dataset_name",
                "data",
                "--metric_for_best_model",
                "eval_accuracy",
                "--save_strategy",
                "best",
            ),
            "metric_for_best_model='eval_accuracy': the evaluation has no such metric. The most similar metrics are ['eval_",
        ),
        ("sft", ("--accelerate_config", "zero2", "--num_processes", "1"), "a launch with DeepSpeed needs the package"),
        ("sft", ("--accelerate_config", "fsdp2", "--num_processes", "2"), "accelerate uses MULTI_CPU on 'cpu'"),
        ("sft", ("--fsdp", "full_shard", "--num_processes", "2"), "accelerate uses MULTI_CPU on 'cpu'"),
        ("sft", ("--optim_args", "foo=1"), "optim_args='foo=1' has no effect"),
        ("sft", ("--optim_args", "foo"), "must have the form 'key=value,key=value'"),
        ("sft", ("--use_peft", "true", "--lora_target_modules", "([bad"), "is not a valid regular expression"),
        ("sft", ("--adam_beta2", "1.5"), "adam_beta2=1.5 must be a finite number of at least 0 and below 1"),
        ("grpo", ("--reward_weights", "0"), "reward_weights=[0.0] must be numbers from"),
        ("grpo", ("--reward_weights", "nan"), "reward_weights=[nan] must be a list of finite values"),
        (
            "grpo",
            ("--per_device_train_batch_size", "64"),
            "train_dataset has 8 prompts, but a generation batch takes 16",
        ),
    ],
)
def test_what_a_start_would_refuse_is_refused(command, options, said, trainable, capsys):
    assert main(["check", command, "--config", f"{command}.yaml", *options]) == 78
    out = " ".join(capsys.readouterr().out.split())
    assert said in out and f"{command}: refused" in out


def test_a_run_that_resumes_is_tried_from_its_checkpoint(trainable, sums, capsys):
    options = ["--config", "sft.yaml", "--save_steps", "2"]
    assert main(["sft", *options, "--max_steps", "2"]) == 0
    options += ["--max_steps", "4", "--resume_from_checkpoint", "out/checkpoint-2"]
    assert main(["check", "sft", *options]) == 0, capsys.readouterr().out
    write("chats.jsonl", sums[:11])
    assert main(["check", "sft", *options]) == 78
    assert "the training rows have changed since the run began" in " ".join(capsys.readouterr().out.split())


def test_a_schedule_that_reads_a_missing_metric_ends_the_run_with_one_line(trainable, capsys):
    options = (
        "--dataset_name",
        "data",
        "--lr_scheduler_type",
        "reduce_lr_on_plateau",
        "--metric_for_best_model",
        "eval_foo",
    )
    assert main(["sft", "--config", "sft.yaml", *EVALUATES, *options, "--eval_steps", "1", "--max_steps", "2"]) == 1
    assert "metric_for_best_model='eval_foo': the evaluation has no such metric" in capsys.readouterr().err


def test_a_check_that_could_not_run_is_an_error(trainable, capsys, monkeypatch, caplog):
    def broken(context):
        raise KeyError("column")

    name, probe = next((name, one) for name, one in registry.PROBES.items() if one.moment == "config" and not one.part)
    monkeypatch.setitem(registry.PROBES, name, dataclasses.replace(probe, function=broken))
    assert main(["check", "sft", "--config", "sft.yaml", "--no-model"]) == 78
    assert "a check could not be completed" in capsys.readouterr().out


def test_weights_that_are_not_finite_are_refused(trainable, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"], "model")
    weights = load_file("model/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    assert main(["check", "sft", "--config", "sft.yaml", "--model_name_or_path", "model"]) == 78
    assert "The weights ['model.norm.weight'] contain NaN or infinity" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_that_would_take_no_step_is_shown_and_max_steps_are_those_of_the_config(trainable, capsys):
    assert main(["sft", "--config", "sft.yaml", "--save_steps", "2", "--max_steps", "2"]) == 0
    options = ["--config", "sft.yaml", "--max_steps", "2", "--resume_from_checkpoint", "out/checkpoint-2"]
    capsys.readouterr()
    assert main(["check", "sft", *options]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint is at step 2 and max_steps is 2, so the run ends without a step" in out
    assert "max_steps=3" not in out


def test_tokenized_evaluation_rows_are_not_prepared_again(trainable, capsys):
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    Path("chats").mkdir()
    for name in ("train", "test"):
        Path(f"chats/{name}.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    options = ["--dataset_name", "chats", "--assistant_only_loss", "true", *EVALUATES]
    assert main(["check", "sft", "--config", "sft.yaml", *options]) == 0, capsys.readouterr().out


def test_batches_are_those_of_the_processes_that_will_start(trainable, capsys):
    small = ["--config", "grpo.yaml", "--per_device_train_batch_size", "2"]
    assert main(["check", "grpo", *small]) == 78
    assert "2 per device x 1 process" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "grpo", *small, "--num_processes", "2"]) == 0, capsys.readouterr().out
    assert main(["check", "grpo", *small]) == 78


def test_a_dataset_beside_a_mixture_is_ignored_with_a_warning(trainable, capsys):
    mixture = f"datasets:\n- path: {yaml.safe_load(Path('sft.yaml').read_text())['dataset_name']}\n"
    Path("mixed.yaml").write_text(Path("sft.yaml").read_text() + mixture)
    assert main(["check", "sft", "--config", "mixed.yaml"]) == 0
    both = capsys.readouterr()
    assert "is ignored, because datasets is set" in both.out + both.err


def test_a_check_creates_nothing_on_the_hub(trainable, capsys, monkeypatch):
    from posttrain.report.completions import CompletionsHubCallback

    monkeypatch.setattr(
        CompletionsHubCallback, "on_train_begin", lambda *_, **__: pytest.fail("a repository is created")
    )
    argv = ["--config", "grpo.yaml", "--log_completions", "true", "--log_completions_hub_repo", "me/x"]
    assert main(["check", "grpo", *argv]) == 0


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("async-distillation", (), "no teacher is set"),
        (
            "async-distillation",
            ("--teacher_model_name_or_path", '{"a": "MODEL", "b": "MODEL"}'),
            "row 0: teacher_id=None",
        ),
        (
            "async-distillation",
            ("--dataset_name", "null.jsonl"),
            "row 3, column 'prompt': message 0 (role 'user') has no content",
        ),
        ("async-grpo", ("--dataset_name", "long.jsonl"), "does not fit the model's context"),
        ("async-grpo", ("--max_completion_length", "100000"), "leaves no room for a prompt"),
        ("async-grpo", ("--token_budget", "5"), "every rollout would be dropped"),
        ("async-grpo", ("--use_peft", "true", "--lora_target_modules", "lm_head"), "are tied in the base model"),
    ],
)
def test_what_the_constructor_of_an_asynchronous_trainer_refuses_is_refused(command, options, said, trainable, capsys):
    model = yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"]
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    write("long.jsonl", [*rows, {"prompt": [{"role": "user", "content": "long " * 3000}], "answer": ""}])
    rows[3]["prompt"][0]["content"] = None
    write("null.jsonl", rows)
    config = (
        Path("grpo.yaml")
        .read_text()
        .replace("num_generations: 4\n", "" if "dist" in command else "num_generations: 2\n")
    )
    config = config.replace("reward_funcs: think_format_reward\n", "") if "dist" in command else config
    Path("async.yaml").write_text(config)
    assert (
        main(["check", command, "--config", "async.yaml", *(option.replace("MODEL", model) for option in options)])
        == 78
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_an_asynchronous_trainer_is_created_without_a_step_and_its_findings_are_reported(
    trainable, capsys, monkeypatch
):
    monkeypatch.setattr("posttrain.cli.check.try_step", lambda *_: pytest.fail("a step is tried"))
    model = yaml.safe_load(Path("sft.yaml").read_text())["model_name_or_path"]
    config = (
        Path("grpo.yaml")
        .read_text()
        .replace("num_generations: 4\n", "")
        .replace("reward_funcs: think_format_reward\n", "")
    )
    Path("async.yaml").write_text(config)
    before = sorted(trainable.rglob("*"))
    argv = ["--config", "async.yaml", "--teacher_model_name_or_path", model, "--json"]
    assert main(["check", "async-distillation", *argv]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "PT-K006" in [one["code"] for one in found["findings"]] and "not tried" in found["stages"][-1]["result"]
    assert sorted(trainable.rglob("*")) == before
