"""What a process may have: the least of the machine, its control group, and what the user allows."""

import mmap
from types import SimpleNamespace

import torch

from posttrain.models import memory as device_memory
from posttrain.models.memory import available_memory, in_use, peak_in_use, reset_peak

HOST = SimpleNamespace(total=1_000_000 * 1024, available=600_000 * 1024)


def machine(monkeypatch, tmp_path, *, limit, used, inactive=0, mine=50_000):
    files = {"max": str(limit), "current": str(used), "stat": f"anon 5\ninactive_file {inactive}\n"}
    monkeypatch.setattr(device_memory.psutil, "virtual_memory", lambda: HOST)
    monkeypatch.setattr(device_memory, "in_use", lambda device: mine * 1024)
    monkeypatch.setattr(device_memory, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(device_memory, "CGROUPS", (("max", "current", "stat"),))


def test_without_a_limit_it_is_what_the_machine_has_and_what_this_process_holds(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, limit="max", used=0)
    found = available_memory(torch.device("cpu"))
    assert (found.free, found.total, found.where) == (650_000 * 1024, 1_000_000 * 1024, "this machine")


def test_a_container_leaves_less_and_pages_of_files_do_not_count(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, limit=400_000 * 1024, used=300_000 * 1024, inactive=100_000 * 1024)
    found = available_memory("cpu")
    assert found.free == (400_000 - 200_000 + 50_000) * 1024
    assert found.total == 400_000 * 1024 and "control group" in found.where


def test_a_limit_of_the_user_counts_where_it_is_less(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, limit="max", used=0)
    assert available_memory("cpu", 1000).free == 1000
    assert available_memory("cpu", 10**15).free == 650_000 * 1024


def test_a_peak_is_of_what_was_held_since_it_was_reset():
    block = mmap.mmap(-1, 2**27)  # A tensor would stay in the heap if a trainer ran in this process.
    block.write(b"1" * 2**27)
    with_block = peak_in_use("cpu")
    block.close()
    if reset_peak("cpu"):
        assert peak_in_use("cpu") < with_block
    assert in_use("cpu") <= peak_in_use("cpu")
