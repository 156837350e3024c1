"""`VLLMEngine` runs vLLM in the trainer's process. `run_server` starts vLLM's server with the options that training needs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError, MissingDependencyError, RolloutError, WeightSyncError
from posttrain.extensions.server.replies import API_KEY_VARIABLE, LOOPBACK, check_token, sampling_body
from posttrain.extensions.server.tokens import write_token
from posttrain.integrations import require
from posttrain.integrations.machine import port_is_free
from posttrain.models.heads import causal_lm, picture_encoder
from posttrain.redaction import hide_secrets
from posttrain.rollouts.adapters import AdapterWeights, adapter_obstacle
from posttrain.rollouts.base import Capabilities, RolloutEngine, check_followed, refuse_virtual_tokens
from posttrain.rollouts.native.requests import check_requests
from posttrain.rollouts.sampling import derived_seed, reshapes
from posttrain.rollouts.shared_memory import SharedFolder
from posttrain.rollouts.shared_weights import as_dtype
from posttrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from accelerate import Accelerator

    from posttrain.methods.config import PostTrainingConfig

logger = logging.getLogger(__name__)

# Import path of the worker extension that receives weights through shared memory. Commands that were written for earlier
# versions of posttrain contain its old path, which can still be imported (`posttrain.compat.paths.MOVED`).
EXTENSION = "posttrain.extensions.vllm.worker.WorkerExtension"
OLD_EXTENSION = "posttrain.rollouts.vllm_worker.WorkerExtension"
TRANSFER = '{"backend": "posttrain"}'
GUARDS = "posttrain.extensions.server.guard"
TRANSFERS = ("posttrain", "nccl")
# vLLM options that must have a certain value in training, with this value and the problem that other values cause.
CHECKED = {
    "logprobs-mode": ("processed_logprobs", "log-probs would not include the temperature and truncation"),
    "generation-config": ("vllm", "sampling settings of the model's folder would change what is sampled"),
    "worker-extension-cls": (EXTENSION, "weights could not be pushed through shared memory"),
}
# Adapter ranks for which vLLM has kernels.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Layers for which vLLM supports adapters. The output layer is excluded. If it has an adapter, vLLM 0.32 uses the wrong rows
# of logits when it scores given sequences, and the trainer compares such scores after a push.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Size of the KV cache on a CPU, in GB. vLLM's default would take most of the machine's memory.
CPU_CACHE_GB = "4"

State = Literal["awake", "asleep1", "asleep2"]
LEVELS = ("auto", "1", "2")
# Sleep level 1 needs free host memory of this multiple of the size of all ranks' weights.
ROOM = 1.2


class Sleeps(Protocol):
    """Methods of an engine that can release device memory and allocate it again."""

    def sleep(self, level: int) -> Any: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> Any: ...


def choose_level(choice: str, *, generations_per_push: float, model_bytes: int, ranks: int, free_bytes: int) -> int:
    """Return vLLM's sleep level. Level 1 keeps the weights in host memory, and level 2 drops the weights.

    "auto" selects level 1 if there is more than one generation per push on average and the weights fit into host memory.

    >>> choose_level("auto", generations_per_push=2.0, model_bytes=10, ranks=1, free_bytes=12)
    1
    >>> choose_level("auto", generations_per_push=1.0, model_bytes=10, ranks=1, free_bytes=12)
    2
    """
    if choice != "auto":
        return int(choice)
    return 1 if generations_per_push > 1 and free_bytes >= ROOM * model_bytes * ranks else 2


class Sleeper:
    """Manages vLLM's sleep mode: ``awake``, ``asleep1`` or ``asleep2``. It also records whether the engine has
    the pushed weights.

    After ``asleep2``, all weights must be pushed before the next generation. The weights are never reloaded from disk,
    because the policy differs from the checkpoint once training has begun.

    Args:
        engine: Engine with ``sleep`` and ``wake_up``.
        level: Sleep level. None: the engine never sleeps.
        valid: Whether the engine may sample with the weights that it loaded when it was created. False in training,
            because weights must be pushed first.

    Attributes:
        state: Current sleep state.
        valid: Whether the engine may sample with its current weights.
    """

    def __init__(self, engine: Sleeps, level: int | None, *, valid: bool = True) -> None:
        self.engine, self.level, self.valid = engine, level, valid
        self.state: State = "awake"
        self._without_cache = False

    def before_push(self) -> None:
        """Allocate memory for the weights, but not for the KV cache, because gathering sharded weights needs memory too."""
        if self.state != "awake":
            self.engine.wake_up(["weights"])
            self.state, self._without_cache = "awake", True
        self.valid = False

    def pushed(self) -> None:
        """Record that the engine has received all weights."""
        self.valid = True

    def before_generate(self) -> None:
        """Wake the engine, so that weights and KV cache are in device memory.

        Raises:
            WeightSyncError: The engine lacks the trainer's weights, because sleep level 2 dropped them or they were never
                pushed.
        """
        if not self.valid:
            raise WeightSyncError(
                f"the engine is {self.state} and does not have the trainer's weights. Push them (load_weights) before "
                "generating; they are not reloaded from disk.",
                phase="generate",
            )
        if self.state == "asleep1":
            self.engine.wake_up(None)
        elif self._without_cache:
            self.engine.wake_up(["kv_cache"])
        self.state, self._without_cache = "awake", False

    def sleep(self) -> None:
        """Put the engine to sleep, so that the training step can use its device memory."""
        if self.level is None or self.state != "awake":
            return
        self.engine.sleep(self.level)
        self.state, self._without_cache = ("asleep1", False) if self.level == 1 else ("asleep2", False)
        self.valid = self.valid and self.level == 1


# Maximum number of tokens per batch. vLLM reserves memory for such a batch. With vLLM's default, it would reserve most of a
# shared GPU's memory.
BATCHED_TOKENS = 4096
NAMES_SHOWN = 5
UNKNOWN = ("no_repeat_ngram",)  # Fields of `Sampling` that vLLM does not support.


class VLLMEngine(RolloutEngine):
    """Rollout engine that runs vLLM in the trainer's process.

    vLLM returns log-probs after temperature and truncation (``processed_logprobs``). If sampling is truncated,
    log-probs before truncation are not available, so `Rollout.logp` contains the processed log-probs too.

    Args:
        llm: Object ``vllm.LLM`` with ``logprobs_mode="processed_logprobs"``. See `create`.
        context: Maximum number of tokens of a prompt with its completion.
        vocabulary: Vocabulary size of the model.
        dtype: Dtype of vLLM's weights.
        sleep_level: vLLM's sleep level between generations. None: the engine stays awake.
        encoder: `PictureEncoder` of the model, if prompts may contain images. vLLM receives the original images and
            preprocesses them itself.
        adapter_rank: Maximum rank of LoRA adapters that are pushed to vLLM as adapters. None: adapters are merged into the
            weights before a push.

    >>> engine = VLLMEngine.create("model-folder", dtype="float32")  # doctest: +SKIP
    >>> engine.load_weights(Weights(model, checkpoint_names=True), version=1)  # doctest: +SKIP
    """

    name = "vllm"

    def __init__(
        self,
        llm: Any,
        *,
        context: int | None,
        vocabulary: int,
        dtype: Any = None,
        sleep_level: int | None = None,
        encoder: Any = None,
        adapter_rank: int | None = None,
    ) -> None:
        self.encoder = encoder
        # LoRA request of the current adapter. None: vLLM samples without an adapter.
        self._adapter: Any = None
        self._folder: SharedFolder | None = None
        # Whether to assume that the weights that vLLM loaded at its start equal the base model's weights. False after a
        # comparison of log-probs has failed.
        self._base_known = True
        self.llm, self.context, self.vocabulary, self.dtype = llm, context, vocabulary, as_dtype(dtype)
        self.capabilities = Capabilities(
            in_process=True, needs_weight_sync=True, scores_sequences=True, prefix_cache=True, sleeps=sleep_level is not None,
            checkpoint_names=True, unsupported=UNKNOWN, context=context, dtype=self.dtype, pictures=encoder is not None,
            adapter_rank=adapter_rank, adapter_layers=ADAPTED,
        )  # fmt: skip
        self.sleeper = Sleeper(llm, sleep_level)

    @classmethod
    def create(
        cls,
        model: str,
        *,
        sleep_level: int | None = None,
        encoder: Any = None,
        adapter_rank: int | None = None,
        **options: Any,
    ) -> VLLMEngine:
        """Create the engine and its vLLM object in this process.

        Args:
            model: Folder or Hub id of the model.
            sleep_level: vLLM's sleep level between generations. None: the engine stays awake.
            encoder: `PictureEncoder` of the model, if prompts may contain images.
            adapter_rank: Maximum rank of LoRA adapters. None: adapters are merged into the weights before a push.
            options: Arguments of ``vllm.LLM``: ``revision``, ``dtype``, ``max_model_len``, ``gpu_memory_utilization``,
                ``tensor_parallel_size``, ``max_num_seqs``, ``seed``, ``quantization``, ``model_impl``.

        Raises:
            MissingDependencyError: vLLM is not installed.
            ConfigError: Sleep mode is requested, but this build of vLLM does not support it.
        """
        # Run vLLM in this process, so that weights can be passed without a copy.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GB)
        vllm = require("vllm", "rollouts by vLLM in this process (vllm_mode='colocate')")
        if sleep_level is not None and not sleep_available():
            raise ConfigError(
                f"vllm_enable_sleep_mode=True: vLLM {vllm.__version__} does not support sleep mode on this machine's "
                f"{_platform().device_name or 'device'}, because there is no accelerator memory to release. Set it to "
                "False."
            )
        fixed = {
            **_prefill(),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # Ignore the sampling settings in the checkpoint's generation config.
            "enable_sleep_mode": sleep_level is not None,
        }
        if adapter_rank is not None:
            adapter_rank = next((rank for rank in LORA_RANKS if rank >= adapter_rank), adapter_rank)
            fixed |= {"enable_lora": True, "max_lora_rank": adapter_rank, "lora_target_modules": list(ADAPTED)}
        chosen = {name: value for name, value in options.items() if value is not None}
        llm = vllm.LLM(model=model, **(fixed | chosen))
        config = llm.llm_engine.model_config
        return cls(
            llm,
            context=config.max_model_len,
            vocabulary=config.get_vocab_size(),
            dtype=config.dtype,
            sleep_level=sleep_level,
            encoder=encoder,
            adapter_rank=adapter_rank,
        )

    @classmethod
    def for_training(cls, model: nn.Module, args: PostTrainingConfig, accelerator: Accelerator) -> VLLMEngine:
        """Create the engine from a trainer's config. Every process has its own engine.

        Raises:
            ConfigError: The tensor parallel size is not supported, or the model is in 8 bits or has no folder or Hub id.
        """
        shards, world = args.vllm_tensor_parallel_size, accelerator.num_processes
        if world % shards:
            raise ConfigError(
                f"vllm_tensor_parallel_size={shards} does not divide the {world} processes. Set it to one of "
                f"{[n for n in range(1, world + 1) if world % n == 0]}."
            )
        if shards > 1:
            raise ConfigError(
                f"vllm_tensor_parallel_size={shards}: with vllm_mode='colocate' each process runs its own whole "
                "engine. Serve a model that needs several accelerators with vllm_mode='server'."
            )
        base = causal_lm(model)
        path = base.config.name_or_path
        if not path:
            raise ConfigError(
                "vllm_mode='colocate' loads the model's architecture from its folder or id, but this model has neither. "
                "Load it with from_pretrained, or save it first."
            )
        level = None
        if args.vllm_enable_sleep_mode:
            level = _level(base, args, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        init, encoder = args.model_init_kwargs or {}, picture_encoder(base)
        engine = cls.create(
            path,
            sleep_level=level,
            encoder=encoder,
            adapter_rank=_adapter_rank(model, args, level),
            limit_mm_per_prompt=_image_limit(args, encoder),
            revision=init.get("revision"),
            trust_remote_code=args.trust_remote_code,
            dtype=str(_engine_dtype(base, accelerator)).removeprefix("torch."),
            max_model_len=args.vllm_max_model_length,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_num_seqs=args.train_batch_size * (args.steps_per_generation or 1),
            model_impl=args.vllm_model_impl,
            quantization=_quantisation(base),
            seed=accelerator.process_index,
            distributed_executor_backend="external_launcher" if world > 1 else None,
            enforce_eager=None if accelerator.device.type == "cuda" else True,
        )
        engine.check_pictures(base)
        # Do not sample before the first push, because the weights on disk may differ from the policy's weights.
        engine.sleeper.valid = False
        return engine

    # Interface of engines

    def needs_weights(self) -> bool:
        """Return whether weights must be pushed, because sleep level 2 dropped them or they were never pushed."""
        return not self.sleeper.valid

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Sample completions with vLLM. See `RolloutEngine.generate`."""
        own = [name for name in Sampling.__dataclass_fields__ if name not in UNKNOWN]
        check_followed(requests, sampling, "vLLM", UNKNOWN, own)
        placeholder = None if self.encoder is None else self.encoder.processor.token_id
        check_requests(requests, sampling, self.context, self.vocabulary, placeholder=placeholder)
        self.sleeper.before_generate()
        prompts = [self._prompt(request) for request in requests]
        settings = [self._settings(r, sampling, index) for index, r in enumerate(requests)]
        outputs = self.llm.generate(prompts, settings, use_tqdm=False, lora_request=self._adapter) if prompts else []
        if len(outputs) != len(requests):
            raise RolloutError(f"vLLM returned results of {len(outputs)} of {len(requests)} requests.")
        return [
            self._rollout(request, completion, request.sampling or sampling)
            for request, output in zip(requests, outputs, strict=True)
            for completion in _whole(output, request, _drawn(request, sampling))
        ]

    def check_pictures(self, model: nn.Module) -> None:
        """Generate from two prompts with images of different sizes. Check that vLLM and the trainer expand the images to
        the same placeholders.

        Raises:
            RolloutError: vLLM's processor creates other placeholders than the trainer (PT-G016).
        """
        encoder = picture_encoder(model)
        rows = [] if encoder is None else encoder.probe_rows()
        self.generate([Request(row.prompt_ids, pictures=row.pictures[0]) for row in rows], Sampling(1, temperature=0.0))

    def _prompt(self, request: Request) -> dict[str, Any]:
        """Convert the prompt of a request to vLLM's format: token ids with one placeholder per image, and the decoded
        images.
        """
        if not request.pictures:
            return {"prompt_token_ids": list(request.prompt_ids)}
        ids = self.encoder.processor.collapsed(request.prompt_ids, request.pictures)
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [image.picture.load() for image in request.pictures]},
        }

    def _rollout(self, request: Request, completion: Any, sampling: Sampling) -> Rollout:
        """Convert a completion from vLLM to a rollout. Its log-probs are those of the sampled distribution."""
        ids, most = list(completion.token_ids), sampling.top_logps
        # At each position, vLLM returns the sampled token first and the most likely tokens after it.
        logps = [float(at[token].logprob) for token, at in zip(ids, completion.logprobs, strict=True)]
        pairs = [[(i, float(x.logprob)) for i, x in at.items()] for at in completion.logprobs] if most else []
        tops = [sorted(at, key=lambda pair: -pair[1])[:most] for at in pairs] if most else None
        reason: Any = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
        drawn = list(logps) if sampling.truncation or reshapes(sampling) else None
        prompt = list(request.prompt_ids)
        return Rollout(prompt, ids, logps, reason, self.version, processed_logp=drawn, top_logps=tops)

    def _settings(self, request: Request, call: Sampling, index: int) -> Any:
        """Create vLLM's ``SamplingParams`` for a request. The seed applies to the first completion. vLLM adds 1 to the seed
        for each further completion.
        """
        own = request.sampling or call
        seed = own.seed if request.sampling is not None else derived_seed(call.seed, index)
        vllm, fields = require("vllm", "sampling"), sampling_body(own)
        if "structured_outputs" in fields:
            guide = vllm.sampling_params.StructuredOutputsParams(**fields["structured_outputs"])
            fields["structured_outputs"] = guide
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): value for token, value in fields["logit_bias"].items()}
        seed = None if seed is None else int(seed)
        return vllm.SamplingParams(n=_drawn(request, call), seed=seed, detokenize=bool(own.stop_strings), **fields)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights in the way in which vLLM loads a checkpoint, and clear the prefix cache.

        If ``named_tensors`` is empty, only the version changes. A LoRA adapter (`AdapterWeights`) is added to the current
        weights, which must be those of the base model.

        Raises:
            ModelError: Names or shapes of the weights differ from those of vLLM's model.
            WeightSyncError: Some weights were not received.
        """
        if isinstance(named_tensors, AdapterWeights):
            if not self._base_known:
                self.load_weights(named_tensors.base(True), version)
            self._take_adapter(named_tensors, version)
            return
        self._adapter, self._base_known = None, False
        missing = self.replace_weights(named_tensors, version)
        if missing:
            self.sleeper.valid = False
            raise WeightSyncError(
                f"vLLM still has old values of {len(missing)} weights: {', '.join(missing[:NAMES_SHOWN])}. Load the model "
                "that is trained (same architecture, same names), and push all of its weights.",
                phase="end", version=version,
            )  # fmt: skip

    def _take_adapter(self, adapter: AdapterWeights, version: int) -> None:
        """Load a LoRA adapter, use it for all later sampling, and remove the previous adapter."""
        vllm = require("vllm.lora.request", "an adapter of its own for vLLM")
        self._folder = self._folder or SharedFolder()
        folder, earlier = self._folder.path / f"adapter-{version}", self._adapter
        adapter.write(folder)
        self.sleeper.before_push()
        self._adapter = vllm.LoRARequest(f"adapter-{version}", version + 1, str(folder))
        self.llm.llm_engine.add_lora(self._adapter)
        self.sleeper.pushed()
        if earlier is not None and earlier.lora_int_id != self._adapter.lora_int_id:
            self.llm.llm_engine.remove_lora(earlier.lora_int_id)
            shutil.rmtree(earlier.lora_path, ignore_errors=True)
        self.version, self._base_known = version, True

    def mark_stale(self) -> None:
        """Mark the base model's weights as unknown, so that they are pushed again before the next adapter."""
        self._base_known = False

    def replace_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> list[str]:
        """Replace weights as `load_weights` does, and return the names of parameters that were not received."""
        iterator = iter(named_tensors)
        first = next(iterator, None)
        missing: list[str] = []
        if first is not None:
            self.sleeper.before_push()
            pairs = ((n, t.to(self.dtype) if t.is_floating_point() else t) for n, t in _chained(first, iterator))
            worker = require("posttrain.extensions.vllm.worker", "pushing weights to vLLM")
            (missing,) = self.llm.collective_rpc(worker.reload, args=(pairs,))
            self.sleeper.pushed()
        self.llm.reset_prefix_cache()
        # Clear vLLM's cache of image features, because these features were computed with the old weights.
        if self.encoder is not None:
            self.llm.llm_engine.reset_encoder_cache()
        self.version = version
        return missing

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> dict[str, list[list[float]]]:
        """Compute the log-probs of given sequences after their prompts. The result has one key, whose value has one
        list per sequence.
        """
        vllm = require("vllm", "scoring")
        self.sleeper.before_generate()
        # Scoring needs one free position in the context, because vLLM always generates one token.
        settings = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)[: (self.context or 10**9) - 1]} for ids in sequences]
        outputs = self.llm.generate(prompts, settings, use_tqdm=False, lora_request=self._adapter)
        lines = []
        for ids, begin, output in zip(sequences, prompt_lengths, outputs, strict=True):
            logprobs = output.prompt_logprobs
            lines.append([float(logprobs[t][ids[t]].logprob) for t in range(begin, len(logprobs))])
        return {"vllm": lines}

    def sleep(self) -> None:
        """Release device memory if a sleep level is set. See `RolloutEngine.sleep`."""
        self.sleeper.sleep()

    def close(self) -> None:
        """Release vLLM and its memory."""
        self.llm = None
        if self._folder is not None:
            self._folder.close()


