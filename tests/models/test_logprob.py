"""Chunked log-probs: equal to the dense formula in value and gradient, whatever the architecture does to its logits."""

import math

import pytest
import torch
from torch.nn import functional as F

from posttrain.errors import ConfigError
from posttrain.models import logprob
from posttrain.models.logprob import token_logprobs

RULES = [
    {},
    {"temperature": 0.7},
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"softcap": 2.0, "logit_scale": 3.0, "temperature": 1.3},
]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Blocks of two positions, as a large vocabulary has them."""
    monkeypatch.setattr(logprob, "CACHE_BYTES", 0)


def dense(hidden, weight, targets, *, bias=None, logit_scale=1.0, softcap=None, temperature=1.0):
    x = F.linear(hidden, weight, bias) * logit_scale
    x = softcap * torch.tanh(x / softcap) if softcap else x
    logprobs = torch.log_softmax(x / temperature, -1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def problem(dtype=torch.float64, n=13, h=6, v=11):
    torch.manual_seed(0)
    hidden = torch.randn(n, h, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, h, dtype=dtype, requires_grad=True)
    bias = torch.randn(v, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, v, (n,))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_values_and_gradients_equal_the_dense_formula_at_any_chunk(rule, chunk):
    hidden, weight, bias, targets = problem()
    out = token_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        chunk_size=chunk,
        need_entropy=True,
        entropy_grad=True,
        need_correct=True,
        **rule,
    )
    logp, entropy = dense(hidden, weight, targets, bias=bias, **rule)
    assert torch.allclose(out.logp, logp, atol=1e-12)
    assert torch.allclose(out.entropy, entropy, atol=1e-12)
    mix = torch.randn_like(logp)
    ours = torch.autograd.grad((out.logp * mix + out.entropy * mix.cos()).sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad((logp * mix + entropy * mix.cos()).sum(), (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_gradcheck_in_float64_through_cap_scale_bias_temperature_and_entropy():
    hidden, weight, bias, targets = problem(n=4, h=3, v=5)

    def f(h, w, b):
        out = token_logprobs(
            h,
            w,
            targets[:4] % 5,
            bias=b,
            softcap=2.0,
            logit_scale=1.5,
            temperature=0.8,
            chunk_size=3,
            entropy_grad=True,
        )
        return out.logp, out.entropy

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_float32_agrees_with_a_float64_log_softmax_to_1e5():
    hidden, weight, _, targets = problem(torch.float32, n=64, h=48, v=1000)
    targets = torch.randint(0, 1000, (64,))
    truth, _ = dense(hidden.double(), weight.double(), targets)
    assert (token_logprobs(hidden, weight, targets).logp - truth).abs().max() < 1e-5


def test_bf16_weights_give_float32_logprobs_near_the_truth():
    hidden, weight, _, targets = problem(torch.float32, n=32, h=16, v=50)
    h, w = hidden.bfloat16(), weight.bfloat16()
    out = token_logprobs(h, w, targets)
    truth, _ = dense(h.double(), w.double(), targets)
    assert out.logp.dtype == torch.float32
    assert (out.logp - truth).abs().max() < 0.1


def test_autocast_runs_in_bf16_and_gives_float32_gradients():
    hidden, weight, _, targets = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = token_logprobs(hidden, weight, targets)
    out.logp.sum().backward()
    assert out.logp.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert (out.logp - dense(hidden, weight, targets)[0]).abs().max() < 0.2


def test_no_position_at_all_still_reaches_every_parameter():
    hidden, weight, _, _ = problem(n=3)
    out = token_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.long))
    out.logp.sum().backward()
    assert weight.grad.abs().sum() == 0
    assert hidden.grad.abs().sum() == 0


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = problem()
    out = token_logprobs(hidden, weight.detach(), targets)
    out.logp.sum().backward()
    assert hidden.grad is not None


def test_entropy_carries_no_gradient_unless_asked():
    hidden, weight, _, targets = problem()
    out = token_logprobs(hidden, weight, targets, need_entropy=True)
    assert not out.entropy.requires_grad


def test_correct_is_the_most_likely_token():
    hidden, weight, _, _ = problem()
    best = F.linear(hidden, weight).argmax(1)
    assert token_logprobs(hidden, weight, best, need_correct=True).correct.all()


def test_of_equal_logits_one_alone_is_the_most_likely_as_argmax_says():
    """In bfloat16 a model's two best tokens are often equal."""
    hidden, weight = torch.ones(3, 4, dtype=torch.bfloat16), torch.zeros(5, 4, dtype=torch.bfloat16)
    found = token_logprobs(hidden, weight, torch.tensor([0, 1, 4]), need_correct=True).correct
    assert found.tolist() == [True, False, False]


