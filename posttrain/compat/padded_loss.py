"""Losses and steps that a subclass writes for TRL's ``inputs``: a dict of padded tensors, one sequence a row.

Two classes are put around the class of one trainer (see `posttrain.compat.overrides`): `BeforeUser` turns every `Batch`
into `PaddedInputs` and calls what the subclass overrides, `BehindUser` gives its ``super()`` what TRL's would.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from posttrain.algorithms.sft import SFTTrainer
from posttrain.errors import ConfigError
from posttrain.losses.reduce import Denominators
from posttrain.training.config import PADDED_STEPS, user_override, with_attributes
from posttrain.training.online import OnlineTrainer
from posttrain.types import Batch, ModelOutputs

logger = logging.getLogger(__name__)

IGNORED = -100
if TYPE_CHECKING:
    from posttrain.training.trainer import PostTrainer as Trainer
else:
    Trainer = object


class PaddedInputs(dict):
    """A batch as TRL lays it out, and the `Batch` that it shows.

    Attributes of the batch can be read from it too (``inputs.loss_mask``), so that code for either layout works.

    Attributes:
        batch: One sequence a row.
        order: (R,) row of ``batch`` that each row of the dict shows.
        made: The tensors as they were made, to see what a subclass changed.
    """

    def __init__(self, batch: Batch, order: Tensor, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.batch, self.order, self.made = batch, order, dict(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)


class PaddedOutputs:
    """What ``super().compute_loss(..., return_outputs=True)`` returns: our outputs, and TRL's ``logits`` and ``loss``.

    Attributes:
        loss: The loss that is returned beside it.
        outputs: Ours; its fields can be read from here.
    """

    def __init__(self, loss: Tensor, outputs: ModelOutputs, full: Callable[[], Tensor]) -> None:
        self.loss, self.outputs, self._full = loss, outputs, full

    @functools.cached_property
    def logits(self) -> Tensor:
        """(R, T, V) logits of the padded rows, by another forward pass when they are first read."""
        return self._full()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outputs, name)


def tell_cost(trainer: Any) -> None:
    """Log what a trainer's own loss or step costs.

    Args:
        trainer: Whose class comes between `BeforeUser` and `BehindUser`.
    """
    names = [name for name in PADDED_STEPS if user_override(trainer, name)]
    logger.warning(
        "%s overrides %s: rows are laid out one sequence each, padded, and prompts are not shared, so that it gets TRL's "
        "inputs. That costs time and memory; objective(outputs, batch) keeps the fast layout (docs/hooks.md).",
        type(trainer).__name__,
        ", ".join(names),
    )


def to_padded(batch: Batch, answers: int, kind: Literal["labels", "answers", "rollouts"]) -> PaddedInputs:
    """A batch with one sequence a row as TRL's dict.

    Args:
        batch: One sequence a row.
        answers: Sequences of one dataset row; rows of the dict are all first ones, then all second ones.
        kind: ``"labels"`` for SFT, ``"answers"`` with ``completion_mask``, ``"rollouts"`` with prompts and completions apart.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels`` or ``completion_mask`` (R, T) int64; for rollouts ``prompt_ids``
        and ``prompt_mask`` (R, P), padded on the left, and ``completion_ids``, ``completion_mask``, ``tool_mask``,
        log-probs (R, C) and ``advantages`` (R,) or (R, C). Per-sequence columns (R,) under their names.
    """
    sequence = batch.sequence.max(1).values  # (R,)
    origin = torch.tensor(batch.origin, device=sequence.device)[sequence]  # (R,)
    order = torch.argsort((origin % answers) * (origin.max() + 1) + origin // answers)
    if kind == "rollouts":
        tensors = _rollouts(batch, order)
    else:
        tensors = {"input_ids": batch.input_ids[order], "attention_mask": batch.real[order].long()}
        if kind == "labels":
            tensors["labels"] = tensors["input_ids"].masked_fill(~batch.loss_mask[order], IGNORED)
        else:
            tensors["completion_mask"] = (batch.sequence[order] >= 0).long()
    for name, column in _per_sequence(batch).items():
        tensors.setdefault(name, column[sequence[order]])
    return PaddedInputs(batch, order, tensors)


def _per_sequence(batch: Batch) -> dict[str, Tensor]:
    columns = batch.columns if batch.advantages is None else batch.columns | {"advantages": batch.advantages}
    return {name: column for name, column in columns.items() if column.shape == (batch.num_sequences,)}


def _rollouts(batch: Batch, order: Tensor) -> dict[str, Tensor]:
    """Prompts and completions as tensors of their own, as TRL's GRPO has them."""
    prompt, completion = (batch.real & (batch.sequence < 0))[order], (batch.sequence >= 0)[order]  # (R, T)
    values = {
        "completion_ids": batch.input_ids,
        "tool_mask": batch.loss_mask,
        "old_per_token_logps": batch.old_logp,
        "ref_per_token_logps": batch.ref_logp,
        "sampling_per_token_logps": batch.rollout_logp,
        "advantages": batch.advantages if batch.advantages is not None and batch.advantages.dim() == 2 else None,
    }
    rows = {name: value[order] for name, value in values.items() if value is not None}
    tensors = {
        "prompt_ids": _cut(batch.input_ids[order], prompt, left=True),
        "prompt_mask": _cut(prompt.long(), prompt, left=True),
        "completion_mask": _cut(completion.long(), completion),
    }
    return tensors | {
        name: _cut(row.long() if row.dtype == torch.bool else row, completion) for name, row in rows.items()
    }


