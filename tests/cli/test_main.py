"""The command itself: exit codes, help without heavy imports, and training from a config end to end."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from posttrain.cli.commands import TRAINING
from posttrain.cli.main import COMMANDS, main
from posttrain.cli.options import EVALUATION, starter
from posttrain.cli.train import CONFIGS, _accelerate_shortcut, _launch_flags, parse
from posttrain.errors import ConfigError
from tests.conftest import build_model


def test_no_command_and_help_print_help_and_succeed(capsys):
    assert main([]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.split("training commands")[2].splitlines()
    assert all(len(line) <= 110 for line in lines)
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= set(COMMANDS)


def test_errors_write_terminal_escapes_of_files_as_text(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text('output_dir: x\n"\\e]52;c;Y2xpcGJvYXJk\\a": 1\n', encoding="utf-8")
    assert main(["sft", "--config", str(tmp_path / "run.yaml")]) != 0
    shown = capsys.readouterr().err
    assert "]52" in shown and "\x1b" not in shown and "\x07" not in shown


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_commands_need_no_encoding_of_their_own(command, tmp_path, tiny_tokenizer, monkeypatch):
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    build_model(len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "Zürich 東京"}\n' * 2, encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    options = [
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--dataset_name",
        str(rows),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert main([command, "sft", *options]) == 0
    sys.stdout.flush()
    assert raw.getvalue()


def test_an_unknown_command_is_wrong_usage(capsys):
    assert main(["gpro"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_help_init_recipes_and_completion_import_no_torch():
    commands = [["--help"], ["env", "--help"], ["grpo", "--help"], ["init", "sft"], ["recipes"], ["completion", "bash"]]
    code = f"import sys; from posttrain.cli.main import main; print([main(c) for c in {commands}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_env_shows_versions_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "versions.transformers: " in out
    assert "hf_secret_value" not in out


@pytest.mark.parametrize("version", ["0.26.0", None])
def test_a_vllm_that_does_not_tell_versions_of_weights_is_not_started(version, capsys, monkeypatch):
    monkeypatch.setattr("posttrain.checks.machine.installed_version", lambda name: version)
    assert main(["vllm-serve", "--model", "m"]) == 1
    said = capsys.readouterr().err
    assert "vllm>=0.27.0" in said and (version or "not installed") in said and "pip install" in said
    assert main(["vllm-serve", "--help"]) == 0  # That needs none.


def test_a_config_error_is_one_line_and_exit_1(capsys):
    assert main(["sft", "--output_dir", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --model_name_or_path is missing")
    assert "Traceback" not in err


def test_traceback_can_be_asked_for():
    with pytest.raises(ConfigError):
        main(["sft", "--output_dir", "x", "--traceback"])


def test_an_unknown_flag_is_no_launcher_option_either():
    with pytest.raises(ConfigError, match=r"'--learning_rat' \(did you mean 'learning_rate'"):
        _launch_flags(["--learning_rat", "1"], "sft")
    assert _launch_flags(["--num_processes", "2"], "sft") == ["--num_processes", "2"]


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_an_option_of_a_begun_config_that_is_uncommented_keeps_its_default(name):
    """YAML reads the backslashes of a single-quoted text as they are: the line breaks of templates became letters."""
    lines = [line[2:] for line in starter(name).splitlines() if re.match(r"# [a-z_0-9]+: ", line)]
    fields = {item.name: item for item in dataclasses.fields(TRAINING[name].config)}
    for option, line in ((line.partition(":")[0], line) for line in lines):
        if option in fields and option not in EVALUATION:
            value = yaml.safe_load(line)[option]
            default, make = fields[option].default, fields[option].default_factory
            default = make() if make is not dataclasses.MISSING else default
            assert value == default or float(value) == default, option


def test_accelerate_shortcut_names_a_packaged_file():
    rest, flags = _accelerate_shortcut(["--accelerate_config", "fsdp2", "--lr", "1"])
    assert rest == ["--lr", "1"]
    assert flags[:2] == ["--config_file", str(CONFIGS / "fsdp2.yaml")]
    with pytest.raises(ConfigError, match="did you mean 'zero3'"):
        _accelerate_shortcut(["--accelerate_config=zer3"])


def test_a_config_file_may_name_the_launchers_config_and_the_command_line_wins(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text("output_dir: out\naccelerate_config: zero2\nnum_processes: 3\n")
    _, launch = parse("sft", ["--config", str(file)])
    assert launch[:2] == ["--config_file", str(CONFIGS / "zero2.yaml")] and launch[-2:] == ["--num_processes", "3"]
    _, launch = parse("sft", ["--accelerate_config", "fsdp2", "--config", str(file), "--seed", "1"])
    assert launch[:2] == ["--config_file", str(CONFIGS / "fsdp2.yaml")] and "zero2" not in " ".join(launch)


def test_every_packaged_accelerate_config_is_one():
    import yaml

    kinds = {p.stem: yaml.safe_load(p.read_text())["distributed_type"] for p in CONFIGS.glob("*.yaml")}
    assert kinds == {
        "single_gpu": "NO",
        "multi_gpu": "MULTI_GPU",
        "zero1": "DEEPSPEED",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
        "fsdp1": "FSDP",
        "fsdp2": "FSDP",
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sft_then_grpo_from_configs_end_to_end(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}]} for i in range(8)
    ]
    data = write_jsonl(tmp_path / "chats.jsonl", chats)
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: {tiny_model_dir}\ndataset_name: {data}\noutput_dir: sft\nmax_steps: 2\nreport_to: none\n"
        "per_device_train_batch_size: 2\nlogging_steps: 1\nbf16: false\n"
    )
    assert main(["sft", "--config", "sft.yaml", "--learning_rate", "1e-3"]) == 0
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **kw):\n    return [-len(c[0]['content']) for c in completions]\n"
    )
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(8)])
    (tmp_path / "grpo.yaml").write_text(
        f"model_name_or_path: sft\ndataset_name: {prompts}\noutput_dir: grpo\nmax_steps: 2\nreport_to: none\nbf16: false\n"
        "per_device_train_batch_size: 4\nnum_generations: 4\nmax_completion_length: 6\nreward_funcs: my_rewards.short\n"
    )
    assert main(["grpo", "--config", "grpo.yaml"]) == 0
    assert (tmp_path / "grpo" / "model.safetensors").is_file()
    assert (tmp_path / "grpo" / "completions.parquet").is_file()


def test_an_unknown_reward_lists_the_known(tiny_model_dir, tmp_path, capsys):
    data = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
    flags = ["--model_name_or_path", tiny_model_dir, "--dataset_name", data, "--output_dir", str(tmp_path / "o")]
    assert main(["grpo", *flags, "--reward_funcs", "think_format_rewrd"]) == 1
    assert "did you mean 'think_format_reward'" in capsys.readouterr().err


# What commands name by text -------------------------------------------------------------------------------------------


def flags(model, folder, **options):
    """A run of one step on the command line."""
    base = {
        "model_name_or_path": model, "output_dir": folder / "out", "max_steps": 1, "report_to": "none", "bf16": "false",
        "per_device_train_batch_size": 4, "max_completion_length": 6, "logging_steps": 1,
    }  # fmt: skip
    return [word for name, value in (base | options).items() for word in (f"--{name}", str(value))]


def prompts_file(folder, count=8):
    return write_jsonl(folder / "p.jsonl", [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(count)])


@pytest.mark.parametrize("command", ["a2po", "gmpo"])
def test_every_variant_trains_from_the_command_line_with_a_reward_in_a_file(command, tiny_model_dir, tmp_path):
    (tmp_path / "own.py").write_text(
        "LIMIT = 3\ndef even(completions, **kw):\n    return [len(c[0]['content']) % 2 for c in completions]\n"
    )
    own = {"filter_all_incorrect": "false"} if command == "a2po" else {"num_generations": 4}
    words = flags(
        tiny_model_dir, tmp_path, dataset_name=prompts_file(tmp_path), reward_funcs=f"{tmp_path}/own.py:even", **own
    )
    assert main([command, *words]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_tools_and_an_environment_are_named_like_rewards(tmp_path, monkeypatch):
    from posttrain.cli.train import episode_parts, parser_for

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(
        "def add(a: int, b: int) -> int:\n    '''Add.\n\n    Args:\n        a: One.\n        b: Other.\n    '''\n    return a + b\n"
        "class Game:\n    def reset(self): ...\n"
    )
    words = [
        "--output_dir",
        "o",
        "--tools",
        "my_tools.add",
        "my_tools.py:add",
        "--environment_factory",
        "my_tools:Game",
    ]
    script, *_ = parser_for("grpo").parse_args_and_config(words)
    parts = episode_parts(script)
    assert [tool(2, 3) for tool in parts["tools"]] == [5, 5]
    assert parts["environment_factory"].__name__ == "Game"
    assert "rollout_func" not in parts


@pytest.mark.parametrize(
    ("command", "given", "match"),
    [
        ("grpo", {"reward_funcs": "missing.py:f"}, "reward_funcs: the file 'missing.py' does not exist"),
        ("grpo", {"reward_funcs": "bad.py:shrt"}, r"has no 'shrt' (did you mean 'short'?). It defines ['short']"),
        ("grpo", {"reward_funcs": "bad.shrt"}, r"has no 'shrt' (did you mean 'short'?). It defines ['short']"),
        ("grpo", {"reward_funcs": "bad.py:LIMIT"}, "'bad.py:LIMIT' is a int, but must be a function or class"),
        ("grpo", {"reward_funcs": "broken.py:f"}, "raised an error during import: ZeroDivisionError"),
        (
            "grpo",
            {"reward_funcs": "bad.py"},
            "'bad.py' is not the path of a Python object. Fix: pass module.name, or file.py:name",
        ),
        ("rloo", {"tools": "bad.py:short"}, "unknown argument '--tools'"),
        ("rloo", {"tool_timeout": "3"}, "unknown argument '--tool_timeout'"),
        ("grpo", {"tools": "nowhere.tool", "reward_funcs": "bad.py:short"}, "tools: 'nowhere.tool' cannot be imported"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_in_one_line(
    command, given, match, tiny_model_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("LIMIT = 3\ndef short(completions, **kw):\n    return [0.0] * len(completions)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    fits = {"dataset_name": prompts_file(tmp_path), "num_generations": 2}
    assert main([command, *flags(tiny_model_dir, tmp_path, **(fits | given))]) == 1
    err = capsys.readouterr().err
    assert match in err and "Traceback" not in err


def test_too_few_addresses_are_told_at_once():
    import resource

    least = (1_200_000_000, resource.RLIM_INFINITY)
    command = [sys.executable, "-m", "posttrain", "env"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, least)  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit, timeout=60)
    assert done.returncode == 1 and "1.12 GiB of address space" in done.stderr and "ulimit -v unlimited" in done.stderr


def test_the_short_help_shows_the_options_that_the_parser_knows_with_their_defaults(monkeypatch):
    from posttrain.cli import options
    from posttrain.cli.commands import TRAINING
    from posttrain.cli.train import parser_for

    for command in TRAINING:
        fields = parser_for(command).fields
        found = {name: one for group in options.groups(command).values() for name, one in group.items()}
        assert set(found) <= set(fields), command
        # Every option of the parser, each with a sentence.
        assert all(fields[name].metadata["help"].startswith("Not used. ") for name in set(fields) - set(found)), command
        assert all(one.sentence for one in found.values()), command
        for name, one in found.items():
            if one.default and type(fields[name].default) in (int, float, bool, str):
                assert eval(one.default) == fields[name].default, (command, name)
    monkeypatch.setenv("COLUMNS", "80")
    text = options.help_text("grpo")
    assert (
        re.search(r"--num_generations +Number of completions sampled per[^-]*\(8\)", text) and "ModelConfig" not in text
    )
    assert "..." not in text.partition("\n")[2] and all(len(line) <= 80 for line in text.splitlines())
    assert "Number of rows per micro-batch on each device, or auto (8)" in " ".join(text.split())


@pytest.mark.parametrize("method", ["grpo", "sft", "gkd", "dpo", "sdpo", "async-distillation"])
def test_a_config_to_begin_with_is_valid_with_and_without_its_comment_signs(method, tmp_path, monkeypatch, capsys):
    from posttrain.cli.train import parser_for

    monkeypatch.chdir(tmp_path)
    assert main(["init", method, "-o", "c.yaml"]) == main(["init", method, "-o", "new/folder/c.yaml"]) == 0
    assert main(["init", method, "-o", "c.yaml"]) == 1 and "already exists" in capsys.readouterr().err
    text = (tmp_path / "c.yaml").read_text()
    known = "|".join(parser_for(method).fields)
    whole, count = re.subn(rf"^# ((?:{known}): )", r"\1", text, flags=re.M)
    (tmp_path / "all.yaml").write_text(whole)
    assert count > 40
    for name in ("c.yaml", "all.yaml"):
        _, config, _, _ = parser_for(method).parse_args_and_config(["--config", name])
        assert config.output_dir == f"runs/{method}"
    if method == "gkd":
        assert config.teacher_model_name_or_path == "HuggingFaceTB/SmolLM2-360M-Instruct"


def test_recipes_are_listed_and_copied(tmp_path, capsys):
    assert main(["recipes"]) == 0
    assert "arXiv:2503.14476" in capsys.readouterr().out
    assert main(["recipes", "dapo", "-o", str(tmp_path / "d.yaml")]) == 0
    assert "epsilon_high: 0.28" in (tmp_path / "d.yaml").read_text()
    assert main(["recipes", "dapoo"]) == 1 and "did you mean 'dapo'" in capsys.readouterr().err


def test_the_shell_completes_commands_and_options(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "c.bash").write_text(capsys.readouterr().out)
    ask = "source c.bash; COMP_WORDS=({}); COMP_CWORD={}; _posttrain; echo ${{COMPREPLY[@]}}"
    for words, at, wanted in (("posttrain rec", 1, "recipes"), ("posttrain grpo --num_iter", 2, "--num_iterations")):
        done = subprocess.run(
            ["bash", "-c", ask.format(words, at)], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [wanted]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_by_its_tab_key_without_a_start_file(tmp_path, capsys):
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "c.zsh").write_text(capsys.readouterr().out)
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "dumb", "ZDOTDIR": str(tmp_path)}
    with subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env, start_new_session=True
    ) as shell:
        said = b""
        for typed, shown in (
            ("posttrain() { echo RAN $@ }; source c.zsh; echo LOA''DED\n", b"LOADED"),
            ("posttrain rec\t", b"recipes"), ("\n", b"RAN recipes"),
            ("posttrain grpo --num_iter\t", b"--num_iterations "), ("4\n", b"RAN grpo --num_iterations 4"),
        ):  # fmt: skip
            os.write(ours, typed.encode())
            until = time.monotonic() + 20
            while shown not in said and time.monotonic() < until:
                if select.select([ours], [], [], 0.1)[0]:
                    said += os.read(ours, 65536)
            assert shown in said, said
        shell.kill()


def test_several_trackers_may_be_named_in_a_file_and_on_the_command_line(tmp_path):
    from posttrain.cli.train import parse

    file = tmp_path / "c.yaml"
    file.write_text("report_to: [tensorboard, wandb]\noutput_dir: o\n")
    parsed, launch = parse("sft", ["--config", str(file)])
    assert parsed[1].report_to == ["tensorboard", "wandb"] and launch == []
    parsed, launch = parse("sft", ["--output_dir", "o", "--report_to", "none"])
    assert parsed[1].report_to == [] and launch == []


def test_digits_of_a_csv_file_are_text_and_labels_are_what_they_say(tmp_path):
    from posttrain.data.mixture import load_rows

    (tmp_path / "a.csv").write_text("prompt,answer,label\nWhat is 7?,007,True\n")
    assert load_rows(str(tmp_path / "a.csv"))["train"][0] == {"prompt": "What is 7?", "answer": "007", "label": True}


def test_max_hours_ends_a_run_after_its_step_with_a_checkpoint(tmp_path, tiny_model_dir, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b c"}\n' * 9)
    out = tmp_path / "run"
    base = ["sft", "--model_name_or_path", tiny_model_dir, "--dataset_name", str(rows), "--output_dir", str(out)]
    assert main([*base, "--max_steps", "500", "--max_hours", "0.000001", "--report_to", "none"]) == 0
    assert (out / "checkpoint-1" / "COMPLETE").is_file() and (out / "model.safetensors").is_file()
    assert "Ended at step 1 of 500" in capsys.readouterr().out
