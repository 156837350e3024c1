"""What every objective must satisfy, written once.

An objective joins by one `Case`: its name, how to compute its terms from log-probs and a batch, and what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from posttrain.data.forest import Layout, collate
from posttrain.losses.reduce import Denominators, reduce
from posttrain.types import Batch, LossTerms, ModelOutputs, Row

TABLE = 23  # Vocabulary of the toy policy: one log-prob a (previous token, token) pair.


@dataclass(frozen=True)
class Case:
    """One objective under test: ``objective(outputs, batch) -> LossTerms``."""

    name: str
    objective: Callable[[ModelOutputs, Batch], LossTerms]
    local: bool = False  # Normalised by its own micro-batch, by definition.
    uses_advantages: bool = True


def toy_rows(seed: int = 0, groups: int = 3, old: bool = True) -> list[Row]:
    """Groups of unequal completions with every column an objective may want."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(1, TABLE, (n,), generator=g).tolist()

    def noise(n: int) -> list[float]:
        return (-2 + 0.3 * torch.randn(n, generator=g)).tolist()

    rows = []
    for _ in range(groups):
        completions = [draw(int(torch.randint(1, 7, (), generator=g))) for _ in range(4)]
        masks = [[1] * len(c) for c in completions]
        masks[0][-1] = 0  # A token without loss inside a completion.
        columns = {
            name: [noise(len(c)) for c in completions] for name in (["old_logp", "ref_logp"] if old else ["ref_logp"])
        }
        advantages = torch.randn(4, generator=g).tolist()
        rows.append(Row(draw(5), completions, masks, {"advantages": advantages}, columns))
    return rows


def policy(seed: int = 1) -> torch.Tensor:
    """A bigram policy's logits: differentiable, and the same whatever the layout."""
    return torch.randn(
        TABLE, TABLE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def outputs(theta: torch.Tensor, batch: Batch) -> ModelOutputs:
    """What the forward pass would say, from the bigram table."""
    logprobs = torch.log_softmax(theta, -1)
    previous = batch.input_ids.gather(1, batch.predictor)
    mask = batch.loss_mask
    logp = torch.where(mask, logprobs[previous, batch.input_ids], 0.0)
    entropy = torch.where(mask, -(logprobs.exp() * logprobs).sum(-1)[previous], 0.0)
    hit = (logprobs.argmax(-1)[previous] == batch.input_ids) & mask
    return ModelOutputs(logp=logp, entropy=entropy, correct=hit)


def double(batch: Batch) -> Batch:
    """The batch with float64 columns, so that differences are the maths' own."""
    names = ("advantages", "old_logp", "ref_logp", "rollout_logp")
    wide = {n: getattr(batch, n).double() for n in names if getattr(batch, n) is not None}
    return replace(batch, **wide)


def step_gradient(case: Case, batches: list[Batch], world_size: int = 1) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimiser step made of these forward passes."""
    theta = policy()
    counts = Denominators(
        sum(b.num_loss_tokens for b in batches), sum(b.num_sequences for b in batches), len(batches), world_size
    )
    total = 0.0
    for batch in batches:
        batch = double(batch)
        loss = reduce(case.objective(outputs(theta, batch), batch), counts)
        loss.backward()
        total += float(loss)
    return total, theta.grad


def layouts(rows: list[Row]) -> dict[str, list[Batch]]:
    """The same rows as one forest, as single trees, as one sequence a row, and padded."""
    return {
        "packed": collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=10_000)),
        "tree": collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=1)),
        "split": collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=1, max_tree_tokens=1)),
        "padded": collate(rows, pad_token_id=0, layout=Layout("padded", row_tokens=10_000)),
    }


def assert_layouts_agree(case: Case, layouts: dict[str, list[Batch]]) -> None:
    """However rows are laid out and split, loss and gradient are those of the packed ones, and there is a gradient."""
    results = {name: step_gradient(case, batches) for name, batches in layouts.items()}
    loss, gradient = results["packed"]
    assert gradient.abs().sum() > 0
    for name, (other, grad) in results.items():
        assert abs(other - loss) <= 1e-9 * max(abs(loss), 1e-12), name
        assert torch.allclose(grad, gradient, atol=1e-12), name


def assert_ranks_average(case: Case, batches: list[Batch]) -> None:
    """The first batch on one rank and the others on a second: the mean of their gradients is that of one process."""
    _, whole = step_gradient(case, batches)
    counts = Denominators(
        sum(b.num_loss_tokens for b in batches), sum(b.num_sequences for b in batches), len(batches), world_size=2
    )
    halves = []
    for part in (batches[:1], batches[1:]):
        theta = policy()
        for batch in map(double, part):
            reduce(case.objective(outputs(theta, batch), batch), counts).backward()
        halves.append(theta.grad)
    assert torch.allclose((halves[0] + halves[1]) / 2, whole, atol=1e-12)


def dirtied(batches: list[Batch], *columns: str) -> list[Batch]:
    """The same batches with other tokens and other numbers where padding is."""
    for batch in batches:
        batch.input_ids[~batch.real] = 7
        for name in columns:
            getattr(batch, name)[~batch.real] = 9.0
    return batches
