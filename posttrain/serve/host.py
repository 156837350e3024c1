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
from fastapi import FastAPI, HTTPException, Request
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
        self.written = prometheus_client.Counter("posttrain_completions", "Completions", registry=self.registry)
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

    # What it is --------------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """200 while the engine's thread lives and is not stuck (a call of transformers' generate may take long)."""
        silent = time.monotonic() - self.beat > SILENT_S and self.served.name == "native"
        return Response(status_code=503 if self.failure is not None or silent else 200)

    async def models(self) -> dict[str, Any]:
        """The card of the one model."""
        card = {"id": self.config.model, "object": "model", "owned_by": "posttrain", "root": self.config.model}
        return {"object": "list", "data": [card | {"parent": None, "max_model_len": self.context}]}

    async def weight_info(self) -> dict[str, Any]:
        """The version of the weights."""
        return {"weight_version": self.served.version}

    async def is_paused(self) -> dict[str, Any]:
        """Whether generation is held."""
        return {"is_paused": self.paused is not None}

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(prometheus_client.generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def collective_rpc(self, body: schema.Rpc) -> dict[str, Any]:
        """``posttrain_facts``: what a trainer compares with its own model."""
        if body.method != "posttrain_facts":
            raise BadRequest(f"method={body.method!r} is not known here; posttrain_facts is.")
        known = {"model": self.config.model, "revision": self.config.revision, "max_model_len": self.context}
        return {"results": [self.served.facts() | known | {"logprobs_mode": "processed_logprobs"}]}

    # Generation ----------------------------------------------------------------------------------------------------------

    async def completions(self, body: schema.Completions, request: Request) -> JSONResponse:
        """Completions of prompts; with ``prompt_logprobs`` their scores alone."""
        if self.tokenizer is None and isinstance(body.prompt, str):
            raise BadRequest("this server has no tokenizer: send token ids.")
        prompts = body.prompts(self.tokenizer, self.context, self.served.facts()["vocab_size"])
        if not self.whole and not self.updating:
            raise HTTPException(409, NOT_WHOLE)
        scoring = body.prompt_logprobs is not None
        work = self._score(prompts, body.prompt_logprobs or 0) if scoring else self._generate(prompts, body)
        return JSONResponse(schema.reply_of(await _while_connected(request, work), self.config.model))

    async def _generate(self, prompts: list[list[int]], body: schema.Completions) -> list[dict[str, Any]]:
        """Choices of all prompts, in order; a client that goes away takes its jobs with it."""
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
        self.written.inc(len(choices))
        self.tokens.inc(sum(len(choice["token_ids"]) for choice in choices))
        return choices

    def _submit(self, jobs: list[Job]) -> None:
        if self.paused is not None:
            self.held += jobs
            return
        for job in jobs:
            self.served.submit(job)

    async def _score(self, prompts: list[list[int]], top: int) -> list[dict[str, Any]]:
        """Choices that hold ``prompt_logprobs`` and no completion."""
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

    async def tokenize(self, body: schema.Tokenize) -> dict[str, Any]:
        """Token ids of a text, or of a conversation by the model's chat template."""
        if body.messages is None:
            ids = self.tokenizer(body.prompt or "", add_special_tokens=body.add_special_tokens)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, return_dict=False,
            )  # fmt: skip
        return {"count": len(ids), "max_model_len": self.context, "tokens": list(ids)}

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, Any]:
        """Hold generation: what runs is kept as it is, ended with what is written, or waited for.

        Raises:
            HTTPException: 504, requests did not end in time.
        """
        self.paused = mode
        if mode == "abort":
            await self.do(lambda: [self.served.cut(job) for job in list(self.served.jobs)])
        deadline = time.monotonic() + self.config.drain_timeout
        while mode != "keep" and self.served.jobs:
            if time.monotonic() > deadline:
                raise HTTPException(
                    504, f"{len(self.served.jobs)} prompts still run after {self.config.drain_timeout:g} s."
                )
            await asyncio.sleep(0.005)
        await self.do(_nothing)
        return {"status": "paused"}

    async def resume(self) -> dict[str, Any]:
        """Go on; fine without a pause."""
        self.paused = None
        held, self.held = self.held, []
        await self.do(self._submit, held)
        return {"status": "resumed"}

    # Weights -------------------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget keys and values of earlier requests."""
        await self.do(self.served.reset_cache)
        return {"success": True}

    async def start_weight_update(self) -> dict[str, Any]:
        """Nothing is sampled until `finish_weight_update`."""
        self.updating, self.complete, self.whole = True, False, False
        await self.do(self.served.begin_update)
        return {"message": "Weight update started"}

    async def update_weights(self, request: Request) -> dict[str, Any]:
        """One bucket, or that all came; where it fails, the update has failed.

        Raises:
            HTTPException: 409, no update was begun, or the bucket is not what was announced; 403, it lies in the memory of
                another machine.
        """
        if not self.updating:
            raise HTTPException(409, "start_weight_update must be called before update_weights.")
        served = self.served
        if request.headers.get("content-type", "").startswith(SAFETENSORS):
            data, digest = await request.body(), request.headers.get(CHECKSUM_HEADER, "")
            work: Callable[[], Any] = lambda: served.load(checked_tensors(data, digest).items())  # noqa: E731
        else:
            info = schema.Update.model_validate((await request.json())["update_info"])
            local = request.client is not None and request.client.host in LOOPBACK
            if info.path is not None and (not local or "x-forwarded-for" in request.headers):
                raise HTTPException(403, "a bucket in shared memory can come from this machine alone.")
            work = functools.partial(self._take, info)
        try:
            await self.do(work)
        except Exception as error:
            await self._end_update(None)
            raise HTTPException(409, f"{type(error).__name__}: {error}") from error
        return {"message": "Weights updated"}

    def _take(self, info: schema.Update) -> None:
        """A bucket in shared memory, or that all came."""
        if info.complete:
            self.served.complete_update(info.partial)
            self.complete = True
        else:
            self.served.load(file_tensors(shared_path(info.path or ""), info.checksum).items())

    async def finish_weight_update(self, body: schema.Finish) -> dict[str, Any]:
        """End an update: with a version the weights are whole, without one they stay mixed."""
        if body.weight_version is not None and not (self.updating and self.complete):
            raise HTTPException(409, "finish_weight_update came before all weights did.")
        await self._end_update(body.weight_version)
        return {"message": "Weight update finished"}

    async def _end_update(self, version: str | None) -> None:
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
            self.served.fail(job, HTTPException(409, NOT_WHOLE))

    async def update_weight_version(self, body: schema.NewVersion) -> dict[str, Any]:
        """Call the weights otherwise."""
        self.served.version = body.new_version
        return {"success": True, "new_version": body.new_version}


