"""Processors of vision-language models. They convert text with images to token ids and image positions, and images to
tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad

from posttrain.errors import DataError, ModelError
from posttrain.extensions.images.picture import (
    Background,
    Picture,
    Placed,
    conversation_pictures,
    observed_blocks,
    shaded,
)

if TYPE_CHECKING:
    from transformers import ProcessorMixin


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family of models. All models of a family use the same processor class.

    Attributes:
        models: Model types, as in the configs of these models. If empty, the types are unknown, and the model is tested
            with images before training.
        tiled: Whether the tensors of an image have the shape ``(1, tiles, ...)``. The tensors of several images are then
            concatenated along the tiles, otherwise along the first dimension.
        positions: ``grid`` for three-dimensional rotary positions (time, height, width), ``plain`` for one-dimensional
            positions.
        types: Name of the forward method's argument for token types. A token type is 1 for image placeholders, else 0. In
            PaliGemma, it is 1 for tokens after the prompt. None: the model has no such argument.
        block: Tokens that attend to each other in both directions. ``image``: the placeholders of one image. ``prompt``:
            all tokens of a prompt. ``none``: no tokens.
        cross: Whether text attends to image features by cross-attention, with one placeholder per image. Text before the
            first image then attends to all images of its row, so each prefix tree needs its own pass.
        whole: Whether the forward method receives the processor's tensors of all images instead of image features. Each
            sequence is then a padded row, and its images are encoded in the same pass.
    """

    models: tuple[str, ...]
    tiled: bool = False
    positions: Literal["plain", "grid"] = "plain"
    types: str | None = None
    block: Literal["none", "image", "prompt"] = "none"
    cross: bool = False
    whole: bool = False

    @property
    def several_turns(self) -> bool:
        """Whether the computation of earlier turns stays unchanged when a later turn adds images."""
        return self.block != "prompt" and not self.cross


# First version of transformers in which processors return the placeholders of every image.
OLDEST = Version("5.15")
KINDS = "mm_token_type_ids"
# Model families by the class of their processor. Tests with tiny models of each family compare log-probs and gradients of a
# prefix tree with those of separate sequences.
FAMILIES = {
    "Qwen2VLProcessor": Family(("qwen2_vl",), positions="grid", types=KINDS),
    "Qwen2_5_VLProcessor": Family(("qwen2_5_vl",), positions="grid", types=KINDS),
    "Qwen3VLProcessor": Family(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), positions="grid", types=KINDS),
    "Idefics3Processor": Family(("idefics3",), tiled=True),
    "SmolVLMProcessor": Family(("smolvlm",), tiled=True),
    "LlavaProcessor": Family(("llava",)),
    "LlavaNextProcessor": Family(("llava_next",)),
    "Gemma3Processor": Family(("gemma3",), types="token_type_ids", block="image"),
    "PaliGemmaProcessor": Family(("paligemma",), types="token_type_ids", block="prompt"),
    "InternVLProcessor": Family(("internvl",)),
    "MllamaProcessor": Family(("mllama",), tiled=True, cross=True),
}
# Matches special tokens for images and for image markers. If a user's text contained such a token, the model's input would
# change.
CONTROL = re.compile(r"image|img|vision|video|<row_\d", re.IGNORECASE)
GRID, PARTS, PARTS_ASKED = "image_grid_thw", "text_replacement_offsets", "return_text_replacement_offsets"
# Keys of a processor's output that belong to the text or to the loss, and not to the images.
TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", KINDS, "labels", PARTS, "cross_attention_mask"}
TEXT_KEYS |= {"num_crops", "num_patches", "num_tiles", "rows", "cols"}
# Size (width, height) of a test image. The size is so large that processors with tiles split it. It is a multiple of the
# patch size, because some processors do not resize images.
LARGE = (1568, 1120)
REMEMBERED = 4096  # Maximum number of image sizes whose placeholder expansion is cached.


@dataclass(frozen=True, slots=True)
class Expansion:
    """Text that a processor writes for an image of one size, with the fields ``count`` and ``grid`` of `Placed`."""

    text: str = field(repr=False)
    count: int
    grid: tuple[int, int, int] | None


