"""What is said where a model is given as an object, and settings for loading one beside it."""

import sys
from types import MethodType, ModuleType

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
        assert caplog.text.count(f"{name} is ignored, because the model was passed as an object") == 1


def kinds_of_a_run(folder, tokenizer, **settings):
    """What a layer of a run with autocast computes in, and its losses."""
    trainer, seen = sft(folder, tokenizer, bf16=True, gradient_checkpointing=False, **settings), set()
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    trainer.train()
    return seen, losses(trainer)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_compiled_model_computes_in_the_precision_of_its_run(tiny_tokenizer, tmp_path):
    """Around torch.compile's wrapper the layers were called outside of autocast, and were not compiled either."""
    plain = kinds_of_a_run(tmp_path / "plain", tiny_tokenizer)
    compiled = kinds_of_a_run(tmp_path / "compiled", tiny_tokenizer, torch_compile=True, torch_compile_backend="eager")
    assert plain[0] == compiled[0] == {torch.bfloat16}
    assert compiled[1] == pytest.approx(plain[1], abs=1e-3)


def test_layers_of_liger_are_taken_and_its_loss_is_not(tiny_tokenizer, tmp_path, monkeypatch):
    """Its forward took the place of the one that reads the output layer in chunks, which then ran outside of autocast."""
    given, liger = [], ModuleType("liger_kernel.transformers")

    def apply(model, cross_entropy=False, fused_linear_cross_entropy=True, **options):
        given.append((cross_entropy, fused_linear_cross_entropy, options))
        if fused_linear_cross_entropy:
            own = type(model).forward
            model.forward = MethodType(lambda self, *args, **kwargs: own(self, *args, **kwargs), model)

    liger._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    settings = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}, "preflight": "off"}
    kinds, _ = kinds_of_a_run(tmp_path, tiny_tokenizer, **settings)
    assert given == [(False, False, {"rope": False})]
    assert kinds == {torch.bfloat16}
