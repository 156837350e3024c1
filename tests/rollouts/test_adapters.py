"""A LoRA adapter pushed alone: what is sent, what the thin host makes of it, and what is refused or goes merged."""

import logging

import peft
import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import ConfigError, ModelError, WeightSyncError
from posttrain.extensions.serve.engine import ServedEngine
from posttrain.extensions.server.engine import ServerEngine
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.adapters import AdapterWeights, adapter_obstacle, read_adapter
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.extensions.serve.support import VOCAB, serving
from tests.methods.helpers import grpo
from tests.rollouts.test_weights import adapted, build_moe
from tests.wordings import raises

REQUESTS = [Request([5, 6, 7, 8], 4), Request([9, 10], 4)]


@pytest.fixture
def server():
    with serving() as made:
        yield made


@pytest.fixture
def engine(server):
    made = ServerEngine(server.url, connection_timeout=10)
    yield made
    made.close()


def gap(model, rollouts):
    """Largest distance of what an engine says of its tokens from the model's own forward."""
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    pairs = zip(sequence_logps(model, rows), rollouts, strict=True)
    return max(float((truth - torch.tensor(r.logp)).abs().max()) for truth, r in pairs)


@pytest.mark.parametrize("settings", [{}, {"r": 8, "use_rslora": True, "target_modules": "all-linear"}])
def test_what_is_sent_are_the_files_that_peft_saves(tmp_path, settings):
    model = adapted(build_model(VOCAB), **settings)
    sent = AdapterWeights(model, most=8)
    sent.write(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sent.nbytes == sum(tensor.nbytes for tensor in theirs.values())
    loaded = peft.PeftModel.from_pretrained(build_model(VOCAB), tmp_path / "ours").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    scale, pairs = read_adapter(tmp_path / "ours")
    merged, base = dict(Weights(model)), dict(sent.base(False))
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(base[name] + scale * (b @ a), merged[name])


def test_the_base_below_an_adapter_is_the_model_it_was_put_on():
    plain = {name: tensor.clone() for name, tensor in Weights(build_model(VOCAB))}
    base = dict(AdapterWeights(adapted(build_model(VOCAB)), most=4).base(False))
    assert base.keys() == plain.keys() and all(torch.equal(base[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
)
def test_an_adapter_that_is_more_than_two_matrices_a_linear_layer_goes_merged(settings, words):
    assert words in adapter_obstacle(adapted(build_model(VOCAB), **settings))


def test_a_model_without_an_adapter_and_one_whose_base_is_trained_go_whole():
    assert adapter_obstacle(build_model(VOCAB)) == "the model has no adapter"
    model = adapted(build_model(VOCAB))
    assert adapter_obstacle(model) is None
    assert "down_proj has an adapter, but the engine supports adapters only on q_proj, v_proj" in adapter_obstacle(
        model, ("q_proj", "v_proj")
    )
    model.get_base_model().model.norm.weight.requires_grad_(True)
    assert "model.norm.weight of the base model is trained too" in adapter_obstacle(model)


def test_an_adapter_of_a_mixture_of_experts_goes_alone_where_its_layers_keep_their_names_in_the_checkpoint():
    assert adapter_obstacle(adapted(build_moe(VOCAB), target_modules=["q_proj", "v_proj"])) is None
    experts = adapted(build_moe(VOCAB), target_parameters=["mlp.experts.down_proj"], target_modules=["q_proj"])
    assert "target_parameters" in adapter_obstacle(experts)


def test_a_host_with_a_mixture_of_experts_samples_from_an_adapter_that_goes_alone():
    with serving(lambda: ServedEngine(NativeEngine(build_moe(VOCAB), pad_token_id=0))) as server:
        engine = ServerEngine(server.url, connection_timeout=10)
        model = adapted(build_moe(VOCAB), target_modules=["q_proj", "v_proj"])
        engine.load_weights(AdapterWeights(model, most=engine.capabilities.adapter_rank), 1)
        assert gap(model, engine.generate(REQUESTS, Sampling(8, seed=0))) < 1e-5
        engine.close()


def test_a_host_samples_from_the_adapter_that_came_last_and_is_sent_nothing_else(engine, server):
    """Its log-probs are those of the trainer's forward with the adapter; several versions follow each other."""
    sizes = []
    for version, seed in enumerate((1, 2, 3, 4), start=1):
        model = adapted(build_model(VOCAB), seed=seed)
        adapter = AdapterWeights(model, most=engine.capabilities.adapter_rank)
        engine.load_weights(adapter, version)
        rollouts = engine.generate(REQUESTS, Sampling(8, seed=version))
        assert {r.version for r in rollouts} == {version}
        assert gap(model, rollouts) < 1e-5
        sizes.append(adapter.nbytes)
    assert len(set(sizes)) == 1 and sizes[0] < 0.6 * sum(t.nbytes for _, t in Weights(build_model(VOCAB)))
    assert server.get("/weight_info").json()["base_version"] == "default"
    assert len(list(engine.pusher.folder.iterdir())) == 2  # What came before the last two is gone.


def test_the_base_is_pushed_once_where_the_servers_own_is_another(engine, server):
    """As a comparison finds out (PT-S004), after which the trainer marks all copies as stale."""
    model = adapted(build_model(VOCAB, seed=7))
    engine.load_weights(AdapterWeights(model, most=4), 1)
    assert gap(model, engine.generate(REQUESTS, Sampling(8, seed=0))) > 0.01
    engine.mark_stale()
    for version in (2, 3):
        model = adapted(build_model(VOCAB, seed=7), seed=version)
        engine.load_weights(AdapterWeights(model, most=4), version)
        assert gap(model, engine.generate(REQUESTS, Sampling(8, seed=version))) < 1e-5
    assert server.get("/weight_info").json() == {
        "weight_version": engine.version_name(3), "base_version": f"{engine.run}-base1"
    }  # fmt: skip


def test_whole_weights_after_an_adapter_take_its_place(engine):
    engine.load_weights(AdapterWeights(adapted(build_model(VOCAB)), most=4), 1)
    engine.load_weights(Weights(build_model(VOCAB, seed=3)), 2)
    assert gap(build_model(VOCAB, seed=3), engine.generate(REQUESTS, Sampling(8, seed=0))) < 1e-5


def test_an_adapter_of_another_base_is_refused_and_what_was_there_stays(engine):
    engine.load_weights(AdapterWeights(adapted(build_model(VOCAB)), most=4), 1)
    wider = adapted(build_model(VOCAB, intermediate_size=96))
    with raises(WeightSyncError, "model.layers.0.mlp.down_proj.weight", "(32, 96)", "(32, 64)"):
        engine.load_weights(AdapterWeights(wider, most=4), 2)


def test_an_adapter_of_a_model_of_another_width_is_sent_to_no_server(engine, server):
    """vLLM 0.32 takes one without a word."""
    wider = adapted(build_model(VOCAB, hidden_size=64, num_attention_heads=2, num_key_value_heads=2))
    with raises(WeightSyncError, "hidden_size=32", "hidden_size=64"):
        engine.load_weights(AdapterWeights(wider, most=4), 1)


def test_files_that_are_no_adapter_are_refused(tmp_path):
    with raises(ModelError, str(tmp_path)):
        read_adapter(tmp_path)
    AdapterWeights(adapted(build_model(VOCAB)), most=4).write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with raises(ModelError, "lora_alpha"):
        read_adapter(tmp_path)


def test_a_host_reads_adapters_from_shared_memory_alone(server, tmp_path):
    AdapterWeights(adapted(build_model(VOCAB)), most=4).write(tmp_path / "a")
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path / "a")})
    assert reply.status_code == 400 and "Only such files" in reply.json()["error"]["message"]


