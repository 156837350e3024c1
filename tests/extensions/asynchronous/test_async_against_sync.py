"""Asynchronous GRPO against synchronous GRPO on the same completions: the same updates, but for what is documented."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from posttrain import AsyncGRPOConfig, GRPOConfig
from posttrain.extensions.asynchronous.jobs import score_group
from posttrain.rewards.runner import RewardRunner
from tests.extensions.asynchronous.helpers import group_of, steps, trainer, within_groups
from tests.methods.helpers import count_a, grpo, weights

# One step is 4 prompts x 4 completions; temperature and decay so that neither can be forgotten.
SAME = {
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_steps": 3,
    "temperature": 0.7,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "optim": "sgd",  # Adam makes whole steps of rounding errors.
}


def recorded(run):
    """Completions of every generation of a synchronous run, group by group."""
    found, sample = [], run.sample

    def remember(examples, settings):
        generation = sample(examples, settings)
        found.extend(
            group_of(
                [generation.examples[i] for i in group],
                [generation.rollouts[i] for i in group],
                [generation.completions[i] for i in group],
                group_id=len(found) + k,
            )
            for k, group in enumerate(generation.groups())
        )
        return generation

    run.sample = remember
    return found


def replayed(groups, tokenizer, scale):
    """A source of the same completions, scored as workers do, of the newest weights."""
    rewards, how = RewardRunner(count_a), {"method": within_groups(scale), "mask_truncated": False}
    conversations = itertools.chain.from_iterable(score_group(group, rewards, tokenizer, **how) for group in groups)

    def make(number, version):
        conversation = next(conversations)
        for sample in conversation.samples:
            sample.model_version = version
        return conversation

    return make


def both(tokenizer, folder, scale="group", *, vllm_importance_sampling_mode=None, **settings):
    """A synchronous run, and an asynchronous one on its completions."""
    same = SAME | settings
    sync = grpo(folder / "sync", tokenizer, engine="native", **same)
    groups = recorded(sync)
    sync.train()
    own = {"scale_rewards": scale, "vllm_importance_sampling_mode": vllm_importance_sampling_mode}
    run = trainer(folder / "async", tokenizer, replayed(groups, tokenizer, scale), **same, **own)
    run.train()
    return sync, run


@pytest.mark.parametrize("correction", [None, "token_truncate"])
def test_updates_on_equal_rollouts_are_synchronous_grpo_s(tiny_tokenizer, tmp_path, correction):
    sync, run = both(tiny_tokenizer, tmp_path, vllm_importance_sampling_mode=correction)
    ours, theirs = steps(run), steps(sync)
    assert len(ours) == len(theirs) == 3
    told = {name for name in theirs[0] if name.startswith(("completions/", "reward", "advantages/", "frac_reward"))}
    told -= {name for name in told if name.endswith("seconds")}
    assert len(told) > 15
    for name in ("loss", "grad_norm", "learning_rate", "entropy", *sorted(told)):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-4, abs=1e-6), name
    assert all(row["grad_norm"] > 0.1 for row in ours)
    assert torch.allclose(weights(run), weights(sync), atol=1e-6)
    assert run.account()["async/trained"] == 48  # Conversations of a worker of the caller's own are counted too.


def test_the_population_s_scale_is_the_only_other_default_of_a_step(tiny_tokenizer, tmp_path):
    """Advantages of a group of 4 are sqrt(4 / 3) as long; the clipped gradient is as long as before."""
    sync, run = both(tiny_tokenizer, tmp_path, "population", max_steps=1, max_grad_norm=0.0)
    ours, theirs = steps(run)[0], steps(sync)[0]
    assert ours["grad_norm"] / theirs["grad_norm"] == pytest.approx(math.sqrt(4 / 3), rel=1e-3)


def test_defaults_that_steer_learning_differ_from_synchronous_grpo_s_only_where_the_page_says(tmp_path):
    ours, theirs = vars(AsyncGRPOConfig(str(tmp_path))), vars(GRPOConfig(str(tmp_path)))
    steering = (
        *(
            "learning_rate",
            "lr_scheduler_type",
            "warmup_steps",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
        ),
        *("optim", "max_grad_norm", "epsilon", "epsilon_high", "delta", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "num_generations", "num_iterations", "beta", "scale_rewards", "reward_weights"),
        *("reward_transform", "mask_truncated_completions", "dynamic_sampling", "shuffle_dataset", "seed"),
        "max_completion_length",
    )
    differ = {name for name in steering if ours[name] != theirs[name]}
    assert differ == {"lr_scheduler_type", "scale_rewards", "max_completion_length"}
    page = (Path(__file__).parents[3] / "docs" / "async_grpo.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in differ)
