"""Rewards that judge mathematics: the tables of observed behaviour, and expressions that hang."""

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import time

import psutil
import pytest

from posttrain.errors import ConfigError, MissingDependencyError, RewardError
from posttrain.rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from posttrain.rewards import math as math_rewards
from tests.wordings import raises

needs_math = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("math_verify", "pebble")),
    reason="the extra [math] (math-verify, pebble) is not installed",
)
BOMB = r"\boxed{" + "9" + "^{9" * 9 + "}" * 9 + "}"


def one(completion, solution, **kwargs):
    return accuracy_reward([completion], [solution], **kwargs)[0]


@needs_math
@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        (r"\boxed{42.0}", "42", 1),
        (r"\boxed{42}", "42.0", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{50\%}", "0.5", 1),
        (r"\boxed{5\text{ cm}}", "5", 1),
        (r"\boxed{x=5}", "5", 1),
        (r"\boxed{5}", "x=5", 1),
        (r"\boxed{3.1415926}", "3.141593", 1),
        (r"\boxed{72}", "He has 5 + 67 = 72 apples.\n#### 72", 1),
        ("The final answer is $42$.", "42", 1),
        ("The answer is 42.", "42", 0),
        ("42", "42", 0),
        ("$42$", "42", 0),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 0),
        (r"\boxed{1} or \boxed{2}", "1", 0),
        (r"\boxed{1} or \boxed{2}", "2", 0),
        (r"\boxed{\text{forty two}}", "42", 0),
        ("", "42", 0),
    ],
)
def test_accuracy_table(completion, solution, reward):
    assert one(completion, solution) == reward
    assert one([{"role": "assistant", "content": completion}], solution) == reward


@needs_math
@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        (r"\pi", r"\boxed{\pi}", r"\boxed{3}"),
        ("A", r"\boxed{A}", r"\boxed{B}"),
        ("A", r"\boxed{\text{A}}", "A"),
        ("yes", r"\boxed{yes}", r"\boxed{no}"),
        ("yes", r"\boxed{\text{Yes}}", r"\boxed{sey}"),
        ("(1,2)", r"\boxed{(1, 2)}", r"\boxed{(2,1)}"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", r"\boxed{\{1,3\}}"),
        (r"\frac13", r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{4}}"),
        (r"\frac13", r"\boxed{\frac13}", r"\boxed{3}"),
        ("forty two", r"\boxed{Forty two}", r"\boxed{two forty}"),
        ("yes", r"\boxed{\text{yes}}", r"\boxed{no} or \boxed{yes}"),
        ("x-y", r"\boxed{-y+x}", r"\boxed{y-x}"),
        (r"\frac13", r"\boxed{\frac13}", r"\boxed{3} or \boxed{\frac13}"),
        ("New York", r"so \boxed{\text{new york}}.", "New York"),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", r"\boxed{2}"),
        (r"2\sqrt2 cm", r"\boxed{2\sqrt{2}}", r"\boxed{2}"),
        ("2x+3", r"\boxed{3+2x}", r"\boxed{2}"),
        (r"16\pi", r"\boxed{16\pi}", r"\boxed{16}"),
        ("10^{3}", r"\boxed{1000}", r"\boxed{10}"),
        ("1, 2, 3", r"\boxed{3, 2, 1}", r"\boxed{3}"),
        ("5!", r"\boxed{120}", r"\boxed{5}"),
        (1e-05, r"\boxed{0.00001}", r"\boxed{1}"),
        ("10 000", r"\boxed{10000}", r"\boxed{10}"),
        ("7 m/s", r"\boxed{7}", r"\boxed{m}"),
        ("€5", r"\boxed{5}", r"\boxed{6}"),
        ("72 apples", r"\boxed{72}", r"\boxed{apples}"),
        ("2023-01-02", r"\boxed{2023-01-02}", r"\boxed{2023-02-01}"),
        ("05/01/2021", r"\boxed{05/01/2021}", r"\boxed{10/02/2021}"),
        ("48/2 = 24 clips, so\n#### 72", r"\boxed{72}", r"\boxed{24}"),
    ],
)
def test_references_without_delimiters_are_read_instead_of_skipped(solution, right, wrong):
    assert (one(right, solution), one(wrong, solution)) == (1.0, 0.0)


