"""GMPO: the shared properties, a number worked out by hand, and an independent loop."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.extensions.experimental.gmpo_method import GMPOConfig
from posttrain.losses.policy import geometric_ratio
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo.objective import grpo_objective
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


def config(**settings):
    return GMPOConfig("unused", max_completion_length=16, bf16=False, report_to="none", **settings)


def gmpo(name, **settings):
    cfg = config(**settings)
    return Case(name, lambda out, batch: grpo_objective(out, batch, cfg))


CASES = [gmpo("gmpo"), gmpo("gmpo+kl", beta=0.1), gmpo("tight", epsilon=0.05, epsilon_high=0.1)]
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def counts(batches, world_size=1):
    return Denominators(
        sum(b.num_loss_tokens for b in batches), sum(b.num_sequences for b in batches), len(batches), world_size
    )


@every
def test_any_layout_and_split_gives_the_same_loss_and_gradient(case):
    assert_layouts_agree(case, layouts(toy_rows()))


@every
def test_two_ranks_average_to_one_process(case):
    assert_ranks_average(case, layouts(toy_rows())["tree"])


@every
def test_the_content_of_padding_does_not_matter(case):
    clean, dirty = layouts(toy_rows())["padded"], dirtied(layouts(toy_rows())["padded"], "old_logp", "ref_logp")
    assert step_gradient(case, clean)[0] == step_gradient(case, dirty)[0]


@every
def test_gradcheck_in_float64(case):
    (batch,) = layouts(toy_rows(groups=1))["packed"]
    batch = double(batch)
    theta = policy().detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: reduce(case.objective(outputs(t, batch), batch), counts([batch])), theta, atol=1e-6, fast_mode=True
    )


@every
def test_a_batch_without_loss_tokens_gives_zero_and_no_nan(case):
    rows = [replace(row, loss_masks=[[0] * len(m) for m in row.loss_masks]) for row in toy_rows()]
    loss, gradient = step_gradient(case, layouts(rows)["tree"])
    assert (loss, float(gradient.abs().max())) == (0, 0)


def test_zero_advantage_without_kl_gives_zero_gradient():
    rows = toy_rows()
    for row in rows:
        row.sequence_columns["advantages"] = [0.0] * 4
    assert step_gradient(CASES[0], layouts(rows)["tree"])[1].abs().max() == 0


def test_the_on_policy_gradient_is_that_of_the_mean_log_prob():
    """At ratio 1: d c_i = mean_t d log p, so the gradient is GRPO's plain one."""
    from posttrain.types import LossTerms

    def plain(out, batch):
        advantages = batch.advantages[batch.sequence.clamp_min(0)]
        forest = {"sequence": batch.sequence, "num_sequences": batch.num_sequences}
        return LossTerms(-advantages * out.logp, batch.loss_mask, "sequence_token", **forest)

    batches = layouts(toy_rows(old=False))["tree"]
    _, ours = step_gradient(CASES[0], batches)
    _, expected = step_gradient(Case("plain", plain), batches)
    assert torch.allclose(ours, expected, atol=1e-12)


def test_a_loop_over_completions_gives_the_same_loss():
    cfg = config(beta=0.1, epsilon=0.2, epsilon_high=0.3)
    (batch,) = layouts(toy_rows())["packed"]
    batch = double(batch)
    out = outputs(policy(), batch)
    total = 0.0
    for s in range(batch.num_sequences):
        tokens = (batch.sequence == s) & batch.loss_mask
        gaps = (out.logp - batch.old_logp)[tokens].tolist()
        advantage = float(batch.advantages[s])
        kept = [min(d, 0.3) if advantage > 0 else max(d, -0.2) for d in gaps]
        ratio = math.exp(sum(kept) / max(len(kept), 1))
        kl = [math.exp(g) - g - 1 for g in (batch.ref_logp - out.logp)[tokens].tolist()]
        if kept:
            total += -ratio * advantage + 0.1 * sum(kl) / len(kl)
    loss = float(reduce(grpo_objective(out, batch, cfg), counts([batch])))
    assert loss == pytest.approx(total / batch.num_sequences, rel=1e-9)


