"""Dynamic sampling, rows dealt by tokens, and the prompts of a run that was stopped."""

from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain import ConfigError
from posttrain.data.forest import Layout, collate
from posttrain.data.samplers import PromptStream
from posttrain.errors import CheckpointError
from posttrain.loop import rollout
from posttrain.losses.advantages import flat_groups
from posttrain.models import parallel
from posttrain.rollouts.batch import RolloutBatch, RolloutWindow, balance_rows, distribute, part
from posttrain.types import Rollout, Row
from tests.methods.helpers import grpo, grpo_args, prompts, scripted, weights
from tests.wordings import raises


def logs(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def by_answer(completions, answer, **_):
    """Prompts below 8 are solved by every completion, the others by every second."""
    return [1.0 if a < 8 else float(i % 2) for i, a in enumerate(answer)]


def never(completions, **_):
    return [0.0] * len(completions)


class Numbered:
    """Remembers which prompts were sampled and trained."""

    def __init__(self, trainer):
        self.sampled, self.trained = [], []
        sample, advantages = trainer.sample, trainer.advantages

        def spy_sample(examples, settings):
            self.sampled.append([example["answer"] for example in examples])
            return sample(examples, settings)

        def spy_advantages(rollouts, rewards, logps):
            self.trained.append([example["answer"] for example in rollouts.examples])
            return advantages(rollouts, rewards, logps)

        trainer.sample, trainer.advantages = spy_sample, spy_advantages


def test_r15_groups_without_variance_are_replaced_by_fresh_prompts(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        rewards=by_answer,
        dynamic_sampling=5,
        per_device_train_batch_size=16,
        max_steps=3,
        num_train_epochs=9,
    )
    seen = Numbered(trainer)
    trainer.train()
    assert all(answer >= 8 for rows in seen.trained for answer in rows)
    assert all(len(set(rows[k : k + 4])) == 1 for rows in seen.trained for k in range(0, 16, 4))  # Whole groups.
    first = logs(trainer)[0]
    easy = sum(a < 8 for a in seen.sampled[0]) / 16
    assert first["dynamic_sampling/groups_without_variance"] == pytest.approx(easy)
    assert first["dynamic_sampling/groups_left"] == 0.0
    assert first["frac_reward_zero_std"] == 0.0


def test_all_that_was_sampled_is_counted(tiny_tokenizer, tmp_path):
    """The tokens of discarded completions were paid for too."""
    engine, lengths = scripted(), []
    generate = engine.generate

    def counting(requests, sampling):
        rollouts = generate(requests, sampling)
        lengths.append([len(r.prompt_ids) + len(r.token_ids) for r in rollouts])
        return rollouts

    engine.generate = counting
    trainer = grpo(tmp_path, tiny_tokenizer, engine=engine, rewards=by_answer, dynamic_sampling=3, max_steps=1)
    seen = Numbered(trainer)
    trainer.train()
    row = logs(trainer)[0]
    assert row["num_tokens"] == sum(map(sum, lengths))
    assert row["dynamic_sampling/prompts_drawn"] == sum(len(rows) for rows in seen.sampled[1:]) / 4
    assert row["dynamic_sampling/rounds"] == len(seen.sampled) - 1


def test_the_bound_holds_where_nothing_ever_varies(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=never, dynamic_sampling=2, max_steps=2, check_rewards=False)
    seen = Numbered(trainer)
    trainer.train()
    assert len(seen.sampled) == 2 * 3  # Once, and two rounds, in each of two steps.
    row = logs(trainer)[0]
    assert row["dynamic_sampling/groups_left"] == 1.0
    assert row["dynamic_sampling/accepted"] == 0.0


def test_dynamic_sampling_that_finds_nothing_to_do_changes_nothing(tiny_tokenizer, tmp_path):
    def vary(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    runs = [grpo(tmp_path / str(n), tiny_tokenizer, rewards=vary, dynamic_sampling=n) for n in (0, 3)]
    for run in runs:
        run.train()
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_replaced_rows_keep_their_own_rewards_and_columns(tiny_tokenizer, tmp_path):
    import pyarrow.parquet as pq

    def told(completions, answer, log_extra=None, **_):
        if log_extra is not None:
            log_extra("seen", list(answer))
        return by_answer(completions, answer)

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=told, dynamic_sampling=5, max_steps=1, save_strategy="steps")
    trainer.train()
    rows = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    for row in rows:
        assert row["seen"] >= 8
        assert f"What is {row['seen']} " in row["prompt"]
        assert row["advantage"] == pytest.approx(0.8659 if row["told"] else -0.8659, abs=1e-3)


def test_completions_that_carry_no_loss_go_with_their_groups(tiny_tokenizer, tmp_path):
    """Those in which an engine drew what stands for an image, say."""
    options = {"dynamic_sampling": 5, "per_device_train_batch_size": 16, "max_steps": 1, "num_train_epochs": 9}
    trainer, found = grpo(tmp_path, tiny_tokenizer, rewards=by_answer, **options), []
    sample, advantages = trainer.sample, trainer.advantages

    def odd(examples):
        return {i for i, example in enumerate(examples) if i % 4 == example["answer"] % 4}

    def marked(examples, settings):
        return replace(sample(examples, settings), left_out=odd(examples))

    def spied(rollouts, rewards, logps):
        found.append((set(rollouts.left_out), odd(rollouts.examples)))
        return advantages(rollouts, rewards, logps)

    trainer.sample, trainer.advantages = marked, spied
    trainer.train()
    assert found and all(kept == wanted for kept, wanted in found)
    assert logs(trainer)[0]["dynamic_sampling/accepted"] > 0


def test_lengths_are_compared_with_the_rewards_of_the_completions_that_are_trained(tiny_tokenizer, tmp_path):
    def length_of_hard_ones(completion_ids, answer, **_):
        return [0.0 if a < 8 else float(len(ids)) for ids, a in zip(completion_ids, answer, strict=True)]

    settings = {"dynamic_sampling": 5, "per_device_train_batch_size": 16, "max_steps": 2, "num_train_epochs": 9}
    trainer = grpo(tmp_path, tiny_tokenizer, rewards=length_of_hard_ones, **settings)
    trainer.train()
    assert sum(row["dynamic_sampling/prompts_drawn"] for row in logs(trainer)) > 0
    assert [row["rewards/length_corr"] for row in logs(trainer)] == [1.0, 1.0]


def test_a_stopped_run_with_dynamic_sampling_equals_one_that_was_not(tiny_tokenizer, tmp_path):
    settings = {
        "rewards": by_answer,
        "dynamic_sampling": 2,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 9,
    }
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **settings)
    complete = Numbered(whole)
    whole.train()
    part = grpo(tmp_path / "part", tiny_tokenizer, **settings)
    resumed = Numbered(part)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.trained == complete.trained[2:]
    assert resumed.sampled == complete.sampled[len(complete.sampled) - len(resumed.sampled) :]
    assert torch.equal(weights(whole), weights(part))
    assert whole.counters == part.counters


