"""Servers that are given weights by one process and asked by another: every token has its version, and nobody else's weights count."""

import threading
import time

import pytest
import torch

from posttrain.errors import ServerUnreachable, WeightSyncError
from posttrain.extensions.server import client as connection
from posttrain.extensions.server import engine as server
from posttrain.extensions.server import pool as fleet
from posttrain.extensions.server.engine import FollowingEngine, ServerEngine, ServerTransfer, ServerVersions
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.extensions.server.stub_server import StubServer

VOCAB = 37
REQUESTS = [Request([5, 6, 7, 8], 2), Request([9, 10], 2)]
SAMPLING = Sampling(6, seed=3)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "BACK_OFF", 0.01)
    monkeypatch.setattr(fleet, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.05)


def stub_of(made, version="default", **options):
    made.append(StubServer(build_model(VOCAB, seed=9), **options))
    made[-1].version = version
    return made[-1]


def following(made, *holders, **options):
    made.append(FollowingEngine(**({"request_timeout": 20} | options)))
    for one in holders:
        made[-1].set_servers(one)
    return made[-1]


def transfer_to(made, *stubs, **options):
    urls = [s.url for s in stubs]
    found = ServerTransfer(lambda: ServerEngine(urls, connection_timeout=5, request_timeout=20), **options)
    found.init_weight_transfer()
    found.close = found.destroy
    made.append(found)
    return found


def push(transfer, model):
    transfer.pause()
    try:
        transfer.send_weights(Weights(model))
    finally:
        transfer.resume()


def paths(stub, *wanted):
    return [path for _, path in stub.calls if path in wanted]


# Workers


def of(version, *stubs):
    return ServerVersions("run", version, tuple(stub.url for stub in stubs))


def test_a_version_whose_news_is_on_its_way_will_do(made):
    stub = stub_of(made, version="run-2")
    engine = following(made, of(1, stub))
    assert [(r.version, r.spans) for r in engine.generate(REQUESTS, SAMPLING)] == [(2, None)] * 4


def test_trap_s6_weights_that_this_run_never_gave_write_nothing_for_it(made):
    stub, other = stub_of(made, version="run-3"), stub_of(made, version="run-3")
    engine = following(made, of(3, stub, other))
    assert len(engine.generate(REQUESTS, SAMPLING)) == 4
    stub.version = "default"  # It was restarted.
    for _ in range(2):
        assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {3}
    assert engine.fleet.servers[stub.url].holds == ""
    other.version = "another-3"
    with pytest.raises(
        WeightSyncError, match="sampled from weights of version another-3, but version run-3 was pushed"
    ):
        engine.generate(REQUESTS[:1], SAMPLING)


def test_the_base_model_below_an_adapter_that_is_on_its_way_writes_nothing(made):
    stub, other = stub_of(made, version="run-base"), stub_of(made, version="run-1")
    engine = following(made, of(1, stub, other))
    for _ in range(2):
        assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {1}
    other.version = "run-base"
    with pytest.raises(WeightSyncError, match="sampled from weights of version run-base, but version run-1 was pushed"):
        engine.generate(REQUESTS[:1], SAMPLING)


def test_while_nobody_holds_the_weights_a_worker_waits_for_news(made):
    stub, newcomer = stub_of(made), stub_of(made, version="run-1")
    engine = following(made, of(1, stub), patience=20.0)
    news = threading.Timer(0.3, engine.set_servers, [of(1, newcomer)])
    news.start()
    assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {1}
    assert list(engine.fleet.servers) == [newcomer.url]
    news.join()


def test_many_threads_ask_while_servers_come_and_go(made):
    stubs = [stub_of(made, version="run-1") for _ in range(3)]
    engine = following(made, of(1, stubs[0]), patience=20.0)
    failures = []

    def ask():
        for _ in range(2):
            try:
                assert {r.version for r in engine.generate(REQUESTS, SAMPLING)} == {1}
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for chosen in ([0, 1], [1, 2], [2], [0, 1, 2]):
        engine.set_servers(of(1, *(stubs[i] for i in chosen)))
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_server_that_is_taken_off_the_list_answers_what_it_was_asked(made):
    stub, other = stub_of(made, version="run-1"), stub_of(made, version="run-1")
    engine = following(made, of(1, stub))
    stub.lies["slow"] = 1.0
    leaving = engine.fleet.servers[stub.url]
    found = []
    asking = threading.Thread(target=lambda: found.extend(engine.generate(REQUESTS, SAMPLING)))
    began = time.monotonic()
    asking.start()
    while not leaving.outstanding:
        time.sleep(0.01)
    engine.set_servers(of(1, other))
    assert len(engine.generate(REQUESTS, SAMPLING)) == 4
    closed = leaving.client.session.is_closed
    asking.join()
    assert len(found) == 4 and time.monotonic() - began < 10
    assert not closed and leaving.client.session.is_closed


