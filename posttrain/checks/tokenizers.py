"""What a run assumes of its tokenizers: ids that the model has rows for, and, of two of them, ids that mean the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from posttrain.checks.core import Context, finding, probe, register
from posttrain.data.vocabularies import TokenizerMatch, compare_tokenizers
from posttrain.types import Finding

__all__ = ["check_match", "check_token_rows", "check_tokenizers", "embedding_rows"]

register(
    "PT-K001", "tokenizers-differ", moment="config", title="token ids of two models mean different things", page="i"
)
register(
    "PT-K002",
    "tokenizers-special",
    moment="config",
    title="two models end or pad texts with different tokens",
    page="i",
)
register("PT-K003", "tokenizers-template", moment="config", title="two chat templates render differently", page="i")
register(
    "PT-K004", "tokens-without-embedding", moment="first_batch", title="ids that a model has no embedding for", page="i"
)
register(
    "PT-K005",
    "tokenizer-larger-than-model",
    moment="first_batch",
    title="a tokenizer with more tokens than embeddings",
    page="i",
)

ROUTE = "use a trainer that compares texts instead of ids (GOLD with use_uld_loss=True, or sequence-level distillation)"


def check_tokenizers(
    student: Any,
    teacher: Any,
    *,
    widths: tuple[int | None, int | None] = (None, None),
    stops: tuple[Iterable[int], Iterable[int]] | None = None,
    on_policy: bool = True,
    names: tuple[str, str] = ("student", "teacher"),
    extra: Sequence[str] = (),
) -> list[Finding]:
    """Whether losses over token ids may compare two models.

    Args:
        student: Tokenizer whose ids are trained.
        teacher: Tokenizer of the model that it is compared with.
        widths: Logits of both models.
        stops: Ids at which each model stops generating.
        on_policy: Whether the student generates, so that different stops are an error.
        names: What to call them.
        extra: Texts of the user's data, tried too.
    """
    match = compare_tokenizers(student, teacher, widths=widths, stops=stops, extra=extra)
    return check_match(match, on_policy=on_policy, names=names)


def check_match(
    match: TokenizerMatch, *, on_policy: bool, names: tuple[str, str] = ("student", "teacher")
) -> list[Finding]:
    """Findings about a comparison that was made.

    Args:
        match: See `compare_tokenizers`.
        on_policy: Whether the first model generates.
        names: What to call the two.
    """
    if match.verdict in ("cross-tokenizer", "incompatible"):
        return [_different(match, names)]
    found = [_superset(match, names), _special(match, names, on_policy=on_policy), _template(match, names)]
    return [item for item in found if item is not None]


def _different(match: TokenizerMatch, names: tuple[str, str]) -> Finding:
    shown = ", ".join(f"{token!r} {_id(a)} vs {_id(b)}" for token, a, b in match.examples) or "none of them"
    probes = (
        f" {len(match.texts)} of the probe texts are written with other ids, {match.texts[0][:30]!r} first."
        if match.texts
        else ""
    )
    lossy = [
        f"the {name}'s ({kind})" for name, kind in zip(names, match.bytes, strict=True) if kind in ("pieces", "unknown")
    ]
    return finding(
        "PT-K001",
        "error",
        f"{names[1]} and {names[0]} disagree on {match.different} token ids (first: {shown}); of {match.sizes[0]} and "
        f"{match.sizes[1]} tokens, {match.common} are common.{probes}",
        f"the tokenizers of {names[0]} and {names[1]}",
        "a loss over token ids would compare unrelated tokens, and go down all the same.",
        f"{ROUTE}, or models of one family."
        if not lossy
        else f"take models of one family: texts cannot be aligned by bytes, as {' and '.join(lossy)} tokens do not spell them.",
    )


def _superset(match: TokenizerMatch, names: tuple[str, str]) -> Finding | None:
    if match.verdict != "superset":
        return None
    return finding(
        "PT-K001",
        "warning",
        f"{names[0]} has {match.sizes[0]} tokens and {names[1]} {match.sizes[1]}; the common ones have the same ids.",
        f"the tokenizers of {names[0]} and {names[1]}",
        "what one model says of tokens that the other does not have cannot be compared; it is left out.",
        f"compare the first {match.columns} logits alone, and make sure that data and templates use no other tokens.",
    )


def _special(match: TokenizerMatch, names: tuple[str, str], *, on_policy: bool) -> Finding | None:
    ids = ", ".join(f"{name.removesuffix('_token_id')} {_id(a)} vs {_id(b)}" for name, (a, b) in match.special.items())
    ends = "eos_token_id" in match.special or bool(match.stops)
    if not ids and not match.stops:
        return None
    stops = f"{names[0]} stops at {list(match.stops[0])}, {names[1]} at {list(match.stops[1])}" if match.stops else ""
    return finding(
        "PT-K002",
        "error"
        if match.stops and on_policy and not set(match.stops[0]) & set(match.stops[1])
        else "warning"
        if ends
        else "info",
        f"special tokens of {names[0]} and {names[1]} differ: {'; '.join(part for part in (ids, stops) if part)}.",
        f"the tokenizers of {names[0]} and {names[1]}",
        f"{names[1]} would be asked what follows the end of a text that it takes for the middle of one."
        if ends
        else "padding is masked by its place, so that the loss is not touched.",
        "give both the same eos_token and generation_config.eos_token_id, or map one to the other.",
    )


def _template(match: TokenizerMatch, names: tuple[str, str]) -> Finding | None:
    if not match.templates:
        return None
    return finding(
        "PT-K003",
        "warning",
        f"the chat templates of {names[0]} and {names[1]} render {match.templates} of 8 conversations differently.",
        f"the chat templates of {names[0]} and {names[1]}",
        f"{names[1]} is shown the {names[0]}'s template, which it was not trained with: what it says there may be worse.",
        f"use one template for both, the one that {names[1]} was trained with, before training begins.",
    )


def _id(value: int | None) -> str:
    return "none" if value is None else str(value)


def embedding_rows(model: Any) -> int | None:
    """Rows of a model's input embedding; None where it has none, or only a shard of it."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        weight = getattr(getter() if getter is not None else None, "weight", None)
    except (NotImplementedError, AttributeError):
        return None
    shape = tuple(getattr(weight, "shape", ()))
    return int(shape[0]) if len(shape) == 2 and shape[0] else None