@needs_math
def test_r22_a_reference_that_says_nothing_scores_nothing_and_is_told_once(caplog):
    math_rewards._warned.clear()
    logged = {}
    for _ in range(2):
        rewards = accuracy_reward([r"\boxed{1}"] * 3, [None, " ", "1"], log_extra=logged.__setitem__)
    assert rewards == [None, None, 1.0]
    assert logged["gold_parsed"] == ["[unparseable]", "[unparseable]", "1"]
    assert logged["answer_parsed"] == ["[skipped]", "[skipped]", "1"]
    assert logged["solution"] == [None, " ", "1"]
    assert caplog.text.count("2 of 3 references of this batch cannot be parsed") == 1
    math_rewards._warned.clear()
    assert reasoning_accuracy_reward(["</think>1", "no end"], [None, None]) == [None, 0.0]
    assert "1 of 2 references of this batch cannot be parsed" in caplog.text


@needs_math
def test_lenient_takes_an_answer_that_is_not_announced():
    answers = ["The answer is 42.", "42", "$42$", "43", r"\boxed{42}"]
    assert accuracy_reward(answers, ["42"] * 5, lenient=True) == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert accuracy_reward(["Yes.", "I say no"], ["yes"] * 2, lenient=True) == [1.0, 0.0]


@needs_math
def test_the_last_assistant_message_with_content_is_judged():
    turns = [
        {"role": "assistant", "content": r"\boxed{1}", "tool_calls": []},
        {"role": "tool", "content": r"\boxed{3}"},
        {"role": "assistant", "content": r"\boxed{2}"},
        {"role": "assistant", "content": ""},
    ]
    assert accuracy_reward([turns, turns], ["1", "2"]) == [0.0, 1.0]


@pytest.mark.matrix
@pytest.mark.slow
@needs_math
def test_r28_an_expression_that_hangs_is_killed_and_the_rest_still_judged(monkeypatch, caplog):
    math_rewards._warned.clear()
    monkeypatch.setattr(math_rewards, "FORMULA_SECONDS", 1.0)
    logged = {}
    rewards = accuracy_reward([r"\boxed{1}", BOMB, r"\boxed{2}"], ["1", "7", "2"], log_extra=logged.__setitem__)
    assert rewards == [1.0, 0.0, 1.0]
    assert (
        "1 of 3 answers of this batch could not be compared with their references within 1 s, so they count as wrong"
        in caplog.text
    )
    monkeypatch.setattr(math_rewards, "FORMULA_SECONDS", 0.5)
    assert accuracy_reward([BOMB + str(i) for i in range(2)] + [r"\boxed{2}"], ["7"] * 2 + ["2"])[-1] == 1.0


@needs_math
def test_what_takes_too_long_is_given_up_and_such_a_reference_is_not_scored(monkeypatch):
    monkeypatch.setattr(math_rewards, "FORMULA_SECONDS", 0.3)
    assert math_rewards.in_time(time.sleep, [(30,), (0,)]) == [math_rewards.TIMED_OUT, None]
    assert math_rewards.in_time(int, [("x",)]) == [None]


@needs_math
def test_a_process_that_compares_loads_nothing_that_trains():
    heavy = "{'torch', 'transformers', 'datasets'} & set(__import__('sys').modules)"
    assert math_rewards.in_time(eval, [(heavy,)]) == [set()]


@needs_math
def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "print('begins', flush=True)\nfrom posttrain.rewards.math import accuracy_reward\n"
        "print(accuracy_reward(['\\\\\\\\boxed{1}'], ['1']))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["begins", "[1.0]"], done.stderr


