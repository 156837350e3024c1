"""Completions that are interrupted go on from their own tokens, and every token knows which weights wrote it."""

import re
from dataclasses import replace

import pytest
import torch

from posttrain import NativeEngine, RolloutError, RolloutInterrupted, ScriptedEngine
from posttrain.extensions.asynchronous.engine import ResumableGenerator, begin_completions
from posttrain.types import Request, Rollout, Sampling
from tests.conftest import build_model
from tests.wordings import raises


class Interrupted:
    """Writes a few tokens a call, ``position`` as the token, under a version that rises with every call."""

    name = "interrupted"

    def __init__(self, per_call=3, raises=False):
        self.per_call, self.raises, self.version, self.calls = per_call, raises, 0, []

    def generate(self, requests, sampling):
        self.version += 1
        self.calls.append(requests)
        found = []
        for request in requests:
            own = request.sampling or sampling
            for _ in range(request.n):
                begin, left = len(request.prompt_ids), own.max_new_tokens
                ids = list(range(begin, begin + min(self.per_call, left)))
                reason = "length" if left <= self.per_call else "abort"
                found.append(Rollout(list(request.prompt_ids), ids, [-float(i) for i in ids], reason, self.version))
        if self.raises and any(r.finish_reason == "abort" for r in found):
            raise RolloutInterrupted("stop", rollouts=found)
        return found


@pytest.mark.parametrize("raises", [False, True])
def test_an_interrupted_completion_goes_on_and_knows_its_versions(raises):
    engine = Interrupted(raises=raises)
    refreshed = []
    writer = ResumableGenerator(engine, lambda: refreshed.append(engine.version))
    rollouts = writer.finish([Request([7, 7], 2), Request([9])], Sampling(max_new_tokens=8, seed=4))
    assert [r.token_ids for r in rollouts] == [list(range(2, 10))] * 2 + [list(range(1, 9))]
    assert all(r.logp == [-float(i) for i in r.token_ids] for r in rollouts)
    assert all(r.spans == [(1, 3), (2, 3), (3, 2)] for r in rollouts)
    assert [r.version for r in rollouts] == [1, 1, 1]  # The oldest.
    assert refreshed == [0, 1, 2]
    assert [len(call) for call in engine.calls] == [2, 3, 3]  # The prompt is shared while nothing is written.
    seeds = [request.sampling.seed for call in engine.calls[1:] for request in call]
    assert len(set(seeds)) == len(seeds)


def test_an_uninterrupted_completion_is_what_the_engine_said():
    engine = ScriptedEngine([[5, 2], [6, 7, 8]])
    sampling = Sampling(max_new_tokens=3, stop_token_ids=(2,))
    rollouts = ResumableGenerator(engine).finish([Request([1], 2)], sampling)
    assert [(r.token_ids, r.finish_reason, r.spans) for r in rollouts] == [
        ([5, 2], "stop", None),
        ([6, 7, 8], "length", None),
    ]


def test_an_engine_without_log_probs_is_refused():
    class Silent(ScriptedEngine):
        def generate(self, requests, sampling):
            return [
                Rollout(list(r.prompt_ids), r.token_ids, [], r.finish_reason)
                for r in super().generate(requests, sampling)
            ]

    with raises(RolloutError, "0", "2"):
        ResumableGenerator(Silent([[5, 2]])).finish([Request([1])], Sampling(max_new_tokens=4, stop_token_ids=(2,)))


