"""Online DPO: numbers by hand, the rows of the list of deviations, and small runs."""

from dataclasses import replace

import datasets
import pytest
import torch

from posttrain import ConfigError, DataError, ModelError, PreflightError, RewardError, ScriptedEngine
from posttrain.data.forest import Layout, collate
from posttrain.extensions.experimental.online_dpo import OnlineDPOTrainer
from posttrain.extensions.experimental.online_dpo_method import OnlineDPOConfig, pair_terms, sequence_sums
from posttrain.loop import step
from posttrain.loop.rollout import rollout_step, sample, settings_of
from posttrain.losses.reduce import Denominators, reduce
from posttrain.methods.rloo import RLOOConfig
from posttrain.models.forward import sequence_logps
from posttrain.rewards.judges import BaseBinaryJudge, BasePairwiseJudge, BaseRankJudge, PairRewards
from posttrain.rewards.model import WholeTextReward
from posttrain.types import LossTerms, Row
from tests import test_docs as docs
from tests.conftest import build_model
from tests.losses.properties import (
    Case,
    assert_layouts_agree,
    assert_ranks_average,
    double,
    outputs,
    policy,
    step_gradient,
)
from tests.methods.helpers import SHORT, count_a, prompts, scripted, weights
from tests.wordings import raises

BASE = SHORT | {"per_device_train_batch_size": 4, "max_new_tokens": 8, "max_length": 256}
KEYWORDS = ("eval_dataset", "peft_config", "ref_model", "judge", "reward_processing_classes")


def many(completions, **_):
    """A reward of plain texts."""
    return [float(len(text) % 5) for text in completions]


def texts(count=16):
    return datasets.Dataset.from_list([{"prompt": f"Say {i}: ", "answer": i} for i in range(count)])


def make(folder, tokenizer, model=None, engine="native", rewards=count_a, data=None, **settings):
    """A trainer on a two-layer model; ``engine="scripted"`` says what the policy says."""
    keys = {k: settings.pop(k) for k in KEYWORDS if k in settings}
    if engine != "native":
        keys["rollout_engine"] = scripted() if engine == "scripted" else engine
    return OnlineDPOTrainer(
        model=model if model is not None else build_model(len(tokenizer)),
        reward_funcs=None if "judge" in keys else rewards,
        args=OnlineDPOConfig(str(folder), **(BASE | settings)),
        train_dataset=data if data is not None else prompts(),
        processing_class=tokenizer,
        **keys,
    )


def logs(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def lora(**settings):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)


