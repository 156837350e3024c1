"""Twenty steps of every trainer on a two-layer model: the curves that no refactoring may move.

``python -m tests.golden`` measures all of them and rewrites the file. A change that moves a curve says why in its message.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

from tests.conftest import build_model, build_tokenizer

FILE = Path(__file__).parent / "snapshots" / "golden_curves.json"
# Adam divides by the gradient's own size and so makes whole steps of rounding errors; plain SGD does not.
COMMON = {
    "max_steps": 20,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "learning_rate": 0.02,
    "lr_scheduler_type": "linear",
    "optim": "sgd",
    "seed": 7,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
}
PINNED = ("loss", "grad_norm", "reward", "eval_loss", "eval_reward", "rewards/margins", "kl", "num_tokens")


def lora():
    """Seeded by the trainer."""
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def _sft(folder, tokenizer, **settings):
    from tests.methods.helpers import chats, sft

    return sft(folder, tokenizer, eval_dataset=chats(5), **(COMMON | settings))


def _reward(folder, tokenizer, **settings):
    from tests.methods.test_reward import pairs, reward

    return reward(folder, tokenizer, eval_dataset=pairs(3), **(COMMON | {"per_device_train_batch_size": 4} | settings))


def _dpo(folder, tokenizer, **settings):
    from tests.methods.test_dpo import dpo, pairs

    return dpo(folder, tokenizer, eval_dataset=pairs(3), **(COMMON | {"per_device_train_batch_size": 4} | settings))


def _unpaired(kind):
    def build(folder, tokenizer, **settings):
        from tests.methods.test_judged import answers, make

        own = {"eval_dataset": answers(4), "gradient_accumulation_steps": 1}
        return make(kind, folder, tokenizer, **(COMMON | own | settings))

    return build


def _reference_free(kind):
    def build(folder, tokenizer, **settings):
        from tests.methods.test_reference_free import make, pairs, triples

        rows = (triples() if kind == "tpo" else pairs()).select(range(3))
        own = {"eval_dataset": rows, "per_device_train_batch_size": 4}
        return make(kind, folder, tokenizer, **(COMMON | own | settings))

    return build


def _grpo(folder, tokenizer, **settings):
    from tests.methods.helpers import grpo, prompts

    own = {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.05, "eval_dataset": prompts(4)}
    own |= {"engine": "native", "use_bias_correction_kl": False}  # Pinned with the KL as it was before TRL's default.
    return grpo(folder, tokenizer, **(COMMON | own | settings))


def _gmpo(folder, tokenizer, **settings):
    from posttrain import GMPOConfig, GMPOTrainer
    from tests.methods.helpers import GROUPS, count_a, prompts

    args = GMPOConfig(str(folder), **(GROUPS | COMMON | {"num_iterations": 2} | settings))
    data = {"train_dataset": prompts(), "eval_dataset": prompts(4)}
    return GMPOTrainer(build_model(len(tokenizer)), count_a, args, processing_class=tokenizer, **data)


def _rloo(folder, tokenizer, **settings):
    from tests.methods.helpers import prompts
    from tests.methods.test_rloo import rloo

    return rloo(folder, tokenizer, **(COMMON | {"engine": "native", "eval_dataset": prompts(4)} | settings))


def _ppo(folder, tokenizer, **settings):
    from tests.extensions.experimental.test_ppo import ppo
    from tests.methods.helpers import prompts

    tokenizer.pad_token = "<|endoftext|>"
    return ppo(folder, tokenizer, **(COMMON | {"engine": "native", "eval_dataset": prompts(4)} | settings))


def _online_dpo(folder, tokenizer, **settings):
    from tests.extensions.experimental.test_online_dpo import make
    from tests.methods.helpers import prompts

    return make(folder, tokenizer, **(COMMON | {"eval_dataset": prompts(4)} | settings))


def _a2po(folder, tokenizer, **settings):
    from tests.extensions.experimental.test_a2po import build
    from tests.methods.helpers import count_a

    own = {"eval_strategy": "no", "filter_all_incorrect": False}
    return build(folder, tokenizer, rewards=count_a, engine="native", **(COMMON | own | settings))


def _gkd(folder, tokenizer, **settings):
    from posttrain import GKDConfig, GKDTrainer
    from tests.methods.test_distillation import BASE, answers

    own = {"lmbda": 0.0, "gradient_accumulation_steps": 2, "learning_rate": 0.2, "per_device_eval_batch_size": 4}
    data = {"train_dataset": answers(16), "eval_dataset": answers(5), "processing_class": tokenizer}
    data["peft_config"] = settings.pop("peft_config", None)
    args = GKDConfig(str(folder), **(BASE | COMMON | own | settings))
    return GKDTrainer(build_model(len(tokenizer)), build_model(len(tokenizer), seed=1), args, **data)


def _async_grpo(folder, tokenizer, **settings):
    from tests.extensions.asynchronous.helpers import sample, trainer

    def make(number, version):
        written = [(number * 7 + k) % 250 + 3 for k in range(1 + number % 5)]
        return sample(number // 2, version, written=written, advantage=(-1.0) ** number * (1 + number % 3))

    return trainer(folder, tokenizer, make, **(COMMON | {"eval_strategy": "no"} | settings))


def _with(build, adapter=False, **own):
    """The same trainer with other settings, of which a caller may change some again."""

    def case(folder, tokenizer, **settings):
        return build(folder, tokenizer, **(({"peft_config": lora()} if adapter else {}) | own | settings))

    return case


CASES = {
    "sft": _sft,
    "sft_lora": _with(_sft, adapter=True, learning_rate=0.5),
    "sft_packed": _with(_sft, packing=True, max_length=64),
    "reward": _reward,
    "dpo": _dpo,
    "dpo_lora": _with(_dpo, adapter=True, loss_type=["sigmoid", "sft"]),
    "kto": _unpaired("kto"),
    "bco": _unpaired("bco"),
    "cpo": _reference_free("cpo"),
    "orpo": _reference_free("orpo"),
    "tpo": _reference_free("tpo"),
    "grpo": _grpo,
    "grpo_lora": _with(_grpo, adapter=True, learning_rate=0.2),
    "gmpo": _gmpo,
    "rloo": _rloo,
    "ppo": _ppo,
    "online_dpo": _online_dpo,
    "a2po": _a2po,
    "async_grpo": _async_grpo,
    "gkd": _gkd,
    "gkd_on_policy": _with(_gkd, lmbda=1.0, num_generations=2, beta=1.0),
}
TWO_RANKS = ("sft", "grpo", "gkd")


def build(name, folder, **settings):
    """The trainer of one case, with other settings where some are given."""
    return CASES[name](folder, build_tokenizer(), **settings)


def curve(rows):
    """``{metric: [values by step]}`` of the rows that a run logged; empty where no run of the method logs the metric."""
    return {key: found for key in PINNED if (found := [row[key] for row in rows if key in row])}


def run(name, folder):
    """The rows that one run logs."""
    trainer = build(name, folder)
    trainer.train()
    return trainer.state.log_history


@functools.cache
def rows(name):
    """The same of a run in a folder that goes away; curves and names of metrics are read from one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(name, folder)


def measure(name):
    """The curve of a case; on two gloo processes where the name says so."""
    from tests.ranks import run_ranks

    if not name.endswith("@2"):
        return curve(rows(name))
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks("tests.golden", "--rank", name[:-2], folder, processes=2, folder=Path(folder, "result"))


NAMES = [*CASES, *(f"{name}@2" for name in TWO_RANKS)]


def _rank(name, folder):
    from tests.ranks import leave, part

    found = curve(run(name, folder))
    from accelerate import PartialState

    if PartialState().is_main_process:
        leave(found)
    part()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(*sys.argv[2:4])
    else:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        for case in sys.argv[1:] or NAMES:
            known[case] = measure(case)
            print(case, {key: len(values) for key, values in known[case].items()}, flush=True)
        FILE.write_text(json.dumps({name: known[name] for name in sorted(known)}, indent=1) + "\n")
