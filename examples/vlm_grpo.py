"""Make a small vision-language model, teach it to count from a careless teacher, and let GRPO repair what that left.

Ten minutes on a CPU, without any download: python examples/vlm_grpo.py
"""

import sys

from sft_vlm import counting
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>"]
TEMPLATE = (
    "{%- for m in messages %}{%- for b in m['content'] %}{{- '<image>' if b['type'] == 'image' else b['text'] }}"
    "{%- endfor %}{{- '<eos>' if m['role'] == 'assistant' else '\n' }}{%- endfor %}"
)
SHARED = {
    "report_to": "none",
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 20,
    "bf16": False,
}


def small_llava() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """1.3 M random parameters: 32 x 32 pixels are 16 tokens, a byte of text is one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens={"image_token": "<image>"}, **names
    )
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(image_processor=pixels, tokenizer=tokenizer, chat_template=TEMPLATE, **options)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, "projection_dim": 128, **shape}
    text = {"model_type": "llama", "vocab_size": 260, "pad_token_id": 256, "eos_token_id": 258, **shape}
    seen = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "image_token_id": 259}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **seen)), processor


def right(completions: list, answer: list, **_) -> list[float]:
    """1 where the number is the right one."""
    return [float(said[0]["content"].strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]


def main(steps: int = 900, more: int = 100) -> None:
    """Warm up, reinforce, and compare held-out accuracy under the right pictures and under others."""
    model, processor = small_llava()
    config = SFTConfig("runs/vlm_sft", max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3, **SHARED)
    SFTTrainer(model, config, train_dataset=counting(8 * steps, 1, wrong=0.25), processing_class=processor).train()
    held_out = counting(200, 2).remove_columns("completion")
    config = GRPOConfig(
        "runs/vlm_grpo", max_steps=more, per_device_train_batch_size=128, num_generations=8, max_completion_length=3,
        num_generations_eval=1, per_device_eval_batch_size=100, learning_rate=3e-4,
        check_image_use=True, **SHARED,
    )  # fmt: skip
    train = counting(16 * more, 3).remove_columns("completion")
    trainer = GRPOTrainer(model, right, config, train_dataset=train, processing_class=processor)
    before = trainer.evaluate(held_out)
    trainer.train()
    after = trainer.evaluate(held_out)
    print(
        f"held-out accuracy: {before['eval_reward']:.2f} after the warm-up, {after['eval_reward']:.2f} after GRPO, ",
        end="",
    )
    print(f"{after['eval_images/exchanged_reward']:.2f} with the pictures of other questions (a guess: {1 / 6:.2f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
