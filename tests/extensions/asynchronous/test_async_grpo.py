"""Asynchronous GRPO with a stub worker and a stub transfer: what is trained, what is dropped, and what it amounts to."""

import json
import math
from dataclasses import replace

import datasets
import pytest
import torch

from posttrain import ConfigError, DataError, GRPOConfig, ModelOutputs, RewardError, RolloutError
from posttrain.data.forest import collate
from posttrain.extensions.asynchronous.grpo import AsyncGRPOTrainer
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.extensions.asynchronous.grpo_method import async_grpo_objective
from posttrain.extensions.asynchronous.jobs import score_group
from posttrain.extensions.asynchronous.rollouts import (
    by_context,
    rollout_batch,
    trajectory_batch,
    warn_of_reward_models,
)
from posttrain.extensions.asynchronous.samples import Trajectory
from posttrain.loop.scoring import completion_metrics
from posttrain.losses.advantages import group_advantages
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo.objective import grpo_objective
from posttrain.rewards.runner import RewardRunner
from posttrain.types import WHOLE, Rollout, Truncation
from tests.conftest import build_model
from tests.extensions.asynchronous.helpers import (
    StubTransfer,
    assert_exact,
    group_of,
    sample,
    steps,
    trainer,
    within_groups,
)
from tests.methods.helpers import count_a, grpo, prompts, weights
from tests.wordings import raises


