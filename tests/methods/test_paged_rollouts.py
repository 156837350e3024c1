"""GRPO and RLOO over transformers' continuous batching."""

import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.errors import ConfigError
from posttrain.rollouts import paged
from posttrain.rollouts.paged import PagedEngine
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.wordings import raises

COMMON = {
    "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 5, "report_to": "none",
    "logging_steps": 1, "use_transformers_continuous_batching": True,
}  # fmt: skip
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def letters(completions, **_):
    return [float(len(set(c))) for c in completions]


@pytest.mark.parametrize(("method", "bf16"), [("grpo", True), ("rloo", False)])
def test_training_over_paged_memory_leaves_weights_in_float32_and_moves_them(method, bf16, tiny_tokenizer, tmp_path):
    trainer_class, config_class = TRAINERS[method]
    data = Dataset.from_list([{"prompt": "a b c"}, {"prompt": "d e"}] * 4)
    model = build_model(len(tiny_tokenizer))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = config_class(
        str(tmp_path), **COMMON, bf16=bf16, transformers_continuous_batching_config='{"page_size": 16}'
    )
    trainer = trainer_class(model, letters, config, train_dataset=data, processing_class=tiny_tokenizer)
    assert trainer.engine.name == "paged" and trainer.engine.settings == {"page_size": 16}
    seen = []
    generate = trainer.engine.generate

    def watched(*args):
        inside = {name: p.detach().clone() for name, p in model.named_parameters()}
        rollouts = generate(*args)
        assert all(p.dtype == torch.float32 and torch.equal(p, inside[n]) for n, p in model.named_parameters())
        seen.append([r.token_ids for r in rollouts])
        return rollouts

    trainer.engine.generate = watched
    trainer.train()
    assert len(seen) == 2 and seen[0] != seen[1]
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    log = trainer.state.log_history[0]
    rounding = 0.1 if trainer.args.bf16 else 1e-3
    assert log["sampling/sampling_logp_difference/max"] < rounding  # It says the log-probs that the trainer computes.


def test_without_seeds_a_run_repeats_and_its_calls_differ():
    def calls():
        torch.manual_seed(4)
        engine = PagedEngine(build_model(37), pad_token_id=0)
        torch.manual_seed(5)
        return [[r.token_ids for r in engine.generate([Request([5, 6], 3)], Sampling(6))] for _ in range(2)]

    first, second = calls(), calls()
    assert first == second
    assert first[0] != first[1]


def test_a_thread_that_ends_names_what_was_lost():
    engine = PagedEngine(build_model(37), pad_token_id=0)
    engine._run = lambda inner, work, sampling, settings: {}
    with raises(paged.RolloutError, "0", "1", "2", "3"):
        engine.generate([Request([5, 6], 3)], Sampling(6))


def test_settings_that_it_does_not_have_are_refused(tmp_path):
    with raises(ConfigError, "'page_sise'", "'page_size'"):
        GRPOConfig(str(tmp_path), **COMMON, transformers_continuous_batching_config={"page_sise": 16})
    with raises(ConfigError, "min_p=0.1"):
        GRPOConfig(str(tmp_path), **COMMON, min_p=0.1)
    with raises(ConfigError, "rollout_engine='native'"):
        GRPOConfig(str(tmp_path), **COMMON, rollout_engine="native")
    with pytest.raises(ConfigError, match=r"use_vllm=True"):
        GRPOConfig(str(tmp_path), **COMMON, use_vllm=True)
    engine = PagedEngine(build_model(37), pad_token_id=0)
    with raises(ConfigError):
        engine.generate([Request([5], sampling=Sampling(3, temperature=0.5))], Sampling(3))


def test_the_old_name_still_works_and_says_so(tmp_path):
    settings = {name: value for name, value in COMMON.items() if name != "use_transformers_continuous_batching"}
    with pytest.warns(FutureWarning, match="use_transformers_continuous_batching"):
        config = GRPOConfig(str(tmp_path), **settings, use_transformers_paged=True)
    assert config.use_transformers_continuous_batching and config.rollout_engine == "paged"


def test_a_processor_is_refused(tiny_tokenizer, tmp_path):
    class Processor:
        tokenizer = tiny_tokenizer

    config = GRPOConfig(str(tmp_path), **COMMON)
    data = Dataset.from_list([{"prompt": "a b c"}] * 4)
    trainer = GRPOTrainer(
        build_model(len(tiny_tokenizer)), letters, config, train_dataset=data, processing_class=tiny_tokenizer
    )
    trainer.processing_class = Processor()
    with raises(ConfigError):
        trainer.make_engine(None)
