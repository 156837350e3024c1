"""How fast this machine samples completions of given lengths, by every engine at hand, beside what its arithmetic allows.

python benchmarks/engines.py MODEL --group 8 --new-tokens 256
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from posttrain.errors import ConfigError, RolloutError, check_choice
from posttrain.models.forward import causal_lm
from posttrain.models.heads import evaluating
from posttrain.models.logprob import HAS_ONEDNN
from posttrain.rollouts.native.engine import NativeEngine, logp_gaps
from posttrain.rollouts.native.layers import packs
from posttrain.rollouts.paged import page_field
from posttrain.types import Request, Rollout, Sampling

__all__ = ["RUNS", "Figure", "Work", "engines_here", "lengths", "measure", "recommended", "seconds_at_least"]

SPREAD = 0.6  # Standard deviation of the logarithm of skewed lengths.
SHAPES = ("equal", "skewed")
PAGE = 32  # Tokens of a page of transformers' paged memory on a CPU, where it cannot size it by itself.


@dataclass(frozen=True, slots=True)
class Work:
    """Completions to sample.

    Attributes:
        prompts: Token ids; consecutive completions belong to one prompt.
        group: Completions of each prompt.
        lengths: Tokens of every completion.
    """

    prompts: list[list[int]]
    group: int
    lengths: list[int]

    @property
    def tokens(self) -> int:
        """Tokens that are sampled."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Figure:
    """One engine's time.

    Attributes:
        name: Of the engine.
        seconds: Of the whole work.
        tokens_per_second: Of sampled tokens.
        gap: Mean difference of its log-probs to a forward pass of the model, in nats; None where it gives none.
    """

    name: str
    seconds: float
    tokens_per_second: float
    gap: float | None


def lengths(count: int, longest: int, shape: str, seed: int = 0) -> list[int]:
    """Lengths of completions: all ``longest``, or log-normal with a mean of 40 % of it, none above it.

    >>> lengths(3, 8, "equal")
    [8, 8, 8]
    """
    check_choice("shape", shape, SHAPES)
    if shape == "equal":
        return [longest] * count
    generator = torch.Generator().manual_seed(seed)
    centre = torch.tensor(0.4 * longest).log() - SPREAD**2 / 2
    drawn = (centre + SPREAD * torch.randn(count, generator=generator)).exp()
    return drawn.round().clamp(1, longest).int().tolist()


def measure(
    model: nn.Module,
    work: Work,
    *,
    pad_token_id: int,
    engines: tuple[str, ...] = ("native", "generate"),
    repeats: int = 2,
) -> list[Figure]:
    """Time each engine on the same work, in turn, and keep its best time.

    Raises:
        ConfigError: An unknown engine.
    """
    for name in engines:
        check_choice("engine", name, RUNS)
    if len(work.lengths) != len(work.prompts) * work.group:
        raise ConfigError(f"{len(work.lengths)} lengths for {len(work.prompts)} prompts x {work.group} completions.")
    best: dict[str, float] = {}
    gaps: dict[str, float | None] = {}
    for _ in range(repeats):
        for name in engines:
            begin = time.perf_counter()
            rollouts = RUNS[name](model, work, pad_token_id)
            spent = time.perf_counter() - begin
            best[name] = min(spent, best.get(name, spent))
            gaps[name] = gaps[name] if name in gaps else _gap(model, rollouts)
    return [Figure(name, best[name], work.tokens / best[name], gaps[name]) for name in engines]


def by_native(model: nn.Module, work: Work, pad_token_id: int, **options: Any) -> list[Rollout]:
    """Every completion asks for its own length; equal prompts are computed once."""
    owners = [prompt for prompt in work.prompts for _ in range(work.group)]
    requests = [Request(p, 1, Sampling(n, seed=i)) for i, (p, n) in enumerate(zip(owners, work.lengths, strict=True))]
    engine = NativeEngine(model, pad_token_id=pad_token_id, **options)
    return engine.generate(requests, Sampling(max(work.lengths), seed=0))


