"""A `verifiers` environment trained by GRPO: sums, played by a chat loop in this process.

    pip install "posttrain[serve,verifiers]"
    python examples/agents_verifiers.py HuggingFaceTB/SmolLM2-135M-Instruct

Published environments are taken the same way: ``verifiers_environment("their-id")``.
"""

import random
import re
import sys
from pathlib import Path

import httpx2
import verifiers.v1 as vf

from posttrain import GRPOConfig, GRPOTrainer, verifiers_environment

__all__ = ["ChatHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    """A sum, with its answer."""

    answer: int


class SumTask(vf.Task[SumData]):
    """Scored by the first number of the reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the sum; something for a number that is close, so that there is a way to it."""
        said = re.search(r"\d{1,6}", trace.last_reply)
        gap = None if said is None else abs(int(said[0]) - self.data.answer)
        return 0.0 if gap is None else 1.0 if gap == 0 else 0.5 / (1 + gap)


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """64 sums of two numbers below 10."""

    def load(self):
        """The tasks."""
        for a, b in random.Random(0).sample([(a, b) for a in range(10) for b in range(10)], 64):
            text = f"What is {a} + {b}? Reply with the number alone."
            yield SumTask(SumData(prompt=text, answer=a + b), self.config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One question, one answer, without a process of its own."""

    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask the model at the address of verifiers' interception."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt_text}]}
        async with httpx2.AsyncClient(timeout=120, headers={"Authorization": f"Bearer {secret}"}) as client:
            (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def main(model: str, steps: int = 20) -> None:
    """Train, and print the rewards."""
    rows, harness = verifiers_environment(Path(__file__).stem)
    settings = {"per_device_train_batch_size": 16, "max_completion_length": 16, "learning_rate": 2e-5}
    config = GRPOConfig("runs/agents_verifiers", max_steps=steps, logging_steps=1, save_strategy="no", **settings)
    trainer = GRPOTrainer(model, args=config, train_dataset=rows, harness=harness)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    print("rewards of the first and the last five steps:", rewards[:5], rewards[-5:])


if __name__ == "__main__":
    # verifiers finds environments by the name of their module.
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], *map(int, sys.argv[2:]))
