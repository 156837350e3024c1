"""Every method on several processes against one process: ``python -m tests.matrix --page docs/verified.md``.

Each cell trains three optimiser steps of a tiny model, evaluates and saves, and compares losses, gradient norms, the
evaluation loss and the saved weights with those of one process that accumulates as many rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from tests.ranks import leave, part, run_ranks

STEPS, TOLERANCE = 3, 1e-5
WATCHDOG = 60  # Seconds that a cell may take, and the start of the processes.
SERVER = "POSTTRAIN_TEST_SERVER"
# Tables of the page: of whole rows on each process, and of rows that processes divide; one that was not run stays.
TABLES = {False: ("<!-- ranks -->", "<!-- end of ranks -->"), True: ("<!-- sp -->", "<!-- end of sp -->")}
KINDS = ("sft", "sft moe", "reward", "dpo", "orpo", "kto", "grpo", "rloo", "grpo native", "grpo server", "ppo", "gkd")
# With pictures that the second rank has none of.
PICTURED = tuple(f"{method} {family}" for method in ("sft", "dpo", "grpo") for family in ("qwen2_vl", "llava"))
FSDP2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
# Way: processes, arguments of the config.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "DDP": (2, {}),
    "FSDP2": (2, {"fsdp": True, "fsdp_config": FSDP2}),
    "FSDP2-4": (4, {"fsdp": True, "fsdp_config": FSDP2}),
    # Two copies of the model, each in two shards.
    "FSDP2-2x2": (4, {"fsdp": True, "fsdp_config": FSDP2, "hybrid": True}),
    # Rows over 2 and over 4 processes by tokens, then 2 groups of 2.
    "sp2": (2, {"sp": 2}),
    "sp4": (4, {"sp": 4}),
    "sp2x2-DDP": (4, {"sp": 2}),
    "sp2x2-FSDP2": (4, {"sp": 2, "fsdp": True, "fsdp_config": FSDP2}),
    # Checkpoints in shards, of torch.distributed.checkpoint.
    "FSDP2-sharded": (2, {"fsdp": True, "fsdp_config": FSDP2 | {"state_dict_type": "SHARDED_STATE_DICT"}}),
    "ZeRO-2": (2, {"zero": 2}),
    "ZeRO-3": (2, {"zero": 3}),
    "ZeRO-2-4": (4, {"zero": 2}),
    "ZeRO-3-4": (4, {"zero": 3}),
    "ZeRO-2-1": (1, {"zero": 2}),
    "ZeRO-3-1": (1, {"zero": 3}),
}
SHARDED = {"FSDP2": "FSDP", "ZeRO": "DEEPSPEED"}  # What accelerate must call a way, so that none is another by mistake.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": True},
    "passes": {"max_row_tokens": 40},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "frozen": {"freeze_vision": True},
}


DIVIDED = (
    "sft",
    "sft moe",
    "reward",
    "dpo",
    "orpo",
    "kto",
    "grpo",
    "rloo",
    "gkd",
)  # What was shown with rows over processes.
SAMPLED = ("grpo native", "grpo server", "grpo qwen2_vl", "grpo llava")  # By seeds of each rank.


def planned(way: str, kind: str, variant: str) -> bool:
    """Whether a cell is one of the table: each method on every way, and each variant where it changes what is exchanged."""
    if way == "FSDP2-2x2" and kind in SAMPLED:  # Four ranks draw other completions than two.
        return False
    if way.startswith("sp") and not kind.startswith("resume"):
        if kind in PICTURED:  # Four ranks draw other completions than two.
            return variant in ("plain", "frozen") and (way == "sp2" or (kind not in SAMPLED and variant == "plain"))
        return kind in DIVIDED and (
            variant == "plain" or (way == "sp2" and variant in VARIANTS and variant != "frozen")
        )
    if variant == "frozen":
        return kind in PICTURED and way in ("DDP", "FSDP2", "ZeRO-3")
    if variant in VARIANTS and variant != "plain":
        few = variant == "passes" or way == "ZeRO-2"
        return (
            kind in (("sft", "dpo", "grpo") if few else KINDS)
            and kind not in SAMPLED
            and way in ("DDP", "FSDP2", "ZeRO-2")
        )
    return True


def zero(stage: int) -> dict[str, Any]:
    """A DeepSpeed config that leaves everything else to the trainer."""
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        # Else every parameter of a tiny model is too small to be sharded.
        | {"stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }


def trainer_of(kind: str, folder: Path, tokenizer: Any, **settings: Any) -> Any:
    """A trainer on uneven rows; the last evaluation batch leaves a rank without rows."""
    from tests.methods.every_trainer import data, every

    lora = settings.pop("lora", False)
    common = {"optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "max_steps": STEPS, "shuffle_dataset": False}
    common |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 1.0} | settings
    if kind == "gkd":
        from posttrain import GKDConfig, GKDTrainer
        from tests.methods.test_distillation import answers, make

        own = {"cls": GKDTrainer, "config": GKDConfig, "lmbda": 0.0, "max_new_tokens": 8}
        return make(folder, tokenizer, data=answers(24), eval_dataset=answers(9), **adapter(lora), **own, **common)
    if kind in PICTURED:
        return pictured(*kind.split(), folder, common | adapter(lora))
    name = kind.split()[0]
    if name in ("reward", "dpo", "orpo", "kto", "ppo"):
        common.pop("shuffle_dataset")
    keys = {"train": data(name, 24), "eval_dataset": data(name, 9)}
    if kind == "sft moe":
        from tests.methods.helpers import sft
        from tests.methods.test_sft_options import experts

        common |= {"router_aux_loss_coef": 0.5, "data": keys["train"], "eval_dataset": keys["eval_dataset"]}
        return sft(folder, tokenizer, model=experts(tokenizer, "mixtral"), **adapter(lora), **common)
    if name == "rloo":
        from tests.methods.helpers import prompts
        from tests.methods.test_rloo import rloo

        own = {"num_generations": 2, "beta": 0.05, "max_completion_length": 8, "data": prompts(24)}
        return rloo(folder, tokenizer, eval_dataset=prompts(3), **adapter(lora), **(own | common))
    if name == "grpo":
        return grpo_of(kind, folder, tokenizer, common | adapter(lora))
    return every(name, folder, tokenizer, **keys, **adapter(lora), **common)


def adapter(lora: bool) -> dict[str, Any]:
    """LoRA on two projections."""
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}


def grpo_of(kind: str, folder: Path, tokenizer: Any, settings: dict[str, Any]) -> Any:
    """GRPO on scripted completions, or on those of the native engine, in this process or behind a server."""
    from tests.methods.helpers import grpo, prompts

    own = {"num_generations": 2, "beta": 0.05, "max_completion_length": 8, "scale_rewards": "group"}
    engine = {} if kind == "grpo" else {"engine": "native"}
    if kind == "grpo server":
        own |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": os.environ[SERVER]}
    return grpo(folder, tokenizer, data=prompts(24), eval_dataset=prompts(3), **engine, **(own | settings))


def pictured(method: str, family: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A trainer of a tiny vision-language model; what GRPO trains on is of the native engine."""
    import posttrain as pt
    from tests.methods.helpers import SHORT, count_a
    from tests.vision_families import build

    model, processor = build(family)
    with torch.no_grad():
        for parameter in model.parameters():  # As large as they are made, rounding grows tenfold in a step.
            parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
    keys = {"model": model, "processing_class": processor, "peft_config": settings.pop("peft_config", None)}
    keys |= {"train_dataset": half_pictured(method, 24), "eval_dataset": half_pictured(method, 9)}
    if method == "grpo":
        own = {"num_generations": 2, "beta": 0.05, "max_completion_length": 8, "preflight": "off"}
        return pt.GRPOTrainer(reward_funcs=count_a, args=pt.GRPOConfig(str(folder), **(SHORT | own | settings)), **keys)
    settings.pop("shuffle_dataset")
    config, kind = (pt.SFTConfig, pt.SFTTrainer) if method == "sft" else (pt.DPOConfig, pt.DPOTrainer)
    trainer = kind(args=config(str(folder), **(SHORT | {"max_length": None} | settings)), **keys)
    trainer._get_train_sampler = lambda dataset=None: SequentialSampler(trainer.train_dataset)
    return trainer


