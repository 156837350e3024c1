"""`RewardRunner`: call the reward functions of a training run, and transform their rewards."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from posttrain.data.formats import known_columns
from posttrain.errors import ConfigError, RewardError, did_you_mean
from posttrain.metrics import Metric, mean
from posttrain.rewards.call import (
    LARGEST_WEIGHT,
    RESERVED,
    RewardTable,
    as_callable,
    one_each,
    reward_function,
    reward_name,
    score,
    unique,
)

logger = logging.getLogger(__name__)

# Minimum correlation of two reward functions. If the correlation is lower, it is logged, because the rewards of the two
# functions mostly cancel in the sum.
OPPOSED_CORRELATION = -0.5
# Number of rows of the first batch that are scored twice, to find reward functions that are not deterministic.
ROWS_SCORED_TWICE = 4


# Transforms of one reward column ------------------------------------------------------------------------------------------

Transform = Callable[[Tensor, Tensor], Tensor]


def transform_names(specs: Sequence[str | None] | str | None) -> set[str]:
    """Return the names of the transforms in ``reward_transform``: one spec for all functions, or a list with one spec per
    function.

    >>> sorted(transform_names(["clip:0:1", None])), sorted(transform_names("rank"))
    (['clip', 'none'], ['rank'])
    """
    return {str(spec or "none").split(":")[0] for spec in ([specs] if isinstance(specs, str) else specs or ())}


def parse_transform(spec: str | None) -> Transform | None:
    """Create the transform for a spec. A transform is a function that converts rewards ``(n,)`` and group numbers ``(n,)``
    to transformed rewards ``(n,)``.

    A reward of NaN (not scored) stays NaN. The specs are:

    - ``none``: no transform (returns None);
    - ``clip:a:b``: clamp rewards to [a, b];
    - ``log1p``: ``sign(r) * log(1 + |r|)``;
    - ``tanh:s``: ``tanh(r / s)``;
    - ``rank``: fraction, in [0, 1], of the group's other rewards that are smaller. An equal reward is counted as one half;
    - ``zscore``: ``(r - mean) / (std + 1e-4)`` over all rows;
    - ``running``: `RunningScale`.

    Raises:
        ConfigError: The name of the transform is unknown, or its numbers are missing or out of range.

    >>> parse_transform("clip:0:1")(torch.tensor([-3.0, 0.5, 9.0]), torch.zeros(3)).tolist()
    [0.0, 0.5, 1.0]
    """
    name, *arguments = str(spec or "none").split(":")
    if name not in TRANSFORMS:
        choices = ", ".join(syntax for syntax, _ in TRANSFORMS.values())
        raise ConfigError(
            f"reward_transform={spec!r} is unknown{did_you_mean(name, TRANSFORMS)}. Fix: choose one of {choices}."
        )
    syntax, make = TRANSFORMS[name]
    try:
        numbers = [float(text) for text in arguments]
    except ValueError:
        numbers = [math.nan]
    wanted = syntax.count(":")
    if len(arguments) != wanted or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"reward_transform={spec!r} must have the form {syntax!r} with {wanted} finite numbers.")
    if numbers != sorted(set(numbers)) or (name == "tanh" and numbers[0] <= 0):
        raise ConfigError(f"reward_transform={spec!r} is out of range. clip:a:b needs a < b, and tanh:s needs s > 0.")
    return make(*numbers)


def _rank(rewards: Tensor, groups: Tensor) -> Tensor:
    pair = (groups[:, None] == groups[None, :]) & ~rewards.isnan()[None, :]  # (n, n)
    pair.fill_diagonal_(False)
    below = (rewards[:, None] > rewards[None, :]).float() + 0.5 * (rewards[:, None] == rewards[None, :]).float()
    others = pair.sum(1)  # (n,)
    share = torch.where(others > 0, (below * pair).sum(1) / others.clamp(min=1), torch.full_like(rewards, 0.5))
    return share.masked_fill(rewards.isnan(), math.nan)


def _zscore(rewards: Tensor, groups: Tensor) -> Tensor:
    scored = rewards[~rewards.isnan()]
    if scored.numel() < 2:
        return rewards - rewards
    return (rewards - scored.mean()) / (scored.std() + 1e-4)


@dataclass(frozen=True)
class RunningScale:
    """Reward scaling ``r / std``. std is the standard deviation of all rewards since the start of the run.

    With this scaling, the size of updates does not depend on the unit of rewards. The mean is not subtracted, because a
    baseline or a value function already subtracts it, and because rewards would change their sign. In training, rewards are
    first added to the statistics (`add`), and then scaled. Evaluation does not change the statistics. As long as all rewards
    are equal, they are not scaled.

    Attributes:
        count, mean, squares: Number and mean of the rewards, and sum of squared deviations from the mean (Welford's
            algorithm).

    Reference: Implementation matters in deep policy gradients, arXiv:2005.12729, section 3, reward scaling.

    >>> scale = RunningScale().add(torch.tensor([0.0, 200.0]))
    >>> scale(torch.tensor([100.0, 300.0]), torch.zeros(2)).tolist()
    [1.0, 3.0]
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, rewards: Tensor) -> RunningScale:
        """Return a copy with the rewards ``(n,)`` added to the statistics. NaN rewards are ignored."""
        scored = rewards[~rewards.isnan()].double()
        if not len(scored):
            return self
        count, gap = self.count + len(scored), float(scored.mean()) - self.mean
        added = float((scored - scored.mean()).square().sum()) + gap**2 * self.count * len(scored) / count
        return RunningScale(count, self.mean + gap * len(scored) / count, self.squares + added)

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Divide rewards ``(n,)`` by the current standard deviation."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        # If the standard deviation consists only of rounding errors, rewards are not divided.
        return rewards / std if std > 1e-6 * abs(self.mean) else rewards


