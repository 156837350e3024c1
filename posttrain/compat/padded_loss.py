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

from posttrain.errors import ConfigError
from posttrain.loop.build import PADDED_STEPS, user_override
from posttrain.loop.online import OnlineTrainer
from posttrain.loop.run import with_attributes
from posttrain.losses.reduce import Denominators
from posttrain.types import Batch, ModelOutputs

logger = logging.getLogger(__name__)

IGNORED = -100
ITEMS = "num_items_in_batch"
# Hooks that see all micro-batches of an optimiser step.
OF_A_STEP = ("get_batch_samples", "_get_num_items_in_batch")
if TYPE_CHECKING:
    from posttrain.loop.trainer import PostTrainer as Trainer
else:
    Trainer = object


class PaddedInputs(dict):
    """A batch as TRL lays it out, and the `Batch` that it shows.

    Attributes of the batch can be read from it too (``inputs.loss_mask``), so that code for either layout works.

    Attributes:
        batch: One sequence a row.
        order: (R,) row of ``batch`` that each row of the dict shows.
        made: Copies of the tensors as they were made, to see what a subclass changed, in place or not.
    """

    def __init__(self, batch: Batch, order: Tensor, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.batch, self.order = batch, order
        self.made = {name: tensor.clone() for name, tensor in tensors.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batch" not in vars(self):  # As copies are made.
            raise AttributeError(name)
        return getattr(self.batch, name)

    def __missing__(self, name: str) -> Any:
        fix = ""
        if "chosen" in name or "rejected" in name:
            fix = " Fix: split the tensors in two: the first half of the rows is chosen, the second half is rejected."
        raise KeyError(f"{name!r} is not a key of the inputs; the keys are {sorted(self)}.{fix}")


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

    def __getitem__(self, name: str | int) -> Any:
        """As outputs of transformers: ``outputs["logits"]``, and ``outputs[0]`` is the loss."""
        if name in ("loss", 0):
            return self.loss
        return self.logits if name in ("logits", 1) else self.__getattr__(str(name))


def tell_cost(kind: type) -> None:
    """Log what a trainer's own loss or step costs.

    Args:
        kind: Its class, which stands between `BeforeUser` and `BehindUser`.
    """
    names = [name for name in PADDED_STEPS if user_override(kind, name)]
    logger.warning(
        "%s overrides %s: rows are laid out one sequence each, padded, and prompts are not shared, so that it gets TRL's "
        "inputs. That costs time and memory; objective(outputs, batch) keeps the fast layout (docs/hooks.md).",
        kind.__name__,
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
    if added := [name for name in inputs if name not in inputs.made and "labels" in inputs.made]:
        raise _not_followed(f"inputs has {added} that were not in it", "model arguments are those of the batch")
    for name, before in inputs.made.items():
        value = inputs.get(name)
        if name == ITEMS or (value is None and name in batch.columns):
            continue  # Taken out, so that model(**inputs) does not get it.
        changed = f"inputs[{name!r}] was changed from shape {tuple(before.shape)}"
        if not isinstance(value, Tensor) or value.shape != before.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise _not_followed(f"{changed} to {shape}", "its rows are laid out already")
        if not torch.allclose(value, before.to(value.dtype), rtol=0.0, atol=0.0, equal_nan=True):
            batch = _follow(batch, name, value[back], before[back], changed)
    return batch


def _follow(batch: Batch, name: str, value: Tensor, before: Tensor, changed: str) -> Batch:
    """The batch with other labels or another column, rows in its own order; refuses any other change."""
    if name == "labels":
        if not ((value == before) | (value == IGNORED)).all():
            raise _not_followed(f"{changed} to other tokens", f"labels may be set to {IGNORED} alone")
        return replace(batch, loss_mask=(value != IGNORED) & batch.loss_mask)
    known = _per_sequence(batch).get(name)
    if known is None:
        raise _not_followed(f"{changed} to other values", "its rows are laid out already")
    sequence, column = batch.sequence.max(1).values, torch.empty_like(known)
    column[sequence] = value.to(column.dtype)
    changes = {"advantages": column} if name == "advantages" else {"columns": batch.columns | {name: column}}
    return replace(batch, **changes)


def _not_followed(what: str, why: str) -> ConfigError:
    """The error for a change of the dict that our loss, which reads the batch, cannot follow."""
    return ConfigError(
        f"{what} before super(), which cannot follow: {why}. Only labels may be ignored, and numbers of a row changed. Fix: "
        "override rows(examples), or call model(**inputs) and compute the loss from its logits (docs/hooks.md)."
    )


def _reads(owner: type, method: str, *names: str) -> bool:
    """Whether the body of a method mentions one of some names; True where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, method))))
    except (OSError, TypeError, SyntaxError):
        return True
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    return any(getattr(node, kinds.get(type(node), ""), None) in names for node in ast.walk(tree))


def label_tokens(counts: Denominators, divides: bool) -> Tensor | None:
    """Label tokens of the optimiser step over all ranks, where the loss is divided by them; None elsewhere, as in TRL."""
    tokens = counts.tokens
    return torch.tensor(round(tokens) if tokens == round(tokens) else tokens) if divides else None


def _as_said(inputs: Any, counts: Denominators) -> Denominators:
    """The counts of a step, with the tokens that a subclass wrote in the dict of an online method."""
    counted = inputs.made.get(ITEMS) if isinstance(inputs, PaddedInputs) else None
    said = inputs.get(ITEMS) if counted is not None else None
    if counted is None or said is None or not counted or float(said) == float(counted):
        return counts
    return replace(counts, tokens=counts.tokens * float(said) / float(counted))


def _shared(whole: Denominators, parts: float) -> Denominators:
    """The counts of one of several equal parts of an optimiser step."""
    named = {name: count / parts for name, count in whole.named.items()}
    return Denominators(whole.tokens / parts, whole.sequences / parts, whole.passes / parts, whole.world_size, named)


class BeforeUser(Trainer):
    """Stands before the subclass: batches become `PaddedInputs` on their way to it."""

    @property
    def own_loss(self) -> bool:
        """Evaluation goes through the subclass too."""
        return True

    def _choose_layout(self, model: nn.Module) -> Any:
        return replace(super()._choose_layout(model), kind="padded")

    # What a subclass's `training_step` passed on.
    _given: PaddedInputs | None = None

    def _dict(self, batch: Batch) -> PaddedInputs:
        """TRL's inputs of a batch."""
        answers = "answers" if batch.advantages is None else "rollouts"
        inputs = to_padded(batch, self.answers_per_row, "labels" if self.method.traits.takes_loss_func else answers)
        if isinstance(self, OnlineTrainer):
            inputs[ITEMS] = torch.tensor(self.denominators.tokens)
            inputs.made[ITEMS] = inputs[ITEMS].clone()
        return inputs

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The subclass's, which must go through ours: what was drawn is counted there.

        Raises:
            ConfigError: It does not.
        """
        before = self.denominators
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples and self.denominators is before:
            raise ConfigError(
                f"{type(self).__name__}.get_batch_samples does not call super().get_batch_samples(...), which counts what the "
                "loss is divided by. Fix: change what it returns, or override get_train_dataloader() to draw other rows."
            )
        return samples, count

    def floating_point_ops(self, inputs: Any) -> int:
        """Also of a dict."""
        return super().floating_point_ops([inputs.batch] if isinstance(inputs, PaddedInputs) else inputs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The subclass's loss of a batch, scaled so that losses of passes add up; of a dict, as the subclass returns it."""
        if not isinstance(inputs, Batch):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        shown = self._given if self._given is not None else self._dict(inputs)
        if user_override(type(self), "_prepare_inputs"):
            shown = self._prepare_inputs(shown)
        if not self.model.training and user_override(type(self), "prediction_step"):
            loss = self.prediction_step(model, shown, prediction_loss_only=True, ignore_keys=None)[0]
            return (loss, None) if return_outputs else loss
        whole, passes = self.denominators, self._passes_of_mean
        # In training a subclass was asked as the step began; in evaluation it is not asked, as in TRL.
        items = label_tokens(self.denominators, self.method.traits.takes_loss_func)
        with with_attributes(self, {"denominators": _shared(whole, passes)}):
            # What `super()` returns without a count is then a micro-batch's mean.
            result = super().compute_loss(model, shown, return_outputs, num_items_in_batch=items)
        loss = (result[0] if isinstance(result, tuple) else result) / passes
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    def as_batch(self, inputs: Any) -> Batch:
        """Also of the dict, for a subclass that calls the method of one of our classes by its name."""
        return to_batch(inputs)

    @property
    def _passes_of_mean(self) -> float:
        """What a loss is divided by: 1 where it is scaled for the whole step already, else its micro-batches."""
        passes = max(self.denominators.passes / self.denominators.world_size, 1.0)
        if user_override(type(self), "loss_is_scaled_for_ga"):  # As transformers' trainers are told.
            return 1.0 if self.loss_is_scaled_for_ga else passes
        owner = user_override(type(self), "compute_loss")
        if owner is None or not (self.method.traits.takes_loss_func or isinstance(self, OnlineTrainer)):
            return 1.0 if self.method.traits.takes_loss_func else passes
        names = (ITEMS, "super" if self.method.traits.takes_loss_func else "current_gradient_accumulation_steps")
        return 1.0 if _reads(owner, "compute_loss", *names) else passes

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The subclass's step over a micro-batch as one dict; where it has none, ours."""
        own = user_override(type(self), "training_step")
        if isinstance(inputs, list):
            if not inputs or not own:
                return super().training_step(model, inputs, num_items_in_batch)
            inputs = self._dict(inputs[0].to(self.args.device))
        self._whole = self.denominators
        shared = _shared(self._whole, self._passes_of_mean) if own else self._whole
        with with_attributes(self, {"denominators": shared}):
            return super().training_step(model, inputs, num_items_in_batch)


class BehindUser(Trainer):
    """Stands behind the subclass: its ``super()`` gets TRL's inputs and returns what TRL's would."""

    _whole: Denominators
    _dict: Callable[[Batch], PaddedInputs]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """One dict a micro-batch, where the subclass looks at those of a step, and its count of label tokens."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if any(user_override(type(self), name) for name in OF_A_STEP):
            samples = [self._dict(batches[0].to(self.args.device)) if batches else [] for batches in samples]
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        return label_tokens(self.denominators, self.method.traits.takes_loss_func)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's ``compute_loss``: the loss of a micro-batch, or of the count that a subclass divides it by."""
        batch, counts = to_batch(inputs), _as_said(inputs, self.denominators)
        if (
            not self.model.training
            and isinstance(inputs, PaddedInputs)
            and batch.loss_mask is not inputs.batch.loss_mask
        ):
            # An evaluation batch is a step of its own, of the labels that are left.
            if num_items_in_batch is not None and float(num_items_in_batch) == counts.tokens:
                num_items_in_batch = None
            counts = replace(counts, tokens=float(batch.num_loss_tokens))
        with with_attributes(self, {"denominators": counts}):
            loss, outputs = super().compute_loss(model, batch, True, num_items_in_batch)
        if not return_outputs:
            return loss
        order = inputs.order if isinstance(inputs, PaddedInputs) else slice(None)

        def full() -> Tensor:
            mask = batch.real[order].long()
            return model(input_ids=batch.input_ids[order], attention_mask=mask, use_cache=False).logits

        return loss, PaddedOutputs(loss, outputs, full)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's ``training_step`` of one dict: forward, backward, the detached loss."""
        if not isinstance(inputs, dict):
            return super().training_step(model, inputs)
        counts = self._whole.over(num_items_in_batch, allowed=self.method.traits.takes_loss_func)
        with with_attributes(self, {"denominators": counts, "_given": inputs}):
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


@functools.cache
def between(kind: type) -> type:
    """A user's class between `BeforeUser` and `BehindUser`; the latter stands before our classes: its ``super()`` reaches it."""
    ours = next(base for base in kind.__mro__ if base.__module__.split(".")[0] == "posttrain")
    behind = type(BehindUser.__name__, (BehindUser, ours), {"__module__": __name__})
    return type(kind.__name__, (BeforeUser, kind, behind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
