"""Merged checkpoints: what mergekit is asked for, when, and what is refused."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import transformers

from posttrain.compat import merge
from posttrain.compat.merge import MergeConfig, MergeModelCallback, merge_models, upload_model_to_hf
from posttrain.errors import ConfigError, MissingDependencyError, ModelError
from tests.compat.test_bema import build_trainer


@pytest.fixture
def mergekit(monkeypatch):
    """Stands in for the package: notes each merge, and that its policy was there at the time."""
    merges = []

    def run_merge(config, out, options):
        policy = config["models"][0]["model"]
        merges.append((config, out, options, (Path(policy) / "config.json").is_file()))
        Path(out).mkdir()

    configuration = types.SimpleNamespace(model_validate=lambda plain: plain)
    content = {
        "mergekit": {},
        "mergekit.config": {"MergeConfiguration": configuration},
        "mergekit.merge": {"run_merge": run_merge, "MergeOptions": lambda **options: options},
    }
    for name, values in content.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return merges


# Configs ---------------------------------------------------------------------------------------------------------


def test_each_method_asks_for_the_documented_parameters():
    def plain(method):
        return MergeConfig(method, "policy", "target").to_dict()

    assert plain("linear") == {
        "merge_method": "linear",
        "dtype": "float16",
        "models": [
            {"model": "policy", "parameters": {"weight": 0.5}},
            {"model": "target", "parameters": {"weight": 0.5}},
        ],
    }
    for method in ("ties", "dare_ties"):
        assert plain(method) == {
            "merge_method": method,
            "dtype": "float16",
            "base_model": "policy",
            "models": [
                {"model": "policy", "parameters": {"weight": 1.0, "density": [1.0, 0.7, 0.1]}},
                {"model": "target", "parameters": {"weight": 1.0, "density": [1.0]}},
            ],
            "parameters": {"normalize": 1.0},
        }
    assert plain("slerp") == {
        "merge_method": "slerp",
        "dtype": "float16",
        "base_model": "policy",
        "models": [{"model": "policy"}, {"model": "target"}],
        "parameters": {"t": 0.5},
    }


def test_a_given_parameter_wins_over_the_methods_own_and_zero_is_a_value():
    config = MergeConfig(
        "linear", "policy", "target", policy_model_weight=0.0, target_model_weight=0.9, dtype="bfloat16"
    )
    assert config.to_dict()["models"][0]["parameters"] == {"weight": 0.0}
    assert config.to_dict()["dtype"] == "bfloat16"
    assert MergeConfig("slerp", "policy", "target", t_values=[0.0, 1.0]).to_dict()["parameters"] == {"t": [0.0, 1.0]}


def test_ties_on_the_policy_as_base_says_that_the_target_is_what_comes_out(tmp_path, mergekit, caplog):
    merge_models(MergeConfig("ties", "policy", "target"), tmp_path / "one")
    assert "the result is the target" in caplog.text
    caplog.clear()
    merge_models(MergeConfig("ties", "policy", "target", base_model_path="base"), tmp_path / "two")
    assert mergekit[1][0]["base_model"] == "base"
    assert not caplog.text


def test_configs_do_not_share_their_lists():
    MergeConfig("ties").policy_model_density.append(0.0)
    assert MergeConfig("ties").policy_model_density == [1.0, 0.7, 0.1]


def test_an_unknown_method_and_a_missing_path_are_refused():
    with pytest.raises(ConfigError, match=r"method='tie' is not known \(did you mean 'ties'\?\)"):
        MergeConfig("tie")
    with pytest.raises(ConfigError, match="target_model_path is not set"):
        MergeConfig("linear", "policy").to_dict()


def test_the_configs_are_what_mergekit_reads_and_a_linear_merge_is_the_mean(tmp_path, tiny_tokenizer):
    pytest.importorskip("mergekit")
    from tests.conftest import build_model

    models = []
    for seed, name in enumerate(("policy", "target")):
        models.append(build_model(len(tiny_tokenizer), seed=seed))
        models[-1].save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    for method in merge.METHODS:
        config = MergeConfig(method, str(tmp_path / "policy"), str(tmp_path / "target"), dtype="float32")
        merge_models(config, tmp_path / method)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    weights = [m.model.layers[1].mlp.up_proj.weight for m in (*models, merged)]
    torch.testing.assert_close(weights[2], (weights[0] + weights[1]) / 2)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "linear").chat_template


def test_a_folder_with_an_adapter_is_refused(tmp_path, mergekit):
    (tmp_path / "adapter_config.json").write_text("{}")
    for config in (MergeConfig("linear", str(tmp_path), "x"), MergeConfig("linear", "x", str(tmp_path))):
        with pytest.raises(ModelError, match="holds an adapter"):
            merge_models(config, tmp_path / "out")
    assert not mergekit


# The callback ----------------------------------------------------------------------------------------------------


def start(tmp_path, tiny_model_dir, callback, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    run = build_trainer(tmp_path / "run", model, callback, max_steps=5, **options)
    run.train()
    return tmp_path / "run"


def test_the_last_step_is_merged_with_the_model_training_started_from(tmp_path, tiny_model_dir, mergekit):
    folder = start(tmp_path, tiny_model_dir, MergeModelCallback(), save_strategy="steps", save_steps=2)
    ((config, out, options, there),) = mergekit
    assert [m["model"] for m in config["models"]] == [str(folder / "checkpoint-5"), tiny_model_dir]
    assert out == str(folder / "checkpoint-5" / "merged")
    assert options["copy_tokenizer"]
    assert there


def test_the_last_step_gets_a_checkpoint_although_none_was_scheduled(tmp_path, tiny_model_dir, mergekit):
    folder = start(tmp_path, tiny_model_dir, MergeModelCallback(), save_strategy="no")
    assert (folder / "checkpoint-5" / "trainer_state.json").is_file()
    assert [(out, there) for _, out, _, there in mergekit] == [(str(folder / "checkpoint-5" / "merged"), True)]


def test_every_checkpoint_is_merged_once_when_asked_for(tmp_path, tiny_model_dir, mergekit):
    callback = MergeModelCallback(MergeConfig("slerp", target_model_path="other"), True)
    folder = start(tmp_path, tiny_model_dir, callback, save_strategy="steps", save_steps=2)
    assert [out for _, out, _, _ in mergekit] == [str(folder / f"checkpoint-{n}" / "merged") for n in (2, 4, 5)]
    assert all(config["models"][1]["model"] == "other" and there for config, _, _, there in mergekit)
    assert callback.merge_config.policy_model_path is None  # The caller's config is not written to.


def test_early_stopping_by_an_evaluation_still_leaves_a_checkpoint_to_merge(tmp_path, tiny_model_dir, mergekit):
    class Stop(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    run = build_trainer(tmp_path / "run", model, Stop(), MergeModelCallback(), eval_strategy="steps", eval_steps=1)
    run.train()
    assert [out for _, out, _, _ in mergekit] == [str(tmp_path / "run" / "checkpoint-2" / "merged")]


def test_a_last_step_without_checkpoint_is_saved_under_a_name_that_no_resume_takes(tmp_path, tiny_model_dir, mergekit):
    class Stop(transformers.TrainerCallback):
        def on_log(self, args, state, control, **_):
            control.should_training_stop = True  # After the step has ended, where nothing is saved any more.
            control.should_save = False

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    run = build_trainer(tmp_path / "run", model, MergeModelCallback(), Stop())
    run.train()
    folder = tmp_path / "run" / "policy-1"
    assert [(out, there) for _, out, _, there in mergekit] == [(str(folder / "merged"), True)]
    assert transformers.trainer_utils.get_last_checkpoint(tmp_path / "run") is None


def test_other_processes_do_not_merge(tmp_path, tiny_model, mergekit):
    callback = MergeModelCallback(MergeConfig(target_model_path="x"), True)
    args = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    state = transformers.TrainerState(global_step=2, max_steps=2, is_world_process_zero=False)
    (tmp_path / "checkpoint-2").mkdir()
    for event in (callback.on_train_begin, callback.on_save, callback.on_train_end):
        event(args, state, transformers.TrainerControl(), model=tiny_model)
    assert not mergekit


def test_what_cannot_be_merged_is_refused_before_training(tmp_path, tiny_model, mergekit):
    import peft

    def begin(callback, model=tiny_model, **options):
        args = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **options)
        callback.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl(), model=model)

    with pytest.raises(ConfigError, match="nothing to merge with"):
        begin(MergeModelCallback())
    target = MergeConfig(target_model_path="x")
    with pytest.raises(ConfigError, match="push_to_hub=True needs a repository"):
        begin(MergeModelCallback(target, push_to_hub=True))
    begin(MergeModelCallback(target, push_to_hub=True), hub_model_id="me/model")
    with pytest.raises(ModelError, match="carries an adapter"):
        begin(MergeModelCallback(target), peft.get_peft_model(tiny_model, peft.LoraConfig(target_modules=["q_proj"])))


def test_without_mergekit_it_is_refused_at_construction(monkeypatch):
    monkeypatch.setitem(sys.modules, "mergekit", None)
    with pytest.raises(MissingDependencyError, match="MergeModelCallback needs the package 'mergekit'"):
        MergeModelCallback()


def test_merged_checkpoints_go_to_an_explicit_repository(tmp_path, tiny_model_dir, mergekit, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo_id, exist_ok: calls.append(repo_id))
    monkeypatch.setattr(
        "huggingface_hub.upload_folder", lambda repo_id, folder_path: calls.append((repo_id, folder_path))
    )
    folder = start(tmp_path, tiny_model_dir, MergeModelCallback(push_to_hub=True, hub_model_id="me/model"))
    name = "me/model_checkpoint-5_merged"
    assert calls == [name, (name, folder / "checkpoint-5" / "merged")]
    with pytest.raises(ConfigError, match=r"repo_id='runs/my/model' is not the id"):
        upload_model_to_hf(tmp_path, "runs/my/model")
