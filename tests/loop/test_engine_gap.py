"""Every online run says how far the log-probs of its engine are from those it trains with."""

import pytest

from posttrain import GRPOTrainer
from posttrain.loop import rollout
from posttrain.rollouts.base import Capabilities
from posttrain.rollouts.native import engine as probe
from tests.conftest import build_model
from tests.extensions.experimental import test_online_dpo as pairs
from tests.extensions.experimental.test_ppo import ppo
from tests.methods.helpers import count_a, grpo, grpo_args, prompts
from tests.methods.test_rloo import rloo

MEAN, MOST = "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"


def run(method, folder, tokenizer, **settings):
    if method == "ppo":
        tokenizer.pad_token = "<|endoftext|>"
        return ppo(folder, tokenizer, engine="native", **settings)
    if method == "online_dpo":
        return pairs.make(folder, tokenizer, **settings)
    return {"grpo": grpo, "rloo": rloo}[method](folder, tokenizer, engine="native", **settings)


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row and "loss" in row]


@pytest.mark.parametrize("method", ["grpo", "rloo", "ppo", "online_dpo"])
def test_the_own_engine_differs_by_rounding_and_says_so(method, tmp_path, tiny_tokenizer):
    trainer = run(method, tmp_path, tiny_tokenizer, temperature=0.7, max_steps=4)
    trainer.train()
    gaps = logged(trainer, MEAN)
    assert len(gaps) == (2 if method == "ppo" else 4)  # Once a rollout batch.
    assert all(0 < gap <= 1e-4 for gap in gaps)
    assert all(most >= gap for most, gap in zip(logged(trainer, MOST), gaps, strict=True))
    assert not any("importance_sampling_ratio" in name for row in trainer.state.log_history for name in row)


def test_log_probs_of_other_weights_show_in_a_run_that_holds_its_engine_for_its_own(tmp_path, tiny_tokenizer):
    """Sampled, changed, trained: what a callback that loads weights between the two does."""
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", max_steps=1)
    score = trainer.score

    def meddle(generation, mode):
        trainer.model.get_output_embeddings().weight.data.mul_(3.0)
        return score(generation, mode)

    trainer.score = meddle
    trainer.train()
    assert logged(trainer, MEAN)[0] > 0.1


@pytest.mark.parametrize("settings", [{"steps_per_generation": 2}, {"num_iterations": 2}])
def test_a_policy_that_has_moved_is_no_gap(settings, tmp_path, tiny_tokenizer):
    """Later passes over a generation compare nothing: the weights are others by then."""
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", max_steps=4, **settings)
    trainer.train()
    gaps = logged(trainer, MEAN)
    assert len(gaps) == 2
    assert all(0 < gap <= 1e-4 for gap in gaps)
    assert max(logged(trainer, "ratio/max")) > 1.01


def test_log_probs_of_the_own_engine_are_not_computed_again(monkeypatch, tmp_path, tiny_tokenizer):
    """Ratios begin at the engine's log-probs, and the run is the one that computes them by a pass of its own."""
    found = []
    for again in (False, True):
        trainer = grpo(tmp_path / str(again), tiny_tokenizer, engine="native", max_steps=4, num_iterations=2)
        passes = []
        compute = rollout.logps_and_mass
        spy = lambda *args, compute=compute, passes=passes: passes.append(1) or compute(*args)  # noqa: E731
        monkeypatch.setattr(rollout, "logps_and_mass", spy)
        if again:
            own = Capabilities(in_process=True, shares_weights=True)
            monkeypatch.setattr(type(trainer.engine), "capabilities", own)
        trainer.train()
        found.append((len(passes), logged(trainer, "loss"), logged(trainer, "ratio/max")))
    (none, *ours), (some, *theirs) = found
    assert (none, some) == (0, 2)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)


def test_log_probs_of_a_rollout_function_are_never_the_old_ones(tmp_path, tiny_tokenizer):
    """The engine beside it is exact, and has written nothing: what the function says is compared, and corrected for."""

    def sampled(prompts, trainer):
        ids = [[5 + i % 3, 7, 2] for i in range(len(prompts))]
        return {"prompt_ids": [[9, 11]] * len(prompts), "completion_ids": ids, "logprobs": [[-1.0] * 3] * len(prompts)}

    trainer = GRPOTrainer(
        build_model(len(tiny_tokenizer)), count_a,
        grpo_args(tmp_path, num_iterations=2, vllm_importance_sampling_mode="token_truncate"),
        train_dataset=prompts(), processing_class=tiny_tokenizer, rollout_func=sampled,
    )  # fmt: skip
    assert trainer.engine.capabilities.logprobs_match_training
    trainer.train()
    assert logged(trainer, MEAN)[0] > 1


def test_in_half_precision_they_are_computed_again(tmp_path, tiny_tokenizer):
    trainer = grpo(tmp_path, tiny_tokenizer, engine="native", bf16=True)
    assert not rollout.old_is_sampled(trainer.run)


def test_a_model_that_was_trained_in_half_precision_is_still_the_native_engines(tmp_path, tiny_tokenizer, monkeypatch):
    """The trainer leaves a forward behind that computes under autocast: not what the engine is compared with."""
    monkeypatch.setattr(probe, "VERDICTS", {})
    trainer = grpo(tmp_path, tiny_tokenizer, bf16=True)
    trainer.train()
    wrapped = vars(trainer.model)["forward"]
    assert probe.native_is_exact(trainer.model) is None
    assert vars(trainer.model)["forward"] is wrapped
