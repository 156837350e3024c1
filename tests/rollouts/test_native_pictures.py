"""The native engine with pictures in prompts: what it says of its tokens is what a plain forward of each row alone says."""

import math
from dataclasses import replace

import pytest

from posttrain.errors import RolloutError
from posttrain.extensions.images.encoder import install_pictures
from posttrain.rollouts.engines import choose_engine
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine, logp_gaps, native_is_exact
from posttrain.types import Request, Sampling
from tests.extensions.images.test_encoder import pictures
from tests.vision_families import NAMES, build
from tests.wordings import raises

SAMPLING = Sampling(max_new_tokens=6, seed=1)


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    model, processor = build(request.param)
    return request.param, model, install_pictures(model, processor)


def never(encoder):
    bias = tuple((token, -math.inf) for token in encoder.processor.never(320))
    return Sampling(max_new_tokens=6, seed=1, logit_bias=bias)


def requests_of(name, encoder, copies=2):
    """One picture; two; the first question under another picture; none."""
    found, made = pictures(4), []
    for chosen in ([0], [1, 2], [3], []):
        if not chosen and name == "paligemma":
            continue
        text = "".join(f"see {encoder.processor.placeholder} " for _ in chosen) + "which is it?"
        ids, placed = encoder.processor.encode(text, [found[i] for i in chosen], prompt=True)
        made.append(Request(ids, copies, pictures=placed))
    return made


def gap(model, rollouts):
    return max(float(one.max()) for one in logp_gaps(model, rollouts))


@pytest.mark.matrix
def test_the_probe_holds_pictures_and_finds_the_engine_exact(family, monkeypatch):
    name, model, encoder = family
    monkeypatch.setattr("posttrain.rollouts.native.engine.VERDICTS", {})  # Of other tests, for the same model.
    before = encoder.encoded + encoder.reused
    if name == "paligemma":  # Its own forward reads a prompt without pictures both ways too.
        assert native_is_exact(model) is not None and choose_engine(model) == "hf"
        return
    assert native_is_exact(model) is None
    assert encoder.encoded + encoder.reused > before
    assert choose_engine(model) == "native"


def test_mllama_is_sampled_by_hf():
    model, processor = build("mllama")
    encoder = install_pictures(model, processor)
    assert native_is_exact(model) is not None and choose_engine(model) == "hf"
    # Prompts with one, two, one and no picture in one call.
    rollouts = HFEngine(model, pad_token_id=256).generate(requests_of("mllama", encoder), never(encoder))
    requests = [r for r in requests_of("mllama", encoder) for _ in range(2)]
    rollouts = [replace(one, pictures=request.pictures) for one, request in zip(rollouts, requests, strict=True)]
    assert gap(model, rollouts) < 1e-4


def test_log_probs_are_those_of_each_row_alone(family):
    name, model, encoder = family
    engine = NativeEngine(model, pad_token_id=256, max_slots=5)
    assert engine.capabilities.pictures
    rollouts = engine.generate(requests_of(name, encoder), never(encoder))
    assert gap(model, rollouts) < 1e-4


def test_greedy_tokens_are_those_of_transformers(family):
    name, model, encoder = family
    greedy = Sampling(max_new_tokens=6, temperature=0.0, logit_bias=never(encoder).logit_bias)
    asked = requests_of(name, encoder, 1)
    native = NativeEngine(model, pad_token_id=256).generate(asked, greedy)
    assert [r.token_ids for r in native] == [
        r.token_ids for r in HFEngine(model, pad_token_id=256).generate(asked, greedy)
    ]


@pytest.fixture(scope="module")
def qwen():
    model, processor = build("qwen2_vl")
    return model, install_pictures(model, processor)


def test_a_picture_is_encoded_once_for_all_completions_and_requests_that_show_it(qwen):
    model, encoder = qwen
    asked = requests_of("qwen2_vl", encoder, 8)
    encoder._kept.clear()
    encoder.encoded = 0
    NativeEngine(model, pad_token_id=256).generate([*asked, asked[0]], never(encoder))
    assert encoder.encoded == 4


@pytest.mark.parametrize("keep", [True, False])
def test_a_question_under_another_picture_finds_nothing_of_the_first(qwen, keep):
    """The same ids: a cache that is keyed by ids alone would answer for the first picture."""
    model, encoder = qwen
    prompt = f"see {encoder.processor.placeholder} " + "what is it? " * 4
    asked = []
    for seed in (0, 4):
        ids, placed = encoder.processor.encode(prompt, pictures(1, seed), prompt=True)
        asked.append(Request(ids, 2, pictures=placed))
    assert asked[0].prompt_ids == asked[1].prompt_ids
    assert asked[0].pictures[0].picture != asked[1].pictures[0].picture
    engine = NativeEngine(model, pad_token_id=256)
    if keep:
        with engine.prefix_cache():
            rollouts = [r for one in asked for r in engine.generate([one], never(encoder))]
    else:
        rollouts = engine.generate(asked, never(encoder))
    assert gap(model, rollouts) < 1e-4
    foreign = [replace(rollout, pictures=asked[1].pictures) for rollout in rollouts[:2]]
    assert gap(model, [*foreign, *rollouts[2:]]) > 1e-2


@pytest.mark.parametrize("options", [{"prefill_tokens": 8}, {"max_slots": 1}])
def test_short_prefill_passes_and_few_slots_change_nothing(qwen, options):
    model, encoder = qwen
    engine = NativeEngine(model, pad_token_id=256, **options)
    rollouts = engine.generate(requests_of("qwen2_vl", encoder, 3), never(encoder))
    assert gap(model, rollouts) < 1e-4


def test_prompts_that_lost_their_pictures_are_refused(qwen):
    model, encoder = qwen
    lost = Request(requests_of("qwen2_vl", encoder)[0].prompt_ids, 1)
    for engine in (NativeEngine(model, pad_token_id=256), HFEngine(model, pad_token_id=256)):
        with pytest.raises(RolloutError, match="PT-G011"):
            engine.generate([lost], SAMPLING)


def test_a_model_without_processor_takes_no_pictures(qwen):
    _, encoder = qwen
    model, _ = build("qwen2_vl")
    engine = NativeEngine(model, pad_token_id=256)
    assert not engine.capabilities.pictures
    with raises(RolloutError):
        engine.generate(requests_of("qwen2_vl", encoder)[:1], SAMPLING)
