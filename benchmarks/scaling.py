"""Asynchronous GRPO from 8 to 1,024 GPUs in virtual time: who waits for whom, how old rollouts get, what weight sync costs.

What decides is the library's own: `AsyncRollouts.take`, `WorkerPool`, `Ledger`, `RolloutBuffer`, `balanced_shares`, made from a
real `AsyncGRPOConfig`. Only what takes time is a number (`Costs`): a token that is trained, a token of all running sequences
that is sampled, a push. ``--page docs/scaling.md`` writes the tables of the page. ``--check`` trains
with one and with two real worker processes whose engine sleeps as long as it is told, and shows both beside the simulation.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import numpy as np

from posttrain import AsyncGRPOConfig
from posttrain.data.samplers import PromptStream
from posttrain.extensions.asynchronous.ledger import Ledger, balanced_shares
from posttrain.extensions.asynchronous.processes import GroupResult
from posttrain.extensions.asynchronous.rollouts import AsyncRollouts, RolloutService
from posttrain.extensions.asynchronous.samples import RolloutSample, TaskSource, Trajectory
from posttrain.rollouts.base import Capabilities, RolloutEngine
from posttrain.types import Request, Rollout, Sampling

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
RATIOS = (0.25, 0.375, 0.5, 0.625, 0.75)  # Of all GPUs, those that write rollouts.
STEPS, WARM = 8, 3  # Steps that are simulated, and how many of the first do not count.
EACH = 32  # Rollouts a GPU and step, where the batch grows with the machine.
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"


@dataclass(frozen=True)
class Costs:
    """What takes how long. The defaults are assumptions for a model of 7B parameters in bf16 on H100s, not measurements.

    Attributes:
        train_token_s: Seconds of one GPU for one token: 6 x 7e9 FLOPs at 40 % of 989e12 a second.
        train_step_s: Seconds of a step besides: optimiser, collectives, log.
        decode_s: Seconds of one token of all running sequences: weights are read once (14 GB at 3.35 TB/s, half of it reached).
        decode_each_s: More for each running sequence: its KV cache, its sampling.
        slots: Sequences an engine runs at once.
        push_s: Seconds of a push whatever the number of engines: 14 GB over 200 Gb/s, twice (gathering, sending).
        push_each_s: More for each engine: 0 for a broadcast; 0.6 where the trainer sends to each over one link of 200 Gb/s.
        push_doubling_s: More for each doubling of the engines.
        prompt: Tokens.
        mean: Tokens of a completion.
        spread: Of the logarithm of its length; 0: all are equally long.
        longest: Tokens.
    """

    train_token_s: float = 6 * 7e9 / 4e14
    train_step_s: float = 1.5
    decode_s: float = 0.0085
    decode_each_s: float = 0.00006
    slots: int = 256
    push_s: float = 1.2
    push_each_s: float = 0.0
    push_doubling_s: float = 0.05
    prompt: int = 512
    mean: float = 2000.0
    spread: float = 0.8
    longest: int = 8192

    def push(self, engines: int) -> float:
        """Seconds in which neither trains nor writes."""
        return self.push_s + self.push_each_s * engines + self.push_doubling_s * math.log2(engines)

    def length(self, seed: int) -> int:
        """Tokens of one completion."""
        if not self.spread:
            return int(self.mean)
        middle = math.log(self.mean) - self.spread**2 / 2
        return max(1, min(self.longest, round(random.Random(seed).lognormvariate(middle, self.spread))))


class Engines:
    """All rollout engines with continuous batching: each adds one token to every sequence that it runs, step by step."""

    def __init__(self, costs: Costs, count: int) -> None:
        self.costs = costs
        self.running: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(count)]
        self.progress, self.first = np.zeros(count), np.full(count, np.inf)  # (engines,)
        self.step = np.ones(count)  # (engines,) seconds of a token

    @property
    def busy(self) -> int:
        """Engines that run something."""
        return int(np.isfinite(self.first).sum())

    def next(self) -> float:
        """Seconds until the first sequence of any engine ends."""
        return float(((self.first - self.progress) * self.step).min())

    def elapse(self, seconds: float) -> None:
        """Every running sequence gets the tokens of so long."""
        self.progress += seconds / self.step

    def add(self, engine: int, group: int, lengths: list[int]) -> None:
        """Sequences of a group; those that find no slot wait."""
        self.waiting[engine].extend((length, group) for length in lengths)
        self._fill(engine)

    def ended(self) -> list[tuple[int, int]]:
        """``(engine, group)`` of each sequence that has come to its end."""
        found = []
        for engine in np.flatnonzero(self.first <= self.progress + 1e-6).tolist():
            running = self.running[engine]
            while running and running[0][0] <= self.progress[engine] + 1e-6:
                found.append((engine, heapq.heappop(running)[1]))
            self._fill(engine)
        return found

    def _fill(self, engine: int) -> None:
        running, waiting = self.running[engine], self.waiting[engine]
        while waiting and len(running) < self.costs.slots:
            length, group = waiting.popleft()
            heapq.heappush(running, (self.progress[engine] + length, group))
        self.first[engine] = running[0][0] if running else np.inf
        self.step[engine] = self.costs.decode_s + self.costs.decode_each_s * len(running)


class VirtualWorker:
    """What the pool sees of one engine; stands in for `WorkerProcess`."""

    is_ready, ready_at = True, 0.0

    def __init__(self, index: int, engines: Engines) -> None:
        self.index, self.engines, self.version = index, engines, 0
        self.outbox: list[tuple[str, dict[str, Any]]] = []
        # Tasks under way, with the version they were begun with and the sequences that are not ended.
        self.open: dict[int, tuple[Any, int, list[int]]] = {}

    def send(self, kind: str, content: Any = None) -> None:
        """A message of the pool; cancelled groups are written to their end, as servers do."""
        if kind == "weights":
            self.version = content[0]
        elif kind == "task":
            lengths = [self.engines.costs.length(content.seed * 131 + k) for k in range(content.size)]
            self.open[content.group_id] = (content, self.version, [*lengths])
            self.outbox.append(("begun", {"group_id": content.group_id, "version": self.version}))
            self.engines.add(self.index, content.group_id, lengths)

    def one_ended(self, group: int, left: dict[int, int]) -> None:
        """A sequence of a group has ended; of the last one, the group is handed over."""
        task, version, lengths = self.open[group]
        left[group] = left.get(group, task.size) - 1
        if left[group]:
            return
        del left[group], self.open[group]
        tokens = [range(self.engines.costs.prompt + length) for length in lengths]
        rows = [RolloutSample(None, None, t, [], [], 0.0, version, group) for t in tokens]  # type: ignore[arg-type]
        self.outbox.append(("result", {"result": GroupResult(group, [Trajectory([row]) for row in rows])}))

    def receive(self) -> list[tuple[str, dict[str, Any]]]:
        """What it has to say."""
        said, self.outbox = self.outbox, []
        return said


class VirtualService(RolloutService):
    """The real one's pool, settings and version; its workers are virtual."""

    def make_job(self) -> Any:
        """Nothing is sent to anybody."""


