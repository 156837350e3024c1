"""Generations as padded tensors and back, for code that was written for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posttrain.data.forest import collate, split_by_sequence
from posttrain.errors import ConfigError, did_you_mean
from posttrain.models import parallel
from posttrain.models.attention import padded_layout
from posttrain.models.forward import forward
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Rollout, Row

__all__ = ["from_padded", "padded_logps", "to_padded"]

LOGPS = {  # Name in the dict of padded tensors -> column of a generation.
    "old_per_token_logps": "old_logp",
    "ref_per_token_logps": "ref_logp",
    "sampling_per_token_logps": "rollout_logp",
}
NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
KNOWN = (*NEEDED, "tool_mask", "num_items_in_batch", *LOGPS)


def _pad(lists: list[list[Any]], value: float, *, left: bool = False, dtype: Any = torch.long) -> Tensor:
    width = max(map(len, lists), default=0)
    rows = [[value] * (width - len(x)) + list(x) if left else list(x) + [value] * (width - len(x)) for x in lists]
    return torch.tensor(rows, dtype=dtype).view(len(lists), width)


def to_padded(generation: RolloutBatch, *, pad_token_id: int, skip_truncated: bool, accelerator: Any) -> dict[str, Any]:
    """Prompts padded left, completions right, as ``(n, width)`` tensors with their masks, log-probs and advantages.

    Args:
        generation: Of this rank, scored.
        pad_token_id: Written to padding.
        skip_truncated: Whether completions that hit the limit are masked.
        accelerator: Adds ``num_items_in_batch`` up over ranks.
    """
    rollouts = generation.rollouts
    masks = [generation.loss_mask(i, skip_truncated) for i in range(len(rollouts))]
    whole = [[int(any(m))] * len(m) for m in masks]  # A masked completion is masked altogether.
    output: dict[str, Any] = {
        "prompt_ids": _pad([r.prompt_ids for r in rollouts], pad_token_id, left=True),
        "prompt_mask": _pad([[1] * len(r.prompt_ids) for r in rollouts], 0, left=True),
        "completion_ids": _pad([r.token_ids for r in rollouts], pad_token_id),
        "completion_mask": _pad(whole, 0),
        "advantages": torch.tensor(generation.columns["advantages"]),
        "num_items_in_batch": torch.tensor(parallel.all_reduce_sum([float(sum(map(sum, masks)))], accelerator)[0]),
    }
    if any(r.tool_mask for r in rollouts):
        output["tool_mask"] = _pad([r.tool_mask or [1] * len(r.token_ids) for r in rollouts], 1)
    for name, column in LOGPS.items():
        if column in generation.token_columns:
            output[name] = _pad(generation.token_columns[column], 0.0, dtype=torch.float32)
    return output


def from_padded(
    output: dict[str, Any], examples: list[dict[str, Any]], known: RolloutBatch | None, args: Any
) -> RolloutBatch:
    """What a subclass made of the padded tensors, as a generation that is trained as it is.

    Args:
        output: See `to_padded`; ``advantages`` may be ``(n,)`` or one a token, ``(n, width)``.
        examples: Rows they answer.
        known: The generation that `to_padded` got, for the step it was sampled at.
        args: `GRPOConfig`.

    Raises:
        ConfigError: A tensor is missing, or is there and would be ignored.
    """
    if missing := [name for name in NEEDED if name not in output]:
        raise ConfigError(f"_generate_and_score_completions returned no {', '.join(missing)}.")
    for name in output:
        if name not in KNOWN:
            raise ConfigError(
                f"_generate_and_score_completions returned {name!r}, which nothing reads here{did_you_mean(name, KNOWN)}. To "
                "bring a number a completion to the objective, put it into generation.columns in advantages()."
            )
    masks = output["completion_mask"].long()
    lengths = [int(m.nonzero().max()) + 1 if m.any() else 0 for m in masks]
    trained = masks if output.get("tool_mask") is None else masks * output["tool_mask"].long()
    rollouts = [
        Rollout(
            output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist(),
            output["completion_ids"][i, :n].tolist(),
            [],
            "stop",  # Whatever was to be masked is masked already.
            tool_mask=trained[i, :n].tolist(),
        )
        for i, n in enumerate(lengths)
    ]
    generation = RolloutBatch(examples, rollouts, [None] * len(rollouts), born=known.born if known else 0)
    advantages = output["advantages"].float()
    if advantages.dim() == 1:
        generation.columns["advantages"] = advantages.tolist()
    elif args.loss_type == "vespo" or args.off_policy_mask_threshold is not None:
        raise ConfigError(
            f"advantages of shape {tuple(advantages.shape)}: loss_type='vespo' and off_policy_mask_threshold need one a sequence."
        )
    else:
        generation.token_columns["advantages"] = [advantages[i, :n].tolist() for i, n in enumerate(lengths)]
    for name, column in LOGPS.items():
        if output.get(name) is not None:
            generation.token_columns[column] = [output[name][i, :n].tolist() for i, n in enumerate(lengths)]
    return generation


def padded_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, keep: int, *, needs: frozenset[str], **settings: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs and entropies ``(B, keep)`` of the last ``keep`` columns of padded rows, 0 on padding, and the router's term.

    ``settings`` are those of `forward`: ``temperature``, ``chunk_size``.
    """
    real = attention_mask.bool()
    tail = real[:, -keep:]
    rows = []
    for ids, inside in zip(input_ids, real, strict=True):
        completion = ids[-keep:][inside[-keep:]].tolist()
        rows.append(Row(ids[:-keep][inside[:-keep]].tolist(), [completion], [[1] * len(completion)]))
    [batch] = collate(rows, pad_token_id=0, layout=padded_layout(model), together=True)
    batch = batch.to(input_ids.device)
    out = forward(model, batch, needs, **settings)

    def placed(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        pieces = split_by_sequence(values, batch)
        order = sorted(range(len(rows)), key=batch.origin.__getitem__)
        flat = torch.cat([pieces[k] for k in order])
        return torch.zeros(tail.shape, dtype=flat.dtype, device=flat.device).masked_scatter(tail, flat)

    logp = placed(out.logp)
    assert logp is not None
    return logp, placed(out.entropy), out.aux_loss
