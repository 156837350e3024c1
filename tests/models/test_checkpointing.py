"""Checkpointing without its last layers: how many, which ones, and that no number moves."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain import ConfigError, SFTConfig, SFTTrainer
from posttrain.models import memory
from posttrain.models.memory import keep_last_activations, layers_to_keep
from tests.conftest import build_model


def flags(model) -> list[bool]:
    return [m.gradient_checkpointing for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def test_layers_are_kept_up_to_the_memory_of_the_logits():
    """Hidden 32, 4 heads, 2 key-value heads, inner 64: linear outputs a token and layer 32+16+16+32+64+64+32 = 256.

    Kept: 512 numbers a layer. Logits and gradient: 2 V. V = 320 pays for one layer, V = 2000 for seven.
    """
    outputs = 32 + 16 + 16 + 32 + 64 + 64 + 32
    model = build_model(320, num_hidden_layers=12)
    linear = [m for m in model.model.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    assert sum(m.out_features for m in linear) == outputs
    assert layers_to_keep(model) == 2 * 320 // (2 * outputs) == 1
    assert layers_to_keep(build_model(2000, num_hidden_layers=12)) == 7
    assert layers_to_keep(build_model(20000, num_hidden_layers=12)) == 12


def test_a_model_without_a_language_head_keeps_nothing():
    assert layers_to_keep(build_model(320, num_hidden_layers=4).model) == 0


def test_the_last_layers_are_kept():
    model = build_model(320, num_hidden_layers=4)
    model.activation_checkpointing_enable()
    assert keep_last_activations(model, 1) == 1
    assert flags(model) == [True, True, True, False]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, True, True, False]),
        ({"kept_layers": 0}, [True] * 4),
        ({"kept_layers": 3}, [True, False, False, False]),
        ({"gradient_checkpointing": False}, [False] * 4),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, [True, False, True, False]),
    ],
)
def test_training_keeps_the_last_layers_unless_told_otherwise(options, expected, tiny_tokenizer, tmp_path):
    model = build_model(len(tiny_tokenizer), num_hidden_layers=4)
    config = SFTConfig(str(tmp_path), max_steps=1, report_to="none", **options)
    data = Dataset.from_list([{"text": "What is the sum?"}] * 8)
    trainer = SFTTrainer(model, args=config, train_dataset=data, processing_class=tiny_tokenizer)
    seen = []
    step = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: (seen.append(flags(model)), step(*args, **kwargs))[1]
    trainer.train()
    assert seen[0] == expected


def test_keeping_layers_does_not_move_the_loss_or_the_gradient(tiny_tokenizer, tmp_path):
    data = Dataset.from_list([{"text": "What is the sum of two numbers?"}, {"text": "The answer is 3."}] * 4)
    found = []
    for kept in (0, 2):
        config = SFTConfig(str(tmp_path / str(kept)), max_steps=2, logging_steps=1, report_to="none", kept_layers=kept)
        model = build_model(len(tiny_tokenizer), num_hidden_layers=4)
        trainer = SFTTrainer(model, args=config, train_dataset=data, processing_class=tiny_tokenizer)
        trainer.train()
        found.append([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-6, atol=1e-7)


class Calls(TorchDispatchMode):
    """Counts the attention kernels that really run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in memory.ATTENTION_OPS
        return func(*args, **kwargs or {})


def test_selective_checkpointing_computes_attention_once(tiny_tokenizer, tmp_path):
    rows = Dataset.from_list([{"text": "What is the sum?"}] * 8)
    losses, calls = [], []
    for options in (None, {"selective": True}):
        args = SFTConfig(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], gradient_checkpointing_kwargs=options, kept_layers=0
        )
        trainer = SFTTrainer(
            build_model(len(tiny_tokenizer)), args, train_dataset=rows, processing_class=tiny_tokenizer
        )
        counter = Calls()
        step = trainer.training_step
        trainer.training_step = lambda *given, step=step, counter=counter: counting(step, counter, *given)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
        calls.append(counter.count)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert calls[0] == 2 * calls[1] > 0


def counting(step, counter, *given):
    with counter:
        return step(*given)


def test_selective_checkpointing_is_never_reentrant():
    with pytest.raises(ConfigError, match="use_reentrant=True"):
        memory.recompute_activations(build_model(64), {"selective": True, "use_reentrant": True})


def test_selective_checkpointing_keeps_what_every_kernel_of_attention_computed():
    """That of parts of tries on a GPU has a name of its own, and was computed twice."""
    from torch.nn.attention import varlen

    assert varlen.varlen_attn is not None  # Registers its operator.
    for op in (torch.ops.torch_attn._varlen_attn.default, *memory.ATTENTION_OPS):
        assert memory.keep_attention(None, op) == CheckpointPolicy.MUST_SAVE, op
    assert memory.keep_attention(None, torch.ops.aten.mm.default) == CheckpointPolicy.PREFER_RECOMPUTE
