"""GRPO with rollouts by a real vLLM: in the trainer's process, over `posttrain serve`, over `vllm serve`; see `make test-serving`."""

import json
import os
import subprocess
import sys

import pytest

from posttrain.errors import ConfigError
from tests.extensions.agents.agents import say
from tests.extensions.vllm import real_vllm as real

pytestmark = real.needed


def run(mode, folder, *options):
    """The demo with rollouts by vLLM, in a process of its own."""
    out = folder / "result.json"
    command = [sys.executable, "benchmarks/grpo_vllm.py", "--model", str(real.SMOL), "--mode", mode, "--out", str(out)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(real.ROOT)}
    with open(folder / "run.log", "w") as log:
        done = subprocess.run([*command, *options], cwd=real.ROOT, env=environment, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, (folder / "run.log").read_text()[-4000:]
    print(out.read_text())
    return json.loads(out.read_text())


@pytest.mark.timeout(1500)
def test_grpo_over_a_served_vllm_reaches_the_accuracy_of_the_demo(tmp_path):
    """The demo goes from 22 % to 69 % of held-out sums; its promise is 25 points."""
    result = run("served", tmp_path, "--dtype", "bfloat16")  # As the demo computes where that is faster.
    assert result["accuracy_after"] - result["accuracy_before"] >= 0.25
    assert result["logp_gap_mean"] < 0.1  # Both round, each in its way; in float32 see below.


@pytest.mark.parametrize("mode", ["served", "colocate"])
def test_grpo_steps_over_a_server_and_in_process_are_on_policy(mode, tmp_path):
    result = run(mode, tmp_path, "--steps", "3")
    assert len(result["rewards"]) == 3 and result["logp_gap_max"] < 1e-2


def test_sleep_is_refused_where_the_build_cannot(tmp_path):
    from posttrain.cli.demo import example
    from posttrain.extensions.vllm.engine import sleep_available

    if sleep_available():
        pytest.skip("this build sleeps")
    with pytest.raises(ConfigError, match=r"vllm_enable_sleep_mode=True: vLLM .* does not support sleep mode"):
        example("grpo_add").make_trainer(
            str(real.SMOL), str(tmp_path), 1, use_vllm=True, vllm_enable_sleep_mode=True, report_to="none"
        )


def answers_twice(task, base_url, api_key):
    """An agent over OpenAI's endpoint, scored by how short its second answer is."""
    messages = list(task["prompt"])
    messages.append({"role": "assistant", "content": say(base_url, api_key, messages)})
    last = say(base_url, api_key, [*messages, {"role": "user", "content": "Say only the number."}])
    return -len(last) / 100


def test_an_agent_of_ones_own_in_front_of_a_served_vllm_is_on_policy(tmp_path):
    """A harness calls the trainer's address, the trainer asks vLLM, and every token that it wrote is trained."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from posttrain import GRPOConfig, GRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"What is {n} plus 3?"}], "n": n} for n in range(4)]
    with real.vllm_server(tmp_path, real.SMOL) as url:
        args = GRPOConfig(
            str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=16,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-5, use_vllm=True,
            vllm_mode="server", vllm_server_base_url=url, bf16=False,  # The server computes in float32.
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(real.SMOL)
        trainer = GRPOTrainer(
            real.load(),
            None,
            args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            harness=answers_twice,
        )
        trainer.train()
        trainer.engine.close()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    names = (
        "reward",
        "sampling/sampling_logp_difference/max",
        "harness/calls",
        "harness/failed_episodes",
        "weight_sync_mb",
    )
    print([{name: row.get(name) for name in names} for row in logs])
    assert max(row["sampling/sampling_logp_difference/max"] for row in logs) < 1e-2
    assert all(row["harness/failed_episodes"] == 0 for row in logs) and len(logs) == 2
