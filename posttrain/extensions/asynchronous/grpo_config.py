"""`AsyncGRPOConfig`: options that limit the age and the number of rollouts, and options that correct for stale rollouts."""

from __future__ import annotations

import logging
from typing import Annotated, ClassVar, Literal

from posttrain.errors import ConfigError, check_rules
from posttrain.fields import NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Share, config, option
from posttrain.methods.config import PictureConfig
from posttrain.methods.online_config import EpisodeFields, OnlineConfig, check_truncation, reject_reshaped_sampling
from posttrain.rewards.runner import transform_names
from posttrain.rollouts.engines import IN_WORKERS

logger = logging.getLogger(__name__)

DEFAULT_URL = "http://localhost:8000"

# Fields of synchronous training that asynchronous training does not support, each with the only accepted value.
MEANINGLESS = {
    "num_iterations": 1,
    "dynamic_sampling": 0,
    "beta": 0.0,
    "sync_ref_model": False,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "use_liger_kernel": False,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_sleep_level": "auto",
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "balance_ranks": True,
    "check_reward_determinism": False,
    # The correction for stale rollouts cannot be disabled. Only its mode can be set.
    "vllm_importance_sampling_correction": True,
}


@config
class AsyncGRPOConfig(PictureConfig, EpisodeFields, OnlineConfig):
    """Arguments of `AsyncGRPOTrainer`: GRPO on rollouts that other processes sample during training.

    One optimizer step takes ``samples_per_step`` rollouts from a queue. The number of forward passes of a step depends on
    the number of tokens in these rollouts. ``gradient_accumulation_steps`` only determines the default of
    ``samples_per_step``, and is then set to 1.
    """

    _least_generations: ClassVar[int] = 2
    _corrects_sampler: ClassVar[bool] = True
    _meaningless: ClassVar[dict[str, object]] = MEANINGLESS

    lr_scheduler_type: str = option(
        "constant",
        "Learning-rate schedule: the name of any scheduler of transformers. The default is 'constant', whereas GRPOConfig's "
        "default is 'linear'.",
    )
    logging_steps: float = option(
        1, "Number of optimizer steps between two log lines. A value below 1 is a fraction of all steps."
    )
    max_completion_length: PositiveInt = option(
        2048, "Maximum number of tokens of a rollout after its prompt, over all its turns."
    )
    samples_per_step: PositiveInt | None = option(
        None,
        "Number of rollouts per optimizer step. None: per_device_train_batch_size x gradient_accumulation_steps x processes.",
    )
    token_budget: int | None = option(
        None,
        "Maximum number of tokens in a row. Rollouts with more tokens are dropped. None: the model's context length. 0 "
        "or less: no limit.",
    )
    max_inflight_tasks: int = option(
        -1,
        "Maximum number of rollouts that are sampled concurrently, rounded up to whole groups. -1: (max_staleness + 1) x "
        "samples_per_step.",
    )
    max_staleness: NonNegativeInt = option(
        4,
        "Maximum staleness of a rollout when it arrives. Staleness is the number of weight versions between the rollout's "
        "weights and the trainer's weights. 0 is on-policy. A larger value keeps workers busy, but uses older rollouts.",
    )
    max_staleness_hard: NonNegativeInt | None = option(
        None,
        "Maximum staleness of a rollout when it is used for training. It must be at least max_staleness. None: same "
        "as max_staleness.",
    )
    staleness_policy: Literal["drop", "pace"] = option(
        "drop",
        "How staleness is limited. 'drop': sample as many rollouts as possible, and discard rollouts that become too old. "
        "'pace': sample only as many rollouts as training can use in time, so that no rollout is discarded.",
    )
    queue_maxsize: PositiveInt = option(
        1024, "Maximum number of finished rollouts in the queue. It must be at least num_generations."
    )
    queue_max_tokens: PositiveInt | None = option(
        None,
        "Maximum number of tokens of all rollouts in the queue. Unfinished rollouts count with their maximum "
        "length. None: no limit.",
    )
    weight_sync_steps: PositiveInt = option(1, "Number of optimizer steps after which workers receive new weights.")
    num_rollout_workers: PositiveInt = option(1, "Number of processes that sample rollouts.")
    worker_engine: Annotated[str, OneOf(("auto", *IN_WORKERS))] = option(
        "auto",
        "Engine of the workers. 'native' and 'hf': each worker has a copy of the model on the CPU. 'server': workers send "
        "requests to the rollout servers at vllm_server_base_url. 'auto': 'server' if that is set, else 'native'.",
    )
    worker_threads: PositiveInt | None = option(
        None, "Number of CPU threads per worker. None: workers and trainer get equal shares of the CPU cores."
    )
    worker_segment_s: PositiveFloat = option(
        30.0,
        "Interval in seconds after which a worker sends its finished groups and continues with the unfinished groups.",
    )
    vllm_server_base_url: list[str] | None = option(
        None,
        "Address of the rollout server for worker_engine='server', a list of addresses, or a file with one address per line. "
        "The file is read again at every weight update, so servers can join and leave. None: http://localhost:8000.",
    )
    request_timeout: PositiveFloat | None = option(
        None, "Timeout of a request to a server, in seconds. None: 600, or vllm_server_timeout if that is longer."
    )
    heartbeat_stale_after_s: PositiveFloat = option(
        300.0, "Number of seconds without a heartbeat after which a worker is replaced."
    )
    weight_sync_timeout: PositiveFloat | None = option(
        None, "Timeout of a weight update, in seconds. None: 1800, or vllm_server_timeout if that is longer."
    )
    sync_timeout_s: PositiveFloat | None = option(None, "Deprecated name of weight_sync_timeout.")
    vllm_sync_timeout: PositiveFloat | None = option(None, "Alias of weight_sync_timeout: the name used in GRPOConfig.")
    max_worker_restarts: NonNegativeInt = option(
        8, "Maximum number of workers that are replaced within ten minutes before the run stops."
    )
    rollout_failure_budget: Share = option(
        0.05, "Maximum fraction of the last 200 rollouts that may fail before the run stops, from 0 to 1."
    )
    reward_timeout_s: PositiveFloat = option(
        120.0, "Timeout of a reward function for one group, in seconds. reward_timeout overrides this field."
    )
    tool_timeout_s: PositiveFloat | None = option(None, "Timeout of a tool call, in seconds. None: tool_timeout (60).")
    fork_threshold_tokens: PositiveInt = option(
        1024, "Accepted for compatibility with TRL. It has no effect, because sampled tokens are never rewritten."
    )
    scale_rewards: Literal["population", "group", "none"] = option(
        "population",
        "How advantages are scaled. 'population': divide by the population standard deviation of the group's rewards plus "
        "1e-8. 'group': divide by the sample standard deviation plus 1e-4, as in GRPOConfig. 'none': do not scale.",
    )
    vllm_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric"] | None
    ) = option(
        None,
        "How the loss corrects for rollouts that were sampled with older weights. None: the clipped importance ratio of the "
        "loss is the only correction. Other values multiply the policy gradient by the ratio between policy and sampler, "
        "bounded as described in GRPOConfig: 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask' or "
        "'geometric'. Use 'token_truncate' for large steps.",
    )
    vllm_importance_sampling_clip_max: PositiveFloat | None = option(
        2.0,
        "Upper bound of the correction's ratio, above 0. The truncate modes clamp a larger ratio to the bound. The mask modes "
        "and 'geometric' set a larger ratio to 0. None: no upper bound.",
    )
    delta: PositiveFloat | None = option(
        None,
        "Upper bound of the importance ratio for completions with a negative advantage, for which the clip has no upper "
        "bound. It should be above 1 + epsilon_high. None: no bound.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "float32",
        "Precision of a model that is loaded by name. 'auto' uses the checkpoint's precision. The key dtype in "
        "model_init_kwargs overrides this field.",
    )

    def __post_init__(self) -> None:
        self.check_fields()
        self._refuse_meaningless()
        # The trainer's engine is used only for evaluation. Apply rollout_engine="server" to the workers instead.
        if self.rollout_engine == "server":
            self.rollout_engine, self.worker_engine = "auto", "server"
        self.reward_timeout = self.reward_timeout_s if self.reward_timeout is None else self.reward_timeout
        self.tool_timeout = self.tool_timeout if self.tool_timeout_s is None else self.tool_timeout_s
        # One timeout applies to all requests, as in TRL 1.18. The separate options of TRL 1.16 override this timeout.
        self._one_value(("request_timeout", "vllm_request_timeout"), max(600, self.vllm_server_timeout))
        names = ("weight_sync_timeout", "sync_timeout_s", "vllm_sync_timeout")
        self._one_value(names, max(1800, self.vllm_server_timeout))
        super().__post_init__()
        self._check_ranges()
        if self.fork_threshold_tokens != type(self).fork_threshold_tokens:
            logger.warning(
                "fork_threshold_tokens=%d has no effect: a prompt that does not continue the conversation token by "
                "token starts a new branch, and no sampled token is excluded from the loss.", self.fork_threshold_tokens,
            )  # fmt: skip
        check_truncation(self)
        if self._corrects_sampler and (self.truncation or self.resolved_engine == "server"):
            # Reject penalties and structured outputs. Log-probs from servers and log-probs after truncation include the
            # effect of these options.
            reject_reshaped_sampling(self)
        if self.max_staleness_hard is None:
            self.max_staleness_hard = self.max_staleness
        if self.max_staleness_hard < self.max_staleness:
            raise ConfigError(
                f"max_staleness_hard={self.max_staleness_hard} is below max_staleness={self.max_staleness}, so some "
                "accepted rollouts would never be used for training. Raise max_staleness_hard, or set it to None."
            )
        self._resolve_inflight()
        # A resumed run must not skip batches, because the prompt stream continues from its position in the checkpoint.
        self.ignore_data_skip = True

    def _one_value(self, names: tuple[str, ...], default: float) -> None:
        """Set all names of one option to the value that the user set under one of them, or else to ``default``."""
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if len(set(values.values())) > 1:
            raise ConfigError(f"{values} are names of the same option with different values. Fix: set only {names[0]}.")
        for name in names:
            setattr(self, name, next(iter(values.values()), default))

    def _refuse_meaningless(self) -> None:
        if names := transform_names(self.reward_transform) & {"running", "zscore"}:
            raise ConfigError(
                f"reward_transform={min(names)!r} is not supported: workers score each group separately and do not "
                "have statistics of all rewards. Use rank, log1p, tanh:s or clip:a:b, or set scale_rewards to "
                "'population' or 'group'."
            )
        if self.deepspeed is not None:
            raise ConfigError(
                f"deepspeed={self.deepspeed!r}: asynchronous GRPO supports one process, DDP and FSDP2. Remove the option."
            )
        for name, neutral in self._meaningless.items():
            value = getattr(self, name)
            if value != neutral:
                error = NotImplementedError if name == "use_liger_kernel" else ConfigError
                raise error(
                    f"{name}={value!r} is not supported by asynchronous GRPO. Every rollout is used once, its importance ratio "
                    "is relative to the weights that sampled it, and there is no reference model. worker_engine selects the "
                    "engine, and vllm_server_base_url selects the servers. Remove the option, or use GRPOTrainer."
                )

    def _check_ranges(self) -> None:
        assert self.samples_per_step is not None
        rules: list[tuple[str, bool, str]] = [
            ("max_inflight_tasks", self.max_inflight_tasks == -1 or self.max_inflight_tasks > 0, "must be -1 or above 0"),
            ("queue_maxsize", self.queue_maxsize >= self.num_generations, "must be at least num_generations"),
            (
                "samples_per_step",
                self.samples_per_step >= self.world_size,
                f"must be at least one rollout for each of {self.world_size} processes",
            ),
        ]  # fmt: skip
        check_rules(self, rules)

    def _resolve_batches(self) -> None:
        """Compute the number of rollouts per step, and check that evaluation batches contain whole groups."""
        if self.auto_batch_size:
            raise ConfigError(
                "per_device_train_batch_size='auto' is not supported in asynchronous training: a step takes samples_per_step "
                "rollouts, in passes up to max_row_tokens. Fix: set samples_per_step, and remove per_device_train_batch_size."
            )
        if self.samples_per_step is None:
            per_rank = self.per_device_train_batch_size * self.gradient_accumulation_steps
            self.samples_per_step = per_rank * self.world_size
        self.gradient_accumulation_steps = self.steps_per_generation = 1
        self.generation_batch_size = self.num_generations
        self._check_evaluation_groups()

    def _resolve_inflight(self) -> None:
        assert self.samples_per_step is not None
        wanted, group = self.max_inflight_tasks, self.num_generations
        if wanted == -1:
            wanted = (self.max_staleness + 1) * self.samples_per_step
        self.max_inflight_tasks = -(-wanted // group) * group

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the rollout servers."""
        urls = self.vllm_server_base_url or DEFAULT_URL
        return [urls] if isinstance(urls, str) else list(urls)

    def check_vllm_settings(self) -> None:
        """Raise an error if vLLM is requested in the trainer's process, because the trainer's engine is used only for
        evaluation.
        """
        raise ConfigError(
            "use_vllm=True is not supported, because workers sample the rollouts. Fix: set worker_engine='server' "
            "with the address of a vLLM server."
        )

    @property
    def resolved_engine(self) -> str:
        """Engine of the workers. The value 'auto' is resolved to 'server' or 'native'."""
        if self.worker_engine != "auto":
            return self.worker_engine
        return "server" if self.vllm_server_base_url else "native"
