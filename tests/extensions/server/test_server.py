"""A rollout server that dies, restarts, lies, is slow or full: retried where that is safe, else an error; never a mix-up."""

import math
import threading
import time
from types import SimpleNamespace

import httpx2
import pytest
import torch

from posttrain.errors import (
    BadRequest,
    ConfigError,
    RolloutError,
    RolloutServerError,
    ServerBusy,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.extensions.server import client as connection
from posttrain.extensions.server import pool as fleet
from posttrain.extensions.server.engine import ServerEngine, VLLMClient
from posttrain.extensions.server.replies import sampling_body
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.extensions.server.stub_server import StubServer

VOCAB = 37
REQUESTS = [Request([5, 6, 7, 8], 2), Request([9, 10], 2), Request([11, 12, 13], 2), Request([14], 2)]
SAMPLING = Sampling(6, seed=3)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "BACK_OFF", 0.01)
    monkeypatch.setattr(fleet, "REFRESH_SECONDS", 0.0)


@pytest.fixture
def model():
    return build_model(VOCAB)


@pytest.fixture
def stub(made, model):
    made.append(StubServer(build_model(VOCAB, seed=9)))  # Other weights than the trainer's, until they are pushed.
    return made[-1]


def connect(made, *stubs, **options):
    urls = stubs[0] if callable(stubs[0]) else [s.url for s in stubs]
    made.append(ServerEngine(urls, **({"connection_timeout": 5, "request_timeout": 20} | options)))
    return made[-1]


@pytest.fixture
def engine(made, stub, model):
    engine = connect(made, stub)
    engine.load_weights(Weights(model), 1)
    return engine


def words(rollouts):
    return [(r.prompt_ids, r.token_ids) for r in rollouts]


def generations(stub):
    return sum(path == "v1/completions" for _, path in stub.calls)


def test_an_address_with_a_password_is_asked_with_it_and_no_error_or_log_has_it(caplog):
    with pytest.raises(ServerUnreachable) as caught:
        ServerEngine("http://me:s3cr3t@127.0.0.1:9", connection_timeout=0.0)
    told, cause = "", caught.value
    while cause is not None:
        told, cause = told + str(cause) + str(getattr(cause, "url", "")), cause.__cause__
    assert "127.0.0.1:9" in told and "s3cr3t" not in told + caplog.text


def test_a_least_length_above_the_limit_of_a_turn_is_not_asked_for():
    """vLLM answers 400, or raises: "min_tokens must be less than or equal to max_tokens"."""
    asked = [sampling_body(Sampling(most, min_new_tokens=8)) for most in (16, 3)]
    assert [(body["min_tokens"], body["max_tokens"]) for body in asked] == [(8, 16), (3, 3)]


# One answer


@pytest.mark.parametrize("lie", ["truncate", "hang_up"])
def test_an_answer_that_breaks_off_is_asked_for_again_and_says_the_same(engine, stub, lie):
    truth = words(engine.generate(REQUESTS[:1], SAMPLING))
    stub.lies[lie] = 2
    before = generations(stub)
    assert words(engine.generate(REQUESTS[:1], SAMPLING)) == truth
    assert generations(stub) == before + 3


def test_a_storm_of_503_is_waited_out_and_a_longer_one_is_an_error(engine, stub):
    stub.lies["statuses"] = [503, 502, 504]
    assert len(engine.generate(REQUESTS[:1], SAMPLING)) == 2
    stub.lies["statuses"] = [503] * 50
    with pytest.raises(ServerBusy, match="returned 503: not now"):
        engine.generate(REQUESTS[:1], SAMPLING)
    assert len(stub.lies["statuses"]) == 46
    stub.lies["statuses"] = []
    assert len(engine.generate(REQUESTS, SAMPLING)) == 8  # It is looked at again, and its weights are still there.


def test_a_500_is_not_sent_again(engine, stub):
    before = generations(stub)
    stub.lies["statuses"] = [500]
    with pytest.raises(RolloutServerError, match="returned 500"):
        engine.generate(REQUESTS[:1], SAMPLING)
    assert generations(stub) == before + 1


def test_trap_s48_a_bad_request_names_the_prompt_and_is_not_sent_again(engine, stub):
    engine.fleet.servers[stub.url].info["max_model_len"] = 10**6
    before = generations(stub)
    with pytest.raises(BadRequest, match="request 0: a prompt of 600 tokens") as caught:
        engine.generate([Request([6] * 600)], SAMPLING)
    assert isinstance(caught.value, ValueError)
    assert generations(stub) == before + 1


