"""Adapters: what they save whole is used, what cannot train is refused."""

import peft
import pytest
import torch

from posttrain import ConfigError, ModelError
from tests.algorithms.helpers import chats, sft
from tests.conftest import build_model


def test_a_head_that_peft_trains_whole_is_the_one_that_is_used(tiny_tokenizer, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = build_model(len(tiny_tokenizer), tie_word_embeddings=False)
    trainer = sft(tmp_path, tiny_tokenizer, model=model, peft_config=config, max_steps=2, eval_dataset=chats(4))
    before = losses_of(trainer)
    trainer.train()
    head = trainer.model.base_model.model.lm_head
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    assert trainer.evaluate()["eval_loss"] < before
    with trainer.model.disable_adapter():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)


def losses_of(trainer):
    return trainer.evaluate()["eval_loss"]


def test_an_adapter_loaded_for_inference_is_refused(tiny_tokenizer, tmp_path):
    base = build_model(len(tiny_tokenizer))
    peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(build_model(len(tiny_tokenizer)), tmp_path / "adapter")
    with pytest.raises(ModelError, match="is_trainable=True"):
        sft(tmp_path, tiny_tokenizer, model=frozen)
    going_on = peft.PeftModel.from_pretrained(build_model(len(tiny_tokenizer)), tmp_path / "adapter", is_trainable=True)
    sft(tmp_path, tiny_tokenizer, model=going_on, max_steps=1).train()
    with pytest.raises(ModelError, match="holds an adapter without its base model"):
        sft(tmp_path, tiny_tokenizer, model=str(tmp_path / "adapter"))


def test_prefix_tuning_with_recomputed_activations_is_refused(tiny_tokenizer, tmp_path):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ConfigError, match="gradient_checkpointing=False"):
        sft(tmp_path, tiny_tokenizer, peft_config=config)
