"""The loop of docs/own_loop.md computes what `GRPOTrainer` computes, and both call the same functions."""

import re
from pathlib import Path

import datasets
import pytest
import torch

import posttrain
from posttrain import GRPO, DPOConfig, OnlineDPOConfig, Plan, SFTConfig, Spec
from posttrain.errors import ConfigError
from posttrain.extensions.experimental.online_dpo_method import OnlineDPO
from posttrain.loop import build as building
from posttrain.loop import rollout, step
from posttrain.methods.dpo import DPO
from posttrain.methods.sft import SFT
from tests.conftest import build_model
from tests.methods.helpers import count_a, grpo, grpo_args, prompts

PAGE = Path(posttrain.__file__).parents[1] / "docs" / "own_loop.md"
SETTINGS = {"max_steps": 4, "learning_rate": 1e-3}


def loop():
    """Return the function of the page, created again, so that it imports the present functions."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 40
    names = {}
    exec(block, names)
    return names["train"]


def weights_of_page(folder, tokenizer, **settings):
    args = grpo_args(folder, **SETTINGS | settings)
    model = loop()(build_model(len(tokenizer)), prompts(), count_a, args, tokenizer)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights_of_trainer(folder, tokenizer, **settings):
    trainer = grpo(folder, tokenizer, engine="native", **SETTINGS | settings)
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1},
        {"mask_truncated_completions": True},  # All are truncated, so nothing is trained.
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"use_adaptive_entropy": True, "entropy_target": 6.0, "entropy_coef_delta": 0.1, "entropy_coef_max": 1.0},
    ],
)
def test_the_loop_of_the_page_ends_with_the_weights_of_the_trainer(tmp_path, tiny_tokenizer, settings):
    page = weights_of_page(tmp_path / "page", tiny_tokenizer, **settings)
    start = torch.cat([parameter.flatten() for parameter in build_model(len(tiny_tokenizer)).parameters()])
    assert bool((page - start).abs().max() > 1e-3) is not settings.get("mask_truncated_completions", False)
    assert (page - weights_of_trainer(tmp_path / "trainer", tiny_tokenizer, **settings)).abs().max() < 1e-6


class Called(Exception):
    """The replaced function was called."""


@pytest.mark.parametrize(
    ("holder", "name"),
    [(building, "build"), (rollout, "sample"), (rollout, "score"), (GRPO, "advantages"), (step, "forward_backward")],
)
def test_the_page_and_the_trainer_call_the_same_functions(tmp_path, tiny_tokenizer, monkeypatch, holder, name):
    def replaced(*args, **kwargs):
        raise Called(name)

    monkeypatch.setattr(holder, name, replaced)
    if name in posttrain.__all__:
        monkeypatch.setattr(posttrain, name, replaced, raising=False)
    for weights_of in (weights_of_page, weights_of_trainer):
        with pytest.raises(Called, match=name):
            weights_of(tmp_path / weights_of.__name__, tiny_tokenizer)


def test_methods_and_options_that_need_a_trainer_are_refused(tmp_path, tiny_tokenizer):
    common = {"report_to": "none", "bf16": False}
    methods = [
        (OnlineDPO(OnlineDPOConfig(str(tmp_path), **common)), "OnlineDPO"),
        (DPO(DPOConfig(str(tmp_path), **common)), "DPO"),
        (GRPO(grpo_args(tmp_path, dynamic_sampling=2)), "dynamic_sampling=2"),
        (GRPO(grpo_args(tmp_path, neftune_noise_alpha=5.0)), "neftune_noise_alpha=5.0"),
    ]
    for method, named in methods:
        with pytest.raises(ConfigError, match=f"^{named} works only in a trainer"):
            posttrain.build(Plan(Spec(method, "model", prompts()), *[None] * 7))


def test_supervised_rows_are_trained_by_the_functions_too(tmp_path, tiny_tokenizer):
    rows = [{"input_ids": [1, 5 + i, 7, 9, 2]} for i in range(8)]
    method = SFT(SFTConfig(str(tmp_path), report_to="none", bf16=False))
    sets = datasets.Dataset.from_list(rows)
    spec = Spec(method, build_model(len(tiny_tokenizer)), sets, processing_class=tiny_tokenizer)
    run = posttrain.build(posttrain.plan(spec))
    optimizer, losses = torch.optim.AdamW(run.model.parameters(), lr=1e-2), []
    for _ in range(5):
        passes = run.collate(method.rows(rows))
        counts, *_ = posttrain.count(run, passes)
        losses.append(float(posttrain.forward_backward(run, run.model.train(), passes, counts, run.now()).value))
        posttrain.optim_step(run, run.model, optimizer)
    ids = torch.tensor([row["input_ids"] for row in rows])
    plain = build_model(len(tiny_tokenizer))(input_ids=ids, labels=ids).loss
    assert losses[0] == pytest.approx(float(plain), rel=1e-5) and losses[-1] < losses[0] - 0.5


def test_the_gap_to_the_engine_is_measured_without_a_trainer(tmp_path, tiny_tokenizer):
    args = grpo_args(tmp_path, rollout_engine="native")
    plan = posttrain.plan(
        Spec(GRPO(args), build_model(len(tiny_tokenizer)), prompts(), None, tiny_tokenizer, rewards=count_a)
    )
    run = posttrain.build(plan)
    rollouts = rollout.rollout_step(run, list(prompts())[:1] * 4, "train")
    batches = run.collate(rollouts.rows(range(4), skip_truncated=False))
    assert all("engine_logp" in batch.columns for batch in batches)
    counts, *_ = step.count(run, batches)
    found = step.forward_backward(run, run.model, batches, counts, run.now())
    assert all("sampling/sampling_logp_difference/max" in metrics for metrics in found.metrics)
