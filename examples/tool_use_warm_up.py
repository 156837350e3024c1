"""Show a small model the format of tool calls: python examples/tool_use_warm_up.py MODEL, then tool_use.py with its folder."""

import sys

from datasets import Dataset
from tool_use import problems
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import SFTConfig, SFTTrainer

# SmolLM2's own template leaves tool calls out; this one writes them as Qwen's does, with one line for all tools.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def main(model: str, folder: str = "runs/tool_use_warm_up") -> None:
    """Imitate 24 solved problems for a few steps; what they teach is the format, not yet when to use it."""
    config = SFTConfig(
        folder,
        max_steps=5,
        learning_rate=6e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(model, chat_template=TEMPLATE)
    start, examples = AutoModelForCausalLM.from_pretrained(model), conversations(problems(24, seed=0))
    trainer = SFTTrainer(start, config, train_dataset=examples, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()  # With the template: tool_use.py finds it there.


if __name__ == "__main__":
    main(*sys.argv[1:])
