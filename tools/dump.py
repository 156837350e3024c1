#!/usr/bin/env python3
"""Record what short runs of every trainer compute, and compare two records: a change of structure must not move a bit of it.

    python tools/dump.py FOLDER [-j 2] [--only 'grpo*']        # one process a run
    python tools/dump.py FOLDER --ranks                        # runs on two gloo ranks
    python tools/dump.py --compare A B [--without scored,rows] # first difference of each run; exits 1 if there is one

Both records must come from one machine: CPUs order sums differently. Each run writes a file of JSON lines, one event a line, in
the order of time. Floats are written with all their digits; tensors of more than 4,096 elements are written as a hash.

    rows      the rows that are laid out as batches: token ids, masks, columns
    pass      a forward pass with gradients: every tensor of its batch and of its outputs
    scored    a forward pass without gradients, likewise (reference, old log-probs, evaluation)
    loss      the loss of each backward pass
    gradient  a hash of each parameter's gradient before the optimizer's step
    log       each log line, without times and memory
    table     the rows of each table of completions: rewards, advantages, log-probs
    weights   a hash of each tensor that was saved at the end

Runs are observed through `posttrain.models.forward.forward`, `posttrain.data.forest.collate`, `accelerate.Accelerator.backward`,
a `TrainerCallback`, `save_model` and the folder ``completions``. Trainers are built by ``tests/golden.py`` and helpers of tests.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import accelerate
import torch
import transformers

import posttrain
from posttrain.data.forest import collate
from posttrain.models.forward import forward
from tests import golden
from tests.extensions.asynchronous import test_async_distillation as asynchronous
from tests.extensions.experimental.test_distillation_presets import hinted
from tests.methods.helpers import count_a, every_second, scripted
from tests.methods.test_distillation import answers, make
from tests.methods.test_distillation_scores import served
from tests.methods.test_distillation_teachers import teachers
from tests.ranks import FREE, leave, part, run_ranks

# Log keys that contain one of these depend on the clock or on the process.
TIMED = {*FREE, "memory/", "perf/", "health/generation_share"} - {"epoch"}
LARGE = 4096  # Elements of a tensor that is written as a hash.

# Runs ---------------------------------------------------------------------------------------------------------------------

# Golden curves are made with plain SGD; here Adam, as users have it, may double the last bit.
COMMON = {"optim": "adamw_torch_fused", "learning_rate": 2e-3}
SHORT = COMMON | {"max_steps": 8, "eval_strategy": "no"}
EPOCHS = COMMON | {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch"}
ACCUMULATED = SHORT | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
LORA = {"peft_config": golden.lora()}
# Four micro-batches of each generation, two of them a step, each trained twice: step 3 is in the middle of a window.
WINDOW = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
RESUMED = SHORT | {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
# Groups of six in micro-batches of eight.
STRADDLED = SHORT | {
    "num_generations": 6,
    "steps_per_generation": 3,
    "gradient_accumulation_steps": 3,
    "num_iterations": 1,
}


def letters(completions, **_):
    """A second reward: how many different characters a text has."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


TWO = SHORT | {"rewards": [count_a, letters], "reward_weights": [1.0, 0.3]}


def _distilled(name, data, **own):
    """A trainer that distils another two-layer model."""
    cls, config = getattr(posttrain, f"{name}Trainer"), getattr(posttrain, f"{name}Config")
    common = golden.COMMON | {"eval_strategy": "no", "per_device_train_batch_size": 8, "data": data} | own
    return lambda folder, tokenizer, **settings: make(folder, tokenizer, cls=cls, config=config, **(common | settings))


def _server_distillation(folder, tokenizer, **settings):
    own = {"eval_strategy": "no", "beta": 0.4, "loss_top_k": 1, "teacher_model_server_url": "http://teacher"}
    return served(folder, tokenizer, **(golden.COMMON | own | settings))


