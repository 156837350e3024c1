"""KTO and BCO end to end: baselines, running means, labels, balance."""

import datasets
import pytest
import torch
from torch.nn.functional import logsigmoid

from posttrain import BCOConfig, BCOTrainer, ConfigError, DataError, KTOConfig, KTOTrainer
from posttrain.methods.kto import fixed_partners, partners
from posttrain.trainers import kto
from posttrain.types import Row
from tests.conftest import build_model
from tests.methods.test_dpo import pairs
from tests.wordings import raises

BASE = {
    "per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
    "bf16": False, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
}  # fmt: skip


def answers(count=8):
    rows = []
    for i in range(count):
        rows.append({"prompt": f"What is {i}? ", "completion": "a number " * (1 + i % 3), "label": i % 2 == 0})
    return datasets.Dataset.from_list(rows)


def make(kind, folder, tokenizer, data=None, ref=True, **settings):
    config, trainer = {"kto": (KTOConfig, KTOTrainer), "bco": (BCOConfig, BCOTrainer)}[kind]
    reference = build_model(len(tokenizer), seed=3) if ref else None
    keys = {
        k: settings.pop(k)
        for k in ("eval_dataset", "peft_config", "embedding_func", "embedding_tokenizer")
        if k in settings
    }
    return trainer(
        build_model(len(tokenizer)), reference, config(str(folder), **(BASE | settings)),
        train_dataset=data if data is not None else answers(), processing_class=tokenizer, **keys,
    )  # fmt: skip


