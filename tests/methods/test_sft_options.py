"""What SFT can be told to do, each against an independent computation or the model's own loss."""

import copy
import logging

import datasets
import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from posttrain import ConfigError, DataError, PosttrainError, SFTConfig
from posttrain.data.forest import Layout
from posttrain.data.sft import document_rows
from posttrain.loop.build import refuse_untrainable
from tests.conftest import build_model
from tests.methods.helpers import chats, losses, sft, weights
from tests.wordings import raises

ONE = {"max_steps": 1, "per_device_train_batch_size": 12}


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        ("cosine", {"cycles": 2}, "num_cycles"),
        ("cosine", {"num_cycles": "two"}, "'two'"),
        ("warmup_stable_decay", None, "num_decay_steps"),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("reduce_lr_on_plateau", {"mode": "middle"}, "patience"),
    ],
)
def test_arguments_that_a_schedule_does_not_take_are_refused_by_the_config(kind, given, value, tmp_path):
    with raises(ConfigError, f"lr_scheduler_type={kind!r}", value):
        SFTConfig(str(tmp_path), use_cpu=True, eval_strategy="epoch", lr_scheduler_type=kind, lr_scheduler_kwargs=given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("linear", None),
        ("constant", {"anything": 1}),
        ("cosine", '{"num_cycles": 2}'),
        ("warmup_stable_decay", {"num_decay_steps": 3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("reduce_lr_on_plateau", {"min_lr": [0.0, 0.0]}),
    ],
)
def test_arguments_that_a_schedule_takes_are_accepted(kind, given, tmp_path):
    assert (
        SFTConfig(
            str(tmp_path), use_cpu=True, eval_strategy="epoch", lr_scheduler_type=kind, lr_scheduler_kwargs=given
        ).max_steps
        == -1
    )


def rows_of(trainer):
    return [(torch.tensor([r["input_ids"]]), torch.tensor([r["labels"]])) for r in trainer.train_dataset]


def mean_over_tokens(model, rows, loss_of=None):
    """The reference: each row alone through the model's own forward, summed and divided by all trained tokens."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            keep = labels[0, 1:] != -100
            total += float(loss_of(logits[keep], labels[0, 1:][keep]).sum())
            count += int(keep.sum())
    return total / count


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packed_rows_train_on_the_same_tokens_as_loose_ones(tiny_tokenizer, tmp_path, strategy):
    """One batch that holds the whole set: packing must not change loss or gradient when no document is cut."""
    loose = sft(tmp_path, tiny_tokenizer, **ONE)
    packed = sft(tmp_path, tiny_tokenizer, packing=True, packing_strategy=strategy, max_length=128, **ONE)
    assert len(packed.train_dataset) < len(loose.train_dataset)
    for trainer in (loose, packed):
        trainer.train()
    assert losses(packed)[0] == pytest.approx(losses(loose)[0], rel=1e-6)
    assert packed.state.log_history[0]["grad_norm"] == pytest.approx(loose.state.log_history[0]["grad_norm"], rel=1e-5)
    assert packed.counters == loose.counters


def test_t14_evaluation_may_be_packed_without_training_and_packed_rows_are_final(tiny_tokenizer, tmp_path):
    plain = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(9)).evaluate()
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(9), eval_packing=True, max_length=128)
    assert "seq_lengths" in trainer.eval_dataset.column_names
    assert "seq_lengths" not in trainer.train_dataset.column_names
    again = trainer.evaluate(trainer.eval_dataset)
    for metrics in (trainer.evaluate(), again, trainer.evaluate(chats(9))):
        assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_t26_several_evaluation_sets_do_not_clobber_each_other(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset={"short": chats(3), "long": chats(12)})
    metrics = trainer.evaluate()
    assert metrics["eval_short_loss"] != metrics["eval_long_loss"]
    assert {"eval_short_mean_token_accuracy", "eval_long_mean_token_accuracy"} <= set(metrics)
    alone = trainer.evaluate("short")
    assert alone["eval_loss"] == pytest.approx(metrics["eval_short_loss"], rel=1e-6)


def test_label_smoothing_is_what_transformers_computes(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, label_smoothing_factor=0.1, **ONE)
    model, rows = build_model(len(tiny_tokenizer)), rows_of(trainer)

    def smoothed(logits, labels):
        return LabelSmoother(0.1)({"logits": logits[None]}, labels[None]) * len(labels)

    expected = mean_over_tokens(model, rows, smoothed)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(expected, rel=1e-5)


def test_t18_a_user_s_loss_sees_logits_and_labels(tiny_tokenizer, tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        flat = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
        return cross_entropy(flat, labels[:, 1:].reshape(-1)).sum() / num_items_in_batch

    # Steps as long as gradients: Adam's first step of a gradient near zero is as long as any, whatever its sign.
    plain = sft(tmp_path, tiny_tokenizer, **ONE, optim="sgd")
    mine = sft(tmp_path, tiny_tokenizer, compute_loss_func=loss, **ONE, optim="sgd")
    for trainer in (plain, mine):
        trainer.train()
    assert losses(mine)[0] == pytest.approx(losses(plain)[0], rel=1e-5)
    assert torch.allclose(weights(mine), weights(plain), atol=1e-5)
    with raises(ConfigError, "loss_type='dft'", "compute_loss_func"):
        sft(tmp_path, tiny_tokenizer, loss_type="dft", compute_loss_func=loss)


def test_t18_user_metrics_see_predictions_in_the_order_of_the_dataset(tiny_tokenizer, tmp_path):
    seen = {}

    def metrics(prediction):
        seen["shape"], seen["labels"] = prediction.predictions.shape, prediction.label_ids
        hits = (prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])[prediction.label_ids[:, 1:] != -100]
        return {"accuracy": float(hits.mean())}

    trainer = sft(
        tmp_path,
        tiny_tokenizer,
        eval_dataset=chats(5),
        per_device_eval_batch_size=2,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    found = trainer.evaluate()
    assert found["eval_accuracy"] == pytest.approx(found["eval_mean_token_accuracy"], abs=1e-6)
    lengths = [len(r["input_ids"]) for r in trainer.eval_dataset]
    assert seen["shape"] == (5, max(lengths))
    for row, label in zip(trainer.eval_dataset, seen["labels"], strict=True):
        assert label[: len(row["input_ids"])][1:].tolist() == row["labels"][1:]
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (5, max(lengths))


def experts(tokenizer, kind, **more):
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shared = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 2, "eos_token_id": 2,
        "sliding_window": None, "max_position_embeddings": 512,
    }  # fmt: skip
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**shared, num_local_experts=4, **more)).eval()
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shared, num_experts=4, moe_intermediate_size=24, head_dim=8, **more)
    ).eval()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
def test_t12_the_experts_balance_has_its_coefficient_and_no_factor_of_accumulation(tiny_tokenizer, tmp_path, kind):
    row = chats(6).select([5, 5])  # Equal rows: however they are split, every pass has the same balance.
    found = {}
    for batch, steps in ((2, 1), (1, 2)):
        model = experts(tiny_tokenizer, kind)
        trainer = sft(
            tmp_path, tiny_tokenizer, model=model, data=row, router_aux_loss_coef=0.7, max_steps=1,
            per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
        )  # fmt: skip
        ((ids, labels), _) = rows_of(trainer)
        own = experts(tiny_tokenizer, kind, router_aux_loss_coef=0.7)(
            input_ids=ids, labels=labels, output_router_logits=True
        )
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["loss"] == pytest.approx(float(own.loss), rel=1e-5)
        assert entry["aux_loss"] == pytest.approx(float(own.aux_loss), rel=1e-5)
        found[batch] = entry["grad_norm"]
    assert found[1] == pytest.approx(found[2], rel=1e-4)


def test_t12_a_coefficient_without_a_router_is_refused_and_zero_switches_it_off(tiny_tokenizer, tmp_path):
    with raises(ConfigError, "router_aux_loss_coef=0.1"):
        sft(tmp_path, tiny_tokenizer, router_aux_loss_coef=0.1)
    off = sft(tmp_path, tiny_tokenizer, model=experts(tiny_tokenizer, "mixtral"), router_aux_loss_coef=0.0, max_steps=1)
    off.train()
    assert "aux_loss" not in off.state.log_history[0]


@pytest.mark.parametrize("kind", ["prompt", "p", "prefix"])
def test_prompt_learning_trains_its_virtual_tokens_and_the_model_s_own_loss(tiny_tokenizer, tmp_path, kind):
    import peft

    config = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "p": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }[kind]
    trainer = sft(tmp_path, tiny_tokenizer, peft_config=config, gradient_checkpointing=False, **ONE)
    total, count = 0.0, 0
    with torch.no_grad():
        trainer.model.eval()
        for ids, labels in rows_of(trainer):
            n = int((labels[0, 1:] != -100).sum())
            labels[0, 0] = -100
            # Behind virtual tokens the first token has a predecessor; ours trains what has one without them.
            total += float(trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss) * n
            count += n
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(total / count, rel=1e-4)
    assert all(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if p.requires_grad)


def test_virtual_tokens_count_in_the_experts_balance_as_in_the_model_s_own(tiny_tokenizer, tmp_path):
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = sft(
        tmp_path, tiny_tokenizer, model=experts(tiny_tokenizer, "mixtral"), data=chats(2), peft_config=config,
        gradient_checkpointing=False, per_device_train_batch_size=2, max_steps=1,
    )  # fmt: skip
    (batch,) = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        own = trainer.model(input_ids=batch.input_ids, attention_mask=batch.real.long(), output_router_logits=True)
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(float(own.aux_loss), rel=1e-5)


def test_a_deep_copy_of_a_model_that_was_trained_in_bfloat16_computes_with_its_own_weights(tiny_tokenizer, tmp_path):
    """Where its user calls it, as an average of weights; one that ran the policy's layers would answer as the policy."""
    trainer = sft(tmp_path, tiny_tokenizer, bf16=True, max_steps=1)
    trainer.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        twin, before = copy.deepcopy(trainer.model), trainer.model(input_ids=ids).logits
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(input_ids=ids).logits.any()
        assert torch.equal(trainer.model(input_ids=ids).logits, before)


def test_means_of_each_process_alone_are_not_there_and_that_is_told(tiny_tokenizer, tmp_path, caplog, monkeypatch):
    trainer = sft(tmp_path, tiny_tokenizer, average_tokens_across_devices=False)
    assert "average_tokens_across_devices" not in caplog.text  # One process: both are the same.
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    refuse_untrainable(trainer.method.traits, "SFTTrainer", "x", trainer.args, trainer.train_dataset, None)
    assert "average_tokens_across_devices=False" in caplog.text


def test_t22_packing_with_prompt_learning_is_refused(tiny_tokenizer, tmp_path):
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with raises(ConfigError, "packing=True"):
        sft(tmp_path, tiny_tokenizer, peft_config=config, packing=True)


class Poison(TrainerCallback):
    """Makes the gradient of some steps infinite."""

    def __init__(self, steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass

    def on_step_begin(self, args, state, control, model, **kwargs):
        first = next(iter(model.parameters()))
        self.handle = first.register_hook(lambda g: g * float("inf")) if state.global_step in self.steps else None

    def on_step_end(self, *args, **kwargs):
        if self.handle:
            self.handle.remove()


def test_t15_a_gradient_that_is_not_finite_is_skipped_and_three_end_the_run(tiny_tokenizer, tmp_path, caplog):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=3, callbacks=[Poison({1})])
    trainer.train()
    assert torch.isfinite(weights(trainer)).all()
    assert "step 2: the gradient norm is" in caplog.text
    stuck = sft(tmp_path, tiny_tokenizer, max_steps=6, callbacks=[Poison({1, 2, 3})])
    with raises(PosttrainError, "3"):
        stuck.train()
    assert torch.isfinite(weights(stuck)).all()


def test_neftune_adds_noise_in_training_alone(tiny_tokenizer, tmp_path):
    plain = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(4), **ONE)
    noisy = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(4), neftune_noise_alpha=5.0, **ONE)
    assert plain.evaluate()["eval_loss"] == pytest.approx(noisy.evaluate()["eval_loss"], rel=1e-6)
    for trainer in (plain, noisy):
        trainer.train()
    assert abs(losses(plain)[0] - losses(noisy)[0]) > 1e-4


