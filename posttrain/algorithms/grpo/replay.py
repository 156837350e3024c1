"""GRPO with a replay buffer: groups without spread make room for earlier groups that had one."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.grpo.config import GRPOConfig
from posttrain.algorithms.grpo.trainer import GRPOTrainer
from posttrain.errors import ConfigError
from posttrain.losses.advantages import group_advantages
from posttrain.metrics import mean, total
from posttrain.rewards.base import RewardTable
from posttrain.rollouts.generation import Generation
from posttrain.types import Rollout

__all__ = ["GRPOWithReplayBufferConfig", "GRPOWithReplayBufferTrainer", "ReplayBuffer"]


class ReplayBuffer:
    """Keeps the data of the highest scores, and gives them back in proportion to their score.

    Args:
        max_size: Most items.

    Attributes:
        heap: Items ``(score, number, data)``, the lowest score first; the number tells equal scores apart.

    >>> buffer = ReplayBuffer(2)
    >>> buffer.add([1.0, 3.0, 2.0, 2.0], ["a", "b", "c", "d"])
    >>> sorted(item[2] for item in buffer.heap)
    ['b', 'c']
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.heap: list[tuple[float, int, Any]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, scores: Iterable[float], data: Iterable[Any]) -> None:
        """Store items; a full buffer gives up its lowest score for a strictly higher one."""
        for score, item in zip(scores, data, strict=True):
            entry = (float(score), next(self._count), item)
            if len(self.heap) < self.max_size:
                heapq.heappush(self.heap, entry)
            elif self.heap and entry[0] > self.heap[0][0]:
                heapq.heapreplace(self.heap, entry)

    def sample(self, count: int, generator: torch.Generator | None = None) -> list[Any] | None:
        """``count`` items, drawn with probability score / sum, without replacement where there are enough; None if empty.

        Where the scores add up to nothing (or one is negative), all items are equally likely.
        """
        if not self.heap:
            return None
        scores = torch.tensor([entry[0] for entry in self.heap], dtype=torch.float64)
        if float(scores.sum()) <= 0 or bool((scores < 0).any()):
            scores = torch.ones_like(scores)
        again = count > int((scores > 0).sum())
        drawn = torch.multinomial(scores, count, replacement=again, generator=generator)
        return [self.heap[i][2] for i in drawn.tolist()]

    def keep(self, wanted: Callable[[Any], bool]) -> None:
        """Drop the items whose data is not wanted any more."""
        self.heap = [entry for entry in self.heap if wanted(entry[2])]
        heapq.heapify(self.heap)


