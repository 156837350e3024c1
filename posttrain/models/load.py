"""Load and prepare models, tokenizers and adapters; `ModelConfig` holds the command line's model options."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Mapping
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import safetensors
import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled

from posttrain.data.chat import inner_tokenizer, terminal_token_ids
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, ModelError, check_choice
from posttrain.fields import PositiveInt, Range, check_fields, config, option
from posttrain.integrations import require
from posttrain.integrations.hub import explained, not_found, refuse_unreachable
from posttrain.models.architecture import config_of, generation_config_of, get_config_model_id, layer_kinds, text_of
from posttrain.models.attention import has_recurrent_layers
from posttrain.models.heads import adapter_kind, adapters_of, causal_lm, output_layer, unwrapped
from posttrain.models.parallel import bf16_is_faster, shards_parameters
from posttrain.models.quantised import prepare_adapter
from posttrain.models.reference import moves_base, trained_outside
from posttrain.models.value_head import without_value

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import LoraConfig, PeftConfig
    from torch import nn
    from torch.nn import Module
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import Tokenizer

logger = logging.getLogger(__name__)


TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
}
# Words in the names of unused special tokens. For the pad token, names with an earlier word in this list are preferred.
UNUSED = ("pad", "reserved", "unused")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@config
class ModelConfig:
    """Model, adapter and quantization options of the command line."""

    # `trust_remote_code` is now an option of training configs. In older releases, `trust_remote_code` was an option of
    # `ModelConfig`.
    trust_remote_code: ClassVar[bool] = False

    model_name_or_path: str | None = option(None, "Folder or Hub id of the model. Training commands require it.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "float32",
        "Precision of the weights: 'float32', 'bfloat16', 'float16', or 'auto' for the checkpoint's precision. The default is "
        "'float32', because small updates would be rounded away in a lower precision. The field bf16 makes computation faster "
        "and does not change this precision. With an adapter, 'bfloat16' halves the memory of the frozen weights.",
    )
    attn_implementation: str | None = option(
        None,
        "Attention backend of transformers, such as 'sdpa', 'flash_attention_2' or 'flex_attention'. None: transformers' "
        "default for the model.",
    )
    use_peft: bool = option(
        False,
        "Train a LoRA adapter instead of all weights, which needs much less memory. The options that start with lora_ have no "
        "effect without it. Use a learning_rate that is about ten times larger than for full fine-tuning.",
    )
    lora_r: PositiveInt = option(
        16, "Rank of the LoRA matrices, at least 1. A larger rank can learn more and needs more memory."
    )
    lora_alpha: PositiveInt = option(
        32,
        "Scale of the adapter: its output is multiplied by lora_alpha / lora_r, or lora_alpha / sqrt(lora_r) with use_rslora.",
    )
    lora_dropout: Annotated[float, Range(least=0, most=0.99)] = option(
        0.05, "Dropout probability on the adapter's input, from 0 to 0.99. 0 disables it."
    )
    lora_target_modules: list[str] | None = option(
        None,
        "Names of the modules that get an adapter, such as q_proj and v_proj. It can also be 'all-linear' or one regular "
        "expression. None: peft's default for the architecture.",
    )
    lora_target_parameters: list[str] | None = option(
        None,
        "Names of parameters that get an adapter, for mixture-of-experts models that store all experts in one tensor. None: "
        "no parameters.",
    )
    lora_modules_to_save: list[str] | None = option(
        None, "Names of modules that are trained and saved in full, in addition to the adapter. None: no modules."
    )
    lora_task_type: str = option(
        "CAUSAL_LM", "peft's task type of the adapter. 'CAUSAL_LM' for language models, 'SEQ_CLS' for reward models."
    )
    use_rslora: bool = option(
        False,
        "Scale the adapter by lora_alpha / sqrt(lora_r) instead of lora_alpha / lora_r (rank-stabilized LoRA). Set it for "
        "large ranks.",
    )
    use_dora: bool = option(
        False,
        "Train the magnitude of the weights separately from their direction (DoRA). It can improve results with small ranks "
        "and is slower than LoRA.",
    )
    load_in_8bit: bool = option(
        False,
        "Load the weights in 8 bits with bitsandbytes. Then only adapters can be trained. It contradicts load_in_4bit.",
    )
    load_in_4bit: bool = option(
        False,
        "Load the weights in 4 bits with bitsandbytes (QLoRA). Then only adapters can be trained. It contradicts load_in_8bit.",
    )
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = option(
        "nf4",
        "With load_in_4bit: data type. 'nf4': quantiles of a normal distribution, which suits weights. 'fp4': 4-bit floating "
        "point.",
    )
    use_bnb_nested_quant: bool = option(
        False, "With load_in_4bit: also quantize the quantization constants, which saves about 0.4 bits per weight."
    )
    bnb_4bit_quant_storage: str | None = option(
        None,
        "With load_in_4bit: dtype of the tensors that store the packed weights. None: uint8. With FSDP, it must be the dtype "
        "of the other weights, such as 'bfloat16'.",
    )

    def __post_init__(self) -> None:
        check_fields(self, beside=object)
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit=True and load_in_4bit=True contradict each other. Fix: set only one.")
        modules: Any = self.lora_target_modules
        modules = [modules] if isinstance(modules, str) else modules
        if modules and len(modules) == 1 and (modules[0] == "all-linear" or set(modules[0]) & set("*+|^$(\\")):
            # peft expects a regex or 'all-linear' as a string. peft would also read a plain module name in a string as a
            # regex. So only a regex or 'all-linear' is unpacked from the list.
            self.lora_target_modules = modules[0]
            try:
                re.compile(modules[0])
            except re.error as error:
                raise ConfigError(
                    f"lora_target_modules={modules[0]!r} is not a valid regular expression ({error})."
                ) from error

    def model_init_kwargs(self, trust_remote_code: bool = False) -> dict[str, Any]:
        """Return the keyword arguments that `create_model_from_path` needs for this config."""
        return {
            "revision": self.model_revision,
            "trust_remote_code": trust_remote_code or self.trust_remote_code,
            "attn_implementation": self.attn_implementation,
            "dtype": self.dtype,
        }


ADAPTER_FIELDS = ("lora_", "use_rslora", "use_dora")


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """Return the LoRA config that ``model_args`` describes. Return None if ``use_peft`` is False.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    if not model_args.use_peft:
        values = vars(model_args)
        unread = [
            f"{item.name}={values[item.name]!r}"
            for item in dataclasses.fields(model_args)
            if item.name.startswith(ADAPTER_FIELDS) and values[item.name] != item.default
        ]
        if unread:
            logger.warning(
                "Ignored without use_peft: %s. The whole model is trained. To train an adapter, pass --use_peft.",
                ", ".join(unread),
            )
        return None
    peft = require("peft", "use_peft=True")
    return peft.LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the bitsandbytes config that ``model_args`` describes, or None without quantization.

    Matrix products with 4-bit weights are computed in float16 if ``dtype`` is float16. Otherwise they are computed in
    bfloat16, or in float32 on hardware where bfloat16 is slower than float32 (`bf16_is_faster`).
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    faster = torch.bfloat16 if bf16_is_faster() else torch.float32
    compute = torch.float16 if model_args.dtype == "float16" else faster
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage or "uint8",
    )


