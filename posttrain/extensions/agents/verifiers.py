"""Conversion of `verifiers` environments to a dataset of tasks and a harness that runs and scores these tasks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import datasets

from posttrain.errors import DataError, RolloutError
from posttrain.extensions.agents.harness import Harness
from posttrain.integrations import require

# Maximum number of tasks that are taken from an environment with infinitely many tasks.
MOST_TASKS = 10_000
# Maximum number of seconds to wait until the servers of an environment have stopped.
CLOSE_S = 10.0


def verifiers_environment(
    environment: object, *, tasks: int | None = None, runtime: str | None = "subprocess", **config: Any
) -> tuple[datasets.Dataset, Harness]:
    """Convert an environment of ``verifiers`` (0.4) to a training set of tasks and a harness. The harness runs a task and
    returns the environment's reward.

    verifiers intercepts every model call of the environment's agents and forwards it to the policy's endpoint. Model calls
    of judges are sent to the endpoints in the environment's config.

    Args:
        environment: Id of an installed environment, its config (a mapping or ``EnvConfig``), or an ``Env``.
        tasks: Number of tasks. None: all tasks, or 10,000 tasks if the environment has infinitely many.
        runtime: Runtime of the agent's program, if ``environment`` is an id. None: the runtime in the environment's config.
        config: Additional fields of the environment's config, if ``environment`` is an id.

    Returns:
        A dataset with the columns ``prompt`` and ``task`` (index of the task), and the harness. Use both as
        ``GRPOTrainer(model, train_dataset=rows, harness=harness)``.

    Raises:
        MissingDependencyError: verifiers is not installed.
        DataError: The environment has no tasks.

    >>> rows, harness = verifiers_environment("gsm8k-v1")  # doctest: +SKIP
    """
    require("verifiers", "verifiers_environment")
    import verifiers.v1 as vf

    if isinstance(environment, str):
        settings: Any = {"taskset": {"id": environment}, **config}
        single = runtime is not None and vf.env_config_type(environment) is vf.SingleAgentEnvConfig
        if single:
            settings["agent"] = {"runtime": {"type": runtime}} | dict(settings.get("agent") or {})
        environment = settings
    if isinstance(environment, Mapping | vf.EnvConfig):
        environment = vf.load_environment(vf.resolve_env_config(environment))
    taskset = environment.taskset
    most = tasks if tasks is not None else None if taskset.bounded else MOST_TASKS
    listed = list(itertools.islice(taskset, most))
    if not listed:
        raise DataError(f"the environment {environment.config.env_id!r} has no tasks. Fix: check its taskset's config.")
    rows = [{"prompt": _messages(task.data), "task": index} for index, task in enumerate(listed)]
    player = _Player(environment, listed)
    return datasets.Dataset.from_list(rows), Harness(player, requires=True, close=player.close)


def _messages(data: Any) -> list[dict[str, Any]]:
    """Return the messages of a task for the trainer's logs. The agent gets its task from the environment and not from these
    messages.
    """
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": data.prompt_text or str(data.name or data.idx)}]


class _Player:
    """Callable that runs one task of an environment as an episode and returns the reward.

    Args:
        environment: Environment of type ``Env``.
        tasks: List of all tasks. The column ``task`` is an index in this list.
    """

    def __init__(self, environment: object, tasks: list[Any]) -> None:
        self.environment, self.tasks = environment, tasks
        self._serving: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}
        self._holders: dict[asyncio.AbstractEventLoop, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Run one episode, and return its total reward and its rewards by name.

        Raises:
            RolloutError: An agent, the environment or its scoring failed. The message contains the error.
        """
        import verifiers.v1 as vf

        await self._served()
        root = base_url.removesuffix("/v1")
        # Pass the API key in the path of the URL, because clients of verifiers read keys only from environment variables.
        client = vf.EvalClientConfig(base_url=f"{root}/sessions/{quote(api_key)}/v1", api_key_var="POSTTRAIN_NO_KEY")
        context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
        (slot,) = self.environment.slots(self.tasks[task["task"]])
        episode = await self.environment.run_slot(slot, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors[-3:])
            raise RolloutError(f"the environment's episode failed: {reasons or 'no reason was reported'}")
        traces = episode.traces
        rewards = {name: float(r.value) for t in traces for name, r in t.rewards.items() if r is not None}
        return {"reward": sum(trace.reward for trace in traces) / len(traces), "rewards": rewards}

    async def _served(self) -> None:
        """Start the tool servers and the interception server once per event loop. A separate asyncio task keeps them
        running.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            ready = self._serving[loop] = loop.create_future()
            stop = asyncio.Event()
            self._holders[loop] = loop.create_task(self._hold(ready, stop)), stop
        await asyncio.shield(self._serving[loop])

    def close(self) -> None:
        """Stop the servers that episodes have started. The next episode starts them again."""
        holders, self._holders, self._serving = self._holders, {}, {}
        for loop, (holder, stop) in holders.items():

            async def end(holder: asyncio.Task[None] = holder, stop: asyncio.Event = stop) -> None:
                stop.set()
                await holder

            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(end(), loop).result(CLOSE_S)

    async def _hold(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        try:
            async with self.environment.serving():
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
            self._serving.clear()
