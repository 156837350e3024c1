"""The native engine: every family it claims, adapters, windows, slots, and what it does not compute twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from posttrain.errors import RolloutError
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.draws import draw
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.models.test_forward import FAMILIES, family
from tests.wordings import raises


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_its_own_forward_beyond_its_window(name):
    model = family(name, "eager")
    requests = [Request([5, 6, 7, 8, 9, 10, 11, 12, 13], 3), Request([14, 15], 2), Request([20] * 5, 1)]
    rollouts = NativeEngine(model, pad_token_id=0, max_slots=4).generate(requests, Sampling(14, seed=0))
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(model, rows), strict=True):
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-3)


def test_adapters_are_applied_unmerged():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(50), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    rollouts = NativeEngine(model, pad_token_id=0).generate([Request([5, 6, 7], 4)], Sampling(6, seed=0))
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 6]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(model, rows), strict=True):
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-3)


def test_what_a_sequence_draws_does_not_depend_on_the_slots():
    requests = [Request([5, 6, 7], 5), Request([8, 9], 4)]
    results = []
    for slots in (2, 3, 9):
        engine = NativeEngine(build_model(50), pad_token_id=0, max_slots=slots)
        results.append(
            [r.token_ids for r in engine.generate(requests, Sampling(10, seed=4, stop_token_ids=(3, 4, 5, 6)))]
        )
    assert results[0] == results[1] == results[2]


def test_engines_of_one_process_sample_side_by_side_in_threads():
    """As a trainer evaluates while a server in its process answers workers: each reads its own memory."""
    engines = [NativeEngine(build_model(50, seed=seed), pad_token_id=0) for seed in (1, 2)]
    requests = [[Request([5 + i, 6, 7], 4), Request([8, 9 + i], 3)] for i in range(2)]

    def sample(i):
        return [r.logp for r in engines[i].generate(requests[i], Sampling(24, seed=i))]

    alone = [sample(0), sample(1)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(6):
            assert list(pool.map(sample, range(2))) == alone


def test_a_prompt_is_computed_once_however_many_completions_it_has():
    model, seen = build_model(50), []
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["input_ids"].shape), with_kwargs=True)
    NativeEngine(model, pad_token_id=0).generate([Request([5] * 20, 8), Request([6] * 20, 8)], Sampling(4, seed=0))
    assert seen == [(2, 20), (16, 1), (16, 1), (16, 1)]


def test_the_head_sees_one_position_a_sequence():
    model, seen = build_model(50), []
    model.lm_head.register_forward_pre_hook(lambda m, a: seen.append(a[0].shape[:-1].numel()))
    NativeEngine(model, pad_token_id=0).generate([Request([5] * 20, 8)], Sampling(3, seed=0))
    assert seen == [1, 8, 8]


def test_suffix_memory_grows_past_its_first_block():
    model = build_model(50)
    (r,) = NativeEngine(model, pad_token_id=0).generate([Request([5])], Sampling(200, seed=0))
    (truth,) = sequence_logps(model, [Row([5], [r.token_ids], [[1] * 200])])
    assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-3)


def test_nan_weights_are_told_with_the_requests():
    model = build_model(50)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with raises(RolloutError, "0"):
        NativeEngine(model, pad_token_id=0).generate([Request([5, 6])], Sampling(2, seed=0))


def test_under_bf16_autocast_logps_stay_near_the_forward():
    model = build_model(50)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = NativeEngine(model, pad_token_id=0).generate([Request([5, 6, 7], 4)], Sampling(8, seed=0))
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 8]) for r in rollouts]
    gaps = [(torch.tensor(r.logp) - t).abs() for r, t in zip(rollouts, sequence_logps(model, rows), strict=True)]
    assert torch.cat(gaps).mean() < 0.05


def test_draw_never_picks_a_token_without_weight_and_covers_the_edges():
    weights = torch.zeros(3, 700)
    weights[:, [0, 300, 699]] = torch.tensor([1.0, 2.0, 1.0])
    picks = draw(weights, torch.tensor([0.0, 0.5, 1.0 - 1e-12], dtype=torch.float64))
    assert picks.tolist() == [0, 300, 699]
    uniform = torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert set(draw(weights, uniform).tolist()) <= {0, 300, 699}
