"""Distil across tokenizers: python examples/gold.py TEACHER [--steps 120]

The student is a small model from nothing, with a byte-level BPE of 8,000 tokens that is trained here on the same text: Python's
own language reference, which every Python has. Its tokens are aligned with the teacher's by the bytes they spell. It learns no
label (`uld_crossentropy_weight` is 0): its cross-entropy on held-out text falls because it learns the teacher's distributions.
"""

import argparse
import random
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain import GOLDConfig, GOLDTrainer

PIECE = 200  # Characters of a prompt, and of what follows it.
HELD_OUT = 64


def pieces() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Passages of the reference in two halves, to train on and to be judged by."""
    texts = [" ".join(text.split()) for text in topics.values()]
    starts = [(text, at) for text in texts for at in range(0, len(text) - 2 * PIECE, 2 * PIECE)]
    rows = [{"prompt": text[at : at + PIECE], "completion": text[at + PIECE : at + 2 * PIECE]} for text, at in starts]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def new_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 8,000 tokens."""
    bpe = ByteLevelBPETokenizer()
    texts = (row["prompt"] + row["completion"] for row in rows)
    bpe.train_from_iterator(texts, vocab_size=8000, special_tokens=["<end>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<end>")


@torch.no_grad()
def cross_entropy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """Nats a token of the student's, over passages."""
    total, count = 0.0, 0
    for row in rows:
        ids = tokenizer(row["prompt"] + row["completion"], return_tensors="pt").input_ids.to(model.device)
        total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def main() -> None:
    """Train, and show the cross-entropy before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("teacher", help="hub id or folder of a model with any byte-level tokenizer")
    options.add_argument("--steps", type=int, default=120)
    args = options.parse_args()
    train, held_out = pieces()
    tokenizer = new_tokenizer(train)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    student = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, **shape))
    config = GOLDConfig(
        "runs/gold", max_steps=args.steps, per_device_train_batch_size=8, lmbda=0.0, beta=0.0, use_uld_loss=True,
        uld_use_hybrid_loss=True, uld_hybrid_matched_weight=1.0, uld_hybrid_unmatched_weight=1.0, learning_rate=2e-3,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = GOLDTrainer(
        student, args.teacher, config, train_dataset=Dataset.from_list(train), processing_class=tokenizer
    )
    before = cross_entropy(student, tokenizer, held_out)
    trainer.train()
    print(f"held out: {before:.2f} nats a token before, {cross_entropy(student, tokenizer, held_out):.2f} after")


if __name__ == "__main__":
    main()
