"""The engine contract: every engine passes this file."""

from dataclasses import fields

import pytest
import torch
from scipy.stats import chisquare

from posttrain.errors import ConfigError, RolloutError
from posttrain.extensions.server.engine import ServerEngine
from posttrain.models import tree_attention
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.base import Capabilities, RolloutEngine, ScriptedEngine, require_engine
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.paged import PagedEngine
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.extensions.server.stub_server import StubServer
from tests.wordings import raises

VOCAB = 37


def served(model):
    """Over HTTP, from a server in a thread; ``model`` is the trainer's."""
    stub = StubServer(model)
    engine = ServerEngine(stub.url, connection_timeout=10)
    engine.model, engine.stub = model, stub
    engine.load_weights(Weights(model), 1)
    return engine


ENGINES = {
    "hf": lambda model: HFEngine(model, pad_token_id=0),
    "native": lambda model: NativeEngine(model, pad_token_id=0),
    "native-3-slots": lambda model: NativeEngine(model, pad_token_id=0, max_slots=3),
    "server": served,
    "paged": lambda model: PagedEngine(model, pad_token_id=0),
}
# A value of every field of `Sampling` that an engine may refuse.
SETTINGS = {
    "guide": ("regex", "a"), "top_logps": 2, "min_new_tokens": 2, "stop_strings": ("a",), "logit_bias": ((3, 1.0),),
    "no_repeat_ngram": 2, "min_p": 0.1, "repetition_penalty": 1.5,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]


@pytest.fixture(params=ENGINES)
def engine(request):
    made = ENGINES[request.param](build_model(VOCAB))
    yield made
    made.close()
    if hasattr(made, "stub"):
        made.stub.close()


def requests(n=2):
    return [Request(p, n) for p in PROMPTS]


def test_it_is_an_engine_and_its_capabilities_agree_with_each_other(engine):
    can = engine.capabilities
    assert require_engine(engine) is engine
    assert require_engine(ScriptedEngine([[1]]))
    assert can.shares_weights <= can.in_process
    assert can.logprobs_match_training <= can.shares_weights
    assert not (can.shares_weights and can.needs_weight_sync)
    assert can.main_process_only <= can.needs_weight_sync
    assert set(can.unsupported) <= {field.name for field in fields(Sampling)}


def test_every_engine_has_the_methods_that_trainers_call(engine):
    engine.interrupt()
    engine.sleep()
    with engine.prefix_cache():
        assert len(engine.generate(requests(2), Sampling(4, seed=0))) == 6
    assert not engine.needs_weights()
    if engine.capabilities.scores_sequences:
        assert all(len(line) == 2 for lines in engine.score([[5, 6, 7]], [1]).values() for line in lines)
    else:
        with pytest.raises(NotImplementedError, match=engine.name):
            engine.score([[5, 6, 7]], [1])
    engine.mark_stale()
    assert engine.needs_weights() == engine.capabilities.needs_weight_sync


def test_log_probs_are_those_of_the_training_forward_where_the_engine_says_so(engine):
    if not engine.capabilities.logprobs_match_training:
        return
    rollouts = engine.generate(requests(2), Sampling(6, seed=1))
    truth = sequence_logps(engine.model, [Row(r.prompt_ids, [r.token_ids], [[1] * 6]) for r in rollouts])
    assert all(torch.allclose(torch.tensor(r.logp), t, atol=1e-4) for r, t in zip(rollouts, truth, strict=True))


class Plain:
    """An object that only looks like an engine."""

    def generate(self, requests, sampling):
        return []

    def load_weights(self, named_tensors, version):
        pass

    def close(self):
        pass


def test_an_object_that_only_looks_like_an_engine_is_refused_and_three_methods_make_one():
    with raises(ConfigError, "rollout_engine"):
        require_engine(Plain())
    with raises(ConfigError, "reference_engine", "'generate'"):
        require_engine(object(), "reference_engine")
    mine = type("Mine", (Plain, RolloutEngine), {})()
    assert require_engine(mine).capabilities == Capabilities()


