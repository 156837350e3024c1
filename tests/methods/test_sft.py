"""SFT end to end on a two-layer model: what is trained, what is counted, what is refused."""

import logging

import datasets
import pytest
import torch

from posttrain import ConfigError, DataError, SFTConfig, SFTTrainer
from posttrain.data.sft import SupervisedOptions, prepare_sft_dataset
from tests.conftest import build_model
from tests.methods.helpers import chats, losses, sft, weights
from tests.wordings import raises

MESSAGES = [
    {"role": "user", "content": "What is 2?"},
    {"role": "assistant", "content": "A number."},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "The same."},
]


def prepared(rows, tokenizer, formatting_func=None, **options):
    data = datasets.Dataset.from_list(rows)
    return prepare_sft_dataset(data, tokenizer, SupervisedOptions(**options), formatting_func=formatting_func)[0]


def trained_text(row, tokenizer):
    return tokenizer.decode([t for t in row["labels"] if t != -100])


def test_loss_falls_and_metrics_are_logged(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=12)
    trainer.train()
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]
    names = {"loss", "grad_norm", "learning_rate", "epoch", "entropy", "mean_token_accuracy", "num_tokens", "step_time"}
    assert names | {"documents", "trained_tokens", "padding_share"} <= set(trainer.state.log_history[0])


def test_metrics_equal_what_the_model_s_own_logits_say(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=1, per_device_train_batch_size=12, eval_dataset=chats(5))
    model, entropy, hits, count = build_model(len(tiny_tokenizer)), 0.0, 0, 0
    for row in trainer.train_dataset:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"])[1:]
        keep = labels != -100
        entropy += torch.distributions.Categorical(logits=logits[keep]).entropy().sum().item()
        hits, count = hits + int((logits.argmax(-1) == labels)[keep].sum()), count + int(keep.sum())
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["entropy"] == pytest.approx(entropy / count, rel=1e-5)
    assert entry["mean_token_accuracy"] == pytest.approx(hits / count, abs=1e-6)
    assert (entry["trained_tokens"], entry["documents"]) == (count, 12)
    assert entry["num_tokens"] == sum(map(len, trainer.train_dataset["input_ids"]))
    found = trainer.evaluate()
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"} <= set(found)
    assert found["eval_num_tokens"] == entry["num_tokens"]  # The running total; evaluation adds nothing.


def test_the_first_loss_is_the_plain_mean_over_trained_tokens(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=1, per_device_train_batch_size=12)
    model, nll, count = build_model(len(tiny_tokenizer)), 0.0, 0
    for row in trainer.train_dataset:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
        keep = labels[1:] != -100
        nll, count = nll - logp[keep].sum().item(), count + int(keep.sum())
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(nll / count, rel=1e-5)


def test_accumulation_does_not_change_the_update(tiny_tokenizer, tmp_path):
    results = []
    for batch, steps in ((8, 1), (4, 2), (1, 8)):
        trainer = sft(
            tmp_path, tiny_tokenizer, per_device_train_batch_size=batch, gradient_accumulation_steps=steps, max_steps=1
        )
        trainer.train()
        results.append((losses(trainer)[0], trainer.state.log_history[0]["grad_norm"]))
    for loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_tokenizer, tmp_path):
    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 4,
    }
    whole, part = sft(tmp_path / "a", tiny_tokenizer, **settings), sft(tmp_path / "b", tiny_tokenizer, **settings)
    whole.train()
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert losses(whole) == losses(part)
    assert torch.equal(weights(whole), weights(part))
    assert whole.counters == part.counters


def test_evaluation_does_not_depend_on_its_batch_size(tiny_tokenizer, tmp_path):
    metrics = []
    for size in (1, 5):
        trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(7), per_device_eval_batch_size=size)
        metrics.append(trainer.evaluate())
    assert metrics[0]["eval_loss"] == pytest.approx(metrics[1]["eval_loss"], rel=1e-6)
    assert metrics[0]["eval_mean_token_accuracy"] == pytest.approx(metrics[1]["eval_mean_token_accuracy"])


def test_lora_trains_the_adapter_alone_under_checkpointing(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = sft(tmp_path, tiny_tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), max_steps=2)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]) != ("lora" in name), name


def test_completion_only_trains_the_completion_and_one_eos(tiny_tokenizer):
    (row,) = prepared([{"prompt": "Say hi: ", "completion": "hi"}], tiny_tokenizer)
    assert trained_text(row, tiny_tokenizer) == "hi<|im_end|>"
    (row,) = prepared([{"prompt": "Say hi: ", "completion": "hi"}], tiny_tokenizer, completion_only_loss=False)
    assert trained_text(row, tiny_tokenizer) == "Say hi: hi<|im_end|>"


def test_the_boundary_is_where_the_tokens_part(tiny_tokenizer):
    """'The sum' + 'mary' merges over the boundary in many tokenizers: the merged token belongs to the completion."""
    (row,) = prepared([{"prompt": "What is the", "completion": "se numbers"}], tiny_tokenizer)
    text = trained_text(row, tiny_tokenizer)
    assert text.endswith("se numbers<|im_end|>")
    assert tiny_tokenizer.decode(row["input_ids"]) == "What is these numbers<|im_end|>"


