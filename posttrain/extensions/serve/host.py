"""HTTP endpoints of `posttrain serve`. They have the interface of vLLM's endpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import prometheus_client
import torch
from fastapi import Body, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException as AnyHTTPException

from posttrain.data.chat import terminal_token_ids
from posttrain.errors import BadRequest, ConfigError, DataError, ModelError, RolloutError, WeightSyncError
from posttrain.extensions.images.picture import Placed, read_picture
from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.serve.engine import NOT_WHOLE, Job, ServedEngine
from posttrain.extensions.server.bodies import first_errors, read_json
from posttrain.extensions.server.guard import guard_for
from posttrain.extensions.server.replies import LOOPBACK, error_body
from posttrain.models.architecture import context_length
from posttrain.models.heads import has_tower, picture_encoder
from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token
from posttrain.models.probe import probe_head
from posttrain.rollouts.adapters import TENSORS, read_adapter
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.native.requests import check_requests
from posttrain.rollouts.sampling import reshapes, structured_guide
from posttrain.rollouts.shared_memory import file_tensors, shared_path
from posttrain.types import Request as Prompt
from posttrain.types import Rollout, Sampling

if TYPE_CHECKING:
    from torch import nn

# Stop the validation of a list at its first error. Otherwise, the error messages could be 100 times as long as the list.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1, fail_fast=True)]
# Range of divisors of logits, such as the temperature. With a smaller divisor, logits could become infinite.
LEAST_DIVISOR, MOST_DIVISOR = 1e-5, 1e5
MOST_BIAS = 1e9
# Limits of an image: MOST_BYTES encoded bytes and MOST_PIXELS pixels. Both limits are needed, because a small file can
# decode to an image that does not fit into memory.
MOST_BYTES, MOST_PIXELS = 32 * 2**20, 64 * 10**6
# An engine call is interrupted if all of its clients have disconnected. The interruption is repeated at this interval in
# seconds until the call ends.
LET_GO_S = 0.05
# Maximum rounding error of a sum of float32 probabilities.
MASS_ROUNDING = 1e-5


MOST_PICTURES = 1024
# Maximum number of characters of a guide (JSON schema, regular expression or grammar). The engine's thread compiles guides.
# Compiling takes 1 s for 20,000 characters and 11 s for 100,000 characters.
MOST_GUIDE_CHARACTERS = 2**15


class Strict(BaseModel):
    """Base class of request bodies. Unknown fields are rejected, because silently ignoring a field could change the samples."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """Reject all unknown fields with one error message. pydantic would write one message per field."""
        if isinstance(value, dict) and (unknown := value.keys() - cls.model_fields.keys()):
            named = ", ".join(repr(name)[:100] for name in sorted(unknown)[:3])
            raise ValueError(f"{len(unknown)} unknown fields: {named}")
        return value


def _biases(value: Any) -> Any:
    """Check that ``logit_bias`` maps token ids to allowed biases. The error message contains the first invalid entry."""
    for token, bias in value.items() if isinstance(value, dict) else ():
        if not (str(token).isdecimal() and isinstance(bias, int | float) and abs(bias) <= MOST_BIAS):
            raise ValueError(
                f"{str(token)[:100]!r}: {str(bias)[:100]} is not a token id with a bias of up to {MOST_BIAS:g}"
            )
    return value


def _few(value: Any) -> Any:
    """Reject a request with too many images."""
    if isinstance(value, dict) and len(value) > MOST_PICTURES:
        raise ValueError(f"{len(value)} images, but the maximum is {MOST_PICTURES}")
    return value


class PlacedPicture(Strict):
    """Position of an image in the prompt. ``digest`` is its key in ``pictures``. The trainer has computed its size and its
    number of placeholder tokens.
    """

    digest: str
    start: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]
    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    background: Literal["white", "black"] = "white"


class Completions(Strict):
    """Body of ``/v1/completions``. If ``prompt_logprobs`` is set, prompts are scored and no completions are generated."""

    model: str | None = None
    prompt: TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Literal[0] | Annotated[float, Field(ge=LEAST_DIVISOR)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=LEAST_DIVISOR, le=MOST_DIVISOR)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)]
    ) = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: Literal[False] = False
    pictures: Annotated[
        dict[str, Annotated[str, Field(max_length=MOST_BYTES * 4 // 3 + 4)]], BeforeValidator(_few)
    ] = {}
    placed: Annotated[list[PlacedPicture], Field(fail_fast=True)] = []

    def requests(self, stops: Sequence[int], context: int | None, vocabulary: int, encoder: Any = None) -> list[Prompt]:
        """Create one engine request per prompt. Check that each prompt fits into the model's context and vocabulary.

        Args:
            stops: Token ids that end a completion. They are not used if ``ignore_eos`` is set.
            context: Maximum number of tokens of a prompt with its completion. None: no limit.
            vocabulary: Vocabulary size of the model.
            encoder: Image encoder. None: the model supports only text.

        Raises:
            ConfigError: ``structured_outputs`` is invalid.
            BadRequest: A prompt is too long, an image is invalid, or server and trainer place images differently.
        """
        sampling = Sampling(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=tuple(dict.fromkeys([*self.stop_token_ids, *(() if self.ignore_eos else stops)])),
            seed=self.seed,
            min_new_tokens=self.min_tokens,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            guide=None if self.structured_outputs is None else structured_guide(self.structured_outputs),
        )
        if sampling.guide is not None and len(sampling.guide[1]) > MOST_GUIDE_CHARACTERS:
            raise BadRequest(
                f"structured_outputs has {len(sampling.guide[1])} characters, but the maximum is "
                f"{MOST_GUIDE_CHARACTERS}. Fix: use a shorter guide."
            )
        never = sampling.left_out.never
        sampling = replace(sampling, top_logps=self.logprobs + len(never) if self.logprobs else 0)
        others = tuple(pair for pair in sampling.logit_bias if pair[0] not in never)
        if self.logprobs and reshapes(replace(sampling, logit_bias=others)):
            raise BadRequest(
                "logprobs above 0 cannot be combined with a repetition penalty, a guide, min_tokens, or a finite bias. "
                "Fix: set logprobs=0, or use vLLM's server."
            )
        prompts: Any = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        if self.placed and (encoder is None or len(prompts) > 1):
            raise BadRequest(
                "images are supported only in requests with a single prompt, and only if the model accepts images."
            )
        if self.placed and self.prompt_logprobs is not None:
            raise BadRequest("prompts with images cannot be scored. Fix: remove prompt_logprobs, or remove the images.")
        try:
            pictures = self._held(prompts[0], encoder) if self.placed else ()
            requests = [Prompt(ids, self.n, sampling, pictures=pictures) for ids in prompts]
            placeholder = None if encoder is None else encoder.processor.token_id
            check_requests(requests, sampling, context, vocabulary, placeholder=placeholder)
        except (DataError, RolloutError) as error:
            raise BadRequest(str(error)) from error
        return requests

    def _held(self, ids: Sequence[int], encoder: Any) -> list[Placed]:
        """Decode the images of a prompt. Check that this server and the trainer place them at the same tokens.

        Raises:
            DataError: An image is invalid or too large, or server and trainer place images at different tokens (PT-G016).
        """
        pictures = []
        for number, sent in enumerate(self.placed):
            where = f"picture {number}"
            address = f"data:;base64,{self.pictures.get(sent.digest, '')}"
            if math.prod(sent.size) > MOST_PIXELS:
                raise DataError(f"{where} has {math.prod(sent.size)} pixels, but the maximum is {MOST_PIXELS}.")
            pictures.append(read_picture(address, where, sent.background, MOST_PIXELS).resized(sent.size))
        placed = encoder.processor.place(ids, pictures)
        theirs, ours = [(p.start, p.count) for p in self.placed], [(p.start, p.count) for p in placed]
        if theirs != ours:
            raise DataError(f"PT-G016: the server places images at {ours} (start, count), but the trainer at {theirs}.")
        return placed


class Update(Strict):
    """Body of ``/update_weights``: the path and checksum of a bucket in shared memory, or ``complete`` after the last
    bucket.
    """

    path: str = ""
    checksum: str = ""
    complete: bool = False


def choices_of(job: Job, top: int) -> list[dict[str, Any]]:
    """Convert the completions of a finished job to choices of ``/v1/completions``. Choices contain token ids, but
    no text.

    Args:
        job: Finished job.
        top: Number of most likely tokens to return at every position, in addition to the sampled token.
    """
    return [
        {
            "finish_reason": rollout.finish_reason,
            "token_ids": rollout.token_ids,
            "prompt_token_ids": job.request.prompt_ids,
            "logprobs": _logprobs(rollout, top, job.request.sampling or Sampling(1)),
            "weight_version": job.version,
        }
        for rollout in job.rollouts.result()
    ]


def _logprobs(rollout: Rollout, top: int, sampling: Sampling) -> dict[str, Any]:
    """Return log-probs of the sampled distribution (vLLM's ``processed_logprobs``). Tokens have keys of the form
    ``token_id:ID``.
    """
    # Log-probs of greedy completions are computed at temperature 1 without truncation, as in vLLM.
    greedy = sampling.temperature == 0 and not reshapes(sampling)
    drawn = (not greedy and rollout.processed_logp) or rollout.logp
    best, never = rollout.top_logps or [[]] * len(drawn), sampling.left_out.never
    tops = []
    for at, token, own, raw in zip(best, rollout.token_ids, drawn, rollout.logp, strict=True):
        whole = greedy or (sampling.temperature > 0 and not sampling.truncation)
        likeliest = _left([pair for pair in at if pair[0] not in never][:top], own - raw, whole)
        tops.append({f"token_id:{i}": _finite(x) for i, x in likeliest} | {f"token_id:{token}": _finite(own)})
    return {"token_logprobs": [_finite(value) for value in drawn], "top_logprobs": tops}


def _left(at: Sequence[tuple[int, float]], gain: float, whole: bool) -> Iterator[tuple[int, float]]:
    """Yield the most likely tokens that remain after truncation (such as top-p), with their log-probs in the truncated
    distribution.

    Args:
        at: Pairs of token id and log-prob before truncation, most likely token first.
        gain: Number that truncation adds to each log-prob. It is minus the log of the total probability of the remaining
            tokens.
        whole: Whether all tokens remain after truncation. If False, tokens are yielded until their total probability is
            that of the remaining tokens.
    """
    mass = 0.0
    for token, logp in at:
        if whole or mass < math.exp(-gain) - MASS_ROUNDING:
            yield token, logp + gain
        mass += math.exp(logp)


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, because JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


# Endpoints of the server.

logger = logging.getLogger(__name__)


def _error(status: int, message: str) -> JSONResponse:
    """Return an error response in the format of vLLM's server."""
    return JSONResponse(error_body(status, message), status_code=status)


class Host:
    """HTTP endpoints of a server, with the names of vLLM's endpoints.

    Args:
        served: Engine that processes requests.
        config: Config of the server.
        stops: Token ids that end a completion. They are not used if ``ignore_eos`` is set.
        context: Maximum number of tokens of a prompt with its completion. None: no limit.
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
        # Thread that parses request bodies one by one. The event loop can handle other requests in the meantime.
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="reading")

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the engine's thread, after the current engine call."""
        return await asyncio.wrap_future(self.served.thread.submit(function, *args))

    # Endpoints that report the server's state.

    async def health(self) -> Response:
        """Return status 200. It means that the server is running."""
        return Response()

    async def models(self) -> dict[str, Any]:
        """Return the name and the context length of the served model."""
        card = {"id": self.config.model, "root": self.config.model, "parent": None, "max_model_len": self.context}
        return {"object": "list", "data": [card]}

    async def weight_info(self) -> dict[str, Any]:
        """Return the version names of the current weights and of the base model's weights."""
        return {"weight_version": self.served.version, "base_version": self.served.base_version}

    async def metrics(self) -> Response:
        """Return counters for Prometheus."""
        return Response(prometheus_client.generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def collective_rpc(self, method: Annotated[Literal["posttrain_facts"], Body(embed=True)]) -> dict[str, Any]:
        """Return the server's properties. The only supported ``method`` is ``posttrain_facts``."""
        properties = {"model": self.config.model, "revision": self.config.revision, "max_model_len": self.context}
        return {"results": [self.facts | properties | {"logprobs_mode": "processed_logprobs"}]}

    # Endpoints that generate completions.

    async def completions(self, request: Request) -> Response:
        """Complete prompts, or score them if ``prompt_logprobs`` is set. If the client disconnects, its jobs are canceled.

        The request body is a JSON object with the fields of `Completions`.
        """
        body, requests = await self.read(self._requests, await request.body())
        if self.served.state == "failed":
            raise WeightSyncError(NOT_WHOLE, phase="generate")
        if body.prompt_logprobs is not None:
            left = threading.Event()
            prompts = [item.prompt_ids for item in requests]
            scores = self.do(self.served.score, prompts, body.prompt_logprobs, left)
            if (choices := await _unless_gone(request, scores)) is None:
                left.set()
                return Response(status_code=499)
        else:
            jobs = [Job(request) for request in requests]
            self.served.submit(jobs)
            written = asyncio.gather(*(asyncio.wrap_future(job.rollouts) for job in jobs))
            if await _unless_gone(request, written) is None:
                while self.served.let_go(jobs):
                    await asyncio.sleep(LET_GO_S)
                return Response(status_code=499)
            choices = [choice for job in jobs for choice in choices_of(job, body.logprobs or 0)]
            self.completed.inc(len(choices))
        listed = [choice | {"index": index} for index, choice in enumerate(choices)]
        # Return a response object. FastAPI's validation of a dict would take longer than sampling a short completion.
        return JSONResponse({"object": "text_completion", "model": self.config.model, "choices": listed})

    async def read(self, function: Callable[[bytes], Any], raw: bytes) -> Any:
        """Call ``function`` with the bytes of a request body in the thread that parses request bodies."""
        return await asyncio.wrap_future(self.reading.submit(function, raw))

    def _requests(self, raw: bytes) -> tuple[Completions, list[Prompt]]:
        """Parse a request body, and create its engine requests.

        Raises:
            BadRequest: The body is invalid. See also `Completions.requests`.
        """
        try:
            body = Completions.model_validate_json(raw)
        except ValidationError as error:
            raise BadRequest(first_errors(error.errors(include_url=False))) from error
        encoder = picture_encoder(self.served.model)
        return body, body.requests(self.stops, self.context, self.facts["vocab_size"], encoder)

    async def pause(self, mode: Literal["wait"] = "wait") -> dict[str, Any]:
        """Pause generation after the current engine call. New requests wait until `resume` is called."""
        self.served.paused = True
        await self.do(lambda: None)
        return {"status": "paused"}

    async def resume(self) -> dict[str, Any]:
        """Resume generation. The call has no effect if generation is not paused."""
        self.served.paused = False
        self.served.submit([])
        return {"status": "resumed"}

    # Endpoints that update the weights.

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """Return success without doing anything, because this server caches nothing between engine calls."""
        return {"success": True}

    async def start_weight_update(self, request: Request) -> dict[str, Any]:
        """Begin a weight update. No completions are sampled until `finish_weight_update` is called."""
        # Read the body before responding. With ``Connection: close``, an unread body would reset the connection before the
        # client receives the response.
        await request.body()
        await self.do(self.served.begin_update)
        return {"message": "Weight update started"}

    async def update_weights(
        self, update_info: Annotated[Update, Body(embed=True)], request: Request
    ) -> dict[str, Any]:
        """Load one bucket, or record that all buckets have arrived. After an error, the whole weight update has failed.

        Raises:
            HTTPException: Status 409: no update was started, or the bucket is invalid. Status 403: the client runs on
                another machine, so it cannot share memory with this server.
        """
        if self.served.state != "updating":
            raise HTTPException(409, "call start_weight_update before update_weights.")
        _same_machine(request)
        try:
            if update_info.complete:
                await self.do(self.served.complete_update)
            else:
                path, checksum = update_info.path, update_info.checksum
                await self.do(lambda: self.served.load(file_tensors(shared_path(path), checksum).items()))
        except Exception as error:
            await self.do(self.served.end_update, None)
            raise HTTPException(409, f"{type(error).__name__}: {error}") from error
        return {"message": "Weights updated"}

    async def finish_weight_update(
        self, weight_version: Annotated[str | None, Body(embed=True)] = None
    ) -> dict[str, Any]:
        """End a weight update. Without ``weight_version``, the update has failed, and the weights are incomplete."""
        if self.served.state == "whole" or (weight_version is not None and self.served.state != "complete"):
            raise HTTPException(
                409, "finish_weight_update was called without start_weight_update, or before all weights were received."
            )
        await self.do(self.served.end_update, weight_version)
        return {"message": "Weight update finished"}

    async def load_lora_adapter(
        self, lora_name: Annotated[str, Body()], lora_path: Annotated[str, Body()], request: Request
    ) -> dict[str, Any]:
        """Add an adapter to the base model, and use it for sampling. The adapter's name becomes the version of the
        weights.

        Raises:
            HTTPException: Status 403: the client runs on another machine.
            WeightSyncError: The weights are incomplete.
        """
        _same_machine(request)
        if self.served.state != "whole":
            raise WeightSyncError(NOT_WHOLE, phase="adapter")
        folder = shared_path(f"{lora_path}/{TENSORS}").parent
        await self.do(lambda: self.served.load_adapter(lora_name, *read_adapter(folder)))
        return {"message": f"LoRA adapter '{lora_name}' added"}

    async def unload_lora_adapter(self, lora_name: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        """Return success without doing anything, because the next adapter replaces the current one."""
        return {"message": f"LoRA adapter '{lora_name}' removed"}

    async def update_weight_version(self, new_version: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        """Set the version name of the current weights."""
        self.served.version = self.served.base_version = new_version
        return {"success": True, "new_version": new_version}


async def _unless_gone(request: Request, awaitable: Awaitable[Any]) -> Any:
    """Wait for the result of ``awaitable``. If the client disconnects first, cancel ``awaitable`` and return None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    wanted, left = asyncio.ensure_future(awaitable), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({wanted, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
    if not wanted.done():
        wanted.cancel()
        # Wait until the canceled task has ended. Otherwise, asyncio would log that its exception was never retrieved.
        await asyncio.gather(wanted, return_exceptions=True)
        return None
    return await wanted


def _same_machine(request: Request) -> None:
    """Reject the request of a client on another machine, because weights are passed through shared memory."""
    if request.client is None or request.client.host not in LOOPBACK or "x-forwarded-for" in request.headers:
        raise HTTPException(403, "weights in shared memory are accepted only from this machine.")


def create_app(host: Host) -> FastAPI:
    """Create the FastAPI application with the endpoints of a host. Their paths are the same as in vLLM's server."""

    class Read(Request):
        """Request whose JSON body is parsed in the host's thread for parsing."""

        async def json(self) -> Any:
            """Parse the body as JSON.

            Raises:
                HTTPException: Status 400, with the message of `read_json`. FastAPI would hide the message of another
                    exception.
            """
            try:
                return await host.read(read_json, await self.body())
            except BadRequest as error:
                raise HTTPException(400, str(error)) from error

    class Route(APIRoute):
        """Route that passes `Read` objects to its endpoint."""

        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
            """Return a handler that converts requests to `Read` objects. See `APIRoute.get_route_handler`."""
            handler = super().get_route_handler()

            async def answer(request: Request) -> Response:
                return await handler(Read(request.scope, request.receive))

            return answer

    app = FastAPI(title="posttrain serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.route_class = Route
    for endpoint in (host.health, host.weight_info, host.metrics):
        app.get(f"/{endpoint.__name__}")(endpoint)
    app.get("/v1/models")(host.models)
    for endpoint in (host.completions, host.load_lora_adapter, host.unload_lora_adapter):
        app.post(f"/v1/{endpoint.__name__}")(endpoint)
    for endpoint in (
        host.collective_rpc, host.pause, host.resume, host.reset_prefix_cache, host.start_weight_update, host.update_weights,
        host.finish_weight_update, host.update_weight_version,
    ):  # fmt: skip
        app.post(f"/{endpoint.__name__}")(endpoint)
    for kind in (
        Exception,
        AnyHTTPException,
        ConfigError,
        BadRequest,
        ModelError,
        WeightSyncError,
        RequestValidationError,
    ):
        app.add_exception_handler(kind, _answer)
    images = picture_encoder(host.served.model) is not None
    guard: Any = guard_for(host.config.host)
    app.add_middleware(guard, api_key=host.config.api_key, images=images)
    return app


def _answer(_: Request, error: Exception) -> JSONResponse:
    """Convert an exception to an HTTP response that contains the exception's message."""
    if isinstance(error, AnyHTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, RequestValidationError):
        return _error(400, first_errors(error.errors()))
    if isinstance(error, ConfigError | BadRequest | ModelError):
        return _error(400, str(error))
    return _error(409 if isinstance(error, WeightSyncError) else 500, f"{type(error).__name__}: {error}")


def make_host(config: ServeConfig) -> Host:
    """Load the model and the tokenizer, and create the host."""
    options = {"trust_remote_code": config.trust_remote_code, "revision": config.revision or "main"}
    tokenizer = load_tokenizer(config.model, **options)
    model: Any = create_model_from_path(config.model, dtype=config.dtype, **options).requires_grad_(False).eval()
    # Copy the weights now, because from_pretrained memory-maps the checkpoint. Otherwise, the first write to each memory
    # page during a weight update would be slow.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    _let_hold_pictures(model, config.model, options)
    probe_head(model)
    engine: Any = create_engine(config.engine, model, pad_token_id=resolve_pad_token(tokenizer))
    engine.tokenizer = tokenizer
    if config.engine == "native" and config.max_num_seqs is not None:
        engine.max_slots = config.max_num_seqs
    limits = (config.max_model_len, context_length(model.config.get_text_config()))
    context = min((limit for limit in limits if limit is not None), default=None)
    # Use the stop tokens in the checkpoint's generation config, but not its sampling settings.
    stops = terminal_token_ids(tokenizer, model.generation_config)
    return Host(ServedEngine(engine), config, stops=stops, context=context)


def _let_hold_pictures(model: nn.Module, path: str, options: dict[str, Any]) -> None:
    """Enable images in prompts if the model has a vision tower. If its processor is not supported, log the reason instead."""
    if not has_tower(model):
        return
    from posttrain.extensions.images.encoder import install_pictures
    from posttrain.extensions.images.processors import load_processor

    try:
        install_pictures(model, load_processor(path, **options))
    except ModelError as error:
        logger.warning("%s is served for text only: %s", path, error)
