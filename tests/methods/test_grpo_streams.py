"""Streams of prompts: in training and evaluation they mean what a list of the same rows means, or they are refused."""

import logging

import pytest

from posttrain import ConfigError
from tests.methods.helpers import grpo, losses, prompts, scripted
from tests.wordings import raises


def stream(count=16, shards=1):
    return prompts(count).to_iterable_dataset(num_shards=shards)


def asked(engine):
    """The prompts of all requests so far, each as often as completions of it were wanted."""
    return [tuple(r.prompt_ids) for r in engine.requests for _ in range(r.n)]


def test_every_prompt_of_an_evaluation_stream_gets_its_group(tiny_tokenizer, tmp_path):
    engines = [scripted(), scripted()]
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "max_steps": 1}
    sets = prompts(6), stream(6)
    rows, streamed = (
        grpo(tmp_path / str(i), tiny_tokenizer, engine=engine, eval_dataset=one, **settings)
        for i, (engine, one) in enumerate(zip(engines, sets, strict=True))
    )
    before, after = rows.evaluate(), streamed.evaluate()
    assert [r.n for r in engines[1].requests] == [2] * 6
    assert sorted(asked(engines[0])) == sorted(asked(engines[1]))
    for name in ("eval_reward", "eval_completions/mean_length", "eval_frac_reward_zero_std"):
        assert after[name] == pytest.approx(before[name])


def test_an_evaluation_stream_is_shuffled_with_the_seed_and_the_same_each_time(tiny_tokenizer, tmp_path):
    engine = scripted()
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "max_steps": 1, "shuffle_dataset": False}
    trainer = grpo(tmp_path, tiny_tokenizer, engine=engine, eval_dataset=stream(8), **settings)
    trainer.evaluate()
    first = asked(engine)
    engine.requests.clear()
    trainer.evaluate()
    assert asked(engine) == first
    given = [tuple(ids) for ids in trainer.prompt_source.token_ids(prompts(8).to_list())]
    assert sorted(set(first)) == sorted(given)
    assert list(dict.fromkeys(first)) != given


def test_dispatching_a_stream_by_the_main_process_is_refused(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "dispatch_batches=True"):
        grpo(tmp_path, tiny_tokenizer, data=stream(), accelerator_config={"dispatch_batches": True})


def test_workers_of_a_training_stream_are_told_and_turned_off(tiny_tokenizer, tmp_path, caplog):
    settings = {"shuffle_dataset": False, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = grpo(tmp_path / "a", tiny_tokenizer, data=stream(shards=2), **settings)
    plain.train()
    with caplog.at_level(logging.WARNING):
        trainer = grpo(
            tmp_path / "b", tiny_tokenizer, data=stream(shards=2), dataloader_num_workers=2,
            dataloader_prefetch_factor=2, dataloader_persistent_workers=True, **settings,
        )  # fmt: skip
    assert "dataloader_num_workers=2" in caplog.text
    assert trainer.args.dataloader_num_workers == 0
    trainer.train()
    assert losses(trainer) == losses(plain)


def test_workers_of_an_evaluation_stream_are_off_for_its_loader_alone(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path, tiny_tokenizer, eval_dataset=stream(6, shards=2), num_generations_eval=2,
        per_device_eval_batch_size=4, dataloader_num_workers=1, dataloader_prefetch_factor=2,
    )  # fmt: skip
    loader = trainer.get_eval_dataloader()
    assert loader.num_workers == 0
    assert trainer.args.dataloader_num_workers == 1
    assert trainer.args.dataloader_prefetch_factor == 2
    assert len([row for batch in loader for row in batch]) == 12
