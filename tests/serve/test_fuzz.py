"""Whatever comes over the network: an answer of the documented statuses, and a server that goes on."""

import json

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.engines import FAIL, KILL, SLOW, expected
from tests.serve.support import serving

FIELDS = {
    "/generate/": {"prompts": [[1, 2]], "n": 1, "max_tokens": 2},
    "/chat/": {"messages": [[{"role": "user", "content": "a"}]]},
    "/get_sequence_logprobs/": {"sequences": [[1, 2]], "prompt_lengths": [1], "top_logprobs": 1},
    "/begin_update/": {"version": 1, "names": ["a"]},
    "/update_bucket/": {"version": 1, "path": "/dev/shm/posttrain-x.safetensors", "checksum": "0"},
    "/end_update/": {"version": 1},
    "/abort_update/": {"version": 1},
    "/lease/": {"holder": "t", "ttl_s": 1},
    "/pause/": {"mode": "keep"},
    "/resume/": {},
    "/sleep/": {"level": 1},
    "/wake_up/": {"tags": ["weights"]},
    "/reset_prefix_cache/": {},
    "/init_communicator/": {"host": "127.0.0.1", "port": 1, "world_size": 2, "client_device_uuid": "x"},
    "/update_named_param/": {"name": "a", "dtype": "torch.float32", "shape": [1]},
    "/update_named_params/": {"version": 1, "params": [{"name": "a", "dtype": "x", "shape": [1]}]},
    "/close_communicator/": {},
}
FURTHER = [
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs", "seed", "priority", "request_id", "on_overlong",
    "generation_kwargs", "structured_outputs_regex", "images", "tools", "chat_template_kwargs", "response_format",
]  # fmt: skip
KWARGS = ["stop", "stop_token_ids", "logit_bias", "min_tokens", "structured_outputs", "n", "seed", "ignore_eos"]
MISCHIEF = {FAIL, SLOW, KILL}
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 40), st.floats(), st.text(max_size=8)
).filter(lambda x: x not in MISCHIEF)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
# Documented: see REPLIES in posttrain/serve/app.py. 500 is not among them: this engine fails on one token alone.
ALLOWED = {200, 400, 401, 403, 404, 405, 409, 413, 423, 429, 501, 503, 504}


@st.composite
def asked(draw):
    path = draw(st.sampled_from(sorted(FIELDS)))
    body = dict(FIELDS[path])
    for name in draw(st.lists(st.sampled_from([*body, *FURTHER]), max_size=3, unique=True)):
        if name == "generation_kwargs":
            body[name] = draw(st.dictionaries(st.sampled_from(KWARGS), values, max_size=2))
        else:
            body[name] = draw(values)
    return path, draw(st.one_of(st.just(body), st.just(body), values))


@pytest.fixture(scope="module")
def server(request):
    tokenizer = request.getfixturevalue("_tokenizer_folder")
    from transformers import AutoTokenizer

    # Short limits: some of what is drawn pauses the server, and what waits then must end too.
    with serving(
        tokenizer=AutoTokenizer.from_pretrained(tokenizer), request_timeout=0.05, drain_timeout=0.05
    ) as running:
        yield running


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(asked())
def test_no_body_is_answered_with_500_or_not_at_all(server, one):
    path, body = one
    data = json.dumps(body).encode()
    response = requests.post(server.url + path, data=data, headers={"Content-Type": "application/json"}, timeout=10)
    assert response.status_code in ALLOWED, (path, body, response.status_code, response.text[:500])
    if response.status_code != 200:
        assert response.json()["error"]["message"]


def test_and_the_server_still_serves(server):
    state = server.service.state
    for path in ("/abort_update/", "/wake_up/", "/resume/"):
        lease = {"X-Lease": state.lease.id} if state.lease is not None else {}
        requests.post(server.url + path, json={}, headers=lease, timeout=10)
    state.weights_valid = True  # Updates that were begun at random made them invalid, as they must.
    server.service.config.request_timeout = 10.0
    reply = requests.post(server.url + "/generate/", json={"prompts": [[1]], "max_tokens": 2}, timeout=10)
    assert reply.json()["completion_ids"] == [expected([1], 0, 2)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.binary(max_size=60), st.sampled_from(["application/json", "application/x-safetensors", "text/plain"]))
def test_bytes_that_mean_nothing_are_refused(server, data, kind):
    for path in ("/generate/", "/update_bucket/"):
        headers = {"Content-Type": kind, "X-Version": "1", "X-Checksum": "0"}
        response = requests.post(server.url + path, data=data, headers=headers, timeout=10)
        assert response.status_code in ALLOWED - {200}, response.text[:300]


def test_the_documented_schema_names_every_path():
    with serving() as running:
        paths = running.get("/openapi.json").json()["paths"]
    assert {path for path in FIELDS if path in paths} == set(FIELDS)
    assert {
        "/health/",
        "/info/",
        "/metrics",
        "/get_world_size/",
        "/lease/{lease_id}",
        "/lease/{lease_id}/renew",
    } <= set(paths)
