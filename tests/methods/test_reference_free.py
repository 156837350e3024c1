"""CPO, SimPO, AlphaPO, ORPO and TPO end to end: losses against plain sums, golden rows, refusals."""

import math

import datasets
import pytest
import torch
from torch.nn.functional import logsigmoid

from posttrain import ConfigError, CPOConfig, CPOTrainer, DataError, ORPOConfig, ORPOTrainer, TPOConfig, TPOTrainer
from posttrain.data.forest import Layout
from tests.conftest import build_model
from tests.methods.test_dpo import pairs
from tests.wordings import raises

BASE = {
    "per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
    "bf16": False, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
}  # fmt: skip


def triples():
    return pairs().add_column("reference", [f"it is {i}" for i in range(8)])


def make(kind, folder, tokenizer, data=None, **settings):
    config, trainer = {
        "cpo": (CPOConfig, CPOTrainer),
        "orpo": (ORPOConfig, ORPOTrainer),
        "tpo": (TPOConfig, TPOTrainer),
    }[kind]
    data = data if data is not None else (triples() if kind == "tpo" else pairs())
    keys = {k: settings.pop(k) for k in ("eval_dataset",) if k in settings}
    args = config(str(folder), **(BASE | settings))
    return trainer(build_model(len(tokenizer)), args, train_dataset=data, processing_class=tokenizer, **keys)


def token_logps(tokenizer, ids):
    model = build_model(len(tokenizer))
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, torch.tensor(ids)[1:, None]).squeeze(1)


def plain(trainer, branch):
    """Sums and lengths of one branch, every sequence alone."""
    found = []
    for row in trainer.train_dataset:
        logp = token_logps(trainer.processing_class, row["prompt_ids"] + row[f"{branch}_ids"])[
            len(row["prompt_ids"]) - 1 :
        ]
        found.append((float(logp.sum()), len(logp)))
    sums, lengths = zip(*found, strict=True)
    return torch.tensor(sums), torch.tensor(lengths, dtype=torch.float)


def logged(trainer):
    trainer.train()
    return trainer.state.log_history[0]


def test_cpo_is_a_sigmoid_on_sums_and_the_chosen_tokens_mean_likelihood(tiny_tokenizer, tmp_path):
    trainer = make("cpo", tmp_path, tiny_tokenizer)
    (c, nc), (r, _) = plain(trainer, "chosen"), plain(trainer, "rejected")
    entry = logged(trainer)
    assert entry["nll_loss"] == pytest.approx(float(-c.sum() / nc.sum()), rel=1e-5)
    assert entry["loss"] == pytest.approx(float(-logsigmoid(0.1 * (c - r)).mean() - c.sum() / nc.sum()), rel=1e-5)
    assert entry["rewards/margins"] == pytest.approx(float(0.1 * (c - r).mean()), rel=1e-4)


def test_simpo_reads_means_and_has_no_likelihood_term(tiny_tokenizer, tmp_path):
    trainer = make("cpo", tmp_path, tiny_tokenizer, loss_type="simpo", beta=2.0, cpo_alpha=0.0, simpo_gamma=1.0)
    (c, nc), (r, nr) = plain(trainer, "chosen"), plain(trainer, "rejected")
    entry = logged(trainer)
    assert entry["loss"] == pytest.approx(float(-logsigmoid(2.0 * (c / nc - r / nr) - 1.0).mean()), rel=1e-5)
    assert "nll_loss" not in entry


def test_alphapo_is_simpo_with_a_shaped_reward(tiny_tokenizer, tmp_path):
    trainer = make("cpo", tmp_path, tiny_tokenizer, loss_type="alphapo", alpha=0.25, beta=2.5, simpo_gamma=0.1)
    assert (trainer.args.loss_type, trainer.args.cpo_alpha) == ("simpo", 0.0)
    (c, nc), (r, nr) = plain(trainer, "chosen"), plain(trainer, "rejected")
    shaped = [(1 - torch.exp(-0.25 * x)) / 0.25 for x in (c / nc, r / nr)]
    assert logged(trainer)["loss"] == pytest.approx(
        float(-logsigmoid(2.5 * (shaped[0] - shaped[1]) - 0.1).mean()), rel=1e-4
    )


