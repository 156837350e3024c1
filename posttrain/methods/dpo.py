"""Direct preference optimization (DPO). The policy learns to increase the likelihood of chosen answers and to decrease the
likelihood of rejected answers, relative to a reference model.
"""

from __future__ import annotations

import logging
from dataclasses import field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.errors import ConfigError, check_choice
from posttrain.fields import PositiveFloat, Share, config, option
from posttrain.losses.divergence import desensitized_sum, pair_values, wpo_weight
from posttrain.losses.likelihood import nll
from posttrain.losses.preference import DPO_LOSSES
from posttrain.losses.reduce import row_terms, sequence_lengths, sequence_sum
from posttrain.methods.config import PictureConfig, warn_keep_end
from posttrain.methods.preference import PAIRS, AnswerMethod, ComparedConfig, answer_mask, pair_metrics
from posttrain.metrics import mean
from posttrain.types import Batch, LossTerms, ModelOutputs, State

logger = logging.getLogger(__name__)


@config
class DPOConfig(PictureConfig, ComparedConfig):
    """Arguments of `DPOTrainer`, which trains on pairs of a chosen and a rejected answer."""

    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"],
        metadata={
            "help": (
                "One loss, or a list of losses that are added with loss_weights. The score of an answer is the log-ratio of "
                "policy and reference, and the margin of a pair is the chosen score minus the rejected score. 'sigmoid': DPO. "
                "'hinge': no gradient for pairs whose margin is large enough. 'ipo': moves the margin to a target value. "
                "'exo_pair': reverse KL divergence from the smoothed label. 'nca_pair': like DPO, but also prevents chosen "
                "answers from becoming less likely. 'robust': DPO for labels that are wrong with the probability "
                "label_smoothing. 'bco_pair': classifies each answer by its score. 'sppo_hard': moves each score to a target "
                "value. 'aot': compares the sorted differences of log-probs (chosen - rejected) of the policy with the sorted "
                "differences of the reference. 'aot_unpaired': compares the sorted chosen scores of the batch with its sorted "
                "rejected scores. 'apo_zero': makes chosen answers more likely and rejected answers less likely. 'apo_down': "
                "makes both answers less likely, and rejected answers more strongly. 'discopop': mixture of the logistic and "
                "the exponential loss (DiscoPOP). 'sft': negative log-likelihood of chosen answers. 'sigmoid_norm': DPO on "
                "log-ratios per token. Formulas are in docs/losses.md."
            )
        },
    )
    loss_weights: list[float] | None = option(
        None, "Weight of each loss in loss_type, for example [0.8, 0.2, 1.0] for MPO. None: every loss has weight 1."
    )
    ld_alpha: Share | None = option(
        None,
        "Length desensitization (LD-DPO): weight of the tokens of the longer answer beyond the length of the shorter answer, "
        "from 0 to 1. A smaller weight reduces the preference for long answers, and 0 ignores these tokens. None: the weight "
        "is 1, which is plain DPO. loss_type='sft' does not use it.",
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = option(
        "reverse_kl",
        "Divergence between policy and reference model that regularizes the loss (f-DPO). 'reverse_kl': plain DPO. "
        "'forward_kl': keeps answers likely if they are likely under the reference model. 'js_divergence': a compromise "
        "between reverse and forward KL. 'alpha_divergence': a compromise whose position is set by f_alpha_divergence_coef. "
        "Values other than 'reverse_kl' need a loss that depends only on the difference of chosen and rejected scores: "
        "sigmoid, sigmoid_norm, hinge, ipo, exo_pair, robust or discopop.",
    )
    f_alpha_divergence_coef: float = option(
        0.5,
        "With f_divergence_type='alpha_divergence': coefficient alpha of the divergence. For values near 0, the divergence is "
        "close to the forward KL. For 1, it is the reverse KL.",
    )
    label_smoothing: Share = option(
        0.0,
        "Probability that chosen and rejected are exchanged in the data. loss_type='robust' needs a value below 0.5 (0.1 is "
        "common). 'exo_pair' needs a value above 0 (1e-3 is common). 'aot' and 'aot_unpaired' also use it. With other losses, "
        "a value above 0 is an error.",
    )
    use_weighting: bool = option(
        False,
        "Weight each pair by the policy's length-normalized probability of its two answers (WPO, arXiv:2406.11827). Answers "
        "that the policy itself would rarely sample then have less influence. It cannot be combined with loss_type='aot' or "
        "'aot_unpaired'.",
    )
    discopop_tau: PositiveFloat = option(
        0.05, "Temperature of loss_type='discopop', above 0. The default is the paper's value."
    )
    padding_free: bool = option(
        False,
        "Accepted for compatibility with TRL. It has no effect, because batches contain no padding between sequences.",
    )

    def __post_init__(self) -> None:
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        super().__post_init__()
        self.loss_type = list(self.loss_type)
        warn_keep_end(self.truncation_mode)
        if not self.loss_type:
            raise ConfigError("loss_type is empty. Fix: set at least one loss, for example 'sigmoid'.")
        for name in self.loss_type:
            check_choice("loss_type", name, DPO_LOSSES)
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ConfigError(
                f"loss_weights has {len(self.loss_weights)} values, but loss_type has {len(self.loss_type)} losses: "
                f"{self.loss_type}. Fix: set one weight per loss."
            )
        self._check_ranges()

    def _check_ranges(self) -> None:
        smoothed = [name for name in self.loss_type if "label_smoothing" in DPO_LOSSES[name].scalars]
        if self.label_smoothing and not smoothed:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type}. Fix: remove "
                "label_smoothing, or set loss_type='robust', which is designed for noisy labels. Note for scripts of TRL 0.7 "
                "to 0.28: in these releases, 'sigmoid' with label_smoothing e was conservative DPO, (1 - e) * loss + e * loss "
                "of the flipped pair. 'robust' instead subtracts the second term and divides by 1 - 2 e. For conservative DPO, "
                "call posttrain.losses.preference.smoothed_sigmoid in objective(outputs, batch) of a subclass (docs/hooks.md)."
            )
        if "robust" in smoothed and not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing={self.label_smoothing} with 'robust' must be in [0, 0.5).")
        if "exo_pair" in smoothed and not 0 < self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} with 'exo_pair' must be above 0, e.g. 1e-3.")
        self._check_uses()

    def _check_uses(self) -> None:
        formulas = {name: DPO_LOSSES[name] for name in self.loss_type}
        ranked = [name for name, formula in formulas.items() if formula.kind == "sorted"]
        if self.use_weighting and ranked:
            raise ConfigError(
                f"use_weighting=True assigns a weight to each pair, but loss_type={ranked} sorts chosen and rejected scores "
                "separately, so there are no pairs. Fix: remove use_weighting or the loss."
            )
        linked = any(formula.uses_link for formula in formulas.values())
        unlinked = [name for name, f in formulas.items() if not (f.uses_link or (linked and f.kind == "likelihood"))]
        if self.f_divergence_type != "reverse_kl" and unlinked:
            raise ConfigError(
                f"f_divergence_type={self.f_divergence_type!r} cannot be used with loss_type={unlinked}. Scores of this "
                "divergence contain an unknown constant per prompt. This constant cancels in the difference of chosen and "
                "rejected score, but these losses use each score alone. Fix: remove f_divergence_type."
            )
        coefficient = type(self).__dataclass_fields__["f_alpha_divergence_coef"].default
        if self.f_divergence_type != "alpha_divergence" and self.f_alpha_divergence_coef != coefficient:
            raise ConfigError(
                f"f_alpha_divergence_coef={self.f_alpha_divergence_coef} has no effect with "
                f"f_divergence_type={self.f_divergence_type!r}. Fix: set f_divergence_type='alpha_divergence', or remove "
                "f_alpha_divergence_coef."
            )
        self.refuse_unread_by_loss(discopop_tau="discopop" in formulas, ld_alpha=set(formulas) != {"sft"})
        per_token = [name for name, formula in formulas.items() if formula.per_token]
        if per_token and self.beta == type(self).__dataclass_fields__["beta"].default:
            logger.warning(
                "loss_type=%s uses log-ratios per token, which are one or two orders of magnitude smaller than sums of "
                "log-ratios, but beta=%s is the default for sums. Set a larger beta. For example, Tülu 3 uses beta=5 for "
                "sigmoid_norm.", per_token, self.beta,
            )  # fmt: skip


