"""What an algorithm is to the training loop: its `Traits`, and a `Method` that turns outputs into loss terms."""

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
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, Row, State

if TYPE_CHECKING:
    from posttrain.models.memory_estimate import Part
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

Config = TypeVar("Config", bound=PostTrainingConfig)


@dataclass(frozen=True)
class Traits:
    """What loop, checks and estimate may know of a method: they ask here and nowhere else.

    Attributes:
        needs: What the forward pass must produce, by names of `ModelOutputs`.
        answers: Sequences that a row of the dataset makes, consecutive ones being compared with each other.
        whole_rows: The loss compares the completions of a row, which are never divided over passes.
        single_pass: The loss compares all rows of a micro-batch, which is one pass.
        generative: The model has a language-model head; else a score head.
        samples: Rows come from completions that are sampled while training.
        own_rollouts: The trainer samples, scores or measures completions with functions of its own.
        workers_sample: Other processes sample them: no engine of this one generates while it trains.
        follows_truncation: The sampler's log-probs are compared with its own: `sampler_logp` tells what truncation left.
        compares_reference: The loss compares the policy with a frozen reference.
        beta_is_kl: ``cfg.beta`` above 0 charges a KL to a frozen reference.
        documents: Rows are whole documents: nothing in them is a prompt.
        reads_images: Rows may hold pictures.
        id_columns: Columns of token ids that are read in place of text; by others' names a dataset may hold anything.
        takes_collator: `Method.rows` is given what a user's own ``data_collator`` makes.
        takes_loss_func: The loss is a sum over label tokens; a user's ``compute_loss_func`` may take its place.
        takes_episodes: Tools, environments and a rollout function are taken.
        cuts_prompts: A prompt that is too long is cut instead of being refused.
        splits_tokens: It was shown on rows that several processes hold pieces of (``sp_size``).
        still_steps: A step that moves nothing is no alarm: all rewards of all groups may be equal.
        float32_head: The output layer is computed in float32.
        log_area: Letter of the codes that findings about log lines may have; "" for none.
        other_moments: Codes of that letter that are looked for at another moment.
        ignored_codes: Codes of findings that do not concern the method's rows.
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


# Codes that the watch over rewards looks for in a batch, and all it looks for.
BATCH_CODES = ("PT-R019", "PT-R020", "PT-R027")
WATCHED_CODES = (*BATCH_CODES, "PT-R022", "PT-R028")
# Of methods that sample while they train.
SAMPLES = Traits(
    needs=frozenset({"logp", "entropy"}),
    samples=True,
    id_columns=(),
    still_steps=True,
    log_area="R",
    other_moments=WATCHED_CODES,
)


def sampler_logp(outputs: ModelOutputs, batch: Batch) -> Tensor | None:
    """``log mu(v) + log pi(K)``, ``(B, T)``: log-probs of the sampler as before truncation; None: none are known.

    What is compared with them is the policy's ``log pi(v)``: the ratio is ``pi(v) / (mu(v) pi(K))``, that of two renormalised
    distributions. The mass ``pi(K)`` is that of the weights whose log-probs are compared: older ones, where the batch has it.
    See `posttrain.losses.truncation`.
    """
    mass = batch.columns.get("log_mass", outputs.log_mass)
    return batch.rollout_logp if batch.rollout_logp is None or mass is None else batch.rollout_logp + mass


def mismatch_sums(terms: LossTerms) -> Tensor:
    """Return the sum and the count of the metric ``kl``, the mismatch of policy and sampler, as `LossTerms.sums`."""
    kl = terms.metrics["kl"]
    return torch.tensor([float(kl.value), float(kl.weight)], dtype=torch.float64)


class Method(ABC, Generic[Config]):
    """An algorithm: rows of the dataset, and the loss terms of what the model makes of them.

    It knows no trainer, no device and no file, and does not change. What it keeps from step to step is in `State.own`.

    Args:
        cfg: Its config.

    Attributes:
        branches: Columns of given answers, in the order of a row's sequences.
        keep: Further columns that the loss reads.
    """

    config_class: ClassVar[type[PostTrainingConfig]] = PostTrainingConfig
    traits: Traits = Traits()
    branches: tuple[str, ...] = ()
    keep: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "objective" in vars(cls) and "knows_gradient" not in vars(cls):
            cls.knows_gradient = Method.knows_gradient  # What a parent says is of its objective.

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Prepared examples of the dataset as rows; methods that sample have none before they have completions."""
        raise NotImplementedError(f"{type(self).__name__} must define rows(examples).")

    @abstractmethod
    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Return unreduced loss terms and metrics of one batch.

        Args:
            outputs: What the model made of the batch.
            batch: One forward pass.
            state: Where the run stands.
        """

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """What each completion is worth, for methods that sample; trainers and asynchronous workers call it.

        Args:
            rollouts: This rank's completions, groups of ``rollouts.group_size`` consecutive.
            rewards: Of all ranks' completions; this rank's begin at ``rewards.start``.
            logps: One list for each of ``rollouts.sequences()``, by name: ``old_logp``, ``ref_logp``, ``rollout_logp`` ...
            ranks: All processes of a run; `ALONE` in a worker.
        """
        raise NotImplementedError(f"{type(self).__name__} must define advantages(rollouts, rewards, logps, ranks).")

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return whether the loss reads log-probs under the weights that sampled a completion.

        Args:
            outlived: Whether the completion may be trained after these weights have changed.
        """
        return outlived

    def without_signal(self, rewards: RewardTable, group_size: int) -> Tensor:
        """Return which groups of all ranks' rewards give no completion an advantage, ``(n / G,)`` bool."""
        return flat_groups(rewards.values, rewards.weights, group_size)

    def knows_gradient(self, batch: Batch) -> bool:
        """Whether the gradient of the loss with respect to the log-probs depends on the batch alone, and not on the log-probs.

        One factor of all tokens may depend on them. The output layer then computes its logits once
        (`posttrain.models.logprob.token_logprobs`). Where the answer is wrong, it computes them again: the gradient is right
        either way.
        """
        return False

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Further counts of an optimiser step that its terms are divided by (`LossTerms.count`); the same names on all ranks."""
        return {}

    @property
    def temperature(self) -> float:
        """What logits are divided by before any log-prob is taken of them."""
        return float(self.cfg.temperature)

    def step_sums(self, terms: LossTerms, outputs: ModelOutputs, counts: Denominators) -> Tensor | None:
        """Return statistics of one training pass, which are added up over the passes of an optimizer step; None for none."""
        return terms.sums

    def start(self) -> Any:
        """Return `State.own` of a run that begins; None for a method that keeps nothing."""
        return None

    def end_step(self, state: State, sums: Tensor | None) -> tuple[Any, dict[str, Metric]]:
        """Return `State.own` of the next optimizer step, and what to log.

        Args:
            state: After the step, with ``own`` as the step read it.
            sums: Of `step_sums`, over the passes of this rank; None where there was no pass.
        """
        return state.own, {}

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a log line with those that follow from others.

        Lengths of ended completions are 0 where none ended.
        """
        if "completions/mean_length" in metrics:
            for kind in ("mean", "min", "max"):
                metrics.setdefault(f"completions/{kind}_terminated_length", 0.0)
        return metrics

    def other_models(self, policy: Part, configs: Mapping[str, Any]) -> list[Part]:
        """Models that stay in memory beside policy and reference, for estimates.

        Args:
            policy: The policy.
            configs: Configurations of other models, by name.
        """
        return []

    def saved(self, own: Any) -> dict[str, Any]:
        """Return `State.own` as JSON for a checkpoint."""
        return {}

    def restored(self, saved: Mapping[str, Any]) -> Any:
        """Return `State.own` of a checkpoint that holds what `saved` returned."""
        return self.start()