def test_a_slow_answer_ends_after_the_time_out_and_is_not_asked_for_again(made, stub, model):
    engine = connect(made, stub, request_timeout=0.3)
    engine.load_weights(Weights(model), 1)
    stub.lies["slow"] = 2.0
    begin = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"did not respond within 0.3 s"):
        engine.generate(REQUESTS[:1], SAMPLING)
    assert time.monotonic() - begin < 1.5
    assert generations(stub) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: [c[0] | {"prompt_token_ids": [1]}, c[1]], "returned completions of another prompt"),
        (lambda c: c[:-1], "returned 1 completions instead of 2"),
        (lambda c: [x | {"logprobs": None} for x in c], "returned 0 log-probs for"),
        (
            lambda c: [x | {"token_ids": x["token_ids"][:-1]} for x in c],
            "returned 6 log-probs for a completion of 5 tokens",
        ),
        (lambda c: [x | {"token_ids": [99] * 6} for x in c], "token id 99, but the vocabulary has 37"),
        (
            lambda c: [x | {"token_ids": [1] * 7, "logprobs": {"token_logprobs": [0.0] * 7}} for x in c],
            "7 tokens instead of 1 to 6",
        ),
        (lambda c: ["words", "words"], "not in the format of vLLM's endpoints"),
        (lambda c: [{k: v for k, v in x.items() if k != "weight_version"} for x in c], "not in the format"),
        (lambda c: [x | {"logprobs": {"token_logprobs": ["a"] * 6}} for x in c], "not in the format"),
    ],
)
def test_an_answer_that_does_not_answer_is_refused(engine, stub, change, text):
    stub.lies["edit"] = change
    with pytest.raises(RolloutServerError, match=text):
        engine.generate(REQUESTS[:1], SAMPLING)


@pytest.mark.parametrize("reply", [[], None, {"choices": []}, {"choices": [{"prompt_logprobs": None}]}])
def test_a_teacher_s_answer_without_scores_is_refused(engine, monkeypatch, reply):
    client = engine.fleet.live[0].client
    monkeypatch.setattr(client.session, "request", lambda *_, **__: httpx2.Response(200, json=reply))
    with pytest.raises(RolloutServerError, match="not in the format"):
        client.score([[1, 2, 3]], [1])


def test_trap_s29_the_log_prob_of_a_token_is_found_by_its_id_and_a_missing_one_is_nan(engine, stub):
    ask = Sampling(6, seed=3, top_logps=2)
    truth = engine.generate(REQUESTS[:1], ask)[0]

    def likely_first(choices):
        logprobs = choices[0]["logprobs"]
        logprobs["token_logprobs"][0] = -9999.0  # vLLM's minus infinity.
        for token, at in zip(choices[0]["token_ids"], logprobs["top_logprobs"], strict=True):
            at[f"token_id:{36 if token != 36 else 35}"] = -0.01
        return choices

    stub.lies["edit"] = likely_first
    seen = engine.generate(REQUESTS[:1], ask)[0]
    assert math.isnan(seen.logp[0]) and seen.logp[1:] == truth.logp[1:]
    assert [at[0] for at in seen.top_logps[1:]] == [(36 if token != 36 else 35, -0.01) for token in seen.token_ids[1:]]


def test_log_probs_of_truncated_sampling_are_of_the_distribution_that_was_sampled_from(engine):
    plain, cut = (engine.generate(REQUESTS, Sampling(6, seed=3, top_k=k)) for k in (0, 1))
    assert all(r.processed_logp is None for r in plain) and all(r.processed_logp == r.logp for r in cut)
    assert max(value for r in plain for value in r.logp) < -0.5
    assert [value for r in cut for value in r.logp] == [0.0] * 48  # One token is left to be drawn.


def test_what_servers_have_no_rule_for_is_refused_by_name(engine):
    with pytest.raises(ConfigError, match="no_repeat_ngram"):
        engine.generate(REQUESTS, Sampling(6, no_repeat_ngram=2))


