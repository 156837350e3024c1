"""`posttrain serve --engine vllm` with a real vLLM and a real model: every endpoint, weights, and checks (a) and (h)."""

import base64
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
import torch

from posttrain.checks.server import check_info, check_parity, needs_of, probe_logprobs, probe_sequences
from posttrain.errors import BadRequest, WeightSyncError
from posttrain.models.load import load_tokenizer
from posttrain.rollouts.server.engine import ServerEngine, VLLMClient
from posttrain.rollouts.server.replies import SAFETENSORS
from posttrain.rollouts.workers.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.algorithms.helpers import grpo_args
from tests.rollouts import real_vllm as real

pytestmark = real.needed

PROMPTS = [[504, 3575, 282, 4649, 314], [1780, 314, 253], [504, 1345]]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with real.posttrain_serve(tmp_path_factory.mktemp("served")) as made:
        yield made


@pytest.fixture(scope="module")
def model():
    return real.load()


@pytest.fixture
def engine(url, model):
    made = ServerEngine(url, connection_timeout=30, holder="test")
    made.load_weights(Weights(model, checkpoint_names=made.capabilities.checkpoint_names), 1)
    yield made
    made.close()


@pytest.fixture
def client(url):
    made = VLLMClient(url, connection_timeout=30)
    yield made
    made.close()


def test_it_says_what_it_serves_and_is_healthy_to_the_first_token(url, client):
    info = client.info()
    assert info["engine"] == "vllm" and info["architectures"] == ["LlamaForCausalLM"]
    assert (info["hidden_size"], info["num_hidden_layers"], info["num_key_value_heads"]) == (576, 30, 3)
    assert (info["vocab_size"], info["max_model_len"], info["dtype"]) == (49152, real.CONTEXT, "torch.float32")
    assert info["logprobs_mode"] == "processed_logprobs"
    assert client.health() == client.health(deep=True) == {"status": "ok"}
    assert client.get_world_size() == 1
    assert 'path="/health/"' in requests.get(url + "/metrics", timeout=10).text


def test_log_probs_are_those_of_transformers(engine, model):
    real.assert_logps_are_transformers(engine, model, PROMPTS)


def test_a_seed_reproduces_whatever_runs_beside_it_and_another_differs(engine):
    ask = [Request(PROMPTS[0], 4)]
    alone = [r.token_ids for r in engine.generate(ask, Sampling(12, seed=3))]
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(engine.generate, [Request(PROMPTS[1], 6)], Sampling(40, seed=s)) for s in range(3)]
        again = [r.token_ids for r in engine.generate(ask, Sampling(12, seed=3))]
        assert all(len(b.result()) == 6 for b in beside)
    assert again == alone and len(set(map(tuple, alone))) == 4
    assert [r.token_ids for r in engine.generate(ask, Sampling(12, seed=4))] != alone


def test_greedy_text_stops_at_a_string_and_at_a_token(client, model):
    tokenizer = load_tokenizer(str(real.SMOL))
    prompt = "The capital of France is"
    ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    reply = client.generate([prompt], max_tokens=12, temperature=0.0, generation_kwargs={"ignore_eos": True})
    assert reply["prompt_ids"] == [ids] and reply["completion_ids"] == [wanted]
    stopped = client.generate(
        [prompt], max_tokens=12, temperature=0.0, generation_kwargs={"stop_token_ids": [wanted[3]]}
    )
    assert stopped["completion_ids"][0] == wanted[: wanted.index(wanted[3]) + 1]
    assert stopped["finish_reasons"] == [["stop"]]
    text = tokenizer.decode(wanted[2])
    stopped = client.generate([prompt], max_tokens=12, temperature=0.0, generation_kwargs={"stop": [text]})
    assert stopped["completion_ids"][0] == wanted[:3]


def test_the_most_likely_tokens_come_by_rank_with_the_sampled_one_among_them(client):
    reply = client.generate(PROMPTS, max_tokens=8, n=2, logprobs=5, seed=0)
    for ids, tops, logps in zip(reply["completion_ids"], reply["logprob_token_ids"], reply["logprobs"], strict=True):
        for token, at, values in zip(ids, tops, logps, strict=True):
            assert token in at and values == sorted(values, reverse=True) and len(at) in (5, 6)


def test_a_conversation_is_rendered_by_the_template(client):
    reply = client.chat([[{"role": "user", "content": "Say yes."}]], max_tokens=4, temperature=0.0)
    text = load_tokenizer(str(real.SMOL)).decode(reply["prompt_ids"][0])
    assert text.endswith("<|im_start|>assistant\n") and "Say yes." in text
    assert 1 <= len(reply["completion_ids"][0]) <= 4


