"""`VLLMClient`: a rollout server over HTTP, every call with a time-out, retried only where that cannot do harm."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
from torch import Tensor, nn

from posttrain.errors import (
    BadRequest,
    ConfigError,
    RolloutServerError,
    ServerBusy,
    ServerDied,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.rollouts.server.replies import (
    API_KEY_VARIABLE,
    LEASE_HEADER,
    LEASE_TTL_S,
    LOOPBACK,
    UPDATE_TIMEOUT_S,
)

__all__ = [
    "CONNECT",
    "GENERATE_TIMEOUT",
    "PAUSE_TIMEOUT",
    "QUICK",
    "Connection",
    "VLLMClient",
]

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


SECONDS_PER_TOKEN = 0.02  # Of a request's time-out, beyond 30 s.


class VLLMClient(Connection):
    """Talks to one rollout server (``posttrain serve``).

    Args:
        base_url: ``http://host:port``; None builds it from ``host`` and ``server_port``.
        host: Where the server listens; ``0.0.0.0`` is this machine.
        server_port: Its port.
        group_port: Port of the weight-update group on accelerators; 0 takes a free one.
        connection_timeout: Seconds to wait for the server to be healthy; 0 asks once.
        request_timeout: Seconds a generation may take; None: 600, or 30 and 20 ms a requested token where that is more.
        sync_timeout: Seconds one call of a weight update may take.
        api_key: Sent as bearer token.

    Raises:
        ServerUnreachable: No healthy answer within ``connection_timeout``.

    >>> client = VLLMClient("http://127.0.0.1:8000", connection_timeout=60)  # doctest: +SKIP
    >>> client.generate([[1, 2, 3]], n=4, max_tokens=16)["completion_ids"]  # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "0.0.0.0",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        *,
        request_timeout: float | None = None,
        sync_timeout: float = UPDATE_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        super().__init__(base_url or f"http://{host}:{server_port}", api_key=api_key)
        self.group_port = group_port
        self.request_timeout, self.sync_timeout = request_timeout, sync_timeout
        self.communicator: Any = None
        self.pusher: Any = None
        self.check_server(connection_timeout)

    # What the server is ----------------------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server says that it is healthy; any other answer counts as none.

        Raises:
            ServerUnreachable: Not within ``total_timeout`` seconds; holds the last answer.
        """
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self.health()
                return
            except RolloutServerError as error:
                last = error
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerUnreachable(
                    f"no healthy rollout server at {self.base_url} within {total_timeout:g} s. The last answer: {last} "
                    "Start one with 'posttrain serve --model MODEL', or correct vllm_server_base_url.",
                    url=self.base_url,
                ) from last
            time.sleep(min(retry_interval, left))

    def health(self, deep: bool = False) -> dict[str, Any]:
        """What the server says of itself; an error where it is not healthy.

        One that lacks nothing but whole weights (an update failed, or its last trainer died in one) is there to be pushed to.
        """
        try:
            return self.call("GET", "/health/?deep=1" if deep else "/health/", timeout=(3.0, 30.0) if deep else QUICK)
        except ServerBusy:
            with contextlib.suppress(RolloutServerError):
                if self.call("GET", "/info/", timeout=QUICK).get("needs_weights"):
                    return {"status": "needs weights"}
            raise

    def info(self) -> dict[str, Any]:
        """Model, limits, weight version and counters."""
        return self.call("GET", "/info/", timeout=QUICK, retries=2)

    def get_world_size(self) -> int:
        """Workers that take part in a weight update."""
        return int(self.call("GET", "/get_world_size/", timeout=QUICK, retries=2)["world_size"])

    # Generation ------------------------------------------------------------------------------------------------------

    def time_for(self, tokens: int) -> float:
        """Seconds a generation of this many tokens may take."""
        return self.request_timeout or max(GENERATE_TIMEOUT, 30 + SECONDS_PER_TOKEN * tokens)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        *,
        n: int = 1,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        request_id: str | None = None,
        retries: int = 3,
        **fields: Any,
    ) -> dict[str, Any]:
        """Sample ``n`` completions a prompt.

        Args:
            prompts: Texts or token ids.
            images: For each prompt its images, or None.
            n: Completions a prompt.
            max_tokens: Most tokens of a completion.
            logprobs: 0: of the sampled token; k: of the k most likely too; None: none.
            request_id: A repeated request of the same id gets the same answer; None draws one.
            retries: Further tries where nothing came, or a 502, 503 or 504.
            fields: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``seed``, ``raw_logprobs``,
                ``structured_outputs_regex``, ``generation_kwargs``.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``logprobs``, ``logprob_token_ids``, ``finish_reasons``, ``weight_version``.
        """
        body = {"prompts": [p if isinstance(p, str) else list(p) for p in prompts], "n": n, "max_tokens": max_tokens}
        body |= {"logprobs": logprobs, "request_id": request_id or uuid.uuid4().hex, "top_k": 0} | fields
        if images is not None:
            body["images"] = [None if one is None else [_png(image) for image in one] for one in images]
        timeout = self.time_for(len(body["prompts"]) * n * max_tokens)
        return self.call("POST", "/generate/", body, timeout=timeout, retries=retries)

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        *,
        n: int = 1,
        max_tokens: int = 16,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Sample answers to conversations, rendered by the server's chat template; otherwise as `generate`."""
        if chat_template is not None:
            raise NotImplementedError("a chat template cannot be sent with a request; render the prompts and generate.")
        if tools:
            from transformers.utils import get_json_schema

            tools = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
        body = {"messages": [[_sendable(m) for m in one] for one in messages], "n": n, "max_tokens": max_tokens}
        body |= {"tools": tools, "request_id": uuid.uuid4().hex, "logprobs": 0, "top_k": 0} | fields
        return self.call("POST", "/chat/", body, timeout=self.time_for(len(messages) * n * max_tokens), retries=3)

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        top_logprobs: int = 100,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> dict[str, Any]:
        """Log-probs of given sequences under the served weights, behind their prompts.

        Args:
            sequences: Token ids, prompts included.
            prompt_lengths: Tokens of each that are not scored.
            top_logprobs: Most likely tokens returned at every position.
            temperature: Above 0.
            chunk_size: Sequences of one request; 0 sends all in one.
            max_concurrent_requests: Chunks in flight at once.

        Raises:
            ValueError: A temperature that is not above 0, or lists of unequal length (a `ConfigError`).
        """
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature} must be above 0: log-probs are of a distribution.")
        if len(sequences) != len(prompt_lengths):
            raise ConfigError(f"{len(sequences)} sequences and {len(prompt_lengths)} prompt_lengths: give one of each.")
        size = chunk_size if chunk_size > 0 else max(len(sequences), 1)

        def score(start: int) -> dict[str, Any]:
            part = slice(start, start + size)
            body = {"sequences": [list(s) for s in sequences[part]], "prompt_lengths": list(prompt_lengths[part])}
            body |= {"top_logprobs": top_logprobs, "temperature": temperature, "response_format": "json"}
            return self.call("POST", "/get_sequence_logprobs/", body, timeout=GENERATE_TIMEOUT, retries=3)

        with ThreadPoolExecutor(max_workers=max_concurrent_requests) as pool:
            parts = list(pool.map(score, range(0, len(sequences), size)))
        keys = parts[0] if parts else {}
        return {k: [row for p in parts for row in p[k]] if isinstance(v, list) else v for k, v in keys.items()}

    # State -----------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Drop keys and values of earlier weights."""
        self.call("POST", "/reset_prefix_cache/", {}, timeout=PAUSE_TIMEOUT, retries=10)

    def pause(self, mode: str = "keep") -> None:
        """Hold generation: ``keep`` what runs, ``abort`` it, or ``wait`` for it."""
        self.call("POST", "/pause/", {"mode": mode}, timeout=PAUSE_TIMEOUT, retries=10)

    def resume(self) -> None:
        """Go on after `pause`."""
        self.call("POST", "/resume/", {}, timeout=PAUSE_TIMEOUT, retries=10)

    def sleep(self, level: int = 1) -> None:
        """Give memory back; from level 2 only a whole weight update leads back to generation."""
        self.call("POST", "/sleep/", {"level": level}, timeout=PAUSE_TIMEOUT)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again."""
        self.call("POST", "/wake_up/", {"tags": list(tags) if tags else None}, timeout=PAUSE_TIMEOUT)

    def lease(self, holder: str, ttl_s: float = LEASE_TTL_S) -> str:
        """Become the one trainer that may change this server; raises `ServerBusy` where there is another."""
        self.lease_id = str(self.call("POST", "/lease/", {"holder": holder, "ttl_s": ttl_s}, timeout=QUICK)["lease_id"])
        return self.lease_id

    def renew(self) -> None:
        """Keep the lease."""
        self.call("POST", f"/lease/{self.lease_id}/renew", {}, timeout=QUICK, retries=2)

    def release(self) -> None:
        """Give the lease back; what fails is left to its end."""
        if self.lease_id is not None:
            try:
                self.call("DELETE", f"/lease/{self.lease_id}", timeout=QUICK)
            except RolloutServerError as error:
                logger.info("the lease on %s ends by itself: %s", self.base_url, error)
            self.lease_id = None

    # Weights ---------------------------------------------------------------------------------------------------------

    def init_communicator(self, device: Any = 0) -> None:
        """Join the server's weight-update group, on accelerators that differ from the server's."""
        from posttrain.rollouts.server.nccl import Communicator

        self.communicator = Communicator.join(self, device)

    def update_named_param(self, name: str, weights: Tensor) -> None:
        """Replace one parameter."""
        self.update_model_params([(name, weights)])

    def update_model_params(self, model: nn.Module | Sequence[tuple[str, Tensor]], version: int | None = None) -> dict:
        """Replace parameters by those of a model, or by the given ones; returns what the server says it loaded."""
        from posttrain.rollouts.server.weight_sync import push
        from posttrain.rollouts.workers.shared_weights import named_weights

        tensors = named_weights(model) if isinstance(model, nn.Module) else model
        number = int(self.info().get("weight_version") or 0) + 1 if version is None else version
        return push(self, tensors, number, partial=not isinstance(model, nn.Module))

    def close_communicator(self) -> None:
        """Leave the weight-update group; calling it twice does nothing."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    def close(self) -> None:
        """Leave group and lease, and the connections."""
        self.close_communicator()
        if self.pusher is not None:
            self.pusher.close()
            self.pusher = None
        self.release()
        self.session.close()


def _png(image: Any) -> str:
    """An image as base64 of PNG."""
    if isinstance(image, str):
        return image
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _sendable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose images are base64."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    parts = [
        {"type": "image_pil", "image_pil": _png(part["image"])} if part.get("type") == "image" else dict(part)
        for part in content
    ]
    return dict(message) | {"content": parts}
