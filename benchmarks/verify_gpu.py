"""What only an accelerator can show, in one command: ``make verify-gpu``; no network, random weights.

Questions are asked in the order of `questions`, so that ten minutes on a lent card answer the most important ones:

1. Do SFT, DPO and GRPO train on the shape of Qwen2.5-0.5B; which attention and engine run; time, memory and waits of a step?
2. Are the losses of these methods those of the CPU (two-layer models, tests/gpu)?
3. The same steps with TRL, if it is installed.
4. Log-probs of packed prefix trees in bf16, compared with each sequence alone, with SDPA and FlexAttention.
5. Rollouts of each engine compared with `generate`, of continuous batching and of vLLM; SFT on 4-bit weights (bitsandbytes).
6. Losses of all other trainers compared with the CPU, by family; and the tests that are marked gpu.

Each answer is written to ``results/verify_gpu.json`` as soon as it is available, and with ``--page docs/verified.md`` to a table
too. The same command continues where the last one stopped; ``--again`` starts from the beginning. A question that fails has its
error as the answer. A question that lacks a package or a GPU is skipped. ``--dry-run``: a tiny shape on the CPU, one step of
everything.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# One process trains on one device (PT-C004): of several GPUs it is the first, unless another was chosen.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from harness import write  # noqa: E402

WORDS = ["river", "stone", "apple", "winter", "yellow", "garden"]
BEGIN, END = "<!-- gpu -->", "<!-- end of gpu -->"
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
    "tiny": {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip
# Of a run: steps, sequences of a step, tokens of a prompt and most of a completion, completions of a prompt.
SIZES = {"Qwen2.5-0.5B": (6, 32, 256, 128, 8), "tiny": (1, 4, 12, 6, 2)}
LIMIT = 600.0  # Seconds after which no question is asked.
UNANSWERED = "it did not return: the process ended"
# Scenarios of tests/gpu by family, most important first. The first family is asked before everything else.
FAMILIES: dict[str, tuple[str, ...]] = {
    "SFT, DPO, GRPO": ("sft", "dpo", "grpo native"),
    "bf16": ("sft bf16", "sft weights in bf16", "sft segments in bf16", "grpo bf16"),
    "segments": ("sft segments", "sft packed segments", "dpo segments", "grpo segments"),
    "engines": ("grpo paged", "grpo hf", "grpo native, beginnings in common"),
    "adapters and optimizers": ("sft lora", "dpo lora", "sft adamw"),
    "FlexAttention": ("sft flex_attention",),
    "memory": ("sft packed", "sft checkpointing", "sft offloading", "sft resumed"),
    "preference": ("reward", "kto", "bco", "cpo", "orpo", "tpo"),
    "online": ("rloo", "ppo", "a2po", "async grpo", "online dpo", "gkd"),
    "images": ("sft qwen2_vl", "grpo qwen2_vl"),
}
FAR = 3.0  # The forest may be so many times further from float32 than each sequence alone in bf16 is.


class Skipped(Exception):
    """A part cannot run here; the text says what is missing."""


def needs(package: str) -> Any:
    """The package, where it is installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Skipped(f"{package} is not installed") from error