def disturb(model, name="lora_B"):
    """An adapter that has been trained."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if name in key and ".ref." not in key:
                p.normal_(std=0.5)


# By hand ------------------------------------------------------------------------------------------------------------


def pairs_batch(masks=None):
    """Two pairs over a bigram policy, with reference log-probs and verdicts: the second is better, the first is better."""
    rows = [
        Row([1, 2], [[3, 4, 5], [6]], [[1, 1, 1], [1]], {"advantages": [-1.0, 1.0], "compared": [1.0, 1.0]}),
        Row([7], [[8, 9], [10, 11, 12]], [[1, 1], [1, 1, 1]], {"advantages": [1.0, -1.0], "compared": [1.0, 1.0]}),
    ]
    rows[0].token_columns["ref_logp"] = [[-1.0, -2.0, -3.0], [-2.5]]
    rows[1].token_columns["ref_logp"] = [[-2.0, -2.0], [-3.0, -3.0, -3.0]]
    return rows


def forward(rows, layout=None):
    (batch,) = collate(rows, pad_token_id=0, layout=layout or Layout("tree", row_tokens=10_000), whole_rows=True)
    return double(batch)


def sums(theta, prompt, ids):
    """Bigram log-prob of a completion, by a plain loop."""
    logprobs, last, total = torch.log_softmax(theta, -1), prompt[-1], 0.0
    for token in ids:
        total = total + logprobs[last, token]
        last = token
    return total


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_pair_loss_is_that_of_a_plain_loop(kind):
    rows, theta, beta = pairs_batch(), policy(), 0.3
    batch = forward(rows)
    terms, metrics = pair_terms(batch, *sequence_sums(outputs(theta, batch), batch), beta=beta, loss_type=kind)
    expected = []
    for row in rows:
        ratio = [
            sums(theta, row.prompt_ids, ids) - sum(ref)
            for ids, ref in zip(row.completions, row.token_columns["ref_logp"], strict=True)
        ]
        h = ratio[1] - ratio[0] if row.sequence_columns["advantages"][0] < 0 else ratio[0] - ratio[1]
        expected.append(torch.log1p(torch.exp(-beta * h)) if kind == "sigmoid" else (h - 1 / (2 * beta)) ** 2)
    assert terms.tolist() == pytest.approx([e.item() for e in expected], rel=1e-9)
    ours = torch.autograd.grad(terms.sum(), theta, retain_graph=True)[0]
    assert torch.allclose(ours, torch.autograd.grad(sum(expected), theta)[0], atol=1e-12)
    margin = metrics["rewards/margins"]
    assert float(margin.weight) == 2


def test_equal_models_start_at_ln_2_and_ipo_at_its_target():
    """h = 0: -lsig(0) = ln 2; ipo, not normalised by length: (1 / (2 * 0.1))^2 = 25."""
    rows = pairs_batch()
    batch, theta = forward(rows), policy()
    out = outputs(theta, batch)
    batch = replace(batch, ref_logp=out.logp.detach())
    both = sequence_sums(out, batch)
    assert pair_terms(batch, *both, beta=0.1, loss_type="sigmoid")[0].tolist() == pytest.approx(
        [0.693147] * 2, abs=1e-6
    )
    assert pair_terms(batch, *both, beta=0.1, loss_type="ipo")[0].tolist() == pytest.approx([25.0, 25.0])


# Properties ---------------------------------------------------------------------------------------------------------


def case(kind):
    """The objective as the trainer reduces it."""

    def objective(out, batch):
        terms, _ = pair_terms(batch, *sequence_sums(out, batch), beta=0.1, loss_type=kind)
        compared = batch.columns["compared"].bool()
        return LossTerms(batch.spread_rows(terms, 2), compared, "sequence", num_sequences=batch.num_sequences)

    return Case(kind, objective)


CASES = [case(name) for name in ("sigmoid", "ipo")]
every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def split(rows):
    """The same rows as one pass, as a pass a row, and padded, one pass a row."""
    return {
        "packed": collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=10_000), whole_rows=True),
        "tree": [b for row in rows for b in collate([row], pad_token_id=0, layout=Layout("tree"), whole_rows=True)],
        "padded": [b for row in rows for b in collate([row], pad_token_id=0, layout=Layout("padded"), whole_rows=True)],
        "long": collate(rows, pad_token_id=0, layout=Layout("tree", row_tokens=1, max_tree_tokens=1), whole_rows=True),
    }


@every
def test_any_layout_and_split_gives_the_same_loss_and_gradient(case):
    assert_layouts_agree(case, split(pairs_batch()))


@every
def test_two_ranks_average_to_one_process(case):
    assert_ranks_average(case, split(pairs_batch())["tree"])


@every
def test_the_content_of_padding_does_not_matter(case):
    pad = Layout("padded")
    clean = collate(pairs_batch(), pad_token_id=0, layout=pad, whole_rows=True)
    dirty = collate(pairs_batch(), pad_token_id=11, layout=pad, whole_rows=True)
    for batch in dirty:
        batch.ref_logp[~batch.real] = 9.0
    assert step_gradient(case, clean)[0] == step_gradient(case, dirty)[0]


@every
def test_a_tie_between_equal_models_has_no_gradient(case):
    rows = pairs_batch()
    batch = forward(rows)
    same = outputs(policy(), batch).logp.detach()
    for row in rows:
        row.sequence_columns["advantages"] = [0.0, 0.0]
    batch = forward(rows)
    batch = replace(batch, ref_logp=same)
    theta = policy()
    reduce(case.objective(outputs(theta, batch), batch), Denominators(0, 4, 1)).backward()
    assert theta.grad.abs().max() == 0


@every
def test_gradcheck_in_float64(case):
    batch = forward(pairs_batch())
    theta = policy().detach().clone().requires_grad_()
    counts = Denominators(0, batch.num_sequences, 1)
    assert torch.autograd.gradcheck(
        lambda t: reduce(case.objective(outputs(t, batch), batch), counts), theta, atol=1e-6, fast_mode=True
    )


# Runs ---------------------------------------------------------------------------------------------------------------

NAMES = (
    "objective/scores", "objective/scores_margin", "objective/kl", "objective/entropy", "objective/non_score_reward",
    "objective/rlhf_reward", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected", "val/contain_eos_token", "beta", "ties",
)  # fmt: skip


def test_a_step_changes_the_weights_and_logs_the_peer_s_names(tiny_tokenizer, tmp_path):
    trainer = make(tmp_path, tiny_tokenizer)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    first, second = [row for row in trainer.state.log_history if "loss" in row]
    assert set(NAMES) <= set(first), set(NAMES) - set(first)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert abs(second["objective/kl"]) > 1e-3
    assert first["loss"] == pytest.approx(0.693147 * (1 - first["ties"]), abs=1e-4)


def test_batch_sizes_count_prompts(tiny_tokenizer, tmp_path):
    trainer = make(tmp_path, tiny_tokenizer, engine="scripted", gradient_accumulation_steps=2, max_steps=1)
    trainer.train()
    assert trainer.args.generation_batch_size == 16
    assert trainer.args.per_device_train_batch_size == 4
    asked = trainer.engine.requests
    assert len({tuple(r.prompt_ids) for r in asked}) == 8
    assert sum(r.n for r in asked) == 16


def test_the_first_completion_is_the_policy_s_and_the_pair_shares_its_prompt(tiny_tokenizer, tmp_path):
    trainer = make(tmp_path, tiny_tokenizer)
    examples = [row for row in prompts(3) for _ in range(2)]
    rollouts = sample(trainer.run, examples, "train").rollouts
    assert [r.prompt_ids for r in rollouts[::2]] == [r.prompt_ids for r in rollouts[1::2]]
    assert [r.token_ids for r in rollouts[::2]] != [r.token_ids for r in rollouts[1::2]]  # Equal models, other seeds.


def test_reward_functions_see_all_first_completions_then_all_second(tiny_tokenizer, tmp_path):
    seen = {}

    def spy(prompts, completions, completion_ids, answer, log_extra, **_):
        seen.update(prompts=prompts, answers=answer, ids=completion_ids)
        log_extra("place", list(range(len(prompts))))
        return [float(len(ids)) for ids in completion_ids]

    trainer = make(tmp_path, tiny_tokenizer, engine="scripted", rewards=spy, max_steps=1)
    examples = [row for row in prompts(3) for _ in range(2)]
    generation = sample(trainer.run, examples, "train")
    table = trainer.score(generation, "train")
    assert seen["answers"] == [0, 1, 2, 0, 1, 2]
    assert seen["prompts"][:3] == seen["prompts"][3:]
    assert seen["ids"] == [generation.rollouts[i].token_ids for i in (0, 2, 4, 1, 3, 5)]
    assert table.values[:, 0].tolist() == [float(len(r.token_ids)) for r in generation.rollouts]
    assert table.extra_columns["place"] == [0, 3, 1, 4, 2, 5]


def test_pairs_come_back_in_their_order():
    runner = PairRewards([lambda completions, **_: [float(c) for c in completions]])
    texts = ["1", "2", "3", "4", "5", "6"]
    table = runner(prompts=list("aabbcc"), completions=texts, completion_ids=[[0]] * 6)
    assert table.values[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


# The list of deviations, O1 to O17 ----------------------------------------------------------------------------------


def test_o1_accumulation_does_not_change_the_update(tiny_tokenizer, tmp_path):
    """Eight prompts as 8x1, 4x2 and 2x4: the peer's gradients differ by a factor of 8."""
    results = []
    for batch, steps in ((8, 1), (4, 2), (2, 4)):
        trainer = make(
            tmp_path, tiny_tokenizer, per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
            shuffle_dataset=False, max_steps=1, optim="sgd",
        )  # fmt: skip
        trainer.train()
        results.append((logs(trainer, "loss")[0], logs(trainer, "grad_norm")[0], weights(trainer)))
    for loss, norm, after in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        assert norm == pytest.approx(results[0][1], rel=1e-3)
        assert torch.allclose(after, results[0][2], atol=1e-5)


