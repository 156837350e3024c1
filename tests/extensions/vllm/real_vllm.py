"""What tests against a real vLLM share: the real model, a process that serves it, log-probs by transformers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import torch

from posttrain.integrations import is_available
from posttrain.models.forward import sequence_logps
from posttrain.types import Request, Row, Sampling

ROOT = Path(__file__).parents[3]
SMOL = Path.home() / ".cache/posttrain/SmolLM2-135M-Instruct"
CONTEXT = 512
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

without_model = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available("vllm"), reason="vLLM is not installed: make test-serving"),
    pytest.mark.timeout(1200),
]
needed = [
    *without_model,
    pytest.mark.skipif(not SMOL.is_dir(), reason=f"no model in {SMOL}: make demo fetches it"),
]


def free_port():
    """One that nobody listens on."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextlib.contextmanager
def started(command, folder, port, *, seconds=420, **environment):
    """A server as a process of its own, healthy; its address."""
    log, url = folder / f"{port}.log", f"http://127.0.0.1:{port}"
    variables = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    with open(log, "w") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=variables, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds
        while True:
            if running.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command} did not start:\n{log.read_text()[-3000:]}", pytrace=False)
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(url + "/health", timeout=10).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # Its own session: vLLM's engine process too.
            running.wait(10)


LIMITS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "32")


def vllm_server(folder, model, *options, **environment):
    """`posttrain vllm-serve`."""
    port = free_port()
    command = [sys.executable, "-m", "posttrain.cli.main", "vllm-serve", "--model", str(model), "--port", str(port)]
    return started([*command, *LIMITS, *options], folder, port, **environment)


def plain_server(folder, model, *options, **environment):
    """`vllm serve`, as most people start it."""
    port = free_port()
    # What `vllm serve` runs; the command itself asks for a distribution "vllm", and that of the CPU build is "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--no-enable-chunked-prefill"]  # PT-S017.
    return started([*command, *LIMITS, *options], folder, port, **environment)


def load(path=SMOL):
    """The trainer's side."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def moved(model, scale=0.05):
    """Another policy: its weights are noised by a share of their own size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def truth(model, rollouts):
    """Log-probs of rollouts by transformers."""
    rows = [Row(list(r.prompt_ids), [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    return [logp.tolist() for logp in sequence_logps(model, rows)]


def assert_logps_are_transformers(engine, model, prompts):
    """Of sampled tokens, at two temperatures; completions come prompt by prompt."""
    for temperature in (1.0, 0.7):
        rollouts = engine.generate([Request(p, 4) for p in prompts], Sampling(24, temperature=temperature, seed=1))
        assert [r.prompt_ids for r in rollouts] == [p for p in prompts for _ in range(4)]
        with torch.no_grad():
            for r in rollouts:
                ids = torch.tensor([r.prompt_ids + r.token_ids])
                logits = model(ids).logits[0, len(r.prompt_ids) - 1 : -1] / temperature
                wanted = logits.log_softmax(-1).gather(1, ids[0, len(r.prompt_ids) :, None])[:, 0].tolist()
                assert r.logp == pytest.approx(wanted, abs=1e-3)


def worst(mine, theirs):
    """The largest difference of two lists of lists."""
    return max(abs(a - b) for one, two in zip(mine, theirs, strict=True) for a, b in zip(one, two, strict=True))
