"""Truncated sampling: what is drawn, and that ratios and gradients are of it; a vocabulary of 12 is enumerated."""

import pytest
import torch

from posttrain import AsyncGRPOConfig, Batch, GRPOConfig
from posttrain.losses.reduce import Denominators, reduce
from posttrain.losses.truncation import kept_from, truncate
from posttrain.methods.async_grpo.objective import async_grpo_objective
from posttrain.methods.grpo import grpo_objective
from posttrain.models.logprob import token_logprobs
from posttrain.rollouts.sampling import draw_tokens
from posttrain.types import ModelOutputs, Sampling, Truncation

VOCABULARY, HIDDEN, TEMPERATURE = 12, 5, 0.8
CUTS = {
    "top_k": Truncation(top_k=4),
    "top_p": Truncation(top_p=0.8),
    "min_p": Truncation(min_p=0.5),
    "all": Truncation(top_k=7, top_p=0.85, min_p=0.05),
}


def problem(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.randn(HIDDEN, dtype=dtype), (0.5 * torch.randn(VOCABULARY, HIDDEN, dtype=dtype)).requires_grad_()


def by_definition(p, cut):
    """Ids that are kept of one distribution: min-p and top-k, then the nucleus of what is left, by sorting."""
    kept = [i for i in p.argsort(descending=True).tolist() if p[i] >= (cut.min_p or 0.0) * p.max()]
    kept = kept[: cut.top_k or None]
    share, mass, found = p[kept] / p[kept].sum(), 0.0, []
    for i, q in zip(kept, share.tolist(), strict=True):
        if mass < cut.top_p:
            found.append(i)
        mass += q
    return sorted(found)


def dense(hidden, weight, cut):
    """``(V,)`` log-probs of the policy that acts, its set found by sorting, through autograd."""
    logits = weight @ hidden / TEMPERATURE
    kept = by_definition(logits.detach().softmax(-1), cut)
    left = torch.full((VOCABULARY,), -torch.inf, dtype=logits.dtype)
    return left.index_put((torch.tensor(kept),), logits[kept].log_softmax(-1)), kept


def one_token_each(advantages, rollout_logp=None):
    """V completions of one token, one in a row: every token of the vocabulary once."""
    grid = torch.zeros(VOCABULARY, 1, dtype=torch.long)
    return Batch(
        input_ids=torch.arange(VOCABULARY)[:, None], position_ids=grid, seen_until=grid + 1, predictor=grid,
        loss_mask=grid == 0, sequence=torch.arange(VOCABULARY)[:, None], num_sequences=VOCABULARY, advantages=advantages,
        rollout_logp=rollout_logp,
    )  # fmt: skip


def ours(hidden, weight, cut, **settings):
    """Of every token of the vocabulary as the target; ``(V, 1)``."""
    rows = hidden.expand(VOCABULARY, HIDDEN).contiguous()
    targets = torch.arange(VOCABULARY)
    out = token_logprobs(rows, weight, targets, temperature=TEMPERATURE, truncation=cut, need_entropy=True, **settings)
    return ModelOutputs(logp=out.logp[:, None], entropy=out.entropy[:, None])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_is_kept_is_what_the_definitions_keep(cut):
    torch.manual_seed(0)
    logits = 2 * torch.randn(200, VOCABULARY)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in truncate(logits, cut)]
    assert kept == [by_definition(row, cut) for row in logits.softmax(-1)]
    assert (kept_from(logits, cut) > logits.amin(-1, keepdim=True)).any()


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_log_probs_and_entropy_are_of_what_is_left_in_value_and_gradient(cut, chunk):
    hidden, weight = problem()
    expected, kept = dense(hidden, weight, cut)
    out = ours(hidden, weight, cut, chunk_size=chunk, entropy_grad=True)
    torch.testing.assert_close(out.logp[kept, 0], expected[kept])
    entropy = -(expected[kept].exp() * expected[kept]).sum()
    torch.testing.assert_close(out.entropy[kept, 0], entropy.expand(len(kept)))
    loss = (out.logp[kept, 0] * torch.arange(len(kept))).sum() + out.entropy[kept[0], 0]
    (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (true,) = torch.autograd.grad((expected[kept] * torch.arange(len(kept))).sum() + entropy, weight)
    torch.testing.assert_close(found, true)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_token_outside_of_the_trainers_set_is_kept_in_it_and_has_a_gradient(cut):
    hidden, weight = problem()
    _, kept = dense(hidden, weight, cut)
    outside = min(set(range(VOCABULARY)) - set(kept))
    logits = (weight @ hidden / TEMPERATURE)[[*kept, outside]]
    out = ours(hidden, weight, cut)
    torch.testing.assert_close(out.logp[outside, 0], logits.log_softmax(-1)[-1])
    assert torch.autograd.grad(out.logp[outside, 0], weight)[0][outside].abs().max() > 0


@pytest.mark.parametrize("kind", ["grpo", "async", "async corrected"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_expected_gradient_is_the_enumerated_one_of_the_policy_that_acts(tmp_path, cut, kind):
    """``grad sum_v mu(v) A(v)``, with advantages whose mean is not 0: log-probs of the whole distribution fail here."""
    hidden, weight = problem()
    advantages = torch.linspace(-1.0, 2.0, VOCABULARY, dtype=torch.float64)
    mu, kept = dense(hidden, weight, cut)
    (true,) = torch.autograd.grad((mu[kept].exp() * advantages[kept]).sum(), weight, retain_graph=True)
    shared = {"bf16": False, "report_to": "none"}
    sampled = mu.detach()[:, None]
    if kind == "grpo":
        cfg, batch = GRPOConfig(str(tmp_path), **shared), one_token_each(advantages)
        terms = grpo_objective(ours(hidden, weight, cut), batch, cfg).terms
    else:
        mode = {"is_correction": "token_truncate"} if kind == "async corrected" else {}
        cfg = AsyncGRPOConfig(str(tmp_path), **shared, **mode)
        batch = one_token_each(advantages, torch.where(sampled.isfinite(), sampled, 0.0))
        terms = async_grpo_objective(ours(hidden, weight, cut), batch, cfg).terms
    # The expectation over what the engine draws: each token's term by its probability.
    loss = (terms[kept, 0] * mu.detach()[kept].exp()).sum()
    (found,) = torch.autograd.grad(-loss, weight)
    torch.testing.assert_close(found, true)
    whole = grpo_objective(
        ours(hidden, weight, Truncation()), one_token_each(advantages), GRPOConfig(str(tmp_path), **shared)
    )
    (wrong,) = torch.autograd.grad(-(whole.terms[kept, 0] * mu.detach()[kept].exp()).sum(), weight)
    assert (wrong - true).abs().max() > 0.01


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_mean_ratio_of_sampled_tokens_is_one(cut):
    """Tokens are drawn as engines draw them, in float32; the trainer has moved weights whose set is the same."""
    hidden, weight = problem(torch.float32)
    count, moved = 200_000, weight.detach() * 1.01
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(1, TEMPERATURE, cut.top_k, cut.top_p, cut.min_p)
    drawn = draw_tokens((weight.detach() @ hidden).expand(count, VOCABULARY), sampling, uniform)
    assert dense(hidden, weight, cut)[1] == dense(hidden, moved, cut)[1] == drawn.tokens.unique().tolist()
    logp, whole = (ours(hidden, moved, one).logp[drawn.tokens, 0] for one in (cut, Truncation()))
    ratio = (logp - drawn.processed_logp).exp()
    assert ratio.std() > 1e-3
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / count**0.5
    # Beside the engine's own, those of the whole distribution are off by the mass that was left.
    left = (whole - drawn.processed_logp).exp().mean()
    assert left == pytest.approx(
        float(dense(hidden, moved, Truncation())[0][drawn.tokens.unique()].exp().sum()), abs=0.01
    )
    assert left < 0.95


def test_a_reduced_loss_without_truncation_is_what_it_was(tmp_path):
    hidden, weight = problem()
    batch = one_token_each(torch.linspace(-1.0, 1.0, VOCABULARY, dtype=torch.float64))
    cfg = GRPOConfig(str(tmp_path), bf16=False, report_to="none")
    losses = [
        reduce(grpo_objective(ours(hidden, weight, cut), batch, cfg), Denominators(12, 12, 1))
        for cut in (Truncation(), Truncation(top_k=VOCABULARY, top_p=1.0, min_p=0.0))
    ]
    torch.testing.assert_close(losses[0], losses[1])
