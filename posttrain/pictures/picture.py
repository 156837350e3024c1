"""Pictures of dataset rows: what stands for one while it waits, how it is read, and where messages place it."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from posttrain.data.formats import PICTURE_BLOCKS, picture_blocks
from posttrain.errors import DataError
from posttrain.integrations import require

logger = logging.getLogger(__name__)

# Keys of a block that may hold its picture.
ALIASES = ("image", "image_url", "image_pil", "path", "url", "base64", "bytes")
WIDE = ("F", "I")  # Modes of more than 8 bits: what a processor makes of them is black, white or noise.
OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # Modes that a PNG keeps.
# Formats of files that are opened. For others PIL may start a program, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
ORIENTATION = 274  # The EXIF tag.
TURNED = (5, 6, 7, 8)  # Orientations that exchange width and height.
THUMBNAIL = 64  # Pixels of its longer side.
Background = Literal["white", "black"]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as it waits in rows and batches: encoded bytes, a path or the user's own object; never prepared pixels.

    Attributes:
        digest: 32 hexadecimal digits, a hash of the encoded bytes, or of mode, size and pixels; equality and hash are its own,
            and the background's.
        size: Width and height in pixels that the model sees: the file's after EXIF rotation, or those of `resized`.
        source: Encoded bytes, a path, or a PIL image.
        background: What shows through transparent pixels.
        where: Row and column, for errors.
    """

    digest: str
    size: tuple[int, int] = field(compare=False)
    source: Any = field(compare=False, repr=False)
    background: Background = "white"
    where: str = field(default="", compare=False, repr=False)

    def load(self) -> Any:
        """The picture as an RGB object of PIL, upright, of ``size``, transparent pixels on ``background``.

        Raises:
            DataError: Its pixels cannot be read.
        """
        ops = require("PIL.ImageOps", "reading images")
        try:
            opened = open_source(self.source)
            upright = ops.exif_transpose(opened)
            image = _rgb(upright, self.background)
            return image if image.size == self.size else image.resize(self.size)
        except Exception as error:  # Image libraries raise whatever their format's decoder raises.
            raise DataError(
                f"{self.where}: the picture cannot be read (PT-G003): {type(error).__name__}: {error}. Fix: write the file "
                "again, or leave this row out."
            ) from error

    def opened(self) -> Any:
        """The picture as an object of PIL in its own mode, upright; its pixels are decoded when they are first touched."""
        source = self.source
        if isinstance(source, str):
            # No file stays open for pixels that nobody asks for.
            with open(source, "rb") as file:
                source = file.read()
        image = open_source(source)
        turned = image.getexif().get(ORIENTATION, 1) != 1
        # An image that is turned is copied, and others are not.
        return require("PIL.ImageOps", "reading images").exif_transpose(image) if turned else image

    def encoded(self) -> Picture:
        """The same with a path or encoded bytes as its source: a PIL image becomes an upright PNG."""
        if isinstance(self.source, bytes | str):
            return self
        image, buffer = self.opened(), io.BytesIO()
        if image.mode not in OF_PNG:
            image = _rgb(image, self.background)
        image.save(buffer, format="PNG")
        return replace(self, source=buffer.getvalue())

    def file_bytes(self) -> bytes:
        """The file's own bytes, not encoded again; of a PIL image those of a PNG."""
        source = self.encoded().source
        if isinstance(source, bytes):
            return source
        with open(source, "rb") as file:
            return file.read()

    def resized(self, size: tuple[int, int]) -> Picture:
        """The same picture shown at another width and height; resized when it is loaded. Its digest is another one."""
        if size == self.size:
            return self
        digest = hashlib.blake2b(f"{self.digest} {size}".encode(), digest_size=16).hexdigest()
        return replace(self, size=size, digest=digest)

    def address(self) -> str:
        """A ``data:`` address of a PNG of what the model sees, without loss."""
        buffer = io.BytesIO()
        self.load().save(buffer, format="PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def thumbnail(self) -> str:
        """A ``data:`` address of a JPEG of at most 64 pixels a side, what the model sees made small; about 2 kB."""
        image, buffer = self.load(), io.BytesIO()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(buffer, format="JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def label(self, number: int, tokens: int) -> str:
        """What stands for it in reports, e.g. ``[image 1: 640×480, 391 tokens, 12ab]``."""
        return f"[image {number}: {self.size[0]}×{self.size[1]}, {tokens} tokens, {self.digest[:4]}]"


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


def read_picture(
    value: object, where: str = "", background: Background = "white", most_pixels: int | None = None
) -> Picture:
    """A `Picture` of any accepted form, by its header; about 0.3 ms.

    Args:
        value: A PIL image, encoded bytes, a dict of ``bytes`` and ``path``, a path, a ``data:`` or ``file:`` address, or uint8
            pixels ``(H, W)``, ``(H, W, 3)``, ``(H, W, 4)`` (torch: ``(C, H, W)`` too); a `Picture` stays as it is.
        where: Row and column, for errors.
        background: What shows through transparent pixels.
        most_pixels: More are refused before any is decoded; None: any number.

    Raises:
        DataError: A remote address, a broken file, more than 8 bits a channel, or no picture at all.
    """
    if isinstance(value, Picture):
        return value
    source = _source(value, where)
    try:
        with_header = open_source(source)
        mode, size = with_header.mode, with_header.size
        if most_pixels is not None and math.prod(size) > most_pixels:
            raise ValueError(f"{size[0]}×{size[1]} pixels, and at most {most_pixels} are decoded")
        turned = with_header.getexif().get(ORIENTATION) in TURNED
        frames = getattr(with_header, "n_frames", 1)
        digest = _digest(source)
    except Exception as error:  # As above.
        raise DataError(
            f"{where}: this is no readable picture (PT-G003, {type(error).__name__}: {error}). Fix: leave this row out, or "
            f"write the file again as one of {', '.join(FORMATS)}."
        ) from error
    if mode in WIDE or mode.startswith("I;16"):
        raise DataError(
            f"{where}: the picture has mode {mode!r}, more than 8 bits a channel, which image processors turn into black or "
            "white. Fix: scale its values to 0..255 and convert it to 'L' or 'RGB'."
        )
    if mode == "LAB":
        raise DataError(
            f"{where}: the picture has mode {mode!r}, which is shown by a colour profile alone. Fix: convert it to 'RGB' with "
            "PIL.ImageCms."
        )
    if frames > 1:
        logger.warning("%s: the picture is animated; its first frame is used.", where)
    return Picture(digest, (size[1], size[0]) if turned else size, source, background, where)


def open_source(source: Any) -> Any:
    """A PIL image of one of `FORMATS` that has read no more than its header; a PIL image stays as it is."""
    if not isinstance(source, bytes | str):
        return source
    pil = require("PIL.Image", "reading images")
    pil.init()
    known = [name for name in FORMATS if name in pil.OPEN]  # Older releases have no AVIF.
    return pil.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=known)


def _digest(source: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(source, str):
        with open(source, "rb") as file:
            source = file.read()
    if isinstance(source, bytes):
        digest.update(source)
    else:
        pixels, hidden = source.tobytes(), source.info.get("transparency")
        about = (source.mode, source.size, source.getexif().get(ORIENTATION), source.getpalette(None), hidden)
        digest.update(repr(about).encode() + pixels)
    return digest.hexdigest()


def _rgb(image: Any, background: Background) -> Any:
    """RGB; transparent pixels show the background, not the colour that is hidden under them."""
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        below = require("PIL.Image", "reading images").new("RGBA", image.size, background)
        below.alpha_composite(image)
        image = below
    return image.convert("RGB")


def is_image(value: object) -> bool:
    """Whether a value is an image of PIL, which need not be installed."""
    return hasattr(value, "getexif")


def _source(value: object, where: str) -> Any:
    """Encoded bytes, a path, or a PIL image; a memory of pixels becomes one."""
    if isinstance(value, Mapping):  # As `datasets` keeps an image that it has not decoded.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return _from_address(value, where)
    if is_image(value):
        return value
    if hasattr(value, "shape"):
        return _from_pixels(value, where)
    raise DataError(
        f"{where}: {type(value).__name__} is no picture. Fix: give a PIL image, bytes, a path or uint8 pixels."
    )


def _from_address(value: str, where: str) -> Any:
    parts = urlparse(value)
    if parts.scheme in ("http", "https"):
        raise DataError(
            f"{where}: {value[:120]!r} is remote, and nothing is downloaded during training. Fix: download the pictures "
            "first, then dataset.cast_column('images', List(Image()))."
        )
    if parts.scheme == "data":
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(
                f"{where}: a data: address without valid base64 ({error}). Fix: encode the file again."
            ) from error
    return unquote(parts.path) if parts.scheme == "file" else value


def _from_pixels(value: object, where: str) -> Any:
    import numpy as np

    pixels = np.asarray(value)
    if hasattr(value, "permute") and pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (3, 4)):
        raise DataError(
            f"{where}: pixels of shape {tuple(pixels.shape)} and type {pixels.dtype}; they must be uint8, (H, W), (H, W, 3) or "
            "(H, W, 4). Fix: scale them to 0..255 and convert them."
        )
    return require("PIL.Image", "reading images").fromarray(np.ascontiguousarray(pixels))


def conversation_pictures(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with empty image blocks, and the pictures that belong in them, in reading order.

    A block is empty where its picture is missing or None, as Arrow fills in keys that other blocks have. Where no block is
    empty, one for each of ``images`` goes before the text of the first user message.

    Args:
        messages: With content as text or blocks.
        images: What belongs in the empty blocks; None stands for no picture.

    Returns:
        Messages whose blocks are ``{"type": "image"}`` or ``{"type": "text", "text": ...}``, and one picture a block.

    Raises:
        DataError: A block of another type, or as many empty blocks as there are not images.

    >>> conversation_pictures([{"role": "user", "content": "What is it?"}], ["cat"])
    ([{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}], ['cat'])
    """
    converted, pictures = [], []
    for message in messages:
        content = message.get("content")
        message = {key: value for key, value in message.items() if value is not None}
        if isinstance(content, list):
            blocks = [_block(block, str(message.get("role"))) for block in content]
            pictures += [picture for _, picture in blocks if picture is not NOTHING]
            message["content"] = [block for block, _ in blocks]
        converted.append(message)
    loose, empty = [one for one in images or () if one is not None], sum(picture is None for picture in pictures)
    if loose and not empty:
        user = next((m for m in converted if m.get("role") == "user"), None)
        if user is None:
            raise DataError(f"there are {len(loose)} images and no user message. Fix: add one, or image blocks.")
        before = len(picture_blocks(converted[: converted.index(user)]))
        content = user.get("content")
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        user["content"] = [{"type": "image"} for _ in loose] + text
        pictures, empty = [*pictures[:before], *(None for _ in loose), *pictures[before:]], len(loose)
    if empty != len(loose):
        raise DataError(
            f"the messages have {empty} empty image blocks and there are {len(loose)} images (PT-G002). Fix: one {{'type': "
            "'image'}} block an image, or none of these blocks."
        )
    filling = iter(loose)
    return converted, [next(filling) if picture is None else picture for picture in pictures]


NOTHING: Any = object()  # What a block of text holds.


def _block(block: Any, role: str) -> tuple[dict[str, Any], Any]:
    """A block without its picture, and the picture: None where it is empty, `NOTHING` in a block of text."""
    if isinstance(block, str):
        return {"type": "text", "text": block}, NOTHING
    block = {key: value for key, value in block.items() if value is not None}
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text", "")}, NOTHING
    if kind not in PICTURE_BLOCKS:
        raise DataError(
            f"a {role} message has a block of type {kind!r}; known are 'text' and 'image'. Fix: leave this row out; video and "
            "audio are not trained on."
        )
    return {"type": "image"}, picture_in(block)


def picture_in(block: Mapping[str, Any]) -> Any:
    """What a block of an image holds, as `read_picture` takes it; None where it is empty."""
    name = next((key for key in ALIASES if block.get(key) is not None), None)
    content = None if name is None else block[name]
    if isinstance(content, Mapping) and "url" in content:
        content = content["url"]
    return f"data:;base64,{content}" if name == "base64" else content


def filled(messages: Sequence[Mapping[str, Any]], images: Iterable[Any]) -> list[dict[str, Any]]:
    """Undo `conversation_pictures`: messages whose image blocks hold these images, in reading order."""
    rest = iter(images)
    return _with_blocks(messages, lambda b: {**b, "image": next(rest)} if b["type"] == "image" else b)


def observed_blocks(content: Any, where: str, background: Background) -> list[dict[str, Any]]:
    """What a tool or an environment returned as blocks of text and of pictures.

    Pictures are encoded as they are now: who returned an image may draw on it later.

    Raises:
        DataError: No list of blocks, a block of another type, one without its picture, or a picture that cannot be read.
    """
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise DataError(f"{where}: {type(content).__name__} is no list of blocks of text and images.")
    messages, pictures = conversation_pictures([{"role": "tool", "content": content}])
    return filled(messages, [read_picture(value, where, background).encoded() for value in pictures])[0]["content"]


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with ``{"type": "image"}`` where pictures were: what may be written into a table."""
    return _with_blocks(messages, lambda b: {"type": "image"} if b.get("type") in PICTURE_BLOCKS else b)


def _with_blocks(messages: Sequence[Mapping[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Messages with another block in place of each of theirs; content that is text stays."""
    return [
        {**m, "content": list(map(change, m["content"]))} if isinstance(m.get("content"), list) else dict(m)
        for m in messages
    ]


@functools.lru_cache(maxsize=8)  # Probes of several models and processors ask for the same few.
def shaded(size: tuple[int, int], *, turned: bool = False) -> Picture:
    """A picture from black to white, downwards or sideways."""
    shade = require("PIL.Image", "reading images").linear_gradient("L")
    image = (shade.rotate(90) if turned else shade).resize(size).convert("RGB")
    return read_picture(image, f"a shaded picture of {size}")
