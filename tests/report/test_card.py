"""The model card: metadata, quick start that runs, links, versions, and what stays out of it."""

import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import datasets
import pytest
import tokenizers
import torch
import transformers
from huggingface_hub import ModelCard

import posttrain
from posttrain.errors import ConfigError
from posttrain.report.card import create_model_card, generate_model_card
from tests.conftest import build_model
from tests.wordings import raises


class Paper(transformers.Trainer):
    _name = "XYZ"
    _tag_names = ("posttrain", "xyz")
    _paper = {"title": "A Method", "id": "2401.00001", "citation": "@article{method, title={A Method}}\n"}


class NoPaper(transformers.Trainer):
    _name = "XYZ"
    _tag_names = ("posttrain", "xyz")


@pytest.fixture(autouse=True)
def nothing_live(monkeypatch):
    for name in ("wandb", "comet_ml", "trackio", "trackio.context_vars"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("JOB_ID", raising=False)


def build(tmp_path, tokenizer, cls=Paper, model=None, identity="org/base", folder="my-run", **options):
    model = model or build_model(len(tokenizer))
    model.config._name_or_path = identity
    args = transformers.TrainingArguments(str(tmp_path / folder), report_to="none", use_cpu=True, **options)
    return cls(model, args, processing_class=tokenizer)


def card(trainer, *args, **kwargs):
    create_model_card(trainer, *args, **kwargs)
    return ModelCard.load(Path(trainer.args.output_dir) / "README.md")


def code(found):
    return re.search(r"```python\n(.*?)\n```", found.text, re.DOTALL).group(1)


# Metadata --------------------------------------------------------------------------------------------------------


def test_the_metadata_names_base_model_data_library_and_tags(tmp_path, tiny_tokenizer):
    data = card(build(tmp_path, tiny_tokenizer), "my model", "org/rows", ["mine", "xyz"]).data
    assert (data.base_model, data.library_name, data.model_name) == ("org/base", "transformers", "my model")
    assert data.datasets == ["org/rows"]
    assert data.tags == ["generated_from_trainer", "mine", "xyz", "posttrain"]


def test_a_single_tag_and_several_datasets_are_taken(tmp_path, tiny_tokenizer):
    found = card(build(tmp_path, tiny_tokenizer), None, ["org/a", "org/b"], "mine")
    assert found.data.tags == ["generated_from_trainer", "mine", "posttrain", "xyz"]
    assert found.data.datasets == ["org/a", "org/b"]
    assert "[org/b](https://huggingface.co/datasets/org/b)" in found.text


@pytest.mark.parametrize(
    ("hub_model_id", "name"), [(None, "my-run"), ("org/published", "published"), ("published", "published")]
)
def test_the_name_is_the_last_part_of_the_hub_id_or_of_the_folder(tmp_path, tiny_tokenizer, hub_model_id, name):
    found = card(build(tmp_path, tiny_tokenizer, hub_model_id=hub_model_id))
    assert found.data.model_name == name
    assert found.text.strip().startswith(f"# {name}\n")
    assert f'model="{hub_model_id or name}"' in code(found)


def test_folders_of_this_machine_stay_out_of_the_card(tmp_path, tiny_tokenizer, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for identity in (tiny_model_dir, "tiny-model", "/gone/models/base", ""):
        found = card(build(tmp_path, tiny_tokenizer, identity=identity), dataset_name="/data/private rows.jsonl")
        assert found.data.base_model is None
        assert found.data.datasets is None
        assert str(tmp_path) not in str(found)
        assert "was trained on `/data/private rows.jsonl` with XYZ" in found.text  # The caller's own words.


def test_secrets_in_names_and_addresses_stay_out_of_the_card(tmp_path, tiny_tokenizer, monkeypatch):
    page = "https://wandb.ai/runs/1?apiKey=s3cr3t"  # Of an anonymous run.
    fake(monkeypatch, "wandb", run=types.SimpleNamespace(url=page))
    found = card(build(tmp_path, tiny_tokenizer), dataset_name="https://me:s3cr3t@host/rows.json")
    assert "s3cr3t" not in str(found) and "https://wandb.ai/runs/1?apiKey=<hidden>" in found.text


def test_tags_say_where_and_with_what_it_ran(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("JOB_ID", "17")
    run = build(tmp_path, tiny_tokenizer)
    run.model.config.unsloth_version = "2026.1"
    assert card(run).data.tags == ["generated_from_trainer", "posttrain", "xyz", "unsloth", "hf_jobs"]


def fake(monkeypatch, name, **content):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_live_trackio_space_is_linked_and_replaces_an_older_tag(tmp_path, tiny_tokenizer, monkeypatch):
    variable = types.SimpleNamespace(get=lambda: "org/space")
    fake(monkeypatch, "trackio")
    fake(monkeypatch, "trackio.context_vars", current_space_id=variable)
    url = "https://huggingface.co/spaces/org/space"
    found = card(build(tmp_path, tiny_tokenizer), tags=["trackio:https://old", "mine"])
    assert found.data.tags == ["generated_from_trainer", "mine", "posttrain", "xyz", f"trackio:{url}"]
    assert f"[Trackio run]({url})" in found.text
    variable.get = lambda: None
    found = card(build(tmp_path, tiny_tokenizer), tags=["trackio:https://old"])
    assert "trackio:https://old" in found.data.tags
    assert "Trackio run" not in found.text


# Body ------------------------------------------------------------------------------------------------------------


def test_live_runs_are_linked_and_others_are_not(tmp_path, tiny_tokenizer, monkeypatch):
    assert "run](" not in card(build(tmp_path, tiny_tokenizer)).text
    fake(monkeypatch, "wandb", run=types.SimpleNamespace(url="https://wandb.example/1"))
    fake(monkeypatch, "comet_ml", get_running_experiment=lambda: types.SimpleNamespace(url="https://comet.example/2"))
    text = card(build(tmp_path, tiny_tokenizer)).text
    assert "[Weights & Biases run](https://wandb.example/1)" in text
    assert "[Comet run](https://comet.example/2)" in text
    fake(monkeypatch, "wandb", run=None)
    assert "Weights & Biases" not in card(build(tmp_path, tiny_tokenizer)).text


def test_method_paper_versions_and_citation_are_in_the_text(tmp_path, tiny_tokenizer):
    text = card(build(tmp_path, tiny_tokenizer)).text
    assert "my-run was trained from [org/base](https://huggingface.co/org/base) with XYZ" in text
    assert "XYZ, introduced in [A Method](https://huggingface.co/papers/2401.00001)." in text
    assert "```bibtex\n@article{method, title={A Method}}\n```" in text
    assert "@software{posttrain," in text
    for package in (posttrain, transformers, torch, datasets, tokenizers):
        assert f"- {package.__name__}: {package.__version__}" in text


def test_a_trainer_without_a_paper_has_a_card_without_one(tmp_path, tiny_tokenizer):
    text = card(build(tmp_path, tiny_tokenizer, NoPaper)).text
    assert "Method: XYZ." in text
    assert "introduced in" not in text
    assert "None" not in text
    assert text.count("```bibtex") == 1


@pytest.mark.parametrize("chat", [True, False])
def test_the_quick_start_of_a_generator_runs(tmp_path, tiny_tokenizer, capsys, chat):
    if not chat:
        tiny_tokenizer.chat_template = None
    run = build(tmp_path, tiny_tokenizer, hub_model_id=str(tmp_path / "model"))
    run.save_model(tmp_path / "model")
    script = code(card(run)).replace("max_new_tokens=128", "max_new_tokens=4")
    assert ("messages" in script) == chat
    exec(compile(script, "card", "exec"), {})
    assert capsys.readouterr().out


def test_the_quick_start_of_a_reward_model_runs_and_prints_its_raw_score(tmp_path, tiny_tokenizer, capsys):
    from transformers import LlamaForSequenceClassification

    config = build_model(len(tiny_tokenizer)).config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config).eval()
    run = build(tmp_path, tiny_tokenizer, model=model, hub_model_id=str(tmp_path / "model"))
    run.save_model(tmp_path / "model")
    found = card(run)
    assert found.data.pipeline_tag == "text-classification"
    exec(compile(code(found), "card", "exec"), {})
    ids = tiny_tokenizer("The sky is blue because air scatters short waves the most.", return_tensors="pt")
    with torch.no_grad():
        score = float(model.cpu()(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).logits)
    assert float(capsys.readouterr().out) == pytest.approx(score, abs=1e-4)


def test_an_adapter_has_the_card_of_the_model_it_is_on(tmp_path, tiny_tokenizer):
    import peft

    base = build_model(len(tiny_tokenizer))
    base.config._name_or_path = "org/base"
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    data = card(build(tmp_path, tiny_tokenizer, model=model)).data
    assert (data.base_model, data.pipeline_tag) == ("org/base", "text-generation")


# Where it is written ---------------------------------------------------------------------------------------------


def test_only_the_main_process_writes_and_nothing_half_written_stays(tmp_path, tiny_tokenizer, monkeypatch):
    run = build(tmp_path, tiny_tokenizer)
    monkeypatch.setattr(run, "is_world_process_zero", lambda: False)
    create_model_card(run)
    folder = tmp_path / "my-run"
    assert not (folder / "README.md").exists()
    monkeypatch.undo()
    create_model_card(run)
    assert [path.name for path in folder.iterdir()] == ["README.md"]


def test_a_trainer_of_this_package_has_its_name_and_tags_in_the_card(tmp_path, tiny_model_dir):
    rows = datasets.Dataset.from_list([{"text": "What is the sum of two numbers?"}] * 2)
    args = posttrain.SFTConfig(str(tmp_path / "run"), report_to="none", use_cpu=True)
    found = card(posttrain.SFTTrainer(tiny_model_dir, args, train_dataset=rows), dataset_name="org/rows")
    assert found.data.tags == ["generated_from_trainer", "posttrain", "sft"]
    assert "with SFT, using the library posttrain." in found.text


def test_an_unknown_task_is_refused():
    with raises(ConfigError, "task='text-generatoin'", "'text-generation'"):
        generate_model_card(model_name="x", trainer_name="SFT", task="text-generatoin")
