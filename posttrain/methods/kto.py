"""KTO: train on answers labeled good or bad. Each answer is compared with a baseline, which is computed from answers to
other prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from posttrain.errors import ConfigError
from posttrain.fields import NonNegativeFloat, config, option
from posttrain.losses.reduce import row_terms
from posttrain.losses.unpaired import KTO_LOSSES
from posttrain.methods.config import PictureConfig
from posttrain.methods.preference import (
    JUDGED,
    AnswerMethod,
    ComparedConfig,
    judged_metrics,
)
from posttrain.types import Batch, LossTerms, ModelOutputs, Row, State

logger = logging.getLogger(__name__)


@config
class KTOConfig(PictureConfig, ComparedConfig):
    """Arguments of `KTOTrainer`, which trains on answers with the label good or bad."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = option(
        "kto",
        "Loss. 'kto': compares the log-ratio of each answer with a baseline, the mean log-ratio of answers to other prompts "
        "(arXiv:2402.01306). It needs at least 2 rows per device, and the baseline is less noisy with 4 or more. "
        "'apo_zero_unpaired': compares the log-ratio of each answer with 0 (arXiv:2408.06266). It needs no second forward "
        "pass for the baseline.",
    )
    desirable_weight: NonNegativeFloat = option(
        1.0,
        "Weight of good answers, at least 0. If the numbers of good and bad answers differ, set desirable_weight or "
        "undesirable_weight so that (desirable_weight x number of good answers) / (undesirable_weight x number of bad "
        "answers) is between 1 and 1.33. If the ratio is outside this range, a warning shows suitable values.",
    )
    undesirable_weight: NonNegativeFloat = option(1.0, "Weight of bad answers, at least 0. See desirable_weight.")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"train": int(self.per_device_train_batch_size), "eval": self.per_device_eval_batch_size}
        for kind, size in sizes.items():
            if size < self.least_batch_size:
                raise ConfigError(
                    f"per_device_{kind}_batch_size={size} is too small for loss_type='kto', whose baseline needs answers to "
                    f"other prompts. Fix: set per_device_{kind}_batch_size to at least 2."
                )

    @property
    def least_batch_size(self) -> int:
        """Minimum value of ``per_device_train_batch_size``. The minimum is 2 for the loss 'kto', because its baseline needs
        answers to other prompts.
        """
        return 2 if self.loss_type == "kto" else 1


def partners(rows: Sequence[Row]) -> list[int | None]:
    """Return the index of another row with a different prompt for each row, or None if there is no such row.

    The partner of each row is the row k positions earlier. The same k is used for all rows: the smallest k for which the
    partner of every row has a different prompt. If no such k exists, a partner is searched for each row separately.
    """
    n = len(rows)
    prompts = [tuple(row.prompt_ids) for row in rows]
    for shift in range(1, n):
        if all(prompts[i] != prompts[i - shift] for i in range(n)):
            return [(i - shift) % n for i in range(n)]
    return [next(((i - s) % n for s in range(1, n) if prompts[i] != prompts[i - s]), None) for i in range(n)]


def mismatched(example: dict[str, Any], ids: Sequence[int], limit: int | None) -> Row:
    """Create a row from a prompt and the answer to another prompt, truncated to ``max_length``."""
    prompt = list(example["prompt_ids"])
    answer = list(ids) if limit is None else list(ids[: max(1, limit - len(prompt))])
    logps = example.get("ref_KL_logps")
    return Row(prompt, [answer], [[1] * len(answer)], {} if logps is None else {"ref_logps": [float(logps)]})


def fixed_partners(prompts: Sequence[Sequence[int]], seed: int) -> list[int | None]:
    """Return the index of a partner row with another prompt for each dataset row, or None if there is no such row.

    The answer of the partner is used for the baseline. The result does not depend on how rows are batched.

    Rows are grouped by prompt in random order. The partner of a row is k positions later, where k is the largest number of
    rows with the same prompt. If no prompt has more than half of the rows, every partner has another prompt, and each answer
    is used once.

    >>> fixed_partners([[1], [1], [2], [2]], seed=0) in ([2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 1, 0], [3, 2, 0, 1])
    True
    """
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in order:
        groups.setdefault(tuple(prompts[index]), []).append(index)
    flat = [index for group in groups.values() for index in group]
    shift = max(map(len, groups.values()), default=0)
    rest = [index for group in groups.values() if len(group) < shift for index in group]
    partners: list[int | None] = [None] * len(flat)
    for place, index in enumerate(flat):
        other = flat[(place + shift) % len(flat)]
        if tuple(prompts[other]) != tuple(prompts[index]):
            partners[index] = other
        # If a prompt has more than half of the rows, the answers to other prompts are reused in turn.
        elif rest:
            partners[index] = rest[place % len(rest)]
    return partners


class KTO(AnswerMethod[KTOConfig]):
    """Kahneman-Tversky optimization: compare each answer's log-ratio with the mean log-ratio of answers to other prompts.

    `State.own` is the baseline z0 of the optimizer step, which is a scalar tensor without a gradient.

    Reference: KTO, arXiv:2402.01306.
    """

    config_class = KTOConfig
    traits = replace(JUDGED, reads_images=True)
    judged = True
    branches = ("completion",)
    reference_columns = ("ref_logps",)
    keep = ("label", "KL_completion_ids", "ref_KL_logps")

    def start(self) -> torch.Tensor:
        """Return 0, the baseline before the first step."""
        return torch.zeros(())

    def objective(self, outputs: ModelOutputs, batch: Batch, state: State) -> LossTerms:
        """Compute the weighted loss of each answer, averaged over the answers of the optimizer step."""
        cfg = self.cfg
        assert outputs.logp is not None
        logp = self.sums(outputs.logp, batch)
        ratio, good = logp - self.reference_logp(batch), batch.columns["label"] > 0.5
        values = {"log_ratio": ratio, "desirable": good, "baseline": state.own}
        weights = {"desirable_weight": cfg.desirable_weight, "undesirable_weight": cfg.undesirable_weight}
        terms = KTO_LOSSES[cfg.loss_type](values, beta=cfg.beta, **weights)
        metrics = judged_metrics(outputs, batch, cfg.beta * ratio, logp, good)
        return row_terms(batch, terms, metrics=metrics)
