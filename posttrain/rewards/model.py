"""A sequence-classification model as a reward function."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from posttrain.data.chat import one_bos
from posttrain.data.templates import supports_tool_calling
from posttrain.errors import ModelError, RewardError
from posttrain.models.architecture import context_length, label_count
from posttrain.models.load import check_model_source

if TYPE_CHECKING:
    from torch import nn

    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


PROBES = ("Yes.", "No.", "The answer is 42, because 6 times 7 is 42.", "zxq zxq zxq zxq zxq")
# Different texts of a batch that may share one score by chance (or by rounding); more do not.
TEXTS_BY_CHANCE = 3
TOKENIZER = (
    "its texts cut to nothing; pass its own tokenizer in reward_processing_classes and check the folder's weights."
)


class _RewardModel:
    """A frozen classifier: its name, its context, its scores of ids, and whether it tells texts apart."""

    def __init__(self, model: nn.Module, pad_token_id: int, batch_size: int) -> None:
        self.model = model.eval().requires_grad_(False)
        # Written to padding, never read.
        self.pad_token_id, self.batch_size = pad_token_id, batch_size
        self.__name__ = str(model.config._name_or_path or type(model).__name__).rstrip("/").split("/")[-1]
        self.limit: int | None = context_length(model.config.get_text_config())
        self._cuts, self._alike_checked = 0, False

    def _fitting(self, ids: list[int]) -> list[int]:
        """As many of the last tokens as the model reads, with a warning at the 1st, 101st, ... cut."""
        if self.limit is not None and len(ids) > self.limit:
            self._cuts += 1
            if self._cuts % 100 == 1:
                logger.warning(
                    "the reward model %s reads %d tokens: longer texts lose their beginning (%d so far).",
                    self.__name__, self.limit, self._cuts,
                )  # fmt: skip
            ids = ids[-self.limit :]
        return ids or [self.pad_token_id]

    @torch.inference_mode()
    def _scores_of(self, rows: list[list[int]]) -> list[float]:
        """One score a row, read at its last token (found by position, not by comparing ids with pad)."""
        parts = (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))
        return [score for part in parts for score in self._forward(part)]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        width, device = max(map(len, rows)), next(self.model.parameters()).device
        ids = torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        head = getattr(self.model, "score", None)
        if head is None:  # An encoder pools as it was trained to.
            return self.model(input_ids=ids, attention_mask=mask).logits.float()[:, 0].tolist()
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), mask.sum(1) - 1]
        return head(last).float()[:, 0].tolist()

    def _refuse_alike(self, scores: list[float], texts: Iterable[str], fix: str) -> None:
        """Refuse the first batch of several different texts (and the probes) where all have one score.

        Raises:
            RewardError: ``fix`` is the end of its message: what else may be wrong, and what to do.
        """
        different = len(set(texts))
        if different > TEXTS_BY_CHANCE and len(set(scores)) == 1:
            raise RewardError(
                f"the reward model {self.__name__} gives {scores[0]:g} to {different} different texts: nothing can be learned "
                f"from it. Its head may be newly initialised, its tokenizer another model's, or {fix}"
            )
        self._alike_checked = self._alike_checked or different > TEXTS_BY_CHANCE


class ModelReward(_RewardModel):
    """Scores prompt and completion with a reward model, in sub-batches, cut from the left at the model's context.

    Plain text is prompt and completion in a row, without added special tokens; a conversation is rendered with the
    reward model's own template. The score is the classifier's output at the last real token.

    Args:
        model: Folder, hub id or model with ``num_labels=1``.
        tokenizer: The reward model's own; None loads it.
        batch_size: Rows of one forward pass.
        trust_remote_code: Run code that comes with the model or its tokenizer (strings only).
        model_init_kwargs: Keywords of ``from_pretrained`` (strings only).
        chat_template_kwargs: Passed to the template of conversations, as to the policy's.

    Raises:
        ModelError: A folder that cannot be loaded, or a model with another number of labels.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 8,
        trust_remote_code: bool = False,
        model_init_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        init = dict(model_init_kwargs or {})  # A copy: the caller's dict makes a second trainer too.
        init.setdefault("trust_remote_code", trust_remote_code)
        if isinstance(model, str):
            model = _load(model, init)
        labels = label_count(model)
        if labels != 1:
            raise ModelError(
                f"a reward model needs num_labels=1, and {type(model).__name__} has {labels}. A module of another kind "
                "goes into a function f(prompts, completions, **columns) that calls it."
            )
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(
            model.config._name_or_path,
            trust_remote_code=init["trust_remote_code"],
            revision=init.get("revision", "main"),
        )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        super().__init__(model, self.tokenizer.pad_token_id, batch_size)
        model.config.get_text_config().pad_token_id = self.pad_token_id
        self.template_kwargs = dict(chat_template_kwargs or {})
        self._calls_tools: bool | None = None

    def to(self, device: torch.device | str) -> ModelReward:
        """Place the model, unless it is spread over devices already; returns itself."""
        if not getattr(self.model, "hf_device_map", None):
            self.model.to(device)
        return self

    def probe(self) -> list[float]:
        """Scores of four short answers to one question; logged, so that a wrong template or head shows at the start.

        Raises:
            RewardError: The model gives all of them one score.
        """
        question = "What is 6 times 7?"
        prompts: list[Any] = [question] * len(PROBES)
        completions: list[Any] = list(PROBES)
        if self.tokenizer.chat_template:
            prompts = [[{"role": "user", "content": question}]] * len(PROBES)
            completions = [[{"role": "assistant", "content": text}] for text in PROBES]
        scores = self._scores(prompts, completions)
        shown = ", ".join(f"{text!r} {score:.4g}" for text, score in zip(PROBES, scores, strict=True))
        logger.info("reward model %s, answers to %r: %s", self.__name__, question, shown)
        self._refuse_alike(scores, PROBES, TOKENIZER)
        self._alike_checked = False
        return scores

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One score a row.

        Raises:
            RewardError: The first batch of several different texts got one score for all of them.
        """
        scores = self._scores(prompts, completions)
        if not self._alike_checked:
            self._refuse_alike(scores, map(str, zip(prompts, completions, strict=True)), TOKENIZER)
        return scores

    def _scores(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        return self._scores_of([self._ids(p, c) for p, c in zip(prompts, completions, strict=True)])

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        else:
            self._check_tools(completion)
            ids = self.tokenizer.apply_chat_template(
                prompt + completion, tokenize=True, return_dict=True, **self.template_kwargs
            )["input_ids"]
        return self._fitting(ids)

    def _check_tools(self, completion: list[dict[str, Any]]) -> None:
        """A template without words for tools leaves calls and results out: the score would be of another text."""
        if not any(message.get("tool_calls") or message.get("role") == "tool" for message in completion):
            return
        if self._calls_tools is None:
            self._calls_tools = supports_tool_calling(self.tokenizer)
        if not self._calls_tools:
            raise RewardError(
                f"the completion calls tools, and the chat template of the reward model {self.__name__} cannot show tool "
                "calls and their results. Use a reward model whose template can, or a reward function that reads messages."
            )


def _load(model_id: str, init: dict[str, Any]) -> Any:
    from transformers import AutoModelForSequenceClassification

    check_model_source(model_id, generative=False)
    return AutoModelForSequenceClassification.from_pretrained(model_id, **(init | {"num_labels": 1}))


class WholeTextReward(ModelReward):
    """A reward model that reads plain text with the special tokens its tokenizer adds, as it was trained to.

    A text that already begins with the bos token does not get a second one. Conversations are rendered by the template, as
    `ModelReward` does.
    """

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if not isinstance(prompt, str):
            return super()._ids(prompt, completion)
        ids = self.tokenizer(prompt + completion, verbose=False)["input_ids"]
        return self._fitting(one_bos(ids, self.tokenizer.bos_token_id))


class TokenReward(_RewardModel):
    """Scores prompt and response ids at the response's last token, found by position; of an empty one, at the prompt's.

    Args:
        model: A sequence classifier with one label and the policy's vocabulary.
        pad_token_id: Written to padding, never read.
        batch_size: Responses that are evaluated together.
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, batch_size: int = 64) -> None:
        super().__init__(model, pad_token_id, batch_size)

    def __call__(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """One score a response; what the model cannot read is cut from the left.

        Raises:
            RewardError: The first batch of several different responses got one score for all of them.
        """
        rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        scores = self._scores_of([self._fitting(row) for row in rows])
        if not self._alike_checked:
            fix = "its weights another folder's: check that the classifier's head was trained and saved with it."
            self._refuse_alike(scores, map(str, zip(prompt_ids, completion_ids, strict=True)), fix)
        return scores
