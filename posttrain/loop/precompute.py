"""Cached log-probs of a frozen reference model. Log-probs are computed once and stored under a hash of all their inputs.

With ``precompute_ref_log_probs``, the log-probs are computed before training and stored in a file for later runs. Otherwise,
they are computed when a row is first used, and cached for later epochs and evaluations.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor

from posttrain import __version__
from posttrain.data.forest import to_rows
from posttrain.errors import ConfigError
from posttrain.loop.run import Run
from posttrain.metrics import mean
from posttrain.models import parallel
from posttrain.models.architecture import attention_name, config_of, text_of
from posttrain.models.forward import forward
from posttrain.models.reference import (
    Reference,
    fingerprint,
    forward_settings,
    hash_frozen,
    hash_module,
    hash_vocabulary,
)
from posttrain.types import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)

FORMAT = 1  # Version of the cache format. Increase it when the same inputs give different values.
LOCK_WAIT = 30 * 60  # Maximum number of seconds to wait for another run that is computing the same values.


def precomputed_logps(
    run: Run,
    dataset: AnyDataset,
    reference: Reference | None,
    columns: Sequence[str],
    *,
    name: str,
    batches_of: Callable[[list[dict[str, Any]]], list[Batch]],
) -> Any:
    """Add one column per branch to the dataset. A column contains the summed reference log-prob of each answer. If all
    columns exist, return the dataset unchanged.

    Args:
        run: Run whose layout, precision and model are used.
        dataset: A prepared ``Dataset``.
        reference: Reference model. None: the policy in its current state.
        columns: Names of the columns, one per branch.
        name: Name of the dataset, used in messages.
        batches_of: Function that converts examples to batches, with ``len(columns)`` sequences per example.

    Raises:
        ConfigError: The dataset is a stream.
    """
    if set(columns) <= set(dataset.column_names or ()):
        return dataset
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"precompute_ref_log_probs=True needs a dataset with a length, but the dataset {name!r} is a stream. "
            "Set it to False."
        )
    path = _cache(run, dataset, reference, columns)
    shape = (len(dataset), len(columns))
    with _one_at_a_time(path, run.accelerator):
        values = _kept(path, shape, run.accelerator)
        if values is not None:
            logger.info("%s dataset: reading reference log-probs from %s.", name, path)
        else:
            values = _compute(run, dataset, reference, len(columns), batches_of)
            if run.accelerator.is_main_process:
                _keep(path, values)
    for index, column in enumerate(columns):
        dataset = dataset.add_column(column, values[:, index].tolist())
    return dataset


@contextmanager
def _one_at_a_time(path: Path, accelerator: Accelerator) -> Iterator[None]:
    """Acquire a lock, so that only one of several runs computes the values. After a timeout, continue without the lock."""
    if not accelerator.is_main_process:
        yield
        return
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=LOCK_WAIT)
    except (filelock.Timeout, NotImplementedError, OSError) as error:
        logger.warning(
            "%s could not be locked (%s). Another run may compute the same values.", path, type(error).__name__
        )
    try:
        yield
    finally:
        lock.release()


def _kept(path: Path, shape: tuple[int, int], accelerator: Accelerator) -> np.ndarray | None:
    """Return the cached values, or None if no values are cached. All ranks get the same result. Only the main process reads
    the file, because ranks may not share a disk.
    """
    cached = None
    if accelerator.is_main_process and path.is_file():
        try:
            cached = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            logger.warning("%s cannot be read (%s). Its values are computed again.", path, type(error).__name__)
    cached = None if cached is None or cached.shape != shape else cached
    return parallel.broadcast_object(cached, accelerator)


def _keep(path: Path, values: np.ndarray) -> None:
    """Write the file under a temporary name and rename it, so that other processes never read a partial file."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.save(file, values)
        os.replace(part, path)
    # Only log a warning. This run has the values in memory, and the next run will compute them again.
    except OSError as error:
        logger.warning(
            "%s could not be written (%s). The run continues without this cache file.", path, error.strerror or error
        )
        part.unlink(missing_ok=True)


def _cache(run: Run, dataset: datasets.Dataset, reference: Reference | None, columns: Sequence[str]) -> Path:
    """Return the path of the cache file. Its name is a hash of all inputs of the cached log-probs."""
    model = run.model if reference is None or reference.copy is None else reference.copy
    adapter = None if reference is None else ("disabled" if reference.adapter is None else reference.adapter)
    key = {
        "format": FORMAT,
        "library": __version__,
        "template": run.tokenizer.chat_template,
        "vocabulary": hash_vocabulary(run.tokenizer),
        "data": dataset._fingerprint,
        "weights": hash_module(model),
        "forward": forward_settings(model),
        "adapter": adapter,
        "columns": list(columns),
        "precision": run.accelerator.mixed_precision,
        "attention": attention_name(text_of(config_of(model))),
        "layout": run.layout.kind,
        "options": run.method.reference_key(),
    }
    return Path(datasets.config.HF_DATASETS_CACHE) / "posttrain_reference" / f"{fingerprint(**key)}.npy"


