"""Rewards as trainers wire them: models loaded like the policy and placed with it, and one list for two trainers."""

import logging

import pytest
import torch

from posttrain import RewardError
from tests.methods.helpers import count_a, grpo, prompts
from tests.rewards.test_model import build as build_judge
from tests.wordings import raises


@pytest.fixture
def judge_folder(tiny_tokenizer, tmp_path):
    build_judge(len(tiny_tokenizer)).save_pretrained(tmp_path / "judge")
    tiny_tokenizer.save_pretrained(tmp_path / "judge")
    return str(tmp_path / "judge")


def test_one_list_makes_two_trainers_that_share_no_model(tiny_tokenizer, tmp_path, judge_folder):
    def short(completions, **_):
        return [-float(len(c[0]["content"])) for c in completions]

    functions, init = [judge_folder, short], {"dtype": "bfloat16"}
    trainers = [
        grpo(
            tmp_path / name,
            tiny_tokenizer,
            rewards=functions,
            model_init_kwargs=init,
            max_steps=1,
            reward_weights=[1, 2],
        )
        for name in "ab"
    ]
    assert functions == [judge_folder, short]
    assert init == {"dtype": "bfloat16"}
    models = [trainer.rewards.functions[0].model for trainer in trainers]
    assert models[0] is not models[1]
    assert models[0].dtype == torch.bfloat16
    assert trainers[0].rewards.functions[0].batch_size == 8
    for trainer in trainers:
        trainer.train()
        row = trainer.state.log_history[0]
        assert {"rewards/judge/mean", "rewards/short/mean", "rewards/short/variance_share"} <= set(row)


def test_a_reward_model_that_says_one_thing_is_refused_before_training(tiny_tokenizer, tmp_path):
    judge = build_judge(len(tiny_tokenizer))
    with torch.no_grad():
        judge.score.weight.zero_()
    with raises(RewardError, "0", "4"):
        grpo(tmp_path, tiny_tokenizer, rewards=judge, reward_processing_classes=tiny_tokenizer)


def test_scores_of_the_probe_and_the_weights_are_shown(tiny_tokenizer, tmp_path, judge_folder, caplog):
    caplog.set_level(logging.INFO)

    def even(answer, **_):
        return [float(a % 2) for a in answer]

    grpo(tmp_path / "run", tiny_tokenizer, rewards=[judge_folder, even], max_steps=1)
    assert "answers to 'What is 6 times 7?'" in caplog.text
    assert "reward even: weight 1, transform none, reads answer" in caplog.text


def test_determinism_is_checked_when_asked_for(tiny_tokenizer, tmp_path, caplog):
    state = iter(range(10_000))

    def moody(completions, **_):
        return [float(next(state) % 7) for _ in completions]

    grpo(tmp_path / "a", tiny_tokenizer, rewards=moody, max_steps=1).train()
    assert "for the same completion" not in caplog.text
    grpo(tmp_path / "b", tiny_tokenizer, rewards=moody, max_steps=1, check_reward_determinism=True).train()
    assert "for the same completion (4 of 4 rows differ)" in caplog.text


def test_a_dataset_column_called_trainer_state_is_no_reason_to_refuse_a_run(tmp_path, tiny_tokenizer, caplog):
    states = []

    def reward(completions, trainer_state, **_):
        states.append(trainer_state)
        return count_a(completions)

    data = prompts().add_column("trainer_state", ["mine"] * 16)
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=reward, data=data, max_steps=1)
    trainer.train()
    assert states[-1] is trainer.state
    assert "'trainer_state'" in caplog.text
