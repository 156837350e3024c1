"""The frozen reference reads a row once: later epochs and evaluations take the sums, as long as they are what it would say."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from posttrain import DPOConfig, DPOTrainer
from posttrain.data.forest import Layout, collate
from posttrain.loop.precompute import ReferenceSums, row_names, with_reference, with_references
from posttrain.types import Row
from tests.conftest import build_model
from tests.methods.helpers import losses, weights
from tests.methods.test_dpo import dpo, pairs
from tests.methods.test_judged import answers, make
from tests.methods.test_vision_trainers import QUICK, one_question
from tests.ranks import run_ranks
from tests.vision_families import build as build_family

EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 2, "optim": "sgd"}


def passes_by_epoch(trainer):
    """Batches that the reference computes while an epoch trains, by epoch; those of evaluations under ``eval``."""
    counts, active = {}, trainer.reference.active

    def counted(policy):
        epoch = "eval" if trainer._in_loop or not trainer.is_in_train else str(int(trainer.state.epoch or 0))
        counts[epoch] = counts.get(epoch, 0) + 1
        return active(policy)

    trainer.reference.active = counted
    return counts


class Once(TrainerCallback):
    """Calls a function at one event, when so many steps are done."""

    def __init__(self, event, step, function):
        setattr(self, event, lambda args, state, *_, **__: function() if state.global_step == step else None)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj"])


def trainers(folder, tokenizer):
    """A trainer of every kind that reads a reference's sums."""
    other = build_model(len(tokenizer), seed=3)
    yield "dpo", lambda **more: dpo(folder, tokenizer, ref_model=other, **(EPOCHS | more))
    yield "ld", lambda **more: dpo(folder, tokenizer, ref_model=other, ld_alpha=0.5, **(EPOCHS | more))
    yield "lora", lambda **more: dpo(folder, tokenizer, peft_config=lora(), **(EPOCHS | more))
    shuffled = EPOCHS | {"train_sampling_strategy": "random", "seed": 3}
    yield "kto", lambda **more: make("kto", folder, tokenizer, **(shuffled | more))
    yield "bco", lambda **more: make("bco", folder, tokenizer, **(shuffled | more))


def test_later_epochs_take_the_sums_and_their_curves_stay(tiny_tokenizer, tmp_path, monkeypatch):
    for kind, build in trainers(tmp_path, tiny_tokenizer):
        kept = build()
        passes = passes_by_epoch(kept)
        kept.train()
        with monkeypatch.context() as patch:
            patch.setattr(ReferenceSums, "known", lambda *_: None)
            fresh = build()
            again = passes_by_epoch(fresh)
            fresh.train()
        assert losses(kept)[:4] == losses(fresh)[:4], kind
        assert losses(kept) == pytest.approx(losses(fresh), rel=1e-6, abs=1e-6), kind
        assert len(set(losses(kept))) == 12, kind
        # KTO's other answers change from epoch to epoch, and are computed.
        others = {"0": 4, "1": 4, "2": 4} if kind == "kto" else {}
        assert passes == {"0": 4} | ({"0": 8, "1": 4, "2": 4} if others else {}), kind
        assert again == ({"0": 8, "1": 8, "2": 8} if others else {"0": 4, "1": 4, "2": 4}), kind
        assert shares(kept) == [0.0] * 4 + [1.0] * 8, kind


def test_evaluations_compute_their_rows_once(tiny_tokenizer, tmp_path):
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 4,
        "num_train_epochs": 1,
        "per_device_eval_batch_size": 2,
    }
    for kind, build in trainers(tmp_path, tiny_tokenizer):
        if kind in ("dpo", "kto"):
            trainer = build(eval_dataset=pairs(4) if kind == "dpo" else answers(4), **settings)
            passes = passes_by_epoch(trainer)
            trainer.train()
            assert passes["eval"] == (2 if kind == "dpo" else 4), kind  # KTO's other answers are the same ones here.
            logs = [row for row in trainer.state.log_history if "eval_loss" in row]
            assert [row["eval_reference/kept"] for row in logs] == [0.0, 1.0, 1.0, 1.0]
            fresh = trainer.evaluate()["eval_loss"]  # Outside of training nothing is kept, and nothing read.
            assert logs[-1]["eval_loss"] == fresh
            assert passes["eval"] == (4 if kind == "dpo" else 8)


def test_one_epoch_and_a_stream_keep_nothing(tiny_tokenizer, tmp_path):
    stream = pairs().to_iterable_dataset()
    for more in ({"max_steps": 4}, {"max_steps": 8, "data": stream}):
        trainer = dpo(tmp_path, tiny_tokenizer, **(EPOCHS | {"num_train_epochs": 1} | more))
        trainer.train()
        assert not trainer.reference_sums["train"].sums and "reference" not in trainer.state_to_save()
        assert not any("reference/kept" in row for row in trainer.state.log_history)


