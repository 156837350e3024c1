"""Functions that load datasets by path or Hub id, mix several datasets with weights, and split off test rows."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import datasets
import pyarrow as pa
import pyarrow.json
from datasets.exceptions import DatasetNotFoundError
from datasets.packaged_modules.json import json as json_loader
from huggingface_hub.errors import HFValidationError

from posttrain.data.chat import check_unicode
from posttrain.errors import ConfigError, DataError, check_choice, did_you_mean
from posttrain.fields import option
from posttrain.integrations.hub import not_found

logger = logging.getLogger(__name__)


# Loader names of the library `datasets`, by file extension.
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def check_json(file: Path) -> None:
    """Raise an error with the first invalid line of a JSON file that the loader could not read. A .json file that is valid as
    a whole, e.g. one array of objects, is not checked.

    Raises:
        DataError: A line is not valid UTF-8, is not valid JSON, or does not contain an object.
    """
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            json.loads(file.read_text(encoding="utf-8-sig", errors="replace"))
            return
    for _ in _lines([str(file)]):
        pass


def _lines(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON Lines files. The error about an invalid line contains the line's number."""
    for file in files:
        with Path(file).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, f"{file}, line {number}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    shown = line.strip()[:80].decode("utf-8", "replace")
    try:
        # "utf-8-sig" removes the byte-order mark that some editors write at the start of a file.
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: the line is not valid UTF-8 (byte {error.start}: {error.reason}): {shown!r}. Fix: save the file as UTF-8."
        ) from error
    except ValueError as error:
        raise DataError(f"{where}: the line is not valid JSON ({error}): {shown!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {type(row).__name__}: {shown!r}")
    # Only rows with escape sequences are checked, because only an escape sequence can encode a lone surrogate.
    if b"\\u" in line:
        check_unicode(json.dumps(row, ensure_ascii=False), where)
    return row


class TextDates:
    """Replacement for `pyarrow.json` that does not convert text to dates. The JSON loader of ``datasets`` uses it.

    `pyarrow.json` converts a text such as "2024-01-01" to a timestamp. If this text is the expected answer of a row, no
    completion would ever equal it.
    """

    ReadOptions = pyarrow.json.ReadOptions

    @staticmethod
    def read_json(source: IO[bytes], read_options: pyarrow.json.ReadOptions | None = None) -> pa.Table:
        """Read JSON with `pyarrow.json.read_json`. If text was converted to timestamps, read the source a second time with
        these columns as text.
        """
        table = pyarrow.json.read_json(source, read_options=read_options)
        schema = _texts(table.schema)
        if schema.equals(table.schema):
            return table
        source.seek(0)
        options = pyarrow.json.ParseOptions(explicit_schema=schema)
        return pyarrow.json.read_json(source, read_options=read_options, parse_options=options)


def _texts(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_dateless(field.type)) for field in schema])


