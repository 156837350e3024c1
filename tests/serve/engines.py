"""Engines for tests: what they say follows from what they were asked, and some tokens make them misbehave."""

import os
import signal
import time

from posttrain.errors import ModelError
from posttrain.serve.backends import BatchBackend
from posttrain.serve.jobs import Scored
from posttrain.types import Rollout

VOCABULARY, CONTEXT = 1000, 64
FAIL, SLOW, KILL = 900, 901, 902  # In a prompt.
WEIGHTS = {"a": (2, 3), "b": (4,)}


def expected(prompt, index, count):
    """Tokens that `EchoEngine` writes: nobody else's."""
    return [(sum(prompt) + 7 * index + k) % 800 for k in range(count)]


class EchoEngine:
    name = "echo"

    def __init__(self):
        self.version = 0
        self.calls = []

    def generate(self, requests, sampling):
        self.calls.append(len(requests))
        asked = {token for r in requests for token in r.prompt_ids}
        if FAIL in asked:
            raise RuntimeError("the engine tripped over token 900")
        if SLOW in asked:
            time.sleep(1.0)
        if KILL in asked:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self._one(r, index) for r in requests for index in range(r.n)]

    def _one(self, request, index):
        own = request.sampling
        ids = expected(request.prompt_ids, index, own.max_new_tokens)
        logp = [-0.5 - 0.01 * k for k in range(len(ids))]
        logp = [float("nan") if token == 13 else x for token, x in zip(ids, logp, strict=True)]
        tops = None
        if own.top_logps:
            # The sampled token is the second by rank, or further down than was asked for.
            tops = [
                [((t + 1) % 1000, -0.3), (t, x), ((t + 2) % 1000, -3.0)][: own.top_logps]
                for t, x in zip(ids, logp, strict=True)
            ]
        return Rollout(list(request.prompt_ids), ids, logp, "length", self.version, top_logps=tops)

    def load_weights(self, named_tensors, version):
        self.version = version

    def close(self):
        pass


class EchoBackend(BatchBackend):
    scores = True
    sleeps = True

    def __init__(self, rank=0, *, temperature=True):
        super().__init__(EchoEngine(), own_sampling=True)
        self.rank, self.temperature = rank, temperature
        self.batches = []
        self.touched = set()
        self.values = {}

    def begin_update(self, adapter):
        super().begin_update(adapter)
        self.touched = set()

    def load(self, tensors):
        unexpected = []
        pairs = list(tensors)
        for name, tensor in pairs:
            if name not in WEIGHTS:
                unexpected.append(name)
            elif tuple(tensor.shape) != WEIGHTS[name]:
                raise ModelError(f"{name}: the server's is {WEIGHTS[name]}, what came is {tuple(tensor.shape)}.")
            else:
                self.touched.add(name)
                self.values[name] = tensor.float().sum().item()
        return len(pairs) - len(unexpected), unexpected

    def end_update(self, version):
        self.engine.load_weights((), version)
        return [name for name in WEIGHTS if name not in self.touched]

    def score(self, items, top, temperature):
        self.batches.append((len(items), top, temperature))
        scale = temperature if self.temperature else 1.0
        found = []
        for item in items:
            rest = item.ids[item.begin :]
            actual = [float("nan") if t == 13 else -t / 100 / scale for t in rest]
            found.append(
                Scored(
                    actual, [[t, *range(1, top)] for t in rest], [[-(k + 1) / scale for k in range(top)] for _ in rest]
                )
            )
        return found

    def sleep(self, level):
        pass

    def wake(self, tags):
        pass

    def info(self):
        return super().info() | {
            "architectures": ["Echo"],
            "vocab_size": VOCABULARY,
            "context": CONTEXT,
            "device_uuids": [f"GPU-{self.rank}"],
            "calls": self.engine.calls,
        }


def create(config, rank):
    """For ``--engine tests.serve.engines:create``."""
    return EchoBackend(rank)


def create_cold(config, rank):
    """Whose scores do not heed the temperature."""
    return EchoBackend(rank, temperature=False)


def create_broken(config, rank):
    raise ModelError("there is no model here")


def create_native(config, rank):
    """A tiny model on the native engine."""
    from posttrain.serve.native import NativeBackend
    from tests.conftest import build_model

    return NativeBackend(build_model(37))
