"""Settings given in `generation_kwargs`: they hold for log-probs as for sampling, and what nobody reads is refused."""

import pytest

from posttrain import ConfigError, GRPOConfig, PPOConfig
from tests.methods.helpers import grpo, grpo_args, losses
from tests.wordings import raises


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"temprature": 0.7}, "did you mean 'temperature'"),
        ({"num_beams": 4}, "generation_kwargs='num_beams' is not known"),
        ({"top_p": 5.0}, "top_p=5.0"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_what_generation_kwargs_cannot_mean_is_refused_when_the_config_is_made(tmp_path, given, match):
    with pytest.raises(ConfigError, match=match):
        grpo_args(tmp_path, generation_kwargs=given)


def test_an_overridden_temperature_is_that_of_the_log_probs_too(tiny_tokenizer, tmp_path):
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 2}  # Old log-probs are read.
    field = grpo(tmp_path / "a", tiny_tokenizer, engine="native", temperature=0.6, **settings)
    override = grpo(
        tmp_path / "b", tiny_tokenizer, engine="native", generation_kwargs={"temperature": 0.6, "do_sample": True},
        **settings,
    )  # fmt: skip
    for trainer in (field, override):
        trainer.train()
    assert losses(override) == losses(field)
    logged = [row for row in override.state.log_history if "loss" in row]
    assert logged[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert logged[0]["ratio/max"] == pytest.approx(1.0, abs=1e-4)


def test_overrides_survive_a_config_that_is_written_and_read_back(tmp_path):
    args = grpo_args(tmp_path, generation_kwargs='{"temperature": 0.6, "top_k": null, "max_new_tokens": 3}')
    again = GRPOConfig(**{k: getattr(args, k) for k in ("output_dir", "temperature", "top_k", "generation_kwargs")})
    assert (again.temperature, again.top_k, again.generation_kwargs) == (0.6, 0, {"max_new_tokens": 3})


def test_the_cache_that_was_asked_for_is_the_one_that_generates(tiny_tokenizer, tmp_path):
    settings = {"rollout_engine": "hf", "max_steps": 1}
    plain = grpo(tmp_path / "a", tiny_tokenizer, engine="native", **settings)
    trainer = grpo(tmp_path / "b", tiny_tokenizer, engine="native", cache_implementation="static", **settings)
    asked, generate = [], trainer.model.generate

    def spy(**kwargs):
        asked.append(kwargs["generation_config"].cache_implementation)
        return generate(**kwargs)

    trainer.model.generate = spy
    for one in (plain, trainer):
        one.train()
    assert asked == ["static"]
    assert losses(trainer) == pytest.approx(losses(plain), abs=1e-6)


def test_a_cache_that_no_engine_here_reads_is_told(tiny_tokenizer, tmp_path, caplog):
    grpo(tmp_path, tiny_tokenizer, engine="native", rollout_engine="native", cache_implementation="static")
    assert "cache_implementation='static' is ignored" in caplog.text


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_shards_that_were_to_stay_apart_are_gathered_and_told(tmp_path, config, caplog):
    config(str(tmp_path), bf16=False, report_to="none", ds3_gather_for_generation=False)
    assert "ds3_gather_for_generation=False is ignored: rollout_engine='auto' needs whole weights" in caplog.text


def test_shards_cannot_stay_apart_where_vllm_generates(tmp_path):
    with raises(ConfigError, "ds3_gather_for_generation=False", "use_vllm=True"):
        grpo_args(tmp_path, ds3_gather_for_generation=False, use_vllm=True, vllm_mode="server")
