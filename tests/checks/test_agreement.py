"""A reward model's opinion of pairs, judged by how often people agree."""

from __future__ import annotations

import pytest

from posttrain.checks.pairs import check_agreement


@pytest.mark.parametrize(("agree", "severity", "said"), [
    (80, "info", "agrees with the labels"), (52, "warning", "noisy"), (46, "warning", "noisy"), (20, "warning", "inverted"),
])  # fmt: skip
def test_agreement_of_a_reward_model_is_judged_by_that_of_people(agree, severity, said):
    found = check_agreement({i: (1.0, 0.0) if i < agree else (0.0, 1.0) for i in range(100)}, "judge")
    assert (found.code, found.severity) == ("PT-D036", severity) and said in found.why
    assert f"judge prefers the chosen answer in {agree} of 100 pairs ({agree} %)" in found.what
    assert check_agreement({}, "judge") is None
