"""What every trainer says of its run: once, early, and with what to do."""

import pytest
import torch

from posttrain import ConfigError
from tests.algorithms.helpers import grpo, sft, weights
from tests.conftest import build_model


def test_t42_half_precision_weights_at_a_small_rate_are_told(tiny_tokenizer, tmp_path, caplog):
    sft(tmp_path, tiny_tokenizer, model=build_model(len(tiny_tokenizer)).to(torch.bfloat16), learning_rate=1e-6)
    assert "TRAIN-HALF-PRECISION" in caplog.text


def test_a_model_that_is_frozen_ends_at_its_first_step(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=3)
    handles = [p.register_hook(torch.zeros_like) for p in trainer.model.parameters()]
    before = weights(trainer).clone()
    with pytest.raises(ConfigError, match="TRAIN-NO-GRADIENT"):
        trainer.train()
    assert torch.equal(before, weights(trainer))
    for handle in handles:
        handle.remove()


def test_groups_without_variance_are_no_reason_to_stop(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    assert trainer.state.global_step == 2


def test_t9_three_steps_without_a_trained_token_end_the_run(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer)
    for tokens in (5, 0, 0):
        trainer.check_trained(tokens)
    with pytest.raises(ConfigError, match="TRAIN-NO-TRAINED-TOKENS: 3 steps in a row"):
        trainer.check_trained(0)


def test_t4_a_saved_pad_that_ends_texts_is_told_once(tiny_tokenizer, tmp_path, caplog):
    trainer = sft(tmp_path, tiny_tokenizer)
    trainer.save_model(tmp_path / "one")
    trainer.save_model(tmp_path / "two")
    assert caplog.text.count("TOKENS-PAD-STOPS") == 1
