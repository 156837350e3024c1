"""The register of checks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.checks import registry as core
from posttrain.errors import ConfigError
from tests.wordings import raises


@pytest.fixture
def register(monkeypatch):
    """The register's function, over a register of its own."""
    core.load()
    monkeypatch.setattr(core, "REGISTRY", {})
    monkeypatch.setattr(core, "PROBES", {})
    return core.register


def test_a_code_and_a_name_are_given_once(register):
    first = register("PT-D912", "odd-rows", moment="data", title="rows are odd", page="b")
    assert {"PT-D912": first} == core.REGISTRY
    for code, name in (("PT-D912", "other"), ("PT-D913", "odd-rows")):
        with raises(ConfigError, "PT-D912", "'odd-rows'"):
            register(code, name, moment="data", title="x")


@pytest.mark.parametrize("code", ["D912", "PT-912", "PT-d912", "PT-X912", "PT-D9123", "pt-D912"])
def test_a_code_of_another_form_is_refused(register, code):
    with pytest.raises(ConfigError, match=f"code='{code}' must be PT-"):
        register(code, "odd", moment="data", title="x")
    with raises(ConfigError, "moment='later'"):
        register("PT-D912", "odd", moment="later", title="x")


def test_a_finding_needs_a_registered_code(register):
    register("PT-D912", "odd-rows", moment="data", title="rows are odd")
    assert core.finding("PT-D912", "warning", "what", "where", "why", "fix").code == "PT-D912"
    with raises(ConfigError, "'PT-D913'", "'PT-D912'"):
        core.finding("PT-D913", "warning", "what", "where", "why", "fix")


def test_a_check_is_found_by_code_and_by_name(register):
    check = register("PT-D912", "odd-rows", moment="data", title="rows are odd")
    assert core.lookup("pt-d912") is check and core.lookup("Odd-Rows") is check
    with raises(ConfigError, "'odd-rows'"):
        core.lookup("odd-row")


def test_a_probe_is_called_by_its_moment(register):
    @core.probe("config", "PT-D912")
    def look(context):
        return [core.Finding("PT-D912", "warning", context.trainer, "w", "w", "f")]

    (probe,) = core.PROBES.values()
    assert (probe.moment, probe.codes) == ("config", ("PT-D912",))
    assert [f.what for f in probe.function(core.Context("sft", None))] == ["sft"]


def test_every_code_of_the_package_is_registered_and_no_old_one_is_left():
    package = Path(core.__file__).parents[1]
    checks = core.load()
    used = {
        (path.name, code)
        for path in package.rglob("*.py")
        for code in re.findall(r"PT-[A-Z]\d{3}\b", path.read_text("utf-8"))
    }
    assert not {(name, code) for name, code in used if code not in checks}
    assert {code for _, code in used} >= set(checks)
    assert all(check.page == "" or re.fullmatch("[a-m]", check.page) for check in checks.values())


def test_the_register_is_listed_without_transformers():
    script = (
        "import sys; from posttrain.checks import registry as core; n = len(core.load()); "
        "sys.exit(n < 60 or bool({'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
