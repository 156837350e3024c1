"""`posttrain grpo --launcher ray`: rollout servers and trainer on the machines of a Ray cluster, one command for all."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from posttrain.cli.parser import PosttrainArgumentParser, _split_config, load_config, to_tokens
from posttrain.errors import ConfigError, RolloutServerError, check_choice, did_you_mean
from posttrain.integrations import is_available
from posttrain.rollouts.server.replies import API_KEY_VARIABLE

if TYPE_CHECKING:
    from posttrain.integrations.ray import Command, RayCluster, State

__all__ = ["SERVED", "RayArguments", "is_wanted", "run", "split"]

# Commands that can generate with rollout servers.
SERVED = ("grpo", "gmpo", "a2po", "rloo", "online-dpo", "async-grpo")
PASSED_ON = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TRACKIO_", "POSTTRAIN_", "NCCL_", "PYTORCH_")
INTERRUPTED, TERMINATED = 130, 143  # 128 and SIGINT, SIGTERM, as a shell says it.
PATIENCE = 15.0  # Seconds that the trainer has to save after Ctrl-C.
LOST = 75  # EX_TEMPFAIL of sysexits.h: the same run may be started again.


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RayArguments:
    """Options of ``--launcher ray``; on the command line or in the config file beside those of the training."""

    launcher: Literal["ray"] = _help("ray: start servers and trainer on a Ray cluster.", "ray")
    ray_address: str = _help(
        "auto: that of $RAY_ADDRESS, or of this machine; host:port; local: one for this run.", "auto"
    )
    ray_placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = _help(
        "How commands are laid over machines: on few, on many, on one, each on its own.", "PACK"
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


def is_wanted(argv: Sequence[str]) -> bool:
    """Whether a launcher is named on the command line or in its config file."""
    rest, path = _split_config(list(argv))
    return any(t.split("=")[0] == "--launcher" for t in rest) or (path is not None and "launcher" in load_config(path))


def split(tokens: Sequence[str], name: str = "COMMAND") -> tuple[RayArguments, list[str]]:
    """The launcher's options among ``tokens``, and all other tokens in their order."""
    parser = PosttrainArgumentParser(RayArguments, prog=f"posttrain {name} --launcher ray")
    options, left = parser.parse_args_and_config(tokens, return_remaining_strings=True)
    return options, left


@dataclass
class Plan:
    """A training command, taken apart.

    Attributes:
        name: Of the command.
        options: Where it shall run.
        tokens: The trainer's own arguments.
        config: Its config file without ``options``; None where there is none.
    """

    name: str
    options: RayArguments
    tokens: list[str]
    config: dict[str, Any] | None

    @classmethod
    def of(cls, name: str, argv: Sequence[str]) -> Plan:
        """Split ``argv``.

        Raises:
            ConfigError: A command or options that cannot be run so.
        """
        tokens, path = _split_config(list(argv))
        config = None if path is None else load_config(path)
        own = {item.name for item in fields(RayArguments)}
        given = [token for key in own & set(config or {}) for token in to_tokens(key, (config or {})[key])]
        options, left = split(given + tokens, name)
        if config is not None:
            config = {key: value for key, value in config.items() if key not in own}
        plan = cls(name, options, left, config)
        plan._check()
        return plan

    def _check(self) -> None:
        if self.options.rollout_servers and self.name not in SERVED:
            raise ConfigError(
                f"posttrain {self.name} does not generate with rollout servers{did_you_mean(self.name, SERVED)}: use "
                f"--rollout_servers 0 to place the trainer alone. With servers: {', '.join(SERVED)}."
            )
        if self.options.rollout_servers:
            taken = [n for n in ("vllm_server_base_url", "vllm_mode", "worker_engine") if self.value(n) is not None]
            if taken:
                raise ConfigError(
                    f"{taken[0]}={self.value(taken[0])!r} and --launcher ray both say where rollouts come from. Leave it out, or "
                    "use --rollout_servers 0 to keep your own servers."
                )
            self.check_serving()

    def value(self, name: str) -> str | None:
        """What the trainer is given for an option; the command line wins."""
        found = (self.config or {}).get(name)
        flags = (f"--{name}", f"--{name.replace('_', '-')}")
        for index, token in enumerate(self.tokens):
            flag, equals, value = token.partition("=")
            if flag in flags:
                found = value if equals else next(iter(self.tokens[index + 1 : index + 2]), None)
        return None if found is None else str(found)

    @property
    def serving(self) -> str:
        """The command that serves: vLLM's own server where vLLM is installed."""
        return "vllm-serve" if is_available("vllm") else "serve"

    def serve_arguments(self, host: str, port: int) -> list[str]:
        """Of the command that serves, for this training."""
        model = self.value("model_name_or_path")
        if not model:
            raise ConfigError("--model_name_or_path is missing: which model shall be served and trained?")
        words = ["--model", model, "--host", host, "--port", str(port)]
        for ours, theirs in (("model_revision", "revision"), ("trust_remote_code", "trust_remote_code")):
            if self.value(ours) is None or (self.serving == "vllm-serve" and str(self.value(ours)).lower() == "false"):
                continue
            # A flag of vLLM takes no value.
            flag = self.serving == "vllm-serve" and theirs == "trust_remote_code"
            words += [f"--{theirs}"] if flag else [f"--{theirs}", str(self.value(ours))]
        return words + shlex.split(self.options.rollout_server_args)

    def check_serving(self) -> None:
        """Refuse wrong arguments of servers here, before anything is placed."""
        from posttrain.serve.server import ServeConfig, vllm_command

        words = self.serve_arguments("127.0.0.1", 0)
        if self.serving == "vllm-serve":
            vllm_command(words, cpu=False)
        else:
            PosttrainArgumentParser(ServeConfig, prog="rollout_server_args").parse_args_and_config(words)

    def _devices(self) -> float:
        """GPUs of one server: those that vLLM spreads its model over."""
        words, count = shlex.split(self.options.rollout_server_args.replace("=", " ")), 1.0
        for name, value in itertools.pairwise(words):
            if name.replace("_", "-") in ("--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"):
                count *= float(value)
        return count

    def trainer_arguments(self, urls: Sequence[str]) -> list[str]:
        """Of the training command, with the servers' addresses."""
        from posttrain.integrations.ray import CONFIG_FILE

        words = [self.name, *(["--config", CONFIG_FILE] if self.config is not None else []), *self.tokens]
        if urls and self.name == "async-grpo":
            return [*words, "--worker_engine", "server", "--vllm_server_base_url", *urls]
        if urls:
            return [*words, "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", ",".join(urls)]
        return words

    def needs(self, with_gpus: bool) -> list[Any]:
        """What the trainer takes, then each server."""
        from posttrain.integrations.ray import Need

        options, server, trainer = self.options, self.options.rollout_server_gpus, self.options.trainer_gpus
        if server is None:
            server = self._devices() if with_gpus and options.rollout_servers else 0.0
        if trainer is None:
            trainer = float(self.value("num_processes") or 1) if with_gpus else 0.0
        servers = [
            Need(f"rollout server {i + 1}", options.rollout_server_cpus, server) for i in range(options.rollout_servers)
        ]
        return [Need("trainer", options.trainer_cpus, trainer), *servers]


