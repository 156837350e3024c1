"""The thin host over HTTP: vLLM's endpoints, every refusal with its reason, no sample from weights that are not whole."""

import asyncio
import concurrent.futures
import gc
import math
import time

import httpx2
import pytest
import torch
from requests.exceptions import ReadTimeout
from safetensors.torch import save

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.errors import ConfigError
from posttrain.extensions.images.encoder import install_pictures
from posttrain.extensions.images.picture import read_picture
from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.serve.engine import Job, ServedEngine
from posttrain.extensions.serve.host import create_app, make_host
from posttrain.extensions.server.engine import ServerEngine
from posttrain.extensions.server.replies import API_KEY_VARIABLE, pictures_body
from posttrain.loop.rollout import sample
from posttrain.losses.truncation import truncate
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.shared_memory import SharedFolder, checksum
from posttrain.types import Request, Sampling, Truncation
from tests.conftest import build_model, scale_logits
from tests.extensions.serve.support import VOCAB, serving
from tests.methods.test_vision_online import QUICK, prompts, short
from tests.vision_families import build, noise


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def fresh():
    with serving() as running:
        yield running


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def tensors(seed=1):
    return {name: p.detach().clone() for name, p in build_model(VOCAB, seed=seed).named_parameters()}


def send(server, pairs, digest=None, **changes):
    """One bucket, through shared memory."""
    data, folder = pairs if isinstance(pairs, bytes) else save(pairs), SharedFolder()
    path = folder.path / "bucket-0.safetensors"
    path.write_bytes(data)
    try:
        part = {"path": str(path), "checksum": digest or checksum(data)} | changes
        return server.post("/update_weights", {"update_info": part})
    finally:
        folder.close()


def complete(server):
    return server.post("/update_weights", {"update_info": {"complete": True}})


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
        assert choice["weight_version"] == "default"


def test_log_probs_are_of_the_distribution_that_was_drawn_from(server):
    plain = server.complete([1, 2], max_tokens=4, seed=1, logprobs=VOCAB).json()["choices"][0]["logprobs"]
    for at in plain["top_logprobs"]:
        assert sum(2.718281828**value for value in at.values()) == pytest.approx(1.0, abs=1e-3)
    cut = server.complete([1, 2], max_tokens=4, seed=1, top_k=1).json()["choices"][0]["logprobs"]
    assert cut["token_logprobs"] == [0.0] * 4


