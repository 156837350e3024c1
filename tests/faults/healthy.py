"""Ten runs in which nothing is wrong: nothing may be said about them."""

from __future__ import annotations

import shutil

from tests.faults import build
from tests.faults.scene import Case, Scene
from tests.methods.helpers import scripted


def conversations(scene: Scene) -> None:
    """SFT on conversations."""
    build.sft(scene)


def answers_only(scene: Scene) -> None:
    """SFT on prompts and completions, packed."""
    build.sft(scene, build.texts(24), packing=True, max_length=148)


def with_checkpoints(scene: Scene) -> None:
    """SFT that saves, is evaluated, and is resumed."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    build.sft(
        scene, build.texts(), eval_dataset=build.texts(6), eval_strategy="steps", eval_steps=1, max_steps=4, **options
    )
    shutil.rmtree(scene.folder / "checkpoint-4")  # As if the run had ended before.
    scene.trainer, scene.stage = None, "config"
    build.sft(scene, build.texts(), resume_from_checkpoint=True, max_steps=4, **options)


def preferences(scene: Scene) -> None:
    """DPO on strings."""
    build.dpo(scene)


def scored_preferences(scene: Scene) -> None:
    """DPO on pairs whose scores agree with their order, log-probs of the reference computed beforehand."""
    columns = {"chosen_score": lambda i: 8.0 + i % 3, "rejected_score": lambda i: 3.0 + i % 2}
    build.dpo(scene, build.pairs(24, **columns), precompute_ref_log_probs=True)


def reward_model(scene: Scene) -> None:
    """A reward model."""
    build.reward(scene)


def judged(scene: Scene) -> None:
    """KTO with as many good as bad answers."""
    build.kto(scene)


def group_relative(scene: Scene) -> None:
    """GRPO with a reward that varies."""
    build.online(scene)


def with_penalty(scene: Scene) -> None:
    """GRPO with a KL penalty, two rewards and answers in a column."""

    def right(completions, answer, **_):
        return [0.2 + (len(c[0]["content"]) + int(a)) % 3 / 3 for c, a in zip(completions, answer, strict=True)]

    build.online(scene, [build.varied, right], build.questions(answer=lambda i: str(i)), beta=0.04)


def several_updates(scene: Scene) -> None:
    """GRPO that uses every generation twice, with a small learning rate."""
    build.online(scene, engine=scripted(), num_iterations=2, learning_rate=1e-5, max_steps=4)


CASES = tuple(
    Case("healthy", act.__doc__.rstrip("."), act)
    for act in (
        conversations, answers_only, with_checkpoints, preferences, scored_preferences, reward_model, judged, group_relative,
        with_penalty, several_updates,
    )
)  # fmt: skip
