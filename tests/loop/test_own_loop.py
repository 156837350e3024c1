"""The loop of docs/own_loop.md computes what `GRPOTrainer` computes, and both call the same functions."""

import re
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain import GRPO, OnlineDPOConfig, Spec
from posttrain.errors import ConfigError
from posttrain.loop import build as building
from posttrain.loop import rollout, step
from posttrain.methods.online_dpo import OnlineDPO
from tests.conftest import build_model
from tests.methods.helpers import count_a, grpo, grpo_args, prompts

PAGE = Path(posttrain.__file__).parents[1] / "docs" / "own_loop.md"
SETTINGS = {"max_steps": 4, "learning_rate": 1e-3}


def loop():
    """Return the function of the page, made anew, so that it imports the present functions."""
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


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}, {"loss_type": "grpo", "scale_rewards": "batch"}])
def test_the_loop_of_the_page_ends_with_the_weights_of_the_trainer(tmp_path, tiny_tokenizer, settings):
    page = weights_of_page(tmp_path / "page", tiny_tokenizer, **settings)
    start = torch.cat([parameter.flatten() for parameter in build_model(len(tiny_tokenizer)).parameters()])
    assert (page - start).abs().max() > 1e-3
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


def test_a_method_that_samples_in_its_own_way_is_refused(tmp_path, tiny_tokenizer):
    method = OnlineDPO(OnlineDPOConfig(str(tmp_path), report_to="none", bf16=False))
    spec = Spec(method, build_model(len(tiny_tokenizer)), prompts(), processing_class=tiny_tokenizer, rewards=count_a)
    with pytest.raises(ConfigError, match="OnlineDPO needs functions of a trainer"):
        posttrain.build(posttrain.plan(spec))
