"""Callback that logs peak memory and throughput at selected steps. Throughput is logged as a fraction of the device's peak."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from posttrain.checks import memory as checks
from posttrain.checks.machine import memory_limit
from posttrain.checks.registry import codes_of
from posttrain.errors import ModelError
from posttrain.loop.run import Run
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.memory import (
    available_memory,
    compute_flops_per_token,
    compute_mfu,
    peak_in_use,
    recomputes,
)

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

# Steps after which a profile is logged. After the last of these steps, a profile is logged every 1,000 steps.
PROFILED = (3, 50)


STEPS_BETWEEN_PROFILES = 1000


# Dense bf16 operations per second of each device, from the vendors' data sheets. The values for sparse operations in the
# sheets are twice as large.
PEAKS = {"H100": 989.5e12, "H200": 989.5e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}


class MemoryProfile(transformers.TrainerCallback):
    """Logs memory use and speed after 3 and 50 steps, then every 1,000 steps.

    The metrics are ``memory/peak_gib``, ``memory/peak_share``, ``memory/fragmentation``, ``health/tokens_per_second``,
    ``health/mfu`` (if the device's peak is known), ``health/rank_imbalance`` and ``health/generation_share``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        # State at the end of the first step: the time, the number of tokens without padding, and the number of computed
        # tokens.
        self._begun: tuple[float, int, int] | None = None
        self._logs: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Store the last logs of a training step, which contain the seconds of sampling and of the whole step."""
        if logs and "step_time" in logs:
            self._logs = dict(logs)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **_: Any,
    ) -> None:
        """Log a profile if this is one of the profiled steps."""
        tokens = self.run.progress.tokens_seen
        if self._begun is None:
            self._begun = (time.perf_counter(), *tokens)
            return
        if state.global_step in PROFILED or state.global_step % STEPS_BETWEEN_PROFILES == 0:
            self._look(state.global_step, tokens, optimizer)

    def _look(self, step: int, tokens: tuple[int, int], optimizer: torch.optim.Optimizer | None) -> None:
        run = self.run
        assert self._begun is not None
        seconds = max(time.perf_counter() - self._begun[0], 1e-9)
        real, computed = (now - before for now, before in zip(tokens, self._begun[1:], strict=True))
        ranks = parallel.all_gather_objects([(real, computed)], run.accelerator)
        rate = sum(count for count, _ in ranks) / seconds
        work = [count for _, count in ranks]
        imbalance = max(work) * len(work) / max(sum(work), 1)
        seen = self._profile(step, rate, imbalance, optimizer)
        run.log({name: mean(value) for name, value in _logged(seen).items()})
        with run.checks.preflight.record_check("log_step", codes_of("M", "log_step")):
            run.checks.report(checks.check_profile(seen))

    def _profile(
        self, step: int, rate: float, imbalance: float, optimizer: torch.optim.Optimizer | None
    ) -> checks.Profile:
        run, args = self.run, self.run.args
        device, peak = args.device, peak_in_use(args.device)
        has = available_memory(device, memory_limit(args))
        gpu = device.type == "cuda"
        largest = run.checks.largest_seen
        return checks.Profile(
            step=step,
            peak=peak,
            total=has.total if gpu else has.free,
            reserved=torch.cuda.max_memory_reserved(device) if gpu else 0,
            allocated=torch.cuda.max_memory_allocated(device) if gpu else 0,
            batch=int(args.per_device_train_batch_size),
            accumulation=int(args.gradient_accumulation_steps),
            pass_tokens=largest[0],
            row_tokens=run.layout.row_tokens,
            standing=_standing(run.progress.model, optimizer),
            longest=run.checks.longest_of_data,
            longest_seen=largest[1],
            tokens_per_second=rate,
            mfu=_mfu(run, rate, largest[1]) if gpu else None,
            imbalance=imbalance,
            generation=self._generation(),
            checkpointing=recomputes(args),
        )

    def _generation(self) -> float | None:
        logs = self._logs
        if "rollouts/seconds" not in logs or not logs.get("step_time"):
            return None
        generations = self.run.method.cfg.generations_per_step
        return min(1.0, logs["rollouts/seconds"] * generations / logs["step_time"])


def _logged(seen: checks.Profile) -> dict[str, float]:
    metrics = {
        "memory/peak_gib": seen.peak / 2**30,
        "memory/peak_share": seen.peak / max(seen.total, 1),
        "health/tokens_per_second": seen.tokens_per_second,
        "health/rank_imbalance": seen.imbalance,
    }
    if seen.reserved:
        metrics["memory/fragmentation"] = (seen.reserved - seen.allocated) / max(seen.reserved, 1)
    if seen.mfu is not None:
        metrics["health/mfu"] = seen.mfu
    if seen.generation is not None:
        metrics["health/generation_share"] = seen.generation
    return metrics


def _standing(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the number of bytes of weights, gradients and optimizer states, which do not depend on the batch."""
    weights = sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters())
    states = getattr(optimizer, "state", {}) or {}
    entries = [v for state in states.values() if isinstance(state, dict) for v in state.values()]
    return weights + sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))


def _mfu(run: Run, rate: float, length: int) -> float | None:
    name = torch.cuda.get_device_name(run.args.device)
    peak = next((value for key, value in PEAKS.items() if key in name), None)
    if peak is None or not length:
        return None
    try:
        each = compute_flops_per_token(run.progress.model.config, length)
    except ModelError:
        return None
    return compute_mfu(each, rate, run.accelerator.num_processes, peak)
