"""Small utilities that scripts import from TRL. The trainers of this library do not use them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils.other import get_free_port
from rich.logging import RichHandler
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from posttrain.types import Tokenizer

# Reward function: a model id, a model with one output, or a function of prompts, completions and columns (docs/rewards.md).
RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]

# Function of prompts and trainer that returns token ids and log-probs of completions (docs/environments.md).
RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]


class _Resettable(Protocol):
    def reset(self, **columns: Any) -> str | None: ...


# Function that creates an environment for one completion. The public methods of the environment are tools
# (docs/environments.md).
EnvironmentFactory = Callable[[], _Resettable]


class TRLExperimentalWarning(UserWarning):
    """TRL's warning category for methods that may change. posttrain never emits this warning. The class only exists so that
    scripts that filter this warning still run.
    """


def decode_and_strip_padding(
    inputs: torch.Tensor, tokenizer: Tokenizer, attention_mask: torch.Tensor | None = None
) -> list[str]:
    """Decode padded rows of token ids. Padding is removed, and special tokens and reasoning blocks are kept.

    Padding is removed at both ends of a row. A pad token between other tokens is kept. If the pad token is also the end
    token, pass ``attention_mask``, so that the end token is kept.

    Args:
        inputs: Integer token ids, ``(B, T)``.
        tokenizer: Tokenizer of the token ids.
        attention_mask: Mask ``(B, T)``, 1 for real tokens. None: all tokens except the pad token are real.

    Returns:
        One text per row.

    Raises:
        ValueError: ``attention_mask`` and ``inputs`` have different shapes.
    """
    if attention_mask is not None and attention_mask.shape != inputs.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but inputs has {tuple(inputs.shape)}. Fix: pass "
            "the mask of these rows."
        )
    real = attention_mask.bool() if attention_mask is not None else inputs != tokenizer.pad_token_id  # (B, T)
    texts = []
    for ids, mask in zip(inputs, real, strict=True):
        at = mask.nonzero().flatten()  # (number of real tokens,)
        row = ids[:0] if at.numel() == 0 else ids[at[0] : at[-1] + 1]
        texts.append(tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return texts


def ensure_master_addr_port(addr: str | None = None, port: int | None = None) -> None:
    """Set the environment variables ``MASTER_ADDR`` and ``MASTER_PORT`` if they are not set.

    Args:
        addr: Host of rank 0. None: ``localhost``.
        port: Port from 1 to 65535. None or 0: use the port in ``MASTER_PORT``, or a free port if this variable is not set,
            0 or "auto".
    """
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or addr or "localhost"
    named = os.environ.get("MASTER_PORT", "").strip()
    if not port and named.isdigit() and int(named) > 0:
        return
    os.environ["MASTER_PORT"] = str(port or get_free_port())


def init_zero_verbose() -> None:
    """Configure logging: show only errors, format log records with rich, and send Python's warnings to the log."""
    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    logging.captureWarnings(True)
    warnings.simplefilter("default")


@contextlib.contextmanager
def profiling_context(trainer: Any, name: str) -> Iterator[None]:
    """Measure the time of a ``with`` block in seconds, and log it as ``profiling/Time taken: TrainerClass.name``.

    Args:
        trainer: Any trainer of this library.
        name: Name of the block.
    """
    start = time.perf_counter()
    with torch.profiler.record_function(name):
        yield
    key = f"profiling/Time taken: {type(trainer).__name__}.{name}"
    trainer.buffers["train" if trainer.model.training else "eval"][key].append(time.perf_counter() - start)


def profiling_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a trainer, so that each call is measured with `profiling_context`."""

    @functools.wraps(function)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with profiling_context(self, function.__name__):
            return function(self, *args, **kwargs)

    return timed
