"""Options of GRPO: what is refused, what is warned of, and that each option does what its name says."""

import copy
import json
import logging
import math
from dataclasses import replace
from functools import partial

import datasets
import peft
import pytest
import torch

from posttrain import ConfigError, DataError, GRPOConfig, GRPOTrainer, ModelError, RolloutError, ScriptedEngine
from posttrain.loop.rollout import settings_of
from posttrain.methods.grpo.objective import EntropyBonus
from posttrain.models.heads import Float32Linear, cast_head_to_fp32
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.hf import HFEngine
from posttrain.rollouts.native.engine import NativeEngine
from tests.conftest import build_model
from tests.methods.every_trainer import every
from tests.methods.helpers import count_a, grpo, grpo_args, prompts, scripted, sft, weights
from tests.wordings import raises

OFF_POLICY = {"steps_per_generation": 2}  # One update old in the second slice: the ratio is not 1.


class Foreign(RolloutEngine):
    """A scripted engine that is not the trainer's model: what it says of its tokens is to be corrected."""

    name = "foreign"

    def __init__(self, inner=None):
        self.inner = inner or scripted()

    def generate(self, requests, sampling):
        return self.inner.generate(requests, sampling)

    def load_weights(self, *_): ...

    def close(self): ...


def logs(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


# Refused and warned of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"vllm_importance_sampling_mode": "sequence_cut"},
            "vllm_importance_sampling_mode='sequence_cut' is not known",
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "both are None",
        ),
        (
            {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0},
            "clip_min=3.0 must be below .*clip_max=2.0",
        ),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.1}, "does not support beta=0.1"),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
            "does not support top_entropy_quantile=0.5",
        ),
        (
            {
                "loss_type": "luspo",
                "importance_sampling_level": "sequence",
                "vllm_importance_sampling_mode": "token_mask",
            },
            "does not support vllm_importance_sampling_mode='token_mask'",
        ),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "CISPO limits the ratio itself"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1"),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold=0.0 must be above 0"),
        ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"min_group_std": -1.0}, "min_group_std=-1.0"),
        ({"entropy_coef_min": 0.5, "entropy_coef_max": 0.1}, "entropy_coef_min=0.5 must be at most .*=0.1"),
        ({"log_completions_hub_repo": "me/rows"}, "log_completions=False"),
        ({"sync_ref_model": True}, "no effect with beta=0.0"),
        ({"num_generations_eval": -2}, "num_generations_eval=-2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"num_iterations": 0}, "num_iterations=0"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        grpo_args(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "weights each sequence by its length"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "defines its own sequence weight"),
        ({"delta": 1.1}, "delta=1.1 is below 1 + epsilon_high = 1.2"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta=2.0 has no effect"),
        ({"loss_type": "vespo", "epsilon": 0.1}, "epsilon=0.1 has no effect"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "epsilon=0.1 has no effect"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
            "scale_rewards='batch' is ignored",
        ),
        ({"temperature": 0.05}, "temperature=0.05 is so low"),
        ({"repetition_penalty": 1.1, "top_k": 50}, "repetition_penalty=1.1 changes the distribution from which"),
        ({"epsilon": 0.1}, "epsilon=0.1 has no effect"),
        ({"loss_type": "sapo"}, "loss_type='sapo' has no effect"),
        (
            {"steps_per_generation": 4, "num_iterations": 5},
            "are used for training 20 optimizer steps after they were sampled",
        ),
        ({"use_liger_kernel": True}, "liger_kernel is not installed"),
    ],
)
def test_what_will_not_do_what_it_seems_to_is_warned_of(tmp_path, caplog, settings, text):
    with caplog.at_level(logging.WARNING):
        grpo_args(tmp_path, **settings)
    assert text in caplog.text


def test_a_bound_below_one_limits_a_ratio_of_one(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        grpo_args(tmp_path, delta=0.5)
    assert "delta=0.5 is below 1 + epsilon_high" in caplog.text and "has no effect, because" not in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epsilon": 0.1, **OFF_POLICY},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **OFF_POLICY},
        {"scale_rewards": "batch"},
        {"steps_per_generation": 4, "num_iterations": 4},
        {"loss_type": "cispo", "epsilon_high": 5.0, **OFF_POLICY},
    ],
)
def test_what_is_fine_is_not_warned_of(tmp_path, caplog, settings):
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        grpo_args(tmp_path, **settings)
    assert not [record for record in caplog.records if "grpo" in record.name]