def _async_distillation(folder, tokenizer, **settings):
    own = {"eval_strategy": "no", "teacher_model": teachers(tokenizer), "make": asynchronous.written}
    return asynchronous.run(folder, tokenizer, **(golden.COMMON | own | settings))


REWARDED = {"reward_funcs": count_a, "success_reward_threshold": 2.0}
BUILDERS = golden.CASES | {
    "distillation": _distilled("Distillation", hinted(8), num_generations=2),
    "minillm": _distilled("MiniLLM", hinted(8), num_generations=2),
    "sdft": _distilled("SDFT", hinted(8), num_generations=2, teacher=None),
    "sdpo": _distilled("SDPO", hinted(8), num_generations=2, teacher=None, **REWARDED),
    "ssd": _distilled("SSD", hinted(8), num_generations=2, teacher=None),
    "iwopd": _distilled("IWOPD", hinted(8), num_generations=2),
    "gold": _distilled("GOLD", answers(8), lmbda=0.0),
    "server_distillation": _server_distillation,
    "async_distillation": _async_distillation,
}
RUNS = {name: (name, COMMON) for name in BUILDERS}
RUNS |= {
    "sft_epochs": ("sft", EPOCHS),
    "sft_accumulated": ("sft", ACCUMULATED),
    "sft_resumed": ("sft", RESUMED),
    "dpo_epochs": ("dpo", EPOCHS),
    "dpo_lora_epochs": ("dpo_lora", EPOCHS),
    "dpo_precomputed": ("dpo", SHORT | {"precompute_ref_log_probs": True}),
    "dpo_one_pair_a_pass": ("dpo", SHORT | {"max_row_tokens": 8}),
    "dpo_accumulated": ("dpo", ACCUMULATED),
    "dpo_resumed": ("dpo", RESUMED),
    "grpo_plain": ("grpo", SHORT | {"gradient_accumulation_steps": 1, "num_iterations": 1, "beta": 0.0}),
    "grpo_lora_plain": ("grpo_lora", SHORT | {"num_iterations": 1, "beta": 0.0}),
    "grpo_epochs": ("grpo", EPOCHS | {"per_device_train_batch_size": 16}),
    "grpo_straddled": ("grpo", STRADDLED),
    "grpo_two_rewards": ("grpo", TWO),
    "grpo_truncated": ("grpo", SHORT | {"mask_truncated_completions": True, "engine": scripted()}),
    "grpo_dynamic": ("grpo", SHORT | {"dynamic_sampling": 2, "rewards": every_second}),
    "grpo_sequence": ("grpo", SHORT | {"importance_sampling_level": "sequence", "loss_type": "grpo"}),
    "grpo_one_group_a_pass": ("grpo", SHORT | {"max_row_tokens": 8}),
    "grpo_resumed": ("grpo", RESUMED | WINDOW),
    "rloo_lora": ("rloo", SHORT | LORA | {"beta": 0.05}),
    "rloo_window": ("rloo", SHORT | WINDOW),
    "rloo_straddled": ("rloo", STRADDLED),
    "rloo_two_rewards": ("rloo", TWO),
    "rloo_resumed": ("rloo", RESUMED | WINDOW),
    "online_dpo_lora": ("online_dpo", SHORT | LORA),
    "online_dpo_accumulated": ("online_dpo", ACCUMULATED),
    "online_dpo_two_rewards": ("online_dpo", TWO),
    "online_dpo_resumed": ("online_dpo", RESUMED),
    "ppo_lora": ("ppo", SHORT | LORA),
    "ppo_resumed": ("ppo", RESUMED | {"num_sample_generations": 0}),
    "gkd_lora": ("gkd", SHORT | LORA),
    "gkd_epochs": ("gkd", EPOCHS),
    "gkd_resumed": ("gkd_on_policy", RESUMED),
    "kto_epochs": ("kto", EPOCHS),
}  # fmt: skip
RANKED = {
    name: (name.removesuffix("_lora"), SHORT | (LORA if name.endswith("_lora") else {}))
    for name in ("sft", "sft_lora", "dpo", "dpo_lora", "grpo", "grpo_lora")
}

