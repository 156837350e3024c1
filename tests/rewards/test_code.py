"""Code is judged in sandboxes, and what it might do to the machine is tried here, each thing once."""

import os
import sys
import time
from pathlib import Path

import pytest

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards import code
from posttrain.rewards.code import (
    CaseResult,
    CodeTestsReward,
    Limits,
    code_block,
    get_code_tests_reward,
    read_tests,
    run_tests,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes are tested on Linux")
QUICK = Limits(timeout=2.0, memory_mb=512, file_mb=1, processes=8)
PATIENT = Limits(
    timeout=60.0, memory_mb=512, file_mb=1, processes=8
)  # For code that ends by itself, on a busy machine.


@pytest.fixture(scope="module", autouse=True)
def _possible():
    try:
        run_tests("pass", [{"code": "pass"}], QUICK)
    except RewardError as error:
        pytest.skip(f"no sandbox here: {error}")


def one(source, test="pass", limits=PATIENT, **options):
    return run_tests(source, read_tests(test), limits, **options)[0]


def test_right_code_passes_and_wrong_code_tells_why():
    tests = ["assert f(2) == 4", "assert f(3) == 6, 'three'", "assert g(1)"]
    results = run_tests("def f(x): return x * x", read_tests(tests), QUICK)
    assert [r.passed for r in results] == [True, False, False]
    assert [r.reason for r in results] == ["", "AssertionError: three", "NameError: name 'g' is not defined"]
    assert one("def f(:").reason.startswith("SyntaxError")
    assert len(run_tests("x = 1", read_tests(["assert x == 2", "pass"]), QUICK, stop=True)) == 1


def test_programs_read_their_input_and_their_output_is_compared_by_lines():
    source = "n = int(input())\nfor i in range(n):\n    print(i, end=' \\n')"
    assert one(source, {"input": "2", "output": "0\n1\n"}).passed
    assert one(source, {"input": "2", "output": "0\n2"}).reason == "wrote '0 \\n1 \\n'"
    assert one("import sys\nprint(7)\nsys.exit(0)", {"input": "", "output": "7"}).passed
    assert not one("import sys\nprint(7)\nsys.exit(1)", {"input": "", "output": "7"}).passed


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_leaving_early_passes_nothing(leave):
    result = one(leave, "assert False")
    assert not result.passed
    assert result.reason


@pytest.mark.parametrize(
    "source", ["while True: pass", "import time; time.sleep(60)", "import signal\nsignal.alarm = 0\nwhile True: pass"]
)
def test_endless_code_is_killed_in_time(source):
    began = time.monotonic()
    result = one(source, limits=QUICK)
    assert not result.passed
    assert result.reason.startswith(("timed out", "killed by"))
    assert time.monotonic() - began < 20


def test_a_memory_hog_fails_alone():
    assert one("x = bytearray(2 ** 31)").reason.startswith("MemoryError")
    assert one("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=QUICK).reason.startswith(
        ("MemoryError", "killed", "timed")
    )


def test_huge_output_and_huge_files_are_bounded():
    result = one("while True: print('x' * 10000)", {"input": "", "output": "x"}, limits=QUICK)
    assert not result.passed
    assert "File too large" in result.reason or result.reason.startswith("killed")
    assert "File too large" in one("open('big', 'wb').write(b'x' * (2 << 20))").reason


def test_many_files_are_noticed():
    source = "import itertools\nfor i in itertools.count():\n    open(str(i), 'wb').write(b'x' * 1000000)"
    result = run_tests(source, [{"code": "pass"}], Limits(timeout=5.0, file_mb=1))[0]
    assert result.reason.startswith("killed: its folder held more than 4 MiB")


def test_a_fork_bomb_meets_its_limit_and_nothing_outlives_it():
    source = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
    began = time.monotonic()
    assert not one(source, limits=QUICK).passed
    assert time.monotonic() - began < 30
    assert one("x = 1", "assert x == 1").passed  # The machine is still there.


def test_a_child_that_leaves_its_session_does_not_outlive_the_test(tmp_path):
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


def test_writing_outside_the_folder_is_refused(tmp_path):
    target = tmp_path / "theirs"
    target.write_text("mine")
    os.chmod(tmp_path, 0o777)
    os.chmod(target, 0o666)
    for source in (
        f"open({str(target)!r}, 'w').write('x')",
        f"import os; os.remove({str(target)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.rename({str(target)!r}, 'stolen')",
        "open('/dev/shm/posttrain-test', 'w')",
    ):
        assert one(source).reason.startswith(("PermissionError", "OSError", "FileNotFoundError")), source
    assert target.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]
    assert one("open('own', 'w').write('x')\nassert open('own').read() == 'x'").passed


def test_each_test_begins_with_an_empty_folder_which_is_gone_afterwards():
    assert one("import os\nprint(os.getcwd(), os.listdir('.'))", {"input": "", "output": "x"}).reason.count("[]") == 1
    where = one("import os\nprint(os.getcwd())", {"input": "", "output": "x"}).reason.split("'")[1].strip("\\n")
    assert "posttrain-code-" in where
    assert not Path(where).exists()


