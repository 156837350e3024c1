"""Asynchronous runs without processes: a worker and a transfer that do as they are told."""

import itertools
import queue
from types import SimpleNamespace

from transformers import TrainerCallback

from posttrain.extensions.asynchronous.engine import ResumableGenerator
from posttrain.extensions.asynchronous.grpo import AsyncGRPOTrainer
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.extensions.asynchronous.grpo_method import AsyncGRPO
from posttrain.extensions.asynchronous.jobs import GroupGenerator, RolloutGroup
from posttrain.extensions.asynchronous.samples import GroupTask, RolloutSample
from posttrain.rollouts.base import WeightTransfer
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.episodes.driver import EpisodeDriver, EpisodeSetup
from tests.conftest import build_model
from tests.methods.helpers import GROUPS, count_a, prompts


def sample(group, version, *, prompt=(1, 5, 9), written=(7, 8), advantage=1.0, logp=-2.0, metrics=None):
    """One row with a prompt of three tokens."""
    ids, context = [*prompt, *written], len(prompt)
    mask = [0] * context + [1] * len(written)
    logps = [0.0] * context + [logp] * len(written)
    return RolloutSample("p", "c", ids, mask, logps, advantage, version, group, metrics or {"reward": 1.0})


def group_of(rows, rollouts, completions, *, group_id=0, version=0, **more):
    """A group that came to its end."""
    task = GroupTask(group_id, rows[0], len(rows), seed=0)
    return RolloutGroup(task, version, RolloutBatch(rows, rollouts, completions), **more)


def generator_of(tokenizer, sampling, engine, *, context=None, **setup):
    """What a worker completes prompts with."""
    driver = EpisodeDriver(EpisodeSetup(**setup))
    return GroupGenerator(driver, ResumableGenerator(engine), tokenizer, sampling, context)


class StubWorker:
    """Hands over what ``make(number, version)`` gives; None is an empty queue."""

    def __init__(self, make):
        self.make, self.version, self.calls = make, 0, []
        self.numbers = itertools.count()
        self.rollout_buffer = self

    def get(self, timeout=None):
        item = self.make(next(self.numbers), self.version)
        if item is None:
            raise queue.Empty
        return item

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def update_model_version(self, version):
        self.version = version
        self.calls.append(version)

    def check_health(self, stale_after_s=None):
        pass


class StubTransfer:
    """Counts, and reads every tensor."""

    def __init__(self, fails_at=None):
        self.calls, self.sent, self.fails_at = [], [], fails_at

    def init_weight_transfer(self):
        self.calls.append("init")

    def pause(self):
        self.calls.append("pause")

    def send_weights(self, tensors):
        self.sent.append({name: tensor.detach().clone() for name, tensor in tensors})
        self.calls.append("send")
        if len(self.sent) == self.fails_at:
            raise ConnectionError("the wire broke")

    def resume(self):
        self.calls.append("resume")

    def destroy(self):
        self.calls.append("destroy")


class Recovering(StubTransfer, WeightTransfer):
    """Says once that servers lack the weights."""

    def __init__(self, lacks):
        super().__init__()
        self.lacks, self.version = lacks, 0

    def missing_weights(self):
        self.lacks -= 1
        return self.lacks >= 0

    def send_again(self, tensors):
        dict(tensors)
        self.calls.append("again")


# Of a run that takes a second.
ASYNC = GROUPS | {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_steps": 3,
    "worker_threads": 1,
    "worker_segment_s": 2.0,
}


def trainer(folder, tokenizer, make=None, model=None, data=None, **options):
    """With a stub worker where ``make`` is given, else with real processes."""
    keys = (
        "rollout_worker",
        "weight_transfer",
        "tools",
        "environment_factory",
        "eval_dataset",
        "engine_factory",
        "peft_config",
    )
    extra = {k: options.pop(k) for k in keys if k in options}
    if make is not None:
        extra = {"rollout_worker": StubWorker(make), "weight_transfer": StubTransfer()} | extra
    return options.pop("cls", AsyncGRPOTrainer)(
        model or build_model(len(tokenizer)),
        options.pop("rewards", count_a),
        AsyncGRPOConfig(str(folder), **(ASYNC | options)),
        prompts() if data is None else data,
        tokenizer,
        **extra,
    )


class Evidence(TrainerCallback):
    """Ages and versions of everything that was trained."""

    def __init__(self, run):
        self.run, self.ages, self.samples = run, [], []

    def on_pre_optimizer_step(self, *_, **__):
        for conversation in self.run.source.held:
            self.ages.append(self.run.version - conversation.version)
            self.samples += conversation.samples
            assert all(version <= self.run.version for s in conversation.samples for version, _ in s.spans)


class At(TrainerCallback):
    """Does something once, after a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.what()


def steps(run):
    """Logged rows of training steps."""
    return [row for row in run.state.log_history if "loss" in row]


def assert_exact(run):
    """Every logged row, and the end, account for every rollout."""
    rows = [*steps(run), run.account()]
    for row in rows:
        assert row["async/produced"] == row["async/trained"] + row["async/dropped"] + row["async/in_flight"]
        dropped = [v for k, v in row.items() if k.startswith("async/dropped_")]
        assert sum(dropped) == row["async/dropped"]
    assert run.account()["async/in_flight"] == 0


def within_groups(scale="population"):
    """The method that says what completions of a group are worth."""
    return AsyncGRPO(SimpleNamespace(scale_rewards=scale))