def test_the_ratio_by_hand():
    """d = (1.0, 0.1, -0.6), eps 0.4: A > 0 keeps (0.4, 0.1, -0.6), mean -1/30; A < 0 keeps (1.0, 0.1, -0.4), mean 0.7/3."""
    log_ratio = torch.tensor([[1.0, 0.1, -0.6, 1.0, 0.1, -0.6]], dtype=torch.float64)
    sequence = torch.tensor([[0, 0, 0, 1, 1, 1]])
    ratio = geometric_ratio(
        log_ratio,
        torch.tensor([2.0, -1.0], dtype=torch.float64),
        torch.ones(1, 6, dtype=torch.bool),
        sequence,
        2,
        epsilon=0.4,
        epsilon_high=0.4,
    )
    assert ratio.tolist() == pytest.approx([math.exp(-0.1 / 3), math.exp(0.7 / 3)])


def test_clip_metrics_are_in_log_space():
    cfg = config()
    rows = toy_rows()
    (batch,) = layouts(rows)["packed"]
    batch = double(batch)
    out = outputs(policy(), batch)
    gaps = (out.logp - batch.old_logp).detach()
    advantages = batch.advantages[batch.sequence.clamp_min(0)]
    low = ((gaps < -0.4) & (advantages < 0))[batch.loss_mask].double().mean()
    high = ((gaps > 0.4) & (advantages > 0))[batch.loss_mask].double().mean()
    assert float(low + high) > 0
    metrics = grpo_objective(out, batch, cfg).metrics
    assert float(metrics["clip_ratio/low_mean"].value / metrics["clip_ratio/low_mean"].weight) == pytest.approx(
        float(low)
    )
    assert float(metrics["clip_ratio/high_mean"].value / metrics["clip_ratio/high_mean"].weight) == pytest.approx(
        float(high)
    )


def test_r50_the_ratio_of_another_engine_weighs_whole_completions():
    """old - rollout = 0.1 on each of n tokens: the weight is exp(0.1 n), cut off above the bound."""
    from dataclasses import replace

    cfg = config(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.35)
    (batch,) = layouts(toy_rows())["packed"]
    batch = double(batch)
    batch = replace(batch, rollout_logp=batch.old_logp - 0.1)
    out = outputs(policy(), batch)
    weighted, bare = grpo_objective(out, batch, cfg), grpo_objective(out, replace(batch, rollout_logp=None), cfg)
    for s in range(batch.num_sequences):
        tokens = (batch.sequence == s) & batch.loss_mask
        n = int(tokens.sum())
        if n:
            assert (weighted.terms / bare.terms)[tokens].tolist() == pytest.approx([min(math.exp(0.1 * n), 1.35)] * n)
    assert float(weighted.metrics["sampling/sampling_logp_difference/max"].value) == pytest.approx(0.1)
    assert "sampling/kl" in weighted.metrics and "sampling/kl" not in bare.metrics


@pytest.mark.parametrize(
    ("field", "value"),
    [("delta", 3.0), ("entropy_coef", 0.1), ("off_policy_mask_threshold", 1.0)],
)
def test_what_gmpo_would_ignore_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}=.* is not supported by loss_type='gmpo'"):
        config(**{field: value})


def test_gmpo_s_config_is_of_no_other_loss():
    with pytest.raises(ConfigError, match="loss_type='grpo'"):
        config(loss_type="grpo")


def test_the_row_of_the_table_is_the_trainer_s_own_loss():
    from posttrain import GRPOConfig

    row = GRPOConfig("unused", loss_type="gmpo", epsilon=0.4, max_completion_length=16, bf16=False, report_to="none")
    (batch,) = layouts(toy_rows())["packed"]
    out = outputs(policy(), batch)
    assert grpo_objective(out, batch, row).terms.equal(grpo_objective(out, batch, config()).terms)
