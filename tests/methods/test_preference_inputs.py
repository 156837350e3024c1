"""Bad input to the preference trainers, through the trainer and through the command line: what, where, both values, the fix."""

import json

import datasets
import pytest
import torch

from posttrain import (
    BCOConfig,
    BCOTrainer,
    ConfigError,
    CPOConfig,
    CPOTrainer,
    DataError,
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ModelError,
    ORPOConfig,
    ORPOTrainer,
    TPOConfig,
    TPOTrainer,
)
from posttrain.cli.main import main
from tests.conftest import build_model
from tests.extensions.experimental.test_ppo import ppo
from tests.methods.helpers import grpo
from tests.wordings import raises

METHODS = {
    "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "bco": (BCOTrainer, BCOConfig),
    "cpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig), "tpo": (TPOTrainer, TPOConfig),
}  # fmt: skip
COMPARED = ("dpo", "kto", "bco")
BASE = {"per_device_train_batch_size": 4, "max_steps": 1, "report_to": "none", "bf16": False, "save_strategy": "no"}


def rows(count=8, **changes):
    """Pairs with a gold answer: what every method but one of labelled rows can read."""
    made = [{"prompt": f"What is {i}? ", "chosen": "a number", "rejected": "an answer"} for i in range(count)]
    return [row | {"reference": "two numbers"} | changes for row in made]


def make(method, tokenizer, folder, data=None, model=None, settings=None, **given):
    trainer, config = METHODS[method]
    data = datasets.Dataset.from_list(rows() if data is None else data) if not hasattr(data, "column_names") else data
    model = build_model(len(tokenizer)) if model is None else model
    args = config(str(folder), **(BASE | (settings or {})))
    return trainer(model, args=args, train_dataset=data, **({"processing_class": tokenizer} | given))