def check_model_source(model: str | Module, *, generative: bool = True) -> None:
    """Raise an error if the model's folder or class cannot be used for training. The check runs before any weight is read.

    Raises:
        ModelError: A local path does not exist or has no ``config.json``, or a generative trainer got a classifier.
    """
    if not isinstance(model, str):
        from transformers import PreTrainedModel

        if isinstance(inner := causal_lm(model), PreTrainedModel):
            _check_class("the model", type(inner).__name__, inner.config, generative=generative)
        return
    folder = Path(model)
    looks_local = folder.is_absolute() or model.startswith((".", "~")) or folder.exists()
    if not looks_local:
        return refuse_unreachable("model", model)
    if not folder.exists():
        raise ModelError(not_found("model", model))
    if not folder.is_dir():
        raise ModelError(f"model={model!r} is not a folder. Fix: pass a hub id or folder with config.json and weights.")
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ModelError(f"the model folder {model!r} has no config.json. Files: {sorted(os.listdir(folder))[:10]}.")
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if (folder / "adapter_config.json").is_file() and not weights:
        raise ModelError(
            f"the model folder {model!r} contains an adapter without its base model. Fix: in Python, load both with peft's "
            f"AutoPeftModelFor{'CausalLM' if generative else 'SequenceClassification'}.from_pretrained(folder, "
            "is_trainable=True) and pass the model. For a command, merge the adapter into its base model first (save_merged)."
        )
    if generative:
        config = AutoConfig.from_pretrained(model)
        _check_class(repr(model), _class_name(config), config)


def _class_name(config: PretrainedConfig) -> str:
    return (config.architectures or [""])[0]


def _check_class(what: str, name: str, config: PretrainedConfig, *, generative: bool = True) -> None:
    """Raise an error if models of a class cannot be trained, e.g. encoder-decoder models.

    Args:
        what: Name of the model in the error message.
        name: Name of the model's class.
        config: Config of the model.
        generative: Whether the model needs a language-model head.
    """
    # Exclude names with "Head", because GPT-2's class with a language-model head is named GPT2LMHeadModel.
    headless = "Classification" in name or (name.endswith("Model") and "Head" not in name)
    if config.is_encoder_decoder:
        why = "is an encoder-decoder model"
    elif generative and name.endswith("ForMaskedLM"):
        why = "predicts masked tokens: each token attends to later tokens"
    elif generative and headless:
        why = "has no language-model head and cannot generate"
    else:
        return
    raise ModelError(
        f"{what} is {name or config.model_type}, which {why}. Fix: use a checkpoint of a causal (decoder-only) language model. "
        "Pass reward models as reward_funcs."
    )