@pytest.mark.parametrize(
    "body, words",
    [
        ({"prompt": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [[1], [5000]]}, "request 1 contains the token id 5000"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [2] * 64], "max_tokens": 1}, "request 1: a prompt of 64 tokens and max_new_tokens=1 do not fit"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temperature": 1e-40}, "temperature"),
        ({"prompt": [1], "repetition_penalty": 1e39}, "repetition_penalty"),
        ({"prompt": [1], "logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"prompt": [1], "n": 0}, "greater than or equal to 1"),
        ({"prompt": [1], "tempreature": 1}, "tempreature"),
        ({"prompt": [1], "logit_bias": {"9999": 1.0}}, "9999"),
        ({"prompt": [1], "logprobs": 2, "logit_bias": {"5": 1.0}}, "bias"),
        ({"prompt": [1], "logprobs": 2, "min_tokens": 3, "stop_token_ids": [5]}, "min_tokens"),
        ({"prompt": [1], "logprobs": 2, "repetition_penalty": 1.5}, "penalty"),
        ({"prompt": [1], "top_k": 9999}, "top_k=9999"),
        ({"prompt": [1], "structured_outputs": {"regx": "a"}}, "regex"),
        ({"prompt": [1], "stream": True}, "stream"),
        ({"prompt": "text"}, "prompt"),
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


def test_the_likeliest_tokens_under_truncation_are_those_that_are_left_with_their_share_of_what_is_left(server):
    """As vLLM's processed log-probs: renormalised, and no token that could not be drawn."""
    cut = {"top_k": 6, "top_p": 0.6, "temperature": 0.8}
    choice = server.complete([5, 6, 7], max_tokens=1, logprobs=5, seed=3, **cut).json()["choices"][0]
    logits = build_model(VOCAB)(torch.tensor([[5, 6, 7]])).logits[0, -1:].detach() / 0.8
    left = truncate(logits, Truncation(6, 0.6)).log_softmax(-1)[0]
    kept = left.isfinite().nonzero()[:, 0].tolist()
    assert 1 < len(kept) < 6
    (tops,) = choice["logprobs"]["top_logprobs"]
    told = {int(name.removeprefix("token_id:")): value for name, value in tops.items()}
    assert told == pytest.approx({i: float(left[i]) for i in kept}, abs=1e-5)
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(float(left[choice["token_ids"][0]]), abs=1e-5)


@pytest.mark.parametrize("cut", [{}, {"top_k": 6, "top_p": 0.6}])
def test_the_likeliest_tokens_beside_forbidden_ones_are_those_that_may_be_drawn(server, cut):
    logits = build_model(VOCAB)(torch.tensor([[5, 6, 7]])).logits[0, -1:].detach()
    never = logits[0].topk(2).indices.tolist()
    bias = {str(token): -1e9 for token in never}
    choice = server.complete([5, 6, 7], max_tokens=1, logprobs=5, seed=3, logit_bias=bias, **cut).json()["choices"][0]
    logits[0, never] = -math.inf
    best = truncate(logits, Truncation(*cut.values())).log_softmax(-1)[0].topk(5)
    wanted = {i: x for i, x in zip(best.indices.tolist(), best.values.tolist(), strict=True) if math.isfinite(x)}
    told = {int(name.removeprefix("token_id:")): x for name, x in choice["logprobs"]["top_logprobs"][0].items()}
    assert {i: told[i] for i in wanted} == pytest.approx(wanted, abs=1e-5)
    assert not told.keys() - wanted.keys() - set(choice["token_ids"])


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5, "top_k": 3}])
def test_log_probs_of_greedy_sampling_are_those_of_temperature_1_as_vllm_and_the_engine_tell_them(server, cut):
    logps = server.complete([5, 6, 7], max_tokens=1, temperature=0, logprobs=3, **cut).json()["choices"][0]["logprobs"]
    best = build_model(VOCAB)(torch.tensor([[5, 6, 7]])).logits[0, -1].detach().log_softmax(-1).topk(3)
    told = {int(name.removeprefix("token_id:")): value for name, value in logps["top_logprobs"][0].items()}
    assert told == pytest.approx(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-5)
    assert logps["token_logprobs"] == pytest.approx([float(best.values[0])], abs=1e-5)


def test_what_the_server_is_and_its_counters(server):
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 64)
    (facts,) = server.post("/collective_rpc", {"method": "posttrain_facts"}).json()["results"]
    assert facts["architectures"] == ["LlamaForCausalLM"] and facts["vocab_size"] == VOCAB
    assert server.post("/collective_rpc", {"method": "reset"}).status_code == 400
    text = server.get("/metrics").text
    assert "posttrain_completions_total" in text and "posttrain_running 0.0" in text


def test_a_whole_update_is_confirmed_by_its_version_and_every_reply_says_it(fresh):
    push(fresh, "3")
    assert fresh.get("/weight_info").json() == {"weight_version": "3", "base_version": "3"}
    choice = fresh.complete([5, 6, 7], max_tokens=6, seed=2).json()["choices"][0]
    wanted = NativeEngine(build_model(VOCAB, seed=1), pad_token_id=0).generate(
        [Request([5, 6, 7])], Sampling(6, seed=2)
    )
    assert choice["token_ids"] == wanted[0].token_ids
    assert choice["weight_version"] == "3"


