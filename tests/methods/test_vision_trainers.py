"""SFT, DPO and KTO on rows with pictures: losses and gradients are those of each sequence alone with its own pixels."""

from __future__ import annotations

import base64
import io
import json
import math
import random

import datasets
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing

from posttrain import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from posttrain.data.forest import to_rows
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.extensions.images.encoder import tower_parameters
from posttrain.extensions.images.picture import read_picture
from posttrain.extensions.page.build import render
from posttrain.extensions.page.run import read_run
from posttrain.models.heads import picture_encoder
from tests.vision_families import build, noise

FAMILIES = ("llava", "qwen2_5_vl", "gemma3", "idefics3", "glm4v", "ovis2")
QUICK = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "max_length": None,
}


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def user(text, images=0):
    return [{"role": "user", "content": [*[{"type": "image", "text": None}] * images, {"type": "text", "text": text}]}]


def assistant(text):
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def rows(*answers):
    """Rows with one, no, two and one picture, and what each column of answers says."""
    images = [[noise(84, 56, 1)], [], [noise(56, 112, 2), noise(70, 70, 3)], [noise(84, 56, 4)]]
    found = [
        {"prompt": user(f"which {i}?", len(held)), "images": [png(one) for one in held],
         **{name: assistant(f"{name[0]}{i} is it") for name in answers}}
        for i, held in enumerate(images)
    ]  # fmt: skip
    return datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))


def answer_logits(model, processor, example, answer):
    """Logits before each token of an answer (messages or ids) and its ids, by the processor's own tensors and the model's own
    forward."""
    pictures = [read_picture(one).load() for one in example["images"]]
    filled = iter(pictures)
    prompt = [
        {
            **m,
            "content": [{"type": "image", "image": next(filled)} if b["type"] == "image" else b for b in m["content"]],
        }
        for m in example["prompt"]
    ]
    begin = processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = dict(processor(text=[begin], images=[pictures] if pictures else None, return_tensors="pt"))
    tail = answer
    if isinstance(answer[0], dict):
        whole = processor.apply_chat_template(prompt + answer, tokenize=False)
        tail = processor.tokenizer(whole[len(begin) :], add_special_tokens=False)["input_ids"]
    ids = torch.cat([inputs["input_ids"], torch.tensor([tail])], 1)
    inputs = {k: v for k, v in inputs.items() if k not in ("attention_mask", "input_ids")}
    for key in ("mm_token_type_ids", "token_type_ids"):
        if key in inputs:
            inputs[key] = torch.cat([inputs[key], torch.zeros(1, len(tail), dtype=torch.long)], 1)
    logits = model(input_ids=ids, **inputs, use_cache=False).logits[0].float()
    return logits[-len(tail) - 1 : -1], tail


def alone(model, processor, example, answer):
    """Log-probs of an answer's tokens."""
    logits, tail = answer_logits(model, processor, example, answer)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tail)[:, None])[:, 0]


def first_loss(trainer):
    trainer.train()
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_sft_loss_is_that_of_each_sequence_alone(name, tmp_path):
    model, processor = build(name)
    dataset = rows("completion")
    plain = dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))
    with torch.no_grad():
        logps = [alone(model, processor, row, row["completion"]) for row in plain]
    args = SFTConfig(str(tmp_path), learning_rate=0.0, logging_steps=1, gradient_checkpointing=False, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    assert trainer.layout.kind == ("padded" if name == "ovis2" else "tree")
    assert first_loss(trainer) == pytest.approx(-float(torch.cat(logps).mean()), abs=1e-4)


def test_a_document_may_begin_with_an_image_in_tiles(tmp_path):
    """Rows of tiles end in line breaks, the first tokens that are trained: they stand inside the image."""
    model, processor = build("idefics3")
    picture = noise(112, 70)
    inputs = processor(
        text=["<image> a cat<|im_end|>"], images=[[picture]], return_tensors="pt", add_special_tokens=False
    )
    inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    with torch.no_grad():
        logps = torch.log_softmax(model(**inputs, use_cache=False).logits[0, :-1].float(), -1)
    held = datasets.Dataset.from_list([{"text": "<image> a cat", "images": [png(picture)]}])
    args = SFTConfig(str(tmp_path), learning_rate=0.0, logging_steps=1, gradient_checkpointing=False, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=held, processing_class=processor)
    (row,) = trainer.train_dataset
    assert row["input_ids"] == inputs["input_ids"][0].tolist()
    trained = [(at, token) for at, token in enumerate(row["labels"][1:]) if token != -100]
    assert first_loss(trainer) == pytest.approx(-float(torch.stack([logps[one] for one in trained]).mean()), abs=1e-4)


@pytest.mark.parametrize("written", [False, True])
def test_a_template_without_the_bos_that_the_processor_adds_to_prompts_is_told(written, tmp_path, caplog):
    model, processor = build("llava")
    processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<bos> $A", special_tokens=[("<bos>", 257)]
    )
    processor.chat_template = ("{{ bos_token }}" if written else "") + processor.chat_template
    processor.tokenizer.chat_template = None
    args = SFTConfig(str(tmp_path), **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=rows("completion"), processing_class=processor)
    assert ("PT-K112" in caplog.text) == (not written)
    assert (trainer.train_dataset[0]["input_ids"][0] == 257) == written


