"""Rollouts and GRPO on one GPU with random weights of Qwen2.5's shapes in bfloat16: one command, under nine minutes.

    python benchmarks/rollouts_gpu.py

measures a decoding step (captured and not) beside the time to read weights and keys and values once, every way of decoding
attention, whole calls against transformers' `generate` and continuous batching at equal and skewed lengths, and GRPO steps.

Prediction on an H200: a step of 8 rows reads 1 GB (0.5B) or 3.1 GB (1.5B): 0.23 and 0.72 ms at 4.3 TB/s; without a graph, some
600 launches of 5 us each take 3 ms. `generate` pays the launches, every copy of the prompt, and the longest completion.

    python benchmarks/rollouts_gpu.py --device cpu

runs every line on tiny shapes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from engines import Work, by_continuous, by_generate, lengths
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Row, Sampling

BYTES_A_SECOND = 4.3e12  # An H200 reading: 4.8 TB/s on paper.
SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 151_936
GROUP = 8
CASES = [  # Prompt tokens, completions, most new tokens, shape of lengths.
    (512, 64, 256, "skewed"), (512, 256, 256, "skewed"), (512, 256, 256, "equal"), (64, 256, 256, "skewed"),
    (2048, 64, 256, "skewed"), (64, 8, 256, "equal"),
]  # fmt: skip
STEP_ROWS = (8, 64, 256)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """The best of some runs."""
    best = float("inf")
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return best


def build(shape: str, device: torch.device) -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    tiny = device.type == "cpu"
    config = Qwen2Config(
        vocab_size=500 if tiny else VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=4096, bos_token_id=0, eos_token_id=0, **(TINY if tiny else SHAPES[shape]),
    )  # fmt: skip
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, vocabulary, (count, tokens), generator=generator).tolist()


def gap(model: nn.Module, rollouts: list[Any]) -> float:
    """Mean difference of log-probs to a forward pass, over a few completions."""
    chosen = rollouts[:: max(1, len(rollouts) // 4)]
    truth = sequence_logps(model, [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in chosen])
    gaps = [(t.float().cpu() - torch.tensor(r.logp)).abs() for t, r in zip(truth, chosen, strict=True)]
    return float(torch.cat(gaps).mean())


def one_step(model: Any, rows: int, prompt: int, device: torch.device, decode: str) -> dict[str, Any]:
    """A decoding step: the difference of a long and a short call, on the engine's own buffers, beside the floor."""
    short, long = (4, 12) if device.type == "cpu" else (32, 160)
    engine = NativeEngine(model, pad_token_id=0, decode=decode, max_slots=rows)
    asked = [Request(p, min(GROUP, rows)) for p in prompts(max(1, rows // GROUP), prompt, model.config.vocab_size)]
    rollouts = engine.generate(asked, Sampling(long, seed=0))  # Captures, and grows the buffers once.
    spent = {n: seconds_of(lambda n=n: engine.generate(asked, Sampling(n, seed=1)), device, 2) for n in (short, long)}
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    head = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2
    cache = token * (len(asked) * prompt + rows * (short + long) // 2)
    step, floor = (spent[long] - spent[short]) / (long - short), (weights + cache) / BYTES_A_SECOND
    decoder = engine.decoder
    return {
        "rows": rows, "prompt": prompt, "decode": decode, "step_ms": 1e3 * step, "floor_ms": 1e3 * floor,
        "step_over_floor": step / floor, "logprob_gap": gap(model, rollouts),
        "attention": decoder.attention if decoder is not None else "eager",
    }  # fmt: skip


def each_attention(model: Any, rows: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by every way of attention, on a GPU; the plain one alone on a CPU."""
    from posttrain.rollouts.native import paged_attention as ways

    found = {}
    asked = [Request(p, GROUP) for p in prompts(max(1, rows // GROUP), 512 if device.type == "cuda" else 9, 400)]
    for name in ways.ATTENTIONS:
        engine = NativeEngine(model, pad_token_id=0, decode="graph", max_slots=rows)
        engine.decoder.attention = name
        try:
            engine.generate(asked, Sampling(40, seed=0))
            spent = [
                seconds_of(lambda n=n, e=engine: e.generate(asked, Sampling(n, seed=1)), device, 2) for n in (8, 40)
            ]
            found[name] = 1e3 * (spent[1] - spent[0]) / 32
        except Exception as error:  # A way that does not run here is a figure too.
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
        engine.close()
    return found


def one_case(model: Any, case: tuple[int, int, int, str], device: torch.device, repeats: int) -> dict[str, Any]:
    """A whole call: ours warm, as in training after its first step, against transformers' two ways."""
    prompt, rows, new, shape = case
    work = Work(prompts(rows // GROUP, prompt, model.config.vocab_size), GROUP, lengths(rows, new, shape))
    owners = [p for p in work.prompts for _ in range(GROUP)]
    asked = [Request(p, 1, Sampling(n, seed=i)) for i, (p, n) in enumerate(zip(owners, work.lengths, strict=True))]
    engine = NativeEngine(model, pad_token_id=0, decode="graph", max_slots=rows)
    whole = Sampling(new, seed=0)
    first = seconds_of(lambda: engine.generate(asked, whole), device)
    ours = seconds_of(lambda: engine.generate(asked, whole), device, repeats)
    engine.close()
    eager = NativeEngine(model, pad_token_id=0, decode="eager", max_slots=rows)
    told: dict[str, Any] = {
        "prompt": prompt, "completions": rows, "new": new, "lengths": shape, "first_call_seconds": first,
        "seconds": {"graph": ours, "eager": seconds_of(lambda: eager.generate(asked, whole), device)},
    }  # fmt: skip
    for name, way in (("generate", by_generate), ("continuous", by_continuous)):
        try:
            told["seconds"][name] = seconds_of(lambda way=way: way(model, work, 0), device)
        except Exception as error:  # The peer's failure must not cost our own figures.
            told[name + "_failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    told["speed_up"] = {n: s / ours for n, s in told["seconds"].items() if n != "graph"}
    told["tokens_per_second"] = work.tokens / ours
    return told


def tokenizer_for(vocabulary: int) -> Any:
    """Bytes and nothing else: rewards of random weights need no words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({"<end>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert backend.get_vocab_size() < vocabulary
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def reward(completions: list[str], **_: Any) -> list[float]:
    """Any number that differs within a group."""
    return [len(set(c)) / 10 for c in completions]


def grpo(side: str, way: str, shape: str, device: torch.device) -> dict[str, Any]:
    """GRPO steps of 8 prompts x 8 completions; the first step is not counted."""
    from datasets import Dataset

    library, tiny = harness.import_side(side), device.type == "cpu"
    steps, groups, new, words = (2, 1, 6, 20) if tiny else (4, 8, 256, 512)
    model = build(shape, device)
    texts = ["".join(chr(97 + t % 26) for t in p) for p in prompts(groups * steps, words, 400)]
    extra = {"rollout_engine": way} if side == "ours" else {}
    arguments = library.GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=groups * GROUP, num_generations=GROUP,
        max_completion_length=new, max_steps=steps, learning_rate=1e-6, bf16=not tiny, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, seed=0, use_cpu=tiny, **extra,
    )  # fmt: skip
    trainer = library.GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list([{"prompt": t} for t in texts]),
        processing_class=tokenizer_for(model.config.vocab_size),
    )  # fmt: skip
    told = harness.timed(trainer)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if not tiny else told["peak_gb"]
    return {"side": side, "engine": way, "shape": shape, "step_seconds": told["step_seconds"], "peak_gb": peak}


def compare_grpo(shape: str, device: torch.device) -> list[dict[str, Any]]:
    """Ours on both engines, and the peer where POSTTRAIN_PEER_PYTHON names its interpreter; each in its own process."""
    sides = [(sys.executable, "ours", "native"), (sys.executable, "ours", "hf")]
    if os.environ.get("POSTTRAIN_PEER_PYTHON"):
        sides.append((os.environ["POSTTRAIN_PEER_PYTHON"], "peer", "generate"))
    found = []
    for python, side, way in sides:
        arguments = ("--side", side, "--way", way, "--shapes", shape, "--device", device.type)
        try:
            found.append(harness.child(python, __file__, *arguments))
        except SystemExit as error:
            found.append({"side": side, "engine": way, "failed": str(error)[-600:]})
        print(found[-1], flush=True)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options.add_argument("--minutes", type=float, default=8.0, help="begin nothing more after this")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--side", choices=["ours", "peer"], help="one GRPO run in this process (used by the script)")
    options.add_argument("--way", default="native", help="engine of that run")
    options.add_argument("--no-save", action="store_true", help="print the figures and write no file")
    args = options.parse_args()
    device = torch.device(args.device)
    if args.side:
        print(json.dumps(grpo(args.side, args.way, args.shapes[0], device)))
        return
    result = measured(args, device)
    if args.no_save:
        print(json.dumps(result))
    else:
        harness.save("rollouts_graph" if args.device == "cuda" else "rollouts_graph_dry_run", result)


def measured(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All figures, what matters most first, until the minutes are over."""
    end = time.perf_counter() + 60 * args.minutes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, tiny shapes: a dry run, not a figure"
    result: dict[str, Any] = {"device": name, "steps": [], "attention": {}, "cases": [], "grpo": [], "left_out": []}
    tiny = device.type == "cpu"
    rows = (8,) if tiny else STEP_ROWS
    cases = [(9, 8, 6, "skewed"), (9, 8, 6, "equal")] if tiny else CASES

    def work(label: str, into: list[Any], function: Callable[[], Any]) -> None:
        if time.perf_counter() > end:
            result["left_out"].append(label)
            return
        into.append(function())
        print(label, into[-1], flush=True)

    for shape in args.shapes:
        model = build(shape, device)
        for n in rows:
            for way in ("graph", "eager"):
                work(
                    f"{shape} step {n} {way}", result["steps"],
                    lambda n=n, way=way, model=model: one_step(model, n, 9 if tiny else 512, device, way),
                )  # fmt: skip
        each: list[Any] = []
        work(f"{shape} attention", each, lambda model=model: each_attention(model, rows[-1], device))
        result["attention"][shape] = each
        for case in cases:
            work(
                f"{shape} case", result["cases"],
                lambda case=case, model=model, shape=shape: {"shape": shape} | one_case(model, case, device, args.repeats),
            )  # fmt: skip
        del model
        if not tiny:
            torch.cuda.empty_cache()
        work(f"{shape} grpo", result["grpo"], lambda shape=shape: compare_grpo(shape, device))
    return result


if __name__ == "__main__":
    main()
