"""Options of training commands read from the sources, without importing torch: short help, completion, configs to begin with."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import shutil
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

from posttrain.cli.commands import TRAINING
from posttrain.errors import ConfigError, did_you_mean

WRITTEN = {"PLANNED": "8"}  # Defaults that have a name.
RUN, FAMILY = "the run", "of its family"
ROOT = Path(__file__).parents[1]
SOURCES = ("methods/**/*.py", "trainers/gold.py", "cli/train.py", "models/load.py")
# Of transformers.TrainingArguments, whose source imports torch: what most runs set.
COMMON = {
    "output_dir": "The run's folder: checkpoints, metrics, the model.",
    "max_steps": "Optimiser steps; otherwise num_train_epochs.",
    "num_train_epochs": "Passes over the rows.",
    "max_hours": "Hours after which the run saves and ends.",
    "learning_rate": "Peak learning rate.",
    "per_device_train_batch_size": "Rows of a micro-batch on each device, or auto.",
    "gradient_accumulation_steps": "Micro-batches of a step.",
    "logging_steps": "Steps between two lines.",
    "save_steps": "Steps between two checkpoints.",
    "resume_from_checkpoint": "A checkpoint, true (the last one) or auto (where there is one).",
    "report_to": "none, tensorboard, wandb, trackio; several in a row.",
    "preflight": "What findings do before training: error, warn, off.",
    "seed": "Of everything.",
}
# Of a method's family: what is set in most runs, beside the method's own.
OFTEN = (
    "num_generations", "max_completion_length", "temperature", "beta", "epsilon", "max_length", "rollout_engine",
    "reward_weights", "dynamic_sampling", "log_completions", "teacher_model_name_or_path", "lmbda", "max_new_tokens",
)  # fmt: skip


class Option(NamedTuple):
    """A field of a config: its default as it is written, and what it is for."""

    default: str
    text: str = ""


@cache
def _classes() -> dict[str, ast.ClassDef]:
    files = [file for pattern in SOURCES for file in sorted(ROOT.glob(pattern))]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _declared(node: ast.ClassDef) -> dict[str, Option]:
    """Fields that a class declares itself."""
    options = {}
    # Presets of distillation give defaults, some with texts, in a decorator.
    keywords = [
        k
        for call in node.decorator_list
        if isinstance(call, ast.Call)
        for k in call.keywords
        if k.arg not in (None, "unread")
    ]
    for word in keywords:
        default, *text = word.value.elts if isinstance(word.value, ast.Tuple) else [word.value]
        options[str(word.arg)] = Option(ast.unparse(default), *(t.value for t in text if isinstance(t, ast.Constant)))
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name) or line.value is None:
            continue
        if "ClassVar" in ast.unparse(line.annotation) or line.target.id.startswith("_"):
            continue
        value, text = line.value, ""
        if isinstance(value, ast.Call) and any(k.arg == "init" for k in value.keywords):
            continue  # What the config works out by itself.
        if isinstance(value, ast.Call):
            texts = [
                *value.args[1:],
                *(v for k in value.keywords if isinstance(k.value, ast.Dict) for v in k.value.values),
            ]
            text = next((t.value for t in texts if isinstance(t, ast.Constant) and isinstance(t.value, str)), "")
            defaults = [k.value for k in value.keywords if k.arg == "default"]
            made = [k.value for k in value.keywords if k.arg == "default_factory"]
            defaults += [value.body for value in made if isinstance(value, ast.Lambda)]
            value = value.args[0] if value.args else defaults[0] if defaults else ast.Constant(None)
        options[line.target.id] = Option(WRITTEN.get(ast.unparse(value), ast.unparse(value)), text)
    return options


def _lineage(name: str) -> list[ast.ClassDef]:
    """A config's class and those it inherits from here, the nearest first."""
    node = _classes().get(name)
    if node is None:
        return []
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return list(dict.fromkeys([node, *(one for base in bases for one in _lineage(base))]))


