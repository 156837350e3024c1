#!/usr/bin/env python3
"""Measure the package as a whole: its size, and what ties its parts together. From the project's root:

    python tools/house.py                          # figures beside goals; exits 1 while one is missed
    python tools/house.py --static                 # without importing the package
    python tools/house.py --json                   # the last line as JSON
    python tools/house.py --where any_parameters   # where a counted thing stands

Lines of code are lines without blank lines, comments and docstrings: explaining costs nothing. `flow.py` measures the road of a step.
"""

import argparse
import ast
import functools
import io
import json
import os
import pathlib
import sys
import tokenize
from collections import defaultdict

GOALS = {  # figure: (most, what it is)
    "deepest": (4, "own classes in the MRO of any public trainer"),
    "switches": (20, "class attributes that steer the trainers' base classes"),
    "hidden_signatures": (0, "public trainers whose written __init__ takes **kwargs"),
    "takes_trainer": (10, "functions outside trainers and callbacks that take a trainer"),
    "any_parameters": (400, "parameters annotated with a bare Any"),
    "getattrs": (300, "getattr() and hasattr() calls"),
    "in_circles": (0, "modules in a circle of imports, lazy ones counted"),
    "class_swaps": (0, "assignments to __class__"),
    "rooms_without_tests": (0, "folders of the package without a folder of tests"),
    "type_ignores": (40, "'type: ignore' comments"),
    "methods_post": (45, "methods that the package's classes define for SFTTrainer, transformers' overrides counted"),
    "methods_online": (60, "the same for GRPOTrainer"),
    "core": (30_000, "lines of code outside extensions/"),
    "code": (43_500, "lines of code in the package"),
}
AT_LEAST = {"docstring_share": (0.15, "share of docstring lines: size is not saved on explanations")}
BASES = ("PostTrainer", "OnlineTrainer", "PreferenceTrainer", "DistillationTrainer")
WHERE = defaultdict(list)


@functools.cache
def read(path):
    """The text of a file, the nodes of its tree, and the numbers of lines that hold code and docstrings."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    nodes = tuple(ast.walk(ast.parse(text)))
    return text, nodes, *code_lines(text, nodes)


def code_lines(text, nodes):
    """Numbers of the lines that hold code, for a file; and of those of docstrings."""
    docs = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docs |= set(range(first.lineno, first.end_lineno + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - docs, docs


def only_for_types(nodes):
    """Nodes under ``if TYPE_CHECKING``."""
    hidden = set()
    for node in nodes:
        if (
            isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
            and "not" not in ast.unparse(node.test)
        ):
            hidden |= {id(inner) for child in node.body for inner in ast.walk(child)}
    return hidden


def circles(arrows):
    """Strongly connected sets of more than one module (Tarjan, without recursion limits in mind)."""
    sys.setrecursionlimit(10_000)
    index, low, stack, on, out, count = {}, {}, [], set(), [], [0]

    def visit(v):
        index[v] = low[v] = count[0]
        count[0] += 1
        stack.append(v)
        on.add(v)
        for w in arrows.get(v, ()):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = []
            while True:
                w = stack.pop()
                on.discard(w)
                part.append(w)
                if w == v:
                    break
            if len(part) > 1:
                out.append(sorted(part))

    for v in sorted(arrows):
        if v not in index:
            visit(v)
    return out


def static(root):
    modules, arrows, figures = {}, defaultdict(set), defaultdict(float)
    for path in sorted(root.rglob("*.py")):
        parts = path.with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    documented = 0
    for name, path in modules.items():
        text, nodes, code, docs = read(str(path.absolute()))
        hidden = only_for_types(nodes)
        figures["lines"] += text.count("\n")
        documented += len(docs)
        figures["code"] += len(code)
        figures["core"] += 0 if "extensions" in path.relative_to(root).parts else len(code)
        for number, line in enumerate(text.splitlines(), 1):
            if "type: ignore" in line:
                WHERE["type_ignores"].append(f"{path}:{number}")
        methods = {id(m): c.name for c in nodes if isinstance(c, ast.ClassDef) for m in c.body}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in nodes:
            found = []
            if isinstance(node, ast.ImportFrom) and id(node) not in hidden:
                base = node.module or ""
                if node.level:
                    up = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*up, node.module] if node.module else up)
                found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
            elif isinstance(node, ast.Import) and id(node) not in hidden:
                found = [alias.name for alias in node.names]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                a = node.args
                every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
                for one in every:
                    if one.annotation is not None and ast.unparse(one.annotation) == "Any":
                        WHERE["any_parameters"].append(f"{path}:{node.lineno} {node.name}({one.arg})")
                owner = methods.get(id(node), "")
                if not owner.endswith(("Trainer", "Callback")) and any(
                    one.arg in ("trainer", "_trainer") for one in every
                ):
                    WHERE["takes_trainer"].append(f"{path}:{node.lineno} {owner + '.' if owner else ''}{node.name}")
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                WHERE["getattrs"].append(f"{path}:{node.lineno} {ast.unparse(node)[:80]}")
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Attribute) and t.attr == "__class__" for t in node.targets
            ):
                WHERE["class_swaps"].append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.ClassDef) and node.name in BASES:
                for one in node.body:
                    targets = (
                        one.targets
                        if isinstance(one, ast.Assign)
                        else [one.target]
                        if isinstance(one, ast.AnnAssign) and one.value
                        else []
                    )
                    for target in targets:
                        for label in ast.walk(target):
                            if isinstance(label, ast.Name):
                                WHERE["switches"].append(f"{path}:{one.lineno} {node.name}.{label.id}")
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith("Trainer")
                and not node.name.startswith("_")
                and node.name not in BASES
            ):
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and one.name == "__init__" and one.args.kwarg is not None:
                        WHERE["hidden_signatures"].append(f"{path}:{one.lineno} {node.name}")
            for target in found:
                if (
                    target in modules
                    and target != name
                    and path.name != "__init__.py"
                    and modules[target].name != "__init__.py"
                ):
                    arrows[name].add(target)
    for part in circles(arrows):
        WHERE["in_circles"] += part
    tests = root.parent / "tests"
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and (p / "__init__.py").exists()):
        if not list((tests / folder.name).glob("test_*.py")):
            WHERE["rooms_without_tests"].append(str(folder))
    for name in GOALS:
        if name in WHERE:
            figures[name] = len(WHERE[name])
    for name in (
        "any_parameters",
        "takes_trainer",
        "getattrs",
        "class_swaps",
        "switches",
        "hidden_signatures",
        "in_circles",
        "rooms_without_tests",
        "type_ignores",
    ):
        figures[name] += 0
    figures["docstring_share"] = round(documented / figures["lines"], 3)
    return dict(figures)


def tiny():
    """A two-layer Llama and a tokenizer with a chat template, made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def text_of(functions):
    """Lines of code of these functions, by ``file:function``; a function inside one that ran counts once."""
    by_file, out = defaultdict(set), {}
    for file, line in functions:
        by_file[file].add(line)
    for file, starts in by_file.items():
        _, nodes, lines, _ = read(file)
        counted = set()
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        for node in sorted((n for n in nodes if isinstance(n, kinds)), key=lambda n: n.lineno):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first in starts or node.lineno in starts:
                mine = {n for n in range(first, node.end_lineno + 1) if n in lines} - counted
                counted |= mine
                if mine:
                    out[f"{file}:{node.lineno} {node.name}"] = len(mine)
    return out


