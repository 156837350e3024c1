"""A real vLLM started by `posttrain vllm-serve`, and one as TRL starts it, under a tiny model: pushes, scores, failures, training."""

import contextlib

import pytest
import requests
import torch

import posttrain
from posttrain.checks.server import check_parity, probe_sequences
from posttrain.errors import ServerUnreachable, WeightSyncError
from posttrain.extensions.server.checks import check_info, needs_of, probe_logprobs
from posttrain.extensions.server.client import VLLMClient
from posttrain.extensions.server.engine import ServerEngine
from posttrain.extensions.server.replies import API_KEY_VARIABLE
from posttrain.rollouts.adapters import AdapterWeights
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Rollout, Sampling
from tests.conftest import build_model, build_tokenizer
from tests.extensions.asynchronous.helpers import Evidence, assert_exact, steps
from tests.extensions.asynchronous.helpers import trainer as async_trainer
from tests.extensions.vllm import real_vllm as real
from tests.methods.helpers import grpo, grpo_args, prompts
from tests.methods.test_distillation import answers
from tests.methods.test_distillation_scores import FakeServer
from tests.methods.test_distillation_teachers import NAMES, named
from tests.rollouts.test_weights import adapted

pytestmark = real.without_model

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # Heads that vLLM's kernels take.
PROMPTS = [[5, 6, 7], [9, 10], [11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("model"), build_tokenizer()
    build_model(len(tokenizer), seed=9, **SHAPE).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with real.vllm_server(tmp_path_factory.mktemp("log"), folder, **{API_KEY_VARIABLE: "secret"}) as made:
        yield made


@pytest.fixture
def model(folder):
    return real.load(folder)


@pytest.fixture
def engine(url, model):
    made = ServerEngine(url, connection_timeout=30, api_key="secret")
    made.load_weights(Weights(model, checkpoint_names=made.capabilities.checkpoint_names), 1)
    yield made
    made.close()


def gap(engine, policy, version):
    sequences = probe_sequences(policy.config.vocab_size, 64)
    (theirs,) = engine.score(sequences, [1] * 4).values()
    ours = real.truth(policy, [Rollout(s[:1], s[1:], [], "length") for s in sequences])
    return check_parity("vllm", ours, theirs, dtype=engine.capabilities.dtype, version=version)


def test_every_path_but_health_asks_for_the_token(url):
    assert requests.get(url + "/health", timeout=10).status_code == 200
    for path in ("/v1/models", "/weight_info"):
        assert requests.get(url + path, timeout=10).status_code == 401


def test_log_probs_are_those_of_transformers_at_the_temperature_and_seeds_hold(engine, model):
    real.assert_logps_are_transformers(engine, model, PROMPTS)
    first, again, other = (
        [r.token_ids for r in engine.generate([Request(p, 3) for p in PROMPTS], Sampling(8, seed=s))] for s in (3, 3, 4)
    )
    assert first == again != other


def test_weights_of_another_step_are_noticed_and_a_push_through_shared_memory_cures_it(engine, folder):
    later = real.moved(real.load(folder), 0.5)
    assert gap(engine, later, 1).code == "PT-S004"
    engine.load_weights(Weights(later, checkpoint_names=True), 2)
    assert gap(engine, later, 2) is None
    rollouts = engine.generate([Request(PROMPTS[0], 4)], Sampling(16, seed=0))
    assert {r.version for r in rollouts} == {2}
    assert real.worst([r.logp for r in rollouts], real.truth(later, rollouts)) < 1e-3


def test_a_push_that_fails_leaves_weights_that_are_not_sampled_from_until_a_whole_one_came(engine, model):
    whole = list(Weights(model, checkpoint_names=True))
    broken = (
        [("model.layers.0.nonsense.weight", torch.ones(2)), *whole],
        [("model.norm.weight", torch.ones(7)), *whole[:-1]],
        whole[:-3],
    )
    for number, pairs in enumerate(broken):
        with pytest.raises(WeightSyncError):
            engine.load_weights(pairs, 10 * number + 4)
        with pytest.raises(WeightSyncError, match="incomplete"):
            next(iter(engine.fleet.servers.values())).client.complete([PROMPTS[0]])
        engine.load_weights(Weights(model, checkpoint_names=True), 10 * number + 5)
        assert gap(engine, model, 5) is None


def test_a_trainer_that_died_in_a_push_leaves_a_server_that_the_next_one_uses(engine, model):
    (server,) = engine.fleet.live
    server.client.begin_update()
    engine.mark_stale()
    engine.load_weights(Weights(model, checkpoint_names=True), 50)
    assert engine.generate([Request(PROMPTS[0])], Sampling(2, seed=0))[0].version == 50


def test_checks_have_nothing_to_say_of_it_and_find_another_model(engine, model, tmp_path):
    (server,) = engine.fleet.live

    def codes(trained, **settings):
        needs = needs_of(trained, grpo_args(tmp_path, **settings))
        return [f.code for f in (*check_info(server.url, server.info, needs), *probe_logprobs(server.client, needs))]

    assert codes(model, temperature=0.7, max_completion_length=64) == []
    assert codes(model, max_completion_length=256) == ["PT-S010"]
    assert codes(build_model(model.config.vocab_size), max_completion_length=64) == ["PT-S001"]


def test_teachers_score(engine, model):
    (server,) = engine.fleet.live
    (one,) = server.client.score([[5, 6, 7, 8]], [2], top=30)
    logps = model(torch.tensor([[5, 6, 7]])).logits[0, 1:].detach().log_softmax(-1)
    assert one.logps == pytest.approx([float(logps[0, 7]), float(logps[1, 8])], abs=1e-3)
    assert [ids[:3] for ids in one.top_ids] == logps.topk(3).indices.tolist()


def test_two_servers_are_two_teachers_of_given_answers_and_of_what_workers_wrote_over_a_third(url, folder, tmp_path):
    """The same losses as of teachers in this process; then asynchronous, each row by the server that it names."""
    tokenizer, common = build_tokenizer(), {"use_cpu": True, "report_to": "none", "save_strategy": "no", "optim": "sgd"}
    common |= {"learning_rate": 0.1, "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
    common["max_completion_length"] = 8
    with contextlib.ExitStack() as stack:
        models, urls = {}, {}
        for seed, name in enumerate(NAMES):
            kept, models[name] = tmp_path / name, build_model(len(tokenizer), seed=20 + seed, **SHAPE)
            models[name].save_pretrained(kept)
            tokenizer.save_pretrained(kept)
            urls[name] = stack.enter_context(real.vllm_server(tmp_path, kept))
        losses = {}
        for where, given in {
            "far": {},
            "here": {"teacher_server": {n: FakeServer(m) for n, m in models.items()}},
        }.items():
            args = posttrain.ServerDistillationConfig(
                str(tmp_path / where), teacher_model_server_url=urls, seed=3, **common
            )
            trainer = posttrain.ServerDistillationTrainer(
                real.load(folder), args, named(answers()), processing_class=tokenizer, **given
            )
            trainer.train()
            losses[where] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses["far"] == pytest.approx(losses["here"], rel=1e-3) and losses["far"][0] > 0
        args = posttrain.AsyncDistillationConfig(
            str(tmp_path / "async"), teacher_model_server_url=urls,
            vllm_server_base_url=[url], vllm_server_api_key="secret", max_staleness=0, **common,
        )  # fmt: skip
        trainer = posttrain.AsyncDistillationTrainer(real.load(folder), args, named(prompts(16)), tokenizer)
        trainer.train()
    rows = steps(trainer)
    assert len(rows) == 2 and all(row["sample/staleness_max"] == 0 and abs(row["kl"]) < 1e-3 for row in rows)
    assert all(row["distill/divergence"] > 0 for row in rows) and trainer.account()["async/trained"] == 8


def test_grpo_steps_over_it_are_on_policy(url, folder, tmp_path):
    far = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_api_key": "secret"}
    trainer = grpo(
        tmp_path, build_tokenizer(), model=real.load(folder), engine="native", max_steps=3, learning_rate=1e-2, **far
    )
    trainer.train()
    trainer.engine.close()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3


def test_adapters_are_pushed_alone_one_name_a_version_and_grpo_with_lora_and_top_p_is_on_policy(folder, tmp_path):
    """Log-probs with the adapter are those of the trainer's forward; earlier versions are let go; then a run over it."""
    import peft

    with real.vllm_server(tmp_path, folder, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2") as url:
        engine = ServerEngine(url, connection_timeout=30)
        assert engine.capabilities.adapter_rank == 8
        (server,) = engine.fleet.live
        for version in (1, 2, 3):
            model = adapted(real.load(folder), seed=version)
            engine.load_weights(AdapterWeights(model, most=8), version)
            rollouts = engine.generate([Request(p, 4) for p in PROMPTS], Sampling(16, seed=version))
            assert {r.version for r in rollouts} == {version}
            assert real.worst([r.logp for r in rollouts], real.truth(model, rollouts)) < 1e-4
            assert gap(engine, model, version) is None
        names = [card["id"] for card in server.client.call("GET", "/v1/models")["data"]]
        assert names[1:] == [engine.version_name(2), engine.version_name(3)]
        # Merged weights, which it takes too, go in the place of base and adapter.
        engine.load_weights(Weights(model, checkpoint_names=True), 4)
        rollouts = engine.generate([Request(p, 4) for p in PROMPTS], Sampling(16, seed=4))
        assert real.worst([r.logp for r in rollouts], real.truth(model, rollouts)) < 1e-4
        with pytest.raises(WeightSyncError, match="rank"):
            wide = adapted(real.load(folder), r=16)
            engine.load_weights(AdapterWeights(wide, most=16), 5)
        with pytest.raises(WeightSyncError, match="base model"):
            other = build_model(model.config.vocab_size, hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
            engine.load_weights(AdapterWeights(adapted(other), most=8), 6)
        engine.close()
        far = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "top_p": 0.9}
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = grpo(
            tmp_path / "run", build_tokenizer(), model=real.load(folder), engine="native", max_steps=3, learning_rate=5e-2,
            peft_config=config, **far,
        )  # fmt: skip
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        trainer.engine.close()
        assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
        assert any(p.abs().max() > 1e-3 for n, p in trainer.model.named_parameters() if "lora_B" in n)
        alone = sum(p.nbytes for n, p in trainer.model.named_parameters() if ".lora_" in n) / 1e6
        assert rows[-1]["weight_sync_mb"] == pytest.approx(alone, rel=1e-6)
        # Asynchronous: workers ask for the version by its name while the trainer pushes the next.
        later = async_trainer(
            tmp_path / "async", build_tokenizer(), model=real.load(folder), max_steps=5, learning_rate=5e-2, max_staleness=1,
            peft_config=config, vllm_server_base_url=[url], vllm_server_timeout=60, max_completion_length=8,
        )  # fmt: skip
        evidence = Evidence(later)
        later.add_callback(evidence)
        later.train()
        assert_exact(later)
        assert later.version == 5 and max(evidence.ages) <= 1
        print(
            {
                name: value
                for name, value in steps(later)[-1].items()
                if "logp" in name or "sync" in name or "async" in name
            }
        )
        assert len({version for one in evidence.samples for version, _ in one.spans}) > 2
        cards = {card["id"].rpartition("-")[2] for card in VLLMClient(url).call("GET", "/v1/models")["data"]}
        assert {"4", "5"} & cards


def test_a_server_without_our_extension_only_samples_and_its_lacks_have_findings(folder, tmp_path, model):
    with real.plain_server(tmp_path, folder) as plain:
        engine = ServerEngine(plain, connection_timeout=30)
        rollouts = engine.generate([Request(p, 2) for p in PROMPTS], Sampling(8, seed=1))
        assert real.worst([r.logp for r in rollouts], real.truth(model, rollouts)) < 1e-3
        (server,) = engine.fleet.live
        needs = needs_of(model, grpo_args(tmp_path, temperature=0.7, max_completion_length=64))
        found = [*check_info(plain, server.info, needs), *probe_logprobs(server.client, needs)]
        assert [f.code for f in found] == ["PT-S012", "PT-S011"]
        with pytest.raises(WeightSyncError, match="posttrain vllm-serve"):
            engine.load_weights(Weights(model, checkpoint_names=True), 1)
        engine.close()
    with pytest.raises(ServerUnreachable):
        VLLMClient(plain)
