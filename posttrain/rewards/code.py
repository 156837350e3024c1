"""A reward for code that passes its tests, each run in a sandbox: processes that can do little harm."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards.format import completion_text

__all__ = [
    "CaseResult",
    "CodeTestsReward",
    "Limits",
    "code_block",
    "get_code_tests_reward",
    "read_tests",
    "run_tests",
]

logger = logging.getLogger(__name__)


PYTHON = ("python", "python3", "py")


def code_block(text: str) -> str | None:
    r"""The last closed block marked as Python, or else the last without a language; what was thought does not count.

    >>> code_block("```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1'
    """
    blocks: dict[bool, str] = {}
    fence, marked, wanted = "", False, False
    lines: list[str] = []
    for line in text.rpartition("</think>")[2].splitlines():
        bare = line.strip()
        if not fence and bare.startswith("```"):
            fence = bare[: len(bare) - len(bare.lstrip("`"))]
            language = bare[len(fence) :].strip().lower()
            marked, lines = language in PYTHON, []
            wanted = marked or not language
        elif fence and bare == fence:
            if wanted:
                blocks[marked] = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    return blocks.get(True, blocks.get(False))


def read_tests(value: Any) -> list[dict[str, str]]:
    """A row's tests in one form: ``{"code": ...}``, or ``{"input": ..., "output": ...}`` for a program.

    Args:
        value: Python code; a dict with ``input`` and ``output`` (or lists ``inputs`` and ``outputs``); a list of those;
            or one of them written as JSON. None and empty values are no tests.

    Raises:
        RewardError: Something else.

    >>> read_tests(["assert f(1) == 2"]), read_tests('{"inputs": ["1"], "outputs": ["2"]}')
    ([{'code': 'assert f(1) == 2'}], [{'input': '1', 'output': '2'}])
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None or (isinstance(value, Sequence | Mapping) and not value):
        return []
    if isinstance(value, str):
        return [{"code": value}] if value.strip() else []
    if isinstance(value, Mapping):
        return _programs(value)
    if isinstance(value, Sequence):
        return [test for item in value for test in read_tests(item)]
    raise RewardError(f"tests must be code, or inputs with outputs, or a list of those; got {value!r:.200}.")


def _programs(value: Mapping[str, Any]) -> list[dict[str, str]]:
    given, wanted = (_side(value, name) for name in ("input", "output"))
    if given is None or wanted is None or value.get("fn_name"):
        raise RewardError(
            "a test given as a dict needs input and output, or inputs and outputs, of a program; it has the keys "
            f"{sorted(value)}. Tests of a function are written as code: 'assert f(1) == 2'."
        )
    if len(given) != len(wanted):
        raise RewardError(f"a test has {len(given)} inputs and {len(wanted)} outputs; there must be one each.")
    return [{"input": _lines(i), "output": _lines(o)} for i, o in zip(given, wanted, strict=True)]


def _side(value: Mapping[str, Any], name: str) -> list[Any] | None:
    if name in value:
        return None if value[name] is None else [value[name]]
    several = value.get(f"{name}s")
    return list(several) if isinstance(several, list | tuple) else None


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


WORKER = Path(__file__).with_name("code_worker.py")
START_SECONDS = 60.0  # For a process to start on a busy machine.
PREFIX = "posttrain-code-"
FIRST_USER, USERS = 1_900_000_000, 100_000_000  # Numbers that no account has.
NOBODY = 65534
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one test of a completion may use.

    Args:
        timeout: Seconds of processor time of each process; all together may take twice as long by the clock.
        memory_mb: MiB of address space of each process.
        file_mb: MiB of each file (and of what it prints); its folder may hold four times as much.
        processes: Processes and threads at once.
    """

    timeout: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_mb", "file_mb", "processes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0: the code could not run at all.")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Whether a test passed, and otherwise why not."""

    passed: bool
    reason: str = ""


def run_tests(
    source: str,
    tests: Sequence[Mapping[str, str]],
    limits: Limits | None = None,
    *,
    network: bool = False,
    files: bool = False,
    stop: bool = False,
) -> list[CaseResult]:
    """Run code against tests, each in a sandbox of its own.

    A sandbox is a few processes with limits on time, memory, files and processes, an empty environment, a temporary
    folder of their own, no network, and (on Linux 5.13 or later, with Landlock) no right to write anywhere else; what
    is left of them when the test is over is killed. Started by root they become another user. Nothing is mounted.

    **What it does not do**: files that the user may read stay readable; the processor's and the kernel's own faults are
    open to it; code shares a process with a test written as code, and can tamper with it (tests with inputs and outputs
    are compared outside). Where Python's files are readable by root only, code can import little beyond the standard
    library's usual modules. Where Landlock is missing and root becomes another user, folders that everybody may write in
    stay so. For models you do not trust, run the trainer in a container or a virtual machine of its own.

    Args:
        source: Python code, run anew for each test.
        tests: What `read_tests` gives.
        limits: See `Limits`.
        network: Leave the network on.
        files: Let it write wherever this user may, where the kernel cannot forbid it.
        stop: Leave out what follows the first failure.

    Returns:
        One a test that was run. Code that ends its process early has not passed.

    Raises:
        RewardError: The system cannot cut off the network or confine writing, and was not told that it need not.

    >>> [r.passed for r in run_tests("def f(x): return 2 * x", read_tests(["assert f(2) == 4", "assert f(0) == 1"]))]
    [True, False]
    """
    if os.name != "posix":
        raise RewardError("running code against tests needs a POSIX system (Linux or macOS); this is not one.")
    results = []
    for test in tests:
        results.append(_run_one(source, test, limits or Limits(), network, files))
        if stop and not results[-1].passed:
            break
    return results


def _run_one(source: str, test: Mapping[str, str], limits: Limits, network: bool, files: bool) -> CaseResult:
    work = os.path.realpath(tempfile.mkdtemp(prefix=PREFIX))
    word = secrets.token_hex(16)
    user = _user(work)
    request = {name: getattr(limits, name) for name in Limits.__slots__}
    request |= {"source": source, "code": test.get("code"), "stdin": test.get("input", ""), "word": word}
    request |= {"work": work, "user": user, "network": network, "files": files}
    if user is None or user == NOBODY:  # The limit counts all of a user's, not only ours.
        request["processes"] += _running(os.getuid() if user is None else user)
    try:
        reply, told, output, errors = _ask(request, 2 * limits.timeout + START_SECONDS)
    finally:
        _remove(work)
    if reply is None:
        return CaseResult(False, "killed: it ended its sandbox, or hung it")
    if "error" in reply:
        raise _impossible(reply["error"], reply["why"])
    reason = _reason(reply, errors, limits)
    if reason:
        return CaseResult(False, reason)
    if "code" in test:
        early = "it ended its process before the test was over"
        return CaseResult(True) if told == word else CaseResult(False, early)
    said, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (output, test["output"]))
    return CaseResult(True) if said == wanted else CaseResult(False, f"wrote {output[:100]!r}")


