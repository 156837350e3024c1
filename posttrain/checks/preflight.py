"""One run's checks: which ran and what they saw, what is silenced and why, and what is told and how often."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from posttrain.checks.core import PROBES, REGISTRY, Context, Moment, load, lookup
from posttrain.errors import ConfigError, PreflightError, check_choice
from posttrain.types import Finding

__all__ = ["MODES", "Preflight", "Result", "Told", "describe", "silenced_codes"]

logger = logging.getLogger(__name__)

MODES = ("error", "warn", "off")
REPEATED = 100  # A sign that lasts is told the first time, and then every so many times.
KEPT = 20  # Findings of one code that are written down; more are counted.
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.WARNING}

Told = Literal["told", "repeated", "silenced", "off"]


def silenced_codes(silence: Mapping[str, str] | None) -> dict[str, str]:
    """Codes that are silenced, with the reason of each.

    Args:
        silence: Reasons by code or name.

    Raises:
        ConfigError: A code or name that does not exist, or a reason that says nothing.

    >>> silenced_codes({"pair-identical": "a control group"})
    {'PT-D012': 'a control group'}
    """
    codes: dict[str, str] = {}
    for key, reason in (silence or {}).items():
        check = lookup(str(key))
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(
                f"silence_findings[{key!r}]={reason!r}: say why {check.code} ({check.title}) is no fault here; the reason is "
                "kept in preflight.json."
            )
        codes[check.code] = reason.strip()
    return codes


def describe(finding: Finding) -> str:
    """A finding as one line: code, what, where, why, what to do, and the name by which it is silenced."""
    name = f" [{REGISTRY[finding.code].name}]" if finding.code in REGISTRY else ""
    return f"{finding.code}: {finding.what} ({finding.where}): {finding.why} Do: {finding.fix}{name}"


@dataclass
class Result:
    """What one check did in this run.

    Attributes:
        runs: How often it looked.
        seconds: What that took, shared among the checks of one function.
        findings: With how often each was seen.
        failed: Error of a check that could not run.
    """

    runs: int = 0
    seconds: float = 0.0
    findings: dict[tuple[str, str], tuple[Finding, int]] = field(default_factory=dict)
    failed: str = ""

    @property
    def outcome(self) -> str:
        """``nothing found``, ``found``, ``could not look``, or ``not looked for``."""
        if self.findings:
            return "found"
        if self.failed:
            return "could not look"
        return "nothing found" if self.runs else "not looked for"


class Preflight:
    """The checks of one run, at its four moments.

    Args:
        mode: ``error`` ends a run on an error, ``warn`` tells it and goes on, ``off`` does not look.
        silence: Reasons by code or name of findings that are not told.

    >>> preflight = Preflight()
    >>> preflight.add(Finding("PT-T002", "warning", "w", "here", "y", "f"))
    'told'
    >>> preflight.add(Finding("PT-T002", "warning", "w", "here", "y", "f"))
    'repeated'
    """

    def __init__(self, mode: str = "error", silence: Mapping[str, str] | None = None) -> None:
        check_choice("preflight", mode, MODES)
        load()
        self.mode = mode
        self.silenced = silenced_codes(silence)
        self.results: dict[str, Result] = {}
        self.seconds: dict[str, float] = {}
        self.told: list[Finding] = []
        self.notes: dict[str, Any] = {}  # What else is known of the run, for the file.
        self.changed = True  # Since it was last written.

    @property
    def active(self) -> bool:
        """Whether anything is looked for."""
        return self.mode != "off"

    @contextmanager
    def looking(self, moment: Moment, codes: Collection[str]) -> Iterator[None]:
        """Count what happens inside as one look for these codes."""
        if not self.active:
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            new = any(self.results.get(code, Result()).runs == 0 for code in codes)
            self.seconds[moment] = self.seconds.get(moment, 0.0) + spent
            for code in codes:
                result = self.results.setdefault(code, Result())
                result.runs += 1
                result.seconds += spent / len(codes)
            self.changed = self.changed or new or moment != "log_step"

    def run(self, moment: Moment, context: Context) -> list[Finding]:
        """What all probes of a moment see; one that fails is noted and told, and stops nothing."""
        found: list[Finding] = []
        for probe in list(PROBES.values()) if self.active else ():
            if probe.moment != moment:
                continue
            try:
                with self.looking(moment, probe.codes):
                    found += [finding for finding in probe.function(context) if finding is not None]
            except PreflightError:
                raise
            except Exception as error:  # A check must never be what breaks a run.
                said = f"{type(error).__name__}: {error}"
                for code in probe.codes:
                    self.results[code].failed = said
                logger.warning("the checks %s could not be made: %s", ", ".join(probe.codes), said)
        return found

    def add(self, finding: Finding) -> Told:
        """Write a finding down, and say whether it is to be told."""
        if not self.active:
            return "off"
        result = self.results.setdefault(finding.code, Result())
        key = (finding.where, finding.severity)
        latest, count = result.findings.get(key, (finding, 0))
        if count or len(result.findings) < KEPT:
            result.findings[key] = (latest, count + 1)
        if finding.code in self.silenced:
            self.changed = True
            return "silenced"
        if count % REPEATED:
            return "repeated"
        self.changed = True
        self.told.append(finding)
        return "told"

    def refuses(self, finding: Finding) -> bool:
        """Whether a finding ends the run."""
        return finding.severity == "error" and self.mode == "error" and finding.code not in self.silenced

    def tell(self, findings: Iterable[Finding | None], *, log: bool = True) -> list[Finding]:
        """Log findings, each kind the first time and every hundredth; errors among them end the run together.

        Args:
            findings: None stands for nothing found.
            log: False where another process says the same.

        Returns:
            Those that were told.

        Raises:
            PreflightError: With all errors, where ``mode`` is ``error``.
        """
        told, refused = [], []
        for finding in findings:
            if finding is None:
                continue
            said = self.add(finding)
            if self.active and self.refuses(finding):
                refused.append(finding)
                told.append(finding)
            elif said == "told":
                told.append(finding)
                if log:
                    logger.log(LEVELS[finding.severity], "%s", describe(finding))
        if refused:
            raise refusal(refused)
        return told

    def to_dict(self) -> dict[str, Any]:
        """For ``preflight.json``."""
        checks = load()
        rows = []
        for code in sorted({*self.results, *self.silenced}):
            check, result = checks.get(code), self.results.get(code, Result())  # A user's own code is not registered.
            row: dict[str, Any] = {
                "code": code,
                "name": check and check.name,
                "moment": check and check.moment,
                "runs": result.runs,
            }
            row["outcome"] = result.outcome
            row["seconds"] = round(result.seconds, 6)
            row["findings"] = [asdict(finding) | {"times": count} for finding, count in result.findings.values()]
            if code in self.silenced:
                row["silenced"] = self.silenced[code]
            if result.failed:
                row["failed"] = result.failed
            rows.append(row)
        return {
            "preflight": self.mode,
            "seconds": {moment: round(spent, 6) for moment, spent in self.seconds.items()},
            "checks": rows,
            **self.notes,
        }


def refusal(findings: Sequence[Finding]) -> PreflightError:
    """The error of a run that is refused, with all reasons."""
    listed = describe(findings[0]) if len(findings) == 1 else "".join(f"\n- {describe(f)}" for f in findings)
    first = findings[0].code
    error = PreflightError(
        f"{listed}\nTo go on nevertheless: preflight='warn', or silence_findings={{{first!r}: 'why it is no fault'}}."
    )
    error.findings = list(findings)
    return error
