"""Dry steps leave nothing behind, a batch size is found that fits, and profiles are told at their steps."""

import copy
import dataclasses
import random
from types import SimpleNamespace

import numpy
import peft
import pytest
import torch

from posttrain.checks import machine
from posttrain.checks import memory as checks
from posttrain.data.samplers import longest_examples
from posttrain.errors import ConfigError
from posttrain.loop import checkpoint
from posttrain.loop import dry_step as memory_health
from posttrain.loop.dry_step import DryStep
from posttrain.models.memory import Available
from posttrain.models.tree_attention import BACKENDS
from tests.conftest import build_model
from tests.methods.every_trainer import data, every
from tests.methods.helpers import chats, grpo, losses, sft, weights
from tests.wordings import raises

DROPOUT = {"attention_dropout": 0.3}


def ended(make, *, dry):
    trainer = make("dry" if dry else "plain", dry_step=dry)
    trainer.train()
    history = [{k: v for k, v in row.items() if not timed(k)} for row in trainer.state.log_history]
    return weights(trainer), history, torch.random.get_rng_state()


def timed(name):
    return any(word in name for word in ("time", "second", "runtime", "memory/", "health/"))


@pytest.mark.parametrize("method", ["sft", "grpo", "lora"])
def test_training_after_a_dry_step_is_bit_for_bit_training_without(tiny_tokenizer, tmp_path, method):
    """With dropout, so that one random number too many would show."""

    def make(name, **settings):
        model = build_model(len(tiny_tokenizer), **DROPOUT)
        if method == "grpo":
            settings |= {"engine": "native", "beta": 0.1}
            return grpo(tmp_path / name, tiny_tokenizer, model, **settings)
        if method == "lora":
            settings["peft_config"] = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.3)
        return sft(tmp_path / name, tiny_tokenizer, model, gradient_accumulation_steps=2, **settings)

    plain, dry = ended(make, dry=False), ended(make, dry=True)
    assert torch.equal(plain[0], dry[0])
    assert plain[1] == dry[1]
    assert torch.equal(plain[2], dry[2])


