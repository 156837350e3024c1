"""RLOO: its numbers by hand, the properties every objective has, and small runs."""

import dataclasses
import logging
import math
from dataclasses import replace

import pytest
import torch

from posttrain import ConfigError, DataError
from posttrain.data.forest import Layout, collate
from posttrain.losses.advantages import leave_one_out_advantages, standardized
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.rloo import RLOO, RLOOConfig, rloo_objective
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.trainers.rloo import RLOOTrainer
from posttrain.types import ALONE, Batch, ModelOutputs, Rollout
from tests.conftest import build_model
from tests.loop.test_two_ranks import FREE, run
from tests.losses.properties import (
    Case,
    assert_layouts_agree,
    assert_ranks_average,
    dirtied,
    double,
    layouts,
    outputs,
    policy,
    step_gradient,
    toy_rows,
)
from tests.methods.helpers import GROUPS, count_a, prompts, scripted, weights


def rloo_args(folder, **settings):
    return RLOOConfig(str(folder), **(GROUPS | settings))


def rloo(folder, tokenizer, model=None, engine=None, rewards=count_a, data=None, **settings):
    extra = {} if engine == "native" else {"rollout_engine": engine or scripted()}
    keys = {k: settings.pop(k) for k in ("eval_dataset", "peft_config") if k in settings}
    return RLOOTrainer(
        model or build_model(len(tokenizer)),
        rewards,
        rloo_args(folder, **settings),
        train_dataset=data if data is not None else prompts(),
        processing_class=tokenizer,
        **extra,
        **keys,
    )


def config(**settings):
    return RLOOConfig("unused", bf16=False, report_to="none", **settings)


def forest(logp, old, advantages, mask=None):
    """A padded batch of sequences without a prompt's tokens, in float64."""
    lp, old = (torch.tensor(x, dtype=torch.float64) for x in (logp, old))
    rows, width = lp.shape
    kept = torch.ones(rows, width, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    grid = torch.arange(rows)[:, None].expand(rows, width)
    zeros = torch.zeros(rows, width, dtype=torch.long)
    batch = Batch(zeros, zeros, zeros + 1, zeros, kept, grid, rows)
    batch = replace(batch, advantages=torch.tensor(advantages, dtype=torch.float64), old_logp=old)
    return ModelOutputs(logp=lp.requires_grad_(), entropy=torch.zeros_like(lp)), batch


# By hand ------------------------------------------------------------------------------------------------------------


def test_the_baseline_is_the_mean_of_the_other_completions():
    """Of 1 0 0 1: the first is compared with (0 + 0 + 1) / 3, so 1 - 1/3 = 2/3; the second with 2/3."""
    found = leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 4)
    assert found.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_one_scored_row_and_unscored_rows_get_no_advantage():
    """Of 1 nan 3 nan: 1 - 3 and 3 - 1; of nan 5: nothing to compare with."""
    nan = math.nan
    assert leave_one_out_advantages(torch.tensor([1.0, nan, 3.0, nan]), 4).tolist() == [-2.0, 0.0, 2.0, 0.0]
    assert leave_one_out_advantages(torch.tensor([nan, 5.0]), 2).tolist() == [0.0, 0.0]
    assert leave_one_out_advantages(torch.tensor([5.0, 7.0]), 1).tolist() == [0.0, 0.0]


