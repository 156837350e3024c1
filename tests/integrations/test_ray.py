"""Commands on machines: leashes and the far side without Ray, and (slow) whole runs on a real local Ray cluster."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.integrations.ray import CONFIG_FILE, Machine, Need, State, check_fit

ROOT = Path(__file__).parents[2]
LEASH = [sys.executable, "-m", "posttrain.integrations.leash", sys.executable, "-c"]
SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def leashed(code):
    return subprocess.Popen([*LEASH, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def is_there(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


# Leashes -------------------------------------------------------------------------------------------------------------


def test_a_command_ends_when_its_holder_is_gone():
    held = leashed(SLEEPS)
    pid = int(held.stdout.readline())
    held.stdin.close()
    assert held.wait(20) == 128 + signal.SIGTERM
    assert not is_there(pid)


def test_a_leash_passes_signals_on_and_exit_codes_back():
    held = leashed(
        "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); print(1, flush=True); signal.pause()"
    )
    held.stdout.readline()
    held.send_signal(signal.SIGINT)
    assert held.wait(20) == 7


def test_a_command_ends_when_its_leash_is_killed():
    held = leashed(SLEEPS)
    pid = int(held.stdout.readline())
    held.kill()
    assert held.wait(20) == -signal.SIGKILL
    assert wait_until(lambda: not is_there(pid))


def test_ctrl_c_arrives_where_it_was_blocked_and_ignored():
    """As processes are that Ray starts."""
    block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); signal.signal(signal.SIGINT, signal.SIG_IGN)"
    code = "import time; print(1, flush=True); time.sleep(60)"
    starter = [sys.executable, "-c", f"{block}; os.execv(sys.executable, sys.argv[1:])", *LEASH, code]
    held = subprocess.Popen(
        starter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    held.stdout.readline()
    held.send_signal(signal.SIGINT)
    assert held.wait(20) == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in held.stderr.read()


def test_what_a_command_leaves_behind_ends_with_it():
    held = leashed(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); sys.stdin.read(); import time; time.sleep(1)"
    )
    pid = int(held.stdout.readline())
    assert held.wait(20) == 0
    assert wait_until(lambda: not is_there(pid))


# The far side --------------------------------------------------------------------------------------------------------


def ended(machine):
    said, deadline = [], time.monotonic() + 30
    while time.monotonic() < deadline:
        state = machine.poll(1.0)
        said += state.said
        if state.code is not None:
            return state, "".join(text for stream, text in said if stream == 1)
    raise AssertionError("still running")


def test_a_machine_runs_a_module_with_the_config_that_was_sent_and_keeps_its_last_lines(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys\nprint(open(sys.argv[1]).read(), os.environ['WORD'], 'ä')\n"
        "[print(f'{i} %', end=chr(13), file=sys.stderr) for i in range(3)]\n"
        "[print(f'line {i}', file=sys.stderr) for i in range(50)]\nsys.exit(5)\n"
    )
    machine = Machine()
    assert (
        machine.start(["job", CONFIG_FILE], {"WORD": "hello", "PYTHONPATH": str(ROOT)}, str(tmp_path), "max_steps: 2")
        == ""
    )
    state, out = ended(machine)
    assert (state.code, out) == (5, "max_steps: 2 hello ä\n")
    assert state.tail.splitlines() == [f"line {i}" for i in range(20, 50)]


def test_a_machine_whose_command_was_never_started_has_nothing_to_say():
    machine = Machine()
    machine.stop()
    assert machine.poll() == State(0)


def test_a_working_directory_that_is_not_there_is_told():
    assert "does not exist" in Machine().start(["job"], {}, "/no/such/folder", None)


# What is asked of a cluster ------------------------------------------------------------------------------------------


def test_too_little_in_all_is_refused_with_both_numbers():
    needs = [Need("trainer", 4, 8), Need("rollout server 1", 1, 2)]
    machines = [{"CPU": 64.0, "GPU": 8.0}]
    with pytest.raises(
        ConfigError, match=r"needs 10 GPUs \(trainer 8, rollout server 1 2\).* at h:1 has 8 on 1 machine\."
    ):
        check_fit(needs, machines, "h:1")
    with pytest.raises(ConfigError, match=r"needs 5 CPUs .* has 3 on 2 machines"):
        check_fit(needs, [{"CPU": 1.0, "GPU": 8.0}, {"CPU": 2.0, "GPU": 8.0}], "h:1")


def test_a_command_that_fits_on_no_single_machine_is_refused():
    with pytest.raises(ConfigError, match=r"the trainer needs 4 CPUs and 8 GPUs on one machine.* has 32 and 4"):
        check_fit([Need("trainer", 4, 8)], [{"CPU": 32.0, "GPU": 4.0}] * 3, "h:1")
    check_fit([Need("trainer", 4, 4), Need("rollout server 1", 1, 4)], [{"CPU": 32.0, "GPU": 4.0}] * 2, "h:1")


def test_clients_of_servers_read_the_token_of_the_environment(monkeypatch):
    from posttrain.rollouts.server.client import VLLMClient

    monkeypatch.setattr(VLLMClient, "check_server", lambda *_: None)
    monkeypatch.setattr(VLLMClient, "info", lambda self: {})
    monkeypatch.setenv("POSTTRAIN_API_KEY", "secret")
    assert VLLMClient("http://127.0.0.1:1").session.headers["Authorization"] == "Bearer secret"
    assert VLLMClient("http://127.0.0.1:1", api_key="own").session.headers["Authorization"] == "Bearer own"


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
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-4000:]
    assert re.search(r"the rollout server 1 on \S+: http://127.0.0.1:\d+", err) and "is healthy" in err
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sampling/sampling_logp_difference/mean" in line]
    assert len(steps) == 2  # Only a foreign engine's log-probs are compared with the trainer's.
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert (folder / "run" / "model.safetensors").is_file()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_async_grpo_asks_the_servers_too(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--rollout_servers", "2", "--max_staleness", "1", name="async-grpo")
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-4000:]
    assert err.count("is healthy") == 2 and (folder / "run" / "model.safetensors").is_file()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_saves_and_leaves_nothing_behind(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=90)
    assert run.returncode == 130, err[-4000:]
    assert list((folder / "run").glob("checkpoint-*")), err[-4000:]
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_that_fails_hands_its_code_and_words_on_and_the_servers_end(cluster, folder, tiny_model_dir):
    (folder / "rewards.py").write_text("def length(completions, **_):\n    raise KeyError('no such price')\n")
    run = command(folder, tiny_model_dir, cluster)
    _, err = run.communicate(timeout=240)
    assert run.returncode == 1 and "no such price" in err and "the trainer on" in err
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_trainer_ends_its_servers_and_a_killed_launcher_ends_all(cluster, folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    (trainer,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (words := path.read_bytes().split(b"\0"))[2:5] == [b"posttrain.cli.main", b"grpo", b"--model_name_or_path"]
        and str(folder).encode() in path.read_bytes()
        and words[1] == b"-m"
        and is_there(path.parent.name)
    ]
    os.kill(trainer, signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL, err[-4000:]
    assert wait_until(lambda: not left(folder)), left(folder)
    run = command(folder, tiny_model_dir, cluster, "--disable_tqdm", "true", "--output_dir", "again", steps=100000)
    read_until(run.stdout, "'loss'|loss")
    run.kill()
    run.communicate(timeout=30)
    assert wait_until(lambda: not left(folder), 60), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(cluster, folder, tmp_path):
    run = command(folder, str(tmp_path / "no-model"), cluster)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 1 and "the rollout server 1 on" in err and "no-model" in err.partition("log:")[2]
    assert "Traceback" not in err.partition("error:")[2].partition("log:")[0] and "ray.exceptions" not in err
    assert not (folder / "run").exists()
    assert wait_until(lambda: not left(folder)), left(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_more_than_the_cluster_has_is_refused_with_both_numbers(cluster, folder):
    run = command(folder, "m", cluster, "--rollout_servers", "9")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert re.search(r"needs 10 CPUs \(trainer 1, rollout server 1 1, .* has 4 on 1 machine", err)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_cluster_of_its_own_ends_with_the_run(folder, tiny_model_dir):
    run = command(folder, tiny_model_dir, "local", "--rollout_servers", "0")
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-4000:]
    assert (folder / "run" / "model.safetensors").is_file()