def _cut(rows: Tensor, kept: Tensor, *, left: bool = False) -> Tensor:
    """The kept tokens of each row side by side, zeros beyond them: (R, T) to (R, the most that a row keeps)."""
    lengths = kept.sum(1)  # (R,)
    width = int(lengths.max())
    column = torch.arange(width, device=rows.device)
    inside = column >= (width - lengths)[:, None] if left else column < lengths[:, None]  # (R, width)
    return rows.new_zeros(len(rows), width).masked_scatter(inside, rows[kept])


def to_batch(inputs: Any) -> Batch:
    """The batch that TRL's dict shows, with the labels, masks and columns that a subclass changed in it.

    Raises:
        ConfigError: It is no dict that came from here, or tokens were changed: a batch cannot follow.
    """
    if isinstance(inputs, Batch):
        return inputs
    if not isinstance(inputs, PaddedInputs):
        raise ConfigError(
            f"super() got a {type(inputs).__name__} that is not the inputs of this step. Fix: change the dict in place and "
            "pass it on, or call model(**inputs) and compute the loss from its logits (docs/hooks.md)."
        )
    batch, back = inputs.batch, torch.argsort(inputs.order)
    columns = _per_sequence(batch)
    for name, made in inputs.made.items():
        value = inputs.get(name, made)
        if value is made or (value.shape == made.shape and torch.equal(value, made)):
            continue
        if value.shape == made.shape and name == "labels":
            batch = replace(batch, loss_mask=(value[back] != IGNORED) & batch.loss_mask)
        elif value.shape == made.shape and name in columns:
            column = torch.empty_like(columns[name])
            column[batch.sequence.max(1).values] = value[back].to(column.dtype)
            given = {"advantages": column} if name == "advantages" else {"columns": batch.columns | {name: column}}
            batch = replace(batch, **given)
        else:
            raise ConfigError(
                f"inputs[{name!r}] was changed (shape {tuple(made.shape)} to {tuple(value.shape)}) before super(), whose "
                "rows are laid out already: only labels may be ignored, and numbers of a row changed. Fix: override "
                "rows(examples), or call model(**inputs) and compute the loss from its logits (docs/hooks.md)."
            )
    return batch


