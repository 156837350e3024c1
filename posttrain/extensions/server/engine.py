"""`ServerEngine`: rollouts from one or several servers over HTTP, each completion with its own prompt and known weights."""

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

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.pictures.processors import PictureProcessor

logger = logging.getLogger(__name__)

CALL_RETRIES = 3
# Seconds between two looks for a server that is gone.
LOOK_SECONDS = 2.0
# Fields of `Sampling` that servers have no rule for.
UNKNOWN = ("no_repeat_ngram",)
Found = TypeVar("Found")
Answers = dict[VLLMClient, WeightSyncError | None]
# Requests with their places in a call; of one number of completions and one sampling but for the seeds.
Chunk = list[tuple[int, Request]]


def server_options(args: PostTrainingConfig) -> dict[str, Any]:
    """What a config says of rollout servers, as `ServerEngine` takes it."""
    return {
        "request_timeout": args.vllm_request_timeout,
        "sync_timeout": args.vllm_sync_timeout,
        "bucket_mb": args.vllm_weight_bucket_mb,
        "group_port": args.vllm_group_port,
        "patience": args.vllm_server_timeout,
        "api_key": args.vllm_server_api_key,
    }


class NonMainRankEngine(RolloutEngine):
    """Stand-in engine on ranks > 0: rank 0 owns the client and sends the requests of all ranks."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name, self.capabilities = name, capabilities

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Rank 0 does this."""
        raise AssertionError("rank 0 asks the servers for all ranks")

    def load_weights(self, named_tensors: Any, version: int) -> None:
        """Rank 0 does this."""
        raise AssertionError("rank 0 pushes weights to the servers for all ranks")

    def close(self) -> None:
        """Nothing is held."""


