"""`posttrain estimate`: what it says about a config, its exit codes, and what it does without data."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.checks.memory import PLANNED_SHARE, Lengths, plan
from posttrain.cli.commands import TRAINING
from posttrain.cli.main import main
from posttrain.cli.train import parser_for
from posttrain.extensions.estimate.estimate import DOES_NOT_FIT
from posttrain.models import memory_estimate
from tests.conftest import build_model


@pytest.fixture(autouse=True, scope="module")
def _traced_once():
    """A pass that another test traced, of an equal model and equal batches, holds what it held."""
    known, largest = {}, memory_estimate._largest_pass

    def described(config):
        return type(config), config._attn_implementation, config.to_dict() | {"_name_or_path": ""}

    def remembered(work, shadow, **options):
        # All that `Shadow` and a trace are made of; pickles of unequal values are unequal.
        models = [part and replace(part, config=described(part.config)) for part in (work.policy, work.critic)]
        told = (models, work.value_head, work.checkpointing, work.kept_layers, sorted(work.needs), work.autocast)
        key = pickle.dumps((told, work.batches, work.pixels, sorted(options.items())))
        if key not in known:
            known[key] = largest(work, shadow, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate, "_largest_pass", remembered)
        yield


@pytest.fixture
def tiny_model(tiny_tokenizer):
    """One layer is traced in half the time of two."""
    return build_model(len(tiny_tokenizer), num_hidden_layers=1)


@pytest.fixture
def config(tiny_model_dir, tmp_path):
    """Writes a YAML file for a trainer; returns its path."""

    def write(**settings):
        import yaml

        base = {
            "model_name_or_path": tiny_model_dir,
            "output_dir": str(tmp_path / "out"),
            "report_to": "none",
            "bf16": False,
            "per_device_train_batch_size": 2,  # Each sequence is traced.
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(base | settings))
        return str(path)

    return write


def said(capsys, *argv):
    code = main(["estimate", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def pairs(path, sizes):
    rows = [{"prompt": "What is it?", "chosen": "a" * n, "rejected": "b" * (n // 2)} for n in sizes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.matrix
@pytest.mark.slow
def test_lengths_come_from_the_longest_row_of_the_data(config, tmp_path, capsys):
    file = config(dataset_name=pairs(tmp_path / "pairs.jsonl", [5, 60, 9]), per_device_train_batch_size=2)
    code, found = said(capsys, "dpo", "--config", file)
    assert code == 0 and found["fits"]
    assert found["lengths"]["completion"] >= 50
    assert found["lengths"]["source"] == "the longest row of the data"
    assert found["components"]["reference"] == found["components"]["weights"]
    assert found["peak"] == sum(found["components"].values())


def test_without_data_the_config_says_the_lengths_and_a_note_tells(config, capsys):
    file = config(dataset_name="nowhere.jsonl", max_length=128)
    code, found = said(capsys, "sft", "--config", file)
    assert code == 0
    assert found["lengths"]["prompt"] + found["lengths"]["completion"] == 128
    assert any("the data was not read" in note for note in found["notes"])


def test_what_does_not_fit_ends_with_78_and_says_what_would_help(config, capsys):
    file = config(memory_limit_gib=0.001, per_device_train_batch_size=2)
    code = main(["estimate", "dpo", "--config", file, "--prompt_tokens", "20", "--completion_tokens", "30"])
    screen = capsys.readouterr().out
    assert code == DOES_NOT_FIT == 78
    assert "does not fit" in screen
    for change in ("use_peft: true", "optim: adafactor", "precompute_ref_log_probs: true"):
        assert change in screen


@pytest.mark.matrix
@pytest.mark.slow
def test_the_screen_names_components_moments_and_the_batch(config, capsys):
    file = config(max_completion_length=16, num_generations=4, per_device_train_batch_size=4, reward_funcs="x.y")
    code = main(["estimate", "grpo", "--config", file, "--prompt_tokens", "20"])
    screen = capsys.readouterr().out
    assert code == 0
    for part in ("weights", "optimizer states", "total", "largest batch that fits", "generation:"):
        assert part in screen, part


@pytest.mark.matrix
@pytest.mark.slow
def test_the_largest_batch_fits_and_a_larger_one_does_not(config, capsys, monkeypatch):
    monkeypatch.setattr("posttrain.models.memory.in_use", lambda device: 0)

    def estimated(rows, **settings):
        return said(capsys, "sft", "--config", config(max_length=64, per_device_train_batch_size=rows, **settings))[1]

    limit = {"memory_limit_gib": (estimated(6)["peak"] + 1000) / PLANNED_SHARE / 2**30}
    found = estimated(2, **limit)
    assert found["fits"] and not found["larger_batch_is_bound"] and found["larger_batch"] in (5, 6)
    assert estimated(found["larger_batch"], **limit)["fits"] and not estimated(7, **limit)["fits"]
    assert estimated(8, memory_limit_gib=1.0)["larger_batch"] is None  # Passes are limited by tokens.
    assert estimated(7, **limit)["larger_batch"] == 0


@pytest.mark.matrix
@pytest.mark.slow
def test_options_of_the_trainer_change_the_answer(config, capsys):
    file = config(max_length=64)
    full = said(capsys, "sft", "--config", file)[1]
    sgd = said(capsys, "sft", "--config", file, "--optim", "sgd")[1]
    lora = said(capsys, "sft", "--config", file, "--use_peft", "--lora_target_modules", "q_proj")[1]
    assert full["components"]["optimizer states"] == 8 * full["trainable"]
    assert "optimizer states" not in sgd["components"]
    assert lora["trainable"] < full["trainable"] / 10


@pytest.mark.matrix
@pytest.mark.slow
def test_auto_is_taken_on_the_command_line_and_in_files(config, capsys):
    file = config(per_device_train_batch_size="auto", max_length=64, gradient_accumulation_steps=2)
    found = said(capsys, "sft", "--config", file)[1]
    assert found["batch_size"] * found["accumulation"] == 16
    (_, args, *_) = parser_for("sft").parse_args_and_config(
        ["--per_device_train_batch_size", "auto", "--output_dir", "x"]
    )
    assert args.auto_batch_size and args.per_device_train_batch_size == 8
    (_, args, *_) = parser_for("sft").parse_args_and_config(["--per_device_train_batch_size", "3", "--output_dir", "x"])
    assert not args.auto_batch_size and args.per_device_train_batch_size == 3


# Completions of a dataset row, whether a reference is in memory, and what is asked of a forward pass, by hand.
METHODS = {
    "sft": (1, False), "reward": (2, False), "dpo": (2, True), "kto": (1, True), "bco": (1, True), "cpo": (2, False),
    "orpo": (2, False), "tpo": (3, False), "grpo": (0, False), "gmpo": (0, False), "async-grpo": (0, False),
    "rloo": (0, True), "a2po": (0, True), "ppo": (0, True), "online-dpo": (0, True),
    "server-distillation": (0, False), "async-distillation": (0, False),
    **dict.fromkeys(("distill", "distillation", "gkd", "gold", "minillm", "iw-opd", "sdft", "sdpo", "ssd"), (0, False)),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("trainer", sorted(TRAINING))
def test_each_trainer_has_a_plan(trainer, tmp_path):
    from posttrain.models.memory_estimate import estimate_memory

    few = {"per_device_train_batch_size": 2, "num_generations": 2}  # Each sequence is traced.
    fields = TRAINING[trainer].trainer.config_class.__dataclass_fields__
    asked = {name: value for name, value in few.items() if name in fields and fields[name].default != 1}
    told = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    (_, args, *_) = parser_for(trainer).parse_args_and_config(["--output_dir", str(tmp_path), "--bf16", "false", *told])
    method = TRAINING[trainer].trainer.METHOD(args)
    work = plan(method, build_model(100, num_hidden_layers=1).config, lengths=Lengths(8, 8))
    found, (answers, compared) = estimate_memory(work), METHODS[trainer]
    assert found.peak > 0
    assert method.traits.samples == (answers == 0) and ("reference" in found.standing) == compared
    assert ("generation" in found.moments) == (answers == 0 and not trainer.startswith("async-"))
    sequences = {"online-dpo": 4}.get(trainer, 2 * max(answers, 1))
    assert sum(batch.num_sequences for batch in work.batches) == sequences


def test_unknown_trainers_and_missing_models_are_named(capsys):
    assert main(["estimate", "grop"]) == 1
    assert "grpo" in capsys.readouterr().err
    assert main(["estimate", "sft", "--output_dir", "x"]) == 1
    assert "--model_name_or_path is missing" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.slow
def test_a_teacher_is_counted_where_it_is_in_memory(config, tiny_model_dir, capsys):
    def components(command, **settings):
        few = {"num_generations": 2} if command in ("sdft", "ssd") else {}
        file = config(dataset_name="x.jsonl", max_completion_length=32, **few, **settings)
        return said(capsys, command, "--config", file)[1]["components"]

    own = {"teacher_model_init_kwargs": {"dtype": "float32"}}
    named = components("gkd", teacher_model_name_or_path=tiny_model_dir, **own)
    half = {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    assert named["teacher"] == named["weights"]
    assert 2 * components("gkd", teacher_model_name_or_path=tiny_model_dir, **half)["teacher"] == named["teacher"]
    assert components("sdft")["teacher"] == named["weights"] and "teacher" not in components("sdft", use_peft=True)
    far = {"teacher_model_server_url": "http://teacher", "loss_top_k": 1}
    two = components("distill", teacher_model_name_or_path={"a": tiny_model_dir, "b": tiny_model_dir}, **own)
    assert two["teacher a"] == two["teacher b"] == named["teacher"] and "teacher" not in two
    assert "teacher" not in components("distill", **far) and "teacher" not in components("ssd")


def test_a_completion_alone_leaves_the_prompt_as_it_was_assumed(config, capsys):
    _, found = said(
        capsys, "grpo", "--config", config(num_generations=2, max_completion_length=8), "--completion_tokens", "8"
    )
    assert (found["lengths"]["prompt"], found["lengths"]["completion"]) == (256, 8)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_checkpoint_that_was_saved_packed_is_counted_packed(config, tiny_model_dir, capsys):
    file, sizes = config(use_peft=True, lora_target_modules=["q_proj"]), []
    for packed in (None, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        path = Path(tiny_model_dir, "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | ({"quantization_config": packed} if packed else {})))
        sizes.append(said(capsys, "sft", "--config", file, "--completion_tokens", "8")[1]["components"]["weights"])
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("given", ["-5", "0", "many"])
def test_lengths_that_are_none_are_refused(given, capsys):
    assert main(["estimate", "sft", f"--prompt_tokens={given}"]) == 2
    assert f"'{given}' is not a positive number of tokens" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "shards"),
    [
        (["--num_processes", "4"], (1, 1, 1)),
        (["--accelerate_config", "fsdp2", "--num_processes", "4"], (4, 4, 4)),
        (["--accelerate_config", "fsdp1", "--num_processes", "2"], (2, 2, 2)),
        (["--accelerate_config", "zero2", "--num_processes", "4"], (1, 4, 4)),
        (["--accelerate_config", "zero1", "--num_processes", "4"], (1, 1, 4)),
    ],
)
def test_the_processes_that_a_launcher_would_start_are_counted(config, capsys, flags, shards):
    one = said(capsys, "sft", "--config", config())[1]
    many = said(capsys, "sft", "--config", config(), *flags)[1]
    for name, share in zip(("weights", "optimizer states"), (shards[0], shards[2]), strict=True):
        assert many["components"][name] == one["components"][name] // share, name
    gradients = one["components"]["weights"]
    assert many["moments"]["optimizer step"]["gradients"] == gradients // shards[1]
    assert many["components"].get("gradient buckets", 0) == (gradients if shards[1] == 1 else 0)
    assert f"one of {flags[-1]} processes" in many["notes"][0]