def test_a_rank_above_that_of_the_server_is_refused():
    with raises(ConfigError, "rank 4", "up to 2", "--max-lora-rank 4"):
        AdapterWeights(adapted(build_model(VOCAB)), most=2)


# In training ------------------------------------------------------------------------------------------------------------


def trained(folder, tokenizer, url, **settings):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 5.0}
    run = base | {"peft_config": config, "max_steps": 3, "learning_rate": 0.1, "temperature": 1.0} | settings
    return grpo(folder, tokenizer, engine="native", **run)


@pytest.fixture
def big_server(tiny_tokenizer):
    from posttrain.extensions.serve.engine import ServedEngine
    from posttrain.rollouts.native.engine import NativeEngine

    with serving(
        lambda: ServedEngine(NativeEngine(build_model(len(tiny_tokenizer)), pad_token_id=2)), context=512
    ) as made:
        yield made


@pytest.mark.parametrize("choice", ["auto", "merged"])
def test_a_run_with_lora_pushes_the_adapter_alone_unless_told_otherwise(tmp_path, tiny_tokenizer, big_server, choice):
    trainer = trained(tmp_path, tiny_tokenizer, big_server.url, adapter_sync=choice)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    assert any(p.abs().max() > 1e-3 for n, p in trainer.model.named_parameters() if "lora_B" in n)
    alone = sum(p.nbytes for n, p in trainer.model.named_parameters() if ".lora_" in n) / 1e6
    whole = sum(t.nbytes for _, t in Weights(trainer.model)) / 1e6
    assert {round(row["weight_sync_mb"], 6) for row in rows} == {round(alone if choice == "auto" else whole, 6)}
    trainer.engine.close()


