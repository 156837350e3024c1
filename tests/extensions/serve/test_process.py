"""`posttrain serve` as a process of its own: real signals, a real (tiny) model."""

import concurrent.futures
import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.tokens import find_token
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.forks import Forked

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def process(tmp_path, *options):
    """The command on a free port; its address, the process and its log."""
    log = tmp_path / "server.log"
    with open(log, "w") as file:
        command = ["-m", "posttrain.cli.main", "serve", "--port", "0", *options]
        running = Forked(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"running on (http://\S+)", log.read_text())) is None:
            assert running.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        while True:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(found[1] + "/health", timeout=5)
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


def with_token(url):
    """A session with the token that the server wrote for its user."""
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {find_token(int(url.rsplit(':')[-1]))}"
    return session


@pytest.mark.slow  # Two processes that import everything.
@pytest.mark.distributed
def test_sigterm_lets_requests_end_and_exits_with_0(tmp_path, tiny_model_dir):
    options = ["--model", tiny_model_dir, "--dtype", "float32"]
    with process(tmp_path, *options) as (url, running, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "n": 64}
        slow = pool.submit(with_token(url).post, url + "/v1/completions", json=body, timeout=60)
        while "posttrain_running 64" not in with_token(url).get(url + "/metrics", timeout=10).text:
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert [len(c["token_ids"]) for c in slow.result().json()["choices"]] == [400] * 64
        assert running.wait(30) == 0


@pytest.mark.slow  # A process that imports everything, and ends as an interpreter does.
@pytest.mark.distributed
def test_a_second_ctrl_c_ends_the_server_though_its_engine_has_much_to_write(tmp_path, tiny_model_dir, monkeypatch):
    started = lambda command, **options: subprocess.Popen([sys.executable, *command], cwd=ROOT, **options)  # noqa: E731
    monkeypatch.setattr(f"{__name__}.Forked", started)
    options = ["--model", tiny_model_dir, "--dtype", "float32"]
    with process(tmp_path, *options) as (url, running, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "n": 4096}
        pool.submit(with_token(url).post, url + "/v1/completions", json=body, timeout=60)
        while "posttrain_running 4096" not in with_token(url).get(url + "/metrics", timeout=10).text:
            time.sleep(0.01)
        for _ in range(2):
            running.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert running.wait(20) == 0


@pytest.mark.distributed
def test_a_signal_while_the_model_is_loaded_ends_the_server():
    code = "import time, posttrain.extensions.serve.host as host, posttrain.extensions.serve.server as server\n"
    code += "host.make_host = lambda config: (print('loading', flush=True), time.sleep(60))\n"
    running = Forked(["-c", code + "server.run_server(server.ServeConfig('m'))"], stdout=subprocess.PIPE)
    try:
        assert running.stdout.readline() == "loading\n"
        running.terminate()
        assert running.wait(10) == -signal.SIGTERM
    finally:
        running.kill()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_a_thousand_concurrent_requests_on_the_native_engine_and_none_is_lost(tmp_path, tiny_model_dir, tiny_tokenizer):
    """Each answer is compared with what the engine says in process; then weights are pushed, and it says the new ones'."""
    model = build_model(len(tiny_tokenizer))
    prompts = [[10 + i % 90, 10 + i // 90, 7] for i in range(1000)]
    sampling = Sampling(4, seed=5, min_p=None)
    wanted = NativeEngine(model, pad_token_id=0).generate([Request(p, 1, sampling) for p in prompts], sampling)
    options = ["--model", tiny_model_dir, "--max_num_seqs", "128", "--dtype", "float32"]
    with process(tmp_path, *options) as (url, _, _):
        session = with_token(url)
        session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=256))

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 4, "seed": 5, "ignore_eos": True, "logprobs": 0}
            return session.post(url + "/v1/completions", json=body, timeout=120)

        with concurrent.futures.ThreadPoolExecutor(250) as pool:
            replies = list(pool.map(ask, prompts))
        assert [r.status_code for r in replies] == [200] * 1000
        assert [r.json()["choices"][0]["token_ids"] for r in replies] == [r.token_ids for r in wanted]
        # A prompt that no context holds ends neither the engine nor the server.
        body = {"prompt": [1] * 600}
        assert session.post(url + "/v1/completions", json=body, timeout=10).status_code == 400
        other = build_model(len(tiny_tokenizer), seed=1)
        client = VLLMClient(url)
        client.update_model_params(other, "mine-1")
        client.close()
        new = NativeEngine(other, pad_token_id=0).generate([Request(p, 1, sampling) for p in prompts[:5]], sampling)
        for prompt, rollout in zip(prompts[:5], new, strict=True):
            (choice,) = ask(prompt).json()["choices"]
            assert choice["token_ids"] == rollout.token_ids
            assert choice["weight_version"] == "mine-1"
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(rollout.logp, abs=1e-4)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--engine", "nativ"], "nativ"),
        (["--port", "99999"], "port=99999"),
        (["--host", "0.0.0.0"], "POSTTRAIN_API_KEY"),
        (["--max_model_lenn", "5"], "did you mean 'max_model_len'"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_loaded(options, words, capsys, monkeypatch):
    from posttrain.cli.main import main

    monkeypatch.delenv("POSTTRAIN_API_KEY", raising=False)
    assert main(["serve", "--model", "no/such-model", *options]) != 0
    assert words in capsys.readouterr().err


def test_help_and_a_missing_model(capsys):
    from posttrain.cli.main import main

    assert main(["serve", "--help"]) == 0
    assert "--max_num_seqs" in capsys.readouterr().out
    assert main(["serve"]) == 2


@pytest.mark.slow  # A process that imports everything.
@pytest.mark.distributed
def test_a_model_that_cannot_be_loaded_is_one_error_line_and_exit_1(tmp_path):
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
