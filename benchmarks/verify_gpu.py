"""What only an accelerator can show, in one command: ``make verify-gpu``; no network, random weights, minutes.

Four steps of every kind of trainer beside the CPU's (tests/gpu; a dry run pretends the GPU); the tests that are marked gpu;
log-probs of the token forest in bf16 beside each sequence alone, with SDPA and
FlexAttention; steps of SFT, DPO and GRPO on the shape of Qwen2.5-0.5B, beside TRL's where it is installed, and of SFT on
4-bit weights (bitsandbytes); rollouts of each engine beside `generate`, of continuous batching and of vLLM. A part that
fails says so and the others go on; one that lacks a package, a GPU or time is skipped and says which. Writes
``results/verify_gpu.json`` and, with ``--page docs/verified.md``, a table.
``--dry-run``: a tiny shape, on the CPU, one step of everything.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# One process trains on one device (PT-C004): of several GPUs it is the first, unless another was chosen.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
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
LIMIT = 900.0  # Seconds after which no part begins.
FAR = 3.0  # The forest may be so many times further from each sequence alone than padding is.


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
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).to(device).eval()


def tokenizer_of() -> Any:
    """The tests' small one: its ids are among those of every shape."""
    from tests.conftest import build_tokenizer

    return build_tokenizer()


def beside_cpu(shape: str, device: str) -> dict[str, Any]:
    """Losses and gradient norms of trainers of a two-layer model beside the CPU's."""
    from tests.gpu.device import why_not
    from tests.gpu.scenarios import SCENARIOS, beside_cpu

    if device == "cpu" and (reason := why_not()):
        raise Skipped(reason)
    found = beside_cpu(list(SCENARIOS) if device == "cuda" else ["sft", "grpo native"], pretend=device == "cpu")
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
    """Mean and largest distance of log-probs from each sequence alone, of the forest and of padded rows, in nats."""
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
    with torch.no_grad():
        alone = [logp.cpu().tolist() for logp in sequence_logps(model_of(shape, device), rows)]
    found: dict[str, Any] = {}
    for kind in ("tree", "padded"):
        layout = Layout(kind=kind, row_tokens=2048, pad_to_multiple_of=128 if attention == "flex_attention" else None)  # type: ignore[arg-type]
        batches = [(batch.to(device), True) for batch in collate(rows, pad_token_id=2, layout=layout)]
        ours = batch_logps(model, batches, temperature=1.0, chunk_size=1024)
        gaps = [abs(a - b) for x, y in zip(alone, ours, strict=True) for a, b in zip(x, y, strict=True)]
        found[kind] = {"mean": sum(gaps) / len(gaps), "most": max(gaps)}
    found["holds"] = found["tree"]["mean"] <= FAR * found["padded"]["mean"] + 1e-6
    return found


def trained(shape: str, device: str, method: str, library: str = "posttrain") -> dict[str, Any]:
    """Some steps of ours or of TRL's: losses, seconds, and the most memory; ``qlora`` is SFT of an adapter on 4-bit weights."""
    pt = needs(library)
    quantised = method == "qlora"
    if quantised:
        needs("bitsandbytes")
        method = "sft"
    from tests.methods.helpers import prompts

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
    extra = (
        {"reward_funcs": lambda completions, **_: [float(len(c) % 3) for c in completions]} if method == "grpo" else {}
    )
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
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        made.train()
        seconds = time.perf_counter() - began
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    if len(losses) != steps or any(loss != loss for loss in losses):
        raise RuntimeError(f"{steps} steps left the losses {losses}")
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {"losses": losses, "seconds_per_step": seconds / steps, "peak_gib": memory}


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


def parts(shape: str, device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Everything that is shown, by name."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "trainers beside a CPU's": lambda: beside_cpu(shape, device),
        "tests marked gpu": lambda: gpu_tests(shape, device),
    }
    for attention in ("sdpa", "flex_attention"):
        found[f"forest beside padded, bf16, {attention}"] = lambda a=attention: parity(shape, device, a)
    for method in ("sft", "dpo", "grpo"):
        found[f"{method}, {shape}"] = lambda m=method: trained(shape, device, m)
        found[f"{method}, {shape}, TRL"] = lambda m=method: trained(shape, device, m, "trl")
    found[f"sft in 4 bits, {shape}"] = lambda: trained(shape, device, "qlora")
    found["rollouts beside generate"] = lambda: rollouts(shape, device)
    for engine in ("paged", "vllm"):
        found[f"rollouts of {engine}"] = lambda e=engine: sampled(shape, device, e)
    return found


def table(found: dict[str, Any], where: str) -> str:
    """Markdown: what held, where, and its figures."""
    lines = ["| what | hardware | figures |", "|---|---|---|"]
    for name, result in found.items():
        skipped = "skipped" in result and f"not run: {result['skipped']}"
        shown = (
            result.get("failed")
            or skipped
            or ", ".join(f"{key} {said(value)}" for key, value in result.items() if key != "losses")
        )
        lines.append(f"| {name} | {where} | {shown.replace(chr(10), ' ')} |")
    return "\n".join(lines)


def said(value: Any) -> str:
    """A figure, as the table shows it."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {said(inner)}" for key, inner in value.items()) + ")"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run every part; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--out", type=Path, help="by default in benchmarks/results, of a dry run in build")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    options = parser.parse_args(argv)
    shape, device = ("tiny", "cpu") if options.dry_run else ("Qwen2.5-0.5B", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU is visible to torch. Fix: run it where nvidia-smi shows one, or try it with --dry-run."
        )
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU (dry run)"
    found: dict[str, Any] = {}
    first = time.perf_counter()
    for name, part in parts(shape, device).items():
        began = time.perf_counter()
        try:
            if began - first > LIMIT:
                raise Skipped(f"{LIMIT:g} seconds had passed")
            found[name] = part()
        except Skipped as missing:
            found[name] = {"skipped": str(missing)}
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[-1500:]}
        found[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{name}: {found[name]}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    from harness import write

    usual = ROOT / ("build" if options.dry_run else "benchmarks/results") / "verify_gpu.json"
    write(options.out or usual, {"hardware": where, "torch": torch.__version__, "parts": found})
    if options.page:
        text = options.page.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        options.page.write_text(f"{head}{BEGIN}\n{table(found, where)}\n{END}{tail}", encoding="utf-8")
    return int(any("failed" in one or one.get("holds") is False for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
