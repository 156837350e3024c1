"""What each process of the test of kept sums runs: three epochs of DPO; rank 0 leaves losses and passes of the reference."""

import sys

from posttrain.models import parallel
from tests.conftest import build_tokenizer
from tests.loop.test_kept_sums import Once, lora, passes_by_epoch
from tests.matrix import FSDP2, allow_fsdp_on_cpu
from tests.methods.helpers import losses
from tests.methods.test_dpo import dpo, pairs
from tests.ranks import leave, part


def main(folder, way, batch, accumulation):
    """Train, and leave what every rank's reference has computed in each epoch."""
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "optim": "sgd"}
    if way == "FSDP2":
        allow_fsdp_on_cpu()
        settings |= {"fsdp": True, "fsdp_config": FSDP2}
    # An evaluation may leave parameters whole that FSDP shards.
    settings |= {"max_steps": -1, "num_train_epochs": 3, "use_cpu": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = dpo(folder, build_tokenizer(), peft_config=lora(), eval_dataset=pairs(2), **settings)
    passes = passes_by_epoch(trainer)
    if trainer.accelerator.process_index == 1:
        trainer.add_callback(Once("on_epoch_begin", 4, lambda: trainer.reference_sums["train"].sums.clear()))
    trainer.train()
    everyone = parallel.all_gather_objects([(passes, len(trainer.reference_sums["train"].sums))], trainer.accelerator)
    if trainer.accelerator.is_main_process:
        leave({"losses": losses(trainer), "ranks": everyone})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    part()
