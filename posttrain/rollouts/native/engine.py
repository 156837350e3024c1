"""Continuous batching over the trainer's own model: admit, step, finish, until every request is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import RolloutError
from posttrain.models.forward import LogitRule, causal_lm
from posttrain.rollouts.base import check_requests
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native.attention import Block, Group, Store, plugged_in
from posttrain.rollouts.sampling import sample
from posttrain.types import Request, Rollout, Sampling

__all__ = ["NativeEngine"]

PREFILL_TOKENS = 1024  # Short prompts share a prefill; one long prompt fills the machine by itself.


@dataclass(slots=True)
class _Prompt:
    """One request: its block while any completion needs it, and the logits its first tokens are drawn from."""

    index: int
    request: Request
    waiting: int
    block: Block | None = None
    logits: Tensor | None = None
    live: int = 0


@dataclass(slots=True)
class _Sequence:
    """One completion being written."""

    number: int
    prompt: _Prompt
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class NativeEngine:
    """Runs on the weights that are being trained: no copy, no sync, nothing that can go stale.

    A finished sequence frees its row at once and the next one takes it. Each prompt is prefilled once however many
    completions it has. What a sequence draws depends on the seed and its own number alone, not on what runs beside it.

    Args:
        model: A transformers causal language model that dispatches attention by name, possibly with adapters.
        pad_token_id: Written to padding during prefill.
        max_slots: Sequences live at once; None is 64 on a CPU and 256 on a GPU.
    """

    name = "native"
    in_process = True  # Samples with the weights that are trained: its log-probs need no correction.

    def __init__(self, model: nn.Module, *, pad_token_id: int, max_slots: int | None = None) -> None:
        self.model: Any = model
        self.inner: Any = causal_lm(model)
        self.pad_token_id = pad_token_id
        self.rule = LogitRule.of(self.inner.config)
        device = next(model.parameters()).device
        self.max_slots = max_slots or (64 if device.type == "cpu" else 256)
        self.version = 0
        self._stream = torch.Generator().manual_seed(0)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        text = self.inner.config.get_text_config()
        check_requests(requests, sampling, getattr(text, "max_position_embeddings", None), text.vocab_size)
        run = _Run(self, requests, sampling)
        with evaluating(self.model), plugged_in(self.inner, run.store):
            return run.to_the_end()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing outlives a call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``(n, H)`` final hidden states to ``(n, V)`` logits, by the architecture's own rule."""
        x = self.inner.get_output_embeddings()(hidden).float()
        x = x if self.rule.scale == 1.0 else x * self.rule.scale
        return x if self.rule.softcap is None else self.rule.softcap * torch.tanh(x / self.rule.softcap)

    def uniforms(self, sequences: int, sampling: Sampling) -> Tensor:
        """``(sequences, max_new_tokens)`` numbers that decide every draw of a call, made before the first."""
        generator = self._stream if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        return torch.rand(sequences, sampling.max_new_tokens, generator=generator, dtype=torch.float64)