def test_orpo_trains_prompt_and_chosen_and_adds_the_odds(tiny_tokenizer, tmp_path):
    trainer = make("orpo", tmp_path, tiny_tokenizer)
    (c, nc), (r, nr) = plain(trainer, "chosen"), plain(trainer, "rejected")
    whole = [token_logps(tiny_tokenizer, row["prompt_ids"] + row["chosen_ids"]) for row in trainer.train_dataset]
    nll = -sum(float(x.sum()) for x in whole) / sum(len(x) for x in whole)
    a, b = c / nc, r / nr
    odds = (a - b) - (torch.log(1 - a.exp()) - torch.log(1 - b.exp()))
    entry = logged(trainer)
    assert entry["nll_loss"] == pytest.approx(nll, rel=1e-5)
    assert entry["loss"] == pytest.approx(nll - 0.1 * float(logsigmoid(odds).mean()), rel=1e-5)
    assert entry["log_odds_ratio"] == pytest.approx(float(logsigmoid(odds).mean()), rel=1e-4)
    assert entry["log_odds_chosen"] == pytest.approx(float(odds.mean()), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "tpo-l"])
def test_tpo_imitates_the_gold_answer_beside_the_pair(tiny_tokenizer, tmp_path, loss_type):
    trainer = make("tpo", tmp_path, tiny_tokenizer, loss_type=loss_type)
    (c, nc), (r, nr), (g, ng) = (plain(trainer, branch) for branch in ("chosen", "rejected", "reference"))
    gap = c - r if loss_type == "sigmoid" else c / nc - r / nr - 0.5 / 0.01
    expected = -logsigmoid(0.01 * gap).mean() - g.sum() / ng.sum()
    assert logged(trainer)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_gold_answers_of_weight_0_are_not_computed(tiny_tokenizer, tmp_path):
    """Then TPO is CPO without a likelihood term, in every number."""
    tpo = logged(make("tpo", tmp_path, tiny_tokenizer, tpo_alpha=0.0))
    cpo = logged(make("cpo", tmp_path, tiny_tokenizer, beta=0.01, cpo_alpha=0.0, learning_rate=1e-2))
    for name in ("loss", "entropy", "num_tokens", "rewards/margins", "logps/chosen", "trained_tokens"):
        assert tpo[name] == pytest.approx(cpo[name], rel=1e-5), name


def test_a_weight_of_gold_answers_that_were_left_out_is_refused(tiny_tokenizer, tmp_path):
    trainer = make("tpo", tmp_path, tiny_tokenizer, tpo_alpha=0.0)
    trainer.tpo_alpha = 0.5
    with pytest.raises(ConfigError, match=r"tpo_alpha=0\.5"):
        trainer.train()


@pytest.mark.parametrize("kind", ["cpo", "orpo", "tpo"])
def test_logits_metrics_are_means_over_the_answers_tokens_alone(tiny_tokenizer, tmp_path, kind):
    """ORPO trains prompts and TPO a third answer, too: neither counts here."""
    trainer = make(kind, tmp_path, tiny_tokenizer)
    rows, model, hits = list(trainer.train_dataset), build_model(len(tiny_tokenizer)), []
    found = {"chosen": [], "rejected": []}
    for row in rows:
        for side, means in found.items():
            ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1]
            means.append(logits.mean(-1))
            if side == "chosen":
                hits.append((logits.argmax(-1) == ids[0, len(row["prompt_ids"]) :]).float())
    entry = logged(trainer)
    for side, means in found.items():
        assert entry[f"logits/{side}"] == pytest.approx(float(torch.cat(means).mean()), rel=1e-4, abs=1e-6)
    if kind == "tpo":
        assert entry["mean_token_accuracy"] == pytest.approx(float(torch.cat(hits).mean()))