def model_of(shape: str, device: str, attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Random weights, the same at every call."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=2)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def tokenizer_of() -> Any:
    """The tests' small one: its ids are among those of every shape."""
    from tests.conftest import build_tokenizer

    return build_tokenizer()


def beside_cpu(device: str, family: str) -> dict[str, Any]:
    """Losses and gradient norms of a family's trainers of a two-layer model, compared with the CPU."""
    from tests.gpu.device import why_not
    from tests.gpu.scenarios import beside_cpu

    if device == "cpu" and (reason := why_not() or ("" if "sft" in FAMILIES[family] else "a dry run asks one family")):
        raise Skipped(reason)
    found = beside_cpu(FAMILIES[family] if device == "cuda" else ["sft", "grpo native"], pretend=device == "cpu")
    near = 1e-3 if device == "cuda" else 1e-5
    far = {name: value for name, value in found.items() if not isinstance(value, str) and value > near}
    far = {name: value for name, value in far.items() if "bf16" not in name}
    return found | {"holds": not far and not any("FAILED" in str(value) for value in found.values())}


def gpu_tests(shape: str, device: str) -> dict[str, Any]:
    """The tests marked gpu; without a GPU they are only listed."""
    more = [] if device == "cuda" else ["--collect-only"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *more, "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-500:])
    return {"said": [line for line in done.stdout.splitlines() if line.strip()][-1]}


def parity(shape: str, device: str, attention: str) -> dict[str, Any]:
    """Mean and largest distance of log-probs in bf16 from those of float32, in nats: each sequence alone, forest, padded rows."""
    if attention == "flex_attention" and device == "cpu":
        raise Skipped("FlexAttention is compiled for a GPU")
    from posttrain.data.forest import Layout, collate
    from posttrain.models.forward import batch_logps, sequence_logps
    from posttrain.types import Row

    _, count, prompt, longest, group = SIZES[shape]
    rng, vocabulary = random.Random(0), SHAPES[shape]["vocab_size"]
    rows = []
    for _ in range(max(1, count // group // 2)):
        completions = [[rng.randrange(3, vocabulary) for _ in range(rng.randrange(2, longest))] for _ in range(group)]
        masks = [[1] * len(ids) for ids in completions]
        rows.append(Row([rng.randrange(3, vocabulary) for _ in range(prompt)], completions, masks))
    model = model_of(shape, device, attention)
    plain = model_of(shape, device)
    with torch.no_grad():
        alone = [logp.cpu().tolist() for logp in sequence_logps(plain, rows)]
        truth = [logp.cpu().tolist() for logp in sequence_logps(plain.float(), rows)]
    del plain

    def distance(logps: list[list[float]]) -> dict[str, float]:
        gaps = [abs(a - b) for x, y in zip(truth, logps, strict=True) for a, b in zip(x, y, strict=True)]
        return {"mean": sum(gaps) / len(gaps), "most": max(gaps)}

    found: dict[str, Any] = {"alone": distance(alone)}
    for kind in ("tree", "padded"):
        layout = Layout(kind=kind, row_tokens=2048, pad_to_multiple_of=128 if attention == "flex_attention" else None)  # type: ignore[arg-type]
        batches = [(batch.to(device), True) for batch in collate(rows, pad_token_id=2, layout=layout)]
        found[kind] = distance(batch_logps(model, batches, temperature=1.0, chunk_size=1024)[0])
    found["holds"] = found["tree"]["mean"] <= FAR * found["alone"]["mean"] + 1e-6
    return found


def trained(shape: str, device: str, method: str, library: str = "posttrain") -> dict[str, Any]:
    """Some steps of ours or of TRL's; ``qlora`` is SFT of an adapter on 4-bit weights.

    Returns:
        Losses, seconds of a step without the first and the last one, peak memory, the waits of the last step, and of ours the
        attention and the engine that ran.
    """
    pt = needs(library)
    quantised = method == "qlora"
    if quantised:
        needs("bitsandbytes")
        method = "sft"
    from tests.methods.helpers import count_a, prompts

    steps, count, prompt, longest, group = SIZES[shape]
    told = " ".join(random.Random(0).choices(WORDS, k=max(2, prompt // 4)))
    texts = [
        {"prompt": f"{i} {told}", "chosen": f" {told[: 4 * longest]}", "rejected": f" {i}"} for i in range(2 * count)
    ]
    common = {"per_device_train_batch_size": count, "max_steps": steps, "logging_steps": 1, "report_to": "none"}
    common |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": device == "cpu", "bf16": device == "cuda"}
    own: dict[str, Any] = {"grpo": {"num_generations": group, "max_completion_length": longest}}
    rows = {"sft": [{"prompt": t["prompt"], "completion": t["chosen"]} for t in texts], "dpo": texts}.get(method)
    data: Any = prompts(2 * count)
    if rows is not None:
        from datasets import Dataset

        data = Dataset.from_list(rows)
    kinds = {
        "sft": (pt.SFTTrainer, pt.SFTConfig),
        "dpo": (pt.DPOTrainer, pt.DPOConfig),
        "grpo": (pt.GRPOTrainer, pt.GRPOConfig),
    }
    trainer, config = kinds[method]
    extra = {"reward_funcs": count_a} if method == "grpo" else {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(shape, device, dtype=torch.float32)
        if quantised:
            model, adapter = in_four_bits(model, folder)
            extra = {"peft_config": adapter}
        elif method == "dpo":  # TRL would load it again by its name, which random weights have none of.
            extra = {"ref_model": model_of(shape, device, dtype=torch.float32)}
        made = trainer(
            model=model, args=config(folder, **common, **own.get(method, {})), train_dataset=data,
            processing_class=tokenizer_of(), **extra,
        )  # fmt: skip
        watch = watched(made, device)
        made.train()
    ran = ran_with(made) if library == "posttrain" else {}
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    norms = [float(row["grad_norm"]) for row in made.state.log_history if "grad_norm" in row]
    if len(losses) != steps or any(loss != loss for loss in losses) or not all(0 < norm < math.inf for norm in norms):
        raise RuntimeError(f"{steps} steps left the losses {losses} and gradient norms {norms}")
    return {**ran, **watch(), "losses": losses, "norms": norms}


def watched(trainer: Any, device: str) -> Callable[[], dict[str, Any]]:
    """Watch a trainer's steps. The function that is returned gives the figures after training."""
    from transformers import TrainerCallback

    ends: list[float] = []
    waits: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if device == "cuda" and state.global_step == state.max_steps - 1:
                self.caught = warnings.catch_warnings(record=True)
                waits.append(self.caught.__enter__())
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if waits:
                torch.cuda.set_sync_debug_mode("default")
                self.caught.__exit__(None, None, None)
            if device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.add_callback(Watch())

    def figures() -> dict[str, Any]:
        first, last = (0, -2) if len(ends) > 2 else (0, -1)
        timed = (ends[last] - ends[first]) / max(1, len(ends) + last - first) if len(ends) > 1 else ends[0] - began
        at = (
            [f"{Path(one.filename).name}:{one.lineno}" for one in waits[0] if "synchroniz" in str(one.message)]
            if waits
            else []
        )
        return {
            "seconds_per_step": timed,
            "first_step": ends[0] - began,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
            "waits": len(at) if waits else None,
            "waited_at": dict(Counter(at).most_common(6)),
        }

    return figures


def ran_with(trainer: Any) -> dict[str, Any]:
    """Attention, layout and engine of one of our trainers after training."""
    layout, engine = trainer.layout, getattr(trainer, "engine", None)
    segments = layout.kind == "tree" and not layout.dense_mask
    found = {"attention": "segments" if segments else trainer.model.config._attn_implementation, "layout": layout.kind}
    return found | ({"engine": engine.name} if engine is not None else {})


def in_four_bits(model: Any, folder: str) -> tuple[Any, Any]:
    """The model, loaded again with weights of bitsandbytes, and an adapter for it."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from posttrain.models.load import ModelConfig, get_quantization_config

    model.save_pretrained(Path(folder, "whole"))
    quantisation = get_quantization_config(ModelConfig(load_in_4bit=True))
    quantised = AutoModelForCausalLM.from_pretrained(Path(folder, "whole"), quantization_config=quantisation)
    return quantised, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def sampled(shape: str, device: str, engine: str) -> dict[str, Any]:
    """Tokens a second of one engine in this process after a first call, and how far its log-probs are from a forward pass."""
    from posttrain.extensions.vllm.engine import VLLMEngine
    from posttrain.rollouts.base import Request
    from posttrain.rollouts.native.engine import logp_gaps
    from posttrain.rollouts.paged import PagedEngine
    from posttrain.rollouts.sampling import Sampling

    _, count, prompt, longest, group = SIZES[shape]
    rng, model = random.Random(0), model_of(shape, device)
    prompts = [[rng.randrange(3, SHAPES[shape]["vocab_size"]) for _ in range(prompt)] for _ in range(count // group)]
    requests, sampling = [Request(ids, group) for ids in prompts], Sampling(max_new_tokens=longest, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        if engine == "vllm":
            needs("vllm")
            model.save_pretrained(folder)
            tokenizer_of().save_pretrained(folder)
            options = {"dtype": "bfloat16", "max_model_len": 2 * (prompt + longest), "enforce_eager": True}
            options |= {"gpu_memory_utilization": 0.3} if device == "cuda" else {}
            made: Any = VLLMEngine.create(folder, **options)
        else:
            made = PagedEngine(model, pad_token_id=2)
        made.generate(requests, sampling)
        began = time.perf_counter()
        found = made.generate(requests, sampling)
        seconds = time.perf_counter() - began
        made.close()
    gaps = torch.cat(logp_gaps(model, found[:4]))
    return {"tokens_per_second": sum(len(one.token_ids) for one in found) / seconds, "gap": float(gaps.mean())}


def rollouts(shape: str, device: str) -> dict[str, Any]:
    """Tokens a second of each engine that runs here, and how far its log-probs are from a forward pass."""
    from engines import Work, engines_here, lengths, measure

    _, count, prompt, longest, group = SIZES[shape]
    rng, vocabulary = random.Random(0), SHAPES[shape]["vocab_size"]
    asked = [[rng.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(max(1, count // group))]
    work = Work(asked, group, lengths(len(asked) * group, longest, "skewed"))
    model = model_of(shape, device)
    found = measure(model, work, pad_token_id=2, engines=engines_here(model), repeats=1)
    return {one.name: {"tokens_per_second": one.tokens_per_second, "gap": one.gap} for one in found}


def questions(shape: str, device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every question by name, the most important first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for method in ("sft", "dpo", "grpo"):
        found[f"{method}, {shape}"] = lambda m=method: trained(shape, device, m)
    first, *families = FAMILIES
    found[f"losses compared with the CPU: {first}"] = lambda: beside_cpu(device, first)
    for method in ("sft", "dpo", "grpo"):
        found[f"{method}, {shape}, TRL"] = lambda m=method: trained(shape, device, m, "trl")
    for attention in ("sdpa", "flex_attention"):
        found[f"prefix trees compared with padded rows, bf16, {attention}"] = lambda a=attention: parity(
            shape, device, a
        )
    found["rollouts compared with generate"] = lambda: rollouts(shape, device)
    for engine in ("paged", "vllm"):
        found[f"rollouts of {engine}"] = lambda e=engine: sampled(shape, device, e)
    found[f"sft in 4 bits, {shape}"] = lambda: trained(shape, device, "qlora")
    for family in families:
        found[f"losses compared with the CPU: {family}"] = lambda f=family: beside_cpu(device, f)
    return found | {"tests marked gpu": lambda: gpu_tests(shape, device)}


def table(found: dict[str, Any], where: str) -> str:
    """Markdown: what held, where, and its figures."""
    lines = ["| what | hardware | figures |", "|---|---|---|"]
    for name, result in found.items():
        skipped = "skipped" in result and f"not run: {result['skipped']}"
        shown = (
            result.get("failed")
            or skipped
            or ", ".join(
                f"{key} {said(value)}" for key, value in result.items() if key not in ("losses", "norms", "waited_at")
            )
        )
        lines.append(f"| {name} | {where} | {shown.replace(chr(10), ' ')} |")
    return "\n".join(lines)


def said(value: Any) -> str:
    """A figure, as the table shows it."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {said(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Ask every question that has no answer yet; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--out", type=Path, help="by default in benchmarks/results, of a dry run in build")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    parser.add_argument(
        "--minutes", type=float, default=LIMIT / 60, help="no question is asked later (default: %(default)g)"
    )
    parser.add_argument("--again", action="store_true", help="ask everything again")
    options = parser.parse_args(argv)
    shape, device = ("tiny", "cpu") if options.dry_run else ("Qwen2.5-0.5B", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU is visible to torch. Fix: run it where nvidia-smi shows one, or try it with --dry-run."
        )
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU (dry run)"
    usual = ROOT / ("build" if options.dry_run else "benchmarks/results") / "verify_gpu.json"
    file = options.out or usual
    about = {"hardware": where, "torch": torch.__version__, "transformers": metadata.version("transformers")}
    found = {} if options.again else answered(file, about)
    first, asked = time.perf_counter(), questions(shape, device)
    for name, question in asked.items():
        if name in found:
            continue
        began = time.perf_counter()
        if began - first > 60 * options.minutes:
            break
        found[name] = {"failed": UNANSWERED}  # What a later command reads if this process is killed.
        write(file, about | {"parts": found})
        try:
            found[name] = question()
        except Skipped as missing:
            found[name] = {"skipped": str(missing)}
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[-1500:]}
        found[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{name}: {found[name]}", flush=True)
        write(file, about | {"parts": found})
        if options.page:
            text = options.page.read_text(encoding="utf-8")
            head, tail = text.split(BEGIN)[0], text.split(END)[1]
            options.page.write_text(f"{head}{BEGIN}\n{table(found, where)}\n{END}{tail}", encoding="utf-8")
        if device == "cuda":
            torch.cuda.empty_cache()
    left = [name for name in asked if name not in found]
    print(
        f"{len(asked) - len(left)} of {len(asked)} questions answered." + f" The same command asks: {left}" * bool(left)
    )
    return int(any("failed" in one or one.get("holds") is False for one in found.values()))


def answered(file: Path, about: dict[str, str]) -> dict[str, Any]:
    """Answers of an earlier command on the same hardware with the same versions."""
    if not file.exists():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    return before["parts"] if all(before.get(key) == value for key, value in about.items()) else {}


if __name__ == "__main__":
    sys.exit(main())
