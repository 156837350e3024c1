"""`--launcher ray`: how a command is taken apart, what is refused, and (slow) whole runs on a real local Ray cluster."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from posttrain.cli import launch_ray, train
from posttrain.cli.commands import TRAINING
from posttrain.errors import ConfigError, MissingDependencyError
from posttrain.extensions.ray import launch
from posttrain.extensions.ray.launch import RayRun

ROOT = Path(__file__).parents[3]
MODEL = ["--model_name_or_path", "m"]


def job(*tokens, name="grpo"):
    return RayRun(name, ["--launcher", "ray", *tokens], TRAINING[name].asks_servers)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "grpo.yaml"
    wanted = {"launcher": "ray", "rollout_servers": 3, "rollout_server_args": "--engine hf --max_model_len 64"}
    path.write_text(yaml.safe_dump(wanted | {"model_name_or_path": "m", "max_steps": 2, "use_peft": False}))
    return str(path)


def test_the_launcher_is_found_on_the_command_line_and_in_the_config_file(tmp_path, file, monkeypatch):
    assert launch_ray.is_wanted(["--launcher", "ray"]) and launch_ray.is_wanted(["--launcher=ray"])
    assert launch_ray.is_wanted(["--config", file])
    other = tmp_path / "other.yaml"
    other.write_text("max_steps: 1\n")
    assert not launch_ray.is_wanted(["--config", str(other), "--dataset_name", "launcher"])
    monkeypatch.setenv(launch_ray.STARTED, "1")  # The trainer has the same arguments, and trains.
    assert not launch_ray.is_wanted(["--config", file])


def test_the_trainer_gets_all_options_and_the_servers(file):
    own = ["--config", file, "--rollout_servers", "2", "--learning_rate", "1e-5", "--num_processes", "4"]
    made = job(*own)
    assert made.options.rollout_servers == 2  # The command line wins over the file.
    urls = ["http://a:1", "http://b:2"]
    assert made.trainer_arguments(urls) == [
        "grpo", "--launcher", "ray", *own,
        "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", "http://a:1,http://b:2",
    ]  # fmt: skip
    assert job(*MODEL, name="async-grpo").trainer_arguments(urls)[-5:] == [
        "--worker_engine", "server", "--vllm_server_base_url", *urls,
    ]  # fmt: skip
    assert job("--rollout_servers", "0", name="sft").trainer_arguments([])[0] == "sft"


def test_the_training_command_takes_the_launchers_options_and_trains(file, monkeypatch):
    monkeypatch.setenv(launch_ray.STARTED, "1")
    monkeypatch.setattr(train, "train", lambda *parsed: ran.append(parsed))
    ran = []
    train.run("grpo", ["--config", file, "--rollout_server_cpus", "2", "--bf16", "false", "--output_dir", "x"])
    ((name, _, config, *_),) = ran
    assert (name, config.max_steps) == ("grpo", 2)


def test_servers_serve_the_trainers_model(file):
    made = job("--config", file, "--model-name-or-path=n", "--model_revision", "abc")
    words = made.serve_arguments("10.0.0.2", 8123)
    assert words == [
        "--model", "n", "--host", "10.0.0.2", "--port", "8123", "--revision", "abc", "--engine", "hf", "--max_model_len", "64",
    ]  # fmt: skip


def test_where_vllm_is_installed_its_own_server_serves(monkeypatch):
    monkeypatch.setattr("posttrain.extensions.ray.launch.is_available", lambda name: True)
    args = ["--rollout_server_args", "--tensor-parallel-size 4"]
    made = job(*MODEL, *args, "--rollout_servers", "1", "--trust_remote_code", "true")
    assert made.serving == "vllm-serve"
    assert made.serve_arguments("h", 1)[-3:] == ["--trust_remote_code", "--tensor-parallel-size", "4"]
    with pytest.raises(ConfigError, match="logprobs-mode"):
        job(*MODEL, "--rollout_servers", "1", "--rollout_server_args", "--logprobs-mode raw_logprobs")


def test_resources_are_one_trainer_and_its_servers_with_gpus_only_where_there_are_some():
    made = job(*MODEL, "--rollout_servers", "2", "--num_processes", "6")
    assert made.bundles(with_gpus=True) == [{"CPU": 1, "GPU": 6}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert made.bundles(with_gpus=False) == [{"CPU": 1, "GPU": 0}] * 3
    given = job(*MODEL, "--trainer_gpus", "2", "--rollout_server_gpus", "0.5", "--trainer_cpus", "8")
    assert given.bundles(with_gpus=False) == [{"CPU": 8, "GPU": 2}, {"CPU": 1, "GPU": 0.5}]


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("sft", MODEL, "posttrain sft does not generate with rollout servers"),
        ("ppo", MODEL, "--rollout_servers 0"),
        ("grpo", [], "--model_name_or_path is missing"),
        ("grpo", [*MODEL, "--vllm_server_base_url", "http://x:1"], "both define where rollouts are generated"),
        ("grpo", [*MODEL, "--rollout_servers", "-1"], "rollout_servers=-1 must be at least 0"),
        ("grpo", [*MODEL, "--ray_timeout", "0"], "ray_timeout=0.0 must be above 0"),
        ("grpo", [*MODEL, "--rollout_server_args", "--max_num_seqs 0"], "max_num_seqs=0 must be at least 1"),
        ("grpo", [*MODEL, "--rollout_server_args", "--engin hf"], "did you mean 'engine'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_placed(name, tokens, message):
    with pytest.raises(ConfigError, match=message):
        job(*tokens, name=name)


def test_the_commands_with_servers_are_those_that_generate():
    asking = {name for name, command in TRAINING.items() if command.asks_servers}
    assert {"grpo", "gmpo", "a2po", "rloo", "online-dpo", "async-grpo", "gkd", "gold", "minillm", "ssd"} <= asking
    assert not asking & {"sft", "dpo", "kto", "reward", "ppo"}


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "posttrain\[ray\]"'):
        launch.run("grpo", ["--launcher", "ray", *MODEL], served=True)


def test_the_table_of_options_is_that_of_the_code():
    from tests.test_docs import default_of, options

    written = options("clusters.md", "option")
    assert written.pop("launcher") == ""
    made = {f.name: f for f in dataclasses.fields(launch_ray.RayArguments) if f.name != "launcher"}
    assert list(written) == list(made)
    for name, field in made.items():
        assert written[name].strip("'") == default_of(field).strip("'"), name


def test_commands_that_only_look_accept_the_launchers_options():
    rest = ["--launcher", "ray", "--rollout_server_args", "--engine hf --port 1", "--num_processes", "2"]
    assert train._launch_flags(rest, "grpo") == ["--num_processes", "2"]


def test_words_for_resuming(tmp_path):
    from posttrain.cli.train import resume_from

    def meaning(value):
        config = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=value)
        return resume_from(config), config.resume_from_checkpoint

    assert meaning("auto") == ("auto", None)
    assert [meaning(v)[0] for v in ("true", "false", None, "runs/x")] == [True, None, None, "runs/x"]


def is_there(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


# Real Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this machine with four cores, which several runs use one after the other."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def two_nodes():
    """A cluster of two nodes with two cores each, both on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    cluster.add_node(num_cpus=2, num_gpus=0)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def folder(tmp_path):
    """Where a run begins: prompts, and a reward that counts how often it was asked."""
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **_):\n    return [float(len(str(c))) for c in completions]\n"
    )
    return tmp_path


