"""Adapters on weights that bitsandbytes packed: what is refused, and training, resuming, merging and reloading where it runs."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from posttrain import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from posttrain.errors import ConfigError
from posttrain.models.quantised import bits_of, check_quantised, compute_dtype, weight_bits
from tests.conftest import build_model
from tests.wordings import raises

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
SUMS = Dataset.from_list([{"prompt": f"{a} + 7 =", "completion": f" {a + 7}"} for a in range(16)])
PAIRS = Dataset.from_list([{"prompt": f"{a} + 7 =", "chosen": f" {a + 7}", "rejected": f" {a}"} for a in range(16)])
PROMPTS = Dataset.from_list([{"prompt": f"{a} + 7 ="} for a in range(16)])


def plain(**settings):
    return SimpleNamespace(**({"model_init_kwargs": None, "fsdp": None, "hf_deepspeed_config": None} | settings))


def lora(**settings):
    return peft.LoraConfig(**({"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings))


def four_bits(compute=torch.float32):
    return BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=compute)


# What is refused, without the package ---------------------------------------------------------------------------------


def test_quantised_weights_without_an_adapter_are_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    with raises(ConfigError, "4 bits"):
        check_quantised("nowhere", plain(), None, BitsAndBytesConfig(load_in_4bit=True))
    with raises(ConfigError, "8 bits"):
        check_quantised("nowhere", plain(model_init_kwargs={"quantization_config": {"load_in_8bit": True}}), None, None)
    with raises(ConfigError, "4 bits"):
        check_quantised(SimpleNamespace(is_loaded_in_4bit=True), plain(), None, None)
    check_quantised("nowhere", plain(), lora(), BitsAndBytesConfig(load_in_4bit=True))
    check_quantised(SimpleNamespace(is_loaded_in_4bit=True, peft_config={"default": lora()}), plain(), None, None)


def test_a_checkpoint_that_was_saved_packed_is_refused_without_an_adapter(tiny_model_dir, tmp_path):
    place = tmp_path / "packed"
    place.mkdir()
    config = json.loads((Path(tiny_model_dir) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    (place / "config.json").write_text(json.dumps(config))
    with raises(ConfigError, "4 bits"):
        check_quantised(str(place), plain(), None, None)
    check_quantised(tiny_model_dir, plain(), None, None)


def test_packed_weights_in_shards_are_refused():
    for settings, name in (
        ({"fsdp": True}, "FSDP"),
        ({"hf_deepspeed_config": SimpleNamespace(is_zero3=lambda: True)}, "ZeRO-3"),
    ):
        with raises(ConfigError, name):
            check_quantised("nowhere", plain(**settings), lora(), BitsAndBytesConfig(load_in_4bit=True))


def test_bits_of_a_weight_count_its_scales():
    assert weight_bits(None) is None and weight_bits({"load_in_8bit": True}) == 8
    assert weight_bits(BitsAndBytesConfig(load_in_4bit=True)) == 4 + 32 / 64
    assert weight_bits(BitsAndBytesConfig(**NF4)) == 4 + 8 / 64 + 32 / (64 * 256)


def test_a_whole_model_and_a_name_have_no_bits(tiny_model):
    assert bits_of(tiny_model) is None and bits_of("name") is None
    tiny_model.is_loaded_in_8bit = True
    assert bits_of(tiny_model) == 8 and compute_dtype(tiny_model) == torch.bfloat16


def test_the_command_that_checks_refuses_four_bits_without_an_adapter(tiny_model_dir, tmp_path, capsys):
    from posttrain.cli.check import run

    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in SUMS), encoding="utf-8")
    command = ["sft", "--model_name_or_path", tiny_model_dir, "--dataset_name", str(data), "--load_in_4bit"]
    command += ["--output_dir", str(tmp_path / "out"), "--use_cpu"]
    assert run(command) == 78
    assert "quantized to 4 bits, so they cannot be trained" in " ".join(capsys.readouterr().out.split())
    run([*command, "--use_peft"])
    assert "there is no adapter" not in " ".join(capsys.readouterr().out.split())


# What runs where the package is ---------------------------------------------------------------------------------------

# `find_spec` knows packages that are there and cannot be used, too.
packed = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)


@pytest.fixture
def folder(tiny_tokenizer, tmp_path):
    """A model whose layers are wide enough for blocks of 64 weights."""
    place = tmp_path / "base"
    build_model(len(tiny_tokenizer), hidden_size=64, intermediate_size=128).save_pretrained(place)
    tiny_tokenizer.save_pretrained(place)
    return str(place)


def options(place, **settings):
    base = {"output_dir": str(place), "max_steps": 4, "logging_steps": 1, "report_to": "none", "bf16": False}
    base |= {"use_cpu": True, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    return base | settings


def sft(folder, place, *, quantised=None, adapter=None, **settings):
    args = SFTConfig(**options(place, **settings))
    given = {"peft_config": adapter or lora(), "quantization_config": quantised or four_bits()}
    return SFTTrainer(folder, args, train_dataset=SUMS, **given)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def packed_bytes(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}


@packed
def test_sft_learns_on_four_bits_and_the_base_stays_as_it_was(folder, tmp_path, caplog):
    with caplog.at_level("INFO", logger="posttrain.models.quantised"):
        trainer = sft(folder, tmp_path / "out", max_steps=12)
    assert sum("4-bit weights: the base model is frozen" in record.message for record in caplog.records) == 1
    before = packed_bytes(trainer.model)
    assert len(before) == 14 and trainer.layout.kind == "tree"
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    assert all(torch.equal(p, before[name]) for name, p in packed_bytes(trainer.model).items())


@packed
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "grpo hf", "grpo native"])
def test_every_kind_of_method_moves_the_adapter_alone(kind, folder, tmp_path):
    settings = options(tmp_path / "out", max_steps=3)
    given = {"peft_config": lora(), "quantization_config": four_bits()}
    if kind == "sft":
        trainer = SFTTrainer(folder, SFTConfig(**settings), train_dataset=SUMS, **given)
    elif kind == "dpo":
        trainer = DPOTrainer(folder, args=DPOConfig(**settings), train_dataset=PAIRS, **given)
    elif kind == "reward":
        given["peft_config"] = lora(task_type="SEQ_CLS")
        trainer = RewardTrainer(folder, args=RewardConfig(**settings), train_dataset=PAIRS, **given)
    else:
        own = {"rollout_engine": kind.split()[1], "num_generations": 4, "max_completion_length": 8, "beta": 0.1}
        args = GRPOConfig(**(settings | own))
        trainer = GRPOTrainer(
            folder, lambda completions, **_: [float(len(set(text))) for text in completions], args,
            train_dataset=PROMPTS, **given,
        )  # fmt: skip
    packed = packed_bytes(trainer.model)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("lora_B" in name for name in moved) and all(torch.isfinite(p).all() for p in after.values())
    if kind == "reward":
        assert any("score" in name for name in moved)
    assert all(torch.equal(p, packed[name]) for name, p in packed_bytes(trainer.model).items())


@packed
@pytest.mark.parametrize("optimiser", ["adamw_torch", "adamw_bnb_8bit"])
def test_a_resumed_run_equals_one_that_was_never_stopped(optimiser, folder, tmp_path):
    settings = {"optim": optimiser, "save_strategy": "steps", "save_steps": 2, "adapter": lora(r=64)}
    whole = sft(folder, tmp_path / "whole", **settings)
    whole.train()
    if optimiser == "adamw_bnb_8bit":
        states = whole.optimizer.optimizer.state.values()
        assert any(state["state1"].dtype == torch.uint8 for state in states if "state1" in state)
    again = sft(folder, tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again)[2:] == losses(whole)[2:]
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


@packed
def test_a_saved_adapter_answers_as_it_was_trained_on_the_same_packed_weights_and_merged_on_unpacked_ones(
    folder, tmp_path
):
    trainer = sft(folder, tmp_path / "out", max_steps=8)
    trainer.train()
    trainer.save_model()
    saved = tmp_path / "out"
    assert (saved / "adapter_model.safetensors").stat().st_size < 200_000
    ids = trainer.processing_class("3 + 7 = 10", return_tensors="pt").input_ids

    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    trained = logits(trainer.model)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits(), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, saved)
    assert torch.equal(logits(loaded), trained)
    # Merged into weights that were packed and are unpacked again: what was trained, in plain layers.
    whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits(), dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(whole.dequantize(), saved).merge_and_unload()
    merged.config.__dict__.pop("quantization_config", None)
    assert (logits(merged) - trained).abs().max() < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert bits_of(again) is None and (logits(again) - trained).abs().max() < 1e-4
    # Merged into the weights as they were before they were packed: another model, by the error of quantising.
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    elsewhere = peft.PeftModel.from_pretrained(other, saved).merge_and_unload()
    assert (logits(elsewhere) - trained).abs().max() > 1e-2


@packed
def test_eight_bits_train_with_an_adapter_too(folder, tmp_path):
    trainer = sft(folder, tmp_path / "out", quantised=BitsAndBytesConfig(load_in_8bit=True), max_steps=12)
    trainer.train()
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]


@packed
def test_gradients_pass_recomputed_layers_to_the_adapter(folder, tmp_path):
    seen = []
    for checkpointing in (True, False):
        trainer = sft(folder, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing, max_steps=3)
        trainer.train()
        seen.append(losses(trainer))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)


@packed
def test_the_weights_in_memory_are_those_of_the_estimate(folder):
    from posttrain.models.memory_estimate import Part, Shadow

    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits(), dtype=torch.float32)
    model = peft.get_peft_model(loaded, lora())
    held = sum(p.nbytes for p in model.parameters())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
    config = AutoModelForCausalLM.from_pretrained(folder).config
    part = Part("policy", config, peft_config=lora(), bits=weight_bits(four_bits()))
    told = sum(size for size, _ in Shadow(part).named_sizes().values())
    assert told == pytest.approx(held, rel=0.01)
