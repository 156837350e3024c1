"""Whatever the architecture: the chosen layout, and the engine that `auto` takes, say what each sequence alone says."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.data.forest import Layout, collate, split_by_sequence
from posttrain.errors import ConfigError, DataError, RolloutError
from posttrain.models import probe
from posttrain.models.attention import rope_limits
from posttrain.models.forward import forward
from posttrain.models.probe import disagreement, probe_layout
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.native import engine as native
from posttrain.rollouts.native.engine import native_is_exact
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.models.architectures import ARCHITECTURES, LONGROPE, ORIGINAL, VOCAB, alone, built, ids
from tests.wordings import raises


def rows():
    """Short and long sequences beside each other, some longer than every window and the original context."""
    lengths = [(9, (4, 40, 1)), (5, (8,)), (0, (14,)), (30, (2, 12)), (20, (5, 21))]
    return [
        Row(ids(p, 10 * i), [ids(n, 10 * i + j + 1) for j, n in enumerate(ns)], [[1] * n for n in ns])
        for i, (p, ns) in enumerate(lengths)
    ]


def worst(model, examples, layout):
    """The largest difference from each sequence alone."""
    truth = [alone(model, row.prompt_ids, c) for row in examples for c in row.completions]
    gaps = []
    for batch in collate(examples, pad_token_id=0, layout=layout):
        with torch.no_grad():
            found = split_by_sequence(forward(model, batch).logp, batch)
        gaps += [(f - truth[o]).abs().max() for f, o in zip(found, batch.origin, strict=True)]
    return float(max(gaps))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_chosen_layout_computes_each_sequence_as_if_alone(name):
    model = built(name)
    layout = probe_layout(model)
    assert layout.kind == ("tree" if ARCHITECTURES[name][2] else "padded")
    assert worst(model, rows(), layout) < 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_that_auto_takes_says_what_each_sequence_alone_says(name, caplog):
    model = built(name)
    engine = create_engine("auto", model, pad_token_id=0)
    assert engine.name == ("native" if ARCHITECTURES[name][3] else "hf")
    assert (native_is_exact(model) or "") in caplog.text
    if engine.name == "hf":
        with raises(ConfigError):
            create_engine("native", model, pad_token_id=0)
    new = 7 if name == "phi3 longrope" else 40
    requests = [Request(ids(n, n), 2) for n in (3, 25, 9)]
    for r in engine.generate(requests, Sampling(new, seed=0)):
        torch.testing.assert_close(torch.tensor(r.logp), alone(model, r.prompt_ids, r.token_ids), atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["jamba", "mamba"])
@pytest.mark.parametrize("size", [0.02, 0.0005])
def test_a_stateful_model_with_tiny_logits_gets_neither_forest_nor_engine(name, size):
    """At the smaller size no log-prob shows the state, and after some training it would."""
    model = built(name, initializer_range=size)
    truth = torch.cat([alone(model, row.prompt_ids, c) for row in rows() if row.prompt_ids for c in row.completions])
    assert truth.std() < 0.2
    assert probe_layout(model).kind == "padded"
    assert native_is_exact(model) is not None


def test_a_model_with_attention_of_its_own_is_refused_with_the_reason():
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    assert native_is_exact(model) == (
        "FalconForCausalLM computes attention in its own code and does not call the attention functions of transformers, which "
        "this engine replaces"
    )


def test_two_configs_of_one_class_have_two_verdicts(caplog):
    full, dropping = built("llama"), built("llama")
    dropping.config.attention_dropout = 0.1  # Weights are dropped pair by pair: no flash call can.
    assert not probe_layout(full).dense_mask
    assert probe_layout(dropping).dense_mask
    assert "attention_dropout=0.1 in the model's config" in caplog.text
    assert not probe_layout(full).dense_mask


def test_a_probe_leaves_windows_as_they_were():
    model = built("exaone4")
    before = [module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")]
    probe_layout(model)
    native_is_exact(model)
    assert [module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")] == before
    assert model.config.sliding_window == 24


@pytest.mark.parametrize(("gap", "spread", "agrees"), [(1e-3, 1.0, False), (1e-5, 1.0, True), (1e-5, 1e-3, False)])
def test_agreement_goes_by_the_spread_of_the_truth(gap, spread, agrees):
    truth = torch.tensor([-1.0, 1.0]) * spread
    assert (disagreement(truth + gap, truth, 1e-4) == "") is agrees


# Routers whose choice rounding changes ------------------------------------------------------------------------------


def rounded(name, seed):
    model = built(name, seed, initializer_range=0.2).bfloat16()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "sinks" in parameter_name:
                parameter.normal_()
    return model


def verdicts(model, monkeypatch):
    """Return what the probes of the engine and of the layout find in a model."""
    monkeypatch.setattr(native, "VERDICTS", {})
    monkeypatch.setattr(probe, "PROBED", {})
    return native_is_exact(model), probe_layout(model)


@pytest.mark.parametrize(("name", "seeds"), [("qwen3 moe", (9, 21)), ("mixtral", (30,))])
def test_an_expert_that_rounding_chooses_is_no_difference(name, seeds, monkeypatch):
    """In these models, a token has two experts with almost equal router logits."""
    for seed in seeds:
        fault, layout = verdicts(rounded(name, seed), monkeypatch)
        assert fault is None and (layout.kind, layout.dense_mask) == ("tree", False)


FAULTS = {
    "expert": ("mixtral", "experts.down_proj", lambda weight: weight[1].mul_(2.0)),
    "router": ("qwen3 moe", "mlp.gate.weight", lambda weight: weight.copy_(weight[[1, 0, 3, 2]])),
    "bias": ("qwen2 moe", "k_proj.bias", lambda bias: bias.zero_()),
    "sink": ("gpt-oss", "sinks", lambda sinks: sinks.fill_(-1e4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_weight_that_one_side_lacks_is_a_difference_where_routers_round(fault, monkeypatch):
    name, weight_name, spoil = FAULTS[fault]
    model = rounded(name, 9)
    weight = next(weight for found, weight in model.named_parameters() if weight_name in found)

    def spoiled(compute):
        def run(*args, **kwargs):
            before = weight.detach().clone()
            with torch.no_grad():
                spoil(weight)
                try:
                    return compute(*args, **kwargs)
                finally:
                    weight.copy_(before)

        return run

    monkeypatch.setattr(native.NativeEngine, "generate", spoiled(native.NativeEngine.generate))
    monkeypatch.setattr(probe, "packed_logps", spoiled(probe.packed_logps))
    engine, layout = verdicts(model, monkeypatch)
    assert engine is not None and layout.kind == "padded"


@pytest.mark.parametrize(("share", "agrees"), [(0.2, True), (0.4, False)])
def test_rounding_explains_few_differences(share, agrees):
    truth = torch.linspace(-1, 1, 40)
    moved = truth + (torch.arange(40) < 40 * share)
    passes = iter([truth, truth, moved])
    fault = probe.steady_disagreement(torch.nn.Linear(1, 1), moved, lambda: next(passes), 0.05)
    assert (fault == "") is agrees


# Rotary frequencies that depend on the longest sequence of a pass ---------------------------------------------------

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONGROPE,
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
LIMITS = {"longrope": (ORIGINAL, None), "dynamic": (None, 128)}


def roped(kind, **changes):
    parameters = {"rope_theta": 10000.0} | ROPES[kind] | {"rope_type": kind}
    return build_model(VOCAB, max_position_embeddings=128, rope_parameters=parameters, **changes)


def test_every_rope_type_of_transformers_is_known():
    assert set(ROPES) - {"default"} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("form", ["tree", "padded"])
def test_with_every_rope_type_neighbours_change_nothing(kind, form):
    model = roped(kind)
    assert rope_limits(model) == LIMITS.get(kind, (None, None))
    layout = probe_layout(model)
    assert layout.kind == "tree"
    padded = Layout("padded", row_tokens=4096, rope_switch=layout.rope_switch, rope_end=layout.rope_end)
    assert worst(model, rows(), layout if form == "tree" else padded) < 1e-3


def test_sequences_on_both_sides_of_the_switch_never_share_a_pass():
    layout = Layout("tree", row_tokens=512, rope_switch=10)
    examples = [
        Row([1] * 6, [[2] * n for n in (2, 9, 4, 5)], [[1] * n for n in (2, 9, 4, 5)]),
        Row([], [[3] * 30], [[1] * 30]),
    ]
    batches = collate(examples, pad_token_id=0, layout=layout)
    lengths = {0: 8, 1: 15, 2: 10, 3: 11, 4: 30}
    assert sorted(origin for batch in batches for origin in batch.origin) == [0, 1, 2, 3, 4]
    for batch in batches:
        assert len({lengths[origin] > 10 for origin in batch.origin}) == 1


@pytest.mark.parametrize("how", ["whole_rows", "together"])
def test_a_loss_that_compares_sequences_across_the_switch_is_refused(how):
    layout = Layout("tree", rope_switch=10)
    pair = Row([1] * 6, [[2] * 2, [3] * 9], [[1] * 2, [1] * 9])
    with raises(DataError, "8", "15", "10"):
        collate([pair], pad_token_id=0, layout=layout, **{how: True})
    below = Row([1] * 6, [[2] * 2, [3] * 4], [[1] * 2, [1] * 4])
    assert len(collate([below], pad_token_id=0, layout=layout, **{how: True})) == 1


def test_a_sequence_beyond_what_dynamic_rope_computes_alike_is_refused():
    with raises(DataError, "12", "11"):
        collate([Row([1] * 6, [[2] * 6], [[1] * 6])], pad_token_id=0, layout=Layout("padded", rope_end=11))


def test_the_native_engine_refuses_what_may_cross_the_switch_and_hf_samples_it_alone():
    model = roped("longrope")
    requests = [Request(ids(5, 1), 2), Request(ids(ORIGINAL + 3, 2), 2), Request(ids(ORIGINAL + 8, 3), 1)]
    with pytest.raises(RolloutError, match=rf"request 1: a prompt of {ORIGINAL + 3} tokens.*exceed {ORIGINAL}"):
        create_engine("native", model, pad_token_id=0).generate(requests, Sampling(6, seed=0))
    for r in create_engine("hf", model, pad_token_id=0).generate(requests, Sampling(6, seed=0)):
        torch.testing.assert_close(torch.tensor(r.logp), alone(model, r.prompt_ids, r.token_ids), atol=1e-3, rtol=0)