# Recording ----------------------------------------------------------------------------------------------------------------


def _hash(tensor):
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def _plain(value):
    """A value as JSON holds it: stage types as dicts of their public attributes, tensors as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= LARGE else f"{tuple(value.shape)} {value.dtype} {_hash(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if not item.name.startswith("_")]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


class Recorder(transformers.TrainerCallback):
    """Lines of one run."""

    def __init__(self):
        self.lines, self.step = [], None

    def add(self, what, step=None, **values):
        """Nothing before training begins and after it has ended."""
        step = self.step if step is None else step
        if step is not None:
            self.lines.append(json.dumps({"step": step, "what": what} | _plain(values), separators=(",", ":")))

    def on_train_begin(self, args, state, control, **_):
        """Begin to record."""
        self.step = state.global_step + 1

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        """Record gradients."""
        named = model.named_parameters()
        self.add("gradient", of={name: _hash(p.grad) for name, p in named if p.grad is not None})

    def on_step_end(self, args, state, control, **_):
        """Count what follows to the next step."""
        self.step = state.global_step + 1

    def on_log(self, args, state, control, logs, **_):
        """Record a log line."""
        kept = {key: value for key, value in logs.items() if key != "eps" and not any(name in key for name in TIMED)}
        self.add("log", step=state.global_step, line=kept)

    def on_train_end(self, args, state, control, **_):
        """Stop recording."""
        self.step = None

    def end(self, trainer, folder):
        """Record the tables of completions and the weights."""
        from datasets import Dataset
        from safetensors.torch import load_file

        for file in sorted((folder / "completions").glob("*.parquet")):
            self.add("table", step=int(file.stem[-5:]), file=file.stem, rows=Dataset.from_parquet(str(file)).to_list())
        trainer.save_model(str(folder / "saved"))
        for file in sorted((folder / "saved").glob("*.safetensors")):
            named = load_file(file)
            self.add("weights", step=trainer.state.global_step, of={name: _hash(named[name]) for name in sorted(named)})


def _replace(function, by):
    """Put another function in the place of one, in every module of the package that has it."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "posttrain"]
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, by)


def observe(recorder):
    """Let passes, rows and losses of this process be recorded from here on."""

    @functools.wraps(forward)
    def forward_seen(model, batch, *args, **kwargs):
        outputs = forward(model, batch, *args, **kwargs)
        what = "pass" if torch.is_grad_enabled() and model.training else "scored"
        recorder.add(what, batch=batch, outputs=outputs)
        return outputs

    @functools.wraps(collate)
    def collate_seen(rows, *args, **kwargs):
        recorder.add("rows", rows=list(rows))
        return collate(rows, *args, **kwargs)

    backward = accelerate.Accelerator.backward

    def backward_seen(self, loss, **kwargs):
        recorder.add("loss", loss=loss)
        backward(self, loss, **kwargs)

    _replace(forward, forward_seen)
    _replace(collate, collate_seen)
    accelerate.Accelerator.backward = backward_seen


def record(name, runs, folder):
    """The lines of one run.

    Raises:
        AssertionError: A resumed run differs from the same steps of the run that was not interrupted.
    """
    case, settings = runs[name]
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    recorder = Recorder()
    observe(recorder)

    def train(place, **options):
        torch.manual_seed(0)
        trainer = BUILDERS[case](place, golden.build_tokenizer(), **settings)
        trainer.add_callback(recorder)
        trainer.train(**options)
        recorder.end(trainer, place)

    train(folder / "run")
    if name.endswith("_resumed"):
        whole, recorder.lines = recorder.lines, []
        saved = settings["save_steps"]
        train(folder / "again", resume_from_checkpoint=str(folder / "run" / f"checkpoint-{saved}"))
        rest = [line for line in whole if json.loads(line)["step"] > saved]
        # A resumed process fetches again what was fetched ahead, and `train_loss` is the mean since a process began.
        free = ('"what":"rows"', '"what":"scored"', '"train_loss"')
        sides = [[line for line in lines if not any(text in line for text in free)] for lines in (rest, recorder.lines)]
        if found := difference(*sides):
            raise AssertionError(f"{name}: the resumed run differs from the run that was not interrupted: {found}")
        recorder.lines = whole + recorder.lines
    return recorder.lines


