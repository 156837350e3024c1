"""Training on images: its options, rows with images as token ids, and what else a trainer of text does not have."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Features, List, Value
from transformers.utils.hub import cached_file

from posttrain.data.chat import is_processor, template_text
from posttrain.data.formats import (
    STREAMED,
    PreparationReport,
    first_row,
    get_dataset_column_names,
    read_columns,
    shows_pictures,
    tokenized,
    undecoded,
)
from posttrain.data.packing import LENGTHS
from posttrain.errors import ConfigError, DataError, ModelError, check_rules
from posttrain.losses.advantages import weighted_total
from posttrain.methods.config import PictureConfig
from posttrain.metrics import Metric, mean
from posttrain.models.architecture import get_config_model_id
from posttrain.models.heads import causal_lm, has_tower, picture_encoder
from posttrain.models.parallel import shards_parameters
from posttrain.models.vision import (
    adapter_of_text,
    frozen_parameters,
    install_pictures,
    refuse_skipped_layers,
    tower_parameters,
)
from posttrain.pictures.picture import Picture, read_picture, shaded
from posttrain.pictures.processors import LARGE, PictureProcessor, family_of, load_processor
from posttrain.pictures.rows import (
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
from posttrain.rewards.judges import JudgeReward
from posttrain.rewards.model import ModelReward
from posttrain.rollouts.batch import RolloutBatch
from posttrain.types import Prompt, Rollout, Row, Sampling

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig
    from torch import nn
    from transformers import ProcessorMixin

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)

ROWS_TRIED = 2  # Rows whose pictures are read whole at the start.
ROLLOUTS_A_COMPARISON = 64  # Of so many rollouts, the pictures of one are compared with its row's.
SHARE_UNFIT = 0.005  # Share of rows that do not fit which is dropped and counted; more of them is an error.

NO_BOS = (
    "the chat template writes no bos token, and the processor adds one to prompts that are sampled from (GRPO, generate): rows "
    "are trained without it. Fix: begin the template with {{ bos_token }}."
)
NO_IMAGES = "would change nothing: this run reads rows of text alone. Fix: leave it out"
# What a checkpoint of a multimodal model has beside its weights and its tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
MAY_LACK = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}


class Vision:
    """What a trainer of rows with images has beside a trainer of text: a processor, and pictures on rows.

    Args:
        args: The trainer's config; a `PictureConfig` where ``takes`` is set.
        processing_class: As it was given to the trainer: a tokenizer, a processor or None.
        model_id: Where the model is, to load its processor from.
        sets: Training and evaluation sets as they were given.
        takes: Whether the method trains on images; else nothing here does anything.
        returned: Whether tools or environments may return images: then a processor in place of a tokenizer is enough.

    Attributes:
        images: Whether rows have images, or get them from tools and environments.
        processor: Of `transformers`; None: the run reads text alone.
        reader: The processor as rows are read with it; None: rows are text.
        tokenizer: The processor's, or what was given.

    Raises:
        DataError: Rows have images, and a tokenizer was given.
        ConfigError: ``check_image_use`` beside tools or environments, ``chat_template_path`` beside images, or a setting of
            images where the method reads text alone.
    """

    def __init__(
        self,
        args: PostTrainingConfig,
        processing_class: Tokenizer,
        model_id: str,
        sets: Iterable[Any],
        *,
        takes: bool,
        returned: bool = False,
    ) -> None:
        self.args, self.takes, self.tokenizer = args, takes, processing_class
        if not takes and isinstance(args, PictureConfig):
            # A tower is frozen or trained on rows of text too.
            unread = [option for option in fields(PictureConfig) if option.name != "freeze_vision"]
            check_rules(
                args, [(option.name, getattr(args, option.name) == option.default, NO_IMAGES) for option in unread]
            )
        if returned := takes and returned:
            family = family_of(processing_class)
            returned = family is not None and family.several_turns
        self.images = returned or (takes and any(map(shows_pictures, sets)))
        if returned and args.check_image_use:
            raise ConfigError(
                "check_image_use=True samples prompts again under other images, and here tools or environments have a part in "
                "what is sampled. Fix: check_image_use=False."
            )
        template = args.chat_template_path
        if self.images and template:
            raise ConfigError(
                f"chat_template_path={template!r} is a template for the tokenizer, and rows with images are rendered by that of "
                "the processor. Fix: set processor.chat_template and give it as processing_class=processor."
            )
        self.processor = _processor_of(processing_class, model_id, images=self.images)
        self.reader = None
        if self.images:
            self.reader = PictureProcessor(
                self.processor,
                most=args.image_max_tokens,
                pixels=args.image_max_pixels,
                resize=args.image_fit == "resize",
                per_row=args.max_images_per_row,
                background=args.image_background,
            )
        if self.processor is not None:
            self.tokenizer = self.processor.tokenizer
            self.tokenizer.chat_template = self.tokenizer.chat_template or self.processor.chat_template
        # A run on text that read the tokenizer alone keeps the image settings of its checkpoint.
        alone = self.processor is None and bool(model_id)
        self._counted: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._settings = [cached_file(model_id, name, **MAY_LACK) for name in PROCESSOR_FILES] if alone else []

    def placed(self, rows: list[Row], examples: list[dict[str, Any]]) -> list[Row]:
        """Rows with the pictures of their examples, one row an example."""
        return rows if self.reader is None else place_pictures(rows, examples, self.reader)

    def prepare_rows(
        self,
        dataset: AnyDataset,
        *,
        name: str = "train",
        num_proc: int | None = None,
        keep: Sequence[str] = (),
        packs: bool = False,
        **more: Any,
    ) -> tuple[Any, PreparationReport]:
        """Ids of rows and their pictures as encoded bytes or paths; lengths are counted with images, and nothing is decoded.

        Args:
            dataset: Raw rows with answers, or documents.
            name: Of the dataset, in messages.
            num_proc: Processes.
            keep: Columns that stay.
            packs: Whether whole rows are placed side by side up to ``max_length``.
            more: ``branches`` and ``begins`` of `PictureOptions`, whose other fields are those of the run.

        Returns:
            The dataset with ``pictures`` and either ``input_ids`` and ``labels``, or ``prompt_ids`` with ``<branch>_ids`` and
            ``<branch>_mask``; and a report (counted for map-style datasets).

        Raises:
            DataError: A row that cannot be read, by number and column; more than 0.5 % of the rows do not fit; or none is left.
        """
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
        mapped, counts, kept, report = tokenized(
            dataset, name, row_batch, {"reader": self.reader, "options": options}, **about
        )
        if isinstance(report.rows_in, int) and report.rows_in > 0:
            self._tell(mapped, counts, report)
        if packs:
            columns, kinds = get_dataset_column_names(kept), kept.features
            kinds = None if kinds is None else Features(kinds | {LENGTHS: List(Value("int64"))})
            about = {"batched": True, "batch_size": PACKED, "remove_columns": columns, "features": kinds}
            kept = kept.map(side_by_side, fn_kwargs={"size": self.args.max_length}, **about)
        return kept, report

    def _tell(self, mapped: Any, counts: Mapping[str, Any], report: PreparationReport) -> None:
        """Warn of what was changed, and refuse a set of which too much is left out."""
        lost = {reason: count for reason, count in report.dropped.items() if reason in LOST}
        resized, escaped = (int(counts[name].sum()) for name in ("_resized", "_escaped"))
        if resized:
            logger.warning(
                "%s dataset: %d images are made smaller (image_max_tokens=%s, image_max_pixels=%s, max_length=%s).",
                report.name, resized, self.args.image_max_tokens, self.args.image_max_pixels, self.args.max_length,
            )  # fmt: skip
        if escaped:
            logger.warning("%s dataset: PT-G008: %d strings that stand for an image stay text.", report.name, escaped)
        if self.args.image_fit != "drop" and sum(lost.values()) > SHARE_UNFIT * report.rows_in:
            left_out = [reason in lost for reason in read_columns(mapped, ["_reason"])["_reason"]]
            worst = int((counts["_tokens"] * left_out).argmax())
            tokens = int(counts["_tokens"][worst])
            raise DataError(
                f"PT-G001: {sum(lost.values())} of {report.rows_in} {report.name} rows are left out ({lost}); row {worst} has "
                f"{tokens} tokens with its images, and max_length={self.args.max_length}. Fix: max_length of at least {tokens} "
                "(None: no limit), smaller images, or image_fit='drop'."
            )

    # Prompts that are completed while the run goes on -------------------------------------------------------------

    def prompts(self, examples: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """Prompts as the model reads them, with their pictures placed; equal neighbours are read once.

        Raises:
            DataError: A prompt is no conversation, holds more than ``max_images_per_row`` images, or cannot be read.
        """
        assert self.reader is not None
        return picture_prompts(self.reader, examples, self.args.chat_template_kwargs or {})

    def prompt(self, example: Mapping[str, Any], pictures: Sequence[Picture] | None = None) -> Prompt:
        """One prompt with its pictures; or of an `opened` one its text, with pictures that were read before."""
        assert self.reader is not None
        return picture_prompt(self.reader, example, self.args.chat_template_kwargs or {}, pictures=pictures)

    def opened(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Examples as reward functions see them: PIL images in columns and messages, decoded when they are touched.

        Equal neighbours share their images.
        """
        return opened(examples) if self.images else examples

    def prompt_rows(self, examples: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Rows of prompts alone, with their pictures; none where rows are text."""
        if not self.images:
            return []
        return [Row(list(ids), [], [], pictures=[list(ids.pictures)]) for ids in self.prompts(examples)]

    def checked_prompts(self, dataset: AnyDataset, name: str) -> Any:
        """A dataset (or several by name, or None) whose images wait undecoded; headers are read, no pixels.

        Raises:
            DataError: By row: text that stands for an image, other places than images, or an image that is remote, broken, of
                more than 8 bits a channel, or above image_max_tokens.
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
                # On the first rows reward functions are tried.
                for picture in read if index < ROWS_TRIED else ():
                    picture.load()
            except DataError as error:
                raise DataError(f"{name} row {index}: {error}") from error
        return dataset

    def check_engine(self, engine: Any, rewards: Sequence[Any]) -> Any:
        """The engine, where it and the reward functions take what the rows have.

        Raises:
            ConfigError: The rows have images, and the engine samples from text alone, or a reward model or judge reads text
                alone.
        """
        judges = [
            one
            for one in rewards
            if isinstance(one, ModelReward) or (isinstance(one, JudgeReward) and not one.judge.vision)
        ]
        blind = [type(one).__name__ for one in judges]
        if self.images and blind:
            raise ConfigError(
                f"the rows have images, and {', '.join(blind)} reads text alone: it would score answers to pictures that it "
                "never saw. Fix: a judge with vision=True, or a reward function, which gets the images in the columns it names."
            )
        if self.images and not engine.capabilities.pictures:
            raise ConfigError(
                f"the rows have images, and the engine {engine.name!r} samples from text alone. Fix: rollout_engine='auto', "
                "which chooses an engine that takes images; of servers 'posttrain serve', or 'posttrain vllm-serve' of a vLLM "
                "that knows --enable-scale-out."
            )
        return engine

    def sampling(self, settings: Sampling, model: nn.Module) -> Sampling:
        """Sampling settings under which no placeholder and no marker of an image is drawn."""
        assert self.reader is not None
        vocabulary = model.config.get_text_config().vocab_size
        never = tuple((token, -math.inf) for token in self.reader.never(vocabulary))
        return replace(settings, logit_bias=(*settings.logit_bias, *never))

    def look_at(
        self, rollouts: Sequence[Rollout], examples: Sequence[Mapping[str, Any]], model: nn.Module, pad_token_id: int
    ) -> tuple[list[Rollout], set[int], dict[str, Metric]]:
        """Replace placeholders that an engine drew all the same by padding; return rollouts, those changed, and what to log.

        Logged: images a row and their tokens, pictures encoded and reused since the last call, seconds of that, and
        completions masked.

        Raises:
            ModelError: PT-G015: a rollout's pictures are not those of its row; one row of 64 is compared.
        """
        assert self.reader is not None
        for i in range(0, len(rollouts), ROLLOUTS_A_COMPARISON):
            pictures = conversation_of(examples[i])[1]
            wanted = [self.reader.fitted(read_picture(one, "column 'images' of a prompt")).digest for one in pictures]
            if wanted != [one.picture.digest for one in rollouts[i].pictures]:
                raise ModelError(
                    f"PT-G015: rollout {i} was sampled under the pictures {[p.picture.digest[:8] for p in rollouts[i].pictures]} "
                    f"and its row has {[one[:8] for one in wanted]}. Fix: leave the order of prompts as it is in sample()."
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

    def control(
        self, examples: list[dict[str, Any]], size: int, roll_out: Callable[..., Any], score: Callable[..., Any]
    ) -> dict[str, Metric]:
        """Where ``check_image_use`` is set: the reward of completions that were sampled under other rows' images.

        Args:
            examples: Groups of ``size`` consecutive.
            size: Rows of one prompt.
            roll_out: Examples and a mode to rollouts and completions.
            score: A rollout batch to rewards of all ranks.
        """
        if not self.images or not self.args.check_image_use:
            return {}
        rollouts, completions = roll_out(exchanged(examples, size), "eval")
        table = score(RolloutBatch(self.opened(examples), rollouts, completions))
        totals = weighted_total(table.values, table.weights)
        return {"images/exchanged_reward": mean(totals, ~totals.isnan())}

    def prepare(self, model: nn.Module, peft_config: PeftConfig | None) -> Any:
        """Let the model's passes hold pictures, freeze what is not trained, and keep a new adapter to the text model.

        Args:
            model: As it was loaded, before any adapter.
            peft_config: Of a new adapter, or None.

        Returns:
            The adapter's config, with module paths in place of names that would reach the tower.
        """
        if not self.takes or not has_tower(model):
            return peft_config
        inner: Any = causal_lm(model)
        if self.images:
            install_pictures(inner, self.processor, cache_bytes=int(self.args.image_cache_gb * 2**30))
        choice = self.args.freeze_vision
        peft_config = adapter_of_text(inner, peft_config, choice)
        frozen, tower = frozen_parameters(inner, choice, images=self.images), tower_parameters(inner)
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        count = lambda kept: sum(p.numel() for p in kept) / 1e6  # noqa: E731
        logger.info(
            "vision: %.2f of %.2f M parameters are frozen; text: %.2f M.",
            count(frozen.values()), count(tower.values()), count(inner.parameters()) - count(tower.values()),
        )  # fmt: skip
        return peft_config

    def show(self, model: str | nn.Module, processor: ProcessorMixin | None = None) -> bool:
        """Let another model (a teacher, a reference) see the run's pictures, each prepared as its own processor does.

        Args:
            model: Reads the policy's ids.
            processor: Its own; None: that of the folder or id it was loaded from, else the policy's.

        Returns:
            Whether it takes the pixels of the policy.

        Raises:
            ConfigError: A picture has other tokens by its processor.
        """
        assert self.reader is not None
        path, own = get_config_model_id(causal_lm(model).config), processor
        if own is None and path:
            try:
                own = load_processor(path)
            except ModelError as error:
                logger.warning(
                    "%s: its processor is not known, and images are prepared as the policy's: %s", path, error
                )
        alike = not is_processor(own) or _alike(self.reader, PictureProcessor(own))
        cache = int(self.args.image_cache_gb * 2**30)
        install_pictures(model, self.processor if alike else own, cache_bytes=cache)
        return alike

    def check_shards(self, model: nn.Module, accelerator: Accelerator) -> None:
        """Refuse a model with pictures that cannot be sharded on processes of which some have none; DDP has no idle parameters.

        DDP waits for a gradient of each trained parameter. Those of the tower that no loss reaches have none in one process
        either, so nothing changes where they are frozen.
        """
        encoder, inner = picture_encoder(model), causal_lm(model)
        if encoder is not None:
            refuse_skipped_layers(model, accelerator)
        if accelerator.num_processes == 1 or shards_parameters(accelerator) or not has_tower(model):
            return
        tower = {name: one for name, one in tower_parameters(inner).items() if one.requires_grad}
        idle = encoder.unreached(inner) if encoder is not None else set(tower)
        for name in idle:
            tower[name].requires_grad_(False)
        if idle:
            logger.info(
                "vision: %d parameters that no loss reaches are not trained: DDP would wait for them.", len(idle)
            )

    def save(self, folder: str) -> None:
        """Save the processor beside the model; its tokenizer is saved anyway."""
        if not self.args.should_save:
            return
        if self.processor is not None:
            self.processor.save_pretrained(folder)
        for path in filter(None, self._settings):
            if Path(path).parent.resolve() != Path(folder).resolve():
                shutil.copy(path, folder)


def _processor_of(processing_class: Tokenizer, model_id: str, *, images: bool) -> Any:
    if is_processor(processing_class):
        return processing_class
    if images and processing_class is not None:
        raise DataError(
            f"rows have images, and processing_class is {type(processing_class).__name__}, which reads text alone. They are in a "
            "column 'images' or 'image', or inside messages. Fix: processing_class=AutoProcessor.from_pretrained(the model)."
        )
    return load_processor(model_id) if images else None


def _alike(mine: PictureProcessor, theirs: PictureProcessor) -> bool:
    """Whether pictures of three sizes become the same tensors here and there.

    Raises:
        ConfigError: They stand for other tokens, so that two models could not read the same ids.
    """
    for picture in (shaded(LARGE), mine.shaded((112, 56)), mine.shaded((56, 112))):
        one, other = mine.expansion(picture), theirs.expansion(picture)
        if (one.count, one.grid) != (other.count, other.grid):
            raise ConfigError(
                f"two models are to read the same ids, and a picture of {picture.size} has {one.count} tokens (grid {one.grid}) "
                f"by the processor of one and {other.count} (grid {other.grid}) by that of the other. Fix: the same sizes in the "
                "settings of both processors, or GOLD with use_uld_loss=True."
            )
        first, second = mine.prepare(picture), theirs.prepare(picture)
        if first.keys() != second.keys() or not all(torch.equal(one, second[name]) for name, one in first.items()):
            return False
    return True
