"""Images of dataset rows: `Picture` reads and stores an image, and further functions connect images with messages."""

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

from posttrain.data.formats import PICTURE_BLOCKS, is_image, picture_blocks
from posttrain.errors import DataError
from posttrain.integrations import require

logger = logging.getLogger(__name__)

# Keys of a content block whose value may be an image.
ALIASES = ("image", "image_url", "image_pil", "path", "url", "base64", "bytes")
# Image modes with more than 8 bits per channel. Image processors would convert such images to black, white or noise.
WIDE = ("F", "I")
OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # Image modes that the PNG format supports.
# File formats that may be opened. For other formats, PIL may start an external program, e.g. Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
ORIENTATION = 274  # Number of the EXIF tag for the orientation.
TURNED = (5, 6, 7, 8)  # Values of the EXIF orientation that swap width and height.
THUMBNAIL = 64  # Maximum number of pixels per side of a thumbnail.
Background = Literal["white", "black"]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in dataset rows and batches. It contains encoded bytes, a path or the user's PIL image, but no prepared
    pixels.

    Attributes:
        digest: Hash with 32 hexadecimal digits. It is computed from the encoded bytes, or from mode, size and pixels of a
            PIL image. Two images are equal if their digest and their background are equal.
        size: Width and height, in pixels, of the image that the model receives. This is the size after EXIF rotation, or
            the size that was passed to `resized`.
        source: Encoded bytes, a path, or a PIL image.
        background: Color behind transparent pixels.
        where: Row and column of the image, for error messages.
    """

    digest: str
    size: tuple[int, int] = field(compare=False)
    source: Any = field(compare=False, repr=False)
    background: Background = "white"
    where: str = field(default="", compare=False, repr=False)

    def load(self) -> Any:
        """Load the image as an upright RGB PIL image of size ``size``. Transparent pixels get the color ``background``.

        Raises:
            DataError: The pixels of the image cannot be read.
        """
        ops = require("PIL.ImageOps", "reading images")
        try:
            opened = open_source(self.source)
            upright = ops.exif_transpose(opened)
            image = _rgb(upright, self.background)
            return image if image.size == self.size else image.resize(self.size)
        # Decoders raise exceptions of many types, so catch all.
        except Exception as error:
            raise DataError(
                f"{self.where}: the image cannot be read (PT-G003): {type(error).__name__}: {error}. Fix: write the "
                "file again, or remove this row."
            ) from error

    def opened(self) -> Any:
        """Return an upright PIL image in the mode of the file. The image's pixels are decoded on first access."""
        source = self.source
        if isinstance(source, str):
            # Read the whole file now, so that it does not stay open.
            with open(source, "rb") as file:
                source = file.read()
        image = open_source(source)
        turned = image.getexif().get(ORIENTATION, 1) != 1
        # Call exif_transpose only if the image is rotated, because it copies the image.
        return require("PIL.ImageOps", "reading images").exif_transpose(image) if turned else image

    def encoded(self) -> Picture:
        """Return a copy whose source is a path or encoded bytes. A PIL image is encoded as an upright PNG."""
        if isinstance(self.source, bytes | str):
            return self
        image, buffer = self.opened(), io.BytesIO()
        if image.mode not in OF_PNG:
            image = _rgb(image, self.background)
        image.save(buffer, format="PNG")
        return replace(self, source=buffer.getvalue())

    def file_bytes(self) -> bytes:
        """Return the bytes of the image file without encoding them again. A PIL image is encoded as PNG."""
        source = self.encoded().source
        if isinstance(source, bytes):
            return source
        with open(source, "rb") as file:
            return file.read()

    def resized(self, size: tuple[int, int]) -> Picture:
        """Return a copy with another size and a new digest. Pixels are resized when the copy is loaded."""
        if size == self.size:
            return self
        digest = hashlib.blake2b(f"{self.digest} {size}".encode(), digest_size=16).hexdigest()
        return replace(self, size=size, digest=digest)

    def address(self) -> str:
        """Return the image that the model receives as a ``data:`` URL with a lossless PNG."""
        buffer = io.BytesIO()
        self.load().save(buffer, format="PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def thumbnail(self) -> str:
        """Return a ``data:`` URL with a JPEG of at most 64 pixels per side. The URL has about 2 kB."""
        image, buffer = self.load(), io.BytesIO()
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(buffer, format="JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def label(self, number: int, tokens: int) -> str:
        """Return the image's placeholder in reports, e.g. ``[image 1: 640×480, 391 tokens, 12ab]``."""
        return f"[image {number}: {self.size[0]}×{self.size[1]}, {tokens} tokens, {self.digest[:4]}]"


@dataclass(frozen=True, slots=True)
class Placed:
    """An image with its position in a prompt or a completion.

    Attributes:
        picture: The image.
        start: Index of the image's first placeholder in the token ids of the prompt or completion.
        count: Number of the image's placeholders. Markers between placeholders are not counted.
        grid: Number of patches in time, height and width after merging, for three-dimensional positions. None: one-dimensional
            positions.
    """

    picture: Picture
    start: int
    count: int
    grid: tuple[int, int, int] | None = None

    @property
    def offset(self) -> int:
        """Amount by which this image shifts the positions of later text relative to token indices. Positions advance by the
        longer side of the image, and indices advance by ``count``.
        """
        return max(self.grid[1:]) - self.count if self.grid else 0

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON. The dict contains a path, or encoded bytes in base64."""
        picture = self.picture.encoded()
        data = base64.b64encode(picture.source).decode() if isinstance(picture.source, bytes) else None
        fields = {"path": None if data else picture.source, "background": picture.background, "where": picture.where}
        fields["size"] = picture.size
        return {"start": self.start, "count": self.count, "grid": self.grid, "data": data, **fields}

    @classmethod
    def of(
        cls, *, start: int, count: int, grid: Any, size: Any, data: str | None, path: str | None, **about: Any
    ) -> Placed:
        """Create an object from a dict that `to_dict` returned."""
        picture = read_picture(path if data is None else base64.b64decode(data), **about)
        return cls(picture.resized(tuple(size)), start, count, None if grid is None else tuple(grid))


def read_picture(
    value: object, where: str = "", background: Background = "white", most_pixels: int | None = None
) -> Picture:
    """Create a `Picture` from an image in any accepted form. Only the header of the image is decoded, which takes about 0.3
    ms.

    Args:
        value: A PIL image, encoded bytes, a dict with ``bytes`` and ``path``, a path, a ``data:`` or ``file:`` URL, or
            uint8 pixels ``(H, W)``, ``(H, W, 3)`` or ``(H, W, 4)`` (a torch tensor may also be ``(C, H, W)``). A `Picture` is
            returned unchanged.
        where: Row and column of the image, for error messages.
        background: Color behind transparent pixels.
        most_pixels: Maximum number of pixels. A larger image raises an error before it is decoded. None: no limit.

    Raises:
        DataError: The value is a remote URL, a file that cannot be read, an image with more than 8 bits per channel, or
            not an image.
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
    except Exception as error:  # Image libraries raise exceptions of many types for files that cannot be read.
        raise DataError(
            f"{where}: this is not a readable image (PT-G003, {type(error).__name__}: {error}). Fix: remove this row, "
            f"or write the file again as one of {', '.join(FORMATS)}."
        ) from error
    if mode in WIDE or mode.startswith("I;16"):
        raise DataError(
            f"{where}: the image has mode {mode!r} with more than 8 bits per channel, which image processors convert "
            "to black or white. Fix: scale its values to 0..255 and convert it to 'L' or 'RGB'."
        )
    if mode == "LAB":
        raise DataError(
            f"{where}: the image has mode {mode!r}, which needs a color profile. Fix: convert it to 'RGB' with "
            "PIL.ImageCms."
        )
    if frames > 1:
        logger.warning("%s: the image is animated. Only its first frame is used.", where)
    return Picture(digest, (size[1], size[0]) if turned else size, source, background, where)


def open_source(source: Any) -> Any:
    """Open an image of one of `FORMATS` with PIL, and read only its header. A PIL image is returned unchanged."""
    if not isinstance(source, bytes | str):
        return source
    pil = require("PIL.Image", "reading images")
    pil.init()
    formats = [name for name in FORMATS if name in pil.OPEN]  # Older releases of PIL do not support AVIF.
    return pil.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)


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
    """Convert a PIL image to RGB. Transparent pixels get the background color instead of the color that is stored for them."""
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        below = require("PIL.Image", "reading images").new("RGBA", image.size, background)
        below.alpha_composite(image)
        image = below
    return image.convert("RGB")


def _source(value: object, where: str) -> Any:
    """Convert a value to encoded bytes, a path, or a PIL image. Pixel arrays become PIL images."""
    # `datasets` represents an image that is not decoded as a dict.
    if isinstance(value, Mapping):
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
        f"{where}: {type(value).__name__} is not an image. Fix: use a PIL image, bytes, a path or uint8 pixels."
    )


