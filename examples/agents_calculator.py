"""An agent written with the `openai` client alone learns to use its calculator, by GRPO behind the address that it talks to.

    pip install "posttrain[serve]" openai
    python examples/agents_calculator.py HuggingFaceTB/SmolLM2-135M-Instruct

The agent knows nothing of the trainer: it has an address and a key, and it returns a number.
"""

import random
import re
import sys

import openai
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer

# One conversation for the agent to copy from; all episodes share its tokens.
SHOWN = [
    {"role": "system", "content": "You have a calculator. To use it, reply with CALC and the numbers."},
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": "CALC(12 * 34)"},
    {"role": "user", "content": "The result is 408. Reply with the answer alone."},
    {"role": "assistant", "content": "408"},
]
CALL = re.compile(r"CALC\((\d{1,6})\s*([*+-])\s*(\d{1,6})\)")


def questions(count: int, seed: int) -> Dataset:
    """Numbers of three digits times numbers of two."""
    drawn = random.Random(seed)
    pairs = [(drawn.randrange(100, 1000), drawn.randrange(11, 100)) for _ in range(count)]
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": a * b} for a, b in pairs]
    return Dataset.from_list(rows)


def calculate(text: str) -> int | None:
    """What the calculator says to a reply; None where it was not asked."""
    found = CALL.search(text)
    if found is None:
        return None
    a, sign, b = int(found[1]), found[2], int(found[3])
    return a * b if sign == "*" else a + b if sign == "+" else a - b


def agent(task: dict, base_url: str, api_key: str, model: str) -> dict:
    """Ask, run the calculator where it is called, ask again; 1 for the right answer, 0.2 for a call of the calculator."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [*SHOWN, *task["prompt"]]
    called = False
    for _ in range(3):
        reply = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        result = calculate(reply)
        if result is None:
            break
        told = f"The result is {result}. Reply with the answer alone."
        called, messages = True, [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": told}]
    numbers = re.findall(r"\d+", reply.replace(",", ""))
    right = bool(numbers) and int(numbers[-1][:12]) == task["answer"]
    return {"reward": 1.0 if right else 0.2 * called, "right": right, "called": called}


def main(model: str, steps: int = 8) -> None:
    """Train, and compare the agent before and after on questions it was not trained on."""
    settings = {"per_device_train_batch_size": 16, "max_completion_length": 16, "temperature": 0.9, "logging_steps": 1}
    settings |= {"per_device_eval_batch_size": 32, "num_generations_eval": 1, "save_strategy": "no"}
    config = GRPOConfig("runs/agents_calculator", max_steps=steps, learning_rate=3e-5, **settings)
    train, held_out = questions(2 * steps, seed=1), questions(32, seed=2)
    trainer = GRPOTrainer(model, args=config, train_dataset=train, eval_dataset=held_out, harness=agent)
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    print(f"reward of 32 held-out questions: {before:.3f} before training, {after:.3f} after {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
