"""The inside of the sandbox: a process that gives up what it can, then runs one test of judged code in a child.

`posttrain.rewards.code` starts it as a script with an empty environment. It imports the standard library only, mounts
nothing, deletes nothing, and holds no expected output. Three processes: this one watches the clock; below it a keeper,
the first process of a namespace, whose end is the end of all others in it; below that the judged code.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import stat
import struct
import sys
import tempfile
import time
from typing import Any

NEW_USER, NEW_PIDS, NEW_NETWORK, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
DEATH_SIGNAL, SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# Bits of what Landlock may forbid: writing, removing and making files; from versions 2 and 3 on moving and truncating.
WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
MOVES, TRUNCATES = 1 << 13, 1 << 14
SCOPES = 3  # Abstract sockets and signals beyond the sandbox, from version 6 on.
ENTRIES = 10_000  # Files and folders in the working folder.
# What judged code may import although the user it becomes cannot read Python's own files (a Python in root's home).
USUAL = """
abc argparse array ast asyncio base64 bisect calendar cmath collections collections.abc contextlib copy csv dataclasses
datetime decimal difflib enum fractions functools gc getpass glob hashlib heapq inspect io itertools json keyword logging
math multiprocessing numbers operator os pathlib pickle platform pprint queue random re secrets select selectors shutil
signal socket sqlite3 statistics string struct subprocess sys tempfile textwrap threading time timeit traceback types
typing unittest uuid weakref zlib encodings.ascii encodings.idna encodings.latin_1
""".split()  # noqa: SIM905
TICK, LOOK = 0.005, 0.2  # Seconds between looks at the child, and at its folder.


def libc(name: str, *arguments: Any) -> int:
    """Call the C library; OSError where it refuses."""
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def process_option(option: int, value: int) -> None:
    """``prctl`` with one number."""
    with contextlib.suppress(OSError, AttributeError):
        libc("prctl", option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


def separate(network: bool) -> str | None:
    """Enter namespaces of processes, of messages and (unless ``network``) of the network; None, or why the last was refused."""
    if not sys.platform.startswith("linux"):
        return None if network else "namespaces are a feature of Linux"
    user, group = os.getuid(), os.getgid()
    extra = 0 if user == 0 else NEW_USER
    cut = 0 if network else NEW_NETWORK
    try:
        try:
            libc("unshare", cut | NEW_PIDS | NEW_IPC | extra)
        except OSError:
            if network:
                return None
            libc("unshare", cut | extra)
        if extra:
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
    except OSError as error:
        return None if network else str(error)
    return None


def confine_writes(work: str) -> str | None:
    """Forbid writing anywhere but in ``work`` (and to /dev/null); None, or why the kernel refused."""
    try:
        version = libc("syscall", LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
        rights = WRITES | (MOVES if version >= 2 else 0) | (TRUNCATES if version >= 3 else 0)
        attributes = struct.pack("=QQQ", rights, 0, SCOPES if version >= 6 else 0)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        rules = libc("syscall", LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
        for path, allowed in ((work, rights), ("/dev/null", rights & (1 << 1 | TRUNCATES))):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc("syscall", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, folder), 0)
            os.close(folder)
        process_option(NO_NEW_PRIVILEGES, 1)
        libc("syscall", LANDLOCK_RESTRICT, rules, 0)
        os.close(rules)
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def become(user: int | None) -> None:
    """Another user, without groups."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    process_option(NO_NEW_PRIVILEGES, 1)


def preload(user: int | None) -> None:
    """Import the usual modules now, where the other user could not read them later."""
    readable = True
    for path in (os.path.abspath(os.__file__), os.path.realpath(os.__file__)):
        while path != "/":
            path = os.path.dirname(path)
            readable = readable and bool(os.stat(path).st_mode & stat.S_IXOTH)
    for name in () if user is None or readable else USUAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def limit(request: dict[str, Any]) -> None:
    """Bounds of the kernel on time, memory, files and processes."""
    seconds = max(1, round(request["timeout"] + 0.5))
    bounds = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: request["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: request["file_mb"] << 20,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_NPROC: request["processes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def run(request: dict[str, Any], verdict: int, report: int) -> None:
    """The judged code, and its test; never returns."""
    os.setsid()
    process_option(DEATH_SIGNAL, signal.SIGKILL)
    with tempfile.TemporaryFile() as given:
        given.write(request["stdin"].encode())
        given.seek(0)
        os.dup2(given.fileno(), 0)
    os.chdir(request["work"])
    preload(request["user"])
    become(request["user"])
    refused = confine_writes(request["work"])
    alone = request["user"] is not None  # Another user may write in few places even so.
    if refused is not None and not (alone or request["files"]):
        os.write(report, json.dumps({"error": "files", "why": refused}).encode())
        os._exit(1)
    os.close(report)
    limit(request)
    os.environ.update({"HOME": request["work"], "TMPDIR": request["work"]})
    sys.argv = ["completion.py"]
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(request["source"], "<completion>", "exec"), scope)
        if request["code"] is not None:
            exec(compile(request["code"], "<test>", "exec"), scope)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(0 if request["code"] is None and not end.code else 3)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".strip(": ")
        with contextlib.suppress(BaseException):
            os.write(2, said.encode("utf-8", "replace")[:2000])
        os._exit(1)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        os.write(verdict, request["word"].encode())
        os._exit(0)
    os._exit(1)


def keep(request: dict[str, Any], verdict: int, report: int) -> None:
    """Wait for the judged code and end as it ended: all that it left behind ends with this process."""
    process_option(DEATH_SIGNAL, signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        try:
            run(request, verdict, report)
        finally:
            os._exit(1)
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def too_much(work: str, most: int) -> bool:
    """Whether a folder holds more bytes or entries than it may; without following links, or descending without end."""
    todo, size, entries = [work], 0, 0
    while todo:
        try:
            with os.scandir(todo.pop()) as folder:
                for entry in folder:
                    entries += 1
                    found = entry.stat(follow_symlinks=False)
                    size += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        todo.append(entry.path)
                    if size > most or entries > ENTRIES:
                        return True
        except OSError:
            continue
    return False


def watch(pid: int, request: dict[str, Any]) -> tuple[int | None, str]:
    """The keeper's exit status, or None and why it was killed."""
    began = looked = time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), ""
        now = time.monotonic()
        why = "" if now - began < 2 * request["timeout"] else "time"
        if not why and now - looked > LOOK:
            looked = now
            why = "files" if too_much(request["work"], request["file_mb"] << 22) else ""
        if why:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, why
        time.sleep(TICK)


def sweep() -> None:
    """Kill what is left: with no namespace of its own, it has become a child of this process."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc"):
                if name.isdigit() and _parent(name) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def main() -> None:
    """Read a request, run it, and report how it ended."""
    verdict, report = int(sys.argv[1]), int(sys.argv[2])
    process_option(DEATH_SIGNAL, signal.SIGKILL)
    process_option(SUBREAPER, 1)
    request = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    refused = separate(request["network"])
    if refused is not None:
        os.write(report, json.dumps({"error": "network", "why": refused}).encode())
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        try:
            keep(request, verdict, report)
        finally:
            os._exit(1)
    os.close(verdict)
    status, why = watch(pid, request)
    sweep()
    os.write(report, json.dumps({"status": status, "why": why}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
