"""What a subclass overrides by TRL's names is called, or refused before the model loads with the hook that does the job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import posttrain as pt
from posttrain import ConfigError
from posttrain.compat import trl_names
from posttrain.compat.overrides import UNCALLED, hook_for, table
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from tests.conftest import build_model
from tests.extensions.asynchronous import helpers as async_helpers
from tests.methods.every_trainer import EVERY, data, every
from tests.methods.helpers import prompts

ROOT = Path(__file__).parents[2]
TRL = json.loads((ROOT / "tests" / "snapshots" / "trl_surface.json").read_text(encoding="utf-8"))["trainers"]
KINDS = {"SFT": "sft", "DPO": "dpo", "KTO": "kto", "Reward": "reward", "RLOO": "rloo", "GRPO": "grpo", "CPO": "cpo"}
KINDS |= {"ORPO": "orpo", "TPO": "tpo", "OnlineDPO": "online_dpo", "A2PO": "a2po", "GMPO": "grpo", "AsyncGRPO": None}
SILENT = {row.name.split(".")[1] for row in trl_names.rows() if row.action == "ignore"}
OF_TRANSFORMERS = {name for name in dir(transformers.Trainer) if not name.startswith("__")}
REFUSED = [
    (name, method)
    for name in TRL
    for method in TRL[name]["methods"]
    if hook_for(getattr(pt, f"{name}Trainer"), method) is not None
]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def recording(trainer, methods, seen):
    """A subclass that notes which of its methods are called, and goes on with its parent's."""

    def noted(name):
        def method(self, *args, **kwargs):
            seen.append(name)
            return getattr(super(mine, self), name)(*args, **kwargs)

        return method

    mine = type("Mine", (trainer,), {name: noted(name) for name in methods} | {"__module__": __name__})
    return mine


