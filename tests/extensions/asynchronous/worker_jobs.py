"""Jobs that workers of the tests run; they import no torch, so that a worker starts in a fraction of a second."""

import os
import signal
import sys
import time
from dataclasses import dataclass

from posttrain.extensions.asynchronous.processes import GroupResult
from posttrain.extensions.asynchronous.samples import RolloutSample, Trajectory


def conversation(task, version, index=0):
    """A rollout of three tokens that says which group it is of."""
    ids = [1, task.group_id, index]
    sample = RolloutSample("p", "c", ids, [0, 1, 1], [0.0, -1.0, -1.0], 0.0, version, task.group_id)
    return Trajectory([sample])


@dataclass
class Echo:
    """Answers every task after a while; may misbehave."""

    seconds: float = 0.0
    dies_at: int | None = None  # Its process is killed when this task comes for the first time.
    fails_at: int | None = None  # Two of its rollouts fail.
    deaf: bool = False  # Never loads weights.
    hangs_at: int | None = None

    def run(self, link):
        link.ready()
        version = 0
        while not link.stopping.is_set():
            link.progress()
            if link.version > version and not self.deaf:
                version = link.version
                link.send("loaded", version=version)
            if not link.tasks:
                link.wait(0.05)
                continue
            task = link.tasks.popleft()
            if task.group_id in link.cancelled:
                continue
            link.send("begun", group_id=task.group_id, version=version)
            if task.group_id == self.dies_at:
                print("about to be killed", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if task.group_id == self.hangs_at:
                time.sleep(600)
            link.stopping.wait(self.seconds)
            failed = task.size - 1 if task.group_id == self.fails_at else 0
            fine = [conversation(task, version, i) for i in range(task.size - failed)]
            link.send("result", result=GroupResult(task.group_id, fine, ["ValueError: no"] * failed))


@dataclass
class Broken:
    """Ends before it is ready."""

    how: str = "raise"

    def run(self, link):
        print("the last words", file=sys.stderr, flush=True)
        if self.how == "raise":
            raise ValueError("no engine here")
        os._exit(7)


@dataclass
class Environment:
    """Reports what it was started with."""

    path: str

    def run(self, link):
        with open(self.path, "w", encoding="utf-8") as file:
            file.write("\n".join(f"{k}={v}" for k, v in os.environ.items()))
        link.ready()
        while not link.stopping.is_set():
            link.wait(0.05)


class Slow:
    """Cannot be asked to stop."""

    def run(self, link):
        link.ready()
        time.sleep(600)


def _unreadable():
    raise ImportError("half made")


class Unreadable:
    """Something that a worker cannot unpickle."""

    def __reduce__(self):
        return _unreadable, ()