def test_fresh_prompts_of_a_stream_continue_where_they_stood():
    data = prompts(5)
    for source in (data, data.to_iterable_dataset()):
        stream = PromptStream(source, seed=3)
        first = [row["answer"] for row in stream.take(7)]
        assert sorted(first[:5]) == [0, 1, 2, 3, 4]  # A pass holds every prompt once.
        state = stream.state()
        rest = [row["answer"] for row in stream.take(6)]
        again = PromptStream(source, seed=3)
        again.load(state)
        assert [row["answer"] for row in again.take(6)] == rest


def test_a_group_is_flat_by_its_own_spread():
    """Groups: equal; spread; one scored row only; unscored; equal sums of two functions that each spread."""
    nan = float("nan")
    values = torch.tensor(
        [[1, 1], [1, 1], [1, 0], [0, 0], [1, nan], [nan, nan], [nan, nan], [nan, nan], [1, 0], [0, 1]]
    )
    ones = torch.ones(2)
    assert flat_groups(values, ones, 2).tolist() == [True, False, True, True, True]
    assert flat_groups(values, ones, 2, each_function=True).tolist() == [True, False, True, True, False]
    assert flat_groups(values, ones, 2, least=1.0).tolist() == [True, True, True, True, True]
    only_first = torch.tensor([1.0, 0.0])
    assert flat_groups(values, only_first, 2, each_function=True).tolist() == [True, False, True, True, False]
    only_second = torch.tensor([0.0, 1.0])
    assert flat_groups(values, only_second, 2, each_function=True).tolist() == [True, True, True, True, False]


