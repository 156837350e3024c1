"""`GMPOTrainer`: GRPO with the geometric mean of token ratios."""

from __future__ import annotations

from posttrain.extensions.experimental.gmpo_method import GMPO, GMPOConfig
from posttrain.trainers.grpo import GRPOTrainer


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimization (experimental). GMPO is GRPO with another importance ratio: the geometric mean of
    a completion's clipped token ratios.

    Log-ratios are clipped and then averaged, so a single token with an extreme ratio cannot dominate the loss of its
    completion.

    Args:
        model: Model to train, as a path, Hub id, model object or peft model.
        reward_funcs: Reward function ``f(prompts, completions, **columns) -> list[float | None]``, reward model, path
            or Hub id of a reward model, or a list of these.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        train_dataset: Dataset with the column ``prompt``, and the columns that reward functions read. If None, the
            prompts come from ``environment_factory``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the model. If None, the tokenizer is loaded from the model's path or Hub id.
        reward_processing_classes: Tokenizer, or list of tokenizers, of the reward models. If None, they are loaded
            together with the reward models.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        tools: Python functions that the model may call. Each function needs type hints and a docstring.
        rollout_func: Function that samples completions instead of the trainer. It maps prompts to a dict of lists.
        environment_factory: Function that creates an environment for each completion, or a mapping from names to such
            functions. With a mapping, the dataset column ``environment`` selects the function.
        harness: Agent code of the user, which calls an OpenAI-compatible endpoint of the model. See `Harness`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.

    Reference: Geometric-mean policy optimization, arXiv:2507.20673, equation 4.
    """

    METHOD = GMPO
    args: GMPOConfig
