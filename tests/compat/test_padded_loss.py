"""A loss or step that a subclass writes for TRL's dict of padded tensors is trained with, and evaluated with."""

import logging

import pytest
import torch
from posttrain.trainer.utils import selective_log_softmax
from torch.nn.functional import cross_entropy, logsigmoid

import posttrain as pt
from posttrain import ConfigError
from tests.algorithms.every_trainer import EVERY, OFFLINE, data, every
from tests.wordings import raises

everyone = pytest.mark.parametrize("kind", sorted(set(EVERY) - {"ppo"}))
# Plain descent: Adam would turn rounding of a zero gradient into steps.
ACCUMULATED = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
}


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def subclass(kind, **methods):
    return type("Mine", (EVERY[kind][0],), {**methods, "__module__": __name__})


def curve(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@everyone
def test_super_of_an_override_is_the_same_loss_as_without_one(kind, tokenizer, tmp_path):
    seen = []

    def chained(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        seen.append(dict(inputs))
        return super(self.user, self).compute_loss(model, inputs, return_outputs, num_items_in_batch)

    mine = subclass(kind, compute_loss=chained)
    mine.user = mine
    settings = {"train": data(kind, 8), "eval_dataset": data(kind, 3, 8), **ACCUMULATED}
    own = every(kind, tmp_path / "own", tokenizer, cls=mine, **settings)
    plain = every(kind, tmp_path / "plain", tokenizer, **settings)
    assert curve(own) == pytest.approx(curve(plain), rel=1e-4, abs=1e-6)
    for a, b in zip(own.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    if kind in OFFLINE:
        names = {"input_ids", "attention_mask", "labels" if kind == "sft" else "completion_mask"}
    assert seen and all(names <= set(inputs) for inputs in seen if "advantages" in inputs or kind in OFFLINE)


def test_labels_can_be_read_and_the_model_called_as_in_trl(tokenizer, tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss / num_items_in_batch

    settings = {"train": data("sft", 8), "eval_dataset": data("sft", 3, 8), **ACCUMULATED}
    own = every("sft", tmp_path / "own", tokenizer, cls=subclass("sft", compute_loss=compute_loss), **settings)
    plain = every("sft", tmp_path / "plain", tokenizer, **settings)
    assert curve(own) == pytest.approx(curve(plain), rel=1e-5)
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_a_mean_that_ignores_the_count_of_the_step_is_averaged_over_its_micro_batches(tokenizer, tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss

    rows = data("sft", 1).select([0] * 8)
    own = every("sft", tmp_path, tokenizer, cls=subclass("sft", compute_loss=compute_loss), train=rows, **ACCUMULATED)
    whole = every("sft", tmp_path / "one", tokenizer, train=rows, **ACCUMULATED | {"gradient_accumulation_steps": 1})
    assert curve(own)[0] == pytest.approx(curve(whole)[0], rel=1e-5)


def test_a_documented_preference_objective_of_trl_runs(tokenizer, tmp_path):
    def logps(model, inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        each = selective_log_softmax(logits[:, :-1], inputs["input_ids"][:, 1:])
        return (each * inputs["completion_mask"][:, 1:]).sum(1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            reference = logps(self.ref_model, inputs)
        chosen, rejected = (logps(model, inputs) - reference).chunk(2)
        return -logsigmoid(self.beta * (chosen - rejected)).mean()

    settings = {"train": data("dpo", 8), "eval_dataset": data("dpo", 4, 8), **ACCUMULATED}
    own = every("dpo", tmp_path / "own", tokenizer, cls=subclass("dpo", compute_loss=compute_loss), **settings)
    plain = every("dpo", tmp_path / "plain", tokenizer, **settings)
    assert curve(own) == pytest.approx(curve(plain), rel=1e-5)
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_outputs_of_super_have_the_padded_logits(tokenizer, tmp_path):
    shapes = []

    class Mine(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            shapes.append((tuple(outputs.logits.shape[:2]), tuple(inputs["input_ids"].shape)))
            by_hand = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
            assert float(by_hand) == pytest.approx(float(loss), rel=1e-4)
            return (loss, outputs) if return_outputs else loss

    every("sft", tmp_path, tokenizer, cls=Mine).train()
    assert shapes and all(logits == ids for logits, ids in shapes)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_an_overridden_training_step_gets_one_dict(kind, tokenizer, tmp_path):
    steps = []

    class Mine(EVERY[kind][0]):
        def training_step(self, model, inputs, num_items_in_batch=None):
            steps.append(sorted(inputs))
            return super().training_step(model, inputs, num_items_in_batch)

    settings = {"train": data(kind, 8), **ACCUMULATED}
    own, plain = (every(kind, tmp_path / c.__name__, tokenizer, cls=c, **settings) for c in (Mine, EVERY[kind][0]))
    assert curve(own) == pytest.approx(curve(plain), rel=1e-4, abs=1e-6)
    assert len(steps) == 4


def test_a_training_step_written_out_trains_alike(tokenizer, tmp_path):
    class Mine(pt.DPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    settings = {"train": data("dpo", 8), **ACCUMULATED}
    own, plain = (every("dpo", tmp_path / c.__name__, tokenizer, cls=c, **settings) for c in (Mine, pt.DPOTrainer))
    assert curve(own) == pytest.approx(curve(plain), rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_an_overridden_prediction_step_decides_the_evaluation_loss(kind, tokenizer, tmp_path):
    class Mine(EVERY[kind][0]):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss * 3, logits, labels

    settings = {"train": data(kind, 4), "eval_dataset": data(kind, 4, 8)}
    own, plain = (every(kind, tmp_path / c.__name__, tokenizer, cls=c, **settings) for c in (Mine, EVERY[kind][0]))
    assert own.evaluate()["eval_loss"] == pytest.approx(3 * plain.evaluate()["eval_loss"], rel=1e-4)


def test_prepared_inputs_and_the_inner_loss_are_called(tokenizer, tmp_path):
    called = []

    class Mine(pt.DPOTrainer):
        def _prepare_inputs(self, inputs):
            called.append("inputs")
            return super()._prepare_inputs(inputs)

        def _compute_loss(self, model, inputs, return_outputs):
            called.append("loss")
            return super()._compute_loss(model, inputs, return_outputs)

    own, plain = (every("dpo", tmp_path / c.__name__, tokenizer, cls=c) for c in (Mine, pt.DPOTrainer))
    assert curve(own) == pytest.approx(curve(plain), rel=1e-5)
    assert called == ["inputs", "loss"]


def test_labels_that_a_subclass_ignores_are_not_trained(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["labels"] = torch.where(inputs["input_ids"] % 2 == 0, inputs["labels"], -100)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    own, plain = (every("sft", tmp_path / c.__name__, tokenizer, cls=c) for c in (Mine, pt.SFTTrainer))
    assert 0 < curve(own)[0] < curve(plain)[0]


def test_changed_tokens_are_refused_by_name(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["input_ids"] = inputs["input_ids"][:, :-1]
            return super().compute_loss(model, inputs)

    with raises(ConfigError, "'input_ids'"):
        every("sft", tmp_path, tokenizer, cls=Mine).train()

    class Other(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, {"input_ids": inputs["input_ids"]})

    with raises(ConfigError):
        every("sft", tmp_path, tokenizer, cls=Other).train()


def test_what_it_costs_is_said_once(tokenizer, tmp_path, caplog):
    class Mine(pt.SFTTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return super().compute_loss(model, inputs)

    with caplog.at_level(logging.WARNING):
        trainer = every("sft", tmp_path, tokenizer, cls=Mine)
    assert sum("compute_loss" in r.message and "padded" in r.message for r in caplog.records) == 1
    assert isinstance(trainer, Mine) and type(trainer).__name__ == "Mine"
