"""Shared properties of the online objectives that their own files do not hold yet.

What stands where: the GRPO family in `tests/losses/test_properties.py`, GMPO in `tests/losses/test_gmpo.py`, RLOO, PPO and the
online preference methods in their test files. Each has padding, layout and split, two ranks, zero gradient, gradcheck.
"""

from dataclasses import replace

import pytest
import torch

from posttrain import A2POConfig
from posttrain.data.forest import Layout, collate
from posttrain.extensions.experimental.a2po_method import a2po_objective
from posttrain.extensions.experimental.online_dpo_method import pair_terms, sequence_sums
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo import GRPOConfig, grpo_objective
from posttrain.types import LossTerms, Row
from tests.losses.properties import Case, double, layouts, outputs, policy, step_gradient, toy_rows

BETA2 = 0.1


def grpo(name, **settings):
    cfg = GRPOConfig("unused", max_completion_length=16, bf16=False, report_to="none", **settings)
    return Case(name, lambda out, batch: grpo_objective(out, batch, cfg))


SEQUENCE = [
    grpo("gspo", loss_type="grpo", importance_sampling_level="sequence"),
    grpo("gspo-token", loss_type="grpo", importance_sampling_level="sequence_token"),
    grpo("luspo", loss_type="luspo", importance_sampling_level="sequence"),
]
A2PO = Case(
    "a2po", lambda out, batch: a2po_objective(out, batch, A2POConfig("x", bf16=False, report_to="none", beta2=BETA2))
)


def summed(values, batch):
    kept = batch.loss_mask
    start = torch.zeros(batch.num_sequences, dtype=values.dtype)
    return start.index_add(0, batch.sequence[kept], values[kept])


def a2po_step(batches, case=A2PO, world_size=1, part=None):
    """Loss and gradient; every completion of the toy rows is scored, but for those without a loss token."""
    judged = sum(int((summed(b.loss_mask.double(), b) > 0).sum()) for b in batches)
    counts = Denominators(1, 1, 1, world_size=world_size, named={"judged": judged})
    theta, total = policy(), 0.0
    for batch in map(double, batches if part is None else part):
        loss = reduce(case.objective(outputs(theta, batch), batch), counts)
        loss.backward()
        total += float(loss.detach())
    return total, theta.grad


# Sequence-level members of the GRPO family ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", SEQUENCE, ids=lambda c: c.name)
def test_zero_advantage_gives_zero_gradient(case):
    rows = toy_rows()
    for row in rows:
        row.sequence_columns["advantages"] = [0.0] * 4
    assert step_gradient(case, layouts(rows)["tree"])[1].abs().max() == 0


@pytest.mark.parametrize("case", SEQUENCE, ids=lambda c: c.name)
def test_the_on_policy_gradient_of_a_sequence_ratio_is_that_of_its_mean_log_prob(case):
    """At ratio 1 the slope of ``(prod pi / pi_old)^(1/len)`` is the mean token's; LUSPO multiplies it by the length again."""
    batches = layouts(toy_rows(old=False))["tree"]
    _, ours = step_gradient(case, batches)
    total = sum(b.num_sequences for b in batches)
    theta = policy()
    for batch in map(double, batches):
        logp = summed(outputs(theta, batch).logp, batch)
        length = summed(batch.loss_mask.double(), batch).clamp_min(1)
        worth = logp if case.name == "luspo" else logp / length
        (-(batch.advantages * worth).sum() / total).backward()
    assert torch.allclose(ours, theta.grad, atol=1e-12)


# A*-PO ----------------------------------------------------------------------------------------------------------------


def test_a2po_does_not_read_padding():
    clean, dirty = layouts(toy_rows())["padded"], layouts(toy_rows())["padded"]
    for batch in dirty:
        batch.input_ids[~batch.real] = 7
        batch.ref_logp[~batch.real] = 9.0
    (loss, gradient), (other, same) = a2po_step(clean), a2po_step(dirty)
    assert loss == other and torch.equal(gradient, same)


