"""Rewards of a rollout batch over all ranks: metrics, the completions table, a watch over them, fresh groups for flat ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.checks import rewards as reward_checks
from posttrain.checks.registry import describe
from posttrain.checks.rewards import FLAT_GENERATIONS, RunningReward, check_reward_ranges
from posttrain.data.formats import shown_prompt
from posttrain.data.samplers import PromptStream
from posttrain.errors import ConfigError, RewardError
from posttrain.loop.checks import Checks
from posttrain.losses.advantages import MOST, group_advantages, weighted_total
from posttrain.metrics import Metric, maximum, mean, minimum, total
from posttrain.models import parallel
from posttrain.report.episodes import episode_tree
from posttrain.rewards.format import SoftOverlongPunishment
from posttrain.rewards.runner import RewardRunner, RewardTable, correlation
from posttrain.rollouts.batch import RolloutBatch, prompt_suffixes
from posttrain.rollouts.episodes.environments import EnvironmentPool

THUMBNAILED = 4  # Prompts of a generation whose images are kept for the report; about 2 kB an image.

# Codes that are looked for in the rewards of every rollout batch.
BATCH_CODES = ("PT-R019", "PT-R020", "PT-R027")
# All codes that `RewardWatch` looks for; the log checks leave them out.
WATCHED_CODES = (*BATCH_CODES, "PT-R022", "PT-R028")


def completion_lengths(batch: RolloutBatch) -> list[int]:
    """Tokens that the model wrote, of each completion."""
    return [sum(map(sum, batch.trained(i, False))) for i in range(len(batch.rollouts))]


def rollout_metrics(batch: RolloutBatch, seconds: float, *, masks_truncated: bool) -> dict[str, Metric]:
    """Lengths of what the model wrote, how many completions were cut or repeat another, tokens a second.

    Args:
        batch: Completions of this rank, groups consecutive.
        seconds: That generation took.
        masks_truncated: Whether truncated completions carry no loss.
    """
    lengths = torch.tensor(completion_lengths(batch), dtype=torch.float32)  # (n,)
    ended = torch.tensor([r.finish_reason == "stop" for r in batch.rollouts])  # (n,)
    metrics: dict[str, Metric] = {
        "completions/mean_length": mean(lengths),
        "completions/min_length": minimum(lengths),
        "completions/max_length": maximum(lengths),
        "completions/clipped_ratio": mean((~ended).float()),
        "completions/mean_terminated_length": mean(lengths, ended),
        "completions/min_terminated_length": minimum(lengths[ended]),
        "completions/max_terminated_length": maximum(lengths[ended]),
        "completions/duplicate_ratio": duplicates(batch),
        "rollouts/tokens_per_second": mean(float(lengths.sum()) / max(seconds, 1e-9)),
        "rollouts/seconds": mean(seconds),
    }
    if any(rollout.tool_mask for rollout in batch.rollouts):
        tokens = sum(len(rollout.token_ids) for rollout in batch.sequences())
        metrics["tools/token_share"] = mean(1 - float(lengths.sum()) / tokens, weight=tokens)
    if masks_truncated:
        metrics["completions/masked_ratio"] = mean((~ended).float())
    return metrics


def duplicates(batch: RolloutBatch) -> Metric:
    """Share of the completions after the first of their group that repeat another one: 1 where all are equal."""
    repeated, others = 0, 0
    for group in batch.groups():
        different = {tuple(batch.rollouts[i].token_ids) for i in group}
        repeated += len(group) - len(different)
        others += len(group) - 1
    return mean(repeated / max(others, 1), weight=others)


def reward_metrics(table: RewardTable, totals: Tensor, advantages: Tensor, lengths: Sequence[int]) -> dict[str, Metric]:
    """Rewards of all ranks' completions.

    Every rank holds the whole matrix: each emits the same numbers, and the mean over ranks leaves them unchanged.

    Args:
        table: ``values (n, K)``.
        totals: ``(n,)`` weighted rewards before any penalty, NaN where no function applied.
        advantages: ``(n,)``.
        lengths: Tokens of each completion; of another number than n they are not compared with the rewards.
    """
    metrics = {"reward": mean(totals, ~totals.isnan()), "advantages/abs_max": maximum(advantages.abs())}
    for k, name in enumerate(table.names):
        column = table.values[:, k]
        scored = column[~column.isnan()]
        metrics[f"rewards/{name}/mean"] = mean(scored)
        metrics[f"rewards/{name}/min"] = minimum(scored)
        metrics[f"rewards/{name}/max"] = maximum(scored)
        if scored.numel() > 1:
            metrics[f"rewards/{name}/std"] = mean(float(scored.std()), weight=scored.numel())
        metrics[f"rewards/{name}/applicable"] = mean(scored.numel() / max(column.numel(), 1))
    tokens = torch.tensor(lengths, dtype=torch.float64)
    related = correlation(tokens, totals) if len(lengths) == len(totals) else None
    if related is not None:
        metrics["rewards/length_corr"] = mean(related)
    return metrics


def completion_rows(
    batch: RolloutBatch, table: RewardTable, tokenizer: Any, step: int, *, images: bool = True
) -> list[dict[str, Any]]:
    """One row a completion of this rank: prompt, completion, each reward, extra columns, advantage.

    Args:
        batch: Completions of this rank.
        table: Rewards of all ranks; this rank's begin at ``start``.
        tokenizer: Decodes prompts, and the tokens of one group.
        step: Optimiser steps that were made.
        images: Whether the first groups have thumbnails of their images, for the report.
    """
    rows = []
    for i, rollout in enumerate(batch.rollouts):
        rewards = dict(zip(table.names, table.values[table.start + i].tolist(), strict=True))
        row = {
            "step": step,
            "prompt": shown_prompt(tokenizer, rollout.prompt_ids, rollout.pictures),
            "completion": rollout.text,
            **rewards,
            **{name: column[i] for name, column in table.extra_columns.items()},
        }
        if any(one.pictures or one.shown for one in batch.rollouts):
            held = [one.picture for one in (*rollout.pictures, *rollout.shown)]
            row["image_digests"] = [picture.digest for picture in held]
            row["image_sizes"] = [list(picture.size) for picture in held]
        rows.append(row | {name: column[i] for name, column in batch.shown().items()})
    # Single tokens of one group a rollout batch, so that the table stays small.
    first = batch.groups()[0] if table.start == 0 and len(rows) > 0 else []
    for i in first:
        rollout = batch.rollouts[i]
        rows[i]["tokens"] = [tokenizer.decode([token]) for token in rollout.token_ids]
        rows[i]["logps"] = list(rollout.logp)
        if "session" in batch.extra:
            rows[i]["episode"] = json.dumps(episode_tree(batch.extra["session"][i]))
    for group in batch.groups()[:THUMBNAILED] if images and table.start == 0 else []:
        shown = [one.picture.thumbnail() for one in batch.rollouts[group[0]].pictures]
        for i in group if shown else ():
            rows[i]["thumbnails"] = shown
    return rows


def reward_model_options(args: Any) -> dict[str, Any]:
    """How reward models are loaded and run: as the policy is; nothing is known of it without ``args``."""
    names = {"batch_size": "per_device_train_batch_size"} | {
        name: name for name in ("trust_remote_code", "model_init_kwargs", "chat_template_kwargs")
    }
    return {} if args is None else {name: getattr(args, option) for name, option in names.items()}


def reward_options(functions: Any, args: Any, processing_classes: Any) -> dict[str, Any]:
    """Keywords of `RewardRunner`, as a config says; picklable where the functions are.

    Args:
        functions: As they were given.
        args: Of the trainer; None where none were given.
        processing_classes: Tokenizers of reward models.
    """
    return {
        "reward_funcs": functions,
        "reward_weights": getattr(args, "reward_weights", None),
        "processing_classes": processing_classes,
        "transforms": getattr(args, "reward_transform", None),
        "timeout": getattr(args, "reward_timeout", None),
        "model_options": reward_model_options(args),
        "score_twice": getattr(args, "check_reward_determinism", False),
    }


def reward_runner(
    runner_class: type[RewardRunner], options: dict[str, Any], pool: EnvironmentPool | None
) -> RewardRunner:
    """The reward functions of a run.

    Args:
        runner_class: `RewardRunner` or a subclass.
        options: See `reward_options`.
        pool: Environments; those with ``get_reward`` are reward functions too, on the tools' threads and within their time.
    """
    return runner_class(**options, of_environments=() if pool is None else pool.rewards())


def score_rollouts(rewards: RewardRunner, batch: RolloutBatch, tokenizer: Any, state: Any) -> RewardTable:
    """Rewards of this process's completions, neither transformed nor judged; without any, no function is called.

    Args:
        rewards: The reward functions.
        batch: Completions.
        tokenizer: Decodes the ends of prompts, for format rewards.
        state: Of the trainer, for reward functions.
    """
    if not batch.examples:
        return RewardTable(torch.empty(0, len(rewards.names)), list(rewards.names), rewards.weights)
    table = rewards(
        prompts=[example["prompt"] for example in batch.examples],
        completions=batch.completions,
        completion_ids=[rollout.token_ids for rollout in batch.rollouts],
        columns=batch.reward_columns(),
        trainer_state=state,
        prompt_suffixes=prompt_suffixes(tokenizer, batch.rollouts),
        environments=batch.environments,
    )
    # An episode that failed is not judged by what it said: left out it has no reward, else the one that was set.
    for i, error in enumerate(batch.extra.get("harness_error", ())):
        if error is not None:
            table.values[i] = math.nan if batch.failure_reward is None else batch.failure_reward
    return table


# Attributes of trainers that compare the completions of a prompt, by TRL's names: those that may be set while training...
SETTABLE = ("beta", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
            "mask_truncated_completions", "chat_template_kwargs", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min", "num_completions_to_print")  # fmt: skip
SETTABLE_PATHS = {
    "epsilon_low": "args.epsilon",
    "epsilon_high": "args.epsilon_high or args.epsilon",
    "reward_weights": "rewards.weights",
    "chat_template": "processing_class.chat_template",
}
# ... and those that are read when the trainer is made.
FIXED = ("num_generations", "num_iterations", "use_vllm", "vllm_mode", "shuffle_dataset", "log_completions",
         "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_importance_sampling_correction",
         "vllm_importance_sampling_mode", "pad_to_multiple_of", "generation_config", "generation_kwargs")  # fmt: skip
FIXED_PATHS = {
    "num_generations_eval": "args.num_generations_eval or args.num_generations",
    "reward_funcs": "rewards.functions",
    "reward_func_names": "rewards.names",
    "reward_processing_classes": "rewards.processing_classes",
    "ref_model": "reference.copy",
}


def last_logged(trainer: Any) -> dict[str, Any]:
    """The completions of this process's last generation by column, as TRL's trainers keep them in ``_logs``."""
    rows, names = getattr(trainer, "_rows", []), trainer.rewards.names
    own = {"step", "prompt", "completion", "advantage", *names}
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    return {
        "prompt": columns.get("prompt", []),
        "completion": columns.get("completion", []),
        "rewards": {name: columns.get(name, []) for name in names},
        "advantages": columns.get("advantage", []),
        "extra": {key: values for key, values in columns.items() if key not in own},
    }


class Scorer:
    """Runs the reward functions on each rank's completions and gives every rank the rewards of all.

    Args:
        rewards: The reward functions of the run.
        tokenizer: Decodes the ends of prompts, for format rewards.
        accelerator: Of the run.
    """

    def __init__(self, rewards: RewardRunner, tokenizer: Any, accelerator: Any) -> None:
        self.rewards, self.tokenizer, self.accelerator = rewards, tokenizer, accelerator

    def score(self, batch: RolloutBatch, state: Any, *, group_size: int, training: bool) -> RewardTable:
        """Rewards of all ranks' completions; a collective.

        Args:
            batch: Completions of this rank, maybe none.
            state: Of the trainer, for reward functions.
            group_size: G.
            training: Whether the rewards are trained on.
        """
        table = parallel.run_and_share(
            lambda: score_rollouts(self.rewards, batch, self.tokenizer, state), self.accelerator
        )
        counts = parallel.all_gather_objects([len(batch.rollouts)], self.accelerator)
        rows = parallel.all_gather_objects(table.values.tolist(), self.accelerator)
        values = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)  # (n, K)
        start = sum(counts[: self.accelerator.process_index])
        groups = [row // group_size for row in range(len(rows))]
        whole = dataclasses.replace(table, values=values, start=start)
        shown = {"prompts": [example["prompt"] for example in batch.examples], "columns": batch.reward_columns()}
        return self.rewards.finish(whole, groups=groups, training=training, **shown)


class RewardWatch:
    """Logs the rewards of a run, and notices those that cannot teach anything or teach the wrong thing.

    Args:
        rewards: The reward functions of the run.
        accelerator: Of the run.
        checks: Reports findings; raises where one is refused.
        log: Takes metrics and a mode.
        scaled: Whether rewards are divided by their standard deviation.
        stop_after: Rollout batches without a signal, in a row, that end the run; None: it goes on.
    """

    def __init__(
        self,
        rewards: RewardRunner,
        accelerator: Any,
        *,
        checks: Checks,
        log: Callable[[dict[str, Metric], str], None],
        scaled: bool,
        stop_after: int | None = None,
    ) -> None:
        self.rewards, self.accelerator, self.checks = rewards, accelerator, checks
        self.stop_after = stop_after
        self.log_metrics, self.scaled = log, scaled
        # Statistics of each reward function since the run began.
        self.running: dict[str, RunningReward] = {}
        self._flat_batches = 0
        self._flat_rewards: list[list[float]] = []

    def start(self, device: Any, longest: int | None) -> None:
        """Place and try reward models; check length punishments against the longest completion.

        Args:
            device: For reward models.
            longest: Most tokens of a completion; None where there is no bound.
        """
        self.rewards.start(device)
        for function in self.rewards.functions if longest is not None else ():
            if isinstance(function, SoftOverlongPunishment):
                with self.checks.preflight.record_check("config", ("PT-R021",)):
                    self.checks.report([reward_checks.check_overlong(function.limit, function.cache, longest)])

    def bounded(self, advantages: Tensor, mode: str) -> Tensor:
        """Standardised advantages stop at 10, so that no completion is worth a step of its own.

        Args:
            advantages: ``(n,)`` of all ranks, divided by a standard deviation.
            mode: ``train`` or ``eval``.
        """
        sizes = advantages.abs()
        far = sizes > MOST
        self.log_metrics({"advantages/clipped_share": mean(far.float())}, mode)
        if mode == "train":
            self.clipped(int(far.sum()), far.numel(), float(sizes.max()) if far.any() else None)
        return advantages.clamp(-MOST, MOST)

    def log(
        self,
        batch: RolloutBatch,
        table: RewardTable,
        totals: Tensor,
        advantages: Tensor,
        mode: str,
        zero_std_share: float | Tensor | None = None,
    ) -> None:
        """Log the rewards of all ranks' completions; in training, look at them too.

        Args:
            batch: This rank's completions, with the loss masks that rewards saw.
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards before any penalty, NaN where no function applied.
            advantages: ``(n,)``.
            mode: ``train`` or ``eval``.
            zero_std_share: Share of groups without a spread of rewards; None where there are no groups.
        """
        lengths = parallel.all_gather_objects(completion_lengths(batch), self.accelerator)
        metrics = reward_metrics(table, totals, advantages, lengths)
        if zero_std_share is not None:
            scored = totals[~totals.isnan()]
            metrics["reward_std"] = mean(float(scored.std()) if scored.numel() > 1 else 0.0)
            metrics["frac_reward_zero_std"] = mean(zero_std_share)
        self.log_metrics(metrics, mode)
        if mode == "train":
            self.batch(table, totals, advantages)

    def clipped(self, far: int, total: int, largest: float | None = None) -> None:
        """Report that ``far`` of ``total`` advantages were clipped; ``largest`` is their greatest size, where it is known."""
        with self.checks.preflight.record_check("log_step", ("PT-R028",)):
            self.checks.report([reward_checks.check_clipped(far, total, MOST, largest)])

    def batch(self, table: RewardTable, totals: Tensor, advantages: Tensor) -> None:
        """Look at the rewards of one rollout batch, of all ranks.

        Args:
            table: ``values (n, K)``.
            totals: ``(n,)`` weighted rewards, NaN where no function applied.
            advantages: ``(n,)``.

        Raises:
            RewardError: As many rollout batches in a row as ``stop_without_signal`` says had no signal.
        """
        columns = {name: table.values[:, k].tolist() for k, name in enumerate(table.names)}
        for name, column in columns.items():
            self.running.setdefault(name, RunningReward()).add(column)
        weights = dict(zip(table.names, table.weights.tolist(), strict=True))
        self.checks.preflight.notes["rewards"] = {name: running.to_dict() for name, running in self.running.items()}
        with self.checks.preflight.record_check("log_step", BATCH_CODES):
            self.checks.report([check_reward_ranges(self.running, weights)])
            self.checks.report(reward_checks.check_reward_values(columns, scaled=self.scaled))
        self._check_signal(totals, advantages)

    def _check_signal(self, totals: Tensor, advantages: Tensor) -> None:
        self._flat_batches = 0 if bool(advantages.any()) else self._flat_batches + 1
        self._flat_rewards = [*self._flat_rewards, totals.tolist()][-FLAT_GENERATIONS:] if self._flat_batches else []
        rewards = [reward for batch in self._flat_rewards for reward in batch]
        ends = self.stop_after is not None and self._flat_batches >= self.stop_after
        with self.checks.preflight.record_check("log_step", ("PT-R022",)):
            found = reward_checks.check_no_signal(
                self._flat_batches, rewards, **({"limit": self.stop_after} if ends else {})
            )
            if found is not None and ends:
                self.checks.preflight.add(dataclasses.replace(found, severity="error"))
                raise RewardError(f"{describe(found)} stop_without_signal={self.stop_after} ends the run here.")
            self.checks.report([found])


# Dynamic sampling: groups whose rewards are all equal teach nothing, so fresh prompts take their places, up to a bound -----

# A group with a standard deviation up to this has no signal.
FLAT = 1e-8


def flat_groups(
    values: Tensor, weights: Tensor, size: int, *, least: float = 0.0, each_function: bool = False
) -> Tensor:
    """Which groups give no completion an advantage, ``(n / G,)`` bool: too little variance, or fewer than two scored.

    Args:
        values: ``(n, K)`` rewards, groups consecutive, NaN where a function did not apply.
        weights: ``(K,)``.
        size: G.
        least: Standard deviation that counts as signal.
        each_function: Where functions are normalised before they are added, one that varies is enough.
    """
    columns = values if each_function else weighted_total(values, weights)[:, None]
    one = torch.ones(1)
    stds = [group_advantages(columns[:, [k]], one, size).group_std for k in range(columns.shape[1])]
    return ~(torch.stack(stds) > max(FLAT, least)).any(0)


def groups_without_signal(args: Any, table: RewardTable, size: int) -> Tensor:
    """`flat_groups` of all ranks' rewards as the config of a trainer counts signal, ``(n / G,)`` bool."""
    least = getattr(args, "min_group_std", 0.0)
    each = getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum"
    return flat_groups(table.values, table.weights, size, least=least, each_function=each)


