"""Generation over HTTP: every completion with its own prompt, every refusal with its reason."""

import concurrent.futures
import copy
import time

import pytest
import requests

from posttrain.serve import asking
from tests.serve.engines import CONTEXT, FAIL, SLOW, expected
from tests.serve.support import serving


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def error(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def test_completions_come_prompt_by_prompt_with_reasons_and_version(server):
    reply = server.post("/generate/", {"prompts": [[1, 2], [3], [4, 5, 6]], "n": 2, "max_tokens": 3}).json()
    assert reply["prompt_ids"] == [[1, 2], [3], [4, 5, 6]]
    assert reply["completion_ids"] == [expected(p, i, 3) for p in ([1, 2], [3], [4, 5, 6]) for i in range(2)]
    assert reply["finish_reasons"] == [["length"] * 2] * 3
    assert reply["weight_version"] == 0


def test_concurrent_requests_keep_their_pairing_and_are_merged_into_few_batches(server):
    before = len(server.backend().engine.calls)

    def ask(i):
        return i, server.post("/generate/", {"prompts": [[i, 1], [i, 2]], "n": 2, "max_tokens": 4}).json()

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for i, reply in pool.map(ask, range(120)):
            assert reply["completion_ids"] == [expected([i, k], j, 4) for k in (1, 2) for j in range(2)]
    assert len(server.backend().engine.calls) - before < 120


@pytest.mark.parametrize("path", ["/generate", "/generate/"])
def test_both_forms_of_a_path_are_one(server, path):
    assert server.post(path, {"prompts": [[1]]}).status_code == 200
    assert server.get("/health").json() == server.get("/health/").json() == {"status": "ok"}


def test_logprobs_are_of_the_sampled_token_one_a_position(server):
    reply = server.post("/generate/", {"prompts": [[1]], "max_tokens": 2}).json()
    assert reply["logprobs"] == [[[-0.5], [-0.51]]]
    assert reply["logprob_token_ids"] == [[[t] for t in expected([1], 0, 2)]]


def test_more_logprobs_stand_in_rank_order_with_the_sampled_token_among_them(server):
    one = server.post("/generate/", {"prompts": [[1]], "max_tokens": 1, "logprobs": 1}).json()
    assert one["logprobs"] == [[[-0.3, -0.5]]]  # One was asked for, and the sampled one is another.
    assert one["logprob_token_ids"] == [[[2, 1]]]
    two = server.post("/generate/", {"prompts": [[1]], "max_tokens": 1, "logprobs": 2}).json()
    assert [len(at) for at in two["logprobs"][0]] == [2]
    assert two["logprobs"][0][0] == sorted(two["logprobs"][0][0], reverse=True)


def test_nan_logprobs_are_null_and_no_logprobs_are_no_fields(server):
    prompt = [10]  # Its fourth token is 13.
    reply = server.post("/generate/", {"prompts": [prompt], "max_tokens": 4, "raw_logprobs": True}).json()
    assert reply["completion_ids"] == [[10, 11, 12, 13]]
    assert reply["logprobs"][0] == [[-0.5], [-0.51], [-0.52], [None]]
    assert reply["raw_logprobs"] == [[-0.5, -0.51, -0.52, None]]
    none = server.post("/generate/", {"prompts": [prompt], "logprobs": None}).json()
    assert none["logprobs"] is None and none["logprob_token_ids"] is None


def test_an_overlong_prompt_is_a_400_with_its_index_and_lengths(server):
    response = server.post("/generate/", {"prompts": [[1], [2] * CONTEXT], "max_tokens": 1})
    assert f"prompt 1 has {CONTEXT} tokens" in error(response, 400)
    body = response.json()
    assert (body["index"], body["prompt_length"], body["max_model_len"]) == (1, CONTEXT, CONTEXT)
    too_many = error(server.post("/generate/", {"prompts": [[1] * 60], "max_tokens": 5}), 400)
    assert "at most 4 can be written" in too_many


def test_overlong_prompts_can_be_cut_or_answered_empty(server):
    long = list(range(1, 71))
    cut = server.post("/generate/", {"prompts": [long], "max_tokens": 4, "on_overlong": "truncate_left"}).json()
    assert cut["prompt_ids"] == [long[-60:]]
    assert cut["completion_ids"] == [expected(long[-60:], 0, 4)]
    empty = server.post(
        "/generate/", {"prompts": [[1], long, [2]], "n": 2, "max_tokens": 4, "on_overlong": "empty"}
    ).json()
    assert [len(c) for c in empty["completion_ids"]] == [4, 4, 0, 0, 4, 4]
    assert empty["completion_ids"][4] == expected([2], 0, 4)


@pytest.mark.parametrize(
    "body, words",
    [
        ({"prompts": []}, "prompts"),
        ({}, "prompts"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1], [5000]]}, "token id 5000"),
        ({"prompts": [[-1]]}, "prompts"),
        ({"prompts": [[1]], "temperature": -1}, "temperature"),
        ({"prompts": [[1]], "n": 0}, "n: "),
        ({"prompts": [[1]], "tempreature": 1}, "tempreature"),
        ({"prompts": [[1]], "generation_kwargs": {"top_pp": 0.5}}, "did you mean 'top_p'"),
        ({"prompts": [[1]], "generation_kwargs": {"temperature": "hot"}}, "temperature"),
        ({"prompts": [[1]], "generation_kwargs": {"stop_token_ids": [9999]}}, "9999"),
        ({"prompts": [[1]], "generation_kwargs": {"structured_outputs": {"regx": "a"}}}, "regex"),
        ({"prompts": [[1], [2]], "seed": [1]}, "1 seeds came for 2 prompts"),
        ({"prompts": [[1]], "logprobs": 100000}, "--max_logprobs"),
        ({"prompts": [[1]], "images": [["aGk="]]}, "images"),
        ({"prompts": ["text"]}, "token ids"),
        ({"prompts": [[1]], "logprobs": 2, "repetition_penalty": 1.2}, "logprobs=0"),
    ],
)  # fmt: skip
def test_input_that_cannot_be_served_is_a_400_that_says_why(server, body, words):
    assert words in error(server.post("/generate/", body), 400)


