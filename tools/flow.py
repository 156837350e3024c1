#!/usr/bin/env python3
"""Measure the road of a step: the code a reader must follow, apart from machines that can be taken on trust. From the project's root:

    python tools/flow.py                      # figures of SFT, DPO and GRPO beside their goals
    python tools/flow.py --all                # also reward, KTO, RLOO, online DPO, GKD and PPO
    python tools/flow.py --where road_grpo    # what is counted; also quiet_*, machines_*, climbs_*, leaks_*, frames_*, start_*

A *machine* is a file whose inside nobody needs to follow a step: typed values go in, typed values come out, and it calls nothing
back (`MACHINES`). The *road* is all other code of ours that runs. Steps two and three of a tiny run are traced, with the log
line between them; the third begins a second epoch (cached reference log-probs):

    road_*     code lines (no blank lines, comments, docstrings) of the functions of the road that run in steps two and three
    quiet_*    the same in step two alone, without the log line
    machines_* the same of machines
    frames_*   functions of ours on the stack between transformers' `training_step` and the objective's formula; 0 means not found and fails
    climbs_*   places where a call goes back up: into a file that is already on the stack, from another file
    leaks_*    places where a machine calls our code outside machines and shared values (`VALUES`)
    start_*    code lines that run until the end of the first step and not in later ones: construction, checks, first-batch work
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import house

# Paths below the package, by prefix. A file joins by having one entrance that values go through, and leaves when it calls back.
MACHINES = (
    "machines/", "data/forest.py", "data/trie.py", "data/chat.py", "data/templates.py", "data/responses.py", "models/tree_attention.py",
    "models/attention.py", "models/heads.py", "models/logprob.py", "models/lean_layers.py", "models/recurrent/", "rollouts/native/",
    "models/capped_attention.py", "models/llama4.py",
)  # fmt: skip
VALUES = (
    "types.py",
    "errors.py",
    "metrics.py",
    "values.py",
    "fields.py",
    "losses/",
    "integrations/",
    "models/architecture.py",
)
GOALS = {
    "road_sft": 590, "road_dpo": 810, "road_grpo": 1510, "quiet_sft": 410, "quiet_dpo": 575, "quiet_grpo": 1175,
    "machines_sft": 930, "machines_dpo": 960, "machines_grpo": 2020, "frames_sft": 6, "frames_dpo": 6, "frames_grpo": 6,
    "climbs_sft": 0, "climbs_dpo": 1, "climbs_grpo": 2, "leaks_sft": 0, "leaks_dpo": 0, "leaks_grpo": 0,
    "start_sft": 3150, "start_grpo": 3500,
}  # fmt: skip
FIRST, MORE = ("sft", "dpo", "grpo"), ("reward", "kto", "rloo", "online_dpo", "gkd", "ppo")
WHERE = {}


def imported():
    """Import the package and every config and trainer: code that runs while modules are imported is not counted."""
    import datasets  # noqa: F401
    import torch

    torch.set_num_threads(1)
    import posttrain

    for name in dir(posttrain):
        if name.endswith(("Config", "Trainer")):
            getattr(posttrain, name)


def trace(kind):
    """Run four steps of a trainer; returns its figures and what they count."""
    import logging
    import tempfile
    import threading

    import datasets
    import torch
    import transformers

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    import posttrain

    home = os.path.dirname(posttrain.__file__) + os.sep
    short = lambda path: path[len(home) :]
    machine = lambda path: short(path).startswith(MACHINES)
    value = lambda path: short(path).startswith(VALUES)
    made, stepped, quiet, climbs, leaks, phase, stacks = (
        set(),
        set(),
        set(),
        defaultdict(int),
        defaultdict(int),
        ["make"],
        [],
    )
    main, silent = threading.get_ident(), [False]

    def look(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(home) or code.co_name == "<module>":
            return
        key = (code.co_filename, code.co_firstlineno)
        if phase[0] == "make":
            made.add(key)
            return
        if phase[0] != "step":
            return
        stepped.add(key)
        if silent[0]:
            quiet.add(key)
        if code.co_name.startswith("<") or threading.get_ident() != main:  # Comprehensions, lambdas, other threads.
            return
        below, back = [], frame.f_back
        while back is not None:
            if back.f_code.co_filename.startswith(home) and not back.f_code.co_name.startswith("<"):
                below.append(back.f_code)
            elif back.f_code.co_name in ("training_step", "_inner_training_loop"):
                below.append(None)  # transformers' own loop.
            back = back.f_back
        mine = [c for c in below if c is not None]
        if not mine:
            return
        caller = mine[0]
        if caller.co_filename != code.co_filename:
            if (
                not machine(code.co_filename)
                and not value(code.co_filename)
                and any(c.co_filename == code.co_filename for c in mine[1:])
            ):
                climbs[f"{short(caller.co_filename)}:{caller.co_name} -> {short(code.co_filename)}:{code.co_name}"] += 1
            if machine(caller.co_filename) and not machine(code.co_filename) and not value(code.co_filename):
                leaks[f"{short(caller.co_filename)}:{caller.co_name} -> {short(code.co_filename)}:{code.co_name}"] += 1
        if short(code.co_filename).startswith("losses/") and not short(caller.co_filename).startswith("losses/"):
            names = [f"{short(c.co_filename)}:{c.co_name}" for c in mine]
            if any(n.endswith((":training_step", ":train")) for n in names) or None in below:
                inside = mine[: below.index(None)] if None in below else mine
                stacks.append([f"{short(c.co_filename)}:{c.co_name}" for c in [*inside[::-1], code]])

    class Phase(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            phase[0] = "make"  # The first step belongs to the start.

        def on_step_end(self, args, state, control, **kwargs):
            phase[0], silent[0] = "step" if state.global_step < 3 else "done", state.global_step == 1

    model, tokenizer = house.tiny()
    ask = lambda i: [{"role": "user", "content": f"What is {i}?"}]
    say = lambda text: [{"role": "assistant", "content": text}]
    common = {
        "max_steps": 4, "per_device_train_batch_size": 4, "report_to": "none", "bf16": False, "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 2, "gradient_checkpointing": False, "use_cpu": True,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        threading.setprofile(look)
        sys.setprofile(look)
        table = datasets.Dataset.from_list
        pairs = [{"prompt": ask(i), "chosen": say(f"It is {i}."), "rejected": say(f"No, {i + 1}!")} for i in range(8)]
        asked = table([{"prompt": ask(i), "answer": str(i)} for i in range(16)])
        reward = lambda completions, **_: [float(len(c[0]["content"]) % 3) for c in completions]
        group = {"num_generations": 4, "max_completion_length": 8, "rollout_engine": "native"}
        config = lambda name, **more: getattr(posttrain, name)(out, **common, **more)
        chats = table([{"messages": ask(i) + say(f"It is {i}.")} for i in range(8)])
        made_by = {"processing_class": tokenizer}
        if kind == "sft":
            trainer = posttrain.SFTTrainer(model, args=config("SFTConfig"), train_dataset=chats, **made_by)
        elif kind == "dpo":
            trainer = posttrain.DPOTrainer(model, None, config("DPOConfig"), train_dataset=table(pairs), **made_by)
        elif kind == "reward":
            import transformers as hf

            scorer = hf.LlamaForSequenceClassification(hf.LlamaConfig(**model.config.to_dict() | {"num_labels": 1}))
            trainer = posttrain.RewardTrainer(scorer, config("RewardConfig"), train_dataset=table(pairs), **made_by)
        elif kind == "kto":
            rows = [{"prompt": ask(i), "completion": say(f"It is {i}."), "label": bool(i % 2)} for i in range(8)]
            trainer = posttrain.KTOTrainer(model, None, config("KTOConfig"), train_dataset=table(rows), **made_by)
        elif kind == "grpo":
            trainer = posttrain.GRPOTrainer(
                model, reward, config("GRPOConfig", **group), train_dataset=asked, **made_by
            )
        elif kind == "rloo":
            trainer = posttrain.RLOOTrainer(
                model, reward, config("RLOOConfig", **group), train_dataset=asked, **made_by
            )
        elif kind == "online_dpo":
            more = {"max_new_tokens": 8, "max_length": 64, "rollout_engine": "native"}
            trainer = posttrain.OnlineDPOTrainer(
                model, None, reward, args=config("OnlineDPOConfig", **more), train_dataset=asked, **made_by
            )
        elif kind == "gkd":
            more = {"max_new_tokens": 8, "lmbda": 1.0}
            trainer = posttrain.GKDTrainer(
                model, house.tiny()[0], config("GKDConfig", **more), train_dataset=chats, **made_by
            )
        else:
            import transformers as hf

            values = lambda: hf.LlamaForSequenceClassification(
                hf.LlamaConfig(**model.config.to_dict() | {"num_labels": 1})
            )
            more = {"response_length": 8, "num_ppo_epochs": 1}
            trainer = posttrain.PPOTrainer(
                args=config("PPOConfig", **more), processing_class=tokenizer, model=model, ref_model=None,
                reward_model=values(), value_model=values(), train_dataset=asked,
            )  # fmt: skip
        trainer.add_callback(Phase())
        trainer.train()
        sys.setprofile(None)
        threading.setprofile(None)
    split = lambda keys, which: {k for k in keys if machine(k[0]) is which}
    road, calm, machines, start = (
        house.text_of(x) for x in (split(stepped, False), split(quiet, False), split(stepped, True), made - stepped)
    )
    deep = max(stacks, key=len) if stacks else []

    def by_file(rows):
        out = defaultdict(int)
        for key, n in rows.items():
            out[short(key).split(":")[0]] += n
        return [f"{n:5d} {name}" for name, n in sorted(out.items(), key=lambda x: -x[1])]

    figures = {
        "road": sum(road.values()),
        "quiet": sum(calm.values()),
        "machines": sum(machines.values()),
        "frames": len(deep),
        "climbs": len(climbs),
        "leaks": len(leaks),
        "start": sum(start.values()),
    }
    where = {
        "road": by_file(road),
        "quiet": by_file(calm),
        "machines": by_file(machines),
        "frames": deep,
        "climbs": sorted(climbs),
        "leaks": sorted(leaks),
        "start": by_file(start),
    }
    return {f"{k}_{kind}": v for k, v in figures.items()}, {f"{k}_{kind}": v for k, v in where.items()}


def quiet_trace(kind):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return trace(kind)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", metavar="FIGURE")
    parser.add_argument("--all", action="store_true", help="reward models, KTO, RLOO, online DPO, GKD and PPO too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.dont_write_bytecode = True
    imported()  # Each run is a fork of this process: the imports are made once and are no run's own.
    figures = {}
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
        for numbers, where in pool.map(quiet_trace, FIRST + (MORE if args.all else ())):
            figures |= numbers
            WHERE.update(where)
    if args.json:
        print(json.dumps(figures))
        return 0
    if args.where:
        print("\n".join(map(str, WHERE.get(args.where, ["nothing is listed for this figure"]))))
        return 0
    missed = [
        name
        for name, most in GOALS.items()
        if figures[name] > most or (name.startswith("frames") and not figures[name])
    ]
    missed += [
        name for name in figures if name not in GOALS and name.startswith("frames") and not 0 < figures[name] <= 7
    ]
    for name in figures:
        print(f"{'over' if name in missed else 'ok  '}  {name:14} {figures[name]:6d}  goal {GOALS.get(name, '-')}")
    print(f"{len(missed)} figures miss their goal")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
