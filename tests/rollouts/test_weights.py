"""What is sent to an engine that holds a copy: whole, under the checkpoint's names, merged without touching the base."""

import copy
import doctest
import hashlib

import peft
import pytest
import torch
import transformers

import posttrain.rollouts.shared_weights
from posttrain.errors import ModelError
from posttrain.rollouts import shared_weights as merged
from posttrain.rollouts.shared_weights import Weights, as_dtype, check_mergeable, merged_weights, save_merged
from tests.conftest import build_model
from tests.models.architectures import built
from tests.wordings import raises


def adapted(model, seed=1, **settings):
    """A LoRA whose trained parameters, whatever their names, are all away from their start."""
    base = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return moved(peft.get_peft_model(model, peft.LoraConfig(**(base | settings))), seed)


def moved(model, seed=1):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def build_moe(vocab_size, seed=0, **overrides):
    torch.manual_seed(seed)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3MoeConfig(vocab_size=vocab_size, initializer_range=0.2, **(settings | overrides))
    return transformers.Qwen3MoeForCausalLM(config).eval()


def fingerprint(model):
    return {
        n: hashlib.sha256(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for n, p in model.named_parameters()
    }


def same_as_trainer(trainer_model, sent, vocabulary=37, build=build_model, **config):
    """A fresh model with the sent weights computes what the trainer's computes."""
    fresh = build(vocabulary, seed=5, **config)
    left = fresh.load_state_dict(sent, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= set(fresh.all_tied_weights_keys)
    ids = torch.randint(0, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(fresh(ids).logits, trainer_model(ids).logits, atol=2e-5, rtol=1e-4)


def test_examples_in_docstrings_run():
    for module in (merged, posttrain.rollouts.shared_weights):
        assert doctest.testmod(module).attempted > 0
        assert doctest.testmod(module).failed == 0


def test_a_tied_weight_is_sent_once_and_an_untied_one_too():
    assert "lm_head.weight" not in Weights(build_model(37)).names
    assert len(Weights(build_model(37)).names) == len(set(Weights(build_model(37)).names))
    assert "lm_head.weight" in Weights(build_model(37, tie_word_embeddings=False)).names


def test_names_lose_what_wrappers_put_into_them():
    model = build_model(37)
    layers = model.model.layers
    layers[0].mlp = torch.nn.ModuleDict({"_checkpoint_wrapped_module": layers[0].mlp})
    outer = torch.nn.Module()
    outer.module = model
    assert Weights(outer).names == Weights(build_model(37)).names


TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
MERGED = [
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"bias": "all"},
    {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    {"trainable_token_indices": [3, 4]},
    {"fan_in_fan_out": False, "rank_pattern": {"q_proj": 2}},
    {"target_modules": "all-linear"},
    {"layer_replication": [(0, 2), (1, 2)]},
    {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    TIED,
    # These change one of two tied matrices.
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head", "embed_tokens"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["lm_head", "q_proj"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"trainable_token_indices": {"lm_head": [3]}},
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("settings", MERGED, ids=lambda s: "-".join(s) or "plain")
def test_merged_adapters_compute_what_the_trainer_computes(settings, tied):
    config = {"tie_word_embeddings": tied, "attention_bias": True}
    model = adapted(build_model(37, **config), **settings)
    if tied and MERGED.index(settings) > MERGED.index(TIED):
        with raises(ModelError, "lm_head.weight", "model.embed_tokens.weight"):
            Weights(model)
        with raises(ModelError, "lm_head.weight", "model.embed_tokens.weight"):
            check_mergeable(model)
        return
    check_mergeable(model)
    weights = Weights(model)
    sent = dict(weights)
    assert list(sent) == weights.names
    assert not any("lora" in name or "base_layer" in name or "default" in name for name in sent)
    layers = {"num_hidden_layers": 3} if "layer_replication" in settings else {}
    same_as_trainer(model, sent, **config, **layers)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": "all-linear"}, {"target_parameters": EXPERTS}, {"target_parameters": EXPERTS[1:]}, {}],
    ids=["all-linear", "experts", "one", "attention"],
)
def test_merged_adapters_of_expert_tensors_compute_what_the_trainer_computes(settings):
    model = adapted(build_moe(37), **({"target_modules": ["q_proj"]} | settings))
    check_mergeable(model)
    same_as_trainer(model, dict(Weights(model)), build=build_moe)
    peft_own = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    for name, tensor in Weights(model):
        torch.testing.assert_close(tensor, peft_own[name], atol=3e-6, rtol=0)


def test_the_buffers_of_a_module_with_an_adapted_parameter_are_sent(tmp_path):
    """The right values are those of a whole state dict, into which the adapter is merged by peft."""
    base = built("deepseek v3")
    correction = next(b for name, b in base.named_buffers() if name.endswith("e_score_correction_bias"))
    correction.copy_(torch.tensor([0.5, -0.5, 0.2, 0.0]))
    model = adapted(base, target_modules="all-linear")  # peft counts the router among linear layers.
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    sent = dict(Weights(model))
    assert sent.keys() == expected.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], atol=3e-6, rtol=0)
    save_merged(model, tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)


def test_an_adapter_of_pytorch_attention_is_refused():
    """peft's own forward pass adds the part of the inner output layer twice."""
    base = torch.nn.Sequential(torch.nn.MultiheadAttention(8, 2))
    with raises(ModelError, "0 is a MultiheadAttention", "target_modules"):
        Weights(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"])))


@pytest.mark.parametrize(
    "kind", [peft.IA3Config, peft.LoHaConfig, peft.VeraConfig, peft.OFTConfig, peft.RandLoraConfig]
)
def test_adapters_of_other_kinds_are_merged_by_peft(kind):
    options = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    options |= {"feedforward_modules": ["down_proj"]} if kind is peft.IA3Config else {}
    options |= {"oft_block_size": 4} if kind is peft.OFTConfig else {}
    model = moved(peft.get_peft_model(build_model(37), kind(**options)))
    check_mergeable(model)
    same_as_trainer(model, dict(Weights(model)))


def test_adapters_that_peft_cannot_merge_are_refused():
    model = adapted(build_model(37), lora_bias=True)  # Its layers have no bias to merge into.
    with raises(ModelError, "lora_bias"):
        check_mergeable(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trap_s2_a_thousand_merges_leave_every_byte_of_the_base_as_it_was(dtype):
    model = adapted(build_model(37, hidden_size=16, num_hidden_layers=1)).to(dtype)
    before = fingerprint(model)
    first = {name: tensor.clone() for name, tensor in Weights(model)}
    for _ in range(1000):
        for name, read in merged_weights(model):
            if "q_proj" in name or "down_proj" in name:
                read()
    assert fingerprint(model) == before
    assert all(torch.equal(first[name], tensor) for name, tensor in Weights(model))


def test_merging_in_half_precision_rounds_once():
    model = adapted(build_model(37)).to(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    sent = dict(Weights(model))["model.layers.0.self_attn.q_proj.weight"]
    step = exact.abs() * 2.0**-8 + 1e-6
    assert ((sent.double() - exact).abs() <= step).all()


def test_weights_are_those_of_the_moment_they_are_read():
    model = build_model(37)
    weights = Weights(model, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert dict(weights)["model.norm.weight"].eq(3.0).all()
    assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16}


def test_a_dtype_is_known_by_either_of_its_names():
    assert as_dtype("float16") is as_dtype("torch.float16") is torch.float16
    assert as_dtype("auto") is as_dtype(None) is None


def test_adapters_that_are_off_or_merged_in_place_are_not_added():
    model = adapted(build_model(37), modules_to_save=["norm"])
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        adapted_logits = model(ids).logits
        with model.disable_adapter():
            same_as_trainer(model, dict(Weights(model)))
            off = {name: tensor.clone() for name, tensor in Weights(model)}
        assert all(torch.equal(off[name], tensor) for name, tensor in Weights(model, adapters=False))
        plain = adapted(build_model(37))
        expected = plain(ids).logits
        plain.merge_adapter()
        torch.testing.assert_close(plain(ids).logits, expected, atol=2e-5, rtol=1e-4)
        same_as_trainer(plain, dict(Weights(plain)))
    assert (adapted_logits - expected).abs().max() > 0


def test_a_merged_checkpoint_of_repeated_layers_and_one_that_transformers_would_not_write(tmp_path):
    model = adapted(build_model(37), layer_replication=[(0, 2), (1, 2)])
    save_merged(model, tmp_path / "repeated")
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repeated").eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
    native = build_model(37)
    native.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with raises(ModelError, "get_peft_model"):
        save_merged(native, tmp_path / "native")
    inserted = peft.get_peft_model(
        build_model(37), peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)
    )
    with raises(ModelError, "ADAPTION_PROMPT"):
        save_merged(inserted, tmp_path / "inserted")


@pytest.mark.parametrize("build", [build_model, build_moe])
def test_a_merged_checkpoint_computes_what_the_adapted_model_computes(build, tmp_path):
    model = adapted(build(37), target_modules="all-linear")
    before = fingerprint(model)
    save_merged(model, tmp_path)
    assert fingerprint(model) == before
    ids = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
    with raises(ModelError, "ensure_weight_tying=True"):
        save_merged(adapted(build_model(37), target_modules=["embed_tokens"]), tmp_path / "tied")
    assert not (tmp_path / "tied").exists()