def test_a_body_that_is_no_json_is_a_400(server):
    response = requests.post(
        server.url + "/generate/", data=b"{not json", headers={"Content-Type": "application/json"}, timeout=5
    )
    error(response, 400)


def test_generation_kwargs_override_named_fields(server):
    reply = server.post(
        "/generate/", {"prompts": [[1]], "max_tokens": 5, "generation_kwargs": {"max_tokens": 2, "n": 3}}
    ).json()
    assert [len(c) for c in reply["completion_ids"]] == [2, 2, 2]


def test_a_regex_wins_over_structured_outputs_and_says_so(server):
    body = {
        "prompts": [[1]],
        "structured_outputs_regex": "a+",
        "generation_kwargs": {"structured_outputs": {"choice": ["b"]}},
    }
    assert "wins" in server.post("/generate/", body).json()["warnings"][0]


def test_trap_s11_an_engine_that_fails_answers_500_and_serves_the_next_request(server):
    message = error(server.post("/generate/", {"prompts": [[FAIL]]}), 500)
    assert "token 900" in message
    assert server.post("/generate/", {"prompts": [[1]]}).status_code == 200
    assert server.get("/health/").status_code == 200


def test_a_repeated_request_id_gets_the_first_answer_without_computing_it_again(server):
    body = {"prompts": [[77]], "max_tokens": 3, "request_id": "once"}
    first = server.post("/generate/", body).json()
    calls = len(server.backend().engine.calls)
    assert server.post("/generate/", body).json() == first
    assert len(server.backend().engine.calls) == calls
    assert "another request" in error(server.post("/generate/", body | {"max_tokens": 4}), 400)


