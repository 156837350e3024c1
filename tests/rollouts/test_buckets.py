"""Tensors on their way to other processes: every file is a safetensors file, or refused."""

import doctest
import os

import pytest
import torch
from safetensors.torch import load_file, save

import posttrain.extensions.server.weight_sync
from posttrain.errors import ConfigError, ModelError
from posttrain.extensions.server.weight_sync import buckets
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.shared_memory import (
    SharedFolder,
    checksum,
    file_tensors,
    hold,
    remove_orphans,
    shared_path,
    write_tensors,
)
from tests.conftest import build_model


def test_examples_in_docstrings_run():
    assert doctest.testmod(posttrain.extensions.server.weight_sync).attempted > 0
    assert doctest.testmod(posttrain.extensions.server.weight_sync).failed == 0


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


def test_a_bucket_is_a_safetensors_file_whose_bytes_are_those_of_its_checksum(tmp_path):
    bucket = [
        ("a", torch.randn(3, 4)), ("empty", torch.zeros(0, 2)), ("scalar", torch.tensor(2.5)), ("b", torch.randn(4, 3).T),
    ]  # fmt: skip
    shared = torch.randn(2, 2)  # As the repeated layers of layer_replication.
    for pairs in (bucket, bucket[:2], [("h", torch.randn(5).bfloat16())], [("c", shared), ("d", shared)]):
        digest = write_tensors(pairs, tmp_path / "file")
        assert digest == checksum((tmp_path / "file").read_bytes())
        for found in (load_file(tmp_path / "file"), file_tensors(tmp_path / "file", digest)):
            assert found.keys() == dict(pairs).keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in pairs)


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError):
        write_tensors([("a", torch.ones(1))], tmp_path / "no folder" / "file")


def test_a_file_that_another_account_could_have_written_is_refused(tmp_path, monkeypatch):
    """Also where there is no shared memory: both ends take the folder for temporary files then."""
    monkeypatch.setattr(posttrain.rollouts.shared_memory, "SHARED_FOLDER", tmp_path / "none")
    folder = SharedFolder()
    try:
        file = folder.path / "bucket-0.safetensors"
        write_tensors([("a", torch.ones(1))], file)
        assert shared_path(str(file)) == file
        folder.path.chmod(0o777)
        with pytest.raises(ConfigError, match="another account"):
            shared_path(str(file))
        folder.path.chmod(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: os.stat(file).st_uid + 1)
        if os.stat(file).st_uid:  # Root's files are trusted.
            with pytest.raises(ConfigError, match="another account"):
                shared_path(str(file))
    finally:
        folder.close()


@pytest.mark.parametrize(
    "content", [b"1234567", (2**40).to_bytes(8, "little") + b"{}", save({"a": torch.ones(2)})[:-1]]
)
def test_bytes_that_changed_or_are_no_safetensors_file_are_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ModelError, match="safetensors"):
        file_tensors(tmp_path / "file", checksum(content))
    with pytest.raises(ModelError, match="checksum"):
        file_tensors(tmp_path / "file", checksum(content[1:]))


def test_folders_of_processes_that_ended_are_removed_and_those_that_are_held_stay(tmp_path):
    for name in ("posttrain-4194999-a", f"posttrain-{os.getpid()}-b", "posttrain-1-c", "posttrain-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights-1.safetensors").touch()
    held = hold(tmp_path / "posttrain-4194999-a")  # Its number is none of this machine: of a container, say.
    assert hold(tmp_path / "posttrain-4194999-a") is None
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"posttrain-4194999-a", "posttrain-other"}
    os.close(held)
    remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"posttrain-other"}


def test_a_folder_is_held_and_goes_with_its_last_reference(monkeypatch, tmp_path):
    monkeypatch.setattr(posttrain.rollouts.shared_memory, "SHARED_FOLDER", tmp_path)
    (tmp_path / "posttrain-4194999-orphan").mkdir()
    folder = SharedFolder()
    path = folder.path
    (tmp_path / "posttrain-4194999-orphan").mkdir()
    create_engine("hf", build_model(50), pad_token_id=0)
    assert list(tmp_path.iterdir()) == [path]
    del folder
    assert not path.exists()
