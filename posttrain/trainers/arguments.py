"""Type aliases for the arguments of trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import datasets
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import EvalPrediction, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

Model: TypeAlias = str | nn.Module
TrainSet: TypeAlias = datasets.Dataset | datasets.IterableDataset
EvalSets: TypeAlias = TrainSet | Mapping[str, TrainSet]
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Callbacks: TypeAlias = list[TrainerCallback]
Optimizers: TypeAlias = tuple[Optimizer | None, LRScheduler | None]
OptimizerClass: TypeAlias = tuple[type[Optimizer], dict[str, Any]]
Metrics: TypeAlias = Callable[[EvalPrediction], dict[str, float]]
Adapter: TypeAlias = "PeftConfig"
Quantization: TypeAlias = "QuantizationConfigMixin"
# One or several rewards. Each reward is a function, a reward model, or the folder or Hub id of a reward model.
Rewards: TypeAlias = Callable | nn.Module | str | list[Any] | Mapping[str, Any]
