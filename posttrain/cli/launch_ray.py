"""`posttrain grpo --launcher ray`: rollout servers and trainer as Ray tasks in one placement group.

Ray reserves the machines, sets the visible GPUs, shows what the commands print and ends them with this process. A command
is a task that runs `posttrain` in a child process and returns its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from posttrain.cli.parser import PosttrainArgumentParser, load_config, split_config
from posttrain.errors import ConfigError, RolloutServerError, check_choice, did_you_mean
from posttrain.integrations import is_available, require
from posttrain.rollouts.server.replies import API_KEY_VARIABLE

__all__ = ["SERVED", "RayArguments", "RayRun", "is_wanted", "run", "split"]

# Commands that can generate with rollout servers.
SERVED = (
    "grpo", "gmpo", "a2po", "rloo", "online-dpo", "async-grpo",
    "distill", "distillation", "gkd", "gold", "minillm", "iw-opd", "sdft", "sdpo", "ssd",
)  # fmt: skip
# Beginnings of the environment variables that go along; Ray passes on no others.
PASSED_ON = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TRACKIO_", "POSTTRAIN_", "NCCL_", "PYTORCH_")
# Set in the trainer that this launcher starts, so that the same options do not start another launcher.
STARTED = "POSTTRAIN_STARTED_BY_RAY"
# 128 and SIGINT, SIGTERM, as a shell reports them.
INTERRUPTED, TERMINATED = 130, 143
# EX_TEMPFAIL of sysexits.h: the same run may be started again.
LOST = 75
# Seconds that the trainer has to save after Ctrl-C, and a server to end.
PATIENCE = 15.0
# Seconds in which Ray forwards what a command has printed.
LOGS_S = 1.0
# linux/prctl.h: the signal that a child gets when its parent dies.
PR_SET_PDEATHSIG = 1


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RayArguments:
    """Options of ``--launcher ray``, on the command line or in the config file with those of the training."""

    launcher: Literal["ray"] = _help("ray: start servers and trainer on a Ray cluster.", "ray")
    ray_address: str = _help(
        "auto: that of $RAY_ADDRESS, or of this machine; host:port; local: one for this run.", "auto"
    )
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = _help(
        "Placement over machines: on few, on many, on one, each command on its own.", "PACK"
    )
    ray_timeout: float = _help("Seconds to wait for machines, and again for servers to be healthy.", 900.0)
    rollout_servers: int = _help("Rollout servers; 0: the trainer generates itself.", 1)
    rollout_server_args: str = _help("More options of the servers, in one text: '--max_num_seqs 128'.", "")
    rollout_server_cpus: float = _help("Cores of each server.", 1.0)
    rollout_server_gpus: float | None = _help(
        "GPUs of each server; None: one a copy and shard, none without GPUs.", None
    )
    trainer_cpus: float = _help("Cores of the trainer, all its processes together.", 1.0)
    trainer_gpus: float | None = _help("GPUs of the trainer; None: --num_processes, or 1; none without GPUs.", None)

    def __post_init__(self) -> None:
        check_choice("launcher", self.launcher, ("ray",))
        for name in ("rollout_servers", "rollout_server_gpus", "trainer_gpus"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more.")
        for name in ("ray_timeout", "rollout_server_cpus", "trainer_cpus"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")


@dataclass
class _Trained:
    """The options of the training that the launcher reads too."""

    model_name_or_path: str | None = None
    model_revision: str | None = None
    trust_remote_code: str | None = None
    num_processes: int = 1
    vllm_server_base_url: str | None = None
    vllm_mode: str | None = None
    worker_engine: str | None = None


def is_wanted(argv: Sequence[str]) -> bool:
    """Whether the command line or its config file names a launcher, and this is not the trainer that it started."""
    rest, path = split_config(argv)
    named = any(token.split("=")[0] == "--launcher" for token in rest)
    return STARTED not in os.environ and (named or (path is not None and "launcher" in load_config(path)))


def split(tokens: Sequence[str], name: str = "COMMAND") -> tuple[RayArguments, list[str]]:
    """The launcher's options among ``tokens``, and all other tokens in their order."""
    parser = PosttrainArgumentParser(RayArguments, prog=f"posttrain {name} --launcher ray")
    options, left = parser.parse_args_and_config(tokens, return_remaining_strings=True)
    return options, left


