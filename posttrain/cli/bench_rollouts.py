"""`posttrain bench-rollouts MODEL`: which engine samples fastest here, for your model and your lengths."""

from __future__ import annotations

import argparse

__all__ = ["recommended", "run"]

NAMES = {"native": "native", "generate": "hf"}  # As measured, as a config says it.
WORTH = 0.9  # Rounding is mentioned where it saves a tenth of the time.


def run(argv: list[str]) -> int:
    """Measure, show the table, recommend."""
    options = argparse.ArgumentParser(
        prog="posttrain bench-rollouts",
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
    import torch

    from posttrain.models.load import create_model_from_path, load_tokenizer, resolve_pad_token

    tokenizer = load_tokenizer(name)
    model = create_model_from_path(name, dtype=dtype).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), resolve_pad_token(tokenizer), len(tokenizer)


def _measured(model, pad: int, vocabulary: int, shape: str, args: argparse.Namespace) -> tuple:
    import torch

    from posttrain.rollouts.measure import Work, engines_here, lengths, measure, seconds_at_least

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
