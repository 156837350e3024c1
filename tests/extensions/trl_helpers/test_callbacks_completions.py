"""Completions while training: when, of what, where to, and that training does not notice."""

import json
import logging
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from transformers import GenerationConfig

from posttrain.errors import ConfigError, DataError
from posttrain.extensions.trl_helpers.completions import EvalPrompts, LogCompletionsCallback, to_sampling
from posttrain.extensions.trl_helpers.weave import WeaveCallback
from tests.conftest import build_model
from tests.extensions.trl_helpers.test_bema import ROWS
from tests.wordings import raises

PROMPTS = Dataset.from_list([{"prompt": text} for text in ("What is", "The answer", "two", "1 + 1 =", "user")])
GREEDY = GenerationConfig(max_new_tokens=6)
SAMPLED = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=1.5, top_k=0)


def build(folder, tokenizer, evaluation=PROMPTS, model=None, **options):
    settings = {
        "max_steps": 6,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "eval_steps": 3,
    }
    args = transformers.TrainingArguments(str(folder), **(settings | options))
    model = model or build_model(len(tokenizer))
    return transformers.Trainer(model, args, train_dataset=ROWS, eval_dataset=evaluation, processing_class=tokenizer)


def lines(folder, name="logged_completions.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def by_hand(model, tokenizer, prompt, new=6):
    """Greedy decoding, one full forward pass a token."""
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    said = []
    model.eval()
    with torch.no_grad():
        while len(said) < new and (not said or said[-1] != tokenizer.eos_token_id):
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return tokenizer.decode(said, skip_special_tokens=True)


class Snapshots(transformers.TrainerCallback):
    def __init__(self, tokenizer, prompts):
        self.tokenizer, self.prompts, self.said = tokenizer, prompts, {}

    def on_step_end(self, args, state, control, model=None, **_):
        self.said[state.global_step] = [by_hand(model, self.tokenizer, p) for p in self.prompts]
        model.train()


# What and when ---------------------------------------------------------------------------------------------------


def test_every_freq_steps_the_model_of_that_step_completes_every_prompt(tmp_path, tiny_tokenizer):
    run = build(tmp_path, tiny_tokenizer)
    watch = Snapshots(tiny_tokenizer, PROMPTS["prompt"])
    callback = LogCompletionsCallback(run, GREEDY, freq=2)
    run.add_callback(watch)
    run.add_callback(callback)
    run.train()
    wanted = [
        {"step": step, "prompt": prompt, "completion": text}
        for step in (2, 4, 6)
        for prompt, text in zip(PROMPTS["prompt"], watch.said[step], strict=True)
    ]
    assert lines(tmp_path) == wanted == callback.table
    assert watch.said[2] != watch.said[6]


def test_the_default_interval_is_the_one_of_evaluation_and_num_prompts_takes_the_first(tmp_path, tiny_tokenizer):
    run = build(tmp_path, tiny_tokenizer)
    run.add_callback(LogCompletionsCallback(run, GREEDY, num_prompts=2))
    run.train()
    assert [(row["step"], row["prompt"]) for row in lines(tmp_path)] == [
        (step, prompt) for step in (3, 6) for prompt in ("What is", "The answer")
    ]


def test_conversations_get_the_chat_template_and_stay_messages_in_the_file(tmp_path, tiny_tokenizer):
    chat = [{"role": "user", "content": "two numbers?"}]
    run = build(tmp_path, tiny_tokenizer, Dataset.from_list([{"prompt": chat}]))
    source = EvalPrompts(run, GREEDY)
    text = "<|im_start|>user\ntwo numbers?<|im_end|>\n<|im_start|>assistant\n"
    assert source.ids == [tiny_tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert source.complete() == [by_hand(run.model, tiny_tokenizer, source.ids[0])]
    run.add_callback(LogCompletionsCallback(run, GREEDY, freq=6))
    run.train()
    assert lines(tmp_path)[0]["prompt"] == chat


def test_more_prompts_asked_for_than_there_are_is_all_of_them(tmp_path, tiny_tokenizer):
    assert len(EvalPrompts(build(tmp_path, tiny_tokenizer), GREEDY, 100).complete()) == 5


def test_samples_differ_from_step_to_step_by_the_model_alone(tmp_path, tiny_tokenizer):
    source = EvalPrompts(build(tmp_path, tiny_tokenizer), SAMPLED)
    torch.manual_seed(1)
    first = source.complete()
    torch.manual_seed(2)
    assert source.complete() == first
    assert EvalPrompts(build(tmp_path, tiny_tokenizer, seed=7), SAMPLED).complete() != first


def test_a_stream_gives_its_first_rows(tmp_path, tiny_tokenizer):
    run = build(tmp_path, tiny_tokenizer, PROMPTS.to_iterable_dataset())
    assert EvalPrompts(run, GREEDY, 2).prompts == ["What is", "The answer"]
    with raises(ConfigError, "num_prompts"):
        EvalPrompts(run, GREEDY)


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_prompts_are_split_over_ranks_without_losing_doubling_or_reordering(
    tmp_path, tiny_tokenizer, monkeypatch, processes
):
    from posttrain.models import parallel

    run = build(tmp_path, tiny_tokenizer)
    whole = EvalPrompts(run, SAMPLED)
    parts = []
    monkeypatch.setattr(parallel, "all_gather_objects", lambda items, _: items)
    for rank in range(processes):
        whole.trainer = types.SimpleNamespace(
            accelerator=types.SimpleNamespace(
                num_processes=processes,
                process_index=rank,
                autocast=run.accelerator.autocast,
                unwrap_model=run.accelerator.unwrap_model,
                distributed_type="NO",
            ),
            args=run.args,
            model=run.model,
            model_wrapped=run.model_wrapped,
        )
        seen = []
        monkeypatch.setattr(whole, "_batch", lambda indices, seen=seen: seen.append(indices) or indices)
        parts.append(whole.complete())
        assert all(0 < len(batch) <= 2 for batch in seen)
    assert [index for part in parts for index in part] == [0, 1, 2, 3, 4]


# Training does not notice ----------------------------------------------------------------------------------------


def test_sampling_leaves_the_training_run_bit_for_bit_as_it_was(tmp_path, tiny_tokenizer):
    ends = []
    for name in ("with", "without"):
        model = build_model(len(tiny_tokenizer), attention_dropout=0.3)
        run = build(tmp_path / name, tiny_tokenizer, model=model)
        if name == "with":
            run.add_callback(LogCompletionsCallback(run, SAMPLED, freq=1))
        run.train()
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_padding_side_training_mode_and_checkpointing_settings_are_left_alone(tmp_path, tiny_tokenizer):
    tiny_tokenizer.padding_side = "right"
    run = build(tmp_path, tiny_tokenizer)
    model = run.model
    model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
    layer = model.model.layers[0]
    before = layer._gradient_checkpointing_func
    model.train()
    model.lm_head.eval()  # One module that its owner keeps in eval mode.
    EvalPrompts(run, SAMPLED).complete()
    assert tiny_tokenizer.padding_side == "right"
    assert [module.training for module in model.modules()] == [m is not model.lm_head for m in model.modules()]
    assert layer.gradient_checkpointing
    assert layer._gradient_checkpointing_func is before
    assert before.keywords == {"use_reentrant": True, "preserve_rng_state": False}


def test_samples_are_drawn_without_dropout(tmp_path, tiny_tokenizer):
    model = build_model(len(tiny_tokenizer), attention_dropout=0.9)
    run = build(tmp_path, tiny_tokenizer, model=model)
    wanted = [by_hand(model, tiny_tokenizer, prompt) for prompt in PROMPTS["prompt"]]
    model.train()
    assert EvalPrompts(run, GREEDY).complete() == wanted


def test_the_mode_comes_back_when_generation_fails(tmp_path, tiny_tokenizer, monkeypatch):
    run = build(tmp_path, tiny_tokenizer)
    source = EvalPrompts(run, GREEDY)
    source.complete()
    run.model.train()
    monkeypatch.setattr(run.model.model.layers[1], "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        source.complete()
    assert all(module.training for module in run.model.modules())


# Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "text"),
    [
        (None, "the trainer has no eval_dataset"),
        (ROWS, r"no 'prompt' column. Its columns are \['input_ids', 'labels'\]. Tokenization and packing"),
        (DatasetDict(easy=PROMPTS, hard=PROMPTS), "several datasets \\(easy, hard\\)"),
        (Dataset.from_list([{"prompt": "What"}, {"prompt": ""}]), "row 1, column 'prompt': it is empty"),
    ],
)
def test_a_set_without_prompts_is_refused_at_construction(tmp_path, tiny_tokenizer, evaluation, text):
    with pytest.raises(ValueError, match=text):
        LogCompletionsCallback(build(tmp_path, tiny_tokenizer, evaluation))


def test_prompts_may_come_from_another_dataset(tmp_path, tiny_tokenizer):
    run = build(tmp_path, tiny_tokenizer, DatasetDict(easy=PROMPTS))
    assert len(LogCompletionsCallback(run, GREEDY, dataset=run.eval_dataset["easy"]).source.ids) == 5


def test_a_prompt_that_does_not_fit_is_refused_by_row_instead_of_cut(tmp_path, tiny_tokenizer):
    rows = Dataset.from_list([{"prompt": "What"}, {"prompt": "word " * 300}])
    with raises(DataError, "eval_dataset", "row 1", "max_new_tokens=6", "512"):
        LogCompletionsCallback(build(tmp_path, tiny_tokenizer, rows), GREEDY)


@pytest.mark.parametrize("options", [{"freq": 0}, {"num_prompts": 0}])
def test_counts_below_one_are_refused(tmp_path, tiny_tokenizer, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=0 must be at least 1"):
        LogCompletionsCallback(build(tmp_path, tiny_tokenizer), **options)


def test_a_generation_config_becomes_sampling_settings(tiny_tokenizer, tiny_model):
    given = GenerationConfig(
        max_new_tokens=9, do_sample=True, temperature=0.7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, eos_token_id=7
    )
    sampling = to_sampling(given, tiny_tokenizer, tiny_model, seed=3)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.min_p) == (9, 0.7, 0.9, 0.1)
    assert (sampling.top_k, sampling.repetition_penalty, sampling.seed) == (50, 1.2, 3)
    assert {2, 7} <= set(sampling.stop_token_ids)
    greedy = to_sampling(GenerationConfig(temperature=0.7), tiny_tokenizer, tiny_model, seed=0)
    assert (greedy.temperature, greedy.top_k, greedy.max_new_tokens) == (0.0, 0, 256)
    tiny_model.generation_config.do_sample = True
    tiny_model.generation_config.top_k = 7
    assert to_sampling(None, tiny_tokenizer, tiny_model, seed=0).top_k == 7


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"max_length": 20}, {"stop_strings": ["x"]}])
def test_what_no_engine_can_do_is_refused_by_name(tiny_tokenizer, tiny_model, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        to_sampling(GenerationConfig(**options), tiny_tokenizer, tiny_model, seed=0)


# Files and trackers ----------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_table_and_a_fresh_one_keeps_the_older_file(tmp_path, tiny_tokenizer):
    def train(resume=None):
        run = build(tmp_path, tiny_tokenizer, save_strategy="steps", save_steps=3)
        callback = LogCompletionsCallback(run, GREEDY, 2, 2)
        run.add_callback(callback)
        run.train(resume_from_checkpoint=resume)
        return callback.table

    whole = train()
    with (tmp_path / "logged_completions.jsonl").open("a") as file:
        file.write('{"step": 7, "pro')  # Cut off by a crash.
    resumed = train(str(tmp_path / "checkpoint-3"))
    assert [row["step"] for row in resumed] == [2, 2, 4, 4, 6, 6]
    assert lines(tmp_path) == resumed == whole
    train()
    assert lines(tmp_path, "logged_completions-1.jsonl") == whole


def fake(monkeypatch, name, **content):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in content.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def table(columns, data):
    return {"columns": columns, "data": data}


def test_the_growing_table_goes_to_every_tracker_that_is_asked_for(tmp_path, tiny_tokenizer, monkeypatch):
    logged = {"wandb": [], "trackio": [], "comet_ml": [], "mlflow": []}
    fake(monkeypatch, "wandb", run=object(), Table=table, log=logged["wandb"].append)
    fake(monkeypatch, "trackio", Table=table, log=logged["trackio"].append)
    experiment = types.SimpleNamespace(log_table=lambda *a, **k: logged["comet_ml"].append((a, k)))
    fake(monkeypatch, "comet_ml", get_running_experiment=lambda: experiment)
    fake(monkeypatch, "mlflow", active_run=object, log_table=lambda *a: logged["mlflow"].append(a))
    run = build(tmp_path, tiny_tokenizer, max_steps=4)
    run.add_callback(LogCompletionsCallback(run, GREEDY, 2, 2))
    run.args.report_to = list(logged)
    run.train()
    rows = [[r["step"], r["prompt"], r["completion"]] for r in lines(tmp_path)]
    columns = ["step", "prompt", "completion"]
    tables = [{"completions": table(columns, rows[:2])}, {"completions": table(columns, rows)}]
    assert logged["wandb"] == logged["trackio"] == tables
    assert logged["comet_ml"][-1] == (("completions.csv",), {"tabular_data": rows, "headers": columns})
    last = dict(zip(columns, map(list, zip(*rows[2:], strict=True)), strict=True))
    assert logged["mlflow"][-1] == (last, "completions.json")


def test_a_tracker_that_is_not_asked_for_gets_nothing_and_one_that_fails_does_not_stop_training(
    tmp_path, tiny_tokenizer, monkeypatch, caplog
):
    logged = []
    fake(monkeypatch, "wandb", run=object(), Table=table, log=logged.append)
    fake(monkeypatch, "trackio", Table=table, log=lambda _: 1 / 0)
    run = build(tmp_path, tiny_tokenizer)
    run.add_callback(LogCompletionsCallback(run, GREEDY, 1, 2))
    run.args.report_to = ["trackio"]
    run.train()
    assert not logged
    assert caplog.text.count("could not be sent to trackio: ZeroDivisionError") == 1
    assert len(lines(tmp_path)) == 3


def test_thumbnails_go_to_trackers_as_images_of_their_own_type_and_to_others_not_at_all(monkeypatch):
    from posttrain.extensions.images.picture import read_picture
    from posttrain.report.completions import RolloutTableCallback
    from tests.vision_families import noise

    logged = {"wandb": [], "trackio": [], "comet_ml": [], "mlflow": []}
    for name in ("wandb", "trackio"):
        own = {"Image": lambda image, name=name: (name, image.size), "Table": table, "log": logged[name].append}
        fake(monkeypatch, name, run=object(), **own)
    experiment = types.SimpleNamespace(log_table=lambda *a, **k: logged["comet_ml"].append(k))
    fake(monkeypatch, "comet_ml", get_running_experiment=lambda: experiment)
    fake(monkeypatch, "mlflow", active_run=object, log_table=lambda *a: logged["mlflow"].append(a[0]))
    shown = [read_picture(noise(640, 480)).thumbnail()]
    rows = [
        {"step": 1, "prompt": "p", "completion": "c", "thumbnails": shown},
        {"step": 1, "prompt": "q", "completion": "d"},
    ]
    callback = RolloutTableCallback(types.SimpleNamespace(listeners=[]), [], rows=4)
    monkeypatch.setattr(callback, "_print", lambda *_: None)
    callback.add(rows, False)
    callback.on_log(types.SimpleNamespace(report_to=list(logged)), types.SimpleNamespace(global_step=1), None)
    for name in ("wandb", "trackio"):
        (sent,) = (one["completions"] for one in logged[name])
        place = sent["columns"].index("thumbnails")
        # A row without an image has an empty list: no row is shown another's.
        assert [row[place] for row in sent["data"]] == [[(name, (64, 48))], []]
    assert logged["comet_ml"][0]["headers"] == ["step", "prompt", "completion"] == list(logged["mlflow"][0])


# Weave -----------------------------------------------------------------------------------------------------------


class FakeWeave:
    """Notes what it is told, with the attributes that were in force."""

    def __init__(self, monkeypatch, client=None):
        self.calls, self.evaluations, self.inits, self.current = [], [], [], None
        self.client = client
        fake(
            monkeypatch,
            "weave",
            get_client=lambda: self.client,
            init=self.init,
            attributes=self.attributes,
            EvaluationLogger=self.evaluation,
        )

    def init(self, project):
        self.inits.append(project)
        return self

    def attributes(self, values):
        from contextlib import contextmanager

        @contextmanager
        def scope():
            self.current = values
            yield
            self.current = None

        return scope()

    def create_call(self, op, inputs):
        return {"op": op, **inputs, "attributes": self.current}

    def finish_call(self, call, output):
        self.calls.append(call | {"output": output})

    def evaluation(self, model, dataset):
        found = {"model": model, "dataset": dataset, "predictions": [], "attributes": self.current}
        self.evaluations.append(found)

        def log_prediction(inputs, output):
            entry = {**inputs, "output": output, "scores": {}, "finished": False}
            found["predictions"].append(entry)
            return types.SimpleNamespace(
                log_score=lambda scorer, score: entry["scores"].__setitem__(scorer, score),
                finish=lambda: entry.__setitem__("finished", True),
            )

        return types.SimpleNamespace(
            log_prediction=log_prediction, log_summary=lambda summary: found.__setitem__("summary", summary)
        )


def evaluated(run, monkeypatch):
    """Evaluation itself needs labels; here only its event matters."""
    monkeypatch.setattr(
        run, "evaluate", lambda *_, **__: run.callback_handler.on_evaluate(run.args, run.state, run.control, {})
    )
    return run


def test_without_scorers_every_completion_is_a_trace_with_its_attributes(tmp_path, tiny_tokenizer, monkeypatch):
    weave = FakeWeave(monkeypatch)
    run = evaluated(build(tmp_path, tiny_tokenizer, eval_strategy="steps"), monkeypatch)
    watch = Snapshots(tiny_tokenizer, PROMPTS["prompt"][:2])
    run.add_callback(watch)
    run.add_callback(WeaveCallback(run, "team/project", generation_config=GREEDY, num_prompts=2, model_name="mine"))
    run.train()
    assert weave.inits == ["team/project"]
    assert [(c["prompt"], c["output"]) for c in weave.calls] == [
        (prompt, text) for step in (3, 6) for prompt, text in zip(PROMPTS["prompt"][:2], watch.said[step], strict=True)
    ]
    assert [c["attributes"]["training_step"] for c in weave.calls] == [3, 3, 6, 6]
    assert weave.calls[0]["attributes"]["model_name"] == "mine"
    assert weave.calls[0]["attributes"]["generation_config"]["max_new_tokens"] == 6


def test_scorers_make_an_evaluation_and_one_that_fails_is_left_out_of_the_average(
    tmp_path, tiny_tokenizer, monkeypatch, caplog
):
    def picky(prompt, completion):
        if prompt == "two":
            raise KeyError("no answer")
        return 2.0

    weave = FakeWeave(monkeypatch)
    run = evaluated(build(tmp_path, tiny_tokenizer, eval_strategy="steps", eval_steps=6), monkeypatch)
    scorers = {"letters": lambda prompt, completion: len(prompt), "picky": picky, "broken": lambda *_: "high"}
    run.add_callback(WeaveCallback(run, "p", scorers, GREEDY, dataset_name="held out"))
    run.train()
    (found,) = weave.evaluations
    assert found["dataset"] == "held out"
    assert all(entry["finished"] for entry in found["predictions"])
    assert [entry["scores"].get("picky") for entry in found["predictions"]] == [2.0, 2.0, None, 2.0, 2.0]
    letters = [len(prompt) for prompt in PROMPTS["prompt"]]
    assert found["summary"] == {
        "total_predictions": 5,
        "successful_predictions": 5,
        "avg_letters": sum(letters) / 5,
        "avg_picky": 2.0,
    }
    assert "scorer 'picky' failed" in caplog.text
    assert "scorer 'broken' failed" in caplog.text


def test_a_prediction_that_fails_is_skipped_and_counted(tmp_path, tiny_tokenizer, monkeypatch):
    weave = FakeWeave(monkeypatch)
    original = weave.evaluation

    def failing(model, dataset):
        logger = original(model, dataset)
        log = logger.log_prediction

        def log_prediction(inputs, output):
            if inputs["prompt"] == "two":
                raise ConnectionError
            return log(inputs, output)

        logger.log_prediction = log_prediction
        return logger

    sys.modules["weave"].EvaluationLogger = failing
    run = evaluated(build(tmp_path, tiny_tokenizer, eval_strategy="steps", eval_steps=6), monkeypatch)
    run.add_callback(WeaveCallback(run, "p", {"one": lambda *_: 1}, GREEDY))
    run.train()
    assert weave.evaluations[0]["summary"] == {
        "total_predictions": 5,
        "successful_predictions": 4,
        "avg_one": 1.0,
    }


def test_a_live_client_comes_first_then_the_project_then_the_wandb_run(tmp_path, tiny_tokenizer, monkeypatch):
    weave = FakeWeave(monkeypatch)
    fake(monkeypatch, "wandb", run=types.SimpleNamespace(entity="team", project="runs"))
    run = build(tmp_path, tiny_tokenizer)
    WeaveCallback(run, None, generation_config=GREEDY)._connect()
    WeaveCallback(run, "mine", generation_config=GREEDY)._connect()
    assert weave.inits == ["team/runs", "mine"]
    weave.client = object()
    assert WeaveCallback(run, "mine", generation_config=GREEDY)._connect() is weave.client
    assert weave.inits == ["team/runs", "mine"]


def test_nowhere_to_log_to_is_an_error_before_the_first_step(tmp_path, tiny_tokenizer, monkeypatch):
    FakeWeave(monkeypatch)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = build(tmp_path, tiny_tokenizer)
    run.add_callback(WeaveCallback(run, generation_config=GREEDY))
    with raises(ValueError):
        run.train()
    assert run.state.global_step == 0


def test_without_the_package_it_warns_and_does_nothing(tmp_path, tiny_tokenizer, caplog):
    run = evaluated(build(tmp_path, tiny_tokenizer, None), pytest.MonkeyPatch())
    with caplog.at_level(logging.WARNING):
        run.add_callback(WeaveCallback(run))
    assert "weave is not installed" in caplog.text
    run.train()
    run.evaluate()


def test_several_evaluation_sets_at_one_step_are_sampled_once(tmp_path, tiny_tokenizer, monkeypatch):
    weave = FakeWeave(monkeypatch)
    run = evaluated(build(tmp_path, tiny_tokenizer), monkeypatch)
    run.add_callback(WeaveCallback(run, "p", generation_config=GREEDY, num_prompts=1))
    for step in (3, 3, 4):
        run.state.global_step = step
        run.evaluate()
    assert [call["attributes"]["training_step"] for call in weave.calls] == [3, 4]
