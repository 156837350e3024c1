"""A run watched while it trains: the terminal, and the page served on this machine alone."""

import http.client
import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from posttrain.cli.main import main
from posttrain.cli.report import LivePage, serve
from posttrain.errors import ConfigError
from posttrain.report.progress import sparkline, watch
from posttrain.report.record import FolderLock, RunRecord
from tests.report.page_runs import break_record, grpo_record
from tests.wordings import raises


def shown(folder, *, terminal=False, **options):
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    run = watch(str(folder), console=console, **options)
    return run, console.file.getvalue()


def test_a_run_that_ended_is_shown_once_with_metrics_finding_and_completion(tmp_path):
    run, text = shown(grpo_record(tmp_path / "a"))
    assert run.state == "stopped"
    for part in ("step 40/40", "reward", "KL (nats)", "PT-R004", "raise beta", "answer 40", "█"):
        assert part in text, part
    assert "nan" in text  # The last loss: it must not be hidden by an older number.


def test_a_broken_record_and_control_characters_do_not_reach_the_terminal(tmp_path):
    folder = break_record(grpo_record(tmp_path / "a"))
    record = RunRecord(folder)
    record.add_completions([{"step": 99, "prompt": "p", "completion": "\x1b[31mred\x07", "advantage": 1.0}])
    record.flush(99)
    _, text = shown(folder)
    assert "\x1b" not in text and "\x07" not in text
    assert "broken line" in text


def test_sparklines_show_gaps_and_constants():
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([]) == ""
    assert "×" in sparkline([1.0] * 99 + [float("nan")])
    assert len(sparkline(list(range(1000)), 28)) <= 28


TRAINS = """
import sys, time
from posttrain.report.record import FolderLock
from posttrain.report.record import RunRecord
folder = sys.argv[1]
record, lock = RunRecord(folder), FolderLock(folder)
record.metrics(1, {"loss": 1.0})
lock.acquire()
print("ready", flush=True)
sys.stdin.readline()
record.metrics(2, {"loss": 0.5, "train_loss": 0.7})
lock.release()
"""


def test_a_running_run_is_followed_until_it_ends(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        assert shown(tmp_path, once=True)[0].state == "running"
        threading.Timer(0.5, lambda: (process.stdin.write("\n"), process.stdin.flush())).start()
        run, text = shown(tmp_path, terminal=True, every=0.1)
    finally:
        process.communicate(timeout=30)
    assert (run.state, run.step) == ("stopped", 2)
    assert "step 2" in text


# Served --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    served = serve([grpo_record(tmp_path / "a", steps=3)])
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def ask(server, path="/", **headers):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_is_served_on_loopback_alone_and_only_to_this_machine_s_names(server):
    assert server.server_address[0] == "127.0.0.1"
    answer, body = ask(server)
    assert answer.status == 200 and b"data-live" in body
    assert ask(server, Host="evil.example")[0].status == 403
    assert ask(server, "/etc/passwd")[0].status == 404
    assert ask(server, "/../a/manifest.json")[0].status == 404


def test_a_browser_that_has_the_page_gets_304_until_the_run_logs_again(server, tmp_path):
    tag = ask(server, "/live.json")[0].headers["ETag"]
    answer, body = ask(server, "/live.json", **{"If-None-Match": tag})
    assert (answer.status, body) == (304, b"")
    RunRecord(tmp_path / "a").metrics(4, {"loss": 0.1})
    server.RequestHandlerClass.live.least_seconds = 0.0
    answer, body = ask(server, "/live.json", **{"If-None-Match": tag})
    assert answer.status == 200
    loss = next(p for p in json.loads(body)["data"]["panels"] if p["title"] == "loss")
    assert loss["traces"][0]["step"] == [1, 2, 3, 4]


def test_the_page_is_rendered_again_only_when_the_record_changed_and_time_has_passed(tmp_path):
    page = LivePage([grpo_record(tmp_path / "a", steps=2)], least_seconds=0.3)
    for _ in range(3):
        page.answer("/")
    RunRecord(tmp_path / "a").metrics(3, {"loss": 0.1})
    page.answer("/")
    assert page.renderings == 1
    time.sleep(0.35)
    page.answer("/")
    page.answer("/")
    assert page.renderings == 2


def test_a_taken_port_and_several_runs_on_the_terminal_are_refused(server, tmp_path, capsys):
    with raises(ConfigError, "127.0.0.1"):
        serve([tmp_path / "a"], server.server_address[1])
    assert main(["watch", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "add --serve" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "a"), "--once"]) == 0
    assert "step 3/3" in capsys.readouterr().out


def test_the_lock_of_this_process_is_no_foreign_run(tmp_path):
    grpo_record(tmp_path, steps=1)
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / ".posttrain.lock").read_text())["pid"] == os.getpid()
    assert shown(tmp_path)[0].state == "stopped"
    lock.release()