def _dateless(kind: pa.DataType) -> pa.DataType:
    """Return a type in which all timestamps, including nested timestamps, are replaced with text."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_dateless(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_dateless(field.type)) for field in kind])
    return kind


@contextlib.contextmanager
def _dates_as_text(*, streaming: bool) -> Iterator[None]:
    """Patch the JSON loader inside the context, so that dates remain text. The loader has no option for this behavior. For
    streams, the patch stays active afterwards.
    """
    before = json_loader.paj, json_loader.pandas_read_json
    json_loader.paj, json_loader.pandas_read_json = TextDates, partial(json_loader.pandas_read_json, dtype=False)
    try:
        yield
    finally:
        if not streaming:
            json_loader.paj, json_loader.pandas_read_json = before


def _without_times(loaded: datasets.Dataset | datasets.DatasetDict) -> datasets.Features | None:
    """Return the features of a dataset with text instead of timestamps. Return None if no column has timestamps. Timestamps
    can come from rows that another program has cached.
    """
    part = next(iter(loaded.values())) if isinstance(loaded, dict) else loaded
    if part.info.builder_name != "json" or "timestamp" not in str(part.features):
        return None
    return datasets.Features.from_arrow_schema(_texts(part.features.arrow_schema))


def _parquet_conflict(files: list[Path]) -> str | None:
    """Describe the first column that has different types in two Parquet files, or is missing in one of the two. Number types
    that differ only in the number of bits, such as int32 and int64, are treated as equal.
    """
    import pyarrow.parquet as pq

    if len(files) < 2:
        return None
    try:
        schemas = {file: pq.read_schema(file) for file in files}
    # Skip an invalid file, because the loader raises an error about it later.
    except Exception:
        return None
    first = schemas[files[0]]
    for file, schema in schemas.items():
        for name in sorted({*first.names, *schema.names}):
            left, right = (str(s.field(name).type) if name in s.names else "absent" for s in (first, schema))
            if _kind(left) != _kind(right) and "null" not in (left, right):
                top = os.path.commonpath([files[0].parent, file.parent])
                where = f"{left} in {files[0].relative_to(top)} and {right} in {file.relative_to(top)}"
                return f"column {name!r} is {where}. Fix: use one type in all files."
    return None


def _kind(type_name: str) -> str:
    plain = re.sub(r"\blarge_", "", type_name)
    return re.sub(r"\b(u?int\d+)\b", "int", re.sub(r"\b(halffloat|float|double)\b", "float", plain))


# Columns of a CSV file that are converted to numbers. The values of all other columns remain text.
NUMBERS = ("label", "margin")
SAMPLES = ("head", "random")
# Exceptions of loaders if a dataset exists neither on the Hub nor in the cache.
NOT_FOUND = (OSError, HFValidationError, DatasetNotFoundError)


@dataclass
class DatasetConfig:
    """One dataset of a mixture. On the command line, a string that is not JSON is used as the path."""

    path: str = field(metadata={"help": "Hub id, folder (saved by datasets, or with data files), or single data file."})
    name: str | None = option(None, "Configuration of a Hub dataset.")
    data_dir: str | None = option(None, "Folder inside a Hub dataset.")
    data_files: str | list[str] | dict[str, Any] | None = option(
        None, "Files of a folder or a Hub dataset: a path, a list of paths, or a mapping from splits to paths."
    )
    split: str = option("train", "Split to load. Slices such as 'train[:10%]' are allowed.")
    columns: list[str] | None = option(None, "Names of the columns to keep. None: all columns.")
    fraction: float | None = option(
        None,
        "Weight of this dataset in the mixture, at least 0. Weights are normalized to sum to 1. Set weights for all "
        "datasets of the mixture or for none.",
    )


@dataclass
class DatasetMixtureConfig:
    """Mixture of several datasets. The datasets are concatenated in the order of the list."""

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={
            "help": (
                "Datasets of the mixture. Each is a path, or a mapping with the key path and optionally name, split, columns "
                "and fraction."
            )
        },
    )
    streaming: bool = option(
        False,
        "Read rows when they are needed instead of loading the datasets before training. It cannot be combined with "
        "fractions or a test split, which need the number of rows.",
    )
    test_split_size: float | None = option(
        None, "Fraction of rows that are split off as 'test', above 0 and below 1. None: no test split."
    )
    sample: Literal["head", "random"] = option(
        "head",
        "Which rows of a dataset are used if its fraction requires fewer rows than it has. 'head': the first rows. "
        "'random': a random sample.",
    )

    def __post_init__(self) -> None:
        members = self.datasets if isinstance(self.datasets, list | tuple) else [self.datasets]
        self.datasets = [_member(item) for item in members]
        check_choice("sample", self.sample, SAMPLES)
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ConfigError(
                f"test_split_size={self.test_split_size} must be a fraction of the rows, above 0 and below 1."
            )


def _member(item: object) -> DatasetConfig:
    """Convert a path, a mapping, or the JSON text of a mapping to a `DatasetConfig`. Config files pass JSON text."""
    text = item.path if isinstance(item, DatasetConfig) else item
    if isinstance(text, str) and text.lstrip().startswith("{"):
        try:
            item = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"an entry of datasets begins with a brace but is not valid JSON ({error}): {text!r}."
            ) from error
    if isinstance(item, DatasetConfig):
        return item
    if isinstance(item, str):
        return DatasetConfig(item)
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"an entry of datasets must be a path or a mapping with the key 'path', not {type(item).__name__}: {item!r}."
        )
    keys = [f.name for f in fields(DatasetConfig)]
    for key in item:
        if key not in keys:
            raise ConfigError(
                f"an entry of datasets has the unknown key {key!r}{did_you_mean(key, keys)}. Its keys can be {keys}."
            )
    if "path" not in item:
        raise ConfigError(f"an entry of datasets has no 'path': {dict(item)!r}. Fix: add the key 'path'.")
    return DatasetConfig(**item)


def load_rows(
    path_or_id: str,
    *,
    name: str | None = None,
    split: str | None = None,
    data_dir: str | None = None,
    data_files: Any = None,
    streaming: bool = False,
) -> Any:
    """Load a dataset from the Hub, from a folder, or from one .jsonl, .json, .csv or .parquet file.

    A folder can contain a dataset saved by ``datasets``, or data files.

    With ``HF_HUB_OFFLINE`` or ``HF_DATASETS_OFFLINE``, only local data and the cache are used.

    Args:
        path_or_id: Path or Hub id.
        name: Configuration of a Hub dataset.
        split: Split to load. Slices such as ``train[:100]`` are allowed. None: all splits. A single file has the split
            ``train``.
        data_dir: Same as in ``datasets.load_dataset``. Not allowed for a single file or a saved folder.
        data_files: Same as in ``datasets.load_dataset``. Not allowed for a single file or a saved folder.
        streaming: Whether rows are read only when they are needed. An invalid line then raises an error only when the line is
            read.

    Returns:
        A ``Dataset``, or a ``DatasetDict`` if ``split`` is None. With ``streaming``, an ``IterableDataset`` or
        ``IterableDatasetDict``. If a folder contains one saved ``Dataset``, this dataset is returned even if ``split`` is
        None.

    Raises:
        ConfigError: An option is not allowed for this kind of source.
        DataError: The source or the split does not exist, or a file cannot be read. The error contains the file and, if
            possible, the line or the column.
    """
    file = Path(path_or_id).expanduser()
    saved = file.is_dir() and any((file / mark).is_file() for mark in ("dataset_info.json", "dataset_dict.json"))
    options: dict[str, Any] = {"name": name, "data_dir": data_dir, "data_files": data_files}
    unused = {key: value for key, value in options.items() if value is not None}
    if unused and (saved or file.is_file()):
        kind = "a saved folder" if saved else "one file"
        raise ConfigError(
            f"dataset {path_or_id!r} is {kind}, for which {unused} is not allowed. Fix: remove this option."
        )
    if saved:
        return _load_saved(file, split, streaming)
    if (file.is_absolute() or file.suffix in LOADERS or path_or_id.startswith(".")) and not file.exists():
        beside = [item.name for item in file.parent.iterdir()] if file.parent.is_dir() else []
        near = did_you_mean(file.name, beside)
        raise DataError(f"dataset {path_or_id!r} does not exist{near}. No such path: {file.absolute()}.")
    if file.is_dir() and (conflict := _parquet_conflict(sorted(file.rglob("*.parquet")))):
        raise DataError(f"dataset {path_or_id!r} could not be loaded: {conflict}")
    source = str(file) if file.is_dir() else path_or_id
    tables = [path for path in sorted(file.rglob("*")) if path.suffix in LOADERS] if file.is_dir() else []
    if tables and all(path.suffix == ".csv" for path in tables):
        options["converters"] = _text_columns(tables)
    if file.is_file():
        source, options = _loader_of(file), {"data_files": str(file)}
        if source == "csv":
            options["converters"] = _text_columns([file])
        # Read the file with `_lines`, because its error about an invalid line contains the line number.
        if streaming and file.suffix == ".jsonl" and split in (None, "train"):
            stream = datasets.IterableDataset.from_generator(_lines, gen_kwargs={"files": [str(file)]})
            return stream if split else datasets.IterableDatasetDict({"train": stream})
    try:
        with _dates_as_text(streaming=streaming):
            loaded = datasets.load_dataset(source, split=split, streaming=streaming, **options)
            if not streaming and (features := _without_times(loaded)) is not None:
                loaded = datasets.load_dataset(source, split=split, features=features, **options)
        for part in () if streaming or not file.exists() else loaded.values() if split is None else (loaded,):
            # Validate the data now. Otherwise, invalid UTF-8 would raise an error only when the affected row is read.
            part.data.validate(full=True)
        return loaded
    except Exception as error:
        raise DataError(_failure(path_or_id, file, split, error)) from error


def _text_columns(files: list[Path]) -> dict[str, type]:
    """Return converters with which the CSV loader keeps columns as text. Without converters, the answer 7 would be a number,
    which does not equal the text ``"7"``.
    """
    names: set[str] = set()
    for file in files:
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            names.update(next(csv.reader(lines), ()))
    return {name: str for name in sorted(names) if name not in NUMBERS}


def _failure(path_or_id: str, file: Path, split: str | None, error: Exception) -> str:
    """Return an error message that explains why a dataset could not be loaded. For an invalid line, raise a more specific
    error.
    """
    if not file.exists() and isinstance(error, NOT_FOUND):
        return not_found("dataset", path_or_id, error)
    parts = sorted(file.rglob("*")) if file.is_dir() else [file]
    for part in parts:
        if part.suffix in (".jsonl", ".json") and part.is_file():
            check_json(part)
    cause = str(error.__cause__ or error).strip().rstrip(".")
    if "corresponds to no data" in cause:
        empty = [part.name for part in parts if part.is_file() and not part.read_bytes().strip()]
        cause = f"the files {empty} have no rows" if empty else "the split has no rows"
    rule = "A single file has one split, 'train'" if file.is_file() else "The files of all splits have the same columns"
    hint = f" {rule}, and each column has one type." if file.exists() else ""
    columns = {part.name: _first_keys(part) for part in parts if part.suffix == ".jsonl"}
    if len({tuple(keys) for keys in columns.values() if keys}) > 1:
        cause, hint = "its files have different columns", f" Columns by file: {columns}. Fix: use the same columns."
    return f"dataset {path_or_id!r} could not be loaded{f' (split {split!r})' if split else ''}: {cause}.{hint}"


def _first_keys(file: Path) -> list[str]:
    """Return the column names in the first row of a JSON Lines file."""
    with file.open(encoding="utf-8") as lines:
        row = json.loads(next((line for line in lines if line.strip()), "{}"))
    return sorted(row) if isinstance(row, dict) else []


def _loader_of(file: Path) -> str:
    if file.suffix not in LOADERS:
        raise DataError(f"dataset file {str(file)!r} has extension {file.suffix!r}. Supported: {', '.join(LOADERS)}.")
    if file.stat().st_size == 0:
        raise DataError(f"dataset file {str(file)!r} is empty. Fix: use a file with at least one row.")
    return LOADERS[file.suffix]


def _load_saved(folder: Path, split: str | None, streaming: bool) -> Any:
    loaded = datasets.load_from_disk(str(folder))
    if split is not None:
        loaded = _pick(loaded, split, folder)
    if not streaming:
        return loaded
    if isinstance(loaded, datasets.Dataset):
        return loaded.to_iterable_dataset()
    return datasets.IterableDatasetDict({key: value.to_iterable_dataset() for key, value in loaded.items()})


def _pick(loaded: Any, spec: str, folder: Path) -> Any:
    """Return a split of a saved dataset. Slices and sums of splits are allowed. A single saved ``Dataset`` has the split
    ``train``.
    """
    splits = loaded if isinstance(loaded, dict) else {"train": loaded, str(loaded.split or "train"): loaded}
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({key: len(value) for key, value in splits.items()})
    except (ValueError, AssertionError) as error:
        near = did_you_mean(spec, splits)
        raise DataError(
            f"dataset {str(folder)!r} has no split {spec!r}{near}. Its splits are {sorted(splits)}. ({error})"
        ) from error
    rows = [
        splits[p.splitname].select(range(p.from_ or 0, len(splits[p.splitname]) if p.to is None else p.to))
        for p in parts
    ]
    return rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows)


def get_dataset(mixture_config: DatasetMixtureConfig, seed: int = 42) -> Any:
    r"""Load the datasets of a mixture and concatenate them. If ``test_split_size`` is set, split off test rows.

    All ranks get the same test split. With fractions ``f``, dataset i contributes ``round(w_i N)`` rows, where
    ``w_i = f_i / \sum f`` and ``N = \min_{w_i > 0} len_i / w_i``.

    Args:
        mixture_config: Datasets and their weights.
        seed: Seed of the test split and of ``sample="random"``. Trainers pass ``args.seed``.

    Returns:
        A ``DatasetDict`` (an ``IterableDatasetDict`` when streaming) with ``train`` and, if requested, ``test``.

    Raises:
        ConfigError: The mixture is empty, or fractions or a test split are used with streaming. The error is also raised if
            fractions are negative, all zero, or set only for some datasets.
        DataError: A dataset cannot be loaded, datasets have different columns, or a split has no rows.
    """
    members, streaming = mixture_config.datasets, mixture_config.streaming
    if not members:
        raise ConfigError("the mixture has no datasets. Fix: add at least one entry to datasets.")
    weights = _weights(mixture_config)
    parts = [_load_member(member, streaming) for member in members]
    if weights is not None:
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight > 0)
        parts = [
            _take(part, min(round(weight * total), len(part)), member.path, mixture_config.sample, seed)
            for part, weight, member in zip(parts, weights, members, strict=True)
        ]
    _check_columns(parts, members)
    joined = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return (datasets.IterableDatasetDict if streaming else datasets.DatasetDict)({"train": joined})
    return split_off(joined, mixture_config.test_split_size, seed)


def split_off(rows: Any, size: float, seed: int) -> Any:
    """Split rows into a ``DatasetDict`` with ``train`` and ``test``. All ranks get the same splits.

    Raises:
        ConfigError: The rows are a stream.
        DataError: A split would be empty.
    """
    if isinstance(rows, datasets.IterableDataset):
        raise ConfigError(
            f"test_split_size={size} needs the number of rows, which is unknown with streaming. Fix: remove test_split_size, "
            "or do not stream the dataset."
        )
    try:
        return rows.train_test_split(test_size=size, seed=seed)
    except ValueError as error:
        raise DataError(f"test_split_size={size} of {len(rows)} rows would create an empty split: {error}") from error


def _weights(mixture: DatasetMixtureConfig) -> list[float] | None:
    fractions_given = [member.fraction for member in mixture.datasets]
    fractions = [f for f in fractions_given if f is not None]
    if not fractions:
        return None
    if len(fractions) < len(fractions_given):
        raise ConfigError(
            f"fraction is set only for some datasets: {fractions_given}. Fix: set fraction for all datasets, or for none."
        )
    if mixture.streaming:
        raise ConfigError(
            "fraction needs the lengths of the datasets, which are unknown with streaming=True. Fix: remove fraction, or do "
            "not stream the datasets."
        )
    if any(f < 0 or not math.isfinite(f) for f in fractions) or sum(fractions) == 0:
        raise ConfigError(
            f"the fractions are {fractions}, but every fraction must be finite and at least 0, and one must be above 0."
        )
    return [f / sum(fractions) for f in fractions]


def _load_member(member: DatasetConfig, streaming: bool) -> Any:
    files = {"data_dir": member.data_dir, "data_files": member.data_files}
    loaded = load_rows(member.path, name=member.name, split=member.split, **files, streaming=streaming)
    if not member.columns:
        return loaded
    for column in member.columns if loaded.column_names is not None else ():
        if column not in loaded.column_names:
            near = did_you_mean(column, loaded.column_names)
            raise DataError(f"dataset {member.path!r} has no column {column!r}{near}. It has {loaded.column_names}.")
    return loaded.select_columns(member.columns)


def _take(part: Any, count: int, path: str, sample: str, seed: int) -> Any:
    if count < len(part) and sample == "random":
        part = part.shuffle(seed=seed)
    elif 0 < count < len(part):
        logger.warning(
            "dataset %s: its fraction selects the first %d of %d rows. If the rows are ordered, the selection is not "
            "representative. For a random sample, set sample='random'.",
            path, count, len(part),
        )  # fmt: skip
    return part.select(range(count))


def _check_columns(parts: list[Any], members: list[DatasetConfig]) -> None:
    typed = [(part, member.path) for part, member in zip(parts, members, strict=True) if part.features is not None]
    for part, path in typed[1:]:
        (first, first_path), columns = typed[0], part.features
        for name in sorted({*first.features, *columns}):
            left, right = (str(f[name]) if name in f else "absent" for f in (first.features, columns))
            if left != right and "Value('null')" not in (left, right):
                differing = sorted({*first.features} ^ {*columns}) or [name]
                raise DataError(
                    f"dataset {path!r} cannot be joined with {first_path!r} because their columns {differing} differ. Column "
                    f"{name!r} is {left} in {first_path!r} and {right} in {path!r}. Fix: select only the common columns with "
                    "columns=[...], or cast a column to the type that it has in the other dataset."
                )
