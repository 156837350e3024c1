"""Process reward models: labels stand on the last token of each step, and nowhere else."""

import datasets
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForTokenClassification
from transformers.trainer_utils import EvalPrediction

from posttrain import ConfigError, DataError, PRMConfig, PRMTrainer
from posttrain.algorithms.prm import compute_accuracy
from posttrain.data.steps import prepare_step_dataset


class Ids:
    """A tokenizer of known ids, for the vectors."""

    bos_token_id = 0
    words = {"p": [465, 6766, 318, 298], "s1": [4, 322, 12], "s2": [4995, 11, 22], "|": [1030], "||": [1030, 1030]}

    def __call__(self, texts, **_):
        return {"input_ids": [list(self.words.get(text, [])) for text in texts]}


def vector(**options):
    row = datasets.Dataset.from_list([{"prompt": "p", "completions": ["s1", "s2"], "labels": [True, False]}])
    (out,) = prepare_step_dataset(row, Ids(), **({"step_separator": "|"} | options))
    ids = out["prompt_ids"] + out["completion_ids"]
    at = [len(out["prompt_ids"]) + i for i in out["positions"]]
    return ids, dict(zip(at, out["targets"], strict=True))


def test_labels_stand_on_the_last_separator_token_of_each_step():
    assert vector() == ([0, 465, 6766, 318, 298, 4, 322, 12, 1030, 4995, 11, 22, 1030], {8: 1.0, 12: 0.0})
    ids, labels = vector(max_completion_length=6)
    assert (len(ids), labels) == (11, {8: 1.0})
    assert vector(max_length=9)[1] == {8: 1.0}
    assert vector(last_step_only=True)[1] == {12: 0.0}
    assert vector(step_separator="||")[1] == {9: 1.0, 14: 0.0}


def judge(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=2, pad_token_id=2, initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForTokenClassification(config).eval()


def steps(count=8):
    rows = []
    for i in range(count):
        n = 1 + i % 3
        rows.append(
            {
                "prompt": f"What is {i}?",
                "completions": [f"step {j}" for j in range(n)],
                "labels": [j % 2 == 0 for j in range(n)],
            }
        )
    return datasets.Dataset.from_list(rows)


def prm(folder, tokenizer, data=None, **settings):
    base = {
        "per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    keys = {
        k: settings.pop(k) for k in ("eval_dataset", "peft_config", "compute_metrics", "data_collator") if k in settings
    }
    return PRMTrainer(
        judge(tokenizer), PRMConfig(str(folder), **(base | settings)),
        train_dataset=data if data is not None else steps(), processing_class=tokenizer, **keys,
    )  # fmt: skip


def truth(trainer):
    """Cross-entropy at each judged token, every row alone through the model's own forward."""
    losses = []
    model = judge(trainer.processing_class)
    for row in trainer.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logits = model(input_ids=ids).logits[0].log_softmax(-1)
        for position, target in zip(row["positions"], row["targets"], strict=True):
            losses.append(-float(logits[len(row["prompt_ids"]) + position, int(target)]))
    return np.mean(losses)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_t11_the_loss_is_the_mean_over_judged_tokens_whatever_the_accumulation(
    tiny_tokenizer, tmp_path, batch, accumulation
):
    trainer = prm(tmp_path, tiny_tokenizer, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    expected = truth(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_it_learns_which_steps_are_good_and_scores_new_ones(tiny_tokenizer, tmp_path):
    trainer = prm(tmp_path, tiny_tokenizer, max_steps=40, learning_rate=3e-3, eval_dataset=steps(3))
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0
    scores = trainer.score_steps("What is 2?", ["step 0", "step 1", "step 2"])
    assert [s > 0.5 for s in scores] == [True, False, True]


def test_user_metrics_see_judged_tokens_alone(tiny_tokenizer, tmp_path):
    trainer = prm(
        tmp_path, tiny_tokenizer, eval_dataset=steps(5), per_device_eval_batch_size=2, compute_metrics=compute_accuracy
    )
    found = trainer.evaluate()
    output = trainer.predict(trainer.eval_dataset)
    assert output.label_ids.tolist()[2] == [1, 0, 1]
    assert output.label_ids.tolist()[0] == [1, -100, -100]
    assert 0 <= found["eval_accuracy"] <= 1


def test_accuracy_vectors():
    logits = np.array([[[0.1, 0.9], [0.8, 0.2]], [[0.3, 0.7], [0.6, 0.4]]])
    for labels, expected in (([[0, 1], [1, 0]], 0.5), ([[1, 0], [1, -100]], 1.0), ([[1, 1], [0, -100]], 1 / 3)):
        assert compute_accuracy(EvalPrediction(logits, np.array(labels)))["accuracy"] == pytest.approx(expected)
    flat = EvalPrediction(np.array([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]]), np.array([0, 1, 1]))
    assert compute_accuracy(flat)["accuracy"] == 0.5


def test_t32_shares_are_refused_unless_asked_for(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "q", "completions": ["a"], "labels": [0.9]}])
    with pytest.raises(DataError, match=r"row 0: column 'labels': 0.9 must be True or False .*soft_labels"):
        prm(tmp_path, tiny_tokenizer, data=rows)
    assert prm(tmp_path, tiny_tokenizer, data=rows, soft_labels=True).train_dataset[0]["targets"] == [0.9]


