"""BEMA: schedule, formula, names, adapters, short runs, resume."""

import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from posttrain.errors import CheckpointError, ConfigError, ModelError
from posttrain.extensions.trl_helpers.bema import BEMACallback
from posttrain.models.reference import Reference, create_reference_model
from tests.conftest import build_model
from tests.wordings import raises

ROWS = Dataset.from_list([{"input_ids": [1, i, i + 1, 2], "labels": [1, i, i + 1, 2]} for i in range(5, 29)])


def build_trainer(folder, model, *callbacks, **options):
    settings = {
        "max_steps": 9,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
    }
    args = transformers.TrainingArguments(str(folder), **(settings | options))
    return transformers.Trainer(
        model, args, train_dataset=ROWS, eval_dataset=ROWS.select(range(4)), callbacks=list(callbacks)
    )


class Watch(transformers.TrainerCallback):
    """Keeps every step's parameters, the start included, in float64."""

    def __init__(self):
        self.steps = {}

    def take(self, step, model):
        self.steps[step] = {name: p.detach().double().clone() for name, p in model.named_parameters()}

    def on_train_begin(self, args, state, control, model=None, **_):
        self.take(state.global_step, model)

    def on_step_end(self, args, state, control, model=None, **_):
        self.take(state.global_step, model)


def expected(steps, at, *, after=0, lag=10, gamma=1.0, kappa=0.5, eta=0.2, floor=0.0):
    """The recursion of the paper in float64, written out: snapshot, averages at ``at``, the result at the last of them."""
    out = {}
    for name, start in steps[after].items():
        ema, result = start, start
        for t in at:
            beta = max((lag + gamma * t) ** -kappa, floor)
            ema = (1 - beta) * ema + beta * steps[t][name]
            result = ema + (lag + gamma * t) ** -eta * (steps[t][name] - start)
        out[name] = result
    return out


def close(folder, wanted, atol=1e-6):
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "bema", dtype=torch.float32)
    named = dict(saved.named_parameters())
    assert named.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(named[name].detach().double(), value, atol=atol, rtol=0)


# Schedule and numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freq", "after", "steps"), [(2, 0, [2, 4, 6, 8]), (3, 0, [3, 6, 9]), (2, 3, [5, 7, 9]), (4, 6, []), (1, 7, [8, 9])]
)
def test_the_average_is_updated_on_schedule_and_the_last_step_always_counts(tmp_path, tiny_model, freq, after, steps):
    updated = []

    class Spy(BEMACallback):
        def _update(self, model, step):
            updated.append(step)
            super()._update(model, step)

    watch = Watch()
    build_trainer(tmp_path, tiny_model, watch, Spy(update_freq=freq, update_after=after)).train()
    assert updated == steps
    close(tmp_path, expected(watch.steps, sorted({*steps, 9}), after=after))


def test_alpha_and_beta_are_the_powers_of_the_lagged_step():
    """lag 10, t = 90: 100 ** -0.5 = 0.1 and 100 ** -0.2 = 10 ** -0.4; lag 2, gamma 3, t = 2: 8 ** -(1/3) = 0.5."""
    callback = BEMACallback()
    assert callback.beta(90) == pytest.approx(0.1)
    assert callback.alpha(90) == pytest.approx(10**-0.4)
    other = BEMACallback(lag=2, multiplier=3.0, ema_power=1 / 3, bias_power=2 / 3)
    assert other.beta(2) == pytest.approx(0.5)
    assert other.alpha(2) == pytest.approx(0.25)
    assert BEMACallback(min_ema_multiplier=0.3).beta(10**6) == 0.3
    assert BEMACallback(min_ema_multiplier=0.3).beta(0) == pytest.approx(10**-0.5)


def test_ema_power_zero_follows_the_weights_and_bias_power_zero_keeps_the_whole_correction():
    callback = BEMACallback(ema_power=0, bias_power=0)
    assert [(callback.alpha(t), callback.beta(t)) for t in (1, 7, 1000)] == [(1.0, 1.0)] * 3
    assert BEMACallback(bias_power=50).alpha(1) < 1e-50


@pytest.mark.parametrize(
    ("powers", "share"), [({"ema_power": 0, "bias_power": 50}, 0), ({"ema_power": 0, "bias_power": 0}, 1)]
)
def test_without_averaging_the_result_is_the_weights_plus_the_correction(tmp_path, tiny_model, powers, share):
    watch = Watch()
    build_trainer(tmp_path, tiny_model, watch, BEMACallback(update_freq=3, **powers)).train()
    start, end = watch.steps[0], watch.steps[9]
    close(tmp_path, {name: end[name] + share * (end[name] - start[name]) for name in end})


