"""`logits_chunk_size`: how many positions have logits at once."""

from dataclasses import replace

import datasets
import pytest
import torch

import posttrain
from posttrain import PPOConfig, PPOTrainer
from posttrain.data.forest import collate
from posttrain.errors import ConfigError
from posttrain.losses.policy import LOSS_TYPES
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.grpo import GRPO
from posttrain.methods.sft import SFT
from posttrain.models import heads, logprob
from posttrain.types import State, TokenLoss
from tests.conftest import build_model
from tests.losses.properties import double, outputs, policy, toy_rows
from tests.methods.helpers import chats, grpo, grpo_args, sft, weights
from tests.wordings import raises


@pytest.mark.parametrize("size", [None, 3])
def test_it_reaches_the_loss_and_changes_no_number(size, tiny_tokenizer, tmp_path, monkeypatch):
    seen, whole = set(), heads.token_logprobs

    def watched(*args, chunk_size=None, **kwargs):
        seen.add(chunk_size)
        same = whole(*args, **kwargs)
        out = whole(*args, chunk_size=chunk_size, **kwargs)
        assert (out.logp - same.logp).abs().max() < 1e-5
        return out

    trainer = grpo(tmp_path, tiny_tokenizer, logits_chunk_size=size, max_steps=1)
    monkeypatch.setattr(heads, "token_logprobs", watched)
    trainer.train()
    assert seen == {size}


def test_it_is_a_number_of_positions(tmp_path):
    with raises(ConfigError, "logits_chunk_size=0", "1"):
        grpo_args(tmp_path, logits_chunk_size=0)


@pytest.mark.parametrize("method", ["ppo", "dpo", "kto", "bco"])
def test_it_holds_in_every_pass(method, tiny_tokenizer, tmp_path, monkeypatch):
    """Of the reference, of values and of what is measured before a step, too."""
    seen, whole = set(), heads.token_logprobs

    def watched(*args, chunk_size=None, **kwargs):
        seen.add(chunk_size)
        return whole(*args, chunk_size=chunk_size, **kwargs)

    short = {"report_to": "none", "bf16": False, "max_steps": 1, "save_strategy": "no", "logits_chunk_size": 3}
    tiny_tokenizer.pad_token = "<|endoftext|>"
    model = build_model(len(tiny_tokenizer))
    if method == "ppo":
        config = PPOConfig(
            str(tmp_path), **short, per_device_train_batch_size=2, response_length=4, num_sample_generations=0
        )
        data = datasets.Dataset.from_list([{"prompt": f"Say {i}"} for i in range(8)])
        trainer = PPOTrainer(
            config, tiny_tokenizer, model, None, lambda completions, **_: [1.0] * len(completions), data
        )
    else:
        rows = [{"prompt": f"Say {i}:", "chosen": " yes yes", "rejected": " no"} for i in range(8)]
        if method != "dpo":
            rows = [{"prompt": f"Say {i}:", "completion": " yes", "label": i % 2 == 0} for i in range(8)]
        name = method.upper()
        config = getattr(posttrain, f"{name}Config")(str(tmp_path), **short, per_device_train_batch_size=4)
        trainer = getattr(posttrain, f"{name}Trainer")(
            model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tiny_tokenizer
        )
    monkeypatch.setattr(heads, "token_logprobs", watched)
    trainer.train()
    assert seen == {3}