def test_o2_generation_is_cached_under_activation_checkpointing(tiny_tokenizer, tmp_path):
    trainer = make(tmp_path, tiny_tokenizer, gradient_checkpointing=True, max_steps=1)
    trainer.train()  # Checkpointing is on now, and training mode too.
    assert trainer.model.training
    seen = []
    trainer.model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].shape))
    sample(trainer.run, [row for row in prompts(2) for _ in range(2)], "train")
    steps = [shape for shape in seen if shape[1] == 1]
    assert steps and len(seen) - len(steps) <= 4  # A prefill or two a model; every other pass reads one token a row.
    assert trainer.model.training


def test_o3_lists_change_by_whole_epochs(tiny_tokenizer, tmp_path):
    args = OnlineDPOConfig(str(tmp_path), beta=[0.3, 0.2, 0.4], report_to="none", bf16=False)
    assert [args.beta_at(e) for e in (None, 0.0, 0.99, 1.0, 1.5, 7.2)] == [0.3, 0.3, 0.3, 0.2, 0.2, 0.4]
    assert OnlineDPOConfig(str(tmp_path), report_to="none", bf16=False).beta == 0.1
    trainer = make(tmp_path, tiny_tokenizer, beta=[0.3, 0.1], max_steps=6, data=prompts(12))
    trainer.train()  # Three steps an epoch.
    assert logs(trainer, "beta") == pytest.approx([0.3, 0.3, 0.3, 0.1, 0.1, 0.1])