def test_a_worker_pushes_no_weights(made):
    with pytest.raises(WeightSyncError, match="the trainer does"):
        following(made).load_weights([], 1)


# The trainer


def test_each_server_is_paused_around_its_update(made):
    stub, other = stub_of(made), stub_of(made)
    transfer, model = transfer_to(made, stub, other), build_model(VOCAB)
    for one in (stub, other):
        one.calls.clear()
    push(transfer, model)
    sent = ("pause", "start_weight_update", "finish_weight_update", "resume")
    assert paths(stub, *sent) == paths(other, *sent) == list(sent)
    assert transfer.holders == ServerVersions(transfer.engine.run, 1, (stub.url, other.url))
    assert torch.equal(stub.model.model.norm.weight, model.model.norm.weight)


def test_a_server_that_is_gone_is_left_out_until_it_is_back_and_has_the_weights(made):
    stub, other = stub_of(made), stub_of(made)
    transfer, model = transfer_to(made, stub, other), build_model(VOCAB)
    stub.die()
    push(transfer, model)
    assert transfer.holders.urls == (other.url,)
    assert stub.url in transfer.failure_reason() and other.url not in transfer.failure_reason()
    assert not transfer.missing_weights()
    stub_of(made, port=stub.http.server_port)
    assert transfer.missing_weights()
    push(transfer, model)
    assert sorted(transfer.holders.urls) == sorted([stub.url, other.url])
    assert transfer.failure_reason() == ""


def test_a_push_that_fails_leaves_no_server_paused_and_the_version_as_it_was(made):
    stub = stub_of(made)
    transfer = transfer_to(made, stub)
    stub.lies["fail"] = "complete"
    with pytest.raises(WeightSyncError):
        push(transfer, build_model(VOCAB))
    assert (stub.paused, transfer.version, transfer.holders.urls) == (False, 0, ())


def test_servers_that_lost_their_weights_get_the_same_version_again_and_nobody_else_is_sent_anything(made):
    stub, other = stub_of(made), stub_of(made)
    transfer, model = transfer_to(made, stub, other), build_model(VOCAB)
    push(transfer, model)
    assert not transfer.missing_weights()
    stub.version = "default"
    assert transfer.missing_weights()
    transfer.send_again(Weights(model))
    assert transfer.holders.urls == (stub.url, other.url)
    assert not transfer.missing_weights()
    assert (len(paths(stub, "start_weight_update")), len(paths(other, "start_weight_update"))) == (2, 1)


def test_a_server_that_is_too_busy_to_answer_is_not_left_out(made):
    stub = stub_of(made)
    transfer, model = transfer_to(made, stub), build_model(VOCAB)
    (served,) = transfer.engine.fleet.live
    info, failures = served.client.info, [ServerUnreachable("busy", timed_out=True)] * 2

    def busy():
        if failures:
            raise failures.pop()
        return info()

    served.client.info = busy
    push(transfer, model)
    assert len(failures) == 1 and transfer.holders.urls == (stub.url,)
    assert not transfer.missing_weights() and failures == []
    assert transfer.failure_reason() == ""


def test_workers_are_told_of_a_server_that_was_gone_for_a_moment_and_kept_its_weights(made):
    stub, other = stub_of(made), stub_of(made)
    transfer, model = transfer_to(made, stub, other), build_model(VOCAB)
    engine = transfer.engine
    load, (served, _) = engine.load_weights, engine.fleet.live

    def load_and_lose(tensors, version):
        load(tensors, version)
        engine.fleet.failed(served, ServerUnreachable("gone"))

    engine.load_weights = load_and_lose
    push(transfer, model)
    engine.load_weights = load
    assert transfer.holders.urls == (other.url,)
    assert transfer.missing_weights()
    transfer.send_again(Weights(model))
    assert transfer.holders.urls == (stub.url, other.url) and not transfer.missing_weights()
    assert [len(paths(one, "start_weight_update")) for one in (stub, other)] == [1, 1]
