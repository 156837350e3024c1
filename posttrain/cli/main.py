"""Entry point of the `posttrain` command."""

from __future__ import annotations

import importlib
import logging
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from posttrain import plugins
from posttrain.cli import ranks
from posttrain.cli.commands import TRAINING
from posttrain.redaction import hide_secrets
from posttrain.values import accept_any_character, visible

OTHERS = {
    "init": "write a commented config to start from: posttrain init grpo -o grpo.yaml",
    "check": "check a training command without training (exit status 78: training would fail)",
    "recipes": "list or print settings from papers",
    "demo": "train a small language model to add numbers, on this machine, in a few minutes",
    "teacher-scores": "compute a teacher's log-probs for a dataset once, to train without the teacher",
    "completion": 'print Tab completion for bash or zsh: eval "$(posttrain completion bash)"',
    "env": "print versions, hardware and settings for a bug report",
}
HELP = """usage: posttrain COMMAND [options]

Post-training of transformer language models.

training commands (all take --config FILE.yaml; COMMAND --help lists options by use, --help all in full):
{training}

other commands:
{others}

options:
  -h, --help           show this message
  --version            show the version
  --traceback          show the Python traceback of an error (or set POSTTRAIN_TRACEBACK=1)
"""


def help_text() -> str:
    """Return the text of ``posttrain --help``, which lists all commands. The description of a plugin's command is the first
    line of its docstring.
    """
    from posttrain.errors import MissingDependencyError

    others = dict(OTHERS)
    for name, entry in REGISTERED.items():
        try:
            text = (plugins.load(entry).__doc__ or f"Command of the package {entry.dist.name}").partition("\n")[0]
            others[name] = text[0].lower() + text[1:].rstrip(".")
        except MissingDependencyError as error:
            others[name] = f"broken: {error}"
    training = {name: command.text for name, command in TRAINING.items()}
    listed = ["\n".join(f"  {name:19}  {text}" for name, text in texts.items()) for texts in (training, others)]
    return HELP.format(training=listed[0], others=listed[1])


def _lazy(path: str, *first: Any) -> Callable[[list[str]], int]:
    """Return a command that imports the function ``module:function`` only when it runs. The command calls the function with
    ``first`` and the arguments.
    """

    def command(argv: list[str]) -> int:
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(f"posttrain.{module}"), name)(*first, argv)

    return command


def _train(name: str, argv: list[str]) -> int:
    """Run a training command, or print its help. The short help is fast, because it imports no module of the command."""
    if argv and argv[-1] in ("-h", "--help") and TRAINING[name].plugin is None:
        from posttrain.cli.options import help_text

        sys.stdout.write(help_text(name))
        return 0
    everything = argv[-2:] in (["--help", "all"], ["-h", "all"])
    return _lazy("cli.train:run", name)(argv[:-1] if everything else argv)


def _env(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write("usage: posttrain env\n\nShow versions, hardware and settings, ready to paste.\n")
        return 0
    if argv:
        sys.stderr.write(f"posttrain env: takes no arguments, but got {' '.join(argv)}.\n")
        return 2
    sys.stdout.write(environment() + "\n")
    return 0


# Minimum address space in bytes. With less address space, OpenBLAS repeats failing allocations forever, without an error.
ADDRESSES = 2 * 2**30
# Packages that `posttrain env` lists in addition to the packages in a run's manifest.
OPTIONAL = (
    "bitsandbytes", "deepspeed", "liger-kernel", "vllm", "flash-attn", "kernels", "math-verify", "fastapi", "uvicorn",
    "tensorboard", "wandb", "trackio",
)  # fmt: skip


def environment() -> str:
    """Return text for a bug report. The text lists software and hardware as in a run's manifest, optional packages, and
    incompatible versions.
    """
    from posttrain.checks.machine import installed_version, verdict
    from posttrain.report.record import describe_run, flat

    facts = describe_run()
    facts["versions"] |= {name: installed_version(name) for name in OPTIONAL}
    lines = [f"- {name}: {'none' if value is None else value}" for name, value in flat(facts).items()]
    misfits = verdict()
    problems = "".join(f"\n  - {line}" for line in misfits) if misfits else " all installed packages are compatible"
    return "\n".join([*lines, f"- compatibility:{problems}"])


REGISTERED = plugins.entries("commands")
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    **{name: partial(plugins.call, entry) for name, entry in REGISTERED.items()},
    **{name: partial(_train, name) for name in TRAINING},
    "init": _lazy("cli.options:init"),
    "recipes": _lazy("cli.options:recipes"),
    "completion": lambda argv: _lazy("cli.options:completion", list(COMMANDS))(argv),
    "teacher-scores": _lazy("cli.teacher_scores:run"),
    "check": _lazy("cli.check:run"),
    "demo": _lazy("cli.demo:run"),
    "env": _env,
}


def main(argv: list[str] | None = None) -> int:
    """Run the `posttrain` command with arguments.

    Returns: Exit code of the command. 0 means success, 1 means a configuration or data error (one line on stderr), and 2
    means wrong usage. 75 means that a rollout server was lost and the run can be restarted. 78 means that a check stopped the
    run. 130 means that the user interrupted the run.
    """
    accept_any_character()
    tokens = list(sys.argv[1:] if argv is None else argv)
    traceback = os.environ.get("POSTTRAIN_TRACEBACK") == "1"
    if "--traceback" in tokens:
        tokens.remove("--traceback")
        traceback = True
    if not tokens or tokens[0] in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if tokens[0] == "--version":
        from posttrain import __version__

        sys.stdout.write(f"posttrain {__version__}\n")
        return 0
    if tokens[0] not in COMMANDS:
        from posttrain.errors import did_you_mean

        sys.stderr.write(
            f"posttrain: {tokens[0]!r} is not a command{did_you_mean(tokens[0], COMMANDS)}. See posttrain --help.\n"
        )
        return 2
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= space < ADDRESSES:
        sys.stderr.write(
            f"error: this process may use {space / 2**30:.2f} GiB of address space, but torch and other libraries need "
            f"{ADDRESSES / 2**30:.0f} GiB before any model is loaded. With less address space, loading these libraries would "
            "hang. Fix: run `ulimit -v unlimited`.\n"
        )
        return 1
    ranks.keep_stderr()
    try:
        code = _guarded(COMMANDS[tokens[0]], tokens[1:], traceback)
    except BaseException:
        ranks.leave_code(1)
        raise
    ranks.leave_code(code)
    return code


class _Stderr(logging.StreamHandler):
    """Log handler that removes secrets and writes to the current `sys.stderr`. Progress bars replace `sys.stderr` to print
    log lines above the bar.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a log record, and replace secrets in the result."""
        return hide_secrets(super().format(record))

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...


def _guarded(command: Callable[[list[str]], int], argv: list[str], traceback: bool) -> int:
    from posttrain.errors import PosttrainError

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, handlers=[_Stderr()])
    try:
        return command(argv)
    except SystemExit as stop:  # argparse exits with code 0 for --help and with code 2 for wrong usage.
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        return 1 if isinstance(stop.code, str) else stop.code or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:  # The program that reads the output (for example `head`) has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PosttrainError, ValueError, OSError, ImportError) as error:
        if traceback:
            raise
        lines = [f"error: {error}", *vars(error).get("__notes__", [])]
        sys.stderr.write(visible("\n".join(map(hide_secrets, lines)) + "\n"))
        return error.exit_code if isinstance(error, PosttrainError) else 1


if __name__ == "__main__":
    sys.exit(main())
