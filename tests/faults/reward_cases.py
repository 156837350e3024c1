"""Faults of rewards, references, precision, gradients and rollouts."""

from __future__ import annotations

import math

import datasets
import torch

from posttrain import ScriptedEngine
from posttrain.rewards import accuracy_reward
from tests.conftest import build_model
from tests.faults import build
from tests.faults.scene import Case, Scene
from tests.methods.helpers import scripted


def raising(scene: Scene) -> None:
    """A reward that fails on an unexpected text."""

    def fails(completions, **_):
        return [float(int(c[0]["content"]) == 4) for c in completions]

    build.online(scene, fails)


def short(scene: Scene) -> None:
    """One reward too few."""

    def short_list(completions, **_):
        return [1.0] * (len(completions) - 1)

    build.online(scene, short_list)


def infinite(scene: Scene) -> None:
    """A division by zero inside a reward."""

    def ratio(completions, **_):
        return [math.inf if i % 4 == 0 else 1.0 for i, _ in enumerate(completions)]

    build.online(scene, ratio)


def not_a_number(scene: Scene) -> None:
    """NaN now and then."""

    def odd(completions, **_):
        return [math.nan if i % 4 == 0 else value for i, value in enumerate(build.varied(completions))]

    build.online(scene, odd)


def text_reward(scene: Scene) -> None:
    """A reward that is text."""

    def said(completions, **_):
        return ["1.0"] * len(completions)

    build.online(scene, said)


def game(scene: Scene) -> None:
    """Scores of a game of 2048 beside a format reward between 0 and 1."""

    def game_score(completions, **_):
        return [float(2 ** (3 + len(c[0]["content"]) % 11)) for c in completions]

    build.online(scene, [game_score, build.varied], scale_rewards="none")


def missing_argument(scene: Scene) -> None:
    """A reward that reads a column which the dataset does not have."""

    def graded(completions, solution, **_):
        return [float(s in c[0]["content"]) for c, s in zip(completions, solution, strict=True)]

    build.online(scene, graded)


