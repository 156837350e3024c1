"""Code is judged in sandboxes: what it might do to the machine is tried in bubblewrap, each thing once."""

import json
import os
import platform
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from datasets import Dataset

from posttrain.errors import ConfigError, MissingDependencyError, RewardError
from posttrain.extensions.rewards import code
from posttrain.extensions.rewards.code import (
    CaseResult,
    CodeTestsReward,
    Limits,
    Outcome,
    code_block,
    get_code_tests_reward,
    open_sandbox,
    read_tests,
    run_program,
    run_tests,
)
from posttrain.rewards.runner import RewardRunner
from tests.wordings import raises

QUICK = Limits(timeout=0.7, memory_mb=512, file_mb=1, processes=8)
# For code that ends by itself, on a busy machine.
PATIENT = Limits(timeout=60.0, memory_mb=512, file_mb=1, processes=8)


def _why_not():
    try:
        open_sandbox("bubblewrap")
    except (MissingDependencyError, RewardError) as error:
        return f"no bubblewrap here: {error}"
    return ""


WHY_NOT = _why_not()
in_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No sandbox is taken for tried because another test tried it."""
    monkeypatch.setenv("no_proxy", "*")
    open_sandbox.cache_clear()


def one(source, test="pass", limits=PATIENT, **options):
    return run_tests(source, read_tests(test), limits, **options)[0]


def wrote(source):
    """What a program prints."""
    return run_program("bubblewrap", source, "", PATIENT).output


@in_bubblewrap
def test_right_code_passes_and_wrong_code_tells_why():
    tests = ["assert f(2) == 4", "assert f(3) == 6, 'three'", "assert g(1)"]
    results = run_tests("def f(x): return x * x", read_tests(tests), PATIENT)
    assert [r.passed for r in results] == [True, False, False]
    assert [r.reason for r in results] == ["", "AssertionError: three", "NameError: name 'g' is not defined"]
    assert one("def f(:").reason.startswith("SyntaxError")
    assert len(run_tests("x = 1", read_tests(["assert x == 2", "pass"]), PATIENT, stop=True)) == 1


@in_bubblewrap
def test_programs_read_their_input_and_their_output_is_compared_by_lines():
    source = "n = int(input())\nfor i in range(n):\n    print(i, end=' \\n')"
    assert one(source, {"input": "2", "output": "0\n1\n"}).passed
    assert one(source, {"input": "2", "output": "0\n2"}).reason == "wrote '0 \\n1 \\n'"
    assert one("import sys\nprint(7)\nsys.exit(0)", {"input": "", "output": "7"}).passed
    assert not one("import sys\nprint(7)\nsys.exit(1)", {"input": "", "output": "7"}).passed


@in_bubblewrap
@pytest.mark.parametrize("read", ["input()", "open(0).read()", "__import__('sys').stdin.read()"])
def test_a_program_may_read_its_input_in_every_way(read):
    assert one(f"print({read}.strip() * 2)", {"input": "ab\n", "output": "abab"}).passed


@in_bubblewrap
@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_leaving_early_passes_nothing(leave):
    result = one(leave, "assert False")
    assert not result.passed
    assert result.reason


@in_bubblewrap
@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)"])
def test_endless_code_is_killed_in_time(source):
    began = time.monotonic()
    result = one(source, limits=QUICK)
    assert not result.passed
    assert result.reason.startswith(("timed out", "killed by"))
    assert time.monotonic() - began < 20


@in_bubblewrap
def test_memory_files_and_output_are_bounded():
    assert one("x = bytearray(2 ** 31)").reason.startswith("MemoryError")
    assert "File too large" in one("open('big', 'wb').write(b'x' * (2 << 20))").reason
    many = "import itertools\nfor i in itertools.count():\n    open(str(i), 'wb').write(b'x' * 1000000)"
    assert "No space left" in one(many).reason
    assert "No space left" in one(f"import os\nos.chdir('/dev/shm')\n{many}").reason
    assert "Read-only" in one("open('/dev/more', 'w')").reason
    own_namespaces = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10020000))"  # CLONE_NEWUSER, CLONE_NEWNS
    assert one(own_namespaces, {"input": "", "output": "-1"}).passed
    assert not one("while True: print('x' * 10000)", {"input": "", "output": "x"}, limits=QUICK).passed


@in_bubblewrap
def test_kernel_settings_cannot_be_written_and_no_capability_is_held():
    """As root, `/proc/sys` was writable: its files belong to root, also without capabilities."""
    for name in ("kernel/core_pattern", "vm/overcommit_memory", "kernel/hostname"):
        assert one(f"open('/proc/sys/{name}', 'r+')").reason.startswith(("OSError", "PermissionError"))
    held = wrote("print([line for line in open('/proc/self/status') if line.startswith('CapEff')])")
    assert held == "['CapEff:\\t0000000000000000\\n']\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write kernel settings")
def test_a_sandbox_in_which_kernel_settings_can_be_written_is_refused(monkeypatch, tmp_path):
    script(tmp_path / "bwrap", 'while test "$1" != --; do shift; done; shift; exec "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(RewardError, "/proc/sys/kernel/core_pattern"):
        open_sandbox("bubblewrap")


@in_bubblewrap
@pytest.mark.skipif(platform.machine() not in code.CALLS, reason="no filter of system calls for this machine")
def test_memory_that_counts_for_no_process_and_sockets_of_the_host_are_refused():
    source = (
        "import ctypes, os, socket\n"
        "def refused(call, *arguments):\n"
        "    try: call(*arguments)\n"
        "    except PermissionError: return True\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "numbers = [f(0, *more, 0o1600) for f, *more in ((libc.shmget, 4096), (libc.msgget,), (libc.semget, 1))]\n"
        "assert numbers == [-1] * 3 and ctypes.get_errno() == 1\n"
        "assert refused(os.memfd_create, 'x') and refused(socket.socket, 40)\n"
        "for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): socket.socket(family).close()"
    )
    assert one(source) == CaseResult(True)


@pytest.mark.parametrize("machine", sorted(code.CALLS))
def test_the_filter_of_system_calls_decides_by_architecture_call_and_family(machine):
    """Run as the kernel runs it, also for the machine that this one is not."""
    lines = list(struct.iter_unpack("=HBBI", code._call_filter(machine)))
    architecture, refused, socket = code.CALLS[machine]

    def verdict(number, family=0, architecture=architecture):
        data, at, value = {0: number, 4: architecture, 16: family}, 0, 0
        while True:
            operation, yes, no, operand = lines[at]
            if operation == 0x06:
                return operand
            holds = {0x20: None, 0x15: value == operand, 0x35: value >= operand}[operation]
            value = data[operand] if holds is None else value
            at += 1 + (0 if holds is None else yes if holds else no)

    allow, refuse = 0x7FFF0000, 0x00050001
    assert {verdict(number) for number in refused} == {refuse}
    assert {verdict(socket, family) for family in (1, 2, 10, 16)} == {verdict(0), verdict(500)} == {allow}
    assert {verdict(socket, 40), verdict(0, architecture=0x40000003), verdict(0x40000000)} == {refuse}
    assert code._call_filter("sparc") == b""


@in_bubblewrap
def test_a_child_that_leaves_its_session_does_not_outlive_the_test():
    word = f"sleep-{os.getpid()}-{time.monotonic_ns()}"
    source = (
        "import os, time, sys\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(300)', {word!r}])\n"
        "    os._exit(0)\ntime.sleep(0.3)"
    )
    one(source)
    time.sleep(0.2)
    left = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            left += [path] if word.encode() in path.read_bytes() else []
        except OSError:
            continue
    assert left == []


@in_bubblewrap
def test_files_of_the_machine_cannot_be_written_and_those_of_the_user_not_even_be_seen(tmp_path):
    target = tmp_path / "theirs"
    target.write_text("mine")
    os.chmod(tmp_path, 0o777)
    os.chmod(target, 0o666)
    for source in (
        f"open({str(target)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open('/etc/passwd').read()",
    ):
        assert one(source).reason.startswith("FileNotFoundError"), source
    for folder in ("/", "/usr", os.path.dirname(os.__file__)):
        assert "Read-only file system" in one(f"open({folder + '/new'!r}, 'w')").reason
    assert (target.read_text(), sorted(p.name for p in tmp_path.iterdir())) == ("mine", ["theirs"])
    assert one("open('own', 'w').write('x')\nassert open('own').read() == 'x'").passed


@in_bubblewrap
def test_each_test_begins_with_an_empty_folder():
    tests = read_tests(["import os\nassert os.listdir('.') == []\nopen('left', 'w').write('x')"] * 2)
    assert [r.passed for r in run_tests("", tests, PATIENT)] == [True, True]


@in_bubblewrap
def test_our_environment_and_our_processes_stay_outside(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    source = "import os, glob\nprint(dict(os.environ))\nfor path in glob.glob('/proc/[0-9]*/environ'): print(open(path).read())"
    shown = wrote(source)
    assert "PATH" in shown and "SECRET_TOKEN" not in shown
    processes = json.loads(wrote("import os, json; print(json.dumps([p for p in os.listdir('/proc') if p.isdigit()]))"))
    assert set(processes) <= {"1", "2", "3"}
    assert one("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "assert False").passed is False


@in_bubblewrap
def test_the_network_is_out_of_reach():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert one(source).reason.startswith(("OSError", "ConnectionRefusedError"))


# Which sandbox --------------------------------------------------------------------------------------------------------


def script(path, text):
    """A program that stands for one which this machine may not have."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_a_sandbox_no_code_is_run_and_the_error_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for reward, program in ((CodeTestsReward(), "bwrap"), (CodeTestsReward(sandbox="container:docker run"), "docker")):
        with pytest.raises(MissingDependencyError) as error:
            RewardRunner(reward).dry_run([{"prompt": "p", "tests": TESTS}], conversational=False)
        assert error.value.name == program
        assert "Fix: " in str(error.value)