def test_a_link_in_the_folder_is_deleted_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("here")
    os.chmod(tmp_path, 0o777)
    one(f"import os\nos.symlink({str(tmp_path)!r}, 'link')")
    assert (tmp_path / "precious").read_text() == "here"


def test_our_environment_and_our_rights_stay_outside(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert one("import os", "assert 'SECRET_TOKEN' not in os.environ").passed
    source = f"open('/proc/{os.getpid()}/environ', 'rb').read()"
    if os.geteuid() == 0:
        assert "PermissionError" in one(source).reason
        assert one("import os", "assert os.getuid() != 0 and os.getgroups() == []").passed


def test_the_parent_cannot_be_killed():
    assert "ProcessLookupError" in one(f"import os, signal; os.kill({os.getpid()}, 0)").reason or (
        "PermissionError" in one(f"import os, signal; os.kill({os.getpid()}, 0)").reason
    )


def test_the_network_is_out_of_reach_unless_it_is_left_on():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert one(source).reason.startswith("OSError")
        assert one(source, network=True).passed


def test_a_system_that_cannot_cut_off_the_network_says_so(monkeypatch):
    monkeypatch.setattr(code, "_ask", lambda *a: ({"error": "network", "why": "no"}, "", "", ""))
    with pytest.raises(RewardError, match=r"cannot cut judged code off from the network: no.*network=True"):
        one("pass")


def test_code_that_kills_its_keeper_has_not_passed():
    assert not one("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "assert False").passed


def test_a_folder_that_is_not_a_sandboxs_own_is_never_deleted(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    code._remove(str(tmp_path))
    assert (tmp_path / "file").exists()
    assert "is left behind" in caplog.text


def test_a_folder_with_something_mounted_is_not_deleted(monkeypatch, tmp_path, caplog):
    import tempfile

    work = tempfile.mkdtemp(prefix=code.PREFIX)
    lines = f"1 2 3:4 / {work}/inside rw - proc proc rw\n"
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: lines if self.name == "mountinfo" else real(self, *a, **k)
    )
    code._remove(work)
    assert os.path.isdir(work)
    assert "is left behind" in caplog.text
    monkeypatch.undo()
    code._remove(work)
    assert not os.path.exists(work)


# The reward -----------------------------------------------------------------------------------------------------------

DOUBLE = "```python\ndef f(x): return 2 * x\n```"
FOUR = "Let me see.\n```python\ndef f(x): return 4\n```"
TESTS = ["assert f(2) == 4", "assert f(3) == 6"]


def test_the_reward_is_all_or_nothing_or_the_share():
    texts = [DOUBLE, FOUR, "I cannot.", DOUBLE]
    logged = {}
    reward = get_code_tests_reward(limits=QUICK)
    columns = {"tests": [TESTS, TESTS, TESTS, None]}
    assert reward(completions=texts, log_extra=logged.__setitem__, **columns) == [1.0, 0.0, 0.0, None]
    assert logged["tests_passed"] == ["2/2", "1/2", "0/2", "0/0"]
    assert logged["first_failure"][1:3] == ["AssertionError", "no code block"]
    assert get_code_tests_reward(partial=True, limits=QUICK)(completions=texts, **columns) == [1.0, 0.5, 0.0, None]


def test_it_keeps_the_contract_of_rewards():
    from posttrain.rewards.runner import RewardRunner

    table = RewardRunner(get_code_tests_reward("checks", limits=QUICK))(
        prompts=["p", "p"],
        completions=[[{"role": "assistant", "content": DOUBLE}], [{"role": "assistant", "content": FOUR}]],
        completion_ids=[[1], [2]],
        columns={"checks": [TESTS, TESTS]},
    )
    assert table.values.tolist() == [[1.0], [0.0]]
    assert table.names == ["code_tests_reward"]


def test_equal_completions_are_judged_once(monkeypatch):
    calls = []
    monkeypatch.setattr(code, "run_tests", lambda *a, **k: calls.append(a[0]) or [CaseResult(True)] * 2)
    assert CodeTestsReward()(completions=[DOUBLE] * 4, tests=[TESTS] * 4) == [1.0] * 4
    assert len(calls) == 1


def test_the_last_python_block_counts_and_thoughts_do_not():
    assert code_block("```py\na\n```\n```\nb\n```") == "a"
    assert code_block("```\na\n```\n```\nb\n```") == "b"
    assert code_block("<think>```python\nx\n```</think>none") is None
    assert code_block("````python\n```\n````") == "```"
    assert code_block("```python\nopen") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [({"input": "1"}, "needs input and output"), ({"inputs": ["1"], "outputs": []}, "1 inputs and 0"), (7, "got 7")],
)
def test_tests_in_an_unknown_form_are_an_error_that_names_the_row(value, message):
    with pytest.raises(RewardError, match=f"row 1: .*{message}"):
        CodeTestsReward()(completions=[DOUBLE, DOUBLE], tests=[TESTS, value])


def test_bad_constants_and_a_missing_column_are_refused():
    with pytest.raises(ConfigError, match="timeout=0"):
        Limits(timeout=0)
    with pytest.raises(ConfigError, match="workers=0"):
        CodeTestsReward(workers=0)
    with pytest.raises(RewardError, match=r"needs the column 'tests'; it got \['answer'\]"):
        CodeTestsReward()(completions=["x"], answer=["y"])
