"""Online DPO: two completions of the policy a prompt; the better one is preferred as DPO does."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, RewardError
from posttrain.fields import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, option
from posttrain.loop.build import takes
from posttrain.loop.online import OnlineTrainer
from posttrain.losses.advantages import weighted_total
from posttrain.losses.preference import sigmoid, squared_gap
from posttrain.losses.reduce import sequence_sum
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import OnlineConfig
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.reference import Reference, check_reference, tell_own_checkpoint
from posttrain.rewards.judges import BaseJudge, JudgeReward, PairRewards
from posttrain.rewards.model import WholeTextReward
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch, sampler_gap
from posttrain.types import Batch, LossTerms, ModelOutputs, Rollout

logger = logging.getLogger(__name__)


PAIR_LOSS_TYPES = ("sigmoid", "ipo")
UNREAD = (
    "epsilon", "epsilon_high", "mask_truncated_completions", "sync_ref_model", "use_liger_kernel",
)  # fmt: skip


@dataclass
class OnlineDPOConfig(PictureConfig, OnlineConfig):
    """Arguments of `OnlineDPOTrainer`. Batch sizes count prompts.

    A list instead of a number has one value per epoch; the last one stays.
    """

    learning_rate: float = option(5e-7, "Peak learning rate.")
    disable_dropout: bool = option(True, "Set every dropout to 0.")
    reward_model_path: str | None = option(None, "For scripts; the trainer does not read it.")
    max_new_tokens: PositiveInt = option(64, "Most tokens of a completion, EOS included.")
    max_completion_length: PositiveInt | None = option(None, "Another name of max_new_tokens.")
    max_length: PositiveInt = option(512, "Most tokens of prompt and completion; a longer prompt loses its beginning.")
    temperature: PositiveFloat = option(0.9, "Of sampling alone: log-probs of the loss are those at temperature 1.")
    missing_eos_penalty: PositiveFloat | None = option(
        None, "Taken from the reward of a completion that did not end, > 0."
    )
    beta: list[float] = field(  # type: ignore[assignment]
        default_factory=lambda: [0.1], metadata={"help": "Strength of the tie to the reference; several: by epoch."}
    )
    loss_type: Literal["sigmoid", "ipo"] = option("sigmoid", "Loss of a pair.")
    num_generations: PositiveInt = option(2, "Always 2: a pair is compared.")
    num_generations_eval: NonNegativeInt | None = option(1, "Always 1: evaluation compares nothing.")
    keep_eos_for_rewards: bool = option(
        False, "Reward functions see the end-of-sequence token of plain text that has ended."
    )
    vllm_gpu_memory_utilization: PositiveShare = option(0.55, "Share of GPU memory, colocate.")

    def __post_init__(self) -> None:
        if self.max_completion_length not in (None, self.max_new_tokens):
            raise ConfigError(
                f"max_completion_length={self.max_completion_length} and max_new_tokens={self.max_new_tokens} are two names of "
                "one limit and contradict each other. Set max_new_tokens."
            )
        self.max_completion_length = self.max_new_tokens
        if isinstance(self.beta, Sequence) and len(self.beta) == 1:
            self.beta = self.beta[0]
        super().__post_init__()
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} leaves no prompt token within max_length={self.max_length}. Lower it, or "
                "raise max_length."
            )
        if self.num_generations != 2 or (self.num_generations_eval or 1) != 1:
            raise ConfigError(
                f"num_generations={self.num_generations} and num_generations_eval={self.num_generations_eval}: two completions "
                "are compared in training and one is scored in evaluation. Leave both out."
            )
        defaults = type(self).__dataclass_fields__
        for name in UNREAD:
            if getattr(self, name) != defaults[name].default:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not read by {type(self).__name__}. Leave it out.")

    def _check_sampling(self) -> None:
        if isinstance(self.beta, Sequence) and not self.beta:
            raise ConfigError("beta=[] is empty. Fix: give one value, or one per epoch.")
        for value in self.betas:
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"beta={self.beta!r}: {value!r} is out of range. Fix: give numbers above 0.")
        given, self.beta = self.beta, self.betas[0]  # type: ignore[assignment]
        super()._check_sampling()
        self.beta = given

    @property
    def betas(self) -> list[float]:
        """``beta`` as a list, one value per epoch."""
        return list(self.beta) if isinstance(self.beta, Sequence) and not isinstance(self.beta, str) else [self.beta]

    def beta_at(self, epoch: float | None) -> float:
        """``beta`` in an epoch, whole or not; the last value stays."""
        return float(self.betas[min(int(epoch or 0), len(self.betas) - 1)])

    @property
    def train_batch_size(self) -> int:
        """Completions of a micro-batch: two a prompt."""
        return 2 * super().train_batch_size

    def _resolve_batches(self) -> None:
        """Batch sizes count prompts; a generation counts completions, as in every online method."""
        prompts, self.per_device_train_batch_size = (
            self.per_device_train_batch_size,
            2 * self.per_device_train_batch_size,
        )
        try:
            super()._resolve_batches()
        finally:
            self.per_device_train_batch_size = prompts


PAIR_LOSSES = {"sigmoid": sigmoid, "ipo": squared_gap}  # Of summed log-ratios: no division by length.
TIES_MOST = 0.5  # Share of ties in a log window above which most of what is sampled trains nothing.


def sequence_sums(out: ModelOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed log-probs of the policy ``(S,)``, and their log-ratios to the reference ``(S,)``."""
    assert out.logp is not None and batch.ref_logp is not None
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    return sequence_sum(out.logp, *forest), sequence_sum(out.logp - batch.ref_logp, *forest)