def command(folder, model, address, *more, name="grpo", steps=2):
    options = {
        "launcher": "ray", "ray_address": address, "model_name_or_path": model, "dataset_name": "prompts.jsonl",
        "reward_funcs": "rewards.py:length", "output_dir": "run", "max_steps": steps, "per_device_train_batch_size": 4,
        "num_generations": 4, "max_completion_length": 8, "bf16": "false", "report_to": "none", "logging_steps": 1,
        "use_cpu": "true", "gradient_checkpointing": "false", "rollout_server_args": "--engine native",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "posttrain.cli.main", name, *words, *more],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def left(folder):
    """Commands that belong to this test and still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes() and is_there(path.parent.name):
                found.append(path.read_bytes())
    return found


def read_until(stream, pattern):
    seen = ""
    for line in stream:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(seen)


@pytest.mark.slow
@pytest.mark.distributed
def test_grpo_trains_two_steps_with_a_server_that_ray_started(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 0, out[-4000:]
    assert re.search(r"posttrain: rollout server 1 \(http://127.0.0.1:\d+\)", out)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampling/sampling_logp_difference/mean" in line]
    assert len(steps) == 2  # Only a foreign engine's log-probs are compared with the trainer's.
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert (folder / "run" / "model.safetensors").is_file()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_and_their_server_train_on_two_nodes(two_nodes, folder, tiny_model_dir):
    """Each node has room for one of the two: strictly spread, and three processes take part."""
    more = [
        "--num_processes",
        "2",
        "--trainer_cpus",
        "2",
        "--rollout_server_cpus",
        "2",
        "--ray_placement",
        "STRICT_SPREAD",
    ]
    run = command(folder, tiny_model_dir, two_nodes, *more)
    out, _ = run.communicate(timeout=280)
    assert run.returncode == 0, out[-4000:]
    assert out.count("posttrain: rollout server") == 1
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampling/sampling_logp_difference/max" in line]
    assert len(steps) == 2 and max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert (folder / "run" / "checkpoint-2" / "rng_state_1.pth").is_file()  # Of the second rank.
    assert (folder / "run" / "model.safetensors").is_file()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_async_grpo_asks_the_servers_too(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--rollout_servers", "2", "--max_staleness", "1", name="async-grpo")
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 0, out[-4000:]
    assert out.count("posttrain: rollout server") == 2 and (folder / "run" / "model.safetensors").is_file()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_saves_and_leaves_nothing_behind(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 130, out[-4000:]
    assert list((folder / "run").glob("checkpoint-*")), out[-4000:]
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_that_fails_hands_its_code_and_words_on_and_the_servers_end(cluster, folder, tiny_model_dir):
    (folder / "rewards.py").write_text("def length(completions, **_):\n    raise KeyError('no such price')\n")
    run = command(folder, tiny_model_dir, cluster)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 1 and "no such price" in out
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_trainer_ends_its_servers_and_a_killed_launcher_ends_all(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    (trainer,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (words := path.read_bytes().split(b"\0"))[2:5] == [b"posttrain.cli.main", b"grpo", b"--launcher"]
        and str(folder).encode() in path.read_bytes()
        and words[1] == b"-m"
        and b"--use_vllm" in words  # Not the launcher, which has the same beginning.
        and is_there(path.parent.name)
    ]
    os.kill(trainer, signal.SIGKILL)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 128 + signal.SIGKILL, out[-4000:]
    assert wait_until(lambda: not left(folder)), left(folder)
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", "--output_dir", "again", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    run.kill()
    run.communicate(timeout=240)
    assert wait_until(lambda: not left(folder), 60), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(cluster, folder, tmp_path):
    run = command(folder, str(tmp_path / "no-model"), cluster)
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 1 and re.search(r"rollout server 1 \(\S+\) ended with code 1", out), out[-4000:]
    assert "no-model" in out and "ray.exceptions" not in out
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_more_than_the_cluster_has_is_refused_with_both_numbers(cluster, folder):
    run = command(folder, "m", cluster, "--rollout_servers", "9", "--ray_timeout", "3")
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 1
    assert re.search(r"needs 10 CPUs and 0 GPUs for the trainer and 9 servers.* has 4 CPUs and 0 GPUs free", out)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_cluster_of_its_own_ends_with_the_run(folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, "local", "--rollout_servers", "0")
    out, _ = run.communicate(timeout=240)
    assert run.returncode == 0, out[-4000:]
    assert (folder / "run" / "model.safetensors").is_file()
