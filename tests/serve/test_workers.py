"""Workers that die, hang or fail: noticed at once, told to everybody who waits."""

import concurrent.futures
import time

import pytest

from tests.serve.engines import SLOW, expected
from tests.serve.support import serving


class Fall(BaseException):
    """Ends a worker's thread as a signal ends a process."""


def fall(*_, **__):
    raise Fall


def test_a_dead_worker_is_a_503_within_a_second_for_all_who_wait_and_the_end_after_five():
    with serving() as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        backend = server.backend()
        waiting = [pool.submit(server.post, "/generate/", {"prompts": [[SLOW]]}) for _ in range(2)]
        time.sleep(0.3)
        backend.deliver = fall
        began = time.monotonic()
        for future in waiting:
            response = future.result()
            assert response.status_code == 503
            assert response.json()["dead_rank"] == 0 and response.json()["error"]["type"] == "ServerDied"
        assert time.monotonic() - began < 1.0 + 1.0  # What was left of the slow call, and a second.
        assert server.get("/health/").status_code == 503
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 503
        assert not server.service.fatal
        time.sleep(5.3)
        assert "worker 0 has ended" in server.service.fatal[0]


def test_a_worker_that_is_restarted_serves_again_and_has_the_checkpoint_s_weights():
    with serving(restart_workers=True) as server:
        server.backend().advance = fall
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 503
        deadline = time.monotonic() + 5
        while server.get("/health/").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        reply = server.post("/generate/", {"prompts": [[1]], "max_tokens": 2})
        assert reply.json()["completion_ids"] == [expected([1], 0, 2)]
        assert not server.service.fatal
        server.service.state.weight_version = 3  # As after a push.
        server.backend().advance = fall
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 503
        time.sleep(0.5)
        refused = server.post("/generate/", {"prompts": [[1]]})
        assert refused.status_code == 409 and refused.json()["weights_valid"] is False


def test_a_death_in_the_middle_of_an_update_is_an_error_of_that_update():
    with serving(restart_workers=True) as server:
        server.backend().begin_update = fall
        assert server.post("/begin_update/", {"version": 1}).status_code == 503
        time.sleep(0.3)
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 409


def test_a_worker_that_is_silent_with_work_is_unhealthy(monkeypatch):
    monkeypatch.setattr("posttrain.serve.worker.STUCK_S", 0.3)
    with serving(request_timeout=0.3) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/generate/", {"prompts": [[SLOW]]})
        time.sleep(0.7)
        response = server.get("/health/")
        assert response.status_code == 503 and "silent" in response.text
        assert slow.result().status_code == 504
        time.sleep(0.6)
        assert server.get("/health/").status_code == 200


def test_a_client_that_goes_away_takes_its_work_with_it():
    import requests

    with serving() as server:
        with pytest.raises(requests.ReadTimeout):
            requests.post(server.url + "/generate/", json={"prompts": [[SLOW], [1]]}, timeout=0.3)
        deadline = time.monotonic() + 5
        while server.service.state.running and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.service.state.running == 0
        assert server.post("/generate/", {"prompts": [[1]]}).status_code == 200


def test_draining_answers_what_runs_and_refuses_what_is_new():
    with serving() as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/generate/", {"prompts": [[SLOW]]})
        time.sleep(0.3)
        server.service.state.draining = True
        assert server.get("/health/").status_code == 503
        refused = server.post("/generate/", {"prompts": [[1]]})
        assert refused.status_code == 503 and float(refused.headers["Retry-After"]) > 0
        assert slow.result().status_code == 200
