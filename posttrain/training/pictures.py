"""Training on images: its options, which parameters are trained, and which layers an adapter may reach."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers.utils.hub import cached_file

from posttrain.data.picture_rows import PictureOptions, place_pictures
from posttrain.data.pictures import shows_pictures
from posttrain.data.processors import PictureProcessor, load_processor
from posttrain.errors import ConfigError, DataError
from posttrain.models.heads import causal_lm, has_tower
from posttrain.models.vision import LANGUAGE, PictureEncoder, install_pictures, tower_parameters
from posttrain.types import Row

__all__ = ["PictureConfig", "Vision", "picture_options", "prepare_vision"]

logger = logging.getLogger(__name__)

# What a checkpoint of a multimodal model has beside its weights and its tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
MAY_LACK = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}
PROJECTOR = (
    "projector",
    "connector",
    "merger",
    "merger_list",
    "deepstack_merger_list",
    "image_newline",
    "multi_modal_projector",
)


@dataclass
class PictureConfig:
    """Options of training on images; a text model refuses them."""

    # True and False too; a command line has no such union.
    freeze_vision: str = field(
        default="auto",
        metadata={
            "help": "True: tower and projector; tower: the tower alone; False: nothing; auto: nothing, with an adapter both."
        },
    )
    image_fit: Literal["error", "drop"] = field(
        default="error",
        metadata={
            "help": "Rows whose images do not fit or cannot be read: an error above 0.5 %, or dropped and counted."
        },
    )
    max_images_per_row: int | None = field(default=None, metadata={"help": "Images a row may have; None: any number."})
    image_background: Literal["white", "black"] = field(
        default="white", metadata={"help": "What shows through transparent pixels."}
    )
    image_cache_gb: float = field(
        default=1.0, metadata={"help": "Host memory for features of a frozen tower, in GB; 0 keeps none."}
    )

    def __post_init__(self) -> None:
        self.freeze_vision = {"True": True, "False": False}.get(
            str(self.freeze_vision).capitalize(), self.freeze_vision
        )  # type: ignore[assignment]
        if self.freeze_vision not in ("auto", "tower", True, False):
            raise ConfigError(f"freeze_vision={self.freeze_vision!r} must be 'auto', 'tower', True or False.")
        if self.image_fit not in ("error", "drop"):
            raise ConfigError(f"image_fit={self.image_fit!r} must be 'error' or 'drop'.")
        if self.image_background not in ("white", "black"):
            raise ConfigError(f"image_background={self.image_background!r} must be 'white' or 'black'.")
        if self.image_cache_gb < 0:
            raise ConfigError(f"image_cache_gb={self.image_cache_gb} must be at least 0.")
        post = getattr(super(), "__post_init__", None)
        if post is not None:
            post()


def picture_options(args: Any, **more: Any) -> PictureOptions:
    """How rows of images are prepared, by the trainer's config."""
    return PictureOptions(
        max_length=args.max_length,
        fit=args.image_fit,
        most=args.max_images_per_row,
        background=args.image_background,
        **more,
    )


class Vision:
    """What a trainer of rows with images has beside a trainer of text: a processor, and pictures on rows.

    Args:
        args: The trainer's config; a `PictureConfig` where ``takes`` is set.
        processing_class: As it was given to the trainer: a tokenizer, a processor or None.
        model_id: Where the model is, to load its processor from.
        sets: Training and evaluation sets as they were given.
        takes: Whether the method trains on images; else nothing here does anything.

    Attributes:
        images: Whether rows have images.
        processor: Of `transformers`; None: the run reads text alone.
        reader: The processor as rows are read with it; None: rows are text.
        tokenizer: The processor's, or what was given.

    Raises:
        DataError: Rows have images, and a tokenizer was given.
    """

    def __init__(self, args: Any, processing_class: Any, model_id: str, sets: Iterable[Any], *, takes: bool) -> None:
        self.args, self.takes, self.tokenizer = args, takes, processing_class
        self.images = takes and any(map(shows_pictures, sets))
        self.processor = _processor_of(processing_class, model_id, images=self.images)
        self.reader = PictureProcessor(self.processor) if self.images else None
        if self.processor is not None:
            self.tokenizer = self.processor.tokenizer
            self.tokenizer.chat_template = self.tokenizer.chat_template or self.processor.chat_template
        # A run on text that read the tokenizer alone keeps the image settings of its checkpoint.
        alone = self.processor is None and bool(model_id)
        self._settings = [cached_file(model_id, name, **MAY_LACK) for name in PROCESSOR_FILES] if alone else []

    def placed(self, rows: list[Row], examples: list[dict[str, Any]]) -> list[Row]:
        """Rows with the pictures of their examples, one row an example."""
        return place_pictures(rows, examples, self.reader, self.args.image_background) if self.images else rows

    def prepare(self, model: Any, peft_config: Any) -> Any:
        """See `prepare_vision`."""
        if not self.takes:
            return peft_config
        if not has_tower(model):
            return peft_config
        return prepare_vision(model, self.processor, self.args, peft_config, images=self.images)

    def save(self, folder: str) -> None:
        """Save the processor beside the model; its tokenizer is saved anyway."""
        if not self.args.should_save:
            return
        if self.processor is not None:
            self.processor.save_pretrained(folder)
        for path in filter(None, self._settings):
            if Path(path).parent.resolve() != Path(folder).resolve():
                shutil.copy(path, folder)


