"""Weights over HTTP: one update at a time, nothing runs meanwhile, and a failed one stops generation."""

import concurrent.futures
import os
import time
import uuid

import pytest
import requests
import torch
from safetensors.torch import save, save_file

from posttrain.rollouts.server.replies import SAFETENSORS, SHARED_FOLDER, checksum
from tests.serve.engines import SLOW, expected
from tests.serve.support import serving

WHOLE = {"a": torch.ones(2, 3), "b": torch.full((4,), 2.0)}


@pytest.fixture
def server():
    with serving() as running:
        yield running


def send(server, tensors, version, *, digest=None, headers=None):
    data = save(tensors) if isinstance(tensors, dict) else tensors
    head = {"Content-Type": SAFETENSORS, "X-Version": str(version), "X-Checksum": digest or checksum(data)} | (
        headers or {}
    )
    return requests.post(server.url + "/update_bucket/", data=data, headers=head, timeout=20)


def begin(server, version, **fields):
    return server.post("/begin_update/", {"version": version, "names": None} | fields)


def push(server, tensors, version):
    assert begin(server, version, names=list(tensors)).status_code == 200
    for name, tensor in tensors.items():
        assert send(server, {name: tensor}, version).json() == {"loaded": 1, "unexpected": []}
    return server.post("/end_update/", {"version": version})


def generates(server):
    return server.post("/generate/", {"prompts": [[1]], "max_tokens": 1})


def test_a_whole_update_is_confirmed_by_its_version_and_every_reply_says_it(server):
    assert push(server, WHOLE, 3).json() == {"version": 3, "loaded": 2, "missing": [], "unexpected": []}
    assert server.backend().values == {"a": 6.0, "b": 8.0}
    assert generates(server).json()["weight_version"] == 3
    assert server.get("/info/").json()["weight_version"] == 3


def test_versions_only_rise(server):
    push(server, WHOLE, 2)
    for version in (1, 2):
        response = begin(server, version)
        assert response.status_code == 409
        assert response.json()["current"] == 2


def test_a_bucket_with_another_checksum_stops_generation_until_a_whole_update(server):
    begin(server, 1)
    response = send(server, {"a": WHOLE["a"]}, 1, digest="0" * 32)
    assert response.status_code == 409
    body = response.json()
    assert body["phase"] == "bucket" and body["expected"] == "0" * 32
    assert body["got"] == checksum(save({"a": WHOLE["a"]}))
    assert server.post("/end_update/", {"version": 1}).status_code == 409
    server.post("/abort_update/", {"version": 1})
    refused = generates(server)
    assert refused.status_code == 409 and refused.json()["weights_valid"] is False
    assert server.get("/health/").status_code == 503
    push(server, {"a": WHOLE["a"], "b": WHOLE["b"]}, 1)
    assert generates(server).json()["weight_version"] == 1


def test_a_part_does_not_heal_weights_that_are_not_whole(server):
    begin(server, 1)
    server.post("/abort_update/", {})
    begin(server, 1)
    send(server, {"a": WHOLE["a"]}, 1)
    response = server.post("/end_update/", {"version": 1})
    assert response.status_code == 409 and response.json()["missing"] == ["b"]
    assert generates(server).status_code == 409


def test_trap_s7_announced_names_that_do_not_come_are_an_error_and_unknown_ones_are_told(server):
    begin(server, 1, names=["a", "b"])
    send(server, {"a": WHOLE["a"]}, 1)
    response = server.post("/end_update/", {"version": 1})
    assert response.status_code == 409
    assert response.json()["missing"] == ["b"] and response.json()["phase"] == "end"
    begin(server, 1, names=["a", "b", "c"])
    assert send(server, WHOLE | {"c": torch.ones(1)}, 1).json() == {"loaded": 2, "unexpected": ["c"]}
    assert server.post("/end_update/", {"version": 1}).json()["unexpected"] == ["c"]


def test_a_tensor_of_another_shape_names_both(server):
    begin(server, 1)
    response = send(server, {"a": torch.ones(3, 2)}, 1)
    assert response.status_code == 409
    assert "(2, 3)" in response.text and "(3, 2)" in response.text
    assert server.post("/end_update/", {"version": 1}).status_code == 409


def test_bytes_that_are_no_safetensors_are_refused(server):
    begin(server, 1)
    assert send(server, b"not a file of tensors", 1).status_code == 400
    assert send(server, b"", 1).status_code in (400, 409)


def test_buckets_out_of_order_are_conflicts(server):
    assert send(server, WHOLE, 1).status_code == 409
    assert server.post("/end_update/", {"version": 1}).status_code == 409
    begin(server, 2)
    assert send(server, WHOLE, 1).status_code == 409
    assert begin(server, 3).status_code == 409


