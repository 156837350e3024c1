"""A loss or step that a subclass writes for TRL's dict of padded tensors is trained with, and evaluated with."""

import logging

import pytest
import torch
from posttrain.trainer.utils import selective_log_softmax
from torch.nn.functional import cross_entropy, logsigmoid

import posttrain as pt
from posttrain import ConfigError
from tests.methods.every_trainer import EVERY, OFFLINE, data, every
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


@pytest.mark.matrix
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


def test_overrides_without_the_count_are_called_without_it(tokenizer, tmp_path):
    """The form of overrides before transformers 4.46."""

    def compute_loss(self, model, inputs, return_outputs=False):
        return super(type(self).user, self).compute_loss(model, inputs, return_outputs)

    def mean(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss

    def training_step(self, model, inputs):
        return super(type(self).user, self).training_step(model, inputs)

    def old_mean(self, model, inputs, return_outputs=False):
        return model(**inputs).loss

    def curve_of(name, methods):
        mine = subclass("sft", **methods)
        mine.user = mine
        own = every("sft", tmp_path / name, tokenizer, cls=mine, train=data("sft", 8), **ACCUMULATED)
        return pytest.approx([*curve(own), own.evaluate(data("sft", 3))["eval_loss"]], rel=1e-5)

    plain = curve_of("plain", {})
    assert curve_of("chained", {"compute_loss": compute_loss}).expected == plain
    assert curve_of("step", {"training_step": training_step}).expected == plain
    assert curve_of("mean", {"compute_loss": old_mean}).expected == curve_of("new", {"compute_loss": mean})


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


def test_a_key_of_an_older_layout_names_the_columns_with_the_same_order(tokenizer, tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return inputs["input_ids_chosen"]

    rows = data("reward", 8).add_column("margin", [0.5] * 8)
    own = every("reward", tmp_path, tokenizer, cls=subclass("reward", compute_loss=compute_loss), train=rows)
    with pytest.raises(KeyError, match="in two, 'margin' too: the first half of the rows is chosen"):
        own.train()


def test_a_key_of_an_older_layout_names_the_present_keys(tokenizer, tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["chosen_input_ids"])[0]

    mine = every("dpo", tmp_path, tokenizer, cls=subclass("dpo", compute_loss=compute_loss), train=data("dpo", 8))
    with pytest.raises(KeyError, match=r"'chosen_input_ids' is not a key.*'completion_mask'.*first half of the rows"):
        mine.train()


def test_outputs_of_super_have_the_padded_logits(tokenizer, tmp_path):
    shapes = []

    class Mine(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            assert outputs["logits"] is outputs.logits is outputs[1] and outputs["loss"] is outputs[0] is loss
            assert outputs["logp"] is outputs.logp
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


def test_prepared_inputs_are_those_of_the_loss_and_are_prepared_once(tokenizer, tmp_path):
    called = []

    class Mine(pt.DPOTrainer):
        def _prepare_inputs(self, inputs):
            called.append(super()._prepare_inputs(inputs))
            return called[-1]

        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs["mine"] = 1
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert inputs is called[-1] and inputs["mine"] == 1
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    own, plain = (every("dpo", tmp_path / c.__name__, tokenizer, cls=c) for c in (Mine, pt.DPOTrainer))
    assert curve(own) == pytest.approx(curve(plain), rel=1e-5)
    assert len(called) == 1


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


def first_ignored(inputs, copied):
    """Labels without those of the first trained tokens, in the tensor that was handed over or in a copy."""
    labels = inputs["labels"].clone() if copied else inputs["labels"]
    labels[:, :12] = -100
    inputs["labels"] = labels
    return inputs


def edited_in(place, copied):
    """A subclass of SFT that edits labels in one of the hooks that get them."""

    class Loss(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, first_ignored(inputs, copied), return_outputs, num_items_in_batch)

    class Step(pt.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, first_ignored(inputs, copied), num_items_in_batch)

    class Prepared(pt.SFTTrainer):
        def _prepare_inputs(self, inputs):
            return first_ignored(super()._prepare_inputs(inputs), copied)

    class Samples(pt.SFTTrainer):
        def get_batch_samples(self, *given):
            samples, count = super().get_batch_samples(*given)
            return [first_ignored(one, copied) for one in samples], count

    return {cls.__name__: cls for cls in (Loss, Step, Prepared, Samples)}[place]


@pytest.mark.parametrize("place", ["Loss", "Step", "Prepared", "Samples"])
def test_labels_edited_in_place_count_as_those_of_a_copy(place, tokenizer, tmp_path):
    settings = {"train": data("sft", 8), "eval_dataset": data("sft", 3, 8), **ACCUMULATED}
    plain = every("sft", tmp_path / "plain", tokenizer, **settings)
    runs = [every("sft", tmp_path / str(c), tokenizer, cls=edited_in(place, c), **settings) for c in (False, True)]
    curves = [curve(run) for run in runs]
    assert curves[0] == curves[1]
    assert 0 < curves[0][0] < 0.9 * curve(plain)[0]
    # One evaluation batch is a step of its own, of the labels that are left.
    evaluated = [run.evaluate()["eval_loss"] for run in runs]
    assert evaluated[0] == evaluated[1] > 3


def test_numbers_of_a_row_edited_in_place_are_trained(tokenizer, tmp_path):
    class Mine(pt.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["advantages"].zero_()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    score = lambda completions, **_: [float(len(text) % 5) for text in completions]  # noqa: E731
    runs = [every("grpo", tmp_path / c.__name__, tokenizer, cls=c, reward_funcs=score) for c in (Mine, pt.GRPOTrainer)]
    for run in runs:
        run.train()
    norms = [run.state.log_history[0]["grad_norm"] for run in runs]
    assert norms[0] == 0 < norms[1]


def other(labels):
    labels[labels != -100] = 7


def unignored(labels):
    labels[:] = 7


EDITS = {
    "completion_mask": ("dpo", lambda inputs: inputs["completion_mask"].zero_()),
    "input_ids": ("sft", lambda inputs: inputs["input_ids"].add_(1)),
    "attention_mask": ("dpo", lambda inputs: inputs["attention_mask"].zero_()),
    "completion_ids": ("grpo", lambda inputs: inputs["completion_ids"].zero_()),
    "labels": ("sft", lambda inputs: other(inputs["labels"])),
    "labels of prompts": ("sft", lambda inputs: unignored(inputs["labels"])),
    "labels without a value": ("sft", lambda inputs: inputs.pop("labels")),
    "position_ids": ("sft", lambda inputs: inputs.update(position_ids=inputs["input_ids"])),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_an_edit_that_the_batch_cannot_follow_is_refused_by_name(name, tokenizer, tmp_path):
    kind, edit = EDITS[name]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        edit(inputs)
        return super(mine, self).compute_loss(model, inputs, return_outputs, num_items_in_batch)

    mine = subclass(kind, compute_loss=compute_loss)
    with raises(ConfigError, repr(name.split()[0])):
        every(kind, tmp_path, tokenizer, cls=mine).train()


def thrice(place):
    """A subclass of SFT that says three times the label tokens, in one of the places that transformers has for it."""

    class Items(pt.SFTTrainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            assert all("labels" in one for one in batch_samples)
            return 3 * super()._get_num_items_in_batch(batch_samples, device)

    class Samples(pt.SFTTrainer):
        def get_batch_samples(self, *given):
            samples, count = super().get_batch_samples(*given)
            assert all("labels" in one for one in samples)
            return samples, count * 3

    class Step(pt.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch * 3)

    class Loss(pt.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch * 3)

    return {cls.__name__: cls for cls in (Items, Samples, Step, Loss)}[place]


@pytest.mark.parametrize("place", ["Items", "Samples", "Step", "Loss"])
def test_a_count_that_a_subclass_says_divides_the_loss(place, tokenizer, tmp_path):
    settings = {"train": data("sft", 8), **ACCUMULATED}
    own = every("sft", tmp_path / "own", tokenizer, cls=thrice(place), **settings)
    plain = every("sft", tmp_path / "plain", tokenizer, **settings)
    for run in (own, plain):
        run.train()
    norms = [run.state.log_history[0]["grad_norm"] for run in (own, plain)]
    assert norms[0] == pytest.approx(norms[1] / 3, rel=1e-5)
    losses = [run.state.log_history[0]["loss"] for run in (own, plain)]
    assert losses[0] == pytest.approx(losses[1] / 3, rel=1e-5)


def test_a_count_of_its_own_reaches_an_own_loss(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            return 2 * sum((one["labels"][:, 1:] != -100).sum() for one in batch_samples)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            labels = inputs["labels"][:, 1:].flatten()
            return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum") / num_items_in_batch

    settings = {"train": data("sft", 8), **ACCUMULATED}
    own, plain = (every("sft", tmp_path / c.__name__, tokenizer, cls=c, **settings) for c in (Mine, pt.SFTTrainer))
    assert curve(own)[0] == pytest.approx(curve(plain)[0] / 2, rel=1e-5)


def test_a_count_reaches_a_loss_function(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, 123)

    seen = []

    def mine(outputs, labels, num_items_in_batch):
        seen.append(float(num_items_in_batch))
        return outputs.logits.mean()

    every("sft", tmp_path, tokenizer, cls=Mine, compute_loss_func=mine).train()
    assert seen == [123.0]


def test_a_count_written_in_the_dict_divides_the_loss_of_an_online_method(tokenizer, tmp_path):
    class Mine(pt.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["num_items_in_batch"].mul_(4)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    score = lambda completions, **_: [float(len(text) % 5) for text in completions]  # noqa: E731
    settings = {"reward_funcs": score, "loss_type": "dapo"}
    runs = [every("grpo", tmp_path / c.__name__, tokenizer, cls=c, **settings) for c in (Mine, pt.GRPOTrainer)]
    for run in runs:
        run.train()
    norms = [run.state.log_history[0]["grad_norm"] for run in runs]
    assert norms[0] == pytest.approx(norms[1] / 4, rel=1e-5) and norms[1] > 0


@pytest.mark.parametrize("count", [0, -3.0, float("nan")])
def test_a_count_that_cannot_divide_is_refused(count, tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, count)

    with raises(ConfigError, f"{float(count):g}"):
        every("sft", tmp_path, tokenizer, cls=Mine).train()


def test_a_count_is_refused_where_the_loss_is_no_sum_over_tokens(tokenizer, tmp_path):
    class Loss(pt.DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, 5)

    with raises(ConfigError, "5"):
        every("dpo", tmp_path, tokenizer, cls=Loss).train()

    class Items(pt.DPOTrainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            return 5

    with raises(ConfigError, "Items", "_get_num_items_in_batch"):
        every("dpo", tmp_path, tokenizer, cls=Items)


def test_a_draw_that_goes_around_ours_is_refused(tokenizer, tmp_path):
    class Mine(pt.SFTTrainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            return [next(epoch_iterator) for _ in range(num_batches)], None

    with raises(ConfigError, "Mine.get_batch_samples"):
        every("sft", tmp_path, tokenizer, cls=Mine).train()


def test_the_method_of_older_trl_with_the_name_of_transformers_is_refused_before_training(tokenizer, tmp_path):
    class Mine(pt.DPOTrainer):
        def get_batch_samples(self, model, batch):
            return ["a"], ["b"]

    with raises(ConfigError, "Mine", "get_batch_samples(model, batch)", "LogCompletionsCallback"):
        every("dpo", tmp_path, tokenizer, cls=Mine)


def test_batches_of_a_loader_that_are_read_as_a_dict_are_refused_by_name(tokenizer, tmp_path):
    batches = next(iter(every("sft", tmp_path, tokenizer).get_train_dataloader()))
    assert batches[0].input_ids.shape and [*batches] == batches[:]
    for read in (lambda: batches["labels"], lambda: batches.items(), lambda: dict(**batches)):
        with raises(ConfigError, "list of Batch", "batches[0].loss_mask"):
            read()