def test_a_server_that_does_not_say_which_weights_wrote_is_asked_before_and_after(made, stub, model):
    stub.lies["facts"] = {"tells_versions": False}
    engine = connect(made, stub)
    engine.load_weights(Weights(model), 1)
    assert ("POST", "pause") in stub.calls
    assert engine.generate(REQUESTS[:1], SAMPLING)[0].version == 1

    def another_pushes(choices):
        stub.version = "other-9"
        return choices

    stub.lies["edit"] = another_pushes
    with pytest.raises(WeightSyncError, match=r"changed from version \w+-1 to other-9 during sampling"):
        engine.generate(REQUESTS[:1], SAMPLING)


# Weights


def test_pushed_weights_arrive_byte_for_byte(made, stub, model):
    engine = connect(made, stub, bucket_mb=1)
    for version in (1, 2):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight += version
        engine.load_weights(Weights(model), version)
        own = stub.model.state_dict()
        assert all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())
        assert engine.generate([Request([5])], Sampling(1, seed=0))[0].version == version


def test_a_server_with_old_weights_is_found_at_its_first_answer_and_works_after_a_push(made, model):
    first = StubServer(model)
    engine = connect(made, first)
    engine.load_weights(Weights(model), 1)
    truth = words(engine.generate(REQUESTS, SAMPLING))
    port = first.http.server_port
    first.close()
    made.append(StubServer(build_model(VOCAB, seed=9), port=port))
    with pytest.raises((WeightSyncError, ServerUnreachable)):
        engine.generate(REQUESTS, SAMPLING)
    assert engine.needs_weights()
    with pytest.raises(WeightSyncError, match="no rollout server has version 1"):
        engine.generate(REQUESTS, SAMPLING)
    engine.load_weights(Weights(model), 1)
    assert words(engine.generate(REQUESTS, SAMPLING)) == truth
    assert not engine.needs_weights()


def test_a_reply_of_another_version_never_reaches_the_trainer(engine, stub):
    stub.lies["edit"] = lambda choices: [c | {"weight_version": "old-17"} for c in choices]
    text = r"sampled from weights of version old-17, but version \w+-1 was pushed last"
    with pytest.raises(WeightSyncError, match=text) as caught:
        engine.generate(REQUESTS, SAMPLING)
    assert caught.value.phase == "reply"
    assert engine.needs_weights()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("lie", "phase", "text"),
    [
        ({"fail": "start_weight_update"}, "begin", "out of memory"),
        ({"fail": "update_weights"}, "bucket", "out of memory"),
        ({"fail": "complete"}, "end", "out of memory"),
        ({"fail": "finish_weight_update"}, "end", "out of memory"),
        ({"renames": "x-1"}, "end", r"reports version x-1, although version \w+-2 was pushed"),
        ({"drop_name": "lm_head.bias"}, "end", "still has old values of 1 weights: lm_head.bias"),
        ({"stuck": True}, "end", "did not clear"),
    ],
)
def test_trap_s5_s6_s12_a_push_that_fails_names_its_phase_is_not_repeated_and_the_next_one_cures_it(
    engine, stub, model, lie, phase, text
):
    stub.lies.update(lie)
    stub.calls.clear()
    with pytest.raises(WeightSyncError, match=text) as caught:
        engine.load_weights(Weights(model), 2)
    assert caught.value.phase == phase
    for path in ("start_weight_update", "update_weights", "complete"):
        assert [sent for _, sent in stub.calls].count(path) <= 1  # A second receive would never complete.
    assert not stub.paused
    for name in lie:
        stub.lies.pop(name)
    with pytest.raises(RolloutServerError):
        engine.generate(REQUESTS, SAMPLING)
    engine.load_weights(Weights(model), 2)
    assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {2}


def test_a_failed_push_still_reads_all_tensors_because_other_ranks_may_wait_in_each(engine, stub, model):
    read = []

    def pairs():
        for name, tensor in Weights(model):
            read.append(name)
            yield name, tensor

    stub.lies["fail"] = "update_weights"
    with pytest.raises(WeightSyncError):
        engine.load_weights(pairs(), 2)
    assert read == Weights(model).names


def test_a_bucket_that_was_changed_on_its_way_is_refused(engine, stub, model, monkeypatch):
    monkeypatch.setattr("posttrain.rollouts.shared_memory.checksum", lambda data: "0" * 32)
    with pytest.raises(WeightSyncError, match="checksum"):
        engine.load_weights(Weights(model), 2)


def test_a_server_of_another_model_says_which_names_it_does_not_know(made, model):
    made.append(StubServer(build_model(VOCAB, num_hidden_layers=1)))
    engine = connect(made, made[-1])
    with pytest.raises(WeightSyncError, match=r"does not know .*layers\.1"):
        engine.load_weights(Weights(model), 1)


