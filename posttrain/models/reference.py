"""The frozen reference policy: adapters switched off, a frozen adapter, or a frozen copy of the given weights."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn

from posttrain import __version__
from posttrain.errors import ConfigError, ModelError
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm, unwrapped
from posttrain.types import Batch

logger = logging.getLogger(__name__)


REF_ADAPTER = "ref"
LAYERS = ("transformer.h.{layer}", "model.decoder.layers.{layer}", "gpt_neox.layers.{layer}", "model.layers.{layer}")


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


@contextmanager
def use_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Activate the adapter ``name`` (None: the bare base model) and restore the previous one, also on an exception."""
    if not _is_peft(model):
        raise ModelError(f"use_adapter needs a peft model, not {type(model).__name__}.")
    if name is None:
        with model.disable_adapter():
            yield
        return
    previous = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(previous)


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every dropout to 0: modules of any kind, and the rates that configs hand to functions.

    An adapter's own dropout stays: it was asked for where the adapter was configured.
    """
    holders: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = module.p if "lora_dropout" in name.split(".") else 0.0
        else:
            holders.append(module)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        holders += [config, config.get_text_config()]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A frozen deep copy in eval mode; the given model is left as it was unless layers are shared.

    Args:
        model: The policy.
        num_shared_layers: Share the embeddings and this many first layers instead of copying them: they are the same tensors,
            and frozen in ``model`` too. None shares nothing.
        pattern: Path of a layer's parameters with ``{layer}`` in it, where the model is of no family known here.

    Raises:
        ModelError: No parameter lies in the first layer that is not shared, so everything would be frozen; sharded parameters.
    """
    shared = [] if num_shared_layers is None else _first_parameters(model, num_shared_layers, pattern)
    inner: Any = model
    patched = inner.__dict__.pop(
        "forward", None
    )  # A patched forward is bound to the original: the copy must not use it.
    try:
        reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    finally:
        if patched is not None:
            inner.forward = patched
    return reference.requires_grad_(False).eval()


def check_reference(given: Any, model: Any) -> None:
    """Refuse, before any weight of the policy is read, a reference that is the policy itself or cannot score answers."""
    if given is model:
        raise ConfigError(
            "ref_model is the model itself, so both would move together. Leave it out to take a frozen copy."
        )
    inner = causal_lm(given) if isinstance(given, nn.Module) else None
    if getattr(inner, "get_output_embeddings", lambda: None)() is None:
        raise ModelError(
            f"ref_model is a {type(inner if inner is not None else given).__name__}, which has no language-model head to score "
            "answers with. Give a causal language model, or leave ref_model out."
        )


def tell_own_checkpoint(model: Any) -> None:
    """Warn where a model that becomes its own reference was loaded from a checkpoint of a run."""
    path = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "")))
    if (path / "trainer_state.json").is_file():
        logger.warning(
            "the model comes from %s, a training checkpoint, and without ref_model it becomes its own reference. To go on "
            "with that run, give its first model and train(resume_from_checkpoint=%r); else pass ref_model.", path, str(path),
        )  # fmt: skip


def _check_vocabulary(model: Any, given: Any) -> None:
    rows, theirs = (m.get_input_embeddings().weight.shape[0] for m in (model, given))
    if rows != theirs:
        raise ModelError(
            f"the reference has a vocabulary of {theirs} and the model one of {rows}: their log-probs cannot be compared. Resize "
            "one of them, or take a reference with the same tokenizer."
        )


def _check_frozen_base(model: Any) -> None:
    """With its adapter off the model is the reference only while everything that is trained belongs to the adapter."""
    biased = [
        name for name, config in model.peft_config.items() if getattr(config, "bias", "none") not in ("none", None)
    ]
    adapters = tuple(f".{name}" for name in model.peft_config)
    own = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(part in f"{name}." for part in (f"{a}." for a in adapters))
    ]
    if biased or own:
        what = f"bias={model.peft_config[biased[0]].bias!r} in its adapter" if biased else f"trained weights {own[:3]}"
        raise ModelError(
            f"the reference would be this model with its adapter off, but {what} move with training. Pass ref_model, or train "
            "adapter weights alone."
        )