def turned(image):
    """A JPEG of an image on its side, and the EXIF tag that turns it back."""
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[274] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(buffer, "JPEG", exif=exif, quality=95)
    return buffer.getvalue()


def test_a_stream_of_objects_that_exif_turns_trains_on_what_their_files_show(tmp_path):
    files = [turned(noise(84, 56, i)) for i in range(4)]

    def stream(make):
        for i, data in enumerate(files):
            yield {"prompt": user(f"which {i}?", 1), "completion": assistant(f"c{i} is it"), "images": [make(data)]}

    found = []
    for number, make in enumerate(
        (lambda data: {"bytes": data, "path": None}, lambda data: Image.open(io.BytesIO(data)))
    ):
        model, processor = build("qwen2_5_vl")
        args = SFTConfig(str(tmp_path / str(number)), learning_rate=0.0, logging_steps=1, **QUICK)
        dataset = datasets.IterableDataset.from_generator(stream, gen_kwargs={"make": make})
        found.append(first_loss(SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_dpo_margins_are_those_of_each_sequence_alone(name, tmp_path):
    model, processor = build(name)
    reference, _ = build(name)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    dataset = rows("chosen", "rejected")
    plain = dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))
    with torch.no_grad():
        margins = [
            sum(
                sign * float(alone(m, processor, row, row[side]).sum())
                for m, outer in ((model, 1), (reference, -1))
                for side, inner in (("chosen", 1), ("rejected", -1))
                for sign in [outer * inner]
            )
            for row in plain
        ]
    wanted = -torch.nn.functional.logsigmoid(0.1 * torch.tensor(margins)).mean()
    args = DPOConfig(str(tmp_path), learning_rate=0.0, logging_steps=1, gradient_checkpointing=False, **QUICK)
    trainer = DPOTrainer(model, reference, args, train_dataset=dataset, processing_class=processor)
    assert first_loss(trainer) == pytest.approx(float(wanted), abs=2e-4)


def test_a_reference_that_normalizes_otherwise_sees_its_own_pixels(tmp_path):
    (model, processor), (reference, reads) = build("llava"), build("llava")
    reads.image_processor.image_mean = [0.1, 0.2, 0.3]
    reference.save_pretrained(tmp_path / "reference"), reads.save_pretrained(tmp_path / "reference")
    dataset, margins = rows("chosen", "rejected"), []
    with torch.no_grad():
        for row in dataset.cast_column("images", datasets.List(datasets.Image(decode=False))):
            own, other = (
                alone(model, one, row, row["chosen"]).sum() - alone(model, one, row, row["rejected"]).sum()
                for one in (processor, reads)
            )
            margins.append(own - other)
    wanted = -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins)).mean()
    assert abs(float(wanted) - math.log(2)) > 1e-4
    args = DPOConfig(str(tmp_path), learning_rate=0.0, logging_steps=1, gradient_checkpointing=False, **QUICK)
    given = type(reference).from_pretrained(tmp_path / "reference")
    trainer = DPOTrainer(model, given, args, train_dataset=dataset, processing_class=processor)
    assert first_loss(trainer) == pytest.approx(float(wanted), abs=1e-5)


def test_a_pair_encodes_its_picture_once_and_the_frozen_reference_keeps_its_features(tmp_path):
    model, processor = build("llava")
    args = DPOConfig(str(tmp_path), gradient_checkpointing=False, freeze_vision=True, **QUICK | {"max_steps": 3})
    trainer = DPOTrainer(model, args=args, train_dataset=rows("chosen", "rejected"), processing_class=processor)
    encoder = picture_encoder(trainer.model)
    encoder.encoded = encoder.reused = 0
    trainer.train()
    assert encoder.encoded == 4 and encoder.reused > 0