def test_the_same_version_of_an_earlier_trainer_is_another_one(made, stub, model):
    names = []
    for _ in range(2):
        engine = connect(made, stub)
        assert engine.needs_weights()
        engine.load_weights(Weights(model), 1)
        assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {1}
        names.append(stub.version)
        engine.close()
    assert names[0] != names[1]


def test_the_client_updates_a_whole_model(made, stub, model):
    client = VLLMClient(stub.url, connection_timeout=5)
    made.append(client)
    client.update_model_params(model, "mine-1")
    assert client.weight_version() == "mine-1"
    assert torch.equal(stub.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    client.update_model_params(model)
    assert client.weight_version() not in ("mine-1", "default")
    client.close_communicator()
    client.close_communicator()


def test_a_server_of_another_machine_takes_no_weights_through_shared_memory(engine, stub, model):
    (server,) = engine.fleet.live
    server.client.host = "10.0.0.9"
    with pytest.raises(WeightSyncError, match=r"another machine.*nccl") as caught:
        engine.load_weights(Weights(model), 2)
    assert caught.value.phase == "begin"


def test_a_server_that_tells_no_version_of_its_weights_is_said_to_take_none(made, stub):
    stub.on_weight_info = None  # vLLM before 0.27.
    client = VLLMClient(stub.url, connection_timeout=5)
    made.append(client)
    assert "0.27" in client.info()["takes_no_weights"]


# Who is there


def test_trap_s14_a_server_that_is_never_healthy_is_given_up_in_time(made, stub, caplog):
    client = VLLMClient(stub.url, connection_timeout=5)
    made.append(client)
    stub.lies["sick"] = "rank 0 is dead"
    begin = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"no healthy rollout server .* rank 0 is dead"):
        client.check_server(0.4, retry_interval=0.1)
    assert time.monotonic() - begin < 2
    assert len([record for record in caplog.records if "Waiting for the server" in record.message]) == 1
    with pytest.raises(ServerUnreachable, match="posttrain serve"):
        ServerEngine("http://127.0.0.1:9", connection_timeout=0.2)
    text = r"no healthy teacher server.*Nothing listens on port 9 of 127.0.0.1.*correct teacher_model_server_url"
    with pytest.raises(ServerUnreachable, match=text):
        VLLMClient("http://127.0.0.1:9", role="teacher")


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"localhost:8000.*http://"):
        VLLMClient("localhost:8000")
    for url in ("http://127.0.0.1:port", "http://[::1"):
        with pytest.raises(ConfigError, match="is not a server address"):
            VLLMClient(url)
    with pytest.raises(ConfigError, match="no rollout server is configured"):
        ServerEngine([], connection_timeout=0)


def test_trap_s52_a_second_trainer_of_the_machine_is_kept_out_until_the_first_leaves(made, stub, model):
    first = ServerEngine(stub.url, connection_timeout=5)
    with pytest.raises(ServerBusy, match=r"is used by .* trainer\.engine\.close\(\)") as caught:
        ServerEngine(stub.url, connection_timeout=5)
    assert caught.value.held
    # The same server by another name.
    with pytest.raises(ServerBusy, match="is used by"):
        ServerEngine(stub.url.replace("127.0.0.1", "localhost"), connection_timeout=5)
    first.close()
    connect(made, stub).load_weights(Weights(model), 1)


def test_a_lock_that_another_user_left_is_said_to_be_theirs(stub, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fleet.FileLock, "acquire", refused)
    with pytest.raises(ServerBusy, match="belongs to another user") as caught:
        ServerEngine(stub.url, connection_timeout=5)
    assert caught.value.held


def test_trap_s53_a_pause_that_a_trainer_left_is_ended_by_the_next_one(made, stub, model):
    stub.paused, stub.version, stub.valid = True, "incomplete", False  # It died in the middle of a push.
    engine = connect(made, stub)
    assert not stub.paused and engine.needs_weights()
    with pytest.raises(WeightSyncError):
        engine.generate(REQUESTS, SAMPLING)
    engine.load_weights(Weights(model), 1)
    assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {1}