def test_o5_p40_the_penalty_looks_at_completions_alone(tiny_tokenizer, tmp_path):
    """Pad is eos here and chat prompts hold eos: only what the completion ends with counts."""
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id
    trainer = make(
        tmp_path, tiny_tokenizer, engine="scripted", missing_eos_penalty=5.0,
        rewards=lambda completions, **_: [0.0] * len(completions),
    )  # fmt: skip
    generation = sample(trainer.run, [row for row in prompts(4) for _ in range(2)], "train")
    assert all(tiny_tokenizer.eos_token_id in rollout.prompt_ids for rollout in generation.rollouts)
    reasons = ["stop" if i % 3 else "length" for i in range(8)]
    ended = [replace(r, finish_reason=reason) for r, reason in zip(generation.rollouts, reasons, strict=True)]
    generation = replace(generation, rollouts=ended)
    table = trainer.score(generation, "train")
    found = trainer.advantages(generation, table, {})
    assert found.columns["scores"] == [-5.0 if i % 3 == 0 else 0.0 for i in range(8)]


def reward_model(tokenizer, seed=3):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_labels=1, max_position_embeddings=512, pad_token_id=2, initializer_range=0.2,
        )
    ).eval()  # fmt: skip


def test_o6_the_score_is_read_at_the_last_real_token_though_pad_is_eos(tiny_tokenizer):
    model = reward_model(tiny_tokenizer)
    reward = WholeTextReward(model, tiny_tokenizer)
    end = tiny_tokenizer.eos_token
    prompts_, completions = ["One two three: ", "Hi: "], [f"four{end}", f"a long answer to it{end}"]
    scores = reward(prompts=prompts_, completions=completions)
    for p, c, score in zip(prompts_, completions, scores, strict=True):
        ids = torch.tensor([tiny_tokenizer(p + c)["input_ids"]])
        assert ids[0, -1] == tiny_tokenizer.pad_token_id
        with torch.no_grad():
            alone = model.score(model.model(ids).last_hidden_state)[0, -1, 0]
        assert score == pytest.approx(float(alone), abs=1e-5)


def test_o7_p40_ties_prefer_nobody_and_are_told(tiny_tokenizer, tmp_path, caplog):
    trainer = make(
        tmp_path, tiny_tokenizer, max_steps=1, rewards=lambda completions, **_: [1.0] * len(completions),
    )  # fmt: skip
    before = weights(trainer)
    trainer.train()
    assert logs(trainer, "ties") == [1.0]
    assert torch.equal(before, weights(trainer))
    assert any("100% of the pairs are ties" in r.message for r in caplog.records)


