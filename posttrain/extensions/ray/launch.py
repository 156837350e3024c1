"""`posttrain grpo --launcher ray`: run the trainer and rollout servers as Ray tasks in one placement group.

Ray reserves machines, sets the visible GPUs, forwards the output of the commands, and ends the commands when this process
ends. Each task runs `posttrain` in a child process and returns its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.cli import ranks
from posttrain.cli.launch_ray import STARTED, RayArguments
from posttrain.cli.parser import PosttrainArgumentParser
from posttrain.errors import ConfigError
from posttrain.extensions.serve.config import ServeConfig
from posttrain.extensions.server.replies import API_KEY_VARIABLE
from posttrain.extensions.vllm.engine import vllm_command
from posttrain.integrations import is_available, require
from posttrain.integrations.network import host_and_port

# Prefixes of environment variables that are passed to the tasks. Without this, Ray passes no variables to tasks.
PASSED_ON = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TRACKIO_", "POSTTRAIN_", "NCCL_", "PYTORCH_")
# Exit codes after SIGINT and SIGTERM: 128 plus the signal number, as in shells.
INTERRUPTED, TERMINATED = 130, 143
# Exit code EX_TEMPFAIL of sysexits.h. It means that the failure is temporary, so the same command may be started again.
LOST = 75
# Maximum number of seconds for the trainer to save after Ctrl-C, and for a server to stop.
SAVE_SECONDS = 15.0
# Option number from linux/prctl.h. It sets the signal that a child process receives when its parent ends.
PR_SET_PDEATHSIG = 1


@dataclass
class _Trained:
    """Training options that the launcher reads too."""

    model_name_or_path: str | None = None
    model_revision: str | None = None
    trust_remote_code: str | None = None
    num_processes: int = 1
    vllm_server_base_url: str | None = None
    vllm_mode: str | None = None
    worker_engine: str | None = None


class RayRun:
    """A training command with its rollout servers. It computes their command-line arguments and resources.

    Args:
        name: Name of the training command.
        argv: Arguments of the training command, including the options of `RayArguments`.
        served: Whether the training command can generate with rollout servers.

    Raises:
        ConfigError: The command or one of its options does not work with this launcher.
    """

    def __init__(self, name: str, argv: Sequence[str], served: bool) -> None:
        self.name, self.argv = name, list(argv)
        parser = PosttrainArgumentParser((RayArguments, _Trained), prog=f"posttrain {name} --launcher ray")
        self.options, self.trained, _ = parser.parse_args_and_config(self.argv, return_remaining_strings=True)
        # Use vLLM's server if vLLM is installed, else `posttrain serve`.
        self.serving = "vllm-serve" if is_available("vllm") else "serve"
        if not self.options.rollout_servers:
            return
        if not served:
            raise ConfigError(
                f"posttrain {name} does not generate with rollout servers. Fix: pass --rollout_servers 0 (trainer only)."
            )
        for field in ("vllm_server_base_url", "vllm_mode", "worker_engine"):
            if (value := getattr(self.trained, field)) is not None:
                raise ConfigError(
                    f"{field}={value!r} and --launcher ray both define where rollouts are generated. Fix: remove the option, "
                    "or pass --rollout_servers 0 to use your own servers."
                )
        if not self.trained.model_name_or_path:
            raise ConfigError("--model_name_or_path is missing. Fix: name the model to serve and train.")
        # Reject invalid server arguments before any task is placed.
        if self.serving == "vllm-serve":
            vllm_command(self.serve_arguments(), cpu=False)
        else:
            parser = PosttrainArgumentParser(ServeConfig, prog="rollout_server_args")
            parser.parse_args_and_config(self.serve_arguments())

    def serve_arguments(self, host: str = "127.0.0.1", port: int = 8000) -> list[str]:
        """Return the arguments of the command that starts a rollout server for the training command."""
        trained = self.trained
        options = {"model": trained.model_name_or_path, "host": host, "port": port, "revision": trained.model_revision}
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        words += ["--trust_remote_code"] if trained.trust_remote_code else []
        return [*words, *shlex.split(self.options.rollout_server_args)]

    def trainer_arguments(self, urls: Sequence[str]) -> list[str]:
        """Return the arguments of the training command, including the addresses of the rollout servers."""
        further: list[str] = []
        if urls and self.name == "async-grpo":
            further = ["--worker_engine", "server", "--vllm_server_base_url", *urls]
        elif urls:
            further = ["--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", ",".join(urls)]
        return [self.name, *self.argv, *further]

    def bundles(self, with_gpus: bool) -> list[dict[str, float]]:
        """Return the resources of the trainer, followed by the resources of each server. Each entry is a bundle of Ray's
        placement group.
        """
        options = self.options
        trainer = (options.trainer_cpus, options.trainer_gpus, self.trained.num_processes)
        server = (options.rollout_server_cpus, options.rollout_server_gpus, 1)
        return [
            {"CPU": cpus, "GPU": (default if with_gpus else 0) if gpus is None else gpus}
            for cpus, gpus, default in [trainer, *[server] * options.rollout_servers]
        ]


def _address() -> tuple[str, int]:
    """Return the address of this machine and a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(require("ray", "--launcher ray").util.get_node_ip_address()), int(probe.getsockname()[1])


