"""What an online run says before its first step: how generations and updates follow each other, and how prompts look."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from posttrain.algorithms.online_config import OnlineConfig
from posttrain.data.formats import is_conversational
from posttrain.data.tokenize import tokenize_prompts
from posttrain.errors import DataError

__all__ = ["ScheduleMixin", "describe_schedule"]

logger = logging.getLogger(__name__)

TRIED = 256  # Prompts that are tokenised before anything is generated.
SHOWN, ENDING = 400, 60  # Characters of the first prompt, and of its end where it is longer.


def describe_schedule(args: OnlineConfig, prompts: int | None) -> str:
    """Generations, updates and epochs in words.

    Args:
        args: With its batch arithmetic resolved.
        prompts: Rows of the training set; None where it has no length.
    """
    slices, passes = args.steps_per_generation or 1, args.num_iterations
    updates = slices * passes / args.gradient_accumulation_steps
    groups = (args.generation_batch_size or 0) // args.num_generations
    lines = [
        f"each generation is {groups} prompts x {args.num_generations} completions = {args.generation_batch_size}, in "
        f"{slices} slices, each trained {passes} time{'s' if passes > 1 else ''}: {_updates(updates)} a generation."
    ]
    if args.gradient_accumulation_steps % (slices * passes) == 0:
        lines.append(
            "Every slice is trained before the weights move, so the importance ratio is 1: a loss near 0 and a clip ratio of "
            "0 are normal, and grad_norm shows whether something is learned."
        )
    else:
        lines.append(
            f"The last slice is {_updates(max(updates - 1, 0))} old when it is trained (staleness/mean_updates)."
        )
    if prompts:
        generations = prompts // groups
        steps = generations * slices * passes / args.gradient_accumulation_steps
        lines.append(f"An epoch of {prompts} prompts is {generations} generations and {steps:g} optimiser steps.")
        if args.max_steps > 0 and steps:
            lines.append(f"max_steps={args.max_steps} is {args.max_steps / steps:.3g} epochs.")
    return " ".join(lines)


def _updates(count: float) -> str:
    return f"{count:g} update{'' if count == 1 else 's'}"


class ScheduleMixin:
    """The part of `OnlineTrainer` that speaks and looks before the first generation."""

    args: Any
    cuts_prompts = False  # Whether a prompt that is too long loses its beginning instead of being refused.

    def announce(self) -> None:
        """Log the schedule and the first prompt as the model reads it; refuse prompts that leave no room."""
        data = self.train_dataset  # type: ignore[attr-defined]
        if isinstance(self.args, OnlineConfig):
            length = len(data) if hasattr(data, "__len__") else None
            logger.info("schedule: %s", self.schedule_text(length))
        if not hasattr(data, "__len__") or "prompt" not in (getattr(data, "column_names", None) or ()):
            return
        rows = list(itertools.islice(data, TRIED))
        options = self.args.chat_template_kwargs or {}
        # Not through `tokenize`: a subclass that replaces it may not be ready yet.
        prompts = tokenize_prompts(rows, self.processing_class, chat_template_kwargs=options)  # type: ignore[attr-defined]
        self._show(rows[0], prompts[0])
        self._check_room(prompts)

    def schedule_text(self, prompts: int | None) -> str:
        """How generations and updates follow each other."""
        return describe_schedule(self.args, prompts)

    def _show(self, row: dict[str, Any], ids: list[int]) -> None:
        text = self.processing_class.decode(ids)  # type: ignore[attr-defined]
        kind = "rendered by the chat template" if is_conversational(row) else "as text"
        logger.info(
            "the first prompt, %s, %d tokens: %r%s", kind, len(ids), text[:SHOWN],
            f" ... {text[-ENDING:]!r}" if len(text) > SHOWN else "",
        )  # fmt: skip

    def _check_room(self, prompts: list[list[int]]) -> None:
        limit, longest = self.context, self.args.max_completion_length  # type: ignore[attr-defined]
        if self.cuts_prompts or limit is None:
            return
        long = [i for i, ids in enumerate(prompts) if len(ids) + longest > limit]
        if long:
            name = self.length_option  # type: ignore[attr-defined]
            raise DataError(
                f"train_dataset row {long[0]}: a prompt of {len(prompts[long[0]])} tokens plus {name}={longest} does not fit the "
                f"model's context of {limit} tokens ({len(long)} of the first {len(prompts)} rows are too long). Drop or "
                f"shorten these prompts, or lower {name}."
            )