def _processor_of(processing_class: Any, model_id: str, *, images: bool) -> Any:
    if hasattr(processing_class, "image_processor"):
        return processing_class
    if images and processing_class is not None:
        raise DataError(
            f"rows have images, and processing_class is {type(processing_class).__name__}, which reads text alone. Fix: "
            "processing_class=AutoProcessor.from_pretrained(the model)."
        )
    return load_processor(model_id) if images else None


def prepare_vision(model: Any, processor: Any, args: Any, peft_config: Any, *, images: bool) -> Any:
    """Let the model's passes hold pictures, freeze what is not trained, and keep a new adapter to the text model.

    Args:
        model: As it was loaded, before any adapter.
        processor: Of `transformers`, of any family where rows are text; None: the run has none.
        args: A `PictureConfig`.
        peft_config: Of a new adapter, or None.
        images: Whether the training set has pictures.

    Returns:
        The adapter's config, with module paths in place of names that would reach the tower.
    """
    inner: Any = causal_lm(model)
    if processor is not None and images:
        install_pictures(inner, processor, cache_bytes=int(args.image_cache_gb * 2**30))
    choice = getattr(args, "freeze_vision", "auto")
    peft_config = _adapter_of_text(inner, peft_config, choice)
    frozen = _frozen(inner, choice, images=images)
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    count = lambda kept: sum(p.numel() for p in kept) / 1e6  # noqa: E731
    tower = tower_parameters(inner)
    logger.info(
        "vision: %.2f of %.2f M parameters are frozen; text: %.2f M.",
        count(frozen.values()), count(tower.values()), count(inner.parameters()) - count(tower.values()),
    )  # fmt: skip
    return peft_config


def _frozen(model: Any, choice: Any, *, images: bool) -> dict[str, nn.Parameter]:
    """Parameters of the tower and projector that are not trained: those that were chosen, and those that no loss reaches."""
    tower = tower_parameters(model)
    if choice is True or (choice == "auto" and not images):
        return tower
    chosen = {name for name in tower if choice == "tower" and not set(PROJECTOR) & set(name.split("."))}
    encoder: PictureEncoder | None = model.__dict__.get("picture_encoder")
    unreached = encoder.unreached(model) if encoder is not None and choice != False else set()  # noqa: E712
    return {name: parameter for name, parameter in tower.items() if name in chosen | unreached}


def _adapter_of_text(model: Any, config: Any, choice: Any) -> Any:
    """The adapter's config with the paths of the text model's layers as targets, unless the tower may be adapted."""
    targets = getattr(config, "target_modules", None)
    if config is None or choice is False or not hasattr(config, "target_modules"):
        return config
    if isinstance(targets, str) and targets != "all-linear":
        return config
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    text = {name for name in linear if set(LANGUAGE) & set(name.split(".")) and not name.endswith("lm_head")}
    if targets is None or targets == "all-linear":
        kept = text
    else:
        paths = {target for target in targets if "." in target}
        kept = paths | {name for name in text if name.rsplit(".", 1)[-1] in targets}
    narrowed = copy.deepcopy(config)
    narrowed.target_modules = kept
    logger.info(
        "the adapter reaches %d layers of the text model and none of the vision tower; freeze_vision=False lets names reach it.",
        len(kept),
    )
    return narrowed
