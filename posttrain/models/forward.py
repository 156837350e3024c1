"""Forward pass over a batch of prefix trees. The output head is applied only to hidden states at loss positions. Log-probs
are computed in chunks of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain import plugins
from posttrain.data.forest import split_by_sequence
from posttrain.errors import ConfigError
from posttrain.metrics import mean
from posttrain.models import token_split, tree_attention
from posttrain.models.architecture import image_token
from posttrain.models.attention import attention_inputs
from posttrain.models.heads import (
    PER_TOKEN,
    PassInputs,
    ScoreHead,
    TokenHead,
    attention_renamed,
    causal_lm,
    install_token_head,
    learns_prompts,
    unwrapped,
    virtual_tokens,
)
from posttrain.models.token_split import TokenSplit
from posttrain.models.value_head import critic_of
from posttrain.types import WHOLE, Batch, LossTerms, ModelOutputs, Row, Truncation

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig

IMAGES = "extensions.images.encoder"  # Module that computes the model inputs for images.


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
    """Run the model on a batch and return the requested outputs. Most outputs are tensors ``(B, T)``.

    Args:
        model: A language model or classifier, possibly wrapped, e.g. in DDP. `install_token_head` patches the model's forward
            method.
        batch: Batch on the model's device.
        needs: Names of the requested outputs: any of ``logp``, ``entropy``, ``entropy_grad``, ``correct``,
            ``mean_logit``, ``collision``, ``values``, ``logits`` and ``aux``. For a classifier, the only name is ``scores``,
            the score at the last token of each sequence.
        temperature: Sampling temperature, by which the logits are divided.
        truncation: Truncation of the sampling distribution, e.g. top-p. With truncation, the output ``log_mass`` is the log
            of the remaining probability mass.
        chunk_size: Number of positions per chunk of logits. None: the default of `token_logprobs`.
        compare: Function that compares two models; see `TokenHead.compare`. The result of ``compare`` is returned as the
            output ``compared``.

    Returns:
        The requested outputs. The shapes of outputs are described in `posttrain.types.ModelOutputs`.
    """
    install_token_head(model)
    request = Pass(batch, needs, temperature, truncation, chunk_size, compare is not None)
    split = token_split.active()
    # After a pass with gradients, the config keeps the name of tree attention, because the backward pass calls checkpointed
    # layers again. After other passes, the previous name is restored.
    named = nullcontext() if torch.is_grad_enabled() else attention_renamed(model, lambda name: name)
    with named:
        result = run(model, request, compare) if split is None else split.forward(model, request, compare)
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


@dataclass(frozen=True, slots=True)
class Pass:
    """Arguments of a forward pass; see `forward`. The arguments are sent to all processes that compute a batch together.

    Attributes:
        compares: Whether `forward` got an argument ``compare``. The process that owns the batch then compares its last
            hidden states with the hidden states of another model.
    """

    batch: Batch
    needs: frozenset[str]
    temperature: float
    truncation: Truncation
    chunk_size: int | None
    compares: bool = False


def run(model: nn.Module, request: Pass, compare: Callable[..., dict[str, Any]] | None) -> dict[str, Any]:
    """Run a forward pass and return its outputs by name. An output is a tensor ``(N, ...)`` with one row per loss position,
    or a tensor ``(S, ...)`` with one row per sequence.
    """
    return call(model, request.batch, *prepared(model, request, compare))


def prepared(
    model: nn.Module,
    request: Pass,
    compare: Callable[..., dict[str, Any]] | None,
    split: TokenSplit | None = None,
    columns: slice | None = None,
) -> tuple[TokenHead | ScoreHead, dict[str, Any]]:
    """Return the output head and the model inputs of a forward pass. Head and inputs cover all columns of the batch.

    Args:
        model: Same as in `forward`.
        request: Arguments of the forward pass.
        compare: Same as in `forward`.
        split: Sequence-parallel group that computes the pass. None: one process computes the pass alone.
        columns: Columns that this process of the group computes. None: all columns.
    """
    inner: Any = causal_lm(model)
    batch, needs, virtual = request.batch, request.needs, virtual_tokens(model)
    head = _score_head(batch, virtual) if "scores" in needs else _token_head(request, virtual)
    if isinstance(head, TokenHead):
        head.compare = compare
    if isinstance(head, TokenHead) and "values" in needs:
        head.values = _value_reader(inner, batch, virtual)
    seen = _view(inner, batch, columns)
    head.inputs = seen.inputs
    return head, {"input_ids": batch.input_ids, **_attention(model, inner, batch, seen, split)}


def call(model: nn.Module, batch: Batch, head: TokenHead | ScoreHead, inputs: dict[str, Any]) -> dict[str, Any]:
    """Call the model with a head and inputs that `prepared` returned."""
    balance = isinstance(head, TokenHead) and head.balance_over is not None
    return model(
        **inputs,
        use_cache=False,
        token_head=head,
        **({"output_router_logits": True} if balance else {}),
        **batch.model_kwargs,
    )


def _view(model: nn.Module, batch: Batch, columns: slice | None = None) -> PassInputs:
    """Return the position ids and, for models with images, the other inputs that depend on the batch's images."""
    shown = image_token(model.config) is not None or batch.pictures
    return plugins.module(IMAGES).view(model, batch, columns) if shown else PassInputs(batch.position_ids)


