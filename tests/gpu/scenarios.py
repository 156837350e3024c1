"""Four steps of trainers on a device, beside the same on a CPU: what they lose, and how often the host waits.

``python -m tests.gpu.scenarios`` measures all of them on the pretended device and rewrites the ceilings (waits.json): a
change that raises one says why. ``make verify-gpu`` runs the same on a real one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu import device, varlen
from tests.ranks import ENVIRONMENT, ROOT, leave, run_ranks

FILE = Path(__file__).with_name("waits.json")
COMMON: dict[str, Any] = {
    **{
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "seed": 7,
    },
    **{
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_accumulation_steps": 1,
    },
}
MEASURED = (1, 2)  # Steps whose waits count: the first one has more to do, and the last one's log comes after it.


@dataclass(frozen=True)
class Scenario:
    """A trainer (`build`), its settings, those of the device alone, and how far its losses may be from the CPU's."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    on_device: dict[str, Any] = field(default_factory=dict)
    close: float = 1e-5
    resumes: bool = False


HALF = {"bf16": True}
SCENARIOS: dict[str, Scenario] = {
    "sft": Scenario("sft"),
    # The CPU's run is float32: rounding to eight bits is what is left between them.
    "sft bf16": Scenario("sft", on_device=HALF, close=0.05),
    "sft lora": Scenario("sft", {"lora": True, "learning_rate": 0.5}),
    "sft weights in bf16": Scenario("sft", on_device={"weights": torch.bfloat16}, close=0.05),
    # Calls of variable-length attention, which stand-ins answer on the pretended device (a real one wants half precision).
    "sft segments": Scenario("sft", on_device={"segments": True}),
    "sft segments in bf16": Scenario("sft", on_device=HALF | {"segments": True}, close=0.05),
    "sft packed segments": Scenario("sft", {"packing": True, "max_length": 64}, {"segments": True}),
    "dpo segments": Scenario("dpo", on_device={"segments": True}),
    "grpo segments": Scenario("grpo", {"rollout_engine": "native", "long": True}, {"segments": True}),
    # A CPU has no backward pass of it, and its kernels need heads of at least 16.
    "sft flex_attention": Scenario("sft", {"heads": 2}, on_device={"attention": "flex_attention"}),
    "sft packed": Scenario("sft", {"packing": True, "max_length": 64}),
    "sft checkpointing": Scenario("sft", on_device={"gradient_checkpointing": True}),
    "sft offloading": Scenario("sft", on_device={"activation_offloading": True}),
    "sft adamw": Scenario("sft", {"optim": "adamw_torch_fused", "learning_rate": 1e-3}),
    "sft resumed": Scenario("sft", {"save_strategy": "steps", "save_steps": 2}, resumes=True),
    "dpo": Scenario("dpo"),
    "dpo lora": Scenario("dpo", {"lora": True, "learning_rate": 0.5}),
    "kto": Scenario("kto"),
    "bco": Scenario("bco"),
    "cpo": Scenario("cpo"),
    "orpo": Scenario("orpo"),
    "tpo": Scenario("tpo"),
    "reward": Scenario("reward"),
    "grpo native, beginnings in common": Scenario("grpo", {"rollout_engine": "native", "long": True}),
    "grpo hf": Scenario("grpo", {"rollout_engine": "hf"}),
    "grpo paged": Scenario("grpo", {"rollout_engine": "paged"}),
    # What `auto` chooses on CUDA where vLLM is not installed.
    "grpo native": Scenario("grpo", {"rollout_engine": "native"}, on_device={"rollout_engine": "auto"}),
    # A rounded policy draws other completions, and nothing of the two can be compared.
    "grpo bf16": Scenario("grpo", {"rollout_engine": "native"}, on_device=HALF, close=math.inf),
    "rloo": Scenario("rloo", {"rollout_engine": "native"}),
    "ppo": Scenario("ppo"),
    "a2po": Scenario("a2po", {"rollout_engine": "native"}),
    "async grpo": Scenario("async grpo"),
    "online dpo": Scenario("online dpo", {"rollout_engine": "native"}),
    "gkd": Scenario("gkd", {"lmbda": 1.0, "num_generations": 2, "rollout_engine": "native"}),
    "sft qwen2_vl": Scenario("sft qwen2_vl"),
    "grpo qwen2_vl": Scenario("grpo qwen2_vl"),
}


