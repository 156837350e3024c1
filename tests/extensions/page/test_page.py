"""The page of a run: complete, alone, safe against what the record holds, and drawn in a real browser."""

import copy
import html.parser
import json
import math
import re
import shutil
import subprocess

import pytest

from posttrain.checks.rules import RULES, check_log, review
from posttrain.cli.main import main
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.page.build import content, panels_of, render
from posttrain.extensions.page.run import read_run, read_runs
from posttrain.report.lock import FolderLock
from posttrain.report.progress import MAIN
from posttrain.report.record import RunRecord
from tests.extensions.page.page_runs import EVIL, break_record, dpo_record, grpo_record
from tests.forks import PIPE, Forked
from tests.wordings import raises


class Reader(html.parser.HTMLParser):
    """Elements and attributes as a browser would see them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.ids = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def without_scripts(page):
    return re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def verdicts(rows):
    return {verdict.rule.code: verdict for verdict in review(rows)}


def seen(rows):
    return {code for code, verdict in verdicts(rows).items() if verdict.status == "seen"}


def log(**curves):
    """Rows of a log; ``__`` stands for ``/``."""
    length = len(next(iter(curves.values())))
    return [
        {"loss": 0.1, "step": i + 1.0} | {name.replace("__", "/"): values[i] for name, values in curves.items()}
        for i in range(length)
    ]


# Reading -------------------------------------------------------------------------------------------------------


def test_a_record_is_read_whole(tmp_path):
    run = read_run(grpo_record(tmp_path / "a"))
    assert (run.step, run.max_steps, run.state, run.notes) == (40, 40, "stopped", [])
    assert run.series["reward"].values[-1] == 1.0
    assert [(mark.step, mark.finding.code) for mark in run.marks] == [(25, "PT-R004")]
    assert [run.samples[0][0], run.samples[-1][0]] == [1, 40]
    assert run.samples[-1][1][0][0].advantage == 0.7
    assert "<dt>loss</dt><dd>nan</dd>" in content([run])["sections"]["overview"]  # An older number must not hide it.


TRAINS = """
import sys
from posttrain.report.record import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_run_goes_on_while_another_process_holds_its_folder_not_this_one(tmp_path):
    grpo_record(tmp_path, steps=1)
    with Forked(["-c", TRAINS, tmp_path], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        assert read_run(tmp_path).state == "running"
        process.communicate("", timeout=30)
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert read_run(tmp_path).state == "stopped"
    lock.release()


def test_a_broken_record_is_shown_with_notes_and_never_fails(tmp_path):
    run = read_run(break_record(grpo_record(tmp_path / "a")))
    assert run.series["loss"].steps[-1] == 41
    counted = {note.split(":")[0]: note for note in run.notes if "invalid line" in note}
    assert "3 invalid lines ignored, including a truncated last line" in counted["metrics.jsonl"], (
        "a list, garbage, half a line"
    )
    assert counted["findings.jsonl"].endswith("2 invalid lines ignored."), "null and 7 are no findings"
    assert any("manifest.json cannot be read" in note for note in run.notes)
    assert any("completions_00001.parquet cannot be read" in note for note in run.notes)
    page = render([run])
    assert "invalid line" in page
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    assert "No metrics were logged yet" in render([read_run(tmp_path / "b")])


RECORD = {
    "manifest.json": {"command": ["posttrain", "sft"], "config": {"beta": 0.1}, "versions": {"torch": "2.13"}},
    "data.json": {
        "facts": {"tokens": 3}, "lengths": [3, 4],
        "sequences": [{"title": "row 0", "pieces": [["a", 1], ["b", 0]], "pictures": ["data:image/png;base64,"]}],
    },
}  # fmt: skip


def mutations(value):
    """Every copy of a JSON value in which one part has become something else."""
    yield from (None, True, -1, 2.5, "x", [], {}, [None], {"a": [1]}, 10**30)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        for other in mutations(part):
            changed = copy.copy(value)
            changed[key] = other
            yield changed


def test_files_of_any_json_are_shown_with_notes_and_never_fail(tmp_path):
    folder = grpo_record(tmp_path / "a", steps=2)
    for name, whole in RECORD.items():
        for changed in mutations(whole):
            (folder / name).write_text(json.dumps(changed))
            assert render([read_run(folder)])
        (folder / name).write_text(json.dumps(whole))
    assert not any("ignored" in note for note in read_run(folder).notes)
    (folder / "data.json").write_text(json.dumps(RECORD["data.json"] | {"lengths": ["x"]}))
    assert any("data.json: lengths was ignored" in note for note in read_run(folder).notes)


def test_a_run_that_went_on_after_its_end_has_not_ended_yet(tmp_path):
    """Interrupted, resumed and killed: the line that its first part ended with still said that it had finished."""
    grpo_record(tmp_path, steps=3)
    RunRecord(tmp_path).metrics(3, {"train_runtime": 1.0})
    assert read_run(tmp_path).state == "finished"
    again = RunRecord(tmp_path)
    again.begin(3)
    assert read_run(tmp_path).state == "stopped"
    again.metrics(4, {"loss": 0.1})
    assert read_run(tmp_path).state == "stopped" and read_run(tmp_path).step == 4


def test_a_metric_that_was_never_a_number_is_shown_as_it_is(tmp_path):
    names = dict.fromkeys(MAIN, math.nan)
    RunRecord(tmp_path).metrics(1, names)
    assert content([read_run(tmp_path)])["sections"]["overview"].count("nan</dd>") == len(names)


def test_a_folder_without_a_record_is_refused_and_runs_inside_it_are_named(tmp_path):
    with raises(DataError):
        read_run(tmp_path / "none")
    grpo_record(tmp_path / "a", steps=1)
    with raises(DataError):
        read_run(tmp_path)
    with raises(ConfigError):
        read_runs([tmp_path / "a", tmp_path / "a"])


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    folders = [dpo_record(tmp_path / name / "out", steps=2) for name in ("x", "y")]
    assert [run.name for run in read_runs(folders)] == ["x/out", "y/out"]


# Illnesses -----------------------------------------------------------------------------------------------------


def test_illnesses_are_seen_where_they_are_and_nowhere_else(tmp_path):
    sick, well = (read_run(grpo_record(tmp_path / n, sick=n == "sick")) for n in ("sick", "well"))
    found = verdicts(sick.rows)
    assert seen(sick.rows) == {"PT-B002", "PT-R002", "PT-R004"}
    (span,) = found["PT-R002"].spans
    assert 20 < span[0] <= 30 and span[1] == 40
    assert found["PT-B002"].spans == [(40, 40)]
    assert found["PT-P003"].status == "unknown"
    assert {verdict.status for verdict in verdicts(well.rows).values()} == {"clear", "unknown"}


def test_both_dpo_rewards_sinking_is_told_from_a_healthy_margin(tmp_path):
    assert "PT-P003" in seen(read_run(dpo_record(tmp_path / "a")).rows)
    healthy = log(rewards__chosen=[0.1 * i for i in range(30)], rewards__rejected=[-0.1 * i for i in range(30)])
    assert verdicts(healthy)["PT-P003"].status == "clear"


@pytest.mark.parametrize(
    ("code", "curves"),
    [
        ("PT-R002", {"frac_reward_zero_std": [0.1] * 10 + [0.9] * 10, "reward": [0.0] * 20}),
        ("PT-R003", {"completions__mean_length": [20.0 + 5 * i for i in range(40)], "reward": [0.5] * 40, "reward_std": [0.2] * 40}),
        ("PT-R005", {"ratio__max": [1.1] * 19 + [50.0]}),
        ("PT-R006", {"clip_ratio__region_mean": [0.1] * 10 + [0.6] * 10}),
        ("PT-R024", {"sampling__kl": [0.7] * 20}),
        ("PT-R007", {"entropy": [2.0] * 10 + [0.01] * 20}),
        ("PT-R008", {"completions__clipped_ratio": [0.9] * 10}),
        ("PT-R009", {"completions__duplicate_ratio": [0.9] * 10}),
        ("PT-R010", {"sampling__frac_masked": [0.5] * 20}),
        ("PT-R011", {"sampling__nan_logprobs": [0.0] * 10 + [0.5]}),
        ("PT-R012", {"grad_norm": [1.0] * 20 + [0.0] * 20}),
        ("PT-T005", {"grad_norm": [1.0] * 20 + [50.0] + [1.0] * 5}),
    ],
)  # fmt: skip
def test_every_illness_can_be_seen_alone(code, curves):
    rows = log(**curves)
    assert seen(rows) == {code}
    assert verdicts(rows)[code].spans and verdicts(rows)[code].evidence


def test_what_the_page_sees_is_what_the_check_says_while_training():
    """One table of rules: at a window that fits into the log, both see the same rows and say the same."""
    rows = log(clip_ratio__region_mean=[0.1] * 30 + [0.6] * 10 + [0.1] * 20)
    told = [(row["step"], list(check_log(rows[: at + 1]))) for at, row in enumerate(rows)]
    told = [(step, findings) for step, findings in told if findings]
    verdict = verdicts(rows)["PT-R006"]
    assert verdict.spans == [(told[0][0], told[-1][0])]
    assert verdict.evidence == told[-1][1][0].what


def test_a_growing_length_that_pays_is_no_creep_and_short_runs_say_nothing():
    grows = log(completions__mean_length=[20.0 + 5 * i for i in range(40)], reward=[i / 10 for i in range(40)])
    assert verdicts(grows)["PT-R003"].status == "clear"
    assert {verdict.status for verdict in review(log(kl=[0.0, 9.0]))} == {"unknown"}
    assert len({rule.code for rule in RULES}) == len(RULES)


# The page ------------------------------------------------------------------------------------------------------


def test_every_logged_metric_is_drawn_once(tmp_path):
    runs = read_runs([grpo_record(tmp_path / "a"), dpo_record(tmp_path / "b")])
    drawn = [name for panel in panels_of(runs) for name in panel.metrics]
    assert sorted(drawn) == sorted({name for run in runs for name in run.series})
    traces = [(t["run"], t["metric"]) for p in content(runs)["data"]["panels"] for t in p["traces"]]
    assert sorted(traces) == sorted((at, name) for at, run in enumerate(runs) for name in run.series)


def test_findings_and_spans_stand_in_the_panel_of_their_metric(tmp_path):
    panels = {p["title"]: p for p in content([read_run(grpo_record(tmp_path / "a"))])["data"]["panels"]}
    kl = panels["KL to the reference (nats)"]
    assert [mark["step"] for mark in kl["marks"]] == [25]
    assert kl["spans"] and not panels["reward"]["spans"]
    assert panels["loss"]["traces"][0]["value"][-1] is None  # NaN is a gap.


def test_nothing_that_a_record_holds_becomes_markup_or_leaves_the_page(tmp_path):
    page = render([read_run(break_record(grpo_record(tmp_path / "<i>a", evil=True)))])
    seen = Reader(without_scripts(page))
    assert not {"img", "i>a", "iframe", "link"} & set(seen.tags)
    assert not [a for a in seen.attributes if a[1].startswith("on") or a[1] in ("src",)]
    assert all(value.startswith("#") for _, name, value in seen.attributes if name == "href")
    assert "<script>window.pwned" not in page and "<img src=x" not in page
    policy = next(value for _, name, value in seen.attributes if name == "content" and "script-src" in value)
    assert "connect-src 'none'" in policy and "unsafe-inline" not in policy.split("style-src")[0]
    data = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.S)[1]
    assert "<" not in data
    json.loads(data)


