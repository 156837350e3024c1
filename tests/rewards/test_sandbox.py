"""Code judged by tests: what passes, and what code that means harm (or only fails) is kept from."""

import dataclasses
import logging
import os
import pickle
import socket
import sys
import threading
import time

import pytest

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards import REWARDS, get_code_tests_reward, judged, sandbox
from posttrain.rewards.sandbox import Limits, code_block, read_tests, run_tests

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs a POSIX system")
BRIEF = Limits(timeout=1, memory_mb=512, file_mb=4, processes=8)
OPEN = Limits(timeout=1, memory_mb=512, file_mb=4, processes=8, namespaces=False)
DOUBLE = "def f(x):\n    return 2 * x"


def missing():
    """What this machine cannot cut off."""
    found = {}
    tell, sandbox._tell = sandbox._tell, found.update
    try:
        assert run_tests("", read_tests("pass"), BRIEF)[0].passed
    finally:
        sandbox._tell = tell
    return found


def can_cut_off(what):
    return os.name == "posix" and what not in MISSING


def refused(limits):
    """Why nothing runs under these limits here."""
    try:
        run_tests("", read_tests("pass"), limits)
    except RewardError as error:
        return str(error)
    return ""


MISSING = missing() if os.name == "posix" else {}
WITHOUT = pytest.param(
    OPEN, id="limits only", marks=pytest.mark.skipif(bool(refused(OPEN)), reason=refused(OPEN)[-300:])
)
BOTH = pytest.mark.parametrize("limits", [pytest.param(BRIEF, id="namespaces"), WITHOUT])
needs_network_namespace = pytest.mark.skipif(not can_cut_off("network"), reason=f"no namespace: {MISSING}")
needs_own_processes = pytest.mark.skipif(not can_cut_off("other processes"), reason=f"no namespace: {MISSING}")
needs_own_files = pytest.mark.skipif(not can_cut_off("files"), reason=f"no namespace: {MISSING}")


def one(source, test="pass", limits=BRIEF):
    (result,) = run_tests(source, read_tests(test), limits)
    return result


def fenced(source, language="python"):
    return f"Here:\n```{language}\n{source}\n```\nDone."