def fresh(number, version):
    """Groups of two, one better than the other, of the newest weights."""
    return sample(number // 2, version, advantage=1.0 if number % 2 else -1.0)


# Steps ---------------------------------------------------------------------------------------------------------------


def test_a_run_trains_pushes_before_it_generates_and_stops_its_worker(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, fresh)
    before = weights(run)
    run.train()
    assert not torch.equal(before, weights(run))
    assert run.worker.calls == [1, "start", 2, 3, "stop"]  # After the last step nothing is pushed.
    assert run.transfer.calls == ["init", *["pause", "send", "resume"] * 3, "destroy"]
    first = run.transfer.sent[0]
    assert torch.equal(first["model.norm.weight"], build_model(len(tiny_tokenizer)).model.norm.weight)
    assert not torch.equal(first["model.norm.weight"], run.transfer.sent[1]["model.norm.weight"])
    assert_exact(run)
    first, *_, row = steps(run)
    for name in (
        "ratio",
        "kl",
        "entropy",
        "clip_ratio/region_mean",
        "reward",
        "perf/rollout_wait_s",
        "perf/weight_sync_s",
    ):
        assert name in first, name
    assert (row["async/trained"], row["async/version"]) == (12, 3)


def test_weights_are_pushed_every_so_many_steps(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, fresh, max_steps=5, weight_sync_steps=2)
    run.train()
    assert run.worker.calls == [1, "start", 2, 3, "stop"]


def test_no_sample_trains_beyond_the_hard_bound_and_every_drop_is_counted(tiny_tokenizer, tmp_path):
    run = trainer(
        tmp_path,
        tiny_tokenizer,
        lambda number, version: sample(number, version - number % 4),  # 0 to 3 versions old.
        max_steps=6,
        max_staleness=1,
        max_staleness_hard=2,
    )
    run.train()
    rows = steps(run)
    assert max(row["sample/staleness_max"] for row in rows) == 2
    assert rows[-1]["async/dropped_stale_in_queue"] > 0
    assert rows[-1]["async/trained"] == 24
    assert rows[0]["sample/staleness_mean"] == pytest.approx(0.75)  # Ages 0, 1, 2 and, after a 3 was dropped, 0.
    assert_exact(run)


def test_epochs_end_after_so_many_prompts_however_often_conversations_fork(tiny_tokenizer, tmp_path):
    def forked(number, version):
        return [sample(number // 2, version), sample(number // 2, version, prompt=(1, 4))]

    run = trainer(tmp_path, tiny_tokenizer, forked, max_steps=-1, num_train_epochs=1, data=prompts(6))
    run.train()
    assert run.state.global_step == 3  # 6 prompts x 2 rollouts / 4 a step; each rollout is two rows.
    assert run.trained_groups == 6
    assert run.args.max_steps == -1
    assert steps(run)[-1]["rollout/fork_rate"] == 1.0


def test_a_rollout_longer_than_the_budget_is_dropped_and_the_others_fill_rows(tiny_tokenizer, tmp_path):
    def make(number, version):
        return sample(number, version, written=[7] * (9 if number % 3 == 0 else 1))

    run = trainer(tmp_path, tiny_tokenizer, make, token_budget=8)
    run.train()
    assert steps(run)[-1]["async/dropped_too_long"] == 6
    assert_exact(run)


def test_trap_s21_a_budget_that_nothing_fits_ends_the_run_instead_of_waiting(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, fresh, token_budget=4)
    with raises(RolloutError, "100", "token_budget=4", "5"):
        run.train()
    assert run.worker.calls[-1] == "stop"
    assert run.transfer.calls[-1] == "destroy"


def test_trap_s35_a_step_weighs_tokens_alike_however_its_rows_are_cut(tiny_tokenizer, tmp_path):
    def make(number, version):
        return sample(
            number, version, prompt=(1, 5, 9 + number), written=range(7, 9 + number % 4), advantage=0.5 - number % 2
        )

    results = []
    for budget in (64, 12, 0):
        run = trainer(tmp_path, tiny_tokenizer, make, token_budget=budget, optim="sgd", max_steps=1)
        run.train()
        results.append((steps(run)[0]["loss"], weights(run)))
    for loss, after in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert torch.allclose(after, results[0][1], atol=1e-6)


def test_trap_s35_accumulation_only_enters_the_number_of_samples_of_a_step(tiny_tokenizer, tmp_path):
    args = AsyncGRPOConfig(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, num_generations=8
    )
    assert (args.samples_per_step, args.gradient_accumulation_steps) == (12, 1)
    assert args.max_inflight_tasks == 64  # (4 + 1) x 12 = 60, in whole groups of 8.


def test_trap_s20_without_staleness_there_are_slots_for_a_step(tmp_path):
    args = AsyncGRPOConfig(str(tmp_path), max_staleness=0, num_generations=4, samples_per_step=10)
    assert args.max_inflight_tasks == 12  # A step's rollouts, in whole groups.


def test_trap_s34_a_metric_that_some_rollouts_lack_is_averaged_over_those_that_have_it(tiny_tokenizer, tmp_path):
    def make(number, version):
        own = {"reward": float(number % 4), "rewards/count_a": math.nan if number % 2 else 3.0}
        return sample(number, version, metrics=own | ({"tools/failure_frequency": 0.5} if number % 4 == 3 else {}))

    run = trainer(tmp_path, tiny_tokenizer, make, max_steps=1)
    run.train()
    (row,) = steps(run)
    assert (row["reward"], row["rewards/count_a"], row["rewards/count_a/mean"]) == (1.5, 3.0, 3.0)
    assert row["tools/failure_frequency"] == 0.5


def test_trap_s31_a_trained_token_without_a_log_prob_ends_the_run(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, lambda n, v: sample(n, v, logp=math.nan))
    with raises(RolloutError, "0", "2"):
        run.train()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logp": 3.0}, "old_log_probs, position 3, is 3.0"),
        ({"logp": -math.inf}, "old_log_probs, position 3, is -inf"),
        ({"advantage": math.nan}, "advantage is nan"),
        ({"advantage": None}, "advantage is None"),
        ({"written": (7, -8)}, "input_ids, position 4, is -8"),
        ({"written": (7.5, 8)}, "input_ids, position 3, is 7.5"),
    ],
)
def test_values_of_a_worker_outside_their_range_end_the_run_by_name(tiny_tokenizer, tmp_path, changes, named):
    run = trainer(tmp_path, tiny_tokenizer, lambda number, version: sample(number, version, **changes))
    with pytest.raises(RolloutError, match=named):
        run.train()


def test_trap_s6_a_push_that_fails_ends_the_run_with_the_server_resumed(tiny_tokenizer, tmp_path):
    transfer = StubTransfer(fails_at=2)
    run = trainer(tmp_path, tiny_tokenizer, fresh, weight_transfer=transfer)
    with raises(ConnectionError):
        run.train()
    assert transfer.calls == ["init", "pause", "send", "resume", "pause", "send", "resume", "destroy"]
    assert run.version == 1  # It rises only after a push was confirmed.
    assert run.worker.calls == [1, "start", "stop"]


def test_nothing_fresh_for_too_long_ends_the_run(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, lambda n, v: None, heartbeat_stale_after_s=0.05)
    with raises(RolloutError, "heartbeat_stale_after_s"):
        run.train()


def test_a_worker_s_trouble_is_the_trainer_s(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, lambda n, v: None)
    run.given["rollout_worker"].check_health = lambda stale: (_ for _ in ()).throw(RolloutError("it is ill"))
    with raises(RolloutError):
        run.train()


def test_rewards_without_any_signal_end_the_run_where_the_user_says_so(tiny_tokenizer, tmp_path):
    run = trainer(
        tmp_path, tiny_tokenizer, lambda n, v: sample(n, v, advantage=0.0), max_steps=9, stop_without_signal=4
    )
    with pytest.raises(RewardError, match="stop_without_signal=4"):
        run.train()
    assert run.state.global_step < 6


def test_a_policy_that_ran_away_from_its_samples_leaves_one_update_out_and_pushes(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, lambda n, v: sample(n, v, logp=-9.0, advantage=n % 2 - 0.5), max_steps=4)
    run.mismatch.patience, run.mismatch.limit = 3, 0.01
    seen = []
    run.args.optim = "sgd"
    original = run.after_update
    run.after_update = lambda control: (seen.append(weights(run)), original(control))
    run.train()
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])  # The third update was left out.
    assert not torch.equal(seen[2], seen[3])
    assert run.source.ledger.dropped["skipped"] == 4
    assert_exact(run)