def test_o7_one_completion_twice_is_a_tie_whatever_a_judge_says(tiny_tokenizer, tmp_path):
    class First(BasePairwiseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            return [0] * len(prompts)

    copies = ScriptedEngine(lambda ids, index: [5, 6, 2])
    trainer = make(tmp_path, tiny_tokenizer, judge=First(), engine=copies, max_steps=1)
    trainer.train()
    assert logs(trainer, "ties") == [1.0]
    assert logs(trainer, "advantages/abs_max") == [0.0]


def test_pairs_of_equal_rewards_are_replaced_by_fresh_ones(tiny_tokenizer, tmp_path):
    def by_answer(completions, answer, **_):
        first = [1.0 if a < 8 else 0.0 for a in answer[: len(answer) // 2]]
        return first + [1.0] * (len(answer) // 2)

    trainer = make(
        tmp_path, tiny_tokenizer, engine="scripted", rewards=by_answer, max_steps=1, dynamic_sampling=9,
        per_device_train_batch_size=8, check_rewards=False,
    )  # fmt: skip
    trainer.train()
    assert logs(trainer, "dynamic_sampling/groups_without_variance")[0] > 0
    assert logs(trainer, "ties") == [0.0]


def test_o8_pairs_without_a_reward_are_left_out(tiny_tokenizer, tmp_path):
    """The first of two pairs is unscored: the loss is the other pair's alone, not half of it."""

    def some(completion_ids, answer, **_):
        return [None if a == 0 and i < 2 else float(i) for i, a in enumerate(answer)]

    trainer = make(tmp_path, tiny_tokenizer, engine="scripted", rewards=some)
    generation = rollout_step(trainer.run, [row for row in prompts(2) for _ in range(2)], "train")
    compared = generation.columns["compared"]
    assert compared == [0.0, 0.0, 1.0, 1.0]
    batches = trainer.run.collate(generation.rows(range(len(compared)), skip_truncated=False))
    assert trainer.method.counts(batches) == {"compared": sum(compared)}
    trainer.denominators = step.count(trainer.run, batches, 0.0)[0]
    trainer.model.train()
    loss = sum(float(trainer.compute_loss(trainer.model, b).detach()) for b in batches)
    alone = generation.rows([i for i, c in enumerate(compared) if c], skip_truncated=False)
    single = trainer.run.collate(alone)
    trainer.denominators = step.count(trainer.run, single, 0.0)[0]
    assert loss == pytest.approx(sum(float(trainer.compute_loss(trainer.model, b).detach()) for b in single), abs=1e-5)


def test_o8_a_generation_without_any_pair_is_an_error(tiny_tokenizer, tmp_path):
    def halves(completions, **_):
        return [1.0 if i < len(completions) // 2 else None for i in range(len(completions))]

    trainer = make(tmp_path, tiny_tokenizer, engine="scripted", rewards=halves)
    with raises(RewardError, "4"):
        trainer.train()


def test_o9_sums_are_over_completion_tokens_alone(tiny_tokenizer, tmp_path):
    trainer = make(
        tmp_path,
        tiny_tokenizer,
        ref_model=build_model(len(tiny_tokenizer), seed=9),
        max_steps=1,
        engine="scripted",
    )
    generations = []
    spy = lambda run, rollouts, rewards, found: generations.append(rollouts.worth(found)) or True  # noqa: E731
    trainer.run.progress.watchers["rollout"].append(spy)
    model = build_model(len(tiny_tokenizer))  # As the policy begins.
    trainer.train()
    (generation,) = generations
    rollouts = generation.rollouts
    assert len({len(r.token_ids) for r in rollouts}) > 1
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    own = sequence_logps(model, rows)
    ref = sequence_logps(build_model(len(tiny_tokenizer), seed=9), rows)
    kl = sum(float((a - b).sum()) for a, b in zip(own, ref, strict=True)) / len(rows)
    entropy = -sum(float(a.sum()) for a in own) / len(rows)
    scores = sum(generation.columns["scores"]) / len(rows)
    assert logs(trainer, "objective/kl")[0] == pytest.approx(kl, abs=1e-3)
    assert logs(trainer, "objective/entropy")[0] == pytest.approx(entropy, abs=1e-3)
    assert logs(trainer, "objective/non_score_reward")[0] == pytest.approx(-0.1 * kl, abs=1e-3)
    assert logs(trainer, "objective/rlhf_reward")[0] == pytest.approx(scores - 0.1 * kl, abs=1e-3)


def test_o10_a_prompt_keeps_its_end(tiny_tokenizer, tmp_path, caplog):
    with raises(ConfigError, "max_new_tokens=64", "max_length=64"):
        OnlineDPOConfig(str(tmp_path), max_length=64)
    trainer = make(
        tmp_path,
        tiny_tokenizer,
        engine="scripted",
        max_new_tokens=8,
        max_length=12,
        max_steps=1,
        data=texts(),
        rewards=many,
    )
    whole = make(
        tmp_path / "whole",
        tiny_tokenizer,
        engine="scripted",
        max_new_tokens=8,
        max_steps=1,
        data=texts(),
        rewards=many,
    )
    for each in (trainer, whole):
        each.train()
    cut, full = ([list(r.prompt_ids) for r in t.engine.requests] for t in (trainer, whole))
    assert {len(ids) for ids in cut} == {4}
    assert cut == [ids[-4:] for ids in full]
    assert sum("prompts lose their first tokens" in r.message for r in caplog.records) == 1


def test_o11_engines_get_prompts_without_padding_and_passes_are_as_wide_as_they_must(tiny_tokenizer, tmp_path):
    trainer = make(
        tmp_path,
        tiny_tokenizer,
        engine="scripted",
        max_steps=1,
        rewards=many,
        data=texts(4),
        shuffle_dataset=False,
    )
    widths = []
    original = trainer.compute_loss
    trainer.compute_loss = lambda model, batch, *a, **k: (
        widths.append((batch.input_ids.shape[1], int((batch.real).sum(1).max()))), original(model, batch, *a, **k),
    )[1]  # fmt: skip
    trainer.train()
    plain = [tiny_tokenizer(row["prompt"])["input_ids"] for row in texts(4)]
    assert [list(r.prompt_ids) for r in trainer.engine.requests] == plain
    assert widths and all(width == real for width, real in widths)


def test_o11_images_are_refused(tiny_tokenizer, tmp_path):
    data = prompts().add_column("image", [None] * 16)
    with raises(DataError, "'image'"):
        make(tmp_path, tiny_tokenizer, data=data)


def test_o12_vllm_that_is_not_there_is_refused_when_the_trainer_is_made(tiny_tokenizer, tmp_path):
    with raises(PreflightError, "PT-V001"):
        make(tmp_path, tiny_tokenizer, use_vllm=True)


def test_o13_evaluation_scores_one_sample_and_trains_nothing(tiny_tokenizer, tmp_path):
    def one(completions, **_):
        return [2.0] * len(completions)

    trainer = make(
        tmp_path, tiny_tokenizer, rewards=one, eval_dataset=prompts(5), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=2, max_steps=1,
    )  # fmt: skip
    before = weights(trainer)
    metrics = trainer.evaluate()
    assert torch.equal(before, weights(trainer))
    for name in ("objective/scores", "objective/kl", "objective/entropy", "val/contain_eos_token", "rewards/one/mean"):
        assert f"eval_{name}" in metrics, name
    assert metrics["eval_objective/scores"] == 2.0
    assert "eval_loss" not in metrics
    assert not any("ties" in name or "margin" in name for name in metrics)
    trainer.train()
    assert logs(trainer, "eval_objective/scores") == [2.0]


def test_o4_o14_p40_an_adapter_that_came_trained_is_its_own_reference_without_a_second_model(tiny_tokenizer, tmp_path):
    from peft import get_peft_model

    model = get_peft_model(build_model(len(tiny_tokenizer)), lora())
    disturb(model)
    trainer = make(tmp_path, tiny_tokenizer, model=model, max_steps=1)
    assert trainer.reference.copy is None
    assert trainer.reference.adapter == "ref"
    trainer.train()
    assert logs(trainer, "objective/kl")[0] == pytest.approx(0, abs=1e-3)


def test_p42_a_checkpoint_that_would_become_its_own_reference_is_told(tiny_tokenizer, tmp_path, caplog):
    build_model(len(tiny_tokenizer)).save_pretrained(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    given = {"model": str(tmp_path / "checkpoint-1"), "engine": "scripted"}
    make(tmp_path / "b", tiny_tokenizer, **given)
    assert f"loaded from the training checkpoint {given['model']}," in caplog.text
    caplog.clear()
    make(tmp_path / "c", tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer)), **given)
    assert "the training checkpoint" not in caplog.text


def test_o15_logps_are_at_temperature_one_whatever_is_sampled_at(tiny_tokenizer, tmp_path):
    trainer = make(tmp_path, tiny_tokenizer, temperature=0.5, max_steps=1)
    generation = rollout_step(trainer.run, [row for row in prompts(2) for _ in range(2)], "train")
    assert settings_of(trainer.run, "train").sampling.temperature == 0.5
    rows = generation.rows(range(len(generation.rollouts)), skip_truncated=False)
    truth = sequence_logps(trainer.model, rows)
    found = generation.token_columns["ref_logp"]
    for a, b in zip(found, truth, strict=True):
        assert torch.allclose(torch.tensor(a), b, atol=1e-3)
    assert "old_logp" not in generation.token_columns and "rollout_logp" not in generation.token_columns
    seen = []
    original = trainer.objective
    trainer.objective = lambda out, batch: (seen.append((out, batch)), original(out, batch))[1]
    trainer.train()
    out, batch = seen[0]
    assert torch.allclose(out.logp.detach()[batch.loss_mask], batch.ref_logp[batch.loss_mask], atol=1e-3)


def test_o16_texts_get_what_the_reward_tokenizer_adds(tiny_tokenizer):
    from tokenizers.processors import TemplateProcessing

    adding = tiny_tokenizer
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", adding.bos_token_id)]
    )
    reward = WholeTextReward(reward_model(adding), adding)
    assert reward._ids("Hi", " you")[0] == adding.bos_token_id
    assert reward._ids("<|im_start|>Hi", " you").count(adding.bos_token_id) == 1


def test_texts_beyond_the_reward_model_s_context_are_counted(tiny_tokenizer, caplog):
    model = reward_model(tiny_tokenizer)
    longest = model.config.max_position_embeddings
    reward = WholeTextReward(model, tiny_tokenizer)
    ids = reward._ids("What is 0? " * longest, "end")
    assert len(ids) == longest and tiny_tokenizer.decode(ids).endswith("end")
    assert f"reads at most {longest} tokens, so longer texts lose their beginning (1 texts so far)" in caplog.text


def test_o16_the_end_of_a_text_may_be_kept_for_rewards(tiny_tokenizer, tmp_path):
    for keep in (False, True):
        trainer = make(
            tmp_path,
            tiny_tokenizer,
            engine="scripted",
            rewards=many,
            data=texts(),
            keep_eos_for_rewards=keep,
        )
        batch = sample(trainer.run, [row for row in texts(4) for _ in range(2)], "train")
        for rollout, completion in zip(batch.rollouts, batch.completions, strict=True):
            ended = rollout.finish_reason == "stop"
            assert completion.endswith(tiny_tokenizer.eos_token) == (keep and ended)


def test_o17_every_function_has_its_mean(tiny_tokenizer, tmp_path):
    def two(completions, **_):
        return [2.0] * len(completions)

    trainer = make(tmp_path, tiny_tokenizer, rewards=[count_a, two], reward_weights=[1.0, 0.5], max_steps=1)
    trainer.train()
    assert logs(trainer, "rewards/two/mean") == [2.0]
    total = logs(trainer, "rewards/count_a/mean")[0] + 1.0
    assert logs(trainer, "objective/scores")[0] == pytest.approx(total, abs=1e-5)


# Judges and reward models -------------------------------------------------------------------------------------------


class Longer(BasePairwiseJudge):
    """Longer is better; no verdict on even prompts."""

    def __init__(self, doubt=False):
        self.doubt, self.calls = doubt, []

    def judge(self, prompts, completions, shuffle_order=True):
        self.calls.append((prompts, completions))
        verdicts = [int(len(b) > len(a)) for a, b in completions]
        return [-1 if self.doubt else v for v in verdicts]


class Ranker(BaseRankJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [sorted(range(2), key=lambda i: -len(pair[i])) for pair in completions]


class Short(BaseBinaryJudge):
    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return [int(len(c) < 8) for c in completions]


def test_a_judge_is_asked_about_the_same_pairs_when_rewards_are_scored_twice(tiny_tokenizer, tmp_path, caplog):
    judge = Longer()
    trainer = make(tmp_path, tiny_tokenizer, judge=judge, check_reward_determinism=True, max_steps=1)
    trainer.train()
    _, (asked, pairs), (asked_again, again) = judge.calls  # The first call tried the judge out.
    assert (asked_again, again) == (asked[:2], pairs[:2])
    assert "for the same completion" not in caplog.text


@pytest.mark.parametrize("kind", [Longer, Ranker, Short])
def test_judges_prefer(tiny_tokenizer, tmp_path, kind):
    judge = kind()
    trainer = make(tmp_path, tiny_tokenizer, judge=judge, max_steps=1, eval_dataset=prompts(2))
    trainer.train()
    assert logs(trainer, f"rewards/{kind.__name__}/mean")
    assert {"eval_objective/kl", "eval_val/contain_eos_token"} <= set(trainer.evaluate())
    if kind is Longer:
        ((asked, pairs), *_) = judge.calls[1:]  # The first call tried the judge out.
        assert len(asked) == len(pairs) == 4 and all(isinstance(text, str) for text in asked)


@pytest.mark.parametrize(
    "setting", [{"missing_eos_penalty": 1.0}, {"reward_weights": [2.0]}, {"reward_transform": ["tanh:1"]}]
)
def test_what_changes_rewards_is_refused_beside_a_judge(tiny_tokenizer, tmp_path, setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} changes rewards, but a judge"):
        make(tmp_path, tiny_tokenizer, judge=Longer(), **setting)


def test_p41_a_verdict_that_is_none_is_a_tie(tiny_tokenizer, tmp_path):
    """-1 used to count as "the second wins"."""
    trainer = make(
        tmp_path,
        tiny_tokenizer,
        judge=Longer(doubt=True),
        engine="scripted",
    )
    generation = rollout_step(trainer.run, [row for row in prompts(2) for _ in range(2)], "train")
    assert set(generation.columns["advantages"]) == {0.0}


def test_p39_a_reward_model_reads_its_own_tokens(tiny_tokenizer, tmp_path):
    model = reward_model(tiny_tokenizer)
    trainer = make(tmp_path, tiny_tokenizer, rewards=model, max_steps=1)
    trainer.train()
    (function,) = trainer.rewards.functions
    assert isinstance(function, WholeTextReward) and function.tokenizer is tiny_tokenizer
    assert logs(trainer, "rewards/LlamaForSequenceClassification/mean")


@pytest.mark.matrix
@pytest.mark.slow
def test_the_reward_rises(tiny_tokenizer, tmp_path):
    """Reward: how often token 'a' is in the completion."""
    token = tiny_tokenizer("a", add_special_tokens=False)["input_ids"][0]

    def says_a(completion_ids, **_):
        return [float(sum(t == token for t in ids)) for ids in completion_ids]

    trainer = make(
        tmp_path, tiny_tokenizer, rewards=says_a, per_device_train_batch_size=16, max_steps=25, learning_rate=1e-2,
        num_train_epochs=60, beta=0.05,
    )  # fmt: skip
    trainer.train()
    rewards = logs(trainer, "rewards/says_a/mean")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1.0, rewards


# Refused ------------------------------------------------------------------------------------------------------------


def test_what_is_required_is_asked_for(tiny_tokenizer, tmp_path):
    trainer = OnlineDPOTrainer
    args = OnlineDPOConfig(str(tmp_path), report_to="none", bf16=False)
    model = build_model(len(tiny_tokenizer))
    given = {
        "model": model, "reward_funcs": count_a, "args": args, "train_dataset": prompts(), "processing_class": tiny_tokenizer,
    }  # fmt: skip
    for name in ("reward_funcs", "args", "train_dataset", "processing_class"):
        with pytest.raises(ValueError, match=name):
            trainer(**{k: v for k, v in given.items() if k != name})
    for extra, match in (
        ({"judge": Longer()}, "both are set"),
        ({"ref_model": model}, "ref_model is the model itself"),
        ({"data_collator": list}, "data_collator must be None"),
    ):
        with pytest.raises(ConfigError, match=match):
            trainer(**given, **extra)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"beta": 0.0}, "every value of beta must be above 0, but beta=0.0"),
        ({"beta": []}, r"beta=\[\] is an empty list"),
        ({"beta": [0.1, -1.0]}, "every value of beta must be above 0"),
        ({"missing_eos_penalty": -1.0}, "must be above 0"),
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"num_generations": 4}, "are not supported"),
        ({"max_completion_length": 32}, "names of the same limit"),
        ({"epsilon": 0.3}, "epsilon=0.3 is not supported by OnlineDPOConfig"),
        ({"mask_truncated_completions": True}, "not supported"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_bad_settings_are_refused_when_the_config_is_made(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        OnlineDPOConfig(str(tmp_path), report_to="none", bf16=False, **settings)


def test_defaults_are_the_peer_s(tmp_path):
    common = {
        "learning_rate": 5e-7, "reward_model_path": None, "max_new_tokens": 64, "max_length": 512, "temperature": 0.9,
        "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
        "missing_eos_penalty": None, "beta": 0.1, "loss_type": "sigmoid", "disable_dropout": True, "use_vllm": False,
        "vllm_gpu_memory_utilization": 0.55, "reward_weights": None, "remove_unused_columns": False,
        "max_completion_length": 64, "num_generations": 2,
    }  # fmt: skip
    args = OnlineDPOConfig(str(tmp_path))
    assert {k: getattr(args, k) for k in common} == common


@pytest.mark.parametrize(
    ("page", "first", "config"),
    [
        ("rloo.md", "option", RLOOConfig),
        ("online_dpo.md", "option", OnlineDPOConfig),
    ],
)
def test_the_pages_list_the_options_of_the_code(page, first, config):
    assert docs.options(page, first) == {f.name: docs.default_of(f) for f in docs.own_fields(config)}


def test_the_page_lists_the_metrics_of_the_code():
    assert set(NAMES) <= set(docs.names("online_dpo.md", "metric"))


def test_a_module_that_is_no_reward_model_is_refused(tiny_tokenizer, tmp_path):
    with raises(ModelError, "num_labels=1"):
        make(tmp_path, tiny_tokenizer, rewards=torch.nn.Linear(2, 1))