def test_a_connection_is_not_used_again_when_the_server_may_be_closing_it(stub, monkeypatch):
    """vLLM and uvicorn close one after five idle seconds: what is sent in that moment is lost, and an update is sent once."""
    client = VLLMClient(stub.url)
    client.call("GET", "/health")
    kept = len(stub.connections)
    client.call("GET", "/health")
    assert len(stub.connections) == kept
    monkeypatch.setattr("httpcore2._sync.http11.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 4))
    client.call("GET", "/health")
    assert len(stub.connections) == kept + 1


def test_a_connection_that_the_server_closed_after_an_error_does_not_make_it_dead(engine, model, monkeypatch):
    session = engine.fleet.live[0].client.session
    ask, resets = session.request, [httpx2.ReadError("Connection reset by peer")]

    def request(*args, **options):
        if resets:
            raise resets.pop()
        return ask(*args, **options)

    monkeypatch.setattr(session, "request", request)
    engine.fleet.live[0].client.health()
    engine.load_weights(Weights(model), 2)


def test_a_server_that_hangs_is_noticed_by_the_push_in_seconds(made, stub, model, monkeypatch):
    monkeypatch.setattr(connection, "QUICK_SECONDS", 0.2)
    engine = connect(made, stub)
    monkeypatch.setattr(stub, "on_health", lambda *_: time.sleep(1.0))
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match="did not respond"):
        engine.load_weights(Weights(model), 1)
    assert time.monotonic() - begin < 5


