"""A client of chat servers that speak OpenAI's protocol: time-outs, retries, many requests at once, clear errors."""

from __future__ import annotations

import json
import logging
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import ConfigError, RewardError

__all__ = ["ChatClient"]

logger = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)  # Busy, starting or overloaded; any other refusal is for good.
LONGEST_WAIT = 60.0  # Seconds, whatever a server asks for.


class _Busy(Exception):
    """Worth another try; ``after`` is what the server asked to wait, in seconds."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


@dataclass
class ChatClient:
    """Asks ``<base_url>/chat/completions``.

    Attributes:
        base_url: Up to and with the version: ``http://localhost:8000/v1``.
        model: The name the server knows it by.
        api_key: Sent as a bearer token; None sends none.
        timeout: Seconds one answer may take.
        retries: Attempts after the first.
        backoff: Seconds before the first retry; doubled each time, and drawn from its upper half.
        concurrency: Requests under way at once.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    retries: int = 4
    backoff: float = 0.5
    concurrency: int = 16

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r} must begin with http:// or https://.")
        for name in ("timeout", "concurrency"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
        if self.retries < 0:
            raise ConfigError(f"retries={self.retries} must be 0 or more.")

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def ask_all(self, conversations: Sequence[list[dict[str, str]]], **options: Any) -> list[dict[str, Any]]:
        """The first choice of each answer, in order.

        Args:
            conversations: One list of messages a request.
            options: Further fields of the request (``max_tokens``, ``temperature``); None leaves one out.

        Raises:
            RewardError: The server is down, refuses, or answers something else; names the URL and how often it was tried.
        """
        if not conversations:
            return []
        with ThreadPoolExecutor(min(self.concurrency, len(conversations)), "judge") as pool:
            futures = [pool.submit(self.ask, messages, **options) for messages in conversations]
            done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()  # One failure is enough; do not ask a broken server another thousand times.
            for future in done:
                future.result()
        return [future.result() for future in futures]

    def ask(self, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        """The first choice of one answer; see `ask_all`."""
        body = {"model": self.model, "messages": messages, **options}
        payload = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
        started, pause = time.monotonic(), self.backoff
        for attempt in range(self.retries + 1):
            try:
                return self._choice(self._send(payload))
            except _Busy as busy:
                if attempt == self.retries:
                    raise RewardError(
                        f"the judge at {self.url} did not answer in {attempt + 1} attempts over "
                        f"{time.monotonic() - started:.1f} s (model {self.model!r}, timeout {self.timeout:g} s): {busy}. Is the "
                        "server running and reachable? Start it, check base_url, or raise timeout and retries."
                    ) from busy
                delay = busy.after if busy.after is not None else pause * random.uniform(0.5, 1.0)
                logger.info("judge at %s: %s; next attempt in %.1f s", self.url, busy, delay)
                time.sleep(min(delay, LONGEST_WAIT))
                pause *= 2
        raise AssertionError("unreachable")

    def _send(self, payload: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url, payload, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            said = error.read(400).decode(errors="replace").strip()
            what = f"HTTP {error.code} {error.reason}: {said[:200]}"
            if error.code in RETRIED:
                raise _Busy(what, _seconds(error.headers.get("Retry-After"))) from error
            hint = " Check the API key." if error.code in (401, 403) else " Check base_url and the model's name."
            raise RewardError(
                f"the judge at {self.url} refused the request (model {self.model!r}): {what}.{hint}"
            ) from error
        except TimeoutError as error:
            raise _Busy(f"no answer within {self.timeout:g} s") from error
        except urllib.error.URLError as error:
            raise _Busy(str(error.reason)) from error
        except (ConnectionError, OSError) as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error

    def _choice(self, answer: bytes) -> dict[str, Any]:
        try:
            choice = json.loads(answer)["choices"][0]
            assert isinstance(choice["message"], dict)
        except (ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
            raise RewardError(
                f"the judge at {self.url} answered something that is no chat completion: {answer[:200]!r}. Is base_url that of "
                "an OpenAI-compatible server, with its version (.../v1)?"
            ) from error
        return choice


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None  # A date; our own pause will do.
