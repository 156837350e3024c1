"""Harnesses: run episodes of a user's agent, which calls the policy's endpoint, and convert the episodes to rollouts."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from posttrain.errors import ArgumentTypeError, ConfigError, DataError, RewardError, RolloutError
from posttrain.extensions.agents.session import CapturedCall, Recorded, Session, read_sessions, record_session
from posttrain.integrations import require
from posttrain.metrics import Metric, mean
from posttrain.rollouts.episodes.toolbox import ToolRunner, TooSlow
from posttrain.types import Rollout

if TYPE_CHECKING:
    from posttrain.extensions.agents.calls import Policy
    from posttrain.extensions.agents.proxy import CaptureProxy, Sample
    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

Run = Callable[..., Any] | str | Sequence[str]
# Interval in seconds at which the runner looks for finished episodes.
LOOK_S = 0.05
# Maximum number of characters of a command's output that an error message quotes.
TAIL = 500
# Maximum number of bytes that are read from the end of a command's stdout and of its stderr.
OUTPUT_READ = 1 << 20
# Maximum size in bytes of any file that a command writes, including its stdout and stderr.
LARGEST_FILE = 1 << 30
# Environment variables that are passed to a command. Access tokens of the Hub and of trackers are not passed.
VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "XDG_*",
    "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "NODE_PATH", "JAVA_HOME", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "*_proxy", "*_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
)  # fmt: skip
# A row is passed in an environment variable only if it has fewer characters. Linux allows 128 KiB per variable.
LONGEST_VARIABLE = 100_000


@dataclass
class Harness:
    """An agent with its training options. Trainers accept a `Harness`, or only the agent's function or command.

    Args:
        run: Function or command of the agent. A function ``f(task, base_url, api_key) -> result`` can be synchronous or
            asynchronous. It also receives ``model`` and ``seed`` if it has parameters with these names. ``seed`` is the
            same for all episodes of a group. A command receives ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and
            ``OPENAI_MODEL`` as environment variables, and the row as JSON on its standard input. The variable
            ``POSTTRAIN_TASK`` also contains the row if it has fewer than 100,000 characters. The last line of the command's
            output is the result, as JSON or text.
        credit: Function ``f(session) -> [number]`` that returns one factor per branch of ``session.branches()``. The
            advantage of the episode is multiplied by the factor of the branch. None: all factors are 1.
        trains: Function ``f(call) -> bool`` that returns whether the tokens of a call contribute to the loss. Tokens of
            all other calls are only context. None: all calls contribute.
        requires: Whether an episode that returns None is treated as failed. With the reward function `harness_reward`, such
            an episode is always treated as failed.
        close: Function that is called when training ends, even after an error.
        keeps: Function ``f(calls) -> calls`` that selects the answered calls that belong to the agent. All other calls
            are only context. None: all calls belong to the agent.

    >>> Harness(["my-agent", "--once"]).command
    ['my-agent', '--once']
    """

    run: Run
    credit: Callable[[Session], Sequence[float]] | None = None
    trains: Callable[[CapturedCall], bool] | None = None
    requires: bool = False
    keeps: Callable[[list[CapturedCall]], list[CapturedCall]] | None = None
    close: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if callable(self.run):
            return
        words = [self.run] if isinstance(self.run, str) else self.run
        if not isinstance(words, Sequence) or not words or not all(isinstance(word, str) and word for word in words):
            raise ArgumentTypeError(
                f"harness must be a function (task, base_url, api_key) or a command line, but is {self.run!r:.80}."
            )

    @classmethod
    def of(cls, given: object) -> Harness:
        """Convert the trainer's argument ``harness`` to a `Harness`."""
        return given if isinstance(given, Harness) else cls(given)

    @property
    def command(self) -> list[str] | None:
        """The command line, or None for a function. A string is run by a shell."""
        if callable(self.run):
            return None
        return ["/bin/sh", "-c", self.run] if isinstance(self.run, str) else list(self.run)


def replayed(path: str | Path) -> Harness:
    """Return a harness that replays recorded episodes. A trainer can then be debugged without the agent and without sampling.

    The recorded episodes of a row are used in the order of the file. Sampled ids, log-probs and weight versions come from the
    file, so training is off-policy if the policy has changed since the recording.

    Args:
        path: File written by ``harness_record``.

    Raises:
        DataError: The file does not exist, or a line is not a recorded session.
    """
    return _Replay(list(read_sessions(path)), str(path))


