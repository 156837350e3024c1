"""The native engine as a stream: what joins late, leaves early or lives through new weights says what it would say alone."""

import pytest
import torch

from posttrain.errors import ModelError
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.serve.jobs import Ask, Job, Score
from posttrain.serve.native import NativeBackend
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model

VOCAB = 37
PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11]]
SAMPLING = Sampling(9, seed=7, stop_token_ids=(3,))


def job(number, prompts, n, sampling, **kwargs):
    return Job(number, [Ask(p, n, sampling, i * n) for i, p in enumerate(prompts)], **kwargs)


def finish(backend):
    while backend.busy:
        backend.advance()
    return {j.id: j for j, failure in backend.finished if failure is None}


def flat(one):
    return [r for row in one.rollouts for r in row]


def alone(model, prompts, n, sampling):
    return NativeEngine(model, pad_token_id=0).generate([Request(p, n) for p in prompts], sampling)


def same(found, wanted):
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-4)


@pytest.mark.parametrize("slots", [2, 5, 64])
def test_a_job_says_what_the_engine_says_in_process(slots):
    model = build_model(VOCAB)
    backend = NativeBackend(model, max_slots=slots)
    backend.submit(job(1, PROMPTS, 3, SAMPLING))
    same(flat(finish(backend)[1]), alone(model, PROMPTS, 3, SAMPLING))


def test_jobs_that_join_at_any_step_do_not_change_each_other():
    model = build_model(VOCAB)
    backend = NativeBackend(model, max_slots=4)
    long = [[*range(1, 36), k] for k in range(4)]  # Common beginnings, found while others are written.
    jobs = {1: PROMPTS, 2: long, 3: [[12]], 4: PROMPTS[:1], 5: long[:2]}
    for number, prompts in jobs.items():
        backend.submit(job(number, prompts, 2, SAMPLING))
        for _ in range(number):
            backend.advance()
    found = finish(backend)
    for number, prompts in jobs.items():
        same(flat(found[number]), alone(model, prompts, 2, SAMPLING))


def test_kept_keys_and_values_change_nothing():
    model = build_model(VOCAB)
    backend = NativeBackend(model, max_slots=4, keep=True)
    for number in (1, 2):
        backend.submit(job(number, [list(range(1, 36)), PROMPTS[0]], 2, SAMPLING))
        same(flat(finish(backend)[number]), alone(model, [list(range(1, 36)), PROMPTS[0]], 2, SAMPLING))


def test_settings_of_one_job_are_not_those_of_another():
    model = build_model(VOCAB)
    backend = NativeBackend(model)
    settings = [Sampling(4, seed=1), Sampling(7, seed=2, top_k=3), Sampling(5, temperature=0.0, seed=3)]
    for number, sampling in enumerate(settings):
        backend.submit(job(number, PROMPTS, 2, sampling))
    found = finish(backend)
    for number, sampling in enumerate(settings):
        same(flat(found[number]), alone(model, PROMPTS, 2, sampling))


def test_a_job_that_is_given_up_frees_its_rows_and_leaves_the_others_alone():
    model = build_model(VOCAB)
    backend = NativeBackend(model, max_slots=4)
    backend.submit(job(1, PROMPTS, 3, SAMPLING))
    backend.submit(job(2, PROMPTS, 3, SAMPLING))
    for _ in range(3):
        backend.advance()
    assert backend.abort(1) and not backend.abort(1)
    found = finish(backend)
    assert set(found) == {2}
    same(flat(found[2]), alone(model, PROMPTS, 3, SAMPLING))


def test_a_job_that_ends_early_gives_what_was_written():
    model = build_model(VOCAB)
    backend = NativeBackend(model, max_slots=2)
    backend.submit(job(1, [[5, 6], [7]], 2, Sampling(9, seed=7)))
    for _ in range(4):
        backend.advance()
    assert backend.finish_early(1)
    whole = alone(model, [[5, 6], [7]], 2, Sampling(9, seed=7))
    found = flat(finish(backend)[1])
    assert {r.finish_reason for r in found} == {"abort"}
    assert [len(r.token_ids) > 0 for r in found] == [True, True, False, False]
    for part, all_of_it in zip(found, whole, strict=True):
        assert part.token_ids == all_of_it.token_ids[: len(part.token_ids)]
    assert not backend.busy