def test_r39_the_liger_switch_leaves_our_chunked_loss_in_place(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, use_liger_kernel=True, max_steps=1)
    plain = grpo(tmp_path / "plain", tiny_tokenizer, max_steps=1)
    trainer.train()
    plain.train()
    assert torch.equal(weights(trainer), weights(plain))
    assert "entropy" in logs(trainer)[0]


@pytest.mark.parametrize(
    ("loss", "setting"),
    [("gspo", "importance_sampling_level='sequence'"), ("IcePop", "token_mask"), ("dapo+", "dynamic")],
)
def test_methods_that_are_settings_of_a_loss_are_named(tmp_path, loss, setting):
    with raises(ConfigError, f"loss_type={loss!r}", setting):
        grpo_args(tmp_path, loss_type=loss)


def test_r38_active_dropout_is_warned_of(tiny_tokenizer, tmp_path, caplog):
    model = build_model(len(tiny_tokenizer))
    model.config.attention_dropout = 0.1
    with caplog.at_level(logging.WARNING):
        grpo(tmp_path, tiny_tokenizer, model=model)
    assert "attention_dropout=0.1 is active" in caplog.text and "PVeRA" not in caplog.text
    caplog.clear()
    model = build_model(len(tiny_tokenizer))
    model.config.attention_dropout = 0.1
    with caplog.at_level(logging.WARNING):
        grpo(tmp_path, tiny_tokenizer, model=model, disable_dropout=True)
    assert "is active" not in caplog.text
    with caplog.at_level(logging.WARNING):
        adapter = peft.PveraConfig(r=4, target_modules=["q_proj"])
        grpo(tmp_path, tiny_tokenizer, disable_dropout=True, peft_config=adapter)
    assert "the noise of the PVeRA adapter" in caplog.text


@pytest.mark.parametrize("groups", [2, 1])
def test_r21_groups_that_differ_by_noise_are_told_once(tiny_tokenizer, tmp_path, caplog, groups):
    """A generation of one group has no spread but its own: what is narrow shows against the rewards so far."""

    def noise(completions, answer, **_):
        return [1000.0 * a + 0.01 * (i % 2) for i, a in enumerate(answer)]

    with caplog.at_level(logging.WARNING):
        grpo(tmp_path, tiny_tokenizer, rewards=noise, per_device_train_batch_size=4 * groups, max_steps=8).train()
    assert caplog.text.count("a standard deviation below a thousandth") == 1


def test_r21_groups_that_differ_by_what_they_are_paid_for_are_not_called_noise(tiny_tokenizer, tmp_path, caplog):
    def small(completions, answer, **_):
        return [1e-3 * (i % 2) for i, _ in enumerate(answer)]

    with caplog.at_level(logging.WARNING):
        grpo(tmp_path, tiny_tokenizer, rewards=small, max_steps=4).train()
    assert "a standard deviation below" not in caplog.text


@pytest.mark.parametrize("settings", [{}, {"min_group_std": 0.1}], ids=["equal rewards", "as advised"])
def test_r21_groups_that_get_no_advantage_are_not_called_noise(tiny_tokenizer, tmp_path, caplog, settings):
    def noise(completions, answer, **_):
        apart = 0.01 if settings else 0.0
        return [1000.1 * a + apart * (i % 2) for i, a in enumerate(answer)]

    with caplog.at_level(logging.WARNING):
        grpo(tmp_path, tiny_tokenizer, rewards=noise, max_steps=6, **settings).train()
    assert "a standard deviation below" not in caplog.text


DEFAULTS = {  # Table 2.2 of the chapter on online methods, in its order.
    "model_init_kwargs": None, "trust_remote_code": False, "router_aux_loss_coef": None, "disable_dropout": False,
    "cast_lm_head_to_fp32": False, "remove_unused_columns": False, "num_generations": 8, "num_generations_eval": None,
    "max_completion_length": 512, "ds3_gather_for_generation": True, "shuffle_dataset": True, "pad_to_multiple_of": None,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "chat_template_kwargs": None, "cache_implementation": None, "use_vllm": False,
    "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None, "beta": 0.0,
    "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "delta": None, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2, "vespo_lambda_pos": 3, "vespo_k_neg": 3, "vespo_lambda_neg": 2,
    "importance_sampling_level": "token", "reward_weights": None, "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group", "loss_type": "dapo", "mask_truncated_completions": False, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
    "log_completions": False, "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False,
    "log_completions_hub_repo": None, "learning_rate": 1e-6, "logging_steps": 10,
    # What the chapter adds is off, or does not change a gradient.
    "mask_zero_variance_groups": False, "log_ref_kl": False, "min_group_std": 0.0, "dynamic_sampling": 0,
    "reward_timeout": None, "reward_transform": None, "balance_ranks": True,
}  # fmt: skip


