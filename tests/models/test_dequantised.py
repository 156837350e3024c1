"""Weights of quantized models for engines and checkpoints: dequantized, with the adapter merged."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.import_utils import is_bnb_4bit_available
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from posttrain.errors import ModelError
from posttrain.models.quantised import is_packed, unrounded_inputs
from posttrain.rollouts.shared_weights import Weights, check_mergeable, copy_into, save_merged
from tests.conftest import build_model
from tests.models.architectures import built
from tests.wordings import raises

IDS = torch.tensor([[5, 9, 13, 20, 21, 22, 23, 6]])
SOME = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, **SOME),
    "lora with biases": lambda: peft.LoraConfig(r=4, bias="all", lora_bias=True, **SOME),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **SOME),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, **SOME),
    "vera": lambda: peft.VeraConfig(r=8, **SOME),
    "miss": lambda: peft.MissConfig(r=4, **SOME),
    "layer norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 9], task_type="CAUSAL_LM"),
}


class Params4bit(nn.Parameter):
    """Packed weight with the class name of bitsandbytes. The dense weight is its state."""

    def __new__(cls, dense):
        packed = torch.zeros(dense.numel() // 2, 1, dtype=torch.uint8)
        weight = torch.Tensor._make_subclass(cls, packed, False)
        weight.quant_state = dense
        return weight

    def __deepcopy__(self, memo):
        return Params4bit(self.quant_state)


class Linear4bit(nn.Linear):
    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = Params4bit((layer.weight.detach() * 8).round() / 8), layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.quant_state, self.bias)


@pytest.fixture
def package(monkeypatch):
    """Stand-in for bitsandbytes. Where the package is, the tests below run instead."""
    if is_bnb_4bit_available():  # peft caches the answer, so that it does not find the stand-in.
        pytest.skip("bitsandbytes is installed")
    fake: Any = ModuleType("bitsandbytes")
    fake.__spec__ = ModuleSpec("bitsandbytes", None)
    fake.functional = SimpleNamespace(dequantize_4bit=lambda data, state: state)
    fake.nn = SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=type("Linear8bitLt", (), {}))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)


def packed_model():
    """Return a Llama whose linear layers, except the output layer, are packed."""
    model: Any = build_model(37, attention_bias=True, mlp_bias=True)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            model.set_submodule(name, Linear4bit(layer))
    model.is_loaded_in_4bit = True
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    model.hf_quantizer = SimpleNamespace(quantization_config=model.config.quantization_config)
    return model.requires_grad_(False)


def adapted(model, config):
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("kind", ADAPTERS)
def test_engines_receive_dequantized_weights_with_the_adapter(kind, package):
    model = adapted(packed_model(), ADAPTERS[kind]())
    check_mergeable(model)
    worker = build_model(37, seed=5, attention_bias=True, mlp_bias=True)
    copy_into(worker, dict(Weights(model)))
    torch.testing.assert_close(logits(worker), logits(model), atol=1e-5, rtol=1e-4)
    base = dict(Weights(model, adapters=False))
    assert {name: tensor.shape for name, tensor in base.items()} == {n: t.shape for n, t in Weights(worker)}
    assert not any(map(is_packed, base.values()))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_checkpoint_of_a_packed_model_is_a_plain_checkpoint(kind, package, tmp_path):
    model = adapted(packed_model(), ADAPTERS[kind]())
    save_merged(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not hasattr(loaded.config, "quantization_config") and not any(map(is_packed, loaded.parameters()))
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-4)
    base = model.get_base_model()
    assert base.hf_quantizer is not None and base.config.quantization_config.load_in_4bit


def test_a_packed_model_of_another_package_is_not_saved_as_a_whole(tmp_path):
    model = build_model(37)
    model.hf_quantizer, model.quantization_method = object(), "gptq"
    with raises(ModelError, "gptq", "model.dequantize()"):
        save_merged(adapted(model, ADAPTERS["lora"]()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What runs where the package is ---------------------------------------------------------------------------------------

real = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
MORE = ADAPTERS | {
    "ia3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **SOME),
    "hira": lambda: peft.HiraConfig(r=4, **SOME),
    "road": lambda: peft.RoadConfig(group_size=16, **SOME),
}
QUANTIZED = {
    4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    8: {"load_in_8bit": True},
}


def load(folder, bits):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**QUANTIZED[bits])
    )


@pytest.fixture
def folder(tmp_path):
    build_model(37, attention_bias=True, mlp_bias=True).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@real
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", MORE)
def test_a_merged_checkpoint_computes_what_the_adapter_computes_on_dequantized_weights(kind, bits, folder, tmp_path):
    if (kind, bits) == ("dora", 8):
        pytest.skip("the second forward pass of peft's DoRA on 8-bit weights fails on a CPU")
    model = adapted(load(folder, bits), MORE[kind]())
    expected = logits(model)
    save_merged(model, tmp_path / "merged")
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    # Products with 8-bit weights quantize the activations too, which the merged model does not.
    torch.testing.assert_close(loaded, expected, atol=1e-4 if bits == 4 else 0.5, rtol=0)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(load(folder, bits).dequantize(), tmp_path / "adapter")
    torch.testing.assert_close(loaded, logits(plain), atol=1e-4, rtol=0)


@real
@pytest.mark.parametrize("kind", ["gpt2", "qwen3 moe"])
@pytest.mark.parametrize("bits", [4, 8])
def test_transposed_layers_and_renamed_experts_are_dequantized(kind, bits, tmp_path):
    built(kind).save_pretrained(tmp_path / "base")
    base = load(tmp_path / "base", bits)
    assert any(map(is_packed, base.parameters()))
    model = adapted(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    expected = logits(model)
    save_merged(model, tmp_path / "merged")
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(loaded, expected, atol=1e-4 if bits == 4 else 0.5, rtol=0)


@real
@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_that_was_saved_packed_is_dequantized(bits, folder, tmp_path):
    load(folder, bits).save_pretrained(tmp_path / "packed")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert any(map(is_packed, base.parameters()))
    model = adapted(base, ADAPTERS["lora"]())
    expected = logits(model)
    plain = build_model(37, attention_bias=True, mlp_bias=True)
    assert set(dict(Weights(model, checkpoint_names=True))) == set(Weights(plain).names)
    save_merged(model, tmp_path / "merged")
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    torch.testing.assert_close(loaded, expected, atol=1e-4 if bits == 4 else 0.5, rtol=0)


@real
def test_log_probs_for_the_comparison_with_an_engine_do_not_round_inputs(folder):
    """An engine multiplies by dequantized weights, so the limits of the comparison need no room for inputs in 8 bits."""
    model = adapted(load(folder, 8), ADAPTERS["lora"]())
    plain = build_model(37, attention_bias=True, mlp_bias=True)
    copy_into(plain, dict(Weights(model)))
    before = logits(model)
    assert (before - logits(plain)).abs().max() > 1e-3
    with unrounded_inputs(model):
        torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=0)
    assert torch.equal(logits(model), before)
