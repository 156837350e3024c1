"""The thin host over HTTP: vLLM's endpoints, every refusal with its reason, no sample from weights that are not whole."""

import concurrent.futures
import socket
import time

import pytest
import torch
from safetensors.torch import save, save_file

from posttrain.errors import ConfigError
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.server.replies import API_KEY_VARIABLE
from posttrain.rollouts.server.weight_sync import SAFETENSORS, SHARED_FOLDER, SharedFolder, checksum
from posttrain.serve.server import ServeConfig, open_socket
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.serve.support import VOCAB, native, serving


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def fresh():
    with serving(drain_timeout=2.0) as running:
        yield running


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def tensors(seed=1):
    return {name: p.detach().clone() for name, p in build_model(VOCAB, seed=seed).named_parameters()}


def send(server, pairs, digest=None):
    data = pairs if isinstance(pairs, bytes) else save(pairs)
    headers = {"Content-Type": SAFETENSORS, "X-Checksum": digest or checksum(data)}
    return server.session.post(server.url + "/update_weights", data=data, headers=headers, timeout=20)


def complete(server, partial=False):
    return server.post("/update_weights", {"update_info": {"complete": True, "partial": partial}})


def push(server, version, seed=1):
    assert server.post("/start_weight_update").status_code == 200
    assert send(server, tensors(seed)).status_code == 200
    assert complete(server).status_code == 200
    assert server.post("/finish_weight_update", {"weight_version": version}).status_code == 200


def test_completions_come_prompt_by_prompt_as_the_engine_says_them_in_process(server):
    prompts, sampling = [[1, 2], [3], [4, 5, 6]], Sampling(3, seed=5)
    reply = server.complete(prompts, n=2, max_tokens=3, seed=5, return_token_ids=True).json()
    wanted = NativeEngine(build_model(VOCAB), pad_token_id=0).generate(
        [Request(p, 2, sampling) for p in prompts], sampling
    )
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice, rollout in zip(reply["choices"], wanted, strict=True):
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (rollout.prompt_ids, rollout.token_ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(rollout.logp, abs=1e-4)
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]


def test_log_probs_of_truncated_sampling_are_of_the_survivors_and_those_before_it_come_beside_them(server):
    choice = server.complete([1, 2], max_tokens=4, seed=1, logprobs=5, top_k=2).json()["choices"][0]["logprobs"]
    for own, raw, at in zip(choice["token_logprobs"], choice["raw_logprobs"], choice["top_logprobs"], strict=True):
        assert own > raw and len(at) == 2
        assert sum(2.718281828**value for value in at.values()) == pytest.approx(1.0, abs=1e-3)
    assert server.complete([1, 2], max_tokens=1).json()["choices"][0]["logprobs"]["raw_logprobs"] is None


