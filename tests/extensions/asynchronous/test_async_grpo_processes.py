"""Asynchronous GRPO with real workers, real weights and real faults on a two-layer model."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections import deque
from dataclasses import replace

import peft
import psutil
import pytest
import torch
from transformers import TrainerCallback

from posttrain import GRPOTrainer, HFEngine, NativeEngine, ScriptedEngine
from posttrain.data.chat import tokenize_prompts, with_template
from posttrain.data.templates import FAMILIES, training_template
from posttrain.errors import WeightSyncError
from posttrain.extensions.asynchronous.engine import EngineRecipe, WorkerEngine
from posttrain.extensions.asynchronous.grpo import AsyncGRPOTrainer
from posttrain.extensions.asynchronous.grpo_method import AsyncGRPO
from posttrain.extensions.asynchronous.jobs import RolloutJob, RolloutWorkerLoop, score_group
from posttrain.extensions.asynchronous.samples import GroupTask
from posttrain.loop.scoring import reward_runner
from posttrain.methods.grpo.objective import GRPO
from posttrain.rewards.runner import RewardRunner
from posttrain.rollouts.episodes.driver import EpisodeSetup
from posttrain.rollouts.shared_memory import shared_root
from posttrain.types import Sampling
from tests.conftest import build_model
from tests.extensions.asynchronous.helpers import (
    At,
    Evidence,
    assert_exact,
    generator_of,
    steps,
    trainer,
    within_groups,
)
from tests.forks import PIPE, Forked
from tests.methods.helpers import count_a, grpo_args, prompts, scripted, weights
from tests.wordings import raises

pytestmark = pytest.mark.usefixtures("forked_workers")  # Those of `ENDLESS` are spawned.

# A run of its own that goes on until it is ended, and says so after each step.
ENDLESS = """
import sys
from transformers import TrainerCallback
from tests.extensions.asynchronous.helpers import trainer
from tests.conftest import build_tokenizer

class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, flush=True)

if __name__ == "__main__":
    run = trainer(sys.argv[1], build_tokenizer(), max_steps=10_000)
    run.add_callback(Told())
    run.train()
    print("ended after step", run.state.global_step, flush=True)
