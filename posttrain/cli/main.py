"""The `posttrain` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from posttrain.cli import ranks

__all__ = ["main"]


HELP = """usage: posttrain COMMAND [options]

Post-training of transformer language models.

training commands (all take --config file.yaml; COMMAND --help lists every option):
  sft     supervised fine-tuning
  reward  outcome reward models, from preference pairs
  dpo     direct preference optimisation, from preference pairs
  kto     from answers judged good or bad
  bco     the same, by a binary classifier's loss
  cpo     pairs without a reference model; SimPO and AlphaPO too
  orpo    supervised fine-tuning with an odds-ratio penalty on rejected answers
  tpo     pairs and a gold answer
  grpo    group-relative policy optimisation
  gmpo    GRPO with geometric means of clipped ratios
  async-grpo  GRPO on rollouts that other processes write while it trains
  a2po    regression on optimal advantages, one completion a prompt
  rloo    policy gradients against the mean of a prompt's other completions
  ppo     clipped policy gradients with a value function
  online-dpo  DPO on pairs of the policy's own completions, by rewards or a judge
  nash-md     to be preferred to a mixture of the policy and the reference
  xpo         online DPO against the reference, with a bonus for exploring
  distill     learn a teacher's next-token distributions, on the student's own samples (also: distillation)
  gkd         the same on the dataset's answers, or a mixture of both
  gold        the same from a teacher with another tokenizer
  minillm     the reverse KL to a teacher as a reward of each token
  iw-opd      the same with more weight on early tokens
  sdft        the student with a hint is its own teacher
  sdpo        the student that saw a success is its own teacher
  ssd         supervised fine-tuning on the model's own samples

other commands:
  demo    teach a small language model to add, on this machine, in a few minutes
  check   everything that can be known of a training command without training; exit code 78 where it would be refused
  estimate  memory by component, time of a step, the largest batch that fits; exit code 78 where nothing does
  inspect show the rows a training command would train on: text, masks, lengths, findings
  report  make one HTML file of what runs recorded: curves, findings, completions, comparison
  watch   show a run while it trains, on the terminal or as a live page on this machine
  serve   a rollout server: an engine behind HTTP, whose weights a trainer replaces (also: vllm-serve)
  teacher-scores  compute a teacher's scores of a dataset once, for training without the teacher
  env     what a bug report needs

options:
  -h, --help  show this message
  --version   show the version
  --traceback show the Python traceback of an error (or set POSTTRAIN_TRACEBACK=1)
"""


def _train(name: str) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        from posttrain.cli.train import run

        return run(name, argv)

    return command


def _demo(argv: list[str]) -> int:
    from posttrain.cli.demo import run

    return run(argv)


def _env(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write("usage: posttrain env\n\nShow versions, hardware and settings, ready to paste.\n")
        return 0
    from posttrain.cli.check import report

    sys.stdout.write(report() + "\n")
    return 0


def _check(argv: list[str]) -> int:
    from posttrain.cli.check import run

    return run(argv)


def _estimate(argv: list[str]) -> int:
    from posttrain.cli.estimate import run

    return run(argv)


def _inspect(argv: list[str]) -> int:
    from posttrain.cli.inspect import run

    return run(argv)


def _report(argv: list[str]) -> int:
    from posttrain.cli.report import run

    return run(argv)


def _watch(argv: list[str]) -> int:
    from posttrain.cli.report import watch

    return watch(argv)


def _teacher_scores(argv: list[str]) -> int:
    from posttrain.cli.teacher_scores import run

    return run(argv)


def _serve(argv: list[str]) -> int:
    """Returns 0 after a shutdown that was asked for, 1 after a worker died."""
    from posttrain.cli.parser import PosttrainArgumentParser
    from posttrain.serve.config import ServeConfig
    from posttrain.serve.server import run_server

    (config,) = PosttrainArgumentParser(ServeConfig, prog="posttrain serve").parse_args_and_config(argv)
    level = {"critical": 50, "error": 40, "warning": 30}.get(config.log_level, 20)
    logging.getLogger("posttrain").setLevel(level)
    return run_server(config)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "sft": _train("sft"),
    "reward": _train("reward"),
    **{name: _train(name) for name in ("dpo", "kto", "bco", "cpo", "orpo", "tpo", "grpo")},
    **{name: _train(name) for name in ("rloo", "ppo", "online-dpo", "nash-md", "xpo", "gmpo", "a2po")},
    "async-grpo": _train("async-grpo"),
    **{
        name: _train(name)
        for name in ("distill", "distillation", "gkd", "gold", "minillm", "iw-opd", "sdft", "sdpo", "ssd")
    },
    "teacher-scores": _teacher_scores,
    "check": _check,
    "estimate": _estimate,
    "inspect": _inspect,
    "report": _report,
    "watch": _watch,
    "serve": _serve,
    "vllm-serve": _serve,
    "demo": _demo,
    "env": _env,
}


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 success; 1 a configuration or data error (one line on stderr); 2 wrong usage; 75 a rollout server was lost, so
        that the run may be started again; 78 a check refused the run; 130 interrupted.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    traceback = os.environ.get("POSTTRAIN_TRACEBACK") == "1"
    if "--traceback" in tokens:
        tokens.remove("--traceback")
        traceback = True
    if not tokens or tokens[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
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
    ranks.keep_stderr()
    try:
        code = _guarded(COMMANDS[tokens[0]], tokens[1:], traceback)
    except BaseException:
        ranks.leave_code(1)
        raise
    ranks.leave_code(code)
    return code


def _guarded(command: Callable[[list[str]], int], argv: list[str], traceback: bool) -> int:
    import logging

    from posttrain.errors import PosttrainError

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        return command(argv)
    except SystemExit as stop:  # argparse: 0 for --help, 2 for wrong usage.
        return int(stop.code or 0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except (PosttrainError, ValueError, OSError, ImportError) as error:
        if traceback:
            raise
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 1)


if __name__ == "__main__":
    sys.exit(main())