def half_pictured(method: str, count: int) -> Any:
    """Rows of which two with a picture and two without follow each other, as batches of two are dealt to two ranks."""
    import datasets

    from tests.methods.test_vision_trainers import assistant, png, user
    from tests.vision_families import noise

    columns = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "grpo": ()}[method]
    rows = []
    for i in range(count):
        held = [png(noise(84, 56, i))] if i // 2 % 2 == 0 else []
        answers = {name: assistant(f"{name[0]}{i} is it{' indeed' * (i % 3)}") for name in columns}
        rows.append({"prompt": user(f"which {i}?", len(held)), "images": held} | answers)
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))


def allow_fsdp_on_cpu() -> None:
    """Let accelerate shard on a CPU, where it makes DDP of FSDP without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def init(self: Any, *given: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        made(self, *given, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def work(way: str, folder: Path, cells: list[str]) -> None:
    """What each process runs; the first one leaves what every cell found, as soon as it is known."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from tests.conftest import build_tokenizer

    processes, given = WAYS[way]
    if "fsdp" in given:
        allow_fsdp_on_cpu()
    if "zero" in given:
        given = {"deepspeed": zero(given["zero"])}
    if given.get("hybrid"):
        from accelerate.parallelism_config import ParallelismConfig

        shape = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        given = {name: value for name, value in given.items() if name != "hybrid"} | {"parallelism_config": shape}
    if "sp" in given:
        given = {name: value for name, value in given.items() if name != "sp"} | {
            "parallelism_config": {"sp_size": given["sp"]}
        }
    found = {}
    for cell in cells:
        kind, variant = cell.split("/")
        tokenizer = build_tokenizer()
        tokenizer.pad_token = "<|endoftext|>"
        settings = {**VARIANTS.get(variant, {}), **given, "gradient_accumulation_steps": 4 // processes}
        # KTO's baseline is of the evaluation batch of all ranks, the router's term of that of each.
        settings |= {"per_device_eval_batch_size": 2 if kind == "sft moe" else 8 // processes}
        if kind.startswith("resume"):
            trainer = resumed(way, folder / cell, kind, variant, tokenizer, given)
        else:
            trainer = trainer_of(kind, folder / cell, tokenizer, **settings)
            trainer.train()
        evaluated = trainer.evaluate()
        trainer.save_model(str(folder / cell / "saved"))
        history = [row for row in trainer.state.log_history if "grad_norm" in row]
        kind_of_way = next((kind for name, kind in SHARDED.items() if name in way), "")
        assert kind_of_way in str(trainer.accelerator.distributed_type), trainer.accelerator.distributed_type
        found[cell] = {
            "loss": [row["loss"] for row in history],
            "norm": [float(row["grad_norm"]) for row in history],
            "eval": evaluated.get("eval_loss", evaluated.get("eval_reward")),
        }
        if trainer.accelerator.is_main_process:
            leave(found)
        del trainer
        unset_hf_deepspeed_config()  # One of ZeRO-3 that is still there shards parts of the next model as they are made.


def resumed(way: str, folder: Path, kind: str, origin: str, tokenizer: Any, given: dict[str, Any]) -> Any:
    """A trainer that went on from a checkpoint of ``origin`` after two of four steps.

    Ranks write that checkpoint first, in a run of their own that is not interrupted, and end at the same weights bit for bit.
    """
    from tests.methods.helpers import chats, sft

    processes, _ = WAYS[way]
    common = {"max_steps": 4, "use_cpu": True, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    common |= {
        "weight_decay": 0.1,  # Of some parameters alone.
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // processes,
    }
    common |= given | adapter("lora" in kind)

    def trainer_in(place: Path) -> Any:
        if "grpo" in kind:
            return grpo_of("grpo", place, tokenizer, common)
        return sft(place, tokenizer, data=chats(24), eval_dataset=chats(9), **common)

    whole = Path(str(folder).replace(f"/{way}/", f"/{origin}/")) / "whole"
    if way == origin:
        trainer = trainer_in(whole)
        trainer.train()
        trainer.save_model(str(whole / "saved"))
    trainer = trainer_in(folder)
    trainer.train(resume_from_checkpoint=str(whole / "checkpoint-2"))
    return trainer


@contextlib.contextmanager
def server(folder: Path, wanted: bool) -> Iterator[None]:
    """A thin host of the model that GRPO trains, at the address that ``SERVER`` names."""
    if not wanted:
        yield
        return
    from tests.conftest import build_model, build_tokenizer
    from tests.extensions.serve.test_process import process

    place, tokenizer = folder / "served", build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    build_model(len(tokenizer)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    with process(place, "--model", str(place)) as (url, _, _):
        os.environ[SERVER] = url
        yield


def saved(folder: Path) -> dict[str, Any]:
    """Tensors of a saved folder; of a model with a tower as they are loaded, since not every way writes the hub's names."""
    from safetensors.torch import load_file

    if (folder / "preprocessor_config.json").exists() or (folder / "processor_config.json").exists():
        from transformers import AutoModelForImageTextToText as Auto

        model, told = Auto.from_pretrained(folder, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        return model.state_dict()
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def far(one: dict[str, Any], other: dict[str, Any], one_folder: Path, other_folder: Path) -> dict[str, float]:
    """The largest difference of each figure, absolute below 1 and relative above."""
    a, b = saved(one_folder), saved(other_folder)
    for more, less in ((a, b), (b, a)):
        for name in more.keys() - less.keys():  # Sharded ways save a tied head too.
            assert torch.equal(more[name], more["model.embed_tokens.weight"]), name
    shared = a.keys() & b.keys()
    apart = {"weights": max(float((a[k].float() - b[k].float()).abs().max()) for k in shared)}
    for name in ("loss", "norm", "eval"):
        pairs = zip(*(x[name] if isinstance(x[name], list) else [x[name]] for x in (one, other)), strict=True)
        apart[name] = max(abs(p - q) / max(1.0, abs(p)) for p, q in pairs)
    return apart


def run(way: str, cells: list[str], folder: Path, python: str | None = None) -> dict[str, Any]:
    """Found of each cell: figures, or the end of what was said when it failed; later cells then run in a new launch."""
    kept = folder / "found.json"
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    while rest := [cell for cell in cells if cell not in found]:
        (folder / "result.json").unlink(missing_ok=True)
        failure = "it ended without a result"
        try:
            arguments = ("--worker", way, folder, ",".join(rest))
            with server(folder, any(cell.startswith("grpo server/") for cell in rest)):
                limit = WATCHDOG * (1 + len(rest))
                run_ranks(
                    "tests.matrix", *arguments, processes=WAYS[way][0], folder=folder, timeout=limit, python=python
                )
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        if (folder / "result.json").exists():
            found |= json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if left := [cell for cell in rest if cell not in found]:
            found[left[0]] = failure
        kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def main() -> None:
    """Be a worker, or run cells and print how far they are from one process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "FOLDER", "CELLS"))
    parser.add_argument("--ways", help="by default all; those with DeepSpeed where --python is given")
    parser.add_argument("--kinds", default=",".join(KINDS + PICTURED))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--page", type=Path, help="page whose table is written")
    parser.add_argument("--keep", type=Path, help="folder to keep results in; None takes a temporary one")
    parser.add_argument("--python", help="interpreter of the ways with DeepSpeed")
    args = parser.parse_args()
    if args.worker:
        way, folder, cells = args.worker
        work(way, Path(folder), cells.split(","))
        part()
        return
    named = [(kind, variant) for variant in args.variants.split(",") for kind in args.kinds.split(",")]
    every = [
        "DDP",
        "FSDP2",
        "FSDP2-2x2",
        "sp2",
        "sp4",
        "sp2x2-DDP",
        "sp2x2-FSDP2",
        *(["ZeRO-2", "ZeRO-3"] if args.python else []),
    ]
    ways = args.ways.split(",") if args.ways else every
    cells = {way: [f"{k}/{v}" for k, v in named if planned(way, k, v)] for way in ways}
    # "one" is a way too where it resumes what several wrote.
    base = dict.fromkeys(cell for way in ways for cell in cells[way] if "one" in ways or not cell.startswith("resume"))
    cells["one"] = [cell for cell in base if cell.split("/")[0] not in SAMPLED]
    if drawn := [cell for cell in base if cell.split("/")[0] in SAMPLED]:
        cells["DDP"] = list(dict.fromkeys([*cells.get("DDP", []), *drawn]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        python = {way: args.python for way in ways if "zero" in WAYS[way][1]}
        found = {way: run(way, of_way, folder / way, python.get(way)) for way, of_way in cells.items()}
        results = {(way, cell): compared(found, folder, way, cell) for way in ways for cell in cells[way]}
    for (way, cell), result in results.items():
        print(way, cell, result, flush=True)
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        for divided, (begin, end) in TABLES.items():
            own = {key: result for key, result in results.items() if key[0].startswith("sp") == divided}
            if own:
                head, tail = text.split(begin)[0], text.split(end)[1]
                text = f"{head}{begin}\n{table(own)}\n{end}{tail}"
        args.page.write_text(text, encoding="utf-8")


def compared(found: dict[str, Any], folder: Path, way: str, cell: str) -> Any:
    """Differences of a cell from one process, or what failed.

    The native engine draws with a seed for each rank, so what ranks sample with it is compared with what two ranks do.
    """
    base = "DDP" if cell.split("/")[0] in SAMPLED else "one"
    if cell.startswith("resume"):  # Beside the way that wrote the checkpoint.
        base = cell.split("/")[1]
    if way == base and cell.startswith("resume") and not isinstance(found[way][cell], str):
        whole, again = saved(folder / way / cell / "whole" / "saved"), saved(folder / way / cell / "saved")
        return {"weights": max(float((whole[name] - again[name]).abs().max()) for name in whole)}
    if way == base:
        return "the base of its row"
    for name in (base, way):
        if isinstance(found[name][cell], str):
            return "FAILED: " + found[name][cell][-1200:]
    return far(found[base][cell], found[way][cell], *(folder / name / cell / "saved" for name in (base, way)))


def table(results: dict[tuple[str, str], Any]) -> str:
    """The largest difference of each cell as Markdown, a row a method."""
    columns = list(dict.fromkeys((way, cell.split("/")[1]) for way, cell in results))
    names = [way if variant == "plain" else f"{way}, {variant}" for way, variant in columns]
    lines = [f"| method | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kind in dict.fromkeys(cell.split("/")[0] for _, cell in results):
        shown = [results.get((way, f"{kind}/{variant}"), "-") for way, variant in columns]
        said = [f"{max(one.values()):.0e}" if isinstance(one, dict) else one.split(":")[0] for one in shown]
        lines.append(f"| {kind} | {' | '.join(said)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
