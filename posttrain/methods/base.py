"""The interface between an algorithm and the training loop: `Traits` and `Method`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from posttrain.data.formats import TOKENIZED
from posttrain.losses.advantages import flat_groups
from posttrain.losses.reduce import Denominators
from posttrain.methods.config import PostTrainingConfig
from posttrain.metrics import Metric
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, Row, State, TokenLoss

if TYPE_CHECKING:
    from posttrain.models.memory_estimate import Part
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

Config = TypeVar("Config", bound=PostTrainingConfig)


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the training loop, the checks and the memory estimate read.

    Attributes:
        needs: Names of the `ModelOutputs` fields that the forward pass must produce.
        answers: Number of sequences per dataset row. The sequences of a row are consecutive, and the loss compares
            them.
        whole_rows: The loss compares the completions of a row, so a row is never split over forward passes.
        single_pass: The loss compares all rows of a micro-batch, so the micro-batch must be one forward pass.
        generative: The model has a language-model head. False: it has a scalar score head.
        samples: The training data are completions that are sampled during training.
        own_rollouts: The trainer has its own code to sample completions, score them, or compute their log-probs.
        workers_sample: Other processes sample the completions. No engine runs in the training process.
        follows_truncation: The loss compares the sampler's log-probs with the policy's. `sampler_logp` corrects for
            top-k, top-p and min-p.
        compares_reference: The loss compares the policy with a frozen reference model.
        beta_is_kl: ``cfg.beta > 0`` adds a KL penalty to a frozen reference model.
        documents: Rows are whole documents without a prompt.
        reads_images: Rows may contain images.
        id_columns: Columns of token ids that are read instead of text. Other columns may have any type.
        takes_collator: `Method.rows` receives the output of a user's ``data_collator``.
        takes_loss_func: The loss is a sum over label tokens, so a user's ``compute_loss_func`` can replace it.
        takes_episodes: The method supports tools, environments and rollout functions.
        cuts_prompts: Prompts that are too long are truncated. False: such a prompt is an error.
        splits_tokens: The method supports sequence parallelism (``sp_size > 1``).
        still_steps: A step without a gradient is normal, for example because all rewards of all groups are equal.
        float32_head: The output layer is computed in float32.
        log_area: First letter of the finding codes for log lines of this method. "": no such findings.
        other_moments: Finding codes with that letter that are not checked at log lines, but at another time.
        ignored_codes: Codes of findings that do not apply to the rows of this method.
    """

    needs: frozenset[str] = frozenset({"logp"})
    answers: int = 1
    whole_rows: bool = False
    single_pass: bool = False
    generative: bool = True
    samples: bool = False
    own_rollouts: bool = False
    workers_sample: bool = False
    follows_truncation: bool = False
    compares_reference: bool = False
    beta_is_kl: bool = False
    documents: bool = False
    reads_images: bool = False
    id_columns: tuple[str, ...] = TOKENIZED
    takes_collator: bool = False
    takes_loss_func: bool = False
    takes_episodes: bool = False
    cuts_prompts: bool = False
    splits_tokens: bool = False
    still_steps: bool = False
    float32_head: bool = False
    log_area: str = ""
    other_moments: tuple[str, ...] = ()
    ignored_codes: frozenset[str] = frozenset()


# Finding codes of the checks on a batch of rewards.
BATCH_CODES = ("PT-R019", "PT-R020", "PT-R027")
WATCHED_CODES = (*BATCH_CODES, "PT-R022", "PT-R028")
# Traits of methods that sample completions during training.
SAMPLES = Traits(
    needs=frozenset({"logp", "entropy"}),
    samples=True,
    id_columns=(),
    still_steps=True,
    log_area="R",
    other_moments=WATCHED_CODES,
)


def sampler_logp(outputs: ModelOutputs, batch: Batch) -> Tensor | None:
    """Return the sampler's log-probs plus the log of the kept mass, ``log mu(v) + log pi(K)``, ``(B, T)``.

    Top-k, top-p and min-p restrict sampling to a set K and renormalize. Compared with the policy's ``log pi(v)``, the
    result gives the importance ratio of two renormalized distributions, ``pi(v) / (mu(v) pi(K))``. The mass ``pi(K)``
    is the one under the weights whose log-probs are compared; these may be older weights if the batch has their mass.
    Return None if the batch has no sampler log-probs.
    """
    mass = batch.columns.get("log_mass", outputs.log_mass)
    return batch.rollout_logp if batch.rollout_logp is None or mass is None else batch.rollout_logp + mass


