"""Training on images. `Vision` tokenizes rows and prompts with images. `freeze` and `check_shards` handle vision towers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from datasets import Features, List, Value

import posttrain.extensions.images.checks  # noqa: F401  # Registers the checks of images.
from posttrain.data.chat import is_processor, template_text
from posttrain.data.formats import (
    STREAMED,
    PreparationReport,
    first_row,
    get_dataset_column_names,
    read_columns,
    tokenized,
    undecoded,
)
from posttrain.data.packing import LENGTHS
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.extensions.images.encoder import (
    freeze_tower,
    install_pictures,
    refuse_skipped_layers,
    tower_parameters,
)
from posttrain.extensions.images.picture import Picture, read_picture, shaded
from posttrain.extensions.images.processors import LARGE, PictureProcessor, family_of, load_processor
from posttrain.extensions.images.rows import (
    COUNTERS,
    HINT,
    LOST,
    PACKED,
    PictureOptions,
    conversation_of,
    exchanged,
    opened,
    picture_prompt,
    picture_prompts,
    place_pictures,
    row_batch,
    row_features,
    side_by_side,
)
from posttrain.loop.media import Media
from posttrain.loop.rollout import settings_of
from posttrain.loop.scoring import all_rewards
from posttrain.losses.advantages import weighted_total
from posttrain.metrics import Metric, mean
from posttrain.models.architecture import get_config_model_id
from posttrain.models.heads import causal_lm, has_tower, picture_encoder
from posttrain.models.parallel import shards_parameters
from posttrain.rewards.judges import JudgeReward
from posttrain.rewards.model import ModelReward
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Prompt, Rollout, Row, Sampling

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import ProcessorMixin

    from posttrain.loop.run import Run
    from posttrain.methods.config import PostTrainingConfig
    from posttrain.rollouts.base import RolloutEngine
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)

ROWS_TRIED = 2  # Number of rows whose images are decoded completely before training, to test them.
# One of ROLLOUTS_A_COMPARISON rollouts is checked. Its images must equal the images of its dataset row.
ROLLOUTS_A_COMPARISON = 64
# Maximum fraction of rows that may be dropped because they are too long or unreadable. A larger fraction is an error.
SHARE_UNFIT = 0.005

NO_BOS = (
    "the chat template writes no bos token, but the processor adds one to prompts for sampling (GRPO, generate). "
    "Training uses rows without the bos token. Fix: begin the template with {{ bos_token }}."
)


def largest_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return the images of the row with the largest number of image tokens. Return an empty list if no row has images."""
    placed = [[image for part in row.pictures for image in part] for row in rows]
    largest = max(placed, key=lambda images: sum(image.count for image in images), default=[])
    return [image.picture for image in largest]


