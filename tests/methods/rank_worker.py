"""What each process of the two-rank test runs: one step, then the loss, metrics and weights left by rank 0."""

import sys

from posttrain import Rollout  # noqa: F401 - the public package must import in a worker too
from posttrain.report.files import read_rows
from tests.conftest import build_tokenizer
from tests.methods.helpers import chats, count_a, grpo, prompts, sft
from tests.ranks import leave, part, step_taken, weights


def main(kind, folder, batch, accumulation):
    """Train one step and leave what it did."""
    tokenizer = build_tokenizer()
    if kind == "evaluation":
        return evaluate(folder, tokenizer, batch)
    common = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "use_cpu": True,
        "shuffle_dataset": False,
    }
    if kind == "sft":
        trainer = sft(folder, tokenizer, data=chats(8), seed=3, **common)
    elif kind == "rloo":
        from tests.methods.test_rloo import rloo

        trainer = rloo(folder, tokenizer, data=prompts(4), normalize_advantages=True, **common)
    elif kind == "gkd":
        from posttrain import GKDConfig, GKDTrainer
        from tests.methods.test_distillation import answers, make

        own = {"lmbda": 0.0, "max_grad_norm": 0.0, "max_new_tokens": 8}
        trainer = make(folder, tokenizer, cls=GKDTrainer, config=GKDConfig, data=answers(8), **(common | own))
    elif kind == "a2po":
        from tests.extensions.experimental.test_a2po import build

        own = {"num_generations": 1, "beta2": 0.1, "num_value_samples": 4, "filter_all_incorrect": False}
        trainer = build(folder, tokenizer, rewards=count_a, data=prompts(16), **(common | own))
    else:
        trainer = grpo(folder, tokenizer, beta=0.05, data=prompts(4), loss_type=kind, scale_rewards="batch", **common)
    before = weights(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        folder = trainer.record.record.folder / "completions"
        tables = [read_rows(path) for path in folder.glob("completions_*.parquet") if kind == "gkd"]
        leave(step_taken(trainer, before) | {"worst": [row["worst_tokens"] for table in tables for row in table]})


def evaluate(folder, tokenizer, batch):
    """Evaluate and predict, and leave what was seen."""
    trainer = sft(
        folder, tokenizer, data=chats(8), eval_dataset=chats(5), per_device_eval_batch_size=batch, use_cpu=True
    )
    loss = trainer.evaluate()["eval_loss"]
    labels = trainer.predict(chats(5)).label_ids
    if trainer.accelerator.is_main_process:
        trained = [int((row != -100).sum()) for row in labels]
        truth = [sum(label != -100 for label in row["labels"]) for row in trainer.eval_dataset]
        leave({"loss": loss, "trained": trained, "truth": truth})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    part()
