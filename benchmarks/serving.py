"""The rollout server against its engine in process: completions a second, processor time, and the time of a push.

python benchmarks/serving.py [--model FOLDER] [--requests 96] [--new-tokens 48] [--rounds 3] [--threads 2]

Each round measures, one after the other: the engine in this process, one request with all prompts, all prompts as requests
of their own at once, and a push of all weights; so that a machine that grows slow slows all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
import torch

from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.replies import API_KEY_VARIABLE
from posttrain.extensions.server.tokens import find_token
from posttrain.extensions.server.weight_sync import Pusher
from posttrain.models.load import create_model_from_path, load_tokenizer
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.layers import processors
from posttrain.types import Request, Sampling

SEED = 3
TICKS = os.sysconf("SC_CLK_TCK")


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts of about 60 tokens that begin alike and differ at the end."""
    lines = [f"What is {17 * i % 97} plus {29 * i % 89}? Answer with the number alone." for i in range(count)]
    chats = [[{"role": "user", "content": line}] for line in lines]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def in_process(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    engine = NativeEngine(model, pad_token_id=0)
    sampling = Sampling(new, seed=SEED)  # Of each request by itself, as a server counts them.
    return [r.token_ids for r in engine.generate([Request(p, 1, sampling) for p in prompts], sampling)]


def ask(url: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """One request; the plainest client there is, because it shares the processors with the server."""
    body = {"prompt": prompts, "max_tokens": new, "seed": SEED, "ignore_eos": True, "logprobs": 0}
    address = urlsplit(url)
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(API_KEY_VARIABLE) or find_token(address.port or 80):
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(address.netloc, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    if reply.status != 200:
        raise SystemExit(f"status {reply.status}: {content[:500]!r}")
    return [choice["token_ids"] for choice in json.loads(content)["choices"]]


def many_requests(url: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [found[0] for found in pool.map(lambda prompt: ask(url, [prompt], new), prompts)]


def processor_seconds(pid: int) -> float:
    """Of a process so far, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Clock:
    """Wall time and processor time of this process and of the server, by what was done.

    Args:
        pids: By name.
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids = pids
        self.found: dict[str, list[dict[str, float]]] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of a piece of work, after its times were noted."""
        before = {who: processor_seconds(pid) for who, pid in self.pids.items()}
        began = time.perf_counter()
        result = work()
        line = {"seconds": time.perf_counter() - began}
        line |= {who: processor_seconds(pid) - before[who] for who, pid in self.pids.items()}
        line = {key: round(value, 4) for key, value in line.items()}
        self.found.setdefault(name, []).append(line)
        print(f"{name}: {line}", file=sys.stderr, flush=True)
        return result

    def seconds(self, name: str) -> list[float]:
        """Wall time in each round."""
        return [line["seconds"] for line in self.found[name]]


@contextlib.contextmanager
def serving(model: str, threads: int) -> Iterator[tuple[str, int]]:
    """The command in a process of its own: its address and its process id."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        command = [sys.executable, "-m", "posttrain.cli.main", "serve", "--model", model, "--port", "0"]
        command += ["--dtype", "float32"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while (found := re.search(r"running on (\S+)", Path(log.name).read_text())) is None:
                if server.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.2)
            yield found[1], server.pid
        finally:
            server.terminate()
            server.wait(30)


def measure(args: argparse.Namespace) -> tuple[Clock, float, int]:
    """Times of all rounds, the share of completions that are equal, and the number of parameters."""
    torch.set_num_threads(args.threads)
    model = create_model_from_path(args.model, dtype="float32").eval()
    prompts = prompts_of(load_tokenizer(args.model), args.requests)
    equal: list[bool] = []
    with serving(args.model, args.threads) as (url, pid):
        client = VLLMClient(url, connection_timeout=30)
        pusher = Pusher()  # One for the run, as a trainer has it: its memory is kept between pushes.
        clock = Clock({"here": os.getpid(), "server": pid})
        ask(url, prompts[:2], 4)
        in_process(model, prompts[:2], 4)
        for version in range(1, args.rounds + 1):
            own = clock.time("in_process", lambda: in_process(model, prompts, args.new_tokens))
            one = clock.time("one_request", lambda: ask(url, prompts, args.new_tokens))
            many = clock.time("many_requests", lambda: many_requests(url, prompts, args.new_tokens))
            equal += [a == b for found in (one, many) for a, b in zip(found, own, strict=True)]
            weights = list(model.named_parameters())
            clock.time("push", lambda w=weights, v=version: pusher.push(w, [client], f"benchmark-{v}"))
        pusher.close()
        client.close()
    return clock, sum(equal) / len(equal), sum(p.numel() for p in model.parameters())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", help="folder or hub id; by default the model of `posttrain demo`")
    options.add_argument("--requests", type=int, default=96)
    options.add_argument("--new-tokens", type=int, default=48)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=processors(), help="of products, here and in the server")
    args = options.parse_args()
    args.model = args.model or harness.default_model()
    clock, equal, parameters = measure(args)
    tokens = args.requests * args.new_tokens
    ways = ("one_request", "many_requests")
    pairs = {name: list(zip(clock.seconds(name), clock.seconds("in_process"), strict=True)) for name in ways}
    result = {
        "requests": args.requests, "new_tokens": args.new_tokens, "threads": args.threads, "parameters": parameters,
        # Ratios of each round: the engine's seconds over the server's.
        "throughput_of_in_process": {name: harness.ratios(found) for name, found in pairs.items()},
        "tokens_per_second": {
            name: round(tokens / statistics.median(clock.seconds(name)), 1) for name in ("in_process", *ways)
        },
        "push_seconds": {"first": clock.seconds("push")[0], "median": statistics.median(clock.seconds("push"))},
        # Batches of another composition round otherwise, and one other token is another completion from there on.
        "equal_completions": round(equal, 3),
        "runs": clock.found,
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    harness.save("serving", result)


if __name__ == "__main__":
    main()
