"""Support for trainer subclasses whose losses or steps read TRL's ``inputs``, a dict of padded tensors with one sequence per
row.

In the method resolution order, the user's class is placed between two classes (see `between`). `BeforeUser` converts every
`Batch` to `PaddedInputs` and calls the user's methods. `BehindUser` makes calls of ``super()`` in these methods behave in
the same way as in TRL.
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
# Names of methods that receive all micro-batches of an optimizer step.
OF_A_STEP = ("get_batch_samples", "_get_num_items_in_batch")
if TYPE_CHECKING:
    from posttrain.loop.trainer import PostTrainer as Trainer
else:
    Trainer = object


class PaddedInputs(dict):
    """A batch as TRL's dict of padded tensors. The dict also contains the original `Batch`.

    Attributes of the original batch can be read from the dict too (``inputs.loss_mask``), so that code for either form
    works.

    Attributes:
        batch: Original batch, with one sequence per row.
        order: ``(R,)`` indices of the rows in ``batch`` from which the R rows of the dict were created.
        made: Copies of the original tensors, which are compared with the dict to detect changes by a subclass.
    """

    def __init__(self, batch: Batch, order: Tensor, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.batch, self.order = batch, order
        self.made = {name: tensor.clone() for name, tensor in tensors.items()}

    def __getattr__(self, name: str) -> Any:
        # Python looks up attributes while an object is being copied, before ``batch`` is set.
        if name.startswith("__") or "batch" not in vars(self):
            raise AttributeError(name)
        return getattr(self.batch, name)

    def __missing__(self, name: str) -> Any:
        fix = ""
        if "chosen" in name or "rejected" in name:
            too = "".join(f", {column!r} too" for column in self.batch.columns if column in self)
            fix = f" Fix: split the tensors in two{too}: the first half of the rows is chosen, the second half is rejected."
        raise KeyError(f"{name!r} is not a key of the inputs; the keys are {sorted(self)}.{fix}")


class PaddedOutputs:
    """Outputs that ``super().compute_loss(..., return_outputs=True)`` returns. This object wraps the model outputs of this
    library and adds the fields ``logits`` and ``loss`` of TRL.

    Attributes:
        loss: The loss that ``compute_loss`` returned.
        outputs: Model outputs of this library. Their fields can be read from the `PaddedOutputs` object too.
    """

    def __init__(self, loss: Tensor, outputs: ModelOutputs, full: Callable[[], Tensor]) -> None:
        self.loss, self.outputs, self._full = loss, outputs, full

    @functools.cached_property
    def logits(self) -> Tensor:
        """``(R, T, V)`` logits of the padded rows. The first access to the property computes the logits with an additional
        forward pass.
        """
        return self._full()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outputs, name)

    def __getitem__(self, name: str | int) -> Any:
        """Return an output by name or index, as in transformers. ``outputs["logits"]`` are the logits, and ``outputs[0]`` is
        the loss.
        """
        if name in ("loss", 0):
            return self.loss
        return self.logits if name in ("logits", 1) else self.__getattr__(str(name))


def log_cost(kind: type) -> None:
    """Log that a user's loss or step is slower than the loss or step of the library.

    Args:
        kind: Class of the trainer, between `BeforeUser` and `BehindUser`.
    """
    names = [name for name in PADDED_STEPS if user_override(kind, name)]
    logger.warning(
        "%s overrides %s, so TRL's inputs are built: each row has one padded sequence, and prompts are not shared. This "
        "costs time and memory. To keep the fast layout, override objective(outputs, batch) instead (docs/hooks.md).",
        kind.__name__,
        ", ".join(names),
    )


def to_padded(batch: Batch, answers: int, kind: Literal["labels", "answers", "rollouts"]) -> PaddedInputs:
    """Convert a batch with one sequence per row to TRL's dict of padded tensors.

    Args:
        batch: Batch with one sequence per row.
        answers: Number of sequences per dataset row. The dict contains the first sequences of all rows, then the second
            sequences, and so on.
        kind: Form of the dict. ``"labels"``: with labels, for SFT. ``"answers"``: with ``completion_mask``. ``"rollouts"``:
            with separate prompts and completions.

    Returns:
        A dict with ``input_ids``, ``attention_mask`` and either ``labels`` or ``completion_mask``. All values are int64
        tensors ``(R, T)``. For rollouts, the dict instead contains tensors ``(R, P)`` ``prompt_ids`` and ``prompt_mask``,
        which are padded on the left. It also contains tensors ``(R, C)`` ``completion_ids``, ``completion_mask``,
        ``tool_mask`` and log-probs, and ``advantages`` as a tensor ``(R,)`` or ``(R, C)``. Per-sequence columns are added as
        tensors ``(R,)`` under their names.
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
    """Split prompts and completions into separate tensors, as in TRL's GRPO."""
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
    """Remove the tokens at which ``kept`` is False from each row of a tensor ``(R, T)``, and pad the rows with zeros. The
    width of the result is the maximum number of remaining tokens in a row.
    """
    lengths = kept.sum(1)  # (R,)
    width = int(lengths.max())
    column = torch.arange(width, device=rows.device)
    inside = column >= (width - lengths)[:, None] if left else column < lengths[:, None]  # (R, width)
    return rows.new_zeros(len(rows), width).masked_scatter(inside, rows[kept])


