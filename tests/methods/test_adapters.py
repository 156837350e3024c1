"""Adapters: what they save whole is used, what cannot train is refused."""

import copy

import peft
import pytest
import torch
import transformers

from posttrain import ConfigError, ModelError, use_adapter
from posttrain.models.heads import causal_lm, train_new_tokens
from posttrain.models.load import wrap_with_peft
from posttrain.models.probe import probe_head
from posttrain.models.reference import Reference
from posttrain.models.value_head import attach_value
from posttrain.rollouts.adapters import adapter_obstacle
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.shared_weights import merged_weights
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.methods.helpers import chats, grpo, sft
from tests.methods.test_dpo import dpo
from tests.models.architectures import built
from tests.wordings import raises


def test_a_head_that_peft_trains_whole_is_the_one_that_is_used(tiny_tokenizer, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = build_model(len(tiny_tokenizer), tie_word_embeddings=False)
    trainer = sft(tmp_path, tiny_tokenizer, model=model, peft_config=config, max_steps=2, eval_dataset=chats(4))
    before = losses_of(trainer)
    trainer.train()
    head = trainer.model.base_model.model.lm_head
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    assert trainer.evaluate()["eval_loss"] < before
    with trainer.model.disable_adapter():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)


def losses_of(trainer):
    return trainer.evaluate()["eval_loss"]


def test_an_adapter_loaded_for_inference_is_refused(tiny_tokenizer, tmp_path):
    base = build_model(len(tiny_tokenizer))
    peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(build_model(len(tiny_tokenizer)), tmp_path / "adapter")
    with pytest.raises(ModelError, match="is_trainable=True"):
        sft(tmp_path, tiny_tokenizer, model=frozen)
    going_on = peft.PeftModel.from_pretrained(build_model(len(tiny_tokenizer)), tmp_path / "adapter", is_trainable=True)
    sft(tmp_path, tiny_tokenizer, model=going_on, max_steps=1).train()
    with raises(ModelError):
        sft(tmp_path, tiny_tokenizer, model=str(tmp_path / "adapter"))
    base.config.save_pretrained(tmp_path / "adapter")
    with raises(ModelError, "AutoPeftModelForCausalLM"):
        sft(tmp_path, tiny_tokenizer, model=str(tmp_path / "adapter"))


