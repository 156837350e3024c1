"""`RolloutBatch`: completions of one engine call, with rewards and advantages. `RolloutWindow` splits the completions into
micro-batches, and `balance_rows` balances them over ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from posttrain import plugins
from posttrain.data.responses import parse_response
from posttrain.errors import CheckpointError
from posttrain.losses.policy import engine_gap
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.types import Advantages, Prompt, Request, Rollout, Row, Truncation

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.types import Tokenizer

# Number of tokens at the end of each prompt that format rewards receive. They may include an opening tag from the chat
# template.
SUFFIX_TOKENS = 32


def decoded(
    tokenizer: Tokenizer, rollouts: Sequence[Rollout], *, conversational: bool
) -> tuple[list[Rollout], list[Any]]:
    """Decode completions to text. If prompts are conversations, parse the completions as messages too.

    Args:
        tokenizer: Tokenizer that decodes the ids. Its response template, if it has one, defines how messages are parsed.
        rollouts: One rollout per completion.
        conversational: Whether prompts are messages.

    Returns:
        The rollouts with ``text`` set, and the completions for reward functions: texts, or lists with one message.
    """
    texts = tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
    with_text = [dataclasses.replace(rollout, text=text) for rollout, text in zip(rollouts, texts, strict=True)]
    if not conversational:
        return with_text, texts
    return with_text, [[parse_response(tokenizer, r.token_ids, prefix=r.prompt_ids)] for r in rollouts]


def prompt_suffixes(tokenizer: Tokenizer, rollouts: Sequence[Rollout]) -> list[str]:
    """Decode the last tokens of each prompt. Format rewards need this text."""
    return tokenizer.batch_decode([rollout.prompt_ids[-SUFFIX_TOKENS:] for rollout in rollouts])


def sampled_logps(rollouts: Iterable[Rollout], truncation: Truncation) -> list[list[float]] | None:
    """Return the log-probs of sampled tokens under the truncated distribution. Return None if the engine did not return such
    log-probs.
    """
    logps = []
    for rollout in rollouts:
        if truncation and rollout.processed_logp is None and rollout.token_ids:
            return None
        logps.append(list(rollout.logp if rollout.processed_logp is None or not truncation else rollout.processed_logp))
    return logps


def sampler_gap(rollouts: Sequence[Rollout], trained: Sequence[Sequence[float]]) -> dict[str, Metric]:
    """Compute metrics of the difference between the engine's log-probs and ``trained``, the log-probs of the training
    forward pass.
    """
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
    """Completions of one engine call on this rank. Completions of the same prompt (a group) are consecutive.

    Attributes:
        examples: Dataset row of each completion.
        rollouts: Token ids, log-probs and finish reason of each completion.
        completions: Completions in the format of reward functions: texts, or lists of messages.
        columns: Values that scoring adds, such as ``advantages``. Each column has one value per completion.
        token_columns: Log-probs per token (``old_logp``, ``ref_logp``, ``rollout_logp``). Each column has one list per item
            of `sequences`.
        born: Optimizer step at which the completions were sampled.
        environments: Environment of each completion. None: there are no environments.
        extra: Additional columns for reward functions. Each column has one value per completion.
        left_out: Indices of completions that are excluded from the loss.
        failure_reward: Reward of failed harness episodes (``extra["harness_error"]``). None: failed episodes have no reward.
        mode: ``train`` or ``eval``.
        group_size: Number of completions per prompt.
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
        """Return a copy of the batch with the advantages in ``found`` and with all other columns that the objective needs."""
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
        """Return the loss mask of a completion: 1 for tokens that the model sampled, and 0 for all other tokens. All values
        are 0 if the completion is excluded from the loss, or if it is truncated and ``skip_truncated`` is set.
        """
        return self._mask(index, self.rollouts[index], skip_truncated)

    def _is_cut(self, index: int, rollout: Rollout, skip_truncated: bool) -> bool:
        return index in self.left_out or (skip_truncated and rollout.finish_reason != "stop")

    def _mask(self, index: int, rollout: Rollout, skip_truncated: bool) -> list[int]:
        """Return the loss mask of ``rollout``, which is completion ``index`` or one of its branches."""
        if self._is_cut(index, rollout, skip_truncated):
            return [0] * len(rollout.token_ids)
        return rollout.tool_mask or [1] * len(rollout.token_ids)

    def _is_untrained(self, index: int, skip_truncated: bool) -> bool:
        """Return whether all tokens of a completion are excluded from the loss. The function does not create the loss mask."""
        rollout = self.rollouts[index]
        silent = bool(rollout.tool_mask) and not any(rollout.tool_mask or ())
        return silent or self._is_cut(index, rollout, skip_truncated)

    def sequences(self) -> list[Rollout]:
        """Return all completions, followed by the branches of all completions. ``token_columns`` has this order."""
        return [*self.rollouts, *(branch for rollout in self.rollouts for branch in rollout.branches)]

    def trained(self, index: int, skip_truncated: bool) -> list[list[int]]:
        """Return the loss masks of a completion and of its branches."""
        rollout = self.rollouts[index]
        return [self._mask(index, branch, skip_truncated) for branch in (rollout, *rollout.branches)]

    def _shares(self, masks: Sequence[Sequence[int]]) -> list[float]:
        """Return the weight of each branch of an episode. With these weights, the loss treats an episode as one sequence;
        see `Batch.shares`.

        An episode without any tokens has the single weight 0.
        """
        counts = [sum(mask) for mask in masks]
        if not any(map(len, masks)):
            return [0.0]
        total = sum(counts)
        return [count / total if total else 1 / len(counts) for count in counts]

    def reward_columns(self) -> dict[str, list[Any]]:
        """Return the additional arguments of reward functions: ``extra``, and all dataset columns that the first row has."""
        if not self.examples:
            return dict(self.extra)
        own = ("prompt", "completion", "completion_ids")
        columns = {k: [e.get(k) for e in self.examples] for k in self.examples[0] if k not in own}
        return columns | self.extra

    def shown(self) -> dict[str, list[float]]:
        """Return the columns of the completions table by their names in the table."""
        return {name.removesuffix("s"): column for name, column in self.columns.items()}

    def groups(self) -> list[list[int]]:
        """Return a list of completion indices for each group of consecutive completions with the same prompt."""
        groups: list[list[int]] = []
        for i, rollout in enumerate(self.rollouts):
            if groups and _prompt(self.rollouts[groups[-1][0]]) == _prompt(rollout):
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def rows(self, indices: Sequence[int], *, skip_truncated: bool, trained_only: bool = False) -> list[Row]:
        """Convert completions to rows. Consecutive completions with the same prompt form one row.

        Args:
            indices: Indices of completions.
            skip_truncated: Whether truncated completions are excluded from the loss.
            trained_only: Whether to remove all tokens of a sequence that is excluded from the loss. Such a sequence is still
                counted, but the model does not compute it.
        """
        rows: list[Row] = []
        before: Any = None
        # Without branches, every sequence has the weight 1, so the column of weights is not needed.
        shared = any(
            rollout.branches or not rollout.token_ids or (trained_only and self._is_untrained(i, skip_truncated))
            for i, rollout in enumerate(self.rollouts)
        )
        for i, k, place, rollout in self._placed(indices):
            if before != _prompt(rollout):
                before = _prompt(rollout)
                rows.append(Row(list(rollout.prompt_ids), [], [], pictures=[list(rollout.pictures)]))
            row, masks = rows[-1], self.trained(i, skip_truncated)
            span = slice(None) if any(masks[k]) or not trained_only else slice(0)
            row.pictures.append(list(rollout.shown)[span])
            row.completions.append(list(rollout.token_ids)[span])
            row.loss_masks.append(masks[k][span])
            for name, numbers in self.columns.items():
                credit = rollout.credit if name == "advantages" else 1.0
                row.sequence_columns.setdefault(name, []).append(numbers[i] * credit)
            if shared:
                row.sequence_columns.setdefault("share", []).append(self._shares(masks)[k])
            for name, column in self.token_columns.items():
                row.token_columns.setdefault(name, []).append(column[place][span])
        return [row if any(row.pictures) else dataclasses.replace(row, pictures=[]) for row in rows]

    def _placed(self, indices: Sequence[int]) -> Iterator[tuple[int, int, int, Rollout]]:
        """Yield the selected completions and their branches. Equal prompts are consecutive.

        Yields:
            Index of the completion, index of the sequence within its episode, index in `sequences`, and the sequence.
        """
        for i in indices:
            yield i, 0, i, self.rollouts[i]
        counts = (len(rollout.branches) for rollout in self.rollouts)
        starts = list(itertools.accumulate(counts, initial=len(self.rollouts)))
        for i in indices:
            for k, branch in enumerate(self.rollouts[i].branches):
                yield i, k + 1, starts[i] + k, branch

    def slices(self, count: int, *, seed: int, skip_truncated: bool) -> list[list[Row]]:
        """Shuffle the groups, and split the completions into ``count`` slices of equal size. A group may be split between
        two slices.
        """
        groups = self.groups()
        shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        order = [i for g in shuffled for i in groups[g]]
        size = len(order) // count
        cuts = [order[k * size : (k + 1) * size] for k in range(count)]
        return [self.rows(cut, skip_truncated=skip_truncated, trained_only=True) for cut in cuts]

    def every_row(self) -> list[Row]:
        """Convert all completions to rows. Truncated completions keep their tokens."""
        return self.rows(range(len(self.rollouts)), skip_truncated=False)


