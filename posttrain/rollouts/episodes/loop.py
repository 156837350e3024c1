"""Multi-turn rollouts with tools on any engine. Each turn appends token ids, so sampled tokens are never retokenized."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.data.chat import inner_tokenizer, terminal_token_ids, tokenize_prompts
from posttrain.data.responses import parse_response
from posttrain.errors import DataError, RolloutError
from posttrain.rollouts.base import RolloutEngine, require_engine
from posttrain.rollouts.batch import shared_requests
from posttrain.rollouts.episodes.environments import is_done
from posttrain.rollouts.episodes.tokens import ToolSuffix, prepare_tokenizer
from posttrain.rollouts.episodes.toolbox import ToolBox, ToolResult, ToolRunner
from posttrain.types import FinishReason, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)

# Default maximum number of rounds of tool calls.
MAX_ITERATIONS = 32
# Constants for the seeds of a batch of episodes, which make all seeds differ. SEED_STRIDE separates the engine calls of
# different turns. BATCH_STRIDE separates the batches of one turn, because the seeds of ranks are consecutive.
SEED_STRIDE, BATCH_STRIDE = 7_919, 15_485_863
# Maximum ratio of the token limit of an engine call to the remaining budget of each of its rollouts. Rollouts share a call
# only if its token limit is below this ratio times each remaining budget.
TURN_WASTE = 2

Batches = list[tuple[list[list[int]], Sampling]]
Generate = Callable[[Batches], list[list[Rollout]]]


@dataclass(slots=True)
class Episode:
    """Multi-turn rollout in progress.

    Attributes:
        prompt_ids: Prompt of the first turn.
        tools: Tools that the model may call in this episode.
        environment: Environment whose methods are tools in this episode. None: there is no environment.
        token_ids: Tokens after the prompt: turns of the model, and results of tools.
        tool_mask: Mask of ``token_ids``: 1 for tokens of the model, 0 for tokens of tools.
        logp: The engine's log-probs of the model's tokens, and 0.0 for tokens of tools. The list is empty if the engine
            returns no log-probs.
        processed_logp: Log-probs of the same tokens, under the truncated distribution from which they were sampled.
        messages: Turns as messages, with parsed tool calls.
        finish_reason: Reason for the end of the last turn. ``stop``: the model ended the turn. ``length``: the episode's
            budget was used up, so the turn was truncated.
        version: Version of the weights that sampled the last turn.
        spans: Versions of the weights that sampled the model's tokens, as pairs (version, number of consecutive tokens).
        shown: Images in tool results, with their positions in ``token_ids``.
        masked: Whether the episode is excluded from the loss, because images of a tool result could not be inserted.
        escaped: Number of special tokens in tool results that were encoded as ordinary text.
        calls: Number of tool calls so far.
        failures: Number of tool calls that returned an error.
    """

    prompt_ids: list[int]
    tools: ToolBox = field(default_factory=ToolBox)
    environment: Any = None
    token_ids: list[int] = field(default_factory=list)
    tool_mask: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    processed_logp: list[float] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    version: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    masked: bool = False
    escaped: int = 0
    calls: int = 0
    failures: int = 0
    waiting: list[dict[str, Any]] = field(default_factory=list)
    suffix: list[int] = field(default_factory=list)
    has_logps: bool = True
    processed: bool = False

    @property
    def ids(self) -> Prompt:
        """All tokens of the episode with their images, which are the prompt of the next turn."""
        shown = [replace(image, start=image.start + len(self.prompt_ids)) for image in self.shown]
        return Prompt([*self.prompt_ids, *self.token_ids], (*Prompt.pictures_of(self.prompt_ids), *shown))

    def rollout(self, text: str | None = None) -> Rollout:
        """Convert the finished episode to a `Rollout`."""
        logp = self.logp if self.has_logps else []
        mask = None if all(self.tool_mask) else self.tool_mask
        mask = [0] * len(self.tool_mask) if self.masked else mask
        drawn = self.processed_logp if self.processed and self.has_logps else None
        return Rollout(
            self.prompt_ids,
            self.token_ids,
            logp,
            self.finish_reason,
            self.version,
            mask,
            text,
            processed_logp=drawn,
            spans=self.spans if len({version for version, _ in self.spans}) > 1 else None,
            pictures=Prompt.pictures_of(self.prompt_ids),
            shown=self.shown,
        )

    def add(self, ids: list[int], mask: int, logp: list[float], processed_logp: list[float] | None = None) -> None:
        """Append tokens of the model (``mask=1``) or of tools (``mask=0``)."""
        self.token_ids += ids
        self.tool_mask += [mask] * len(ids)
        self.logp += logp
        self.processed_logp += logp if processed_logp is None else processed_logp
        self.processed = self.processed or processed_logp is not None


class ToolLoop:
    """Runs episodes turn by turn until all episodes are finished.

    ``sampling.max_new_tokens`` is the budget of a whole episode, including tokens of tools. If a tool result does not fit
    into the budget, the episode ends without this result.

    Args:
        tokenizer: Result of `prepare_tokenizer`.
        generate: Function that samples one completion per prompt. Its argument is a list of pairs ``(prompts, sampling)``.
            The function is called once per turn. The list is empty if only other processes have unfinished episodes.
        stop_ids: Tokens that end a turn.
        runner: Object that runs the tools.
        max_iterations: Maximum number of rounds of tool calls. None: no limit.
        max_output_tokens: Maximum number of tokens of a tool result. The middle of a longer result is removed. None: no
            limit.
        context: Maximum number of tokens of prompt and completion.
        any_process: Function whose argument is True if this process has unfinished episodes. It returns whether any process
            has unfinished episodes.
        template_kwargs: Arguments of the chat template.
        reader: Image processor, if prompts and tool results may contain images.
        parse: Function ``(tokenizer, ids, prefix, tools) -> message`` that parses a turn of the model.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        generate: Generate,
        *,
        stop_ids: Sequence[int],
        runner: ToolRunner | None = None,
        max_iterations: int | None = MAX_ITERATIONS,
        max_output_tokens: int | None = None,
        context: int | None = None,
        any_process: Callable[[bool], bool] = bool,
        template_kwargs: dict[str, Any] | None = None,
        reader: PictureProcessor | None = None,
        parse: Callable[..., dict[str, Any]] = parse_response,
    ) -> None:
        self.tokenizer, self.generate, self.parse = tokenizer, generate, parse
        self.runner = runner or ToolRunner()
        self.max_iterations, self.max_output_tokens = max_iterations, max_output_tokens
        self.context, self.any_process = context, any_process
        self.suffix, self.reader = ToolSuffix(tokenizer, stop_ids, template_kwargs, reader), reader

    def run(self, episodes: Sequence[Episode], sampling: Sampling) -> None:
        """Run all episodes to their end. The episodes are changed in place."""
        self._generate_turn(list(episodes), sampling)
        rounds = itertools.count(1) if self.max_iterations is None else range(1, self.max_iterations + 1)
        for number in rounds:
            calling = [e for e in episodes if e.waiting]
            if not self.any_process(bool(calling)):
                return
            answers = self.runner.run([(e.tools, e.waiting) for e in calling])
            ready = [e for e, results in zip(calling, answers, strict=True) if self._answer(e, results, sampling)]
            self._generate_turn(ready, replace(sampling, seed=_later(sampling.seed, number)))

    def _left(self, episode: Episode, sampling: Sampling) -> int:
        """Return the number of further tokens that the episode's budget and the model's context allow."""
        left = sampling.max_new_tokens - len(episode.token_ids)
        return left if self.context is None else min(left, self.context - len(episode.ids))

    def _answer(self, episode: Episode, results: list[ToolResult], sampling: Sampling) -> bool:
        """Append tool results to the episode. Return False if the episode ends with them."""
        calls, episode.waiting = episode.waiting, []
        episode.calls += len(calls)
        episode.failures += sum(result.failed for result in results)
        messages = [self._message(call, result) for call, result in zip(calls, results, strict=True)]
        if is_done(episode.environment):
            episode.messages += opened(messages)
            return False
        suffix = self._suffix(episode, messages)
        if suffix is None or not self._fits(episode, suffix, sampling):
            return False
        episode.messages += opened(messages)
        episode.suffix = suffix
        at = len(episode.token_ids)
        episode.shown += [replace(image, start=image.start + at) for image in suffix.pictures]
        episode.add(suffix, 0, [0.0] * len(suffix))
        if len(episode.token_ids) == sampling.max_new_tokens:
            episode.finish_reason = "length"
            return False
        return True

    def _suffix(self, episode: Episode, messages: list[dict[str, Any]]) -> Prompt | None:
        """Tokenize tool results. If their images cannot be inserted, return None and exclude the episode from the loss."""
        before = self.suffix.text.escaped
        try:
            suffix = self.suffix(messages, closed=episode.token_ids[-1] in self.suffix.stop_ids)
            episode.escaped += self.suffix.text.escaped - before
            return suffix
        except DataError as error:
            if not any(isinstance(message["content"], list) for message in messages):
                raise
            logger.warning("the images of a tool result cannot be used, so the episode is excluded: %s", error)
            episode.masked = True
            return None

    def _fits(self, episode: Episode, suffix: Prompt, sampling: Sampling) -> bool:
        """Return whether tool results fit into the budget, into the model's context, and into the maximum number of images."""
        most = None if self.reader is None else self.reader.per_row
        images = len(Prompt.pictures_of(episode.prompt_ids)) + len(episode.shown) + len(suffix.pictures)
        many = most is not None and bool(suffix.pictures) and images > most
        full = self.context is not None and len(episode.ids) + len(suffix) >= self.context
        return not (many or full or len(episode.token_ids) + len(suffix) > sampling.max_new_tokens)

    def _message(self, call: dict[str, Any], result: ToolResult) -> dict[str, Any]:
        name, content = call.get("function", {}).get("name"), self._shortened(result.text)
        if result.blocks is not None:
            content = [b | {"text": self._shortened(b["text"])} if b["type"] == "text" else b for b in result.blocks]
        message = {"role": "tool", "name": str(name or ""), "content": content}
        return message | ({"tool_call_id": call["id"]} if call.get("id") is not None else {})

    def _shortened(self, text: str) -> str:
        """Truncate a tool result with more than ``max_output_tokens`` tokens by removing its middle."""
        limit = self.max_output_tokens
        if limit is None or len(ids := self.suffix.plain(text)) <= limit:
            return text
        marker = f" ... [{len(ids) - limit} tokens omitted] ... "
        budget = max(0, limit - len(self.suffix.plain(marker)))
        if budget < 2:
            return self._text(ids[:limit])
        head = budget - budget // 2
        return self._text(ids[:head]) + marker + self._text(ids[len(ids) - budget // 2 :])

    def _text(self, ids: list[int]) -> str:
        return self.suffix.tokenizer.decode(ids, skip_special_tokens=False).strip("\ufffd")

    # Turns of the model ------------------------------------------------------------------------------------------

    def _generate_turn(self, episodes: list[Episode], sampling: Sampling) -> None:
        """Generate the next turn of each episode."""
        groups = self._batches(episodes, sampling)
        batches = [
            (
                [episodes[i].ids for i in members],
                replace(sampling, max_new_tokens=most, seed=_later(sampling.seed, n, BATCH_STRIDE)),
            )
            for n, (members, most) in enumerate(groups)
        ]
        for (members, _), rollouts in zip(groups, self.generate(batches), strict=True):
            for index, rollout in zip(members, rollouts, strict=True):
                self._append_turn(episodes[index], rollout, self._left(episodes[index], sampling))

    def _batches(self, episodes: list[Episode], sampling: Sampling) -> list[tuple[list[int], int]]:
        """Group episodes into engine calls. The token limit of a call is the largest remaining budget of its episodes.

        All rollouts of a call have the same token limit. Rollouts with a much smaller budget or with less context are in
        separate calls. A rollout with a much smaller budget would otherwise be generated far beyond its budget and then
        truncated.
        """
        left = [self._left(e, sampling) for e in episodes]
        for e, tokens in zip(episodes, left, strict=True):
            if tokens < 1:
                raise RolloutError(
                    f"a prompt of {len(e.prompt_ids)} tokens leaves no space for a completion in the model's context "
                    f"of {self.context} tokens."
                )
        waiting = sorted(range(len(episodes)), key=lambda i: -left[i])
        groups = []
        while waiting:
            most = left[waiting[0]]
            fits = [i for i in waiting if TURN_WASTE * left[i] > most and self._room(episodes[i]) >= most]
            # Keep the order of prompts. If equal prompts are consecutive, the engine computes them only once.
            groups.append((sorted(fits), most))
            waiting = [i for i in waiting if i not in fits]
        return groups

    def _room(self, episode: Episode) -> float:
        return float("inf") if self.context is None else self.context - len(episode.ids)

    def _append_turn(self, episode: Episode, rollout: Rollout, left: int) -> None:
        """Append a turn of the model to its episode, and parse the turn's tool calls."""
        ids = rollout.token_ids[:left]
        cut = len(ids) < len(rollout.token_ids)
        episode.finish_reason = "length" if cut else rollout.finish_reason
        episode.version = rollout.version
        episode.spans += turn_spans(rollout, len(ids))
        episode.has_logps = episode.has_logps and len(rollout.logp) == len(rollout.token_ids)
        before = episode.suffix or episode.prompt_ids
        drawn = rollout.processed_logp
        episode.add(ids, 1, rollout.logp[:left], None if drawn is None else drawn[:left])
        if not ids:
            return
        message = self.parse(self.tokenizer, ids, prefix=before, tools=episode.tools.schemas or None)
        episode.messages.append(message)
        if self.reader is not None and self.reader.token_id in ids:
            # The model sampled an image placeholder without an image. The next turn could not be computed, so the episode
            # ends here.
            return
        # Do not call the tools of a truncated turn, because the budget has no space for their results.
        if episode.finish_reason == "stop":
            episode.waiting = list(message.get("tool_calls") or [])


def opened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert turns and tool results to messages for reward functions. Images are converted to PIL images, which are decoded
    on access.
    """
    if all(isinstance(message["content"], str) for message in messages):
        return messages
    return plugins.module("extensions.images.picture").with_opened(messages)


def turn_spans(rollout: Rollout, length: int) -> list[tuple[int, int]]:
    """Return the versions of the weights that sampled the first ``length`` tokens of a rollout.

    The result is a list of pairs (version, number of consecutive tokens).
    """
    spans = []
    for version, count in rollout.spans or [(rollout.version, length)]:
        spans.append((version, min(count, length)))
        length -= spans[-1][1]
    return [span for span in spans if span[1]]


def _later(seed: int | None, number: int, stride: int = SEED_STRIDE) -> int | None:
    return None if seed is None else (seed + number * stride) % 2**63


def roll_out_with_tools(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[list[dict[str, Any]]],
    tools: Sequence[Callable],
    sampling: Sampling,
    *,
    runner: ToolRunner | None = None,
    **options: Any,
) -> list[Episode]:
    """Generate episodes with tools outside of training.

    Args:
        engine: Rollout engine that samples the turns.
        tokenizer: Tokenizer whose chat template supports tools.
        prompts: Prompts, each as a list of messages.
        tools: Functions with type hints and Google-style docstrings.
        sampling: Sampling settings. ``max_new_tokens`` is the budget of a whole episode. If ``stop_token_ids`` is empty, the
            tokenizer's stop tokens are used.
        runner: Runner with the threads and the time limit of tools.
        options: Options of `ToolLoop` (``max_iterations``, ``max_output_tokens``, ``context``, ``template_kwargs``).

    Returns:
        One finished episode per prompt, in order.

    Example:
        ``roll_out_with_tools(create_engine("auto", model, pad_token_id=0), tokenizer, [[{"role": "user", "content": "7 * 8?"}]],
        [multiply], Sampling(256, temperature=0.0))[0].messages[-1]["content"]``
    """
    own = prepare_tokenizer(tokenizer)
    stop_ids = sampling.stop_token_ids or terminal_token_ids(inner_tokenizer(own))
    box = ToolBox.of(tools)
    rows = [{"prompt": prompt, "tools": box.schemas} for prompt in prompts]
    ids = tokenize_prompts(rows, own, chat_template_kwargs=options.get("template_kwargs"))
    episodes = [Episode(prompt, box) for prompt in ids]

    def generate(batches: Batches) -> list[list[Rollout]]:
        return [engine.generate(shared_requests(p), settings) for p, settings in batches]

    loop = ToolLoop(own, generate, stop_ids=stop_ids, runner=runner, **options)
    with require_engine(engine, "engine").prefix_cache():
        loop.run(episodes, replace(sampling, stop_token_ids=tuple(stop_ids)))
    return episodes