def groups(command: str) -> dict[str, dict[str, Option]]:
    """Options of a training command under headings, the method's own first; each stands once."""
    chosen = TRAINING[command]
    lineage = _lineage(f"{chosen.method}Config")
    shared = [node for node in lineage if node.name == "PostTrainingConfig"]
    inherited = [node for node in lineage[1:] if node not in shared]
    parts = {  # Whoever declares a field nearest to the method has it, with its default.
        chosen.method: lineage[:1],
        FAMILY: inherited,
        RUN: shared,
        "data and rewards": _lineage(chosen.script_args)[::-1],
        "model": _lineage("ModelConfig"),
    }
    headings: dict[str, dict[str, Option]] = {
        heading: {} for heading in (RUN, "data and rewards", "model", chosen.method, FAMILY)
    }
    headings[RUN] = {name: Option("", text) for name, text in COMMON.items()}
    taken: dict[str, str] = {}
    for heading, nodes in parts.items():
        for name, option in (pair for node in nodes for pair in _declared(node).items()):
            place = taken.get(name)
            if place is not None:
                if not headings[place][name].text:
                    headings[place][name] = Option(headings[place][name].default, option.text)
                continue
            place = RUN if name in COMMON else chosen.method if heading == FAMILY and name in OFTEN else heading
            taken[name] = place
            headings[place][name] = Option(option.default, COMMON[name]) if place == RUN and name in COMMON else option
    return headings


def help_text(command: str) -> str:
    """The short help: what most runs set and the method's own options with their texts, the others by name."""
    width = min(shutil.get_terminal_size().columns, 120)
    about = TRAINING[command].text
    lines = [
        f"usage: posttrain {command} [--config FILE.yaml] [--option value ...]",
        f"\n{about[0].upper()}{about[1:]}.",
    ]
    for heading, options in groups(command).items():
        shown = {k: v for k, v in options.items() if heading != RUN or k in COMMON}
        lines += ["", f"{heading}:"]
        if heading == FAMILY:
            lines += textwrap.wrap(", ".join(sorted(shown)), width, initial_indent="  ", subsequent_indent="  ")
            continue
        for name, option in shown.items():
            default = f" ({option.default})" if option.default not in ("", "None") else ""
            text, head = option.text.split(". ")[0].rstrip(".") + default, f"  --{name:32}"
            lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * 36) or [head.rstrip()]
    return "\n".join([*lines, "", f"Those of transformers.TrainingArguments too: posttrain {command} --help all", ""])


