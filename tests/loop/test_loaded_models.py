"""What is said where a model is given as an object, and settings for loading one beside it."""

import pytest
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests.conftest import build_model

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