def _attention(
    model: nn.Module, inner: nn.Module, batch: Batch, seen: PassInputs, split: TokenSplit | None = None
) -> dict[str, Any]:
    if learns_prompts(model):
        assert batch.one_sequence_a_row, "virtual tokens need one sequence per row"
        return {"attention_mask": batch.real.long()}
    inputs = attention_inputs(batch, inner, next(inner.parameters()).dtype, seen.span, split)
    return inputs | ({} if seen.position_ids is None else {"position_ids": seen.position_ids})


def _token_head(request: Pass, virtual: int) -> TokenHead:
    batch = request.batch
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    return TokenHead(
        rows=rows,
        columns=batch.predictor[rows, columns] + virtual,
        targets=batch.input_ids[rows, columns],
        temperature=request.temperature,
        truncation=request.truncation,
        chunk_size=request.chunk_size,
        expected_grad=None if batch.expected_grad is None else batch.expected_grad[rows, columns],
        needs=request.needs,
        # Include virtual tokens, because they pass through the routers too, and the model's own load-balancing loss counts
        # them.
        balance_over=nn.functional.pad(batch.real.long(), (virtual, 0), value=1) if "aux" in request.needs else None,
    )


def _score_head(batch: Batch, virtual: int) -> ScoreHead:
    """Return a head that scores the last token of each sequence. The last token is found by its position, because pad and eos
    can have the same id.
    """
    rows, columns = (batch.sequence >= 0).nonzero(as_tuple=True)
    last = torch.full((batch.num_sequences,), -1, dtype=torch.long, device=rows.device)
    flat = rows * batch.input_ids.shape[1] + columns
    last = last.scatter_reduce(0, batch.sequence[rows, columns], flat, "amax")
    return ScoreHead(last // batch.input_ids.shape[1], last % batch.input_ids.shape[1] + virtual)


def _value_reader(inner: nn.Module, batch: Batch, virtual: int) -> Callable[[Tensor], Tensor]:
    """Return a function that maps the policy's last hidden states to the value before each completion token. The function
    uses the value head or the separate value model.
    """
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
    """Write ``(N,)`` values into a tensor of zeros ``(B, T)``, at the positions where ``mask`` is True. Without a mask,
    write them at the loss positions.
    """
    if values is None:
        return None
    grid = torch.zeros(batch.input_ids.shape, dtype=values.dtype, device=values.device)
    return grid.masked_scatter(batch.loss_mask if mask is None else mask, values)


@torch.no_grad()
def sequence_logps(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Compute the log-probs of every completion without gradients; see `alone_logps`."""
    return alone_logps(model, rows)


def alone_logps(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Compute the log-probs of every completion. Each sequence is passed separately through the model's own forward method.

    The results of `forward` are compared with this simple computation, which uses full logits. The model is called unchanged,
    including its adapter and virtual tokens.
    """
    bare: Any = unwrapped(model)
    device, virtual = next(bare.parameters()).device, virtual_tokens(bare)
    result = []
    with tree_attention.uninstalled(bare):
        for row in rows:
            for index, (ids, mask) in enumerate(zip(row.completions, row.loss_masks, strict=True)):
                sequence = torch.tensor([row.prompt_ids + ids], device=device)
                inputs = plugins.module(IMAGES).plain_inputs(bare, sequence, row, index) if row.pictures else {}
                logits = bare(input_ids=sequence, **inputs, use_cache=False).logits[0, virtual:].float()
                logp = torch.log_softmax(logits[:-1], -1).gather(-1, sequence[0, 1:, None]).squeeze(-1)
                tail = torch.cat([logp.new_zeros(1), logp])[len(row.prompt_ids) :]
                result.append(tail * torch.tensor(mask, device=device))
    return result


def plain_logps(model: nn.Module, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Compute the log-probs of all tokens of each sequence with `sequence_logps`. The first token has no log-prob."""
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
    """Compute the log-probs of the tokens of all completions with `forward`, and the log of the probability mass that
    remains after truncation. Without truncation, the second result is an empty list. The completions are in the order of the
    collated rows.

    Args:
        model: Model, including wrappers such as DDP.
        batches: Pairs of a batch on the model's device and a flag. If the flag is False, the results of the batch are
            dropped, and the batch only keeps the number of passes equal on all ranks.
        temperature: Temperature by which the logits are divided.
        chunk_size: Number of tokens per chunk of logits.
        truncation: Truncation of the sampler's distribution.
    """
    settings = {"temperature": temperature, "truncation": truncation, "chunk_size": chunk_size}
    logps: dict[int, list[float]] = {}
    masses: dict[int, list[float]] = {}
    for batch, counts in batches:
        out = forward(model, batch, **settings)
        if not counts:
            continue
        # Copy the log-probs of all completions to the CPU together. Two large copies take less time than one copy per
        # completion.
        host = replace(batch, sequence=batch.sequence.cpu())
        for by_origin, values in ((logps, out.logp), (masses, out.log_mass)):
            if values is not None:
                pieces = split_by_sequence(values.cpu(), host)
                by_origin |= {origin: piece.tolist() for origin, piece in zip(batch.origin, pieces, strict=True)}
    return [logps[i] for i in range(len(logps))], [masses[i] for i in range(len(masses))]


def sequence_scores(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Compute the scores ``(S, labels)`` at the last token of each completion. Each sequence is passed separately through the
    model's own forward method.
    """
    bare: Any = unwrapped(model)
    config = causal_lm(bare).config.get_text_config()
    device, pad = next(bare.parameters()).device, config.pad_token_id
    scores = []
    # Remove the pad token id from the config. Otherwise, the model would not score a last token that equals the pad token.
    config.pad_token_id = None
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
    """Return the weight of the load-balancing loss: the option's value if it is set, otherwise the value in the model's
    config. For a model without a router, the weight is 0.

    Raises:
        ConfigError: A weight is set, but the model has no router.
    """
    wanted = args.router_aux_loss_coef
    default = type(args).__dataclass_fields__["router_aux_loss_coef"].default
    text = causal_lm(model).config.get_text_config()
    if not hasattr(text, "output_router_logits"):
        if wanted and wanted != default:
            raise ConfigError(
                f"router_aux_loss_coef={wanted} is set, but {type(causal_lm(model)).__name__} has no router. Only "
                "mixture-of-experts models have a load-balancing loss. Fix: remove the option."
            )
        return 0.0
    coefficient = getattr(text, "router_aux_loss_coef", None) if wanted is None else wanted
    # Disable the model's own load-balancing term, which is divided by the number of tokens and added once per micro-batch.
    # `with_router_term` adds the term instead.
    text.output_router_logits = False
    if wanted is not None:
        text.router_aux_loss_coef = wanted
    return float(coefficient or 0.0)


def with_router_term(terms: LossTerms, aux_loss: Tensor, coefficient: float) -> LossTerms:
    """Add the load-balancing term of a mixture of experts to the loss. The term is averaged over the passes of the step."""
    term = coefficient * aux_loss[None]
    balance = LossTerms(term, torch.ones_like(term, dtype=torch.bool), "local_token")
    return replace(terms, extra=[*terms.extra, balance], metrics=terms.metrics | {"aux_loss": mean(aux_loss)})
