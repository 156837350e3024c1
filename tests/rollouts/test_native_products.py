"""Products of a few rows: the same numbers, only while generating, only where they are plain."""

from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn

from posttrain.errors import ConfigError
from posttrain.rollouts.native import engine as engines
from posttrain.rollouts.native import engine as probe
from posttrain.rollouts.native import layers as products
from posttrain.rollouts.native import layers as threads
from posttrain.rollouts.native.engine import NativeEngine, logp_gaps
from posttrain.rollouts.native.layers import MOST_ROWS, PACK_FROM, Packed, few_rows_product, quick_products
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.methods.helpers import grpo
from tests.wordings import raises

packs = pytest.mark.skipif(not products.HAS_ONEDNN, reason="this torch packs no weights")
rounds = pytest.mark.skipif(
    not (products.HAS_ONEDNN and products.packs(torch.bfloat16)), reason="this CPU has no bfloat16 (AVX512)"
)
REAL = Path.home() / ".cache" / "posttrain" / "SmolLM2-135M-Instruct"


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
        "posttrain.rollouts.native.layers.few_rows_product",
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
    with raises(ValueError):
        NativeEngine(model, pad_token_id=0).generate([Request([5, 6], 2)], Sampling(3))
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, nn.Linear))


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    layer = nn.Linear(4, 3)
    own = layer.forward = lambda x: x.new_ones(len(x), 3)
    with quick_products(nn.Sequential(layer)):
        assert layer.forward is own
    assert layer.forward is own


# Packed weights ------------------------------------------------------------------------------------------------------


def generate(model, count=8, tokens=16, **options):
    engine = NativeEngine(model, pad_token_id=0, **options)
    return engine, engine.generate([Request([5, 6, 7], count), Request([8, 9], count)], Sampling(tokens, seed=0))


