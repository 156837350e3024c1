"""Compiled decoder layers: each function against torch's formula, whole calls against the same calls without a compiler."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from posttrain.errors import RolloutError
from posttrain.models.lean_layers import keep_inputs_only
from posttrain.rollouts.native import layers as building
from posttrain.rollouts.native import layers as fused
from posttrain.rollouts.native.attention import Block, Group, Rule, Store, _decode
from posttrain.rollouts.native.engine import NativeEngine, logp_gaps
from posttrain.rollouts.native.layers import Packed
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.models.test_forward import family

SIZE = 8
pytestmark = pytest.mark.skipif(building.compiled(SIZE) is None, reason="no C compiler here")


def library():
    return building.compiled(SIZE)


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 32), (40, 576)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_norm_adds_first_and_keeps_the_sum(rows, width, threads):
    torch.manual_seed(0)
    x, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    whole, out = x + added, torch.empty(rows, width)
    expected = whole * torch.rsqrt(whole.pow(2).mean(1, keepdim=True) + 1e-5) * weight
    library().normalise(x.data_ptr(), added.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 1e-5, threads)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x, whole)
    library().normalise(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, width, 1e-5, threads)
    torch.testing.assert_close(out, expected)


def test_the_gate_is_silu_at_every_size_of_its_argument_and_nan_stays_nan():
    both = torch.randn(3, 2 * 501)
    both[0, :9] = torch.tensor([0.0, -0.0, 200.0, -200.0, 88.0, -88.0, 1e-30, 3e38, -3e38])
    both[1, 0] = torch.nan
    out = torch.empty(3, 501)
    library().gated(both.data_ptr(), out.data_ptr(), 3, 501, 1)
    gate, up = both.split(501, 1)
    torch.testing.assert_close(out, F.silu(gate) * up, equal_nan=True, rtol=2e-6, atol=1e-7)
    assert out[1, 0].isnan() and out.isnan().sum() == 1


@pytest.mark.parametrize("normal", [False, True])
def test_rotation_is_that_of_halves_behind_the_norm_of_each_head(normal):
    torch.manual_seed(0)
    rows, heads, kv = 5, 4, 2
    qkv, angles = torch.randn(rows, heads + 2 * kv, SIZE), torch.randn(rows, SIZE)
    cosine, sine, norms = angles.cos(), angles.sin(), torch.randn(2, SIZE)
    expected = qkv.clone()
    turned = expected[:, : heads + kv]
    if normal:
        turned = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + 1e-6)
        turned = torch.cat([turned[:, :heads] * norms[0], turned[:, heads:] * norms[1]], 1)
    half = torch.cat([-turned[..., SIZE // 2 :], turned[..., : SIZE // 2]], -1)
    expected[:, : heads + kv] = turned * cosine[:, None] + half * sine[:, None]
    given = (norms[0].data_ptr(), norms[1].data_ptr()) if normal else (None, None)
    library().rotate(qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(), *given, rows, heads, kv, 1e-6, 1)
    torch.testing.assert_close(qkv, expected)


def stored(lengths, suffixes, owners, kv, common=0):
    """A memory of prompts in two blocks, live rows that read them in any order, and suffixes of different lengths."""
    store, n = Store(slots=n_slots(owners)), len(owners)
    half = (len(lengths) + 1) // 2
    for part in (range(half), range(half, len(lengths))):
        rows = [row for row, owner in enumerate(owners) if owner in part]
        if not rows:
            continue
        members = [[row for row in rows if owners[row] == p] for p in part]
        g = max(map(len, members))
        stand = sorted((row, i * g + j) for i, member in enumerate(members) for j, row in enumerate(member))
        flat, place = (torch.tensor(x) for x in zip(*stand, strict=True))
        grid = torch.tensor([member + [stand[0][0]] * (g - len(member)) for member in members])
        width = max(lengths[p] for p in part)
        memory = {0: torch.randn(len(part), kv, width, SIZE)}
        block = Block(list(part), torch.tensor([lengths[p] for p in part]), memory, {0: torch.randn(memory[0].shape)})
        store.groups.append(Group(block, flat, grid, place, alone=len(flat) == n))
    if common:
        shape = (1, kv, common, SIZE)
        store.common = Block([0], torch.tensor([common]), {0: torch.randn(shape)}, {0: torch.randn(shape)})
    store.prefix = torch.tensor([lengths[owner] for owner in owners])
    store.lengths = torch.tensor(suffixes)
    store.keys[0], store.values[0] = torch.randn(store.slots, kv, 64, SIZE), torch.randn(store.slots, kv, 64, SIZE)
    store.begin_step(max(suffixes))
    return store


def n_slots(owners):
    return len(owners) + 3


@pytest.mark.parametrize("common", [0, 17])
@pytest.mark.parametrize("window", [None, 6, 1000])
@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (6, 2), (3, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_equals_torchs_over_all_a_row_may_see(common, window, heads, kv, threads):
    torch.manual_seed(0)
    owners = [0, 2, 0, 1, 0, 3, 3, 0, 0, 0, 0, 0, 0, 2]
    suffixes = [0, 5, 63, 1, 2, 9, 33, 4, 4, 0, 7, 8, 9, 10]
    store = stored([5, 9, 1, 30], suffixes, owners, kv, common)
    n = len(owners)
    model = build_model(40, hidden_size=heads * SIZE, num_attention_heads=heads, num_key_value_heads=kv)
    layer = fused.Layer(model.model.layers[0], Packed())
    layer.window = window
    qkv = torch.randn(n, heads + 2 * kv, SIZE)
    query, key, value = (x[:, :, None] for x in qkv.split([heads, kv, kv], 1))
    before = store.keys[0].clone(), store.values[0].clone()
    keys, values = store.write(0, key, value)
    expected = _decode(store, 0, query, keys, values, Rule(SIZE**-0.5, window=window))
    written = store.keys[0].clone(), store.values[0].clone()
    store.keys[0], store.values[0] = (x.clone() for x in before)
    found = layer.attended(qkv.view(n, -1), store, threads)
    torch.testing.assert_close(found.view(n, 1, heads, SIZE), expected, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, written, (store.keys[0], store.values[0])))


def test_every_row_is_in_one_chunk_with_rows_of_its_prompt_alone():
    owners = [0, 1, 2, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0]
    store = stored([4, 4, 4, 4], [1] * len(owners), owners, 2)
    for threads in (1, 2, 16):
        plan = fused.Plan.of(store.groups, 2, threads)
        assert sorted(plan.order.tolist()) == list(range(len(owners)))
        for begin, end in itertools.pairwise(plan.begins.tolist()):
            assert len({owners[row] for row in plan.order[begin:end].tolist()}) == 1
            assert 0 < end - begin <= min(fused.CHUNK, plan.most)
    assert fused.Plan.of(store.groups, 2, 1).most > fused.Plan.of(store.groups, 2, 16).most == 1


def test_a_plan_notices_that_memory_moved():
    store = stored([4, 4], [1, 1, 1], [0, 1, 0], 2)
    plan = fused.Plan.of(store.groups, 2, 1)
    assert plan.holds(store.groups) and not plan.holds(list(store.groups))
    store.groups[0].block.keep([0])
    assert not plan.holds(store.groups)


# Whole calls ---------------------------------------------------------------------------------------------------------


def rollouts(model, *, compiler, monkeypatch, **options):
    used = []
    with monkeypatch.context() as patch:
        if not compiler:
            patch.setattr(fused, "compiled", lambda size: None)
        call = fused.Layer.attended
        patch.setattr(fused.Layer, "attended", lambda self, *args: used.append(1) or call(self, *args))
        engine = NativeEngine(model, pad_token_id=0, **options)
        requests = [Request([7] * 20 + list(range(3, 3 + n)), 3) for n in (2, 9, 5)] + [Request([8], 2)]
        found = engine.generate(requests, Sampling(24, seed=0))
    assert bool(used) is compiler
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"max_slots": 4}, {"prefill_tokens": 8}])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_call_draws_the_same_with_and_without_a_compiler(name, options, monkeypatch):
    model = family(name)
    theirs = rollouts(model, compiler=False, monkeypatch=monkeypatch, **options)
    ours = rollouts(model, compiler=True, monkeypatch=monkeypatch, **options)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert float(torch.cat(logp_gaps(model, ours)).max()) < 1e-4


def test_only_untouched_layers_of_known_kinds_in_float32_are_fused():
    model = build_model(40)
    layer = model.model.layers[0]
    assert fused.fusable(layer)
    assert keep_inputs_only(model) > 0 and fused.fusable(layer)  # Outputs of these layers are the same.
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    assert not fused.fusable(layer)
    handle.remove()
    assert fused.fusable(layer)
    layer.self_attn.q_proj.forward = lambda x: x
    assert not fused.fusable(layer)
    del layer.self_attn.q_proj.forward
    assert not fused.fusable(build_model(40).to(torch.bfloat16).model.layers[0])
    assert not fused.fusable(build_model(40, hidden_act="gelu").model.layers[0])
    assert not fused.fusable(family("gemma2", "eager").model.layers[0])


def test_adapters_keep_the_layers_that_know_of_them(monkeypatch):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(40), LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    found = rollouts(model, compiler=False, monkeypatch=monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(fused.Layer, "attended", lambda *_: pytest.fail("the adapter would be left out"))
        again = NativeEngine(model, pad_token_id=0).generate([Request([8], 2)], Sampling(24, seed=0))
    assert float(torch.cat(logp_gaps(model, [*found, *again])).max()) < 1e-4


def test_layers_are_as_they_were_after_a_call_and_after_one_that_failed():
    model = build_model(40)
    engine = NativeEngine(model, pad_token_id=0)
    engine.generate([Request([5, 6], 2)], Sampling(4, seed=0))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(RolloutError, match="NaN"):
        engine.generate([Request([5, 6], 2)], Sampling(4, seed=0))
    assert not any("forward" in vars(layer) for layer in model.model.layers)


# The compiler --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library is known, and none is kept in this folder yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "compiled", building.compiled.__wrapped__)
    return tmp_path


def test_a_library_is_built_once_and_found_again(fresh, monkeypatch):
    assert building.compiled(SIZE) is not None
    (kept,) = (fresh / "posttrain" / "compiled").glob("*.so")
    monkeypatch.setattr(building, "build", lambda *_: pytest.fail("it was there"))
    assert building.compiled(SIZE) is not None
    assert list(kept.parent.iterdir()) == [kept]
    assert building.fingerprint(["cc", "-DSIZE=8"]) != building.fingerprint(["cc", "-DSIZE=64"])


def test_without_a_compiler_or_with_a_broken_one_torch_computes(fresh, monkeypatch, caplog):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert building.compiled(SIZE) is None
    broken = fresh / "cc"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(building.shutil, "which", lambda name: str(broken))
    with caplog.at_level("INFO", logger=building.__name__):
        assert building.compiled(SIZE) is None
    assert "no such option" in caplog.text and not list((fresh / "posttrain" / "compiled").iterdir())


def test_the_default_dtype_of_the_process_changes_no_completion():
    """Compiled functions read float32 memory. Memory of the default dtype would be too small in half precision."""
    model, found = build_model(40, num_hidden_layers=2).eval(), []
    requests = [Request(list(range(1, 30)), 4), Request([8], 2)]
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            sampled = NativeEngine(model, pad_token_id=0).generate(
                requests, Sampling(24, seed=0, logit_bias=((3, 0.3),))
            )
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([(one.token_ids, one.logp) for one in sampled])
    assert found[0] == found[1]


def test_temporary_memory_of_a_step_is_float32_in_a_process_with_another_default():
    store = stored([4, 4], [1, 1, 1], [0, 1, 0], 2)
    plan = fused.Plan.of(store.groups, 2, 1)
    layer = fused.Layer(
        build_model(40, hidden_size=4 * SIZE, num_attention_heads=4, num_key_value_heads=2).model.layers[0], Packed()
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, each = layer.step(plan, store, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert plan.scratch.dtype == torch.float32 and plan.scratch.numel() >= each
