"""Throughput of the rollout server against its engine in process, and the time of a push.

python benchmarks/serving.py --model FOLDER [--requests 96] [--new-tokens 48] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch

from posttrain.models.load import create_model_from_path, load_tokenizer
from posttrain.rollouts.client import VLLMClient
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.push import push
from posttrain.types import Request, Sampling

SEED = 3


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    """Chat prompts of about 60 tokens that begin alike and differ at the end."""
    lines = [f"What is {17 * i % 97} plus {29 * i % 89}? Answer with the number alone." for i in range(count)]
    chats = [[{"role": "user", "content": line}] for line in lines]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def in_process(model, prompts, new: int) -> tuple[float, list[list[int]]]:
    engine = NativeEngine(model, pad_token_id=0)
    began = time.perf_counter()
    rollouts = engine.generate([Request(p) for p in prompts], Sampling(new, seed=SEED))
    return time.perf_counter() - began, [r.token_ids for r in rollouts]


def body(prompts, new: int, seeds) -> dict:
    return {"prompts": prompts, "max_tokens": new, "seed": seeds, "generation_kwargs": {"ignore_eos": True}}


def one_request(url: str, prompts, new: int) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    reply = requests.post(url + "/generate/", json=body(prompts, new, SEED), timeout=600)
    return time.perf_counter() - began, reply.json()["completion_ids"]


def many_requests(url: str, prompts, new: int) -> float:
    session = requests.Session()
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=128))

    def ask(prompt):
        reply = session.post(url + "/generate/", json=body([prompt], new, SEED), timeout=600)
        assert reply.status_code == 200 and len(reply.json()["completion_ids"][0]) == new
        return reply

    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert len(list(pool.map(ask, prompts))) == len(prompts)
    return time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--requests", type=int, default=96)
    options.add_argument("--new-tokens", type=int, default=48)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = create_model_from_path(args.model, dtype="float32").eval()
    prompts = prompts_of(load_tokenizer(args.model), args.requests)
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        command = [sys.executable, "-m", "posttrain.cli.main", "serve", "--model", args.model, "--port", "0"]
        command += ["--engine", "native", "--dtype", "float32"]
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while (found := re.search(r"ready on (\S+)", Path(log.name).read_text())) is None:
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.2)
            url = found[1]
            print(f"server at {url}", file=sys.stderr)
            one_request(url, prompts[:2], 4)
            times: dict[str, list[float]] = {"in_process": [], "one_request": [], "many_requests": [], "push": []}
            client = VLLMClient(url, connection_timeout=30)
            for version in range(1, args.rounds + 1):
                seconds, tokens = in_process(model, prompts, args.new_tokens)
                times["in_process"].append(seconds)
                print(f"in process {seconds:.1f} s", file=sys.stderr)
                seconds, served = one_request(url, prompts, args.new_tokens)
                # Other batches round otherwise, and one other token is another completion from there on.
                equal = sum(a == b for a, b in zip(served, tokens, strict=True)) / len(tokens)
                print(f"equal completions: {equal:.2f}", file=sys.stderr)
                times["one_request"].append(seconds)
                print(f"one request {seconds:.1f} s", file=sys.stderr)
                times["many_requests"].append(many_requests(url, prompts, args.new_tokens))
                began = time.perf_counter()
                push(client, list(model.named_parameters()), version)
                times["push"].append(time.perf_counter() - began)
        finally:
            server.terminate()
            server.wait(30)
    best = {name: min(values) for name, values in times.items()}
    tokens = args.requests * args.new_tokens
    result = {
        "requests": args.requests, "new_tokens": args.new_tokens, "threads": args.threads, "seconds": times,
        "tokens_per_second": {name: round(tokens / best[name], 1) for name in ("in_process", "one_request", "many_requests")},
        "share_of_in_process": {n: round(best["in_process"] / best[n], 3) for n in ("one_request", "many_requests")},
        "push_seconds": best["push"], "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