def check_token_rows(rows: int | None, *, tokens: int, highest: int | None, name: str = "the model") -> Finding | None:
    """Ids against the rows of an embedding: one beyond the last ends a run on a CPU, and asserts on a GPU.

    Args:
        rows: Of the embedding; None is not looked at.
        tokens: Of the tokenizer.
        highest: Largest id of the rows that were looked at; None: none were.
        name: Whose embedding it is.
    """
    if rows is None:
        return None
    fix = f"model.resize_token_embeddings({tokens}) before training, or the tokenizer that belongs to {name}."
    if highest is not None and highest >= rows:
        return finding(
            "PT-K004",
            "error",
            f"the rows hold the token id {highest}, and the embedding of {name} has {rows} rows.",
            name,
            "there is no embedding for it: the forward pass would fail, on a GPU with an assertion that names nothing.",
            fix,
        )
    if tokens > rows:
        return finding(
            "PT-K005",
            "warning",
            f"the tokenizer has {tokens} tokens, and the embedding of {name} {rows} rows.",
            name,
            f"ids from {rows} on have no embedding; the first text that holds such a token would end the run.",
            fix,
        )
    return None


def _models(context: Context) -> list[tuple[str, Any]]:
    """Every model of a run that reads the policy's token ids."""
    trainer = context.parts.get("trainer")
    reference = getattr(getattr(trainer, "reference", None), "copy", None)
    found = [("the model", context.model), ("the reference", reference)]
    return [(name, model) for name, model in found if model is not None]


def _highest(context: Context) -> int | None:
    ids = [max(ids) for row in context.rows for ids in (row.prompt_ids, *row.completions) if len(ids)]
    ids += [int(batch.input_ids.max()) for batch in context.parts.get("batches") or () if batch.input_ids.numel()]
    return max(ids, default=None)


def _token_rows(context: Context) -> list[Finding | None]:
    tokenizer = getattr(context.tokenizer, "tokenizer", context.tokenizer)
    if tokenizer is None or not hasattr(tokenizer, "get_vocab"):
        return []
    tokens, highest = len(tokenizer), _highest(context)
    return [
        check_token_rows(embedding_rows(model), tokens=tokens, highest=highest, name=name)
        for name, model in _models(context)
    ]


@probe("data", "PT-K004", "PT-K005")
def token_rows_of_data(context: Context) -> Iterable[Finding | None]:
    """Ids of a sample of the training set, against every embedding that will look them up."""
    return _token_rows(context)


@probe("first_batch", "PT-K004")
def token_rows_of_batch(context: Context) -> Iterable[Finding | None]:
    """The same for the first optimiser step, whose rows the sample may have missed."""
    return [found for found in _token_rows(context) if found is not None and found.code == "PT-K004"]


@probe("data", "PT-K004", "PT-K005")
def reward_models(context: Context) -> Iterable[Finding | None]:
    """A reward model reads ids of its own tokenizer: the two must belong together."""
    functions = getattr(context.parts.get("rewards"), "functions", None) or ()
    for function in functions:
        model, tokenizer = getattr(function, "model", None), getattr(function, "tokenizer", None)
        if model is not None and tokenizer is not None and hasattr(tokenizer, "get_vocab"):
            name = f"the reward model {getattr(function, '__name__', type(function).__name__)}"
            yield check_token_rows(embedding_rows(model), tokens=len(tokenizer), highest=None, name=name)
