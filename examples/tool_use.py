"""Teach a small model to use a calculator: a few examples show it the format, GRPO teaches it to use it well."""

import random
import re
import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

# SmolLM2's own template leaves tool calls out; this one writes them as Qwen's does, with one line for all tools.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: Such as 12 * (3 + 4).
    """
    if not re.fullmatch(r"[\d+\-*/(). ]{1,40}", expression) or "**" in expression:
        raise ValueError("only numbers, + - * / and brackets")
    return str(eval(expression))


def problems(count: int, seed: int) -> list[dict]:
    """Products and sums that a small model cannot do in its head."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        a, b, c = draw.randint(100, 999), draw.randint(11, 99), draw.randint(100, 999)
        text, right = draw.choice([("{} * {}", f"{a}*{b}"), ("{} * {} + {}", f"{a}*{b}+{c}"), ("{} + {}", f"{a}+{c}")])
        prompt = [{"role": "user", "content": f"What is {text.format(a, b if '*' in right else c, c)}?"}]
        rows.append({"prompt": prompt, "expression": right, "answer": str(eval(right))})
    return rows


def conversations(rows: list[dict]) -> Dataset:
    """How a problem is solved with the tool: what the model imitates first."""
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    chats = []
    for row in rows:
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": row["expression"]}}}
        result = {"role": "tool", "name": "calculator", "content": row["answer"]}
        turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        chats.append({"prompt": row["prompt"], "completion": [*turns, {"role": "assistant", "content": row["answer"]}]})
    return Dataset.from_list([chat | {"tools": tools} for chat in chats])


def correct(completions: list, answer: list, **_) -> list[float]:
    """1 where the last message is the right number."""
    said = [re.sub(r"[^\d.-]", "", c[-1]["content"] or "").rstrip(".") for c in completions]
    return [float(s == a) for s, a in zip(said, answer, strict=True)]


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], chat_template=TEMPLATE)
    common = {"bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none", "seed": 0}
    warm_up = SFTConfig("runs/tool_use_sft", max_steps=6, learning_rate=5e-5, per_device_train_batch_size=8,
                        assistant_only_loss=True, **common)  # fmt: skip
    examples = conversations(problems(48, seed=0))
    SFTTrainer(model, warm_up, train_dataset=examples, processing_class=tokenizer).train()
    config = GRPOConfig(
        "runs/tool_use", max_steps=20, num_generations=8, per_device_train_batch_size=32, max_completion_length=96,
        learning_rate=2e-5, num_generations_eval=1, per_device_eval_batch_size=64, **common,
    )  # fmt: skip
    train, held_out = [Dataset.from_list(problems(n, seed)) for n, seed in ((80, 1), (64, 2))]
    trainer = GRPOTrainer(model, correct, config, train_dataset=train, eval_dataset=held_out,
                          processing_class=tokenizer, tools=[calculator])  # fmt: skip
    before = trainer.evaluate()["eval_rewards/correct/mean"]
    trainer.train()
    print(f"right answers: {before:.0%} before GRPO, {trainer.evaluate()['eval_rewards/correct/mean']:.0%} after")
