"""The native engine's memory: what prompts share, prefill in pieces, slots that are used again, and ends in the middle."""

import threading

import pytest
import torch

from posttrain.errors import RolloutInterrupted
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.attention import Store
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.models.test_forward import FAMILIES, family
from tests.wordings import raises

SYSTEM = list(range(10, 34))


def passes(model) -> list[tuple[int, int]]:
    seen = []
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    return seen


def agree(model, rollouts, atol=1e-3):
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(model, rows), strict=True):
        torch.testing.assert_close(torch.tensor(r.logp), truth, atol=atol, rtol=0)


def test_what_all_prompts_begin_with_is_computed_once():
    model = build_model(50)
    seen = passes(model)
    requests = [Request([*SYSTEM, 40, 41, 42], 2), Request([*SYSTEM, 43], 3)]
    rollouts = NativeEngine(model, pad_token_id=0).generate(requests, Sampling(4, seed=0))
    assert seen == [(1, 24), (2, 3), (5, 1), (5, 1), (5, 1)]
    assert [r.prompt_ids for r in rollouts] == [list(r.prompt_ids) for r in requests for _ in range(r.n)]
    agree(model, rollouts)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_sees_the_common_beginning_as_its_own_forward_does(name):
    model = family(name, "eager")
    requests = [Request([*SYSTEM, 5, 6], 3), Request([*SYSTEM, 14], 2), Request([*SYSTEM, 20, 21, 22, 23, 24], 1)]
    agree(
        model,
        NativeEngine(model, pad_token_id=0, max_slots=4, prefill_tokens=7).generate(requests, Sampling(14, seed=0)),
    )


def test_equal_prompts_keep_one_token_of_their_own():
    model = build_model(50)
    agree(model, NativeEngine(model, pad_token_id=0).generate([Request(SYSTEM, 2)] * 3, Sampling(5, seed=1)))


def test_a_long_prompt_is_computed_in_pieces_between_the_steps_of_others():
    model = build_model(50)
    seen = passes(model)
    engine = NativeEngine(model, pad_token_id=0, max_slots=2, prefill_tokens=8)
    short = Request([4], 1, Sampling(2, seed=3))
    rollouts = engine.generate([Request([5, 6], 1), short, Request([7] * 30, 1)], Sampling(12, seed=0))
    assert seen[:2] == [(2, 2), (2, 1)]
    first = seen.index((1, 8))
    assert seen[first : first + 8] == [(1, 8), (1, 1), (1, 8), (1, 1), (1, 8), (1, 1), (1, 6), (2, 1)]
    agree(model, rollouts)


def test_what_is_drawn_does_not_depend_on_pieces_or_slots():
    requests = [Request([5, 6, 7], 4), Request([8] * 20, 3), Request([9, 10], 2)]
    found = []
    for options in ({}, {"prefill_tokens": 4}, {"max_slots": 8}, {"max_slots": 2}):
        engine = NativeEngine(build_model(50), pad_token_id=0, **options)
        sampling = Sampling(150, seed=4, stop_token_ids=(3,))
        found.append([r.token_ids for r in engine.generate(requests, sampling)])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.matrix
@pytest.mark.slow
def test_ten_thousand_requests_wait_their_turn():
    engine = NativeEngine(build_model(50, num_hidden_layers=1), pad_token_id=0, max_slots=512)
    rollouts = engine.generate([Request([5 + i % 40, 7, 9], 1) for i in range(10_000)], Sampling(2, seed=0))
    assert len(rollouts) == 10_000
    assert all(r.prompt_ids[0] == 5 + i % 40 and len(r.token_ids) == 2 for i, r in enumerate(rollouts))


def interrupting(model, after: int, action) -> None:
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == after:
            action()

    model.model.register_forward_pre_hook(hook)


def test_an_interrupt_from_another_thread_returns_what_was_finished():
    model = build_model(50)
    engine = NativeEngine(model, pad_token_id=0, max_slots=2)
    interrupting(model, 8, lambda: threading.Thread(target=engine.interrupt).run())
    rollouts = engine.generate([Request([5, 6], 2), Request([7], 2), Request([8], 1)], Sampling(5, seed=0))
    assert [r.finish_reason for r in rollouts] == ["length", "length", "abort", "abort", "abort"]
    assert [len(r.token_ids) for r in rollouts][:2] == [5, 5]
    assert rollouts[4].token_ids == []
    assert len(engine.generate([Request([5, 6], 1)], Sampling(5, seed=0))[0].token_ids) == 5


def test_ctrl_c_loses_no_finished_completion():
    model = build_model(50)

    def ctrl_c():
        raise KeyboardInterrupt

    interrupting(model, 8, ctrl_c)
    engine = NativeEngine(model, pad_token_id=0, max_slots=2)
    with pytest.raises(RolloutInterrupted) as caught:
        engine.generate([Request([5, 6], 2), Request([7], 2)], Sampling(5, seed=0))
    assert [r.finish_reason for r in caught.value.rollouts] == ["length", "length", "abort", "abort"]
    assert isinstance(caught.value, KeyboardInterrupt)


def test_the_engine_works_after_an_exception():
    model = build_model(50)
    engine = NativeEngine(model, pad_token_id=0)

    def fail():
        raise ValueError("a hook of the user's")

    interrupting(model, 3, fail)
    with raises(ValueError):
        engine.generate([Request([5, 6], 2)], Sampling(5, seed=0))
    agree(model, engine.generate([Request([5, 6], 2)], Sampling(5, seed=0)))


def test_suffixes_of_a_call_that_is_done_are_freed_before_the_next_wave():
    model = build_model(50)
    capacities = []
    begin = Store.begin_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "begin_step", lambda self, n: capacities.append(self.capacity) or begin(self, n))
        requests = [Request([5], 2, Sampling(70, seed=1)), Request([6], 2, Sampling(3, seed=1))]
        NativeEngine(model, pad_token_id=0, max_slots=2).generate(requests, Sampling(4))
    assert max(capacities) == 128
    assert capacities[-2:] == [0, 64]


def test_requests_with_one_prompt_share_it():
    model = build_model(50)
    seen = passes(model)
    requests = [Request([5, 6, 7], 1, Sampling(n, seed=n)) for n in (2, 3, 4)] + [
        Request([8], 2),
        Request([5, 6, 7], 1),
    ]
    rollouts = NativeEngine(model, pad_token_id=0).generate(requests, Sampling(3, seed=0))
    assert seen[0] == (2, 3)
    assert {width for _, width in seen[1:]} == {1}
    assert [len(r.token_ids) for r in rollouts] == [2, 3, 4, 3, 3, 3]
    agree(model, rollouts)