def test_a_completion_cut_in_its_middle_has_the_log_probs_of_the_weights_that_wrote_each_part(tiny_tokenizer):
    """The native engine is interrupted after a few steps and its weights change: each span equals its own policy's."""
    model = build_model(len(tiny_tokenizer))
    engine = NativeEngine(model, pad_token_id=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = []

    def refresh():
        if steps:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.02)
            engine.load_weights((), 2)
        steps.append(engine.version)

    original = engine.logits

    def logits(hidden):
        if engine.version < 2 and len(calls := steps) == 1:
            counter.append(len(calls))
            if len(counter) == 4:
                engine.interrupt()
        return original(hidden)

    counter = []
    engine.logits = logits
    engine.load_weights((), 1)
    (rollout,) = ResumableGenerator(engine, refresh).finish([Request([1, 5, 9])], Sampling(max_new_tokens=9, seed=3))
    assert [version for version, _ in rollout.spans] == [1, 2]
    first = rollout.spans[0][1]
    assert 0 < first < 9 == len(rollout.token_ids)

    def logp():
        ids = torch.tensor([[1, 5, 9, *rollout.token_ids]])
        with torch.no_grad():
            values = torch.log_softmax(model(ids).logits[0].float(), -1)
        return values[2:-1].gather(1, ids[0, 3:, None])[:, 0]

    assert torch.tensor(rollout.logp[first:]) == pytest.approx(logp()[first:], abs=1e-4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    assert torch.tensor(rollout.logp[:first]) == pytest.approx(logp()[:first], abs=1e-4)


class Hasty(NativeEngine):
    """Ends every call after a token or two, as if there were newer weights all the time."""

    def logits(self, hidden):
        self.interrupt()
        return super().logits(hidden)


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_string_ends_a_completion_that_was_interrupted_in_the_middle_of_it(tiny_tokenizer, cut):
    model, prompt = build_model(len(tiny_tokenizer)), Request([1, 5, 9])
    whole, hasty = (kind(model, pad_token_id=2, tokenizer=tiny_tokenizer) for kind in (NativeEngine, Hasty))
    odd = (i for i in range(len(tiny_tokenizer)) if not tiny_tokenizer.decode([i]).isascii())
    free = Sampling(12, temperature=0.0, logit_bias=tuple((i, -1e9) for i in odd))
    stop = tiny_tokenizer.decode(whole.generate([prompt], free)[0].token_ids[cut : cut + 6])
    sampling = replace(free, stop_strings=(stop,))
    (once,) = whole.generate([prompt], sampling)
    (parts,) = ResumableGenerator(hasty).finish([prompt], sampling)
    assert (parts.token_ids, parts.finish_reason) == (once.token_ids, once.finish_reason)
    assert parts.finish_reason == "stop" and stop in tiny_tokenizer.decode(parts.token_ids)


def test_the_most_likely_tokens_of_a_completion_survive_its_interruptions(tiny_tokenizer):
    """Calls of a harness in a worker ask for them (`top_logprobs`)."""
    model, sampling = build_model(len(tiny_tokenizer)), Sampling(8, temperature=0.0, top_logps=3)
    whole, hasty = (kind(model, pad_token_id=2) for kind in (NativeEngine, Hasty))
    (once,), (parts,) = (ResumableGenerator(one).finish([Request([1, 5, 9])], sampling) for one in (whole, hasty))
    ids = [[token for token, _ in at] for at in whole.generate([Request([1, 5, 9])], sampling)[0].top_logps]
    assert len(ids) == 8
    assert all([[token for token, _ in at] for at in rollout.top_logps or ()] == ids for rollout in (once, parts))


def test_a_guide_goes_on_where_a_completion_was_interrupted(tiny_tokenizer):
    pytest.importorskip("xgrammar")
    hasty = Hasty(build_model(len(tiny_tokenizer)), pad_token_id=2, tokenizer=tiny_tokenizer)
    sampling = Sampling(40, seed=3, stop_token_ids=(2,), guide=("regex", "<[a-c]{6}>[0-9]{4}!"))
    rollouts = ResumableGenerator(hasty).finish([Request([1, 5, 9], 4)], sampling)
    texts = [tiny_tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts]
    assert all(re.fullmatch(r"<[a-c]{6}>[0-9]{4}!", text) for text in texts), texts


def test_writings_of_several_requests_are_numbered_through():
    found = begin_completions([Request([1], 2), Request([2], 1)], Sampling(max_new_tokens=1))
    assert [(w.prompt_ids, w.index) for w in found] == [([1], 0), ([1], 1), ([2], 2)]
