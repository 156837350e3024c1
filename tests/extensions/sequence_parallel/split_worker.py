"""Each process: batches of a group computed together, beside the same computed alone; the first leaves how far they are apart."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import PartialState

from posttrain.data.forest import collate
from posttrain.extensions.sequence_parallel.split import TokenSplit, layer_bytes, make_group
from posttrain.models import token_split
from posttrain.models.forward import forward
from posttrain.models.probe import probe_layout
from posttrain.types import Row
from tests.conftest import build_model
from tests.ranks import leave, part

VOCABULARY = 97


def windowed(**settings: Any) -> Any:
    """Alternating windows, and a sink a head that is not 0 (gpt-oss), whose experts are few."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, eos_token_id=1, **settings,
    )  # fmt: skip
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def capped() -> Any:
    """Scores of attention are capped, which a mask of the row is needed for (Gemma 2)."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=8,
        max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()


def compiled() -> Any:
    """Each layer traced; what processes exchange stays outside."""
    model = build_model(VOCABULARY)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


MODELS = {
    "grouped": lambda: build_model(VOCABULARY),
    "one KV head": lambda: build_model(VOCABULARY, num_key_value_heads=1),
    "dense mask": capped,
    "windows and sinks": windowed,
    "compiled": compiled,
}


def rows_of(rank: int) -> list[Row]:
    """A group with a shared prompt, another tree beside it, and on one process a row shorter than the group."""
    drawn = torch.Generator().manual_seed(rank)
    ids = lambda n: torch.randint(3, VOCABULARY, (n,), generator=drawn).tolist()  # noqa: E731
    if rank == 1:
        return [Row(ids(1), [ids(2)], [[1, 1]])]
    return [Row(ids(11), [ids(7), ids(4)], [[1] * 7, [1] * 4]), Row(ids(3), [ids(6)], [[0] + [1] * 5])]


def loss_of(model: Any, batch: Any, needs: frozenset[str]) -> torch.Tensor:
    """A different weight for each token, and entropies where their gradient is asked for."""
    outputs = forward(model, batch, needs)
    weights = torch.linspace(0.5, 1.5, outputs.logp.numel()).view_as(outputs.logp)
    loss = (outputs.logp * weights).sum()
    return loss + 0.3 * outputs.entropy.sum() if "entropy_grad" in needs else loss


def gradient(model: Any) -> torch.Tensor:
    """Of all weights in one row, and none afterwards."""
    flat = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
    model.zero_grad(set_to_none=True)
    return flat


def compared(model: Any, layout: Any, split: TokenSplit, checkpointing: bool) -> dict[str, float]:
    """Log-probs and gradients of all batches of the group, in turns and alone, and the traffic beside its formula."""
    layout = type(layout)(layout.kind, row_tokens=64, dense_mask=layout.dense_mask, pad_to_multiple_of=split.size)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    batches = [collate(rows_of(rank), pad_token_id=0, layout=layout)[0] for rank in range(split.size)]
    needs = frozenset({"logp", "entropy", "entropy_grad"})
    with token_split.alone():
        for batch in batches:
            loss_of(model, batch, needs).backward()
    truth = gradient(model)
    split.traffic.calls = split.traffic.sent = 0
    for helped, _ in token_split.turns(True):
        loss = loss_of(model, batches[split.rank], needs) if helped is None else split.help_with(model, helped)
        loss.backward()
    found = gradient(model)
    torch.distributed.all_reduce(found, group=split.group)
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said = sum(
        layer_bytes(
            split.size, tokens=batch.input_ids.numel(), heads=config.num_attention_heads, kv=config.num_key_value_heads,
            head_size=size, itemsize=4, recomputed=checkpointing,
        ) * config.num_hidden_layers
        for batch in batches
    )  # fmt: skip
    apart = {"sent": split.traffic.sent, "formula": said}
    with torch.no_grad():
        own = batches[split.rank]
        together = forward(model, own).logp
        with token_split.alone():
            apart["logp"] = float((forward(model, own).logp - together).abs().max())
    apart["gradient"] = float((found - truth).abs().max() / truth.abs().max())
    return apart


def main() -> None:
    """Every model in one launch."""
    state = PartialState(cpu=True)
    size, found = int(sys.argv[1]), {}
    split = make_group(size, world=state.num_processes, rank=state.process_index, device=torch.device("cpu"))
    token_split.activate(split)
    for name in sys.argv[2].split(","):
        model = MODELS[name]()
        with token_split.alone():
            layout = probe_layout(model)
        for checkpointing in (False, True):
            found[f"{name}/{checkpointing}"] = compared(model, layout, split, checkpointing)
    if state.is_main_process:
        leave(found)
    part()


if __name__ == "__main__":
    main()