@packs
@pytest.mark.parametrize("rows", [1, 5, 16, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_that_of_the_layer(rows, bias):
    torch.manual_seed(0)
    layer, packed = nn.Linear(48, 33, bias=bias), Packed()
    x = torch.randn(rows, 1, 48)
    with torch.no_grad(), quick_products(nn.Sequential(layer), packed):
        packed.pack()
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@packs
def test_long_calls_read_packed_weights_and_short_ones_do_not(monkeypatch):
    packed = []
    pack = Packed.pack
    monkeypatch.setattr(Packed, "pack", lambda self, head=None: packed.append(len(self.layers)) or pack(self, head))
    model = build_model(50)
    generate(model, tokens=PACK_FROM)
    assert packed == []
    _, rollouts = generate(model, tokens=PACK_FROM + 1)
    assert packed == [2 * 7 + 1]
    assert float(torch.cat(logp_gaps(model, rollouts)).max()) < 1e-4
    monkeypatch.setattr(products.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    generate(model, tokens=PACK_FROM + 1)
    with torch.autocast("cpu", torch.bfloat16):
        NativeEngine(model, pad_token_id=0).generate([Request([5], 8)], Sampling(PACK_FROM + 1, seed=0))
    assert len(packed) == 1


@packs
@pytest.mark.parametrize("target", ["q_proj.weight", "mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_that_an_adapter_changes_during_the_call_is_not_read_from_a_copy(target):
    """peft replaces the parameter itself while the layer runs (``target_parameters``)."""
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], target_parameters=[target])
    model = peft.get_peft_model(build_model(50, tie_word_embeddings=False), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    _, rollouts = generate(model, tokens=PACK_FROM + 8)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0].log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
        truth = logps.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logp), truth, atol=1e-4, rtol=0)


@packs
def test_copies_follow_the_weights():
    """Two turns with an optimiser step between them: copies of the first are not read by the second."""
    model = build_model(50)
    engine = NativeEngine(model, pad_token_id=0)
    with engine.prefix_cache():
        for _ in range(2):
            rollouts = engine.generate([Request([5, 6, 7], 2)], Sampling(PACK_FROM + 8, seed=0))
            assert float(torch.cat(logp_gaps(model, rollouts)).max()) < 1e-4
            held = engine._held
            engine.generate([Request([5, 6], 2)], Sampling(3, seed=0))
            assert engine._held is held
            model(torch.tensor([[5, 6]])).logits.logsumexp(-1).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert engine._held is None


@rounds
def test_rounded_copies_leave_the_weights_alone_and_are_told_apart(monkeypatch):
    model = build_model(50)
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine, rollouts = generate(model, products="bfloat16", count=32)
    assert not engine.capabilities.shares_weights
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    gap = torch.cat(logp_gaps(model, rollouts))
    assert len(rollouts) == 64
    assert 0 < float(gap.mean()) <= 0.02
    exact, rollouts = generate(model, count=32)
    assert exact.capabilities.shares_weights
    assert float(torch.cat(logp_gaps(model, rollouts)).mean()) <= 1e-4


@rounds
def test_a_run_that_samples_from_rounded_weights_logs_and_corrects_the_difference(tmp_path, tiny_tokenizer):
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", rollout_engine="native_bf16")
    trainer.train()
    assert trainer.engine.products == "bfloat16"
    assert trainer.engine.folder == tmp_path
    logged = [e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history if "loss" in e]
    assert len(logged) == 2
    assert all(0 < gap <= 0.02 for gap in logged)


def test_a_wrong_kind_of_products_is_named(monkeypatch):
    with raises(ConfigError, "'bfloat16'"):
        NativeEngine(build_model(50), pad_token_id=0, products="bfloat")
    monkeypatch.setattr(engines, "HAS_ONEDNN", False)
    with raises(ConfigError, "'exact'"):
        NativeEngine(build_model(50), pad_token_id=0, products="bfloat16")


@packs
@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="needs the demo model")
@pytest.mark.parametrize(("kind", "most"), [("exact", 1e-4), pytest.param("bfloat16", 0.02, marks=rounds)])
def test_a_real_model_says_what_its_training_forward_says(kind, most):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL)
    model = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    asked = [[{"role": "user", "content": f"Tell me about the {w}."}] for w in ("sea", "moon", "bread", "Roman roads")]
    prompts = [tokenizer.apply_chat_template(a, add_generation_prompt=True)["input_ids"] for a in asked]
    engine = NativeEngine(model, pad_token_id=0, products=kind)
    rollouts = engine.generate([Request(p, 16) for p in prompts], Sampling(24, seed=0))
    gaps = torch.cat(logp_gaps(model, rollouts))
    assert len(rollouts) == 64
    assert float(gaps.mean()) <= most


# Threads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("max 100000", 10**6), ("50000 100000", 1), ("?", 10**6)]
)
def test_a_container_quota_bounds_the_processors(tmp_path, text, most):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    import os

    assert threads.processors(quota) == min(most, len(os.sched_getaffinity(0)))


def test_threads_are_bound_while_generating_and_restored(monkeypatch):
    monkeypatch.setattr(threads, "processors", lambda: 1)
    before, seen = torch.get_num_threads(), []
    model = build_model(50)
    model.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    NativeEngine(model, pad_token_id=0).generate([Request([5])], Sampling(1, seed=0))
    assert seen == [1]
    assert torch.get_num_threads() == before


@packs
def test_bfloat16_weights_are_read_as_they_lie_where_the_cpu_cannot_pack_them(monkeypatch):
    """On a CPU without bfloat16 instructions oneDNN refuses to pack; the engine serves the model all the same."""
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def without_instructions(weight, *rest):
        assert weight.dtype != torch.bfloat16, "bf16 weight is not supported on this CPU"
        return reorder(weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", without_instructions)
    model = build_model(50).bfloat16()
    _, rollouts = generate(model, tokens=PACK_FROM + 1)
    assert float(torch.cat(logp_gaps(model, rollouts)).mean()) < 0.05
    probe.VERDICTS.clear()
    assert probe.native_is_exact(model) is None
    with pytest.raises(ConfigError, match="bfloat16"):
        NativeEngine(build_model(50), pad_token_id=0, products="bfloat16")
