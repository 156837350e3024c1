"""Nash-MD with a judge of one's own, written in ten lines: python examples/nash_md.py MODEL"""

import argparse

from datasets import Dataset

from posttrain import BasePairwiseJudge, NashMDConfig, NashMDTrainer, complete
from posttrain.models.load import load_tokenizer

TOPICS = "tea cats chess rivers bridges maps bees clocks paint wind kites shoes stars drums bicycles windows"


class Richer(BasePairwiseJudge):
    """Prefers the answer with more different words, and is as sure as the difference is large."""

    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        """See `BasePairwiseJudge.judge`."""
        first, second = ([len(set(pair[i].lower().split())) for pair in completions] for i in (0, 1))
        scores = [0.5 + 0.5 * (a - b) / max(a, b, 1) for a, b in zip(first, second, strict=True)]
        return scores if return_scores else [-1 if p == 0.5 else int(p < 0.5) for p in scores]


def words(trainer: NashMDTrainer, prompts: list) -> float:
    """Different words of a greedy answer, on average."""
    said = complete(trainer.model, trainer.processing_class, prompts, max_new_tokens=32)
    return sum(len(set(text.lower().split())) for text in said) / len(said)


def main() -> None:
    """Train, and show how many different words answers have before and after."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", help="hub id or folder of a chat model")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--prompts", type=int, default=12, help="of a step, with two answers each")
    args = options.parse_args()
    rows = [{"prompt": [{"role": "user", "content": f"Say something about {topic}."}]} for topic in TOPICS.split()]
    config = NashMDConfig(
        "runs/nash_md",
        max_steps=args.steps,
        num_train_epochs=100,
        per_device_train_batch_size=args.prompts,
        max_new_tokens=32,
        mixture_coef=[0.25],
        beta=[0.05],
        learning_rate=2e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = NashMDTrainer(
        args.model,
        args=config,
        train_dataset=Dataset.from_list(rows[:12]),
        processing_class=load_tokenizer(args.model),
        judge=Richer(),
    )
    held_out = [row["prompt"] for row in rows[12:]]
    before = words(trainer, held_out)
    trainer.train()
    print(f"different words in a greedy answer: {before:.1f} before, {words(trainer, held_out):.1f} after")


if __name__ == "__main__":
    main()