def test_settings_reach_the_formula(tmp_path, tiny_model):
    watch = Watch()
    settings = {"ema_power": 0.9, "bias_power": 0.7, "lag": 3, "multiplier": 2.5, "min_ema_multiplier": 0.2}
    build_trainer(tmp_path, tiny_model, watch, BEMACallback(update_freq=3, **settings)).train()
    close(tmp_path, expected(watch.steps, [3, 6, 9], lag=3, gamma=2.5, kappa=0.9, eta=0.7, floor=0.2))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"update_freq": 0}, "update_freq=0"),
        ({"update_after": -1}, "update_after=-1"),
        ({"min_ema_multiplier": 1.5}, "min_ema_multiplier=1.5"),
        ({"ema_power": -0.1}, "ema_power=-0.1"),
        ({"lag": 0, "multiplier": 0.5}, "overshoot"),
        ({"ref_model_update_freq": 0}, "ref_model_update_freq=0"),
    ],
)
def test_values_out_of_range_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        BEMACallback(**settings)


# What is averaged ------------------------------------------------------------------------------------------------


def test_a_partly_frozen_model_is_averaged_by_name_and_the_rest_is_saved_as_it_is(tmp_path, tiny_model):
    for name, p in tiny_model.named_parameters():
        p.requires_grad_("layers.1" in name)
    watch = Watch()
    callback = BEMACallback(update_freq=2)
    build_trainer(tmp_path, tiny_model, watch, callback).train()
    close(tmp_path, expected(watch.steps, [2, 4, 6, 8, 9]))
    assert callback._ema and all("layers.1" in name for name in callback._ema)


def test_an_adapter_is_averaged_alone_and_loads_on_its_base(tmp_path, tiny_model_dir):
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    watch = Watch()
    build_trainer(tmp_path, model, watch, BEMACallback(update_freq=2)).train()
    assert (tmp_path / "bema" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "bema" / "model.safetensors").exists()
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    loaded = dict(peft.PeftModel.from_pretrained(fresh, tmp_path / "bema").named_parameters())
    wanted = expected(watch.steps, [2, 4, 6, 8, 9])
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(loaded[name].double(), value, atol=1e-6, rtol=0)
    assert any((watch.steps[0][name] - value).abs().max() > 1e-3 for name, value in wanted.items())


def test_a_second_adapter_that_is_frozen_is_not_saved(tmp_path, tiny_model_dir):
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    Reference(model)  # Adds the frozen adapter `ref`.
    build_trainer(tmp_path, model, BEMACallback(), max_steps=1).train()
    assert not (tmp_path / "bema" / "ref").exists()


def test_tied_embeddings_are_averaged_once_and_stay_tied(tmp_path, tiny_model):
    build_trainer(tmp_path, tiny_model, BEMACallback(update_freq=2)).train()
    assert "lm_head.weight" not in load_file(tmp_path / "bema" / "model.safetensors")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bema")
    assert torch.equal(saved.lm_head.weight, saved.model.embed_tokens.weight)
    assert (saved.lm_head.weight - tiny_model.lm_head.weight).abs().max() > 1e-4


def test_training_is_not_changed_by_averaging(tmp_path, tiny_tokenizer):
    ends = []
    for name, callbacks in {"with": [BEMACallback(update_freq=2)], "without": []}.items():
        model = build_model(len(tiny_tokenizer))
        build_trainer(tmp_path / name, model, *callbacks).train()
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_half_precision_average_moves_by_less_than_half_precision_can_show(tiny_model):
    """beta = 0.01 of a step of 0.01 at 1.0 is 1e-4 an update; bfloat16 has 2 ** -8 there: 100 updates, and still at 1.0."""
    model = tiny_model.to(torch.bfloat16)
    callback = BEMACallback(update_freq=1, ema_power=0.5, lag=10**4, multiplier=0.0, bias_power=50)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    callback._snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 + 2**-7)
    for step in range(1, 101):
        callback._update(model, step)
    weight = callback._ema["model.norm.weight"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, torch.full_like(weight, 1 + 2**-7 * (1 - 0.99**100)), atol=1e-5, rtol=0)