def vllm_refusal(model: nn.Module) -> str | None:
    """Return the reason why vLLM cannot sample from a model in the trainer's process. Return None if vLLM supports the
    model.
    """
    try:
        vllm = require("vllm", "rollouts by vLLM in this process")
        refuse_virtual_tokens(model, "vLLM")
        _quantisation(model)
    except (ConfigError, MissingDependencyError) as error:
        return str(error)
    config = causal_lm(model).config
    if not config.name_or_path:
        return "the model has no folder or id from which vLLM could load its architecture"
    if not set(config.architectures or ()) & set(vllm.ModelRegistry.get_supported_archs()):
        return f"vLLM {vllm.__version__} does not have {' or '.join(config.architectures or ['its architecture'])}"
    return None


def _platform() -> Any:
    return require("vllm.platforms", "vLLM's platform").current_platform


def on_cpu() -> bool:
    """Return whether vLLM runs on a CPU."""
    return bool(_platform().is_cpu())


def server_options(cpu: bool) -> dict[str, str | None]:
    """Return options of vLLM's server with which log-probs are correct and weights can be pushed.

    Args:
        cpu: Whether vLLM runs on a CPU. Chunked prefill is then disabled, because requests with seeds would fail.
    """
    options: dict[str, str | None] = {name: value for name, (value, _) in CHECKED.items()}
    # Do not limit the number of log-probs per position, because teachers return many log-probs.
    options |= {"max-logprobs": "-1", "weight-transfer-config": TRANSFER}
    return options | ({"no-enable-chunked-prefill": None} if cpu else {})


