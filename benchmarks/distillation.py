"""A step of GKD against the peer: on the dataset's answers, where losses must be equal, and on the student's own samples.

The teacher is the student with noise on its weights. Off policy: prompts of about 128 tokens, answers of 64, batch 4. On policy:
2 prompts, 4 samples of 48 tokens each; TRL has no groups, so each prompt stands in its batch four times.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any

import harness


def rows(count: int, prompt: int, answer: int, repeat: int) -> list[dict[str, Any]]:
    """Conversations of one turn, one token a word."""
    rng = random.Random(0)

    def words(length: int) -> str:
        return " ".join(rng.choices(harness.WORDS, k=length))

    made = [
        [{"role": "user", "content": words(prompt)}, {"role": "assistant", "content": words(answer)}]
        for _ in range(count)
    ]
    return [{"messages": messages} for messages in made for _ in range(repeat)]


def teacher_of(model: str) -> Any:
    """The same weights with noise of a hundredth of their size."""
    import torch
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=made) * parameter.std() * 0.05)
    return teacher


def run(side: str, model: str, steps: int, *, on_policy: bool) -> dict[str, Any]:
    """Train ``steps`` steps and tell times, memory, losses."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    library: Any = importlib.import_module("posttrain" if side == "ours" else "trl.experimental.gkd")
    batch, repeat = (8, 4) if on_policy else (4, 1)
    options: dict[str, Any] = {"lmbda": float(on_policy), "max_new_tokens": 48, "max_length": 512, "beta": 0.5}
    options |= {"per_device_train_batch_size": batch, "gradient_checkpointing": False, "learning_rate": 1e-5}
    options |= {"max_grad_norm": 1e9}
    if side == "ours":
        options |= {"num_generations": repeat, "shuffle_dataset": False}
    else:
        options |= {"train_sampling_strategy": "sequential"}
    shared = harness.settings(steps, **options)
    shared.pop("model_init_kwargs")
    data = rows(steps * batch // repeat, 120, 60, 1 if side == "ours" else repeat)
    import torch
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = library.GKDTrainer(
        student,
        teacher_of(model),
        args=library.GKDConfig(**shared),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return harness.timed(trainer)


def loss_memory(tokens: int) -> dict[str, float]:
    """Memory (GB) that forward and backward of the loss add, at a vocabulary of 49,152 and hidden states of 576."""
    import torch

    from posttrain.methods.distillation.config import Axes
    from posttrain.methods.distillation.objective import Comparison, HiddenTeacher
    from posttrain.models.heads import LogitRule, TokenHead

    layer = torch.nn.Linear(576, 49_152, bias=False)
    hidden, teacher = torch.randn(tokens, 576, requires_grad=True), torch.randn(tokens, 576)
    view = HiddenTeacher(teacher, torch.randn(49_152, 576))
    compare = Comparison(Axes(beta=0.5), view, columns=None, policy_temperature=1.0)
    places = torch.zeros(tokens, dtype=torch.long)
    before = harness.peak_memory()
    head = TokenHead(places, places, places)
    compare(hidden, layer, LogitRule(), head)["divergence"].sum().backward()
    return {"tokens": tokens, "added_gb": round(harness.peak_memory() - before, 3)}


def main() -> None:
    """Both figures, and the memory of the loss by tokens."""
    options = harness.parser(__doc__)
    options.add_argument("--loss_tokens", type=int, help="(child) the loss alone, of so many tokens")
    options.add_argument("--steps", type=int, default=3, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--on_policy", action="store_true", help="sample; losses are then of different tokens")
    args = options.parse_args()
    if args.loss_tokens:
        print(json.dumps(loss_memory(args.loss_tokens)))
        return
    if args.side:
        print(json.dumps(run(args.side, args.model, args.steps, on_policy=args.on_policy)))
        return
    common = ["--model", args.model or harness.default_model(), "--steps", str(args.steps)]
    off = harness.compare("GKD", harness.alternate(__file__, args.pairs, *common))
    sampled = harness.alternate(__file__, args.pairs, *common, "--on_policy")
    on = harness.compare("GKD, on policy", sampled, same_work=False)
    memory = [harness.child(sys.executable, __file__, "--loss_tokens", str(n)) for n in (1024, 2048, 4096, 8192)]
    print(f"memory of the loss: {memory}")
    harness.save("distillation", {"off_policy": off, "on_policy": on, "loss_memory": memory})


if __name__ == "__main__":
    main()
