"""Token ids as pieces of text that can be shown: whole characters, named special tokens, nothing invisible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Piece", "elide", "pieces_of", "visible"]

JOINER = "\u200d"  # Holds the parts of an emoji together; shown as a code it would take them apart.


@dataclass(frozen=True)
class Piece:
    """Text that belongs to one token, or to the few that spell one character.

    Attributes:
        text: Decoded text.
        ids: Its tokens.
        trained: Whether the loss sees it.
        role: What a special token is (``"eos, pad"``, or ``"special"``); "" for words.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    role: str = ""


def pieces_of(ids: list[int], trained: list[bool], tokenizer: Any, roles: dict[int, str]) -> Iterator[Piece]:
    """Text token by token.

    A token's text depends on the one before it (a leading space) and may be part of a character: what a token adds is the
    difference of two decodings, and tokens are held back until their characters are whole.
    """
    size = len(tokenizer)
    whole = [token in roles or not 0 <= token < size for token in ids]  # Tokens that stand for themselves.
    before: list[int] = []
    held: list[int] = []
    for position, (token, flag) in enumerate(zip(ids, trained, strict=True)):
        if whole[position]:
            yield _named(token, flag, tokenizer, roles)
            before = [token] if 0 <= token < size else []
            continue
        held.append(token)
        text = tokenizer.decode(before + held, skip_special_tokens=False)
        after = position + 1
        last = after == len(ids) or whole[after] or bool(trained[after]) != bool(flag)
        if last or not text.endswith("\ufffd"):
            start = len(tokenizer.decode(before, skip_special_tokens=False))
            yield Piece(text[start:], tuple(held), bool(flag))
            before, held = held, []


def _named(token: int, trained: bool, tokenizer: Any, roles: dict[int, str]) -> Piece:
    if token in roles:
        return Piece(str(tokenizer.convert_ids_to_tokens(token)), (token,), bool(trained), roles[token])
    return Piece(f"[id {token}]", (token,), bool(trained), "not in the vocabulary")


def elide(pieces: list[Piece], most: int) -> tuple[list[Piece], int, list[Piece]]:
    """Head, how many tokens are left out, tail; nothing is left out of up to ``most`` pieces.

    The tail is the longer part of two: the end of a row is where things go wrong.

    >>> elide([Piece(c, (0,), False) for c in "abcdef"], 3)[1]
    3
    """
    if len(pieces) <= most:
        return pieces, 0, []
    head = most // 3
    tail = most - head
    hidden = pieces[head:-tail]
    return pieces[:head], sum(len(piece.ids) for piece in hidden), pieces[-tail:]


def visible(text: str) -> str:
    r"""Text with every character that would not show, or would act on a terminal, written as its code.

    >>> visible("a\x1b[31m\u200bb")
    'a\\x1b[31m\\u200bb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" or c == JOINER else _code(c) for c in text)


def _code(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