def test_evaluation_generates_in_this_process(tiny_tokenizer, tmp_path):
    run = trainer(tmp_path, tiny_tokenizer, fresh, eval_dataset=prompts(4), per_device_eval_batch_size=4)
    run.train()
    said = run.evaluate()
    assert "eval_reward" in said and "eval_rewards/count_a/mean" in said


# The loss ------------------------------------------------------------------------------------------------------------


def batch_of(samples):
    (batch,) = collate(rollout_batch(by_context(samples)).every_row(), pad_token_id=0)
    return batch


def gradient(objective, batch, cfg, seed=0):
    torch.manual_seed(seed)
    logp = torch.where(batch.loss_mask, -torch.rand(batch.input_ids.shape) * 2 - 1.0, 0.0).requires_grad_()
    out = ModelOutputs(logp=logp, entropy=torch.zeros_like(logp))
    terms = objective(out, batch, cfg)
    loss = reduce(terms, Denominators(batch.num_loss_tokens, batch.num_sequences, 1))
    loss.backward()
    return float(loss.detach()), logp.grad


SAMPLES = [
    sample(0, 1, written=(7, 8, 3), advantage=1.2, logp=-1.5),
    sample(0, 1, written=(4,), advantage=-0.7, logp=-2.5),
    sample(1, 1, prompt=(2, 2), written=(5, 6), advantage=-1.0, logp=-1.1),
]


def test_the_objective_equals_synchronous_grpo_s_on_the_same_samples(tmp_path):
    ours = AsyncGRPOConfig(str(tmp_path), epsilon=0.1, epsilon_high=0.3)
    theirs = GRPOConfig(str(tmp_path), epsilon=0.1, epsilon_high=0.3, loss_type="dapo")
    batch = batch_of(SAMPLES)
    loss, grad = gradient(async_grpo_objective, batch, ours)
    batch = replace(batch, old_logp=batch.rollout_logp, rollout_logp=None)
    same, wanted = gradient(grpo_objective, batch, theirs)
    assert loss == pytest.approx(same, abs=1e-7)
    assert torch.allclose(grad, wanted, atol=1e-7)
    assert float(grad.abs().sum()) > 0


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", "geometric"])
def test_the_corrected_objective_equals_synchronous_grpo_s_with_a_foreign_engine(tmp_path, mode):
    ours = AsyncGRPOConfig(
        str(tmp_path),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.4,
        vllm_importance_sampling_clip_min=0.2,
    )
    theirs = GRPOConfig(
        str(tmp_path),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.4,
        vllm_importance_sampling_clip_min=0.2,
    )
    batch = batch_of(SAMPLES)
    loss, grad = gradient(async_grpo_objective, batch, ours)
    same, wanted = gradient(grpo_objective, batch, theirs)
    assert loss == pytest.approx(same, abs=1e-7)
    assert torch.allclose(grad, wanted, atol=1e-7)