def shares(trainer):
    """What was kept of each step's rows."""
    return [row["reference/kept"] for row in trainer.state.log_history if "reference/kept" in row]


@pytest.mark.parametrize(
    ("stop", "moves"), [(3, {}), (6, {}), (6, {"sync_ref_model": True, "ref_model_sync_steps": 5})]
)
def test_a_resumed_run_takes_the_same_sums_to_the_last_bit(tiny_tokenizer, tmp_path, stop, moves):
    settings = EPOCHS | {"save_strategy": "steps", "save_steps": 3} | moves
    whole, part = (dpo(tmp_path / name, tiny_tokenizer, **settings) for name in "ab")
    whole.train()
    passes = passes_by_epoch(part)
    part.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{stop}"))
    assert torch.equal(weights(whole), weights(part))
    assert part.reference_sums["train"].sums == whole.reference_sums["train"].sums
    assert shares(part) == shares(whole)
    assert passes == ({"1": 2, "2": 3} if moves else {"0": 1} if stop == 3 else {})


def test_sums_of_another_reference_are_not_taken_from_a_checkpoint(tiny_tokenizer, tmp_path):
    settings = EPOCHS | {"save_strategy": "steps", "save_steps": 6}
    dpo(tmp_path / "a", tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer), seed=3), **settings).train()
    part = dpo(tmp_path / "b", tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer), seed=4), **settings)
    passes = passes_by_epoch(part)
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert passes == {"1": 2, "2": 2}  # Every row once: the rest of the second epoch, and what the third has beyond it.


def test_a_reference_that_moves_is_asked_again(tiny_tokenizer, tmp_path, monkeypatch):
    """Another model, weights written in place past autograd, all or a few, and the callback that mixes the policy in."""

    def another(trainer):
        trainer.ref_model = build_model(len(tiny_tokenizer), seed=9)

    def in_place(trainer):
        for parameter in trainer.ref_model.parameters():
            parameter.data.mul_(1.01)

    def one_column(trainer):
        trainer.ref_model.get_input_embeddings().weight.data[:, 7] *= 2

    def another_base_of_positions(trainer):  # The same parameters: what differs is a buffer that no checkpoint holds.
        rope = {"rope_type": "default", "rope_theta": 5.0}
        trainer.ref_model = build_model(len(tiny_tokenizer), rope_parameters=rope)

    cases = [
        ({}, another),
        ({}, in_place),
        ({}, one_column),
        ({}, another_base_of_positions),
        ({"sync_ref_model": True, "ref_model_sync_steps": 5}, lambda trainer: None),
    ]
    for settings, move in cases:
        runs = []
        for keeps in (True, False):
            with monkeypatch.context() as patch:
                if not keeps:
                    patch.setattr(ReferenceSums, "known", lambda *_: None)
                trainer = dpo(tmp_path, tiny_tokenizer, **(EPOCHS | settings))
                trainer.add_callback(Once("on_step_end", 5, lambda trainer=trainer, move=move: move(trainer)))
                trainer.train()
            runs.append(trainer)
        assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-6, abs=1e-6)
        found = shares(runs[0])
        # Three steps of the second epoch find nothing; the third finds what they computed.
        assert found[:8] == [0.0] * 4 + [1.0] + [0.0] * 3 and 0 < sum(found[8:]) < 4


def test_rows_that_change_are_computed(tiny_tokenizer, tmp_path):
    """A user's collator that cuts answers by a clock of its own: every other epoch, so that some come again."""
    calls = []

    def cut(examples):
        calls.append(len(examples))
        longest = 3 if len(calls) <= 4 or len(calls) > 8 else 2
        rows = [row["prompt_ids"] + row[f"{side}_ids"][:longest] for side in ("chosen", "rejected") for row in examples]
        mask = [
            [0] * len(row["prompt_ids"]) + [1] * len(row[f"{side}_ids"][:longest])
            for side in ("chosen", "rejected")
            for row in examples
        ]
        width = max(map(len, rows))
        pad = lambda lists: torch.tensor([one + [0] * (width - len(one)) for one in lists])  # noqa: E731
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {"input_ids": pad(rows), "attention_mask": real, "completion_mask": pad(mask)}

    trainer = dpo(tmp_path, tiny_tokenizer, **EPOCHS)
    trainer.user_collator = cut
    passes = passes_by_epoch(trainer)
    trainer.train()
    assert passes == {"0": 4, "1": 4}
    assert len(trainer.reference_sums["train"].sums) == 16


class ByToken(DPOTrainer):
    """A loss that reads the reference token by token."""

    def objective(self, outputs, batch):
        assert batch.ref_logp is not None
        return super().objective(outputs, batch)


class OwnReference(DPOTrainer):
    """Another reference every time."""

    def with_reference(self, batch):
        return super().with_reference(batch)


