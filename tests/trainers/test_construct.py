"""Constructors take what TRL's take: positions, plain arguments of transformers, attributes that are read and set."""

import inspect
import json
import pickle
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from peft import LoraConfig

import posttrain as pt
from posttrain import ArgumentTypeError, ConfigError
from posttrain.compat.old_names import is_accepted
from posttrain.extensions.experimental.a2po_method import A2POConfig
from posttrain.extensions.experimental.online_dpo_method import OnlineDPOConfig
from posttrain.loop.rollout import settings_of
from tests.conftest import build_model
from tests.methods.every_trainer import EVERY, OFFLINE, data, every
from tests.methods.helpers import SHORT, losses
from tests.wordings import raises

TRL = json.loads(Path(__file__).parents[1].joinpath("snapshots", "trl_surface.json").read_text(encoding="utf-8"))
offline = pytest.mark.parametrize("kind", sorted(OFFLINE))


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def positional(trainer):
    parameters = list(inspect.signature(trainer.__init__).parameters.values())[1:]
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


SHARED = ["A2PO", "AsyncGRPO", "CPO", "DPO", "GMPO", "GRPO", "KTO", "ORPO", "OnlineDPO", "RLOO", "Reward", "SFT", "TPO"]


@pytest.mark.parametrize("name", SHARED)
def test_arguments_have_the_positions_of_trl(name):
    theirs = [n for n in TRL["trainers"][name]["positional"] if n != "kwargs"]
    assert positional(getattr(pt, f"{name}Trainer"))[: len(theirs)] == theirs


def test_arguments_by_position_are_what_they_are_called(tokenizer, tmp_path):
    args = pt.SFTConfig(str(tmp_path), use_cpu=True, **SHORT)
    rows = data("sft", 4)
    trainer = pt.SFTTrainer(build_model(len(tokenizer)), args, None, rows, rows, tokenizer)
    assert trainer.eval_dataset is not None and trainer.processing_class is tokenizer
    with raises(TypeError):
        pt.SFTTrainer("model", args, None, rows, train_dataset=rows)


@offline
def test_plain_arguments_become_the_config_of_the_trainer(kind, tokenizer, tmp_path):
    plain = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to=[], learning_rate=0.25, hub_token="secret",
        per_device_train_batch_size=2, per_device_eval_batch_size=2,
    )  # fmt: skip
    made = every(kind, tmp_path, tokenizer)
    trainer = type(made)(made.model, args=plain, train_dataset=data(kind, 4), processing_class=tokenizer)
    assert type(trainer.args) is OFFLINE[kind][1]
    assert (trainer.args.learning_rate, trainer.args.max_steps, trainer.args.hub_token) == (0.25, 1, "secret")
    with pytest.raises(ArgumentTypeError):
        type(made)(made.model, args=pt.PPOConfig(str(tmp_path)), train_dataset=data(kind, 4))


def test_plain_arguments_become_the_config_of_a_trainer_that_samples(tokenizer, tmp_path):
    model, rows = build_model(len(tokenizer)), datasets.Dataset.from_list([{"prompt": "a"}] * 8)
    model.config.max_position_embeddings = 2048  # The defaults write long completions.

    def score(completions, **_):
        return [0.0] * len(completions)

    for kind in (pt.GRPOTrainer, pt.RLOOTrainer, pt.OnlineDPOTrainer, pt.PPOTrainer):
        plain = transformers.TrainingArguments(str(tmp_path / kind.__name__), use_cpu=True, report_to=[], seed=7)
        # PPO takes functions in the place of its reward model.
        given = {"reward_model": score} if kind is pt.PPOTrainer else {"reward_funcs": score}
        trainer = kind(model=model, args=plain, train_dataset=rows, processing_class=tokenizer, **given)
        assert type(trainer.args) is kind.config_class and trainer.args.seed == 7


