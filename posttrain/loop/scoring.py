"""Rewards of a rollout batch over all ranks, metrics of rewards, and rows of the completions table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain import plugins
from posttrain.data.formats import is_conversational, shown_prompt
from posttrain.loop.prompts import named_sets
from posttrain.losses.advantages import MOST_ADVANTAGE
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models import parallel
from posttrain.rewards.runner import RewardRunner, RewardTable, correlation
from posttrain.rollouts.batch import RolloutBatch, prompt_suffixes
from posttrain.rollouts.episodes.environments import EnvironmentPool

if TYPE_CHECKING:
    from transformers import TrainerState

    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.report.record import RunRecordCallback
    from posttrain.types import Advantages, Tokenizer

# Number of prompts per generation whose images are stored for the report. A stored image takes about 2 kB.
THUMBNAILED = 4


def completion_lengths(batch: RolloutBatch) -> list[int]:
    """Return the number of generated tokens of each completion."""
    return [sum(map(sum, batch.trained(i, False))) for i in range(len(batch.rollouts))]


def completion_metrics(
    batch: RolloutBatch, masks_truncated: bool, without_token: Collection[int] = ()
) -> dict[str, Metric]:
    """Compute metrics of completion lengths, and the fractions of truncated and duplicate completions.

    Args:
        batch: Completions of this rank. The completions of a group are consecutive.
        masks_truncated: Whether truncated completions are excluded from the loss.
        without_token: Ids that the model can sample, but for which the tokenizer has no token.
    """
    lengths = torch.tensor(completion_lengths(batch), dtype=torch.float32)  # (n,)
    ended = torch.tensor([all(seq.finish_reason == "stop" for seq in (r, *r.branches)) for r in batch.rollouts])  # (n,)
    metrics: dict[str, Metric] = {
        "completions/mean_length": mean(lengths),
        "completions/min_length": minimum(lengths),
        "completions/max_length": maximum(lengths),
        "completions/clipped_ratio": mean((~ended).float()),
        "completions/mean_terminated_length": mean(lengths, ended),
        "completions/min_terminated_length": minimum(lengths[ended]),
        "completions/max_terminated_length": maximum(lengths[ended]),
        "completions/duplicate_ratio": duplicates(batch),
    }
    if any(rollout.tool_mask for rollout in batch.rollouts):
        tokens = sum(len(rollout.token_ids) for rollout in batch.sequences())
        metrics["tools/token_share"] = mean(1 - float(lengths.sum()) / tokens, weight=tokens)
    if without_token:
        metrics["completions/no_token_ratio"] = share_without_token(batch, without_token)
    if masks_truncated:
        masked = [not any(map(any, batch.trained(i, True))) for i in range(len(batch.rollouts))]
        metrics["completions/masked_ratio"] = mean(torch.tensor(masked).float())
    return metrics


def share_without_token(batch: RolloutBatch, without_token: Collection[int]) -> Metric:
    """Return the fraction of sampled ids that are in the set ``without_token``."""
    ids = [token for rollout in batch.sequences() for token in rollout.token_ids]
    return mean(sum(token in without_token for token in ids) / max(len(ids), 1), weight=len(ids))


def duplicates(batch: RolloutBatch) -> Metric:
    """Return the fraction of completions that equal an earlier completion of their group. The first completion of each group
    is not counted. The fraction is therefore 1 if all completions are equal.
    """
    repeated, others = 0, 0
    for group in batch.groups():
        different = {tuple(batch.rollouts[i].token_ids) for i in group}
        repeated += len(group) - len(different)
        others += len(group) - 1
    return mean(repeated / max(others, 1), weight=others)


def reward_metrics(table: RewardTable, made: Advantages, lengths: Sequence[int]) -> dict[str, Metric]:
    """Compute metrics of the rewards of all ranks, and of the advantages that the method computed.

    Every rank has the rewards of all ranks and computes the same values. Averaging these values over ranks does not change
    them.

    Args:
        table: Rewards of all ranks. Its field ``values`` is a tensor ``(n, K)`` for n completions and K reward functions.
        made: Advantages, and the weighted rewards before any penalty.
        lengths: Number of tokens of each completion. The correlation between lengths and rewards is computed only if there
            is one length per reward.
    """
    totals, metrics = made.totals, {}
    if made.unbounded is not None:
        metrics["advantages/clipped_share"] = mean((made.unbounded.abs() > MOST_ADVANTAGE).float())
    metrics |= {"reward": mean(totals, ~totals.isnan()), "advantages/abs_max": maximum(made.values.abs())}
    for k, name in enumerate(table.names):
        column = table.values[:, k]
        scored = column[~column.isnan()]
        metrics[f"rewards/{name}/mean"] = mean(scored)
        metrics[f"rewards/{name}/min"] = minimum(scored)
        metrics[f"rewards/{name}/max"] = maximum(scored)
        if scored.numel() > 1:
            metrics[f"rewards/{name}/std"] = mean(float(scored.std()), weight=scored.numel())
        metrics[f"rewards/{name}/applicable"] = mean((~column.isnan()).float())
    tokens = torch.tensor(lengths, dtype=torch.float64)
    related = correlation(tokens, totals) if len(lengths) == len(totals) else None
    if related is not None:
        metrics["rewards/length_corr"] = mean(related)
    if made.zero_std_share is not None:
        metrics["reward_std"] = reward_spread(totals)
        metrics["frac_reward_zero_std"] = mean(made.zero_std_share, weight=len(totals))
    return metrics


def reward_spread(totals: Tensor) -> Metric:
    """Compute the standard deviation of the rewards ``(n,)``, ignoring missing rewards. The result is 0 for fewer than two
    rewards.
    """
    scored = totals[~totals.isnan()]
    return mean(float(scored.std()) if scored.numel() > 1 else 0.0, weight=scored.numel())


def completion_rows(
    batch: RolloutBatch, table: RewardTable, tokenizer: Tokenizer, step: int, *, images: bool = True
) -> list[dict[str, Any]]:
    """Return one row per completion of this rank. A row contains the prompt, the completion, each reward, additional
    columns, and the advantage.

    Args:
        batch: Completions of this rank.
        table: Rewards of all ranks. The rewards of this rank begin at ``start``.
        tokenizer: Tokenizer that decodes all prompts, and the completion tokens of one group.
        step: Number of finished optimizer steps.
        images: Whether thumbnails of images are added to the rows of the first groups. The report shows them.
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
        if any(each.pictures or each.shown for each in batch.rollouts):
            pictures = [image.picture for image in (*rollout.pictures, *rollout.shown)]
            row["image_digests"] = [picture.digest for picture in pictures]
            row["image_sizes"] = [list(picture.size) for picture in pictures]
        rows.append(row | {name: column[i] for name, column in batch.shown().items()})
    # Store tokens and log-probs of only one group per rollout batch, so that the table stays small.
    first = batch.groups()[0] if table.start == 0 and len(rows) > 0 else []
    for i in first:
        rollout = batch.rollouts[i]
        rows[i]["tokens"] = [tokenizer.decode([token]) for token in rollout.token_ids]
        rows[i]["logps"] = list(rollout.logp)
        if "session" in batch.extra:
            rows[i]["episode"] = json.dumps(
                plugins.module("extensions.agents.tree").episode_tree(batch.extra["session"][i])
            )
    for group in batch.groups()[:THUMBNAILED] if images and table.start == 0 else []:
        shown = [image.picture.thumbnail() for image in batch.rollouts[group[0]].pictures]
        for i in group if shown else ():
            rows[i]["thumbnails"] = shown
    return rows


