"""Images by their sizes alone: what does not fit, what has no place, what cannot be read; with a real image processor."""

import io
import types

import datasets
import numpy as np
import pytest

from posttrain.checks import images as checks
from posttrain.checks.images import image_size, unreadable
from posttrain.checks.registry import Context
from tests.wordings import raises

Image = pytest.importorskip("PIL.Image")


def png(height, width):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def qwen():
    """Qwen2-VL's image processor, made here: patches of 14 pixels, four of them a token."""
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)


def processor_of(qwen, tokenizer):
    return types.SimpleNamespace(image_processor=qwen, tokenizer=tokenizer)


@pytest.mark.parametrize("size", [(56, 56), (100, 300), (280, 420), (1000, 1400)])
def test_tokens_counted_from_a_size_are_those_that_the_processor_makes_of_the_pixels(qwen, size):
    (counted,) = checks.image_tokens(qwen, [size])
    made = qwen(images=[Image.new("RGB", (size[1], size[0]))], return_tensors="pt")
    assert counted == int(made["image_grid_thw"].prod()) // qwen.merge_size**2


def test_a_processors_own_function_is_preferred_and_one_without_any_says_nothing():
    class Whole:
        def _get_num_multimodal_tokens(self, image_sizes=None):
            return {"num_image_tokens": [height * width // 100 for height, width in image_sizes]}

    assert checks.image_tokens(Whole(), [(10, 20), (30, 10)]) == [2, 3]
    assert checks.image_tokens(object(), [(10, 20)]) is None
    rows = [checks.ImageRow(0, ((10, 20),), 5)]
    assert checks.check_image_fit(rows, lambda sizes: None, limit=1) is None


def test_a_row_beyond_the_limit_is_told_with_its_numbers_and_two_ways_out(qwen):
    rows = [checks.ImageRow(number, ((280, 280),), 20) for number in range(10)]
    rows.append(checks.ImageRow(88, ((1000, 1400),) * 3, 212))

    def tokens(sizes):
        return checks.image_tokens(qwen, sizes)

    total = sum(tokens(rows[-1].sizes))
    found = checks.check_image_fit(rows, tokens, limit=1024, completion=100)
    assert (found.code, found.severity) == ("PT-G001", "error")
    assert (
        f"row 88: 3 images -> {total} tokens + 212 text + 100 to be generated > max_length=1024. 1 of 11 rows"
        in found.what
    )
    assert f"max_length to {total + 312} or more" in found.fix
    pixels = int(found.fix.split("max_pixels to ")[1].split()[0])
    smaller = type(qwen)(min_pixels=56 * 56, max_pixels=pixels)
    assert checks.check_image_fit(rows, lambda s: checks.image_tokens(smaller, s), limit=1024, completion=100) is None
    assert checks.check_image_fit(rows, tokens, limit=total + 312, completion=100) is None
    assert checks.check_image_fit(rows, tokens, limit=None) is None
    many = [checks.ImageRow(number, ((280, 280),), 20) for number in range(300)] + rows[-1:]
    assert (
        checks.check_image_fit(many, tokens, limit=1024).severity == "warning"
    )  # One of 301: less than half a percent.


def test_placeholders_and_images_must_be_as_many():
    block = {"type": "image"}
    example = {
        "images": [png(8, 8)],
        "messages": [{"role": "user", "content": [block, block, {"type": "text", "text": "x"}]}],
    }
    (row,) = checks.image_rows([example], lambda row: 1, start=7)
    assert (row.number, row.sizes, row.places) == (7, ((8, 8),), 2)
    (found,) = checks.check_image_places([row])
    assert (found.code, found.severity) == ("PT-G002", "error") and "row 7: 2 and 1" in found.what
    assert (
        checks.check_image_places([checks.ImageRow(0, ((8, 8),), 1, 1), checks.ImageRow(1, ((8, 8),), 1, None)]) == []
    )


def test_sizes_come_from_headers_of_files_bytes_and_objects(tmp_path):
    data = png(30, 50)
    (tmp_path / "a.png").write_bytes(data)
    for picture in (data, {"bytes": data, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}):
        assert image_size(picture) == (30, 50)
    assert image_size(Image.new("RGB", (50, 30))) == (30, 50)
    assert unreadable(data) == "" and unreadable(Image.new("RGB", (5, 3))) == ""
    assert unreadable(data[: len(data) // 2])
    for nothing in (None, {"bytes": None, "path": None}):
        with raises(ValueError):
            image_size(nothing)


def test_a_dataset_with_images_is_looked_at_without_decoding_them(qwen, tiny_tokenizer, monkeypatch):
    def row(data, **more):
        return {
            "images": [{"bytes": data, "path": None}],
            "prompt": [{"role": "user", "content": "What is it?"}],
            **more,
        }

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        }
    )
    good, large = png(60, 60), png(900, 900)
    data = datasets.Dataset.from_list([row(good), row(good)], features=features)
    args = types.SimpleNamespace(max_length=64, max_completion_length=0)

    def found(dataset, **limits):
        context = Context(
            "sft", types.SimpleNamespace(**(vars(args) | limits)), tokenizer=processor_of(qwen, tiny_tokenizer)
        )
        context.train_dataset = dataset
        return [finding for finding in checks.images(context) if finding is not None]

    assert found(data) == []
    decoded = []
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *a, **k: decoded.append(1))
    (finding,) = found(datasets.Dataset.from_list([row(good), row(large)], features=features))
    assert finding.code == "PT-G001" and "row 1: 1 images" in finding.what
    torn = png(70, 70)
    (finding,) = found(datasets.Dataset.from_list([row(good), row(torn[: len(torn) // 2])], features=features))
    assert (finding.code, finding.severity) == ("PT-G003", "error") and "row 1" in finding.what
    (finding,) = found(datasets.Dataset.from_list([row(good), row(b"no image at all")], features=features))
    assert finding.code == "PT-G003"
    assert decoded == []
    text_only = Context("sft", args, tokenizer=tiny_tokenizer, train_dataset=data)
    assert checks.images(text_only) == []


# What images are, and what they do -----------------------------------------------------------------------------------


def picture(seed=0, width=64, height=64, **save):
    """Coloured noise as encoded bytes."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, **({"format": "PNG"} | save))
    return buffer.getvalue()


def codes(rows):
    return {found.code for found in checks.check_pictures(list(enumerate(rows)))}


def test_clean_images_give_no_finding():
    assert codes([picture(i) for i in range(20)]) == set()


def transparent():
    buffer = io.BytesIO()
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def turned():
    exif = Image.Exif()
    exif[274] = 6
    return picture(format="JPEG", exif=exif)


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("PT-G006", [picture(width=20)]),
        ("PT-G007", [picture(1)] * 20),
        ("PT-G007", [Image.new("RGB", (64, 64), "white")]),
        ("PT-G009", [transparent()]),
        ("PT-G009", [turned()]),
        ("PT-G010", ["https://example.com/cat.png"]),
        ("PT-G010", [{"bytes": None, "path": "http://example.com/cat.png"}]),
        ("PT-G014", [{"bytes": picture(), "path": "cat.jpg"}]),
    ],
)
def test_images_that_are_not_what_they_seem_are_found(code, broken):
    assert code in codes([*broken, *(picture(i) for i in range(2, 3))])


def test_a_set_whose_images_are_small_is_told_by_a_trainer(tmp_path):
    from posttrain import SFTConfig, SFTTrainer
    from tests.algorithms.test_vision_trainers import QUICK, assistant, user
    from tests.vision_families import build

    model, processor = build("llava")
    rows = [
        {"prompt": user("which?", 1), "completion": assistant("a"), "images": [{"bytes": picture(i, 20), "path": None}]}
        for i in range(4)
    ]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    assert "PT-G006" in {found.code for found in trainer.preflight.told}


@pytest.fixture(scope="module")
def seeing():
    """A tiny LLaVA with its processor, and a batch with a picture."""
    from posttrain.data.forest import Layout, collate
    from posttrain.models.vision import install_pictures, probe_rows
    from tests.vision_families import build

    model, processor = build("llava")
    install_pictures(model, processor)
    return model, collate(probe_rows(model), pad_token_id=256, layout=Layout())[0]


def test_images_that_do_not_reach_the_model_are_found(seeing):
    import torch

    model, batch = seeing
    assert checks.check_reach(model, batch) is None
    projector = model.model.multi_modal_projector
    before = {name: value.clone() for name, value in projector.state_dict().items()}
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.zero_()
    found = checks.check_reach(model, batch)
    projector.load_state_dict(before)
    assert found is not None and (found.code, found.severity) == ("PT-G005", "error")


def test_a_trained_tower_without_gradient_is_found_in_steps_with_images_alone(seeing):
    model, _ = seeing
    norms = {name: None if "vision_tower" in name else 1.0 for name, _ in model.named_parameters()}
    assert checks.check_tower_gradients(norms, model, True).code == "PT-G012"
    assert checks.check_tower_gradients(norms, model, False) is None
    assert checks.check_tower_gradients(dict.fromkeys(norms, 1.0), model, True) is None


def test_a_reward_that_other_images_give_too_is_found():
    assert checks.check_exchanged(0.7, 0.66).code == "PT-G017"
    assert checks.check_exchanged(0.7, 0.2) is None and checks.check_exchanged(0.0, 0.0) is None
