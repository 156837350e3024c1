"""Layers that keep their inputs only: the same numbers, and less memory."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers
from torch import nn

from posttrain.models.heads import install_token_head
from posttrain.models.lean_layers import keep_inputs_only, plain

SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "head_dim": 8,
}  # fmt: skip


def model_of(family: str, **more) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZE, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def pair(family: str = "llama", **more) -> tuple[nn.Module, nn.Module]:
    """A model and its copy that keeps less."""
    model = model_of(family, **more)
    for parameter in model.parameters():  # Norm weights of one would hide an error in their place.
        parameter.data += 0.1 * torch.randn_like(parameter)
    lean = copy.deepcopy(model)
    keep_inputs_only(lean)
    return model, lean


def gradients(model: nn.Module, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(24).reshape(2, 12)
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logits.float().log_softmax(-1)[..., 5].sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    """Of every storage that a forward keeps for backward, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=ids, use_cache=False).logits
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return total


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite"])
def test_outputs_are_the_same_to_the_last_bit_and_gradients_to_rounding(family):
    model, lean = pair(family)
    (logits, grads), (same, found) = gradients(model), gradients(lean)
    assert torch.equal(logits, same)
    assert grads.keys() == found.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=1e-6 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_gives_the_gradients_of_half_precision(autocast):
    model, lean = pair()
    if not autocast:
        model, lean = model.bfloat16(), lean.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (logits, grads), (same, found) = gradients(model), gradients(lean)
    assert torch.equal(logits, same)
    for name, grad in grads.items():
        assert found[name].dtype == grad.dtype
        gap = (found[name] - grad).float().norm() / grad.float().norm()
        assert gap < 0.02, (name, gap)


def test_a_layer_keeps_two_widths_and_two_inner_widths_less():
    model, lean = pair()
    ids = torch.randint(0, 64, (1, 40))
    spared = kept_bytes(model, ids) - kept_bytes(lean, ids)
    layers, tokens, item = SIZE["num_hidden_layers"], ids.numel(), 4
    inside = 2 * (SIZE["hidden_size"] + SIZE["intermediate_size"])
    assert spared == layers * tokens * item * inside + tokens * item * SIZE["hidden_size"]  # And the last norm.


def test_frozen_weights_and_adapters_get_what_they_got():
    import peft

    config = peft.LoraConfig(target_modules=["down_proj", "gate_proj", "q_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(model_of("llama"), config)
    lean = copy.deepcopy(model)
    assert keep_inputs_only(lean) == 2 + 5
    (logits, grads), (same, found) = gradients(model), gradients(lean)
    assert torch.equal(logits, same)
    assert grads.keys() == found.keys() and all("lora" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=1e-6 * float(grad.abs().max()))


def test_a_bias_of_the_last_product_is_trained():
    model, lean = pair(mlp_bias=True)
    grads, found = gradients(model)[1], gradients(lean)[1]
    biases = [name for name in grads if name.endswith("down_proj.bias")]
    assert len(biases) == 2
    for name in biases:
        torch.testing.assert_close(found[name], grads[name], rtol=2e-5, atol=1e-6)


def test_checkpointing_gives_the_same_gradients():
    model, lean = pair()
    lean.gradient_checkpointing_enable({"use_reentrant": False})
    lean.train()
    grads, found = gradients(model)[1], gradients(lean)[1]
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=2e-5, atol=1e-6 * float(grad.abs().max()))


def test_hooks_of_the_last_product_still_run():
    _, lean = pair()
    seen = []
    lean.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    assert not plain(lean.model.layers[0].mlp.down_proj)
    gradients(lean)
    assert seen == [1]


def test_copies_names_and_weights_stay():
    model, lean = pair()
    assert lean.state_dict().keys() == model.state_dict().keys()
    assert repr(lean) == repr(model)
    assert keep_inputs_only(lean) == 0  # Nothing is left to change.
    assert type(lean.model.norm) is type(model.model.norm)


def test_a_model_that_was_used_can_be_copied_and_pickled_whole():
    """A loaded copy keeps less again once it is used; nothing in the file names a class of ours."""
    model, lean = pair()
    install_token_head(lean)
    file, ids = io.BytesIO(), torch.randint(0, 64, (1, 40))
    torch.save(lean, file)
    file.seek(0)
    for again in (copy.deepcopy(lean), torch.load(file, weights_only=False)):
        assert type(again.model.norm) is type(model.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
        install_token_head(again)
        keep_inputs_only(again)
        assert kept_bytes(again, ids) == kept_bytes(lean, ids) < kept_bytes(model, ids)
        assert torch.equal(gradients(again)[0], gradients(model)[0])
        with torch.no_grad():
            again.lm_head.weight.zero_()
        assert torch.equal(gradients(lean)[0], gradients(model)[0])


def test_random_numbers_of_the_run_are_not_drawn_from():
    from posttrain.models import lean_layers as module

    model = model_of("llama")
    module._lean_forward.cache_clear()
    state = torch.get_rng_state()
    with torch.inference_mode():  # Whoever asks first asks for all.
        assert keep_inputs_only(model) == 2 + 5
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_compute_something_else_stay_as_they_are():
    geglu = model_of("llama", hidden_act="gelu")
    assert keep_inputs_only(geglu) == 5  # Its norms.
    assert type(geglu.model.layers[0].mlp) is transformers.models.llama.modeling_llama.LlamaMLP
    gemma = model_of("gemma", hidden_act="gelu_pytorch_tanh")  # Its norm multiplies by 1 + w.
    assert keep_inputs_only(gemma) == 0
    replaced = model_of("llama")
    norm = replaced.model.norm
    norm.forward = lambda x: 2 * x
    assert keep_inputs_only(replaced) == 2 + 4
    assert torch.equal(norm(torch.ones(1, 32)), 2 * torch.ones(1, 32))
