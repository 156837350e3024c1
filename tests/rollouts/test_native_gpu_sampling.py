"""Drawing on the device equals drawing on the host, row by row, whatever stands in the other rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollouts.native.device_sampling import DEAD, NAN, STOPPED, Features, Settings, choose, floor_of_mass
from posttrain.rollouts.native.sampler import Chooser
from posttrain.rollouts.sampling import draw_tokens, truncate
from posttrain.types import Sampling

VOCAB = 700
SAMPLINGS = [
    Sampling(8),
    Sampling(8, temperature=0.3),
    Sampling(8, temperature=0.0),
    Sampling(8, top_k=7),
    Sampling(8, top_k=VOCAB + 5, min_p=0.1),
    Sampling(8, top_p=0.6),
    Sampling(8, top_p=0.95, top_k=40, min_p=0.02, temperature=1.4),
    Sampling(8, repetition_penalty=1.5),
    Sampling(8, logit_bias=((5, 4.0), (6, -3.0), (699, 1.0)), temperature=0.5),
    Sampling(8, min_new_tokens=3, stop_token_ids=tuple(range(0, 700, 2)), top_p=0.8),
]


def device_draw(logits, samplings, uniform, drawn, history):
    features = Features.of(samplings)
    n = len(samplings)
    made = Settings(n + 3, VOCAB, features, torch.device("cpu"))
    slots = torch.arange(n).flip(0) + 2
    numbers, ids = made.rows(samplings)
    made.put(slots, torch.tensor(numbers, dtype=torch.float64), torch.tensor(ids, dtype=torch.long).view(n, -1))
    if features.penalty:
        for slot, tokens in zip(slots, history, strict=True):
            made.seen[slot, tokens] = True
    token, told = choose(logits.clone(), made, slots, drawn, uniform)
    assert told.shape == (n, features.width)
    assert torch.equal(told[:, 0].long(), token)
    return token, told[:, 1].contiguous().view(torch.float32), told[:, 2].contiguous().view(torch.float32), told, made


def host_draw(logits, sampling, uniform, drawn, history):
    asked = type("Asked", (), {"sampling": sampling})
    completion = type("Completion", (), {"asked": asked, "tokens": [0] * drawn, "guide": None})
    changes = sampling.min_new_tokens or sampling.logit_bias
    chooser = Chooser(None, VOCAB)
    change = (lambda x: chooser._changed(x, sampling, [completion], None)) if changes else None
    return draw_tokens(logits[None].clone(), sampling, uniform[None], [history], change)


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=25, deadline=None)
def test_every_row_draws_what_it_would_draw_alone_on_the_host(seed, spread):
    g = torch.Generator().manual_seed(seed)
    n = len(SAMPLINGS)
    logits = torch.randn(n, VOCAB, generator=g) * spread
    uniform = torch.rand(n, generator=g, dtype=torch.float64)
    drawn = torch.randint(0, 6, (n,), generator=g)
    history = [torch.randint(0, VOCAB, (9,), generator=g).tolist() for _ in range(n)]
    token, raw, processed, _, _ = device_draw(logits, SAMPLINGS, uniform, drawn, history)
    for row, sampling in enumerate(SAMPLINGS):
        truth = host_draw(logits[row], sampling, uniform[row], int(drawn[row]), history[row])
        assert int(token[row]) == int(truth.tokens), sampling
        assert float(raw[row]) == pytest.approx(float(truth.logp), abs=1e-5)
        expected = truth.logp if truth.processed_logp is None else truth.processed_logp
        assert float(processed[row]) == pytest.approx(float(expected), abs=1e-5)


def test_plain_rows_alone_take_the_short_way_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(64, VOCAB, generator=g), torch.rand(64, generator=g, dtype=torch.float64)
    samplings = [Sampling(4, temperature=0.7)] * 64
    assert not Features.of(samplings).shaped
    token, raw, _, _, _ = device_draw(logits, samplings, uniform, torch.zeros(64, dtype=torch.long), [])
    truth = draw_tokens(logits.clone(), samplings[0], uniform)
    assert torch.equal(token, truth.tokens)
    assert torch.equal(raw, truth.logp)


@given(seed=st.integers(0, 10_000), mass=st.floats(1e-3, 0.9999), spread=st.sampled_from([0.01, 1.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_bisection_finds_the_nucleus_that_sorting_finds(seed, mass, spread):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    floor = floor_of_mass(logits, torch.full((3, 1), mass))
    p = logits.double().softmax(-1)
    for row in range(3):
        kept = p[row][logits[row] >= floor[row]]
        assert float(kept.sum()) >= mass - 1e-5
        assert float(kept.sum() - kept.min()) < mass + 1e-5  # Without its last token it would be too small.
    ours, theirs = logits >= floor, truncate(logits, Sampling(1, top_p=mass)) > -torch.inf
    assert (ours != theirs).sum() <= 3  # A token at the very edge may fall either way with the order of a sum.


def test_flags_say_stopped_nan_and_dead():
    logits = torch.zeros(4, VOCAB)
    logits[0, 5] = 50.0
    logits[1, 3] = torch.nan
    logits[2, 6] = 50.0
    everything = tuple((token, -torch.inf) for token in range(VOCAB))
    samplings = [Sampling(4, stop_token_ids=(9, 5)), Sampling(4), Sampling(4, stop_token_ids=(5,)), Sampling(4, logit_bias=everything)]  # fmt: skip
    uniform = torch.full((4,), 0.5, dtype=torch.float64)
    *_, told, _ = device_draw(logits, samplings, uniform, torch.zeros(4, dtype=torch.long), [])
    assert told[0, 3] == STOPPED
    assert told[1, 3] & NAN
    assert told[2, 3] == 0
    assert told[3, 3] & DEAD


def test_a_drawn_token_is_seen_from_then_on_in_its_own_slot_only():
    samplings = [Sampling(4, repetition_penalty=2.0), Sampling(4)]
    uniform = torch.full((2,), 0.5, dtype=torch.float64)
    token, _, _, _, made = device_draw(
        torch.zeros(2, VOCAB), samplings, uniform, torch.zeros(2, dtype=torch.long), [[1], [2]]
    )
    assert made.seen[3].nonzero().flatten().tolist() == sorted({1, int(token[0])})
    assert made.seen[2].nonzero().flatten().tolist() == sorted({2, int(token[1])})
    assert not made.seen[4:].any()


def test_top_logps_are_those_of_the_raw_distribution():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    uniform = torch.full((2,), 0.5, dtype=torch.float64)
    samplings = [Sampling(4, top_logps=3, top_k=2), Sampling(4, top_logps=2)]
    *_, told, _ = device_draw(logits, samplings, uniform, torch.zeros(2, dtype=torch.long), [])
    truth = logits.log_softmax(-1).topk(3)
    assert torch.equal(told[:, 4:7].long(), truth.indices)
    torch.testing.assert_close(told[:, 7:].contiguous().view(torch.float32), truth.values)
