"""Policy and reference before the first update: what rounding explains and what it does not."""

from __future__ import annotations

from posttrain.checks.pairs import reference_mismatch
from posttrain.checks.rules import check_log


def test_half_precision_moves_the_first_loss_by_more_than_float32():
    """Seen with log-probs computed beforehand in bfloat16: up to 0.063 nats a token, and a first loss off by 0.0085."""
    assert reference_mismatch(0.063, half=True, loss=0.6847) is None
    assert reference_mismatch(0.063, half=False, loss=0.6847).code == "PT-P001"
    assert reference_mismatch(0.0001, half=False, loss=0.656).code == "PT-P001"
    assert reference_mismatch(0.2, half=True, loss=0.693).code == "PT-P001"


def test_a_policy_in_float32_beside_a_reference_in_bfloat16_is_told():
    """Seen when autocast did not reach the policy: 0.01 nats a token over 60 words, and a first loss off by 0.055."""
    assert reference_mismatch(0.01, half=True, loss=0.638).code == "PT-P001"


def test_three_evaluations_below_one_half_say_that_labels_may_be_inverted():
    history = [{"step": step, "eval_rewards/accuracies": value} for step, value in enumerate((0.4, 0.3, 0.2, 0.5))]
    found = [list(check_log(history[: end + 1], "P")) for end in range(4)]
    assert found[0] == found[1] == found[3] == []
    assert found[2][0].code == "PT-P007" and "0.40, 0.30, 0.20" in found[2][0].what


def test_each_of_several_evaluation_sets_is_looked_at():
    """Sets with names have metrics of their own, which no rule read."""
    history = [
        {f"eval_{name}_rewards/accuracies": value, "step": step}
        for step in range(3)
        for name, value in (("hard", 0.3), ("easy", 0.9))
    ]
    found = [
        (finding.code, finding.where) for end in range(len(history)) for finding in check_log(history[: end + 1], "P")
    ]
    assert found == [("PT-P007", "eval_hard_rewards/accuracies")]
