"""TRL's module paths after changing the package's name."""

import importlib.abc
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import warnings

import pytest
import torch

import posttrain
from posttrain.compat.paths import MODULES, MOVED
from posttrain.compat.trl_names import refused
from tests.wordings import raises

INSTEAD = refused("import")

# Imports that scripts on top of TRL write; the package's name is the only thing changed.
WRITTEN = """
trainer.sft_trainer SFTTrainer
trainer.sft_trainer DataCollatorForLanguageModeling
trainer.sft_config SFTConfig
trainer.dpo_trainer DPOTrainer
trainer.dpo_trainer DataCollatorForPreference
trainer.dpo_config DPOConfig
trainer.grpo_trainer GRPOTrainer
trainer.grpo_trainer RewardFunc
trainer.grpo_trainer RolloutFunc
trainer.grpo_trainer EnvironmentFactory
trainer.grpo_config GRPOConfig
trainer.rloo_trainer RLOOTrainer
trainer.rloo_config RLOOConfig
trainer.reward_trainer RewardTrainer
trainer.reward_config RewardConfig
trainer.kto_trainer KTOTrainer
trainer.kto_trainer DataCollatorForUnpairedPreference
trainer.kto_config KTOConfig
trainer.model_config ModelConfig
trainer.callbacks LogCompletionsCallback
trainer.callbacks RichProgressCallback
trainer.callbacks SyncRefModelCallback
trainer.callbacks BEMACallback
trainer.callbacks WeaveCallback
trainer.utils selective_log_softmax
trainer.utils entropy_from_logits
trainer.utils pad
trainer.utils flush_left
trainer.utils disable_dropout_in_model
trainer.utils get_peft_config
trainer.utils get_quantization_config
trainer.utils RepeatSampler
trainer.utils print_prompt_completions_sample
trainer.utils ensure_master_addr_port
trainer.utils decode_and_strip_padding
trainer.ppo_trainer PPOTrainer
trainer.judges OpenAIPairwiseJudge
trainer PPOConfig
models create_reference_model
models unwrap_model_for_generation
models.utils create_reference_model
models.utils unwrap_model_for_generation
models.activation_offloading get_act_offloading_ctx_manager
data_utils apply_chat_template
data_utils maybe_apply_chat_template
data_utils is_conversational
data_utils maybe_extract_prompt
data_utils pack_dataset
data_utils unpair_preference_dataset
chat_template_utils clone_chat_template
chat_template_utils get_training_chat_template
import_utils is_vllm_available
import_utils is_liger_kernel_available
import_utils TRLExperimentalWarning
scripts.utils ScriptArguments
scripts.utils TrlParser
scripts.utils init_zero_verbose
scripts ScriptArguments
extras.profiling profiling_context
extras.profiling profiling_decorator
generation.vllm_client VLLMClient
extras.vllm_client VLLMClient
core masked_mean
experimental.cpo CPOTrainer
experimental.orpo ORPOConfig
experimental.online_dpo OnlineDPOTrainer
experimental.ppo PPOTrainer
experimental.async_grpo AsyncGRPOTrainer
trainer.async_grpo_trainer AsyncGRPOTrainer
trainer.async_grpo_config AsyncGRPOConfig
experimental.utils pad_to_length
experimental.bema_for_ref_model BEMACallback
rewards.format_rewards think_format_reward
rewards.accuracy_rewards accuracy_reward
rewards.other_rewards get_soft_overlong_punishment
""".strip().split("\n")


@pytest.mark.parametrize("line", WRITTEN)
def test_a_path_of_trl_gives_the_public_name(line):
    module, name = line.split()
    found = getattr(importlib.import_module(f"posttrain.{module}"), name)
    assert found is getattr(posttrain, name)


def test_import_statements_and_attributes_both_work():
    import posttrain.trainer.utils
    from posttrain.trainer.utils import pad

    assert posttrain.trainer.utils.pad is pad is posttrain.pad


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_a_name_without_a_twin_says_what_to_use(name):
    for module in ("posttrain.trainer.utils", "posttrain"):
        with raises(ImportError) as caught:
            getattr(importlib.import_module(module), name)
        assert name in str(caught.value) and caught.value.name == name
        assert INSTEAD[name].removeprefix("nothing: ") in str(caught.value)


@pytest.mark.parametrize("module", ["posttrain", "posttrain.trainer.utils"])
def test_all_names_of_an_import_statement_that_are_not_here_are_named_at_once(module):
    statement = f"from {module} import pad, ConstantLengthDataset, selective_logsoftmax, DDPOConfig"
    with raises(ImportError) as caught:
        exec(statement, {})
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["ConstantLengthDataset", "selective_logsoftmax", "DDPOConfig"]
    assert (
        'packing_strategy="wrapped"' in lines[0] and "'selective_log_softmax'" in lines[1] and "diffusion" in lines[2]
    )


def test_submodules_of_the_package_are_still_imported_by_name():
    exec("from posttrain import losses, SFTConfig", made := {})
    assert made["losses"] is importlib.import_module("posttrain.losses")
    assert not hasattr(posttrain, "no_such_name")


