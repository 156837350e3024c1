"""Every trainer on two gloo processes whose rows do not come out even: nothing is counted twice, nothing waits for ever."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.methods.every_trainer import EVERY, GROUPED, JUDGED, ONLINE, data, every
from tests.ranks import FREE, leave, part, run_ranks

WATCHDOG = 120  # Seconds for all trainers; each takes one or two.
RANDOM = ("rollouts/",)  # Speeds.


def work(folder, world):
    """Metrics of each trainer before, while and after it trains; and of sets so small that a process has no row."""
    from tests.conftest import build_tokenizer

    found = {}
    for kind in sorted(EVERY):
        tokenizer = build_tokenizer()
        tokenizer.pad_token = "<|endoftext|>"
        trainer = every(
            kind, f"{folder}/{kind}", tokenizer, eval_dataset=data(kind, 5), per_device_train_batch_size=4 // world,
            per_device_eval_batch_size=4 // world, eval_strategy="steps", eval_steps=1, gradient_checkpointing=False,
        )  # fmt: skip
        before = trainer.evaluate()
        single = trainer.evaluate(data(kind, 1))
        streamed = {} if kind == "a2po" else trainer.evaluate(data(kind, 5).to_iterable_dataset())
        if world > 1:
            trainer.train()
        rows = [] if kind not in ONLINE else written(trainer)
        found[kind] = {"before": before, "single": single, "streamed": streamed, "rows": rows}
        found[kind]["during"] = [row for row in trainer.state.log_history if "eval_runtime" in row][-1]
    return found


def written(trainer):
    """Prompts of the completions file, of the first evaluation."""
    import pyarrow.parquet as pq

    if not trainer.accelerator.is_main_process:
        return []
    path = Path(trainer.args.output_dir, "eval_completions.parquet")
    return [row["prompt"] for row in pq.read_table(path).to_pylist()] if path.is_file() else []


def run(folder, processes, what):
    module = "tests.loop.test_evaluation_ranks"
    return run_ranks(module, folder, processes, what, processes=processes, folder=folder, timeout=WATCHDOG)


@pytest.fixture(scope="module")
def both():
    folder = Path(tempfile.mkdtemp())
    return tuple(run(folder / str(world), world, "whole") for world in (1, 2))


@pytest.mark.matrix
@pytest.mark.distributed
@pytest.mark.parametrize("kind", sorted(EVERY))
@pytest.mark.parametrize("which", ["before", "single", "streamed"])
def test_evaluation_on_two_ranks_is_that_of_one(both, kind, which):
    one, two = (side[kind][which] for side in both)
    assert set(one) == set(two)
    partners = kind == "kto"  # Answers to other prompts come from a process's own rows: another baseline, and loss.
    for name, value in one.items():
        if partners and ("kl" in name or name == "eval_loss"):
            continue
        if not any(part in name for part in (*FREE, *RANDOM)):
            assert two[name] == pytest.approx(value, abs=2e-5, rel=2e-5), name


@pytest.mark.distributed
@pytest.mark.parametrize("kind", sorted(ONLINE))
def test_each_prompt_is_sampled_and_rewarded_once(both, kind):
    for side in both:
        found = side[kind]["before"]
        assert (found.get("eval_reward") or found["eval_objective/scores"]) == pytest.approx(0.2)
        assert found["eval_samples_per_second"] * found["eval_runtime"] == pytest.approx(5, rel=0.05)
    sampled = (5 + 1 + 5 + 5 * (kind != "a2po")) * (2 if kind in GROUPED else 1)
    assert (
        len(both[1][kind]["rows"]) == sampled
    )  # In the completions file; sets of 5, 1, 5 and, as a stream, 5 prompts.


@pytest.mark.distributed
@pytest.mark.parametrize("kind", sorted(EVERY))
def test_evaluation_in_the_middle_of_training_ends(both, kind):
    during = both[1][kind]["during"]
    assert during["step"] == 1
    assert set(both[0][kind]["before"]) <= set(during)


ADVERSARIAL = {
    "kto": [{"prompt": p, "completion": c, "label": g} for p, c, g in (
        ("A? ", "yes ", True), ("A? ", "no ", False), ("B? ", "maybe so ", True), ("C? ", "well ", False),
    )],
    "bco": [{"prompt": p, "completion": "yes " * (1 + 9 * g), "label": g} for p, g in zip("ABCD", (True, True, False, False), strict=True)],
}  # fmt: skip


def split(folder):
    """A rank without a mismatched answer in a step and in an evaluation batch, or without a desirable one."""
    import datasets

    from tests.conftest import build_tokenizer

    found = {}
    for kind in sorted(JUDGED):
        rows = datasets.Dataset.from_list(ADVERSARIAL[kind])
        trainer = every(
            kind, f"{folder}/{kind}", build_tokenizer(), train=rows, eval_dataset=rows, train_sampling_strategy="sequential",
            max_steps=3, eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        trainer.train()
        found[kind] = trainer.state.log_history
    return found


@pytest.mark.distributed
def test_a_rank_without_mismatched_or_good_answers_does_not_stop_the_others(tmp_path):
    """The forward pass of DDP's wrapper is a collective where the model has buffers."""
    found = run(tmp_path, 2, "split")
    for kind, logs in found.items():
        assert sum("eval_loss" in row for row in logs) == 3, kind
        assert sum("loss" in row for row in logs) == 3, kind
    # Rows 0 and 1 have one prompt: only the two of the other process have partners.
    assert found["kto"][0]["kl/valid_fraction"] == pytest.approx(0.5)


