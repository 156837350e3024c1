"""What requests of different clients have in common is computed and read once; and nothing of it changes an answer."""

import queue

import pytest
import torch

from posttrain.rollouts.native.layers import can_pack
from posttrain.serve import native as live
from posttrain.serve.jobs import Ask, Command, Job
from posttrain.serve.native import NativeBackend
from posttrain.serve.worker import Worker
from posttrain.types import Sampling
from tests.conftest import build_model
from tests.serve.test_live import VOCAB, alone, finish, flat, job, same

SYSTEM = list(range(1, 33))
ALIKE = [[*SYSTEM, k, 7] for k in range(3)]
SHORTER = [[*SYSTEM[:20], 30, k] for k in range(2)]
OTHERS = [[9, 10], [33, 34, 35]]
SAMPLING = Sampling(12, seed=7)


@pytest.fixture
def model():
    return build_model(VOCAB)


def check(backend, model, jobs, sampling=SAMPLING):
    found = finish(backend)
    for number, prompts in jobs.items():
        same(flat(found[number]), alone(model, prompts, 2, sampling))


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("pass_tokens", [1024, 8])
def test_prompts_that_begin_otherwise_make_the_common_beginning_shorter(model, steps, pass_tokens):
    backend = NativeBackend(model, max_slots=16)
    backend.engine.prefill_tokens = pass_tokens  # 8: prompts are half computed when the others come.
    jobs, sizes = {1: ALIKE, 2: SHORTER, 3: OTHERS, 4: ALIKE}, []
    for number, prompts in jobs.items():
        backend.submit(job(number, prompts, 2, SAMPLING))
        backend.advance()
        sizes.append(len(backend.run.shared))
        for _ in range(steps):
            backend.advance()
    assert sizes == ([32, 20, 0, 0] if pass_tokens == 1024 else [8, 8, 0, 0])
    check(backend, model, jobs)


def test_a_prompt_that_is_the_whole_common_beginning_keeps_a_token_of_its_own(model):
    backend = NativeBackend(model, max_slots=16)
    jobs = {1: ALIKE, 2: [SYSTEM], 3: [SYSTEM[:18]]}
    for number, prompts in jobs.items():
        backend.submit(job(number, prompts, 2, SAMPLING))
        backend.advance()
    assert len(backend.run.shared) == 17
    check(backend, model, jobs)


def test_completions_that_live_through_new_weights_and_odd_prompts_are_those_of_the_new_weights(model):
    new = build_model(VOCAB, seed=1)
    backend = NativeBackend(build_model(VOCAB, seed=0), max_slots=16)
    backend.submit(job(1, ALIKE, 2, SAMPLING))
    for _ in range(3):
        backend.advance()
    backend.begin_update(None)
    backend.load((name, p.detach().clone()) for name, p in new.named_parameters())
    backend.end_update(1)
    backend.submit(job(2, SHORTER, 2, SAMPLING))
    backend.submit(job(3, ALIKE, 2, SAMPLING))
    assert len(backend.run.shared) == 32
    found = finish(backend)
    same(flat(found[2]), alone(new, SHORTER, 2, SAMPLING))
    same(flat(found[3]), alone(new, ALIKE, 2, SAMPLING))
    assert {runs[0][0] for runs in found[1].spans.values()} == {0}


def test_what_the_last_prompts_began_with_is_not_computed_again_until_weights_change(model):
    backend = NativeBackend(model)

    def computed(number, prompts):
        backend.submit(job(number, prompts, 2, SAMPLING))
        backend.advance()
        run = backend.run
        same(flat(finish(backend)[number]), alone(backend.engine.model, prompts, 2, SAMPLING))
        return run.counts()["prefilled"]

    assert computed(1, ALIKE) == 32 + 3 * 2
    assert computed(2, ALIKE[:1]) == 2  # A single one too.
    backend.reset_cache()
    assert computed(3, ALIKE[1:2]) == 32 + 2
    assert computed(4, ALIKE) == 3 * 2
    backend.begin_update(None)
    backend.load(build_model(VOCAB, seed=1).state_dict().items())
    backend.end_update(1)
    assert computed(5, ALIKE) == 32 + 3 * 2