class _Run:
    """One call of `NativeEngine.generate`."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self.device = next(engine.model.parameters()).device
        self.prompts = [_Prompt(i, r, r.n) for i, r in enumerate(requests)]
        count = sum(r.n for r in requests)
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + request.n)
        self.starts = starts
        self.store = Store(slots=min(engine.max_slots, max(count, 1)))
        self.uniform = engine.uniforms(count, sampling).to(self.device)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=self.device)
        self.live: list[_Sequence] = []
        self.done: list[Rollout | None] = [None] * count
        self.tokens = torch.empty(0, dtype=torch.long, device=self.device)
        self.positions = torch.empty(0, dtype=torch.long, device=self.device)
        self.store.lengths = torch.empty(0, dtype=torch.long, device=self.device)

    def to_the_end(self) -> list[Rollout]:
        cursor = 0
        while True:
            cursor = self._admit(cursor)
            if not self.live:
                break
            self._step()
        return [rollout for rollout in self.done if rollout is not None]

    # Admission ---------------------------------------------------------------------------------------------------

    def _admit(self, cursor: int) -> int:
        """Fill free rows with waiting sequences, in order; returns the first prompt that still waits."""
        while cursor < len(self.prompts) and len(self.live) < self.store.slots:
            prompt = self.prompts[cursor]
            if prompt.waiting == 0:
                cursor += 1
                continue
            if prompt.block is None:
                self._prefill(cursor)
            self._start(prompt, min(prompt.waiting, self.store.slots - len(self.live)))
        return cursor

    def _prefill(self, cursor: int) -> None:
        """Compute the prompt at ``cursor`` and as many after it as fit one pass and the free rows."""
        chosen, width, rows = (
            [self.prompts[cursor]],
            len(self.prompts[cursor].request.prompt_ids),
            self.prompts[cursor].waiting,
        )
        for prompt in self.prompts[cursor + 1 :]:
            wider = max(width, len(prompt.request.prompt_ids))
            if wider * (len(chosen) + 1) > PREFILL_TOKENS or len(self.live) + rows >= self.store.slots:
                break
            chosen.append(prompt)
            width, rows = wider, rows + prompt.waiting
        lists = [list(p.request.prompt_ids) for p in chosen]
        pad = self.engine.pad_token_id
        ids = torch.tensor([x + [pad] * (width - len(x)) for x in lists], device=self.device)
        lengths = torch.tensor([len(x) for x in lists], device=self.device)
        block = Block([p.index for p in chosen], lengths)
        self.store.filling = block
        try:
            positions = torch.arange(width, device=self.device).expand(len(chosen), -1)
            hidden = self.engine.inner.base_model(
                input_ids=ids, position_ids=positions, use_cache=False
            ).last_hidden_state
        finally:
            self.store.filling = None
        logits = self.engine.logits(hidden[torch.arange(len(chosen), device=self.device), lengths - 1])
        for prompt, row in zip(chosen, logits, strict=True):
            prompt.block, prompt.logits = block, row

    def _start(self, prompt: _Prompt, count: int) -> None:
        """Draw the first token of ``count`` completions of a prompt."""
        assert prompt.logits is not None
        begun = self.starts[prompt.index] + prompt.request.n - prompt.waiting
        sequences = [_Sequence(begun + i, prompt) for i in range(count)]
        prompt.waiting -= count
        prompt.live += count
        tokens = self._draw(prompt.logits.repeat(count, 1), sequences, [0] * count)
        if prompt.waiting == 0:
            prompt.logits = None
        self.live += sequences
        length = len(prompt.request.prompt_ids)
        self.tokens = torch.cat([self.tokens, tokens])
        self.positions = torch.cat([self.positions, torch.full((count,), length, device=self.device)])
        self.store.lengths = torch.cat([self.store.lengths, torch.zeros(count, dtype=torch.long, device=self.device)])
        self._finish(started=True)

    # Steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every live sequence."""
        self.store.longest = max(len(s.tokens) for s in self.live) - 1
        self.store.hidden = {}
        hidden = self.engine.inner.base_model(
            input_ids=self.tokens[:, None], position_ids=self.positions[:, None], use_cache=False
        ).last_hidden_state[:, 0]
        self.tokens = self._draw(self.engine.logits(hidden), self.live, [len(s.tokens) for s in self.live])
        self.positions = self.positions + 1
        self.store.lengths = self.store.lengths + 1
        self._finish()

    def _draw(self, logits: Tensor, sequences: list[_Sequence], steps: list[int]) -> Tensor:
        numbers = torch.tensor([[s.number, t] for s, t in zip(sequences, steps, strict=True)], device=self.device)
        history = None
        if self.sampling.repetition_penalty != 1.0:
            history = [list(s.prompt.request.prompt_ids) + s.tokens for s in sequences]
        try:
            tokens, logps = sample(logits, self.sampling, self.uniform[numbers[:, 0], numbers[:, 1]], history)
        except RolloutError as error:
            requests = sorted({s.prompt.index for s in sequences})
            raise RolloutError(f"{error} Requests in this step: {requests[:8]}. Check the weights for NaN.") from error
        for sequence, token, logp in zip(sequences, tokens.tolist(), logps.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logps.append(logp)
        return tokens

    def _finish(self, *, started: bool = False) -> None:
        """Hand over completions that stopped or are full, and close the gaps they leave."""
        stops, limit = set(self.sampling.stop_token_ids), self.sampling.max_new_tokens
        ended = [i for i, s in enumerate(self.live) if s.tokens[-1] in stops or len(s.tokens) >= limit]
        if ended:
            order = list(range(len(self.live)))
            for row in reversed(ended):
                self._hand_over(self.live[row])
                last = len(self.live) - 1
                if row != last:
                    self.store.move(last, row, len(self.live[last].tokens))
                    self.live[row], order[row] = self.live[last], order[last]
                self.live.pop()
                order.pop()
            index = torch.tensor(order, dtype=torch.long, device=self.device)
            self.tokens, self.positions = self.tokens[index], self.positions[index]
            self.store.lengths = self.store.lengths[index]
        if ended or started:
            self._regroup()

    def _hand_over(self, sequence: _Sequence) -> None:
        prompt = sequence.prompt
        stopped = sequence.tokens[-1] in self.sampling.stop_token_ids
        self.done[sequence.number] = Rollout(
            list(prompt.request.prompt_ids),
            sequence.tokens,
            sequence.logps,
            "stop" if stopped else "length",
            self.engine.version,
        )
        prompt.live -= 1
        if prompt.live == 0 and prompt.waiting == 0:
            prompt.block = None  # Nobody reads this prompt any more.

    def _regroup(self) -> None:
        """Tell the attention which live rows read which prompt; forget prompts that nobody reads."""
        rows: dict[int, list[int]] = {}
        for row, sequence in enumerate(self.live):
            rows.setdefault(sequence.prompt.index, []).append(row)
        blocks: dict[int, Block] = {}
        for prompt in self.prompts:
            if prompt.block is not None:
                blocks[id(prompt.block)] = prompt.block
        self.store.groups = [g for block in blocks.values() if (g := self._group(block, rows)) is not None]
        lengths = [len(s.prompt.request.prompt_ids) for s in self.live]
        self.store.prefix = torch.tensor(lengths, dtype=torch.long, device=self.device)

    def _group(self, block: Block, rows: dict[int, list[int]]) -> Group | None:
        needed = [p for p in block.prompts if self.prompts[p].block is not None]
        if len(needed) < len(block.prompts):
            block.keep(needed)
        members = [rows.get(p, []) for p in block.prompts]
        flat = [row for member in members for row in member]
        if not flat:
            return None
        g = max(map(len, members))
        grid = [member + flat[:1] * (g - len(member)) for member in members]
        place = [i * g + j for i, member in enumerate(members) for j in range(len(member))]
        return Group(block, *(torch.tensor(x, device=self.device) for x in (flat, grid, place)))
