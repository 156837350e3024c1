"""PPO end to end on two-layer models, and its objective against scalar loops and the properties of every objective."""

import math
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from posttrain import ConfigError
from posttrain.algorithms.ppo import PPOConfig, PPOTrainer
from tests.algorithms.helpers import SHORT, count_a, prompts, scripted, weights
from tests.conftest import build_model, build_tokenizer
from tests.ranks import assert_same_step, leave, run_ranks, step_taken

UNREAD = {"chat_template_path"}  # Read only in methods that PPO replaces.
FREE = ("seconds", "per_second", "runtime", "step_time", "epoch", "eps", "flos")


@pytest.fixture
def tokenizer(tiny_tokenizer):
    """Padding is a token of its own."""
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def ppo_args(folder, **settings):
    base = SHORT | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "response_length": 8,
        "stop_token": "eos",
        "max_grad_norm": 0.0,
    }
    if "total_episodes" in settings or "num_train_epochs" in settings:
        del base["max_steps"]
    return PPOConfig(str(folder), **(base | settings))


def ppo(folder, tokenizer, model=None, engine=None, reward=count_a, data=None, ref=None, value=None, **settings):
    """A PPO trainer on a two-layer model with a scripted engine (or ``engine="native"``)."""
    extra = {} if engine == "native" else {"rollout_engine": engine or scripted()}
    keys = {k: settings.pop(k) for k in ("eval_dataset", "peft_config", "data_collator") if k in settings}
    return PPOTrainer(
        ppo_args(folder, **settings),
        tokenizer,
        model if model is not None else build_model(len(tokenizer)),
        ref,
        reward,
        data if data is not None else prompts(32),
        value,
        **extra,
        **keys,
    )


def classifier(size, seed=5, labels=1, **overrides):
    torch.manual_seed(seed)
    settings = build_model(size).config.to_dict() | overrides
    settings = {k: v for k, v in settings.items() if k not in ("num_labels", "id2label", "label2id")}
    return LlamaForSequenceClassification(LlamaConfig(**settings, num_labels=labels)).eval()


def logs(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def spied(trainer, monkeypatch=None):
    """Rows of every micro-batch, in the order they are trained."""
    seen, original = [], trainer._piece

    def piece(*args):
        rows = original(*args)
        seen.append(rows)
        return rows

    trainer._piece = piece
    return seen


# The rows of 5.5: what the chapter corrects ------------------------------------------------------------------------------


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_5_5_a_r49_each_mini_batch_is_one_optimiser_step(tokenizer, tmp_path, mini_batches):
    """Trap 49: with 4 accumulated batches and 3 passes, the number of mini-batches must change the number of steps."""
    trainer = ppo(
        tmp_path,
        tokenizer,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_ppo_epochs=3,
        num_mini_batches=mini_batches,
        total_episodes=16,
        learning_rate=1e-4,
    )
    steps = []
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    pieces = spied(trainer)
    trainer.train()
    assert len(steps) == trainer.state.global_step == 2 * 3 * mini_batches
    assert trainer.args.num_total_batches == 2
    assert {len(rows) for rows in pieces} == {2}
    ratios = logs(trainer, "val/ratio")
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)  # The policy that is trained is the one that sampled.
    assert ratios[3 * mini_batches] == pytest.approx(1.0, abs=1e-6)
    assert all(0.5 < ratio < 2 for ratio in ratios)  # Over slots that exist: no zeros dilute it.


def test_5_5_a_every_pass_deals_every_response_anew(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, num_mini_batches=2, num_ppo_epochs=3, max_steps=6)
    pieces = spied(trainer)
    trainer.train()
    passes = [[row.completions[0] for rows in pieces[k : k + 2] for row in rows] for k in (0, 2, 4)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert all(len(one) == 8 for one in passes)


def test_5_5_a_a_mini_batch_smaller_than_a_device_batch_is_one_piece(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, gradient_accumulation_steps=1, num_mini_batches=4, max_steps=8)
    pieces = spied(trainer)
    trainer.train()
    assert [len(rows) for rows in pieces] == [1] * 8
    assert trainer.args.gradient_accumulation_steps == 1
    assert (trainer.args.local_batch_size, trainer.args.local_mini_batch_size) == (4, 1)


def test_5_5_b_r49_metrics_exclude_padding(tokenizer, tmp_path):
    """The entropy of a response is a sum over its own tokens, and so positive; every mean is over tokens that exist."""
    trainer = ppo(tmp_path, tokenizer, max_steps=2, num_ppo_epochs=2)
    pieces = spied(trainer)
    old = []
    original = trainer.attach_logps

    def attach(generation, mode):
        original(generation, mode)
        old.append((generation.token_columns["old_logp"], [len(r.token_ids) for r in generation.rollouts]))

    trainer.attach_logps = attach
    seen = []
    objective = trainer.objective
    trainer.objective = lambda out, batch: (seen.append((out, batch)), objective(out, batch))[1]
    trainer.train()
    logp, lengths = old[0]
    assert len({*lengths}) > 2
    assert logs(trainer, "objective/entropy")[0] == pytest.approx(
        sum(-sum(row[:n]) for row, n in zip(logp, lengths, strict=True)) / len(lengths), rel=1e-5
    )
    assert logs(trainer, "objective/entropy")[0] > 0
    assert pieces
    half = len(seen) // 2  # The second optimiser step, where the ratio has left 1.
    gaps, entropies = [], []
    for out, batch in seen[half:]:
        for b, t in batch.loss_mask.nonzero().tolist():
            gaps.append(float(out.logp[b, t] - batch.old_logp[b, t]))
            entropies.append(float(out.entropy[b, t]))
    assert len(gaps) == sum(lengths)
    n, ratios = len(gaps), [math.exp(gap) for gap in gaps]
    mean = sum(ratios) / n
    expected = {
        "policy/approxkl_avg": sum(gap**2 for gap in gaps) / (2 * n),
        "policy/entropy_avg": sum(entropies) / n,
        "val/ratio": mean,
        "val/ratio_var": sum((ratio - mean) ** 2 for ratio in ratios) / n,
    }
    for name, value in expected.items():
        assert logs(trainer, name)[1] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_5_5_c_r49_a_dataset_smaller_than_a_rollout_batch_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"has 7 rows, and one rollout batch takes 8 \(per_device_train_batch_size"):
        ppo(tmp_path, tokenizer, data=prompts(7))


