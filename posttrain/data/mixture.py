"""Loading datasets by name, and mixing several with seeded fractions and splits."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from posttrain.errors import ConfigError, DataError

__all__ = ["DatasetConfig", "DatasetMixtureConfig", "get_dataset", "load_rows"]

logger = logging.getLogger(__name__)

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class DatasetConfig:
    """One member of a mixture.

    Attributes:
        path: Hub id, folder or file.
        name: Configuration on the hub.
        data_dir, data_files: For `datasets.load_dataset`.
        split: Which split.
        columns: Columns to keep; None keeps all.
        fraction: Share of the mixture; all members or none must have one.
        sample: ``head`` takes the first rows of a fraction, ``random`` a seeded choice.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None
    sample: str = "head"


@dataclass
class DatasetMixtureConfig:
    """Several datasets as one."""

    datasets: list[Any] = field(default_factory=list, metadata={"help": "Members: paths, or mappings with path, split, fraction."})
    streaming: bool = field(default=False, metadata={"help": "Load without downloading everything first."})
    test_split_size: float | None = field(default=None, metadata={"help": "Share of rows held out for evaluation."})

    def __post_init__(self) -> None:
        self.datasets = [_member(item) for item in self.datasets]


def _member(item: Any) -> DatasetConfig:
    if isinstance(item, DatasetConfig):
        return item
    if isinstance(item, str):
        return DatasetConfig(item)
    try:
        return DatasetConfig(**item)
    except TypeError as error:
        raise ConfigError(f"a member of datasets cannot be read: {item!r} ({error}). It needs at least a path.") from error


def load_rows(
    path: str,
    *,
    name: str | None = None,
    split: str | None = None,
    data_dir: str | None = None,
    data_files: Any = None,
    streaming: bool = False,
) -> Any:
    """A dataset from the hub, a folder (saved or of files), or one .jsonl, .json, .csv or .parquet file.

    Raises:
        DataError: Nothing is there, or a file cannot be read: the line, or the column, is named.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return _load_file(file, split, streaming)
    if file.is_dir() and (file / "dataset_info.json").is_file() or (file / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(file))
        return loaded[split] if split is not None and isinstance(loaded, dict) else loaded
    if file.is_absolute() and not file.exists():
        raise DataError(f"dataset {path!r} does not exist.")
    try:
        return datasets.load_dataset(path, name, split=split, data_dir=data_dir, data_files=data_files, streaming=streaming)
    except Exception as error:
        where = "as a folder, a file or on the hub" if not datasets.config.HF_HUB_OFFLINE else "locally (offline mode is on)"
        raise DataError(f"dataset {path!r} could not be loaded {where}: {error}") from error


def _load_file(file: Path, split: str | None, streaming: bool) -> Any:
    kind = LOADERS.get(file.suffix)
    if kind is None:
        raise DataError(f"dataset file {str(file)!r} ends in {file.suffix!r}; known are {', '.join(LOADERS)}.")
    if file.suffix == ".jsonl":
        _check_lines(file)
    try:
        loaded = datasets.load_dataset(kind, data_files=str(file), streaming=streaming)
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"dataset file {str(file)!r} cannot be read: {cause}. Check that every row has the same types.") from error
    return loaded["train"] if split is not None else loaded


def _check_lines(file: Path) -> None:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: it is not valid JSON ({error}): {line.strip()[:80]!r}") from error


def get_dataset(mixture: DatasetMixtureConfig, seed: int = 42) -> Any:
    """Load and concatenate the members; with ``test_split_size``, split by ``seed``, the same on every rank.

    With fractions, ``w_i = f_i / sum f`` and ``N = min len_i / w_i``: member i gives ``round(w_i N)`` rows.

    Returns:
        A ``DatasetDict`` with ``train`` and, when asked for, ``test``.

    Raises:
        ConfigError: No member, fractions on some members only, negative or all zero, or with streaming.
        DataError: Members whose columns differ.
    """
    members = mixture.datasets
    if not members:
        raise ConfigError("datasets is empty: a mixture needs at least one member.")
    fractions = _fractions(mixture)
    if mixture.streaming and mixture.test_split_size is not None:
        raise ConfigError("test_split_size needs the whole dataset, and streaming=True. Turn one off.")
    parts = [_load_member(member, mixture.streaming) for member in members]
    if fractions is not None:
        parts = _take_fractions(parts, fractions, members, seed)
    _check_columns(parts, members)
    joined = datasets.concatenate_datasets(parts)
    if mixture.test_split_size is not None:
        return joined.train_test_split(test_size=mixture.test_split_size, seed=seed)
    return (datasets.IterableDatasetDict if mixture.streaming else datasets.DatasetDict)({"train": joined})


def _fractions(mixture: DatasetMixtureConfig) -> list[float] | None:
    given = [member.fraction for member in mixture.datasets]
    if all(f is None for f in given):
        return None
    if any(f is None for f in given):
        raise ConfigError(f"fraction is set on some datasets only: {given}. Set it on all, or on none.")
    if mixture.streaming:
        raise ConfigError("fraction needs the lengths of the datasets, and streaming=True. Turn one off.")
    if any(f < 0 for f in given) or sum(given) == 0:
        raise ConfigError(f"fractions {given} must not be negative, and at least one must be above 0.")
    return [f / sum(given) for f in given]


def _load_member(member: DatasetConfig, streaming: bool) -> Any:
    loaded = load_rows(
        member.path, name=member.name, split=member.split, data_dir=member.data_dir, data_files=member.data_files,
        streaming=streaming,
    )
    return loaded.select_columns(member.columns) if member.columns else loaded


def _take_fractions(parts: list[Any], weights: list[float], members: list[DatasetConfig], seed: int) -> list[Any]:
    total = min(len(part) / w for part, w in zip(parts, weights, strict=True) if w > 0)
    taken = []
    for part, weight, member in zip(parts, weights, members, strict=True):
        count = round(weight * total)
        if member.sample == "random":
            part = part.shuffle(seed=seed)
        elif count < len(part):
            logger.warning("%s: taking the first %d of %d rows; sample='random' takes a seeded choice.", member.path, count, len(part))
        taken.append(part.select(range(count)))
    return taken


def _check_columns(parts: list[Any], members: list[DatasetConfig]) -> None:
    first = set(parts[0].column_names or ())
    for part, member in zip(parts, members, strict=True):
        columns = set(part.column_names or ())
        if columns != first:
            raise DataError(
                f"dataset {member.path!r} has columns {sorted(columns)}, but {members[0].path!r} has {sorted(first)}; they differ "
                f"in {sorted(columns ^ first)}. Choose common ones with columns=[...]."
            )