def test_plain_text_of_a_custom_column_ends_in_one_eos(tiny_tokenizer):
    rows = prepared([{"story": "once"}, {"story": "once<|im_end|>"}], tiny_tokenizer, dataset_text_field="story")
    for row in rows:
        assert tiny_tokenizer.decode(row["input_ids"]) == "once<|im_end|>"
        assert row["labels"] == row["input_ids"]


@pytest.mark.parametrize("markers", [True, False])
def test_assistant_only_trains_each_answer_and_its_end_of_turn(tiny_tokenizer, markers):
    if not markers:
        tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("{% generation %}", "").replace(
            "{% endgeneration %}", ""
        )
    (row,) = prepared([{"messages": MESSAGES}], tiny_tokenizer, assistant_only_loss=True)
    assert trained_text(row, tiny_tokenizer) == "A number.<|im_end|>The same.<|im_end|>"


def test_chat_prompt_completion_masks_the_prompt(tiny_tokenizer):
    (row,) = prepared([{"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]}], tiny_tokenizer)
    assert trained_text(row, tiny_tokenizer).strip() == "A number.<|im_end|>"


def test_a_given_completion_mask_is_honoured(tiny_tokenizer):
    (row,) = prepared([{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}], tiny_tokenizer)
    assert row["labels"] == [-100, 6, 7]


def test_formatting_wins_over_other_columns(tiny_tokenizer):
    (row,) = prepared(
        [{"messages": MESSAGES, "x": "abc"}],
        tiny_tokenizer,
        formatting_func=lambda r: r["x"] + "!",
        dataset_text_field="t",
    )
    assert tiny_tokenizer.decode(row["input_ids"]) == "abc!<|im_end|>"


def test_cuts_and_drops_are_told_with_numbers(tiny_tokenizer, caplog):
    rows = [{"prompt": "long " * 30, "completion": "x"}, {"prompt": "a", "completion": "b " * 40}]
    with caplog.at_level(logging.WARNING):
        data = prepared(rows, tiny_tokenizer, max_length=20)
    assert len(data) == 1
    assert "dropped 1 of 2 rows" in caplog.text
    assert "2 of 2 rows were truncated to max_length=20" in caplog.text
    with raises(DataError, "1", "max_length"):
        prepared(rows[:1], tiny_tokenizer, max_length=20)


@pytest.mark.parametrize(
    ("rows", "options", "error", "match"),
    [
        ([{"messages": []}], {}, DataError, "row 0, column 'messages': it is"),
        ([{"other": "x"}], {}, DataError, r"row 0: the row needs one of: .*Its columns are \['other'\]"),
        ([{"text": "x"}], {"completion_only_loss": True}, DataError, "every token would be trained"),
        ([{"text": "x"}], {"assistant_only_loss": True}, DataError, "needs conversational rows"),
        ([{"input_ids": [1, 2], "completion_mask": [1]}], {}, DataError, "has 1 entries, .* 2 input_ids"),
        ([{"prompt": "a", "completion": ""}], {}, DataError, "all 1 rows .* dropped: 1 with an empty completion"),
    ],
)
def test_bad_rows_are_refused_by_index_and_column(tiny_tokenizer, rows, options, error, match):
    with pytest.raises(error, match=match):
        prepared(rows, tiny_tokenizer, **options)


def test_bad_arguments_are_refused(tiny_tokenizer, tmp_path):
    from posttrain import ArgumentTypeError

    args = SFTConfig(str(tmp_path), report_to="none")
    with raises(ArgumentTypeError):
        SFTTrainer(
            build_model(10),
            args,
            train_dataset=datasets.DatasetDict({"train": chats()}),
            processing_class=tiny_tokenizer,
        )
    with raises(ArgumentTypeError, "Dataset.from_list(rows)"):
        SFTTrainer(build_model(10), args, train_dataset=[*chats()], processing_class=tiny_tokenizer)
    with pytest.raises(DataError, match="train_dataset"):
        SFTTrainer(build_model(10), args, processing_class=tiny_tokenizer)
    with raises(ConfigError, "max_steps"):
        SFTTrainer(build_model(10), args, train_dataset=chats().to_iterable_dataset(), processing_class=tiny_tokenizer)
    with raises(ConfigError, "'nll'"):
        SFTConfig(str(tmp_path), loss_type="nl")
    with pytest.raises(ConfigError, match="special"):
        SFTConfig(str(tmp_path), dataset_kwargs={"special": False})


def test_a_stream_trains(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, data=chats().to_iterable_dataset())
    trainer.train()
    assert len(losses(trainer)) == 2


def test_defaults_are_the_peer_s(tmp_path):
    args = SFTConfig(str(tmp_path))
    expected = {
        "learning_rate": 2e-5,
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "dataset_text_field": "text",
        "completion_only_loss": None,
        "assistant_only_loss": False,
        "loss_type": "nll",
        "logging_steps": 10,
        "gradient_checkpointing": True,
    }
    assert {k: getattr(args, k) for k in expected} == expected