@pytest.mark.parametrize("form", ["tree", "padded"])
def test_neftune_noise_in_training_is_that_of_each_document_alone(tiny_tokenizer, tmp_path, form):
    """Documents of 8 and 40 tokens in one batch: at most alpha / sqrt(L d), and nearly reached."""
    texts = datasets.Dataset.from_dict({"input_ids": [[5 + i] * n for i, n in enumerate((8, 8, 40, 8))]})
    trainer = sft(tmp_path, tiny_tokenizer, data=texts, neftune_noise_alpha=5.0, max_steps=1, learning_rate=0.0)
    if form == "padded":
        trainer.layout = Layout("padded", row_tokens=4096)
    embeddings, largest = trainer.model.get_input_embeddings(), {}
    clean = embeddings.weight.detach().clone()

    def look(module, args, kwargs):
        if trainer.model.training and "ids" in largest:
            noise = (args[0].detach() - clean[largest["ids"]]).abs().amax(-1)
            for n, ids in ((8, (5, 6, 8)), (40, (7,))):
                inside = torch.isin(largest["ids"], torch.tensor(ids))
                largest[n] = max(largest.get(n, 0.0), float(noise[inside].max()))

    embeddings.register_forward_pre_hook(lambda module, args: largest.update(ids=args[0]))
    trainer.model.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    for n in (8, 40):
        assert 0.95 < largest[n] / (5.0 / (n * clean.shape[1]) ** 0.5) <= 1.0 + 1e-4


