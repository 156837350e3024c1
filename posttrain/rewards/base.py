"""The calling contract of reward functions: what they get, what they must return, and what happens when they do not."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, RewardError
from posttrain.metrics import Metric, mean, total

__all__ = ["RewardRunner", "RewardTable", "reward_name"]

logger = logging.getLogger(__name__)

RESERVED = ("prompt", "completion", "completion_ids")


@dataclass(slots=True)
class RewardTable:
    """Rewards of one batch of completions.

    Attributes:
        values: ``(n, K)`` float32, NaN where a function returned None.
        names: K unique names.
        weights: ``(K,)``.
        extra_columns: What functions logged with ``log_extra``, one value a row.
        metrics: Seconds per function, what they logged with ``log_metric``, counts of odd values.
    """

    values: Tensor
    names: list[str]
    weights: Tensor
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


def reward_name(function: Any) -> str:
    """``__name__``, through partials; the last part of a model's id; the class name of an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return str(getattr(function.config, "_name_or_path", "") or type(function).__name__).split("/")[-1]
    return getattr(function, "__name__", None) or type(function).__name__


def _unique(names: list[str]) -> list[str]:
    """Equal names get ``_1``, ``_2``: their metrics must not merge."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        result.append(f"{name}_{count}" if count else name)
    return result


class RewardRunner:
    """Calls reward functions the way users expect, and turns every mistake into a `RewardError`.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns, trainer_state=...,
    log_extra=..., log_metric=...)`` and returns one number, or None for "does not apply", a row. ``async def`` functions
    run concurrently after the others.

    Args:
        reward_funcs: A callable, a sequence-classification model (or its id), or a list of them.
        reward_weights: One a function; None is ones.
        processing_classes: Tokenizers of reward models, one (or None) a function.

    Raises:
        ConfigError: No function at all, or lists of different lengths.
    """

    def __init__(self, reward_funcs: Any, reward_weights: Sequence[float] | None = None, processing_classes: Any = None) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if not functions or functions == [None]:
            raise ConfigError("reward_funcs is empty: online training needs at least one reward function.")
        tokenizers = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
        tokenizers = tokenizers * len(functions) if len(tokenizers) == 1 else tokenizers
        for name, given in {"reward_weights": reward_weights, "reward_processing_classes": tokenizers}.items():
            if given is not None and len(given) != len(functions):
                raise ConfigError(f"{name} has {len(given)} entries for {len(functions)} reward functions. Give one each.")
        self.functions = [_as_callable(f, t) for f, t in zip(functions, tokenizers, strict=True)]
        self.names = _unique([reward_name(f) if not isinstance(f, str) else f.split("/")[-1] for f in functions])
        self.weights = torch.tensor([1.0] * len(functions) if reward_weights is None else list(reward_weights))
        self._warned_none = False

    def __call__(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]] | None = None,
        trainer_state: Any = None,
        strict: bool = False,
    ) -> RewardTable:
        """Score n completions.

        Args:
            prompts, completions: Strings, or lists of messages.
            completion_ids: Token ids, unpadded, eos included.
            columns: Dataset columns, one value a row.
            trainer_state: Passed through.
            strict: NaN is an error too (a dry run); otherwise it counts as None and is reported.

        Raises:
            RewardError: Names the function and, where there is one, the row.
        """
        call = _Call(prompts, completions, completion_ids, columns or {}, trainer_state, strict)
        results: list[Any] = [None] * len(self.functions)
        waiting: list[tuple[int, Coroutine]] = []
        for k, function in enumerate(self.functions):
            started = time.perf_counter()
            outcome = call.run(self.names[k], function)
            if inspect.isawaitable(outcome):
                waiting.append((k, outcome))  # type: ignore[arg-type]
            else:
                results[k] = outcome
                call.metrics[f"rewards/{self.names[k]}/seconds"] = mean(time.perf_counter() - started)
        self._await(waiting, results, call)
        values = [call.check(name, result) for name, result in zip(self.names, results, strict=True)]
        table = RewardTable(torch.tensor(values).T.reshape(len(prompts), -1), list(self.names), self.weights)
        table.extra_columns, table.metrics = call.extra, call.metrics
        self._note_unscored(table, call)
        return table

    def _await(self, waiting: list[tuple[int, Coroutine]], results: list[Any], call: _Call) -> None:
        if not waiting:
            return
        started = time.perf_counter()

        async def gather() -> list[Any]:
            return await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

        for (k, _), outcome in zip(waiting, _run_async(gather()), strict=True):
            if isinstance(outcome, BaseException):
                raise call.failure(self.names[k], outcome) from outcome
            results[k] = outcome
            call.metrics[f"rewards/{self.names[k]}/seconds"] = mean(time.perf_counter() - started)

    def _note_unscored(self, table: RewardTable, call: _Call) -> None:
        rows = table.values.isnan().all(-1).nonzero().flatten().tolist()
        if rows:
            table.metrics["groups/unscorable"] = total(float(len(rows)))
            if not self._warned_none:
                self._warned_none = True
                logger.warning(
                    "All reward functions returned None for row %d (and %d more). Columns: %s. Prompt: %s",
                    rows[0], len(rows) - 1, sorted(call.columns), call.head(rows[0]),
                )

    def dry_run(self, examples: list[dict[str, Any]], *, conversational: bool) -> None:
        """Call every function once on made-up completions, before anything expensive is loaded.

        Raises:
            RewardError: A function raised, or returned the wrong count, a string, an infinite number or NaN.
        """
        rows = [row for row in examples if row.get("prompt")] or examples
        rows = (rows * 2)[:2]  # Two, so that a single number returned for the whole batch shows.
        texts = ["0", "The answer is 1."]
        self(
            prompts=[copy.deepcopy(row["prompt"]) for row in rows],
            completions=[[{"role": "assistant", "content": text}] if conversational else text for text in texts],
            completion_ids=[[0], [0, 1]],
            columns={name: [row.get(name) for row in rows] for name in rows[0] if name not in RESERVED},
            strict=True,
        )


@dataclass
class _Call:
    """One scoring of one batch."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    trainer_state: Any
    strict: bool
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def run(self, name: str, function: Callable) -> Any:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(self.prompts):
                raise RewardError(f"{name} logged {len(values)} values for column {column!r} and {len(self.prompts)} rows.")
            self.extra[f"{name}/{column}" if column in self.extra else column] = list(values)

        def log_metric(key: str, value: float) -> None:
            self.metrics[key] = mean(float(value))

        try:
            # Shallow copies: a function that edits its lists must not change what the next one sees.
            return function(
                prompts=list(self.prompts),
                completions=list(self.completions),
                completion_ids=[list(ids) for ids in self.completion_ids],
                trainer_state=self.trainer_state,
                log_extra=log_extra,
                log_metric=log_metric,
                **{key: list(values) for key, values in self.columns.items()},
            )
        except Exception as error:
            raise self.failure(name, error) from error

    def failure(self, name: str, error: BaseException) -> RewardError:
        where = self._guilty_row(error)
        at = f" at row {where} (prompt: {self.head(where)})" if where is not None else f" (first prompt: {self.head(0)})"
        return RewardError(
            f"reward function {name!r} raised {type(error).__name__}: {error}{at}. A reward must give a number, or None for "
            "'does not apply', whatever the model writes."
        )

    def _guilty_row(self, error: BaseException) -> int | None:
        """The row a function was at when it raised, told by its loop over the completions."""
        frame = error.__traceback__
        while frame is not None:
            for value in frame.tb_frame.f_locals.values():
                for index, completion in enumerate(self.completions):
                    if value is completion and not isinstance(value, int | type(None)):
                        return index
            frame = frame.tb_next
        return None

    def head(self, row: int) -> str:
        text = str(self.prompts[row])
        return repr(text if len(text) <= 120 else text[:120] + "...")

    def check(self, name: str, result: Any) -> list[float]:
        n = len(self.prompts)
        if isinstance(result, Tensor) or hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, Sequence) or isinstance(result, str | bytes):
            raise RewardError(
                f"reward function {name!r} returned {result!r} ({type(result).__name__}); it must return a list of {n} numbers, "
                "one a completion."
            )
        if len(result) != n:
            raise RewardError(f"reward function {name!r} returned {len(result)} rewards for {n} completions; it must return one each.")
        return [self._number(name, row, value) for row, value in enumerate(result)]

    def _number(self, name: str, row: int, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise RewardError(
                f"reward function {name!r} returned {value!r} ({type(value).__name__}) for row {row}; it must return a number "
                f"or None. Prompt: {self.head(row)}"
            )
        number = float(value)
        if math.isinf(number) or (self.strict and math.isnan(number)):
            raise RewardError(
                f"reward function {name!r} returned {number} for row {row}; it must return a finite number, or None for 'does "
                f"not apply'. Prompt: {self.head(row)}"
            )
        if math.isnan(number):
            self.metrics[f"rewards/{name}/nan"] = total(1.0)
        return number


def _as_callable(function: Any, tokenizer: Any) -> Callable:
    if isinstance(function, str | torch.nn.Module):
        from posttrain.rewards.model import ModelReward

        return ModelReward(function, tokenizer)
    if not callable(function):
        raise ConfigError(f"reward_funcs holds {function!r} ({type(function).__name__}), which is neither callable nor a model.")
    return function


def _run_async(coroutine: Coroutine) -> Any:
    """Run to the end on a loop of its own thread, so that it also works inside a running loop (a notebook)."""
    box: list[Any] = []

    def work() -> None:
        try:
            box.append(asyncio.run(coroutine))
        except BaseException as error:  # Carried over to the caller's thread.
            box.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