def build(kind: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A trainer on a two-layer model."""
    from tests.conftest import build_model, build_tokenizer
    from tests.extensions.asynchronous import helpers as asynchronous
    from tests.matrix import adapter, pictured
    from tests.methods import helpers

    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    settings = COMMON | settings
    settings |= adapter(settings.pop("lora", False))
    model = build_model(len(tokenizer), num_attention_heads=settings.pop("heads", 4)).to(
        settings.pop("weights", torch.float32)
    )
    model.set_attn_implementation(settings.pop("attention", "sdpa"))
    # The helpers of each method's own tests.
    of = lambda name, place="methods": importlib.import_module(f"tests.{place}.{name}")  # noqa: E731
    four, sampled = settings | {"per_device_train_batch_size": 4}, settings | {"engine": "native"}
    makers: dict[str, Callable[[], Any]] = {
        "sft": lambda: helpers.sft(folder, tokenizer, model, **settings),
        "dpo": lambda: of("test_dpo").dpo(folder, tokenizer, **four),
        "reward": lambda: of("test_reward").reward(folder, tokenizer, **four),
        "grpo": lambda: helpers.grpo(folder, tokenizer, beta=0.05, **sampled),
        "rloo": lambda: of("test_rloo").rloo(folder, tokenizer, **sampled),
        "ppo": lambda: of("test_ppo", "extensions.experimental").ppo(folder, tokenizer, **sampled),
        "a2po": lambda: of("test_a2po", "extensions.experimental").build(
            folder, tokenizer, helpers.count_a, **sampled | {"filter_all_incorrect": False}
        ),
        "online dpo": lambda: of("test_online_dpo", "extensions.experimental").make(folder, tokenizer, **settings),
        "async grpo": lambda: asynchronous.trainer(folder, tokenizer, written(asynchronous.sample), **settings),
        "gkd": lambda: gkd(folder, tokenizer, settings, of("test_distillation")),
        **{name: lambda name=name: of("test_judged").make(name, folder, tokenizer, **four) for name in ("kto", "bco")},
        **{
            name: lambda name=name: of("test_reference_free").make(name, folder, tokenizer, **four)
            for name in ("cpo", "orpo", "tpo")
        },
    }
    if settings.pop("long", False):
        return helpers.grpo(folder, tokenizer, engine="native", data=told(16), beta=0.05, **settings)
    if kind in makers:
        return makers[kind]()
    return pictured(*kind.split(), folder, settings | {"per_device_train_batch_size": 2, "shuffle_dataset": False})


def written(sample: Callable[..., Any]) -> Callable[[int, int], Any]:
    """Samples of a worker: of uneven lengths, better and worse by turns."""

    def make(number: int, version: int) -> Any:
        tokens = [(number * 7 + k) % 250 + 3 for k in range(1 + number % 5)]
        return sample(number // 2, version, written=tokens, advantage=(-1.0) ** number * (1 + number % 3))

    return make


def told(count: int) -> Any:
    """Prompts with a long beginning in common, as those with a system message have."""
    import datasets

    system = {"role": "system", "content": "a number is a number " * 8}
    rows = [{"prompt": [system, {"role": "user", "content": f"What is {i}?"}], "answer": i} for i in range(count)]
    return datasets.Dataset.from_list(rows)


def gkd(folder: Path, tokenizer: Any, settings: dict[str, Any], helpers: Any) -> Any:
    """On answers that it samples itself."""
    from posttrain import GKDConfig, GKDTrainer
    from tests.conftest import build_model

    args = GKDConfig(str(folder), **(helpers.BASE | {"use_cpu": False} | settings))
    data = {"train_dataset": helpers.answers(16), "processing_class": tokenizer}
    return GKDTrainer(build_model(len(tokenizer)), build_model(len(tokenizer), seed=1), args, **data)


def run(name: str, where: str, folder: Path) -> dict[str, Any]:
    """Losses and norms of every step, and on a pretended device the waits of one.

    Args:
        name: Of `SCENARIOS`.
        where: ``cpu`` or ``cuda``.
        folder: For checkpoints.
    """
    from transformers import TrainerCallback

    scenario = SCENARIOS[name]
    settings = scenario.settings | (scenario.on_device if where == "cuda" else {}) | {"use_cpu": where == "cpu"}
    begun: list[dict[str, Counter[str]]] = []

    class Begun(TrainerCallback):
        def on_step_begin(self, *given: Any, **options: Any) -> None:
            begun.append({kind: Counter(lines) for kind, lines in device.WAITS.by_line.items()})

    stands_in = settings.pop("segments", False) and device.pretends()
    with varlen.standing_in() if stands_in else nullcontext():
        trainer = build(scenario.kind, folder, settings)
        assert not stands_in or not trainer.layout.dense_mask
        trainer.add_callback(Begun())
        trainer.train()
    if scenario.resumes:
        trainer = build(scenario.kind, folder, settings)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found = {
        "device": str(next(trainer.model.parameters()).device),
        "engine": getattr(trainer.args, "rollout_engine", None),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "norms": [float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row],
        "lengths": [row[n] for row in trainer.state.log_history for n in row if n == "completions/max_length"],
        "peak": torch.cuda.max_memory_allocated() if where == "cuda" else 0,
        "waits": {kind: most(begun, kind) for kind in device.WAITS.by_line},
    }
    return found


def most(begun: list[dict[str, Counter[str]]], kind: str) -> dict[str, int]:
    """By line, the most waits of a measured step."""
    steps = [begun[i + 1][kind] - begun[i][kind] for i in MEASURED]
    return dict(sorted((line, max(step[line] for step in steps)) for line in set().union(*steps)))


def gap(one: dict[str, Any], two: dict[str, Any]) -> float:
    """The largest distance of losses and gradient norms, in shares of them where they are above 1."""
    pairs = [pair for key in ("losses", "norms") for pair in zip(one[key], two[key], strict=True)]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def pretended(name: str, folder: Path) -> dict[str, Any]:
    """What a scenario finds on the pretended device, in a process that ends with it."""
    found = run_ranks(
        "tests.gpu.scenarios", "--on", "cuda", name, processes=1, folder=folder, timeout=120, pretends=True
    )
    return found[name]


def alone(names: Sequence[str], where: str, *, pretend: bool = False) -> dict[str, Any]:
    """By name, what scenarios find in a process of their own, on a CPU or a GPU; ``failed`` of one that ends with an error."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "tests.gpu.scenarios",
            "--on",
            where,
            *(["--pretend"] if pretend else []),
            *names,
        ]
        env = os.environ | ENVIRONMENT | {"POSTTRAIN_TEST_RESULT": str(result)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
        if not result.exists():
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(result.read_text(encoding="utf-8"))


def beside_cpu(names: Sequence[str], *, pretend: bool) -> dict[str, Any]:
    """By name how far a GPU's losses and norms are from the CPU's, "finite" where both draw other completions, or what failed."""
    gpu, cpu = alone(names, "cuda", pretend=pretend), alone(names, "cpu")
    found: dict[str, Any] = {}
    for name in names:
        if failed := gpu[name].get("failed") or cpu[name].get("failed"):
            found[name] = f"FAILED: {failed}"
        elif not all(math.isfinite(loss) for loss in gpu[name]["losses"]):
            found[name] = f"FAILED: losses {gpu[name]['losses']}"
        elif SCENARIOS[name].close == math.inf or (not pretend and gpu[name]["engine"] in ("hf", "paged")):
            found[name] = "finite"  # The device's own generator draws, or rounding decides what is drawn.
        else:
            found[name] = gap(gpu[name], cpu[name])
    return found


def main(argv: list[str]) -> None:
    """Leave what scenarios find on a device, or write the ceilings of all that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=("cpu", "cuda"))
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(argv)
    names = given.names or list(SCENARIOS)
    if given.pretend:
        device.pretend()
    if given.on:
        leave({name: tried(name, given.on, one=len(names) == 1) for name in names})
        os._exit(0)  # Threads of torch's autograd may outlive the device at the interpreter's end.
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            known[name] = pretended(name, Path(folder))["waits"]
        print(name, {kind: sum(lines.values()) for kind, lines in known[name].items()}, flush=True)
    FILE.write_text(
        json.dumps({name: known[name] for name in SCENARIOS if name in known}, indent=1) + "\n", encoding="utf-8"
    )


def tried(name: str, where: str, *, one: bool) -> dict[str, Any]:
    """As `run`; of several, one that fails says so and the others go on."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(name, where, Path(folder))
        except Exception as error:
            if one:
                raise
            return {"failed": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main(sys.argv[1:])
