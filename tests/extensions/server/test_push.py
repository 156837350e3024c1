"""Weights on their way to a server of this machine: through memory that is kept from one push to the next."""

import errno

import pytest
import torch

from posttrain.extensions.server import weight_sync
from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.weight_sync import Pusher
from posttrain.rollouts.shared_memory import SHARED_FOLDER
from tests.conftest import build_model
from tests.extensions.server.stub_server import StubServer

pytestmark = pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="no shared memory here")


@pytest.fixture
def stub():
    server = StubServer(build_model(37, seed=9))
    yield server
    server.close()


def arrived(stub, model):
    own = dict(stub.model.named_parameters())
    return all(torch.equal(own[name], p) for name, p in model.named_parameters())


def weights_of(model):
    return [(name, p.detach()) for name, p in model.named_parameters()]


def test_memory_is_kept_from_push_to_push_and_none_is_left_behind(stub):
    client, pusher, found = VLLMClient(stub.url), Pusher(bucket_bytes=20_000), []
    for version in (1, 2):
        model = build_model(37, seed=version)
        assert pusher.push(weights_of(model), [client], f"x-{version}") == {client: None}
        assert arrived(stub, model)
        found.append([pusher.file(number) for number in range(2)])
    assert found[0] == found[1] and all(path.exists() for path in found[0])
    pusher.close()
    assert not any(path.exists() for path in found[0])
    client.close()


def test_every_call_of_an_update_may_take_what_sync_timeout_says(stub):
    """A pause waits for completions under way, which may be long."""
    client, pusher, limits = VLLMClient(stub.url, sync_timeout=1234.0), Pusher(), {}
    once = client._once
    client._once = lambda method, path, body, timeout: (
        limits.update({path: timeout}) or once(method, path, body, timeout)
    )
    assert pusher.push(weights_of(build_model(37)), [client], "x-1") == {client: None}
    waiting = ("/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update")
    assert {path: limits[path] for path in waiting} == dict.fromkeys(waiting, 1234.0)
    pusher.close()
    client.close()


def test_where_shared_memory_has_no_room_the_push_fails_and_says_what_to_do(stub, monkeypatch):
    def full(bucket, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_sync, "write_tensors", full)
    client, pusher = VLLMClient(stub.url), Pusher(bucket_bytes=2000)
    (error,) = pusher.push(weights_of(build_model(37)), [client], "x-1").values()
    assert error.phase == "bucket" and "--shm-size" in str(error)
    assert stub.version == "incomplete" and not stub.paused
    pusher.close()
    client.close()
