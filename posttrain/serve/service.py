"""What the server does, without HTTP: generation, scoring, pauses and sleep over the workers."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import posttrain
from posttrain.serve.asking import Chat, Generate, Limits, ScoreBody, Wanted, bad, render_chat, wanted
from posttrain.serve.config import ServeConfig
from posttrain.serve.jobs import Ask, Failure, Score
from posttrain.serve.layout import generation_reply, renormalize, score_reply
from posttrain.serve.metrics import Metrics
from posttrain.serve.scoring import ScoreMerger
from posttrain.serve.state import Refusal, State, awake
from posttrain.serve.worker import Rank, Ranks, WorkerFailure

__all__ = ["RolloutService", "split_evenly"]

logger = logging.getLogger(__name__)

REMEMBERED, REMEMBER_S = 512, 600.0  # Answers of requests that bring an id.
CONTROL_S = 60.0  # A worker carries out a command between two steps.
AT_ONCE = 2000  # Numbers of an answer, about a millisecond: another thread would cost as much.
EXIT_S = 5.0  # From a worker's death to the server's end: pending requests are answered meanwhile.


def split_evenly(count: int, ranks: int) -> list[range]:
    """``count`` things over ``ranks``: the first ``count mod ranks`` get one more.

    >>> [list(part) for part in split_evenly(5, 3)]
    [[0, 1], [2, 3], [4]]
    """
    base, more = divmod(count, ranks)
    parts, begin = [], 0
    for rank in range(ranks):
        size = base + (rank < more)
        parts.append(range(begin, begin + size))
        begin += size
    return parts


class RolloutService:
    """A server's workers, state and tokenizer.

    Args:
        config: As the command line has it.
        engine: Its engine's name, see `posttrain.serve.engines.engine_name`.
        tokenizer: For texts and conversations; None where only token ids come.
        stops: Token ids that end completions.
        on_fatal: Called when the server cannot go on.
        kind: Of the workers.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: str,
        tokenizer: Any = None,
        stops: Sequence[int] = (),
        on_fatal: Callable[[str], None] = logger.critical,
        *,
        kind: type[Rank] = Rank,
    ) -> None:
        self.config, self.engine, self.tokenizer, self.on_fatal = config, engine, tokenizer, on_fatal
        self.stops = tuple(stops)
        self.state = State(config.max_queue)
        self.metrics = Metrics()
        self.ranks = Ranks(engine, config, self._died, kind=kind)
        self.merger = ScoreMerger(self)
        self.answers: OrderedDict[str, tuple[bytes, float, asyncio.Task[Any]]] = OrderedDict()
        self.seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self.limits = Limits(None, None, config.max_prompts, config.max_logprobs, self.stops)
        self.tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start the workers and wait for them."""
        await self.ranks.start()
        info = self.info_of_engine()
        known = [n for n in (self.config.max_model_len, info.get("context")) if n]
        self.limits = Limits(
            min(known) if known else None,
            info.get("vocab_size"),
            self.config.max_prompts,
            self.config.max_logprobs,
            self.stops,
        )
        self._spawn(self._watch())

    def info_of_engine(self) -> dict[str, Any]:
        """What the first worker said of its engine."""
        return self.ranks.all[0].info

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def close(self) -> None:
        """End the workers."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.to_thread(self.ranks.close)

    # Workers that die --------------------------------------------------------------------------------------------------

    def _died(self, rank: Rank) -> None:
        self.metrics.count("worker_deaths", rank=rank.rank)
        if self.state.update is not None:
            self.state.update.failed = rank.dead
            self.state.weights_valid = False
        self._spawn(self._restart(rank) if self.config.restart_workers else self._give_up(rank))

    async def _give_up(self, rank: Rank) -> None:
        await asyncio.sleep(EXIT_S)
        self.on_fatal(f"{rank.dead}; --restart_workers would have started it anew.")

    async def _restart(self, rank: Rank) -> None:
        try:
            await self.ranks.restart(rank)
        except WorkerFailure as error:
            self.on_fatal(f"worker {rank.rank} could not be started again: {error}")
            return
        if self.state.weight_version > 0 or not self.state.weights_valid:
            self.state.weights_valid = False  # It has the checkpoint's weights, and the trainer is further.
        if self.state.paused == "keep":
            await self.ranks.all[rank.rank].call("freeze", CONTROL_S, on=True)
        logger.warning("worker %d was started again.", rank.rank)
        await self.state.tell()

    async def _watch(self) -> None:
        """Notice leases that lapse, and updates that nobody ends."""
        from posttrain.serve.holding import expire

        while True:
            await asyncio.sleep(0.25)
            awake()  # So that no gap between two looks is long, unless the process stood still.
            try:
                await expire(self)
            except (WorkerFailure, TimeoutError) as error:
                logger.error("after a lease lapsed: %s", error)

    # Generation --------------------------------------------------------------------------------------------------------

    async def once(self, request_id: str | None, body: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to a request: a repeated id gets the first one's, also while that is being computed.

        Raises:
            Refusal: 400, the id was used for another request.
        """
        if request_id is None:
            return await work()
        digest = hashlib.blake2b(body.model_dump_json().encode(), digest_size=16).digest()
        now = time.monotonic()
        for key, (_, since, task) in list(self.answers.items()):
            if len(self.answers) <= REMEMBERED and now - since < REMEMBER_S:
                break
            if task.done():
                del self.answers[key]
        entry = self.answers.get(request_id)
        if entry is not None and entry[0] != digest:
            raise bad(f"request_id={request_id!r} was used for another request: draw a new one for each.")
        if entry is None:
            task = self._spawn(work())
            self.answers[request_id] = (digest, now, task)
            # Only success is remembered: what failed is computed when it is asked for again.
            task.add_done_callback(lambda done: self._forget_failure(request_id, done))
        else:
            task = entry[2]
            self.metrics.count("repeated_requests")
        return await asyncio.shield(task)

    def _forget_failure(self, request_id: str, task: asyncio.Task[Any]) -> None:
        entry = self.answers.get(request_id)
        if entry is not None and entry[2] is task and (task.cancelled() or task.exception() is not None):
            del self.answers[request_id]

    async def generate(self, body: Generate) -> dict[str, Any]:
        """See `/generate/`."""
        if body.images is not None and any(body.images):
            raise bad("images came, and the served model takes none.")
        prompts: Any = body.prompts
        if isinstance(prompts[0], str):
            if self.tokenizer is None:
                raise bad("this server has no tokenizer: send token ids.")
            prompts = (await asyncio.to_thread(self.tokenizer, list(prompts)))["input_ids"]
        return await self._complete(body, prompts)

    async def chat(self, body: Chat) -> dict[str, Any]:
        """See `/chat/`."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise bad("the served model has no chat template: render the conversation and use /generate/.")
        return await self._complete(body, await asyncio.to_thread(render_chat, self.tokenizer, body))

    async def _complete(self, body: Generate | Chat, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        asked = wanted(body, prompts, self.limits, self.seeds.randrange(2**62))
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.config.request_timeout), self.state.turn():
                rollouts, spans = await self._on_ranks(asked, body.priority)
                version = self.state.weight_version
        except TimeoutError as error:
            raise Refusal(
                504, "DeadlineExceeded", f"no answer within --request_timeout {self.config.request_timeout:g} s."
            ) from error
        self.metrics.observe("generate_seconds", time.monotonic() - began)
        self.metrics.count("prompts", len(prompts))
        self.metrics.count("completions", sum(map(len, rollouts)))
        reply = functools.partial(generation_reply, asked, rollouts, spans, version=version, raw=body.raw_logprobs)
        numbers = sum(len(r.token_ids) for line in rollouts for r in line) * (1 + (asked.logprobs or 0))
        # A large answer is laid out beside the loop, which goes on with the others.
        return reply() if numbers <= AT_ONCE else await asyncio.to_thread(reply)

    async def _on_ranks(self, asked: Wanted, priority: int) -> tuple[list[Any], dict[tuple[int, int], Any]]:
        """Rollouts of all asks: split over the ranks, those with the least to do first."""
        order = sorted(self.ranks.all, key=lambda rank: len(rank.pending))
        sent: list[tuple[Rank, int, asyncio.Future[Any], range]] = []
        for rank, part in zip(order, split_evenly(len(asked.asks), len(order)), strict=True):
            if part:
                asks: list[Ask] = [asked.asks[i] for i in part]
                number, future = rank.send("generate", asks=asks, priority=priority)
                sent.append((rank, number, future, part))
        try:
            answers = await asyncio.gather(*(future for _, _, future, _ in sent), return_exceptions=True)
        except asyncio.CancelledError:
            for rank, number, _, _ in sent:
                rank.send("abort", job=number)[1].add_done_callback(_quiet)
            raise
        failures = [a for a in answers if isinstance(a, BaseException)]
        if failures:
            raise failures[0]
        rollouts: list[Any] = []
        spans: dict[tuple[int, int], Any] = {}
        for (_, _, _, part), (found, marked) in zip(sent, answers, strict=True):
            rollouts += found
            spans |= {(part[place], index): runs for (place, index), runs in marked.items()}
        return rollouts, spans

    # Scoring -----------------------------------------------------------------------------------------------------------

    async def score(self, body: ScoreBody) -> dict[str, Any]:
        """See `/get_sequence_logprobs/`."""
        items = self._scores(body)
        top, temperature = body.top_logprobs, body.temperature
        heeds = self.info_of_engine().get("scoring_heeds_temperature", True)
        over_top = temperature != 1.0 and (body.renormalize or not heeds)
        if over_top and not body.renormalize:
            raise bad(
                f"temperature={temperature}: this engine gives log-probs of given sequences at temperature 1 alone. Set "
                "renormalize=true to have them renormalised over the returned tokens, or temperature=1."
            )
        try:
            async with asyncio.timeout(self.config.request_timeout), self.state.turn():
                found = await self.merger.submit(items, top, 1.0 if over_top else temperature)
        except TimeoutError as error:
            raise Refusal(504, "DeadlineExceeded", f"not scored within {self.config.request_timeout:g} s.") from error
        self.metrics.count("scored_sequences", len(items))
        if over_top:
            await asyncio.to_thread(renormalize, found, [item.ids[item.begin :] for item in items], temperature)
        return await asyncio.to_thread(score_reply, found, items, binary=body.response_format == "binary", top=top) | {
            "weight_version": self.state.weight_version
        }

    def _scores(self, body: ScoreBody) -> list[Score]:
        if len(body.sequences) != len(body.prompt_lengths):
            raise bad(
                f"{len(body.sequences)} sequences and {len(body.prompt_lengths)} prompt_lengths: give one of each."
            )
        if not body.sequences:
            raise bad("no sequences came.")
        if body.top_logprobs > self.config.max_logprobs:
            raise bad(f"top_logprobs={body.top_logprobs}, and --max_logprobs is {self.config.max_logprobs}: raise it.")
        if len(body.sequences) > self.config.max_prompts:
            raise bad(f"{len(body.sequences)} sequences came, and --max_prompts is {self.config.max_prompts}.")
        items = []
        for index, (ids, begin) in enumerate(zip(body.sequences, body.prompt_lengths, strict=True)):
            extra = {"index": index, "length": len(ids), "prompt_length": begin}
            if not ids or not 0 <= begin <= len(ids):
                raise bad(f"sequence {index}: prompt_length={begin} is not within 0 to its {len(ids)} tokens.", **extra)
            if self.limits.context is not None and len(ids) > self.limits.context:
                raise bad(f"sequence {index} has {len(ids)} tokens, max_model_len is {self.limits.context}.", **extra)
            if self.limits.vocabulary is not None and max(ids) >= self.limits.vocabulary:
                raise bad(
                    f"sequence {index} holds token id {max(ids)}, the model has {self.limits.vocabulary}.", **extra
                )
            items.append(Score(list(ids), begin))
        return items

    # Health and information --------------------------------------------------------------------------------------------

    async def health(self, deep: bool) -> dict[str, Any]:
        """That it can serve.

        Raises:
            Refusal: 503, with the reason.
        """
        reason = self.ranks.trouble()
        if reason is None and self.state.draining:
            reason = "shutting down"
        if reason is None and not self.state.weights_valid and self.state.update is None:
            reason = "the weights are not whole: push all of them"
        dead = next((r.rank for r in self.ranks.all if r.dead), None)
        extra = {} if dead is None else {"dead_rank": dead}
        if reason is not None:
            raise Refusal(503, "ServerDied" if dead is not None else "Unhealthy", reason, status="unhealthy", **extra)
        if deep:
            await self._generate_one_token()
        return {"status": "ok"}

    async def _generate_one_token(self) -> None:
        from posttrain.types import Sampling

        self.state.check_can_generate()
        ask = Ask([1], 1, Sampling(1, temperature=0.0, seed=0))
        if self.state.update is not None or self.state.paused == "keep":
            await self.ranks.each("ping", 30.0)
            return
        try:
            await self.ranks.each("generate", 30.0, asks=[ask], priority=-(2**31))
        except (WorkerFailure, TimeoutError) as error:
            reason = str(error) or "a rank did not generate one token within 30 s"
            raise Refusal(503, "Unhealthy", reason, status="unhealthy") from error

    def info(self) -> dict[str, Any]:
        """See `/info/`."""
        hidden = ("context", "pid", "beats", "sleeps", "device_uuids")
        engine = {k: v for k, v in self.info_of_engine().items() if k not in hidden}
        state, config = self.state, self.config
        return engine | {
            "model": config.model,
            "revision": config.revision,
            "max_model_len": self.limits.context,
            "logprobs_mode": "processed_logprobs",
            "accepts_weights": True,
            "enable_prefix_caching": config.enable_prefix_caching,
            "tensor_parallel_size": config.tensor_parallel_size,
            "data_parallel_size": config.data_parallel_size,
            "device_uuids": [uuid for rank in self.ranks.all for uuid in rank.info.get("device_uuids", [])],
            "worker_pids": [rank.info.get("pid") for rank in self.ranks.all],
            "posttrain_version": posttrain.__version__,
            "weight_version": state.weight_version,
            "weights_valid": state.weights_valid,
            "needs_weights": not state.weights_valid and not state.draining and self.ranks.trouble() is None,
            "updating": state.update is not None,
            "paused": state.paused is not None,
            "asleep": state.asleep,
            "lease_holder": state.lease.holder if state.lease is not None else None,
            "start_time": state.started,
            "requests": self.metrics.requests(),
            "running": state.running,
            "admitted": state.admitted,
        }


def _quiet(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def failed(failure: Failure) -> Refusal:
    """A worker's failure as an answer."""
    return Refusal(failure.status, failure.type, failure.message, **failure.extra)
