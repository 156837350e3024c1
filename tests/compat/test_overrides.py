"""What a subclass overrides by TRL's names is called, or refused before the model loads with the hook that does the job."""

import json
from pathlib import Path

import pytest
import torch

import posttrain as pt
from posttrain import ConfigError
from posttrain.algorithms.async_grpo import AsyncGRPOConfig
from posttrain.compat.overrides import REFUSED as REFUSED_ROWS
from posttrain.compat.overrides import SILENT, hook_for, table
from posttrain.training.config import PUBLIC_IN_TRL
from tests.algorithms import async_helpers
from tests.algorithms.every_trainer import EVERY, data, every
from tests.algorithms.helpers import prompts
from tests.wordings import raises

ROOT = Path(__file__).parents[2]
TRL = json.loads((ROOT / "tests" / "snapshots" / "trl_surface.json").read_text(encoding="utf-8"))["trainers"]
KINDS = {"SFT": "sft", "DPO": "dpo", "KTO": "kto", "Reward": "reward", "RLOO": "rloo", "GRPO": "grpo", "CPO": "cpo"}
KINDS |= {"ORPO": "orpo", "TPO": "tpo", "OnlineDPO": "online_dpo", "A2PO": "a2po", "GMPO": "grpo", "AsyncGRPO": None}
REFUSED = [
    (name, method)
    for name in KINDS
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
    given = {"args": config(str(tmp_path), use_cpu=True, report_to="none"), "train_dataset": prompts()}
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


@pytest.mark.parametrize(("name", "method"), [p for p in REFUSED if not p[1].startswith("_")])
def test_a_public_method_of_trl_that_is_read_is_refused_with_its_hook(name, method, tokenizer, tmp_path):
    trainer = object.__new__(getattr(pt, f"{name}Trainer"))
    if hasattr(type(trainer), method):
        pytest.skip("the adapter has it")
    with pytest.raises(AttributeError) as refusal:
        getattr(trainer, method)
    assert all(word in str(refusal.value) for word in (method, hook_for(type(trainer), method)))


PREPARED = ["sft", "dpo", "kto", "reward", "tpo", "cpo"]


def first_row(trainer):
    return [list(value) if isinstance(value, list) else value for value in trainer.train_dataset[0].values()]


@pytest.mark.parametrize("kind", PREPARED)
def test_rows_that_an_own_preparation_changes_are_those_that_train(kind, tokenizer, tmp_path):
    named = []

    class Mine(EVERY[kind][0]):
        def _prepare_dataset(self, dataset, processing_class, args, *more):
            named.append((more[-1], len(more)))
            dataset = super()._prepare_dataset(dataset.select([1]), processing_class, args, *more)
            assert {"prompt_ids", "chosen_ids", "input_ids"} & set(dataset.column_names)
            return dataset

    settings = {"eval_dataset": data(kind, 3, 8), "shuffle_dataset": False} if kind == "sft" else {}
    own = every(kind, tmp_path / "own", tokenizer, cls=Mine, **settings)
    plain = every(kind, tmp_path / "plain", tokenizer, train=data(kind, 8).select([1]), **settings)
    assert first_row(own) == first_row(plain) and len(own.train_dataset) == 1
    assert named == ([("train", 3), ("eval", 3)] if kind == "sft" else [("train", 1)])


def test_an_own_preparation_that_calls_no_parent_may_return_text_or_tokens(tokenizer, tmp_path):
    class Text(pt.SFTTrainer):
        def _prepare_dataset(self, dataset, *given, **named):
            return dataset.map(lambda row: {"completion": "all alike"})

    class Tokens(pt.SFTTrainer):
        def _prepare_dataset(self, dataset, processing_class, *given, **named):
            return dataset.map(lambda _: {"input_ids": [5, 6, 7]}, remove_columns=dataset.column_names)

    text = every("sft", tmp_path / "text", tokenizer, cls=Text)
    assert tokenizer.decode(text.train_dataset[0]["input_ids"], skip_special_tokens=True).endswith("all alike")
    tokens = every("sft", tmp_path / "tokens", tokenizer, cls=Tokens)
    tokens.train()
    assert list(tokens.train_dataset[0]["input_ids"]) == [5, 6, 7]


def test_what_an_own_preparation_gives_its_parent_is_what_the_parent_uses(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
            formatting_func = lambda row: "short"  # noqa: E731
            return super()._prepare_dataset(
                dataset.select_columns("prompt"), processing_class, args, packing, formatting_func, dataset_name
            )

    rows = every("sft", tmp_path, tokenizer, cls=Mine).train_dataset
    assert {tokenizer.decode(ids, skip_special_tokens=True) for ids in rows["input_ids"][:]} == {"short"}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_by_trl_s_name_are_those_that_train(kind, tokenizer, tmp_path):
    class Mine(EVERY[kind][0]):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) + 3

    rows = data(kind, 8).map(lambda row: {"answer": 0.0})
    run = every(kind, tmp_path, tokenizer, cls=Mine, train=rows)
    run.train()
    assert run.state.log_history[0]["reward"] == pytest.approx(3.0)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_an_override_by_trl_s_names_that_only_calls_its_parent_changes_nothing(kind, tokenizer, tmp_path):
    names = ["_generate_and_score_completions", "_generate", "_generate_single_turn", "_tokenize_prompts"]
    mine = recording(EVERY[kind][0], [*names, "_calculate_rewards"], [])
    runs = [every(kind, tmp_path / cls.__name__, tokenizer, cls=cls) for cls in (mine, EVERY[kind][0])]
    for run in runs:
        run.train()
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=0)


def test_advantages_a_token_are_refused_where_the_ratio_is_one_of_sequences(tokenizer, tmp_path):
    class Mine(pt.RLOOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return output | {"advantages": torch.ones(output["completion_ids"].shape)}

    with raises(ConfigError):
        every("rloo", tmp_path, tokenizer, cls=Mine).train()


def test_a_loss_written_for_trl_s_grpo_trains_as_ours_does(tokenizer, tmp_path):
    class Mine(pt.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            keep = inputs["completion_ids"].size(1)
            logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, keep)
            ratio = torch.exp(logps - logps.detach())
            terms = -ratio * inputs["advantages"][:, None] * inputs["completion_mask"]
            return terms.sum() / inputs["num_items_in_batch"]

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd"}
    rows = data("grpo", 8).map(lambda row, i: {"answer": float(i % 2)}, with_indices=True)
    score = lambda completions, **_: [float(len(text) % 5) for text in completions]  # noqa: E731
    runs = []
    for cls in (Mine, pt.GRPOTrainer):
        run = every("grpo", tmp_path / cls.__name__, tokenizer, cls=cls, train=rows, reward_funcs=score, **settings)
        run.train()
        runs.append(run)
    norms = [[line["grad_norm"] for line in run.state.log_history if "grad_norm" in line] for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and min(norms[0]) > 0


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


def test_every_public_method_that_is_refused_is_known_to_the_trainers():
    assert {name for rows in REFUSED_ROWS.values() for name in rows if not name.startswith("_")} == PUBLIC_IN_TRL


def test_the_page_on_hooks_has_the_table():
    assert table() in (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
