"""`posttrain serve` in processes of its own: the engine contract over HTTP, training over it, one that is killed, one that joins."""

import contextlib
import threading

import pytest
import torch

from posttrain.checks.server import check_parity, probe_sequences
from posttrain.errors import ServerBusy
from posttrain.extensions.server import pool as fleet
from posttrain.extensions.server.checks import check_info, needs_of, probe_logprobs
from posttrain.extensions.server.engine import ServerEngine
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model, build_tokenizer
from tests.extensions.serve.test_process import process
from tests.extensions.server.test_far_rollouts import PLAIN, Seeded
from tests.methods.helpers import grpo, grpo_args, losses, weights
from tests.rollouts import test_contract as contract

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with other weights than those that are pushed, and a vocabulary that the tokenizer's ids fit in."""
    path = tmp_path_factory.mktemp("served")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), seed=9).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with process(tmp_path_factory.mktemp("log"), "--model", str(folder), "--dtype", "float32") as made:
        yield made[0]


@pytest.fixture
def engine(url, monkeypatch):
    monkeypatch.setattr(contract, "VOCAB", len(build_tokenizer()))
    made = ServerEngine(url, connection_timeout=20)
    made.model = build_model(contract.VOCAB)
    made.load_weights(Weights(made.model), 1)
    yield made
    made.close()


test_rollouts_come_request_by_request = contract.test_rollouts_come_request_by_request_with_their_prompts
test_generation_stops = contract.test_generation_stops_after_the_stop_token_and_keeps_it
test_logps_equal_a_plain_forward = contract.test_logps_equal_a_plain_forward_to_1e3
test_logps_before_truncation = contract.test_logps_are_those_before_truncation
test_a_seed_reproduces_and_another_differs = contract.test_a_seed_reproduces_and_another_differs
test_without_a_seed_two_calls_differ = contract.test_without_a_seed_two_calls_differ
test_greedy_equals_generate = contract.test_greedy_equals_generate
test_repetition_penalty_makes_repeats_rarer = contract.test_repetition_penalty_makes_repeats_rarer


def test_rollouts_carry_the_version_of_the_weights(engine):
    engine.load_weights(Weights(engine.model), version=7)
    assert engine.generate([Request([5])], Sampling(1, seed=0))[0].version == 7


def test_log_probs_of_both_sides_agree_after_a_push_and_not_before_it(engine, tmp_path):
    with torch.no_grad():
        engine.model.model.embed_tokens.weight.mul_(1.5)
    sequences = probe_sequences(contract.VOCAB, engine.capabilities.context)
    rows = [Row(ids[:1], [ids[1:]], [[1] * (len(ids) - 1)]) for ids in sequences]
    ours = [logp.tolist() for logp in sequence_logps(engine.model, rows)]
    for version, holds in ((1, False), (2, True)):
        if version == 2:
            engine.load_weights(Weights(engine.model), 2)
        (theirs,) = engine.score(sequences, [1] * len(sequences)).values()
        assert (check_parity("x", ours, theirs, dtype=engine.capabilities.dtype, version=version) is None) == holds
    (server,) = engine.fleet.live
    needs = needs_of(engine.model, grpo_args(tmp_path, temperature=0.7))
    assert list(check_info(server.url, server.info, needs)) == []
    assert list(probe_logprobs(server.client, needs)) == []


def test_a_second_trainer_is_kept_out(engine, url):
    with pytest.raises(ServerBusy, match="is used by"):
        ServerEngine(url, connection_timeout=5)


def test_grpo_over_it_equals_grpo_in_process(url, tmp_path, tiny_tokenizer):
    model = build_model(len(tiny_tokenizer))
    here = grpo(tmp_path / "a", tiny_tokenizer, model=model, engine=Seeded(model, pad_token_id=0), **PLAIN)
    here.train()
    far = {"rollout_engine": "server", "vllm_server_base_url": url} | PLAIN
    there = grpo(tmp_path / "b", tiny_tokenizer, engine="native", **far)
    there.train()
    there.engine.close()
    assert losses(there) == pytest.approx(losses(here), abs=1e-5)
    torch.testing.assert_close(weights(there), weights(here), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_of_three_servers_one_is_killed_and_one_joins_and_no_completion_is_lost_or_mixed_up(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet, "REFRESH_SECONDS", 0.0)
    model = build_model(len(build_tokenizer()))
    requests = [Request([5 + i % 50, 6 + i % 7], 4) for i in range(60)]
    local = Seeded(model, pad_token_id=0).generate(requests, Sampling(64, seed=3))
    truth = [(r.prompt_ids, r.token_ids) for r in local]
    with contextlib.ExitStack() as stack:

        def start(name):
            (tmp_path / name).mkdir()
            return stack.enter_context(process(tmp_path / name, "--model", str(folder), "--dtype", "float32"))

        servers = [start(f"s{i}") for i in range(3)]
        urls = [made[0] for made in servers]
        engine = ServerEngine(lambda: urls, connection_timeout=20)
        engine.load_weights(Weights(model), 1)
        killer = threading.Timer(0.2, servers[1][1].kill)
        killer.start()
        found = engine.generate(requests, Sampling(64, seed=3))
        assert [(r.prompt_ids, r.token_ids) for r in found] == truth
        killer.join()
        servers[1][1].wait()
        urls[1] = start("s3")[0]
        assert engine.needs_weights()
        engine.load_weights(Weights(model), 1)
        found = engine.generate(requests, Sampling(64, seed=3))
        assert [(r.prompt_ids, r.token_ids) for r in found] == truth
        assert engine.fleet.servers[urls[1]].selected > 0
        engine.close()