def run(name: str, argv: list[str]) -> int:
    """Place servers and trainer, follow the trainer, and take all of it down.

    Args:
        name: A training command.
        argv: Its arguments, with those of `RayArguments`.

    Returns:
        The trainer's exit code; 75 where its machine was lost; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: No cluster, too little in it, or options that cannot work.
        RolloutServerError: A server ended, or was not healthy in time; with its exit code and its last lines.
    """
    plan = Plan.of(name, argv)
    from posttrain.integrations.ray import RayCluster

    cluster = RayCluster(plan.options.ray_address)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(plan, cluster)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cluster.close()
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _run(plan: Plan, cluster: RayCluster) -> int:
    options = plan.options
    trainer, *servers = cluster.place(plan.needs(cluster.has_gpus()), options.ray_placement, options.ray_timeout)
    env = _environment()
    for server in servers:
        host = "127.0.0.1" if server.address == trainer.address else server.address  # There, memory can be shared.
        port = server.free_port()
        server.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server.start(["posttrain.cli.main", plan.serving, *plan.serve_arguments(host, port)], env)
        _say(f"{server}: {server.url}")
    _wait_healthy(servers, options.ray_timeout)
    config = None if plan.config is None else _yaml(plan.config)
    urls = [server.url for server in servers]
    trainer.start(["posttrain.cli.main", *plan.trainer_arguments(urls)], env, config)
    _say(f"{trainer}: posttrain {plan.name}")
    try:
        return _follow(trainer, servers)
    except KeyboardInterrupt:
        _say("interrupted; the trainer ends its step and saves")
        trainer.stop(signal.SIGINT)
        _follow(trainer, servers, time.monotonic() + PATIENCE)
        return INTERRUPTED


def _wait_healthy(servers: Sequence[Command], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            state = server.poll()
            if state.code is not None or state.lost:
                raise _ended(server, state)
            if server.healthy():
                _say(f"{server} is healthy")
                waiting.remove(server)
            elif time.monotonic() > deadline:
                late = f"{server} is not healthy after {timeout:g} s. Raise ray_timeout, or read why:"
                raise RolloutServerError(late, url=server.url, log_tail=state.tail)
        if waiting:
            time.sleep(0.5)


def _ended(server: Command, state: State) -> RolloutServerError:
    how = f"was lost: {state.lost}" if state.lost else f"ended with code {state.code}"
    error = RolloutServerError(f"{server} {how}", url=server.url, log_tail=state.tail)
    error.exit_code = LOST if state.lost else (state.code or 1)  # type: ignore[misc]
    return error


def _follow(trainer: Command, servers: Sequence[Command], deadline: float = float("inf")) -> int:
    """Show what the trainer says until it ends; servers that end meanwhile are told, the trainer decides what follows."""
    running = list(servers)
    while time.monotonic() < deadline:
        state = trainer.poll(1.0)
        for stream, text in state.said:
            target = sys.stdout if stream == 1 else sys.stderr
            target.write(text)
            target.flush()
        if state.lost:
            _say(f"error: {trainer} was lost: {state.lost}")
            return LOST
        if state.code is not None:
            if state.code:
                _say(f"error: {trainer} ended with code {state.code}")
            return state.code
        for server in list(running):
            found = server.poll()
            if found.code is not None or found.lost:
                running.remove(server)
                _say(f"warning: {_ended(server, found)}")
    return INTERRUPTED


def _environment() -> dict[str, str]:
    """What the commands take over from here, with a token that keeps others from the servers' weights."""
    passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
    passed.pop("POSTTRAIN_EXIT_CODES", None)
    return passed | {API_KEY_VARIABLE: os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)}


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False))


def _say(text: str) -> None:
    sys.stderr.write(f"posttrain: {text}\n")
    sys.stderr.flush()