def _run(out, name):
    """Record a run in a process of its own; the error's text where it failed."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet:
        try:
            with contextlib.redirect_stdout(quiet):
                lines = record(name, RUNS, Path(folder))
        except Exception:
            return name, traceback.format_exc()
    (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name, ""


def _rank(name, out):
    """Be one of several ranks."""
    rank, folder = os.environ["RANK"], Path(out, "work", name)
    lines = record(name, RANKED, folder)
    Path(out, f"{name}@2.rank{rank}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if rank == "0":
        leave({})
    part()


# Comparing ----------------------------------------------------------------------------------------------------------------


def _apart(a, b, path=""):
    """Where two values differ first, and both values there."""
    if type(a) is type(b) and isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a or key not in b:
                return f"{path}.{key} is only in {'the first' if key in a else 'the second'}"
            if found := _apart(a[key], b[key], f"{path}.{key}"):
                return found
    elif type(a) is type(b) and isinstance(a, list):
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            if found := _apart(one, other, f"{path}[{index}]"):
                return found
        if len(a) != len(b):
            return f"{path} has {len(a)} and {len(b)} entries"
    elif repr(a) != repr(b):
        return f"{path}: {a!r} and {b!r}"
    return ""


def difference(one, two):
    """The first difference of two lists of lines, as text; empty where they are equal."""
    for number, (a, b) in enumerate(itertools.zip_longest(one, two), 1):
        if a == b:
            continue
        if a is None or b is None:
            event, which = json.loads(a or b), "first" if b is None else "second"
            return f"line {number} is only in the {which}: {event['what']} of step {event['step']}"
        a, b = json.loads(a), json.loads(b)
        if (a["step"], a["what"]) != (b["step"], b["what"]):
            return f"line {number}: {a['what']} of step {a['step']} and {b['what']} of step {b['step']}"
        return f"step {a['step']}, {a['what']} (line {number}){_apart(a, b)}"
    return ""


def compare(a, b, without=()):
    """Print the first difference of each run; returns the number of runs that differ."""
    names = sorted({file.name for folder in (a, b) for file in folder.glob("*.jsonl")})
    differing = 0
    for name in names:
        sides = []
        for folder in (a, b):
            text = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else ""
            skipped = tuple(f'"what":"{what}"' for what in without)
            sides.append([line for line in text.splitlines() if not any(what in line[:60] for what in skipped)])
        if found := difference(*sides):
            differing += 1
            print(f"{name.removesuffix('.jsonl')}: {found}")
    if not names:
        raise SystemExit(f"{a} and {b} hold no dump. Fix: name two folders that this program has written.")
    print(f"{len(names) - differing} of {len(names)} runs are equal")
    return differing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--only", default="*", help="pattern of names of runs")
    parser.add_argument("--ranks", action="store_true", help="the runs on two ranks")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--without", default="", help="kinds of events that a comparison leaves out, with commas")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return _rank(*args.rank)
    if args.compare:
        return int(compare(*args.compare, [what for what in args.without.split(",") if what]) > 0)
    if args.folder is None:
        parser.error("name a folder to write to, or two to --compare")
    out = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in (RANKED if args.ranks else RUNS) if fnmatch.fnmatch(name, args.only)]
    if args.ranks:
        for name in names:
            run_ranks("tools.dump", "--rank", name, out, processes=2, folder=out / "work" / name)
            shutil.rmtree(out / "work")
            print(name, flush=True)
        return 0
    failed = 0
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        for name, error in pool.imap(functools.partial(_run, out), names, chunksize=1):
            print(name, error, flush=True)
            failed += bool(error)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
