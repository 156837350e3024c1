"""Adapters of hubs, with the real packages where they are installed, and environments that run in this process."""

import pickle
import sys
import threading
import types
from pathlib import Path

import pytest

from posttrain import HarnessRolloutOutcome, HarnessRolloutWorker, has_tool_call
from posttrain.compat.paths import public_name
from posttrain.errors import ConfigError, MissingDependencyError, RolloutError
from posttrain.extensions.agents.openenv import openenv_environment
from posttrain.extensions.agents.verifiers import verifiers_environment
from posttrain.loop.rollout import sample
from tests.extensions.agents.agents import ASK, TOOL_TEMPLATE, say
from tests.extensions.agents.test_harness import ROWS, trainer_of
from tests.extensions.agents.test_proxy import scripted
from tests.wordings import raises

EXAMPLES = str(Path(__file__).parents[3] / "examples")


class Verified:
    def __init__(self, reward):
        self.env_reward = reward


class BlackSession:
    """An agent with a thread of its own, which finds the policy at the address it is given."""

    def __init__(self, task, seed, episode_id, base_url, api_key):
        self.task, self.seed, self.said, self.closed = task, seed, [], False
        self.thread = threading.Thread(target=self.work, args=(base_url, api_key))
        self.thread.start()

    def work(self, base_url, api_key):
        for _ in range(2):
            self.said.append(say(base_url, api_key, ASK))

    def wait_for_completion(self, timeout=None):
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def verify(self, transcript, final_state):
        return Verified(float(len(self.said)))

    def close(self):
        self.closed = True


class Factory:
    def create(self, task, seed=None, episode_id=None, base_url=None, api_key=None):
        return BlackSession(task, seed, episode_id, base_url, api_key)


class Mute:
    """A session that nobody runs."""

    def verify(self, transcript, final_state):
        raise AssertionError

    def close(self):
        pass


def first_of_two(call):
    return call.number == 0


def test_trls_worker_of_sessions_is_a_harness_of_this_trainer(tiny_model, tiny_tokenizer, tmp_path):
    assert (
        public_name("posttrain.experimental.async_grpo.openenv_harness", "HarnessRolloutWorker") is HarnessRolloutWorker
    )
    outcomes = []

    def reward(outcome: HarnessRolloutOutcome):
        outcomes.append(outcome)
        return outcome.env_reward / 2

    worker = HarnessRolloutWorker(Factory(), rollout_reward_fn=reward, train_turn_fn=first_of_two)
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, worker)
    generation = sample(trainer.run, [row for row in ROWS[:2] for _ in range(2)], "train")
    assert generation.extra["harness_result"] == [1.0] * 4 and not outcomes[0].timed_out
    first, second = generation.rollouts[0], generation.rollouts[0].branches[0]
    assert all(first.tool_mask or [1]) and not any(second.tool_mask)


def test_a_worker_of_sessions_goes_to_other_processes():
    worker = pickle.loads(pickle.dumps(HarnessRolloutWorker(Factory(), train_turn_fn=has_tool_call)))
    assert worker.trains is has_tool_call and callable(worker.run)


def test_what_belongs_to_the_trainer_and_sessions_that_nobody_runs_are_refused(tiny_model, tiny_tokenizer, tmp_path):
    with raises(ConfigError, "model_name"):
        HarnessRolloutWorker(Factory(), model_name="m")
    made = types.SimpleNamespace(create=lambda task, seed, episode_id: Mute())
    with raises(RolloutError, "Mute"):
        HarnessRolloutWorker(made)._episode({}, "", "", "", 0)


@pytest.mark.parametrize(
    "package, call",
    [("verifiers", lambda: verifiers_environment("x")), ("openenv", lambda: openenv_environment(list, action=str))],
)
def test_a_hub_that_is_not_installed_says_how(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with raises(MissingDependencyError, f"posttrain[{package}]"):
        call()


def test_an_environment_of_verifiers_is_trained(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(EXAMPLES)
    rows, harness = verifiers_environment("agents_verifiers", tasks=8)
    assert rows.column_names == ["prompt", "task"] and len(rows) == 8
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, harness, rows=list(rows), max_steps=2)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["harness/answered"] for log in logs] == [1, 1] and logs[0]["harness/failed_episodes"] == 0
    assert 0 <= logs[0]["reward"] <= 1


def test_an_episode_of_verifiers_that_fails_says_how(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(EXAMPLES)
    rows, harness = verifiers_environment("agents_verifiers", tasks=8)
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, harness, rows=list(rows), harness_max_calls=1)
    import agents_verifiers

    async def broken(self, *args):
        raise ValueError("no luck")

    monkeypatch.setattr(agents_verifiers.ChatHarness, "launch", broken)
    generation = sample(trainer.run, list(rows)[:2], "train")
    assert "no luck" in generation.extra["harness_error"][0]


def test_a_white_box_of_openenv_plays_its_session_turn_by_turn(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("openenv.core.harness")
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import MCPHarnessAdapter, ResourceSession, ToolResult, VerifyResult

    class Adder(ResourceSession):
        def initial_messages(self):
            return list(ASK)

        def list_tools(self):
            return [
                Tool(
                    name="add",
                    description="Add.",
                    input_schema={"type": "object", "properties": {"a": {"type": "integer"}}},
                )
            ]

        def call_tool(self, name, arguments):
            self.got = arguments
            return ToolResult(data=arguments["a"] + 1)

        def verify(self, transcript, final_state=None):
            return VerifyResult(env_reward=float(self.got["a"]), done=True)

        def close(self):
            pass

    tiny_tokenizer.chat_template = TOOL_TEMPLATE
    asked = '\n<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call>'
    factory = types.SimpleNamespace(create=lambda task, seed, episode_id: Adder())
    trainer = trainer_of(
        tiny_model, tiny_tokenizer, tmp_path, HarnessRolloutWorker(factory, MCPHarnessAdapter()), harness_limit=1,
        max_completion_length=64,
    )  # fmt: skip
    sample = scripted(tiny_tokenizer, asked, "five")
    monkeypatch.setattr(trainer.weight_sync, "ask", sample)
    generation = sample(trainer.run, ROWS[:2], "train")
    assert generation.extra["harness_error"] == [None, None] and generation.extra["harness_result"] == [4.0, 4.0]
    assert [m["role"] for m in generation.completions[0]] == ["assistant", "tool", "assistant"]
    assert not generation.rollouts[0].branches, "the second turn goes on from the first"


def test_a_client_of_openenv_is_an_environment():
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core import GenericEnvClient
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Move(Action):
        step: int = 0

    class Left(Observation):
        left: int = 0

    class Countdown(Environment):
        def reset(self, seed=None, episode_id=None, **_):
            self.left = 3
            return Left(left=3, done=False, reward=0.0)

        def step(self, action, **_):
            self.left -= action.step
            return Left(left=self.left, done=self.left <= 0, reward=float(self.left == 0))

        @property
        def state(self):
            return State()

    config = uvicorn.Config(create_app(Countdown, Move, Left), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    factory = openenv_environment(
        lambda: GenericEnvClient(base_url=f"http://127.0.0.1:{port}"),
        action=lambda text: {"step": int(text)},
        observe=lambda seen: f"left: {seen['left']}",
    )
    game = factory()
    try:
        assert game.reset() == "left: 3" and game.step("1") == "left: 2" and game.step("2") == "left: 0"
        assert game.get_reward() == 1.0 and game.done
    finally:
        game.close()
        server.should_exit = True
        thread.join(10)
