"""Pictures of every accepted form, refusals of every other, and where messages place them."""

from __future__ import annotations

import base64
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from posttrain.data.formats import has_pictures, pictures_of, undecoded
from posttrain.errors import DataError
from posttrain.extensions.images.picture import Placed, conversation_pictures, read_picture, without_pictures
from posttrain.extensions.images.rows import stored
from tests.vision_families import noise
from tests.wordings import raises


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_no_program_is_started_for_a_file(tmp_path, monkeypatch):
    """PIL gives EPS to Ghostscript when pixels are read."""
    mark = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "a.png").write_bytes(eps)
    assert Image.open(io.BytesIO(eps)).format == "EPS"
    for value in (eps, str(tmp_path / "a.png"), {"bytes": eps, "path": None}):
        with pytest.raises(DataError, match=r"PT-G003.*JPEG, PNG"):
            read_picture(value).load()
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_files_of_common_formats_are_read(kind):
    assert read_picture(encoded(noise(40, 30), kind)).load().size == (40, 30)


def forms(folder):
    image = noise(40, 30)
    data, file = encoded(image), folder / "a picture.png"
    file.write_bytes(data)
    pixels = np.asarray(image)
    return {
        "pil": image,
        "bytes": data,
        "dict of bytes": {"bytes": data, "path": None},
        "dict of a path": {"bytes": None, "path": str(file)},
        "path": file,
        "string": str(file),
        "file:": file.as_uri(),
        "data:": "data:image/png;base64," + base64.b64encode(data).decode(),
        "numpy": pixels,
        "torch CHW": torch.tensor(pixels).permute(2, 0, 1),
        "torch HWC": torch.tensor(pixels),
    }


FORMS = (
    "pil",
    "bytes",
    "dict of bytes",
    "dict of a path",
    "path",
    "string",
    "file:",
    "data:",
    "numpy",
    "torch CHW",
    "torch HWC",
)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels(form, tmp_path):
    picture = read_picture(forms(tmp_path)[form])
    assert picture.size == (40, 30)
    assert np.array_equal(np.asarray(picture.load()), np.asarray(noise(40, 30)))


def test_equal_bytes_have_one_digest_and_are_equal_wherever_they_come_from(tmp_path):
    data = encoded(noise(40, 30))
    (tmp_path / "x.png").write_bytes(data)
    one, other = read_picture(data, "row 1"), read_picture(tmp_path / "x.png", "row 2")
    assert one == other and hash(one) == hash(other)
    assert one != read_picture(encoded(noise(40, 30, seed=1)))
    assert read_picture(noise(40, 30)) == read_picture(noise(40, 30)) != read_picture(noise(30, 40))
    assert pickle.loads(pickle.dumps(one)) == one


def test_what_waits_is_the_encoded_picture_not_its_pixels():
    data = encoded(Image.new("RGB", (1024, 768), "green"), "JPEG")
    assert len(pickle.dumps(read_picture(data))) < len(data) + 1000


