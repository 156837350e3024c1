"""Run `grpo_add.py` with a model found, a live view, and a before-and-after table; `posttrain demo` and `make demo` run this."""

import argparse
import sys
import time

import transformers
from rich.console import Console
from rich.table import Table

from posttrain.cli.demo import Forecast, example, find_model
from posttrain.extensions.page.build import write_page
from posttrain.extensions.page.run import read_runs
from posttrain.loop.checkpoint import resolve_resume
from posttrain.report.progress import use_rich_progress


def arguments(argv):
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="posttrain demo", allow_abbrev=False, description=__doc__)
    parser.add_argument("--model", help="folder or hub id of a chat model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output_dir", default="runs/demo", help="the run's folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")
    return parser.parse_args(argv)


def show(console, exams, count_right):
    """Accuracy and length of the answers before and after training, and three of the answers."""
    table = Table("", *exams, title="held-out questions, greedy")
    rights = [(count_right(rows), len(rows)) for rows in exams.values()]
    table.add_row("right", *(f"{right} of {count} ({100 * right / count:.0f} %)" for right, count in rights))
    lengths = (sum(len(answer) for *_, answer in rows) / len(rows) for rows in exams.values())
    table.add_row("characters of an answer", *(f"{length:.1f}" for length in lengths))
    console.print(table)
    table = Table("question", "right", *exams, title="three of the answers")
    for rows in list(zip(*exams.values(), strict=True))[:3]:
        table.add_row(*rows[0][:2], *(row[2] for row in rows))
    console.print(table)


def show_page(console, folder):
    """Write the page of the run; its path stands on a line of its own, so that it can be clicked or copied."""
    page = write_page(read_runs([folder]), f"{folder}/report.html")
    console.print(str(page), soft_wrap=True, highlight=False, markup=False)


def main(argv=None):
    """The whole demo; returns 130 when it was interrupted."""
    args, console = arguments(argv), Console()
    transformers.utils.logging.disable_progress_bar()
    last = resolve_resume(args.resume, args.output_dir)
    console.print("[bold]Finding the model[/] ...")
    model, started, script = args.model or find_model(), time.perf_counter(), example("grpo_add")
    trainer = script.make_trainer(model, args.output_dir, args.steps, report_to="none", disable_tqdm=True)
    use_rich_progress(trainer)
    trainer.add_callback(Forecast())
    console.print("Asking 64 held-out questions [bold]before[/] training ...")
    before = script.exam(trainer)
    right = script.count_right(before)
    trainer.log({"eval_accuracy": right / len(before)})
    console.print(f"{right} of {len(before)} right. Training: GRPO, {args.steps} steps, 8 questions x 8 answers each.")
    trainer.train(resume_from_checkpoint=last)
    if trainer.interrupt.requested:
        show_page(console, args.output_dir)
        return 130
    console.print("Asking the same questions [bold]after[/] training ...")
    exams = {"before": before, "after": script.exam(trainer)}
    trainer.log({"eval_accuracy": script.count_right(exams["after"]) / len(before)})
    trainer.save_model(args.output_dir)
    show(console, exams, script.count_right)
    console.print(f"{time.perf_counter() - started:.0f} seconds in all, set-up aside.")
    console.print(f"[bold]{args.output_dir}[/] holds the trained model (for AutoModelForCausalLM.from_pretrained),")
    console.print("checkpoints, metrics.jsonl, completions.parquet and manifest.json.")
    show_page(console, args.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
