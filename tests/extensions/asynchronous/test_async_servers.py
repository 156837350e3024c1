"""Asynchronous GRPO over rollout servers: weights pushed under running completions, servers that die, join and forget."""

import contextlib
import re
import threading
import time

import pytest
import requests

from posttrain.errors import ConfigError
from posttrain.extensions.asynchronous import rollouts as rollouts_module
from tests.conftest import build_model, build_tokenizer
from tests.extensions.asynchronous.helpers import At, Evidence, Recovering, assert_exact, sample, steps, trainer
from tests.extensions.serve.test_process import process, with_token
from tests.extensions.server.stub_server import Refused, Restarting, StubServer
from tests.methods.helpers import prompts

pytestmark = pytest.mark.usefixtures("forked_workers")

FIRST = 10  # Token of version 0.


class Scripted(StubServer):
    """Its completions tell the version of the weights they are written under; an update waits for what is being written."""

    def __init__(self, token_s=0.02, port=0):
        # Before it serves: a client may have waited for it.
        self.token_s, self.busy, self.most, self.count = token_s, 0, 0, threading.Condition()
        super().__init__(build_model(len(build_tokenizer())), port)

    def on_v1_completions(self, asked):
        with self.count:
            self.count.wait_for(lambda: self.dead or not (self.paused or self.updating))
            if self.dead:
                raise ConnectionResetError
            if not self.valid:
                raise Refused(409, "the weights are not whole")
            self.busy += 1
            self.most, version = max(self.most, self.busy), self.version
        time.sleep(self.token_s * asked["max_tokens"])
        with self.count:
            self.busy -= 1
            self.count.notify_all()
        number = int(version.rpartition("-")[2]) if version != "default" else 0
        choice = {
            "token_ids": [FIRST + number] * asked["max_tokens"],
            "prompt_token_ids": asked["prompt"],
            "logprobs": {"token_logprobs": [-1.0] * asked["max_tokens"]},
            "finish_reason": "length",
            "weight_version": version,
        }
        return {"choices": [choice | {"index": i} for i in range(asked["n"])]}

    def on_pause(self, asked):
        with self.count:
            self.paused = True
            self.count.wait_for(lambda: not self.busy)

    def on_resume(self, asked):
        with self.count:
            super().on_resume(asked)
            self.count.notify_all()