class VirtualRollouts(AsyncRollouts):
    """The real one; while the queue is empty, virtual time passes."""

    cluster: Cluster

    def _wait(self) -> Trajectory:
        buffer = self.service.worker.rollout_buffer
        self.cluster.elapse(stop=lambda: len(buffer) > 0)
        return buffer.get(timeout=0)


class Cluster:
    """One run: a trainer of several GPUs and several engines.

    Args:
        config: Of the run.
        costs: Seconds of everything.
        trainers: GPUs that train.
        engines: GPUs that write rollouts, an engine each.
    """

    def __init__(self, config: AsyncGRPOConfig, costs: Costs, trainers: int, engines: int) -> None:
        self.costs, self.trainers, self.now = costs, trainers, 0.0
        self.config = config
        accelerator = SimpleNamespace(num_processes=1, is_main_process=True)
        sync = SimpleNamespace(accelerator=accelerator, context=costs.prompt + costs.longest)
        tasks = TaskSource(PromptStream([{"prompt": ""}], seed=0, shuffle=False), config.num_generations)
        given = {"rollout_worker": None, "weight_transfer": None, "engine_factory": None}
        options: dict[str, Any] = {"tokenizer": None, "pad_token_id": 0, "sampling": lambda: None}
        service: Any = VirtualService(config, given, sync, tasks=tasks, ledger=Ledger(), **options)  # type: ignore[arg-type]
        self.pool = service.worker = service.make_worker()
        self.engines = Engines(costs, engines)
        self.pool.workers = [VirtualWorker(k, self.engines) for k in range(engines)]
        self.source = VirtualRollouts(service, SimpleNamespace(), SimpleNamespace(), lambda rows: None)  # type: ignore[arg-type]
        self.source.cluster, self.service = self, service
        self._left: dict[int, int] = {}
        # The pool is asked at most so often, in virtual seconds: exact for a few engines.
        self.tick = 0.0 if engines < 16 else 0.05
        self.idle = self.pool_s = 0.0

    def elapse(self, work: float = math.inf, stop: Callable[[], bool] = bool) -> None:
        """Time until the trainer has done ``work`` seconds of its own, or until ``stop``."""
        while work > 1e-9 and not stop():
            span = min(work, max(self.engines.next(), self.tick))
            assert math.isfinite(span), "nothing runs and nothing would ever arrive"
            self.engines.elapse(span)
            self.now, work = self.now + span, work - span
            self.idle += (len(self.pool.workers) - self.engines.busy) * span
            ended = self.engines.ended()
            for engine, group in ended:
                self.pool.workers[engine].one_ended(group, self._left)
            if ended:
                self.serve()

    def serve(self) -> None:
        """What the pool's thread does; its real seconds are counted."""
        began = time.thread_time()
        self.pool._receive()
        self.pool._dispatch()
        self.pool_s += time.thread_time() - began

    def push(self) -> float:
        """Weights to all engines, which stand still meanwhile; the seconds it took."""
        seconds = self.costs.push(len(self.pool.workers))
        self.now += seconds
        self.service.version += 1
        self.pool.update_model_version(self.service.version)
        return seconds

    def step(self) -> dict[str, float]:
        """One optimiser step: take, train, push, book."""
        config, began, idle, pool_s = self.config, self.now, self.idle, self.pool_s
        if not self.service.version:
            self.push()
            self.serve()
        before = self.now
        self.source.take(config.samples_per_step or 1)
        waited = self.now - before
        lengths = [len(sample) for one in self.source.held for sample in one.samples]
        ages = [self.service.version - one.version for one in self.source.held]
        busiest = max(sum(lengths[i] for i in share) for share in balanced_shares(lengths, self.trainers))
        self.elapse(busiest * self.costs.train_token_s + self.costs.train_step_s)
        pushed = self.push()
        self.source.book(skipped=False)
        self.serve()
        seconds = self.now - began
        return {
            "seconds": seconds,
            "waited": waited,
            "pushed": pushed,
            "idle": (self.idle - idle + pushed * len(self.pool.workers)) / (seconds * len(self.pool.workers)),
            "age": statistics.mean(ages),
            "oldest": max(ages),
            "dropped": self.source.account()["async/stale_dropped"],
            "pool_s": self.pool_s - pool_s,
        }


