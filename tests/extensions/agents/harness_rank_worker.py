"""What each process of the two-rank test of harnesses runs: recorded episodes trained, or live ones."""

import sys

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, replayed
from tests.conftest import build_model, build_tokenizer
from tests.extensions.agents.agents import ASK, forking
from tests.ranks import leave, part, step_taken, weights

ROWS = [{"prompt": ASK, "n": n} for n in range(4)]


def main(folder, record, batch, live):
    """One step; live episodes are recorded, and the others are what was recorded."""
    tokenizer = build_tokenizer()
    config = GRPOConfig(
        folder, max_steps=1, per_device_train_batch_size=batch, num_generations=8, max_completion_length=8, loss_type="grpo",
        optim="sgd", learning_rate=1.0, logging_steps=1, use_cpu=True, shuffle_dataset=False, report_to=[], save_strategy="no",
        bf16=False,
        harness_record=record if live else None,
    )  # fmt: skip
    harness = forking if live else replayed(record)
    trainer = GRPOTrainer(
        build_model(len(tokenizer)), args=config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer,
        harness=harness,
    )  # fmt: skip
    before = weights(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave(step_taken(trainer, before))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "live")
    part()