@dataclass
class GRPOWithReplayBufferConfig(GRPOConfig):
    """Arguments of `GRPOWithReplayBufferTrainer`."""

    replay_buffer_size: int = field(
        default=64, metadata={"help": "Groups a process keeps for replay; 0 turns replay off."}
    )
    replay_max_age: int = field(
        default=64, metadata={"help": "Optimiser steps after which a kept group is too old to be replayed, at least 1."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay_buffer_size < 0:
            raise ConfigError(f"replay_buffer_size={self.replay_buffer_size} must be 0 (off) or positive.")
        if self.replay_max_age < 1:
            raise ConfigError(f"replay_max_age={self.replay_max_age} must be at least 1 optimiser step.")
        rows = self.per_device_train_batch_size * (self.steps_per_generation or 1)
        if self.replay_buffer_size and rows % self.num_generations:
            raise ConfigError(
                f"a process generates {rows} completions at once (per_device_train_batch_size="
                f"{self.per_device_train_batch_size} x steps_per_generation={self.steps_per_generation}), no multiple of "
                f"num_generations={self.num_generations}: a group would be split over processes and could not be replayed. "
                "Change one of them, or set replay_buffer_size=0."
            )


class GRPOWithReplayBufferTrainer(GRPOTrainer):
    """`GRPOTrainer` that trains on earlier groups where a group of its own has no spread and so would teach nothing.

    A group whose rewards differ is stored with the score ``sum_i |A_i| * s_g``. A group whose rewards are all equal is
    replaced, whole, by a stored one: its completions, advantages and the log-probs of the policy that sampled them, so
    that the importance ratio is right. An experimental method.

    Args:
        model: As in `GRPOTrainer`.
        reward_funcs: As in `GRPOTrainer`.
        args: `GRPOWithReplayBufferConfig`.
        kwargs: As in `GRPOTrainer`.
    """

    config_class: ClassVar[type[GRPOWithReplayBufferConfig]] = GRPOWithReplayBufferConfig
    _tag_names: ClassVar[list[str]] = ["posttrain", "grpo", "replay-buffer"]
    _name: ClassVar[str] = "GRPO with replay buffer"
    args: GRPOWithReplayBufferConfig

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: GRPOWithReplayBufferConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, **kwargs)
        self.replay_buffer = ReplayBuffer(self.args.replay_buffer_size)
        self._spreads: list[float] = []

    def needs_old_logp(self, mode: str) -> bool:
        """Always in training: what is replayed was sampled by other weights."""
        return super().needs_old_logp(mode) or (mode == "train" and self.args.replay_buffer_size > 0)

    @property
    def old_logp_is_engines(self) -> bool:
        """No: what is replayed has old log-probs of older weights, to which alone the engine's can be compared."""
        return super().old_logp_is_engines and not self.args.replay_buffer_size

    def advantages(self, generation: Generation, table: RewardTable, mode: str) -> Tensor:
        """As GRPO's; remembers the spread of each of this process's groups."""
        args, size = self.args, self.group_size(mode)
        stats = group_advantages(table.values, table.weights, size, min_group_std=args.min_group_std)
        first = table.start // size
        self._spreads = stats.group_std[first : first + len(generation.rollouts) // size].nan_to_num(0.0).tolist()
        return super().advantages(generation, table, mode)

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> Generation:
        """As the parent's, then the exchange of groups without spread."""
        generation = super().generate_and_score(examples, mode)
        if mode == "train" and self.args.replay_buffer_size:
            self.replay(generation)
        return generation

    def replay(self, generation: Generation) -> None:
        """Store the groups with spread, and replace the others by stored ones."""
        size, now = self.args.num_generations, self.state.global_step
        groups = [range(start, start + size) for start in range(0, len(generation.rollouts), size)]
        told = [s > max(self.args.min_group_std, 1e-8) for s in self._spreads]
        stored = [(s, g) for s, g, keeps in zip(self._spreads, groups, told, strict=True) if keeps]
        worth = [s * sum(abs(generation.columns["advantages"][i]) for i in g) for s, g in stored]
        self.replay_buffer.add(worth, [_packed(generation, g) for _, g in stored])
        names = sorted(generation.token_columns)
        self.replay_buffer.keep(
            lambda item: now - item["born"] <= self.args.replay_max_age and sorted(item["token_columns"]) == names
        )
        flat = [group for group, keeps in zip(groups, told, strict=True) if not keeps]
        drawn = (self.replay_buffer.sample(len(flat), self._generator()) if flat else None) or []
        for group, item in zip(flat, drawn, strict=False):
            _unpack(generation, group, item)
            generation.left_out -= set(group)
        ages = [now - item["born"] for item in drawn]
        metrics = {
            "replay/size": mean(float(len(self.replay_buffer))),
            "replay/replaced_groups": total(float(len(drawn))),
        }
        if ages:
            metrics["replay/mean_age"] = mean(sum(ages) / len(ages), weight=len(ages))
        self.log_metrics_now(metrics)

    def _generator(self) -> torch.Generator:
        """The same draw again after a resume, another one on each process."""
        place = self._generations * self.accelerator.num_processes + self.accelerator.process_index
        return torch.Generator().manual_seed((self.args.seed * 1_000_003 + place) % 2**63)

    def state_to_save(self) -> dict[str, Any]:
        """With the stored groups."""
        return super().state_to_save() | {"replay": self.replay_buffer.heap}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        buffer = self.replay_buffer = ReplayBuffer(self.args.replay_buffer_size)
        entries = sorted(state.get("replay", []), key=lambda entry: entry[1])
        buffer.add([entry[0] for entry in entries], [entry[2] for entry in entries])


def _packed(generation: Generation, group: Sequence[int]) -> dict[str, Any]:
    """A group's completions and all that the loss needs of them, as plain lists."""
    return {
        "born": generation.born,
        "rollouts": [dataclasses.asdict(generation.rollouts[i]) for i in group],
        "columns": {name: [column[i] for i in group] for name, column in generation.columns.items()},
        "token_columns": {name: [column[i] for i in group] for name, column in generation.token_columns.items()},
    }


def _unpack(generation: Generation, group: Sequence[int], item: dict[str, Any]) -> None:
    for place, i in enumerate(group):
        generation.rollouts[i] = Rollout(**item["rollouts"][place])
        for name, column in item["columns"].items():
            generation.columns[name][i] = column[place]
        for name, column in item["token_columns"].items():
            generation.token_columns[name][i] = column[place]