def _user(work: str) -> int | None:
    """Root becomes somebody who owns nothing but the working folder: a number of its own, or else nobody."""
    if os.geteuid() != 0:
        return None
    number = FIRST_USER + (os.getpid() * 1000 + next(_numbers) % 1000) % USERS
    for user in (number, NOBODY):
        try:
            os.chown(work, user, user)
        except OSError:
            continue
        return user
    raise RewardError(
        "root runs no judged code, and here it cannot become another user. Run the trainer as another user."
    )


def _running(user: int) -> int:
    """Threads of a user, which count towards the limit of its processes."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc/self/task") else []:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _ask(request: dict[str, Any], seconds: float) -> tuple[dict[str, Any] | None, str, str, str]:
    """The worker's report (None when it came to harm), the word of a test that ran to its end, output and errors."""
    verdict, their_verdict = os.pipe()
    report, their_report = os.pipe()
    most = request["file_mb"] << 20
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(WORKER), str(their_verdict), str(their_report)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env={"OMP_NUM_THREADS": "1", "PATH": os.defpath},
                cwd="/",
                start_new_session=True,
                pass_fds=(their_verdict, their_report),
            )
        finally:
            os.close(their_verdict)
            os.close(their_report)
        try:
            process.communicate(json.dumps(request).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            logger.warning("a sandbox for code did not end in %.0f s and was killed.", seconds)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said, told = _drain(report), _drain(verdict)
        output.seek(0)
        errors.seek(0)
        texts = [file.read(most + 1).decode("utf-8", "replace") for file in (output, errors)]
    if not said and process.returncode == 1:
        raise RewardError(f"the sandbox for code failed: {texts[1][-500:]}")
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(said), told, *texts
    return None, told, *texts


def _drain(pipe: int) -> str:
    """What stands in a pipe now, and its end."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 65536).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(pipe)


def _impossible(what: str, why: str) -> RewardError:
    lacks = {
        "network": "cannot cut judged code off from the network",
        "files": "cannot keep judged code from writing to this user's files (Landlock, Linux 5.13 or later)",
    }
    return RewardError(
        f"this system {lacks[what]}: {why}. Run the trainer where it can (a container that allows user namespaces, or as "
        f"root), or accept it with {what}=True."
    )


def _reason(reply: Mapping[str, Any], errors: str, limits: Limits) -> str:
    """Why a test did not run to its end; empty where it did."""
    status, why = reply["status"], reply["why"]
    if why == "time":
        return f"timed out: not done after {2 * limits.timeout:g} s"
    if why == "files":
        return f"killed: its folder held more than {4 * limits.file_mb} MiB, or too many files"
    if status == 0:
        return ""
    if status > 128:
        name = signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else str(status - 128)
        return f"killed by {name} (a limit of the sandbox, or a crash)"
    return errors.strip()[-300:] or f"left with exit status {status} before the test was over"


def _remove(work: str) -> None:
    """Delete a folder that `tempfile` made for a sandbox: exactly that, and not through a link or a mount."""
    mounts = Path("/proc/self/mountinfo")
    below = [line.split()[4] for line in (mounts.read_text().splitlines() if mounts.exists() else [])]
    mounted = os.path.ismount(work) or any(f"{place}/".startswith(f"{work}/") for place in below)
    ours = os.path.basename(work).startswith(PREFIX) and os.path.dirname(work) == os.path.realpath(
        tempfile.gettempdir()
    )
    if os.path.islink(work) or mounted or not ours:
        logger.error("%s is left behind: it is not (only) the temporary folder of a sandbox any more.", work)
        return
    try:
        shutil.rmtree(work)
    except (OSError, RecursionError) as error:
        logger.warning("%s could not be deleted and is left behind: %s", work, type(error).__name__)


def _default_workers() -> int:
    """Processors of this process's share of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


class CodeTestsReward:
    r"""1 where a completion's Python block passes all tests of its row, else 0; with ``partial`` the share it passes.

    Against the tests ``["assert f(2) == 4", "assert f(3) == 6"]``: ``def f(x): return 2 * x`` 1 (partial 1),
    ``def f(x): return 4`` 0 (partial 0.5), an endless loop 0 (0), no code block 0 (0). A row without tests gives None.
    See `run_tests` for the sandbox, and for what it does not protect from.

    Args:
        column: The dataset column with the tests; see `read_tests`.
        partial: The share of tests passed instead of all or nothing.
        limits: What each test may use; see `Limits`.
        workers: Sandboxes at once; None is one a processor of this process's share of the machine.
        network: Leave the network on.
        files: Let code write wherever this user may, where the kernel cannot forbid it.
    """

    __name__ = "code_tests_reward"
    runs_in_thread = True  # It waits for its processes; other rewards go on meanwhile.

    def __init__(
        self,
        column: str = "tests",
        *,
        partial: bool = False,
        limits: Limits | None = None,
        workers: int | None = None,
        network: bool = False,
        files: bool = False,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1, or None for one a processor.")
        self.column, self.partial, self.limits, self.workers = column, partial, limits or Limits(), workers
        self.network, self.files = network, files

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """One number (or None) a completion; logs how many tests each passed, and what the first failure was.

        Raises:
            RewardError: Tests in an unknown form, a missing column, or a system that cannot run a sandbox.
        """
        if self.column not in columns:
            raise RewardError(f"code_tests_reward needs the column {self.column!r}; it got {sorted(columns)}.")
        tests = [self._read(row, value) for row, value in enumerate(columns[self.column])]
        sources = [code_block(completion_text(completion)) for completion in completions]
        keys = [json.dumps((s, t)) for s, t in zip(sources, tests, strict=True)]
        jobs = {k: (s, t) for k, s, t in zip(keys, sources, tests, strict=True) if s is not None and t}
        with ThreadPoolExecutor(max_workers=min(self.workers or _default_workers(), max(len(jobs), 1))) as pool:
            futures = {key: pool.submit(self._judge, *job) for key, job in jobs.items()}
            done = {key: future.result() for key, future in futures.items()}
        results = [done.get(key, [CaseResult(False, "no code block")]) for key in keys]
        if log_extra is not None:
            passed = [sum(r.passed for r in rs) for rs in results]
            log_extra("tests_passed", [f"{n}/{len(t)}" for n, t in zip(passed, tests, strict=True)])
            log_extra("first_failure", [next((r.reason for r in rs if not r.passed), "") for rs in results])
        return [self._score(rs, len(t)) if t else None for rs, t in zip(results, tests, strict=True)]

    def _read(self, row: int, value: Any) -> list[dict[str, str]]:
        try:
            return read_tests(value)
        except RewardError as error:
            raise RewardError(f"column {self.column!r}, row {row}: {error}") from error

    def _judge(self, source: str, tests: list[dict[str, str]]) -> list[CaseResult]:
        options = {"network": self.network, "files": self.files, "stop": not self.partial}
        return run_tests(source, tests, self.limits, **options)

    def _score(self, results: list[CaseResult], count: int) -> float:
        share = sum(result.passed for result in results) / count
        return share if self.partial else float(share == 1.0)


def get_code_tests_reward(column: str = "tests", **options: Any) -> CodeTestsReward:
    r"""See `CodeTestsReward`.

    >>> reward = get_code_tests_reward(partial=True)
    >>> texts = ["```python\ndef f(x): return 2 * x\n```", "```python\ndef f(x): return 4\n```", "I cannot."]
    >>> reward(completions=texts, tests=[["assert f(2) == 4", "assert f(3) == 6"]] * 3)
    [1.0, 0.5, 0.0]
    """
    return CodeTestsReward(column, **options)
