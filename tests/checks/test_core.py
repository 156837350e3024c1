"""The register of checks."""

from __future__ import annotations

import pytest

from posttrain.checks import core
from posttrain.errors import ConfigError


@pytest.fixture
def register(monkeypatch):
    """The register's function, over a register of its own."""
    monkeypatch.setattr(core, "REGISTRY", {})
    monkeypatch.setattr(core, "PROBES", {})
    return core.register


def test_a_code_and_a_name_are_given_once(register):
    first = register("PT-D912", "odd-rows", moment="data", title="rows are odd", page="b")
    assert core.REGISTRY == {"PT-D912": first}
    for code, name in (("PT-D912", "other"), ("PT-D913", "odd-rows")):
        with pytest.raises(ConfigError, match=r"PT-D912 'odd-rows' is \(rows are odd\)"):
            register(code, name, moment="data", title="x")


@pytest.mark.parametrize("code", ["D912", "PT-912", "PT-d912", "PT-X912", "PT-D9123", "pt-D912"])
def test_a_code_of_another_form_is_refused(register, code):
    with pytest.raises(ConfigError, match=f"code='{code}' must be PT-"):
        register(code, "odd", moment="data", title="x")
    with pytest.raises(ConfigError, match="moment='later' is not known"):
        register("PT-D912", "odd", moment="later", title="x")


def test_a_finding_needs_a_registered_code(register):
    register("PT-D912", "odd-rows", moment="data", title="rows are odd")
    assert core.finding("PT-D912", "warning", "what", "where", "why", "fix").code == "PT-D912"
    with pytest.raises(ConfigError, match="'PT-D913' is not registered \\(did you mean 'PT-D912'"):
        core.finding("PT-D913", "warning", "what", "where", "why", "fix")


def test_a_check_is_found_by_code_and_by_name(register):
    check = register("PT-D912", "odd-rows", moment="data", title="rows are odd")
    assert core.lookup("pt-d912") is check and core.lookup("Odd-Rows") is check
    with pytest.raises(ConfigError, match="did you mean 'odd-rows'"):
        core.lookup("odd-row")


def test_a_probe_is_called_by_its_moment(register):
    @core.probe("config", "PT-D912")
    def look(context):
        return [core.Finding("PT-D912", "warning", context.trainer, "w", "w", "f")]

    (probe,) = core.PROBES.values()
    assert (probe.moment, probe.codes) == ("config", ("PT-D912",))
    assert [f.what for f in probe.function(core.Context("sft", None))] == ["sft"]
