"""Multimodal checkpoints train on text, with a processor as ``processing_class`` or from their folder, and keep their image side."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

import posttrain as pt
from tests.methods.every_trainer import data
from tests.methods.helpers import SHORT, scripted

TRAINERS = {"sft": (pt.SFTTrainer, pt.SFTConfig), "dpo": (pt.DPOTrainer, pt.DPOConfig)}
TRAINERS |= {"grpo": (pt.GRPOTrainer, pt.GRPOConfig)}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


MARKS = {"boi_token": "<soi>", "eoi_token": "<eoi>", "image_token": "<image>"}


def processor_of(tokenizer):
    """Of Gemma 3, which needs no torchvision; rows of text do not tell processors apart."""
    named = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, pad_token=tokenizer.pad_token, eos_token=tokenizer.eos_token,
        extra_special_tokens=MARKS, chat_template=tokenizer.chat_template,
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return tf.Gemma3Processor(images, named, image_seq_length=4, chat_template=tokenizer.chat_template)


def gemma3(vocabulary, image):
    text = SIZES | {
        "vocab_size": vocabulary,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    tower = TOWER | {"image_size": 28, "patch_size": 7}
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=image)
    )


def gemma4(vocabulary, image):
    text = SIZES | {
        "vocab_size": vocabulary,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    text |= {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": vocabulary}
    return tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(text_config=text, vision_config=None, audio_config=None, image_token_id=image)
    )


def mistral3(vocabulary, image):
    text = SIZES | {"vocab_size": vocabulary, "model_type": "mistral"}
    tower = TOWER | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8}
    return tf.Mistral3ForConditionalGeneration(
        tf.Mistral3Config(text_config=text, vision_config=tower, image_token_index=image)
    )


def qwen3_5(vocabulary, image):
    text = SIZES | {"vocab_size": vocabulary, "layer_types": ["linear_attention", "full_attention"]}
    text |= {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    text |= {
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [1, 1, 0],
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    }
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    return tf.Qwen3_5ForConditionalGeneration(
        tf.Qwen3_5Config(text_config=text, vision_config=tower | {"num_position_embeddings": 16}, image_token_id=image)
    )


FAMILIES = {"gemma3": gemma3, "gemma4": gemma4, "mistral3": mistral3, "qwen3_5": qwen3_5}


def made(family, tokenizer):
    torch.manual_seed(0)
    processor = processor_of(tokenizer)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    return FAMILIES[family](len(processor.tokenizer), image), processor


@pytest.fixture
def tokenizer(tiny_tokenizer):
    tiny_tokenizer.pad_token = "<|endoftext|>"
    return tiny_tokenizer


def trained(kind, folder, model, processing_class=None):
    trainer, config = TRAINERS[kind]
    options = {"num_generations": 2, "max_completion_length": 8} if kind == "grpo" else {}
    args = config(
        str(folder), **(SHORT | {"use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 2} | options)
    )
    more = {"reward_funcs": lambda answer, **_: list(answer), "rollout_engine": scripted()} if kind == "grpo" else {}
    run = trainer(model=model, args=args, train_dataset=data(kind, 4), processing_class=processing_class, **more)
    run.train()
    run.save_model()
    return run


def saved_settings(folder):
    return {path.name: json.loads(path.read_text()) for path in Path(folder).glob("*processor_config.json")}


@pytest.mark.parametrize("kind", sorted(TRAINERS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_processor_reads_rows_of_text_and_is_saved_whole(family, kind, tokenizer, tmp_path):
    model, processor = made(family, tokenizer)
    processor.save_pretrained(tmp_path / "start")
    run = trained(kind, tmp_path / "out", model, processor)
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in run.state.log_history if "loss" in line)
    assert saved_settings(tmp_path / "out") == saved_settings(tmp_path / "start") != {}
    again = tf.AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(again) is type(processor)
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()


def test_a_multimodal_checkpoint_read_from_its_folder_keeps_its_image_settings(tokenizer, tmp_path):
    model, processor = made("gemma3", tokenizer)
    processor.save_pretrained(tmp_path / "start")
    model.save_pretrained(tmp_path / "start")
    trained("sft", tmp_path / "out", str(tmp_path / "start"))
    assert saved_settings(tmp_path / "out") == saved_settings(tmp_path / "start") != {}
    assert isinstance(tf.AutoProcessor.from_pretrained(tmp_path / "out"), tf.Gemma3Processor)
    loaded = tf.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_a_processor_and_its_tokenizer_train_alike(tokenizer, tmp_path):
    losses = []
    for name in ("processor", "tokenizer"):
        model, processor = made("gemma3", tokenizer)
        run = trained("sft", tmp_path / name, model, processor if name == "processor" else processor.tokenizer)
        losses.append(run.state.log_history[0]["loss"])
    assert losses[0] == losses[1]