def test_the_loss_is_the_formula_by_hand(tmp_path):
    """Two tokens with rho = e^0.5 and e^-0.5, A = 2, eps 0.2: -(min(2 e^.5, 2.4) + min(2 e^-.5, 1.6)) / 2."""
    batch = batch_of([sample(0, 1, advantage=2.0, logp=-2.0)])
    logp = torch.zeros(batch.input_ids.shape)
    logp[batch.loss_mask] = torch.tensor([-1.5, -2.5])
    terms = async_grpo_objective(ModelOutputs(logp=logp, entropy=logp), batch, AsyncGRPOConfig(str(tmp_path)))
    assert float(reduce(terms, Denominators(2, 1, 1))) == pytest.approx(-(2.4 + 2 * math.exp(-0.5)) / 2, abs=1e-6)
    kl = terms.metrics["kl"]
    assert float(kl.value / kl.weight) == pytest.approx(math.cosh(0.5) - 1, abs=1e-6)
    assert float(terms.metrics["ratio"].value / 2) == pytest.approx(math.cosh(0.5), abs=1e-6)


# Scoring -------------------------------------------------------------------------------------------------------------


def score_answer(completions, answer, **_):
    """The answer column where there is one."""
    return answer


def finished(answers, reasons=None, masks=None, prompt="p", **options):
    rollouts = [
        Rollout([1, 2], [3, 4], [-0.5, -1.0], reason, 3, tool_mask=mask)
        for reason, mask in zip(reasons or ["stop"] * len(answers), masks or [None] * len(answers), strict=True)
    ]
    rows = [{"prompt": prompt, "answer": a} for a in answers]
    return group_of(rows, rollouts, ["c"] * len(answers), group_id=5, version=2, **options)


def scorer(tokenizer, scale="population", mask_truncated=False, truncation=WHOLE, **options):
    rewards, how = (
        RewardRunner(score_answer, **options),
        {"method": within_groups(scale), "mask_truncated": mask_truncated},
    )
    how["truncation"] = truncation
    return lambda group: score_group(group, rewards, tokenizer, **how)


def test_advantages_are_those_of_the_population_over_scored_members_and_others_get_none(tiny_tokenizer):
    """Rewards 1, 3 and none: mean 2, population std 1."""
    found = scorer(tiny_tokenizer)(finished([1.0, 3.0, None]))
    assert [c.samples[0].advantage for c in found] == pytest.approx([-1.0, 1.0, 0.0], abs=1e-6)
    assert [c.version for c in found] == [2, 2, 2]  # The group's first request; the rollouts say 3.
    first = found[0].samples[0]
    assert (first.input_ids, first.completion_mask) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert first.old_log_probs == [0.0, 0.0, -0.5, -1.0]
    assert first.metrics["rewards/score_answer"] == 1.0


def test_log_probs_of_a_truncated_sample_are_of_what_was_left(tiny_tokenizer):
    group, score = finished([1.0, 3.0]), scorer(tiny_tokenizer, truncation=Truncation(top_p=0.9))
    with raises(RolloutError, "top_p=0.9", "processed_logp"):
        score(group)
    drawn = [replace(rollout, processed_logp=[-0.25, -0.75]) for rollout in group.batch.rollouts]
    group.batch = replace(group.batch, rollouts=drawn)
    assert score(group)[0].samples[0].old_log_probs == [0.0, 0.0, -0.25, -0.75]
    assert scorer(tiny_tokenizer)(group)[0].samples[0].old_log_probs == [0.0, 0.0, -0.5, -1.0]