def test_an_update_waits_for_running_requests_and_holds_new_ones_back(server):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        slow = pool.submit(server.post, "/generate/", {"prompts": [[SLOW]], "max_tokens": 1})
        time.sleep(0.3)
        drained = begin(server, 1).json()["drained_s"]
        assert slow.result().json()["weight_version"] == 0
        assert drained > 0.3
        waiting = pool.submit(generates, server)
        time.sleep(0.3)
        assert not waiting.done()
        send(server, WHOLE, 1)
        assert not waiting.done()
        server.post("/end_update/", {"version": 1})
        assert waiting.result().json()["weight_version"] == 1


def test_an_update_that_cannot_begin_in_time_leaves_the_old_weights_in_use():
    with serving(drain_timeout=0.2) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, "/generate/", {"prompts": [[SLOW]], "max_tokens": 1})
        time.sleep(0.2)
        response = begin(server, 1)
        assert response.status_code == 504 and response.json()["phase"] == "begin"
        assert slow.result().status_code == 200
        assert generates(server).json()["weight_version"] == 0


@pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="no shared memory here")
def test_a_bucket_in_shared_memory_is_mapped_by_its_path_and_no_other_file_is():
    path = SHARED_FOLDER / f"posttrain-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
    save_file(WHOLE, path)
    try:
        with serving() as server:
            begin(server, 1)
            body = {"version": 1, "path": str(path), "checksum": checksum(path.read_bytes())}
            assert server.post("/update_bucket/", body).json() == {"loaded": 2, "unexpected": []}
            for wrong in (
                "/etc/passwd",
                "/dev/shm/../etc/posttrain-x.safetensors",
                "/dev/shm/other.safetensors",
                "posttrain-x.safetensors",
            ):
                assert server.post("/update_bucket/", body | {"path": wrong}).status_code == 400
            forwarded = server.post("/update_bucket/", body, headers={"X-Forwarded-For": "10.0.0.9"})
            assert forwarded.status_code == 403
            assert server.post("/end_update/", {"version": 1}).json()["version"] == 1
    finally:
        path.unlink()


def test_every_rank_loads_the_same_bucket_and_nothing_stays_in_shared_memory():
    with serving(data_parallel_size=2) as server:
        push(server, WHOLE, 1)
        assert server.backend(0).values == server.backend(1).values == {"a": 6.0, "b": 8.0}
        if SHARED_FOLDER.is_dir():
            assert not list(SHARED_FOLDER.glob(f"posttrain-recv-{os.getpid()}-*"))


def test_trap_s52_a_lease_keeps_others_from_changing_the_server(server):
    lease = server.post("/lease/", {"holder": "trainer-1", "ttl_s": 30}).json()["lease_id"]
    taken = server.post("/lease/", {"holder": "trainer-2"})
    assert taken.status_code == 423 and taken.json()["holder"] == "trainer-1" and taken.json()["since"] > 0
    for path, body in [
        ("/begin_update/", {"version": 1}),
        ("/pause/", {}),
        ("/sleep/", {}),
        ("/end_update/", {}),
        ("/abort_update/", {}),
    ]:
        assert server.post(path, body).status_code == 423, path
    assert generates(server).status_code == 200
    mine = {"X-Lease": lease}
    assert server.post("/pause/", {}, headers=mine).status_code == 200
    assert server.post("/resume/", {}, headers=mine).status_code == 200
    assert server.post(f"/lease/{lease}/renew").status_code == 200
    assert server.post("/lease/wrong/renew").status_code == 423
    assert server.delete(f"/lease/{lease}").json() == {"released": True}
    assert server.post("/lease/", {"holder": "trainer-2"}).status_code == 200


def test_trap_s53_a_lapsed_lease_resumes_the_server_and_gives_its_update_up(server):
    lease = {"X-Lease": server.post("/lease/", {"holder": "t", "ttl_s": 0.4}).json()["lease_id"]}
    assert server.post("/pause/", {"mode": "keep"}, headers=lease).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(generates, server)
        time.sleep(0.2)
        assert not held.done()
        assert held.result(timeout=5).status_code == 200
    assert server.get("/info/").json()["lease_holder"] is None
    lease = {"X-Lease": server.post("/lease/", {"holder": "t", "ttl_s": 0.4}).json()["lease_id"]}
    assert server.post("/begin_update/", {"version": 1}, headers=lease).status_code == 200
    time.sleep(1.0)
    assert server.get("/info/").json()["updating"] is False
    assert generates(server).status_code == 409  # Half of an update may have been written.


def test_pauses_hold_generation_and_resume_is_idempotent(server):
    for mode in ("keep", "wait", "abort"):
        assert server.post("/pause/", {"mode": mode}).json()["paused"] is True
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            held = pool.submit(generates, server)
            time.sleep(0.15)
            assert not held.done() and server.get("/health/").status_code == 200
            assert server.post("/resume/").json() == {"paused": False}
            assert held.result().json()["completion_ids"] == [expected([1], 0, 1)]
        assert server.post("/resume/").status_code == 200
    assert server.post("/pause/", {"mode": "nap"}).status_code == 400