TARGETS = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.AdaLoraConfig(total_step=10, **TARGETS), "update_and_allocate"),
        (peft.CPTConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "CPT"),
        (peft.LilyConfig(**TARGETS), "LILY"),
        (peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1), "ADAPTION_PROMPT"),
        (peft.LoraConfig(alora_invocation_tokens=[5], **TARGETS), "alora_invocation_tokens"),
        (peft.LoraConfig(arrow_config=peft.ArrowConfig(), **TARGETS), "a router that combines"),
        (peft.PveraConfig(generator_seed=0, **TARGETS), "Fix: remove generator_seed"),
        (peft.PveraConfig(sample_at_inference=True, **TARGETS), "Fix: remove sample_at_inference"),
        (peft.LoraConfig(kasa_config=peft.KasaConfig(), **TARGETS), "_get_kasa_loss"),
        (peft.LoraConfig(monteclora_config=peft.MontecloraConfig(), **TARGETS), "_get_monteclora_loss"),
        (peft.VBLoRAConfig(save_only_topk_weights=True, num_vectors=8, vector_length=4, **TARGETS), "save_only_topk"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_peft_methods_that_need_more_than_gradients_are_refused(tiny_tokenizer, tmp_path, config, words):
    with raises(ConfigError, words):
        sft(tmp_path, tiny_tokenizer, peft_config=config)


def test_dora_of_a_row_of_zeros_is_named_in_the_error(tiny_tokenizer, tmp_path):
    model, other = build_model(len(tiny_tokenizer)), build_model(len(tiny_tokenizer))
    with torch.no_grad():
        for one in (model, other):
            one.model.layers[1].self_attn.q_proj.weight[3] = 0
    config = peft.LoraConfig(use_dora=True, **TARGETS | {"target_modules": ["q_proj", "v_proj"]})
    with raises(ModelError, "DoRA", "model.layers.1.self_attn.q_proj.weight (rows [3])", "['q_proj']"):
        sft(tmp_path, tiny_tokenizer, model=model, peft_config=config)
    sft(tmp_path, tiny_tokenizer, model=other, peft_config=peft.LoraConfig(**TARGETS))


def test_an_adapter_whose_outputs_are_nan_is_named_in_the_error(tiny_tokenizer, tmp_path):
    # No other test has this rank, because a model of the same config is probed once.
    model = peft.get_peft_model(build_model(len(tiny_tokenizer)), peft.LoraConfig(r=5, **TARGETS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(1e30)
    with raises(ModelError, "with the adapter LORA, and finite without it"):
        sft(tmp_path, tiny_tokenizer, model=model)


def test_parts_of_an_adapter_that_were_frozen_stay_frozen_when_resumed(tiny_tokenizer, tmp_path):
    def run(folder):
        torch.manual_seed(3)
        model = peft.get_peft_model(build_model(len(tiny_tokenizer)), peft.LoraConfig(r=4, **TARGETS))
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
        options = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "learning_rate": 1e-2}
        return sft(tmp_path / folder, tiny_tokenizer, model=model, **options)

    whole, resumed = run("whole"), run("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_peft_would_save_in_another_order_are_refused(tiny_tokenizer, tmp_path, field):
    config = peft.LoraConfig(r=4, **TARGETS, **{field: {"q_proj": 2, "layers.1.*": 6}})
    with raises(ConfigError, field, "layers.1.self_attn.q_proj: 'q_proj' with 2 and 'layers.1.*' with 6"):
        sft(tmp_path, tiny_tokenizer, peft_config=config)
    sft(
        tmp_path, tiny_tokenizer, peft_config=peft.LoraConfig(r=4, **TARGETS, **{field: {"layers.1.*": 6, "q_proj": 2}})
    )


def test_an_adapter_without_values_is_refused(tiny_tokenizer, tmp_path):
    config = peft.LoraConfig(r=4, **TARGETS)
    model = peft.get_peft_model(build_model(len(tiny_tokenizer)), config, low_cpu_mem_usage=True)
    with raises(ModelError, "no values", "low_cpu_mem_usage"):
        sft(tmp_path, tiny_tokenizer, model=model)


@pytest.mark.parametrize("inner", [False, True])
def test_a_second_adapter_around_the_first_is_refused(tiny_tokenizer, tmp_path, inner):
    first = peft.get_peft_model(build_model(len(tiny_tokenizer)), peft.LoraConfig(r=4, **TARGETS))
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM")
    with raises(ConfigError, "q_proj has an adapter that was added before"):
        sft(tmp_path, tiny_tokenizer, model=peft.get_peft_model(first.base_model.model if inner else first, config))


def test_velora_computes_its_projections_from_the_first_batch_and_keeps_them_when_resumed(tiny_tokenizer, tmp_path):
    """The dry step and a checkpoint's first batch are not the first batch of the run."""

    def projections(trainer):
        return {n: b.clone() for n, b in trainer.model.named_buffers() if "velora_embed" in n}

    def run(folder, **settings):
        config = peft.LoraConfig(r=2, velora_config=peft.VeloraConfig(num_groups=2), **TARGETS)
        options = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "learning_rate": 1e-2} | settings
        torch.manual_seed(3)
        return sft(tmp_path / folder, tiny_tokenizer, peft_config=config, **options)

    whole = run("whole")
    assert whole.dry_step() and not any(b.any() for b in projections(whole).values())
    whole.train()
    resumed = run("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert projections(whole) and all(b.any() for b in projections(whole).values())
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_a_start_that_peft_cannot_compute_again_is_refused(tiny_tokenizer, tmp_path):
    """Loaded on the base model, the saved adapter would compute something else than the trained model."""
    with raises(ConfigError, "init_lora_weights='pissa_niter_2'"):
        sft(tmp_path, tiny_tokenizer, peft_config=peft.LoraConfig(init_lora_weights="pissa_niter_2", **TARGETS))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_parameters": ["mlp.experts.down_proj"], "init_lora_weights": "pissa"}, "Qwen2MoeExperts"),
        ({"target_parameters": ["mlp.experts.down_proj"], "use_dora": True}, "use_dora=True"),
        ({"target_parameters": ["input_layernorm.weight"]}, "1 dimensional"),
        ({"init_lora_weights": "corda"}, "preprocess_corda"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq_iter"),
    ],
)
def test_an_adapter_that_peft_cannot_make_is_refused_with_its_reason(settings, words):
    config = peft.LoraConfig(r=4, **TARGETS | settings)
    with raises(ConfigError, "Qwen2MoeForCausalLM", words, "Fix: change peft_config"):
        wrap_with_peft(built("qwen2 moe"), config, activation_checkpointing=False)


def test_an_adapter_whose_start_needs_a_gpu_is_refused_with_its_reason(monkeypatch):
    def loftq(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("peft.tuners.lora.layer.loftq_init", loftq)
    config = peft.LoraConfig(init_lora_weights="loftq", loftq_config=peft.LoftQConfig(), **TARGETS)
    with raises(ConfigError, "CUDA", "Fix: change peft_config"):
        wrap_with_peft(build_model(32), config, activation_checkpointing=False)


@pytest.mark.parametrize("kind", [peft.LoHaConfig, peft.IA3Config, peft.LoraConfig])
def test_new_tokens_are_trained_by_adapters_that_can_train_them_and_refused_by_others(kind):
    """The embeddings of new tokens start at the mean of all embeddings, so an adapter without them would learn nothing."""
    config = kind(**TARGETS)
    if kind is not peft.LoraConfig:
        with raises(ConfigError, config.peft_type.value, "modules_to_save=['embed_tokens', 'lm_head']"):
            train_new_tokens(config, build_model(32), [30, 31])
    config.modules_to_save = ["embed_tokens", "lm_head"]
    if kind is peft.IA3Config:
        config.feedforward_modules = []
    model = peft.get_peft_model(
        build_model(32, tie_word_embeddings=False), train_new_tokens(config, build_model(32), [30, 31])
    )
    assert any(parameter.requires_grad and "embed_tokens" in name for name, parameter in model.named_parameters())


def test_olora_of_transposed_layers_is_refused():
    """Its matrices have the shapes of the transposed weight, and the first forward pass would fail."""
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights="olora", task_type="CAUSAL_LM")
    with raises(ConfigError, "Conv1D", "init_lora_weights='pissa'"):
        wrap_with_peft(gpt2(), config, activation_checkpointing=False)


def test_adapters_of_layers_that_recurrent_layers_read_without_calling_are_refused(caplog):
    """Logits stay those of the base model, whatever such an adapter holds."""

    def wrapped(name, **settings):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        return wrap_with_peft(built(name), config, activation_checkpointing=False)

    with raises(ConfigError, "conv.conv", "exclude_modules=['conv']"):
        wrapped("lfm2", r=32, target_modules=r".*conv\.conv")
    with raises(ConfigError, "mamba.dt_proj", "exclude_modules=['dt_proj']"):
        wrapped("jamba", r=2, target_modules="all-linear", init_lora_weights="pissa")
    assert wrapped("jamba", r=2, target_modules="all-linear").active_adapter == "default"
    assert "mamba.dt_proj has no effect" in caplog.text
    wrapped("jamba", r=2, target_modules="all-linear", exclude_modules=["dt_proj"], init_lora_weights="pissa")


def test_a_reference_of_modules_to_save_inside_each_other_is_refused():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["conv"])  # A mixer and a layer inside it.
    model = peft.get_peft_model(built("lfm2"), config)
    with raises(
        ModelError,
        "new weight base_model.model.model.layers.0.conv.modules_to_save.default.conv.original_module.weight",
        "ref_model",
    ):
        Reference(model)


@pytest.mark.parametrize("active", ["two", ["default", "two"]])
def test_adapters_that_are_active_in_the_layers_alone_are_refused(active):
    """After a reference pass peft would have ``active_adapter`` active again, which is another policy."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(build_model(37), config)
    model.add_adapter("two", config)
    model.base_model.set_adapter(active)
    with raises(ConfigError, "'two'", "model.set_adapter(name)"):
        wrap_with_peft(model, None, activation_checkpointing=False)
    model.set_adapter("two")
    assert wrap_with_peft(model, None, activation_checkpointing=False) is model


def test_scales_that_the_config_does_not_have_are_refused():
    """The frozen copy of the reference, a saved adapter and a server would have the scale of the config."""
    for settings in ({}, {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)
        model = peft.get_peft_model(build_model(37), config)
        layer = model.get_base_model().model.layers[1].self_attn.q_proj
        wrap_with_peft(model, None, activation_checkpointing=False)
        layer.set_scale("default", 2.0)
        with raises(ConfigError, "layers.1.self_attn.q_proj has scale", "lora_alpha"):
            wrap_with_peft(model, None, activation_checkpointing=False)
        layer.set_scale("default", 1)
        wrap_with_peft(model, None, activation_checkpointing=False)


def test_a_reference_that_contains_the_trained_adapter_is_refused(tiny_tokenizer, tmp_path):
    """peft changes the base model in place, so it is no longer the model without the adapter."""
    base = build_model(len(tiny_tokenizer))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **TARGETS))
    with raises(ConfigError, "lora_A.default.weight", "remove ref_model"):
        dpo(tmp_path, tiny_tokenizer, model=model, ref_model=base)
    assert model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.requires_grad
    dpo(tmp_path, tiny_tokenizer, model=model, ref_model=copy.deepcopy(base)).train()


def test_an_adapter_with_the_name_of_the_frozen_copy_is_refused():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(build_model(37), config, adapter_name="ref")
    with raises(ConfigError, "'ref'", "delete_adapter"):
        Reference(model)


@pytest.mark.parametrize("branch", ["fresh", "trained", "named"])
def test_a_reference_that_shares_trained_base_weights_is_refused(branch):
    model = peft.get_peft_model(build_model(37), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    given = {"fresh": {"fresh_adapter": True}, "trained": {}, "named": {"adapter": "default"}}[branch]
    with raises(ModelError, "model.norm.weight", "ref_model"):
        Reference(model, **given)
    other = copy.deepcopy(model)
    assert Reference(model, given=other, **given).copy is other  # A copy does not move with the policy.


def gpt2(seed=0):
    """A tied model whose embeddings have another name than those peft looks for."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=32, initializer_range=0.2
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("field", ["target_modules", "modules_to_save"])
def test_an_adapter_of_tied_embeddings_is_loaded_with_its_output_layer(tmp_path, field):
    """peft takes lm_head out of the config; loaded, the output layer would be that of the base model (off by 3)."""
    names = {"target_modules": ["c_attn"]}
    names[field] = [*names.get(field, []), "wte", "lm_head"]
    config = peft.LoraConfig(r=4, ensure_weight_tying=True, task_type="CAUSAL_LM", **names)
    model = wrap_with_peft(gpt2(), config, activation_checkpointing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.arange(8)[None]
    trained, start = model(ids).logits, gpt2()(ids).logits
    assert (trained - start).abs().max() > 0.5
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path, is_trainable=True)
    torch.testing.assert_close(loaded(ids).logits, trained)
    assert type(loaded.get_base_model().lm_head) is not torch.nn.Linear
    wrap_with_peft(loaded, None, activation_checkpointing=False)
    if field == "target_modules":
        with raises(ModelError, "ensure_weight_tying=True", "ref_model"):
            Reference(loaded)
        return
    with Reference(loaded).active(loaded) as reference:
        torch.testing.assert_close(reference(ids).logits, trained)


def test_an_adapter_that_lost_its_tied_output_layer_is_refused():
    """So peft loads one that it saved without the name of the output layer."""
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "wte"], ensure_weight_tying=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(gpt2(), config)
    with raises(ConfigError, "ensure_weight_tying=True", "'lm_head'", "adapter_config.json"):
        wrap_with_peft(model, None, activation_checkpointing=False)


