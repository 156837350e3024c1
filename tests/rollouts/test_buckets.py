"""Tensors on their way to other processes: every file is a safetensors file, or refused."""

import doctest
import json
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file

import posttrain.rollouts.server.weight_sync
from posttrain.errors import ConfigError, ModelError
from posttrain.rollouts.server.replies import checksum, hold, remove_orphans
from posttrain.rollouts.server.weight_sync import DTYPES, MappedFile, SharedFile, buckets


def test_examples_in_docstrings_run():
    assert doctest.testmod(posttrain.rollouts.server.weight_sync).attempted > 0
    assert doctest.testmod(posttrain.rollouts.server.weight_sync).failed == 0


def test_trap_s10_s44_buckets_hold_one_dtype_and_every_tensor_once():
    pairs = [
        (str(i), torch.full((5 + i,), float(i), dtype=torch.float32 if i % 7 else torch.bfloat16)) for i in range(40)
    ]
    made = list(buckets(pairs, 200))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in pairs]
    for bucket in made:
        assert len({t.dtype for _, t in bucket}) == 1
        assert len(bucket) == 1 or sum(t.numel() * t.element_size() for _, t in bucket) <= 200
    with pytest.raises(ConfigError, match="vllm_weight_bucket_mb"):
        list(buckets(pairs, 0))


def test_a_bucket_is_a_safetensors_file_in_memory_and_in_shared_memory():
    pairs = [
        ("a", torch.randn(3, 4)),
        ("empty", torch.zeros(0, 2)),
        ("scalar", torch.tensor(2.5)),
        ("b", torch.randn(4, 3).T),
    ]
    file = SharedFile()
    for count in (4, 2, 4):
        bucket = pairs[:count]
        size, digest = file.write(bucket)
        body = file.path.read_bytes()[:size]
        assert digest == checksum(body)
        found = load(body)
        assert list(found) == [n for n, _ in bucket] or set(found) == {n for n, _ in bucket}
        assert all(torch.equal(found[name], tensor) for name, tensor in bucket)
    half = [("h", torch.randn(5).bfloat16())]
    size, _ = file.write(half)
    assert torch.equal(load(file.path.read_bytes()[:size])["h"], half[0][1])
    file.close()
    assert not file.path.exists()


def test_files_of_processes_that_ended_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(posttrain.rollouts.server.weight_sync, "SHARED_FOLDER", tmp_path)
    orphan, other = tmp_path / "posttrain-4194999-1.safetensors", tmp_path / "posttrain-4194999x1.safetensors"
    orphan.touch()
    other.touch()
    file = SharedFile()
    assert not orphan.exists() and other.exists()
    assert file.path.exists()
    file.close()


def test_folders_of_processes_that_ended_are_removed_and_those_that_are_held_stay(tmp_path):
    for name in (
        "posttrain-async-4194999-a",
        f"posttrain-async-{os.getpid()}-b",
        "posttrain-async-1-c",
        "posttrain-other",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights-1.safetensors").touch()
    held = hold(tmp_path / "posttrain-async-4194999-a")  # Its number is none of this machine: of a container, say.
    assert hold(tmp_path / "posttrain-async-4194999-a") is None
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"posttrain-async-4194999-a", "posttrain-other"}
    os.close(held)
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"posttrain-other"}


def test_a_file_goes_with_its_last_reference_unless_it_was_left(tmp_path):
    file = SharedFile(tmp_path / "one")
    file.write([("a", torch.ones(3))])
    del file
    assert not (tmp_path / "one").exists()
    file = SharedFile(tmp_path / "two")
    file.write([("a", torch.ones(3))])
    assert file.leave() == tmp_path / "two"
    del file
    assert load((tmp_path / "two").read_bytes())["a"].tolist() == [1, 1, 1]


def test_a_file_of_the_safetensors_library_is_read_where_it_lies_whatever_its_dtypes(tmp_path):
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    file = MappedFile(tmp_path / "file")
    assert file.checksum() == checksum((tmp_path / "file").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dict(file.tensors())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_smaller_bucket_is_the_first_bytes_of_a_file_that_does_not_shrink(tmp_path):
    file = SharedFile(tmp_path / "file")
    large, _ = file.write([("a", torch.ones(1000))])
    small, digest = file.write([("b", torch.full((10,), 2.0))])
    mapped = MappedFile(tmp_path / "file")
    assert small < large == len(mapped.data) and mapped.checksum(small) == digest
    assert [(name, tensor.tolist()) for name, tensor in mapped.tensors(small)] == [("b", [2.0] * 10)]
    file.write([("b", torch.full((10,), 3.0))])
    assert mapped.tensors(small)[0][1].tolist() == [3.0] * 10  # The same memory.
    with pytest.raises(ModelError, match="safetensors"):
        mapped.tensors(large)


def _file(table, data=b""):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "nothing": b"1234567",
    "a header beyond the end": (2**40).to_bytes(8, "little") + b"{}",
    "no JSON": _file(b"{"),
    "no table": _file([]),
    "no text": _file(b"\xff\xfe{}"),
    "too few bytes": _file({"a": F32}, bytes(7)),
    "too many bytes": _file({"a": F32}, bytes(9)),
    "another size than its shape": _file({"a": F32 | {"shape": [3]}}, bytes(8)),
    "a gap": _file({"a": F32 | {"data_offsets": [4, 12]}}, bytes(12)),
    "an overlap": _file({"a": F32, "b": F32}, bytes(8)),
    "negative sizes": _file({"a": F32 | {"shape": [-1, -2]}}, bytes(8)),
    "a dtype that is none": _file({"a": F32 | {"dtype": "F33"}}, bytes(8)),
    "no dtype": _file({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "no offsets": _file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an entry that is none": _file({"a": 3}),
    "a shape that is none": _file({"a": F32 | {"shape": "x"}}, bytes(8)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_damaged_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors"):
        MappedFile(tmp_path / "file").tensors()


GOOD = save({"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.int8)})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_no_byte_that_is_changed_lets_a_reader_leave_the_file(tmp_path_factory, place, value):
    path = tmp_path_factory.getbasetemp() / "changed"
    content = bytearray(GOOD)
    content[place] = value
    path.write_bytes(content)
    try:
        found = MappedFile(path).tensors()
    except ModelError:
        return
    assert sum(tensor.nbytes for _, tensor in found) == 20
