"""Names of older releases run with one warning each, and compute what the present names compute."""

import copy
import re
import warnings
from pathlib import Path

import datasets
import pytest

import posttrain
from posttrain import (
    DataCollatorForCompletionOnlyLM,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    SFTConfig,
    SFTTrainer,
    get_kbit_device_map,
    is_peft_available,
    setup_chat_format,
)
from posttrain.compat.trl_names import rows
from posttrain.errors import ArgumentTypeError, ConfigError
from tests.conftest import build_model
from tests.methods.helpers import GROUPS, SHORT, count_a, prompts, scripted
from tests.methods.test_dpo import pairs

TEXTS = datasets.Dataset.from_list([{"body": f"row {i} with some words in it"} for i in range(8)])
BATCH = SHORT | {"per_device_train_batch_size": 4}


def sft_of_2023(folder, tokenizer):
    args = SFTConfig(
        folder, **BATCH, evaluation_strategy="no", warmup_ratio=0.0, logging_dir="logs", use_mps_device=False
    )
    options = {"max_seq_length": 6, "dataset_text_field": "body", "packing": False}
    return SFTTrainer(build_model(len(tokenizer)), args, tokenizer=tokenizer, train_dataset=TEXTS, **options)


def sft_now(folder, tokenizer):
    args = SFTConfig(folder, **BATCH, max_length=6, dataset_text_field="body")
    return SFTTrainer(build_model(len(tokenizer)), args, processing_class=tokenizer, train_dataset=TEXTS)


def dpo_of_2024(folder, tokenizer):
    args = DPOConfig(folder, **BATCH, overwrite_output_dir=True)
    return DPOTrainer(
        build_model(len(tokenizer)), None, args, tokenizer=tokenizer, train_dataset=pairs(), beta=0.3, max_length=64
    )


def dpo_now(folder, tokenizer):
    args = DPOConfig(folder, **BATCH, beta=0.3, max_length=64)
    return DPOTrainer(build_model(len(tokenizer)), None, args, processing_class=tokenizer, train_dataset=pairs())


def grpo_of_2025(folder, tokenizer):
    args = GRPOConfig(folder, **GROUPS, max_prompt_length=9)
    return GRPOTrainer(
        build_model(len(tokenizer)), count_a, args, prompts(), processing_class=tokenizer, rollout_engine=scripted()
    )


