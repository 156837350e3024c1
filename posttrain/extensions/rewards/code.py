"""`CodeTestsReward`: reward function for code that passes tests. Each test runs in a sandbox."""

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
# Program that runs code in the sandbox. It reads the code from stdin without buffering, so that the code can read further
# input.
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
# Time in seconds that a container or a service may take to start, in addition to the time limit of the test.
START_SECONDS = 60.0
# Beginning of the fix that is suggested if a sandbox cannot run Python, by type of sandbox.
REPAIRS = {
    "bubblewrap": "install bubblewrap 0.8 or later and allow user namespaces, or ",
    "container": "use a command that starts a container with `python3` and `timeout` and forwards stdin (-i), or ",
}
# Program that tests the sandbox. It fails if code in the sandbox can write to kernel settings. It also fails if the code
# has capabilities, because it could then mount file systems.
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
# System calls that bubblewrap's filter refuses. For each machine: the audit architecture, the numbers of the refused calls
# (shmget, semget, msgget, memfd_create, memfd_secret, io_uring_setup), and the number of `socket`. The first five calls
# allocate memory that the limits of a process do not include. io_uring could open sockets without passing the filter.
CALLS = {
    "x86_64": (0xC000003E, (29, 64, 68, 319, 447, 425), 41),
    "aarch64": (0xC00000B7, (194, 190, 186, 279, 447, 425), 198),
}
# Address families of sockets that are allowed (unix, inet, inet6, netlink). The network namespace isolates these sockets.
# The family vsock (40) is not allowed, because it could connect to the host.
FAMILIES = (1, 2, 10, 16)
# Folders and files that Python needs to start. All other files of the machine are hidden.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits for running one test.

    Args:
        timeout: Maximum CPU time per process in seconds. The wall-clock limit for all processes together is twice this value.
        memory_mb: Maximum address space per process in MiB. On x86_64 and aarch64, bubblewrap also refuses system calls
            that allocate memory outside a process (SysV shared memory, memfds). On other processors, these system calls are
            allowed.
        file_mb: Maximum size in MiB of each file and of the printed output. In bubblewrap, the working folder can hold four
            times this size.
        processes: Maximum number of concurrent processes and threads. The kernel does not apply this limit to root.
    """

    timeout: float = 5.0
    memory_mb: int = 1024
    file_mb: int = 16
    processes: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0. Otherwise no code can run.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of running a program.

    Attributes:
        status: Exit status. If a signal ended the program, it is 128 plus the signal number. None after a timeout.
        output: Text written to stdout.
        errors: Text written to stderr.
    """

    status: int | None
    output: str = ""
    errors: str = ""


