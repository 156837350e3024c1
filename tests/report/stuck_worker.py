"""What a child process runs: training with a hook that swallows every exception and never returns."""

import contextlib
import sys
import threading
import time

from transformers import TrainerCallback

from posttrain.loop import checkpoint
from tests.conftest import build_tokenizer
from tests.methods.helpers import chats, sft


class Stuck(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        print("stuck", flush=True)
        while True:
            with contextlib.suppress(BaseException):  # What is raised between two turns of the inner loop.
                while True:
                    # A join without an end, as that of a collective whose other process is gone.
                    with contextlib.suppress(BaseException):
                        threading.Event().wait() if sys.argv[2] == "waiting" else time.sleep(0.1)


if __name__ == "__main__":
    checkpoint.SECONDS_TO_END = 1.0
    trainer = sft(sys.argv[1], build_tokenizer(), data=chats(8), max_steps=2, use_cpu=True)
    trainer.add_callback(Stuck())
    trainer.train()