"""


class AllEqual:
    """Every completion is worth the same."""

    def advantages(self, rollouts, rewards, logps, ranks):
        found = super().advantages(rollouts, rewards, logps, ranks)
        return replace(found, values=torch.full_like(found.values, 0.25))


class AllEqualGRPO(AllEqual, GRPO):
    pass


class AllEqualAsyncGRPO(AllEqual, AsyncGRPO):
    pass


def test_advantages_of_a_subclass_are_those_of_trainer_and_workers(tmp_path, tiny_tokenizer):
    class Trainer(GRPOTrainer):
        METHOD = AllEqualGRPO

        def objective(self, outputs, batch):
            trained.append(batch.advantages)
            return super().objective(outputs, batch)

    class AsyncTrainer(AsyncGRPOTrainer):
        METHOD = AllEqualAsyncGRPO

    trained = []
    one = Trainer(
        build_model(len(tiny_tokenizer)), count_a, grpo_args(tmp_path / "one", max_steps=1),
        train_dataset=prompts(), processing_class=tiny_tokenizer, rollout_engine=scripted(),
    )  # fmt: skip
    one.train()
    assert torch.cat(trained).tolist() == [0.25] * sum(map(len, trained)) != []
    two = trainer(tmp_path / "two", tiny_tokenizer, cls=AsyncTrainer, max_steps=1)
    evidence = Evidence(two)
    two.add_callback(evidence)
    two.train()
    assert {sample.advantage for sample in evidence.samples} == {0.25}


def test_an_adapter_that_workers_do_not_get_stops_the_run(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(
        "posttrain.rollouts.shared_weights._plus_delta", lambda layer, base, name: getattr(base, name).detach()
    )
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run = trainer(tmp_path, tiny_tokenizer, max_steps=40, learning_rate=1e-3, peft_config=config)
    with raises(WeightSyncError, "PT-S004", "training changed the trainer's log-probs"):
        run.train()
    assert 1 <= run.state.global_step < 40  # On a busy machine the worker's answer comes some steps later.


@pytest.fixture
def endless(tmp_path):
    """A trainer in a process group of its own that has taken a step; all of the group is killed at the end."""
    process = Forked(["-c", ENDLESS, tmp_path], stdout=PIPE, start_new_session=True)
    while process.poll() is None and not process.stdout.readline().startswith("step 1"):
        pass
    assert shared(process)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in shared(process):
        shutil.rmtree(path)


def shared(process):
    """What a trainer has in shared memory."""
    return list(shared_root().glob(f"posttrain-{process.pid}-*"))


def until(condition, seconds=20):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint_and_frees_shared_memory(endless, tmp_path):
    """Slurm sends it to all processes of the job: workers leave it to the trainer."""
    os.killpg(endless.pid, signal.SIGTERM)
    said, _ = endless.communicate(timeout=60)
    assert endless.returncode == 0
    *_, last = said.splitlines()
    assert re.fullmatch(r"ended after step \d+", last)
    assert (tmp_path / f"checkpoint-{last.split()[-1]}" / "COMPLETE").is_file()
    assert not shared(endless)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_workers_of_a_trainer_that_was_killed_free_its_shared_memory_and_end(endless):
    workers = psutil.Process(endless.pid).children(recursive=True)
    os.kill(endless.pid, signal.SIGKILL)
    until(lambda: not shared(endless))  # Before anybody has waited for the trainer: it is a zombie.
    assert psutil.wait_procs(workers, timeout=20)[1] == []


class Slowly(TrainerCallback):
    """A trainer that takes its time, so that rollouts get old."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_pre_optimizer_step(self, *_, **__):
        time.sleep(self.seconds)


def test_trap_s20_on_policy_workers_sample_from_exactly_the_weights_that_are_trained(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, max_steps=3, max_staleness=0)
    before = weights(run)
    run.train()
    rows = steps(run)
    assert not torch.equal(before, weights(run))
    assert [row["sample/staleness_max"] for row in rows] == [0, 0, 0]
    for row in rows:  # A copy of other weights, or a log-prob of another token, would show here.
        assert row["ratio/max"] == pytest.approx(1.0, abs=2e-3)
        assert row["kl"] == pytest.approx(0.0, abs=1e-5)
    assert_exact(run)
    folder = run.transfer.folder
    assert not folder.exists()
    assert not run.worker.workers


def test_a_slow_trainer_and_a_killed_worker_leave_the_bound_and_the_account_intact(tiny_tokenizer, tmp_path):
    run = trainer(
        tmp_path, tiny_tokenizer, max_steps=6, max_staleness=1, max_inflight_tasks=24, max_completion_length=24
    )
    evidence = Evidence(run)
    kill = At(3, lambda: os.kill(run.worker.workers[0].process.pid, signal.SIGKILL))
    for callback in (evidence, kill, Slowly(0.3)):
        run.add_callback(callback)
    run.train()
    assert run.state.global_step == 6
    assert len(evidence.ages) == 24
    assert max(evidence.ages) == 1  # Old ones were trained, and none beyond the bound.
    assert steps(run)[-1]["async/stale_dropped"] > 0
    assert run.worker.restarts == 1
    assert_exact(run)


