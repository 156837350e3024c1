"""SFT on everything it promises to take: each run moves every weight that is trained and none that is frozen."""

import json
import sys

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain import SFTConfig, SFTTrainer
from posttrain.errors import MissingDependencyError
from tests.conftest import build_model
from tests.methods.helpers import chats, losses, sft
from tests.methods.test_sft_options import experts
from tests.wordings import raises

ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A number."}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
ROWS = {
    "plain": {"text": "What is the sum of two numbers?"},
    "chat": {"messages": [ASK, SAY, ASK, SAY]},
    "plain completion": {"prompt": "The sum is", "completion": " a number"},
    "chat completion": {"prompt": [ASK], "completion": [SAY]},
    "sharegpt": {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A number."}]},
    "tokenised": {"input_ids": [5, 6, 7, 8, 2], "completion_mask": [0, 0, 1, 1, 1]},
    "labels": {"input_ids": [5, 6, 7, 2], "labels": [-100, -100, 7, 2]},
    "tools": {"messages": [ASK, SAY], "tools": [TOOL]},
    "tools as JSON": {"messages": [ASK, SAY], "tools": json.dumps([TOOL])},
    "arguments": {"messages": [ASK, SAY], "chat_template_kwargs": {"enable_thinking": False}},
}
ONE_EPOCH = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 2}


def data(kind, stream=False, count=4):
    rows = datasets.Dataset.from_list([ROWS[kind]] * count)
    return rows.to_iterable_dataset() if stream else rows


def moved(trainer, frozen=lambda name: False):
    """Train, and say which parameters moved against what they should."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter) == (not parameter.requires_grad), name
        assert not (frozen(name) and parameter.requires_grad), name
    assert all(loss > 0 for loss in losses(trainer))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ROWS)
def test_every_form_of_rows_trains_every_parameter(tiny_tokenizer, tmp_path, kind, stream):
    length = {"max_steps": 2} if stream else ONE_EPOCH
    moved(sft(tmp_path, tiny_tokenizer, data=data(kind, stream), **length))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_every_packing_trains_in_memory_and_from_a_stream(tiny_tokenizer, tmp_path, strategy, stream):
    rows = chats().to_iterable_dataset() if stream else chats()
    options = {"packing": True, "packing_strategy": strategy, "max_length": 24, "per_device_train_batch_size": 2}
    moved(sft(tmp_path, tiny_tokenizer, data=rows, max_steps=2, **options))


@pytest.mark.parametrize(
    "options", [{"completion_only_loss": True}, {"assistant_only_loss": True}, {"completion_only_loss": False}]
)
def test_each_choice_of_what_is_trained_on_a_chat_completion(tiny_tokenizer, tmp_path, options):
    moved(sft(tmp_path, tiny_tokenizer, data=data("chat completion"), **ONE_EPOCH, **options))


def test_adapters_train_alone_also_on_experts_and_when_they_were_wrapped_before(tiny_tokenizer, tmp_path):
    def base(name):
        return "lora" not in name

    moved(sft(tmp_path / "a", tiny_tokenizer, peft_config=LoraConfig(target_modules="all-linear")), frozen=base)
    wrapped = get_peft_model(build_model(len(tiny_tokenizer)), LoraConfig(target_modules=["q_proj"]))
    moved(sft(tmp_path / "b", tiny_tokenizer, model=wrapped), frozen=base)
    targets = LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    mixture = sft(tmp_path / "c", tiny_tokenizer, model=experts(tiny_tokenizer, "mixtral"), peft_config=targets)
    assert sum("lora" in name and p.requires_grad for name, p in mixture.model.named_parameters()) >= 2
    moved(mixture, frozen=base)


@pytest.mark.parametrize("reentrant", [False, True])
def test_either_kind_of_checkpointing_trains(tiny_tokenizer, tmp_path, reentrant):
    moved(sft(tmp_path, tiny_tokenizer, gradient_checkpointing_kwargs={"use_reentrant": reentrant}))


def test_half_precision_weights_stay_so(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, model=build_model(len(tiny_tokenizer)).to(torch.bfloat16))
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "container", ["Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict", "dict", "mixed"]
)
def test_evaluation_takes_every_container(tiny_tokenizer, tmp_path, container):
    one, stream = chats(4), chats(4).to_iterable_dataset()
    given = {
        "Dataset": one,
        "IterableDataset": stream,
        "DatasetDict": datasets.DatasetDict({"a": one, "b": one}),
        "IterableDatasetDict": datasets.IterableDatasetDict({"a": stream, "b": stream}),
        "dict": {"a": one, "b": one},
        "mixed": {"a": one, "b": data("chat")},
    }[container]
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=given)
    found, again = trainer.evaluate(), trainer.evaluate(given)
    keys = ["eval_loss"] if container.endswith("Dataset") else ["eval_a_loss", "eval_b_loss"]
    assert [found[key] for key in keys] == [again[key] for key in keys]
    assert all(key.replace("loss", "mean_token_accuracy") in found for key in keys)


def test_the_best_model_is_chosen_by_a_metric_of_the_trainer(tiny_tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {
        "metric_for_best_model": "eval_mean_token_accuracy",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(4), **(options | best))
    trainer.train()
    logged = [row["eval_mean_token_accuracy"] for row in trainer.state.log_history if "eval_mean_token_accuracy" in row]
    assert trainer.state.best_metric == max(logged)


def test_a_template_cloned_from_a_tokenizer_brings_its_tokens_into_the_model_that_is_saved(tiny_tokenizer, tmp_path):
    other = tiny_tokenizer.__class__.from_pretrained(tiny_tokenizer.name_or_path)
    other.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    other.chat_template = other.chat_template.replace("<|im_end|>", "<|turn|>")
    other.eos_token = "<|turn|>"
    other.save_pretrained(tmp_path / "other")
    trainer = sft(
        tmp_path / "out", tiny_tokenizer, data=data("chat"), chat_template_path=str(tmp_path / "other"), **ONE_EPOCH
    )
    turn = trainer.processing_class.convert_tokens_to_ids("<|turn|>")
    assert turn in trainer.train_dataset[0]["labels"]
    assert trainer.model.get_input_embeddings().weight.shape[0] > turn
    moved(trainer)


def test_four_bits_without_their_package_are_refused_by_name(tiny_model_dir, tmp_path, monkeypatch):
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(MissingDependencyError, "bitsandbytes", "4-bit", 'pip install "posttrain[quantization]"'):
        SFTTrainer(
            tiny_model_dir, SFTConfig(str(tmp_path), report_to="none", bf16=False), train_dataset=chats(),
            quantization_config=settings, peft_config=LoraConfig(r=2, target_modules="all-linear"),
        )  # fmt: skip
