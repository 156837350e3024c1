"""What each of two processes runs: the second one is told to end in its second step, or in the evaluation after it."""

import signal
import sys

from transformers import TrainerCallback

from tests.conftest import build_tokenizer
from tests.methods.helpers import chats, sft
from tests.ranks import leave, part


class Told(TrainerCallback):
    def __init__(self, rank, within):
        self.rank, self.batches = rank, 0
        setattr(self, "on_prediction_step" if within == "evaluation" else "on_pre_optimizer_step", self.told)

    def told(self, args, state, control, **_):
        self.batches += 1
        if self.rank == 1 and self.batches == 2:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1, "eval_dataset": chats(12)}
    trainer = sft(sys.argv[1], build_tokenizer(), data=chats(32), max_steps=6, use_cpu=True, **settings)
    told = Told(trainer.accelerator.process_index, sys.argv[2])
    trainer.add_callback(told)
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave({"step": trainer.state.global_step, "requested": trainer.interrupt.requested, "batches": told.batches})
    part()
