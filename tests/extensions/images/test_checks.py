"""Images by their sizes alone: what does not fit, what has no place, what cannot be read; with a real image processor."""

import io
import types
from dataclasses import replace

import datasets
import numpy as np
import pytest

from posttrain.checks.registry import Context
from posttrain.extensions.images import checks

Image = pytest.importorskip("PIL.Image")


def png(height, width):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def pictured_row(number, counts, text):
    """A prompt of so many tokens of text, with pictures of so many placeholders."""
    from posttrain.extensions.images.picture import Placed, read_picture
    from posttrain.types import Row

    placed = [Placed(read_picture(png(8, 8)), 0, count) for count in counts]
    return Row([1] * (sum(counts) + text), [], [], pictures=[placed])


def test_a_row_beyond_the_context_is_told_with_its_numbers_and_a_way_out():
    rows = [pictured_row(number, (100,), 20) for number in range(10)]
    rows.append(pictured_row(10, (400, 300, 500), 212))
    found = checks.check_image_fit(rows, 1024, 100)
    assert (found.code, found.severity, found.where) == ("PT-G001", "error", "rows 10")
    assert (
        "row 10: 3 images -> 1200 tokens + 212 text + 100 to be generated > the model's context of 1024" in found.what
    )
    assert "1 of 11 rows" in found.what
    # Three images of 237 tokens, 212 of text and 100 more are 1023.
    assert "image_max_tokens=237 " in found.fix
    assert checks.check_image_fit(rows, 1512, 100) is None
    assert checks.check_image_fit(rows, 1511, 100) is not None
    many = [pictured_row(number, (100,), 20) for number in range(300)] + rows[-1:]
    # One of 301: less than half a percent.
    assert checks.check_image_fit(many, 1024).severity == "warning"
    # Rows of text have a check of their own.
    text = pictured_row(0, (), 5000)
    assert checks.check_image_fit([text], 1024) is None


def test_a_set_is_looked_at_whole_where_it_is_small_and_no_picture_is_decoded_by_the_dataset(monkeypatch):
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        }
    )
    torn = png(70, 70)
    broken = {"torn": torn[: len(torn) // 2], "no image": b"no image at all"}
    good = [picture(i) for i in range(30)]

    def found(files, fit="error"):
        rows = [{"images": [{"bytes": f, "path": None}], "prompt": [{"role": "user", "content": "?"}]} for f in files]
        args = types.SimpleNamespace(image_fit=fit)
        context = Context("sft", args, train_dataset=datasets.Dataset.from_list(rows, features=features))
        return checks.pictures(context)

    decoded = []
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *a, **k: decoded.append(1))
    assert found(good) == []
    for data in broken.values():
        (one,) = found([*good[:7], data, *good[7:]])
        assert (one.code, one.severity, one.where) == ("PT-G003", "error", "rows 7")
        assert found([data], "drop")[0].severity == "warning"
    assert decoded == []


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
    from tests.methods.test_vision_trainers import QUICK, assistant, user
    from tests.vision_families import build

    model, processor = build("llava")
    rows = [
        {"prompt": user("which?", 1), "completion": assistant("a"), "images": [{"bytes": picture(i, 20), "path": None}]}
        for i in range(4)
    ]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    assert "PT-G006" in {found.code for found in trainer.preflight.reported}


@pytest.fixture(scope="module")
def seeing():
    """A tiny LLaVA with its processor, and a batch with a picture."""
    from posttrain.data.forest import Layout, collate
    from posttrain.extensions.images.encoder import install_pictures
    from tests.vision_families import build

    model, processor = build("llava")
    encoder = install_pictures(model, processor)
    return model, collate(encoder.probe_rows(), pad_token_id=256, layout=Layout())[0]


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


def test_a_trained_tower_without_gradient_is_found(seeing):
    model, _ = seeing
    norms = {name: None if "vision_tower" in name else 1.0 for name, _ in model.named_parameters()}
    assert checks.check_tower_gradients(norms, model).code == "PT-G012"
    assert checks.check_tower_gradients(dict.fromkeys(norms, 1.0), model) is None


def test_a_reward_that_other_images_give_too_is_found():
    assert checks.check_exchanged(0.7, 0.66).code == "PT-G017"
    assert checks.check_exchanged(0.7, 0.2) is None and checks.check_exchanged(0.0, 0.0) is None


def test_nothing_is_generated_behind_an_answer_that_is_there():
    rows = [replace(pictured_row(0, (400,), 100), completions=[[1] * 12], loss_masks=[[1] * 12])]
    assert checks.check_image_fit(rows, 512, 512) is None
    assert "+ 0 to be" not in checks.check_image_fit(rows, 511, 512).what


def test_a_run_without_a_dataset_has_no_images_to_look_at():
    """An environment writes the prompts, and its tools show images: the check failed on that, and said so."""
    context = Context("grpo", types.SimpleNamespace(image_fit="error"), train_dataset=None)
    assert checks.pictures(context) == []