ATTRIBUTES = {
    "dpo": {"beta": 0.3, "loss_weights": [2.0], "label_smoothing": 0.0, "f_divergence_type": "reverse_kl"},
    "kto": {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.5},
    "cpo": {"beta": 0.3, "cpo_alpha": 0.0},
    "orpo": {"beta": 0.3},
    "tpo": {"beta": 0.3, "tpo_alpha": 0.0},
}


@pytest.mark.parametrize("kind", sorted(ATTRIBUTES))
def test_an_attribute_that_is_set_takes_effect(kind, tokenizer, tmp_path):
    def loss(**given):
        trainer = every(kind, tmp_path, tokenizer, eval_dataset=data(kind, 4))
        for name, value in given.items():
            setattr(trainer, name, value)
            assert getattr(trainer, name) == value == getattr(trainer.args, name)
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight.mul_(3)  # Else the policy is its own reference.
        return trainer.evaluate()["eval_loss"]

    assert loss(**ATTRIBUTES[kind]) != pytest.approx(loss(), rel=1e-3)


def test_attributes_that_are_read_once_cannot_be_set(tokenizer, tmp_path):
    trainer = every("dpo", tmp_path, tokenizer)
    assert trainer.loss_types == ["sigmoid"] and trainer.precompute_ref_logps is False
    with raises(AttributeError):
        trainer.loss_types = ["ipo"]
    sft = every("sft", tmp_path, tokenizer)
    assert sft.completion_only_loss is True and sft.padding_free is False
    with pytest.raises(AttributeError):
        sft.completion_only_loss = False


@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"ppo"}))
def test_metrics_of_a_subclass_are_logged(kind, tokenizer, tmp_path):
    trainer = every(kind, tmp_path, tokenizer)
    trainer._metrics["train"]["mine"].append(2.0)
    assert trainer.reduced_metrics("train")["mine"] == 2.0
    assert trainer.aux_loss_enabled is False


def test_another_reference_model_is_compared_with(tokenizer, tmp_path):
    trainer = every("dpo", tmp_path, tokenizer, eval_dataset=data("dpo", 4))
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    before = trainer.evaluate()["eval_loss"]
    trainer.ref_model = other = build_model(len(tokenizer), seed=9)
    assert trainer.ref_model is other and trainer.evaluate()["eval_loss"] != pytest.approx(before, rel=1e-4)
    with pytest.raises(ConfigError):
        trainer.ref_model = trainer.model


CONFIGS = sorted(name for name in vars(pt) | dict.fromkeys(pt.__all__) if name.endswith("Config"))
TRAINED = [c for c in (getattr(pt, n) for n in CONFIGS) if isinstance(c, type) and issubclass(c, pt.PostTrainingConfig)]
OLD = {
    "max_seq_length": 64,
    "max_prompt_length": 64,
}  # Of older releases: converted by some configs, refused by others.


def config(cls, folder, **given):
    least = {"stop_token": "eos"} if cls is pt.PPOConfig else {}
    return cls(str(folder), use_cpu=True, report_to=[], **least | given)


@pytest.mark.parametrize("cls", TRAINED, ids=lambda cls: cls.__name__)
def test_options_of_the_past_are_refused_by_name(cls, tmp_path):
    for name, value in OLD.items():
        if name not in cls.__dataclass_fields__ and not is_accepted(cls, name):
            with pytest.raises(ConfigError, match=rf"{cls.__name__} has no argument '{name}'\. Fix: "):
                config(cls, tmp_path, **{name: value})
    with pytest.raises(TypeError):
        config(cls, tmp_path, no_such_option=1)


def test_an_option_that_is_misspelt_where_it_is_set_later_is_refused_by_the_nearest_name(tmp_path):
    for cls in TRAINED:
        made = config(cls, tmp_path)
        made.learning_rate, made.a_users_own_note = 0.5, "kept"
        assert (made.learning_rate, made.a_users_own_note) == (0.5, "kept")
        with pytest.raises(ConfigError, match=rf"{cls.__name__} .* learning_rte .*'learning_rate'.*1\.0"):
            made.learning_rte = 1.0
        for name in set(OLD) - set(cls.__dataclass_fields__):
            with pytest.raises(ConfigError, match=f"{name}=64.*Fix: "):
                setattr(made, name, 64)
        assert not {"learning_rte", *OLD} & set(vars(made)) - set(cls.__dataclass_fields__)
    again = pickle.loads(pickle.dumps(made))
    with pytest.raises(ConfigError, match="'warmup_steps'"):
        again.warmup_step = 3


