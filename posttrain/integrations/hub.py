"""Functions for the Hugging Face Hub. They create error messages for models and datasets that are not found, and upload
folders without private files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, ModelError, did_you_mean

logger = logging.getLogger(__name__)

# Patterns of files in an output_dir that contain dataset rows, prompts, completions, the command line or names of this
# machine. The star at the end matches files that are still being written too.
RUN_RECORD = (
    "*.jsonl*", "*.parquet*", "*.html*", "data.json*", "data_report.json*", "manifest.json*", "preflight.json*", "record-*",
    "rollout_failure.json*", "rollout_workers/*",
)  # fmt: skip
# Patterns of files that are never uploaded. training_args.bin contains the Hub token, and no code reads it. The second
# pattern matches the folder's lock files.
NEVER_UPLOADED = ("training_args.bin", ".posttrain*")
# Patterns of files that are copied from a checkpoint to the output_dir and uploaded during training.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_*",
)
# Environment variables that enable offline mode. The first variable disables the Hub. The second variable is that of the
# library that loads models or datasets.
SWITCHES = {
    "model": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "tokenizer": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "dataset": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}
FILES = (".jsonl", ".json", ".csv", ".parquet")
SECONDS_TO_ANSWER = 10.0
# Folder for models that `posttrain demo` converts. The folder of each model has the last part of its Hub id as its name.
MADE = Path(os.path.expanduser("~"), ".cache", "posttrain")
ON = ("1", "on", "true", "yes")


def offline_variables(kind: str) -> str:
    """Return the environment variables of offline mode with their values as text, e.g. ``HF_HUB_OFFLINE=1, ...``."""
    return ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in SWITCHES[kind])


def _nearest(name: str) -> str:
    """Return a "did you mean" hint with the most similar folder or data file in the working directory or in the parent folder
    of ``name``.
    """
    parents = [path for path in dict.fromkeys((Path(name).expanduser().parent, Path())) if path.is_dir()]
    entries = [entry for path in parents for entry in path.iterdir() if entry.is_dir() or entry.suffix in FILES]
    return did_you_mean(Path(name).name, [entry.name for entry in entries if not entry.name.startswith(".")])


def not_found(kind: str, name: str, error: BaseException | None = None) -> str:
    """Return the error message for a model, tokenizer or dataset that exists neither as a folder nor in the cache, and cannot
    be downloaded.

    Args:
        kind: ``model``, ``tokenizer`` or ``dataset``.
        name: Name that the user passed.
        error: Exception that the loader raised. The message quotes the first line of this exception.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    path = Path(name).expanduser()
    path_like = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    offline = any(os.environ.get(switch, "").lower() in ON for switch in SWITCHES[kind])
    hub = (
        "and paths are not searched on the Hub"
        if path_like
        else f"it is not in the hub's cache ({HF_HUB_CACHE}), and it cannot be downloaded in offline mode"
        if offline
        else f"it is not in the hub's cache ({HF_HUB_CACHE}), and its download from the Hub failed"
    )
    quoted = str(error).strip().splitlines()[0].rstrip(".") if error is not None and str(error).strip() else ""
    loader = f" Error of the loader: {quoted}." if quoted and not path_like else ""
    copy_of_demo = MADE / path.name
    fix = (
        f"The demo's copy, made of 4-bit weights, is in {str(copy_of_demo)!r}. Use this path, or check spelling and network."
        if kind != "dataset" and path.name and (copy_of_demo / "config.json").is_file()
        else "Check the path."
        if path_like
        else "Check the spelling, use a folder, or download it once with network access."
        if offline
        else "Check the spelling, the network and your access to it, or use a folder."
    )
    return (
        f"{kind} {name!r} was not found{_nearest(name)}: there is no folder {str(path.absolute())!r}, {hub} "
        f"({offline_variables(kind)}).{loader} {fix}"
    )


def refuse_unreachable(kind: str, name: str) -> None:
    """Raise an error if a Hub id is not in the cache and the Hub does not respond. Without this check, loaders would try for
    half a minute to download each file.

    Raises:
        ModelError: The id belongs to a model or tokenizer.
        DataError: The id belongs to a dataset.
    """
    import httpx2
    from huggingface_hub import constants, file_download, get_session

    from posttrain.integrations.network import network_advice

    if (
        constants.HF_HUB_OFFLINE
        or Path(name).expanduser().exists()
        or name.startswith((".", "~", "/"))
        or name.count("/") > 1
    ):
        return
    folder = file_download.repo_folder_name(repo_id=name, repo_type="dataset" if kind == "dataset" else "model")
    if Path(constants.HF_HUB_CACHE, folder).exists():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except httpx2.TransportError as error:
        message = f"{not_found(kind, name, error)} {network_advice(error, constants.ENDPOINT)}"
        raise (DataError if kind == "dataset" else ModelError)(message) from None


@contextmanager
def explained(kind: str, name: str) -> Iterator[None]:
    """Replace errors of a loader that cannot find ``name`` with one clear error. Errors are not replaced if ``name`` is an
    existing folder.

    Raises:
        ModelError: A model or tokenizer was not found.
        DataError: A dataset was not found.
    """
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (OSError, HFValidationError) as error:
        if Path(name).expanduser().is_dir():
            raise
        raise (DataError if kind == "dataset" else ModelError)(not_found(kind, name, error)) from error


def upload(folder: str, *, run_record: bool, ignore_patterns: Sequence[str] = (), **options: Any) -> Any:
    """Upload a folder and log the names of the uploaded files. Files in `NEVER_UPLOADED` are excluded. Files in `RUN_RECORD`
    are excluded unless ``run_record`` is set.

    Args:
        folder: Path of the folder.
        run_record: Value of ``push_run_record`` in the config.
        ignore_patterns: Patterns of additional files that are excluded.
        options: Keyword arguments of `huggingface_hub.upload_folder`.

    Returns:
        The result of `huggingface_hub.upload_folder`.
    """
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    patterns = [*ignore_patterns, *NEVER_UPLOADED, *(() if run_record else RUN_RECORD)]
    names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    logger.info(
        "uploaded to %s: %s. The run record is %s (push_run_record=%s).",
        options.get("repo_id"), ", ".join(filter_repo_objects(names, ignore_patterns=patterns)),
        "among them" if run_record else "left out", run_record,
    )  # fmt: skip
    return huggingface_hub.upload_folder(folder_path=folder, ignore_patterns=patterns, **options)
