"""Environments: pooled, reset, routed, asked for rewards, and failing by name."""

from __future__ import annotations

import logging
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain import ConfigError, DataError, RolloutError
from posttrain.rollouts.episodes.environments import (
    EnvironmentPool,
    PooledReward,
    add_observation,
    is_done,
    step_environment,
)
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolRunner
from tests.wordings import raises

USER = [{"role": "user", "content": "Go. "}]


class Counter:
    """Counts."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.value, self.rows, self.closed = None, [], False

    @property
    def trap(self):
        raise AssertionError("properties are not looked at")

    def reset(self, start=0, **row):
        self.value = start
        self.rows.append(row)
        return f"You start at {start}."

    def add(self, amount: int) -> int:
        """Add.

        Args:
            amount: How much.
        """
        self.value += amount
        return self.value

    def get_reward(self):
        return float(self.value)

    def close(self):
        self.closed = True

    def _secret(self):
        return 1


class Silent:
    def reset(self):
        return None


def test_public_methods_are_tools_and_the_others_are_not():
    pool = EnvironmentPool(Counter)
    box = pool.toolbox(pool.kinds[""].instances[0], ToolBox())
    assert list(box.functions) == ["add"]
    assert [schema["function"]["name"] for schema in box.schemas] == ["add"]
    assert pool.has_tools
    assert not EnvironmentPool(Silent).has_tools


def test_r47_instances_are_one_a_rollout_used_again_and_reset_each_time():
    Counter.made = 0
    pool = EnvironmentPool(Counter)
    first, _ = pool.begin([{"prompt": USER, "start": i} for i in range(4)])
    assert len({id(e) for e in first}) == 4
    for e in first:
        e.add(100)
    pool.release()
    second, _ = pool.begin([{"prompt": USER, "start": 10 + i} for i in range(4)])
    assert [e.value for e in second] == [10, 11, 12, 13], "an environment went on from where it was"
    assert {id(e) for e in first} == {id(e) for e in second}
    assert Counter.made == 4


def test_reset_gets_the_columns_and_its_text_ends_the_prompt():
    pool = EnvironmentPool(Counter)
    row = {"prompt": USER, "start": 3, "level": "hard"}
    (environment,), (seen,) = pool.begin([row])
    assert seen["prompt"] == [{"role": "user", "content": "Go. You start at 3."}]
    assert row["prompt"] == [{"role": "user", "content": "Go. "}], "the dataset's row was changed"
    assert environment.rows[0]["level"] == "hard"
    assert environment.rows[0]["prompt"] == USER
    (_,), (seen,) = pool.begin([{"start": 3}])
    assert seen["prompt"] == [{"role": "user", "content": "You start at 3."}]


def test_a_reset_without_keywords_gets_none():
    (_,), (seen,) = EnvironmentPool(Silent).begin([{"prompt": USER, "level": 3}])
    assert seen["prompt"] == USER


def test_observations_are_text_or_text_blocks_and_nothing_else():
    block = {"type": "text", "text": "x"}
    assert add_observation(USER, [block, block], "e")[-1]["content"] == "Go. xx"
    many = [{"role": "user", "content": [block]}]
    assert add_observation(many, "y", "e")[-1]["content"] == [block, {"type": "text", "text": "y"}]
    assert add_observation(many, [block], "e")[-1]["content"] == [block, block]
    for wrong in (("obs", {}), {"board": 1}, 3, [{"type": "image"}]):
        with raises(RolloutError, "row 0"):
            add_observation(USER, wrong, "environment e, row 0")


def test_a_dict_of_environments_routes_each_row_and_withholds_the_name():
    class Other(Counter):
        """Another."""

        def reset(self, **row):
            self.value, self.rows = -1, [row]

    pool = EnvironmentPool({"count": Counter, "other": Other})
    rows = [{"prompt": USER, "environment": name} for name in ("other", "count", "other")]
    environments, _ = pool.begin(rows)
    assert [type(e).__name__ for e in environments] == ["Other", "Counter", "Other"]
    assert environments[0] is not environments[2]
    assert all("environment" not in e.rows[-1] for e in environments)
    with raises(DataError, "row 1", "'environment'", "'conut'", "'count'"):
        pool.begin([rows[0], {"prompt": USER, "environment": "conut"}])


def test_the_group_seed_is_what_members_of_a_group_share():
    class Dice:
        def reset(self, group_seed):
            self.roll = random.Random(group_seed).randrange(10**9)
            return str(self.roll)

    environments, _ = EnvironmentPool(Dice).begin([{"prompt": USER}] * 4, [7, 7, 8, 8])
    rolls = [e.roll for e in environments]
    assert rolls[0] == rolls[1] != rolls[2] == rolls[3]


def test_r47_different_observations_inside_a_group_are_told_once(caplog):
    class Unfair:
        count = 0

        def reset(self):
            type(self).count += 1
            return str(self.count)

    pool = EnvironmentPool(Unfair)
    with caplog.at_level(logging.WARNING):
        pool.begin([{"prompt": USER}] * 2, [1, 2])
        assert not caplog.records
        pool.begin([{"prompt": USER}] * 4, [1, 1, 2, 2])
        pool.begin([{"prompt": USER}] * 4, [1, 1, 2, 2])
    assert len([r for r in caplog.records if "different observations" in r.message]) == 1


def test_resets_run_side_by_side():
    class Slow:
        def reset(self):
            time.sleep(0.1)

    begin = time.perf_counter()
    EnvironmentPool(Slow).begin([{"prompt": USER}] * 16)
    assert time.perf_counter() - begin < 1.0


class Flaky:
    """Fails to reset until an instance of number ``good``."""

    good, made, closed = 2, 0, 0

    def __init__(self):
        type(self).made += 1
        self.number = type(self).made

    def reset(self):
        if self.number < self.good:
            raise ConnectionError("no server")
        return "up"

    def close(self):
        type(self).closed += 1


def test_a_failing_reset_names_environment_and_row_and_closes_everything():
    Flaky.made = Flaky.closed = 0
    pool = EnvironmentPool({"game": Flaky})
    with raises(RolloutError, "'game'", "row 0"):
        pool.begin([{"prompt": USER, "environment": "game"}] * 3)
    assert Flaky.closed == 3


def test_retries_reset_a_fresh_instance():
    Flaky.made = Flaky.closed = 0
    environments, (row,) = EnvironmentPool(Flaky, retries=1).begin([{"prompt": USER}])
    assert row["prompt"][-1]["content"] == "Go. up"
    assert environments[0].number == 2
    assert Flaky.closed == 1


class Refused:
    """Cannot be made the third time."""

    made = 0

    def __init__(self):
        type(self).made += 1
        if self.made == 3:
            raise ConnectionError("no room")

    def reset(self):
        return "up"


def test_a_factory_that_fails_is_an_error_of_its_row_alone_and_is_tried_again():
    Refused.made, errors = 0, {}
    pool = EnvironmentPool(Refused)
    environments, _ = pool.begin([{"prompt": USER}] * 4, errors=errors)
    (row,) = [i for i, environment in enumerate(environments) if environment is None]
    assert [*errors] == [row] and "its factory raised ConnectionError: no room" in errors[row]
    pool.release([environment for environment in environments if environment is not None])
    assert [len(kind.free) for kind in pool.kinds.values()] == [3], "none is lost"
    Refused.made = 0
    with pytest.raises(RolloutError, match=r"environment Refused, row \d: its factory raised ConnectionError: no room"):
        EnvironmentPool(Refused).begin([{"prompt": USER}] * 4)
    Refused.made = 0
    environments, _ = EnvironmentPool(Refused, retries=1).begin([{"prompt": USER}] * 4)
    assert len({id(environment) for environment in environments}) == 4 and None not in environments


def test_a_reset_that_hangs_is_an_error_that_says_so():
    class Stuck:
        def reset(self):
            time.sleep(5)

    with raises(RolloutError, "tool_timeout=0.1"):
        EnvironmentPool(Stuck, ToolRunner(timeout=0.1)).begin([{"prompt": USER}])


def test_asynchronous_resets_and_rewards_are_awaited():
    class Remote:
        async def reset(self):
            return "remote"

        async def get_reward(self):
            return 2.5

    pool = EnvironmentPool(Remote)
    environments, rows = pool.begin([{"prompt": USER}] * 2)
    assert rows[1]["prompt"][-1]["content"] == "Go. remote"
    assert PooledReward(Remote, pool)([None] * 2, environments=environments) == [2.5, 2.5]


def test_rewards_are_of_exactly_the_class_and_an_error_names_the_row():
    class Broken(Counter):
        """Fails."""

        def get_reward(self):
            raise ValueError("no score")

    pool = EnvironmentPool({"a": Counter, "b": Broken})
    environments, _ = pool.begin([{"environment": "a", "start": 4}, {"environment": "b"}])
    counter, broken = pool.rewards()
    assert (counter.__name__, broken.__name__) == ("Counter", "Broken")
    assert counter([None] * 2, environments=environments) == [4.0, None]
    with raises(RolloutError, "row 1", "get_reward"):
        broken([None] * 2, environments=environments)


def test_what_a_call_never_came_back_from_is_not_used_again():
    class Sticky(Counter):
        """Hangs."""

        def hang(self) -> str:
            """Hang."""
            time.sleep(3)
            return "late"

    runner = ToolRunner(timeout=0.1)
    pool = EnvironmentPool(Sticky, runner)
    (environment,), _ = pool.begin([{"prompt": USER}])
    box = pool.toolbox(environment, ToolBox())
    calls = [{"function": {"name": n, "arguments": a}} for n, a in (("hang", {}), ("add", {"amount": 1}))]
    (results,) = runner.run([(box, calls)])
    assert [r.failed for r in results] == [True, True]
    assert "still busy with an earlier call" in results[1].text
    assert box.lost
    pool.discard(environment)
    assert PooledReward(Sticky, pool)([None], environments=[environment]) == [None]
    (fresh,), _ = pool.begin([{"prompt": USER}])
    assert fresh is not environment


def test_factories_are_checked_at_construction():
    class NoReset:
        def step(self):
            """Step."""

    class Undescribed(Silent):
        def go(self, where):
            return where

    for factory, message in [
        (3, "must be callable without arguments"),
        ({}, "an empty dict"),
        (NoReset, "returned a NoReset, but an environment must have a method reset"),
        (Undescribed, "tool 'go' has no valid schema"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EnvironmentPool(factory)


def test_closing_closes_all_and_the_pool_makes_new_ones():
    pool = EnvironmentPool(Counter)
    old, _ = pool.begin([{"prompt": USER}] * 3)
    pool.close()
    assert all(e.closed for e in old)
    new, _ = pool.begin([{"prompt": USER}] * 2)
    assert not any(e.closed for e in new)


class Gym:
    """A client as Gymnasium has them."""

    def reset(self, seed=None):
        self.at, self.seed = 0, seed
        return self.at, {}

    def step(self, action):
        self.at += action
        return self.at, 1.5, self.at >= 3, False, {"truncated": True}


class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done


class OpenEnv:
    """A client whose step returns an object."""

    def reset(self):
        return Result("at 0", None, False)

    def step(self, action):
        return Result(f"saw {action}", 0.5, action == "stop")


def test_gymnasium_clients_become_environments():
    make = step_environment(Gym, action=int, observe="at {}".format, actions="A number.", name="Walk")
    pool = EnvironmentPool(make)
    (game,), (row,) = pool.begin([{"prompt": USER}], [11])
    assert row["prompt"][-1]["content"] == "Go. at 0"
    assert game._client.seed == 11
    box = pool.toolbox(game, ToolBox())
    (schema,) = box.schemas
    assert schema["function"]["name"] == "step"
    assert schema["function"]["parameters"]["properties"]["action"] == {"type": "string", "description": "A number."}
    calls = [{"function": {"name": "step", "arguments": {"action": a}}} for a in ("2", "left", "1", "1")]
    (results,) = ToolRunner().run([(box, calls)])
    assert [r.text for r in results][0::2] == ["at 2", "at 3"]
    assert "invalid literal for int" in results[1].text
    assert results[3].text == "The episode is over."
    assert game.done is True
    assert game.get_reward() == 3.0
    assert type(game).__name__ == "Walk"


def test_openenv_clients_become_environments():
    game = step_environment(OpenEnv)()
    assert game.reset() == "at 0"
    assert game.step("go") == "saw go"
    assert not game.done
    assert game.step("stop") == "saw stop"
    assert (game.done, game.get_reward()) == (True, 1.0)
    assert game.reset() == "at 0"
    assert (game.done, game.get_reward()) == (False, 0.0)


def test_everything_of_one_thread_stays_on_it_with_zero_workers():
    class Bound:
        def __init__(self):
            self.thread = threading.current_thread()

        def reset(self):
            assert threading.current_thread() is self.thread

    EnvironmentPool(Bound, ToolRunner(workers=0)).begin([{"prompt": USER}] * 3)


# The example game ------------------------------------------------------------------------------------------------


@pytest.fixture
def game():
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / "game_2048.py"
    spec = importlib.util.spec_from_file_location("game_2048", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("row", "after", "gained"),
    [
        ([2, 2, 0, 4], [4, 4, 0, 0], 4),
        ([2, 2, 2, 2], [4, 4, 0, 0], 8),
        ([4, 2, 2, 0], [4, 4, 0, 0], 4),
        ([0, 0, 0, 2], [2, 0, 0, 0], 0),
        ([2, 4, 8, 16], [2, 4, 8, 16], 0),
        ([8, 0, 8, 8], [16, 8, 0, 0], 16),
    ],
)
def test_rows_of_2048_slide_and_merge_each_tile_once(game, row, after, gained):
    assert game.slide(row) == (after, gained)


def test_directions_of_2048_are_turns_of_one_another(game):
    env = game.Game2048()
    env.reset(group_seed=0)
    env.board = [[2, 2, 0, 0], [0, 4, 0, 0], [0, 4, 0, 0], [2, 0, 0, 0]]
    assert env._after("left") == ([[4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0], [2, 0, 0, 0]], 4)
    assert env._after("right") == ([[0, 0, 0, 4], [0, 0, 0, 4], [0, 0, 0, 4], [0, 0, 0, 2]], 4)
    assert env._after("up") == ([[4, 2, 0, 0], [0, 8, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], 12)
    assert env._after("down") == ([[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [4, 8, 0, 0]], 12)


def test_a_game_of_2048_is_played_to_its_end_and_begins_alike_in_a_group(game):
    pool = EnvironmentPool(game.Game2048)
    games, rows = pool.begin([{"prompt": USER}] * 2, [5, 5])
    assert rows[0]["prompt"] == rows[1]["prompt"]
    draw = random.Random(0)
    env = games[0]
    for _ in range(5000):
        if env.done:
            break
        before = env.score
        env.move(draw.choice(["left", "right", "up", "down"]))
        assert env.score >= before
    assert env.done
    assert all(tile for row in env.board for tile in row)
    assert game.score(environments=[env]) == [env.score + env.moves]
    box = pool.toolbox(games[1], ToolBox())
    (results,) = ToolRunner().run([(box, [{"function": {"name": "move", "arguments": {"direction": "north"}}}])])
    assert "direction must be left, right, up or down" in results[0].text


ENDS = [np.bool_(True), torch.tensor(True), torch.tensor([1]), 1, 1.0, np.array([True])]


@pytest.mark.parametrize("done", [*ENDS, True], ids=lambda x: f"{type(x).__name__}-{x}")
def test_an_end_counts_by_its_truth_whatever_library_says_it(done):
    assert is_done(SimpleNamespace(done=done))
    assert not is_done(SimpleNamespace(done=done != 1))


@pytest.mark.parametrize("done", ["yes", "False", None, 2, [True], torch.tensor([True, False]), float("nan")], ids=repr)
def test_an_end_that_is_no_truth_is_an_error_with_its_value(done):
    with raises(RolloutError):
        is_done(SimpleNamespace(done=done))


def test_an_environment_says_nothing_of_its_end_or_has_a_tool_of_that_name():
    assert not is_done(None) and not is_done(SimpleNamespace())
    assert not is_done(SimpleNamespace(done=lambda: True))


BROKEN_STEPS = {
    "a reward of text": ("seen", "1", False, {}), "a reward of NaN": ("seen", float("nan"), False, {}),
    "an end of text": ("seen", 1.0, "False", {}), "two values": ("seen", 1.0), "an observation alone": "seen",
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_STEPS)
def test_a_step_whose_values_cannot_be_read_ends_the_run_instead_of_scoring_zero(case):
    class Client:
        def reset(self):
            return "begin"

        def step(self, action):
            return BROKEN_STEPS[case]

    pool = EnvironmentPool(step_environment(Client))
    (environment,), _ = pool.begin([{"prompt": [{"role": "user", "content": "go"}]}])
    box = pool.toolbox(environment, ToolBox())
    with raises(RolloutError):
        pool.runner.run([(box, [{"function": {"name": "step", "arguments": {"action": "a"}}}])])


def test_the_ends_and_rewards_of_a_step_are_read_from_every_library():
    class Client:
        def reset(self):
            return "begin", {}

        def step(self, action):
            return "seen", np.float32(0.5), np.bool_(False), torch.tensor(True), None

    game = step_environment(Client)()
    game.reset()
    game.step("x")
    assert (game.get_reward(), game.done) == (0.5, True)
