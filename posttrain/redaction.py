"""Removal of secrets from texts for logs and manifests (`hide_secrets`), and of control characters from texts for terminals
(`visible`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "<hidden>"
# Patterns of words in names of secrets. `_NAMED` matches anywhere in a name and `_TOKEN` only at its end. `_OF_TOKENIZERS`
# excludes names of special tokens.
_NAMED = re.compile(
    r"(api|access|account|private|signing|encryption|ssh)_?key|passw(or)?d|(^|_)pwd$|passphrase|secret|credential|authorization|cookie"
    r"|signature"
)
_QUERY = ("key", "sig")  # Names that are treated as secrets only in the query of a URL.
_TOKEN = re.compile(r"(^|_)(token|auth)$")
_OF_TOKENIZERS = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|vision|stop|start|end|special|placeholder|per|of|next|first|last)_token$"
)
_VALUES = re.compile(
    r"hf_[A-Za-z0-9]{16,}|(?<![\w-])sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|(?<=hooks\.slack\.com/services/)[\w/]+|(?<![A-Z0-9])A[KS]IA[A-Z0-9]{16}|(?<![\w-])AIza[\w-]{30,}"
    r"|(?<![A-Za-z0-9])(?:[rs]k_(?:live|test)|npm|gsk|r8|lsv2|wandb_v\d|tgp_v\d|dop_v\d)_\w{20,}|(?<![\w-])xai-[A-Za-z0-9]{20,}"
    r"|(?<![\w-])(?:pypi-AgE|nvapi-|ya29\.)[\w-]{20,}|(?<![\w.])SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+|(?<=[Bb]earer )[\w.~+/=-]{6,}"
    r"|(?<=PRIVATE KEY-----)[^-]+"
)
_USER = re.compile(r"(?<=://)[^/\s?#@\"']+@")
# Patterns for pairs of name and value, in this order: `?name=value`, `--name value`, `name=value`, `"name": "value"`, and the
# header `Name: value`. A name is matched only from its first character, so the time is linear in the length of the text.
_PAIRS = (
    re.compile(r"(?P<before>[?&;](?P<name>[\w.%-]+)=)(?P<value>[^&#\s\"'<>]+)"),
    re.compile(r"(?P<before>(?<![\w.-])--?(?P<name>[A-Za-z][\w.-]*)(?:=|\s+))(?P<value>\"[^\"]*\"|'[^']*'|(?!--)\S+)"),
    re.compile(r"(?P<before>(?<![\w-])(?P<name>[A-Za-z][\w-]*)=)(?P<value>[^\s\"'<>,;)&]+)"),
    re.compile(
        r"(?P<before>(?P<q>[\"']?)(?<![\w-])(?P<name>[A-Za-z][\w-]*)(?P=q)\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*')"
    ),
    re.compile(
        r"(?P<before>(?<![\w-])(?P<name>[A-Za-z]+[_-][\w-]*\w|[Pp]assword|PASSWORD|[Aa]uthorization|[Cc]ookie):[ \t]+)"
        r"(?P<value>(?:(?:Basic|Bearer|Token) )?[^\s\"'<>,;()]{6,})"
    ),
)


def is_secret_name(name: str) -> bool:
    """Return whether the value of a setting with this name must be hidden.

    >>> [is_secret_name(name) for name in ("hf_token", "sessionToken", "eos_token", "max_tokens", "apikey")]
    [True, True, False, False, True]
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").strip("_")
    return bool(_NAMED.search(name) or (_TOKEN.search(name) and not _OF_TOKENIZERS.search(name)))


def hide_secrets(value: object) -> Any:
    """Return a copy of a value without secrets.

    Keys of mappings are removed if they are names of secrets. In text, secrets after a flag or a name, in URLs and in JSON
    are replaced. Values that look like keys of known services are replaced too. A list may be a command line.

    >>> hide_secrets({"hub_token": "x", "eos_token": "</s>", "kwargs": {"token": "y", "revision": "main"}})
    {'eos_token': '</s>', 'kwargs': {'revision': 'main'}}
    >>> hide_secrets(["--hf_token", "x", "https://me:pass@host/?token=y"])
    ['--hf_token', '<hidden>', 'https://<hidden>@host/?token=<hidden>']
    """
    if isinstance(value, Mapping):
        return {
            hide_secrets(name): hide_secrets(entry) for name, entry in value.items() if not is_secret_name(str(name))
        }
    if isinstance(value, list | tuple | set | frozenset):
        return _hidden_list(value)
    return _hidden_text(value) if isinstance(value, str) else value


def _hidden_list(values: Iterable[Any]) -> list[Any]:
    shown, secret = [], False
    for value in values:
        flag = isinstance(value, str) and value.startswith("-")
        hidden = secret and isinstance(value, str) and not value.startswith("--")
        shown.append(HIDDEN if hidden else hide_secrets(value))
        secret = flag and "=" not in value and is_secret_name(value.lstrip("-"))
    return shown


def _hidden_text(text: str) -> str:
    if text[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            hidden = hide_secrets(content)
            return text if hidden == content else json.dumps(hidden)
    text = _VALUES.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text))
    for pair in _PAIRS:
        text = pair.sub(_hidden_pair, text)
    return text


def _hidden_pair(found: re.Match[str]) -> str:
    value = found["value"]
    secret = is_secret_name(found["name"]) or (found["before"][0] in "?&;" and found["name"].lower() in _QUERY)
    if not secret or value.strip("\"'") in ("", HIDDEN, "None", "True", "False"):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{found['before']}{quote}{HIDDEN}{quote}"


# Character that joins several characters to one emoji. Replacing it with its code would split the emoji.
JOINER = "\u200d"


def visible(text: str) -> str:
    r"""Replace invisible characters and terminal control characters of a text with their escape codes.

    >>> visible("a\x1b[31m\u200bb")
    'a\\x1b[31m\\u200bb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" or c == JOINER else _code(c) for c in text)


def _code(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