def to_batch(inputs: object) -> Batch:
    """Return the batch from which TRL's dict was created. Changes of labels and columns by a subclass are transferred to the
    batch.

    Raises:
        ConfigError: The dict was not created by this module, or its tokens were changed.
    """
    if isinstance(inputs, Batch):
        return inputs
    if not isinstance(inputs, PaddedInputs):
        raise ConfigError(
            f"super() got a {type(inputs).__name__} that is not the inputs of this step. Fix: change the dict in "
            "place and pass it on, or call model(**inputs) and compute the loss from the model's logits (docs/hooks.md)."
        )
    batch, back = inputs.batch, torch.argsort(inputs.order)
    if added := [name for name in inputs if name not in inputs.made and "labels" in inputs.made]:
        raise _not_followed(f"inputs has the new keys {added}", "the model gets only the arguments of the batch")
    for name, before in inputs.made.items():
        value = inputs.get(name)
        if name == ITEMS or (value is None and name in batch.columns):
            continue  # The subclass removed the key for model(**inputs).
        changed = f"inputs[{name!r}] was changed from shape {tuple(before.shape)}"
        if not isinstance(value, Tensor) or value.shape != before.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise _not_followed(f"{changed} to {shape}", "the batch is already built from its rows")
        if not torch.allclose(value, before.to(value.dtype), rtol=0.0, atol=0.0, equal_nan=True):
            batch = _follow(batch, name, value[back], before[back], changed)
    return batch


def _follow(batch: Batch, name: str, value: Tensor, before: Tensor, changed: str) -> Batch:
    """Return a copy of the batch with changed labels or a changed column, in the batch's order of rows. Raise an error for
    other changes.
    """
    if name == "labels":
        if not ((value == before) | (value == IGNORED)).all():
            raise _not_followed(f"{changed} to other tokens", f"labels may only be set to {IGNORED}")
        return replace(batch, loss_mask=(value != IGNORED) & batch.loss_mask)
    current = _per_sequence(batch).get(name)
    if current is None:
        raise _not_followed(f"{changed} to other values", "the batch is already built from its rows")
    sequence, column = batch.sequence.max(1).values, torch.empty_like(current)
    column[sequence] = value.to(column.dtype)
    changes = {"advantages": column} if name == "advantages" else {"columns": batch.columns | {name: column}}
    return replace(batch, **changes)


def _not_followed(what: str, why: str) -> ConfigError:
    """Create the error for a change of the dict that cannot be transferred to the batch."""
    return ConfigError(
        f"{what} before super(), which cannot use it: {why}. Labels may only be set to be ignored. Numeric columns may change. "
        "Fix: override rows(examples), or call model(**inputs) and compute the loss from the model's logits (docs/hooks.md)."
    )