def _compute(
    run: Run,
    dataset: datasets.Dataset,
    reference: Reference | None,
    branches: int,
    batches_of: Callable[[list[dict[str, Any]]], list[Batch]],
) -> np.ndarray:
    """Compute the reference log-prob of each answer. Return a tensor ``(rows, answers per row)``. The rows are distributed
    over ranks.
    """
    accelerator, args = run.accelerator, run.args
    size = args.precompute_ref_batch_size or args.per_device_train_batch_size
    mine = list(range(accelerator.process_index, len(dataset), accelerator.num_processes))
    # All ranks must run the same number of steps, because a forward pass may be a collective operation.
    steps = -(-len(dataset) // (size * accelerator.num_processes))
    sums: list[tuple[int, list[float]]] = []
    for step in range(steps):
        indices = mine[step * size : (step + 1) * size]
        examples = [dataset[i] for i in indices or mine[:1] or [0]]
        values = torch.zeros(len(examples) * branches, dtype=torch.float64)
        for batch in batches_of(examples):
            batch = batch.to(args.device)
            with run.inference() as policy:
                context = nullcontext(policy) if reference is None else reference.active(policy)
                with context as model:
                    logp = forward(model, batch, chunk_size=args.logits_chunk_size).logp
            values[torch.tensor(batch.origin)] = run.method.sums(logp, batch).double().cpu()
        rows = values.view(-1, branches).tolist()
        sums += list(zip(indices, rows, strict=False))
    gathered = dict(parallel.all_gather_objects(sums, accelerator))
    return np.array([gathered[i] for i in range(len(dataset))], dtype=np.float32)


# Cache by row --------------------------------------------------------------------------------------------------------


def row_names(batch: Batch) -> list[bytes]:
    """Return one cache key per row, in the order of ``batch.origin``. A key is a hash of the row's ids, masks and
    images.

    The list is empty if the log-probs depend on further inputs, or if the rows already contain reference log-probs.
    """
    if batch.model_kwargs or "ref_logps" in batch.columns:
        return []
    texts = (repr((row.prompt_ids, row.completions, row.loss_masks, row.pictures)) for row in to_rows(batch))
    return [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]


def with_reference(run: Run, batch: Batch, *, own: bool = True) -> Batch:
    """Compute the reference log-probs of a batch. Return the batch with the log-probs in ``ref_logp``, and with their sums.
    The reference runs in eval mode and with the precision of training.

    Args:
        run: Run of a method that compares the policy with a reference.
        batch: Batch of one forward pass. A batch that already contains reference sums is returned unchanged.
        own: Whether a run without a reference model may use the policy before its first update as the reference.
    """
    if "ref_logps" in batch.columns or (run.reference is None and (not own or run.progress.state.global_step)):
        return batch
    batch = batch.to(run.args.device)
    active = nullcontext if run.reference is None else run.reference.active
    with run.inference() as policy, active(policy) as reference:
        logp = forward(reference, batch, chunk_size=run.args.logits_chunk_size).logp
    assert logp is not None
    return replace(batch, ref_logp=logp, columns=batch.columns | {"ref_logps": run.method.sums(logp, batch)})


def log_ratios(run: Run, batches: list[Batch]) -> list[Tensor]:
    """Compute the log-ratio of policy and reference for each sequence, without gradients. All ranks must call this function.

    Args:
        run: Run of a method that compares the policy with a reference.
        batches: Batches of this rank, with the log-probs of the reference. The list may be empty.

    Returns:
        One tensor ``(S,)`` per batch, where S is the number of sequences.
    """
    ratios = []
    for source, counts in parallel.in_step(batches, run.accelerator, run.spare_batch):
        batch = source.to(run.args.device)
        with run.inference() as policy:
            logp = forward(policy, batch, chunk_size=run.args.logits_chunk_size).logp
        if counts:
            ratios.append(run.method.sums(logp, batch) - run.method.reference_logp(batch))
    return ratios


def with_references(
    run: Run, batches: list[Batch], mode: str, kept: ReferenceSums | None, refer: Callable[[Run, Batch], Batch]
) -> list[Batch]:
    """Add reference log-probs to batches. Cached sums are used if all rows of a batch are in the cache. Otherwise, the
    reference log-probs are computed. This is a collective operation.

    Args:
        run: Run of a method that compares the policy with a reference.
        batches: Batches of this rank. The list may be empty.
        mode: ``train`` or ``eval``. Selects the log window.
        kept: Cache with sums of the same reference. None: all log-probs are computed.
        refer: `with_reference`, or a function of a subclass that replaces it.
    """
    names = [[] if kept is None else row_names(batch) for batch in batches]
    hits = [None if kept is None else kept.known(*about) for about in zip(batches, names, strict=True)]
    new = [batch for batch, hit in zip(batches, hits, strict=True) if hit is None]
    ran = parallel.in_step(new, run.accelerator, run.spare_batch)
    computed = [miss for miss, counts in [(refer(run, miss), counts) for miss, counts in ran] if counts]
    if kept is not None and batches:
        unknown = [its for its, hit in zip(names, hits, strict=True) if hit is None]
        for batch, its in zip(computed, unknown, strict=True):
            kept.add(batch, its)
        rows = sum(batch.num_sequences for batch in batches)
        share = sum(batch.num_sequences for batch in hits if batch is not None) / rows
        run.log({"reference/kept": mean(share, weight=rows)}, mode)
    rest = iter(computed)
    return [next(rest) if hit is None else hit for hit in hits]


def prepare_references(
    run: Run,
    inputs: list[Any],
    micro_batches: list[list[Batch]],
    mode: str,
    *,
    kept: Mapping[str, ReferenceSums],
    refer: Callable[[Run, Batch], Batch],
) -> list[list[Batch]]:
    """Return the micro-batches with the reference values that the loss needs; see `Hooks.prepare`.

    Args:
        run: Run of a method that compares the policy with a reference.
        inputs: Items of the data loader, which are not used.
        micro_batches: Batches of each micro-batch.
        mode: ``train`` or ``eval``.
        kept: Caches of reference sums by mode (``train``, ``eval``), for rows that are used more than once.
        refer: `with_reference`, or a function of a subclass that replaces it.
    """
    sums = kept.get(mode) if mode == "eval" or run.progress.state.num_train_epochs > 1 else None
    sums = None if sums is None or run.reference is None else sums.of(run.reference)
    return [with_references(run, batches, mode, sums, refer) for batches in micro_batches]


class ReferenceSums(transformers.TrainerCallback):
    """Caches the summed reference log-probs of each row, so that later epochs and evaluations do not compute them again.

    A row that is truncated, collated or paired differently has a different key. The cache is cleared if the weights of the
    reference change, or if an option changes that affects the values. At the beginning of an epoch, ranks exchange their
    values.

    Args:
        run: Run with the method, precision and ranks.

    Attributes:
        sums: Maps the key of a row to the summed log-probs of its answers, stored as float32 bytes.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.sums = run, dict[bytes, bytes]()
        self._new: list[bytes] = []  # Keys of values that the other ranks do not have yet.
        self._key = ""
        # Reference model of the cached sums. After sums were loaded from a file, it is None until `of` is called.
        self._reference: Reference | None = None

    def of(self, reference: Reference) -> ReferenceSums:
        """Return this cache for the given reference model. If it contains sums of another reference, clear it first."""
        model = reference.policy if reference.copy is None else reference.copy
        about = {"adapter": reference.adapter, "precision": self.run.accelerator.mixed_precision}
        key = fingerprint(weights=hash_frozen(model), options=self.run.method.reference_key(), **about)
        # Compare the objects, too. Two references with the same weights can compute different forward passes.
        if key != self._key or self._reference not in (None, reference):
            self.sums, self._new = {}, []
        self._key, self._reference = key, reference
        return self

    def known(self, batch: Batch, names: list[bytes]) -> Batch | None:
        """Return the batch with the cached sums in the column ``ref_logps (S,)``. Return None if the cache does not contain
        all rows of the batch.

        Args:
            batch: Batch of this rank.
            names: Cache keys from `row_names`.
        """
        sums = [self.sums.get(name) for name in names]
        if not sums or None in sums:
            return None
        column = torch.empty(batch.num_sequences)
        order = sorted(range(batch.num_sequences), key=batch.origin.__getitem__)
        column[order] = torch.frombuffer(bytearray(b"".join(filter(None, sums))), dtype=torch.float32)
        return replace(batch, columns=batch.columns | {"ref_logps": column})

    def add(self, batch: Batch, names: list[bytes]) -> None:
        """Store the reference sums of a batch in the cache, under the given keys. Ignore a batch without ``ref_logp``."""
        if batch.ref_logp is None or not names:
            return
        sums = batch.grouped(batch.columns["ref_logps"], batch.num_sequences // len(names))
        self.sums.update(zip(names, (row.tobytes() for row in sums.float().cpu().numpy()), strict=True))
        self._new += names

    def on_epoch_begin(self, args: object, state: transformers.TrainerState, control: object, **_: object) -> None:
        """Exchange new values between all ranks. Nothing is exchanged after a resume in the middle of an epoch, because an
        uninterrupted run would not exchange values there, either.
        """
        if state.epoch is None or not float(state.epoch).is_integer():
            return
        new = [(name, self.sums[name]) for name in self._new]
        self.sums.update(parallel.all_gather_objects(new, self.run.accelerator))
        self._new = []

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that a resumed run uses exactly the same values."""
        return {"key": self._key, "sums": {name.hex(): sums.hex() for name, sums in self.sums.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._key, self._reference = state["key"], None
        self.sums = {bytes.fromhex(name): bytes.fromhex(sums) for name, sums in state["sums"].items()}
        self._new = list(self.sums)
