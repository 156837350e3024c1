"""What is sent to an engine that holds a copy: whole, under the checkpoint's names, merged without touching the base."""

import doctest
import hashlib

import peft
import pytest
import torch

import posttrain.rollouts.workers.shared_weights
from posttrain.rollouts.workers import shared_weights as merged
from posttrain.rollouts.workers.shared_weights import Weights, as_dtype, merged_weights
from tests.conftest import build_model


def adapted(model, seed=1, **settings):
    """An adapter whose B is not zero."""
    base = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**(base | settings)))
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter.data.normal_(0, 0.1)
    return wrapped.eval()


def fingerprint(model):
    return {
        n: hashlib.sha256(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for n, p in model.named_parameters()
    }


def same_as_trainer(trainer_model, sent, vocabulary=37, **config):
    """A fresh model with the sent weights computes what the trainer's computes."""
    copy = build_model(vocabulary, seed=5, **config)
    left = copy.load_state_dict(sent, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= set(copy.all_tied_weights_keys)
    ids = torch.randint(0, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, trainer_model(ids).logits, atol=2e-5, rtol=1e-4)


def test_examples_in_docstrings_run():
    for module in (merged, posttrain.rollouts.workers.shared_weights):
        assert doctest.testmod(module).attempted > 0
        assert doctest.testmod(module).failed == 0


def test_a_tied_weight_is_sent_once_and_an_untied_one_too():
    assert "lm_head.weight" not in Weights(build_model(37)).names
    assert len(Weights(build_model(37)).names) == len(set(Weights(build_model(37)).names))
    assert "lm_head.weight" in Weights(build_model(37, tie_word_embeddings=False)).names


def test_names_lose_what_wrappers_put_into_them():
    model = build_model(37)
    layers = model.model.layers
    layers[0].mlp = torch.nn.ModuleDict({"_checkpoint_wrapped_module": layers[0].mlp})
    outer = torch.nn.Module()
    outer.module = model
    assert Weights(outer).names == Weights(build_model(37)).names


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"trainable_token_indices": [3, 4]},
        {"fan_in_fan_out": False, "rank_pattern": {"q_proj": 2}},
    ],
    ids=lambda s: next(iter(s), "plain"),
)
def test_merged_adapters_compute_what_the_trainer_computes(settings):
    untied = {"tie_word_embeddings": False} if {"modules_to_save", "trainable_token_indices"} & set(settings) else {}
    untied |= {"tie_word_embeddings": False} if "embed_tokens" in settings.get("target_modules", ()) else {}
    model = adapted(build_model(37, attention_bias=True, **untied), **settings)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens_delta" in name or name.endswith("bias"):
            parameter.data += 0.05
    weights = Weights(model)
    sent = dict(weights)
    assert list(sent) == weights.names
    assert not any("lora" in name or "base_layer" in name or "default" in name for name in sent)
    same_as_trainer(model, sent, attention_bias=True, **untied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trap_s2_a_thousand_merges_leave_every_byte_of_the_base_as_it_was(dtype):
    model = adapted(build_model(37, hidden_size=16, num_hidden_layers=1)).to(dtype)
    before = fingerprint(model)
    first = {name: tensor.clone() for name, tensor in Weights(model)}
    for _ in range(1000):
        for name, read in merged_weights(model):
            if "q_proj" in name or "down_proj" in name:
                read()
    assert fingerprint(model) == before
    assert all(torch.equal(first[name], tensor) for name, tensor in Weights(model))


def test_merging_in_half_precision_rounds_once():
    model = adapted(build_model(37)).to(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    sent = dict(Weights(model))["model.layers.0.self_attn.q_proj.weight"]
    step = exact.abs() * 2.0**-8 + 1e-6
    assert ((sent.double() - exact).abs() <= step).all()


def test_weights_are_those_of_the_moment_they_are_read():
    model = build_model(37)
    weights = Weights(model, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert dict(weights)["model.norm.weight"].eq(3.0).all()
    assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16}


def test_a_dtype_is_known_by_either_of_its_names():
    assert as_dtype("float16") is as_dtype("torch.float16") is torch.float16
    assert as_dtype("auto") is as_dtype(None) is None
