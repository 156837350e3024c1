"""`posttrain serve`: vLLM's endpoints over the native and hf engines, for machines without vLLM."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

import prometheus_client
import torch
from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from posttrain.errors import BadRequest, ConfigError, WeightSyncError
from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.server.replies import API_KEY_VARIABLE, LOOPBACK
from posttrain.rollouts.server.weight_sync import file_tensors, shared_path
from posttrain.serve.engines import NOT_WHOLE, Job, ServedEngine
from posttrain.serve.requests import Completions, Update, choices_of, score_choice
from posttrain.serve.server import ServeConfig

__all__ = ["Host", "TokenGuard", "create_app", "make_host"]


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


def _error(status: int, message: str) -> JSONResponse:
    """An error as vLLM's server words it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


class Host:
    """The endpoints, by the names of vLLM's server.

    Args:
        served: The engine.
        config: Of the server.
        stops: Token ids that end a completion unless ``ignore_eos``.
        context: Most tokens of prompt and completion; None: no limit.
    """

    def __init__(
        self, served: ServedEngine, config: ServeConfig, *, stops: tuple[int, ...] = (), context: int | None = None
    ) -> None:
        self.served, self.config, self.stops, self.context = served, config, stops, context
        self.facts = served.facts()
        self.registry = prometheus_client.CollectorRegistry()
        self.completed = prometheus_client.Counter("posttrain_completions", "Completions", registry=self.registry)
        running = prometheus_client.Gauge("posttrain_running", "Completions being written", registry=self.registry)
        running.set_function(lambda: served.running)

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the engine's thread, after the call under way."""
        return await asyncio.wrap_future(self.served.thread.submit(function, *args))

    # State

    async def health(self) -> Response:
        """200: the process answers."""
        return Response()

    async def models(self) -> dict[str, Any]:
        """The card of the one model."""
        card = {"id": self.config.model, "root": self.config.model, "parent": None, "max_model_len": self.context}
        return {"object": "list", "data": [card]}

    async def weight_info(self) -> dict[str, Any]:
        """The version of the weights."""
        return {"weight_version": self.served.version}

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(prometheus_client.generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def collective_rpc(self, method: Annotated[Literal["posttrain_facts"], Body(embed=True)]) -> dict[str, Any]:
        """``posttrain_facts``: what a trainer compares with its own model."""
        known = {"model": self.config.model, "revision": self.config.revision, "max_model_len": self.context}
        return {"results": [self.facts | known | {"logprobs_mode": "processed_logprobs"}]}

    # Generation

    async def completions(self, body: Completions) -> JSONResponse:
        """Completions of prompts; with ``prompt_logprobs`` their scores alone."""
        requests = body.requests(self.stops, self.context, self.facts["vocab_size"])
        if self.served.state == "failed":
            raise WeightSyncError(NOT_WHOLE, phase="generate")
        if body.prompt_logprobs is not None:
            scores = [await self.do(self.served.score, one.prompt_ids, body.prompt_logprobs) for one in requests]
            choices = [score_choice(one.prompt_ids, entries) for one, entries in zip(requests, scores, strict=True)]
        else:
            jobs = [Job(request) for request in requests]
            self.served.submit(jobs)
            await asyncio.gather(*(asyncio.wrap_future(job.rollouts) for job in jobs))
            choices = [choice for job in jobs for choice in choices_of(job, body.logprobs or 0)]
            self.completed.inc(len(choices))
        listed = [choice | {"index": index} for index, choice in enumerate(choices)]
        # Validation by FastAPI would cost more than sampling a short completion.
        return JSONResponse({"object": "text_completion", "model": self.config.model, "choices": listed})

    async def pause(self, mode: Literal["wait"] = "wait") -> dict[str, Any]:
        """Hold generation once the call under way has ended; requests that are not in it wait for `resume`."""
        self.served.paused = True
        await self.do(lambda: None)
        return {"status": "paused"}

    async def resume(self) -> dict[str, Any]:
        """Go on; fine without a pause."""
        self.served.paused = False
        self.served.submit([])
        return {"status": "resumed"}

    # Weights

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Nothing is kept from one call to the next."""
        return {"success": True}

    async def start_weight_update(self) -> dict[str, Any]:
        """Nothing is sampled until `finish_weight_update`."""
        await self.do(self.served.begin_update)
        return {"message": "Weight update started"}

    async def update_weights(
        self, update_info: Annotated[Update, Body(embed=True)], request: Request
    ) -> dict[str, Any]:
        """One bucket, or that all came; where it fails, the update has failed.

        Raises:
            HTTPException: 409, no update was begun, or the bucket is not what was announced; 403, the request came from
                another machine, whose memory is not ours.
        """
        if self.served.state != "updating":
            raise HTTPException(409, "start_weight_update must be called before update_weights.")
        if request.client is None or request.client.host not in LOOPBACK or "x-forwarded-for" in request.headers:
            raise HTTPException(403, "a bucket in shared memory can come from this machine alone.")
        try:
            await self.do(self._take, update_info)
        except Exception as error:
            await self.do(self.served.end_update, None)
            raise HTTPException(409, f"{type(error).__name__}: {error}") from error
        return {"message": "Weights updated"}

    def _take(self, info: Update) -> None:
        """A bucket in shared memory, or that all came."""
        if info.complete:
            self.served.complete_update()
        else:
            self.served.load(file_tensors(shared_path(info.path), info.checksum).items())

    async def finish_weight_update(
        self, weight_version: Annotated[str | None, Body(embed=True)] = None
    ) -> dict[str, Any]:
        """End an update: with a version the weights are whole, without one they stay mixed."""
        if weight_version is not None and self.served.state != "complete":
            raise HTTPException(409, "finish_weight_update came before all weights did.")
        await self.do(self.served.end_update, weight_version)
        return {"message": "Weight update finished"}

    async def update_weight_version(self, new_version: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        """Call the weights otherwise."""
        self.served.version = new_version
        return {"success": True, "new_version": new_version}


def create_app(host: Host) -> FastAPI:
    """The endpoints of a host, under the paths of vLLM's server."""
    app = FastAPI(title="posttrain serve")
    for endpoint in (host.health, host.weight_info, host.metrics):
        app.get(f"/{endpoint.__name__}")(endpoint)
    app.get("/v1/models")(host.models)
    app.post("/v1/completions")(host.completions)
    for endpoint in (
        host.collective_rpc, host.pause, host.resume, host.reset_prefix_cache, host.start_weight_update, host.update_weights,
        host.finish_weight_update, host.update_weight_version,
    ):  # fmt: skip
        app.post(f"/{endpoint.__name__}")(endpoint)
    for kind in (Exception, HTTPException, ConfigError, BadRequest, WeightSyncError, RequestValidationError):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(TokenGuard, api_key=host.config.api_key)  # type: ignore[arg-type]
    return app


def _answer(_: Request, error: Exception) -> JSONResponse:
    """An error as a reply."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, ConfigError | BadRequest | RequestValidationError):
        return _error(400, str(error))
    return _error(409 if isinstance(error, WeightSyncError) else 500, f"{type(error).__name__}: {error}")


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
    options = {"pad_token_id": resolve_pad_token(tokenizer), "tokenizer": tokenizer}
    if config.engine == "hf":
        engine: Any = HFEngine(model, **options)
    else:
        engine = NativeEngine(model, max_slots=config.max_num_seqs, **options)
    limits = (config.max_model_len, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    context = min((limit for limit in limits if limit is not None), default=None)
    return Host(ServedEngine(engine), config, stops=tuple(terminal_token_ids(tokenizer, generation)), context=context)