def test_an_adapter_that_is_merged_or_disabled_is_refused_and_so_is_a_mixed_model(tiny_tokenizer, tmp_path):
    model = peft.get_peft_model(build_model(len(tiny_tokenizer)), peft.LoraConfig(r=4, **TARGETS))
    model.merge_adapter()
    with raises(ModelError, "unmerge_adapter"):
        sft(tmp_path, tiny_tokenizer, model=model)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    with raises(ModelError, "enable_adapter_layers"):
        sft(tmp_path, tiny_tokenizer, model=model)
    model.base_model.enable_adapter_layers()
    sft(tmp_path, tiny_tokenizer, model=model)
    mixed = peft.PeftMixedModel(build_model(len(tiny_tokenizer)), peft.LoraConfig(r=4, **TARGETS))
    with raises(ConfigError, "PeftMixedModel"):
        sft(tmp_path, tiny_tokenizer, model=mixed)


STARTS = {
    "lora": {}, "pissa": {"init_lora_weights": "pissa"}, "olora": {"init_lora_weights": "olora"},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
}  # fmt: skip
TOKENS = peft.TrainableTokensConfig(token_indices=[5, 6], task_type="CAUSAL_LM")  # peft adapts a tied output layer too.
CONFIGS = {name: peft.LoraConfig(r=4, **TARGETS, **start) for name, start in STARTS.items()} | {"tokens": TOKENS}