@pytest.mark.parametrize(
    "break_it, words",
    [
        (lambda s: send(s, tensors(), digest="0" * 32), "checksum"),
        (lambda s: send(s, b"not a file of tensors"), ""),
        (lambda s: send(s, {"model.norm.weight": torch.ones(3)}), r"(3,)"),
        (lambda s: complete(s), "not received"),
        (lambda s: send(s, tensors() | {"c": torch.ones(1)}), "has no such weight"),
        (lambda s: send(s, tensors(), path="/etc/passwd"), "Only such files"),
        (lambda s: send(s, tensors(), path="/dev/shm/../etc/posttrain-x/a.safetensors"), "Only such files"),
        (lambda s: send(s, tensors(), path="/dev/shm/other/a.safetensors"), "Only such files"),
    ],
)
def test_trap_s6_a_failed_update_is_never_sampled_from_until_a_whole_one_came(fresh, break_it, words):
    fresh.post("/start_weight_update")
    assert words in error(break_it(fresh), 409)
    assert fresh.get("/weight_info").json() == {"weight_version": "incomplete", "base_version": "incomplete"}
    assert "incomplete" in error(fresh.complete([1]), 409)
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409
    assert fresh.get("/health").status_code == 200
    push(fresh, "1")
    assert fresh.complete([1]).json()["choices"][0]["weight_version"] == "1"


def test_buckets_out_of_order_are_conflicts_and_an_update_can_begin_anew(fresh):
    assert send(fresh, tensors()).status_code == 409
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409
    fresh.post("/start_weight_update")
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 409  # Not all came.
    push(fresh, "1")


def test_the_end_of_an_update_that_nobody_began_changes_nothing(fresh):
    assert fresh.post("/finish_weight_update", {}).status_code == 409
    assert fresh.complete([1]).status_code == 200


def test_an_empty_stop_string_which_every_text_ends_with_is_refused(fresh):
    for stop in ("", ["x", ""]):
        assert "stop" in error(fresh.complete([1], stop=stop), 400)


def test_a_bucket_of_another_machine_is_refused(fresh):
    fresh.post("/start_weight_update")
    part = {"update_info": {"complete": True}}
    assert fresh.post("/update_weights", part, headers={"X-Forwarded-For": "10.0.0.9"}).status_code == 403


def held(server, pool, **body):
    """A long request that is being written."""
    answer = pool.submit(server.complete, [5, 6], **({"max_tokens": 60, "seed": 1} | body))
    deadline = time.monotonic() + 30
    while not server.host.served.running and not answer.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_nothing_is_scored_by_weights_of_which_some_are_old_and_some_are_new(fresh):
    first, *rest = tensors().items()
    fresh.post("/start_weight_update")
    for bucket in (dict([first]), dict(rest)):
        assert "still running" in error(fresh.complete([5, 6, 7], prompt_logprobs=0), 409)
        assert send(fresh, bucket).status_code == 200
    assert complete(fresh).status_code == 200
    assert "still running" in error(fresh.complete([5, 6, 7], prompt_logprobs=0), 409)
    assert fresh.post("/finish_weight_update", {"weight_version": "1"}).status_code == 200
    (choice,) = fresh.complete([5, 6, 7], prompt_logprobs=0).json()["choices"]
    logps = build_model(VOCAB, seed=1)(torch.tensor([[5, 6]])).logits[0].detach().log_softmax(-1)
    assert choice["prompt_logprobs"][2]["7"]["logprob"] == pytest.approx(float(logps[1, 7]), abs=1e-5)


def test_a_model_with_a_rule_of_its_own_for_logits_scores_by_them(tiny_tokenizer, tmp_path, monkeypatch):
    model = scale_logits(build_model(len(tiny_tokenizer)))
    tiny_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("posttrain.extensions.serve.host.create_model_from_path", lambda *_, **__: model)
    (choice,) = make_host(ServeConfig(str(tmp_path), engine="hf")).served.score([[5, 6, 7]], 1)
    logps = model(torch.tensor([[5, 6]])).logits[0].detach().log_softmax(-1)
    for at, token, line in zip(choice["prompt_logprobs"][1:], [6, 7], logps, strict=True):
        assert at[str(token)]["logprob"] == pytest.approx(float(line[token]), abs=1e-5)


