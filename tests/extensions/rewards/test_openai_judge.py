"""Judges against a chat server of our own on this machine: verdicts, order, budget, failures; and judges as rewards."""

import base64
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from posttrain import ConfigError, RewardError
from posttrain.extensions.rewards.openai_judge import OpenAIPairwiseJudge
from posttrain.rewards.judges import JudgeReward
from posttrain.rewards.runner import RewardRunner
from tests.wordings import raises


class Server:
    """Answers chat completions as ``answer(text of the request, number) -> content | (status, headers, body)``."""

    def __init__(self):
        self.answer = lambda text, number: "0"
        self.requests, self.headers, self.most, self._now = [], [], 0, 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                try:
                    reply = outer.answer(body["messages"][-1]["content"], number)
                finally:
                    with outer.lock:
                        outer._now -= 1
                status, extra, content = reply if isinstance(reply, tuple) else (200, {}, reply)
                if status == 200 and not isinstance(content, bytes):
                    choice = (
                        content if isinstance(content, dict) else {"message": {"role": "assistant", "content": content}}
                    )
                    content = json.dumps({"choices": [choice]}).encode()
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else str(content).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def judge_of(server, **settings):
    return OpenAIPairwiseJudge("judge", base_url=server.url, **({"backoff": 0.01, "timeout": 5} | settings))


def parts(text):
    """The request and the two answers that our prompt shows."""
    first = text.split("[Answer 0]\n")[1].split("\n\n[Answer 1]")[0]
    second = text.split("[Answer 1]\n")[1].split("\n\nReply")[0]
    return text.split("[Request]\n")[1].split("\n\n[Answer 0]")[0], first, second


def longer(text, number):
    _, first, second = parts(text)
    return "0" if len(first) >= len(second) else "1"


PROMPTS = [f"question {i}" for i in range(12)]
PAIRS = [["a" * (3 + 2 * (i % 4) - (i % 4 == 1)), "b" * 6] for i in range(12)]
TRUTH = [int(len(b) > len(a)) for a, b in PAIRS]


# The HTTP judge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_verdicts_are_those_of_the_given_order_whatever_was_shown(server, shuffle):
    server.answer = longer
    assert judge_of(server).judge(PROMPTS, PAIRS, shuffle_order=shuffle) == TRUTH
    shown = [parts(r["messages"][0]["content"]) for r in server.requests]
    straight = sum(first.startswith("a") for _, first, _ in shown)
    assert straight == 12 if not shuffle else 0 < straight < 12
    assert {prompt for prompt, *_ in shown} == set(PROMPTS)
    assert all(r["model"] == "judge" and r["max_tokens"] == 1 for r in server.requests)


def test_p41_no_verdict_stays_no_verdict_when_the_order_was_turned(server):
    """Flipping a verdict as 1 - v would turn -1 into 2."""
    server.answer = lambda text, number: "neither"
    assert judge_of(server).judge(PROMPTS, PAIRS) == [-1] * 12


def test_requests_run_at_once_up_to_the_limit(server):
    server.answer = lambda text, number: (time.sleep(0.15), "0")[1]
    started = time.monotonic()
    judge_of(server, concurrency=4).judge(PROMPTS, PAIRS)
    assert 1 < server.most <= 4
    assert time.monotonic() - started < 12 * 0.15 * 0.75


def test_a_busy_server_is_asked_again(server):
    server.answer = lambda text, number: (503, {}, "warming up") if number < 2 else "1"
    assert judge_of(server).judge(["q"], [["a", "b"]], shuffle_order=False) == [1]
    assert len(server.requests) == 3


def test_the_server_says_how_long_to_wait(server):
    server.answer = lambda text, number: (429, {"Retry-After": "0.4"}, "slow down") if number == 0 else "0"
    started = time.monotonic()
    assert judge_of(server, backoff=0.001).judge(["q"], [["a", "b"]], shuffle_order=False) == [0]
    assert time.monotonic() - started >= 0.4


def test_pauses_grow(server, monkeypatch):
    pauses = []
    monkeypatch.setattr("posttrain.extensions.rewards.remote.sleep", pauses.append)
    server.answer = lambda text, number: (500, {}, "broken")
    with raises(RewardError, "4"):
        judge_of(server, retries=3, backoff=1.0).judge(["q"], [["a", "b"]])
    assert all(0.5 * 2**i <= pause <= 2**i for i, pause in enumerate(pauses)) and len(pauses) == 3