def _reads(owner: type, method: str, *names: str) -> bool:
    """Return whether the source code of a method contains one of ``names``. If the source is not available, return True."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, method))))
    except (OSError, TypeError, SyntaxError):
        return True
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    return any(getattr(node, kinds.get(type(node), ""), None) in names for node in ast.walk(tree))


def label_tokens(counts: Denominators, divides: bool) -> Tensor | None:
    """Return the number of tokens with labels in the optimizer step, over all ranks. As in TRL, return None if the loss is
    not divided by this number.
    """
    tokens = counts.tokens
    return torch.tensor(round(tokens) if tokens == round(tokens) else tokens) if divides else None


def with_given_count(inputs: Any, counts: Denominators) -> Denominators:
    """Return the counts by which the loss of a step is divided. In online methods, a subclass can change the number of tokens
    through the dict.
    """
    counted = inputs.made.get(ITEMS) if isinstance(inputs, PaddedInputs) else None
    divisor = inputs.get(ITEMS) if counted is not None else None
    if counted is None or divisor is None or not counted or float(divisor) == float(counted):
        return counts
    return replace(counts, tokens=counts.tokens * float(divisor) / float(counted))


def _shared(whole: Denominators, parts: float) -> Denominators:
    """Divide the counts of an optimizer step by ``parts``, which is the number of micro-batches among which the counts are
    distributed.
    """
    named = {name: count / parts for name, count in whole.named.items()}
    return Denominators(whole.tokens / parts, whole.sequences / parts, whole.passes / parts, whole.world_size, named)


def _call(method: Callable[..., Any], model: nn.Module, inputs: object, items: object, **options: bool) -> Any:
    """Call a subclass's method with only the options that it accepts. For example, transformers before 4.46 had no
    ``num_items_in_batch``.
    """
    arguments, parameters = options | {ITEMS: items}, inspect.signature(method).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    return method(model, inputs, **arguments)


class BeforeUser(Trainer):
    """Class before the user's class in the method resolution order. This class converts batches to `PaddedInputs`."""

    @property
    def own_loss(self) -> bool:
        """Whether the user defines the loss. The value is always True, so that evaluation uses the user's loss too."""
        return True

    def _choose_layout(self, model: nn.Module) -> Any:
        return replace(super()._choose_layout(model), kind="padded")

    # Inputs that the subclass's `training_step` passed to `super()`. None outside of such a call.
    _given: PaddedInputs | None = None

    def _dict(self, batch: Batch) -> PaddedInputs:
        """Convert a batch to TRL's dict of padded tensors."""
        answers = "answers" if batch.advantages is None else "rollouts"
        inputs = to_padded(batch, self.answers_per_row, "labels" if self.method.traits.takes_loss_func else answers)
        if isinstance(self, OnlineTrainer):
            inputs[ITEMS] = torch.tensor(self.denominators.tokens)
            inputs.made[ITEMS] = inputs[ITEMS].clone()
        return inputs

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Call the subclass's `get_batch_samples`, which must call ``super()``, because ``super()`` counts the items of the
        step.

        Raises:
            ConfigError: The subclass's `get_batch_samples` does not call ``super()``.
        """
        before = self.denominators
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples and self.denominators is before:
            raise ConfigError(
                f"{type(self).__name__}.get_batch_samples does not call super().get_batch_samples(...), which counts the items "
                "that the loss is divided by. Fix: change its result, or override get_train_dataloader() to load other rows."
            )
        return samples, count

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the number of floating-point operations of ``inputs``, which may be a dict too."""
        return super().floating_point_ops([inputs.batch] if isinstance(inputs, PaddedInputs) else inputs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the subclass's loss of a batch, scaled so that the losses of several passes can be added. If the input is a
        dict, return the loss unscaled.
        """
        if not isinstance(inputs, Batch):
            return _call(super().compute_loss, model, inputs, num_items_in_batch, return_outputs=return_outputs)
        shown = self._given if self._given is not None else self._dict(inputs)
        if user_override(type(self), "_prepare_inputs"):
            shown = self._prepare_inputs(shown)
        if not self.model.training and user_override(type(self), "prediction_step"):
            loss = self.prediction_step(model, shown, prediction_loss_only=True, ignore_keys=None)[0]
            return (loss, None) if return_outputs else loss
        whole, passes = self.denominators, self._passes_of_mean
        # In training, the subclass was called at the beginning of the step. In evaluation, the subclass's get_batch_samples
        # is not called, as in TRL.
        items = label_tokens(self.denominators, self.method.traits.takes_loss_func)
        with with_attributes(self, {"denominators": _shared(whole, passes)}):
            # If the count is None, `super()` returns the mean over the micro-batch.
            result = _call(super().compute_loss, model, shown, items, return_outputs=return_outputs)
        return (result[0] / passes, *result[1:]) if isinstance(result, tuple) else result / passes

    def as_batch(self, inputs: Any) -> Batch:
        """Return the input as a batch. TRL's dict is accepted too.

        A dict must be accepted, because a subclass may call methods of the library's classes directly.
        """
        return to_batch(inputs)

    @property
    def _passes_of_mean(self) -> float:
        """Divisor of the subclass's loss. The divisor is 1 if the loss is already scaled for the whole step, and otherwise
        the number of micro-batches.
        """
        passes = max(self.denominators.passes / self.denominators.world_size, 1.0)
        if user_override(type(self), "loss_is_scaled_for_ga"):  # A flag of transformers.
            return 1.0 if self.loss_is_scaled_for_ga else passes
        owner = user_override(type(self), "compute_loss")
        if owner is None or not (self.method.traits.takes_loss_func or isinstance(self, OnlineTrainer)):
            return 1.0 if self.method.traits.takes_loss_func else passes
        names = (ITEMS, "super" if self.method.traits.takes_loss_func else "current_gradient_accumulation_steps")
        return 1.0 if _reads(owner, "compute_loss", *names) else passes

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Call the subclass's `training_step` with a micro-batch as one dict. If it is not overridden, call the library's
        method.
        """
        own = user_override(type(self), "training_step")
        if isinstance(inputs, list):
            if not inputs or not own:
                return super().training_step(model, inputs, num_items_in_batch)
            inputs = self._dict(inputs[0].to(self.args.device))
        self._whole = self.denominators
        shared = _shared(self._whole, self._passes_of_mean) if own else self._whole
        with with_attributes(self, {"denominators": shared}):
            return _call(super().training_step, model, inputs, num_items_in_batch)


class BehindUser(Trainer):
    """Class after the user's class in the method resolution order. ``super()`` calls in the user's class reach this class,
    which accepts TRL's inputs and returns TRL's results.
    """

    _whole: Denominators
    _dict: Callable[[Batch], PaddedInputs]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step and the number of tokens with labels. If the subclass reads micro-batches, each
        micro-batch is converted to one dict.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if any(user_override(type(self), name) for name in OF_A_STEP):
            samples = [self._dict(batches[0].to(self.args.device)) if batches else [] for batches in samples]
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        return label_tokens(self.denominators, self.method.traits.takes_loss_func)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss like TRL's ``compute_loss``. The loss is the mean over a micro-batch, or the sum divided by the
        count that the subclass passes.
        """
        batch, counts, padded = (
            to_batch(inputs),
            with_given_count(inputs, self.denominators),
            isinstance(inputs, PaddedInputs),
        )
        if not self.model.training and padded and batch.loss_mask is not inputs.batch.loss_mask:
            # Treat an evaluation batch as one step. Count only the labels that the subclass has kept.
            if num_items_in_batch is not None and float(num_items_in_batch) == counts.tokens:
                num_items_in_batch = None
            counts = replace(counts, tokens=float(batch.num_loss_tokens))
        with with_attributes(self, {"denominators": counts}):
            loss, outputs = super().compute_loss(model, batch, True, num_items_in_batch)
        if not return_outputs:
            return loss
        order = inputs.order if padded else slice(None)

        def full() -> Tensor:
            mask = batch.real[order].long()
            return model(input_ids=batch.input_ids[order], attention_mask=mask, use_cache=False).logits

        return loss, PaddedOutputs(loss, outputs, full)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the forward and the backward pass on one dict, like TRL's ``training_step``. Return the detached loss."""
        if not isinstance(inputs, dict):
            return super().training_step(model, inputs)
        counts = self._whole.over(num_items_in_batch, allowed=self.method.traits.takes_loss_func)
        with with_attributes(self, {"denominators": counts, "_given": inputs}):
            return super().training_step(model, [to_batch(inputs)])

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the loss without gradients, like TRL's ``prediction_step``. Unless ``prediction_loss_only`` is set, return
        the logits and labels of the padded rows as well.
        """
        with torch.no_grad(), self.compute_loss_context_manager():
            result = self.compute_loss(model, inputs, return_outputs=not prediction_loss_only)
        if prediction_loss_only:
            return result.detach(), None, None
        loss, outputs = result
        return loss.detach(), outputs.logits, inputs.get("labels", inputs.get("completion_mask"))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # A Batch is already on the training device.


@functools.cache
def between(kind: type) -> type:
    """Create a class that inherits from `BeforeUser`, the user's class and `BehindUser`, in this order. `BehindUser` comes
    before the library's classes, so that ``super()`` in the user's class calls its methods.
    """
    ours = next(base for base in kind.__mro__ if base.__module__.split(".")[0] == "posttrain")
    behind = type(BehindUser.__name__, (BehindUser, ours), {"__module__": __name__})
    return type(kind.__name__, (BeforeUser, kind, behind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
