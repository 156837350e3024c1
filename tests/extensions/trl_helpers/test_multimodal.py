"""Collators of raw rows with images: shapes and sums that TRL 1.16 gave for the same rows, and what it cuts in silence."""

import pytest
import torch

import posttrain
from posttrain import (
    DataCollatorForVisionLanguageChatML,
    DataCollatorForVisionLanguageModeling,
    DataCollatorForVisionPreference,
    DataCollatorForVisionUnpairedPreference,
)
from posttrain.errors import ConfigError, DataError
from tests.methods.test_vision_trainers import assistant, png, user
from tests.vision_families import build, noise


def rows():
    """Two rows, the second with two images; one image as `datasets` keeps it undecoded."""
    first = {"prompt": user("which?", 1), "images": [png(noise(84, 56, 1))], "label": True}
    second = {"prompt": user("", 2), "images": [noise(56, 112, 2), noise(70, 70, 3)], "label": False}
    second["prompt"][0]["content"].insert(1, {"type": "text", "text": " or "})
    second["prompt"][0]["content"][-1]["text"] = "?"
    said = {"completion": ("the left one", "no"), "chosen": ("yes it is", "a"), "rejected": ("no", "bcd")}
    return [row | {k: assistant(v[i]) for k, v in said.items()} for i, row in enumerate((first, second))]


def documents():
    return [{"messages": row["prompt"] + row["completion"], "images": row["images"]} for row in rows()]


# Of TRL 1.16 and transformers 5.23 on these rows: tokens of a row by kind, and the tensors of images.
GOLDEN = {
    "gemma3": {"whole": 49, "pairs": 49, "kl": 58, "prompt": 44, "pixel_values": (3, 3, 28, 28)},
    "llava_next": {"whole": 68, "pairs": 69, "kl": 78, "prompt": 64, "pixel_values": (3, 5, 3, 28, 28)},
    "qwen2_5_vl": {"whole": 47, "pairs": 45, "kl": 54, "prompt": 40, "pixel_values": (72, 1176)},
}
EXTRA = {"gemma3": "token_type_ids", "llava_next": "image_sizes", "qwen2_5_vl": "mm_token_type_ids"}


@pytest.mark.parametrize("name", GOLDEN)
def test_batches_have_the_shapes_of_trl(name):
    _, processor = build(name)
    golden, pixels = GOLDEN[name], GOLDEN[name]["pixel_values"]
    whole = DataCollatorForVisionLanguageModeling(processor)(documents())
    rounded = DataCollatorForVisionLanguageModeling(processor, pad_to_multiple_of=8)(documents())
    pairs = DataCollatorForVisionPreference(processor)(rows())
    judged = DataCollatorForVisionUnpairedPreference(processor)(rows())
    gold = DataCollatorForVisionLanguageChatML(processor)(rows())
    assert whole["input_ids"].shape == whole["labels"].shape == (2, golden["whole"])
    assert rounded["input_ids"].shape == (2, -(-golden["whole"] // 8) * 8)
    assert pairs["input_ids"].shape == pairs["completion_mask"].shape == (4, golden["pairs"])
    assert (judged["input_ids"].shape, judged["KL_input_ids"].shape) == ((2, golden["whole"]), (2, golden["kl"]))
    assert gold["prompts"].shape == (2, golden["prompt"]) and gold["byte_offsets"].shape == (2, golden["whole"], 2)
    assert tuple(whole["pixel_values"].shape) == tuple(judged["pixel_values"].shape) == pixels
    assert pairs["pixel_values"].shape[0] == 2 * pixels[0]
    assert all(EXTRA[name] in batch for batch in (whole, pairs, judged, gold))
    assert judged["label"].tolist() == [True, False]


@pytest.mark.parametrize("name", GOLDEN)
def test_only_answers_are_trained_and_padding_is_on_the_right(name):
    _, processor = build(name)
    batch = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)(rows())
    every = DataCollatorForVisionLanguageModeling(processor)(rows())
    for i, said in enumerate(("the left one", "no")):
        trained = batch["labels"][i][batch["labels"][i] != -100]
        assert processor.tokenizer.decode(trained) == f"{said}<|im_end|>\n"
        mask = batch["attention_mask"][i]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert torch.equal(every["labels"][i] != -100, mask.bool())
    pairs = DataCollatorForVisionPreference(processor)(rows())
    said = [processor.tokenizer.decode(pairs["input_ids"][i][pairs["completion_mask"][i] == 1]) for i in range(4)]
    assert said == [f"{one}<|im_end|>\n" for one in ("yes it is", "a", "no", "bcd")]


def test_bytes_and_texts_of_distillation():
    _, processor = build("llava_next")
    batch = DataCollatorForVisionLanguageChatML(processor)(rows())
    assert batch["original_prompt_text"] == ["which?", " or \n?"]
    assert batch["original_completion_text"] == ["the left one", "no"]
    offsets = batch["byte_offsets"][1][batch["labels"][1] != -100]
    # "n", "o", the end of the turn in its ten characters, and a line end.
    assert offsets.tolist() == [[0, 1], [1, 2], [2, 12], [12, 13]]


def test_given_rows_stay_as_they_are():
    _, processor = build("llava_next")
    given = rows()
    DataCollatorForVisionPreference(processor)(given)
    assert given[1]["prompt"] == rows()[1]["prompt"] and isinstance(given[0]["chosen"], list)


def test_rows_without_any_image_are_a_batch_of_text():
    _, processor = build("gemma3")
    batch = DataCollatorForVisionLanguageModeling(processor)([{"messages": user("hi") + assistant("ho"), "images": []}])
    assert "pixel_values" not in batch


def test_a_cut_through_an_image_is_refused_and_one_behind_it_is_made():
    _, processor = build("llava_next")
    assert DataCollatorForVisionPreference(processor, max_length=66)(rows())["input_ids"].shape == (4, 66)
    with pytest.raises(DataError, match="max_length=30"):
        DataCollatorForVisionPreference(processor, max_length=30)(rows())


def test_what_cannot_be_is_refused():
    _, processor = build("llava_next")
    with pytest.raises(NotImplementedError):
        DataCollatorForVisionPreference(processor, pad_to_multiple_of=8)(rows())
    with pytest.raises(ConfigError):
        DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)(documents())
    with pytest.raises(DataError, match="rejected"):
        DataCollatorForVisionPreference(processor)([{k: v for k, v in rows()[0].items() if k != "rejected"}])
    for path in ("sft_trainer.DataCollatorForVisionLanguageModeling", "dpo_trainer.DataCollatorForVisionPreference"):
        module, name = path.split(".")
        assert getattr(__import__(f"posttrain.trainer.{module}", fromlist=[name]), name) is getattr(posttrain, name)
