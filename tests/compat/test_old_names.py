"""Names of older releases run with one warning each, and compute what the present names compute."""

import copy
import dataclasses
import re
import warnings
from dataclasses import dataclass, field

import datasets
import pytest
import torch
from transformers import TrainingArguments

from posttrain import (
    CPOConfig,
    DataCollatorForCompletionOnlyLM,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ORPOConfig,
    PPOConfig,
    RLOOConfig,
    SFTConfig,
    SFTTrainer,
    get_kbit_device_map,
    is_peft_available,
    setup_chat_format,
)
from posttrain.errors import ArgumentTypeError, ConfigError
from posttrain.loop.build import as_config
from tests.conftest import build_model
from tests.methods.helpers import GROUPS, SHORT, count_a, prompts, scripted
from tests.methods.test_dpo import dpo, pairs

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


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_max_prompt_length_of_preference_rows_keeps_the_end_of_a_prompt(tmp_path, tiny_tokenizer, mode):
    def of(folder, **settings):
        args = DPOConfig(str(tmp_path / folder), **SHORT, truncation_mode=mode, **settings)
        data, model = pairs(), build_model(len(tiny_tokenizer))
        return DPOTrainer(model, None, args, train_dataset=data, processing_class=tiny_tokenizer).train_dataset

    whole, older = of("whole"), of("older", max_prompt_length=2)
    assert min(map(len, whole["prompt_ids"])) > 2
    assert [row[-2:] for row in whole["prompt_ids"]] == list(older["prompt_ids"])
    assert list(whole["chosen_ids"]) == list(older["chosen_ids"])


def test_dataset_kwargs_of_older_releases_are_ignored_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="append_concat_token"):
        SFTConfig(str(tmp_path), dataset_kwargs={"append_concat_token": False})
    with pytest.raises(ConfigError, match="unknown keys"):
        SFTConfig(str(tmp_path), dataset_kwargs={"concat": False})


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_two_spellings_with_different_values_are_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(ArgumentTypeError, match=r"max_length=4 and max_seq_length=3, the older name of max_length"):
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
    assert "torch_dtype" not in text and "'max_prompt_length'. Fix: filter" in text
    assert "'lerning_rate' (did you mean 'learning_rate'?)" in text


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_options_of_the_first_rloo_are_those_of_the_present_one(tmp_path):
    config = RLOOConfig(str(tmp_path), rloo_k=4, kl_coef=0.2, response_length=12, cliprange=0.1, report_to="none")
    assert (config.num_generations, config.beta, config.max_completion_length, config.epsilon) == (4, 0.2, 12, 0.1)


