"""Findings on memory: broken numbers tell, healthy ones do not, and advice keeps the effective batch."""

import dataclasses
import re

import pytest

from posttrain.checks import memory as checks
from posttrain.checks.registry import REGISTRY

GIB = 2**30
HEALTHY = checks.Profile(
    step=50, peak=60 * GIB, total=80 * GIB, reserved=62 * GIB, allocated=60 * GIB, batch=4, accumulation=8,
    pass_tokens=2000, row_tokens=2048, standing=20 * GIB, longest_seen=900, longest=1000, generation=0.4,
)  # fmt: skip


def codes(**changes):
    return [found.code for found in checks.check_profile(dataclasses.replace(HEALTHY, **changes))]


def test_a_healthy_profile_says_nothing():
    assert codes() == []


def test_every_code_has_a_page_and_a_moment():
    mine = {code: check for code, check in REGISTRY.items() if code.startswith("PT-M00")}
    assert len(mine) == 8
    assert {check.page for check in mine.values()} == {"e", "l"}


def test_weights_beyond_the_device_are_an_error_and_long_steps_a_warning():
    parts = {"weights": 30 * GIB, "optimizer states": 60 * GIB, "activations": GIB}
    found = checks.check_estimate(parts, 75 * GIB, total=80 * GIB, where="the GPU")
    assert (found.code, found.severity) == ("PT-M001", "error")
    assert "90.0 GiB" in found.what and "80.0 GiB" in found.what
    parts = {"weights": 10 * GIB, "optimizer states": 20 * GIB, "activations": 41 * GIB}
    found = checks.check_estimate(parts, 75 * GIB, total=80 * GIB, where="the GPU", fixes=["kept_layers=0"])
    assert (found.code, found.severity) == ("PT-M002", "warning")
    assert "activations 41.0 GiB" in found.what and found.fix == "kept_layers=0."
    assert checks.check_estimate(parts, 79 * GIB, total=80 * GIB, where="the GPU") is None  # 71 of 79: 90 %.


def test_a_dry_step_stops_only_what_could_not_go_on():
    known = {"tokens": 512, "where": "the GPU"}
    assert checks.check_dry_step(70 * GIB, 79 * GIB, failed=False, **known) is None
    tight = checks.check_dry_step(75 * GIB, 79 * GIB, failed=False, **known)
    assert tight.severity == "warning" and "max_row_tokens=256" in tight.fix
    assert checks.check_dry_step(0, 79 * GIB, failed=True, **known).severity == "warning"  # Passes are divided.
    assert checks.check_dry_step(0, 79 * GIB, failed=True, divisible=False, **known).severity == "error"


def test_nearly_full_memory_is_told_with_the_rows_to_come():
    (found,) = checks.check_profile(dataclasses.replace(HEALTHY, peak=76 * GIB, longest=2700))
    assert found.code == "PT-M004"
    assert "95 %" in found.what and "3.0x as long as any row so far" in found.what


def test_unused_memory_names_figures_that_keep_the_effective_batch():
    (found,) = checks.check_profile(
        dataclasses.replace(HEALTHY, peak=31 * GIB, reserved=32 * GIB, allocated=31 * GIB, pass_tokens=900)
    )
    assert (found.code, found.severity) == ("PT-M005", "info")
    before, after, old, new = map(
        int, re.findall(r"(\d+) -> (\d+)", found.fix)[0] + re.findall(r"(\d+) -> (\d+)", found.fix)[1]
    )
    assert (before, old) == (4, 8) and after > before and after * new == 32


def test_t50_memory_that_lies_idle_under_checkpointing_is_told():
    idle = {"peak": 24 * GIB, "reserved": 25 * GIB, "allocated": 24 * GIB, "accumulation": 1}
    (found,) = checks.check_profile(dataclasses.replace(HEALTHY, checkpointing=True, **idle))
    assert found.code == "PT-M005" and "gradient_checkpointing=False" in found.fix
    assert codes(**idle, pass_tokens=900) == []


def test_rows_that_are_full_already_need_a_larger_row_and_no_larger_batch():
    (found,) = checks.check_profile(dataclasses.replace(HEALTHY, peak=31 * GIB, reserved=32 * GIB, allocated=31 * GIB))
    larger = int(re.search(r"max_row_tokens=2048 -> (\d+)", found.fix)[1])
    # 90 % of 80 GiB less 20 standing is 52 GiB, where 11 are used now: 4.7 times as many tokens.
    assert 2048 * 4 < larger <= 2048 * 52 / 11 and larger % 128 == 0
    assert "per_device" not in found.fix


def test_on_a_cpu_unused_memory_is_no_finding():
    assert codes(peak=2 * GIB, reserved=0, allocated=0) == []


def test_fragmentation_ranks_and_sampling_each_have_their_finding():
    assert codes(peak=50 * GIB, reserved=75 * GIB, allocated=50 * GIB) == ["PT-M006"]
    assert codes(imbalance=1.4) == ["PT-M007"]
    assert codes(generation=0.9) == ["PT-M008"]


@pytest.mark.parametrize(("batch", "accumulation", "factor"), [(4, 8, 2.5), (3, 7, 10.0), (1, 16, 5.0), (6, 4, 3.9)])
def test_a_larger_batch_divides_the_effective_one(batch, accumulation, factor):
    size, steps = checks.larger_batch(batch, accumulation, factor)
    assert size * steps == batch * accumulation and batch < size <= batch * factor
