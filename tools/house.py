#!/usr/bin/env python3
"""Measure the house: size, reach and depth of the package, from the project's root, with the project's own Python.

    python tools/house.py            # the figures beside their goals; exits 1 while one is missed
    python tools/house.py --static   # without importing the package (no depth, no reach)
    python tools/house.py --json     # the figures alone

Reach is what really runs: the files of the package in which a function is executed while a trainer is made and one optimiser
step is taken on a tiny model (checks and record included).
"""

import argparse
import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict

GOALS = {  # figure: (most, what it is)
    "lines": (38_000, "lines of Python in the package"),
    "files_in_a_folder": (18, "modules in the fullest folder"),
    "longest_file": (600, "lines of the longest module"),
    "one_importer_share": (0.12, "share of modules that exactly one other module imports"),
    "getattr_engine": (0, "getattr/hasattr on an engine"),
    "mixins": (0, "classes named *Mixin"),
    "depth_sft": (3, "own classes in the MRO of SFTTrainer"),
    "depth_dpo": (3, "own classes in the MRO of DPOTrainer"),
    "depth_grpo": (3, "own classes in the MRO of GRPOTrainer"),
    "depth_ppo": (3, "own classes in the MRO of PPOTrainer"),
    "depth_async_grpo": (4, "own classes in the MRO of AsyncGRPOTrainer"),
    "reach_sft": (30, "files that run for one SFT step"),
    "reach_dpo": (35, "files that run for one DPO step"),
    "reach_grpo": (55, "files that run for one GRPO step"),
    "type_ignores": (60, "'type: ignore' comments"),
}
AT_LEAST = {"docstring_share": (0.15, "share of docstring lines: size is not saved on explanations")}
TRAINERS = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "grpo": "GRPOTrainer",
    "ppo": "PPOTrainer",
    "async_grpo": "AsyncGRPOTrainer",
}


def static(root: pathlib.Path) -> dict[str, float]:
    modules, importers, figures = {}, defaultdict(set), defaultdict(float)
    for path in sorted(root.rglob("*.py")):
        parts = path.with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    folders = defaultdict(int)
    for name, path in modules.items():
        text = path.read_text(encoding="utf-8")
        tree, count = ast.parse(text), text.count("\n")
        figures["lines"] += count
        figures["longest_file"] = max(figures["longest_file"], count)
        figures["type_ignores"] += text.count("type: ignore")
        folders[path.parent] += path.name != "__init__.py"
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = {
            id(n.body[0].value)
            for n in ast.walk(tree)
            if isinstance(n, owners) and n.body and isinstance(n.body[0], ast.Expr)
        }
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(tree):
            found = []
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*up, node.module] if node.module else up)
                found = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) in docs:
                figures["docstring_lines"] += node.end_lineno - node.lineno + 1
            elif isinstance(node, ast.ClassDef):
                figures["mixins"] += node.name.endswith("Mixin")
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and node.args:
                figures["getattr_engine"] += ast.unparse(node.args[0]).split(".")[-1] in (
                    "engine",
                    "rollout_engine",
                    "_engine",
                )
            for target in found:
                if path.name != "__init__.py" and target != name:
                    importers[target].add(name)
    figures["files_in_a_folder"] = max(folders.values())
    plain = [name for name, path in modules.items() if path.name != "__init__.py"]
    figures["one_importer_share"] = round(sum(len(importers[name]) == 1 for name in plain) / len(plain), 3)
    figures["docstring_share"] = round(figures.pop("docstring_lines", 0) / figures["lines"], 3)
    figures["mixins"] += 0
    figures["getattr_engine"] += 0
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


def reach(kind: str, package: str) -> int:
    """Run one step of a trainer and count the package's files that executed a function."""
    import logging
    import threading

    import datasets
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    import posttrain

    home = os.path.dirname(posttrain.__file__) + os.sep
    seen = set()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home) and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    model, tokenizer = tiny()
    for name in ("SFTConfig", "SFTTrainer", "DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer"):
        getattr(posttrain, name)  # What runs while modules are imported is not the way of the data.
    ask = lambda i: [{"role": "user", "content": f"What is {i}?"}]  # noqa: E731
    say = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    common = {
        "max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none", "bf16": False, "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": False, "use_cpu": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        threading.setprofile(look)
        sys.setprofile(look)
        if kind == "sft":
            rows = [{"messages": ask(i) + say(f"It is {i}.")} for i in range(16)]
            trainer = posttrain.SFTTrainer(
                model,
                posttrain.SFTConfig(out, **common),
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tokenizer,
            )
        elif kind == "dpo":
            rows = [
                {"prompt": ask(i), "chosen": say(f"It is {i}."), "rejected": say(f"No, {i + 1}!")} for i in range(16)
            ]
            trainer = posttrain.DPOTrainer(
                model,
                None,
                posttrain.DPOConfig(out, **common),
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=tokenizer,
            )
        else:
            rows = [{"prompt": ask(i), "answer": str(i)} for i in range(16)]
            args = posttrain.GRPOConfig(
                out, **common, num_generations=4, max_completion_length=8, rollout_engine="native"
            )
            reward = lambda completions, **_: [float(len(c[0]["content"]) % 3) for c in completions]  # noqa: E731
            trainer = posttrain.GRPOTrainer(
                model, reward, args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
            )
        trainer.train()
        sys.setprofile(None)
        threading.setprofile(None)
    return len(seen)


def depth(package: str) -> dict[str, int]:
    import posttrain

    def own(name: str) -> int:
        return sum(cls.__module__.split(".")[0] == package for cls in getattr(posttrain, name).__mro__)

    return {f"depth_{short}": own(name) for short, name in TRAINERS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="posttrain")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    if args.part == "depth":
        print(json.dumps(depth(args.package)))
        return 0
    if args.part:
        print(json.dumps({f"reach_{args.part}": reach(args.part, args.package)}))
        return 0
    figures = static(pathlib.Path(args.package))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for part in [] if args.static else ["depth", "sft", "dpo", "grpo"]:
        command = [sys.executable, __file__, "--package", args.package, "--part", part]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{part}: failed\n{done.stderr[-800:]}")
            return 2
        figures |= json.loads(done.stdout.strip().splitlines()[-1])
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
    print(f"{len(missed)} of {len(figures)} figures over their goal: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
