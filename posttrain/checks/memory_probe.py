"""Whether the longest step is likely to fit, asked before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posttrain.checks.core import Context, probe
from posttrain.checks.memory import check_estimate, gib
from posttrain.checks.memory_plan import TRAITS, Lengths, assumed_lengths, plan
from posttrain.types import Finding

__all__ = ["memory_fits", "name_of"]

PLAINLY = 0.25  # Share of the memory below which a bound made in no time is enough.
MOST_TOKENS = 16_384  # Of a pass, where nothing else is said.


def name_of(context: Context) -> str | None:
    """The training command behind a trainer's class, or behind the class that it extends; None where there is none."""
    trainer = context.parts.get("trainer")
    classes = [kind.__name__ for kind in type(trainer).__mro__] if trainer is not None else []
    plain = {name.replace("-", ""): name for name in TRAITS}
    for name in (context.trainer, *classes):
        key = name.removesuffix("Trainer").lower().replace("-", "").replace("_", "")
        if key in plain:
            return plain[key]
    return None


@probe("data", "PT-M001", "PT-M002")
def memory_fits(context: Context) -> Iterable[Finding | None]:
    """An estimate against what is free; traced (seconds) only where a rough bound leaves a doubt."""
    name, config = name_of(context), context.model_config
    if name is None or config is None:
        return []
    from posttrain.models.device_memory import available_memory, in_use

    limit = getattr(context.args, "memory_limit_gib", None)
    device = context.args.device
    has = available_memory(device, None if limit is None else int(limit * 2**30))
    if _bound(config) < PLAINLY * has.free:
        return []
    from posttrain.models.memory_estimate import estimate_memory

    process = in_use("cpu") - _loaded(context.model) if device.type == "cpu" else 0
    work = plan(
        name, context.args, config, lengths=_lengths(name, context), peft_config=context.peft_config,
        device=device.type, process=max(process, 0), processes=context.processes,
    )  # fmt: skip
    found = estimate_memory(work)
    fixes = [f"posttrain estimate {name} tells what each of its settings saves (here {gib(found.peak)})"]
    if work.policy.peft_config is None:
        fixes.append("train an adapter (peft_config)")
    if work.kept_layers != 0:
        fixes.append("kept_layers=0")
    fixes.append("lower max_row_tokens, max_length or max_completion_length")
    return [check_estimate(found.components, has.free, total=has.total, where=has.where, fixes=fixes)]


def _loaded(model: Any) -> int:
    """Bytes of weights that are in memory already, which the estimate counts by themselves."""
    return 0 if model is None else sum(parameter.nbytes for parameter in model.parameters())


def _bound(config: Any) -> float:
    """More than a run takes: weights, gradients, two moments and a reference in float32, and every activation of a pass."""
    from posttrain.errors import ModelError
    from posttrain.models.flops import compute_flops_per_token

    text = config.get_text_config()
    try:
        parameters = compute_flops_per_token(text, 1) / 6
        layer = 4 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size) + 12 * text.hidden_size
        return 24 * parameters + 4 * MOST_TOKENS * text.num_hidden_layers * layer
    except (ModelError, AttributeError, TypeError):
        return float("inf")


def _lengths(name: str, context: Context) -> Lengths:
    """The longest of the sampled rows; completions that are sampled as long as they may be."""
    known = assumed_lengths(name, context.args)
    rows = [row for row in context.rows if row.prompt_ids or row.completions]
    if not rows:
        return known
    prompt = max(len(row.prompt_ids) for row in rows)
    if not TRAITS[name].answers:
        return Lengths(prompt, known.completion, "the sampled prompts")
    return Lengths(prompt, max(len(ids) for row in rows for ids in row.completions or [[]]), "the sampled rows")
