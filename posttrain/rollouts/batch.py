"""What one call to an engine produced, with what scoring adds to it; the slices it is trained in, even over ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from posttrain.data.responses import parse_response
from posttrain.errors import CheckpointError
from posttrain.losses.policy import engine_gap
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.pictures.picture import Placed
from posttrain.types import Advantages, Prompt, Request, Rollout, Row, Truncation

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.types import Tokenizer

# Prompt tokens shown to format rewards: an opening tag that a template prefills is among them.
SUFFIX_TOKENS = 32


def decoded(
    tokenizer: Tokenizer, rollouts: Sequence[Rollout], *, conversational: bool
) -> tuple[list[Rollout], list[Any]]:
    """Decode completions.

    Args:
        tokenizer: Its response template, if it has one, says how messages are read.
        rollouts: One a completion.
        conversational: Whether prompts are messages.

    Returns:
        The rollouts with their ``text``, and what reward functions see of each: the text, or a list with one message.
    """
    texts = tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
    with_text = [dataclasses.replace(rollout, text=text) for rollout, text in zip(rollouts, texts, strict=True)]
    if not conversational:
        return with_text, texts
    return with_text, [[parse_response(tokenizer, r.token_ids, prefix=r.prompt_ids)] for r in rollouts]


def prompt_suffixes(tokenizer: Tokenizer, rollouts: Sequence[Rollout]) -> list[str]:
    """The end of each prompt as text, for format rewards."""
    return tokenizer.batch_decode([rollout.prompt_ids[-SUFFIX_TOKENS:] for rollout in rollouts])


def sampled_logps(rollouts: Iterable[Rollout], truncation: Truncation) -> list[list[float]] | None:
    """Log-probs of the tokens as they were drawn, with what truncation left; None where an engine says those before it alone."""
    logps = []
    for rollout in rollouts:
        if truncation and rollout.processed_logp is None and rollout.token_ids:
            return None
        logps.append(list(rollout.logp if rollout.processed_logp is None or not truncation else rollout.processed_logp))
    return logps


def sampler_gap(rollouts: Sequence[Rollout], trained: Sequence[Sequence[float]]) -> dict[str, Metric]:
    """How far the log-probs of an engine are from ``trained``, those of the same completions by the trainer's forward."""
    pairs = [
        (torch.tensor(own[: len(r.logp)]), torch.tensor(r.logp))
        for r, own in zip(rollouts, trained, strict=True)
        if len(r.logp) == len(r.token_ids) > 0
    ]
    if not pairs:
        return {}
    logp, sampled = (torch.cat(side) for side in zip(*pairs, strict=True))
    return engine_gap(logp, sampled, torch.ones_like(sampled, dtype=torch.bool))


