"""`posttrain serve`: vLLM's endpoints over the native and hf engines, for machines without vLLM."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Literal

import prometheus_client
import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from posttrain.errors import BadRequest, ConfigError
from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token
from posttrain.rollouts.server.replies import API_KEY_VARIABLE, INCOMPLETE, LOOPBACK
from posttrain.rollouts.server.weight_sync import (
    CHECKSUM_HEADER,
    SAFETENSORS,
    checked_tensors,
    file_tensors,
    shared_path,
)
from posttrain.serve import requests as schema
from posttrain.serve.engines import BatchServed, Job, NativeServed
from posttrain.serve.server import ServeConfig

__all__ = ["Host", "TokenGuard", "create_app", "make_host"]

logger = logging.getLogger(__name__)

SILENT_S = 60.0  # An engine's thread that is silent for so long is stuck.
NOT_WHOLE = "the weights are not whole: an update failed midway. Push all of them again."


class TokenGuard:
    """ASGI middleware: every path but ``/health`` needs ``Authorization: Bearer TOKEN``, compared in constant time.

    vLLM's own token guards ``/v1`` alone, and not the endpoints that replace weights; `posttrain vllm-serve` adds this one.

    Args:
        app: The application.
        api_key: The token; None: that of ``$POSTTRAIN_API_KEY``, without which nothing is guarded.
    """

    def __init__(self, app: Any, api_key: str | None = None) -> None:
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        self.app, self.expected = app, None if not key else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        guarded = scope["type"] == "http" and scope["path"].rstrip("/") != "/health" and self.expected is not None
        if guarded and not hmac.compare_digest(given, self.expected or b""):
            await _error(401, "send the server's token: 'Authorization: Bearer TOKEN'.")(scope, receive, send)
            return
        await self.app(scope, receive, send)


class Refusal(Exception):
    """A request that is not served; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _error(status: int, message: str, **extra: Any) -> JSONResponse:
    """An error as vLLM's server words it, with fields beside it."""
    return JSONResponse({"error": {"message": message, "code": status} | extra}, status_code=status)


