"""vLLM behind the server, step by step, over a scheduler that writes one token a request and step; the real one: test_served_vllm.py."""

import types

import pytest
import torch

from posttrain.errors import PosttrainError
from posttrain.rollouts.vllm import VLLMEngine
from posttrain.serve.jobs import Ask, Job, Score
from posttrain.serve.vllm import VLLMBackend
from posttrain.types import Sampling
from tests.rollouts.test_sleep import StubLLM


def entry(value, rank=1):
    return types.SimpleNamespace(logprob=value, rank=rank)


class Core:
    """The engine object of vLLM: what it writes follows from prompt, seed and how many tokens there are."""

    def __init__(self, slots=4):
        facts = types.SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_key_value_heads=1)
        model = types.SimpleNamespace(
            hf_text_config=facts, hf_config=types.SimpleNamespace(architectures=["X"]), get_vocab_size=lambda: 100,
            max_model_len=64, dtype="torch.float32", quantization=None, revision=None, logprobs_mode="processed_logprobs",
            max_logprobs=20,
        )  # fmt: skip
        self.vllm_config = types.SimpleNamespace(
            model_config=model, cache_config=types.SimpleNamespace(enable_prefix_caching=True),
            scheduler_config=types.SimpleNamespace(max_num_seqs=slots, enable_chunked_prefill=False),
            device_config=types.SimpleNamespace(device_type="cpu"),
        )  # fmt: skip
        self.requests, self.resets, self.most, self.fail = {}, [], 0, False

    def add_request(self, name, prompt, settings):
        if settings.get("structured_outputs"):
            raise ValueError("the pattern does not compile")
        self.requests[name] = (prompt["prompt_token_ids"], settings, [])
        self.most = max(self.most, len(self.requests))

    def abort_request(self, names):
        for name in names:
            del self.requests[name]

    def reset_prefix_cache(self, reset_running_requests=False):
        self.resets.append(reset_running_requests)
        return True

    def step(self):
        if self.fail:
            raise RuntimeError("no memory")
        found = []
        for name, (prompt, settings, ids) in list(self.requests.items()):
            token = (sum(prompt) + (settings["seed"] or 0) + len(ids)) % 90
            ids.append(token)
            done = len(ids) == settings["max_tokens"] or token in settings.get("stop_token_ids", ())
            out = types.SimpleNamespace(
                token_ids=[token], logprobs=[{99: entry(-0.1), token: entry(-1.0 - token / 100, 2)}],
                finish_reason=("stop" if token in settings.get("stop_token_ids", ()) else "length") if done else None,
            )  # fmt: skip
            scores = [None, *({t: entry(-t / 10)} for t in prompt[1:])] if "prompt_logprobs" in settings else None
            found.append(types.SimpleNamespace(request_id=name, outputs=[out], finished=done, prompt_logprobs=scores))
            if done:
                del self.requests[name]
        return found


@pytest.fixture
def backend(monkeypatch):
    kinds = types.SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    own = types.SimpleNamespace(StructuredOutputsParams=lambda **guide: guide)
    settings = lambda seed=None, **given: given | {"seed": seed}  # noqa: E731
    fake = types.SimpleNamespace(
        SamplingParams=settings, RequestOutputKind=kinds, sampling_params=own, __version__="0.32.0"
    )
    for module in ("posttrain.rollouts.vllm", "posttrain.serve.vllm"):
        monkeypatch.setattr(f"{module}.require", lambda name, purpose: fake)
    llm = StubLLM()
    llm.llm_engine = Core()
    return VLLMBackend(VLLMEngine(llm, context=64, vocabulary=100, dtype="float32"))


def job(number, prompt, n=1, new=4, **sampling):
    return Job(number, [Ask(prompt, n, Sampling(new, seed=sampling.pop("seed", 0), **sampling))])


def ended(backend, steps=100):
    done = []
    while backend.busy and steps:
        backend.advance()
        done += backend.finished
        backend.finished = []
        steps -= 1
    return done


