"""Rewards that ship: the tables of the specification."""

import contextlib
import gc
import pickle
import time

import pytest

from posttrain.data import responses
from posttrain.errors import ConfigError
from posttrain.extensions.rewards import code
from posttrain.extensions.rewards.openai_judge import OpenAIPairwiseJudge
from posttrain.extensions.rewards.reasoning_gym import EXTRACT, extract_answer
from posttrain.rewards import (
    REWARDS,
    answers_match,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    math,
    think_format_reward,
)


def test_r24_think_format_table():
    table = {
        "<think>a</think>b": 1.0,
        "\n<think>a</think>b": 0.0,
        " <think>a</think>": 0.0,
        "<think></think>": 1.0,
        "<think>a</think></think>": 1.0,
        "<think><think>a</think>": 0.0,
        "<think>a": 0.0,
        "a</think>": 0.0,
    }
    assert think_format_reward(list(table)) == list(table.values())
    assert think_format_reward([[{"role": "assistant", "content": "<think>a</think>b"}]]) == [1.0]


def test_repetition_table():
    rows = [[5] * 5, [1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3], [1]]
    assert get_repetition_penalty_reward(2)(completion_ids=rows) == pytest.approx([-0.75, -0.6, -0.4, 0.0])
    assert get_repetition_penalty_reward(3)(completion_ids=rows[2:3]) == [-0.25]
    assert str(get_repetition_penalty_reward(2)(completion_ids=[[1, 2, 3]])[0]) == "0.0"


def test_overlong_table():
    lengths = [80, 81, 90, 100, 101]
    reward = get_soft_overlong_punishment(100, 20)
    assert reward(completion_ids=[[0] * n for n in lengths]) == [0.0, -0.05, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(10, 0)(completion_ids=[[0] * 10, [0] * 11]) == [0.0, -1.0]


def shipped():
    """The rewards that the command line can name."""
    return {name: make() for name, make in REWARDS.items()}


def test_bad_constants_are_refused_and_factories_pickle():
    with pytest.raises(ConfigError, match="ngram_size=0"):
        get_repetition_penalty_reward(0)
    with pytest.raises(ConfigError, match="max_penalty=1"):
        get_repetition_penalty_reward(2, 1.0)
    with pytest.raises(ConfigError, match="soft_punish_cache=11"):
        get_soft_overlong_punishment(10, 11)
    assert pickle.loads(pickle.dumps(get_repetition_penalty_reward(2)))(completion_ids=[[1]]) == [0.0]
    assert all(hasattr(function, "__name__") for function in shipped().values())


# Parts of texts that made a parser read the rest again from each of them.
ENDLESS = (
    " ", "\n ", ". ", "{", "}", '"', "'", "\\", "\\'", "$", "$$", "**", "(", "[", "1,", "-", "0*a,", "f(),", "```\n", "```py\n", "\n```0",
    "<think>", "<answer>", "\\boxed{", "\\text{", "\\text{a}", "\\(", "\\[", " and ", "answer is ", "</tool_call><tool_call>",
    "</function>", "<parameter=a>", "<arg_key>", "</arg_key>", "</arg_key> <arg_value>", "</arg_value> <arg_key>a</arg_key>",
    "<|user|> ", "<|channel|>a<|message|>", "<|constrain|>a", "to=functions.a ", "<｜tool▁call▁begin｜>", "a```json\n", "\n```",
)  # fmt: skip
# What may stand around them.
FRAMES = (
    ("", ""),
    ("<tool_call>", "</tool_call>"),
    ("<tool_call><function=f><parameter=a>", "</function></tool_call>"),
    ("<tool_call>f<arg_key>", "</tool_call>"),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</tool_call>"),
    ('{"name": "f", "parameters": ', "}"),
    ("<|channel|>analysis", "<|message|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|tool_call_start|>[f(a=[", "])]<|tool_call_end|>"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n", "<｜tool▁calls▁end｜>"),
    ("\\boxed{", "}"),
    ("<answer>", "</answer>"),
)


def readers():
    """All that reads what a model wrote: name and function."""
    for name, parser in responses.FORMATS.items():
        yield name, lambda text, parser=parser: responses._message(parser(text, False), {})
    for how in EXTRACT:
        yield f"extract {how}", lambda text, how=how: extract_answer(text, how)
    yield "answers_match", lambda text: answers_match(text, "yes")
    yield "judge", OpenAIPairwiseJudge("judge", base_url="http://localhost")._verdict
    for name, reward in (shipped() | {"cosine_scaled_reward": get_cosine_scaled_reward(100)}).items():
        for gold in ("yes", "12"):
            columns = {
                "completion_ids": [[5, 6, 7]],
                "solution": [gold],
                "tests": ["pass"],
                "prompt_suffixes": ["<think>"],
            }
            yield f"{name} {gold}", lambda text, reward=reward, columns=columns: reward(completions=[text], **columns)


def test_no_parser_or_reward_reads_a_text_again_and_again(monkeypatch):
    """100 kB each; processes that are killed in time (formulas, programs) are not counted."""
    monkeypatch.setattr(math, "in_time", lambda function, calls: [math.TIMED_OUT for _ in calls])
    monkeypatch.setattr(code, "open_sandbox", lambda name: None)
    monkeypatch.setattr(code, "run_tests", lambda *_, **__: [code.CaseResult(True)])
    slow = []
    gc.freeze()  # Otherwise a collection looks through all that other tests imported.
    try:
        for name, read in readers():
            for part in ENDLESS:
                for before, after in FRAMES if name in responses.FORMATS else FRAMES[:1] + FRAMES[-2:]:
                    text = before + (part * (100_000 // len(part))) + after
                    began = time.process_time()
                    with contextlib.suppress(*responses.UNREADABLE):
                        read(text)
                    seconds = time.process_time() - began
                    if seconds > 0.2:
                        slow.append((name, before, part, round(seconds, 2)))
    finally:
        gc.unfreeze()
    assert slow == []
