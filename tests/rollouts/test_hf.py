"""transformers' generate as an engine: nothing of the checkpoint's own settings is left in what it samples."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain import ConfigError
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Sampling
from tests.conftest import build_model

VOCAB = 64
PROMPTS = [[5, 6, 7, 8, 9], [9, 11]]
OWN = {
    "suppress_tokens": list(range(10, 60)),
    "bad_words_ids": [[token] for token in range(10, 50)],
    "sequence_bias": [[[9], 50.0]],
    "forced_eos_token_id": 3,
    "min_p": 0.9,
    "eos_token_id": 9,
    "no_repeat_ngram_size": 1,
}


def sampled(engine, **settings):
    rollouts = engine.generate([Request(p, 8) for p in PROMPTS], Sampling(8, seed=3, **settings))
    return [(r.token_ids, r.finish_reason, r.logp) for r in rollouts]


@pytest.mark.parametrize("adapter", [False, True])
def test_what_a_checkpoint_says_of_generation_changes_nothing(adapter):
    model = build_model(VOCAB)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if adapter else model
    engine = HFEngine(model, pad_token_id=0)
    expected = sampled(engine)
    inner = model.get_base_model() if adapter else model
    for name, value in OWN.items():
        setattr(inner.generation_config, name, value)
    assert sampled(engine) == expected
    assert all(len(tokens) == 8 for tokens, _, _ in expected)  # No stop token was asked for.
    assert inner.generation_config.forced_eos_token_id == 3  # It is the checkpoint's again.


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"top_k": 5},
        {"top_p": 0.4, "temperature": 0.7},
        {"min_p": 0.5, "repetition_penalty": 0.6},
    ],
)
def test_log_probs_are_of_the_model_and_of_what_was_drawn_from_as_the_native_engine_has_them(settings):
    """Both are checked against one pass over each completion; paddings before a prompt are no tokens of it."""
    model = build_model(VOCAB)
    for engine in (HFEngine(model, pad_token_id=9), NativeEngine(model, pad_token_id=9)):
        for r in engine.generate([Request(p, 4) for p in PROMPTS], Sampling(6, seed=1, **settings)):
            with torch.no_grad():
                logits = model(torch.tensor([r.prompt_ids + r.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
            temperature = settings.get("temperature", 1.0)
            raw = (logits / temperature).log_softmax(-1)
            tokens = torch.tensor(r.token_ids)[:, None]
            assert torch.allclose(torch.tensor(r.logp), raw.gather(1, tokens).squeeze(1), atol=1e-4), engine.name
            drawn = drawn_from(logits, r.prompt_ids, r.token_ids, settings).gather(1, tokens).squeeze(1)
            assert torch.allclose(torch.tensor(r.processed_logp), drawn, atol=1e-4), engine.name


def drawn_from(logits, prompt, tokens, settings):
    """``(T, V)`` log-probs after penalty, temperature and cuts, by their definitions."""
    penalty, rows = settings.get("repetition_penalty", 1.0), []
    for step, row in enumerate(logits):
        x = row.clone()
        seen = sorted({*prompt, *tokens[:step]})
        x[seen] = torch.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
        p = (x / settings.get("temperature", 1.0)).softmax(-1)
        order = p.argsort(descending=True)
        keep = order[: settings.get("top_k", VOCAB)]
        mass = p[keep].cumsum(0) - p[keep]
        keep = keep[mass < settings.get("top_p", 1.0)]
        keep = keep[p[keep] >= settings.get("min_p", 0.0) * p.max()]
        rows.append(torch.full_like(p, -torch.inf).index_put((keep,), (p[keep] / p[keep].sum()).log()))
    return torch.stack(rows)


def test_without_a_cut_there_is_one_distribution():
    (r,) = HFEngine(build_model(VOCAB), pad_token_id=0).generate([Request([5])], Sampling(3, temperature=0.8))
    assert r.processed_logp is None


def test_top_logps_are_refused():
    with pytest.raises(ConfigError, match="top_logps=3: rollout_engine='hf' would leave it out"):
        HFEngine(build_model(VOCAB), pad_token_id=0).generate([Request([5])], Sampling(3, top_logps=3))