class Vision(Media):
    """Support for images in a trainer. It contains the processor, and adds images to rows and prompts.

    Args:
        args: The trainer's config. If ``takes`` is True, the config is a `PictureConfig`.
        processing_class: Argument of the trainer: a tokenizer, a processor or None.
        model_id: Path or Hub id of the model. The processor is loaded from it if the user passed no processor.
        takes: Whether the method can be trained on images. If False, this object only provides the processor.
        shown: Whether rows of the datasets contain images.
        returned: Whether tools or environments may return images. If True, and if the user passed a processor, images are
            supported even if no dataset row contains an image.

    Attributes:
        processor: Processor of `transformers`.
        reader: `PictureProcessor` that converts images and texts to token ids. None if the run has no images.

    Raises:
        DataError: Rows contain images, but the user passed a tokenizer instead of a processor.
        ConfigError: ``check_image_use`` is set with tools or environments, ``chat_template_path`` is set with images, or an
            option for images is set for a method that supports only text.
    """

    def __init__(
        self,
        args: PostTrainingConfig,
        processing_class: Tokenizer,
        model_id: str,
        *,
        takes: bool,
        shown: bool = False,
        returned: bool = False,
    ) -> None:
        super().__init__(args, processing_class, "", takes=takes)
        if returned := takes and returned:
            family = family_of(processing_class)
            returned = family is not None and family.several_turns
        self.images = returned or shown
        if returned and args.check_image_use:
            raise ConfigError(
                "check_image_use=True samples prompts again with other images, but here tools or environments "
                "influence what is sampled. Fix: set check_image_use=False."
            )
        template = args.chat_template_path
        if self.images and template:
            raise ConfigError(
                f"chat_template_path={template!r} is a template for the tokenizer, but rows with images are rendered "
                "with the processor's template. Fix: set processor.chat_template and pass processing_class=processor."
            )
        self.processor = _processor_of(processing_class, model_id)
        if self.images:
            self.reader = PictureProcessor(
                self.processor,
                most=args.image_max_tokens,
                pixels=args.image_max_pixels,
                resize=args.image_fit == "resize",
                per_row=args.max_images_per_row,
                background=args.image_background,
            )
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.chat_template = self.tokenizer.chat_template or self.processor.chat_template
        self._counted: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def placed(self, rows: list[Row], examples: list[dict[str, Any]]) -> list[Row]:
        """Add the images of each example to its row. There is one row per example."""
        return rows if self.reader is None else place_pictures(rows, examples, self.reader)

    def prepare_rows(
        self,
        dataset: AnyDataset,
        *,
        name: str = "train",
        num_proc: int | None = None,
        keep: Sequence[str] = (),
        packs: bool = False,
        unsupported: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> tuple[Any, PreparationReport]:
        """Tokenize rows with images. Images are stored as encoded bytes or paths, and are not decoded. Lengths include
        image tokens.

        Args:
            dataset: Dataset of rows with answers, or of documents.
            name: Name of the dataset, for messages.
            num_proc: Number of processes.
            keep: Columns to keep.
            packs: Whether to pack several whole rows into one row of up to ``max_length`` tokens.
            unsupported: SFT: values, by name, of options that rows with images do not support. An error is raised for
                values that are set.
            more: Values of the fields ``branches`` and ``begins`` of `PictureOptions`.

        Returns:
            The prepared dataset, and a report (with counts for map-style datasets). The prepared dataset has the column
            ``pictures``. It also has ``input_ids`` and ``labels``, or ``prompt_ids`` with ``<branch>_ids`` and
            ``<branch>_mask``.

        Raises:
            DataError: A row cannot be read, more than 0.5 % of the rows are too long, or no row remains. If a row cannot be
                read, the message contains the row's number and the column.
            ConfigError: An option in ``unsupported`` is set, or the packing strategy can split an image.
        """
        if unsupported is not None:
            self._refuse_options(unsupported)
        first_row(dataset, name, images=True)
        dataset = undecoded(dataset)
        columns = get_dataset_column_names(dataset)
        if "pictures" in columns:
            return dataset, PreparationReport(name)
        args, reader = self.args, self.reader
        assert reader is not None
        begun = reader.render([{"role": "user", "content": "q"}]) if template_text(reader.processor) else ""
        if begun and not more.get("begins") and reader.begun(begun) != begun:
            logger.warning("%s dataset: PT-K112: %s", name, NO_BOS)
        if not more.get("branches"):
            more |= {"train_prompt": args.completion_only_loss is False, "spoken": args.assistant_only_loss}
            more |= {"text_field": args.dataset_text_field}
        options = PictureOptions(max_length=args.max_length, fit=args.image_fit, **more)
        drop = [column for column in columns if column not in keep]
        about: dict[str, Any] = {"drop": drop, "counters": COUNTERS, "num_proc": num_proc, "hint": HINT}
        if isinstance(dataset, Sized):
            about["features"] = row_features(dataset.features, options.branches, drop)
        mapped, counts, remaining, report = tokenized(
            dataset, name, row_batch, {"reader": self.reader, "options": options}, **about
        )
        if isinstance(report.rows_in, int) and report.rows_in > 0:
            self._report_changed(mapped, counts, report)
        if packs:
            columns, kinds = get_dataset_column_names(remaining), remaining.features
            kinds = None if kinds is None else Features(kinds | {LENGTHS: List(Value("int64"))})
            about = {"batched": True, "batch_size": PACKED, "remove_columns": columns, "features": kinds}
            remaining = remaining.map(side_by_side, fn_kwargs={"size": self.args.max_length}, **about)
        return remaining, report

    def _refuse_options(self, unsupported: Mapping[str, Any]) -> None:
        """Reject options that rows with images do not support."""
        args, named = self.args, [name for name, value in unsupported.items() if value]
        if named:
            raise ConfigError(
                f"{named} is not supported for rows with images, which the trainer prepares itself. Fix: remove it, "
                "and use the columns 'messages', or 'prompt' and 'completion'."
            )
        if (args.packing or args.eval_packing) and args.packing_strategy != "bfd":
            raise ConfigError(
                f"packing_strategy={args.packing_strategy!r} can split rows inside an image. Fix: use packing_strategy='bfd', "
                "which does not split rows."
            )

    def _report_changed(self, mapped: Any, counts: Mapping[str, Any], report: PreparationReport) -> None:
        """Warn about rows whose images or texts were changed. Raise an error if too many rows were dropped."""
        lost = {reason: count for reason, count in report.dropped.items() if reason in LOST}
        resized, escaped = (int(counts[name].sum()) for name in ("_resized", "_escaped"))
        if resized:
            logger.warning(
                "%s dataset: %d images are resized to a smaller size (image_max_tokens=%s, image_max_pixels=%s, "
                    "max_length=%s).",
                report.name, resized, self.args.image_max_tokens, self.args.image_max_pixels, self.args.max_length,
            )  # fmt: skip
        if escaped:
            logger.warning(
                "%s dataset: PT-G008: %d strings that look like image placeholders remain text.", report.name, escaped
            )
        if self.args.image_fit != "drop" and sum(lost.values()) > SHARE_UNFIT * report.rows_in:
            left_out = [reason in lost for reason in read_columns(mapped, ["_reason"])["_reason"]]
            worst = int((counts["_tokens"] * left_out).argmax())
            tokens = int(counts["_tokens"][worst])
            raise DataError(
                f"PT-G001: {sum(lost.values())} of {report.rows_in} {report.name} rows are dropped ({lost}). Row "
                f"{worst} has {tokens} tokens including its images, but max_length={self.args.max_length}. Fix: set "
                f"max_length to at least {tokens} (None: no limit), use smaller images, or set image_fit='drop'."
            )

    # Prompts of online methods ---------------------------------------------------------------------------------------

    def prompts(self, examples: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """Convert prompts to token ids with their images. Equal consecutive prompts are processed once.

        Raises:
            DataError: A prompt is not conversational, has more than ``max_images_per_row`` images, or has an unreadable image.
        """
        assert self.reader is not None
        return picture_prompts(self.reader, examples, self.args.chat_template_kwargs or {})

    def prompt(self, example: Mapping[str, Any], pictures: Sequence[Picture] | None = None) -> Prompt:
        """Convert one prompt to token ids with its images. If the example was returned by `opened`, pass the images that
        were already read as ``pictures``.
        """
        assert self.reader is not None
        return picture_prompt(self.reader, example, self.args.chat_template_kwargs or {}, pictures=pictures)

    def opened(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return examples for reward functions. Images in columns and messages are PIL images whose pixels are decoded on
        access.

        Equal consecutive examples share their image objects.
        """
        return opened(examples) if self.images else examples

    def prompt_rows(self, examples: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Convert each prompt to a row with its images and without a completion. Return an empty list if the run has no
        images.
        """
        if not self.images:
            return []
        return [Row(list(ids), [], [], pictures=[list(ids.pictures)]) for ids in self.prompts(examples)]

    def checked_prompts(self, dataset: AnyDataset, name: str) -> Any:
        """Check the prompts of a dataset, or of several datasets by name. Return the dataset with images that are not
        decoded. Only the headers of images are read, except for the first rows.

        Raises:
            DataError: A row contains text that looks like an image placeholder, or another number of placeholders than
                images. The error is also raised for an image that is remote, cannot be read, has more than 8 bits per
                channel, or exceeds ``image_max_tokens``.
        """
        if not self.images or dataset is None:
            return dataset
        if isinstance(dataset, dict):
            return {key: self.checked_prompts(subset, f"{name}[{key!r}]") for key, subset in dataset.items()}
        assert self.reader is not None
        dataset = undecoded(dataset)
        for index, row in enumerate(dataset if isinstance(dataset, Sized) else islice(dataset, STREAMED)):
            try:
                blocks, pictures = conversation_of(row)
                self.reader.refuse_controls(blocks)
                read = [self.reader.fitted(read_picture(value, "column 'images'")) for value in pictures]
                # Load the images of the first rows completely, because reward functions are tested with these rows before
                # training.
                for picture in read if index < ROWS_TRIED else ():
                    picture.load()
            except DataError as error:
                raise DataError(f"{name} row {index}: {error}") from error
        return dataset

    def pixels(self, rows: Sequence[Row]) -> Callable[[int], dict[str, Tensor]] | None:
        """Return a function that maps N to the pixel tensors of N copies of the images in one row. This row has the largest
        number of image tokens. Return None if no row has images.
        """
        largest = largest_pictures(rows)
        return partial(self.reader.shapes, largest) if largest else None

    def check_engine(self, engine: RolloutEngine, rewards: Sequence[Any]) -> Any:
        """Check that the engine and the reward functions support images, if rows contain images. Return the engine.

        Raises:
            ConfigError: The rows contain images, but the engine, a reward model or a judge supports only text.
        """
        judges = [
            reward
            for reward in rewards
            if isinstance(reward, ModelReward) or (isinstance(reward, JudgeReward) and not reward.judge.vision)
        ]
        blind = [type(reward).__name__ for reward in judges]
        if self.images and blind:
            raise ConfigError(
                f"the rows have images, but {', '.join(blind)} reads only text, so it would score answers about images without "
                "the images. Fix: use a judge with vision=True, or a reward function, which gets the images in the columns "
                "that it names."
            )
        if self.images and not engine.capabilities.pictures:
            raise ConfigError(
                f"the rows have images, but the engine {engine.name!r} only supports text. Fix: set "
                "rollout_engine='auto', which chooses an engine that supports images. As a server use 'posttrain "
                "serve', or 'posttrain vllm-serve' with a vLLM version that has --enable-scale-out."
            )
        return engine

    def sampling(self, settings: Sampling, model: nn.Module) -> Sampling:
        """Return a copy of sampling settings that forbids sampling image placeholders and markers."""
        assert self.reader is not None
        vocabulary = model.config.get_text_config().vocab_size
        never = tuple((token, -math.inf) for token in self.reader.never(vocabulary))
        return replace(settings, logit_bias=(*settings.logit_bias, *never))

    def sampled(self, run: Run, batch: RolloutBatch, mode: str) -> RolloutBatch:
        """Check completions of rows with images, and open their images for reward functions. A completion with a sampled
        image placeholder is excluded from the loss.
        """
        rollouts, masked, metrics = self.look_at(batch.rollouts, batch.examples, run.model, run.pad_token_id)
        run.log(metrics, mode)
        examples = self.opened(batch.examples)
        return replace(batch, examples=examples, rollouts=rollouts, left_out=batch.left_out | masked)

    def look_at(
        self, rollouts: Sequence[Rollout], examples: Sequence[Mapping[str, Any]], model: nn.Module, pad_token_id: int
    ) -> tuple[list[Rollout], set[int], dict[str, Metric]]:
        """Check the rollouts of one generation. `sampling` forbids image placeholders. If an engine sampled them
        nevertheless, they are replaced with padding. Return the rollouts, the indices of changed rollouts, and metrics.

        The metrics are the number of images and image tokens per row, and the number of changed rollouts. They
        also contain values since the last call: the numbers of encoded, reused and resized images, the number of strings
        that were kept as text, and the seconds for encoding.

        Raises:
            ModelError: PT-G015: the images of a rollout differ from the images of its dataset row. One of 64 rollouts is
                compared.
        """
        assert self.reader is not None
        for i in range(0, len(rollouts), ROLLOUTS_A_COMPARISON):
            pictures = conversation_of(examples[i])[1]
            wanted = [self.reader.fitted(read_picture(raw, "column 'images' of a prompt")).digest for raw in pictures]
            if wanted != [image.picture.digest for image in rollouts[i].pictures]:
                raise ModelError(
                    f"PT-G015: rollout {i} was sampled with the images "
                    f"{[p.picture.digest[:8] for p in rollouts[i].pictures]}, but its row has "
                    f"{[digest[:8] for digest in wanted]}. Fix: do not change the order of prompts in sample()."
                )
        token, odd, clean = self.reader.token_id, set(), list(rollouts)
        for i, rollout in enumerate(rollouts):
            own = rollout.tool_mask or [1] * len(rollout.token_ids)
            ids = [pad_token_id if t == token and mine else t for t, mine in zip(rollout.token_ids, own, strict=True)]
            if ids != list(rollout.token_ids):
                odd.add(i)
                clean[i] = replace(rollout, token_ids=ids)
        encoder, counts = picture_encoder(model), [[p.count for p in (*r.pictures, *r.shown)] for r in rollouts]
        read, before = self.reader, self._counted
        self._counted = (encoder.encoded, encoder.reused, read.resized, read.sanitized, encoder.seconds)
        encoded, reused, resized, escaped, seconds = (
            now - then for now, then in zip(self._counted, before, strict=True)
        )
        return (
            clean,
            odd,
            {
                "images/per_row": mean(sum(map(len, counts)) / max(len(counts), 1), weight=len(counts)),
                "images/tokens_mean": mean(sum(map(sum, counts)) / max(len(counts), 1), weight=len(counts)),
                "images/resized": mean(float(resized)),
                "images/escaped_strings": mean(float(escaped)),
                "images/sampled_placeholders": mean(float(len(odd))),
                "images/encoded": mean(float(encoded)),
                "images/reused": mean(float(reused)),
                "images/seconds": mean(seconds),
            },
        )

    def exchanged_reward(self, run: Run, examples: list[dict[str, Any]]) -> dict[str, Metric]:
        """Sample completions with the images of other prompts, and return the mean reward as a metric. If the option
        ``check_image_use`` is False, return no metric.
        """
        if not self.args.check_image_use:
            return {}
        size = run.online.prompts.group_size("eval")
        batch = run.online.sample(exchanged(examples, size), settings_of(run, "eval"))
        batch = RolloutBatch(self.opened(examples), batch.rollouts, batch.completions, group_size=size)
        table = all_rewards(run, run.online.rewards, batch, training=False)
        totals = weighted_total(table.values, table.weights)
        return {"images/exchanged_reward": mean(totals, ~totals.isnan())}

    def prepare(self, model: nn.Module, peft_config: PeftConfig | None) -> Any:
        """Prepare the model for images. After this call, its forward passes accept images, parameters that are not trained
        are frozen, and a new adapter is restricted to the text model.

        Args:
            model: Loaded model without a new adapter.
            peft_config: Config of a new adapter, or None.

        Returns:
            The adapter's config. Names of target modules are replaced by full paths, so that they do not match modules of
            the vision tower.
        """
        if self.images and has_tower(model):
            install_pictures(model, self.processor, cache_bytes=int(self.args.image_cache_gb * 2**30))
        return super().prepare(model, peft_config)

    def show(self, model: str | nn.Module, processor: ProcessorMixin | None = None) -> bool:
        """Prepare another model (a teacher or a reference model) for the run's images. The other model's processor
        preprocesses the images.

        Args:
            model: The other model. It receives the policy's token ids.
            processor: Processor of the other model. None: the processor is loaded from the other model's folder or Hub id.
                If loading fails, the policy's processor is used.

        Returns:
            Whether the other model receives the same pixels as the policy.

        Raises:
            ConfigError: The other model's processor gives an image another number of tokens than the policy's processor.
        """
        assert self.reader is not None
        path, own = get_config_model_id(causal_lm(model).config), processor
        if own is None and path:
            try:
                own = load_processor(path)
            except ModelError as error:
                logger.warning(
                    "%s: its processor is unknown, so images are prepared with the policy's processor: %s", path, error
                )
        alike = not is_processor(own) or _alike(self.reader, PictureProcessor(own))
        cache = int(self.args.image_cache_gb * 2**30)
        install_pictures(model, self.processor if alike else own, cache_bytes=cache)
        return alike

    def show_teacher(
        self, policy: nn.Module, teacher: nn.Module, processor: ProcessorMixin | None, own: Media | None = None
    ) -> None:
        """Prepare a teacher to process the student's images with its own vision tower.

        If student and teacher preprocess images equally, each image is preprocessed once.

        Args:
            policy: Student model.
            teacher: Teacher model without wrappers.
            processor: Processor of the teacher, or None.
            own: Object that adds images to the teacher's rows. None: the teacher reads the student's token ids.

        Raises:
            ConfigError: The teacher is a text model, or the teacher's model family differs from the student's. Another
                family uses other placeholder ids or pixel values.
        """
        kinds = [causal_lm(model).config.model_type for model in (policy, teacher)]
        if not has_tower(teacher) or (own is None and kinds[0] != kinds[1]):
            raise ConfigError(
                f"the rows have images, but the teacher is {kinds[1]!r} and cannot process the placeholder ids and "
                f"pixels of the student, {kinds[0]!r}. Fix: use a teacher of the student's family, or GOLD with "
                "use_uld_loss=True and a teacher that supports images."
            )
        if own is not None:
            install_pictures(teacher, own.processor, cache_bytes=int(self.args.image_cache_gb * 2**30))
        elif self.show(teacher, processor):
            encoder = picture_encoder(teacher)
            assert encoder is not None
            encoder.next = picture_encoder(policy)

    def save(self, folder: str) -> None:
        """Save the processor in the model's folder. The tokenizer of the processor is saved separately."""
        if self.args.should_save:
            self.processor.save_pretrained(folder)


def freeze(model: nn.Module, peft_config: PeftConfig | None, choice: object, *, images: bool) -> Any:
    """Apply ``freeze_vision``: freeze parameters of vision tower and projector, and log their number.

    Args:
        model: Loaded model with a vision tower and without a new adapter.
        peft_config: Config of a new adapter, or None.
        choice: Value of the option ``freeze_vision``.
        images: Whether rows have images.

    Returns:
        The adapter's config. Names of target modules are replaced by full paths, so that they do not match modules of the
        vision tower.
    """
    inner: Any = causal_lm(model)
    peft_config, frozen = freeze_tower(inner, peft_config, choice, images=images)
    tower = tower_parameters(inner)
    count = lambda parameters: sum(p.numel() for p in parameters) / 1e6  # noqa: E731
    logger.info(
        "vision: %.2f of %.2f M parameters are frozen; text: %.2f M.",
        count(frozen), count(tower.values()), count(inner.parameters()) - count(tower.values()),
    )  # fmt: skip
    return peft_config


def check_shards(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise an error if a model with images is sharded, but some processes may have no image in a pass. With DDP, freeze
    the vision parameters that do not influence the loss.

    DDP waits for the gradient of every trained parameter. Vision parameters that do not influence the loss never have a
    gradient, so freezing them does not change training.
    """
    encoder, inner = picture_encoder(model), causal_lm(model)
    if encoder is not None:
        refuse_skipped_layers(model, accelerator)
    if accelerator.num_processes == 1 or shards_parameters(accelerator) or not has_tower(model):
        return
    tower = {name: parameter for name, parameter in tower_parameters(inner).items() if parameter.requires_grad}
    idle = encoder.unreached(inner) if encoder is not None else set(tower)
    for name in idle:
        tower[name].requires_grad_(False)
    if idle:
        logger.info(
            "vision: %d parameters that no loss depends on are frozen, because DDP would wait for their gradients.",
            len(idle),
        )


def _processor_of(processing_class: Tokenizer, model_id: str) -> Any:
    if is_processor(processing_class):
        return processing_class
    if processing_class is not None:
        raise DataError(
            f"rows have images, but processing_class is {type(processing_class).__name__}, which reads only text. The images "
            "are in a column 'images' or 'image', or inside messages. Fix: pass AutoProcessor.from_pretrained(model) as "
            "processing_class. SFT prepares images itself: also remove data_collator, formatting_func and skip_prepare_dataset."
        )
    return load_processor(model_id)


def _alike(mine: PictureProcessor, theirs: PictureProcessor) -> bool:
    """Return whether two processors convert test images of three sizes to the same tensors.

    Raises:
        ConfigError: The processors give an image different numbers of tokens, so the two models cannot process the same
            token ids.
    """
    for picture in (shaded(LARGE), mine.shaded((112, 56)), mine.shaded((56, 112))):
        own, other = mine.expansion(picture), theirs.expansion(picture)
        if (own.count, own.grid) != (other.count, other.grid):
            raise ConfigError(
                f"two models must read the same ids, but an image of {picture.size} has {own.count} tokens (grid "
                f"{own.grid}) with the processor of one model and {other.count} (grid {other.grid}) with the processor of the "
                "other model. Fix: use the same sizes in the settings of both processors, or GOLD with use_uld_loss=True."
            )
        first, second = mine.prepare(picture), theirs.prepare(picture)
        if first.keys() != second.keys() or not all(torch.equal(value, second[name]) for name, value in first.items()):
            return False
    return True