def generates_from_pictures() -> bool:
    """Return whether vLLM's server has the option ``--enable-scale-out``, which it needs for token ids together with images."""
    try:
        options = require("vllm.entrypoints.launchers.cli_args", "options of vLLM's server").FrontendArgs
    except (MissingDependencyError, AttributeError):
        return False  # This version of vLLM does not have this module or class.
    return hasattr(options, "enable_scale_out")


def vllm_command(argv: Sequence[str], *, cpu: bool, pictures: bool = False) -> list[str]:
    """Return the command-line options for vLLM's server: the user's options, and the options that training needs.

    Args:
        argv: Options of vLLM's server that the user passed.
        cpu: Whether vLLM runs on a CPU.
        pictures: Whether to add ``--enable-scale-out``. See `generates_from_pictures`.

    Raises:
        ConfigError: An option is not supported in training.

    >>> vllm_command(["--model", "m", "--max-model-len", "512"], cpu=False)[:4]
    ['--model', 'm', '--max-model-len', '512']
    """
    parser = argparse.ArgumentParser(prog="posttrain vllm-serve", add_help=False, allow_abbrev=False)
    for name in ("model", "host", "port", "config", *CHECKED, "weight-transfer-config"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}" if "-" in name else f"--{name}")
    parser.add_argument("--lora-target-modules", "--lora_target_modules", nargs="+")
    parser.add_argument("--enable-chunked-prefill", "--enable_chunked_prefill", action="store_true")
    parsed, rest = parser.parse_known_args(list(argv))
    _refuse_abbreviations(rest, parser)
    if parsed.config:
        raise ConfigError(
            f"--config {parsed.config}: a file is not supported, because its options are not checked and the "
            "token is written for the port on the command line. Fix: pass all options on the command line."
        )
    if not parsed.model:
        raise ConfigError("--model is missing: set the model to serve.")
    _refuse(parsed, cpu)
    check_token(parsed.host or "127.0.0.1", os.environ.get(API_KEY_VARIABLE))
    words = list(argv)
    for name, value in server_options(cpu).items():
        if getattr(parsed, name.replace("-", "_"), None) is None:
            words += [f"--{name}"] if value is None else [f"--{name}", value]
    if {"--enable-lora", "--enable_lora"} & set(argv) and not parsed.lora_target_modules:
        words += ["--lora-target-modules", *ADAPTED]
    words += ["--enable-scale-out"] if pictures and not {"--enable-scale-out", "--enable_scale_out"} & set(argv) else []
    words += [] if parsed.host else ["--host", "127.0.0.1"]
    # Pass the class as an import path. Importing its module here would need fastapi, which is installed only together with
    # vLLM.
    guard = "LoopbackGuard" if (parsed.host or "127.0.0.1") in LOOPBACK else "Guard"
    return [*words, "--middleware", f"{GUARDS}.{guard}"]


