"""`MergeModelCallback`: checkpoints merged with another model, by mergekit."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from posttrain.errors import ConfigError, ModelError, check_choice
from posttrain.integrations import require
from posttrain.models.load import get_config_model_id
from posttrain.report.sync_reference import bare, has_adapter, is_sharded

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["MergeConfig", "MergeModelCallback", "merge_models", "upload_model_to_hf"]

logger = logging.getLogger(__name__)


@dataclass
class MergeConfig:
    """How two models become one.

    A field that the method does not use is ignored; None takes the method's own value, which is in brackets.

    Attributes:
        method: ``linear``, ``ties``, ``dare_ties`` or ``slerp``.
        policy_model_path: Folder of the trained model; the callback fills it in.
        target_model_path: Folder or hub id of the other one; None: the model that training started from.
        policy_model_weight, target_model_weight: Share of each (linear: 0.5; ties, dare_ties: 1.0).
        policy_model_density, target_model_density: Share of the changed parameters that is kept, from the first layers to
            the last (ties, dare_ties: [1.0, 0.7, 0.1] and [1.0]).
        normalize: 1.0 divides by the sum of the weights (ties, dare_ties: 1.0).
        base_model_path: What both models' changes are counted from (ties, dare_ties); None: the policy. The policy then has
            no changes, and at density 1.0 the result is the target: give the model both were trained from.
        t_values: 0 is the policy, 1 the target (slerp: 0.5).
        dtype: Of the computation and of the merged weights.

    Raises:
        ConfigError: An unknown method.

    >>> MergeConfig("slerp", "policy", "target").to_dict()["parameters"]
    {'t': 0.5}
    """

    method: str = "linear"
    policy_model_path: str | None = None
    target_model_path: str | None = None
    policy_model_weight: float | None = None
    target_model_weight: float | None = None
    policy_model_density: list[float] | None = None
    target_model_density: list[float] | None = None
    normalize: float | None = None
    t_values: float | list[float] | None = None
    dtype: str = "float16"
    base_model_path: str | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        for name, value in DEFAULTS[self.method].items():
            if getattr(self, name) is None:
                setattr(self, name, list(value) if isinstance(value, list) else value)

    def to_dict(self) -> dict[str, Any]:
        """The merge as mergekit's configuration files spell it.

        Raises:
            ConfigError: A model path is missing.
        """
        for name in ("policy_model_path", "target_model_path"):
            if not getattr(self, name):
                raise ConfigError(f"MergeConfig.{name} is not set: a merge needs the folder or hub id of both models.")
        policy, target = self.policy_model_path, self.target_model_path
        merge: dict[str, Any] = {"merge_method": self.method, "dtype": self.dtype}
        weights = {"weight": self.policy_model_weight}, {"weight": self.target_model_weight}
        if self.method == "slerp":
            models: list[dict[str, Any]] = [{"model": policy}, {"model": target}]
            return merge | {"base_model": policy, "models": models, "parameters": {"t": self.t_values}}
        models = [{"model": path, "parameters": share} for path, share in zip((policy, target), weights, strict=True)]
        if self.method == "linear":
            return merge | {"models": models}
        for model, density in zip(models, (self.policy_model_density, self.target_model_density), strict=True):
            model["parameters"]["density"] = density
        base = self.base_model_path or policy
        return merge | {"base_model": base, "models": models, "parameters": {"normalize": self.normalize}}

    def create(self) -> Any:
        """The ``mergekit.config.MergeConfiguration`` of this merge."""
        mergekit: Any = require("mergekit.config", "MergeConfig.create")
        return mergekit.MergeConfiguration.model_validate(self.to_dict())


METHODS = ("linear", "ties", "dare_ties", "slerp")
_TIES = {
    "policy_model_weight": 1.0,
    "policy_model_density": [1.0, 0.7, 0.1],
    "target_model_weight": 1.0,
    "target_model_density": [1.0],
    "normalize": 1.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"policy_model_weight": 0.5, "target_model_weight": 0.5},
    "ties": _TIES,
    "dare_ties": _TIES,
    "slerp": {"t_values": 0.5},
}


def merge_models(config: MergeConfig, out_path: str | Path) -> None:
    """Merge two models and write the result, with the policy's tokenizer, to a folder.

    Raises:
        MissingDependencyError: mergekit is not installed.
        ModelError: One of the folders holds an adapter instead of a model.
    """
    for path in (config.policy_model_path, config.target_model_path):
        if path and (Path(path) / "adapter_config.json").is_file():
            raise ModelError(f"{path} holds an adapter, not a model: merge it into its base first (merge_and_unload).")
    if config.method in ("ties", "dare_ties") and config.base_model_path is None:
        logger.warning(
            "merging by %s with the policy as its own base: only the target's changes count, and at target_model_density=[1.0] "
            "the result is the target. Set MergeConfig.base_model_path to the model both were trained from.",
            config.method,
        )
    merge: Any = require("mergekit.merge", "merge_models")
    merge.run_merge(
        config.create(),
        str(out_path),
        merge.MergeOptions(cuda=torch.cuda.is_available(), copy_tokenizer=True, quiet=True),
    )


def upload_model_to_hf(folder_path: str | Path, repo_id: str) -> None:
    """Upload a folder to a model repository of the hub, which is made when it does not exist.

    Raises:
        ConfigError: ``repo_id`` is not a hub id.
    """
    import huggingface_hub

    try:
        huggingface_hub.utils.validate_repo_id(repo_id)
    except huggingface_hub.utils.HFValidationError as error:
        raise ConfigError(f"repo_id={repo_id!r} is not the id of a hub repository: {error}") from error
    huggingface_hub.create_repo(repo_id, exist_ok=True)
    huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder_path)


class MergeModelCallback(transformers.TrainerCallback):
    """Merges checkpoints with another model: every one, or the last; the result is in ``<checkpoint>/merged``.

    Experimental. The last step gets a checkpoint where the save schedule would leave it out. Only the main process merges.

    Args:
        merge_config: How, and with what; None is linear, half and half, with the model that training started from.
        merge_at_every_checkpoint: Merge at each save instead of once at the end.
        push_to_hub: Upload each result to ``<hub_model_id>_checkpoint-<step>_merged``.
        hub_model_id: The start of that name; None takes ``args.hub_model_id``.

    Raises:
        MissingDependencyError: mergekit is not installed.
        ModelError: When training begins: the model carries an adapter, whose checkpoints are no models.
        ConfigError: When training begins: there is nothing to merge with, or no repository to upload to.
    """

    def __init__(
        self,
        merge_config: MergeConfig | None = None,
        merge_at_every_checkpoint: bool = False,
        push_to_hub: bool = False,
        *,
        hub_model_id: str | None = None,
    ) -> None:
        require("mergekit", "MergeModelCallback")
        self.merge_config = merge_config or MergeConfig()
        self.merge_at_every_checkpoint = merge_at_every_checkpoint
        self.push_to_hub = push_to_hub
        self.hub_model_id = hub_model_id
        self._target = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Refuse what would only fail at the end."""
        model = bare(model)
        if has_adapter(model):
            raise ModelError(
                "MergeModelCallback merges whole models, and this one carries an adapter. Train, merge the adapter "
                "(merge_and_unload), then call merge_models on the result."
            )
        self._target = self.merge_config.target_model_path or get_config_model_id(model.config)
        if not self._target:
            raise ConfigError(
                "MergeModelCallback has nothing to merge with: merge_config.target_model_path is None, and the model was built "
                "in memory. Set target_model_path."
            )
        if self.push_to_hub and not (self.hub_model_id or args.hub_model_id):
            raise ConfigError(
                "push_to_hub=True needs a repository: set hub_model_id, here or in the training arguments."
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make sure of a checkpoint of the last step."""
        if state.global_step >= state.max_steps or control.should_training_stop:
            control.should_save = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make sure of it also where an evaluation ends the training."""
        if control.should_training_stop:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Merge the checkpoint that was just written."""
        if self.merge_at_every_checkpoint and state.is_world_process_zero:
            self._merge(args, state, _checkpoint(args, state))

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **_: Any,
    ) -> None:
        """Merge the last checkpoint, once."""
        if self.merge_at_every_checkpoint or not state.is_world_process_zero:
            return
        folder = _checkpoint(args, state)
        if not folder.is_dir():
            model = bare(model)
            if is_sharded(model):
                logger.warning("MergeModelCallback: step %d has no checkpoint; nothing is merged.", state.global_step)
                return
            # Not called checkpoint-...: it holds the weights alone, and a resume must not take it for a whole one.
            folder = folder.with_name(f"policy-{state.global_step}")
            for part in (model, processing_class):
                if part is not None:
                    part.save_pretrained(folder)
        self._merge(args, state, folder)

    def _merge(self, args: TrainingArguments, state: TrainerState, folder: Path) -> None:
        if not folder.is_dir():
            logger.warning("MergeModelCallback: %s is not there; nothing is merged.", folder)
            return
        merged = folder / "merged"
        merge_models(replace(self.merge_config, policy_model_path=str(folder), target_model_path=self._target), merged)
        if self.push_to_hub:
            name = self.hub_model_id or args.hub_model_id
            upload_model_to_hf(merged, f"{name}_checkpoint-{state.global_step}_merged")


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
