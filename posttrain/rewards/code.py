"""A reward for code that passes its tests, each run in a sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from posttrain.errors import ConfigError, RewardError
from posttrain.rewards.format import completion_text
from posttrain.rewards.sandbox import Limits, Outcome, Sandbox, check_sandbox, open_sandbox

__all__ = [
    "CaseResult",
    "CodeTestsReward",
    "code_block",
    "get_code_tests_reward",
    "read_tests",
    "run_tests",
]

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
    sandbox: str = "bubblewrap",
    network: bool = False,
    stop: bool = False,
) -> list[CaseResult]:
    """Run code against tests, each from the beginning in a sandbox.

    `Limits` bound time, memory, files and processes, in bubblewrap and in containers. In bubblewrap the code sees the system's
    programs and this Python (read-only), an empty folder in memory, no environment variables, no other process and no network.
    A container or a service shows what you configure it to show.

    **What it does not do**: faults of the kernel and the processor are open to code in bubblewrap and in containers. The kernel
    does not bound the number of processes of root: do not run the trainer as root, or use a container with ``--pids-limit``.
    Code shares a process with a test written as code and can tamper with it; tests with inputs and outputs are compared
    outside.

    Args:
        source: Python code, run anew for each test.
        tests: What `read_tests` gives.
        limits: See `Limits`.
        sandbox: ``bubblewrap`` (the program ``bwrap``); ``container:<command>`` with the command line that starts a container
            (``container:docker run --rm -i --network none python:3.12-slim``); or the URL of a SandboxFusion service.
        network: Leave the network on; bubblewrap only.
        stop: Leave out what follows the first failure.

    Returns:
        One for each test that was run. Code that ends its process early has not passed.

    Raises:
        ConfigError: An unknown sandbox.
        MissingDependencyError: The sandbox is not installed.
        RewardError: The sandbox cannot run Python here.

    >>> tests = read_tests(["assert f(2) == 4", "assert f(0) == 1"])
    >>> [result.passed for result in run_tests("def f(x): return 2 * x", tests)]  # doctest: +SKIP
    [True, False]
    """
    box, results = open_sandbox(sandbox, network), []
    for test in tests:
        results.append(_run_one(box, source, test, limits or Limits()))
        if stop and not results[-1].passed:
            break
    return results


def _run_one(box: Sandbox, source: str, test: Mapping[str, str], limits: Limits) -> CaseResult:
    word = secrets.token_hex(16)
    program = source if "code" not in test else TESTED.format(source=source, test=test["code"], word=word)
    outcome = box.run(program, test.get("input", ""), limits)
    reason = _reason(outcome, limits)
    if reason:
        return CaseResult(False, reason)
    if "code" in test:
        early = "it ended its process before the test was over"
        return CaseResult(True) if word in outcome.output.splitlines() else CaseResult(False, early)
    said, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (outcome.output, test["output"]))
    return CaseResult(True) if said == wanted else CaseResult(False, f"wrote {outcome.output[:100]!r}")


# The secret word comes last: code that leaves early, with status 0, does not print it.
TESTED = """
scope = {{"__name__": "__main__"}}
exec(compile({source!r}, "<completion>", "exec"), scope)
exec(compile({test!r}, "<test>", "exec"), scope)
print()
print({word!r})
"""


def _reason(outcome: Outcome, limits: Limits) -> str:
    """Why a program did not run to its end; empty where it did."""
    if outcome.status is None:
        return f"timed out: not done after {2 * limits.timeout:g} s"
    if outcome.status == 0:
        return ""
    if outcome.status > 128:
        number = outcome.status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"killed by {name} (a limit of the sandbox, or a crash)"
    lines = outcome.errors.strip().splitlines()
    return lines[-1][-300:] if lines else f"left with exit status {outcome.status} before the test was over"


def _default_workers() -> int:
    """Processors of this process's share of the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


class CodeTestsReward:
    r"""1 where a completion's Python block passes all tests of its row, else 0; with ``partial`` the share it passes.

    Against the tests ``["assert f(2) == 4", "assert f(3) == 6"]``: ``def f(x): return 2 * x`` 1 (partial 1),
    ``def f(x): return 4`` 0 (partial 0.5), an endless loop 0 (0), no code block 0 (0). A row without tests gives None.
    See `run_tests` for the sandboxes, and for what they do not protect from.

    Args:
        column: The dataset column with the tests; see `read_tests`.
        partial: The share of tests passed instead of all or nothing.
        limits: What each test may use; see `Limits`.
        workers: Sandboxes at once; None is one a processor of this process's share of the machine.
        sandbox: ``bubblewrap``, ``container:<command>`` or a URL; see `run_tests`.
        network: Leave the network on; bubblewrap only.

    Raises:
        ConfigError: An unknown sandbox, or ``workers`` below 1.
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
        sandbox: str = "bubblewrap",
        network: bool = False,
    ) -> None:
        check_sandbox(sandbox, network)
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1, or None for one a processor.")
        self.column, self.partial, self.limits, self.workers = column, partial, limits or Limits(), workers
        self.sandbox, self.network = sandbox, network

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """One number (or None) a completion; logs how many tests each passed, and what the first failure was.

        Raises:
            MissingDependencyError: The sandbox is not installed.
            RewardError: Tests in an unknown form, a missing column, or a sandbox that cannot run here.
        """
        if self.column not in columns:
            raise RewardError(f"code_tests_reward needs the column {self.column!r}; it got {sorted(columns)}.")
        tests = [self._read(row, value) for row, value in enumerate(columns[self.column])]
        open_sandbox(self.sandbox, self.network)  # Also where no completion has code: the trial call finds it missing.
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
        stop = not self.partial
        return run_tests(source, tests, self.limits, sandbox=self.sandbox, network=self.network, stop=stop)

    def _score(self, results: list[CaseResult], count: int) -> float:
        share = sum(result.passed for result in results) / count
        return share if self.partial else float(share == 1.0)


def get_code_tests_reward(column: str = "tests", **options: Any) -> CodeTestsReward:
    r"""See `CodeTestsReward`.

    >>> reward = get_code_tests_reward(partial=True)
    >>> texts = ["```python\ndef f(x): return 2 * x\n```", "```python\ndef f(x): return 4\n```", "I cannot."]
    >>> reward(completions=texts, tests=[["assert f(2) == 4", "assert f(3) == 6"]] * 3)  # doctest: +SKIP
    [1.0, 0.5, 0.0]
    """
    return CodeTestsReward(column, **options)