class _Replay(Harness):
    """Harness that replays recorded episodes."""

    def __init__(self, episodes: Sequence[Recorded], path: str) -> None:
        super().__init__(self._never)
        self.path = path
        self.waiting: dict[str, list[Recorded]] = {}
        for episode in episodes:
            self.waiting.setdefault(_task_key(episode.task), []).append(episode)

    def _never(self, task: Any, base_url: str, api_key: str) -> Any:
        raise NotImplementedError("a recorded episode does not call the harness")

    def next(self, row: Mapping[str, Any]) -> HarnessEpisode:
        """Return the next recorded episode for a row. After the last episode of the row, start again with the first one."""
        recorded = self.waiting.get(_task_key(row))
        if not recorded:
            raise DataError(
                f"{self.path} has no episode for the row {dict(row)!r:.120}, only for {len(self.waiting)} other rows. "
                "Fix: train on the dataset with which the file was recorded."
            )
        episode = recorded.pop(0)
        recorded.append(episode)
        return HarnessEpisode(dict(row), episode.session, episode.result, episode.error)


def _task_key(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), sort_keys=True, default=str)


def _plain(value: object) -> Any:
    """Remove keys with the value None. A dataset adds such keys to rows that lack a key of other rows."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def harness_reward(completions: Sequence[Any], harness_result: Sequence[Any], **_: Any) -> list[float | None]:
    """Return the results of harness episodes as rewards. A result is a number, or a mapping with the key ``reward``. A failed
    episode has the reward None.

    Raises:
        RewardError: A result is not a number.
    """
    return [None if result is None else _number(result) for result in harness_result]


def _number(result: Any) -> float:
    value = result.get("reward") if isinstance(result, Mapping) else getattr(result, "reward", result)
    if isinstance(value, bool | int | float):
        return float(value)
    with contextlib.suppress(TypeError, ValueError):
        return float(value)  # type: ignore[arg-type]
    raise RewardError(
        f"the harness returned {result!r:.80}, which is neither a number nor a mapping with 'reward'. Fix: return a "
        "number, or pass reward_funcs that read harness_result."
    )


def _recorded(result: object) -> object:
    """Convert a result for a JSON file. Another object than text, numbers, lists and mappings is replaced by its reward or
    None.
    """
    if result is None or isinstance(result, str | int | float | Mapping | list | tuple):
        return result
    with contextlib.suppress(RewardError):
        return {"reward": _number(result)}
    return None


@dataclass(slots=True)
class HarnessEpisode:
    """One episode: a run of a harness on one dataset row.

    Attributes:
        task: Dataset row that the harness received.
        session: Calls that the harness sent to the endpoint.
        result: Return value of the harness.
        error: Error message. None: the episode succeeded.
    """

    task: dict[str, Any]
    session: Session
    result: Any = None
    error: str | None = None


@dataclass
class HarnessOptions:
    """Options of a `HarnessRunner`: a picklable copy of the config fields in `HarnessFields`."""

    limit: int = 16
    timeout: float | None = 600.0
    failure: float | None = None
    overrides: bool = False
    model: str = "policy"
    host: str = "127.0.0.1"
    port: int = 0
    call_timeout: float = 600.0
    max_calls: int | None = None
    max_tokens: int | None = None
    env: list[str] | None = None
    record: str | None = None

    @classmethod
    def of(cls, args: PostTrainingConfig) -> HarnessOptions:
        """Return the harness options of a config. Return the defaults if ``args`` is None."""
        if args is None:
            return cls()
        return cls(
            limit=args.harness_limit,
            timeout=args.harness_timeout,
            failure=args.harness_failure,
            model=args.harness_model,
            host=args.harness_host,
            port=args.harness_port,
            call_timeout=args.harness_call_timeout,
            max_calls=args.harness_max_calls,
            max_tokens=args.harness_max_tokens,
            env=args.harness_env,
            record=args.harness_record,
            overrides=args.harness_sampling == "override",
        )


class HarnessRunner:
    """Runs one episode of a harness per row. Episodes run concurrently in threads. The thread that calls `run` owns the
    engine and answers the calls of all episodes.

    Args:
        harness: `Harness`, function or command of the agent.
        options: Options of the runner. None: the defaults.

    Attributes:
        proxy: Endpoint of the policy. None before the first episode.
    """

    def __init__(self, harness: object, options: HarnessOptions | None = None) -> None:
        for package in ("fastapi", "uvicorn", "pydantic"):
            require(package, "harness")
        self.harness, self.options = Harness.of(harness), options or HarnessOptions()
        self.proxy: CaptureProxy | None = None
        self._runner = ToolRunner(timeout=self.options.timeout)
        # Maps each running command to the API key of its episode.
        self._commands: dict[subprocess.Popen, str] = {}
        self._lock = threading.Lock()

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        policy: Policy,
        sample: Sample,
        *,
        per_request: bool = True,
        any_process: Callable[[bool], bool] = bool,
        everyone: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
        place: int = 0,
    ) -> list[HarnessEpisode]:
        """Run one episode per row, and return them in the order of the rows.

        Args:
            rows: Tasks of the episodes.
            seeds: Seed of each episode. Episodes with equal seeds sample differently, because their sampling also depends
                on the position of the row among the rows of all processes.
            policy: Model that answers the calls, with limits for calls.
            sample: Function that runs the engine. It is called on this thread, and equally often in every process.
            per_request: Whether the engine supports different sampling settings for each request.
            any_process: Function that receives whether this process has unfinished episodes, and returns whether
                any process has unfinished episodes.
            everyone: Function that gathers the rows of all processes. None: there is only one process.
            place: Position of this process's first row among the rows of all processes.

        Raises:
            Any error that ``sample`` raises. All episodes are ended before the error is raised.
        """
        if isinstance(self.harness, _Replay):
            # All processes read the same replay file in the same order, but each process uses different episodes of the file.
            shared = list(rows) if everyone is None else everyone(list(rows))
            return [self.harness.next(row) for row in shared][place : place + len(rows)]
        proxy, number = self._listening(policy), 0
        # Seed of an engine call, for engines that do not support a seed per request. It differs between processes, because
        # the completions of one group can be on several processes.
        call_seed = ((seeds[0] if seeds else 0) * 1_000_003 + place * 100_003) % 2**31
        begun: list[HarnessEpisode] = []
        futures: list[Future[HarnessEpisode]] = []
        try:
            for index, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                begun.append(HarnessEpisode(row, proxy.open(seed * 1_000_003 + place + index)))
                futures.append(Future())
                futures[-1].add_done_callback(lambda _: proxy.queue.wake())
            self._start(proxy, deque(zip(futures, begun, seeds, strict=True)))
            while any_process(not all(future.done() for future in futures)):
                proxy.queue.wait(LOOK_S)
                number += 1
                proxy.queue.answer(sample, per_request=per_request, seed=call_seed + number)
        except BaseException:
            self._abandon(proxy, begun, futures)
            raise
        episodes = [future.result() for future in futures]
        if self.options.record is not None:
            for episode in episodes:
                record_session(
                    self.options.record,
                    Recorded(episode.task, episode.session, _recorded(episode.result), episode.error),
                )
        return episodes

    def close(self) -> None:
        """Stop the endpoint, and kill all running commands."""
        if self.proxy is not None:
            self.proxy.stop()
            self.proxy = None
        for process, key in list(self._commands.items()):
            _kill(process, key)
        if self.harness.close is not None:
            self.harness.close()

    def _listening(self, policy: Policy) -> CaptureProxy:
        from posttrain.extensions.agents.proxy import CaptureProxy

        with self._lock:
            if self.proxy is None:
                self.proxy = CaptureProxy(policy, host=self.options.host, port=self.options.port).start()
                logger.info("the policy %r is served to harnesses at %s", policy.model, self.proxy.url)
            self.proxy.policy = policy
            return self.proxy

    def _abandon(self, proxy: CaptureProxy, begun: Sequence[HarnessEpisode], futures: Sequence[Future]) -> None:
        for future in futures:
            future.cancel()
        for episode in begun:
            proxy.end(episode.session)
        keys = {episode.session.key for episode in begun}
        with self._lock:
            running = {process: key for process, key in self._commands.items() if key in keys}
        for process, key in running.items():
            _kill(process, key)

    def _start(self, proxy: CaptureProxy, waiting: deque[tuple[Future[HarnessEpisode], HarnessEpisode, int]]) -> None:
        """Start daemon threads for waiting episodes, until ``limit`` episodes run concurrently."""

        def work() -> None:
            while waiting:
                with contextlib.suppress(IndexError):
                    future, episode, seed = waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        try:
                            future.set_result(self._episode(proxy, episode, seed))
                        except BaseException as error:
                            future.set_exception(error)

        for _ in range(min(self.options.limit, len(waiting))):
            threading.Thread(target=work, daemon=True, name="harness").start()

    def _episode(self, proxy: CaptureProxy, episode: HarnessEpisode, seed: int) -> HarnessEpisode:
        session, row = episode.session, episode.task
        try:
            command = self.harness.command
            if command is None:
                episode.result = self._called(proxy, session, row, seed)
            else:
                episode.result = self._commanded(command, proxy, session, row, seed)
        except TooSlow:
            episode.error = f"TimeoutError: the episode took longer than harness_timeout={self.options.timeout:g} s"
        except Exception as error:
            episode.error = f"{type(error).__name__}: {error}"
        finally:
            proxy.end(session)
        if episode.error is None and session.counts.answered + session.counts.retried == 0:
            episode.error = (
                "NoCall: the harness never called the policy" if session.counts.received == 0 else _refusals(session)
            )
        if episode.error is None and episode.result is None and self.harness.requires:
            episode.error = "NoResult: the harness returned None"
        return episode

    def _called(self, proxy: CaptureProxy, session: Session, row: dict[str, Any], seed: int) -> Any:
        """Call the harness's function, which can be synchronous or asynchronous, with a time limit."""
        function: Any = self.harness.run
        named = {"model": self.options.model, "seed": seed}
        parameters = _parameters(function)
        keywords = {name: value for name, value in named.items() if parameters is None or name in parameters}

        def call() -> Any:
            return function(row, proxy.url, session.key, **keywords)

        return self._runner.call(call, {})

    def _commanded(
        self, command: list[str], proxy: CaptureProxy, session: Session, row: dict[str, Any], seed: int
    ) -> Any:
        """Run the harness's command. When the command ends, kill all processes that it started."""
        task = json.dumps(row, default=str)
        named = {"OPENAI_BASE_URL": proxy.url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": self.options.model}
        named |= {"POSTTRAIN_SEED": str(seed)} | ({"POSTTRAIN_TASK": task} if len(task) < LONGEST_VARIABLE else {})
        patterns = (*VARIABLES, *(self.options.env or ()))
        passed = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}
        # `ulimit -f` expects the file size in blocks of 512 bytes.
        bounded = ["/bin/sh", "-c", f'ulimit -f {LARGEST_FILE // 512} 2>/dev/null; exec "$@"', "sh", *command]
        with contextlib.ExitStack() as stack:
            # Write the output to files instead of pipes. A child process that runs longer than the command would keep a
            # pipe open, and reading from the pipe would block.
            stdin, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            stdin.write(task.encode())
            stdin.seek(0)
            process = subprocess.Popen(
                bounded, env=passed | named, start_new_session=True, stdin=stdin, stdout=out, stderr=err
            )
            with self._lock:
                self._commands[process] = session.key
            try:
                process.wait(self.options.timeout)
            except subprocess.TimeoutExpired as error:
                raise TooSlow from error
            finally:
                _kill(process, session.key)
                with self._lock:
                    self._commands.pop(process, None)
            output, complaint = (_last_output(file) for file in (out, err))
            cut = out.seek(0, os.SEEK_END) > OUTPUT_READ
        if process.returncode:
            raise RolloutError(f"{command[0]!r} ended with exit code {process.returncode}: {complaint.strip()[-TAIL:]}")
        lines = [line for line in output.split("\n") if line.strip()]
        if not lines:
            return None
        if cut and len(lines) == 1:
            raise RolloutError(
                f"the last line of the output of {command[0]!r}, which is the result, is longer than {OUTPUT_READ} bytes. "
                "Fix: print a shorter last line."
            )
        with contextlib.suppress(ValueError):
            return json.loads(lines[-1])
        return lines[-1].rstrip("\r")