def unread_references(scene: Scene) -> None:
    """References that hold nothing."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1?"}], "solution": "$$"} for i in range(16)]
    build.online(scene, accuracy_reward, data=datasets.Dataset.from_list(rows))


def constant(scene: Scene) -> None:
    """A reward that never varies."""

    def one(completions, **_):
        return [1.0] * len(completions)

    build.online(scene, one, max_steps=24)


def never_applies(scene: Scene) -> None:
    """A reward that answers None to everything."""

    def none(completions, **_):
        return [None] * len(completions)

    build.online(scene, none)


def says_nothing(scene: Scene) -> None:
    """A policy that stops at once: all completions are empty."""
    build.online(scene, build.varied, engine=ScriptedEngine(lambda prompt, index: [2]), max_steps=12)


def never_stops(scene: Scene) -> None:
    """A policy that always runs to the limit."""
    endless = ScriptedEngine(lambda prompt, index: [3 + (7 * index + k) % 200 for k in range(8)])
    build.online(scene, build.varied, engine=endless, max_steps=12)


def copies(scene: Scene) -> None:
    """Groups of one and the same completion."""
    engine = ScriptedEngine(lambda prompt, index: [5 + sum(prompt) % 90, 2])
    build.online(scene, build.varied, engine=engine, max_steps=2)


def long_prompt(scene: Scene) -> None:
    """Prompt and completion do not fit the context."""
    build.online(scene, policy=build.model(scene, max_position_embeddings=32), max_completion_length=20)


def no_room(scene: Scene) -> None:
    """A completion as long as the context."""
    build.online(scene, policy=build.model(scene, max_position_embeddings=32), max_completion_length=32)


def few_prompts(scene: Scene) -> None:
    """Fewer prompts than one generation takes."""
    build.online(scene, data=build.questions(1))


def stale(scene: Scene) -> None:
    """Rollouts trained many times with a large learning rate: the policy is far from the one that sampled them."""
    build.online(scene, num_iterations=8, learning_rate=0.3, max_steps=8)


def stale_reference(scene: Scene) -> None:
    """Log-probs of the reference that were computed with another model and came with the data."""
    build.dpo(scene, build.pairs(24, ref_chosen_logps=lambda i: -31.0 - i, ref_rejected_logps=lambda i: -17.5 - i))


def foreign_reference(scene: Scene) -> None:
    """A reference with another vocabulary."""
    build.dpo(scene, ref_model=build_model(len(scene.tokenizer) - 40))


def reference_is_policy(scene: Scene) -> None:
    """One object for both: the reference moves with the policy."""
    policy = build.model(scene)
    build.dpo(scene, policy=policy, ref_model=policy)


def frozen(scene: Scene) -> None:
    """No parameter requires a gradient."""
    build.sft(scene, policy=build.model(scene).requires_grad_(False))


def half_weights(scene: Scene) -> None:
    """Weights in bfloat16 and a learning rate that they cannot show."""
    build.sft(scene, policy=build.model(scene).to(torch.bfloat16), learning_rate=1e-6)


def nan_gradient(scene: Scene) -> None:
    """One gradient is not a number, in step 2 and after."""
    policy = build.model(scene)
    weight = next(policy.parameters())
    seen = []

    def spoil(gradient):
        seen.append(1)
        return gradient * math.nan if len(seen) > 1 else gradient

    weight.register_hook(spoil)
    build.sft(scene, policy=policy, max_steps=6)


def exploding(scene: Scene) -> None:
    """A learning rate that throws the weights out of the range of numbers."""
    build.sft(scene, learning_rate=1e30, max_grad_norm=0.0, max_steps=8)


def nan_weights(scene: Scene) -> None:
    """A checkpoint whose weights are not numbers."""
    policy = build.model(scene)
    next(policy.parameters()).data[3] = math.nan
    scene.note = "nothing"  # They were no numbers before.
    build.sft(scene, policy=policy, max_steps=6)


def fixed_seed(scene: Scene) -> None:
    """One seed for all completions, so that every group is of copies."""
    build.online(scene, engine=scripted(), generation_kwargs={"seed": 1})


CASES = (
    Case("reward", "reward raises", raising, r"fails.*raised|raised.*fails|fails", "data"),
    Case("reward", "reward of the wrong length", short, r"short_list.*\d+ .*\d+", "data"),
    Case("reward", "infinite reward", infinite, r"ratio.*inf|inf", "data"),
    Case("reward", "NaN reward", not_a_number, r"PT-R016|nan|NaN", "step 1"),
    Case("reward", "reward that is text", text_reward, r"said.*'1\.0'|str", "data"),
    Case("reward", "scores of a 2048 game", game, r"PT-R0(13|19|20|2\d|3\d)", "step 1"),
    Case("reward", "reward needs a missing column", missing_argument, r"solution", "data"),
    Case("reward", "references that cannot be read", unread_references, r"PT-R030", "data"),
    Case("reward", "reward never varies", constant, r"PT-R0(02|15|22)", "step 20"),
    Case("reward", "reward never applies", never_applies, r"None|PT-R014", "step 1"),
    Case("training", "a policy that says nothing", says_nothing, r"PT-R0\d\d|empty", "step 10"),
    Case("training", "completions never stop", never_stops, r"PT-R008", "step 10"),
    Case("training", "groups of copies", copies, r"PT-R009", "step 1"),
    Case("data", "prompt and completion longer than the context", long_prompt, r"context of 32", "first batch"),
    Case("data", "completion as long as the context", no_room, r"no room for a prompt", "config"),
    Case("data", "fewer prompts than a generation", few_prompts, r"1 prompts", "config"),
    Case("training", "rollouts far from the policy", stale, r"PT-R00[56]", "step 2"),
    Case("reference", "stale log-probs of the reference", stale_reference, r"PT-P001", "first batch"),
    Case(
        "reference",
        "reference of another vocabulary",
        foreign_reference,
        r"276 embeddings and the model has 316|PT-K",
        "config",
    ),
    Case("reference", "reference is the policy itself", reference_is_policy, r"same object|ref_model", "config"),
    Case("training", "frozen model", frozen, r"PT-B001|requires a gradient|no parameter", "first batch"),
    Case("training", "bfloat16 weights, tiny learning rate", half_weights, r"PT-C001", "config"),
    Case("training", "NaN gradient", nan_gradient, r"gradient norm is .*nan", "step 2"),
    Case("training", "exploding weights", exploding, r"gradient norm|not finite|PT-B002", "step 2"),
    Case("training", "weights that are not numbers", nan_weights, r"not finite|gradient norm|PT-", "first batch"),
    Case("training", "one seed for all completions", fixed_seed, r"seed", "config"),
)