@pytest.mark.parametrize(
    "cls", [c for c in TRAINED if "pad_to_multiple_of" in c.__dataclass_fields__], ids=lambda cls: cls.__name__
)
def test_a_multiple_may_be_left_to_the_layout(cls, tmp_path):
    assert config(cls, tmp_path, pad_to_multiple_of="auto").pad_to_multiple_of is None
    assert config(cls, tmp_path, pad_to_multiple_of="8").pad_to_multiple_of == 8
    for wrong in (0, "wide", -8):
        with pytest.raises(ConfigError, match=f"{wrong!r}"):
            config(cls, tmp_path, pad_to_multiple_of=wrong)


UNREAD = {"generate_during_eval": True, "is_encoder_decoder": True, "padding_value": 0}


@pytest.mark.parametrize("cls", [pt.CPOConfig, pt.ORPOConfig])
def test_fields_that_nothing_reads_are_refused_where_they_are_set(cls, tmp_path):
    config(cls, tmp_path, generate_during_eval=False, is_encoder_decoder=False)
    for name, value in UNREAD.items():
        with pytest.raises(ConfigError, match=rf"{name}={value!r} .*Fix: "):
            config(cls, tmp_path, **{name: value})


def test_the_loss_of_sft_is_called_nll(tmp_path):
    assert config(pt.SFTConfig, tmp_path).loss_type == config(pt.SFTConfig, tmp_path, loss_type=None).loss_type == "nll"


def test_weights_in_float16_are_refused_before_training(tokenizer, tmp_path):
    args = config(pt.SFTConfig, tmp_path)
    given = {"train_dataset": data("sft", 4), "processing_class": tokenizer}
    with raises(ConfigError, "float16", "dtype='float32'"):
        pt.SFTTrainer(build_model(len(tokenizer)).half(), args, **given)
    pt.SFTTrainer(build_model(len(tokenizer)).half(), config(pt.SFTConfig, tmp_path, preflight="warn"), **given)


def test_findings_of_the_data_are_in_the_record_of_the_run(tokenizer, tmp_path):
    trainer = every("sft", tmp_path, tokenizer, train=data("sft", 1).select([0] * 8))
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["code"] == "PT-D007"] == [0]
    assert len({(line["code"], line["what"]) for line in lines}) == len(lines)


