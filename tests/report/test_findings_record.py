"""Findings in the run record, and what a full disk, a killed writer and a resumed run leave of its lines."""

import json
import os
import signal
import time

import pytest

from posttrain.report.files import read_rows
from posttrain.report.record import RunRecord
from posttrain.types import Finding
from tests import forks
from tests.methods.helpers import sft


def finding(code="X-1", severity="warning"):
    return Finding(code, severity, "what", "loss", "why", "fix")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_finding_is_a_line_with_its_step_and_a_resumed_run_drops_later_ones(tmp_path):
    record = RunRecord(tmp_path)
    for step in (1, 2, 3):
        record.finding(step, finding(f"X-{step}"))
    record.begin(2)
    assert [(row["step"], row["code"]) for row in lines(tmp_path / "findings.jsonl")] == [(1, "X-1"), (2, "X-2")]


def test_findings_told_before_training_are_in_the_record_of_that_training(tmp_path, tiny_tokenizer):
    RunRecord(tmp_path).metrics(1, {"loss": 1.0})  # An older run, which is moved aside.
    RunRecord(tmp_path).finding(1, finding("OLD"))
    trainer = sft(tmp_path, tiny_tokenizer)
    trainer.checks.report([finding("EARLY"), None])
    assert [row["code"] for row in lines(tmp_path / "findings.jsonl")] == ["OLD"]
    trainer.train()
    trainer.checks.report([finding("LATE")])
    rows = lines(tmp_path / "findings.jsonl")
    assert [(r["step"], r["code"]) for r in rows if r["code"] in ("EARLY", "LATE", "OLD")] == [
        (0, "EARLY"),
        (2, "LATE"),
    ]
    assert [row["code"] for row in lines(tmp_path / "record-1" / "findings.jsonl")] == ["OLD"]


def test_half_a_character_in_a_completion_loses_no_row_of_the_table(tmp_path):
    record = RunRecord(tmp_path)
    record.add_completions([{"step": 1, "completion": "a\ud800b"}, {"step": 1, "completion": "ok"}])
    record.flush(1)
    (path,) = (tmp_path / "completions").iterdir()
    assert [row["completion"] for row in read_rows(path)] == ["a\\ud800b", "ok"]


FULL = """
import resource, signal, sys
from posttrain.report.record import RunRecord
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
record = RunRecord(sys.argv[1])
record.metrics(1, {"loss": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (record.metrics_path.stat().st_size + 20,) * 2)
try:
    record.metrics(2, {"loss": 2.0, "note": "x" * 200})
except OSError as error:
    print(error)
"""


def test_a_line_that_does_not_fit_on_the_disk_is_a_clear_error_and_leaves_no_torn_half(tmp_path):
    out = forks.run(["-c", FULL, tmp_path], check=True).stdout
    assert "a line of the run record could not be written" in out
    assert "resume from the last checkpoint" in out
    content = (tmp_path / "metrics.jsonl").read_text()
    assert content.endswith("\n")
    assert [json.loads(line)["step"] for line in content.splitlines()] == [1]


WRITER = """
import itertools, sys
from posttrain.report.record import RunRecord
record = RunRecord(sys.argv[1])
for step in itertools.count(1):
    record.metrics(step, {"loss": 1.0, "note": "x" * 500})
    print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_writer_loses_no_line_that_it_reported(tmp_path):
    process = forks.Forked(["-c", WRITER, tmp_path], stdout=forks.PIPE)
    reported = 0
    try:
        while reported < 20:
            reported = int(process.stdout.readline())
        time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
    whole = [line for line in rest.split("\n") if line]
    reported = int(whole[-1]) if whole else reported
    steps = [row["step"] for row in lines(tmp_path / "metrics.jsonl")]
    assert steps[:reported] == list(range(1, reported + 1))
    assert len(steps) - reported in (0, 1)
