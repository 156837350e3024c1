"""Rollouts on disk come back as they were, and leave nothing behind."""

import torch

from posttrain.rollouts.batch import Spool, row_bytes
from tests.algorithms.helpers import grpo, losses, prompts, weights
from tests.losses.properties import toy_rows


def test_slices_beyond_the_bound_are_files_and_come_back_equal(tmp_path):
    slices = [toy_rows(seed) for seed in range(4)]
    most = sum(map(row_bytes, slices[0])) + sum(map(row_bytes, slices[1]))
    spool = Spool(slices, most=most, folder=tmp_path / "waiting", rank=3)
    assert sorted(p.name[:2] + p.name[-4:] for p in (tmp_path / "waiting").iterdir()) == ["3-2.pt", "3-3.pt"]
    assert list(spool) == slices
    assert spool[2] == spool[2] == slices[2]
    assert len(spool) == 4
    spool.close()
    assert not (tmp_path / "waiting").exists()


def test_files_go_with_the_last_reference(tmp_path):
    spool = Spool([toy_rows()], most=0, folder=tmp_path / "waiting")
    assert len(list((tmp_path / "waiting").glob("0-*-0.pt"))) == 1
    del spool
    assert not (tmp_path / "waiting").exists()


def test_a_spool_that_is_still_referred_to_takes_no_file_of_the_next_with_it(tmp_path):
    old = Spool([toy_rows()], most=0, folder=tmp_path / "waiting")
    new = Spool([toy_rows(1)], most=0, folder=tmp_path / "waiting")
    del old
    assert new[0] == toy_rows(1)


def test_without_a_bound_nothing_is_written(tmp_path):
    spool = Spool([toy_rows()], most=None, folder=tmp_path / "waiting")
    assert spool.files == []
    assert not (tmp_path / "waiting").exists()


def test_tensors_and_masks_survive(tmp_path):
    (row, *_) = toy_rows()
    row.model_kwargs = {"pixel_values": torch.arange(6.0).reshape(2, 3)}
    row.prompt_mask = [0, 1, 1, 1, 1]
    (back,) = Spool([[row]], most=0, folder=tmp_path / "w")[0]
    assert torch.equal(back.model_kwargs["pixel_values"], row.model_kwargs["pixel_values"])
    assert (back.prompt_mask, back.loss_masks) == (row.prompt_mask, row.loss_masks)


def test_a_run_from_disk_equals_one_from_memory(tiny_tokenizer, tmp_path):
    settings = {
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6, "beta": 0.05,
        "per_device_train_batch_size": 4, "num_train_epochs": 9, "data": prompts(16),
    }  # fmt: skip
    memory = grpo(tmp_path / "memory", tiny_tokenizer, **settings)
    memory.train()
    disk = grpo(tmp_path / "disk", tiny_tokenizer, rollout_buffer_bytes=2000, **settings)
    assert len(list((tmp_path / "disk").glob("rollout_buffer/*"))) == 0
    disk.train()
    assert disk.window.slices.files
    assert losses(disk) == losses(memory)
    assert torch.equal(weights(disk), weights(memory))
    disk.window.slices = None
    assert not (tmp_path / "disk" / "rollout_buffer").exists()


def test_a_run_that_stops_with_files_waiting_goes_on(tiny_tokenizer, tmp_path):
    settings = {
        "gradient_accumulation_steps": 2, "steps_per_generation": 6, "max_steps": 4, "per_device_train_batch_size": 4,
        "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 9, "data": prompts(12), "rollout_buffer_bytes": 0,
    }  # fmt: skip
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    part = grpo(tmp_path / "part", tiny_tokenizer, **settings)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(part))
