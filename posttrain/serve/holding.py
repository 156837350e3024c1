"""Pauses, sleep, and what a trainer leaves behind when it dies."""

from __future__ import annotations

import logging
from typing import Any

from posttrain.rollouts.server.replies import UPDATE_TIMEOUT_S
from posttrain.serve.service import CONTROL_S, RolloutService
from posttrain.serve.state import Refusal, awake
from posttrain.serve.updating import drop_update

__all__ = ["clear_up", "expire", "pause", "resume", "sleep", "wake_up"]

logger = logging.getLogger(__name__)

WAKE_TAGS = {"weights", "kv_cache"}


async def pause(service: RolloutService, mode: str) -> dict[str, Any]:
    """Hold generation: what runs is kept as it is, ended with what is written, or waited for.

    Raises:
        Refusal: 504 with ``wait``, requests did not end in time; generation is held all the same.
    """
    state = service.state
    if state.paused == "keep" and mode != "keep":
        await service.ranks.each("freeze", CONTROL_S, on=False)
    state.paused = mode
    if mode == "keep":
        await service.ranks.each("freeze", CONTROL_S, on=True)
    elif mode == "abort":
        await service.ranks.each("abort_all", CONTROL_S)
    if mode != "keep" and not await state.drained(service.config.drain_timeout):
        raise Refusal(504, "Busy", f"{state.running} requests still run after {service.config.drain_timeout:g} s.")
    return {"paused": True, "mode": mode, "running": state.running}


async def resume(service: RolloutService) -> dict[str, Any]:
    """Go on; fine without a pause."""
    if service.state.paused == "keep":
        await service.ranks.each("freeze", CONTROL_S, on=False)
    service.state.paused = None
    await service.state.tell()
    return {"paused": False}


async def sleep(service: RolloutService, level: int) -> dict[str, Any]:
    """Give memory back. From level 2 only a whole update leads back to generation.

    Raises:
        Refusal: 409 asleep at another level, or an update on its way; 504 requests did not end in time.
    """
    state = service.state
    if state.update is not None:
        raise Refusal(409, "Updating", f"version {state.update.version} is on its way.")
    if state.asleep not in (0, level):
        raise Refusal(
            409,
            "Asleep",
            f"the server sleeps at level {state.asleep}; wake it before level {level}.",
            asleep=state.asleep,
        )
    if state.asleep == 0:
        if not service.info_of_engine().get("sleeps"):
            raise Refusal(501, "Unsupported", f"the {service.engine} engine does not sleep.")
        state.asleep, state.awake_tags = level, set()
        if not await state.drained(service.config.drain_timeout):
            state.asleep = 0
            raise Refusal(504, "Busy", f"{state.running} requests still run after {service.config.drain_timeout:g} s.")
        state.weights_valid = state.weights_valid and level == 1
        await service.ranks.each("sleep", CONTROL_S, level=level)
    return _sleep_state(service)


async def wake_up(service: RolloutService, tags: list[str] | None) -> dict[str, Any]:
    """Take memory again: all of it, or what the tags name; awake when all is."""
    state = service.state
    if state.asleep:
        wanted = set(tags) if tags else set(WAKE_TAGS)
        new = sorted(wanted - state.awake_tags)
        if new:
            await service.ranks.each("wake", CONTROL_S, tags=new)
        state.awake_tags |= wanted
        if state.awake_tags >= WAKE_TAGS:
            state.asleep, state.awake_tags = 0, set()
            await state.tell()
    return _sleep_state(service)


def _sleep_state(service: RolloutService) -> dict[str, Any]:
    state = service.state
    return {"asleep": state.asleep, "awake": sorted(state.awake_tags), "weights_valid": state.weights_valid}


async def expire(service: RolloutService) -> None:
    """A lease that lapsed frees the server: its update is given up, its pause and its sleep at level 1 end."""
    state = service.state
    update = state.update
    if update is not None and awake() - update.last > UPDATE_TIMEOUT_S and not update.lock.locked():
        await drop_update(service, f"silent for {UPDATE_TIMEOUT_S:g} s", "lapsed")
    lease = state.lapsed()
    if lease is None:
        return
    logger.warning("the lease of %s lapsed: nothing was heard for %g s.", lease.holder, lease.ttl_s)
    await clear_up(service, lease.holder)


async def clear_up(service: RolloutService, holder: str) -> None:
    """End what the former holder of the lease had begun."""
    state = service.state
    if state.update is not None:
        await drop_update(service, f"{holder} is gone", "lapsed")
    if state.paused is not None:
        await resume(service)
        logger.warning("generation goes on, which %s had paused.", holder)
    if state.asleep == 1:
        await wake_up(service, None)
