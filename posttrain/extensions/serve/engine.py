"""`ServedEngine`: engine of `posttrain serve`. A single thread samples, loads weights, and scores sequences."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError, WeightSyncError
from posttrain.extensions.server.replies import INCOMPLETE
from posttrain.models.architecture import shape_of
from posttrain.models.heads import LogitRule, causal_lm, evaluating, placeholder_of, trunk
from posttrain.rollouts.base import RolloutEngine
from posttrain.types import Request as Prompt
from posttrain.types import Rollout

# Number of seconds without a new request after which the collected requests are passed to the engine together. Clients send
# the prompts of a step in separate requests.
GATHER_S = 0.01
NOT_WHOLE = "the weights are incomplete, because an update failed. Push all weights again."
UPDATING = "the weights are incomplete, because an update is still running. End the update, or push all weights again."
# Number of positions whose logits are in memory at the same time while sequences are scored.
CHUNK = 256


@dataclass(eq=False)
class Job:
    """A request for completions of one prompt.

    Attributes:
        request: Prompt with its number of completions and its sampling settings.
        version: Name of the weight version that sampled the completions.
        rollouts: Future of the completions. If sampling fails, the future raises the error.
        left: Whether the client has disconnected and no longer waits for the completions.
    """

    request: Prompt
    version: str = ""
    rollouts: Future[list[Rollout]] = field(default_factory=Future)
    left: bool = False


class ServedEngine:
    """Engine that runs generation, weight updates and scoring one after the other in a single thread.

    Requests wait while generation is paused or a weight update is running.

    Args:
        engine: Engine that samples completions. New weights are copied into the parameters of its ``model``.

    Attributes:
        version: Name of the current weights, which the trainer sets. ``default``: the weights of the checkpoint.
        base_version: Name of the weights of the base model, without an adapter.
        state: ``whole``: the weights are complete. ``updating``: an update is running. ``complete``: all buckets of an
            update have arrived. ``failed``: the weights are a mixture of several versions.
        paused: Whether generation is paused.
        waiting: Jobs that the engine has not started yet.
        running: Number of completions in the current engine call.
        called: Jobs in the current engine call.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine: Any = engine
        self.model: nn.Module = self.engine.model
        self.version = self.base_version = "default"
        self.state: Literal["whole", "updating", "complete", "failed"] = "whole"
        self.paused = False
        self.waiting: deque[Job] = deque()
        self.running = 0
        self.called: Sequence[Job] = ()
        # Lock that is held while an engine call is interrupted, so that a new call cannot start and be interrupted by mistake.
        self._calling = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._known: dict[str, Tensor] = dict(self.model.named_buffers(remove_duplicate=False))
        self._known |= dict(self.model.named_parameters(remove_duplicate=False))
        self._loaded: set[int] = set()
        # Values of the adapted weights before an adapter was added, by parameter name.
        self._bases: dict[str, Tensor] = {}

    # Generation. All methods except `submit` and `let_go` are called in the engine's thread.

    def submit(self, jobs: Iterable[Job]) -> None:
        """Add jobs to the queue. They start after the current engine call, together with other waiting jobs."""
        self.waiting += jobs
        self.thread.submit(self.write_waiting)

    def let_go(self, jobs: Iterable[Job]) -> bool:
        """Mark the clients of jobs as disconnected. Interrupt the current engine call if no client waits for it any more.

        Returns:
            Whether the call was interrupted. An engine that has not started the call yet can miss the interruption.
            Therefore, call this method again until the call has ended.
        """
        for job in jobs:
            job.left = True
        with self._calling:
            unread = bool(self.called) and all(job.left for job in self.called)
            if unread:
                self.engine.interrupt()
        return unread

    def write_waiting(self) -> None:
        """Sample the completions of the waiting jobs with as few engine calls as possible."""
        if not self.waiting or self.paused or self.state != "whole":
            return
        seen = 0
        while seen < len(self.waiting):
            seen = len(self.waiting)
            time.sleep(GATHER_S)
        first, everyone = self.waiting[0], list(self.waiting)
        if not self.engine.capabilities.per_request_sampling:
            everyone = [job for job in everyone if job.request.sampling == first.request.sampling]
        for job in everyone:
            self.waiting.remove(job)
        self._write([job for job in everyone if job.rollouts.set_running_or_notify_cancel()])
        # Queue the next engine call instead of making it now. Pauses, updates and scores that were queued during this call
        # then run first.
        self.thread.submit(self.write_waiting)

    def _write(self, jobs: Sequence[Job]) -> None:
        jobs = [job for job in jobs if not job.left]
        if not jobs:
            return
        self.running, version = sum(job.request.n for job in jobs), self.version
        with self._calling:
            self.called = jobs
        call = jobs[0].request.sampling
        if self.engine.capabilities.per_request_sampling:
            # Remove the seed of the call. It comes from the first request, and requests without a seed would use it.
            call = replace(call, seed=None)
        try:
            stream = iter(self.engine.generate([job.request for job in jobs], call))
            written = [[next(stream) for _ in range(job.request.n)] for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].rollouts.set_exception(error)
                return
            # The joint call failed, so run each request separately. An invalid request, e.g. a guide that does not compile,
            # then fails alone.
            for job in jobs:
                self._write([job])
            return
        finally:
            self.running = 0
            with self._calling:
                self.called = ()
        for job, rollouts in zip(jobs, written, strict=True):
            job.version = version
            job.rollouts.set_result(rollouts)

    # Methods that update the weights.

    def begin_update(self) -> None:
        """Begin a weight update. No completions are sampled until the update has ended successfully."""
        self.state, self._loaded = "updating", set()
        self.version = self.base_version = INCOMPLETE
        self._bases = {}

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the parameters and buffers with the same names.

        Raises:
            ModelError: A name is unknown, or a shape differs.
        """
        for name, tensor in tensors:
            target = self._known.get(name)
            if target is None or target.shape != tensor.shape:
                theirs = "has no such weight" if target is None else f"has the shape {tuple(target.shape)} there"
                came = f"{name} of shape {tuple(tensor.shape)}"
                raise ModelError(f"received {came}, but the server {theirs}. Fix: serve the model that is trained.")
            target.copy_(tensor)
            self._loaded.add(id(target))

    def complete_update(self) -> None:
        """Mark the weight update as complete, because all buckets have arrived.

        Raises:
            ModelError: A parameter was not received.
        """
        # Compare parameter objects instead of names, because a tied parameter has two names.
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in self._loaded]
        if missing:
            raise ModelError(
                f"{len(missing)} weights were not received: {', '.join(missing[:5])}. Fix: serve the model that is trained "
                "(same architecture and names), and push all of its weights."
            )
        self.state = "complete"

    def end_update(self, version: str | None) -> None:
        """End a weight update. ``version`` is the name of the new weights. None means that the update has failed. All
        waiting jobs then fail too.
        """
        if version is None:
            self.state, self.version, self.base_version = "failed", INCOMPLETE, INCOMPLETE
            while self.waiting:
                job = self.waiting.popleft()
                if job.rollouts.set_running_or_notify_cancel():
                    job.rollouts.set_exception(WeightSyncError(NOT_WHOLE, phase="generate"))
            return
        self.state, self.version, self.base_version = "whole", version, version
        self._weights_moved()

    @torch.no_grad()
    def load_adapter(self, name: str, scale: float, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Set each adapted weight to ``W + scale B A``. W is the weight of the base model, and A and B are the adapter's
        matrices.

        The sum is computed in float32 and rounded once to the weight's dtype, in the same way as merged weights are
        computed. All names and shapes are checked before a weight is changed.

        Args:
            name: Name of the adapter. It becomes the version of the weights.
            scale: Scaling factor of the adapter.
            pairs: Mapping from names of weights to matrices A ``(r, in)`` and B ``(out, r)``.

        Raises:
            ModelError: A name is unknown, or the shape of a weight differs. The adapter then belongs to another base model.
        """
        for weight, (a, b) in pairs.items():
            target = self._known.get(weight)
            if target is None or target.shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
                theirs = "has no such weight" if target is None else f"has the shape {tuple(target.shape)} there"
                raise ModelError(
                    f"received an adapter for {weight} of shape {(b.shape[0], a.shape[1])} (rank {a.shape[0]} and "
                    f"{b.shape[1]}), but the server {theirs}. Fix: serve the base model that is trained."
                )
        for weight, base in self._bases.items():
            self._known[weight].copy_(base)
        self._bases = {weight: self._bases.get(weight, self._known[weight].clone()) for weight in pairs}
        for weight, (a, b) in pairs.items():
            delta = scale * (b.float() @ a.float())
            target = self._known[weight]
            target.copy_(target.float() + delta.to(target.device))
        self.version = name
        self._weights_moved()

    def _weights_moved(self) -> None:
        # Call load_weights with a new version and without tensors, so that the engine clears caches that depend on the old
        # weights.
        self.engine.load_weights((), self.engine.version + 1)
        self.thread.submit(self.write_waiting)

    # Scoring of given sequences, and properties of the engine.

    def score(
        self, prompts: Sequence[Sequence[int]], top: int, left: threading.Event | None = None
    ) -> list[dict[str, Any]]:
        """Score prompts with `score_choice`. All prompts are scored with the same weights. If the event ``left``
        is set because the client has disconnected, scoring stops.

        Raises:
            WeightSyncError: The weights are incomplete, because an update is running or has failed.
        """
        if self.state != "whole":
            raise WeightSyncError(NOT_WHOLE if self.state == "failed" else UPDATING, phase="generate")
        return [score_choice(self.model, ids, top) for ids in prompts if left is None or not left.is_set()]

    def facts(self) -> dict[str, Any]:
        """Return properties of the server. A trainer compares them with its own model, and chooses how to send weights."""
        text = causal_lm(self.model).config.get_text_config()
        weight = next(self.model.parameters())
        return {
            "engine": self.engine.name,
            "architectures": [type(self.model).__name__],
            **shape_of(text),
            "vocab_size": text.vocab_size,
            "placeholder": placeholder_of(self.model),
            "dtype": str(weight.dtype),
            "device": weight.device.type,
            "device_uuids": [str(torch.cuda.get_device_properties(weight.device).uuid)] if weight.is_cuda else [],
            "transfer": "shared memory",
            "tells_versions": True,
            "adapter_rank": min(text.hidden_size, text.vocab_size),
        }