@pytest.mark.parametrize(
    ("cls", "old", "now"),
    [
        (SFTConfig, {"max_seq_length": 6}, {"max_length": 6}),
        (SFTConfig, {"max_seq_length": None}, {"max_length": 1024}),
        (SFTConfig, {"use_liger": False}, {"use_liger_kernel": False}),
        (SFTConfig, {"torch_dtype": "bfloat16"}, {"model_init_kwargs": {"dtype": "bfloat16"}}),
        (SFTConfig, {"torch_dtype": "auto", "model_init_kwargs": {"revision": "a"}}, {"model_init_kwargs": {"revision": "a", "dtype": "auto"}}),
        (SFTConfig, {"overwrite_output_dir": True}, {}),
        (SFTConfig, {"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        (SFTConfig, {"group_by_length": False}, {"train_sampling_strategy": "random"}),
        (SFTConfig, {"adafactor": True}, {"optim": "adafactor"}),
        (DPOConfig, {"rpo_alpha": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        (DPOConfig, {"rpo_alpha": 2.0, "loss_type": ["ipo", "hinge"], "loss_weights": [1.0, 3.0]},
         {"loss_type": ["ipo", "hinge", "sft"], "loss_weights": [1.0, 3.0, 2.0]}),
        (DPOConfig, {"rpo_alpha": None}, {"loss_type": ["sigmoid"], "loss_weights": None}),
        (DPOConfig, {"reference_free": False}, {}), (DPOConfig, {"generate_during_eval": False}, {}),
        (SFTConfig, {"max_prompt_length": None}, {}), (DPOConfig, {"label_pad_token_id": -100}, {}),
        (GRPOConfig, {"use_liger_loss": True}, {"use_liger_kernel": False}),
        (GRPOConfig, {"vllm_max_model_len": 64}, {"vllm_max_model_length": 64}),
        (GRPOConfig, {"wandb_log_unique_prompts": True}, {"log_unique_prompts": True}),
        (GRPOConfig, {"vllm_device": "auto"}, {}), (RLOOConfig, {"stop_token": "eos"}, {}), (CPOConfig, {"max_target_length": 9}, {}),
        (ORPOConfig, {"max_target_length": 9}, {}), (DPOConfig, {"max_target_length": 9}, {}),
        (RLOOConfig, {"num_ppo_epochs": 3}, {"num_iterations": 3}), (RLOOConfig, {"token_level_kl": False}, {}),
        (PPOConfig, {"ppo_epochs": 3, "init_kl_coef": 0.3}, {"num_ppo_epochs": 3, "kl_coef": 0.3}),
    ],
)  # fmt: skip
def test_an_old_option_runs_as_the_present_one_with_one_warning(tmp_path, cls, old, now):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = cls(str(tmp_path), report_to="none", **old)
    texts = [str(one.message) for one in caught if one.category is FutureWarning]
    older = [name for name in old if f"{cls.__name__}: {name} of older releases is " in "".join(texts)]
    assert len(texts) == len(older) == len(old.keys() - {"model_init_kwargs", "loss_type", "loss_weights"})
    defaults = cls(str(tmp_path), report_to="none")
    for name in now:
        assert getattr(config, name) == now[name], name
    different = {
        item.name for item in dataclasses.fields(cls) if getattr(config, item.name) != getattr(defaults, item.name)
    }
    assert different <= set(now)


@pytest.mark.parametrize(
    ("cls", "old", "fix"),
    [
        (SFTConfig, {"max_prompt_length": 5}, "filter the data, or set max_length"),
        (DPOConfig, {"generate_during_eval": True}, "use LogCompletionsCallback"),
        (GRPOConfig, {"vllm_device": "cuda:1"}, "delete it if use_vllm is False. Otherwise set vllm_mode='server'"),
        (RLOOConfig, {"stop_token": "x"}, "completions end at EOS without it. For other stops set generation_kwargs"),
        (PPOConfig, {"non_eos_penalty": True}, "remove it. It replaced the score of a completion without EOS"),
        (RLOOConfig, {"token_level_kl": True}, "leave it out: the KL penalty"),
        (RLOOConfig, {"total_episodes": 9}, "set max_steps=total_episodes * num_iterations / (per_device"),
        (PPOConfig, {"model_name": "gpt2"}, "pass the model to PPOTrainer"),
        (PPOConfig, {"batch_size": 8}, "set per_device_train_batch_size"),
    ],
)
def test_an_old_option_without_an_equivalent_is_refused_with_the_way_to_go(tmp_path, cls, old, fix):
    (name,) = old
    with pytest.raises(ConfigError, match=f"no argument '{name}'. Fix: {re.escape(fix)}"):
        cls(str(tmp_path), report_to="none", **old)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (lambda folder: ModelConfig(dtype="bfloat16"), "torch_dtype", "bfloat16"),
        (lambda folder: SFTConfig(folder, report_to="none", max_length=7), "max_seq_length", 7),
        (lambda folder: SFTConfig(folder, report_to="none"), "use_liger", False),
        (lambda folder: SFTConfig(folder, report_to="none"), "group_by_length", False),
        (
            lambda folder: SFTConfig(folder, report_to="none", model_init_kwargs={"dtype": "auto"}),
            "torch_dtype",
            "auto",
        ),
        (lambda folder: SFTConfig(folder, report_to="none"), "torch_dtype", None),
    ],
)
def test_an_old_attribute_of_a_config_is_read_with_one_warning(tmp_path, config, name, value):
    made = config(str(tmp_path))
    with pytest.warns(FutureWarning, match=f"{name} of older releases is now ") as caught:
        assert getattr(made, name) == value
    assert len(caught) == 1 and caught[0].filename == __file__


def test_an_old_attribute_without_an_equivalent_names_what_replaces_it(tmp_path):
    config = DPOConfig(str(tmp_path), report_to="none")
    with pytest.raises(AttributeError, match=r"'reference_free': an option of older releases. Instead: use CPOTrainer"):
        config.reference_free  # noqa: B018
    assert not hasattr(config, "no_such_name") and not hasattr(ModelConfig(), "evaluation_strategy")


def test_trainers_have_their_older_attribute_for_the_tokenizer(tmp_path, tiny_tokenizer):
    trainer = sft_now(str(tmp_path), tiny_tokenizer)
    assert trainer.tokenizer is trainer.processing_class


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_model_config_has_its_older_options():
    assert ModelConfig().trust_remote_code is False
    config = ModelConfig(trust_remote_code=True, torch_dtype="bfloat16")
    assert config.trust_remote_code is True and config.dtype == "bfloat16"
    kwargs = config.model_init_kwargs()
    assert kwargs["trust_remote_code"] is True and kwargs["dtype"] == "bfloat16"
    with pytest.raises(ArgumentTypeError, match=r"no argument 'lora_rank' \(did you mean 'lora_r'"):
        ModelConfig(lora_rank=3)
    with pytest.raises(ArgumentTypeError, match="dtype='auto' and torch_dtype='float16', the older name of dtype"):
        ModelConfig(dtype="auto", torch_dtype="float16")


@dataclass
class OwnConfig(GRPOConfig):
    """A config as open-r1 subclasses it."""

    benchmarks: list[str] = field(default_factory=list)


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_a_dataclass_on_top_of_a_config_accepts_old_names_too(tmp_path):
    config = OwnConfig(str(tmp_path), report_to="none", benchmarks=["a"], evaluation_strategy="no", max_prompt_length=9)
    assert config.benchmarks == ["a"] and config.eval_strategy == "no" and vars(config)["max_prompt_length"] == 9
    with pytest.raises(ConfigError, match="no argument 'vllm_device'"):
        OwnConfig(str(tmp_path), report_to="none", vllm_device="cuda:1")


@dataclass
class OfHandbook(TrainingArguments):
    """A config as the alignment handbook defines it."""

    hub_model_revision: str | None = field(default="main")


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_an_own_field_with_an_old_name_replaces_an_option_that_is_not_set(tmp_path):
    args = OfHandbook(str(tmp_path), report_to="none")
    assert as_config(DPOConfig, args).hub_revision == "main"
    args.hub_revision = "other"
    with pytest.raises(ArgumentTypeError, match="hub_revision='other' and hub_model_revision='main'"):
        as_config(DPOConfig, args)


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_rpo_alpha_adds_the_mean_log_likelihood_of_the_chosen_tokens(tmp_path, tiny_tokenizer):
    losses = []
    for alpha in (None, 0.7):
        trainer = dpo(tmp_path / str(alpha), tiny_tokenizer, rpo_alpha=alpha)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    model, total, count = build_model(len(tiny_tokenizer)), 0.0, 0
    for row in trainer.train_dataset:
        prompt, answer = list(row["prompt_ids"]), list(row["chosen_ids"])
        logps = model(torch.tensor([prompt + answer])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        total, count = total - float(logps.gather(1, torch.tensor(answer)[:, None]).sum()), count + len(answer)
    assert losses[1] - losses[0] == pytest.approx(0.7 * total / count, rel=1e-4)


def test_the_collator_trains_what_follows_the_response_template(tmp_path, tiny_tokenizer):
    collator = DataCollatorForCompletionOnlyLM([7, 8], tokenizer=tiny_tokenizer)
    row = {"input_ids": [1, 7, 8, 5, 9, 7, 8, 6, 2]}
    assert collator([row, {"input_ids": [7, 8, 3]}])["labels"].tolist() == [
        [-100] * 7 + [6, 2],
        [-100, -100, 3] + [-100] * 6,
    ]
    turns = DataCollatorForCompletionOnlyLM([7, 8], [9], tokenizer=tiny_tokenizer)
    assert turns([row])["labels"].tolist() == [[-100, -100, -100, 5, -100, -100, -100, 6, 2]]
    with pytest.warns(UserWarning, match="does not occur in a row of 2 tokens, so the row has no loss"):
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
        with pytest.raises(ConfigError, match=f"no argument '{name}={value}'. Fix: "):
            SFTConfig(str(tmp_path), report_to="none", **{name: value})
    for given in ({"warmup_ratio": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}):
        assert SFTConfig(str(tmp_path), report_to="none", **given).get_warmup_steps(100) == 10