class Host:
    """The thread that runs an engine, and the state that endpoints share.

    Args:
        make: Loads the engine; called in its thread.
        config: Of the server.
        tokenizer: For texts and conversations; None: token ids alone.
        stops: Token ids that end a completion unless ``ignore_eos``.
        context: Most tokens of prompt and completion; None: no limit.

    Attributes:
        paused: ``keep``, ``wait`` or ``abort``; None: it is not.
        updating: Whether an update was begun and not ended.
        whole: Whether the weights are those of one version; a failed update leaves them mixed.
    """

    def __init__(
        self, make: Callable[[], BatchServed], config: ServeConfig, *, tokenizer: Any = None, stops: tuple[int, ...] = (),
        context: int | None = None,
    ) -> None:  # fmt: skip
        self.make, self.config, self.tokenizer, self.stops, self.context = make, config, tokenizer, stops, context
        self.paused: str | None = None
        self.updating, self.complete, self.whole = False, False, True
        self.held: list[Job] = []  # Jobs that came during a pause.
        self.failure: BaseException | None = None
        self.beat = time.monotonic()
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._loaded: Future[BatchServed] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.served = self._loaded.result()
        self.registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "posttrain_requests", "HTTP requests", ["path", "status"], registry=self.registry
        )
        self.completions = prometheus_client.Counter("posttrain_completions", "Completions", registry=self.registry)
        self.tokens = prometheus_client.Counter("posttrain_tokens", "Completion tokens", registry=self.registry)
        running = prometheus_client.Gauge("posttrain_running", "Completions being written", registry=self.registry)
        running.set_function(lambda: self.served.running)

    # The engine's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            served = self.make()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(served)
        try:
            while True:
                idle = self.paused == "keep" or self.updating or not self.whole or not served.busy
                try:
                    command = self._commands.get(block=idle, timeout=SILENT_S / 4)
                except queue.Empty:
                    command = _nothing
                self.beat = time.monotonic()
                if command is None:
                    return
                if not idle and command is _nothing:
                    served.advance()
                command()
        except BaseException as error:
            logger.exception("the engine's thread has ended")
            self.failure = error
            os.kill(os.getpid(), signal.SIGTERM)

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the engine's thread, between two steps."""
        answer: Future[Any] = Future()

        def command() -> None:
            try:
                answer.set_result(function(*args))
            except Exception as error:
                answer.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the thread."""
        self._commands.put(None)
        self._thread.join(5.0)

    def healthy(self) -> bool:
        """Whether the engine's thread lives and is not stuck (a call of transformers' generate may take long)."""
        silent = time.monotonic() - self.beat > SILENT_S and self.served.name == "native"
        return self.failure is None and not silent

    # Generation ----------------------------------------------------------------------------------------------------------

    async def generate(self, prompts: list[list[int]], body: schema.Completions) -> list[dict[str, Any]]:
        """Choices of all prompts, in order; a client that goes away takes its jobs with it."""
        self.check_whole()
        loop, sampling = asyncio.get_running_loop(), body.sampling(self.stops)
        futures = [loop.create_future() for _ in prompts]

        def ended(future: asyncio.Future, job: Job) -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(job))

        jobs = [Job(p, body.n, sampling, functools.partial(ended, f)) for p, f in zip(prompts, futures, strict=True)]
        await self.do(self._submit, jobs)
        try:
            for job in await asyncio.gather(*futures):
                if job.error is not None:
                    raise job.error
        finally:
            if not all(future.done() and not future.cancelled() for future in futures):
                self._commands.put(lambda: [self.served.drop(job) for job in jobs] and None)
        choices = [
            schema.choice_of(job, i, place * body.n + i, body, self.tokenizer)
            for place, job in enumerate(jobs)
            for i in range(body.n)
        ]
        self.completions.inc(len(choices))
        self.tokens.inc(sum(len(choice["token_ids"]) for choice in choices))
        return choices

    def _submit(self, jobs: list[Job]) -> None:
        if self.paused is not None:
            self.held += jobs
            return
        for job in jobs:
            self.served.submit(job)

    async def score(self, prompts: list[list[int]], top: int) -> list[dict[str, Any]]:
        """Choices that hold ``prompt_logprobs`` and no completion."""
        self.check_whole()
        choices = []
        for number, ids in enumerate(prompts):
            entries = await self.do(self.served.score, ids, top)
            listed = [
                None if at is None else {str(i): {"logprob": logp, "rank": rank} for i, (logp, rank) in at.items()}
                for at in entries
            ]
            choice = {"index": number, "text": "", "finish_reason": "length", "token_ids": [], "prompt_token_ids": ids}
            choices.append(choice | {"prompt_logprobs": listed, "logprobs": None})
        return choices

    def check_whole(self) -> None:
        """Refuse to sample from weights that a failed update left mixed.

        Raises:
            Refusal: 409.
        """
        if not self.whole and not self.updating:
            raise Refusal(409, NOT_WHOLE)

    # State ---------------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Hold generation: what runs is kept as it is, ended with what is written, or waited for.

        Raises:
            Refusal: 504, requests did not end in time.
        """
        self.paused = mode
        if mode == "abort":
            await self.do(lambda: [self.served.cut(job) for job in list(self.served.jobs)])
        deadline = time.monotonic() + self.config.drain_timeout
        while mode != "keep" and self.served.jobs:
            if time.monotonic() > deadline:
                raise Refusal(504, f"{len(self.served.jobs)} prompts still run after {self.config.drain_timeout:g} s.")
            await asyncio.sleep(0.005)
        await self.do(_nothing)

    async def resume(self) -> None:
        """Go on; fine without a pause."""
        self.paused = None
        held, self.held = self.held, []
        await self.do(self._submit, held)

    async def start_update(self) -> None:
        """Nothing is sampled until `finish_update`."""
        self.updating, self.complete, self.whole = True, False, False
        await self.do(self.served.begin_update)

    async def update(self, function: Callable[..., Any], *args: Any) -> Any:
        """One part of an update; where it fails, the update has failed.

        Raises:
            Refusal: 409, none was begun, or the part is not what was announced.
        """
        if not self.updating:
            raise Refusal(409, "start_weight_update must be called before update_weights.")
        try:
            return await self.do(function, *args)
        except Exception as error:
            await self.finish_update(None)
            raise Refusal(409, f"{type(error).__name__}: {error}") from error

    async def finish_update(self, version: str | None) -> None:
        """End an update: with a version the weights are whole, without one they stay mixed."""
        if version is not None and not (self.updating and self.complete):
            raise Refusal(409, "finish_weight_update came before all weights did.")
        if version is not None:
            await self.do(self.served.renewed, version)
        self.updating, self.whole = False, version is not None
        if not self.whole:
            self.served.version = INCOMPLETE
            await self.do(self._fail_all)

    def _fail_all(self) -> None:
        held, self.held = self.held, []
        self.served.jobs |= set(held)
        for job in list(self.served.jobs):
            self.served.fail(job, Refusal(409, NOT_WHOLE))

    def facts(self) -> dict[str, Any]:
        """What a trainer compares with its own model."""
        config = self.config
        return self.served.facts() | {
            "model": config.model,
            "revision": config.revision,
            "max_model_len": self.context,
            "logprobs_mode": "processed_logprobs",
        }


def _nothing() -> None:
    pass


