"""Training commands such as `posttrain sft` and `posttrain grpo`. A command creates a trainer from a config and trains the
model. Training runs in the process of the command or with `accelerate launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from posttrain import plugins
from posttrain.cli import launch_ray, ranks
from posttrain.cli.commands import TRAINING
from posttrain.errors import CheckpointError, ConfigError, PosttrainError, did_you_mean, raised_at
from posttrain.fields import config, option
from posttrain.integrations import require

if TYPE_CHECKING:
    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)


def named_object(path: str, option: str) -> Any:
    """Import the object ``module.name``, ``module:name`` or ``folder/file.py:name``. Modules in the working directory can be
    imported too.

    Args:
        path: Path of the object, e.g. ``module.name``.
        option: Name of the command-line option, used in error messages.

    Raises:
        ConfigError: The file, module or name does not exist, or importing it fails.
    """
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), name, option)
    module, _, name = path.replace(":", ".").rpartition(".")
    if path.endswith(".py") or not module:
        raise ConfigError(
            f"{option}: {path!r} is not the path of a Python object. Fix: pass module.name, or file.py:name."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}: {path!r} cannot be imported from {os.getcwd()}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{option}: {module!r} raised an error during import: {error!r} ({raised_at(error)})"
        ) from error
    return _member(imported, name, module, option)


def _from_file(file: Path, name: str, option: str) -> Any:
    if not file.is_file():
        raise ConfigError(f"{option}: the file {str(file)!r} does not exist (from {os.getcwd()}).")
    file = file.resolve()
    loaded = sys.modules.get(file.stem)
    # Reuse a loaded module. Importing the same file a second time would create different function objects, which cannot be
    # sent to worker processes.
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return _member(loaded, name, str(file), option)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module, because worker processes find the function by its module name.
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.path.remove(str(file.parent))
        # Remove the module, because it is only partially initialized after a failed import.
        if sys.modules.get(file.stem) is module:
            del sys.modules[file.stem]
        raise ConfigError(
            f"{option}: {str(file)!r} raised an error during import: {error!r} ({raised_at(error)})"
        ) from error
    return _member(module, name, str(file), option)


def _member(module: Any, name: str, where: str, option: str) -> Any:
    if not hasattr(module, name):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{option}: {where!r} has no {name!r}{did_you_mean(name, callables)}. It defines {sorted(callables)}."
        )
    return getattr(module, name)


def resume_from(config: Any) -> Any:
    """Convert the option ``resume_from_checkpoint`` (true, false, auto or a path) to the argument of `Trainer.train` with
    this name.
    """
    resume = config.resume_from_checkpoint
    word = str(resume).lower()
    if word in ("auto", "false"):
        # Reset the field, because callbacks read it. If the trainer finds a checkpoint, it sets the field to its path.
        config.resume_from_checkpoint = None
    return {"true": True, "false": None, "auto": "auto"}.get(word, resume)


def reward_functions(script_args: Any) -> list[Any]:
    """Return the rewards that the options select. The reward model comes first, if it is set, followed by the reward
    functions.
    """
    from posttrain.rewards import REWARDS

    functions: list[Any] = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    for name in script_args.reward_funcs or []:
        if name in REWARDS:
            functions.append(REWARDS[name]())
        elif "." in name or ":" in name:
            functions.append(_callable(named_object(name, "reward_funcs"), name, "reward_funcs"))
        else:
            raise ConfigError(
                f"reward_funcs: {name!r} is not known{did_you_mean(name, REWARDS)}. Fix: use one of {sorted(REWARDS)}, a dotted "
                "path module.function, or file.py:function."
            )
    return functions


def ppo_parts(script_args: Any, config: Any) -> dict[str, Any]:
    """Return PPO's arguments for rewards and value model. If no rewards are set, ``reward_model_path`` is both the reward
    model and the default value model.
    """
    rewards, value = reward_functions(script_args), script_args.value_model_name_or_path
    if rewards:
        return {"reward_model": rewards, "value_model": value}
    return {"reward_model": config.reward_model_path, "value_model": value or config.reward_model_path}


def episode_parts(script_args: Any) -> dict[str, Any]:
    """Import the tools, the environment factory and the rollout function whose paths are set in the options."""
    parts: dict[str, Any] = {}
    if script_args.tools:
        parts["tools"] = [_callable(named_object(name, "tools"), name, "tools") for name in script_args.tools]
    named = {"environment_factory": script_args.environment_factory, "rollout_func": script_args.rollout_func}
    for part, name in named.items():
        if name:
            parts[part] = _callable(named_object(name, part), name, part)
    return parts


def _callable(value: Any, name: str, option: str) -> Callable:
    if not callable(value):
        raise ConfigError(f"{option}: {name!r} is a {type(value).__name__}, but must be a function or class.")
    return value


# Exit code after Ctrl-C: 128 + SIGINT, as in shells.
INTERRUPTED = 130
# Maximum time in seconds that processes get to save a checkpoint after Ctrl-C.
SAVE_SECONDS = 15.0
CONFIGS = Path(__file__).parent / "accelerate_configs"
# Loggers whose INFO messages are shown on the terminal.
LOGGERS_SHOWN = ("posttrain.loop.prompts", "posttrain.loop.reward_watch", "posttrain.rewards.runner")


@config
class ScriptArguments:
    """Arguments that select the dataset."""

    # Scripts still read this option of older releases, so it remains as a class attribute.
    gradient_checkpointing_use_reentrant: ClassVar[bool] = False

    dataset_name: str | None = option(None, "Hub id of a dataset, a folder, or a .jsonl, .json, .csv or .parquet file.")
    dataset_config: str | None = option(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Read rows during training instead of loading the whole dataset first.")
    ignore_bias_buffers: bool = option(False, "Do not broadcast boolean buffers of the model in DDP.")


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """Arguments that select the dataset and the rewards."""

    reward_model_name_or_path: str | None = option(None, "Sequence-classification model to use as reward.")
    reward_funcs: list[str] | None = option(
        None, "Names of built-in rewards, or functions: module.function, file.py:function."
    )


@dataclass
class EpisodeScriptArguments(GRPOScriptArguments):
    """Arguments that select the dataset, the rewards, and tools or environments for rollouts."""

    tools: list[str] | None = option(None, "Functions that the model can call: module.function, or file.py:function.")
    environment_factory: str | None = option(
        None, "Class or function that creates an environment. A dataset is then optional."
    )
    rollout_func: str | None = option(
        None,
        "Function f(prompts, trainer) that samples completions instead of the engine: module.function, or file.py:function.",
    )


@dataclass
class JudgedScriptArguments(GRPOScriptArguments):
    """Arguments that select the dataset, and the rewards or judge that rank two completions."""

    judge_url: str | None = option(
        None, "URL of a judge model with OpenAI's API, for example http://host:8000/v1. The judge replaces the rewards."
    )
    judge_model: str = option("judge", "Name of the judge model on the server at judge_url.")


@dataclass
class PPOScriptArguments(GRPOScriptArguments):
    """Arguments that select the dataset, the rewards, and the value model."""

    value_model_name_or_path: str | None = option(
        None,
        "Sequence-classification model used as value model. None: a value head on the policy's transformer layers.",
    )


def parser_for(name: str) -> Any:
    """Return the parser of a training command."""
    from posttrain.cli.parser import PosttrainArgumentParser
    from posttrain.data.mixture import DatasetMixtureConfig
    from posttrain.models.load import ModelConfig

    command = TRAINING[name]
    rewarded = command.plugin is not None and command.trainer.METHOD.traits.samples
    script_args = GRPOScriptArguments if rewarded else globals()[command.script_args]
    types = (script_args, command.config, ModelConfig, DatasetMixtureConfig)
    # The configs of asynchronous trainers and `ModelConfig` both declare dtype. With "resolve", the parser uses the
    # definition that is added last.
    shared = {"conflict_handler": "resolve"} if name.startswith("async-") else {}
    return PosttrainArgumentParser(types, prog=f"posttrain {name}", **shared)


def parse(name: str, argv: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Parse the arguments of a training command. Return the parsed arguments, and the options of ``accelerate launch``.

    Raises:
        ConfigError: An option is unknown.
    """
    from posttrain.loop.run import with_attributes
    from posttrain.methods.config import LAUNCHED

    launch: list[str] = []

    @contextlib.contextmanager
    def launching(strings: list[str]) -> Iterator[None]:
        # Options of the config file come first, so that options of the command line override them.
        rest, flags = _accelerate_shortcut(strings)
        launch.extend(flags + _launch_flags(rest, name))
        # Hide accelerate's warnings about launch options, because the launch itself logs them later.
        with with_attributes(logging.getLogger("accelerate.commands.launch"), {"disabled": True}):
            processes = launched(launch)[0] if launch and "LOCAL_RANK" not in os.environ else 0
        token = LAUNCHED.set(processes)
        try:
            yield
        finally:
            LAUNCHED.reset(token)

    *parsed, _ = parser_for(name).parse_args_and_config(list(argv), return_remaining_strings=True, around=launching)
    return parsed, launch


