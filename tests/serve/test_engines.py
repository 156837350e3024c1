"""The native engine as a stream: what joins late, leaves early or lives through new weights says what it would say alone."""

import pytest
import torch

from posttrain.errors import ModelError
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.serve.engines import BatchServed, Job, NativeServed
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model

VOCAB = 37
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11]]
SAMPLING = Sampling(9, seed=7, stop_token_ids=(3,))


def submit(served, prompts, n, sampling):
    jobs = [Job(p, n, sampling, lambda job: None) for p in prompts]
    for job in jobs:
        served.submit(job)
    return jobs


def finish(served):
    while served.busy:
        served.advance()


def alone(model, prompts, n, sampling):
    """Each request counts its draws by itself, as a server's does."""
    return NativeEngine(model, pad_token_id=0).generate([Request(p, n, sampling) for p in prompts], sampling)


def same(jobs, wanted):
    found = [rollout for job in jobs for rollout in job.rollouts]
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-4)


def pushed(served, model, version, *, partial=False):
    served.begin_update()
    served.load((name, p.detach().clone()) for name, p in model.named_parameters())
    served.complete_update(partial)
    served.renewed(version)


@pytest.mark.parametrize("slots", [2, 5, 64])
@pytest.mark.parametrize("keep", [False, True])
def test_jobs_say_what_the_engine_says_in_process(slots, keep):
    model = build_model(VOCAB)
    served = NativeServed(model, max_slots=slots, keep=keep)
    for prompts in (PROMPTS, [list(range(1, 36)), PROMPTS[0]]):
        jobs = submit(served, prompts, 3, SAMPLING)
        finish(served)
        same(jobs, alone(model, prompts, 3, SAMPLING))


def test_jobs_that_join_at_any_step_with_settings_of_their_own_do_not_change_each_other():
    model = build_model(VOCAB)
    served = NativeServed(model, max_slots=4)
    long = [[*range(1, 36), k] for k in range(4)]
    asked = [(PROMPTS, SAMPLING), (long, Sampling(7, seed=2, top_k=3)), ([[12]], Sampling(5, temperature=0.0, seed=3))]
    asked += [(PROMPTS[:1], SAMPLING), (long[:2], Sampling(6, seed=1)), ([[i] for i in range(1, 9)], SAMPLING)]
    jobs = []
    for number, (prompts, sampling) in enumerate(asked):
        jobs.append(submit(served, prompts, 2, sampling))
        for _ in range(number):
            served.advance()
    finish(served)
    for found, (prompts, sampling) in zip(jobs, asked, strict=True):
        same(found, alone(model, prompts, 2, sampling))


def test_a_job_that_is_given_up_frees_its_rows_and_leaves_the_others_alone():
    model = build_model(VOCAB)
    served = NativeServed(model, max_slots=4)
    first, second = (submit(served, PROMPTS, 3, SAMPLING) for _ in range(2))
    for _ in range(3):
        served.advance()
    for job in first:
        served.drop(job)
    finish(served)
    assert all(None in job.rollouts for job in first) and not served.jobs
    same(second, alone(model, PROMPTS, 3, SAMPLING))


def test_a_job_that_ends_early_gives_what_was_written():
    model, prompts, sampling = build_model(VOCAB), [[5, 6], [7]], Sampling(9, seed=7)
    served = NativeServed(model, max_slots=2)
    jobs = submit(served, prompts, 2, sampling)
    for _ in range(4):
        served.advance()
    for job in jobs:
        served.cut(job)
    found = [rollout for job in jobs for rollout in job.rollouts]
    assert {r.finish_reason for r in found} == {"abort"}
    assert [len(r.token_ids) > 0 for r in found] == [True, True, False, False]
    for part, whole in zip(found, alone(model, prompts, 2, sampling), strict=True):
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    assert not served.busy and not served.jobs


