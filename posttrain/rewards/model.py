"""Reward functions that score completions with a sequence-classification model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from posttrain.data.chat import inner_tokenizer, one_bos
from posttrain.data.templates import supports_tool_calling
from posttrain.errors import ConfigError, ModelError, RewardError
from posttrain.models.architecture import context_length, get_config_model_id, label_count
from posttrain.models.heads import causal_lm, learns_prompts
from posttrain.models.load import load_classifier

if TYPE_CHECKING:
    from torch import nn

    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


PROBES = ("Yes.", "No.", "The answer is 42, because 6 times 7 is 42.", "zxq zxq zxq zxq zxq")
# Number of different texts above which equal scores are an error. The scores of a few texts can be equal by chance or
# because of rounding.
TEXTS_BY_CHANCE = 3
TOKENIZER = (
    "the tokenizer may have truncated the texts to length 0. Fix: pass the reward model's own tokenizer in "
    "reward_processing_classes, and check the weights in its folder."
)


class _RewardModel:
    """Base class of reward models: a frozen classifier with one label that scores token ids. If all scores are equal, it
    raises an error.
    """

    def __init__(self, model: nn.Module, pad_token_id: int, batch_size: int) -> None:
        self.model = model.eval().requires_grad_(False)
        # Id of padding tokens. Padding is masked, so the value of the id does not affect the scores.
        self.pad_token_id, self.batch_size = pad_token_id, batch_size
        self.__name__ = str(model.config._name_or_path or type(model).__name__).rstrip("/").split("/")[-1]
        self.limit: int | None = context_length(model.config.get_text_config())
        self._cuts, self._alike_checked = 0, False

    def _fitting(self, ids: list[int]) -> list[int]:
        """Return the last ``limit`` ids of a text that is longer than the model's context. Log a warning for every 100th
        truncated text.
        """
        if self.limit is not None and len(ids) > self.limit:
            self._cuts += 1
            if self._cuts % 100 == 1:
                logger.warning(
                    "the reward model %s reads at most %d tokens, so longer texts lose their beginning (%d texts so far).",
                    self.__name__, self.limit, self._cuts,
                )  # fmt: skip
            ids = ids[-self.limit :]
        return ids or [self.pad_token_id]

    @torch.inference_mode()
    def _scores_of(self, rows: list[list[int]]) -> list[float]:
        """Return the score at the last token of each row. Padding is identified by position, not by token id."""
        parts = (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))
        return [score for part in parts for score in self._forward(part)]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        width, device = max(map(len, rows)), next(self.model.parameters()).device
        ids = torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        head = getattr(self.model, "score", None)
        # The whole forward method is needed for encoder models, which pool by themselves, and for virtual tokens, which
        # change positions.
        if head is None or learns_prompts(self.model):
            return self.model(input_ids=ids, attention_mask=mask).logits.float()[:, 0].tolist()
        trunk = causal_lm(self.model).base_model
        hidden = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), mask.sum(1) - 1]
        return head(last).float()[:, 0].tolist()

    def _refuse_alike(self, scores: list[float], texts: Iterable[str], fix: str) -> None:
        """Raise an error if all texts of a batch get the same score. Batches with few different texts are not checked.

        Raises:
            RewardError: All scores are equal. The message ends with ``fix``: another possible cause, and advice.
        """
        different = len(set(texts))
        if different > TEXTS_BY_CHANCE and len(set(scores)) == 1:
            raise RewardError(
                f"the reward model {self.__name__} returns the same score {scores[0]:g} for {different} different texts. Its "
                f"head may be newly initialized, its tokenizer may belong to another model, or {fix}"
            )
        self._alike_checked = self._alike_checked or different > TEXTS_BY_CHANCE


class ModelReward(_RewardModel):
    """Reward function that scores prompt and completion with a reward model.

    For plain text, the reward model reads prompt and completion without additional special tokens. Conversations are
    rendered with the reward model's chat template. If a text is longer than the model's context, its beginning is removed.
    The score is the classifier's output at the last token that is not padding.

    Args:
        model: Folder, hub id, or loaded model with ``num_labels=1``.
        tokenizer: Tokenizer of the reward model. None loads the tokenizer from the model's folder.
        policy_tokenizer: Tokenizer of the policy. It is used for a reward model that was built in memory and therefore has
            no folder.
        batch_size: Number of rows per forward pass.
        trust_remote_code: Whether Python code from the repository of the model or its tokenizer may run. It is used only if
            ``model`` is a string.
        model_init_kwargs: Keyword arguments of ``from_pretrained``. They are used only if ``model`` is a string.
        chat_template_kwargs: Keyword arguments of the chat template. They should be the same as for the policy.

    Raises:
        ModelError: The folder cannot be loaded, or the model does not have exactly one label.
        ConfigError: The model was built in memory, and ``policy_tokenizer`` is None or has more tokens than the model has
            embeddings.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        policy_tokenizer: Tokenizer | None = None,
        batch_size: int = 8,
        trust_remote_code: bool = False,
        model_init_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        # The caller may pass the same dict to another trainer, so the dict is copied.
        init = dict(model_init_kwargs or {})
        init.setdefault("trust_remote_code", trust_remote_code)
        if isinstance(model, str):
            default = {} if "torch_dtype" in init else {"dtype": "auto"}
            model = load_classifier(model, num_labels=1, new_head=False, **(default | init))
        labels = label_count(model)
        if labels != 1:
            raise ModelError(
                f"a reward model needs num_labels=1, but {type(model).__name__} has num_labels={labels}. Fix: pass a model with "
                "one label, or a function f(prompts, completions, **columns) that calls this model."
            )
        if tokenizer is None and not get_config_model_id(model.config):
            tokenizer = None if policy_tokenizer is None else inner_tokenizer(policy_tokenizer)
            if tokenizer is None or len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
                raise ConfigError(
                    f"reward_funcs contains a {type(model).__name__} that was built in memory, so its tokenizer is not known. "
                    "Fix: pass reward_processing_classes=tokenizer, with the tokenizer of the reward model."
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
        """Move the model to ``device``, and return self. If several devices share the model, it is not moved."""
        if not getattr(self.model, "hf_device_map", None):
            self.model.to(device)
        return self

    def probe(self) -> list[float]:
        """Score four short answers to a question, and log the scores. Users can then notice a wrong chat template or an
        untrained head before training.

        Raises:
            RewardError: All four scores are equal.
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
        """Return one score per row.

        Raises:
            RewardError: All texts of a batch got the same score. The first batch with several different texts is checked.
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
        """Raise an error if the chat template would drop tool calls or tool results of a completion."""
        if not any(message.get("tool_calls") or message.get("role") == "tool" for message in completion):
            return
        if self._calls_tools is None:
            self._calls_tools = supports_tool_calling(self.tokenizer)
        if not self._calls_tools:
            raise RewardError(
                f"the completion calls tools, but the chat template of the reward model {self.__name__} does not render tool "
                "calls and their results. Fix: use a reward model whose template renders them, or a reward function on messages."
            )


class WholeTextReward(ModelReward):
    """Reward model for plain text. Its tokenizer adds special tokens to each text.

    If a text already begins with the bos token, no second bos token is added. Conversations are rendered with the chat
    template, as in `ModelReward`.
    """

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        if not isinstance(prompt, str):
            return super()._ids(prompt, completion)
        ids = self.tokenizer(prompt + completion, verbose=False)["input_ids"]
        return self._fitting(one_bos(ids, self.tokenizer.bos_token_id))


class TokenReward(_RewardModel):
    """Reward function that reads token ids instead of text.

    The score is the classifier's output at the last token of the response. If the response is empty, the last token of the
    prompt is used.

    Args:
        model: Sequence classifier with one label and the same vocabulary as the policy.
        pad_token_id: Id of padding tokens. Padding is masked, so the value does not affect the scores.
        batch_size: Number of responses per forward pass.
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, batch_size: int = 64) -> None:
        super().__init__(model, pad_token_id, batch_size)

    def __call__(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return one score per response. If a sequence is longer than the model's context, its beginning is removed.

        Raises:
            RewardError: All responses of a batch got the same score. The first batch with several different responses is
                checked.
        """
        rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        scores = self._scores_of([self._fitting(row) for row in rows])
        if not self._alike_checked:
            fix = (
                "its weights may be from another model. Fix: check that the head of the model was trained and saved with "
                "the model."
            )
            self._refuse_alike(scores, map(str, zip(prompt_ids, completion_ids, strict=True)), fix)
        return scores
