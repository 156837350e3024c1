"""One forward pass over a token forest: hidden states at loss positions only, log-probs a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.data.forest import split_by_sequence
from posttrain.errors import ConfigError, ModelError
from posttrain.metrics import mean
from posttrain.models import token_split, tree_attention
from posttrain.models.architecture import image_token
from posttrain.models.attention import attention_inputs
from posttrain.models.heads import (
    PER_TOKEN,
    ScoreHead,
    TokenHead,
    attention_renamed,
    causal_lm,
    install_token_head,
    learns_prompts,
    unwrapped,
    virtual_tokens,
)
from posttrain.models.parallel import gathers_in_forward
from posttrain.models.token_split import TokenSplit
from posttrain.models.value_head import critic_of
from posttrain.models.vision import VisionView, plain_inputs, view
from posttrain.types import WHOLE, Batch, LossTerms, ModelOutputs, Row, Truncation

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig


def forward(
    model: nn.Module,
    batch: Batch,
    needs: frozenset[str] = frozenset({"logp"}),
    *,
    temperature: float = 1.0,
    truncation: Truncation = WHOLE,
    chunk_size: int | None = None,
    compare: Callable[..., dict[str, Any]] | None = None,
) -> ModelOutputs:
    """Run the model on a forest and put what was asked for on its ``(B, T)`` grid.

    Args:
        model: A language model or classifier, wrapped or not, on which `install_token_head` was called.
        batch: A token forest on the model's device.
        needs: Any of ``logp``, ``entropy``, ``entropy_grad``, ``correct``, ``mean_logit``, ``collision``, ``logits``, ``aux``;
            or ``scores`` (a classifier's score at each sequence's last token) alone.
        temperature: Divides the logits, so that log-probs are those of the distribution that was sampled from.
        truncation: What sampling left out of it: ``log_mass`` says how much it left.
        chunk_size: Positions whose logits exist at once; None: as many as `token_logprobs` picks.
        compare: See `TokenHead.compare`; what it returns is ``compared``.

    Returns:
        Log-probs, entropies and hits aligned with the tokens they speak of, zero outside ``loss_mask``; scores ``(S,)``;
        ``values`` (asked for by that name) of the state before each completion token.
    """
    install_token_head(model)
    asked = Pass(batch, needs, temperature, truncation, chunk_size, compare is not None)
    split = token_split.active()
    # Backward calls checkpointed layers again, so a pass with gradients leaves its name of attention in the config.
    named = nullcontext() if torch.is_grad_enabled() else attention_renamed(model, lambda name: name)
    with named:
        if split is None or (torch.is_grad_enabled() and not split.in_turn):
            result = _run(model, asked, compare)
        elif not split.in_turn:
            result = _in_turns(model, asked, compare, split)
        elif torch.is_grad_enabled():
            split.tell(asked.bare())
            result = _run(model, asked, compare, split, split.rank)
        else:
            with on_whole_rows(model):
                result = _run(model, asked, compare)
    if "scores" in needs:
        return ModelOutputs(scores=result["scores"][:, 0])
    return ModelOutputs(
        logp=_place(result.get("logp"), batch),
        **{name: _place(result.get(name), batch) for name in ("log_mass", *PER_TOKEN)},
        values=_place(result.get("values"), batch, batch.sequence >= 0),
        logits=result.get("logits"),
        aux_loss=result.get("aux_loss"),
        compared=result if compare is not None else {},
    )


@contextmanager
def on_whole_rows(model: nn.Module) -> Iterator[None]:
    """Inside, this process computes its batches alone: a teacher's, while the others of the group wait to help with the student.

    Raises:
        ModelError: The model is sharded, and the others do not run it.
    """
    split = token_split.active()
    if split is not None and gathers_in_forward(model.modules()):
        raise ModelError(
            f"sp_size={split.size}: a sharded model reads whole rows in a pass that the other processes of its group do not run. "
            "Fix: a teacher that is not sharded (no self-distillation under FSDP), or sp_size=1."
        )
    with token_split.alone():
        yield


@dataclass(frozen=True, slots=True)
class Pass:
    """What processes that compute a batch together must know of it; see `forward`.

    Attributes:
        compares: Whether the process whose batch it is compares the last hidden states with another model.
    """

    batch: Batch
    needs: frozenset[str]
    temperature: float
    truncation: Truncation
    chunk_size: int | None
    compares: bool = False

    def bare(self) -> Pass:
        """On the host, without what the objective alone reads."""
        empty = dict.fromkeys(("advantages", "old_logp", "ref_logp", "rollout_logp", "expected_grad"))
        return replace(self, batch=replace(self.batch, **empty, columns={}).to("cpu"))


def _run(
    model: nn.Module,
    asked: Pass,
    compare: Callable[..., dict[str, Any]] | None,
    split: TokenSplit | None = None,
    owner: int = 0,
) -> dict[str, Any]:
    """One forward pass; with a ``split``, of this process's columns of a batch of process ``owner``.

    Returns:
        By name, in the order of the loss positions ``(N, ...)`` or of the sequences ``(S, ...)``; summed over the split.
    """
    inner: Any = causal_lm(model)
    batch, needs, virtual = asked.batch, asked.needs, virtual_tokens(model)
    head = _score_head(batch, virtual) if "scores" in needs else _token_head(asked, virtual)
    if isinstance(head, TokenHead):
        head.compare = compare
    if isinstance(head, TokenHead) and "values" in needs:
        head.values = _value_reader(inner, batch, virtual)
    balance = isinstance(head, TokenHead) and head.balance_over is not None
    columns = None if split is None else split.columns(batch.input_ids.shape[1])
    seen = _view(inner, batch, columns)
    head.inputs = seen.inputs
    inputs = {"input_ids": batch.input_ids, **_attention(model, inner, batch, seen, split)}
    own = None
    if split is not None and columns is not None:
        inputs |= {name: inputs[name][..., columns] for name in ("input_ids", "position_ids")}
        head, own = _piece(head, columns, split, owner, compares=asked.compares)
    result = model(
        **inputs,
        use_cache=False,
        token_head=head,
        **({"output_router_logits": True} if balance else {}),
        **batch.model_kwargs,
    )
    # What was compared was brought together before.
    return result if split is None or own is None or asked.compares else _at_owner(result, own, split, owner)


def _piece(
    head: TokenHead | ScoreHead, columns: slice, split: TokenSplit, owner: int, *, compares: bool
) -> tuple[TokenHead | ScoreHead, tuple[Tensor, int]]:
    """The head at the positions that are predicted from some columns; which of all these are, and how many all are."""
    inside = (head.columns >= columns.start) & (head.columns < columns.stop)
    own = (inside.nonzero()[:, 0], len(head.columns))
    moved = {"rows": head.rows[inside], "columns": head.columns[inside] - columns.start}
    if isinstance(head, ScoreHead):
        return replace(head, **moved), own
    piece = replace(head, **moved, targets=head.targets[inside], expected_grad=None)
    if head.balance_over is not None:
        piece.balance_over = head.balance_over[:, columns]
        piece.total = lambda sums: split.at_owner(owner, [sums])[0]
    if compares:
        piece.compare = _compared_at_owner(head, own, split, owner)
    return piece, own


def _compared_at_owner(
    head: TokenHead, own: tuple[Tensor, int], split: TokenSplit, owner: int
) -> Callable[..., dict[str, Any]]:
    """Bring the last hidden states to the process whose batch it is, which alone has what they are compared with."""

    def compare(hidden: Tensor, layer: nn.Module, rule: Any, piece: TokenHead) -> dict[str, Any]:
        (whole,) = split.at_owner(owner, [_all_positions(hidden, *own)])
        if owner == split.rank:
            assert head.compare is not None
            return head.compare(whole, layer, rule, head)
        # Whoever averages gradients waits for one of every weight.
        weights = () if layer is None else [p for p in layer.parameters() if p.requires_grad]
        return {"hidden": whole, **{f"weight {i}": p.flatten()[:1] for i, p in enumerate(weights)}}

    return compare


def _all_positions(values: Tensor, where: Tensor, count: int) -> Tensor:
    """``(n, ...)`` values of this process among ``count`` positions, zero at those of others."""
    return values.new_zeros(count, *values.shape[1:]).index_put((where,), values)


def _at_owner(result: dict[str, Any], own: tuple[Tensor, int], split: TokenSplit, owner: int) -> dict[str, Any]:
    """What the positions of all processes gave, where the head did not compare; the router's term is whole already."""
    names = [name for name in ("logp", "log_mass", *PER_TOKEN, "logits", "scores") if name in result]
    if not names:
        return result
    placed = [_all_positions(result[name].float(), *own) for name in names]
    whole = zip(names, split.at_owner(owner, placed), strict=True)
    return result | {name: value.to(result[name].dtype) for name, value in whole}


