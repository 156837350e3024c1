"""Judges as reward functions."""

import pytest
from PIL import Image

from posttrain import ConfigError, RewardError
from posttrain.errors import ArgumentTypeError
from posttrain.extensions.images.picture import read_picture
from posttrain.rewards.judges import (
    BaseBinaryJudge,
    BasePairwiseJudge,
    BaseRankJudge,
    JudgeReward,
    _addresses,
    as_text,
)
from tests.wordings import raises

# Binary, rank, and judges as rewards --------------------------------------------------------------------------------


class Says(BaseBinaryJudge):
    def __init__(self, *verdicts):
        self.verdicts, self.gold = list(verdicts), None

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        self.gold = gold_completions
        return self.verdicts


class Pairwise(BasePairwiseJudge):
    def __init__(self, *verdicts):
        self.verdicts, self.seen = list(verdicts), None

    def judge(self, prompts, completions, shuffle_order=True):
        self.seen = (prompts, completions)
        return self.verdicts


class Rank(BaseRankJudge):
    def __init__(self, *orders):
        self.orders = list(orders)

    def judge(self, prompts, completions, shuffle_order=True):
        return self.orders


def test_a_pairwise_judge_rewards_the_better_one_and_calls_no_verdict_a_tie():
    judge = Pairwise(0, 1, -1)
    reward = JudgeReward(judge)
    assert reward(prompts=["p", "p", "q", "q", "r", "r"], completions=list("abcdef")) == [1, 0, 0, 1, 0.5, 0.5]
    assert judge.seen == (["p", "q", "r"], [["a", "b"], ["c", "d"], ["e", "f"]])
    halves = JudgeReward(judge, halves=True)
    assert halves(prompts=["p", "q", "r"] * 2, completions=list("abcdef")) == [1, 0, 0.5, 0, 1, 0.5]
    assert judge.seen == (["p", "q", "r"], [["a", "d"], ["b", "e"], ["c", "f"]])


def test_a_rank_judge_spreads_its_group():
    reward = JudgeReward(Rank([2, 0, 3, 1]), group_size=4)
    assert reward(prompts=["p"] * 4, completions=list("abcd")) == pytest.approx([2 / 3, 0, 1, 1 / 3])
    with raises(RewardError, "4", "0", "1", "2"):
        JudgeReward(Rank([0, 0, 1, 2]), group_size=4)(prompts=["p"] * 4, completions=list("abcd"))


def test_a_binary_judge_that_failed_makes_a_tie_of_its_group():
    judge = Says(1, 0, 1, -1)
    found = JudgeReward(judge)(prompts=list("ppqq"), completions=list("abcd"), gold_completions=list("wxyz"))
    assert found == [1.0, 0.0, 0.5, 0.5]
    assert judge.gold == list("wxyz")


@pytest.mark.parametrize("verdict", [2, "0", None, 0.5])
def test_what_is_no_verdict_is_an_error(verdict):
    with raises(RewardError, "0", "1", "-1"):
        JudgeReward(Pairwise(verdict))(prompts=["p", "p"], completions=["a", "b"])


def test_judges_of_the_wrong_kind_are_refused():
    with raises(ArgumentTypeError):
        JudgeReward(lambda **_: [0])
    with pytest.raises(ConfigError, match="group_size=4"):
        JudgeReward(Pairwise(0), group_size=4)
    with raises(RewardError, "1", "2"):
        JudgeReward(Pairwise(0))(prompts=list("ppqq"), completions=list("abcd"))
    with raises(RewardError, "2"):
        JudgeReward(Pairwise(0))(prompts=list("ppq"), completions=list("abc"))
    for judge in (Says(1), Says(1, 0, 1)):
        with raises(RewardError, str(len(judge.verdicts)), "2"):
            JudgeReward(judge)(prompts=list("pp"), completions=list("ab"))


def test_conversations_are_shown_in_a_neutral_layout():
    judge = Pairwise(0)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("Hello", "Bye")]
    JudgeReward(judge)(prompts=[prompt] * 2, completions=answers)
    assert judge.seen == (["System: Be brief.\n\nUser: Hi"], [["Hello", "Bye"]])
    assert as_text([{"role": "user", "content": "Hi"}]) == "Hi"


def test_a_judge_sees_transparent_pixels_as_the_model_does():
    hidden = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    prompt = [{"role": "user", "content": [{"type": "image", "image": hidden}, {"type": "text", "text": "which?"}]}]
    (address,) = _addresses(prompt)
    assert read_picture(address).load().getpixel((0, 0)) == (255, 255, 255)