def _from_address(value: str, where: str) -> Any:
    parts = urlparse(value)
    if parts.scheme in ("http", "https"):
        raise DataError(
            f"{where}: {value[:120]!r} is remote, but nothing is downloaded during training. Fix: download the images "
            "first, then call dataset.cast_column('images', List(Image()))."
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
    """Separate messages from their images. Return messages with empty image blocks, and the images in reading order.

    A block is empty if it has no image, or if its image is None. (Arrow adds None for keys that occur in other blocks.) If
    no block is empty, one block per image in ``images`` is inserted before the text of the first user message.

    Args:
        messages: Messages with text or blocks as content.
        images: Images for the empty blocks, in reading order. None: there are no images.

    Returns:
        Messages whose blocks are ``{"type": "image"}`` or ``{"type": "text", "text": ...}``, and one image per image
        block.

    Raises:
        DataError: A block is neither text nor an image, or the number of empty blocks differs from the number of images.

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
    loose, empty = [image for image in images or () if image is not None], sum(picture is None for picture in pictures)
    if loose and not empty:
        user = next((m for m in converted if m.get("role") == "user"), None)
        if user is None:
            raise DataError(f"there are {len(loose)} images but no user message. Fix: add one, or image blocks.")
        before = len(picture_blocks(converted[: converted.index(user)]))
        content = user.get("content")
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        user["content"] = [{"type": "image"} for _ in loose] + text
        pictures, empty = [*pictures[:before], *(None for _ in loose), *pictures[before:]], len(loose)
    if empty != len(loose):
        raise DataError(
            f"the messages have {empty} empty image blocks and there are {len(loose)} images (PT-G002). Fix: use one {{'type': "
            "'image'}} block per image, or no such block."
        )
    filling = iter(loose)
    return converted, [next(filling) if picture is None else picture for picture in pictures]


NOTHING: Any = object()  # Marker for a text block, because a text block cannot have an image.


def _block(block: Any, role: str) -> tuple[dict[str, Any], Any]:
    """Return a block without its image, and the image. The image is None for an empty image block, and `NOTHING` for a
    text block.
    """
    if isinstance(block, str):
        return {"type": "text", "text": block}, NOTHING
    block = {key: value for key, value in block.items() if value is not None}
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text", "")}, NOTHING
    if kind not in PICTURE_BLOCKS:
        raise DataError(
            f"a {role} message has a block of type {kind!r}; supported are 'text' and 'image', not video or "
            "audio. Fix: remove this row."
        )
    return {"type": "image"}, picture_in(block)


def picture_in(block: Mapping[str, Any]) -> Any:
    """Return the image of an image block in a form that `read_picture` accepts. Return None if the block is empty."""
    name = next((key for key in ALIASES if block.get(key) is not None), None)
    content = None if name is None else block[name]
    if isinstance(content, Mapping) and "url" in content:
        content = content["url"]
    return f"data:;base64,{content}" if name == "base64" else content


def filled(messages: Sequence[Mapping[str, Any]], images: Iterable[Any]) -> list[dict[str, Any]]:
    """Put images into the image blocks of messages, in reading order. This function is the inverse of
    `conversation_pictures`.
    """
    rest = iter(images)
    return _with_blocks(messages, lambda b: {**b, "image": next(rest)} if b["type"] == "image" else b)


def observed_blocks(output: object, where: str, background: Background) -> list[dict[str, Any]]:
    """Convert the output of a tool or an environment to text and image blocks. The output is a PIL image or a list of blocks.

    Images are encoded immediately, because the tool may change the image object later.

    Raises:
        DataError: The output is not a list of blocks, a block is neither text nor an image, an image block is empty, or an
            image cannot be read.
    """
    content = output if isinstance(output, list) else [{"type": "image", "image": output}]
    if not all(isinstance(block, Mapping) for block in content):
        raise DataError(f"{where}: {type(output).__name__} is not a list of text and image blocks.")
    messages, pictures = conversation_pictures([{"role": "tool", "content": content}])
    return filled(messages, [read_picture(value, where, background).encoded() for value in pictures])[0]["content"]


def with_opened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each image is a PIL image. Its pixels are decoded on access."""
    blocks, pictures = conversation_pictures(messages)
    return filled(blocks, [picture.opened() for picture in pictures])


def png_addresses(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the images of messages in reading order. Each image is a ``data:`` URL with a PNG file."""
    images = [read_picture(value, "an image of a prompt").load() for value in conversation_pictures(messages)[1]]
    files = [read_picture(image).file_bytes() for image in images]
    return [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]


def without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which image blocks are empty. Tables of completions use such messages."""
    return _with_blocks(messages, lambda b: {"type": "image"} if b.get("type") in PICTURE_BLOCKS else b)


def _with_blocks(messages: Sequence[Mapping[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Apply ``change`` to each content block of the messages. Content that is a string is not changed."""
    return [
        {**m, "content": list(map(change, m["content"]))} if isinstance(m.get("content"), list) else dict(m)
        for m in messages
    ]


# A small cache is enough, because the tests of all models and processors use the same few images.
@functools.lru_cache(maxsize=8)
def shaded(size: tuple[int, int], *, turned: bool = False) -> Picture:
    """Create a test image with a gradient from black to white. The gradient is vertical, or horizontal if ``turned`` is
    True.
    """
    shade = require("PIL.Image", "reading images").linear_gradient("L")
    image = (shade.rotate(90) if turned else shade).resize(size).convert("RGB")
    return read_picture(image, f"a shaded picture of {size}")