def test_5_5_c_logging_and_evaluation_steps_are_honoured(tokenizer, tmp_path):
    trainer = ppo(
        tmp_path, tokenizer, max_steps=6, logging_steps=2, eval_strategy="steps", eval_steps=3, eval_dataset=prompts(4)
    )
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4, 6]
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    assert {"eval_objective/scores", "eval_objective/kl", "eval_reward", "eval_loss/value_avg"} <= set(evaluations[0])


@pytest.mark.parametrize("second", [False, True], ids=["head on the trunk", "value model"])
def test_5_5_c_a_run_that_was_stopped_equals_one_that_was_not(tokenizer, tmp_path, second):
    def build(name):
        value = classifier(len(tokenizer)) if second else None
        return ppo(
            tmp_path / name,
            tokenizer,
            engine="native",
            rollout_engine="native",
            value=value,
            num_mini_batches=2,
            max_steps=10,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="linear",
            data=prompts(20),
        )

    whole, part = build("whole"), build("part")
    whole.train()
    part.train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
    )  # Inside the passes over a rollout batch.
    assert torch.equal(weights(whole), weights(part))  # Policy and value function.
    assert whole.counters == part.counters
    assert whole.counters["episode"] == 3 * 8
    first = {row["step"]: row["loss"] for row in whole.state.log_history if "loss" in row}
    again = {row["step"]: row["loss"] for row in part.state.log_history if "loss" in row}
    assert all(again[step] == first[step] for step in range(4, 11))


def test_5_5_d_with_an_adapter_and_a_shared_trunk_there_is_one_model(tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = ppo(tmp_path, tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), max_steps=4)
    assert trainer.ref_model is None
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert {"lora" in n or "v_head" in n for n in trained} == {True}
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if n not in trained}
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if n in trained}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in base.items())
    assert all(not torch.equal(after[n], p) for n, p in before.items() if "lora_B" in n or "v_head" in n)
    kl = logs(trainer, "objective/kl")
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert abs(kl[1]) > 1e-4  # The adapter has moved away from the model without it.


def test_5_5_d_log_probs_and_values_come_from_one_pass_and_no_logits_are_kept(tokenizer, tmp_path):
    trainer = ppo(tmp_path, tokenizer, max_steps=2)
    passes, heads = [], []
    trainer.model.model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    trainer.model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    batches = []
    training_step = trainer.training_step
    trainer.training_step = lambda model, inputs, n=None: (
        batches.append(len(inputs)),
        training_step(model, inputs, n),
    )[1]
    trainer.train()
    assert passes.count(True) == sum(batches)
    assert heads == []  # Only ever read in chunks, at the tokens that were sampled.


@pytest.mark.distributed
def test_5_5_e_two_ranks_equal_one_with_twice_the_accumulation(tmp_path):
    """Whitened rewards and advantages, both means of the loss, and every metric, are of the whole rollout batch."""
    one, two = ranks(tmp_path / "one", 1, 2), ranks(tmp_path / "two", 2, 1)
    assert_same_step(one, two)
    assert set(one["logs"]) == set(two["logs"])
    for name, value in one["logs"].items():
        if not any(part in name for part in FREE) and name not in ("documents", "staleness/mean_updates"):
            assert two["logs"][name] == pytest.approx(value, abs=2e-5, rel=1e-5), name


def ranks(folder, processes, accumulation):
    return run_ranks("tests.algorithms.test_ppo", folder, accumulation, processes=processes, folder=folder)


def worker(folder, accumulation):
    """What each process of the two-rank test runs: one optimiser step."""
    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    trainer = ppo(
        folder,
        tokenizer,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        num_ppo_epochs=1,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        use_cpu=True,
        shuffle_dataset=False,
        whiten_rewards=True,
        missing_eos_penalty=1.0,
        ref=build_model(len(tokenizer), seed=3),
        value=classifier(len(tokenizer)),
        data=prompts(16),
    )
    before = weights(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        leave(step_taken(trainer, before))


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
