"""A `verifiers` environment trained by GRPO: sums, played by a chat loop that runs in this process.

    pip install "posttrain[serve,verifiers]"
    python examples/agents_verifiers.py --model HuggingFaceTB/SmolLM2-135M-Instruct --steps 20

The environment is an ordinary one of verifiers: a taskset (data and reward) and a harness (the agent's program). Published
environments are taken the same way: ``verifiers_environment("their-id")``.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import verifiers.v1 as vf

import posttrain
from posttrain.rollouts.hubs.verifiers import verifiers_environment

__all__ = ["ChatHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    """A sum, with its answer."""

    answer: int


class SumTask(vf.Task[SumData]):
    """Scored by the first number of the reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the sum; something for a number that is close, so that there is a way to it."""
        said = re.search(r"\d+", trace.last_reply)
        if said is None:
            return 0.0
        gap = abs(int(said[0][:6]) - self.data.answer)
        return 1.0 if gap == 0 else 0.5 / (1 + gap)


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Two numbers below 10."""

    def load(self) -> Iterator[SumTask]:
        """64 sums."""
        drawn = random.Random(0)
        for _ in range(64):
            a, b = drawn.randrange(10), drawn.randrange(10)
            text = f"What is {a} + {b}? Reply with the number alone."
            yield SumTask(SumData(prompt=text, answer=a + b), self.config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One question, one answer, without a process of its own."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask the model at the interception's address."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt_text}]}
        async with httpx2.AsyncClient(timeout=120) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            reply.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def main() -> None:
    """Train, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="agents-verifiers")
    options = parser.parse_args()
    rows, harness = verifiers_environment(Path(__file__).stem)
    config = posttrain.GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        learning_rate=2e-5,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = posttrain.GRPOTrainer(options.model, args=config, train_dataset=rows, harness=harness)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    print(
        "reward of the first and the last five steps:",
        *(f"{sum(part) / len(part):.3f}" for part in (rewards[:5], rewards[-5:])),
    )


if __name__ == "__main__":
    # verifiers finds environments by the name of their module.
    sys.path.insert(0, str(Path(__file__).parent))
    main()