def test_a_completion_that_outlives_its_weights_goes_on_under_the_new_ones_and_knows_where():
    old, new = build_model(VOCAB, seed=0), build_model(VOCAB, seed=1)
    served = NativeServed(build_model(VOCAB, seed=0))
    jobs = submit(served, PROMPTS, 2, Sampling(9, seed=7))
    for _ in range(5):
        served.advance()
    pushed(served, new, "4")
    finish(served)
    for job in jobs:
        for rollout, spans in zip(job.rollouts, job.spans, strict=True):
            (first, count), (second, rest) = spans
            assert (first, second, count + rest) == ("default", "4", 9)
            row = [Row(rollout.prompt_ids, [rollout.token_ids], [[1] * 9])]
            before, after = (sequence_logps(model, row)[0].tolist() for model in (old, new))
            assert rollout.logp[:count] == pytest.approx(before[:count], abs=1e-4)
            assert rollout.logp[count:] == pytest.approx(after[count:], abs=1e-4)


@pytest.mark.parametrize("kind", [NativeServed, BatchServed])
def test_weights_that_are_pushed_are_the_weights_that_write_and_score(kind):
    new = build_model(VOCAB, seed=1)
    served = kind(build_model(VOCAB, seed=0))
    pushed(served, new, "1")
    jobs = submit(served, PROMPTS, 2, Sampling(5, temperature=0.0))
    finish(served)
    same(jobs, alone(new, PROMPTS, 2, Sampling(5, temperature=0.0)))
    assert {spans[0][0] for job in jobs for spans in job.spans} == {"1"}
    entries = served.score([5, 6, 7, 8], 3)
    logps = new(torch.tensor([[5, 6, 7]])).logits[0].detach().log_softmax(-1)
    assert entries[0] is None
    for at, token, line in zip(entries[1:], [6, 7, 8], logps, strict=True):
        assert at[token][0] == pytest.approx(float(line[token]), abs=1e-5)
        assert at[token][1] == int((line > line[token]).sum()) + 1
        assert set(line.topk(3).indices.tolist()) <= set(at) and len(at) <= 4


def test_trap_s7_weights_that_did_not_come_or_are_not_known_or_of_another_shape_are_refused():
    served, norm = NativeServed(build_model(VOCAB)), [("model.norm.weight", torch.ones(32))]
    served.begin_update()
    served.load(norm)
    with pytest.raises(ModelError, match="old values") as caught:
        served.complete_update(False)
    assert "model.norm.weight" not in str(caught.value) and "lm_head" not in str(caught.value)  # Tied: one parameter.
    served.complete_update(True)
    served.load([("model.extra", torch.ones(1))])
    with pytest.raises(ModelError, match=r"does not know 1 weights: model\.extra"):
        served.complete_update(True)
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(32,\).*\(3,\)"):
        served.load([("model.norm.weight", torch.ones(3))])


def test_weights_that_are_not_numbers_fail_the_jobs_that_run_and_none_after():
    model = build_model(VOCAB)
    served, good = NativeServed(model), model.model.norm.weight.detach().clone()
    model.model.norm.weight.data.fill_(float("nan"))
    jobs = submit(served, PROMPTS, 1, SAMPLING)
    finish(served)
    assert all("NaN" in str(job.error) for job in jobs)
    model.model.norm.weight.data.copy_(good)
    jobs = submit(served, PROMPTS, 1, SAMPLING)
    finish(served)
    same(jobs, alone(model, PROMPTS, 1, SAMPLING))


@pytest.mark.parametrize("kind", [NativeServed, BatchServed])
def test_trap_s28_sampling_is_the_request_s_and_never_the_checkpoint_s(kind):
    found = []
    for settings in ({}, {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}):
        model = build_model(VOCAB)
        model.generation_config.update(**settings)
        served = kind(model)
        (job,) = submit(served, [[5, 6, 7]], 4, Sampling(6, seed=3))
        finish(served)
        found.append([r.token_ids for r in job.rollouts])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1  # It was sampled, not argmax.


def test_a_run_ends_after_so_many_requests_and_the_next_one_serves_the_rest(monkeypatch):
    monkeypatch.setattr("posttrain.serve.engines.MOST_REQUESTS", 3)
    model = build_model(VOCAB)
    served = NativeServed(model)
    jobs = submit(served, PROMPTS * 2, 1, SAMPLING)
    finish(served)
    same(jobs, alone(model, PROMPTS * 2, 1, SAMPLING))