def by_continuous(model: nn.Module, work: Work, pad_token_id: int) -> list[Rollout]:
    """Transformers' continuous batching over paged memory; every completion asks for its own length; no log-probs."""
    inner: Any = model
    owners = [prompt for prompt in work.prompts for _ in range(work.group)]
    most = max(map(sum, zip(map(len, owners), work.lengths, strict=True)))
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": -1}
    pages = {"num_blocks": 2 + len(owners) * (1 + most // PAGE), page_field(): PAGE}
    pages = {} if inner.device.type == "cuda" else pages
    found: dict[str, list[int]] = {}
    with (
        evaluating(model),
        inner.continuous_batching_context_manager(
            generation_config=GenerationConfig(max_new_tokens=max(work.lengths), pad_token_id=pad_token_id, **settings),
            continuous_batching_config=ContinuousBatchingConfig(**pages),
            block=True,
        ) as manager,
    ):
        for index, (prompt, length) in enumerate(zip(owners, work.lengths, strict=True)):
            manager.add_request(prompt, request_id=str(index), max_new_tokens=length)
        while len(found) < len(owners):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RolloutError("transformers' continuous batching ended before its requests did.")
    return [Rollout(list(p), found[str(i)], [], "length") for i, p in enumerate(owners)]


class _EndAt(LogitsProcessor):
    """Lets each row end at its length and not before, as an end token would."""

    def __init__(self, wanted: list[int], start: int, end: int) -> None:
        self.wanted, self.start, self.end = torch.tensor(wanted), start, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self.wanted.to(scores.device) <= input_ids.shape[1] - self.start + 1
        scores[~last, self.end] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.end] = 0.0
        return scores


def by_generate(model: nn.Module, work: Work, pad_token_id: int) -> list[Rollout]:
    """What a trainer does without an engine: repeated prompts, left-padded, until the longest is done; no log-probs."""
    inner: Any = model
    rows = [prompt for prompt in work.prompts for _ in range(work.group)]
    width, device = max(map(len, rows)), next(model.parameters()).device
    ids = torch.tensor([[pad_token_id] * (width - len(p)) + p for p in rows], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in rows], device=device)
    with evaluating(model):
        out = inner.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(work.lengths),
            eos_token_id=pad_token_id,
            pad_token_id=pad_token_id,
            logits_processor=LogitsProcessorList([_EndAt(work.lengths, width, pad_token_id)]),
        )
    found = [line[width : width + n].tolist() for line, n in zip(out, work.lengths, strict=True)]
    return [Rollout(list(prompt), tokens, [], "length") for prompt, tokens in zip(rows, found, strict=True)]


RUNS: dict[str, Callable[[Any, Work, int], list[Rollout]]] = {
    "native": by_native,
    "native_bf16": functools.partial(by_native, products="bfloat16"),
    "generate": by_generate,
    "continuous": by_continuous,
}


def engines_here(model: nn.Module) -> tuple[str, ...]:
    """What is worth timing on this machine with this model."""
    weight = next(model.parameters())
    rounded = weight.device.type == "cpu" and weight.dtype == torch.float32 and HAS_ONEDNN and packs(torch.bfloat16)
    return ("native", "native_bf16", "generate") if rounded else ("native", "generate")


