"""Models made ready: adapters, checkpointing, bare parameters, and scores read at the right token."""

from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForSequenceClassification

import posttrain
from posttrain.errors import ArgumentTypeError, ConfigError
from tests.wordings import raises

LORA = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def layers(model):
    return [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]


def test_checkpointing_is_back_with_the_layers_that_had_it_even_after_an_exception(tiny_model):
    posttrain.enable_gradient_checkpointing(tiny_model, {"use_reentrant": False})
    tiny_model.model.layers[1].gradient_checkpointing = False
    before = [m.gradient_checkpointing for m in layers(tiny_model)]
    assert True in before and False in before
    with raises(RuntimeError), posttrain.disable_gradient_checkpointing(tiny_model):
        assert not any(m.gradient_checkpointing for m in layers(tiny_model))
        raise RuntimeError("stop")
    assert [m.gradient_checkpointing for m in layers(tiny_model)] == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_kwargs_are_passed_on(tiny_model, reentrant):
    posttrain.enable_gradient_checkpointing(tiny_model, {"use_reentrant": reentrant})
    layer = next(m for m in layers(tiny_model) if m.gradient_checkpointing)
    assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is reentrant


def test_only_a_quantised_base_gets_checkpointing_and_nothing_is_cast_up(tiny_model):
    tiny_model.bfloat16()
    plain = posttrain.prepare_model_for_kbit_training(tiny_model)
    assert not any(m.gradient_checkpointing for m in layers(plain))
    assert not any(p.requires_grad for p in plain.parameters())
    plain.is_loaded_in_4bit = True
    bits = posttrain.prepare_model_for_kbit_training(plain)
    assert any(m.gradient_checkpointing for m in layers(bits))
    assert {p.dtype for p in bits.parameters()} == {torch.bfloat16}


def test_an_adapter_on_a_quantised_base_trains_in_bf16_and_checkpointing_is_not_done_twice(tiny_model):
    tiny_model.is_loaded_in_4bit = True
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None, bf16=True)
    model = posttrain.prepare_peft_model(tiny_model, LORA, args)
    assert args.gradient_checkpointing is False
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name and p.dtype == torch.bfloat16 for name, p in trained.items())
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float32}


def test_an_adapter_trains_through_frozen_embeddings_under_checkpointing(tiny_model):
    args = SimpleNamespace(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, bf16=False
    )
    model = posttrain.prepare_peft_model(tiny_model, LORA, args).train()
    ids = torch.arange(3, 9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    norms = [float(p.grad.norm()) for name, p in model.named_parameters() if "lora_B" in name]
    assert norms and all(norms)


def test_two_adapters_and_no_adapter_config_are_refused(tiny_model):
    args = SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None, bf16=False)
    with raises(ArgumentTypeError):
        posttrain.prepare_peft_model(tiny_model, {"r": 4}, args)
    model = posttrain.prepare_peft_model(tiny_model, LORA, args)
    with raises(ConfigError):
        posttrain.prepare_peft_model(model, LORA, args)


def test_dora_magnitudes_stay_in_float32(tiny_model):
    model = peft.get_peft_model(tiny_model, peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]))
    posttrain.peft_module_casting_to_bf16(model)
    kinds = {p.dtype for name, p in model.named_parameters() if "magnitude" in name}
    assert kinds == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if "lora_A" in name} == {torch.bfloat16}


def test_generation_sees_the_bare_model_and_leaves_nothing_changed(tiny_model):
    accelerator = Accelerator(cpu=True)
    posttrain.enable_gradient_checkpointing(tiny_model)
    before, length = [m.gradient_checkpointing for m in layers(tiny_model)], tiny_model.generation_config.max_length
    with (
        pytest.raises(KeyError),
        posttrain.unwrap_model_for_generation(tiny_model, accelerator, generation_kwargs={"max_length": 7}) as model,
    ):
        assert model is tiny_model and model.generation_config.max_length == 7
        assert not any(m.gradient_checkpointing for m in layers(model))
        raise KeyError
    assert [m.gradient_checkpointing for m in layers(tiny_model)] == before
    assert tiny_model.generation_config.max_length == length


def scorer():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
        pad_token_id=2,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval()


def test_rewards_are_read_at_the_last_real_token_whatever_the_padding():
    model = scorer()
    ids = torch.tensor([[2, 2, 5, 6, 7, 8, 2, 2], [3, 4, 5, 6, 9, 10, 11, 12]])
    with torch.no_grad():
        scores, last, where = posttrain.get_reward(model, ids, 2, context_length=4)
        alone = model.score(model.model(torch.tensor([[5, 6, 7, 8]])).last_hidden_state)[0, -1, 0]
    assert scores.shape == (2, 8, 1) and where.tolist() == [5, 7]
    assert last[0] == pytest.approx(float(alone), abs=1e-5) and last[1] == scores[1, 7, 0]


def test_a_mask_keeps_an_eos_that_equals_pad():
    ids = torch.tensor([[5, 6, 7, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    with torch.no_grad():
        assert posttrain.get_reward(scorer(), ids, 2, 2)[2].tolist() == [2]
        assert posttrain.get_reward(scorer(), ids, 2, 2, attention_mask=mask)[2].tolist() == [3]


def test_emptying_the_cache_is_harmless_without_an_accelerator():
    posttrain.empty_cache()


def test_what_a_no_op_manager_holds_escapes_offloading():
    outer = posttrain.OffloadActivations(device_type="cpu", min_offload_size=0, use_pin_memory=False)
    x = torch.ones(64, requires_grad=True)
    with outer:
        with posttrain.NoOpManager():
            y = x.exp()
        assert outer.offloaded_bytes == 0
        z = y.exp()
    assert outer.offloaded_bytes > 0
    z.sum().backward()
    assert torch.allclose(x.grad, z.detach() * y.detach())


def test_dft_loss_weighs_each_token_by_its_probability_and_survives_a_batch_without_labels():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, -100, 6]])
    loss = posttrain.dft_loss(SimpleNamespace(logits=logits), labels)
    terms = []
    for row, column in ((0, 1), (0, 3), (0, 4), (1, 4)):
        p = torch.softmax(logits[row, column - 1], -1)[labels[row, column]]
        terms.append(-(p * p.log()))
    assert float(loss.detach()) == pytest.approx(float(sum(terms).detach() / 4), abs=1e-6)
    nothing = posttrain.dft_loss(SimpleNamespace(logits=logits), torch.full((2, 5), -100), num_items_in_batch=0)
    nothing.backward()
    assert float(nothing.detach()) == 0.0 and torch.isfinite(logits.grad).all()
