"""Log-probs of the native engine equal transformers' own forward of each sequence, whatever mixes the tokens of a family."""

import pytest
import torch

from posttrain.models.probe import probe_layout
from posttrain.rollouts.native import attention
from posttrain.rollouts.native.engine import NativeEngine, native_is_exact
from posttrain.types import Request, Sampling
from tests.models.architectures import VOCAB, WINDOW, alone, built

# By name: changes of the config that make each kind of layer matter.
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
CHANGES = {
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma4": MIXED
    | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "gpt-oss": {},
    "llama4": {"floor_scale": 8},
}


def ids(count, seed):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def family(name):
    """A model in float32 whose layers all matter."""
    model = built(name, initializer_range=0.2, **CHANGES[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.normal_()
    return model


SYSTEM = ids(WINDOW + 11, 0)
SCENES = {
    "one beginning": [Request(SYSTEM + ids(n, n), g) for n, g in ((2, 3), (30, 2), (7, 1))],
    "two beginnings": [Request(SYSTEM + ids(3, 1), 2), Request(ids(9, 2), 2), Request(SYSTEM + ids(8, 3), 2)],
    "a group": [Request(ids(19, 4), 5)],
}


def sampled(model, scene, temperature=1.0):
    """Two turns on three slots, with completions of different lengths."""
    engine = NativeEngine(model, pad_token_id=0, max_slots=3, prefill_tokens=32)
    sampling = Sampling(14, temperature=temperature, seed=3, stop_token_ids=tuple(range(3, 9)))
    with engine.prefix_cache():
        first = engine.generate(SCENES[scene], sampling)
        after = [Request(r.prompt_ids + r.token_ids + ids(1 + i % 4, i), 2) for i, r in enumerate(first)]
        second = engine.generate(after, sampling)
        assert engine.counts["reused"] > 0
    return [*first, *second]


def largest_gap(model, rollouts):
    return max(float((torch.tensor(r.logp) - alone(model, r.prompt_ids, r.token_ids)).abs().max()) for r in rollouts)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", CHANGES)
def test_sampled_log_probs_equal_the_models_own_forward(name, scene):
    model = family(name)
    rollouts = sampled(model, scene)
    assert len({len(r.token_ids) for r in rollouts}) > 1
    assert largest_gap(model, rollouts) < 1e-5


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_log_probs_equal_the_models_own_forward(name):
    model = family(name)
    assert largest_gap(model, sampled(model, "one beginning", temperature=0.0)) < 1e-5


@pytest.mark.parametrize("name", CHANGES)
def test_auto_takes_the_engine(name):
    assert native_is_exact(family(name)) is None


@pytest.mark.parametrize("name", ["gemma4", "gpt-oss"])
def test_heads_of_different_sizes_and_sinks_need_no_dense_mask_in_training(name):
    layout = probe_layout(family(name))
    assert (layout.kind, layout.dense_mask) == ("tree", False)


IGNORED = {
    "sinks": ("gpt-oss", attention.Rule, "weights", lambda rule, scores, sinks: scores.softmax(-1)),
    "softcapping": ("gemma2", attention.Rule, "capped", lambda rule, scores: scores),
    "chunks": ("llama4", attention, "_chunk", lambda module: None),
    "temperature": ("llama4", attention, "_tempered", lambda module, query, positions: query),
}


@pytest.mark.parametrize("what", IGNORED)
def test_what_is_ignored_moves_log_probs(what, monkeypatch):
    name, holder, function, wrong = IGNORED[what]
    monkeypatch.setattr(holder, function, wrong)
    model = family(name)
    assert largest_gap(model, sampled(model, "one beginning")) > 0.01