@pytest.mark.parametrize(
    ("old", "now", "warned"),
    [
        (sft_of_2023, sft_now, {"evaluation_strategy", "warmup_ratio", "logging_dir", "use_mps_device", "tokenizer",
                                "max_seq_length", "dataset_text_field", "packing"}),
        (dpo_of_2024, dpo_now, {"overwrite_output_dir", "tokenizer", "beta", "max_length"}),
    ],
)  # fmt: skip
def test_a_script_of_an_older_release_has_the_loss_of_the_present_spelling(tmp_path, tiny_tokenizer, old, now, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        older = old(str(tmp_path / "old"), tiny_tokenizer)
    texts = [
        str(one.message) for one in caught if one.category is FutureWarning and "older releases" in str(one.message)
    ]
    assert sorted(text.split(": ")[1].split(" of ")[0] for text in texts) == sorted(warned)
    assert all(one.filename == __file__ for one in caught if "older releases" in str(one.message))
    present = now(str(tmp_path / "now"), tiny_tokenizer)
    older.train()
    present.train()
    losses = [[row["loss"] for row in run.state.log_history if "loss" in row] for run in (older, present)]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_max_prompt_length_keeps_the_end_of_a_prompt(tmp_path, tiny_tokenizer):
    trainer = grpo_of_2025(str(tmp_path), tiny_tokenizer)
    whole = trainer.prompt_source.tokenized(list(prompts(3)))
    assert trainer.prompt_source.token_ids(list(prompts(3))) == [prompt[-9:] for prompt in whole]
    assert max(map(len, whole)) > 9


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_two_spellings_with_different_values_are_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(ArgumentTypeError, match=r"max_length=4 and max_seq_length=3, its name in older releases"):
        SFTConfig(str(tmp_path), max_length=4, max_seq_length=3)
    args = DPOConfig(str(tmp_path), beta=0.1, **SHORT)
    with pytest.raises(ConfigError, match=r"beta is given twice: 0.1 in args and 0.3 as an argument"):
        DPOTrainer(
            build_model(len(tiny_tokenizer)), None, args, tokenizer=tiny_tokenizer, train_dataset=pairs(), beta=0.3
        )


def test_all_unknown_names_are_reported_at_once_with_their_replacements(tmp_path):
    with pytest.raises(ConfigError) as caught:
        SFTConfig(str(tmp_path), torch_dtype="auto", max_prompt_length=3, lerning_rate=1.0)
    text = str(caught.value)
    assert "'torch_dtype'. Fix: model_init_kwargs={'dtype': ...}" in text and "'max_prompt_length'. Fix: filter" in text
    assert "'lerning_rate' (did you mean 'learning_rate'?)" in text


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_options_of_the_first_rloo_are_those_of_the_present_one(tmp_path):
    config = RLOOConfig(str(tmp_path), rloo_k=4, kl_coef=0.2, response_length=12, cliprange=0.1, report_to="none")
    assert (config.num_generations, config.beta, config.max_completion_length, config.epsilon) == (4, 0.2, 12, 0.1)


def test_every_row_of_an_option_or_argument_says_what_happens():
    kinds = [row for row in rows() if row.kind in ("option", "argument")]
    assert len(kinds) > 40 and all(row.replacement for row in kinds)
    assert {row.action for row in kinds} == {"rename", "convert", "ignore", "keep", "refuse"}
    page = Path(posttrain.__file__).parents[1] / "docs" / "migration.md"
    documented = [line for line in page.read_text().splitlines() if line.startswith(("| `Config.", "| `Trainer."))]
    names = re.findall(r"^\| `(\w+\.\w+)` \| [\d.-]+ \| (?:runs|ignored|refused)", page.read_text(), flags=re.MULTILINE)
    assert documented and sorted(names) == sorted(row.name for row in kinds)


def test_the_collator_trains_what_follows_the_response_template(tmp_path, tiny_tokenizer):
    collator = DataCollatorForCompletionOnlyLM([7, 8], tokenizer=tiny_tokenizer)
    row = {"input_ids": [1, 7, 8, 5, 9, 7, 8, 6, 2]}
    assert collator([row, {"input_ids": [7, 8, 3]}])["labels"].tolist() == [
        [-100] * 7 + [6, 2],
        [-100, -100, 3] + [-100] * 6,
    ]
    turns = DataCollatorForCompletionOnlyLM([7, 8], [9], tokenizer=tiny_tokenizer)
    assert turns([row])["labels"].tolist() == [[-100, -100, -100, 5, -100, -100, -100, 6, 2]]
    with pytest.warns(UserWarning, match="is not in a row of 2 tokens, so the row has no loss"):
        assert collator([{"input_ids": [1, 2]}])["labels"].tolist() == [[-100, -100]]


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_the_collator_trains_rows_of_text_like_prompts_and_completions(tmp_path, tiny_tokenizer):
    parts = [(f"Question {i}?\n### Answer:\n", f"{i} and {i}") for i in range(8)]
    template = tiny_tokenizer.encode("### Answer:\n", add_special_tokens=False)
    losses = []
    for own in (True, False):
        rows = [{"text": a + b} if own else {"prompt": a, "completion": b} for a, b in parts]
        collator = DataCollatorForCompletionOnlyLM(template, tokenizer=tiny_tokenizer) if own else None
        trainer = SFTTrainer(
            build_model(len(tiny_tokenizer)),
            SFTConfig(str(tmp_path / str(own)), **BATCH),
            tokenizer=tiny_tokenizer,
            train_dataset=datasets.Dataset.from_list(rows),
            data_collator=collator,
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][1]


def test_setup_chat_format_gives_a_base_model_chatml(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    model, made = setup_chat_format(build_model(len(tokenizer)), tokenizer, resize_to_multiple_of=8)
    text = made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rows = model.get_input_embeddings().weight.shape[0]
    assert model.config.eos_token_id == made.convert_tokens_to_ids("<|im_end|>") and rows % 8 == 0 and rows >= len(made)
    with pytest.raises(ConfigError, match="already has a chat template"):
        setup_chat_format(model, made)
    assert is_peft_available() and (get_kbit_device_map() is None or list(get_kbit_device_map()) == [""])


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_old_values_without_an_equivalent_are_refused(tmp_path):
    """A ratio of 1 would be one step: transformers reads ``warmup_steps`` below 1 as a share only."""
    for name, value in (("warmup_ratio", 1.0), ("warmup_ratio", 1), ("save_safetensors", False)):
        with pytest.raises(ConfigError, match=f"{name}={value} has no equivalent. Fix: "):
            SFTConfig(str(tmp_path), report_to="none", **{name: value})
    for given in ({"warmup_ratio": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}):
        assert SFTConfig(str(tmp_path), report_to="none", **given).get_warmup_steps(100) == 10
