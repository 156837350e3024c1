"""Causal and sequence-to-sequence models with a value head, by TRL's names, and the files that hold them."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from posttrain.errors import ArgumentTypeError, ModelError, check_choice
from posttrain.integrations import require
from posttrain.models.value_head import ValueHead

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "PreTrainedModelWrapper",
    "checkpoint_tensors",
]

logger = logging.getLogger(__name__)


WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # Each may be an index of shards.


def checkpoint_tensors(source: str, wanted: set[str]) -> Iterable[tuple[str, Tensor]]:
    """Tensors of a checkpoint, sharded or not, a file at a time.

    Args:
        source: Folder or hub id.
        wanted: Names.
    """
    for name in WEIGHTS:
        files = [_find(source, name)]
        if index := _find(source, f"{name}.index.json"):
            places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            files = [_find(source, shard) for shard in sorted({p for key, p in places.items() if key in wanted})]
        for file in filter(None, files):
            state = load_state_dict(file, map_location="cpu")
            yield from ((key, tensor) for key, tensor in state.items() if key in wanted)


def _find(source: str, name: str) -> str | None:
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


STRATEGIES = (None, "normal")
HEAD_OPTIONS = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")


class PreTrainedModelWrapper(nn.Module):
    """A pretrained model with something beside it; everything else is passed on to the model.

    Args:
        pretrained_model: A transformers model, or a peft model around one.

    Attributes:
        is_peft_model: Whether adapters are on the model; then a checkpoint holds them instead of the model.
    """

    auto_class: ClassVar[str] = ""
    supported_args: ClassVar[tuple[str, ...]] = ()

    def __init__(self, pretrained_model: Any) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.config = pretrained_model.config
        self.is_peft_model = hasattr(pretrained_model, "peft_config") and hasattr(pretrained_model, "disable_adapter")
        if self.is_peft_model and getattr(pretrained_model.active_peft_config, "is_prompt_learning", False):
            raise ModelError(
                "the adapter learns prompts (prompt or prefix tuning), which a model with a value head cannot take: virtual "
                "tokens have no value. Use LoRA or another adapter of the layers."
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "pretrained_model":
                raise
            return getattr(self.pretrained_model, name)

    # Loading ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        peft_config: Any = None,
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model, or wrap one, and restore what a wrapper saved beside it.

        Args:
            pretrained_model_name_or_path: Hub id, folder (of a model, a wrapper or an adapter) or model.
            *model_args: For the model's ``from_pretrained``.
            peft_config: A new adapter to put on the model.
            is_trainable: Whether a loaded adapter is trained further.
            **kwargs: Those of ``supported_args`` for the wrapper, the others for the model's ``from_pretrained``.

        Raises:
            ModelError: What the class cannot wrap. ArgumentTypeError: Neither a string nor a model.
        """
        own = {name: kwargs.pop(name) for name in cls.supported_args if name in kwargs}
        source = pretrained_model_name_or_path
        if isinstance(source, str):
            model = cls._load(source, model_args, kwargs, peft_config, is_trainable)
        elif isinstance(source, nn.Module):
            model = _adapted(source, peft_config) if peft_config is not None else source
        else:
            raise ArgumentTypeError(
                f"from_pretrained takes a string or a model, not {type(source).__name__}: {source!r}."
            )
        wrapper = cls(model, **own)
        if isinstance(source, str):
            wrapper._restore(source)
        wrapper.post_init()
        return wrapper

    @classmethod
    def _load(
        cls, source: str, model_args: tuple[Any, ...], kwargs: dict[str, Any], peft_config: Any, is_trainable: bool
    ) -> Any:
        adapter = (Path(source) / "adapter_config.json").is_file()
        base = source
        if adapter:
            peft = require("peft", f"the adapter in {source!r}")
            base = peft.PeftConfig.from_pretrained(source).base_model_name_or_path
        model = _base(cls.auto_class, base, *model_args, **kwargs)
        if adapter:
            if peft_config is not None:
                logger.warning("peft_config is ignored: %r holds an adapter, which is loaded.", source)
            return peft.PeftModel.from_pretrained(model, source, is_trainable=is_trainable)
        return _adapted(model, peft_config) if peft_config is not None else model

    def _restore(self, source: str) -> None:
        """Load what a wrapper saved in this folder beside the model."""
        wanted = set(self.own_state())
        state = dict(checkpoint_tensors(source, wanted))
        if set(state) == wanted:
            super().load_state_dict(state, strict=False)
        else:
            logger.warning(
                "%s holds no %s, so the value head is new. Train it before its values mean anything.",
                source, ", ".join(sorted(wanted - set(state))),
            )  # fmt: skip

    def post_init(self) -> None:
        """Put the head where the model's outputs are.

        Raises:
            ModelError: A part of the model lies on a CPU or a disk, where it would be fetched for every token.
        """
        places = set((getattr(self.pretrained_model, "hf_device_map", None) or {}).values())
        if (places & {"cpu", "disk"} and len(places) > 1) or "disk" in places:
            raise ModelError(
                f"the model is spread over {sorted(map(str, places))}, and a value head does not work with a part of it off the "
                "accelerator. Take a smaller or quantised model, or another device_map."
            )
        self._place_head()

    # Saving ----------------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Tensor]:
        """What the wrapper adds to the model."""
        return {f"v_head.{key}": tensor for key, tensor in self.v_head.state_dict().items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The model's tensors by its own names (none with adapters, which are saved apart), and ``v_head.*``."""
        base = {} if self.is_peft_model else self.pretrained_model.state_dict(*args, **kwargs)
        return {**base, **self.own_state()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Undo `state_dict`."""
        renamed = {k if k.startswith("v_head.") else f"pretrained_model.{k}": t for k, t in state_dict.items()}
        return super().load_state_dict(renamed, strict=strict and not self.is_peft_model, assign=assign)

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """One checkpoint of model and head; with adapters, theirs and a file with the head."""
        state = kwargs.pop("state_dict", None) or self.state_dict()
        if not self.is_peft_model:
            self.pretrained_model.save_pretrained(save_directory, *args, state_dict=state, **kwargs)
            return
        self.pretrained_model.save_pretrained(save_directory, *args, **kwargs)
        head = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items() if key.startswith("v_head.")}
        torch.save(head, Path(save_directory, "pytorch_model.bin"))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes, the value head with it.

        Args:
            repo_id: ``owner/name``; made if it is not there.
            **kwargs: ``private`` of a new repository, ``max_shard_size`` of weight files, ``token``; the others are those of
                `huggingface_hub.upload_folder`, ``revision`` (a branch, made if it is not there) among them.
        """
        import huggingface_hub

        token, revision = kwargs.get("token"), kwargs.get("revision")
        shards = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
        huggingface_hub.create_repo(repo_id, token=token, private=kwargs.pop("private", None), exist_ok=True)
        if revision is not None and not revision.startswith("refs/pr"):
            huggingface_hub.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        options = {"commit_message": f"Upload {type(self).__name__}", **kwargs}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **shards)
            return huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder, **options)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.pretrained_model.generate(*args, **kwargs)


