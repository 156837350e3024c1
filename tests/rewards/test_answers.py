"""Equality of answers: what is the same however it is written, and what only looks so."""

import pickle
from fractions import Fraction

import pytest

from posttrain.errors import ConfigError
from posttrain.rewards.math import (
    answer_box,
    answers_match,
    boxed,
    normalize_answer,
    parse_number,
    string_match_reward,
)
from tests.wordings import raises

EQUAL = [
    ("42", "42.0"),
    ("1,000", "1000"),
    ("1 000", "1000"),
    (r"1{,}000", "1000"),
    ("1e3", "1000"),
    (r"3 \times 10^{2}", "300"),
    ("0.50", "1/2"),
    (r"\boxed{42}", "42"),
    (r"$\boxed{42}$.", "42"),
    (r"\dfrac{1}{2}", "0.5"),
    ("**42**", "42"),
    ("−3", "-3"),
    ("0.6666667", "2/3"),
    ("50%", "50%"),
    ("50 %", "50"),
    ("0.5", "50%"),
    ("50", r"50\%"),
    ("Paris.", "paris"),
    ("(B)", "B"),
    (r"\text{Yes}", "yes"),
    ("007", "007"),
    (r"\boxed{A12}", "A12"),
    ("2024-01-05", "2024-01-05"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    ("1000000.5", "1000000"),  # Within a millionth of the reference.
]
DIFFERENT = [
    ("7", "007"),
    ("a12", "A12"),
    ("42", "43"),
    ("50%", "0.5"),
    ("0.5%", "50%"),
    ("5 km", "5 m"),
    ("", "42"),
    (None, "42"),
    ("sey", "yes"),
    ("1000002", "1000000"),
    ("12,34", "1234"),
    # What names something must not be computed with.
    ("2018", "2024-01-05"),
    ("-679", "555-1234"),
    ("1/5", "01/05"),
    # Two answers are not one.
    (r"\boxed{1} or \boxed{2}", "2"),
    ("third", "1/3"),
    ("5 km", "5"),
    ("forty-two", "42"),
]


@pytest.mark.parametrize(("pred", "gold"), EQUAL)
def test_equal_answers_match(pred, gold):
    assert answers_match(pred, gold) is True


@pytest.mark.parametrize(("pred", "gold"), DIFFERENT)
def test_different_answers_do_not_match(pred, gold):
    assert answers_match(pred, gold) is False


@pytest.mark.parametrize("gold", [None, "", "  ", r"\boxed{}", "$$"])
def test_a_reference_that_says_nothing_is_neither_right_nor_wrong(gold):
    assert answers_match("42", gold) is None
    assert answers_match("", gold) is None


def test_modes_decide_what_counts():
    assert answers_match("50%", "0.5", mode="percent") is True
    assert answers_match("42.0", "42", mode="exact") is False
    assert answers_match(" $42$ ", "42", mode="exact") is True
    assert answers_match("007", "7", mode="number") is True
    assert answers_match("7", "007", mode="number") is True
    assert answers_match("many", "7", mode="number") is False
    assert answers_match("7", "many", mode="number") is None
    assert answers_match("42.0", "42", mode="text") is True  # Normalised text, which spells numbers one way.
    with raises(ConfigError, "'number'"):
        answers_match("1", "1", mode="numbr")


def test_formulas_are_compared_symbolically_where_the_package_is_there():
    pytest.importorskip("math_verify")
    pytest.importorskip("pebble")
    assert answers_match(r"x^2+2x+1", r"(x+1)^2") is True
    assert answers_match(r"x^2+2x+2", r"(x+1)^2") is False


def test_one_number_has_one_normal_form():
    texts = ["42", "42.0", r"\boxed{42}", "42."]
    assert {normalize_answer(t) for t in texts} == {"42"}
    assert normalize_answer("1/3") == "1/3"
    assert normalize_answer("-0.05") == "-0.05"
    assert normalize_answer("100") == "100"
    assert normalize_answer("( 1 , 2 )") == "(1,2)"
    assert normalize_answer("New   York") == "new york"
    assert normalize_answer(normalize_answer(r"$\frac{1}{3}$")) == "1/3"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{-1}{4}", Fraction(-1, 4)),
        (".5", Fraction(1, 2)),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert parse_number(text) == (value, False)


@pytest.mark.parametrize(
    "text", ["", "1/0", "and", "point", "1e9999", "9" * 500, "3 apples", "1.2.3", "--1", "1,00", "%"]
)
def test_what_is_no_number_is_not_read_as_one(text):
    assert parse_number(text) is None


def test_boxes_are_read_with_balanced_braces_and_the_last_one_counts():
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{never closed") is None
    assert boxed("none") is None


def test_a_list_of_boxes_is_no_single_answer():
    assert answer_box(r"\boxed{1} or \boxed{2}") is None
    assert answer_box(r"$\boxed{1}$, and $\boxed{2}$") is None
    assert answer_box(r"\boxed{1}. No: \boxed{2}") == "2"
    assert answer_box(r"half of \frac{1}{2} and \boxed{2}") == "2"
    assert answer_box("none") is None
    hedged = [r"\boxed{no} or \boxed{yes}", r"\boxed{1}, \boxed{2}"]
    assert string_match_reward()(completions=hedged, answer=["yes", "2"]) == [0.0, 0.0]


def test_string_match_reward_reads_its_column_and_its_pattern():
    reward = string_match_reward("gold", extract=r"[Aa]nswer: (\S+)")
    texts = ["answer: 7 no, answer: 42.0", "42", "Answer: 43", "Answer: 1"]
    assert reward(completions=texts, gold=["42", "42", "42", ""]) == [1.0, 0.0, 0.0, None]
    default = string_match_reward()
    assert default(completions=[r"so \boxed{1,000}", "1000", "It is 1000"], answer=["1000"] * 3) == [1.0, 1.0, 0.0]
    chat = [[{"role": "assistant", "content": "1000"}]]
    assert string_match_reward(extract=lambda text: text[:2])(completions=chat, answer=["10"]) == [1.0]
    assert pickle.loads(pickle.dumps(reward))(completions=["answer: 3"], gold=["3"]) == [1.0]
    assert reward.__name__ == "string_match_reward"


def test_string_match_reward_says_what_is_missing():
    with raises(ConfigError, "'answer'", "'solution'"):
        string_match_reward()(completions=["a"], solution=["a"])
    with raises(ConfigError):
        string_match_reward(extract="(")
