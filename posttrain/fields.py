"""Fields of configs: their ranges as types, their help texts, and the check that holds a config to both."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from posttrain.errors import ConfigError, check_choice, unknown_arguments

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Finite numbers that a field may have; the limits it leaves out are none."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def __contains__(self, value: object) -> bool:
        return self.least <= value <= self.most and self.above < value < math.inf

    def __str__(self) -> str:
        limits = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))


class OneOf(tuple):
    """Values that a field may have where its type cannot say so: a command line has no union of words and truths."""


# Types of fields, by the names that pydantic gives them; `check_fields` holds a config to them.
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
Port = Annotated[int, Range(least=0, most=65535)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a string", type(None): "None"}
_KINDS = {int: numbers.Integral, float: numbers.Real, str: str | os.PathLike, type(None): type(None)}


def option(default: Any, text: str) -> Any:
    """A field of a config with its help text."""
    return field(default=default, metadata={"help": text})


def accepting(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that also accepts names of older releases as keywords (`posttrain.compat.old_names`)."""
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return init
    known = list(parameters)[1:]

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        kept: dict[str, Any] = {}
        if not kwargs.keys() <= set(known):
            old_names = importlib.import_module("posttrain.compat.old_names")
            kwargs, kept = old_names.convert(self, args, kwargs, known)
            args = ()
        try:
            init(self, *args, **kwargs)
        except ValueError:
            # A value of an older release may be the reason.
            given = dict(zip(known, args, strict=False)) | kwargs
            present = importlib.import_module("posttrain.compat.old_values").converted(type(self), given)
            if present is None:
                raise
            init(self, **present)
        vars(self).update(kept)

    return constructor


@dataclass_transform(field_specifiers=(field, option))
def config(cls: type[T]) -> type[T]:
    """Make a dataclass whose constructor and attributes also have the names of older releases."""
    made: Any = dataclass(cls)
    made.__init__ = accepting(made.__init__)
    made.__getattr__ = _old_attribute
    return made


@cache
def _old_options() -> frozenset[str]:
    return importlib.import_module("posttrain.compat.old_names").options()


def _old_attribute(self: object, name: str) -> Any:
    if name not in _old_options():
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)
    return importlib.import_module("posttrain.compat.old_names").attribute(self, name)


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Refuse keywords that a constructor neither has nor converts, all of them in one error.

    Raises:
        ArgumentTypeError: Names them, with what replaces them.
    """
    if unknown := unknown_arguments(cls, given):
        old_names = importlib.import_module("posttrain.compat.old_names")
        old_names.check_arguments(cls, {name: given[name] for name in unknown})
        if "__wrapped__" not in vars(cls.__init__):  # A user's subclass that is a plain dataclass.
            cls.__init__ = accepting(cls.__init__)


def read_mapping(name: str, value: object) -> Any:
    """The mapping that a field holds as a JSON object, which is how a command line gives it; anything else as it is.

    Raises:
        ConfigError: A string that is no JSON object, a list or a number.

    >>> read_mapping("chat_template_kwargs", '{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    if not isinstance(value, str | list | tuple | set | int | float):
        return value
    try:
        mapping = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        mapping = None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{name}={value!r} must be a mapping, or a JSON object such as '{{\"key\": 1}}'.")
    return mapping


def check_fields(config: Any, *, beside: type) -> None:
    """Refuse the first field of a config whose value is not of its type, or out of its range.

    Containers are not looked into: what is read of them is checked where it is read.

    Args:
        config: A dataclass.
        beside: A base class whose fields are not ours to check, but for those that are mappings or paths of files.

    Raises:
        ConfigError: Names the field, its value, what it must be, and what it is for.
    """
    for name, kind, default, text in _declared(type(config), beside):
        value = getattr(config, name)
        if value is default or _is_a(value, kind):
            continue
        if choices := _choices(kind):
            check_choice(name, value, choices)
        raise ConfigError(f"{name}={value!r} must be {_words(kind, value)}. Meaning: {text}")
    for name in vars(beside).get("_VALID_DICT_FIELDS", ()):
        # transformers opens such values as files: a whole number is a descriptor.
        if isinstance(value := vars(config)[name], int | float | list | tuple | set):
            raise ConfigError(
                f"{name}={value!r} must be a mapping. Fix: give a dict, a JSON object, or the path of a JSON file."
            )


@cache
def _declared(cls: Any, beside: type) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and help text of each field."""
    kinds, others = get_type_hints(cls, include_extras=True), getattr(beside, "__dataclass_fields__", {})
    own = [item for item in fields(cls) if item.init and item.name not in others]
    return [(item.name, kinds[item.name], item.default, item.metadata.get("help", "")) for item in own]


def _is_a(value: object, kind: Any) -> bool:
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return (isinstance(parts[1], OneOf) or _is_a(value, parts[0])) and value in parts[1]
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) in (Union, UnionType):
        return any(_is_a(value, part) for part in parts)
    if get_origin(kind) in (list, tuple, set):
        return not isinstance(value, int | float)  # A string may stand for a list of one.
    if kind is bool:
        return isinstance(value, int) and value in (0, 1)
    if isinstance(value, bool) or (kind is float and isinstance(value, float) and not math.isfinite(value)):
        return kind not in _KINDS
    return isinstance(value, _KINDS.get(kind, object))


def _choices(kind: Any) -> list[Any]:
    """The values that a field may have, where they are listed."""
    if isinstance(kind, OneOf) or get_origin(kind) is Literal:
        return list(kind if isinstance(kind, OneOf) else get_args(kind))
    return [value for part in get_args(kind) for value in _choices(part)]


def _words(kind: Any, value: object) -> str:
    """What a value must be: the range alone, where its type is right."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return str(parts[1]) if _is_a(value, parts[0]) else f"{_WORDS[parts[0]]}, {parts[1]}"
    if get_origin(kind) in (list, tuple, set):
        return "a list"
    return ", or ".join(_words(part, value) for part in parts) if parts else _WORDS.get(kind, str(kind))
