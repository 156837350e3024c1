"""`CaptureProxy`: an OpenAI-compatible endpoint of the policy that records the sampled tokens of every episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from posttrain.errors import RolloutError
from posttrain.extensions.agents.calls import (
    Answer,
    CallError,
    ChatBody,
    CompletionBody,
    Policy,
    read_body,
)
from posttrain.extensions.agents.session import CapturedCall, Session
from posttrain.extensions.server.guard import bounded
from posttrain.extensions.server.listening import server_config
from posttrain.integrations.machine import listen, raise_file_limit
from posttrain.integrations.network import host_and_port
from posttrain.types import Request as Prompt
from posttrain.types import Rollout, Sampling

logger = logging.getLogger(__name__)

# Number of seconds without a new call after which the collected calls are sampled together.
GATHER_S = 0.02
# Maximum number of seconds from the start of the server until it accepts connections.
START_S = 30.0

PromptBatch = tuple[list[Prompt], Sampling]
Sample = Callable[[list[PromptBatch]], list[list[Rollout]]]


@dataclass(eq=False)
class _Waiting:
    """A call for which the engine has not returned completions yet."""

    request: Prompt
    session: Session
    done: Future[list[Rollout]] = field(default_factory=Future)


class CallQueue:
    """Queue of calls from many sessions. One engine samples the completions of all waiting calls together.

    Any thread may submit calls. The thread that owns the engine calls `answer`.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._lock, self._news = threading.Lock(), threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Prompt, session: Session) -> Future[list[Rollout]]:
        """Add a call to the queue. Return a future of the call's completions. If the engine fails, the future raises the
        error.
        """
        waiting = _Waiting(request, session)
        with self._lock:
            self._waiting.append(waiting)
        self._news.set()
        return waiting.done

    def wake(self) -> None:
        """End a `wait` that runs in another thread immediately."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait for at most ``seconds`` until there is a call, and until no further call has arrived for `GATHER_S`
        seconds.
        """
        if self._news.wait(seconds):
            self._news.clear()
        seen = 0
        while seen < len(self._waiting):
            seen = len(self._waiting)
            time.sleep(GATHER_S)

    def drop(self, session: Session) -> None:
        """Cancel the waiting calls of a session that has ended."""
        with self._lock:
            gone = [call for call in self._waiting if call.session is session]
            for call in gone:
                self._waiting.remove(call)
        for call in gone:
            call.done.cancel()

    def answer(self, sample: Sample, *, per_request: bool = True, seed: int | None = None) -> int:
        """Sample the completions of all waiting calls with as few engine calls as possible.

        Args:
            sample: Function that runs the engine. It is called even if no call is waiting, because sampling can be a
                collective operation.
            per_request: Whether the engine supports different sampling settings for each request.
            seed: Seed of the engine call. It is used if ``per_request`` is False.

        Returns:
            Number of calls that were completed.

        Raises:
            Any error that ``sample`` raises. The waiting calls fail with the same error.
        """
        with self._lock:
            taken, self._waiting = list(self._waiting), deque()
        taken = [call for call in taken if call.done.set_running_or_notify_cancel()]
        together: dict[Any, list[_Waiting]] = {}
        for call in taken:
            own = call.request.sampling
            assert own is not None
            together.setdefault(None if per_request else replace(own, seed=None), []).append(call)
        batches = [
            (
                [call.request if per_request else replace(call.request, sampling=None) for call in members],
                replace(members[0].request.sampling or Sampling(1), seed=None)
                if common is None
                else replace(common, seed=seed),
            )
            for common, members in together.items()
        ]
        try:
            for members, rollouts in zip(together.values(), sample(batches), strict=True):
                stream = iter(rollouts)
                for call in members:
                    call.done.set_result([next(stream) for _ in range(call.request.n)])
        except BaseException as error:
            for call in taken:
                if not call.done.done():
                    call.done.set_exception(RolloutError(f"the engine failed: {type(error).__name__}: {error}"))
            raise
        return len(taken)


