"""The engine of the thin host: each job says what it would say alone, under weights that are named."""

import json

import pytest
import torch

from posttrain.errors import ModelError, WeightSyncError
from posttrain.extensions.serve.engine import Job, ServedEngine, score_choice
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Sampling
from tests.conftest import build_model

VOCAB = 37
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11]]
SAMPLING = Sampling(9, seed=7, stop_token_ids=(3,))


def served(kind=NativeEngine, seed=0):
    return ServedEngine(kind(build_model(VOCAB, seed=seed), pad_token_id=0))


def submit(served, prompts, n, sampling):
    jobs = [Job(Request(p, n, sampling)) for p in prompts]
    served.submit(jobs)
    return jobs


def same(jobs, model, prompts, n, sampling):
    """What jobs say is what the engine says in this thread, each request counting its draws by itself."""
    found = [rollout for job in jobs for rollout in job.rollouts.result(30)]
    # Not before: two runs of the native engine at once are not for one process.
    wanted = NativeEngine(model, pad_token_id=0).generate([Request(p, n, sampling) for p in prompts], sampling)
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-4)


def pushed(served, model, version):
    served.begin_update()
    served.load((name, p.detach().clone()) for name, p in model.named_parameters())
    served.complete_update()
    served.end_update(version)


def test_jobs_with_settings_of_their_own_do_not_change_each_other():
    model, engine = build_model(VOCAB), served()
    long = [[*range(1, 36), k] for k in range(4)]
    asked = [(PROMPTS, SAMPLING), (long, Sampling(7, seed=2, top_k=3)), ([[12]], Sampling(5, temperature=0.0, seed=3))]
    engine.paused = True
    jobs = [submit(engine, prompts, 2, sampling) for prompts, sampling in asked]
    engine.paused = False
    jobs.append(submit(engine, PROMPTS[:1], 2, SAMPLING))
    for job in [job for found in jobs for job in found]:
        job.rollouts.result(30)
    for found, (prompts, sampling) in zip(jobs, [*asked, (PROMPTS[:1], SAMPLING)], strict=True):
        same(found, model, prompts, 2, sampling)


def test_jobs_without_a_seed_draw_other_numbers_in_every_call():
    engine = served()
    found = []
    for _ in range(2):
        jobs = submit(engine, [[5, 6, 7]], 8, Sampling(9)) + submit(engine, [[5, 6, 7]], 8, SAMPLING)
        found.append([r.token_ids for r in jobs[0].rollouts.result(30)])
    assert found[0] != found[1]


def test_a_job_that_was_given_up_before_it_began_is_not_written():
    engine = served()
    engine.paused = True
    first, second = submit(engine, PROMPTS[:2], 1, SAMPLING)
    assert first.rollouts.cancel()
    engine.paused = False
    engine.submit([])
    same([second], build_model(VOCAB), PROMPTS[1:2], 1, SAMPLING)


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_weights_that_are_pushed_are_the_weights_that_write_and_score(kind):
    new, engine = build_model(VOCAB, seed=1), served(kind)
    pushed(engine, new, "1")
    jobs = submit(engine, PROMPTS, 2, Sampling(5, temperature=0.0))
    same(jobs, new, PROMPTS, 2, Sampling(5, temperature=0.0))
    assert {job.version for job in jobs} == {"1"}
    entries = score_choice(engine.model, [5, 6, 7, 8], 3)["prompt_logprobs"]
    logps = new(torch.tensor([[5, 6, 7]])).logits[0].detach().log_softmax(-1)
    assert entries[0] is None
    for at, token, line in zip(entries[1:], [6, 7, 8], logps, strict=True):
        assert at[str(token)]["logprob"] == pytest.approx(float(line[token]), abs=1e-5)
        assert set(map(str, line.topk(3).indices.tolist())) <= set(at) and len(at) <= 4


def test_a_token_that_the_model_never_says_has_a_score_that_json_can_hold():
    model = build_model(VOCAB)
    head = torch.nn.Linear(model.config.hidden_size, VOCAB)
    with torch.no_grad():
        head.bias[7] = -torch.inf
    model.set_output_embeddings(head)
    choice = score_choice(model, [5, 7, 6], 2)
    assert choice["prompt_logprobs"][1]["7"]["logprob"] == -9999.0
    json.dumps(choice, allow_nan=False)


def test_trap_s7_weights_that_did_not_come_or_are_not_known_or_of_another_shape_are_refused():
    engine, norm = served(), [("model.norm.weight", torch.ones(32))]
    engine.begin_update()
    engine.load(norm)
    with pytest.raises(ModelError, match="not received") as caught:
        engine.complete_update()
    assert "model.norm.weight" not in str(caught.value) and "lm_head" not in str(caught.value)  # Tied: one parameter.
    with pytest.raises(ModelError, match=r"model\.extra.*has no such weight"):
        engine.load([("model.extra", torch.ones(1))])
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(3,\).*\(32,\)"):
        engine.load([("model.norm.weight", torch.ones(3))])


def test_after_an_update_that_failed_what_waits_is_refused_and_a_whole_one_cures_it():
    engine = served()
    engine.begin_update()
    (waiting,) = submit(engine, PROMPTS[:1], 1, SAMPLING)
    engine.end_update(None)
    with pytest.raises(WeightSyncError, match="incomplete"):
        waiting.rollouts.result(30)
    pushed(engine, build_model(VOCAB, seed=1), "2")
    same(submit(engine, PROMPTS, 1, SAMPLING), build_model(VOCAB, seed=1), PROMPTS, 1, SAMPLING)


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_trap_s28_sampling_is_the_request_s_and_never_the_checkpoint_s(kind):
    found = []
    for settings in ({}, {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}):
        engine = served(kind)
        engine.model.generation_config.update(**settings)
        (job,) = submit(engine, [[5, 6, 7]], 4, Sampling(6, seed=3))
        found.append([r.token_ids for r in job.rollouts.result(30)])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1  # It was sampled, not argmax.
