"""Train a reward model on pairs made from the conversations of sft_chat.py, then let GRPO follow it.

python examples/reward_model.py MODEL
"""

import sys

from datasets import Dataset
from sft_chat import answered, conversations

from posttrain import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from posttrain.rewards import ModelReward

WRONG = [
    "I do not know.",
    "Sure! Here is a long explanation of what you asked:",
    "The answer is 7",
    "Python code: print(1)",
]


def pairs(count: int, seed: int) -> Dataset:
    """Chosen: the right answer as the assistant speaks. Rejected: the right answer to another kind of question, or none."""
    rows, made = conversations(count, seed), []
    for index, row in enumerate(rows):
        other = rows[index - 1]
        wrong = WRONG[index % 8] if index % 8 < len(WRONG) else answered(other["task"], other["answer"])
        if wrong != row["messages"][1]["content"]:
            rejected = [{"role": "assistant", "content": wrong}]
            made.append({"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": rejected})
    return Dataset.from_list(made)


def train_judge(model: str) -> RewardTrainer:
    """A classifier that scores the chosen answers higher, and its accuracy on pairs it never saw."""
    config = RewardConfig(
        "runs/reward_model",
        max_steps=40,
        per_device_train_batch_size=16,
        learning_rate=3e-5,
        center_rewards_coefficient=0.01,
        gradient_checkpointing=False,
        logging_steps=5,
        save_strategy="no",
    )
    trainer = RewardTrainer(model, args=config, train_dataset=pairs(800, seed=1), eval_dataset=pairs(128, seed=2))
    print("held-out accuracy before:", round(trainer.evaluate()["eval_accuracy"], 3))
    trainer.train()
    print("held-out accuracy after:", round(trainer.evaluate()["eval_accuracy"], 3))
    return trainer


def follow(model: str, judge: RewardTrainer) -> None:
    """A few steps of GRPO with the reward model as the reward function."""
    rows = conversations(200, seed=3)
    prompts = Dataset.from_list([{"prompt": row["messages"][:1]} for row in rows])
    config = GRPOConfig(
        "runs/grpo_with_judge",
        max_steps=12,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=32,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    reward = ModelReward(judge.model, judge.processing_class)
    trainer = GRPOTrainer(model, reward, config, train_dataset=prompts)
    trainer.train()
    rewards = [round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry]
    print("mean reward by step:", rewards)


if __name__ == "__main__":
    follow(sys.argv[1], train_judge(sys.argv[1]))
