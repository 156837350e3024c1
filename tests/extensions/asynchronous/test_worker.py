"""Worker processes: how they start, what they inherit, how their end is noticed, and that nothing is lost with them."""

import logging
import queue
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from posttrain import ArgumentTypeError, RolloutError
from posttrain.data.samplers import PromptStream
from posttrain.errors import ModelError, WeightSyncError
from posttrain.extensions.asynchronous.engine import EngineRecipe, WorkerEngine
from posttrain.extensions.asynchronous.ledger import Ledger
from posttrain.extensions.asynchronous.processes import PoolSettings, WorkerPool
from posttrain.extensions.asynchronous.samples import RolloutBuffer, TaskSource
from posttrain.extensions.asynchronous.worker import check_picklable
from posttrain.rollouts.shared_weights import SharedWeights, Weights, copy_into, read_weights
from tests.conftest import build_model
from tests.extensions.asynchronous.worker_jobs import Broken, Echo, Environment, Slow, Unreadable


def pool(tmp_path, job, workers=1, inflight=8, prompts=50, buffer=None, **settings):
    rows = [{"prompt": str(i)} for i in range(prompts)]
    found = WorkerPool(
        job,
        TaskSource(PromptStream(rows, 0, shuffle=False), 4),
        PoolSettings(workers, 4, inflight, **settings),
        buffer=RolloutBuffer(1024) if buffer is None else buffer,
        ledger=Ledger(),
        folder=tmp_path,
    )
    found.update_model_version(1)
    return found


@pytest.fixture
def started_anew():
    """Starts pools, whose processes are interpreters of their own, and stops them, however the test ends."""
    started = []

    def start(given):
        started.append(given)
        given.start()
        return given

    yield start
    for given in started:
        given.stop()
        given.ledger.audit(writing=0, waiting=0)


@pytest.fixture
def running(forked_workers, started_anew):
    """The same with processes whose start is not tested."""
    return started_anew


