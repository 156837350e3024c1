"""What a subclass may override takes effect in training and evaluation alike; what cannot is refused at construction."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import posttrain.trainers
from posttrain import ConfigError, GRPOTrainer
from posttrain.errors import ArgumentTypeError, RolloutError
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Rollout
from tests.conftest import build_model
from tests.methods.every_trainer import EVERY, OFFLINE, data, every
from tests.methods.helpers import chats, count_a, grpo, grpo_args, losses, prompts, scripted, sft, weights
from tests.wordings import raises

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


@pytest.mark.matrix
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
    trainers = {getattr(posttrain, name) for name in posttrain.__all__ if name.endswith("Trainer")}
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


# What a subclass overrides of an online method's way from prompts to what is trained ---------------------------------


def online(cls, folder, tokenizer, rewards=count_a, engine=None, **settings):
    args = grpo_args(folder, **settings)
    given = {"train_dataset": prompts(), "processing_class": tokenizer, "rollout_engine": engine or scripted()}
    return cls(build_model(len(tokenizer)), rewards, args, **given)


def first(trainer):
    return next(row for row in trainer.state.log_history if "loss" in row)


def test_overridden_rewards_are_those_that_train(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def score(self, rollouts, mode):
            self._metrics[mode]["mine/x"].append(1.0)
            self._metrics[mode]["mine/x"].extend([torch.tensor(2.0), 6])
            table = super().score(rollouts, mode)
            return replace(table, values=-table.values)

    mine = online(Mine, tmp_path / "mine", tiny_tokenizer, max_steps=1)
    negated = lambda **columns: [-value for value in count_a(**columns)]  # noqa: E731
    ours = online(GRPOTrainer, tmp_path / "ours", tiny_tokenizer, negated, max_steps=1)
    plain = online(GRPOTrainer, tmp_path / "plain", tiny_tokenizer, max_steps=1)
    for trainer in (mine, ours, plain):
        trainer.train()
    assert torch.allclose(weights(mine), weights(ours), atol=1e-7)
    assert not torch.allclose(weights(mine), weights(plain), atol=1e-5)
    assert first(mine)["mine/x"] == 3.0


def test_overridden_completions_are_those_that_train(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def sample(self, examples, settings):
            prompts = self.prompt_source.token_ids(examples)
            lines = [[5 + i, 7, 2] if i % 2 else [5, 9, 11, 13, 2] for i in range(len(prompts))]
            rollouts = [Rollout(list(p), ids, [], "stop") for p, ids in zip(prompts, lines, strict=True)]
            return RolloutBatch(examples, rollouts, [[{"role": "assistant", "content": "a"}]] * len(rollouts))

    trainer = online(Mine, tmp_path, tiny_tokenizer, max_steps=1)
    trainer.train()
    assert (first(trainer)["completions/mean_length"], first(trainer)["completions/clipped_ratio"]) == (4.0, 0.0)


def test_overridden_rollouts_with_a_mask_and_columns_take_effect(tiny_tokenizer, tmp_path):
    seen = []

    def reward(completions, verdict, **_):
        seen.extend(verdict)
        return [float(i % 3) for i in range(len(completions))]

    class Mine(GRPOTrainer):
        def sample(self, examples, settings):
            batch = super().sample(examples, settings)
            # Only the last token is the model's.
            rollouts = [replace(one, tool_mask=[0] * (len(one.token_ids) - 1) + [1]) for one in batch.rollouts]
            return replace(batch, rollouts=rollouts, extra={"verdict": ["ok"] * len(rollouts)})

    trainer = online(Mine, tmp_path, tiny_tokenizer, reward, max_steps=1, check_rewards=False)
    trainer.train()
    assert seen == ["ok"] * 8
    assert first(trainer)["completions/mean_length"] == 1.0


def test_what_is_sampled_must_be_one_completion_per_example(tiny_tokenizer, tmp_path):
    class Old(GRPOTrainer):
        def sample(self, examples, settings):
            return super().sample(examples, settings).rollouts

    class Short(GRPOTrainer):
        def sample(self, examples, settings):
            return super().sample(examples[:2], settings)

    for cls, found in ((Old, "list"), (Short, "2 completions")):
        with raises(RolloutError, found):
            online(cls, tmp_path, tiny_tokenizer, max_steps=1).train()


@pytest.mark.parametrize("name", ["generate_and_score", "generate", "roll_out", "tokenize", "measured_logps"])
def test_hooks_of_earlier_versions_are_refused_with_those_that_do_their_job(tiny_tokenizer, tmp_path, name):
    mine = type("Mine", (GRPOTrainer,), {name: lambda self, *given: None})
    with raises(ConfigError, name):
        online(mine, tmp_path, tiny_tokenizer)


def test_overridden_advantages_are_those_that_train(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def advantages(self, rollouts, rewards, logps):
            found = super().advantages(rollouts, rewards, logps)
            return replace(found, values=-2.0 * found.values)

    settings = {"max_steps": 2, "steps_per_generation": 2, "beta": 0.1}  # With old and reference log-probs.
    mine = online(Mine, tmp_path / "mine", tiny_tokenizer, optim="sgd", **settings)
    ours = online(GRPOTrainer, tmp_path / "ours", tiny_tokenizer, optim="sgd", **settings | {"max_steps": 1})
    start = weights(ours).clone()
    mine.train(), ours.train()
    assert (weights(mine) - start).dot(weights(ours) - start) < 0


def test_attributes_have_their_old_names(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, max_steps=1, beta=0.1)
    assert trainer.reward_func_names == ["count_a"]
    assert len(trainer.reward_funcs) == 1
    assert trainer.ref_model is trainer.reference.copy
    assert trainer.tools == []
    assert trainer._buffered_inputs is None
    trainer.train()
    logs = trainer._logs
    assert (
        len(logs["prompt"])
        == len(logs["completion"])
        == len(logs["advantages"])
        == len(logs["rewards"]["count_a"])
        == 8
    )
    assert len(trainer._buffered_inputs) == 1
    trainer._buffered_inputs = None
    assert trainer.window.slices is None
    with raises(ConfigError):
        trainer._buffered_inputs = [{}]


def test_weights_of_rewards_can_be_set_while_training(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def advantages(self, rollouts, rewards, logps):
            self.reward_weights = [10.0]
            return super().advantages(rollouts, rewards, logps)

    trainer = online(Mine, tmp_path, tiny_tokenizer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["reward"] == pytest.approx(rows[0]["rewards/count_a/mean"])
    assert rows[1]["reward"] == pytest.approx(10 * rows[1]["rewards/count_a/mean"])
    with raises(ConfigError, "1"):
        trainer.reward_weights = [1.0, 2.0]


def test_a_loss_function_leaves_the_metrics_of_its_predictions(tokenizer, tmp_path):
    def mine(outputs, labels, num_items_in_batch):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    settings = {"eval_dataset": data("sft", 3, 8)}
    plain = every("sft", tmp_path / "plain", tokenizer, **settings)
    own = every("sft", tmp_path / "own", tokenizer, compute_loss_func=mine, **settings)
    for run in (plain, own):
        run.train()
    logs = [[run.state.log_history[0], run.evaluate()] for run in (plain, own)]
    for name in ("entropy", "mean_token_accuracy"):
        assert logs[1][0][name] == pytest.approx(logs[0][0][name], rel=1e-4)
        assert logs[1][1][f"eval_{name}"] == pytest.approx(logs[0][1][f"eval_{name}"], rel=1e-4)


@pytest.mark.parametrize("kind", sorted(EVERY))
def test_no_model_is_refused_by_name(kind, tokenizer, tmp_path):
    trainer = EVERY[kind][0]
    more = {"reward_model": count_a} if kind == "ppo" else {"reward_funcs": count_a} if kind not in OFFLINE else {}
    with raises(ConfigError, trainer.__name__):
        trainer(
            **more,
            processing_class=tokenizer,
            model=None,
            args=EVERY[kind][1](str(tmp_path), use_cpu=True),
            train_dataset=data(kind, 2),
        )


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("formating_func", "did you mean 'formatting_func'?"),
        ("train_datset", "did you mean 'train_dataset'?"),
    ],
)  # fmt: skip
def test_an_argument_that_a_trainer_has_not_is_told_with_where_it_belongs(tmp_path, name, fix):
    from posttrain import SFTConfig, SFTTrainer

    with pytest.raises(ArgumentTypeError) as caught:
        SFTTrainer("nowhere", args=SFTConfig(str(tmp_path)), **{name: 3})
    assert fix in str(caught.value)


def test_a_metric_that_no_evaluation_has_is_told_with_those_it_has(tmp_path, tiny_tokenizer):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "losss"}
    with pytest.raises(
        ConfigError, match=r"'losss': the evaluation has no such metric. The most similar metrics are \['eval_loss'"
    ):
        sft(tmp_path, tiny_tokenizer, eval_dataset=chats(4), max_steps=2, **settings).train()
