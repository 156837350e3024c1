"""The calling contract of reward functions: their arguments, their results, and the error of each broken rule."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, MissingDependencyError, RewardError
from posttrain.metrics import Metric, mean
from posttrain.rewards.call import (
    OURS,
    RESERVED,
    RewardCall,
    awaited,
    environment_rewards,
    head,
    is_concurrent,
    parallel,
    run_all,
    scores_tensor,
)
from posttrain.rewards.transform import (
    REPORTED,
    count_rewards,
    describe_shares,
    describe_weights,
    parse_transform,
    variance_shares,
)

__all__ = [
    "PairRewards",
    "RewardRunner",
    "RewardTable",
    "as_callable",
    "one_each",
    "parallel",
    "reward_name",
    "unique",
]

logger = logging.getLogger(__name__)


def reward_name(function: Any) -> str:
    """``__name__``, through partials; the last part of a model's id; the class name of an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, torch.nn.Module):
        config = getattr(function, "config", None)
        return str(getattr(config, "_name_or_path", "") or type(function).__name__).split("/")[-1]
    return getattr(function, "__name__", None) or type(function).__name__


def unique(names: list[str]) -> list[str]:
    """Equal names get ``_1``, ``_2``: their metrics must not merge."""
    result: list[str] = []
    for name in names:
        count, candidate = 0, name
        while candidate in result:
            count += 1
            candidate = f"{name}_{count}"
        result.append(candidate)
    return result


def one_each(name: str, given: Any, count: int) -> list[Any]:
    """A list with one entry a function; None stands for all."""
    if given is None:
        return [None] * count
    entries = list(given) if isinstance(given, list | tuple | Tensor) else [given]
    if len(entries) != count:
        raise ConfigError(f"{name} has {len(entries)} entries for {count} reward functions. Give one each.")
    return entries


def as_callable(function: Any, tokenizer: Any, options: dict[str, Any]) -> Callable:
    """The function itself, or a model wrapped as one.

    Raises:
        ConfigError: Neither.
    """
    if isinstance(function, str | torch.nn.Module):
        from posttrain.rewards.model import ModelReward

        return ModelReward(function, tokenizer, **options)
    if not callable(function):
        raise ConfigError(
            f"reward_funcs holds {function!r} ({type(function).__name__}), which is neither callable nor a model."
        )
    return function


MANY, PATIENCE = 0.5, 5  # Share of unscored rows, and generations in a row, after which a run has no usable reward.
TWICE = 4  # Rows scored a second time.


@dataclass(slots=True)
class RewardTable:
    """Rewards of one batch of completions.

    Attributes:
        values: ``(n, K)`` float32, NaN where a function returned None; transformed where a transform is set.
        names: K unique names.
        weights: ``(K,)`` float32.
        extra_columns: What functions logged with ``log_extra``, one value a row.
        metrics: Seconds per function, what they logged with ``log_metric``, counts of odd values.
        seconds: Wall-clock seconds of each function, by name.
        raw: ``values`` before any transform.
        start: Index in ``values`` of this process's first row.
    """

    values: Tensor
    names: list[str]
    weights: Tensor
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    raw: Tensor | None = None
    start: int = 0


