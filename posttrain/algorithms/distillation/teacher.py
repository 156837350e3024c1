"""Where a teacher's side of the comparison comes from: a model, the student itself, a file of scores, a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.algorithms.distillation.objective import HiddenTeacher, SparseTeacher, capture
from posttrain.data.forest import Layout, collate, share_prompts, to_rows
from posttrain.errors import ConfigError, ModelError
from posttrain.models import load
from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm
from posttrain.types import Batch, Row

__all__ = ["ModelTeacher", "ScoringServer", "ServerTeacher", "TokenScores", "frozen", "load_teacher", "sparse_view"]


@dataclass
class TokenScores:
    """What a teacher says of one completion of L tokens, at temperature 1.

    Attributes:
        ids: ``(L, k)`` most likely ids at each position, best first.
        logps: ``(L, k)`` their log-probs.
        actual: ``(L,)`` log-probs of the completion's own tokens.
    """

    ids: Tensor
    logps: Tensor
    actual: Tensor


class ScoringServer(Protocol):
    """A client of a server that scores texts it did not write (vLLM's ``prompt_logprobs``)."""

    model_id: str
    top_k: int

    def score(self, prompts: Sequence[list[int]], completions: Sequence[list[int]], top_k: int) -> list[TokenScores]:
        """Scores of each completion after its prompt, in order."""
        ...


class ServedModel:
    """A `ScoringServer` over ``vllm serve`` or ``posttrain serve``, by the client that rollouts use too.

    Args:
        url: Of the server: ``http://10.0.0.5:8000``.

    Attributes:
        model_id: The model that the server names.
        top_k: Most log-probs a position that it gives; vLLM's own default is 20.
    """

    def __init__(self, url: str) -> None:
        from posttrain.rollouts.server.client import VLLMClient

        self.client = VLLMClient(url)
        facts = self.client.info()
        self.model_id = str(facts.get("model") or facts.get("served") or "")
        # Our host has no limit but the vocabulary; vLLM's is an option of its own, 20 where it is not told.
        own = facts.get("engine") in ("native", "hf")
        self.top_k = int(facts["vocab_size"] if own else facts.get("max_logprobs") or 20)

    def score(self, prompts: Sequence[list[int]], completions: Sequence[list[int]], top_k: int) -> list[TokenScores]:
        """See `ScoringServer`."""
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
        found = self.client.score(whole, [len(prompt) for prompt in prompts], top=top_k)
        return [TokenScores(torch.tensor(s.top_ids), torch.tensor(s.top_logps), torch.tensor(s.logps)) for s in found]


def load_teacher(given: Any, args: Any, student: nn.Module) -> nn.Module:
    """The teacher as a frozen model in eval mode.

    Args:
        given: A model or an id; None: ``teacher_model_name_or_path``.
        args: Of the trainer.
        student: Which it must not be.

    Raises:
        ConfigError: No teacher, or the student itself.
    """
    given = given if given is not None else args.teacher_model_name_or_path
    if given is None:
        raise ConfigError(
            "there is no teacher. Fix: teacher_model (a model or an id), teacher_scores (a file), teacher_model_server_url, or "
            "teacher_model_kind='base', 'live' or 'ema' for the student itself."
        )
    if isinstance(given, nn.Module):
        if causal_lm(given) is causal_lm(student):
            raise ConfigError(
                "teacher_model is the student object itself: its divergence is 0 at every step. Fix: another model, or "
                "teacher_model_kind='base', which compares with the weights as they are now."
            )
        return given.requires_grad_(False).eval()
    kwargs: dict[str, Any] = dict(args.teacher_model_init_kwargs or {})
    kwargs.setdefault("dtype", "auto")
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    if args.teacher_model_revision is not None:
        kwargs["revision"] = args.teacher_model_revision
    return load.create_model_from_path(given, **kwargs).requires_grad_(False).eval()


@contextmanager
def frozen(model: nn.Module, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Iterator[nn.Module]:
    """A model of its own, without gradients, in the precision of the student: else rounding would be a divergence."""
    with torch.no_grad(), autocast():
        yield model


@dataclass
class ModelTeacher:
    """A model in this process; its logits exist only where the student's are compared with them.

    Attributes:
        running: Context in which the model is the teacher (eval mode, no gradients, maybe another adapter).
        layout: How its rows are laid out; a forest where a probe shows that it is exact.
        shared: Whether the student's batches are laid out for it too.
        pad_token_id: For its batches.
    """

    running: Callable[[], AbstractContextManager[nn.Module]]
    layout: Layout
    shared: bool
    pad_token_id: int

    def of_batch(self, batch: Batch) -> HiddenTeacher:
        """The teacher at the loss positions of a batch, in their order."""
        if not self.shared:
            return self.of_rows(to_rows(batch), batch.input_ids.device)
        with self.running() as model:
            return forward(model, batch, frozenset(), compare=capture).compared["teacher"]

    def of_rows(self, rows: Sequence[Row], device: Any) -> HiddenTeacher:
        """The teacher at the loss tokens of all completions, in the order of the rows; equal prompts are computed once."""
        bare = [Row(row.prompt_ids, row.completions, row.loss_masks) for row in rows]
        shared, places = share_prompts(bare)
        pieces: list[Tensor] = [torch.empty(0)] * len(places)
        view: Any = None
        with self.running() as model:
            for batch in collate(shared, pad_token_id=self.pad_token_id, layout=self.layout):
                view = forward(model, batch.to(device), frozenset(), compare=capture).compared["teacher"]
                counts = torch.bincount(batch.sequence[batch.loss_mask], minlength=batch.num_sequences).tolist()
                for origin, piece in zip(batch.origin, view.hidden.split(counts), strict=True):
                    pieces[places[origin]] = piece
        return replace(view, hidden=torch.cat(pieces))

    def of_prompts(self, batch: Batch, prompts: dict[int, list[int]]) -> HiddenTeacher:
        """The teacher after prompts of its own, by the number in the batch's column ``key``."""
        rows = []
        for row in to_rows(batch):
            for ids, mask, key in zip(row.completions, row.loss_masks, row.sequence_columns["key"], strict=True):
                rows.append(Row(prompts[int(key)], [ids], [mask]))
        return self.of_rows(rows, batch.input_ids.device)


def sparse_view(batch: Batch, scores: Callable[[int], TokenScores]) -> SparseTeacher:
    """Scores of the batch's loss tokens, in their order, by the number in its column ``key``."""
    found = []
    for row in to_rows(batch):
        for mask, key in zip(row.loss_masks, row.sequence_columns["key"], strict=True):
            one, kept = scores(int(key)), torch.tensor(mask, dtype=torch.bool)
            if len(one.actual) != len(mask):
                raise ModelError(f"the teacher scored {len(one.actual)} of {len(mask)} tokens of a completion.")
            found.append(TokenScores(one.ids[kept], one.logps[kept], one.actual[kept]))
    device = batch.input_ids.device
    parts = (torch.cat([getattr(one, name) for one in found]).to(device) for name in ("ids", "logps", "actual"))
    return SparseTeacher(*parts)


class ServerTeacher:
    """Scores of completions that a server gives.

    Args:
        client: See `ScoringServer`.
        axes: Of the run: k and temperature.
        student: Its tokenizer's name, for the handshake.

    Raises:
        ConfigError: k above the server's cap, or a temperature other than 1, which servers do not apply to prompts.
        ModelError: The server scores another number of tokens than it is given, or scores that are no log-probs.
    """

    def __init__(self, client: ScoringServer, axes: Any, *, expected: str | None, probe: list[int]) -> None:
        self.client, self.top_k = client, max(axes.top_k, 1)
        if expected and client.model_id and Path(client.model_id).name != Path(expected).name:
            raise ConfigError(
                f"the server has the model {client.model_id!r}, and teacher_model_name_or_path names "
                f"{expected!r}. Fix: start it with "
                "that model, or name the one it has."
            )
        if axes.support not in ("teacher_topk", "sampled", "top1_pair"):
            raise ConfigError(
                f"loss_top_k={axes.top_k} with beta={axes.beta}: a server gives its own likeliest ids and "
                "the sampled token, and this "
                "loss sees others. Fix: beta=0 with any loss_top_k, or loss_top_k=1."
            )
        if self.top_k > client.top_k:
            raise ConfigError(
                f"loss_top_k={self.top_k}: the server gives at most {client.top_k} log-probs a position. Fix: loss_top_k="
                f"{client.top_k}, or start it with --max-logprobs {self.top_k}."
            )
        if axes.teacher_temperature != 1:
            raise ConfigError(
                f"temperature={axes.teacher_temperature} with a teacher server: its log-probs of given "
                "tokens are at temperature 1, "
                "and the student's would not be. Fix: temperature=1.0, or a teacher model in this process."
            )
        self.score([probe[:1]], [probe[1:]])

    def score(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[TokenScores]:
        """Scores of all completions; every token has them, or this raises."""
        found = self.client.score(prompts, completions, self.top_k)
        for ids, one in zip(completions, found, strict=True):
            good = len(one.actual) == len(one.logps) == len(ids) and one.logps.shape[-1:] == (self.top_k,)
            finite = good and bool(one.logps.isfinite().all() and one.actual.isfinite().all())
            ranked = good and bool((one.logps.diff(dim=-1) <= 1e-6).all() and (one.logps <= 1e-4).all())
            if not (finite and ranked):
                raise ModelError(
                    f"the teacher server scored {len(one.actual)} of {len(ids)} tokens with "
                    f"{one.logps.shape[-1]} of {self.top_k} "
                    "log-probs each, or scores that are not finite, falling log-probs. Fix: look at the server's log."
                )
        return found
