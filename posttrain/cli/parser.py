"""Command-line parser for dataclasses. Each field becomes an option. Values in YAML files are converted in the same way as
options of the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
import typing
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from posttrain.errors import ConfigError, did_you_mean

NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


class PosttrainArgumentParser(HfArgumentParser):
    """Subclass of `transformers.HfArgumentParser` that reads options from the command line and from a YAML file. Every
    boolean field has a ``--no_`` flag.

    The command line overrides the file, and the file overrides the dataclass's default. Values of the file are converted like
        options of the command line:
    ``dtype: bf16`` is rejected like ``--dtype bf16``, and ``reward_funcs: accuracy_reward`` is converted to a list with one
    item.

    Args:
        dataclass_types: One or several dataclasses. The parser returns one instance of each, in this order.
        options: Arguments of `argparse.ArgumentParser`, such as ``prog``.

    >>> @dataclasses.dataclass
    ... class Args:
    ...     lr: float = 0.1
    >>> PosttrainArgumentParser(Args).parse_args_and_config(["--lr", "2e-5"])
    (Args(lr=2e-05),)
    """

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        classes = dataclass_types or []
        types = list(classes) if isinstance(classes, list | tuple) else [classes]
        for kind in types:
            if any(item.name == "config" for item in dataclasses.fields(kind)):
                raise ConfigError(
                    f"{kind.__name__} has a field called 'config', but this name is reserved for --config. Fix: rename the "
                    "field."
                )
        super().__init__(types, **({"allow_abbrev": False} | options))
        # Set the pattern of negative numbers, so that values such as -1e-05 are not read as options.
        self._negative_number_matcher = NEGATIVE
        # Do not list all options in the usage line, because they would fill several screens.
        self.usage = options.get("usage", f"{self.prog} [--config FILE.yaml] [--option value ...]")
        hints = dict(item for kind in types for item in typing.get_type_hints(kind).items())
        configs = [kind for kind in types if "check_fields" in dir(kind)]
        own = {item.name for kind in configs for item in dataclasses.fields(kind)}
        converted = importlib.import_module("posttrain.compat.trl_names").values().keys()
        checked = own - TrainingArguments.__dataclass_fields__.keys() | converted
        self.choices = {action.dest: tuple(action.choices or ()) for action in self._actions}
        for action in list(self._actions):
            if action.help:
                # Escape percent signs in inherited help texts, because argparse reads a percent sign as a format.
                action.help = action.help.replace("%", "%%").replace("%%%%", "%%")
            hint = hints.get(action.dest)
            if action.dest == "report_to":
                # Accept several trackers, because transformers' parser accepts only one.
                action.nargs, action.type = "+", str
            if dict in (action.type, typing.get_origin(action.type)):
                # Parse the text as JSON, because transformers' parser would call dict() on the text.
                action.type = _mapping
            if hint == int | str:
                # Accept a number or a word, because transformers' parser accepts only numbers.
                action.type = _number_or_word
            if action.choices and action.dest in checked:
                # List the choices in the help without checking the value. The config checks the value, and its error
                # contains a replacement for an old value.
                action.metavar = "{" + ",".join(map(str, action.choices)) + "}"
                action.choices = None
            if hint in (bool, bool | None) and f"--no_{action.dest}" not in self._option_string_actions:
                flags = dict.fromkeys((f"--no_{action.dest}", f"--no-{action.dest.replace('_', '-')}"))
                self.add_argument(*flags, action="store_false", dest=action.dest, default=SUPPRESS, help=SUPPRESS)
        # Exclude report_to, because transformers raises an error for report_to=None although the type allows None.
        self.optional = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)} - {"report_to"}
        self.fields = {item.name: item for kind in types for item in dataclasses.fields(kind) if item.init}
        self.kinds = types

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
        around: Callable[[list[str]], AbstractContextManager[None]] | None = None,
    ) -> tuple[Any, ...]:
        """Parse the command line and its config file to instances of the dataclasses. With ``return_remaining_strings``,
        return the strings that belong to no known option as well.

        The dataclasses are created inside the context ``around(strings)``, where ``strings`` are the strings that belong to
        no known option.

        With ``separate_remaining_strings``, unknown strings of the config file and unknown strings of the command line are
        returned as two lists.

        Raises:
            ConfigError: The file does not exist or is not a mapping, a key is unknown, or a dataclass rejects a value.
            SystemExit: A value cannot be converted. The exit code is 2, as in argparse.
        """
        tokens, path = split_config(sys.argv[1:] if args is None else args)
        config = load_config(path) if path is not None else {}
        # A null in the file means that the option is not set, unless None is a possible value of the field.
        config = {key: value for key, value in config.items() if value is not None or key in self.optional}
        # Convert dashes to underscores in keys of the file, because options of the command line may have dashes too.
        config = {present if (present := key.replace("-", "_")) in self.fields else key: v for key, v in config.items()}
        _apply_env(config.pop("env", None))
        tokens, attributes = self._present(tokens, config)
        values = {key: self._meant(key, value, path) for key, value in config.items() if key in self.fields}
        others = {key: value for key, value in config.items() if key not in self.fields}
        if others and not return_remaining_strings and fail_with_unknown_args:
            raise ConfigError(f"{path}: unknown key{'s' if len(others) > 1 else ''} {self._suggest(others)}.")
        # Set None and empty lists as defaults, because no command-line argument can express them.
        unsaid = {key: value for key, value in values.items() if value is None or value == []}
        self.set_defaults(**unsaid)
        token_lists = [to_tokens(key, value) for key, value in values.items() if key not in unsaid]
        # Join name and value with "=", because argparse would read a value that begins with a dash as an option.
        from_file = [token for words in token_lists for token in (["=".join(words)] if len(words) == 2 else words)]
        left = [token for key, value in others.items() for token in to_tokens(key, value, flags=True)]
        with around(left + self.parse_known_args(from_file + tokens)[1]) if around else nullcontext():
            *instances, rest = self.parse_args_into_dataclasses(
                args=from_file + tokens, return_remaining_strings=True, look_for_args_file=False
            )
        trusts = any(vars(instance).get("trust_remote_code") for instance in instances)
        for instance in instances:
            vars(instance).update(attributes.get(type(instance), {}))
            # Scripts read trust_remote_code from the `ModelConfig` too.
            if trusts and "trust_remote_code" in dir(instance):
                instance.trust_remote_code = True
        if rest and not return_remaining_strings and fail_with_unknown_args:
            raise ConfigError(f"unknown argument{'s' if len(rest) > 1 else ''} {self._suggest(rest)}.")
        if return_remaining_strings:
            return (*instances, left, list(rest)) if separate_remaining_strings else (*instances, left + list(rest))
        return tuple(instances)

    def _present(self, tokens: list[str], config: dict[str, Any]) -> tuple[list[str], dict[type, dict[str, Any]]]:
        """Replace option names of older releases with current names, in ``config`` and in the tokens of the command line.

        Returns:
            The tokens with current names, and a mapping from each dataclass to attributes to set on its instance.
        """
        flags = (token.split("=")[0][2:].replace("-", "_") for token in tokens if token.startswith("--"))
        names = {*flags, *config} - self.fields.keys()
        attributes: dict[type, dict[str, Any]] = {kind: {} for kind in self.kinds}
        if not names:
            return tokens, attributes
        old_names = importlib.import_module("posttrain.compat.old_names")
        old = {name: kind for name in names if (kind := old_names.owner(self.kinds, name))}
        parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in old:
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="true")
        parsed, rest = parser.parse_known_args(tokens)
        arguments = {name: _value(text) for name, text in vars(parsed).items()}
        for options in (config, arguments):
            for name in old.keys() & options.keys():
                old_names.convert_option(old[name], name, options, attributes[old[name]])
        return rest + [token for key, value in arguments.items() for token in to_tokens(key, value)], attributes

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse known options like argparse. If two classes have options of the same name, only the field of the first class
        is set.
        """
        return super().parse_known_args(args, _Shared() if namespace is None else namespace)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Use ``values`` as defaults of the fields with these names. Return all other values as command-line tokens."""
        self.set_defaults(**{key: value for key, value in values.items() if key in self.fields})
        for action in self._actions:
            action.required = action.required and action.dest not in values
        others = [(key, value) for key, value in values.items() if key not in self.fields]
        return [token for key, value in others for token in to_tokens(key, value)]

    def _meant(self, key: str, value: object, path: str | None) -> object:
        """Return the intended value of an option in a config file. YAML reads ``no`` and ``off`` as false. If one of these
        words is a valid choice of the field, false is converted back to the word.
        """
        if isinstance(value, list) and None in value:
            raise ConfigError(f"{path}: {key}={value!r} has an empty item. Fix: remove the item.")
        words = [word for word in ("no", "off") if word in self.choices.get(key, ())]
        return words[0] if value is False and words else value

    def _suggest(self, names: Any) -> str:
        shown = []
        for name in names:
            bare = str(name).lstrip("-").replace("-", "_").split("=")[0]
            shown.append(f"{name!r}{did_you_mean(bare, self.fields)}")
        return ", ".join(shown)


TrlParser = PosttrainArgumentParser


class _Shared(Namespace):
    """Namespace from which an attribute can be deleted twice. transformers deletes the attributes of each class, and two
    classes can have fields of the same name.
    """

    def __delattr__(self, name: str) -> None:
        vars(self).pop(name, None)


def _value(text: str) -> Any:
    """Convert the text of an option to a JSON value, e.g. a number or bool. Other text is returned unchanged."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _number_or_word(text: str) -> int | str:
    """Convert text to a number if possible. Otherwise, return the text. The dataclass rejects unknown words."""
    return int(text) if text.lstrip("-").isdigit() else text