def _run_command(arguments: Sequence[str], folder: str) -> int:
    """Run ``posttrain ARGUMENTS`` until it ends. If the Ray task is canceled, interrupt the command in the same way as
    Ctrl-C does.
    """
    # Unblock SIGINT. Ray blocks this signal in its workers, and the command would inherit the blocked signal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "posttrain.cli.main", *arguments]
    process = subprocess.Popen(command, cwd=folder, preexec_fn=_end_with_parent, start_new_session=True)
    try:
        while process.poll() is None:
            # Wait in short steps, because Ray's cancellation interrupts Python code but no blocking system calls.
            time.sleep(0.2)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(SAVE_SECONDS)
    finally:
        # Also kill all processes that the command has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(name: str, argv: list[str], served: bool) -> int:
    """Place servers and trainer on the Ray cluster, wait until the trainer ends, and end all tasks. See `RayRun` for the
    arguments.

    Returns:
        The trainer's exit code, or the exit code of the last server if all servers have ended. Exit code 75 means that a
        machine was lost, 130 means Ctrl-C, and 143 means SIGTERM.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: There is no Ray cluster, the cluster has too few resources, or two options contradict each other.
    """
    job = RayRun(name, argv, served)
    ray: Any = require("ray", "--launcher ray")
    address = job.options.ray_address
    # Disable Ray's deduplication of log lines, because it hides lines that several servers write.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        ray.init(address=address, **({"include_dashboard": False} if address == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster is available at ray_address={address!r}: {str(error).strip().splitlines()[0]} Fix: start one with "
            "'ray start --head', or pass --ray_address local for a cluster of this run only."
        ) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        return _Placed(ray, job).run()
    finally:
        # Wait a moment, because Ray forwards the last lines of output after the commands have ended.
        time.sleep(1.0)
        ray.shutdown()


class _Placed:
    """The Ray tasks of a run, in one placement group."""

    def __init__(self, ray: Any, job: RayRun) -> None:
        self.ray, self.job = ray, job
        env = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON) and key != ranks.EXIT_CODES}
        # Set an API key, so that other users of the cluster cannot replace the servers' weights.
        env |= {API_KEY_VARIABLE: os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32), STARTED: "1"}
        self.options = {"max_retries": 0, "runtime_env": {"env_vars": env}}
        self.bundles = job.bundles(ray.cluster_resources().get("GPU", 0) > 0)
        self.group = ray.util.placement_group(self.bundles, strategy=job.options.ray_placement)
        # An autoscaling cluster adds machines while this call waits.
        if not self.group.wait(job.options.ray_timeout):
            cpus, gpus = (sum(bundle[kind] for bundle in self.bundles) for kind in ("CPU", "GPU"))
            free = ray.available_resources()
            raise ConfigError(
                f"--launcher ray needs {cpus:g} CPUs and {gpus:g} GPUs for the trainer and {len(self.bundles) - 1} servers "
                f"(ray_placement={job.options.ray_placement!r}), but the Ray cluster has {free.get('CPU', 0):g} CPUs and "
                f"{free.get('GPU', 0):g} GPUs free after {job.options.ray_timeout:g} s. Fix: request less, or add machines."
            )

    def start(self, index: int, function: Any, *arguments: Any) -> Any:
        """Start a task with the resources of bundle ``index``. Bundle 0 belongs to the trainer. All other bundles belong to
        servers.
        """
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, index)
        takes = {"num_cpus": self.bundles[index]["CPU"], "num_gpus": self.bundles[index]["GPU"]}
        return self.ray.remote(scheduling_strategy=place, **takes, **self.options)(function).remote(*arguments)

    def run(self) -> int:
        """Start servers and trainer, wait for the trainer, and end all tasks. Return the exit code."""
        servers: dict[Any, str] = {}
        trainer: Any = None
        try:
            places = self.ray.get([self.start(index, _address) for index in range(len(self.bundles))])
            urls = []
            for index, (host, port) in enumerate(places[1:], start=1):
                # For servers on the trainer's own machine, weights are transferred through shared memory.
                host = "127.0.0.1" if host == places[0][0] else host
                urls.append(f"http://{host_and_port(host, port)}")
                words = [self.job.serving, *self.job.serve_arguments(host, port)]
                task = self.start(index, _run_command, words, os.getcwd())
                servers[task] = f"rollout server {index} ({urls[-1]})"
                print(f"posttrain: {servers[task]}", file=sys.stderr)
            # The trainer waits for its servers, for up to vllm_server_timeout seconds.
            trainer = self.start(0, _run_command, self.job.trainer_arguments(urls), os.getcwd())
            return self.follow(trainer, servers)
        except KeyboardInterrupt:
            print("posttrain: interrupted; the trainer finishes its step and saves a checkpoint", file=sys.stderr)
            return INTERRUPTED
        finally:
            # End the trainer first, because it may still need the servers while it saves.
            self.end([trainer] if trainer is not None else [])
            self.end(list(servers))

    def end(self, tasks: list[Any]) -> None:
        """Interrupt the tasks that are still running, and wait for them."""
        for task in tasks:
            self.ray.cancel(task)
        if tasks:
            self.ray.wait(tasks, num_returns=len(tasks), timeout=SAVE_SECONDS)

    def follow(self, main: Any, servers: dict[Any, str]) -> int:
        """Wait until the trainer ends, or until all servers have ended and it cannot continue. Return the exit code."""
        waiting = [main, *servers]
        while True:
            (ended,), waiting = self.ray.wait(waiting)
            try:
                code = int(self.ray.get(ended))
            except self.ray.exceptions.RayError as error:
                print(f"posttrain: error: a Ray task was lost: {str(error).splitlines()[0]}", file=sys.stderr)
                code = LOST
            if ended == main:
                return code
            print(f"posttrain: warning: {servers[ended]} ended with code {code}", file=sys.stderr)
            if waiting == [main]:
                return code or LOST