def test_every_field_has_the_default_of_the_chapter(tmp_path):
    args = GRPOConfig(str(tmp_path), report_to="none")
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("given", "size", "slices"),
    [
        ({"gradient_accumulation_steps": 3}, 24, 3),
        ({"generation_batch_size": 32}, 32, 4),
        ({"steps_per_generation": 5}, 40, 5),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, 16, 2),  # The same thing twice: a config read back.
    ],
)
def test_the_arithmetic_of_a_generation(tmp_path, given, size, slices):
    args = grpo_args(tmp_path, **given)
    assert (args.generation_batch_size, args.steps_per_generation) == (size, slices)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_penalty_without_the_reference_that_it_needs_is_refused(tiny_tokenizer, tmp_path, kind):
    trainer = every(kind, tmp_path, tiny_tokenizer, beta=0.0)
    trainer.beta = 0.5
    with pytest.raises(ConfigError, match=r"beta=0\.5"):
        trainer.train()


# The entropy bonus --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_r43_the_bonus_is_the_coefficient_times_the_mean_entropy_in_every_loss(tiny_tokenizer, tmp_path, loss_type):
    extra = {"luspo": {"importance_sampling_level": "sequence"}, "cispo": {"epsilon_high": 5.0}}.get(loss_type, {})
    trainer = grpo(tmp_path, tiny_tokenizer, loss_type=loss_type, entropy_coef=0.25, max_steps=1, **extra)
    trainer.train()
    row = logs(trainer)[0]
    assert (row["policy_loss"] - row["loss"]) / row["entropy"] == pytest.approx(0.25, rel=1e-3)
    assert row["entropy_coef"] == 0.25


def test_r43_the_bonus_moves_the_gradient(tiny_tokenizer, tmp_path):
    after = []
    for coef in (0.0, 1.0):
        trainer = grpo(tmp_path, tiny_tokenizer, entropy_coef=coef, max_steps=1, optim="sgd")
        trainer.train()
        after.append(weights(trainer))
    assert (after[0] - after[1]).abs().max() > 1e-5