def test_a_bubblewrap_that_may_not_create_namespaces_is_an_error(monkeypatch, tmp_path):
    script(tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(RewardError):
        one("pass")


@pytest.mark.parametrize("name", ["bubblewrp", "container:", "docker run", "ftp://host", "http:host", ""])
def test_an_unknown_sandbox_is_refused_when_the_reward_is_made(name):
    with pytest.raises(ConfigError):
        CodeTestsReward(sandbox=name)


def test_a_container_is_a_command_line(tmp_path):
    """The stand-in for docker starts on this machine what it is given."""
    where = script(tmp_path / "engine", 'test "$1 $2" = "run -i" || exit 125; shift 2; exec "$@"')
    name = f"container:{where} run -i"
    source = "def f(x): return x * x"
    results = run_tests(source, read_tests(["assert f(2) == 4", "assert f(3) == 6"]), PATIENT, sandbox=name)
    assert results == [CaseResult(True), CaseResult(False, "AssertionError")]
    assert one("print(int(input()) + 1)", {"input": "1", "output": "2"}, sandbox=name).passed
    assert not one("import time; time.sleep(60)", limits=QUICK, sandbox=name).passed
    with raises(RewardError, "125"):
        one("pass", sandbox=f"container:{where} start")
    for status in (125, 126, 127):
        # What an engine says that could not start the program: here it is the program's own.
        assert one(f"import sys; sys.exit({status})", sandbox=name) == CaseResult(
            False, f"exited with status {status} before the test was over"
        )
    silent = script(tmp_path / "silent", 'exec 0</dev/null; shift; exec "$@"')
    with raises(RewardError):
        one("pass", sandbox=f"container:{silent} run")


class Service:
    """SandboxFusion's ``/run_code``, as far as it is used."""

    def __init__(self, answer=None):
        self.requests, self.answer, outer = [], answer, self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, request))
                body = outer.answer or outer.run(request)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def run(self, request):
        command = [sys.executable, "-I", "-c", request["code"]]
        done = subprocess.run(command, input=request["stdin"], capture_output=True, text=True, timeout=60)
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Success" if done.returncode == 0 else "Failed", "message": "", "run_result": result}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def test_a_service_runs_the_code_and_ours_judges():
    with Service() as service:
        tests = read_tests(["assert f(2) == 4", "assert f(3) == 6, 'three'"])
        results = run_tests("def f(x): return x * x", tests, QUICK, sandbox=service.url)
        assert results == [CaseResult(True), CaseResult(False, "AssertionError: three")]
        assert one("print(input() * 2)", {"input": "a", "output": "aa"}, sandbox=f"{service.url}/run_code").passed
        assert {path for path, _ in service.requests} == {"/run_code"}
        request = service.requests[-1][1]
        assert (request["language"], request["stdin"], request["run_timeout"]) == ("python", "a", 120.0)