def test_dft_is_half_the_cross_entropy_at_even_odds():
    """V = 2 and equal logits: p = 1/2, so -sg(p) log p is half of -log p."""
    from posttrain.losses.likelihood import dft, nll

    logp = torch.tensor([[0.5]]).log()
    assert float(dft(logp)) == pytest.approx(0.5 * float(nll(logp)))


def test_rows_that_skip_preparation_need_labels(tiny_tokenizer, tmp_path):
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    good = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[-100, 6, 7]]})
    trainer = sft(tmp_path, tiny_tokenizer, data=good, **skip, max_steps=1)
    trainer.train()
    bad = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7]], "completion_mask": [[0, 1, 1]]})
    with raises(DataError, "completion_mask"):
        sft(tmp_path, tiny_tokenizer, data=bad, **skip)


@pytest.mark.parametrize("row", [1, 40])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"input_ids": []}, r"\[0, 3\] entries"),
        ({"input_ids": None}, "input_ids"),
        ({"labels": [-100, 6]}, r"\[3, 2\] entries"),
        ({"labels": None}, r"\[3, 0\] entries"),
        ({"input_ids": [5, 6, 10**6]}, "the id 1000000"),
    ],
)
def test_rows_that_skip_preparation_are_refused_with_their_number(changed, said, row, tiny_tokenizer, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]} for _ in range(48)]
    rows[row] |= changed
    where = "train row" if "1000000" in said else f"train row {row}: "
    with pytest.raises(DataError, match=rf"{where}.*{said}"):
        sft(
            tmp_path,
            tiny_tokenizer,
            data=datasets.Dataset.from_list(rows),
            dataset_kwargs={"skip_prepare_dataset": True},
        )