def test_what_a_user_reads_or_gives_by_token_is_computed_at_every_step(tiny_tokenizer, tmp_path):
    for kind in (ByToken, OwnReference):
        args = dpo(tmp_path, tiny_tokenizer, **EPOCHS).args
        trainer = kind(
            build_model(len(tiny_tokenizer)), None, args, train_dataset=pairs(), processing_class=tiny_tokenizer
        )
        passes = passes_by_epoch(trainer)
        trainer.train()
        assert passes == {"0": 4, "1": 4, "2": 4}, kind


def test_a_row_is_named_by_all_that_its_log_probs_depend_on():
    def names(*rows, kind="tree"):
        batches = collate(list(rows), pad_token_id=0, layout=Layout(kind), whole_rows=True)
        return [name for batch in batches for name in row_names(batch)]

    row = Row([5, 6, 7], [[8, 9], [8]], [[1, 1], [1]])
    others = [
        Row([5, 6, 4], [[8, 9], [8]], [[1, 1], [1]]),
        Row([5, 6, 7], [[8, 9], [9]], [[1, 1], [1]]),
        Row([5, 6, 7], [[8], [8, 9]], [[1], [1, 1]]),
        Row([5, 6, 7], [[8, 9], [8]], [[0, 1], [1]]),
        Row([5, 6], [[7, 8, 9], [7, 8]], [[1, 1, 1], [1, 1]]),
    ]
    assert len({names(one)[0] for one in [row, *others]}) == 6
    together = names(row, *others)
    assert together == [names(one)[0] for one in [row, *others]] == names(row, *others, kind="padded")


def test_rows_that_differ_in_their_picture_alone_have_sums_of_their_own(tmp_path):
    model, processor = build_family("llava")
    data = one_question(3, ("chosen", "ab"), ("rejected", "ba")).select([0, 2])
    args = DPOConfig(str(tmp_path), logging_steps=1, gradient_checkpointing=False, **QUICK | {"max_steps": 3})
    trainer = DPOTrainer(model, args=args, train_dataset=data, processing_class=processor)
    passes = passes_by_epoch(trainer)
    trainer.train()
    assert list(passes) == ["0"]
    assert len(trainer.reference_sums["train"].sums) == len(set(trainer.reference_sums["train"].sums.values())) == 2


def test_sums_that_rows_bring_are_not_looked_up(tiny_tokenizer, tmp_path):
    data = dpo(tmp_path, tiny_tokenizer).train_dataset
    data = data.add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 8)
    trainer = dpo(tmp_path, tiny_tokenizer, data=data, **EPOCHS)
    trainer.train()
    assert not trainer.reference_sums["train"].sums
    (batch,) = trainer.data_collator([data[0]])
    kept = trainer.reference_sums["train"].of(trainer.reference)
    bare = replace(batch, columns={})
    kept.sums = dict.fromkeys(row_names(bare), b"\x00" * 8)
    assert with_references(trainer.run, [bare], "train", kept, with_reference)[0].columns["ref_logps"].tolist() == [
        0.0,
        0.0,
    ]
    assert with_references(trainer.run, [batch], "train", kept, with_reference)[0].columns["ref_logps"].tolist() == [
        -1.0,
        -2.0,
    ]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_know_each_others_rows_and_stay_in_step_where_one_does_not(tmp_path):
    """Under FSDP a pass of the reference is a collective; before the third epoch one rank forgets all rows."""
    one, two = (
        run_ranks(
            "tests.loop.kept_worker", tmp_path / way, way, 2, accumulation, processes=count, folder=tmp_path / way
        )
        for way, accumulation, count in (("one", 2, 1), ("FSDP2", 1, 2))
    )
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6, abs=1e-6)
    assert one["ranks"] == [[{"0": 4, "eval": 1}, 8]]
    assert two["ranks"] == [[{"0": 2, "eval": 1, "2": 2}, 8], [{"0": 2, "eval": 1, "2": 2}, 4]]


def test_ranks_join_as_an_epoch_begins_so_that_a_run_resumed_behind_its_last_step_does_too(monkeypatch):
    """The checkpoint of that step is written before: what it holds is this rank's alone."""
    theirs = [(b"theirs", b"\0\0\0\0")]
    monkeypatch.setattr("posttrain.models.parallel.all_gather_objects", lambda new, _: new + theirs)
    kept = ReferenceSums(SimpleNamespace(accelerator=None))
    kept.load_state({"key": "a", "sums": {b"mine".hex(): b"\1\0\0\0".hex()}})
    for epoch, names in ((0.5, {b"mine"}), (1.0, {b"mine", b"theirs"})):
        kept.on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
        assert kept.sums.keys() == names


def test_sums_that_a_method_makes_otherwise_are_computed(tiny_tokenizer, tmp_path):
    trainer = dpo(tmp_path, tiny_tokenizer, **EPOCHS)
    usual = trainer.method.sums
    trainer.method.sums = lambda logp, batch: 2 * usual(logp, batch)
    trainer.train()
    assert not trainer.reference_sums["train"].sums
