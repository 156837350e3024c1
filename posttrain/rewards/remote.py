"""JSON posted to a judge or a sandbox service, again while the server is busy or starting."""

from __future__ import annotations

import functools
import logging
import os
import random
from time import monotonic, sleep
from typing import Any

import httpx2

from posttrain.errors import RewardError

__all__ = ["post_json"]

logger = logging.getLogger(__name__)

# Busy, starting or overloaded; any other refusal is final.
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
# Seconds, whatever pause a server asks for.
LONGEST_WAIT = 60.0


class _Busy(Exception):
    """A failure worth another attempt; ``after`` is the pause in seconds that the server asked for."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


@functools.lru_cache(maxsize=1)
def _client(pid: int) -> httpx2.Client:
    """One client with its kept connections per process; a forked child must not use its parent's."""
    return httpx2.Client(limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64))


def post_json(
    url: str,
    body: dict[str, Any],
    *,
    who: str,
    timeout: float = 60.0,
    retries: int = 4,
    backoff: float = 0.5,
    api_key: str | None = None,
) -> httpx2.Response:
    """The answer to one POST request; its status is below 300.

    Args:
        url: Where to post.
        body: Sent as JSON.
        who: Names the server in errors: ``"judge"``.
        timeout: Seconds one answer may take.
        retries: Attempts after the first.
        backoff: Seconds before the first retry; doubled each time, and drawn from its upper half.
        api_key: Sent as a bearer token; None sends none.

    Raises:
        RewardError: The server is down or refuses; names the URL and the number of attempts.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    started = monotonic()
    for attempt in range(retries + 1):
        try:
            return _post(url, body, headers, who, timeout)
        except _Busy as busy:
            if attempt == retries:
                raise RewardError(
                    f"the {who} at {url} did not answer in {attempt + 1} attempts over "
                    f"{monotonic() - started:.1f} s (timeout {timeout:g} s): {busy}. Is the server running and "
                    "reachable? Fix: start it, check its URL, or raise timeout and retries."
                ) from busy
            delay = busy.after if busy.after is not None else backoff * 2**attempt * random.uniform(0.5, 1.0)
            logger.info("%s at %s: %s; next attempt in %.1f s", who, url, busy, delay)
            sleep(min(delay, LONGEST_WAIT))
    raise AssertionError("unreachable")


def _post(url: str, body: dict[str, Any], headers: dict[str, str], who: str, timeout: float) -> httpx2.Response:
    try:
        response = _client(os.getpid()).post(url, json=body, headers=headers, timeout=timeout)
    except httpx2.TimeoutException as error:
        raise _Busy(f"no answer within {timeout:g} s") from error
    except httpx2.TransportError as error:
        raise _Busy(f"{type(error).__name__}: {error}") from error
    if response.status_code < 300:
        return response
    what = f"HTTP {response.status_code} {response.reason_phrase}: {response.text.strip()[:200]}"
    if response.status_code in RETRIED:
        raise _Busy(what, _seconds(response.headers.get("Retry-After")))
    fix = "check the API key" if response.status_code in (401, 403) else "check the URL and the model's name"
    raise RewardError(f"the {who} at {url} refused the request: {what}. Fix: {fix}.")


def _seconds(header: str | None) -> float | None:
    """The pause in a ``Retry-After`` header; None for a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