def reward_model_options(args: PostTrainingConfig) -> dict[str, Any]:
    """Return the options for loading and running reward models. Their values are those of the policy's options."""
    return {
        "batch_size": args.per_device_train_batch_size,
        "trust_remote_code": args.trust_remote_code,
        "model_init_kwargs": args.model_init_kwargs,
        "chat_template_kwargs": args.chat_template_kwargs,
    }


def reward_options(
    functions: Any, args: PostTrainingConfig | type[PostTrainingConfig], processing_classes: Any, tokenizer: object
) -> dict[str, Any]:
    """Return the arguments for creating a `RewardRunner` from a config. The arguments are picklable if the reward functions
    are picklable.

    Args:
        functions: Reward functions that were passed to the trainer.
        args: The trainer's config, or its class. With a class, the default values are used.
        processing_classes: Tokenizers of reward models.
        tokenizer: Tokenizer of the policy, or None if it is loaded later.
    """
    return {
        "reward_funcs": functions,
        "reward_weights": args.reward_weights,
        "processing_classes": processing_classes,
        "transforms": args.reward_transform,
        "timeout": args.reward_timeout,
        "model_options": reward_model_options(args) | {"policy_tokenizer": tokenizer},
        "score_twice": args.check_reward_determinism,
    }


def try_rewards(rewards: RewardRunner, args: Any, rows: list[dict[str, Any]], evaluation: Any) -> None:
    """Call every reward function once before the model is loaded, with one dataset row and made-up completions.

    Args:
        rewards: Reward functions.
        args: Config of the run.
        rows: First rows of the training set.
        evaluation: One evaluation set, or a dict of several sets by name. These sets must have the columns that the reward
            functions need too.
    """
    rewards.dry_run(
        rows,
        conversational=is_conversational(rows[0]),
        evaluation=named_sets({"eval_dataset": evaluation}),
        group=args.num_generations,
        max_steps=args.max_steps,
    )


