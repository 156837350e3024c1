"""Versions of other packages: each rule fires on a version that breaks it and is silent on one that works."""

import importlib.metadata
import logging
import re
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from posttrain import GRPOConfig, SFTConfig
from posttrain.checks import machine as versions
from posttrain.checks import registry as core
from posttrain.checks.machine import FEATURES, NEEDS, needs_of_core, required_version
from posttrain.extensions.trl_helpers import available


def found(feature, **installed):
    return versions.check_versions({feature: True}, {name.replace("_", "-"): v for name, v in installed.items()})


def codes(*arguments, **installed):
    return [(finding.code, finding.severity) for finding in found(*arguments, **installed)]


def test_below_the_minimum_is_an_error_with_both_versions_and_the_command():
    (finding,) = found("vllm", vllm="0.16.3")
    assert (finding.code, finding.severity) == ("PT-V002", "error")
    assert finding.what == "use_vllm=True needs vllm>=0.27.0; found 0.16.3."
    assert finding.fix.startswith("pip install 'vllm==0.32.0'")


def test_above_the_last_tested_version_is_a_warning_and_inside_the_range_is_silent():
    (finding,) = found("vllm", vllm="0.33.0")
    assert (finding.code, finding.severity) == ("PT-V003", "warning")
    assert "tested with vllm>=0.27.0,<=0.32.0; found 0.33.0" in finding.what
    for inside in ("0.27.0", "0.28.1+cu129", "0.32.0", "0.32.0.dev3+g12"):
        assert found("vllm", vllm=inside) == []
    assert codes("liger", liger_kernel="0.8.1") == [("PT-V003", "warning")]
    assert codes("liger", liger_kernel="0.7.0") == [("PT-V002", "error")]
    assert codes("liger", liger_kernel="0.8.0") == []


def test_a_version_that_was_left_out_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(versions, "NEEDS", (versions.Need("trackio>=1,!=1.4", "trackio", reason="it loses curves"),))
    (finding,) = found("trackio", trackio="1.4")
    assert (finding.code, finding.severity) == ("PT-V002", "error")
    assert "!=1.4" in finding.what and "found 1.4" in finding.what
    assert finding.why == "this version is known not to work: it loses curves."
    assert found("trackio", trackio="1.5") == []


def test_a_package_that_is_not_there_is_told_before_anything_is_loaded():
    (finding,) = found("trackio")
    assert (finding.code, finding.severity) == ("PT-V001", "error")
    assert finding.what == "report_to='trackio' needs trackio, which is not installed."
    assert "pip install 'trackio'" in finding.fix


@pytest.mark.parametrize(
    ("feature", "package", "minimum"),
    [
        ("vllm-serve", "vllm", "0.27.0"),
        ("deepspeed", "deepspeed", "0.14.4"),
    ],
)
def test_the_table_holds_the_minima_of_the_specification(feature, package, minimum):
    (need,) = [n for n in NEEDS if (n.feature, n.name) == (feature, package) and n.requirement.specifier]
    assert str(need.requirement.specifier) == f">={minimum}"


def test_what_the_package_itself_needs_is_read_from_its_metadata():
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {one.name: one.specifier for one in map(Requirement, written["dependencies"]) if one.specifier}
    assert {need.name: need.requirement.specifier for need in needs_of_core()} == wanted
    (finding,) = found("core", **{name.replace("-", "_"): "99" for name in wanted} | {"datasets": "3.6"})
    assert (finding.code, finding.where) == ("PT-V002", "datasets")


def test_every_need_is_of_a_known_feature_and_reads_as_specifiers():
    assert {need.feature for need in (*NEEDS, *needs_of_core())} == set(FEATURES)
    for need in NEEDS:
        assert need.requirement.name and (not need.tested or need.tested in need.requirement.specifier)


