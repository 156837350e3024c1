"""A model of Qwen3.5's shape against TRL: GRPO updates, packed documents, and rollouts against ``generate``.

Eight layers (six gated delta nets, two of attention), hidden size 384, vocabulary of 49,152, random weights in float32.
Prediction for a GRPO update of 8 completions of 93 tokens on a prompt of 200: TRL computes 8 x (200 + 130) = 2,640 padded tokens,
posttrain 200 + 8 x 93 = 944, so 2.8 times fewer. Logits of all tokens at once and the delta rule on padded rows are the rest.

TRL cannot pack documents for this model on a CPU: transformers raises a ValueError without the package ``causal_conv1d``. In the
case ``packed``, TRL therefore trains on the same documents as padded rows, which gives the same loss.
"""

from __future__ import annotations

import json
import sys
import tempfile

import harness
import long_rows

COMPLETIONS = [56 + round(74 * i / 7) for i in range(8)]  # Tokens of each.
PROMPTS = {"update": 216, "update 1000": 910}  # `long_rows.grpo_trainer` makes about 200 and 1,000 tokens of them.
SPREADS = {"equal": [400] * 16, "uniform": long_rows.DOCUMENTS, "skewed": [24, 31, 42, 57, 78, 110, 190, 800] * 2}
ROLLOUTS = [(200, 8, 8, 96, "skewed"), (200, 1, 8, 96, "skewed")]


def build(model: str, folder: str) -> None:
    """Write the model with the tokenizer of another one."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = Qwen3_5TextConfig(
        vocab_size=49152, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=64,
        linear_value_head_dim=64, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(side: str, model: str, case: str, steps: int, layout: str) -> dict:
    """Return time, memory and losses of one library in one case."""
    library = harness.import_side(side)
    if layout == "padded":
        from posttrain.models import probe
        from posttrain.models.attention import padded_layout

        probe.layout_for = lambda model, **_: padded_layout(model)  # Only this benchmark needs a slower layout.
    if case in PROMPTS:
        options = {"beta": 0.04, "use_bias_correction_kl": False, "gradient_checkpointing": False}
        return harness.timed(long_rows.grpo_trainer(library, side, model, steps, COMPLETIONS, PROMPTS[case], **options))
    lengths, options = SPREADS.get(case, long_rows.DOCUMENTS), {"gradient_checkpointing": False}
    if side == "peer" or case != "packed":
        options |= {"packing": False, "per_device_train_batch_size": len(lengths)}
    return harness.timed(long_rows.sft_trainer(library, model, steps, lengths, 2048, **options))


def layouts(model: str, pairs: int, steps: int) -> dict:
    """Return the speed of packed documents over posttrain's own padded rows, for each mix of lengths."""
    found = {}
    for case in SPREADS:
        arguments = ("--side", "ours", "--model", model, "--case", case, "--steps", str(steps))
        both = [
            tuple(harness.child(sys.executable, __file__, *arguments, "--layout", name) for name in ("tree", "padded"))
            for _ in range(pairs)
        ]
        found[case] = harness.compare(f"padded rows of posttrain, {case}", both)
    return found


def rollouts(model: str, repeats: int) -> list[dict]:
    """Return the seconds of the native engine and of ``generate``, in turn, each one's best of ``repeats``."""
    import torch
    from engines import measure
    from rollouts import works
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    pad = AutoTokenizer.from_pretrained(model).pad_token_id
    found = []
    for case, work in zip(ROLLOUTS, works(ROLLOUTS, 49152), strict=True):
        native, generate = measure(network, work, pad_token_id=pad, repeats=repeats)
        speed = round(generate.seconds / native.seconds, 2)
        print(f"rollouts {case}: {speed}x faster than generate, log-probs differ by {native.gap}", flush=True)
        found.append({"case": case, "seconds": [native.seconds, generate.seconds], "speed": speed, "gap": native.gap})
    return [*found, {"threads": torch.get_num_threads()}]


def main() -> None:
    """Run all cases, or one."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=3, help="optimizer steps of a run; the first is not timed")
    options.add_argument("--case", choices=[*CASES, *SPREADS], help="one of the cases; all by default")
    options.add_argument("--layout", default="tree", help="(child) 'padded' measures posttrain without packed trees")
    args = options.parse_args()
    if args.side:
        print(json.dumps(run(args.side, args.model, args.case, args.steps, args.layout)))
        return
    result = harness.earlier("hybrids", CASES)
    with tempfile.TemporaryDirectory() as folder:
        build(args.model or harness.default_model(), folder)
        for case in [args.case] if args.case else CASES:
            if case == "rollouts":
                result[case] = rollouts(folder, args.pairs)
            elif case == "layouts":
                result[case] = layouts(folder, args.pairs, args.steps)
            else:
                common = ("--model", folder, "--case", case, "--steps", str(args.steps))
                pairs = harness.alternate(__file__, args.pairs, *common)
                result[case] = harness.compare(case, pairs)
            harness.save("hybrids", result)


CASES = ("update", "update 1000", "packed", "rollouts", "layouts")

if __name__ == "__main__":
    main()