def pair_terms(
    batch: Batch, logp: Tensor, ratio: Tensor, *, beta: float, loss_type: str
) -> tuple[Tensor, dict[str, Metric]]:
    """``-lsig(beta h)`` or ``(h - 1 / (2 beta))^2`` with ``h = L+ - L-``, ``(P,)``; 0 for ties and pairs without a verdict.

    Args:
        batch: Pairs; ``advantages`` are 1 on the better completion, -1 on the other, 0 on both of a tie.
        logp: ``(S,)`` summed log-probs.
        ratio: ``(S,)`` summed log-ratios L.
        beta: Strength of the tie to the reference.
        loss_type: ``sigmoid`` or ``ipo``.

    Reference: Online AI feedback, arXiv:2402.04792; DPO, arXiv:2305.18290, equation 7; IPO, arXiv:2310.12036, equation 17.
    """
    assert batch.advantages is not None
    sign = batch.grouped(batch.advantages, 2)[:, 0]
    better = (sign < 0).long()[:, None]  # Index of the better one.
    (ratio_c, ratio_r), (logp_c, logp_r) = (
        torch.cat([x.gather(1, better), x.gather(1, 1 - better)], 1).unbind(1)
        for x in (batch.grouped(ratio, 2), batch.grouped(logp, 2))
    )
    decided = sign != 0
    terms = torch.where(decided, PAIR_LOSSES[loss_type](ratio_c, ratio_r, beta=beta), 0.0)
    metrics = {
        "rewards/chosen": mean(beta * ratio_c, decided),
        "rewards/rejected": mean(beta * ratio_r, decided),
        "rewards/margins": mean(beta * (ratio_c - ratio_r), decided),
        "rewards/accuracies": mean((ratio_c > ratio_r).float(), decided),
        "logps/chosen": mean(logp_c, decided),
        "logps/rejected": mean(logp_r, decided),
    }
    return terms, metrics