def test_rollouts_come_request_by_request_with_their_prompts(engine):
    rollouts = engine.generate(requests(3), Sampling(5, seed=0))
    assert [r.prompt_ids for r in rollouts] == [p for p in PROMPTS for _ in range(3)]
    for r in rollouts:
        assert len(r.token_ids) == len(r.logp) == 5
        assert r.finish_reason == "length"
        assert all(0 <= t < VOCAB for t in r.token_ids)


def test_generation_stops_after_the_stop_token_and_keeps_it(engine):
    stops = (3, 4, 5, 6)
    rollouts = engine.generate(requests(4), Sampling(20, stop_token_ids=stops, seed=1))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"} or all(r.finish_reason == "stop" for r in rollouts)
    for r in rollouts:
        inside = [t in stops for t in r.token_ids]
        assert not any(inside[:-1])
        assert inside[-1] == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or len(r.token_ids) == 20


@pytest.mark.matrix
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logps_equal_a_plain_forward_to_1e3(engine, temperature):
    sampling = Sampling(9, temperature=temperature, stop_token_ids=(3,), seed=2)
    rollouts = engine.generate(requests(4), sampling)
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        logits = engine.model(ids).logits[0, len(r.prompt_ids) - 1 : -1] / temperature
        truth = torch.log_softmax(logits, -1).gather(1, torch.tensor(r.token_ids)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-3)


def test_logps_are_those_before_truncation(engine):
    rollouts = engine.generate(requests(2), Sampling(4, top_k=3, seed=0))
    if engine.name == "paged":  # It knows those after it alone, and does not pass them off as the others.
        assert all(not r.logp and len(r.processed_logp) == 4 for r in rollouts)
        return
    if engine.name == "server":  # It knows those after it alone, and says that they are.
        assert all(r.logp == r.processed_logp and len(r.logp) == 4 for r in rollouts)
        return
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 4]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(engine.model, rows), strict=True):
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-3)


def test_a_seed_reproduces_and_another_differs(engine):
    a, b, c = ([r.token_ids for r in engine.generate(requests(3), Sampling(8, seed=seed))] for seed in (11, 11, 12))
    assert a == b
    assert a != c


def test_without_a_seed_two_calls_differ(engine):
    first, second = ([r.token_ids for r in engine.generate(requests(3), Sampling(8))] for _ in range(2))
    assert first != second


def test_completions_of_one_prompt_differ(engine):
    rollouts = engine.generate([Request(PROMPTS[0], 8)], Sampling(8, seed=0))
    assert len({tuple(r.token_ids) for r in rollouts}) > 4


def test_greedy_equals_generate(engine):
    rollouts = engine.generate(requests(1), Sampling(12, temperature=0.0, stop_token_ids=(2,)))
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids])
        out = engine.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert r.token_ids == out[0, ids.shape[1] :].tolist()[: len(r.token_ids)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {}),
        ("temperature", {"temperature": 0.5}),
        ("top_k", {"top_k": 5}),
        ("top_p", {"top_p": 0.7}),
        ("min_p", {"min_p": 0.3}),
    ],
)
def test_the_distribution_is_the_one_asked_for(engine, name, settings):
    if set(settings) & set(engine.capabilities.unsupported):
        with raises(ConfigError, "min_p=0.3"):
            engine.generate(requests(1), Sampling(1, **settings))
        return
    count = 300 if engine.name == "paged" else 1000  # A request each: transformers takes 6 ms for one.
    rollouts = engine.generate([Request(PROMPTS[0], count)], Sampling(1, seed=3, **settings))
    with torch.no_grad():
        x = engine.model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / settings.get("temperature", 1.0)
    p = x.softmax(0)
    order = p.argsort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if "top_k" in settings:
        keep = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, order[:5], True)
    if "top_p" in settings:
        before = p[order].cumsum(0) - p[order]
        keep = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, order[before < 0.7], True)
    if "min_p" in settings:
        keep = p >= 0.3 * p.max()
    expected = torch.where(keep, p, 0.0)
    expected = expected / expected.sum() * count
    seen = torch.bincount(torch.tensor([r.token_ids[0] for r in rollouts]), minlength=VOCAB).double()
    assert seen[~keep].sum() == 0
    often = expected >= 5
    f_obs, f_exp = seen[often].tolist(), expected[often].tolist()
    rest = count - sum(f_exp)
    if rest > 1e-6:
        f_obs, f_exp = [*f_obs, count - sum(f_obs)], [*f_exp, rest]
    assert len(f_obs) > 1
    assert chisquare(f_obs, f_exp).pvalue > 1e-4


