"""What the processes do that a case starts beside itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.faults import build
from tests.faults.scene import Scene


def hold(folder: Path) -> None:
    """Have the folder, and live on."""
    from posttrain.report.lock import FolderLock

    lock = FolderLock(folder)
    lock.acquire()
    time.sleep(120)


def stuck(folder: Path) -> None:
    """Train and save; in the middle of the second checkpoint stop for ever."""
    import transformers

    class Stuck(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                scene.trainer._save_optimizer_and_scheduler = wait

    def wait(target: str) -> None:
        Path(target, "optimizer.pt").write_bytes(b"half")
        (folder / "stuck").touch()
        time.sleep(120)

    scene = Scene(folder)
    build.sft(scene, callbacks=[Stuck()], save_strategy="steps", save_steps=1)


if __name__ == "__main__":
    {"hold": hold, "stuck": stuck}[sys.argv[1]](Path(sys.argv[2]))
