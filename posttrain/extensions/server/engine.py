"""`ServerEngine`: rollouts from one or several servers over HTTP. It verifies the prompt and weight version of each
response.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from posttrain.errors import BadRequest, RolloutServerError, ServerUnreachable, WeightSyncError
from posttrain.extensions.server.checks import check_info, needs_of, probe_logprobs
from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.pool import AWAY, Server, ServerPool, Urls
from posttrain.extensions.server.replies import read_choice, reading, sampling_body
from posttrain.extensions.server.weight_sync import Pusher, as_sync_error
from posttrain.integrations.network import host_and_port
from posttrain.models import parallel
from posttrain.models.architecture import shape_of
from posttrain.models.heads import causal_lm, picture_encoder
from posttrain.rollouts.adapters import AdapterWeights
from posttrain.rollouts.base import Capabilities, RolloutEngine, WeightTransfer, check_followed
from posttrain.rollouts.native.requests import check_requests
from posttrain.rollouts.sampling import derived_seed
from posttrain.rollouts.shared_weights import VERSIONS_KEPT, as_dtype
from posttrain.types import Finding, Request, Rollout, Sampling

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

CALL_RETRIES = 3
# Interval in seconds at which the engine checks whether an unavailable server is available again.
LOOK_SECONDS = 2.0
# Fields of `Sampling` that servers do not support.
UNKNOWN = ("no_repeat_ngram",)
Found = TypeVar("Found")
Answers = dict[VLLMClient, WeightSyncError | None]
# A part of the requests of one call. Each request has its index in the call. All requests of a chunk have the same number
# of completions, and their sampling settings differ only in seeds.
Chunk = list[tuple[int, Request]]


def server_options(args: PostTrainingConfig) -> dict[str, Any]:
    """Return keyword arguments for `ServerEngine` from the server options of a config."""
    return {
        "request_timeout": args.vllm_request_timeout,
        "sync_timeout": args.vllm_sync_timeout,
        "bucket_mb": args.vllm_weight_bucket_mb,
        "group_port": args.vllm_group_port,
        "patience": args.vllm_server_timeout,
        "api_key": args.vllm_server_api_key,
    }


class NonMainRankEngine(RolloutEngine):
    """Engine of all ranks except rank 0. Using it raises an error, because rank 0 sends the requests of all ranks."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name, self.capabilities = name, capabilities

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Raise an error, because only rank 0 generates."""
        raise AssertionError("rank 0 sends the requests of all ranks")

    def load_weights(self, named_tensors: Any, version: int) -> None:
        """Raise an error, because only rank 0 pushes weights."""
        raise AssertionError("rank 0 pushes weights to the servers for all ranks")

    def close(self) -> None:
        """Do nothing, because there are no resources."""


class ServerEngine(RolloutEngine):
    """Rollout engine for servers that have a copy of the policy's weights.

    Each request is sent to the server with the fewest tokens left to generate. If a server fails, its requests are sent to
    other servers with the same seeds. Servers can join and leave during a run. A new server is used after it has received
    the current weights.

    The name of a weight version on servers is ``RUN-NUMBER``, where ``RUN`` is unique for every engine object. Every
    response must contain the version of the weights that sampled it. A response that was sampled with another version or
    with another trainer's weights is rejected.

    Args:
        urls: Addresses of the servers. See `ServerPool` for the accepted forms.
        connection_timeout: Maximum number of seconds until the first server is healthy. None: do not wait, because
            servers may join later.
        request_timeout: Timeout of a request in seconds. See `VLLMClient` for the default.
        sync_timeout: Timeout of each HTTP call of a weight update, in seconds.
        bucket_mb: Size of a bucket of weights in MiB.
        group_port: Port of the NCCL group for weight updates between GPUs. 0 selects a free port.
        pushes: Whether this process pushes weights. If True, the servers are locked for other trainers on this machine.
        api_key: Bearer token of the servers.
        patience: Maximum number of seconds for which a call waits if no server is available.
        reader: Image processor for prompts. None: prompts contain only text.

    Raises:
        ServerUnreachable: No server is healthy within ``connection_timeout``.
        ServerBusy: Another trainer on this machine uses a server.

    >>> engine = ServerEngine("http://127.0.0.1:8000")  # doctest: +SKIP
    >>> engine.load_weights(Weights(model), version=1)  # doctest: +SKIP
    """

    name = "server"

    def __init__(
        self,
        urls: Urls,
        *,
        connection_timeout: float | None = 240.0,
        request_timeout: float | None = None,
        sync_timeout: float = 720.0,
        bucket_mb: int = 512,
        group_port: int = 51216,
        pushes: bool = True,
        api_key: str | None = None,
        patience: float = 0.0,
        reader: PictureProcessor | None = None,
    ) -> None:
        def connect(url: str) -> VLLMClient:
            limits = {"request_timeout": request_timeout, "sync_timeout": sync_timeout}
            return VLLMClient(url, **limits, group_port=group_port, api_key=api_key, reader=reader)

        self.patience, self.run = patience, secrets.token_hex(4)
        self.pushed = False
        # Whether to assume that the weights that servers loaded at their start equal the trainer's base model. False after
        # a comparison of log-probs has failed.
        self.trusts_bases = True
        self.bases = 0  # Number of times that the base weights became outdated.
        self._adapters: list[str] = []
        self.pusher = Pusher(bucket_mb * 2**20)
        self.fleet = ServerPool(urls, connect, timeout=connection_timeout, pushes=pushes)
        # Clean up even if the process ends without calling `close`.
        self._ending = weakref.finalize(self, _end, self.fleet, self.pusher)

    @classmethod
    def for_training(cls, model: nn.Module, args: PostTrainingConfig, accelerator: Accelerator) -> RolloutEngine:
        """Create the engine from a config. All ranks except rank 0 get a `NonMainRankEngine`."""
        urls = args.vllm_server_base_url or f"http://{host_and_port(args.vllm_server_host, args.vllm_server_port)}"
        encoder = picture_encoder(model)

        def connect() -> ServerEngine | None:
            if not accelerator.is_main_process:
                return None
            reader = None if encoder is None else encoder.processor
            return cls(urls, connection_timeout=args.vllm_server_timeout, reader=reader, **server_options(args))

        with parallel.failing_together(accelerator):
            engine = connect()
        shared = parallel.all_gather_objects([] if engine is None else [engine.capabilities], accelerator)[0]
        return engine or NonMainRankEngine("server", shared)

    # Properties of the engine.

    def findings(self, model: nn.Module, args: PostTrainingConfig) -> list[Finding]:
        """Return a finding for each server property that does not meet the requirements of the run."""
        needs, servers = needs_of(model, args), self.fleet.live
        findings = [finding for server in servers for finding in check_info(server.url, server.info, needs)]
        return findings + [finding for server in servers for finding in probe_logprobs(server.client, needs)]

    def version_name(self, version: int) -> str:
        """Return the name of weight version ``version`` on the servers."""
        return f"{self.run}-{version}"

    def _least(self, name: str) -> int | None:
        return min((int(s.info[name]) for s in self.fleet.all if s.info.get(name)), default=None)

    def _placeholder(self) -> int | None:
        """Return the placeholder id that image features replace in a prompt. Return None if servers report different ids."""
        placeholders = {server.info.get("placeholder") for server in self.fleet.live or self.fleet.all}
        return placeholders.pop() if len(placeholders) == 1 else None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that all available servers have. ``context`` is the smallest context of all servers. ``dtype`` is
        None if the servers' dtypes differ.
        """
        # If no server is available now, use all known servers, because they are expected to become available again.
        infos = [server.info for server in self.fleet.live or self.fleet.all]
        dtypes = {as_dtype(info.get("dtype")) for info in infos}
        return Capabilities(
            needs_weight_sync=True,
            main_process_only=True,
            scores_sequences=True,
            checkpoint_names=any(info.get("checkpoint_names") for info in infos),
            unsupported=UNKNOWN,
            context=self._least("max_model_len"),
            pictures=self._placeholder() is not None,
            dtype=dtypes.pop() if len(dtypes) == 1 else None,
            adapter_rank=self._adapter_rank(),
            adapter_layers=next((tuple(info["adapter_layers"]) for info in infos if info.get("adapter_layers")), ()),
        )

    def _adapter_rank(self) -> int | None:
        """Return the maximum adapter rank that all servers support. Return None if a server does not support adapters
        or shared memory.
        """
        servers = self.fleet.live or self.fleet.all
        ranks = [server.info.get("adapter_rank") if server.client.is_local else None for server in servers]
        return min((int(rank) for rank in ranks if rank), default=None) if all(ranks) else None

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Compute the log-probs of sequences after their prompts on every available server. The result maps the address of
        each server to a list with the log-probs of each sequence.

        Raises:
            ServerUnreachable: No server is available. If a server is busy, the error is `ServerBusy`.
        """
        logps: dict[str, list[list[float]]] = {}
        for server in self.fleet.live:
            try:
                logps[server.url] = [scores.logps for scores in server.client.score(sequences, prompt_lengths)]
            except AWAY as error:
                self.fleet.failed(server, error)
        if not logps:
            raise self._nobody({})
        return logps

    def mark_stale(self) -> None:
        """Mark the weights of all servers as outdated, so that the next push replaces them, and base weights too."""
        self.trusts_bases, self.bases = False, self.bases + 1
        for server in self.fleet.all:
            server.holds = ""

    def needs_weights(self) -> bool:
        """Return whether an available server lacks the weight version that was pushed last."""
        self.fleet.refresh()
        return not self.pushed or any(s.holds != self.version_name(self.version) for s in self.fleet.live)

    # Methods that generate and score.

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions on the servers. See `RolloutEngine.generate`.

        Raises:
            BadRequest: A request is invalid for all servers.
            WeightSyncError: A server does not have the weights that this engine pushed last.
            RolloutServerError: No server completed the requests. The cause of the exception is the error of the last
                server.
        """
        own = [name for name in Sampling.__dataclass_fields__ if name not in UNKNOWN]
        check_followed(requests, sampling, "a rollout server", UNKNOWN, own)
        limits = self._least("max_model_len"), self._least("vocab_size")
        check_requests(requests, sampling, *limits, placeholder=self._placeholder())
        return self.patiently(lambda: self._generate(requests, sampling))

    def patiently(self, ask: Callable[[], Found]) -> Found:
        """Call ``ask``. If no server is available, call ``ask`` again until a server is available, for up to `patience`
        seconds.

        Raises:
            ServerUnreachable: No server became available in time. If a server is busy, the error is
                `ServerBusy`.
        """
        deadline = time.monotonic() + self.patience
        while True:
            self.fleet.refresh()
            try:
                return ask()
            except AWAY as error:
                if error.held or time.monotonic() >= deadline:
                    raise
                logger.warning("%s Waiting for a server.", str(error).splitlines()[0])
                time.sleep(LOOK_SECONDS)

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        chunks = self._chunks(requests, sampling)
        with ThreadPoolExecutor(max_workers=max(len(chunks), 1)) as pool:
            answers = list(pool.map(self._served, chunks))
        by_request: dict[int, list[Rollout]] = {}
        for chunk, rollouts in zip(chunks, answers, strict=True):
            stream = iter(rollouts)
            by_request |= {index: list(itertools.islice(stream, request.n)) for index, request in chunk}
        return [rollout for index in range(len(requests)) for rollout in by_request[index]]

    def _chunks(self, requests: Sequence[Request], sampling: Sampling) -> list[Chunk]:
        """Group requests by sampling settings and number of completions, and split each group into one chunk per server."""
        kinds: dict[tuple[int, Sampling, bool], Chunk] = {}
        for index, request in enumerate(requests):
            own = request.sampling or replace(sampling, seed=derived_seed(sampling.seed, index))
            kind = request.n, replace(own, seed=None), own.seed is None
            kinds.setdefault(kind, []).append((index, replace(request, sampling=own)))
        pieces = max(len(self.fleet.live), 1)
        return [part for members in kinds.values() for k in range(pieces) if (part := members[k::pieces])]

    def _served(self, chunk: Chunk) -> list[Rollout]:
        """Return the rollouts of a chunk. The chunk is sent to one server after the other until a server completes it."""
        failed: dict[Server, RolloutServerError] = {}
        wanted = self.version_name(self.version) if self.pushed else None
        # Upper bound on the number of prompt and completion tokens of the chunk.
        tokens = sum(len(r.prompt_ids) + r.n * r.sampling.max_new_tokens for _, r in chunk if r.sampling)
        while (server := self.fleet.acquire(tokens, wanted, failed)) is not None:
            try:
                return self._ask(server, [request for _, request in chunk], alone=len(self.fleet.live) == 1)
            except BadRequest:
                raise
            except RolloutServerError as error:
                failed[server] = error
                if isinstance(error, WeightSyncError):
                    # Mark the server's weights as unknown. They are then pushed again before this server receives another
                    # request.
                    server.holds = ""
                else:
                    self.fleet.failed(server, error)
            finally:
                self.fleet.release(server, tokens)
        raise self._nobody(failed)

    def _nobody(self, failed: dict[Server, RolloutServerError]) -> RolloutServerError:
        """Return an error with the reason why each server is not available."""
        # Also include servers that failed while they processed other chunks of the same call.
        down = {s: s.down for s in self.fleet.all if s.down is not None}
        errors = [*(down | failed).values()]
        stale = next((e for e in errors if isinstance(e, WeightSyncError)), None)
        if stale is not None:
            return stale
        if len(errors) == 1:
            return errors[0]
        if not errors and self.fleet.live:
            text = (
                f"no rollout server has version {self.version} of the weights. Push it (load_weights) before "
                "generating."
            )
            return WeightSyncError(text, phase="generate", version=self.version)
        reasons = "; ".join(f"{e.url}: {str(e).splitlines()[0]}" for e in errors)
        return ServerUnreachable(f"none of {len(self.fleet.servers)} rollout servers is available. {reasons}")

    def _ask(self, server: Server, requests: Sequence[Request], alone: bool) -> list[Rollout]:
        n, sampling = requests[0].n, requests[0].sampling
        assert sampling is not None
        choices = server.client.complete(
            [list(request.prompt_ids) for request in requests],
            n=n,
            seeds=[request.sampling.seed for request in requests if request.sampling],
            retries=CALL_RETRIES if alone else 1,
            own=[server.client.pictures_fields(request) for request in requests],
            **sampling_body(sampling),
        )
        with reading(choices, server.url):
            rollouts = [read_choice(choice, sampling) for choice in choices]
        return [
            replace(rollout, version=self._version_of(server, choice["weight_version"]))
            for rollout, choice in zip(rollouts, choices, strict=True)
        ]

    def _version_of(self, server: Server, name: str) -> int:
        """Convert the name of a weight version on a server to the trainer's version number.

        Raises:
            WeightSyncError: The server sampled with another version than the version that was pushed last.
        """
        wanted = self.version_name(self.version)
        if self.pushed and name != wanted:
            raise WeightSyncError(
                f"{server.url} sampled from weights of version {name}, but version {wanted} was pushed last. The "
                "server was restarted, or another trainer pushes to it.",
                phase="reply",
                version=self.version,
                url=server.url,
            )
        return self.version if self.pushed else 0

    # Methods that push weights.

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push a weight version to every server that lacks it. If only some servers fail, these servers are excluded.

        If no server is available, this method waits for a server before it reads the first tensor.

        Args:
            named_tensors: All weights, or a LoRA adapter. Weights are `posttrain.rollouts.shared_weights.Weights` or
                pairs (name, tensor), which are always read to the end. An adapter is
                `posttrain.rollouts.adapters.AdapterWeights`.
            version: Version number of the weights in the trainer.

        Raises:
            ServerUnreachable: No server became available in time.
            WeightSyncError: The update failed on all servers, for example because their parameter names differ.
        """
        name = self.version_name(version)
        try:
            outdated = self.patiently(lambda: self._outdated(name))
        except RolloutServerError:
            # Read all tensors even if no server needs them. Reading a sharded weight can be a collective operation that
            # needs all ranks.
            for _ in named_tensors:
                pass
            raise
        if isinstance(named_tensors, AdapterWeights):
            answers = self._send_adapter(named_tensors, outdated, name)
        else:
            answers = self._send_whole(named_tensors, outdated, name)
        for server in outdated:
            error = answers[server.client]
            server.holds = name if error is None else ""
            if error is not None:
                error.version = version
                self.fleet.failed(server, error)
        if not any(server.holds == name for server in self.fleet.live):
            errors = [error for error in answers.values() if error is not None]
            raise errors[0] if errors else self._nobody({})
        self.version, self.pushed = version, True

    def _send_whole(self, named_tensors: Iterable[tuple[str, Tensor]], servers: Sequence[Server], name: str) -> Answers:
        dtype = self.capabilities.dtype
        pairs = ((n, t.to(dtype) if dtype is not None and t.is_floating_point() else t) for n, t in named_tensors)
        return self.pusher.push(pairs, [server.client for server in servers], name)

    def _send_adapter(self, adapter: AdapterWeights, servers: Sequence[Server], name: str) -> Answers:
        """Push the base model to servers that may have other base weights. Then push the adapter to all ``servers``."""
        answers: Answers = dict.fromkeys(server.client for server in servers)
        base = f"{self.run}-base{self.bases or ''}"
        accepted = (base, "default") if self.trusts_bases else (base,)
        foreign = [server for server in servers if server.client.base_version() not in accepted]
        if foreign:
            answers |= self._send_whole(adapter.base(self.capabilities.checkpoint_names), foreign, base)
        folder = self.pusher.folder / name
        adapter.write(folder)
        shape = shape_of(causal_lm(adapter.model).config.get_text_config())
        for client in [client for client, error in answers.items() if error is None]:
            try:
                _check_base(client, shape)
                client.load_adapter(name, folder)
            except RolloutServerError as error:
                answers[client] = as_sync_error(client, error)
        self._forget_adapter(name)
        return answers

    def _forget_adapter(self, newest: str) -> None:
        """Unload old versions of the adapter from all servers. Running requests that use an old version can finish."""
        self._adapters = [*(adapter for adapter in self._adapters if adapter != newest), newest]
        for name in self._adapters[:-VERSIONS_KEPT]:
            for server in self.fleet.live:
                server.client.unload_adapter(name)
            shutil.rmtree(self.pusher.folder / name, ignore_errors=True)
        del self._adapters[:-VERSIONS_KEPT]

    def _outdated(self, name: str) -> list[Server]:
        """Return the available servers that do not have the version ``name``. Each server is asked for its current
        version.
        """
        self.fleet.refresh(force=True)
        for server in self.fleet.live:
            self.fleet.look_at(server)
        if not self.fleet.live:
            raise self._nobody({})
        return [server for server in self.fleet.live if server.holds != name]

    def close(self) -> None:
        """Release the servers and remove this engine's files in shared memory."""
        self._ending()