@dataclasses.dataclass(slots=True, frozen=True)
class RolloutBatch:
    """What one call to the engine produced on this rank, one entry a completion, groups consecutive.

    Attributes:
        examples: The dataset row each completion answers.
        rollouts: Token ids, log-probs and finish reasons.
        completions: What reward functions see: text, or a list of messages.
        columns: Filled in after scoring, one number a completion (``advantages``).
        token_columns: Lists of per-token numbers, one for each of `sequences` (``old_logp``, ``ref_logp``, ``rollout_logp``).
        born: Optimiser step whose weights sampled it.
        environments: The environment each completion came about in, if there was one.
        extra: Further columns for the reward functions, one value a completion.
        left_out: Completions that carry no loss, whatever their tokens.
        failure_reward: Of episodes of a harness that failed (``extra["harness_error"]``); None: they have none.
        mode: ``train`` or ``eval``.
        group_size: Completions of one prompt.
    """

    examples: list[dict[str, Any]]
    rollouts: list[Rollout]
    completions: list[Any]
    columns: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    token_columns: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    born: int = 0
    environments: list[Any] | None = None
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    left_out: set[int] = dataclasses.field(default_factory=set)
    failure_reward: float | None = None
    mode: str = "train"
    group_size: int = 1

    def worth(self, found: Advantages) -> RolloutBatch:
        """A copy with advantages and what else the objective reads, as columns."""
        columns, rollouts = dict(found.columns), self.rollouts
        if found.values.dim() == 1:
            columns["advantages"] = found.values[found.start : found.start + len(rollouts)].tolist()
        if found.keep is not None:
            pairs = zip(rollouts, found.keep, strict=True)
            rollouts = [dataclasses.replace(rollout, tool_mask=mask) for rollout, mask in pairs]
        return dataclasses.replace(
            self,
            rollouts=rollouts,
            columns=columns,
            token_columns=dict(found.token_columns),
            left_out=self.left_out | found.left_out,
        )

    def loss_mask(self, index: int, skip_truncated: bool) -> list[int]:
        """1 on tokens the model wrote; all 0 on one left out, and on a truncated one when those are masked."""
        return self._mask(index, self.rollouts[index], skip_truncated)

    def _is_cut(self, index: int, rollout: Rollout, skip_truncated: bool) -> bool:
        return index in self.left_out or (skip_truncated and rollout.finish_reason != "stop")

    def _mask(self, index: int, rollout: Rollout, skip_truncated: bool) -> list[int]:
        """Of a completion or of one of its branches."""
        if self._is_cut(index, rollout, skip_truncated):
            return [0] * len(rollout.token_ids)
        return rollout.tool_mask or [1] * len(rollout.token_ids)

    def _is_untrained(self, index: int, skip_truncated: bool) -> bool:
        """Whether no token of a completion is trained, without making its mask."""
        rollout = self.rollouts[index]
        silent = bool(rollout.tool_mask) and not any(rollout.tool_mask or ())
        return silent or self._is_cut(index, rollout, skip_truncated)

    def sequences(self) -> list[Rollout]:
        """All completions, then all their branches: the order of ``token_columns``."""
        return [*self.rollouts, *(one for rollout in self.rollouts for one in rollout.branches)]

    def trained(self, index: int, skip_truncated: bool) -> list[list[int]]:
        """Loss masks of a completion and of its branches."""
        rollout = self.rollouts[index]
        return [self._mask(index, one, skip_truncated) for one in (rollout, *rollout.branches)]

    def _shares(self, masks: Sequence[Sequence[int]]) -> list[float]:
        """What each sequence of an episode counts as one, see `Batch.shares`; an episode without tokens counts nothing."""
        counts = [sum(mask) for mask in masks]
        if not any(map(len, masks)):
            return [0.0]
        total = sum(counts)
        return [count / total if total else 1 / len(counts) for count in counts]

    def reward_columns(self) -> dict[str, list[Any]]:
        """What reward functions get besides prompts and completions: dataset columns (those of the first row decide)."""
        if not self.examples:
            return dict(self.extra)
        own = ("prompt", "completion", "completion_ids")
        columns = {k: [e.get(k) for e in self.examples] for k in self.examples[0] if k not in own}
        return columns | self.extra

    def shown(self) -> dict[str, list[float]]:
        """Columns as the completions table names them."""
        return {name.removesuffix("s"): column for name, column in self.columns.items()}

    def groups(self) -> list[list[int]]:
        """Indices of completions that stand together and share a prompt."""
        groups: list[list[int]] = []
        for i, rollout in enumerate(self.rollouts):
            if groups and _prompt(self.rollouts[groups[-1][0]]) == _prompt(rollout):
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def rows(self, indices: Sequence[int], *, skip_truncated: bool, trained_only: bool = False) -> list[Row]:
        """The chosen completions as rows; neighbours with the same prompt share one.

        Args:
            indices: Of completions.
            skip_truncated: Whether truncated ones carry no loss.
            trained_only: Whether a sequence without a trained token comes without its tokens: it counts as a sequence, and
                nothing of it is computed.
        """
        rows: list[Row] = []
        before: Any = None
        # Else all sequences count one, and no column has to say so.
        shared = any(
            rollout.branches or not rollout.token_ids or (trained_only and self._is_untrained(i, skip_truncated))
            for i, rollout in enumerate(self.rollouts)
        )
        for i, k, place, rollout in self._placed(indices):
            if before != _prompt(rollout):
                before = _prompt(rollout)
                rows.append(Row(list(rollout.prompt_ids), [], [], pictures=[list(rollout.pictures)]))
            row, masks = rows[-1], self.trained(i, skip_truncated)
            kept = slice(None) if any(masks[k]) or not trained_only else slice(0)
            row.pictures.append(list(rollout.shown)[kept])
            row.completions.append(list(rollout.token_ids)[kept])
            row.loss_masks.append(masks[k][kept])
            for name, numbers in self.columns.items():
                credit = rollout.credit if name == "advantages" else 1.0
                row.sequence_columns.setdefault(name, []).append(numbers[i] * credit)
            if shared:
                row.sequence_columns.setdefault("share", []).append(self._shares(masks)[k])
            for name, column in self.token_columns.items():
                row.token_columns.setdefault(name, []).append(column[place][kept])
        return [row if any(row.pictures) else dataclasses.replace(row, pictures=[]) for row in rows]

    def _placed(self, indices: Sequence[int]) -> Iterator[tuple[int, int, int, Rollout]]:
        """The chosen completions, then their branches, so that equal prompts stay neighbours.

        Yields:
            Index of the completion, number of the sequence in its episode, its place in `sequences`, and the sequence.
        """
        for i in indices:
            yield i, 0, i, self.rollouts[i]
        counts = (len(rollout.branches) for rollout in self.rollouts)
        starts = list(itertools.accumulate(counts, initial=len(self.rollouts)))
        for i in indices:
            for k, branch in enumerate(self.rollouts[i].branches):
                yield i, k + 1, starts[i] + k, branch

    def slices(self, count: int, *, seed: int, skip_truncated: bool) -> list[list[Row]]:
        """Whole groups in random order, cut into ``count`` equal slices (a group may straddle two)."""
        groups = self.groups()
        shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        order = [i for g in shuffled for i in groups[g]]
        size = len(order) // count
        cuts = [order[k * size : (k + 1) * size] for k in range(count)]
        return [self.rows(cut, skip_truncated=skip_truncated, trained_only=True) for cut in cuts]

    def every_row(self) -> list[Row]:
        """All completions as rows, cut ones with their tokens."""
        return self.rows(range(len(self.rollouts)), skip_truncated=False)