# Syntax of the spec of each transform, and function that creates the transform from the numbers in the spec.
TRANSFORMS: dict[str, tuple[str, Callable[..., Transform | None]]] = {
    "none": ("none", lambda: None),
    "clip": ("clip:a:b", lambda a, b: lambda r, groups: r.clamp(a, b)),
    "log1p": ("log1p", lambda: lambda r, groups: r.sign() * r.abs().log1p()),
    "rank": ("rank", lambda: _rank),
    "tanh": ("tanh:s", lambda s: lambda r, groups: torch.tanh(r / s)),
    "zscore": ("zscore", lambda: _zscore),
    "running": ("running", RunningScale),
}


# Contribution of each function -------------------------------------------------------------------------------------------


def variance_shares(values: Tensor, weights: Tensor) -> Tensor:
    """Compute each function's share of the reward variance: ``w_k^2 var(r_k) / sum_j w_j^2 var(r_j)``. If no function has
    variance, all shares are 0.

    Args:
        values: Rewards ``(n, K)``. NaN means that a function did not score a row.
        weights: Weights ``(K,)``.

    >>> variance_shares(torch.tensor([[0.0, 0.0], [3.0, 1.0]]), torch.tensor([1.0, 1.0])).tolist()
    [0.8999999761581421, 0.10000000149011612]
    """
    scored = ~values.isnan()
    count = scored.sum(0).clamp_min(1)
    centred = (values - values.nansum(0) / count).nan_to_num(0.0)
    weighted = weights.square() * centred.square().sum(0) / count  # (K,)
    total = weighted.sum()
    return weighted / total if float(total) > 0 else torch.zeros_like(weighted)


def correlation(one: Tensor, other: Tensor) -> float | None:
    """Compute Pearson's correlation over the rows in which neither value is NaN. If it is undefined, return None.

    The correlation is undefined for fewer than two rows and for constant values.

    Args:
        one: Values ``(n,)``. NaN means unknown.
        other: Values ``(n,)``. NaN means unknown.

    >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    1.0
    """
    valid = ~(one.isnan() | other.isnan())
    a, b = one[valid].double(), other[valid].double()
    if a.numel() < 2:
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale < 1e-12 else round(max(-1.0, min(1.0, float(a @ b) / scale)), 9)