def reward_runner(
    runner_class: type[RewardRunner], options: dict[str, Any], pool: EnvironmentPool | None
) -> RewardRunner:
    """Create the `RewardRunner` of a run.

    Args:
        runner_class: `RewardRunner`, or a subclass of it.
        options: Result of `reward_options`.
        pool: Pool of environments. Environments with ``get_reward`` also provide rewards. ``get_reward`` is called with the
            threads and the timeout of tools.
    """
    return runner_class(**options, of_environments=() if pool is None else pool.rewards())


def score_rollouts(
    rewards: RewardRunner, batch: RolloutBatch, tokenizer: Tokenizer, state: TrainerState
) -> RewardTable:
    """Compute the rewards of this process's completions, without transforming or checking them. Without completions, no
    reward function is called.

    Args:
        rewards: The reward functions.
        batch: Completions.
        tokenizer: Tokenizer that decodes the last tokens of prompts, which format rewards need.
        state: State of the trainer, passed to reward functions.
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
    # A failed episode is not scored. Its reward is missing, or is the config's failure reward.
    failed = torch.tensor([error is not None for error in batch.extra.get("harness_error", ())])  # (n,)
    if not failed.any():
        return table
    reward = math.nan if batch.failure_reward is None else batch.failure_reward
    return dataclasses.replace(table, values=table.values.masked_fill(failed[:, None], reward))


def by_column(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Convert rows of completions to a dict of columns, in the format of TRL's ``_logs``. ``names`` are the names of the
    rewards.
    """
    own = {"step", "prompt", "completion", "advantage", *names}
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    return {
        "prompt": columns.get("prompt", []),
        "completion": columns.get("completion", []),
        "rewards": {name: columns.get(name, []) for name in names},
        "advantages": columns.get("advantage", []),
        "extra": {key: values for key, values in columns.items() if key not in own},
    }


def logged_rewards(run: Run, rewards: RewardRunner, batch: RolloutBatch, mode: str) -> RewardTable:
    """Compute the rewards of all ranks with `all_rewards`, and log the metrics of the reward functions. This is a collective
    operation.

    Args:
        run: Run of a method that samples.
        rewards: The reward functions.
        batch: Completions of this rank. It may be empty.
        mode: ``train``, ``eval``, or the name of another log window.
    """
    table = all_rewards(run, rewards, batch, training=mode == "train")
    run.log(table.metrics, mode)
    return table


def all_rewards(run: Run, rewards: RewardRunner, batch: RolloutBatch, *, training: bool) -> RewardTable:
    """Compute the rewards of this rank's completions, and return the rewards of all ranks. This is a collective operation.

    Args:
        run: Run of a trainer that samples.
        rewards: The reward functions of the run.
        batch: Completions of this rank. It may be empty.
        training: Whether the rewards are used for training, and not for evaluation.
    """
    with parallel.failing_together(run.accelerator):
        table = score_rollouts(rewards, batch, run.tokenizer, run.progress.state)
    counts = parallel.all_gather_objects([len(batch.rollouts)], run.accelerator)
    rows = parallel.all_gather_objects(table.values.tolist(), run.accelerator)
    values = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)  # (n, K)
    start = sum(counts[: run.accelerator.process_index])
    groups = torch.arange(len(rows)) // batch.group_size
    return rewards.finish(dataclasses.replace(table, values=values, start=start), groups, training=training)


def add_to_record(
    record: RunRecordCallback, run: Run, rollouts: RolloutBatch, rewards: RewardTable, found: Advantages
) -> bool:
    """Add the completions of all ranks to the completions table of the run record. It is called for every rollout batch."""
    images, step = run.vision.images and run.args.log_multimodal, run.progress.state.global_step
    run.progress.shown = completion_rows(rollouts.worth(found), rewards, run.tokenizer, step, images=images)
    shares = parallel.gather_objects(run.progress.shown, run.accelerator)
    record.add_completions([row for share in shares for row in share], evaluation=rollouts.mode == "eval")
    return True
