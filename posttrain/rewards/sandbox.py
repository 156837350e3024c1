"""Sandboxes for code that a model wrote: bubblewrap, a container, or a service by its URL. None of them is written here."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass

from posttrain.errors import ConfigError, MissingDependencyError, RewardError, did_you_mean
from posttrain.rewards.remote import post_json

__all__ = ["Bubblewrap", "Container", "Limits", "Outcome", "Sandbox", "SandboxService", "check_sandbox", "open_sandbox"]

EXAMPLES = (
    "sandbox='bubblewrap', sandbox='container:docker run --rm -i --network none python:3.12-slim', or the URL of a "
    "SandboxFusion service"
)
# Runs in the sandbox: reads the program from stdin, unbuffered, so that what follows is the program's own input.
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
TICK = 0.01
# What Python needs to start; everything else of the machine's files stays outside.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one test of a completion may use.

    Args:
        timeout: Seconds of processor time of each process; all together may take twice as long by the clock.
        memory_mb: MiB of address space of each process.
        file_mb: MiB of each file and of what it prints; in bubblewrap its folder may hold four times as much.
        processes: Processes and threads at once. The kernel does not count those of root.
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
class Outcome:
    """How a program ended.

    Attributes:
        status: Exit status, 128 and the signal's number where a signal ended it; None where the time was up.
        output: What it wrote to stdout.
        errors: What it wrote to stderr.
    """

    status: int | None
    output: str = ""
    errors: str = ""


class Sandbox(ABC):
    """Runs Python programs where they can do little harm."""

    @abstractmethod
    def run(self, program: str, stdin: str, limits: Limits) -> Outcome:
        """Run one program from its beginning, in an empty folder.

        Args:
            program: Python code.
            stdin: What it reads from its standard input.
            limits: See `Limits`.

        Raises:
            RewardError: The sandbox itself failed.
        """

    def check(self) -> None:
        """Run a program of one line.

        Raises:
            MissingDependencyError: The sandbox's program is not installed.
            RewardError: The program did not run.
        """
        outcome = self.run("print(input())", "ready", Limits(timeout=START_SECONDS / 2))
        if outcome != Outcome(0, "ready\n", outcome.errors):
            raise RewardError(
                f"{type(self).__name__} cannot run Python here: exit status {outcome.status}, stdout {outcome.output[-200:]!r}, "
                f"stderr {outcome.errors.strip()[-400:]!r}. {self.hint()}"
            )

    def hint(self) -> str:
        """How to mend a sandbox that fails its check."""
        return f"Fix: choose another sandbox ({EXAMPLES})."


@dataclass(frozen=True, slots=True)
class Bubblewrap(Sandbox):
    """The program ``bwrap`` (0.7 or later): new namespaces, a folder in memory, the system and this Python read-only.

    Args:
        network: Leave the network on.
    """

    network: bool = False

    def run(self, program: str, stdin: str, limits: Limits) -> Outcome:
        """See `Sandbox.run`."""
        bwrap = _program("bwrap", "apt-get install bubblewrap, or dnf install bubblewrap")
        folder = ("--size", str(limits.file_mb << 22), "--tmpfs", "/tmp", "--dir", "/tmp/work", "--chdir", "/tmp/work")
        seen = [part for path in (*SYSTEM, sys.base_prefix, sys.prefix) for part in ("--ro-bind-try", path, path)]
        names = {"HOME": "/tmp/work", "TMPDIR": "/tmp/work", "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
        given = [part for name, value in names.items() for part in ("--setenv", name, value)]
        network = ("--share-net",) if self.network else ()
        command = [bwrap, "--unshare-all", *network, "--die-with-parent", "--new-session", "--clearenv", *given]
        command += ["--proc", "/proc", "--dev", "/dev", *folder, *seen, "--remount-ro", "/"]
        # The environment of bwrap itself can be read inside as that of process 1.
        whole = [*command, "--", sys.executable, *PYTHON_FLAGS]
        return _execute(whole, program, stdin, limits, 2 * limits.timeout, {"PATH": os.defpath})

    def hint(self) -> str:
        """See `Sandbox.hint`."""
        return (
            "Fix: install bubblewrap 0.7 or later and allow user namespaces (in a container: run it with "
            f"`--security-opt seccomp=unconfined`, or privileged), or choose another sandbox ({EXAMPLES})."
        )


@dataclass(frozen=True, slots=True)
class Container(Sandbox):
    """A command line that starts a container with ``python3`` and ``timeout`` and passes stdin on.

    Args:
        command: For example ``docker run --rm -i --network none --read-only python:3.12-slim``; also ``podman run``.
    """

    command: str

    def run(self, program: str, stdin: str, limits: Limits) -> Outcome:
        """See `Sandbox.run`; the container ends itself when the time is up, as killing its client would not end it."""
        words = shlex.split(self.command)
        words[0] = _program(words[0], f"install {words[0]}")
        bound = ["timeout", "-s", "KILL", f"{2 * limits.timeout:g}", "python3", *PYTHON_FLAGS]
        patience = 2 * limits.timeout + START_SECONDS
        outcome = _execute([*words, *bound], program, stdin, limits, patience, None)
        # 125 to 127: the container engine, or `timeout` in it, could not start the program.
        if outcome.status in (125, 126, 127):
            raise RewardError(
                f"{self.command!r} failed (exit status {outcome.status}): {outcome.errors.strip()[-400:]}"
            )
        return outcome

    def hint(self) -> str:
        """See `Sandbox.hint`."""
        return (
            f"Fix: let {self.command!r} start a container with `python3` and `timeout` and pass stdin on (-i), or choose "
            f"another sandbox ({EXAMPLES})."
        )


@dataclass(frozen=True, slots=True)
class SandboxService(Sandbox):
    """A SandboxFusion service: its endpoint ``/run_code`` runs a program. Its own settings bound files and processes.

    Args:
        url: With or without ``/run_code``.

    Reference: https://github.com/bytedance/SandboxFusion
    """

    url: str

    def run(self, program: str, stdin: str, limits: Limits) -> Outcome:
        """See `Sandbox.run`."""
        url = self.url.rstrip("/")
        url = url if url.endswith("/run_code") else f"{url}/run_code"
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
                f"the sandbox service at {url} answered {response.text[:200]!r}, which is no result of SandboxFusion's "
                "run_code. Fix: let the URL be that of such a service."
            ) from error
        return Outcome(status if status is None or status >= 0 else 128 - status, result["stdout"], result["stderr"])


def check_sandbox(name: str, network: bool = False) -> Sandbox:
    """The sandbox of that name, not yet tried.

    Args:
        name: ``bubblewrap``, ``container:<command>`` or a URL.
        network: Leave the network on; bubblewrap only.

    Raises:
        ConfigError: Another name, or ``network`` where the container or the service decides.
    """
    kind, _, rest = name.partition(":")
    if name == "bubblewrap":
        return Bubblewrap(network)
    if network:
        raise ConfigError(f"network=True is for sandbox='bubblewrap'; what {name!r} starts decides that for itself.")
    if kind == "container" and rest.strip():
        return Container(rest.strip())
    if kind in ("http", "https") and rest.startswith("//"):
        return SandboxService(name)
    raise ConfigError(
        f"sandbox={name!r} is no sandbox{did_you_mean(kind, ('bubblewrap', 'container'))}. Fix: give {EXAMPLES}."
    )


@functools.lru_cache(maxsize=16)
def open_sandbox(name: str, network: bool = False) -> Sandbox:
    """The sandbox of that name, after it ran a program of one line; see `check_sandbox`.

    Raises:
        ConfigError: See `check_sandbox`.
        MissingDependencyError: Its program is not installed.
        RewardError: It cannot run Python here.
    """
    sandbox = check_sandbox(name, network)
    sandbox.check()
    return sandbox


def _program(name: str, install: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingDependencyError(
            f"running code that a model wrote needs a sandbox, and the program {name!r} is not installed. Fix: {install}; or "
            f"choose another sandbox ({EXAMPLES}).",
            name=name,
        )
    return found


def _execute(
    command: list[str], program: str, stdin: str, limits: Limits, seconds: float, environment: dict[str, str] | None
) -> Outcome:
    """Run a command that ends in `LOADER`; kill it after ``seconds``, or when it wrote more than it may."""
    code = program.encode("utf-8", "replace")
    timeout, memory_mb, file_mb, processes = astuple(limits)
    most = file_mb << 20
    bounds = map(str, (len(code), max(1, round(timeout + 0.5)), memory_mb << 20, most, processes))
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(code + stdin.encode("utf-8", "replace"))
        given.seek(0)
        streams = {"stdin": given, "stdout": output, "stderr": errors}
        process = subprocess.Popen([*command, *bounds], **streams, env=environment, cwd="/", start_new_session=True)
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None:
                wrote = max(os.fstat(file.fileno()).st_size for file in (output, errors))
                if time.monotonic() > deadline or wrote > most:
                    break
                time.sleep(TICK)
        finally:
            late = process.poll() is None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(most + 1).decode("utf-8", "replace"))
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Outcome(None if late and max(map(len, texts)) <= most else status, *texts)
