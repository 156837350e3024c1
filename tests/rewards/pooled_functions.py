"""Functions that another process can import; not a test file."""

import os
import time

from posttrain.rewards.pool import pooled


@pooled(timeout=1.0, workers=2, on_timeout=-1.0)
def slow(completions, seconds, log_extra=None, log_metric=None, **_):
    time.sleep(seconds[0])
    log_extra("process", [os.getpid()])
    log_metric("slow/calls", 1.0)
    return [len(completions[0])]


@pooled(workers=1, timeout=20.0)
def crash(completions, answer):
    if completions[0] == "raise":
        raise KeyError(answer[0])
    if completions[0] == "die":
        os._exit(3)
    if completions[0] == "two":
        return [1.0, 2.0]
    return [None if completions[0] == "none" else float(completions[0] == answer[0])]


@pooled(workers=1, timeout=20.0, memory_mb=8192)
def hungry(completions, **_):
    return [float(len(bytearray(int(completions[0]))))]