def test_what_a_service_answers_is_read():
    late = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "a", "stderr": ""}
    with Service({"status": "Failed", "message": "", "run_result": late}) as service:
        assert run_program(service.url, "x", "", QUICK) == Outcome(None, "a", "")
        service.answer = {"status": "SandboxError", "message": "no disk", "run_result": None}
        with raises(RewardError):
            run_program(service.url, "x", "", QUICK)
        service.answer = {"hello": 1}
        with raises(RewardError):
            one("pass", sandbox=service.url)


# The reward -----------------------------------------------------------------------------------------------------------

DOUBLE = "```python\ndef f(x): return 2 * x\n```"
FOUR = "Let me see.\n```python\ndef f(x): return 4\n```"
TESTS = ["assert f(2) == 4", "assert f(3) == 6"]


@in_bubblewrap
def test_the_reward_is_all_or_nothing_or_the_share():
    texts = [DOUBLE, FOUR, "I cannot.", DOUBLE]
    logged = {}
    reward = get_code_tests_reward(limits=PATIENT)
    columns = {"tests": [TESTS, TESTS, TESTS, None]}
    assert reward(completions=texts, log_extra=logged.__setitem__, **columns) == [1.0, 0.0, 0.0, None]
    assert logged["tests_passed"] == ["2/2", "1/2", "0/2", "0/0"]
    assert logged["first_failure"][1:3] == ["AssertionError", "no code block"]
    assert get_code_tests_reward(partial=True, limits=PATIENT)(completions=texts, **columns) == [1.0, 0.5, 0.0, None]