class RayRun:
    """A training command with its servers: what each takes, and with which arguments it starts.

    Args:
        name: Of the training command.
        argv: Its arguments, with those of `RayArguments`.

    Raises:
        ConfigError: A command or options that cannot be run this way.
    """

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name, self.argv = name, list(argv)
        parser = PosttrainArgumentParser((RayArguments, _Trained), prog=f"posttrain {name} --launcher ray")
        self.options, self.trained, _ = parser.parse_args_and_config(self.argv, return_remaining_strings=True)
        if not self.options.rollout_servers:
            return
        if name not in SERVED:
            raise ConfigError(
                f"posttrain {name} does not generate with rollout servers{did_you_mean(name, SERVED)}. Fix: use "
                f"--rollout_servers 0 to place the trainer alone, or one of {', '.join(SERVED)}."
            )
        for option in ("vllm_server_base_url", "vllm_mode", "worker_engine"):
            if getattr(self.trained, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self.trained, option)!r} and --launcher ray both say where rollouts come from. Fix: "
                    "leave it out, or use --rollout_servers 0 to keep your own servers."
                )
        if not self.trained.model_name_or_path:
            raise ConfigError("--model_name_or_path is missing: which model shall be served and trained?")
        self.check_serving()

    @property
    def serving(self) -> str:
        """The command that serves: vLLM's own server where vLLM is installed."""
        return "vllm-serve" if is_available("vllm") else "serve"

    def serve_arguments(self, host: str = "127.0.0.1", port: int = 8000) -> list[str]:
        """Of the command that serves, for this training."""
        given = self.trained
        options = {"model": given.model_name_or_path, "host": host, "port": port, "revision": given.model_revision}
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        if given.trust_remote_code:
            # A flag of vLLM takes no value.
            words += ["--trust_remote_code"] if self.serving == "vllm-serve" else ["--trust_remote_code", "True"]
        return [*words, *shlex.split(self.options.rollout_server_args)]

    def check_serving(self) -> None:
        """Refuse wrong arguments of servers here, before anything is placed."""
        from posttrain.serve.server import ServeConfig, vllm_command

        if self.serving == "vllm-serve":
            vllm_command(self.serve_arguments(), cpu=False)
        else:
            PosttrainArgumentParser(ServeConfig, prog="rollout_server_args").parse_args_and_config(
                self.serve_arguments()
            )

    def _devices(self) -> float:
        """GPUs of one server: those that vLLM spreads its model over."""
        words, count = shlex.split(self.options.rollout_server_args.replace("=", " ")), 1.0
        for name, value in itertools.pairwise(words):
            if name.replace("_", "-") in ("--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"):
                count *= float(value)
        return count

    def trainer_arguments(self, urls: Sequence[str]) -> list[str]:
        """Of the training command, with the servers' addresses."""
        words = [self.name, *self.argv]
        if urls and self.name == "async-grpo":
            return [*words, "--worker_engine", "server", "--vllm_server_base_url", *urls]
        if urls:
            return [*words, "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", ",".join(urls)]
        return words

    def bundles(self, with_gpus: bool) -> list[dict[str, float]]:
        """Resources of the trainer, then of each server, for Ray's placement group."""
        options, server, trainer = self.options, self.options.rollout_server_gpus, self.options.trainer_gpus
        if server is None and with_gpus and options.rollout_servers:
            server = self._devices()
        if trainer is None and with_gpus:
            trainer = float(self.trained.num_processes)
        needs = [(options.trainer_cpus, trainer), *[(options.rollout_server_cpus, server)] * options.rollout_servers]
        return [{"CPU": cpus, "GPU": float(gpus)} if gpus else {"CPU": cpus} for cpus, gpus in needs]


# On the machines of the cluster -----------------------------------------------------------------------------------------


