"""A reward for code that passes its tests, run in processes that can do little harm."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards.format import completion_text

__all__ = ["CaseResult", "CodeTestsReward", "Limits", "code_block", "get_code_tests_reward", "read_tests", "run_tests"]

logger = logging.getLogger(__name__)

JUDGE = Path(__file__).with_name("judged.py")
PYTHON = ("python", "python3", "py")
START_SECONDS = 30.0  # For a process to start on a busy machine.
KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")  # Of our environment; tokens and keys stay here.
_numbers = itertools.count()
_told: set[str] = set()
_telling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tests of one completion may use.

    Args:
        timeout: Seconds of processor time a test; it may wait for as long again.
        memory_mb: MiB of address space of each process.
        file_mb: MiB of each file it writes, and a quarter of what its folder holds.
        processes: Processes and threads at once.
        namespaces: Cut off network, files and other processes where the kernel allows it.
    """

    timeout: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16
    namespaces: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_mb", "file_mb", "processes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0: the code could not run at all.")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Whether a test passed, and otherwise why not."""

    passed: bool
    reason: str = ""


def code_block(text: str) -> str | None:
    r"""The last closed block marked as Python, or else the last without a language; what was thought does not count.

    >>> code_block("```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1'
    """
    blocks: dict[bool, str] = {}
    fence, marked, lines = "", False, []
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


def run_tests(
    source: str, tests: Sequence[Mapping[str, str]], limits: Limits | None = None, *, stop: bool = False
) -> list[CaseResult]:
    """Run code against tests, each in a process of its own inside one sandbox.

    The sandbox is a process with limits on processor time, memory, files and processes, no rights and no environment,
    and, where the kernel allows it, in new namespaces: no network, every file system read-only but a small temporary
    one, no sight of other processes, and nothing that outlives it. Started by root it becomes another user. Files that
    everybody may read stay readable. Root that can neither confine the files nor become another user runs nothing.

    Args:
        source: Python code, run anew for each test.
        tests: What `read_tests` gives.
        limits: See `Limits`.
        stop: Leave out what follows the first failure.

    Returns:
        One a test that was run. Code that ends the process early has not passed.

    Raises:
        ConfigError: The system has no such processes (Windows).
        RewardError: The sandbox itself failed.

    >>> [r.passed for r in run_tests("def f(x): return 2 * x", read_tests(["assert f(2) == 4", "assert f(0) == 1"]))]
    [True, False]
    """
    if os.name != "posix":
        raise ConfigError("running code against tests needs a POSIX system (Linux or macOS); this is not one.")
    limits = limits or Limits()
    # Expected outputs stay here, out of reach of the code.
    sent = [
        {"code": test["code"]}
        if "code" in test
        else {"input": test["input"], "longest": 4 * len(test["output"].encode()) + 65536}
        for test in tests
    ]
    work = os.path.realpath(tempfile.mkdtemp(prefix="posttrain-code-"))
    request = {"source": source, "tests": sent, "work": work, "user": None, "stop": stop}
    request |= {name: getattr(limits, name) for name in Limits.__slots__}
    if os.geteuid() == 0:  # A number of its own, so that limits count its processes only.
        request["user"] = 1_900_000_000 + (os.getpid() * 1000 + next(_numbers) % 1000) % 100_000_000
    try:
        reply = _ask(request, START_SECONDS + len(sent) * (2 * limits.timeout + 5))
    finally:
        _remove(work)
    if reply is None:
        return [CaseResult(False, "killed: it ended its sandbox, or hung it")]
    if limits.namespaces:
        _tell(reply["missing"])
    return [_result(test, got, limits.timeout) for test, got in zip(tests, reply["results"], strict=False)]


def _remove(work: str) -> None:
    """Delete a temporary folder, unless something is mounted there: deleting through a mount destroys what it shows."""
    mounts = Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        if f"{line.split()[4]}/".startswith(f"{work}/"):
            logger.error("%s is left behind: something is mounted at %s.", work, line.split()[4])
            return
    shutil.rmtree(work, ignore_errors=True)


