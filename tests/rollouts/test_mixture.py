"""Sampling from a mixture of two models: its distribution, its cache, and the contract of every engine."""

from contextlib import contextmanager

import pytest
import torch
from scipy.stats import chisquare

from posttrain import ConfigError, ModelError
from posttrain.algorithms.nash_md import MixtureEngine
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.rollouts import test_contract as contract
from tests.rollouts.test_contract import PROMPTS, VOCAB, requests


@pytest.fixture
def engine():
    """Both models equal: then the mixture is the model, and every test of the contract applies."""
    return MixtureEngine(build_model(VOCAB), build_model(VOCAB), pad_token_id=0, mixture_coef=0.3, max_rows=5)


# The contract, imported: pytest collects these here and gives them the fixture above.
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


def two(coef, **settings):
    return MixtureEngine(build_model(VOCAB), build_model(VOCAB, seed=5), pad_token_id=0, mixture_coef=coef, **settings)


def mixed_logits(engine, ids, coef):
    with torch.no_grad(), engine.reference() as reference:
        tokens = torch.tensor([ids])
        return (coef * reference(tokens).logits + (1 - coef) * engine.model(tokens).logits)[0]


@pytest.mark.parametrize("coef", [0.0, 0.25, 0.5, 1.0])
def test_logps_are_those_of_the_mixture_without_a_cache(coef):
    engine = two(coef)
    for r in engine.generate(requests(3), Sampling(7, temperature=0.8, stop_token_ids=(3, 4, 5), seed=1)):
        logits = mixed_logits(engine, r.prompt_ids + r.token_ids, coef)[len(r.prompt_ids) - 1 : -1] / 0.8
        truth = torch.log_softmax(logits, -1).gather(1, torch.tensor(r.token_ids)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-4)


def test_tokens_come_with_the_mixture_s_probabilities():
    engine, count = two(0.5), 3000
    rollouts = engine.generate([Request(PROMPTS[0], count)], Sampling(1, seed=3))
    expected = mixed_logits(engine, PROMPTS[0], 0.5)[-1].double().softmax(0) * count
    seen = torch.bincount(torch.tensor([r.token_ids[0] for r in rollouts]), minlength=VOCAB).double()
    often = expected >= 5
    f_obs, f_exp = seen[often].tolist(), expected[often].tolist()
    if (rest := count - sum(f_exp)) > 1e-6:
        f_obs, f_exp = [*f_obs, count - sum(f_obs)], [*f_exp, rest]
    assert chisquare(f_obs, f_exp).pvalue > 1e-4
    alone = mixed_logits(engine, PROMPTS[0], 0.0)[-1].double().softmax(0) * count
    assert ((seen - alone).abs().sum() / count) > 0.1  # The policy alone would look different.


def read_tokens(model):
    counts = []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: counts.append(args[0].numel()))
    return counts


def test_each_model_reads_a_token_once():
    engine = two(0.5)
    counts = [read_tokens(engine.model)]
    with engine.reference() as reference:
        counts.append(read_tokens(reference))
    engine.generate([Request(PROMPTS[0], 2)], Sampling(9, seed=0))
    for seen in counts:
        assert seen == [2 * len(PROMPTS[0])] + [2] * 8  # The last token is drawn and never read.


@pytest.mark.parametrize(("coef", "idle"), [(0.0, "reference"), (1.0, "policy")])
def test_a_model_without_a_share_is_not_run(coef, idle):
    engine = two(coef)
    with engine.reference() as reference:
        seen = read_tokens(reference if idle == "reference" else engine.model)
    engine.generate(requests(1), Sampling(3, seed=0))
    assert seen == []


def test_rows_that_stopped_leave_the_batch():
    engine = two(0.5)
    seen = read_tokens(engine.model)
    rollouts = engine.generate(requests(6), Sampling(12, stop_token_ids=tuple(range(3, 15)), seed=1))
    lengths = [len(r.token_ids) for r in rollouts]
    assert len(set(lengths)) > 1
    assert seen[1:] == [n for t in range(1, max(lengths)) if (n := sum(length > t for length in lengths))]


def test_the_reference_may_be_the_policy_with_its_adapter_off():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(VOCAB), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()

    @contextmanager
    def off():
        with model.disable_adapter():
            yield model

    engine = MixtureEngine(model, off, pad_token_id=0, mixture_coef=0.4)
    for r in engine.generate(requests(2), Sampling(5, seed=1)):
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        with torch.no_grad():
            policy = model(ids).logits[0]
            with model.disable_adapter():
                base = model(ids).logits[0]
        assert (policy - base).abs().max() > 1e-2
        logits = (0.4 * base + 0.6 * policy)[len(r.prompt_ids) - 1 : -1]
        truth = torch.log_softmax(logits, -1).gather(1, torch.tensor(r.token_ids)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(r.logp), truth, atol=1e-4)


def test_what_cannot_be_mixed_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    tuned = get_peft_model(build_model(VOCAB), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match="prompt tuning"):
        MixtureEngine(tuned, build_model(VOCAB), pad_token_id=0)
    with pytest.raises(ConfigError, match=r"mixture_coef=1.5 must be in \[0, 1\]"):
        two(1.5).generate(requests(1), Sampling(1))