@pytest.mark.parametrize("adapter", [False, True])
def test_another_set_is_evaluated_while_the_precomputed_reference_is_at_hand(adapter, tokenizer, tmp_path):
    def trained(folder, **settings):
        args = pt.DPOConfig(str(folder), use_cpu=True, **SHORT | {"max_steps": 2, "learning_rate": 0.1} | settings)
        given = {"peft_config": LoraConfig(target_modules=["q_proj"], init_lora_weights=True)} if adapter else {}
        rows = data("dpo", 8)
        return pt.DPOTrainer(build_model(len(tokenizer)), None, args, None, rows, None, tokenizer, **given)

    ours, live = trained(tmp_path / "a", precompute_ref_log_probs=True), trained(tmp_path / "b")
    other = data("dpo", 4, 20)
    assert ours.evaluate(other)["eval_loss"] == pytest.approx(live.evaluate(other)["eval_loss"], rel=1e-6)
    ours.train(), live.train()
    if adapter:
        assert ours.evaluate(other)["eval_loss"] == pytest.approx(live.evaluate(other)["eval_loss"], rel=1e-6)
    else:
        with raises(ConfigError):
            ours.evaluate(other)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_attributes_of_online_trainers_are_read_and_set(kind, tokenizer, tmp_path):
    trainer = every(kind, tmp_path, tokenizer, epsilon=0.1, beta=0.1)
    assert (trainer.num_generations, trainer.max_completion_length, trainer.use_vllm) == (2, 8, False)
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.beta) == (0.1, 0.1, 0.1)
    assert trainer.reward_funcs == trainer.rewards.functions and trainer.reward_processing_classes == [None]
    assert trainer.reward_weights.tolist() == [1.0] and trainer.chat_template == tokenizer.chat_template
    assert trainer.generation_config.max_new_tokens == 8 and trainer.ref_model is trainer.reference.copy
    trainer.epsilon_high, trainer.temperature, trainer.max_completion_length = 0.3, 0.5, 4
    assert trainer.args.epsilon_high == 0.3
    sampling = settings_of(trainer.run, "train").sampling
    assert (sampling.temperature, sampling.max_new_tokens) == (0.5, 4)
    trainer.reward_weights = [2.0]
    assert trainer.rewards.weights.tolist() == [2.0]
    for name in ("num_generations", "reward_funcs", "use_vllm"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, 1)
    trainer.train()
    assert len(trainer._logs["completion"]) == len(trainer._logs["rewards"]["by_answer"]) > 0


def test_sampling_options_have_the_spellings_of_trl(tmp_path, caplog):
    args = config(pt.GRPOConfig, tmp_path, top_k=None)
    assert args.top_k == 0 and args.use_bias_correction_kl and args.router_aux_loss_coef is None
    with pytest.warns(FutureWarning, match="clip_max"):
        assert (
            config(pt.GRPOConfig, tmp_path, vllm_importance_sampling_cap=2.5).vllm_importance_sampling_clip_max == 2.5
        )
    with pytest.raises(ConfigError, match="stop_without_signal=0"):
        config(pt.GRPOConfig, tmp_path, stop_without_signal=0)
    for given, expected in (({}, (600, 1800)), ({"vllm_server_timeout": 3600.0}, (3600, 3600))):
        args = config(pt.AsyncGRPOConfig, tmp_path, **given)
        assert (args.request_timeout, args.sync_timeout_s) == expected
    for name in ("weight_sync_timeout", "sync_timeout_s", "vllm_sync_timeout"):
        args = config(pt.AsyncGRPOConfig, tmp_path, **{name: 60})
        assert {args.weight_sync_timeout, args.sync_timeout_s, args.vllm_sync_timeout} == {60}
    assert (args.dtype, args.router_aux_loss_coef) == ("float32", None)
    config(pt.AsyncGRPOConfig, tmp_path, fork_threshold_tokens=512)
    assert "fork_threshold_tokens=512 has no effect" in caplog.text
    with pytest.raises(ConfigError, match="dtype='int8'"):
        config(pt.AsyncGRPOConfig, tmp_path, dtype="int8")


def test_options_of_ratios_and_rewards_are_refused_by_losses_that_have_none(tmp_path):
    ratio = {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask",
             "vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": 0.1, "allow_biased_is": True}  # fmt: skip
    rewards = {
        "reward_weights": [2.0],
        "reward_transform": ["log1p"],
        "check_rewards": False,
        "check_reward_determinism": True,
    }
    rewards |= {"stop_without_signal": 3, "dynamic_sampling": 2, "epsilon": 0.3, "epsilon_high": 0.3}
    scored = (pt.MiniLLMConfig, pt.SDPOConfig, OnlineDPOConfig, A2POConfig)
    alone = (
        pt.DistillationConfig,
        pt.GKDConfig,
        pt.SDFTConfig,
        pt.SSDConfig,
        pt.GOLDConfig,
        pt.AsyncDistillationConfig,
    )
    for cls in (*scored, *alone):
        for name, value in (ratio | (rewards if cls in alone else {})).items():
            with pytest.raises(ConfigError, match=f"{name}="):
                config(cls, tmp_path, **{name: value})


