"""Timing rollout engines: the same work for each, lengths as asked for, and a floor below all of them."""

import pytest
import torch

import benchmarks.engines as measuring
from benchmarks.engines import (
    Figure,
    Work,
    by_continuous,
    by_generate,
    by_native,
    lengths,
    measure,
    recommended,
    seconds_at_least,
)
from posttrain.errors import ConfigError
from tests.conftest import build_model

WORK = Work([[5, 6, 7], [8, 9, 10, 11]], 3, [2, 5, 3, 1, 4, 6])


def test_skewed_lengths_have_the_mean_they_are_said_to_have():
    found = lengths(4000, 200, "skewed")
    assert max(found) == 200
    assert min(found) >= 1
    assert abs(sum(found) / len(found) - 80) < 4
    assert sorted(found)[2000] < 72


def test_every_engine_writes_the_lengths_asked_for():
    model = build_model(50)
    for rollouts in (by_native(model, WORK, 0), by_generate(model, WORK, 0), by_continuous(model, WORK, 0)):
        assert [len(r.token_ids) for r in rollouts] == WORK.lengths
        assert [r.prompt_ids for r in rollouts] == [p for p in WORK.prompts for _ in range(3)]


def test_measuring_tells_time_rate_and_the_gap_to_a_forward_pass():
    native, generate = measure(build_model(50), WORK, pad_token_id=0, repeats=1)
    assert (native.name, generate.name) == ("native", "generate")
    assert native.tokens_per_second == pytest.approx(21 / native.seconds)
    assert native.gap < 1e-4
    assert generate.gap is None


def test_the_floor_counts_each_prompt_once_and_a_wave_as_long_as_its_longest(monkeypatch):
    """7 prompt and 21 sampled tokens; one wave of 6 takes 6 steps, waves of 3 take 6 + 3 (lengths 6 5 4 and 3 2 1)."""
    model = build_model(50)
    monkeypatch.setattr(measuring, "_rates", lambda dtype, device: (2.0, 4.0))
    parameters = sum(p.numel() for p in model.parameters())
    assert seconds_at_least(model, WORK, slots=6) == (parameters * 28, parameters * 6)
    assert seconds_at_least(model, WORK, slots=3) == (parameters * 28, parameters * 9)


def test_rates_of_this_machine_are_rates():
    flops, memory = measuring._rates(torch.float32, torch.device("cpu"))
    assert flops > 1e8
    assert memory > 1e7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: measure(m, WORK, pad_token_id=0, engines=("nativ",)), "did you mean 'native'"),
        (lambda m: measure(m, Work([[1]], 2, [1]), pad_token_id=0), "1 lengths for 1 prompts x 2"),
        (lambda m: lengths(3, 5, "even"), "Choose one of: 'equal', 'skewed'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call(build_model(50))


def test_the_command_shows_both_shapes_and_recommends(tiny_tokenizer, tmp_path, capsys):
    from benchmarks.engines import main

    build_model(len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    shape = ["--prompts", "2", "--group", "2", "--prompt-tokens", "6", "--new-tokens", "5", "--repeats", "1"]
    assert main([str(tmp_path), *shape]) == 0
    out = capsys.readouterr().out
    assert "equal lengths: 2 prompts x 2, 20 tokens sampled" in out
    assert "skewed lengths" in out
    assert out.count("recommended: rollout_engine=") == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({"native": 2.0, "generate": 5.0}, "rollout_engine='native'"),
        ({"native": 2.0, "generate": 1.0}, "rollout_engine='hf'"),
        (
            {"native": 2.0, "native_bf16": 1.0},
            "rollout_engine='native'; 'native_bf16' is 2.00x faster, with log-probs 0.01 nats off",
        ),
        ({"native": 2.0, "native_bf16": 1.9}, "rollout_engine='native'"),
        ({"continuous": 1.0}, "nothing: native, generate were not timed"),
    ],
)
def test_the_fastest_exact_engine_is_recommended(seconds, text):
    found = [Figure(name, s, 1.0, 0.0101) for name, s in seconds.items()]
    assert recommended(found).startswith(text)
    assert ("bf16" in recommended(found)) == ("bf16" in text)