def dpo_objective(out: ModelOutputs, batch: Batch, reference: Tensor, cfg: DPOConfig) -> LossTerms:
    """Compute the weighted sum of the DPO losses in ``cfg.loss_type``.

    The loss ``sft`` is averaged over the tokens of chosen answers. All other losses are averaged over pairs. In training,
    averages are computed over the optimizer step. In evaluation, they are computed over the whole dataset.

    Args:
        out: Model outputs, such as log-probs. `DPO.traits` lists the required outputs.
        batch: Pairs, with the chosen answer first.
        reference: ``(S,)`` summed log-probs of the reference. With ``ld_alpha``, these sums are length-desensitized in the
            same way as the sums of the policy.
        cfg: `DPOConfig`.
    """
    assert out.logp is not None
    plain = sequence_sum(out.logp.float(), *batch.by_sequence)
    length = sequence_lengths(*batch.by_sequence)
    logp = plain if cfg.ld_alpha is None else desensitize(out.logp, batch, length, cfg.ld_alpha)
    pairs = [batch.grouped(x, 2).unbind(1) for x in (logp, reference, length, plain)]
    (policy_c, policy_r), (ref_c, ref_r), (length_c, length_r), (plain_c, _) = pairs
    link = {"divergence": cfg.f_divergence_type, "alpha": cfg.f_alpha_divergence_coef}
    values = pair_values(policy_c, policy_r, ref_c, ref_r, length_c, length_r, plain_chosen_logp=plain_c, **link)
    weight = _pair_weight(out, batch, plain, length) if cfg.use_weighting else None
    scalars = {"beta": cfg.beta, "label_smoothing": cfg.label_smoothing, "discopop_tau": cfg.discopop_tau}
    total, metrics = torch.zeros_like(policy_c), pair_metrics(out, batch, values, cfg.beta, pairs)
    chosen, extra = answer_mask(batch, 2, 0), []
    for name, share in zip(cfg.loss_type, cfg.loss_weights or [1.0] * len(cfg.loss_type), strict=True):
        formula, mask = DPO_LOSSES[name], None
        if formula.kind == "likelihood":
            terms, mask = nll(out.logp), chosen
            extra.append(LossTerms(share * terms, mask, "token", count="likelihood"))
        else:
            terms = formula(values, **scalars)
            terms = terms if weight is None else terms * weight
            total = total + share * terms
        if len(cfg.loss_type) > 1:
            metrics[f"loss/{name}"] = mean(terms, mask)
    if weight is not None:
        metrics["weights/mean"] = mean(weight)
    return replace(row_terms(batch, total, branches=2, metrics=metrics), extra=extra)


