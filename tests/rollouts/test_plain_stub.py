"""Plain vLLM servers as a trainer meets them, from a stub that can lie; the real one is in test_plain_vllm.py."""

import pytest
import torch

from posttrain.checks.server import check_info, check_parity, needs_of, probe_logprobs, probe_sequences
from posttrain.errors import BadRequest, ConfigError, RolloutServerError, ServerBusy, WeightSyncError
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.server.engine import ServerEngine, VLLMClient
from posttrain.rollouts.server.plain_vllm import PlainVLLMClient, connect_client
from posttrain.rollouts.vllm_worker import EXTENSION
from posttrain.rollouts.workers.shared_weights import Weights
from posttrain.types import Request, Row, Sampling
from tests.algorithms.helpers import grpo, grpo_args, losses
from tests.conftest import build_model
from tests.rollouts.plain_stub import PlainStub
from tests.rollouts.stub_server import StubServer

VOCAB = 37
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


@pytest.fixture
def stub():
    made = PlainStub(VOCAB, seed=9)  # Other weights than those that are pushed.
    yield made
    made.close()


@pytest.fixture
def engine(stub):
    made = ServerEngine(stub.url, connection_timeout=10)
    made.model = build_model(VOCAB)
    yield made
    made.close()


def pushed(engine, version=1):
    engine.load_weights(Weights(engine.model), version)
    return engine


def parity(engine):
    sequences = probe_sequences(VOCAB, 64)
    rows = [Row(ids[:1], [ids[1:]], [[1] * (len(ids) - 1)]) for ids in sequences]
    with torch.no_grad():
        ours = [logp.tolist() for logp in sequence_logps(engine.model, rows)]
    (theirs,) = engine.score(sequences, [1] * len(sequences)).values()
    return check_parity("x", ours, theirs, dtype=engine.capabilities.dtype, version=1)


def test_the_client_fits_the_server(stub):
    ours = StubServer(build_model(VOCAB))
    assert type(connect_client(stub.url)) is PlainVLLMClient
    assert type(connect_client(ours.url)) is VLLMClient
    ours.close()


def test_completions_have_the_log_probs_of_the_weights_that_were_pushed(engine):
    assert parity(engine).code == "PT-S004"
    pushed(engine)
    assert parity(engine) is None
    rollouts = engine.generate([Request(p, 2) for p in PROMPTS], Sampling(5, seed=1, top_logps=3))
    assert [r.prompt_ids for r in rollouts] == [p for p in PROMPTS for _ in range(2)]
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 5]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(engine.model, rows), strict=True):
        assert r.logp == pytest.approx(truth.tolist(), abs=1e-4) and r.version == 1
        assert all(len(at) == 3 and at == sorted(at, key=lambda pair: -pair[1]) for at in r.top_logps)


def test_prompts_without_seeds_go_together_and_those_with_seeds_alone(engine, stub):
    pushed(engine)
    for seed, requests in ((None, 2), (3, 70)):
        stub.asked.clear()
        assert len(engine.generate([Request([5 + i % 7]) for i in range(70)], Sampling(1, seed=seed))) == 70
        assert stub.asked.count("/v1/completions") == requests


def test_what_it_lacks_is_told_with_the_command_that_has_it(stub):
    for lie, words in (("plain", "VLLM_SERVER_DEV_MODE=1"), ("bare", f"--worker-extension-cls {EXTENSION}")):
        stub.lies = {lie: True}
        engine = ServerEngine(stub.url, connection_timeout=10)
        (server,) = engine.fleet.live
        (found,) = check_info(stub.url, server.info, needs_of(build_model(VOCAB), _args()))
        assert found.code == "PT-S012" and words in found.what and f"vllm serve {'no/such-folder'}" in found.fix
        assert len(engine.generate([Request([5], 2)], Sampling(3))) == 2  # It samples all the same.
        with pytest.raises(WeightSyncError, match="takes no weights") as error:
            engine.load_weights(Weights(build_model(VOCAB)), 1)
        assert words in str(error.value) and "posttrain serve --engine vllm" in str(error.value)
        engine.close()


def _args(**settings):
    return grpo_args("unused", **settings)


@pytest.mark.parametrize(
    ("lie", "code", "words"),
    [
        ({"facts": {"hidden_size": 64}}, "PT-S001", "hidden_size=64"),
        ({"facts": {"architectures": ["Qwen2ForCausalLM"]}}, "PT-S001", "Qwen2ForCausalLM"),
        ({"facts": {"vocab_size": 36}}, "PT-S002", "36 tokens"),
        ({"facts": {"max_model_len": 8}}, "PT-S010", "max_model_len=8"),
        ({"facts": {"quantization": "fp8"}}, "PT-S015", "fp8"),
        ({"raw": True}, "PT-S011", "the same at temperatures 0.5 and 1.0"),
        ({}, None, ""),
    ],
)
def test_checks_a_and_h_find_each_lie_and_have_nothing_to_say_of_the_truth(stub, lie, code, words):
    stub.lies = lie
    engine = ServerEngine(stub.url, connection_timeout=10)
    (server,) = engine.fleet.live
    needs = needs_of(build_model(VOCAB), _args(temperature=0.7, max_completion_length=16))
    found = [*check_info(stub.url, server.info, needs), *probe_logprobs(server.client, needs)]
    assert [f.code for f in found] == ([code] if code else [])
    assert all(words in f.what for f in found)
    engine.close()


