"""`prove_pictures`: find settings of an unknown model family with which packed rows match the results of its processor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.data.forest import Layout
from posttrain.errors import ModelError
from posttrain.extensions.images.encoder import for_tower, probe_pictures
from posttrain.extensions.images.picture import Picture, read_picture
from posttrain.models.heads import evaluating, picture_encoder
from posttrain.models.probe import disagreement, has_logp, packed_logps, tolerance_of
from posttrain.types import Row

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor

logger = logging.getLogger(__name__)

# Changing the images must change log-probs by more than this multiple of the tolerance.
REACH = 0.1


@torch.no_grad()
def prove_pictures(model: nn.Module) -> None:
    """Find, for an unknown model family, positions and attention blocks with which packed rows give correct log-probs.

    Log-probs are correct if they equal the results of the model's forward method for the processor's own tensors.

    Args:
        model: Model prepared with `install_pictures`, without wrappers.

    Raises:
        ModelError: No choice of settings gives correct log-probs. The message contains the error of each choice.
    """
    reader, faults = picture_encoder(model).processor, []
    orders = dict.fromkeys((reader.family.positions, "plain"))
    choices: list[dict[str, Any]] = [{"positions": p, "block": b} for p in orders for b in ("none", "image")]
    choices.append({"positions": "plain", "block": "none", "whole": True})
    with evaluating(model):
        for choice in choices:
            reader.family = replace(reader.family, **choice)
            try:
                fault = _picture_fault(model, reader)
            # Any exception means that the model does not support this choice, e.g. because its forward method does not
            # accept image features.
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if not fault:
                break
            faults.append(f"{', '.join(f'{name} {value}' for name, value in choice.items())}: {fault:.200}")
    if len(faults) == len(choices):
        del model.picture_encoder
        raise ModelError(
            f"{type(model).__name__} is not of a supported family, and its results for rows with images differ from those for "
            f"its processor's own tensors ({'; '.join(faults)}). Fix: use a model of a supported family (docs/vision.md), or "
            "rows without images."
        )
    how = "one sequence per row, with its processor's own tensors" if reader.family.whole else str(choice)
    logger.warning(
        "%s is not of a supported family. For two prompts, its results for rows with images agree with those of its processor "
        "and its own forward method, with these settings: %s.",
        type(model).__name__,
        how,
    )


def _picture_fault(model: nn.Module, reader: PictureProcessor) -> str:
    """Return why rows with images give other log-probs than separate sequences. Return "" if the log-probs agree.

    For a separate sequence, the processor's output for the text and its images is passed to the model's own forward method.
    """
    share, mark, (first, second, _) = tolerance_of(model), reader.placeholder, probe_pictures(reader)
    # Separate adjacent placeholders if the processor treats them as one image (see `PictureProcessor.place`).
    gap = " " if reader.family.positions == "grid" else ""
    several = f"a {mark} b {mark}{gap}{mark} c"
    rows, truth, moved = [], [], []
    for text, pictures in ((f"a {mark} b", [first]), (several, [second, first, second]), ("no picture", [])):
        for answer in (" left, or right?", " it is blue"):
            ids, placed = reader.encode(text + answer, pictures)
            inputs = _own_inputs(reader, text + answer, pictures)
            if ids != inputs["input_ids"][0].tolist():
                return f"the processor returns {inputs['input_ids'].shape[1]} tokens, but {len(ids)} were expected"
            # End the prompt after the first image. All further images are then in the answer.
            start = placed[0].start + placed[0].count if placed else 1
            after = [replace(image, start=image.start - start) for image in placed[1:]]
            judged = [int(token != reader.token_id) for token in ids[start:]]
            rows.append(Row(ids[:start], [ids[start:]], [judged], pictures=[placed[:1], after]))
            truth.append(_own_logps(model, inputs)[start - 1 :])
            changed = torch.cat([inputs["input_ids"][:, :-1], inputs["input_ids"][:, :1]], 1)
            if gap := disagreement(
                _own_logps(model, {**inputs, "input_ids": changed})[start - 1 : -1], truth[-1][:-1], share
            ):
                return f"earlier tokens attend to later tokens: {gap}"
            others = [read_picture(image.load().rotate(180)) for image in pictures]
            moved.append(_own_logps(model, _own_inputs(reader, text + answer, others))[start - 1 :])
    judged = has_logp(rows)
    real, other = torch.cat(truth)[judged], torch.cat(moved)[judged]
    padded = packed_logps(model, rows, Layout("padded", row_tokens=4096)).float().cpu()
    gap, reach = (float((logps - real).abs().max()) for logps in (padded, other))
    # If the model ignored its images, the log-probs would agree in any case. Therefore, exchanging the images must change
    # log-probs by much more than the difference between rows and separate sequences.
    if not (fault := disagreement(padded, real, share)) and reach <= max(10 * gap, share * REACH):
        return f"PT-G005: other images change log-probs by {reach:.2g}, and rows differ from sequences by {gap:.2g}"
    return fault


def _own_inputs(reader: PictureProcessor, text: str, pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """Return the processor's output for a text with one placeholder per image, without attention mask and labels."""
    images = [[picture.load() for picture in pictures]] if pictures else None
    inputs = reader.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in inputs.items() if name not in ("attention_mask", "labels")}


def _own_logps(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probs of a sequence from the model's own forward method, without the first token: ``(T - 1,)``."""
    ids = inputs["input_ids"][0]
    logits = model(**for_tower(model, inputs), use_cache=False).logits[0].float().cpu()
    return torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