def made(name, folder, tokenizer, cls, **settings):
    if name == "AsyncGRPO":
        answers = lambda number, version: async_helpers.sample(number // 2, version, advantage=1.0 - 2 * (number % 2))  # noqa: E731
        return async_helpers.trainer(folder, tokenizer, answers, cls=cls, max_steps=1, **settings)
    settings |= {"eval_dataset": data(KINDS[name], 2, 8)}
    if name == "GMPO":
        settings |= {"arguments": pt.GMPOConfig}
    return every(KINDS[name], folder, tokenizer, cls=cls, **settings)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_method_of_trl_that_is_not_refused_is_called(name, tokenizer, tmp_path):
    trainer = getattr(pt, f"{name}Trainer")
    methods = [m for m in TRL[name]["methods"] if hook_for(trainer, m) is None and m not in SILENT]
    seen = []
    run = made(name, tmp_path, tokenizer, recording(trainer, methods, seen), save_strategy="steps", save_steps=1)
    run.train()
    if "_load_optimizer_and_scheduler" in methods:
        run.train(resume_from_checkpoint=True)
    if run.eval_dataset is not None:
        run.evaluate()
    assert set(methods) == set(seen)


@pytest.mark.parametrize(("name", "method"), REFUSED)
def test_every_other_method_of_trl_is_refused_by_name_before_the_model_loads(name, method, tmp_path):
    trainer = getattr(pt, f"{name}Trainer")
    mine = recording(trainer, [method], [])
    config = AsyncGRPOConfig if name == "AsyncGRPO" else getattr(pt, f"{name}Config")
    own = {"teacher_model_server_url": "http://teacher"} if name == "ServerDistillation" else {}
    given = {"args": config(str(tmp_path), use_cpu=True, report_to="none", **own), "train_dataset": prompts()}
    if "reward_funcs" in TRL[name]["positional"]:
        given["reward_funcs"] = len
    with pytest.raises(ConfigError) as refusal:
        mine("a folder that is not there", **given)
    assert all(word in str(refusal.value) for word in (method, "Mine", hook_for(trainer, method)))


@pytest.mark.parametrize("kind", sorted(EVERY))
def test_a_trainer_that_overrides_none_of_these_names_stays_the_class_it_is(kind, tokenizer, tmp_path):
    def helper(self):
        return 1

    mine = type("Mine", (EVERY[kind][0],), {"my_own_helper": helper, "__module__": __name__})
    for cls in (EVERY[kind][0], mine):
        assert type(every(kind, tmp_path / cls.__name__, tokenizer, cls=cls)) is cls


@pytest.mark.parametrize("name", sorted(TRL))
def test_no_private_method_of_trl_s_is_adapted(name):
    trainer = getattr(pt, f"{name}Trainer")
    private = {m for m in TRL[name]["methods"] if m.startswith("_")} - OF_TRANSFORMERS - SILENT
    assert {m for m in private if hook_for(trainer, m) is None} == set()


@pytest.mark.parametrize(("name", "method"), REFUSED)
def test_a_method_of_trl_that_is_read_is_refused_with_its_hook(name, method, tokenizer, tmp_path):
    trainer = object.__new__(getattr(pt, f"{name}Trainer"))
    with pytest.raises(AttributeError) as refusal:
        getattr(trainer, method)
    assert all(word in str(refusal.value) for word in (method, hook_for(type(trainer), method)))


def test_a_step_of_its_own_gets_one_dict_a_micro_batch_whatever_fits_a_row(tokenizer, tmp_path):
    rows = []

    class Mine(pt.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            rows.append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, num_items_in_batch)

    every("sft", tmp_path, tokenizer, cls=Mine, per_device_train_batch_size=4, max_row_tokens=60).train()
    assert rows == [4]


def test_a_property_that_fails_says_what_it_missed(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        @property
        def broken(self):
            return self.not_there_at_all

    with pytest.raises(AttributeError, match="not_there_at_all"):
        _ = object.__new__(Mine).broken


UNCALLED_ROWS = [(cls, name, hook) for cls, rows in UNCALLED.items() for name, hook in rows.items()]


@pytest.mark.parametrize(("name", "method", "hook"), UNCALLED_ROWS)
def test_a_hook_that_a_trainer_goes_around_is_refused(name, method, hook, tokenizer, tmp_path):
    name = {"PostTrainer": "SFTTrainer", "OnlineTrainer": "GRPOTrainer"}.get(name, name)
    mine = recording(getattr(pt, name), [method], [])
    kind = {"PPOTrainer": "ppo", "AsyncGRPOTrainer": None, "SFTTrainer": "sft"}.get(
        name, KINDS.get(name.removesuffix("Trainer"))
    )
    with pytest.raises(ConfigError) as refusal:
        if name == "AsyncDistillationTrainer":
            args = pt.AsyncDistillationConfig(str(tmp_path), use_cpu=True, report_to="none")
            mine(build_model(len(tokenizer)), args, prompts(), tokenizer)
        elif kind is None:
            async_helpers.trainer(tmp_path, tokenizer, None, cls=mine)
        else:
            every(kind, tmp_path, tokenizer, cls=mine)
    assert all(word in str(refusal.value) for word in (method, "Mine", hook))


# What the issue on subclasses names, and what a generation of scripts overrides.
OF_SCRIPTS = [
    "BCOTrainer.get_batch_logps", "DPOTrainer.compute_reference_log_probs", "DPOTrainer.dpo_loss", "DPOTrainer.null_ref_context",
    "DPOTrainer.process_row", "GKDTrainer.generate_on_policy_outputs", "GRPOTrainer._get_per_token_logps",
    "GRPOTrainer._move_model_to_vllm", "KTOTrainer.forward", "KTOTrainer.kto_loss", "RewardTrainer.visualize_samples",
    "RLOOTrainer.generate_completions", "SFTTrainer._prepare_non_packed_dataloader",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_SCRIPTS)
def test_a_method_of_an_older_trl_is_refused_with_its_hook_before_the_model_loads(name, tmp_path):
    trainer, method = name.split(".")
    hook = trl_names.refused("method")[name]
    config = getattr(pt, trainer.replace("Trainer", "Config"))
    given = {"args": config(str(tmp_path), use_cpu=True, report_to="none"), "train_dataset": prompts()}
    given |= {"reward_funcs": len} if trainer in ("GRPOTrainer", "RLOOTrainer") else {}
    for value in (lambda self: None, property(lambda self: None), staticmethod(lambda: None)):
        mine = type("Mine", (getattr(pt, trainer),), {method: value, "__module__": __name__})
        with pytest.raises(ConfigError) as refusal:
            mine("a folder that is not there", **given)
        assert all(word in str(refusal.value) for word in (method, "Mine", hook))


def test_a_helper_by_a_name_of_another_trainer_and_a_plain_attribute_stay_the_users(tokenizer, tmp_path):
    def step(self):
        return 1

    # PPOTrainer.step and KTOTrainer.forward were TRL's, of SFTTrainer they never were; an attribute is no method.
    mine = {"step": step, "forward": step, "_prepare_non_packed_dataloader": None, "__module__": __name__}
    assert type(every("sft", tmp_path, tokenizer, cls=type("Mine", (pt.SFTTrainer,), mine))).step is step


def test_the_table_of_trl_s_names_agrees_with_the_trainers():
    rows = trl_names.rows()
    assert len({(row.kind, row.name) for row in rows}) == len(rows)
    for row in rows:
        assert row.action == "call" or row.replacement, row
        if row.kind != "method":
            continue
        trainer, method = row.name.split(".")
        assert hasattr(getattr(pt, trainer), method) == (row.action == "call"), row
        if hook := re.match(r"(\w+)\(", row.replacement):
            assert hasattr(getattr(pt, trainer), hook[1]), row


def test_the_table_has_every_method_of_trl_s_newest_trainers():
    names = {row.name for row in trl_names.rows() if row.kind == "method"}
    assert {f"{name}Trainer.{method}" for name in TRL for method in TRL[name]["methods"]} <= names


def test_the_table_is_read_only_when_a_name_is_looked_for():
    script = "import posttrain, sys; assert 'posttrain.compat.trl_names' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_page_on_hooks_has_the_table():
    assert table() in (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