@pytest.mark.parametrize(
    "body, words",
    [
        ({"prompt": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [[1], [5000]]}, "prompt 1 holds token id 5000"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [2] * 64], "max_tokens": 1}, "prompt 1 of 64 tokens and max_tokens=1 do not fit"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temperature": 1e-40}, "temperature"),
        ({"prompt": [1], "repetition_penalty": 1e39}, "repetition_penalty"),
        ({"prompt": [1], "logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"prompt": [1], "n": 0}, "n: "),
        ({"prompt": [1], "tempreature": 1}, "tempreature"),
        ({"prompt": [1], "stop_token_ids": [9999]}, "9999"),
        ({"prompt": [1], "structured_outputs": {"regx": "a"}}, "regex"),
        ({"prompt": [1], "stream": True}, "stream"),
        ({"prompt": "text"}, "no tokenizer"),
    ],
)  # fmt: skip
def test_trap_s48_input_that_cannot_be_served_is_a_400_that_says_why(server, body, words):
    assert words in error(server.post("/v1/completions", body), 400)
    assert server.get("/health").status_code == 200


def test_prompt_logprobs_score_and_generate_nothing(server):
    choice = server.complete([5, 6, 7], max_tokens=1, prompt_logprobs=2).json()["choices"][0]
    logps = build_model(VOCAB)(torch.tensor([[5, 6]])).logits[0].detach().log_softmax(-1)
    first, *rest = choice["prompt_logprobs"]
    assert first is None and choice["token_ids"] == []
    for at, token, line in zip(rest, [6, 7], logps, strict=True):
        assert at[str(token)]["logprob"] == pytest.approx(float(line[token]), abs=1e-5)
        assert {str(i) for i in line.topk(2).indices.tolist()} <= set(at)


def test_conversations_are_rendered_by_the_template(tiny_tokenizer):
    with serving(lambda: native(), tokenizer=tiny_tokenizer, context=None) as server:
        messages = [{"role": "user", "content": "sum"}]
        wanted = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == list(wanted)
        assert server.post("/tokenize", {"prompt": "sum of"}).json()["tokens"] == tiny_tokenizer("sum of")["input_ids"]


def test_what_the_server_is_and_its_counters(server):
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 64)
    (facts,) = server.post("/collective_rpc", {"method": "posttrain_facts"}).json()["results"]
    assert facts["architectures"] == ["LlamaForCausalLM"] and facts["vocab_size"] == VOCAB
    assert server.post("/collective_rpc", {"method": "reset"}).status_code == 400
    text = server.get("/metrics").text
    assert "posttrain_completions_total" in text and 'path="/v1/completions",status="200"' in text


def test_a_whole_update_is_confirmed_by_its_version_and_every_reply_says_it(fresh):
    push(fresh, "3")
    assert fresh.get("/weight_info").json() == {"weight_version": "3"}
    choice = fresh.complete([5, 6, 7], max_tokens=6, seed=2).json()["choices"][0]
    wanted = NativeEngine(build_model(VOCAB, seed=1), pad_token_id=0).generate(
        [Request([5, 6, 7])], Sampling(6, seed=2)
    )
    assert choice["token_ids"] == wanted[0].token_ids
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 6}]


@pytest.mark.parametrize(
    "break_it, words",
    [
        (lambda s: send(s, tensors(), digest="0" * 32), "checksum"),
        (lambda s: send(s, b"not a file of tensors"), ""),
        (lambda s: send(s, {"model.norm.weight": torch.ones(3)}), r"(3,)"),
        (lambda s: complete(s), "old values"),
        (lambda s: send(s, tensors() | {"c": torch.ones(1)}) and complete(s), "does not know"),
    ],
)
def test_trap_s6_a_failed_update_is_never_sampled_from_until_a_whole_one_came(fresh, break_it, words):
    fresh.post("/start_weight_update")
    assert words in error(break_it(fresh), 409)
    assert fresh.get("/weight_info").json() == {"weight_version": "incomplete"}
    assert "not whole" in error(fresh.complete([1]), 409)
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409
    assert fresh.get("/health").status_code == 200
    push(fresh, "1")
    assert fresh.complete([1]).json()["choices"][0]["weight_versions"][0]["version"] == "1"


def test_buckets_out_of_order_are_conflicts_and_an_update_can_begin_anew(fresh):
    assert send(fresh, tensors()).status_code == 409
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409
    fresh.post("/start_weight_update")
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409  # Not all came.
    push(fresh, "1")


@pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="no shared memory here")
def test_a_bucket_in_shared_memory_is_mapped_by_its_path_and_no_other_file_is(fresh):
    folder = SharedFolder()
    path = folder.path / "bucket-0.safetensors"
    save_file(tensors(), path)
    part = {"path": str(path), "checksum": checksum(path.read_bytes())}
    try:
        fresh.post("/start_weight_update")
        forwarded = fresh.post("/update_weights", {"update_info": part}, headers={"X-Forwarded-For": "10.0.0.9"})
        assert forwarded.status_code == 403
        assert fresh.post("/update_weights", {"update_info": part}).status_code == 200
        assert complete(fresh).status_code == 200
        wrong_ones = ("/etc/passwd", "/dev/shm/../etc/posttrain-x/a.safetensors", "/dev/shm/other/a.safetensors")
        for wrong in wrong_ones:
            fresh.post("/start_weight_update")
            assert "the only files" in error(
                fresh.post("/update_weights", {"update_info": part | {"path": wrong}}), 409
            )
    finally:
        folder.close()


