"""What is said where a model is given as an object, and settings for loading one beside it."""

import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests.conftest import build_model
from tests.methods.helpers import losses, sft

COMMON = {"report_to": "none", "per_device_train_batch_size": 2, "model_init_kwargs": {"dtype": "float32"}}


def letters(completions, **_):
    return [float(len(set(c))) for c in completions]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_settings_for_loading_are_ignored_aloud(method, tiny_tokenizer, tmp_path, caplog):
    from transformers import BitsAndBytesConfig

    given = {"processing_class": tiny_tokenizer, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    model = build_model(len(tiny_tokenizer))
    if method == "sft":
        data = Dataset.from_list([{"text": "a b c"}] * 2)
        trainer = SFTTrainer(model, SFTConfig(str(tmp_path), **COMMON), train_dataset=data, **given)
    else:
        data = Dataset.from_list([{"prompt": "a b c"}] * 2)
        config = GRPOConfig(str(tmp_path), **COMMON, num_generations=2, max_completion_length=4)
        trainer = GRPOTrainer(model, letters, config, train_dataset=data, **given)
    assert trainer.model is model
    for name in ("quantization_config", "model_init_kwargs"):
        assert f"{name} is ignored: the model was given as an object, already loaded" in caplog.text


def kinds_of_a_run(folder, tokenizer, **settings):
    """What a layer of a run with autocast computes in, and its losses."""
    trainer, seen = sft(folder, tokenizer, bf16=True, gradient_checkpointing=False, **settings), set()
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    trainer.train()
    return seen, losses(trainer)


def test_a_compiled_model_computes_in_the_precision_of_its_run(tiny_tokenizer, tmp_path):
    """Around torch.compile's wrapper the layers were called outside of autocast, and were not compiled either."""
    plain = kinds_of_a_run(tmp_path / "plain", tiny_tokenizer)
    compiled = kinds_of_a_run(tmp_path / "compiled", tiny_tokenizer, torch_compile=True, torch_compile_backend="eager")
    assert plain[0] == compiled[0] == {torch.bfloat16}
    assert compiled[1] == pytest.approx(plain[1], abs=1e-3)
