"""What FSDP2 keeps and exchanges at 8 and 64 ranks, planned on one core: shapes without numbers, a process group of one process.

``--page docs/scaling.md`` writes the table. Layers and the rest are sharded as accelerate's ``TRANSFORMER_BASED_WRAP`` does, the
computation is in bf16, gradients are reduced in float32; a step is one plain forward and backward pass and AdamW. Beside it is
what `posttrain estimate` says of the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
WORLDS = (8, 64)
BEGIN, END = "<!-- fsdp -->", "<!-- end of fsdp -->"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(shape: str) -> Any:
    """Of transformers."""
    from transformers import Qwen2Config

    return Qwen2Config(**SHAPES[shape])


def plan(shape: str, world: int, tokens: int = 2048) -> dict[str, Any]:
    """Bytes of one rank, and collectives of a step by name with their number and the bytes of what they gather or reduce.

    Begins a process group of this process, so call it once.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM

    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                name = func._schema.name.removeprefix("c10d::").strip("_")
                calls[name] += 1
                moved[name] += max(tensor.nbytes for tensor in args if isinstance(tensor, torch.Tensor))
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa")
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=half)
        optimizer = torch.optim.AdamW(model.parameters())
        with Watch():
            logits = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
            logits.float().sum().backward()
            optimizer.step()
        local = [p.to_local() for p in model.parameters()]
        states = [x for state in optimizer.state.values() for x in state.values() if hasattr(x, "to_local")]
        return {
            "weights": sum(p.nbytes for p in local),
            "gradients": sum(p.grad.to_local().nbytes for p in model.parameters()),
            "optimizer states": sum(x.to_local().nbytes for x in states),
            "collectives": {name: [calls[name], moved[name]] for name in sorted(calls)},
        }


def estimated(shape: str, world: int, tokens: int = 2048) -> dict[str, int]:
    """What the library's estimate says of weights, gradients and optimiser states of one rank."""
    from posttrain.data.forest import Layout, collate
    from posttrain.models.memory_estimate import Part, Shards, Workload, estimate_memory
    from posttrain.types import Row

    row = Row([0], [[0] * (tokens - 1)], [[1] * (tokens - 1)])
    work = Workload(
        policy=Part("policy", config_of(shape)), batches=collate([row], pad_token_id=0, layout=Layout(kind="padded")), passes=2,
        autocast=torch.bfloat16, shards=Shards(world, world, world, processes=world), device="cuda",
    )  # fmt: skip
    found = estimate_memory(work)
    gradients = found.moments["forward and backward"]["gradients"]
    return {name: found.standing[name] for name in ("weights", "optimizer states")} | {"gradients": gradients}


def apart(shape: str, world: int) -> dict[str, Any]:
    """`plan` in a process of its own."""
    command = [sys.executable, __file__, "--one", shape, str(world)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def table(shape: str) -> str:
    """Markdown: by ranks, what one keeps, what the estimate says of it, and what a step exchanges."""
    kept = ("weights", "gradients", "optimizer states")
    lines = [
        f"| {shape} | " + " | ".join(f"{name}, GiB (estimate)" for name in kept) + " | all-gathers | reduce-scatters |"
    ]
    lines.append("|" + "---|" * (len(kept) + 3))
    for world in WORLDS:
        found, said = apart(shape, world), estimated(shape, world)
        cells = [f"{found[name] / 2**30:.3f} ({said[name] / 2**30:.3f})" for name in kept]
        for count, size in (found["collectives"][name] for name in ("allgather_base", "reduce_scatter_base")):
            cells.append(f"{count}, {size / 2**30:.1f} GiB")
        lines.append(f"| {world} ranks | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--shape", default="Qwen2.5-7B")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan(options.one[0], int(options.one[1]))))
        return
    made = table(options.shape)
    print(made)
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        options.page.write_text(f"{head}{BEGIN}\n{made}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