def _first_parameters(model: Any, count: int, pattern: str | None) -> list[nn.Parameter]:
    """Parameters before layer ``count``, in the order they are registered."""
    named = list(model.named_parameters())
    if any(hasattr(parameter, "ds_id") for _, parameter in named):
        raise ModelError(
            "the model's parameters are sharded over processes, so its layers cannot be shared. Leave it out."
        )
    for path in (pattern,) if pattern is not None else LAYERS:
        part = re.compile(rf"(^|\.){re.escape(path.replace('{layer}', str(count)))}\.")
        first = next((index for index, (name, _) in enumerate(named) if part.search(name)), None)
        if first is not None:
            break
    else:
        raise ModelError(
            f"num_shared_layers={count}: no parameter of {type(model).__name__} matches {pattern or LAYERS} at layer {count}, so "
            f"the whole model would be frozen. Its parameters are called like {named[len(named) // 2][0]!r}; give pattern with "
            "{layer} where the number is."
        )
    shared = [parameter for _, parameter in named[:first]]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and any(head.weight is parameter for parameter in shared):
        logger.warning("the output head is tied to the shared embeddings, so it is frozen with them.")
    return shared


class Reference:
    """Log-probs under the frozen start of training, by the cheapest way that is exact.

    A new adapter: the base model, adapters off; no second model in memory. A model that came with a trained adapter: a
    frozen copy of that adapter. Otherwise a frozen copy of the **given** weights, which are not always the hub's.

    Args:
        model: The policy.
        fresh_adapter: Whether its adapter is new, so that the base model is where training begins.
        given: Another model that is the reference.
        adapter: Name of the policy's adapter that is the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fresh_adapter: bool = False,
        given: nn.Module | None = None,
        adapter: str | None = None,
    ) -> None:
        self.adapter = adapter if given is None else None
        self.copy: nn.Module | None = None
        model = unwrapped(model)  # Behind DDP's wrapper an adapter would not be seen.
        self.policy: Any = model if _is_peft(model) else None
        if given is not None:
            _check_vocabulary(model, given)
            self.copy = given.requires_grad_(False).eval()
        elif adapter is not None:
            return
        elif self.policy is None:
            self.copy = create_reference_model(model)
        elif fresh_adapter:
            _check_frozen_base(model)
        else:
            self._freeze_adapter(model)

    def _freeze_adapter(self, model: Any) -> None:
        active = model.active_adapter
        model.add_adapter(REF_ADAPTER, copy.deepcopy(model.peft_config[active]))
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                if f".{REF_ADAPTER}." in name or name.endswith(f".{REF_ADAPTER}"):
                    parameter.copy_(parameters[name.replace(f".{REF_ADAPTER}", f".{active}")])
                    parameter.requires_grad_(False)
        model.set_adapter(active)
        self.adapter = REF_ADAPTER

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The model to run while computing reference log-probs; ``policy`` may be wrapped (DDP)."""
        if self.copy is not None:
            yield self.copy
            return
        with use_adapter(self.policy, self.adapter):
            try:
                yield policy
            finally:
                if self.adapter is not None:
                    for name, parameter in self.policy.named_parameters():
                        if f".{self.adapter}" in name:
                            parameter.requires_grad_(False)  # peft re-enables gradients of the adapter it activates.


FORMAT = 1  # Changes when the same inputs would give other numbers.
WAIT = 30 * 60  # Seconds to wait for another run that computes the same.


