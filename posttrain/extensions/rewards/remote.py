"""`post_json`: send JSON to a judge or a sandbox service, and retry while the server is busy or starting."""

from __future__ import annotations

import functools
import logging
import os
from time import sleep
from typing import Any

import httpx2
import tenacity

from posttrain.errors import RewardError
from posttrain.integrations.network import CONNECTIONS, network_advice

logger = logging.getLogger(__name__)

# HTTP status codes after which a request is retried, because the server is busy, starting or overloaded.
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
BUSY = "send fewer concurrent requests (concurrency), increase retries, or increase the server's request limit."
BROKEN = "check the server's log. If the server is still starting, increase retries."
# Maximum number of seconds to wait before a retry, even if the server's Retry-After header requests a longer wait.
LONGEST_WAIT = 60.0


class _Busy(Exception):
    """Error after which the request is retried. ``after`` is the wait in seconds that the server requested. ``fix`` is the
    advice for the user.
    """

    def __init__(self, what: str, fix: str, after: float | None = None) -> None:
        super().__init__(what)
        self.fix, self.after = fix, after


@functools.lru_cache(maxsize=1)
def _client(pid: int) -> httpx2.Client:
    """Return the HTTP client of process ``pid``. It keeps connections open. After a fork, the child process needs a new
    client instead of its parent's client.
    """
    return httpx2.Client(limits=CONNECTIONS)


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
    """Send a POST request with a JSON body, and return the response if its status is below 300.

    Args:
        url: URL to which the request is sent.
        body: Content of the request, which is sent as JSON.
        who: Name of the server in error messages, e.g. ``"judge"``.
        timeout: Number of seconds to wait for a response.
        retries: Number of further attempts after a failed request.
        backoff: Maximum wait in seconds before the first retry. The maximum doubles with each retry. The wait is
            sampled between half the maximum and the maximum.
        api_key: API key, which is sent as a bearer token. None: no token.

    Raises:
        RewardError: The server cannot be reached, or it refuses the request. The message contains the URL and the number
            of attempts.
    """
    growing = tenacity.wait_exponential(backoff / 2, max=LONGEST_WAIT / 2)

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, _Busy) and error.after is not None:
            return min(error.after, LONGEST_WAIT)
        half = growing(state)
        return half + tenacity.wait_random(0, half)(state)

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_Busy),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=pause,
        sleep=sleep,
        before_sleep=tenacity.before_sleep_log(logger, logging.INFO),
    )
    try:
        return attempts(_post, url, body, {"Authorization": f"Bearer {api_key}"} if api_key else {}, who, timeout)
    except tenacity.RetryError as error:
        attempt = error.last_attempt
        busy: Any = attempt.exception()
        raise RewardError(
            f"the {who} at {url} did not answer in {attempt.attempt_number} attempts (timeout={timeout:g} s each): {busy}. "
            f"Fix: {busy.fix}"
        ) from busy


def _post(url: str, body: dict[str, Any], headers: dict[str, str], who: str, timeout: float) -> httpx2.Response:
    try:
        response = _client(os.getpid()).post(url, json=body, headers=headers, timeout=timeout)
    except httpx2.TimeoutException as error:
        raise _Busy(f"no answer within {timeout:g} s", network_advice(error, url)) from error
    except httpx2.TransportError as error:
        raise _Busy(f"{type(error).__name__}: {error}", network_advice(error, url)) from error
    if response.status_code < 300:
        return response
    what = f"HTTP {response.status_code} {response.reason_phrase}: {response.text.strip()[:200]}"
    if response.status_code in RETRIED:
        after = response.headers.get("Retry-After", "")
        # Use a Retry-After header only if it is a number of seconds. Dates are ignored.
        fix = BUSY if response.status_code == 429 else BROKEN
        raise _Busy(what, fix, float(after) if after.replace(".", "", 1).isdigit() else None)
    fix = "check the API key" if response.status_code in (401, 403) else "check the URL and the model's name"
    raise RewardError(f"the {who} at {url} refused the request: {what}. Fix: {fix}.")