def test_two_runs_are_compared_by_settings_and_final_values(tmp_path):
    runs = read_runs([grpo_record(tmp_path / "a", sick=False), grpo_record(tmp_path / "b", lr=0.5, sick=False)])
    text = content(runs)["sections"]["compare"]
    assert "config.learning_rate" in text and 'class="changed">0.5<' in text
    assert "config.beta" not in text and "run_name" not in text
    assert "+0 (+0 %)" in text


def test_the_command_writes_beside_the_run_and_says_where(tmp_path, capsys):
    grpo_record(tmp_path / "a", steps=3)
    assert main(["report", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "report.html").stat().st_size < 1.5e6
    assert "report.html" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none")]) == 1
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "file" / "x.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


# In a browser --------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(page, tmp_path, *options):
    """The document after its scripts ran, and what the console said."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,9000", "--virtual-time-budget=15000",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", *options, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_every_panel_and_runs_nothing_of_the_record(tmp_path):
    folder = grpo_record(tmp_path / "a", evil=True)
    page = tmp_path / "page.html"
    page.write_text(render([read_run(folder)]).replace("</main>", "</main><script>document.title='ran'</script>"))
    document, console = browse(page, tmp_path)
    assert "<title>ran</title>" not in document  # The policy lets no script run that is not ours, even in the markup.
    assert "window.pwned=1&gt;" in document and EVIL[:40] not in document
    assert document.count("<svg width") >= len(content([read_run(folder)])["data"]["panels"])
    assert all("Content Security Policy" in line for line in console), console