def test_raw_log_probs_are_a_warning_where_the_temperature_is_one(stub):
    stub.lies = {"raw": True}
    client = connect_client(stub.url)
    (found,) = probe_logprobs(client, needs_of(build_model(VOCAB), _args()))
    assert found.severity == "warning" and "vllm serve" in found.fix
    client.close()


def test_a_server_that_confirms_and_does_not_load_is_found_by_parity(engine, stub):
    stub.lies = {"deaf": True}
    pushed(engine)
    assert parity(engine).code == "PT-S004"


def test_a_server_that_keeps_old_keys_and_values_is_refused(engine, stub):
    stub.lies = {"stuck": True}
    with pytest.raises(WeightSyncError, match="forget keys and values"):
        pushed(engine)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c[1:], "sent 5 completions for 3 prompts x 2"),
        (lambda c: [x | {"prompt_token_ids": [1]} for x in c], "answered other prompts"),
        (lambda c: [x | {"token_ids": None} for x in c], "sends no token ids"),
        (lambda c: [x | {"logprobs": None} for x in c], "no log-probs"),
        (lambda c: [x | {"token_ids": [99] * 4} for x in c], "token id 99"),
        (lambda c: [x | {"token_ids": x["token_ids"][:-1]} for x in c], "log-probs"),
    ],
)
def test_answers_that_answer_something_else_are_not_used(engine, stub, edit, words):
    pushed(engine)
    stub.lies = {"edit": edit}
    with pytest.raises(RolloutServerError, match=words):
        engine.generate([Request(p, 2) for p in PROMPTS], Sampling(4))


def test_weights_that_another_pushed_or_a_restart_lost_are_noticed(engine, stub):
    pushed(engine)
    for other in ("77", "default"):
        stub.version = other
        with pytest.raises(WeightSyncError, match="version"):
            engine.generate([Request([5])], Sampling(2))
        assert engine.needs_weights()
        pushed(engine)


def test_weights_that_change_while_it_samples_are_noticed(engine, stub):
    pushed(engine)

    def edit(choices):
        stub.version = "78"
        return choices

    stub.lies = {"edit": edit}
    with pytest.raises(WeightSyncError, match="changed from version 1 to 78"):
        engine.generate([Request([5])], Sampling(2))


def test_half_a_push_is_not_sampled_from_and_a_whole_one_heals_it(engine, stub):
    pushed(engine)
    with pytest.raises(WeightSyncError, match="nonsense"):
        engine.load_weights([("nonsense", torch.ones(1)), *Weights(engine.model)], 2)
    (server,) = engine.fleet.servers.values()
    with pytest.raises(WeightSyncError, match="not whole"):
        server.client.generate([[5]])
    assert not stub.paused
    pushed(engine, 3)
    assert parity(engine) is None


def test_missing_names_are_told(engine):
    weights = list(Weights(engine.model))
    stubborn = [pair for pair in weights if pair[0] != "model.norm.weight"]

    class Some:
        names = [name for name, _ in stubborn]

        def __iter__(self):
            return iter(stubborn)

    with pytest.raises(WeightSyncError, match=r"old values of 1 weights: model\.norm\.weight"):
        engine.load_weights(Some(), 1)


def test_what_vllm_does_not_have_is_refused_before_it_is_asked(engine, stub):
    pushed(engine)
    (server,) = engine.fleet.live
    with pytest.raises(BadRequest, match="no_repeat_ngram"):
        engine.generate([Request([5])], Sampling(2, no_repeat_ngram=3))
    with pytest.raises(ConfigError, match="temperature 1 alone"):
        server.client.get_sequence_logprobs([[1, 2]], [1], temperature=2.0)
    with pytest.raises(BadRequest, match="images"):
        server.client.generate([[5]], [["x"]])
    with pytest.raises(NotImplementedError, match="render the prompts"):
        server.client.chat([[{"role": "user", "content": "x"}]])
    with pytest.raises(WeightSyncError, match="posttrain serve --engine vllm"):
        server.client.init_communicator()
    with pytest.raises(WeightSyncError, match="shared memory of its own machine"):
        ServerEngineOverHTTP(stub.url, engine.model)


def ServerEngineOverHTTP(url, model):
    client = connect_client(url)
    from posttrain.rollouts.server.weight_sync import push

    return push(client, Weights(model), 9, shared=False)


def test_one_trainer_a_server_on_this_machine(engine, stub):
    with pytest.raises(ServerBusy, match="is used by"):
        ServerEngine(stub.url, connection_timeout=1)
    engine.close()
    ServerEngine(stub.url, connection_timeout=1).close()


def test_grpo_trains_over_it(stub, tmp_path, tiny_tokenizer):
    tiny = PlainStub(len(tiny_tokenizer), seed=9)
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": tiny.url, "max_steps": 2}
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", **settings)
    trainer.train()
    assert len(losses(trainer)) == 2 and tiny.version == "2"
    gaps = [r["sampling/sampling_logp_difference/max"] for r in trainer.state.log_history if "loss" in r]
    assert max(gaps) < 1e-3
    trainer.engine.close()
    tiny.close()


def test_grpo_is_stopped_before_the_first_step_by_a_server_that_takes_no_weights(tmp_path, tiny_tokenizer):
    tiny = PlainStub(len(tiny_tokenizer))
    tiny.lies = {"plain": True}
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": tiny.url, "max_steps": 2}
    with pytest.raises(Exception, match="PT-S012"):
        grpo(tmp_path, tiny_tokenizer, engine="native", **settings).train()
    tiny.close()