class DynamicSampler:
    """Replaces groups without variance by groups of fresh prompts, for a bounded number of rounds.

    Args:
        rounds: Most rounds for one rollout batch.
        group_size: G.
        prompts: Fresh prompts, in an order apart from that of training.
        accelerator: Of the run.
        rewards: For `RewardRunner.transformed`.
        generate: Dataset rows, each repeated G times, to a `RolloutBatch`; a collective.
        score: A `RolloutBatch` to rewards of all ranks; a collective.
        flat: Rewards of all ranks to which groups teach nothing, ``(n / G,)`` bool.

    Reference: DAPO, arXiv:2503.14476, section 3.2.
    """

    def __init__(
        self,
        rounds: int,
        group_size: int,
        *,
        prompts: PromptStream,
        accelerator: Any,
        rewards: RewardRunner,
        generate: Callable[[list[dict[str, Any]]], RolloutBatch],
        score: Callable[[RolloutBatch], RewardTable],
        flat: Callable[[RewardTable], Tensor],
    ) -> None:
        self.rounds, self.group_size, self.prompts = rounds, group_size, prompts
        self.accelerator, self.rewards = accelerator, rewards
        self.generate, self.score, self.flat = generate, score, flat

    def replace(self, batch: RolloutBatch, table: RewardTable) -> dict[str, Metric]:
        """Sample fresh prompts, as many a round as there are groups to replace, and put those that vary in their places.

        Every rank makes the same plan from the gathered rewards, generates equally many whole groups, and calls every
        collective equally often.

        Args:
            batch: Of this rank; changed in place.
            table: Rewards of all ranks; changed in place.

        Returns:
            What is logged of it.
        """
        places = self.flat(table).nonzero().flatten().tolist()
        found, drawn, tokens, rounds, accepted = len(places), 0, 0, 0, 0
        size = self.group_size
        while places and rounds < self.rounds:
            rounds += 1
            fresh, judged = self._sample_groups(len(places))
            usable = (~self.flat(judged)).nonzero().flatten().tolist()
            drawn += len(judged.values) // size
            tokens += sum(len(rollout.token_ids) for rollout in fresh.rollouts)
            accepted += len(usable)
            self._put(batch, table, fresh, judged, list(zip(places, usable, strict=False)))
            places = places[len(usable) :]
        if accepted and table.raw is not None:  # Anew for all: what a transform divides by may be other rewards.
            table.values[:] = self.rewards.transformed(table.raw, torch.arange(len(table.raw)) // size)
        groups = len(table.values) // size
        metrics = {
            "dynamic_sampling/groups_without_variance": mean(found / groups),
            "dynamic_sampling/groups_left": mean(len(places) / groups),
            "dynamic_sampling/rounds": mean(float(rounds)),
            "dynamic_sampling/prompts_drawn": mean(float(drawn)),
            "dynamic_sampling/tokens": total(float(tokens)),
        }
        if drawn:
            metrics["dynamic_sampling/accepted"] = mean(accepted / drawn, weight=drawn)
        return metrics

    def _sample_groups(self, count: int) -> tuple[RolloutBatch, RewardTable]:
        """At least ``count`` fresh groups over all ranks, whole ones and equally many on each."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        each = -(-count // world)
        rows = self.prompts.take(each * world)[rank * each : (rank + 1) * each]
        fresh = self.generate([row for row in rows for _ in range(self.group_size)])
        return fresh, self.score(fresh)

    def _put(
        self,
        batch: RolloutBatch,
        table: RewardTable,
        fresh: RolloutBatch,
        judged: RewardTable,
        pairs: list[tuple[int, int]],
    ) -> None:
        """Write group ``b`` of the fresh ones over group ``a``, for every pair ``(a, b)``, on whichever ranks they are."""
        if self.accelerator.num_processes > 1 and batch.environments is not None:
            raise ConfigError("dynamic_sampling cannot hand environments to another process. Set dynamic_sampling=0.")
        size = self.group_size
        moves = {b * size + k: a * size + k for a, b in pairs for k in range(size)}
        mine = range(judged.start, judged.start + len(fresh.rollouts))
        parcels = [(row, _take(fresh, judged, row - judged.start)) for row in moves if row in mine]
        for row, parcel in parallel.all_gather_objects(parcels, self.accelerator):
            place = moves[row]
            table.values[place] = judged.values[row]
            if table.raw is not None and judged.raw is not None:
                table.raw[place] = judged.raw[row]
            if table.start <= place < table.start + len(batch.rollouts):
                _give(batch, table, place - table.start, parcel)


def _lists(generation: RolloutBatch, table: RewardTable) -> dict[tuple[str, str], list[Any]]:
    """Every list with one entry a completion of this rank, by where it belongs."""
    found: dict[tuple[str, str], list[Any]] = {
        ("", field.name): value
        for field in dataclasses.fields(generation)
        if isinstance(value := getattr(generation, field.name), list)
    }
    found |= {("extra", name): values for name, values in generation.extra.items()}
    return found | {("table", name): values for name, values in table.extra_columns.items()}


def _take(generation: RolloutBatch, table: RewardTable, index: int) -> dict[tuple[str, str], Any]:
    return {key: values[index] for key, values in _lists(generation, table).items()}


def _give(generation: RolloutBatch, table: RewardTable, index: int, parcel: dict[tuple[str, str], Any]) -> None:
    """A column that one side lacks is None on the other's rows."""
    lists = _lists(generation, table)
    for (where, name), value in parcel.items():
        if (where, name) not in lists:
            home = generation.extra if where == "extra" else table.extra_columns
            lists[where, name] = home.setdefault(name, [None] * len(generation.rollouts))
        lists[where, name][index] = value
    for key in lists.keys() - parcel.keys():
        lists[key][index] = None
