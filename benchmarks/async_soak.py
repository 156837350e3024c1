"""Soak: asynchronous GRPO under faults every 20 seconds (killed worker, stopped worker, raising reward) for 30 minutes.

Every logged row must account for every rollout, and the memory of trainer and workers must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FLAG = "POSTTRAIN_SOAK_FLAG"  # A file whose presence makes the reward raise, once.
STOPPED_S = 6.0  # How long a stopped worker stands still.
GAP_S = 30.0  # Longer ones between two looks are a machine that stood still, which is no part of the soak.
GROWTH, SLACK_MB = 0.05, 24.0  # What counts as flat: the last third of a run against its second.


def letters(completions: list, **_) -> list[float]:
    """A reward with spread that raises when it is told to."""
    flag = Path(os.environ[FLAG])
    if flag.exists():
        flag.unlink(missing_ok=True)
        raise ValueError("injected: the reward raises")
    return [len(set(c[0]["content"])) / 10 for c in completions]


def resident_mb(pid: int) -> float:
    """Resident memory of a process that may be gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def build(folder: str, workers: int, seconds: float):
    """A trainer on a two-layer model, which does hundreds of steps in minutes."""
    import datasets
    from transformers import TrainerCallback

    from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer
    from posttrain.extensions.asynchronous.worker import ActiveClock
    from tests.conftest import build_model, build_tokenizer

    class UntilThen(TrainerCallback):
        """Ends training when the time is over."""

        clock = ActiveClock(GAP_S)

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = control.should_training_stop or self.clock.look() > seconds

    rows = [{"prompt": [{"role": "user", "content": f"What is {i} {'and ' * (i % 5)}?"}]} for i in range(64)]
    tokenizer = build_tokenizer()
    config = AsyncGRPOConfig(
        folder,
        max_steps=10_000_000,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=48,
        max_staleness=2,
        num_rollout_workers=workers,
        worker_threads=1,
        worker_segment_s=2.0,
        max_worker_restarts=100,
        rollout_failure_budget=0.5,
        heartbeat_stale_after_s=60.0,
        learning_rate=1e-4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
    )
    trainer = AsyncGRPOTrainer(
        build_model(len(tokenizer)),
        letters,
        config,
        datasets.Dataset.from_list(rows),
        tokenizer,
        callbacks=[UntilThen()],
    )
    trainer.mismatch.limit = 1e9  # A two-layer model at random moves fast; this is not what is soaked.
    return trainer


class Faults(threading.Thread):
    """Does harm on schedule, and measures memory."""

    def __init__(self, trainer, every: float) -> None:
        super().__init__(daemon=True)
        self.trainer, self.every = trainer, every
        self.done: dict[str, int] = {"kill": 0, "stop": 0, "raise": 0}
        self.memory: list[tuple[float, float, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Until the run is over."""
        from posttrain.extensions.asynchronous.worker import ActiveClock

        clock, next_fault, number = ActiveClock(GAP_S), self.every, 0
        while not self.over.wait(1.0):
            worker = getattr(self.trainer, "worker", None)
            workers = list(getattr(worker, "workers", []))
            if not workers or not self.trainer.state.global_step:  # One that dies before it was ever ready ends a run.
                next_fault = clock.look() + self.every
                continue
            pids = [w.process.pid for w in workers]
            largest = max(resident_mb(pid) for pid in pids)
            self.memory.append((clock.look(), resident_mb(os.getpid()), largest))
            if clock.now < next_fault:
                continue
            next_fault = clock.now + self.every
            self.harm(("kill", "stop", "raise")[number % 3], pids[number % len(pids)])
            number += 1

    def harm(self, fault: str, pid: int) -> None:
        """One fault."""
        self.done[fault] += 1
        try:
            if fault == "kill":
                os.kill(pid, signal.SIGKILL)
            elif fault == "stop":
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(STOPPED_S, lambda: os.kill(pid, signal.SIGCONT)).start()
            else:
                Path(os.environ[FLAG]).touch()
        except ProcessLookupError:
            pass


def flat(values: list[float]) -> dict[str, float | bool]:
    """Median of the middle third against that of the last."""
    third = len(values) // 3
    before, after = statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])
    grown = after - before
    return {"middle_mb": round(before, 1), "last_mb": round(after, 1), "flat": grown <= max(SLACK_MB, GROWTH * before)}


def main() -> int:
    """Run, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "async_soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FLAG] = str(Path(folder, "raise"))
        trainer = build(folder, options.workers, 60 * options.minutes)
        faults = Faults(trainer, options.every)
        faults.start()
        trainer.train()
        faults.over.set()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    exact = all(
        row["async/produced"] == row["async/trained"] + row["async/dropped"] + row["async/in_flight"] for row in rows
    )
    account = {name.removeprefix("async/"): value for name, value in trainer.account().items() if value}
    result = {
        "seconds": round(faults.memory[-1][0], 1),
        "steps": trainer.state.global_step,
        "faults": faults.done,
        "account": account,
        "exact": exact and account["produced"] == account["trained"] + account["dropped"],
        "staleness_max": max(row["sample/staleness_max"] for row in rows),
        "bound": trainer.args.max_staleness_hard,
        "trainer": flat([memory for _, memory, _ in faults.memory]),
        "worker": flat([memory for _, _, memory in faults.memory]),
    }
    print(json.dumps(result, indent=1))
    harness.write(Path(options.out), result)
    fine = result["exact"] and result["trainer"]["flat"] and result["worker"]["flat"]
    return 0 if fine and result["staleness_max"] <= result["bound"] else 1


if __name__ == "__main__":
    sys.exit(main())