@pytest.mark.parametrize("start", CONFIGS)
@pytest.mark.parametrize("fresh", [True, False])
def test_the_reference_is_where_training_began_whatever_the_start_of_the_adapter(start, fresh):
    """PiSSA and OLoRA move parts of the base weights into the adapter as it is made."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model = peft.get_peft_model(build_model(37), copy.deepcopy(CONFIGS[start])).eval()
    if not fresh:
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.1 * torch.randn_like(parameter)
    with torch.no_grad():
        begun = model(ids).logits
        reference = Reference(model, fresh_adapter=fresh)
        torch.testing.assert_close(model(ids).logits, begun, atol=1e-5, rtol=0)  # To make it moved nothing.
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert (model(ids).logits - begun).abs().max() > 0.1
        with reference.active(model) as other:
            torch.testing.assert_close(other(ids).logits, begun, atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_the_reference_of_an_adapter_whose_rank_is_above_the_width_of_a_layer(start):
    """peft makes fewer ranks there, and a copy into as many as the config names would repeat them (off by 3)."""
    config = peft.LoraConfig(r=4, target_modules=["shared_expert_gate", "q_proj"], init_lora_weights=start)
    model = peft.get_peft_model(built("qwen2 moe"), config).eval()  # The gate of the shared expert has one output.
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.1 * torch.randn_like(parameter)
        begun = model(ids).logits
        with Reference(model).active(model) as reference:
            torch.testing.assert_close(reference(ids).logits, begun, atol=1e-5, rtol=0)


def test_grpo_with_a_trained_adapter_and_trained_biases_refuses_to_share_its_base(tiny_tokenizer, tmp_path):
    base = build_model(len(tiny_tokenizer), attention_bias=True)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, bias="all", **TARGETS))
    with raises(ModelError, "bias='all'"):
        grpo(tmp_path, tiny_tokenizer, model=model, beta=0.1)
    grpo(tmp_path, tiny_tokenizer, model=model)  # Without a reference, nothing is shared.


@pytest.mark.parametrize("add", [peft.get_peft_model, lambda model, config: model.add_adapter(config) or model])
def test_trained_weights_that_a_saved_adapter_does_not_contain_are_refused(add):
    """The logits of a loaded checkpoint would differ by 0.5. Biases and value heads are saved, so they can be trained."""
    config = peft.LoraConfig(r=4, bias="lora_only", **TARGETS)
    model = add(build_model(37, attention_bias=True), config)
    attach_value(model)
    assert wrap_with_peft(model, None, activation_checkpointing=False) is model
    layer = causal_lm(model).model.layers[1]
    layer.input_layernorm.requires_grad_(True)
    with raises(ConfigError, "model.layers.1.input_layernorm.weight", "modules_to_save=['input_layernorm']"):
        wrap_with_peft(model, None, activation_checkpointing=False)
    layer.input_layernorm.requires_grad_(False)
    layer.self_attn.q_proj.base_layer.requires_grad_(True)  # peft saves the bias alone.
    with raises(ConfigError, "1 trained parameters", "q_proj.base_layer.weight"):
        wrap_with_peft(model, None, activation_checkpointing=False)


def test_an_adapter_that_peft_cannot_save_because_of_the_tokens_of_another_is_refused():
    model = peft.get_peft_model(build_model(37), peft.LoraConfig(r=4, **TARGETS))
    model.add_adapter("two", peft.LoraConfig(r=4, trainable_token_indices=[5], **TARGETS))
    with raises(ConfigError, "'default'", "delete_adapter"):
        wrap_with_peft(model, None, activation_checkpointing=False)
    model.set_adapter("two")
    model.delete_adapter("default")
    assert wrap_with_peft(model, None, activation_checkpointing=False) is model


@pytest.mark.parametrize("name", [None, "two"])
def test_what_was_frozen_in_an_adapter_stays_frozen_once_another_was_in_use(name):
    """A reference pass comes before the optimizer is made where log-probs are precomputed: all that learns then is trained."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(build_model(37), config)
    model.add_adapter("two", config)
    for part, parameter in model.named_parameters():
        if "lora_A" in part:
            parameter.requires_grad_(False)
    before = {part: parameter.requires_grad for part, parameter in model.named_parameters()}
    assert set(before.values()) == {True, False}
    with pytest.raises(KeyError), use_adapter(model, name):
        raise KeyError(name)
    assert {part: parameter.requires_grad for part, parameter in model.named_parameters()} == before
    assert model.active_adapter == "default"


