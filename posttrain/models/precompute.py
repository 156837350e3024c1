"""The reference's log-probs of a whole dataset, once, under the precision of training, kept in a cache by what moves them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from posttrain import __version__
from posttrain.errors import ConfigError
from posttrain.models import parallel
from posttrain.models.forward import forward
from posttrain.models.reference import Reference
from posttrain.types import Batch

__all__ = ["hash_module", "hash_vocabulary", "precomputed_logps"]

logger = logging.getLogger(__name__)

FORMAT = 1  # Changes when the same inputs would give other numbers.
WAIT = 30 * 60  # Seconds to wait for another run that computes the same.


def hash_module(module: torch.nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all parameters and buffers, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
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
    """Of several runs that want the same numbers one computes them; who waits too long computes them again."""
    if not accelerator.is_main_process:
        yield
        return
    import filelock

    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=WAIT)
    except (filelock.Timeout, NotImplementedError, OSError) as error:
        logger.warning("%s is not locked (%s): another run may compute the same.", path, type(error).__name__)
    try:
        yield
    finally:
        lock.release()


def _kept(path: Path, shape: tuple[int, int], accelerator: Any) -> np.ndarray | None:
    """The cached numbers on all ranks, or None on all: the main process alone looks, as disks need not be shared."""
    found = None
    if accelerator.is_main_process and path.is_file():
        try:
            with path.open("rb") as file:
                found = np.load(file)["logps"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read (%s): its numbers are computed again.", path, type(error).__name__)
        if found is not None and found.shape != shape:
            found = None
    return parallel.all_gather_objects([found], accelerator)[0]


def _keep(path: Path, values: np.ndarray) -> None:
    """Write under a name of our own, flush, then rename: a reader sees all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, logps=values)
            file.flush()
            os.fsync(file.fileno())
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
        "options": trainer.reference_key(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "posttrain_reference" / f"{digest}.npz"


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
            values[torch.tensor(batch.origin)] = trainer.sums(logp, batch).double().cpu()
        rows = values.view(-1, branches).tolist()
        found += list(zip(indices, rows, strict=False))
    gathered = dict(parallel.all_gather_objects(found, accelerator))
    return np.array([gathered[i] for i in range(len(dataset))], dtype=np.float32)