class RewardRunner:
    """Calls reward functions the way users expect, and turns every mistake into a `RewardError`.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns, trainer_state=...,
    log_extra=..., log_metric=...)`` and returns one number a row, or None for "does not apply". One without
    ``**kwargs`` gets only what it names. Plain functions run in order on the calling thread; asynchronous ones, and
    those marked `parallel`, run concurrently after them.

    Args:
        reward_funcs: A callable, a sequence-classification model (or its id), or a list of them. The list is copied.
        reward_weights: One a function; None is ones.
        processing_classes: Tokenizers of reward models, one (or None) a function.
        transforms: One a function (see `posttrain.rewards.transform`), applied before the weights; None is none.
        timeout: Seconds a function may take for one batch; None waits for ever. A plain function then runs on a thread.
        model_options: Keywords for `posttrain.rewards.model.ModelReward`.
        environments: One instance of each environment; those with ``get_reward`` add a column a class, with weight 1.
        score_twice: Score 4 rows of the first batch a second time and warn where they differ.

    Raises:
        ConfigError: No function at all, or lists of different lengths.

    >>> def length(completions, **kwargs):
    ...     return [len(text) for text in completions]
    >>> runner = RewardRunner(length)
    >>> runner(prompts=["a", "b"], completions=["x", "yz"], completion_ids=[[1], [2, 3]]).values.tolist()
    [[1.0], [2.0]]
    """

    def __init__(
        self,
        reward_funcs: Any,
        reward_weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        *,
        transforms: Sequence[str | None] | str | None = None,
        timeout: float | None = None,
        model_options: Mapping[str, Any] | None = None,
        environments: Sequence[Any] = (),
        score_twice: bool = False,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        functions = [] if functions == [None] else functions
        own = environment_rewards(environments)
        if not functions and not own:
            raise ConfigError(
                "reward_funcs is empty: online training needs at least one reward function, or an environment with "
                "get_reward."
            )
        count = len(functions)
        tokenizers = one_each("reward_processing_classes", processing_classes, count)
        transforms = [transforms] * count if isinstance(transforms, str) else transforms
        weights = one_each("reward_weights", reward_weights, count)
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"reward_timeout={timeout} must be above 0 seconds, or None to wait for ever.")
        options = dict(model_options or {})
        specs = [*one_each("reward_transform", transforms, count), *[None] * len(own)]
        self.functions = [as_callable(f, t, options) for f, t in zip(functions, tokenizers, strict=True)] + own
        self.names = unique([reward_name(f) for f in [*functions, *own]])
        self.weights = torch.tensor([1.0 if w is None else float(w) for w in [*weights, *[None] * len(own)]])
        self.transforms = [parse_transform(spec) for spec in specs]
        self.timeout, self.score_twice = timeout, score_twice
        self.described = describe_weights(self.names, self.functions, self.weights.tolist(), specs)
        self._tables = self._calls = self._reports = 0
        self._mostly_unscored = 0
        self._warnings: dict[str, int] = {}

    def start(self, device: torch.device | str) -> None:
        """Place reward models on the trainer's device, log their scores of four texts, and all weights.

        Raises:
            RewardError: A reward model gives four different texts one score.
        """
        for function in self.functions:
            if hasattr(function, "probe"):
                function.to(device).probe()
        if len(self.names) > 1:
            logger.info("rewards are summed with these weights:\n%s", self.described)

    def __call__(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]] | None = None,
        trainer_state: Any = None,
        prompt_suffixes: list[str] | None = None,
        environments: list[Any] | None = None,
        strict: bool = False,
        judge: bool = True,
    ) -> RewardTable:
        """Score n completions.

        Args:
            prompts: n strings, or lists of messages.
            completions: n strings, or lists of messages.
            completion_ids: Token ids, unpadded, eos included.
            columns: Dataset columns, one value a row.
            trainer_state: Passed through.
            prompt_suffixes: The text each completion continues (the end of the rendered prompt), for format rewards.
            environments: Passed through when given.
            strict: NaN is an error too (a dry run); otherwise it counts as None and is reported.
            judge: Transform and judge these rows. With several processes: False, gather ``values``, then `finish`.

        Raises:
            RewardError: Names the function and, where there is one, the row; or no function scored anything.
        """
        kept = {name: values for name, values in (columns or {}).items() if name not in RESERVED}
        always = {"trainer_state": trainer_state, "prompt_suffixes": prompt_suffixes, "environments": environments}
        always = {k: v for k, v in always.items() if v is not None or k == "trainer_state"}
        for name in [name for name in OURS if name in kept and (name in always or name.startswith("log_"))]:
            del kept[name]
            self._warn(
                f"column {name}",
                "the dataset column %r is not passed to reward functions: the argument of that name is the trainer's. Rename the "
                "column if a function is to read it.",
                name,
            )
        call = RewardCall(prompts, completions, completion_ids, kept, always, strict)
        call.check_inputs()
        results, seconds = self._run(call)
        values = [call.check(name, result) for name, result in zip(self.names, results, strict=True)]
        for name, spent in seconds.items():
            call.metrics[f"rewards/{name}/seconds"] = mean(spent)
        if not strict and self.score_twice and self._calls == 0 and "environments" not in always:
            self._score_again(call, values)
        self._calls += not strict
        table = RewardTable(scores_tensor(values, len(prompts)), list(self.names), self.weights)
        table.extra_columns, table.metrics, table.seconds = call.extra_columns(self.names), call.all_metrics(), seconds
        return self.finish(table, groups=_neighbours(prompts), prompts=prompts, columns=kept) if judge else table

    def rows_again(self, count: int) -> list[int]:
        """Which of ``count`` rows are scored a second time."""
        return list(range(min(TWICE, count)))

    def _score_again(self, call: RewardCall, values: list[list[float]]) -> None:
        """Score a few rows a second time and warn of functions that give another reward."""
        rows = self.rows_again(len(call.prompts))

        def some(column: Any) -> Any:
            return [column[i] for i in rows] if isinstance(column, list) else column

        columns, always = ({k: some(v) for k, v in given.items()} for given in (call.columns, call.always))
        again = RewardCall(some(call.prompts), some(call.completions), some(call.completion_ids), columns, always)
        try:
            results, _ = self._run(again)
            second = [again.check(name, result) for name, result in zip(self.names, results, strict=True)]
        except RewardError as error:
            logger.warning("the rewards of the first %d rows could not be computed a second time: %s", TWICE, error)
            return
        for name, before, after in zip(self.names, values, second, strict=True):
            # NaN (not scored) differs from itself; its text does not.
            pairs = [(a, b) for a, b in zip(some(before), after, strict=True) if str(a) != str(b)]
            if pairs:
                logger.warning(
                    "%s gave %g and then %g for the same completion (%d of %d rows differ): it is random, depends on time "
                    "or on the other rows of a batch, or keeps a state. Such rewards add noise to every advantage.",
                    name, *pairs[0], len(pairs), len(after),
                )  # fmt: skip

    def _run(self, call: RewardCall) -> tuple[list[Any], dict[str, float]]:
        """Results of all functions in their order, and the seconds of each."""
        results: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        later: dict[str, Callable[[], Awaitable]] = {}
        try:
            for name, function in zip(self.names, self.functions, strict=True):
                if is_concurrent(function):
                    later[name] = functools.partial(awaited, call, name, function)
                    continue
                started = time.perf_counter()
                results[name] = call.run(name, function, self.timeout)
                seconds[name] = time.perf_counter() - started
                if inspect.isawaitable(results[name]):
                    later[name] = lambda awaitable=results[name]: awaitable
        except BaseException:
            for result in filter(inspect.iscoroutine, results.values()):
                result.close()  # Or Python warns that it was never awaited.
            raise
        for name, (outcome, spent) in (run_all(later, self.timeout) if later else {}).items():
            if isinstance(outcome, RewardError | MissingDependencyError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise call.failure(name, outcome, self.timeout) from outcome
            results[name], seconds[name] = outcome, seconds.get(name, 0.0) + spent
        return [results[name] for name in self.names], seconds

    def finish(
        self,
        table: RewardTable,
        *,
        groups: Sequence[int],
        prompts: Sequence[Any] = (),
        columns: Mapping[str, Any] | None = None,
        training: bool = True,
    ) -> RewardTable:
        """Transform the rewards of all processes' rows and judge whether they can train anything.

        Args:
            table: Its ``values`` hold the rows of all processes.
            groups: ``(n,)`` which group a row belongs to.
            prompts: For the warning; may be this process's only.
            columns: For the warning and the error; may be this process's only.
            training: Show the share of each function after generations 1, 10 and 100.

        Raises:
            RewardError: All rows of the first batch, or more than half in 5 consecutive batches, were scored by nobody.
        """
        numbers = torch.as_tensor(list(groups))
        self.judge(table, numbers, prompts=prompts, columns=columns)
        if training:
            count_rewards(self.transforms, table.values)
        table.raw, table.values = table.values, self.transformed(table.values, numbers)
        for name, transform, raw in zip(table.names, self.transforms, table.raw.unbind(1), strict=True):
            if transform is not None:
                table.metrics[f"rewards/{name}/raw_mean"] = mean(raw.nan_to_num(0.0), ~raw.isnan())
        if len(table.names) > 1:
            self._report_shares(table, training)
        return table

    def judge(
        self,
        table: RewardTable,
        groups: Tensor,
        *,
        prompts: Sequence[Any] = (),
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Warn of rows that no function scored, and refuse to go on with nothing but those; wherever rewards were computed.

        Args:
            table: Gets ``groups/unscorable`` where there are such rows.
            groups: ``(n,)`` group number of each row.
            prompts: For the warning; may be this process's only.
            columns: For the warning and the error; may be this process's only.

        Raises:
            RewardError: As for `finish`.
        """
        unscored = table.values.isnan().all(-1)  # (n,)
        if unscored.any():
            rows = unscored.nonzero().flatten().tolist()
            # A mean, as every process has the same number: a sum would multiply it.
            table.metrics["groups/unscorable"] = mean(float(len(rows)))
            row = {name: values[rows[0]] for name, values in (columns or {}).items() if rows[0] < len(values)}
            self._warn(
                "none",
                "All reward functions returned None for row %d (and %d more). Prompt: %s. Its columns: %s",
                rows[0], len(rows) - 1, head(prompts[rows[0]]) if rows[0] < len(prompts) else "(on another process)",
                head(row, 300),
            )  # fmt: skip
        self._refuse_unscored(unscored, sorted(columns or {}))
        self._warn_partial(table, groups, unscored)

    def transformed(self, values: Tensor, groups: Tensor) -> Tensor:
        """``(n, K)`` rewards after each function's transform, a tensor of its own; ``groups (n,)`` numbers the rows' groups."""
        columns = zip(values.unbind(1), self.transforms, strict=True)
        return torch.stack([raw if transform is None else transform(raw, groups) for raw, transform in columns], 1)

    def _report_shares(self, table: RewardTable, training: bool) -> None:
        """Log each function's share of the rewards' variance."""
        shares = variance_shares(table.values, table.weights).tolist()
        for name, share in zip(table.names, shares, strict=True):
            table.metrics[f"rewards/{name}/variance_share"] = mean(share)
        self._reports += training
        if training and self._reports in REPORTED:
            shown = describe_shares(table.names, table.values, table.weights)
            logger.info("share of the rewards' variance at generation %d: %s", self._reports, shown)

    def _refuse_unscored(self, unscored: Tensor, columns: list[str]) -> None:
        share = float(unscored.float().mean()) if unscored.numel() else 0.0
        self._mostly_unscored = self._mostly_unscored + 1 if share > MANY else 0
        self._tables += 1
        if self._tables == 1 and share == 1.0:
            which = "every row of the first batch"
        elif self._mostly_unscored >= PATIENCE:
            which = f"{share:.0%} of the rows, in {PATIENCE} batches in a row"
        else:
            return
        raise RewardError(
            f"no usable reward: all reward functions ({', '.join(self.names)}) returned None for {which}. Nothing can "
            f"be learned from that. They got the columns {columns}; usually a value they look for never occurs in one "
            "(a task called 'code' in the data and 'coding' in the function, a reference answer that does not parse)."
        )

    def _warn_partial(self, table: RewardTable, groups: Tensor, unscored: Tensor) -> None:
        """Totals inside a group are not comparable when a function scored only some of its rows."""
        for name, column in zip(table.names, table.values.unbind(1), strict=True):
            have, lack = (set(groups[rows].tolist()) for rows in (~column.isnan(), column.isnan() & ~unscored))
            if have & lack:
                self._warn(
                    f"partial {name}",
                    "%s returned None for some completions of a prompt and a number for others, in %d groups: their "
                    "totals are not comparable. Return 0.0 instead of None, or None for the whole group.",
                    name, len(have & lack),
                )  # fmt: skip

    def _warn(self, key: str, message: str, *values: Any) -> None:
        """Log the first warning of this key, and then every hundredth."""
        count = self._warnings[key] = self._warnings.get(key, 0) + 1
        if count % 100 == 1:
            logger.warning(message, *values)

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
            prompt_suffixes=["", ""],
            strict=True,
            judge=False,
        )


class PairRewards(RewardRunner):
    """Shows reward functions all first completions and then all second ones, columns repeated; rows come back as they were.

    Attributes:
        pairs: Whether rows are pairs, next to each other; otherwise they are shown as they stand.
    """

    pairs = True

    def rows_again(self, count: int) -> list[int]:
        """Both completions of the first two prompts: a judge compares them with each other."""
        half = count // 2
        return [0, 1, half, half + 1] if self.pairs and half > 1 else super().rows_again(count)

    def __call__(self, *, prompts: list[Any], **rows: Any) -> RewardTable:
        """As `RewardRunner`, whose rows ``0, 1, 2, 3`` become ``0, 2, 1, 3`` on the way."""
        count = len(prompts)
        if not self.pairs or count % 2:
            return super().__call__(prompts=prompts, **rows)
        order = [*range(0, count, 2), *range(1, count, 2)]

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(column) for name, column in value.items()}
            return [value[i] for i in order] if isinstance(value, list) and len(value) == count else value

        table = super().__call__(prompts=moved(prompts), **{name: moved(value) for name, value in rows.items()})
        back = sorted(range(count), key=order.__getitem__)
        table.values = table.values[back]
        table.raw = None if table.raw is None else table.raw[back]
        table.extra_columns = {name: [column[i] for i in back] for name, column in table.extra_columns.items()}
        return table


def _neighbours(prompts: Sequence[Any]) -> list[int]:
    """Group numbers: consecutive rows with the same prompt are a group."""
    numbers: list[int] = []
    for i, prompt in enumerate(prompts):
        numbers.append(numbers[-1] + _differ(prompt, prompts[i - 1]) if i else 0)
    return numbers


def _differ(one: Any, other: Any) -> bool:
    try:
        return one is not other and bool(one != other)
    except (TypeError, ValueError, RuntimeError):  # Arrays inside, which do not compare to one truth.
        return True