class OnlineDPOTrainer(OnlineTrainer, config=OnlineDPOConfig):
    """Samples two completions a prompt and raises the better one over the other, relative to a reference.

    The first completion is chosen where its reward is above the other's, or a judge prefers it; equal ones are ties and
    train nothing.

    Args:
        model: Hub id, folder, model or peft model.
        ref_model: The reference; None: the given weights as they are now, or the model with its new adapter off.
        reward_funcs: A reward model or its id, a callable, or several. Callables see the first completions of all prompts,
            then the second ones, columns repeated.
        args: The config; required.
        data_collator: Must be None: there is nothing to collate before completions exist.
        train_dataset: Prompts; required.
        eval_dataset: Prompts to evaluate on, or several sets by name.
        processing_class: The tokenizer; required where the model is an object.
        reward_processing_classes: Tokenizers of reward models.
        judge: Instead of ``reward_funcs``: a `BasePairwiseJudge`, `BaseRankJudge` or `BaseBinaryJudge`.

    Reference: Direct language model alignment from online AI feedback, arXiv:2402.04792.

    >>> trainer = OnlineDPOTrainer(
    ...     model, reward_funcs=reward, args=OnlineDPOConfig("runs/online_dpo"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    takes_images: bool = True
    cuts_prompts = True
    runner_class = PairRewards
    keep_groups_together: ClassVar[bool] = True
    _name: ClassVar[str] = "Online DPO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Direct Language Model Alignment from Online AI Feedback",
        "id": "2402.04792",
    }
    args: OnlineDPOConfig

    @takes(
        "model, ref_model, reward_funcs, args, data_collator, train_dataset, eval_dataset, processing_class, "
        "reward_processing_classes, peft_config, compute_metrics, callbacks, optimizers, preprocess_logits_for_metrics"
    )
    def __init__(
        self,
        model: str | nn.Module,
        ref_model: nn.Module | None = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        reward_processing_classes: Any = None,
        judge: BaseJudge | None = None,
        **kwargs: Any,
    ) -> None:
        self.judge, self._given_reference = judge, ref_model
        if args is None:
            raise ConfigError(f"args is missing: give a {self.config_class.__name__}.")
        self._check_given(model, reward_funcs, args, data_collator, processing_class)
        functions: list[Any] = [JudgeReward(judge, halves=True)] if judge is not None else []
        if judge is None:
            functions = self._reward_functions(reward_funcs, reward_processing_classes, args, processing_class)
        super().__init__(
            model,
            functions,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self._ties_told = False

    def _check_given(self, model: Any, reward_funcs: Any, args: Any, data_collator: Any, tokenizer: Any) -> None:
        if (reward_funcs is None) == (self.judge is None):
            given = "neither is" if self.judge is None else "both are"
            raise ConfigError(f"give reward_funcs or judge: {given} given.")
        if tokenizer is None and not isinstance(model, str):
            raise ConfigError("processing_class is missing: give the model's tokenizer.")
        if data_collator is not None:
            raise ConfigError("data_collator must be None: prompts have nothing to collate before they are completed.")
        if self._given_reference is not None:
            check_reference(self._given_reference, model)
        for name in ("missing_eos_penalty", "reward_weights", "reward_transform") if self.judge is not None else ():
            if getattr(args, name, None) is not None:
                raise ConfigError(
                    f"{name} changes rewards, and a judge gives verdicts and probabilities. Leave one of them out."
                )

    def _reward_functions(self, given: Any, tokenizers: Any, args: Any, tokenizer: Any) -> list[Any]:
        """Reward models as functions of whole texts; everything else as it is."""
        functions = list(given) if isinstance(given, list | tuple) else [given]
        own = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(functions)
        if len(own) != len(functions):
            raise ConfigError(
                f"reward_processing_classes has {len(own)} entries for {len(functions)} reward functions."
            )
        init = {"trust_remote_code": args.trust_remote_code, "model_init_kwargs": args.model_init_kwargs}
        made = []
        for function, theirs in zip(functions, own, strict=True):
            nameless = not getattr(getattr(function, "config", None), "_name_or_path", "")
            if isinstance(function, nn.Module) and theirs is None and nameless:
                theirs = tokenizer  # Made in memory: it can only be for the policy's own tokens.
            is_model = isinstance(function, str | nn.Module)
            made.append(WholeTextReward(function, theirs, **init) if is_model else function)
        return made

    def make_reference(self) -> Reference:
        """Always: the loss is measured against it."""
        if self._given_reference is None:
            tell_own_checkpoint(self.model)
        elif self.vision.images:
            self.vision.show(self._given_reference)
        self.read_also_by(self._given_reference)
        return Reference(self.model, fresh_adapter=self.fresh_adapter, given=self._given_reference)

    @property
    def temperature(self) -> float:
        """1: the loss compares models, not samplers; there is no importance ratio in it."""
        return 1.0

    @property
    def beta(self) -> float:
        """``args.beta`` in the present epoch."""
        return self.args.beta_at(self.state.epoch)

    # Sampling ----------------------------------------------------------------------------------------------------

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """As every online trainer; what reward functions see may keep its end-of-sequence token."""
        rollouts, completions = super().roll_out(examples, mode)
        if self.args.keep_eos_for_rewards:
            ends = [
                self.processing_class.decode(r.token_ids[-1:]) if r.finish_reason == "stop" else "" for r in rollouts
            ]
            completions = [c + end if isinstance(c, str) else c for c, end in zip(completions, ends, strict=True)]
        return rollouts, completions

    @property
    def prompt_limit(self) -> int:
        """What ``max_length`` leaves of a prompt: the loss reads the same cut prompts."""
        return self.args.max_length - self.args.max_new_tokens

    # Scores and preferences --------------------------------------------------------------------------------------

    def score(self, generation: RolloutBatch, mode: str) -> RewardTable:
        """As every online trainer, pairs in the layout that functions expect; a judge has nothing to say of one completion."""
        self.rewards.pairs = mode == "train"  # type: ignore[attr-defined]
        if mode == "train" or self.judge is None:
            return super().score(generation, mode)
        counts = parallel.all_gather_objects([len(generation.rollouts)], self.accelerator)
        start = sum(counts[: self.accelerator.process_index])
        return RewardTable(torch.empty(sum(counts), 0), [], torch.empty(0), start=start)

    def attach_logps(self, generation: RolloutBatch, mode: str) -> None:
        """The reference's log-probs of every completion."""
        rows = range(len(generation.rollouts))
        assert self.reference is not None
        with self.inference() as policy, self.reference.active(policy) as reference:
            generation.token_columns["ref_logp"] = self.logps(reference, generation.rows(rows, skip_truncated=False))
        if not self.engine.capabilities.has_logprobs:
            return
        # The loss has no use for the sampler's temperature, so one completion a rollout batch has a pass of its own.
        with self.inference() as policy:
            own = self.logps(policy, generation.rows(rows[:1], skip_truncated=False), self.args.temperature)
        self.log_metrics_now(sampler_gap(generation.rollouts[:1], own), mode)

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> Tensor:
        """``(n,)`` how much a completion is preferred to its partner, 1, -1 or 0; in evaluation 0."""
        totals = weighted_total(table.values, table.weights)
        reasons = [rollout.finish_reason for rollout in generation.rollouts]
        ended = torch.tensor([r == "stop" for r in parallel.all_gather_objects(reasons, self.accelerator)])
        scores = totals - (self.args.missing_eos_penalty or 0.0) * (~ended).float()
        pairs = scores if mode == "eval" else scores.view(-1, 2)
        known = ~scores.isnan() if mode == "eval" else ~pairs.isnan().any(1).repeat_interleave(2)
        found = torch.zeros_like(scores)
        if mode == "train":
            found = self._prefer(pairs, known[::2], self._equal(generation))
        self.log_scores(scores, known, ended, mode)
        self.reward_watch.log(generation, table, totals, found, mode)
        mine = slice(table.start, table.start + len(generation.rollouts))
        generation.columns["compared"] = known[mine].float().tolist()
        generation.columns["scores"] = scores[mine].nan_to_num(0.0).tolist()
        return found

    def _equal(self, generation: RolloutBatch) -> Tensor:
        """``(P,)`` which pairs of all ranks are one completion twice: no verdict can tell them apart."""
        rollouts = generation.rollouts
        same = [a.token_ids == b.token_ids for a, b in zip(rollouts[::2], rollouts[1::2], strict=True)]
        return torch.tensor(parallel.all_gather_objects(same, self.accelerator), dtype=torch.bool)

    def _prefer(self, pairs: Tensor, known: Tensor, equal: Tensor) -> Tensor:
        if not bool(known.any()):
            raise RewardError(
                f"none of the {len(pairs)} pairs of this generation has a reward for both completions: "
                f"{', '.join(self.rewards.names)} returned None. Nothing can be preferred. Return a number wherever a function "
                "applies."
            )
        gap = torch.where(known & ~equal, pairs[:, 0] - pairs[:, 1], 0.0)
        self.log_metrics_now({"ties": mean((gap == 0).float(), known), "groups/unscorable": mean((~known).float())})
        return torch.stack([gap.sign(), -gap.sign()], 1).flatten()

    def log_scores(self, scores: Tensor, known: Tensor, ended: Tensor, mode: str) -> None:
        """``objective/scores`` and how many completions ended; of all ranks' rows.

        Args:
            scores: ``(n,)``, penalties taken, NaN where no function applied.
            known: ``(n,)`` bool, rows that count.
            ended: ``(n,)`` bool.
            mode: ``train`` (pairs) or ``eval``.
        """
        metrics = {"objective/scores": mean(scores, known), "val/contain_eos_token": mean(ended.float())}
        if mode == "train":
            metrics["objective/scores_margin"] = mean((scores[::2] - scores[1::2]).abs(), known[::2])
        self.log_metrics_now(metrics, mode)

    # Loss --------------------------------------------------------------------------------------------------------

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Completions whose pair has a score on both sides: what the loss is a mean over."""
        return {"compared": float(sum(batch.columns["compared"].sum() for batch in batches))}

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `pair_terms`; in evaluation only what is logged of the policy."""
        logp, ratio = sequence_sums(outputs, batch)
        compared = batch.columns["compared"].bool()
        if self.model.training:
            pairs, metrics = pair_terms(batch, logp, ratio, beta=self.beta, loss_type=self.args.loss_type)
            terms = batch.spread_rows(pairs, 2)
        else:
            terms, metrics = torch.zeros_like(logp), {}
        metrics |= self.policy_metrics(batch, logp, ratio) | {"beta": mean(self.beta)}
        return LossTerms(terms, compared, "token", num_sequences=batch.num_sequences, count="compared", metrics=metrics)

    def policy_metrics(self, batch: Batch, logp: Tensor, ratio: Tensor) -> dict[str, Metric]:
        """How far the policy is from the reference, and what its completions are worth with that charged."""
        beta, scored = self.beta, batch.columns["compared"].bool()
        return {
            "objective/kl": mean(ratio),
            "objective/entropy": mean(-logp),
            "objective/non_score_reward": mean(-beta * ratio),
            "objective/rlhf_reward": mean(batch.columns["scores"] - beta * ratio, scored),
        }

    # Logs --------------------------------------------------------------------------------------------------------

    def reduced_metrics(self, mode: str) -> dict[str, float]:
        metrics = super().reduced_metrics(mode)
        if mode == "train" and metrics.get("ties", 0.0) > TIES_MOST and not self._ties_told:
            self._ties_told = True
            logger.warning(
                "%.0f%% of the pairs are ties, equal completions or equal rewards, and train nothing. Raise temperature, or use "
                "a reward (or judge) that tells completions apart.",
                100 * metrics["ties"],
            )
        return metrics

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As every trainer, without a loss: one completion a prompt has nothing to be compared with."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.pop(f"{metric_key_prefix}_loss", None)
        return output