def run(name: str, argv: list[str]) -> int:
    """Run a training command with ``argv``.

    By default, training runs in the current process. With options of ``accelerate launch`` or ``--accelerate_config``,
    several processes are started. With ``--launcher ray``, rollout servers and the trainer are started on a Ray cluster.
    """
    if launch_ray.is_wanted(argv):
        return plugins.module("extensions.ray.launch").run(name, argv, TRAINING[name].asks_servers)
    parsed, launch = parse(name, argv)
    if launch and "LOCAL_RANK" not in os.environ and ranks.EXIT_CODES not in os.environ:
        return _launch(name, argv, launch)
    for shown in LOGGERS_SHOWN:
        logging.getLogger(shown).setLevel(logging.INFO)
    for library in ("transformers", "huggingface_hub", "datasets", "accelerate"):
        # Remove the log handlers of libraries. These handlers would write each log line a second time and overwrite progress
        # bars.
        logging.getLogger(library).handlers, logging.getLogger(library).propagate = [], True
    return INTERRUPTED if train(name, *parsed) else 0


def train(name: str, script_args: Any, config: Any, model_args: Any, mixture: Any) -> bool:
    """Create the trainer of a command, train the model, save it, and upload it if requested. Return whether Ctrl-C ended
    training early.
    """
    import transformers

    from posttrain.loop.checkpoint import last_complete_checkpoint
    from posttrain.report.progress import resume_command, use_rich_progress

    resume = resume_from(config)
    trainer = make_trainer(name, script_args, config, model_args, mixture)
    use_rich_progress(trainer)
    # Disable transformers' progress bars, because every saved checkpoint would show one.
    transformers.utils.logging.disable_progress_bar()
    try:
        trainer.train(resume_from_checkpoint=resume)
    # Convert SystemExit to an error. Otherwise, the program would end as if training had finished.
    except SystemExit as stop:
        raise PosttrainError(
            f"sys.exit({stop.code!r}) at {raised_at(stop)} ended the run at step {trainer.state.global_step}. Fix: instead of "
            "calling sys.exit, raise an error that describes the problem, or return."
        ) from stop
    except Exception as error:
        # Add a hint to errors during training. Errors about the checkpoint itself already contain a fix.
        if (
            not isinstance(error, CheckpointError)
            and (last := last_complete_checkpoint(config.output_dir))
            and trainer.state.global_step
        ):
            error.add_note(
                f"Last checkpoint: {last}\nTo continue:  {resume_command()}\nTo see the traceback: --traceback"
            )
        raise
    interrupted = trainer.interrupt.requested
    if interrupted and trainer.state.global_step < trainer.state.max_steps:
        # Do not save the partially trained model as the result, because it is already saved as a checkpoint.
        return True
    trainer.save_model(config.output_dir)
    if config.push_to_hub and not interrupted:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return interrupted