def test_a_frozen_twin_of_an_adapter_leaves_what_was_frozen_by_hand_and_modules_of_its_name():
    model = build_model(37)
    model.model.ref_layers = model.model.layers
    del model.model.layers
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    for part, parameter in model.named_parameters():
        if "lora_A" in part:
            parameter.requires_grad_(False)
    before = {part: parameter.requires_grad for part, parameter in model.named_parameters()}
    assert Reference(model).adapter == "ref"
    after = dict(model.named_parameters())
    assert {part: after[part].requires_grad for part in before} == before
    twins = [part for part in after if part not in before]
    assert twins and not any(after[part].requires_grad for part in twins)
    assert all(torch.equal(after[part], after[part.replace(".ref.", ".default.")]) for part in twins)


def test_prefix_tuning_with_recomputed_activations_is_refused(tiny_tokenizer, tmp_path):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ConfigError, match="gradient_checkpointing=False"):
        sft(tmp_path, tiny_tokenizer, peft_config=config)


VIRTUAL = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def with_virtual_tokens(kind, vocabulary=97):
    """A model whose virtual tokens matter: they are not near zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build_model(vocabulary), VIRTUAL[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    return model


@torch.no_grad()
def said_alone(model, rollout):
    """Log-probs of a completion by the model as it was given, its peft wrapper included, on this one sequence."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -ids.shape[1] :].float()
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[len(rollout.prompt_ids) - 1 :, 0]


