"""What trainers on pairs watch: the reference at the start, a reward model's opinion, and margins on second sight."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn

from posttrain.algorithms.input_rows import note_suspects
from posttrain.checks.margins import AGREEMENT_CODES, SecondSight, check_agreement, check_second_sight
from posttrain.checks.preference import PreferenceHealth, reference_mismatch
from posttrain.checks.preflight import Preflight
from posttrain.data.formats import maybe_convert_to_chatml
from posttrain.data.pairs import maybe_extract_prompt
from posttrain.errors import ConfigError
from posttrain.losses.reduce import sequence_lengths
from posttrain.models import parallel
from posttrain.types import Batch, Finding, LossTerms, ModelOutputs

__all__ = ["ROW_NUMBER", "PairHealthMixin"]

logger = logging.getLogger(__name__)

ROW_NUMBER = "row_number"  # Column of the prepared training set, where the run will meet its pairs more than once.
JUDGED = 512  # Pairs that a reward model is shown.
EXCERPT = 200  # Characters of a text in suspect_pairs.jsonl.
Pair = tuple[int, Any, Any, Any]  # Number, prompt, chosen, rejected.


class PairHealthMixin:
    """The part of `PreferenceTrainer` that asks whether chosen answers are really better."""

    branches: ClassVar[tuple[str, ...]]
    compared: ClassVar[bool]
    accelerator: Any
    args: Any
    model: nn.Module
    preflight: Preflight
    processing_class: Any
    state: Any
    train_dataset: Any
    _raw: Any
    _begun = False
    _own_reference = True

    def watch_pairs(self, ref_model: Any) -> None:
        """Begin with nothing seen."""
        self.health, self.sight = PreferenceHealth(), SecondSight()
        self._own_reference = ref_model is None
        self._met: list[tuple[int, Tensor, Tensor]] = []

    # A reward model's opinion ------------------------------------------------------------------------------------

    def check_data(self) -> None:
        """As every trainer's; then the reward model that ``pair_reward_model`` names is shown up to 512 pairs."""
        super().check_data()  # type: ignore[misc]
        if self.args.pair_reward_model is None or not self.preflight.active:
            return
        pairs = list(itertools.islice(self._text_pairs(), JUDGED))
        with self.preflight.looking("data", AGREEMENT_CODES):
            mine = parallel.run_and_share(lambda: self._scores(pairs), self.accelerator)
            scores = dict(parallel.all_gather_objects(mine, self.accelerator))
            found = check_agreement(scores, str(self.args.pair_reward_model))
            self.tell([found])  # type: ignore[attr-defined]
        against = {number for number, (good, bad) in scores.items() if bad > good}
        if self.accelerator.is_main_process:
            rows = [{"row": n, "prompt": _text(p), "chosen": _text(c), "rejected": _text(r)} for n, p, c, r in pairs]
            reason = f"{self.args.pair_reward_model} prefers the rejected answer"
            note_suspects(self.args.output_dir, reason, [row for row in rows if row["row"] in against])

    def _text_pairs(self) -> Iterator[Pair]:
        """Pairs as they were given, spread over the set; of a stream its first ones."""
        raw = self._raw
        if not {"chosen", "rejected"} <= set(raw.column_names or ()):
            raise ConfigError(
                f"pair_reward_model={self.args.pair_reward_model!r} judges columns 'chosen' and 'rejected', and the training "
                f"set has {raw.column_names}. Leave it out, or give pairs."
            )
        if isinstance(raw, datasets.IterableDataset):
            rows: Iterable[tuple[int, Any]] = enumerate(raw)
        else:
            take = min(JUDGED, len(raw))
            rows = ((i, raw[i]) for i in (len(raw) * k // take for k in range(take)))
        for number, row in rows:
            if row["chosen"] and row["rejected"] and row["chosen"] != row["rejected"]:
                parted = maybe_extract_prompt(maybe_convert_to_chatml(row))
                yield number, parted["prompt"], parted["chosen"], parted["rejected"]

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[int, tuple[float, float]]]:
        """Scores of one pair in so many, as there are processes."""
        from posttrain.rewards.model import ModelReward

        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = pairs[rank::world]
        judge = ModelReward(
            self.args.pair_reward_model,
            batch_size=self.args.per_device_eval_batch_size,
            trust_remote_code=self.args.trust_remote_code,
        ).to(self.args.device)
        judge.probe()
        prompts = [prompt for _, prompt, _, _ in mine]
        good, bad = (judge(prompts, [pair[side] for pair in mine]) for side in (2, 3))
        return [(pair[0], scores) for pair, scores in zip(mine, zip(good, bad, strict=True), strict=True)]

    # Margins -----------------------------------------------------------------------------------------------------

    def numbered(self, prepared: Any) -> Any:
        """The prepared training set with a number for each pair, where the run will meet pairs more than once."""
        args = self.args
        if not self.compared or len(self.branches) != 2 or not isinstance(prepared, datasets.Dataset):
            return prepared
        if args.preflight == "off" or getattr(args, "sync_ref_model", False) or not len(prepared):
            return prepared  # Margins against a reference that moves begin anew with each of its moves.
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        epochs = args.max_steps * batch / len(prepared) if args.max_steps > 0 else args.num_train_epochs
        if epochs <= 1 or ROW_NUMBER in prepared.column_names:
            return prepared
        return prepared.add_column(ROW_NUMBER, list(range(len(prepared))))

    def terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """As every trainer; policy and reference are compared before the first update, and margins are remembered."""
        terms, outputs = super().terms(model, batch)  # type: ignore[misc]
        if self.compared and model.training:
            begins, self._begun = not self._begun, True
            if begins and self.state.global_step == 0:
                self._compare_with_reference(terms, outputs, batch)
            if ROW_NUMBER in batch.columns and self.accelerator.is_main_process:
                self._meet(outputs, batch)
        return terms, outputs

    @torch.no_grad()
    def _compare_with_reference(self, terms: LossTerms, outputs: ModelOutputs, batch: Batch) -> None:
        length = sequence_lengths(batch.loss_mask, batch.sequence, batch.num_sequences)
        gap = float((self._log_ratio(outputs, batch).abs() / length).max())
        half = self.accelerator.mixed_precision != "no" or next(self.model.parameters()).dtype != torch.float32
        loss = float(terms.terms.mean()) if self.starts_at_ln_2() else None  # type: ignore[attr-defined]
        with self.preflight.looking("first_batch", ("PT-P001",)):
            found = reference_mismatch(gap, half=half, loss=loss, given=not self._own_reference)
            self.tell([found])  # type: ignore[attr-defined]

    def _log_ratio(self, outputs: ModelOutputs, batch: Batch) -> Tensor:
        """``(S,)`` of policy to reference, summed as the loss sums them."""
        return self.sums(outputs.logp, batch) - self.reference_logp(batch)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _meet(self, outputs: ModelOutputs, batch: Batch) -> None:
        """Keep margins on the device until the next log line: nothing waits for them."""
        chosen, rejected = batch.grouped(self._log_ratio(outputs, batch), 2).unbind(1)
        numbers = batch.grouped(batch.columns[ROW_NUMBER], 2)[:, 0]
        self._met.append((self.state.global_step, numbers, chosen - rejected))

    def signs(self, logs: dict[str, float]) -> Iterable[Finding | None]:
        """What the rewards of pairs say; of margins on second sight, those of the main process's pairs."""
        yield from super().signs(logs)  # type: ignore[misc]
        yield from self.health.read(logs)
        for step, numbers, margins in self._met:
            progress = step / max(int(self.state.max_steps or 0), 1)
            self.sight.see(step, numbers.long().tolist(), margins.tolist(), progress=progress)
        self._met = []
        if self.sight.due():
            found = check_second_sight(list(self.sight.margins.values()))
            if found is not None:
                self._note_margins()
            yield found

    def _note_margins(self) -> None:
        """Write the suspects down; numbers are those of the given set where preparation left nothing out."""
        same = hasattr(self._raw, "__len__") and len(self._raw) == len(self.train_dataset)
        decode, rows = self.processing_class.decode, []
        for number in self.sight.suspects():
            row = self.train_dataset[number]
            texts = {name: decode(row[f"{name}_ids"])[:EXCERPT] for name in ("prompt", *self.branches)}
            margin = self.sight.margins[number]
            rows.append({"row" if same else "prepared_row": number, "margin": round(margin, 4), **texts})
        note_suspects(self.args.output_dir, "its margin stays negative on second sight", rows)


def _text(value: Any) -> str:
    from posttrain.checks.samples import answers_of

    return answers_of(value)[:EXCERPT]
