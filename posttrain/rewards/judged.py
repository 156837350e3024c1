"""The inside of the sandbox: a process that cuts itself off from the machine, then judges code by its tests.

`posttrain.rewards.sandbox` starts it as a script. It imports the standard library only, and holds no expected output:
the judged code runs in copies of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import types
from typing import Any

NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000  # Mounts, IPC, processes, network.
NEW_USER = 0x10000000
PRIVATE, REMOUNT_READ_ONLY, BIND, BIND_ALL = 0x44000, 0x1021, 0x1000, 0x5000
DETACH = 2
HARDENED = 0xE  # nosuid, nodev, noexec
MOUNT_SETATTR, READ_ONLY, NO_DEVICES, RECURSIVE, HERE = 442, 1, 4, 0x8000, -100
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
DEATH_SIGNAL, DUMPABLE, BOUNDING_DROP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
LINUX = sys.platform.startswith("linux")
OUTER = os.readlink("/proc/self/ns/mnt") if LINUX else ""  # The mount namespace we were started in.
REASON = 300  # Characters of a failure that are handed on.


def _libc(name: str, *arguments: Any) -> None:
    """Call the C library; OSError where it refuses."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _process_option(option: int, value: int) -> None:
    if LINUX:
        with contextlib.suppress(OSError):
            _libc("prctl", option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


def separate() -> str | None:
    """Enter namespaces of our own; says why not where the kernel refuses."""
    if not LINUX:
        return "namespaces are a feature of Linux"
    user, group = os.getuid(), os.getgid()
    if user == 0:
        with contextlib.suppress(OSError):
            _libc("unshare", NAMESPACES)
            return None
    try:
        _libc("unshare", NAMESPACES | NEW_USER)
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return str(error)
    return None


def _only_inside() -> None:
    """Refuse to touch the mounts of the machine itself: this process may run as root."""
    if not OUTER or os.readlink("/proc/self/ns/mnt") == OUTER:
        raise PermissionError("mounts are changed in a namespace of our own only")


def _mounted_below(folder: str) -> bool:
    with open("/proc/self/mountinfo") as file:
        return any(line.split()[4].startswith(folder.rstrip("/") + "/") for line in file)


def _mount(kind: str, target: str, flags: int, options: str = "") -> None:
    _only_inside()
    _libc("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _attributes(target: str, put: int, take: int, flags: int) -> None:
    _only_inside()
    record = struct.pack("4Q", put, take, 0, 0)
    _libc("syscall", MOUNT_SETATTR, HERE, target.encode(), flags, record, len(record))


def confine(work: str, megabytes: int) -> None:
    """Make every file system read-only and without devices, but a small one in memory at ``work``."""
    _mount("none", "/", PRIVATE)
    for device in filter(os.path.exists, DEVICES):
        _mount(device, device, BIND)
    _attributes("/", READ_ONLY | NO_DEVICES, 0, RECURSIVE)
    for device in filter(os.path.exists, DEVICES):
        _attributes(device, 0, NO_DEVICES, 0)
    _mount("tmpfs", work, 0x6, f"size={megabytes}m,nr_inodes=10000,mode=0777")
    with contextlib.suppress(OSError):  # For semaphores of `multiprocessing`.
        _mount("tmpfs", "/dev/shm", HARDENED, f"size={megabytes}m,nr_inodes=10000,mode=1777")


def closed_to_others(path: str) -> str | None:
    """The first folder on the way to a path (itself included) that other users may not enter."""
    folders = [path]
    while folders[-1] != "/":
        folders.append(os.path.dirname(folders[-1]))
    return next((folder for folder in reversed(folders) if not os.stat(folder).st_mode & 1), None)


def open_interpreter(work: str) -> None:
    """Let another user read Python where it lies in a private folder: everything else of that folder disappears.

    Raises:
        OSError: That cannot be done; `work` lies there too, or namespaces are missing.
    """
    needed: dict[str, list[str]] = {}
    for path in {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}:
        door = closed_to_others(path)
        if door is not None:
            needed.setdefault(door, []).append(path)
    if needed:
        _only_inside()
    work_door = closed_to_others(os.path.dirname(work))
    if work_door is not None or any(door in paths for door, paths in needed.items()):
        raise PermissionError(f"other users may not enter {work_door or next(iter(needed))}")
    if needed:
        _mount("none", "/", PRIVATE)
        _mount("tmpfs", work, 0, "mode=0755")
    for door, paths in needed.items():
        held = [os.path.join(work, f"{len(os.listdir(work)) + i}") for i in range(len(paths))]
        for path, hold in zip(paths, held, strict=True):
            os.makedirs(hold)
            _mount(path, hold, BIND_ALL)
            _attributes(hold, READ_ONLY, 0, RECURSIVE)
        _mount("tmpfs", door, 0, "mode=0755")
        for path, hold in zip(paths, held, strict=True):
            os.makedirs(path)
            _mount(hold, path, BIND_ALL)
            _attributes(path, READ_ONLY, 0, RECURSIVE)
            _libc("umount2", hold.encode(), DETACH)
    if needed:
        _libc("umount2", work.encode(), DETACH)


def own_processes_only(most: int) -> None:
    """Show this namespace's processes in /proc, and bound their number where namespaces have a bound (Linux 6.14)."""
    _mount("proc", "/proc", HARDENED)
    with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as file:
        file.write(str(max(most, 301)))  # The kernel's least.
    _mount("none", "/proc", REMOUNT_READ_ONLY | HARDENED)


def give_up_rights(user: int | None) -> None:
    """No capabilities now or later, and a user number of our own where one is given."""
    if LINUX:
        for capability in range(64):
            _process_option(BOUNDING_DROP, capability)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _process_option(NO_NEW_PRIVILEGES, 1)
    if LINUX:
        _libc("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6))
    _process_option(DUMPABLE, 0)  # The judged code has our user number: it must not open our files or memory.
    _process_option(DEATH_SIGNAL, signal.SIGKILL)


def _count(user: int) -> int:
    """Threads that a user has on this machine."""
    total = 0
    for name in os.listdir("/proc") if LINUX else []:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def limit(request: dict[str, Any]) -> None:
    """Resource limits of the judged code; each process it starts inherits them."""
    seconds = math.ceil(request["timeout"])
    limits = {
        "RLIMIT_CPU": (seconds, seconds + 1),  # The first is a signal that can be caught.
        "RLIMIT_AS": request["memory_mb"] << 20,
        "RLIMIT_FSIZE": request["file_mb"] << 20,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": request["processes"] + 2,  # This process and its parent count too.
    }
    for name, value in limits.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), value if isinstance(value, tuple) else (value, value))


def _execute(source: str, test: dict[str, Any]) -> None:
    """Run the code, then its test, in a module of its own."""
    program = "code" not in test
    module = types.ModuleType("__main__" if program else "solution")
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True, optimize=0), module.__dict__)
    except SystemExit as stop:
        if not program or stop.code not in (None, 0):
            raise
    if not program:
        exec(compile(test["code"], "test.py", "exec", dont_inherit=True, optimize=0), module.__dict__)
    sys.stdout.flush()