def run_program(sandbox: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run one Python program in an empty working folder of a sandbox.

    Args:
        sandbox: Name of the sandbox. See `run_tests`.
        program: Python code.
        stdin: Standard input of the program.
        limits: Resource limits.

    Raises:
        MissingDependencyError: The program that starts the sandbox is not installed.
        RewardError: The sandbox failed, independent of the program.
    """
    if sandbox == "bubblewrap":
        return _in_bubblewrap(program, stdin, limits)
    if sandbox.startswith("container:"):
        return _in_container(sandbox.partition(":")[2].strip(), program, stdin, limits)
    return _in_service(sandbox, program, stdin, limits)


def _in_bubblewrap(program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program in bubblewrap (``bwrap`` 0.8+). The program runs in new namespaces without network. It has an in-memory
    folder, and read-only access to system files and Python.
    """
    bwrap = _program("bwrap", "apt-get install bubblewrap, or dnf install bubblewrap")
    room = str(limits.file_mb << 22)
    # Limit the size of the in-memory folders. Otherwise they could use all of the machine's memory.
    folder = ("--size", room, "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", room, "--tmpfs", "/tmp")
    folder += ("--dir", "/tmp/work", "--chdir", "/tmp/work")
    visible = [part for path in (*SYSTEM, sys.base_prefix, sys.prefix) for part in ("--ro-bind-try", path, path)]
    names = {"HOME": "/tmp/work", "TMPDIR": "/tmp/work", "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    variables = [part for name, value in names.items() for part in ("--setenv", name, value)]
    # Do not allow new namespaces, because code in a new namespace could mount in-memory folders without a size limit.
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", *variables]
    # Mount /proc/sys read-only, because root can write to its files even without capabilities. Drop all capabilities,
    # because code with capabilities could make /proc/sys writable again.
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev", *folder, *visible]
    command += ["--remount-ro", "/"]
    with tempfile.TemporaryFile() as calls:
        if call_filter := _call_filter(platform.machine()):
            calls.write(call_filter)
            calls.seek(0)
            command += ["--seccomp", str(calls.fileno())]
        command += ["--", sys.executable, *PYTHON_FLAGS]
        # Pass no environment variables that could contain secrets. Process 1 in the sandbox is bwrap, and code in the
        # sandbox can read its environment.
        environment = {"PATH": os.defpath}
        return _execute(command, program, stdin, limits, 2 * limits.timeout, environment, (calls.fileno(),))


def _call_filter(machine: str) -> bytes:
    """Build a seccomp program that refuses system calls with EPERM: all calls in `CALLS`, and sockets of a family outside
    `FAMILIES`. Return empty bytes for an unknown machine.
    """
    if machine not in CALLS:
        return b""
    architecture, refused, socket = CALLS[machine]
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06  # Instruction codes of classic BPF.
    # Each instruction is a tuple (code, jump target if true, jump target if false, operand). None means the next instruction.
    lines = [(load, None, None, 4), (equal, None, "refuse", architecture), (load, None, None, 0)]
    # Refuse system calls of the x32 ABI of x86_64, because this ABI has its own call numbers.
    lines += [(at_least, "refuse", None, 0x40000000)]
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
    """Run a program in a container. `timeout` runs inside the container, because killing the client does not stop the
    container.
    """
    words = shlex.split(command)
    words[0] = _program(words[0], f"install {words[0]}")
    bound = ["timeout", "-s", "KILL", f"{2 * limits.timeout:g}", "python3", *PYTHON_FLAGS]
    return _execute([*words, *bound], program, stdin, limits, 2 * limits.timeout + START_SECONDS, None)


def _in_service(url: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a program in SandboxFusion through ``/run_code``. The service's settings limit the size of files.

    See https://github.com/bytedance/SandboxFusion.
    """
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
    """Check that the name of a sandbox is ``bubblewrap``, ``container:<command>``, or a URL.

    Raises:
        ConfigError: The name has none of these forms.
    """
    kind, _, rest = name.partition(":")
    if name == "bubblewrap" or (kind == "container" and rest.strip()):
        return
    if kind not in ("http", "https") or not rest.startswith("//"):
        raise ConfigError(
            f"sandbox={name!r} is not a known sandbox{did_you_mean(kind, ('bubblewrap', 'container'))}. Fix: use {EXAMPLES}."
        )


@functools.lru_cache(maxsize=16)
def open_sandbox(name: str) -> None:
    """Run a trial program in a sandbox. In bubblewrap, the trial program checks that code cannot change kernel settings.

    Raises:
        ConfigError: The name of the sandbox is invalid.
        MissingDependencyError: The program that starts the sandbox is not installed.
        RewardError: The sandbox cannot run Python on this machine, or does not isolate the program.
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
            f"code written by a model must run in a sandbox, but the program {name!r} is not installed. Fix: {install}. You "
            f"can also choose another sandbox ({EXAMPLES}).",
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
    """Run a command that executes `LOADER`. It inherits the file descriptors ``files``, and is killed after ``seconds``
    seconds.
    """
    code = program.encode("utf-8", "replace")
    timeout, memory_mb, file_mb, processes = astuple(limits)
    most = file_mb << 20
    bounds = map(str, (len(code), max(1, round(timeout + 0.5)), memory_mb << 20, most, processes))
    # Limit the size of the output. `ulimit -f` expects blocks of 512 bytes.
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


# Matches a line that opens a code block: indent, backticks and language. A line that closes a block has no language after
# the backticks.
FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)")
LANGUAGES = {"python": "python", "python3": "python", "py": "python", "": "none"}


def code_block(text: str) -> str | None:
    r"""Return the last complete code block that is marked as Python. If there is no Python block, return the last block
    without a language.

    Text before ``</think>`` is ignored.

    >>> code_block("```python\nx = 1\n```\nIt prints:\n```\n1\n```")
    'x = 1'
    """
    lines = text.rpartition("</think>")[2].split("\n")
    fences = {at: match for at, line in enumerate(lines) if (match := FENCE.fullmatch(line))}
    # Maps the line number of each fence to the next line that consists of the same number of backticks.
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
    # Remove the indent of the fence from each line. In Markdown, this indent is not part of the code.
    return "\n".join(re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", line) for line in code)


def read_tests(value: object) -> list[dict[str, str]]:
    """Convert the tests of a row to a list of dicts: ``{"code": ...}`` or ``{"input": ..., "output": ...}``.

    Args:
        value: Python code, a dict with ``input`` and ``output`` (or lists ``inputs`` and ``outputs``) of a program, or a
            list of these. Each form may also be a JSON string. None and empty values mean that the row has no tests.

    Raises:
        RewardError: The value has none of these forms.

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
        # Drop keys whose value is None. Arrow adds the keys of all rows to each row with the value None.
        fields = {name: part for name, part in value.items() if part is not None}
        return _programs(fields) if fields else []
    if isinstance(value, Sequence):
        return [test for item in value for test in read_tests(item)]
    raise RewardError(f"tests must be code, a dict with inputs and outputs, or a list of these; got {value!r:.200}.")


def _programs(value: Mapping[str, Any]) -> list[dict[str, str]]:
    inputs, wanted = ([value[n]] if n in value else value.get(f"{n}s") for n in ("input", "output"))
    if not (isinstance(inputs, list | tuple) and isinstance(wanted, list | tuple)) or value.get("fn_name"):
        raise RewardError(
            "a test given as a dict needs the keys 'input' and 'output', or 'inputs' and 'outputs', but has the keys "
            f"{sorted(value)}. Fix: add these keys. Write the test of a function as code, e.g. 'assert f(1) == 2'."
        )
    if len(inputs) != len(wanted):
        raise RewardError(f"a test has {len(inputs)} inputs but {len(wanted)} outputs. Fix: pass one output per input.")
    return [{"input": _lines(i), "output": _lines(o)} for i, o in zip(inputs, wanted, strict=True)]


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one test: whether the test passed, and the reason of a failure."""

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
    """Test code. The code runs once per test, each time in a new sandbox.

    In bubblewrap and in containers, `Limits` restricts time, memory, files and processes. In bubblewrap, code can access
    the system's programs and this Python installation (both read-only), and an empty in-memory folder. It cannot access
    environment variables, other processes or the network. In a container or a service, your configuration decides what code
    can access.

    **What is not protected**: bubblewrap and containers do not protect from bugs in the kernel or the CPU. If the trainer
    runs as root, the kernel limits neither the number of processes nor their total memory. Do not run the trainer as root,
    or use a container with ``--pids-limit`` and ``--memory``. Bubblewrap does not limit the number of empty files, and each
    empty file takes about 1 kB of kernel memory. Only the timeout limits their number. A test written as code runs in the
    same process as the completion, so the completion can tamper with the test. Tests with inputs and outputs are compared
    outside the sandbox.

    Args:
        source: Python code.
        tests: Tests in the form returned by `read_tests`.
        limits: Resource limits for running one test. None: the defaults of `Limits`.
        sandbox: ``bubblewrap`` (default) uses the program ``bwrap``. ``container:<command>`` uses a command line that starts a
            container, e.g. ``container:docker run --rm -i --network none --memory 2g --pids-limit 64 python:3.12-slim``. A URL
            uses a SandboxFusion service.
        stop: Whether to skip the tests after the first failed test.

    Returns:
        One result for each test that was run. A test fails if the process exits before the test has finished.

    Raises:
        ConfigError: The name of the sandbox is invalid.
        MissingDependencyError: The program that starts the sandbox is not installed.
        RewardError: The sandbox cannot run Python on this machine.

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
    # Repeat the trial program after these statuses, because the container or `timeout` may not have started.
    if sandbox.startswith("container:") and outcome.status in (125, 126, 127):
        open_sandbox.__wrapped__(sandbox)
    reason = _reason(outcome, limits)
    if reason:
        return CaseResult(False, reason)
    if "code" in test:
        early = "the process ended before the test was over"
        return CaseResult(True) if word in outcome.output.splitlines() else CaseResult(False, early)
    written, wanted = (
        [line.rstrip() for line in text.strip().splitlines()] for text in (outcome.output, test["output"])
    )
    return CaseResult(True) if written == wanted else CaseResult(False, f"wrote {outcome.output[:100]!r}")


# Program that runs the code and its test. Its last line of output is a random word. If the word is missing, the code exited
# early with status 0.
TESTED = """
scope = {{"__name__": "__main__"}}
exec(compile({source!r}, "<completion>", "exec"), scope)
exec(compile({test!r}, "<test>", "exec"), scope)
print()
print({word!r})
"""


def _reason(outcome: Outcome, limits: Limits) -> str:
    """Return the reason why a program did not run to its end. Return "" if it ran to its end."""
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
    r"""Reward function that returns 1 if the Python code block of a completion passes all tests of its row, else 0.

    With ``partial``, the reward is the fraction of passed tests. For example, the tests are
    ``["assert f(2) == 4", "assert f(3) == 6"]``:

    - ``def f(x): return 2 * x`` gets 1 (with ``partial``: 1);
    - ``def f(x): return 4`` gets 0 (with ``partial``: 0.5);
    - an endless loop gets 0 (with ``partial``: 0), and so does a completion without a code block.

    A row without tests gets None. See `run_tests` for the sandboxes and for what they do not protect from.

    Args:
        column: Dataset column with the tests. `read_tests` describes the accepted forms.
        partial: Whether to return the fraction of passed tests instead of 0 or 1.
        limits: Resource limits of each test.
        workers: Number of sandboxes that run concurrently. None: the number of CPU cores of this process.
        sandbox: ``bubblewrap``, ``container:<command>`` or a URL. See `run_tests`.

    Raises:
        ConfigError: The name of the sandbox is invalid, or ``workers`` is below 1.
    """

    __name__ = "code_tests_reward"
    # Run this function in a thread, as with `parallel`, so that other reward functions run while it waits for processes.
    runs_in_thread = True

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
            raise ConfigError(f"workers={workers} must be at least 1, or None for one worker per CPU core.")
        self.column, self.partial, self.limits, self.sandbox = column, partial, limits or Limits(), sandbox
        # Number of CPU cores that this process is allowed to use.
        usable = usable_processors()
        self.workers = workers or max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))

    def __call__(
        self, completions: Sequence[Any], log_extra: Callable[[str, list], None] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return the reward of each completion, or None for a row without tests. Log the number of passed tests and the
        first failure of each completion.

        Raises:
            MissingDependencyError: The program that starts the sandbox is not installed.
            RewardError: The column with tests is missing, tests have an unknown form, or the sandbox does not work on this
                machine.
        """
        if self.column not in columns:
            raise RewardError(
                f"code_tests_reward needs the column {self.column!r}, but the columns are {sorted(columns)}."
            )
        tests = [self._read(row, value) for row, value in enumerate(columns[self.column])]
        # Test the sandbox even if no completion contains code. A dry run then detects a sandbox that does not work.
        open_sandbox(self.sandbox)
        sources = [code_block(completion_text(completion)) for completion in completions]
        keys = [json.dumps((s, t)) for s, t in zip(sources, tests, strict=True)]
        jobs = {k: (s, t) for k, s, t in zip(keys, sources, tests, strict=True) if s is not None and t}
        with ThreadPoolExecutor(self.workers) as pool:
            run = functools.partial(run_tests, limits=self.limits, sandbox=self.sandbox, stop=not self.partial)
            # If a call raises an exception, all jobs that have not started are canceled.
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
    r"""Return a `CodeTestsReward` that reads the tests in ``column``. ``options`` are its other arguments.

    >>> reward = get_code_tests_reward(partial=True)
    >>> texts = ["```python\ndef f(x): return 2 * x\n```", "```python\ndef f(x): return 4\n```", "I cannot."]
    >>> reward(completions=texts, tests=[["assert f(2) == 4", "assert f(3) == 6"]] * 3)  # doctest: +SKIP
    [1.0, 0.5, 0.0]
    """
    return CodeTestsReward(column, **options)