def simulate(costs: Costs, trainers: int, engines: int, steps: int = STEPS, warm: int = WARM, **settings: Any) -> dict:
    """Means over the steps after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = {"num_generations": 8, "max_staleness": 1, "staleness_policy": "pace", "use_cpu": True}
        own |= {"max_completion_length": costs.longest, "queue_maxsize": 10**9, "num_rollout_workers": engines}
        config = AsyncGRPOConfig(folder, **(own | settings))
        cluster = Cluster(config, costs, trainers, engines)
        found = [cluster.step() for _ in range(steps)]
    kept = found[warm:]
    mean = {name: statistics.mean(one[name] for one in kept) for name in kept[0]}
    samples = config.samples_per_step or 1
    return {
        "gpus": trainers + engines,
        "trainers": trainers,
        "engines": engines,
        "step_s": mean["seconds"],
        "samples_per_s": samples / mean["seconds"],
        "staleness": mean["age"],
        "staleness_max": max(one["oldest"] for one in kept),
        "transfer": mean["pushed"] / mean["seconds"],
        "trainer_waits": mean["waited"] / mean["seconds"],
        "engines_idle": mean["idle"],
        "dropped": kept[-1]["dropped"] / (samples * steps),
        "pool_s": mean["pool_s"],
    }


def best_of(costs: Costs, gpus: int, samples: int, **settings: Any) -> list[dict]:
    """Every ratio, the fastest first."""
    splits = {max(1, min(gpus - 1, round(gpus * ratio))) for ratio in RATIOS}
    found = [simulate(costs, gpus - k, k, samples_per_step=max(samples, gpus - k), **settings) for k in sorted(splits)]
    return sorted(found, key=lambda one: -one["samples_per_s"])


def percent(value: float) -> str:
    """A share, as the tables show it."""
    return f"{100 * value:.0f} %"


def table(rows: list[dict], first: dict[str, Callable[[dict], Any]] | None = None) -> str:
    """Runs as Markdown."""
    columns: dict[str, Callable[[dict], Any]] = (first or {"GPUs": lambda r: r["gpus"]}) | {
        "train + generate": lambda r: f"{r['trainers']} + {r['engines']}",
        "seconds per step": lambda r: f"{r['step_s']:.1f}",
        "samples per second": lambda r: f"{r['samples_per_s']:.1f}",
        "samples per second and GPU": lambda r: f"{r['samples_per_s'] / r['gpus']:.3f}",
        "staleness, mean (maximum)": lambda r: f"{r['staleness']:.2f} ({r['staleness_max']:.0f})",
        "weight transfer": lambda r: percent(r["transfer"]),
        "trainer waits": lambda r: percent(r["trainer_waits"]),
        "engines idle": lambda r: percent(r["engines_idle"]),
        "dropped": lambda r: percent(r["dropped"]),
        "seconds of the pool's thread": lambda r: f"{r['pool_s']:.2f}",
    }
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(c(row)) for c in columns.values()) + " |" for row in rows])


def tables(sizes: tuple[int, ...]) -> dict[str, str]:
    """What the page shows, by the name of its place."""
    costs, found = Costs(), {}
    weak = [best_of(costs, gpus, EACH * gpus) for gpus in sizes]
    found["weak"] = table([runs[0] for runs in weak])
    middle = weak[len(weak) // 2]
    found["ratio"] = table(sorted(middle, key=lambda run: run["engines"]))
    found["strong"] = table([best_of(costs, gpus, 1024)[0] for gpus in sizes])
    serial = replace(costs, push_each_s=0.6, push_doubling_s=0.0)
    best = [(runs[0]["trainers"], runs[0]["engines"]) for runs in weak]
    found["serial"] = table([simulate(serial, *split, samples_per_step=EACH * sum(split)) for split in best])
    split = weak[len(weak) // 2][0]
    runs = []
    for policy, staleness in (("pace", 0), ("pace", 1), ("pace", 2), ("pace", 4), ("drop", 1), ("drop", 4)):
        way = {"max_staleness": staleness, "staleness_policy": policy, "samples_per_step": EACH * split["gpus"]}
        runs.append(simulate(costs, split["trainers"], split["engines"], **way) | {"way": f"{policy}, {staleness}"})
    found["staleness"] = table(runs, {"policy, `max_staleness`": lambda r: r["way"]})
    return found


def write_page(page: Path, found: dict[str, str]) -> None:
    """Put tables between their marks."""
    text = page.read_text(encoding="utf-8")
    for name, content in found.items():
        begin, end = BEGIN.format(name), END.format(name)
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


# Measured ------------------------------------------------------------------------------------------------------------

WRITTEN, HELD, TRAINED = 0.1, 0.01, 3.0  # Seconds: of a token, more for each sequence, of a step.
TOKENS, STEP = 20, 16  # Of a completion; rollouts of a step.


class SleepingEngine(RolloutEngine):
    """Sleeps as long as a GPU would compute, so that this machine's processors have no say."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.version, self.stopped = 0, False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One token a while for every completion; what is not finished when it is interrupted is handed over as it is."""
        self.stopped, written = False, 0
        wanted = [(r.prompt_ids, (r.sampling or sampling).max_new_tokens) for r in requests for _ in range(r.n)]
        while written < max(limit for _, limit in wanted) and not self.stopped:
            time.sleep(WRITTEN + HELD * sum(written < limit for _, limit in wanted))
            written += 1
        found = []
        for prompt, limit in wanted:
            count = min(limit, written)
            end = "length" if written >= limit else "abort"
            found.append(Rollout(list(prompt), [5] * count, [-5.0] * count, end, self.version))  # type: ignore[arg-type]
        return found

    def interrupt(self) -> None:
        """Hand over after this token."""
        self.stopped = True

    def load_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Their number."""
        for _ in named_tensors:
            pass
        self.version = version

    def close(self) -> None:
        """Nothing to be freed."""


def constant(completions: list, **_: Any) -> list[float]:
    """A reward."""
    return [float(i % 2) for i in range(len(completions))]


def measured(workers: int, steps: int = 9) -> dict[str, float]:
    """Of a real run: trainer, pool and worker processes are real, and what they compute takes the time it is told."""
    from transformers import TrainerCallback

    from posttrain import AsyncGRPOTrainer
    from tests.conftest import build_model, build_tokenizer
    from tests.methods.helpers import prompts

    ends: list[float] = []

    class Clock(TrainerCallback):
        """A step takes its time; notes when steps end."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(TRAINED)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())

    own = {"num_rollout_workers": workers, "max_steps": steps, "samples_per_step": STEP, "worker_segment_s": 1.0}
    own |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "preflight": "off"}
    own |= {"num_generations": 4, "max_completion_length": TOKENS, "max_staleness": 1, "staleness_policy": "pace"}
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = AsyncGRPOTrainer(
            build_model(len(tokenizer)), constant, AsyncGRPOConfig(folder, **own), train_dataset=prompts(400),
            processing_class=tokenizer, engine_factory=SleepingEngine, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][3:]
    return {
        "step_s": statistics.mean(b - a for a, b in itertools.pairwise(ends[2:])),
        "waited": statistics.mean(row["perf/rollout_wait_s"] for row in rows),
        "pushed": statistics.median(row["perf/weight_sync_s"] for row in rows if "perf/weight_sync_s" in row),
        "age": statistics.mean(row["sample/staleness_mean"] for row in rows),
    }