def test_kto_shows_the_picture_of_the_prompt_to_its_own_and_to_the_other_answer(tmp_path):
    model, processor = build("qwen2_5_vl")
    dataset = rows("completion").add_column("label", [True, False, True, False])
    args = KTOConfig(str(tmp_path), gradient_checkpointing=False, logging_steps=1, **QUICK)
    trainer = KTOTrainer(model, args=args, train_dataset=dataset, processing_class=processor)
    judged, mismatched = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    for batches in (judged, mismatched):
        placed = [one for batch in batches for *_, one in batch.pictures]
        assert len({one.picture for one in placed}) == len(placed) == 4
    assert first_loss(trainer) == pytest.approx(0.5, abs=0.2)


def test_pairs_with_pictures_become_judged_answers(tmp_path):
    model, processor = build("llava")
    args = KTOConfig(str(tmp_path), gradient_checkpointing=False, **QUICK)
    trainer = KTOTrainer(model, args=args, train_dataset=rows("chosen", "rejected"), processing_class=processor)
    assert len(trainer.train_dataset) == 8 and sum(len(row["pictures"]) for row in trainer.train_dataset) == 8


def gradient(trainer, examples, batch):
    """The gradient of a step over examples, in passes of ``batch`` rows."""
    parts = [examples[i : i + batch] for i in range(0, len(examples), batch)]
    trainer.model.zero_grad()
    total = sum(sum(len(e["labels"]) - e["labels"].count(-100) for e in part) for part in parts)
    from posttrain.models.forward import forward

    for part in parts:
        for one in trainer.data_collator(part):
            out = forward(trainer.model, one)
            (-out.logp.sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*FAMILIES, "mllama"])
def test_any_order_and_any_split_of_mixed_rows_gives_one_gradient(name, tmp_path):
    model, processor = build(name)
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=rows("completion"), processing_class=processor)
    examples = list(trainer.train_dataset)
    shuffled = examples[:]
    random.Random(1).shuffle(shuffled)
    whole = gradient(trainer, examples, 4)
    for other in (gradient(trainer, shuffled, 4), gradient(trainer, examples, 2)):
        assert float((whole - other).norm() / whole.norm()) < 2e-5


@pytest.mark.parametrize("choice", ["auto", True, "tower", False])
def test_what_is_frozen_stays_bit_identical_and_what_is_not_moves(choice, tmp_path):
    model, processor = build("qwen2_5_vl")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = SFTConfig(str(tmp_path), learning_rate=1e-2, gradient_checkpointing=False, freeze_vision=choice, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=rows("completion"), processing_class=processor)
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    tower = set(tower_parameters(model))
    merger = {name for name in tower if "merger" in name}
    assert moved & (tower - merger) == (tower - merger if choice in ("auto", False) else set())
    assert moved & merger == (set() if choice is True else merger)
    assert moved - tower


@pytest.mark.matrix
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["q_proj", "gate_proj", "down_proj"], "all-linear"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_an_adapter_by_names_cannot_hit_the_tower_unasked(name, targets, tmp_path):
    import peft

    model, processor = build(name)
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK)
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, args, train_dataset=rows("completion"), processing_class=processor, peft_config=config)
    adapted = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert adapted and all("language_model" in one for one in adapted)
    encoder = picture_encoder(trainer.model)
    encoder.encoded = 0
    trainer.train()
    assert encoder.encoded == 4


def test_text_rows_alone_train_no_parameter_of_the_tower(tmp_path):
    model, processor = build("llava")
    dataset = rows("completion").select([1]).remove_columns("images")
    trainer = SFTTrainer(
        model,
        SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK),
        train_dataset=dataset,
        processing_class=processor,
    )
    assert not any(parameter.requires_grad for parameter in tower_parameters(model).values())
    trainer.train()


def test_a_run_saves_its_processor(tmp_path):
    from posttrain.extensions.images.processors import load_processor

    model, processor = build("llava")
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, save_steps=1, **QUICK)
    SFTTrainer(model, args, train_dataset=rows("completion"), processing_class=processor).train()
    saved = load_processor(str(tmp_path / "checkpoint-1"))
    assert saved.image_processor.size == processor.image_processor.size


# Refusals ------------------------------------------------------------------------------------------------------------