class Looked(dict):
    """Counts how often all of it is looked at."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()


def test_dealing_many_groups_looks_at_those_under_way_once_and_gives_to_whom_has_least(tmp_path):
    given = pool(tmp_path, Echo(), inflight=400)
    sent = {name: [] for name in "abc"}
    given.workers = [
        SimpleNamespace(is_ready=True, send=lambda kind, task, name=name: sent[name].append(task.group_id))
        for name in sent
    ]
    given.under_way = Looked()
    given._dispatch()
    assert given.under_way.looks == 1 and len(given.under_way) == 100
    assert sent["a"] == list(range(0, 100, 3)) and sent["b"] == list(range(1, 100, 3))
    assert given.ledger.writing == given.writing == 400


def until(condition, seconds=60.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.02)


def take(given, count):
    """So many rollouts, as the trainer takes them."""
    found = []
    while len(found) < count:
        given.check_health()
        try:
            found.append(given.rollout_buffer.get(timeout=0.2))
        except queue.Empty:
            continue
        given.ledger.hold(1)
    given.ledger.train()
    return found


def unlisted(x):
    return x


def test_trap_s54_what_cannot_be_pickled_is_named():
    def inner():
        pass

    with pytest.raises(ArgumentTypeError) as caught:
        check_picklable(
            {"reward_funcs": [unlisted, lambda x: x], "tools": (inner,), "environment_factory": {"a": open}}
        )
    said = str(caught.value)
    assert "reward_funcs[1] (test_trap_s54_what_cannot_be_pickled_is_named.<locals>.<lambda>)" in said
    assert "tools[0] (test_trap_s54_what_cannot_be_pickled_is_named.<locals>.inner)" in said
    assert "reward_funcs[0]" not in said
    assert "environment_factory" not in said
    assert "top level of a module" in said
    assert isinstance(caught.value, TypeError)


def test_a_worker_sees_no_accelerator_and_nothing_of_the_trainer_s_process_group(tmp_path, started_anew, monkeypatch):
    theirs = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "NCCL_DEBUG_FILE",
    ]
    for name in theirs:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("MY_OWN", "kept")
    started_anew(pool(tmp_path, Environment(str(tmp_path / "environment"))))
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert not set(theirs) & seen.keys()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MY_OWN"]) == ("", "kept")
    import os

    assert (os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("1", "0,1")


@pytest.mark.parametrize(
    ("how", "code"), [("raise", "exit code 1: ValueError: no engine here"), ("exit", "exit code 7")]
)
def test_an_early_death_is_told_with_its_exit_code_and_last_words(tmp_path, started_anew, how, code):
    with pytest.raises(RolloutError, match=rf"(?s)rollout worker 0 .*{code}.*the last words"):
        started_anew(pool(tmp_path, Broken(how)))


def test_rollouts_come_back_and_are_accounted_for(tmp_path, running):
    given = running(pool(tmp_path, Echo(), workers=2))
    found = take(given, 40)
    assert {len([c for c in found if c.group_id == g]) for g in {c.group_id for c in found[:32]}} == {4}
    given.audit()
    assert given.ledger.trained == 40
    assert all(c.version == 1 for c in found)


def test_trap_s22_a_killed_worker_is_replaced_and_its_prompts_are_asked_again(tmp_path, running, caplog):
    with caplog.at_level(logging.WARNING):
        given = running(pool(tmp_path, Echo(dies_at=2), prompts=8))
        found = take(given, 4 * 12)
    given.audit()
    assert given.restarts == 1
    assert 0 < given.ledger.dropped["worker_lost"] <= 8
    first_epoch = {c.group_id for c in found}
    assert len(first_epoch) == 12
    said = caplog.records[0].getMessage()
    assert "exit code -9 (SIGKILL)" in said
    assert "about to be killed" in said
    prompts = [given.source.group, given.source.prompts.position]
    assert prompts[0] > prompts[1] + 8 * given.source.prompts.passes  # Groups were asked a second time.


def test_a_worker_that_cannot_read_what_it_is_told_ends_and_is_replaced(tmp_path, running):
    """A thread that died of it would leave a worker that sends signs of life and hears nothing."""
    given = running(pool(tmp_path, Echo(seconds=600)))
    until(lambda: given.workers[0].is_ready)
    worker = given.workers[0]
    worker.send("cancel", Unreadable())
    until(lambda: given.workers[0] is not worker)
    assert given.restarts == 1
    assert "ImportError: half made" in worker.tail()


def test_workers_that_fail_again_and_again_end_the_run(tmp_path, running):
    given = running(pool(tmp_path, Echo(seconds=600), max_restarts=1))
    for _ in range(2):
        until(lambda: given.workers[0].is_ready or given.error)
        worker = given.workers[0]
        worker.process.kill()
        until(lambda w=worker: given.workers[0] is not w or given.error)
    with pytest.raises(RolloutError, match=r"(?s)2 workers failed within 10 minutes.*max_worker_restarts=1.*SIGKILL"):
        given.check_health()


@pytest.mark.matrix
@pytest.mark.slow
def test_a_worker_that_gives_no_sign_of_work_is_replaced(tmp_path, running, caplog):
    given = running(pool(tmp_path, Echo(hangs_at=1)))
    take(given, 4)
    given.check_health(stale_after_s=10)  # From here on: to begin takes a busy machine longer.
    with caplog.at_level(logging.WARNING):
        take(given, 12)
    assert given.restarts >= 1
    assert "made no progress for" in caplog.text


def test_a_worker_that_does_not_load_new_weights_is_replaced(tmp_path, running, caplog):
    with caplog.at_level(logging.WARNING):
        given = running(pool(tmp_path, Echo(deaf=True), sync_timeout_s=0.3))
        until(lambda: given.restarts or given.error)
    assert "did not load weights version 1 within 0.3 s" in caplog.text


def test_rollouts_too_old_under_way_are_cancelled_and_their_prompts_asked_again(tmp_path, running):
    given = running(pool(tmp_path, Echo(seconds=600), inflight=4, max_staleness=1, max_staleness_hard=1))
    until(lambda: any(u.version for u in given.under_way.values()))
    given.update_model_version(2)
    given.audit()
    assert given.ledger.dropped["stale_in_flight"] == 0
    given.update_model_version(3)
    given.audit()
    assert given.ledger.dropped["stale_in_flight"] == 4
    until(lambda: given.under_way)
    (again,) = given.under_way.values()
    assert (again.task.row["prompt"], again.task.attempt, again.task.version) == ("0", 1, 3)


def test_a_group_with_one_survivor_is_dropped_and_its_prompt_asked_once_more(tmp_path, running):
    given = running(pool(tmp_path, Echo(fails_at=0), failure_budget=1.0))
    found = take(given, 12)
    assert (given.ledger.dropped["failed"], given.ledger.dropped["alone"]) == (3, 1)
    assert 0 not in {c.group_id for c in found}
    prompts = given.source.prompts
    assert given.source.group > prompts.position + prompts.passes * len(prompts.dataset)


def test_no_more_is_written_than_the_queue_has_room_for(tmp_path, running):
    given = running(pool(tmp_path, Echo(), inflight=64, buffer=RolloutBuffer(12)))
    until(lambda: len(given.rollout_buffer) == 12)
    time.sleep(0.3)
    assert (len(given.rollout_buffer), given.writing) == (12, 0)
    take(given, 4)
    until(lambda: len(given.rollout_buffer) == 12)


def test_tokens_of_what_is_still_written_are_reserved(tmp_path, running):
    given = running(pool(tmp_path, Echo(), inflight=64, rollout_tokens=10, buffer=RolloutBuffer(100, max_tokens=95)))
    until(lambda: len(given.rollout_buffer) >= 16)  # 48 tokens wait, 40 more are reserved for a group: 88 <= 95.
    time.sleep(0.3)
    assert given.rollout_buffer.tokens <= 95
    assert (len(given.rollout_buffer), given.writing) == (20, 0)  # 60 tokens and 40 more do not fit.


def test_pacing_writes_no_more_than_can_be_trained_in_time(tmp_path, running):
    given = running(pool(tmp_path, Echo(), inflight=64, window=8))
    until(lambda: len(given.rollout_buffer) == 8)
    time.sleep(0.3)
    assert (len(given.rollout_buffer), given.writing) == (8, 0)


def test_a_worker_that_does_not_listen_is_killed(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr("posttrain.extensions.asynchronous.processes.JOIN_S", 0.2)
    given = pool(tmp_path, Slow())
    given.start()
    process = given.workers[0].process
    given.stop()
    assert process.exitcode == -9


# Weights -------------------------------------------------------------------------------------------------------------


def test_shared_weights_arrive_as_they_were_and_old_versions_go(tmp_path, tiny_tokenizer):
    model, other = build_model(len(tiny_tokenizer), seed=0), build_model(len(tiny_tokenizer), seed=1)
    transfer = SharedWeights(tmp_path / "weights")
    transfer.init_weight_transfer()
    for _ in range(4):
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)
        transfer.send_weights(Weights(model))
    transfer.probe = [[5, 6, 7]]
    transfer.send_weights(Weights(model))
    weights, version, probe = read_weights(tmp_path / "weights", 3)
    copy_into(other, weights)
    assert (version, probe) == (5, [[5, 6, 7]])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 2
    transfer.destroy()
    assert list((tmp_path / "weights").iterdir()) == []


def test_damaged_weights_are_refused(tmp_path, tiny_tokenizer):
    transfer = SharedWeights(tmp_path)
    transfer.init_weight_transfer()
    transfer.send_weights(Weights(build_model(len(tiny_tokenizer))))
    path = tmp_path / "weights-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match="checksum"):
        read_weights(tmp_path, 1)


def test_a_version_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(WeightSyncError, match=r"version 2 did not appear.*latest version: None"):
        read_weights(tmp_path, 2, timeout=0.1)


def test_weights_of_another_architecture_are_refused_by_name(tmp_path, tiny_tokenizer):
    weights = dict(Weights(build_model(len(tiny_tokenizer))))
    weights["odd"] = weights.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"1 missing \(\['model.norm.weight'\]\), 1 unknown \(\['odd'\]\)"):
        copy_into(build_model(len(tiny_tokenizer)), weights)


def test_a_worker_s_engine_has_exactly_the_trainer_s_weights(tmp_path, tiny_tokenizer):
    model = build_model(len(tiny_tokenizer), seed=3)
    transfer = SharedWeights(tmp_path)
    transfer.init_weight_transfer()
    transfer.send_weights(Weights(model))
    handle = WorkerEngine(EngineRecipe("native", config=model.config, pad_token_id=2, weights=str(tmp_path)))
    assert handle.refresh(1)
    assert not handle.refresh(1)
    copy = handle.engine.model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    assert handle.engine.version == handle.version == 1


def test_pacing_counts_what_the_current_step_holds(tmp_path, running):
    given = running(pool(tmp_path, Echo(), inflight=64, window=8))
    until(lambda: len(given.rollout_buffer) == 8)
    for _ in range(4):
        given.rollout_buffer.get(timeout=5)
        given.ledger.hold(1)
    time.sleep(0.3)
    assert (len(given.rollout_buffer), given.writing) == (4, 0)  # Four are held: the step is not over.
    given.ledger.train()
    until(lambda: len(given.rollout_buffer) == 8)


TRAINER_IS_GONE = """
import multiprocessing, pathlib, sys, time
from posttrain.extensions.asynchronous.worker import Link

ours, theirs = multiprocessing.Pipe()
link = Link(theirs, 0)

def remove():
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], "removed").touch()

link.on_orphaned = remove
ours.close()
{noticed}
"""


@pytest.mark.parametrize("noticed", ["link.send('done')", "link.wait(20)"])
def test_a_worker_whose_trainer_is_gone_removes_what_that_left_whichever_thread_notices_it_first(tmp_path, noticed):
    code = TRAINER_IS_GONE.format(noticed=noticed)
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, cwd=tmp_path).returncode == 0
    assert (tmp_path / "removed").is_file()