def with_dtype(init: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``init`` with the deprecated keyword ``torch_dtype`` renamed to ``dtype``.

    Raises:
        ConfigError: Both keywords are set and differ, or the dtype is unknown.

    >>> with_dtype({"torch_dtype": "bfloat16"})
    {'dtype': 'bfloat16'}
    """
    keywords = {name: value for name, value in init.items() if name != "torch_dtype"}
    dtype = keywords.get("dtype", init.get("torch_dtype"))
    if isinstance(dtype, str):
        check_choice("dtype", dtype, ("auto", *DTYPES))
    if "torch_dtype" not in init:
        return keywords
    former, dtype = init["torch_dtype"], init.get("dtype", init["torch_dtype"])
    if str(former).removeprefix("torch.") != str(dtype).removeprefix("torch."):
        raise ConfigError(
            f"torch_dtype={former!r} and dtype={dtype!r} set the same option to different values. Fix: pass only "
            "dtype, which replaces torch_dtype."
        )
    return keywords | {"dtype": dtype}


def check_distributed(distributed: Any) -> None:
    """Raise an error if transformers' ``DistributedConfig`` shards the model when it is loaded.

    Weights that are sharded on loading are gathered only during the forward pass of their module. This library uses the
    output layer outside of its module's forward pass, one chunk of logits at a time. The gradient would therefore reach only
    the local shard.

    Args:
        distributed: A ``DistributedConfig`` or a mapping of its fields, from keywords or from a loaded model. May be None.

    Raises:
        ConfigError: A size is above 1, or expert parallelism is enabled.

    >>> check_distributed({"fsdp_size": 1})
    """
    if distributed is None:
        return
    fields = dict(distributed) if isinstance(distributed, Mapping) else vars(distributed)
    sizes = {name: value for name, value in fields.items() if name.endswith("_size") and (value or 1) > 1}
    experts = fields.get("enable_expert_parallel") or sizes.get("ep_size")
    if sizes or experts:
        listed = ", ".join(f"{name}={value}" for name, value in sizes.items()) or "enable_expert_parallel=True"
        needs = (
            "expert parallelism needs an exchange of tokens inside the forward pass, and gradients averaged over only the "
            "processes with the same experts, but here gradients are averaged over all processes"
            if experts
            else "the output layer is used one chunk at a time, outside of the forward pass that gathers its shards"
        )
        raise ConfigError(
            f"distributed_config with {listed} is not supported: {needs}. Fix: remove it. To shard the model, use accelerate's "
            "FSDP2 or ZeRO-3 (--accelerate_config fsdp2)."
        )


def create_model_from_path(
    model_id: str, architecture: Any = None, *, new_head: bool = True, **kwargs: Any
) -> PreTrainedModel:
    """Load a model by hub id or folder, in float32 unless ``dtype`` is set.

    Args:
        model_id: Hub id or folder.
        architecture: Model class. None: the class that is named in the checkpoint's config, or ``AutoModelForCausalLM`` if
            transformers does not have that class.
        new_head: Whether weights that are missing in the checkpoint may be initialized randomly. ``new_head`` only matters if
            ``architecture`` is set.
        **kwargs: Keyword arguments of ``from_pretrained``. ``dtype`` (or ``torch_dtype``) is a torch dtype or one of "auto",
            "bfloat16", "float16", "float32".

    Raises:
        ModelError: The folder or the architecture cannot be used, or the checkpoint lacks weights.
        ConfigError: The ``dtype`` is unknown.
    """
    import transformers

    kwargs = with_dtype(kwargs)
    check_distributed(kwargs.get("distributed_config"))
    dtype = kwargs.pop("dtype", torch.float32)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = DTYPES[dtype]
    elif not (dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype)):
        raise ConfigError(f"dtype={dtype!r} must be a torch.dtype, a string or None, not {type(dtype).__name__}.")
    check_model_source(model_id, generative=architecture is None)
    shared = {k: kwargs[k] for k in ("revision", "trust_remote_code", "cache_dir", "token") if k in kwargs}
    with explained("model", model_id):
        config = transformers.AutoConfig.from_pretrained(model_id, **shared)
    # If the model is a Hub id, its class can be checked only after its config was loaded.
    _check_class(repr(model_id), _class_name(config), config, generative=architecture is None)
    loaded = architecture or getattr(transformers, _class_name(config), transformers.AutoModelForCausalLM)
    try:
        with explained("model", model_id):
            model, info = loaded.from_pretrained(model_id, dtype=dtype, output_loading_info=True, **kwargs)
    # Possible causes are an unknown keyword, a device that this torch does not support, or an unknown activation in
    # config.json.
    except (TypeError, AssertionError, KeyError) as error:
        raise ConfigError(
            f"{loaded.__name__}.from_pretrained cannot load {model_id!r} with {kwargs}: {error}. Fix: correct "
            "model_init_kwargs, or config.json of the model."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        labels = f", with num_labels={kwargs['num_labels']}" if "num_labels" in kwargs else ""
        raise ModelError(
            f"weights of the checkpoint {model_id!r} do not have the shapes that {loaded.__name__} expects according to "
            f"config.json and model_init_kwargs{labels}. Fix: use the config.json that belongs to the checkpoint, and remove "
            "sizes from model_init_kwargs."
        ) from error
    except safetensors.SafetensorError as error:
        raise ModelError(
            f"a weight file of {model_id!r} cannot be read: {error}. Fix: copy or download the file again."
        ) from error
    # Under ZeRO-3, transformers does not list all missing keys. Missing buffers are allowed, because the model computes
    # them.
    if (architecture is None or not new_head) and not is_deepspeed_zero3_enabled():
        # With ignore_mismatched_sizes=True, a parameter is random too if its shape differs from the shape in the checkpoint.
        lost = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
        missing = sorted(lost & dict(model.named_parameters()).keys())
        _refuse_missing(model_id, missing, scores=architecture is not None)
    if unused := sorted(map(str, info["unexpected_keys"])):
        logger.warning(
            "%s: %d tensors of the checkpoint are not used, for example %s.", model_id, len(unused), unused[:3]
        )
    _log_size(model_id, model, config.dtype)
    return model


def _refuse_missing(model_id: str, missing: list[str], *, scores: bool) -> None:
    if not missing:
        return
    what, fix = f"{len(missing)} parameters", "use a complete checkpoint, or the config.json that belongs to it"
    if scores:
        what = "its scores"
        fix = "pass a checkpoint with a classification head, for example one that RewardTrainer saved"
    raise ModelError(
        f"the checkpoint {model_id!r} has no weights for {', '.join(missing[:4])}{' ...' if missing[4:] else ''}, so {what} "
        f"would be random. Fix: {fix}."
    )


def _log_size(model_id: str, model: nn.Module, stored: Any) -> None:
    sizes: dict[Any, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    logger.info(
        "%s: %d parameters, %s.%s", model_id, sum(p.numel() for p in model.parameters()),
        " and ".join(f"{size / 2**30:.2f} GiB in {str(dtype).removeprefix('torch.')}" for dtype, size in sizes.items()),
        f" The dtype of the checkpoint is {stored}." if stored is not None and stored not in sizes else "",
    )  # fmt: skip


def load_classifier(model_id: str, *, num_labels: int, new_head: bool = True, **kwargs: Any) -> PreTrainedModel:
    """Load a sequence classifier and suppress transformers' warnings about a newly initialized head.

    Args:
        model_id: Hub id or folder.
        num_labels: Number of scores per sequence.
        new_head: Whether to initialize a head with torch's global generator if the checkpoint has no head. If False, a
            checkpoint without a head is an error.
        **kwargs: Keyword arguments of ``from_pretrained``.

    Raises:
        ModelError: The checkpoint has no head and ``new_head`` is False, or the number of labels of its head is not
            ``num_labels``.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    kind, verbosity = transformers.AutoModelForSequenceClassification, transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return create_model_from_path(model_id, kind, new_head=new_head, num_labels=num_labels, **kwargs)
    finally:
        transformers_logging.set_verbosity(verbosity)


def model_id_of(model: nn.Module, needed_by: str) -> str:
    """Return the hub id or folder from which a trainer's model was loaded.

    Args:
        model: The ``model`` argument of a trainer: a string or a module.
        needed_by: Name of the trainer, used in the error message.

    Raises:
        ConfigError: ``model`` is None.
        ArgumentTypeError: ``model`` is neither a string nor a module.
    """
    if model is None:
        raise ConfigError(
            f"{needed_by} got model=None. (model_init is not supported, because checks and data need the model first.) Fix: "
            "pass model=model_init(), or the name of a model."
        )
    if isinstance(model, str):
        refuse_unreachable("model", model)
        return model
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"{needed_by} needs model as a path, a Hub id or a module, not {type(model).__name__}.")
    return get_config_model_id(causal_lm(model).config)


def load_tokenizer(
    model_id: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model.

    Raises:
        ModelError: The model was created in memory, its folder has no tokenizer, or the id was not found.
    """
    if not model_id:
        raise ModelError(
            "the model was created in memory, so its tokenizer is unknown. Fix: pass processing_class=tokenizer."
        )
    if Path(model_id).is_dir() and not TOKENIZER_FILES & set(os.listdir(model_id)):
        raise ModelError(
            f"the model folder {model_id!r} has no tokenizer (none of {', '.join(sorted(TOKENIZER_FILES))}). Fix: "
            "save the tokenizer there with tokenizer.save_pretrained(folder), or pass processing_class=tokenizer."
        )
    extra = {"revision": revision} if revision else {}
    with explained("tokenizer", model_id):
        return AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code, **extra)


def resolve_pad_token(tokenizer: PreTrainedTokenizerBase, model: Module | None = None) -> int:
    """Set a pad token if the tokenizer has none, write its id into the model's config, and return the id.

    If the tokenizer has no pad token, an unused special token becomes the pad token. If there is no unused special token, the
    eos token becomes the pad token. Attention masks depend on positions and not on the pad token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "the tokenizer has neither a pad nor an eos token. Fix: set tokenizer.pad_token before training."
            )
        tokenizer.pad_token = _unused_token(tokenizer, model) or tokenizer.eos_token
        logger.info(
            "the tokenizer has no pad token, so %r is used. Padding is masked by position, not by id.",
            tokenizer.pad_token,
        )
    pad = int(tokenizer.pad_token_id)
    text = text_of(config_of(model))
    if text is not None:
        text.pad_token_id = pad
    return pad


