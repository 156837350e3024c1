"""The shared properties, for every objective there is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from posttrain.losses.policy import LOSS_TYPES
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo import GRPOConfig, grpo_objective
from posttrain.methods.sft import SFT
from posttrain.types import State
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

# GMPO has one ratio a completion and its own tests (test_gmpo.py).
TOKEN_LOSSES = [name for name in LOSS_TYPES if name != "gmpo"]


def config(loss_type, **settings):
    if loss_type == "cispo":
        settings.setdefault("epsilon_high", 5.0)
    if loss_type == "luspo":
        settings.setdefault("importance_sampling_level", "sequence")
    return GRPOConfig("unused", loss_type=loss_type, max_completion_length=16, bf16=False, report_to="none", **settings)


def grpo(loss_type, name="", **settings):
    cfg = config(loss_type, **settings)
    return Case(name or loss_type, lambda out, batch: grpo_objective(out, batch, cfg), local=loss_type == "bnpo")


def sft(loss_type):
    method = SFT(SimpleNamespace(loss_type=loss_type, label_smoothing_factor=0.0, packing=False))
    return Case(f"sft-{loss_type}", lambda out, batch: method.objective(out, batch, State()), uses_advantages=False)


CASES = [
    *[grpo(name) for name in TOKEN_LOSSES],
    grpo("grpo", "gspo", importance_sampling_level="sequence"),
    grpo("grpo", "gspo-token", importance_sampling_level="sequence_token"),
    grpo("dapo", "dapo+kl", beta=0.1),
    grpo("grpo", "grpo+kl+delta", beta=0.1, delta=1.5, use_bias_correction_kl=True),
    grpo("dapo", "dapo+entropy", entropy_coef=0.01),
    sft("nll"),
    sft("dft"),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@every
def test_any_layout_and_split_gives_the_same_loss_and_gradient(case):
    found = layouts(toy_rows())
    if case.local:  # Its normaliser is its micro-batch's own.
        assert step_gradient(case, found["padded"])[1].abs().sum() > 0
    else:
        assert_layouts_agree(case, found)


@every
def test_two_ranks_average_to_one_process(case):
    assert_ranks_average(case, layouts(toy_rows())["tree"])  # One group on one rank, two on the other.


@every
def test_the_content_of_padding_does_not_matter(case):
    clean, dirty = layouts(toy_rows())["padded"], dirtied(layouts(toy_rows())["padded"], "old_logp", "ref_logp")
    assert step_gradient(case, clean)[0] == step_gradient(case, dirty)[0]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.uses_advantages and c.name in TOKEN_LOSSES], ids=lambda c: c.name
)
def test_zero_advantage_without_kl_gives_zero_gradient(case):
    rows = toy_rows()
    for row in rows:
        row.sequence_columns["advantages"] = [0.0] * 4
    _, gradient = step_gradient(case, layouts(rows)["tree"])
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("name", [n for n in TOKEN_LOSSES if n != "luspo"])
def test_the_on_policy_gradient_is_the_plain_policy_gradient(name):
    """At ratio 1 every surrogate's slope is 1, so the gradient is that of ``-A log p`` under the same reduction."""
    case = grpo(name)
    reduction = LOSS_TYPES[name].reduction

    def plain(out, batch):
        terms = case.objective(out, batch)
        advantages = batch.advantages[batch.sequence.clamp_min(0)]
        return type(terms)(
            -advantages * out.logp,
            batch.loss_mask,
            reduction,
            sequence=batch.sequence,
            num_sequences=batch.num_sequences,
            constant=terms.constant,
        )

    batches = layouts(toy_rows(old=False))["tree"]
    _, ours = step_gradient(case, batches)
    _, expected = step_gradient(Case("plain", plain), batches)
    assert torch.allclose(ours, expected, atol=1e-12)


@every
def test_gradcheck_in_float64(case):
    (batch,) = layouts(toy_rows(groups=1))["packed"]
    batch = double(batch)
    stop_gradient = {"cispo", "vespo", "sft-dft", "gspo-token"}  # Their value is not what their gradient integrates to.
    if case.name in stop_gradient:
        pytest.skip("stops a gradient by definition; its gradient is pinned by the oracle test")
    theta = policy().detach()[:, :].clone().requires_grad_()
    counts = Denominators(batch.num_loss_tokens, batch.num_sequences, 1)
    assert torch.autograd.gradcheck(
        lambda t: reduce(case.objective(outputs(t, batch), batch), counts), theta, atol=1e-6, fast_mode=True
    )


@every
def test_a_batch_without_loss_tokens_gives_zero_and_no_nan(case):
    rows = [replace(row, loss_masks=[[0] * len(m) for m in row.loss_masks]) for row in toy_rows()]
    loss, gradient = step_gradient(case, layouts(rows)["tree"])
    assert loss == 0
    assert gradient.abs().max() == 0