def make_trainer(
    name: str, script_args: Any, config: Any, model_args: Any, mixture: Any, *, kind: Callable[..., Any] | None = None
) -> Any:
    """Load the data and the model, and return the trainer of a command.

    Args:
        name: Name of the command.
        script_args: Arguments about the data.
        config: Config of the trainer.
        model_args: Arguments about the model.
        mixture: Datasets of a mixture.
        kind: Trainer class. None: the trainer class of the command.

    Raises:
        ConfigError: ``eval_strategy`` requires a test split, but the data has none.
    """
    import torch
    import transformers

    from posttrain.models.load import get_peft_config, get_quantization_config

    model = model_source(model_args, config)
    init_kwargs = dict(config.model_init_kwargs or {})
    config.model_init_kwargs = model_args.model_init_kwargs(config.trust_remote_code) | init_kwargs
    data = _datasets(script_args, mixture, config)
    strategy = transformers.IntervalStrategy(config.eval_strategy).value
    evaluate = strategy != "no"
    if evaluate and script_args.dataset_test_split not in data:
        raise ConfigError(
            f"eval_strategy={strategy!r} needs a split {script_args.dataset_test_split!r}, but the data has "
            f"{sorted(data)}. Fix: set dataset_test_split or test_split_size, or set eval_strategy to 'no'."
        )
    extra = _parts(script_args, config)
    trainer = (kind or TRAINING[name].trainer)(
        model=model,
        args=config,
        train_dataset=data.get(_train_split(script_args, mixture)),
        eval_dataset=data[script_args.dataset_test_split] if evaluate else None,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        **extra,
    )
    if script_args.ignore_bias_buffers:
        names = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        trainer.model._ddp_params_and_buffers_to_ignore = names
    return trainer