def test_a2po_of_two_ranks_averages_to_one_process():
    batches = layouts(toy_rows())["tree"]
    _, whole = a2po_step(batches)
    _, one = a2po_step(batches, world_size=2, part=batches[:1])
    _, two = a2po_step(batches, world_size=2, part=batches[1:])
    assert torch.allclose((one + two) / 2, whole, atol=1e-12)


def at_the_reference(rows, advantage=None):
    """The rows with the policy as its own reference."""
    batches = [replace(b, ref_logp=outputs(policy(), b).logp.detach()) for b in layouts(rows)["tree"]]
    if advantage is None:
        return batches
    return [replace(batch, advantages=torch.full_like(batch.advantages, advantage)) for batch in batches]


def test_a2po_at_its_reference_with_nothing_gained_has_no_gradient():
    assert a2po_step(at_the_reference(toy_rows(), 0.0))[1].abs().max() == 0


def test_a2po_begins_with_the_plain_policy_gradient():
    """At the reference ``d/dtheta (beta2 * 0 - A)^2 = -2 beta2 A d(sum log pi)``: REINFORCE with the advantage r - V*."""
    batches = at_the_reference(toy_rows())
    _, ours = a2po_step(batches)
    judged = sum(int((summed(b.loss_mask.double(), b) > 0).sum()) for b in batches)
    theta = policy()
    for batch in map(double, batches):
        logp = summed(outputs(theta, batch).logp, batch)
        (-2 * BETA2 * (batch.advantages * logp).sum() / judged).backward()
    assert torch.allclose(ours, theta.grad, atol=1e-12)


# Online preference methods --------------------------------------------------------------------------------------------


def pairs(advantages=(1.0, -1.0)):
    """Two prompts with two completions each, of unequal lengths; the policy is its own reference."""
    rows = [
        Row(
            [3, 4], [[5, 6, 7], [8, 9]], [[1, 1, 1], [1, 1]],
            {"advantages": list(advantages), "compared": [1.0, 1.0]}, {"ref_logp": [[-1.0] * 3, [-1.0] * 2]},
        ),
        Row(
            [9], [[2], [4, 4, 5]], [[1], [1, 1, 1]],
            {"advantages": list(advantages), "compared": [1.0, 1.0]}, {"ref_logp": [[-1.0], [-1.0] * 3]},
        ),
    ]  # fmt: skip
    (batch,) = collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=10_000), whole_rows=True)
    batch = replace(batch, ref_logp=outputs(policy(), batch).logp.detach())
    return double(batch)


def preference(batch, terms):
    theta = policy()
    spread = batch.spread_rows(terms(theta), 2)
    kept = torch.ones(batch.num_sequences, dtype=torch.bool)
    reduce(LossTerms(spread, kept, "sequence", num_sequences=4), Denominators(0, 4, 1)).backward()
    return theta.grad


def test_the_pair_loss_begins_with_the_policy_gradient_of_who_won():
    """At equal models ``-log sigmoid(beta h)`` has the slope ``-beta / 2`` in h: the winner gains beta/2, the loser loses it."""
    batch = pairs()
    advantage = 0.05 * torch.tensor([1.0, -1.0]).repeat(2)  # beta / 2 with beta = 0.1, first completions won.

    def loss(theta):
        out = outputs(theta, batch)
        return pair_terms(batch, *sequence_sums(out, batch), beta=0.1, loss_type="sigmoid")[0]

    theta = policy()
    (-(advantage * summed(outputs(theta, batch).logp, batch)).sum() / 2).backward()
    ours = preference(batch, loss)
    assert ours.abs().max() > 0
    assert torch.allclose(ours, theta.grad, atol=1e-9)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_a_pair_without_a_preference_has_no_gradient(kind):
    batch = pairs((0.0, 0.0))
    ours = preference(
        batch,
        lambda theta: pair_terms(batch, *sequence_sums(outputs(theta, batch), batch), beta=0.1, loss_type=kind)[0],
    )
    assert ours.abs().max() == 0
