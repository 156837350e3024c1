"""Reward models end to end: what is scored, what is shared, what is saved, what is refused."""

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from posttrain import ConfigError, DataError, DPOConfig, DPOTrainer, ModelError, RewardConfig, RewardTrainer
from posttrain.data.preference import SIDES, prepare_reward_dataset
from posttrain.models.forward import forward, sequence_scores
from posttrain.rewards import ModelReward
from tests.conftest import build_model
from tests.wordings import raises


def scorer(tokenizer, labels=1, seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=labels, pad_token_id=2, eos_token_id=2,
        initializer_range=0.2, max_position_embeddings=512, **shape,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval()


def pairs(count=8, margin=False):
    """Long shared prompts; the chosen answer counts up, the rejected one down, of uneven lengths."""
    rows = []
    for i in range(count):
        prompt = f"What is the sum of {i} and {i + 1}? The answer is a number. "
        row = {"prompt": prompt, "chosen": " ".join(map(str, range(i + 1))), "rejected": "a a a"[: 1 + i % 5]}
        rows.append(row | ({"margin": 0.1 * i} if margin else {}))
    return datasets.Dataset.from_list(rows)


def reward(folder, tokenizer, model=None, data=None, **settings):
    base = {
        "per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    keys = {
        k: settings.pop(k) for k in ("eval_dataset", "peft_config", "compute_metrics", "data_collator") if k in settings
    }
    return RewardTrainer(
        model or scorer(tokenizer), RewardConfig(str(folder), **(base | settings)),
        train_dataset=data if data is not None else pairs(), processing_class=tokenizer, **keys,
    )  # fmt: skip


def alone(model, ids):
    """The truth: one sequence, the head at its last token."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        return float(model.score(hidden)[0])


def test_the_loss_is_that_of_scores_read_at_each_true_last_token(tiny_tokenizer, tmp_path):
    """Pad equals eos here: a reader that looks for pad ids would read the token before the eos (trap T44)."""
    trainer = reward(tmp_path, tiny_tokenizer, data=pairs(margin=True), center_rewards_coefficient=0.3)
    model, rows = scorer(tiny_tokenizer), list(trainer.train_dataset)
    assert all(row["chosen_ids"][-1] == tiny_tokenizer.eos_token_id for row in rows)
    chosen, rejected = ([alone(model, row[f"{side}_ids"]) for row in rows] for side in ("chosen", "rejected"))
    expected = [
        np.log1p(np.exp(-(c - r - row["margin"]))) + 0.3 * (c + r) ** 2
        for c, r, row in zip(chosen, rejected, rows, strict=True)
    ]
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert entry["accuracy"] == pytest.approx(np.mean(np.array(chosen) > np.array(rejected)))
    assert entry["margin"] == pytest.approx(np.mean(np.array(chosen) - np.array(rejected)), abs=1e-5)
    assert entry["min_reward"] == pytest.approx(min(chosen + rejected), abs=1e-5)
    assert entry["max_reward"] == pytest.approx(max(chosen + rejected), abs=1e-5)
    assert entry["tie_rate"] == 0


def test_a_text_prompt_beside_conversations_that_begin_with_it_is_read_as_by_dpo(tiny_tokenizer, tmp_path):
    """The layout of UltraFeedback."""
    rows = []
    for i in range(8):
        asked = {"role": "user", "content": f"What is {i}?"}
        said = {side: [asked, {"role": "assistant", "content": side}] for side in SIDES}
        rows.append({"prompt": asked["content"], **said, "score_chosen": 8.0, "score_rejected": 3.0})
    data = datasets.Dataset.from_list(rows)
    found = reward(tmp_path / "reward", tiny_tokenizer, data=data).train_dataset
    settings = {"report_to": "none", "bf16": False, "use_cpu": True}
    compared = DPOTrainer(
        build_model(len(tiny_tokenizer)), args=DPOConfig(str(tmp_path / "dpo"), **settings), train_dataset=data,
        processing_class=tiny_tokenizer,
    ).train_dataset  # fmt: skip
    for side in SIDES:
        wholes = [row["prompt_ids"] + row[f"{side}_ids"] for row in compared]
        assert found[f"{side}_ids"][:] == wholes
    equal = datasets.Dataset.from_list([*rows, rows[0] | {"rejected": rows[0]["chosen"]}])
    assert len(reward(tmp_path / "equal", tiny_tokenizer, data=equal).train_dataset) == len(rows)
    other = [row | {side: row[side][1:] for side in SIDES} for row in rows]
    with raises(DataError, "row 0", "'prompt' is text", "Fix: convert the prompt to messages"):
        reward(tmp_path / "other", tiny_tokenizer, data=datasets.Dataset.from_list(other))


def test_a_pair_computes_its_prompt_once(tiny_tokenizer, tmp_path):
    trainer = reward(tmp_path, tiny_tokenizer)
    rows = list(trainer.train_dataset)
    batches = trainer.data_collator(rows)
    computed = sum(batch.num_tokens for batch in batches)
    assert computed < 0.75 * sum(len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows)
    for batch in batches:
        scores = forward(trainer.model.eval(), batch, frozenset({"scores"})).scores
        truth = sequence_scores(trainer.model, trainer.rows(rows))[:, 0][torch.tensor(batch.origin)]
        assert torch.allclose(scores, truth, atol=1e-5)


def test_padded_rows_keep_pairs_together_and_give_the_same_loss(tiny_tokenizer, tmp_path):
    from posttrain.data.forest import Layout

    losses = []
    for kind in ("tree", "padded"):
        trainer = reward(tmp_path, tiny_tokenizer)
        trainer.layout = Layout(kind, row_tokens=100)
        trainer.train()
        entry = trainer.state.log_history[0]
        losses.append((entry["loss"], entry["grad_norm"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("batch", "steps"), [(2, 4), (1, 8)])
def test_accumulation_does_not_change_the_update(tiny_tokenizer, tmp_path, batch, steps):
    results = []
    for size, gas in ((8, 1), (batch, steps)):
        trainer = reward(tmp_path, tiny_tokenizer, per_device_train_batch_size=size, gradient_accumulation_steps=gas)
        trainer.train()
        results.append((trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_t31_the_head_is_trained_and_saved_with_any_adapter_config(tiny_tokenizer, tmp_path):
    import peft

    base = tmp_path / "base"
    build_model(len(tiny_tokenizer)).save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    for task in (None, "SEQ_CLS", "CAUSAL_LM"):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type=task)
        torch.manual_seed(5)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        trainer = reward(tmp_path, tiny_tokenizer, model=model, peft_config=config, max_steps=3)
        assert config.modules_to_save is None or task == "SEQ_CLS"
        before = model.score.weight.clone() if hasattr(model.score, "weight") else None
        trainer.train()
        trainer.save_model(tmp_path / "out")
        ids = trainer.train_dataset[0]["chosen_ids"]
        trained = trainer.model.eval()(input_ids=torch.tensor([ids[:-1]])).logits.item()
        torch.manual_seed(9)  # Another random head, which the saved one must replace.
        fresh = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out").eval()
        assert loaded(input_ids=torch.tensor([ids[:-1]])).logits.item() == pytest.approx(trained, abs=1e-5), task
        assert before is None or not torch.equal(
            before, trainer.model.base_model.model.score.modules_to_save["default"].weight
        )


def test_an_adapter_without_modules_to_save_is_refused_with_one_that_trains_the_head(tiny_tokenizer, tmp_path):
    import peft

    for task in (None, "SEQ_CLS"):
        with raises(ConfigError, "TrainableTokensConfig", "trainable_token_indices=[5, 9]"):
            reward(
                tmp_path, tiny_tokenizer, peft_config=peft.TrainableTokensConfig(token_indices=[5, 9], task_type=task)
            )
        made = peft.get_peft_model(
            scorer(tiny_tokenizer), peft.TrainableTokensConfig(token_indices=[5, 9], task_type=task)
        )
        with raises(ConfigError, "TrainableTokensConfig", "pass the model without", "trainable_token_indices=[5, 9]"):
            reward(tmp_path, tiny_tokenizer, model=made)
    base = scorer(tiny_tokenizer)
    start = base.score.weight.clone()
    fix = peft.LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=[5, 9], task_type="SEQ_CLS")
    trainer = reward(tmp_path, tiny_tokenizer, model=base, peft_config=fix, max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    ids = torch.tensor([trainer.train_dataset[0]["chosen_ids"][:-1]])
    trained = trainer.model.eval()(input_ids=ids).logits.item()
    fresh = scorer(tiny_tokenizer)
    with torch.no_grad():
        fresh.score.weight.zero_()
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out").eval()
    head = loaded.base_model.model.score.modules_to_save["default"].weight
    assert loaded(input_ids=ids).logits.item() == pytest.approx(trained, abs=1e-5) and not torch.equal(head, start)


def test_a_ready_made_adapter_without_the_head_is_reported(tiny_tokenizer, tmp_path, caplog):
    import peft

    for task, words in (("SEQ_CLS", False), (None, True)):
        caplog.clear()
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type=task)
        reward(tmp_path, tiny_tokenizer, model=peft.get_peft_model(scorer(tiny_tokenizer), config))
        assert ("neither trained nor saved" in caplog.text) is words


def test_a_model_given_as_a_string_gets_a_seeded_head(tiny_tokenizer, tiny_model_dir, tmp_path):
    heads = []
    for seed in (1, 1, 2):
        trainer = reward(tmp_path, tiny_tokenizer, model=tiny_model_dir, seed=seed)
        heads.append(trainer.model.score.weight.clone())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert trainer.model.config.num_labels == 1


def test_predictions_are_pairs_in_the_order_of_the_dataset(tiny_tokenizer, tmp_path):
    seen = {}

    def metrics(prediction):
        seen["predictions"], seen["labels"] = prediction
        return {"better": float((prediction.predictions[:, 0] > prediction.predictions[:, 1]).mean())}

    trainer = reward(
        tmp_path, tiny_tokenizer, eval_dataset=pairs(8), per_device_eval_batch_size=3, compute_metrics=metrics
    )
    found = trainer.evaluate()
    truth = [
        [alone(trainer.model, row[f"{side}_ids"]) for side in ("chosen", "rejected")] for row in trainer.eval_dataset
    ]
    assert np.allclose(seen["predictions"], truth, atol=1e-4)
    assert seen["labels"].tolist() == [0] * 8
    assert found["eval_better"] == pytest.approx(found["eval_accuracy"])


def test_conversations_implicit_prompts_and_token_columns_are_read(tiny_tokenizer, tmp_path):
    user, good, bad = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "assistant", "content": "5"},
    )
    explicit = datasets.Dataset.from_list([{"prompt": [user], "chosen": [good], "rejected": [bad]}])
    implicit = datasets.Dataset.from_list([{"chosen": [user, good], "rejected": [user, bad]}])
    a, b = (reward(tmp_path, tiny_tokenizer, data=d).train_dataset[0] for d in (explicit, implicit))
    assert a == b
    assert tiny_tokenizer.decode(a["chosen_ids"]).count("<|im_end|>") == 2
    old = datasets.Dataset.from_dict({"chosen_input_ids": [[5, 6]], "rejected_input_ids": [[5, 7]]})
    assert reward(tmp_path, tiny_tokenizer, data=old).train_dataset[0] == {"chosen_ids": [5, 6], "rejected_ids": [5, 7]}


def test_equal_and_overlong_pairs_are_dropped_and_counted(tiny_tokenizer, tmp_path, caplog):
    rows = [{"chosen": "a", "rejected": "b"}, {"chosen": "c", "rejected": "c"}, {"chosen": "d " * 60, "rejected": "e"}]
    trainer = reward(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), max_length=30)
    assert len(trainer.train_dataset) == 1
    assert "dropped 2 of 3 rows (1 with two equal answers, 1 longer than max_length=30)" in caplog.text
    with raises(DataError, "1"):
        reward(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows[1:2]))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"chosen": "a", "rejected": ""}, "row 0: column 'rejected' is empty"),
        ({"text": "a"}, "need 'chosen' and 'rejected'"),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}, "row 0: column 'prompt' is text .'q'."),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"}, "must both be strings"),
        ({"chosen": 1, "rejected": 2}, "row 0: column 'chosen' must be a string or a list of messages, not int: '1'"),
        ({"chosen": "a", "rejected": "b", "margin": "c"}, "row 0: column 'margin' must contain a finite number .* it contains 'c'"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "row 0: column 'margin' must contain a finite .* it contains nan"),
        ({"chosen_ids": [5], "rejected_ids": [9999]}, "row 0: column 'rejected_ids' contains the id 9999"),
        ({"chosen_ids": [], "rejected_ids": [5]}, "all 1 rows .* dropped: 1 with an answer without tokens"),
        ({"chosen": "a", "rejected": "b", "image": "x"}, "train rows have images"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tiny_tokenizer, tmp_path, row, match):
    with pytest.raises(DataError, match=match):
        reward(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list([row]))


def test_bad_streams_are_refused_before_anything_is_loaded(tiny_tokenizer):
    def stream(*rows):
        return datasets.IterableDataset.from_generator(lambda: iter(rows))

    with raises(DataError, "2", "max_length=16"):
        prepare_reward_dataset(stream(*[{"chosen": "abc " * 60, "rejected": "b"}] * 2), tiny_tokenizer, max_length=16)
    with raises(DataError, "row 1"):
        prepare_reward_dataset(
            stream({"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "\ud800"}), tiny_tokenizer
        )
    with raises(DataError, "row 1", "'margin'"):
        rows = [{"chosen": "a", "rejected": "b", "margin": 1.0}, {"chosen": "a", "rejected": "b", "margin": None}]
        prepare_reward_dataset(datasets.Dataset.from_list(rows), tiny_tokenizer)


def test_a_data_collator_of_pairs_gives_the_same_loss(tiny_tokenizer, tmp_path):
    from posttrain import DataCollatorForReward

    logs = []
    for collator in (None, DataCollatorForReward(pad_token_id=9)):
        trainer = reward(
            tmp_path / str(bool(collator)), tiny_tokenizer, data=pairs(margin=True), data_collator=collator
        )
        trainer.train()
        logs.append([trainer.state.log_history[0][name] for name in ("loss", "accuracy", "margin", "num_tokens")])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


def test_every_metric_is_logged_in_training_and_evaluation(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "max_length=0", "1"):
        RewardConfig(str(tmp_path), max_length=0)
    trainer = reward(tmp_path, tiny_tokenizer, eval_dataset=pairs(3), max_length=64)
    trainer.train()
    own = {"accuracy", "tie_rate", "margin", "min_reward", "mean_reward", "max_reward"}
    entry = trainer.state.log_history[0]
    general = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "documents", "padding_share", "step_time"}
    assert own | general <= set(entry)
    assert entry["num_tokens"] == sum(len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in trainer.train_dataset)
    assert {f"eval_{name}" for name in (*own, "loss")} <= set(trainer.evaluate())


def test_a_model_with_another_number_of_labels_is_refused(tiny_tokenizer, tmp_path):
    with pytest.raises(ModelError, match="num_labels=3"):
        reward(tmp_path, tiny_tokenizer, model=scorer(tiny_tokenizer, labels=3))


def test_accuracy_rises_and_the_model_serves_as_a_reward_function(tiny_tokenizer, tmp_path):
    trainer = reward(tmp_path, tiny_tokenizer, max_steps=15, learning_rate=3e-3)
    trainer.train()
    assert trainer.state.log_history[-2]["accuracy"] == 1.0
    judge = ModelReward(trainer.model, tiny_tokenizer)
    rows = pairs()
    good = judge(prompts=rows["prompt"][:], completions=rows["chosen"][:])
    bad = judge(prompts=rows["prompt"][:], completions=rows["rejected"][:])
    assert np.mean(np.array(good) > np.array(bad)) > 0.8