def _check_base(client: VLLMClient, shape: Mapping[str, Any]) -> None:
    """Check that a server's model has the shapes of the adapter's base model. vLLM 0.32 silently accepts an adapter with other
    shapes.

    Raises:
        WeightSyncError: The server's model has another shape than the adapter's base model.
    """
    theirs = {name: client.facts.get(name) for name in shape}
    if odd := [name for name, value in shape.items() if None not in (value, theirs[name]) and value != theirs[name]]:
        raise WeightSyncError(
            f"{client.base_url} serves a model with {odd[0]}={theirs[odd[0]]}, but the adapter's base model has "
            f"{odd[0]}={shape[odd[0]]}. Fix: serve the base model that is trained.",
            phase="adapter",
            url=client.base_url,
        )


def _end(fleet: ServerPool, pusher: Pusher) -> None:
    fleet.close()
    pusher.close()


@dataclass(frozen=True, slots=True)
class ServerVersions:
    """Weight version that was pushed last, and the servers that have it.

    Attributes:
        run: Unique name of the engine object, which is part of version names. See `ServerEngine`.
        version: Version number of the weights in the trainer.
        urls: Addresses of the servers.
        adapter: Whether the version is a LoRA adapter. Requests must then contain the adapter's name.
    """

    run: str = ""
    version: int = 0
    urls: tuple[str, ...] = ()
    adapter: bool = False


