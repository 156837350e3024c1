"""What each process of the two-rank test of tools runs: one step in which only some prompts call a tool."""

import sys

import torch

from posttrain import GRPOTrainer, ScriptedEngine
from tests.conftest import build_model, build_tokenizer
from tests.methods.helpers import grpo_args, prompts
from tests.methods.test_tools import CALL, EOS, Walk, double, letters, qwen
from tests.ranks import leave, part, step_taken, weights


def main(folder, batch):
    """Train one step and leave the change of the weights, the prompts' seeds and the metrics."""
    tokenizer = qwen(build_tokenizer())
    seeds = []

    class Seeded(Walk):
        """Keeps what seed each prompt's environment began with; they begin on threads, in any order."""

        def reset(self, group_seed, **row):
            seeds.append([str(row["prompt"]), group_seed])

    def line(prompt_ids, index):
        text = tokenizer.decode(prompt_ids)
        turn = text.count("<|im_start|>assistant") - 1
        said = CALL if "What is 1 " in text and turn < 2 else "It is 42" + "!" * (index % 4) + "?" * turn
        return [*tokenizer(said, add_special_tokens=False)["input_ids"], EOS]

    args = grpo_args(
        folder, per_device_train_batch_size=batch, max_completion_length=400, max_steps=1, optim="sgd",
        learning_rate=1.0, use_cpu=True, shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        build_model(len(tokenizer), max_position_embeddings=2048), letters, args, train_dataset=prompts(4),
        processing_class=tokenizer, rollout_engine=ScriptedEngine(line), tools=[double], environment_factory=Seeded,
    )  # fmt: skip
    trainer.rewards.weights[1] = 0.0
    Seeded.get_reward = lambda self: 0.0
    before = weights(trainer)
    trainer.train()
    gathered = [seeds]
    if trainer.accelerator.num_processes > 1:
        gathered = [None, None]
        torch.distributed.all_gather_object(gathered, seeds)
    if trainer.accelerator.is_main_process:
        leave(step_taken(trainer, before) | {"seeds": sorted(seed for rank in gathered for seed in rank)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    part()