def _result(test: Mapping[str, str], got: Mapping[str, Any], seconds: float) -> CaseResult:
    if not got["passed"]:
        return CaseResult(False, _reason(got["status"], got["said"], seconds))
    if "code" in test:
        return CaseResult(True)
    said, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (got["output"], test["output"]))
    return CaseResult(True) if said == wanted else CaseResult(False, f"wrote {got['output'][:100]!r}")


def _reason(status: int | None, said: str, seconds: float) -> str:
    """Why a test did not pass, from how its process ended."""
    if status is None:
        return f"timed out: not done after {2 * seconds:g} s"
    if status == -signal.SIGXCPU:
        return f"timed out: more than {seconds:g} s of processor time"
    if status < 0:
        return f"killed by {signal.Signals(-status).name} (a limit of the sandbox, or a crash)"
    return said or f"left with exit status {status} before the test was over"


def _ask(request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """The reply of a sandbox; None when the judged code killed it or made it hang."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"HOME": request["work"], "TMPDIR": request["work"], "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-X", "utf8", str(JUDGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    try:
        written, errors = process.communicate(json.dumps(request).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # Its group first: whoever is left loses its parent and is killed for that.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
    if process.returncode < 0:
        return None
    if process.returncode != 0:
        raise RewardError(
            f"the sandbox for code failed with exit status {process.returncode}: "
            f"{errors.decode('utf-8', 'replace').strip()[-500:]}"
        )
    return json.loads(written)


def _tell(missing: Mapping[str, str]) -> None:
    """Say once what this machine does not let us cut off."""
    with _telling:
        news = [what for what in missing if what not in _told]
        _told.update(news)
    if news:
        logger.warning(
            "code is judged without full isolation here; not cut off or limited: %s. Use a container of its own for "
            "models you do not trust.",
            "; ".join(f"{what} ({missing[what]})" for what in news),
        )


def _default_workers() -> int:
    """Processors of this process's share of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


class CodeTestsReward:
    r"""1 where a completion's Python block passes all tests of its row, else 0; with ``partial`` the share it passes.

    Against the tests ``["assert f(2) == 4", "assert f(3) == 6"]``: ``def f(x): return 2 * x`` 1 (partial 1),
    ``def f(x): return 4`` 0 (partial 0.5), an endless loop 0 (0), no code block 0 (0). A row without tests gives None.
    Code shares a process with tests written as code and could tamper with them; tests with inputs and outputs are
    compared outside, and are the safer kind.

    Args:
        column: The dataset column with the tests; see `read_tests`.
        partial: The share of tests passed instead of all or nothing.
        limits: What each test may use; see `Limits` and `run_tests` for the sandbox.
        workers: Sandboxes at once; None is one a processor of this process's share of the machine.
    """

    __name__ = "code_tests_reward"

    def __init__(
        self,
        column: str = "tests",
        *,
        partial: bool = False,
        limits: Limits | None = None,
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1, or None for one a processor.")
        self.column, self.partial, self.limits = column, partial, limits or Limits()
        self.workers = workers

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """One number (or None) a completion; logs how many tests each passed, and what the first failure was.

        Raises:
            RewardError: Tests in an unknown form, a missing column, or a sandbox that failed.
        """
        if self.column not in columns:
            raise ConfigError(f"code_tests_reward needs the column {self.column!r}; it got {sorted(columns)}.")
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
        return run_tests(source, tests, self.limits, stop=not self.partial)

    def _score(self, results: list[CaseResult], count: int) -> float:
        share = sum(result.passed for result in results) / count
        return share if self.partial else float(share == 1.0)


def get_code_tests_reward(
    column: str = "tests", *, partial: bool = False, limits: Limits | None = None, workers: int | None = None
) -> CodeTestsReward:
    r"""See `CodeTestsReward`.

    >>> reward = get_code_tests_reward(partial=True)
    >>> texts = ["```python\ndef f(x): return 2 * x\n```", "```python\ndef f(x): return 4\n```", "I cannot."]
    >>> reward(completions=texts, tests=[["assert f(2) == 4", "assert f(3) == 6"]] * 3)
    [1.0, 0.5, 0.0]
    """
    return CodeTestsReward(column, partial=partial, limits=limits, workers=workers)