def model_source(model_args: Any, config: Any) -> str:
    """Return the path or Hub id of the model to train.

    Raises:
        ConfigError: No model is set.
    """
    source = model_args.model_name_or_path or config.sft_model_path
    if not source:
        raise ConfigError("--model_name_or_path is missing. Fix: set it to the folder or Hub id of the model to train.")
    return source


def _train_split(script_args: Any, mixture: Any) -> str:
    return "train" if mixture.datasets else script_args.dataset_train_split


def _parts(script_args: Any, config: Any) -> dict[str, Any]:
    """Return the method-specific arguments of the trainer, e.g. rewards, tools and judge."""
    if isinstance(script_args, PPOScriptArguments):
        return ppo_parts(script_args, config)
    if not isinstance(script_args, GRPOScriptArguments):
        return {}
    extra: dict[str, Any] = {"reward_funcs": reward_functions(script_args) or None}
    if isinstance(script_args, EpisodeScriptArguments):
        extra |= episode_parts(script_args)
    if isinstance(script_args, JudgedScriptArguments) and script_args.judge_url:
        kind = plugins.module("extensions.rewards.openai_judge").OpenAIPairwiseJudge
        judge = kind(script_args.judge_model, base_url=script_args.judge_url, max_requests=None)
        extra["judge"] = judge
    return extra


def _datasets(script_args: Any, mixture: Any, config: Any) -> Any:
    """Load the data that the options select, as a mapping from split names to datasets."""
    from posttrain.data.mixture import get_dataset, load_rows, split_off

    if mixture.datasets:
        if script_args.dataset_name:
            logger.warning("dataset_name=%r is ignored, because datasets is set.", script_args.dataset_name)
        return get_dataset(mixture, seed=config.seed)
    if not script_args.dataset_name:
        if isinstance(script_args, EpisodeScriptArguments) and script_args.environment_factory:
            return {}  # The environment provides the prompts, so no dataset is loaded.
        raise ConfigError(
            "neither --dataset_name nor datasets is set. Fix: set --dataset_name to a Hub id, a folder or a file."
        )
    data = load_rows(script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)
    data = data if isinstance(data, dict) else {"train": data}
    if script_args.dataset_train_split not in data:
        raise ConfigError(
            f"dataset_train_split={script_args.dataset_train_split!r} is not a split of the data, which has the splits "
            f"{sorted(data)}."
        )
    if mixture.test_split_size is None:
        return data
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if test in data:
        raise ConfigError(
            f"test_split_size={mixture.test_split_size} would create a split {test!r}, but the data already has one. Fix: "
            "remove test_split_size."
        )
    parts = split_off(data[train], mixture.test_split_size, config.seed)
    return {**data, train: parts["train"], test: parts["test"]}


def _accelerate_shortcut(argv: list[str]) -> tuple[list[str], list[str]]:
    """Convert ``--accelerate_config name`` to ``--config_file path`` of ``accelerate launch``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", "--accelerate-config")
    parsed, rest = parser.parse_known_args(argv)
    name = parsed.accelerate_config
    if name is None:
        return argv, []
    packaged = CONFIGS / f"{'multi_gpu' if name == 'ddp' else name}.yaml"
    path = Path(name) if Path(name).is_file() else packaged
    if not path.is_file():
        names = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
        raise ConfigError(f"--accelerate_config {name} is not a file or one of {names}{did_you_mean(name, names)}.")
    flags = ["--config_file", str(path)]
    if path == packaged and not any(t.startswith(("--num_processes", "--num-processes")) for t in argv):
        import torch

        flags += ["--num_processes", str(max(1, torch.cuda.device_count()) if name != "single_gpu" else 1)]
    return rest, flags


def _launch_flags(rest: list[str], name: str) -> list[str]:
    """Check that the remaining tokens are options of ``accelerate launch``, and raise an error for unknown options."""
    if not rest:
        return []
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    flags = {option for action in parser._actions for option in action.option_strings}
    # Remove options of the Ray launcher. Commands such as ``check`` receive these options as part of the training command.
    if "--launcher" in rest:
        rest = launch_ray.other_options(rest)
    fields = parser_for(name).fields
    for token in rest:
        flag = token.split("=")[0]
        if flag.startswith("--") and flag not in flags:
            bare = flag.lstrip("-").replace("-", "_")
            raise ConfigError(
                f"unknown argument {flag!r}{did_you_mean(bare, fields)}. It is neither an option of posttrain {name} nor an "
                "option of accelerate launch."
            )
    # accelerate's parser interprets a word that belongs to no option as the script to start.
    vars(parser)["error"] = _refuse_launch_flag
    parsed, _ = parser.parse_known_args([*rest, ""])
    if parsed.training_script_args:
        raise ConfigError(
            f"unknown argument {parsed.training_script!r}: it is neither an option nor the value of an "
            f"option{did_you_mean(parsed.training_script, fields)}. Fix: remove it, or quote a value that contains spaces."
        )
    if parsed.num_processes is not None and parsed.num_processes < 1:
        raise ConfigError(f"num_processes={parsed.num_processes} must be at least 1.")
    return list(rest)


def _refuse_launch_flag(message: str) -> NoReturn:
    """Raise an error instead of printing accelerate's long list of options."""
    raise ConfigError(f"accelerate launch: {message}.")


