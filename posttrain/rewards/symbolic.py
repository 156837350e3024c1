"""Symbolic comparison with math-verify in processes of their own, which are killed when an expression makes them hang.

Signals would bound it on the main thread only, and not inside long native calls; a killed process is always gone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RewardError
from posttrain.integrations import is_available, require
from posttrain.rewards.call import share_out

__all__ = ["TIMED_OUT", "Verdict", "compare", "need_math_verify", "parse_golds"]

SECONDS = 5.0  # For one expression; after `TOLERANCE` kills in one batch, `HURRY` seconds.
HURRY, TOLERANCE = 1.0, 3
START_SECONDS = 60.0  # For a process to import math-verify on a busy machine.
WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))
TIMED_OUT = "[timed out]"
WORKER = Path(__file__).with_name("symbolic_worker.py")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one comparison: the answer as parsed (None: nothing found), and whether it equals the reference."""

    answer: str | None
    equal: bool


class Worker:
    """One process; started when first asked, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._asking = threading.Lock()  # A batch given up with Ctrl-C may still be asking.

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply, or None when it did not come in time or the process died; then the process is killed."""
        with self._asking:
            for attempt in range(2):  # An idle process may have been ended from outside: no fault of the request.
                fresh = self._process is None
                line = self._exchange(self._start(), request, seconds)
                if line:
                    return json.loads(line)
                self.kill()
                if line is None or fresh or attempt:
                    return None
        return None

    def _exchange(self, process: subprocess.Popen, request: dict[str, Any], seconds: float) -> str | None:
        """What the process wrote; None when the time is up, and empty when the process is gone."""
        try:
            process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        except OSError:
            return ""

    def _start(self) -> subprocess.Popen:
        if self._process is not None:
            return self._process
        lines: queue.Queue[str] = queue.Queue()
        # -P: this folder holds a `math.py`, which must not stand in for the standard library's.
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_read, args=(process, lines), daemon=True, name="symbolic").start()
        self._process, self._lines = process, lines
        try:
            ready = lines.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = ""
        if not ready:
            self.kill()
            raise RewardError(
                f"the process that compares expressions did not start within {START_SECONDS:.0f} s. Try it by hand: "
                f"{sys.executable} -c 'import math_verify'"
            )
        return process

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
        self._process = None


def _read(process: subprocess.Popen, lines: queue.Queue[str]) -> None:
    """Hand over what a process writes, and an empty line when it ends."""
    with contextlib.suppress(OSError, ValueError):
        for line in process.stdout:  # type: ignore[union-attr]
            lines.put(line)
    lines.put("")


def _ask(worker: Worker, request: dict[str, Any], kills: list[int]) -> dict[str, Any] | None:
    """One reply, with less patience once several requests of the batch had to be killed."""
    reply = worker.ask(request, HURRY if len(kills) >= TOLERANCE else SECONDS)
    if reply is None:
        kills.append(1)
    return reply


class Pool:
    """A few workers that share the groups of a batch."""

    def __init__(self, size: int = WORKERS) -> None:
        self.workers = [Worker() for _ in range(size)]
        self._lock = threading.Lock()  # One batch at a time: two threads must not read each other's replies.

    def run(self, groups: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any] | None]]:
        """Replies to every request; the requests of a group go to one worker, in order.

        Args:
            groups: Requests about one reference stand together, so that it is parsed once.
        """
        results: list[list[dict[str, Any] | None]] = [[] for _ in groups]
        kills: list[int] = []

        def judge(worker: Worker, index: int) -> None:
            results[index] = [_ask(worker, request, kills) for request in groups[index]]

        with self._lock:
            share_out(self.workers, len(groups), judge)
        return results

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()


@functools.lru_cache(maxsize=4)
def _pool(pid: int) -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def need_math_verify(purpose: str) -> None:
    """Raise `MissingDependencyError` when math-verify is not installed."""
    if not is_available("math_verify"):
        require("math_verify", purpose)


def parse_golds(golds: Sequence[str]) -> dict[str, str | None]:
    """Each distinct reference as parsed; None where nothing in it is an expression (or parsing hung)."""
    distinct = list(dict.fromkeys(golds))
    replies = _pool(os.getpid()).run([[{"gold": gold}] for gold in distinct])
    return {gold: (reply or {}).get("gold") for gold, (reply,) in zip(distinct, replies, strict=True)}


def compare(pairs: Sequence[tuple[str, str]], *, lenient: bool = False) -> list[Verdict]:
    """Compare (reference, answer) pairs; one that takes longer than 5 s is not equal, and says `TIMED_OUT`.

    Args:
        pairs: Texts; the answer is looked for after an anchor such as a box.
        lenient: Take any expression in the answer.
    """
    order: dict[str, list[int]] = {}
    for index, (gold, _) in enumerate(pairs):
        order.setdefault(gold, []).append(index)
    groups = [[{"gold": g, "answer": pairs[i][1], "lenient": lenient} for i in rows] for g, rows in order.items()]
    verdicts: list[Verdict] = [Verdict(None, False)] * len(pairs)
    for rows, replies in zip(order.values(), _pool(os.getpid()).run(groups), strict=True):
        for index, reply in zip(rows, replies, strict=True):
            if reply is None:
                verdicts[index] = Verdict(TIMED_OUT, False)
            elif "error" not in reply:
                verdicts[index] = Verdict(reply["answer"], reply["equal"])
    return verdicts
