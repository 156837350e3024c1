"""Config and method of asynchronous distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from posttrain.errors import ConfigError
from posttrain.extensions.asynchronous.grpo_config import MEANINGLESS, AsyncGRPOConfig
from posttrain.fields import PositiveFloat, PositiveInt, config, option
from posttrain.losses.policy import k3
from posttrain.methods.base import mismatch_sums
from posttrain.methods.distillation.config import OF_REWARDS, Axes, DistillationFields, preset
from posttrain.methods.distillation.objective import Distillation
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, State

# Options for the policy loss, for rewards, and for completions from the dataset. Asynchronous distillation does not use
# them. A value other than the default is an error.
OF_ASYNC_GRPO: dict[str, tuple[Any, str]] = {
    name: (default, "The loss is the divergence from a teacher on single-turn completions of the student.")
    for name, default in {
        "delta": None, "scale_rewards": "population", "fork_threshold_tokens": 1024, "max_tool_calling_iterations": None,
        "lmbda": 1.0, "seq_kd": False, "teacher_scores": None, "max_length": None, "max_prompt_length": None,
    }.items()
}  # fmt: skip


@config
@preset(
    unread={name: reason for name, reason in OF_REWARDS.items() if name != "reward_timeout"} | OF_ASYNC_GRPO | {
        "loss_top_k": (0, "Use teacher_top_k."), "loss_add_tail": (True, "Use add_tail_bucket."),
        "log_completions_steps": (100, "Use logging_steps."),
    },
    beta=(0.0, "Divergence, from 0 to 1. 0: KL(teacher || student). 1: KL(student || teacher). Other values: Jensen-Shannon."),
    temperature=(1.0, "Divisor of the logits in sampling, above 0. The loss uses teacher_temperature."),
)  # fmt: skip
class AsyncDistillationConfig(DistillationFields, AsyncGRPOConfig):
    """Arguments of `AsyncDistillationTrainer`: options of rollout workers, servers and teachers."""

    _loss_temperature: ClassVar[str | float] = "teacher_temperature"
    _meaningless: ClassVar[dict[str, object]] = {name: value for name, value in MEANINGLESS.items() if name != "beta"}
    teacher_server_urls: dict[str, str] | str | None = option(
        None,
        "Address of a server with the teacher, or a mapping from teacher names to addresses. None: the teacher model is "
        "loaded in this process. The preferred name of this field is teacher_model_server_url.",
    )
    teacher_temperature: PositiveFloat = option(
        1.0,
        "Temperature of the logits of student and teacher in the loss, above 0. It must be 1 with teacher "
        "servers. Sampling uses the field temperature instead.",
    )
    teacher_top_k: PositiveInt = option(
        8,
        "Number of token ids per position that a teacher server returns if beta=0. For other values of beta, the loss uses "
        "the most likely and the sampled token id.",
    )
    add_tail_bucket: bool = option(
        True,
        "Add one category with the total probability of all token ids that are not selected. False renormalizes both "
        "distributions over the selected ids.",
    )

    def __post_init__(self) -> None:
        urls, named = self.teacher_server_urls, self.teacher_model_server_url
        if urls is not None and named not in (None, urls):
            raise ConfigError(
                f"teacher_server_urls={urls!r} and teacher_model_server_url={named!r} are names of the same "
                "option and have different values. Fix: set one of them."
            )
        self.teacher_model_server_url = named if urls is None else urls
        super().__post_init__()
        self.teacher_server_urls = self.teacher_model_server_url  # Set both field names to the resolved value.

    def axes(self) -> Axes:
        """Return the settings of the loss: the vocabulary subset, the estimator and the divergence.

        With a teacher model, the loss uses the whole vocabulary. With teacher servers, the loss uses their most likely ids and
        the sampled id, because servers return no other log-probs.
        """
        t, tail = self.teacher_temperature, self.add_tail_bucket
        axes = Axes("full", self.beta, tail=tail, student_temperature=t, teacher_temperature=t)
        if not self.teacher_model_server_url:
            return axes
        if self.beta == 0:
            return replace(axes, support="teacher_topk", top_k=self.teacher_top_k)
        return replace(axes, support="top1_pair", top_k=1)


class AsyncDistillation(Distillation):
    """On-policy distillation on rollouts that other processes sample (experimental).

    Tokens are sampled with slightly older weights, but the divergence is computed with the current weights. No
    importance sampling is needed, because the divergence compares two distributions at each position and does not use
    the probability with which the token was sampled. ``max_staleness`` limits the age of the samples.

    Reference: GKD, arXiv:2306.13649; one teacher per dataset row: MOPD, arXiv:2606.30406.
    """

    config_class = AsyncDistillationConfig
    traits = replace(Distillation.traits, workers_sample=True, reads_images=False)

    @property
    def temperature(self) -> float:
        """The sampling temperature. The policy's log-probs use this temperature too, so that they can be compared with the
        sampler's log-probs.
        """
        return float(self.cfg.temperature)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the loss with `distillation_objective`. The metric ``kl`` is the k3 estimate of the KL divergence
        between policy and sampler, as in GRPO.
        """
        terms, mask = super().objective(outputs, batch, state), batch.loss_mask
        available = outputs.logp is not None and batch.rollout_logp is not None and not self.cfg.truncation
        gap = k3(batch.rollout_logp, outputs.logp.detach()) if available else torch.zeros_like(terms.terms)
        terms = replace(terms, metrics=terms.metrics | {"kl": mean(gap, mask & available)})
        return replace(terms, sums=mismatch_sums(terms))
