"""The engine of `posttrain serve`: one thread that writes what waits, takes weights, and scores given sequences."""

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

# Seconds without a new request after which those that wait are begun: clients send the prompts of a step one by one.
GATHER_S = 0.01
NOT_WHOLE = "the weights are not whole: an update failed midway. Push all of them again."
UPDATING = "the weights are not whole: an update of them has not ended. End it, or push all of them again."
# Positions whose logits exist at once while a sequence is scored.
CHUNK = 256


@dataclass(eq=False)
class Job:
    """One prompt on its way.

    Attributes:
        request: With its own sampling.
        version: Of the weights that wrote its completions.
        rollouts: Its completions, or the error that ended it.
        left: Whether its client has left.
    """

    request: Prompt
    version: str = ""
    rollouts: Future[list[Rollout]] = field(default_factory=Future)
    left: bool = False


class ServedEngine:
    """An engine whose calls, weight updates and scores run in one thread, one after the other.

    Generation is held while it is paused, and from the beginning of a weight update until its end. Requests that come
    meanwhile wait.

    Args:
        engine: Samples from its ``model``, whose parameters new weights are copied into.

    Attributes:
        version: Of the weights, as the trainer calls them; ``default``: those of the checkpoint.
        base_version: Of the weights below an adapter.
        state: ``whole``; ``updating``; ``complete``: all buckets of an update came; ``failed``: they are not of one version.
        paused: Whether generation is held.
        waiting: Jobs that are in no call yet.
        running: Completions of the call under way.
        called: Jobs of the call under way.
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
        # Held while the call under way is interrupted, so that the next one is not.
        self._calling = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._known: dict[str, Tensor] = dict(self.model.named_buffers(remove_duplicate=False))
        self._known |= dict(self.model.named_parameters(remove_duplicate=False))
        self._loaded: set[int] = set()
        # By name, what an adapter was added to, as it was before.
        self._bases: dict[str, Tensor] = {}

    # Generation. All methods but `submit` and `let_go` are called in the engine's thread.

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; they are begun with the others that wait, after the call under way."""
        self.waiting += jobs
        self.thread.submit(self.write_waiting)

    def let_go(self, jobs: Iterable[Job]) -> bool:
        """Note that the client of some jobs has left, and end the call under way if nobody waits for any of it.

        Returns:
            Whether the call was interrupted. An engine that has not begun it yet may miss that: ask again until it has ended.
        """
        for job in jobs:
            job.left = True
        with self._calling:
            unread = bool(self.called) and all(job.left for job in self.called)
            if unread:
                self.engine.interrupt()
        return unread

    def write_waiting(self) -> None:
        """Complete the jobs that wait, in as few calls of the engine as they allow."""
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
        # Behind the pauses, updates and scores that came during the call.
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
            # Requests without a seed must not take that of the first one.
            call = replace(call, seed=None)
        try:
            stream = iter(self.engine.generate([job.request for job in jobs], call))
            written = [[next(stream) for _ in range(job.request.n)] for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].rollouts.set_exception(error)
                return
            # One request that cannot be served (a guide that does not compile, say) must not end the others.
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

    # Weights

    def begin_update(self) -> None:
        """New weights are on their way: nothing is sampled until they are whole."""
        self.state, self._loaded = "updating", set()
        self.version = self.base_version = INCOMPLETE
        self._bases = {}

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the parameters of their names.

        Raises:
            ModelError: A name that the model does not have, or a tensor of another shape.
        """
        for name, tensor in tensors:
            target = self._known.get(name)
            if target is None or target.shape != tensor.shape:
                theirs = "does not know it" if target is None else f"has the shape {tuple(target.shape)} there"
                came = f"{name} of shape {tuple(tensor.shape)}"
                raise ModelError(f"{came} came, and the server {theirs}. Fix: serve the model that is trained.")
            target.copy_(tensor)
            self._loaded.add(id(target))

    def complete_update(self) -> None:
        """All buckets came.

        Raises:
            ModelError: A parameter that nothing came for.
        """
        # Tied weights are one parameter with two names.
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in self._loaded]
        if missing:
            raise ModelError(
                f"the server still has old values of {len(missing)} weights: {', '.join(missing[:5])}. Fix: serve the model "
                "that is trained (same architecture, same names), and push all of its weights."
            )
        self.state = "complete"

    def end_update(self, version: str | None) -> None:
        """The weights are whole and called ``version`` from now on; None: the update failed, and what waits is refused."""
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
        """``W + scale B A`` in the place of each adapted weight W of the base model, which are called ``name`` from now on.

        The sum is taken in float32 and rounded once, as in merged weights. All is checked before anything is changed.

        Args:
            name: Of the version.
            scale: Of the adapter.
            pairs: By the names of weights, A ``(r, in)`` and B ``(out, r)``.

        Raises:
            ModelError: A weight that the model does not have, or matrices that do not fit it: an adapter of another base.
        """
        for weight, (a, b) in pairs.items():
            target = self._known.get(weight)
            if target is None or target.shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
                theirs = "does not know it" if target is None else f"has the shape {tuple(target.shape)} there"
                raise ModelError(
                    f"an adapter for {weight} of shape {(b.shape[0], a.shape[1])} (rank {a.shape[0]} and {b.shape[1]}) came, and "
                    f"the server {theirs}. Fix: serve the base model that is trained."
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
        # What the engine kept was computed with the old weights.
        self.engine.load_weights((), self.engine.version + 1)
        self.thread.submit(self.write_waiting)

    # Other

    def score(
        self, prompts: Sequence[Sequence[int]], top: int, left: threading.Event | None = None
    ) -> list[dict[str, Any]]:
        """Return `score_choice` of each prompt, all by the same weights; none after ``left`` was set.

        Raises:
            WeightSyncError: Some weights are of one version and some of another: an update is under way, or failed.
        """
        if self.state != "whole":
            raise WeightSyncError(NOT_WHOLE if self.state == "failed" else UPDATING, phase="generate")
        return [score_choice(self.model, ids, top) for ids in prompts if left is None or not left.is_set()]

    def facts(self) -> dict[str, Any]:
        """What a trainer compares with its own model, and how it may send weights."""
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
    """The log-probs of a given sequence, as a choice of ``/v1/completions`` with ``prompt_logprobs`` and no completion.

    Args:
        model: That scores.
        ids: T token ids.
        top: k; beside each token its k most likely ones are told.
    """
    inner: Any = causal_lm(model)
    rule, tokens = LogitRule.of(inner.config), torch.tensor(list(ids), device=next(model.parameters()).device)
    # Nothing predicts the first token.
    entries: list[dict[str, Any] | None] = [None]
    with evaluating(model):
        if vars(inner).get("own_logits"):  # See `posttrain.models.probe.probe_head`.
            parts: Iterable[Tensor] = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().split(CHUNK)
        else:
            hidden = trunk(inner)(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]  # (T - 1, H)
            parts = (rule.logits(inner.get_output_embeddings()(part)) for part in hidden.split(CHUNK))
        for logits, own in zip(parts, tokens[1:].split(CHUNK), strict=True):
            logps = logits.log_softmax(-1)  # (c, V)
            told = torch.cat([logps.topk(min(top, logps.shape[1])).indices, own[:, None]], 1)  # (c, k + 1)
            # A token that the model never says, in vLLM's way: JSON has no word for minus infinity.
            found = logps.gather(1, told).clamp(min=-9999.0)
            lines = zip(told.tolist(), found.tolist(), strict=True)
            entries += [{str(i): {"logprob": logp} for i, logp in zip(*line, strict=True)} for line in lines]
    return {"token_ids": [], "prompt_token_ids": ids, "prompt_logprobs": entries[: len(ids)]}