def test_a_server_that_is_down_is_named(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    judge = OpenAIPairwiseJudge("judge", base_url=url, retries=2, backoff=0.01)
    with pytest.raises(RewardError) as error:
        judge.judge(["q"], [["a", "b"]])
    text = str(error.value)
    assert f"{url}/chat/completions" in text and "3 attempts" in text and "Connection refused" in text
    assert f"Nothing listens on port {url.split(':')[2].split('/')[0]} of 127.0.0.1" in text


def test_a_server_that_hangs_is_given_up(server):
    server.answer = lambda text, number: (time.sleep(2), "0")[1]
    started = time.monotonic()
    with raises(RewardError, "0.2"):
        judge_of(server, timeout=0.2, retries=1).judge(["q"], [["a", "b"]])
    assert time.monotonic() - started < 1.5


def test_a_refusal_is_not_repeated_and_keeps_the_key_secret(server):
    server.answer = lambda text, number: (401, {}, '{"error": "invalid key"}')
    with raises(RewardError, "401") as error:
        judge_of(server, api_key="sk-secret").judge(["q"], [["a", "b"]])
    assert len(server.requests) == 1
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(error.value) + repr(judge_of(server, api_key="sk-secret"))


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"choices": []}', b'{"answer": 1}', b"[]"])
def test_an_answer_that_is_no_chat_completion_is_shown(server, body):
    server.answer = lambda text, number: (200, {}, body)
    with raises(RewardError):
        judge_of(server).judge(["q"], [["a", "b"]])


def test_one_failure_stops_the_other_requests(server):
    server.answer = lambda text, number: (404, {}, "no such model")
    with pytest.raises(RewardError, match="404"):
        judge_of(server, concurrency=2).judge([f"q{i}" for i in range(200)], [["a", "b"]] * 200)
    assert len(server.requests) < 50


@pytest.mark.parametrize("said", ["1", " 1.", "**1**", "<think>0 or 1?</think>\n1", "`1`", "```\n1\n```"])
def test_a_verdict_in_markdown_is_read(server, said):
    server.answer = lambda text, number: said
    assert judge_of(server).judge(["p"], [["a", "b"]], shuffle_order=False) == [1]


def test_over_budget_nobody_has_a_verdict_and_one_warning_says_so(server, caplog):
    judge = judge_of(server, max_requests=3)
    assert judge.judge(PROMPTS[:2], PAIRS[:2], shuffle_order=False) == [0, 0]
    assert judge.judge(PROMPTS[:2], PAIRS[:2], shuffle_order=False) == [0, 0]  # 2 < 3: still within, as a batch.
    for _ in range(3):
        assert judge.judge(PROMPTS[:2], PAIRS[:2]) == [-1, -1]
    assert len(server.requests) == 4
    assert sum("max_requests=3" in r.message for r in caplog.records) == 1


def test_options_reach_the_request_and_none_removes_one(server):
    judge = judge_of(server, options={"max_tokens": None, "max_completion_tokens": 4, "top_p": 0.5})
    judge.judge(["q"], [["a", "b"]])
    (request,) = server.requests
    assert "max_tokens" not in request
    assert (request["max_completion_tokens"], request["top_p"]) == (4, 0.5)


def test_a_system_prompt_of_one_s_own_is_filled_in(server):
    judge_of(server, system_prompt="{prompt}|{response0}|{response1}").judge(
        ["q {x}"], [["a", "b"]], shuffle_order=False
    )
    assert server.requests[0]["messages"] == [{"role": "user", "content": "q {x}|a|b"}]


def test_the_server_is_that_of_the_environment_where_none_is_given(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://example.invalid/v1")
    assert OpenAIPairwiseJudge().url == "http://example.invalid/v1/chat/completions"
    assert OpenAIPairwiseJudge().max_requests == 1000


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"base_url": "localhost:8000"}, "http://"), ({"timeout": 0}, "timeout=0"), ({"retries": -1}, "retries=-1")],
)
def test_bad_settings_are_refused_when_the_judge_is_made(settings, match):
    with pytest.raises(ConfigError, match=match):
        OpenAIPairwiseJudge("judge", **({"base_url": "http://localhost/v1"} | settings))


def test_a_judge_that_is_down_fails_like_a_reward_function(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    judge = OpenAIPairwiseJudge("judge", base_url=url, retries=0)
    runner = RewardRunner([JudgeReward(judge)])
    assert runner.names == ["OpenAIPairwiseJudge"]
    with pytest.raises(RewardError, match=url):
        runner(prompts=["p", "p"], completions=["a", "b"], completion_ids=[[1], [2]])
    with pytest.raises(RewardError, match=url):  # Before a model is loaded.
        runner.dry_run([{"prompt": "p"}], conversational=False)


def test_a_judge_with_vision_gets_the_images_of_each_prompt_before_its_text(server):
    image = Image.new("RGB", (6, 4), "red")
    block = {"type": "image", "image": image}
    prompts = [
        [{"role": "user", "content": [block, {"type": "text", "text": "what colour?"}]}],
        [{"role": "user", "content": "2 + 2?"}],
    ]
    judge = OpenAIPairwiseJudge("m", base_url=server.url, vision=True, concurrency=1)
    server.answer = lambda content, number: "0"
    rewards = JudgeReward(judge)(prompts=[prompts[0]] * 2 + [prompts[1]] * 2, completions=["red", "blue", "4", "5"])
    assert len(rewards) == 4
    first, second = (request["messages"][0]["content"] for request in server.requests)
    head, _, data = first[0]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) == (255, 0, 0)
    assert "[image]what colour?" in first[1]["text"] and [one["type"] for one in second] == ["text"]
