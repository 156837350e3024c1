"""Agents with a loop of their own: what they asked and were answered becomes rows, and one that fails harms no other."""

import time

import pytest

from posttrain import ScriptedEngine
from posttrain.algorithms.async_grpo.harness_runner import HarnessRunner
from posttrain.algorithms.async_grpo.producer import RolloutJob
from posttrain.algorithms.async_grpo.scoring import Scorer
from posttrain.rewards.base import RewardRunner
from posttrain.rollouts.engine_spec import EngineSpec
from posttrain.rollouts.harness import HarnessRolloutWorker, TraceEntry, harness_reward, has_tool_call
from posttrain.rollouts.partial import Writer
from posttrain.rollouts.samples import GroupTask
from posttrain.types import Sampling

SPEC = EngineSpec("native")


class Chat:
    """Asks three times; a row may ask it to break, to forget what it said first, or to hang."""

    closed = 0

    def __init__(self, row, seed):
        self.row, self.seed, self.open = row, seed, True

    def run(self, model):
        messages = [{"role": "user", "content": "one"}]
        for turn in range(3):
            if self.row.get("breaks") and turn == 1:
                raise KeyError("no such page")
            while self.row.get("hangs") and self.open:
                time.sleep(0.01)
            messages = [*messages, model(messages), {"role": "user", "content": f"more {turn}"}]
            if self.row.get("forgets") and turn == 1:
                messages = [{"role": "user", "content": "all over"}]

    def verify(self):
        return float(self.seed)

    def close(self):
        self.open = False
        Chat.closed += 1


def run(tokenizer, tasks, budget=200, engine=None, **options):
    setup_engine = engine or ScriptedEngine([[*tokenizer.encode("The sum"), 2]])
    from posttrain.algorithms.async_grpo.episodes import EpisodeSetup

    harness = HarnessRolloutWorker(options.pop("factory", Chat), **options)
    setup = EpisodeSetup(tokenizer, Sampling(budget, stop_token_ids=(2,)), context=400)
    job = RolloutJob(SPEC, setup, {}, harness=harness)
    return HarnessRunner(job, Writer(setup_engine)).episodes(tasks, version=3)


def task(group, **row):
    return GroupTask(group, row, 2, seed=group)


def test_a_conversation_that_only_grows_is_one_row_with_every_answer_trained(tiny_tokenizer):
    Chat.closed = 0
    (group,) = run(tiny_tokenizer, [task(4)])
    answer = [*tiny_tokenizer.encode("The sum"), 2]
    assert [len(parts) for parts in group.parts] == [1, 1]
    rollout = group.rollouts[0]
    assert sum(rollout.tool_mask) == 3 * len(answer)
    assert rollout.token_ids[: len(answer)] == answer
    assert [m["role"] for m in group.completions[0]] == ["assistant", "user"] * 2 + ["assistant"]
    assert group.rows[0]["harness_reward"] == 4.0
    assert group.metrics[0]["rollout/turns"] == 3.0
    assert Chat.closed == 2


def test_an_agent_that_begins_anew_makes_two_rows_with_one_advantage(tiny_tokenizer):
    (group,) = run(tiny_tokenizer, [task(1, forgets=True)], rollout_reward_fn=lambda outcome: float(len(outcome.trace)))
    scorer = Scorer(RewardRunner(harness_reward), tiny_tokenizer, scale_rewards="none", mask_truncated=False)
    conversations = scorer(group)
    assert [len(c.samples) for c in conversations] == [2, 2]
    assert {s.advantage for c in conversations for s in c.samples} == {0.0}
    assert conversations[0].samples[0].metrics["rewards/harness_reward"] == 3.0


def test_a_session_that_breaks_is_an_error_of_its_own(tiny_tokenizer):
    good, bad = run(tiny_tokenizer, [task(1), task(2, breaks=True)])
    assert (len(good.rollouts), good.errors) == (2, [])
    assert bad.rollouts == []
    assert "no such page" in bad.errors[0]


def test_a_session_that_hangs_is_closed_when_its_time_is_over(tiny_tokenizer):
    began = time.monotonic()
    (group,) = run(tiny_tokenizer, [task(1, hangs=True)], session_timeout_s=0.4)
    assert "did not end within 0.4 s" in group.errors[0]
    assert time.monotonic() - began < 20


def test_trap_s40_the_token_budget_is_one_of_the_whole_conversation(tiny_tokenizer):
    answer = [*tiny_tokenizer.encode("The sum"), 2]
    (group,) = run(tiny_tokenizer, [task(1)], budget=2 * len(answer))
    assert sum(group.rollouts[0].tool_mask) == 2 * len(answer)


class Adapter:
    """Counts turns; the session is a dict."""

    def messages(self, session):
        return [{"role": "user", "content": "begin"}]

    def tools(self, session):
        return None

    def step(self, session, message):
        session["turns"] = session.get("turns", 0) + 1
        return [{"role": "user", "content": "go on"}], session["turns"] == session["until"]


class Session(dict):
    __hash__ = object.__hash__

    def verify(self):
        return float(self["turns"])


def until(row, seed):
    return Session(until=row["until"])


@pytest.mark.parametrize(("wanted", "turns"), [(2, 2), (50, 4)])
def test_an_adapter_is_driven_turn_by_turn_up_to_its_limit(tiny_tokenizer, wanted, turns):
    (group,) = run(tiny_tokenizer, [task(1, until=wanted)], factory=until, harness_adapter=Adapter(), max_turns=4)
    assert [row["harness_reward"] for row in group.rows] == [turns, turns]


def entry(prompt, answer, **message):
    return TraceEntry(
        [], {"role": "assistant", **message}, prompt, answer, [-1.0] * len(answer), "stop", [(1, len(answer))]
    )


def test_turns_can_be_left_out_of_training_and_of_the_trace():
    from posttrain.rollouts.harness import HarnessRolloutOutcome

    call = [{"function": {"name": "look"}}]
    trace = [entry([1, 2], [3, 4], tool_calls=call), entry([8], []), entry([1, 2, 3, 4, 5], [6])]
    outcome = HarnessRolloutOutcome(0.0, [], trace)
    (row,) = HarnessRolloutWorker(until).rows(outcome).rows
    assert row.mask == [0, 0, 1, 1, 0, 1]
    (row,) = HarnessRolloutWorker(until, train_turn_fn=has_tool_call).rows(outcome).rows
    assert (row.mask, row.logp[-1]) == ([0, 0, 1, 1, 0, 0], 0.0)
    (row,) = HarnessRolloutWorker(until, agent_turn_fn=lambda e: len(e.token_ids) == 1).rows(outcome).rows
    assert row.mask == [0, 0, 0, 0, 0, 1]