def shell(method, model, folder, data, capsys, *flags):
    """Exit code and the message of a command."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    common = ["--model_name_or_path", model, "--dataset_name", str(path), "--output_dir", str(folder / "out")]
    code = main([method, *common, "--max_steps", "1", "--report_to", "none", "--bf16", "false", *flags])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
def test_answers_that_are_equal_everywhere_are_refused(tiny_tokenizer, tmp_path, method):
    match = (
        r"PT-D026: .*\(100 %\)"
        if method in ("kto", "bco")
        else r"all 8 rows of the train dataset are dropped: 8 with equal"
    )
    with pytest.raises(ValueError, match=match):
        make(method, tiny_tokenizer, tmp_path, rows(rejected="a number"))


def test_an_answer_judged_both_ways_is_told_with_its_rows(tiny_tokenizer, tmp_path, caplog):
    data = [{"prompt": f"{i} ", "completion": "a number", "label": i % 2 == 0} for i in range(6)]
    make("kto", tiny_tokenizer, tmp_path, [*data, data[1] | {"label": True}])
    assert (
        "PT-D026: the same answer to the same prompt is labeled good and bad in 2 of 7 rows (28.6 %) (rows 1, 6)"
        in (caplog.text)
    )


@pytest.mark.parametrize("method", ["kto", "bco"])
def test_p19_labels_that_are_strings_are_refused_by_row_and_value(
    tiny_tokenizer, tiny_model_dir, tmp_path, capsys, method
):
    data = [{"prompt": f"{i} ", "completion": "a number", "label": "False" if i == 2 else "True"} for i in range(4)]
    with raises(DataError, "row 0", "'label'", "'True'"):
        make(method, tiny_tokenizer, tmp_path, data)
    code, message = shell(method, tiny_model_dir, tmp_path, data, capsys)
    assert code == 1
    assert "row 0, column 'label': 'True' must be True or False" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("method", COMPARED)
def test_p44_a_reference_with_another_vocabulary_is_refused_with_both_sizes(tiny_tokenizer, tmp_path, method):
    size = len(tiny_tokenizer)
    with pytest.raises(ModelError, match=f"has {size + 8} embeddings and the model has {size},.*resize"):
        make(method, tiny_tokenizer, tmp_path, ref_model=build_model(size + 8))


@pytest.mark.parametrize("method", COMPARED)
def test_a_reference_without_a_language_model_head_is_refused(tiny_tokenizer, tmp_path, method):
    from transformers import LlamaForSequenceClassification

    classifier = LlamaForSequenceClassification(build_model(len(tiny_tokenizer)).config)
    for given in (classifier, torch.nn.Linear(2, 2)):
        with pytest.raises(
            ModelError, match=f"ref_model is a {type(given).__name__}, which has no language-model head"
        ):
            make(method, tiny_tokenizer, tmp_path, ref_model=given)


LOSSES = [
    ("dpo", {"loss_type": "ipo"}), ("dpo", {"loss_type": "sppo_hard"}), ("cpo", {"loss_type": "ipo"}),
    ("cpo", {"loss_type": "simpo"}), ("tpo", {"loss_type": "ipo"}), ("tpo", {"loss_type": "tpo-l"}), ("kto", {}),
    ("bco", {}), ("orpo", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings"), LOSSES)
@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), "0.1"])
def test_p13_a_beta_that_is_not_above_zero_is_refused_in_the_config(tmp_path, method, settings, beta):
    with pytest.raises(ConfigError, match=f"beta={beta!r} must be .*above 0"):
        METHODS[method][1](str(tmp_path), beta=beta, **settings)


def test_beta_zero_on_the_command_line_is_one_line(tiny_model_dir, tmp_path, capsys):
    code, message = shell("dpo", tiny_model_dir, tmp_path, rows(), capsys, "--beta", "0", "--loss_type", "ipo")
    assert code == 1
    assert "beta=0.0 must be above 0" in message


@pytest.mark.parametrize("method", METHODS)
def test_p9_a_prompt_that_fills_max_length_leaves_no_answer_and_is_dropped_and_counted(
    tiny_tokenizer, tmp_path, method, caplog
):
    """All such rows: refused. Some: dropped with their number; every row that is left trains at least a token."""
    long = rows(4, prompt="What is the sum of two numbers? " * 4)
    with raises(DataError, "max_length"):
        make(method, tiny_tokenizer, tmp_path, long, settings={"max_length": 12})
    trainer = make(method, tiny_tokenizer, tmp_path, [*rows(6), *long], settings={"max_length": 24})
    assert trainer.reports["train"].dropped == {"whose prompt fills max_length": 8 if method in ("kto", "bco") else 4}
    assert "whose prompt fills max_length" in caplog.text
    assert all(sum(mask) > 0 for row in trainer.rows(list(trainer.train_dataset)) for mask in row.loss_masks)


def test_a_prompt_that_fills_max_length_on_the_command_line(tiny_model_dir, tmp_path, capsys):
    code, message = shell("dpo", tiny_model_dir, tmp_path, rows(), capsys, "--max_length", "2")
    assert code == 1
    assert "all 8 rows of the train dataset are dropped: 8 whose prompt fills max_length" in message


@pytest.mark.parametrize("method", METHODS)
def test_constructor_arguments_of_the_wrong_kind_are_named(tiny_tokenizer, tmp_path, method):
    trainer, config = METHODS[method]
    data = datasets.Dataset.from_list(rows())
    other = CPOConfig if method != "cpo" else DPOConfig
    with pytest.raises(TypeError, match=f"args must be a {config.__name__}, not {other.__name__}"):
        trainer(build_model(len(tiny_tokenizer)), args=other(str(tmp_path), **BASE), train_dataset=data)
    with raises(TypeError, "processing_class"):
        make(method, tiny_tokenizer, tmp_path, processing_class="gpt2")
    with pytest.raises(ValueError, match=f"{trainer.__name__} needs train_dataset, but it is None"):
        trainer(build_model(len(tiny_tokenizer)), args=config(str(tmp_path), **BASE), processing_class=tiny_tokenizer)
    with raises(TypeError, "peft_config"):
        make(method, tiny_tokenizer, tmp_path, peft_config={"r": 4})


def test_a_loaded_model_is_neither_quantised_nor_loaded_again(tiny_tokenizer, tmp_path, caplog):
    from transformers import BitsAndBytesConfig

    with raises(ConfigError, "quantization_config"):
        make("dpo", tiny_tokenizer, tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    make("dpo", tiny_tokenizer, tmp_path, settings={"model_init_kwargs": {"dtype": "float32"}})
    assert "model_init_kwargs is ignored, because the model was passed as an object" in caplog.text


def test_a_second_adapter_or_one_that_the_reference_would_follow_is_refused(tiny_tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj"])
    with raises(ValueError, "peft_config"):
        make(
            "dpo",
            tiny_tokenizer,
            tmp_path,
            model=get_peft_model(build_model(len(tiny_tokenizer)), lora),
            peft_config=lora,
        )
    with raises(ModelError, "sync_ref_model"):
        make("dpo", tiny_tokenizer, tmp_path, settings={"sync_ref_model": True}, peft_config=lora).train()


def test_streams_where_they_cannot_work(tiny_tokenizer, tmp_path, caplog):
    stream = datasets.Dataset.from_list(rows()).to_iterable_dataset()
    with raises(ConfigError, "train_dataset", "max_steps"):
        make("dpo", tiny_tokenizer, tmp_path, stream, settings={"max_steps": -1})
    for method in COMPARED:
        labelled = datasets.Dataset.from_list([{"prompt": "q ", "completion": "a", "label": True}] * 4)
        evaluation = {
            "held": (labelled if method != "dpo" else datasets.Dataset.from_list(rows())).to_iterable_dataset()
        }
        with raises(ConfigError, "precompute_ref_log_probs=True", "'held'"):
            settings = {"precompute_ref_log_probs": True}
            make(method, tiny_tokenizer, tmp_path, settings=settings, eval_dataset=evaluation)
    trainer = make("dpo", tiny_tokenizer, tmp_path, stream, settings={"accelerator_config": {"dispatch_batches": True}})
    assert trainer.args.accelerator_config.dispatch_batches is False
    assert "dispatch_batches=True is set to False: each rank reads train_dataset itself" in caplog.text


def test_a_pad_token_outside_the_vocabulary_is_refused(tiny_tokenizer, tmp_path):
    with raises(ValueError, "pad_token='<nope>'"):
        make("dpo", tiny_tokenizer, tmp_path, settings={"pad_token": "<nope>"})


def test_p37_rows_of_mixed_form_and_wrong_roles_are_refused_by_row(tiny_tokenizer, tmp_path):
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    good = {"prompt": [user], "chosen": [answer], "rejected": [answer | {"content": "b"}]}
    with raises(DataError, "row 3", "'rejected'", "'user'"):
        make("dpo", tiny_tokenizer, tmp_path, [good] * 3 + [good | {"rejected": [user]}])
    with pytest.raises(DataError, match="row 0"):
        make("dpo", tiny_tokenizer, tmp_path, [good | {"prompt": "q"}] * 2)
    with raises(DataError, "'chosen'", "'rejected'"):
        make("dpo", tiny_tokenizer, tmp_path, [{"prompt": "q", "chosen": "a"}] * 2)


def test_a_loss_that_is_not_known_on_the_command_line_names_the_nearest(tiny_model_dir, tmp_path, capsys):
    code, message = shell("dpo", tiny_model_dir, tmp_path, rows(), capsys, "--loss_type", "sigmoyd")
    assert code == 1
    assert "did you mean 'sigmoid'" in message


def test_p42_a_checkpoint_that_would_become_its_own_reference_is_told(tiny_tokenizer, tmp_path, caplog):
    make("dpo", tiny_tokenizer, tmp_path, settings={"save_strategy": "steps", "save_steps": 1}).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    caplog.clear()
    make("dpo", tiny_tokenizer, tmp_path / "b", model=checkpoint)
    assert f"loaded from the training checkpoint {checkpoint}," in caplog.text
    assert "pass ref_model" in caplog.text
    caplog.clear()
    make("dpo", tiny_tokenizer, tmp_path / "c", model=checkpoint, ref_model=build_model(len(tiny_tokenizer)))
    assert "the training checkpoint" not in caplog.text


def test_a_model_in_memory_is_no_checkpoint_of_the_folder_in_which_the_run_starts(
    tiny_tokenizer, tmp_path, caplog, monkeypatch
):
    (tmp_path / "trainer_state.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    make("dpo", tiny_tokenizer, tmp_path / "run", model=build_model(len(tiny_tokenizer)))
    assert "the training checkpoint" not in caplog.text


def test_p43_new_data_cannot_be_evaluated_when_the_reference_is_gone(tiny_tokenizer, tmp_path):
    trainer = make("dpo", tiny_tokenizer, tmp_path, settings={"precompute_ref_log_probs": True})
    trainer.train()
    with raises(ConfigError, "eval_dataset"):
        trainer.evaluate(datasets.Dataset.from_list(rows(3)))


@pytest.mark.parametrize("strategy", ["sequential", "random"])
def test_p16_rows_sorted_by_label_are_told_where_their_order_is_kept(tiny_tokenizer, tmp_path, caplog, strategy):
    data = [{"prompt": f"{i} ", "completion": "a number", "label": i < 30} for i in range(60)]
    settings = {"train_sampling_strategy": strategy, "per_device_train_batch_size": 2}
    make("kto", tiny_tokenizer, tmp_path, data, settings=settings)
    assert ("30 consecutive rows have the same label" in caplog.text) == (strategy == "sequential")


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_p22_answers_that_a_template_leaves_open_are_told(tiny_tokenizer, tmp_path, caplog, method):
    user = [{"role": "user", "content": "q"}]
    said = [[{"role": "assistant", "content": text}] for text in ("two", "three")]
    data = [{"prompt": user, "chosen": said[0], "rejected": said[1]}] * 4
    make(method, tiny_tokenizer, tmp_path, data)
    assert "PT-D004" not in caplog.text
    text = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}"
    tiny_tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    try:
        make(method, tiny_tokenizer, tmp_path, data)
    finally:
        tiny_tokenizer.chat_template = text
    assert "PT-D004" in caplog.text


def test_p8_answers_cut_at_max_length_are_told_above_ten_percent(tiny_tokenizer, tmp_path, caplog):
    data = rows(9) + rows(3, chosen="a number " * 20)
    make("dpo", tiny_tokenizer, tmp_path, data, settings={"max_length": 30})
    assert "in 3 of 12 rows, an answer was truncated to max_length=30" in caplog.text


def test_p33_the_reference_has_the_policy_s_dtype(tiny_tokenizer, tmp_path):
    trainer = make("dpo", tiny_tokenizer, tmp_path, model=build_model(len(tiny_tokenizer)).bfloat16())
    assert {p.dtype for p in trainer.reference.copy.parameters()} == {torch.bfloat16}


def test_p6_an_adapter_of_any_name_is_its_own_reference(tiny_tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(build_model(len(tiny_tokenizer)), lora, adapter_name="mine")
    trainer = make("dpo", tiny_tokenizer, tmp_path, model=model, settings={"logging_steps": 1})
    trainer.train()
    assert trainer.reference.adapter == "ref"
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_p6_an_adapter_on_parameters_is_copied_like_any_other(tiny_tokenizer, tmp_path):
    """`target_parameters` wrap a weight and not a module; with random adapter weights, adapters off would be another model."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False)
    model = get_peft_model(build_model(len(tiny_tokenizer)), lora)
    trainer = make("dpo", tiny_tokenizer, tmp_path, model=model, settings={"logging_steps": 1})
    trainer.train()
    assert trainer.reference.adapter == "ref"
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert trainer.state.log_history[0]["grad_norm"] > 0


@pytest.mark.parametrize("method", ["dpo", "orpo", "grpo", "ppo"])
def test_columns_of_images_are_refused_and_not_left_aside(method, tiny_tokenizer, tmp_path):
    """An answer to a picture that the model never saw would teach it to make things up."""
    data = datasets.Dataset.from_list(rows(16, images=["a.png"]))
    tiny_tokenizer.pad_token = "<|endoftext|>"
    # DPO and GRPO read images, with a processor.
    text = (
        "rows have images, but processing_class is .*AutoProcessor"
        if method in ("dpo", "grpo")
        else r"have images \(columns \['images'\]\).*remove_columns"
    )
    with pytest.raises(DataError, match=text):
        if method in METHODS:
            make(method, tiny_tokenizer, tmp_path, data=data)
        else:
            {"grpo": grpo, "ppo": ppo}[method](tmp_path, tiny_tokenizer, data=data)
