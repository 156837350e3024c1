"""Log-probs of the native engine equal transformers' own forward of each sequence, whatever mixes the tokens of a family."""

import pytest
import torch

from posttrain.models import llama4
from posttrain.models.probe import probe_layout
from posttrain.rollouts.native import attention
from posttrain.rollouts.native.engine import NativeEngine, native_is_exact
from posttrain.rollouts.native.prefix_cache import PrefixCache
from posttrain.types import Request, Sampling
from tests.models.architectures import HYBRIDS, VOCAB, WINDOW, alone, built, ids
from tests.models.test_recurrent import remembering

# By name: changes of the config that make each kind of layer matter.
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
CHANGES = {
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma4": MIXED
    | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "gpt-oss": {},
    "llama4": {"floor_scale": 8},
    "deepseek v3": {},
    **{name: {} for name in HYBRIDS},
    # Clamps that change most step sizes; two places of one attention layer.
    "nemotron h": {"time_step_min": 0.5},
    "bamba": {"time_step_limit": (0.5, 1.0)},
    "zamba2": {
        "time_step_min": 0.5,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
        "hybrid_layer_ids": [1, 3],
    },
}


def family(name):
    """A model in float32 whose layers all matter."""
    model = remembering(built(name, initializer_range=0.1 if name in HYBRIDS else 0.2, **CHANGES[name]))
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


@pytest.mark.matrix
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", CHANGES)
def test_sampled_log_probs_equal_the_models_own_forward(name, scene):
    model = family(name)
    rollouts = sampled(model, scene)
    assert len({len(r.token_ids) for r in rollouts}) > 1
    assert largest_gap(model, rollouts) < 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHANGES)
def test_greedy_log_probs_equal_the_models_own_forward(name):
    model = family(name)
    assert largest_gap(model, sampled(model, "one beginning", temperature=0.0)) < 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("name", CHANGES)
def test_auto_takes_the_engine(name):
    assert native_is_exact(family(name)) is None


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gpt-oss", "llama4", "deepseek v3", "bailing hybrid"])
def test_variants_of_attention_need_no_dense_mask_in_training(name):
    layout = probe_layout(family(name))
    assert (layout.kind, layout.dense_mask) == ("tree", False)


IGNORED = {
    "sinks": ("gpt-oss", attention.Rule, "weights", lambda rule, scores, sinks: scores.softmax(-1)),
    "softcapping": ("gemma2", attention.Rule, "capped", lambda rule, scores: scores),
    "chunks": ("llama4", llama4, "chunk_of", lambda module: None),
    "temperature": ("llama4", llama4, "tempered", lambda module, query, positions: query),
}


@pytest.mark.parametrize("what", IGNORED)
def test_what_is_ignored_moves_log_probs(what, monkeypatch):
    name, holder, function, wrong = IGNORED[what]
    monkeypatch.setattr(holder, function, wrong)
    model = family(name)
    assert largest_gap(model, sampled(model, "one beginning")) > 0.01


@pytest.mark.matrix
@pytest.mark.parametrize("name", HYBRIDS)
def test_completions_that_forget_the_states_of_their_prompt_have_other_log_probs(name, monkeypatch):
    begin = attention.Store.begin_rows

    def forgetting(self, rows, block, prompt):
        begin(self, rows, block, prompt)
        for state in self.states:
            state[rows] = 0

    model = family(name)
    monkeypatch.setattr(attention.Store, "begin_rows", forgetting)
    assert largest_gap(model, sampled(model, "a group")) > 0.01


@pytest.mark.parametrize("name", ["nemotron h", "bamba", "zamba2"])
def test_step_sizes_are_clamped_in_sampling_as_in_training(name):
    model = family(name)
    rollouts = sampled(model, "a group")
    assert largest_gap(model, rollouts) < 1e-5
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    assert largest_gap(model, rollouts) > 0.01


def test_a_hybrid_computes_its_prompt_once_and_of_turn_two_the_new_tokens():
    model, shapes = family("qwen3.5"), []
    model.model.register_forward_pre_hook(
        lambda m, a, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    engine, prompt = NativeEngine(model, pad_token_id=0), ids(50, 1)
    with engine.prefix_cache():
        first = engine.generate([Request(prompt, 4)], Sampling(5, seed=0))
        assert shapes == [(1, 50), *[(4, 1)] * 4]
        after = [Request(r.prompt_ids + r.token_ids + ids(i, i)) for i, r in enumerate(first, 1)]
        second = engine.generate(after, Sampling(5, seed=0))
    # The last sampled token of turn one was not computed before.
    assert shapes[5] == (4, 1 + 4)
    assert largest_gap(model, second) < 1e-5


def test_sequences_continue_where_states_are_known():
    keys = {0: (torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1))}
    kept = PrefixCache(10**6, stateful=True)
    kept.add([1, 2, 3, 4], [keys], [torch.ones(1, 2)])
    assert kept.find([1, 2, 3, 5], 4) == (0, [], [])
    half = {0: tuple(x[:, :, :2] for x in keys[0])}
    kept.add([1, 2], [half], [torch.full((1, 2), 2.0)])
    for tokens, length, value in (([1, 2, 3, 5], 2, 2.0), ([1, 2, 3, 4, 5], 4, 1.0)):
        found, layers, states = kept.find(tokens, len(tokens))
        assert (found, sum(piece[0][0].shape[2] for piece in layers)) == (length, length)
        assert states[0].tolist() == [[value, value]]
    assert kept.bytes == sum(node.bytes for node in kept._nodes()) == 4 * (8 + 4)