def test_standardised_advantages_leave_unscored_rows_out():
    """Of 1, 2, 3 (the fourth unscored): mean 2, Bessel std 1, so 1/1.0001 on both sides."""
    found = standardized(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([True, True, True, False]))
    assert found.tolist() == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001, 0.0])
    assert standardized(torch.tensor([1.0, 2.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


def test_the_ratio_is_of_the_whole_sequence_and_not_of_its_mean_token():
    """Sequence 0: gaps .1 + .1 + .1 = .3, rho = e^.3 = 1.34986, A = 1: -min(1.34986, 1.2) = -1.2, clipped.

    Sequence 1: gaps -.05, third token masked: rho = e^-.1 = .904837, A = -2: -min(-1.809675, -1.809675) = 1.809675.
    Mean: (-1.2 + 1.809675) / 2. A mean over tokens would leave sequence 0 at e^.1 = 1.105, unclipped.
    """
    out, batch = forest(
        [[-1.0, -1.0, -1.0], [-1.0, -1.0, 5.0]],
        [[-1.1, -1.1, -1.1], [-0.95, -0.95, -3.0]],
        [1.0, -2.0],
        [[1, 1, 1], [1, 1, 0]],
    )
    terms = rloo_objective(out, batch, config())
    loss = reduce(terms, Denominators(5, 2, 1))
    assert loss.item() == pytest.approx((-1.2 + 2 * math.exp(-0.1)) / 2, abs=1e-9)
    loss.backward()
    assert out.logp.grad[0].abs().max() == 0  # Clipped.
    assert out.logp.grad[1].tolist() == pytest.approx([math.exp(-0.1), math.exp(-0.1), 0.0])
    values = {name: float(m.value) / float(m.weight) for name, m in terms.metrics.items() if m.reduction == "mean"}
    assert values["clip_ratio/high_mean"] == 0.5  # One of two sequences.
    assert values["clip_ratio/low_mean"] == 0.0
    assert values["clip_ratio/region_mean"] == 0.5
    assert float(terms.metrics["clip_ratio/high_max"].value) == 1.0


def test_a_run_away_ratio_stays_finite():
    """A gap of 500 nats: the logarithm stops at 20, so the loss is e^20 * 2 and has no gradient."""
    out, batch = forest([[-1.0] * 500], [[-2.0] * 500], [-2.0])
    loss = reduce(rloo_objective(out, batch, config()), Denominators(500, 1, 1))
    assert loss.item() == pytest.approx(2 * math.exp(20))
    loss.backward()
    assert out.logp.grad.abs().max() == 0


def test_a_masked_sequence_has_ratio_one_and_a_constant_term():
    """Sequence 0 is masked: -1 * A = -3, no gradient. Sequence 1: rho = 1, term -1."""
    out, batch = forest([[-1.0], [-1.0]], [[-4.0], [-1.0]], [3.0, 1.0], [[0], [1]])
    loss = reduce(rloo_objective(out, batch, config()), Denominators(1, 2, 1))
    assert loss.item() == pytest.approx((-3 - 1) / 2)
    loss.backward()
    assert out.logp.grad.flatten().tolist() == [0.0, -0.5]


def test_another_engine_s_samples_are_weighed_by_sequence():
    """Trainer -1 -1, engine -1.2 -1.1: weight e^.3; a second sequence at e^4 is beyond 3.0 and masked."""
    out, batch = forest([[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0])
    batch = replace(batch, rollout_logp=torch.tensor([[-1.2, -1.1], [-3.0, -3.0]], dtype=torch.float64))
    terms = rloo_objective(out, batch, config())
    assert terms.terms.tolist() == pytest.approx([-math.exp(0.3), 0.0])
    off = rloo_objective(out, batch, config(vllm_importance_sampling_correction=False))
    assert off.terms.tolist() == pytest.approx([-1.0, -1.0])


def test_a_token_that_the_engine_gave_no_log_prob_takes_nothing_off_its_sequence_s_weight():
    """Of -1.2 and NaN the first is known: weight e^.2. Nothing is known of the second, and the third is masked."""
    logp = [[-1.0, -1.0]] * 3
    out, batch = forest(logp, logp, [1.0, 1.0, 1.0], [[1, 1], [1, 1], [0, 0]])
    nan = math.nan
    batch = replace(batch, rollout_logp=torch.tensor([[-1.2, nan], [nan, nan], [-1.5, -1.5]], dtype=torch.float64))
    terms = rloo_objective(out, batch, config())
    assert terms.terms.tolist() == pytest.approx([-math.exp(0.2), 0.0, 0.0])
    ratio = terms.metrics["sampling/importance_sampling_ratio/mean"]
    assert (float(ratio.value), float(ratio.weight)) == (pytest.approx(math.exp(0.2)), 1.0)


def generation(count):
    rollouts = [Rollout([1], [5] * 2, [], "stop") for _ in range(count)]
    return RolloutBatch([{} for _ in range(count)], rollouts, [""] * count, group_size=count)


def worth(rewards, old, ref, **settings):
    """Advantages of one group with a KL of weight 0.1."""
    method = RLOO(config(beta=0.1, **settings))
    return method.advantages(generation(len(old)), table(rewards), {"old_logp": old, "ref_logp": ref}, ALONE)


def table(rewards):
    values = torch.tensor(rewards)[:, None]
    return RewardTable(values, ["r"], torch.ones(1))


def test_the_reward_is_clipped_before_the_kl_is_charged():
    """Rewards 10 and 0, clipped to 1 and 0. KL of the first: (-1 + 3) + (-1 + 2) = 3, of the second 0; beta .1.

    1 - .3 = .7 against 0: advantages .7 and -.7. Charged first, 10 - .3 would be clipped to 1: 1 and -1.
    """
    old, ref = [[-1.0, -1.0], [-2.0, 0.0]], [[-3.0, -2.0], [-2.0, 0.0]]
    found = worth([10.0, 0.0], old, ref, reward_clip_range=(-1.0, 1.0))
    assert found.values.tolist() == pytest.approx([0.7, -0.7])
    assert found.totals.tolist() == [10.0, 0.0]  # Without clip and KL.
    kl = found.metrics["kl"]
    assert (float(kl.value), float(kl.weight)) == (3.0, 4)  # A mean over tokens.


def test_a_group_without_spread_is_counted_before_the_kl():
    """Equal rewards, unequal KL: the peer's figure would be 0."""
    found = worth([1.0, 1.0], [[-1.0, 0.0], [-1.0, 0.0]], [[-2.0, 0.0], [-3.0, 0.0]])
    assert found.zero_std_share == 1.0
    assert found.values.tolist() == pytest.approx([0.1, -0.1])


# Properties ---------------------------------------------------------------------------------------------------------

CASES = [
    Case("rloo", lambda out, batch: rloo_objective(out, batch, config())),
    Case("rloo-wide", lambda out, batch: rloo_objective(out, batch, config(epsilon=50.0, epsilon_high=50.0))),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def near_rows():
    """Old log-probs near the toy policy's own, so that not every sequence is clipped."""
    rows = toy_rows()
    for batch in collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=10_000)):
        logp = outputs(policy(), double(batch)).logp.detach()
        flat = [logp[batch.sequence == s] for s in range(batch.num_sequences)]
        for place, values in zip(batch.origin, flat, strict=True):
            rows[place // 4].token_columns["old_logp"][place % 4] = (values - 0.01 * (place % 3)).tolist()
    return rows


@every
def test_any_layout_and_split_gives_the_same_loss_and_gradient(case):
    assert_layouts_agree(case, layouts(near_rows()))


@every
def test_two_ranks_average_to_one_process(case):
    assert_ranks_average(case, layouts(near_rows())["tree"])


@every
def test_the_content_of_padding_does_not_matter(case):
    clean, dirty = layouts(near_rows())["padded"], dirtied(layouts(near_rows())["padded"], "old_logp")
    assert step_gradient(case, clean)[0] == step_gradient(case, dirty)[0]


@every
def test_zero_advantage_gives_zero_gradient(case):
    rows = near_rows()
    for row in rows:
        row.sequence_columns["advantages"] = [0.0] * 4
    assert step_gradient(case, layouts(rows)["tree"])[1].abs().max() == 0


def test_the_on_policy_gradient_is_the_plain_policy_gradient_of_whole_sequences():
    """At ratio 1: mean over sequences of -A sum_t log p, without any division by length."""

    def plain(out, batch):
        terms = rloo_objective(out, batch, config())
        summed = torch.zeros(batch.num_sequences, dtype=torch.float64)
        kept = batch.loss_mask
        summed = summed.index_add(0, batch.sequence[kept], out.logp[kept])
        return dataclasses.replace(terms, terms=-batch.advantages * summed)

    batches = layouts(toy_rows(old=False))["tree"]
    _, ours = step_gradient(CASES[0], batches)
    _, expected = step_gradient(Case("plain", plain), batches)
    assert torch.allclose(ours, expected, atol=1e-12)


@every
def test_gradcheck_in_float64(case):
    rows = near_rows()[:1]
    (batch,) = layouts(rows)["packed"]
    batch = double(batch)
    counts = Denominators(batch.num_loss_tokens, batch.num_sequences, 1)
    theta = policy().detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: reduce(case.objective(outputs(t, batch), batch), counts), theta, atol=1e-6, fast_mode=True
    )


@every
def test_a_batch_without_loss_tokens_gives_no_gradient_and_no_nan(case):
    rows = [replace(row, loss_masks=[[0] * len(m) for m in row.loss_masks]) for row in near_rows()]
    loss, gradient = step_gradient(case, layouts(rows)["tree"])
    advantages = [a for row in rows for a in row.sequence_columns["advantages"]]
    assert loss == pytest.approx(-sum(advantages) / len(advantages), abs=1e-6)
    assert gradient.abs().max() == 0


# Runs ---------------------------------------------------------------------------------------------------------------


def test_a_step_changes_the_weights_and_logs_the_peer_s_names(tiny_tokenizer, tmp_path):
    trainer = rloo(tmp_path, tiny_tokenizer)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    first, second = [row for row in trainer.state.log_history if "loss" in row]
    for name in (
        "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "completions/mean_length", "num_tokens",
        "completions/clipped_ratio", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
        "clip_ratio/high_max", "clip_ratio/region_mean", "rewards/count_a/mean", "rewards/count_a/std", "step_time",
    ):  # fmt: skip
        assert name in first, name
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(second["kl"]) > 1e-6


@pytest.mark.parametrize("schedule", [{}, {"steps_per_generation": 2, "per_device_train_batch_size": 4}])
def test_old_logps_are_always_stored_and_the_first_ratio_is_one(tiny_tokenizer, tmp_path, schedule):
    trainer = rloo(tmp_path, tiny_tokenizer, beta=0.0, max_steps=1, **schedule)
    seen = []
    original = trainer.compute_loss
    trainer.compute_loss = lambda model, batch, *a, **k: (
        seen.append(batch.old_logp is not None), original(model, batch, *a, **k),
    )[1]  # fmt: skip
    trainer.train()
    assert seen and all(seen)
    assert trainer.state.log_history[0]["ratio/max"] == pytest.approx(1.0, abs=1e-4)


def test_rounding_is_no_ratio_while_the_policy_has_not_moved(tiny_tokenizer, tmp_path):
    """In bfloat16 stored and fresh log-probs differ a little at every token, and a whole completion adds them up."""
    trainer = rloo(tmp_path, tiny_tokenizer, bf16=True, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["ratio/max"] == 1.0


def test_accumulation_does_not_change_the_update(tiny_tokenizer, tmp_path):
    results = []
    for batch, steps in ((8, 1), (4, 2), (2, 4)):
        trainer = rloo(
            tmp_path, tiny_tokenizer, per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
            shuffle_dataset=False, max_steps=1, optim="sgd", normalize_advantages=True,
        )  # fmt: skip
        trainer.train()
        results.append((trainer.state.log_history[0]["grad_norm"], weights(trainer)))
    for norm, after in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-4)
        assert torch.allclose(after, results[0][1], atol=1e-5)


def test_groups_whose_rewards_are_all_equal_are_replaced(tiny_tokenizer, tmp_path):
    def by_answer(completions, answer, **_):
        return [1.0 if a < 8 else float(i % 2) for i, a in enumerate(answer)]

    settings = {"dynamic_sampling": 5, "per_device_train_batch_size": 16, "max_steps": 1, "num_train_epochs": 9}
    trainer = rloo(tmp_path, tiny_tokenizer, rewards=by_answer, **settings)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["dynamic_sampling/groups_without_variance"] > 0 and row["dynamic_sampling/groups_left"] == 0
    assert row["frac_reward_zero_std"] == 0


def test_truncated_completions_train_nothing_and_stay_in_the_baselines(tiny_tokenizer, tmp_path):
    trainer = rloo(tmp_path, tiny_tokenizer, engine=scripted(stop=5), mask_truncated_completions=True)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))
    half = rloo(tmp_path, tiny_tokenizer, mask_truncated_completions=True, max_steps=1, beta=0.0)
    seen = {}
    original = half.advantages

    def spy(rollouts, rewards, logps):
        found = original(rollouts, rewards, logps)
        reasons = [rollout.finish_reason for rollout in rollouts.rollouts]
        seen.update(advantages=found.values, totals=rewards.values[:, 0], reasons=reasons)
        return found

    half.advantages = spy
    half.train()
    assert set(seen["reasons"]) == {"stop", "length"}
    assert torch.allclose(seen["advantages"], leave_one_out_advantages(seen["totals"], 4))


def test_evaluation_with_one_completion_a_prompt_has_no_advantage(tiny_tokenizer, tmp_path):
    trainer = rloo(
        tmp_path, tiny_tokenizer, eval_dataset=prompts(4), num_generations_eval=1, per_device_eval_batch_size=2
    )
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_reward", "eval_kl"} <= set(metrics)
    assert metrics["eval_advantages/abs_max"] == 0


def test_lora_takes_the_bare_model_as_its_reference(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = rloo(tmp_path, tiny_tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), max_steps=3)
    assert trainer.reference.copy is None
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert abs(kl[-1]) > 1e-6


def test_no_reference_adapter_is_made_without_a_kl(tiny_tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(len(tiny_tokenizer)), LoraConfig(r=4, target_modules=["q_proj"]))
    trainer = rloo(tmp_path, tiny_tokenizer, model=model, beta=0.0, max_steps=1)
    assert trainer.reference is None
    assert list(model.peft_config) == ["default"]


def test_the_reference_can_follow_the_policy(tiny_tokenizer, tmp_path):
    trainer = rloo(
        tmp_path, tiny_tokenizer, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=3
    )
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert kl == pytest.approx([0, 0, 0], abs=1e-5)


def test_a_schedule_that_clips_nearly_everything_is_told(tiny_tokenizer, tmp_path, caplog):
    trainer = rloo(tmp_path, tiny_tokenizer, num_iterations=2, max_steps=1)
    caplog.set_level(logging.WARNING, logger="posttrain")
    for step in range(1, 25):
        trainer.state.global_step = step
        trainer._watch_clipping(0.6 if step != 8 else 0.1)
    said = [r.message for r in caplog.records if "were clipped" in r.message]
    assert len(said) == 1 and "importance_sampling_level='sequence'" in said[0]
    fresh = rloo(tmp_path, tiny_tokenizer, max_steps=1)
    caplog.clear()
    for step in range(1, 25):
        fresh.state.global_step = step
        fresh._watch_clipping(0.9)
    assert not [r for r in caplog.records if "were clipped" in r.message]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_reward_rises(tiny_tokenizer, tmp_path, seed):
    """Reward: how often token 'a' is in the completion. A two-layer model must learn to say it."""
    token = tiny_tokenizer("a", add_special_tokens=False)["input_ids"][0]

    def says_a(completion_ids, **_):
        return [sum(t == token for t in ids) for ids in completion_ids]

    trainer = rloo(
        tmp_path, tiny_tokenizer, engine="native", rewards=says_a, beta=0.0, max_steps=40, logging_steps=1, seed=seed,
        per_device_train_batch_size=32, num_generations=8, num_train_epochs=40, learning_rate=5e-3,
    )  # fmt: skip
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0, rewards


# Refused ------------------------------------------------------------------------------------------------------------


def test_defaults_are_the_peer_s_and_grpo_s_own_options_do_not_exist(tmp_path):
    args = RLOOConfig(str(tmp_path))
    expected = {
        "num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None, "epsilon": 0.2,
        "num_iterations": 1, "learning_rate": 1e-6, "max_completion_length": 512, "temperature": 1.0,
    }  # fmt: skip
    assert {k: getattr(args, k) for k in expected} == expected
    absent = (
        "loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level", "delta",
        "sapo_temperature_neg", "vespo_k_pos", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile",
        "cast_lm_head_to_fp32", "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions_hub_repo",
        "max_tool_calling_iterations", "max_tool_output_tokens", "tool_workers", "tool_timeout", "environment_retries",
    )  # fmt: skip
    for name in absent:
        assert not hasattr(args, name), name
        with pytest.raises(TypeError, match=name):
            RLOOConfig(str(tmp_path), **{name: 1})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"reward_clip_range": (1.0, 1.0)}, "a minimum and a larger maximum"),
        ({"reward_clip_range": (1.0, -1.0)}, "reward_clip_range"),
        ({"reward_clip_range": (1.0,)}, "two numbers"),
        ({"reward_clip_range": 10}, "reward_clip_range=10 must be a list"),
        ({"reward_clip_range": (0.0, None)}, "two numbers"),
        ({"use_liger_kernel": True}, "is not supported by RLOO"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "one importance ratio per sequence"),
        ({"num_generations": 1}, "at least 2"),
        ({"beta": -0.1}, "beta=-0.1"),
    ],
)
def test_bad_settings_are_refused_when_the_config_is_made(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        rloo_args(tmp_path, **settings)


def test_a_missing_dataset_is_refused(tiny_tokenizer, tmp_path):
    with pytest.raises(DataError, match="train_dataset"):
        RLOOTrainer(build_model(len(tiny_tokenizer)), count_a, rloo_args(tmp_path), processing_class=tiny_tokenizer)


@pytest.mark.distributed
def test_two_ranks_equal_one_with_twice_the_accumulation(tmp_path):
    one = run("rloo", tmp_path / "one", 1, 4, 2)
    two = run("rloo", tmp_path / "two", 2, 4, 1)
    a, b = torch.tensor(one["step"]), torch.tensor(two["step"])
    assert a.abs().max() > 1e-3
    assert (a - b).abs().max() < 1e-5
    free = (*FREE, "balance/")  # Rows move between ranks, of which one process has none.
    ours, theirs = ({k: v for k, v in x["logs"].items() if not any(part in k for part in free)} for x in (one, two))
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert theirs[name] == pytest.approx(value, abs=1e-6, rel=1e-6), name
