"""The HTTP interface: paths, statuses, limits and the token, around `RolloutService`."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import posttrain
from posttrain.rollouts.server.replies import CHECKSUM_HEADER, LEASE_HEADER, SAFETENSORS, VERSION_HEADER
from posttrain.serve import asking as schema
from posttrain.serve import holding, updating
from posttrain.serve.asking import bad
from posttrain.serve.metrics import exposition
from posttrain.serve.service import RolloutService, failed
from posttrain.serve.state import Refusal
from posttrain.serve.worker import WorkerFailure

__all__ = ["create_app"]

# Load balancers ask without a token; the answer tells nothing else. With a query it may generate: that needs the token.
OPEN_PATHS = ("/health/",)
BUCKET_PATH = "/update_bucket/"
LeaseToken = Annotated[str | None, Header(alias=LEASE_HEADER)]


def _error(status: int, kind: str, message: str, retry_after: float | None = None, /, **extra: Any) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
    return JSONResponse(extra | {"error": {"type": kind, "message": message}}, status_code=status, headers=headers)


def _refused(refusal: Refusal) -> JSONResponse:
    return _error(refusal.status, refusal.kind, str(refusal), refusal.retry_after, **refusal.extra)


class Guard:
    """In front of the application: token, size of bodies, both forms of every path, and a count of answers.

    Args:
        app: The application.
        service: Whose limits hold.
    """

    def __init__(self, app: Any, service: RolloutService) -> None:
        self.app, self.service = app, service
        key = service.config.api_key
        self.expected = None if key is None else f"Bearer {key}".encode()
        self.most = int(service.config.max_body_mb * 2**20)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = dict(scope) | {"path": _canonical(scope["path"])}
        answer = _Answer(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refused(refusal)(scope, receive, answer.send)
        elif scope["path"] == BUCKET_PATH:
            await self.app(scope, receive, answer.send)  # It streams, and counts for itself.
        else:
            await self.app(scope, self._bounded(receive, answer), answer.send)
            if answer.too_large:
                await _refused(self._too_large())(scope, receive, send)
        route = getattr(scope.get("route"), "path", None) or "other"
        status = 413 if answer.too_large else answer.status
        self.service.metrics.count("requests", path=route, status=status)

    def _refusal(self, scope: Any) -> Refusal | None:
        headers = dict(scope["headers"])
        is_open = scope["path"] in OPEN_PATHS and not scope.get("query_string")
        if self.expected is not None and not is_open:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                return Refusal(401, "Unauthorized", "send the server's --api_key: 'Authorization: Bearer KEY'.")
        length = headers.get(b"content-length", b"0")
        if scope["path"] != BUCKET_PATH and length.isdigit() and int(length) > self.most:
            return self._too_large()
        return None

    def _too_large(self) -> Refusal:
        most = self.service.config.max_body_mb
        return Refusal(413, "TooLarge", f"the body is above --max_body_mb {most:g}. Send the prompts in parts.")

    def _bounded(self, receive: Any, answer: _Answer) -> Callable[[], Awaitable[Any]]:
        seen = 0

        async def bounded() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                answer.too_large = True
                return {"type": "http.disconnect"}
            return message

        return bounded


class _Answer:
    """What the application answers, unless the body turns out to be too large."""

    def __init__(self, send: Any) -> None:
        self._send, self.status, self.too_large = send, 500, False

    async def send(self, message: Any) -> None:
        if self.too_large:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _canonical(path: str) -> str:
    """The form that routes have: a slash at the end, but for documentation, metrics and single leases."""
    bare = path.rstrip("/") or "/"
    if bare in ("/", "/metrics", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        return bare
    return bare if bare.startswith("/lease/") else bare + "/"


def create_app(service: RolloutService, *, start: bool = True) -> FastAPI:
    """The application around a service.

    Args:
        service: What it serves.
        start: Whether the workers start and end with the application.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start:
            await service.start()
        yield
        if start:
            await service.close()

    app = FastAPI(
        title="posttrain rollout server", version=posttrain.__version__, lifespan=lifespan, redirect_slashes=False
    )
    _handle_errors(app)
    _reading(app, service)
    _generating(app, service)
    _leases(app, service)
    _weights(app, service)
    _broadcasts(app, service)
    _holding(app, service)
    app.add_middleware(Guard, service=service)  # type: ignore[arg-type]
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return _refused(error)

    @app.exception_handler(WorkerFailure)
    async def worker_failed(_: Request, error: WorkerFailure) -> JSONResponse:
        return _refused(failed(error.failure))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return _error(499, "Disconnected", "the client went away.")

    @app.exception_handler(TimeoutError)
    async def late(_: Request, error: TimeoutError) -> JSONResponse:
        return _error(504, "DeadlineExceeded", "a worker did not answer in time.")

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, "NotFound" if error.status_code == 404 else "BadRequest", str(error.detail))

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        place = [part for part in first["loc"] if part != "body"]
        index = next((part for part in place[1:] if isinstance(part, int)), None)
        where = ".".join(map(str, place)) or "body"
        extra: dict[str, Any] = {} if index is None else {"index": index}
        return _error(400, "BadRequest", f"{where}: {first['msg']}.", field=where, **extra)