class CaptureProxy:
    """Server for ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` that records the calls of open sessions.

    A call is assigned to a session by its API key (``Authorization: Bearer KEY``) or by its path
    (``/sessions/KEY/v1``). The prompt is rendered with the run's chat template, and the run's engine samples the
    completion. The token ids, the log-probs and the weight version are recorded. The response is in OpenAI's
    format.

    Calls are handled as follows:

    - **Parallel calls** are sampled together, but each call is recorded separately.
    - **A retry** gets the response of the original call, and is not recorded as a second call. OpenAI's clients mark a
    retry with ``x-stainless-retry-count`` above 0. A call is also treated as a retry if its body equals the body of a call
    whose client disconnected before the response. All other calls with equal bodies are sampled separately.
    - **A client that disconnects** cancels its call. A client disconnects if it cancels a stream or if its timeout ends.
    The sampled tokens are excluded from the loss, because the agent never received them.
    - **A timeout** (``call_timeout``) returns an error in OpenAI's format with status 504, and **an engine error** returns
    an error with status 500.
    - **A call of a session that has ended** returns status 401.

    Args:
        policy: Model that answers the calls, with limits for calls.
        host: Address to listen on.
        port: Port to listen on. 0 selects a free port.

    Attributes:
        queue: Calls that wait for the engine.
        sessions: Mapping from keys to sessions. A closed session stays in it until `end` removes the session.
        strays: Number of calls whose key does not belong to an open session.

    >>> proxy = CaptureProxy(policy); proxy.start()  # doctest: +SKIP
    >>> session = proxy.open()  # doctest: +SKIP
    >>> client = openai.OpenAI(base_url=proxy.url, api_key=session.key)  # doctest: +SKIP
    """

    def __init__(self, policy: Policy, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.policy, self.host, self.port = policy, host, port
        self.queue = CallQueue()
        self.sessions: dict[str, Session] = {}
        self.strays = 0
        self._sampling: dict[tuple[str, int], Future[list[Rollout]]] = {}
        # Thread that parses, renders and tokenizes requests. The event loop can handle other requests in the meantime.
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="capture-reading")
        # Lock of each session. Calls of a session are prepared one after the other, because a retry can only be recognized
        # after its original call was recorded.
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # Start and stop --------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the endpoint, which OpenAI clients receive as ``base_url``."""
        return f"http://{host_and_port(self.host, self.port)}/v1"

    def start(self) -> CaptureProxy:
        """Start the server in a thread of this process.

        Raises:
            RolloutError: The server cannot listen on the address.
        """
        raise_file_limit()
        try:
            listener = listen(self.host, self.port)
        except OSError as error:
            raise RolloutError(
                f"the endpoint for the harness cannot listen on {self.host}:{self.port}: {error}. Fix: set "
                "harness_port=0 to use a free port."
            ) from error
        self.port = listener.getsockname()[1]
        self._server = uvicorn.Server(server_config(self.app(), log_level="warning", lifespan="off"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True, name="capture-proxy"
        )
        self._thread.start()
        limit = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > limit:
                raise RolloutError(f"the endpoint {self.url} did not start within {START_S:g} s.")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """End all sessions and stop the server."""
        for session in list(self.sessions.values()):
            self.close(session)
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(10)
        self._server = self._thread = None

    def __enter__(self) -> CaptureProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Sessions --------------------------------------------------------------------------------------------------------------

    def open(self, seed: int = 0) -> Session:
        """Create a session with a random API key. ``seed`` is the session's seed for sampling."""
        session = Session(f"pt-{secrets.token_urlsafe(18)}", seed)
        self.sessions[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Reject further calls of a session, and cancel its running calls. The recorded calls remain available."""
        session.closed = True
        self.queue.drop(session)
        for (key, _), future in list(self._sampling.items()):
            if key == session.key:
                future.cancel()

    def end(self, session: Session) -> None:
        """Close a session and remove it from ``sessions``."""
        self.close(session)
        self.sessions.pop(session.key, None)
        self._locks.pop(session.key, None)

    # The endpoints ---------------------------------------------------------------------------------------------------------

    def app(self) -> FastAPI:
        """Create the FastAPI application. The endpoints are available under ``/v1`` and ``/sessions/KEY/v1``."""
        app = FastAPI(title="posttrain capture proxy", docs_url=None, redoc_url=None, openapi_url=None)
        for prefix in ("/v1", "/sessions/{key}/v1"):
            app.get(f"{prefix}/models")(self._models)
            app.get(f"{prefix}/models/{{name}}")(self._model)
            app.post(f"{prefix}/chat/completions")(self._chat)
            app.post(f"{prefix}/completions")(self._complete)
        app.add_exception_handler(CallError, _refusal)  # type: ignore[arg-type]
        app.add_exception_handler(HTTPException, _other_refusal)  # type: ignore[arg-type]
        app.add_exception_handler(Exception, _fault)
        return app

    def _session(self, request: Request) -> Session:
        """Return the session to which the API key of a call belongs.

        Raises:
            CallError: The key does not belong to an open session.
        """
        api_key = (
            request.path_params.get("key") or request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        )
        session = self.sessions.get(api_key)
        if session is None or session.closed:
            self.strays += 1
            why = "belongs to an episode that has ended" if session is not None else "does not belong to an episode"
            raise CallError(
                f"Incorrect API key provided: {api_key[:6]}... {why}. Fix: use the api_key that the harness received.",
                status=401,
                code="invalid_api_key",
            )
        return session

    def _card(self) -> dict[str, Any]:
        return {"id": self.policy.model, "object": "model", "created": 0, "owned_by": "posttrain"} | (
            {} if self.policy.context is None else {"max_model_len": self.policy.context}
        )

    async def _models(self, request: Request) -> JSONResponse:
        self._session(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request, name: str) -> JSONResponse:
        self._session(request)
        if name != self.policy.model:
            raise CallError(f"The model {name!r} does not exist.", param="model", status=404, code="model_not_found")
        return JSONResponse(self._card())

    async def _chat(self, request: Request) -> Response:
        return await self._call(request, ChatBody)

    async def _complete(self, request: Request) -> Response:
        return await self._call(request, CompletionBody)

    async def _call(self, request: Request, kind: type) -> Response:
        session = self._session(request)
        session.counts.received += 1
        try:
            raw = await Request(request.scope, bounded(request.receive, self.policy.most_bytes)).body()
            async with self._locks[session.key]:
                body, digest = await self._read(read_body, kind, raw)
                before = self._retried(session, digest, request)
                call = before if before is not None else await self._begin(session, body, digest)
        except (CallError, HTTPException):
            session.counts.refused += 1
            raise
        except ClientDisconnect:
            # The client disconnected before it had sent the whole body, so it cannot receive this response.
            session.counts.cancelled += 1
            return Response(status_code=499)
        except BaseException:
            session.counts.failed += 1
            raise
        await self._sampled(request, session, call, again=before is not None)
        answer = Answer(self.policy, call, session.key, body)
        if body.stream:
            return _Stream(self, session, answer, again=before is not None)
        self.answered(session, call, again=before is not None)
        return JSONResponse(answer.whole())

    async def _read(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the thread that parses, renders and tokenizes requests."""
        return await asyncio.wrap_future(self._reading.submit(function, *args))

    async def _begin(self, session: Session, body: Any, digest: str) -> CapturedCall:
        """Render and check a call, record it, and add it to the queue.

        Raises:
            CallError: The call cannot be rendered or sampled, or the session has ended.
        """
        render: Any = self.policy.chat if isinstance(body, ChatBody) else self.policy.completion
        call = await self._read(render, body, session)
        if session.closed:
            raise CallError("The episode of this key has ended.", status=401, code="invalid_api_key")
        call.body = digest
        request = self.policy.request(body, call, session)
        session.begin(call)
        self._sampling[session.key, call.number] = self.queue.submit(request, session)
        return call

    def _retried(self, session: Session, digest: str, request: Request) -> CapturedCall | None:
        """Return the earlier call that this request retries, or None for a new call."""
        count = request.headers.get("x-stainless-retry-count", "")
        declared = int(count) if count.isdecimal() else 0
        before = session.same_body(digest, declared)
        if before is None or before.state == "failed":
            return None
        unread = before.state == "cancelled" and bool(
            before.completions or (session.key, before.number) in self._sampling
        )
        if not (declared or unread) or (before.state == "cancelled" and not unread):
            return None
        before.retries += 1
        if unread:
            # Mark the call as waiting again, so that the next retry with the same body is assigned to another call.
            before.state = "waiting"
        return before

    async def _sampled(self, request: Request, session: Session, call: CapturedCall, *, again: bool) -> None:
        """Wait until the completions of a call are sampled, and store them in the call.

        Raises:
            CallError: The call timed out, the engine failed, the session ended, or the client disconnected.
        """
        future = self._sampling.get((session.key, call.number))
        if call.completions or future is None:
            return
        waiter = asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(future)))
        watcher = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({waiter, watcher}, timeout=self.policy.call_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                left = watcher.done()
                raise self._unread(session, call, future, again=again, left=left)
            try:
                rollouts = waiter.result()
            except (asyncio.CancelledError, Exception) as error:
                raise self._ended(session, call, error, again=again) from error
            if session.closed:
                raise self._ended(session, call, RolloutError("the episode has ended"), again=again)
            if not call.completions:
                self._sampling.pop((session.key, call.number), None)
                session.counts.tokens += sum(len(rollout.token_ids) for rollout in rollouts)
                if any(rollout.finish_reason == "abort" for rollout in rollouts):
                    raise self._ended(session, call, RolloutError("the engine was interrupted"), again=again)
                self.policy.take(call, rollouts)
        finally:
            for task in (waiter, watcher):
                task.cancel()

    def _unread(
        self, session: Session, call: CapturedCall, future: Future[list[Rollout]], *, again: bool, left: bool
    ) -> CallError:
        """Record that the client disconnected or that the call timed out. Return the error for the response."""
        loop = asyncio.get_running_loop()
        # Run the callback in the thread of the event loop, because only this thread may change sessions.
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._late, session, call, done))
        if left or again:
            self.unread(session, call, again=again)
        else:
            session.counts.failed += 1
            call.state = "failed"
            future.cancel()
        return CallError(
            f"The completion took longer than call_timeout={self.policy.call_timeout:g} s.", status=504, code="timeout"
        )

    def _late(self, session: Session, call: CapturedCall, done: Future[list[Rollout]]) -> None:
        """Store completions that arrive after a disconnection or a timeout. The tokens of such completions are counted, and
        a retry can use the completions.
        """
        self._sampling.pop((session.key, call.number), None)
        if not done.cancelled() and done.exception() is None and not call.completions:
            rollouts = done.result()
            session.counts.tokens += sum(len(rollout.token_ids) for rollout in rollouts)
            self.policy.take(call, rollouts)

    def _ended(self, session: Session, call: CapturedCall, error: BaseException, *, again: bool) -> CallError:
        self._sampling.pop((session.key, call.number), None)
        call.state = "failed"
        if again:
            session.counts.retried += 1
        else:
            session.counts.failed += 1
        if session.closed or isinstance(error, asyncio.CancelledError):
            return CallError("The episode of this key has ended.", status=401, code="invalid_api_key")
        return CallError(str(error), status=500, code="engine_error")

    def unread(self, session: Session, call: CapturedCall, *, again: bool) -> None:
        """Record that the client disconnected during the response. The call is excluded from the loss."""
        if again:
            session.counts.retried += 1
        else:
            session.counts.cancelled += 1
        # Do not change the state "answered". A retry may have received the response before this disconnection was detected.
        call.state = "answered" if call.state == "answered" else "cancelled"

    def answered(self, session: Session, call: CapturedCall, *, again: bool) -> None:
        """Mark a call as answered immediately before its response is sent. Later prompts can then continue its completion."""
        if again:
            session.counts.retried += 1
        else:
            session.counts.answered += 1
        call.state = "answered"


