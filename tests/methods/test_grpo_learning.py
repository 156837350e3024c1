"""GRPO learns: the reward of a two-layer model rises, with every loss type."""

import pytest

from tests.methods.helpers import grpo

LOSS_TYPES = {
    "grpo": {}, "bnpo": {}, "dr_grpo": {}, "dapo": {}, "cispo": {"epsilon_high": 5.0}, "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"}, "vespo": {},
}  # fmt: skip


def gain(folder, tokenizer, steps, **settings):
    """How much the reward "how many of the first 60 tokens" of eight rises: a tenth of the generations at each end."""

    def count_k(completion_ids, **_):
        return [float(sum(token < 60 for token in ids)) for ids in completion_ids]

    base = {"per_device_train_batch_size": 32, "num_generations": 8, "learning_rate": 5e-3}
    trainer = grpo(
        folder,
        tokenizer,
        engine="native",
        rewards=count_k,
        max_steps=steps,
        num_train_epochs=steps,
        **(base | settings),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    few = max(2, len(rewards) // 10)
    return sum(rewards[-few:]) / few - sum(rewards[:few]) / few


def test_the_count_of_a_token_rises(tiny_tokenizer, tmp_path):
    assert gain(tmp_path, tiny_tokenizer, 20, per_device_train_batch_size=16, seed=1) > 2.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_count_of_a_token_rises_with_every_seed(tiny_tokenizer, tmp_path, seed):
    assert gain(tmp_path, tiny_tokenizer, 100, seed=seed) > 3.0


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_learns_from_slices_that_are_one_update_old(tiny_tokenizer, tmp_path, loss_type):
    rate = {"learning_rate": 5e-2} if loss_type == "dr_grpo" else {}
    settings = LOSS_TYPES[loss_type] | rate | {"steps_per_generation": 2, "per_device_train_batch_size": 16}
    assert gain(tmp_path, tiny_tokenizer, 30, loss_type=loss_type, **settings) > 1.5