def _marker() -> Any:
    """Return transformers' function that marks control tokens in user text. Return None if the installed version lacks
    this function. Control tokens in user text are then an error.
    """
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "mark_control_tokens", None)


class PictureProcessor:
    """Wraps a processor of `transformers` for training. It converts one segment of text at a time and one image at a time.

    Each image is prepared separately, so the result does not depend on other rows of the pass.

    Args:
        processor: Processor with a tokenizer and an image processor.
        most: Maximum number of placeholders per image. None: no limit.
        pixels: Maximum number of pixels per image. None: no limit.
        resize: Whether `fitted` resizes an image that exceeds a limit, instead of raising an error.
        per_row: Maximum number of images per prompt or episode. None: no limit.
        background: Color behind transparent pixels.

    Raises:
        ModelError: The installed transformers is too old for images, or the processor's family is unknown and cannot be
            inferred from its output.

    Attributes:
        family: See `Family`.
        token_id: Token id of the placeholder whose embedding is replaced with image features.
        resized: Number of prompt images that have been resized.
        sanitized: Number of strings in user text that look like a placeholder or marker and were kept as text.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        *,
        most: int | None = None,
        pixels: int | None = None,
        resize: bool = False,
        per_row: int | None = None,
        background: Background = "white",
    ) -> None:
        from transformers import __version__ as installed

        if Version(installed) < OLDEST:
            raise ModelError(
                f"images need transformers>={OLDEST}, but {installed} is installed, whose processors do not "
                "return the placeholders of an image. Fix: pip install -U transformers."
            )
        self.most, self.pixels, self.resize, self.per_row, self.background = most, pixels, resize, per_row, background
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", None)
        self._expansions: dict[tuple[int, int], Expansion] = {}
        self._sizes: dict[Any, tuple[int, int]] = {}
        self.resized = self.sanitized = 0
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        family = family_of(processor)
        self.family, self.token_id = self._guessed() if family is None else (family, int(processor.image_token_ids[0]))

    def __getstate__(self) -> dict[str, Any]:
        # Exclude caches, because the fingerprint of a dataset is computed from the pickled state.
        return {
            **{k: v for k, v in vars(self).items() if k not in ("controls", "escapes", "_alone", "_mark")},
            "_expansions": {},
            "_sizes": {},
            "resized": 0,
            "sanitized": 0,
        }

    @functools.cached_property
    def controls(self) -> dict[str, int]:
        """Mapping from the placeholders and markers of images to their token ids. These ids are never sampled and do not
        contribute to the loss. User text must not contain them.
        """
        added = self.tokenizer.added_tokens_decoder
        named = {token.content: index for index, token in added.items() if CONTROL.search(token.content)}
        return {**named, self.placeholder: int(self.tokenizer.convert_tokens_to_ids(self.placeholder))}

    def check_turns(self) -> None:
        """Raise an error if a later turn would change earlier turns.

        Raises:
            ModelError: The model's attention is bidirectional within prompts, or text attends to images by
                cross-attention.
        """
        if not self.family.several_turns:
            raise ModelError(
                f"{type(self.processor).__name__}: this model uses bidirectional attention within prompts or "
                "towards images, so the text of a turn would be computed differently in the next turn. Fix: use "
                "prompts of one turn, or a model of another family."
            )

    def observed(self, output: object, where: str) -> list[dict[str, Any]]:
        """Convert the output of a tool or an environment to content blocks. See `observed_blocks`."""
        return observed_blocks(output, where, self.background)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], ids_of: Callable[[str], list[int]], **options: Any
    ) -> tuple[str, list[int], list[Picture]]:
        """Render messages that contain their images. Return the text, its token ids and the images.

        Args:
            messages: Messages of a conversation.
            ids_of: Function that converts the rendered text to token ids.
            options: Arguments of the chat template.
        """
        blocks, shown = conversation_pictures(messages)
        text, pictures = self.render(blocks, **options), [self.fitted(picture) for picture in shown]
        return text, self.encode(text, pictures, ids_of=ids_of)[0], pictures

    def never(self, vocabulary: int) -> list[int]:
        """Return the ids below ``vocabulary`` that must not be sampled: the ids of placeholders and markers of images."""
        return sorted(token for token in {*self.controls.values(), self.token_id} if token < vocabulary)

    # Text to ids -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def escapes(self) -> bool:
        """Whether placeholders and markers in user text can be kept as text. The result is determined with a test
        conversation that contains all placeholders and markers.
        """
        if _marker() is None:
            return False
        picture, typed = self.shaded((56, 56)), " ".join(self.controls)
        try:
            plain, hostile = (
                self.encode(self._template([{"role": "user", "content": [{"type": "image"}, block]}]), [picture])[0]
                for block in ({"type": "text", "text": "a b"}, {"type": "text", "text": f"a {typed} b"})
            )
        except (DataError, TypeError, ValueError):
            return False
        same = all(plain.count(token) == hostile.count(token) for token in {*self.controls.values(), self.token_id})
        return same and typed in self.tokenizer.decode(hostile)

    def _template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Mark the `controls` in user text, then apply the chat template to the messages."""
        if (mark := _marker()) is not None:
            words = re.compile("|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))))
            messages = [{**message, "content": mark(message.get("content"), words)} for message in messages]
        return self.processor.apply_chat_template(_as_blocks(messages), tokenize=False, **options)

    @functools.cached_property
    def _mark(self) -> str:
        """Marker that `transformers` puts before a user's string to keep it as text. If the installed version has no such
        marker, the value is a string that never occurs.
        """
        mark = _marker()
        return "\0" if mark is None else mark("x", re.compile("x"))[0]

    def escaped(self, text: str) -> int:
        """Return how many strings in a rendered text look like a placeholder or marker but are kept as text."""
        return text.count(self._mark)

    def places(self, text: str) -> int:
        """Return the number of placeholders in a text. Placeholders that a user typed are not counted."""
        return text.count(self.placeholder) - text.count(self._mark + self.placeholder)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Apply the processor's chat template to messages with empty image blocks.

        If `escapes` is True, placeholders and markers in user text are kept as text. `escaped` counts them.

        Raises:
            DataError: User text contains a placeholder or marker that cannot be kept as text, or the template omits image
                blocks.
        """
        self.refuse_controls(messages)
        text = self._template(messages, **options)
        wanted = sum(
            b.get("type") == "image" for m in messages if isinstance(m.get("content"), list) for b in m["content"]
        )
        if self.places(text) != wanted:
            raise DataError(
                f"PT-G013: the chat template wrote {self.places(text)} placeholders for {wanted} image blocks (roles "
                f"{[m.get('role') for m in messages]}). Fix: use a template that renders image blocks of these roles."
            )
        return text

    def refuse_controls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error for user text that contains a placeholder or marker. Do nothing if `escapes` is True, because such
        text is then kept as text.

        Raises:
            DataError: PT-G008. The message contains the role and the string.
        """
        if self.escapes:
            return
        for message in messages:
            content = message.get("content")
            blocks = content if isinstance(content, list) else [{"text": content or ""}]
            for text in (block.get("text", "") for block in blocks):
                typed = next((word for word in self.controls if word in text), None) if "<" in text else None
                if typed is not None:
                    raise DataError(
                        f"PT-G008: a {message.get('role')} message contains the text {typed!r}, which stands for images. "
                        "Fix: pass images as blocks of type 'image', or remove this row."
                    )

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture] = (),
        *,
        prompt: bool = False,
        ids_of: Callable[[str], list[int]] | None = None,
    ) -> tuple[list[int], list[Placed]]:
        """Convert text to token ids, in which every placeholder is expanded. Return the token ids and the positions of the
        images.

        Args:
            text: Text with one placeholder per image.
            pictures: Images in reading order.
            prompt: Whether the text is a whole prompt. In PaliGemma, a prompt has a bos token after its images and a line
                break at its end.
            ids_of: Function that converts text to ids. None: the method `ids`.

        Raises:
            DataError: The number of placeholders differs from the number of images, or two images have no token between them.
        """
        if self.places(text) != len(pictures):
            raise DataError(
                f"PT-G002: the text has {self.places(text)} placeholders {self.placeholder!r}, but there are {len(pictures)} "
                "images. Fix: use one placeholder per image."
            )
        if prompt and self.family.block == "prompt":
            # Find the end of the last image's placeholder. Placeholders that a user typed are marked, so the pattern
            # excludes them.
            shown = [match.end() for match in re.finditer(f"(?<!{self._mark}){re.escape(self.placeholder)}", text)]
            end = shown[-1] if pictures else 0
            text = f"{text[:end]}{self.tokenizer.bos_token}{text[end:]}\n"
        if pictures:
            (text,), _ = self.processor.get_text_with_replacements([text], [self.expansion(p).text for p in pictures])
        ids = self.ids(text) if ids_of is None else ids_of(text)
        return ids, self.place(ids, pictures)

    def ids(self, text: str) -> list[int]:
        """Convert a rendered text to token ids, without adding special tokens. Marked strings are kept as text."""
        if self._mark in text:
            from transformers.utils.chat_template_utils import encode_marked_chat

            return encode_marked_chat(self.tokenizer, text)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def collapsed(self, ids: Sequence[int], placed: Sequence[Placed]) -> list[int]:
        """Return the token ids of `encode` with one placeholder per image. Engines that expand placeholders themselves need
        this form.
        """
        collapsed_ids: list[int] = []
        at, single = 0, int(self.tokenizer.convert_tokens_to_ids(self.placeholder))
        for image in placed:
            whole = self.tokenizer(self.expansion(image.picture).text, add_special_tokens=False)["input_ids"]
            begin = image.start - whole.index(self.token_id)
            collapsed_ids += [*ids[at:begin], single]
            at = begin + len(whole)
        return [*collapsed_ids, *ids[at:]]

    def place(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[Placed]:
        """Return the positions of images in token ids that contain all placeholders of these images.

        Raises:
            DataError: The number of placeholders differs from the number that the images need.
        """
        at = [i for i, token in enumerate(ids) if token == self.token_id]
        expansions = [self.expansion(picture) for picture in pictures]
        if len(at) != sum(expansion.count for expansion in expansions):
            raise DataError(
                f"PT-G011: the token ids contain {len(at)} image placeholders, but the {len(pictures)} images have "
                f"{[expansion.count for expansion in expansions]}. Fix: use a larger max_length, or smaller images."
            )
        placed, first = [], 0
        # In these families, adjacent placeholders are treated as one image, because of rotary positions or attention.
        runs = self.family.positions == "grid" or (self.family.block == "image" and self.family.models)
        for picture, expansion in zip(pictures, expansions, strict=True):
            if runs and first and at[first] == at[first - 1] + 1:
                raise DataError(
                    "two images follow each other without a token between them. Fix: put text between them."
                )
            placed.append(Placed(picture, at[first], expansion.count, expansion.grid))
            first += expansion.count
        return placed

    def place_all(self, segments: Sequence[Sequence[int]], pictures: list[Picture]) -> list[list[Placed]]:
        """Assign images to the prompt and the completions that contain their placeholders. Images are in reading order.

        Args:
            segments: Token ids of the prompt and of each completion.
            pictures: List of images. Assigned images are removed from the front of the list. Images of later rows
                stay in the list.

        Raises:
            DataError: A segment has another number of placeholders than its images need. See `place`.
        """
        placed = []
        for ids in segments:
            wanted, mine = list(ids).count(self.token_id), []
            while pictures and sum(self.expansion(image).count for image in mine) < wanted:
                mine.append(pictures.pop(0))
            placed.append(self.place(ids, mine))
        return placed

    def begun(self, text: str) -> str:
        """Add the bos token before a text if the tokenizer adds one. In families with bidirectional prompts, `encode` adds
        the bos token after the images instead.
        """
        bos, first = self.tokenizer.bos_token, self.tokenizer("")["input_ids"][:1]
        adds = first == [self.tokenizer.bos_token_id] and self.family.block != "prompt"
        return bos + text if adds and not text.startswith(bos) else text

    def expansion(self, picture: Picture) -> Expansion:
        """Return the text that the processor writes for an image. The text depends only on the size of the image."""
        if picture.size not in self._expansions:
            if len(self._expansions) >= REMEMBERED:
                self._expansions.clear()
            self._expansions[picture.size] = self._expand(picture)
        return self._expansions[picture.size]

    def fitted(self, picture: Picture, most: int | None = None) -> Picture:
        """Return the image, or a smaller copy with at most ``most`` placeholders and ``pixels`` pixels.

        Args:
            picture: Image from the dataset.
            most: Maximum number of placeholders. None: the limit of the run.

        Raises:
            DataError: PT-G001: The image exceeds a limit and ``resize`` is False. The error is also raised if no smaller
                size has fewer placeholders, because some processors write the same number for every image.
        """
        most = self.most if most is None else min(most, self.most or most)
        if self._fits(picture, most):
            return picture
        count, area = self.expansion(picture).count, math.prod(picture.size)
        about = (
            f"PT-G001: {picture.where}: an image of {picture.size[0]}×{picture.size[1]} has {count} placeholders and "
            f"{area} pixels, but image_max_tokens={most}, image_max_pixels={self.pixels}. Fix: "
        )
        if not self.resize:
            raise DataError(f"{about}set image_fit='resize' or a larger limit, or remove this row.")
        key = picture.size, most
        if key not in self._sizes:
            scale = min(1.0, *(limit / have for limit, have in ((most, count), (self.pixels, area)) if limit)) ** 0.5
            smaller, smallest = picture, 1 / max(min(picture.size), 1)
            while not self._fits(smaller, most) and scale > smallest:
                smaller = picture.resized(tuple(max(1, int(side * scale)) for side in picture.size))
                scale *= 0.9
            if not self._fits(smaller, most):
                raise DataError(f"{about}set a larger limit. This processor has no size with so few placeholders.")
            self._sizes[key] = smaller.size
        return picture.resized(self._sizes[key])

    def _fits(self, picture: Picture, most: int | None) -> bool:
        if self.pixels is not None and math.prod(picture.size) > self.pixels:
            return False
        return most is None or self.expansion(picture).count <= most

    def _expand(self, picture: Picture) -> Expansion:
        if self.family.cross:
            return Expansion(self.placeholder, 1, None)
        output = self._read([[shaded(picture.size).load()]], picture.where)
        count = int((torch.as_tensor(output["input_ids"]) == self.token_id).sum())
        text, grid = output[PARTS][0][0]["replacement"], None
        if self.family.positions == "grid":
            merge = int(self.processor.image_processor.merge_size)
            t, h, w = output[GRID][0].tolist()
            grid = (t, h // merge, w // merge)
        return Expansion(text, count, grid)

    # Pixels ------------------------------------------------------------------------------------------------------

    def prepare(self, picture: Picture) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for one image: decoded, resized, split into patches and normalized.

        Raises:
            DataError: The image cannot be read, or the image processor rejects it.
        """
        return _pixels(self._read([[picture.load()]], picture.where, alone=self._alone))

    @functools.cached_property
    def _alone(self) -> bool:
        """Whether the image processor alone, without the text part, gives the same result for a large image. The image
        processor alone takes a third of the time.
        """
        if self.family.cross or not self.family.models:
            return self.family.cross
        rows = [[shaded(LARGE).load()]]
        return _equal(_pixels(self._read(rows)), _pixels(self._read(rows, alone=True)))

    def _read(self, rows: Sequence[Sequence[Any]], where: str = "", *, alone: bool = False) -> dict[str, Any]:
        """Run the processor on the PIL images of each row, with a text that consists of their placeholders.

        Args:
            rows: Images of each row.
            where: Position of an image in the dataset, for errors.
            alone: Whether only the image processor is run, without text.
        """
        texts = [" ".join([self.placeholder] * len(row)) for row in rows]
        options = {PARTS_ASKED: True, "add_special_tokens": False, "padding": len(rows) > 1, "return_tensors": "pt"}
        try:
            if alone:
                return dict(self.processor.image_processor(rows if self.family.tiled else rows[0], return_tensors="pt"))
            return dict(self.processor(text=texts, images=[list(row) for row in rows], **options))
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            shapes = ", ".join(f"{image.size[0]}×{image.size[1]}" for row in rows for image in row)
            raise DataError(
                f"{where}: the processor rejects an image of {shapes}: {error}. Fix: use another size, or remove "
                "this row."
            ) from error

    def shaded(self, size: tuple[int, int], *, turned: bool = False) -> Picture:
        """Create a test image for this processor. If the processor does not resize images, the size is multiplied so that
        the image consists of whole patches.
        """
        factor = 1 if getattr(getattr(self.processor, "image_processor", None), "do_resize", True) else 8
        return shaded((factor * size[0], factor * size[1]), turned=turned)

    def join(self, prepared: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Concatenate the tensors of several images for the vision tower, in the given order."""
        return _joined(prepared, tiled=self.family.tiled)

    def shapes(self, pictures: Sequence[Picture], copies: int) -> dict[str, Tensor]:
        """Return the joined tensors of images that are repeated ``copies`` times. Floating-point tensors are on the meta
        device.
        """
        joined = self.join([self.prepare(picture) for picture in pictures] * copies)
        return {name: tensor.to("meta") if tensor.is_floating_point() else tensor for name, tensor in joined.items()}

    def plain_inputs(
        self, ids: Tensor, rows: Sequence[Sequence[Picture]], prompt: int | Tensor = 0
    ) -> dict[str, Tensor]:
        """Return the processor's tensors for all images of a pass. Other libraries pass these tensors to the model in the
        same form.

        Args:
            ids: Token ids, ``(B, T)``.
            rows: Images of each row, in reading order.
            prompt: Number of prompt tokens: one number for all rows, or a tensor ``(B, 1)``.
        """
        inputs = _pixels(self._read([[picture.load() for picture in row] for row in rows])) if any(rows) else {}
        if inputs and self.family.cross:
            masks = [self.cross_mask(*pair) for pair in zip(ids[:, None], inputs["aspect_ratio_mask"], strict=True)]
            inputs["cross_attention_mask"] = torch.cat(masks)
        return inputs | self.token_types(ids, prompt)

    def _guessed(self) -> tuple[Family, int]:
        """Infer the family of an unknown processor from its output. `install_pictures` tests the result with the model.

        Raises:
            ModelError: The output does not contain the placeholders of an image, or the tensors of images depend on whether
                the images are prepared together or separately.
        """
        images = [shaded(size).load() for size in (LARGE, (112, 56), (56, 112))]
        try:
            first, *_ = apart = [self._read([[image]]) for image in images]
            # Prepare the images in one row and in separate rows, because some processors also return the number of images
            # in each row.
            together = [self._read([images]), self._read([[image] for image in images])]
            if [len(row) for row in together[0][PARTS]] != [len(images)]:
                raise ValueError("it does not write one string per image")
            ids, token = first["input_ids"][0].tolist(), int(self.processor.image_token_ids[0])
            # If the ids do not contain the image token, use the most frequent id. The processor may write other tokens for
            # an image, including markers for tile rows and for the end of the image.
            token = token if token in ids else Counter(ids).most_common(1)[0][0]
            types = next((name for name in (KINDS, "token_type_ids") if name in first and first[name].any()), None)
            grid = GRID in first and hasattr(self.processor.image_processor, "merge_size")
            for tiled in (False, True):
                joined = _joined([_pixels(output) for output in apart], tiled=tiled)
                if any(_equal(joined, _pixels(output)) for output in together):
                    return Family((), tiled=tiled, positions="grid" if grid else "plain", types=types), token
            reason = f"its {', '.join(_pixels(first))} differ between images prepared together and images prepared separately"
        # Any exception means that the family cannot be inferred. Its message is the reason that the error reports.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{type(self.processor).__name__} is not one of the supported families ({', '.join(FAMILIES)}), and its handling "
            f"of images cannot be inferred: {reason:.300}. Fix: use a model of one of these families, or remove images."
        )

    def token_types(self, ids: Tensor, prompt: int | Tensor) -> dict[str, Tensor]:
        """Return the argument for token types of the ids ``(B, T)``, if the family has it. The first ``prompt`` ids are the
        prompt.
        """
        kinds = (ids == self.token_id).long()
        if self.family.block == "prompt":
            kinds = (torch.arange(ids.shape[1], device=ids.device) >= prompt).long().expand_as(ids)
        return {self.family.types: kinds} if self.family.types else {}

    def cross_mask(self, ids: Tensor, tiles: Tensor) -> Tensor:
        """Return a mask ``(1, T, N, tiles)`` of the image tiles to which each token attends. A token attends to the tiles
        of the last image before it. If this image directly follows other images, the token attends to their tiles too.

        Args:
            ids: Token ids ``(1, T)`` with N placeholders.
            tiles: Mask ``(N, tiles)``. It is 1 where an image has a tile.
        """
        from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

        mask = tiles.new_zeros(1, ids.shape[1], *tiles.shape)
        for k, (start, end) in enumerate(get_cross_attention_token_mask(ids[0].tolist(), self.token_id)):
            mask[0, start : ids.shape[1] if end == -1 else end, k] = tiles[k]
        return mask


def _pixels(output: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the part of a processor's output that the vision tower reads."""
    return {name: value for name, value in output.items() if name not in TEXT_KEYS}


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _joined(prepared: Sequence[Mapping[str, Tensor]], *, tiled: bool) -> dict[str, Tensor]:
    """Concatenate the tensors of several images by name, along tiles or images. All other dimensions are padded with zeros."""
    joined, along = {}, int(tiled)
    for name, first in prepared[0].items():
        parts = [tensors[name] for tensors in prepared]
        axes = range(along + 1, first.dim())
        most = [max(part.shape[axis] for part in parts) for axis in axes]
        for i, part in enumerate(parts):
            behind = [(0, n - part.shape[axis]) for n, axis in zip(most, axes, strict=True)]
            parts[i] = pad(part, [side for pair in reversed(behind) for side in pair])
        joined[name] = torch.cat(parts, min(along, first.dim() - 1))
    return joined


def family_of(processor: ProcessorMixin) -> Family | None:
    """Return the family of a processor. Return None if the family is unknown or the argument is a tokenizer."""
    return next((FAMILIES[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in FAMILIES), None)


def _as_blocks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert text content to text blocks, because chat templates of processors do not accept strings."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else dict(m)
        for m in messages
    ]


@functools.cache
def image_only(kind: type) -> type:
    """Return a processor class without a video processor. `transformers` cannot create a video processor without
    torchvision.
    """
    base: Any = kind
    names = inspect.signature(base.__init__).parameters
    parameters = [parameter for name, parameter in names.items() if name != "video_processor"]

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, video_processor=None, **kwargs)
        self.video_processor = SimpleNamespace(num_frames=1, fps=1, size=None, merge_size=1)

    def accepted(processor_config: dict[str, Any], valid_kwargs: Any) -> tuple[dict, dict]:
        # Pass the argument names explicitly. `transformers` would read them from ``build``, whose parameters have no names.
        return base.validate_init_kwargs(processor_config, [parameter.name for parameter in parameters[1:]])

    vars(build)["__signature__"] = inspect.Signature(parameters)
    # Pickle an object through its original class, because worker processes cannot import this class.
    methods = {"__init__": build, "validate_init_kwargs": staticmethod(accepted)}
    methods["__reduce__"] = lambda self: (_image_only_again, (kind,), vars(self))
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _image_only_again(kind: type) -> Any:
    return object.__new__(image_only(kind))


def load_processor(model_id: str, **options: Any) -> Any:
    """Load the processor of a model. If torchvision is not installed, the processor has no video part.

    Args:
        model_id: Hub id or folder of the model.
        options: Keyword arguments of ``from_pretrained``.

    Raises:
        ModelError: The processor cannot be loaded, neither with nor without its video part. The message contains both
            error messages.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        return transformers.AutoProcessor.from_pretrained(model_id, **options)
    except (AttributeError, ImportError, OSError, ValueError) as error:
        first = f"{type(error).__name__}: {error}"
    try:
        config = transformers.AutoConfig.from_pretrained(model_id, **options)
        kind = getattr(transformers, PROCESSOR_MAPPING_NAMES[config.model_type])
        return image_only(kind).from_pretrained(model_id, **options)
    # Constructors raise exceptions of many types, so catch all. The message contains both reasons.
    except Exception as error:
        raise ModelError(
            f"no processor of {model_id!r} can be loaded ({first:.300}). Loading it without its video processor failed too "
            f"({type(error).__name__}: {error}). Fix: install the package that the error names, or pass "
            "processing_class=processor."
        ) from error
