"""What every trainer says of its run: once, early, and with what to do."""

import datasets
import pytest
import torch

from posttrain import ConfigError
from posttrain.losses.reduce import Denominators
from tests.conftest import build_model
from tests.methods.helpers import grpo, sft, weights
from tests.wordings import raises


def test_t42_half_precision_weights_at_a_small_rate_are_told(tiny_tokenizer, tmp_path, caplog):
    sft(tmp_path, tiny_tokenizer, model=build_model(len(tiny_tokenizer)).to(torch.bfloat16), learning_rate=1e-6)
    assert "PT-C001" in caplog.text


def test_a_model_that_is_frozen_ends_at_its_first_step(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=3)
    handles = [p.register_hook(torch.zeros_like) for p in trainer.model.parameters()]
    before = weights(trainer).clone()
    with pytest.raises(ConfigError, match="PT-B003"):
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
        trainer.run.watch("step", trainer.run, [], Denominators(tokens, 4, 1))
    with raises(ConfigError, "PT-T001", "3"):
        trainer.run.watch("step", trainer.run, [], Denominators(0, 4, 1))


def test_t51_padding_is_logged_and_told_where_rows_must_be_padded(tiny_tokenizer, tmp_path, caplog):
    uneven = datasets.Dataset.from_list([{"text": "a"}, {"text": "word " * 40}] * 6)
    settings = {"data": uneven, "max_steps": 3, "per_device_train_batch_size": 12, "logging_steps": 1}
    padded = sft(tmp_path / "padded", tiny_tokenizer, compute_metrics=lambda prediction: {}, **settings)
    padded.train()
    (share,) = {round(row["padding_share"], 6) for row in padded.state.log_history if "loss" in row}
    short, long = (len(row) for row in padded.train_dataset["input_ids"][:2])
    assert share == pytest.approx(1 - (short + long) / (2 * long), abs=1e-5)
    assert caplog.text.count("PT-T002") == 1
    packed = sft(tmp_path / "packed", tiny_tokenizer, **settings)
    caplog.clear()
    packed.train()
    assert "PT-T002" not in caplog.text


def test_trap_27_documents_and_trained_tokens_of_a_step_are_logged(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=3, gradient_accumulation_steps=2, logging_steps=3)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["documents"] == pytest.approx((8 + 4 + 8) / 3)  # 12 rows: the second step of an epoch has four.
    trained = sum(label != -100 for labels in trainer.train_dataset["labels"] for label in labels[1:])
    assert row["trained_tokens"] * 2 == pytest.approx(trained, rel=0.5)


@pytest.mark.parametrize("rotary", [True, False])
def test_t29_sequences_beyond_the_model_s_positions_are_told_or_refused(tiny_tokenizer, tmp_path, caplog, rotary):
    data = datasets.Dataset.from_list([{"text": "0 " * 40}] * 4)
    model = build_model(len(tiny_tokenizer), max_position_embeddings=32) if rotary else absolute(len(tiny_tokenizer))
    trainer = sft(tmp_path, tiny_tokenizer, model=model, data=data, max_length=None)
    if rotary:
        trainer.train()
        assert caplog.text.count("PT-T003: a sequence has 81 tokens, but the model has 32 positions") == 1
    else:
        with raises(ConfigError, "PT-T003", "max_length=32"):
            trainer.train()


def absolute(vocabulary):
    """A model whose positions are rows of a table."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=32, n_embd=32, n_layer=2, n_head=4, eos_token_id=2, bos_token_id=1
    )
    return GPT2LMHeadModel(config)


def test_t4_a_saved_pad_that_ends_texts_is_told_once(tiny_tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")  # Published models are so: it is no warning.
    trainer = sft(tmp_path, tiny_tokenizer)
    trainer.save_model(tmp_path / "one")
    trainer.save_model(tmp_path / "two")
    assert caplog.text.count("PT-K101") == 1
