"""Programs that tests start, forked from a process that has the imports behind it: a second less of waiting, five of computing.

A template is an interpreter that has imported the libraries and forks itself for each request, over a socket in a folder that
all processes of one test session know: it is started once a session, whoever asks first. It ends with the session.

A forked program is what ``python -m`` or ``python -c`` would be, but for what is read when an interpreter starts or a library
is imported: hash seeds, ``HF_HOME``, which modules are in memory. A test of those starts an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import json
import multiprocessing.popen_spawn_posix
import multiprocessing.util
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import filelock

ROOT = Path(__file__).parents[1]
FOLDER = "POSTTRAIN_TEST_FORKS"  # Where the sockets of this session are; its name ends with the session's process.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SEEDS = 2  # Templates of ranks: a set in another order on one of them is enough to part them.
PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT


def open_session() -> Path:
    """The folder of this session's templates; whoever makes it removes it as it ends."""
    if FOLDER not in os.environ:
        owner = os.getpid()
        os.environ[FOLDER] = made = tempfile.mkdtemp(prefix="forks-", suffix=f"-{owner}")
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
    return Path(os.environ[FOLDER])


# Asking -------------------------------------------------------------------------------------------------------------


class Forked:
    """What `subprocess.Popen` is for ``python *arguments``: a program in a fork of a template.

    Args:
        arguments: ``-m module ...``, ``-c code ...`` or ``script ...``.
        stdin, stdout, stderr: As `subprocess.Popen` takes them; nothing is inherited: None is `DEVNULL`.
        env: The whole environment; None: this one with `ENVIRONMENT`.
        cwd: Its working directory.
        start_new_session: Whether it leads a process group of its own.
        rank: Which template: neighbours in a distributed run have different hash seeds, as under torchrun.
        pretends: Whether the template has the pretended accelerator of `tests.gpu.device`.
        pass_fds: Open files that it has under the same numbers.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
        start_new_session: bool = False,
        rank: int = 0,
        pretends: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args, self.returncode = [str(one) for one in arguments], None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        theirs = []
        for name, asked in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            if asked == PIPE:
                end, other = os.pipe() if name != "stdin" else os.pipe()[::-1]
                setattr(self, name, os.fdopen(end, "w" if name == "stdin" else "r", encoding="utf-8"))
            elif asked == STDOUT:
                other = os.dup(theirs[1])
            elif asked in (None, DEVNULL):
                other = os.open(os.devnull, os.O_RDWR)
            else:
                other = os.dup(asked if isinstance(asked, int) else asked.fileno())
            theirs.append(other)
        env = dict(os.environ | ENVIRONMENT if env is None else env)
        ask = {"arguments": self.args, "env": env, "cwd": str(cwd), "leads": start_new_session}
        ask["targets"] = [0, 1, 2, *pass_fds]
        message = json.dumps(ask).encode()
        self._line = _connect(rank, pretends)
        socket.send_fds(self._line, [struct.pack("!I", len(message))], [*theirs, *pass_fds])
        self._line.sendall(message)
        for one in theirs:
            os.close(one)
        self.pid = _number(self._line)
        if self.pid is None:
            raise RuntimeError(f"the template of rank {rank} ended: see {open_session()}")

    def poll(self) -> int | None:
        """Its exit status, minus the signal that killed it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status once it has ended."""
        if self.returncode is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._line, selectors.EVENT_READ)
                if not ready.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = _number(self._line)
            self._line.close()
            # A template that is gone took its programs with it.
            self.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, said: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write ``said``, read both pipes to their end and wait."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(said or "")
                self.stdin.close()
        texts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        with selectors.DefaultSelector() as ready:
            for name in texts:
                if getattr(self, name) is not None:
                    ready.register(getattr(self, name), selectors.EVENT_READ, name)
            while ready.get_map():
                left = None if until is None else max(until - time.monotonic(), 0)
                events = ready.select(left)
                if not events:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                for key, _ in events:
                    piece = os.read(key.fd, 1 << 16)
                    texts[key.data].append(piece)
                    if not piece:
                        ready.unregister(key.fileobj)
        self.wait(None if until is None else max(until - time.monotonic(), 0))
        self._close()
        return tuple(b"".join(pieces).decode("utf-8", "replace") for pieces in texts.values())  # type: ignore[return-value]

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()


def run(arguments: Sequence[object], *, timeout: float = 240, check: bool = False, **options: Any) -> Any:
    """What `subprocess.run` is with both streams read as text; killed where it takes longer."""
    process = Forked(arguments, stdout=PIPE, stderr=PIPE, **options)
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(process.args, process.wait(), out, errors)
    if check:
        assert done.returncode == 0, errors[-3000:]
    return done


class Spawned(multiprocessing.popen_spawn_posix.Popen):
    """What starts a process of multiprocessing's spawn context, in a fork of a template: see ``forked_workers``."""

    def _launch(self, process_obj: Any) -> None:
        def fork(_: object, command: list[str], passed: list[int]) -> int:
            arguments = command[command.index("-c") :]
            self._forked = Forked(
                arguments, stdin=DEVNULL, stdout=1, stderr=2, env=os.environ, cwd=os.getcwd(), pass_fds=passed
            )
            return self._forked.pid

        usual = multiprocessing.util.spawnv_passfds
        multiprocessing.util.spawnv_passfds = fork
        try:
            super()._launch(process_obj)
        finally:
            multiprocessing.util.spawnv_passfds = usual

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.poll() if flag else self._forked.wait()
        return self.returncode


