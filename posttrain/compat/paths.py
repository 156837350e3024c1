"""Imports through TRL's module paths. For example, ``from posttrain.trainer.utils import pad`` works like
``from trl.trainer.utils import pad``.

The modules in `MODULES` have no files. ``import posttrain`` adds a finder to the end of ``sys.meta_path``, which calls
`spec_of`. Each of these modules contains the public names of ``posttrain``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from posttrain.compat import trl_names
from posttrain.errors import did_you_mean

# Modules of TRL that have public names in version 1.16 or on the release page of 1.18, and older modules from which scripts
# still import. A name ``X`` in _STABLE stands for the modules ``trainer.X_trainer`` and ``trainer.X_config``. A name in
# _EXPERIMENTAL stands for ``experimental.X`` and its two modules.
_PATHS = """
chat_template_utils core data_utils distributed experimental extras generation import_utils kernels mergekit_utils
scripts trainer
extras.dataset_formatting extras.profiling extras.vllm_client
generation.async_vllm_client generation.vllm_client generation.vllm_generation
kernels.chunked_divergence kernels.chunked_logprob kernels.logprob_entropy
models.activation_offloading
models.selective_activation_checkpointing models.utils
commands commands.cli_utils env_utils environment environment.base_environment extras.best_of_n_sampler
models.auxiliary_modules models.modeling_base models.modeling_sd_base models.modeling_value_head models.sd_utils
trainer.alignprop_config trainer.alignprop_trainer trainer.base trainer.ddpo_config trainer.ddpo_trainer
trainer.iterative_sft_config trainer.iterative_sft_trainer
experimental.self_distillation
rewards.accuracy_rewards rewards.format_rewards rewards.other_rewards
scripts.distillation scripts.dpo scripts.env scripts.grpo scripts.kto scripts.reward scripts.rloo scripts.sft
scripts.utils scripts.vllm_serve
trainer.base_config trainer.base_trainer trainer.callbacks trainer.judges trainer.model_config trainer.utils
experimental.async_distillation.async_rollout_worker experimental.async_grpo.async_rollout_worker
experimental.async_distillation.vllm_client experimental.async_distillation.weight_transfer
experimental.async_grpo.openenv_harness experimental.async_grpo.packing experimental.async_grpo.vllm_client
experimental.async_grpo.weight_transfer experimental.bema_for_ref_model experimental.bema_for_ref_model.callback
experimental.bema_for_ref_model.dpo_trainer experimental.distillation experimental.harbor experimental.judges
experimental.merge_model_callback experimental.openenv experimental.openreward experimental.sdft.loss_utils
experimental.sdft.teacher_sync experimental.sdpo.loss_utils experimental.sdpo.teacher_sync experimental.utils
experimental.winrate_callback
"""
_STABLE = "sft dpo grpo async_grpo rloo reward kto distillation ppo ppov2 online_dpo cpo orpo bco nash_md xpo gkd prm"
_EXPERIMENTAL = (
    "a2po async_distillation async_grpo bco cpo dpo dppo gfpo gkd gmpo gold grpo_with_replay_buffer gspo_token iw_opd kto "
    "minillm nash_md online_dpo orpo papo ppo prm sdft sdpo server_distillation ssd tpo xpo"
)
MODULES = frozenset(
    f"posttrain.{path}"
    for path in [
        *_PATHS.split(),
        *(f"trainer.{name}_{part}" for name in _STABLE.split() for part in ("trainer", "config")),
        *(f"experimental.{name}" for name in _EXPERIMENTAL.split()),
        *(f"experimental.{n}.{n}_{part}" for n in _EXPERIMENTAL.split() for part in ("trainer", "config")),
    ]
)

# Map from module paths in earlier versions of the documentation to the current paths.
MOVED = {
    "posttrain.compat.available": "posttrain.extensions.trl_helpers.available",
    "posttrain.rollouts.episodes.calls": "posttrain.extensions.agents.calls",
    "posttrain.rollouts.episodes.proxy": "posttrain.extensions.agents.proxy",
    "posttrain.rollouts.vllm_worker": "posttrain.extensions.vllm.worker",
    "posttrain.report.inspect": "posttrain.extensions.page.inspect",
}

# Map from names that TRL uses for different objects in two modules to the name in posttrain.
BY_MODULE = {"posttrain.trainer.reward_trainer.DataCollatorForPreference": "DataCollatorForReward"}


def public_name(module: str, name: str) -> Any:
    """Return the object ``name`` that is imported from ``module``, one of TRL's module paths or a path that has moved.

    Raises:
        AttributeError: ``name`` is a dunder name that Python looks up in every module.
        ImportError: posttrain has no object with TRL's name. The message contains the replacement.
    """
    import posttrain

    if module in MOVED and not name.startswith("__"):
        return getattr(importlib.import_module(MOVED[module]), name)
    name = BY_MODULE.get(f"{module}.{name}", name)
    if name in posttrain.__all__:
        return getattr(posttrain, name)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    resolved = older_name(module, name)
    return resolved if resolved is not None else refuse(module, name)


def older_name(module: str, name: str) -> Any:
    """Return the object that replaces a name of older TRL releases. Return None for names that are not in the table.

    Raises:
        ImportError: The name has no equivalent. The message contains the replacement of each such name in the import
            statement.
    """
    row = trl_names.imports().get(name)
    if row is None or row.action == "refuse":
        return refuse(module, name) if row is not None or name in missing_of_statement(module) else None
    text, level = f"{name} of older releases is now {row.replacement}.", 3 if module == "posttrain" else 4
    warnings.warn(text, FutureWarning, stacklevel=level)
    resolved = pkgutil.resolve_name(row.replacement)
    # Store the object in the module, because an import statement looks up a name twice.
    setattr(sys.modules[module], name, resolved)
    return resolved


def missing_of_statement(module: str) -> list[str]:
    """Return the names in the current ``from module import ...`` statement that cannot be imported."""
    import posttrain

    frame: Any = sys._getframe()
    while frame is not None and not (
        # Python looks up the names of an import statement in the function _handle_fromlist.
        frame.f_code.co_name == "_handle_fromlist" and frame.f_locals["module"].__name__ == module
    ):
        frame = frame.f_back
    names = frame.f_locals["fromlist"] if frame is not None else ()
    refused = trl_names.refused("import")
    public = {*posttrain.__all__, *trl_names.imports(), "*"} - refused.keys()
    return [
        name
        for name in names
        if name in refused or not (name in public or name in vars(sys.modules[module]) or find_spec(f"{module}.{name}"))
    ]


def refuse(module: str, name: str) -> None:
    """Raise an error for an imported name that does not exist. The error covers all missing names of the import statement.

    Raises:
        ImportError: Always. The message contains the replacement of each missing name.
    """
    names = dict.fromkeys([name, *missing_of_statement(module)])
    raise ImportError("\n".join(_text(module, each) for each in names), name=name)


def _text(module: str, name: str) -> str:
    import posttrain

    instead = trl_names.refused("import").get(name)
    if instead is None:
        meant = did_you_mean(name, posttrain.__all__)
        fix = "copy the function or class from TRL if it is one of its internal helpers. docs/migration.md lists the public names"
    else:
        meant, fix = "", trl_names.advice(instead)
    return f"cannot import {name!r} from {module!r}: posttrain has no such name{meant}. Fix: {fix}."


def spec_of(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the module spec if ``fullname`` is one of TRL's module paths or a path that has moved. Return None for other
    names.
    """
    return (
        importlib.machinery.ModuleSpec(fullname, Loader(), is_package=True) if fullname in {*MODULES, *MOVED} else None
    )


class Loader(importlib.abc.Loader):
    """Loader for the modules in `MODULES` and `MOVED`. Each module is an empty package whose ``__getattr__`` is
    `public_name`.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Set ``__getattr__`` of a new, empty module."""
        module.__getattr__ = lambda name: public_name(module.__name__, name)  # pyright: ignore[reportAttributeAccessIssue]
