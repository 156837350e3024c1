"""New weights on their way: begun, received in buckets or broadcasts, confirmed by their version, or given up."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.rollouts.server.replies import (
    LOOPBACK,
    RENDEZVOUS_S,
    SHARED_FOLDER,
    UPDATE_TIMEOUT_S,
    checked_adapter,
    shared_path,
)
from posttrain.serve.asking import BeginUpdate, Bucket, InitCommunicator, NamedParam, bad
from posttrain.serve.service import CONTROL_S, RolloutService
from posttrain.serve.state import Refusal, Update, awake
from posttrain.serve.worker import WorkerFailure, gathered

__all__ = [
    "abort_update", "begin_update", "bucket_bytes", "bucket_file", "close_communicator", "drop_update", "end_update",
    "init_communicator", "receive", "reset_prefix_cache",
]  # fmt: skip

logger = logging.getLogger(__name__)

_numbers = itertools.count()


def _conflict(phase: str, message: str, **extra: Any) -> Refusal:
    return Refusal(409, "WeightSyncError", message, phase=phase, **extra)


# Updates ---------------------------------------------------------------------------------------------------------------


async def begin_update(service: RolloutService, body: BeginUpdate) -> dict[str, Any]:
    """Take the exclusive lock: requests that run end first (or are frozen by a pause), others wait.

    Raises:
        Refusal: 409 an old version, or another update on its way; 504 requests did not end in time.
    """
    state = service.state
    try:
        adapter = checked_adapter(body.adapter)
    except ConfigError as error:
        raise bad(str(error)) from error
    if state.update is not None:
        raise _conflict(
            "begin", f"version {state.update.version} is on its way; end or abort it.", current=state.weight_version
        )
    if body.version <= state.weight_version:
        raise _conflict(
            "begin", f"version {body.version} came, and the server has {state.weight_version}: versions only rise.",
            current=state.weight_version, version=state.weight_version,
        )  # fmt: skip
    if state.asleep and "weights" not in state.awake_tags:
        raise _conflict(
            "begin", f"the server sleeps at level {state.asleep}: wake its weights first.", asleep=state.asleep
        )
    update = state.update = Update(body.version, body.names, adapter)
    began = time.monotonic()
    if state.paused != "keep" and not await state.drained(service.config.drain_timeout):
        state.update = None
        await state.tell()
        raise Refusal(
            504, "WeightSyncError", f"{state.running} requests did not end within {service.config.drain_timeout:g} s. Pause the "
            "server with mode abort or keep, or raise --drain_timeout.", phase="begin",
        )  # fmt: skip
    drained = time.monotonic() - began
    update.was_valid, state.weights_valid = state.weights_valid, False
    try:
        await service.ranks.each("begin_update", CONTROL_S, adapter=adapter)
    except WorkerFailure as error:
        state.update = None
        # Nothing was written yet; what had begun to change says so itself.
        state.weights_valid = update.was_valid and error.failure.status in (409, 501)
        await state.tell()
        raise
    update.last = awake()
    return {"version": body.version, "drained_s": round(drained, 3)}


def _current(service: RolloutService, version: int | None, phase: str) -> Update:
    update = service.state.update
    if update is None:
        raise _conflict(phase, "no update was begun; call /begin_update/.", current=service.state.weight_version)
    if version is not None and version != update.version:
        raise _conflict(
            phase, f"version {update.version} was begun, and {phase} came for {version}.", current=update.version
        )
    if update.failed:
        raise _conflict(phase, f"this update cannot end well any more: {update.failed}. Abort it and push again.")
    update.last = awake()
    return update


async def bucket_file(service: RolloutService, body: Bucket, peer: str | None) -> dict[str, Any]:
    """Load a bucket that lies in shared memory; only for clients on this machine.

    Raises:
        Refusal: 403 from elsewhere; 400 another path; 409 another checksum, or no update.
    """
    update = _current(service, body.version, "bucket")
    if peer not in (*LOOPBACK, "testclient"):
        raise Refusal(403, "Forbidden", "buckets by path are for clients on this machine; send safetensors bytes.")
    try:
        path = shared_path(body.path)
    except ConfigError as error:
        raise bad(str(error)) from error
    return await _load(service, update, "bucket", path=str(path), size=body.size, checksum=body.checksum, again=True)


async def bucket_bytes(
    service: RolloutService, version: int, checksum: str, stream: AsyncIterator[bytes]
) -> dict[str, Any]:
    """Load a bucket that came as bytes: they pass through shared memory, so that every rank reads the one copy.

    Raises:
        Refusal: 409 another checksum, or no update; 413 too large.
    """
    update = _current(service, version, "bucket")
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"posttrain-recv-{os.getpid()}-{next(_numbers)}.safetensors"
    most, size = int(service.config.max_bucket_mb * 2**20), 0
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            async for chunk in stream:
                size += len(chunk)
                if size > most:
                    raise Refusal(
                        413,
                        "TooLarge",
                        f"a bucket above --max_bucket_mb {service.config.max_bucket_mb:g}.",
                        phase="bucket",
                    )
                file.write(chunk)
        if size == 0:
            raise bad("an empty bucket came.", phase="bucket")
        service.metrics.count("update_bytes", size)
        return await _load(service, update, "bucket", path=str(path), size=size, checksum=checksum, again=False)
    except BaseException as error:
        update.failed = update.failed or f"a bucket was lost ({error or type(error).__name__})"
        raise
    finally:
        path.unlink(missing_ok=True)


async def _load(service: RolloutService, update: Update, method: str, **args: Any) -> dict[str, Any]:
    try:
        async with update.lock:  # In the order of arrival, all ranks alike.
            answers = await service.ranks.each(method, UPDATE_TIMEOUT_S, **args)
    except (WorkerFailure, TimeoutError) as error:
        update.failed = str(error) or f"a worker did not load it within {UPDATE_TIMEOUT_S:g} s"
        raise
    answer = answers[0]
    unexpected = set(answer["unexpected"])
    update.received.update(name for name in answer["names"] if name not in unexpected)
    update.unexpected += answer["unexpected"]
    update.last = awake()
    return {"loaded": answer["loaded"], "unexpected": answer["unexpected"]}


async def end_update(service: RolloutService, version: int | None) -> dict[str, Any]:
    """Confirm an update: count, forget old keys and values, release.

    Raises:
        Refusal: 409 with ``missing``: announced names did not come, or weights that were not whole before still are not.
    """
    state = service.state
    update = _current(service, version, "end")
    announced = update.names_missing()
    if announced:
        await drop_update(service, f"{len(announced)} announced names did not come", "incomplete")
        raise _conflict(
            "end", f"{len(announced)} announced names did not come: {', '.join(announced[:5])}.", missing=announced,
            unexpected=update.unexpected, version=update.version,
        )  # fmt: skip
    try:
        answers = await service.ranks.each("end_update", CONTROL_S, version=update.version)
    except (WorkerFailure, TimeoutError) as error:
        await drop_update(service, str(error), "failed")
        raise
    missing = sorted({name for found in answers for name in found})
    if missing and not update.was_valid:
        await drop_update(service, "a part of weights that were not whole", "incomplete")
        raise _conflict(
            "end", f"the weights were not whole before, and {len(missing)} did not come: {', '.join(missing[:5])}.",
            missing=missing, unexpected=update.unexpected, version=update.version,
        )  # fmt: skip
    state.weight_version, state.weights_valid, state.update = update.version, True, None
    service.metrics.count("updates", result="done")
    if update.unexpected:
        logger.warning("version %d: the engine does not know %s.", update.version, ", ".join(update.unexpected[:5]))
    await state.tell()
    return {
        "version": update.version,
        "loaded": len(update.received),
        "missing": missing,
        "unexpected": sorted(set(update.unexpected)),
    }


async def abort_update(service: RolloutService, version: int | None) -> dict[str, Any]:
    """Give an update up; generation is refused until a whole one has come. Fine without an update."""
    update = service.state.update
    if update is not None and version in (None, update.version):
        await drop_update(service, "aborted by the client", "aborted")
    return {"version": service.state.weight_version, "weights_valid": service.state.weights_valid}


async def drop_update(service: RolloutService, why: str, result: str) -> None:
    """End an update without success: the weights are not whole."""
    state = service.state
    logger.warning("update to version %d failed: %s.", state.update.version if state.update else 0, why)
    state.update, state.weights_valid = None, False
    if state.paused == "keep":  # What is held would go on under half of an update: it ends with what is written.
        with contextlib.suppress(WorkerFailure, TimeoutError):
            await service.ranks.each("abort_all", CONTROL_S)
    service.metrics.count("updates", result=result)
    await state.tell()


# The weight-update group -----------------------------------------------------------------------------------------------


async def init_communicator(service: RolloutService, body: InitCommunicator) -> dict[str, Any]:
    """All ranks join the client's group; answered when they have.

    Raises:
        Refusal: 409 before anybody joins, where client and server are on one device or disagree about the size; 501 where
            the engine receives no broadcasts.
    """
    uuids = {uuid: rank.rank for rank in service.ranks.all for uuid in rank.info.get("device_uuids", [])}
    if body.client_device_uuid is not None and body.client_device_uuid in uuids:
        raise _conflict(
            "init", f"client and rank {uuids[body.client_device_uuid]} are both on device {body.client_device_uuid}, which a "
            "group cannot span. Put them on different GPUs (CUDA_VISIBLE_DEVICES), or push without a group.",
        )  # fmt: skip
    size = service.config.tensor_parallel_size * len(service.ranks.all)
    if body.world_size != size + 1:
        raise _conflict("init", f"world_size={body.world_size}, and {size} ranks with the client are {size + 1}.")
    calls = (
        rank.call("join", RENDEZVOUS_S, host=body.host, port=body.port, world_size=body.world_size, rank=rank.rank)
        for rank in service.ranks.all
    )
    try:
        await gathered(calls)
    except TimeoutError as error:
        text = f"not all ranks joined within {RENDEZVOUS_S:g} s."
        raise Refusal(504, "WeightSyncError", text, phase="init") from error
    return {"message": "all ranks have joined"}


async def receive(
    service: RolloutService, params: list[NamedParam], version: int | None, *, packed: bool = True
) -> dict[str, Any]:
    """Receive one broadcast and load it; without an update on its way, one begins by itself (TRL's protocol)."""
    if service.state.update is None:
        number = service.state.weight_version + 1 if version is None else version
        await begin_update(service, BeginUpdate(version=number))
        assert service.state.update is not None
        service.state.update.implicit = True
    update = _current(service, version, "bucket")
    parts = [{"name": p.name, "dtype": p.dtype, "shape": p.shape} for p in params]
    try:
        return await _load(service, update, "receive", parts=parts, packed=packed) | {"missing": []}
    except WorkerFailure as error:
        if error.failure.status == 501:  # Nobody had joined: nothing was written.
            service.state.weights_valid, service.state.update = update.was_valid, None
            await service.state.tell()
        raise


async def close_communicator(service: RolloutService) -> dict[str, Any]:
    """Leave the group; fine without one."""
    await service.ranks.each("leave", CONTROL_S)
    return {"message": "left"}


async def reset_prefix_cache(service: RolloutService) -> dict[str, Any]:
    """Forget keys and values of earlier requests; ends an update that began by itself.

    Raises:
        Refusal: 409 while requests run; 500 where a rank refused.
    """
    if service.state.update is not None and service.state.update.implicit:
        await end_update(service, None)
        return {"success": True, "message": f"version {service.state.weight_version} is in use"}
    if service.state.running:
        raise Refusal(409, "Busy", f"{service.state.running} requests run; pause the server first.", success=False)
    done = await service.ranks.each("reset_cache", CONTROL_S)
    if not all(done):
        raise Refusal(500, "CacheNotReset", f"rank {done.index(False)} refused.", success=False)
    return {"success": True, "message": "keys and values were forgotten"}
