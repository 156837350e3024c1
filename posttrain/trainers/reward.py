"""`RewardTrainer`, with TRL's signature: outcome reward models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import nn

from posttrain.data.forest import unbatched_answers
from posttrain.data.preference import prepare_reward_dataset
from posttrain.errors import ModelError
from posttrain.loop.trainer import PostTrainer
from posttrain.methods.reward import RewardConfig, RewardModel
from posttrain.models.architecture import label_count
from posttrain.models.forward import forward
from posttrain.models.load import load_classifier
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Tokenizer,
    TrainSet,
)
from posttrain.types import Batch, Row

if TYPE_CHECKING:
    from posttrain.types import AnyDataset

logger = logging.getLogger(__name__)


class RewardTrainer(PostTrainer):
    """Trainer of reward models: sequence classifiers with one output, trained on preference pairs. The prompt of a pair is
    computed once.

    The score is read at the last token of each answer. This token is found by its position, so the pad token may be the same
    as the eos token.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``chosen`` and ``rejected``, and optionally ``prompt``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.

    >>> trainer = RewardTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", train_dataset=pairs)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    Reference: Training a helpful and harmless assistant, arXiv:2204.05862.
    """

    METHOD = RewardModel
    _tag_names: ClassVar[list[str]] = ["posttrain", "reward-trainer"]
    args: RewardConfig

    def __init__(
        self,
        model: Model,
        args: RewardConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
        *,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
    ) -> None:
        labels = label_count(model)
        if labels not in (1, None):
            raise ModelError(f"a reward model needs num_labels=1, but {type(model).__name__} has num_labels={labels}.")
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
        )
        tokenizer = self.processing_class
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            logger.warning(
                "the pad token equals the eos token %r. Training reads scores by position and is not affected. "
                "transformers' own forward reads the score at the last token that is not the pad token and would "
                "miss the eos token. Score with posttrain's reward functions, or set tokenizer.pad_token to another "
                "token.",
                tokenizer.eos_token,
            )

    def load_model(self, model_id: str, **kwargs: Any) -> Any:
        """Load a sequence classifier with one output. If the checkpoint has no classification head, the head is initialized."""
        return load_classifier(model_id, num_labels=1, **kwargs)

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset of pairs with `prepare_reward_dataset`."""
        args = self.args
        return prepare_reward_dataset(
            dataset, self.processing_class, max_length=args.max_length, name=name, num_proc=args.dataset_num_proc
        )

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Convert examples to rows with `pair_rows`. A user's data collator is called first."""
        if self.user_collator is not None:
            examples = unbatched_answers(self.user_collator(examples), examples, ("chosen", "rejected"))
        return super().rows(examples)

    def predictions(self, model: nn.Module, batches: list[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the scores ``[chosen, rejected]`` of each pair, in the order of the dataset. The label of a pair is 0, the
        index of the chosen answer.
        """
        scores_of: dict[int, np.ndarray] = {}
        for batch in batches:
            scores = forward(model, batch, self.method.traits.needs).scores
            assert scores is not None
            pairs = batch.grouped(scores, 2).float().cpu().numpy()
            for first, pair in zip(sorted(batch.origin)[::2], pairs, strict=True):
                scores_of[first] = pair
        return [(scores_of[first], np.array(0)) for first in sorted(scores_of)]
