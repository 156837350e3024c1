"""`WeaveCallback`: logs completions of every evaluation to Weave, as traces or as scored evaluations."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from posttrain.errors import ConfigError
from posttrain.extensions.trl_helpers.completions import EvalPrompts
from posttrain.integrations import is_available, require
from posttrain.models.architecture import get_config_model_id

if TYPE_CHECKING:
    from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)

PURPOSE = "WeaveCallback"


class WeaveCallback(transformers.TrainerCallback):
    """Sample completions of the evaluation prompts after every evaluation, and log them to Weave.

    Without scorers, each completion is logged as a trace. With scorers, each evaluation is logged as a Weave evaluation. It
    has one prediction with scores per prompt, and a summary with ``total_predictions``, ``successful_predictions`` and
    ``avg_<name>`` for every scorer. If a scorer or a prediction fails, the error is logged, and averages do not include it.
    Each call has the training step, the model's name and the sampling settings as attributes. If the package weave is not
    installed, the callback does nothing except logging a warning.

    Args:
        trainer: Trainer to which the callback is added.
        project_name: Project to log to if no Weave client exists yet. None: the project of the current wandb run.
        scorers: Mapping from names to functions ``f(prompt, completion)``, which return a number or a bool.
        generation_config: Sampling settings. See `LogCompletionsCallback`.
        num_prompts: Number of rows to use, from the beginning of the dataset. None: all rows.
        dataset_name: Name of the dataset in Weave.
        model_name: Name of the model in Weave. None: the last part of the model's path or Hub id.
        dataset: Dataset of prompts. None: ``trainer.eval_dataset``.

    Raises:
        ConfigError: Training or evaluation begins, but there is no Weave client, no ``project_name`` and no wandb run.
        DataError: See `posttrain.extensions.trl_helpers.completions.EvalPrompts`.

    >>> trainer.add_callback(WeaveCallback(trainer, "team/runs", scorers={"length": lambda p, c: len(c)}))  # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: Any,
        project_name: str | None = None,
        scorers: Mapping[str, Callable[[Any, str], float]] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
        *,
        dataset: AnyDataset | None = None,
    ) -> None:
        self.project_name, self.scorers = project_name, dict(scorers or {})
        self.dataset_name = dataset_name
        self.source: EvalPrompts | None = None
        self._client: Any = None
        self._last_step = -1
        if not is_available("weave"):
            logger.warning("WeaveCallback does nothing: the package weave is not installed (pip install weave).")
            return
        self.source = EvalPrompts(trainer, generation_config, num_prompts, dataset=dataset)
        identity = get_config_model_id(trainer.accelerator.unwrap_model(trainer.model).config)
        self.model_name = model_name or Path(identity).name or "policy"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Connect to Weave before training."""
        self._last_step = -1
        if self.source is not None and state.is_world_process_zero:
            self._connect()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Sample and log completions once per step, even if several evaluation sets are evaluated in this step."""
        if self.source is None or state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        completions = self.source.complete()
        if not state.is_world_process_zero:
            return
        client = self._connect()
        sampling = self.source.sampling
        attributes = {
            "training_step": state.global_step,
            "model_name": self.model_name,
            "generation_config": sampling.unseeded(),
        }
        pairs = list(zip(self.source.prompts, completions, strict=True))
        try:
            with require("weave", PURPOSE).attributes(attributes):
                if self.scorers:
                    self._evaluate(pairs)
                else:
                    self._trace(client, pairs)
        except Exception as error:  # An error of a tracker must not stop training.
            logger.warning("Weave: step %d was not logged: %s: %s", state.global_step, type(error).__name__, error)

    def _connect(self) -> Any:
        """Return the current Weave client. If there is no client, create one."""
        if self._client is not None:
            return self._client
        weave: Any = require("weave", PURPOSE)
        self._client = weave.get_client()
        if self._client is None:
            project = self.project_name or _wandb_project()
            if project is None:
                raise ConfigError(
                    "WeaveCallback cannot log: there is no Weave client and no wandb run, and project_name is None. "
                    "Pass project_name='entity/project', call weave.init first, or set report_to='wandb'."
                )
            self._client = weave.init(project)
        return self._client

    def _trace(self, client: Any, pairs: list[tuple[Any, str]]) -> None:
        for prompt, completion in pairs:
            try:
                call = client.create_call("completion", {"prompt": prompt})
                client.finish_call(call, output=completion)
            except Exception as error:
                logger.warning("Weave: a completion was not logged: %s: %s", type(error).__name__, error)

    def _evaluate(self, pairs: list[tuple[Any, str]]) -> None:
        evaluation = require("weave", PURPOSE).EvaluationLogger(model=self.model_name, dataset=self.dataset_name)
        scores: dict[str, list[float]] = {name: [] for name in self.scorers}
        successful = 0
        for prompt, completion in pairs:
            try:
                prediction = evaluation.log_prediction(inputs={"prompt": prompt}, output=completion)
                of_example = self._score(prompt, completion)
                for name, value in of_example.items():
                    prediction.log_score(scorer=name, score=value)
                prediction.finish()
            except Exception as error:
                logger.warning("Weave: a prediction was not logged: %s: %s", type(error).__name__, error)
                continue
            successful += 1
            for name, value in of_example.items():
                scores[name].append(float(value))
        summary: dict[str, float] = {"total_predictions": len(pairs), "successful_predictions": successful}
        summary |= {f"avg_{name}": sum(values) / len(values) for name, values in scores.items() if values}
        evaluation.log_summary(summary)

    def _score(self, prompt: Any, completion: str) -> dict[str, Any]:
        scores = {}
        for name, scorer in self.scorers.items():
            try:
                value = scorer(prompt, completion)
                float(value)
                scores[name] = value
            except Exception as error:
                logger.warning("Weave: scorer %r failed on a completion: %s: %s", name, type(error).__name__, error)
        return scores


def _wandb_project() -> str | None:
    """Return ``entity/project`` of the current wandb run. Return None if wandb was not imported or has no run."""
    if "wandb" not in sys.modules:
        return None
    run = require("wandb", PURPOSE).run
    return None if run is None else f"{run.entity}/{run.project}"
