"""What a run assumes of its machine: each check fires with the values and a remedy, and is silent where all is well."""

import os
import socket
import types

import pytest
import torch

from posttrain.checks import machine
from posttrain.checks.registry import Context
from posttrain.integrations.machine import free_disk, gpu_memory, gpu_processes

GIB = 2**30


def test_a_disk_with_room_for_less_than_one_checkpoint_is_an_error_and_for_less_than_two_a_warning():
    found = machine.check_disk_space(GIB, 3 * GIB, folder="runs/a")
    assert (found.code, found.severity) == ("PT-L002", "error")
    assert "1.0 GiB are free in 'runs/a', but a checkpoint needs about 3.0 GiB" in found.what
    assert "save_total_limit=2" in found.fix and "save_only_model=True" in found.fix
    assert machine.check_disk_space(4 * GIB, 3 * GIB, folder="runs/a").severity == "warning"
    assert "save_total_limit" not in machine.check_disk_space(4 * GIB, 3 * GIB, folder="runs/a", limit=2).fix
    assert machine.check_disk_space(6 * GIB, 3 * GIB, folder="runs/a") is None


def test_checkpoints_of_another_run_are_told_unless_the_run_is_resumed():
    names = [f"checkpoint-{step}" for step in range(1, 8)]
    found = machine.check_strangers(names, folder="runs/a", resumed=False)
    assert (found.code, found.severity) == ("PT-L001", "warning")
    assert "7 checkpoints of another run (checkpoint-1, checkpoint-2" in found.what and "..." in found.what
    assert "resume_from_checkpoint=True" in found.fix
    assert machine.check_strangers(names, folder="runs/a", resumed=True) is None
    assert machine.check_strangers([], folder="runs/a", resumed=False) is None


def test_a_gpu_that_another_process_fills_is_named_with_that_process():
    others = {0: [(992, "python", 31 * GIB)]}
    found = machine.check_gpu_memory(49 * GIB, 80 * GIB, 52 * GIB, device="cuda:0", others=others)
    assert (found.code, found.severity) == ("PT-L003", "warning")
    assert "31.0 GiB of 80.0 GiB are in use" in found.what and "pid 992 (python, 31.0 GiB)" in found.what
    assert "CUDA_VISIBLE_DEVICES" in found.fix
    assert machine.check_gpu_memory(60 * GIB, 80 * GIB, 52 * GIB, device="cuda:0") is None


def test_the_group_port_of_a_server_here_is_tried_and_of_one_elsewhere_is_not():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        where = {"vllm_server_base_url": None, "vllm_server_host": "127.0.0.1", "vllm_group_port": port}
        options = {"use_vllm": True, "vllm_mode": "server"} | where

        def found(**changes):
            return machine.ports_of_servers(Context("grpo", types.SimpleNamespace(**(options | changes))))

        assert [(f.code, f.severity) for f in found()] == [("PT-L004", "warning")]
        assert f"vllm_group_port={port}" in found()[0].what and str(port) in found()[0].fix
        assert found(vllm_server_base_url="http://node7:8000") == found(vllm_group_port=0) == []
        assert found(use_vllm=False) == found(vllm_mode="colocate") == []
    assert found() == []


def test_free_disk_looks_at_the_first_folder_that_is_there(tmp_path):
    here, below = free_disk(tmp_path), free_disk(tmp_path / "not" / "yet")
    assert abs(here - below) < 2**30 and below > 0
    assert not (tmp_path / "not").exists()


def test_what_this_process_has_reserved_and_does_not_use_is_free_to_it(monkeypatch):
    numbers = {"mem_get_info": (10 * GIB, 80 * GIB), "memory_reserved": 60 * GIB, "memory_allocated": 20 * GIB}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert gpu_memory("cuda:0") == (50 * GIB, 80 * GIB)


def test_processes_of_a_gpu_are_listed_without_ours(monkeypatch):
    class NVMLError(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
            types.SimpleNamespace(pid=1, usedGpuMemory=7 * GIB),
        ],
    )
    monkeypatch.setattr("posttrain.integrations.machine.is_available", lambda name: name == "pynvml")
    monkeypatch.setattr("posttrain.integrations.machine.require", lambda name, purpose: nvml)
    ((pid, name, held),) = gpu_processes()[0]
    assert (pid, held) == (1, 7 * GIB) and name

    def no_driver():
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert gpu_processes() == {}


@pytest.mark.parametrize(("count", "text"), [(3 * GIB // 2, "1.5 GiB"), (5 * 2**20, "5 MiB")])
def test_sizes_are_in_words(count, text):
    assert machine.gib(count) == text