class ServerTransfer(WeightTransfer):
    """Weight transfer to rollout servers. It implements `WeightTransferProtocol`.

    A server is paused only during its own update. If the update of a server fails, the server is excluded until it is
    healthy and has received the weights.

    Args:
        make: Function that creates the `ServerEngine`. It is called only on the rank that pushes weights.
    """

    def __init__(self, make: Callable[[], ServerEngine]) -> None:
        self.make, self.version = make, 0
        self.engine: ServerEngine | None = None
        self._announced: tuple[str, ...] = ()

    @property
    def _pushing(self) -> ServerEngine:
        assert self.engine is not None, "init_weight_transfer comes first"
        return self.engine

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that all servers have."""
        return Capabilities() if self.engine is None else self.engine.capabilities

    @property
    def holders(self) -> ServerVersions:
        """The weight version that was pushed last, and the servers that have it."""
        engine, name = self._pushing, self._pushing.version_name(self.version)
        holders = [server for server in engine.fleet.live if server.holds == name]
        adapter = any(server.client.adapter == name for server in holders)
        return ServerVersions(engine.run, self.version, tuple(server.url for server in holders), adapter)

    def init_weight_transfer(self) -> None:
        """Connect to the servers."""
        self.engine = self.engine or self.make()

    def pause(self) -> None:
        """Do nothing, because the update of each server pauses that server."""

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push weights under the next version number. At least one server must confirm the version."""
        self._pushing.load_weights(tensors, self.version + 1)
        self.version += 1
        self._announced = self.holders.urls

    def send_again(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the last version again to servers that lack it, for example new or restarted servers."""
        self._pushing.load_weights(tensors, self.version)
        self._announced = self.holders.urls

    def resume(self) -> None:
        """Do nothing, because the update of each server resumes that server."""

    def missing_weights(self) -> bool:
        """Return whether an available server lacks the last version, or has it but has not been announced to the workers
        yet.

        Each server is asked for its version, because a server may have been restarted. If a server responds
        slowly, its version is assumed to be unchanged.
        """
        fleet = self._pushing.fleet
        fleet.refresh(force=True)
        for server in fleet.live:
            fleet.look_at(server)
        holders = self.holders.urls
        return any(server.url not in holders or server.url not in self._announced for server in fleet.live)

    def failure_reason(self) -> str:
        """Return the errors of servers that currently receive no requests. Return "" if all servers are available."""
        fleet = self._pushing.fleet
        return "; ".join(f"{s.url}: {str(s.down).splitlines()[0]}" for s in fleet.all if s.down is not None)

    def destroy(self) -> None:
        """Release the servers."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class FollowingEngine(ServerEngine):
    """Engine of a rollout worker. It sends requests to servers, and the trainer's process pushes weights to these servers.

    `set_servers` sets the servers. A server may have weights of another run, because the server was restarted or because
    another trainer uses it. A response that was sampled with such weights is rejected, and the request is sent to another
    server.

    Args:
        options: Keyword arguments of `ServerEngine`.
    """

    def __init__(self, **options: Any) -> None:
        self._urls: tuple[str, ...] = ()
        self._news = threading.Condition()
        super().__init__(lambda: self._urls, connection_timeout=None, pushes=False, **options)

    def set_servers(self, holders: ServerVersions) -> None:
        """Replace the list of servers, and store the weight version that the servers have."""
        self.run, self.version, self.pushed, self._urls = holders.run, holders.version, True, holders.urls
        self.fleet.refresh(force=True)
        with self._news:
            for server in self.fleet.live:
                server.holds = self.version_name(self.version)
                versioned = server.client.facts.get("tells_versions")
                server.client.adapter = server.holds if holders.adapter and not versioned else ""
            self._news.notify_all()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Raise an error, because only the trainer pushes weights."""
        raise WeightSyncError(
            "workers do not push weights to servers. Only the trainer does.", phase="begin", version=version
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions. If no server has the current weights, wait for such a server. See `ServerEngine.generate`."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return super().generate(requests, sampling)
            except WeightSyncError:
                if time.monotonic() >= deadline:
                    raise
                with self._news:
                    self._news.wait(LOOK_SECONDS)

    def _version_of(self, server: Server, name: str) -> int:
        """Return the version number of a response. Also accept a newer version of this run, because servers receive a
        version slightly before workers are notified.
        """
        run, _, number = name.rpartition("-")
        # A name without a number is the name of an adapter's base model. This run never samples from the base model.
        return int(number) if run == self.run and number.isdigit() else super()._version_of(server, name)
