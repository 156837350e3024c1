"""Training on rollouts of a server: the same run as in process, weights pushed when they moved, failures that lose nothing."""

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain import GRPOTrainer
from posttrain.errors import ConfigError, RolloutServerError, ServerUnreachable, WeightSyncError
from posttrain.extensions.server import client as connection
from posttrain.extensions.server import engine as server
from posttrain.extensions.server import pool as fleet
from posttrain.extensions.server.engine import ServerEngine
from posttrain.loop.rollout import settings_of
from posttrain.models import parallel
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.sampling import derived_seed
from posttrain.types import Request, Sampling
from tests.conftest import build_model, build_tokenizer
from tests.extensions.server.stub_server import Restarting, StubServer
from tests.methods.helpers import count_a, grpo, grpo_args, losses, prompts, weights
from tests.ranks import leave, part, run_ranks
from tests.wordings import raises

# Adam makes steps of one size out of gradients that are noise; plain descent keeps them as small as they are.
PLAIN = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}


class Seeded(NativeEngine):
    """In process, with a seed of its own for every request, as the server engine draws them."""

    @property
    def capabilities(self):
        return replace(super().capabilities, shares_weights=False, logprobs_match_training=False)

    def generate(self, requests, sampling):
        own = [
            replace(r, sampling=replace(sampling, seed=derived_seed(sampling.seed, i))) for i, r in enumerate(requests)
        ]
        return super().generate(own, sampling)


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "BACK_OFF", 0.01)
        patch.setattr(fleet, "REFRESH_SECONDS", 0.0)
        patch.setattr(server, "LOOK_SECONDS", 0.05)
        yield


@pytest.fixture
def stub(tiny_tokenizer):
    made = StubServer(build_model(len(tiny_tokenizer), seed=9))
    yield made
    made.close()


def served(folder, tokenizer, stub, **settings):
    base = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url, "vllm_server_timeout": 2.0}
    return grpo(folder, tokenizer, engine="native", **(base | settings))


def updates(stub):
    return sum(path == "start_weight_update" for _, path in stub.calls)


def test_a_run_over_a_server_equals_the_run_in_process(tmp_path, tiny_tokenizer, stub):
    model = build_model(len(tiny_tokenizer))
    here = grpo(tmp_path / "a", tiny_tokenizer, model=model, engine=Seeded(model, pad_token_id=0), **PLAIN)
    here.train()
    there = served(tmp_path / "b", tiny_tokenizer, stub, **PLAIN)
    there.train()
    assert updates(stub) == 3  # One before each generation; the stub began with other weights.
    assert losses(there) == pytest.approx(losses(here), abs=1e-5)
    torch.testing.assert_close(weights(there), weights(here), atol=1e-5, rtol=1e-4)
    logged = [row for row in there.state.log_history if "loss" in row]
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in logged)
    assert all(row["perf/weight_sync_s"] > 0 for row in logged)
    there.engine.close()


def test_a_rollout_function_finds_the_weights_of_now_on_the_servers(tmp_path, tiny_tokenizer, stub):
    model, equal = build_model(len(tiny_tokenizer)), []
    before = model.model.norm.weight.detach().clone()

    def mine(prompts, trainer):
        here, there = trainer.model.model.norm.weight, stub.model.model.norm.weight
        equal.append(torch.equal(here, there))
        ids = [tiny_tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        rollouts = trainer.engine.generate([Request(i) for i in ids], settings_of(trainer.run, "train").sampling)
        logprobs = [r.logp for r in rollouts]
        return {"prompt_ids": ids, "completion_ids": [r.token_ids for r in rollouts], "logprobs": logprobs}

    far = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url}
    trainer = GRPOTrainer(
        model, count_a, grpo_args(tmp_path, **PLAIN, **far), train_dataset=prompts(), processing_class=tiny_tokenizer,
        rollout_func=mine,
    )  # fmt: skip
    trainer.train()
    assert equal == [True] * 3
    assert not torch.equal(before, stub.model.model.norm.weight)
    assert all(
        row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in trainer.state.log_history if "loss" in row
    )
    trainer.engine.close()