def test_scores_equal_transformers_in_both_forms(url, client, model, engine):
    sequences = probe_sequences(49152, 48)
    wanted = [real.truth(model, [_rollout(s)])[0] for s in sequences]
    found = client.get_sequence_logprobs(sequences, [1] * 4, top_logprobs=3)
    assert real.worst([[at[0] for at in line] for line in found["actual_logprobs"]], wanted) < 1e-3
    body = {"sequences": sequences, "prompt_lengths": [1] * 4, "top_logprobs": 3, "response_format": "binary"}
    raw = requests.post(url + "/get_sequence_logprobs/", json=body, timeout=120).json()
    actual = np.frombuffer(base64.b64decode(raw["actual_logprobs_b64"]), "<f4").reshape(4, 47)
    assert np.abs(actual - np.array(wanted)).max() < 1e-3
    assert raw["shape"] == [4, 47, 3]
    with pytest.raises(BadRequest, match="temperature"):  # vLLM scores at temperature 1 alone, and says so.
        client.get_sequence_logprobs(sequences, [1] * 4, top_logprobs=3, temperature=0.5)


def _rollout(ids):
    from posttrain.types import Rollout

    return Rollout(ids[:1], ids[1:], [], "length")


def test_what_cannot_be_served_is_a_400_and_ends_nothing(client):
    for wrong in ({"prompts": [[1] * 600]}, {"prompts": [[60000]]}, {"prompts": [[]]}):
        with pytest.raises(BadRequest, match="prompt 0"):
            client.generate(**wrong)
    with pytest.raises(BadRequest, match="no_repeat_ngram"):
        client.generate([[1]], generation_kwargs={"no_repeat_ngram": 2})
    with pytest.raises(BadRequest):
        client.generate([[1]], structured_outputs_regex="([a-z")
    client.reset_prefix_cache()
    assert client.health(deep=True) == {"status": "ok"}


def test_a_pattern_is_followed(client):
    reply = client.generate(["A number:"], max_tokens=6, structured_outputs_regex=r" [0-9]{3}", seed=0)
    text = load_tokenizer(str(real.SMOL)).decode(reply["completion_ids"][0], skip_special_tokens=True)
    assert len(text) == 4 and text.strip().isdigit()


def _gap(engine, policy, version):
    sequences = probe_sequences(49152, 64)
    (theirs,) = engine.score(sequences, [1] * 4).values()
    ours = real.truth(policy, [_rollout(s) for s in sequences])
    return check_parity("vllm", ours, theirs, dtype=engine.capabilities.dtype, version=version), real.worst(
        ours, theirs
    )


def test_weights_of_another_step_are_noticed_and_a_push_through_shared_memory_cures_it(engine, model):
    assert _gap(engine, model, 1)[0] is None
    later = real.moved(real.load())
    found, gap = _gap(engine, later, 1)
    assert found.code == "PT-S004" and gap > 0.5
    began = time.perf_counter()
    engine.load_weights(Weights(later, checkpoint_names=True), 2)
    print(f"push of 135M parameters: {time.perf_counter() - began:.2f} s")
    found, gap = _gap(engine, later, 2)
    assert found is None and gap < 1e-3
    rollouts = engine.generate([Request(PROMPTS[0], 4)], Sampling(16, seed=0))
    assert {r.version for r in rollouts} == {2}
    assert real.worst([r.logp for r in rollouts], real.truth(later, rollouts)) < 1e-3


def test_broken_bytes_are_refused_and_only_a_whole_push_leads_back(url, engine, model, client):
    version = client.info()["weight_version"] + 1
    client.lease_id = next(iter(engine.fleet.servers.values())).client.lease_id
    client.call("POST", "/begin_update/", {"version": version})
    headers = {"Content-Type": SAFETENSORS, "X-Version": str(version), "X-Checksum": "0" * 32}
    with pytest.raises(WeightSyncError, match="checksum"):
        client.call("POST", "/update_bucket/", b"\x00" * 64, headers=headers)
    client.call("POST", "/abort_update/", {"version": version})
    with pytest.raises(WeightSyncError, match="not whole"):
        client.generate([[1]])
    engine.load_weights(Weights(model, checkpoint_names=True), 5)
    assert _gap(engine, model, 5)[0] is None


def test_names_and_shapes_of_another_model_are_refused_and_the_next_push_cures_it(engine, model):
    for wrong in ([("model.layers.0.nonsense.weight", torch.ones(2))], [("model.norm.weight", torch.ones(7))]):
        with pytest.raises(WeightSyncError):
            engine.load_weights([*wrong, *Weights(model)], 6)
        engine.load_weights(Weights(model, checkpoint_names=True), 7)
        assert _gap(engine, model, 7)[0] is None


