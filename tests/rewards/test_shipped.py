"""Rewards that ship: the tables of the specification."""

import pickle

import pytest

from posttrain.errors import ConfigError
from posttrain.rewards import REWARDS, get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward


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


def test_bad_constants_are_refused_and_factories_pickle():
    with pytest.raises(ConfigError, match="ngram_size=0"):
        get_repetition_penalty_reward(0)
    with pytest.raises(ConfigError, match="max_penalty=1"):
        get_repetition_penalty_reward(2, 1.0)
    with pytest.raises(ConfigError, match="soft_punish_cache=11"):
        get_soft_overlong_punishment(10, 11)
    assert pickle.loads(pickle.dumps(get_repetition_penalty_reward(2)))(completion_ids=[[1]]) == [0.0]
    assert all(hasattr(function, "__name__") for function in REWARDS.values())