def mismatch_sums(terms: LossTerms) -> Tensor:
    """Return the sum and the count of the metric ``kl``, the mismatch of policy and sampler, as `LossTerms.sums`."""
    kl = terms.metrics["kl"]
    return torch.tensor([float(kl.value), float(kl.weight)], dtype=torch.float64)


class Method(ABC, Generic[Config]):
    """An algorithm: it converts dataset rows to `Row` objects and model outputs to loss terms.

    A method is immutable and independent of the trainer, the device and the file system. State that changes from step
    to step is in `State.own`.

    Args:
        cfg: The method's config.

    Attributes:
        branches: Columns that contain answers, in the order of a row's sequences.
        keep: Additional columns that the loss reads.
    """

    config_class: ClassVar[type[PostTrainingConfig]] = PostTrainingConfig
    traits: Traits = Traits()
    branches: tuple[str, ...] = ()
    keep: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "objective" in vars(cls) and "knows_gradient" not in vars(cls):
            # Reset `knows_gradient`, because the parent's value describes the parent's objective.
            cls.knows_gradient = Method.knows_gradient

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert prepared dataset examples to rows. Methods that sample completions do not use it."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(examples).")

    @abstractmethod
    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Return unreduced loss terms and metrics of one batch.

        Args:
            outputs: Model outputs for the batch.
            batch: Input of one forward pass.
            state: Current state of the run.
        """

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Return the advantage of each completion. Only methods that sample completions define it.

        The trainer and asynchronous workers call it.

        Args:
            rollouts: This rank's completions, in groups of ``rollouts.group_size`` consecutive completions.
            rewards: Rewards of all ranks' completions. This rank's rewards start at ``rewards.start``.
            logps: Per-sequence log-probs by name (``old_logp``, ``ref_logp``, ``rollout_logp``), in the order of
                ``rollouts.sequences()``.
            ranks: All processes of the run. In a worker it is `ALONE`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advantages(rollouts, rewards, logps, ranks).")

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return whether the loss needs log-probs under the weights that sampled the completion.

        Args:
            outlived: Whether the model may be trained on a completion after the weights that sampled it have changed.
        """
        return outlived

    def without_signal(self, rewards: RewardTable, group_size: int) -> Tensor:
        """Return a boolean tensor ``(n / G,)`` that marks groups in which all advantages are 0."""
        return flat_groups(rewards.values, rewards.weights, group_size)

    def knows_gradient(self, batch: Batch) -> bool | TokenLoss:
        """Return True if ``d loss / d logp`` can be computed before the forward pass, up to one factor per batch.

        If the loss of each token depends only on the log-prob of that token, return the function from log-probs to
        losses. In both cases, the output layer computes the logits only once
        (`posttrain.models.logprob.token_logprobs`). If the answer is wrong, the logits are computed again and the
        gradient is still correct.
        """
        return False

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return additional denominators of an optimizer step, by the name in `LossTerms.count`.

        All ranks must return the same names.
        """
        return {}

    @property
    def temperature(self) -> float:
        """Divisor of the logits for all log-probs."""
        return float(self.cfg.temperature)

    def step_sums(self, terms: LossTerms, outputs: ModelOutputs, counts: Denominators) -> Tensor | None:
        """Return statistics of one training pass to be summed over the passes of an optimizer step, or None."""
        return terms.sums

    def start(self) -> Any:
        """Return the initial `State.own`. None: the method has no state."""
        return None

    def end_step(self, state: State, sums: Tensor | None) -> tuple[Any, dict[str, Metric]]:
        """Return `State.own` for the next optimizer step, and metrics to log.

        Args:
            state: State after the step. ``own`` is the value that the step used.
            sums: Sum of `step_sums` over the passes of this rank. None: there was no pass.
        """
        return state.own, {}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add metrics that are computed from other metrics of the same log line.

        If no completion ended, the metrics about the lengths of ended completions are 0.
        """
        if "completions/mean_length" in metrics:
            for kind in ("mean", "min", "max"):
                metrics.setdefault(f"completions/{kind}_terminated_length", 0.0)
        return metrics

    def other_models(self, policy: Part, configs: Mapping[str, Any]) -> list[Part]:
        """Return the models that are in memory in addition to policy and reference, for the memory estimate.

        Args:
            policy: The policy.
            configs: Configurations of the other models, by name.
        """
        return []

    def saved(self, own: Any) -> dict[str, Any]:
        """Convert `State.own` to a JSON-compatible dict for a checkpoint."""
        return {}

    def restored(self, saved: Mapping[str, Any]) -> Any:
        """Convert the return value of `saved` from a checkpoint back to `State.own`."""
        return self.start()
