"""The English of docstrings, comments, messages and docs: imperative verbs, plain words, American spelling, true headers.

``tests/english.json`` holds the remaining counts by rule and folder. A count may fall and never rises: after an improvement run
``POSTTRAIN_ENGLISH=write python -m pytest tests/test_english.py``. ``POSTTRAIN_ENGLISH=show`` prints every remaining place.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("english.json")
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
Accept Accumulate Acquire Activate Adapt Add Adjust Advance Advise Agree Align Allocate Allow Announce Answer Append
Apply Approximate Ask Assemble Assert Assign Attach Average Await Balance Begin Bind Bisect Block Broadcast Build Cache
Calculate Call Cancel Cast Change Charge Check Choose Clamp Classify Clean Clear Clip Close Collate Collect Combine
Compare Compile Complete Compute Concatenate Configure Connect Construct Consume Convert Convolve Copy Correct Count
Create Decide Decode Decorate Defer Delete Describe Detach Detect Determine Disable Discard Dispatch Distribute Divide
Do Download Draw Drop Emit Enable Encode End Ensure Enter Escape Estimate Evaluate Even Exchange Exclude Execute Exit
Expand Explain Expose Extend Extract Fail Fetch Fill Filter Find Finish Fit Flatten Flush Fold Follow Force Format
Forward Free Gather Generate Get Give Group Guard Handle Hash Hide Hold Identify Ignore Implement Import Include
Increase Increment Index Infer Init Initialize Insert Inspect Install Interpolate Interpret Interrupt Invalidate Iterate
Join Judge Keep Kill Label Launch Leave Lend Let Limit Link List Listen Load Locate Lock Log Look Make Map Mark Mask
Match Measure Merge Mix Move Name Negate Normalize Note Notify Number Observe Offload Omit Open Order Override Pack Pad
Parse Pass Patch Pause Perform Permute Pick Pin Place Poll Pop Post Predict Prefill Prefix Prepare Print Process Profile
Propagate Publish Push Put Query Queue Raise Rank Read Rearrange Reassemble Rebuild Receive Recompute Reconstruct Record
Reduce Refer Refuse Register Regroup Reject Release Reload Remap Remember Remove Rename Render Repeat Replace Report
Request Require Reserve Reset Reshape Resize Resolve Restore Resume Retry Return Reuse Rewrite Roll Rotate Round Route
Run Sample Save Scale Scan Scatter Schedule Score Search See Select Send Separate Serialize Serve Set Shard Share Shift
Show Shrink Shuffle Shut Simulate Skip Sleep Slice Solve Sort Spawn Split Stack Standardize Start Steer Stop Store Stream Strip
Submit Substitute Subtract Sum Summarize Suppress Swap Switch Sync Synchronize Take Test Thin Tokenize Track Train
Transform Translate Trim Truncate Try Turn Undo Unload Unpack Unwrap Update Upload Use Validate Verify Wait Wake Walk
Warn Weight Whiten Widen Wrap Write Yield
        """,
    )
)
WORDS = {  # The words of the style guide: what to avoid, and what to write.
    r"\btold\b|\btells?\b|\bsaid\b|\bsays\b": "logged, reported, documented, set in",
    r"\bhears?\b|\bknows?\b|\bforgets?\b": "receives, has, drops (code has no knowledge)",
    r"\banew\b|\blet go\b|\bfor ever\b|\bin the place of\b|\bbeside\b": "again, released, forever, instead of, and (next to)",
    r"\bwho (?:asks|changes|wants|reads)\b|\bwhoever\b|\bsomebody\b|\bnobody\b": "the caller, no caller",
    r"\broads?\b|\bhouse\b|\brooms?\b": "transport, code path, package, space",
    r"\btrie\b": "prefix tree",
    r"\bpictures?\b": "image",
    r"\bby parts\b": "tree attention",
    r"\btaken back\b|\bundone\b|\bas (?:it was|they were)\b": "restored",
    r"\bdrawn\b|\bleft out\b|\bspread\b": "sampled, excluded, variance",
    r"\bthe most\b(?! \w+(?:ly|ful|ive|ent|ant|on|en)\b)|\bthe least\b|\bat most so\b|\bso many\b": "maximum, minimum, up to N",
    r"\bthin host\b": "rollout server",
    r"\bheld out\b|\bmistakes? of the library\b": "held-out, bug",
    r"(?:^|[.:;] )Of (?!course\b)|(?:^|[.:;] )As `": "subject first; 'Same as `x`'",
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|later\b|earlier\b|less\b)": "is not a",
    r"\bwhat is left\b|\bthose that\b|\bof both\b|\bthe others\b|\bone of its own\b": "name the thing",
    r"\ba (?:number|teacher|token|row|step|word|fact) a (?:pair|row|step|sentence|token|layer|process)\b": "one x per y",
}
BRITISH = re.compile(
    r"\b\w*(?:(?:optimi|tokeni|normali|quanti|initiali|synchroni|seriali|summari|penali|randomi|generali|organi|recogni|memori|"
    r"speciali|minimi|maximi|standardi|utili|vectori|parallelis|categori|prioriti|finali|reali|emphasi|factori)s(?:e[srd]?|ing|ation\w*)|"
    r"analys(?:e[sd]|ing)|behaviour|colour|favour|honour|neighbour|labour|flavour|labell|modell|cancelling|travell|signalled|"
    r"centre|catalogue|artefact|licence|defence|programme|whilst|learnt|mould|grey)\w*\b",
    re.I,
)
NOT_BRITISH = {
    "analyses",
    "programmed",
    "programmer",
    "programmers",
    "programmes",
    "greylist",
}  # Nouns and participles.
# Places where a word of the list is right, with the reason.
FINE = re.compile(
    r"make room|leaves? room|a house style"  # Idioms of the field for free memory or columns.
    r"|spread (?:over|across)"  # Distributes.
    r"|(?:user|reader|caller|operator)s? (?:knows?|tells?|says)"  # A person.
    r"|(?:is|are) no (?:op|bias)\b|no-op",
    re.I,
)
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`|\$[^$\n]*\$|https?://\S+|\S*/\S+|\"[^\"\n]*\"", re.S)


class Source(NamedTuple):
    """A module of the package: its text, the end of its header, functions with docstrings, and texts by line."""

    path: str
    text: str
    header: str
    functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]
    texts: list[tuple[int, str]]


@cache
def sources() -> list[Source]:
    """Every module; its texts are docstrings, comments and strings of at least four words."""
    found = []
    for path in sorted((ROOT / "posttrain").rglob("*.py")):
        text, functions, docs, strings = path.read_text(encoding="utf-8"), [], set(), []
        tree = ast.parse(text)
        for n in ast.walk(tree):
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if n.body and isinstance(n.body[0], ast.Expr) and (doc := ast.get_docstring(n)):
                    docs.add(id(n.body[0].value))
                    functions += [(n, doc)] if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
            elif isinstance(n, ast.Constant) and isinstance(n.value, str) and (id(n) in docs or n.value.count(" ") > 2):
                strings.append((n.lineno, n.value))
        comments = enumerate(re.findall(r"^.*?(?:(?:^|\s)#+ (.*))?$", text, re.M), 1)
        strings += [(line, comment) for line, comment in comments if comment]
        name = path.relative_to(ROOT).as_posix()
        found.append(Source(name, text, ast.get_docstring(tree) or "", functions, strings))
    return found


@cache
def texts() -> list[tuple[str, int, str]]:
    """``(path, line, text)`` of the package and of the pages, without code."""
    pages = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
    found = [(p.relative_to(ROOT).as_posix(), 1, p.read_text(encoding="utf-8")) for p in pages]
    found += [(source.path, line, text) for source in sources() for line, text in source.texts]
    return [(path, line, CODE.sub("x", text)) for path, line, text in found]


def verbs() -> Iterator[tuple[str, int, str]]:
    """``(path, line, excerpt)`` of docstrings of functions whose first word is not in `VERBS`; properties are exempt."""
    for source in sources():
        for n, doc in source.functions:
            is_property = any(
                "property" in (d := ast.unparse(node)) or d.endswith("setter") for node in n.decorator_list
            )
            if not is_property and re.split(r"[\s,.:;]", doc)[0] not in VERBS:
                yield source.path, n.lineno, f"{n.name}: {doc.splitlines()[0]}"


def headers() -> Iterator[tuple[str, int, str]]:
    """Names in headers of modules that are neither in the module's code nor modules themselves."""
    for source in sources():
        code = source.text.partition('"""')[2].partition('"""')[2]
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", source.header):
            where = ROOT / (name.replace(".", "/") if name.startswith("posttrain.") else name)
            is_module = where.is_dir() or where.with_suffix(".py").is_file()
            if not is_module and not re.search(rf"\b{name.split('.')[-1]}\b", code):
                yield source.path, 1, name


def matches(pattern: re.Pattern[str]) -> Iterator[tuple[str, int, str]]:
    """Places in texts that match."""
    for path, line, text in texts():
        for m in pattern.finditer(FINE.sub("x", text)):
            if m[0].lower() not in NOT_BRITISH:
                yield path, line + text.count("\n", 0, m.start()), f"{m[0]!r} in {' '.join(text.split())[:160]}"


RULES = {
    "verbs": verbs,
    "headers": headers,
    "words": partial(matches, re.compile("|".join(WORDS), re.M)),
    "spelling": partial(matches, BRITISH),
}


def folder(path: str) -> str:
    """The folder of a file, for a page ``docs`` alone."""
    return path.split("/")[0] if path.endswith(".md") else path.rpartition("/")[0]


@pytest.mark.parametrize("rule", RULES)
def test_english_only_improves(rule):
    found = list(RULES[rule]())
    counts = dict(sorted(Counter(folder(path) for path, _, _ in found).items()))
    mode = os.environ.get("POSTTRAIN_ENGLISH")
    if mode == "show":
        print(f"\n{rule}", *(f"{path}:{line}: {text}" for path, line, text in found), sep="\n")
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    if mode == "write":
        table[rule] = counts
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    allowed = table.get(rule, {})
    more = {name: (count, allowed.get(name, 0)) for name, count in counts.items() if count > allowed.get(name, 0)}
    shown = [f"{path}:{line}: {text}" for path, line, text in found if folder(path) in more]
    assert not more, f"{rule}: more than {TABLE.name} allows: {more}\n" + "\n".join(shown)
