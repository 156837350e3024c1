"""What a command names by text and a trainer takes as objects: reward functions, tools, environments, generated tasks."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, did_you_mean

__all__ = ["GYM", "episode_parts", "named_object", "ppo_parts", "reasoning_gym_data", "resume_from", "reward_functions"]

GYM = "reasoning_gym/"  # A dataset name that begins so is a task which is made, not read.
HELD_OUT = 100  # Rows of a made test split.


def named_object(path: str, option: str) -> Any:
    """``module.name``, ``module:name`` or ``folder/file.py:name``; modules are looked for from the working directory.

    Args:
        path: What was given.
        option: Where, for messages.

    Raises:
        ConfigError: There is no such file, module or name, or importing it fails.
    """
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), name, option)
    module, _, name = path.replace(":", ".").rpartition(".")
    if path.endswith(".py") or not module:
        raise ConfigError(f"{option}: {path!r} names no object. Give module.name, or file.py:name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}: {path!r} cannot be imported from {os.getcwd()}: {error}") from error


def _from_file(file: Path, name: str, option: str) -> Any:
    if not file.is_file():
        raise ConfigError(f"{option}: there is no file {str(file)!r} (looked for from {os.getcwd()}).")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # Worker processes look the function up by its module's name.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{option}: {str(file)!r} fails while it is imported: {error!r}") from error
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{option}: {str(file)!r} has no {name!r}{did_you_mean(name, known)}. It defines {sorted(known)}."
        )
    return getattr(module, name)


def resume_from(config: Any) -> Any:
    """What ``resume_from_checkpoint`` means: true, false, a path, or ``auto``: the last checkpoint where there is one."""
    given = config.resume_from_checkpoint
    if str(given).lower() != "auto":
        return {"true": True, "false": None}.get(str(given).lower(), given)
    from posttrain.report.checkpoints import complete_checkpoints

    config.resume_from_checkpoint = None  # Callbacks read it; where there is one, the trainer writes its path here.
    return True if complete_checkpoints(config.output_dir) else None


def reward_functions(script_args: Any) -> list[Any]:
    """The reward model first, then the named functions."""
    from posttrain.rewards import REWARDS

    functions: list[Any] = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    for name in script_args.reward_funcs or []:
        if name in REWARDS:
            functions.append(REWARDS[name])
        elif "." in name or ":" in name:
            functions.append(_callable(named_object(name, "reward_funcs"), name, "reward_funcs"))
        else:
            raise ConfigError(
                f"reward_funcs: {name!r} is not known{did_you_mean(name, REWARDS)}. Give one of {sorted(REWARDS)}, a dotted "
                "path module.function, or file.py:function."
            )
    return functions


def ppo_parts(script_args: Any, config: Any, task_reward: Any = None) -> dict[str, Any]:
    """Rewards and value model; without any reward ``reward_model_path`` is both."""
    rewards, value = reward_functions(script_args), script_args.value_model_name_or_path
    rewards = rewards or ([task_reward] if task_reward is not None else [])
    if rewards:
        return {"reward_model": rewards, "value_model": value}
    return {"reward_model": config.reward_model_path, "value_model": value or config.reward_model_path}


def episode_parts(script_args: Any) -> dict[str, Any]:
    """Tools, an environment's factory and a rollout function, where they are named."""
    parts: dict[str, Any] = {}
    if script_args.tools:
        parts["tools"] = [_callable(named_object(name, "tools"), name, "tools") for name in script_args.tools]
    for option in ("environment_factory", "rollout_func"):
        name = getattr(script_args, option)
        if name:
            parts[option] = _callable(named_object(name, option), name, option)
    return parts


def _callable(found: Any, name: str, option: str) -> Callable:
    if not callable(found):
        raise ConfigError(f"{option}: {name!r} is a {type(found).__name__}, and a function or class is wanted.")
    return found


def reasoning_gym_data(script_args: Any, seed: int) -> tuple[dict[str, Any], Any]:
    """The splits of ``dataset_name: reasoning_gym/TASK`` and the reward that scores them.

    ``dataset_config`` may hold a JSON object: ``size`` (1000) and ``test_size`` (100) rows, ``seed`` (the run's),
    ``system_prompt``, ``extract``, and settings of the task.
    """
    from posttrain.integrations.reasoning_gym import reasoning_gym_task

    try:
        options = json.loads(script_args.dataset_config or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"dataset_config={script_args.dataset_config!r}: for {script_args.dataset_name!r} it must be a JSON object of the "
            f"task's settings, like '{{\"size\": 1000}}' ({error})."
        ) from error
    if not isinstance(options, dict):
        raise ConfigError(
            f"dataset_config={script_args.dataset_config!r} must be a JSON object of the task's settings."
        )
    size, held_out = options.pop("size", 1000), options.pop("test_size", HELD_OUT)
    task, seed = script_args.dataset_name.removeprefix(GYM), options.pop("seed", seed)
    rows, reward = reasoning_gym_task(task, size + held_out, seed, **options)
    splits = {script_args.dataset_train_split: rows.select(range(size))}
    if held_out:
        splits[script_args.dataset_test_split] = rows.select(range(size, size + held_out))
    return splits, reward
