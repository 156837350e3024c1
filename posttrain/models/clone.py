"""Giving a model the chat format of another: template, special tokens and embedding rows for them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoTokenizer

from posttrain.errors import ModelError
from posttrain.integrations.hub import explained

__all__ = ["VocabularyMismatchError", "clone_chat_template"]

logger = logging.getLogger(__name__)

SEED = 0
SPREAD = 0.01  # Noise of a new row, as a share of the old rows' spread: rows differ, and no logit moves noticeably.


class VocabularyMismatchError(ModelError, RuntimeError):
    """The tokenizer has ids that the model's embedding has no rows for, or the other way round."""


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Give ``model`` and ``tokenizer`` the chat template of another tokenizer, with the tokens it is made of.

    The source's added tokens that the tokenizer lacks are added and its eos becomes the tokenizer's and the model's, bos
    and pad only where the tokenizer has none. The embedding grows to a multiple of ``resize_to_multiple_of`` and never
    shrinks; ``<extra_id_0>, ..`` fill the vocabulary up to it. The rows of all added tokens start at the mean of the
    vocabulary's rows, which keeps the distribution over the old tokens as it was.

    Args:
        model: Any transformers model with input embeddings; changed in place.
        tokenizer: Changed in place.
        source_tokenizer_path: Folder or hub name of the tokenizer to copy from.
        resize_to_multiple_of: Rows of the embedding; None is exactly one row a token.

    Returns:
        Model, tokenizer, and the ids of all tokens that were added.

    Raises:
        ModelError: The source has no chat template, or the multiple is not positive. VocabularyMismatchError: Tokenizer
            and embedding could not be brought to one size.
    """
    if resize_to_multiple_of is not None and resize_to_multiple_of < 1:
        raise ModelError(f"resize_to_multiple_of must be at least 1 or None, and it is {resize_to_multiple_of}.")
    with explained("tokenizer", source_tokenizer_path):
        source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ModelError(
            f"the tokenizer {source_tokenizer_path!r} has no chat template, so there is none to clone. Give one of an "
            "instruction-tuned checkpoint."
        )
    before = set(tokenizer.get_vocab().values())
    known = _size(tokenizer)
    tokenizer.chat_template = source.chat_template
    _add_tokens(tokenizer, source)
    _set_special_tokens(tokenizer, source)
    _mirror(model, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    wanted = max(rows, _size(tokenizer))
    if resize_to_multiple_of:
        wanted += -wanted % resize_to_multiple_of
    if wanted != rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
    _fill(tokenizer, model.get_input_embeddings().weight.shape[0])
    added = sorted(set(tokenizer.get_vocab().values()) - before)
    _start_at_mean(model, added, min(known, rows))
    return model, tokenizer, added


def _size(tokenizer: Any) -> int:
    """Rows an embedding needs: ids may have holes, so this is not always the number of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def _add_tokens(tokenizer: Any, source: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    tokens = [token for _, token in sorted(source.added_tokens_decoder.items())]
    missing = [token for token in tokens if token.content not in vocabulary]
    tokenizer.add_tokens([token for token in missing if token.special], special_tokens=True)
    tokenizer.add_tokens([token for token in missing if not token.special])


def _set_special_tokens(tokenizer: Any, source: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    old_eos, old_pad = tokenizer.eos_token, tokenizer.pad_token
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    if tokenizer.bos_token is None and source.bos_token in vocabulary:
        tokenizer.bos_token = source.bos_token
    if old_pad is not None and (old_pad != tokenizer.eos_token or old_pad == old_eos):
        return  # A pad that was the eos before is the user's own choice.
    for candidate in (source.pad_token, old_eos):
        if candidate in vocabulary and candidate != tokenizer.eos_token:
            tokenizer.pad_token = candidate
            return
    if old_pad is not None:
        logger.warning(
            "the pad token %r has become the eos token as well, and neither tokenizer has another one to pad with. Set "
            "tokenizer.pad_token.",
            old_pad,
        )


def _mirror(model: Any, tokenizer: Any) -> None:
    """Write the special tokens' ids into the model's config, its text part and its generation config."""
    text_config = model.config.get_text_config()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "bos", "pad")}
    configs = [model.config] if text_config is model.config else [model.config, text_config]
    for config in configs:
        for name, value in ids.items():
            if value is not None:
                setattr(config, name, value)
    generation = getattr(model, "generation_config", None)
    if generation is None or not model.can_generate():
        return
    for name in ("bos_token_id", "pad_token_id"):
        if ids[name] is not None:
            setattr(generation, name, ids[name])
    if ids["eos_token_id"] is not None:
        stops = generation.eos_token_id if isinstance(generation.eos_token_id, list) else []
        joined = list(dict.fromkeys([*stops, ids["eos_token_id"]]))  # A list of stops stays: each ends a turn.
        generation.eos_token_id = joined if stops else ids["eos_token_id"]


def _fill(tokenizer: Any, rows: int) -> None:
    """Add placeholder tokens until every row of the embedding has one."""
    vocabulary = tokenizer.get_vocab()
    names, number = [], 0
    while len(names) < rows - _size(tokenizer):
        if f"<extra_id_{number}>" not in vocabulary:
            names.append(f"<extra_id_{number}>")
        number += 1
    tokenizer.add_tokens(names)
    if _size(tokenizer) != rows:
        raise VocabularyMismatchError(
            f"the tokenizer's ids end at {_size(tokenizer) - 1} after {len(names)} placeholders were added, and the "
            f"model's embedding has {rows} rows. Load model and tokenizer from the same checkpoint."
        )


@torch.no_grad()
def _start_at_mean(model: Any, added: list[int], known: int) -> None:
    """Rows of added tokens: the mean of the first ``known`` rows, with a little seeded noise so that they differ."""
    if not added:
        return
    output = model.get_output_embeddings()
    weights = {id(w): w for w in [model.get_input_embeddings().weight, *([] if output is None else [output.weight])]}
    generator = torch.Generator().manual_seed(SEED)
    for weight in weights.values():  # Tied: one weight, written once.
        old = weight[:known].float()
        noise = torch.randn(len(added), weight.shape[1], generator=generator).to(weight.device)
        weight[added] = (old.mean(0) + SPREAD * old.std(0) * noise).to(weight.dtype)
    bias = getattr(output, "bias", None)
    if bias is not None:
        bias[added] = bias[:known].mean()
