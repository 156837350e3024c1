"""Small questions to the pretended device, each asked in a process of its own: ``python -m tests.gpu.checks NAME``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.device import WAITS
from tests.ranks import leave


def canary() -> dict[str, bool]:
    """What device.cpp assumes of torch, by name."""
    row = torch.arange(4.0, device="cuda", requires_grad=True)
    (row * row).sum().backward()
    before = torch.cuda.memory_allocated()
    big = torch.empty(2**20, device="cuda")
    grown = torch.empty(0, device="cuda")
    torch.arange(5, out=grown.long())
    view = big.view(2, -1)[1]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype
    return {
        "hooks are those of the device": torch.accelerator.current_accelerator() == torch.device("cuda"),
        "autograd runs on it": torch.equal(row.grad.cpu(), 2 * torch.arange(4.0)),
        "memory is counted": torch.cuda.memory_allocated() - before >= 2**22,
        "views share memory": view.untyped_storage().data_ptr() == big.untyped_storage().data_ptr(),
        "autocast is of CUDA": half == torch.bfloat16,
        "generators are": torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).device.type
        == "cuda",
        "it draws what the host draws": torch.equal(
            torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).cpu(),
            torch.rand(3, generator=torch.Generator().manual_seed(5)),
        ),
        "composed operations too": torch.equal(row.detach().unique().cpu(), torch.arange(4.0)),
    }


def mixing() -> dict[str, Any]:
    """One sum with a host tensor that has dimensions, one with a number, and an index from the host."""
    row = torch.tensor([1.0, 2.0], device="cuda")
    try:
        said = str((row + torch.ones(2)).tolist())
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    return {"ranked": said, "number": (row + torch.tensor(1.0))[1].item(), "index": row[torch.tensor([0])].tolist()}


def waits() -> dict[str, int]:
    """How many waits each way to ask the device counts for."""
    row = torch.arange(4.0, device="cuda")
    mask = row > 1
    host, pinned = torch.empty(4), torch.empty(4, pin_memory=True)
    asks: dict[str, Callable[[], Any]] = {
        "item": lambda: row[0].item(),
        "tolist": row.tolist,
        "cpu": row.cpu,
        "nonzero": mask.nonzero,
        "a[mask]": lambda: row[mask],
        "a[mask] = 0": lambda: row.__setitem__(mask, 0.0),
        "bool": lambda: bool(mask[0]),
        "unpinned, non_blocking": lambda: host.copy_(row, non_blocking=True),
        "pinned, non_blocking": lambda: pinned.copy_(row, non_blocking=True),
        "sum": row.sum,
    }
    found = {}
    for name, ask in asks.items():
        before = WAITS.by_line["wait"].total()
        ask()
        found[name] = WAITS.by_line["wait"].total() - before
    before = WAITS.by_line["upload"].total()
    torch.ones(2).to("cuda")
    return found | {"upload": WAITS.by_line["upload"].total() - before}


if __name__ == "__main__":
    leave(globals()[sys.argv[1]]())
    # Threads of torch's autograd may outlive the device at the interpreter's end.
    os._exit(0)
