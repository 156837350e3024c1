"""Two tokenizers side by side: which ids mean the same, how each writes texts, and whether one could stand for the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.errors import PosttrainError

__all__ = ["PROBE_TEXTS", "TokenizerMatch", "compare_tokenizers", "probe_conversations", "probe_texts"]

Verdict = Literal["identical", "identical-padded", "superset", "cross-tokenizer", "incompatible"]
SHOWN = 5
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
        different: Ids that stand for different tokens, those that only one has included.
        shared: Tokens that both have under one id.
        common: Tokens that both have, under whatever id.
        examples: Token, id in the first, id in the second (None: absent), of the first few differences.
        special: By name, ids of bos, eos, pad and unk that differ.
        stops: Ids at which each generates no further, where they differ; else empty.
        texts: Probe texts that are written with different ids.
        lost: Probe texts of which a round trip loses something, by ``first`` and ``second``.
        templates: Conversations that the chat templates render differently; None where one has none.
        settings: Parts of the pipeline whose settings differ: normalizer, pre_tokenizer, model, added_tokens, ...
        bytes: How each spells text: ``bytes``, ``byte-fallback``, ``pieces`` or ``unknown``.
    """

    verdict: Verdict
    sizes: tuple[int, int]
    widths: tuple[int | None, int | None]
    different: int
    shared: int
    common: int
    examples: tuple[tuple[str, int | None, int | None], ...]
    special: Mapping[str, tuple[int | None, int | None]]
    stops: tuple[tuple[int, ...], tuple[int, ...]] | tuple[()]
    texts: tuple[str, ...]
    lost: Mapping[str, tuple[str, ...]]
    templates: int | None
    settings: tuple[str, ...] = ()
    bytes: tuple[str, str] = ("unknown", "unknown")
    reasons: tuple[str, ...] = field(default=())

    @property
    def columns(self) -> int:
        """V*: logits that both models have a token for; the others are padding and are cut off before any softmax."""
        return min(*self.sizes, *(width for width in self.widths if width is not None))


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
    """Compare two tokenizers by their maps, their special tokens, and what they do to some two hundred texts.

    Args:
        first: The one whose ids are trained (the student's, the policy's).
        second: The other one (the teacher's).
        widths: Logits of both models (``config.get_text_config().vocab_size``).
        stops: Ids at which each model stops generating.
        extra: Texts of the user's own data.
    """
    maps = (first.get_vocab(), second.get_vocab())
    odd = sorted(
        {token for token in maps[0].keys() | maps[1].keys() if maps[0].get(token) != maps[1].get(token)},
        key=_order(maps),
    )
    texts = probe_texts(first, second, extra)
    written = [text for text in texts if _ids(first, text) != _ids(second, text)]
    lost = {
        name: tuple(text for text in texts if tokenizer.decode(_ids(tokenizer, text)) != text)
        for name, tokenizer in (("first", first), ("second", second))
    }
    kinds = (_spelling(first), _spelling(second))
    ends = tuple(tuple(sorted(set(ids))) for ids in stops) if stops is not None else ()
    common = maps[0].keys() & maps[1].keys()
    return TokenizerMatch(
        verdict=_verdict(maps, written, kinds, (len(first), len(second)), widths),
        sizes=(len(first), len(second)),
        widths=widths,
        different=len({i for token in odd for i in (maps[0].get(token), maps[1].get(token)) if i is not None}),
        shared=sum(maps[0][token] == maps[1][token] for token in common),
        common=len(common),
        examples=tuple((token, maps[0].get(token), maps[1].get(token)) for token in odd[:SHOWN]),
        special={
            name: (getattr(first, name), getattr(second, name))
            for name in SPECIAL
            if getattr(first, name) != getattr(second, name)
        },
        stops=ends if ends and ends[0] != ends[1] else (),  # type: ignore[arg-type]
        texts=tuple(written),
        lost=lost,
        templates=_templates(first, second),
        settings=tuple(
            name for name in _pipeline(first) | _pipeline(second) if _part(first, name) != _part(second, name)
        ),
        bytes=kinds,
    )


def _verdict(
    maps: tuple[dict[str, int], dict[str, int]],
    written: Sequence[str],
    kinds: tuple[str, str],
    sizes: tuple[int, int],
    widths: tuple[int | None, int | None],
) -> Verdict:
    small, large = sorted(maps, key=len)
    extended = all(large.get(token) == i for token, i in small.items())
    if extended and not written:
        if len(small) < len(large):
            return "superset"
        return "identical-padded" if widths[0] != widths[1] and None not in widths else "identical"
    if extended and len(small) < len(large) and _only_of_added(written, small, large):
        return "superset"
    return "cross-tokenizer" if all(kind in ("bytes", "byte-fallback") for kind in kinds) else "incompatible"


def _only_of_added(written: Sequence[str], small: Mapping[str, int], large: Mapping[str, int]) -> bool:
    """Whether every text that is written otherwise holds a token that the larger vocabulary alone has."""
    added = large.keys() - small.keys()
    return all(any(token in text for token in added) for text in written)


def _order(maps: tuple[dict[str, int], dict[str, int]]) -> Any:
    return lambda token: (maps[0].get(token, maps[1].get(token, 0)), token)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _templates(first: Any, second: Any) -> int | None:
    if not (getattr(first, "chat_template", None) and getattr(second, "chat_template", None)):
        return None
    return sum(_rendered(first, messages) != _rendered(second, messages) for messages in probe_conversations())


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] == "user"
        )
    except (
        PosttrainError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # A template may refuse a role; both then should.
        return f"refused: {type(error).__name__}"
    except Exception as error:
        return f"refused: {type(error).__name__}"


def _pipeline(tokenizer: Any) -> dict[str, Any]:
    """Settings of a fast tokenizer's parts, as it saves them; empty for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    content = json.loads(backend.to_str())
    model = dict(content.get("model") or {})
    model.pop("vocab", None)
    return {
        name: content.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
    } | {"model": model}


def _part(tokenizer: Any, name: str) -> str:
    return json.dumps(_pipeline(tokenizer).get(name), sort_keys=True)


def _spelling(tokenizer: Any) -> str:
    """Whether tokens are bytes of the text, characters with bytes as a fallback, or pieces that may lose some of it."""
    parts = _pipeline(tokenizer)
    text = json.dumps([parts.get("pre_tokenizer"), parts.get("decoder")])
    if '"ByteLevel"' in text:
        return "bytes"
    model = parts.get("model") or {}
    if model.get("byte_fallback") or '"ByteFallback"' in text:
        return "byte-fallback"
    return "pieces" if model else "unknown"
