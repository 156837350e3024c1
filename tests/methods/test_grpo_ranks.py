"""GRPO on two gloo processes: the gradient of one, a threshold over both, rows dealt by tokens, nothing that hangs."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.ranks import assert_same_step, leave, part, run_ranks, step_taken, weights

SCENARIOS = {  # Settings of one step on 2 processes x 4 rows or 1 x 8.
    "filter": {"top_entropy_quantile": 0.3, "beta": 0.05},
    "bonus": {"entropy_coef": 0.5, "loss_type": "grpo"},
    "masked groups": {"mask_zero_variance_groups": True, "beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
}


def by_length(completions, answer, **_):
    """Even prompts are all equal."""
    return [
        0.0 if a % 2 == 0 else float(sum(map(ord, c[0]["content"])) % 11)
        for c, a in zip(completions, answer, strict=True)
    ]


def uneven(prompt_ids, index):
    """The first prompts are answered at length, the others with a word: one rank would do all the work."""
    long = sum(prompt_ids) % 2
    return [3 + (sum(prompt_ids) + 7 * index + k) % 250 for k in range(30 if long else 1 + index % 2)] + [2]


def work(folder, world):
    """Every scenario, and what each came to."""
    from posttrain import ScriptedEngine
    from tests.conftest import build_tokenizer
    from tests.methods.helpers import grpo, prompts

    tokenizer = build_tokenizer()
    common = {
        "per_device_train_batch_size": 8 // world, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "use_cpu": True,
        "shuffle_dataset": False, "data": prompts(4), "scale_rewards": "batch",
    }  # fmt: skip
    found = {}

    def train(name, **settings):
        trainer = grpo(f"{folder}/{name}", tokenizer, **(common | settings))
        before = weights(trainer)
        trainer.train()
        found[name] = step_taken(trainer, before)
        return trainer

    for name, settings in SCENARIOS.items():
        train(name, rewards=by_length, **settings)
    train("balanced", engine=ScriptedEngine(uneven), rewards=by_length, max_completion_length=40)
    # Three groups of four over two ranks: the second one lies on both.
    straddling = train(
        "replaced", rewards=by_length, dynamic_sampling=3, per_device_train_batch_size=12 // world, data=prompts(9),
        max_steps=2, save_strategy="steps", eval_dataset=prompts(3), per_device_eval_batch_size=4,
    )  # fmt: skip
    found["evaluated"] = straddling.evaluate()["eval_reward"]
    sets = prompts(4), prompts(4).to_iterable_dataset()
    found["streamed"] = [straddling.evaluate(one)["eval_reward"] for one in sets]
    return found, straddling.accelerator.is_main_process


def run(folder, processes):
    module = "tests.methods.test_grpo_ranks"
    return run_ranks(module, folder, processes, processes=processes, folder=folder, timeout=280)


@pytest.fixture(scope="module")
def both():
    folder = Path(tempfile.mkdtemp())
    return run(folder / "one", 1), run(folder / "two", 2), folder


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*SCENARIOS, "balanced"])
def test_two_ranks_take_the_step_of_one(both, name):
    one, two, _ = both
    assert_same_step(one[name], two[name])
    for key in ("loss", "reward", "reward_std", "entropy", "frac_reward_zero_std", "policy_loss", "num_tokens"):
        if key in one[name]["logs"]:
            assert two[name]["logs"][key] == pytest.approx(one[name]["logs"][key], abs=1e-6, rel=1e-6), key


@pytest.mark.distributed
def test_rows_are_dealt_by_tokens(both):
    logs = both[1]["balanced"]["logs"]
    assert logs["balance/busiest_rank_before"] > 1.5
    assert logs["balance/busiest_rank"] < 1.2


@pytest.mark.distributed
def test_a_group_on_two_ranks_is_replaced_whole_and_recorded(both):
    import pyarrow.parquet as pq

    logs = both[1]["replaced"]["logs"]
    assert logs["dynamic_sampling/groups_without_variance"] > 0
    assert logs["dynamic_sampling/groups_left"] == 0.0
    rows = pq.read_table(both[2] / "two" / "replaced" / "completions.parquet").to_pylist()
    assert len(rows) == 2 * 12  # Those of both ranks.
    for start in range(0, 24, 4):
        assert len({row["prompt"] for row in rows[start : start + 4]}) == 1


@pytest.mark.distributed
def test_an_evaluation_set_that_does_not_divide_over_ranks_ends(both):
    assert both[1]["evaluated"] is not None


@pytest.mark.distributed
def test_an_evaluation_stream_is_the_same_over_two_ranks_as_a_list_on_one(both):
    one, two, _ = both
    assert one["streamed"] == pytest.approx([one["streamed"][0]] * 2)
    assert two["streamed"] == pytest.approx(one["streamed"])


if __name__ == "__main__":
    result, main = work(sys.argv[1], int(sys.argv[2]))
    if main:
        leave(result)
    part()