def test_from_sleep_at_level_2_only_a_whole_update_leads_back(server):
    assert server.post("/sleep/", {"level": 1}).json()["asleep"] == 1
    assert generates(server).status_code == 409
    assert server.post("/sleep/", {"level": 2}).status_code == 409
    assert begin(server, 1).status_code == 409
    assert server.post("/wake_up/").json()["asleep"] == 0
    assert generates(server).status_code == 200
    assert server.post("/sleep/", {"level": 2}).json()["weights_valid"] is False
    assert server.post("/wake_up/", {"tags": ["weights"]}).json()["asleep"] == 2
    push(server, WHOLE, 1)
    assert generates(server).status_code == 409
    assert server.post("/wake_up/", {"tags": ["kv_cache"]}).json()["asleep"] == 0
    assert generates(server).json()["weight_version"] == 1
    server.post("/sleep/", {"level": 2})
    server.post("/wake_up/")
    assert generates(server).status_code == 409


def test_trap_s5_the_prefix_cache_is_reset_in_an_update_and_its_refusal_is_an_error(server):
    resets = []
    server.backend().reset_cache = lambda: bool(resets.append(1))
    begin(server, 1)
    send(server, WHOLE, 1)
    response = server.post("/end_update/", {"version": 1})
    assert response.status_code == 409 and "refused" in response.text and resets == [1]
    assert generates(server).status_code == 409
    assert server.post("/reset_prefix_cache/").status_code == 500


def test_trap_s13_one_device_on_both_sides_is_refused_before_anybody_joins(server):
    body = {"host": "127.0.0.1", "port": 51216, "world_size": 2, "client_device_uuid": "GPU-0"}
    response = server.post("/init_communicator/", body)
    assert response.status_code == 409 and "GPU-0" in response.text and "different GPUs" in response.text
    assert (
        server.post("/init_communicator/", body | {"client_device_uuid": "GPU-9", "world_size": 5}).status_code == 409
    )


def test_an_engine_without_an_accelerator_says_so_and_how_to_push(server):
    body = {"host": "127.0.0.1", "port": 51216, "world_size": 2, "client_device_uuid": "GPU-9"}
    response = server.post("/init_communicator/", body)
    assert response.status_code == 501 and "/update_bucket/" in response.text
    param = {"name": "a", "dtype": "torch.float32", "shape": [2, 3]}
    assert server.post("/update_named_param/", param).status_code == 501
    assert server.post("/update_named_params/", {"version": 1, "params": [param]}).status_code == 501
    assert server.post("/close_communicator/").status_code == 200
    assert server.post("/close_communicator/").status_code == 200
    assert generates(server).status_code == 200


def test_an_engine_that_receives_broadcasts_is_updated_by_them_as_by_buckets(server):
    backend = server.backend()
    joined = []
    backend.join = lambda **spec: joined.append(spec)
    backend.receive = lambda parts, packed: [(p["name"], torch.full(p["shape"], 3.0)) for p in parts]
    body = {"host": "127.0.0.1", "port": 51216, "world_size": 2}
    assert server.post("/init_communicator/", body).status_code == 200
    assert joined == [{"host": "127.0.0.1", "port": 51216, "world_size": 2, "rank": 0}]
    for name, shape in (("a", [2, 3]), ("b", [4])):
        assert (
            server.post("/update_named_param/", {"name": name, "dtype": "torch.float32", "shape": shape}).json()[
                "loaded"
            ]
            == 1
        )
    assert server.post("/reset_prefix_cache/").json()["success"] is True
    assert backend.values == {"a": 18.0, "b": 12.0}
    assert generates(server).json()["weight_version"] == 1


def test_adapters_are_described_whole_and_refused_by_engines_that_take_none(server):
    good = {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}
    assert begin(server, 1, adapter={"r": 4}).status_code == 400
    assert begin(server, 1, adapter=good | {"r": 0}).status_code == 400
    response = begin(server, 1, adapter=good)
    assert response.status_code == 501 and "merge" in response.text
    assert server.get("/info/").json()["accepts_lora"] is False
    assert generates(server).status_code == 200


def test_a_group_of_server_and_client_carries_weights_on_cpus_too():
    """The client broadcasts over gloo what it would over NCCL; the server then says what the new weights say."""
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.rollouts.server.client import VLLMClient
    from posttrain.rollouts.server.weight_sync import push as send_all
    from posttrain.types import Request, Sampling
    from tests.conftest import build_model

    new = build_model(37, seed=1)
    with serving("tests.serve.engines:create_native") as server:
        client = VLLMClient(server.url, group_port=0)
        client.init_communicator()
        pairs = [(name, p.detach()) for name, p in new.named_parameters()]
        assert send_all(client, pairs, 1)["missing"] == []
        client.close_communicator()
        reply = client.generate([[5, 6, 7]], n=3, max_tokens=6, seed=2)
        client.close()
    wanted = NativeEngine(new, pad_token_id=0).generate([Request([5, 6, 7], 3)], Sampling(6, seed=2))
    assert reply["completion_ids"] == [r.token_ids for r in wanted]
    assert reply["weight_version"] == 1