def test_negative_rounds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dynamic_sampling=-1"):
        grpo_args(tmp_path, dynamic_sampling=-1)


# Rows over ranks ----------------------------------------------------------------------------------------------------


ROWS = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 300), min_size=1, max_size=6)), min_size=1, max_size=5
)


@given(st.lists(ROWS, min_size=2, max_size=4))
def test_dealing_loses_no_completion_and_makes_the_busiest_rank_less_busy(costs):
    plan = distribute(costs)
    if plan is None:
        return
    assert set(plan) == {
        (rank, k, i) for rank, rows in enumerate(costs) for k, (_, sizes) in enumerate(rows) for i in range(len(sizes))
    }
    loads = [0] * len(costs)
    for (rank, k, i), target in plan.items():
        loads[target] += costs[rank][k][1][i]
    for target, rank, k in {(target, rank, k) for (rank, k, _), target in plan.items()}:
        loads[target] += costs[rank][k][0]  # A prompt costs its tokens on every rank that holds it.
    assert set(plan.values()) == set(range(len(costs)))
    assert max(loads) <= 0.9 * max(sum(p + sum(sizes) for p, sizes in rows) for rows in costs)


def test_completions_stay_where_moving_does_not_pay():
    assert distribute([[(5, [100, 1])], [(5, [99, 1])]]) is None
    assert distribute([[(0, [100])], [(0, [1])]]) is None
    assert distribute([[(100, [9, 9])], [(1, [1])]]) is None  # The prompt would be computed on both.


def test_a_group_is_cut_where_that_is_cheaper_than_waiting():
    plan = distribute([[(10, [50, 50, 50, 50])], [(10, [1, 1, 1, 1])]])
    assert sorted(target for (rank, _, _), target in plan.items() if rank == 0) == [0, 0, 1, 1]


# A stop inside a window ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_stop_anywhere_in_a_window_changes_no_prompt_and_no_weight(tiny_tokenizer, tmp_path, iterations):
    """Windows of 3 micro-steps (times the iterations), two micro-steps an optimiser step: no stop falls on a boundary twice."""
    settings = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 3,
        "num_iterations": iterations,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "data": prompts(12),
        "num_train_epochs": 9,
        "engine": "native",
        "rollout_engine": "native",
    }
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **settings)
    complete = Numbered(whole)
    whole.train()
    for stop in (1, 2, 3):
        part = grpo(tmp_path / f"part{stop}", tiny_tokenizer, **settings)
        resumed = Numbered(part)
        part.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
        assert resumed.sampled == complete.sampled[len(complete.sampled) - len(resumed.sampled) :], stop
        assert torch.equal(weights(whole), weights(part)), stop