def test_a_server_that_is_too_busy_to_say_what_it_is_is_asked_again_and_not_taken_for_another(stub, monkeypatch):
    facts = stub.on_collective_rpc
    monkeypatch.setattr(connection, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(stub, "on_collective_rpc", lambda asked: time.sleep(1.0))
    with pytest.raises(ServerUnreachable, match="did not respond"):
        VLLMClient(stub.url)
    monkeypatch.setattr(stub, "on_collective_rpc", facts)
    assert "takes_no_weights" not in VLLMClient(stub.url).info()


def test_scores_are_those_of_a_plain_forward_with_the_most_likely_tokens(made, stub, model):
    client = VLLMClient(stub.url)
    made.append(client)
    client.update_model_params(model)
    sequences = [[5, 6, 7, 8], [9, 10, 11]]
    found = client.score(sequences, [2, 0], top=3)
    for ids, begin, one in zip(sequences, [2, 0], found, strict=True):
        logps = model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        for place, t in enumerate(range(begin, len(ids))):
            if t == 0:
                assert math.isnan(one.logps[0]) and one.top_ids[0] == []
                continue
            assert one.logps[place] == pytest.approx(float(logps[t - 1, ids[t]]), abs=1e-5)
            best = logps[t - 1].topk(3)
            assert one.top_ids[place] == best.indices.tolist()
            assert one.top_logps[place] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_trl_s_arguments_and_reply(made, stub):
    client = VLLMClient(stub.url)
    made.append(client)
    reply = client.generate([[5, 6], [7]], n=2, max_tokens=3, logprobs=2, generation_kwargs={"seed": 1})
    assert reply["prompt_ids"] == [[5, 6], [7]]
    assert [len(ids) for ids in reply["completion_ids"]] == [3] * 4
    for ids, logps, tokens in zip(
        *(reply[k] for k in ("completion_ids", "logprobs", "logprob_token_ids")), strict=True
    ):
        assert all(at == sorted(at, reverse=True) for at in logps)
        assert all(token in at for token, at in zip(ids, tokens, strict=True))
    assert client.generate([[5]], logprobs=None)["logprobs"] is None
    with pytest.raises(BadRequest, match="top_pp"):
        client.generate([[5]], top_pp=1)


def test_the_same_tokens_come_from_one_server_and_from_three(made, model):
    stubs = [StubServer(model) for _ in range(3)]
    made += stubs
    one = connect(made, stubs[0])
    one.load_weights(Weights(model), 1)
    truth = one.generate(REQUESTS, SAMPLING)
    one.close()
    three = connect(made, *stubs)
    three.load_weights(Weights(model), 5)
    found = three.generate(REQUESTS, SAMPLING)
    assert words(found) == words(truth)
    assert all(generations(s) for s in stubs)
    assert {r.version for r in found} == {5}


def test_what_a_dying_server_was_asked_for_goes_to_the_others_and_a_newcomer_joins_with_current_weights(made, model):
    stubs = [StubServer(build_model(VOCAB, seed=9)) for _ in range(3)]
    made += stubs
    urls = [s.url for s in stubs]
    engine = connect(made, lambda: urls)
    engine.load_weights(Weights(model), 1)
    truth = words(engine.generate(REQUESTS * 4, SAMPLING))
    for stub in stubs:
        stub.lies["slow"] = 0.3
    killer = threading.Timer(0.1, stubs[1].die)
    killer.start()
    assert words(engine.generate(REQUESTS * 4, SAMPLING)) == truth
    killer.join()
    assert [s.down is None for s in engine.fleet.servers.values()] == [True, False, True]
    newcomer = StubServer(build_model(VOCAB, seed=4))
    made.append(newcomer)
    urls[1] = newcomer.url
    assert words(engine.generate(REQUESTS * 4, SAMPLING)) == truth
    assert generations(newcomer) == 0  # Not before it has the weights.
    assert engine.needs_weights()
    engine.load_weights(Weights(model), 1)
    assert words(engine.generate(REQUESTS * 4, SAMPLING)) == truth
    assert generations(newcomer) > 0
    assert sum(path == "start_weight_update" for _, path in stubs[0].calls) == 1  # Only the newcomer was sent anything.


def test_servers_with_nothing_to_do_take_turns(made, model):
    stubs = [StubServer(model) for _ in range(3)]
    made += stubs
    engine = connect(made, *stubs)
    engine.load_weights(Weights(model), 1)
    for _ in range(3):
        engine.generate(REQUESTS[:1], SAMPLING)
    assert [generations(stub) for stub in stubs] == [1, 1, 1]


def test_when_all_servers_die_the_error_says_so(made, model):
    stubs = [StubServer(model) for _ in range(2)]
    engine = connect(made, *stubs)
    engine.load_weights(Weights(model), 1)
    for stub in stubs:
        stub.die()
    with pytest.raises(ServerUnreachable, match="none of 2 rollout servers is available"):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(RolloutError):
        engine.load_weights(Weights(model), 2)


def test_a_list_of_servers_in_a_file_is_read_again(made, model, tmp_path):
    stubs = [StubServer(model) for _ in range(2)]
    made += stubs
    listed = tmp_path / "servers.txt"
    listed.write_text(stubs[0].url + "  # the first\n")
    made.append(ServerEngine(listed, connection_timeout=5))
    engine = made[-1]
    engine.load_weights(Weights(model), 1)
    listed.write_text("\n".join(s.url for s in stubs))
    assert engine.needs_weights()
    assert len(engine.fleet.servers) == 2
    listed.write_text(stubs[1].url)
    engine.load_weights(Weights(model), 2)
    assert list(engine.fleet.servers) == [stubs[1].url]
    connect(made, stubs[0])  # It is free again.


def test_a_newcomer_that_belongs_to_another_trainer_ends_no_run_that_has_a_server(made, model, tmp_path, caplog):
    stubs = [StubServer(model) for _ in range(2)]
    made += stubs
    listed = tmp_path / "servers.txt"
    listed.write_text(stubs[0].url)
    made.append(ServerEngine(listed, connection_timeout=5))
    engine = made[-1]
    engine.load_weights(Weights(model), 1)
    other = connect(made, stubs[1])
    listed.write_text("\n".join(s.url for s in stubs))
    for _ in range(2):
        engine.fleet.refresh(force=True)
    assert len(engine.generate(REQUESTS, SAMPLING)) == sum(one.n for one in REQUESTS)
    assert list(engine.fleet.servers) == [stubs[0].url]
    assert caplog.text.count(f"{stubs[1].url} is not used until this error is fixed") == 1
    other.close()
    engine.fleet.refresh(force=True)
    assert list(engine.fleet.servers) == [one.url for one in stubs]


def test_trap_s26_concurrent_calls_keep_every_prompt_with_its_own_completions(made, model):
    stubs = [StubServer(model) for _ in range(2)]
    made += stubs
    engine = connect(made, *stubs)
    engine.load_weights(Weights(model), 1)
    found = {}

    def ask(k):
        mixed = [
            Request([3 + (k + i) % 30, 5], 1 + i % 3, None if i % 2 else Sampling(4, seed=k * 100 + i))
            for i in range(9)
        ]
        found[k] = [(r.prompt_ids, len(r.token_ids)) for r in engine.generate(mixed, Sampling(6, seed=k))]
        expected = [(q.prompt_ids, 4 if q.sampling else 6) for q in mixed for _ in range(q.n)]
        assert found[k] == expected

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
