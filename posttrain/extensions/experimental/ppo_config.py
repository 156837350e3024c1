"""`PPOConfig`: one rollout batch, the passes over it, and how rewards become advantages."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from posttrain.errors import ConfigError, exact_div
from posttrain.fields import NonNegativeFloat, NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Share, config, option
from posttrain.methods.config import PostTrainingConfig, check_gathering
from posttrain.methods.online_config import RewardFields, VllmSyncFields
from posttrain.rewards.runner import transform_names
from posttrain.rollouts.engines import EXACT

ESTIMATORS = ("k1", "k3")
WHITEN_LEAST = 8  # Responses of a mini-batch on one process below which whitened rewards are mostly noise.


class _OneCompletion:
    """What `OnlineTrainer` asks of its config, answered for a method that samples one completion a prompt, unfiltered."""

    num_generations = 1
    num_generations_eval = None
    num_iterations = 1  # Of a micro-batch; passes are ``num_ppo_epochs``.
    dynamic_sampling = 0
    mask_truncated_completions = False
    beta = 0.0  # The divergence is charged to the rewards by ``kl_coef``; no term of the loss holds it.
    top_p = 1.0
    top_k = 0
    min_p = None
    repetition_penalty = 1.0
    generation_kwargs = None
    vllm_structured_outputs_regex = None
    cache_implementation = None
    log_ref_kl = False
    stop_without_signal = None
    log_completions = False
    mask_ids_without_token = False
    vllm_sync_retries = VllmSyncFields.vllm_sync_retries
    weight_parity_every = VllmSyncFields.weight_parity_every
    adapter_sync = VllmSyncFields.adapter_sync


@config
class PPOConfig(_OneCompletion, RewardFields, PostTrainingConfig):
    """Arguments of `PPOTrainer`.

    A rollout batch has ``per_device_train_batch_size x gradient_accumulation_steps x processes`` responses. Each of
    ``num_ppo_epochs`` passes over it deals them anew to ``num_mini_batches`` mini-batches, and each mini-batch is one
    optimiser step, which is what ``logging_steps``, ``save_steps``, ``eval_steps`` and ``max_steps`` count.

    Reference: Proximal policy optimization algorithms, arXiv:1707.06347.
    """

    _VALID_DICT_FIELDS = [*PostTrainingConfig._VALID_DICT_FIELDS, "chat_template_kwargs"]  # noqa: RUF012

    learning_rate: float = option(3e-6, "Peak learning rate, constant during an update.")
    disable_dropout: bool = option(True, "Set every dropout of all four models to 0.")
    num_ppo_epochs: PositiveInt = option(4, "Passes over each rollout batch, at least 1.")
    num_mini_batches: PositiveInt = option(
        1, "Optimiser steps of a pass; divides the rollout batch of a process exactly."
    )
    total_episodes: PositiveInt | None = option(
        None,
        "Responses to train on, rounded up to whole rollout batches. None: num_train_epochs times the rows of "
        "train_dataset, or as many as max_steps needs where that is set.",
    )
    local_rollout_forward_batch_size: PositiveInt = option(
        64, "Most responses of a process that are evaluated together without gradients."
    )
    num_sample_generations: NonNegativeInt = option(
        10, "Tables of sampled answers to eval_dataset during training; 0, or no eval_dataset: none."
    )
    response_length: PositiveInt = option(53, "Most tokens of a response, the stop token included.")
    stop_token: str | None = option(
        None,
        "'eos' ends a response at any token that ends a turn. None without stop_token_id: nothing does, and "
        "every response has response_length tokens.",
    )
    stop_token_id: NonNegativeInt | None = option(None, "Ends a response; instead of stop_token.")
    temperature: PositiveFloat = option(0.7, "Divides the logits, in sampling and in every log-prob; > 0.")
    missing_eos_penalty: PositiveFloat | None = option(
        None, "Taken off the score of a response without an end token, > 0; None: nothing."
    )
    kl_coef: NonNegativeFloat = option(0.05, "Weight of the divergence from the reference in the rewards.")
    kl_estimator: Literal["k1", "k3"] = option(
        "k1", "k1 is unbiased and may be negative; k3 has less variance and is never negative."
    )
    cliprange: NonNegativeFloat = option(0.2, "Clip of the importance ratio, 1 +- cliprange.")
    cliprange_value: NonNegativeFloat = option(0.2, "How far a value may move in one update.")
    vf_coef: NonNegativeFloat = option(0.1, "Weight of the value loss.")
    gamma: Share = option(1.0, "Discount a token, in [0, 1].")
    lam: Share = option(0.95, "Lambda of generalised advantage estimation, in [0, 1].")
    whiten_rewards: bool = option(False, "Divide token rewards by their spread; needs 8 responses a local mini-batch.")
    model_adapter_name: str | None = option(
        None, "Adapter to train, of a peft model that has several; None: the active one."
    )
    ref_adapter_name: str | None = option(None, "Adapter that is the reference, of a peft model that has several.")
    shuffle_dataset: bool = option(True, "Shuffle the prompts of the training set.")
    chat_template_kwargs: dict[str, Any] | str | None = option(None, "Passed at every template call.")
    rollout_engine: Annotated[str, OneOf(("auto", *EXACT))] = option(
        "auto", "native (in process, on the trainer's weights), hf (transformers), or auto: native if exact."
    )
    sft_model_path: str = option("EleutherAI/pythia-160m", "Policy; read by `posttrain ppo` alone, without a model.")
    reward_model_path: str = option(
        "EleutherAI/pythia-160m", "Reward and value model; read by `posttrain ppo` alone, where no reward is given."
    )
    ds3_gather_for_generation: bool = option(True, "Gather ZeRO-3 shards to generate.")
    dataset_num_proc: PositiveInt | None = option(None, "Accepted; prompts need no preparation.")
    micro_batch_size: int = field(default=0, init=False, metadata={"help": "Filled in: per device x processes."})
    local_batch_size: int = field(default=0, init=False, metadata={"help": "Filled in: responses of one process."})
    batch_size: int = field(default=0, init=False, metadata={"help": "Filled in: responses of a rollout batch."})
    local_mini_batch_size: int = field(default=0, init=False, metadata={"help": "Filled in: of one process."})
    mini_batch_size: int = field(default=0, init=False, metadata={"help": "Filled in: responses an optimiser step."})
    num_total_batches: int | None = field(
        default=None, init=False, metadata={"help": "Filled in by the trainer: rollout batches of the run."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ranges()
        self._check_stop()
        self._resolve_batches()

    def _check_ranges(self) -> None:
        check_gathering(self)
        if "rank" in transform_names(self.reward_transform):
            raise ConfigError(
                "reward_transform='rank' compares the completions of a prompt, and PPO samples one: every rank would be 0.5. "
                "Take clip:a:b, log1p, tanh:s, zscore or running."
            )
        if self.total_episodes is not None and self.max_steps > 0:
            raise ConfigError(
                f"total_episodes={self.total_episodes} and max_steps={self.max_steps} both say how long to train. Set one."
            )
        if self.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size=True would change what a rollout batch is. Turn it off.")

    def refused_engines(self) -> dict[str, str]:
        """Engines that PPO rules out for ``rollout_engine="auto"``, with the reasons."""
        foreign = "PPO does not correct log-probs of another attention or of a copy of the weights"
        return {"vllm": foreign, "paged": foreign}

    def _check_stop(self) -> None:
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ConfigError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} are both set. Set one of them."
            )
        if self.stop_token not in (None, "eos"):
            raise ConfigError(
                f"stop_token={self.stop_token!r} is not known. Choose 'eos' or None; for another token give its id as "
                "stop_token_id."
            )

    def _resolve_batches(self) -> None:
        """Sizes of the rollout batch and its mini-batches, in responses."""
        rule = "num_mini_batches must divide per_device_train_batch_size x gradient_accumulation_steps"
        self.micro_batch_size = self.per_device_train_batch_size * self.world_size
        self.local_batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.batch_size = self.local_batch_size * self.world_size
        self.local_mini_batch_size = exact_div(self.local_batch_size, self.num_mini_batches, rule)
        self.mini_batch_size = exact_div(self.batch_size, self.num_mini_batches, rule)
        if self.whiten_rewards and self.local_mini_batch_size < WHITEN_LEAST:
            raise ConfigError(
                f"whiten_rewards=True with mini-batches of {self.local_mini_batch_size} responses a process: their spread is "
                f"too uncertain to divide by. Take at least {WHITEN_LEAST}, or turn whitening off."
            )

    def plan(self, rows: int | None) -> None:
        """Fill in how many rollout batches and optimiser steps there will be, and micro-batches of a step.

        Args:
            rows: Of the training set; None where it is not known.
        """
        self.gradient_accumulation_steps = self.passes_per_step
        if self.total_episodes is None and self.max_steps > 0:
            self.num_total_batches = math.ceil(self.max_steps / self.updates)
            self.total_episodes = self.num_total_batches * self.batch_size
        elif self.total_episodes is not None or rows is not None:
            self.total_episodes = self.total_episodes or max(int(self.num_train_epochs * (rows or 0)), 1)
            self.num_total_batches = math.ceil(self.total_episodes / self.batch_size)
            self.max_steps = self.num_total_batches * self.updates

    @property
    def passes_per_step(self) -> int:
        """Micro-batches of a mini-batch, which is an optimiser step."""
        return max(1, math.ceil(self.local_mini_batch_size / int(self.per_device_train_batch_size)))

    def take_batch_size(self, size: int) -> None:
        """See `PostTrainingConfig.take_batch_size`; rollout batch and mini-batch stay, in other pieces."""
        self.per_device_train_batch_size, self.auto_batch_size = size, False
        self.micro_batch_size = size * self.world_size
        self.gradient_accumulation_steps = self.passes_per_step

    # What `OnlineTrainer` reads, in its own words --------------------------------------------------------------------

    @property
    def max_completion_length(self) -> int:
        """Most tokens of a response."""
        return self.response_length

    @property
    def generation_batch_size(self) -> int:
        """Responses of one rollout batch, over all processes."""
        return self.batch_size

    @property
    def steps_per_generation(self) -> int:
        """Batches of ``per_device_train_batch_size`` rows that the loader hands out at once."""
        return self.local_batch_size // self.per_device_train_batch_size

    @property
    def updates(self) -> int:
        """Optimiser steps of one rollout batch."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def generations_per_step(self) -> float:
        """Rollout batches of one optimiser step."""
        return 1 / self.updates
