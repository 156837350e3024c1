"""`posttrain serve` as a process of its own: real workers, real signals, a real (tiny) model."""

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from safetensors.torch import save

from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.server.replies import SAFETENSORS, checksum
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.serve.engines import KILL, expected

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(tmp_path, *options):
    """The command on a free port; its address, the process and its log."""
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"ready on (http://\S+)", log.read_text())) is None:
            assert running.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        while True:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(found[1] + "/health/", timeout=5)
                break
            assert time.monotonic() < deadline
        yield found[1], running, log
    finally:
        if running.poll() is None:
            running.terminate()
            try:
                assert running.wait(30) == 0  # A shutdown that was asked for.
            finally:
                running.kill()
                running.wait(10)


@pytest.mark.distributed
def test_a_killed_worker_is_told_at_once_and_the_process_ends_with_1(tmp_path, tiny_model_dir):
    with process(tmp_path, "--model", tiny_model_dir, "--engine", "tests.serve.engines:create") as (url, running, log):
        ask = {"prompts": [[5]], "max_tokens": 2}
        assert requests.post(url + "/generate/", json=ask, timeout=10).json()["completion_ids"] == [expected([5], 0, 2)]
        (pid,) = requests.get(url + "/info/", timeout=5).json()["worker_pids"]
        began = time.monotonic()
        response = requests.post(url + "/generate/", json={"prompts": [[KILL]]}, timeout=10)
        assert response.status_code == 503 and "signal 9" in response.text
        assert requests.get(url + "/health/", timeout=5).status_code == 503
        assert time.monotonic() - began < 2.0
        assert running.wait(20) == 1
        assert "worker 0 has ended" in log.read_text()
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow  # Two processes that import everything.
@pytest.mark.distributed
def test_sigterm_lets_requests_end_and_exits_with_0(tmp_path, tiny_model_dir):
    options = ["--model", tiny_model_dir, "--engine", "tests.serve.engines:create"]
    with process(tmp_path, *options) as (url, running, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(requests.post, url + "/generate/", json={"prompts": [[901]], "max_tokens": 2}, timeout=10)
        time.sleep(0.4)
        running.send_signal(signal.SIGTERM)
        assert slow.result().json()["completion_ids"] == [expected([901], 0, 2)]
        assert running.wait(20) == 0


@pytest.mark.distributed
def test_a_thousand_concurrent_requests_on_the_native_engine_and_none_is_lost(tmp_path, tiny_model_dir, tiny_tokenizer):
    """Each answer is compared with what the engine says in process; then weights are pushed, and it says the new ones'."""
    model = build_model(len(tiny_tokenizer))
    prompts = [[10 + i % 90, 10 + i // 90, 7] for i in range(1000)]
    sampling = Sampling(4, seed=5, min_p=None)
    wanted = NativeEngine(model, pad_token_id=0).generate([Request(p, 1, sampling) for p in prompts], sampling)
    options = ["--model", tiny_model_dir, "--engine", "native", "--max_num_seqs", "128", "--dtype", "float32"]
    with process(tmp_path, *options) as (url, _, _):
        session = requests.Session()
        session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=256))

        def ask(prompt):
            body = {"prompts": [prompt], "max_tokens": 4, "seed": 5, "generation_kwargs": {"ignore_eos": True}}
            return session.post(url + "/generate/", json=body, timeout=120)

        with concurrent.futures.ThreadPoolExecutor(250) as pool:
            replies = list(pool.map(ask, prompts))
        assert [r.status_code for r in replies] == [200] * 1000
        assert [r.json()["completion_ids"][0] for r in replies] == [r.token_ids for r in wanted]
        other = build_model(len(tiny_tokenizer), seed=1)
        push(url, other)
        new = NativeEngine(other, pad_token_id=0).generate([Request(p, 1, sampling) for p in prompts[:5]], sampling)
        for prompt, rollout in zip(prompts[:5], new, strict=True):
            reply = ask(prompt).json()
            assert reply["completion_ids"] == [rollout.token_ids] and reply["weight_version"] == 1
            flat = [at[0] for at in reply["logprobs"][0]]
            assert flat == pytest.approx(rollout.logp, abs=1e-4)
        # A prompt that no context holds ends neither the worker nor the server.
        assert session.post(url + "/generate/", json={"prompts": [[1] * 600]}, timeout=10).status_code == 400
        assert session.get(url + "/health/?deep=1", timeout=10).status_code == 200


def push(url, model):
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    assert (
        requests.post(url + "/begin_update/", json={"version": 1, "names": list(tensors)}, timeout=30).status_code
        == 200
    )
    data = save(tensors)
    headers = {"Content-Type": SAFETENSORS, "X-Version": "1", "X-Checksum": checksum(data)}
    reply = requests.post(url + "/update_bucket/", data=data, headers=headers, timeout=30)
    assert reply.json() == {"loaded": len(tensors), "unexpected": []}
    end = requests.post(url + "/end_update/", json={"version": 1}, timeout=30).json()
    assert end == {"version": 1, "loaded": len(tensors), "missing": [], "unexpected": []}


@pytest.mark.parametrize(
    "options, words",
    [
        (["--engine", "nativ"], "did you mean 'native'"),
        (["--engine", "native", "--tensor_parallel_size", "2"], "--data_parallel_size 2"),
        (["--engine", "vllm", "--data_parallel_size", "2"], "one server a GPU"),
        (["--port", "99999"], "port=99999"),
        (["--speculative_config", "{"], "not JSON"),
        (["--max_model_lenn", "5"], "did you mean 'max_model_len'"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_loaded(options, words, capsys):
    from posttrain.cli.main import main

    assert main(["serve", "--model", "no/such-model", *options]) == 1
    assert words in capsys.readouterr().err


def test_the_command_and_its_alias_know_the_options_of_trl(capsys):
    from posttrain.cli.main import main

    for name in ("serve", "vllm-serve"):
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        for option in (
            "model", "revision", "tensor_parallel_size", "data_parallel_size", "host", "port", "gpu_memory_utilization",
            "dtype", "max_model_len", "enable_prefix_caching", "enforce_eager", "kv_cache_dtype", "trust_remote_code",
            "log_level", "vllm_model_impl", "distributed_executor_backend", "speculative_config",
        ):  # fmt: skip
            assert f"--{option}" in text, option
    assert main(["serve"]) == 2


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys):
    import socket

    from posttrain.cli.main import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "no/such-model", "--engine", "native", "--port", port]) == 1
    assert port in capsys.readouterr().err


def test_an_open_address_without_a_token_is_warned_of(caplog):
    from posttrain.serve.config import ServeConfig

    assert ServeConfig("m").host == "127.0.0.1" and ServeConfig("m").is_loopback
    assert not ServeConfig("m", host="0.0.0.0").is_loopback


@pytest.mark.slow  # Two processes that import everything.
@pytest.mark.distributed
def test_an_engine_that_cannot_be_started_is_one_error_line_and_exit_1(tmp_path, tiny_model_dir):
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", "--port", "0", "--model", tiny_model_dir]
    command += ["--engine", "tests.serve.engines:create_broken"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "there is no model here" in done.stderr


def test_a_server_that_lacks_whole_weights_alone_is_there_to_be_pushed_to():
    """Otherwise a trainer that died in an update would have shut every later one out."""
    import torch

    from posttrain.rollouts.server.client import VLLMClient
    from posttrain.rollouts.server.weight_sync import push as send
    from tests.serve.support import serving

    with serving() as server:
        server.post("/begin_update/", {"version": 1})
        server.post("/abort_update/", {})
        assert server.get("/health/").status_code == 503
        client = VLLMClient(server.url, connection_timeout=0)
        send(client, [("a", torch.ones(2, 3)), ("b", torch.ones(4))], 1)
        assert server.get("/health/").status_code == 200
        assert client.generate([[1]], n=2, max_tokens=2)["weight_version"] == 1
        client.close()