@pytest.mark.parametrize("name", ["MergeModelCallback", "ConstantLengthDataset"])
def test_the_package_itself_says_what_to_use_too(name):
    with raises(ImportError):
        getattr(posttrain, name)


def test_a_name_that_trl_has_twice_is_that_of_its_module():
    from posttrain.trainer.dpo_trainer import DataCollatorForPreference
    from posttrain.trainer.reward_trainer import DataCollatorForPreference as Reward

    assert (
        Reward is posttrain.DataCollatorForReward and DataCollatorForPreference is posttrain.DataCollatorForPreference
    )


def test_a_name_with_a_twin_is_not_in_the_table_of_those_without():
    assert not set(INSTEAD) & set(posttrain.__all__)


def test_an_unknown_name_or_module_is_an_import_error():
    with pytest.raises(ImportError, match="no_such_name"):
        from posttrain.trainer.utils import no_such_name  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("posttrain.trainer.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("posttrain.no_such_module")
    with pytest.raises(AttributeError):
        importlib.import_module("posttrain.models").no_such_name  # noqa: B018


def test_no_path_of_trl_hides_a_module_of_ours():
    for module in MODULES:
        assert type(importlib.util.find_spec(module).loader).__name__ == "Loader", module


def test_one_standard_finder_serves_all_paths():
    finders = [finder for finder in sys.meta_path if type(finder).__module__ == "posttrain"]
    assert len(finders) == 1 and isinstance(finders[0], importlib.abc.MetaPathFinder)
    assert finders[0].find_spec("trl.trainer") is None
    assert all(os.path.isdir(path) for package in (posttrain, posttrain.models) for path in package.__path__)


def test_importing_the_package_imports_neither_torch_nor_compat():
    script = "import sys, posttrain; assert not {'torch', 'posttrain.compat', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


class Words:
    pad_token_id = 0

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids.tolist()))


def test_padding_goes_from_the_ends_and_reasoning_stays():
    ids = torch.tensor([[0, 0, 5, 0, 6], [7, 8, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert posttrain.decode_and_strip_padding(ids, Words()) == ["5 0 6", "7 8", ""]
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert posttrain.decode_and_strip_padding(ids, Words(), mask) == ["0 5 0 6", "7 8 0", ""]
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(3, 5\)"):
        posttrain.decode_and_strip_padding(ids, Words(), mask[:, 1:])


def test_a_port_is_chosen_where_the_environment_names_none(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "auto")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    posttrain.ensure_master_addr_port()
    assert os.environ["MASTER_ADDR"] == "localhost" and 0 < int(os.environ["MASTER_PORT"]) < 65536
    monkeypatch.setenv("MASTER_PORT", "1234")
    posttrain.ensure_master_addr_port("other")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "1234")
    posttrain.ensure_master_addr_port(port=99)
    assert os.environ["MASTER_PORT"] == "99"


def test_a_filter_for_trls_warning_is_accepted():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=posttrain.TRLExperimentalWarning)


def test_what_the_table_says_to_use_is_there():
    for instead in INSTEAD.values():
        for name in re.findall(r"posttrain\.(\w+)", instead):
            assert name in posttrain.__all__, instead


@pytest.mark.parametrize(
    ("path", "name", "fix"),
    [
        ("experimental.prm", "PRMTrainer", "RewardTrainer"),
        ("experimental.prm", "PRMConfig", "RewardConfig"),
        ("experimental.grpo_with_replay_buffer", "GRPOWithReplayBufferTrainer", "dynamic_sampling"),
        ("experimental.grpo_with_replay_buffer", "GRPOWithReplayBufferConfig", "dynamic_sampling"),
    ],
)
def test_methods_that_older_versions_had_are_refused_with_what_does_their_job(path, name, fix):
    with pytest.raises(ImportError, match=fix):
        getattr(importlib.import_module(f"posttrain.{path}"), name)


def test_gspo_with_token_ratios_is_grpo():
    assert importlib.import_module("posttrain.experimental.gspo_token").GRPOTrainer is posttrain.GRPOTrainer


@pytest.mark.parametrize("path", sorted(MOVED))
def test_whoever_looks_through_all_modules_does_not_import_the_moved_one(path):
    module = importlib.import_module(path)
    assert getattr(module, "__file__", None) is None  # As inspect, pytest and hypothesis ask of every module.


@pytest.mark.parametrize("path", sorted(set(MOVED) - {"posttrain.rollouts.vllm_worker"}))  # That one needs vLLM.
def test_a_documented_path_of_a_moved_module_still_imports_its_names(path):
    old, new = importlib.import_module(path), importlib.import_module(MOVED[path])
    names = [name for name in vars(new) if not name.startswith("_")]
    assert names and all(getattr(old, name) is getattr(new, name) for name in names)


def test_modules_of_models_are_imported_by_their_names():
    """``forward`` is also an old name of TRL, whose refusal is an ImportError."""
    for module in pkgutil.iter_modules(posttrain.models.__path__):
        with pytest.raises(AttributeError):
            posttrain.models.__getattr__(module.name)