def _prompt(rollout: Rollout) -> tuple[list[int], tuple[Any, ...]]:
    """Return the prompt and the images of a rollout. Completions with equal values belong to the same group."""
    return list(rollout.prompt_ids), tuple(rollout.pictures)


def row_state(row: Row) -> dict[str, Any]:
    """Convert a row to data for JSON. Only the tensors in ``model_kwargs`` are not converted."""
    state = {item.name: getattr(row, item.name) for item in fields(Row)}
    return state | {"pictures": [[image.to_dict() for image in segment] for segment in row.pictures]}


def row_again(state: Mapping[str, Any]) -> Row:
    """Convert the result of `row_state` to a row."""
    images = list(state.get("pictures", ()))
    if any(images):
        placed = plugins.module("extensions.images.picture").Placed.of
        images = [[placed(**image) for image in part] for part in images]
    return Row(**{**state, "pictures": images})


class RolloutWindow:
    """Current rollout batch, split into micro-batches (slices), and the index of the next slice.

    Attributes:
        slices: Rows of each micro-batch. None: nothing has been generated yet.
        step: Number of micro-batches that were taken from ``slices``.
        generations: Number of rollout batches since the beginning of the run. Random seeds are computed from it.
        born: Optimizer step at which the rollout batch was sampled.

    Args:
        passes: Number of times that training uses each slice.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.slices: Sequence[list[Row]] | None = None
        self.step = self.generations = self.born = 0
        self.mark()

    @property
    def used_up(self) -> bool:
        """Whether all slices were used ``passes`` times. If so, a new rollout batch must be generated."""
        # Compute this property at each access, because an automatic batch size changes the number of slices.
        return self.slices is None or self.step % (len(self.slices) * self.passes) == 0

    def fill(self, slices: Sequence[list[Row]], born: int) -> None:
        """Replace the slices with those of a new rollout batch."""
        self.slices, self.born, self.step = slices, born, 0

    def take(self) -> list[Row]:
        """Return the rows of the next micro-batch, and advance the position."""
        assert self.slices is not None
        rows = self.slices[self.step % len(self.slices)]
        self.step += 1
        return rows

    def mark(self) -> None:
        """Store the current position, for `rewind`. The trainer calls this method at the beginning of an optimizer step."""
        self._marked = self.slices, self.step, self.generations, self.born

    def rewind(self) -> None:
        """Return to the position of the last `mark`. The rollout batch is then generated again, for example after a failure."""
        self.slices, self.step, self.generations, self.born = self._marked

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the position, and rollouts that were not used for training yet."""
        slices = None if self.used_up else [[row_state(row) for row in rows] for rows in self.slices or ()]
        return {"step": self.step, "generations": self.generations, "born": self.born, "buffer": slices}

    def load(self, state: dict[str, Any], *, before: int, now: int) -> None:
        """Restore a state that `state` returned.

        Args:
            state: State of one process.
            before: Number of processes in the run that wrote the checkpoint.
            now: Number of processes of this run.

        Raises:
            CheckpointError: The checkpoint contains unused rollouts, but was written with a different number of
                processes.
        """
        if state["buffer"] is not None and before != now:
            raise CheckpointError(
                f"this checkpoint contains rollouts that {before} processes have only partly used for training, but this run has "
                f"{now}. Fix: resume with {before} processes, or from a checkpoint without such rollouts. All "
                "rollouts are used up every steps_per_generation * num_iterations / gradient_accumulation_steps steps."
            )
        self.step, self.generations, self.born = state["step"], state["generations"], state["born"]
        saved = state["buffer"]
        self.slices = None if saved is None else [[row_again(row) for row in rows] for rows in saved]


