"""Small runs of real trainers."""

from __future__ import annotations

import datasets

from posttrain import GRPOConfig, GRPOTrainer, ScriptedEngine, SFTConfig, SFTTrainer
from tests.conftest import build_model
from tests.ranks import weights as weights


def prompts(count=16):
    """Conversational prompts of different lengths with a column for the reward."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} {'and so on ' * (i % 3)}?"}], "answer": i}
        for i in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def count_a(completions, **_):
    """A reward with spread: how many letters a text has, and how often 'a'."""
    return [len(c[0]["content"]) % 5 + c[0]["content"].count("a") for c in completions]


def every_second(answer, **_):
    """A reward without spread in the whole group of every second prompt."""
    return [float(number % 2 and index % 2) for index, number in enumerate(answer)]


def scripted(stop=2):
    """Completions that depend on the prompt and the index alone, of uneven lengths, most of them ended."""

    def line(prompt_ids, index):
        start = sum(prompt_ids) + 7 * index
        length = 1 + (start * 31 + index) % 6
        body = [3 + (start + 13 * k) % 250 for k in range(length)]
        return body if index % 4 == 3 else [*body, stop]

    return ScriptedEngine(line)


# What every trainer of a short test is given.
SHORT = {
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": "none",
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 7,
    "lr_scheduler_type": "constant",
}
GROUPS = SHORT | {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}


def grpo_args(folder, **settings):
    """Arguments of a run that takes a second."""
    return GRPOConfig(str(folder), **(GROUPS | settings))


def grpo(folder, tokenizer, model=None, engine=None, rewards=count_a, data=None, **settings):
    """A GRPO trainer on a two-layer model with a scripted engine (or ``engine="native"``)."""
    extra = {} if engine == "native" else {"rollout_engine": engine or scripted()}
    keys = {k: settings.pop(k) for k in ("eval_dataset", "peft_config", "reward_processing_classes") if k in settings}
    return GRPOTrainer(
        model or build_model(len(tokenizer)),
        rewards,
        grpo_args(folder, **settings),
        train_dataset=data if data is not None else prompts(),
        processing_class=tokenizer,
        **extra,
        **keys,
    )


KEYWORDS = (
    "optimizers",
    "eval_dataset",
    "peft_config",
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "callbacks",
    "formatting_func",
    "data_collator",
)


def chats(count=12):
    """Prompt-completion rows of uneven lengths."""
    return datasets.Dataset.from_list(
        [{"prompt": f"Count to {i}: ", "completion": " ".join(map(str, range(i + 1)))} for i in range(count)]
    )


def sft(folder, tokenizer, model=None, data=None, **settings):
    """An SFT trainer on a two-layer model."""
    base = SHORT | {"per_device_train_batch_size": 4, "seed": 42}
    keys = {k: settings.pop(k) for k in KEYWORDS if k in settings}
    args = SFTConfig(str(folder), **(base | settings))
    return SFTTrainer(
        model or build_model(len(tokenizer)),
        args,
        train_dataset=data if data is not None else chats(),
        processing_class=tokenizer,
        **keys,
    )


def losses(trainer):
    """Logged losses by step."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