def _mapping(text: str) -> dict[str, Any]:
    """Parse a mapping from JSON. `to_tokens` converts mappings of a YAML file to JSON."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return value


_mapping.__name__ = "JSON mapping"  # argparse shows this name in its error message.


def split_config(tokens: Sequence[str]) -> tuple[list[str], str | None]:
    """Remove ``--config path`` or ``--config=path`` from the tokens. Return the remaining tokens and the path. If the
    option is repeated, the last path is returned.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--config", nargs="?")
    parsed, rest = parser.parse_known_args(list(tokens))
    if "config" in parsed and parsed.config is None:
        raise ConfigError("--config needs the path of a YAML file.")
    return rest, getattr(parsed, "config", None)


def load_config(path: str) -> dict[str, Any]:
    """Read a YAML file that maps field names to values. Return an empty mapping for an empty file."""
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--config {path}: the file does not exist.")
    try:
        text = file.read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: the file is not valid YAML: {error}") from error
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    # Check for duplicate keys, because YAML would silently use the last value.
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"--config {path}: {twice[0]!r} is set twice. Fix: remove one of them.")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: the file must contain a mapping of field names to values, not a {type(content).__name__}."
        )
    return content


def _apply_env(env: Any) -> None:
    if env is None:
        return
    if not isinstance(env, dict):
        raise ConfigError(f"the 'env' block of the config must be a mapping of names to values, not {env!r}.")
    os.environ.update({name: str(value) for name, value in env.items() if value is not None})


def to_tokens(key: str, value: object, flags: bool = False) -> list[str]:
    """Convert an option in a config file to command-line tokens. With ``flags=True``, true is converted to a flag without
    value, and false to an empty list.
    """
    name = f"--{key}"
    if isinstance(value, bool) and flags:
        return [name] if value else []
    if isinstance(value, dict):
        return [name, json.dumps(value)]
    if isinstance(value, list):
        return [name, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)]
    return [name, str(value)]