REPLIES: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request cannot be served; names the field or the prompt.",
        401: "No token, or another one.",
        403: "Only for clients on this machine.",
        404: "Unknown.",
        409: "Not in this state: asleep, weights not whole, or out of order in an update.",
        413: "Above the limit of bytes.",
        423: "Another trainer holds the lease.",
        429: "Too many requests wait.",
        500: "The engine failed.",
        501: "This engine does not offer it.",
        503: "Not healthy, or shutting down.",
        504: "Not in time.",
    }.items()
}


def _reading(app: FastAPI, service: RolloutService) -> None:
    @app.get("/health/", responses=REPLIES)
    async def health(deep: bool = False) -> dict[str, Any]:
        return await service.health(deep)

    @app.get("/get_world_size/", responses=REPLIES)
    async def world_size() -> dict[str, Any]:
        return {"world_size": service.config.tensor_parallel_size * service.config.data_parallel_size}

    @app.get("/info/", responses=REPLIES)
    async def info() -> dict[str, Any]:
        return service.info()

    @app.get("/metrics", responses=REPLIES, response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(exposition(service), media_type="text/plain; version=0.0.4")


def _generating(app: FastAPI, service: RolloutService) -> None:
    @app.post("/generate/", responses=REPLIES)
    async def generate(body: schema.Generate, request: Request) -> JSONResponse:
        return await _while_connected(request, service.once(body.request_id, body, lambda: service.generate(body)))

    @app.post("/chat/", responses=REPLIES)
    async def chat(body: schema.Chat, request: Request) -> JSONResponse:
        return await _while_connected(request, service.once(body.request_id, body, lambda: service.chat(body)))

    @app.post("/get_sequence_logprobs/", responses=REPLIES)
    async def score(body: schema.ScoreBody, request: Request) -> JSONResponse:
        return await _while_connected(request, service.score(body))


async def _while_connected(request: Request, work: Awaitable[Any]) -> JSONResponse:
    """The answer; a client that goes away takes its work with it (unless the work has an id to be asked for again)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "Disconnected", "the client went away.")
        return JSONResponse(await task)
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _leases(app: FastAPI, service: RolloutService) -> None:
    state = service.state

    @app.post("/lease/", responses=REPLIES)
    async def take(body: schema.LeaseBody) -> dict[str, Any]:
        await holding.expire(service)
        lease = state.acquire(body.holder, body.ttl_s)
        return {"lease_id": lease.id, "holder": lease.holder, "ttl_s": lease.ttl_s}

    @app.post("/lease/{lease_id}/renew", responses=REPLIES)
    async def renew(lease_id: str) -> dict[str, Any]:
        await holding.expire(service)
        lease = state.renew(lease_id)
        return {"lease_id": lease.id, "ttl_s": lease.ttl_s}

    @app.delete("/lease/{lease_id}", responses=REPLIES)
    async def release(lease_id: str) -> dict[str, Any]:
        holder = state.lease.holder if state.lease is not None else ""
        released = state.release(lease_id)
        if released:
            await holding.clear_up(service, holder)
        return {"released": released}


def _holds(service: RolloutService) -> Callable[..., None]:
    async def check(lease: LeaseToken = None) -> None:
        service.state.check_lease(lease)

    return check


def _weights(app: FastAPI, service: RolloutService) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(_holds(service))], "responses": REPLIES}

    @app.post("/begin_update/", **guarded)
    async def begin(body: schema.BeginUpdate) -> dict[str, Any]:
        return await updating.begin_update(service, body)

    content = {
        SAFETENSORS: {"schema": {"type": "string", "format": "binary"}},
        "application/json": {"schema": schema.Bucket.model_json_schema()},
    }

    @app.post(BUCKET_PATH, **guarded, openapi_extra={"requestBody": {"content": content, "required": True}})
    async def bucket(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != SAFETENSORS:
            peer = request.client.host if request.client else None
            forwarded = "x-forwarded-for" in request.headers
            return await updating.bucket_file(service, await _bucket_body(request), None if forwarded else peer)
        version, checksum = request.headers.get(VERSION_HEADER, ""), request.headers.get(CHECKSUM_HEADER, "")
        if not version.isdigit() or not checksum:
            raise bad(f"a bucket of bytes needs the headers {VERSION_HEADER} (a number) and {CHECKSUM_HEADER}.")
        return await updating.bucket_bytes(service, int(version), checksum, request.stream())

    @app.post("/end_update/", **guarded)
    async def end(body: schema.EndUpdate) -> dict[str, Any]:
        return await updating.end_update(service, body.version)

    @app.post("/abort_update/", **guarded)
    async def abort(body: schema.EndUpdate | None = None) -> dict[str, Any]:
        return await updating.abort_update(service, body.version if body is not None else None)

    @app.post("/reset_prefix_cache/", **guarded)
    async def reset() -> dict[str, Any]:
        return await updating.reset_prefix_cache(service)


async def _bucket_body(request: Request) -> schema.Bucket:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > 2**16:
            raise bad(f"a bucket as JSON is a path; bytes are sent with 'Content-Type: {SAFETENSORS}'.")
    try:
        return schema.Bucket.model_validate(json.loads(data))
    except ValueError as error:
        if isinstance(error, ValidationError):
            raise
        raise bad(f"neither safetensors ('Content-Type: {SAFETENSORS}') nor JSON came: {error}.") from error


def _broadcasts(app: FastAPI, service: RolloutService) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(_holds(service))], "responses": REPLIES}

    @app.post("/init_communicator/", **guarded)
    async def join(body: schema.InitCommunicator) -> dict[str, Any]:
        return await updating.init_communicator(service, body)

    @app.post("/update_named_param/", **guarded)
    async def one(body: schema.NamedParam) -> dict[str, Any]:
        return await updating.receive(service, [body], None) | {"message": f"{body.name} was received"}

    @app.post("/update_named_params/", **guarded)
    async def several(body: schema.NamedParams) -> dict[str, Any]:
        return await updating.receive(service, body.params, body.version, packed=body.packed)

    @app.post("/close_communicator/", **guarded)
    async def leave() -> dict[str, Any]:
        return await updating.close_communicator(service)


def _holding(app: FastAPI, service: RolloutService) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(_holds(service))], "responses": REPLIES}

    @app.post("/pause/", **guarded)
    async def pause(body: schema.Pause | None = None) -> dict[str, Any]:
        return await holding.pause(service, (body or schema.Pause()).mode)

    @app.post("/resume/", **guarded)
    async def resume() -> dict[str, Any]:
        return await holding.resume(service)

    @app.post("/sleep/", **guarded)
    async def sleep(body: schema.Sleep | None = None) -> dict[str, Any]:
        return await holding.sleep(service, (body or schema.Sleep()).level)

    @app.post("/wake_up/", **guarded)
    async def wake(body: schema.WakeUp | None = None) -> dict[str, Any]:
        return await holding.wake_up(service, (body or schema.WakeUp()).tags)
