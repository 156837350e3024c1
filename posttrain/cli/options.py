"""Short help, shell completion and starter configs of training commands. Options are read from source files, so that torch is
not imported.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import re
import shutil
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

from posttrain.cli.commands import TRAINING
from posttrain.errors import ConfigError, check_choice

# Source text of the values of constants that configs use as defaults. The key is the constant's name.
WRITTEN = {"PLANNED": "8"}
MOST, RUN, TRANSFORMERS = "most used", "every run", "every run, from transformers.TrainingArguments"
SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)\. ")  # Pattern of the end of a sentence.
ROOT = Path(__file__).parents[1]
EXTENSIONS = ("extensions/experimental/*.py", "extensions/asynchronous/*.py")
SOURCES = (
    "methods/**/*.py",
    *EXTENSIONS,
    "cli/train.py",
    "data/mixture.py",
    "models/load.py",
    "rollouts/episodes/options.py",
)
# Evaluation settings of transformers.TrainingArguments that `posttrain init` writes to a new config file.
EVALUATION = {
    "eval_strategy": "steps  # The data needs a test split: a folder with train and test files, or test_split_size.",
    "eval_steps": "50",
    "save_steps": "50",
    "load_best_model_at_end": "true  # The checkpoint with the lowest eval_loss, or the best metric_for_best_model.",
}

# Frequently used options, in the order in which users set up a run. Each command shows the options that its config has.
MOST_USED = (
    "model_name_or_path", "teacher_model_name_or_path", "dataset_name", "reward_funcs", "output_dir",
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "num_generations", "max_completion_length", "max_new_tokens", "temperature", "beta", "lmbda", "loss_type",
    "reward_weights", "epsilon", "dynamic_sampling", "rollout_engine", "packing", "assistant_only_loss", "use_peft",
    "eval_strategy", "eval_steps", "save_steps", "load_best_model_at_end", "logging_steps", "log_completions", "report_to",
    "resume_from_checkpoint", "max_hours", "preflight", "warmup_steps", "lr_scheduler_type", "bf16", "gradient_checkpointing",
    "seed",
)  # fmt: skip
# Descriptions of frequently used options of transformers.TrainingArguments. They are shorter than the descriptions in
# transformers.
COMMON = {
    "output_dir": "Folder of the run, with checkpoints, metrics and the trained model.",
    "max_steps": "Number of optimizer steps. Overrides num_train_epochs.",
    "num_train_epochs": "Number of passes over the training set.",
    "max_hours": "Maximum training time in hours. After it, the run saves a checkpoint and ends.",
    "learning_rate": "Peak learning rate.",
    "per_device_train_batch_size": "Number of rows per micro-batch on each device, or auto.",
    "gradient_accumulation_steps": "Number of micro-batches per optimizer step.",
    "logging_steps": "Number of steps between two log lines.",
    "eval_strategy": "When to evaluate: no (never), steps (every eval_steps steps) or epoch (after each epoch).",
    "eval_steps": "Number of steps between two evaluations. A value below 1 is a fraction of all steps.",
    "save_steps": "Number of steps between two checkpoints. A value below 1 is a fraction of all steps.",
    "resume_from_checkpoint": "Checkpoint to resume from: a path, true (the latest one), or auto (the latest one if it exists).",
    "load_best_model_at_end": "Load the best checkpoint at the end: the lowest eval_loss, or the best metric_for_best_model.",
    "warmup_steps": "Number of steps in which the learning rate rises to its peak. A value below 1 is a fraction of all steps.",
    "lr_scheduler_type": "Schedule of the learning rate: linear, cosine, constant, constant_with_warmup and others.",
    "gradient_checkpointing": "Recompute activations in the backward pass, which saves memory and costs time.",
    "report_to": "Trackers: none, tensorboard, wandb, trackio; several are allowed.",
    "preflight": "What happens if a check finds a problem: error (stop the run), warn (log it), or off (no checks).",
    "seed": "Seed of all random number generators.",
}


class Option(NamedTuple):
    """Field of a config: its default as source text, its description, and its possible values if the type lists them."""

    default: str
    text: str = ""
    choices: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """First sentence of the description, followed by the possible values if the sentence does not contain them."""
        first, *others = SENTENCE.split(self.text)
        if others and " " not in first and not self.choices:
            first = f"{first}. {others[0]}"
        missing = [choice for choice in self.choices if choice.strip("'") not in first]
        return first.rstrip(".:") + (f": {', '.join(self.choices)}" if missing else "")


@cache
def _nodes() -> dict[str, ast.AST]:
    files = [file for pattern in SOURCES for file in sorted(ROOT.glob(pattern))]
    spec = importlib.util.find_spec("transformers")  # Only locate the package.
    files += [Path(folder) / "training_args.py" for folder in spec.submodule_search_locations or ()] if spec else []
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)} | {
        node.target.id: node for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _unread(node: ast.ClassDef) -> set[str]:
    """Return the names in the argument ``unread`` of a config's decorator. ``unread`` lists inherited options that the method
    does not use.
    """
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    values = [word.value for call in calls for word in call.keywords if word.arg == "unread"]
    parts = [part for value in values for part in ast.walk(value)]
    named = [_nodes()[part.id] for part in parts if isinstance(part, ast.Name) and part.id in _nodes()]
    parts += [part for node in named for part in ast.walk(node)]
    excluded = [part for compared in parts if isinstance(compared, ast.Compare) for part in ast.walk(compared)]
    of_all, of_excluded = ({str(p.value) for p in some if isinstance(p, ast.Constant)} for some in (parts, excluded))
    return of_all - of_excluded


def _declared(node: ast.ClassDef) -> dict[str, Option]:
    """Return the fields that a config class itself declares, without inherited fields."""
    options = {}
    # Distillation presets set defaults in a decorator. A default can be followed by a new description.
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
            continue  # The field is computed and cannot be set.
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
        default = "" if isinstance(value, ast.Name | ast.Attribute) else ast.unparse(value)
        kind = next((n for n in ast.walk(line.annotation) if isinstance(n, ast.Subscript)), None)
        listed = kind is not None and ast.unparse(kind.value) == "Literal"
        choices = ast.literal_eval(kind.slice) if kind is not None and listed else ()
        choices = tuple(map(repr, choices)) if isinstance(choices, tuple) else ()
        options[line.target.id] = Option(WRITTEN.get(ast.unparse(value), default), text, choices)
    return options


def _lineage(name: str) -> list[ast.ClassDef]:
    """Return the syntax trees of a config class and of its base classes in this package, in method resolution order."""
    node = _nodes().get(name)
    if not isinstance(node, ast.ClassDef):
        return []
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return list(dict.fromkeys([node, *(ancestor for base in bases for ancestor in _lineage(base))]))


def groups(command: str) -> dict[str, dict[str, Option]]:
    """Return the options of a training command by heading. Frequently used options come first, and each option is listed only
    once.
    """
    chosen = TRAINING[command]
    lineage = _lineage(f"{chosen.method}Config")
    shared = [node for node in lineage if node.name == "PostTrainingConfig"]
    foreign = [node for node in lineage if node.name == "TrainingArguments"]
    # List each field under the class that sets its default, which is the first class in this order that declares the field.
    parts = {
        chosen.method: lineage[:1],
        f"{chosen.method} and related methods": [n for n in lineage[1:] if n not in shared + foreign],
        RUN: shared,
        TRANSFORMERS: foreign,
        "data and rewards": _lineage("DatasetMixtureConfig") + _lineage(chosen.script_args),
        "model": _lineage("ModelConfig"),
    }
    declared: dict[str, Option] = {}
    headings: dict[str, list[str]] = {}
    for heading, nodes in parts.items():
        for options in map(_declared, nodes):
            # Fields of base classes come first, because they apply to more methods.
            headings[heading] = [name for name in options if name not in declared] + headings.get(heading, [])
            for name, option in options.items():
                first = declared.get(name, option)
                declared[name] = first._replace(text=COMMON.get(name) or first.text or option.text)
    unread: set[str] = set()
    for node in reversed(lineage):
        unread = (unread - _declared(node).keys()) | _unread(node)
    most = [name for name in MOST_USED if name in declared and name not in unread]
    order = (*list(parts)[:2], "data and rewards", "model", RUN, TRANSFORMERS)
    others = {key: [name for name in headings.get(key, ()) if name not in {*most, *unread}] for key in order}
    return {key: {name: declared[name] for name in names} for key, names in ({MOST: most} | others).items() if names}


def help_text(command: str) -> str:
    """Format the short help of a training command: every option with the first sentence of its description."""
    width = min(shutil.get_terminal_size().columns, 120)
    about = TRAINING[command].text
    lines = [
        f"usage: posttrain {command} [--config FILE.yaml] [--option value ...]",
        f"\n{about[0].upper()}{about[1:]}.",
    ]
    for heading, options in groups(command).items():
        lines += ["", f"{heading}:"]
        for name, option in options.items():
            default = f" ({option.default})" if option.default not in ("", "None") else ""
            head = f"  --{name}  ".ljust(36)
            lines += textwrap.wrap(
                option.sentence + default, width, initial_indent=head, subsequent_indent=" " * 36
            ) or [head.rstrip()]
    return "\n".join(
        [
            *lines,
            "",
            f"Complete descriptions and values of options: posttrain {command} --help all",
            "",
        ]
    )


COMPLETION = """# posttrain: add `eval "$(posttrain completion {shell})"` to the shell's startup file.
{before}_posttrain() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete {filenames}-F _posttrain posttrain
"""
# bash's completion in zsh uses `compdef`. `compdef` is undefined unless zsh's startup file has initialized completion.
ZSH = """(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def completion(commands: list[str], argv: list[str]) -> int:
    """Print a shell script that completes commands, options and files. ``argv`` contains ``bash`` or ``zsh``."""
    parser = argparse.ArgumentParser(prog="posttrain completion", description=completion.__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(argv).shell
    cases = []
    for command in TRAINING:
        flags = " ".join(f"--{name}" for options in groups(command).values() for name in options)
        cases.append(f'    {command}) words="--config --help {flags}";;')
    # Do not use `-o filenames` in zsh, because zsh would add no space after a completed option.
    before, filenames = (ZSH, "") if shell == "zsh" else ("", "-o filenames ")
    text = COMPLETION.format(
        shell=shell, before=before, filenames=filenames, commands=" ".join(commands), cases="\n".join(cases)
    )
    sys.stdout.write(text)
    return 0


def _configs() -> Path:
    """Return the folder of example configs. An installed wheel has this folder next to this file, and a clone has it in
    ``examples``.
    """
    copy = Path(__file__).with_name("examples") / "configs"
    return copy if copy.is_dir() else ROOT.parent / "examples" / "configs"


def _write(text: str, output: str | None) -> int:
    if output is None:
        sys.stdout.write(text)
        return 0
    if Path(output).exists():
        raise ConfigError(f"{output} already exists. Fix: pass another name with -o, or remove the file.")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{output}\n")
    return 0


# Lines of starter configs of distillation commands that select the teacher. If a command has no separate teacher, the line
# is a comment.
TEACHERS = {
    "server-distillation": "teacher_model_server_url: http://localhost:8001",
    "async-distillation": "teacher_server_urls: http://localhost:8001",
    "sdft": "# The teacher is the student itself with each row's privileged_context in the prompt.",
    "sdpo": "# The teacher is a moving average of the student with a successful answer in the prompt.",
    "ssd": "# There is no teacher. The student imitates its own samples.",
}


# Dataset columns that some distillation commands need in addition to prompts. All other distillation commands need only
# prompts, because the student samples the answers.
BESIDE_PROMPTS = {"gkd": ("completion",), "gold": ("completion",), "sdft": ("privileged_context",)}


def starter(command: str) -> str:
    """Return a starter config of a training command as text. The first lines set the model, data and output folder. All other
    options follow as comments with their defaults.
    """
    example = _configs() / f"{command}.yaml"
    if example.is_file():
        begun = example.read_text(encoding="utf-8").partition("\n")[2]
    else:
        rewards = "" if TRAINING[command].script_args == "ScriptArguments" else "reward_funcs: my_rewards.accuracy\n"
        columns = ", ".join(f'"{name}": ...' for name in ("prompt", *BESIDE_PROMPTS.get(command, ())))
        begun = (
            "model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct\n"
            f"{TEACHERS.get(command, 'teacher_model_name_or_path: HuggingFaceTB/SmolLM2-360M-Instruct')}\n{rewards}"
            f"dataset_name: rows.jsonl              # one {{{columns}}} per line\n"
            f"output_dir: runs/{command}\nmax_steps: 200\nlogging_steps: 1\nreport_to: none\n"
        )
    present = {line.partition(":")[0] for line in begun.splitlines()}
    shown = {heading: options for heading, options in groups(command).items() if heading != TRANSFORMERS}
    lines = [
        f"# posttrain {command} --config THIS_FILE",
        f"# First: posttrain check {command} --config THIS_FILE",
        begun,
    ]
    lines += ["# --- evaluation and checkpoints; every field of transformers.TrainingArguments can be set here"]
    lines += [f"# {name}: {value}" for name, value in EVALUATION.items() if name not in present]
    for heading, options in shown.items():
        lines.append(f"# --- {heading}; each option is shown with its default")
        for name, option in options.items():
            if name not in present | EVALUATION.keys() and option.text and option.default:
                lines += [
                    *textwrap.wrap(option.text, 110, initial_indent="# ", subsequent_indent="# "),
                    f"# {name}: {_in_yaml(option.default)}",
                ]
    return "\n".join(lines) + "\n"


def _in_yaml(default: str) -> str:
    """Convert the source text of a default to YAML. If the source text is not a literal, return it unchanged."""
    with contextlib.suppress(ValueError, SyntaxError):
        return json.dumps(ast.literal_eval(default), ensure_ascii=False)
    return default


def init(argv: list[str]) -> int:
    """Write a commented config to start from (``posttrain init METHOD``)."""
    parser = argparse.ArgumentParser(prog="posttrain init", description=init.__doc__)
    parser.add_argument("method", choices=sorted(TRAINING), metavar="METHOD", help=", ".join(TRAINING))
    parser.add_argument("-o", "--output", metavar="FILE", help="output file; default: print the config")
    args = parser.parse_args(argv)
    return _write(starter(args.method), args.output)


def recipes(argv: list[str]) -> int:
    """List the recipes (settings from papers), or print one of them (``posttrain recipes [NAME]``)."""
    parser = argparse.ArgumentParser(prog="posttrain recipes", description=recipes.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe to print; default: list all recipes")
    parser.add_argument("-o", "--output", metavar="FILE", help="output file; default: print the recipe")
    args = parser.parse_args(argv)
    files = {file.stem: file for file in sorted((_configs() / "papers").glob("*.yaml"))}
    if args.name is None:
        for name, file in files.items():
            about = file.read_text(encoding="utf-8").splitlines()[1].lstrip("# ")
            sys.stdout.write(f"{name:14}  {about}\n")
        return 0
    check_choice("recipe", args.name, files)
    return _write(files[args.name].read_text(encoding="utf-8"), args.output)
