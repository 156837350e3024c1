"""Processors of ten families: the same ids and tensors one picture at a time as all at once."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from posttrain.data.chat import is_processor
from posttrain.errors import DataError, ModelError
from posttrain.extensions.images.picture import conversation_pictures, read_picture
from posttrain.extensions.images.processors import PictureProcessor, load_processor
from posttrain.extensions.page.inspect_command import seen_by_model
from tests.vision_families import NAMES, UNKNOWN, build, noise
from tests.wordings import raises


@pytest.fixture(scope="module", params=NAMES)
def made(request):
    _, processor = build(request.param)
    return request.param, processor, PictureProcessor(processor)


def test_ids_and_tensors_of_pictures_apart_are_those_of_the_row_at_once(made):
    name, processor, ours = made
    held = [read_picture(noise(84, 56)), read_picture(noise(56, 112, seed=1))]
    text = f"{ours.placeholder} and {ours.placeholder} which?"
    ids, placed = ours.encode(text, held, prompt=True)
    whole = processor(text=[text], images=[[p.load() for p in held]], return_tensors="pt", add_special_tokens=False)
    assert ids == whole["input_ids"][0].tolist()
    assert sum(one.count for one in placed) == ids.count(ours.token_id)
    assert all(
        ids[one.start] == ours.token_id and (not one.start or ids[one.start - 1] != ours.token_id) for one in placed
    )
    for key, value in ours.join([ours.prepare(p) for p in held]).items():
        assert torch.equal(value, whole[key])
    assert all((one.grid is not None) == name.startswith("qwen") for one in placed)


def test_pictures_of_one_size_need_one_expansion(made, monkeypatch):
    _, _, ours = made
    ours.encode(ours.placeholder, [read_picture(noise(70, 70))])
    monkeypatch.setattr(ours, "_expand", lambda picture: pytest.fail("it was expanded again"))
    ours.encode(ours.placeholder, [read_picture(noise(70, 70, seed=9))])


def test_conversations_are_rendered_with_a_place_for_every_picture(made):
    _, _, ours = made
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "or"}, {"type": "image"}],
        }
    ]
    blocks, pictures = conversation_pictures(messages, ["b"])
    text = ours.render(blocks, add_generation_prompt=True)
    assert text.count(ours.placeholder) == 2 and pictures == ["a", "b"] and "assistant" in text


def test_a_placeholder_that_a_user_types_stays_text_and_is_no_place_of_a_picture(made):
    _, _, ours = made
    held, typed = [read_picture(noise(84, 56))], list(ours.controls)
    begin = "" if ours.family.block == "prompt" else f"what {typed[0]} is "
    ask = lambda text: [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]  # noqa: E731
    plain, placed = ours.encode(ours.render(ask("is it?")), held, prompt=True)
    hostile, same = ours.encode(ours.render(ask(f"{begin}{''.join(typed)} it?")), held, prompt=True)
    assert same == placed and all(plain.count(one) == hostile.count(one) for one in ours.controls.values())
    assert f"{begin}{''.join(typed)} it?" in ours.tokenizer.decode(hostile)


def test_a_placeholder_that_a_user_types_is_refused_by_role_where_it_cannot_stay_text(made, monkeypatch):
    _, _, ours = made
    monkeypatch.setitem(vars(ours), "escapes", False)
    for typed in list(ours.controls)[:4]:
        with pytest.raises(DataError, match=r"PT-G008: a user message"):
            ours.render([{"role": "user", "content": f"what is {typed}?"}])


def test_a_template_that_drops_images_is_refused(made, monkeypatch):
    _, processor, ours = made
    monkeypatch.setattr(processor, "chat_template", "{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}")
    with pytest.raises(DataError, match="PT-G013"):
        ours.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}])


def test_more_pictures_than_places_and_cut_placeholders_are_refused(made):
    _, _, ours = made
    held = [read_picture(noise(84, 56))]
    for text in ("which?", f"{ours.placeholder} or {ours.placeholder}"):
        with pytest.raises(DataError, match="PT-G002"):
            ours.encode(text, held)
    ids, placed = ours.encode(f"{ours.placeholder} which?", held)
    with pytest.raises(DataError, match="PT-G011"):
        ours.place(ids[: placed[0].start + 1], held)


def test_two_pictures_need_a_token_between_them_where_a_run_is_one_image():
    _, processor = build("qwen2_vl")
    ours = PictureProcessor(processor)
    with pytest.raises(DataError, match="without a token between"):
        ours.encode(ours.placeholder * 2, [read_picture(noise(84, 56))] * 2)


def test_a_shape_that_the_processor_refuses_is_named():
    _, processor = build("qwen2_vl")
    with pytest.raises(DataError, match="row 4"):
        PictureProcessor(processor).expansion(read_picture(Image.new("RGB", (10, 3000)), "row 4"))


def test_one_pixel_is_a_picture(made):
    _, _, ours = made
    ids, (placed,) = ours.encode(ours.placeholder, [read_picture(Image.new("RGB", (1, 1), "red"))])
    assert placed.count > 0 and ids.count(ours.token_id) == placed.count


def test_what_does_not_tell_how_it_writes_pictures_is_refused_with_the_reason(tiny_tokenizer):
    assert not is_processor(tiny_tokenizer)

    class OtherProcessor:
        pass

    with pytest.raises(ModelError, match=r"OtherProcessor.*'OtherProcessor' object is not callable"):
        PictureProcessor(OtherProcessor())


@pytest.mark.parametrize("name", UNKNOWN)
def test_ids_and_tensors_of_an_unknown_family_are_those_of_its_processor(name):
    _, processor = build(name)
    reader = PictureProcessor(processor)
    held = [read_picture(noise(84, 56, 1))]
    text = f"a {reader.placeholder} b"
    ids, (placed,) = reader.encode(text, held)
    whole = processor(text=[text], images=[[held[0].load()]], return_tensors="pt", add_special_tokens=False)
    assert ids == whole["input_ids"][0].tolist()
    assert placed.count == ids.count(reader.token_id) and ids[placed.start] == reader.token_id
    assert all(torch.equal(value, whole[key]) for key, value in reader.prepare(held[0]).items())


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "internvl"])
def test_a_saved_processor_is_loaded_without_torchvision(name, tmp_path):
    model, processor = build(name)
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    picture = read_picture(noise(84, 56))
    one, other = PictureProcessor(processor), PictureProcessor(loaded)
    text = f"{one.placeholder} which?"
    assert one.encode(text, [picture]) == other.encode(text, [picture])
    assert all(torch.equal(value, other.prepare(picture)[key]) for key, value in one.prepare(picture).items())


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(ModelError, match="no processor"):
        load_processor(str(tmp_path))


def test_a_sequence_is_shown_with_one_piece_a_picture():
    from posttrain.data.formats import shown_pieces, shown_prompt
    from posttrain.extensions.images.picture import read_picture
    from posttrain.extensions.images.processors import PictureProcessor
    from posttrain.types import Row
    from tests.vision_families import build, noise

    for name in ("llava", "idefics3", "qwen2_vl"):
        reader = PictureProcessor(build(name)[1])
        ids, placed = reader.encode(
            f"a {reader.placeholder} b {reader.placeholder}", [read_picture(noise(84, 56, i)) for i in (1, 2)]
        )
        answer = reader.tokenizer("yes", add_special_tokens=False)["input_ids"]
        row = Row(ids, [answer], [[1] * 3], pictures=[placed, []])
        pieces = shown_pieces(reader.tokenizer, [*ids, *answer], [0] * len(ids) + [1] * 3, row)
        assert [text for text, _ in pieces if text.startswith("[image")] == [
            p.picture.label(i, p.count) for i, p in enumerate(placed, 1)
        ]
        assert pieces[-1] == ("yes", True) and reader.placeholder not in shown_prompt(reader.tokenizer, ids, placed)
    plain = shown_pieces(reader.tokenizer, answer, [0, 1, 1], Row([], [answer], [[0, 1, 1]]))
    assert plain == [("y", False), ("es", True)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "gemma3", "idefics3", "llava_next", "internvl"])
def test_what_the_model_sees_is_the_picture_after_resizing(name):
    import numpy as np

    _, processor = build(name)
    reader = PictureProcessor(processor)
    picture = read_picture(noise(56, 56, 3))
    seen = seen_by_model(reader, picture)
    # The last tile is the whole picture in every family that cuts one; squares of noise survive the resizing.
    whole = seen if name not in ("llava_next",) else seen.crop((0, 0, seen.height, seen.height))
    if whole.width != whole.height:
        whole = seen.crop((seen.width - seen.height, 0, seen.width, seen.height))
    wanted = picture.load().resize(whole.size)
    assert np.abs(np.asarray(whole, int) - np.asarray(wanted, int)).mean() < 12


def test_without_transformers_marks_a_conversation_is_rendered_and_typed_placeholders_are_refused(monkeypatch):
    from transformers.utils import chat_template_utils

    _, processor = build("qwen2_vl")
    ours = PictureProcessor(processor)
    monkeypatch.delattr(chat_template_utils, "mark_control_tokens")
    block = [{"type": "image"}, {"type": "text", "text": "which?"}]
    assert ours.render([{"role": "user", "content": block}]).count(ours.placeholder) == 1
    typed = [{"type": "text", "text": f"a {ours.placeholder} b"}]
    with pytest.raises(DataError, match="PT-G008"):
        ours.render([{"role": "user", "content": typed}])


def test_a_version_of_transformers_whose_processors_lack_placeholders_is_named(monkeypatch):
    _, processor = build("qwen2_vl")
    monkeypatch.setattr("transformers.__version__", "5.14.0")
    with raises(ModelError, "transformers>=5.15", "5.14.0"):
        PictureProcessor(processor)
