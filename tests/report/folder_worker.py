"""A process of its own that writes checkpoints until it is killed; used by test_checkpoints."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def save(folder: str, *_: str) -> None:
    """Train and save every step; after two whole checkpoints stop in the middle of writing the third, for ever."""
    from tests.conftest import build_tokenizer
    from tests.methods.helpers import sft

    trainer = sft(folder, build_tokenizer(), max_steps=9, save_strategy="steps", save_steps=1)
    usual = trainer._save_optimizer_and_scheduler

    def stuck(target: str) -> None:
        if trainer.state.global_step == 3:
            Path(target, "optimizer.pt").write_bytes(b"half")
            Path(folder, "stuck").touch()
            time.sleep(60)
        usual(target)

    trainer._save_optimizer_and_scheduler = stuck
    trainer.train()


if __name__ == "__main__":
    save(*sys.argv[2:])
