"""Truncated sampling: what is drawn, and ratios to it without bias; a vocabulary of 12 is enumerated."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain import AsyncGRPOConfig, Batch, GRPOConfig, RLOOConfig
from posttrain.extensions.asynchronous.grpo_method import async_grpo_objective
from posttrain.losses.truncation import truncate
from posttrain.methods.base import sampler_logp
from posttrain.methods.grpo import grpo_objective
from posttrain.methods.rloo import rloo_objective
from posttrain.models.logprob import token_logprobs
from posttrain.rollouts.native.draws import apply_rules, draw_tokens
from posttrain.types import WHOLE, ModelOutputs, Sampling, Truncation

VOCABULARY, HIDDEN, TEMPERATURE = 12, 5, 0.8
CUTS = {
    "top_k": Truncation(top_k=4),
    "top_p": Truncation(top_p=0.8),
    "min_p": Truncation(min_p=0.5),
    "all": Truncation(top_k=7, top_p=0.85, min_p=0.05),
    "never": Truncation(never=(0, 5)),
    "all, never": Truncation(top_k=7, top_p=0.85, min_p=0.05, never=(0, 5)),
}


def problem(dtype=torch.float64):
    torch.manual_seed(3)
    return torch.randn(HIDDEN, dtype=dtype), (0.5 * torch.randn(VOCABULARY, HIDDEN, dtype=dtype)).requires_grad_()


def by_definition(p, cut):
    """Ids that are kept of one distribution: min-p and top-k, then the nucleus of what is left, by sorting."""
    p = p.index_fill(0, torch.tensor(cut.never, dtype=torch.long), 0.0)
    kept = [i for i in p.argsort(descending=True).tolist() if p[i] >= (cut.min_p or 0.0) * p.max() and p[i] > 0]
    kept = kept[: cut.top_k or None]
    share, mass, found = p[kept] / p[kept].sum(), 0.0, []
    for i, q in zip(kept, share.tolist(), strict=True):
        if mass < cut.top_p:
            found.append(i)
        mass += q
    return sorted(found)


def dense(hidden, weight, cut):
    """``(V,)`` log-probs of the whole distribution, through autograd, and the ids that are kept of it, found by sorting."""
    logp = (weight @ hidden / TEMPERATURE).log_softmax(-1)
    return logp, by_definition(logp.detach().exp(), cut)


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
    mass = None if out.log_mass is None else out.log_mass[:, None]
    return ModelOutputs(logp=out.logp[:, None], entropy=out.entropy[:, None], log_mass=mass)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_is_kept_is_what_the_definitions_keep(cut):
    torch.manual_seed(0)
    logits = 2 * torch.randn(200, VOCABULARY)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in truncate(logits, cut)]
    assert kept == [by_definition(row, cut) for row in logits.softmax(-1)]
    assert kept != [list(range(VOCABULARY))] * 200


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_mass_that_is_left_is_told_beside_log_probs_that_stay_as_they_are(cut, chunk):
    hidden, weight = problem()
    logp, kept = dense(hidden, weight, cut)
    out = ours(hidden, weight, cut, chunk_size=chunk)
    torch.testing.assert_close(out.logp[:, 0], logp)
    assert not out.log_mass.requires_grad and ours(hidden, weight, WHOLE).log_mass is None
    mass = logp.detach()[kept].logsumexp(0)
    torch.testing.assert_close(out.log_mass[kept, 0], mass.expand(len(kept)))
    # A token that was drawn is counted with what is left.
    others = sorted(set(range(VOCABULARY)) - set(kept))
    torch.testing.assert_close(out.log_mass[others, 0], torch.logaddexp(mass, logp.detach()[others]))


def sampled_by(logp, kept, cut_off=0.0):
    """``(V, 1)`` what an engine says: renormalised where it draws, a placeholder elsewhere."""
    mu = torch.full_like(logp, cut_off)
    mu[kept] = logp[kept].log_softmax(-1)
    return mu[:, None]


@pytest.mark.parametrize("kind", ["grpo", "grpo corrected", "rloo", "async", "async corrected"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_expected_gradient_is_the_enumerated_one(tmp_path, cut, kind):
    """That of ``sum_{v in K} pi(v) A(v) / pi_s(K)`` with the weights that sampled; without the mass it is off by pi_s(K)."""
    hidden, weight = problem()
    advantages = torch.linspace(-1.0, 2.0, VOCABULARY, dtype=torch.float64)
    logp, kept = dense(hidden, weight, cut)
    mu = sampled_by(logp.detach(), kept)
    mass = float(logp.detach()[kept].exp().sum())
    (true,) = torch.autograd.grad((logp[kept].exp() * advantages[kept]).sum() / mass, weight)
    method, cfg, foreign = METHODS[kind](str(tmp_path))
    batch = one_token_each(advantages, mu if foreign else None)

    def expected(truncation):
        terms = method(ours(hidden, weight, truncation), batch, cfg).terms.view(-1)
        return torch.autograd.grad(-(terms[kept] * mu[kept, 0].exp()).sum(), weight)[0]

    torch.testing.assert_close(expected(cut), true)
    if foreign:
        torch.testing.assert_close(expected(WHOLE), true * mass)


SHARED = {"bf16": False, "report_to": "none", "num_generations": 2}
METHODS = {
    "grpo": lambda to: (grpo_objective, GRPOConfig(to, **SHARED), False),
    "grpo corrected": lambda to: (grpo_objective, GRPOConfig(to, **SHARED), True),
    "rloo": lambda to: (rloo_objective, RLOOConfig(to, **SHARED), True),
    "async": lambda to: (async_grpo_objective, AsyncGRPOConfig(to, **SHARED, epsilon=0.9), True),
    "async corrected": lambda to: (
        async_grpo_objective,
        AsyncGRPOConfig(to, **SHARED, vllm_importance_sampling_mode="token_truncate"),
        True,
    ),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_mean_ratio_of_sampled_tokens_is_one(cut):
    """Tokens are drawn as engines draw them, in float32; the trainer has moved weights whose set is the same."""
    hidden, weight = problem(torch.float32)
    count, moved = 50_000, weight.detach() * 1.01
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = tuple((token, -math.inf) for token in cut.never)
    sampling = Sampling(1, TEMPERATURE, cut.top_k, cut.top_p, cut.min_p, logit_bias=bias)
    assert sampling.left_out == cut
    logits = (weight.detach() @ hidden).expand(count, VOCABULARY)
    drawn = draw_tokens(logits, sampling, uniform, change=lambda x: apply_rules(x, sampling, [], None))
    kept = dense(hidden, weight, cut)[1]
    assert kept == dense(hidden, moved, cut)[1] == drawn.tokens.unique().tolist()
    out = ours(hidden, moved, cut)
    said = torch.zeros(VOCABULARY, 1).index_put((drawn.tokens,), drawn.processed_logp[:, None])
    gap = {mass: (out.logp - sampler_logp(one, one_token_each(None, said)))[drawn.tokens, 0] for mass, one in
           (("told", out), ("unknown", replace(out, log_mass=None)))}  # fmt: skip
    ratio = gap["told"].exp()
    assert ratio.std() > 1e-3 and abs(ratio.mean() - 1) < 4 * ratio.std() / count**0.5
    left = float(dense(hidden, moved, cut)[0][kept].exp().sum())
    assert float(gap["unknown"].exp().mean()) == pytest.approx(left, abs=0.01) and left < 0.95


def test_the_mass_of_older_weights_goes_before_that_of_the_pass():
    hidden, weight = problem()
    out, batch = ours(hidden, weight, CUTS["top_p"]), one_token_each(None, torch.zeros(VOCABULARY, 1))
    assert torch.equal(sampler_logp(out, batch), out.log_mass)
    batch.columns["log_mass"] = torch.full((VOCABULARY, 1), -0.5)
    assert torch.equal(sampler_logp(out, batch), batch.columns["log_mass"])