@needs_math
def test_r28_it_works_in_other_threads_and_several_at_once():
    results = {}

    def work(number):
        results[number] = accuracy_reward([rf"\boxed{{{number}}}", r"\boxed{0.25}"], [str(number), r"\frac{1}{4}"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [1.0, 1.0] for number in range(1, 5)}


@needs_math
def test_processes_that_were_ended_from_outside_are_replaced():
    assert one(r"\boxed{1}", "1") == 1.0
    pool = math_rewards._pools[os.getpid()]
    for child in psutil.Process().children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
    deadline = time.monotonic() + 10
    while pool.active and time.monotonic() < deadline:
        time.sleep(0.05)
    assert one(r"\boxed{2}", "2") == 1.0


@needs_math
def test_reasoning_counts_only_what_follows_it():
    table = {
        r"<think>\boxed{1}</think>\boxed{42}": 1.0,
        r"<think> \boxed{42} </think> text": 0.0,
        r"\boxed{42}": 0.0,
        r"no opening </think> \boxed{42}": 1.0,
        r"a</think>\boxed{1}</think>\boxed{42}": 1.0,
    }
    assert reasoning_accuracy_reward(list(table), ["42"] * len(table)) == list(table.values())


@needs_math
def test_unfinished_reasoning_is_wrong_even_when_the_reference_cannot_be_read():
    logged = {}
    rewards = reasoning_accuracy_reward(["<think>", "</think>x"], ["", ""], log_extra=logged.__setitem__)
    assert rewards == [0.0, None]
    assert logged["answer_parsed"] == ["[incomplete reasoning]", "[skipped]"]


@needs_math
def test_with_several_delimiters_the_last_occurrence_of_any_counts():
    text = r"a</think>\boxed{1}</reason>\boxed{2}"
    for delimiters in (["</think>", "</reason>"], ["</reason>", "</think>"]):
        assert reasoning_accuracy_reward([text, text], ["1", "2"], delimiters) == [0.0, 1.0]


@needs_math
def test_cosine_table():
    reward = get_cosine_scaled_reward(100)
    lengths = [0, 25, 50, 75, 100, 200]
    ids = [[0] * n for n in lengths]
    right = [1.0, 0.92678, 0.75, 0.57322, 0.5, 0.5]
    got = reward(completions=[r"\boxed{1}"] * 6, completion_ids=ids, solution=["1"] * 6)
    assert got == pytest.approx(right, abs=1e-5)
    got = reward(completions=[r"\boxed{2}"] * 6, completion_ids=ids, solution=["1"] * 6)
    assert got == pytest.approx([-value for value in right], abs=1e-5)
    assert reward(completions=[r"\boxed{2}"], completion_ids=[[0]], solution=[""]) == [None]
    assert (reward.__name__, pickle.loads(pickle.dumps(reward)).max_len) == ("cosine_scaled_reward", 100)


def test_cosine_needs_a_length():
    with raises(ConfigError, "max_len=0", "0"):
        get_cosine_scaled_reward(0)


@needs_math
def test_r23_answers_that_are_never_readable_are_explained_after_three_batches(caplog):
    math_rewards._silent_batches = 0
    accuracy_reward([r"\boxed{1}"], ["1"])
    for _ in range(4):
        accuracy_reward(["<think>hm</think> It is 42."] * 2, ["42"] * 2)
    assert caplog.text.count("found no answer in any completion of 3 batches") == 1
    assert "It is 42." in caplog.text
    assert "use reasoning_accuracy_reward" in caplog.text


@needs_math
def test_r17_columns_of_different_length_are_refused_not_zipped():
    with raises(RewardError, "2", "1"):
        accuracy_reward(["a", "b"], ["1"])


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    def missing(name, purpose):
        raise MissingDependencyError(f"{purpose} needs {name}")

    monkeypatch.setattr(math_rewards, "is_available", lambda name: False)
    monkeypatch.setattr(math_rewards, "require", missing)
    calls = [
        accuracy_reward,
        reasoning_accuracy_reward,
        functools.partial(get_cosine_scaled_reward(9), completion_ids=[[1]]),
    ]
    for call in calls:
        with pytest.raises(ImportError, match="math_verify"):
            call(completions=["a"], solution=["1"])