def sharded(folder, world, rows):
    """What each trainer logs and evaluates after two steps on so many rows; FSDP2 where there are two processes."""
    from tests.conftest import build_tokenizer
    from tests.matrix import WAYS, allow_fsdp_on_cpu

    way = WAYS["FSDP2"][1] if world > 1 else {}
    if way:
        allow_fsdp_on_cpu()
    found = {}
    for kind in sorted(EVERY):
        tokenizer = build_tokenizer()
        tokenizer.pad_token = "<|endoftext|>"
        trainer = every(
            kind, f"{folder}/{rows}/{kind}", tokenizer, train=data(kind, rows), eval_dataset=data(kind, 5), max_steps=2,
            per_device_train_batch_size=4 // world, per_device_eval_batch_size=4 // world, optim="sgd",
            gradient_checkpointing=False, **way,
        )  # fmt: skip
        trainer.train()
        assert world == 1 or "FSDP" in str(trainer.accelerator.distributed_type)
        # An odd number of rows is about training: it is evaluated in the other run.
        evaluated = [] if rows % 2 else [trainer.evaluate(), trainer.evaluate(data(kind, 1))]
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found[kind] = {"losses": losses, "eval": [{k: v for k, v in one.items() if "loss" in k} for one in evaluated]}
    return found


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_no_sharded_trainer_waits_for_a_rank_without_rows(tmp_path):
    """With FSDP2 every forward pass is a collective: evaluation of five rows on two ranks, and of one."""
    one, two = (run(tmp_path / str(world), world, "sharded:8") for world in (1, 2))
    for kind in sorted(EVERY):
        for ours, alone in zip(two[kind]["eval"], one[kind]["eval"], strict=True):
            assert set(ours) == set(alone), kind
            for name in set(alone) if kind != "kto" else ():  # Its partners are a process's own rows.
                assert ours[name] == pytest.approx(alone[name], abs=2e-5, rel=2e-5), (kind, name)


@pytest.mark.distributed
def test_sharded_training_ends_where_the_last_step_has_an_odd_number_of_rows(tmp_path):
    """Accelerate gives a row to both ranks then, so the loss is not that of one process."""
    found = run(tmp_path, 2, "sharded:7")
    assert {kind: len(one["losses"]) for kind, one in found.items()} == dict.fromkeys(sorted(EVERY), 2)


if __name__ == "__main__":
    folder, world, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if what == "split":
        result = split(folder)
    elif what.startswith("sharded:"):
        result = sharded(folder, world, int(what.partition(":")[2]))
    else:
        result = work(folder, world)
    from accelerate import PartialState

    if PartialState().is_main_process:
        leave(result)
    part()