REFUSED = {
    "remote": "https://example.com/cat.png",
    "broken": b"\x89PNG\r\n\x1a\nnothing follows",
    "no file": "/nowhere/cat.png",
    "bad base64": "data:image/png;base64,###",
    "float pixels": np.zeros((4, 4, 3), dtype=np.float32),
    "five channels": np.zeros((4, 4, 5), dtype=np.uint8),
    "16 bit": Image.new("I;16", (4, 4)),
    "32 bit": Image.new("I", (4, 4)),
    "float": Image.new("F", (4, 4)),
    "nothing": None,
    "empty dict": {"bytes": None, "path": None},
    "a number": 7,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shown_is_refused_by_row_and_column(what):
    with raises(DataError, "row 3", "'images'"):
        read_picture(REFUSED[what], "row 3, column 'images'")


def test_a_16_bit_file_is_refused_by_its_header():
    with pytest.raises(DataError, match="I;16"):
        read_picture(encoded(Image.new("I;16", (4, 4), 30000)))


def test_a_torn_file_is_refused_when_it_is_read():
    data = encoded(noise(200, 200).resize((200, 200)), "JPEG")
    picture = read_picture(data[: len(data) // 2], "row 5")
    with pytest.raises(DataError, match="row 5"):
        picture.load()


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "RGBA"])
def test_other_modes_become_rgb(mode):
    assert read_picture(Image.new(mode, (3, 2))).load().mode == "RGB"


def test_transparent_pixels_show_the_background_not_the_colour_under_them():
    hidden = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert read_picture(hidden).load().getpixel((0, 0)) == (255, 255, 255)
    assert read_picture(hidden, background="black").load().getpixel((0, 0)) == (0, 0, 0)
    assert read_picture(hidden) != read_picture(hidden, background="black")


def test_exif_rotation_is_applied_to_files_and_to_objects_alike():
    exif = Image.Exif()
    exif[274] = 6
    data = encoded(noise(40, 30), "JPEG", exif=exif)
    for form in (data, Image.open(io.BytesIO(data))):
        picture = read_picture(form)
        assert picture.size == picture.load().size == (30, 40)


def rotated(orientation=6, size=(40, 30), kind="JPEG"):
    """An object of PIL that its EXIF tag turns."""
    exif = Image.Exif()
    exif[274] = orientation
    return Image.open(io.BytesIO(encoded(noise(*size), kind, exif=exif)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_object_that_exif_turns_stays_upright_when_it_is_encoded_to_wait(orientation, kind):
    picture = read_picture(rotated(orientation, kind=kind))
    upright = np.asarray(picture.load())
    row = Placed(picture, 0, 1).to_dict()
    for waiting in (picture.encoded(), read_picture(picture.file_bytes()), Placed.of(**row).picture):
        assert waiting.size == picture.size == waiting.load().size
        assert np.array_equal(np.asarray(waiting.load()), upright)
    held = stored(picture)
    assert np.array_equal(np.asarray(read_picture(held).resized(tuple(held["size"])).load()), upright)


def odd(mode):
    """A picture of two colours in a mode of PIL."""
    image = noise(6, 4)
    if mode in ("La", "PA"):
        image = image.convert("LA")
    return image.convert("RGBA").convert(mode) if mode == "RGBa" else image.convert(mode)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"]
)
def test_an_object_of_any_mode_waits_and_shows_what_it_showed(mode):
    picture = read_picture(odd(mode))
    shown = np.asarray(picture.load())
    for waiting in (picture.encoded(), read_picture(picture.file_bytes())):
        assert np.array_equal(np.asarray(waiting.load()), shown)


def test_colours_that_cannot_be_shown_are_refused_by_row():
    with raises(DataError, "row 3", "'LAB'"):
        read_picture(Image.new("LAB", (4, 4)), "row 3, column 'images'")


def test_an_object_whose_file_is_torn_or_closed_is_refused_by_row():
    data = encoded(noise(200, 200), "JPEG")
    closed = Image.open(io.BytesIO(data))
    closed.close()
    for held in (Image.open(io.BytesIO(data[: len(data) // 2])), closed):
        with pytest.raises(DataError, match="row 3"):
            read_picture(held, "row 3")


def test_palettes_that_differ_in_transparency_alone_are_two_pictures():
    plain, hidden, alpha, file = (Image.new("P", (4, 4), 1) for _ in range(4))
    hidden.info["transparency"] = 1
    alpha.putpalette([0, 0, 0, 255, 9, 9, 9, 0], "RGBA")
    for one in (plain, hidden, file):
        one.putpalette([0, 0, 0, 9, 9, 9])
    file = Image.open(io.BytesIO(encoded(file, transparency=bytes([255, 0]))))
    pictures = [read_picture(one) for one in (plain, hidden, alpha, file)]
    assert len({pictures[0], pictures[1]}) == len({pictures[0], pictures[2]}) == len({pictures[0], pictures[3]}) == 2
    assert [one.load().getpixel((0, 0))[0] for one in pictures] == [9, 255, 255, 255]
    assert [one.encoded().load().getpixel((0, 0))[0] for one in pictures] == [9, 255, 255, 255]


def test_the_first_frame_of_an_animation_is_used_and_said(caplog):
    frames = [noise(8, 8, seed=i) for i in range(3)]
    picture = read_picture(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), "row 2")
    assert picture.load().size == (8, 8) and "row 2" in caplog.text


@pytest.mark.parametrize("size", [(1, 1), (10, 3000)])
def test_odd_shapes_are_read(size):
    assert read_picture(Image.new("RGB", size)).load().size == size


def test_columns_are_one_list_and_both_of_them_are_refused():
    assert pictures_of({"image": None}) == pictures_of({"images": None}) == pictures_of({"images": []}) == []
    assert pictures_of({"image": "a"}) == pictures_of({"images": ["a"]}) == ["a"]
    with raises(DataError):
        pictures_of({"image": "a", "images": ["b"]})


def test_pictures_inside_messages_make_a_row_a_row_of_pictures():
    inside = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    text = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "images": []}
    assert has_pictures([text, inside]) and not has_pictures([text, {"prompt": "x"}])


def user(*content):
    return {"role": "user", "content": list(content)}


IMAGE, SAYS = {"type": "image"}, {"type": "text", "text": "which?"}


@pytest.mark.parametrize(
    ("messages", "images", "blocks", "found"),
    [
        ([user(IMAGE, SAYS)], ["a"], [IMAGE, SAYS], ["a"]),
        ([{"role": "user", "content": "which?"}], ["a", "b"], [IMAGE, IMAGE, SAYS], ["a", "b"]),
        ([user({"type": "image", "text": None, "image": None}, {**SAYS, "image": None})], ["a"], [IMAGE, SAYS], ["a"]),
        ([user({"type": "image", "image": "x"}, IMAGE, SAYS)], ["a"], [IMAGE, IMAGE, SAYS], ["x", "a"]),
        ([user({"type": "image_url", "image_url": {"url": "x"}}, SAYS)], None, [IMAGE, SAYS], ["x"]),
        ([user({"type": "image", "base64": "eA=="}, SAYS)], None, [IMAGE, SAYS], ["data:;base64,eA=="]),
        ([user(SAYS)], [], [SAYS], []),
    ],
)  # fmt: skip
def test_pictures_stand_in_reading_order_and_blocks_are_empty(messages, images, blocks, found):
    made, pictures = conversation_pictures(messages, images)
    assert made[0]["content"] == blocks and pictures == found


def test_a_placeholder_in_an_early_turn_is_not_followed_by_others():
    later = {"role": "user", "content": "and now?"}
    made, pictures = conversation_pictures([user(IMAGE, SAYS), later], ["a"])
    assert pictures == ["a"] and made[1]["content"] == "and now?"


@pytest.mark.parametrize(("count", "images"), [(2, ["a"]), (1, ["a", "b"]), (1, [])])
def test_as_many_places_as_there_are_not_pictures_are_refused(count, images):
    with pytest.raises(DataError, match=f"{count} empty image blocks and there are {len(images)} images"):
        conversation_pictures([user(*[IMAGE] * count, SAYS)], images)


def test_blocks_that_are_not_trained_on_are_refused_and_not_dropped():
    with pytest.raises(DataError, match="'video'"):
        conversation_pictures([user({"type": "video", "video": "x"})], None)


def test_what_is_written_down_holds_no_pixels():
    messages = [user({"type": "image", "image": noise(4, 4)}, SAYS), {"role": "assistant", "content": "a"}]
    assert without_pictures(messages) == [user(IMAGE, SAYS), {"role": "assistant", "content": "a"}]


def test_a_dataset_is_read_without_decoding():
    import datasets

    features = datasets.Features({"images": datasets.List(datasets.Image()), "text": datasets.Value("string")})
    dataset = undecoded(datasets.Dataset.from_list([{"images": [noise(40, 30)], "text": "x"}], features=features))
    (held,) = pictures_of(dataset[0])
    assert set(held) == {"bytes", "path"} and read_picture(held).size == (40, 30)


def test_importing_the_package_does_not_import_an_image_library():
    code = "import sys, posttrain, posttrain.extensions.images.picture, posttrain.extensions.images.processors; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
