"""`EpisodeFields`: how far tools and environments may go in one completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.errors import ConfigError

__all__ = ["EpisodeFields"]


@dataclass
class EpisodeFields:
    """Fields of configs whose trainers let the model call tools; the others do not have them."""

    max_tool_calling_iterations: int | None = field(
        default=None, metadata={"help": "Rounds of tool calls per completion; None: 32; -1: no limit but the tokens."}
    )
    max_tool_output_tokens: int | None = field(
        default=None, metadata={"help": "A longer tool result is cut in its middle; None: it is left whole."}
    )
    tool_workers: int | None = field(
        default=None,
        metadata={"help": "Rollouts whose tools run at once; None: all, at most 32; 0: in turn, on the main thread."},
    )
    tool_timeout: float | None = field(
        default=60.0,
        metadata={
            "help": "Seconds a tool call, a reset or a get_reward may take; None: for ever. Not with tool_workers=0."
        },
    )
    environment_retries: int = field(
        default=0, metadata={"help": "Further attempts when an environment's reset or get_reward raises."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        for name, holds, rule in self._tool_rules():
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r} {rule}.")

    def _tool_rules(self) -> list[tuple[str, bool, str]]:
        rounds, tokens, seconds = self.max_tool_calling_iterations, self.max_tool_output_tokens, self.tool_timeout
        return [
            (
                "max_tool_calling_iterations",
                rounds is None or rounds >= -1,
                "must be -1 (no limit), 0 or positive, or None",
            ),
            ("max_tool_output_tokens", tokens is None or tokens >= 1, "must be at least 1, or None"),
            ("tool_workers", self.tool_workers is None or self.tool_workers >= 0, "must be 0 or positive, or None"),
            ("tool_timeout", seconds is None or seconds > 0, "must be above 0 seconds, or None"),
            ("environment_retries", self.environment_retries >= 0, "must be 0 or positive"),
        ]