def test_a_pause_waits_for_what_runs_and_holds_what_comes_until_it_ends(fresh):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = held(fresh, pool)
        assert fresh.post("/pause?mode=wait").status_code == 200
        assert answer.result(1).json()["choices"][0]["finish_reason"] == "length"
        late = pool.submit(fresh.complete, [1])
        time.sleep(0.1)
        push(fresh, "1")
        time.sleep(0.1)
        assert not late.done()
        fresh.post("/resume")
        assert late.result().json()["choices"][0]["weight_version"] == "1"
    for mode in ("keep", "abort"):
        assert fresh.post(f"/pause?mode={mode}").status_code == 400


def test_what_waits_for_a_client_that_left_is_not_written(fresh, caplog):
    """A trainer that was ended and started anew would wait for all that the first one asked for."""
    served, written = fresh.host.served, []
    generate = served.engine.generate
    served.engine.generate = lambda requests, sampling: written.extend(requests) or generate(requests, sampling)
    for end in ("/resume", "/finish_weight_update"):
        fresh.post("/pause")
        with pytest.raises(ReadTimeout):
            fresh.complete([[5, 6], [9]], max_tokens=4, timeout=0.5)
        deadline = time.monotonic() + 10
        while not all(job.rollouts.cancelled() for job in served.waiting):
            assert time.monotonic() < deadline, "the host did not notice"
            time.sleep(0.01)
        if end == "/resume":
            fresh.post(end)
            assert fresh.complete([7, 8], max_tokens=2).status_code == 200
            continue
        fresh.post("/start_weight_update")
        assert fresh.post(end).status_code == 200 and not served.waiting
    assert [list(request.prompt_ids) for request in written] == [[7, 8]]
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_the_body_of_each_request_is_read_before_its_answer(fresh):
    """RFC 9112, 9.6: a server that closes a connection with a body unread resets it, and its client may lose the answer."""
    for path, body in (("/start_weight_update", b"{}"), ("/finish_weight_update", b"{}"), ("/update_weights", b"{}")):
        told = []

        async def receive(told=told, body=body):
            told.append("read")
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message, told=told):
            told.append(message["type"])

        headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
        headers += [(b"authorization", fresh.headers["Authorization"].encode())] if path != "/update_weights" else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        asyncio.run(create_app(fresh.host)(scope, receive, send))
        assert told[0] == "read"


def test_requests_that_wait_end_where_an_update_fails(fresh):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        fresh.post("/pause")
        late = pool.submit(fresh.complete, [1])
        time.sleep(0.1)
        fresh.post("/start_weight_update")
        fresh.post("/finish_weight_update", {})
        assert "incomplete" in error(late.result(), 409)


def test_one_request_that_fails_does_not_end_those_that_wait_with_it(fresh):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        fresh.post("/pause")
        good, bad = pool.submit(fresh.complete, [1]), pool.submit(fresh.complete, [2], stop="no tokenizer reads this")
        time.sleep(0.1)
        fresh.post("/resume")
        assert (good.result().status_code, bad.result().status_code) == (200, 400)


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
            assert server.get(path, headers={}).status_code == 401
        server.headers = {}
        assert server.post("/start_weight_update").status_code == 401
        assert server.complete([1]).status_code == 401
        wrong = {"Authorization": "Bearer open sesam"}
        assert server.get("/v1/models", headers=wrong).status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "Bearer open sesame"}).status_code == 200