def test_a_sharded_model_and_one_without_trained_parameters_are_refused(tmp_path, tiny_model):
    tiny_model.requires_grad_(False)
    with pytest.raises(ModelError, match="requires_grad"):
        BEMACallback().on_train_begin(args(tmp_path), TrainerState(), TrainerControl(), model=tiny_model)
    tiny_model.requires_grad_(True)
    tiny_model.lm_head.weight.ds_id = 7  # What ZeRO-3 writes on a parameter it has cut.
    with raises(ModelError):
        BEMACallback().on_train_begin(args(tmp_path), TrainerState(), TrainerControl(), model=tiny_model)


def args(folder, **options):
    return transformers.TrainingArguments(str(folder), report_to="none", use_cpu=True, **options)


def test_wrappers_are_taken_off(tmp_path, tiny_model):
    wrapped = torch.nn.DataParallel(tiny_model)
    callback = BEMACallback()
    state = TrainerState(global_step=0, max_steps=1)
    callback.on_train_begin(args(tmp_path), state, TrainerControl(), model=wrapped)
    assert callback._start.keys() == dict(tiny_model.named_parameters()).keys()


# Ends ------------------------------------------------------------------------------------------------------------


def test_a_run_shorter_than_the_update_frequency_does_not_save_its_initial_weights(tmp_path, tiny_model):
    watch = Watch()
    build_trainer(tmp_path, tiny_model, watch, BEMACallback(update_freq=400), max_steps=3).train()
    wanted = expected(watch.steps, [3])
    close(tmp_path, wanted)
    assert (wanted["model.norm.weight"] - watch.steps[0]["model.norm.weight"]).abs().max() > 1e-3


def test_a_run_that_ends_before_the_average_begins_saves_its_weights_and_says_so(tmp_path, tiny_model, caplog):
    watch = Watch()
    build_trainer(tmp_path, tiny_model, watch, BEMACallback(update_after=400), max_steps=3).train()
    close(tmp_path, watch.steps[3])
    assert "before update_after=400" in caplog.text


def test_a_second_training_starts_a_new_average(tmp_path, tiny_model):
    watch = Watch()
    run = build_trainer(tmp_path, tiny_model, watch, BEMACallback(update_freq=2), max_steps=4)
    run.train()
    run.train()
    close(tmp_path, expected(watch.steps, [2, 4]))


def test_the_best_weights_loaded_at_the_end_do_not_enter_the_average(tmp_path, tiny_model):
    """A falling loss, and the highest called best: the first weights come back before training ends."""
    watch = Watch()
    run = build_trainer(
        tmp_path,
        tiny_model,
        watch,
        BEMACallback(update_freq=4),
        transformers.EarlyStoppingCallback(early_stopping_patience=2),
        greater_is_better=True,
        metric_for_best_model="loss",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
    )
    run.train()
    last = run.state.global_step
    assert run.state.best_global_step < last < 9
    due = [t for t in (4, 8) if t < last]
    close(tmp_path, expected(watch.steps, [*due, last]))


@pytest.mark.parametrize(("event", "every"), [("on_step_end", 2), ("on_evaluate", 1)])
def test_a_stop_between_two_checkpoints_averages_the_step_it_stopped_at(tmp_path, tiny_model, event, every):
    """Step 2 is the best that was saved and its weights come back; training had gone on to step 3."""
    stop, watch = transformers.TrainerCallback(), Watch()
    setattr(
        stop, event, lambda args, state, control, **_: setattr(control, "should_training_stop", state.global_step >= 3)
    )
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": every, "save_steps": 2}
    callback = BEMACallback(update_freq=2)
    run = build_trainer(tmp_path, tiny_model, watch, stop, callback, load_best_model_at_end=True, **options)
    run.train()
    assert run.state.global_step == 3
    assert torch.equal(tiny_model.model.norm.weight.double(), watch.steps[2]["model.norm.weight"])
    close(tmp_path, expected(watch.steps, [2, 3]))


# Resume ----------------------------------------------------------------------------------------------------------


def resumable(folder, vocabulary, freq=2, **options):
    callback = BEMACallback(update_freq=freq, **options)
    return build_trainer(folder, build_model(vocabulary), callback, save_strategy="steps", save_steps=3)


