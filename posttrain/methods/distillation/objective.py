"""Losses of distillation. The logits of student and teacher are compared one chunk of positions at a time, so the logits of
all positions are never in memory at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, ModelError
from posttrain.losses.advantages import group_advantages
from posttrain.losses.distillation import (
    divergence,
    hybrid_divergence,
    normalized,
    prefix_weights,
    score_surrogate,
    sorted_l1,
    support_mass,
    union_support,
    with_tail,
)
from posttrain.losses.reduce import sequence_lengths, spread
from posttrain.methods.base import SAMPLES, Method
from posttrain.methods.distillation.config import Axes, DistillationConfig
from posttrain.methods.grpo.objective import group_options
from posttrain.metrics import Metric, maximum, mean, minimum
from posttrain.models.heads import Float32Linear, LogitRule, TokenHead, is_one_matrix
from posttrain.models.logprob import chunked_rows, raw_logits
from posttrain.models.memory_estimate import Part, named_dtype
from posttrain.types import Advantages, Batch, LossTerms, ModelOutputs, Ranks, State

if TYPE_CHECKING:
    from posttrain.rewards.runner import RewardTable
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import LogProbs

MAX_LOG_RATIO = 20.0
COLUMNS = ("divergence", "logp", "gap", "entropy", "mass", "agree")


def kept(logits: Tensor, columns: int | None, without: Tensor | None) -> Tensor:
    """Return the first ``columns`` columns of logits ``(n, W)``. The logits of the ids in ``without`` (image placeholders)
    are -inf.
    """
    logits = logits[:, :columns]
    return logits if without is None else logits.index_fill(1, without, -torch.inf)


@dataclass
class HiddenTeacher:
    """Output of a teacher model in this process: hidden states at loss positions, and the weights of the output layer.

    Attributes:
        hidden: Hidden states ``(N, H)``. If ``weight`` is None, they are the logits ``(N, W)``.
        weight: Weight ``(W, H)`` of the output layer, or None.
        bias: Bias ``(W,)`` of the output layer, or None.
        rule: Scaling and soft cap of the logits in the model's architecture.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    rule: LogitRule = field(default_factory=LogitRule)

    def logits(self, part: slice, columns: int | None, without: Tensor | None = None) -> Tensor:
        """Compute logits ``(n, V)`` of the first ``columns`` ids. The logits of the ids in ``without`` are -inf."""
        x = self.hidden[part].float()
        if self.weight is not None:
            rule = {"logit_scale": self.rule.scale, "softcap": self.rule.softcap}
            x = raw_logits(self.hidden[part], self.weight, self.bias, **rule)
        return kept(x, columns, without)

    def logp(self, part: slice, columns: int | None, temperature: float, without: Tensor | None = None) -> Tensor:
        """Compute log-probs ``(n, V)`` over the first ``columns`` ids. The log-probs of the ids in ``without`` are -inf."""
        x = self.logits(part, columns, without)
        return (x if temperature == 1 else x / temperature).log_softmax(-1)


@dataclass
class TokenScores:
    """Log-probs of L tokens at temperature 1, read from a score file or returned by a teacher server.

    Attributes:
        ids: Most likely ids ``(L, k)`` at each position, in descending order of probability.
        logps: Log-probs ``(L, k)`` of ``ids``.
        actual: Log-probs ``(L,)`` of the tokens in the sequence.
    """

    ids: Tensor
    logps: Tensor
    actual: Tensor

    @classmethod
    def of(cls, fields: Mapping[str, list]) -> TokenScores:
        """Create an instance from lists. The keys of ``fields`` are the attribute names."""
        return cls(**{name: torch.tensor(values) for name, values in fields.items()})


@dataclass
class TeacherShare:
    """Output of one of several teachers, with the weight of its divergence.

    Attributes:
        teacher: `HiddenTeacher` or `TokenScores` for the positions in ``rows``, in the same order. None: the teacher scores
            no position of this batch.
        rows: Indices ``(M,)`` of the loss positions that this teacher scores, in ascending order. None: all positions.
        weight: Weight of this teacher's divergence at each position in ``rows``.
    """

    teacher: Any
    rows: Tensor | None = None
    weight: float = 1.0

    def within(self, part: slice) -> tuple[Any, slice]:
        """Find the positions of the chunk ``part`` that this teacher scores.

        Returns:
            These positions relative to the start of the chunk, and the slice of the teacher's output that belongs to them.
        """
        if self.rows is None:
            return slice(None), part
        begin, end, _ = part.indices(sys.maxsize)
        first, last = torch.searchsorted(self.rows, self.rows.new_tensor([begin, end])).tolist()
        return self.rows[first:last] - begin, slice(first, last)