class ServerEngine(RolloutEngine):
    """Rollouts from servers that hold a copy of the policy's weights.

    Requests are spread by outstanding tokens. What a server that dies was asked for goes to the others, with the same seeds;
    servers may join and leave, and a newcomer is used once it has the current weights.

    A version of the weights is named ``RUN-NUMBER`` at the servers, with a run of its own for every engine. Every reply must
    say the version it was sampled from; rollouts of another version, or of another trainer's, never reach this trainer.

    Args:
        urls: See `ServerPool`.
        connection_timeout: Seconds in which a first server must be healthy; None: they may come later.
        request_timeout: Seconds of one request; see `VLLMClient`.
        sync_timeout: Seconds of one call of a weight update.
        bucket_mb: MiB of one bucket of weights.
        group_port: Port on which GPUs meet to broadcast weights; see `VLLMClient`.
        pushes: Whether weights are pushed from here: then this process alone, of all on its machine, may use the servers.
        api_key: Bearer token of the servers.
        patience: Seconds to wait for a server to come back when none is left, before a call fails.
        reader: Of pictures in prompts; None: prompts are text.

    Raises:
        ServerUnreachable: No server in time.
        ServerBusy: Another trainer of this machine uses a server.

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
        # Whether each server's own weights are trusted to be the trainer's base model; a comparison that fails ends it.
        self.trusts_bases = True
        self._adapters: list[str] = []
        self.pusher = Pusher(bucket_mb * 2**20)
        self.fleet = ServerPool(urls, connect, timeout=connection_timeout, pushes=pushes)
        # Also when the process ends.
        self._ending = weakref.finalize(self, _end, self.fleet, self.pusher)

    @classmethod
    def for_training(cls, model: nn.Module, args: PostTrainingConfig, accelerator: Accelerator) -> RolloutEngine:
        """Return the engine that the config names. Ranks other than 0 get a stand-in."""
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

    # What it is

    def findings(self, model: nn.Module, args: PostTrainingConfig) -> list[Finding]:
        """Compare what servers say of themselves with what a run needs."""
        needs, servers = needs_of(model, args), self.fleet.live
        found = [finding for server in servers for finding in check_info(server.url, server.info, needs)]
        return found + [finding for server in servers for finding in probe_logprobs(server.client, needs)]

    def version_name(self, version: int) -> str:
        """What servers call a version of this run."""
        return f"{self.run}-{version}"

    def _least(self, name: str) -> int | None:
        return min((int(s.info[name]) for s in self.fleet.all if s.info.get(name)), default=None)

    def _placeholder(self) -> int | None:
        """Id that a picture's features replace, where all servers take pictures."""
        known = {server.info.get("placeholder") for server in self.fleet.live or self.fleet.all}
        return known.pop() if len(known) == 1 else None

    @property
    def capabilities(self) -> Capabilities:
        """What all servers that are up can do together: the smallest context, one dtype or None."""
        # Where none is up, all of them as they were: they are what will come back.
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
        """Of the server with the least; None where one takes no adapters, or cannot read this machine's files."""
        servers = self.fleet.live or self.fleet.all
        ranks = [server.info.get("adapter_rank") if server.client.is_local else None for server in servers]
        return min((int(rank) for rank in ranks if rank), default=None) if all(ranks) else None

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Log-probs of given tokens behind their prompts, by every server that has weights: one list a sequence.

        Raises:
            ServerUnreachable: None is left that could answer (also `ServerBusy`).
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
        """See `RolloutEngine.mark_stale`."""
        self.trusts_bases = False
        for server in self.fleet.all:
            server.holds = ""

    def needs_weights(self) -> bool:
        """Whether a server that could work lacks the version that was pushed last."""
        self.fleet.refresh()
        return not self.pushed or any(s.holds != self.version_name(self.version) for s in self.fleet.live)

    # Generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `posttrain.rollouts.base.RolloutEngine.generate`.

        Raises:
            BadRequest: A request that no server will serve.
            WeightSyncError: The servers hold other weights than were pushed.
            RolloutServerError: No server is left that could answer; its cause is the last one's error.
        """
        own = [name for name in Sampling.__dataclass_fields__ if name not in UNKNOWN]
        check_followed(requests, sampling, "a rollout server", UNKNOWN, own)
        limits = self._least("max_model_len"), self._least("vocab_size")
        check_requests(requests, sampling, *limits, placeholder=self._placeholder())
        return self.patiently(lambda: self._generate(requests, sampling))

    def patiently(self, ask: Callable[[], Found]) -> Found:
        """Ask, and where no server is there to be asked, look for one for `patience` seconds.

        Raises:
            ServerUnreachable: None has come back in time (also `ServerBusy`).
        """
        deadline = time.monotonic() + self.patience
        while True:
            self.fleet.refresh()
            try:
                return ask()
            except AWAY as error:
                if error.held or time.monotonic() >= deadline:
                    raise
                logger.warning("%s Waiting for a server to come back.", str(error).splitlines()[0])
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
        """Requests of one kind, cut into as many pieces as there are servers."""
        kinds: dict[tuple[int, Sampling, bool], Chunk] = {}
        for index, request in enumerate(requests):
            own = request.sampling or replace(sampling, seed=derived_seed(sampling.seed, index))
            kind = request.n, replace(own, seed=None), own.seed is None
            kinds.setdefault(kind, []).append((index, replace(request, sampling=own)))
        pieces = max(len(self.fleet.live), 1)
        return [part for members in kinds.values() for k in range(pieces) if (part := members[k::pieces])]

    def _served(self, chunk: Chunk) -> list[Rollout]:
        """A chunk's rollouts, from the first server that manages it."""
        failed: dict[Server, RolloutServerError] = {}
        wanted = self.version_name(self.version) if self.pushed else None
        # Tokens that may have to be computed.
        tokens = sum(len(r.prompt_ids) + r.n * r.sampling.max_new_tokens for _, r in chunk if r.sampling)
        while (server := self.fleet.acquire(tokens, wanted, failed)) is not None:
            try:
                return self._ask(server, [request for _, request in chunk], alone=len(self.fleet.live) == 1)
            except BadRequest:
                raise
            except RolloutServerError as error:
                failed[server] = error
                if isinstance(error, WeightSyncError):
                    # It must be given its weights again before it is used.
                    server.holds = ""
                else:
                    self.fleet.failed(server, error)
            finally:
                self.fleet.release(server, tokens)
        raise self._nobody(failed)

    def _nobody(self, failed: dict[Server, RolloutServerError]) -> RolloutServerError:
        """Why no server is left."""
        # Also those that another chunk of the same call has found dead.
        down = {s: s.down for s in self.fleet.all if s.down is not None}
        errors = [*(down | failed).values()]
        stale = next((e for e in errors if isinstance(e, WeightSyncError)), None)
        if stale is not None:
            return stale
        if len(errors) == 1:
            return errors[0]
        if not errors and self.fleet.live:
            text = f"no rollout server holds version {self.version} of the weights. Push it (load_weights) before generating."
            return WeightSyncError(text, phase="generate", version=self.version)
        said = "; ".join(f"{e.url}: {str(e).splitlines()[0]}" for e in errors)
        return ServerUnreachable(f"no rollout server is left of {len(self.fleet.servers)}. {said}")

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
        """The trainer's version of the weights that a server calls so.

        Raises:
            WeightSyncError: Others than were pushed.
        """
        wanted = self.version_name(self.version)
        if self.pushed and name != wanted:
            raise WeightSyncError(
                f"{server.url} sampled from weights of version {name}, and version {wanted} was pushed last. It was restarted, "
                "or another trainer pushes to it.",
                phase="reply",
                version=self.version,
                url=server.url,
            )
        return self.version if self.pushed else 0

    # Weights

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push a version to every server that lacks it; those that fail are left out while others do not.

        Where no server is there, one is waited for, before the first tensor is read.

        Args:
            named_tensors: All weights: `posttrain.rollouts.shared_weights.Weights`, or pairs; read to the end in any
                case. Or a LoRA adapter alone, `posttrain.rollouts.adapters.AdapterWeights`.
            version: The trainer's.

        Raises:
            ServerUnreachable: None has come back in time.
            WeightSyncError: No server took it; or a server knows other names, which no other server would cure.
        """
        name = self.version_name(version)
        try:
            outdated = self.patiently(lambda: self._outdated(name))
        except RolloutServerError:
            # Reading may be a collective that other ranks wait in.
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
        """The base model to servers whose weights are not their checkpoint's, or did not agree; then the adapter to all."""
        answers: Answers = dict.fromkeys(server.client for server in servers)
        base = f"{self.run}-base"
        known = (base, "default") if self.trusts_bases else (base,)
        foreign = [server for server in servers if server.client.base_version() not in known]
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
        """The version before the last: requests with it have ended, or end as they began."""
        self._adapters = [*(one for one in self._adapters if one != newest), newest]
        for name in self._adapters[:-VERSIONS_KEPT]:
            for server in self.fleet.live:
                server.client.unload_adapter(name)
            shutil.rmtree(self.pusher.folder / name, ignore_errors=True)
        del self._adapters[:-VERSIONS_KEPT]

    def _outdated(self, name: str) -> list[Server]:
        """The servers that are there and must be given a version; each says anew what it has."""
        self.fleet.refresh(force=True)
        for server in self.fleet.live:
            self.fleet.look_at(server)
        if not self.fleet.live:
            raise self._nobody({})
        return [server for server in self.fleet.live if server.holds != name]

    def close(self) -> None:
        """Leave the servers to others, and remove files in shared memory."""
        self._ending()