def _gap(model: nn.Module, rollouts: list[Rollout]) -> float | None:
    """Mean difference of log-probs on a few completions."""
    chosen = [r for r in rollouts if r.logp][:: max(1, len(rollouts) // 4)]
    return float(torch.cat(logp_gaps(model, chosen)).mean()) if chosen else None


def seconds_at_least(model: nn.Module, work: Work, *, slots: int) -> tuple[float, float]:
    """What the work costs by arithmetic and by memory traffic alone, in seconds on this device.

    Arithmetic: two operations a parameter and token, each prompt once, at the rate of a large matrix product. Traffic: all
    weights once a decoding step, at the rate of a large copy; ``slots`` completions are written at once.
    """
    inner: Any = causal_lm(model)
    weight = inner.get_output_embeddings().weight
    parameters = sum(p.numel() for p in inner.parameters()) - (
        0 if inner.config.tie_word_embeddings else weight.numel()
    )
    flops, rate = _rates(weight.dtype, weight.device)
    waves = [sorted(work.lengths, reverse=True)[i : i + slots] for i in range(0, len(work.lengths), slots)]
    steps = sum(wave[0] for wave in waves)
    computed = sum(map(len, work.prompts)) + work.tokens
    return 2 * parameters * computed / flops, parameters * weight.element_size() * steps / rate


def _rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Operations a second of a matrix product, and bytes a second of reading memory."""
    side = 2048 if device.type == "cpu" else 8192
    a = torch.randn(side, side, dtype=dtype, device=device)
    big = torch.ones(2**26 if device.type == "cpu" else 2**29, dtype=torch.float32, device=device)
    vector = torch.ones(big.shape[0] // 4096, dtype=torch.float32, device=device)
    table = big.view(-1, vector.shape[0])

    def quickest(function: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(4):
            begin = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return best

    return 2 * side**3 / quickest(lambda: a @ a), big.numel() * 4 / quickest(lambda: table @ vector)


NAMES = {"native": "native", "generate": "hf"}  # As measured, as a config says it.
WORTH = 0.9  # Rounding is mentioned where it saves a tenth of the time.


def main(argv: list[str] | None = None) -> int:
    """Measure, show the table, recommend."""
    options = argparse.ArgumentParser(
        description="Time rollout engines on this machine, with your model and lengths.",
    )
    options.add_argument("model", help="hub id or folder")
    options.add_argument("--prompts", type=int, default=4, help="different prompts (default 4)")
    options.add_argument("--group", type=int, default=8, help="completions of each, num_generations (default 8)")
    options.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default 128)")
    options.add_argument("--new-tokens", type=int, default=64, help="most tokens of a completion (default 64)")
    options.add_argument("--shape", choices=["equal", "skewed", "both"], default="both", help="lengths of completions")
    options.add_argument("--dtype", default="float32", help="precision of the weights (default float32)")
    options.add_argument("--repeats", type=int, default=2, help="times each is run; the best counts (default 2)")
    options.add_argument(
        "--engines", nargs="+", help="native, native_bf16, generate, continuous (default: what fits here)"
    )
    args = options.parse_args(argv)
    shapes = ["equal", "skewed"] if args.shape == "both" else [args.shape]
    model, pad, vocabulary = _load(args.model, args.dtype)
    figures = {shape: _measured(model, pad, vocabulary, shape, args) for shape in shapes}
    _show(figures)
    return 0


def _load(name: str, dtype: str) -> tuple:
    from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token

    tokenizer = load_tokenizer(name)
    model = create_model_from_path(name, dtype=dtype).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), resolve_pad_token(tokenizer), len(tokenizer)


def _measured(model, pad: int, vocabulary: int, shape: str, args: argparse.Namespace) -> tuple:

    generator = torch.Generator().manual_seed(0)
    low = min(100, vocabulary // 2)  # Special tokens stand first in most vocabularies.
    ids = torch.randint(low, vocabulary, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    work = Work(ids, args.group, lengths(args.prompts * args.group, args.new_tokens, shape))
    engines = tuple(args.engines or engines_here(model))
    figures = measure(model, work, pad_token_id=pad, engines=engines, repeats=args.repeats)
    return work, figures, seconds_at_least(model, work, slots=64 if model.device.type == "cpu" else 256)


def _show(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for shape, (work, found, (arithmetic, traffic)) in figures.items():
        title = f"{shape} lengths: {len(work.prompts)} prompts x {work.group}, {work.tokens} tokens sampled"
        table = Table(title=title, title_justify="left")
        for name in ("engine", "seconds", "tokens/s", "against generate", "log-prob gap"):
            table.add_column(name, justify="left" if name == "engine" else "right")
        slowest = next((f.seconds for f in found if f.name == "generate"), max(f.seconds for f in found))
        for figure in found:
            gap = "-" if figure.gap is None else f"{figure.gap:.1e}"
            speed = f"{slowest / figure.seconds:.2f}x"
            table.add_row(figure.name, f"{figure.seconds:.2f}", f"{figure.tokens_per_second:.0f}", speed, gap)
        console.print(table)
        console.print(
            f"at least {arithmetic:.2f} s of arithmetic and {traffic:.2f} s of reading weights on this device"
        )
        console.print(f"recommended: {recommended(found)}\n", highlight=False)


def recommended(found: list) -> str:
    """The fastest engine that samples from the weights as they are, and what rounding them would gain."""
    exact = min((f for f in found if f.name in NAMES), key=lambda f: f.seconds, default=None)
    rounded = next((f for f in found if f.name == "native_bf16"), None)
    if exact is None:
        return f"nothing: {', '.join(NAMES)} were not timed"
    line = f"rollout_engine={NAMES[exact.name]!r}"
    if rounded is None or rounded.seconds > WORTH * exact.seconds or rounded.gap is None:
        return line
    gain = exact.seconds / rounded.seconds
    return f"{line}; 'native_bf16' is {gain:.2f}x faster, with log-probs {rounded.gap:.1g} nats off, which the trainer corrects"


if __name__ == "__main__":
    raise SystemExit(main())