def test_repetition_penalty_makes_repeats_rarer(engine):
    if "repetition_penalty" in engine.capabilities.unsupported:
        with pytest.raises(ConfigError, match=r"repetition_penalty=20\.0"):
            engine.generate(requests(1), Sampling(1, repetition_penalty=20.0))
        return

    def repeats(penalty):
        rollouts = engine.generate(requests(4), Sampling(12, repetition_penalty=penalty, seed=5))
        return sum(len(r.token_ids) - len(set(r.token_ids)) for r in rollouts)

    assert repeats(20.0) < repeats(1.0)


def test_training_mode_and_attention_backend_are_restored(engine):
    engine.model.train()
    engine.model.model.layers[0].eval()
    alone = engine.generate(requests(1), Sampling(2, seed=0))
    if engine.name in ("hf", "paged", "native"):
        tree_attention.install(engine.model)  # As training does.
    before = engine.model.config._attn_implementation
    assert [r.token_ids for r in engine.generate(requests(1), Sampling(2, seed=0))] == [r.token_ids for r in alone]
    assert engine.model.training
    assert not engine.model.model.layers[0].training
    assert engine.model.model.layers[1].training
    assert engine.model.config._attn_implementation == before


def test_the_engine_works_after_an_exception(engine):
    with raises(RolloutError, "1"):
        engine.generate([Request([5]), Request([])], Sampling(2))
    with raises(RolloutError, "0", "2", "max_new_tokens=600", "512"):
        engine.generate([Request([5, 6])], Sampling(600))
    with raises(RolloutError, "99", "37"):
        engine.generate([Request([99])], Sampling(2))
    if engine.capabilities.needs_weight_sync:
        assert len(engine.generate(requests(2), Sampling(4, seed=0))) == 6
        return
    # A thread that generates ends of it, and takes the requests along.
    kind, seen = (RuntimeError, RolloutError) if engine.name == "paged" else (KeyboardInterrupt, KeyboardInterrupt)
    hook = engine.model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(kind("broken")))
    with pytest.raises(seen):
        engine.generate(requests(2), Sampling(4, seed=0))
    hook.remove()
    assert len(engine.generate(requests(2), Sampling(4, seed=0))) == 6
    assert engine.model.config._attn_implementation == "sdpa"


def test_rollouts_carry_the_version_of_the_weights(engine):
    engine.load_weights(Weights(engine.model) if engine.name == "server" else [], version=7)
    assert engine.generate([Request([5])], Sampling(1, seed=0))[0].version == 7
    engine.close()


def test_it_works_under_activation_checkpointing(engine):
    engine.model.train()
    engine.model.gradient_checkpointing_enable()
    rollouts = engine.generate(requests(2), Sampling(6, seed=2))
    truth = sequence_logps(engine.model, [Row(r.prompt_ids, [r.token_ids], [[1] * 6]) for r in rollouts])
    assert all(torch.allclose(torch.tensor(r.logp), t, atol=1e-3) for r, t in zip(rollouts, truth, strict=True))


def test_settings_that_an_engine_would_leave_out_are_refused(engine):
    for name in engine.capabilities.unsupported:
        value = SETTINGS[name]
        with pytest.raises((ConfigError, RolloutError), match=rf"{name}="):
            engine.generate(requests(1), Sampling(2, **{name: value}))


def test_a_request_with_sampling_of_its_own_is_followed_or_refused(engine):
    own = [Request([5], sampling=Sampling(2, temperature=0.5))]
    if engine.capabilities.per_request_sampling:
        assert [len(r.token_ids) for r in engine.generate(own, Sampling(4))] == [2]
        return
    with raises(ConfigError):
        engine.generate(own, Sampling(2))


def test_a_seed_of_a_request_is_no_setting_of_its_own_for_engines_that_do_not_read_it(engine):
    if engine.name in ("hf", "paged"):
        assert len(engine.generate([Request([5], sampling=Sampling(2, seed=3))], Sampling(2, seed=4))) == 1
