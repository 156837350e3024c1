"""Distil a model that adds and one that subtracts into one that does both: python examples/two_teachers.py

All three are small and made here: it takes two minutes on a CPU. The student writes its own answers; the column teacher_id says
whose distributions each is compared with. --weights mixes both for every row instead, --only asks one about everything.
"""

import argparse

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer, complete

SIGNS = {"adder": "+", "subtracter": "-"}
COMMON = {"bf16": False, "gradient_checkpointing": False, "logging_steps": 100, "save_strategy": "no"}


def questions(name: str) -> list[dict]:
    """All sums, or differences, of two digits."""
    sign = SIGNS[name]
    pairs = [(a, b, a + b if sign == "+" else a - b) for a in range(10) for b in range(10)]
    return [{"prompt": f"{a}{sign}{b}=", "completion": str(value), "teacher_id": name} for a, b, value in pairs]


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the characters of a question."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *"0123456789+-="])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def small_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights, 0.4 million of them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids))


def show(title: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Right answers of 100 of each kind."""
    shares = []
    for name, sign in SIGNS.items():
        rows = questions(name)
        said = complete(model, tokenizer, [row["prompt"] for row in rows], max_new_tokens=5)
        right = sum(text.replace(" ", "") == row["completion"] for text, row in zip(said, rows, strict=True))
        shares.append(f"{sign} {right:3}")
    print(f"{title:36}", "   ".join(shares), flush=True)


def main() -> None:
    """Make two teachers, distil them into one student, and show what each can do."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300, help="of each training")
    options.add_argument("--weights", type=float, nargs=2)
    options.add_argument("--only", choices=SIGNS)
    args = options.parse_args()
    tokenizer, teachers = characters(), {}
    own = {"max_steps": args.steps, "per_device_train_batch_size": 50, "learning_rate": 2e-3}
    for name in SIGNS:
        data = Dataset.from_list(questions(name))
        config = SFTConfig(f"runs/{name}", **own, **COMMON)
        trainer = SFTTrainer(small_model(tokenizer), config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        teachers[name] = trainer.model
        show(f"the {name}", trainer.model, tokenizer)
    data = Dataset.from_list([row for name in SIGNS for row in questions(name)]).remove_columns("completion")
    own |= {"teacher_weights": dict(zip(SIGNS, args.weights, strict=True)) if args.weights else None}
    config = DistillationConfig("runs/two_teachers", beta=0.0, max_completion_length=5, **own, **COMMON)
    asked = {name: model for name, model in teachers.items() if args.only in (None, name)}
    student = small_model(tokenizer)
    read = {"processing_class": tokenizer, "teacher_processing_class": tokenizer}
    trainer = DistillationTrainer(student, asked, config, train_dataset=data, **read)
    trainer.train()
    show(f"the student of {' and '.join(asked)}", trainer.model, tokenizer)


if __name__ == "__main__":
    main()