def _reads(owner: type, method: str, *names: str) -> bool:
    """Whether the body of a method mentions one of some names; True where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, method))))
    except (OSError, TypeError, SyntaxError):
        return True
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    return any(getattr(node, kinds.get(type(node), ""), None) in names for node in ast.walk(tree))


def _shared(whole: Denominators, parts: float) -> Denominators:
    """The counts of one of several equal parts of an optimiser step."""
    named = {name: count / parts for name, count in whole.named.items()}
    return Denominators(whole.tokens / parts, whole.sequences / parts, whole.passes / parts, whole.world_size, named)


class BeforeUser(Trainer):
    """Stands before the subclass: batches become `PaddedInputs` on their way to it."""

    # One dict a micro-batch, as in TRL.
    single_forward_per_microbatch = True

    @property
    def own_loss(self) -> bool:
        """Evaluation goes through the subclass too."""
        return True

    def _choose_layout(self) -> Any:
        return replace(super()._choose_layout(), kind="padded")

    def _shown(self, batch: Batch) -> Any:
        """TRL's inputs of a batch, through the subclass's ``_prepare_inputs``."""
        answers = "answers" if batch.advantages is None else "rollouts"
        inputs = to_padded(batch, self.answers_per_row, "labels" if isinstance(self, SFTTrainer) else answers)
        if isinstance(self, OnlineTrainer):
            inputs["num_items_in_batch"] = torch.tensor(self.denominators.tokens)
        return self._prepare_inputs(inputs) if user_override(self, "_prepare_inputs") else inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The subclass's loss of a batch, scaled so that losses of passes add up; of a dict, as the subclass returns it."""
        if not isinstance(inputs, Batch):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        shown = self._shown(inputs)
        if not self.model.training and user_override(self, "prediction_step"):
            loss = self.prediction_step(model, shown, prediction_loss_only=True, ignore_keys=None)[0]
            return (loss, None) if return_outputs else loss
        passes = self._passes_of_mean
        with with_attributes(
            self, {"denominators": _shared(self.denominators, passes)}
        ):  # What `super()` returns is then a micro-batch's mean.
            result = super().compute_loss(model, shown, return_outputs, num_items_in_batch=self._num_items)
        loss = (result[0] if isinstance(result, tuple) else result) / passes
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    def compute_loss_terms(self, model: nn.Module, batch: Any) -> Any:
        """Also of the dict, for a subclass that calls the method of one of our classes by its name."""
        return super().compute_loss_terms(model, to_batch(batch))

    @property
    def _num_items(self) -> Any:
        """Label tokens of the optimiser step, over all ranks; None where TRL has none to count."""
        return torch.tensor(self.denominators.tokens) if isinstance(self, SFTTrainer) else None

    @property
    def _passes_of_mean(self) -> float:
        """What a loss is divided by: 1 where it is scaled for the whole step already, else its micro-batches."""
        passes = max(self.denominators.passes / self.denominators.world_size, 1.0)
        if user_override(self, "loss_is_scaled_for_ga"):  # As transformers' trainers are told.
            return 1.0 if self.loss_is_scaled_for_ga else passes
        names = (
            "num_items_in_batch",
            "super" if isinstance(self, SFTTrainer) else "current_gradient_accumulation_steps",
        )
        methods = [name for name in ("compute_loss", "_compute_loss") if user_override(self, name)]
        if not methods:
            return 1.0 if isinstance(self, SFTTrainer) else passes
        if not isinstance(self, SFTTrainer | OnlineTrainer):
            return passes
        return 1.0 if any(_reads(user_override(self, name), name, *names) for name in methods) else passes

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The subclass's step over a micro-batch as one dict; where it has none, ours."""
        if not isinstance(inputs, list) or not user_override(self, "training_step") or not inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        (batch,) = inputs
        self._whole, shown = self.denominators, self._shown(batch.to(self.args.device))
        with with_attributes(self, {"denominators": _shared(self.denominators, self._passes_of_mean)}):
            return super().training_step(model, shown, self._num_items)


class BehindUser(Trainer):
    """Stands behind the subclass: its ``super()`` gets TRL's inputs and returns what TRL's would."""

    _whole: Denominators

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's ``compute_loss``: the loss of a micro-batch, through the subclass's ``_compute_loss`` where it has one."""
        if isinstance(inputs, Batch) or not user_override(self, "_compute_loss"):
            return self._own(model, inputs, return_outputs)
        if not isinstance(self, OnlineTrainer):
            return self._compute_loss(model, inputs, return_outputs)
        loss = self._compute_loss(model, inputs)  # TRL's has no outputs here.
        return (loss, None) if return_outputs else loss

    def _compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        return self._own(model, inputs, return_outputs)

    def _own(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        loss, outputs = super().compute_loss(model, to_batch(inputs), return_outputs=True)
        if not return_outputs:
            return loss
        batch, order = (inputs.batch, inputs.order) if isinstance(inputs, PaddedInputs) else (inputs, slice(None))

        def full() -> Tensor:
            mask = batch.real[order].long()
            return model(input_ids=batch.input_ids[order], attention_mask=mask, use_cache=False).logits

        return loss, PaddedOutputs(loss, outputs, full)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's ``training_step`` of one dict: forward, backward, the detached loss."""
        if not isinstance(inputs, dict):
            return super().training_step(model, inputs, num_items_in_batch)
        with with_attributes(self, {"denominators": self._whole}):
            return super().training_step(model, [to_batch(inputs)])

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's ``prediction_step``: loss, and unless ``prediction_loss_only`` logits and labels of the padded rows."""
        with torch.no_grad(), self.compute_loss_context_manager():
            result = self.compute_loss(model, inputs, return_outputs=not prediction_loss_only)
        if prediction_loss_only:
            return result.detach(), None, None
        loss, outputs = result
        return loss.detach(), outputs.logits, inputs.get("labels", inputs.get("completion_mask"))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # On the device already.
