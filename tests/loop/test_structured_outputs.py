"""What completions must match, given in `generation_kwargs` as vLLM calls it."""

import doctest

import pytest

from posttrain import ConfigError, OnlineDPOConfig, RLOOConfig
from posttrain.loop.rollout import settings_of
from posttrain.rollouts import sampling as guiding
from tests.methods.helpers import count_a, grpo
from tests.wordings import raises


@pytest.mark.parametrize(
    ("given", "guide"),
    [
        ({"structured_outputs": {"regex": "[0-9]+"}}, ("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("choices", "yes\nno")),
        ({"guide": ["regex", "a+"]}, ("regex", "a+")),
    ],
)
def test_structured_outputs_reach_the_engine(tiny_tokenizer, tmp_path, given, guide):
    trainer = grpo(tmp_path, tiny_tokenizer, generation_kwargs=given)
    assert settings_of(trainer.run, "train").sampling.guide == guide


def test_completions_of_a_run_match_their_guide(tiny_tokenizer, tmp_path):
    pytest.importorskip("xgrammar")
    texts = []
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        engine="native",
        rewards=lambda completions, **_: texts.extend(completions) or count_a(completions),
        generation_kwargs={"structured_outputs": {"choice": ["a", "b"]}},
        max_steps=1,
    )
    texts.clear()  # The dry run's made-up completions.
    trainer.train()
    assert texts and {t if isinstance(t, str) else t[-1]["content"] for t in texts} <= {"a", "b"}


def test_the_regex_of_its_own_field_wins_and_says_so(tmp_path, caplog):
    args = OnlineDPOConfig(
        str(tmp_path), report_to="none", bf16=False, vllm_structured_outputs_regex="a+",
        generation_kwargs={"structured_outputs": {"regex": "b+"}},
    )  # fmt: skip
    assert args.generation_kwargs is None
    assert "vllm_structured_outputs_regex overrides" in caplog.text


def test_a_structure_that_is_none_is_refused_with_the_config(tmp_path):
    with raises(ConfigError):
        RLOOConfig(str(tmp_path), report_to="none", bf16=False, generation_kwargs={"structured_outputs": {"regx": "b"}})


@pytest.mark.parametrize("given", [{"regex": None}, {"regex": 5}, {"grammar": ["a"]}, {"regex": ""}, {"json": 3}])
def test_a_structure_that_is_no_text_is_refused(tmp_path, given):
    with raises(ConfigError):
        RLOOConfig(str(tmp_path), generation_kwargs={"structured_outputs": given})


def test_a_choice_that_a_line_break_would_make_two_is_refused(tmp_path):
    with raises(ConfigError, "'yes\\nno'"):
        RLOOConfig(str(tmp_path), generation_kwargs={"structured_outputs": {"choice": ["maybe", "yes\nno"]}})


def test_a_guide_and_the_correction_exclude_each_other(tmp_path):
    """The engine draws from what the guide leaves: the ratio to the whole distribution is off by the rest."""
    with raises(ConfigError, "generation_kwargs", "'regex'", "'b'", "vllm_importance"):
        RLOOConfig(
            str(tmp_path), report_to="none", bf16=False, use_vllm=True, vllm_mode="server",
            generation_kwargs={"structured_outputs": {"regex": "b"}},
        )  # fmt: skip


def test_the_example_in_the_docstring_is_what_the_code_gives():
    assert doctest.testmod(guiding).failed == 0
