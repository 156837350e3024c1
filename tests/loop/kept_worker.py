"""What each process of the test of kept sums runs: three epochs of DPO; rank 0 leaves losses and passes of the reference."""

import sys

from posttrain.models import parallel
from tests.conftest import build_tokenizer
from tests.loop.test_kept_sums import passes_by_epoch
from tests.methods.helpers import losses
from tests.methods.test_dpo import dpo
from tests.ranks import leave, part


def main(folder, batch, accumulation):
    """Train, and leave what every rank's reference has computed in each epoch."""
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "optim": "sgd"}
    trainer = dpo(folder, build_tokenizer(), max_steps=-1, num_train_epochs=3, use_cpu=True, **settings)
    passes = passes_by_epoch(trainer)
    trainer.train()
    everyone = parallel.all_gather_objects([passes], trainer.accelerator)
    if trainer.accelerator.is_main_process:
        leave({"losses": losses(trainer), "passes": everyone, "rows": len(trainer._kept.sums)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    part()