def held(server, pool, **body):
    """A long request that is being written."""
    answer = pool.submit(server.complete, [5, 6], **({"max_tokens": 60, "seed": 1} | body))
    deadline = time.monotonic() + 30
    while not server.host.served.running and not answer.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_completions_that_are_kept_go_on_under_new_weights_and_say_which_wrote_what(fresh):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = held(fresh, pool)
        assert fresh.post("/pause?mode=keep").status_code == 200
        assert fresh.get("/is_paused").json() == {"is_paused": True}
        push(fresh, "1")
        time.sleep(0.05)
        assert not answer.done()
        fresh.post("/resume")
        first, second = answer.result().json()["choices"][0]["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == ("default", "1", 60)
    assert first["end"] == second["start"] > 0


@pytest.mark.parametrize("mode, reason", [("abort", "abort"), ("wait", "length")])
def test_pauses_end_what_runs_or_wait_for_it_and_hold_what_comes(fresh, mode, reason):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = held(fresh, pool)
        assert fresh.post(f"/pause?mode={mode}").status_code == 200
        assert answer.result().json()["choices"][0]["finish_reason"] == reason
        late = pool.submit(fresh.complete, [1])
        time.sleep(0.1)
        assert not late.done()
        fresh.post("/resume")
        assert late.result().status_code == 200
    assert fresh.post("/pause?mode=nap").status_code == 400


def test_completions_that_are_held_end_where_an_update_fails(fresh):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = held(fresh, pool)
        fresh.post("/pause?mode=keep")
        late = pool.submit(fresh.complete, [1])
        time.sleep(0.1)
        fresh.post("/start_weight_update")
        fresh.post("/finish_weight_update", {})
        assert "not whole" in error(answer.result(), 409) and "not whole" in error(late.result(), 409)


def test_a_client_that_goes_away_takes_its_request_with_it(fresh):
    import http.client
    import json

    connection = http.client.HTTPConnection(fresh.url.removeprefix("http://"), timeout=10)
    body = json.dumps({"prompt": [5], "max_tokens": 60, "n": 64})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 10
    while not fresh.host.served.jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    connection.close()
    while fresh.host.served.jobs:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert fresh.complete([1]).status_code == 200


def test_trap_s11_an_engine_that_fails_answers_500_and_serves_the_next_request(fresh):
    norm = fresh.host.served.model.model.norm.weight
    good = norm.detach().clone()
    norm.data.fill_(float("nan"))
    assert "NaN" in error(fresh.complete([1]), 500)
    norm.data.copy_(good)
    assert fresh.complete([1]).status_code == 200


def test_trap_s52_the_token_is_asked_for_everywhere_but_in_health_and_off_loopback_there_must_be_one(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        ServeConfig("m", host="0.0.0.0")
    assert ServeConfig("m", host="0.0.0.0", api_key="x").host == "0.0.0.0"
    with serving(api_key="open sesame") as server:
        assert server.get("/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/nothing", "/weight_info"):
            assert server.get(path).status_code == 401
        assert server.post("/start_weight_update").status_code == 401
        assert server.complete([1]).status_code == 401
        wrong = {"Authorization": "Bearer open sesam"}
        assert server.get("/v1/models", headers=wrong).status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "Bearer open sesame"}).status_code == 200


@pytest.mark.parametrize("options", [{"engine": "vllm"}, {"port": 99999}, {"max_num_seqs": 0}, {"drain_timeout": 0.0}])
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServeConfig("m", **options)


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=str(taken.getsockname()[1])):
            open_socket("127.0.0.1", taken.getsockname()[1])
