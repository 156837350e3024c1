"""GRPO with replay: what is kept, what is replaced, and that nothing of a replayed group is another's."""

import math

import pytest
import torch

from posttrain.algorithms.grpo.gmpo import GMPOConfig, GMPOTrainer
from posttrain.algorithms.grpo.gspo_token import GSPOTokenTrainer
from posttrain.algorithms.grpo.replay import (
    GRPOWithReplayBufferConfig,
    GRPOWithReplayBufferTrainer,
    ReplayBuffer,
)
from posttrain.errors import ConfigError
from tests.algorithms.helpers import count_a, grpo_args, losses, prompts, scripted, weights
from tests.conftest import build_model


def build(kind, config, folder, tokenizer, rewards=count_a, data=None, engine=None, **settings):
    base = vars(grpo_args(folder))
    names = ("per_device_train_batch_size", "num_generations", "max_completion_length", "max_steps", "logging_steps")
    fixed = {k: base[k] for k in (*names, "learning_rate", "bf16", "seed", "disable_tqdm")}
    args = config(
        str(folder),
        **(fixed | {"report_to": "none", "save_strategy": "no", "lr_scheduler_type": "constant"} | settings),
    )
    return kind(
        build_model(len(tokenizer)),
        rewards,
        args,
        train_dataset=data if data is not None else prompts(),
        processing_class=tokenizer,
        rollout_engine=engine or scripted(),
    )


def replaying(folder, tokenizer, **settings):
    return build(GRPOWithReplayBufferTrainer, GRPOWithReplayBufferConfig, folder, tokenizer, **settings)


# The buffer -----------------------------------------------------------------------------------------------------------


def test_the_best_are_kept_and_ties_do_not_compare_data():
    buffer = ReplayBuffer(3)
    buffer.add([1.0, 1.0, 1.0, 1.0], [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}])
    assert [item[2] for item in sorted(buffer.heap)] == [
        {"a": 1},
        {"b": 2},
        {"c": 3},
    ]  # Not strictly better: stays out.
    buffer.add([0.5, 2.0], ["low", "high"])
    assert sorted(item[0] for item in buffer.heap) == [1.0, 1.0, 2.0]
    assert buffer.heap[0][0] == 1.0


def test_draws_are_in_proportion_to_the_score():
    buffer = ReplayBuffer(3)
    buffer.add([1.0, 3.0, 0.0], ["one", "three", "never"])
    generator = torch.Generator().manual_seed(0)
    drawn = [buffer.sample(1, generator)[0] for _ in range(2000)]
    assert drawn.count("never") == 0
    assert drawn.count("three") / 2000 == pytest.approx(0.75, abs=0.03)


def test_without_replacement_while_there_are_enough_and_with_it_beyond():
    buffer = ReplayBuffer(4)
    buffer.add([1.0, 2.0, 3.0], ["a", "b", "c"])
    assert sorted(buffer.sample(3)) == ["a", "b", "c"]
    assert len(buffer.sample(7)) == 7
    assert ReplayBuffer(2).sample(1) is None


def test_scores_without_a_sum_are_drawn_evenly():
    buffer = ReplayBuffer(2)
    buffer.add([0.0, 0.0], ["a", "b"])
    assert sorted(buffer.sample(2)) == ["a", "b"]
    buffer.add([-1.0], ["c"])
    negative = ReplayBuffer(2)
    negative.add([-2.0, -1.0], ["a", "b"])
    assert set(negative.sample(50)) == {"a", "b"}


def test_a_buffer_of_size_zero_keeps_nothing():
    buffer = ReplayBuffer(0)
    buffer.add([1.0], ["a"])
    assert len(buffer) == 0


# The exchange ---------------------------------------------------------------------------------------------------------


def flat_for_odd(prompts, completions, answer, **_):
    """Prompts with an even answer spread; the others are all equal."""
    return [float(i % 4) if a % 2 == 0 else 1.0 for i, a in enumerate(answer)]


def test_r50_a_group_without_spread_is_replaced_whole_by_one_with_spread(tiny_tokenizer, tmp_path):
    trainer = replaying(
        tmp_path, tiny_tokenizer, rewards=flat_for_odd, max_steps=1, shuffle_dataset=False, data=prompts(2)
    )
    seen = []
    inner = trainer._slices
    trainer._slices = lambda generation, count: seen.append(generation) or inner(generation, count)
    trainer.train()
    (generation,) = seen
    kept, replaced = generation.rollouts[:4], generation.rollouts[4:]
    assert [r.token_ids for r in replaced] == [r.token_ids for r in kept]
    assert [r.prompt_ids for r in replaced] == [r.prompt_ids for r in kept]
    advantages = generation.columns["advantages"]
    assert advantages[4:] == advantages[:4]
    assert len(set(advantages[:4])) == 4  # One a completion, not one a group.
    old = generation.token_columns["old_logp"]
    assert old[4:] == old[:4]
    assert [len(x) for x in old] == [len(r.token_ids) for r in generation.rollouts]
    row = trainer.state.log_history[0]
    assert (row["replay/size"], row["replay/replaced_groups"], row["replay/mean_age"]) == (1.0, 1.0, 0.0)