def test_a_repeat_while_the_first_is_computed_waits_for_it(server):
    body = {"prompts": [[SLOW]], "max_tokens": 1, "request_id": "slow"}
    calls = len(server.backend().engine.calls)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: server.post("/generate/", body).json(), range(4)))
    assert all(reply == replies[0] for reply in replies)
    assert len(server.backend().engine.calls) == calls + 1


def test_a_failure_is_not_remembered_under_its_id(server):
    body = {"prompts": [[FAIL]], "request_id": "fails"}
    assert server.post("/generate/", body).status_code == 500
    calls = len(server.backend().engine.calls)
    assert server.post("/generate/", body).status_code == 500
    assert len(server.backend().engine.calls) == calls + 1


def test_health_answers_while_the_engine_is_busy(server):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/generate/", {"prompts": [[SLOW]]})
        time.sleep(0.2)
        began = time.monotonic()
        assert server.get("/health/").status_code == 200
        assert time.monotonic() - began < 0.5
        assert slow.result().status_code == 200


def test_info_world_size_and_metrics_tell_what_is_served(server):
    info = server.get("/info/").json()
    assert info["architectures"] == ["Echo"] and info["engine"] == "echo"
    assert info["max_model_len"] == CONTEXT and info["vocab_size"] == 1000
    assert info["weight_version"] == 0 and info["paused"] is False and info["asleep"] == 0
    assert info["logprobs_mode"] == "processed_logprobs"
    assert server.get("/get_world_size/").json() == {"world_size": 1}
    text = server.get("/metrics").text
    assert "# TYPE posttrain_requests_total counter" in text
    assert 'posttrain_worker_up{rank="0"} 1' in text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['posttrain_generate_seconds_bucket{le="+Inf"}']) == float(
        lines["posttrain_generate_seconds_count"]
    )


def test_a_deep_health_check_generates_a_token(server):
    calls = len(server.backend().engine.calls)
    assert server.get("/health/?deep=1").json() == {"status": "ok"}
    assert len(server.backend().engine.calls) == calls + 1


def test_prompts_are_split_evenly_over_ranks_and_come_back_in_order():
    with serving(data_parallel_size=3) as server:
        prompts = [[i] for i in range(8)]
        reply = server.post("/generate/", {"prompts": prompts, "n": 2, "max_tokens": 2}).json()
        assert reply["completion_ids"] == [expected(p, i, 2) for p in prompts for i in range(2)]
        assert sorted(server.backend(rank).engine.calls[0] for rank in range(3)) == [2, 3, 3]
        assert server.get("/get_world_size/").json() == {"world_size": 3}
        one = server.post("/generate/", {"prompts": [[5]], "max_tokens": 2})
        assert one.json()["completion_ids"] == [expected([5], 0, 2)]


def test_a_failing_rank_leaves_no_stale_answer_for_the_next_request():
    with serving(data_parallel_size=2) as server:
        error(server.post("/generate/", {"prompts": [[1], [FAIL]]}), 500)
        for i in range(10):
            reply = server.post("/generate/", {"prompts": [[i], [i + 20]], "max_tokens": 2}).json()
            assert reply["completion_ids"] == [expected([i], 0, 2), expected([i + 20], 0, 2)]


def test_the_token_is_asked_for_everywhere_but_in_health():
    with serving(api_key="open sesame") as server:
        assert server.get("/health/").status_code == 200
        for path in ("/info/", "/metrics", "/get_world_size/", "/nothing/"):
            assert server.get(path).status_code == 401
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 401
        wrong = {"Authorization": "Bearer open sesam"}
        assert server.post("/generate/", {"prompts": [[1]]}, headers=wrong).status_code == 401
        right = {"Authorization": "Bearer open sesame"}
        assert server.post("/generate/", {"prompts": [[1]]}, headers=right).status_code == 200