def _unused_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> str | None:
    embedding = model.get_input_embeddings() if model is not None else None
    rows = embedding.weight.shape[0] if embedding is not None else len(tokenizer)
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    free = [
        token.content
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and index < rows and token.content not in used and token.content not in template
    ]
    return next((token for word in UNUSED for token in free if re.search(word, token, re.IGNORECASE)), None)


def add_adapter(model: nn.Module, peft_config: PeftConfig) -> Any:
    """Add a new adapter to the model and return the resulting peft model.

    Raises:
        ConfigError: The adapter's target modules match no module of the model, or peft cannot create the adapter.
    """
    import peft

    targets: Any = vars(peft_config).get("target_modules")
    names = [f".{name}" for name, _ in model.named_modules()]
    parameters = [f".{name}" for name, _ in model.named_parameters()]
    try:
        with warnings.catch_warnings():
            # Ignore the warning that peft causes by using a deprecated property of transformers.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = peft.get_peft_model(model, peft_config)
    # peft has no error class of its own. For example, LoftQ raises an AssertionError on a machine without GPU.
    except Exception as error:
        listed = targets if isinstance(targets, list | set) else ()
        matched = any(name.endswith(f".{target}") for target in listed for name in names)
        if matched or "not found in the base model" not in str(error):
            named = [name for name in vars(peft_config) if re.search(rf"\b{name}\b", str(error))]
            change = "its " + (" or ".join(named) or "target_modules, target_parameters or init_lora_weights")
            if peft_config.is_prompt_learning and peft_config.task_type is None:
                change = "set task_type='CAUSAL_LM'"
            raise ConfigError(
                f"peft cannot add the {adapter_kind(peft_config)} adapter of peft_config to {type(model).__name__}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Fix: change peft_config, e.g. {change}."
            ) from error
        parts = {name.rsplit(".", 1)[-1]: part for name, part in model.named_modules() if not list(part.children())}
        linear = {name for name, part in parts.items() if isinstance(part, torch.nn.Linear)}
        of_linear = adapter_kind(peft_config) not in ("LN_TUNING", "TRAINABLE_TOKENS")
        fix = "use some of these names" + (", or target_modules='all-linear'" if of_linear else "")
        if isinstance(targets, str) and targets in parts:
            fix = f"a string is a regular expression for whole names, so write target_modules=[{targets!r}]"
        raise ConfigError(
            f"target_modules={targets!r} of peft_config match no module of {type(model).__name__}, whose "
            f"{'linear layers' if of_linear else 'layers'} are named {sorted(linear if of_linear else parts)}. Fix: {fix}."
        ) from error
    if vars(peft_config).get("init_lora_weights") == "eva":
        logger.warning(
            "init_lora_weights='eva' is trained like ordinary LoRA until peft.initialize_lora_eva_weights is called. Call this "
            "function on the model of peft.get_peft_model, and pass this model to the trainer."
        )
    effects = {
        "target_modules": "get no adapter",
        "target_parameters": "get no adapter",
        "modules_to_save": "are not trained",
    }
    for name, what in effects.items():
        listed = vars(peft_config).get(name)
        listed = listed if isinstance(listed, list | set | tuple) else ()
        paths = parameters if name == "target_parameters" else names
        if unmatched := sorted(target for target in listed if not any(n.endswith(f".{target}") for n in paths)):
            logger.warning("%s: %s match no module of %s and %s.", name, unmatched, type(model).__name__, what)
    text: Any = text_of(config_of(model))
    kinds = layer_kinds(text) if vars(peft_config).get("layer_replication") else ()
    if kinds and len(kinds) != text.num_hidden_layers:
        raise ConfigError(
            f"layer_replication gives {type(model).__name__} {text.num_hidden_layers} layers, but its config lists the types of "
            f"{len(kinds)} layers, and peft does not extend this list. Fix: remove layer_replication."
        )
    return adapted


def wrap_with_peft(model: nn.Module, peft_config: PeftConfig | None, *, activation_checkpointing: bool) -> Any:
    """Add an adapter to the model if ``peft_config`` is set, and enable gradients through checkpointed layers.

    Raises:
        ArgumentTypeError: ``peft_config`` is not a peft config.
        ConfigError: The model already has an adapter, or this library cannot train the adapter.
    """
    import peft

    if peft_config is not None:
        if not isinstance(peft_config, peft.PeftConfig):
            raise ArgumentTypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
        if isinstance(model, peft.PeftModel):
            raise ConfigError(
                "peft_config is set, but the model is already a PeftModel. Fix: remove peft_config to continue training its "
                "adapter, or call model.merge_and_unload() first to start a new adapter."
            )
        _check_kind(peft_config)
        model = add_adapter(model, peft_config)
    if isinstance(model, peft.PeftMixedModel):
        raise ConfigError("a peft.PeftMixedModel cannot be trained. Fix: pass the model of peft.get_peft_model.")
    if isinstance(model, peft.PeftModel):
        _name_tied_layers(model)
        _check_adapter(model, activation_checkpointing)
    if adapters_of(model):
        _check_saved(model)
    if isinstance(model, peft.PeftModel) and activation_checkpointing:
        # With frozen embeddings, the input of the first checkpointed layer does not require gradients. Without this call,
        # adapters would get no gradients.
        model.enable_input_require_grads()
    prepare_adapter(model)
    return model


