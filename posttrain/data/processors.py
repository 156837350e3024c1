"""Processors of vision-language models: text with pictures to ids and places, one picture to its tensors."""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.data.pictures import Background, Picture, conversation_pictures, read_picture
from posttrain.errors import DataError, ModelError
from posttrain.integrations import require

__all__ = [
    "FAMILIES",
    "Family",
    "PictureProcessor",
    "Placed",
    "family_of",
    "image_only",
    "is_processor",
    "load_processor",
]


@dataclass(frozen=True, slots=True)
class Family:
    """What is particular about the models of a processor.

    Attributes:
        models: Model types of their configs; empty: not known, and proven with pictures before it trains.
        tiled: Whether a picture's tensors are ``(1, tiles, ...)``, joined along tiles; else along pictures.
        positions: ``grid`` for rotary positions of three rows (time, height, width); else one.
        types: What the forward calls the kinds of tokens: 1 for a placeholder (PaliGemma: behind the prompt); None: nothing.
        block: What attends both ways: the placeholders of one ``image``, the whole ``prompt``, or nothing.
        cross: Whether text attends to features beside it instead of reading them in the place of placeholders. Text before the
            first picture then attends to all pictures of its row, so every tree is a pass of its own.
        whole: Whether the model gets its processor's own tensors of all pictures of a pass instead of features; each sequence is
            a padded row, and its pictures are encoded with it.
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
        """Whether what was read in earlier turns stays as it was when a later one brings pictures."""
        return self.block != "prompt" and not self.cross


KINDS = "mm_token_type_ids"
# Each proven with tiny models: log-probs and gradients of a tree equal those of its sequences alone.
FAMILIES = {
    "Qwen2VLProcessor": Family(("qwen2_vl",), positions="grid", types=KINDS),
    "Qwen2_5_VLProcessor": Family(("qwen2_5_vl",), positions="grid", types=KINDS),
    "Qwen3VLProcessor": Family(("qwen3_vl",), positions="grid", types=KINDS),
    "Idefics3Processor": Family(("idefics3",), tiled=True),
    "SmolVLMProcessor": Family(("smolvlm",), tiled=True),
    "LlavaProcessor": Family(("llava",)),
    "LlavaNextProcessor": Family(("llava_next",)),
    "Gemma3Processor": Family(("gemma3",), types="token_type_ids", block="image"),
    "PaliGemmaProcessor": Family(("paligemma",), types="token_type_ids", block="prompt"),
    "InternVLProcessor": Family(("internvl",)),
    "MllamaProcessor": Family(("mllama",), tiled=True, cross=True),
}
# Strings that stand for pictures or around them; a user who types one would change what the model sees.
CONTROL = re.compile(r"image|img|vision|video|<row_\d", re.IGNORECASE)
TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", KINDS, "labels", "text_replacement_offsets"}
GRID = "image_grid_thw"
COUNTS = {"num_crops", "num_patches", "num_tiles", "rows", "cols"}  # Of an image processor, for its processor's text.
LARGE = (1500, 1000)  # A picture that is cut into tiles where any is.
REMEMBERED = 4096  # Sizes whose expansion is kept.


@dataclass(frozen=True, slots=True)
class Placed:
    """A picture in a prompt or a completion.

    Attributes:
        picture: Which.
        start: Index of its first placeholder in the ids of its segment.
        count: Its placeholders, markers between them aside.
        grid: Patches by time, height and width after merging, for positions of three rows; None elsewhere.
    """

    picture: Picture
    start: int
    count: int
    grid: tuple[int, int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a path, or encoded bytes in base64."""
        picture = self.picture.encoded()
        data = base64.b64encode(picture.source).decode() if isinstance(picture.source, bytes) else None
        kept = {"path": None if data else picture.source, "background": picture.background, "where": picture.where}
        kept["size"] = picture.size
        return {"start": self.start, "count": self.count, "grid": self.grid, "data": data, **kept}

    @classmethod
    def of(
        cls, *, start: int, count: int, grid: Any, size: Any, data: str | None, path: str | None, **about: Any
    ) -> Placed:
        """Undo `to_dict`."""
        picture = read_picture(path if data is None else base64.b64decode(data), **about)
        return cls(picture.resized(tuple(size)), start, count, None if grid is None else tuple(grid))


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a processor writes for a picture of one size: its text, and the fields of `Placed`."""

    text: str = field(repr=False)
    count: int
    grid: tuple[int, int, int] | None


class PictureProcessor:
    """A processor of `transformers` as training needs it: segments of ids one at a time, pictures one at a time.

    A picture is never prepared with others, so that what a pass joins does not depend on which rows came together.

    Args:
        processor: With a tokenizer and an image processor.
        most: Placeholders a picture may have; None: any number.
        pixels: Pixels it may have; None: any number.
        resize: Whether `fitted` makes pictures smaller that have more.
        per_row: Pictures a prompt, or an episode, may have; None: any number.
        background: What shows through transparent pixels.

    Raises:
        ModelError: It belongs to no family that is known.

    Attributes:
        family: See `Family`.
        token_id: Of the placeholder that a feature replaces.
        settings: A digest of the image processor's settings: part of every key of prepared pictures.
        resized: Pictures of prompts that were made smaller so far.
        sanitized: Strings of users, in prompts so far, that name a placeholder and stayed text.
    """

    def __init__(
        self,
        processor: Any,
        *,
        most: int | None = None,
        pixels: int | None = None,
        resize: bool = False,
        per_row: int | None = None,
        background: Background = "white",
    ) -> None:
        self.most, self.pixels, self.resize, self.per_row, self.background = most, pixels, resize, per_row, background
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", None)
        self.family = family_of(processor) or _guessed(processor)
        self.placeholder: str = processor.image_token
        self.token_id = int(processor.image_token_ids[0])
        if not self.family.models:
            # It may read one string and write others, with rows and ends of a picture between them.
            found = self._call(require("PIL.Image", "reading images").new("RGB", (56, 56)), "a blank picture")[
                "input_ids"
            ][0].tolist()
            self.token_id = self.token_id if self.token_id in found else Counter(found).most_common(1)[0][0]
        state = f"{type(processor).__name__} {type(processor.image_processor).__name__} {processor.image_processor.to_json_string()}"
        self.settings = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
        self._expansions: dict[tuple[int, int], Expansion] = {}
        self._sizes: dict[Any, tuple[int, int]] = {}
        self.resized = self.sanitized = 0

    def __getstate__(self) -> dict[str, Any]:
        # What was remembered is no part of a dataset's fingerprint.
        return {
            **{k: v for k, v in vars(self).items() if k not in ("controls", "escapes", "_alone", "_mark")},
            "_expansions": {},
            "_sizes": {},
            "resized": 0,
            "sanitized": 0,
        }

    @functools.cached_property
    def controls(self) -> dict[str, int]:
        """Placeholders and markers with their ids: never sampled, never trained, never written by a user."""
        added = self.tokenizer.added_tokens_decoder
        named = {token.content: index for index, token in added.items() if CONTROL.search(token.content)}
        return {**named, self.placeholder: int(self.tokenizer.convert_tokens_to_ids(self.placeholder))}

    def never(self, vocabulary: int) -> list[int]:
        """Ids below ``vocabulary`` that no engine may draw: placeholders and markers of images."""
        return sorted(token for token in {*self.controls.values(), self.token_id} if token < vocabulary)

    # Text to ids -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def escapes(self) -> bool:
        """Whether a placeholder or a marker that a user typed can stay text; tried on one conversation with all of them."""
        from PIL import Image

        picture, typed = read_picture(Image.new("RGB", (56, 56), "gray")), " ".join(self.controls)
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
        """Text of messages, in which what a user typed of `controls` is marked."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        words = re.compile("|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))))
        contents = [mark_control_tokens(one.get("content"), words) for one in messages]
        marked = [{**one, "content": content} for one, content in zip(messages, contents, strict=True)]
        return self.processor.apply_chat_template(_as_blocks(marked), tokenize=False, **options)

    @functools.cached_property
    def _mark(self) -> str:
        """What `transformers` puts before a string of a user's that is to stay text."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        return mark_control_tokens("x", re.compile("x"))[0]

    def escaped(self, text: str) -> int:
        """How many strings of a rendered text stay text although they spell a placeholder or a marker."""
        return text.count(self._mark)

    def places(self, text: str) -> int:
        """Placeholders of a text, those that a user typed aside."""
        return text.count(self.placeholder) - text.count(self._mark + self.placeholder)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Text of messages whose image blocks are empty, by the processor's chat template.

        Placeholders and markers that a user typed stay text (`escaped` counts them), where this family's can.

        Raises:
            DataError: They cannot; or the template leaves out image blocks.
        """
        self.refuse_controls(messages)
        text = self._template(messages, **options)
        wanted = sum(
            b.get("type") == "image" for m in messages if isinstance(m.get("content"), list) for b in m["content"]
        )
        if self.places(text) != wanted:
            raise DataError(
                f"PT-G013: the chat template wrote {self.places(text)} placeholders for {wanted} image blocks (roles "
                f"{[m.get('role') for m in messages]}). Fix: a template that writes image blocks of these roles."
            )
        return text

    def refuse_controls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse text that spells a placeholder or a marker, unless it can stay text (`escapes`).

        Raises:
            DataError: PT-G008, with the role and the string.
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
                        f"PT-G008: a {message.get('role')} message holds the text {typed!r}, which stands for an image. Fix: "
                        "give images as blocks of type 'image', or leave this row out."
                    )

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture] = (),
        *,
        prompt: bool = False,
        ids_of: Callable[[str], list[int]] | None = None,
    ) -> tuple[list[int], list[Placed]]:
        """Ids of a text in which every placeholder is expanded, and where its pictures are.

        Args:
            text: With one placeholder a picture.
            pictures: In reading order.
            prompt: Whether it is the whole prompt, which PaliGemma ends in its own way.
            ids_of: Text to ids; None: `ids`.

        Raises:
            DataError: As many placeholders as there are not pictures, or two pictures without a token between them.
        """
        if self.places(text) != len(pictures):
            raise DataError(
                f"PT-G002: the text has {self.places(text)} placeholders {self.placeholder!r} and there are "
                f"{len(pictures)} images. Fix: one placeholder an image."
            )
        if prompt and self.family.block == "prompt":
            # Of the last image; one that a user typed is none.
            shown = [found.end() for found in re.finditer(f"(?<!{self._mark}){re.escape(self.placeholder)}", text)]
            end = shown[-1] if pictures else 0
            text = f"{text[:end]}{self.tokenizer.bos_token}{text[end:]}\n"
        if pictures:
            (text,), _ = self.processor.get_text_with_replacements([text], [self.expansion(p).text for p in pictures])
        ids = self.ids(text) if ids_of is None else ids_of(text)
        return ids, self.place(ids, pictures)

    def ids(self, text: str) -> list[int]:
        """Ids of a rendered text, without special tokens of the tokenizer's own; what was marked stays text."""
        if self._mark in text:
            from transformers.utils.chat_template_utils import encode_marked_chat

            return encode_marked_chat(self.tokenizer, text)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def collapsed(self, ids: Sequence[int], placed: Sequence[Placed]) -> list[int]:
        """Undo the expansion of `encode`: one placeholder a picture, for an engine that expands and prepares by itself."""
        made: list[int] = []
        at, single = 0, int(self.tokenizer.convert_tokens_to_ids(self.placeholder))
        for one in placed:
            whole = self.tokenizer(self.expansion(one.picture).text, add_special_tokens=False)["input_ids"]
            begin = one.start - whole.index(self.token_id)
            made += [*ids[at:begin], single]
            at = begin + len(whole)
        return [*made, *ids[at:]]

    def place(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[Placed]:
        """Where pictures are in ids that hold all of their placeholders.

        Raises:
            DataError: There are more or fewer placeholders than the pictures have.
        """
        at = [i for i, token in enumerate(ids) if token == self.token_id]
        expansions = [self.expansion(picture) for picture in pictures]
        if len(at) != sum(one.count for one in expansions):
            raise DataError(
                f"PT-G011: the ids hold {len(at)} image placeholders and the {len(pictures)} images have "
                f"{[one.count for one in expansions]}. Fix: a longer max_length, or smaller images."
            )
        placed, first = [], 0
        # Where a run of placeholders is taken for one image: by rotary positions, or by attention.
        runs = self.family.positions == "grid" or (self.family.block == "image" and self.family.models)
        for picture, one in zip(pictures, expansions, strict=True):
            if runs and first and at[first] == at[first - 1] + 1:
                raise DataError(
                    "two images follow each other without a token between them. Fix: put text between them."
                )
            placed.append(Placed(picture, at[first], one.count, one.grid))
            first += one.count
        return placed

    def place_all(self, segments: Sequence[Sequence[int]], pictures: list[Picture]) -> list[list[Placed]]:
        """Pictures of a prompt and its completions, in reading order, each in the segment that holds its placeholders.

        Args:
            segments: Ids of the prompt, and of each completion.
            pictures: Theirs are taken from the front; those of later rows stay.

        Raises:
            DataError: As in `place`.
        """
        placed = []
        for ids in segments:
            wanted, mine = list(ids).count(self.token_id), []
            while pictures and sum(self.expansion(one).count for one in mine) < wanted:
                mine.append(pictures.pop(0))
            placed.append(self.place(ids, mine))
        return placed

    def begun(self, text: str) -> str:
        """A plain text with the bos token before it, where the tokenizer adds one."""
        bos, first = self.tokenizer.bos_token, self.tokenizer("")["input_ids"][:1]
        return text if first != [self.tokenizer.bos_token_id] or text.startswith(bos) else bos + text

    def expansion(self, picture: Picture) -> Expansion:
        """What stands in the text for a picture; it depends on the size alone."""
        if picture.size not in self._expansions:
            if len(self._expansions) >= REMEMBERED:
                self._expansions.clear()
            self._expansions[picture.size] = self._expand(picture)
        return self._expansions[picture.size]

    def fitted(self, picture: Picture, most: int | None = None) -> Picture:
        """The picture, at the largest scale found at which it has at most ``most`` placeholders and ``pixels`` pixels.

        Args:
            picture: As it is in the dataset.
            most: Placeholders it may have; None: as the run says.

        Raises:
            DataError: PT-G001: it has more, and ``resize`` is not set; or no smaller size has fewer (some processors write as
                many placeholders for every picture).
        """
        most = self.most if most is None else min(most, self.most or most)
        if self._fits(picture, most):
            return picture
        count, area = self.expansion(picture).count, math.prod(picture.size)
        about = (
            f"PT-G001: {picture.where}: a picture of {picture.size[0]}×{picture.size[1]} has {count} placeholders and {area} "
            f"pixels, and image_max_tokens={most}, image_max_pixels={self.pixels}. Fix: "
        )
        if not self.resize:
            raise DataError(f"{about}image_fit='resize', a larger limit, or leave this row out.")
        key = picture.size, most
        if key not in self._sizes:
            scale = min(1.0, *(limit / have for limit, have in ((most, count), (self.pixels, area)) if limit)) ** 0.5
            smaller, smallest = picture, 1 / max(min(picture.size), 1)
            while not self._fits(smaller, most) and scale > smallest:
                smaller = picture.resized(tuple(max(1, int(side * scale)) for side in picture.size))
                scale *= 0.9
            if not self._fits(smaller, most):
                raise DataError(
                    f"{about}a larger limit: this processor has no size with so few (see its own settings)."
                )
            self._sizes[key] = smaller.size
        return picture.resized(self._sizes[key])

    def _fits(self, picture: Picture, most: int | None) -> bool:
        if self.pixels is not None and math.prod(picture.size) > self.pixels:
            return False
        return most is None or self.expansion(picture).count <= most

    def _expand(self, picture: Picture) -> Expansion:
        from PIL import Image

        if self.family.cross:
            return Expansion(self.placeholder, 1, None)
        found = self._call(Image.new("RGB", picture.size, "gray"), picture.where)
        count = int((torch.as_tensor(found["input_ids"]) == self.token_id).sum())
        text = found["text_replacement_offsets"][0][0]["replacement"]
        grid = None
        if self.family.positions == "grid":
            merge = int(self.processor.image_processor.merge_size)
            t, h, w = found[GRID][0].tolist()
            grid = (t, h // merge, w // merge)
        return Expansion(text, count, grid)

    # Pixels ------------------------------------------------------------------------------------------------------

    def prepare(self, picture: Picture) -> dict[str, Tensor]:
        """What the tower needs of one picture: decoded, resized, cut, normalised.

        Raises:
            DataError: It cannot be read, or the image processor refuses it.
        """
        return self._tensors(picture.load(), picture.where, alone=self._alone)

    @functools.cached_property
    def _alone(self) -> bool:
        """Whether the image processor by itself, at a third of the cost, prepares a large picture as the processor does; of
        a family that is not known it is not asked."""
        from PIL import Image

        if self.family.cross or not self.family.models:
            return self.family.cross
        image = Image.linear_gradient("L").resize(LARGE).convert("RGB")
        whole, alone = (self._tensors(image, "a shaded picture", alone=one) for one in (False, True))
        return _equal(whole, alone)

    def _tensors(self, image: Any, where: str, *, alone: bool) -> dict[str, Tensor]:
        """Of one image of PIL; from the image processor alone, or from all of the processor."""
        found = self._call(image, where, alone=alone)
        return {name: value for name, value in found.items() if name not in (COUNTS if alone else TEXT_KEYS)}

    def _call(self, image: Any, where: str, *, alone: bool = False) -> Any:
        try:
            if alone:
                images = [[image]] if self.family.tiled else [image]
                return self.processor.image_processor(images=images, return_tensors="pt")
            options = {"return_tensors": "pt", "return_text_replacement_offsets": True, "add_special_tokens": False}
            return self.processor(text=[self.placeholder], images=[image], **options)
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(
                f"{where}: the processor refuses a picture of {image.size[0]}×{image.size[1]}: {error}. Fix: another shape, "
                "or leave this row out."
            ) from error

    def join(self, prepared: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of several pictures as the tower takes them at once, in the given order."""
        return joined_tensors(prepared, tiled=self.family.tiled)

    def plain_inputs(self, ids: Tensor, rows: Sequence[Sequence[Picture]], prompt: int = 0) -> dict[str, Tensor]:
        """The processor's own tensors of all pictures of a pass: what the model's forward takes without us.

        Args:
            ids: ``(B, T)``.
            rows: Pictures of each row, in reading order.
            prompt: How many of the ids are the prompt.
        """
        inputs: dict[str, Tensor] = {}
        if any(rows):
            texts, images = (
                [" ".join([self.placeholder] * len(row)) for row in rows],
                [[p.load() for p in row] for row in rows],
            )
            found = self.processor(text=texts, images=images, return_tensors="pt", padding=True)
            inputs = {name: value for name, value in found.items() if name not in TEXT_KEYS}
        if inputs and self.family.cross:
            masks = [self.cross_mask(*pair) for pair in zip(ids[:, None], inputs["aspect_ratio_mask"], strict=True)]
            inputs["cross_attention_mask"] = torch.cat(masks)
        return inputs | self.token_types(ids, prompt)

    def token_types(self, ids: Tensor, prompt: int) -> dict[str, Tensor]:
        """What the family's forward is told of each of ids ``(B, T)``, the first ``prompt`` of which are the prompt."""
        kinds = (ids == self.token_id).long()
        if self.family.block == "prompt":
            kinds = (torch.arange(ids.shape[1], device=ids.device) >= prompt).long().expand_as(ids)
        return {self.family.types: kinds} if self.family.types else {}

    def cross_mask(self, ids: Tensor, tiles: Tensor) -> Tensor:
        """``(1, T, N, tiles)`` which tiles of which picture a token attends to: of the last before it, or of several in a row.

        Args:
            ids: ``(1, T)`` with N placeholders.
            tiles: ``(N, tiles)`` 1 where a picture has one.
        """
        from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

        mask = tiles.new_zeros(1, ids.shape[1], *tiles.shape)
        for k, (start, end) in enumerate(get_cross_attention_token_mask(ids[0].tolist(), self.token_id)):
            mask[0, start : ids.shape[1] if end == -1 else end, k] = tiles[k]
        return mask

    # Rows --------------------------------------------------------------------------------------------------------

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Picture] = (), **options: Any
    ) -> tuple[str, list[Any]]:
        """Rendered text of messages with pictures inside them or beside them, and the pictures in reading order."""
        blocks, pictures = conversation_pictures(messages, images)
        return self.render(blocks, **options), pictures


def joined_tensors(prepared: Sequence[Mapping[str, Tensor]], *, tiled: bool) -> dict[str, Tensor]:
    """Tensors of pictures by name, joined along tiles or pictures; what is shorter in another axis gets zeros behind it."""
    joined, along = {}, int(tiled)
    for name in prepared[0]:
        parts = [one[name] for one in prepared]
        most = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        behind = [
            [(0, n - m) for n, m in zip(most[along + 1 :], part.shape[along + 1 :], strict=True)] for part in parts
        ]
        pads = [[side for pair in reversed(one) for side in pair] for one in behind]
        joined[name] = torch.cat(
            [pad(part, add) if any(add) else part for part, add in zip(parts, pads, strict=True)], along
        )
    return joined


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _guessed(processor: Any) -> Family:
    """Of a processor that `FAMILIES` does not name, by its own output; `install_pictures` proves it with the model.

    Raises:
        ModelError: It does not tell what it writes for a picture, or prepares pictures together otherwise than apart.
    """
    from PIL import Image

    shade, kind = Image.linear_gradient("L"), type(processor).__name__
    images = [shade.resize(size).convert("RGB") for size in (LARGE, (112, 56), (56, 112))]
    try:
        mark = processor.image_token

        def call(rows: list[list[Any]]) -> dict[str, Any]:
            text = [" ".join([mark] * len(row)) for row in rows]
            options = {"return_tensors": "pt", "add_special_tokens": False, "padding": True}
            found = processor(text=text, images=rows, return_text_replacement_offsets=True, **options)
            if [len(one) for one in found["text_replacement_offsets"]] != [len(row) for row in rows]:
                raise ValueError("it does not write one string a picture")
            return dict(found)

        whole = call([images])
        types = next((name for name in (KINDS, "token_type_ids") if name in whole and whole[name].any()), None)
        # In one row, and in a row each: some say how many a row has.
        together, rows, *apart = (
            {name: value for name, value in one.items() if name not in TEXT_KEYS}
            for one in (whole, call([[image] for image in images]), *(call([[image]]) for image in images))
        )
        for tiled in (False, True):
            try:
                joined = joined_tensors(apart, tiled=tiled)
            except (IndexError, RuntimeError):  # Shapes that this axis cannot join.
                continue
            if any(_equal(joined, one) for one in (together, rows)):
                grid = GRID in joined and hasattr(processor.image_processor, "merge_size")
                return Family((), tiled=tiled, positions="grid" if grid else "plain", types=types)
        reason = f"its pictures ({', '.join(map(str, together))}) come out otherwise together than apart"
    except Exception as error:  # Whatever it raises says why nothing can be known of it.
        reason = f"{type(error).__name__}: {error}"
    raise ModelError(
        f"{kind} is of no family that is known to train on images here ({', '.join(FAMILIES)}), and what it does with images "
        f"cannot be found out: {reason:.300}. Fix: a model of one of these, or rows without images."
    )


def family_of(processor: Any) -> Family | None:
    """What is known of the models of a processor; None: nothing, or it is a tokenizer."""
    return next((FAMILIES[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in FAMILIES), None)


def _as_blocks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Content as blocks everywhere: templates of processors read no strings."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else dict(m)
        for m in messages
    ]


def is_processor(processing_class: Any) -> bool:
    """Whether this is a processor with an image processor, not a tokenizer."""
    return getattr(processing_class, "image_processor", None) is not None


@functools.cache
def image_only(kind: type) -> type:
    """A processor class that asks for no video processor, which `transformers` cannot build without torchvision."""
    base: Any = kind
    names = inspect.signature(base.__init__).parameters
    kept = [parameter for name, parameter in names.items() if name != "video_processor"]

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, video_processor=None, **kwargs)
        self.video_processor = SimpleNamespace(num_frames=1, fps=1, size=None, merge_size=1)

    def accepted(processor_config: dict[str, Any], valid_kwargs: Any) -> tuple[dict, dict]:
        # `transformers` reads the names of arguments off the constructor's code, which here names none.
        return base.validate_init_kwargs(processor_config, [parameter.name for parameter in kept[1:]])

    vars(build)["__signature__"] = inspect.Signature(kept)
    # A worker process finds the class by the one that it was made of.
    methods = {"__init__": build, "validate_init_kwargs": staticmethod(accepted)}
    methods["__reduce__"] = lambda self: (_image_only_again, (kind,), vars(self))
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _image_only_again(kind: type) -> Any:
    return object.__new__(image_only(kind))


def load_processor(model_id: str, **options: Any) -> Any:
    """The processor that belongs to a model, without its video part where torchvision is missing.

    Args:
        model_id: A hub id or folder.
        options: For ``from_pretrained``.

    Raises:
        ModelError: Neither way works, with the reason of both.
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
    except Exception as error:  # Whatever a processor's constructor raises: the caller needs both reasons.
        raise ModelError(
            f"no processor of {model_id!r} can be loaded ({first:.300}; without video: {type(error).__name__}: {error}). "
            "Fix: install the package that is named, or pass processing_class=processor."
        ) from error
