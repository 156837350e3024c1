"""Every public data function is importable from the package, and some test uses it."""

from pathlib import Path

import pytest

import posttrain

NAMES = [
    "apply_chat_template",
    "maybe_apply_chat_template",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_convert_to_chatml",
    "extract_prompt",
    "maybe_extract_prompt",
    "unpair_preference_dataset",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "prepare_multimodal_messages",
    "prepare_multimodal_messages_vllm",
    "get_dataset_column_names",
    "truncate_dataset",
    "describe_dataset",
    "strip_none",
    "remove_none_values",
    "convert_dataset",
    "check_template",
    "clone_chat_template",
    "add_response_schema",
    "get_training_chat_template",
    "supports_tool_calling",
    "has_generation_markers",
    "is_chat_template_prefix_preserving",
    "is_chat_template_stop_token_trained",
    "parse_response",
    "pad",
    "flush_left",
    "selective_log_softmax",
    "entropy_from_logits",
    "RepeatSampler",
    "repeat_iterable_dataset",
    "nanstd",
    "nanmin",
    "nanmax",
    "split_tensor_dict",
    "shuffle_sequence_dict",
    "create_model_from_path",
    "get_config_model_id",
    "hash_module",
    "use_adapter",
    "disable_dropout_in_model",
    "identity",
    "create_reference_model",
    "unwrap_model_for_generation",
    "get_act_offloading_ctx_manager",
    "disable_gradient_checkpointing",
    "OffloadActivations",
    "NoOpManager",
    "truncate_right",
    "first_true_indices",
    "get_reward",
    "pad_to_length",
    "prepare_model_for_kbit_training",
    "enable_gradient_checkpointing",
    "prepare_peft_model",
    "peft_module_casting_to_bf16",
    "empty_cache",
    "DataCollatorForLanguageModeling",
    "DataCollatorForPreference",
    "DataCollatorForReward",
    "DataCollatorForUnpairedPreference",
    "get_dataset",
    "DatasetMixtureConfig",
]


@pytest.fixture(scope="module")
def tests_text():
    files = Path(__file__).parents[1].rglob("test_*.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("name", NAMES)
def test_a_data_name_is_importable_and_some_test_uses_it(name, tests_text):
    assert callable(getattr(posttrain, name)) and name in posttrain.__all__
    assert tests_text.count(name) > 1  # Once in the list above.


def test_column_names_of_a_stream_that_declares_none_are_those_of_its_first_row():
    import datasets

    stream = datasets.IterableDataset.from_generator(lambda: iter([{"b": 1, "a": 2}]))
    assert stream.column_names is None
    assert posttrain.get_dataset_column_names(stream) == ["b", "a"]
    assert posttrain.get_dataset_column_names(datasets.Dataset.from_dict({"x": [1]})) == ["x"]


def test_the_id_of_a_model_built_in_memory_is_empty(tiny_model):
    assert posttrain.get_config_model_id(tiny_model.config) == ""
    tiny_model.config._name_or_path = "org/name"
    assert posttrain.get_config_model_id(tiny_model.config) == "org/name"


def test_the_hash_of_a_module_sees_values_names_and_shapes():
    import torch

    one, same, flat = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
    same.load_state_dict(one.state_dict())
    assert posttrain.hash_module(one) == posttrain.hash_module(same)
    with torch.no_grad():
        same.bias[0] += 1e-3
        flat.weight.copy_(one.weight.reshape(2, 3))
    assert len({posttrain.hash_module(m) for m in (one, same, flat, torch.nn.Sequential(one))}) == 4
    assert posttrain.hash_module(one.bfloat16()) != posttrain.hash_module(one.float())


def test_an_adapter_is_used_or_left_out_and_the_former_comes_back_after_an_exception(tiny_model):
    import peft
    import torch

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ids = torch.arange(3, 9)[None]
    base = tiny_model(ids).logits.detach()
    model = peft.get_peft_model(tiny_model, config, adapter_name="one").eval()
    model.add_adapter("two", config)
    own = model(ids).logits
    with posttrain.use_adapter(model, None):
        assert torch.allclose(model(ids).logits, base, atol=1e-5)
    with pytest.raises(KeyError), posttrain.use_adapter(model, "two"):
        assert model.active_adapter == "two"
        raise KeyError
    assert model.active_adapter == "one" and torch.equal(model(ids).logits, own)