def desensitize(logp: Tensor, batch: Batch, length: Tensor, alpha: float) -> Tensor:
    """Sum the log-probs of each sequence, and return a tensor ``(S,)``. Tokens beyond the length of the pair's shorter
    answer have the weight ``alpha``.
    """
    shorter = batch.spread_rows(batch.grouped(length, 2).amin(1), 2)
    return desensitized_sum(logp.float(), batch.loss_mask, batch.sequence, shorter, alpha=alpha)


def _pair_weight(out: ModelOutputs, batch: Batch, logp: Tensor, length: Tensor) -> Tensor:
    assert out.collision is not None
    total = sequence_sum(out.collision, *batch.by_sequence)
    return batch.grouped(wpo_weight(logp, total, length), 2).prod(1)


class DPO(AnswerMethod[DPOConfig]):
    """Direct preference optimization: compare the two answers of a pair by their log-ratios of policy and reference."""

    config_class = DPOConfig
    traits = replace(
        PAIRS, needs=frozenset({"logp", "entropy", "correct", "mean_logit"}), compares_reference=True, reads_images=True
    )
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")

    def __init__(self, cfg: DPOConfig) -> None:
        super().__init__(cfg)
        # 'aot' and 'aot_unpaired' sort all pairs of a micro-batch, so the whole micro-batch must be in one forward pass.
        sorts = any(DPO_LOSSES[name].kind == "sorted" for name in cfg.loss_type)
        needs = self.traits.needs | ({"collision"} if cfg.use_weighting else set())
        self.traits = replace(self.traits, needs=needs, single_pass=sorts)

    def knows_gradient(self, batch: Batch) -> bool:
        """Return True if the batch has one pair and the loss depends only on the margin of the pair.

        The gradients with respect to the log-probs of the two answers are then known up to one common factor.
        """
        cfg = self.cfg
        of_margin = len(cfg.loss_type) == 1 and DPO_LOSSES[cfg.loss_type[0]].of_margin
        plain = cfg.f_divergence_type == "reverse_kl" and not cfg.use_weighting
        return batch.num_sequences == 2 and of_margin and plain

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the losses of the pairs; see `dpo_objective`."""
        return dpo_objective(outputs, batch, self.reference_logp(batch), self.cfg)

    def sums(self, logp: Tensor, batch: Batch) -> Tensor:
        """Sum log-probs per sequence. The sums are length-desensitized if ``ld_alpha`` is set."""
        if self.cfg.ld_alpha is None:
            return sequence_sum(logp.float(), *batch.by_sequence)
        return desensitize(logp, batch, sequence_lengths(*batch.by_sequence), self.cfg.ld_alpha)

    def reference_key(self) -> dict[str, Any]:
        """Return the settings that change the reference's summed log-probs, including ``ld_alpha``."""
        return super().reference_key() | {"ld_alpha": self.cfg.ld_alpha}

    def starts_at_ln_2(self) -> bool:
        """Return True if the only loss is the unweighted sigmoid loss. It starts at ln 2, because all log-ratios are 0."""
        cfg = self.cfg
        return cfg.loss_type == ["sigmoid"] and not cfg.use_weighting and (cfg.loss_weights or [1.0]) == [1.0]