@pytest.fixture
def scripted():
    """Makes servers and closes them."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            return stack.enter_context(contextlib.closing(Scripted(**options)))

        yield make


def generations(stub):
    return sum(path == "v1/completions" for _, path in stub.calls)


def test_trap_s6_s45_every_trained_token_has_the_version_that_wrote_it_while_servers_die_join_and_forget(
    tiny_tokenizer, tmp_path, scripted
):
    stubs = [scripted(), scripted(), scripted()]
    listed = tmp_path / "servers.txt"
    listed.write_text("\n".join(stub.url for stub in stubs))

    def join():
        stubs.append(scripted())
        listed.write_text("\n".join(stub.url for stub in stubs))

    def forget():
        stubs[0].version = "default"  # As if it had been started anew.

    run = trainer(
        tmp_path,
        tiny_tokenizer,
        max_steps=10,
        max_staleness=2,
        max_inflight_tasks=24,
        vllm_server_base_url=[str(listed)],
        vllm_server_timeout=30,
        preflight="off",  # Whose probes need real log-probs.
    )
    evidence = Evidence(run)
    for callback in (evidence, At(3, stubs[1].die), At(4, join), At(6, forget)):
        run.add_callback(callback)
    run.train()
    assert run.state.global_step == 10
    assert_exact(run)
    assert max(evidence.ages) <= 2
    last = steps(run)[-1]
    assert last["async/dropped_failed"] == 0  # What one could not answer was asked of the others.
    assert last["async/worker_restarts"] == 0
    for one in evidence.samples:
        written = [token for token, kept in zip(one.input_ids, one.completion_mask, strict=True) if kept]
        assert written == [FIRST + version for version, count in one.spans for _ in range(count)]
    first, _, second, newcomer = stubs
    assert generations(newcomer) > 0
    assert first.most > 1  # Groups are asked for side by side.
    for stub in (first, second, newcomer):
        assert not stub.paused
        assert stub.version.endswith("-10")  # One push at the start, and one after each step but the last.


def test_the_only_server_restarts_in_a_push_and_is_waited_for(tiny_tokenizer, tmp_path):
    with contextlib.closing(Restarting(lambda port: Scripted(port=port), "update_weights")) as restarting:
        run = trainer(
            tmp_path, tiny_tokenizer, max_steps=4, vllm_server_base_url=[restarting.url], vllm_server_timeout=30,
            preflight="off",
        )  # fmt: skip
        run.add_callback(At(2, lambda: setattr(restarting, "armed", True)))
        run.train()
        assert len(restarting.stubs) == 2
        assert run.state.global_step == 4
        assert_exact(run)


@pytest.mark.parametrize(("every", "wanted"), [(1, "again"), (2, "send")])
def test_servers_that_lack_the_weights_get_them_while_the_trainer_waits(
    tiny_tokenizer, tmp_path, monkeypatch, every, wanted
):
    """The same version where the weights are those of the last push, and the next one where they have moved since."""
    monkeypatch.setattr(rollouts_module, "LOOK_S", 0.01)
    taken = []

    def make(number, version):
        taken.append(version)
        # In the middle of the second step nothing comes any more, and then what is as old as may be.
        return None if len(taken) == 7 else sample(number // 2, version - (len(taken) > 4))

    transfer = Recovering(lacks=1)
    run = trainer(
        tmp_path, tiny_tokenizer, make, weight_transfer=transfer, weight_sync_steps=every, max_steps=2, max_staleness=1
    )
    run.train()
    first = ["init", "pause", "send", "resume"]
    if every == 1:
        assert transfer.calls == [*first, "pause", "send", "resume", "again", "destroy"]
        assert (run.version, run.account()["async/dropped_stale_in_queue"]) == (2, 0)
    else:
        assert transfer.calls == [*first, "pause", "send", "resume", "destroy"]
        # The two that were held already were one version old: under the next one they are too old to be trained.
        assert (run.version, run.account()["async/dropped_stale_in_queue"]) == (2, 2)
    assert run.account()["async/trained"] == 8
    assert_exact(run)


def test_an_error_in_the_middle_of_a_step_leaves_an_account_that_adds_up_and_a_run_that_can_go_on(
    tiny_tokenizer, tmp_path
):
    ill = [True]

    def make(number, version):
        if number == 6 and ill:
            raise ill.pop() and OSError("the queue broke")
        return sample(number // 2, version)

    run = trainer(tmp_path, tiny_tokenizer, make, max_steps=2)
    with pytest.raises(OSError, match="the queue broke"):
        run.train()
    assert run.account()["async/dropped_unfinished"] == 2
    assert_exact(run)
    run.train()
    assert_exact(run)


def test_servers_of_another_model_are_told_before_anything_is_asked_of_them(tiny_tokenizer, tmp_path):
    with contextlib.closing(StubServer(build_model(len(tiny_tokenizer), num_hidden_layers=1))) as stub:
        run = trainer(
            tmp_path, tiny_tokenizer, vllm_server_base_url=[stub.url], vllm_server_timeout=5, preflight="error"
        )
        with pytest.raises(ConfigError, match=r"(?s)PT-S001.*num_hidden_layers=1"):
            run.train()
        assert "start_weight_update" not in [path for _, path in stub.calls]


@pytest.mark.slow
@pytest.mark.distributed
def test_trap_s5_three_real_servers_of_which_one_is_killed_and_one_joins(tiny_tokenizer, tmp_path):
    """Real completions under real weights: what servers said of their tokens is what the trained weights say of them."""
    served = tmp_path / "served"
    build_model(len(tiny_tokenizer), seed=9).save_pretrained(served)
    tiny_tokenizer.save_pretrained(served)
    listed = tmp_path / "servers.txt"
    with contextlib.ExitStack() as stack:

        def start(name):
            (tmp_path / name).mkdir()
            options = ("--model", str(served), "--dtype", "float32")
            return stack.enter_context(process(tmp_path / name, *options))

        servers = [start(f"s{i}") for i in range(3)]
        urls = [made[0] for made in servers]
        listed.write_text("\n".join(urls))

        def kill():
            servers[1][1].kill()
            servers[1][1].wait()

        def join():
            urls.append(start("s3")[0])
            listed.write_text("\n".join(urls))

        run = trainer(
            tmp_path / "run", tiny_tokenizer, max_steps=12, max_staleness=1, max_inflight_tasks=16, max_completion_length=40,
            vllm_server_base_url=[str(listed)], vllm_server_timeout=60, staleness_policy="pace", data=prompts(32),
            learning_rate=1e-3,
        )  # fmt: skip
        evidence, asked = Evidence(run), {}

        def count():
            for url in urls:
                with contextlib.suppress(requests.ConnectionError):
                    said = with_token(url).get(url + "/metrics", timeout=20).text
                    asked[url] = float(re.search(r"(?m)^posttrain_completions_total (\S+)$", said)[1])

        for callback in (evidence, At(3, kill), At(6, join), At(11, count)):
            run.add_callback(callback)
        run.train()
    assert run.state.global_step == 12
    assert_exact(run)
    rows = steps(run)
    assert max(evidence.ages) <= 1
    assert rows[-1]["async/dropped_failed"] == 0
    assert max(row["kl"] for row in rows) < 0.05  # Of another model's tokens it would be above 1.
    assert set(asked) == {urls[0], urls[2], urls[3]} and min(asked.values()) > 0