def _refuse_abbreviations(words: Sequence[str], known: argparse.ArgumentParser) -> None:
    """Reject abbreviated options. vLLM accepts abbreviations, but the checks of this module would not recognize them.

    Raises:
        ConfigError: An option is abbreviated.
    """
    for word in words:
        option = word.partition("=")[0]
        whole = [name for name in known._option_string_actions if name.startswith(option)]
        if option.startswith("--") and len(option) > 2 and whole:
            raise ConfigError(
                f"{option} is an abbreviation of {whole[0]}, and abbreviated options are not checked. Fix: use "
                f"{whole[0]}."
            )


def _set_token(words: Sequence[str]) -> None:
    """Create a token for a server that was started without a token. Such a server listens on a loopback address. Trainers
    of the same user find the token in a file.

    If another process listens on the port, no token is created. This server cannot start then, and the other server's token
    must not be replaced.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_known_args(list(words))[0].port
    if not os.environ.get(API_KEY_VARIABLE) and port_is_free(port):
        path = write_token(port)
        os.environ[API_KEY_VARIABLE] = path.read_text()
        logger.info("the server's token is in the file %s, where trainers of the same user find it", path)


def _refuse(parsed: argparse.Namespace, cpu: bool) -> None:
    """Raise an error for options with which log-probs would be wrong or weights could not be pushed.

    Raises:
        ConfigError: One of these options is set.
    """
    for option, (value, why) in CHECKED.items():
        chosen = getattr(parsed, option.replace("-", "_"))
        if chosen not in (None, value, *([OLD_EXTENSION] if value == EXTENSION else [])):
            raise ConfigError(f"--{option} {chosen}: {why}. Fix: remove it ({value} is the default).")
    try:
        backend = json.loads(parsed.weight_transfer_config or TRANSFER)["backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--weight-transfer-config {parsed.weight_transfer_config!r} must be JSON with the key 'backend': {error!r}."
        ) from error
    if backend not in TRANSFERS:
        raise ConfigError(
            f"--weight-transfer-config: the trainer does not support the backend {backend!r}. Fix: use one of "
            f"{', '.join(TRANSFERS)}, or remove the option to use {TRANSFER}."
        )
    if cpu and parsed.enable_chunked_prefill:
        raise ConfigError(
            "--enable-chunked-prefill does not work on a CPU: vLLM cannot rewind a seeded generator after a "
            "chunk, and stops with 'CPU Generator does not use offset'. Fix: remove the option."
        )


def run_server(argv: Sequence[str]) -> int:
    """Check the options of ``posttrain vllm-serve``, then replace this process with vLLM's server.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: An option is not supported in training.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print("usage: posttrain vllm-serve --model MODEL [options of 'vllm serve'; see 'vllm serve --help=all']")
        return 0 if argv else 2
    require("vllm", "posttrain vllm-serve")
    words = vllm_command(argv, cpu=on_cpu(), pictures=generates_from_pictures())
    _set_token(words)
    if {"--enable-lora", "--enable_lora"} & set(argv):
        # Allow adapters to be loaded at runtime, because the trainer pushes adapters while the server runs.
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GB)
    # Run vLLM's server module with this Python. The command `vllm` does not work with the CPU build, because the
    # distribution of this build is named "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    logger.info("starting %s", " ".join(hide_secrets(command)))
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _prefill() -> dict[str, Any]:
    """Return vLLM's options for prefill: chunked prefill on accelerators, and unchunked prefill on a CPU.

    After each chunk of a prompt, vLLM resets the random generator of requests that have a seed. CPU generators do not
    support this, and the engine would stop (``CPU Generator does not use offset``).
    """
    if on_cpu():
        # Without chunks, vLLM needs a batch size of at least one context length. Its default batch size is sufficient.
        return {"enable_chunked_prefill": False}
    return {"max_num_batched_tokens": BATCHED_TOKENS}


