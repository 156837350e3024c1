"""What reward functions see of an answer, where the tokenizer knows how its model writes reasoning and calls."""

import pickle

import pytest

from posttrain import Rollout, Sampling, ScriptedEngine, add_response_schema
from posttrain.data.chat import with_template
from posttrain.data.templates import FAMILIES, training_template
from posttrain.extensions.asynchronous.samples import GroupTask
from posttrain.rewards import reasoning_accuracy_reward, think_format_reward
from tests.extensions.asynchronous.helpers import generator_of
from tests.methods.helpers import grpo, prompts

EOS = 2
THOUGHT = "<think>\nsix times seven\n</think>\n\n42"
BROKEN = '<tool_call>\n{"name": "double", '


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return with_template(tiny_tokenizer, training_template(next(f for f in FAMILIES if f.name == "Qwen3")))


def said(folder, tokenizer, text):
    """The messages that a reward function got, with a completion that ends in a letter of its own."""
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return list(range(len(completions)))

    def line(prompt_ids, index):
        return [*tokenizer(text + "abcd"[index % 4], add_special_tokens=False)["input_ids"], EOS]

    settings = {"max_steps": 1, "max_completion_length": 200, "check_rewards": False}
    grpo(folder, tokenizer, engine=ScriptedEngine(line), rewards=reward, **settings).train()
    return seen


def test_an_answer_is_read_with_the_tokenizer_s_response_format(tokenizer, tmp_path):
    seen = said(tmp_path, add_response_schema(tokenizer), THOUGHT)
    assert seen[1] == [{"role": "assistant", "content": "42b", "reasoning_content": "six times seven"}]


def test_an_answer_that_cannot_be_read_is_plain_text(tokenizer, tmp_path):
    ((message,), *_) = said(tmp_path, add_response_schema(tokenizer), BROKEN)
    assert message["content"] == BROKEN + "a"
    assert "tool_calls" not in message


def test_without_a_response_format_an_answer_is_its_text(tokenizer, tmp_path):
    ((message,), *_) = said(tmp_path, tokenizer, THOUGHT)
    assert message == {"role": "assistant", "content": THOUGHT + "a"}


def test_an_asynchronous_run_reads_an_answer_as_a_synchronous_one(tokenizer):
    """In the worker, whose tokenizer was sent to it."""
    sent = pickle.loads(pickle.dumps(add_response_schema(tokenizer)))
    runner = generator_of(sent, Sampling(64), engine=None)
    task = GroupTask(0, {"prompt": [{"role": "user", "content": "6 * 7?"}]}, size=1, seed=0)
    prompt, _ = runner.prompt(task)
    ids = [*tokenizer(THOUGHT, add_special_tokens=False)["input_ids"], EOS]
    found = runner.single_turn(task, 1, [Rollout(prompt, ids, [0.0] * len(ids), "stop", 1)])
    assert found.batch.completions == [[{"role": "assistant", "content": "42", "reasoning_content": "six times seven"}]]
    assert (
        pickle.loads(pickle.dumps(found.batch.completions))[0][0].raw == THOUGHT
    )  # Rewards may be in another process.


THINKS = "<think>\nsix times seven\n</think>\n\n\\boxed{42}"
SHIPPED = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|im_end|>"}},
}


def shipped(tokenizer):
    tokenizer.response_template = SHIPPED
    return tokenizer


@pytest.mark.parametrize(
    "ready", [lambda tokenizer: tokenizer, add_response_schema, shipped], ids=["plain", "format", "shipped"]
)
@pytest.mark.parametrize(
    ("text", "well_formed", "right"),
    [
        (THINKS, 1.0, 1.0),
        ("why</think>\\boxed{42}", 0.0, 1.0),
        ("<think>\\boxed{42}", 0.0, 0.0),
        ("\\boxed{42}", 0.0, 0.0),
    ],
)
def test_rewards_of_thinking_see_it_wherever_the_tokenizer_puts_it(
    tokenizer, tmp_path, ready, text, well_formed, right
):
    engine = ScriptedEngine(lambda prompt_ids, index: [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS])
    rewards = [think_format_reward, reasoning_accuracy_reward]
    data = prompts().add_column("solution", ["42"] * 16)
    trainer = grpo(
        tmp_path, ready(tokenizer), engine=engine, rewards=rewards, data=data, max_steps=1, max_completion_length=200
    )
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "reward" in row]
    assert row["rewards/think_format_reward/mean"] == well_formed
    assert row["rewards/reasoning_accuracy_reward/mean"] == right