@pytest.mark.parametrize(
    "options", [{"engine": "vllm"}, {"port": 99999}, {"max_num_seqs": 0}, {"max_num_seqs": 8, "engine": "hf"}]
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServeConfig("m", **options)


# What a stranger sends -------------------------------------------------------------------------------------------------


def test_a_validation_error_is_short_and_nobody_waits_for_it(server):
    for body in (
        {"prompt": [-1] * 200_000},
        {"prompt": [[-1]] * 50_000},
        {"prompt": [1], "logit_bias": dict.fromkeys(map(str, range(50_000)), "x")},
        {"prompt": [1], "stop_token_ids": [-1] * 50_000},
        {"prompt": [1], "placed": [{}] * 50_000},
        {"prompt": [1]} | dict.fromkeys(map(str, range(50_000))),
    ):
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400 and len(answer.content) < 1100
        assert ".py" not in answer.text and answer.elapsed.total_seconds() < 2


def test_a_body_beyond_the_limit_is_a_413_with_and_without_its_length(server):
    body = b'{"prompt": [1' + b",1" * (5 * 2**20) + b"]}"
    kind = server.headers | {"Content-Type": "application/json"}
    pieces = (body[at : at + 2**20] for at in range(0, len(body), 2**20))
    with httpx2.Client(trust_env=False) as client:
        for content in (body, pieces):
            error(client.post(server.url + "/v1/completions", content=content, headers=kind), 413)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/unload_lora_adapter", b'{"lora_name": "\\ud800"}'),
        ("/v1/load_lora_adapter", b'{"lora_name": "a", "lora_path": "\\ud800"}'),
        ("/update_weight_version", b'{"new_version": "\\ud800"}'),
        (
            "/v1/completions",
            b'{"prompt": [1], "structured_outputs": {"json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}}",
        ),
        ("/update_weight_version", b"[" * 5000 + b"]" * 5000),
    ],
)
def test_text_that_is_no_unicode_and_endless_nesting_are_a_400(server, path, body):
    kind = server.headers | {"Content-Type": "application/json"}
    error(server.session.post(server.url + path, data=body, headers=kind), 400)


def test_a_guide_that_takes_seconds_to_compile_or_allows_nothing_is_a_400(tiny_tokenizer):
    def make():
        engine = NativeEngine(build_model(len(tiny_tokenizer)), pad_token_id=0)
        engine.tokenizer = tiny_tokenizer
        return ServedEngine(engine)

    with serving(make) as server:
        for guide, words in (({"choice": ["a" * 100_000]}, "characters"), ({"grammar": "root ::= root"}, "no token")):
            assert words in error(server.complete([1], structured_outputs=guide, ignore_eos=False), 400)


def test_errors_of_every_kind_have_one_form(server):
    assert error(server.get("/nothing"), 404) and error(server.get("/v1/completions"), 405)
    assert error(server.post("/pause?mode=abort"), 400) and error(server.get("/metrics", headers={}), 401)


@pytest.mark.parametrize("engine", [NativeEngine, HFEngine])
def test_the_call_of_a_client_that_left_ends_and_the_next_one_does_not_wait(engine):
    def make():
        return ServedEngine(engine(build_model(VOCAB, max_position_embeddings=10**5), pad_token_id=0))

    with serving(make, context=10**5) as server:
        for long in ({"max_tokens": 50_000}, {"max_tokens": 50_000, "n": 2}):
            with pytest.raises(ReadTimeout):
                server.complete([5], timeout=0.3, **long)
            begun = time.monotonic()
            assert server.complete([7], max_tokens=2).json()["choices"][0]["finish_reason"] == "length"
            assert time.monotonic() - begun < 5


def test_a_call_that_another_client_waits_for_goes_on(fresh):
    fresh.post("/pause")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        kept = pool.submit(fresh.complete, [5, 6], max_tokens=50, seed=1)
        while not fresh.host.served.waiting:
            time.sleep(0.001)
        left = Job(Request([5], 1, Sampling(50)))
        fresh.host.served.submit([left])
        fresh.post("/resume")
        while not fresh.host.served.called and not kept.done():
            time.sleep(0.001)
        assert not fresh.host.served.let_go([left])
        assert [c["finish_reason"] for c in kept.result().json()["choices"]] == ["length"]


# Pictures ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictured():
    """A tiny Qwen2-VL behind HTTP, a client, and the same model here."""
    model, processor = build("qwen2_vl")
    encoder = install_pictures(model, processor)
    with serving(lambda: ServedEngine(NativeEngine(copied(processor), pad_token_id=256)), context=512) as server:
        engine = ServerEngine(server.url, pushes=False)
        yield server, engine, model, encoder.processor
        engine.close()