def _nothing() -> None:
    pass


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


def create_app(host: Host) -> FastAPI:
    """The endpoints of a host, under the paths of vLLM's server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        host.close()

    app = FastAPI(title="posttrain serve", lifespan=lifespan)
    for endpoint in (host.health, host.weight_info, host.is_paused, host.metrics):
        app.get(f"/{endpoint.__name__}")(endpoint)
    app.get("/v1/models")(host.models)
    app.post("/v1/completions")(host.completions)
    for endpoint in (
        host.tokenize, host.collective_rpc, host.pause, host.resume, host.reset_prefix_cache, host.start_weight_update,
        host.update_weights, host.finish_weight_update, host.update_weight_version,
    ):  # fmt: skip
        app.post(f"/{endpoint.__name__}")(endpoint)
    for kind in (Exception, HTTPException, ConfigError, BadRequest, ClientDisconnect, RequestValidationError):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(TokenGuard, api_key=host.config.api_key)  # type: ignore[arg-type]

    @app.middleware("http")
    async def count(request: Request, following: Any) -> Any:
        response = await following(request)
        path = getattr(request.scope.get("route"), "path", "other")
        host.requests.labels(path, response.status_code).inc()
        return response

    return app


def _answer(_: Request, error: Exception) -> JSONResponse:
    """An error as a reply."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, ConfigError | BadRequest):
        return _error(400, str(error), index=getattr(error, "index", None))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return _error(400, f"{where}: {first['msg']}.", param=where)
    if isinstance(error, ClientDisconnect):
        return _error(499, "the client went away.")
    return _error(500, f"{type(error).__name__}: {error}")


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
