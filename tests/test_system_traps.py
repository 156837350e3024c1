"""Traps of the system layer that are not those of servers or asynchronous rollouts: settings, data, caches, ports."""

from __future__ import annotations

import socket
import types

import numpy as np
import pytest

from posttrain import BCOConfig, ConfigError, CPOConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig
from posttrain.checks import machine as versions
from posttrain.checks.machine import ports_of_servers
from posttrain.checks.registry import Context
from posttrain.checks.rules import check_log
from posttrain.loop import precompute
from posttrain.models import parallel
from tests.methods.test_dpo import dpo


def test_trap_s24_whether_a_cache_is_there_is_the_main_process_s_to_say(tmp_path, monkeypatch):
    """On a disk that is not shared, another process has the file and the main one has not: both compute."""
    path = tmp_path / "logps.npy"
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 2), dtype=np.float32))
    told = []

    def broadcast(item, accelerator):
        told.append(item)  # And the main process found nothing.

    monkeypatch.setattr(parallel, "broadcast_object", broadcast)
    other = types.SimpleNamespace(is_main_process=False, num_processes=2)
    assert precompute._kept(path, (3, 2), other) is None and told == [None]
    monkeypatch.setattr(parallel, "broadcast_object", lambda item, accelerator: item)
    main = types.SimpleNamespace(is_main_process=True, num_processes=2)
    assert precompute._kept(path, (3, 2), main).shape == (3, 2)


def test_trap_s25_a_port_for_weights_that_another_run_holds_is_told_before_training():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        args = types.SimpleNamespace(
            use_vllm=True, vllm_mode="server", vllm_server_base_url="http://localhost:8000", vllm_group_port=port
        )
        (found,) = ports_of_servers(Context("grpo", args))
        assert found.code == "PT-L004" and f"vllm_group_port={port} is in use" in found.what
    args.vllm_group_port = 0  # A free one is taken then.
    assert ports_of_servers(Context("grpo", args)) == []


def test_trap_s30_a_mask_that_leaves_completions_out_by_their_length_is_told():
    rows = [{"loss": 0.1, "step": i, "sampling/frac_masked": 0.4} for i in range(1, 11)]
    (found,) = [finding for finding in check_log(rows) if finding.code == "PT-R010"]
    assert (
        "40 % of the tokens" in found.what
        and "geometric" in found.fix
        and "masked only because they are long" in found.why
    )
    healthy = [row | {"sampling/frac_masked": 0.01} for row in rows]
    assert "PT-R010" not in [finding.code for finding in check_log(healthy)]


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, BCOConfig, CPOConfig, RewardConfig, GRPOConfig])
@pytest.mark.parametrize("axis", ["cp_size", "tp_size"])
def test_trap_s37_rows_that_share_a_prompt_are_never_cut_where_their_mask_would_be_lost(config, axis, tmp_path):
    made = config(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    made.parallelism_config = types.SimpleNamespace(**{"cp_size": 1, "sp_size": 1, axis: 2})
    with pytest.raises(ConfigError, match=f"{axis}=2.*Fix: .*sp_size"):
        made.__post_init__()


@pytest.mark.parametrize("axis", ["cp_size", "tp_size"])
def test_what_the_launcher_was_told_to_cut_is_refused_too(axis, tmp_path, monkeypatch):
    """``accelerate launch`` hands its parallelism config on in variables, and ``parallelism_config`` stays None."""
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis.upper()}", "2")
    SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)  # A launch without it.
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with pytest.raises(ConfigError, match=f"{axis}=2.*Fix: "):
        SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)


def test_trap_s41_the_key_of_kept_log_probs_holds_every_setting_that_moves_them(tiny_tokenizer, tmp_path):
    keys = [
        tuple(sorted(dpo(tmp_path / str(i), tiny_tokenizer, preflight="off", **changed).method.reference_key().items()))
        for i, changed in enumerate(({}, {"ld_alpha": 0.5}, {"max_length": 64}, {"mask_inner_turns": True}))
    ]
    assert len(set(keys)) == len(keys)


def test_trap_s43_one_seed_for_all_completions_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'seed': 1.*Completions would repeat"):
        GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, generation_kwargs={"seed": 1})


def test_trap_s57_bitsandbytes_in_the_process_of_vllm_is_told():
    (found,) = versions.check_binaries(torch="2.9.1", vllm_torch="2.9.1", bitsandbytes=True)
    assert found.severity == "warning" and "bitsandbytes and vLLM are used in one process" in found.what
    assert versions.check_binaries(torch="2.9.1", vllm_torch="2.9.1") == []