def test_temperature_must_be_positive():
    hidden, weight, _, targets = problem()
    with pytest.raises(ConfigError, match="temperature=0"):
        token_logprobs(hidden, weight, targets, temperature=0)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_mean_logit_and_collision_equal_the_dense_formulas_at_any_chunk_without_a_gradient(chunk):
    """The mean is of the logits before the temperature; the collision is of the tempered distribution."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(9, 6), torch.randn(13, 6, requires_grad=True), torch.randn(13)
    rule = {"bias": bias, "logit_scale": 0.7, "softcap": 3.0, "temperature": 0.5, "chunk_size": chunk}
    out = token_logprobs(hidden, weight, torch.arange(9), need_mean_logit=True, need_collision=True, **rule)
    logits = 3.0 * torch.tanh(0.7 * (hidden @ weight.T + bias) / 3.0)
    assert torch.allclose(out.mean_logit, logits.mean(1), atol=1e-6)
    assert torch.allclose(out.collision, (logits / 0.5).softmax(1).square().sum(1).log(), atol=1e-5)
    assert not out.mean_logit.requires_grad
    assert not out.collision.requires_grad
    assert out.entropy is None


@pytest.fixture
def chunks(monkeypatch):
    """One entry a chunk of logits that is computed."""
    seen, logits = [], logprob._Rule.logits

    def counted(self, hidden, weight, bias):
        seen.append(len(hidden))
        return logits(self, hidden, weight, bias)

    monkeypatch.setattr(logprob._Rule, "logits", counted)
    return seen


def gradients(parts, true, rule, *, expected=None, frozen=False):
    """Of hidden states and, unless frozen, of the output layer, for the gradient ``true`` of the log-probs."""
    hidden, weight, bias, targets = parts
    weight, bias = (weight.detach(), bias.detach()) if frozen else (weight, bias)
    out = token_logprobs(
        hidden, weight, targets, bias=bias, chunk_size=4, expected_grad=expected, need_entropy=True, **rule
    )
    return torch.autograd.grad((out.logp * true).sum(), (hidden,) if frozen else (hidden, weight, bias))


@pytest.mark.parametrize("rule", RULES)
def test_an_expected_gradient_or_a_frozen_head_computes_every_logit_once_and_the_same_gradients(rule, chunks):
    parts = problem()
    true = torch.linspace(-1.0, 2.0, 13, dtype=torch.float64)
    wanted = gradients(parts, true, rule)
    assert sum(chunks) == 2 * 13
    true[4:9] = 0.0  # A whole chunk, and a position more.
    wanted = gradients(parts, true, rule)
    for expected in (true, -0.25 * true):
        chunks.clear()
        found = gradients(parts, true, rule, expected=expected)
        assert sum(chunks) == 13
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(found, wanted, strict=True))
    chunks.clear()
    (found,) = gradients(parts, true, rule, frozen=True)
    assert sum(chunks) == 13
    assert torch.allclose(found, wanted[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("expected", "true", "times"),
    [
        (torch.ones(13), torch.linspace(0.0, 1.0, 13), 2),
        (torch.zeros(13), torch.ones(13), 2),
        (torch.ones(13), torch.tensor([math.nan] * 13), 2),
        (torch.ones(13), torch.ones(13).index_fill(0, torch.tensor([7]), math.inf), 2),
        (torch.ones(13), torch.zeros(13), 1),
        (torch.zeros(13), torch.zeros(13), 1),
        (torch.ones(13), 1.0 + 1e-4 * torch.eye(13)[7], 2),
    ],
)
def test_another_gradient_than_the_expected_one_is_computed_from_new_logits(expected, true, times, chunks):
    parts = problem()
    wanted = gradients(parts, true.double(), {})
    chunks.clear()
    found = gradients(parts, true.double(), {}, expected=expected)
    assert sum(chunks) == times * 13
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_without_gradients_nothing_is_made_ahead(chunks):
    hidden, weight, bias, targets = problem()
    with torch.no_grad():
        token_logprobs(hidden, weight, targets, bias=bias, expected_grad=torch.ones(13))
    out = token_logprobs(hidden, weight.detach(), targets, entropy_grad=True, need_entropy=True)
    chunks.clear()
    torch.autograd.grad(out.entropy.sum(), hidden)  # The head is frozen, but the entropy's gradient is not known.
    assert sum(chunks) == 13