def test_lower_priorities_are_begun_first():
    backend = NativeBackend(build_model(VOCAB), max_slots=1)
    for number, priority in ((1, 0), (2, 5), (3, -5)):
        backend.submit(job(number, [[5]], 1, Sampling(2, seed=0), priority=priority))
    finish(backend)
    assert [j.id for j, _ in backend.finished] == [3, 1, 2]


def test_a_completion_that_outlives_its_weights_goes_on_under_the_new_ones_and_knows_where():
    old, new = build_model(VOCAB, seed=0), build_model(VOCAB, seed=1)
    backend = NativeBackend(build_model(VOCAB, seed=0))
    backend.submit(job(1, PROMPTS, 2, Sampling(9, seed=7)))
    for _ in range(5):
        backend.advance()
    backend.rest()
    backend.begin_update(None)
    backend.load((name, p.detach().clone()) for name, p in new.named_parameters())
    assert backend.end_update(4) == []
    done = finish(backend)[1]
    assert set(done.spans) == {(p, i) for p in range(4) for i in range(2)}
    for (place, index), spans in done.spans.items():
        rollout = done.rollouts[place][index]
        (first, count), (second, rest) = spans
        assert (first, second) == (0, 4) and count + rest == 9 and rollout.version == 4
        row = [Row(rollout.prompt_ids, [rollout.token_ids], [[1] * 9])]
        before, after = (sequence_logps(model, row)[0].tolist() for model in (old, new))
        assert rollout.logp[:count] == pytest.approx(before[:count], abs=1e-4)
        assert rollout.logp[count:] == pytest.approx(after[count:], abs=1e-4)


def test_weights_that_are_pushed_are_the_weights_that_write_and_score():
    new = build_model(VOCAB, seed=1)
    backend = NativeBackend(build_model(VOCAB, seed=0))
    backend.begin_update(None)
    tensors = [(name, p.detach().clone()) for name, p in new.state_dict().items()]
    assert backend.load([*tensors, ("model.extra", torch.ones(1))])[1] == ["model.extra"]
    assert backend.end_update(1) == []
    backend.submit(job(1, PROMPTS, 1, SAMPLING))
    same(flat(finish(backend)[1]), alone(new, PROMPTS, 1, SAMPLING))
    backend.rest()
    (scored,) = backend.score([Score([5, 6, 7, 8], 2)], 3, 1.0)
    (truth,) = sequence_logps(new, [Row([5, 6], [[7, 8]], [[1, 1]])])
    assert scored.actual == pytest.approx(truth.tolist(), abs=1e-5)
    logits = new(torch.tensor([[5, 6, 7]])).logits[0, 1:].log_softmax(-1)
    assert scored.ids == logits.topk(3, -1).indices.tolist()


def test_scores_of_sequences_do_not_depend_on_their_company_or_temperature_of_others():
    backend = NativeBackend(build_model(VOCAB))
    items = [Score([1 + i] * (3 + 5 * i), i) for i in range(4)]
    together = backend.score(items, 2, 0.7)
    for item, scored in zip(items, together, strict=True):
        (single,) = backend.score([item], 2, 0.7)
        assert scored.actual[1:] == pytest.approx(single.actual[1:], abs=1e-5)
        logits = backend.engine.model(torch.tensor([item.ids])).logits[0] / 0.7
        own = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(item.ids)[1:, None]).squeeze(1)
        assert scored.actual[-2:] == pytest.approx(own[-2:].tolist(), abs=1e-5)


