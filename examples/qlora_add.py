"""The sums of `grpo_add.py` taught to an adapter, once on whole weights (LoRA) and once on 4-bit ones (QLoRA), beside each other.

`python examples/qlora_add.py MODEL [STEPS]` needs peft and bitsandbytes, and runs on a CPU. SmolLM2-135M-Instruct, 12 steps of
32 sums, one thread of a busy machine (`benchmarks/results/qlora.json`); of 64 sums that were never trained on:

|       | weights | right before | right after | seconds a step |
|-------|---------|--------------|-------------|----------------|
| LoRA  | 558 MB  | 14           | 41          | 20.1           |
| QLoRA | 189 MB  | 2            | 34          | 37.6           |
"""

import json
import sys
import time
from pathlib import Path

import torch
from grpo_add import count_right, exam, questions
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from posttrain import SFTConfig, SFTTrainer


def make_trainer(model: str, output_dir: str, steps: int, *, four_bits: bool) -> SFTTrainer:
    """SFT of an adapter on 32 sums a step; on 4-bit weights with doubly quantised scales, or on the weights as they are."""
    train, held_out = questions(32 * steps)
    answered = train.map(lambda row: {"completion": [{"role": "assistant", "content": row["answer"]}]})
    options = {
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    config = SFTConfig(output_dir, max_steps=steps, save_strategy="no", report_to="none", seed=0, **options)
    # Products are computed in bfloat16 where that is the faster: bnb_4bit_compute_dtype=torch.bfloat16.
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    packed = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=answered.select_columns(["prompt", "completion"]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        quantization_config=packed if four_bits else None,
    )
    trainer.eval_dataset = held_out  # What `exam` asks.
    return trainer


def weight_bytes(model: torch.nn.Module) -> int:
    """Of all weights as they stand in memory, scales of packed ones included."""
    size = sum(p.nbytes for p in model.parameters())
    states = (getattr(getattr(m, "weight", None), "quant_state", None) for m in model.modules())
    return size + sum(s.absmax.nbytes + (s.state2.absmax.nbytes if s.nested else 0) for s in states if s is not None)


def run(model: str, steps: int, *, four_bits: bool) -> dict:
    """Train one adapter; what it knew before and knows after."""
    trainer = make_trainer(model, f"runs/{'qlora' if four_bits else 'lora'}_add", steps, four_bits=four_bits)
    before, began = count_right(exam(trainer)), time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    trainer.save_model()
    return {
        "weights_mb": round(weight_bytes(trainer.model) / 1e6),
        "right_before": before,
        "right_after": count_right(exam(trainer)),
        "seconds_a_step": round(seconds / steps, 1),
        "loss": [round(row["loss"], 3) for row in trainer.state.log_history if "loss" in row],
    }


if __name__ == "__main__":
    model, steps = sys.argv[1], int((sys.argv[2:] or [12])[0])
    found = {name: run(model, steps, four_bits=name == "QLoRA") for name in ("LoRA", "QLoRA")}
    print("|  | weights | right before | right after | seconds a step |\n|---|---|---|---|---|")
    for name, row in found.items():
        right = f"{row['right_before']} of 64 | {row['right_after']} of 64"
        print(f"| {name} | {row['weights_mb']} MB | {right} | {row['seconds_a_step']} |")
    Path("runs/qlora_add.json").write_text(json.dumps({"steps": steps, **found}, indent=1), encoding="utf-8")
