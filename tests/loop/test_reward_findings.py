"""What a run says of its rewards before and while it trains, where the data or the tools are the cause."""

from __future__ import annotations

import datasets
import pytest

from posttrain import ScriptedEngine
from posttrain.errors import PreflightError
from posttrain.rewards import accuracy_reward, think_format_reward
from tests.methods.helpers import grpo
from tests.methods.test_tools import Walk, qwen, speaker, trainer_of
from tests.wordings import raises


def test_references_that_say_nothing_end_the_run_before_anything_is_generated(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": f"Say {i}", "solution": ""} for i in range(16)])
    with raises(PreflightError, "16", "accuracy_reward"):
        grpo(tmp_path, tiny_tokenizer, rewards=accuracy_reward, data=rows)


@pytest.mark.parametrize(("opens", "reward"), [(True, 1.0), (False, 0.0)])
def test_r24_a_tag_that_the_template_opens_counts_for_the_completion(tiny_tokenizer, tmp_path, opens, reward):
    end = "<|im_start|>assistant\n"
    if opens:
        template = tiny_tokenizer.chat_template
        assert template.count("'<|im_start|>assistant\n'") == 1
        tiny_tokenizer.chat_template = template.replace(
            "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"
        )
        end += "<think>\n"
    lines = [
        tiny_tokenizer(f"I count{'!' * i}</think>4", add_special_tokens=False)["input_ids"] + [2] for i in range(4)
    ]
    engine = ScriptedEngine(lambda ids, index: lines[index])
    trainer = grpo(
        tmp_path, tiny_tokenizer, rewards=think_format_reward, engine=engine, max_completion_length=32, max_steps=1
    )
    trainer.train()
    assert tiny_tokenizer.decode(engine.requests[0].prompt_ids).endswith(end)
    assert trainer.state.log_history[0]["rewards/think_format_reward/mean"] == reward


def test_empty_prompts_that_an_environment_fills_are_no_odd_rows(tiny_tokenizer, tmp_path, caplog):
    tokenizer = qwen(tiny_tokenizer)
    given = {"rewards": None, "keys": {"environment_factory": Walk}}
    trainer_of(tmp_path / "a", tokenizer, speaker(tokenizer, "x"), data=False, max_steps=1, **given)
    assert "PT-D" not in caplog.text  # Nor copies of each other.
    turns = [{"role": "assistant", "content": ""}, {"role": "user", "content": "go"}]
    rows = datasets.Dataset.from_list([{"prompt": turns}] * 16)
    trainer_of(tmp_path / "b", tokenizer, speaker(tokenizer, "x"), data=rows, **given)
    assert "a turn of the assistant without content in `prompt`" in caplog.text
    assert "PT-D007" in caplog.text