def create_app(host: Host) -> FastAPI:
    """The endpoints of a host."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        host.close()

    app = FastAPI(title="posttrain serve", lifespan=lifespan)
    _handle_errors(app)
    _reading(app, host)
    _generating(app, host)
    _holding(app, host)
    _updating(app, host)
    app.add_middleware(TokenGuard, api_key=host.config.api_key)  # type: ignore[arg-type]

    @app.middleware("http")
    async def count(request: Request, following: Any) -> Any:
        response = await following(request)
        path = getattr(request.scope.get("route"), "path", "other")
        host.requests.labels(path, response.status_code).inc()
        return response

    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}")

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(ConfigError)
    @app.exception_handler(BadRequest)
    async def bad(_: Request, error: Any) -> JSONResponse:
        return _error(400, str(error), index=getattr(error, "index", None))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return _error(499, "the client went away.")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return _error(400, f"{where}: {first['msg']}.", param=where)


def _reading(app: FastAPI, host: Host) -> None:
    model = host.config.model

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if host.healthy() else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": model, "object": "model", "owned_by": "posttrain", "root": model, "parent": None}
        return {"object": "list", "data": [card | {"max_model_len": host.context}]}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        return {"weight_version": host.served.version}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        return {"is_paused": host.paused is not None}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus_client.generate_latest(host.registry), media_type="text/plain; version=0.0.4")

    @app.post("/collective_rpc")
    async def rpc(body: schema.Rpc) -> dict[str, Any]:
        if body.method != "posttrain_facts":
            raise BadRequest(f"method={body.method!r} is not known here; posttrain_facts is.")
        return {"results": [host.facts()]}


def _generating(app: FastAPI, host: Host) -> None:
    @app.post("/v1/completions")
    async def completions(body: schema.Completions, request: Request) -> JSONResponse:
        vocabulary = host.served.facts()["vocab_size"]
        if host.tokenizer is None and isinstance(body.prompt, str):
            raise BadRequest("this server has no tokenizer: send token ids.")
        prompts = body.prompts(host.tokenizer, host.context, vocabulary)
        scoring = body.prompt_logprobs is not None
        work = host.score(prompts, body.prompt_logprobs or 0) if scoring else host.generate(prompts, body)
        return JSONResponse(schema.reply_of(await _while_connected(request, work), host.config.model))

    @app.post("/tokenize")
    async def tokenize(body: schema.Tokenize) -> dict[str, Any]:
        if body.messages is None:
            ids = host.tokenizer(body.prompt or "", add_special_tokens=body.add_special_tokens)["input_ids"]
        else:
            ids = host.tokenizer.apply_chat_template(
                body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, return_dict=False,
            )  # fmt: skip
        return {"count": len(ids), "max_model_len": host.context, "tokens": list(ids)}


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """The result; a client that goes away cancels its work."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()
        left.cancel()


def _holding(app: FastAPI, host: Host) -> None:
    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, Any]:
        await host.pause(mode)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, Any]:
        await host.resume()
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def reset() -> dict[str, Any]:
        await host.do(host.served.reset_cache)
        return {"success": True}


def _updating(app: FastAPI, host: Host) -> None:
    @app.post("/start_weight_update")
    async def start() -> dict[str, Any]:
        await host.start_update()
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").startswith(SAFETENSORS):
            data, digest = await request.body(), request.headers.get(CHECKSUM_HEADER, "")
            await host.update(lambda: host.served.load(checked_tensors(data, digest).items()))
            return {"message": "Weights updated"}
        info = schema.Update.model_validate((await request.json())["update_info"])
        local = request.client is not None and request.client.host in LOOPBACK
        if info.path is not None and (not local or "x-forwarded-for" in request.headers):
            raise Refusal(403, "a bucket in shared memory can come from this machine alone.")
        if info.complete:
            await host.update(host.served.complete_update, info.partial)
            host.complete = True
        else:
            await host.update(
                lambda: host.served.load(file_tensors(shared_path(info.path or ""), info.checksum).items())
            )
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(body: schema.Finish) -> dict[str, Any]:
        await host.finish_update(body.weight_version)
        return {"message": "Weight update finished"}

    @app.post("/update_weight_version")
    async def rename(body: schema.NewVersion) -> dict[str, Any]:
        host.served.version = body.new_version
        return {"success": True, "new_version": body.new_version}


def make_host(config: ServeConfig) -> Host:
    """Load model and tokenizer."""
    from transformers import GenerationConfig

    from posttrain.data.chat import terminal_token_ids

    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code, revision=config.revision)
    extra = {"revision": config.revision} if config.revision else {}
    try:
        # For its end tokens alone: sampling is what the request says, never what the checkpoint says.
        generation = GenerationConfig.from_pretrained(config.model, **extra)
    except OSError:
        generation = None
    model = create_model_from_path(
        config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code, **extra
    ).eval()
    model.requires_grad_(False)
    # Weights were mapped from the checkpoint's file, and a page that is first written in a push costs more than the rest.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    def make() -> BatchServed:
        options = {"pad_token_id": resolve_pad_token(tokenizer), "tokenizer": tokenizer}
        if config.engine == "hf":
            return BatchServed(model, **options)
        return NativeServed(model, max_slots=config.max_num_seqs, keep=config.enable_prefix_caching, **options)

    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = min((x for x in (config.max_model_len, own) if x is not None), default=None)
    stops = tuple(terminal_token_ids(tokenizer, generation))
    return Host(make, config, tokenizer=tokenizer, stops=stops, context=context)