def sft(tmp_path, dataset, processing_class=None, name="llava", **options):
    model, processor = build(name)
    args = SFTConfig(str(tmp_path), gradient_checkpointing=False, **QUICK | options)
    return SFTTrainer(model, args, train_dataset=dataset, processing_class=processing_class or processor)


def test_a_tokenizer_instead_of_a_processor_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"AutoProcessor.*remove data_collator"):
        sft(tmp_path, rows("completion"), build("llava")[1].tokenizer)


def test_another_models_processor_is_refused(tmp_path):
    with pytest.raises(ModelError, match="PT-G004"):
        sft(tmp_path, rows("completion"), build("smolvlm")[1])


def test_a_template_that_would_not_be_used_is_refused(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0]['content'] }}")
    with pytest.raises(ConfigError, match="chat_template_path"):
        sft(tmp_path, rows("completion"), chat_template_path=str(path))


def test_a_remote_picture_is_refused_by_row(tmp_path):
    dataset = datasets.Dataset.from_list(
        [{"prompt": user("which?", 1), "images": ["https://example.com/cat.png"], "completion": assistant("a")}]
    )
    with pytest.raises(DataError, match=r"row 0.*remote"):
        sft(tmp_path, dataset)


def uneven():
    """Three short rows and one whose prompt is 200 bytes longer."""
    dataset = rows("completion")
    long = [
        {**row["prompt"][0], "content": [*row["prompt"][0]["content"], {"type": "text", "text": "x" * 200}]}
        for row in dataset
    ]
    prompts = [row["prompt"] if i < 3 else [long[i]] for i, row in enumerate(dataset)]
    return dataset.remove_columns("prompt").add_column("prompt", prompts)


def test_a_length_inside_an_image_is_refused_with_the_length_that_fits(tmp_path):
    longest = max(len(row["input_ids"]) for row in sft(tmp_path, uneven()).train_dataset)
    with pytest.raises(DataError, match=rf"PT-G001: 1 of 4 .* Row 3 .* max_length to at least {longest}"):
        sft(tmp_path, uneven(), max_length=longest - 100)


def test_rows_that_do_not_fit_are_dropped_and_counted_where_that_is_asked_for(tmp_path):
    longest = max(len(row["input_ids"]) for row in sft(tmp_path, uneven()).train_dataset)
    trainer = sft(tmp_path, uneven(), max_length=longest - 100, image_fit="drop")
    assert len(trainer.train_dataset) == 3 and sum(trainer.reports["train"].dropped.values()) == 1


def test_an_image_above_the_limit_is_refused_by_row_dropped_or_made_smaller(tmp_path, caplog):
    with pytest.raises(DataError, match=r"row 0: PT-G001: .* 84×56 has 6 placeholders"):
        sft(tmp_path, rows("completion"), name="qwen2_vl", image_max_tokens=4)
    dropped = sft(tmp_path, rows("completion"), name="qwen2_vl", image_max_tokens=4, image_fit="drop")
    assert [len(row["pictures"]) for row in dropped.train_dataset] == [0]
    assert list(dropped.reports["train"].dropped.values()) == [3]
    with caplog.at_level("WARNING"):
        smaller = sft(tmp_path, rows("completion"), name="qwen2_vl", image_max_tokens=4, image_fit="resize")
    assert "3 images are resized to a smaller size" in caplog.text
    assert [row["input_ids"].count(smaller.vision.reader.token_id) for row in smaller.train_dataset] == [4, 0, 7, 4]
    (batch,) = smaller.data_collator([smaller.train_dataset[0]])
    ((*_, placed),) = batch.pictures
    assert placed.count == 4 and placed.picture.load().size == placed.picture.size < (84, 56)
    smaller.train()


def test_an_image_whose_tokens_do_not_depend_on_its_size_cannot_be_made_smaller(tmp_path):
    with pytest.raises(DataError, match=r"PT-G001.*no size with so few"):
        sft(tmp_path, rows("completion"), name="llava", image_max_tokens=2, image_fit="resize")


def test_the_tail_of_an_answer_is_cut_and_no_image_is(tmp_path):
    lengths = [len(row["input_ids"]) for row in sft(tmp_path, rows("completion")).train_dataset]
    trainer = sft(tmp_path, rows("completion"), max_length=max(lengths) - 3)
    assert [len(row["input_ids"]) for row in trainer.train_dataset] == [min(n, max(lengths) - 3) for n in lengths]
    trainer.train()


