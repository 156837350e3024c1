"""What ``sp_size`` does to the memory of a process and to what it sends: measured on a tiny model, and planned at 8 x 8 ranks.

Measured: gloo processes on a CPU train two steps of SFT on rows of one length; the most memory a process held (VmHWM) above what
it held before training began, and the bytes of the all-to-alls of attention compared with `layer_bytes` of
`posttrain.extensions.sequence_parallel.split`. Planned: one training pass of one rank of 64 (groups of 8) on shapes without
numbers, in a process group of one process. ``--page docs/scaling.md`` writes both tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tokens -->", "<!-- end of tokens -->"
TINY = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 65536, "tie_word_embeddings": True,
}  # fmt: skip
# Of Mistral-7B and Llama-3-8B; Qwen2.5-7B has 28 heads, which 7 or 4 processes divide and 8 do not.
PLANNED = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
}  # fmt: skip
LENGTHS, SIZES = (4096, 16384), (1, 2, 4)


def rss(name: str) -> int:
    """Bytes of this process, ``VmRSS`` or ``VmHWM``."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def train(size: int, tokens: int, folder: str) -> None:
    """Be one process: two steps, of which the first warms up; the first process prints what it found."""
    import datasets
    import transformers
    from tokenizers import Tokenizer, models

    from posttrain import SFTConfig, SFTTrainer
    from posttrain.extensions.sequence_parallel.split import layer_bytes
    from posttrain.models import token_split

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, pad_token_id=0, eos_token_id=1))
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY["vocab_size"])}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1")
    ids = torch.randint(2, TINY["vocab_size"], (8, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": ids})
    config = SFTConfig(
        folder, use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=1, report_to="none", max_length=None,
        logging_steps=1, save_strategy="no", optim="sgd", preflight="off", disable_tqdm=True, dry_step=False,
        parallelism_config={"sp_size": size} if size > 1 else None,
    )  # fmt: skip
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    split = token_split.active()
    if split is not None:
        split.traffic.calls = split.traffic.sent = 0
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = rss("VmRSS")
    trainer.train()
    found: dict[str, Any] = {"memory": rss("VmHWM") - before, "loss": trainer.state.log_history[0]["loss"]}
    if split is not None:
        of = {"heads": TINY["num_attention_heads"], "kv": TINY["num_key_value_heads"], "itemsize": 4, "tokens": tokens}
        of["head_size"] = TINY["hidden_size"] // TINY["num_attention_heads"]
        # A step has a row of each process of the group; the last layer's activations are kept instead of recomputed.
        said = sum(layer_bytes(size, **of, recomputed=again) for again in (True, False))
        found |= {"sent": split.traffic.sent, "calls": split.traffic.calls, "formula": said, "rows": size}
    if trainer.accelerator.is_main_process:
        print("FOUND " + json.dumps(found), flush=True)


def measured(size: int, tokens: int) -> dict[str, Any]:
    """`train` in processes of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    launch = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launch, __file__, "--train", str(size), str(tokens), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(lines[-1].removeprefix("FOUND "))


def plan(world: int, size: int, tokens: int, settings: dict[str, Any] = PLANNED) -> dict[str, Any]:
    """Shapes and collectives of one training pass of rank 0, sharded over all ranks; begins a process group, so call it once."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.data.forest import Layout, collate
    from posttrain.extensions.sequence_parallel.split import layer_bytes, make_group
    from posttrain.models import tree_attention
    from posttrain.models.attention import attention_inputs
    from posttrain.models.memory import recompute_activations
    from posttrain.types import Row

    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    seen: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                name = func._schema.name.removeprefix("c10d::").strip("_")
                calls[name] += 1
                moved[name] += max(tensor.nbytes for tensor in args if isinstance(tensor, torch.Tensor))
            if "flash_attention_for_cpu" in str(func) and "backward" not in str(func):
                seen.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    split = make_group(size, world=world, rank=0, device=torch.device("cpu"))
    row = Row([], [[3] * tokens], [[0] + [1] * (tokens - 1)])
    (batch,) = collate([row], pad_token_id=0, layout=Layout("tree", row_tokens=tokens, pad_to_multiple_of=size))
    columns = split.columns(tokens)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tree_attention.install("sdpa")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = LlamaForCausalLM._from_config(LlamaConfig(**settings), attn_implementation="sdpa")
        recompute_activations(model, {"use_reentrant": False})
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=half)
        told = attention_inputs(batch, model.config, torch.bfloat16, split=split)
        model.train()
        with Watch():
            hidden = model(
                input_ids=batch.input_ids[:, columns], position_ids=batch.position_ids[:, columns], use_cache=False,
                logits_to_keep=1, output_hidden_states=True, **told,
            )  # fmt: skip
            state = hidden.hidden_states[-1]
            (hidden.logits.float().sum() + state.float().sum()).backward()
    layers = settings["num_hidden_layers"]
    said = layer_bytes(
        size, tokens=tokens, heads=settings["num_attention_heads"], kv=settings["num_key_value_heads"],
        head_size=settings["hidden_size"] // settings["num_attention_heads"], itemsize=2, recomputed=True,
    )  # fmt: skip
    return {
        "hidden": list(state.shape), "attention": list(Counter(seen).most_common(1)[0][0]), "layers": layers,
        "collectives": {name: [calls[name], moved[name]] for name in sorted(calls)},
        "sent": split.traffic.sent, "formula": said * layers,
    }  # fmt: skip


def planned(world: int = 64, size: int = 8, tokens: int = 131072) -> dict[str, Any]:
    """`plan` in a process of its own."""
    command = [sys.executable, __file__, "--plan", str(world), str(size), str(tokens)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def tables(found: dict[str, Any]) -> str:
    """Markdown of what was measured and planned."""
    lines = ["| tokens of a row | sp_size | memory of a process | sent by one for a row, both layers | formula |"]
    lines.append("|---" * 5 + "|")
    for row in found["measured"]:
        sent = said = "-"
        if row["sp_size"] > 1:
            each = row["sent"] / row["rows"]
            sent, said = f"{each / 2**20:.2f} MiB", f"{row['formula'] / 2**20:.2f} MiB"
        memory = f"{row['memory'] / 2**20:.0f} MiB"
        lines.append(f"| {row['tokens']:,} | {row['sp_size']} | {memory} | {sent} | {said} |")
    one = found["planned"]
    lines += ["", "| 64 ranks in groups of 8, a row of 131,072 tokens, 7B | |", "|---|---|"]
    lines.append(f"| hidden states of a rank | {one['hidden']} |")
    lines.append(f"| queries of a call of attention | {one['attention']} |")
    for name, (count, size) in one["collectives"].items():
        lines.append(f"| {name} | {count}, {size / 2**30:.2f} GiB |")
    lines.append(f"| sent by all-to-alls | {one['sent'] / 2**30:.2f} GiB (formula {one['formula'] / 2**30:.2f} GiB) |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", nargs=3, metavar=("SIZE", "TOKENS", "FOLDER"))
    parser.add_argument("--plan", nargs=3, type=int, metavar=("WORLD", "SIZE", "TOKENS"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.train:
        train(int(options.train[0]), int(options.train[1]), options.train[2])
        return
    if options.plan:
        print(json.dumps(plan(*options.plan)))
        return
    rows = [{"tokens": t, "sp_size": n, **measured(n, t)} for t in LENGTHS for n in SIZES]
    found = {"measured": rows, "planned": planned()}
    (ROOT / "benchmarks" / "results" / "token_split.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    made = tables(found)
    print(made)
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        options.page.write_text(f"{head}{BEGIN}\n{made}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