# Maximum ratio of the busiest rank's token counts after and before an exchange. If the ratio would be higher, no rows are
# exchanged between ranks.
LOAD_WORTH_MOVING = 0.9

# Cost of a row. It consists of the number of tokens of the prompt, and a list with the number of tokens of each completion.
Cost = tuple[int, list[int]]
# Location of a completion: rank, index of the row in the rank's slice, and index of the completion in the row.
Place = tuple[int, int, int]


def load(rows: Sequence[Cost]) -> int:
    """Return the number of tokens that a rank computes: the prompt of each row once, and all completions."""
    return sum(prompt + sum(completions) for prompt, completions in rows)


def distribute(costs: Sequence[Sequence[Cost]]) -> dict[Place, int] | None:
    """Assign each completion to a rank, as a dict ``{(rank, row, completion): rank}``. Return None if an exchange would not
    save enough time.

    Completions are assigned in descending order of length, each to the rank with the fewest tokens so far. If a rank does
    not have the prompt of a completion, the tokens of the prompt are added to the cost. Completions of a group therefore
    stay on one rank as long as this is cheaper.

    Args:
        costs: One list per rank with the cost of each row.

    >>> distribute([[(2, [10, 10])], [(2, [1, 1])]])
    {(0, 0, 0): 0, (0, 0, 1): 1, (1, 0, 0): 1, (1, 0, 1): 0}
    >>> distribute([[(2, [10, 1])], [(2, [10, 1])]]) is None
    True
    """
    world = range(len(costs))
    items = [(-size, r, k, i) for r in world for k, (_, sizes) in enumerate(costs[r]) for i, size in enumerate(sizes)]
    if len(items) < len(costs):
        return None  # Exchange nothing, because some rank would have no completion.
    loads = [0] * len(costs)
    # Set of triples (rank, row owner, row). A triple means that the rank already has the prompt of the row.
    holds: set[tuple[int, int, int]] = set()
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
    """Return a row with only the completions in ``members``."""

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
    """Exchange completions between ranks within each slice, so that all ranks have similar numbers of tokens.

    A completion stays in its slice, so every optimizer step uses the same completions. Denominators of the loss are counted
    over all ranks. The gradient therefore does not change. This is a collective operation: all ranks must call it with the
    same number of slices.

    A slice that contains images is not exchanged.

    Args:
        slices: Rows of each micro-batch on this rank.
        accelerator: Accelerator of the run.

    Returns:
        The new slices, and metrics of each slice before and after the exchange. A metric is the number of tokens of the
        busiest rank, divided by the mean number of tokens of all ranks.
    """
    mine: list[list[Cost]] = [[(len(r.prompt_ids), [len(ids) for ids in r.completions]) for r in s] for s in slices]
    costs = parallel.all_gather_objects([mine], accelerator)
    plans = [distribute([of_rank[number] for of_rank in costs]) for number in range(len(slices))]
    if any(row.model_kwargs for rows in slices for row in rows):
        # Exchange nothing, because the images of a row cannot be split between ranks.
        plans = [None] * len(slices)
    rank = accelerator.process_index
    parcels: list[Any] = _parcels(slices, plans, rank, accelerator.num_processes)
    # All ranks compute the same plans. Therefore, either all ranks take part in the exchange, or no rank does.
    if any(plan is not None for plan in plans):
        parcels = parallel.exchange_objects(parcels, accelerator)
    result = [
        rows if plans[number] is None else _counted_alike([row for slot, row in parcels if slot == number])
        for number, rows in enumerate(slices)
    ]
    return result, _busiest(costs, result, accelerator)


def _counted_alike(rows: list[Row]) -> list[Row]:
    """Add the column of sequence weights (`Batch.shares`) to all rows if at least one row has this column."""
    if any("share" in row.sequence_columns for row in rows):
        for row in rows:
            row.sequence_columns.setdefault("share", [1.0] * len(row.completions))
    return rows


def _parcels(
    slices: list[list[Row]], plans: list[dict[Place, int] | None], rank: int, ranks: int
) -> list[list[tuple[int, Row]]]:
    """Split this rank's rows by the rank that receives them. Return one list per rank. Its items are pairs of a slice index
    and a row with the completions for that rank.
    """
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
    """Compute metrics of each slice before and after the exchange. A metric is the number of tokens of the busiest rank,
    divided by the mean number of tokens of all ranks.
    """
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
    """Create one request for each sequence of equal consecutive prompts. Prompts are equal if both their tokens and their
    images are equal.
    """
    return [
        Request(prompt, len(list(equal)), pictures=Prompt.pictures_of(prompt))
        for prompt, equal in itertools.groupby(prompts)
    ]
