"""What an optimiser step computes, counted operation by operation at the shapes of real models, without their weights.

``FakeTensor`` runs forward and backward, `FlopCounterMode` counts, and the count of a forward pass is held to
F = 2 N T + 2 V d H + 4 a L A: N weights of layers over T tokens, V x d of the head at H positions, a numbers of all heads in
L layers over A visible pairs. Columns: the peer's synchronous trainers (every completion with a prompt of its own), its
asynchronous one (which shares prefixes too), ours. The peer's numbers are our padded layout less what our head computes again in
backward; nothing of the peer is run.
"""

from __future__ import annotations

import argparse

import harness
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config

from posttrain.data.forest import Layout, collate
from posttrain.models.memory_estimate import Part, Shadow, trace_pass
from posttrain.models.tree_attention import parts_of
from posttrain.types import Batch, Row

MODELS = {
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064},
    "Qwen2.5-32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
                    "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
# Prompt, completions of it, tokens of each.
SHAPES = {
    "GRPO": (512, 8, 1024),
    "GRPO, long": (1024, 8, 2048),
    "DPO": (512, 2, 1024),
    "agent's system prompt": (4096, 16, 1024),
}
LAYERS = 2  # Of a fake model; counts of a layer are multiplied, as all are alike.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def pairs(q: torch.Size, k: torch.Size, causal: bool) -> int:
    """Products of a query with a key, and of a weight with a value, of all heads: two operations each."""
    seen = q[2] * k[2] if not causal else q[2] * (q[2] + 1) // 2
    return 4 * q[0] * q[1] * q[3] * seen


def forward_operations(q, k, v, dropout=0.0, causal=False, *args, out_shape=None, **kwargs) -> int:
    """Of one flash call."""
    return pairs(q, k, causal)


def backward_operations(grad, q, k, v, out, lse, dropout, causal, *args, out_shape=None, **kwargs) -> int:
    """Scores again, and four products more for two of the forward pass."""
    return pairs(q, k, causal) * 5 // 2


MAPPING = {FLASH: forward_operations, BACKWARD: backward_operations}


def fake(name: str, layers: int) -> Shadow:
    """A model of these shapes without numbers, as a trainer with gradient checkpointing has it."""
    given = MODELS[name] | {"num_hidden_layers": layers}
    config = Qwen2Config(**given, tie_word_embeddings=False, max_position_embeddings=131072, attn_implementation="sdpa")
    return Shadow(Part("policy", config, dtype=torch.bfloat16), checkpointing=True)


def batch_of(prompt: int, count: int, length: int, layout: Layout) -> list[Batch]:
    """One group."""
    row = Row([1] * prompt, [[1] * length] * count, [[1] * length] * count)
    return collate([row], pad_token_id=0, layout=layout)


def counted(shadow: Shadow, batches: list[Batch], *, training: bool) -> tuple[int, int]:
    """Operations of these passes, and the most bytes that one of them holds beside weights and gradients."""
    total = most = 0
    for batch in batches:
        with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
            peak = trace_pass(shadow, batch, training=training)
        total += counter.get_total_flops()
        most = max(most, sum(size for kind, size in peak.items() if kind not in ("largest", "gradients")))
    return total, most


def whole(name: str, batches: list[Batch], *, training: bool) -> tuple[int, int]:
    """As `counted`, of all layers: one layer's count is the difference of two models."""
    depth = MODELS[name]["num_hidden_layers"]
    short, long = (counted(fake(name, layers), batches, training=training) for layers in (LAYERS, LAYERS + 1))
    return tuple(a + (b - a) * (depth - LAYERS) for a, b in zip(short, long, strict=True))


def by_formula(name: str, batches: list[Batch]) -> int:
    """F of a forward pass."""
    model = MODELS[name]
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * model["intermediate_size"])
    tokens = sum(batch.input_ids.numel() for batch in batches)
    heads = sum(batch.num_loss_tokens for batch in batches)
    visible = 0
    for part in (part for batch in batches for part in parts_of(batch.segments)):
        queries, keys = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
        visible += queries * (queries + 1) // 2 if part.causal else queries * keys
    return 2 * weights * tokens + 2 * model["vocab_size"] * hidden * heads + 4 * hidden * layers * visible


def compare(name: str, prompt: int, count: int, length: int) -> dict:
    """One row of the table."""
    tree = batch_of(prompt, count, length, Layout(row_tokens=10**6, max_tree_tokens=10**6))
    padded = batch_of(prompt, count, length, Layout("padded", row_tokens=prompt + length))
    forward = whole(name, tree, training=False)[0]
    ours, memory = whole(name, tree, training=True)
    apart, apart_memory = whole(name, padded, training=True)
    again = 2 * MODELS[name]["vocab_size"] * MODELS[name]["hidden_size"] * count * length
    peer = apart - again
    return {
        "forward_of_formula": round(forward / by_formula(name, tree), 4),
        "petaflops": {
            "peer, synchronous": peer / 1e15,
            "peer, asynchronous": (ours - again) / 1e15,
            "ours": ours / 1e15,
        },
        "ratio": {"synchronous": round(peer / ours, 2), "asynchronous": round((ours - again) / ours, 2)},
        "pass_gb": {"one row a sequence": apart_memory / 1e9, "ours": memory / 1e9},
    }


def main() -> None:
    """The table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", choices=list(MODELS), help="one of them")
    args = options.parse_args()
    result: dict[str, dict] = {}
    print(f"{'':34}{'peer':>9}{'async':>9}{'ours':>9}{'ratio':>7}  count / formula")
    for name in [args.model] if args.model else MODELS:
        result[name] = {}
        for shape, (prompt, count, length) in SHAPES.items():
            found = compare(name, prompt, count, length)
            result[name][f"{shape}: {prompt} + {count} x {length}"] = found
            cost = [f"{value:9.2f}" for value in found["petaflops"].values()]
            label = f"{name} {shape}"
            print(
                f"{label:34}{''.join(cost)}{found['ratio']['synchronous']:7.2f}  {found['forward_of_formula']}",
                flush=True,
            )
            if abs(found["forward_of_formula"] - 1) > 0.02:
                raise SystemExit("the count of the forward pass is not the formula's within 2 %")
    harness.save("flops", result)


if __name__ == "__main__":
    main()