def ratio(tokenizer, prompt, answer):
    """Log-ratio of one answer under the two models, from full logits."""
    sums = []
    for seed in (0, 3):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logp = build_model(len(tokenizer), seed=seed)(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        sums.append(float(logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()))
    return sums[0] - sums[1]


def reference_sum(tokenizer, prompt, answer):
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logp = build_model(len(tokenizer), seed=3)(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return float(logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum())


def ratios(trainer, shift=0):
    rows = list(trainer.train_dataset)
    return torch.tensor([
        ratio(trainer.processing_class, row["prompt_ids"], rows[i - shift]["completion_ids"]) for i, row in enumerate(rows)
    ])  # fmt: skip


def logged(trainer):
    trainer.train()
    return trainer.state.log_history[0]


def test_kto_is_its_formula_with_a_baseline_from_the_neighbours_answers(tiny_tokenizer, tmp_path):
    trainer = make("kto", tmp_path, tiny_tokenizer, desirable_weight=1.0, undesirable_weight=1.5)
    own, z0 = ratios(trainer), ratios(trainer, shift=1).mean().clamp_min(0)
    good = torch.tensor([i % 2 == 0 for i in range(8)])
    x = 0.1 * (own - z0)
    expected = torch.where(good, torch.sigmoid(-x), 1.5 * torch.sigmoid(x)).mean()
    entry = logged(trainer)
    assert entry["kl"] == pytest.approx(float(z0), rel=1e-4, abs=1e-5)
    assert entry["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert entry["rewards/chosen"] == pytest.approx(float(0.1 * own[good].mean()), rel=1e-4)
    assert entry["rewards/margins"] == pytest.approx(float(0.1 * (own[good].mean() - own[~good].mean())), rel=1e-3)


def test_kto_starts_at_one_half_against_itself(tiny_tokenizer, tmp_path):
    entry = logged(make("kto", tmp_path, tiny_tokenizer, ref=False))
    assert entry["loss"] == pytest.approx(0.5, abs=1e-6)
    assert entry["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", ["kto", "bco"])
def test_accumulation_does_not_change_the_update_where_partners_are_the_same(tiny_tokenizer, tmp_path, kind):
    """BCO always; KTO with the loss that has no baseline, whose partners belong to a micro-batch."""
    extra = {"loss_type": "apo_zero_unpaired"} if kind == "kto" else {}
    found = []
    for batch, steps in ((8, 1), (2, 4), (1, 8)):
        trainer = make(
            kind,
            tmp_path,
            tiny_tokenizer,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            **extra,
        )
        entry = logged(trainer)
        found.append((entry["loss"], entry["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)


def test_p18_partners_never_share_the_prompt():
    rows = [Row([p], [[i]], [[1]]) for i, p in enumerate([1, 1, 2, 2, 3])]
    for row, partner in zip(rows, partners(rows), strict=True):
        assert rows[partner].prompt_ids != row.prompt_ids
    assert partners([Row([1], [[i]], [[1]]) for i in range(3)]) == [None, None, None]
    odd = [Row([p], [[i]], [[1]]) for i, p in enumerate([1, 1, 1, 2])]
    assert [p is not None for p in partners(odd)] == [True] * 4


def test_pairs_are_taken_apart_side_by_side(tiny_tokenizer, tmp_path):
    trainer = make("kto", tmp_path, tiny_tokenizer, data=pairs(4))
    assert trainer.train_dataset["label"][:] == [True, False] * 4
    logged(trainer)


def test_bco_moves_its_threshold_before_the_loss_and_keeps_it_on_resume(tiny_tokenizer, tmp_path):
    trainer = make("bco", tmp_path, tiny_tokenizer)
    rewards = 0.1 * ratios(trainer)
    delta = rewards.mean()
    good = torch.tensor([i % 2 == 0 for i in range(8)])
    x = rewards - delta
    entry = logged(trainer)
    assert entry["delta"] == pytest.approx(float(delta), rel=1e-4)
    assert entry["loss"] == pytest.approx(float(torch.where(good, -logsigmoid(x), -logsigmoid(-x)).mean()), rel=1e-4)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
    whole, part = (make("bco", tmp_path / name, tiny_tokenizer, ref=False, **settings) for name in "ab")
    whole.train()
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert part.run.progress.own.moments == whole.run.progress.own.moments
    assert part.run.progress.own.moments.count == 16


def test_precomputed_references_give_the_same_loss(tiny_tokenizer, tmp_path):
    for kind, extra in (("kto", {"loss_type": "apo_zero_unpaired"}), ("bco", {})):
        found = [
            logged(make(kind, tmp_path, tiny_tokenizer, precompute_ref_log_probs=flag, **extra))["loss"]
            for flag in (False, True)
        ]
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_kto_precomputes_the_reference_of_its_baseline_too(tiny_tokenizer, tmp_path):
    """The same partners, by a column, give the same run with and without precomputing; the reference is gone then."""
    fixed = make("kto", tmp_path, tiny_tokenizer, precompute_ref_log_probs=True, max_steps=2, eval_dataset=answers(6))
    assert fixed.reference is None
    rows = fixed.train_dataset
    for row, kl in zip(rows, rows["ref_KL_logps"][:], strict=True):
        assert row["KL_completion_ids"] in [r["completion_ids"] for r in rows if r["prompt_ids"] != row["prompt_ids"]]
        own = reference_sum(tiny_tokenizer, row["prompt_ids"], row["KL_completion_ids"])
        assert kl == pytest.approx(own, rel=1e-5)
    live = make(
        "kto", tmp_path, tiny_tokenizer, data=rows.remove_columns(["ref_logps", "ref_KL_logps"]), max_steps=2,
        eval_dataset=fixed.eval_dataset.remove_columns(["ref_logps", "ref_KL_logps"]),
    )  # fmt: skip
    assert live.reference is not None
    for trainer in (fixed, live):
        trainer.train()
    keys = ("loss", "kl", "kl/valid_fraction", "grad_norm", "rewards/margins")
    for ours, theirs in zip(fixed.state.log_history[:2], live.state.log_history[:2], strict=True):
        assert {k: ours[k] for k in keys} == pytest.approx({k: theirs[k] for k in keys}, rel=1e-4, abs=1e-6)
    assert fixed.evaluate()["eval_loss"] == pytest.approx(live.evaluate()["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["kto", "bco"])
def test_a_reference_log_prob_that_is_missing_in_one_row_is_refused(kind, tiny_tokenizer, tmp_path):
    data = answers(8)
    with raises(DataError, "train row 5", "'ref_logps'", "None"):
        make(kind, tmp_path, tiny_tokenizer, data=data.add_column("ref_logps", [-1.0] * 5 + [None, -1.0, -1.0]))


def test_fixed_partners_have_other_prompts_and_depend_on_the_seed_alone():
    prompts = [[i % 7] for i in range(40)]
    found = fixed_partners(prompts, seed=3)
    assert found == fixed_partners(prompts, seed=3) != fixed_partners(prompts, seed=4)
    assert all(prompts[p] != prompts[i] for i, p in enumerate(found))
    assert sorted(found) == list(range(40))  # Each answer is used once.
    crowded = [[0]] * 6 + [[1], [2]]
    assert all(crowded[p] != crowded[i] for i, p in enumerate(fixed_partners(crowded, seed=0)))
    assert fixed_partners([[1]] * 3, seed=0) == [None] * 3


def test_rows_without_a_partner_are_left_out_of_the_baseline_and_counted(tiny_tokenizer, tmp_path):
    rows = [{"prompt": "What is 2? ", "completion": f"a number {i}", "label": i % 2 == 0} for i in range(8)]
    data = datasets.Dataset.from_list(rows)
    for settings in ({}, {"precompute_ref_log_probs": True}):
        entry = logged(make("kto", tmp_path, tiny_tokenizer, data=data, **settings))
        assert entry["kl"] == 0
        assert entry["kl/valid_fraction"] == 0
        assert torch.isfinite(torch.tensor(entry["loss"]))
    assert logged(make("kto", tmp_path, tiny_tokenizer))["kl/valid_fraction"] == 1


def test_a_partner_s_answer_is_cut_to_the_room_its_new_prompt_leaves(tiny_tokenizer, tmp_path):
    prompts = [f"What is the sum of {i} numbers? " if i % 2 else f"{i} " for i in range(8)]
    rows = [{"prompt": p, "completion": "a number " * 9, "label": i < 4} for i, p in enumerate(prompts)]
    trainer = make("kto", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), max_length=24)
    _, mismatched = trainer.data_collator(list(trainer.train_dataset))
    assert max(int((b.sequence == s).sum()) for b in mismatched for s in range(b.num_sequences)) > 1
    for batch in mismatched:
        assert int(batch.position_ids[batch.real].max()) == 23


def test_bco_computes_the_policy_once_where_a_step_is_one_pass(tiny_tokenizer, tmp_path, monkeypatch):
    from posttrain.trainers import bco

    calls = []
    original = bco.log_ratios
    monkeypatch.setattr(bco, "log_ratios", lambda run, batches: calls.extend(batches) or original(run, batches))
    found = []
    for batch, steps in ((8, 1), (2, 4)):
        calls.clear()
        trainer = make(
            "bco",
            tmp_path,
            tiny_tokenizer,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            max_steps=3,
        )
        trainer.train()
        found.append([(e["delta"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
        assert len(calls) == (0 if steps == 1 else 3 * 4)
        assert trainer.run.progress.own.moments.count == 24
    for one, many in zip(*found, strict=True):
        assert one == pytest.approx(many, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["kto", "bco"])
def test_logits_metrics_are_means_over_answer_tokens_of_each_label(tiny_tokenizer, tmp_path, kind):
    trainer = make(kind, tmp_path, tiny_tokenizer)
    rows, model = list(trainer.train_dataset), build_model(len(tiny_tokenizer))
    found = {True: [], False: []}
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1]
        found[row["label"]].append(logits.mean(-1))
    entry = logged(trainer)
    for label, side in ((True, "chosen"), (False, "rejected")):
        assert entry[f"logits/{side}"] == pytest.approx(float(torch.cat(found[label]).mean()), rel=1e-4, abs=1e-6)


def test_evaluation_reports_margins(tiny_tokenizer, tmp_path):
    for kind in ("kto", "bco"):
        metrics = make(kind, tmp_path, tiny_tokenizer, eval_dataset=answers(6)).evaluate()
        assert metrics["eval_rewards/margins"] == pytest.approx(
            metrics["eval_rewards/chosen"] - metrics["eval_rewards/rejected"]
        )


@pytest.mark.parametrize("label", ["False", 0.5, 2])
def test_p19_labels_that_are_no_bool_are_refused(tiny_tokenizer, tmp_path, label):
    rows = [{"prompt": "q ", "completion": "a", "label": label}, {"prompt": "r ", "completion": "b", "label": label}]
    with raises(DataError, "row 0", "'label'"):
        make("kto", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows))


def test_the_baseline_of_a_short_last_batch_counts_for_its_rows_alone(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = make("kto", tmp_path, tiny_tokenizer, eval_dataset=answers(5), per_device_eval_batch_size=4)
    sizes = []

    def baseline(run, mismatched):
        sizes.append(sum(batch.num_sequences for batch in mismatched))
        return torch.tensor(1.0 * sizes[-1])

    monkeypatch.setattr(kto, "baseline", baseline)
    assert trainer.evaluate()["eval_kl"] == pytest.approx((4 * 4 + 1 * 0) / 5) and sizes == [4, 0]


def test_zeros_and_ones_are_read_as_labels(tiny_tokenizer, tmp_path):
    rows = [{"prompt": f"{i} ", "completion": "a", "label": i % 2} for i in range(8)]
    assert logged(make("bco", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows)))["loss"] > 0


def test_labels_out_of_balance_are_told_with_the_weights_that_would_do(tiny_tokenizer, tmp_path, caplog):
    rows = [{"prompt": f"{i} ", "completion": "a", "label": i < 2} for i in range(8)]
    make("kto", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows))
    assert "2 good and 6 bad answers" in caplog.text
    assert "Set desirable_weight in [3.00, 3.99]" in caplog.text


@pytest.mark.parametrize("side", ["desirable", "undesirable"])
@pytest.mark.parametrize("good", [2, 4])
def test_a_weight_of_0_leaves_one_kind_of_answers_out(tiny_tokenizer, tmp_path, caplog, side, good):
    rows = [{"prompt": f"{i} ", "completion": "a", "label": i < good} for i in range(8)]
    trainer = make("kto", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), **{f"{side}_weight": 0.0})
    assert 0 < logged(trainer)["loss"] < 1 and "is recommended" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size=1"),
        ({"loss_type": "kto_pair"}, "loss_type='kto_pair'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        KTOConfig(str(tmp_path), **settings)


def test_rows_without_labels_are_refused(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": ["q "], "completion": ["a"]})
    with raises(DataError, "'label'"):
        make("kto", tmp_path, tiny_tokenizer, data=rows)


@pytest.mark.parametrize("kind", ["kto", "bco"])
def test_prompts_that_are_implicit_or_repeated_are_not_trained(tiny_tokenizer, tmp_path, kind):
    user = [{"role": "user", "content": "What is 2?"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("two", "three"))
    implicit = {"chosen": user + good, "rejected": user + bad}
    found = []
    for row in ({"prompt": user, "chosen": good, "rejected": bad}, implicit, {"prompt": user} | implicit):
        trainer = make(kind, tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list([row] * 4))
        found.append([r["completion_ids"] for r in trainer.train_dataset])
    assert found[0] == found[1] == found[2]
    assert tiny_tokenizer.decode(found[0][0]).startswith("two<|im_end|>")


def test_bco_weighs_bad_answers_by_how_good_their_prompts_look(tiny_tokenizer, tmp_path):
    pytest.importorskip("sklearn")

    def embed(input_ids, attention_mask):
        digits = (input_ids == tiny_tokenizer("7")["input_ids"][0]).float().sum(1)
        return torch.stack([digits, attention_mask.sum(1).float()], 1)

    rows = [
        {"prompt": "7 7 7 " if i % 4 < 2 else "no digits ", "completion": "a number", "label": i % 4 == 0}
        for i in range(24)
    ]
    trainer = make(
        "bco", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), embedding_func=embed,
        embedding_tokenizer=tiny_tokenizer, min_density_ratio=0.1, per_device_train_batch_size=24,
    )  # fmt: skip
    weights = trainer.train_dataset["density_weight"][:]
    like_good = [w for r, w in zip(rows, weights, strict=True) if r["prompt"].startswith("7") and not r["label"]]
    unlike = [w for r, w in zip(rows, weights, strict=True) if not r["prompt"].startswith("7")]
    assert min(like_good) > 3 * max(unlike)
    assert (tmp_path / "density.json").is_file()
    x = 0.1 * ratios(trainer)
    x = x - x.mean()
    good = torch.tensor([r["label"] for r in rows])
    expected = torch.where(good, -logsigmoid(x), -torch.tensor(weights) * logsigmoid(-x)).mean()
    assert logged(trainer)["loss"] == pytest.approx(float(expected), rel=1e-4)


def test_an_embedding_without_its_tokenizer_is_refused(tiny_tokenizer, tmp_path):
    with raises(ConfigError):
        make("bco", tmp_path, tiny_tokenizer, embedding_func=lambda **_: None)