# Unsupported peft methods. Each value names the feature of the method that this library does not implement. The methods in
# ADDS_LAYERS add layers to the model. These layers cannot be merged into the base weights.
ADDS_LAYERS = {
    "ADAPTION_PROMPT": "prompts that peft inserts inside the attention layers, but rows here contain several sequences",
    "POLY": "task_ids in every forward pass",
    "SHADOW": "a second hidden state that peft carries through the model's layers",
    "XLORA": "a classifier that peft runs before each forward pass to scale adapters",
}
NEEDS_MORE = ADDS_LAYERS | {
    "ADALORA": "a rank allocation after each optimizer step (update_and_allocate) and an orthogonality term in the loss",
    "CPT": "its own loss with weights per example, which peft computes inside the model's forward pass",
    "LILY": "routing weights averaged over all tokens of a row, but rows here contain several sequences",
    "MULTITASK_PROMPT_TUNING": "task_ids in every forward pass",
}
# Options of supported peft methods that are rejected. Each value names the feature that the option needs and that this
# library does not implement.
NEEDS_MORE_WITH = {
    "alora_invocation_tokens": "the position of the invocation tokens in each row, but rows here contain several sequences",
    "arrow_config": "a router that combines other, frozen adapters and has no weights to train",
    "use_asa": "a mask update after each optimizer step",
    "kasa_config": "two regularization terms in the loss (peft's _get_kasa_loss)",
    "monteclora_config": "a variational term in the loss (peft's _get_monteclora_loss)",
    "generator_seed": "checkpoints with the random state of each layer",
    "sample_at_inference": "log-probs that are averaged over random forward passes",
    "save_only_topk_weights": "weights that a checkpoint with save_only_topk_weights=True does not contain",
}
# Prefixes of rejected init_lora_weights values. These initializations change the base weights. The change depends on a
# randomized decomposition of the weights or on a decomposition of gradients. peft cannot repeat the change when a saved
# adapter is loaded.
UNREPEATABLE_STARTS = ("pissa_niter_", "lora_ga")


def load_renamed(model: nn.Module, folder: str, accelerator: Accelerator) -> None:
    """Load a checkpoint whose weights have the names on the Hub instead of the names of the model's parameters.

    `transformers.Trainer` loads weights by the names in the file and ignores unknown names. A resumed model would therefore
    continue with its initial weights. Most vision-language models have checkpoints with the Hub's names. For adapters and
    sharded weights, this function does nothing, because their files contain the names of the parameters.

    Args:
        model: Model that is trained.
        folder: Folder of the checkpoint.
        accelerator: Accelerator of the run.
    """
    inner: Any = unwrapped(model)
    if adapters_of(inner) or shards_parameters(accelerator):
        return
    names: set[str] = set()
    for path in Path(folder).glob("model*.safetensors"):
        with safetensors.safe_open(str(path), "pt") as file:
            names |= set(file.keys())
    if not names <= set(inner.state_dict()):
        inner.load_state_dict(type(inner).from_pretrained(folder, dtype=inner.dtype).state_dict(), strict=False)


def load_default_adapter(model: nn.Module, folder: str, accelerator: Accelerator) -> None:
    """Load the adapter ``default`` of a checkpoint that has several adapters.

    `transformers.Trainer` of version 5.17 loads only the adapters in subfolders, e.g. ``ref``. Without this function, the
    trained adapter would keep its initial weights.

    Args:
        model: Model that is trained.
        folder: Folder of the checkpoint.
        accelerator: Accelerator of the run.
    """
    bare: Any = unwrapped(model)
    several = len(adapters_of(bare)) > 1 and "default" in adapters_of(bare)
    if several and not shards_parameters(accelerator) and list(Path(folder).glob("adapter_model.*")):
        bare.load_adapter(folder, "default", is_trainable="default" in bare.active_adapters)


def load_added_adapter(model: nn.Module, folder: str) -> bool:
    """Load a checkpoint's adapter into a model whose adapter was added by transformers' ``add_adapter``.

    `transformers.Trainer` loads only adapters of peft's own models. The function returns whether it loaded an adapter.
    """
    bare: Any = unwrapped(model)
    if not vars(bare).get("_hf_peft_config_loaded"):
        return False
    from peft import load_peft_weights, set_peft_model_state_dict

    set_peft_model_state_dict(bare, load_peft_weights(folder, device="cpu"), adapter_name=bare.active_adapters()[0])
    return True


def mark_loaded_projections(model: nn.Module) -> None:
    """Mark VeLoRA's projections as computed if they were loaded from a checkpoint.

    peft saves the projections, but not whether they were computed. With ``init_type="batch_average_once"``, a resumed run
    would otherwise compute the projections a second time, from its first batch.
    """
    for module in model.modules():
        computed = vars(module).get("lora_velora_initialized", {})
        for adapter in computed:
            computed[adapter] = bool(module.lora_velora_embed[adapter].any())


def adapter_folder(model: nn.Module, folder: str, accelerator: Accelerator) -> str:
    """Return the folder in which a checkpoint stores the active adapter. An adapter with a name other than ``default`` is
    stored in a subfolder of that name.

    `transformers.Trainer` of version 5.23 loads the best model from the checkpoint's own folder. This folder contains the
    adapter ``default`` or no adapter.
    """
    bare: Any = unwrapped(model)
    whole = adapters_of(bare) and not shards_parameters(accelerator)
    inside = whole and list(Path(folder, bare.active_adapter).glob("adapter_model.*"))
    return str(Path(folder, bare.active_adapter)) if inside else folder


def _name_tied_layers(model: Any) -> None:
    """Write the names of layers that peft ties to the embeddings (``ensure_weight_tying``) back into the adapter configs.

    peft removes the names of tied layers from the configs. Later, peft finds tied layers by the names ``embed_tokens`` and
    ``lm_head``. If the embedding has another name (e.g. ``wte``), a saved adapter would not include the output layer. A
    second adapter from the same config would not include the output layer either.
    """
    for settings in model.peft_config.values():
        for field, tied in (("target_modules", "target_modules_to_tie"), ("modules_to_save", "modules_to_tie")):
            names = getattr(settings, field, None)
            if names and not isinstance(names, str):
                setattr(settings, field, type(names)(dict.fromkeys([*names, *(getattr(settings, tied, None) or ())])))