def check() -> dict[str, Any]:
    """With one and with two workers: what was measured, and what is simulated."""
    found: dict[str, Any] = {}
    for workers in (1, 2):
        seen = measured(workers)
        costs = Costs(
            0.0, TRAINED, WRITTEN, HELD, 2 * STEP, seen["pushed"], push_doubling_s=0.0, mean=TOKENS, spread=0.0
        )
        said = simulate(costs, 1, workers, steps=12, samples_per_step=STEP, num_generations=4)
        found[f"{workers} worker(s)"] = {
            "step_s": [round(seen["step_s"], 2), round(said["step_s"], 2)],
            "trainer_waits": [round(seen["waited"] / seen["step_s"], 3), round(said["trainer_waits"], 3)],
            "staleness": [round(seen["age"], 2), round(said["staleness"], 2)],
        }
    return found


def main() -> None:
    """Simulate, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--page", type=Path, help="page whose tables are written")
    parser.add_argument("--check", action="store_true", help="measure on this machine, [measured, simulated]")
    options = parser.parse_args()
    logging.getLogger("posttrain").setLevel(logging.ERROR)
    if options.check:
        found = check()
        print(json.dumps(found, indent=1))
        harness.save("scaling", found)
        return
    shown = tables(tuple(options.sizes))
    for name, content in shown.items():
        print(f"{name}\n{content}\n", flush=True)
    if options.page:
        write_page(options.page, shown)


if __name__ == "__main__":
    main()
