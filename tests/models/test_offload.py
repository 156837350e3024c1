"""Activation offloading changes where activations wait, and nothing else."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from posttrain.errors import ConfigError
from posttrain.models.memory import OffloadActivations, get_act_offloading_ctx_manager
from tests.conftest import build_model
from tests.methods.helpers import sft
from tests.wordings import raises


def gradients(model, context):
    model.zero_grad()
    ids = torch.arange(12).view(2, 6)
    with context:
        logits = model(input_ids=ids, use_cache=False).logits
        expanded = logits.mean(-1, keepdim=True).expand_as(logits)  # A stride of zero, and a view with an offset.
        ((logits - expanded)[:, 1:] ** 2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_are_equal_with_and_without(tiny_model):
    # To rounding: a copy lies elsewhere than the view it is of, and some CPUs sum by where a tensor begins (seen: 1.2e-6).
    plain = gradients(tiny_model, get_act_offloading_ctx_manager(tiny_model, enabled=False))
    hooks = OffloadActivations(device_type="cpu", min_offload_size=1)
    for _ in range(2):
        for a, b in zip(plain, gradients(tiny_model, hooks), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))
    assert hooks.offloaded_bytes > 10_000


def test_parameters_and_small_tensors_stay():
    weight = torch.nn.Parameter(torch.ones(100))
    hooks = OffloadActivations(
        device_type="cpu", min_offload_size=64, kept=frozenset({weight.untyped_storage().data_ptr()})
    )
    with hooks:
        (weight * torch.ones(8).sum()).exp().sum().backward()
    assert hooks.offloaded_bytes == 400  # The exponential's own output, and nothing else.
    with pytest.raises(ConfigError, match="min_offload_size=-1"):
        OffloadActivations(min_offload_size=-1)


def test_an_expanded_tensor_travels_once():
    """One mask of all heads was copied as often as there are heads."""
    scores, mask = torch.randn(1, 8, 4, 4, requires_grad=True), torch.randn(1, 1, 4, 4)
    hooks = OffloadActivations(device_type="cpu", min_offload_size=1)
    with hooks:
        (scores * mask.expand(1, 8, 4, 4)).sum().backward()
    assert hooks.offloaded_bytes == mask.nbytes
    assert torch.equal(scores.grad, mask.expand(1, 8, 4, 4))


def test_a_mask_whose_rows_are_padded_is_restored_with_its_strides():
    """CUDA's efficient attention saves a mask whose rows begin at multiples of 16, and its backward pass needs them."""
    mask, part = torch.randn(2, 6, 16)[..., :9], torch.randn(6, 48)[:, 16:32]
    hooks = OffloadActivations(device_type="cpu", min_offload_size=1)
    for tensor, strides in ((mask, (96, 16, 1)), (part, (16, 1)), (mask.transpose(0, 1), (16, 96, 1))):
        restored = hooks.unpack_hook(hooks.pack_hook(tensor))
        assert restored.data_ptr() != tensor.data_ptr()
        assert torch.equal(restored, tensor)
        assert restored.stride() == strides


def test_it_is_refused_on_a_cpu_before_the_model_loads(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "activation_offloading=True"):
        sft(tmp_path, tiny_tokenizer, activation_offloading=True)


def test_weights_in_shards_stay_and_gradients_are_equal():
    """Of a parameter that FSDP2 has cut the storage has no address, and the run ended at its first step."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build_model(300)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        plain = gradients(model, get_act_offloading_ctx_manager(model, enabled=False))
        offloading = get_act_offloading_ctx_manager(model, min_offload_size=1)
        for a, b in zip(plain, gradients(model, offloading), strict=True):
            assert torch.allclose(
                a.full_tensor(), b.full_tensor(), rtol=0, atol=1e-5 * float(a.full_tensor().abs().max())
            )
        assert offloading.offloaded_bytes > 10_000
    finally:
        torch.distributed.destroy_process_group()