def hash_module(module: torch.nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all parameters and buffers, sorted by name."""
    return hash_tensors(module.state_dict())


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same of any tensors with names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        value = tensor.detach().cpu()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update((value.float() if value.is_floating_point() else value).contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_vocabulary(tokenizer: Any) -> str | None:
    """SHA-256 over the tokens and their ids, added ones included; None for what has no vocabulary."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def fingerprint(**settings: Any) -> str:
    """One short name for all that numbers depend on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


def precomputed_logps(
    trainer: Any,
    dataset: Any,
    reference: Reference | None,
    columns: Sequence[str],
    *,
    name: str,
    batches_of: Callable[[list[dict[str, Any]]], list[Batch]] | None = None,
) -> Any:
    """Add one column a branch with the summed reference log-probs; columns that are there already are kept.

    Args:
        trainer: Gives rows, layout, precision and the model.
        dataset: A prepared ``Dataset``.
        reference: None takes the policy as it is.
        columns: Names, one a branch.
        name: Of the set, for messages.
        batches_of: Examples to the batches whose log-probs are wanted, ``len(columns)`` sequences an example; None takes the
            trainer's own.

    Raises:
        ConfigError: The dataset is a stream.
    """
    if set(columns) <= set(dataset.column_names or ()):
        return dataset
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"precompute_ref_log_probs=True needs a dataset with a length, and the dataset {name!r} is a stream. Set it to False."
        )
    path = _cache(trainer, dataset, reference, columns)
    shape = (len(dataset), len(columns))
    with _one_at_a_time(path, trainer.accelerator):
        values = _kept(path, shape, trainer.accelerator)
        if values is not None:
            logger.info("%s dataset: reference log-probs are read from %s.", name, path)
        else:
            values = _compute(trainer, dataset, reference, len(columns), batches_of or trainer.batches_of)
            if trainer.accelerator.is_main_process:
                _keep(path, values)
    for index, column in enumerate(columns):
        dataset = dataset.add_column(column, values[:, index].tolist())
    return dataset


@contextmanager
def _one_at_a_time(path: Path, accelerator: Any) -> Iterator[None]:
    """Of several runs that want the same numbers one computes them; a run that waits too long computes them again."""
    if not accelerator.is_main_process:
        yield
        return
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=WAIT)
    except (filelock.Timeout, NotImplementedError, OSError) as error:
        logger.warning("%s is not locked (%s): another run may compute the same.", path, type(error).__name__)
    try:
        yield
    finally:
        lock.release()


def _kept(path: Path, shape: tuple[int, int], accelerator: Any) -> np.ndarray | None:
    """The cached numbers on all ranks, or None on all: the main process alone reads, as disks need not be shared."""
    found = None
    if accelerator.is_main_process and path.is_file():
        try:
            found = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            logger.warning("%s cannot be read (%s): its numbers are computed again.", path, type(error).__name__)
    found = None if found is None or found.shape != shape else found
    return parallel.broadcast_object(found, accelerator)


def _keep(path: Path, values: np.ndarray) -> None:
    """Write under another name, then rename: a reader sees all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.save(file, values)
        os.replace(part, path)
    except OSError as error:  # The numbers are here; only the next run will have to compute them again.
        logger.warning("%s could not be written (%s); nothing else is lost.", path, error.strerror or error)
        part.unlink(missing_ok=True)


def _cache(trainer: Any, dataset: datasets.Dataset, reference: Reference | None, columns: Sequence[str]) -> Path:
    """A file named by everything that moves the numbers."""
    model = trainer.model if reference is None or reference.copy is None else reference.copy
    adapter = None if reference is None else ("disabled" if reference.adapter is None else reference.adapter)
    text = model.config.get_text_config() if hasattr(model, "config") else None
    tokenizer = getattr(trainer, "processing_class", None)
    key = {
        "format": FORMAT,
        "library": __version__,
        "template": getattr(tokenizer, "chat_template", None),
        "vocabulary": hash_vocabulary(tokenizer),
        "data": dataset._fingerprint,
        "weights": hash_module(model),
        "adapter": adapter,
        "columns": list(columns),
        "precision": trainer.accelerator.mixed_precision,
        "attention": getattr(text, "_attn_implementation", None),
        "layout": trainer.layout.kind,
        "options": trainer.method.reference_key(),
    }
    return Path(datasets.config.HF_DATASETS_CACHE) / "posttrain_reference" / f"{fingerprint(**key)}.npy"


def _compute(
    trainer: Any,
    dataset: datasets.Dataset,
    reference: Reference | None,
    branches: int,
    batches_of: Callable[[list[dict[str, Any]]], list[Batch]],
) -> np.ndarray:
    """``(rows, branches)`` sums; ranks share the rows."""
    accelerator, args = trainer.accelerator, trainer.args
    size = args.precompute_ref_batch_size or args.per_device_train_batch_size
    mine = list(range(accelerator.process_index, len(dataset), accelerator.num_processes))
    steps = -(-len(dataset) // (size * accelerator.num_processes))  # Equal on all ranks: a pass may be a collective.
    found: list[tuple[int, list[float]]] = []
    for step in range(steps):
        indices = mine[step * size : (step + 1) * size]
        examples = [dataset[i] for i in indices or mine[:1] or [0]]
        values = torch.zeros(len(examples) * branches, dtype=torch.float64)
        for batch in batches_of(examples):
            batch = batch.to(args.device)
            with trainer.inference() as policy:
                context = nullcontext(policy) if reference is None else reference.active(policy)
                with context as model:
                    logp = forward(model, batch, chunk_size=args.logits_chunk_size).logp
            values[torch.tensor(batch.origin)] = trainer.method.sums(logp, batch).double().cpu()
        rows = values.view(-1, branches).tolist()
        found += list(zip(indices, rows, strict=False))
    gathered = dict(parallel.all_gather_objects(found, accelerator))
    return np.array([gathered[i] for i in range(len(dataset))], dtype=np.float32)
