"""`Media`: handles images in a run, and does nothing in a run on text. `media_of` creates it, or its image subclass."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.hub import cached_file

from posttrain import plugins
from posttrain.data.chat import is_processor
from posttrain.data.formats import shows_pictures
from posttrain.errors import check_rules
from posttrain.methods.config import PictureConfig
from posttrain.models.heads import has_tower

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import ProcessorMixin

    from posttrain.data.formats import PreparationReport
    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.metrics import Metric
    from posttrain.rollouts.base import RolloutEngine
    from posttrain.rollouts.batch import RolloutBatch
    from posttrain.types import AnyDataset, Prompt, Row, Sampling, Tokenizer

NO_IMAGES = "has no effect, because this run reads only text. Fix: remove it"
# Files that a checkpoint of a multimodal model contains in addition to weights and tokenizer files.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
MAY_LACK = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}


class Media:
    """Handles images in a run. This base class is used for runs on text, and changes nothing.

    The images extension has the subclass `posttrain.extensions.images.vision.Vision`. `prepare_rows` and `prompts` are only
    called if ``images`` is True.

    Args:
        args: The trainer's config. The config is a `PictureConfig` if ``takes`` is set.
        tokenizer: Tokenizer that the user passed, or None.
        model_id: Path or Hub id of the model.
        takes: Whether the method can be trained on images.

    Attributes:
        images: Whether rows contain images, or tools and environments return them.
        processor: Processor of `transformers`. None: the run reads only text.
        reader: Object that converts images and texts to token ids. None: the run reads only text.
        tokenizer: Tokenizer of the processor, or the tokenizer that the user passed.

    Raises:
        ConfigError: An image option is set for a method that supports only text.
    """

    images = False
    processor: Any = None
    reader: Any = None

    def __init__(self, args: PostTrainingConfig, tokenizer: Tokenizer, model_id: str, *, takes: bool) -> None:
        self.args, self.takes, self.tokenizer = args, takes, tokenizer
        if not takes and isinstance(args, PictureConfig):
            # Do not reject freeze_vision, because it also applies to the vision tower of a model that is trained on text.
            unread = [option for option in fields(PictureConfig) if option.name != "freeze_vision"]
            check_rules(
                args, [(option.name, getattr(args, option.name) == option.default, NO_IMAGES) for option in unread]
            )
        # A run on text needs no processor. Checkpoints only contain copies of the processor's files, next to the trained
        # model.
        self._settings = [cached_file(model_id, name, **MAY_LACK) for name in PROCESSOR_FILES] if model_id else []

    # Rows ------------------------------------------------------------------------------------------------------------

    def placed(self, rows: list[Row], examples: list[dict[str, Any]]) -> list[Row]:
        """Add the images of each example to the example's row. There is one row per example."""
        return rows

    def prepare_rows(self, dataset: AnyDataset, **options: Any) -> tuple[Any, PreparationReport]:
        """Tokenize documents, or rows with answers, and keep their images. Return the dataset and a report."""
        raise NotImplementedError

    def prompts(self, examples: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """Return the prompts of examples as token ids with images."""
        raise NotImplementedError

    def prompt_rows(self, examples: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Return one row per example, with its prompt and images but no completion. Return an empty list for a run on text."""
        return []

    def checked_prompts(self, dataset: AnyDataset, name: str) -> Any:
        """Check the prompts of a dataset, or of several datasets by name. Return the dataset with images that are not
        decoded.
        """
        return dataset

    def opened(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the examples in the format of reward functions, in which images are PIL images."""
        return examples

    def pixels(self, rows: Sequence[Row]) -> Callable[[int], dict[str, Tensor]] | None:
        """Return a function with an argument N. It takes the row with the largest number of image tokens, and prepares its
        images N times. Return None if no row has images.
        """
        return None

    # Completions -----------------------------------------------------------------------------------------------------

    def check_engine(self, engine: RolloutEngine, rewards: Sequence[Any]) -> Any:
        """Check that engine and reward functions support images, if rows contain images. Return the engine."""
        return engine

    def sampling(self, settings: Sampling, model: nn.Module) -> Sampling:
        """Return the sampling settings, changed so that image placeholders and markers are never sampled."""
        return settings

    def sampled(self, run: Run, batch: RolloutBatch, mode: str) -> RolloutBatch:
        """Check the completions of rows with images, and open these images for reward functions."""
        return batch

    def exchanged_reward(self, run: Run, examples: list[dict[str, Any]]) -> dict[str, Metric]:
        """Sample completions after exchanging the images of prompts, and return their mean reward."""
        return {}

    # Models ----------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, peft_config: PeftConfig | None) -> Any:
        """Prepare the model before an adapter is added: freeze parameters of the vision tower that are not trained. Return
        the adapter's config, restricted to the text model.
        """
        if not self.takes or not has_tower(model):
            return peft_config
        vision = plugins.module("extensions.images.vision")
        return vision.freeze(model, peft_config, self.args.freeze_vision, images=self.images)

    def show(self, model: str | nn.Module, processor: ProcessorMixin | None = None) -> bool:
        """Prepare another model for the run's images. Return whether this model uses the same pixels as the policy."""
        return True

    def show_teacher(
        self, policy: nn.Module, teacher: nn.Module, processor: ProcessorMixin | None, own: Media | None = None
    ) -> None:
        """Prepare a teacher for the student's images. ``own`` is a function that adds images to the teacher's rows if these
        rows differ from the student's rows.
        """

    def check_shards(self, model: nn.Module, accelerator: Accelerator) -> None:
        """Raise an error if several processes cannot train the model's vision tower together."""
        if accelerator.num_processes > 1 and has_tower(model):
            plugins.module("extensions.images.vision").check_shards(model, accelerator)

    def save(self, folder: str) -> None:
        """Save the processor's files in the model's folder. The processor's tokenizer is saved separately."""
        for path in filter(None, self._settings) if self.args.should_save else ():
            if Path(path).parent.resolve() != Path(folder).resolve():
                shutil.copy(path, folder)


def media_of(
    args: PostTrainingConfig,
    processing_class: Tokenizer,
    model_id: str,
    sets: Iterable[Any],
    *,
    takes: bool,
    returned: bool = False,
) -> Media:
    """Create the object that handles images in a run: `Media` for text, or `Vision` for images.

    Args:
        args: The trainer's config.
        processing_class: The trainer's argument: a tokenizer, a processor or None.
        model_id: Path or Hub id of the model. The model's processor is loaded from there.
        sets: Training and evaluation sets as the user passed them.
        takes: Whether the method can be trained on images.
        returned: Whether tools or environments may return images.

    Raises:
        MissingDependencyError: Rows contain images, or a processor was passed, but the images extension is not installed.
    """
    shown = takes and any(map(shows_pictures, sets))
    if not shown and not is_processor(processing_class):
        return Media(args, processing_class, model_id, takes=takes)
    vision = plugins.module("extensions.images.vision")
    return vision.Vision(args, processing_class, model_id, takes=takes, shown=shown, returned=returned)
