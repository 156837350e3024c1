"""Teach a small chat model to answer in one short sentence, with Online DPO: python examples/online_dpo.py MODEL

With --judge_url, a model behind any OpenAI-compatible server says which of two answers is better; else a function does.
"""

import argparse

from datasets import Dataset

from posttrain import OnlineDPOConfig, OnlineDPOTrainer, OpenAIPairwiseJudge, complete
from posttrain.models.load import load_tokenizer

THINGS = "rain bread snow gold salt glass paper silk honey iron wool milk cotton clay sugar steam amber cork ink wax"
ASKED = ["What is {}?", "Tell me about {}.", "Why do people use {}?", "Where does {} come from?"]


def prompts() -> tuple[Dataset, Dataset]:
    """Questions to train on, and others about things that are never trained on."""
    rows = [{"prompt": [{"role": "user", "content": a.format(thing)}]} for thing in THINGS.split() for a in ASKED]
    return Dataset.from_list(rows[:-16]), Dataset.from_list(rows[-16:])


def one_sentence(completions: list, **_) -> list[float]:
    """1 for exactly one sentence that ends, less a little for every word."""
    texts = [c[0]["content"].strip() for c in completions]
    return [float(t.count(".") == 1 and t.endswith(".")) - 0.01 * len(t.split()) for t in texts]


def main() -> None:
    """Train, and show the reward of greedy answers to other questions before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--prompts", type=int, default=16, help="of a step, with two answers each")
    options.add_argument("--judge_url", help="http://localhost:8000/v1")
    options.add_argument("--judge_model", default="judge")
    args = options.parse_args()
    train, held_out = prompts()
    better = {"reward_funcs": one_sentence}
    if args.judge_url:
        better = {"judge": OpenAIPairwiseJudge(args.judge_model, base_url=args.judge_url, max_requests=None)}
    config = OnlineDPOConfig(
        "runs/online_dpo",
        max_steps=args.steps,
        num_train_epochs=100,
        per_device_train_batch_size=args.prompts,
        max_new_tokens=40,
        missing_eos_penalty=None if args.judge_url else 1.0,
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    tokenizer = load_tokenizer(args.model)
    trainer = OnlineDPOTrainer(args.model, args=config, train_dataset=train, processing_class=tokenizer, **better)

    def exam() -> float:
        said = complete(trainer.model, tokenizer, held_out["prompt"][:], max_new_tokens=40)
        return sum(one_sentence([[{"content": text}] for text in said])) / len(said)

    before = exam()
    trainer.train()
    print(f"mean reward of greedy answers: {before:.3f} before, {exam():.3f} after")


if __name__ == "__main__":
    main()
