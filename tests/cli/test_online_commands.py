"""The shipped configs of methods that generate: each trains as it stands, but for the sizes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from posttrain.cli.main import main
from tests.extensions.rewards.test_openai_judge import Server

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": "false", "logging_steps": 1}
GROUPS = SMALL | {"max_steps": 1, "num_generations": 4, "max_completion_length": 6}
PAIRS = SMALL | {"max_steps": 1, "max_new_tokens": 6}
SIZES = {
    "grpo": GROUPS,
    "gmpo": GROUPS | {"steps_per_generation": 2},
    "rloo": GROUPS,
    "a2po": SMALL
    | {"max_steps": 1, "max_completion_length": 6, "num_value_samples": 2, "filter_all_incorrect": "false"},
    "ppo": SMALL | {"gradient_accumulation_steps": 2, "total_episodes": 8, "response_length": 6},
    "online-dpo": PAIRS,
}
LOGGED = {
    "grpo": "rewards/accuracy/mean",
    "gmpo": "clip_ratio/region_mean",
    "rloo": "kl",
    "a2po": "v_star",
    "ppo": "objective/rlhf_reward",
    "online-dpo": "rewards/helpful/mean",
}
REWARDS = """
def accuracy(completions, **_):
    return [float(len(c[0]["content"]) % 2) for c in completions]

def helpful(completions, **_):
    return [float(len(c[0]["content"])) for c in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with what the configs name."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(16)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my_rewards.py").write_text(REWARDS)
    sys.modules.pop("my_rewards", None)  # Other tests have modules of that name.
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def reward_model(folder, policy):
    """A classifier with the policy's tokenizer."""
    from transformers import AutoModelForSequenceClassification

    shutil.copytree(policy, folder)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(folder)


@pytest.mark.parametrize("command", SIZES)
def test_a_shipped_config_trains(command, here, tiny_model_dir):
    sizes = {"config": CONFIGS / f"{command}.yaml", "model_name_or_path": tiny_model_dir, **SIZES[command]}
    assert LOGGED[command] in trained(command, sizes, here / "runs" / command.replace("-", "_"))


def trained(command, options, folder):
    """Run the command; return the names of what it logged."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main([command, *words, "--traceback"]) == 0
    assert (folder / "model.safetensors").is_file()
    return {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}


def test_pairs_are_preferred_by_a_judge_or_a_reward_model(here, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    server.answer = lambda text, number: str(number % 2)
    reward_model(here / "reward", tiny_model_dir)
    common = {"model_name_or_path": tiny_model_dir, "dataset_name": "prompts.jsonl", "report_to": "none", **PAIRS}
    judged = common | {"judge_url": server.url, "judge_model": "my-judge", "output_dir": here / "judged"}
    try:
        assert "rewards/OpenAIPairwiseJudge/mean" in trained("online-dpo", judged, here / "judged")
    finally:
        server.http.shutdown()
        server.http.server_close()
    assert {request["model"] for request in server.requests} == {"my-judge"}
    scored = common | {"reward_model_name_or_path": here / "reward", "output_dir": here / "scored"}
    assert any(name.startswith("rewards/") for name in trained("online-dpo", scored, here / "scored"))