def _run_child(request: dict[str, Any], test: dict[str, Any], files: tuple[int, int, int], word: bytes) -> None:
    """The forked process: never returns.

    That the test passed is told by a word rather than by the exit status: code that leaves early passes nothing.
    """
    report = 3
    try:
        given, written, told = (os.dup2(fd, 20 + i) for i, fd in enumerate(files))
        for fd, target in ((given, 0), (written, 1), (told, report)):
            os.dup2(fd, target)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(4, 256)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
        limit(request)
        _execute(request["source"], test)
    except BaseException as error:
        reason = type(error).__name__
        with contextlib.suppress(BaseException):
            reason = f"{reason}: {error}" if str(error) else reason
        os.write(report, reason[:REASON].encode("utf-8", "replace"))
        os._exit(1)
    os.write(report, word)
    os._exit(0)


def _descendants() -> list[int]:
    """Our children, those adopted from dead ones included."""
    found = []
    for name in os.listdir("/proc") if LINUX else []:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def sweep(first: int) -> None:
    """Kill what is left of a test: all of our namespace, or else every descendant that comes to us as an orphan."""
    for _ in range(1000):
        everybody = [-1] if os.getpid() == 1 else {first, *_descendants()} - {0}
        for pid in everybody:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        first = 0
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status, or None when the time is up."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _scratch() -> Any:
    """A file without a name, in memory where the system has that: the judged code cannot fill the disk under it."""
    return os.fdopen(os.memfd_create("scratch"), "w+b") if LINUX else tempfile.TemporaryFile()


