"""What fits one GPU, by the estimate: models of 1.5B, 7B and 32B, whole, with LoRA and with QLoRA.

``--page docs/one_gpu.md`` writes the table. Shapes are those of Qwen2.5; no weight is read and no GPU is asked. A cell is the
peak of one process in GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- one gpu -->", "<!-- end of one gpu -->"
COMMON = {"vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "7B": COMMON | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32B": COMMON | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
# Dtype of the weights, bits of packed ones, whether an adapter is trained, optimiser.
WAYS: dict[str, tuple[str, bool, bool, str]] = {
    "all weights, float32": ("float32", False, False, "adamw_torch_fused"),
    "LoRA on bfloat16": ("bfloat16", False, True, "adamw_torch_fused"),
    "QLoRA (nf4, nested)": ("bfloat16", True, True, "adamw_torch_fused"),
}
RUNS = {
    "SFT 2,048": ("sft", 0, 2048),
    "SFT 16,384": ("sft", 0, 16384),
    "GRPO 512 + 1,024": ("grpo", 512, 1024),
}
CARDS = (24, 48, 80)


def cell(size: str, way: str, run: str) -> dict[str, Any]:
    """The estimate of one run on a GPU."""
    import peft
    import transformers

    import posttrain
    from posttrain.checks.memory import Lengths, plan
    from posttrain.models.memory_estimate import estimate_memory
    from posttrain.models.quantised import weight_bits

    dtype, packed, adapter, optimiser = WAYS[way]
    method, prompt, completion = RUNS[run]
    name = method.upper()
    own: dict[str, Any] = {"max_length": prompt + completion}
    if method == "grpo":
        own = {"max_completion_length": completion, "num_generations": 8, "rollout_engine": "native"}
    args = getattr(posttrain, f"{name}Config")(
        "unused", bf16=True, optim=optimiser, per_device_train_batch_size=8, report_to="none",
        model_init_kwargs={"dtype": dtype}, **own,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    bits = weight_bits({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}) if packed else None
    work = plan(
        getattr(posttrain, f"{name}Trainer"), args, transformers.Qwen2Config(**SHAPES[size]),
        lengths=Lengths(prompt, completion), peft_config=lora, device="cuda", bits=bits,
    )  # fmt: skip
    found = estimate_memory(work)
    return {"peak": found.peak, "components": found.components, "moment": found.fullest}


def apart(size: str, way: str) -> dict[str, Any]:
    """`cell` of each run, in a process of their own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", size, way], capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def fits(peak: int) -> str:
    """GiB, and the smallest card that has room for it with a tenth to spare."""
    size = peak / 2**30
    card = next((str(card) for card in CARDS if size <= 0.9 * card), "-")
    return f"{size:.0f} ({card})"


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "WAY"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps({run: cell(*options.one, run) for run in RUNS}))
        return
    lines = [f"| model, what is trained | {' | '.join(RUNS)} |", "|---" * (len(RUNS) + 1) + "|"]
    found = []
    for size in SHAPES:
        for way in WAYS:
            row = apart(size, way)
            found.append({"model": size, "way": way, **row})
            lines.append(f"| {size}, {way} | {' | '.join(fits(one['peak']) for one in row.values())} |")
            print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / "one_gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        made = "\n".join(lines)
        options.page.write_text(f"{head}{BEGIN}\n{made}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
