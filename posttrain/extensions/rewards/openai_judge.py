"""`OpenAIPairwiseJudge`: judge that sends requests to a server with OpenAI's chat API."""

from __future__ import annotations

import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.extensions.rewards.remote import post_json
from posttrain.rewards.judges import NO_VERDICT, BasePairwiseJudge

logger = logging.getLogger(__name__)

PAIRWISE_PROMPT = """\
You compare two answers to one request. Decide which of them serves the person who asked better: correct, complete, clear, \
honest, no longer than it needs to be. The order in which they are shown means nothing.

[Request]
{prompt}

[Answer 0]
{response0}

[Answer 1]
{response1}

Reply with one character, 0 or 1: the number of the better answer."""


class OpenAIPairwiseJudge(BasePairwiseJudge):
    """Pairwise judge that calls a model on an OpenAI-compatible chat server, such as vLLM, llama.cpp or a hosted API.

    The model must answer "0" or "1".

    Args:
        model: Name of the model on the server.
        system_prompt: Template with ``{prompt}``, ``{response0}`` and ``{response1}``. None: the built-in template.
        max_requests: Maximum number of requests. Later pairs get no verdict. None: no limit.
        base_url: URL including the API version. None: the environment variable ``OPENAI_BASE_URL``, or OpenAI's API if
            it is not set.
        api_key: API key. None: the environment variable ``OPENAI_API_KEY``.
        options: Additional fields of each request. A field with the value None is removed from the request, e.g.
            ``{"max_tokens": None, "max_completion_tokens": 1}``.
        seed: Random seed for the order of the two completions.
        concurrency: Maximum number of concurrent requests.
        timeout: Number of seconds to wait for a response.
        retries: Number of further attempts after a failed request.
        backoff: Maximum number of seconds before the first retry. The maximum doubles with each retry. The wait is
            sampled between half the maximum and the maximum.
        vision: Whether the model accepts images. Images are sent before the text. The text contains ``[image]`` for each image.

    >>> judge = OpenAIPairwiseJudge("my-judge", base_url="http://localhost:8000/v1")
    >>> judge.judge(["2 + 2?"], [["4", "5"]])  # doctest: +SKIP
    [0]
    """

    def __init__(
        self,
        model: str = "gpt-4-turbo-preview",
        system_prompt: str | None = None,
        max_requests: int | None = 1000,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        options: dict[str, Any] | None = None,
        seed: int = 0,
        concurrency: int = 16,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        vision: bool = False,
    ) -> None:
        self.vision = vision
        base = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base!r} must start with http:// or https://.")
        self.request = {"timeout": timeout, "retries": retries, "backoff": backoff}
        for name, value in {"concurrency": concurrency, **self.request}.items():
            if value < 0 or (value == 0 and name != "retries"):
                raise ConfigError(f"{name}={value} of the judge must be above 0 (retries may also be 0).")
        self.url, self.model, self.concurrency = f"{base.rstrip('/')}/chat/completions", model, concurrency
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY")
        self.system_prompt = PAIRWISE_PROMPT if system_prompt is None else system_prompt
        self.max_requests, self.num_requests = max_requests, 0
        self.options = {"max_tokens": 1, "temperature": 0.0, **(options or {})}
        self._random = random.Random(seed)
        self._warned: set[str] = set()

    def judge(
        self,
        prompts: list[str],
        completions: list[list[str]],
        shuffle_order: bool = True,
        images: list[list[str]] | None = None,
    ) -> list[int]:
        """Return one verdict per pair: the index of the better completion, or -1. See `BasePairwiseJudge.judge`.

        Args:
            prompts: Texts of n prompts.
            completions: Two completions for each prompt.
            shuffle_order: Whether to swap the two completions in about half of the pairs at random. Verdicts refer to the
                original order.
            images: ``data:`` URLs of each prompt's images, for a judge with ``vision``.

        Raises:
            RewardError: The server cannot be reached, or it refuses a request.
        """
        if self.max_requests is not None and self.num_requests >= self.max_requests:
            self._warn(
                "budget", "the judge has sent max_requests=%d requests. Further pairs get no verdict.",
                self.max_requests,
            )  # fmt: skip
            return [NO_VERDICT] * len(prompts)
        self.num_requests += len(prompts)
        turned = [shuffle_order and self._random.random() < 0.5 for _ in prompts]
        shown = [pair[::-1] if turn else pair for pair, turn in zip(completions, turned, strict=True)]
        texts = [
            self.system_prompt.format(prompt=prompt, response0=first, response1=second)
            for prompt, (first, second) in zip(prompts, shown, strict=True)
        ]
        questions: list[Any] = texts
        if images is not None:
            shown_as = [[{"type": "image_url", "image_url": {"url": url}} for url in urls] for urls in images]
            questions = [
                [*blocks, {"type": "text", "text": text}] for blocks, text in zip(shown_as, texts, strict=True)
            ]
        # If a request raises an exception, all requests that have not started are canceled.
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(questions))), "judge") as pool:
            verdicts = [self._verdict(answer) for answer in pool.map(self._ask, questions)]
        return [v if v == NO_VERDICT or not turn else 1 - v for v, turn in zip(verdicts, turned, strict=True)]

    def _ask(self, text: Any) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], **self.options}
        body = {key: value for key, value in body.items() if value is not None}
        settings: dict[str, Any] = {"who": f"judge ({self.model})", "api_key": self._api_key, **self.request}
        response = post_json(self.url, body, **settings)
        try:
            return str(response.json()["choices"][0]["message"].get("content") or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RewardError(
                f"the judge at {self.url} returned {response.content[:200]!r}, which is not a chat completion. Fix: set base_url "
                "to the URL of an OpenAI-compatible server, including its version (.../v1)."
            ) from error

    def _verdict(self, answer: str) -> int:
        answer = answer.rpartition("</think>")[2].strip(" \t\r\n.\"'`*")
        if answer in ("0", "1"):
            return int(answer)
        self._warn("verdict", "the judge answered %r instead of 0 or 1. Such pairs count as ties.", answer[:80])
        return NO_VERDICT

    def _warn(self, key: str, message: str, *values: Any) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)