def test_a_resumed_run_ends_with_the_same_average_bit_for_bit(tmp_path, tiny_tokenizer):
    vocabulary = len(tiny_tokenizer)
    resumable(tmp_path / "whole", vocabulary).train()
    resumable(tmp_path / "parts", vocabulary).train()
    (tmp_path / "parts" / "bema" / "model.safetensors").unlink()
    resumable(tmp_path / "parts", vocabulary).train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    one, other = (load_file(tmp_path / name / "bema" / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_elsewhere_is_found_by_its_argument_and_one_of_another_run_is_not_taken(tmp_path, tiny_tokenizer):
    vocabulary = len(tiny_tokenizer)
    resumable(tmp_path / "first", vocabulary).train()
    start = str(tmp_path / "first" / "checkpoint-6")
    build = resumable(tmp_path / "other", vocabulary, lag=50)
    build.args.learning_rate = 0.02  # Another history, with a checkpoint of the same step.
    build.train()
    run = resumable(tmp_path / "other", vocabulary)
    with raises(CheckpointError, "step 6", "update_after=6"):
        run.train(resume_from_checkpoint=start)
    run = resumable(tmp_path / "other", vocabulary)
    run.args.resume_from_checkpoint = start
    run.train(resume_from_checkpoint=start)
    one, other = (load_file(tmp_path / name / "bema" / "model.safetensors") for name in ("first", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_average_may_begin_in_a_resumed_run(tmp_path, tiny_tokenizer):
    vocabulary = len(tiny_tokenizer)
    build_trainer(tmp_path, build_model(vocabulary), save_strategy="steps", save_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with raises(CheckpointError):
        resumable(tmp_path, vocabulary).train(resume_from_checkpoint=checkpoint)
    run, watch = resumable(tmp_path, vocabulary, update_after=3), Watch()
    run.add_callback(watch)
    run.train(resume_from_checkpoint=checkpoint)
    close(tmp_path, expected(watch.steps, [5, 7, 9], after=3))


def test_an_average_of_other_parameters_is_refused_on_resume(tmp_path, tiny_tokenizer):
    run = resumable(tmp_path, len(tiny_tokenizer))
    run.train()
    state = TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    run.model.model.norm.weight.requires_grad_(False)
    with raises(CheckpointError, "'model.norm.weight'", "32"):
        BEMACallback().on_train_begin(args(tmp_path), state, TrainerControl(), model=run.model)


# Reference -------------------------------------------------------------------------------------------------------


def test_the_average_is_loaded_into_the_reference_on_its_own_schedule(tmp_path, tiny_model):
    reference = create_reference_model(tiny_model)
    seen = {}

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen[state.global_step] = {n: p.double().clone() for n, p in reference.named_parameters()}

    callback = BEMACallback(update_freq=2, update_ref_model=True, ref_model_update_freq=3, ref_model_update_after=2)
    callback.ref_model = Reference(tiny_model)
    callback.ref_model.copy = reference
    watch = Watch()
    build_trainer(tmp_path, tiny_model, watch, callback, After()).train()
    for step, last in {1: [], 2: [2], 4: [2], 5: [2, 4], 7: [2, 4], 8: [2, 4, 6, 8], 9: [2, 4, 6, 8]}.items():
        wanted = expected(watch.steps, last)
        for name, value in wanted.items():
            torch.testing.assert_close(seen[step][name], value, atol=1e-6, rtol=0)


def test_a_moved_reference_comes_back_on_resume(tmp_path, tiny_tokenizer):
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        model = build_model(len(tiny_tokenizer))
        callback = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=5, ref_model_update_after=2)
        callback.ref_model = create_reference_model(model)
        run = build_trainer(
            tmp_path, model, callback, save_strategy="steps", save_steps=3, max_steps=5 if resume else 6
        )
        if resume:
            run.args.max_steps = 6
            run.args.resume_from_checkpoint = resume
            start = dict(callback.ref_model.named_parameters())["model.norm.weight"].clone()
        run.train(resume_from_checkpoint=resume)
        ends.append(callback.ref_model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[1]["model.norm.weight"], start)


def test_a_reference_that_cannot_take_the_average_is_refused_before_training(tmp_path, tiny_model):
    def begin(**kwargs):
        callback = BEMACallback(update_ref_model=True)
        callback.on_train_begin(args(tmp_path), TrainerState(), TrainerControl(), model=tiny_model, **kwargs)

    with raises(ValueError, "ref_model"):
        begin()
    with raises(ValueError):
        begin(ref_model=None)
    with raises(ValueError):
        begin(ref_model=tiny_model)
    with raises(ValueError):
        begin(ref_model=tiny_model.model)
    begin(ref_model=create_reference_model(tiny_model))


def test_an_adapter_has_no_reference_to_load_the_average_into(tmp_path, tiny_model):
    import peft

    model = peft.get_peft_model(tiny_model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    callback = BEMACallback(update_ref_model=True)
    with raises(ConfigError):
        callback.on_train_begin(
            args(tmp_path),
            TrainerState(),
            TrainerControl(),
            model=model,
            ref_model=Reference(model, fresh_adapter=True),
        )