def test_a_request_that_comes_later_joins_what_runs(backend):
    first, second = job(1, [5], new=10), job(2, [7], new=2)
    backend.submit(first)
    for _ in range(3):
        backend.advance()
    backend.submit(second)
    assert [done.id for done, _ in ended(backend)] == [2, 1]
    assert first.rollouts[0][0].token_ids == list(range(5, 15)) and second.rollouts[0][0].token_ids == [7, 8]
    assert first.rollouts[0][0].logp == [-1.0 - t / 100 for t in range(5, 15)]  # By id, not the most likely one's.


def test_completions_of_one_prompt_count_their_seeds_on_and_fill_no_more_than_the_slots(backend):
    asked = job(1, [5], n=3, new=2, seed=40)
    other = job(2, [50], n=6, new=2)
    backend.submit(asked)
    backend.submit(other)
    ended(backend)
    assert [r.token_ids[0] for r in asked.rollouts[0]] == [45, 46, 47]
    assert all(r is not None for r in other.rollouts[0])
    assert backend.core.most <= backend.most + 6


def test_lower_priorities_begin_first(backend):
    for number in range(1, 6):
        backend.submit(Job(number, [Ask([5], 4, Sampling(2, seed=0))], priority=-number))
    assert [done.id for done, _ in ended(backend)] == [5, 4, 3, 2, 1]


def test_new_weights_in_the_middle_are_noted_and_keys_and_values_are_computed_again(backend):
    asked = job(1, [5], new=6)
    backend.submit(asked)
    for _ in range(2):
        backend.advance()
    backend.begin_update(None)
    assert backend.load([("w", torch.ones(1))]) == (1, [])
    assert backend.end_update(3) == []
    assert backend.reset_cache() and backend.core.resets[-1] is True
    ended(backend)
    assert asked.spans == {(0, 0): [(0, 2), (3, 4)]} and asked.rollouts[0][0].version == 3
    assert backend.reset_cache() and backend.core.resets[-1] is False


def test_what_is_cut_is_delivered_and_what_is_dropped_leaves_the_scheduler(backend):
    cut, dropped = job(1, [5], n=2, new=50), job(2, [7], new=50)
    backend.submit(cut)
    backend.submit(dropped)
    for _ in range(3):
        backend.advance()
    assert backend.finish_early(1) and backend.abort(2)
    assert [r.finish_reason for r in cut.rollouts[0]] == ["abort", "abort"]
    assert cut.rollouts[0][0].token_ids == [5, 6, 7]
    assert backend.core.requests == {} and not backend.busy


def test_a_request_it_refuses_and_a_step_that_fails_end_no_other(backend):
    guided, ngram, fine = job(1, [5], guide=("regex", "[")), job(2, [5], no_repeat_ngram=2), job(3, [6])
    for one in (guided, ngram, fine):
        backend.submit(one)
    failures = {done.id: failure for done, failure in ended(backend)}
    assert failures[1].status == failures[2].status == 400 and failures[3] is None
    broken, later = job(4, [5]), job(5, [8])
    backend.submit(broken)
    backend.core.fail = True
    backend.advance()
    ((done, failure),) = backend.finished
    assert done is broken and failure.status == 500 and backend.core.requests == {}
    backend.finished, backend.core.fail = [], False
    backend.submit(later)
    assert ended(backend) == [(later, None)]


def test_sequences_are_scored_while_others_are_written(backend):
    asked = job(1, [5], new=6)
    backend.submit(asked)
    backend.advance()
    first, whole = backend.score([Score([5, 6, 7], 1), Score(list(range(1, 65)), 60)], 1, 1.0)
    assert first.actual == [-0.6, -0.7] and first.ids == [[6], [7]]
    assert whole.actual[:3] == [-6.1, -6.2, -6.3] and whole.actual[3] != whole.actual[3]  # The context's last: NaN.
    assert len(ended(backend)) == 1 and asked.rollouts[0][0].token_ids == list(range(5, 11))


def test_adapters_are_refused_and_it_says_what_it_is(backend):
    with pytest.raises(PosttrainError, match="takes no adapters"):
        backend.begin_update({"r": 8})
    info = backend.info()
    assert info["engine"] == "vllm" and info["scores"] and not backend.sleeps and backend.beats
    assert (info["context"], info["vocab_size"], info["vllm_version"]) == (64, 100, "0.32.0")
