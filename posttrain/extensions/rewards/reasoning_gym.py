"""Dataset and reward function for a reasoning-gym task or a mixture of tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import datasets

from posttrain.errors import ConfigError, RewardError, check_choice, did_you_mean
from posttrain.integrations import require
from posttrain.rewards.math import boxed
from posttrain.rewards.texts import completion_text

# Distance between the seeds of two datasets. reasoning-gym samples row i with the seed ``seed + i``, so datasets with
# consecutive seeds would have almost the same rows.
SPACING = 10_000_019
EXTRACT = ("auto", "tag", "last_number", "text")
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
CLOSE = re.compile("</answer>", re.IGNORECASE)
ANSWER_IS = re.compile(r"(?:answer|result)\s*(?:is|:|=)\s*:?\s*(.+)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def extract_answer(text: str, how: str = "auto") -> str | None:
    r"""Extract the answer from a completion. Return None if there is no answer.

    Args:
        text: Text of the completion.
        how: ``tag`` returns the content of the last ``<answer>...</answer>``. ``last_number`` returns the last number. ``text``
            returns the whole text. ``auto`` (default) returns the first of these texts that exists: the content of the tag,
            the last ``\boxed{...}``, the text after "answer is" on the last line, the last line.

    >>> extract_answer("So <answer> 12 </answer>."), extract_answer("The answer is 12."), extract_answer("a\n\n7")
    ('12', '12', '7')
    """
    check_choice("extract", how, EXTRACT)
    if how == "text":
        return text.strip()
    if how == "last_number":
        numbers = NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    # Ignore the text after the last closing tag, because every opening tag there would cause a search to the end of the text.
    end = max((match.end() for match in CLOSE.finditer(text)), default=0)
    tags = TAG.findall(text, 0, end)
    if tags or how == "tag":
        return tags[-1].strip() if tags else None
    inside = boxed(text)
    if inside is not None:
        return inside.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    announced = ANSWER_IS.search(lines[-1])
    return (announced[1] if announced else lines[-1]).strip().rstrip(".").strip("*` ")


class ReasoningGymReward:
    """Reward function of a reasoning-gym task. The task's scorer returns a reward from 0.0 to 1.0.

    Args:
        task: Dataset object of reasoning-gym.
        name: Name of the reward function in metrics and tables.
        extract: Argument ``how`` of `extract_answer`, or a function that returns the answer in a completion or None.
    """

    def __init__(self, task: Any, name: str, extract: str | Callable[[str], str | None] = "auto") -> None:
        if not callable(extract):
            check_choice("extract", extract, EXTRACT)
        self.task, self.extract = task, extract
        self.__name__ = name
        self._entries: dict[int, dict[str, Any]] = {}

    def __call__(
        self, completions: list[Any], task_index: list[int], answer: list[Any], log_extra: Any = None, **_: Any
    ) -> list[float]:
        """Return one score per completion. Completions without an answer get 0.0."""
        texts = [completion_text(completion) for completion in completions]
        how = self.extract
        answers = [how(t) if callable(how) else extract_answer(t, how) for t in texts]
        if log_extra is not None:
            log_extra("answer_found", [f if f is not None else "[none]" for f in answers])
        return [self._score(f, index, gold) for f, index, gold in zip(answers, task_index, answer, strict=True)]

    def entry(self, index: int) -> dict[str, Any]:
        """Return question, answer and metadata of row ``index`` of the task, and cache them."""
        if index not in self._entries:
            self._entries[index] = self.task[index]
        return self._entries[index]

    def _score(self, reply: str | None, index: int, gold: Any) -> float:
        entry = self.entry(index)
        if str(entry["answer"]) != str(gold):
            raise RewardError(
                f"{self.__name__}: row task_index={index} has the answer {gold!r}, but the answer in this reward's task is "
                f"{entry['answer']!r}. The dataset comes from a call of reasoning_gym_task with another seed, size or "
                "settings. Fix: use the dataset and the reward that the same call returned."
            )
        if reply is None:
            return 0.0
        try:
            return float(self.task.score_answer(answer=reply, entry=entry))
        # Catch all exceptions, because a scorer may raise any exception if it cannot parse the model's output.
        except Exception:
            return 0.0


def reasoning_gym_task(
    task: str | Mapping[str, Mapping[str, Any] | float],
    size: int = 1000,
    seed: int = 0,
    *,
    system_prompt: str | None = None,
    extract: str | Callable[[str], str | None] = "auto",
    **config: Any,
) -> tuple[datasets.Dataset, ReasoningGymReward]:
    """Create a dataset of prompts from a reasoning-gym task, and the reward function that scores the answers.

    Datasets with different seeds have no common rows, so ``seed=1`` can be the held-out set for ``seed=0``. (reasoning-gym
    itself samples row i with the seed ``seed + i``, so its datasets with consecutive seeds have almost the same rows.)

    Args:
        task: Name of a task, or a mixture ``{name: weight}`` or ``{name: {"weight": 2.0, **settings}}``. Each row of a mixture
            is sampled from one of its tasks.
        size: Number of rows.
        seed: Random seed of the rows.
        system_prompt: System message. It can describe the format of answers, e.g. ``<answer>...</answer>``.
        extract: Argument ``how`` of `extract_answer`, or a function that returns the answer in a completion or None.
        config: Settings of the task, under the names that reasoning-gym uses.

    Returns:
        A dataset with the columns ``prompt`` (messages), ``answer``, ``task`` and ``task_index``, and its reward function.

    Raises:
        MissingDependencyError: reasoning-gym is not installed.
        ConfigError: The task is unknown or does not accept the settings.

    Example:
        ``dataset, reward = reasoning_gym_task("chain_sum", size=1000, seed=0, min_terms=2, max_terms=3)``

    Reference: Reasoning Gym, arXiv:2505.24760.
    """
    gym = require("reasoning_gym", "reasoning_gym_task")
    if size < 1:
        raise ConfigError(f"size={size} must be at least 1.")
    dataset = _make(gym, task, size=size, seed=seed * SPACING, config=config)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    reward = ReasoningGymReward(dataset, task if isinstance(task, str) else "reasoning_gym", extract)
    rows = []
    for index in range(size):
        entry = reward.entry(index)
        name = task if isinstance(task, str) else entry["metadata"]["source_dataset"]
        prompt = [*system, {"role": "user", "content": entry["question"]}]
        rows.append({"prompt": prompt, "answer": str(entry["answer"]), "task": name, "task_index": index})
    return datasets.Dataset.from_list(rows), reward


def _make(gym: Any, task: Any, *, size: int, seed: int, config: dict[str, Any]) -> Any:
    tasks = require("reasoning_gym.factory", "reasoning_gym_task").DATASETS
    names = [task] if isinstance(task, str) else list(task)
    for name in names:
        if name not in tasks:
            raise ConfigError(
                f"{name!r} is not a task of reasoning-gym{did_you_mean(name, tasks)}. Fix: choose one of its {len(tasks)} tasks "
                "in reasoning_gym.factory.DATASETS."
            )
    if not names:
        raise ConfigError("the mixture of tasks is empty. Fix: pass at least one task name with its weight.")
    try:
        if isinstance(task, str):
            return gym.create_dataset(task, size=size, seed=seed, **config)
        if config:
            raise ConfigError(
                f"the settings {sorted(config)} apply to one task, but task is a mixture. Fix: pass {{name: {{setting: value}}}}."
            )
        spec = require("reasoning_gym.composite", "a mixture of tasks").DatasetSpec
        parts = []
        for number, (name, options) in enumerate(task.items()):
            settings = dict(options) if isinstance(options, Mapping) else {"weight": options}
            weight = float(settings.pop("weight", 1.0))
            settings.setdefault("seed", seed + (number + 1) * SPACING * SPACING % 2**31)
            parts.append(spec(name=name, weight=weight, config=settings))
        return gym.create_dataset("composite", size=size, seed=seed, datasets=parts)
    except (TypeError, AssertionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"reasoning-gym rejects these settings of {', '.join(names)}: {error}.") from error
