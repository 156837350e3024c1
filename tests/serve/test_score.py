"""Scoring over HTTP: layouts, merging, and which temperature an engine can honour."""

import base64
import concurrent.futures
import math

import numpy as np
import pytest

from posttrain.serve.layout import renormalized
from tests.serve.engines import CONTEXT
from tests.serve.support import serving


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def test_json_holds_the_positions_behind_each_prompt_by_rank(server):
    body = {"sequences": [[1, 2, 3, 4], [5, 6]], "prompt_lengths": [2, 1], "top_logprobs": 2}
    reply = server.post("/get_sequence_logprobs/", body).json()
    assert reply["actual_token_ids"] == [[[3], [4]], [[6]]]
    assert reply["actual_logprobs"] == [[[-0.03], [-0.04]], [[-0.06]]]
    assert reply["logprob_token_ids"] == [[[3, 1], [4, 1]], [[6, 1]]]
    assert reply["logprobs"] == [[[-1.0, -2.0]] * 2, [[-1.0, -2.0]]]


def test_nan_is_null_in_json(server):
    body = {"sequences": [[1, 13]], "prompt_lengths": [1], "top_logprobs": 1}
    assert server.post("/get_sequence_logprobs/", body).json()["actual_logprobs"] == [[[None]]]


def test_binary_holds_the_same_numbers_padded(server):
    body = {
        "sequences": [[1, 2, 3, 4], [5, 6]],
        "prompt_lengths": [1, 1],
        "top_logprobs": 2,
        "response_format": "binary",
    }
    reply = server.post("/get_sequence_logprobs/", body).json()
    assert reply["shape"] == [2, 3, 2] and reply["completion_lengths"] == [3, 1]

    def array(name, dtype, shape):
        return np.frombuffer(base64.b64decode(reply[name]), dtype).reshape(shape)

    logps = array("logprobs_b64", "<f4", (2, 3, 2))
    assert logps[0].tolist() == [[-1.0, -2.0]] * 3
    assert np.isneginf(logps[1, 1:]).all()
    assert array("token_ids_b64", "<i4", (2, 3, 2))[1].tolist() == [[6, 1], [0, 0], [0, 0]]
    actual = array("actual_logprobs_b64", "<f4", (2, 3, 1))
    assert np.allclose(actual[0, :, 0], [-0.02, -0.03, -0.04]) and np.isneginf(actual[1, 1:]).all()
    assert array("actual_token_ids_b64", "<i4", (2, 3, 1))[0, :, 0].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "sequences, lengths, words",
    [
        ([[1, 2]], [1, 1], "1 sequences and 2 prompt_lengths"),
        ([[1, 2], [3]], [1, 2], "sequence 1: prompt_length=2"),
        ([[1, 2]], [-1], "prompt_length=-1"),
        ([[1] * (CONTEXT + 1)], [1], f"{CONTEXT + 1} tokens"),
        ([[1, 5000]], [1], "5000"),
        ([], [], "no sequences"),
    ],
)
def test_wrong_input_is_a_400(server, sequences, lengths, words):
    response = server.post(
        "/get_sequence_logprobs/", {"sequences": sequences, "prompt_lengths": lengths, "top_logprobs": 1}
    )
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_more_top_logprobs_than_the_server_gives_names_the_flag(server):
    response = server.post(
        "/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [1], "top_logprobs": 999}
    )
    assert response.status_code == 400 and "--max_logprobs" in response.json()["error"]["message"]


def test_requests_that_come_together_are_scored_together_by_kind(server):
    before = len(server.backend().batches)

    def ask(i):
        body = {"sequences": [[1, i]], "prompt_lengths": [1], "top_logprobs": 1 + i % 2}
        return server.post("/get_sequence_logprobs/", body).json()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(32)))
    assert [r["actual_token_ids"][0][0][0] for r in replies] == list(range(32))
    batches = server.backend().batches[before:]
    assert len(batches) < 32
    assert sum(count for count, _, _ in batches) == 32
    # Two kinds, never in one batch; at most 16 requests and 64 tokens a batch.
    assert all(count <= 16 for count, _, _ in batches)


def test_the_temperature_reaches_an_engine_that_heeds_it(server):
    body = {"sequences": [[1, 20]], "prompt_lengths": [1], "top_logprobs": 1, "temperature": 2.0}
    assert server.post("/get_sequence_logprobs/", body).json()["actual_logprobs"] == [[[-0.1]]]


def test_an_engine_that_does_not_heed_it_refuses_or_renormalises_over_what_it_returns():
    with serving("tests.serve.engines:create_cold") as server:
        body = {"sequences": [[1, 20]], "prompt_lengths": [1], "top_logprobs": 2, "temperature": 2.0}
        response = server.post("/get_sequence_logprobs/", body)
        assert response.status_code == 400 and "renormalize" in response.json()["error"]["message"]
        found = server.post("/get_sequence_logprobs/", body | {"renormalize": True}).json()["logprobs"][0][0]
        # By hand: exp(-1/2) and exp(-2/2), divided by their sum.
        total = math.exp(-0.5) + math.exp(-1.0)
        assert found == pytest.approx([math.log(math.exp(-0.5) / total), math.log(math.exp(-1.0) / total)])
        assert renormalized([-1.0, -2.0], 2.0) == pytest.approx(found)


def test_a_large_request_waits_at_the_front_and_not_behind_all_later_ones():
    """The budget is 64 tokens: a request of 60 does not join one of 30, and comes before those that came after it."""
    from posttrain.serve.jobs import Score
    from posttrain.serve.scoring import ScoreMerger, _Waiting

    class Service:
        class ranks:
            all = [None]

        class limits:
            context = 64

    merger = ScoreMerger(Service)
    sizes = [30, 60, 30, 30]
    for i, size in enumerate(sizes):
        merger.queue.append(_Waiting([Score([i] * size, 0)], (1, 1.0), None))
    taken = [[entry.tokens for entry in merger._take()] for _ in range(3)]
    assert taken == [[30], [60], [30, 30]]