def test_bad_rows_and_settings_are_named(tiny_tokenizer, tmp_path, caplog):
    with pytest.raises(DataError, match="row 0: 2 completions and 1 labels"):
        prm(
            tmp_path,
            tiny_tokenizer,
            data=datasets.Dataset.from_list([{"prompt": "q", "completions": ["a", "b"], "labels": [True]}]),
        )
    with pytest.raises(DataError, match=r"\['labels'\] are not in"):
        prm(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list([{"prompt": "q", "completions": ["a"]}]))
    with pytest.raises(ConfigError, match="step_separator is empty"):
        PRMConfig(str(tmp_path), step_separator="")
    with pytest.raises(DataError, match="of 8, 8 whose judged steps all lie beyond the limit"):
        prm(tmp_path, tiny_tokenizer, max_length=2)
    rows = datasets.concatenate_datasets([steps(3), steps(1).map(lambda r: {"prompt": "long " * 40})])
    prm(tmp_path, tiny_tokenizer, data=rows, max_length=60)
    assert "dropped 1 of 4 rows: 1 whose judged steps" in caplog.text


def test_an_adapter_trains_the_head(tiny_tokenizer, tmp_path):
    import peft

    trainer = prm(tmp_path, tiny_tokenizer, peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]), max_steps=2)
    assert any("score" in n for n, p in trainer.model.named_parameters() if p.requires_grad)
    trainer.train()


def stream(*rows):
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"completions": "ab"}, "row 1: column 'completions' must be a list, one entry a step, and it is 'ab'"),
        ({"completions": None}, "row 1: column 'completions' must be a list, one entry a step, and it is 'None'"),
        ({"labels": None}, "row 1: column 'labels' must be a list"),
        ({"labels": ["yes"]}, "row 1: column 'labels': 'yes' must be True or False"),
        ({"labels": [None]}, "row 1: column 'labels': None must be True or False"),
        ({"prompt": None}, "row 1: column 'prompt': .* plain text only, and it holds NoneType"),
        ({"prompt": [{"role": "user", "content": "q"}]}, "row 1: column 'prompt': .* holds list. Render the messages"),
        ({"completions": ["bad \ud800"]}, "row 1: text that is not valid Unicode"),
    ],
)
def test_bad_rows_say_where_what_and_how_to_fix_it(tiny_tokenizer, row, match):
    good = {"prompt": "q", "completions": ["a"], "labels": [True]}
    with pytest.raises(DataError, match=match):
        list(prepare_step_dataset(stream(good, {**good, **row}), tiny_tokenizer))


def test_rows_are_dropped_by_reason_and_an_empty_rest_is_refused_with_the_counts(tiny_tokenizer, caplog):
    long = {"prompt": "word " * 60, "completions": ["a"], "labels": [True]}
    none = {"prompt": "q", "completions": [], "labels": []}
    good = {"prompt": "q", "completions": ["a"], "labels": [True]}
    counts = "1 whose judged steps all lie beyond the limit, 1 without a step"
    assert len(prepare_step_dataset(datasets.Dataset.from_list([good, long, none]), tiny_tokenizer, max_length=16)) == 1
    assert f"dropped 2 of 3 rows: {counts}." in caplog.text
    with pytest.raises(DataError, match=f"of its first 2, {counts}"):
        prepare_step_dataset(stream(long, none), tiny_tokenizer, max_length=16)
    with pytest.raises(DataError, match="the train dataset is empty"):
        prepare_step_dataset(
            datasets.Dataset.from_dict({"prompt": [], "completions": [], "labels": []}), tiny_tokenizer
        )


def test_metrics_are_logged_and_a_data_collator_is_refused(tiny_tokenizer, tmp_path):
    trainer = prm(tmp_path, tiny_tokenizer, eval_dataset=steps(3))
    trainer.train()
    general = {
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "num_tokens",
        "documents",
        "trained_tokens",
        "padding_share",
    }
    assert general | {"accuracy"} <= set(trainer.state.log_history[0])
    assert trainer.state.log_history[0]["trained_tokens"] == sum(map(len, trainer.train_dataset["positions"]))
    assert {"eval_loss", "eval_accuracy"} <= set(trainer.evaluate())
    with pytest.raises(ConfigError, match="PRMTrainer makes its own batches of tokenised rows, and data_collator="):
        prm(tmp_path, tiny_tokenizer, data_collator=lambda rows: rows)


def test_what_skips_tokenising_is_refused_with_a_transform_and_limits_below_one(tiny_tokenizer, tmp_path):
    with pytest.raises(DataError, match="has a transform attached"):
        prm(tmp_path, tiny_tokenizer, data=steps().with_transform(lambda batch: batch))
    for name in ("max_length", "max_completion_length"):
        with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
            PRMConfig(str(tmp_path), **{name: 0})