def score_choice(model: nn.Module, ids: Sequence[int], top: int) -> dict[str, Any]:
    """Compute the log-probs of a given sequence. Return them as ``prompt_logprobs`` in a choice of ``/v1/completions``
    without a completion.

    Args:
        model: Model that computes the log-probs.
        ids: Token ids of the sequence.
        top: Number of most likely tokens to return at each position, in addition to the sequence's token.
    """
    inner: Any = causal_lm(model)
    rule, tokens = LogitRule.of(inner.config), torch.tensor(list(ids), device=next(model.parameters()).device)
    # The first token has no log-prob, because no token precedes it.
    entries: list[dict[str, Any] | None] = [None]
    with evaluating(model):
        if vars(inner).get("own_logits"):  # See `posttrain.models.probe.probe_head`.
            parts: Iterable[Tensor] = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().split(CHUNK)
        else:
            hidden = trunk(inner)(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]  # (T - 1, H)
            parts = (rule.logits(inner.get_output_embeddings()(part)) for part in hidden.split(CHUNK))
        for logits, own in zip(parts, tokens[1:].split(CHUNK), strict=True):
            logps = logits.log_softmax(-1)  # (c, V)
            shown = torch.cat([logps.topk(min(top, logps.shape[1])).indices, own[:, None]], 1)  # (c, k + 1)
            # Replace minus infinity with -9999 as vLLM does, because JSON cannot represent infinity.
            values = logps.gather(1, shown).clamp(min=-9999.0)
            lines = zip(shown.tolist(), values.tolist(), strict=True)
            entries += [{str(i): {"logprob": logp} for i, logp in zip(*line, strict=True)} for line in lines]
    return {"token_ids": [], "prompt_token_ids": ids, "prompt_logprobs": entries[: len(ids)]}
