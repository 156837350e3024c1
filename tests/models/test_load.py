"""Loading models: the dtype that was asked for is the dtype that is loaded, under either of its names."""

import datasets
import pytest
import torch
import transformers
from tokenizers import AddedToken

import posttrain
from posttrain import ConfigError, ModelError, SFTConfig, SFTTrainer, create_model_from_path
from posttrain.methods.config import PostTrainingConfig
from posttrain.models.load import add_adapter, check_model_source, load_classifier, prepare_tokenizer
from posttrain.models.probe import probe_layout
from posttrain.rewards.model import ModelReward
from tests.conftest import build_model
from tests.methods.helpers import SHORT
from tests.wordings import raises

HALVES = [torch.bfloat16, "bfloat16"]


def configs():
    """Every public config of a trainer."""
    found = [getattr(posttrain, name) for name in posttrain.__all__ if name.endswith("Config")]
    return [c for c in found if isinstance(c, type) and issubclass(c, PostTrainingConfig)]


@pytest.fixture
def classifier_dir(tiny_model_dir):
    load_classifier(tiny_model_dir, num_labels=1, dtype="float32").save_pretrained(tiny_model_dir)
    return tiny_model_dir


@pytest.mark.parametrize("given", HALVES)
def test_a_model_is_loaded_in_the_dtype_that_torch_dtype_says(tiny_model_dir, given):
    assert create_model_from_path(tiny_model_dir, torch_dtype=given).dtype == torch.bfloat16
    assert load_classifier(tiny_model_dir, num_labels=1, torch_dtype=given).dtype == torch.bfloat16


@pytest.mark.parametrize("given", HALVES)
def test_a_reward_model_is_loaded_in_the_dtype_that_torch_dtype_says(classifier_dir, given):
    found = ModelReward(classifier_dir, model_init_kwargs={"torch_dtype": given})
    assert found.model.dtype == torch.bfloat16


@pytest.mark.parametrize("config", configs(), ids=lambda c: c.__name__)
def test_every_config_knows_torch_dtype_and_refuses_two_that_differ(config, tmp_path):
    args = config(str(tmp_path), model_init_kwargs={"torch_dtype": "bfloat16", "revision": "main"})
    assert args.model_init_kwargs == {"dtype": "bfloat16", "revision": "main"}
    both = config(str(tmp_path), model_init_kwargs={"torch_dtype": torch.bfloat16, "dtype": "bfloat16"})
    assert both.model_init_kwargs == {"dtype": "bfloat16"}
    with raises(ConfigError, "torch_dtype", "float16", "float32"):
        config(str(tmp_path), model_init_kwargs={"torch_dtype": "float16", "dtype": "float32"})


def test_a_head_that_an_architecture_names_before_model_is_a_head(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "head")
    assert type(create_model_from_path(str(tmp_path / "head"))) is GPT2LMHeadModel
    GPT2Model(config).save_pretrained(tmp_path / "trunk")
    with raises(ModelError, "GPT2Model"):
        create_model_from_path(str(tmp_path / "trunk"))


def test_weights_that_transformers_shards_as_it_loads_them_are_refused_and_sizes_of_one_are_not(
    tiny_model_dir, tiny_tokenizer, tmp_path
):
    """Sharded so, a step of two processes moved the weights elsewhere than a step of DDP, and nothing was said."""
    configuration = pytest.importorskip("transformers.distributed").DistributedConfig
    settings = SHORT | {"use_cpu": True, "max_steps": 1}
    for given, values in (
        ({"fsdp_size": 2}, ("fsdp_size=2",)), (configuration(fsdp_size=8, ep_size=8), ("ep_size=8", "exchange of tokens")),
        ({"tp_size": 4}, ("tp_size=4",)), ({"enable_expert_parallel": True}, ("enable_expert_parallel", "experts")),
    ):  # fmt: skip
        with raises(ConfigError, "distributed_config", *values):
            posttrain.SFTConfig(str(tmp_path), **settings, model_init_kwargs={"distributed_config": given})
    model = build_model(len(tiny_tokenizer))
    model.config.distributed_config = configuration(fsdp_size=2)
    data = datasets.Dataset.from_list([{"prompt": "What?", "completion": " It."}] * 8)
    with raises(ConfigError, "fsdp_size=2"):
        posttrain.SFTTrainer(
            model, posttrain.SFTConfig(str(tmp_path), **settings), train_dataset=data, processing_class=tiny_tokenizer
        )
    alone = posttrain.SFTConfig(str(tmp_path), **settings, model_init_kwargs={"distributed_config": configuration()})
    posttrain.SFTTrainer(tiny_model_dir, alone, train_dataset=data, processing_class=tiny_tokenizer).train()


def test_a_tokenizer_that_no_checkpoint_could_save_is_refused(tiny_tokenizer, tmp_path):
    args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True)
    tiny_tokenizer.save_pretrained(tmp_path)
    fine = transformers.AutoTokenizer.from_pretrained(tmp_path, additional_special_tokens=[AddedToken("<x>")])
    prepare_tokenizer(fine, args)
    fine.save_pretrained(tmp_path / "fine")
    wrong = transformers.AutoTokenizer.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(TypeError):
        wrong.save_pretrained(tmp_path / "wrong")
    with raises(ConfigError, "dtype=torch.bfloat16", "save_pretrained"):
        prepare_tokenizer(wrong, args)


