"""Divergences of distillation against numbers by hand, dense float64 formulas and their own laws."""

import math

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.losses import distillation as d
from posttrain.models.logprob import chunked_rows

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def logps(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense(q, p, beta):
    if beta in (0.0, 1.0):
        a, b = (p, q) if beta == 0 else (q, p)
        return (a * (a / b).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def test_numbers_by_hand():
    q, p = logps([0.5, 0.5]), logps([0.75, 0.25])
    assert d.divergence(q, p, beta=0.0).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert d.divergence(q, p, beta=1.0).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    m = (0.625, 0.375)
    kl_p = 0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1])
    kl_q = 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])
    assert d.divergence(q, p, beta=0.5).item() == pytest.approx((kl_p + kl_q) / 2)


@pytest.mark.parametrize("beta", BETAS)
def test_values_equal_the_dense_formula_and_gradients_pass_gradcheck(beta):
    x, y = draw(3, 7).requires_grad_(), draw(3, 7, seed=1)
    p = y.softmax(-1)
    assert torch.allclose(d.divergence(x.log_softmax(-1), p.log(), beta=beta), dense(x.softmax(-1), p, beta))
    torch.autograd.gradcheck(lambda x: d.divergence(x.log_softmax(-1), p.log(), beta=beta), x)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta):
    x = draw(2, 9).requires_grad_()
    value = d.divergence(x.log_softmax(-1), x.detach().log_softmax(-1), beta=beta)
    assert value.abs().max() < 1e-12
    assert torch.autograd.grad(value.sum(), x)[0].abs().max() < 1e-12


def test_the_interior_tends_to_zero_at_both_ends_and_not_to_the_kl():
    q, p = logps([0.9, 0.1]), logps([0.1, 0.9])
    for beta, edge in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
        assert d.divergence(q, p, beta=beta) < 1e-5 < 1 < d.divergence(q, p, beta=edge)
    assert d.divergence(q, p, beta=0.5) <= math.log(2)


@pytest.mark.parametrize("beta", BETAS)
def test_ids_that_neither_side_allows_change_nothing(beta):
    x, y = draw(2, 6).requires_grad_(), draw(2, 6, seed=1)
    wide = torch.cat([x, torch.full((2, 3), -torch.inf)], -1).log_softmax(-1)
    other = torch.cat([y, torch.full((2, 3), -torch.inf)], -1).log_softmax(-1)
    value, plain = (d.divergence(*pair, beta=beta) for pair in ((wide, other), (x.log_softmax(-1), y.log_softmax(-1))))
    assert torch.allclose(value, plain)
    a, b = (torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (value, plain))
    assert torch.allclose(a, b) and a.isfinite().all()


def test_mass_where_the_other_side_has_none_is_infinite_for_a_kl_alone():
    q, p = logps([0.5, 0.5]), logps([1.0, 0.0])
    assert d.divergence(q, p, beta=1.0).isinf() and d.divergence(p, q, beta=0.0).isinf()
    assert d.divergence(q, p, beta=0.0).isfinite() and d.divergence(q, p, beta=0.5).isfinite()


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ConfigError):
        d.divergence(logps([1.0]), logps([1.0]), beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_a_tail_and_all_ids_but_one_are_the_whole_divergence(beta):
    x, y = draw(4, 6).log_softmax(-1), draw(4, 6, seed=1).log_softmax(-1)
    ids = torch.arange(5).expand(4, 5)
    sparse = d.divergence(d.with_tail(x.gather(-1, ids)), d.with_tail(y.gather(-1, ids)), beta=beta)
    assert torch.allclose(sparse, d.divergence(x, y, beta=beta), atol=1e-6)


def test_a_full_support_has_a_tail_of_exp_minus_16():
    assert d.with_tail(logps([0.5, 0.5]))[0, -1].item() == pytest.approx(-16.118, abs=1e-3)
    assert d.with_tail(logps([0.5, 0.5]).float()).isfinite().all()


def test_one_id_without_a_tail_is_nothing_at_all():
    x = draw(3, 5).requires_grad_()
    one = d.normalized(x.log_softmax(-1)[:, :1])
    assert d.divergence(one, torch.zeros(3, 1, dtype=torch.float64), beta=0.5).abs().max() < 1e-8


def test_a_union_counts_each_id_once():
    ids, again = d.union_support(torch.tensor([[3, 5]]), torch.tensor([[5, 7]]))
    assert ids.tolist() == [[3, 5, 5, 7]] and again.tolist() == [[False, False, True, False]]


def test_the_score_surrogate_has_in_expectation_the_gradient_of_the_reverse_kl():
    x, p = draw(5).requires_grad_(), draw(5, seed=1).log_softmax(-1)
    log_q = x.log_softmax(-1)
    expected = (log_q.detach().exp() * d.score_surrogate(log_q, p)).sum()
    exact = d.divergence(log_q, p, beta=1.0)
    assert torch.allclose(*(torch.autograd.grad(v, x, retain_graph=True)[0] for v in (expected, exact)))


GRID = {"mask": torch.tensor([[True, True, True, True, False]]), "sequence": torch.tensor([[0, 0, 0, 0, -1]])}


def test_discounted_returns_by_hand_and_without_underflow():
    ones = torch.ones(1, 5)
    plain = d.discounted_returns(ones, **GRID, gamma=0.5, length_normalization=False)
    assert plain.tolist() == [[1.875, 1.75, 1.5, 1.0, 0.0]]
    assert d.discounted_returns(ones, **GRID, gamma=0.5, length_normalization=True).tolist() == [[1, 1, 1, 1, 0]]
    long = torch.ones(1, 2000)
    grid = {"mask": long.bool(), "sequence": torch.zeros(1, 2000, dtype=torch.long)}
    assert torch.allclose(d.discounted_returns(long, **grid, gamma=0.5, length_normalization=True), long)


def test_returns_of_one_sequence_do_not_see_the_next():
    mask, sequence = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]])
    found = d.discounted_returns(
        torch.tensor([[1.0, 2.0, 4.0, 8.0]]), mask, sequence, gamma=1.0, length_normalization=False
    )
    assert found.tolist() == [[3, 2, 12, 8]]


