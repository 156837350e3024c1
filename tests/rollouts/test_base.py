"""Which engine a name stands for: on a CPU, on a GPU, and under the settings of a trainer."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from posttrain import AsyncGRPOConfig, GRPOConfig, OnlineDPOConfig, PPOConfig, RLOOConfig
from posttrain.errors import ConfigError, MissingDependencyError
from posttrain.extensions.vllm import engine as vllm
from posttrain.methods.online_config import resolve_auto
from posttrain.rollouts import paged
from posttrain.rollouts.engines import choose_engine, complete, create_engine
from posttrain.rollouts.native import engine as native
from posttrain.rollouts.shared_memory import SHARED_FOLDER
from tests.conftest import build_model
from tests.wordings import raises


class OnGpu(nn.Module):
    """Says that its parameters are on a GPU."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda"))])


@pytest.fixture
def available(monkeypatch):
    """Sets the reasons against each engine; an engine without a reason can be used."""

    def set_reasons(**reasons):
        asked = {
            "vllm": (vllm, "vllm_refusal"),
            "paged": (paged, "paged_refusal"),
            "native": (native, "native_is_exact"),
        }
        for name, place in asked.items():
            monkeypatch.setattr(*place, lambda _, name=name: reasons.get(name))

    return set_reasons


@pytest.mark.parametrize(
    ("reasons", "chosen"),
    [
        ({}, "vllm"),
        ({"vllm": "not installed"}, "native"),
        ({"vllm": "not installed", "native": "mamba"}, "paged"),
        ({"vllm": "not installed", "native": "mamba", "paged": "too old"}, "hf"),
    ],
)
def test_on_a_gpu_auto_is_vllm_then_native_then_continuous_batching_and_one_line_says_why(
    available, caplog, reasons, chosen
):
    available(**reasons)
    with caplog.at_level(logging.INFO, "posttrain"):
        assert choose_engine(OnGpu()) == chosen
    (line,) = caplog.messages
    assert chosen in line
    assert "cuda" in line
    assert all(name in line and reason in line for name, reason in reasons.items())
    assert (caplog.records[0].levelno == logging.WARNING) == (chosen == "hf")


def test_on_a_cpu_auto_never_asks_for_the_engines_of_gpus(monkeypatch):
    for place in ((vllm, "vllm_refusal"), (paged, "paged_refusal")):
        monkeypatch.setattr(*place, lambda _: pytest.fail("asked"))
    assert choose_engine(build_model(50)) == "native"


def test_an_engine_that_the_caller_refuses_is_not_chosen(available, caplog):
    available()
    caplog.set_level(logging.INFO, "posttrain")
    assert choose_engine(OnGpu(), {"vllm": "the method samples from two models"}) == "native"
    assert "the method samples from two models" in caplog.text


def test_auto_takes_native_where_it_is_exact_and_hf_elsewhere(caplog):
    native.VERDICTS.clear()
    assert create_engine("auto", build_model(50), pad_token_id=0).name == "native"
    config = CONFIG_MAPPING["mamba"](vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    assert create_engine("auto", AutoModelForCausalLM.from_config(config), pad_token_id=0).name == "hf"
    assert "hf" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.WARNING


def test_an_unknown_name_and_an_option_of_another_engine_are_told(caplog):
    with raises(ConfigError, "'native'"):
        create_engine("nativ", build_model(50), pad_token_id=0)
    create_engine("native", build_model(50), pad_token_id=0, cache="static")
    assert "cache_implementation='static' is ignored" in caplog.text
    assert create_engine("hf", build_model(50), pad_token_id=0, cache="static").cache_implementation == "static"


@pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="no shared memory here")
def test_what_a_run_that_was_killed_with_its_workers_left_in_shared_memory_is_removed_by_the_next_one_that_samples():
    left = SHARED_FOLDER / f"posttrain-{os.getpid()}-left"  # Nobody holds it.
    left.mkdir()
    (left / "weights-1.safetensors").touch()
    create_engine("hf", build_model(50), pad_token_id=0)
    assert not left.exists()


