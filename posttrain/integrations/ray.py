"""Commands on the machines of a Ray cluster: placed by what they need, read from here, ended with the process that asked."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.integrations import require

__all__ = ["CONFIG_FILE", "Command", "Need", "RayCluster", "State"]

logger = logging.getLogger(__name__)

CONFIG_FILE = "{config}"  # Stands for the path of the configuration that is sent along.
TAIL_LINES = 30  # Of stderr, kept for the message about a command that failed (system.md 1.2).
KEPT_CHARACTERS = 1 << 20  # Of output that nobody has fetched yet.
CONNECT_S, ANSWER_S = 5.0, 30.0  # Seconds for a first connection, and for an answer of an actor.
GRACE_S = 10.0  # Seconds a command has to end after it was asked to.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Need:
    """What one command takes of a machine.

    Attributes:
        name: For messages.
        cpus: Cores.
        gpus: Accelerators.
    """

    name: str
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass
class State:
    """What a command has said since it was asked last.

    Attributes:
        code: Its exit code; None while it runs.
        said: ``(1 for stdout or 2 for stderr, text)``, in order.
        tail: The last lines of its stderr.
        lost: Why its machine is gone; empty while it is there.
    """

    code: int | None = None
    said: list[tuple[int, str]] = field(default_factory=list)
    tail: str = ""
    lost: str = ""


class Machine:
    """The far side: runs one command where Ray has put this actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.said: deque[tuple[int, str]] = deque()
        self.lines: deque[str] = deque([""], maxlen=TAIL_LINES + 1)
        self.changed = threading.Condition()
        self.readers: list[threading.Thread] = []

    def address(self) -> str:
        """Of this machine, as Ray knows it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def free_port(self) -> int:
        """A port of this machine that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, arguments: Sequence[str], env: dict[str, str], folder: str, config: str | None) -> str:
        """Start ``python -m arguments``; returns why it cannot be, or nothing."""
        if not os.path.isdir(folder):
            return f"the working directory {folder!r} does not exist on {socket.gethostname()}: share it between all machines."
        words = list(arguments)
        if config is not None:
            path = Path(tempfile.mkdtemp(prefix="posttrain-")) / "config.yaml"
            path.write_text(config, encoding="utf-8")
            words = [str(path) if word == CONFIG_FILE else word for word in words]
        python = [sys.executable, "-m"]
        self.process = subprocess.Popen(
            [*python, "posttrain.integrations.leash", *python, *words],
            env=os.environ | env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for number, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            assert stream is not None
            self.readers.append(threading.Thread(target=self._read, args=(number, stream.fileno()), daemon=True))
            self.readers[-1].start()
        return ""

    def _read(self, number: int, source: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while data := os.read(source, 1 << 16):
            text = decoder.decode(data)
            with self.changed:
                self.said.append((number, text))
                while sum(len(one) for _, one in self.said) > KEPT_CHARACTERS:
                    self.said.popleft()
                if number == 2:
                    first, *others = text.split("\n")
                    self.lines[-1] += first
                    self.lines.extend(others)
                self.changed.notify_all()

    def poll(self, wait: float = 0.0) -> State:
        """What is new, after at most ``wait`` seconds."""
        if self.process is None:  # Never started: something else failed before.
            return State(0)
        deadline = time.monotonic() + wait
        with self.changed:
            while not self.said and self.process.poll() is None and time.monotonic() < deadline:
                self.changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
        code = self.process.poll()
        if code is not None:
            for reader in self.readers:
                reader.join(2.0)
        with self.changed:
            said = list(self.said)
            self.said.clear()
            shown = [line.rpartition("\r")[2] for line in self.lines if line.strip()]
        return State(code, said, "\n".join(shown[-TAIL_LINES:]))

    def healthy(self, url: str) -> bool:
        """Whether a rollout server answers at ``url`` that it can generate."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{url}/health", timeout=CONNECT_S) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send the command a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Command:
    """The near side of a `Machine`: a lost machine is a state, not an exception."""

    def __init__(self, ray: Any, actor: Any, need: Need) -> None:
        self.ray, self.actor, self.need = ray, actor, need
        self.address = self.url = self.lost = ""

    def __str__(self) -> str:
        return f"the {self.need.name} on {self.address}"

    def _ask(self, method: str, *arguments: Any, extra: float = 0.0) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(getattr(self.actor, method).remote(*arguments), timeout=ANSWER_S + extra)
        except errors.GetTimeoutError:
            return None  # Busy or cut off; Ray itself declares it lost when it is.
        except errors.RayActorError as error:
            self.lost = str(error).strip().splitlines()[0]
            return None

    def meet(self, timeout: float) -> None:
        """Wait until Ray has started the actor.

        Raises:
            ConfigError: It cannot be.
        """
        self.address = self._ask("address", extra=timeout) or ""
        if not self.address:
            why = self.lost or f"nothing was heard of it for {timeout:g} s."
            raise ConfigError(
                f"the {self.need.name} cannot be placed: {why} Is the same posttrain installed on all machines?"
            )

    def start(self, arguments: Sequence[str], env: dict[str, str], config: str | None = None) -> None:
        """Run ``python -m arguments`` in this working directory.

        Raises:
            ConfigError: That directory is not on the machine.
        """
        if not self.need.gpus:
            env = env | {"CUDA_VISIBLE_DEVICES": ""}
        problem = self._ask("start", list(arguments), env, os.getcwd(), config)
        if problem:
            raise ConfigError(f"{self}: {problem}")

    def free_port(self) -> int:
        """A port of its machine that nobody listens on."""
        return int(self._ask("free_port") or 0)

    def poll(self, wait: float = 0.0) -> State:
        """What is new, after at most ``wait`` seconds."""
        state = self._ask("poll", wait, extra=wait) or State()
        state.lost = self.lost
        return state

    def healthy(self) -> bool:
        """Whether a rollout server at `url` can generate."""
        return bool(self._ask("healthy", self.url))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal, if it runs."""
        if not self.lost:
            self._ask("stop", number)


class RayCluster:
    """A connection to Ray, and the commands that were placed through it; closing it ends them.

    Args:
        address: ``auto`` (of the environment, or of this machine), ``host:port``, or ``local``: a cluster for this run alone.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: No cluster answers there, or one of another version.
    """

    def __init__(self, address: str = "auto") -> None:
        self.ray: Any = require("ray", "--launcher ray")
        self.address, self.group = address, None
        self.commands: list[Command] = []
        if address.startswith("ray://"):
            raise ConfigError(
                f"ray_address={address!r} is for Ray's client, which this launcher does not speak. Run the command on a "
                "machine of the cluster with host:port of its head, or with 'ray job submit'."
            )
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or "auto"
        _check_reachable(address)
        local = {"include_dashboard": False} if address == "local" else {}
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(_no_cluster(address, error)) from error

    def has_gpus(self) -> bool:
        """Whether any machine has accelerators."""
        return self.ray.cluster_resources().get("GPU", 0) > 0

    def place(self, needs: Sequence[Need], strategy: str = "PACK", timeout: float = 300.0) -> list[Command]:
        """Reserve what all of them need together, and an actor for each.

        Args:
            needs: One a command.
            strategy: Of Ray's placement groups: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD.
            timeout: Seconds to wait for what others use.

        Raises:
            ConfigError: The cluster, or every single machine of it, has less; or it stays in use.
        """
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        check_fit(needs, machines, self.address)
        bundles = [{k: v for k, v in (("CPU", need.cpus), ("GPU", need.gpus)) if v} for need in needs]
        self.group = placement_group(bundles, strategy=strategy)
        if not self.group.wait(timeout):
            free = self.ray.available_resources()
            raise ConfigError(
                f"--launcher ray needs {_sum(needs)}, and for {timeout:g} s the Ray cluster at {self.address} has had "
                f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free (ray_placement={strategy!r}). Wait for other "
                "jobs, lower what is asked for, or raise ray_timeout."
            )
        kind = self.ray.remote(Machine)
        for index, need in enumerate(needs):
            where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
            actor = kind.options(
                num_cpus=need.cpus, num_gpus=need.gpus, max_concurrency=8, scheduling_strategy=where
            ).remote()
            self.commands.append(Command(self.ray, actor, need))
        for command in self.commands:
            command.meet(timeout)
        return self.commands

    def close(self) -> None:
        """End all commands, first gently, and leave the cluster."""
        try:
            for _ in range(2):  # A server lets requests end at the first; nobody waits for them any more.
                for command in self.commands:
                    command.stop(signal.SIGTERM)
                time.sleep(0.3 if self.commands else 0)
            deadline = time.monotonic() + GRACE_S
            for command in self.commands:
                while not command.lost and command.poll().code is None and time.monotonic() < deadline:
                    time.sleep(0.1)
                self.ray.kill(command.actor)  # Its leash ends what is left.
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)
        finally:
            self.commands = []
            with contextlib.suppress(Exception):
                self.ray.shutdown()


def check_fit(needs: Sequence[Need], machines: Sequence[dict[str, float]], address: str) -> None:
    """Refuse what could never be placed, with both numbers.

    Args:
        needs: One a command.
        machines: Resources of each machine, by Ray's names.
        address: Of the cluster, for messages.

    Raises:
        ConfigError: Too little in all, or on every single machine.

    >>> check_fit([Need("trainer", 2)], [{"CPU": 2.0}], "local")
    """
    for kind, asked in (("CPU", [n.cpus for n in needs]), ("GPU", [n.gpus for n in needs])):
        there = sum(machine.get(kind, 0.0) for machine in machines)
        if sum(asked) > there:
            raise ConfigError(
                f"--launcher ray needs {sum(asked):g} {kind}s ({_list(needs, asked)}), and the Ray cluster at {address} has "
                f"{there:g} on {len(machines)} machine{'s' if len(machines) != 1 else ''}. Lower trainer_{kind.lower()}s, "
                f"rollout_server_{kind.lower()}s or rollout_servers, or add machines with 'ray start --address=HEAD:6379'."
            )
    for need in needs:
        if not any(m.get("CPU", 0) >= need.cpus and m.get("GPU", 0) >= need.gpus for m in machines):
            largest = max(machines, key=lambda m: (m.get("GPU", 0), m.get("CPU", 0)), default={})
            raise ConfigError(
                f"the {need.name} needs {need.cpus:g} CPUs and {need.gpus:g} GPUs on one machine, and the largest of the Ray "
                f"cluster at {address} has {largest.get('CPU', 0):g} and {largest.get('GPU', 0):g}. Lower what it asks for."
            )


def _list(needs: Sequence[Need], asked: Sequence[float]) -> str:
    return ", ".join(f"{need.name} {count:g}" for need, count in zip(needs, asked, strict=True))


def _sum(needs: Sequence[Need]) -> str:
    return f"{sum(n.cpus for n in needs):g} CPUs and {sum(n.gpus for n in needs):g} GPUs"


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"no Ray cluster can be used at ray_address={address!r}: {said} Start one with 'ray start --head --port=6379' and give "
        "its HOST:6379, or use --ray_address local for one on this machine that ends with the run."
    )
