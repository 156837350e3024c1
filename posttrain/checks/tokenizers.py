"""What a run assumes of its tokenizers: ids that the model has rows for, and, of two of them, ids that mean the same."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from posttrain.checks.registry import finding
from posttrain.data.chat import turn_end
from posttrain.errors import ConfigError
from posttrain.models.architecture import generation_config_of
from posttrain.models.forward import causal_lm
from posttrain.types import Finding

if TYPE_CHECKING:
    from torch import nn

    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


Verdict = Literal["identical", "identical-padded", "superset", "cross-tokenizer", "incompatible"]
IDS_SHOWN = 5
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # A byte of a SentencePiece vocabulary.
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")

# Writing that tokenizers are known to treat differently; version 1.
PROBE_TEXTS = (
    "", "The quick brown fox jumps over the lazy dog.", " leading", "trailing ", "two  spaces", "   ", "a\tb", "line\r\nend",
    "three\n\n\nnewlines", "7", "1234567", "3.14159", "-0.5e-10", "1,000,000", "2/3 = 66.7 %", "$42.00", "2024-02-29T23:59:60Z",
    "def camelCase(snake_case):\n    return {'a': [1, 2]}\n", "\tif (x != y) { return; } // why?\n",
    "for i in range(10):\n\tpass", "https://example.org/a_b?q=1&r=%20#top", "user@example.org", "ALL CAPS SHOUTED",
    "don't can't I'll we've", "naïve café", "nai\u0308ve cafe\u0301", "Straße ÆØÅ ß", "Привет, мир", "مَرْحَبًا", "שלום עולם",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界", "こんにちは世界", "안녕하세요 세계",
    "😀", "👩\u200d👩\u200d👧\u200d👦", "🇺🇳", "a😀b", "non\u00a0breaking", "zero\u200bwidth", "\ufeffmark", "\ufffd",
    "x" * 300, "∀x ∈ ℝ: x² ≥ 0", r"\frac{a}{b} \boxed{42}", "<b>bold</b> &amp;", "{\"key\": null}", "a-b_c.d/e\\f", "...?!;:",
    "“quotes” ‘single’ «angles»", "1st 2nd 3rd", "e.g. i.e. etc.",
)  # fmt: skip

CONVERSATIONS: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("user", "assistant"),
    ("system", "user"),
    ("system", "user", "assistant"),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant"),
)


@dataclass(frozen=True)
class TokenizerMatch:
    """What `compare_tokenizers` found; ``first`` and ``second`` are the two tokenizers in their order.

    Attributes:
        verdict: ``identical``, ``identical-padded`` (only the models' widths differ), ``superset`` (one has ids more),
            ``cross-tokenizer`` (another vocabulary, over the same bytes) or ``incompatible``.
        sizes: Tokens of each.
        widths: Logits of each model; None where unknown.
        different: Ids that stand for different bytes, those that only one has included.
        common: Tokens of the same bytes in both, under whatever id.
        examples: Id, bytes in the first, bytes in the second (None: absent), of the first few differences.
        special: By name, ids of bos, eos, pad and unk that differ.
        stops: Ids at which each generates no further, where they differ; else empty.
        texts: Probe texts that are written with different ids.
        templates: Conversations that the chat templates render differently; None where one has none.
        bytes: How each spells text: ``bytes``, ``byte-fallback``, ``pieces`` or ``unknown``.
    """

    verdict: Verdict
    sizes: tuple[int, int]
    widths: tuple[int | None, int | None]
    different: int
    common: int
    examples: tuple[tuple[int, bytes | None, bytes | None], ...]
    special: Mapping[str, tuple[int | None, int | None]]
    stops: tuple[tuple[int, ...], tuple[int, ...]] | tuple[()]
    texts: tuple[str, ...]
    templates: int | None
    bytes: tuple[str, str] = ("unknown", "unknown")

    @property
    def columns(self) -> int:
        """V*: logits that both models have a token for; the others are padding and are cut off before any softmax."""
        return min(*self.sizes, *(width for width in self.widths if width is not None))


def _byte_table() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, turned around."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {chr(code): code for code in kept}, 256
    for code in sorted(set(range(256)) - set(kept)):
        table[chr(extra)], extra = code, extra + 1
    return table


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each id spells, as bytes; of added tokens their literal text.

    ``Ġ`` of byte-level tokenizers and ``▁`` of SentencePiece ones are both a space, and ``<0x0A>`` is a byte.
    """
    spelling, table = _spelling(tokenizer), _byte_table()
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    spelled = {}
    for token, i in tokenizer.get_vocab().items():
        if i in added:
            spelled[i] = added[i].encode()
        elif spelling == "bytes" and all(character in table for character in token):
            spelled[i] = bytes(table[character] for character in token)
        elif BYTE.fullmatch(token):
            spelled[i] = bytes([int(token[3:5], 16)])
        else:
            spelled[i] = token.replace("▁", " ").encode()
    return spelled


def probe_texts(first: Any, second: Any, extra: Iterable[str] = ()) -> list[str]:
    """At least 200 texts: the fixed ones, joined to each other, and the literal text of each side's special tokens."""
    fixed = [text for text in PROBE_TEXTS if text]
    joined = [f"{a} {b}" for a, b in zip(fixed, fixed[7:] + fixed[:7], strict=True)]
    tight = [f"{a}{b}" for a, b in zip(fixed, fixed[13:] + fixed[:13], strict=True)]
    lines = [f"{a}\n{b}" for a, b in zip(fixed, fixed[23:] + fixed[:23], strict=True)]
    special = [str(token) for tokenizer in (first, second) for token in tokenizer.all_special_tokens]
    return list(dict.fromkeys([*PROBE_TEXTS, *joined, *tight, *lines, *special, *extra]))


def probe_conversations() -> list[list[dict[str, str]]]:
    """Eight conversations: with and without a system prompt, ending with either side, of one to three turns."""
    return [
        [{"role": role, "content": f"{role} says {number}: What is 6 × 7?"} for number, role in enumerate(roles)]
        for roles in CONVERSATIONS
    ]


def compare_tokenizers(
    first: Any,
    second: Any,
    *,
    widths: tuple[int | None, int | None] = (None, None),
    stops: tuple[Iterable[int], Iterable[int]] | None = None,
    extra: Sequence[str] = (),
) -> TokenizerMatch:
    """Compare two tokenizers by the bytes of their ids, their special tokens, and what they do to some two hundred texts.

    Args:
        first: The one whose ids are trained (the student's, the policy's).
        second: The other one (the teacher's).
        widths: Logits of both models (``config.get_text_config().vocab_size``).
        stops: Ids at which each model stops generating.
        extra: Texts of the user's own data.
    """
    one, two = token_bytes(first), token_bytes(second)
    odd = sorted(i for i in one.keys() | two.keys() if one.get(i) != two.get(i))
    texts = [] if first is second else probe_texts(first, second, extra)
    written = [text for text in texts if _ids(first, text) != _ids(second, text)]
    kinds = (_spelling(first), _spelling(second))
    ends = tuple(tuple(sorted(set(ids))) for ids in stops) if stops is not None else ()
    special = {name: (getattr(first, name), getattr(second, name)) for name in SPECIAL}
    return TokenizerMatch(
        verdict=_verdict((one, two), written, kinds, widths),
        sizes=(len(first), len(second)),
        widths=widths,
        different=len(odd),
        common=len(set(one.values()) & set(two.values())),
        examples=tuple((i, one.get(i), two.get(i)) for i in odd[:IDS_SHOWN]),
        special={name: pair for name, pair in special.items() if pair[0] != pair[1]},
        stops=ends if ends and ends[0] != ends[1] else (),  # type: ignore[arg-type]
        texts=tuple(written),
        templates=_templates(first, second),
        bytes=kinds,
    )


def _verdict(
    maps: tuple[dict[int, bytes], dict[int, bytes]],
    written: Sequence[str],
    kinds: tuple[str, str],
    widths: tuple[int | None, int | None],
) -> Verdict:
    small, large = sorted(maps, key=len)
    added = [large[i].decode(errors="replace") for i in large.keys() - small.keys()]
    # Texts that only a token of the larger vocabulary makes different do not tell them apart.
    same_texts = all(any(token in text for token in added) for text in written)
    if all(large.get(i) == spelled for i, spelled in small.items()) and same_texts:
        if added:
            return "superset"
        return "identical-padded" if widths[0] != widths[1] and None not in widths else "identical"
    return "cross-tokenizer" if all(kind in ("bytes", "byte-fallback") for kind in kinds) else "incompatible"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _templates(first: Any, second: Any) -> int | None:
    if not (first.chat_template and second.chat_template):
        return None
    return sum(_rendered(first, messages) != _rendered(second, messages) for messages in probe_conversations())


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    prompt = messages[-1]["role"] == "user"
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # A template may refuse a role; both then should.
        return f"refused: {type(error).__name__}"


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """A fast tokenizer's parts, as it saves them; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _spelling(tokenizer: Tokenizer) -> str:
    """Whether tokens are bytes of the text, characters with bytes as a fallback, or pieces that may lose some of it."""
    parts = _pipeline(tokenizer)
    text = json.dumps([parts.get("pre_tokenizer"), parts.get("decoder")])
    if '"ByteLevel"' in text:
        return "bytes"
    model = parts.get("model") or {}
    if model.get("byte_fallback") or '"ByteFallback"' in text:
        return "byte-fallback"
    return "pieces" if model else "unknown"


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
    findings = [_superset(match, names), _special(match, names, on_policy=on_policy), _template(match, names)]
    return [item for item in findings if item is not None]


def _different(match: TokenizerMatch, names: tuple[str, str]) -> Finding:
    shown = ", ".join(f"{i} is {_spelled(a)} vs {_spelled(b)}" for i, a, b in match.examples) or "none of them"
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


def _spelled(token: bytes | None) -> str:
    return "absent" if token is None else repr(token.decode(errors="replace"))


def _id(value: int | None) -> str:
    return "none" if value is None else str(value)


def require_same_tokens(match: TokenizerMatch, *, mode: str, method: str, on_policy: bool = True) -> None:
    """Let two models be compared id by id, or refuse.

    Args:
        match: See `compare_tokenizers`; padded rows of a model are no difference.
        mode: ``error`` or ``warn``.
        method: Whose loss it is.
        on_policy: Whether the first model generates, so that both must stop at a common token.

    Raises:
        ConfigError: Ids mean different tokens, and ``mode`` is ``error``.
    """
    findings = check_match(match, on_policy=on_policy)
    for item in findings:
        if item.severity == "error" and mode == "error":
            raise ConfigError(f"{method}: {item.what} {item.why} Fix: {item.fix}")
        logger.warning("%s: %s %s", item.code, item.what, item.why)


# Special tokens of a model that is saved --------------------------------------------------------------------------------


def special_token_findings(model: nn.Module, tokenizer: Tokenizer) -> list[Finding]:
    """What the configs that are saved say of padding and stopping."""
    generation = generation_config_of(causal_lm(model))
    if generation is None:
        return []
    end = turn_end(tokenizer)
    return check_special_tokens(
        pad=tokenizer.pad_token_id,
        eos=tokenizer.eos_token_id,
        generation_pad=generation.pad_token_id,
        generation_eos=generation.eos_token_id,
        turn_end=tokenizer.convert_tokens_to_ids(end) if end else None,
    )


def check_special_tokens(
    *,
    pad: int | None,
    eos: int | None,
    generation_pad: int | None = None,
    generation_eos: int | Collection[int] | None = None,
    turn_end: int | None = None,
) -> list[Finding]:
    """Pad, eos and what the generation config says of them: a model must stop where training ended, and only there.

    Args:
        pad: Of the tokenizer.
        eos: Of the tokenizer.
        generation_pad: Of the model's generation config.
        generation_eos: Likewise: one id, several, or None.
        turn_end: The token that the chat template ends a turn with.
    """
    stops = {generation_eos} if isinstance(generation_eos, int) else set(generation_eos or ())
    findings = []
    if generation_pad is not None and generation_pad in stops:
        what = f"the generation config pads with token {generation_pad}, which is also one that ends a text ({sorted(stops)})."
        why = (
            "programs that tell padding by its id take the end of a text for padding: they cut it off, or never see it and "
            "generate on. Training here is not affected: masks are positional."
        )
        fix = "set tokenizer.pad_token to a token that nothing else uses before the model is saved."
        # Models are published so: nothing that this run changed.
        findings.append(Finding("PT-K101", "info", what, "generation_config", why, fix))
    if pad is None:
        why = "batches of different lengths cannot be made by programs that load this model."
        fix = "set tokenizer.pad_token to a token that nothing else uses."
        findings.append(Finding("PT-K102", "warning", "the tokenizer has no pad token.", "the tokenizer", why, fix))
    ends = {name: token for name, token in (("eos", eos), ("end of turn", turn_end)) if token is not None}
    missing = {name: token for name, token in ends.items() if stops and token not in stops}
    if missing:
        named = ", ".join(f"{name} {token}" for name, token in missing.items())
        what = f"training ends texts with {named}, and the generation config stops at {sorted(stops)} only."
        why = (
            "the model learns to end with a token at which generation does not stop, so it runs on to the length limit."
        )
        fix = f"set model.generation_config.eos_token_id = {sorted(stops | set(missing.values()))}."
        findings.append(Finding("PT-K103", "warning", what, "generation_config.eos_token_id", why, fix))
    return findings