def test_the_controller_raises_below_its_target_and_lowers_above(tmp_path):
    steered = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.5, "entropy_coef_max": 0.012}
    args = grpo_args(tmp_path, **steered)
    bonus = EntropyBonus(args.entropy_coef)
    assert bonus.applied(args) == 0.0  # Nothing is known before the first window.
    seen = []
    for entropy in (0.4, 0.5, 0.6, 0.6, 0.6, 0.6):
        bonus = bonus.after(entropy, args)
        seen.append((round(bonus.coefficient, 4), round(bonus.applied(args), 4)))
    assert seen == [(0.012, 0.012), (0.012, 0.012), (0.007, 0.0), (0.002, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_the_coefficient_is_steered_once_an_optimiser_step_and_survives_a_resume(tiny_tokenizer, tmp_path):
    settings = {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 100.0,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 9,
    }
    whole = grpo(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    assert [round(row["entropy_coef"], 4) for row in logs(whole)] == [0.105, 0.11, 0.115, 0.12]
    first = logs(whole)[0]
    assert first["policy_loss"] == pytest.approx(first["loss"], abs=1e-6)  # No bonus in the first window.
    second = logs(whole)[1]
    assert second["policy_loss"] - second["loss"] == pytest.approx(0.105 * second["entropy"], rel=1e-3)
    saved = json.loads((tmp_path / "whole" / "checkpoint-2" / "entropy_ctrl_state.json").read_text())
    assert saved == {"entropy_coef": pytest.approx(0.11), "last_world_entropy": pytest.approx(second["entropy"])}
    part = grpo(tmp_path / "part", tiny_tokenizer, **settings)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logs(part)[-1]["entropy_coef"] == pytest.approx(0.12)
    assert torch.equal(weights(whole), weights(part))


def test_a_controller_that_saw_nothing_is_saved_without_infinity(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, use_adaptive_entropy=True, max_steps=1)
    trainer._save_rng_state(str(tmp_path))
    text = (tmp_path / "entropy_ctrl_state.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["last_world_entropy"] is None
    trainer.run.progress.own = replace(trainer.run.progress.own, last=3.0)
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert trainer.run.progress.own.last == math.inf


def test_evaluation_does_not_steer(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        eval_dataset=prompts(4),
        per_device_eval_batch_size=4,
    )
    trainer.evaluate()
    assert trainer.run.progress.own.last == math.inf
    assert trainer.entropy_coef == 0.1


def test_a_target_that_is_never_reached_is_told(tiny_tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        grpo(
            tmp_path, tiny_tokenizer, use_adaptive_entropy=True, entropy_coef=0.1, max_steps=50, num_train_epochs=99
        ).train()
    assert "was never at or below entropy_target=0.2" in caplog.text


def test_the_filter_sees_the_whole_micro_batch_however_it_is_laid_out(tiny_tokenizer, tmp_path):
    """A threshold of one pass would depend on how many tokens a row may hold."""
    results = []
    for tokens in (32, 4096):
        trainer = grpo(
            tmp_path, tiny_tokenizer, top_entropy_quantile=0.3, max_row_tokens=tokens, optim="sgd", max_steps=1
        )
        trainer.train()
        results.append(weights(trainer))
    assert torch.allclose(results[0], results[1], atol=1e-6)
    plain = grpo(tmp_path, tiny_tokenizer, optim="sgd", max_steps=1)
    plain.train()
    assert (weights(plain) - results[0]).abs().max() > 1e-5


# The reference ------------------------------------------------------------------------------------------------------


def test_r37_the_kl_can_be_measured_without_being_charged(tiny_tokenizer, tmp_path):
    measured = grpo(tmp_path / "a", tiny_tokenizer, log_ref_kl=True)
    plain = grpo(tmp_path / "b", tiny_tokenizer)
    measured.train()
    plain.train()
    assert logs(measured)[1]["kl"] > 1e-6
    assert "kl" not in logs(plain)[1]
    assert torch.equal(weights(measured), weights(plain))


def test_a_synced_reference_follows_the_policy(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path,
        tiny_tokenizer,
        beta=0.1,
        sync_ref_model=True,
        ref_model_mixup_alpha=1.0,
        ref_model_sync_steps=2,
        max_steps=3,
    )
    trainer.train()
    kl = [row["kl"] for row in logs(trainer)]
    assert kl[1] > 1e-6
    assert kl[2] == pytest.approx(0.0, abs=1e-6)  # The sync after step 2 made them equal.


def test_syncing_needs_a_reference_of_its_own(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    with raises(ModelError):
        grpo(tmp_path, tiny_tokenizer, beta=0.1, sync_ref_model=True, peft_config=LoraConfig(target_modules=["q_proj"]))


# The output layer in float32 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_float32_is_not_rounded(tiny_tokenizer, tmp_path, tied):
    """Log-probs of a bfloat16 model with a float32 head are those of its hidden states times the float32 matrix."""
    model = build_model(len(tiny_tokenizer)).to(torch.bfloat16)
    model.config.tie_word_embeddings = tied
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = weight if tied else torch.nn.Parameter(weight.detach().clone())
    trainer = grpo(tmp_path, tiny_tokenizer, model=model, cast_lm_head_to_fp32=True, beta=0.1, max_steps=1)
    head = trainer.model.lm_head
    assert type(head) is Float32Linear
    assert head.weight.dtype == torch.float32
    assert (head.weight is trainer.model.model.embed_tokens.weight) == tied
    assert trainer.reference.copy.lm_head.weight.dtype == torch.float32
    assert trainer.reference.copy.lm_head.weight is not head.weight
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = trainer.model.model(input_ids=ids).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = trainer.model(input_ids=ids).logits
    assert torch.equal(logits, hidden.float() @ head.weight.T)
    trainer.train()


def test_a_head_in_float32_stays_there_under_autocast(tiny_tokenizer):
    from posttrain.data.forest import collate
    from posttrain.models.forward import forward, install_token_head
    from posttrain.types import Row

    model = build_model(len(tiny_tokenizer))
    cast_head_to_fp32(model)
    install_token_head(model)
    [batch] = collate([Row([5, 6], [[7, 8, 9]], [[1, 1, 1]])], pad_token_id=0)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logp = forward(model, batch).logp[batch.loss_mask]
        hidden = model.model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).last_hidden_state[0, 1:4].float()
        with torch.autocast("cpu", enabled=False):
            truth = (hidden @ model.lm_head.weight.T).log_softmax(-1)
    assert torch.allclose(logp, truth[torch.arange(3), torch.tensor([7, 8, 9])], atol=1e-5)


def test_an_adapter_on_the_head_and_a_float32_head_exclude_each_other(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    with raises(ConfigError):
        grpo(tmp_path, tiny_tokenizer, cast_lm_head_to_fp32=True, peft_config=LoraConfig(target_modules=["lm_head"]))


# Groups without variance --------------------------------------------------------------------------------------------


def half_flat(completions, answer, **_):
    """Groups of even prompts are all equal."""
    return [1.0 if a % 2 == 0 else float(i % 4) for i, a in enumerate(answer)]


def test_r15_groups_without_variance_can_be_left_out_with_their_kl(tiny_tokenizer, tmp_path):
    """By hand: the loss of the masked run is that of a run on the other groups alone."""
    common = {"beta": 0.5, "shuffle_dataset": False, "max_steps": 2, "optim": "sgd", "loss_type": "dapo"}
    data = prompts(4)
    masked = grpo(
        tmp_path / "a", tiny_tokenizer, rewards=half_flat, data=data, mask_zero_variance_groups=True,
        per_device_train_batch_size=16, num_train_epochs=9, **common,
    )  # fmt: skip
    masked.train()
    alone = grpo(
        tmp_path / "b", tiny_tokenizer, rewards=half_flat, data=data.select([1, 3]), num_train_epochs=9, **common
    )
    alone.train()
    assert logs(masked)[0]["groups/masked"] == 0.5
    assert torch.allclose(weights(masked), weights(alone), atol=1e-6)


def test_nothing_moves_where_no_group_has_variance(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path, tiny_tokenizer, rewards=lambda completions, **_: [1.0] * len(completions),
        beta=0.1, mask_zero_variance_groups=True, check_rewards=False,
    )  # fmt: skip
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))


# An engine that is not the trainer ----------------------------------------------------------------------------------


def test_r36_what_a_foreign_engine_says_of_its_tokens_is_corrected(tiny_tokenizer, tmp_path):
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine=Foreign(), max_steps=1, vllm_importance_sampling_mode="token_truncate"
    )
    trainer.train()
    row = logs(trainer)[0]
    assert row["sampling/sampling_logp_difference/mean"] > 1  # It claims log-probs of -1.
    assert 0 < row["sampling/importance_sampling_ratio/max"] <= 3.0
    own = grpo(tmp_path / "own", tiny_tokenizer, max_steps=1)
    own.train()
    assert "sampling/importance_sampling_ratio/max" not in logs(own)[0]


def test_a_foreign_engine_that_is_right_changes_nothing(tiny_tokenizer, tmp_path):
    """Log-probs of a second copy of the same weights: every ratio is 1."""
    from posttrain.rollouts.native.engine import NativeEngine

    inner = NativeEngine(build_model(len(tiny_tokenizer)), pad_token_id=2)
    trainer = grpo(tmp_path, tiny_tokenizer, engine=Foreign(inner), max_steps=1, temperature=0.7)
    trainer.train()
    row = logs(trainer)[0]
    assert row["sampling/sampling_logp_difference/mean"] < 1e-4
    assert row["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
    assert row["sampling/frac_masked"] == 0.0


def test_vespo_refuses_a_correction_with_one_value_a_sequence(tiny_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="token_truncate"):
        grpo(tmp_path, tiny_tokenizer, engine=Foreign(), loss_type="vespo")
    grpo(tmp_path, tiny_tokenizer, engine=Foreign(), loss_type="vespo", vllm_importance_sampling_mode="token_truncate")


@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"top_k": 5, "min_p": 0.05, "top_p": 0.9}])
@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_r36_truncated_sampling_is_corrected_without_bias(tiny_tokenizer, tmp_path, kind, sampling):
    """Log-probs of a second copy of the same weights, as tokens were drawn: every ratio is 1."""
    inner = kind(build_model(len(tiny_tokenizer)), pad_token_id=2)
    trainer = grpo(tmp_path, tiny_tokenizer, engine=Foreign(inner), max_steps=1, temperature=0.7, **sampling)
    trainer.train()
    row = logs(trainer)[0]
    assert row["sampling/sampling_logp_difference/max"] < 1e-3
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert row["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=5e-3)


def test_several_passes_over_a_truncated_generation_of_another_engine_have_the_mass_of_the_weights_that_sampled(
    tiny_tokenizer, tmp_path
):
    """The weights move far between the two passes; the correction is that of the engine's rounding all the same."""
    inner = NativeEngine(build_model(len(tiny_tokenizer)), pad_token_id=2)
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine=Foreign(inner), max_steps=2, num_iterations=2, top_p=0.7, learning_rate=0.05
    )  # fmt: skip
    trainer.train()
    rows = logs(trainer)
    assert rows[1]["ratio/max"] > 1.1
    assert [row["sampling/sampling_logp_difference/max"] < 1e-3 for row in rows] == [True, True]


def test_several_passes_over_a_truncated_generation_begin_at_ratio_1(tiny_tokenizer, tmp_path):
    """Old log-probs are the engine's own, of the whole distribution."""
    for further in ({}, {"repetition_penalty": 1.3}):
        trainer = grpo(            tmp_path, tiny_tokenizer, engine="native", max_steps=2, num_iterations=2, top_p=0.8, learning_rate=0.0, **further
        )  # fmt: skip
        trainer.train()
        assert [row["ratio/max"] for row in logs(trainer)] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_r36_a_penalty_and_the_correction_exclude_each_other(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "repetition_penalty=1.1", "vllm_importance_sampling_correction=True"):
        grpo(tmp_path, tiny_tokenizer, engine=Foreign(), repetition_penalty=1.1, top_p=0.9)
    off = {"vllm_importance_sampling_correction": False}
    grpo(tmp_path, tiny_tokenizer, engine=Foreign(), repetition_penalty=1.1, **off)


def test_an_engine_that_says_log_probs_before_truncation_alone_is_refused(tiny_tokenizer, tmp_path):
    trainer = grpo(tmp_path, tiny_tokenizer, engine=Foreign(), max_steps=1, top_p=0.9)
    with raises(RolloutError, "'foreign'", "top_p=0.9"):
        trainer.train()
    off = {"vllm_importance_sampling_correction": False}
    grpo(tmp_path, tiny_tokenizer, engine=Foreign(), max_steps=1, top_p=0.9, **off).train()


def test_a_top_k_above_the_vocabulary_is_refused(tiny_tokenizer, tmp_path):
    size = len(tiny_tokenizer)
    with raises(ConfigError, f"top_k={size + 1}", size):
        grpo(tmp_path, tiny_tokenizer, max_steps=1, top_k=size + 1)


def test_a_reward_std_is_that_of_the_whole_batch(tiny_tokenizer, tmp_path):
    def steps(completions, **_):
        return [float(i) for i in range(len(completions))]

    trainer = grpo(tmp_path, tiny_tokenizer, rewards=steps, max_steps=1)
    trainer.train()
    assert logs(trainer)[0]["reward_std"] == pytest.approx(torch.arange(8.0).std().item(), rel=1e-5)


def test_a_ratio_of_a_sequence_counts_once(tmp_path):
    """Two sequences of 1 and 3 tokens, the long one clipped: half of the ratios, three quarters of the tokens."""
    from posttrain.losses.policy import clip_metrics

    sequence = torch.tensor([[0, 1, 1, 1]])
    log_ratio = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    forest = (torch.ones_like(sequence, dtype=torch.bool), sequence, 2)
    shares = {}
    for level in ("token", "sequence"):
        found = clip_metrics(log_ratio, torch.ones(1, 4), *forest, epsilon=0.2, epsilon_high=0.2, level=level)
        metric = found["clip_ratio/high_mean"]
        shares[level] = float(metric.value / metric.weight)
    assert shares == {"token": 0.75, "sequence": 0.5}


def test_scripted_engines_are_the_policy(tiny_tokenizer, tmp_path):
    assert ScriptedEngine([[1]]).capabilities.shares_weights
    assert isinstance(grpo(tmp_path, tiny_tokenizer), GRPOTrainer)
    assert grpo(tmp_path, tiny_tokenizer).run.online.samples_policy
    foreign = grpo(tmp_path, tiny_tokenizer, engine=Foreign(), rewards=count_a)
    assert not foreign.run.online.samples_policy


def test_an_engine_of_the_user_gets_the_tokenizer_unless_it_has_one(tiny_tokenizer, tmp_path):
    """`Sampling.stop_strings` and guides are text: `RolloutEngine.tokenizer` says that a trainer sets it."""
    model = build_model(len(tiny_tokenizer))
    for given in (None, copy.copy(tiny_tokenizer)):
        engine = NativeEngine(model, pad_token_id=2, tokenizer=given)
        trainer = grpo(tmp_path, tiny_tokenizer, model, engine, generation_kwargs={"stop_strings": "zzz"}, max_steps=1)
        assert trainer.engine.tokenizer is (given or trainer.processing_class)
        trainer.train()


KWARGS = {
    "eos_token_id": [2, 9], "min_new_tokens": 2, "no_repeat_ngram_size": 2, "suppress_tokens": [11], "stop_strings": "zzz",
    "logit_bias": {"13": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_generation_kwargs_in_transformers_words_reach_the_engine(tiny_tokenizer, tmp_path, engine):
    asked = []
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine="native", rollout_engine=engine, generation_kwargs=KWARGS, max_steps=1,
        rewards=lambda completion_ids, **_: asked.extend(completion_ids) or [float(i) for i in range(len(completion_ids))],
        check_rewards=False,
    )  # fmt: skip
    sampling = settings_of(trainer.run, "train").sampling
    assert (sampling.stop_token_ids, sampling.min_new_tokens, sampling.no_repeat_ngram) == ((2, 9), 2, 2)
    assert (sampling.stop_strings, dict(sampling.logit_bias)) == (("zzz",), {13: 1.5, 11: -1e9})
    trainer.train()
    assert asked and all(len(ids) >= 2 and 11 not in ids for ids in asked)


@pytest.mark.parametrize(
    ("kwargs", "settings"),
    [
        ({"typical_p": 0.9}, {}),
        ({"stop_strings": [""]}, {}),
        ({"min_new_tokens": 1.5}, {}),
        ({"eos_token_id": "end"}, {}),
        ({"logit_bias": {"a": 1}}, {}),
        ({"suppress_tokens": [-1]}, {}),
        ({"no_repeat_ngram_size": 2}, {"use_vllm": True}),
        *(({name: value}, {"rollout_engine": "paged"}) for name, value in KWARGS.items() if name != "eos_token_id"),
    ],
)
def test_generation_kwargs_that_no_engine_or_not_this_one_can_follow_are_refused_with_name_and_value(
    tmp_path, kwargs, settings
):
    with pytest.raises(ConfigError) as caught:
        grpo_args(tmp_path, generation_kwargs=kwargs, **settings)
    names = {
        "no_repeat_ngram_size": "no_repeat_ngram",
        "suppress_tokens": "logit_bias" if settings else "suppress_tokens",
    }
    assert names.get(*[*kwargs] * 2) in str(caught.value)


@pytest.mark.parametrize("begins", [True, False])
def test_an_empty_prompt_is_one_where_the_tokenizer_begins_every_text_with_a_token(tiny_tokenizer, tmp_path, begins):
    from tokenizers.processors import TemplateProcessing

    bos = tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")
    if begins:
        tiny_tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
        )
    data = datasets.Dataset.from_list([{"prompt": text} for text in ("", "Why?") * 4])
    asked, engine = [], ScriptedEngine(lambda ids, index: asked.append(list(ids)) or [10 + index, 2])

    def make():
        return grpo(
            tmp_path,
            tiny_tokenizer,
            engine=engine,
            rewards=lambda completions, **_: [float(len(c)) for c in completions],
            data=data,
            max_steps=2,
        )

    if not begins:
        with raises(DataError, "row 0", "'prompt'"):
            make()
        return
    make().train()
    assert [bos] in asked


def test_an_empty_message_is_a_prompt_since_its_template_has_tokens(tiny_tokenizer, tmp_path):
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * 8)
    trainer = grpo(tmp_path, tiny_tokenizer, data=data, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_tokens_that_carry_no_loss_are_not_computed_and_change_nothing(tiny_tokenizer, tmp_path, monkeypatch):
    """Truncated completions count as sequences and are not run; every way of dividing gives the weights of a run that runs them."""

    def half(prompt_ids, index):
        return [5, 6, 7, 8, 9, 10] if index % 2 else [5, 6, 2]

    inner, computed = RolloutBatch.rows, []

    def run(name, *, whole, **settings):
        def rows(self, indices, *, skip_truncated, trained_only=False):
            found = inner(self, indices, skip_truncated=skip_truncated, trained_only=trained_only and not whole)
            if trained_only:
                computed.append(sum(len(ids) for row in found for ids in row.completions))
            return found

        monkeypatch.setattr(RolloutBatch, "rows", rows)
        computed.clear()
        trainer = grpo(
            tmp_path / name, tiny_tokenizer, engine=ScriptedEngine(half), mask_truncated_completions=True, optim="sgd",
            max_steps=2, max_completion_length=6, rewards=lambda completions, **_: [float(i) for i in range(len(completions))],
            check_rewards=False, **settings,
        )  # fmt: skip
        trainer.train()
        return trainer, sum(computed)

    for number, settings in enumerate(
        [{"loss_type": kind} for kind in ("grpo", "dapo", "dr_grpo", "bnpo")]
        + [{"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"beta": 0.1}, {"num_iterations": 2}]
    ):
        kept, some = run(f"{number}a", whole=False, **settings)
        whole, every = run(f"{number}b", whole=True, **settings)
        assert every == 3 * some  # 3 of 9 tokens of each two completions.
        assert torch.allclose(weights(kept), weights(whole), atol=1e-7), settings
        told = [{name: row[name] for name in ("loss", "entropy", "grad_norm")} for row in logs(whole)]
        for row, wanted in zip(logs(kept), told, strict=True):
            assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_a_short_last_batch_of_an_evaluation_weighs_by_its_rows(tiny_tokenizer, tmp_path):
    """Groups of 2 in batches of 3, 3 and 1 group: whatever is a share of groups or rows is that of all seven groups."""

    def applies(completion_ids, answer, **_):
        return [None if a == 6 else float(i % 2) * (a != 5) for i, a in enumerate(answer)]

    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 6, "eval_dataset": prompts(7)}
    found = grpo(tmp_path, tiny_tokenizer, rewards=[applies, count_a], **settings)
    found._get_eval_sampler = lambda dataset: [i for i in range(len(dataset)) for _ in range(2)]
    found = found.evaluate()
    assert found["eval_rewards/applies/applicable"] == pytest.approx(6 / 7)
    alone = grpo(tmp_path, tiny_tokenizer, rewards=applies, **settings)
    alone._get_eval_sampler = lambda dataset: [i for i in range(len(dataset)) for _ in range(2)]
    found = alone.evaluate()
    assert found["eval_frac_reward_zero_std"] == pytest.approx(2 / 7)  # Rows 5 and 6.
    spread = 6 * 0.5477226 + 6 * 0.5163978  # Of 0 1 0 1 0 1 and of 0 1 0 1 0 0; the last batch has no reward.
    assert found["eval_reward_std"] == pytest.approx(spread / 12, abs=1e-4)


def test_ids_without_a_token_are_reported_and_can_be_masked(tiny_tokenizer, tmp_path, caplog):
    """A model with padded embeddings, most of whose ids the tokenizer does not have."""

    def logged(name, **settings):
        caplog.clear()
        model = build_model(4 * len(tiny_tokenizer))
        run = grpo(tmp_path / name, tiny_tokenizer, model=model, engine="native", max_steps=1, **settings)
        run.train()
        left_out = run.run.online.sampling(run.run).left_out  # Log-probs leave out what sampling does.
        assert settings_of(run.run, "train").sampling.left_out == left_out
        row = next(row for row in run.state.log_history if "loss" in row)
        return row["completions/no_token_ratio"], "PT-R032" in caplog.text

    share, reported = logged("padded")
    assert 0.5 < share < 0.9 and reported
    assert logged("masked", mask_ids_without_token=True) == (0.0, False)


@pytest.mark.parametrize("make", [sft, partial(grpo, engine="native")], ids=["sft", "grpo"])
def test_a_pad_token_without_an_embedding_pads_like_any_other(make, tiny_tokenizer, tmp_path):
    """Scripts add a pad token and do not resize the model; padding is known by position."""
    norms = {}
    for pad in ("<|endoftext|>", "[PAD]"):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.add_special_tokens({"pad_token": pad})
        trainer = make(tmp_path / pad, tokenizer, model=build_model(len(tiny_tokenizer)), max_steps=2, logging_steps=1)
        trainer.train()
        norms[pad] = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert norms["[PAD]"] == pytest.approx(norms["<|endoftext|>"], rel=1e-5) and len(norms["[PAD]"]) == 2