class _Stream(StreamingResponse):
    """Response as server-sent events. If the client disconnects before the end of the stream, the call is canceled."""

    def __init__(self, proxy: CaptureProxy, session: Session, answer: Answer, *, again: bool) -> None:
        self.proxy, self.session, self.answer, self.again = proxy, session, answer, again
        self.whole = False
        super().__init__(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self.answer.chunks():
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            # Let the event loop detect whether the client has disconnected.
            await asyncio.sleep(0)
        # Mark the call as answered before sending the last line. The client's next call may arrive before this coroutine
        # continues.
        self.whole = True
        self.proxy.answered(self.session, self.answer.call, again=self.again)
        yield b"data: [DONE]\n\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream. If the client does not receive the whole stream, exclude the call from the loss."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self.whole:
                self.proxy.unread(self.session, self.answer.call, again=self.again)


async def _gone(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(_: Request, error: CallError) -> JSONResponse:
    return JSONResponse(error.content, status_code=error.status)


async def _other_refusal(request: Request, error: HTTPException) -> JSONResponse:
    """Return an error response in OpenAI's format. It is used for an unknown path, a wrong HTTP method, and a body that is
    too large.
    """
    message, code = str(error.detail), None
    if error.status_code in (404, 405):
        message = f"Unknown request URL: {request.method} {request.url.path}. Fix: use a base_url that ends with /v1."
        code = "unknown_url"
    refusal = CallError(message, status=error.status_code, code=code)
    return JSONResponse(refusal.content, status_code=refusal.status, headers=error.headers)


async def _fault(_: Request, error: Exception) -> JSONResponse:
    logger.error("a call of a harness failed: %s: %s", type(error).__name__, error, exc_info=error)
    return JSONResponse(CallError(f"{type(error).__name__}: {error}", status=500).content, status_code=500)


@contextlib.contextmanager
def sampled_by(proxy: CaptureProxy, sample: Sample, *, per_request: bool = True) -> Iterator[CaptureProxy]:
    """Start the endpoint, and answer its calls in a thread inside the context, to test a harness without a trainer.

    Args:
        proxy: Proxy that was not started yet.
        sample: Function that runs the engine.
        per_request: Whether the engine supports different sampling settings for each request.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            proxy.queue.wait(0.1)
            # If sampling fails, `answer` has sent the error to the waiting calls. Continue, because later calls may succeed.
            with contextlib.suppress(Exception):
                proxy.queue.answer(sample, per_request=per_request)

    thread = threading.Thread(target=work, daemon=True, name="capture-sampler")
    with proxy:
        thread.start()
        try:
            yield proxy
        finally:
            ended.set()
            proxy.queue.wake()
            thread.join(60)


def engine_sample(engine: Any) -> Sample:
    """Return a function that generates with ``engine``, for the argument ``sample`` of `CallQueue.answer`."""

    def sample(batches: Sequence[PromptBatch]) -> list[list[Rollout]]:
        return [engine.generate(requests, sampling) for requests, sampling in batches]

    return sample
