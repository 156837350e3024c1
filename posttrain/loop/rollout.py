"""Functions that create one rollout batch: sample completions, score them, and compute their log-probs and advantages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.data.chat import ids_without_token, terminal_token_ids
from posttrain.data.forest import collate
from posttrain.errors import ConfigError, RolloutError, RolloutServerError, check_rules
from posttrain.loop.run import Run
from posttrain.loop.scoring import completion_lengths, completion_metrics, logged_rewards
from posttrain.losses.policy import engine_gap
from posttrain.metrics import Metric, MetricBuffer, mean
from posttrain.models import parallel
from posttrain.models.architecture import generation_config_of
from posttrain.models.forward import batch_logps
from posttrain.rollouts.batch import RolloutBatch, balance_rows, sampled_logps
from posttrain.rollouts.sampling import configured_sampling, generation_fields
from posttrain.types import NEVER, WHOLE, Advantages, Batch, ModelOutputs, Row, SampleSettings, Truncation

if TYPE_CHECKING:
    from posttrain.loop.prompts import PromptSource
    from posttrain.loop.weight_sync import WeightSync
    from posttrain.rewards.runner import RewardRunner, RewardTable
    from posttrain.rollouts.batch import RolloutWindow
    from posttrain.types import LogProbs, Sampling

# Difference between the indices of consecutive evaluation batches, from which their seeds are computed. The difference is
# larger than the index of any training batch, so that batches have different indices.
EVAL_STRIDE = 32_452_843


@dataclass(frozen=True)
class Online:
    """Components of a `Run` that samples completions. They are created at the start of training or of an evaluation.

    Attributes:
        sync: Pushes weights to the engine, and requests completions from it.
        window: Rows that were not yet used for training, and the number of rollout batches so far.
        prompts: Object that tokenizes prompts, repeats them and distributes them to ranks.
        rewards: The reward functions.
        ids_without_token: Ids that the model can sample, but for which the tokenizer has no token.
        samples_policy: Whether completions are sampled from the trained weights. If so, their log-probs need no correction.
            A rollout function may sample from any model, so its log-probs are corrected.
        rollout_func: Whether the user's rollout function samples the completions.
        follows_truncation: Whether the policy's log-probs are computed under the sampler's truncation, so that they are
            comparable with the sampler's log-probs; see `Progress.truncation`.
        sampling: Function that returns the current sampling settings, without a seed.
        spare: Function that returns rows for a mode. A rank that has no examples samples from these rows, because all ranks
            must take part in sampling.
        sample: Function that samples completions of dataset rows; see `Sampler.sample`.
        logps: Function that computes log-probs of completions under older or frozen weights. The keys of its result are
            column names.
        slices: Function that splits completions into the rows of each micro-batch.
        score: Function of a subclass that replaces `score`. Its arguments are those of `score` except the first argument.
        resample: Function that replaces groups that do not contribute to the loss, and returns metrics. None: no group is
            replaced.
        advantages: Function of a subclass that replaces `Method.advantages`. Its arguments are those of the method except
            the last argument.
    """

    sync: WeightSync
    window: RolloutWindow
    prompts: PromptSource
    rewards: RewardRunner
    ids_without_token: frozenset[int]
    samples_policy: bool
    rollout_func: bool
    follows_truncation: bool
    sampling: Callable[[Run], Sampling]
    spare: Callable[[str], list[dict[str, Any]]]
    sample: Callable[[list[dict[str, Any]], SampleSettings], RolloutBatch]
    logps: Callable[[Run, RolloutBatch], dict[str, list[list[float]]]]
    slices: Callable[[Run, RolloutBatch], list[list[Row]]]
    score: Callable[[RolloutBatch, str], RewardTable] | None = None
    resample: Callable[[RolloutBatch, RewardTable], tuple[RolloutBatch, RewardTable, dict[str, Metric]]] | None = None
    advantages: Callable[[RolloutBatch, RewardTable, LogProbs], Advantages] | None = None


def online_of(
    run: Run, sync: WeightSync, stop_ids: tuple[int, ...], *, rollout_func: bool = False, **parts: Any
) -> Online:
    """Return the components of a run that samples. If ``parts`` lacks a function, the function of this module is used.

    Args:
        run: Run of a method that samples.
        sync: Object that calls the engine.
        stop_ids: Tokens that end a completion.
        rollout_func: Whether the user's rollout function samples the completions.
        parts: Other fields of `Online`.
    """
    samples_policy = not rollout_func and sync.engine.capabilities.shares_weights
    return Online(
        sync=sync,
        sampling=partial(present_sampling, stop_ids=stop_ids),
        samples_policy=samples_policy,
        rollout_func=rollout_func,
        follows_truncation=run.method.traits.follows_truncation and not samples_policy,
        logps=measured_logps,
        slices=shuffled_slices,
        **parts,
    )


def special_ids(run: Run) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the ids that end a completion, and the ids for which the tokenizer has no token.

    With ``mask_ids_without_token``, the ids without a token are added to ``suppress_tokens`` in the config's
    ``generation_kwargs``. Such ids are then never sampled.

    Raises:
        ConfigError: ``generation_kwargs`` forbids all tokens.
    """
    args, vocabulary = run.args, run.model.config.get_text_config().vocab_size
    without_token = ids_without_token(run.tokenizer, vocabulary)
    options = args.generation_kwargs or {}
    fields = generation_fields(options)
    forbidden = {token for token, added in fields.get("logit_bias", ()) if added <= NEVER}
    if without_token | forbidden >= set(range(vocabulary)):
        raise ConfigError(
            f"generation_kwargs forbids all {vocabulary} tokens of the vocabulary (suppress_tokens or logit_bias), so no token "
            "can be sampled. Fix: remove the tokens that completions need from suppress_tokens and logit_bias."
        )
    if args.mask_ids_without_token:
        never = sorted(without_token.union(options.get("suppress_tokens") or ()))
        args.generation_kwargs = options | {"suppress_tokens": never}
    own_stops = fields.get("stop_token_ids")
    return tuple(own_stops or terminal_token_ids(run.tokenizer, generation_config_of(run.model))), without_token