def test_more_pictures_than_places_are_refused_by_row(tmp_path):
    dataset = datasets.Dataset.from_list([
        {"prompt": user("which?", 1), "images": [png(noise(8, 8)), png(noise(8, 8))], "completion": assistant("a")}
    ])  # fmt: skip
    with pytest.raises(DataError, match="row 0: the messages have 1 empty image blocks and there are 2 images"):
        sft(tmp_path, dataset)


@pytest.mark.parametrize("option", ["bfd_split", "wrapped"])
def test_packing_that_cuts_rows_is_refused_with_images(option, tmp_path):
    with pytest.raises(ConfigError, match=option):
        sft(tmp_path, rows("completion"), packing=True, packing_strategy=option, max_length=64)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3", "ovis2"])
@pytest.mark.parametrize("streamed", [False, True])
def test_packed_rows_are_whole_and_their_loss_is_that_of_each_sequence_alone(name, streamed, tmp_path):
    model, processor = build(name)
    dataset = rows("completion")
    plain = dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))
    with torch.no_grad():
        logps = [alone(model, processor, row, row["completion"]) for row in plain]
    options = QUICK | {"max_length": 256, "learning_rate": 0.0, "logging_steps": 1, "gradient_checkpointing": False}
    args = SFTConfig(str(tmp_path), packing=True, **options | {"per_device_train_batch_size": 1})
    given = plain.to_iterable_dataset() if streamed else dataset
    trainer = SFTTrainer(model, args, train_dataset=given, processing_class=processor)
    (packed,) = trainer.train_dataset
    assert len(packed["seq_lengths"]) == 4 and sum(packed["seq_lengths"]) == len(packed["input_ids"]) <= 256
    assert [one["size"] for one in packed["pictures"]].count([84, 56]) == 2 and len(packed["pictures"]) == 4
    assert first_loss(trainer) == pytest.approx(-float(torch.cat(logps).mean()), abs=1e-4)


