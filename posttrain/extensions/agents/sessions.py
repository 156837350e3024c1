"""`HarnessRolloutWorker`: harness that runs agent sessions of OpenEnv. Its arguments have TRL's names."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from posttrain.errors import ConfigError, RolloutError
from posttrain.extensions.agents.harness import Harness
from posttrain.extensions.agents.session import CapturedCall
from posttrain.integrations import require
from posttrain.rollouts.episodes.environments import accepted_arguments

# Default maximum number of turns of a white-box session. In such a session, `HarnessRolloutWorker` calls the model.
MOST_TURNS = 8


def has_tool_call(call: CapturedCall) -> bool:
    """Return whether the model called a tool in this call. Use it as ``train_turn_fn``."""
    return any(answer.get("tool_calls") for answer in call.answers)


@dataclass(slots=True)
class HarnessRolloutOutcome:
    """Result of an agent session, for ``rollout_reward_fn``.

    Attributes:
        env_reward: Reward that the session's ``verify`` returned. None: no reward.
        completion: Messages of a white-box session, which ``harness_adapter`` runs. Empty for a black-box session, in which
            the agent runs its own loop.
        trace: Events that a white-box session recorded.
        tool_call_count, tool_failure_count: Number of tool calls, and of failed tool calls, in a white-box session.
        tool_calls_by_name: Mapping from tool names to numbers of tool calls.
        timed_out: Whether the agent did not finish within the timeout.
    """

    env_reward: float | None
    completion: list[dict[str, Any]] = field(default_factory=list)
    trace: list[Any] = field(default_factory=list)
    tool_call_count: int = 0
    tool_failure_count: int = 0
    tool_calls_by_name: dict[str, int] = field(default_factory=dict)
    timed_out: bool = False


class HarnessRolloutWorker(Harness):
    """Harness that runs agent sessions. It has the name and arguments of TRL's class. Pass it to the trainer as
    ``rollout_worker=`` or ``harness=``.

    Args:
        harness_session_factory: Factory whose ``create(task, seed, episode_id)`` returns a session with
            ``verify(transcript, final_state)`` and ``close()``. ``seed`` is the same for all episodes of a group.
            ``create`` also receives ``base_url``, ``api_key`` and ``model`` if it has parameters with these names.
        harness_adapter: Adapter whose ``run_white_box`` runs the session turn by turn. None: the agent of the session calls the
            endpoint in its own loop, and ``wait_for_completion(timeout)`` waits until it has finished.
        rollout_reward_fn: Function ``f(outcome) -> float or None`` that computes the reward. None: the session's own
            reward.
        train_turn_fn: Function ``f(call) -> bool`` that selects the calls that contribute to the loss, e.g.
            `has_tool_call`. None: all calls contribute.
        agent_turn_fn: Function ``f(calls) -> calls`` that selects the calls of the agent. None: all answered calls.
        max_turns: Maximum number of turns of a white-box session.
        timeout: Argument of ``wait_for_completion``, in seconds. None: the session's default.
        worker_kwargs: Other arguments of TRL's worker. Passing any of these arguments raises an error, because the trainer's
            config contains these options.

    Raises:
        ConfigError: ``worker_kwargs`` were passed.
    """

    def __init__(
        self,
        harness_session_factory: Any,
        harness_adapter: Any = None,
        rollout_reward_fn: Callable[[HarnessRolloutOutcome], float | None] | None = None,
        train_turn_fn: Callable[[CapturedCall], bool] | None = None,
        agent_turn_fn: Callable[[list[CapturedCall]], list[CapturedCall]] | None = None,
        *,
        max_turns: int = MOST_TURNS,
        timeout: float | None = None,
        **worker_kwargs: Any,
    ) -> None:
        if worker_kwargs:
            raise ConfigError(
                f"HarnessRolloutWorker got {sorted(worker_kwargs)}, but models, datasets, rewards and limits are set "
                "in the trainer. Fix: set them in AsyncGRPOConfig, and pass the worker as rollout_worker."
            )
        super().__init__(self._episode, trains=train_turn_fn, requires=rollout_reward_fn is None, keeps=agent_turn_fn)
        self.factory, self.adapter, self.reward = harness_session_factory, harness_adapter, rollout_reward_fn
        self.max_turns, self.timeout = max_turns, timeout

    def _episode(self, task: Mapping[str, Any], base_url: str, api_key: str, model: str, seed: int) -> Any:
        """Create a session for a task, run the session, and return its reward."""
        address = {"base_url": base_url, "api_key": api_key, "model": model}
        arguments = accepted_arguments(self.factory.create, address)
        session = self.factory.create(task=task, seed=seed, episode_id=f"episode-{secrets.token_hex(8)}", **arguments)
        try:
            outcome = self._white(session, address) if self.adapter is not None else self._black(session)
        finally:
            session.close()
        return outcome.env_reward if self.reward is None else self.reward(outcome)

    def _white(self, session: Any, address: dict[str, str]) -> HarnessRolloutOutcome:
        require("openenv", "HarnessRolloutWorker")
        from openenv.core.harness import HarnessRunLimits

        limits = HarnessRunLimits(max_turns=self.max_turns)
        result = self.adapter.run_white_box(_model_step(address), session, limits)
        state = {"done": result.done, "metrics": dict(result.metrics)}
        verified = session.verify(transcript=result.messages, final_state=state)
        names = Counter(entry.tool_name for entry in result.tool_trace)
        failed = sum(entry.result.error is not None for entry in result.tool_trace)
        seen = (list(result.messages), list(result.events), names.total(), failed, dict(names))
        return HarnessRolloutOutcome(verified.env_reward, *seen, timed_out=not result.done)

    def _black(self, session: Any) -> HarnessRolloutOutcome:
        if not callable(getattr(session, "wait_for_completion", None)):
            raise RolloutError(
                f"{type(session).__name__} has no wait_for_completion, so its agent is not run. Fix: pass "
                "harness_adapter, or sessions whose agent calls the base_url that create receives."
            )
        ended = session.wait_for_completion(**({} if self.timeout is None else {"timeout": self.timeout}))
        verified = session.verify(transcript=[], final_state=None)
        return HarnessRolloutOutcome(verified.env_reward, timed_out=ended is False)


def _model_step(address: dict[str, str]) -> Callable[..., Any]:
    """Return a function that samples one turn of a white-box session by calling the policy's endpoint."""
    from openenv.core.harness import ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

    def step(messages: list[dict[str, Any]], tools: list[Any], sampling: dict[str, Any]) -> Any:
        shown = [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in tools]
        schemas = [{"type": "function", "function": schema} for schema in shown]
        body = {"model": address["model"], "messages": messages, "return_token_ids": True, "logprobs": True, **sampling}
        body |= {"tools": schemas} if schemas else {}
        key = {"Authorization": f"Bearer {address['api_key']}"}
        reply = httpx2.post(f"{address['base_url']}/chat/completions", json=body, headers=key, timeout=None)
        if reply.status_code != 200:
            raise RolloutError(f"the policy's endpoint returned {reply.status_code}: {reply.text[:300]}")
        content, choice = reply.json(), reply.json()["choices"][0]
        calls = [
            ToolCall(id=c["id"], name=c["function"]["name"], args=json.loads(c["function"]["arguments"]))
            for c in choice["message"].get("tool_calls", ())
        ]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        response = LLMResponse(content=choice["message"]["content"] or "", tool_calls=calls)
        return ModelStepResult(response, content["prompt_token_ids"], choice["token_ids"], logprobs)

    return step
