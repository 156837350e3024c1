"""What launched processes leave behind: the code of the first that failed, and the end of its stderr."""

import json
import os
import subprocess
import sys

import pytest

from posttrain.cli.ranks import EXIT_CODES, Failure, first_failure


def launched(folder, rank, code):
    """Run Python code as a process that was launched with this number."""
    env = os.environ | {EXIT_CODES: str(folder), "RANK": str(rank)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_of_a_process_that_fails_the_code_and_the_last_thirty_lines_are_kept_and_all_is_shown(tmp_path):
    code = (
        "import sys; from posttrain.cli import main\n"
        "def command(argv):\n"
        "    for i in range(50): sys.stderr.write(f'line {i}\\n')\n"
        "    sys.stderr.write('10 %\\r100 %\\n')\n"
        "    raise ValueError('rows are missing')\n"
        "main.COMMANDS['sft'] = command\n"
        "sys.exit(main.main(['sft']))\n"
    )
    done = launched(tmp_path, 1, code)
    assert done.returncode == 1 and "line 0\n" in done.stderr and "error: rows are missing" in done.stderr
    found = first_failure(tmp_path, 99)
    assert (found.rank, found.code) == (1, 1)
    lines = found.tail.splitlines()
    assert len(lines) == 30 and lines[0] == "line 22" and lines[-2:] == ["100 %", "error: rows are missing"]
    assert str(found).startswith("process 1 failed first, with exit code 1; the last lines of its stderr:\nline 22\n")


def test_an_exception_of_any_kind_leaves_a_code_and_its_traceback(tmp_path):
    code = "from posttrain.cli import main\nmain.COMMANDS['sft'] = lambda argv: {}['no such key']\nmain.main(['sft'])\n"
    assert launched(tmp_path, 0, code).returncode == 1
    assert first_failure(tmp_path, 7).tail.endswith("KeyError: 'no such key'")


def test_a_crash_of_the_interpreter_leaves_its_trace(tmp_path):
    code = (
        "import faulthandler, os; from posttrain.cli import main\n"
        "main.COMMANDS['sft'] = lambda argv: os.abort()\n"
        "main.main(['sft'])\n"
    )
    assert launched(tmp_path, 3, code).returncode < 0
    found = first_failure(tmp_path, 134)
    assert (found.rank, found.code) == (3, 134) and "Fatal Python error: Aborted" in found.tail


def test_the_first_of_several_is_named_and_success_leaves_nothing(tmp_path):
    assert first_failure(tmp_path, 1) is None
    for rank, age in ((0, 2), (1, 1)):
        path = tmp_path / f"{rank}.code"
        path.write_text("78")
        os.utime(path, ns=(0, age))
    assert first_failure(tmp_path, 1) == Failure(1, 78, "")
    assert "wrote nothing to stderr" in str(first_failure(tmp_path, 1))
    done = launched(
        tmp_path, 5, "from posttrain.cli import main; main.COMMANDS['sft'] = lambda argv: 0; main.main(['sft'])"
    )
    assert done.returncode == 0 and not (tmp_path / "5.code").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_launched_processes_that_fail_end_the_command_with_their_code_and_words(tiny_model_dir, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": []}) + "\n" for _ in range(8)))
    argv = [
        "sft", "--model_name_or_path", tiny_model_dir, "--dataset_name", str(data), "--output_dir", str(tmp_path / "run"),
        "--num_processes", "2", "--cpu", "--report_to", "none", "--use_cpu", "true", "--bf16", "false",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.cli.main", *argv], capture_output=True, text=True, check=False, timeout=240
    )
    said = done.stderr[done.stderr.rindex("failed first") :]
    assert done.returncode == 78
    assert "with exit code 78; the last lines of its stderr:" in said and "PT-D030: 8 of 8 rows" in said
