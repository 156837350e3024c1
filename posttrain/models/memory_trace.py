"""Peak memory of one pass through a model, from shapes alone: nothing is computed, and no weight takes memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.models.activations import keep_last_activations, recompute_activations
from posttrain.models.attention import attention_mask
from posttrain.models.heads import ScoreHead, TokenHead, causal_lm, install_token_head
from posttrain.models.value_head import attach_value
from posttrain.types import Batch

__all__ = ["Kind", "Part", "PassPeak", "Shadow", "trace_pass"]

Kind = Literal["causal", "sequence", "token"]


@dataclass(frozen=True)
class Part:
    """One model of a run, as its config describes it.

    Attributes:
        role: What it is for: ``policy``, ``reference``, ``value model``, ``reward model``.
        config: Of transformers.
        kind: Language model, or a classifier of sequences or tokens.
        dtype: Of the weights.
        peft_config: Of an adapter; then nothing else is trained.
        trained: Whether it has gradients and optimiser states.
        bits: Of quantised linear weights, 4 or 8; None: they have ``dtype``.
    """

    role: str
    config: Any
    kind: Kind = "causal"
    dtype: torch.dtype = torch.float32
    peft_config: Any = None
    trained: bool = True
    bits: int | None = None


@dataclass(frozen=True)
class PassPeak:
    """Most bytes that a pass holds beyond weights and what was there before.

    Attributes:
        activations: What layers keep for backward, and what they work with.
        logits: Chunks of logits and their gradients.
        gradients: Weight gradients that exist at that moment, before they are added to earlier ones.
        largest: Of any tensor of the pass.
    """

    activations: int
    logits: int
    gradients: int
    largest: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return self.activations + self.logits + self.gradients


class Shadow:
    """A model whose tensors have shapes and no memory, with the trainer's own head and checkpointing on it.

    Args:
        part: The model to build.
        critic: A second model that goes through every forward with it (PPO's value model).
        value_head: Whether a value head stands on its trunk.
        checkpointing: Whether activations are computed again in backward.
        kept_layers: As `PostTrainingConfig.kept_layers`.
    """

    def __init__(
        self,
        part: Part,
        *,
        critic: Part | None = None,
        value_head: bool = False,
        checkpointing: bool = False,
        kept_layers: int | None = None,
    ) -> None:
        self.part = part
        self.values = value_head or critic is not None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            self.model = _build(part)
            if self.values:
                attach_value(self.model, None if critic is None else _build(critic))
        with self.mode:
            _materialise(self.model)
        self.model.train(part.trained)
        install_token_head(self.model)
        if checkpointing and part.trained:
            recompute_activations(causal_lm(self.model))
            keep_last_activations(self.model, kept_layers)

    def named_sizes(self) -> dict[str, tuple[int, bool]]:
        """Bytes of each parameter, and whether it is trained."""
        bits = self.part.bits
        linear = {f"{n}.weight" for n, m in self.model.named_modules() if isinstance(m, nn.Linear)} if bits else set()
        head = getattr(causal_lm(self.model), "lm_head", None)
        sizes = {}
        for name, p in self.model.named_parameters():
            small = name in linear and not p.requires_grad and (head is None or p is not getattr(head, "weight", None))
            sizes[name] = (p.numel() * bits // 8 if small and bits else p.nbytes, p.requires_grad)
        return sizes


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Initial values of tensors without memory are nothing to wait for."""
    from transformers import initialization

    with initialization.no_init_weights() if hasattr(initialization, "no_init_weights") else nullcontext():
        yield


def _build(part: Part) -> Any:
    import transformers

    classes = {
        "causal": transformers.AutoModelForCausalLM,
        "sequence": transformers.AutoModelForSequenceClassification,
        "token": transformers.AutoModelForTokenClassification,
    }
    config = copy.deepcopy(part.config)
    if part.kind != "causal":
        config.num_labels = 1 if part.kind == "sequence" else 2
    with _no_initialisation():
        model = classes[part.kind].from_config(config, dtype=part.dtype)
    model.tie_weights()
    if not part.trained:
        return model.requires_grad_(False).eval()
    if part.peft_config is not None:
        import peft

        model = peft.get_peft_model(model, copy.deepcopy(part.peft_config))
        model.enable_input_require_grads()
    return model


def _materialise(model: nn.Module) -> None:
    """Tensors of no device become tensors of a CPU that take no memory; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                holder[name] = made[id(tensor)]


@dataclass
class _Meter:
    """Bytes alive by kind, and what they were when there were most."""

    live: dict[str, int] = field(default_factory=lambda: {"activations": 0, "logits": 0, "gradients": 0})
    peak: dict[str, int] = field(default_factory=dict)
    most: int = 0
    total: int = 0
    largest: int = 0

    def add(self, kind: str, size: int) -> None:
        self.largest = max(self.largest, size)
        self.live[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.live)

    def remove(self, kind: str, size: int) -> None:
        self.live[kind] -= size
        self.total -= size


class _Watch(TorchDispatchMode):
    """Counts every storage from its birth to its end."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.meter = _Meter()
        self.vocabulary = vocabulary
        held = [*model.parameters(), *model.buffers()]
        self.seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in held}
        shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad and p.dim() > 1]
        self.weights = {*shapes, *(shape[::-1] for shape in shapes)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        shape, size = tuple(tensor.shape), storage.nbytes()
        kind = "gradients" if shape in self.weights else "activations"
        if len(shape) == 2 and shape[1] == self.vocabulary and kind == "activations":
            kind = "logits"
        self.seen[key] = weakref.finalize(storage, self._gone, key, kind, size)
        self.meter.add(kind, size)

    def _gone(self, key: int, kind: str, size: int) -> None:
        self.seen.pop(key, None)
        self.meter.remove(kind, size)

    def close(self) -> None:
        """Forget what is still alive."""
        for finalizer in self.seen.values():
            if finalizer is not None:
                finalizer.detach()


def trace_pass(
    shadow: Shadow,
    batch: Batch,
    *,
    training: bool = True,
    accumulating: bool = True,
    needs: frozenset[str] = frozenset({"logp"}),
    autocast: torch.dtype | None = None,
) -> PassPeak:
    """What one pass of this batch holds at its fullest moment, operation by operation.

    Args:
        shadow: The model.
        batch: A token forest; its shape and masks count, not its tokens.
        training: Forward and backward; else forward without gradients.
        accumulating: Whether gradients of an earlier pass exist already (they are not counted).
        needs: As `posttrain.models.forward.forward`.
        autocast: Dtype of the computation where it differs from that of the weights.

    Raises:
        Exception: Whatever a model raises that reads values while it runs (a mixture of experts that counts its tokens).
    """
    model = shadow.model
    trained = [p for p in model.parameters() if p.requires_grad]
    config = causal_lm(model).config.get_text_config()
    mask = attention_mask(batch, config, shadow.part.dtype)
    counts = (int(batch.loss_mask.sum()), batch.num_sequences, int((batch.sequence >= 0).sum()))
    with shadow.mode:
        watch = _Watch(model, config.vocab_size)
        # What is added to an earlier gradient is gone then; adding fake tensors in place is nothing autograd does.
        hooks = [p.register_post_accumulate_grad_hook(_forget) for p in trained] if accumulating else []
        compute = torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext()
        try:
            with watch, torch.set_grad_enabled(training), compute:
                loss = _run(shadow, tuple(batch.input_ids.shape), mask, counts, needs)
                if training:
                    loss.backward()
                del loss
        finally:
            watch.close()
            for hook in hooks:
                hook.remove()
            for parameter in trained:
                parameter.grad = None
    peak = watch.meter.peak
    return PassPeak(peak.get("activations", 0), peak.get("logits", 0), peak.get("gradients", 0), watch.meter.largest)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _run(
    shadow: Shadow, shape: tuple[int, ...], mask: Any, counts: tuple[int, int, int], needs: frozenset[str]
) -> Tensor:
    """The forward of `posttrain.models.forward.forward` with counts in place of positions; the sum of what it returns.

    Args:
        shadow: The model.
        shape: Of the batch.
        mask: As the attention backend takes it, with values.
        counts: Loss tokens, sequences, completion tokens.
        needs: Beside the log-probs.
    """
    rows, width = shape
    tokens, sequences, states = counts
    fake = {key: _like(value) for key, value in mask.items()} if isinstance(mask, dict) else _like(mask)
    inputs = {
        "input_ids": torch.zeros(rows, width, dtype=torch.long),
        "attention_mask": fake,
        "position_ids": torch.zeros(rows, width, dtype=torch.long),
        "use_cache": False,
    }
    if shadow.part.kind != "causal":
        place = torch.zeros(sequences if shadow.part.kind == "sequence" else tokens, dtype=torch.long)
        return shadow.model(**inputs, token_head=ScoreHead(place, place))["scores"].sum()
    place = torch.zeros(tokens, dtype=torch.long)
    head = TokenHead(
        place, place, place,
        need_entropy=bool({"entropy", "entropy_grad"} & needs), entropy_grad="entropy_grad" in needs,
        need_correct="correct" in needs, need_mean_logit="mean_logit" in needs, need_logits="logits" in needs,
    )  # fmt: skip
    if shadow.values:
        head.values = _reader(causal_lm(shadow.model), inputs, states)
    result = shadow.model(**inputs, token_head=head)
    parts = [result[name].sum() for name in ("logp", "values", "logits") if result.get(name) is not None]
    return torch.stack(parts).sum()


def _reader(inner: Any, inputs: dict[str, Any], count: int) -> Any:
    place = torch.zeros(count, dtype=torch.long)
    critic = getattr(inner, "value_model", None)
    if critic is None:
        return lambda hidden: inner.v_head(hidden[place, place])[:, 0].float()
    return lambda _: critic(**inputs, token_head=ScoreHead(place, place))["scores"][:, 0]


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.ones(tensor.shape, dtype=tensor.dtype)
