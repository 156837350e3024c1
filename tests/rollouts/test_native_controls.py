"""What a request may ask of the native engine beyond temperature and truncation."""

import itertools
import json
import re

import pytest
import torch

from posttrain.errors import ConfigError, RolloutError
from posttrain.losses.truncation import truncate
from posttrain.rollouts.engines import create_engine
from posttrain.rollouts.native.draws import banned_continuations, ends_with_string
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.sampler import TokenSampler, uniforms
from posttrain.types import Request, Sampling, Truncation
from tests.conftest import build_model
from tests.wordings import raises

VOCAB = 50


def engine(**options) -> NativeEngine:
    return NativeEngine(build_model(VOCAB), pad_token_id=0, **options)


def truth(model, rollout, temperature=1.0):
    """``(T, V)`` log-probs of a plain forward at each completion position."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        return (model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)


def test_a_request_may_bring_its_own_sampling():
    greedy, short = Sampling(6, temperature=0.0), Sampling(2, seed=5)
    requests = [Request([5, 6], 2), Request([5, 6], 1, greedy), Request([7], 2, short)]
    rollouts = engine().generate(requests, Sampling(4, seed=1))
    assert [len(r.token_ids) for r in rollouts] == [4, 4, 6, 2, 2]
    assert rollouts[2].token_ids == engine().generate([Request([5, 6], 1)], greedy)[0].token_ids


def test_a_requests_own_seed_draws_the_same_wherever_it_stands():
    own = Request([7, 8], 3, Sampling(8, seed=5))
    alone = engine().generate([own], Sampling(8, seed=1))
    behind = engine().generate([Request([5, 6], 4), own], Sampling(8, seed=2))
    assert [r.token_ids for r in alone] == [r.token_ids for r in behind[4:]]


def test_draws_of_neighbouring_numbers_and_seeds_are_unrelated():
    first = torch.tensor([[uniforms(seed, number, 1)[0] for number in range(300)] for seed in range(20)])
    assert abs(float(first.mean()) - 0.5) < 0.02
    correlations = torch.corrcoef(first) - torch.eye(20)
    assert float(correlations.abs().max()) < 0.25
    assert float(torch.corrcoef(torch.stack([first[0, :-1], first[0, 1:]]))[0, 1].abs()) < 0.15


def test_no_completion_stops_before_its_least_length():
    stops = tuple(range(2, 40))
    rollouts = engine().generate([Request([5, 6], 20)], Sampling(12, stop_token_ids=stops, min_new_tokens=5, seed=0))
    assert min(len(r.token_ids) for r in rollouts) >= 6
    assert not any(t in stops for r in rollouts for t in r.token_ids[:5])


def test_a_bias_is_added_to_the_logit_before_the_temperature():
    """exp(b / T) times as likely against the others: the processed log-prob is that of the changed distribution."""
    e = engine()
    (r,) = e.generate([Request([5, 6])], Sampling(6, temperature=0.5, seed=0, logit_bias=((9, 2.0), (11, -1e9))))
    raw = truth(e.model, r, 0.5)
    changed = raw.clone()
    changed[:, 9] += 4.0
    changed[:, 11] = -torch.inf
    changed = changed.log_softmax(-1)
    at = torch.tensor(r.token_ids)[:, None]
    torch.testing.assert_close(torch.tensor(r.processed_logp), changed.gather(1, at)[:, 0], atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(r.logp), raw.gather(1, at)[:, 0], atol=1e-3, rtol=0)


def test_raw_and_processed_logps_are_one_without_changes():
    (r,) = engine().generate([Request([5, 6])], Sampling(4, seed=0))
    assert r.processed_logp is None


def test_processed_logps_are_those_after_truncation():
    e = engine()
    (r,) = e.generate([Request([5, 6])], Sampling(6, top_k=3, seed=0))
    raw = truth(e.model, r)
    floor = raw.topk(3, -1).values[:, -1:]
    kept = raw.masked_fill(raw < floor, -torch.inf).log_softmax(-1)
    at = torch.tensor(r.token_ids)[:, None]
    torch.testing.assert_close(torch.tensor(r.processed_logp), kept.gather(1, at)[:, 0], atol=1e-3, rtol=0)


def test_top_logps_are_the_most_likely_tokens_of_the_raw_distribution():
    e = engine()
    (r,) = e.generate([Request([5, 6])], Sampling(5, top_logps=4, top_p=0.5, seed=0))
    values, ids = truth(e.model, r).topk(4, -1)
    for step, found in enumerate(r.top_logps):
        assert [token for token, _ in found] == ids[step].tolist()
        torch.testing.assert_close(torch.tensor([p for _, p in found]), values[step], atol=1e-3, rtol=0)


def test_no_ngram_occurs_twice():
    rollouts = engine().generate([Request([5, 6, 5], 4)], Sampling(40, no_repeat_ngram=2, temperature=0.3, seed=0))
    for r in rollouts:
        tokens = r.prompt_ids + r.token_ids
        pairs = list(itertools.pairwise(tokens))
        assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("tokens", "size", "banned"),
    [([1, 2, 3, 1, 2], 3, [3]), ([1, 2, 1], 2, [2]), ([1, 2], 3, []), ([1, 2, 2], 1, [1, 2]), ([], 2, [])],
)
def test_banned_continuations(tokens, size, banned):
    assert banned_continuations(tokens, size) == banned


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def speaking(tiny_tokenizer):
    model = build_model(len(tiny_tokenizer))
    return NativeEngine(model, pad_token_id=0, tokenizer=tiny_tokenizer)


def test_generation_ends_with_the_token_that_completes_a_stop_string(speaking, tiny_tokenizer):
    prompt = Request(tiny_tokenizer("The")["input_ids"], 6)
    free = speaking.generate([prompt], Sampling(30, seed=0))
    text = tiny_tokenizer.decode(free[0].token_ids)
    wanted = text[8:11]
    found = speaking.generate([prompt], Sampling(30, seed=0, stop_strings=(wanted,)))
    assert found[0].finish_reason == "stop"
    said = tiny_tokenizer.decode(found[0].token_ids)
    assert wanted in said
    assert wanted not in tiny_tokenizer.decode(found[0].token_ids[:-1])
    assert found[0].token_ids == free[0].token_ids[: len(found[0].token_ids)]


@pytest.mark.parametrize("wanted", ["x", "</answer>", "以上で終わりました。", "🎉🎊🎉🎊🎉"])
def test_a_stop_string_is_found_however_many_tokens_its_characters_have(tiny_tokenizer, wanted):
    """A byte-level tokenizer spells a character with up to 4 tokens."""
    tokens = tiny_tokenizer(f"What is the sum? {wanted}", add_special_tokens=False)["input_ids"]
    sampling = Sampling(64, stop_strings=("never", wanted))
    assert ends_with_string(tokens, sampling, tiny_tokenizer)
    assert not ends_with_string(tokens[:-1], sampling, tiny_tokenizer)


def test_stop_strings_without_a_tokenizer_are_refused_before_anything_is_computed():
    with raises(ConfigError, "stop_strings"):
        engine().generate([Request([5])], Sampling(4, stop_strings=("x",)))


GUIDES = [
    (("regex", "-?[0-9]{1,3}"), r"-?[0-9]{1,3}"),
    (("choices", "yes\nno\n(a|b)"), r"yes|no|\(a\|b\)"),
    (("grammar", 'root ::= "<" [a-c]+ ">"'), r"<[a-c]+>"),
]


@pytest.mark.parametrize(("guide", "pattern"), GUIDES)
def test_every_finished_completion_matches_its_guide(speaking, tiny_tokenizer, guide, pattern):
    pytest.importorskip("xgrammar")
    stop = tiny_tokenizer.eos_token_id
    prompt = Request(tiny_tokenizer("The")["input_ids"], 8)
    rollouts = speaking.generate([prompt], Sampling(40, seed=0, guide=guide, stop_token_ids=(stop,)))
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert ended
    for r in ended:
        assert r.token_ids[-1] == stop
        assert re.fullmatch(pattern, tiny_tokenizer.decode(r.token_ids[:-1]))
        assert len(r.processed_logp) == len(r.logp) == len(r.token_ids)


def test_a_schema_guides_to_json(speaking, tiny_tokenizer):
    pytest.importorskip("xgrammar")
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    stop = tiny_tokenizer.eos_token_id
    prompt = Request(tiny_tokenizer("The")["input_ids"], 4)
    rollouts = speaking.generate([prompt], Sampling(200, seed=0, guide=("json", schema), stop_token_ids=(stop,)))
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(tiny_tokenizer.decode(r.token_ids[:-1]))["a"], bool) for r in ended)


def test_without_stop_tokens_a_guide_ends_its_completion(speaking, tiny_tokenizer):
    pytest.importorskip("xgrammar")
    (r,) = speaking.generate([Request([5, 6])], Sampling(10, seed=0, guide=("choices", "yes\nno")))
    assert tiny_tokenizer.decode(r.token_ids) in ("yes", "no")
    assert r.finish_reason == "stop"


@pytest.mark.parametrize(
    ("guide", "message"), [(("regex", "["), "cannot be compiled"), (("regx", "a"), "did you mean 'regex'")]
)
def test_a_wrong_guide_is_refused_with_its_text(speaking, guide, message):
    pytest.importorskip("xgrammar")
    with pytest.raises(ConfigError, match=message):
        speaking.generate([Request([5])], Sampling(4, guide=guide))


def test_a_guide_and_a_bias_that_leave_nothing_are_named(speaking, tiny_tokenizer):
    pytest.importorskip("xgrammar")
    never = tuple((token, float("-inf")) for token in range(len(tiny_tokenizer)))
    with raises(RolloutError, "0"):
        speaking.generate([Request([5])], Sampling(4, logit_bias=never, seed=0))


def test_only_the_requests_with_nan_logits_are_named():
    model = build_model(VOCAB)
    embedding = model.model.embed_tokens.weight.detach().clone()
    embedding[40] = float("nan")
    model.model.embed_tokens.weight = torch.nn.Parameter(embedding)  # No longer tied to the head.
    requests = [Request([5, 6], 2), Request([40, 6], 2), Request([7, 8], 1)]
    with raises(RolloutError, "1"):
        NativeEngine(model, pad_token_id=0).generate(requests, Sampling(3, seed=0))


def test_the_nucleus_is_found_among_few_candidates_and_only_wide_rows_look_at_more(monkeypatch):
    """A peaked row needs few tokens, a flat one of 10 000 more than half of them; both equal the definition by a full sort."""
    torch.manual_seed(0)
    peaked, flat = 6 * torch.randn(3, 10_000), 0.1 * torch.randn(2, 10_000)
    logits, looked = torch.cat([peaked, flat]), []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k, **o: looked.append((len(x), k)) or topk(x, k, **o))
    kept = truncate(logits, Truncation(top_p=0.6)).isfinite()
    assert looked == [(5, 256), (2, 4096), (2, 10_000)]
    p, order = logits.double().softmax(-1).sort(descending=True)
    wanted = torch.zeros_like(kept).scatter(1, order, (p.cumsum(-1) - p) < 0.6)
    assert (kept != wanted).sum() <= 2  # A token at the very edge may fall either way in float32.
    assert kept.sum(-1)[3:].min() > 4096


def test_prompts_of_sick_requests_are_saved_with_what_was_written(tmp_path):
    model = build_model(VOCAB)
    embedding = model.model.embed_tokens.weight.detach().clone()
    embedding[40] = float("nan")
    model.model.embed_tokens.weight = torch.nn.Parameter(embedding)
    e = NativeEngine(model, pad_token_id=0, folder=tmp_path / "run")
    e.load_weights([], version=3)
    with raises(RolloutError, "1", "rollout_failure"):
        e.generate([Request([5, 6], 2), Request([40, 6], 2)], Sampling(3, temperature=0.7, seed=0))
    saved = json.loads((tmp_path / "run" / "rollout_failure.json").read_text())
    assert saved["version"] == 3
    assert saved["sampling"]["temperature"] == 0.7
    assert [(r["request"], r["prompt_ids"]) for r in saved["requests"]] == [(1, [40, 6])]
    assert e.generate([Request([5, 6], 1)], Sampling(3, seed=0))[0].finish_reason == "length"


def test_the_engine_of_a_config_saves_to_the_folder_of_the_run(tmp_path):
    assert create_engine("native", build_model(VOCAB), pad_token_id=0, folder=str(tmp_path)).folder == tmp_path
    assert create_engine("native", build_model(VOCAB), pad_token_id=0).folder is None


def test_requests_that_draw_alike_draw_together(monkeypatch):
    """Lengths and seeds differ, settings are of two kinds: two draws a step, not five."""
    rows = []
    alike = TokenSampler._draw_alike
    monkeypatch.setattr(TokenSampler, "_draw_alike", lambda self, x, c: rows.append(len(c)) or alike(self, x, c))
    requests = [Request([5, 6], 1, Sampling(5 + i, seed=i)) for i in range(3)]
    requests += [Request([7], 1, Sampling(8, seed=i, top_k=3)) for i in range(2)]
    engine().generate(requests, Sampling(4, seed=0))
    assert sorted(rows[5:7]) == [2, 3]  # The first five drew first tokens, one request at a time.


def test_a_request_beyond_the_context_is_named_by_its_own_limit():
    with raises(RolloutError, "1", "2", "max_new_tokens=511", "512"):
        engine().generate([Request([5]), Request([5, 6], 1, Sampling(511))], Sampling(4))
