"""Tiny vision-language models of ten families with their processors, built from configs without network or torchvision."""

from __future__ import annotations

import inspect

import numpy as np
import torch

SPECIAL = [
    "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>",
    "<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
]  # fmt: skip

# How a chat template of each family writes an image block.
IMAGE_BLOCK = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>\n",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}

TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for block in message['content'] %}"
    "{%- if block['type'] == 'image' %}{{- 'IMAGE' }}{%- else %}{{- block['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_tokenizer(**named):
    """One token a byte, and the special tokens of all families."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>",
        extra_special_tokens=named, model_max_length=8192,
    )  # fmt: skip


def without_video(kind):
    """A processor class whose constructor asks for no video processor, which needs torchvision."""
    from posttrain.extensions.images.processors import image_only

    return image_only(kind) if "video_processor" in inspect.signature(kind.__init__).parameters else kind


def _text(**more):
    return {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 256, "bos_token_id": 257,
        "eos_token_id": 260, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _tower(**more):
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **more
    }  # fmt: skip


LINEAR = {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 8, "value_head_dim": 8}


def _qwen(name):
    import transformers as tf

    tokenizer = byte_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    token = tokenizer.convert_tokens_to_ids
    patch = 16 if name in ("qwen3_vl", "qwen3_5") else 14
    text = _text(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
    ids = {
        "image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>"),
    }  # fmt: skip
    if name == "qwen2_vl":
        config = tf.Qwen2VLConfig(
            text_config=text, **ids,
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": patch},
        )  # fmt: skip
        model, kind = tf.Qwen2VLForConditionalGeneration(config), tf.Qwen2VLProcessor
    elif name == "qwen2_5_vl":
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": patch, "out_hidden_size": 32,
            "window_size": 56, "fullatt_block_indexes": [1],
        }  # fmt: skip
        config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model, kind = tf.Qwen2_5_VLForConditionalGeneration(config), tf.Qwen2_5_VLProcessor
    else:
        vision = {
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": patch, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        }  # fmt: skip
        kind = tf.Qwen3VLProcessor
        if name == "qwen3_5":
            text |= {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
            text |= {f"linear_{x}": n for x, n in LINEAR.items()}
            config = tf.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
            model = tf.Qwen3_5ForConditionalGeneration(config)
        else:
            config = tf.Qwen3VLConfig(text_config=text | {"head_dim": 8}, vision_config=vision, **ids)
            model = tf.Qwen3VLForConditionalGeneration(config)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 4 * patch**2, "longest_edge": 40 * patch**2}
    )
    return model, without_video(kind)(image_processor=images, tokenizer=tokenizer)


def _idefics(name):
    import transformers as tf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    # It writes the lengths of videos, and its package may be missing.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    tokenizer = byte_tokenizer()
    token = tokenizer.convert_tokens_to_ids
    vision = _tower(image_size=32, patch_size=8)
    text = _text(model_type="llama")
    given = {"text_config": text, "vision_config": vision, "scale_factor": 2, "image_token_id": token("<image>")}
    given |= {"pad_token_id": 256, "tie_word_embeddings": False}
    if name == "idefics3":
        model = tf.Idefics3ForConditionalGeneration(tf.Idefics3Config(**given))
        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
        )
        return model, tf.Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4)
    model = tf.SmolVLMForConditionalGeneration(tf.SmolVLMConfig(**given))
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    return model, without_video(tf.SmolVLMProcessor)(image_processor=images, tokenizer=tokenizer, image_seq_len=4)


def _glm4v(name):
    import transformers as tf
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<|image|>", video_token="<|video_pad|>")
    token = tokenizer.convert_tokens_to_ids
    text = _text(
        rope_parameters={
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        }
    )
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14, "out_hidden_size": 32, "image_size": 28,
    }  # fmt: skip
    config = tf.Glm4vConfig(
        text_config=text, vision_config=vision, image_token_id=token("<|image|>"), video_token_id=token("<|video_pad|>"),
        image_start_token_id=token("<|begin_of_image|>"), image_end_token_id=token("<|end_of_image|>"),
        video_start_token_id=token("<video>"), video_end_token_id=token("<video>"),
    )  # fmt: skip
    images = Glm4vImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": 40 * 28**2})
    return tf.Glm4vForConditionalGeneration(config), without_video(tf.Glm4vProcessor)(
        image_processor=images, tokenizer=tokenizer
    )


def _ovis2(name):
    import transformers as tf
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>")
    token = tokenizer.convert_tokens_to_ids
    vision = _tower(image_size=28, patch_size=7, vocab_size=64, hidden_stride=2)
    config = tf.Ovis2Config(
        text_config=_text(model_type="qwen2"), vision_config=vision, image_token_id=token("<IMG_ATOM>"), hidden_size=32, vocab_size=320,
        visual_indicator_token_ids=[token(f"<IMG_{part}>") for part in ("START", "GRID", "COL", "ROW", "END")], tie_word_embeddings=False,
    )  # fmt: skip
    images = Ovis2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4)
    return tf.Ovis2ForConditionalGeneration(config), tf.Ovis2Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_length=4
    )


def _onevision(name):
    import transformers as tf
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>", video_token="<video>")
    pins = [[28, 56], [56, 28], [56, 56]]
    vision = {"model_type": "siglip_vision_model", **_tower(image_size=28, patch_size=14, vision_use_head=False)}
    config = tf.LlavaOnevisionConfig(
        text_config=_text(model_type="qwen2"), vision_config=vision, image_grid_pinpoints=pins,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )  # fmt: skip
    images = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=pins)
    kind = without_video(tf.LlavaOnevisionProcessor)
    return tf.LlavaOnevisionForConditionalGeneration(config), kind(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=4, vision_feature_select_strategy="full"
    )


def _llava(name):
    import transformers as tf
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>")
    token = tokenizer.convert_tokens_to_ids("<image>")
    vision = {"model_type": "clip_vision_model", **_tower(image_size=28, patch_size=14, projection_dim=32)}
    given = {
        "text_config": _text(model_type="llama"), "vision_config": vision, "image_token_id": token,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    }  # fmt: skip
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    square = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    if name == "llava":
        model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(**given))
        return model, tf.LlavaProcessor(image_processor=CLIPImageProcessorPil(**square), tokenizer=tokenizer, **options)
    pins = [[28, 56], [56, 28], [56, 56]]
    model = tf.LlavaNextForConditionalGeneration(tf.LlavaNextConfig(**given, image_grid_pinpoints=pins))
    images = LlavaNextImageProcessorPil(**square, image_grid_pinpoints=pins)
    return model, tf.LlavaNextProcessor(image_processor=images, tokenizer=tokenizer, **options)


def _gemma3(name):
    import transformers as tf
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = byte_tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    token = tokenizer.convert_tokens_to_ids
    text = _text(
        head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    )
    config = tf.Gemma3Config(
        text_config=text, vision_config=_tower(image_size=28, patch_size=7), mm_tokens_per_image=4,
        boi_token_index=token("<start_of_image>"), eoi_token_index=token("<end_of_image>"),
        image_token_id=token("<image_soft_token>"), image_token_index=token("<image_soft_token>"),
    )  # fmt: skip
    model = tf.Gemma3ForConditionalGeneration(config)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return model, tf.Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)


def _paligemma(name):
    import transformers as tf
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>")
    token = tokenizer.convert_tokens_to_ids("<image>")
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = tf.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer)
    text = _text(model_type="gemma", head_dim=8, vocab_size=len(tokenizer))
    if name == "paligemma2":
        kinds = ["sliding_attention", "full_attention"]
        text |= {"model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 6, "layer_types": kinds}
    config = tf.PaliGemmaConfig(
        text_config=text, vision_config=_tower(image_size=28, patch_size=14, model_type="siglip_vision_model"),
        image_token_id=token, image_token_index=token, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    return tf.PaliGemmaForConditionalGeneration(config), processor


def _internvl(name):
    import transformers as tf
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = byte_tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    config = tf.InternVLConfig(
        text_config=_text(model_type="llama"), vision_config=_tower(image_size=[28, 28], patch_size=[7, 7]),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4, downsample_ratio=0.5,
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    kind = without_video(tf.InternVLProcessor)
    return tf.InternVLForConditionalGeneration(config), kind(
        image_processor=images, tokenizer=tokenizer, image_seq_length=4
    )


def _mllama(name):
    import transformers as tf
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>")
    text = _text(
        num_hidden_layers=3, cross_attention_layers=[1], rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4,
        "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "intermediate_layers_indices": [0],
    }  # fmt: skip
    config = tf.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    model = tf.MllamaForConditionalGeneration(config)
    with torch.no_grad():
        # Gates begin closed: no picture would reach the text.
        for path, parameter in model.named_parameters():
            if path.endswith("gate") or "gate" in path.rsplit(".", 1)[-1]:
                parameter.fill_(0.7)
    images = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    return model, tf.MllamaProcessor(image_processor=images, tokenizer=tokenizer)


BUILDERS = {
    "qwen2_vl": _qwen, "qwen2_5_vl": _qwen, "qwen3_vl": _qwen, "qwen3_5": _qwen, "idefics3": _idefics, "smolvlm": _idefics, "llava": _llava,
    "llava_next": _llava, "gemma3": _gemma3, "paligemma": _paligemma, "internvl": _internvl, "mllama": _mllama,
    "paligemma2": _paligemma,
}  # fmt: skip


def _deepseek(name):
    import transformers as tf
    from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

    tokenizer = byte_tokenizer(image_token="<image>")
    vision = {"model_type": "siglip_vision_model", **_tower(image_size=28, patch_size=14, vision_use_head=False)}
    config = tf.DeepseekVLConfig(
        text_config=_text(model_type="llama"), vision_config=vision, tie_word_embeddings=False,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}, min_size=14)
    kind = tf.DeepseekVLProcessor
    return tf.DeepseekVLForConditionalGeneration(config), kind(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=4
    )


# Of whose families nothing is known beforehand.
UNKNOWN = {"glm4v": _glm4v, "deepseek_vl": _deepseek, "ovis2": _ovis2, "llava_onevision": _onevision}
# Of whose trees several share a row; Mllama and PaliGemma 2 have tests of their own.
NAMES = tuple(name for name in BUILDERS if name not in ("mllama", "paligemma2"))


def build(name):
    """Model in float32 and its processor; weights are scaled up, so that images reach the answer."""
    torch.manual_seed(0)
    model, processor = (BUILDERS | UNKNOWN)[name](name)
    block = next((text for start, text in IMAGE_BLOCK.items() if name.startswith(start)), "<image>")
    processor.chat_template = TEMPLATE.replace("IMAGE", block)
    processor.tokenizer.chat_template = processor.chat_template
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0, (3 if "q_proj" in path or "k_proj" in path or "qkv" in path else 2) / parameter.shape[-1] ** 0.5
                )
    return model.float().eval(), processor


def noise(width, height, seed=0):
    """A picture of coloured noise in large squares, which survives any resizing."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)