@pytest.mark.parametrize("kind", VIRTUAL)
def test_the_engine_that_auto_takes_samples_through_virtual_tokens(kind, caplog):
    model = with_virtual_tokens(kind)
    engine = create_engine("auto", model, pad_token_id=0)
    assert engine.name == "hf"
    assert "virtual tokens" in caplog.text
    requests = [Request([5, 6, 7, 8], 2), Request([9], 1), Request([11, 12, 13, 14], 1), Request([3, 4, 5, 6, 7], 1)]
    for rollout in engine.generate(requests, Sampling(8, seed=0)):
        torch.testing.assert_close(torch.tensor(rollout.logp), said_alone(model, rollout), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", VIRTUAL)
@pytest.mark.parametrize("name", ["native", "paged"])
def test_engines_below_the_adapter_refuse_virtual_tokens(kind, name):
    with raises(ConfigError, "rollout_engine='hf'"):
        create_engine(name, with_virtual_tokens(kind), pad_token_id=0)


@pytest.mark.parametrize("kind", VIRTUAL)
def test_weights_for_another_process_are_not_the_base_model_s_without_its_virtual_tokens(kind):
    with raises(ModelError):
        dict(merged_weights(with_virtual_tokens(kind)))


@pytest.mark.parametrize("kind", VIRTUAL)
def test_the_head_of_a_model_with_virtual_tokens_is_not_suspected(kind, caplog):
    model = with_virtual_tokens(kind)
    probe_head(model)
    assert "own_logits" not in vars(model.get_base_model())
    assert not caplog.records


@pytest.mark.parametrize("kind", VIRTUAL)
def test_online_with_virtual_tokens_trains_against_the_bare_model(tiny_tokenizer, tmp_path, kind):
    """Old log-probs are those of the model with virtual tokens, reference log-probs those of the model without."""
    model = with_virtual_tokens(kind, len(tiny_tokenizer))
    settings = {
        "beta": 0.5,
        "num_iterations": 2,
        "max_steps": 2,
        "gradient_checkpointing": False,
        "max_completion_length": 4,
    }
    base = build_model(len(tiny_tokenizer))
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        model=base,
        engine="native",
        peft_config=VIRTUAL[kind](),
        **settings,
        rollout_engine="auto",
    )
    assert trainer.engine.name == "hf"
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(own[name])
    seen, original = [], trainer.advantages

    def spied(generation, rewards, logps):
        seen.append((generation, logps, snapshot(trainer)))
        return original(generation, rewards, logps)

    trainer.advantages = spied
    trainer.train()
    generation, columns, (current, bare) = seen[0]
    for i, rollout in enumerate(generation.rollouts):
        expected = said_alone(current, rollout)
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(columns["old_logp"][i]), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(columns["ref_logp"][i]), said_alone(bare, rollout), atol=1e-4, rtol=0)
    assert any(row.get("kl", 0) > 1e-3 for row in trainer.state.log_history)


