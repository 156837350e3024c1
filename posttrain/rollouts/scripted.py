"""An engine that says what it is told: for tests of trainers and rewards, yours and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posttrain.rollouts.base import Capabilities, RolloutEngine
from posttrain.types import Request, Rollout, Sampling

__all__ = ["ScriptedEngine"]


class ScriptedEngine(RolloutEngine):
    """Returns scripted completions, cut and finished as a real engine would.

    Args:
        script: A list of token-id lists, used in turn and from the start again; or a function of ``(prompt_ids, index)``,
            where ``index`` counts the completions of one request.
        logp: What every token's log-prob is said to be.

    Attributes:
        requests: Every request seen, in order.
        version: Of the last weights loaded.

    >>> engine = ScriptedEngine([[5, 2], [6, 7, 8]])
    >>> sampling = Sampling(max_new_tokens=2, stop_token_ids=(2,))
    >>> [(r.token_ids, r.finish_reason) for r in engine.generate([Request([1], n=2)], sampling)]
    [([5, 2], 'stop'), ([6, 7], 'length')]
    """

    name = "scripted"
    # Its log-probs are placeholders: no run compares them with its own.
    capabilities = Capabilities(in_process=True, shares_weights=True, has_logprobs=False)

    def __init__(
        self, script: Sequence[Sequence[int]] | Callable[[Sequence[int], int], Sequence[int]], logp: float = -1.0
    ):
        self.script, self.logp = script, logp
        self.requests: list[Request] = []
        self._next = 0

    def _line(self, request: Request, index: int) -> list[int]:
        if callable(self.script):
            return list(self.script(request.prompt_ids, index))
        line = list(self.script[self._next % len(self.script)])
        self._next += 1
        return line

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Scripted completions, cut after the first stop token and at ``max_new_tokens``."""
        rollouts = []
        for request in requests:
            self.requests.append(request)
            for index in range(request.n):
                ids = self._line(request, index)[: sampling.max_new_tokens]
                stops = [i for i, token in enumerate(ids) if token in sampling.stop_token_ids]
                ids = ids[: stops[0] + 1] if stops else ids
                reason: Any = "stop" if stops else "length"
                rollouts.append(Rollout(list(request.prompt_ids), ids, [self.logp] * len(ids), reason, self.version))
        return rollouts

    def load_weights(self, named_tensors: Iterable[Any], version: int) -> None:
        """Only the version is kept."""
        self.version = version

    def close(self) -> None:
        """Nothing to free."""
