"""What each of two processes runs: the second one is told to end after its second step."""

import signal
import sys

from transformers import TrainerCallback

from tests.conftest import build_tokenizer
from tests.methods.helpers import chats, sft
from tests.ranks import leave, part


class Told(TrainerCallback):
    def __init__(self, rank):
        self.rank = rank

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.rank == 1 and state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    trainer = sft(sys.argv[1], build_tokenizer(), data=chats(32), max_steps=6, use_cpu=True)
    trainer.add_callback(Told(trainer.accelerator.process_index))
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave({"step": trainer.state.global_step, "requested": trainer.interrupt.requested})
    part()
