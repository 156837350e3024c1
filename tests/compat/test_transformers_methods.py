"""Every method of the installed `transformers.Trainer` is called as there, refused by name, or listed here with a reason."""

import inspect

import pytest
import transformers

from posttrain import ConfigError
from posttrain.compat.overrides import UNCALLED
from tests.methods.every_trainer import EVERY, data, every
from tests.wordings import raises

REFUSED_NAMES = set(UNCALLED["PostTrainer"])
BY_USERS = "users call it, transformers' loop does not"
IRRELEVANT = {
    "_defer_fsdp_gradient_reduction": "of models that transformers shards as they are loaded",
    "_get_collator_with_removed_columns": "of streams alone",
    "_mixed_mesh_grad_norm": "of models on several device meshes",
    "_push_from_checkpoint": "with push_to_hub=True",
    "_sync_replicated_trainable_parameters": "of models that transformers shards as they are loaded",
    "_tune_save_checkpoint": "of Ray Tune",
    "_update_auto_batch_size": "with auto_find_batch_size=True",
    "call_model_init": "of hyperparameter_search",
    "end": BY_USERS,
    "get_learning_rates": BY_USERS,
    "get_num_trainable_parameters": BY_USERS,
    "get_optimizer_group": BY_USERS,
    "hyperparameter_search": BY_USERS,
    "init_hf_repo": "with push_to_hub=True",
    "log_metrics": BY_USERS,
    "metrics_format": "of log_metrics",
    "pop_callback": BY_USERS,
    "push_to_hub": BY_USERS,
    "remove_callback": BY_USERS,
    "save_metrics": BY_USERS,
    "save_state": BY_USERS,
}


def methods():
    """Public and private methods of the installed class."""
    own = vars(transformers.Trainer).items()
    return {
        name
        for name, value in own
        if not name.startswith("__") and (inspect.isfunction(value) or isinstance(value, staticmethod | classmethod))
    }


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def recording(base, names, seen):
    """A subclass that overrides all of these methods, notes which are called, and goes on with its parent's."""

    def noted(name):
        def method(self, *args, **kwargs):
            seen.add(name)
            return getattr(super(mine, self), name)(*args, **kwargs)

        def static(*args, **kwargs):
            seen.add(name)
            return getattr(base, name)(*args, **kwargs)

        return (
            staticmethod(static)
            if isinstance(inspect.getattr_static(transformers.Trainer, name), staticmethod)
            else method
        )

    mine = type("Mine", (base,), {name: noted(name) for name in names} | {"__module__": __name__})
    return mine


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_every_method_of_transformers_is_called_or_in_the_list(kind, tokenizer, tmp_path):
    names, seen = methods() - REFUSED_NAMES, set()
    counted = names - (
        {"_get_num_items_in_batch"} if kind != "sft" else set()
    )  # Refused where nothing is divided by it.
    settings = {"eval_dataset": data(kind, 4, 8), "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = every(kind, tmp_path, tokenizer, cls=recording(EVERY[kind][0], counted, seen), **settings)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.evaluate()
    if kind == "sft":
        trainer.predict(data(kind, 2))
    uncalled = set(IRRELEVANT) | ({"predict", "get_test_dataloader"} if kind != "sft" else set())
    assert counted - seen - uncalled == set()
    assert set(IRRELEVANT) <= names


@pytest.mark.parametrize("name", sorted(methods() & REFUSED_NAMES))
def test_a_method_of_transformers_that_is_not_called_is_refused(name, tokenizer, tmp_path):
    mine = recording(EVERY["sft"][0], [name], set())
    with raises(ConfigError, name, "Mine"):
        every("sft", tmp_path, tokenizer, cls=mine)
