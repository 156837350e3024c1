"""Weights on their way to a server of this machine: through memory that is kept from one push to the next."""

import errno

import pytest
import torch

from posttrain.rollouts.server import weight_sync
from posttrain.rollouts.server.client import VLLMClient
from posttrain.rollouts.server.weight_sync import SHARED_FOLDER, Pusher
from tests.conftest import build_model
from tests.rollouts.stub_server import StubServer

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
        assert pusher.push(weights_of(model), {client: version}) == {client: None}
        assert arrived(stub, model)
        found.append([pusher.file(number) for number in range(2)])
    assert found[0] == found[1] and all(path.exists() for path in found[0])
    pusher.close()
    assert not any(path.exists() for path in found[0])
    client.close()


def test_where_shared_memory_has_no_room_weights_go_through_http(stub, monkeypatch, caplog):
    def full(bucket, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_sync, "write_tensors", full)
    client, model = VLLMClient(stub.url), build_model(37)
    pusher = Pusher(bucket_bytes=2000, shared=True)
    assert pusher.push(weights_of(model), {client: 1}) == {client: None}
    assert client.weight_version() == 1 and arrived(stub, model)
    assert "no room" in caplog.text and caplog.text.count("no room") == 1
    pusher.close()
    client.close()