def _prompt(rollout: Rollout) -> tuple[list[int], tuple[Any, ...]]:
    """What completions of one group share."""
    return list(rollout.prompt_ids), tuple(rollout.pictures)


def row_state(row: Row) -> dict[str, Any]:
    """A row as plain data, without tensors that JSON could not hold unless ``model_kwargs`` has some."""
    state = {item.name: getattr(row, item.name) for item in fields(Row)}
    return state | {"pictures": [[image.to_dict() for image in segment] for segment in row.pictures]}


def row_again(state: Mapping[str, Any]) -> Row:
    """Undo `row_state`."""
    return Row(**{**state, "pictures": [[Placed.of(**image) for image in part] for part in state.get("pictures", ())]})


class RolloutWindow:
    """The slices of the rollout batch that is trained, and the place of the run among them.

    Attributes:
        slices: Rows of each micro-batch; None before the first generation.
        step: Micro-batches that were trained of these slices.
        generations: That were made since the run began; seeds follow from their number.
        born: Optimiser step at which the rollout batch was sampled.

    Args:
        passes: How often each slice is trained.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.slices: Sequence[list[Row]] | None = None
        self.step = self.generations = self.born = 0
        self.mark()

    @property
    def used_up(self) -> bool:
        """Whether the next micro-batch wants a new generation."""
        # Their number is not fixed at construction: an automatic batch size changes it.
        return self.slices is None or self.step % (len(self.slices) * self.passes) == 0

    def fill(self, slices: Sequence[list[Row]], born: int) -> None:
        """Put the slices of a new generation in the place of the old ones."""
        self.slices, self.born, self.step = slices, born, 0

    def take(self) -> list[Row]:
        """Rows of the next micro-batch."""
        assert self.slices is not None
        rows = self.slices[self.step % len(self.slices)]
        self.step += 1
        return rows

    def mark(self) -> None:
        """Remember the place at the beginning of an optimizer step."""
        self._marked = self.slices, self.step, self.generations, self.born

    def rewind(self) -> None:
        """Go back to where `mark` was called: a generation that failed is made again from there."""
        self.slices, self.step, self.generations, self.born = self._marked

    def state(self) -> dict[str, Any]:
        """The place, with the scored rollouts that were not trained yet."""
        slices = None if self.used_up else [[row_state(row) for row in rows] for rows in self.slices or ()]
        return {"step": self.step, "generations": self.generations, "born": self.born, "buffer": slices}

    def load(self, state: dict[str, Any], *, before: int, now: int) -> None:
        """Undo `state`.

        Args:
            state: Of one process.
            before: How many processes wrote theirs.
            now: How many go on.

        Raises:
            CheckpointError: Rollouts wait to be trained, and are dealt to another number of processes.
        """
        if state["buffer"] is not None and before != now:
            raise CheckpointError(
                f"this checkpoint holds rollouts that {before} processes have trained in part, and this run is {now}. Fix: "
                f"resume on {before}, or from a checkpoint whose rollouts are used up: one every steps_per_generation * "
                "num_iterations / gradient_accumulation_steps steps."
            )
        self.step, self.generations, self.born = state["step"], state["generations"], state["born"]
        saved = state["buffer"]
        self.slices = None if saved is None else [[row_again(row) for row in rows] for rows in saved]


# The busiest rank must lose a tenth of its tokens, or rows stay where they are.
LOAD_WORTH_MOVING = 0.9

Cost = tuple[int, list[int]]  # Tokens of a row's prompt, and of each of its completions.
Place = tuple[int, int, int]  # (rank, row of that rank's slice, completion of that row)


def load(rows: Sequence[Cost]) -> int:
    """Tokens of a rank: every prompt once, and all completions."""
    return sum(prompt + sum(completions) for prompt, completions in rows)


def deal(costs: Sequence[Sequence[Cost]]) -> dict[Place, int] | None:
    """Where each completion goes, ``{(rank, row, completion): rank}``; None where moving does not pay.

    The longest completion first, each to the rank that then has the fewest tokens; one that does not hold its prompt yet
    pays for the prompt too, so that groups stay together while that is cheaper.

    Args:
        costs: Of each row, by rank.

    >>> deal([[(2, [10, 10])], [(2, [1, 1])]])
    {(0, 0, 0): 0, (0, 0, 1): 1, (1, 0, 0): 1, (1, 0, 1): 0}
    >>> deal([[(2, [10, 1])], [(2, [10, 1])]]) is None
    True
    """
    world = range(len(costs))
    items = [(-size, r, k, i) for r in world for k, (_, sizes) in enumerate(costs[r]) for i, size in enumerate(sizes)]
    if len(items) < len(costs):
        return None  # A rank without a completion would have nothing to run.
    loads = [0] * len(costs)
    holds: set[tuple[int, int, int]] = set()  # (rank, and whose prompt it holds)
    targets: dict[Place, int] = {}
    for size, home, row, completion in sorted(items):
        after = [loads[r] - size + (0 if (r, home, row) in holds else costs[home][row][0]) for r in world]
        target = min(world, key=lambda r, after=after, home=home: (after[r], r != home, r))
        loads[target] = after[target]
        holds.add((target, home, row))
        targets[home, row, completion] = target
    pays = min(loads) > 0 and max(loads) <= LOAD_WORTH_MOVING * max(map(load, costs))
    return targets if pays and set(targets.values()) == set(world) else None


def part(row: Row, members: Sequence[int]) -> Row:
    """A row with some of its completions."""

    def chosen(values: list[Any]) -> list[Any]:
        return [values[i] for i in members]

    return dataclasses.replace(
        row,
        completions=chosen(row.completions),
        loss_masks=chosen(row.loss_masks),
        sequence_columns={name: chosen(values) for name, values in row.sequence_columns.items()},
        token_columns={name: chosen(values) for name, values in row.token_columns.items()},
        pictures=[row.pictures[0], *chosen(row.pictures[1:])] if row.pictures else [],
    )


def balance_rows(slices: list[list[Row]], accelerator: Accelerator) -> tuple[list[list[Row]], list[dict[str, Metric]]]:
    """Even out the work of ranks: exchange completions within each slice where that pays.

    Completions never leave their slice, so every optimiser step holds the same ones as before, and its denominators count
    them over all ranks: the gradient does not change. A collective: every rank calls it with equally many slices.

    Args:
        slices: Rows of each micro-batch of this rank.
        accelerator: Of the run.

    Returns:
        The slices after the exchange; and of each slice, tokens of the busiest rank against the mean, before and after.
    """
    mine: list[list[Cost]] = [[(len(r.prompt_ids), [len(ids) for ids in r.completions]) for r in s] for s in slices]
    costs = parallel.all_gather_objects([mine], accelerator)
    plans = [deal([of_rank[number] for of_rank in costs]) for number in range(len(slices))]
    if any(row.model_kwargs for rows in slices for row in rows):
        plans = [None] * len(slices)  # Images are cut by sample elsewhere.
    rank = accelerator.process_index
    parcels: list[Any] = _parcels(slices, plans, rank, accelerator.num_processes)
    if any(plan is not None for plan in plans):  # Known to every rank.
        parcels = parallel.exchange_objects(parcels, accelerator)
    result = [
        rows if plans[number] is None else _counted_alike([row for slot, row in parcels if slot == number])
        for number, rows in enumerate(slices)
    ]
    return result, _busiest(costs, result, accelerator)


def _counted_alike(rows: list[Row]) -> list[Row]:
    """Rows of several ranks: where one says what its sequences count (`Batch.shares`), all do."""
    if any("share" in row.sequence_columns for row in rows):
        for row in rows:
            row.sequence_columns.setdefault("share", [1.0] * len(row.completions))
    return rows


def _parcels(
    slices: list[list[Row]], plans: list[dict[Place, int] | None], rank: int, ranks: int
) -> list[list[tuple[int, Row]]]:
    """Rows of this rank, cut up by where their completions go: for each rank ``(slice, part)``."""
    parcels: list[list[tuple[int, Row]]] = [[] for _ in range(ranks)]
    for rows, plan, number in zip(slices, plans, range(len(slices)), strict=True):
        if plan is None:
            continue
        for k, row in enumerate(rows):
            targets = [plan[rank, k, i] for i in range(len(row.completions))]
            for target in sorted(set(targets)):
                parcels[target].append((number, part(row, [i for i, t in enumerate(targets) if t == target])))
    return parcels


def _busiest(
    costs: list[list[list[Cost]]], slices: list[list[Row]], accelerator: Accelerator
) -> list[dict[str, Metric]]:
    """Of each slice, tokens of the busiest rank against the mean, before and after."""
    sizes = [sum(len(r.prompt_ids) + sum(map(len, r.completions)) for r in rows) for rows in slices]
    after = parallel.all_gather_objects([sizes], accelerator)
    metrics = []
    for number in range(len(slices)):
        before = [load(of_rank[number]) for of_rank in costs]
        now = [of_rank[number] for of_rank in after]
        named = {"balance/busiest_rank_before": before, "balance/busiest_rank": now}
        metrics.append({name: mean(max(loads) * len(loads) / max(sum(loads), 1)) for name, loads in named.items()})
    return metrics


def shared_requests(prompts: Sequence[list[int]]) -> list[Request]:
    """One request for each run of equal neighbours; prompts are equal where their pictures are too."""
    return [
        Request(prompt, len(list(equal)), pictures=Prompt.pictures_of(prompt))
        for prompt, equal in itertools.groupby(prompts)
    ]
