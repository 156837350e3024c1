"""Faults of a rollout server: dead, of another model, deaf to weights, stale, torn; a stub that lies stands for it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from tests.extensions.server.stub_server import StubServer
from tests.faults import build
from tests.faults.scene import Case, Scene


def served(lie: Callable[[Any, int], None] | None = None, *, by: int = 0, other: int | None = None, **info: Any) -> Any:
    """A run whose completions come from a server that begins to lie once ``by`` generations were answered.

    Args:
        lie: Changes the stub's lies; gets them and the number of the generation that comes next.
        by: Generations that are answered truly.
        other: Vocabulary of the server's model; None: the trainer's own model.
        info: What the server says of itself, over the truth.
    """

    def act(scene: Scene) -> None:
        from posttrain.extensions.server.engine import ServerEngine
        from tests.conftest import build_model

        policy = build.model(scene)
        stub = StubServer(policy if other is None else build_model(other, hidden_size=16))
        if info:
            stub.lies["facts"] = info
        engine = ServerEngine(stub.url, connection_timeout=5, request_timeout=20)
        usual, done = engine.generate, []

        def generate(requests: Any, sampling: Any) -> Any:
            if lie is not None and len(done) == by:
                lie(stub.lies, len(done))
            done.append(1)
            return usual(requests, sampling)

        engine.generate = generate  # type: ignore[method-assign]
        try:
            build.online(scene, policy=policy, engine=engine, max_steps=4, learning_rate=0.05)
        finally:
            engine.close()
            stub.close()

    return act


def unreachable(scene: Scene) -> None:
    """Nobody listens at the address."""
    from posttrain.extensions.server.engine import ServerEngine

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ServerEngine(f"http://127.0.0.1:{port}", connection_timeout=1)


def stale_replies(lies: Any, _: int) -> None:
    """Replies say that they come from weights of long ago."""
    lies["edit"] = lambda choices: [c | {"weight_version": "other-3000"} for c in choices]


def mixed_up(lies: Any, _: int) -> None:
    """A completion is missing."""
    lies["edit"] = lambda choices: choices[1:]


def foreign_tokens(lies: Any, _: int) -> None:
    """Ids that the trainer's vocabulary does not have."""
    lies["edit"] = lambda choices: [c | {"token_ids": [70_000] * len(c["token_ids"])} for c in choices]


def out_of_memory(lies: Any, _: int) -> None:
    """Weights are refused in the middle of a push."""
    lies["fail"] = "update_weights"


def half_pushed(lies: Any, _: int) -> None:
    """The server keeps some of its old weights, and says so."""
    lies["drop_name"] = "model.norm.weight"


CASES = (
    Case("server", "nobody listens", unreachable, r"127\.0\.0\.1", "config"),
    Case(
        "server", "server of another model", served(other=40), r"vocabulary|serves|does not know|shape", "first batch"
    ),
    Case("server", "replies of old weights", served(stale_replies, by=1), r"weights of version other-3000", "step 2"),
    Case("server", "a completion is missing", served(mixed_up, by=1), r"completion|group", "step 2"),
    Case("server", "tokens of another vocabulary", served(foreign_tokens, by=1), r"70000|vocabulary", "step 2"),
    Case("server", "weights refused", served(out_of_memory, by=0), r"out of memory|update_weights", "step 2"),
    Case("server", "some weights stay old", served(half_pushed, by=0), r"old values|model\.norm", "step 2"),
)
