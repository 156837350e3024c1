"""Findings about a run's numbers: provoked one by one, silent on a run that is sound."""

import types

import pytest
import torch

from posttrain.checks.machine import check_dense_masks, check_devices, check_launch, check_precision, smallest_update
from posttrain.checks.registry import Context
from posttrain.checks.tokenizers import check_special_tokens
from posttrain.errors import PreflightError
from posttrain.loop.checks import (
    Checks,
    check_first_gradients,
    check_padding,
    check_reward_models,
    check_token_rows,
    check_tokens,
    embedding_rows,
)
from posttrain.loop.step import is_finite
from posttrain.losses.reduce import Denominators
from tests.conftest import build_model
from tests.wordings import raises


def codes(found):
    return [finding.code for finding in (found if isinstance(found, list) else [found]) if finding is not None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_t42_the_smallest_update_is_what_a_stored_weight_can_show(dtype):
    """Rounding to nearest: a little more than half the gap moves 0.02's neighbourhood, a little less does not."""
    kind, least = getattr(torch, dtype), smallest_update(dtype)
    weight = torch.tensor(0.02).to(kind)
    assert (weight.float() + 1.1 * least).to(kind) != weight
    assert (weight.float() + 0.9 * least).to(kind) == weight


def test_t42_sixteen_bit_weights_that_a_small_learning_rate_cannot_move_are_told():
    bad = check_precision({"bfloat16": 134_000_000, "float32": 5}, learning_rate=2e-5)
    assert (bad.code, bad.severity) == ("PT-C001", "warning")
    assert "134000000 trained parameters are stored in bfloat16, with learning_rate=2e-05" in bad.what
    assert check_precision({"bfloat16": 134_000_000}, learning_rate=1e-4) is None
    assert check_precision({"float32": 134_000_000}, learning_rate=2e-5) is None


def test_t42_the_loss_of_updates_is_real():
    """AdamW at 2e-5 on bfloat16 weights of 0.02: after ten steps of one sign nothing has moved; in float32 all has."""
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.nn.Parameter(torch.full((8,), 0.02, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=2e-5, weight_decay=0.0)
        start = weight.detach().clone()
        for _ in range(10):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[dtype] = not torch.equal(weight.detach(), start)
    assert moved == {torch.bfloat16: False, torch.float32: True}


def test_t4_pad_and_eos_of_tokenizer_and_generation_config_must_agree():
    sound = {"pad": 0, "eos": 2, "generation_pad": 0, "generation_eos": [2, 7], "turn_end": 7}
    assert check_special_tokens(**sound) == []
    assert codes(check_special_tokens(**{**sound, "generation_pad": 7})) == ["PT-K101"]
    assert codes(check_special_tokens(**{**sound, "pad": None})) == ["PT-K102"]
    (finding,) = check_special_tokens(**{**sound, "generation_eos": 2})
    assert finding.code == "PT-K103"
    assert "end of turn 7" in finding.what
    assert finding.fix.endswith("eos_token_id = [2, 7].")
    assert check_special_tokens(pad=0, eos=2) == []  # A model without a generation config, as classifiers are.


def test_t38_t39_several_gpus_in_one_process_are_an_error():
    finding = check_devices(visible=8)
    assert "accelerate launch --num_processes 8" in finding.fix
    assert (finding.code, finding.severity) == ("PT-C004", "error")
    assert check_devices(visible=8, processes=8) is None
    assert check_devices(visible=1) is None
    assert check_devices(visible=0) is None


def test_trap_37_a_first_step_without_a_gradient_is_an_error_and_so_is_one_that_is_not_finite():
    assert codes(check_first_gradients({})) == ["PT-B001"]
    assert codes(check_first_gradients({"a": None, "b": 0.0})) == ["PT-B003"]
    assert check_first_gradients({"a": None, "b": 0.1}) is None  # An adapter's A has none while its B is zero.
    finding = check_first_gradients({"a": 1.0, "b": float("nan")})
    assert finding.code == "PT-B002"
    assert "'b'" in finding.what


def test_trap_9_steps_in_a_row_without_a_trained_token_are_an_error(tmp_path):
    args = types.SimpleNamespace(output_dir=str(tmp_path), preflight="error", silence_findings={})
    checks, empty = Checks(args, command="sft"), Denominators(0, 4, 1)
    assert [checks.empty_steps(None, [], counts) for counts in (empty, empty, Denominators(5, 4, 1), empty, empty)] == [
        True
    ] * 5
    with raises(PreflightError, "PT-T001", "3 consecutive steps"):
        checks.empty_steps(None, [], empty)
    assert Checks(args, command="grpo", zero_gradient_is_normal=True).empty_steps(None, [], empty)


def test_t51_a_batch_of_padding_is_told_above_forty_percent():
    assert "41 % of the computed tokens" in check_padding(real=59, computed=100).what
    assert check_padding(real=60, computed=100) is None
    assert check_padding(real=0, computed=0) is None


def test_t53_dense_masks_of_long_packed_rows_are_told_and_never_refused():
    finding = check_dense_masks("sdpa", packed=True, row_tokens=8192)
    assert finding.severity == "warning"
    assert "flex_attention" in check_dense_masks("eager", packed=True, row_tokens=8192).fix
    assert check_dense_masks("sdpa", packed=True, row_tokens=512) is None
    assert check_dense_masks("sdpa", packed=False, row_tokens=8192) is None
    assert check_dense_masks("flex_attention", packed=True, row_tokens=16384) is None


@pytest.mark.parametrize(
    ("rows", "tokens", "highest", "expected"),
    [
        (316, 316, 315, []),
        (384, 316, 315, []),
        (316, 321, 315, [("PT-K005", "warning")]),
        (316, 321, 316, [("PT-K004", "error")]),
        (None, 321, 400, []),
    ],
)
def test_ids_without_an_embedding_are_an_error_and_tokens_without_one_a_warning(rows, tokens, highest, expected):
    found = check_token_rows(rows, tokens=tokens, highest=highest)
    assert [(f.code, f.severity) for f in [found] if f] == expected
    assert not found or (f"resize_token_embeddings({tokens})" in found.fix and str(rows) in found.what)


def test_rows_are_counted_from_the_live_embedding():
    model = build_model(97)
    assert embedding_rows(model) == 97
    model.resize_token_embeddings(101)
    assert embedding_rows(model) == 101
    assert embedding_rows(object()) is None


def test_the_policy_its_reference_and_reward_models_are_all_looked_at(tiny_tokenizer):
    size = len(tiny_tokenizer)
    ids = [3, size - 1]
    small = build_model(size - 40)
    parts = {
        "rewards": types.SimpleNamespace(
            functions=[types.SimpleNamespace(model=small, tokenizer=tiny_tokenizer, __name__="judge"), len]
        ),
    }
    context = Context("dpo", None, model=build_model(size), tokenizer=tiny_tokenizer, parts=parts)
    (found,) = check_tokens(context, ids, types.SimpleNamespace(copy=small))
    assert (found.code, found.where) == ("PT-K004", "the reference") and f"token id {size - 1}" in found.what
    (found,) = check_reward_models(context)
    assert (found.code, found.where) == ("PT-K005", "the reward model judge")
    sound = Context("dpo", None, model=build_model(size), tokenizer=tiny_tokenizer)
    assert list(check_tokens(sound, ids)) == []


def test_a_scaler_that_still_looks_for_its_scale_ends_no_run(tmp_path):
    """The first steps of float16 overflow; the scaler skips them and halves its scale."""
    model = torch.nn.Linear(2, 1)
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    run = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(mixed_precision="fp16"), progress=types.SimpleNamespace(bad_steps=0)
    )
    assert not is_finite(run, model, torch.tensor(torch.inf))
    assert run.progress.bad_steps == 0 and model.weight.grad is not None
    model.weight.grad = torch.full_like(model.weight, 1.0)
    assert is_finite(run, model, torch.tensor(1.0))
    assert run.progress.bad_steps == 0


@pytest.mark.parametrize("asked", [1, 2])
def test_a_launch_on_a_cpu_that_starts_one_process_of_two_is_told(asked, monkeypatch):
    """By what accelerate itself exports: its launcher for a CPU runs the script once."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    given = launch_command_parser().parse_args(["--cpu", "--num_processes", str(asked), "train.py"])
    command, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(given)[0])
    assert command[1:] == ["train.py"]
    assert codes(check_launch(environment, 1)) == (["PT-C004"] if asked > 1 else [])
    assert check_launch(environment | {"WORLD_SIZE": "2"}, 1) is None
    started = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert [check_launch(started, 1).severity, check_launch(started, 2)] == ["error", None]
    assert check_launch(environment, 2) is None