@pytest.mark.parametrize("kind", ["cpo", "orpo", "tpo"])
def test_accumulation_and_layout_change_neither_loss_nor_gradient(tiny_tokenizer, tmp_path, kind):
    found = []
    for batch, steps, layout in ((8, 1, "tree"), (1, 8, "tree"), (4, 2, "padded")):
        trainer = make(
            kind, tmp_path, tiny_tokenizer, per_device_train_batch_size=batch, gradient_accumulation_steps=steps
        )
        trainer.layout = Layout(layout, row_tokens=150)
        entry = logged(trainer)
        found.append((entry["loss"], entry["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)


@pytest.mark.parametrize("kind", ["cpo", "orpo", "tpo"])
def test_evaluation_is_the_training_loss_whatever_its_batch_size(tiny_tokenizer, tmp_path, kind):
    data = triples() if kind == "tpo" else pairs()
    found = []
    for size in (1, 8):
        trainer = make(kind, tmp_path, tiny_tokenizer, eval_dataset=data, per_device_eval_batch_size=size)
        found.append(trainer.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(logged(trainer)["loss"], rel=1e-5)


def test_p10_each_answer_is_cut_to_its_own_room(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"prompt": ["0 1 2 3 "], "chosen": ["4 5 6 7 8 9 " * 4], "rejected": ["1 "]})
    trainer = make("cpo", tmp_path, tiny_tokenizer, data=rows, max_length=24)
    (row,) = trainer.train_dataset
    assert len(row["prompt_ids"]) + len(row["chosen_ids"]) == 24
    assert row["rejected_ids"][-1] == tiny_tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (CPOConfig, {"loss_type": "kto_pair"}, "kto_pair"),
        (CPOConfig, {"loss_type": "simpoo"}, "did you mean 'simpo'"),
        (CPOConfig, {"loss_type": "hinge", "label_smoothing": 0.1}, "no effect with loss_type='hinge'"),
        (CPOConfig, {"alpha": 0.25}, "uses sums"),
        (CPOConfig, {"simpo_gamma": 1.0}, "simpo_gamma=1.0 has no effect with loss_type='sigmoid'"),
        (TPOConfig, {"tpo_l_gamma": 1.0}, "tpo_l_gamma=1.0 has no effect with loss_type='sigmoid'"),
        (TPOConfig, {"loss_type": "ipo", "label_smoothing": 0.1}, "no effect with loss_type='ipo'"),
        (ORPOConfig, {"beta": 0.0}, "beta=0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, config, settings, match):
    with pytest.raises(ConfigError, match=match):
        config(str(tmp_path), **settings)


def test_p28_simpo_at_the_defaults_of_cpo_is_told(tmp_path, caplog):
    CPOConfig(str(tmp_path), loss_type="simpo")
    assert "requires a gap of 5.0 nats per token" in caplog.text
    assert "makes the loss CPO-SimPO" in caplog.text


def test_tpo_needs_its_gold_answers(tiny_tokenizer, tmp_path):
    with raises(DataError, "'reference'"):
        make("tpo", tmp_path, tiny_tokenizer, data=pairs())


def test_p21_a_memorised_answer_gives_no_nan(tiny_tokenizer, tmp_path):
    trainer = make("orpo", tmp_path, tiny_tokenizer, data=pairs(2), max_steps=30, learning_rate=3e-2)
    trainer.train()
    assert all(math.isfinite(e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e)


def test_a_gold_answer_is_taken_off_the_prompt_that_the_pair_shares(tiny_tokenizer, tmp_path):
    user = [{"role": "user", "content": "What is 2?"}]
    said = {
        name: [{"role": "assistant", "content": text}]
        for name, text in (("chosen", "two"), ("rejected", "three"), ("reference", "it is two"))
    }
    whole = {name: user + answer for name, answer in said.items()}
    rows = [
        make("tpo", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list([r])).train_dataset[0]
        for r in ({"prompt": user} | said, whole)
    ]
    assert rows[0] == rows[1]
    with raises(DataError, "'reference'"):
        make(
            "tpo", tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list([whole | {"reference": said["reference"]}])
        )