def capture(hidden: Tensor, layer: nn.Module, rule: LogitRule, head: TokenHead) -> dict[str, Any]:
    """Return the teacher's hidden states at the loss positions, without computing logits.

    Pass this function as ``compare`` to `posttrain.models.forward.forward`.
    """
    if hasattr(layer, "base_layer") and layer.disable_adapters:
        layer = layer.base_layer
    if layer is None:
        return {"teacher": HiddenTeacher(hidden)}
    if not is_one_matrix(layer):
        return {"teacher": HiddenTeacher(rule.logits(layer(hidden)))}
    weight, device = layer.weight, hidden.device.type
    if type(layer) is nn.Linear and torch.is_autocast_enabled(device):
        # Convert to the student's precision. Otherwise, rounding differences would be part of the divergence.
        weight = weight.to(torch.get_autocast_dtype(device))
    return {"teacher": HiddenTeacher(hidden, weight, layer.bias, rule)}


def _by_position(
    hidden: Tensor, layer: nn.Module, rule: LogitRule, head: TokenHead, measure: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Compute a tensor ``(N, K)`` of K values per position by calling ``measure`` on the logits of N positions.

    Only the first two columns of the result are differentiable.

    The logits are computed in chunks if the output layer is a single matrix.
    """
    if layer is None:
        return measure(hidden, slice(None))
    if not is_one_matrix(layer):
        return measure(rule.logits(layer(hidden)), slice(None))
    options: dict[str, Any] = {"logit_scale": rule.scale, "softcap": rule.softcap, "chunk_size": head.chunk_size}
    with torch.autocast(hidden.device.type, enabled=False) if type(layer) is Float32Linear else nullcontext():
        return chunked_rows(hidden, layer.weight, layer.bias, measure, columns=2, **options)


@dataclass
class Comparison:
    """Compares the student's logits with the logits of one or several teachers at each position.

    The divergence from several teachers is the weighted mean ``sum_i w_i D(q, p_i)``; see `distillation_objective`.

    Attributes:
        axes: Properties of the loss.
        teacher: `HiddenTeacher` or `TokenScores` for the same positions. For several teachers: `TeacherShare` objects by
            name.
        columns: Number of token ids that all models have. Higher ids are embedding padding and are ignored. None: all ids
            are compared.
        policy_temperature: Temperature of the log-probs outside the divergence.
        without: Token ids with probability 0 in all distributions. They are image placeholders and markers, which are never
            generated.
        own: User's override of `DistillationTrainer.generalized_jsd_loss`, which replaces the divergence. None: no override.
    """

    axes: Axes
    teacher: Any
    columns: int | None
    policy_temperature: float
    without: Tensor | None = None
    own: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        several = isinstance(self.teacher, dict)
        self.shares: dict[str, TeacherShare] = self.teacher if several else {"": TeacherShare(self.teacher)}
        self.names = tuple(self.shares) if several else ()

    def __call__(self, hidden: Tensor, layer: nn.Module, rule: LogitRule, head: TokenHead) -> dict[str, Tensor]:
        """Compute tensors ``(N,)`` by name, with one value per position. ``divergence`` and ``logp`` are differentiable.

        With several teachers, the result also contains ``divergence/NAME`` and ``scored/NAME`` for each teacher.
        ``scored/NAME`` is 1 at positions that the teacher has scored, and 0 at other positions.
        """
        self.targets = head.targets
        names = (*COLUMNS, *(f"divergence/{name}" for name in self.names))
        columns = dict(zip(names, _by_position(hidden, layer, rule, head, self.measure).unbind(1), strict=True))
        for name in self.names:
            scored, rows = torch.zeros_like(columns["gap"]), self.shares[name].rows
            scored[slice(None) if rows is None else rows] = 1.0
            columns[f"scored/{name}"] = scored
        return columns

    def measure(self, x: Tensor, part: slice) -> Tensor:
        """Compute a tensor ``(n, K)`` of K values per position from logits ``(n, V)``. The columns are the columns in
        `COLUMNS` and one divergence per named teacher.

        The backward pass computes gradients only for the first two columns.
        """
        targets, axes = self.targets[part, None], self.axes
        # The backward pass recomputes the chunk, but only its two differentiable columns.
        again = x.is_leaf and x.requires_grad
        x = kept(x, self.columns, self.without)
        log_q = (x if axes.student_temperature == 1 else x / axes.student_temperature).log_softmax(-1)
        own = log_q
        if self.policy_temperature != axes.student_temperature:
            own = (x / self.policy_temperature).log_softmax(-1)
        logp = own.gather(1, targets)[:, 0]
        value, columns = torch.zeros_like(logp), logp.new_zeros(3 + len(self.names), len(logp))
        for number, share in enumerate(self.shares.values()):
            if share.teacher is None:
                continue
            at, theirs = share.within(part)
            # This teacher scores no token of this chunk.
            if isinstance(at, Tensor) and not len(at):
                continue
            here = _Beside(axes, share.teacher, theirs, log_q[at], targets[at])
            here.ask(self.columns, self.without)
            if self.own is None:
                apart, mass_held = here.divergence()
            else:
                with torch.no_grad():
                    logits = share.teacher.logits(theirs, self.columns, self.without)
                apart = own_divergence(self.own, x[at], logits, here.targets[:, 0], axes)
                mass_held = torch.ones_like(apart)
            value[at] += share.weight * apart
            if again:
                continue
            with torch.no_grad():
                gap = here.log_q.gather(1, here.targets)[:, 0] - here.actual
                agree = (here.log_q.argmax(-1) == here.best).to(gap)
                columns[:3, at] += share.weight * torch.stack([gap, mass_held, agree])
                if self.names:
                    columns[3 + number, at] = apart
        if again:
            return torch.stack([value, logp], 1)
        entropy = -torch.linalg.vecdot(log_q.exp(), log_q.clamp_min(-1e4))
        gap, mass, agree, *alone = columns
        return torch.stack([value, logp, gap, entropy, mass, agree, *alone], 1)


def own_divergence(own: Callable[..., Tensor], student: Tensor, teacher: Tensor, labels: Tensor, axes: Axes) -> Tensor:
    """Call the user's ``generalized_jsd_loss`` with TRL's arguments, and repeat its result for each token.

    Args:
        own: Function that returns the mean loss over tokens.
        student: Logits ``(n, V)`` of the student.
        teacher: Logits ``(n, V)`` of the teacher.
        labels: Token ids ``(n,)``.
        axes: Properties of the loss. Only ``beta`` and the temperature are used.

    Returns:
        Tensor ``(n,)`` of equal values. Their sum is the sum of the losses of the n tokens, so the loss does not depend on
        the chunk size.

    Raises:
        ConfigError: The function does not return a scalar.
    """
    # Replace -inf with the smallest finite number. If both logits were -inf, the KL divergence would be NaN.
    lowest = torch.finfo(student.dtype).min
    options = {} if axes.student_temperature == 1 else {"temperature": axes.student_temperature}
    logits = {"student_logits": student.clamp_min(lowest)[None], "teacher_logits": teacher.clamp_min(lowest)[None]}
    loss = own(**logits, labels=labels[None], beta=axes.beta, **options)
    if loss.dim():
        raise ConfigError(
            f"generalized_jsd_loss returned a tensor of shape {tuple(loss.shape)} but must return a scalar. Fix: return the "
            "mean over the tokens whose label is not -100."
        )
    return loss.expand(len(labels))


@dataclass
class _Beside:
    """Student logits and outputs of one teacher, at those positions of a chunk that the teacher scores."""

    axes: Axes
    teacher: Any
    part: slice
    log_q: Tensor
    targets: Tensor

    @torch.no_grad()
    def ask(self, columns: int | None, without: Tensor | None) -> None:
        """Read the teacher's output. Store its log-probs over the vocabulary (if available), its log-probs of the tokens,
        and its most likely ids.
        """
        self.log_p: Tensor | None = None
        if isinstance(self.teacher, TokenScores):
            self.actual, self.best = self.teacher.actual[self.part].to(self.log_q), self.teacher.ids[self.part, 0]
            return
        temperature = self.axes.teacher_temperature
        self.log_p = self.teacher.logp(self.part, columns, temperature, without).to(self.log_q.dtype)
        self.actual, self.best = self.log_p.gather(1, self.targets)[:, 0], self.log_p.argmax(-1)

    def divergence(self) -> tuple[Tensor, Tensor]:
        """Compute the divergence and the teacher's total probability of the support at each of n positions.

        With the estimator ``score``, the divergence is not needed and its value is 0.
        """
        axes, log_q, log_p = self.axes, self.log_q, self.log_p
        if axes.estimator != "exact":
            return torch.zeros_like(self.actual), torch.ones_like(self.actual)
        if axes.support == "full":
            assert log_p is not None
            return divergence(log_q, log_p, beta=axes.beta), torch.ones_like(log_q[:, 0])
        ids, again = self._support()
        q, p = log_q.gather(1, ids), self._at(ids).to(log_q.dtype)
        q, p = q.masked_fill(again, -torch.inf), p.masked_fill(again, -torch.inf)
        complete = with_tail if axes.tail else normalized
        return divergence(complete(q), complete(p), beta=axes.beta), support_mass(p)

    def _support(self) -> tuple[Tensor, Tensor]:
        """Return a tensor ``(n, k)`` with the token ids of the support, and a mask of ids to ignore.

        The ignored ids are duplicates, and ids beyond the student's vocabulary.
        """
        log_q, log_p, targets = self.log_q, self.log_p, self.targets
        kind, k = self.axes.support, min(self.axes.top_k or 1, log_q.shape[1])
        if kind == "sampled":
            return targets, torch.zeros_like(targets, dtype=torch.bool)
        mine = targets if kind == "top1_pair" else log_q.detach().topk(k, -1).indices
        if kind == "student_topk":
            return mine, torch.zeros_like(mine, dtype=torch.bool)
        theirs = self.teacher.ids[self.part] if log_p is None else log_p.topk(k, -1).indices
        # A server's model may have logits for ids outside the vocabulary. Exclude these ids from the support.
        beyond = theirs >= log_q.shape[1]
        theirs = theirs.masked_fill(beyond, 0)
        if kind == "teacher_topk":
            return theirs, beyond
        ids, again = union_support(theirs[:, :k].masked_fill(beyond[:, :k], -1), mine)
        return ids.clamp_min(0), again | (ids < 0)

    def _at(self, ids: Tensor) -> Tensor:
        """Return the teacher's log-probs of token ids. With scores from a file or server, the ids must be those of the
        support.
        """
        if self.log_p is not None:
            return self.log_p.gather(1, ids)
        logps, actual = self.teacher.logps[self.part], self.teacher.actual[self.part, None]
        return {"teacher_topk": logps, "sampled": actual, "top1_pair": torch.cat([logps[:, :1], actual], 1)}[
            self.axes.support
        ]


@dataclass
class AlignedComparison:
    """Compares a student and a teacher with different tokenizers. The compared units are groups of tokens with the same
    bytes.

    Attributes:
        axes: Properties of the loss. Only beta and the temperatures are used.
        teacher: Outputs of the teacher, only at its positions that belong to groups.
        rows: Indices ``(G,)`` of the student's loss positions that belong to groups.
        matched: Pairs of a student id and a teacher id of tokens with equal bytes, which the hybrid loss compares. None:
            only sorted probabilities are compared.
        weights: Weight of the loss on matched ids, and weight of the loss on unmatched ids.
        widths: Number of token ids of the student, and of the teacher.
        without: Token ids with probability 0, for the student and for the teacher. They are image placeholders and markers,
            which are never generated.
    """

    axes: Axes
    teacher: HiddenTeacher
    rows: Tensor
    matched: tuple[Tensor, Tensor] | None
    weights: tuple[float, float]
    widths: tuple[int, int]
    without: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, hidden: Tensor, layer: nn.Module, rule: LogitRule, head: TokenHead) -> dict[str, Tensor]:
        """Compute tensors ``(N,)`` by name, with one value per position.

        ``aligned`` is the weighted sum of ``matched`` and ``unmatched`` at positions of groups, and 0 at other positions.
        All tensors except ``entropy`` are differentiable.
        """
        self.targets = head.targets
        groups = _by_position(hidden[self.rows], layer, rule, head, self.measure)
        logp, entropy = _by_position(hidden, layer, rule, head, self._logp).unbind(1)
        zeros = logp.new_zeros(len(hidden))
        matched, unmatched = (zeros.index_put((self.rows,), groups[:, i].to(zeros)) for i in (0, 1))
        weights = (0.0, 1.0) if self.matched is None else self.weights
        parts = {"matched": matched, "unmatched": unmatched, "logp": logp, "entropy": entropy.detach()}
        return parts | {"aligned": weights[0] * matched + weights[1] * unmatched}

    def _logp(self, x: Tensor, part: slice) -> Tensor:
        log_q = x.log_softmax(-1)
        entropy = -torch.linalg.vecdot(log_q.detach().exp(), log_q.detach())
        return torch.stack([log_q.gather(1, self.targets[part, None])[:, 0], entropy], 1)

    def measure(self, x: Tensor, part: slice) -> Tensor:
        """Compute the losses on matched ids and on unmatched ids as a tensor ``(n, 2)``, from logits ``(n, V)`` at positions
        of groups.
        """
        log_q = (kept(x, self.widths[0], self.without[0]) / self.axes.student_temperature).log_softmax(-1)
        log_p = self.teacher.logp(part, self.widths[1], self.axes.teacher_temperature, self.without[1]).to(log_q.dtype)
        if self.matched is None:
            return torch.stack([torch.zeros_like(log_q[:, 0]), sorted_l1(log_q.exp(), log_p.exp())], 1)
        return torch.stack(hybrid_divergence(log_q, log_p, self.matched, beta=self.axes.beta), 1)


def distillation_objective(out: ModelOutputs, batch: Batch, axes: Axes) -> LossTerms:
    """Compute the loss ``w d + w_ce (-log q)`` of every loss token, before averaging.

    q is the student's distribution, and p is the teacher's distribution. ``d`` is the divergence, or the policy gradient of
    the sampled token.

    With several teachers, ``d = sum_i w_i D(q, p_i)``, where the weights ``w_i`` sum to 1. If each row selects its teacher,
    the weight of this teacher is 1. Each teacher scores only the ids in its own support, so teachers may be servers. With
    ``beta=0``, the gradient equals that of the divergence from the mixture ``sum_i w_i p_i``. With ``beta=1``, the gradient
    equals that of the divergence from the normalized geometric mean ``prod_i p_i ** w_i``. For other values of beta, the sum
    of divergences does not equal the divergence from one combined teacher. With the estimator ``score``, the reward of a
    token is ``sum_i w_i log p_i - log q``.

    Args:
        out: Model outputs. ``out.compared`` is the result of `Comparison` or `AlignedComparison`.
        batch: Batch. Its columns ``on_policy`` and ``active`` are optional tensors ``(S,)``. If ``is_clip`` is set, the
            batch must have ``old_logp``.
        axes: Properties of the loss.
    """
    mask, grid = batch.loss_mask, torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)

    def place(values: Tensor) -> Tensor:
        return grid.to(values.dtype).masked_scatter(mask, values)

    compared, metrics = out.compared, {}
    if axes.support == "aligned":
        aligned = mask & (batch.columns["aligned"] > 0)
        metrics = {name + "_loss": mean(place(compared[name]), aligned) for name in ("matched", "unmatched")}
        terms = axes.weight * place(compared["aligned"])
        loss = LossTerms(terms, aligned, "token", count="groups")
    elif axes.support == "none":
        terms, loss = grid, LossTerms(grid, mask, "token")
    else:
        values = place(compared["divergence"])
        _check_finite(values, mask, axes)
        if axes.estimator == "score":
            values, metrics = _score(out, batch, place(compared["gap"]), axes)
        metrics |= _agreement(compared) | (_divergence(compared) if axes.estimator == "exact" else {})
        terms = axes.weight * values * _importance(out, batch, axes)
        loss = _reduced(terms, batch, axes)
    metrics |= _by_source(terms.detach(), batch, loss.mask)
    if axes.cross_entropy and out.logp is not None:
        loss.extra.append(LossTerms(-axes.cross_entropy * out.logp, mask, "token"))
        metrics["distill/cross_entropy"] = mean(-out.logp, mask)
    if out.entropy is not None:
        metrics["entropy"] = mean(out.entropy, mask)
    return replace(loss, metrics=metrics)


def _check_finite(values: Tensor, mask: Tensor, axes: Axes) -> None:
    wrong = int((~values.detach().isfinite() & mask).sum())
    if wrong:
        raise ModelError(
            f"the divergence (beta={axes.beta}) is not finite at {wrong} of {int(mask.sum())} tokens. Either one model gives "
            "probability 0 to token ids that have a positive probability in the other model, or logits are NaN. Fix: set beta "
            "between 0 and 1, or use a teacher with the same vocabulary."
        )


def _agreement(compared: dict[str, Tensor]) -> dict[str, Metric]:
    """Compute metrics of the log-ratio ``log q - log p`` of student and teacher. On samples of the student, the mean
    log-ratio is an estimate of KL(student || teacher).
    """
    gap = compared["gap"]
    return {
        "distill/k1": mean(gap),
        "distill/k3": mean((-gap).clamp_max(MAX_LOG_RATIO).exp() - 1 + gap),
        "distill/k1_max": maximum(gap),
        "distill/agreement": mean(compared["agree"]),
    }


def _divergence(compared: dict[str, Tensor]) -> dict[str, Metric]:
    """Compute metrics of the divergence. With several teachers, add each teacher's divergence and its fraction of scored
    tokens.
    """
    metrics = {
        "distill/divergence": mean(compared["divergence"]),
        "distill/divergence_max": maximum(compared["divergence"]),
        "distill/support_mass": mean(compared["mass"]),
    }
    for scored in [key for key in compared if key.startswith("scored/")]:
        name = scored.removeprefix("scored/")
        metrics[f"teacher_jsd/{name}"] = mean(compared[f"divergence/{name}"], compared[scored])
        metrics[f"teacher_token_frac/{name}"] = mean(compared[scored])
    return metrics


def _score(out: ModelOutputs, batch: Batch, gap: Tensor, axes: Axes) -> tuple[Tensor, dict[str, Metric]]:
    """Compute the policy-gradient loss that minimizes the reverse KL. ``prefix`` gives early tokens larger weights."""
    assert out.logp is not None
    teacher, mask = out.logp.detach() - gap, batch.loss_mask
    if axes.prefix is None:
        return score_surrogate(out.logp, teacher), {}
    sampled = batch.rollout_logp if batch.rollout_logp is not None else batch.old_logp
    advantages = (teacher - (out.logp.detach() if sampled is None else sampled)) * mask
    weights = prefix_weights(advantages, mask, batch.sequence, gamma=axes.prefix[0], epsilon=axes.prefix[1])
    metrics = {
        "iw_opd/mean_advantage": mean(weights * advantages, mask),
        "iw_opd/mean_abs_advantage": mean(advantages.abs(), mask),
        "iw_opd/mean_weight": mean(weights, mask),
        "iw_opd/min_weight": minimum(weights[mask]),
        "iw_opd/max_weight": maximum(weights[mask]),
    }
    return -weights * advantages * out.logp, metrics


def _importance(out: ModelOutputs, batch: Batch, axes: Axes) -> Tensor | float:
    """Return the importance weight of each token, limited to ``is_clip``. The weight corrects for tokens that were sampled
    with older weights.
    """
    if axes.is_clip is None or batch.old_logp is None:
        return 1.0
    assert out.logp is not None
    ratio = (out.logp.detach() - batch.old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp_max(axes.is_clip)


def _reduced(terms: Tensor, batch: Batch, axes: Axes) -> LossTerms:
    forest: dict[str, Any] = {"sequence": batch.sequence, "num_sequences": batch.num_sequences}
    if axes.reduction != "active":
        return LossTerms(terms, batch.loss_mask, axes.reduction, **forest)
    active = batch.columns.get("active", torch.ones(batch.num_sequences, device=terms.device))
    lengths = sequence_lengths(*batch.by_sequence)
    return LossTerms(terms * spread(active / lengths, batch.sequence), batch.loss_mask, "token", count="active")


def _by_source(terms: Tensor, batch: Batch, mask: Tensor) -> dict[str, Metric]:
    """Compute the mean loss separately for tokens that the student sampled, and for tokens from the dataset or the teacher."""
    if "on_policy" not in batch.columns:
        return {}
    own = batch.columns["on_policy"]
    sampled = spread(own, batch.sequence) > 0
    return {
        "on_policy_loss": mean(terms, mask & sampled),
        "off_policy_loss": mean(terms, mask & ~sampled),
        "on_policy_fraction": mean(own),
    }


class Distillation(Method[Any]):
    """Trains a student on the next-token distributions of a teacher. Completions are samples of the student or the teacher,
    or come from the dataset.

    Attributes:
        axes: Properties of the loss.
        takes_rewards: Whether a GRPO loss is added to the divergence.
        privileged: Whether the teacher's prompt differs from the student's prompt.

    Reference: GKD, arXiv:2306.13649.
    """

    config_class = DistillationConfig
    traits = replace(
        SAMPLES,
        own_rollouts=True,
        splits_tokens=True,
        reads_images=True,
        id_columns=("prompt_ids", "completion_ids"),
    )
    takes_rewards: ClassVar[bool] = False
    privileged: ClassVar[bool] = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.axes: Axes = cfg.axes()
        # 'bnpo' averages over the tokens of a micro-batch, so the whole micro-batch must be in one forward pass.
        self.traits = replace(self.traits, single_pass=self.takes_rewards and cfg.loss_type == "bnpo")

    @property
    def temperature(self) -> float:
        """Temperature of log-probs. With a GRPO loss, it is the sampling temperature, otherwise the temperature of the
        distillation loss.
        """
        return float(self.cfg.temperature) if self.takes_rewards else self.axes.student_temperature

    def needs_old_logp(self, outlived: bool) -> bool:
        """Return whether the loss computes importance ratios from the log-probs under the weights that sampled the
        completions.

        GRPO's loss, ``is_clip`` and IW-OPD use importance ratios. The ratios can differ from 1 if the weights have changed
        since sampling. Exact divergences use no ratio.
        """
        axes = self.axes
        return outlived and (self.takes_rewards or axes.is_clip is not None or axes.prefix is not None)

    def advantages(self, rollouts: RolloutBatch, rewards: RewardTable, logps: LogProbs, ranks: Ranks) -> Advantages:
        """Compute advantages as in GRPO. Without reward functions, all advantages are 0."""
        if not rewards.names:
            values = torch.zeros(len(rollouts.rollouts))
            return Advantages(values, values, rewards.start, token_columns=logps)
        how = group_options(self.cfg)
        stats = group_advantages(rewards.values, rewards.weights, rollouts.group_size, **how)
        more = {"zero_std_share": stats.zero_std_share, "token_columns": logps}
        return Advantages(stats.advantages, stats.totals, rewards.start, **more)

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the distillation loss of a batch; see `distillation_objective`."""
        return distillation_objective(outputs, batch, self.axes)

    def counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Count sequences with a teacher, or aligned token groups, if the loss is divided by this count."""
        if self.axes.reduction == "active":
            return {"active": sum(float(b.columns["active"].sum()) for b in batches if "active" in b.columns)}
        if self.axes.support == "aligned":
            return {"groups": sum(float((b.columns["aligned"] > 0).sum()) for b in batches if "aligned" in b.columns)}
        return {}

    def other_models(self, policy: Part, configs: Mapping[str, Any]) -> list[Part]:
        """Return the teacher models for the memory estimate. A teacher that is a copy of the student is included as a
        separate model.
        """
        cfg = self.cfg
        if cfg.teacher_model_kind in ("base", "ema") and policy.peft_config is None:
            return [replace(policy, role="teacher", trained=False)]
        dtype = dict(cfg.teacher_model_init_kwargs or {}).get("dtype", "auto")
        parts = []
        for name, config in configs.items():
            if name == "teacher" or name.startswith("teacher "):
                teacher_dtype = named_dtype(config.dtype or torch.float32 if dtype == "auto" else dtype)
                parts.append(Part(name, config, "causal", teacher_dtype, trained=False))
        return parts
