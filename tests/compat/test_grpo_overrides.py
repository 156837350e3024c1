"""Subclasses written for TRL's names: what they override takes effect, or is refused before the model loads."""

import pytest
import torch

from posttrain import ConfigError, GRPOTrainer, RewardError
from posttrain.compat.grpo_overrides import GRPOOverrides
from tests.algorithms.helpers import count_a, grpo_args, prompts, scripted, weights
from tests.conftest import build_model
from tests.wordings import raises


def make(cls, folder, tokenizer, rewards=count_a, engine=None, data=None, **settings):
    return cls(
        build_model(len(tokenizer)), rewards, grpo_args(folder, **settings), train_dataset=data or prompts(),
        processing_class=tokenizer, rollout_engine=engine or scripted(),
    )  # fmt: skip


class Passing(GRPOTrainer):
    """Overrides one name, so that the names beside it can be called."""

    def _generate(self, prompts):
        return super()._generate(prompts)


def first(trainer):
    return next(row for row in trainer.state.log_history if "loss" in row)


@pytest.fixture
def plain(tiny_tokenizer, tmp_path):
    trainer = make(GRPOTrainer, tmp_path / "plain", tiny_tokenizer, max_steps=1)
    trainer.train()
    return weights(trainer)


def test_an_override_that_only_calls_its_parent_changes_nothing(tiny_tokenizer, tmp_path, plain):
    def passing(name):
        return lambda self, *args, **kwargs: getattr(super(Every, self), name)(*args, **kwargs)

    class Every(GRPOTrainer):
        pass

    for name in (
        "_generate_and_score_completions", "_generate", "_generate_single_turn", "_tokenize_prompts", "_calculate_rewards",
    ):  # fmt: skip
        setattr(Every, name, passing(name))
    trainer = make(Every, tmp_path / "mine", tiny_tokenizer, max_steps=1)
    trainer.train()
    assert torch.allclose(weights(trainer), plain, atol=1e-7)


def test_overridden_rewards_are_those_that_train(tiny_tokenizer, tmp_path, plain):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            assert rewards.shape == (8, 1)
            return -rewards

    trainer = make(Mine, tmp_path / "mine", tiny_tokenizer, max_steps=1)
    trainer.train()
    own = make(GRPOTrainer, tmp_path / "own", tiny_tokenizer, lambda **kw: [-x for x in count_a(**kw)], max_steps=1)
    own.train()
    assert torch.allclose(weights(trainer), weights(own), atol=1e-7)
    assert not torch.allclose(weights(trainer), plain, atol=1e-5)
    assert first(trainer)["rewards/count_a/mean"] < 0