def _check_base(client: VLLMClient, shape: Mapping[str, Any]) -> None:
    """Compare the model below an adapter with a server's: vLLM 0.32 takes an adapter of other shapes without a word.

    Raises:
        WeightSyncError: They differ.
    """
    theirs = {name: client.facts.get(name) for name in shape}
    if odd := [name for name, value in shape.items() if None not in (value, theirs[name]) and value != theirs[name]]:
        raise WeightSyncError(
            f"{client.base_url} serves a model with {odd[0]}={theirs[odd[0]]}, and the adapter is of one with "
            f"{odd[0]}={shape[odd[0]]}. Fix: serve the base model that is trained.",
            phase="adapter",
            url=client.base_url,
        )


def _end(fleet: ServerPool, pusher: Pusher) -> None:
    fleet.close()
    pusher.close()


@dataclass(frozen=True, slots=True)
class ServerVersions:
    """Which servers hold a version of the weights.

    Attributes:
        run: See `ServerEngine`.
        version: The trainer's.
        urls: Of the servers.
        adapter: Whether it is an adapter beside others, asked by its name.
    """

    run: str = ""
    version: int = 0
    urls: tuple[str, ...] = ()
    adapter: bool = False


class ServerTransfer(WeightTransfer):
    """The trainer's end: servers are given the next version, and go on; satisfies the protocol of weight transfers.

    Each server is paused inside its update. A server that fails is left out, and taken in again once it is healthy and has the
    weights.

    Args:
        make: Makes the engine that pushes; called on the rank that sends.
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
        """What all servers can do together."""
        return Capabilities() if self.engine is None else self.engine.capabilities

    @property
    def holders(self) -> ServerVersions:
        """Who has the version that was pushed last."""
        engine, name = self._pushing, self._pushing.version_name(self.version)
        holders = [server for server in engine.fleet.live if server.holds == name]
        adapter = any(server.client.adapter == name for server in holders)
        return ServerVersions(engine.run, self.version, tuple(server.url for server in holders), adapter)

    def init_weight_transfer(self) -> None:
        """Meet the servers."""
        self.engine = self.engine or self.make()

    def pause(self) -> None:
        """Nothing: the update of each server pauses it."""

    def send_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the next version; returns when at least one server has confirmed it."""
        self._pushing.load_weights(tensors, self.version + 1)
        self.version += 1
        self._announced = self.holders.urls

    def send_again(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push the same version, with the same weights, to servers that lack it: newcomers, and those that were restarted."""
        self._pushing.load_weights(tensors, self.version)
        self._announced = self.holders.urls

    def resume(self) -> None:
        """Nothing: the update of each server ends its pause."""

    def missing_weights(self) -> bool:
        """Whether a server that is there lacks the last version, or workers were not told that it has it.

        Each is asked, for it may have been restarted; one that is slow to answer (its machine is busy) is taken to be as it was.
        """
        fleet = self._pushing.fleet
        fleet.refresh(force=True)
        for server in fleet.live:
            fleet.look_at(server)
        holders = self.holders.urls
        return any(server.url not in holders or server.url not in self._announced for server in fleet.live)

    def failure_reason(self) -> str:
        """What is wrong with servers that get no requests; empty where all are well."""
        fleet = self._pushing.fleet
        return "; ".join(f"{s.url}: {str(s.down).splitlines()[0]}" for s in fleet.all if s.down is not None)

    def destroy(self) -> None:
        """Leave the servers to others."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class FollowingEngine(ServerEngine):
    """A worker's end: asks servers that another process gives their weights, and knows which version wrote a completion.

    It pushes nothing; `set_servers` names the servers that may be asked. An answer from weights that this run did not push (the
    server was restarted, or is another trainer's by now) is refused, and asked of another server.

    Args:
        options: Of `ServerEngine`.
    """

    def __init__(self, **options: Any) -> None:
        self._urls: tuple[str, ...] = ()
        self._news = threading.Condition()
        super().__init__(lambda: self._urls, connection_timeout=None, pushes=False, **options)

    def set_servers(self, holders: ServerVersions) -> None:
        """Ask these servers from now on."""
        self.run, self.version, self.pushed, self._urls = holders.run, holders.version, True, holders.urls
        self.fleet.refresh(force=True)
        with self._news:
            for server in self.fleet.live:
                server.holds = self.version_name(self.version)
                tells = server.client.facts.get("tells_versions")
                server.client.adapter = server.holds if holders.adapter and not tells else ""
            self._news.notify_all()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights are pushed elsewhere."""
        raise WeightSyncError("workers push no weights to servers: the trainer does.", phase="begin", version=version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `ServerEngine.generate`; while no server holds the current weights, it is waited for one."""
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
        """See `ServerEngine._version_of`; a version whose news is on its way will do too."""
        run, _, number = name.rpartition("-")
        # The base model below an adapter has no number: it is no version that this run samples from.
        return int(number) if run == self.run and number.isdigit() else super()._version_of(server, name)