def rollout_step(run: Run, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
    """Sample a completion for each example, compute its reward, and add the data that the loss needs. This is a
    collective operation.

    Args:
        run: Run of a trainer that samples.
        examples: Dataset rows, each repeated once per completion. The list may be empty.
        mode: ``train`` or ``eval``.
    """
    online = run.online
    rollouts, rewards = sample_and_score(run, examples, mode)
    if mode == "train" and online.resample is not None:
        rollouts, rewards, metrics = online.resample(rollouts, rewards)
        run.log(metrics)
    online.sync.rest()
    own, logps = online.advantages, online.logps(run, rollouts)
    adv = run.method.advantages(rollouts, rewards, logps, run.ranks) if own is None else own(rollouts, rewards, logps)
    run.log(adv.metrics, mode)
    run.watch("rollout", run, rollouts, rewards, adv)
    return rollouts.worth(adv)


def sample_and_score(run: Run, examples: list[dict[str, Any]], mode: str) -> tuple[RolloutBatch, RewardTable]:
    """Return the completions of this rank, and the rewards of the completions of all ranks. This is a collective operation."""
    rollouts = sample(run, examples, mode)
    return rollouts, score(run, rollouts, mode)


def score(run: Run, rollouts: RolloutBatch, mode: str) -> RewardTable:
    """Return the rewards of the completions of all ranks, and log the metrics of the reward functions. This is a
    collective operation.

    Args:
        run: Run of a method that samples.
        rollouts: Completions of this rank. May be empty.
        mode: ``train``, ``eval``, or the name of another log window.
    """
    own = run.online.score
    return logged_rewards(run, run.online.rewards, rollouts, mode) if own is None else own(rollouts, mode)


def sample(run: Run, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
    """Sample one completion per example, return them with their texts, and log metrics. This is a collective operation.

    A rank without examples also samples, but its result is discarded.
    """
    online = run.online
    settings = settings_of(run, mode)
    if not examples:
        spare = online.spare(mode)
        if spare:
            metrics, run.progress.buffers[mode] = run.progress.buffers[mode], MetricBuffer()
            sample(run, spare, mode)
            run.progress.buffers[mode] = metrics
        return RolloutBatch([], [], [], born=run.progress.state.global_step, mode=mode, group_size=settings.group_size)
    begin, run.progress.truncation = time.perf_counter(), truncation_of(online, settings.sampling)
    batch = online.sample(examples, settings)
    if not isinstance(batch, RolloutBatch) or len(batch.rollouts) != len(examples):
        returned = f"{len(batch.rollouts)} completions" if isinstance(batch, RolloutBatch) else type(batch).__name__
        raise RolloutError(
            f"sample(examples, settings) returned {returned} for {len(examples)} examples. Fix: return a RolloutBatch with one "
            "completion per example, in their order (docs/hooks.md)."
        )
    online.window.generations += mode == "train"
    if run.vision.images:
        batch = run.vision.sampled(run, batch, mode)
    batch = replace(
        batch,
        born=run.progress.state.global_step,
        mode=mode,
        group_size=settings.group_size,
    )
    seconds, written = time.perf_counter() - begin, sum(completion_lengths(batch))
    speed = {"rollouts/tokens_per_second": mean(written / max(seconds, 1e-9)), "rollouts/seconds": mean(seconds)}
    metrics = completion_metrics(batch, run.args.mask_truncated_completions, online.ids_without_token)
    run.log(metrics | speed, mode)
    if mode == "train":
        tokens = written + sum(len(r.prompt_ids) for r in batch.rollouts)
        run.progress.counters["num_tokens"] += parallel.all_reduce_sum([float(tokens)], run.accelerator)[0]
    return batch


def truncation_of(online: Online, sampling: Sampling) -> Truncation:
    """Return the truncation of the sampler if the objective needs the probability mass that remains after truncation.
    Otherwise, return no truncation.
    """
    return sampling.left_out if online.follows_truncation else WHOLE


def present_sampling(run: Run, stop_ids: tuple[int, ...]) -> Sampling:
    """Return the current sampling settings. They are read from the config each time, because users may change the config
    during training.
    """
    sampling = configured_sampling(run.args, stop_token_ids=stop_ids, seed=0)
    return run.vision.sampling(sampling, run.model) if run.vision.images else sampling


def settings_of(run: Run, mode: str) -> SampleSettings:
    """Return the settings of the next rollout batch. Its seed is computed from the run's seed, the rank and the index of the
    batch.
    """
    online, number = run.online, batch_number(run, mode)
    world, rank = run.accelerator.num_processes, run.accelerator.process_index
    seed = (run.args.seed * 1_000_003 + number * world + rank) % 2**63
    return SampleSettings(replace(online.sampling(run), seed=seed), mode, number, online.prompts.group_size(mode))


def batch_number(run: Run, mode: str) -> int:
    """Return the index of the next rollout batch. The seed of the batch is computed from this index.

    In evaluation, the index is computed from the training step and the number of earlier evaluation batches. Evaluations are
    then reproducible, and their batches have different seeds.
    """
    if mode == "train":
        return run.online.window.generations
    return 10_000_019 + run.progress.state.global_step + EVAL_STRIDE * run.progress.eval_rounds


# Log-probs ---------------------------------------------------------------------------------------------------------------------


def measured_logps(run: Run, rollouts: RolloutBatch) -> dict[str, list[list[float]]]:
    """Compute the log-probs of completions that the loss needs.

    Each column contains the log-probs of one model. ``old_logp`` are log-probs under the old weights, if rows are used after
    an update. ``rollout_logp`` or ``engine_logp`` are log-probs of the engine. ``ref_logp`` are log-probs of the reference,
    if there is a reference. ``log_mass`` is the log of the probability mass that remains after truncation.
    """
    online, can = run.online, run.online.sync.engine.capabilities
    sampled = logps_of_sampler(run, rollouts)
    complete = [len(x) == len(r.token_ids) for x, r in zip(sampled, rollouts.sequences(), strict=True)]
    # All ranks must make the same decision, because the forward passes below are collective operations.
    available = all(parallel.all_gather_objects(complete, run.accelerator))
    columns: dict[str, list[list[float]]] = {}
    if available and not online.samples_policy:
        columns["rollout_logp"] = sampled
    elif available and can.has_logprobs and run.method.temperature == run.args.temperature:
        columns["engine_logp"] = sampled
    outlived = rollouts.mode == "train" and run.args.outlives_weights
    if run.method.needs_old_logp(outlived):
        if available and old_is_sampled(run):
            columns["old_logp"] = sampled
        else:
            with run.inference() as policy:
                columns["old_logp"], mass = logps_and_mass(run, policy, rollouts.every_row())
            if run.progress.truncation:
                columns["log_mass"] = mass
    if run.reference is not None:
        with run.inference() as policy, run.reference.active(policy) as reference:
            columns["ref_logp"] = logps(run, reference, rollouts.every_row())
    else:
        valid = not (run.method.traits.beta_is_kl and run.args.beta)
        check_rules(run.args, [("beta", valid, "needs a reference model: set it before the trainer is created")])
    return columns


def old_is_sampled(run: Run) -> bool:
    """Return whether the engine's log-probs equal the trainer's up to rounding. If so, the trainer does not compute the
    log-probs of the old weights.

    In half precision, engine and trainer round differently (0.01 nats per token). Importance ratios would then not start at
    1. Log-probs that a user's ``rollout_func`` returns are never used instead of the trainer's log-probs.
    """
    exact = run.online.sync.engine.capabilities.logprobs_match_training and not (run.args.bf16 or run.args.fp16)
    return exact and run.online.samples_policy


def logps_of_sampler(run: Run, batch: RolloutBatch) -> list[list[float]]:
    """Return the log-probs that the engine returned. If the engine samples from the trained weights, the log-probs are those
    before truncation. Otherwise, they are those after truncation.

    Raises:
        RolloutError: The correction needs log-probs after truncation, but the engine returns only log-probs before
            truncation.
    """
    # A rollout function returns only log-probs of the distribution that it sampled from.
    cut = WHOLE if run.online.rollout_func else run.progress.truncation
    rollouts = list(batch.sequences())
    sampled = sampled_logps(rollouts, cut)
    if sampled is None and run.args.vllm_importance_sampling_correction:
        raise RolloutError(
            f"the engine {run.online.sync.engine.name!r} reports log-probs of the distribution before {cut}, but samples "
            "tokens from the distribution after it, so the excluded mass would distort the ratios. Fix: use an engine that "
            "fills Rollout.processed_logp (native, hf, vLLM), sample without truncation, or set "
            "vllm_importance_sampling_correction=False."
        )
    return [[] for _ in rollouts] if sampled is None else sampled


def logps(run: Run, model: nn.Module, rows: list[Row], temperature: float | None = None) -> list[list[float]]:
    """Compute log-probs per token of completions with the forward pass of training. The default temperature is the
    temperature of the loss.
    """
    return logps_and_mass(run, model, rows, temperature)[0]


def logps_and_mass(
    run: Run, model: nn.Module, rows: list[Row], temperature: float | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Compute log-probs of completions, and the log of the probability mass that remains after truncation. Without
    truncation, the second list is empty.
    """
    batches = collate(rows, pad_token_id=run.pad_token_id, layout=run.layout) if rows else []
    passes = parallel.in_step(batches, run.accelerator, run.spare_batch)
    placed = ((batch.to(run.args.device), counts) for batch, counts in passes)
    temperature = run.method.temperature if temperature is None else temperature
    settings = {"temperature": temperature, "truncation": run.progress.truncation}
    return batch_logps(model, placed, **settings, chunk_size=run.args.logits_chunk_size)


def gap_of_pass(run: Run, batch: Batch, outputs: ModelOutputs) -> dict[str, Metric]:
    """Return metrics of the difference between the trainer's and the engine's log-probs. For an in-process engine, the
    difference is only rounding error.
    """
    sampled, trained = batch.columns.get("engine_logp"), batch.old_logp
    if sampled is None:
        return {}
    if trained is None or old_is_sampled(run):
        moved = run.model.training and run.online.window.born != run.progress.state.global_step
        trained = None if moved and batch.old_logp is not None else outputs.logp
    return {} if trained is None else engine_gap(trained, sampled, batch.loss_mask)


# Micro-batches -----------------------------------------------------------------------------------------------------------------


def training_batches(run: Run, examples: list[dict[str, Any]], index: int) -> list[Batch]:
    """Return the batches of the next micro-batch, one per forward pass; see `next_rows`."""
    return collated(run, next_rows(run, examples, index))


def evaluation_batches(run: Run, examples: list[dict[str, Any]]) -> list[Batch]:
    """Sample and score completions for one evaluation batch, and collate them. This is a collective operation."""
    rollouts = rollout_step(run, examples, "eval")
    if run.vision.images:
        run.log(run.vision.exchanged_reward(run, examples), "eval")
    whole, skip = range(len(rollouts.rollouts)), run.args.mask_truncated_completions
    return collated(run, rollouts.rows(whole, skip_truncated=skip))


def collated(run: Run, rows: list[Row]) -> list[Batch]:
    """Collate rows into batches, one per forward pass. Return an empty list if ``rows`` is empty."""
    return run.collate(rows) if rows else []


def next_rows(run: Run, examples: list[dict[str, Any]], index: int) -> list[Row]:
    """Return the rows of the next micro-batch. If the current rollout batch is used up, first sample a new one.

    Args:
        run: Run of a trainer that samples.
        examples: Dataset rows for which completions are sampled.
        index: Index of the micro-batch within its optimizer step.
    """
    window = run.online.window
    if index == 0:
        window.mark()
    if window.used_up:
        try:
            rollouts = rollout_step(run, examples, "train")
        # `OnlineTrainer.train` handles this error and saves a checkpoint.
        except RolloutServerError:
            window.rewind()
            raise
        window.fill(run.online.slices(run, rollouts), run.progress.state.global_step)
    rows = window.take()
    run.log({"staleness/mean_updates": mean(float(run.progress.state.global_step - window.born))})
    return rows


def shuffled_slices(run: Run, rollouts: RolloutBatch) -> list[list[Row]]:
    """Shuffle whole groups, and split them into slices. Completions are exchanged between ranks if the exchange saves time."""
    args = run.args
    seed, skip = args.seed + run.online.window.generations, args.mask_truncated_completions
    slices = rollouts.slices(args.steps_per_generation or 1, seed=seed, skip_truncated=skip)
    if run.accelerator.num_processes == 1 or not args.balance_ranks or run.method.traits.whole_rows:
        return slices
    slices, metrics = balance_rows(slices, run.accelerator)
    for of_slice in metrics:
        run.log(of_slice)
    return slices
