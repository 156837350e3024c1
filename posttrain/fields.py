"""Helpers for config fields: types with ranges of values, help texts, and validation."""

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
    """Range of allowed finite numbers for a config field. By default, a range has no limits."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def __contains__(self, value: object) -> bool:
        return self.least <= value <= self.most and self.above < value < math.inf

    def __str__(self) -> str:
        limits = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))


class OneOf(tuple):
    """Allowed values of a config field, for fields whose type cannot express them. For example, a command line does not
    support unions of str and bool.
    """


# Field types with the names of pydantic's types. `check_fields` validates the values.
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
    """Create a config field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def accepting(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it also accepts option names of older releases as keywords (`posttrain.compat.old_names`)."""
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return init
    names = list(parameters)[1:]

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        attributes: dict[str, Any] = {}
        if not kwargs.keys() <= set(names):
            old_names = importlib.import_module("posttrain.compat.old_names")
            kwargs, attributes = old_names.convert(self, args, kwargs, names)
            args = ()
        try:
            init(self, *args, **kwargs)
        except ValueError:
            # An option value of an older release may have caused the error. If the arguments contain an old value, convert
            # it and call the constructor a second time.
            arguments = dict(zip(names, args, strict=False)) | kwargs
            present = importlib.import_module("posttrain.compat.old_values").converted(type(self), arguments)
            if present is None:
                raise
            init(self, **present)
        vars(self).update(attributes)

    return constructor


@dataclass_transform(field_specifiers=(field, option))
def config(cls: type[T]) -> type[T]:
    """Convert a class to a dataclass whose constructor and attributes also accept option names of older releases."""
    made: Any = dataclass(cls)
    made.__init__ = accepting(made.__init__)
    made.__getattr__ = _old_attribute
    # List the options in the docstring, which `help` and notebooks display. Options of the class itself come before
    # inherited options.
    options = sorted(fields(made), key=lambda option: option.name not in vars(cls).get("__annotations__", {}))
    listed = [f"    {option.name}: {option.metadata['help']}" for option in options if "help" in option.metadata]
    made.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", "Args:", *listed])
    return made


@cache
def _old_options() -> frozenset[str]:
    return importlib.import_module("posttrain.compat.old_names").options()


def _old_attribute(self: object, name: str) -> Any:
    if name not in _old_options():
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)
    return importlib.import_module("posttrain.compat.old_names").attribute(self, name)


def check_arguments(cls: type, given: Mapping[str, Any]) -> None:
    """Raise one error for all keyword arguments that a constructor neither accepts nor converts.

    Raises:
        ArgumentTypeError: A keyword is not accepted. The message contains all rejected keywords with their replacements.
    """
    if unknown := unknown_arguments(cls, given):
        old_names = importlib.import_module("posttrain.compat.old_names")
        old_names.check_arguments(cls, {name: given[name] for name in unknown})
        # Wrap the constructor if necessary, because a user's subclass may be a plain dataclass.
        if "__wrapped__" not in vars(cls.__init__):
            cls.__init__ = accepting(cls.__init__)


def read_mapping(name: str, value: object) -> Any:
    """Convert the text of a JSON object to a mapping. Mappings and None are returned unchanged. Command lines pass mappings
    as JSON.

    Raises:
        ConfigError: The value is a list, a number, or a string that is not a JSON object.

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
    """Raise an error for the first config field whose value has the wrong type or is out of range.

    Contents of lists and mappings are not checked. The code that uses the contents of lists and mappings checks them.

    Args:
        config: A dataclass.
        beside: Base class whose fields are not checked, except fields for mappings.

    Raises:
        ConfigError: A value is invalid. The message contains the field, its value, the allowed values and its purpose.
    """
    for name, kind, default, text in _declared(type(config), beside):
        value = getattr(config, name)
        if value is default or _is_a(value, kind):
            continue
        if choices := _choices(kind):
            check_choice(name, value, choices)
        raise ConfigError(f"{name}={value!r} must be {_words(kind, value)}. Meaning: {text}")
    for name in vars(beside).get("_VALID_DICT_FIELDS", ()):
        # Reject these types, because transformers would open the value as a file. An integer would be used as a file
        # descriptor.
        if isinstance(value := vars(config)[name], int | float | list | tuple | set):
            raise ConfigError(
                f"{name}={value!r} must be a mapping. Fix: pass a dict, a JSON object, or the path of a JSON file."
            )


@cache
def _declared(cls: Any, beside: type) -> list[tuple[str, Any, Any, str]]:
    """Return the name, type, default and help text of each field of a config class."""
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
    if get_origin(kind) in (list, tuple, set):  # A single string is accepted as a list with one item.
        entries = value if isinstance(value, list | tuple) else ()
        odd = any(isinstance(entry, float) and not math.isfinite(entry) for entry in entries)
        return not isinstance(value, int | float) and not odd
    if kind is bool:
        return isinstance(value, int) and value in (0, 1)
    if isinstance(value, bool) or (kind is float and isinstance(value, float) and not math.isfinite(value)):
        return kind not in _KINDS
    return isinstance(value, _KINDS.get(kind, object))


def _choices(kind: Any) -> list[Any]:
    """Return the allowed values of a field type. Return an empty list if the type does not list values."""
    if isinstance(kind, OneOf) or get_origin(kind) is Literal:
        return list(kind if isinstance(kind, OneOf) else get_args(kind))
    return [value for part in get_args(kind) for value in _choices(part)]


def _words(kind: Any, value: object) -> str:
    """Describe the allowed values of a field type as text. If the type of ``value`` is correct, the text contains only the
    range.
    """
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return str(parts[1]) if _is_a(value, parts[0]) else f"{_WORDS[parts[0]]}, {parts[1]}"
    if get_origin(kind) in (list, tuple, set):
        return "a list" if isinstance(value, int | float) else "a list of finite values"
    return ", or ".join(_words(part, value) for part in parts) if parts else _WORDS.get(kind, str(kind))