def test_an_evaluation_reuses_the_weights_and_whoever_writes_into_them_is_noticed(tmp_path, tiny_tokenizer, stub):
    trainer = served(tmp_path, tiny_tokenizer, stub, eval_dataset=prompts(4), per_device_eval_batch_size=4)
    trainer.evaluate()
    trainer.evaluate()
    assert updates(stub) == 1
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)
    trainer.evaluate()
    assert updates(stub) == 2
    assert torch.equal(stub.model.model.norm.weight, trainer.model.model.norm.weight)
    trainer._load_best_model = lambda: None
    trainer.engine.close()


def test_a_server_that_restarts_with_old_weights_in_the_middle_of_a_run_gets_them_again(tmp_path, tiny_tokenizer):
    first = StubServer(build_model(len(tiny_tokenizer), seed=9))
    port, second = first.http.server_port, []
    trainer = served(tmp_path, tiny_tokenizer, first, max_steps=4, vllm_server_timeout=20.0)
    original = trainer.sample

    def sample(examples, settings):
        if trainer.state.global_step == 2 and not second:
            first.close()
            second.append(StubServer(build_model(len(tiny_tokenizer), seed=9), port=port))
        return original(examples, settings)

    trainer.sample = sample
    trainer.train()
    assert trainer.state.global_step == 4
    assert updates(second[0]) >= 2
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    trainer.engine.close()
    second[0].close()