def test_blocks_of_prompts_that_came_one_by_one_are_put_together(model):
    backend = NativeBackend(model, max_slots=16)
    jobs = {number: [[*SYSTEM, number], [number, *range(20)][: 4 + number]] for number in range(1, 8)}
    most = 0
    for number, prompts in jobs.items():
        backend.submit(job(number, prompts, 1, Sampling(30, seed=number)))
        backend.advance()
        most = max(most, len(backend.run.store.groups))
    assert len(backend.run.live) == 14
    assert most <= live.MOST_BLOCKS + 1
    found = finish(backend)
    for number, prompts in jobs.items():
        same(flat(found[number]), alone(model, prompts, 1, Sampling(30, seed=number)))


@pytest.mark.skipif(not can_pack(), reason="this torch packs no weights")
def test_copies_of_weights_are_made_once_enough_is_asked_for_and_go_with_the_weights(model):
    backend = NativeBackend(model)
    backend.submit(job(1, ALIKE, 2, SAMPLING))
    check(backend, model, {1: ALIKE})
    assert not backend._packed.weights
    long = Sampling(60, seed=1)
    for number in (2, 3, 4):
        backend.submit(job(number, ALIKE, 2, long))
        check(backend, model, {number: ALIKE}, long)
    packed = backend._packed
    assert sum(map(len, packed.weights)) == sum(type(m) is torch.nn.Linear for m in model.modules())
    new = build_model(VOCAB, seed=1)
    backend.begin_update(None)
    backend.load(new.state_dict().items())
    assert backend.end_update(1) == []
    assert not backend._packed.weights and backend._packed is not packed
    for number in (5, 6, 7):
        backend.submit(job(number, ALIKE, 2, long))
        check(backend, new, {number: ALIKE}, long)
    assert backend._packed.weights


class Scripted:
    """An inbox into which one command comes at each wait."""

    def __init__(self, commands):
        self.commands = list(commands)

    def get(self, timeout):
        if not self.commands:
            raise queue.Empty
        return self.commands.pop(0)

    def get_nowait(self):
        raise queue.Empty


def test_requests_that_come_one_after_the_other_begin_together(model):
    backend = NativeBackend(model)
    asks = [Ask(prompt, 1, SAMPLING) for prompt in ALIKE]
    worker = Worker(None, backend, 0)
    worker.inbox = Scripted(Command(i, "generate", {"asks": [ask], "priority": 0}) for i, ask in enumerate(asks, 1))
    worker._take(timeout=1.0)
    worker._gather()
    assert len(backend.waiting) == 3
    backend.advance()
    assert len(backend.run.live) == 3 and len(backend.run.shared) == 32


def test_a_job_that_is_dropped_while_the_beginning_is_cut_leaves_the_others_alone(model):
    backend = NativeBackend(model, max_slots=8)
    backend.engine.prefill_tokens = 8
    for number, prompts in {1: ALIKE, 2: ALIKE, 3: OTHERS}.items():
        backend.submit(Job(number, [Ask(p, 2, SAMPLING, 2 * i) for i, p in enumerate(prompts)]))
        backend.advance()
        if number == 2:
            backend.abort(1)
    check(backend, model, {2: ALIKE, 3: OTHERS})


@pytest.mark.parametrize("pass_tokens", [1024, 8])
@pytest.mark.parametrize("update", [False, True])
def test_prompts_that_begin_alike_again_share_again_though_the_server_never_rests(
    model, pass_tokens, update, monkeypatch
):
    monkeypatch.setattr(live, "SHARE_AGAIN", 2)
    backend = NativeBackend(model, max_slots=40)
    backend.engine.prefill_tokens = pass_tokens
    jobs = {1: [[34, 35, 36]], 2: ALIKE, 3: SHORTER, 4: OTHERS, 5: ALIKE[:2]}
    lengths, sizes = {1: 8, 2: 60, 3: 12, 4: 6, 5: 20}, {}
    for number, prompts in jobs.items():
        backend.submit(job(number, prompts, 2, Sampling(lengths[number], seed=number)))
        backend.advance()
        sizes[number] = len(backend.run.shared)
        for _ in range(2 if number == 1 else 14):
            backend.advance()
        if update and number == 3:
            backend.begin_update(None)
            backend.load((name, p.detach().clone()) for name, p in model.named_parameters())  # Equal ones.
            backend.end_update(1)
    assert sizes == {1: 0, 2: 0, 3: 20, 4: 0, 5: 32}
    found = finish(backend)
    for number, prompts in jobs.items():
        same(flat(found[number]), alone(model, prompts, 2, Sampling(lengths[number], seed=number)))