def test_a_slice_is_trained_in_the_step_its_schedule_says(tiny_tokenizer, tmp_path, monkeypatch):
    """spg=3, mu=2: slices 0 1 2 0 1 2, then a new generation; no slice twice in an iteration, none left out."""
    trainer = grpo(
        tmp_path, tiny_tokenizer, steps_per_generation=3, num_iterations=2, per_device_train_batch_size=4, max_steps=12,
        data=prompts(6), num_train_epochs=9,
    )  # fmt: skip
    used, collated = [], rollout.collated

    def spy(run, rows):
        used.append(next(k for k, own in enumerate(trainer.window.slices) if own is rows))
        return collated(run, rows)

    monkeypatch.setattr(rollout, "collated", spy)
    trainer.train()
    assert used == [0, 1, 2, 0, 1, 2] * 2
    ages = [row["staleness/mean_updates"] for row in logs(trainer)]
    assert ages == [0, 1, 2, 3, 4, 5] * 2


def test_a_dataset_smaller_than_a_generation_is_named(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "2", "4"):
        grpo(
            tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(list(prompts(2))), per_device_train_batch_size=16
        )


def test_fresh_groups_and_those_they_join_are_divided_by_one_spread(tiny_tokenizer, tmp_path):
    """A running scale has moved on when fresh groups are scored."""
    trainer = grpo(
        tmp_path, tiny_tokenizer, rewards=by_answer, dynamic_sampling=3, reward_transform=["running"],
        scale_rewards="none", per_device_train_batch_size=16, max_steps=1,
    )  # fmt: skip
    tables, replace = [], trainer.dynamic_sampler.replace
    trainer.dynamic_sampler.replace = lambda batch, table: (
        replaced := replace(batch, table),
        tables.append(replaced[1]),
    )[0]
    trainer.train()
    ((table,), (scale,)) = tables, trainer.rewards.transforms
    assert scale.count > len(table.raw)
    assert torch.equal(table.values[:, 0], scale(table.raw[:, 0], None))


def test_another_number_of_processes_goes_on_from_used_up_rollouts_and_not_from_waiting_ones():
    """Of fewer processes each trains a generation in more micro-batches: the place in the old ones means nothing there."""
    window, slices = RolloutWindow(passes=1), [[Row([1], [[2]], [[1]])] for _ in range(2)]
    window.fill(slices, born=3)
    window.take()
    waiting = window.state()
    window.take()
    used_up = window.state()
    assert used_up["buffer"] is None
    again = RolloutWindow(passes=1)
    again.load(used_up, before=2, now=1)
    assert again.used_up
    again.fill(slices * 2, born=4)
    taken = [again.take() and again.used_up for _ in range(4)]
    assert taken == [False, False, False, True]
    again.load(waiting, before=2, now=2)
    assert not again.used_up and again.take() == slices[1] and again.used_up
    with pytest.raises(CheckpointError, match=r"2 processes have only partly used for training, but this run has 1"):
        again.load(waiting, before=2, now=1)


def test_rows_of_another_rank_say_what_their_sequences_count_where_those_of_this_rank_do(monkeypatch):
    """A rank that left a completion out says it; its columns would be shorter than its sequences else."""

    def rows(lengths, left_out):
        rollouts = [Rollout([1, 2], [7] * n, [-1.0] * n, "stop") for n in lengths]
        batch = RolloutBatch([{"prompt": "p"}] * len(rollouts), rollouts, [""] * len(rollouts), left_out=left_out)
        return batch.slices(1, seed=0, skip_truncated=False)[0]

    theirs, mine = rows([90, 90, 90], set()), rows([5, 5, 5], {0})
    costs = [[[(len(r.prompt_ids), [len(ids) for ids in r.completions]) for r in slot]] for slot in (theirs, mine)]
    gathered = iter([costs, [[1], [1]]])
    monkeypatch.setattr(parallel, "all_gather_objects", lambda *_: next(gathered))
    monkeypatch.setattr(parallel, "exchange_objects", lambda parcels, _: [(0, part(theirs[0], [0])), *parcels[1]])
    ((found,), _) = balance_rows([mine], SimpleNamespace(num_processes=2, process_index=1))
    assert [len(ids) for row in found for ids in row.completions] == [90, 0, 5, 5]
    (batch,) = collate(found, pad_token_id=0, layout=Layout())
    assert batch.shares.tolist() == [1.0] * 4
