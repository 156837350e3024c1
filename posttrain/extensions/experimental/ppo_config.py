"""`PPOConfig`: options of PPO for rollout batches, for the passes over each rollout batch, and for advantages."""

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
# Rewards are whitened only if each process has at least this number of responses per mini-batch.
WHITEN_LEAST = 8


class _OneCompletion:
    """Options that `OnlineTrainer` reads. Each option has the only value that PPO supports. PPO samples one completion per
    prompt.
    """

    num_generations = 1
    num_generations_eval = None
    # Number of consecutive passes over one micro-batch. PPO uses ``num_ppo_epochs`` passes over a rollout batch instead.
    num_iterations = 1
    dynamic_sampling = 0
    mask_truncated_completions = False
    # Weight of the KL divergence in the loss. PPO subtracts the KL divergence from the reward instead (``kl_coef``).
    beta = 0.0
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

    A rollout batch has ``per_device_train_batch_size x gradient_accumulation_steps x processes`` responses. PPO makes
    ``num_ppo_epochs`` passes over a rollout batch. Each pass splits the rollout batch randomly into ``num_mini_batches``
    mini-batches. Each mini-batch is one optimizer step. ``logging_steps``, ``save_steps``, ``eval_steps`` and ``max_steps``
    count optimizer steps.

    Reference: Proximal policy optimization algorithms, arXiv:1707.06347.
    """

    _VALID_DICT_FIELDS = [*PostTrainingConfig._VALID_DICT_FIELDS, "chat_template_kwargs"]  # noqa: RUF012

    learning_rate: float = option(3e-6, "Peak learning rate. It is constant during the passes over a rollout batch.")
    disable_dropout: bool = option(
        True,
        "Set every dropout probability of policy, reference, value and reward model to 0, so that equal inputs give equal "
        "log-probs.",
    )
    num_ppo_epochs: PositiveInt = option(
        4,
        "Number of passes over each rollout batch, at least 1. More passes learn more from a batch, but move the policy "
        "further away from the weights that sampled the batch.",
    )
    num_mini_batches: PositiveInt = option(
        1, "Number of optimizer steps per pass. It must divide the rollout batch of a process."
    )
    total_episodes: PositiveInt | None = option(
        None,
        "Number of responses to train on, rounded up to whole rollout batches. None: num_train_epochs times the number of "
        "rows of train_dataset, or the number that max_steps requires. Setting both total_episodes and max_steps is an error.",
    )
    local_rollout_forward_batch_size: PositiveInt = option(
        64,
        "Maximum number of responses per forward pass without gradients. Decrease it if such passes run out of memory.",
    )
    num_sample_generations: NonNegativeInt = option(
        10,
        "Number of times during training that answers to eval_dataset are sampled and logged as a table. 0 disables it. It "
        "has no effect without eval_dataset.",
    )
    response_length: PositiveInt = option(53, "Maximum number of tokens of a response, including the stop token.")
    stop_token: str | None = option(
        None,
        "Which tokens end a response. 'eos': any token that ends a turn. None: only the token stop_token_id. If that is None "
        "too, every response has response_length tokens. Set 'eos' for chat models.",
    )
    stop_token_id: NonNegativeInt | None = option(
        None, "Id of the token that ends a response. It cannot be combined with stop_token. None: stop_token applies."
    )
    temperature: PositiveFloat = option(
        0.7,
        "Sampling temperature, above 0. Logits are divided by it, both in sampling and in every log-prob of the loss. Higher "
        "values make responses more diverse.",
    )
    missing_eos_penalty: PositiveFloat | None = option(
        None,
        "Penalty, above 0, that is subtracted from the score of a response without an end token. It encourages responses "
        "shorter than response_length. None: no penalty.",
    )
    kl_coef: NonNegativeFloat = option(
        0.05,
        "Weight of the KL divergence from the reference model, which is subtracted from the reward of each token. 0: no KL "
        "penalty. Increase it if the model loses earlier skills.",
    )
    kl_estimator: Literal["k1", "k3"] = option(
        "k1",
        "Estimator of the KL divergence per token. 'k1': the log-ratio d, which is unbiased and may be negative. 'k3': "
        "exp(-d) - 1 + d, which has less variance and is never negative.",
    )
    cliprange: NonNegativeFloat = option(
        0.2,
        "Clip range of the importance ratio: it is clipped to the range from 1 - cliprange to 1 + cliprange. Smaller values "
        "limit how far one rollout batch can move the policy.",
    )
    cliprange_value: NonNegativeFloat = option(0.2, "Maximum change of a predicted value in one update.")
    vf_coef: NonNegativeFloat = option(0.1, "Weight of the value loss. Increase it if loss/value_avg does not fall.")
    gamma: Share = option(
        1.0, "Discount factor per token, from 0 to 1. 1 means no discount, which suits a single reward at the end."
    )
    lam: Share = option(
        0.95,
        "Lambda of generalized advantage estimation (GAE), from 0 to 1. 1: full returns, which are unbiased but have more "
        "variance. 0: one-step differences of values.",
    )
    whiten_rewards: bool = option(
        False,
        "Divide the rewards of tokens by their standard deviation. It needs at least 8 responses per mini-batch and process.",
    )
    model_adapter_name: str | None = option(
        None, "Name of the adapter to train, for a peft model with several adapters. None: the active adapter."
    )
    ref_adapter_name: str | None = option(
        None,
        "Name of the adapter that is used as reference model, for a peft model with several adapters. None: the base model "
        "with the adapter disabled.",
    )
    shuffle_dataset: bool = option(
        True, "Shuffle the prompts of the training set. False keeps the order of the dataset, e.g. for a curriculum."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None,
        "Arguments of the chat template as a mapping or JSON, for example {'enable_thinking': false}. They apply whenever a "
        "prompt is rendered.",
    )
    rollout_engine: Annotated[str, OneOf(("auto", *EXACT))] = option(
        "auto",
        "Engine that samples responses. 'native': in the trainer's process, with the trainer's weights. 'hf': transformers' "
        "generate, slow but correct for every model. 'auto': native if it is exact for the model, else hf.",
    )
    sft_model_path: str = option(
        "EleutherAI/pythia-160m", "Folder or Hub id of the policy. Only posttrain ppo uses it, if no model is given."
    )
    reward_model_path: str = option(
        "EleutherAI/pythia-160m",
        "Folder or Hub id of the reward and value model. Only posttrain ppo uses it, if no reward function is given.",
    )
    ds3_gather_for_generation: bool = option(
        True, "DeepSpeed ZeRO-3: gather the weights on every device for generation. False is ignored with a warning."
    )
    dataset_num_proc: PositiveInt | None = option(
        None,
        "Accepted for compatibility with TRL. It has no effect, because prompts are tokenized when completions are generated.",
    )
    micro_batch_size: int = field(
        default=0, init=False, metadata={"help": "Computed by the config: per_device_train_batch_size x processes."}
    )
    local_batch_size: int = field(
        default=0,
        init=False,
        metadata={"help": "Computed by the config: number of responses of a rollout batch on one process."},
    )
    batch_size: int = field(
        default=0, init=False, metadata={"help": "Computed by the config: number of responses of a rollout batch."}
    )
    local_mini_batch_size: int = field(
        default=0,
        init=False,
        metadata={"help": "Computed by the config: number of responses of an optimizer step on one process."},
    )
    mini_batch_size: int = field(
        default=0, init=False, metadata={"help": "Computed by the config: number of responses of an optimizer step."}
    )
    num_total_batches: int | None = field(
        default=None,
        init=False,
        metadata={"help": "Computed by the trainer: number of rollout batches of the run. None before that."},
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
                "reward_transform='rank' compares the completions of a prompt, but PPO samples one, so every rank "
                "would be 0.5. Use clip:a:b, log1p, tanh:s, zscore or running."
            )
        if self.total_episodes is not None and self.max_steps > 0:
            raise ConfigError(
                f"total_episodes={self.total_episodes} and max_steps={self.max_steps} both set the length of the "
                "run. Set one of them."
            )
        if self.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size=True would change the size of a rollout batch. Disable it.")

    def refused_engines(self) -> dict[str, str]:
        """Return the engines that ``rollout_engine="auto"`` must not select for PPO. Each engine is mapped to the reason."""
        foreign = "PPO does not correct log-probs from another attention implementation or from a copy of the weights"
        return {"vllm": foreign, "paged": foreign}

    def _check_stop(self) -> None:
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ConfigError(
                f"stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} are both set. Set one of them."
            )
        if self.stop_token not in (None, "eos"):
            raise ConfigError(
                f"stop_token={self.stop_token!r} is unknown. Use 'eos' or None. For another token set stop_token_id."
            )

    def _resolve_batches(self) -> None:
        """Compute the numbers of responses per rollout batch and per mini-batch."""
        rule = "num_mini_batches must divide per_device_train_batch_size x gradient_accumulation_steps"
        self.micro_batch_size = self.per_device_train_batch_size * self.world_size
        self.local_batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self.batch_size = self.local_batch_size * self.world_size
        self.local_mini_batch_size = exact_div(self.local_batch_size, self.num_mini_batches, rule)
        self.mini_batch_size = exact_div(self.batch_size, self.num_mini_batches, rule)
        if self.whiten_rewards and self.local_mini_batch_size < WHITEN_LEAST:
            raise ConfigError(
                f"whiten_rewards=True: mini-batches of {self.local_mini_batch_size} responses per process are too small for a "
                f"standard deviation. Use at least {WHITEN_LEAST} responses, or set whiten_rewards=False."
            )

    def plan(self, rows: int | None) -> None:
        """Compute the numbers of rollout batches, of optimizer steps, and of micro-batches per optimizer step.

        Args:
            rows: Number of rows of the training set. None: unknown.
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
        """Number of micro-batches per mini-batch. Each mini-batch is one optimizer step."""
        return max(1, math.ceil(self.local_mini_batch_size / int(self.per_device_train_batch_size)))

    def take_batch_size(self, size: int) -> None:
        """Set the per-device batch size without changing the number of responses per rollout batch and per mini-batch. See
        `PostTrainingConfig.take_batch_size`.
        """
        self.per_device_train_batch_size, self.auto_batch_size = size, False
        self.micro_batch_size = size * self.world_size
        self.gradient_accumulation_steps = self.passes_per_step

    # Names that `OnlineTrainer` uses ---------------------------------------------------------------------------------

    @property
    def max_completion_length(self) -> int:
        """Maximum number of tokens of a response."""
        return self.response_length

    @property
    def generation_batch_size(self) -> int:
        """Number of responses per rollout batch, over all processes."""
        return self.batch_size

    @property
    def steps_per_generation(self) -> int:
        """Number of batches of ``per_device_train_batch_size`` rows that the data loader returns at once."""
        return self.local_batch_size // self.per_device_train_batch_size

    @property
    def updates(self) -> int:
        """Number of optimizer steps per rollout batch."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def generations_per_step(self) -> float:
        """Number of rollout batches per optimizer step."""
        return 1 / self.updates