def test_rewards_of_the_wrong_shape_are_refused(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return torch.zeros(3)

    with raises(RewardError, "3", "8", "1"):
        make(Mine, tmp_path, tiny_tokenizer).train()


def test_rewards_without_the_parent_are_taken_too(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return torch.tensor([[float(len(ids))] for ids in completion_ids_list])

    trainer = make(Mine, tmp_path, tiny_tokenizer, max_steps=1)
    trainer.train()
    assert first(trainer)["reward"] == pytest.approx(first(trainer)["completions/mean_length"])


def test_an_overridden_turn_is_what_is_trained(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            assert (images, num_generations) == (None, 4)
            return [[5 + i, 7, 2] if i % 2 else [5, 9, 11, 13, 2] for i in range(len(prompt_ids))], None

    trainer = make(Mine, tmp_path, tiny_tokenizer, max_steps=1)
    trainer.train()
    row = first(trainer)
    assert row["completions/mean_length"] == 4.0
    assert row["completions/clipped_ratio"] == 0.0
    assert "sampling/sampling_logp_difference/mean" not in row  # Nothing is known of who sampled it.


def test_log_probs_of_an_overridden_turn_are_corrected_for(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
            ids, _ = super()._generate_single_turn(prompt_ids, images, multimodal_fields)
            return ids, [[-3.0] * len(line) for line in ids]

    trainer = make(Mine, tmp_path, tiny_tokenizer, max_steps=1, vllm_importance_sampling_mode="token_truncate")
    trainer.train()
    assert first(trainer)["sampling/sampling_logp_difference/mean"] > 0.5


def test_an_overridden_generation_with_a_mask_and_columns_takes_effect(tiny_tokenizer, tmp_path):
    seen = []

    def reward(completions, verdict, **_):
        seen.extend(verdict)
        return [float(i % 3) for i in range(len(completions))]

    class Mine(GRPOTrainer):
        def _generate(self, prompts):
            ids, completions, _, texts, logps, extra, images, tool_images = super()._generate(prompts)
            masks = [[0] * (len(line) - 1) + [1] for line in completions]  # Only the last token is the model's.
            return ids, completions, masks, texts, logps, extra | {"verdict": ["ok"] * len(ids)}, images, tool_images

    trainer = make(Mine, tmp_path, tiny_tokenizer, reward, max_steps=1, check_rewards=False)
    trainer.train()
    assert seen == ["ok"] * 8
    assert first(trainer)["completions/mean_length"] == 1.0


def test_an_overridden_prompt_is_what_the_engine_sees(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            ids, images, fields = super()._tokenize_prompts(prompts)
            return [line[:2] for line in ids], images, fields

    engine = scripted()
    make(Mine, tmp_path, tiny_tokenizer, engine=engine, max_steps=1).train()
    assert {len(request.prompt_ids) for request in engine.requests} == {2}


@pytest.mark.parametrize("name", ["_generate_single_turn", "_tokenize_prompts"])
def test_overrides_that_a_rollout_function_goes_around_are_refused(tiny_tokenizer, tmp_path, name):
    subclass = type("Mine", (GRPOTrainer,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Mine overrides {name}, which tools, environments and rollout_func"):
        subclass(
            build_model(len(tiny_tokenizer)), count_a, grpo_args(tmp_path), train_dataset=prompts(),
            processing_class=tiny_tokenizer, rollout_func=lambda prompts, trainer: {},
        )  # fmt: skip


@pytest.mark.parametrize("per_token", [False, True])
def test_changed_advantages_are_those_that_train(tiny_tokenizer, tmp_path, per_token):
    class Mine(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            assert output["completion_ids"].shape == output["completion_mask"].shape
            advantages = -2.0 * output["advantages"]
            output["advantages"] = advantages[:, None] * output["completion_mask"] if per_token else advantages
            return output

    class Ours(GRPOTrainer):
        def advantages(self, generation, table, mode):
            return -2.0 * super().advantages(generation, table, mode)

    settings = {"max_steps": 2, "steps_per_generation": 2, "beta": 0.1}  # With old and reference log-probs.
    mine = make(Mine, tmp_path / "mine", tiny_tokenizer, **settings)
    ours = make(Ours, tmp_path / "ours", tiny_tokenizer, **settings)
    mine.train()
    ours.train()
    assert torch.allclose(weights(mine), weights(ours), atol=1e-7)


def test_a_changed_mask_is_what_is_trained(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["completion_mask"] = torch.zeros_like(output["completion_mask"])
            return output

    trainer = make(Mine, tmp_path, tiny_tokenizer, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))


def test_tensors_that_nothing_would_read_are_refused(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions(inputs) | {"advantage": torch.zeros(8)}

    with raises(ConfigError, "'advantage'", "'advantages'"):
        make(Mine, tmp_path, tiny_tokenizer).train()


# Called and looked at -----------------------------------------------------------------------------------------------


def test_padded_log_probs_are_those_of_the_model(tiny_tokenizer, tmp_path):
    """Against the model's own logits, with left-padded prompts, right-padded completions and a temperature."""
    trainer = make(Passing, tmp_path, tiny_tokenizer, temperature=0.7)
    ids = torch.tensor([[0, 5, 6, 7, 8, 9], [4, 5, 6, 7, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        logp, entropy, aux = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 3, compute_entropy=True
        )
        for row, (start, stop) in enumerate([(1, 6), (0, 4)]):
            logits = trainer.model(input_ids=ids[row : row + 1, start:stop]).logits[0] / 0.7
            truth = logits.log_softmax(-1)
            count = int(mask[row, 3:].sum())
            picked = truth[:-1].gather(1, ids[row, start + 1 : stop, None])[-count:, 0]
            assert torch.allclose(logp[row, :count], picked, atol=1e-5)
            assert torch.allclose(entropy[row, :count], -(truth.exp() * truth).sum(-1)[:-1][-count:], atol=1e-5)
    assert aux is None
    assert logp[1, 1:].tolist() == [0.0, 0.0]


def test_the_off_policy_mask_keeps_what_the_chapter_says():
    gaps = torch.tensor([[2.0, 2.0, 9.0], [0.5, 0.5, 9.0], [2.0, 2.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 3)  # Padding must not count.
    kept = GRPOOverrides.get_off_policy_mask(torch.tensor([[1.0], [-1.0], [-1.0]]), -gaps, torch.zeros(3, 3), mask, 1.0)
    assert kept.tolist() == [[1.0], [1.0], [0.0]]
    unknown = torch.full((3, 3), float("nan"))
    assert (
        GRPOOverrides.get_off_policy_mask(-torch.ones(3), -gaps, unknown, mask, 1.0).sum() == 3
    )  # NaN is no evidence.


def test_gamma_weights_are_those_of_the_chapter():
    def phi(advantage, weight):
        ratio = torch.tensor([[weight]]).log()
        return float(GRPOOverrides.get_gamma_weights(torch.tensor([[advantage]]), ratio, torch.ones(1, 1), None))

    found = [phi(1.0, 0.5), phi(1.0, 1.0), phi(1.0, 2.0), phi(-1.0, 0.5), phi(-1.0, 2.0)]
    assert found == pytest.approx([1.1204, 1.0, 0.1992, 0.3398, 1.0827], abs=1e-4)
    silenced = GRPOOverrides.get_gamma_weights(
        torch.ones(1, 1), torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.0]])
    )
    assert float(silenced) < 1e-12  # One masked token silences its sequence.


def test_the_high_entropy_mask_has_its_six_cases(tiny_tokenizer, tmp_path):
    trainer = make(Passing, tmp_path, tiny_tokenizer)
    entropies = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.6, 0.7, 0.8, 0.9, 1.0]])
    every = torch.ones(2, 5)
    counts = [int(trainer.get_high_entropy_mask(entropies, every, q).sum()) for q in (0.8, 0.5, 0.0, 1.0)]
    assert counts == [2, 5, 10, 1]
    assert not trainer.get_high_entropy_mask(entropies, torch.zeros(2, 5), 0.5).any()
    half = torch.cat([torch.ones(1, 5), torch.zeros(1, 5)])
    assert trainer.get_high_entropy_mask(entropies, half, 0.8).nonzero().tolist() == [[0, 4]]


def test_what_is_appended_to_metrics_is_logged_as_its_mean(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self._metrics["train"]["mine/x"].append(1.0)
            self._metrics["train"]["mine/x"].extend([torch.tensor(2.0), 6])
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    trainer = make(Mine, tmp_path, tiny_tokenizer, max_steps=1)
    trainer.train()
    assert first(trainer)["mine/x"] == 3.0


def test_attributes_have_their_old_names(tiny_tokenizer, tmp_path):
    trainer = make(GRPOTrainer, tmp_path, tiny_tokenizer, max_steps=1, beta=0.1)
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
        def advantages(self, generation, table, mode):
            self.reward_weights = [10.0]
            return super().advantages(generation, table, mode)

    trainer = make(Mine, tmp_path, tiny_tokenizer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["reward"] == pytest.approx(rows[0]["rewards/count_a/mean"])
    assert rows[1]["reward"] == pytest.approx(10 * rows[1]["rewards/count_a/mean"])
    with raises(ConfigError, "1"):
        trainer.reward_weights = [1.0, 2.0]


def test_a_class_that_overrides_none_of_these_names_has_nothing_in_its_way(tiny_tokenizer, tmp_path):
    class Mine(GRPOTrainer):
        def advantages(self, generation, table, mode):
            return super().advantages(generation, table, mode)

    assert GRPOOverrides not in type(make(GRPOTrainer, tmp_path / "plain", tiny_tokenizer)).__mro__
    assert type(make(Mine, tmp_path / "mine", tiny_tokenizer)) is Mine
    adapted = type(make(Passing, tmp_path / "passing", tiny_tokenizer))
    assert GRPOOverrides in adapted.__mro__
    assert (adapted.__name__, adapted.__module__) == ("Passing", Passing.__module__)