WAITED_FOR = {"max_steps": 3, "vllm_server_timeout": 20.0, "weight_parity_every": 1}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The weights that a run with a server that stays ends at."""
    tokenizer = build_tokenizer()
    stub = StubServer(build_model(len(tokenizer), seed=9))
    whole = served(tmp_path_factory.mktemp("whole"), tokenizer, stub, **WAITED_FOR)
    whole.train()
    whole.engine.close()
    stub.close()
    return weights(whole)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "path",
    ["", "weight_info", "start_weight_update", "update_weights", "finish_weight_update", "score", "v1/completions"],
)
def test_a_server_that_restarts_is_waited_for_whatever_it_was_asked(tmp_path, tiny_tokenizer, uninterrupted, path):
    restarting = Restarting(lambda port: StubServer(build_model(len(tiny_tokenizer), seed=9), port), path)
    trainer = served(tmp_path / "cut", tiny_tokenizer, restarting, **WAITED_FOR)
    original = trainer.sample

    def sample(examples, settings):
        if trainer.state.global_step == 1 and len(restarting.stubs) == 1:
            restarting.armed = True
            if not path:  # Between two steps: nothing was asked of it.
                restarting.restart()
                time.sleep(0.2)
        return original(examples, settings)

    trainer.sample = sample
    trainer.train()
    assert len(restarting.stubs) == 2 and updates(restarting.stubs[1]) > 0
    torch.testing.assert_close(weights(trainer), uninterrupted, atol=1e-6, rtol=1e-5)
    for one in (trainer.engine, restarting):
        one.close()


def test_servers_that_are_gone_end_the_run_with_a_checkpoint_that_goes_on_as_if_nothing_had_happened(
    tmp_path, tiny_tokenizer
):
    stubs = [StubServer(build_model(len(tiny_tokenizer), seed=9)) for _ in range(3)]
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    whole = served(tmp_path / "whole", tiny_tokenizer, stubs[0], **settings)
    whole.train()
    trainer = served(tmp_path / "cut", tiny_tokenizer, stubs[1], **settings, vllm_server_timeout=0.2)
    original, calls = trainer.sample, []

    def sample(examples, settings):
        calls.append(settings)
        if len(calls) == 6:  # The second generation of the third step.
            stubs[1].die()
        return original(examples, settings)

    trainer.sample = sample
    with pytest.raises(ServerUnreachable) as caught:
        trainer.train()
    assert "checkpoint of step 2" in caught.value.__notes__[0]
    again = served(tmp_path / "cut", tiny_tokenizer, stubs[2], **settings)
    again.train(resume_from_checkpoint=True)
    torch.testing.assert_close(weights(again), weights(whole), atol=1e-6, rtol=1e-5)
    for one in (whole, trainer, again):
        one.engine.close()
    for one in stubs:
        one.close()


def test_weights_that_are_confirmed_and_not_loaded_stop_the_run_before_its_first_step(tmp_path, tiny_tokenizer, stub):
    stub.lies["deaf"] = True
    trainer = served(tmp_path, tiny_tokenizer, stub)
    with raises(WeightSyncError, "PT-S004", "252", "0.02"):
        trainer.train()
    assert updates(stub) == 2  # One more full push was tried.
    assert trainer.state.global_step == 0
    trainer.engine.close()


def test_an_adapter_that_is_lost_in_the_push_stops_the_run_at_the_first_update(
    tmp_path, tiny_tokenizer, stub, monkeypatch
):
    import peft

    monkeypatch.setattr(
        "posttrain.rollouts.shared_weights._plus_delta", lambda layer, base, name: getattr(base, name).detach()
    )
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = served(tmp_path, tiny_tokenizer, stub, peft_config=config, max_steps=5, learning_rate=1e-3)
    with raises(WeightSyncError, "PT-S004", "training changed the trainer's log-probs"):
        trainer.train()
    assert trainer.state.global_step == 1
    trainer.engine.close()


def test_parity_is_looked_at_again_every_so_many_pushes(tmp_path, tiny_tokenizer, stub):
    trainer = served(tmp_path, tiny_tokenizer, stub, max_steps=5, weight_parity_every=2)
    trainer.train()
    assert sum(path == "score" for _, path in stub.calls) == 3 * 4  # Four sequences each time.
    trainer.engine.close()


def test_a_resumed_run_whose_server_has_its_weights_already_is_told_that_a_push_proves_nothing(
    tmp_path, tiny_tokenizer, stub, caplog
):
    first = served(tmp_path, tiny_tokenizer, stub, max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    first.weight_sync.push_if_due()  # Now it has the weights of the checkpoint.
    first.engine.close()
    again = served(tmp_path, tiny_tokenizer, stub, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert "PT-S005" in caplog.text
    again.engine.close()


def test_an_adapter_goes_merged_and_the_rollouts_are_those_of_the_adapted_policy(tmp_path, tiny_tokenizer, stub):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = served(tmp_path, tiny_tokenizer, stub, peft_config=config, max_steps=3, learning_rate=0.1)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    assert any(p.abs().max() > 1e-3 for n, p in trainer.model.named_parameters() if "lora_B" in n)
    trainer.engine.close()


def test_rollout_engine_server_is_another_name_and_odd_settings_are_refused(tmp_path, tiny_tokenizer):
    from tests.methods.helpers import grpo_args

    args = grpo_args(tmp_path, rollout_engine="server")
    assert (args.use_vllm, args.vllm_mode, args.rollout_engine) == (True, "server", "auto")
    args = grpo_args(tmp_path, rollout_engine="vllm")
    assert (args.use_vllm, args.vllm_mode) == (True, "colocate")
    for name, value in {
        "vllm_weight_bucket_mb": 0, "vllm_sleep_level": "3", "vllm_sync_retries": -1,
        "weight_parity_every": -1, "vllm_request_timeout": -2.0,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            grpo_args(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match="allow_biased_is"):
        grpo_args(tmp_path, rollout_engine="server", repetition_penalty=1.1)
    assert grpo_args(tmp_path, rollout_engine="server", repetition_penalty=1.1, allow_biased_is=True).allow_biased_is
    assert grpo_args(tmp_path, rollout_engine="server", top_p=0.9).top_p == 0.9
    trainer_args = {
        "vllm_server_base_url": "http://127.0.0.1:9",
        "vllm_server_timeout": 0.1,
        "rollout_engine": "server",
    }
    with raises(ServerUnreachable, "//127.0.0.1", "9", "0.1"):
        grpo(tmp_path, tiny_tokenizer, engine="native", **trainer_args)


def test_every_setting_of_servers_reaches_them_from_synchronous_and_asynchronous_configs(tmp_path, stub):
    import inspect

    from posttrain import AsyncGRPOConfig
    from posttrain.extensions.server.engine import server_options

    given = {
        "vllm_request_timeout": 31.0,
        "vllm_sync_timeout": 32.0,
        "vllm_weight_bucket_mb": 33,
        "vllm_group_port": 34567,
    }
    given |= {"vllm_server_timeout": 35.0, "vllm_server_api_key": "key"}
    for args in (grpo_args(tmp_path, **given), AsyncGRPOConfig(str(tmp_path), **given)):
        options = server_options(args)
        apart = {"urls", "connection_timeout", "pushes", "reader"}  # Of the place, not of the config.
        assert set(options) == set(inspect.signature(ServerEngine).parameters) - apart
        assert list(options.values()) == [31.0, 32.0, 33, 34567, 35.0, "key"]
        engine = ServerEngine(stub.url, **options)
        client = next(iter(engine.fleet.servers.values())).client
        assert (client.request_timeout, client.sync_timeout, client.group_port) == (31.0, 32.0, 34567)
        engine.close()


# Two processes


def work(folder, rank):
    """One of two ranks: the second has nothing to ask for in the middle round; then the main process's server fails."""
    from tests.conftest import build_tokenizer

    tokenizer = build_tokenizer()
    settings = {"use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 1, "data": prompts(8)}
    url = Path(folder, "url").read_text()
    base = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 5.0}
    trainer = grpo(f"{folder}/run", tokenizer, engine="native", **base, **settings)
    found = {"holds_engine": isinstance(trainer.engine, ServerEngine)}
    rounds = [
        [([Request([5 + rank, 6], 2), Request([9], 1)], Sampling(3, seed=rank))],
        [] if rank else [([Request([7], 3)], Sampling(2, seed=1))],
        [([Request([20 + rank], 1)], Sampling(2, seed=2)), ([Request([30 + rank], 2)], Sampling(4, seed=3))],
    ]
    found["rounds"] = [
        [[(r.prompt_ids, len(r.token_ids), r.version) for r in batch] for batch in trainer.weight_sync.ask(batches)]
        for batches in rounds
    ]
    trainer.train()
    found["loss"] = losses(trainer)
    Path(folder, f"ready{rank}").touch()
    try:
        trainer.weight_sync.ask([([Request([5] * 600)], Sampling(3))])
    except Exception as error:
        found["error"] = [type(error).__name__, str(error), isinstance(error, RolloutServerError)]
    everyone = parallel.gather_objects(found, trainer.accelerator)
    if rank == 0:
        leave(everyone)
    part()


