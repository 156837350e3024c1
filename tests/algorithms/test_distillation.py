"""Distillation trainers: what they compare, on whose tokens, and what they refuse."""

import dataclasses

import datasets
import pytest
import torch
from torch.nn import functional as F

from posttrain import DistillationConfig, DistillationTrainer
from tests.algorithms.helpers import SHORT, losses, prompts, scripted
from tests.conftest import build_model

BASE = SHORT | {"per_device_train_batch_size": 4, "max_completion_length": 8, "use_cpu": True, "learning_rate": 0.5}
BASE |= {"optim": "sgd"}


def answers(count=8):
    """Prompts, two of them equal, with answers of uneven length."""
    rows = [{"prompt": f"What is {i // 2}? ", "completion": "a number " * (1 + i % 3)} for i in range(count)]
    return datasets.Dataset.from_list(rows)


def make(folder, tokenizer, *, teacher="other", data=None, config=DistillationConfig, cls=DistillationTrainer, **settings):
    """A distillation trainer on two-layer models."""
    names = ("eval_dataset", "peft_config", "rollout_engine", "teacher_processing_class", "teacher_server", "reward_funcs", "model")
    keys = {name: settings.pop(name) for name in names if name in settings}
    model = keys.pop("model", None) or build_model(len(tokenizer))
    teacher = build_model(len(tokenizer), seed=1) if isinstance(teacher, str) and teacher == "other" else teacher
    given = {} if teacher is None else {"teacher_model": teacher}
    args = config(str(folder), **(BASE | settings))
    data = answers() if data is None else data
    return cls(model, args=args, train_dataset=data, processing_class=tokenizer, **given, **keys)


def dense_loss(student, teacher, rows, beta, temperature=1.0):
    """Mean over answer tokens of the divergence, from each sequence alone and its full logits."""
    total, count = 0.0, 0
    for prompt, answer in rows:
        ids = torch.tensor([prompt + answer])
        x, y = (m(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature for m in (student, teacher))
        q, p = x.softmax(-1), y.softmax(-1)
        m = beta * p + (1 - beta) * q
        if beta in (0.0, 1.0):
            a, b = (p, q) if beta == 0 else (q, p)
            values = (a * (a.log() - b.log())).sum(-1)
        else:
            values = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
        total, count = total + values.sum(), count + len(answer)
    return total / count


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_step_on_the_dataset_is_the_dense_loss_of_each_sequence_alone(beta, temperature, tmp_path, tiny_tokenizer):
    trainer = make(
        tmp_path, tiny_tokenizer, beta=beta, temperature=temperature, lmbda=0.0, max_steps=1,
        per_device_train_batch_size=8, max_grad_norm=0.0,
    )  # fmt: skip
    student, teacher = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer), seed=1)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    loss = dense_loss(student, teacher, rows, beta, temperature)
    loss.backward()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-5)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        assert torch.allclose(ours, theirs - 0.5 * theirs.grad, atol=1e-5), name
