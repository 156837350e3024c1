"""GRPO with rollouts by a real vLLM: in the trainer's process, over `posttrain serve`, over `vllm serve`; see `make test-serving`."""

import json
import os
import subprocess
import sys

import pytest

from posttrain.errors import ConfigError
from tests.rollouts import real_vllm as real

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
    from posttrain.rollouts.vllm import sleep_available

    if sleep_available():
        pytest.skip("this build sleeps")
    with pytest.raises(ConfigError, match=r"vllm_enable_sleep_mode=True: vLLM .* does not sleep"):
        example("grpo_add").make_trainer(
            str(real.SMOL), str(tmp_path), 1, use_vllm=True, vllm_enable_sleep_mode=True, report_to="none"
        )
