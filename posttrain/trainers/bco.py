"""`BCOTrainer`, with TRL's signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import nn

from posttrain.errors import ConfigError
from posttrain.loop.precompute import log_ratios
from posttrain.loop.run import Hooks, Prepare, Run
from posttrain.losses.unpaired import density_weight
from posttrain.methods.bco import BCO, BCOConfig, PromptDensity, embed_prompts, reward_sums
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
from posttrain.trainers.preference import PreferenceTrainer
from posttrain.types import Batch

if TYPE_CHECKING:
    from posttrain.types import AnyDataset


class BCOTrainer(PreferenceTrainer):
    """Trainer of BCO, which trains on answers labeled good or bad with the loss of a binary classifier.

    The loss of a good answer is ``-logsigmoid(r - delta)``. The loss of a bad answer is ``-logsigmoid(-(r - delta))``. The
    reward ``r`` is ``beta`` times the log-ratio of policy and reference.

    delta is the running mean of all rewards so far, including the current optimizer step. Checkpoints contain delta.
    Evaluation uses delta without changing it. If an optimizer step has only one forward pass, this pass updates delta from
    its rewards. With gradient accumulation, or if rows do not fit into one pass, a step has several passes. In this case,
    additional passes without gradients first compute all rewards of the step. Gradient accumulation therefore changes
    neither delta nor the gradient.

    With ``embedding_func``, a bad answer has a larger weight if its prompt resembles the prompts of good answers.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        ref_model: Reference model. If None, the reference is a frozen copy of the initial policy. With ``peft_config``, it
            is the policy with its adapter disabled.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        embedding_func: Function ``f(input_ids, attention_mask)`` that computes embeddings of tokenized prompts. The
            embeddings determine the weights of bad answers.
        embedding_tokenizer: Tokenizer for ``embedding_func``. Pass either both of these arguments or none of them.
        data_collator: Function that builds batches from prepared rows. If None, the trainer builds batches itself.
        train_dataset: Dataset with ``prompt``, ``completion`` and ``label`` (True for a good answer), or with pairs.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported. It must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. If an entry is None, it is created from ``args``.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. They override ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        quantization_config: Quantization config for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.

    Reference: Binary classifier optimization, arXiv:2404.04656.
    """

    METHOD = BCO
    method: BCO
    args: BCOConfig

    def __init__(
        self,
        model: Model,
        ref_model: nn.Module | None = None,
        args: BCOConfig | None = None,
        *,
        embedding_func: Callable | None = None,
        embedding_tokenizer: Tokenizer | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Quantization | None = None,
        peft_config: Adapter | None = None,
    ) -> None:
        if (embedding_func is None) != (embedding_tokenizer is None):
            raise ConfigError("embedding_func and embedding_tokenizer must be set together: pass both or neither.")
        self.embedding = None if embedding_func is None else (embedding_func, embedding_tokenizer)
        self.density: PromptDensity | None = None
        super().__init__(
            model,
            ref_model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    def prepare(self, dataset: AnyDataset, name: str, *, training: bool = False) -> Any:
        """Tokenize a dataset. With an embedding function, add the weight of each bad answer.

        The weights are computed once. The weight of a bad answer depends on the probability that an answer to its prompt is
        good.
        """
        prepared = super().prepare(dataset, name, training=training)
        if self.embedding is None:
            return prepared
        if not isinstance(prepared, datasets.Dataset):
            raise ConfigError(
                f"embedding_func needs a {name} dataset with a known length, but the dataset is a stream."
            )
        texts = self.processing_class.batch_decode(prepared["prompt_ids"][:], skip_special_tokens=True)
        embeddings = embed_prompts(texts, *self.embedding)
        if training:
            labels, size = list(map(bool, prepared["label"][:])), self.args.prompt_sample_size
            self.density = PromptDensity.fit(embeddings, labels, sample_size=size, seed=self.args.seed)
            self.density.save(self.args.output_dir)
        assert self.density is not None
        weights = density_weight(
            torch.from_numpy(self.density.probability(embeddings)),
            low=self.args.min_density_ratio,
            high=self.args.max_density_ratio,
        )
        return prepared.add_column("density_weight", weights.tolist())

    def _hooks(self) -> Hooks:
        hooks = super()._hooks()
        assert hooks.prepare is not None
        return replace(
            hooks, prepare=partial(with_delta, prepare=hooks.prepare), before_split=move_in_passes_of_its_own
        )


def with_delta(
    run: Run, inputs: list[Any], micro_batches: list[list[Batch]], mode: str, *, prepare: Prepare
) -> list[list[Batch]]:
    """Return micro-batches with the reference's log-probs. In training, the rewards of the whole step update delta.

    Args:
        run: Run of `BCO`.
        inputs: Items of the loader.
        micro_batches: Batches of each item.
        mode: ``train`` or ``eval``.
        prepare: Function that adds the reference's log-probs; see `Hooks.prepare`.
    """
    micro_batches = prepare(run, inputs, micro_batches, mode)
    if mode == "train":
        single = run.progress.denominators.passes == run.accelerator.num_processes and len(micro_batches) == 1
        run.progress.own = replace(run.progress.own, moves_in_pass=single)
        if not single:
            move_delta(run, micro_batches)
    return micro_batches


def move_in_passes_of_its_own(run: Run, micro_batches: list[list[Batch]]) -> None:
    """Update delta in additional passes without gradients. This is necessary if the single forward pass that would update
    delta is split.
    """
    if run.progress.own.moves_in_pass:
        move_delta(run, micro_batches)


def move_delta(run: Run, micro_batches: list[list[Batch]]) -> None:
    """Update BCO's threshold delta with the rewards of these micro-batches on all ranks. The rewards are computed without
    gradients.
    """
    ratios = log_ratios(run, [batch for micro in micro_batches for batch in micro])
    rewards = torch.cat([torch.zeros(0), *((run.args.beta * ratio).cpu() for ratio in ratios)])
    run.progress.own = run.progress.own.moved(reward_sums(rewards), run.ranks)
