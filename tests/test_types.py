"""Fields of configs: their types and ranges are declared once, and every config is held to them."""

import dataclasses
import itertools
import math
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import pytest
import transformers

import posttrain as pt
from posttrain.errors import ConfigError
from posttrain.fields import OneOf, Range, check_fields, option
from posttrain.types import Prompt

TRAINING = transformers.TrainingArguments
CONFIGS = sorted(n for n in pt.__all__ if n.endswith("Config") and issubclass(getattr(pt, n), TRAINING))
NOT_NUMBERS = ("abc", [1], True, math.nan, math.inf, -math.inf)


def own_fields(name):
    """Fields of a config that it has beside those of transformers, with what each may be."""
    kinds = get_type_hints(getattr(pt, name), include_extras=True)
    base = {field.name for field in dataclasses.fields(TRAINING)}
    own = [field.name for field in dataclasses.fields(getattr(pt, name)) if field.init and field.name not in base]
    return {
        field: get_args(kinds[field]) if get_origin(kinds[field]) in (Union, UnionType) else (kinds[field],)
        for field in own
    }


def plain(kinds):
    """The bare types of a union; None where it holds more than numbers and truths."""
    found = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}
    return found if found <= {int, float, bool, NoneType} else None


def refuses(name, tmp_path, field, value):
    with pytest.raises(ConfigError, match=field):
        getattr(pt, name)(str(tmp_path), bf16=False, use_cpu=True, report_to="none", **{field: value})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_number_that_is_none_and_a_truth_that_is_none_are_refused_by_name(name, tmp_path):
    fields = {field: found for field, kinds in own_fields(name).items() if (found := plain(kinds))}
    if name in ("CPOConfig", "ORPOConfig"):
        del fields["max_completion_length"]  # Of older releases: any value is ignored with a warning.
    assert len(fields) > 10
    for field, kinds in fields.items():
        for value in ("abc", "False", [1]) if bool in kinds else NOT_NUMBERS:
            refuses(name, tmp_path, field, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_out_of_their_range_are_refused_by_name(name, tmp_path):
    ranges = {
        field: limits
        for field, kinds in own_fields(name).items()
        for limits in (part for kind in kinds for part in get_args(kind))
        if isinstance(limits, Range)
    }
    assert ranges
    for field, limits in ranges.items():
        wrong = [limits.least - 1, limits.above, limits.most + 1]
        for value in (int(number) for number in wrong if math.isfinite(number)):
            refuses(name, tmp_path, field, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mapping_may_be_json_and_a_string_that_is_no_mapping_is_refused_by_name(name, tmp_path):
    config = getattr(pt, name)
    fields = set(config._VALID_DICT_FIELDS) - set(TRAINING._VALID_DICT_FIELDS)
    assert "model_init_kwargs" in fields
    for field, value in itertools.product(fields, ("{key: 1}", "[1]", "none")):
        refuses(name, tmp_path, field, value)
    made = config(str(tmp_path), bf16=False, use_cpu=True, report_to="none", model_init_kwargs='{"revision": "x"}')
    assert made.model_init_kwargs["revision"] == "x"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_number_for_a_list_is_refused_by_name(name, tmp_path):
    for field, kinds in own_fields(name).items():
        if list in map(get_origin, kinds) and field != "beta":  # One number for beta stands for a list of one.
            refuses(name, tmp_path, field, 10)


@dataclasses.dataclass
class Some:
    count: Annotated[int, Range(least=1, most=4)] | None = option(None, "How many.")
    kind: Annotated[str, OneOf(("auto", True))] = option("auto", "Which.")
    path: str = option("x", "Where.")
    share: Annotated[float, Range(above=0, most=1)] = option(0.5, "Which part.")
    rest: dict | list[int] | None = option(None, "Not looked into.")


@pytest.mark.parametrize("given", [{"count": 4}, {"kind": True}, {"share": 1}, {"rest": [0]}, {"rest": {}}, {}])
def test_what_a_field_declares_is_taken(given, tmp_path):
    check_fields(Some(**given, path=tmp_path), beside=object)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("count", 0, "at least 1"), ("count", 5, "at most 4"), ("share", 0.0, "above 0"), ("path", 1, "a string")],
)
def test_a_refusal_says_the_value_what_it_must_be_and_what_it_is_for(field, value, words):
    with pytest.raises(ConfigError) as caught:
        check_fields(Some(**{field: value}), beside=object)
    text = next(one.metadata["help"] for one in dataclasses.fields(Some) if one.name == field)
    assert f"{field}={value!r}" in str(caught.value) and words in str(caught.value) and text in str(caught.value)


def test_a_misspelt_choice_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        check_fields(Some(kind="auot"), beside=object)


def test_a_prompt_equals_a_list_of_its_ids_and_nothing_that_is_no_list():
    prompt = Prompt([1, 2])
    assert prompt == [1, 2] and prompt == Prompt([1, 2])
    assert prompt != [1, 2, 3] and prompt != Prompt([1, 2], ["a picture"])
    assert prompt != "12" and prompt != (1, 2) and prompt != 0
