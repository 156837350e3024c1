"""Checks of tokenizers: each id has an embedding, and ids have the same meaning in two models."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

Verdict = Literal["identical", "identical-padded", "superset", "cross-tokenizer", "incompatible"]
IDS_SHOWN = 5
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # Token for a single byte in a SentencePiece vocabulary.
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")

# Texts that many tokenizers encode differently.
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
    """Result of `compare_tokenizers`. If an attribute is a pair, it contains one value for each tokenizer.

    Attributes:
        verdict: ``identical``; ``identical-padded`` (only the number of logits differs); ``superset`` (one tokenizer has
            additional ids); ``cross-tokenizer`` (different vocabularies, but both represent all bytes); or ``incompatible``.
        sizes: Number of tokens of each tokenizer.
        widths: Number of logits of each model, or None if it is unknown.
        different: Number of ids with different bytes in the two tokenizers. Ids that only one tokenizer has are included.
        common: Number of tokens with bytes that are in both vocabularies. The ids may differ.
        examples: First differences, as (id, bytes in the first tokenizer, bytes in the second). None means that the id is
            absent.
        special: Special tokens (bos, eos, pad, unk) whose ids differ. The key is the name of the token, and the value
            contains the two ids.
        stops: Ids at which each model stops generating. Empty if they are equal.
        texts: Probe texts with different ids.
        templates: Number of conversations that the two chat templates render differently. None if a template is missing.
        bytes: How each tokenizer represents text: ``bytes``, ``byte-fallback``, ``pieces`` or ``unknown``.
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
        """Number of logits that belong to a token in both models. All other logits are padding, which is removed before a
        softmax.
        """
        return min(*self.sizes, *(width for width in self.widths if width is not None))