def test_what_cannot_go_alone_goes_merged_and_is_told_once(tmp_path, tiny_tokenizer, big_server, caplog):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=True)
    trainer = trained(tmp_path, tiny_tokenizer, big_server.url, peft_config=config)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    said = [r.message for r in caplog.records if "The adapter is merged" in r.message]
    assert len(said) == 1 and "use_dora=True" in said[0]
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    trainer.engine.close()


def test_a_server_without_lora_is_named_where_the_adapter_must_go_alone(
    tmp_path, tiny_tokenizer, big_server, monkeypatch
):
    monkeypatch.delitem(big_server.host.facts, "adapter_rank")
    trainer = trained(tmp_path, tiny_tokenizer, big_server.url, adapter_sync="adapter")
    with raises(ConfigError, "adapter_sync='adapter'", "--enable-lora"):
        trainer.train()
    trainer.engine.close()


CHANGES = {
    "another adapter": lambda model: model.set_adapter("b"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "scale": lambda model: [m.set_scale("default", 3.0) for m in lora_layers(model)],
    "data of the adapter": lambda model: [m.lora_B["default"].weight.data.mul_(-2.0) for m in lora_layers(model)],
    "base": lambda model: model.get_input_embeddings().weight.data.mul_(-1.0),
    "merged into the base": lambda model: [relora(m) for m in lora_layers(model)],
}


def lora_layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]


def relora(layer):
    layer.base_layer.weight.data += layer.get_delta_weight("default")
    layer.lora_A["default"].weight.data.normal_(0.0, 0.5)


@pytest.mark.parametrize("choice", ["auto", "merged"])
def test_a_model_that_changed_between_steps_is_what_the_server_samples_from(
    tmp_path, tiny_tokenizer, big_server, choice
):
    trainer = trained(tmp_path, tiny_tokenizer, big_server.url, adapter_sync=choice, max_steps=1)
    trainer.train()
    model, sync = trainer.model, trainer.weight_sync
    trainer.model.add_adapter("b", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for module in lora_layers(model):
        module.lora_B["b"].weight.data.normal_(0.0, 0.5)
    for name, change in CHANGES.items():
        change(model)
        (rollouts,) = sync.ask([(REQUESTS, Sampling(8, temperature=1.0, seed=0))])
        with torch.no_grad():
            assert gap(model.eval(), rollouts) < 1e-4, name
        model.base_model.enable_adapter_layers()
        model.set_adapter("default")
        [m.set_scale("default", 1.0) for m in lora_layers(model)]
    trainer.engine.close()
