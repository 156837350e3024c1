"""Every completion of an answer says which weights wrote it, also one that ended before they changed."""

import concurrent.futures
import time

from posttrain.serve.asking import Generate, Limits, wanted
from posttrain.serve.jobs import Ask, Job
from posttrain.serve.layout import generation_reply
from posttrain.serve.native import NativeBackend
from posttrain.types import Sampling
from tests.conftest import build_model
from tests.serve.support import serving


def test_a_completion_that_ended_before_the_weights_changed_keeps_its_version_while_its_request_goes_on():
    backend = NativeBackend(build_model(300, seed=0))
    short, long = Sampling(2, seed=7, stop_token_ids=()), Sampling(9, seed=7, stop_token_ids=())
    backend.submit(Job(1, [Ask([5, 6], 1, short), Ask([7, 8], 1, long)]))
    for _ in range(5):
        backend.advance()
    backend.rest()
    backend.begin_update(None)
    backend.load((name, p.detach().clone()) for name, p in build_model(300, seed=1).named_parameters())
    backend.end_update(4)
    while backend.busy:
        backend.advance()
    ((job, failure),) = backend.finished
    (_, first), (_, second) = job.spans[1, 0]
    assert failure is None and first + second == 9 and min(first, second) > 0
    asked = wanted(Generate(prompts=[[5, 6], [7, 8]], max_tokens=9), [[5, 6], [7, 8]], Limits(None, None, 8, 0), seed=0)
    reply = generation_reply(asked, job.rollouts, job.spans, version=4, raw=False)
    assert reply["version_spans"] == [[(0, 2)], [(0, first), (4, second)]]
    later = generation_reply(asked, job.rollouts, {(0, 0): [(4, 2)], (1, 0): [(4, 9)]}, version=4, raw=False)
    assert "version_spans" not in later  # All are of the version that the answer names.


def test_completions_that_are_held_end_where_an_update_fails_and_never_go_on_under_half_of_it():
    with serving("tests.serve.engines:create_native") as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.post, "/generate/", {"prompts": [[5, 6]], "max_tokens": 400, "seed": 1})
        deadline = time.monotonic() + 60
        while not server.backend().running:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert server.post("/pause/", {"mode": "keep"}).status_code == 200
        assert server.post("/begin_update/", {"version": 1}).status_code == 200
        assert not held.done()
        assert server.post("/abort_update/", {"version": 1}).json()["weights_valid"] is False
        reply = held.result(timeout=30).json()
        assert reply["finish_reasons"] == [["abort"]] and len(reply["completion_ids"][0]) < 400
        assert "version_spans" not in reply and reply["weight_version"] == 0
        assert server.post("/resume/").status_code == 200
        assert server.post("/generate/", {"prompts": [[1]], "max_tokens": 1}).status_code == 409