def _in_turns(
    model: nn.Module, asked: Pass, compare: Callable[..., dict[str, Any]] | None, split: TokenSplit
) -> dict[str, Any]:
    """A pass without gradients of every process of the group, one after the other; this process's own is returned."""
    result: dict[str, Any] = {}
    device = asked.batch.input_ids.device
    for owner, other in enumerate(split.exchanged(asked.bare())):
        mine = owner == split.rank
        outputs = _run(model, replace(other, batch=other.batch.to(device)), compare if mine else None, split, owner)
        result = outputs if mine else result
    return result


def help_with(model: nn.Module, owner: int, device: torch.device | str) -> Tensor:
    """Columns of a training pass of process ``owner`` that fall to this one; what to call backward on for its gradients."""
    split = token_split.active()
    assert split is not None
    install_token_head(model)
    asked = split.hear(owner)
    result = _run(model, replace(asked, batch=asked.batch.to(device)), None, split, owner)
    tensors = [x for x in result.values() if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([0.0 * x.float().sum() for x in tensors]).sum()


def _view(model: nn.Module, batch: Batch, columns: slice | None = None) -> VisionView:
    """See `view`; a text model has nothing to see."""
    reads_images = image_token(model.config) is not None
    return view(model, batch, columns) if reads_images or batch.pictures else VisionView(batch.position_ids)


def _attention(
    model: nn.Module, inner: nn.Module, batch: Batch, seen: VisionView, split: TokenSplit | None = None
) -> dict[str, Any]:
    if learns_prompts(model):
        assert batch.one_sequence_a_row, "virtual tokens need one sequence a row"
        return {"attention_mask": batch.real.long()}
    inputs = attention_inputs(batch, inner, next(inner.parameters()).dtype, seen.span, split)
    return inputs | ({} if seen.position_ids is None else {"position_ids": seen.position_ids})


def _token_head(asked: Pass, virtual: int) -> TokenHead:
    batch = asked.batch
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    return TokenHead(
        rows=rows,
        columns=batch.predictor[rows, columns] + virtual,
        targets=batch.input_ids[rows, columns],
        temperature=asked.temperature,
        truncation=asked.truncation,
        chunk_size=asked.chunk_size,
        expected_grad=None if batch.expected_grad is None else batch.expected_grad[rows, columns],
        needs=asked.needs,
        # Virtual tokens are routed too; the model's own term counts them.
        balance_over=nn.functional.pad(batch.real.long(), (virtual, 0), value=1) if "aux" in asked.needs else None,
    )


def _score_head(batch: Batch, virtual: int) -> ScoreHead:
    """Return the last tokens of sequences, found by position (a pad id may equal the eos id)."""
    rows, columns = (batch.sequence >= 0).nonzero(as_tuple=True)
    last = torch.full((batch.num_sequences,), -1, dtype=torch.long, device=rows.device)
    flat = rows * batch.input_ids.shape[1] + columns
    last = last.scatter_reduce(0, batch.sequence[rows, columns], flat, "amax")
    return ScoreHead(last // batch.input_ids.shape[1], last % batch.input_ids.shape[1] + virtual)


def _value_reader(inner: nn.Module, batch: Batch, virtual: int) -> Callable[[Tensor], Tensor]:
    """Last hidden states of the policy to values of the states before each completion token, its own trunk's or another's."""
    rows, columns = (batch.sequence >= 0).nonzero(as_tuple=True)
    columns = batch.predictor[rows, columns]
    critic = critic_of(inner)
    if critic is None:
        return lambda hidden: inner.v_head(hidden[rows, columns + virtual])[:, 0].float()
    inputs = {
        "input_ids": batch.input_ids,
        **_attention(critic, critic, batch, _view(critic, batch)),
        "use_cache": False,
    }
    return lambda _: critic(**inputs, token_head=ScoreHead(rows, columns))["scores"][:, 0]


def _place(values: Tensor | None, batch: Batch, mask: Tensor | None = None) -> Tensor | None:
    """``(N,)`` values at loss positions (or where the mask says) onto the ``(B, T)`` grid."""
    if values is None:
        return None
    grid = torch.zeros(batch.input_ids.shape, dtype=values.dtype, device=values.device)
    return grid.masked_scatter(batch.loss_mask if mask is None else mask, values)


@torch.no_grad()
def sequence_logps(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Compute `alone_logps` without gradients."""
    return alone_logps(model, rows)


def alone_logps(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Compute log-probs of every completion, each sequence alone through the model's own forward and its full logits.

    The plain way, kept as the truth that the fast way is compared with: the model as it was given, with its adapter and the
    virtual tokens of that. Nothing below the wrapper is called.
    """
    bare: Any = unwrapped(model)
    device, virtual = next(bare.parameters()).device, virtual_tokens(bare)
    result = []
    with tree_attention.uninstalled(bare):
        for row in rows:
            for index, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
                sequence = torch.tensor([row.prompt_ids + ids], device=device)
                inputs = plain_inputs(bare, sequence, row, index) if row.pictures else {}
                logits = bare(input_ids=sequence, **inputs, use_cache=False).logits[0, virtual:].float()
                logp = torch.log_softmax(logits[:-1], -1).gather(-1, sequence[0, 1:, None]).squeeze(-1)
                tail = torch.cat([logp.new_zeros(1), logp])[len(row.prompt_ids) :]
                result.append(tail * torch.tensor(mask, device=device))
    return result


def plain_logps(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the log-probs of every token after the first of each sequence, by `sequence_logps`."""
    rows = [Row(list(ids[:1]), [list(ids[1:])], [[1] * (len(ids) - 1)]) for ids in sequences]
    with torch.no_grad():
        return [logp.float().cpu().tolist() for logp in sequence_logps(model, rows)]


@torch.no_grad()
def batch_logps(
    model: nn.Module,
    batches: Iterable[tuple[Batch, bool]],
    *,
    temperature: float,
    chunk_size: int,
    truncation: Truncation = WHOLE,
) -> tuple[list[list[float]], list[list[float]]]:
    """Per-token log-probs of every completion, by the forward that trains, in the order of the rows that were collated; and
    the logs of the mass that truncation left, where there is one.

    Args:
        model: Wrapped as the run wraps it.
        batches: Forward passes on the device of the model; of one whose flag is False (it keeps ranks in step) nothing is kept.
        temperature: Logits are divided by it.
        chunk_size: Tokens whose logits exist at a time.
        truncation: Of the sampler.
    """
    settings = {"temperature": temperature, "truncation": truncation, "chunk_size": chunk_size}
    logps: dict[int, list[float]] = {}
    masses: dict[int, list[float]] = {}
    for batch, counts in batches:
        out = forward(model, batch, **settings)
        if not counts:
            continue
        # Two copies to the host, not one a completion.
        host = replace(batch, sequence=batch.sequence.cpu())
        for by_origin, values in ((logps, out.logp), (masses, out.log_mass)):
            if values is not None:
                pieces = split_by_sequence(values.cpu(), host)
                by_origin |= {origin: piece.tolist() for origin, piece in zip(batch.origin, pieces, strict=True)}
    return [logps[i] for i in range(len(logps))], [masses[i] for i in range(len(masses))]


def sequence_scores(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """``(S, labels)`` scores at the last token of every completion, each sequence alone through the model's own forward."""
    bare: Any = unwrapped(model)
    config = causal_lm(bare).config.get_text_config()
    device, pad = next(bare.parameters()).device, config.pad_token_id
    scores = []
    config.pad_token_id = None  # Else a last token that is the pad id would not be the one that is read.
    try:
        with tree_attention.uninstalled(bare):
            for row in rows:
                for ids in row.completions:
                    sequence = torch.tensor([row.prompt_ids + ids], device=device)
                    logits = bare(input_ids=sequence, use_cache=False).logits.float()
                    scores.append(logits if logits.dim() == 2 else logits[:, -1])
    finally:
        config.pad_token_id = pad
    return torch.cat(scores)


def router_coefficient(model: nn.Module, args: PostTrainingConfig) -> float:
    """The weight of the load-balancing term: what was asked for, else the architecture's own; 0 without a router.

    Raises:
        ConfigError: A weight was asked for and the model has no router.
    """
    wanted = args.router_aux_loss_coef
    default = type(args).__dataclass_fields__["router_aux_loss_coef"].default
    text = causal_lm(model).config.get_text_config()
    if not hasattr(text, "output_router_logits"):
        if wanted and wanted != default:
            raise ConfigError(
                f"router_aux_loss_coef={wanted}, but {type(causal_lm(model)).__name__} has no router: only mixtures of experts "
                "have a load-balancing term. Leave it out."
            )
        return 0.0
    coefficient = getattr(text, "router_aux_loss_coef", None) if wanted is None else wanted
    # The term is ours to add: the model's own would be divided by tokens and counted once a micro-batch.
    text.output_router_logits = False
    if wanted is not None:
        text.router_aux_loss_coef = wanted
    return float(coefficient or 0.0)


def with_router_term(terms: LossTerms, aux_loss: Tensor, coefficient: float) -> LossTerms:
    """Return the loss with the load-balancing term of a mixture of experts, averaged over passes."""
    term = coefficient * aux_loss[None]
    balance = LossTerms(term, torch.ones_like(term, dtype=torch.bool), "local_token")
    return replace(terms, extra=[*terms.extra, balance], metrics=terms.metrics | {"aux_loss": mean(aux_loss)})
