"""Traps of online training that no other file builds, and bad input through the whole trainer, read as a user would."""

import logging
import os
import time

import datasets
import pytest
import torch

from posttrain import DataError, GRPOConfig, Rollout, ScriptedEngine
from posttrain.checks.rules import check_log
from posttrain.errors import ConfigError, RewardError
from posttrain.loop import rollout
from posttrain.loop.prompts import describe_schedule
from posttrain.loop.scoring import reward_model_options
from tests.conftest import build_model, told_of_calls
from tests.methods.helpers import count_a, grpo, grpo_args, prompts, scripted
from tests.wordings import raises


def logs(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def codes(count, **values):
    rows = [{"step": i + 1, "loss": 0.0, **{k.replace("__", "/"): v for k, v in values.items()}} for i in range(count)]
    return [finding.code for finding in check_log(rows)]


def test_a_reward_function_that_changes_the_directory_does_not_move_the_run(tiny_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moves(completions, **_):
        os.chdir(tmp_path / "elsewhere")
        return count_a(completions)

    trainer = grpo("run", tiny_tokenizer, rewards=moves, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    assert not any((tmp_path / "elsewhere").iterdir())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "metrics.jsonl", "config.json"} <= names


def test_generation_settings_that_forbid_every_token_are_refused(tiny_tokenizer, tmp_path):
    size = len(tiny_tokenizer)
    every = {"suppress_tokens": list(range(size))}, {"logit_bias": dict.fromkeys(range(size), -1e9)}
    for options in every:
        with raises(ConfigError, "generation_kwargs", f"all {size} tokens", "suppress_tokens"):
            grpo(tmp_path, tiny_tokenizer, engine="native", generation_kwargs=options)
    grpo(tmp_path, tiny_tokenizer, engine="native", generation_kwargs={"suppress_tokens": list(range(1, size))})


# The schedule ---------------------------------------------------------------------------------------------------------


def test_r1_the_start_says_how_stale_the_last_slice_gets(tiny_tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "posttrain.loop.prompts")
    grpo(tmp_path, tiny_tokenizer, steps_per_generation=4)
    assert (
        "4 slices, each used 1 time: 4 updates per generation. The last slice is trained on 3 updates after it was sampled"
        in caplog.text
    )


def test_r2_the_start_says_what_passes_do_to_the_length_of_an_epoch(tmp_path):
    """16 prompts in generations of 2 are 8 generations; of 4 passes over 1 slice each: 32 optimiser steps."""
    text = describe_schedule(grpo_args(tmp_path, num_iterations=4, max_steps=64), 16)
    assert "An epoch of 16 prompts is 8 generations and 32 optimizer steps. max_steps=64 is 2 epochs." in text
    assert "8 generations and 8 optimizer steps" in describe_schedule(grpo_args(tmp_path), 16)


def test_r3_a_loss_of_zero_is_explained_and_a_gradient_of_zero_is_told(tmp_path):
    text = describe_schedule(grpo_args(tmp_path), 16)
    assert "A loss near 0 and a clip ratio of 0 are normal, and grad_norm shows" in text
    assert "normal" not in describe_schedule(grpo_args(tmp_path, num_iterations=2), 16)
    assert "importance ratio" not in describe_schedule(grpo_args(tmp_path), 16, has_ratio=False)
    assert "PT-R012" in codes(20, grad_norm=0.0)
    assert codes(20, grad_norm=1e-3) == []


def test_r4_numbers_that_do_not_divide_come_with_those_that_would(tmp_path):
    with pytest.raises(ConfigError) as refused:
        grpo_args(tmp_path, num_generations=3)
    text = str(refused.value)
    assert "8 completions" in text and "set num_generations to one of 2, 4" in text
    assert "per_device_train_batch_size to 6 or 9" in text
    for size in (6, 9):
        assert grpo_args(tmp_path, num_generations=3, per_device_train_batch_size=size).generation_batch_size == size


def test_r6_any_end_that_the_model_knows_ends_a_completion(tiny_tokenizer, tmp_path):
    """The tokenizer ends with token 2, the checkpoint's generation config also with 5."""
    model = build_model(len(tiny_tokenizer))
    model.generation_config.eos_token_id = [2, 5]
    engine = ScriptedEngine(lambda prompt_ids, index: [7 + index, 9, 5, 11, 12])
    trainer = grpo(
        tmp_path, tiny_tokenizer, model, engine, max_steps=1, mask_truncated_completions=True,
        rewards=lambda completions, **_: list(range(len(completions))),
    )  # fmt: skip
    trainer.train()
    assert logs(trainer)[0]["completions/clipped_ratio"] == 0.0
    assert logs(trainer)[0]["completions/max_length"] == 3.0
    assert logs(trainer)[0]["grad_norm"] > 0


def test_r8_prompts_beyond_the_context_are_refused_before_anything_is_generated(tiny_tokenizer, tmp_path):
    engine = scripted()
    rows = [*prompts(15).to_list(), {"prompt": [{"role": "user", "content": "word " * 600}], "answer": 1}]
    with raises(DataError, "train_dataset", "row 15", "max_completion_length=8"):
        grpo(tmp_path, tiny_tokenizer, engine=engine, data=datasets.Dataset.from_list(rows))
    assert engine.requests == []


def test_r8_a_rendered_prompt_has_one_bos(tiny_tokenizer, tmp_path):
    """The tokenizer adds a bos of its own, and so does the template."""
    from tokenizers.processors import TemplateProcessing

    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    engine = scripted()
    grpo(tmp_path, tiny_tokenizer, engine=engine, max_steps=1).train()
    assert all(request.prompt_ids[0] == 1 and request.prompt_ids[1] != 1 for request in engine.requests)


@pytest.mark.parametrize("kwargs", [{"do_sample": False}, {"seed": 3}])
def test_r9_what_would_make_a_group_s_completions_equal_is_refused(tmp_path, kwargs):
    (name,) = kwargs
    with pytest.raises(ConfigError, match=f"'{name}': .*Fix: remove {name}"):
        grpo_args(tmp_path, generation_kwargs=kwargs)


def test_r14_one_rendering_for_prompts_and_reward_models_and_it_is_shown(tiny_tokenizer, tmp_path, caplog):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from posttrain.rewards.model import ModelReward

    caplog.set_level(logging.INFO, "posttrain.loop.prompts")
    tiny_tokenizer.chat_template += "{%- if not enable_thinking %}{{- '<no>' }}{%- endif %}"
    options = {"chat_template_kwargs": {"enable_thinking": True}}
    thinking = grpo(tmp_path, tiny_tokenizer, **options)
    assert "the first prompt, rendered by the chat template" in caplog.text and "<no>" not in caplog.text
    grpo(tmp_path, tiny_tokenizer)
    assert "<no>" in caplog.text
    shape = {"vocab_size": len(tiny_tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    judge = LlamaForSequenceClassification(LlamaConfig(**shape, num_attention_heads=2, num_labels=1, pad_token_id=2))
    given = reward_model_options(thinking.args)
    reward = ModelReward(judge, tiny_tokenizer, **given)
    talk = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    assert "<no>" not in tiny_tokenizer.decode(reward._ids(*talk))
    assert "<no>" in tiny_tokenizer.decode(ModelReward(judge, tiny_tokenizer)._ids(*talk))


# Rewards and advantages -----------------------------------------------------------------------------------------------


def test_r18_an_outlier_of_a_large_group_is_cut_at_ten_and_told(tiny_tokenizer, tmp_path, caplog):
    """One of 128 rewards differs: (G - 1) / sqrt(G) = 127 / 11.31 = 11.2 standard deviations."""
    engine = ScriptedEngine(lambda prompt_ids, index: [10 + index, 2])
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine=engine, per_device_train_batch_size=128, num_generations=128, max_steps=1,
        rewards=lambda completions, **_: [1.0] + [0.0] * (len(completions) - 1), check_rewards=False,
    )  # fmt: skip
    trainer.train()
    assert logs(trainer)[0]["advantages/abs_max"] == 10.0
    assert logs(trainer)[0]["advantages/clipped_share"] == pytest.approx(1 / 128)
    assert "PT-R028: 1 of 128 advantages were beyond 10 standard deviations (up to 11.2)" in caplog.text
    assert "reward_transform" in caplog.text


def test_r18_advantages_that_nothing_divides_are_never_cut(tiny_tokenizer, tmp_path, caplog):
    trainer = grpo(
        tmp_path, tiny_tokenizer, max_steps=1, scale_rewards="none",
        rewards=lambda completions, **_: [50.0 * (i % 4) for i in range(len(completions))],
    )  # fmt: skip
    trainer.train()
    assert logs(trainer)[0]["advantages/abs_max"] == 75.0
    assert "advantages/clipped_share" not in logs(trainer)[0] and "PT-R028" not in caplog.text


# The loss -------------------------------------------------------------------------------------------------------------


def test_r34_a_ratio_cap_below_one_and_sequence_losses_by_token_are_refused(tmp_path):
    with raises(ConfigError):
        grpo_args(tmp_path, loss_type="cispo")
    with raises(ConfigError, "importance_sampling_level='token'"):
        grpo_args(tmp_path, loss_type="luspo")
    with raises(ConfigError, "beta=0.1"):
        grpo_args(tmp_path, loss_type="luspo", importance_sampling_level="sequence", beta=0.1)


def test_r35_log_probs_are_at_the_temperature_that_was_sampled_at(tiny_tokenizer, tmp_path):
    """Our own engine taken for a foreign one: what it says of its tokens is what the trainer computes."""
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", max_steps=1, temperature=0.7)
    trainer.engine.shares_weights = False
    trainer.train()
    assert 0 < logs(trainer)[0]["sampling/sampling_logp_difference/mean"] < 0.02


def test_r36_a_correction_that_leaves_most_tokens_out_is_told_and_missing_log_probs_stop():
    assert codes(10, sampling__frac_masked=0.1) == []
    assert codes(10, sampling__frac_masked=0.3) == ["PT-R010"]
    assert codes(1, sampling__nan_logprobs=0.0005) == []
    rows = [{"step": 1, "loss": 0.0, "sampling/nan_logprobs": 0.01}]
    (finding,) = check_log(rows)
    assert (finding.code, finding.severity) == ("PT-R011", "error")


def test_r40_a_cap_below_the_clip_and_a_ratio_that_runs_away_are_told(tmp_path, caplog):
    grpo_args(tmp_path, delta=1.1, num_iterations=2)
    assert "delta=1.1 is below 1 + epsilon_high = 1.2, so the ratio is limited by delta" in caplog.text
    assert "PT-R005" in codes(1, ratio__max=11.0)
    assert codes(1, ratio__max=9.0) == []


def test_r41_no_logits_of_a_whole_batch_are_ever_made(tiny_tokenizer, tmp_path):
    heads = []
    trainer = grpo(tmp_path, tiny_tokenizer, max_steps=1, beta=0.1, steps_per_generation=2)
    for model in (trainer.model, trainer.reference.copy):
        told_of_calls(model.lm_head, lambda: heads.append(0))
    trainer.train()
    assert logs(trainer)[0]["grad_norm"] > 0
    assert heads == []  # Its weight is read in chunks of tokens.


@pytest.mark.parametrize(("settings", "passes"), [({}, 0), ({"beta": 0.1}, 1), ({"beta": 0.1, "num_iterations": 2}, 2)])
def test_r42_old_and_reference_log_probs_are_computed_only_where_the_loss_reads_them(
    tiny_tokenizer, tmp_path, monkeypatch, settings, passes
):
    trainer = grpo(tmp_path, tiny_tokenizer, max_steps=1, **settings)
    compute, seen = rollout.logps_and_mass, []
    monkeypatch.setattr(rollout, "logps_and_mass", lambda *args: seen.append(0) or compute(*args))
    trainer.train()
    assert len(seen) == passes


# Bad input through the trainer ----------------------------------------------------------------------------------------


def test_a_reward_that_hangs_ends_the_run_with_its_name(tiny_tokenizer, tmp_path):
    calls = []

    def remote(completions, **_):
        calls.append(0)
        if len(calls) > 2:  # The dry run and the first generation pass.
            time.sleep(20)
        return count_a(completions)

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=remote, reward_timeout=0.3)
    begin = time.monotonic()
    with raises(RewardError, "0.3"):
        trainer.train()
    assert time.monotonic() - begin < 15


def test_a_judge_that_is_down_ends_the_run_with_its_address(tiny_tokenizer, tmp_path):
    from posttrain import OnlineDPOConfig, OnlineDPOTrainer, OpenAIPairwiseJudge

    judge = OpenAIPairwiseJudge("judge", base_url="http://127.0.0.1:9/v1", max_requests=None, retries=0)
    args = OnlineDPOConfig(
        str(tmp_path), max_steps=1, report_to="none", bf16=False, per_device_train_batch_size=2, max_new_tokens=4
    )
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9") as refused:  # Before the model is loaded.
        OnlineDPOTrainer(
            build_model(len(tiny_tokenizer)), judge=judge, args=args, train_dataset=prompts(),
            processing_class=tiny_tokenizer, rollout_engine=scripted(),
        )  # fmt: skip
    assert "Nothing listens on port 9 of 127.0.0.1" in str(refused.value)
    assert "must return" not in str(refused.value)


def test_a_judge_that_goes_down_ends_the_run_with_its_address(tiny_tokenizer, tmp_path):
    from posttrain import OnlineDPOConfig, OnlineDPOTrainer, OpenAIPairwiseJudge

    judge = OpenAIPairwiseJudge("judge", base_url="http://127.0.0.1:9/v1", max_requests=None, retries=0)
    args = OnlineDPOConfig(
        str(tmp_path), max_steps=1, report_to="none", bf16=False, per_device_train_batch_size=2, max_new_tokens=4,
        check_rewards=False,
    )  # fmt: skip
    trainer = OnlineDPOTrainer(
        build_model(len(tiny_tokenizer)), judge=judge, args=args, train_dataset=prompts(),
        processing_class=tiny_tokenizer, rollout_engine=scripted(),
    )  # fmt: skip
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9"):
        trainer.train()


def test_a_prompt_that_grows_beyond_the_context_in_a_stream_is_refused_when_it_comes(tiny_tokenizer, tmp_path):
    rows = prompts(4).to_list() + [{"prompt": [{"role": "user", "content": "word " * 600}], "answer": 1}] * 4
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    trainer = grpo(tmp_path, tiny_tokenizer, data=stream, max_steps=4, shuffle_dataset=False)
    with raises(DataError, "max_completion_length=8", "512"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_an_engine_that_answers_nothing_trains_nothing_and_does_not_crash(tiny_tokenizer, tmp_path):
    class Mute(ScriptedEngine):
        def generate(self, requests, sampling):
            return [Rollout(list(r.prompt_ids), [], [], "length", 0) for r in requests for _ in range(r.n)]

    trainer = grpo(tmp_path, tiny_tokenizer, engine=Mute([[2]]), max_steps=1, rewards=lambda completions, **_: list(range(len(completions))))  # fmt: skip
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    trainer.train()
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert logs(trainer)[0]["completions/clipped_ratio"] == 1.0


def test_fields_of_tools_exist_only_where_tools_are():
    from dataclasses import fields

    from posttrain import A2POConfig, GMPOConfig, OnlineDPOConfig, RLOOConfig
    from posttrain.methods.online_config import EpisodeFields

    own = {f.name for f in fields(EpisodeFields)}
    assert len(own) == 17  # Five of tools and environments, the others of a harness.
    for config in (GRPOConfig, GMPOConfig):
        assert own <= {f.name for f in fields(config)}
    for config in (RLOOConfig, A2POConfig, OnlineDPOConfig):
        assert not own & {f.name for f in fields(config)}
