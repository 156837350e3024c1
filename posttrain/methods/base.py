"""Interface between an algorithm and the training loop: `Traits` and `Method`."""

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
    """Static properties of a training method. The training loop, the checks and the memory estimate read these
    properties.

    Attributes:
        needs: Names of the `ModelOutputs` fields that the forward pass must compute.
        answers: Number of sequences per dataset row. The loss compares the sequences of a row, which are consecutive.
        whole_rows: Whether all completions of a dataset row must be in the same forward pass, because the loss compares
            them.
        single_pass: Whether a micro-batch must never be split into several forward passes, because the loss compares all its
            rows.
        generative: Whether the model has a language-model head. False: the model has a head that outputs one score.
        samples: Whether the method trains on completions that are sampled during training.
        own_rollouts: Whether the trainer of this method uses its own code to sample completions, to score them, or to
            compute their log-probs.
        workers_sample: Whether other processes sample the completions, so that no engine runs in the training process.
        follows_truncation: Whether the loss compares the sampler's log-probs with the policy's log-probs. If so,
            `sampler_logp` corrects the sampler's log-probs for top-k, top-p and min-p.
        compares_reference: Whether the loss compares the policy with a frozen reference model.
        beta_is_kl: Whether ``cfg.beta > 0`` adds a penalty on the KL divergence from a frozen reference model.
        documents: Whether rows are whole documents without a prompt.
        reads_images: Whether rows may contain images.
        id_columns: Names of dataset columns that contain token ids and replace the text columns. All other columns may have
            any type.
        takes_collator: Whether a user may pass a ``data_collator``. Its output becomes the input of `Method.rows`.
        takes_loss_func: Whether a user's ``compute_loss_func`` can replace the loss. This requires a loss that is a sum over
            label tokens.
        takes_episodes: Whether the method supports tools, environments and rollout functions.
        splits_tokens: Whether the method supports sequence parallelism (``sp_size > 1``).
        still_steps: Whether optimizer steps without a gradient are normal, for example because all rewards are equal.
        float32_head: Whether the output layer is computed in float32.
        log_area: First letter of the codes of this method's log checks, for example "R" for PT-R008. "": no checks run on
            log lines.
        other_moments: Codes of checks that do not run on log lines although they start with the letter ``log_area``.
        ignored_codes: Codes of checks that do not apply to the rows of this method.
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
    splits_tokens: bool = False
    still_steps: bool = False
    float32_head: bool = False
    log_area: str = ""
    other_moments: tuple[str, ...] = ()
    ignored_codes: frozenset[str] = frozenset()


# Codes of the checks that run on the rewards of each rollout batch.
BATCH_CODES = ("PT-R019", "PT-R020", "PT-R027")
WATCHED_CODES = (*BATCH_CODES, "PT-R022", "PT-R028")
# Default traits of methods that sample completions during training.
SAMPLES = Traits(
    needs=frozenset({"logp", "entropy"}),
    samples=True,
    id_columns=(),
    still_steps=True,
    log_area="R",
    other_moments=WATCHED_CODES,
)


def sampler_logp(outputs: ModelOutputs, batch: Batch) -> Tensor | None:
    """Return the sampler's log-probs, corrected for truncated sampling. The result is a tensor ``(B, T)`` of values
    ``log mu(v) + log pi(K)``.

    Top-k, top-p and min-p restrict sampling to a set K of tokens, and ``mu`` is normalized over K. The policy's log-probs
    ``log pi(v)`` are normalized over the whole vocabulary. For a comparison, ``pi`` must be normalized over K as well. The
    importance ratio is ``pi(v) / (mu(v) pi(K))``, where ``pi(K)`` is the policy's total probability of K. If the batch has
    ``pi(K)`` of older weights (column ``log_mass``), this value replaces the current policy's ``pi(K)``. If the batch has no
    sampler log-probs, the result is None.
    """
    mass = batch.columns.get("log_mass", outputs.log_mass)
    return batch.rollout_logp if batch.rollout_logp is None or mass is None else batch.rollout_logp + mass


def mismatch_sums(terms: LossTerms) -> Tensor:
    """Return the weighted value and the weight of the metric ``kl``, in the format of `LossTerms.sums`."""
    kl = terms.metrics["kl"]
    return torch.tensor([float(kl.value), float(kl.weight)], dtype=torch.float64)


class Method(ABC, Generic[Config]):
    """Base class of training methods. A method converts dataset rows to `Row` objects, and model outputs to loss terms.

    A method does not change during training. It does not depend on the trainer, the device or the file system. State that
    changes from step to step is stored in `State.own`.

    Args:
        cfg: The method's config.

    Attributes:
        branches: Names of the dataset columns with answers, in the order of a row's sequences.
        keep: Names of further dataset columns that the loss reads.
    """

    config_class: ClassVar[type[PostTrainingConfig]] = PostTrainingConfig
    traits: Traits = Traits()
    branches: tuple[str, ...] = ()
    keep: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "objective" in vars(cls) and "knows_gradient" not in vars(cls):
            # The inherited method `knows_gradient` describes the parent's objective, so it is wrong if a subclass overrides
            # `objective`.
            cls.knows_gradient = Method.knows_gradient

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert prepared dataset examples to rows. This function is not called for methods that sample completions."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(examples).")

    @abstractmethod
    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss terms (before averaging) and the metrics of one batch.

        Args:
            outputs: Model outputs for the batch.
            batch: Input of one forward pass.
            state: Current state of the run.
        """

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute the advantage of each completion. Only methods that sample completions implement this function.

        The trainer and asynchronous workers call this function.

        Args:
            rollouts: Completions of this rank, in groups of ``rollouts.group_size`` consecutive completions.
            rewards: Rewards of the completions of all ranks. The rewards of this rank start at ``rewards.start``.
            logps: Log-probs by name (``old_logp``, ``ref_logp``, ``rollout_logp``). Each value is a list with one item per
                sequence, in the order of ``rollouts.sequences()``.
            ranks: All processes of the run. In an asynchronous worker, it is `ALONE`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advantages(rollouts, rewards, logps, ranks).")

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return whether the loss needs the log-probs of completions under the weights that sampled them.

        Args:
            outlived: Whether a completion may be used for training after an optimizer step has changed the weights that
                sampled it.
        """
        return outlived

    def without_signal(self, rewards: RewardTable, group_size: int) -> Tensor:
        """Return a bool tensor ``(n / G,)``. It is True for groups in which all advantages are 0."""
        return flat_groups(rewards.values, rewards.weights, group_size)

    def knows_gradient(self, batch: Batch) -> bool | TokenLoss:
        """Return whether the gradient of the loss with respect to log-probs can be computed without recomputing the logits.

        Return True if ``d loss / d logp`` can be computed before the forward pass, up to one factor per batch. Return a
        `TokenLoss` if the loss of each token depends only on the log-prob of that token. In these two cases, the output
        layer computes the logits only once (`posttrain.models.logprob.token_logprobs`). Otherwise, return False. The logits
        are then computed twice. A wrong return value costs time, because the logits are recomputed, but the gradient is
        still correct.
        """
        return False

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count the denominators of loss terms with a custom `LossTerms.count` in the batches of one optimizer step. The
        keys of the result are the names in `LossTerms.count`.

        All ranks must return the same names.
        """
        return {}

    @property
    def temperature(self) -> float:
        """Temperature by which logits are divided before log-probs are computed."""
        return float(self.cfg.temperature)

    def step_sums(self, terms: LossTerms, outputs: ModelOutputs, counts: Denominators) -> Tensor | None:
        """Return statistics of one forward pass, or None. The trainer sums them over all passes of an optimizer step."""
        return terms.sums

    def start(self) -> Any:
        """Return the initial value of `State.own`, or None if the method has no state."""
        return None

    def end_step(self, state: State, sums: Tensor | None) -> tuple[Any, dict[str, Metric]]:
        """Compute the next value of `State.own` and metrics to log, at the end of an optimizer step.

        Args:
            state: State at the end of the optimizer step. ``state.own`` is still the value that was used in this step.
            sums: Sum of `step_sums` over the forward passes of this rank. None: this rank had no statistics in this step.
        """
        return state.own, {}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add metrics that are derived from other metrics of the same log line.

        For example, if no completion of the log line has an end token, the metrics of the lengths of terminated completions
        are 0.
        """
        if "completions/mean_length" in metrics:
            for kind in ("mean", "min", "max"):
                metrics.setdefault(f"completions/{kind}_terminated_length", 0.0)
        return metrics

    def other_models(self, policy: Part, configs: Mapping[str, Any]) -> list[Part]:
        """Return the models that are in memory in addition to policy and reference. The memory estimate calls this method.

        Args:
            policy: The policy.
            configs: Configs of the additional models. The key is the model's name.
        """
        return []

    def saved(self, own: Any) -> dict[str, Any]:
        """Convert `State.own` to a JSON-compatible dict, which a checkpoint stores."""
        return {}

    def restored(self, saved: Mapping[str, Any]) -> Any:
        """Convert the result of `saved`, read from a checkpoint, to `State.own`."""
        return self.start()
