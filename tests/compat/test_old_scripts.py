"""Scripts, notebooks and recipes in the style of 2023 to 2025: the loss of the present spelling, before and after `migrate`.

`old_scripts/` holds one file for each pattern. Its first line is the present spelling (``# now: TRAINER``), or the error
(``# refused: PATTERN``). Files that end with ``_nb.py`` are cells of a notebook.
"""

import functools
import json
import os
import re
import warnings
from pathlib import Path

import datasets
import pytest

import posttrain
from posttrain import SFTTrainer, setup_chat_format
from posttrain.extensions.migrate.files import hide_magics, migrate_file
from tests.conftest import build_model

FOLDER = Path(__file__).parent / "old_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
BASE = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none", "bf16": False, "save_strategy": "no",
        "disable_tqdm": True, "seed": 7, "per_device_train_batch_size": 4}  # fmt: skip
# Half of the cells are slow: every script runs as it is or migrated.
CELLS = [
    pytest.param(name, migrated, marks=[pytest.mark.slow] * (index % 2 == migrated), id=f"{name}-{'migrated' if migrated else 'as it is'}")
    for index, name in enumerate(SCRIPTS)
    for migrated in (False, True)
]  # fmt: skip
GROUPS = BASE | {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
PAIRED = BASE | {"per_device_train_batch_size": 8, "max_new_tokens": 8}
PPO = {name: value for name, value in PAIRED.items() if name not in ("max_steps", "max_new_tokens")} | {
    "total_episodes": 16, "response_length": 8, "num_ppo_epochs": 1,
}  # fmt: skip
ROWS = {
    "texts": [{"body": f"row {i} with some words in it"} for i in range(8)],
    "chats": [{"messages": [{"role": "user", "content": f"count to {i}"}, {"role": "assistant", "content": f"{i} and more"}]} for i in range(8)],
    "pairs": [{"prompt": f"What is {i}? ", "chosen": f"{i} is a number", "rejected": "a number " * (1 + i % 3)} for i in range(8)],
    "judged": [{"prompt": f"What is {i}? ", "completion": f"{i} is {i % 3}", "label": i % 2 == 0} for i in range(8)],
    "prompts": [{"prompt": f"Count to {i}: "} for i in range(8)],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(_tokenizer_folder, tmp_path_factory):
    """Models and data, by the paths that the scripts have."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("old")
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder)
    for name, seed in (("model", 0), ("teacher", 1), ("classifier", 0)):
        model = build_model(len(tokenizer), seed)
        if name == "classifier":
            model.config.num_labels = 1
            model = LlamaForSequenceClassification(model.config)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def fixed_rollouts(prompts, trainer):
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    answers = [[5 + index, 6, 7] for index in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}


def loaded(kind, path):
    import transformers

    return getattr(transformers, kind).from_pretrained(path)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def padded_tokenizer():
    tokenizer = loaded("AutoTokenizer", "model")
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def chatml_trainer():
    tokenizer = loaded("AutoTokenizer", "model")
    tokenizer.chat_template = None
    model, tokenizer = setup_chat_format(loaded("AutoModelForCausalLM", "model"), tokenizer)
    data = datasets.Dataset.from_list(ROWS["chats"])
    return SFTTrainer(model, posttrain.SFTConfig("now", **BASE), train_dataset=data, processing_class=tokenizer)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@functools.cache
def present(expression):
    """Losses of the present spelling."""
    names = {name: functools.partial(datasets.Dataset.from_list, rows) for name, rows in ROWS.items()}
    names |= {name: getattr(posttrain, name) for name in posttrain.__all__ if name.endswith(("Config", "Trainer"))}
    names |= {
        "tokenizer": lambda: loaded("AutoTokenizer", "model"),
        "causal": lambda: loaded("AutoModelForCausalLM", "model"),
    }
    names |= {"classifier": lambda: loaded("AutoModelForSequenceClassification", "classifier")}
    trainer = eval(expression, globals() | names)
    trainer.train()
    return losses(trainer)


def run(cells):
    """Run cells of a script one after the other. Return its variables."""
    made = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(hide_magics(cell), "old_script.py", "exec", dont_inherit=True), made)
    return made


def cells_of(path):
    if path.suffix == ".py":
        return [path.read_text()]
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "migrated"), CELLS)
def test_a_script_of_an_older_release_has_the_loss_of_the_present_spelling(name, migrated, folder, monkeypatch):
    monkeypatch.chdir(folder)
    first, text = (FOLDER / f"{name}.py").read_text().split("\n", 1)
    kind, expected = re.fullmatch(r"# (now|refused): (.*)", first).groups()
    if not migrated:
        text = re.sub(r"\b(from|import) trl\b", r"\1 posttrain", text).replace("trl.", "posttrain.")
    path, recipe = folder / f"{name}.py", folder / f"{name}.yaml"
    path.write_text(text)
    if name.endswith("_nb"):
        path = path.with_suffix(".ipynb")
        cells = [{"cell_type": "code", "source": cell} for cell in text.split("# %%\n")[1:]]
        path.write_text(json.dumps({"cells": cells}))
    if (FOLDER / recipe.name).exists():
        recipe.write_text((FOLDER / recipe.name).read_text())
    if migrated:
        notes = []
        for file in (path, recipe):
            if file.exists():
                result = migrate_file(file)
                notes += [note for note in result.notes if not note.check]
                file.write_text(result.text)
        assert bool(notes) == (kind == "refused"), notes
        assert kind == "now" or re.search(expected, "\n".join(note.text for note in notes), re.S)
    if kind == "refused":
        with pytest.raises(ImportError, match=expected):
            run(cells_of(path))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = run(cells_of(path))["trainer"]
    older = {str(one.message) for one in caught if "older releases" in str(one.message)}
    assert bool(older) != migrated or "max_prompt_length" in text, older
    if migrated and trainer.args.packing:  # Old releases joined and cut rows; `migrate` keeps that.
        expected = expected.replace("packing=True", 'packing=True, packing_strategy="wrapped"')
    assert losses(trainer) == present(expected) and len(losses(trainer)) == 2
    assert os.getcwd() == str(folder)