def _check_tied_layers(model: Any) -> None:
    """Raise an error if ``ensure_weight_tying`` had no effect on tied embeddings."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = causal_lm(model)
    adapted = [
        isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        for layer in (base.get_input_embeddings(), output_layer(base))
    ]
    ties = getattr(model.active_peft_config, "ensure_weight_tying", False) and getattr(
        base, "all_tied_weights_keys", None
    )
    if ties and adapted == [True, False]:
        raise ConfigError(
            "the adapter has ensure_weight_tying=True, but it changes only the embeddings and not the tied output layer. peft "
            "ties layers only if the config names 'embed_tokens' or 'lm_head'. Fix: add 'lm_head' to the list that names the "
            "embeddings (target_modules or modules_to_save). For a loaded adapter, edit its adapter_config.json and load it "
            "again."
        )


def _check_scales(model: Module) -> None:
    """Raise an error if the scale of a LoRA layer differs from the adapter's config, for example after ``set_scale``."""
    from peft.tuners.lora.layer import LoraLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for adapter in set(layer.active_adapters) & layer.scaling.keys():
            rank = layer.r[adapter]
            rank = math.sqrt(rank) if vars(adapters_of(model)[adapter])["use_rslora"] else rank
            if not math.isclose(layer.scaling[adapter], layer.lora_alpha[adapter] / rank, rel_tol=1e-6):
                raise ConfigError(
                    f"{name} has scale {layer.scaling[adapter]:g}, but its adapter's config has "
                    f"{layer.lora_alpha[adapter] / rank:g}. Saved adapters, references and adapters that are sent to servers "
                    "have the scale of the config, so they would differ from the trained model. Fix: set lora_alpha in "
                    "adapter_config.json and load the adapter again, or restore the scale with set_scale(name, 1)."
                )


def _check_earlier_adapter(model: Any) -> None:
    """Raise an error if the base model contains adapter layers that do not belong to the model's own adapter."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    tuner = model.base_model
    for name, layer in tuner.model.named_modules() if isinstance(tuner, BaseTuner) else ():
        own = isinstance(layer, ParamWrapper | TrainableTokensLayer) or name in tuner.targeted_module_names
        if isinstance(layer, BaseTunerLayer) and not own and ".base_layer" not in name:
            raise ConfigError(
                f"{name} has an adapter that was added before get_peft_model was called for this adapter. Saved adapters and "
                "references would not contain the earlier adapter. Fix: call merge_and_unload() or unload() of the earlier "
                "PeftModel, and call get_peft_model with the result."
            )


def _check_patterns(model: Any) -> None:
    """Raise an error if a layer's settings depend on the order of the keys in ``rank_pattern``, ``alpha_pattern`` or a
    similar option.

    peft uses the first key that matches a layer, but it sorts the keys when it saves an adapter.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import get_pattern_key

    layers = [(name, layer) for name, layer in causal_lm(model).named_modules() if isinstance(layer, BaseTunerLayer)]
    names = [n.replace(".base_layer", "") + f".{vars(x).get('parameter_name', '')}".rstrip(".") for n, x in layers]
    for field, patterns in vars(model.active_peft_config).items():
        if not field.endswith("_pattern") or not isinstance(patterns, dict):
            continue
        for name in names:
            used, loaded = (get_pattern_key(keys, name) for keys in (list(patterns), sorted(patterns)))
            if patterns.get(used) != patterns.get(loaded):
                raise ConfigError(
                    f"{field} of the adapter has two keys that match {name}: {used!r} with {patterns[used]} and {loaded!r} with "
                    f"{patterns[loaded]}. peft uses the first key, but it sorts the keys when it saves the adapter, so the "
                    "loaded adapter would differ. Fix: use keys that match different layers, or write them in sorted order."
                )


def _check_recurrent_layers(model: Module, moved: bool) -> None:
    """Raise an error or warn if an adapter has no effect in recurrent layers. These layers use some weights directly,
    without calling the module that the adapter wraps.

    If the adapter starts at zero, the function only warns, because the ineffective weights stay zero and all other weights
    of the adapter are trained.

    Args:
        model: Model with an adapter.
        moved: Whether the base weights were changed when the adapter was created.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not has_recurrent_layers(model):
        return
    named = [(name, layer) for name, layer in causal_lm(model).named_modules() if isinstance(layer, BaseTunerLayer)]
    convolutions = [name for name, layer in named if isinstance(layer.get_base_layer(), torch.nn.Conv1d)]
    # The projection dt_proj computes Mamba's step sizes.
    unread = convolutions + [name for name, _ in named if name.endswith(".dt_proj")]
    if not unread:
        return
    what = f"the adapter of {unread[0]} has no effect: the recurrent layer uses this module's weight without calling it"
    names = sorted({name.rsplit(".", 1)[-1] for name in unread})
    if convolutions or moved:
        raise ConfigError(
            f"{what}. Fix: set exclude_modules={names} in peft_config, or add the layers to modules_to_save."
        )
    logger.warning("%s. Set exclude_modules=%s in peft_config to exclude this layer.", what, names)


def _check_kind(config: PeftConfig) -> None:
    """Raise an error if this library does not implement a peft method or one of the method's options."""
    kind = adapter_kind(config)
    if kind in NEEDS_MORE:
        raise ConfigError(
            f"{kind} adapters need {NEEDS_MORE[kind]}. This is not implemented. Fix: use LoRA, or another peft method."
        )
    for name, need in NEEDS_MORE_WITH.items():
        value = getattr(config, name, None)
        if value or (type(value) is int and name == "generator_seed"):
            raise ConfigError(
                f"{kind} adapters with {name}={value!r} need {need}. This is not implemented. Fix: remove {name}, or use "
                "another peft method."
            )


def _check_saved(model: nn.Module) -> None:
    """Raise an error if peft cannot save one of the adapters, or if saved adapters would not contain all trained weights.

    Value functions are excluded, because they are saved separately.
    """
    import peft

    with without_value(model):
        outside, saved = trained_outside(model), set()
    # transformers saves only the active adapter.
    names = list(adapters_of(model)) if isinstance(model, peft.PeftModel) else model.active_adapters()
    for name in names if outside or len(names) > 1 else ():
        try:
            with warnings.catch_warnings(action="ignore"):
                state = peft.get_peft_model_state_dict(model, model.state_dict(keep_vars=True), name)
        except KeyError as error:
            raise ConfigError(
                f"peft cannot save the adapter {name!r} ({error}), because only another adapter has trainable_token_indices. "
                f"Fix: create {name!r} with trainable_token_indices too, or call model.delete_adapter({name!r})."
            ) from error
        saved |= {id(weight) for weight in state.values()}
    if unsaved := [name for name, parameter in outside.items() if id(parameter) not in saved]:
        module = unsaved[0].replace(".base_layer", "").split(".")[-2]
        raise ConfigError(
            f"{len(unsaved)} trained parameters would not be saved with the adapter, e.g. {unsaved[:2]}. A loaded or resumed "
            "checkpoint would differ from the trained model. Fix: freeze these parameters with requires_grad_(False), or train "
            f"their modules as a part of the adapter, e.g. with modules_to_save={[module]} in its config."
        )


