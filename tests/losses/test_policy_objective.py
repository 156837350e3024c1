"""The whole GRPO objective against loops over tokens in float64, with the gradient derived by hand."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from posttrain import Batch, GRPOConfig, ModelOutputs
from posttrain.extensions.asynchronous.grpo_config import AsyncGRPOConfig
from posttrain.extensions.asynchronous.grpo_method import async_grpo_objective
from posttrain.losses.policy import LOSS_TYPES
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo import grpo_objective

LIMIT = 8
LENGTHS = (5, 1, 0, 3)  # The third completion is masked altogether.
ADVANTAGES = (1.3, -0.8, 0.7, -1.1)
OPTIONS = {
    "plain": {},
    "delta": {"delta": 1.3},
    "kl": {"beta": 0.2},
    "corrected kl": {"beta": 0.2, "use_bias_correction_kl": True},
    "dropped": {"off_policy_mask_threshold": 0.05},
}

# GMPO has one ratio a completion and its own tests (test_gmpo.py).
TOKEN_LOSSES = [name for name in LOSS_TYPES if name != "gmpo"]


def config(folder, kind, level="token", **settings):
    if kind == "cispo":
        settings = {"epsilon_high": 1.1, **settings}
    return GRPOConfig(
        str(folder), loss_type=kind, importance_sampling_level=level, max_completion_length=LIMIT, bf16=False,
        report_to="none", **settings,
    )  # fmt: skip


def numbers(seed, count=4, width=5):
    made = torch.Generator().manual_seed(seed)

    def draw(scale):
        return torch.randn(count, width, generator=made, dtype=torch.float64) * scale

    logp = -draw(1.0).abs() - 0.1
    return {"logp": logp, "old": logp + draw(0.3), "ref": logp + draw(0.3), "entropy": draw(1.0).abs()}


def batch_of(given, lengths=LENGTHS, advantages=ADVANTAGES):
    rows, width = given["logp"].shape
    grid = torch.zeros(rows, width, dtype=torch.long)
    return Batch(
        input_ids=grid, position_ids=grid, seen_until=grid + 1, predictor=grid,
        loss_mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        sequence=torch.arange(rows)[:, None].expand(rows, width), num_sequences=rows,
        advantages=torch.tensor(advantages, dtype=torch.float64), old_logp=given["old"], ref_logp=given["ref"],
    )  # fmt: skip


def by_hand(given, cfg):
    """``(loss, d loss / d logp)``, each a loop; every derivative is written out, none comes from autograd."""
    lp, old, ref = (given[name].tolist() for name in ("logp", "old", "ref"))
    kind, level = cfg.loss_type, "sequence" if cfg.loss_type == "luspo" else cfg.importance_sampling_level
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    tokens, loss = sum(LENGTHS), 0.0
    grad = [[0.0] * len(row) for row in lp]
    for i, (n, a) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        if n == 0:
            continue
        share = {"grpo": 1 / (n * 4), "sapo": 1 / (n * 4), "dr_grpo": 1 / (4 * LIMIT), "luspo": 1 / 4}.get(
            kind, 1 / tokens
        )
        gaps = [lp[i][t] - old[i][t] for t in range(n)]
        kept = a >= 0 or cfg.off_policy_mask_threshold is None or -sum(gaps) / n <= cfg.off_policy_mask_threshold
        if kind == "vespo":
            k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            phi = math.exp(lam + k * sum(gaps) - lam * math.exp(sum(gaps)))
        for t in range(n):
            sequence = level == "sequence" and kind != "vespo"
            r = math.exp(sum(gaps) / n if sequence else gaps[t])
            # What d log r / d lp of every token of this sequence is: 1/n each, or 1 for the token alone.
            own, others = (1 / n, 1 / n) if sequence else (1.0, 0.0)
            if kind == "cispo":
                value, slope, direct = -min(r, high) * a * lp[i][t], 0.0, -min(r, high) * a
            elif kind == "vespo":
                value, slope, direct = -phi * a * lp[i][t], 0.0, -phi * a
            elif kind == "sapo":
                tau = 1.0 if a > 0 else 1.05
                s = 1 / (1 + math.exp(-tau * (r - 1)))
                value, slope, direct = -a * 4 / tau * s, -a * 4 * s * (1 - s) * r, 0.0
            else:
                free = r if cfg.delta is None else min(r, cfg.delta)
                fixed = min(max(r, 1 - cfg.epsilon), 1 + high)
                free_slope = 0.0 if cfg.delta is not None and r > cfg.delta else r
                fixed_slope = r if 1 - cfg.epsilon < r < 1 + high else 0.0
                takes_free = free * a < fixed * a
                value = -min(free * a, fixed * a)
                slope, direct = -a * (free_slope if takes_free else fixed_slope), 0.0
            value, slope, direct = (x * kept for x in (value, slope, direct))
            if cfg.beta:
                d = ref[i][t] - lp[i][t]
                kl, weight = math.exp(d) - d - 1, r if cfg.use_bias_correction_kl else 1.0
                value += cfg.beta * kl * weight
                direct += cfg.beta * weight * (1 - math.exp(d))
                slope += cfg.beta * kl * r if cfg.use_bias_correction_kl else 0.0
            loss += value * share
            grad[i][t] += direct * share
            for u in range(n):
                grad[i][u] += slope * share * (own if u == t else others)
    return loss, grad


CASES = [
    (kind, level, name)
    for kind, level, name in itertools.product(TOKEN_LOSSES, ("token", "sequence"), OPTIONS)
    if not (kind == "luspo" and (level == "token" or "kl" in name)) and not (kind == "vespo" and level == "sequence")
]


@pytest.mark.parametrize(("kind", "level", "name"), CASES)
def test_loss_and_gradient_are_those_derived_by_hand(tmp_path, kind, level, name):
    cfg = config(tmp_path, kind, level, **OPTIONS[name])
    given = numbers(3)
    loss, grad = by_hand(given, cfg)
    logp = given["logp"].clone().requires_grad_()
    terms = grpo_objective(ModelOutputs(logp=logp, entropy=given["entropy"]), batch_of(given), cfg)
    ours = reduce(terms, Denominators(sum(LENGTHS), 4, 1))
    ours.backward()
    assert float(ours) == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(logp.grad, torch.tensor(grad, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("kind", TOKEN_LOSSES)
def test_r33_a_batch_without_a_trained_token_is_zero_and_no_nan(tmp_path, kind):
    cfg = config(tmp_path, kind, "sequence" if kind == "luspo" else "token")
    given = numbers(1)
    logp = given["logp"].clone().requires_grad_()
    batch = batch_of(given, lengths=(0, 0, 0, 0))
    terms = grpo_objective(ModelOutputs(logp=logp, entropy=given["entropy"]), batch, cfg)
    loss = reduce(terms, Denominators(0, 4, 1))
    loss.backward()
    assert float(loss) == 0.0
    assert not logp.grad.any()


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_r33_micro_batches_add_up_to_the_whole(tmp_path, kind, pieces):
    """Uneven lengths, cut into one, two or four micro-batches: one gradient, divided by the counts of the step."""
    cfg, given = config(tmp_path, kind, beta=0.1), numbers(5)
    grads = []
    for count in (1, pieces):
        logp = given["logp"].clone().requires_grad_()
        for rows in torch.arange(4).chunk(count):
            part = {name: values[rows] for name, values in given.items()}
            batch = batch_of(part, [LENGTHS[i] for i in rows], [ADVANTAGES[i] for i in rows])
            out = ModelOutputs(logp=logp[rows], entropy=part["entropy"])
            reduce(grpo_objective(out, batch, cfg), Denominators(sum(LENGTHS), 4, count)).backward()
        grads.append(logp.grad)
    assert torch.allclose(*grads, atol=1e-12)


def test_gspo_with_token_gradients_is_gspo_where_advantages_are_constant(tmp_path):
    """Equal in value always, and in gradient because an advantage is that of the whole sequence and the loss a mean over it."""
    given, found = numbers(7), []
    for level in ("sequence", "sequence_token"):
        logp = given["logp"].clone().requires_grad_()
        cfg = config(tmp_path, "grpo", level)
        loss = reduce(
            grpo_objective(ModelOutputs(logp=logp, entropy=given["entropy"]), batch_of(given), cfg),
            Denominators(sum(LENGTHS), 4, 1),
        )
        loss.backward()
        found.append((float(loss), logp.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-12)


def test_one_token_far_from_the_reference_does_not_decide_the_loss(tmp_path):
    given = numbers(2)
    given["ref"][0, 0] = given["logp"][0, 0] + 80.0
    logp = given["logp"].clone().requires_grad_()
    terms = grpo_objective(
        ModelOutputs(logp=logp, entropy=given["entropy"]),
        batch_of(given),
        config(tmp_path, "dapo", beta=0.1, use_bias_correction_kl=False),
    )
    assert float(terms.terms.abs().max()) <= 0.1 * math.exp(20.0)
    assert torch.isfinite(terms.terms).all()


def test_the_kl_of_a_filtered_token_stays(tmp_path):
    """Nothing but the most uncertain token has a policy term; every token is still pulled to the reference."""
    given = numbers(4)
    cfg = config(tmp_path, "dapo", beta=0.5, top_entropy_quantile=0.0, use_bias_correction_kl=False)
    terms = grpo_objective(ModelOutputs(logp=given["logp"], entropy=given["entropy"]), batch_of(given), cfg)
    batch = batch_of(given)
    d = given["ref"] - given["logp"]
    pull = 0.5 * (d.exp() - d - 1)
    plain = (terms.terms - pull).abs() < 1e-12
    assert int((~plain & batch.loss_mask).sum()) == 1
    top = torch.where(batch.loss_mask, given["entropy"], -1.0).argmax()
    assert not plain.flatten()[top]


def test_r44_quantiles_of_more_than_two_to_the_24_tokens():
    """torch.quantile refuses so many; sorting does not."""
    from posttrain.losses.policy import entropy_mask

    count = 2**24 + 8
    entropy = torch.arange(count, dtype=torch.float32).remainder(1000.0)[None]
    kept = entropy_mask(entropy, torch.ones(1, count, dtype=torch.bool), quantile=0.25)
    assert float(kept.float().mean()) == pytest.approx(0.25, abs=0.002)


@pytest.mark.parametrize(("mode", "expected"), [("token_truncate", 1.5), ("sequence_truncate", 2.0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_weight_of_a_sequence_counts_once_in_its_mean(tmp_path, mode, expected, asynchronous):
    """One token at ratio 3 and three at 1: the mean of the tokens is 6 / 4, that of the sequences (3 + 1) / 2."""
    given = {name: torch.full((3, 3), -1.0, dtype=torch.float64) for name in ("logp", "old", "ref", "entropy")}
    batch = batch_of(given, lengths=(1, 3, 0), advantages=(1.0, -1.0, 0.5))
    batch = replace(batch, rollout_logp=given["old"].clone())
    batch.rollout_logp[0, 0] -= math.log(3.0)
    out = ModelOutputs(logp=given["logp"], entropy=given["entropy"])
    bounds = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 5.0}
    if asynchronous:
        cfg = AsyncGRPOConfig(str(tmp_path), bf16=False, report_to="none", **bounds)
        metrics = async_grpo_objective(out, batch, cfg).metrics
    else:
        metrics = grpo_objective(out, batch, config(tmp_path, "grpo", **bounds)).metrics
    ratio = metrics["sampling/importance_sampling_ratio/mean"]
    assert float(ratio.value) / float(ratio.weight) == pytest.approx(expected)


def test_the_share_of_capped_ratios_does_not_look_at_a_cap_of_other_losses(tmp_path):
    given = {name: torch.full((1, 2), -1.0, dtype=torch.float64) for name in ("logp", "old", "ref", "entropy")}
    given["old"][0, 0] = -3.0
    batch = batch_of(given, lengths=(2,), advantages=(1.0,))
    out = ModelOutputs(logp=given["logp"], entropy=given["entropy"])
    cfg = config(tmp_path, "cispo", epsilon_high=5.0, delta=4.0)  # The ratio is e^2 = 7.4.
    share = grpo_objective(out, batch, cfg).metrics["cispo_clip_ratio"]
    assert float(share.value) / float(share.weight) == 0.5


def test_a_token_without_the_engine_s_log_prob_does_not_silence_its_vespo_sequence(tmp_path):
    given = {name: torch.full((2, 3), -1.0, dtype=torch.float64) for name in ("logp", "old", "ref", "entropy")}
    batch = batch_of(given, lengths=(3, 3), advantages=(1.0, -1.0))
    batch = replace(batch, rollout_logp=given["old"].clone())
    batch.rollout_logp[0, 1] = math.nan
    out = ModelOutputs(logp=given["logp"], entropy=given["entropy"])
    terms = grpo_objective(out, batch, config(tmp_path, "vespo", vllm_importance_sampling_mode="token_truncate"))
    assert terms.terms.tolist() == [[1.0] * 3, [-1.0] * 3]
    assert float(terms.metrics["vespo/phi_seq_mean"].value) == pytest.approx(2.0)