def talk(i):
    """Two turns each with a picture, the second of another size."""
    return [
        *user(f"what is {i}?", 1), *assistant(f"a{i} is it"), *user("and this?", 1), *assistant(f"that is b{i}"),
    ]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("columns", ["messages", "prompt"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3", "glm4v", "ovis2"])
def test_what_the_assistant_says_alone_is_trained_between_images(name, columns, tmp_path):
    model, processor = build(name)
    images = [[noise(84, 56, i), noise(56, 112, i + 5)] for i in range(3)]
    found = [
        ({"messages": talk(i)} if columns == "messages" else {"prompt": talk(i)[:3], "completion": talk(i)[3:]})
        | {"images": [png(one) for one in held]}
        for i, held in enumerate(images)
    ]
    wanted = []
    with torch.no_grad():
        for i, example in enumerate(found):
            talked = talk(i)
            # The template ends a turn with a line break behind its last trained token.
            if columns == "messages":
                half = {"prompt": talked[:1], "images": example["images"][:1]}
                wanted.append(alone(model, processor, half, talked[1:2])[:-1])
            wanted.append(alone(model, processor, {"prompt": talked[:3], "images": example["images"]}, talked[3:])[:-1])
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    args = SFTConfig(
        str(tmp_path),
        assistant_only_loss=True,
        logging_steps=1,
        gradient_checkpointing=False,
        **QUICK | {"max_steps": 1},
    )
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    said = [t for row in trainer.train_dataset for t in row["labels"] if t != -100]
    assert len(said) == sum(map(len, wanted))
    assert first_loss(trainer) == pytest.approx(-float(torch.cat(wanted).mean()), abs=1e-4)


def test_a_model_that_reads_prompts_both_ways_trains_no_turns_of_one(tmp_path):
    held = [{"messages": talk(1), "images": [png(noise(8, 8))] * 2}]
    with pytest.raises(DataError, match="row 0: this model has bidirectional attention in the prompt"):
        sft(tmp_path, datasets.Dataset.from_list(held), name="paligemma", assistant_only_loss=True)


def test_a_row_without_a_turn_of_the_assistant_is_left_out_and_one_that_is_no_conversation_refused(tmp_path):
    found = [
        {"messages": user("a?", 1), "images": [png(noise(8, 8))]},
        {"messages": talk(1), "images": [png(noise(8, 8))] * 2},
    ]
    dataset = datasets.Dataset.from_list(found)
    trainer = sft(tmp_path, dataset, assistant_only_loss=True)
    assert trainer.reports["train"].dropped == {"without an assistant turn": 1}
    with pytest.raises(DataError, match="row 0: assistant_only_loss=True needs conversations"):
        plain = [{"prompt": "<image>which?", "completion": "a", "images": [png(noise(8, 8))]}]
        sft(tmp_path, datasets.Dataset.from_list(plain), assistant_only_loss=True)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_images_of_a_row_that_is_too_long_are_made_smaller_until_it_fits(name, kind, tmp_path):
    model, processor = build(name)
    big = [{"prompt": user("which?", 2), "images": [png(noise(280, 280, 1)), png(noise(112, 112, 2))],
            "completion": assistant("that"), "chosen": assistant("that"), "rejected": assistant("no")}]  # fmt: skip
    small = [{**big[0], "images": [png(noise(56, 56, 3)), png(noise(56, 56, 4))]}]
    drop = ["chosen", "rejected"] if kind == "sft" else ["completion"]
    dataset = datasets.Dataset.from_list(big + small).remove_columns(drop)
    kinds = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}
    config, trainer = kinds[kind]
    args = config(str(tmp_path), image_fit="resize", gradient_checkpointing=False, **QUICK | {"max_length": 44})
    trainer = trainer(model, args=args, train_dataset=dataset, processing_class=processor)
    assert trainer.reports["train"].dropped == {} and trainer.reports["train"].truncated == 0
    fitted, same = trainer.train_dataset
    assert same["pictures"][0]["size"] == [56, 56] and fitted["pictures"][0]["size"][0] < 280
    batch = trainer.data_collator([fitted, same])[0]
    assert all(len(row.prompt_ids) + len(ids) <= 44 for row in to_rows(batch) for ids in row.completions)
    trainer.train()


def test_no_size_of_an_image_helps_a_row_whose_text_is_too_long(tmp_path):
    with pytest.raises(DataError, match=r"all 1 rows of the train dataset are dropped: 1 longer than max_length"):
        held = [
            {
                "prompt": user("which of these is it, please? " * 4, 1),
                "images": [png(noise(84, 56))],
                "completion": assistant("a"),
            }
        ]
        sft(tmp_path, datasets.Dataset.from_list(held), name="qwen2_vl", image_fit="resize", max_length=64)


@pytest.mark.parametrize("fit", ["error", "drop", "resize"])
def test_an_image_with_too_many_pixels_is_refused_dropped_or_made_smaller(fit, tmp_path):
    dataset = datasets.Dataset.from_list([
        {"prompt": user("which?", 1), "images": [png(noise(*size))], "completion": assistant("a")}
        for size in ((280, 140), (50, 50))
    ])  # fmt: skip
    if fit == "error":
        with pytest.raises(DataError, match=r"row 0.*39200 pixels.*image_max_pixels=10000"):
            sft(tmp_path, dataset, image_fit=fit, image_max_pixels=10_000)
        return
    trainer = sft(tmp_path, dataset, image_fit=fit, image_max_pixels=10_000)
    sizes = [row["pictures"][0]["size"] for row in trainer.train_dataset]
    assert sizes == ([[50, 50]] if fit == "drop" else [[141, 70], [50, 50]])


def test_a_method_that_reads_text_refuses_pictures_inside_messages(tmp_path):
    from posttrain import ORPOConfig, ORPOTrainer

    question = [
        {"role": "user", "content": [{"type": "image", "image": png(noise(84, 56))}, {"type": "text", "text": "?"}]}
    ]
    dataset = datasets.Dataset.from_list([{"prompt": question, "chosen": assistant("a"), "rejected": assistant("b")}])
    model, processor = build("llava")
    args = ORPOConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(DataError, match="inside their messages"):
        ORPOTrainer(model, args, train_dataset=dataset, processing_class=processor.tokenizer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"freeze_vision": "all"},
        {"image_fit": "resize", "max_length": None},
        {"image_max_pixels": 0},
        {"image_fit": "crop"},
        {"image_max_tokens": 0},
        {"image_background": "red"},
        {"image_cache_gb": -1},
    ],
)
def test_options_of_pictures_are_checked(wrong, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SFTConfig(str(tmp_path), **wrong)


def one_question(count, *answers):
    """The same question and answers about different pictures."""
    found = [
        {
            "prompt": user("which?", 1),
            "images": [png(noise(56, 56, i))],
            **{name: assistant(a[i % 2]) for name, a in answers},
        }
        for i in range(count)
    ]
    return datasets.Dataset.from_list(found)


def test_rows_that_differ_in_the_picture_alone_are_no_duplicates(tmp_path):
    trainer = sft(tmp_path, one_question(40, ("completion", "ab")))
    assert "PT-D007" not in {finding.code for finding in trainer.data_report().findings}
    assert "PT-D007" in {
        finding.code
        for finding in sft(tmp_path, one_question(40, ("completion", "ab")).select([0] * 40)).data_report().findings
    }


def test_pairs_about_different_pictures_do_not_contradict_each_other():
    from posttrain.checks.pairs import scan_pairs

    pairs = one_question(8, ("chosen", "ab"), ("rejected", "ba"))
    assert scan_pairs(pairs).swapped == []
    same = [{**row, "images": pairs[0]["images"]} for row in pairs]
    assert len(scan_pairs(same).swapped) == 8


def test_the_page_of_a_run_shows_thumbnails_beside_the_labels_of_the_first_batch(tmp_path):
    sft(tmp_path, rows("completion")).train()
    (folder,) = {path.parent for path in tmp_path.rglob("data.json")}
    seen = {item["title"].split(" (")[0]: item for item in json.loads((folder / "data.json").read_text())["sequences"]}
    assert sorted(len(item["pictures"]) for item in seen.values()) == [0, 1, 1, 2]
    for item in seen.values():
        assert "".join(text for text, _ in item["pieces"]).count("[image ") == len(item["pictures"])
    address = next(item["pictures"][0] for item in seen.values() if item["pictures"])
    small = read_picture(address)
    assert max(small.size) <= 64 and len(address) < 6000
    page = render([read_run(folder)])
    assert page.count("<img ") == 4 and address in page


@pytest.mark.parametrize("branches", [("completion",), ("chosen", "rejected")])
def test_a_placeholder_that_a_user_types_stays_text_in_given_answers(branches, tmp_path, caplog):
    found = [dict(row) for row in rows(*branches).cast_column("images", datasets.List(datasets.Image(decode=False)))]
    found[1]["prompt"] = user("is <image> or <image> an image?")
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    model, processor = build("llava")
    kind, config = (SFTTrainer, SFTConfig) if len(branches) == 1 else (DPOTrainer, DPOConfig)
    args = config(str(tmp_path), gradient_checkpointing=False, **QUICK)
    trainer = kind(model, args=args, train_dataset=dataset, processing_class=processor)
    row = next(row for row in trainer.train_dataset if not row["pictures"])
    ids = row["input_ids"] if len(branches) == 1 else row["prompt_ids"]
    assert "is <image> or <image> an image?" in processor.tokenizer.decode(ids)
    assert trainer.vision.reader.token_id not in ids
    assert "2 strings that look like image placeholders remain text" in caplog.text


def test_a_broken_picture_is_dropped_and_counted_where_that_is_asked_for(tmp_path):
    found = [dict(row) for row in rows("completion").cast_column("images", datasets.List(datasets.Image(decode=False)))]
    found[2]["images"] = [{"bytes": b"no image at all", "path": None}] * 2
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(DataError, match="row 2: column 'images': this is not a readable image"):
        sft(tmp_path, dataset)
    trainer = sft(tmp_path, dataset, image_fit="drop")
    assert len(trainer.train_dataset) == 3 and trainer.reports["train"].dropped == {"with an unreadable image": 1}


def torn():
    """A JPEG file whose header is fine, cut in its middle."""
    buffer = io.BytesIO()
    noise(600, 400).save(buffer, "JPEG")
    return {"bytes": buffer.getvalue()[: buffer.tell() // 2], "path": None}


def test_a_file_that_was_cut_is_dropped_where_that_is_asked_for_else_named_by_its_row(tmp_path):
    found = [dict(row) for row in rows("completion").cast_column("images", datasets.List(datasets.Image(decode=False)))]
    found[3]["images"] = [torn()]
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    trainer = sft(tmp_path, dataset, image_fit="drop")
    assert len(trainer.train_dataset) == 3 and trainer.reports["train"].dropped == {"with an unreadable image": 1}
    trainer.train()
    unchecked = sft(tmp_path, dataset, preflight="off")
    with pytest.raises(DataError, match=r"row 3: the image cannot be read \(PT-G003\)"):
        unchecked.train()


def test_a_remote_picture_that_was_dropped_stops_nothing(tmp_path):
    found = [dict(row) for row in rows("completion").cast_column("images", datasets.List(datasets.Image(decode=False)))]
    found[3]["images"] = [{"bytes": None, "path": "https://example.com/cat.png"}]
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    trainer = sft(tmp_path, dataset, image_fit="drop")
    trainer.train()
    assert trainer.reports["train"].dropped == {"with an unreadable image": 1}
    assert ("PT-G010", "warning") in {(one.code, one.severity) for one in trainer.preflight.reported}


@pytest.mark.parametrize("inside", [True, False])
def test_one_image_far_behind_rows_of_text_is_seen(tmp_path, inside):
    """A sample of 64 rows would miss it, and its row would be trained on without its picture."""
    # More than a batch of `datasets`, from which it would take the types of columns.
    found = [{"prompt": user(f"which {i}?"), "completion": assistant("a"), "images": []} for i in range(1010)]
    found[1003] |= {"prompt": user("which?", 1), "images": [png(noise(84, 56))]}
    if inside:
        for row in found:
            (held, row["prompt"][0]["content"][0]["image"]) = (row.pop("images"), None)
            if held:
                row["prompt"][0]["content"][0]["image"] = held[0]
    dataset = datasets.Dataset.from_list(found)
    trainer = sft(tmp_path, dataset)
    assert trainer.vision.images and len(trainer.train_dataset[1003]["pictures"]) == 1
    if inside:
        # Keys that Arrow filled in make no pictures of text.
        assert not sft(tmp_path / "b", dataset.select(range(200))).vision.images


def test_a_placeholder_in_a_run_on_text_stops_it_instead_of_training_on_no_picture(tmp_path):
    dataset = datasets.Dataset.from_list([{"prompt": "see <image> there", "completion": " yes"}] * 4)
    with pytest.raises(ModelError, match="PT-G011"):
        sft(tmp_path, dataset).train()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_processor_that_resizes_nothing_trains_on_pictures_of_whole_patches(name, tmp_path):
    model, processor = build(name)
    processor.image_processor.do_resize = False
    side = 2 * processor.image_processor.patch_size
    images = [noise(side * (1 + i), side, i) for i in range(4)]
    found = [
        {"prompt": user(f"which {i}?", 1), "images": [png(one)], "completion": assistant(f"c{i}")}
        for i, one in enumerate(images)
    ]
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    args = SFTConfig(str(tmp_path), learning_rate=0.0, logging_steps=1, **QUICK)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    plain = dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))
    with torch.no_grad():
        logps = [alone(model, processor, row, row["completion"]) for row in plain]
    assert first_loss(trainer) == pytest.approx(-float(torch.cat(logps).mean()), abs=1e-4)
    found[2]["images"] = [png(noise(side + 3, side))]
    dataset = datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(DataError, match="row 2"):
        SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)