def _check_adapter(model: Any, activation_checkpointing: bool) -> None:
    """Raise an error for an adapter whose weights would not be trained, or that would cause an unclear error later."""
    config = model.active_peft_config
    kind = adapter_kind(config)
    _check_kind(config)
    if (start := str(vars(config).get("init_lora_weights"))).startswith(UNREPEATABLE_STARTS):
        raise ConfigError(
            f"init_lora_weights={start!r} subtracts random initial values of the adapter from the base weights. A saved "
            "adapter does not contain these values, so after loading, the adapter would be added to wrong base weights. Fix: "
            "set init_lora_weights='pissa' or 'olora', whose values peft can recompute, or True."
        )
    if start == "olora" and any(vars(layer).get("fan_in_fan_out") for layer in model.modules()):
        raise ConfigError(
            "init_lora_weights='olora' creates matrices of the wrong shape for layers with weights of shape (in, out), such as "
            "GPT-2's Conv1D, because peft does not transpose the weight. Fix: set init_lora_weights='pissa' or True."
        )
    if list(model.active_adapters) != [model.active_adapter]:
        raise ConfigError(
            f"the adapters {list(model.active_adapters)} are active in the layers, but the model's active_adapter is "
            f"{model.active_adapter!r}. Reference passes and checkpoints use only the latter. Fix: activate one adapter with "
            "model.set_adapter(name). To combine several adapters into one, use model.add_weighted_adapter."
        )
    _check_scales(model)
    _check_earlier_adapter(model)
    _check_patterns(model)
    _check_tied_layers(model)
    _check_recurrent_layers(model, moves_base(config))
    if any(getattr(module, "merged", False) is True for module in model.modules()):
        raise ModelError("the model's adapter is merged into the base weights. Fix: call model.unmerge_adapter().")
    if any(vars(module).get("_disable_adapters") for module in model.modules()):
        raise ModelError("the model's adapter is disabled. Fix: call model.base_model.enable_adapter_layers().")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model's adapter has no trainable parameter, because it was loaded for inference. Fix: load it with "
            "PeftModel.from_pretrained(model, folder, is_trainable=True)."
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(p.is_meta for p in trained) and not any(p.is_meta for p in model.parameters() if not p.requires_grad):
        raise ModelError(
            "weights of the adapter have no values, because it was created with low_cpu_mem_usage=True. Fix: call "
            "get_peft_model without low_cpu_mem_usage."
        )
    if activation_checkpointing and kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise ConfigError(
            f"{kind} stores its prefix in the key-value cache, which is dropped when activations are recomputed. Fix: set "
            "gradient_checkpointing=False."
        )


TEMPLATE_FILES = (".jinja", ".j2")


def changes_vocabulary(args: PostTrainingConfig) -> bool:
    """Return whether ``chat_template_path`` is the path of a tokenizer, and not of a template file. The template and the
    tokens of such a tokenizer are cloned.
    """
    path = args.chat_template_path
    return path is not None and not str(path).endswith(TEMPLATE_FILES)


def check_saved_settings(tokenizer: Tokenizer) -> None:
    """Raise an error if the tokenizer has a setting that ``save_pretrained`` cannot write as JSON.

    Without this check, saving the first checkpoint would fail.

    Raises:
        ConfigError: A setting cannot be written as JSON.
    """
    for name, value in inner_tokenizer(tokenizer).init_kwargs.items():
        try:
            json.dumps(value, default=AddedToken.__getstate__)
        except TypeError:
            raise ConfigError(
                f"the tokenizer has the setting {name}={value!r:.80}, which save_pretrained cannot write as JSON, so the "
                f"first checkpoint would fail. Fix: load the tokenizer without {name}."
            ) from None


def check_saved_config(model: nn.Module) -> None:
    """Raise an error if ``save_pretrained`` would reject the model's config when the first checkpoint is saved.

    Raises:
        ConfigError: The config is not valid, or requests attention weights, which training does not compute.
    """
    config = config_of(model)
    if getattr(config, "output_attentions", False):
        raise ConfigError(
            "the model's config sets output_attentions=True, which training does not support. Fix: remove it."
        )
    try:
        getattr(config, "validate", lambda: None)()
    except (ValueError, TypeError, StrictDataclassError) as error:
        cause = str(error.__cause__ or error).rstrip(".") + "."
        raise ConfigError(
            f"save_pretrained would reject the model's config, so no checkpoint could be saved: {cause} Fix: correct "
            "model_init_kwargs, or config.json of the model."
        ) from error