@in_bubblewrap
def test_it_keeps_the_contract_of_rewards():
    table = RewardRunner(get_code_tests_reward("checks", limits=PATIENT))(
        prompts=["p", "p"],
        completions=[[{"role": "assistant", "content": DOUBLE}], [{"role": "assistant", "content": FOUR}]],
        completion_ids=[[1], [2]],
        columns={"checks": [TESTS, TESTS]},
    )
    assert table.values.tolist() == [[1.0], [0.0]]
    assert table.names == ["code_tests_reward"]


def test_equal_completions_are_judged_once(monkeypatch):
    calls = []
    monkeypatch.setattr(code, "open_sandbox", lambda *a: None)
    monkeypatch.setattr(code, "run_tests", lambda *a, **k: calls.append(a[0]) or [CaseResult(True)] * 2)
    assert CodeTestsReward()(completions=[DOUBLE] * 4, tests=[TESTS] * 4) == [1.0] * 4
    assert len(calls) == 1


def test_one_failure_of_the_sandbox_ends_the_runs_that_have_not_begun(monkeypatch):
    """A service that hangs is given up after minutes: once, and not once for each completion."""
    calls = []

    def fails(source, *_, **__):
        calls.append(source)
        time.sleep(0.05)
        raise RewardError("the sandbox service is down")

    monkeypatch.setattr(code, "open_sandbox", lambda *a: None)
    monkeypatch.setattr(code, "run_tests", fails)
    with pytest.raises(RewardError, match="down"):
        CodeTestsReward(workers=1)(completions=[f"```python\n{i}\n```" for i in range(20)], tests=[TESTS] * 20)
    assert len(calls) < 5


def test_a_block_in_a_list_is_read_without_its_indent_and_lines_may_end_as_on_windows():
    """CommonMark 4.5: what the opening fence is indented by is no part of the lines."""
    text = "1. So:\n   ```python\n   def f(x):\n       return 2 * x\n\n  # less\n   ```\n"
    assert code_block(text) == "def f(x):\n    return 2 * x\n\n# less"
    assert code_block("```python\r\nx = 1\r\n```\r\nDone.") == "x = 1\r"


def test_the_last_python_block_counts_and_thoughts_do_not():
    assert code_block("```py\na\n```\n```\nb\n```") == "a"
    assert code_block("```\na\n```\n```\nb\n```") == "b"
    assert code_block("<think>```python\nx\n```</think>none") is None
    assert code_block("````python\n```\n````") == "```"
    assert code_block("```python\nopen") is None
    assert code_block("``` \t Python \nx\n  ``` ") == "x" == code_block("```  \nx\n```")


def test_a_completion_of_spaces_is_read_in_no_time():
    begin = time.process_time()
    assert code_block("```" + " " * 2000) is code_block(" " * 2000 + "```") is code_block("```py\n" * 200) is None
    assert time.process_time() - begin < 1


def test_what_arrow_fills_in_is_no_part_of_a_test():
    """A column of dicts has the keys of all rows; a missing one was the text None."""
    tests = [{"input": "1", "output": "2"}, {"inputs": ["3"], "outputs": ["4"]}, {}]
    filled = Dataset.from_list([{"tests": test} for test in tests])["tests"]
    assert [read_tests(test) for test in filled] == [tests[:1], [{"input": "3", "output": "4"}], []]
    with pytest.raises(RewardError, match="needs the keys 'input' and 'output'"):
        read_tests(Dataset.from_list([{"tests": {"input": "1", "output": None}}])["tests"][0])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"input": "1"}, "needs the keys 'input' and 'output'"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
        (7, "got 7"),
    ],
)
def test_tests_in_an_unknown_form_are_an_error_that_names_the_row(value, message):
    with pytest.raises(RewardError, match=f"row 1: .*{message}"):
        CodeTestsReward()(completions=[DOUBLE, DOUBLE], tests=[TESTS, value])


def test_bad_constants_and_a_missing_column_are_refused():
    with pytest.raises(ConfigError, match="timeout=0"):
        Limits(timeout=0)
    with pytest.raises(ConfigError, match="workers=0"):
        CodeTestsReward(workers=0)
    with raises(RewardError, "'tests'", "'answer'"):
        CodeTestsReward()(completions=["x"], answer=["y"])