def describe_shares(names: Sequence[str], values: Tensor, weights: Tensor) -> str:
    """Return a line of text with each function's share of the variance. In addition, the line lists pairs of functions whose
    rewards cancel each other.
    """
    shares = variance_shares(values, weights)
    text = ", ".join(f"{name} {100 * float(share):.1f} %" for name, share in zip(names, shares, strict=True))
    against = []
    for i, j in itertools.combinations(range(len(names)), 2):
        related = correlation(values[:, i] * weights[i], values[:, j] * weights[j])
        if related is not None and related < OPPOSED_CORRELATION:
            against.append(f"{names[i]} and {names[j]} (correlation {related:.2f})")
    if against:
        text += (
            f"; {', '.join(against)} mostly cancel each other in the sum. multi_objective_aggregation='normalize_then_sum' "
            "avoids this"
        )
    return text


def unscorable(values: Tensor) -> dict[str, Metric]:
    """Return a metric with the number of rows that no function has scored. If all rows are scored, return an empty dict."""
    count = int(values.isnan().all(-1).sum())
    # This metric is a mean over processes, not a sum, because all processes count the same gathered rows.
    return {"groups/unscorable": mean(float(count))} if count else {}


# The reward functions of a run ------------------------------------------------------------------------------------------


class RewardRunner:
    """Calls the reward functions of a trainer. Invalid results and exceptions of functions are raised as `RewardError`.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns, trainer_state=...,
    log_extra=..., log_metric=...)``. It returns a number for each row, or None for rows that it cannot score. A function
    without ``**kwargs`` gets only the arguments in its signature. Synchronous functions run first, one after another, on the
    calling thread. Asynchronous functions and functions with the decorator `parallel` run afterwards, all at the same time.

    Args:
        reward_funcs: Callable, sequence-classification model (or its id), or list of callables and models. The list is
            copied.
        reward_weights: One weight per function. None: all weights are 1.
        processing_classes: One tokenizer (or None) per function, for reward models.
        transforms: One transform per function, see `parse_transform`. It is applied before the weight. None: no transforms.
        timeout: Maximum seconds of a function for a batch. None: no limit. With a timeout, synchronous functions run on a
            separate thread.
        model_options: Keyword arguments of `posttrain.rewards.model.ModelReward`.
        of_environments: Reward functions that return rewards computed by environments. They have the weight 1.
        score_twice: Whether 4 rows of the first batch are scored twice. If the rewards differ, a warning is logged.

    Raises:
        ConfigError: There are no reward functions, or a list does not have one item per function.

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
        of_environments: Sequence[Callable] = (),
        score_twice: bool = False,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        functions = [] if functions == [None] else functions
        if not functions and not of_environments:
            raise ConfigError(
                "reward_funcs is empty, but online training needs rewards. Fix: pass at least one reward function, or an "
                "environment with the method get_reward."
            )
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"reward_timeout={timeout} must be above 0 seconds, or None for no limit.")
        count, none = len(functions), [None] * len(of_environments)
        transforms = [transforms] * count if isinstance(transforms, str) else transforms
        tokenizers = [*one_each("reward_processing_classes", processing_classes, count), *none]
        weights = [*one_each("reward_weights", reward_weights, count), *none]
        self._specs = [*one_each("reward_transform", transforms, count), *none]
        functions += of_environments
        self.names = unique([reward_name(f) for f in functions])
        options = dict(model_options or {})
        self.functions = tuple(as_callable(f, t, options) for f, t in zip(functions, tokenizers, strict=True))
        self._calls = [reward_function(n, f, timeout) for n, f in zip(self.names, self.functions, strict=True)]
        self.processing_classes = [getattr(f, "tokenizer", t) for f, t in zip(self.functions, tokenizers, strict=True)]
        self._weights = torch.tensor([1.0 if w is None else float(w) for w in weights])  # (K,)
        if not bool((self._weights.abs() <= LARGEST_WEIGHT).all() and self._weights.any()):
            raise ConfigError(
                f"reward_weights={self._weights.tolist()} must be numbers from {-LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g} that "
                "are not all 0. With only zeros, every advantage is 0."
            )
        self.transforms = [parse_transform(spec) for spec in self._specs]
        self.score_twice = score_twice
        self._hidden: set[str] = set()  # Columns about which a warning was logged.

    @property
    def weights(self) -> Tensor:
        """Weights ``(K,)`` float32 of the functions. They can be changed during training."""
        return self._weights

    @weights.setter
    def weights(self, weights: Any) -> None:
        weights = torch.as_tensor(weights, dtype=torch.float32)
        if weights.shape != self._weights.shape:
            raise ConfigError(
                f"reward_weights has shape {tuple(weights.shape)} for {len(self.names)} reward functions. Fix: pass one weight "
                "per function."
            )
        self._weights = weights

    def start(self, device: torch.device | str) -> None:
        """Prepare for training. Move reward models to ``device``, and score test texts. If there are several functions, log
        their weights.

        Raises:
            RewardError: A reward model returns the same score for four different texts.
        """
        for function in self.functions:
            if hasattr(function, "probe"):
                function.to(device).probe()
        rows = zip(self._calls, self.weights.tolist(), self._specs, strict=True)
        for function, weight, spec in rows if len(self.names) > 1 else ():
            shown = function.name, weight, spec or "none", function.reads()
            logger.info("reward %s: weight %g, transform %s, reads %s", *shown)

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
    ) -> RewardTable:
        """Score the completions of this process. `finish` applies transforms later, to the rows of all processes together.

        Args:
            prompts: n strings, or lists of messages.
            completions: n strings, or lists of messages.
            completion_ids: Token ids of the completions without padding. They include eos.
            columns: Dataset columns, with one value per row.
            trainer_state: State of the trainer, for the functions.
            prompt_suffixes: End of the rendered prompt of each completion. Rewards for the format need this text, because it
                may open a tag.
            environments: Environments for the functions. If None, they are not passed.
            strict: Whether a reward of NaN is an error (as in a dry run). Otherwise NaN has the same effect as None, and the
                number of NaN rewards is logged as a metric.

        Raises:
            RewardError: A function failed. The message contains the function's name. If a row caused the error, the message
                contains the row too.
        """
        optional = {"prompt_suffixes": prompt_suffixes, "environments": environments}
        always = {"trainer_state": trainer_state} | {k: v for k, v in optional.items() if v is not None}
        rows = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        rows |= self._passed(columns or {}, always)
        table = score(self._calls, self.weights, rows, always, strict=strict)
        if self.score_twice and not strict:
            self.score_twice = False
            if environments is None:
                self._compare_second(table, rows, always)
        return table

    def _passed(self, columns: Mapping[str, list[Any]], always: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the dataset columns for reward functions. If the trainer has an argument with the name of a column, the
        column is excluded. A warning about it is logged once.
        """
        arguments = {*RESERVED[1:], *always, "log_extra", "log_metric"}
        for name in columns:
            if name in ("prompts", "completions"):
                raise RewardError(
                    f"the dataset column {name!r} has the same name as an argument that every reward function gets. Fix: "
                    "rename the column."
                )
            if name in arguments - self._hidden:
                self._hidden.add(name)
                logger.warning(
                    "the dataset column %r is not passed to reward functions, because the trainer passes its own %r. Fix: rename "
                    "the column if a function needs it.",
                    name, "completions" if name == "completion" else name,
                )  # fmt: skip
        return {name: column for name, column in columns.items() if name not in arguments and name not in RESERVED}

    def rows_again(self, count: int) -> list[int]:
        """Return the indices of the rows that are scored twice, for a batch of ``count`` rows."""
        return list(range(min(ROWS_SCORED_TWICE, count)))

    def _compare_second(self, table: RewardTable, rows: dict[str, list[Any]], always: dict[str, Any]) -> None:
        """Score a few rows again. Log a warning about functions whose two rewards differ."""
        again = self.rows_again(len(table.values))
        rows, always = (
            {name: [value[i] for i in again] if isinstance(value, list) else value for name, value in mapping.items()}
            for mapping in (rows, always)
        )
        try:
            second = score(self._calls, self.weights, rows, always).values
        except RewardError as error:
            logger.warning(
                "the rewards of the first %d rows could not be computed a second time: %s", ROWS_SCORED_TWICE, error
            )
            return
        for name, before, after in zip(self.names, table.values[again].T.tolist(), second.T.tolist(), strict=True):
            # NaN (not scored) is not equal to itself, so the values are compared as text.
            pairs = [(a, b) for a, b in zip(before, after, strict=True) if str(a) != str(b)]
            if pairs:
                logger.warning(
                    "%s returned %g and then %g for the same completion (%d of %d rows differ). The function is random, has "
                    "state, or depends on the time or on the other rows of the batch. Differences of this kind add noise to "
                    "every advantage.",
                    name, *pairs[0], len(pairs), len(after),
                )  # fmt: skip

    def finish(self, table: RewardTable, groups: Tensor, *, training: bool = True) -> RewardTable:
        """Apply the transforms to the rewards of all processes. Add metrics for each function.

        Args:
            table: Table whose ``values`` contain the rows of all processes.
            groups: Group number ``(n,)`` of each row.
            training: Whether the completions are used for training, and not for evaluation. Only training updates the
                statistics of running transforms.
        """
        columns = list(zip(table.names, self.transforms, table.values.unbind(1), strict=True))
        if training:
            self.transforms = [t.add(raw) if isinstance(t, RunningScale) else t for _, t, raw in columns]
        values = self.transformed(table.values, groups)
        metrics = table.metrics | unscorable(table.values)
        for name, transform, raw in columns:
            if transform is not None:
                metrics[f"rewards/{name}/raw_mean"] = mean(raw.nan_to_num(0.0), ~raw.isnan())
        if len(table.names) > 1:
            for name, share in zip(table.names, variance_shares(values, table.weights).tolist(), strict=True):
                metrics[f"rewards/{name}/variance_share"] = mean(share, weight=len(values))
        return replace(table, values=values, raw=table.values, metrics=metrics)

    def transformed(self, values: Tensor, groups: Tensor) -> Tensor:
        """Apply the transforms to rewards ``(n, K)``, and return a new tensor. ``groups`` are group numbers ``(n,)``."""
        columns = zip(values.unbind(1), self.transforms, strict=True)
        return torch.stack([raw if transform is None else transform(raw, groups) for raw, transform in columns], 1)

    def transforms_state(self) -> list[list[float] | None]:
        """Return the state of each transform for a checkpoint, as JSON-serializable values."""
        return [list(astuple(function)) if isinstance(function, RunningScale) else None for function in self.transforms]

    def load_transforms(self, state: Sequence[Sequence[float] | None]) -> None:
        """Restore the transforms from the result of `transforms_state`."""
        for k, saved in enumerate(state):
            if isinstance(self.transforms[k], RunningScale) and saved is not None:
                self.transforms[k] = RunningScale(int(saved[0]), *map(float, saved[1:]))

    def dry_run(
        self,
        examples: list[dict[str, Any]],
        *,
        conversational: bool,
        evaluation: Iterable[tuple[str, Any]] = (),
        group: int = 2,
        max_steps: int = 1,
    ) -> None:
        """Call every function once with made-up completions, to find errors before models and servers are loaded.

        Args:
            examples: First rows of the training set.
            conversational: Whether completions are messages.
            evaluation: Evaluation sets with their names. These sets must have the columns that the functions need as well.
            group: Number of completions per prompt. At least two completions are used.
            max_steps: ``trainer_state.max_steps``, if it is known, at least 1.

        Raises:
            RewardError: A function raised an error, or returned an invalid result, e.g. a string, NaN, or too few values.
                The error is also raised if an evaluation set lacks a column that a function needs.
        """
        for name, dataset in evaluation:
            columns = known_columns(dataset)
            for function in self._calls if columns else ():
                function.check_columns([c for c in columns if c not in RESERVED], dataset=name)
        rows = [row for row in examples if row.get("prompt")] or examples
        # One group is used, because a function may compare the completions of a group. The group has at least two
        # completions, to detect functions that return one number for a whole batch.
        count = max(2, group)
        rows = (rows * 2)[:2] if group == 1 else rows[:1] * count
        texts = (["0", "The answer is 1."] * count)[:count]
        self(
            prompts=[copy.deepcopy(row["prompt"]) for row in rows],
            completions=[[{"role": "assistant", "content": text}] if conversational else text for text in texts],
            completion_ids=([[0], [0, 1]] * count)[:count],
            columns={name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"},
            prompt_suffixes=[""] * count,
            trainer_state=transformers.TrainerState(max_steps=max(1, max_steps)),
            strict=True,
        )
