"""What a subclass may override takes effect in training and evaluation alike; what cannot is refused at construction."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import posttrain.algorithms
from posttrain import ConfigError
from tests.algorithms.every_trainer import EVERY, OFFLINE, data, every
from tests.algorithms.helpers import losses

everyone = pytest.mark.parametrize("kind", sorted(EVERY))
ALIKE = sorted(set(OFFLINE) - {"bco"})  # BCO moves its threshold in training, before the loss.


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"sft"}))
def test_a_loss_function_that_would_not_be_called_is_refused(kind, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="compute_loss_func"):
        every(kind, tmp_path, tokenizer, compute_loss_func=lambda *_, **__: 0.0)


@everyone
def test_a_loss_that_wraps_the_trainer_s_is_trained_and_evaluated(kind, tokenizer, tmp_path):
    base = EVERY[kind][0]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = base.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return (3 * loss[0], loss[1]) if return_outputs else 3 * loss

    rows = data(kind, 4)
    settings = {"train": rows if kind in OFFLINE else None, "eval_dataset": rows, "per_device_train_batch_size": 4}
    # Terms that are means over different things are weighed alike only where all rows are one pass.
    settings |= {"per_device_eval_batch_size": 2 if kind in ("sft", "dpo") else 4}
    mine = type("Mine", (base,), {"compute_loss": compute_loss, "__module__": __name__})
    plain = every(kind, tmp_path / "plain", tokenizer, **settings)
    own = every(kind, tmp_path / "own", tokenizer, cls=mine, **settings)
    one, three = plain.evaluate().get("eval_loss"), own.evaluate().get("eval_loss")
    if one is None:  # One completion a prompt is compared with nothing.
        assert three is None
        return
    assert three == pytest.approx(3 * one, rel=1e-4, abs=1e-6)
    plain.train(), own.train()
    assert losses(own)[0] == pytest.approx(3 * losses(plain)[0], rel=1e-3, abs=1e-6)
    if kind in ALIKE and kind != "kto":
        assert losses(own)[0] == pytest.approx(three, rel=1e-3)


def test_a_loss_function_decides_the_evaluation_too(tokenizer, tmp_path):
    def doubled(outputs, labels, num_items_in_batch=None):
        flat = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
        return 2 * cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch

    settings = {"eval_dataset": data("sft", 5), "per_device_eval_batch_size": 2}
    plain = every("sft", tmp_path / "plain", tokenizer, **settings)
    own = every("sft", tmp_path / "own", tokenizer, compute_loss_func=doubled, **settings)
    assert own.evaluate()["eval_loss"] == pytest.approx(2 * plain.evaluate()["eval_loss"], rel=1e-5)


def test_the_best_checkpoint_is_chosen_by_the_user_s_loss(tokenizer, tmp_path):
    class Mine(EVERY["sft"][0]):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            return loss if model.training else torch.tensor(float(self.state.global_step))

    trainer = every(
        "sft", tmp_path, tokenizer, cls=Mine, eval_dataset=data("sft", 3), max_steps=3, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")


def overridden():
    """Private methods of `transformers.Trainer` that a class of this package defines anew."""
    modules = pkgutil.walk_packages(posttrain.algorithms.__path__, "posttrain.algorithms.")
    trainers = {one for m in modules for one in vars(importlib.import_module(m.name)).values() if isinstance(one, type)}
    own = {
        c
        for one in trainers
        if issubclass(one, transformers.Trainer)
        for c in one.__mro__
        if "posttrain" in c.__module__
    }
    private = {name for name in vars(transformers.Trainer) if name.startswith("_") and not name.startswith("__")}
    return {name for one in own for name in vars(one)} & private


def test_the_list_of_private_methods_is_that_of_the_code_and_names_the_version_that_was_tried():
    root = Path(posttrain.__file__).parents[1]
    section = (
        (root / "docs" / "hooks.md").read_text(encoding="utf-8").partition("## Private methods of transformers")[2]
    )
    assert set(re.findall(r"^\| `(_\w+)` \|", section, re.M)) == overridden()
    pinned = re.search(r"^transformers==(.+)$", (root / "constraints" / "cpu.txt").read_text(encoding="utf-8"), re.M)
    assert f"transformers {pinned[1]}" in section