def snapshot(trainer):
    """Copies of the model with its virtual tokens, and of the base model, as they are now."""
    model = with_virtual_tokens(
        next(k for k in VIRTUAL if isinstance(VIRTUAL[k](), type(trainer.model.active_peft_config))),
        trainer.model.config.vocab_size,
    )
    model.load_state_dict(trainer.model.state_dict())
    bare = build_model(trainer.model.config.vocab_size)
    bare.load_state_dict(trainer.model.get_base_model().state_dict())
    return model, bare


def test_rows_without_the_trained_tokens_do_not_end_a_run(tiny_tokenizer, tmp_path):
    adapter = peft.TrainableTokensConfig(token_indices=[len(tiny_tokenizer) - 1], target_modules=["embed_tokens"])
    model = build_model(len(tiny_tokenizer), tie_word_embeddings=False)
    trainer = sft(tmp_path, tiny_tokenizer, model, peft_config=adapter, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_a_bias_option_without_biases_shares_the_base(bias):
    model = peft.get_peft_model(build_model(37), peft.LoraConfig(r=4, target_modules=["q_proj"], bias=bias))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert Reference(model, fresh_adapter=True).copy is None


def test_layers_that_the_config_does_not_list_are_refused():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    with raises(ConfigError, "layer_replication gives Qwen3ForCausalLM 4 layers"):
        wrap_with_peft(built("qwen3 with a window"), config, activation_checkpointing=False)


def test_a_missing_module_of_another_option_does_not_blame_target_modules():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"absent": [3]})
    with raises(ConfigError, "Target modules {'absent'} not found"):
        wrap_with_peft(build_model(37), config, activation_checkpointing=False)


def test_a_model_with_an_adapter_of_transformers_resumes_and_loads_its_best_model(tiny_tokenizer, tmp_path):
    def trainer(**more):
        torch.manual_seed(0)
        model = build_model(len(tiny_tokenizer))
        model.add_adapter(peft.LoraConfig(r=4, **TARGETS))
        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1}
        return sft(tmp_path, tiny_tokenizer, model=model, **settings | more)

    whole = trainer()
    whole.train()
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    again.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    again._load_best_model()
    saved = peft.load_peft_weights(str(tmp_path / "checkpoint-1"))
    first = {name.removeprefix("base_model.model."): weight for name, weight in saved.items()}
    now = peft.get_peft_model_state_dict(again.model, adapter_name="default")
    assert first.keys() == now.keys() and all(torch.equal(first[name], now[name]) for name in now)
    assert adapter_obstacle(again.model) == "its adapter was added by transformers' add_adapter"
    merged = {name: get() for name, get in merged_weights(again.model)}
    ids = torch.tensor([[5, 6, 7]])
    fresh = build_model(len(tiny_tokenizer))
    fresh.load_state_dict(merged, strict=False)
    torch.testing.assert_close(fresh(ids).logits, again.model(ids).logits, atol=1e-5, rtol=1e-5)


def test_trained_norms_are_not_computed_by_fused_layers():
    model = peft.get_peft_model(build_model(37), peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    engine = create_engine("native", model, pad_token_id=0)
    (found,) = engine.generate([Request([5, 6, 7])], Sampling(max_new_tokens=4, seed=1))
    ids = torch.tensor([[5, 6, 7, *found.token_ids]])
    logp = model(ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logp), logp, atol=1e-5, rtol=1e-5)