def test_features_are_read_from_configs(tmp_path):
    plain = versions.features_in_use(SFTConfig(str(tmp_path), report_to="none", bf16=False))
    assert [name for name, on in plain.items() if on] == ["core"]
    assert set(plain) <= set(FEATURES)
    args = types.SimpleNamespace(
        use_vllm=True,
        vllm_mode="colocate",
        deepspeed={"zero_optimization": {"stage": 3}},
        optim="paged_adamw_8bit",
        report_to=["wandb"],
        model_init_kwargs={"attn_implementation": "flash_attention_2"},
        use_liger_kernel=True,
    )
    on = {name for name, value in versions.features_in_use(args).items() if value}
    assert on == {
        "core", "vllm", "deepspeed", "bitsandbytes", "wandb", "flash-attention-2", "liger",
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"model_init_kwargs": {"quantization_config": None}},
        {"model_init_kwargs": {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}},
        {"model_init_kwargs": {"quantization_config": {"quant_method": "fp8"}}},
        {"optim": "adamw_torch_8bit"},
        {"optim": "adamw_torch_4bit"},
    ],
)
def test_bitsandbytes_is_asked_for_by_what_it_does_alone(tmp_path, settings):
    """gpt-oss in float, FP8 checkpoints and torchao's optimisers need none of it, and were refused without it."""
    args = types.SimpleNamespace(**PLAIN | settings)
    assert not versions.features_in_use(args)["bitsandbytes"]
    assert versions.features_in_use(args)["torchao"] == ("optim" in settings)
    packed = types.SimpleNamespace(**PLAIN | {"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}})
    assert versions.features_in_use(packed)["bitsandbytes"]


def test_flash_attention_may_come_from_the_kernels_hub(monkeypatch):
    """transformers takes its kernels where flash-attn is not installed."""
    args = types.SimpleNamespace(**PLAIN | {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}})
    assert versions.features_in_use(args)["flash-attention-2"]
    monkeypatch.setattr(versions, "is_available", lambda module: module == "kernels")
    assert not versions.features_in_use(args)["flash-attention-2"]


PLAIN = {
    "use_vllm": False,
    "deepspeed": None,
    "optim": "adamw_torch",
    "report_to": [],
    "model_init_kwargs": None,
    "use_liger_kernel": False,
}


def test_what_is_installed_here_fits_and_is_checked_within_fifty_milliseconds(tmp_path):
    args = GRPOConfig(str(tmp_path), report_to="none", bf16=False)
    context = core.Context("grpo", args)
    for cached in (versions.installed_version, versions.required_version, versions.needs_of_core):
        cached.cache_clear()
    started = time.perf_counter()
    findings = [finding for finding in versions.versions(context) if finding is not None]
    assert time.perf_counter() - started < 0.05 * 4  # The budget, on a machine that others use too.
    assert findings == []


def test_the_check_imports_none_of_the_packages_it_asks_about():
    code = (
        "import sys; from posttrain.checks import machine as versions; versions.verdict(); "
        "heavy = {'torch', 'transformers', 'vllm', 'deepspeed', 'wandb', 'peft', 'accelerate', 'datasets'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_vllm_built_for_another_torch_is_an_error_and_bitsandbytes_beside_it_a_warning(monkeypatch):
    (finding,) = versions.check_binaries(torch="2.13.0+cu128", vllm_torch="2.9.1")
    assert (finding.code, finding.severity) == ("PT-V005", "error")
    assert "built for torch 2.9.1, but torch 2.13.0+cu128" in finding.what
    assert versions.check_binaries(torch="2.9.1+cu128", vllm_torch="2.9.1") == []
    (finding,) = versions.check_binaries(torch="2.9.1", vllm_torch="2.9.1", bitsandbytes=True)
    assert finding.severity == "warning" and "vllm_mode='server'" in finding.fix
    (finding,) = versions.check_binaries(torch="2.9.1+cu128", vllm_torch="2.9.1", vllm="0.25.1+cu130")
    assert finding.severity == "error" and "for CUDA 13, but torch 2.9.1+cu128 for CUDA 12" in finding.what
    for vllm in ("0.25.1+cu129", "0.25.1", None):
        assert versions.check_binaries(torch="2.9.1+cu128", vllm_torch="2.9.1", vllm=vllm) == []
    lines = ["requests", "torch==2.9.1; platform_machine == 'x'", "torchvision==0.1"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: lines)
    required_version.cache_clear()
    assert required_version("vllm", "torch") == "2.9.1"
    required_version.cache_clear()


def test_availability_of_vllm_warns_outside_the_range_and_is_false_below_the_minimum_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(available, "is_available", lambda name: name == "vllm")
    monkeypatch.setattr(available, "installed_version", lambda package: "0.33.0")
    with caplog.at_level(logging.WARNING):
        assert available.is_vllm_available()
    assert "vllm 0.33.0 is installed, but only vllm<=0.32.0,>=0.27.0 was tested" in caplog.text
    assert available.is_vllm_available("0.33") and not available.is_vllm_available("0.34")
    assert not available.is_deepspeed_available()


def test_liger_needs_its_minimum(monkeypatch):
    monkeypatch.setattr(available, "is_available", lambda name: True)
    monkeypatch.setattr(available, "installed_version", lambda package: "0.7.9")
    assert not available.is_liger_kernel_available() and available.is_liger_kernel_available("0.7")


@pytest.mark.parametrize("name", [name for name in vars(available) if re.fullmatch("is_.+_available", name)])
def test_every_helper_answers_by_the_module_spec_alone(name):
    assert getattr(available, name)() in (True, False)


def test_a_run_over_a_server_needs_no_vllm_beside_the_trainer():
    args = GRPOConfig("out", use_vllm=True, vllm_mode="server", report_to="none", bf16=False)
    assert not any(on for name, on in versions.features_in_use(args).items() if "vllm" in name)