def _address() -> tuple[str, int]:
    """Of this machine, with a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(require("ray", "--launcher ray").util.get_node_ip_address()), int(probe.getsockname()[1])


def _wait_healthy(urls: Sequence[str], seconds: float) -> str:
    """Wait until every server answers; returns the first that does not, or nothing."""
    opener, deadline = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + seconds
    for url in urls:
        while True:
            try:
                opener.open(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    return url
                time.sleep(0.5)
    return ""


def _run_command(arguments: Sequence[str], env: dict[str, str], folder: str) -> int:
    """Run ``posttrain ARGUMENTS`` until it ends or the task is cancelled, which interrupts it as Ctrl-C does."""
    # Ray blocks Ctrl-C in its workers, and children would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "posttrain.cli.main", *arguments]
    process = subprocess.Popen(
        command, env=os.environ | env, cwd=folder, preexec_fn=_end_with_parent, start_new_session=True
    )
    try:
        while process.poll() is None:
            # Ray's cancellation interrupts Python, not a system call that blocks.
            time.sleep(0.2)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait(PATIENCE)
    finally:
        # With the processes that it started itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# From here -------------------------------------------------------------------------------------------------------------


def run(name: str, argv: list[str]) -> int:
    """Place servers and trainer, wait for the trainer, and end all of it.

    Args:
        name: A training command.
        argv: Its arguments, with those of `RayArguments`.

    Returns:
        The trainer's exit code; 75 where its machine was lost; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: No cluster, too little in it, or options that cannot work.
        RolloutServerError: A server was not healthy in time.
        SystemExit: A server ended before the trainer began; with its exit code.
    """
    job = RayRun(name, argv)
    ray: Any = require("ray", "--launcher ray")
    address = job.options.ray_address
    # Equal lines of several servers are all meant.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        ray.init(address=address, **({"include_dashboard": False} if address == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster can be used at ray_address={address!r}: {str(error).strip().splitlines()[0]} Fix: start one with "
            "'ray start --head --port=6379' and give its HOST:6379, or use --ray_address local for one of this run."
        ) from error
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _Placed(ray, job).run()
    finally:
        signal.signal(signal.SIGTERM, before)
        # Ray forwards the last lines of the commands a moment after they end.
        time.sleep(LOGS_S)
        ray.shutdown()


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


class _Placed:
    """The tasks of a run in their placement group."""

    def __init__(self, ray: Any, job: RayRun) -> None:
        self.ray, self.job, self.running = ray, job, []
        there, options = ray.cluster_resources(), job.options
        self.bundles = job.bundles(there.get("GPU", 0) > 0)
        needed = {kind: sum(bundle.get(kind, 0) for bundle in self.bundles) for kind in ("CPU", "GPU")}
        fits = all(count <= there.get(kind, 0) for kind, count in needed.items())
        self.group = ray.util.placement_group(self.bundles, strategy=options.ray_placement) if fits else None
        if self.group is None or not self.group.wait(options.ray_timeout):
            has = there if self.group is None else ray.available_resources()
            raise ConfigError(
                f"--launcher ray needs {_resources(needed)} for the trainer and {len(self.bundles) - 1} servers "
                f"(ray_placement={options.ray_placement!r}), and the Ray cluster at {options.ray_address} has {_resources(has)}"
                f"{' free' if self.group else ''}. Fix: lower the CPUs or GPUs of trainer or servers, or add machines."
            )

    def start(self, index: int, function: Any, *arguments: Any) -> Any:
        """A task with the resources of one bundle: 0 is the trainer's, the others are the servers'."""
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, index)
        takes = {"num_cpus": self.bundles[index]["CPU"], "num_gpus": self.bundles[index].get("GPU", 0)}
        return self.ray.remote(max_retries=0, scheduling_strategy=place, **takes)(function).remote(*arguments)

    def command(self, index: int, arguments: Sequence[str]) -> Any:
        """A posttrain command as a task."""
        passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        passed |= {API_KEY_VARIABLE: self.key, STARTED: "1"}
        passed.pop("POSTTRAIN_EXIT_CODES", None)
        if not self.bundles[index].get("GPU"):
            passed["CUDA_VISIBLE_DEVICES"] = ""
        self.running.append(self.start(index, _run_command, list(arguments), passed, os.getcwd()))
        return self.running[-1]

    def run(self) -> int:
        """Start everything, wait for the trainer, end everything."""
        # Keeps other users of the cluster from replacing the servers' weights.
        self.key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
        trainer = None
        try:
            urls, servers = self.start_servers()
            trainer = self.command(0, self.job.trainer_arguments(urls))
            return self.follow(trainer, servers)
        except KeyboardInterrupt:
            _say("interrupted; the trainer ends its step and saves")
            return INTERRUPTED
        finally:
            # The trainer first: it may still need its servers to save.
            for tasks in ([trainer] if trainer is not None else [], self.running):
                for task in tasks:
                    self.ray.cancel(task)
                self.ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE) if tasks else None

    def start_servers(self) -> tuple[list[str], dict[Any, str]]:
        """Addresses, and names by task, once all of them are healthy."""
        places = self.ray.get([self.start(index, _address) for index in range(len(self.bundles))])
        urls, servers = [], {}
        for index, (host, port) in enumerate(places[1:], start=1):
            # On the trainer's own machine, weights go through shared memory.
            host = "127.0.0.1" if host == places[0][0] else f"[{host}]" if ":" in host else host
            task = self.command(index, ["serve", *self.job.serve_arguments(host.strip("[]"), port)])
            urls.append(f"http://{host}:{port}")
            servers[task] = f"rollout server {index} ({urls[-1]})"
            _say(servers[task])
        health = self.start(0, _wait_healthy, urls, self.job.options.ray_timeout)
        (first,), _ = self.ray.wait([health, *servers])
        if first in servers:
            code = self.code(first)
            _say(f"error: {servers[first]} ended with code {code} before it was healthy; its output above says why")
            raise SystemExit(code or 1)
        if late := self.ray.get(health):
            raise RolloutServerError(
                f"{late} is not healthy after {self.job.options.ray_timeout:g} s. Fix: raise ray_timeout.", url=late
            )
        return urls, servers

    def follow(self, trainer: Any, servers: dict[Any, str]) -> int:
        """Wait for the trainer; it decides what follows when a server ends."""
        waiting = [trainer, *servers]
        while True:
            (ended,), waiting = self.ray.wait(waiting)
            code = self.code(ended)
            if ended == trainer:
                return code
            _say(f"warning: {servers[ended]} ended with code {code}")

    def code(self, task: Any) -> int:
        """Exit code of a command that has ended; 75 where its machine or worker was lost."""
        try:
            return int(self.ray.get(task))
        except self.ray.exceptions.RayError as error:
            _say(f"error: a command was lost: {str(error).strip().splitlines()[0]}")
            return LOST


def _resources(counts: Mapping[str, float]) -> str:
    return f"{counts.get('CPU', 0):g} CPUs and {counts.get('GPU', 0):g} GPUs"


def _say(text: str) -> None:
    sys.stderr.write(f"posttrain: {text}\n")
    sys.stderr.flush()