def sleep_available() -> bool:
    """Return whether this build of vLLM supports sleep mode."""
    return bool(_platform().is_sleep_mode_available())


def _chained(first: Any, rest: Iterable[Any]) -> Iterable[Any]:
    yield first
    yield from rest


def _drawn(request: Request, call: Sampling) -> int:
    """Return the number of completions to request from vLLM. For greedy decoding, the number is 1, because vLLM rejects
    larger numbers.
    """
    return 1 if (request.sampling or call).temperature == 0 else request.n


def _whole(output: Any, request: Request, drawn: int) -> list[Any]:
    """Return all completions of a request. Raise an error if vLLM returned another prompt or another number of completions
    than requested.
    """
    if request.pictures and list(output.prompt_token_ids) != list(request.prompt_ids):
        raise RolloutError(
            f"PT-G016: vLLM converts a prompt with images of {[image.picture.size for image in request.pictures]} to "
            f"{len(output.prompt_token_ids)} tokens, but the trainer to {len(request.prompt_ids)}, so the processors "
            "differ. Fix: save the processor that the trainer uses in the model's folder, so that vLLM loads the same "
            "processor, or set use_vllm=False."
        )
    if list(output.prompt_token_ids) != list(request.prompt_ids) or len(output.outputs) != drawn:
        raise RolloutError(
            f"vLLM returned {len(output.outputs)} completions of a prompt with {len(output.prompt_token_ids)} tokens, "
            f"instead of {drawn} completions of a prompt with {len(request.prompt_ids)} tokens."
        )
    return sorted(output.outputs, key=lambda completion: completion.index) * (request.n // drawn)


def _image_limit(args: PostTrainingConfig, encoder: Any) -> dict[str, int] | None:
    """Return the maximum number of images per prompt in vLLM's format. vLLM reserves memory for this number of images."""
    most = args.max_images_per_row
    return None if encoder is None or most is None else {"image": most}


def _engine_dtype(model: nn.Module, accelerator: Accelerator) -> torch.dtype:
    """Return the dtype in which training computes its forward pass."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return mixed or next(p.dtype for p in model.parameters() if p.is_floating_point())


def _adapter_rank(model: nn.Module, args: PostTrainingConfig, sleep_level: int | None) -> int | None:
    """Return the rank of the trained adapter if the adapter can be pushed without merging, else None. With sleep level 2, the
    adapter must be merged, because vLLM drops the base model's weights.
    """
    if args.adapter_sync == "merged" or sleep_level == 2 or adapter_obstacle(model, ADAPTED) is not None:
        return None
    return int(model.peft_config[model.active_adapters[0]].r)


def _quantisation(model: nn.Module) -> str | None:
    """Return vLLM's name for the quantization of a 4-bit model, or None. Quantized layers are found by the names of
    their classes, because importing bitsandbytes disturbs vLLM (vllm#32793).
    """
    kinds = {type(module).__name__ for module in model.modules()}
    if "Linear8bitLt" in kinds:
        raise ConfigError(
            "the model was loaded in 8 bits, which vLLM does not support. Load it in 4 bits or unquantized."
        )
    return "bitsandbytes" if "Linear4bit" in kinds else None


def _level(model: nn.Module, args: PostTrainingConfig, ranks: int) -> int:
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    window = (args.steps_per_generation or 1) * args.num_iterations
    per_push = max(args.gradient_accumulation_steps / window, 2.0 if args.do_eval else 1.0)
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return choose_level(
        str(args.vllm_sleep_level), generations_per_push=per_push, model_bytes=size, ranks=ranks, free_bytes=pages
    )
