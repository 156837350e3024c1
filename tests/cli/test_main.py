"""The command itself: exit codes, help without heavy imports, and training from a config end to end."""

import json
import subprocess
import sys

import pytest

from posttrain.cli.main import main
from posttrain.cli.train import CONFIGS, _accelerate_shortcut, _launch_flags
from posttrain.errors import ConfigError


def test_no_command_and_help_print_help_and_succeed(capsys):
    assert main([]) == main(["--help"]) == 0
    assert "training commands" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(capsys):
    assert main(["gpro"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_help_and_env_help_import_no_torch():
    code = "import sys; from posttrain.cli.main import main; main(['--help']); main(['env','--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_env_shows_versions_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "Transformers version" in out
    assert "hf_secret_value" not in out


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


def test_accelerate_shortcut_names_a_packaged_file():
    rest, flags = _accelerate_shortcut(["--accelerate_config", "fsdp2", "--lr", "1"])
    assert rest == ["--lr", "1"]
    assert flags[:2] == ["--config_file", str(CONFIGS / "fsdp2.yaml")]
    with pytest.raises(ConfigError, match="did you mean 'zero3'"):
        _accelerate_shortcut(["--accelerate_config=zer3"])


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
        "cp_2gpu": "FSDP",
        "ulysses_4gpu": "DEEPSPEED",
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
