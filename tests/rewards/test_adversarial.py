"""Parsers and rewards of the package on 100 kB of text that was made to be slow."""

import time

import pytest

from posttrain.extensions.rewards.code import code_block
from posttrain.extensions.rewards.reasoning_gym import extract_answer
from posttrain.rewards import (
    accuracy_reward,
    answers_match,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)
from posttrain.rewards.math import answer_box, bare, boxed

SIZE, SECONDS = 100_000, 0.2
PARTS = (
    "\\frac{", "{", "}", "(", "[", "$", "$1$ ", "\\boxed{", "\\boxed{1} or ", "\\text{", "\\text{a}", "\\", "1,", "1 m ", "5\\%",
    "the final answer is ", "<think>", "</think>", "```python\n", "```", "<answer>", " ", "\n", "a ", ".", '"', "**", "9",
)  # fmt: skip
TEXTS = [(part * (SIZE // len(part) + 1))[:SIZE] for part in PARTS]
PARSERS = {
    "boxed": boxed,
    "answer_box": answer_box,
    "bare": bare,
    "answers_match": lambda text: answers_match(text, "42"),
    "answers_match of a long reference": lambda text: answers_match("42", text),
    "accuracy_reward": lambda text: accuracy_reward([text], ["42"]),
    "accuracy_reward of a box": lambda text: accuracy_reward([f"\\boxed{{{text}}}"], ["42"]),
    "accuracy_reward before a box": lambda text: accuracy_reward([f"{text}\\boxed{{42}}"], ["42"]),
    "accuracy_reward(lenient)": lambda text: accuracy_reward([text], ["42"], lenient=True),
    "reasoning_accuracy_reward": lambda text: reasoning_accuracy_reward([f"</think>{text}"], ["42"]),
    "think_format_reward": lambda text: think_format_reward([text]),
    "cosine_scaled_reward": lambda text: get_cosine_scaled_reward(max_len=100)(
        [text], solution=["42"], completion_ids=[[0] * 10]
    ),
    "repetition_penalty_reward": lambda text: get_repetition_penalty_reward()([text]),
    "code_block": code_block,
    "extract_answer": extract_answer,
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_and_reward_is_fast_on_adversarial_text(name):
    PARSERS[name]("\\boxed{42}")  # Starts processes and imports modules.
    slow = {}
    for part, text in zip(PARTS, TEXTS, strict=True):
        seconds = []
        while len(seconds) < 8 and min(seconds, default=1.0) > SECONDS:  # The machine may be busy.
            started = time.perf_counter()
            PARSERS[name](text)
            seconds.append(time.perf_counter() - started)
        if min(seconds) > SECONDS:
            slow[part] = min(seconds)
    assert slow == {}


def test_an_answer_after_a_long_reasoning_is_parsed_and_a_long_answer_is_compared_as_text():
    reasoning = "We add $1$ and (1).\n" * 500
    assert accuracy_reward([f"{reasoning}\\boxed{{0.5}}", f"{reasoning}\\boxed{{0.4}}"], ["1/2", "1/2"]) == [1.0, 0.0]
    assert accuracy_reward([f"\\boxed{{0.5}}{reasoning}"], ["1/2"]) == [1.0]
    assert accuracy_reward([f"{reasoning}The final answer is $0.5$"], ["1/2"]) == [1.0]
    long = "+".join(["1"] * 1000)
    assert accuracy_reward([f"\\boxed{{{long}}}", f"\\boxed{{{long}+1}}"], [long, long]) == [1.0, 0.0]
    deep = "(" * 30 + "1" + ")" * 30
    assert accuracy_reward([f"\\boxed{{{deep}}}"], [deep]) == [1.0]
