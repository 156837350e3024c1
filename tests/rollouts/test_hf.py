"""transformers' generate as an engine: nothing of the checkpoint's own settings is left in what it samples."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from posttrain import ConfigError, RolloutError
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.sampling import generation_fields
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.models.architectures import built
from tests.wordings import raises

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


BIASED = {
    "lfm2": {"conv_bias": True}, "falcon h1": {"mamba_proj_bias": True}, "jamba": {"mamba_proj_bias": True},
    "recurrent gemma": {}, "qwen3.5": "adapter",
}  # fmt: skip


@pytest.mark.parametrize("name", BIASED)
def test_rows_of_recurrent_models_are_sampled_as_if_alone(name):
    """transformers lets padding on the left into a convolution where the projection before it has a bias."""
    changes = BIASED[name]
    model = built(name, **({} if changes == "adapter" else changes))
    if changes == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj_qkv"], lora_bias=True)).eval()
    torch.manual_seed(0)
    for part, parameter in model.named_parameters():
        if "bias" in part:
            torch.nn.init.normal_(parameter, std=0.3)
    for r in HFEngine(model, pad_token_id=0).generate([Request(p, 2) for p in PROMPTS], Sampling(6, seed=1)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([r.prompt_ids + r.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        truth = logits.log_softmax(-1).gather(1, torch.tensor(r.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(r.logp), truth, atol=1e-4, rtol=0)


def test_without_a_cut_there_is_one_distribution():
    (r,) = HFEngine(build_model(VOCAB), pad_token_id=0).generate([Request([5])], Sampling(3, temperature=0.8))
    assert r.processed_logp is None


def test_top_logps_are_refused():
    with raises(ConfigError, "top_logps=3", "rollout_engine='hf'"):
        HFEngine(build_model(VOCAB), pad_token_id=0).generate([Request([5])], Sampling(3, top_logps=3))


# Rules in transformers' words: what its own generate makes of them.
RULES = {
    "eos": {"eos_token_id": list(range(3, 40))},
    "min": {"eos_token_id": list(range(3, 40)), "min_new_tokens": 3},
    "ngram": {"no_repeat_ngram_size": 1},
    "suppress": {"suppress_tokens": list(range(5, 100))},
    "bias": {"logit_bias": {7: 100.0, 8: -5.0}, "no_repeat_ngram_size": 2},
    "strings": {"stop_strings": ["a", "e", "t", "n"]},
}
ENGINES_THAT_CAN = {"hf": HFEngine, "native": NativeEngine}


def by_transformers(model, tokenizer, prompt, kwargs):
    """Its greedy continuation of one prompt, alone."""
    kwargs = dict(kwargs)
    if "logit_bias" in kwargs:
        kwargs["sequence_bias"] = {(token,): added for token, added in kwargs.pop("logit_bias").items()}
    extra = {"tokenizer": tokenizer} if "stop_strings" in kwargs else {}
    own, model.generation_config = model.generation_config, GenerationConfig()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, **kwargs, **extra)
    model.generation_config = own
    return out[0, len(prompt) :].tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ENGINES_THAT_CAN)
@pytest.mark.parametrize("case", RULES)
def test_rules_of_generation_kwargs_do_what_they_do_in_transformers(tiny_tokenizer, name, case):
    model = build_model(len(tiny_tokenizer)).eval()
    engine = ENGINES_THAT_CAN[name](model, pad_token_id=0, tokenizer=tiny_tokenizer)
    sampling = Sampling(**({"max_new_tokens": 12, "temperature": 0.0} | generation_fields(RULES[case])))
    truth = [by_transformers(model, tiny_tokenizer, prompt, RULES[case]) for prompt in PROMPTS]
    free = [by_transformers(model, tiny_tokenizer, prompt, {}) for prompt in PROMPTS]
    assert truth != free, "the rule does something here"
    found = engine.generate([Request(p) for p in PROMPTS], sampling)
    assert [r.token_ids for r in found] == truth
    assert [r.finish_reason for r in found] == ["length" if len(t) == 12 else "stop" for t in truth]


@pytest.mark.parametrize("name", ENGINES_THAT_CAN)
@pytest.mark.parametrize("case", ["min", "ngram", "suppress", "bias"])
def test_sampled_tokens_have_the_log_probs_of_the_model_and_of_transformers_processors(tiny_tokenizer, name, case):
    model = build_model(len(tiny_tokenizer)).eval()
    engine = ENGINES_THAT_CAN[name](model, pad_token_id=0, tokenizer=tiny_tokenizer)
    rules, temperature = RULES[case], 0.7
    processors = LogitsProcessorList()
    if "logit_bias" in rules:
        processors.append(
            SequenceBiasLogitsProcessor({(token,): added for token, added in rules["logit_bias"].items()})
        )
    if "no_repeat_ngram_size" in rules:
        processors.append(NoRepeatNGramLogitsProcessor(rules["no_repeat_ngram_size"]))
    if "suppress_tokens" in rules:
        processors.append(SuppressTokensLogitsProcessor(rules["suppress_tokens"]))
    sampling = Sampling(8, temperature=temperature, seed=5, **generation_fields(rules))
    for r in engine.generate([Request(p, 3) for p in PROMPTS], sampling):
        ids = r.prompt_ids + r.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        for t, token in enumerate(r.token_ids):
            at = len(r.prompt_ids) + t
            raw = logits[at - 1 : at].clone()
            ended = MinNewTokensLengthLogitsProcessor(
                len(r.prompt_ids), rules.get("min_new_tokens", 0), rules.get("eos_token_id", [0])
            )
            shaped = ended(torch.tensor([ids[:at]]), processors(torch.tensor([ids[:at]]), raw.clone()))
            assert r.logp[t] == pytest.approx(float((raw / temperature).log_softmax(-1)[0, token]), abs=1e-4)
            assert r.processed_logp[t] == pytest.approx(
                float((shaped / temperature).log_softmax(-1)[0, token]), abs=1e-4
            )


def test_stop_strings_without_a_tokenizer_and_ids_outside_the_vocabulary_are_refused():
    engine = HFEngine(build_model(VOCAB), pad_token_id=0)
    with pytest.raises(ConfigError, match="stop_strings"):
        engine.generate([Request([5])], Sampling(4, stop_strings=("x",)))
    with pytest.raises(RolloutError, match="logit_bias"):
        engine.generate([Request([5])], Sampling(4, logit_bias=((VOCAB, 1.0),)))


def test_an_interrupt_from_another_thread_ends_the_call_with_its_current_step():
    model = build_model(VOCAB)
    engine = HFEngine(model, pad_token_id=0)
    steps = []

    def hook(*_):
        steps.append(1)
        if len(steps) == 4:
            engine.interrupt()

    handle = model.model.register_forward_pre_hook(hook)
    sampling = Sampling(50, temperature=0.8, top_k=5)
    own = replace(sampling, max_new_tokens=20)
    rollouts = engine.generate([Request([5, 6], 2), Request([7], sampling=own)], sampling)
    handle.remove()
    assert [(r.finish_reason, len(r.token_ids), len(r.logp)) for r in rollouts] == [("abort", 4, 4)] * 2 + [
        ("abort", 1, 1)
    ]
    assert all(len(r.processed_logp) == len(r.token_ids) for r in rollouts)
    assert engine.generate([Request([5, 6])], Sampling(3))[0].finish_reason == "length"
