"""Tokens that a run changes: the eos that ends sequences, the template's own, and what of the model must follow."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from posttrain.data.chat import terminal_token_ids
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError

__all__ = ["changes_vocabulary", "mirror_eos", "prepare_tokenizer", "train_new_tokens", "train_score_head"]

logger = logging.getLogger(__name__)

TEMPLATE_FILES = (".jinja", ".j2")


def changes_vocabulary(args: Any) -> bool:
    """Whether ``chat_template_path`` names a tokenizer to clone, not a file with a template's text."""
    path = getattr(args, "chat_template_path", None)
    return path is not None and not str(path).endswith(TEMPLATE_FILES)


def prepare_tokenizer(tokenizer: Any, args: Any) -> None:
    """Apply ``chat_template_path`` (a file), ``eos_token`` and ``pad_token`` to the tokenizer, before any row is tokenised.

    Raises:
        ArgumentTypeError: Neither a tokenizer nor a processor.
        ConfigError: A template file that does not exist; an eos or pad token that is not in the vocabulary.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
        raise ArgumentTypeError(
            f"processing_class must be a tokenizer or a processor, and it is {type(tokenizer).__name__}. Load it with "
            "AutoTokenizer.from_pretrained, or leave it out: then the model's own is loaded."
        )
    path = getattr(args, "chat_template_path", None)
    if path is not None and not changes_vocabulary(args):
        if not Path(path).is_file():
            raise ConfigError(f"chat_template_path={path!r}: there is no such file.")
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name, None)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{name}={token!r} is not in the vocabulary of {type(tokenizer).__name__} ({len(tokenizer)} tokens). Choose one "
                "that is, or add it to the tokenizer and resize the model first."
            )
        setattr(tokenizer, name, token)


def mirror_eos(tokenizer: Any, model: Any, args: Any) -> None:
    """Let generation stop wherever training may end: at the tokenizer's eos and at the end of the template's turns.

    The generation config keeps the stops it has; the model's config changes only for an ``eos_token`` that was asked for.
    """
    if getattr(args, "eos_token", None) is not None:
        model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    known = generation.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    new = [token for token in _ends(tokenizer) if token not in known]
    if new:
        logger.info("generation_config.eos_token_id: %s, and now also %s.", known, new)
        generation.eos_token_id = [*known, *new]


def _ends(tokenizer: Any) -> tuple[int, ...]:
    try:
        return terminal_token_ids(tokenizer)
    except DataError:  # A template that refuses a question and an answer says nothing about the end of a turn.
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def train_new_tokens(peft_config: Any, model: Any, added: list[int]) -> Any:
    """An adapter config that also trains the embeddings of tokens that were just added; the caller's is not changed."""
    if peft_config is None or not added or getattr(peft_config, "is_prompt_learning", False):
        return peft_config
    config = copy.deepcopy(peft_config)
    embedding = model.get_input_embeddings()
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is embedding), None)
    if name is None:
        raise ModelError(
            f"the embedding of {type(model).__name__} cannot be found by name; train its new tokens in full."
        )
    indices = config.trainable_token_indices or {}
    if isinstance(indices, list):
        indices = {name: indices}
    config.trainable_token_indices = {**indices, name: sorted({*indices.get(name, []), *added})}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if head is not None and not tied and "lm_head" not in (config.modules_to_save or []):
        logger.warning("new tokens were added: lm_head is trained and saved in full beside the adapter.")
        config.modules_to_save = [*(config.modules_to_save or []), "lm_head"]
    return config


def train_score_head(peft_config: Any, model: Any) -> Any:
    """An adapter config that trains and saves a classifier's head, which is new and random; the caller's is not changed."""
    if peft_config is None or not hasattr(peft_config, "modules_to_save"):
        return peft_config
    from posttrain.models.heads import score_layer

    layer = score_layer(model)
    name = next((n.split(".")[-1] for n, module in model.named_modules() if module is layer), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no classification head. Load it with AutoModelForSequenceClassification."
        )
    config = copy.deepcopy(peft_config)
    if config.task_type == "CAUSAL_LM":
        config.task_type = None  # The command line's default; peft would look for a language-model head.
    if config.task_type is None and name not in (config.modules_to_save or []):
        logger.info("the head %r is trained and saved in full beside the adapter.", name)
        config.modules_to_save = [*(config.modules_to_save or []), name]
    return config