def prepare_tokenizer(tokenizer: Tokenizer, args: PostTrainingConfig) -> None:
    """Apply ``chat_template_path`` (a file), ``eos_token`` and ``pad_token`` to the tokenizer.

    Call this function before any row is tokenized.

    Raises:
        ArgumentTypeError: ``tokenizer`` is neither a tokenizer nor a processor.
        ConfigError: The template file does not exist, or an eos or pad token is not in the vocabulary.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
        raise ArgumentTypeError(
            f"processing_class must be a tokenizer or a processor, not {type(tokenizer).__name__}. Fix: load it with "
            "AutoTokenizer.from_pretrained, or omit it to load the model's tokenizer."
        )
    check_saved_settings(tokenizer)
    path = args.chat_template_path
    if path is not None and not changes_vocabulary(args):
        if not Path(path).is_file():
            raise ConfigError(f"chat_template_path={path!r} does not exist.")
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    for name, token in (("eos_token", args.eos_token), ("pad_token", args.pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{name}={token!r} is not in the vocabulary of {type(tokenizer).__name__} ({len(tokenizer)} tokens). Fix: use "
                "another token, or add it to the tokenizer and resize the model first."
            )
        setattr(tokenizer, name, token)


def mirror_eos(tokenizer: Tokenizer, model: nn.Module, args: PostTrainingConfig) -> None:
    """Add the tokenizer's eos token and the chat template's end-of-turn tokens to the stop tokens for generation.

    The generation config keeps its existing stop tokens. The model's config changes only if ``args.eos_token`` is set.
    """
    if args.eos_token is not None:
        model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    generation = generation_config_of(model)
    if generation is None:
        return
    stops = generation.eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    try:
        ends = terminal_token_ids(tokenizer)
    # If the template cannot render a question with an answer, the end-of-turn token is unknown.
    except DataError:
        ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    new = [token for token in ends if token not in stops]
    if new:
        logger.info("generation_config.eos_token_id was %s, and %s were added.", stops, new)
        generation.eos_token_id = [*stops, *new]


SEED = 0
# Standard deviation of the noise in a new embedding row, as a fraction of the standard deviation of old rows. The noise is
# too small to affect logits.
SPREAD = 0.01


class VocabularyMismatchError(ModelError, RuntimeError):
    """The tokenizer's number of ids differs from the number of rows of the model's embedding."""


def clone_chat_template(
    model: nn.Module, tokenizer: Tokenizer, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Copy another tokenizer's chat template and its tokens to ``model`` and ``tokenizer``.

    Added tokens of the source are added to the tokenizer if its vocabulary does not contain them. The source's eos token
    becomes the eos token of the tokenizer and of the model. The source's bos token is copied only if the tokenizer has no bos
    token. The source's pad token is copied if the tokenizer has no pad token, or if its pad token has become the eos token.

    The embedding grows to a multiple of ``resize_to_multiple_of`` and never shrinks. Placeholder tokens ``<extra_id_0>, ..``
    fill the vocabulary up to the size of the embedding. The rows of all added tokens are initialized with the mean of existing
    rows plus small noise, so that the distribution over existing tokens does not change.

    Args:
        model: Any transformers model with input embeddings. Modified in place.
        tokenizer: Tokenizer of the model. Modified in place.
        source_tokenizer_path: Folder or hub id of the source tokenizer.
        resize_to_multiple_of: The number of rows of the embedding becomes a multiple of this number. None: one row per token.

    Returns:
        The model, the tokenizer, and the ids of all added tokens.

    Raises:
        ModelError: The source has no chat template, or ``resize_to_multiple_of`` is below 1.
        VocabularyMismatchError: After the call, the tokenizer's number of ids differs from the number of embedding rows.
    """
    if resize_to_multiple_of is not None and resize_to_multiple_of < 1:
        raise ModelError(f"resize_to_multiple_of={resize_to_multiple_of} must be at least 1, or None.")
    with explained("tokenizer", source_tokenizer_path):
        source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ModelError(
            f"the tokenizer {source_tokenizer_path!r} has no chat template to clone. Fix: use the tokenizer of an "
            "instruction-tuned checkpoint."
        )
    before = set(tokenizer.get_vocab().values())
    size = _size(tokenizer)
    tokenizer.chat_template = source.chat_template
    _add_tokens(tokenizer, source)
    _set_special_tokens(tokenizer, source)
    _mirror(model, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    wanted = max(rows, _size(tokenizer))
    if resize_to_multiple_of:
        wanted += -wanted % resize_to_multiple_of
    if wanted != rows:
        model.resize_token_embeddings(wanted, mean_resizing=False)
    _fill(tokenizer, model.get_input_embeddings().weight.shape[0])
    added = sorted(set(tokenizer.get_vocab().values()) - before)
    _start_at_mean(model, added, min(size, rows))
    return model, tokenizer, added


def _size(tokenizer: Tokenizer) -> int:
    """Return the number of embedding rows that the tokenizer needs: its largest id plus 1. The ids need not be contiguous."""
    return max(tokenizer.get_vocab().values()) + 1


def _add_tokens(tokenizer: Tokenizer, source: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    tokens = [token for _, token in sorted(source.added_tokens_decoder.items())]
    missing = [token for token in tokens if token.content not in vocabulary]
    tokenizer.add_tokens([token for token in missing if token.special], special_tokens=True)
    tokenizer.add_tokens([token for token in missing if not token.special])


def _set_special_tokens(tokenizer: Tokenizer, source: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    old_eos, old_pad = tokenizer.eos_token, tokenizer.pad_token
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    if tokenizer.bos_token is None and source.bos_token in vocabulary:
        tokenizer.bos_token = source.bos_token
    if old_pad is not None and (old_pad != tokenizer.eos_token or old_pad == old_eos):
        # If the pad token was the same as the previous eos token, keep it, because the user chose it.
        return
    for candidate in (source.pad_token, old_eos):
        if candidate in vocabulary and candidate != tokenizer.eos_token:
            tokenizer.pad_token = candidate
            return
    if old_pad is not None:
        logger.warning(
            "the pad token %r is now also the eos token, and neither tokenizer has another token to pad with. Set "
            "tokenizer.pad_token.",
            old_pad,
        )


def _mirror(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Write the special tokens' ids into the model's config, its text config and its generation config."""
    text_config = model.config.get_text_config()
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids |= {"pad_token_id": tokenizer.pad_token_id}
    configs = [model.config] if text_config is model.config else [model.config, text_config]
    for model_config in configs:
        for name, value in ids.items():
            if value is not None:
                setattr(model_config, name, value)
    generation = generation_config_of(model)
    if generation is None or not model.can_generate():
        return
    for name in ("bos_token_id", "pad_token_id"):
        if ids[name] is not None:
            setattr(generation, name, ids[name])
    if ids["eos_token_id"] is not None:
        stops = generation.eos_token_id if isinstance(generation.eos_token_id, list) else []
        # Keep all stop tokens of a list, because each of them ends a turn.
        joined = list(dict.fromkeys([*stops, ids["eos_token_id"]]))
        generation.eos_token_id = joined if stops else ids["eos_token_id"]


def _fill(tokenizer: Tokenizer, rows: int) -> None:
    """Add placeholder tokens until every row of the embedding has a token."""
    vocabulary = tokenizer.get_vocab()
    free = (name for name in map("<extra_id_{}>".format, count()) if name not in vocabulary)
    names = list(islice(free, max(0, rows - _size(tokenizer))))
    tokenizer.add_tokens(names)
    if _size(tokenizer) != rows:
        raise VocabularyMismatchError(
            f"the tokenizer's ids end at {_size(tokenizer) - 1} after {len(names)} placeholders were added, and the "
            f"model's embedding has {rows} rows. Load model and tokenizer from the same checkpoint."
        )


@torch.no_grad()
def _start_at_mean(model: nn.Module, added: list[int], known: int) -> None:
    """Set the embedding rows of added tokens to the mean of the first ``known`` rows plus small seeded noise, so that the new
    rows differ.
    """
    if not added:
        return
    output = model.get_output_embeddings()
    weights = {id(w): w for w in [model.get_input_embeddings().weight, *([] if output is None else [output.weight])]}
    generator = torch.Generator().manual_seed(SEED)
    for weight in weights.values():  # Tied embeddings occur only once in the dict, so that rows are written once.
        old = weight[:known].float()
        noise = torch.randn(len(added), weight.shape[1], generator=generator).to(weight.device)
        weight[added] = (old.mean(0) + SPREAD * old.std(0) * noise).to(weight.dtype)
    bias = getattr(output, "bias", None)
    if bias is not None:
        bias[added] = bias[:known].mean()
