"""No function changes a stage value that it is given: a change is made in a copy, which the caller can see."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import posttrain
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Batch, Leaf, LossTerms, ModelOutputs, Rollout, Row, Segment
from tests import golden
from tests.methods.helpers import every_second, scripted

STAGES = (Row, Batch, ModelOutputs, LossTerms, Rollout, RolloutBatch, RewardTable)
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def mixture():
    """A two-layer mixture of experts."""
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 320, "max_position_embeddings": 512}
    return MixtralForCausalLM(MixtralConfig(**config, bos_token_id=1, eos_token_id=2, pad_token_id=2)).eval()


def runs():
    """``{name: (case of golden curves, settings)}``; each has something that the others lack."""
    fast = {"engine": scripted()}
    masked = {"mask_zero_variance_groups": True, "mask_truncated_completions": True, "rewards": every_second}
    return {
        "sft": ("sft", {}),
        "experts": ("sft", {"model": mixture(), "router_aux_loss_coef": 0.1}),
        "dpo": ("dpo", {}),
        "kto": ("kto", {}),
        "bco": ("bco", {}),
        "grpo": ("grpo", {"max_completion_length": 4}),
        "grpo_masked": ("grpo", fast | masked),
        "grpo_dynamic": ("grpo", fast | {"dynamic_sampling": 1, "num_generations": 2, "rewards": every_second}),
        "rloo": ("rloo", fast),
        "online_dpo": ("online_dpo", {}),
        "ppo": ("ppo", fast),
        "gkd": ("gkd_on_policy", {}),
    }


# Functions that still write: ``(file:function, type.attribute): reason``. None is added.
KNOWN_WRITERS: dict[tuple[str, str], str] = {}


# Watching -------------------------------------------------------------------------------------------------------------


@functools.cache
def attributes(kind):
    return tuple(item.name for item in dataclasses.fields(kind))


def mark(value):
    """What must stay equal while nobody writes into a value; nested stage values are compared by themselves."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        first = next(iter(value), None)
        if isinstance(first, (Segment, Leaf)):  # As constant as the tuple that holds them.
            return id(value)
        return list(value) if isinstance(first, (str, int, float)) else [mark(one) for one in value]
    if isinstance(value, torch.Tensor):
        return id(value), value.data_ptr(), -1 if value.is_inference() else value._version
    if isinstance(value, dict):
        return {key: mark(one) for key, one in value.items()}
    if isinstance(value, set):
        return set(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, STAGES):
        return [mark(getattr(value, name)) for name in attributes(type(value))]
    return id(value)


def stage_values(values, found=None, depth=0):
    """Stage values among arguments, in their lists and dicts, and in attributes of other stage values; by id."""
    found = {} if found is None else found
    for value in values:
        kind = type(value)
        if kind in (list, tuple, dict):
            inside = value.values() if kind is dict else value
            # Lists are of one kind, and those of token ids are long.
            if depth < 4 and isinstance(next(iter(inside), None), (*STAGES, list, tuple, dict)):
                stage_values(inside, found, depth + 1)
        elif isinstance(value, STAGES) and id(value) not in found:
            found[id(value)] = value
            stage_values([getattr(value, name) for name in attributes(kind)], found)
    return found


class Call(NamedTuple):
    frame: object
    function: str
    values: dict


class WriteGuard:
    """Inside, a change of a stage value is blamed on the innermost function that was given it.

    A function is given its arguments, and what the functions that it calls return. Values are compared whenever a function of
    ``home`` that was given them returns, and whenever it gives them to another one.
    """

    def __init__(self, home):
        self.home = f"{home}/"
        self.writers, self.calls, self.marks = set(), [], {}

    def __enter__(self):
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _seen(self, frame, event, returned):
        if event == "call":
            code = frame.f_code
            if not code.co_filename.startswith(self.home) or code.co_name in COMPREHENSIONS:
                return
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            arguments = frame.f_locals
            values = stage_values([arguments[name] for name in code.co_varnames[:count] if name in arguments])
            if values:
                self._compare(values)
            self.calls.append(Call(frame, f"{code.co_filename[len(self.home) :]}:{code.co_qualname}", values))
        elif event == "return" and self.calls and self.calls[-1].frame is frame:
            self._compare(self.calls[-1].values)
            self.calls.pop()
            if self.calls and (values := stage_values([returned])):
                self._compare(values)
                self.calls[-1].values.update(values)

    def _compare(self, values):
        for key, value in values.items():
            now = {name: mark(getattr(value, name)) for name in attributes(type(value))}
            holder = next((call.function for call in reversed(self.calls) if key in call.values), None)
            if holder is not None:
                changed = [name for name in now if now[name] != self.marks[key][name]]
                self.writers |= {(holder, f"{type(value).__name__}.{name}") for name in changed}
            self.marks[key] = now


# Claims ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """What is written in two steps and an evaluation of each trainer, and in which runs: ``{(function, attribute): runs}``."""
    found = {}
    for name, (case, settings) in runs().items():
        trainer = golden.build(case, tmp_path_factory.mktemp(name), max_steps=2, eval_steps=2, **settings)
        with WriteGuard(Path(posttrain.__file__).parent) as guard:
            trainer.train()
        for writer in guard.writers:
            found.setdefault(writer, []).append(name)
    return found


def test_no_function_writes_into_a_stage_value_that_it_is_given(writers):
    assert {writer: runs for writer, runs in writers.items() if writer not in KNOWN_WRITERS} == {}


def test_every_known_writer_still_writes(writers):
    assert [writer for writer in KNOWN_WRITERS if writer not in writers] == [], "delete these lines of KNOWN_WRITERS"


# The guard ------------------------------------------------------------------------------------------------------------


def _row():
    return Row([1, 2], [[3, 4]], [[1, 1]], token_columns={"old_logp": [[0.5, 0.5]]})


def _in_a_list(row):
    row.completions[0].append(5)


def _in_a_dict(row):
    row.token_columns["old_logp"] = [[0.0, 0.0]]


def _in_a_list_of_rows(rows):
    object.__setattr__(rows[0], "prompt_ids", [])


def _in_a_tensor(outputs):
    outputs.logp.zero_()


def _a_copy(row):
    copy = dataclasses.replace(row, completions=[[3]])
    return copy if copy.completions != row.completions else None


def _passes_on(row):
    _in_a_list(row)


def _what_it_was_returned():
    object.__setattr__(_a_copy(_row()), "prompt_ids", [])


@pytest.mark.parametrize(
    ("function", "given", "written"),
    [
        (_in_a_list, _row, "Row.completions"),
        (_in_a_dict, _row, "Row.token_columns"),
        (_in_a_list_of_rows, lambda: [_row()], "Row.prompt_ids"),
        (_in_a_tensor, lambda: ModelOutputs(logp=torch.ones(2)), "ModelOutputs.logp"),
        (_a_copy, _row, None),
    ],
)
def test_the_guard_finds_writes_at_any_depth_and_no_copies(function, given, written):
    argument = given()
    with WriteGuard(Path(__file__).parent) as guard:
        function(argument)
    name = f"{Path(__file__).name}:{function.__name__}"
    assert guard.writers == ({(name, written)} if written else set())


def test_the_guard_blames_the_innermost_function_and_writers_of_returned_values():
    row = _row()
    with WriteGuard(Path(__file__).parent) as guard:
        _passes_on(row)
        _what_it_was_returned()
    names = {"_in_a_list": "Row.completions", "_what_it_was_returned": "Row.prompt_ids"}
    assert guard.writers == {(f"{Path(__file__).name}:{name}", written) for name, written in names.items()}
