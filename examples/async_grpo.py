"""Teach a small model to add, as `grpo_add.py` does, with rollouts written by a process of their own while the trainer trains."""

import sys

# Reward functions run in the workers, which import the file they stand in: there they are at its top level.
from grpo_add import LIMIT, accuracy, brevity, exam, last_number, questions

from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer


def make_trainer(model: str, output_dir: str, steps: int = 20, **options) -> AsyncGRPOTrainer:
    """8 questions x 8 answers a step, each at most one version of the weights old."""
    train, held_out = questions(8 * steps)
    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": LIMIT,
        "max_staleness": 1,
        "staleness_policy": "pace",  # Write no more than can be trained in time: nothing is thrown away.
        "vllm_importance_sampling_mode": "token_truncate",  # Weigh tokens of older weights instead of clipping them away.
        "temperature": 0.8,
        "learning_rate": 2e-5,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
    }
    config = AsyncGRPOConfig(output_dir, **(settings | options))
    return AsyncGRPOTrainer(model, [accuracy, brevity], config, train, eval_dataset=held_out)


if __name__ == "__main__":  # Workers import this file too, and must not begin a run of their own.
    trainer = make_trainer(sys.argv[1], "runs/async_grpo")
    before = exam(trainer)
    trainer.train()
    for name, rows in {"before": before, "after": exam(trainer)}.items():
        print(f"{name}: {sum(last_number(said) == answer for _, answer, said in rows)} of {len(rows)} right")
