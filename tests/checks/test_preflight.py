"""What one run's checks tell, how often, and what they write down."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

import posttrain
from posttrain.checks import registry as core
from posttrain.checks.registry import Preflight, load
from posttrain.errors import ConfigError, PreflightError
from posttrain.types import Finding
from tests.wordings import raises

ERROR = Finding("PT-D013", "error", "all equal", "rows 1", "no gradient.", "remove them.")
SIGN = Finding("PT-R004", "warning", "KL 0.7", "kl", "it runs away.", "raise beta.")


def test_errors_end_a_run_together_and_warnings_are_told_first(caplog):
    other = Finding("PT-D001", "error", "ids", "rows 2", "y", "f")
    with pytest.raises(PreflightError) as caught:
        Preflight().report([ERROR, SIGN, other])
    assert caught.value.findings == [ERROR, other] and caught.value.exit_code == 78
    assert "PT-D013: all equal (rows 1): no gradient. Fix: remove them." in str(caught.value)
    assert "PT-D001" in str(caught.value) and "preflight='warn'" in str(caught.value)
    assert "PT-R004: KL 0.7" in caplog.text


def test_warn_never_stops_and_off_says_nothing(caplog):
    assert Preflight("warn").report([ERROR]) == [ERROR]
    assert caplog.records[-1].levelno == logging.WARNING
    caplog.clear()
    off = Preflight("off")
    assert off.report([ERROR, SIGN]) == [] and off.to_dict()["checks"] == [] and not caplog.text
    with raises(ConfigError, "preflight='of'", "'off'"):
        Preflight("of")


def test_a_sign_that_lasts_is_told_first_and_every_hundredth_time(caplog):
    preflight = Preflight()
    for _ in range(201):
        preflight.report([SIGN])
    assert caplog.text.count("PT-R004") == 3  # The 1st, the 101st and the 201st.
    (row,) = preflight.to_dict()["checks"]
    assert row["findings"][0]["times"] == 201 and row["findings"][0]["fix"] == "raise beta."
    preflight.report([Finding("PT-R004", "warning", "w", "another metric", "y", "f")])
    assert caplog.text.count("PT-R004") == 4


def test_a_silenced_finding_is_written_down_with_its_reason_and_stops_nothing(caplog):
    preflight = Preflight(silence={"Data-Pair-Identical": " a control group "})
    assert preflight.report([ERROR]) == [] and not caplog.text
    (row,) = preflight.to_dict()["checks"]
    assert row["silenced"] == "a control group" and row["findings"][0]["what"] == "all equal"


def test_what_is_always_raised_cannot_be_silenced():
    """These codes stand in errors of the rooms that meet them, so that silencing them would change nothing."""
    fatal = [check for check in load().values() if check.fatal]
    assert len(fatal) == 7
    for check in fatal:
        with raises(ConfigError, f"silence_findings[{check.name!r}]", check.code):
            Preflight(silence={check.name: "it is meant"})
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(posttrain.__file__).parent.rglob("*.py"))
    in_errors = set(re.findall(r"f?\"(?:[^\"]*\()?(PT-[A-Z]\d{3}): ", text)) - {check.code for check in fatal}
    # An option decides about the first (image_fit), and a probe tells of the others before anything is computed.
    assert in_errors <= {"PT-G001", "PT-G003", "PT-G005"}


@pytest.mark.parametrize(
    ("silence", "message"),
    [
        ({"PT-D912": "x"}, "'PT-D912' is neither the code nor the name of a check \\(did you mean 'PT-"),
        ({"data-pair-identicle": "x"}, "did you mean 'data-pair-identical'"),
        ({"PT-D013": "  "}, "silence_findings\\['PT-D013'\\]='  ' must be a reason.*PT-D013"),
        ({"PT-D013": None}, "silence_findings\\['PT-D013'\\]=None must be a reason"),
    ],
)
def test_silencing_needs_a_known_check_and_a_reason(silence, message):
    with pytest.raises(ConfigError, match=message):
        Preflight(silence=silence)


def test_a_check_that_breaks_is_noted_and_stops_nothing(monkeypatch, caplog):
    monkeypatch.setattr(core, "PROBES", {})
    monkeypatch.setattr("posttrain.checks.registry.PROBES", core.PROBES)

    @core.probe("config", "PT-D001")
    def broken(context):
        raise KeyError("odd")

    @core.probe("config", "PT-D013")
    def fine(context):
        yield ERROR

    preflight = Preflight()
    assert preflight.run("config", core.Context("sft", None)) == [ERROR]
    rows = {row["code"]: row for row in preflight.to_dict()["checks"]}
    assert rows["PT-D001"]["failed"] == "KeyError: 'odd'" and "failed" not in rows["PT-D013"]
    assert rows["PT-D013"]["runs"] == 1 and rows["PT-D013"]["seconds"] >= 0
    assert "the checks PT-D001 failed with an error: KeyError" in caplog.text
    assert Preflight("off").run("config", core.Context("sft", None)) == []


def test_every_look_has_an_outcome_also_where_nothing_was_found():
    preflight = Preflight(silence={"PT-V003": "tried here"})
    with preflight.record_check("config", ("PT-L001", "PT-D013")):
        preflight.report([Finding("PT-D013", "warning", "w", "here", "y", "f"), None])
    outcomes = {row["code"]: (row["outcome"], row["runs"]) for row in preflight.to_dict()["checks"]}
    assert outcomes == {"PT-D013": ("found", 1), "PT-L001": ("nothing found", 1), "PT-V003": ("not looked for", 0)}


def test_what_is_looked_for_first_while_training_is_worth_writing_down():
    preflight = Preflight()
    preflight.changed = False
    with preflight.record_check("log_step", ("PT-M004",)):
        pass
    assert preflight.changed
    preflight.changed = False
    with preflight.record_check("log_step", ("PT-M004",)):
        pass
    assert not preflight.changed


def _apart_from_a_look(tree):
    """Lines that report findings outside of every ``with ....record_check(...)``."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            inside = inside or any(getattr(call.func, "attr", "") == "record_check" for call in calls)
        if isinstance(node, ast.FunctionDef) and node.name == "report_from_main":  # Probes count their own looks.
            return
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "report"
        if called and getattr(node.func.value, "attr", "") == "checks" and not inside:
            found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


def test_trainers_tell_nothing_that_they_do_not_count_as_looked_for():
    """Else a check that finds nothing would not stand in preflight.json."""
    folder = Path(__file__).parents[2] / "posttrain" / "methods"
    found = {
        path.name: lines
        for path in sorted(folder.rglob("*.py"))
        if (lines := _apart_from_a_look(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {}
    assert _apart_from_a_look(
        ast.parse("with a:\n    self.checks.report([x])\nwith b.record_check('data', c):\n    self.checks.report([y])")
    ) == [2]
