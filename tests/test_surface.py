"""The public surface changes only on purpose: `python -m tests.surface` after a line in CHANGELOG."""

import ast
import functools
import json
from pathlib import Path

import transformers

import posttrain
from posttrain.extensions.asynchronous.grpo_config import MEANINGLESS
from posttrain.methods.online_config import VllmFields, VllmSyncFields
from posttrain.methods.preference import UNREAD
from posttrain.rollouts.episodes.options import HarnessFields
from tests.surface import FILE, names


def known():
    return json.loads(FILE.read_text())


def test_public_names_and_their_signatures_are_what_they_were():
    before, now = known()["names"], names()
    assert sorted(now) == sorted(before)
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed


# Fields that are read by a name which is put together, or stands in a table of names.
READ_BY_TABLE = {
    **dict.fromkeys(HarnessFields.__dataclass_fields__, "HarnessOptions.of"),
    **dict.fromkeys(UNREAD, "refuse_unread"),
    "kd_temperature": "MiniLLMConfig._loss_temperature",
}  # fmt: skip


@functools.cache
def fields_and_readers():
    """Names of options of all configs, and of each name where it is read: file, and the outermost function or class around it."""
    options, readers = set(), {}
    for path in sorted(Path(posttrain.__file__).parent.rglob("*.py")):
        for top in ast.parse(path.read_text()).body:
            for node in ast.walk(top):
                found = []
                if isinstance(node, ast.AnnAssign) and getattr(getattr(node.value, "func", None), "id", "") == "option":
                    options.add(node.target.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found = [node.attr]
                elif isinstance(node, ast.FunctionDef):  # getattr(args, "name"), and loops over names.
                    found = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                for name in found:
                    place = "vllm" if path.parent.name == "vllm" else path.stem
                    readers.setdefault(name, set()).add((place, getattr(top, "name", "")))
    return options, readers


def test_something_reads_every_field_of_every_config():
    options, readers = fields_and_readers()
    assert len(options) > 300
    own = options - set(transformers.TrainingArguments.__dataclass_fields__)
    assert not {name for name in own if name not in readers} - set(READ_BY_TABLE)
    assert set(READ_BY_TABLE) <= own


def test_what_vllm_alone_reads_is_refused_where_there_is_none():
    _, readers = fields_and_readers()
    names = {*VllmFields.__dataclass_fields__, *VllmSyncFields.__dataclass_fields__}
    of_vllm = {
        ("vllm", ""),
        ("engine", "ServerEngine"),
        ("machine", "ports_of_servers"),
        ("online_config", "OnlineConfig"),
    }
    alone = {n for n in names if all(place in of_vllm or place[0] == "vllm" for place in readers[n])}
    assert {"vllm_server_host", "vllm_tensor_parallel_size", "vllm_sleep_level"} <= alone
    made_with = {"vllm_importance_sampling_cap", "use_transformers_continuous_batching", "use_transformers_paged"}
    assert alone - made_with <= set(MEANINGLESS)  # Those choose other fields as the config is made.
