"""`posttrain env`: versions, machine, and the verdict about them, ready to paste."""

import re

from posttrain import __version__
from posttrain.checks import machine
from posttrain.cli.main import environment


def test_the_block_is_one_key_a_line_with_versions_and_a_verdict(monkeypatch):
    rows = dict(re.findall(r"^- ([^:]+): ?(.*)$", environment(), re.M))
    assert rows["versions.posttrain"] == __version__
    assert rows["versions.vllm"] == "none" or re.match(r"\d", rows["versions.vllm"])
    assert int(rows["hardware.cpus"]) > 0
    assert rows["compatibility"] in ("all installed packages are compatible", "")
    monkeypatch.setattr(machine, "installed_version", lambda name: "0.33.0" if name == "vllm" else None)
    assert "\n  - PT-V003 (warning): use_vllm=True was tested with vllm>=0.27.0,<=0.32.0" in environment()
