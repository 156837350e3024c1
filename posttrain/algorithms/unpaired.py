"""What KTO and BCO share: one answer a row, with a label that says whether it is good."""

from __future__ import annotations

import itertools
import logging
from typing import Any, ClassVar

from torch import Tensor

from posttrain.algorithms.preference import CHECKED_ROWS, PreferenceTrainer, logit_metrics
from posttrain.checks.pairs import JUDGED_CODES, check_judged
from posttrain.data.chat import terminal_token_ids
from posttrain.data.formats import extract_and_unpair
from posttrain.errors import DataError
from posttrain.metrics import Metric, mean
from posttrain.types import Batch, ModelOutputs, Row

__all__ = ["JudgedTrainer", "judged_metrics"]

logger = logging.getLogger(__name__)

SORTED = 10  # Batches that one label may fill in a row.
BALANCED = 1.33  # Good answers may weigh this much more than bad ones, in all (KTO, section 4.2).


def judged_metrics(out: ModelOutputs, batch: Batch, rewards: Tensor, logp: Tensor, good: Tensor) -> dict[str, Metric]:
    """Rewards and log-probs by label, sums and counts so that a batch of one label counts for what it has."""
    rewards, logp = rewards.detach(), logp.detach()
    found: dict[str, Metric] = {}
    for name, kept in (("chosen", good), ("rejected", ~good)):
        if bool(kept.any()):
            found[f"rewards/{name}"] = mean(rewards, kept)
            found[f"logps/{name}"] = mean(logp, kept)
            on_side = batch.loss_mask & kept[batch.sequence.clamp_min(0)]
            found |= logit_metrics(out, **{name: on_side})
    found["entropy"] = mean(out.entropy, batch.loss_mask)  # type: ignore[arg-type]
    return found


class JudgedTrainer(PreferenceTrainer):
    """Prompts with one answer and a label each; pairs are taken apart into a good and a bad answer."""

    branches: ClassVar[tuple[str, ...]] = ("completion",)
    reference_columns: ClassVar[tuple[str, ...]] = ("ref_logps",)
    keep: ClassVar[tuple[str, ...]] = ("label",)
    needs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "mean_logit"})

    def prepare(self, dataset: Any, name: str, *, training: bool = False) -> Any:
        """Take pairs apart, tokenise, check labels and their balance."""
        prepared = super().prepare(extract_and_unpair(dataset, self.args.dataset_num_proc), name, training=training)
        if "label" not in (prepared.column_names or ["label"]):
            raise DataError(f"the {name} rows have no 'label'. Give True for good answers and False for bad ones.")
        if hasattr(prepared, "select"):
            labels = prepared["label"][:]
            for index, label in enumerate(labels):
                _as_bool(label, index)
            if training:
                sample = prepared.select(range(min(CHECKED_ROWS, len(prepared))))
                stops = terminal_token_ids(self.processing_class)
                with self.checks.preflight.record_check("data", JUDGED_CODES):
                    self.checks.report(check_judged(self.rows(list(sample)), limit=self.args.max_length, stops=stops))
                self._check_order([bool(label) for label in labels])
                self._check_balance(sum(map(bool, labels)), len(labels))
        return prepared

    def _check_order(self, labels: list[bool]) -> None:
        """Rows in the order of the dataset that are sorted by label give batches of one label."""
        if self.args.train_sampling_strategy != "sequential":
            return
        longest = max((len(list(run)) for _, run in itertools.groupby(labels)), default=0)
        if len(set(labels)) > 1 and longest > SORTED * self.args.per_device_train_batch_size:
            logger.warning(
                "train_sampling_strategy='sequential', and %d rows in a row have the same label, more than %d batches of %d, "
                "which hold nothing to compare. Leave it out, or shuffle the dataset.",
                longest, SORTED, self.args.per_device_train_batch_size,
            )  # fmt: skip

    def _check_balance(self, good: int, total: int) -> None:
        bad = total - good
        if good == 0 or bad == 0:
            logger.warning("all %d labels are %s: there is nothing to compare with.", total, good > 0)
        weights = [getattr(self.args, f"{side}_weight", 1.0) for side in ("desirable", "undesirable")]
        ratio = max(good, 1) * weights[0] / (max(bad, 1) * weights[1])
        if good == bad or 1.0 <= round(ratio, 2) <= BALANCED:
            return
        logger.warning(
            "%d good and %d bad answers, weighted, count %.2f : 1; between 1 and %.2f is advised. Set desirable_weight in "
            "[%.2f, %.2f], or undesirable_weight in [%.2f, %.2f], not both.",
            good, bad, ratio, BALANCED, weights[0] / ratio, BALANCED * weights[0] / ratio,
            weights[1] * ratio / BALANCED, weights[1] * ratio,
        )  # fmt: skip

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """One completion a row, its label a column."""
        rows = super().rows(examples)
        for index, (row, example) in enumerate(zip(rows, examples, strict=True)):
            row.sequence_columns["label"] = [float(_as_bool(example["label"], index))]
        return rows

    def postprocess_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Margins are the difference of two means, over whatever the window holds."""
        if not {"rewards/chosen", "rewards/rejected"} <= set(metrics):
            return metrics
        return metrics | {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


def _as_bool(label: Any, index: int) -> bool:
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise DataError(
        f"row {index}, column 'label': {label!r} must be True or False (0 and 1 are read so). A text is true whatever it says: "
        "convert the column."
    )