def test_a_penalty_beside_truncation_or_servers_is_refused(tmp_path):
    """Their log-probs are of what the penalty made of the distribution, which the trainer does not compute."""
    penalty = {"repetition_penalty": 1.1, "num_generations": 2, "report_to": "none"}
    AsyncGRPOConfig(str(tmp_path), **penalty)
    for further in ({"top_p": 0.9}, {"worker_engine": "server"}):
        with raises(ConfigError, "repetition_penalty=1.1"):
            AsyncGRPOConfig(str(tmp_path), **penalty, **further)
        AsyncGRPOConfig(str(tmp_path), **penalty, **further, allow_biased_is=True)


def test_a_group_that_nobody_scored_moves_nothing(tiny_tokenizer):
    found = scorer(tiny_tokenizer)(finished([None, None]))
    assert [c.samples[0].advantage for c in found] == [0.0, 0.0]


def no_reward(value):
    def score_answer(completions, **_):
        return [value] * len(completions)

    return score_answer


@pytest.mark.parametrize(("value", "scored"), [(None, 0), (math.nan, 2)])
def test_rewards_that_nobody_gives_end_an_asynchronous_run_as_they_end_a_synchronous_one(
    tiny_tokenizer, tmp_path, value, scored
):
    """``scored`` generations have rewards, then none has."""
    calls = []

    def rewards(completions, **_):
        calls.append(len(completions))
        return [float(i) if len(calls) <= scored else value for i in range(len(completions))]

    ends = {"max_steps": 30, "check_rewards": False, "stop_without_signal": 3}
    with raises(RewardError, "stop_without_signal=3"):
        grpo(tmp_path / "grpo", tiny_tokenizer, rewards=rewards, **ends).train()

    judged = iter([])

    def make(number, version):
        nonlocal judged
        for conversation in judged:
            return conversation
        answers = [1.0, 0.0] if number // 4 < scored else [value] * 2
        group = finished(answers)
        group.task.group_id, group.version = number, version
        written = [replace(rollout, version=version) for rollout in group.batch.rollouts]
        group.batch = replace(group.batch, rollouts=written)
        judged = iter(scorer(tiny_tokenizer)(group))
        return next(judged)

    run = trainer(tmp_path / "async", tiny_tokenizer, make, rewards=no_reward(value), **ends)
    with raises(RewardError, "stop_without_signal=3"):
        run.train()
    assert run.state.global_step == scored + 2


def test_rows_that_are_nan_are_counted_as_in_synchronous_training(tiny_tokenizer, tmp_path):
    def make(number, version):
        group = finished([math.nan, 1.0])
        group.task.group_id, group.version = number // 2, version
        return scorer(tiny_tokenizer)(group)[number % 2]

    run = trainer(tmp_path, tiny_tokenizer, make, rewards=score_answer, max_steps=1, check_rewards=False)
    run.train()
    assert steps(run)[0]["rewards/score_answer/nan"] == 2


def test_the_other_scales_are_grpo_s(tiny_tokenizer):
    """Rewards 1 and 3: sample std sqrt(2)."""
    by_group = scorer(tiny_tokenizer, "group")(finished([1.0, 3.0]))
    assert by_group[1].samples[0].advantage == pytest.approx(1 / (math.sqrt(2) + 1e-4))
    assert scorer(tiny_tokenizer, "none")(finished([1.0, 3.0]))[1].samples[0].advantage == pytest.approx(1.0)


def test_equal_rewards_have_no_advantage():
    rewards = torch.tensor([[0.3], [0.3], [0.3]])
    assert not group_advantages(rewards, torch.ones(1), 3, scale_rewards="population").advantages.any()


def test_rewards_are_transformed_before_they_are_compared(tiny_tokenizer):
    found = scorer(tiny_tokenizer, "none", transforms="clip:0:2")(finished([1.0, 30.0]))
    assert found[1].samples[0].advantage == pytest.approx(0.5)