def with_word(word):
    """Processes on this machine whose command line or environment holds a word."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as file:
                if word in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@BOTH
def test_right_code_passes_and_wrong_code_tells_why(limits):
    results = run_tests(
        DOUBLE, read_tests(["assert f(2) == 4", "assert f(2) == 5, 'five'", "f()", "assert f(0) == 0"]), limits
    )
    assert [r.passed for r in results] == [True, False, False, True]
    assert results[1].reason == "AssertionError: five"
    assert results[2].reason.startswith("TypeError: f() missing 1 required")
    assert one("def f(:", limits=limits).reason.startswith("SyntaxError")


@BOTH
def test_programs_read_their_input_and_their_output_is_compared_by_lines(limits):
    program = "n = int(input())\nprint(n * 2, ' ')\nprint('é')"
    tests = {"inputs": ["4\n", "5", "x"], "outputs": ["8\né", "11\né", "8\né"]}
    results = run_tests(program, read_tests(tests), limits)
    assert [r.passed for r in results] == [True, False, False]
    assert results[1].reason == r"wrote '10  \né\n'"
    assert results[2].reason.startswith("ValueError")
    guarded = "def main():\n    print(input())\nif __name__ == '__main__':\n    main()\n    raise SystemExit(0)"
    assert one(guarded, {"input": "a b", "output": "a b"}, limits).passed
    assert one(guarded, "main", limits).passed  # Not run as a program: it would wait for input and leave.


@BOTH
@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit"])
def test_leaving_early_passes_nothing(leave, limits):
    assert not one(leave, "assert False", limits).passed
    assert not one(f"def f(x):\n    {leave}", "assert f(1) == 2", limits).passed


@BOTH
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "1 s of processor time"),
        ("import time\ntime.sleep(60)", "not done after 2 s"),
        ("import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", ""),
    ],
)
def test_endless_code_is_killed_in_time_and_later_tests_still_run(source, reason, limits):
    started = time.perf_counter()
    results = run_tests(
        "def f():\n    " + source.replace("\n", "\n    "), read_tests(["f()", "assert callable(f)"]), limits
    )
    assert time.perf_counter() - started < 10
    assert [r.passed for r in results] == [False, True]
    assert reason in results[0].reason


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is not limited elsewhere")
@BOTH
def test_a_memory_bomb_fails_alone(limits):
    limits = dataclasses.replace(limits, timeout=20)
    assert one("x = bytearray(1 << 30)", limits=limits).reason == "MemoryError"
    assert one("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=limits).reason == "MemoryError"
    assert one("x = bytearray(1 << 28)", limits=limits).passed


@BOTH
def test_files_are_bounded_and_do_not_reach_the_next_test(limits):
    assert "File too large" in one("open('big', 'wb').write(bytes(5 << 20))", limits=limits).reason
    source = "import os\nseen = os.listdir('.')\nopen('kept', 'w').write('x')"
    assert [r.passed for r in run_tests(source, read_tests(["assert not seen"] * 2), limits)] == [True, True]
    assert not one("print('x' * (5 << 20))", {"input": "", "output": "x"}, limits).passed


@needs_own_files
def test_many_files_fill_only_a_file_system_of_their_own():
    source = "for i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))"
    assert "No space left" in one(source).reason
    results = run_tests("def f():\n    " + source.replace("\n", "\n    "), read_tests(["f()", "pass"]), BRIEF)
    assert [r.passed for r in results] == [False, True]


@needs_own_files
def test_writes_outside_the_folder_are_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    os.chmod(tmp_path, 0o777)
    os.chmod(victim, 0o666)
    for code in (f"open({str(victim)!r}, 'w')", f"import os; os.remove({str(victim)!r})", "open('/tmp/x', 'w')"):
        assert "Error" in one(code).reason
    assert victim.read_text() == "kept"
    assert one("import tempfile\nwith tempfile.NamedTemporaryFile('w') as file: file.write('x')").passed


@pytest.mark.skipif(
    not can_cut_off("number of processes") or not MISSING.keys().isdisjoint({"other processes"}), reason="no limit"
)
def test_a_fork_bomb_meets_the_limit_of_processes():
    source = (
        "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(20)\n"
        "        n += 1\nexcept OSError:\n    pass"
    )
    result = one(source, "assert 0 < n <= 8, n")
    assert result.passed, result
    threads = "import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=(20,)).start()"
    assert "can't start new thread" in one(threads).reason


@BOTH
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_outlives_a_test(limits):
    word = f"pt{os.getpid() % 10000}x{limits.namespaces:d}"
    source = (
        "import ctypes, os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        f"        ctypes.CDLL(None).prctl(15, b'{word}', 0, 0, 0)\n"
        "        time.sleep(60)\n"
        "time.sleep(0.3)"
    )
    seen = []
    watch = threading.Thread(target=lambda: [seen.extend(with_word(word)) or time.sleep(0.02) for _ in range(100)])
    watch.start()
    result = one(source, "pass", limits)
    left = with_word(word)
    watch.join()
    assert result.passed, result
    assert seen, "the processes were never seen, so nothing was shown"
    assert left == []


def test_a_bomb_that_never_ends_is_swept_away():
    started = time.perf_counter()
    assert not one("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass").passed
    assert time.perf_counter() - started < 15


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts are a feature of Linux")
@pytest.mark.parametrize("limits", [BRIEF, OPEN])
def test_the_mounts_of_the_machine_stay_as_they_are(limits):
    def mounts():
        with open("/proc/self/mountinfo") as file:
            return file.read()

    before = mounts()
    refused(limits)
    assert mounts() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts are a feature of Linux")
def test_mounts_are_refused_outside_a_namespace_of_our_own(monkeypatch):
    monkeypatch.setattr(judged, "_libc", lambda *call: pytest.fail(f"called {call}"))
    for call in (
        lambda: judged._mount("tmpfs", "/nowhere", 0),
        lambda: judged._attributes("/nowhere", 1, 0, 0),
        lambda: judged.confine("/nowhere", 1),
        lambda: judged.own_processes_only(8),
    ):
        with pytest.raises(PermissionError, match="in a namespace of our own only"):
            call()


def test_a_folder_with_something_mounted_is_not_deleted(monkeypatch, tmp_path, caplog):
    kept = tmp_path / "work" / "0" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(sandbox, "Path", lambda name: table)
    for at in (tmp_path / "work", tmp_path / "work" / "0"):
        table.write_text(f"43 42 254:0 /root {at} rw - ext4 /dev/vda rw\n")
        sandbox._remove(str(tmp_path / "work"))
        assert kept.exists() and "is left behind" in caplog.text
    table.write_text(f"43 42 254:0 / {tmp_path}/workshop rw - ext4 /dev/vda rw\n")
    sandbox._remove(str(tmp_path / "work"))
    assert not kept.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_nothing_where_files_are_not_confined_and_no_other_user_can_be_become(monkeypatch):
    monkeypatch.setattr(judged, "open_interpreter", lambda work: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setattr(judged, "give_up_rights", lambda user: pytest.fail("went on"))
    with pytest.raises(PermissionError, match="root will not run judged code"):
        judged.cut_off({"user": 1_900_000_001, "work": "/nowhere", "processes": 8}, "refused")


@needs_network_namespace
def test_the_network_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=2).close()  # Reachable from here.
        result = one(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)")
    assert "unreachable" in result.reason or "refused" in result.reason


@BOTH
def test_the_environment_and_our_rights_stay_outside(limits, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    assert one("import os\nassert 'SECRET_TOKEN' not in os.environ", limits=limits).passed
    if sys.platform.startswith("linux"):
        rights = (
            "text = open('/proc/self/status').read()\n"
            "assert 'CapEff:\\t0000000000000000' in text\nassert 'NoNewPrivs:\\t1' in text"
        )
        assert one(rights, limits=limits).passed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@BOTH
def test_the_verdict_cannot_be_written_by_the_code(limits):
    forge = (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\n"
        "for fd in range(64):\n    try: os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY), b'{}')\n"
        "    except OSError: pass\n"
    )
    assert not one(forge, "assert False", limits).passed
    assert one(forge, {"input": "", "output": "42"}, limits).passed is False


@needs_own_processes
def test_code_that_kills_its_judge_has_not_passed():
    assert not one("import os\nos.kill(os.getppid(), 9)", "assert False").passed
    assert one("import os\nos.kill(os.getppid(), 9)").passed  # The first process of a namespace cannot be killed in it.


@BOTH
def test_libraries_of_this_interpreter_can_be_imported(limits):
    numpy = pytest.importorskip("numpy")
    if not numpy.__file__.startswith(sys.prefix):
        pytest.skip("numpy is found through the environment, which the sandbox does not pass on")
    wide = Limits(timeout=20, memory_mb=4096, namespaces=limits.namespaces)
    assert one("import numpy as np\ndef f(): return int(np.arange(4).sum())", "assert f() == 6", wide).passed
    assert one(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int",
        "assert A(1) == A(x=1)",
    ).passed


def test_reward_is_all_or_nothing_or_the_share():
    texts = [fenced(DOUBLE), fenced("def f(x): return 4"), "I cannot.", fenced("while True: pass"), fenced(DOUBLE)]
    tests = [["assert f(2) == 4", "assert f(3) == 6"]] * 4 + [[]]
    logged = {}
    whole = get_code_tests_reward(limits=BRIEF)(completions=texts, tests=tests, log_extra=logged.__setitem__)
    assert whole == [1.0, 0.0, 0.0, 0.0, None]
    assert logged["tests_passed"] == ["2/2", "1/2", "0/2", "0/2", "0/0"]
    assert logged["first_failure"][1:3] == ["AssertionError", "no code block"]
    share = get_code_tests_reward("checks", partial=True, limits=BRIEF, workers=2)
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert share(completions=chats, checks=tests) == [1.0, 0.5, 0.0, 0.0, None]
    assert pickle.loads(pickle.dumps(share))(completions=texts[:1], checks=tests[:1]) == [1.0]
    assert share.__name__ == "code_tests_reward" and "code_tests_reward" in REWARDS


def test_equal_completions_are_judged_once_and_several_run_at_once(monkeypatch):
    running, most, calls = [0], [0], []

    def slow(source, tests, limits, stop):
        calls.append(source)
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.2)
        running[0] -= 1
        return [sandbox.CaseResult(True)]

    monkeypatch.setattr(sandbox, "run_tests", slow)
    texts = [fenced(f"x = {i // 2}") for i in range(8)]
    assert get_code_tests_reward(workers=4)(completions=texts, tests=["pass"] * 8) == [1.0] * 8
    assert len(calls) == 4 and most[0] == 4


def test_the_last_python_block_counts():
    assert code_block(fenced("a") + fenced("b", "py") + fenced("out", "")) == "b"
    assert code_block(fenced("a", "") + fenced("b", "json")) == "a"
    assert code_block("````python\nx = '''\n```\n'''\n````") == "x = '''\n```\n'''"
    assert code_block(f"<think>{fenced('no')}</think>") is None
    assert code_block("```python\nnever closed") is None
    assert code_block("none") is None
    assert code_block(fenced("def f():\n    return 1")) == "def f():\n    return 1"


def test_tests_are_read_in_every_form():
    pair = [{"input": "1\n2", "output": "3"}]
    assert read_tests({"input": "1\n2", "output": "3"}) == pair
    assert read_tests({"inputs": [["1", "2"]], "outputs": [3]}) == pair
    assert read_tests('[{"input": "1\\n2", "output": 3}]') == pair
    assert read_tests(["assert a", "assert b"]) == [{"code": "assert a"}, {"code": "assert b"}]
    assert [read_tests(nothing) for nothing in (None, "", " ", [], {}, "[]")] == [[]] * 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "must be code, or inputs with outputs"),
        ({"input": "1"}, "needs input and output"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, "Tests of a function are written as code"),
    ],
)
def test_tests_in_an_unknown_form_are_an_error_that_names_the_row(value, message):
    with pytest.raises(RewardError, match=rf"column 'tests', row 1: .*{message}"):
        get_code_tests_reward()(completions=["a", "b"], tests=["pass", value])


def test_a_sandbox_that_fails_is_an_error_not_a_zero(monkeypatch, tmp_path):
    broken = tmp_path / "judge.py"
    broken.write_text("raise OSError('no such thing')")
    monkeypatch.setattr(sandbox, "JUDGE", broken)
    with pytest.raises(RewardError, match=r"failed with exit status 1: (?s:.*)no such thing"):
        one(DOUBLE)


def test_a_sandbox_that_hangs_is_killed(monkeypatch, tmp_path):
    hung = tmp_path / "judge.py"
    hung.write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(sandbox, "JUDGE", hung)
    monkeypatch.setattr(sandbox, "START_SECONDS", -6.0)
    started = time.perf_counter()
    assert not one(DOUBLE).passed
    assert time.perf_counter() - started < 10


def test_what_a_machine_cannot_cut_off_is_said_once(caplog):
    sandbox._told.discard("network")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sandbox._tell({"network": "Operation not permitted"})
    assert caplog.text.count("network (Operation not permitted)") == 1
    sandbox._told.discard("network")


def test_bad_constants_are_refused():
    with pytest.raises(ConfigError, match="timeout=0 must be above 0"):
        Limits(timeout=0)
    with pytest.raises(ConfigError, match="workers=0"):
        get_code_tests_reward(workers=0)
    with pytest.raises(ConfigError, match=r"needs the column 'tests'; it got \['answer'\]"):
        get_code_tests_reward()(completions=["a"], answer=["b"])
