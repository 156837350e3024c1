"""Small trainers that are healthy unless something is done to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import datasets
import torch

from tests.conftest import build_model
from tests.methods.helpers import grpo, scripted

BASE: dict[str, Any] = {
    "logging_steps": 1, "learning_rate": 1e-3, "report_to": "none", "bf16": False, "save_strategy": "no", "disable_tqdm": True,
    "lr_scheduler_type": "constant", "max_steps": 3, "per_device_train_batch_size": 4, "seed": 7, "gradient_checkpointing": False,
}  # fmt: skip
WORDS = ["sum", "number", "answer", "two", "the", "is", "what", "of", "a", "user", "system", "tool", "assistant"]


def words(count: int, seed: int) -> str:
    """A text of words that differs from seed to seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def model(scene: Any, **overrides: Any) -> Any:
    """A two-layer model that stops where its template does."""
    made = build_model(len(scene.tokenizer), **overrides)
    made.generation_config.eos_token_id = made.config.eos_token_id
    made.generation_config.pad_token_id = 0
    made.config.pad_token_id = 0
    scene.tokenizer.pad_token_id = 0
    return made


def chats(count: int = 12, change: Callable[[int, dict], Any] | None = None) -> datasets.Dataset:
    """Conversations of different words; ``change`` spoils a row."""
    rows = []
    for i in range(count):
        row = {
            "messages": [
                {"role": "user", "content": f"What is {i}? {words(4, i)}"},
                {"role": "assistant", "content": f"It is {words(3 + i % 4, 100 + i)}."},
            ]
        }
        rows.append((change(i, row) or row) if change else row)
    return datasets.Dataset.from_list(rows)


def texts(count: int = 12, change: Callable[[int, dict], Any] | None = None) -> datasets.Dataset:
    """Prompts and completions as strings."""
    rows = []
    for i in range(count):
        row = {"prompt": f"What is {i}? {words(4, i)}:", "completion": f" It is {words(3 + i % 4, 100 + i)}."}
        rows.append((change(i, row) or row) if change else row)
    return datasets.Dataset.from_list(rows)


def pairs(count: int = 24, change: Callable[[int, dict], Any] | None = None, **columns: Any) -> datasets.Dataset:
    """Preference pairs whose sides are longer equally often; extra columns by a function of the row's number."""
    rows = []
    for i in range(count):
        row = {
            "prompt": f"What is {i}? {words(3, i)}:",
            "chosen": f" It is {words(4 + i % 3, 200 + i)}.",
            "rejected": f" It is {words(4 + (i + 1) % 3, 300 + i)}.",
            **{name: function(i) for name, function in columns.items()},
        }
        rows.append((change(i, row) or row) if change else row)
    return datasets.Dataset.from_list(rows)


def questions(count: int = 16, **columns: Any) -> datasets.Dataset:
    """Prompts for online training."""
    rows = []
    for i in range(count):
        extra = {name: function(i) for name, function in columns.items()}
        rows.append({"prompt": [{"role": "user", "content": f"What is {i}? {words(3, i)}"}], **extra})
    return datasets.Dataset.from_list(rows)


def sft(scene: Any, data: Any = None, policy: Any = None, **settings: Any) -> Any:
    """Train an `SFTTrainer`."""
    from posttrain import SFTConfig, SFTTrainer

    keys = {key: settings.pop(key) for key in ("callbacks", "eval_dataset") if key in settings}
    options = {key: settings.pop(key) for key in ("resume_from_checkpoint",) if key in settings}
    chosen = policy if policy is not None else model(scene)
    args = SFTConfig(str(settings.pop("folder", scene.folder)), **(BASE | settings))
    rows = chats() if data is None else data
    return scene.train(
        lambda: SFTTrainer(chosen, args, train_dataset=rows, processing_class=scene.tokenizer, **keys), **options
    )


def dpo(scene: Any, data: Any = None, policy: Any = None, ref_model: Any = None, **settings: Any) -> Any:
    """Train a `DPOTrainer`."""
    from posttrain import DPOConfig, DPOTrainer

    chosen = policy if policy is not None else model(scene)
    args = DPOConfig(str(scene.folder), **(BASE | settings))
    rows = pairs() if data is None else data
    return scene.train(
        lambda: DPOTrainer(chosen, ref_model, args, train_dataset=rows, processing_class=scene.tokenizer)
    )


def reward(scene: Any, data: Any = None, **settings: Any) -> Any:
    """Train a `RewardTrainer`."""
    from posttrain import RewardConfig, RewardTrainer

    scene.tokenizer.pad_token_id = 0
    args = RewardConfig(str(scene.folder), **(BASE | settings))
    rows = pairs() if data is None else data
    return scene.train(
        lambda: RewardTrainer(scorer(scene.tokenizer), args, train_dataset=rows, processing_class=scene.tokenizer)
    )


def kto(scene: Any, data: Any = None, **settings: Any) -> Any:
    """Train a `KTOTrainer` on rows of a label each."""
    from posttrain import KTOConfig, KTOTrainer

    rows = [
        {"prompt": row["prompt"], "completion": row["completion"], "label": i % 2 == 0}
        for i, row in enumerate(texts(16))
    ]
    args = KTOConfig(str(scene.folder), **(BASE | settings))
    chosen = model(scene)
    return scene.train(
        lambda: KTOTrainer(
            chosen,
            None,
            args,
            train_dataset=datasets.Dataset.from_list(rows) if data is None else data,
            processing_class=scene.tokenizer,
        )
    )


def scorer(tokenizer: Any, seed: int = 0) -> Any:
    """A two-layer classifier with one label."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_labels=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def online(scene: Any, rewards: Any = None, data: Any = None, engine: Any = None, **settings: Any) -> None:
    """Train a `GRPOTrainer` on a scripted engine."""
    base = {"learning_rate": 1e-4, "max_steps": 3, "gradient_checkpointing": False, "scale_rewards": "group"}
    chosen = settings.pop("policy", None) or model(scene)
    options = {"model": chosen, "engine": engine or scripted(), "data": questions() if data is None else data}
    scene.train(lambda: grpo(scene.folder, scene.tokenizer, rewards=rewards or varied, **options, **(base | settings)))


def varied(completions: list[Any], **_: Any) -> list[float]:
    """A reward with spread in every group."""
    return [(len(c[0]["content"]) % 5) / 5 + 0.1 * (c[0]["content"].count("e") % 3) for c in completions]
