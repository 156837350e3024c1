"""Equality of answers: what is the same however it is written, and what only looks so."""

import time

import pytest

from posttrain.rewards.math import answer_box, answers_match, bare, boxed

EQUAL = [
    ("42", "42.0"),
    ("1,000", "1000"),
    (r"3 \times 10^{2}", "300"),
    ("0.50", "1/2"),
    (r"\boxed{42}", "42"),
    (r"$\boxed{42}$.", "42"),
    (r"\dfrac{1}{2}", "0.5"),
    ("**42**", "42"),
    ("50%", "50%"),
    ("Paris.", "paris"),
    ("(B)", "B"),
    (r"\text{Yes}", "yes"),
    ("New   York", "new york"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    (r"x^2+2x+1", r"(x+1)^2"),
]
DIFFERENT = [
    ("42", "43"),
    ("", "42"),
    (None, "42"),
    ("sey", "yes"),
    (r"x^2+2x+2", r"(x+1)^2"),
    # Two answers are not one.
    (r"\boxed{1} or \boxed{2}", "2"),
    ("third", "1/3"),
    ("forty-two", "42"),
]


@pytest.mark.parametrize(("pred", "gold"), EQUAL)
def test_equal_answers_match(pred, gold):
    pytest.importorskip("math_verify")
    assert answers_match(pred, gold) is True


@pytest.mark.parametrize(("pred", "gold"), DIFFERENT)
def test_different_answers_do_not_match(pred, gold):
    pytest.importorskip("math_verify")
    assert answers_match(pred, gold) is False


@pytest.mark.parametrize("gold", [None, "", "  ", r"\boxed{}", "$$"])
def test_a_reference_that_says_nothing_is_neither_right_nor_wrong(gold):
    pytest.importorskip("math_verify")
    assert answers_match("42", gold) is None
    assert answers_match("", gold) is None


def test_boxes_are_read_with_balanced_braces_and_the_last_one_counts():
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{never closed") is None
    assert boxed("none") is None
    assert bare(r"$\boxed{\text{Yes}}$.") == "Yes"


def test_a_list_of_boxes_is_no_single_answer():
    assert answer_box(r"\boxed{1} or \boxed{2}") is None
    assert answer_box(r"$\boxed{1}$, and $\boxed{2}$") is None
    assert answer_box(r"\boxed{1}. No: \boxed{2}") == "2"
    assert answer_box(r"half of \frac{1}{2} and \boxed{2}") == "2"
    assert answer_box("none") is None
    assert answer_box("\\boxed{1}  ,\n and $ \\boxed{2}") is answer_box(r"\boxed{1} , \boxed{2}") is None
    begin = time.process_time()
    assert answer_box("\\boxed{1}" + " " * 30_000 + "x\\boxed{2}") == "2"
    assert time.process_time() - begin < 1