def test_a_row_of_a_stream_with_labels_of_another_length_is_an_error():
    with raises(DataError, "row 1"):
        document_rows([{"input_ids": [5, 6]}, {"input_ids": [5, 6, 7], "labels": [-100, 6]}])


def test_a_transform_would_be_frozen_and_is_refused(tiny_tokenizer, tmp_path):
    data = chats(4).with_transform(lambda batch: batch)
    with pytest.raises(DataError, match=r"with_transform.*skip_prepare_dataset"):
        sft(tmp_path, tiny_tokenizer, data=data)


def test_the_end_token_is_set_everywhere_it_is_read(tiny_tokenizer, tmp_path):
    model = build_model(len(tiny_tokenizer))
    trainer = sft(tmp_path, tiny_tokenizer, model=model, eos_token="<|endoftext|>")
    assert trainer.train_dataset[0]["input_ids"][-1] == 0
    assert model.config.eos_token_id == 0
    assert model.generation_config.eos_token_id == [2, 0]
    with raises(ConfigError, "eos_token='<nope>'"):
        sft(tmp_path, tiny_tokenizer, eos_token="<nope>")


def test_a_template_file_replaces_the_template_and_a_missing_one_is_told(tiny_tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}")
    rows = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "hi"}]}])
    trainer = sft(tmp_path, tiny_tokenizer, data=rows, chat_template_path=str(file))
    assert tiny_tokenizer.decode(trainer.train_dataset[0]["input_ids"]) == "[user]hi<|im_end|>"
    with raises(ConfigError):
        sft(tmp_path, tiny_tokenizer, data=rows, chat_template_path="nowhere.jinja")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"packing": True, "max_length": None}, "max_length is None"),
        ({"packing_strategy": "bdf"}, "did you mean 'bfd'"),
        ({"ddp_backend": "glooo"}, r"ddp_backend='glooo' is not known \(did you mean 'gloo'\?\)"),
        ({"ddp_backend": "cpu:gloo,cuda:ncc"}, "ddp_backend='ncc' is not known"),
        ({"adam_beta2": 1.5}, "adam_beta2=1.5 must be a finite number of at least 0 and below 1"),
        ({"adam_beta1": -0.1}, "adam_beta1=-0.1 must be"),
        ({"adam_epsilon": -1.0}, "adam_epsilon=-1.0 must be a finite number of at least 0"),
        ({"max_length": 0}, "max_length=0"),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "smoothing is only defined for"),
        ({"dataset_kwargs": {"special": False}}, r"unknown keys \['special'\]"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        SFTConfig(str(tmp_path), **settings)


def test_a_process_group_needs_several_processes(tmp_path):
    assert SFTConfig(str(tmp_path), ddp_backend="gloo").ddp_backend is None


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_another_precision_for_evaluation_is_ignored_with_a_warning(name, tmp_path, caplog):
    assert getattr(SFTConfig(str(tmp_path), **{name: True}), name) is False
    assert f"{name}=True is ignored" in caplog.text and f"set {name[:4]}=True" in caplog.text


def test_the_old_name_of_a_strategy_is_understood(tmp_path):
    with pytest.warns(FutureWarning, match="bfd_split"):
        assert SFTConfig(str(tmp_path), packing_strategy="bfd-requeue").packing_strategy == "bfd_split"


def test_sharegpt_and_template_arguments_of_a_row_reach_the_tokens(tiny_tokenizer, tmp_path):
    tiny_tokenizer.chat_template = "{{ greeting }}" + tiny_tokenizer.chat_template
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = datasets.Dataset.from_list([{"conversations": turns, "chat_template_kwargs": {"greeting": "Hi!"}}])
    trainer = sft(tmp_path, tiny_tokenizer, data=rows)
    text = tiny_tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert text.startswith("Hi!<|im_start|>user\nq")
    assert "assistant\na<|im_end|>" in text


def test_t8_a_prompt_that_renders_differently_is_cut_where_tokens_part_and_refused_when_lost(
    tiny_tokenizer, tmp_path, caplog
):
    question, answer = [{"role": "user", "content": "What is 2?"}], [{"role": "assistant", "content": "two"}]
    rows = datasets.Dataset.from_list([{"prompt": question, "completion": answer}] * 3)
    plain = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = plain.replace("assistant\n' }}{%- endif %}", "assistant\n<think>' }}{%- endif %}")
    with caplog.at_level(logging.WARNING):
        trainer = sft(tmp_path, tiny_tokenizer, data=rows)
    assert "in 3 of 3 rows, the end of the prompt" in caplog.text
    assert "<think>" in caplog.text
    labels = [t for t in trainer.train_dataset[0]["labels"] if t != -100]
    assert tiny_tokenizer.decode(labels).startswith("two<|im_end|>")
    tiny_tokenizer.chat_template = "{% if add_generation_prompt %}now {% endif %}" + plain
    with raises(DataError, "3"):
        sft(tmp_path, tiny_tokenizer, data=rows)


def test_t23_assistant_only_without_a_trained_end_is_refused_unless_allowed(tiny_tokenizer, tmp_path):
    inner, outer = "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{- '<|im_end|>' }}"
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace(inner, outer)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = datasets.Dataset.from_list([{"messages": turns}])
    with raises(DataError):
        sft(tmp_path, tiny_tokenizer, data=rows, assistant_only_loss=True)
    sft(tmp_path, tiny_tokenizer, data=rows, assistant_only_loss=True, allow_untrained_stop=True)


def test_preparing_in_batches_equals_row_by_row(tiny_tokenizer, tmp_path):
    rng = np.random.default_rng(0)
    words = [" ".join(map(str, rng.integers(0, 50, rng.integers(1, 9)))) for _ in range(30)]
    whole = sft(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_dict({"prompt": words, "completion": words}))
    for i, row in enumerate(whole.train_dataset):
        one = datasets.Dataset.from_dict({"prompt": [words[i]], "completion": [words[i]]})
        assert sft(tmp_path, tiny_tokenizer, data=one).train_dataset[0] == row
        if i == 4:
            break


def test_a_template_without_markers_is_replaced_for_tokenising_alone(tiny_tokenizer, tmp_path):
    """ChatML is recognised by what it renders; the tokenizer that is saved keeps the template it came with."""
    own = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tiny_tokenizer.chat_template = own
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "first"}]
    turns += [{"role": "user", "content": "r"}, {"role": "assistant", "content": "second"}]
    rows = datasets.Dataset.from_list([{"messages": turns}])
    trainer = sft(tmp_path, tiny_tokenizer, data=rows, assistant_only_loss=True)
    labels = [t for t in trainer.train_dataset[0]["labels"] if t != -100]
    assert tiny_tokenizer.decode(labels) == "first<|im_end|>second<|im_end|>"
    assert trainer.processing_class.chat_template == own


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_data_collator_of_the_user_shapes_the_rows_and_the_loss_is_the_same(tiny_tokenizer, tmp_path, padding_free):
    from posttrain import DataCollatorForLanguageModeling

    own = DataCollatorForLanguageModeling(tiny_tokenizer.pad_token_id, padding_free=padding_free)
    runs = [sft(tmp_path / str(bool(c)), tiny_tokenizer, data_collator=c, seed=3) for c in (None, own)]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)
    with raises(ConfigError, "packing=True", "data_collator"):
        sft(tmp_path, tiny_tokenizer, data_collator=own, packing=True)


def test_a_data_collator_that_leaves_padding_unmarked_is_refused(tiny_tokenizer, tmp_path):
    def bare(examples):
        return {"input_ids": torch.tensor([[1, 2]])}

    with raises(DataError, "data_collator", "'input_ids'", "input_ids", "attention_mask"):
        sft(tmp_path, tiny_tokenizer, data_collator=bare).train()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_option_pad_token_sets_the_pad_token(tiny_tokenizer, tmp_path):
    trainer = sft(tmp_path, tiny_tokenizer, pad_token="<|endoftext|>")
    assert trainer.processing_class.pad_token == "<|endoftext|>"
    assert trainer.model.config.pad_token_id == trainer.processing_class.pad_token_id == 0
    with raises(ConfigError, "pad_token='<nope>'"):
        sft(tmp_path, tiny_tokenizer, pad_token="<nope>")