def test_tokens_of_tools_are_read_and_not_trained(tiny_tokenizer):
    found = scorer(tiny_tokenizer)(finished([1.0, 2.0], masks=[[0, 1], [1, 0]]))
    assert found[0].samples[0].completion_mask == [0, 0, 0, 1]
    assert found[0].samples[0].old_log_probs == [0.0, 0.0, 0.0, -1.0]


def test_cut_rollouts_can_be_left_out_and_those_without_a_trained_token_are(tiny_tokenizer):
    assert len(scorer(tiny_tokenizer, mask_truncated=True)(finished([1.0, 2.0], reasons=["stop", "length"]))) == 1
    assert len(scorer(tiny_tokenizer)(finished([1.0, 2.0], masks=[[0, 0], [1, 1]]))) == 1


def test_a_conversation_is_as_old_as_its_oldest_token():
    parts = [sample(0, 4), sample(0, 2)]
    assert Trajectory(parts).version == 2


# What is refused -----------------------------------------------------------------------------------------------------

BAD = [
    ({"max_staleness": -1}, "max_staleness=-1"),
    ({"max_staleness": 3, "max_staleness_hard": 2}, "max_staleness_hard=2 is below max_staleness=3"),
    ({"queue_maxsize": 4, "num_generations": 8}, "queue_maxsize=4 must be at least num_generations"),
    ({"max_inflight_tasks": 0}, "max_inflight_tasks=0"),
    ({"weight_sync_steps": 0}, "weight_sync_steps=0"),
    ({"staleness_policy": "pase"}, "did you mean 'pace'"),
    ({"worker_engine": "natif"}, "did you mean 'native'"),
    ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode='token'"),
    ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}, "both are None"),
    ({"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 3.0}, "must be below"),
    ({"is_correction": "token_mask"}, "set vllm_importance_sampling_mode"),
    ({"beta": 0.1}, "beta=0.1 is not supported"),
    ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False is not supported"),
    ({"num_iterations": 2}, "num_iterations=2 is not supported"),
    ({"vllm_server_port": 8001}, "vllm_server_port=8001 is not supported.* vllm_server_base_url selects the servers"),
    ({"weight_sync_timeout": 5, "vllm_sync_timeout": 6}, "names of the same option"),
    ({"reward_transform": "running"}, "workers score each group separately"),
    ({"reward_transform": ["zscore"]}, "reward_transform='zscore'.* do not have statistics of all rewards"),
    ({"per_device_train_batch_size": "auto"}, "set samples_per_step"),
    ({"rollout_failure_budget": 2.0}, "rollout_failure_budget=2.0"),
    ({"reward_timeout_s": 0}, "reward_timeout_s=0"),
    ({"samples_per_step": 0}, "samples_per_step=0"),
    ({"num_generations": 1}, "num_generations=1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        AsyncGRPOConfig(str(tmp_path), **changes)


def test_liger_is_not_implemented(tmp_path):
    with pytest.raises(NotImplementedError, match="use_liger_kernel"):
        AsyncGRPOConfig(str(tmp_path), use_liger_kernel=True)


def test_defaults_are_the_documented_ones(tmp_path):
    args = AsyncGRPOConfig(str(tmp_path))
    wanted = {
        "learning_rate": 1e-6, "epsilon": 0.2, "epsilon_high": None, "lr_scheduler_type": "constant", "token_budget": None,
        "logging_steps": 1, "num_generations": 8, "max_staleness": 4, "max_staleness_hard": 4, "max_completion_length": 2048,
        "queue_maxsize": 1024, "temperature": 1.0, "weight_sync_steps": 1, "heartbeat_stale_after_s": 300,
        "fork_threshold_tokens": 1024, "vllm_server_timeout": 240, "request_timeout": 600, "router_aux_loss_coef": None,
        "rollout_failure_budget": 0.05, "reward_timeout": 120, "tool_timeout": 60, "sync_timeout_s": 1800, "log_completions": False,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in wanted} == wanted


def no_reset():
    """Makes what is no environment."""
    return object()


class Maze:
    """An environment with a reward."""

    def reset(self):
        return "go"

    def get_reward(self):
        return 1.0


def test_without_a_dataset_an_environment_and_max_steps_are_needed(tiny_tokenizer, tmp_path):
    model = build_model(len(tiny_tokenizer))

    def start(**options):
        args = AsyncGRPOConfig(
            str(tmp_path), max_steps=options.pop("max_steps", 3), report_to="none", max_completion_length=8
        )
        return AsyncGRPOTrainer(
            model, options.pop("rewards", count_a), args, processing_class=tiny_tokenizer, **options
        )

    with raises(DataError, "environment_factory"):
        start()
    with raises(ConfigError):
        start(environment_factory={"maze": Maze})
    with raises(ConfigError, "max_steps", "0", "-1"):
        start(environment_factory=Maze, max_steps=-1)
    with raises(ConfigError):
        start(environment_factory=no_reset)
    with raises(ConfigError, "reward_funcs"):
        AsyncGRPOTrainer(model, None, AsyncGRPOConfig(str(tmp_path)), prompts(), tiny_tokenizer)
    assert len(start(environment_factory=Maze, rewards=None).train_dataset) == 1


def test_trap_s54_what_workers_cannot_be_sent_is_told_before_the_model_loads(tmp_path):
    with raises(TypeError, "reward_funcs", "1"):
        AsyncGRPOTrainer("no/such-model", [count_a, lambda **_: []], AsyncGRPOConfig(str(tmp_path)), prompts())


def test_trap_s42_big_reward_models_in_workers_are_told_of(caplog):
    warn_of_reward_models([count_a, "some/reward-model", torch.nn.Linear(10_000, 6_000)])
    assert "some/reward-model runs in the rollout workers on the CPU" in caplog.text
    assert "of 60M parameters" in caplog.text


def test_the_schedule_is_told_in_words(tiny_tokenizer, tmp_path):
    text = trainer(tmp_path, tiny_tokenizer, fresh).schedule_text(16)
    assert text.startswith("1 worker(s) sample up to 20 rollouts concurrently (native); a step trains on 4 of them")
    assert text.endswith("16 prompts are 32 rollouts.")


def test_rows_of_a_dataset_without_a_prompt_column_get_one_from_the_environment(tiny_tokenizer, tmp_path):
    data = datasets.Dataset.from_list([{"level": 1}, {"level": 2}])
    run = trainer(tmp_path, tiny_tokenizer, fresh, data=data, environment_factory=Maze)
    assert run.train_dataset[0]["prompt"] == [{"role": "user", "content": ""}]


def test_trap_s9_a_checkpoint_s_state_restores_prompts_counts_and_version(tiny_tokenizer, tmp_path):
    run, again = (trainer(tmp_path / name, tiny_tokenizer, fresh) for name in ("a", "b"))
    tasks = [run.source.tasks.next() for _ in range(5)]
    for task in tasks[:3]:
        run.source.tasks.done(task.group_id)
    run.source.ledger.dispatch(10)
    run.source.ledger.arrive(8)
    run.source.ledger.hold(6)
    run.source.ledger.train()
    run.source.service.version, run.trained_groups = 7, 3
    again.load_saved_state(json.loads(json.dumps(run.state_to_save())))
    assert (again.version, again.trained_groups) == (7, 3)
    assert again.account() | {"async/dropped_unfinished": 4} == again.account()
    assert again.account()["async/trained"] == 6
    assert [again.source.tasks.next().row for _ in range(2)] == [
        task.row for task in tasks[3:]
    ]  # Asked again, before all others.
    assert again.source.tasks.next().row == run.source.tasks.next().row


def test_the_share_of_tools_words_is_told(tiny_tokenizer):
    """It is what the check of punishments of length goes by."""
    rollout = Rollout([1, 2], [5, 6, 7, 8], [0.0] * 4, "stop", tool_mask=[1, 0, 0, 0])
    row = {"prompt": "p", "answer": 1}
    runner = RewardRunner(lambda completions, **_: [1.0] * len(completions))
    group = group_of([row], [rollout], ["x"])
    found = score_group(group, runner, tiny_tokenizer, method=within_groups("group"), mask_truncated=False)
    share = completion_metrics(trajectory_batch(found), masks_truncated=False)["tools/token_share"]
    assert share.value / share.weight == 0.75