def _clear(folder: str) -> None:
    """Empty the folder between tests; never through a mount."""
    if LINUX and _mounted_below(folder):
        raise PermissionError(f"something is mounted below {folder}: it is not emptied")
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def judge(request: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """Run one test in a copy of this process: whether it went through, its exit status, what it said and wrote."""
    word = os.urandom(16).hex().encode()
    with _scratch() as given, _scratch() as written:
        given.write(test.get("input", "").encode("utf-8", "replace"))
        given.seek(0)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_child(request, test, (given.fileno(), written.fileno(), theirs), word)
        os.close(theirs)
        status = _wait(pid, 2 * request["timeout"])
        sweep(pid if status is None else 0)
        os.set_blocking(ours, False)
        try:
            told = os.read(ours, 4096)
        except BlockingIOError:
            told = b""
        os.close(ours)
        written.seek(0)
        output = written.read(test.get("longest", 0) + 1)
    _clear(request["work"])
    passed = status == 0 and ("code" not in test or told == word)
    said, wrote = (text.decode("utf-8", "replace") for text in (b"" if told == word else told, output))
    return {"passed": passed, "status": status, "said": said, "output": wrote}


def cut_off(request: dict[str, Any], refused: str | None) -> dict[str, str]:
    """Do all that the kernel lets us do; tells what it does not, and why."""
    missing: dict[str, str] = {}
    if refused is not None:
        missing = {"network": refused, "files": refused, "other processes": refused}
    user = _other_user(request)
    if refused is None:
        for what, step in (
            ("files", lambda: confine(request["work"], request["file_mb"] * 4)),
            ("other processes", lambda: own_processes_only(request["processes"])),
        ):
            try:
                step()
            except OSError as error:
                missing[what] = str(error)
    if user is None and os.getuid() == 0 and "files" in missing:
        raise PermissionError(
            f"root will not run judged code that could write everywhere. Namespaces: {missing['files']}; and no other "
            f"user can read Python in {sys.base_prefix}. Run as another user, or with a Python that others can read"
        )
    if user is not None and "files" in missing:
        os.chown(request["work"], user, user)
    if user is None and refused is not None:
        request["processes"] += _count(os.getuid())  # The limit counts all of a user's, not only ours.
    if user is None and os.getuid() == 0:
        missing["number of processes"] = "root has no such limit, and could not become another user"
    os.chdir(request["work"])
    give_up_rights(user)
    return missing


def _other_user(request: dict[str, Any]) -> int | None:
    """The user number to change to: where one is asked for, exists in our user namespace, and can read Python."""
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [list(map(int, line.split())) for line in file]
        if not any(start <= (request["user"] or -1) < start + count for start, _, count in ranges):
            return None
        open_interpreter(request["work"])
    except OSError:
        return None
    return request["user"]


def manage(request: dict[str, Any], refused: str | None) -> None:
    """Cut off what can be cut off, judge each test, and write the outcome as JSON."""
    missing = cut_off(request, refused)
    results: list[dict[str, Any]] = []
    for test in request["tests"]:
        results.append(judge(request, test))
        if request["stop"] and not results[-1]["passed"]:
            break
    sys.stdout.write(json.dumps({"results": results, "missing": missing}))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Read a request, judge it in a child that nothing can outlive, and leave as it left."""
    _process_option(DEATH_SIGNAL, signal.SIGKILL)
    _process_option(SUBREAPER, 1)
    os.umask(0o022)
    request = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    refused = separate() if request["namespaces"] else "not asked for"
    pid = os.fork()
    if pid == 0:
        _process_option(DEATH_SIGNAL, signal.SIGKILL)
        _process_option(SUBREAPER, 1)
        manage(request, refused)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sweep(0)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