def test_a_partial_update_tells_what_did_not_come_and_a_wrong_shape_is_refused():
    backend = NativeBackend(build_model(VOCAB))
    backend.begin_update(None)
    backend.load([("model.norm.weight", torch.ones(32))])
    missing = backend.end_update(1)
    assert "model.norm.weight" not in missing and "model.embed_tokens.weight" in missing
    assert "lm_head.weight" not in missing  # Tied: one parameter with two names.
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(32,\).*\(3,\)"):
        backend.load([("model.norm.weight", torch.ones(3))])


def test_trap_s2_adapters_are_applied_beside_the_base_and_leave_it_as_it_was():
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    served = build_model(VOCAB)
    backend = NativeBackend(served)
    before = {name: p.detach().clone() for name, p in served.named_parameters()}
    description = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    for version in (1, 2):
        torch.manual_seed(version)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trained = get_peft_model(build_model(VOCAB), config).eval()
        backend.begin_update(description)
        loaded, unexpected = backend.load(get_peft_model_state_dict(trained).items())
        assert loaded == 8 and unexpected == []
        assert backend.end_update(version) == []
        backend.submit(job(version, PROMPTS, 1, SAMPLING))
        same(flat(finish(backend)[version]), alone(trained, PROMPTS, 1, SAMPLING))
        backend.rest()
    backend.begin_update(None)
    backend.load(before.items())
    assert backend.end_update(3) == []
    assert all(torch.equal(p, before[name]) for name, p in backend.engine.model.named_parameters())
    backend.submit(job(9, PROMPTS, 1, SAMPLING))
    same(flat(finish(backend)[9]), alone(build_model(VOCAB), PROMPTS, 1, SAMPLING))


def test_an_adapter_above_the_rank_or_on_a_base_that_is_not_whole_is_refused():
    backend = NativeBackend(build_model(VOCAB), max_lora_rank=8)
    description = {"r": 16, "alpha": 8, "target_modules": ["q_proj"]}
    with pytest.raises(ModelError, match="--max_lora_rank is 8"):
        backend.begin_update(description)
    backend.begin_update(None)
    with pytest.raises(ModelError, match="push all weights"):
        backend.begin_update(description | {"r": 4})


def test_sleep_at_level_2_gives_the_weights_up_and_a_push_brings_new_ones():
    model = build_model(VOCAB)
    wanted = alone(model, PROMPTS, 1, SAMPLING)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backend = NativeBackend(model)
    backend.sleep(1)
    backend.wake(None)
    backend.submit(job(1, PROMPTS, 1, SAMPLING))
    same(flat(finish(backend)[1]), wanted)
    backend.rest()
    backend.sleep(2)
    assert sum(p.numel() for p in model.parameters()) == 0
    backend.wake(None)
    backend.begin_update(None)
    backend.load(state.items())
    assert backend.end_update(1) == []
    backend.submit(job(2, PROMPTS, 1, SAMPLING))
    same(flat(finish(backend)[2]), wanted)


def test_weights_that_are_not_numbers_fail_the_jobs_that_run_and_none_after():
    model = build_model(VOCAB)
    backend = NativeBackend(model)
    good = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    backend.submit(job(1, PROMPTS, 1, SAMPLING))
    finish(backend)
    ((_, failure),) = backend.finished
    assert failure.status == 500 and "NaN" in failure.message
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    backend.submit(job(2, PROMPTS, 1, SAMPLING))
    same(flat(finish(backend)[2]), alone(model, PROMPTS, 1, SAMPLING))


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_trap_s28_sampling_is_the_request_s_and_never_the_checkpoint_s(engine, tmp_path, tiny_tokenizer):
    from posttrain.serve.config import ServeConfig
    from posttrain.serve.engines import create_backend

    found = []
    for settings in ({}, {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}):
        folder = tmp_path / str(len(found))
        model = build_model(len(tiny_tokenizer))
        model.generation_config.update(**settings)
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        backend = create_backend(engine, ServeConfig(str(folder), dtype="float32"), 0)
        backend.submit(job(1, [[5, 6, 7]], 4, Sampling(6, seed=3)))
        found.append([r.token_ids for r in flat(finish(backend)[1])])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1  # It was sampled, not argmax.
