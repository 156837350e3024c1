"""DPO end to end: every loss against an independent computation, references, sharing, refusals."""

import logging
import math
import re

import datasets
import pytest
import torch
from transformers import TrainerCallback

from posttrain import ConfigError, DataError, DPOConfig, DPOTrainer, ModelError
from posttrain.data.forest import Layout
from posttrain.losses.preference import DPO_LOSSES
from tests.conftest import build_masked_model, build_model
from tests.methods.helpers import losses, weights
from tests.wordings import raises


def pairs(count=8):
    """Long prompts, answers of uneven lengths on both sides."""
    rows = []
    for i in range(count):
        prompt = f"What is the sum of {i} and {i + 1}? The answer is a number. "
        rows.append(
            {"prompt": prompt, "chosen": " ".join(map(str, range(1 + i % 4))), "rejected": "a number is " * (1 + i % 3)}
        )
    return datasets.Dataset.from_list(rows)


def dpo(folder, tokenizer, model=None, data=None, ref_model=None, **settings):
    base = {
        "per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    keys = {k: settings.pop(k) for k in ("eval_dataset", "peft_config") if k in settings}
    return DPOTrainer(
        model if model is not None else build_model(len(tokenizer)), ref_model, DPOConfig(str(folder), **(base | settings)),
        train_dataset=data if data is not None else pairs(), processing_class=tokenizer, **keys,
    )  # fmt: skip


def sums(model, rows):
    """Summed log-probs of both answers of each pair, every sequence alone, from full logits."""
    out = {"chosen": [], "rejected": []}
    with torch.no_grad():
        for row in rows:
            for side, found in out.items():
                ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
                logp = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
                start = len(row["prompt_ids"])
                found.append(float(logp.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    return {side: torch.tensor(found) for side, found in out.items()}


INITIAL = {
    "sigmoid": math.log(2), "sigmoid_norm": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 25.0, "sppo_hard": 50.0,
    "nca_pair": 2 * math.log(2), "bco_pair": 2 * math.log(2), "apo_zero": 1.0, "apo_down": 1.0, "aot": math.log(2),
    "aot_unpaired": math.log(2), "discopop": 0.5 * math.log(2) + 0.5, "exo_pair": math.log(0.5) - 0.5 * math.log(0.1 * 0.9),
}  # fmt: skip


@pytest.mark.parametrize("loss_type", sorted(INITIAL))
def test_before_the_first_update_every_loss_has_its_known_value(tiny_tokenizer, tmp_path, loss_type):
    smooth = {"label_smoothing": 0.1} if loss_type in ("exo_pair",) else {}
    trainer = dpo(tmp_path, tiny_tokenizer, loss_type=loss_type, **smooth)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(INITIAL[loss_type], rel=1e-5)
    assert entry["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert entry["grad_norm"] > 0


def test_the_table_of_initial_values_knows_every_loss():
    assert set(INITIAL) | {"sft"} == set(DPO_LOSSES)


@pytest.mark.parametrize("build", [build_model, build_masked_model], ids=["the same", "takes no segments"])
def test_against_another_reference_loss_and_metrics_are_those_of_plain_sums(build, tiny_tokenizer, tmp_path):
    other = build(len(tiny_tokenizer), seed=3)
    trainer = dpo(tmp_path, tiny_tokenizer, ref_model=other, beta=0.3)
    rows = list(trainer.train_dataset)
    policy, reference = (
        sums(build_model(len(tiny_tokenizer)), rows),
        sums(build(len(tiny_tokenizer), seed=3), rows),
    )
    chosen, rejected = (0.3 * (policy[s] - reference[s]) for s in ("chosen", "rejected"))
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), rel=1e-4)
    assert entry["rewards/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert entry["rewards/margins"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
    assert entry["rewards/accuracies"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert entry["logps/rejected"] == pytest.approx(float(policy["rejected"].mean()), rel=1e-5)
    lengths = [len(row["chosen_ids"]) for row in rows]
    assert entry["completions/chosen_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_sft_is_the_mean_over_all_chosen_tokens_of_the_step(tiny_tokenizer, tmp_path):
    found = []
    for batch, steps in ((8, 1), (2, 4)):
        trainer = dpo(
            tmp_path, tiny_tokenizer, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
        )  # fmt: skip
        rows = list(trainer.train_dataset)
        nll = -sums(build_model(len(tiny_tokenizer)), rows)["chosen"].sum() / sum(len(r["chosen_ids"]) for r in rows)
        trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["loss"] == pytest.approx(math.log(2) + 0.5 * float(nll), rel=1e-5)
        assert entry["loss/sigmoid"] == pytest.approx(math.log(2), rel=1e-5)
        found.append(entry["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sigmoid_norm", "apo_down"])
def test_accumulation_and_layout_do_not_change_the_update(tiny_tokenizer, tmp_path, loss_type):
    found = []
    for batch, steps, kind in ((8, 1, "tree"), (1, 8, "tree"), (4, 2, "padded")):
        other = build_model(len(tiny_tokenizer), seed=3)
        trainer = dpo(
            tmp_path, tiny_tokenizer, ref_model=other, loss_type=loss_type, per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
        )  # fmt: skip
        trainer.layout = Layout(kind, row_tokens=150)
        trainer.train()
        entry = trainer.state.log_history[0]
        found.append((entry["loss"], entry["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)


def test_a_sorting_loss_sees_the_whole_micro_batch(tiny_tokenizer, tmp_path):
    other = build_model(len(tiny_tokenizer), seed=3)
    trainer = dpo(tmp_path, tiny_tokenizer, ref_model=other, loss_type="aot")
    rows = list(trainer.train_dataset)
    policy, reference = sums(build_model(len(tiny_tokenizer)), rows), sums(other, rows)
    u = (policy["chosen"] - policy["rejected"]).sort().values
    v = (reference["chosen"] - reference["rejected"]).sort().values
    trainer.layout = Layout("tree", row_tokens=60)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(float(-torch.nn.functional.logsigmoid(0.1 * (u - v)).mean()), rel=1e-4)


def test_wpo_weighs_pairs_out_of_place(tiny_tokenizer, tmp_path):
    for loss_type in ("sigmoid", "hinge"):
        trainer = dpo(tmp_path, tiny_tokenizer, loss_type=[loss_type, "sft"], use_weighting=True)
        trainer.train()
        assert 0 < trainer.state.log_history[0]["weights/mean"] < 10


def test_a_pair_computes_its_prompt_once(tiny_tokenizer, tmp_path):
    trainer = dpo(tmp_path, tiny_tokenizer)
    rows = list(trainer.train_dataset)
    computed = sum(batch.num_tokens for batch in trainer.data_collator(rows))
    whole = sum(2 * len(r["prompt_ids"]) + len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows)
    assert computed == whole - sum(len(r["prompt_ids"]) for r in rows)


@pytest.mark.parametrize("kind", ["tree", "padded"])
def test_num_tokens_counts_a_shared_prompt_with_each_answer(tiny_tokenizer, tmp_path, kind):
    trainer = dpo(tmp_path, tiny_tokenizer)
    trainer.layout = Layout(kind, row_tokens=400)  # Several trees a row.
    rows = list(trainer.train_dataset)
    trainer.train()
    whole = sum(2 * len(r["prompt_ids"]) + len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows)
    assert trainer.state.log_history[0]["num_tokens"] == whole


def test_p5_the_reference_is_the_model_that_was_given(tiny_tokenizer, tiny_model_dir, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    trainer = dpo(tmp_path, tiny_tokenizer, model=model)
    before = {n: p.clone() for n, p in trainer.reference.copy.named_parameters()}
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(math.log(2), rel=1e-5)
    assert all(torch.equal(p, before[n]) for n, p in trainer.reference.copy.named_parameters())
    assert "PT-P001" not in caplog.text


def test_the_first_batch_tells_a_reference_that_is_not_the_start(tiny_tokenizer, tmp_path, caplog):
    trainer = dpo(tmp_path, tiny_tokenizer)
    with torch.no_grad():
        next(iter(trainer.reference.copy.parameters())).mul_(1.5)
    trainer.train()
    assert "PT-P001: policy and reference differ by" in caplog.text
    assert re.search(r"the first loss is 0\.\d{4} instead of ln 2 = 0\.6931", caplog.text)
    assert "the reference has other weights, another dtype or active dropout" in caplog.text


def test_a_reference_of_the_user_s_choice_may_differ_and_is_told_as_information(tiny_tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dpo(tmp_path, tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer), seed=3)).train()
    [record] = [r for r in caplog.records if "PT-P001" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert "PT-P001" in record.getMessage()
    assert "instead of ln 2 = 0.6931" in record.getMessage()


def test_desensitised_precomputed_sums_are_no_mismatch(tiny_tokenizer, tmp_path, caplog):
    dpo(tmp_path, tiny_tokenizer, ld_alpha=0.5, precompute_ref_log_probs=True).train()
    assert "PT-P001" not in caplog.text


def plain_logits(model, row, side):
    """Mean over the vocabulary of the logits that predict each token of an answer."""
    ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, len(row["prompt_ids"]) - 1 : -1].mean(-1)


def test_logits_metrics_are_means_over_answer_tokens_of_full_logits(tiny_tokenizer, tmp_path):
    trainer = dpo(tmp_path, tiny_tokenizer, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    rows, model = list(trainer.train_dataset), build_model(len(tiny_tokenizer))
    expected = {s: float(torch.cat([plain_logits(model, r, s) for r in rows]).mean()) for s in ("chosen", "rejected")}
    trainer.train()
    entry = trainer.state.log_history[0]
    for side, value in expected.items():
        assert entry[f"logits/{side}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert entry["logits/chosen"] != pytest.approx(entry["logits/rejected"], rel=1e-3)


def test_sft_in_evaluation_is_a_mean_over_all_tokens_whatever_the_batch_size(tiny_tokenizer, tmp_path):
    found = []
    for size in (1, 3, 8):
        trainer = dpo(
            tmp_path,
            tiny_tokenizer,
            loss_type=["sigmoid", "sft"],
            eval_dataset=pairs(7),
            per_device_eval_batch_size=size,
        )
        found.append(trainer.evaluate())
    rows = list(trainer.eval_dataset)
    nll = -sums(build_model(len(tiny_tokenizer)), rows)["chosen"].sum() / sum(len(r["chosen_ids"]) for r in rows)
    for metrics in found:
        assert metrics["eval_loss"] == pytest.approx(math.log(2) + float(nll), rel=1e-5)
        assert metrics["eval_loss/sft"] == pytest.approx(float(nll), rel=1e-5)


def parameter_bytes():
    """Bytes of all parameters alive, tied and shared ones once."""
    import gc

    gc.collect()
    alive = [item for item in gc.get_objects() if type(item) in (torch.nn.Parameter,)]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in alive}.values())


def test_lora_adds_its_own_weights_to_memory_and_no_second_model(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    before = parameter_bytes()
    full = dpo(tmp_path, tiny_tokenizer)
    model = sum(p.nbytes for p in full.model.parameters())
    assert parameter_bytes() - before == 2 * model  # The policy and its frozen copy.
    del full
    before = parameter_bytes()
    lora = dpo(tmp_path, tiny_tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
    adapter = sum(p.nbytes for n, p in lora.model.named_parameters() if "lora_" in n)
    assert 0 < adapter < model / 10
    assert parameter_bytes() - before == model + adapter


def test_lora_has_no_second_model_and_starts_at_ln_2(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    trainer = dpo(tmp_path, tiny_tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), max_steps=3)
    assert trainer.reference.copy is None
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses(trainer)[2] < losses(trainer)[0]


def test_p6_an_adapter_whose_biases_move_cannot_be_its_own_reference(tiny_tokenizer, tmp_path):
    from peft import LoraConfig

    plain = build_model(len(tiny_tokenizer))
    plain.config.attention_bias = True
    biased, config = type(plain)(plain.config), LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    with pytest.raises(ModelError, match="bias='all'"):
        dpo(tmp_path, tiny_tokenizer, model=biased, peft_config=config)


@pytest.mark.parametrize("ld_alpha", [None, 0.5])
def test_precomputed_log_probs_give_the_same_run_and_need_no_reference(tiny_tokenizer, tmp_path, ld_alpha):
    found = []
    for precompute in (False, True, True):
        trainer = dpo(
            tmp_path,
            tiny_tokenizer,
            precompute_ref_log_probs=precompute,
            ld_alpha=ld_alpha,
            max_steps=3,
            eval_dataset=pairs(3),
        )
        assert (trainer.reference is None) == precompute
        trainer.train()
        found.append((losses(trainer), trainer.evaluate()["eval_loss"]))
    for run, evaluated in found[1:]:
        assert run == pytest.approx(found[0][0], rel=1e-5)
        assert evaluated == pytest.approx(found[0][1], rel=1e-5)


def test_ld_alpha_zero_ignores_what_is_longer(tiny_tokenizer, tmp_path):
    trainer = dpo(tmp_path, tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer), seed=3), ld_alpha=0.0)
    rows = list(trainer.train_dataset)
    cut = [
        r
        | {
            f"{s}_ids": r[f"{s}_ids"][: min(len(r["chosen_ids"]), len(r["rejected_ids"]))]
            for s in ("chosen", "rejected")
        }
        for r in rows
    ]
    expected = sums(build_model(len(tiny_tokenizer)), cut)
    trainer.train()
    assert trainer.state.log_history[0]["logps/chosen"] == pytest.approx(float(expected["chosen"].mean()), rel=1e-5)


def test_the_reference_follows_when_it_is_told_to(tiny_tokenizer, tmp_path):
    trainer = dpo(
        tmp_path, tiny_tokenizer, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, max_steps=2
    )
    trainer.train()
    policy = dict(trainer.model.named_parameters())
    assert all(torch.allclose(p, policy[n]) for n, p in trainer.reference.copy.named_parameters())


def test_swapping_the_answers_negates_the_margin(tiny_tokenizer, tmp_path):
    other = build_model(len(tiny_tokenizer), seed=3)
    swapped = pairs().rename_columns({"chosen": "rejected", "rejected": "chosen"})
    margins = []
    for data in (pairs(), swapped):
        trainer = dpo(tmp_path, tiny_tokenizer, ref_model=other, data=data)
        trainer.train()
        margins.append(trainer.state.log_history[0]["rewards/margins"])
    assert margins[0] == pytest.approx(-margins[1], rel=1e-4)


def test_two_pairs_are_learnt_and_the_chosen_grow_likelier_with_sft(tiny_tokenizer, tmp_path):
    trainer = dpo(
        tmp_path,
        tiny_tokenizer,
        data=pairs(2),
        loss_type=["sigmoid", "sft"],
        max_steps=15,
        per_device_train_batch_size=2,
    )
    trainer.train()
    history = [row for row in trainer.state.log_history if "rewards/accuracies" in row]
    assert history[-1]["rewards/accuracies"] == 1.0
    assert history[-1]["logps/chosen"] > history[0]["logps/chosen"]


def test_a_resumed_run_equals_an_uninterrupted_one(tiny_tokenizer, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    whole, part = (dpo(tmp_path / name, tiny_tokenizer, **settings) for name in "ab")
    whole.train()
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(part))


class Sink(TrainerCallback):
    """Lowers the likelihood of everything a little each step."""

    def on_step_end(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(0.9)


def test_p12_two_sinking_rewards_are_told(tiny_tokenizer, tmp_path, caplog):
    trainer = dpo(tmp_path, tiny_tokenizer, max_steps=12, learning_rate=1e-3)
    trainer.state.log_history = [
        {"step": i, "loss": 0.6, "rewards/chosen": -0.1 * i, "rewards/rejected": -0.3 * i, "rewards/accuracies": 0.9}
        for i in range(5)
    ]
    trainer.log({"loss": 0.5, "rewards/chosen": -5.0, "rewards/rejected": -9.0, "rewards/accuracies": 1.0})
    assert "PT-P003" in caplog.text


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_type": "sigmoyd"}, "did you mean 'sigmoid'"),
        ({"loss_type": []}, "loss_type is empty"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights has 1 values, but loss_type has 2"),
        ({"beta": 0.0}, "beta=0.0 must be above 0"),
        (
            {"label_smoothing": 0.1},
            "label_smoothing=0.1 has no effect with loss_type.*conservative DPO.*smoothed_sigmoid",
        ),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "must be in"),
        ({"loss_type": "exo_pair"}, "with 'exo_pair' must be above 0"),
        ({"loss_type": "aot", "use_weighting": True}, "use_weighting=True assigns a weight"),
        ({"loss_type": "apo_zero", "f_divergence_type": "js_divergence"}, "contain an unknown constant per prompt"),
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "f_divergence_type": "js_divergence"},
            r"cannot be used with loss_type=\['bco_pair'\]",
        ),
        ({"ld_alpha": 2.0}, "ld_alpha=2.0"),
        ({"discopop_tau": 0.1}, "discopop_tau=0.1 has no effect"),
        (
            {"f_alpha_divergence_coef": 0.3, "f_divergence_type": "js_divergence"},
            "f_alpha_divergence_coef=0.3 has no effect",
        ),
        ({"discopop_tau": 0.0}, "discopop_tau=0.0"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "sync_ref_model=True changes the reference"),
        ({"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha=0.0"),
        ({"max_length": 1}, "max_length=1"),
        ({"truncation_mode": "keep_middle"}, "truncation_mode='keep_middle'"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_the_config(tmp_path, settings, match):
    with pytest.raises(ConfigError, match=match):
        DPOConfig(str(tmp_path), **settings)


def test_smoothing_of_label_losses_is_refused_where_the_loss_has_no_labels(tiny_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1"):
        dpo(tmp_path, tiny_tokenizer, label_smoothing_factor=0.1)


def test_a_length_normalised_loss_at_the_default_beta_is_told(tmp_path, caplog):
    DPOConfig(str(tmp_path), loss_type="sigmoid_norm")
    assert "uses log-ratios per token" in caplog.text


def test_references_that_cannot_work_are_refused(tiny_tokenizer, tmp_path):
    model = build_model(len(tiny_tokenizer))
    with raises(ConfigError, "ref_model"):
        dpo(tmp_path, tiny_tokenizer, model=model, ref_model=model)
    with raises(ModelError):
        dpo(tmp_path, tiny_tokenizer, ref_model=build_model(len(tiny_tokenizer) + 8))
    with raises(TypeError):
        dpo(tmp_path, tiny_tokenizer, ref_model="some/model")
    stream = pairs().to_iterable_dataset()
    with raises(ConfigError):
        dpo(tmp_path, tiny_tokenizer, data=stream, precompute_ref_log_probs=True)


def test_a_reference_that_follows_is_refused_where_the_rows_bring_its_log_probs(tiny_tokenizer, tmp_path):
    data = pairs().add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 8)
    with pytest.raises(ConfigError, match=r"sync_ref_model=True.*ref_chosen_logps"):
        dpo(tmp_path, tiny_tokenizer, data=data, sync_ref_model=True)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_reference_log_prob_that_is_missing_in_one_row_is_refused_with_its_column(value, tiny_tokenizer, tmp_path):
    data = (
        pairs().add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 6 + [value, -2.0])
    )
    with raises(DataError, "train row 6", "'ref_rejected_logps'", value):
        dpo(tmp_path, tiny_tokenizer, data=data)


def test_equal_pairs_everywhere_are_refused(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "q ", "chosen": "a", "rejected": "a"}] * 4)
    with raises(ValueError, "4"):
        dpo(tmp_path, tiny_tokenizer, data=rows)


def test_a_bema_callback_moves_the_reference_of_the_trainer(tiny_tokenizer, tmp_path):
    from posttrain import BEMACallback

    trainer = dpo(tmp_path, tiny_tokenizer, max_steps=4)
    trainer.add_callback(BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=2))
    before = {n: p.clone() for n, p in trainer.reference.copy.named_parameters()}
    trainer.train()
    assert any(not torch.equal(p, before[n]) for n, p in trainer.reference.copy.named_parameters())


def test_p4_a_reference_that_prefers_the_rejected_answers_is_told(tiny_tokenizer, tmp_path, caplog):
    rows = [{"prompt": f"{i} ", "chosen": "a number is a number", "rejected": "a"} for i in range(24)]
    dpo(tmp_path, tiny_tokenizer, data=datasets.Dataset.from_list(rows), precompute_ref_log_probs=True)
    assert "PT-P002: the reference gives the rejected answer a higher likelihood in 100%" in caplog.text


def test_p35_the_default_rate_with_an_adapter_is_told(tiny_tokenizer, tmp_path, caplog):
    from peft import LoraConfig

    dpo(tmp_path, tiny_tokenizer, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), learning_rate=1e-6)
    assert "learning_rate=1e-06 is the default for training all weights" in caplog.text


def test_a_reference_whose_rotary_frequencies_change_at_another_length_is_refused(tiny_tokenizer, tmp_path):
    from transformers import Phi3Config, Phi3ForCausalLM

    def built(length):
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope["original_max_position_embeddings"] = length
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        sizes |= {"vocab_size": len(tiny_tokenizer), "original_max_position_embeddings": length, "pad_token_id": 2}
        return Phi3ForCausalLM(Phi3Config(**sizes, max_position_embeddings=512, rope_parameters=rope))

    assert dpo(tmp_path, tiny_tokenizer, build_model(len(tiny_tokenizer)), ref_model=built(64)).layout.rope_switch == 64
    with raises(ModelError, "different lengths [64, 128]"):
        dpo(tmp_path, tiny_tokenizer, built(128), ref_model=built(64))