def test_every_group_with_spread_is_stored_with_its_score(tiny_tokenizer, tmp_path):
    """Rewards 0 1 2 3: std sqrt(5/3); A = (r - 1.5) / (s + 1e-4), so sum |A| s is 4 s / (s + 1e-4)."""
    trainer = replaying(tmp_path, tiny_tokenizer, rewards=flat_for_odd, max_steps=2, per_device_train_batch_size=16)
    trainer.train()
    spread = math.sqrt(5 / 3)
    expected = 4 * spread / (spread + 1e-4)
    assert len(trainer.replay_buffer) == 4  # Two of the four groups of each step.
    assert [item[0] for item in trainer.replay_buffer.heap] == pytest.approx([expected] * 4, rel=1e-5)


def test_an_empty_buffer_leaves_the_generation_alone(tiny_tokenizer, tmp_path):
    trainer = replaying(
        tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [1.0 for _ in completions], max_steps=2
    )
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))
    assert trainer.state.log_history[0]["replay/replaced_groups"] == 0


def test_old_groups_are_forgotten(tiny_tokenizer, tmp_path):
    calls = []

    def once(completions, **_):
        calls.append(0)
        return [float(i) if len(calls) == 2 else 0.0 for i, _ in enumerate(completions)]  # The first call is a dry run.

    settings = {"rewards": once, "max_steps": 6, "replay_max_age": 2, "num_train_epochs": 9}
    trainer = replaying(tmp_path, tiny_tokenizer, **settings)
    trainer.train()
    sizes = [row["replay/size"] for row in trainer.state.log_history if "replay/size" in row]
    assert sizes == [2, 2, 2, 0, 0, 0]
    ages = [row.get("replay/mean_age") for row in trainer.state.log_history if "replay/size" in row]
    assert ages == [None, 1, 2, None, None, None]


def test_a_replayed_group_has_the_log_probs_of_the_policy_that_sampled_it(tiny_tokenizer, tmp_path):
    """With them the ratio of a replayed group is not 1 after the policy has moved."""
    trainer = replaying(tmp_path, tiny_tokenizer, rewards=flat_for_odd, max_steps=4, learning_rate=0.05)
    trainer.train()
    ratios = [row["ratio/max"] for row in trainer.state.log_history if "ratio/max" in row]
    replaced = [row["replay/mean_age"] for row in trainer.state.log_history if row.get("replay/mean_age")]
    assert replaced
    assert max(ratios) > 1.01


def test_size_zero_is_grpo(tiny_tokenizer, tmp_path):
    from tests.algorithms.helpers import grpo

    plain = grpo(tmp_path / "a", tiny_tokenizer, rewards=flat_for_odd)
    plain.train()
    off = replaying(tmp_path / "b", tiny_tokenizer, rewards=flat_for_odd, replay_buffer_size=0)
    off.train()
    assert losses(plain) == losses(off)
    assert torch.equal(weights(plain), weights(off))


def test_the_buffer_survives_a_checkpoint(tiny_tokenizer, tmp_path):
    settings = {
        "rewards": flat_for_odd,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 9,
    }
    whole = replaying(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    part = replaying(tmp_path / "part", tiny_tokenizer, **settings)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(part))
    assert [item[0] for item in part.replay_buffer.heap] == [item[0] for item in whole.replay_buffer.heap]


def test_evaluation_neither_stores_nor_replaces(tiny_tokenizer, tmp_path):
    trainer = replaying(tmp_path, tiny_tokenizer, rewards=flat_for_odd)
    trainer.evaluate(prompts(4))
    assert len(trainer.replay_buffer) == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"replay_buffer_size": -1}, "replay_buffer_size=-1"),
        ({"replay_max_age": 0}, "replay_max_age=0"),
        (
            {"per_device_train_batch_size": 2, "num_generations": 4, "generation_batch_size": 4, "world": 2},
            "2 completions at once .* no multiple of num_generations=4",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, settings, match, monkeypatch):
    if settings.pop("world", None):
        monkeypatch.setattr(GRPOWithReplayBufferConfig, "world_size", property(lambda self: 2))
    with pytest.raises(ConfigError, match=match):
        GRPOWithReplayBufferConfig(str(tmp_path), bf16=False, report_to="none", **({"num_generations": 4} | settings))


def test_without_args_there_is_a_default_folder(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = GRPOWithReplayBufferTrainer.config_class
    assert (args is GRPOWithReplayBufferConfig, args("x", bf16=False).replay_buffer_size) == (True, 64)


# The other variants ---------------------------------------------------------------------------------------------------


def test_gmpo_trains_and_logs(tiny_tokenizer, tmp_path):
    trainer = build(GMPOTrainer, GMPOConfig, tmp_path, tiny_tokenizer, beta=0.05, num_iterations=2, max_steps=3)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    assert {"kl", "clip_ratio/region_mean", "entropy"} <= set(trainer.state.log_history[-2])
    assert losses(trainer) == pytest.approx(GOLDEN_GMPO, abs=2e-4)


def test_gspo_token_is_a_level_of_grpo_under_its_own_name(tiny_tokenizer, tmp_path):
    from posttrain import GRPOConfig, GRPOTrainer

    settings = {"importance_sampling_level": "sequence_token", "loss_type": "grpo", "num_iterations": 2, "max_steps": 3}
    runs = [
        build(kind, GRPOConfig, tmp_path / kind.__name__, tiny_tokenizer, **settings)
        for kind in (GRPOTrainer, GSPOTokenTrainer)
    ]
    for run in runs:
        run.train()
    assert torch.equal(weights(runs[0]), weights(runs[1]))


GOLDEN_GMPO = [0.0, -0.202638, 0.017684]  # Of 2026-11, float32 on a CPU.