def test_none_among_images_stands_for_no_picture(tmp_path):
    found = [
        {"prompt": user("which?", 1), "images": [noise(56, 56, i), None], "completion": assistant("this")}
        for i in range(4)
    ]
    losses = []
    for rows_of in (found, [{**row, "images": row["images"][:1]} for row in found]):
        model, processor = build("llava")
        args = SFTConfig(str(tmp_path / str(len(losses))), learning_rate=0.0, logging_steps=1, **QUICK)
        dataset = datasets.IterableDataset.from_generator(lambda rows=rows_of: iter(rows))
        losses.append(first_loss(SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)))
    assert losses[0] == losses[1]


def test_the_preflight_reads_blocks_as_the_run_does(tmp_path, caplog):
    """An address inside ``image_url``, and base64, are pictures; what is wrong with one is told."""
    data = base64.b64encode(png(noise(84, 56, 1))["bytes"]).decode()
    small = base64.b64encode(png(noise(20, 56, 1))["bytes"]).decode()

    def rows_of(first):
        blocks = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{first}"}},
            {"type": "image", "base64": first},
        ]
        for block in blocks * 2:
            yield {
                "prompt": [{"role": "user", "content": [block, {"type": "text", "text": "a"}]}],
                "completion": assistant("b"),
            }

    for held, said in ((data, False), (small, True)):
        caplog.clear()
        model, processor = build("llava")
        args = SFTConfig(str(tmp_path), **QUICK)
        dataset = datasets.Dataset.from_list(list(rows_of(held)))
        SFTTrainer(model, args, train_dataset=dataset, processing_class=processor).train()
        assert "PT-G003" not in caplog.text and ("PT-G006" in caplog.text) == said