def test_targets_of_an_adapter_that_match_nothing_are_named_beside_those_that_match(tiny_model, caplog):
    from peft import LoraConfig

    names = {"target_modules": ["q_proj", "w_proj"], "modules_to_save": ["head"]}
    adapted = add_adapter(tiny_model, LoraConfig(**names, task_type="CAUSAL_LM"))
    assert any("q_proj.lora_A" in name for name, _ in adapted.named_parameters())
    assert "target_modules: ['w_proj'] match no module" in caplog.text
    assert "modules_to_save: ['head'] match no module" in caplog.text


def tiny(kind, config, **more):
    """Return a small model of transformers."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return kind(config(**sizes, **more)).eval()


def encoder_decoder():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize("generative", [True, False])
def test_an_encoder_decoder_model_is_refused_as_path_and_as_object(generative, tmp_path):
    model = encoder_decoder()
    model.save_pretrained(tmp_path)
    with raises(ModelError, "is an encoder-decoder model"):
        check_model_source(model, generative=generative)
    with raises(ModelError, "is T5ForConditionalGeneration, which is an encoder-decoder model"):
        create_model_from_path(str(tmp_path), None if generative else transformers.AutoModelForSequenceClassification)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_a_masked_language_model_is_refused_as_path_and_as_object(family, tmp_path):
    config = getattr(transformers, f"{family}Config")
    sizes = {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2} if family == "DistilBert" else {}
    model = tiny(getattr(transformers, f"{family}ForMaskedLM"), config, **sizes)
    model.save_pretrained(tmp_path)
    for refused in (lambda: check_model_source(model), lambda: create_model_from_path(str(tmp_path))):
        with raises(ModelError, f"{family}ForMaskedLM, which predicts masked tokens"):
            refused()


def bert(decoder):
    return tiny(transformers.BertLMHeadModel, transformers.BertConfig, is_decoder=decoder)


def gemma(*, both):
    sizes = {"head_dim": 8, "num_key_value_heads": 1, "use_bidirectional_attention": both}
    return tiny(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, **sizes)


@pytest.mark.parametrize("make", [lambda: bert(False), lambda: gemma(both=True)], ids=["bert", "gemma"])
def test_a_model_whose_tokens_attend_to_later_ones_is_refused(make):
    model = make()
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 8]])
    assert (model(first).logits[0, 0] - model(second).logits[0, 0]).abs().max() > 1e-5
    with raises(ModelError, "is not a causal language model", "change with its last token"):
        probe_layout(model)


def test_dropout_is_no_sign_of_attention_to_later_tokens():
    model = tiny(transformers.GPT2LMHeadModel, transformers.GPT2Config, n_positions=64).train()
    assert model.config.attn_pdrop == 0.1 and probe_layout(model).dense_mask
    assert model.training


@pytest.mark.parametrize("make", [lambda: bert(True), lambda: gemma(both=False)], ids=["bert", "gemma"])
def test_the_same_classes_train_as_decoders(make):
    assert probe_layout(make()).kind in ("padded", "tree")


def edited(folder, change):
    """Rewrite the tensors of a saved model."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    build_model(97).save_pretrained(tmp_path)
    edited(tmp_path, lambda weights: {name: w for name, w in weights.items() if "layers.1.mlp" not in name})
    with raises(ModelError, "has no weights for model.layers.1.mlp", "3 parameters would be random"):
        create_model_from_path(str(tmp_path))


def test_a_truncated_weight_file_is_refused(tmp_path):
    build_model(97).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with raises(ModelError, "a weight file of", "cannot be read"):
        create_model_from_path(str(tmp_path))


def test_a_reward_model_needs_a_head_with_one_label(tiny_model_dir, tmp_path):
    with raises(ModelError, "has no weights for score.weight, so its scores would be random"):
        load_classifier(tiny_model_dir, num_labels=1, new_head=False)
    load_classifier(tiny_model_dir, num_labels=3).save_pretrained(tmp_path)
    with raises(ModelError, "do not have the shapes that", "with num_labels=1"):
        load_classifier(str(tmp_path), num_labels=1)
    with raises(ModelError, "do not have the shapes that", "with num_labels=1"):
        ModelReward(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 1}, "save_pretrained would reject the model's config"),
        ({"output_attentions": True, "attn_implementation": "eager"}, "sets output_attentions=True, which training"),
    ],
)
def test_a_config_that_no_checkpoint_could_hold_is_refused(settings, message, tiny_tokenizer, tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=len(tiny_tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    args = SFTConfig(str(tmp_path), use_cpu=True, report_to=[], model_init_kwargs=settings)
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(
            str(tmp_path / "model"), args, train_dataset=datasets.Dataset.from_dict({"text": ["a b c"] * 8}),
            processing_class=tiny_tokenizer,
        )  # fmt: skip


def test_parameters_of_another_shape_are_refused_as_missing(tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights for model.layers.0.mlp"):
        create_model_from_path(str(tmp_path), intermediate_size=8, ignore_mismatched_sizes=True)
