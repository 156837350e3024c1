"""Dataclasses to flags, and YAML to the same flags: one converter, whatever the source of a value."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, did_you_mean

__all__ = ["PosttrainArgumentParser", "TrlParser"]

EARLY = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_")


def _hf_parser() -> type:
    from transformers import HfArgumentParser

    return HfArgumentParser


class PosttrainArgumentParser:
    """Parses one or more dataclasses from a command line and a YAML file.

    Precedence: command line, then file, then the dataclass's default. A value of the file goes through the converter of
    its flag, so ``dtype: bf16`` is refused as ``--dtype bf16`` is, and ``reward_funcs: accuracy_reward`` is a list of one.

    Args:
        dataclass_types: One dataclass or several; their instances are returned in this order.
        prog: Name shown in help.

    >>> @dataclasses.dataclass
    ... class Args:
    ...     lr: float = 0.1
    >>> PosttrainArgumentParser(Args).parse_args_and_config(["--lr", "2e-5"])
    (Args(lr=2e-05),)
    """

    def __init__(self, dataclass_types: Any, prog: str | None = None) -> None:
        types = list(dataclass_types) if isinstance(dataclass_types, list | tuple) else [dataclass_types]
        for kind in types:
            if any(item.name == "config" for item in dataclasses.fields(kind)):
                raise ConfigError(f"{kind.__name__} has a field called 'config'. That name is reserved for --config.")
        self.types = types
        self.parser = _hf_parser()(types, allow_abbrev=False, prog=prog)
        self.parser.usage = f"{self.parser.prog} [--config FILE.yaml] [--option value ...]"  # All options fill screens.
        hints = [item for kind in types for item in typing.get_type_hints(kind).items()]
        either = {name for name, hint in hints if hint == int | str}
        for action in self.parser._actions:
            if action.help:  # An inherited percent sign would break --help.
                action.help = action.help.replace("%", "%%").replace("%%%%", "%%")
            if action.dest in either:
                action.type = _number_or_word  # transformers' parser would take the number alone.
        self.fields = {item.name: item for kind in types for item in dataclasses.fields(kind) if item.init}

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Instances of the dataclasses; with ``return_remaining_strings``, also the strings that no field took.

        Raises:
            ConfigError: A file that is missing or not a mapping, unknown keys, or values that a dataclass refuses.
            SystemExit: 2, as argparse does, for flags that cannot be converted.
        """
        tokens, path = _split_config(list(sys.argv[1:] if args is None else args))
        config = load_config(path) if path is not None else {}
        _apply_env(config.pop("env", None))
        known = {key: value for key, value in config.items() if key in self.fields}
        others = {key: value for key, value in config.items() if key not in self.fields}
        if others and not return_remaining_strings and fail_with_unknown_args:
            raise ConfigError(f"{path}: unknown key{'s' if len(others) > 1 else ''} {self._suggest(others)}.")
        self.parser.set_defaults(**{key: None for key, value in known.items() if value is None})
        given = [token for key, value in known.items() if value is not None for token in to_tokens(key, value)]
        *instances, rest = self.parser.parse_args_into_dataclasses(
            args=given + tokens, return_remaining_strings=True, look_for_args_file=False
        )
        if rest and not return_remaining_strings and fail_with_unknown_args:
            raise ConfigError(f"unknown argument{'s' if len(rest) > 1 else ''} {self._suggest(rest)}.")
        if return_remaining_strings:
            left = [token for key, value in others.items() for token in to_tokens(key, value, flags=True)]
            return (*instances, left + list(rest))
        return tuple(instances)

    def _suggest(self, names: Any) -> str:
        shown = []
        for name in names:
            bare = str(name).lstrip("-").replace("-", "_").split("=")[0]
            shown.append(f"{name!r}{did_you_mean(bare, self.fields)}")
        return ", ".join(shown)

    def closest(self, name: str) -> str | None:
        """The field most like ``name``, or None."""
        found = difflib.get_close_matches(name, list(self.fields), n=1, cutoff=0.6)
        return found[0] if found else None

    def parse_dict(self, values: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Instances from a mapping of field names."""
        return self.parser.parse_dict(values, allow_extra_keys)


TrlParser = PosttrainArgumentParser


def _number_or_word(text: str) -> int | str:
    """A value of a field that may be either; the dataclass refuses words it does not know."""
    return int(text) if text.lstrip("-").isdigit() else text


def _split_config(tokens: list[str]) -> tuple[list[str], str | None]:
    """Take ``--config path`` and ``--config=path`` out; the last one wins."""
    path, rest, index = None, [], 0
    while index < len(tokens):
        token = tokens[index]
        if token == "--config":
            if index + 1 == len(tokens):
                raise ConfigError("--config needs the path of a YAML file after it.")
            path, index = tokens[index + 1], index + 2
        elif token.startswith("--config="):
            path, index = token.partition("=")[2], index + 1
        else:
            rest.append(token)
            index += 1
    return rest, path


def load_config(path: str) -> dict[str, Any]:
    """A YAML file as a flat mapping of field names; an empty file is an empty mapping."""
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--config {path}: there is no such file.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: it is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: it must be a mapping of field names to values, not a {type(content).__name__}."
        )
    return content


def _apply_env(env: Any) -> None:
    if env is None:
        return
    if not isinstance(env, dict):
        raise ConfigError(f"the 'env' block of the config must be a mapping of names to values, not {env!r}.")
    torch = sys.modules.get("torch")
    for name, value in env.items():
        if name.startswith(EARLY) and torch is not None and torch.cuda.is_initialized():
            raise ConfigError(f"env: {name} only works before CUDA starts, and it has started. Export it in the shell.")
        os.environ[name] = str(value)


def to_tokens(key: str, value: Any, flags: bool = False) -> list[str]:
    """One config entry as command-line tokens; with ``flags``, true is a bare flag and false is left out."""
    name = f"--{key}"
    if isinstance(value, bool) and flags:
        return [name] if value else []
    if isinstance(value, dict):
        return [name, json.dumps(value)]
    if isinstance(value, list):
        return [name, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
    return [name, str(value)]
