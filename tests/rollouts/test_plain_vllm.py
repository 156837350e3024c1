"""`vllm serve`, the server of vLLM itself, as a rollout server: with what a trainer needs, and without it."""

import pytest
import torch

from posttrain.checks.server import check_info, check_parity, needs_of, probe_logprobs, probe_sequences
from posttrain.errors import BadRequest, ConfigError, ServerBusy, WeightSyncError
from posttrain.rollouts.server.engine import ServerEngine
from posttrain.rollouts.server.plain_vllm import PlainVLLMClient
from posttrain.rollouts.vllm_worker import EXTENSION
from posttrain.rollouts.workers.shared_weights import Weights
from posttrain.types import Request, Rollout, Sampling
from tests.algorithms.helpers import grpo_args
from tests.rollouts import real_vllm as real

pytestmark = real.needed

PROMPTS = [[504, 3575, 282, 4649, 314], [1780, 314, 253], [504, 1345]]
LIMITS = ("--max-model-len", "256", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Started as `restart_command` says."""
    options = (*LIMITS, "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)
    with real.vllm_serve(tmp_path_factory.mktemp("plain"), *options, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="module")
def model():
    return real.load()


@pytest.fixture
def engine(good, model):
    made = ServerEngine(good, connection_timeout=30)
    made.load_weights(Weights(model, checkpoint_names=made.capabilities.checkpoint_names), 1)
    yield made
    made.close()


def gap(engine, policy, version):
    sequences = probe_sequences(49152, 64)
    (theirs,) = engine.score(sequences, [1] * 4).values()
    ours = real.truth(policy, [Rollout(s[:1], s[1:], [], "length") for s in sequences])
    return check_parity("vllm", ours, theirs, dtype=engine.capabilities.dtype, version=version), real.worst(
        ours, theirs
    )


def test_it_is_known_as_vllm_and_says_what_it_serves(engine):
    (server,) = engine.fleet.live
    assert isinstance(server.client, PlainVLLMClient)
    info = server.info
    assert (info["architectures"], info["hidden_size"], info["vocab_size"]) == (["LlamaForCausalLM"], 576, 49152)
    assert (info["max_model_len"], info["logprobs_mode"], info["accepts_weights"]) == (256, "processed_logprobs", True)
    assert server.client.health(deep=True) == {"status": "ok"}
    assert server.client.get_world_size() == 1
    server.client.reset_prefix_cache()


def test_log_probs_are_those_of_transformers_at_the_temperature(engine, model):
    real.assert_logps_are_transformers(engine, model, PROMPTS)


def test_seeds_stops_and_the_most_likely_tokens(engine):
    ask = [Request(p, 3) for p in PROMPTS]
    first, again, other = ([r.token_ids for r in engine.generate(ask, Sampling(8, seed=s))] for s in (3, 3, 4))
    assert first == again != other
    stop = first[0][2]
    for r in engine.generate(ask, Sampling(8, seed=3, stop_token_ids=(stop,))):
        assert stop not in r.token_ids[:-1] and (r.finish_reason == "stop") == (r.token_ids[-1] == stop)
    rollouts = engine.generate(ask, Sampling(4, seed=0, top_logps=5))
    assert all(len(at) == 5 for r in rollouts for at in r.top_logps)
    greedy = engine.generate(ask[:1], Sampling(4, temperature=0.0, top_logps=1))[0]
    assert [at[0][0] for at in greedy.top_logps] == greedy.token_ids


def test_weights_of_another_step_are_noticed_and_a_push_cures_it(engine, model):
    assert gap(engine, model, 1)[0] is None
    later = real.moved(real.load())
    assert gap(engine, later, 1)[0].code == "PT-S004"
    engine.load_weights(Weights(later, checkpoint_names=True), 2)
    found, far = gap(engine, later, 2)
    assert found is None and far < 1e-3
    rollouts = engine.generate([Request(PROMPTS[0], 4)], Sampling(16, seed=0))
    assert {r.version for r in rollouts} == {2}
    assert real.worst([r.logp for r in rollouts], real.truth(later, rollouts)) < 1e-3


def test_weights_that_another_pushed_are_noticed(engine, model):
    (server,) = engine.fleet.live
    server.client._request("POST", "/update_weight_version", {"new_version": "77"})
    with pytest.raises(WeightSyncError, match="version 77"):
        engine.generate([Request(PROMPTS[0])], Sampling(2))
    assert engine.needs_weights()
    engine.load_weights(Weights(model, checkpoint_names=True), 3)
    assert engine.generate([Request(PROMPTS[0])], Sampling(2))[0].version == 3


def test_a_push_that_fails_leaves_weights_that_are_not_sampled_from_until_a_whole_one_came(engine, model):
    (server,) = engine.fleet.live
    for wrong in ([("model.layers.0.nonsense.weight", torch.ones(2))], [("model.norm.weight", torch.ones(7))]):
        with pytest.raises(WeightSyncError):
            engine.load_weights([*wrong, *Weights(model)], 4)
        with pytest.raises(WeightSyncError, match="not whole"):
            server.client.generate([PROMPTS[0]])
        engine.load_weights(Weights(model, checkpoint_names=True), 5)
        assert gap(engine, model, 5)[0] is None


def test_what_vllm_cannot_do_is_refused_by_name(engine):
    (server,) = engine.fleet.live
    with pytest.raises(BadRequest, match="no_repeat_ngram"):
        engine.generate([Request(PROMPTS[0])], Sampling(2, no_repeat_ngram=2))
    with pytest.raises(ConfigError, match="temperature 1 alone"):
        server.client.get_sequence_logprobs([[1, 2]], [1], temperature=0.5)
    with pytest.raises(WeightSyncError, match="shared memory of its machine alone"):
        server.client.init_communicator()
    with pytest.raises(ServerBusy, match="is used by"):
        ServerEngine(good_url(engine), connection_timeout=5)


def good_url(engine):
    return next(iter(engine.fleet.servers))


def test_a_pause_by_another_is_waited_for_and_resumed(engine):
    (server,) = engine.fleet.live
    server.client.pause("wait")
    server.client.resume()
    assert engine.generate([Request(PROMPTS[0])], Sampling(2))


def test_checks_have_nothing_to_say_of_a_good_one_and_find_another_model_and_a_short_context(engine, model, tmp_path):
    from tests.conftest import build_model

    (server,) = engine.fleet.live

    def codes(trained, **settings):
        needs = needs_of(trained, grpo_args(tmp_path, **settings))
        found = [*check_info(server.url, server.info, needs), *probe_logprobs(server.client, needs)]
        assert all("vllm serve" in f.fix for f in found if f.code == "PT-S010")
        return [f.code for f in found]

    assert codes(model, temperature=0.7, max_completion_length=64) == []
    assert codes(model, max_completion_length=256) == ["PT-S010"]
    assert codes(build_model(49152), max_completion_length=64) == ["PT-S001"]


def test_as_most_people_start_it_it_only_samples_and_its_log_probs_are_raw(tmp_path, model):
    """No developer mode, no extension, vLLM's own log-probs mode: every lack has its finding and its command."""
    with real.vllm_serve(tmp_path, *LIMITS) as url:
        engine = ServerEngine(url, connection_timeout=30)
        rollouts = engine.generate([Request(p, 2) for p in PROMPTS], Sampling(8, seed=1))
        assert real.worst([r.logp for r in rollouts], real.truth(model, rollouts)) < 1e-3
        (server,) = engine.fleet.live
        needs = needs_of(model, grpo_args(tmp_path, temperature=0.7, max_completion_length=64))
        (found,) = check_info(url, server.info, needs)
        assert found.code == "PT-S012" and "VLLM_SERVER_DEV_MODE=1" in found.what and EXTENSION in found.fix
        (found,) = probe_logprobs(server.client, needs)
        assert (found.code, found.severity) == ("PT-S011", "error") and "processed_logprobs" in found.fix
        (found,) = probe_logprobs(server.client, needs_of(model, grpo_args(tmp_path)))
        assert found.severity == "warning"
        with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1 vllm serve"):
            engine.load_weights(Weights(model, checkpoint_names=True), 1)
        assert server.client.health() == {"status": "ok"}
        engine.close()