class _WithValueHead(PreTrainedModelWrapper):
    """What both architectures share: the head, its initialisation, the forward."""

    supported_args: ClassVar[tuple[str, ...]] = HEAD_OPTIONS
    hidden_name: ClassVar[str] = "hidden_states"

    def __init__(
        self,
        pretrained_model: Any,
        *,
        summary_dropout_prob: float | None = None,
        v_head_initializer_range: float = 0.2,
        v_head_init_strategy: str | None = None,
    ) -> None:
        super().__init__(pretrained_model)
        check_choice("v_head_init_strategy", v_head_init_strategy, STRATEGIES)
        if pretrained_model.get_output_embeddings() is None:
            raise ModelError(
                f"{type(pretrained_model).__name__} has no language-model head, so there is no policy to put a value beside. "
                f"Load it with transformers.{self.auto_class}."
            )
        self.v_head = ValueHead(self.config, summary_dropout_prob=summary_dropout_prob)
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.v_head.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.v_head.summary.bias)

    def _place_head(self) -> None:
        self.v_head.to(self.pretrained_model.get_output_embeddings().weight.device)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits, the model's own loss, and values.

        Args:
            input_ids: ``(B, L)``.
            past_key_values: Of earlier tokens.
            attention_mask: ``(B, L)``.
            return_past_key_values: Return the cache too.
            **kwargs: For the model (``labels``, ``decoder_input_ids``, ...).

        Returns:
            ``(logits (B, L, V) float32, loss or None, values (B, L))``, and the cache where it was asked for.
        """
        kwargs |= {"output_hidden_states": True, "return_dict": True}
        output = self.pretrained_model(
            input_ids=input_ids, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
        hidden = getattr(output, self.hidden_name)[-1]
        values = self.v_head(hidden.to(self.v_head.summary.weight.device)).squeeze(-1)
        result = (output.logits.float(), output.loss, values)
        return (*result, output.past_key_values) if return_past_key_values else result


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal language model with a value head: ``(logits, loss, values)``.

    Args:
        pretrained_model: With a language-model head.
        summary_dropout_prob: Before the head; None is the config's, else 0.1.
        v_head_initializer_range: Standard deviation of ``normal``.
        v_head_init_strategy: None is torch's own initialisation, ``normal`` is N(0, range) with a bias of 0.

    >>> model = AutoModelForCausalLMWithValueHead.from_pretrained("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    >>> logits, loss, values = model(input_ids)  # doctest: +SKIP
    """

    auto_class: ClassVar[str] = "AutoModelForCausalLM"


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head on its decoder; see `AutoModelForCausalLMWithValueHead`."""

    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    hidden_name: ClassVar[str] = "decoder_hidden_states"


def _base(auto_class: str, source: str, *args: Any, **kwargs: Any) -> Any:
    """Load the model; the loader's report is repeated only where it says more than that there is a value head too."""
    import transformers
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        loaded = getattr(transformers, auto_class).from_pretrained(source, *args, output_loading_info=True, **kwargs)
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, said = loaded
    odd = {name: sorted(key for key in map(str, keys) if "v_head." not in key) for name, keys in said.items() if keys}
    odd = {name: keys for name, keys in odd.items() if keys}
    if odd:
        logger.warning("%s does not fit %s in all its weights: %s", source, type(model).__name__, odd)
    return model


def _adapted(model: Any, peft_config: Any) -> Any:
    peft = require("peft", "peft_config")
    if getattr(peft_config, "is_prompt_learning", False):
        raise ModelError(
            f"peft_config learns prompts ({type(peft_config).__name__}), which a model with a value head cannot take: virtual "
            "tokens have no value. Use LoRA or another adapter of the layers."
        )
    if isinstance(model, peft.PeftModel):
        return model
    if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
        model = peft.prepare_model_for_kbit_training(model)
    return peft.get_peft_model(model, peft_config)