def _number(line: socket.socket) -> int | None:
    """The next of a template's answers, None where there is no template any more."""
    answer = b""
    while not answer.endswith(b"\n"):
        try:
            piece = line.recv(1)
        except ConnectionError:
            return None
        if not piece:
            return None
        answer += piece
    return int(answer)


def _connect(rank: int, pretends: bool) -> socket.socket:
    """A connection to the template, which is started where nobody has."""
    rank %= SEEDS
    folder = open_session()
    path = folder / f"{'pretended' if pretends else 'rank'}{rank}"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            _start(path, rank, pretends)
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))
    return line


_STARTED = []  # Popen says at the end of an interpreter what still runs.


def _start(path: Path, rank: int, pretends: bool) -> None:
    env = os.environ | ENVIRONMENT | {"TEMPLATE_OF_RANK": str(rank)} | ({"PRETENDS": "1"} if pretends else {})
    env.pop("PYTEST_CURRENT_TEST", None)
    with open(f"{path}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(path)], cwd=ROOT, env=env,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _STARTED.append(process)
    until = time.monotonic() + 60
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"no template of rank {rank}: {Path(f'{path}.log').read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.01)


# Answering ----------------------------------------------------------------------------------------------------------


def _serve(path: Path) -> None:
    """Fork for each connection; write to it the child's id and, once it has ended, its status."""
    session = int(path.parent.name.rpartition("-")[2])
    # Whoever started this template may have kept signals from itself for a moment, as multiprocessing does; and what is blocked
    # or ignored here would be so in all its programs.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.part")
    listener.listen(64)
    os.rename(f"{path}.part", path)  # Asked from now on, answered when everything is imported.
    _import()
    gc.freeze()
    ended, wake = socket.socketpair()
    for one in (ended, wake):
        one.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(ended, selectors.EVENT_READ)
        while path.exists() and _lives(session):
            for key, _ in ready.select(1):
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    ask, files = _received(line)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for one in (listener, line, ended, wake, *children.values()):
                            one.close()
                        ready.close()
                        _become(files, **ask)
                    for one in files:
                        os.close(one)
                    children[pid] = line
                    _answer(line, pid)
                else:
                    with contextlib.suppress(BlockingIOError):
                        ended.recv(4096)
            _reap(children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path.parent, ignore_errors=True)  # Of a session that was killed.


def _import() -> None:
    if os.environ.get("PRETENDS"):
        from tests.gpu.device import pretend

        pretend()
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401

    import posttrain

    for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "PPOTrainer", "KTOTrainer", "RewardTrainer"):
        getattr(posttrain, name)
    import tests.methods.helpers  # noqa: F401 - and pytest, which `tests.conftest` imports
    import tests.ranks  # noqa: F401


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _received(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(line, 4, 64)
    (left,), pieces = struct.unpack("!I", head), []
    while left:
        pieces.append(line.recv(left))
        left -= len(pieces[-1])
    return json.loads(b"".join(pieces)), files


def _answer(line: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # Whoever asked has gone.
        line.sendall(b"%d\n" % number)


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        line = children.pop(pid)
        _answer(line, status)
        line.close()


def _become(
    files: list[int], targets: list[int], arguments: list[str], env: dict[str, str], cwd: str, leads: bool
) -> None:
    """Be the program ``python *arguments`` and never return."""
    code = 1
    try:
        if leads:
            os.setsid()
        # Above all targets first: one that was received may have the number that another is to have.
        aside = [fcntl.fcntl(file, fcntl.F_DUPFD, max(targets) + 1) for file in files]
        for file in files:
            os.close(file)
        for target, source in zip(targets, aside, strict=True):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        faulthandler.register(signal.SIGUSR1)
        _program(arguments)
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if "RANK" not in env:  # The threads of a rank's peers may be gone: their ends are never waited for.
            atexit._run_exitfuncs()
        os._exit(code & 0xFF)


def _program(arguments: list[str]) -> None:
    kind, what = (arguments[0], 1) if arguments[0] in ("-m", "-c") else ("", 0)
    sys.argv = arguments[what:]
    if kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