@pytest.mark.slow
def test_trap_s9_a_resumed_run_has_its_counts_and_goes_on_with_the_dataset(tiny_tokenizer, tmp_path):
    options = {"max_staleness": 1, "max_completion_length": 24, "num_rollout_workers": 2}
    before = trainer(tmp_path, tiny_tokenizer, max_steps=6, save_strategy="steps", save_steps=4, **options)
    before.train()
    run = trainer(tmp_path, tiny_tokenizer, max_steps=6, **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    rows = {row["step"]: row for row in steps(run)}
    at_save = next(row for row in steps(before) if row["step"] == 4)
    assert rows[4] == at_save
    assert rows[6]["async/trained"] == at_save["async/trained"] + 8
    assert rows[5]["async/version"] > at_save["async/version"]
    assert run.trained_groups == before.trained_groups
    assert run.source.tasks.group > at_save["async/trained"] // 2
    assert run.account()["async/dropped_unfinished"] > 0
    assert_exact(run)


# Episodes in a worker, without its process ---------------------------------------------------------------------------


class Counter:
    """Counts to a level; a bad one breaks."""

    def reset(self, level=1):
        if level == 13:
            raise ValueError("unlucky")
        if level == 17:
            time.sleep(30)
        self.level = level
        return f" Level {level}."

    def get_reward(self):
        return float(self.level)


def test_each_rollout_has_an_environment_of_its_own_and_one_that_breaks_harms_no_other(tiny_tokenizer):
    sampling, engine = Sampling(6, stop_token_ids=(2,)), ScriptedEngine([[5, 2], [6, 7, 8, 2]])
    setup = {"environment_factory": Counter, "tool_timeout": 0.5}
    runner = generator_of(tiny_tokenizer, sampling, engine, context=64, **setup)
    pool = runner.driver.pool
    rewards = reward_runner(RewardRunner, {"reward_funcs": None}, pool)

    def score(group):
        return score_group(group, rewards, tiny_tokenizer, method=within_groups(), mask_truncated=False)

    chat = [{"role": "user", "content": "Count."}]
    tasks = [GroupTask(i, {"prompt": chat, "level": level}, 2, seed=i) for i, level in enumerate((3, 13, 5))]
    groups = runner.groups(tasks, version=4)
    assert [len(g.batch.rollouts) for g in groups] == [2, 0, 2]
    assert "unlucky" in groups[1].errors[1]
    environments = [e for g in groups for e in g.batch.environments]
    assert len({id(e) for e in environments}) == 4
    scored = [score(groups[0]), score(groups[2])]
    assert [len(kind.free) for kind in pool.kinds.values()] == [0]  # Until they are scored, they are lent.
    runner.release(groups)
    assert [c.samples[0].metrics["rewards/Counter"] for group in scored for c in group] == [3.0, 3.0, 5.0, 5.0]
    assert "Level 5." in tiny_tokenizer.decode(scored[1][0].samples[0].input_ids)
    assert [len(kind.free) for kind in pool.kinds.values()] == [4]  # The broken ones are gone.
    began = time.monotonic()
    (slow,) = runner.groups([GroupTask(8, {"prompt": chat, "level": 17}, 2, seed=0)], version=4)
    assert "did not return within tool_timeout=0.5 s" in slow.errors[0]
    assert time.monotonic() - began < 20
    long = GroupTask(9, {"prompt": [{"role": "user", "content": "word " * 80}], "level": 1}, 2, seed=0)
    (group,) = runner.groups([long], version=4)
    assert "leaves no space for a completion in the model's context of 64 tokens" in group.errors[0]


class Heard:
    """A link without a process: keeps what the trainer would be sent."""

    def __init__(self, *tasks):
        self.tasks, self.cancelled, self.version, self.holders = deque(tasks), set(), 0, None
        self.stopping, self.results, self.signs = threading.Event(), [], 0

    def send(self, kind, result=None, **_):
        self.results += [result] if kind == "result" else []

    def progress(self):
        self.signs += 1

    @contextlib.contextmanager
    def served(self, tokenizer, engine, sampling, context=512, **setup):
        """The loop of a worker with this engine, and its end."""
        recipe, rewards = EngineRecipe("custom", factory=lambda: engine), {"reward_funcs": count_a}
        job = RolloutJob(
            recipe, tokenizer, sampling, context, EpisodeSetup(**setup), rewards, within_groups(), threads=1
        )
        loop = RolloutWorkerLoop(job, self, WorkerEngine(recipe))
        yield loop
        concurrent.futures.wait(loop._pending)
        self.stopping.set()


@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_engines_of_workers_know_the_text_that_a_stop_string_is_of(tiny_tokenizer, make):
    engine = make(build_model(len(tiny_tokenizer)), pad_token_id=2)
    link = Heard(GroupTask(0, {"prompt": [{"role": "user", "content": "What?"}]}, 2, seed=1))
    with link.served(tiny_tokenizer, engine, Sampling(6, stop_token_ids=(2,), stop_strings=("e", "t"))) as loop:
        loop._begin(loop._admit())
        loop._generate_chunk()
    assert [(len(r.trajectories), r.errors) for r in link.results] == [(2, [])]


@pytest.mark.parametrize("make", [NativeEngine, HFEngine])
def test_a_prompt_that_leaves_less_room_is_written_beside_others(tiny_tokenizer, make):
    short, long = ({"prompt": [{"role": "user", "content": "What is it? " * times}]} for times in (1, 9))
    least, most = (len(tokenize_prompts([row], tiny_tokenizer)[0]) for row in (short, long))
    assert least <= 120 - 60 < most < 120
    engine = make(build_model(len(tiny_tokenizer)), pad_token_id=2)
    link = Heard(GroupTask(0, short, 2, seed=1), GroupTask(1, long, 2, seed=2))
    with link.served(tiny_tokenizer, engine, Sampling(60, stop_token_ids=(2,)), context=120) as loop:
        loop._begin(loop._admit())
        loop._generate_chunk()
    assert sorted((r.group_id, len(r.trajectories), r.errors) for r in link.results) == [(0, 2, []), (1, 2, [])]
    written = {c.group_id: len(c.samples[0].input_ids) for r in link.results for c in r.trajectories}
    assert written[1] <= 120


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def test_a_worker_gives_a_sign_between_the_turns_of_an_episode(tiny_tokenizer):
    """Episodes may take longer than heartbeat_stale_after_s; a worker without a sign of work is killed as hung."""
    family = next(f for f in FAMILIES if f.name == "Qwen2.5")
    tokenizer = with_template(tiny_tokenizer, training_template(family))
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    lines = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 2] for text in (call, call, "It is 42.", "No.")]
    signs = []

    class Watched(ScriptedEngine):
        def generate(self, requests, sampling):
            signs.append(link.signs)
            return super().generate(requests, sampling)

    link = Heard(GroupTask(0, {"prompt": [{"role": "user", "content": "What?"}]}, 2, seed=1))
    sampling = Sampling(300, stop_token_ids=(2,))
    with link.served(tokenizer, Watched(lines), sampling, 2000, tools=[multiply]) as loop:
        loop._groups(loop._admit())
    assert [(len(r.trajectories), r.errors) for r in link.results] == [(2, [])]
    assert len(signs) == 2 and signs[0] < signs[1]


class Meeting:
    """Begins only when four begin at once."""

    barrier = threading.Barrier(4, timeout=60)

    def reset(self):
        self.barrier.wait()

    def get_reward(self):
        return 1.0


def test_trap_s47_resets_of_rollouts_run_side_by_side(tiny_tokenizer):
    setup = {"environment_factory": Meeting, "tool_workers": 4, "tool_timeout": 90}
    runner = generator_of(tiny_tokenizer, Sampling(4), ScriptedEngine([[5, 6, 2]]), **setup)
    (group,) = runner.groups([GroupTask(0, {"prompt": [{"role": "user", "content": "Go."}]}, 4, seed=1)], version=1)
    assert (group.errors, len(group.batch.rollouts)) == ([], 4)


@pytest.mark.slow
def test_a_run_over_several_epochs_asks_for_every_prompt(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, max_steps=-1, num_train_epochs=2, data=prompts(4), staleness_policy="pace")
    run.train()
    assert run.trained_groups == 8
    assert run.state.epoch == 2.0
    assert run.source.tasks.prompts.passes >= 1