def _last_output(file: IO[bytes]) -> str:
    """Return the last `OUTPUT_READ` bytes of a file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_READ))
    return file.read().decode(errors="replace")


def _kill(process: subprocess.Popen, key: str) -> None:
    """Kill a command and its process group. On Linux, also kill all processes whose environment contains the episode's key."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    until = time.monotonic() + 5
    # Repeat until no process with this key is left, because a process may start another process just before it is killed.
    while (left := _having(f"OPENAI_API_KEY={key}".encode())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _having(variable: bytes) -> list[int]:
    """Return the ids of this user's processes whose environment contains ``variable`` (``NAME=VALUE``)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pids += [int(path.parent.name)] if variable in path.read_bytes().split(b"\0") else []
    return pids


def _refusals(session: Session) -> str:
    counts = {
        name: count for name, count in asdict(session.counts).items() if count and name not in ("received", "tokens")
    }
    return f"NoAnswer: none of the {session.counts.received} calls of the harness was answered ({counts})"


def _parameters(function: Any) -> set[str] | None:
    """Return the names of a function's parameters after the first three. Return None if it accepts any keyword argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(list(parameters)[3:])


# Rollouts ------------------------------------------------------------------------------------------------------------------


@dataclass
class HarnessRollouts:
    """Rollouts and additional columns that `as_rollouts` returns. All lists have one entry per episode.

    Attributes:
        rollouts: First branch of each episode as a rollout. ``Rollout.branches`` contains all further branches. The rollout
            of an excluded episode has no tokens.
        completions: Messages of each episode, which reward functions receive.
        extra: Additional columns for reward functions: ``harness_result``, ``harness_error`` and ``session``.
        metrics: Metrics to log.
    """

    rollouts: list[Rollout]
    completions: list[Any]
    extra: dict[str, list[Any]]
    metrics: dict[str, Metric] = field(default_factory=dict)


def as_rollouts(
    episodes: Sequence[HarnessEpisode], harness: Harness, *, placeholder: int, leave_out: bool
) -> HarnessRollouts:
    """Convert episodes to rollouts. Log the number of failed episodes and the first error.

    Args:
        episodes: Episodes in order.
        harness: Harness with the functions ``credit``, ``trains`` and ``keeps`` to apply.
        placeholder: Token id that is the prompt of an episode without tokens.
        leave_out: Whether failed episodes are excluded from training.

    Raises:
        RolloutError: ``credit`` did not return one number per branch.
    """
    rollouts, completions = [], []
    for episode in episodes:
        rollout = None if episode.error is not None and leave_out else _rollout(episode, harness)
        if rollout is None:
            rollout = Rollout([placeholder], [], [], "abort")
        rollouts.append(rollout)
        completions.append(episode.session.messages() or [{"role": "assistant", "content": ""}])
    failed = Counter((episode.error or "").split(":")[0] for episode in episodes if episode.error is not None)
    if failed:
        first = next(episode.error for episode in episodes if episode.error is not None)
        logger.warning(
            "%d of %d episodes of the harness failed (%s) and are %s. The first error: %s",
            failed.total(), len(episodes), ", ".join(f"{count} {name}" for name, count in failed.most_common()),
            "excluded from training" if leave_out else "used with the reward harness_failure", first,
        )  # fmt: skip
    extra = {
        "harness_result": [None if episode.error is not None else episode.result for episode in episodes],
        "harness_error": [episode.error for episode in episodes],
        "session": [episode.session for episode in episodes],
    }
    return HarnessRollouts(rollouts, completions, extra, _metrics(episodes))


def _rollout(episode: HarnessEpisode, harness: Harness) -> Rollout | None:
    session = episode.session
    branches = session.branches()
    credits: list[float] = [1.0] * len(branches)
    if harness.credit is not None:
        credits = [float(value) for value in harness.credit(session)]
        if len(credits) != len(branches):
            raise RolloutError(
                f"the harness's credit returned {len(credits)} numbers for {len(branches)} branches. Fix: return one "
                "number per branch of session.branches()."
            )
    trained, rollouts = _kept(session, harness), []
    for branch, credit in zip(branches, credits, strict=True):
        rollout = replace(branch.episode.rollout(), credit=credit)
        if trained is not None:
            rollout = replace(rollout, tool_mask=_filtered(branch.calls, rollout, session, trained))
        if rollout.token_ids:
            rollouts.append(rollout)
    if not rollouts:
        return None
    text = "\n\n".join(session.calls[n].answers[c].get("content") or "" for b in branches for n, c in b.calls)
    return replace(rollouts[0], branches=tuple(rollouts[1:]), text=text)


def _kept(session: Session, harness: Harness) -> set[int] | None:
    """Return the numbers of the calls that contribute to the loss. Return None if all calls contribute."""
    if harness.keeps is None and harness.trains is None:
        return None
    calls = [call for call in session.calls if call.state == "answered"]
    calls = calls if harness.keeps is None else list(harness.keeps(calls))
    return {call.number for call in calls if harness.trains is None or harness.trains(call)}


def _filtered(calls: Sequence[tuple[int, int]], rollout: Rollout, session: Session, kept: set[int]) -> list[int]:
    """Return the loss mask of a branch. The mask is 0 for tokens of calls that are not in ``kept``."""
    mask = list(rollout.tool_mask or [1] * len(rollout.token_ids))
    for number, choice in calls:
        call = session.calls[number]
        start = len(call.prompt_ids) - len(rollout.prompt_ids)
        if number not in kept:
            count = len(call.completions[choice].token_ids)
            mask[start : start + count] = [0] * count
    return mask


def _metrics(episodes: Sequence[HarnessEpisode]) -> dict[str, Metric]:
    """Compute metrics of episodes: the numbers of calls, branches and failures. ``harness/tokens_once_share`` is the number
    of tokens in the prefix trees, divided by the number of tokens of all calls.
    """
    n = max(len(episodes), 1)
    totals = Counter[str]()
    for episode in episodes:
        totals.update(asdict(episode.session.counts))
    answered = [episode.session for episode in episodes if episode.session.counts.answered]
    branches = sum(len(session.branches()) for session in answered)
    seen, once = sum(s.tokens_seen() for s in answered), sum(s.tokens_once() for s in answered)
    metrics = {
        f"harness/{name}": mean(totals[name] / n, weight=n) for name in ("answered", "retried", "cancelled", "refused")
    }
    return metrics | {
        "harness/failed_episodes": mean(sum(episode.error is not None for episode in episodes) / n, weight=n),
        "harness/failed_calls": mean(totals["failed"] / n, weight=n),
        "harness/branches": mean(branches / max(len(answered), 1), weight=max(len(answered), 1)),
        "harness/tokens_once_share": mean(once / max(seen, 1), weight=max(seen, 1)),
    }


def take_harness(worker: Any, harness: Any, reward_funcs: Any) -> tuple[Any, Harness | None, Any]:
    """Separate a trainer's arguments into a rollout worker and a harness. A `HarnessRolloutWorker` is treated as a harness.

    Args:
        worker: The trainer's argument ``rollout_worker``.
        harness: The trainer's argument ``harness``.
        reward_funcs: Reward functions. If there is a harness and ``reward_funcs`` is None, `harness_reward` is used.

    Returns:
        The worker, the harness, and the reward functions.

    Raises:
        ConfigError: ``worker`` and ``harness`` are both a harness.
    """
    if isinstance(worker, Harness):
        if harness is not None:
            raise ConfigError("rollout_worker is a harness, but harness is set as well. Fix: pass only one of them.")
        worker, harness = None, worker
    if harness is None:
        return worker, None, reward_funcs
    as_harness = Harness.of(harness)
    functions = [harness_reward] if reward_funcs is None else reward_funcs
    listed = functions if isinstance(functions, list | tuple) else [functions]
    as_harness.requires = as_harness.requires or harness_reward in listed
    return worker, as_harness, functions


def check_harness(args: PostTrainingConfig, name: str) -> None:
    """Raise an error for settings that cannot be used with a harness.

    Raises:
        ConfigError: A setting is not supported.
        MissingDependencyError: The packages of the extra ``serve`` are not installed.
    """
    for package in ("fastapi", "uvicorn"):
        require(package, "harness= (an endpoint of the policy)")
    if args is not None and args.dynamic_sampling:
        raise ConfigError(
            f"{name}: dynamic_sampling={args.dynamic_sampling} cannot be used with a harness, because groups without "
            "variance would need additional episodes while other episodes wait. Fix: set dynamic_sampling=0."
        )
