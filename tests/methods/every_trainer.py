"""Every trainer, small, by name: for claims that hold of all of them."""

from __future__ import annotations

import datasets

import posttrain as pt
from posttrain.extensions.experimental.a2po import A2POTrainer
from posttrain.extensions.experimental.a2po_method import A2POConfig
from posttrain.extensions.experimental.online_dpo import OnlineDPOTrainer
from posttrain.extensions.experimental.online_dpo_method import OnlineDPOConfig
from posttrain.extensions.experimental.ppo import PPOTrainer
from posttrain.extensions.experimental.ppo_config import PPOConfig
from tests.conftest import build_model
from tests.methods.helpers import SHORT, scripted
from tests.methods.test_reward import scorer

PAIRED = {"dpo": (pt.DPOTrainer, pt.DPOConfig), "cpo": (pt.CPOTrainer, pt.CPOConfig)}
PAIRED |= {"orpo": (pt.ORPOTrainer, pt.ORPOConfig), "tpo": (pt.TPOTrainer, pt.TPOConfig)}
PAIRED |= {"reward": (pt.RewardTrainer, pt.RewardConfig)}
JUDGED = {"kto": (pt.KTOTrainer, pt.KTOConfig), "bco": (pt.BCOTrainer, pt.BCOConfig)}
PLAIN = {"sft": (pt.SFTTrainer, pt.SFTConfig)}
OFFLINE = PLAIN | PAIRED | JUDGED
GROUPED = {"grpo": (pt.GRPOTrainer, pt.GRPOConfig), "rloo": (pt.RLOOTrainer, pt.RLOOConfig)}
COMPARED = {"online_dpo": (OnlineDPOTrainer, OnlineDPOConfig)}
ONLINE = GROUPED | COMPARED | {"ppo": (PPOTrainer, PPOConfig), "a2po": (A2POTrainer, A2POConfig)}
EVERY = OFFLINE | ONLINE
ANSWERS = {"dpo": 2, "cpo": 2, "orpo": 2, "tpo": 3, "reward": 2}  # Sequences of one row, where it is not one.


def by_answer(answer, **_):
    """The reward is what the row says, whatever was sampled."""
    return [float(value) for value in answer]


def data(kind, count, first=0):
    """Rows for a trainer; of those that sample, only the last one has an answer that is rewarded."""
    rows = []
    for i in range(first, first + count):
        row = {"prompt": f"What is {i}? {'and so on ' * (i % 3)}"}
        if kind in PAIRED:
            row |= {"chosen": "a number " * (1 + i % 2), "rejected": f"no {i}", "reference": f"it is {i}"}
            row = row if kind == "tpo" else {k: v for k, v in row.items() if k != "reference"}
        elif kind in JUDGED:
            row |= {"completion": "a number " * (1 + i % 3), "label": i % 2 == 0}
        elif kind == "sft":
            row["completion"] = "a number " * (1 + i % 3)
        else:
            row["answer"] = float(i == first + count - 1)
        rows.append(row)
    return datasets.Dataset.from_list(rows)


def every(kind, folder, tokenizer, *, train=None, base=None, cls=None, arguments=None, **settings):
    """A trainer by name; ``cls`` a subclass of it, ``arguments`` of its config, ``base`` other rows to train on."""
    trainer, config = EVERY[kind]
    own = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "use_cpu": True, "max_steps": 1}
    if kind in GROUPED:
        own |= {"num_generations": 2, "max_completion_length": 8}
    elif kind == "a2po":
        own |= {"num_generations": 1, "num_value_samples": 2, "filter_all_incorrect": False, "max_completion_length": 8}
    elif kind in COMPARED:
        own |= {"max_new_tokens": 8, "max_length": 256}
    elif kind == "ppo":
        own |= {"response_length": 8, "stop_token": "eos", "num_ppo_epochs": 1, "num_sample_generations": 0}
    names = (
        "eval_dataset",
        "peft_config",
        "compute_metrics",
        "compute_loss_func",
        "preprocess_logits_for_metrics",
        "callbacks",
    )
    keys = {name: settings.pop(name) for name in names if name in settings}
    reward = settings.pop("reward_funcs", by_answer)
    # First, since a config of ZeRO-3 shards what is built after it, and transformers then fails to set its padding row.
    model = scorer(tokenizer) if kind == "reward" else build_model(len(tokenizer))
    args = (arguments or config)(str(folder), **(SHORT | own | settings))
    rows = train if train is not None else data(kind, 8)
    keys |= {"model": model, "args": args, "train_dataset": rows, "processing_class": tokenizer}
    if kind in ONLINE:
        keys["reward_model" if kind == "ppo" else "reward_funcs"] = reward
        keys["rollout_engine"] = scripted()
    return (cls or trainer)(**keys)