def copied(processor):
    model, _ = build("qwen2_vl")
    install_pictures(model, processor)
    return model


def asked_about(reader, seeds=(0, 1, None), size=(84, 56)):
    """One question about pictures of one size, and without any."""
    made = []
    for seed in seeds:
        held = [] if seed is None else [read_picture(noise(*size, seed=seed))]
        text = "".join(f"see {reader.placeholder} " for _ in held) + "which is it?"
        ids, placed = reader.encode(text, held, prompt=True)
        made.append(Request(ids, 2, pictures=placed))
    return made


def gap(model, reader, rollout, placed):
    """How far its log-probs are from a plain forward of the sequence alone; no placeholder has a part in the distribution."""
    ids, begin = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]]), len(rollout.prompt_ids)
    inputs = reader.plain_inputs(ids, [[one.picture for one in placed]], begin)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, **inputs).logits[0, begin - 1 : -1]
    logits[:, reader.never(320)] = -math.inf
    truth = logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    return float((truth - torch.tensor(rollout.logp)).abs().max())


def test_pictures_go_as_bytes_and_log_probs_are_those_of_a_plain_forward(pictured):
    _, engine, model, reader = pictured
    assert engine.capabilities.pictures
    asked = asked_about(reader)
    sampling = Sampling(5, seed=1, logit_bias=tuple((token, -math.inf) for token in reader.never(320)))
    rollouts = engine.generate(asked, sampling)
    gaps = []
    for request, rollout in zip([one for one in asked for _ in range(2)], rollouts, strict=True):
        other = asked[1].pictures if request.pictures else ()
        gaps += [gap(model, reader, rollout, held) for held in (request.pictures, other)]
    assert max(gaps[::2]) < 1e-4
    # The control: the first question's answers under the second's picture.
    assert min(gaps[1], gaps[3]) > 1e-2


@pytest.mark.matrix
@pytest.mark.slow
def test_grpo_samples_from_a_host_under_its_rows_pictures(tmp_path):
    model, processor = build("qwen2_vl")
    with torch.no_grad():
        # Others than the host begins with.
        model.lm_head.weight.mul_(1.1)
    with serving(lambda: ServedEngine(NativeEngine(copied(processor), pad_token_id=256)), context=512) as server:
        args = GRPOConfig(str(tmp_path), **QUICK, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url)
        trainer = GRPOTrainer(model, short, args, train_dataset=prompts(), processing_class=processor)
        generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
        reader = trainer.vision.reader
        assert max(gap(trainer.model, reader, r, r.pictures) for r in generation.rollouts) < 1e-4
        trainer.train()


def test_pictures_that_cannot_be_read_or_are_expanded_otherwise_or_would_be_left_out_are_a_400(pictured):
    server, _, _, reader = pictured
    (request,) = asked_about(reader, (0,))
    body = pictures_body(request)
    (digest,) = body["pictures"]
    (placed,) = body["placed"]
    for wrong, words in (
        ({"pictures": {digest: "bm8gcGljdHVyZQ=="}}, "not a readable image"),
        ({"pictures": {}}, "not a readable image"),
        ({"placed": [placed | {"size": [8000, 8001]}]}, "but the maximum is"),
        ({"placed": [placed | {"size": [560, 560]}]}, "PT-G011"),
        ({"placed": [placed | {"start": 1}]}, "PT-G016"),
        ({"placed": []}, "PT-G011"),
        ({"prompt_logprobs": 0}, "cannot be scored"),
    ):
        found = error(server.complete(list(request.prompt_ids), **body | wrong), 400)
        assert words in found


def test_a_host_without_a_processor_takes_no_pictures(server, pictured):
    (request,) = asked_about(pictured[3], (0,))
    assert "only if the model accepts images" in error(server.complete([1, 2], **pictures_body(request)), 400)