def _launch(name: str, argv: list[str], launch: list[str]) -> int:
    """Run a training command in several processes with ``accelerate launch``. Return the exit code of the process that failed
    first, or 0.

    The processes receive all options, and ignore the options of the launcher.
    """
    import torch

    again = {}
    if any(token.startswith(("--max_restarts", "--max-restarts")) for token in launch):
        # Restarted processes must not share the old store. The old store may still contain addresses of killed processes, to
        # which the new processes would try to connect.
        again = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launch = ["--rdzv_backend", "c10d", *launch]
    launch = with_multi_gpu(launch)
    if not torch.accelerator.is_available():
        # Without use_cpu, each process would start a separate run with a single process.
        argv = [*argv, "--use_cpu", "true"]
    command = [sys.executable, "-m", "posttrain.cli.ranks", *launch, "-m", "posttrain.cli.main", name, *argv]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, env=os.environ | again | {ranks.EXIT_CODES: folder})
        received: list[int] = []

        # A job scheduler sends SIGTERM only to the current process, so forward it to the launched processes.
        def terminated(number: int, _: Any) -> None:
            received.append(number)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, terminated)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process, interrupt=bool(received) or not sys.stdin.isatty())
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
        failed = ranks.first_failure(Path(folder), code) if code else None
    if failed is None:
        return code
    sys.stderr.write(f"{failed}\n")
    return failed.code


def with_multi_gpu(launch: list[str]) -> list[str]:
    """Add ``--multi_gpu`` if several processes are requested. Without this flag, accelerate ignores ``--num_processes`` on a
    machine without GPUs and starts one process.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args([*launch, "script"])
    several = (parsed.num_processes or 1) > 1
    if several and parsed.cpu:
        raise ConfigError(
            f"with --cpu, accelerate launch starts only one process, but num_processes={parsed.num_processes}. Fix: replace "
            "--cpu with --use_cpu true."
        )
    chosen = parsed.config_file or parsed.multi_gpu or parsed.use_deepspeed or parsed.use_fsdp or parsed.tpu
    chosen = chosen or parsed.use_megatron_lm or Path(default_config_file).is_file()
    return ["--multi_gpu", *launch] if several and not chosen else launch


def launched(launch: list[str], *, config: PostTrainingConfig | None = None) -> tuple[int, int]:
    """Return the number of processes that ``accelerate launch`` would start, and the equivalent ZeRO stage of its sharding
    (0: no sharding).

    Args:
        launch: Flags of ``accelerate launch``.
        config: Config of the run. If it is passed, an error is raised if this machine cannot shard the model as requested.
    """
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    from posttrain.models.parallel import lost_sharding

    parsed = _validate_launch_command(launch_command_parser().parse_args([*launch, "script"]))[0]
    processes = max(parsed.num_processes or 1, 1)
    if config is not None and parsed.use_deepspeed:
        require("deepspeed", "a launch with DeepSpeed")
    if (
        config is not None
        and (config.fsdp or parsed.use_fsdp)
        and processes > 1
        and not torch.accelerator.is_available()
    ):
        raise lost_sharding("MULTI_CPU", "cpu", processes)
    strategy = parsed.fsdp_sharding_strategy if str(parsed.fsdp_version) == "1" else parsed.fsdp_reshard_after_forward
    fsdp = {"no_shard": 0, "shard_grad_op": 2, "false": 2}.get(str(strategy).lower(), 3) if parsed.use_fsdp else 0
    return processes, (parsed.zero_stage or 2) if parsed.use_deepspeed else fsdp


def _end(process: subprocess.Popen, *, interrupt: bool) -> None:
    """Wait until the launched processes have finished their step and saved a checkpoint. With ``interrupt``, interrupt them
    first. Otherwise, the terminal has already interrupted them.
    """
    if interrupt:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(SAVE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        process.wait()