def _byte_table() -> dict[str, int]:
    """Return the inverse of the table with which byte-level tokenizers represent bytes as characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {chr(code): code for code in printable}, 256
    for code in sorted(set(range(256)) - set(printable)):
        table[chr(extra)], extra = code, extra + 1
    return table


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each id. The bytes of an added token are its literal text.

    ``Ġ`` of byte-level tokenizers and ``▁`` of SentencePiece represent a space. ``<0x0A>`` represents a byte.
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
    """Return at least 200 test texts. They are fixed texts, combinations of fixed texts, and the texts of all special
    tokens.
    """
    fixed = [text for text in PROBE_TEXTS if text]
    joined = [f"{a} {b}" for a, b in zip(fixed, fixed[7:] + fixed[:7], strict=True)]
    tight = [f"{a}{b}" for a, b in zip(fixed, fixed[13:] + fixed[:13], strict=True)]
    lines = [f"{a}\n{b}" for a, b in zip(fixed, fixed[23:] + fixed[:23], strict=True)]
    special = [str(token) for tokenizer in (first, second) for token in tokenizer.all_special_tokens]
    return list(dict.fromkeys([*PROBE_TEXTS, *joined, *tight, *lines, *special, *extra]))


def probe_conversations() -> list[list[dict[str, str]]]:
    """Return eight conversations of one to three turns: with and without a system prompt, and with either role last."""
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
    """Compare two tokenizers: the bytes of their ids, their special tokens, and the ids of about 200 texts.

    Args:
        first: Tokenizer of the trained model (student or policy).
        second: Tokenizer of the other model (teacher).
        widths: Number of logits of the two models (``config.get_text_config().vocab_size``).
        stops: Ids at which each model stops generating.
        extra: Additional texts from the user's data.
    """
    first_bytes, second_bytes = token_bytes(first), token_bytes(second)
    odd = sorted(i for i in first_bytes.keys() | second_bytes.keys() if first_bytes.get(i) != second_bytes.get(i))
    texts = [] if first is second else probe_texts(first, second, extra)
    written = [text for text in texts if _ids(first, text) != _ids(second, text)]
    kinds = (_spelling(first), _spelling(second))
    ends = tuple(tuple(sorted(set(ids))) for ids in stops) if stops is not None else ()
    special = {name: (getattr(first, name), getattr(second, name)) for name in SPECIAL}
    return TokenizerMatch(
        verdict=_verdict((first_bytes, second_bytes), written, kinds, widths),
        sizes=(len(first), len(second)),
        widths=widths,
        different=len(odd),
        common=len(set(first_bytes.values()) & set(second_bytes.values())),
        examples=tuple((i, first_bytes.get(i), second_bytes.get(i)) for i in odd[:IDS_SHOWN]),
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
    # Ignore a text if its ids differ only because of an additional token in the larger vocabulary.
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
    # A template may reject a role. The other template must then reject this role as well.
    except Exception as error:
        return f"refused: {type(error).__name__}"


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the serialized components of a fast tokenizer. For a slow tokenizer, return an empty dict."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())


def _spelling(tokenizer: Tokenizer) -> str:
    """Return how tokens represent text: as bytes, as characters with a byte fallback, or as word pieces. Word pieces may
    lose some text.
    """
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
    """Check whether the token ids of two models have the same meaning. A loss that compares the models by token id requires
    this.

    Args:
        student: Tokenizer of the trained model.
        teacher: Tokenizer of the other model.
        widths: Number of logits of the two models.
        stops: Ids at which each model stops generating.
        on_policy: Whether the student generates. Different stop tokens are then an error.
        names: Names of the two models in messages.
        extra: Additional probe texts from the user's data.
    """
    match = compare_tokenizers(student, teacher, widths=widths, stops=stops, extra=extra)
    return check_match(match, on_policy=on_policy, names=names)


def check_match(
    match: TokenizerMatch, *, on_policy: bool, names: tuple[str, str] = ("student", "teacher")
) -> list[Finding]:
    """Return the findings about a comparison of two tokenizers.

    Args:
        match: Result of `compare_tokenizers`.
        on_policy: Whether the first model generates.
        names: Names of the two models in messages.
    """
    if match.verdict in ("cross-tokenizer", "incompatible"):
        return [_different(match, names)]
    findings = [_superset(match, names), _special(match, names, on_policy=on_policy), _template(match, names)]
    return [item for item in findings if item is not None]


def _different(match: TokenizerMatch, names: tuple[str, str]) -> Finding:
    shown = ", ".join(f"{i} is {_spelled(a)} vs {_spelled(b)}" for i, a, b in match.examples) or "none of them"
    probes = (
        f" {len(match.texts)} of the probe texts have different ids. The first of these texts is {match.texts[0][:30]!r}."
        if match.texts
        else ""
    )
    lossy = [
        f"the {name}'s ({kind})" for name, kind in zip(names, match.bytes, strict=True) if kind in ("pieces", "unknown")
    ]
    return finding(
        "PT-K001",
        "error",
        f"{names[1]} and {names[0]} disagree on {match.different} token ids (first: {shown}). They have {match.sizes[1]} and "
        f"{match.sizes[0]} tokens, of which {match.common} are common.{probes}",
        f"the tokenizers of {names[0]} and {names[1]}",
        "a loss over token ids would compare unrelated tokens, although its value may decrease.",
        f"{ROUTE}, or models of the same family."
        if not lossy
        else f"use models of the same family. Bytes cannot be aligned: {' and '.join(lossy)} tokens may lose text.",
    )


def _superset(match: TokenizerMatch, names: tuple[str, str]) -> Finding | None:
    if match.verdict != "superset":
        return None
    return finding(
        "PT-K001",
        "warning",
        f"{names[0]} has {match.sizes[0]} tokens and {names[1]} {match.sizes[1]}. The common tokens have the same ids.",
        f"the tokenizers of {names[0]} and {names[1]}",
        "if only one of the models has a token, the probabilities of this token cannot be compared. Such tokens are excluded.",
        f"compare only the first {match.columns} logits, and make sure that data and templates do not use other tokens.",
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
        f"{names[1]} would continue after the end of a text, because it does not stop at the token that ends the text."
        if ends
        else "padding is masked by position, so the loss is not affected.",
        "give both models the same eos_token and generation_config.eos_token_id, or map one token to the other.",
    )


def _template(match: TokenizerMatch, names: tuple[str, str]) -> Finding | None:
    if not match.templates:
        return None
    return finding(
        "PT-K003",
        "warning",
        f"the chat templates of {names[0]} and {names[1]} render {match.templates} of 8 conversations differently.",
        f"the chat templates of {names[0]} and {names[1]}",
        f"{names[1]} gets text rendered with {names[0]}'s template, with which it was not trained. Its predictions may be worse.",
        f"use one template for both, preferably the template with which {names[1]} was trained.",
    )


def _spelled(token: bytes | None) -> str:
    return "absent" if token is None else repr(token.decode(errors="replace"))


def _id(value: int | None) -> str:
    return "none" if value is None else str(value)


def require_same_tokens(match: TokenizerMatch, *, mode: str, method: str, on_policy: bool = True) -> list[Finding]:
    """Raise an error if the token ids of two models have different meanings. Otherwise return all findings.

    Args:
        match: Result of `compare_tokenizers`. Padding rows of a model's embedding are not a difference.
        mode: ``error`` or ``warn``.
        method: Name of the method. Its loss compares the models.
        on_policy: Whether the first model generates. The two models then need a common stop token.

    Raises:
        ConfigError: Ids have different meanings, and ``mode`` is ``error``.
    """
    findings = check_match(match, on_policy=on_policy)
    for item in findings:
        if item.severity == "error" and mode == "error":
            raise ConfigError(f"{method}: {item.what} {item.why} Fix: {item.fix}")
    return [replace(item, severity="warning") if item.severity == "error" else item for item in findings]


# Special tokens of a saved model --------------------------------------------------------------------------------


def special_token_findings(model: nn.Module, tokenizer: Tokenizer) -> list[Finding]:
    """Check the padding and stop tokens in the configs of the saved model."""
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
    """Check that generation stops at the token that ends the training texts, and that padding has a separate token.

    Args:
        pad: Padding token id of the tokenizer.
        eos: End-of-text token id of the tokenizer.
        generation_pad: Padding token id in the model's generation config.
        generation_eos: End-of-text token ids in the generation config: one id, several ids, or None.
        turn_end: Id of the token with which the chat template ends a turn.
    """
    stops = {generation_eos} if isinstance(generation_eos, int) else set(generation_eos or ())
    findings = []
    if generation_pad is not None and generation_pad in stops:
        what = f"the generation config pads with token {generation_pad}, which also ends a text ({sorted(stops)})."
        why = (
            "programs that detect padding by token id will treat the end of a text as padding. They remove it, or do not stop at "
            "it. Training here is not affected, because masks are positional."
        )
        fix = "set the option pad_token, or pad_token of your tokenizer, to a token with no other use."
        # This finding is only an info. Many published models have this property, and training does not depend on it.
        findings.append(Finding("PT-K101", "info", what, "generation_config", why, fix))
    if pad is None:
        why = "programs that load this model cannot batch texts of different lengths."
        fix = "set tokenizer.pad_token to a token with no other use."
        findings.append(Finding("PT-K102", "warning", "the tokenizer has no pad token.", "the tokenizer", why, fix))
    ends = {name: token for name, token in (("eos", eos), ("end of turn", turn_end)) if token is not None}
    missing = {name: token for name, token in ends.items() if stops and token not in stops}
    if missing:
        named = ", ".join(f"{name} {token}" for name, token in missing.items())
        what = f"training ends texts with {named}, but the generation config stops only at {sorted(stops)}."
        why = "the model learns to end with a token at which generation does not stop, so it continues to the length limit."
        fix = f"set model.generation_config.eos_token_id = {sorted(stops | set(missing.values()))}."
        findings.append(Finding("PT-K103", "warning", what, "generation_config.eos_token_id", why, fix))
    return findings
