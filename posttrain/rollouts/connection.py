"""HTTP requests to a rollout server: time-outs on every call, typed errors, tries again only where that does no harm."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from posttrain.errors import (
    BadRequest,
    ConfigError,
    RolloutServerError,
    ServerBusy,
    ServerDied,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.rollouts.wire import API_KEY_VARIABLE, LEASE_HEADER, LOOPBACK

__all__ = ["CONNECT", "GENERATE_TIMEOUT", "PAUSE_TIMEOUT", "QUICK", "Connection"]

logger = logging.getLogger(__name__)

QUICK = (3.0, 5.0)  # Seconds to connect and to be answered: health, info.
CONNECT = 5.0
GENERATE_TIMEOUT, PAUSE_TIMEOUT = 600.0, 300.0
AGAIN = (502, 503, 504)  # Statuses after which the same request is sent again.
PIECE = (
    2**20
)  # Bytes of a body that are written at once: what is left of a piece is copied each time the socket is full.
BACK_OFF, LONGEST_WAIT = 0.5, 8.0  # Seconds before the second try, doubled at each further one up to the longest.
UPDATE_PHASES = {"begin_update": "begin", "update_bucket": "bucket", "end_update": "end", "init_communicator": "init"}


class Connection:
    """One server's address, its connections and the lease on it.

    Args:
        base_url: ``http://host:port``.
        api_key: Sent as bearer token; None: that of ``$POSTTRAIN_API_KEY``, which servers read too.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base_url={base_url!r} is no address of a server. It looks like 'http://10.0.0.5:8000'.")
        if parts.hostname == "0.0.0.0":  # An address to listen on, not one to connect to.
            self.base_url = self.base_url.replace("0.0.0.0", "127.0.0.1", 1)
        self.host = str(urlsplit(self.base_url).hostname)
        self.lease_id: str | None = None
        self.back_off = BACK_OFF
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        self.session = httpx2.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not self.is_local,  # A proxy of the environment knows no way back to this machine.
            follow_redirects=True,
        )

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, so that memory can be shared with it."""
        return self.host in LOOPBACK

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float | tuple[float, float] = GENERATE_TIMEOUT,
        retries: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One request and its answer, sent again up to ``retries`` times where nothing came, or a 502, 503 or 504.

        Args:
            method: ``GET``, ``POST`` or ``DELETE``.
            path: Below the server's address.
            body: Bytes, or what becomes JSON.
            timeout: Seconds to be answered, or a pair with the seconds to connect.
            retries: Further tries.
            headers: Beside the lease.

        Raises:
            ServerUnreachable: No connection, no answer in time, or one that breaks off.
            BadRequest: 400, 413 or 422.
            ServerBusy: 423 (another trainer's), 429 or 503 with no try left.
            WeightSyncError: 409, or any failure of an update.
            ServerDied: The server says that one of its workers has ended.
        """
        for tried in range(retries + 1):
            try:
                return self._once(method, path, body, timeout, headers)
            except (ServerUnreachable, ServerBusy, ServerDied) as error:
                if tried == retries or getattr(error, "timed_out", False) or getattr(error, "held", False):
                    raise
                wait = getattr(error, "retry_after", None) or min(self.back_off * 2**tried, LONGEST_WAIT)
                logger.warning("%s %s: %s Trying again in %.1f s.", method, path, str(error).splitlines()[0], wait)
                time.sleep(wait * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Any, timeout: Any, headers: Mapping[str, str] | None) -> dict:
        url = self.base_url + path
        content, extra = _encoded(body)
        extra |= dict(headers or {}) | ({LEASE_HEADER: self.lease_id} if self.lease_id else {})
        connect, answer = timeout if isinstance(timeout, tuple) else (CONNECT, timeout)
        limits = httpx2.Timeout(answer, connect=connect)
        try:
            response = self.session.request(method, url, timeout=limits, headers=extra, content=content)
            found = self._content(response) if response.status_code == 200 else None
        except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            text = f"{url} gave no answer within {answer:g} s."
            raise ServerUnreachable(text, timed_out=True, url=self.base_url) from error
        except (httpx2.HTTPError, OSError, ValueError) as error:  # A ValueError: what came is not JSON.
            broken = isinstance(error, ValueError | httpx2.RemoteProtocolError | httpx2.DecodingError)
            text = "broke off in the middle of its answer" if broken else "could not be reached"
            raise ServerUnreachable(f"{url} {text} ({_reason(error)}).", url=self.base_url) from error
        if response.status_code != 200:
            raise self._failure(path, response)
        return found if isinstance(found, dict) else {"result": found}

    def _content(self, response: httpx2.Response) -> Any:
        return response.json()

    def _failure(self, path: str, response: httpx2.Response) -> RolloutServerError:
        """The typed error of a status other than 200."""
        status = response.status_code
        try:
            said = response.json()
        except ValueError:
            said = {"error": response.text[:500]}
        inner = said.get("detail", said) if isinstance(said, dict) else {"error": str(said)}
        detail: dict[str, Any] = inner if isinstance(inner, dict) else {"error": str(inner)}
        error = detail.get("error", detail)
        reason = error.get("message", error) if isinstance(error, dict) else error
        detail = detail | (error if isinstance(error, dict) else {})
        text = f"{self.base_url}{path} answered {status}: {reason}"
        known: dict[str, Any] = {"url": self.base_url, "log_tail": str(detail.get("log_tail") or "")}
        phase = UPDATE_PHASES.get(path.strip("/"))
        if status == 423:
            return ServerBusy(f"{text}. Another trainer holds this server; give each its own.", held=True, **known)
        if phase is not None or status == 409:
            return WeightSyncError(text, phase=phase or "generate", version=detail.get("version"), **known)
        if status in (400, 413, 422):
            return BadRequest(text, index=detail.get("index"), **known)
        if detail.get("type") == "ServerDied" or "dead_rank" in detail:
            return ServerDied(text, rank=detail.get("rank", detail.get("dead_rank")), **known)
        if status in AGAIN or status == 429:
            after = response.headers.get("Retry-After", "")
            wait = float(after) if after.replace(".", "", 1).isdigit() else None
            return ServerBusy(text, retry_after=wait, **known)
        return RolloutServerError(text, **known)


def _encoded(body: Any) -> tuple[Any, dict[str, str]]:
    """A body as it is sent, with its headers: bytes in pieces, anything else as JSON."""
    if body is None:
        return None, {}
    if not isinstance(body, bytes | bytearray | memoryview):
        return json.dumps(body, allow_nan=False).encode(), {"Content-Type": "application/json"}
    whole = memoryview(body)
    pieces = [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]
    return pieces, {"Content-Length": str(len(whole))}


def _reason(error: BaseException) -> str:
    """The innermost cause, on one line."""
    return str(getattr(error, "args", [error])[0] if getattr(error, "args", None) else error).replace("\n", " ")[:200]