COLLATORS = {
    "reward": pt.DataCollatorForReward,
    **dict.fromkeys(("dpo", "cpo", "orpo"), pt.DataCollatorForPreference),
    **dict.fromkeys(("kto", "bco"), pt.DataCollatorForUnpairedPreference),
}


@pytest.mark.parametrize("kind", sorted(COLLATORS))
def test_a_collator_of_trls_gives_the_same_rows_and_one_that_changes_tokens_changes_them(kind, tokenizer, tmp_path):
    made = every(kind, tmp_path, tokenizer)
    examples = [made.train_dataset[i] for i in range(3)]
    collator = COLLATORS[kind](tokenizer.pad_token_id)
    plain = made.rows(examples)
    made.user_collator = collator
    assert [(r.prompt_ids, r.completions, r.sequence_columns) for r in made.rows(examples)] == [
        (r.prompt_ids, r.completions, r.sequence_columns) for r in plain
    ]

    def other(examples):
        batch = collator(examples)
        batch["input_ids"] = batch["input_ids"] + 1
        return batch

    made.user_collator = other
    assert [[token + 1 for token in r.completions[0]] for r in plain] == [r.completions[0] for r in made.rows(examples)]


def test_a_collator_of_answers_must_keep_their_number_and_their_prompt(tokenizer, tmp_path):
    collator = pt.DataCollatorForPreference(tokenizer.pad_token_id)

    def other_prompts(examples):
        batch = collator(examples)
        batch["input_ids"][-1, 0] += 1
        return batch

    made = every("dpo", tmp_path, tokenizer)
    examples = [made.train_dataset[i] for i in range(2)]
    for wrong in (lambda examples: collator(examples[:1]), other_prompts):
        made.user_collator = wrong
        with raises(pt.DataError, "data_collator"):
            made.rows(examples)


def test_a_collator_is_given_to_the_constructor_and_trained_with(tokenizer, tmp_path):
    collator = pt.DataCollatorForPreference(tokenizer.pad_token_id)
    args = pt.DPOConfig(str(tmp_path), use_cpu=True, **SHORT)
    keys = {"train_dataset": data("dpo", 8), "processing_class": tokenizer}
    losses = []
    for given in (None, collator):
        trainer = pt.DPOTrainer(build_model(len(tokenizer)), args=args, data_collator=given, **keys)
        trainer.train()
        losses.append(next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


FORMATS = ("numpy", "torch", "arrow", "pandas")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", EVERY)
def test_rows_in_any_format_of_a_dataset_train_as_plain_ones(kind, tmp_path, tokenizer):
    found = []
    for form in (None, *FORMATS):
        rows = data(kind, 4).with_format(form)
        trainer = every(kind, tmp_path / str(form), tokenizer, train=rows, eval_dataset=rows)
        trainer.train()
        evaluated = trainer.evaluate(rows)
        found.append((losses(trainer)[0], evaluated.get("eval_loss", evaluated.get("eval_reward"))))
    assert all(one == pytest.approx(found[0], abs=1e-6) for one in found)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("skip", [False, True])
def test_ids_in_any_format_and_of_a_stream_train_as_lists(form, skip, tmp_path, tiny_tokenizer):
    rows = datasets.Dataset.from_list(
        [{"input_ids": [5, 6, 7, 8 + i], "labels": [-100, 6, 7, 8 + i]} for i in range(4)]
    )
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}} if skip else {}
    formed = rows.with_format(form)
    sets = [rows, formed] + (
        [] if form == "pandas" else [formed.to_iterable_dataset(), rows.to_iterable_dataset().with_format(form)]
    )
    found = []
    for i, one in enumerate(sets):
        trainer = every("sft", tmp_path / str(i), tiny_tokenizer, train=one, per_device_train_batch_size=4, **options)
        trainer.train()
        found.append(losses(trainer)[0])
    assert found == pytest.approx([found[0]] * len(found), abs=1e-6)
