"""Processors of vision-language models: text with pictures to ids and places, one picture to its tensors."""

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
from torch import Tensor
from torch.nn.functional import pad

from posttrain.errors import DataError, ModelError
from posttrain.pictures.picture import Background, Picture, Placed, shaded

if TYPE_CHECKING:
    from transformers import ProcessorMixin


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
# Strings that stand for pictures or around them; a user who types one would change what the model sees.
CONTROL = re.compile(r"image|img|vision|video|<row_\d", re.IGNORECASE)
GRID, PARTS, PARTS_ASKED = "image_grid_thw", "text_replacement_offsets", "return_text_replacement_offsets"
# Of a processor's output what its text needs, or a loss.
TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", KINDS, "labels", PARTS, "cross_attention_mask"}
TEXT_KEYS |= {"num_crops", "num_patches", "num_tiles", "rows", "cols"}
LARGE = (1568, 1120)  # A picture that is cut into tiles where any is; of whole patches where nothing is resized.
REMEMBERED = 4096  # Sizes whose expansion is kept.


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a processor writes for a picture of one size: its text, and the fields of `Placed`."""

    text: str = field(repr=False)
    count: int
    grid: tuple[int, int, int] | None


def _marker() -> Any:
    """Transformers' function that marks what a user typed of control tokens; None in older versions, where it is refused."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "mark_control_tokens", None)


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
        ModelError: It belongs to no family that is known, and does not tell by its output what it does with pictures.

    Attributes:
        family: See `Family`.
        token_id: Of the placeholder that a feature replaces.
        resized: Pictures of prompts that were made smaller so far.
        sanitized: Strings of users, in prompts so far, that name a placeholder and stayed text.
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
        self.most, self.pixels, self.resize, self.per_row, self.background = most, pixels, resize, per_row, background
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", None)
        self._expansions: dict[tuple[int, int], Expansion] = {}
        self._sizes: dict[Any, tuple[int, int]] = {}
        self.resized = self.sanitized = 0
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        known = family_of(processor)
        self.family, self.token_id = self._guessed() if known is None else (known, int(processor.image_token_ids[0]))

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
        """Text of messages, in which what a user typed of `controls` is marked."""
        if (mark := _marker()) is not None:
            words = re.compile("|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))))
            messages = [{**message, "content": mark(message.get("content"), words)} for message in messages]
        return self.processor.apply_chat_template(_as_blocks(messages), tokenize=False, **options)

    @functools.cached_property
    def _mark(self) -> str:
        """What `transformers` puts before a string of a user's that is to stay text; what no text holds where it puts nothing."""
        mark = _marker()
        return "\0" if mark is None else mark("x", re.compile("x"))[0]

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
            shown = [match.end() for match in re.finditer(f"(?<!{self._mark}){re.escape(self.placeholder)}", text)]
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
        collapsed_ids: list[int] = []
        at, single = 0, int(self.tokenizer.convert_tokens_to_ids(self.placeholder))
        for image in placed:
            whole = self.tokenizer(self.expansion(image.picture).text, add_special_tokens=False)["input_ids"]
            begin = image.start - whole.index(self.token_id)
            collapsed_ids += [*ids[at:begin], single]
            at = begin + len(whole)
        return [*collapsed_ids, *ids[at:]]

    def place(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[Placed]:
        """Where pictures are in ids that hold all of their placeholders.

        Raises:
            DataError: There are more or fewer placeholders than the pictures have.
        """
        at = [i for i, token in enumerate(ids) if token == self.token_id]
        expansions = [self.expansion(picture) for picture in pictures]
        if len(at) != sum(expansion.count for expansion in expansions):
            raise DataError(
                f"PT-G011: the ids hold {len(at)} image placeholders and the {len(pictures)} images have "
                f"{[expansion.count for expansion in expansions]}. Fix: a longer max_length, or smaller images."
            )
        placed, first = [], 0
        # Where a run of placeholders is taken for one image: by rotary positions, or by attention.
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
        """A text with the bos token before it, where the tokenizer adds one; some models have theirs behind the images."""
        bos, first = self.tokenizer.bos_token, self.tokenizer("")["input_ids"][:1]
        adds = first == [self.tokenizer.bos_token_id] and self.family.block != "prompt"
        return bos + text if adds and not text.startswith(bos) else text

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
        """What the tower needs of one picture: decoded, resized, cut, normalised.

        Raises:
            DataError: It cannot be read, or the image processor refuses it.
        """
        return _pixels(self._read([[picture.load()]], picture.where, alone=self._alone))

    @functools.cached_property
    def _alone(self) -> bool:
        """Whether the image processor by itself, at a third of the cost, prepares a large picture as the processor does."""
        if self.family.cross or not self.family.models:
            return self.family.cross
        rows = [[shaded(LARGE).load()]]
        return _equal(_pixels(self._read(rows)), _pixels(self._read(rows, alone=True)))

    def _read(self, rows: Sequence[Sequence[Any]], where: str = "", *, alone: bool = False) -> dict[str, Any]:
        """All that the processor makes of the images of PIL of each row, with a placeholder for each and nothing else.

        Args:
            rows: Images of each.
            where: The place of one in the dataset.
            alone: Ask its image processor, without text.
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
                f"{where}: the processor refuses a picture of {shapes}: {error}. Fix: another shape, or leave this row out."
            ) from error

    def shaded(self, size: tuple[int, int], *, turned: bool = False) -> Picture:
        """A picture to try the processor with; where it resizes nothing, larger by a factor that makes whole patches of it."""
        factor = 1 if getattr(getattr(self.processor, "image_processor", None), "do_resize", True) else 8
        return shaded((factor * size[0], factor * size[1]), turned=turned)

    def join(self, prepared: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of several pictures as the tower takes them at once, in the given order."""
        return _joined(prepared, tiled=self.family.tiled)

    def plain_inputs(
        self, ids: Tensor, rows: Sequence[Sequence[Picture]], prompt: int | Tensor = 0
    ) -> dict[str, Tensor]:
        """The processor's own tensors of all pictures of a pass: what the model's forward takes without us.

        Args:
            ids: ``(B, T)``.
            rows: Pictures of each row, in reading order.
            prompt: How many of the ids are the prompt, of all rows or of each ``(B, 1)``.
        """
        inputs = _pixels(self._read([[picture.load() for picture in row] for row in rows])) if any(rows) else {}
        if inputs and self.family.cross:
            masks = [self.cross_mask(*pair) for pair in zip(ids[:, None], inputs["aspect_ratio_mask"], strict=True)]
            inputs["cross_attention_mask"] = torch.cat(masks)
        return inputs | self.token_types(ids, prompt)

    def _guessed(self) -> tuple[Family, int]:
        """Of a processor that `FAMILIES` does not name, by its own output; `install_pictures` proves it with the model.

        Raises:
            ModelError: It does not tell what it writes for a picture, or prepares pictures together otherwise than apart.
        """
        images = [shaded(size).load() for size in (LARGE, (112, 56), (56, 112))]
        try:
            first, *_ = apart = [self._read([[image]]) for image in images]
            # In one row, and in a row each: some say how many a row has.
            together = [self._read([images]), self._read([[image] for image in images])]
            if [len(row) for row in together[0][PARTS]] != [len(images)]:
                raise ValueError("it does not write one string a picture")
            ids, token = first["input_ids"][0].tolist(), int(self.processor.image_token_ids[0])
            # It may read one string and write others, with rows and ends of a picture between them.
            token = token if token in ids else Counter(ids).most_common(1)[0][0]
            types = next((name for name in (KINDS, "token_type_ids") if name in first and first[name].any()), None)
            grid = GRID in first and hasattr(self.processor.image_processor, "merge_size")
            for tiled in (False, True):
                joined = _joined([_pixels(one) for one in apart], tiled=tiled)
                if any(_equal(joined, _pixels(one)) for one in together):
                    return Family((), tiled=tiled, positions="grid" if grid else "plain", types=types), token
            reason = f"its {', '.join(_pixels(first))} come out otherwise together than apart"
        except Exception as error:  # Whatever it raises says why nothing can be known of it.
            reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{type(self.processor).__name__} is of no family that is known to train on images here ({', '.join(FAMILIES)}), and "
            f"what it does with images cannot be found out: {reason:.300}. Fix: a model of one of these, or rows without images."
        )

    def token_types(self, ids: Tensor, prompt: int | Tensor) -> dict[str, Tensor]:
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


def _pixels(output: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the tower takes of a processor's output."""
    return {name: value for name, value in output.items() if name not in TEXT_KEYS}


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _joined(prepared: Sequence[Mapping[str, Tensor]], *, tiled: bool) -> dict[str, Tensor]:
    """Tensors of pictures by name, joined along tiles or pictures; what is shorter in an axis behind that gets zeros."""
    joined, along = {}, int(tiled)
    for name, first in prepared[0].items():
        parts = [one[name] for one in prepared]
        axes = range(along + 1, first.dim())
        most = [max(part.shape[axis] for part in parts) for axis in axes]
        for i, part in enumerate(parts):
            behind = [(0, n - part.shape[axis]) for n, axis in zip(most, axes, strict=True)]
            parts[i] = pad(part, [side for pair in reversed(behind) for side in pair])
        joined[name] = torch.cat(parts, min(along, first.dim() - 1))
    return joined


def family_of(processor: ProcessorMixin) -> Family | None:
    """What is known of the models of a processor; None: nothing, or it is a tokenizer."""
    return next((FAMILIES[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in FAMILIES), None)


def _as_blocks(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Content as blocks everywhere: templates of processors read no strings."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else dict(m)
        for m in messages
    ]


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