COMPLETION = """# posttrain: `eval "$(posttrain completion {shell})"` in the shell's start file.
{before}_posttrain() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete {filenames}-F _posttrain posttrain
"""
# A start file that has not begun zsh's own completion yet has no `compdef`, which bash's stands on.
ZSH = """(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def completion(commands: list[str], argv: list[str]) -> int:
    """`posttrain completion bash|zsh`: a script that completes commands, options and files."""
    parser = argparse.ArgumentParser(prog="posttrain completion", description=completion.__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(argv).shell
    cases = []
    for command in TRAINING:
        flags = " ".join(f"--{name}" for options in groups(command).values() for name in options)
        cases.append(f'    {command}) words="--config --help {flags}";;')
    # With them zsh leaves no space behind an option.
    before, filenames = (ZSH, "") if shell == "zsh" else ("", "-o filenames ")
    text = COMPLETION.format(
        shell=shell, before=before, filenames=filenames, commands=" ".join(commands), cases="\n".join(cases)
    )
    sys.stdout.write(text)
    return 0


def _configs() -> Path:
    """Where the example configs are: beside this file in a wheel, else in a clone."""
    copy = Path(__file__).with_name("examples") / "configs"
    return copy if copy.is_dir() else ROOT.parent / "examples" / "configs"


def _write(text: str, output: str | None) -> int:
    if output is None:
        sys.stdout.write(text)
        return 0
    if Path(output).exists():
        raise ConfigError(f"{output} is there already. Fix: another name after -o, or remove it.")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{output}\n")
    return 0


# Of the commands without an example: where the teacher is, or what the rows need in its place.
TEACHERS = {
    "server-distillation": "teacher_model_server_url: http://localhost:8001",
    "async-distillation": "teacher_server_urls: http://localhost:8001",
    "sdft": "# The teacher is the student itself, which sees each row's privileged_context.",
    "sdpo": "# The teacher is a moving average of the student, which sees a successful answer.",
    "ssd": "# There is no teacher: the student imitates its own samples.",
}


# What rows hold for them beside prompts; of the others the student writes the answers.
BESIDE_PROMPTS = {"gkd": ("completion",), "gold": ("completion",), "sdft": ("privileged_context",)}


def starter(command: str) -> str:
    """A config of a command that runs once model and data are named: what is set, then each of its own options as a comment."""
    example = _configs() / f"{command}.yaml"
    if example.is_file():
        begun = example.read_text(encoding="utf-8").partition("\n")[2]
    else:
        rewards = "" if TRAINING[command].script_args == "ScriptArguments" else "reward_funcs: my_rewards.accuracy\n"
        columns = ", ".join(f'"{name}": ...' for name in ("prompt", *BESIDE_PROMPTS.get(command, ())))
        begun = (
            "model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct\n"
            f"{TEACHERS.get(command, 'teacher_model_name_or_path: HuggingFaceTB/SmolLM2-360M-Instruct')}\n{rewards}"
            f"dataset_name: rows.jsonl              # one {{{columns}}} a line\n"
            f"output_dir: runs/{command}\nmax_steps: 200\nlogging_steps: 1\nreport_to: none\n"
        )
    known = {line.partition(":")[0] for line in begun.splitlines()}
    lines = [
        f"# posttrain {command} --config THIS_FILE",
        f"# First: posttrain check {command} --config THIS_FILE",
        begun,
    ]
    for heading, options in groups(command).items():
        lines.append(f"# --- {heading}; each stands with its default")
        for name, option in options.items():
            if name not in known and option.text and option.default:
                lines += [
                    *textwrap.wrap(option.text, 110, initial_indent="# ", subsequent_indent="# "),
                    f"# {name}: {_in_yaml(option.default)}",
                ]
    return "\n".join(lines) + "\n"


def _in_yaml(default: str) -> str:
    """A default as YAML reads it, line breaks of a text included; what is no literal as it is written."""
    with contextlib.suppress(ValueError, SyntaxError):
        return json.dumps(ast.literal_eval(default), ensure_ascii=False)
    return default


def init(argv: list[str]) -> int:
    """`posttrain init METHOD`: a config with comments, to begin with."""
    parser = argparse.ArgumentParser(prog="posttrain init", description=init.__doc__)
    parser.add_argument("method", choices=sorted(TRAINING), metavar="METHOD", help=", ".join(TRAINING))
    parser.add_argument("-o", "--output", metavar="FILE", help="write there; without it the config is printed")
    args = parser.parse_args(argv)
    return _write(starter(args.method), args.output)


def recipes(argv: list[str]) -> int:
    """`posttrain recipes [NAME]`: settings of papers, listed, or one of them printed."""
    parser = argparse.ArgumentParser(prog="posttrain recipes", description=recipes.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="which; without it all are listed")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there; without it the recipe is printed")
    args = parser.parse_args(argv)
    files = {file.stem: file for file in sorted((_configs() / "papers").glob("*.yaml"))}
    if args.name is None:
        for name, file in files.items():
            about = file.read_text(encoding="utf-8").splitlines()[1].lstrip("# ")
            sys.stdout.write(f"{name:14}  {about}\n")
        return 0
    if args.name not in files:
        raise ConfigError(
            f"there is no recipe {args.name!r}{did_you_mean(args.name, files)}. Known: {', '.join(files)}."
        )
    return _write(files[args.name].read_text(encoding="utf-8"), args.output)