def deepest(package):
    import posttrain

    own = lambda cls: sum(one.__module__.split(".")[0] == package for one in cls.__mro__)
    names = [n for n in dir(posttrain) if n.endswith("Trainer")]
    return max(own(getattr(posttrain, n)) for n in names if isinstance(getattr(posttrain, n), type))


def methods(trainer, package):
    """Names of the methods that classes of the package define for a trainer; properties and nested classes are not counted."""
    own = [one for one in trainer.__mro__ if one.__module__.split(".")[0] == package]
    kinds = (staticmethod, classmethod)
    return sorted(
        {name for one in own for name, value in vars(one).items() if callable(value) or isinstance(value, kinds)}
    )


def of_trainers(package):
    """Figures that need the package to be imported."""
    import posttrain

    WHERE["methods_post"], WHERE["methods_online"] = (
        methods(t, package) for t in (posttrain.SFTTrainer, posttrain.GRPOTrainer)
    )
    return {"deepest": deepest(package)} | {name: len(WHERE[name]) for name in ("methods_post", "methods_online")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="posttrain")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--where", metavar="FIGURE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.dont_write_bytecode = True
    figures = static(pathlib.Path(args.package))
    figures |= {} if args.static else of_trainers(args.package)
    if args.where:
        print("\n".join(str(row) for row in WHERE.get(args.where, ["nothing is listed for this figure"])))
        return 0
    if args.json:
        print(json.dumps(figures))
        return 0
    missed = [name for name, (most, _) in GOALS.items() if name in figures and figures[name] > most]
    missed += [name for name, (least, _) in AT_LEAST.items() if figures[name] < least]
    for name, (least, what) in AT_LEAST.items():
        print(f"{'over' if name in missed else 'ok  '}  {name:20} {figures[name]:>8g}  goal >= {least:<7g} {what}")
    for name, (most, what) in GOALS.items():
        if name in figures:
            print(f"{'over' if name in missed else 'ok  '}  {name:20} {figures[name]:>8g}  goal <= {most:<7g} {what}")
    print(f"{len(missed)} of {len(GOALS) + len(AT_LEAST)} figures miss their goal: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
