"""Products of a few rows: the same numbers, only while generating, only where they are plain."""

import pytest
import torch
from torch import nn

from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.products import MOST_ROWS, few_rows_product, quick_products
from posttrain.types import Request, Sampling
from tests.conftest import build_model


@pytest.mark.parametrize("shape", [(7,), (2, 7), (16, 1, 7), (3, 5, 7)])
@pytest.mark.parametrize("bias", [None, torch.arange(11.0)])
def test_the_product_is_that_of_a_linear_layer(shape, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(11, 7)
    found = few_rows_product(x, weight, bias)
    torch.testing.assert_close(found, nn.functional.linear(x, weight, bias))
    assert found.is_contiguous()


def test_only_few_rows_take_the_quick_way_and_afterwards_none(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "posttrain.rollouts.native.products.few_rows_product",
        lambda x, w, b=None: calls.append(x.shape) or nn.functional.linear(x, w, b),
    )
    layer = nn.Linear(4, 3)
    holder = nn.Sequential(layer)
    with torch.no_grad(), quick_products(holder):
        for rows in (1, 2, MOST_ROWS, MOST_ROWS + 1):
            holder(torch.zeros(rows, 4))
        with torch.autocast("cpu", torch.bfloat16):
            assert holder(torch.zeros(2, 4)).dtype == torch.bfloat16
    assert [shape[0] for shape in calls] == [2, MOST_ROWS]
    assert "forward" not in vars(layer)
    holder(torch.zeros(2, 4))
    assert len(calls) == 2


def test_layers_are_restored_when_generation_fails():
    model = build_model(50)
    model.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        NativeEngine(model, pad_token_id=0).generate([Request([5, 6], 2)], Sampling(3))
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, nn.Linear))


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    layer = nn.Linear(4, 3)
    own = layer.forward = lambda x: x.new_ones(len(x), 3)
    with quick_products(nn.Sequential(layer)):
        assert layer.forward is own
    assert layer.forward is own