# Reasons against each engine -----------------------------------------------------------------------------------------


@pytest.fixture
def fake_vllm(monkeypatch):
    """A vLLM that knows Llama alone."""
    module = SimpleNamespace(
        __version__="9.9", ModelRegistry=SimpleNamespace(get_supported_archs=lambda: ["LlamaForCausalLM"])
    )
    monkeypatch.setattr(vllm, "require", lambda *_: module)


def named(architecture="LlamaForCausalLM", path="some/model"):
    model = build_model(50)
    model.config.architectures, model.config._name_or_path = [architecture], path
    model.config.name_or_path = path
    return model


def test_vllm_is_refused_where_it_is_not_installed(monkeypatch):
    def missing(*_):
        raise MissingDependencyError("vllm is not installed")

    monkeypatch.setattr(vllm, "require", missing)
    assert "not installed" in vllm.vllm_refusal(named())


def test_vllm_is_refused_for_models_that_it_does_not_have_or_cannot_load(fake_vllm):
    assert vllm.vllm_refusal(named()) is None
    assert "9.9" in vllm.vllm_refusal(named("OtherForCausalLM"))
    assert "OtherForCausalLM" in vllm.vllm_refusal(named("OtherForCausalLM"))
    assert "folder" in vllm.vllm_refusal(named(path=""))


# Under a trainer's config --------------------------------------------------------------------------------------------


def resolved(tmp_path, kind=GRPOConfig, processor=None, **settings):
    args = kind(str(tmp_path), bf16=False, report_to="none", **settings)
    resolve_auto(args, OnGpu(), processor)
    return "vllm" if getattr(args, "use_vllm", False) else args.rollout_engine


@pytest.mark.parametrize(
    ("kind", "settings", "chosen"),
    [
        (GRPOConfig, {}, "vllm"),
        (GRPOConfig, {"rollout_engine": "hf"}, "hf"),
        (GRPOConfig, {"top_p": 0.9, "min_p": 0.1}, "vllm"),
        # A correction would be off by what the penalty did; in half precision continuous batching is corrected for too.
        (GRPOConfig, {"repetition_penalty": 1.1}, "native"),
        (GRPOConfig, {"repetition_penalty": 1.1, "vllm_importance_sampling_correction": False}, "vllm"),
        (RLOOConfig, {"repetition_penalty": 1.1}, "native"),
        (GRPOConfig, {"generation_kwargs": {"no_repeat_ngram_size": 3}}, "native"),
        (RLOOConfig, {}, "vllm"),
        (OnlineDPOConfig, {}, "vllm"),
        (AsyncGRPOConfig, {}, "native"),
        (PPOConfig, {}, "native"),
    ],
)
def test_a_config_rules_out_engines_that_its_method_or_its_sampling_cannot_use(
    available, tmp_path, kind, settings, chosen
):
    available()
    assert resolved(tmp_path, kind, **settings) == chosen


def test_vllm_that_auto_chose_runs_in_the_trainers_process(available, tmp_path):
    available()
    args = GRPOConfig(str(tmp_path), bf16=False, report_to="none", vllm_mode="server")
    resolve_auto(args, OnGpu(), None)
    assert (args.use_vllm, args.vllm_mode) == (True, "colocate")


def test_continuous_batching_is_not_chosen_for_a_processor(available, tmp_path):
    available(vllm="not installed", native="mamba")
    assert resolved(tmp_path) == "paged"
    assert resolved(tmp_path, processor=SimpleNamespace(tokenizer=object())) == "hf"


def test_on_a_cpu_the_config_stays_as_it_was_given(tmp_path):
    args = GRPOConfig(str(tmp_path), bf16=False, report_to="none")
    resolve_auto(args, build_model(50), None)
    assert (args.rollout_engine, args.use_vllm) == ("auto", False)


def test_several_greedy_completions_of_a_prompt_are_refused(tiny_tokenizer):
    with raises(ConfigError, "temperature=0 samples n=2 identical texts per prompt"):
        complete(build_model(len(tiny_tokenizer)), tiny_tokenizer, ["a"], n=2)