@pytest.mark.distributed
def test_trap_s16_s19_two_ranks_share_one_server_its_errors_too_and_one_may_have_nothing_to_ask(
    tmp_path, tiny_tokenizer, stub
):
    (tmp_path / "url").write_text(stub.url)
    found = run_ranks("tests.extensions.server.test_far_rollouts", tmp_path, processes=2, folder=tmp_path, timeout=200)
    assert [f["holds_engine"] for f in found] == [True, False]
    for rank in range(2):
        first, second, third = found[rank]["rounds"]
        assert first == [[[[5 + rank, 6], 3, 1], [[5 + rank, 6], 3, 1], [[9], 3, 1]]]
        assert second == ([] if rank else [[[[7], 2, 1]] * 3])
        assert third == [[[[20 + rank], 2, 1]], [[[30 + rank], 4, 1]] * 2]
    assert found[0]["loss"] == found[1]["loss"]
    assert found[0]["error"] == found[1]["error"]
    assert "do not fit the model's context" in found[0]["error"][1]


def test_errors_of_servers_survive_the_way_between_processes():
    import pickle

    error = WeightSyncError("lost", phase="end", version=3, url="http://x", log_tail="...")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.phase, back.version, back.url) == (
        WeightSyncError,
        str(error),
        "end",
        3,
        "http://x",
    )


def test_generation_waits_for_a_server_that_comes_back(tiny_tokenizer):
    model = build_model(37)
    first = StubServer(model)
    engine = ServerEngine(first.url, connection_timeout=5, patience=20.0)
    truth = [r.token_ids for r in engine.generate([Request([5], 2)], Sampling(4, seed=1))]
    port, second = first.http.server_port, []
    first.close()
    timer = threading.Timer(0.5, lambda: second.append(StubServer(model, port=port)))
    timer.start()
    assert [r.token_ids for r in engine.generate([Request([5], 2)], Sampling(4, seed=1))] == truth
    engine.close()
    second[0].close()


if __name__ == "__main__":
    work(sys.argv[1], int(os.environ["RANK"]))