def test_a_pause_holds_what_runs_and_it_goes_on_under_the_new_weights(engine, model, client):
    client.lease_id = next(iter(engine.fleet.servers.values())).client.lease_id
    later = real.moved(real.load())
    with ThreadPoolExecutor(1) as pool:
        ask = {"n": 2, "max_tokens": 200, "seed": 1, "generation_kwargs": {"ignore_eos": True}}
        running = pool.submit(client.generate, [PROMPTS[0]], **ask)
        while client.info()["running"] == 0:
            time.sleep(0.05)
        time.sleep(1.0)
        client.pause("keep")
        engine.load_weights(Weights(later, checkpoint_names=True), 8)
        assert not running.done()
        client.resume()
        reply = running.result()
    for ids, spans, logps in zip(
        reply["completion_ids"],
        reply["version_spans"],
        reply["raw_logprobs"] if "raw_logprobs" in reply else reply["logprobs"],
        strict=True,
    ):
        assert sum(count for _, count in spans) == len(ids) == len(logps) == 200
        assert len(spans) == 2 and spans[0][0] < spans[1][0]
        (_, first), (_, second) = spans
        flat = [x[0] for x in logps]
        for policy, part in ((model, slice(0, first)), (later, slice(first, first + second))):
            wanted = real.truth(policy, [_answer(PROMPTS[0], ids)])[0]
            assert real.worst([flat[part]], [wanted[part]]) < 2e-3


def _answer(prompt, ids):
    from posttrain.types import Rollout

    return Rollout(prompt, ids, [], "length")


def test_a_pause_that_aborts_gives_what_is_written(engine, client):
    client.lease_id = next(iter(engine.fleet.servers.values())).client.lease_id
    with ThreadPoolExecutor(1) as pool:
        ask = {"n": 2, "max_tokens": 400, "generation_kwargs": {"ignore_eos": True}}
        running = pool.submit(client.generate, [PROMPTS[0]], **ask)
        while client.info()["running"] == 0:
            time.sleep(0.05)
        time.sleep(1.0)
        client.pause("abort")
        reply = running.result()
        client.resume()
    assert reply["finish_reasons"] == [["abort", "abort"]]
    assert all(0 < len(ids) < 400 for ids in reply["completion_ids"])
    assert client.health(deep=True) == {"status": "ok"}


def test_a_build_without_sleep_says_so(client, engine):
    client.lease_id = next(iter(engine.fleet.servers.values())).client.lease_id
    with pytest.raises(Exception, match="does not sleep"):
        client.sleep(1)
    assert client.generate([[1]])["completion_ids"]


def test_checks_a_and_h_have_nothing_to_say_of_it(engine, model, tmp_path):
    (server,) = engine.fleet.live
    needs = needs_of(model, grpo_args(tmp_path, temperature=0.7, max_completion_length=64))
    assert list(check_info(server.url, server.info, needs)) == []
    assert list(probe_logprobs(server.client, needs)) == []


def test_checks_a_and_h_find_another_model_and_a_context_that_is_too_short(engine, tmp_path):
    from tests.conftest import build_model

    (server,) = engine.fleet.live
    other = needs_of(build_model(49152), grpo_args(tmp_path, max_completion_length=64))
    (found,) = check_info(server.url, server.info, other)
    assert found.code == "PT-S001" and "hidden_size=576" in found.what and "hidden_size=32" in found.what
    larger = needs_of(build_model(50000), grpo_args(tmp_path))
    assert "PT-S002" in [f.code for f in check_info(server.url, server.info, larger)]
    long = needs_of(real.load(), grpo_args(tmp_path, max_completion_length=real.CONTEXT))
    (found,) = check_info(server.url, server.info, long)
    assert found.code == "PT-S010" and f"max_model_len={real.CONTEXT}" in found.what


def test_a_model_over_two_shards_takes_weights_too(tmp_path):
    """Workers that are processes of their own get them through shared memory."""
    from tests.conftest import build_model, build_tokenizer
    from tests.rollouts.test_vllm import SHAPE

    tokenizer = build_tokenizer()
    build_model(len(tokenizer), seed=9, **SHAPE).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = ("--tensor_parallel_size", "2", "--max_model_len", "512", "--max_num_seqs", "8")
    policy = build_model(len(tokenizer), **SHAPE)
    with real.posttrain_serve(
        tmp_path, *options, model=tmp_path / "model", VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_CPU_KVCACHE_SPACE="1"
    ) as url:
        engine = ServerEngine(url, connection_timeout=30)
        for version in (1, 2):
            real.moved(policy, 0.3)
            engine.load_weights(Weights(policy, checkpoint_names=True), version)
            rollouts = engine.generate([Request([5, 6, 7], 4)], Sampling(12, seed=0))
            assert real.worst([r.logp for r in rollouts], real.truth(policy, rollouts)) < 1e-3
        engine.close()