def test_logits_are_computed_once_where_the_gradient_of_the_log_probs_is_known(tiny_tokenizer, tmp_path, monkeypatch):
    """SFT, and GRPO on its own samples; whatever else a loss or a subclass does is computed as before."""
    counts, inner, whole = {}, logprob._Rule.logits, heads.token_logprobs

    def asked(hidden, *args, **kwargs):
        counts["asked"] += len(hidden)
        return whole(hidden, *args, **kwargs)

    def computed(self, hidden, *args):
        counts["computed"] += len(hidden)
        return inner(self, hidden, *args)

    class Own(posttrain.SFTTrainer):
        def objective(self, outputs, batch):
            return super().objective(outputs, batch)

    def own():
        options = {"report_to": "none", "bf16": False, "max_steps": 2, "save_strategy": "no"}
        args = posttrain.SFTConfig(str(tmp_path), **options)
        return Own(build_model(len(tiny_tokenizer)), args, train_dataset=chats(), processing_class=tiny_tokenizer)

    def dpo(**settings):
        options = {
            "report_to": "none",
            "bf16": False,
            "save_strategy": "no",
            "per_device_train_batch_size": 1,
        } | settings
        rows = [{"prompt": f"Say {i}:", "chosen": " yes yes", "rejected": " no"} for i in range(4)]
        args = posttrain.DPOConfig(str(tmp_path), **options)
        data = datasets.Dataset.from_list(rows)
        model = build_model(len(tiny_tokenizer))
        return posttrain.DPOTrainer(model, args=args, train_dataset=data, processing_class=tiny_tokenizer)

    monkeypatch.setattr(heads, "token_logprobs", asked)
    monkeypatch.setattr(logprob._Rule, "logits", computed)
    short = {"max_steps": 2, "optim": "sgd"}  # Adam makes whole steps of rounding errors.
    cases = [
        (lambda: sft(tmp_path, tiny_tokenizer, **short), True),
        (lambda: sft(tmp_path, tiny_tokenizer, **short, gradient_accumulation_steps=2), True),
        (lambda: sft(tmp_path, tiny_tokenizer, **short, loss_type="dft"), False),
        (own, False),
        (lambda: dpo(**short), True),
        (lambda: dpo(**short, loss_type="ipo", beta=0.5), True),
        (lambda: dpo(**short, per_device_train_batch_size=2), False),
        (lambda: dpo(**short, f_divergence_type="js_divergence"), False),
        (lambda: dpo(**short, loss_type=["sigmoid", "sft"]), False),
        (lambda: grpo(tmp_path, tiny_tokenizer, **short), True),
        (
            lambda: grpo(tmp_path, tiny_tokenizer, **short, loss_type="grpo", importance_sampling_level="sequence"),
            True,
        ),
        (lambda: grpo(tmp_path, tiny_tokenizer, **short, beta=0.1), True),
        (lambda: grpo(tmp_path, tiny_tokenizer, **short, num_iterations=2), True),
        (lambda: grpo(tmp_path, tiny_tokenizer, **short, beta=0.1, importance_sampling_level="sequence"), False),
        (lambda: grpo(tmp_path, tiny_tokenizer, **short, beta=0.1, entropy_coef=0.1), False),
    ]
    for number, (make, once) in enumerate(cases):
        counts |= {"asked": 0, "computed": 0}
        trainer = make()
        trainer.train()
        assert counts["asked"] > 0
        assert (counts["computed"] == counts["asked"]) == once, (number, counts)
        if once:
            plain = make()
            plain.method.knows_gradient = lambda batch: False
            plain.train()
            assert torch.allclose(weights(trainer), weights(plain), atol=1e-6), number


def test_what_a_method_knows_of_its_gradient_is_not_inherited_by_another_objective(tmp_path):
    class Reweighted(SFT):
        def objective(self, outputs, batch):
            return super().objective(outputs, batch)

    class Renamed(SFT):
        pass

    args = posttrain.SFTConfig(str(tmp_path), report_to="none", bf16=False)
    assert not Reweighted(args).knows_gradient(None)
    assert Renamed(args).knows_gradient(None)


OPTIONS = [
    {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": True}, {"beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_level": "sequence"}, {"importance_sampling_level": "sequence_token"}, {"delta": 1.5},
    {"off_policy_mask_threshold": 0.1}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}, {"epsilon_high": 0.5},
]  # fmt: skip
BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
@pytest.mark.parametrize("loss_type", sorted(LOSS_TYPES))
@pytest.mark.parametrize("old", [True, False])
def test_a_loss_that_is_computed_token_by_token_has_the_gradient_of_the_whole_objective(
    tmp_path, loss_type, options, old
):
    sequences = {"importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "sequence_mask"}
    needed = {"cispo": {"epsilon_high": 5.0}, "luspo": sequences}.get(loss_type, {})
    try:
        options = {"report_to": "none", "bf16": False, "loss_type": loss_type} | needed | options
        method = GRPO(posttrain.GRPOConfig(str(tmp_path), **options))
    except ConfigError:
        pytest.skip("the config refuses this combination")
    batch = double(collate(toy_rows(old=old), pad_token_id=0)[0])
    known = method.knows_gradient(batch)
    kept = {"beta", "epsilon_high", "delta", "use_bias_correction_kl"}.issuperset(
        set(options) - {"report_to", "bf16", "loss_type"}
    )
    assert isinstance(known, TokenLoss) == (loss_type in BY_TOKEN and kept and (old or method.cfg.beta > 0))
    if not isinstance(known, TokenLoss):
        return
    counts = Denominators(batch.num_loss_tokens, batch.num_episodes, 1, 1, method.counts([batch]))
    out = outputs(policy(), batch)
    logp = out.logp.detach().requires_grad_()
    terms = method.objective(replace(out, logp=logp), batch, State(own=method.start()))
    (whole,) = torch.autograd.grad(reduce(terms, counts), logp)
    leaf = terms.terms.detach().requires_grad_()
    (scale,) = torch.autograd.grad(reduce(replace(terms, terms=leaf), counts), leaf)
    at = batch.loss_mask.nonzero(as_tuple=True)
    loss, values = replace(known, scale=scale)[at], logp.detach()[at]
    parts = [slice(i, i + 5) for i in range(0, len(values), 5)]
    found = torch.cat([loss[part].gradient(values[part]) for part in parts])
    assert whole.abs().max() > 0
    assert torch.allclose(found, whole[at], rtol=1e-10, atol=1e-14)
