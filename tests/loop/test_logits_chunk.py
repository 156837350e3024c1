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
from posttrain.types import ModelOutputs, State
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
        (lambda: sft(tmp_path, tiny_tokenizer, **short, loss_type="dft"), True),
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
            plain.method.knows_gradient = plain.method.per_token = lambda batch: False
            plain.train()
            assert torch.allclose(weights(trainer), weights(plain), atol=1e-6), number


def test_what_a_method_knows_of_its_gradient_is_not_inherited_by_another_objective(tmp_path):
    class Reweighted(SFT):
        def objective(self, outputs, batch):
            return super().objective(outputs, batch)

    class Renamed(SFT):
        pass

    args = posttrain.SFTConfig(str(tmp_path), report_to="none", bf16=False)
    assert not Reweighted(args).per_token(None)
    assert Renamed(args).per_token(None)


OPTIONS = [
    {}, {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": True}, {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence_token"}, {"off_policy_mask_threshold": 0.1}, {"delta": 1.5},
    {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}, {"vllm_importance_sampling_mode": "token_mask"},
    {"vllm_importance_sampling_mode": "sequence_truncate"}, {"vllm_importance_sampling_correction": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", sorted(LOSS_TYPES))
@pytest.mark.parametrize("old", [True, False])
def test_a_loss_is_per_token_only_if_its_gradient_is_equal_by_chunks(tmp_path, loss_type, options, old):
    """A loss that declares it gets the same gradient when only the log-probs of one chunk at a time are known."""
    sequences = {"importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "sequence_mask"}
    needed = {"cispo": {"epsilon_high": 5.0}, "luspo": sequences}.get(loss_type, {})
    try:
        cfg = posttrain.GRPOConfig(str(tmp_path), report_to="none", bf16=False, loss_type=loss_type, **needed | options)
    except ConfigError:
        pytest.skip("the config refuses this combination")
    method = GRPO(cfg)
    rows = [replace_sampled(row) for row in toy_rows(old=old)]
    batch = double(collate(rows, pad_token_id=0)[0])
    assert batch.rollout_logp is not None
    gradient = gradients(method, batch)
    at = batch.loss_mask.nonzero(as_tuple=True)
    logp = outputs(policy(), batch).logp.detach()
    whole = gradient(logp)[at]
    zero = torch.zeros_like(logp)
    chunks = [tuple(axis[i : i + 5] for axis in at) for i in range(0, len(at[0]), 5)]
    parts = torch.cat([gradient(zero.index_put(one, logp[one]))[one] for one in chunks])
    equal = torch.allclose(parts, whole, atol=1e-12)
    assert whole.abs().max() > 0
    assert equal or not method.per_token(batch)
    if not options:  # Plain token-level losses must not lose it.
        assert method.per_token(replace(batch, rollout_logp=None)) == (loss_type not in ("gmpo", "luspo", "vespo"))


def replace_sampled(row):
    noise = [[x + 0.1 * (i % 3) - 0.1 for i, x in enumerate(one)] for one in row.token_columns["ref_logp"]]
    return replace(row, token_columns=row.token_columns | {"rollout_logp": noise})


def gradients(method, batch):
    counts = Denominators(batch.num_loss_tokens, batch.num_episodes, 1, 1, method.counts([batch]))
    entropy = outputs(policy(), batch).entropy.detach()

    def gradient(logp):
        logp = logp.clone().requires_grad_()
        out = ModelOutputs(logp=logp, entropy=torch.zeros_like(logp) if method.per_token(batch) else entropy)
        terms = method.objective(out, batch, State(own=method.start()))
        return torch.autograd.grad(reduce(terms, counts), logp)[0]

    return gradient