@pytest.mark.parametrize("path", ["/health?deep=1", "/health/?deep=1", "/health//?deep=true", "/health/?%64eep=1"])
def test_a_health_check_that_generates_asks_for_the_token(path):
    with serving(api_key="open sesame") as server:
        assert server.get(path).status_code == 401
        assert server.backend().engine.calls == []
        assert server.get(path, headers={"Authorization": "Bearer open sesame"}).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 1e-40},
        {"generation_kwargs": {"temperature": 1e-40}},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e39},
        {"generation_kwargs": {"logit_bias": {"5": 1e39}}},
    ],
)
def test_a_number_that_no_logit_survives_is_a_bad_request(server, field):
    error(server.post("/generate/", {"prompts": [[1]], "max_tokens": 2} | field), 400)
    error(server.post("/chat/", {"messages": [[{"role": "user", "content": "x"}]], "max_tokens": 2} | field), 400)


def test_a_score_at_a_temperature_that_no_logit_survives_is_a_bad_request(server):
    body = {"sequences": [[1, 2]], "prompt_lengths": [1], "temperature": 1e-40}
    error(server.post("/get_sequence_logprobs/", body), 400)


ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


def test_a_template_that_never_ends_is_cut_off_and_the_server_goes_on(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(asking, "RENDER_TIMEOUT_S", 0.3)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% if slowly %}" + ENDLESS + "{% endif %}" + tiny_tokenizer.chat_template
    with serving(tokenizer=tokenizer, max_model_len=None) as server:
        ask = {"messages": [[{"role": "user", "content": "sum"}]], "max_tokens": 1}
        began = time.monotonic()
        response = server.post("/chat/", ask | {"chat_template_kwargs": {"slowly": True}})
        assert "0.3 s" in error(response, 400) and response.json()["index"] == 0
        assert time.monotonic() - began < 10
        assert server.post("/chat/", ask).status_code == 200
        own = server.post("/chat/", ask | {"chat_template_kwargs": {"chat_template": ENDLESS}})
        assert "chat_template" in error(own, 400)  # Programs are not taken from clients at all.


def test_limits_of_bodies_prompts_queue_and_time():
    with serving(max_body_mb=0.01, max_prompts=3, max_queue=2, request_timeout=0.6) as server:
        assert "--max_body_mb" in error(server.post("/generate/", {"prompts": [[1] * 20000]}), 413)
        chunks = iter([b'{"prompts": [[', b"1," * 20000, b"1]]}"])
        assert requests.post(server.url + "/generate/", data=chunks, timeout=5).status_code == 413
        assert "--max_prompts" in error(server.post("/generate/", {"prompts": [[1]] * 4}), 400)
        assert "--request_timeout" in error(server.post("/generate/", {"prompts": [[SLOW]]}), 504)
        time.sleep(0.6)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda _: server.post("/generate/", {"prompts": [[SLOW]]}), range(6)))
        refused = [r for r in replies if r.status_code == 429]
        assert len(refused) == 4 and all(float(r.headers["Retry-After"]) > 0 for r in refused)


def test_chat_renders_the_template_and_ends_prompts_for_the_assistant(tiny_tokenizer):
    with serving(tokenizer=tiny_tokenizer, max_model_len=None) as server:
        messages = [{"role": "user", "content": "sum"}]
        reply = server.post("/chat/", {"messages": [messages], "max_tokens": 2}).json()
        text = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reply["prompt_ids"] == [ids]
        assert reply["completion_ids"] == [expected(ids, 0, 2)]
        began = [*messages, {"role": "assistant", "content": "it is"}]
        going_on = server.post("/chat/", {"messages": [began], "max_tokens": 1}).json()["prompt_ids"][0]
        assert tiny_tokenizer.decode(going_on).endswith("it is")
        assert "empty conversation" in error(server.post("/chat/", {"messages": [messages, []]}), 400)
        parts = [[{"role": "user", "content": [{"type": "image_pil", "image_pil": "aGk="}]}]]
        assert "images" in error(server.post("/chat/", {"messages": parts}), 400)
        texts = server.post("/generate/", {"prompts": ["sum of", "two"], "max_tokens": 1}).json()
        assert texts["prompt_ids"] == tiny_tokenizer(["sum of", "two"])["input_ids"]