def test_prefix_weights_by_hand():
    mask, sequence = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.long)
    found = d.prefix_weights(torch.tensor([[0.2, -0.3, 0.5]]), mask, sequence, gamma=0.5, epsilon=1e-8)
    assert torch.allclose(found, torch.tensor([[1.5, 1.4, 1.25]]))


def test_sorted_l1_ignores_the_order_and_fills_the_shorter_side():
    q, p = torch.tensor([[0.2, 0.8]]), torch.tensor([[0.8, 0.0, 0.2]])
    assert d.sorted_l1(q, p).item() == 0
    assert d.sorted_l1(q, torch.tensor([[1.0]])).item() == pytest.approx(0.4)


def test_the_hybrid_loss_is_the_divergence_where_all_tokens_match_and_never_negative():
    x, y = draw(4, 6).log_softmax(-1), draw(4, 6, seed=1).log_softmax(-1)
    order = torch.randperm(6)
    both = (torch.arange(6), order.argsort())
    matched, unmatched = d.hybrid_divergence(x, y[:, order], both, beta=0.5)
    assert torch.allclose(matched, d.divergence(x, y, beta=0.5), atol=1e-6) and unmatched.abs().max() == 0
    some = (torch.tensor([0, 1]), torch.tensor([2, 3]))
    matched, unmatched = d.hybrid_divergence(x, y, some, beta=0.5)
    assert (matched >= 0).all() and (unmatched > 0).all()


@pytest.mark.parametrize("rule", [{}, {"softcap": 2.0}, {"logit_scale": 0.3, "softcap": 3.0}])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_rows_equal_the_dense_formula_in_value_and_gradient(rule, chunk):
    hidden, weight, bias = (draw(*shape, seed=s).requires_grad_() for s, shape in enumerate(((7, 4), (9, 4), (9,))))
    p = draw(7, 9, seed=5).log_softmax(-1)

    def measure(x, part):
        log_q = x.log_softmax(-1)
        return torch.stack([d.divergence(log_q, p[part], beta=0.3), log_q[:, 0], log_q.exp().amax(-1)], 1)

    def whole():
        x = torch.nn.functional.linear(hidden, weight, bias) * rule.get("logit_scale", 1.0)
        cap = rule.get("softcap")
        return measure(cap * torch.tanh(x / cap) if cap else x, slice(None))

    ours, theirs = chunked_rows(hidden, weight, bias, measure, columns=2, chunk_size=chunk, **rule), whole()
    assert torch.allclose(ours, theirs)
    mix = draw(7, 2, seed=9)
    grads = [torch.autograd.grad((v[:, :2] * mix).sum(), (hidden, weight, bias)) for v in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b)


def test_no_rows_keep_the_graph():
    hidden = torch.zeros(0, 4, requires_grad=True)
    found = chunked_rows(hidden, torch.zeros(9, 4), None, lambda x, part: x[:, :2], columns=2)
    found.sum().backward()
    assert found.shape == (0, 2) and hidden.grad.shape == (0, 4)
