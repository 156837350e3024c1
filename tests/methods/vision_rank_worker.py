"""What one process, or each of two, runs: two SFT steps in which the second half of each batch has no pictures."""

import sys

import datasets
from torch.utils.data import SequentialSampler

from posttrain import SFTConfig, SFTTrainer
from tests.methods.test_vision_trainers import assistant, png, user
from tests.ranks import leave, part, step_taken, weights
from tests.vision_families import build, noise


def rows():
    held = [[noise(84, 56, 1)], [noise(56, 112, 2)], [], []] * 2
    found = [
        {
            "prompt": user(f"which {i}?", len(one)),
            "images": [png(x) for x in one],
            "completion": assistant(f"c{i} it is"),
        }
        for i, one in enumerate(held)
    ]
    return datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))


class InOrder(SFTTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


if __name__ == "__main__":
    folder, name, size, checkpointing, freeze = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        sys.argv[4] == "True",
        sys.argv[5],
    )
    model, processor = build(name)
    args = SFTConfig(
        folder, per_device_train_batch_size=size, max_steps=2, use_cpu=True, bf16=False, max_length=None, optim="sgd",
        learning_rate=0.05, lr_scheduler_type="constant", report_to="none", logging_steps=1, save_strategy="no",
        gradient_checkpointing=checkpointing, preflight="off",
        freeze_vision={"True": True, "False": False}.get(freeze, freeze),
    )  # fmt: skip
    trainer = InOrder(model, args, train_dataset=rows(), processing_class=processor)
    before = weights(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave(step_taken(trainer, before))
    part()
