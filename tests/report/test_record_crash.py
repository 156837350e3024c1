"""The run record after a crash at any byte, and while it is being written."""

import json
import signal
import time

import pytest

from posttrain.extensions.page.run import read_run
from posttrain.report.record import RunRecord
from posttrain.types import Finding
from tests.forks import Forked

SENTENCE = "KL grew – naïve 😀"  # Characters of several bytes must not be torn either.


def written(folder):
    """Three lines of metrics and two findings."""
    record = RunRecord(folder)
    record.manifest(max_steps=3, config={})
    for step in (1, 2, 3):
        record.metrics(step, {"loss": 1 / step, "note": SENTENCE})
    for step in (1, 3):
        record.finding(step, Finding("PT-R004", "warning", SENTENCE, "kl", "why", "raise beta"))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "findings.jsonl"])
def test_a_record_cut_at_any_byte_of_its_last_line_keeps_every_earlier_line_and_can_be_continued(tmp_path, name):
    whole = (written(tmp_path / "whole") / name).read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(whole) - len(lines[-1])
    folder = written(tmp_path / "cut")
    others = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    for size in range(start, len(whole)):
        for other, content in others.items():
            (folder / other).write_bytes(content)
        (folder / name).write_bytes(whole[:size])
        run = read_run(folder)
        complete = size == len(whole) - 1  # Only the line break is missing: the line itself is whole.
        if name == "metrics.jsonl":
            assert run.series["loss"].steps == ([1, 2, 3] if complete else [1, 2]), size
        else:
            assert [mark.step for mark in run.marks] == ([1, 3] if complete else [1]), size
        resumed = RunRecord(folder)
        resumed.begin(2)
        resumed.metrics(3, {"loss": 9.0})
        resumed.finding(3, Finding("PT-R004", "warning", "again", "kl", "why", "fix"))
        again = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in again] == [1, 2, 3] and again[-1]["loss"] == 9.0
        told = [json.loads(line) for line in (folder / "findings.jsonl").read_text().splitlines()]
        assert [row["step"] for row in told] == [1, 3] and told[0]["what"] == SENTENCE


WRITER = """
import sys
from posttrain.report.record import RunRecord
record = RunRecord(sys.argv[1])
step = 0
while True:
    step += 1
    record.metrics(step, {"loss": 1.0 / step, "text": "x" * 200})
"""


def test_a_record_is_whole_lines_while_it_is_written_and_after_the_writer_is_killed(tmp_path):
    process = Forked(["-c", WRITER, tmp_path])
    path = tmp_path / "metrics.jsonl"
    try:
        until = time.monotonic() + 300
        while not path.is_file() or len(path.read_bytes()) < 20_000:
            assert process.poll() is None and time.monotonic() < until
            if path.is_file() and path.stat().st_size:
                assert read_run(tmp_path).series["loss"].steps[0] == 1  # Readable at any moment.
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    content = path.read_bytes()
    steps = [json.loads(line)["step"] for line in content[: content.rindex(b"\n")].splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 50
    RunRecord(tmp_path).begin(steps[-1])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps
