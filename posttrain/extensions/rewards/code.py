"""Reward for code that passes its tests. Each test runs in a sandbox."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from typing import Any

from posttrain.errors import ConfigError, MissingDependencyError, RewardError, did_you_mean
from posttrain.extensions.rewards.remote import post_json
from posttrain.integrations.machine import usable_processors
from posttrain.rewards.texts import completion_text

EXAMPLES = (
    "sandbox='bubblewrap', sandbox='container:docker run --rm -i --network none --memory 2g --pids-limit 64 "
    "python:3.12-slim', or the URL of a SandboxFusion service"
)
# Runs in the sandbox. It reads the program from stdin without buffering, so that the rest of stdin is the program's own input.
LOADER = """
import os, resource, sys
size, cpu, memory, file, processes = map(int, sys.argv[1:])
program = b""
while len(program) < size and (part := os.read(0, size - len(program))):
    program += part
bounds = {"CPU": cpu, "AS": memory, "FSIZE": file, "NPROC": processes, "NOFILE": 128, "CORE": 0}
for name, bound in bounds.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (bound, bound))
sys.argv = ["completion.py"]
exec(compile(program, "completion.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""
PYTHON_FLAGS = ("-I", "-X", "utf8", "-c", LOADER)
# Seconds for a container or a service to start.
START_SECONDS = 60.0
# Start of the fix in the error about a sandbox that cannot run Python, by kind of sandbox.
REPAIRS = {
    "bubblewrap": "install bubblewrap 0.8 or later and allow user namespaces, or ",
    "container": "let the command start a container with `python3` and `timeout` and pass stdin on (-i), or ",
}
# Checks that code in the sandbox cannot change the kernel settings, neither by writing nor by mounting with a capability.
TRIAL = """
import os, sys
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory"):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        continue
    sys.exit(f"code in it can write {path}")
with open("/proc/self/status") as status:
    held = [line.split()[1] for line in status if line.startswith("CapEff:")]
if int(held[0], 16):
    sys.exit(f"code in it holds the capabilities {held[0]}")
print(input())
"""
# Audit architecture, numbers of shmget, semget, msgget, memfd_create, memfd_secret and io_uring_setup, and number of socket.
# The refused calls allocate memory that counts for no process; io_uring opens sockets that bypass the filter.
CALLS = {
    "x86_64": (0xC000003E, (29, 64, 68, 319, 447, 425), 41),
    "aarch64": (0xC00000B7, (194, 190, 186, 279, 447, 425), 198),
}
# Address families that a network namespace confines: unix, inet, inet6 and netlink. vsock (40) would reach the host.
FAMILIES = (1, 2, 10, 16)
# Files that Python needs to start. No other file of the machine is visible.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one test of a completion.

    Args:
        timeout: Processor seconds of each process. All processes together may take twice as many wall-clock seconds.
        memory_mb: MiB of address space of each process. In bubblewrap on x86_64 and aarch64, calls that hold memory outside a
            process (SysV shared memory, memfds) are refused as well. On other machines they are not.
        file_mb: MiB of each file and of the printed output. In bubblewrap the folder may hold four times as much.
        processes: Maximum number of concurrent processes and threads. The kernel does not apply it to root.
    """

    timeout: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0, otherwise the code cannot run.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program's execution.

    Attributes:
        status: Exit status, or 128 plus the signal's number if a signal ended the program; None if it timed out.
        output: Text written to stdout.
        errors: Text written to stderr.
    """

    status: int | None
    output: str = ""
    errors: str = ""


def run_program(sandbox: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run one Python program in an empty folder of a sandbox.

    Args:
        sandbox: See `run_tests`.
        program: Python code.
        stdin: Standard input of the program.
        limits: See `Limits`.

    Raises:
        MissingDependencyError: The sandbox's program is not installed.
        RewardError: The sandbox itself failed.
    """
    if sandbox == "bubblewrap":
        return _in_bubblewrap(program, stdin, limits)
    if sandbox.startswith("container:"):
        return _in_container(sandbox.partition(":")[2].strip(), program, stdin, limits)
    return _in_service(sandbox, program, stdin, limits)


def _in_bubblewrap(program: str, stdin: str, limits: Limits) -> Outcome:
    """Run with new namespaces, no network, an in-memory folder, and a read-only system and Python. Needs ``bwrap`` 0.8+."""
    bwrap = _program("bwrap", "apt-get install bubblewrap, or dnf install bubblewrap")
    room = str(limits.file_mb << 22)
    # Without a size limit, the in-memory folders could use all of the machine's memory.
    folder = ("--size", room, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", room, "--tmpfs", "/tmp")
    folder += ("--dir", "/tmp/work", "--chdir", "/tmp/work")
    visible = [part for path in (*SYSTEM, sys.base_prefix, sys.prefix) for part in ("--ro-bind-try", path, path)]
    names = {"HOME": "/tmp/work", "TMPDIR": "/tmp/work", "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    variables = [part for name, value in names.items() for part in ("--setenv", name, value)]
    # With namespaces of its own, the code could mount in-memory folders without a size limit.
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", *variables]
    # A capability could make /proc/sys writable again. Root can write its own files even without a capability.
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev", *folder, *visible]
    command += ["--remount-ro", "/"]
    with tempfile.TemporaryFile() as calls:
        if call_filter := _call_filter(platform.machine()):
            calls.write(call_filter)
            calls.seek(0)
            command += ["--seccomp", str(calls.fileno())]
        command += ["--", sys.executable, *PYTHON_FLAGS]
        # Code in the sandbox can read the environment of bwrap itself, as that of process 1.
        environment = {"PATH": os.defpath}
        return _execute(command, program, stdin, limits, 2 * limits.timeout, environment, (calls.fileno(),))


def _call_filter(machine: str) -> bytes:
    """Build a seccomp program that refuses `CALLS` and sockets outside `FAMILIES` with EPERM; empty for an unknown machine."""
    if machine not in CALLS:
        return b""
    architecture, refused, socket = CALLS[machine]
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06  # Operation codes of classic BPF.
    # Operation, jump targets if it holds and if not (None: the next line), and operand.
    lines = [(load, None, None, 4), (equal, None, "refuse", architecture), (load, None, None, 0)]
    lines += [(at_least, "refuse", None, 0x40000000)]  # The x32 interface of x86_64 has its own call numbers.
    lines += [(equal, "refuse", None, number) for number in refused]
    lines += [(equal, None, "allow", socket), (load, None, None, 16)]
    lines += [(equal, "allow", None, family) for family in FAMILIES]
    ends = {"refuse": len(lines), "allow": len(lines) + 1}
    lines += [(leave, None, None, 0x00050000 | errno.EPERM), (leave, None, None, 0x7FFF0000)]
    return b"".join(
        struct.pack("=HBBI", code, *(0 if end is None else ends[end] - at - 1 for end in (yes, no)), operand)
        for at, (code, yes, no, operand) in enumerate(lines)
    )


def _in_container(command: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run in a container. ``timeout`` inside the container ends it, because killing its client would not."""
    words = shlex.split(command)
    words[0] = _program(words[0], f"install {words[0]}")
    bound = ["timeout", "-s", "KILL", f"{2 * limits.timeout:g}", "python3", *PYTHON_FLAGS]
    return _execute([*words, *bound], program, stdin, limits, 2 * limits.timeout + START_SECONDS, None)


def _in_service(url: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Call the endpoint ``/run_code`` of SandboxFusion, https://github.com/bytedance/SandboxFusion; its settings limit files."""
    url = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
    request = {"code": program, "language": "python", "stdin": stdin, "memory_limit_MB": limits.memory_mb}
    request["run_timeout"] = 2 * limits.timeout
    response = post_json(url, request, who="sandbox service", timeout=2 * limits.timeout + START_SECONDS)
    try:
        reply = response.json()
        result = reply["run_result"] or {}
        if reply["status"] == "SandboxError" or result["status"] == "Error":
            raise RewardError(f"the sandbox service at {url} failed: {str(reply.get('message'))[:400]}.")
        late = result["status"] == "TimeLimitExceeded"
        status = None if late else int(result["return_code"])
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f"the sandbox service at {url} answered {response.text[:200]!r}, which is not a result of SandboxFusion's "
            "run_code. Fix: set the sandbox to the URL of a SandboxFusion service."
        ) from error
    return Outcome(status if status is None or status >= 0 else 128 - status, result["stdout"], result["stderr"])


def check_sandbox(name: str) -> None:
    """Raise if a sandbox is neither ``bubblewrap`` nor ``container:<command>`` nor a URL.

    Raises:
        ConfigError: The name is none of these.
    """
    kind, _, rest = name.partition(":")
    if name == "bubblewrap" or (kind == "container" and rest.strip()):
        return
    if kind not in ("http", "https") or not rest.startswith("//"):
        raise ConfigError(
            f"sandbox={name!r} is not a sandbox{did_you_mean(kind, ('bubblewrap', 'container'))}. Fix: use {EXAMPLES}."
        )


@functools.lru_cache(maxsize=16)
def open_sandbox(name: str) -> None:
    """Run a trial program in a sandbox. In bubblewrap it tries to change the machine's kernel settings.

    Raises:
        ConfigError: See `check_sandbox`.
        MissingDependencyError: The sandbox's program is not installed.
        RewardError: The sandbox cannot run Python here, or does not confine the program.
    """
    check_sandbox(name)
    trial = TRIAL if name == "bubblewrap" else "print(input())"
    outcome = run_program(name, trial, "ready", Limits(timeout=START_SECONDS / 2))
    if outcome != Outcome(0, "ready\n", outcome.errors):
        raise RewardError(
            f"the sandbox {name!r} failed its trial program: exit status {outcome.status}, stdout {outcome.output[-200:]!r}, "
            f"stderr {outcome.errors.strip()[-400:]!r}. Fix: {REPAIRS.get(name.partition(':')[0], '')}choose another "
            f"sandbox ({EXAMPLES})."
        )


def _program(name: str, install: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise MissingDependencyError(
            f"running code that a model wrote needs a sandbox, but the program {name!r} is not installed. Fix: {install}; or "
            f"choose another sandbox ({EXAMPLES}).",
            name=name,
        )
    return program


def _execute(
    command: list[str],
    program: str,
    stdin: str,
    limits: Limits,
    seconds: float,
    environment: dict[str, str] | None,
    files: tuple[int, ...] = (),
) -> Outcome:
    """Run a command that ends in `LOADER` and inherits the descriptors ``files``. Kill it after ``seconds``."""
    code = program.encode("utf-8", "replace")
    timeout, memory_mb, file_mb, processes = astuple(limits)
    most = file_mb << 20
    bounds = map(str, (len(code), max(1, round(timeout + 0.5)), memory_mb << 20, most, processes))
    # `ulimit -f` counts blocks of 512 bytes. It bounds the output of a container's client.
    command = ["/bin/sh", "-c", f'ulimit -f {most // 512} && exec "$@"', "sh", *command, *bounds]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            program_input = code + stdin.encode("utf-8", "replace")
            status = subprocess.run(
                command, input=program_input, stdout=output, stderr=errors, env=environment, cwd="/", timeout=seconds,
                start_new_session=True, pass_fds=files,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(most).decode("utf-8", "replace"))
    return Outcome(status if status is None or status >= 0 else 128 - status, *texts)


# Indent, backticks and language of a line that opens a block. A closing line has nothing after its backticks.
FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)")
LANGUAGES = {"python": "python", "python3": "python", "py": "python", "": "none"}


def code_block(text: str) -> str | None:
    r"""Return the last closed block marked as Python, or else the last one without a language. Ignore text before ``</think>``.

    >>> code_block("```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1'
    """
    lines = text.rpartition("</think>")[2].split("\n")
    fences = {at: match for at, line in enumerate(lines) if (match := FENCE.fullmatch(line))}
    # For each fence, the next line below with the same number of backticks and no other text.
    below: dict[int, int] = {}
    ends: dict[int, int | None] = {}
    for at in reversed(fences):
        ticks = len(fences[at][2])
        ends[at] = below.get(ticks)
        if not fences[at][3].strip(" \t\r"):
            below[ticks] = at
    blocks: dict[str, tuple[str, list[str]]] = {}
    after = 0
    for at, fence in fences.items():
        end = ends[at]
        if at >= after and end is not None:
            after = end + 1
            blocks[LANGUAGES.get(fence[3].strip().lower(), "other")] = fence[1], lines[at + 1 : end]
    if not (block := blocks.get("python") or blocks.get("none")):
        return None
    indent, code = block
    # In Markdown the indent of the fence is not part of the code.
    return "\n".join(re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", line) for line in code)


def read_tests(value: object) -> list[dict[str, str]]:
    """Convert a row's tests to one form: ``{"code": ...}``, or ``{"input": ..., "output": ...}`` for a program.

    Args:
        value: Python code; a dict with ``input`` and ``output`` (or lists ``inputs`` and ``outputs``); a list of these;
            or one of these as JSON. None and empty values mean no tests.

    Raises:
        RewardError: The value has another form.

    >>> read_tests(["assert f(1) == 2"]), read_tests('{"inputs": ["1"], "outputs": ["2"]}')
    ([{'code': 'assert f(1) == 2'}], [{'input': '1', 'output': '2'}])
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None or (isinstance(value, str | Sequence | Mapping) and not value):
        return []
    if isinstance(value, str):
        return [{"code": value}] if value.strip() else []
    if isinstance(value, Mapping):
        # Arrow adds the keys of all rows to each row, with None as the value.
        known = {name: part for name, part in value.items() if part is not None}
        return _programs(known) if known else []
    if isinstance(value, Sequence):
        return [test for item in value for test in read_tests(item)]
    raise RewardError(f"tests must be code, or inputs with outputs, or a list of these; got {value!r:.200}.")


def _programs(value: Mapping[str, Any]) -> list[dict[str, str]]:
    inputs, wanted = ([value[n]] if n in value else value.get(f"{n}s") for n in ("input", "output"))
    if not (isinstance(inputs, list | tuple) and isinstance(wanted, list | tuple)) or value.get("fn_name"):
        raise RewardError(
            "a test given as a dict needs 'input' and 'output', or 'inputs' and 'outputs', of a program; it has the keys "
            f"{sorted(value)}. Fix: write the test of a function as code, e.g. 'assert f(1) == 2'."
        )
    if len(inputs) != len(wanted):
        raise RewardError(f"a test has {len(inputs)} inputs and {len(wanted)} outputs. Fix: give one output per input.")
    return [{"input": _lines(i), "output": _lines(o)} for i, o in zip(inputs, wanted, strict=True)]


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one test: whether it passed, and the reason if not."""

    passed: bool
    reason: str = ""


def run_tests(
    source: str,
    tests: Sequence[Mapping[str, str]],
    limits: Limits | None = None,
    *,
    sandbox: str = "bubblewrap",
    stop: bool = False,
) -> list[CaseResult]:
    """Run code against tests. Each test starts the code again in a sandbox.

    `Limits` bound time, memory, files and processes in bubblewrap and in containers. In bubblewrap the code sees the system's
    programs and this Python (read-only) and an empty in-memory folder. It sees no environment variables, no other process and no
    network. In a container or a service it sees what you configure.

    **Limits of the protection**: bubblewrap and containers do not protect from bugs of the kernel and the processor. The kernel
    does not limit the number of root's processes, and thus not their total memory. Do not run the trainer as root, or use a
    container with ``--pids-limit`` and ``--memory``. In bubblewrap only time bounds the number of empty files (about 1 kB each).
    Code shares a process with a test written as code and can tamper with it; tests with inputs and outputs are compared outside
    of the sandbox.

    Args:
        source: Python code, run again for each test.
        tests: Tests in the form that `read_tests` returns.
        limits: See `Limits`.
        sandbox: ``bubblewrap`` (the program ``bwrap``); ``container:<command>`` with the command line that starts a container
            (``container:docker run --rm -i --network none --memory 2g --pids-limit 64 python:3.12-slim``); or the URL of a
            SandboxFusion service.
        stop: Skip the tests after the first failure.

    Returns:
        One result for each test that was run. Code that ends its process early has not passed.

    Raises:
        ConfigError: The sandbox is unknown.
        MissingDependencyError: The sandbox is not installed.
        RewardError: The sandbox cannot run Python here.

    >>> tests = read_tests(["assert f(2) == 4", "assert f(0) == 1"])
    >>> [result.passed for result in run_tests("def f(x): return 2 * x", tests)]  # doctest: +SKIP
    [True, False]
    """
    open_sandbox(sandbox)
    results: list[CaseResult] = []
    for test in tests:
        results.append(_run_one(sandbox, source, test, limits or Limits()))
        if stop and not results[-1].passed:
            break
    return results


def _run_one(sandbox: str, source: str, test: Mapping[str, str], limits: Limits) -> CaseResult:
    word = secrets.token_hex(16)
    program = source if "code" not in test else TESTED.format(source=source, test=test["code"], word=word)
    outcome = run_program(sandbox, program, test.get("input", ""), limits)
    # Either the container engine or `timeout` could not start the program, or the program exited with this status itself.
    if sandbox.startswith("container:") and outcome.status in (125, 126, 127):
        open_sandbox.__wrapped__(sandbox)
    reason = _reason(outcome, limits)
    if reason:
        return CaseResult(False, reason)
    if "code" in test:
        early = "it ended its process before the test was over"
        return CaseResult(True) if word in outcome.output.splitlines() else CaseResult(False, early)
    written, wanted = (
        [line.rstrip() for line in text.strip().splitlines()] for text in (outcome.output, test["output"])
    )
    return CaseResult(True) if written == wanted else CaseResult(False, f"wrote {outcome.output[:100]!r}")


# The secret word is printed last, so code that exits early with status 0 does not print it.
TESTED = """
scope = {{"__name__": "__main__"}}
exec(compile({source!r}, "<completion>", "exec"), scope)
exec(compile({test!r}, "<test>", "exec"), scope)
print()
print({word!r})
"""


def _reason(outcome: Outcome, limits: Limits) -> str:
    """Return why a program did not run to its end; empty if it did."""
    if outcome.status is None:
        return f"timed out after {2 * limits.timeout:g} s"
    if outcome.status == 0:
        return ""
    if outcome.status > 128:
        number = outcome.status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"killed by {name} (a limit of the sandbox, or a crash)"
    lines = outcome.errors.strip().splitlines()
    return lines[-1][-300:] if lines else f"exited with status {outcome.status} before the test was over"


class CodeTestsReward:
    r"""Code tests reward: 1 if a completion's Python block passes all tests of its row, else 0.

    With ``partial`` the reward is the share of tests passed. For example, with the tests
    ``["assert f(2) == 4", "assert f(3) == 6"]``, ``def f(x): return 2 * x`` gets 1 (partial 1), ``def f(x): return 4`` gets 0
    (partial 0.5), an endless loop 0 (0), and no code block 0 (0). A row without tests gets None.
    See `run_tests` for the sandboxes and the limits of their protection.

    Args:
        column: Dataset column with the tests; see `read_tests`.
        partial: Return the share of tests passed instead of 0 or 1.
        limits: Resource limits of each test; see `Limits`.
        workers: Number of concurrent sandboxes. None is one per processor of this process's share of the machine.
        sandbox: ``bubblewrap``, ``container:<command>`` or a URL; see `run_tests`.

    Raises:
        ConfigError: The sandbox is unknown, or ``workers`` is below 1.
    """

    __name__ = "code_tests_reward"
    runs_in_thread = True  # It waits for its processes, so other rewards can run meanwhile.

    def __init__(
        self,
        column: str = "tests",
        *,
        partial: bool = False,
        limits: Limits | None = None,
        workers: int | None = None,
        sandbox: str = "bubblewrap",
    ) -> None:
        check_sandbox(sandbox)
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} must be at least 1, or None for one per processor.")
        self.column, self.partial, self.limits, self.sandbox = column, partial, limits or Limits(), sandbox
        # CPU cores that this process may use.
        usable = usable_processors()
        self.workers = workers or max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return one number (or None) per completion. Log how many tests each passed, and the first failure.

        Raises:
            MissingDependencyError: The sandbox is not installed.
            RewardError: Tests have an unknown form, a column is missing, or the sandbox cannot run here.
        """
        if self.column not in columns:
            raise RewardError(
                f"code_tests_reward needs the column {self.column!r}, but the columns are {sorted(columns)}."
            )
        tests = [self._read(row, value) for row, value in enumerate(columns[self.column])]
        open_sandbox(self.sandbox)  # Even if no completion has code, so that the trial call finds a missing sandbox.
        sources = [code_block(completion_text(completion)) for completion in completions]
        keys = [json.dumps((s, t)) for s, t in zip(sources, tests, strict=True)]
        jobs = {k: (s, t) for k, s, t in zip(keys, sources, tests, strict=True) if s is not None and t}
        with ThreadPoolExecutor(self.workers) as pool:
            run = functools.partial(run_tests, limits=self.limits, sandbox=self.sandbox, stop=not self.partial)
            # The first exception cancels the runs that have not begun.
            done = dict(zip(jobs, pool.map(lambda job: run(*job), jobs.values()), strict=True))
        results = [done.get(key, [CaseResult(False, "no code block")]) for key in keys]
        if log_extra is not None:
            passed = [sum(r.passed for r in rs) for rs in results]
            log_extra("tests_passed", [f"{n}/{len(t)}" for n, t in zip(passed, tests, strict=True)])
            log_extra("first_failure", [next((r.reason for r in rs if not r.passed), "") for rs in results])
        return [self._score(rs, len(t)) if t else None for rs, t in zip(results, tests, strict=True)]

    def _read(self, row: int, value: object) -> list[dict[str, str]]:
        try:
            return read_tests(value)
        except RewardError as error:
            raise RewardError(f"column {self.column!r}, row {row}: {error}") from error

    def _score(self, results: list[CaseResult], count: int) -> float:
        share = sum(result.passed for result in results) / count
        return share if self.partial else float(share == 1.0)


def get_code_tests_reward(column: str = "tests", **options: Any) -> CodeTestsReward:
    r"""Return a `CodeTestsReward`.

    >>> reward = get_code_tests_reward(partial=True)
    >>> texts = ["```python\ndef f(x): return 2 * x\n```", "```python\ndef f(x): return 4\n```", "I cannot."]
    >>> reward(completions=texts, tests=[["assert f(2) == 4", "assert f(3) == 6"]] * 3)  # doctest: +SKIP
    [1.0, 0.5, 0.0]
    """
    return CodeTestsReward(column, **options)