def test_a_dry_step_leaves_gradients_modes_numbers_and_metrics_alone(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, build_model(len(tiny_tokenizer), **DROPOUT))
    parameter = next(trainer.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    trainer.model.eval()
    attention = trainer.model.config._attn_implementation
    before = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist(), weights(trainer)
    step = trainer.dry_step()
    after = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist(), weights(trainer)
    assert torch.equal(before[0], after[0]) and before[1:3] == after[1:3] and torch.equal(before[3], after[3])
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert [p for p in trainer.model.parameters() if p.grad is not None] == [parameter]
    assert not any(module.training for module in trainer.model.modules())
    assert not trainer.model.is_gradient_checkpointing
    assert trainer.buffers["train"]._items in ({}, [])
    assert trainer.model.config._attn_implementation == attention in BACKENDS
    assert not step.failed and step.tokens > 0 and step.needed >= step.peak > 0


def test_a_dry_step_computes_in_the_precision_of_the_run(tiny_tokenizer, tmp_path):
    """A model is wrapped in autocast once training prepares it, and before that the step took float32's memory."""
    trainer, seen = sft(tmp_path, tiny_tokenizer, bf16=True), []
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
    trainer.dry_step()
    assert set(seen) == {torch.bfloat16}


def test_a_dry_step_takes_the_longest_rows(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer)
    sizes = sorted((len(row["input_ids"]) for row in trainer.train_dataset), reverse=True)
    rows = memory_health.longest_rows(trainer.run, trainer.head, 4)
    assert [len(row.prompt_ids) + len(row.completions[0]) for row in rows] == sizes[:4]
    online = grpo(tmp_path / "online", tiny_tokenizer)
    longest = max(len(row.prompt_ids) for row in online._rows_of(list(online.train_dataset)))
    rows = memory_health.longest_rows(online.run, online.head, 8)
    assert [len(row.completions) for row in rows] == [4, 4]
    assert all(len(row.prompt_ids) == longest and set(map(len, row.completions)) == {8} for row in rows)


def test_on_a_cpu_a_dry_step_is_asked_for(tiny_tokenizer, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(memory_health, "dry_step", lambda run, head, optimizer, size=None: ran.append(size) or fake(1))
    sft(tmp_path / "a", tiny_tokenizer, max_steps=1).train()
    assert ran == []
    sft(tmp_path / "b", tiny_tokenizer, max_steps=1, dry_step=True).train()
    assert len(ran) == 1


def fake(tokens, *, failed=False, each=2**20):
    return DryStep(tokens * each, tokens * each, tokens, 0.0, failed)


def test_a_dry_step_that_needs_too_much_is_told_and_training_goes_on(tiny_tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(memory_health, "dry_step", lambda run, head, optimizer, size=None: fake(100))
    trainer = sft(tmp_path, tiny_tokenizer, dry_step=True, memory_limit_gib=0.05, max_steps=1)
    trainer.train()
    assert "PT-M003" in caplog.text and "100 MiB" in caplog.text
    assert trainer.state.global_step == 1


def test_out_of_memory_in_a_dry_step_is_seen_and_other_errors_are_not_hidden(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = sft(tmp_path, tiny_tokenizer)

    def fails(error):
        def raises(trainer, batch):
            raise error

        monkeypatch.setattr(memory_health, "_dry_pass", raises)
        return trainer.dry_step()

    assert fails(torch.OutOfMemoryError("CUDA out of memory")).failed
    assert fails(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    ).failed
    with raises(RuntimeError):
        fails(RuntimeError("shapes differ"))


# per_device_train_batch_size="auto" -----------------------------------------------------------------------------------


def limited(monkeypatch, most_tokens):
    """A device on which exactly this many tokens of a pass fit in what is planned with."""
    tried = []

    def dry_step(run, head, optimizer, size=None):
        batch = memory_health.largest_pass(run, head, size)
        tried.append(size)
        return fake(batch.input_ids.numel())

    limit = most_tokens * 2**20 * 10 // 9 + 2**19
    monkeypatch.setattr(memory_health, "dry_step", dry_step)
    monkeypatch.setattr(memory_health, "available_memory", lambda *_: Available(limit, limit, "a small device"))
    monkeypatch.setattr(memory_health, "in_use", lambda *_: 0)
    return tried


def equal_rows(count=64):
    import datasets

    return datasets.Dataset.from_list([{"input_ids": [5] * 20} for _ in range(count)])


@pytest.mark.parametrize(("fits", "chosen"), [(20, 1), (40, 2), (79, 2), (80, 4), (160, 8), (10_000, 16)])
def test_auto_finds_the_largest_batch_and_keeps_the_effective_one(tiny_tokenizer, tmp_path, monkeypatch, fits, chosen):
    tried = limited(monkeypatch, fits)
    trainer = sft(
        tmp_path, tiny_tokenizer, data=equal_rows(), per_device_train_batch_size="auto", gradient_accumulation_steps=2,
        max_row_tokens=400, max_steps=1,
    )  # fmt: skip
    trainer.train()
    args = trainer.args
    assert args.per_device_train_batch_size == trainer._train_batch_size == chosen
    assert args.gradient_accumulation_steps * chosen == 16
    assert trainer.state.log_history[0]["documents"] == 16
    assert len(tried) <= 3


def test_auto_trains_as_a_number_does(tiny_tokenizer, tmp_path, monkeypatch):
    limited(monkeypatch, 10_000)
    settings = {"data": equal_rows(), "gradient_accumulation_steps": 2, "max_steps": 2}
    found = sft(tmp_path / "a", tiny_tokenizer, per_device_train_batch_size="auto", **settings)
    found.train()
    settings |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    given = sft(tmp_path / "b", tiny_tokenizer, **settings)
    given.train()
    assert losses(found) == losses(given) and torch.equal(weights(found), weights(given))


def test_auto_keeps_groups_whole_at_the_generation_batch_alone(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine="native", per_device_train_batch_size="auto", gradient_accumulation_steps=2,
        num_generations=8, max_row_tokens=600,
    )  # fmt: skip
    longest = len(memory_health.longest_rows(trainer.run, trainer.head, 1)[0].prompt_ids)
    limited(monkeypatch, longest + 4 * 8)  # Half a group of completions of 8 tokens.
    before = trainer.args.generation_batch_size
    trainer.train()
    args = trainer.args
    assert args.per_device_train_batch_size == 4  # Not a multiple of the group.
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 16
    assert args.per_device_train_batch_size * args.steps_per_generation == args.generation_batch_size == before == 16
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["documents"] == 16


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sft", "dpo", "rloo", "online_dpo", "ppo", "a2po"])
def test_auto_leaves_the_gradient_and_what_a_step_holds(kind, tiny_tokenizer, tmp_path, monkeypatch):
    def by_length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    tiny_tokenizer.pad_token = "<|endoftext|>"
    settings = {"gradient_accumulation_steps": 2, "train": data(kind, 32), "max_steps": 2, "reward_funcs": by_length}
    given = every(kind, tmp_path / "given", tiny_tokenizer, per_device_train_batch_size=8, **settings)
    given.train()
    limited(monkeypatch, 64)
    found = every(kind, tmp_path / "found", tiny_tokenizer, per_device_train_batch_size="auto", **settings)
    found.train()
    assert found.args.per_device_train_batch_size in (1, 2, 4)
    a, b = ([row for row in t.state.log_history if "loss" in row] for t in (given, found))
    for name in ("documents", "trained_tokens", "num_tokens", "loss", "grad_norm"):
        assert [row[name] for row in a] == pytest.approx([row[name] for row in b], rel=1e-3, abs=1e-5), name
    assert torch.allclose(weights(given), weights(found), atol=1e-5)


def test_all_ranks_take_the_smallest_size_that_any_found(tiny_tokenizer, tmp_path, monkeypatch):
    limited(monkeypatch, 10_000)
    trainer = sft(tmp_path, tiny_tokenizer, data=equal_rows(), per_device_train_batch_size="auto")
    monkeypatch.setattr(
        memory_health.parallel, "all_gather_objects", lambda items, _: [*items, 2]
    )  # As another rank says.
    memory_health.fit_memory(trainer.run, trainer.head, trainer.optimizer)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (2, 4)


def test_auto_with_real_steps_ends_with_a_size_that_fits(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, data=chats(), per_device_train_batch_size="auto", max_steps=1)
    trainer.train()
    assert trainer.args.per_device_train_batch_size == 8  # Nothing of this size is beyond this machine.


def test_auto_says_when_not_even_one_row_fits(tiny_tokenizer, tmp_path, monkeypatch):
    limited(monkeypatch, 10)
    trainer = sft(tmp_path, tiny_tokenizer, data=equal_rows(), per_device_train_batch_size="auto")
    with raises(ConfigError, "20"):
        trainer.train()


def test_auto_gives_kto_the_two_rows_that_its_baseline_compares(tiny_tokenizer, tmp_path, monkeypatch):
    longest = 30
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": "auto", "max_steps": 1}
    limited(monkeypatch, longest)  # Enough for one row.
    trainer = every("kto", tmp_path / "kto", tiny_tokenizer, train=data("kto", 16), **settings)
    assert longest < 2 * len(memory_health.longest_rows(trainer.run, trainer.head, 1)[0].prompt_ids) + 20
    assert memory_health.batch_sizes(trainer.args) == [2, 4, 8, 16]
    with raises(ConfigError, "2 rows fit"):
        trainer.train()
    unpaired = every(
        "kto", tmp_path / "apo", tiny_tokenizer, train=data("kto", 16), loss_type="apo_zero_unpaired", **settings
    )
    assert memory_health.batch_sizes(unpaired.args) == [1, 2, 4, 8, 16]


def test_auto_is_refused_where_the_size_is_part_of_the_loss(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, per_device_train_batch_size="auto", loss_type="bnpo")
    with raises(ConfigError):
        trainer.train()


@pytest.mark.parametrize("value", ["lots", "-3"])
def test_words_that_are_no_batch_size_are_refused(tiny_tokenizer, tmp_path, value):
    with raises(ConfigError, "'auto'"):
        sft(tmp_path, tiny_tokenizer, per_device_train_batch_size=value)


def test_far_too_large_steps_are_not_tried(tiny_tokenizer, tmp_path, monkeypatch):
    """A process that asks a CPU for too much is ended, not told."""
    tried = limited(monkeypatch, 20)
    trainer = sft(
        tmp_path, tiny_tokenizer, data=equal_rows(), per_device_train_batch_size="auto", gradient_accumulation_steps=4,
        max_row_tokens=2000, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert max(tried) * 20 <= 1.5 * 20 * 2


# Before a weight is loaded --------------------------------------------------------------------------------------------


def test_a_run_whose_weights_exceed_the_memory_is_refused(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "PT-M001"):
        sft(tmp_path, tiny_tokenizer, memory_limit_gib=0.0002)


def test_weights_that_cannot_fit_are_told_before_they_are_loaded(tiny_tokenizer, tiny_model_dir, tmp_path, monkeypatch):
    """In float32 with AdamW a model of 7B needs 112 GB, which was said once it had been read from the disk."""
    monkeypatch.setattr("posttrain.models.load.create_model_from_path", None)
    with raises(ConfigError, "PT-M001", "torch.float32"):
        sft(tmp_path, tiny_tokenizer, model=tiny_model_dir, memory_limit_gib=0.0002)


def test_a_run_that_is_likely_not_to_fit_is_warned_of_and_can_be_silenced(tiny_tokenizer, tmp_path, caplog):
    sft(tmp_path / "a", tiny_tokenizer, memory_limit_gib=0.01)  # The interpreter alone takes more.
    assert "PT-M002" in caplog.text and "posttrain estimate" in caplog.text
    caplog.clear()
    silence = {"estimate-exceeds-memory": "a test"}
    sft(tmp_path / "b", tiny_tokenizer, memory_limit_gib=0.01, silence_findings=silence)
    sft(tmp_path / "c", tiny_tokenizer)
    assert "PT-M" not in caplog.text


def counted(trainer, monkeypatch):
    """Bytes by component as they are compared with the memory."""
    told = []
    monkeypatch.setattr(checks, "check_estimate", lambda components, *_, **__: told.append(components))
    checks.compare_estimate(trainer.checks.context, trainer.method, Available(2**40, 2**40, "the GPU"))
    return told[0]


def test_weights_that_are_loaded_already_are_counted_as_they_are(tiny_tokenizer, tmp_path, monkeypatch):
    """A model object of 7B in bfloat16 trains on a GPU of 80 GB; counted in float32 it was refused."""
    whole = counted(sft(tmp_path, tiny_tokenizer), monkeypatch)
    half = sft(tmp_path, tiny_tokenizer, model=build_model(len(tiny_tokenizer)).bfloat16(), learning_rate=1e-2)
    found = counted(half, monkeypatch)
    assert found["weights"] == sum(p.nbytes for p in half.model.parameters()) == whole["weights"] // 2
    assert found["optimizer states"] == 2 * found["weights"]


def test_packed_weights_are_counted_as_they_are(tiny_tokenizer, tmp_path, monkeypatch):
    """An adapter on 8B packed weights fits a GPU of 24 GB; its base was counted in float32, 32 GB, and the run refused."""
    trainer = sft(tmp_path, tiny_tokenizer, peft_config=peft.LoraConfig(r=2, target_modules="all-linear"))
    for module in trainer.model.modules():
        if hasattr(module, "base_layer"):  # As whichever library packed the checkpoint holds them.
            packed = torch.zeros(module.base_layer.weight.numel() // 2, 1, dtype=torch.uint8)
            module.base_layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert counted(trainer, monkeypatch)["weights"] == sum(p.nbytes for p in trainer.model.parameters())


@pytest.mark.parametrize("part", ["an adapter", "one layer"])
def test_states_are_counted_of_what_is_trained_alone(tiny_tokenizer, tmp_path, monkeypatch, part):
    """A model that comes with its adapter, or frozen in part, was counted as one that is trained whole."""
    model = build_model(len(tiny_tokenizer))
    if part == "an adapter":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    else:
        model.model.layers[0].requires_grad_(False)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert counted(sft(tmp_path, tiny_tokenizer, model=model), monkeypatch)["optimizer states"] == 2 * trained


@pytest.mark.parametrize("part", ["optimizer", "param"])
def test_what_is_kept_on_the_host_is_no_reason_to_refuse_a_run(tiny_tokenizer, tmp_path, part):
    trainer = sft(tmp_path, tiny_tokenizer)
    context = dataclasses.replace(trainer.checks.context, args=copy.copy(trainer.args))
    vars(context.args)["memory_limit_gib"] = 1e-6
    look = lambda: [f for probe in (machine.weights_fit, machine.memory_fits) for f in probe(context)]  # noqa: E731
    assert [found.code for found in look()] == ["PT-M001", "PT-M001"]
    kept = {"zero_optimization": {"stage": 2, f"offload_{part}": {"device": "cpu"}}}
    vars(context.args)["deepspeed_plugin"] = SimpleNamespace(zero_stage=2, deepspeed_config=kept)
    assert look() == []


def test_a_model_on_several_devices_is_not_compared_with_one_of_them(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer)
    context = dataclasses.replace(trainer.checks.context, args=copy.copy(trainer.args))
    vars(context.args).update(memory_limit_gib=1e-6, model_init_kwargs={"device_map": "auto"})
    assert list(machine.weights_fit(context)) == []
    context.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 0}
    assert [found.code for found in machine.memory_fits(context)] == ["PT-M001"]
    context.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert list(machine.memory_fits(context)) == []


def test_a_second_call_of_train_does_not_ask_for_the_memory_that_its_states_fill(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = sft(tmp_path, tiny_tokenizer)
    monkeypatch.setattr(checkpoint, "gpu_memory", lambda device: (0, 2**30))
    trainer.checkpoints.args = SimpleNamespace(
        device=torch.device("cuda"), output_dir=str(tmp_path), save_strategy="no", optim="adamw_torch", deepspeed_plugin=None,
        fsdp_config=None,
    )  # fmt: skip
    for _ in range(2):
        trainer.checkpoints.take_folder(trainer.model, trainer.checks, resumed=False)
    trainer.checkpoints.lock.release()
    assert trainer.preflight.results["PT-L003"].runs == 1 and trainer.preflight.reported[-1].code == "PT-L003"


# Profiles -------------------------------------------------------------------------------------------------------------


def test_profiles_are_taken_after_the_third_step_and_logged(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", max_steps=4, num_train_epochs=9)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    told = [row for row in rows if "memory/peak_gib" in row]
    assert [row["step"] for row in told] == [3]
    assert 0 < told[0]["memory/peak_share"] < 1
    assert told[0]["health/rank_imbalance"] == 1.0
    assert 0 < told[0]["health/generation_share"] <= 1
    assert told[0]["health/tokens_per_second"] > 0


def test_the_longest_examples_are_the_longest():
    data = chats(40).map(lambda row, i: {"input_ids": [1] * ((7 * i) % 40)}, with_indices=True)
    assert [len(row["input_ids"]) for row in longest_examples(data, 3)] == [39, 38, 37]
    stream = data.to_iterable_dataset()
    assert [len(row["input_ids"]) for row in longest_examples(stream, 3)] == [39, 38, 37]
