"""A real vLLM with pictures in prompts: it expands them as the trainer does, and says what a plain forward says."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import pytest
import torch

from posttrain.integrations import is_available
from posttrain.loop.rollout import sample

# vLLM's models with a vision tower import torchvision.
if not (is_available("vllm") and is_available("torchvision")):
    pytest.skip("vLLM or torchvision is not installed", allow_module_level=True)

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.errors import RolloutError
from posttrain.extensions.images.picture import read_picture
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.extensions.server.engine import ServerEngine
from posttrain.extensions.vllm.engine import VLLMEngine
from posttrain.rollouts.shared_weights import Weights
from posttrain.types import Request, Sampling
from tests.extensions.vllm import real_vllm as real
from tests.methods.test_vision_online import QUICK, prompts, short
from tests.vision_families import IMAGE_BLOCK, TEMPLATE, byte_tokenizer, noise, without_video

pytestmark = pytest.mark.slow


class Reader:
    """What the engine asks of a model's `PictureEncoder`."""

    def __init__(self, processor):
        self.processor = PictureProcessor(processor)


def wide_qwen2_vl(folder):
    """Qwen2-VL with heads of 32, which vLLM's attention on a CPU wants; saved with what vLLM reads beside it."""
    import transformers as tf
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    tokenizer = byte_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    token = tokenizer.convert_tokens_to_ids
    ids = {
        "image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>"),
    }  # fmt: skip
    text = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 256, "eos_token_id": 260,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    config = tf.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    model = tf.Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5)
    images = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 4 * 14**2, "longest_edge": 40 * 14**2}
    )
    processor = without_video(tf.Qwen2VLProcessor)(image_processor=images, tokenizer=tokenizer)
    processor.chat_template = tokenizer.chat_template = TEMPLATE.replace("IMAGE", IMAGE_BLOCK["qwen"])
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    kept = json.loads((Path(folder) / "processor_config.json").read_text())["image_processor"]
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(kept))
    kept = {k: v for k, v in kept.items() if k != "image_processor_type"} | {"do_sample_frames": False}
    kept |= {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2.0, "min_frames": 4, "max_frames": 8}
    (Path(folder) / "video_preprocessor_config.json").write_text(json.dumps(kept))
    # As a run loads it beside vLLM: with torchvision both resize alike (PIL differs by 0.006 nats here).
    return model.float().eval(), tf.AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, processor = wide_qwen2_vl(folder)
    engine = VLLMEngine.create(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=16, encoder=Reader(processor),
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    with torch.no_grad():
        # What is pushed is not what was loaded.
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.load_weights(Weights(model, checkpoint_names=True), 1)
    yield model, engine
    engine.close()


SIZES = ((84, 56), (56, 112), (112, 70), (84, 56))


def requests_of(reader, copies=2):
    """One picture; two; the first question under another picture of the same size; none."""
    found = [read_picture(noise(*size, seed=i)) for i, size in enumerate(SIZES)]
    made = []
    for chosen in ([0], [1, 2], [3], []):
        block = f"<|vision_start|>{reader.placeholder}<|vision_end|>"
        text = "".join(f"see {block} " for _ in chosen) + "which is it?"
        ids, placed = reader.encode(text, [found[i] for i in chosen], prompt=True)
        made.append(Request(ids, copies, pictures=placed))
    return made


def plain_logps(model, reader, request, rollout):
    """By the model's own forward; ids that no engine draws are out of the distribution."""
    ids = torch.tensor([[*request.prompt_ids, *rollout.token_ids]])
    inputs = reader.plain_inputs(ids, [[one.picture for one in request.pictures]], len(request.prompt_ids))
    begin = len(request.prompt_ids)
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits[0, begin - 1 : -1].float()
    logits[:, reader.never(320)] = -math.inf
    return logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]


def test_log_probs_are_those_of_a_plain_forward_with_the_same_pictures(loaded):
    model, engine = loaded
    reader = engine.encoder.processor
    never = tuple((token, -math.inf) for token in reader.never(320))
    asked = requests_of(reader)
    assert asked[0].prompt_ids == asked[2].prompt_ids
    rollouts = engine.generate(asked, Sampling(6, seed=3, logit_bias=never))
    owners = [request for request in asked for _ in range(2)]
    for request, rollout in zip(owners, rollouts, strict=True):
        assert rollout.prompt_ids == list(request.prompt_ids)
        gap = (torch.tensor(rollout.logp) - plain_logps(model, reader, request, rollout)).abs().max()
        assert float(gap) < 1e-3, len(request.pictures)
    # The control: under the other picture the same tokens are others'.
    other = (torch.tensor(rollouts[0].logp) - plain_logps(model, reader, asked[2], rollouts[0])).abs().max()
    assert float(other) > 1e-2


def test_a_processor_that_makes_other_placeholders_is_refused(loaded):
    _, engine = loaded
    reader = engine.encoder.processor
    fitted, small = requests_of(reader)[0], read_picture(noise(56, 56))
    ids, placed = reader.encode("see <|vision_start|><|image_pad|><|vision_end|>", [small], prompt=True)
    object.__setattr__(placed[0], "picture", fitted.pictures[0].picture)
    reader._expansions[placed[0].picture.size] = reader.expansion(small)
    try:
        with pytest.raises(RolloutError, match="PT-G016"):
            engine.generate([Request(ids, pictures=placed)], Sampling(1, temperature=0.0))
    finally:
        reader._expansions.clear()


def test_its_server_takes_pictures_beside_token_ids_and_grpo_over_it_is_on_policy(tmp_path):
    """Over HTTP as in process: log-probs, more than one a token, a tower that a push moves, and steps of GRPO."""
    model, processor = wide_qwen2_vl(tmp_path / "model")
    reader = PictureProcessor(processor)
    with real.vllm_server(tmp_path, tmp_path / "model") as url:
        engine = ServerEngine(url, connection_timeout=30, reader=reader)
        assert engine.capabilities.pictures and engine._placeholder() == reader.token_id
        never = tuple((token, -math.inf) for token in reader.never(320))
        asked = requests_of(reader)
        owners = [request for request in asked for _ in range(2)]
        for version in (1, 2):
            with torch.no_grad():
                # Of the tower too: what vLLM kept of pictures is of the weights before.
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine.load_weights(Weights(model, checkpoint_names=True), version)
            rollouts = engine.generate(asked, Sampling(6, seed=3, logit_bias=never, top_logps=3))
            gaps = [
                float((torch.tensor(r.logp) - plain_logps(model, reader, request, r)).abs().max())
                for request, r in zip(owners, rollouts, strict=True)
            ]
            print("gaps", gaps)
            assert max(gaps) < 1e-4
            assert all(len(at) == 3 and at[0][1] >= at[1][1] for r in rollouts for at in r.top_logps)
        other = (torch.tensor(rollouts[0].logp) - plain_logps(model, reader, asked[2], rollouts[0])).abs().max()
        assert float(other) > 1e-2
        engine.close()
        far = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "max_steps": 2,
            "learning_rate": 1e-3,
        }
        args = GRPOConfig(str(tmp_path / "run"), **QUICK | far)
        trainer = GRPOTrainer(model, short, args, train_dataset=prompts(), processing_class=processor)
        trainer.train()
        assert len([row for row in trainer.state.log_history if "loss" in row]) == 2
        # After the steps' pushes, under the trainer's own model.
        generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
        reader, policy = trainer.vision.reader, trainer.model.eval()
        gaps = [
            float((torch.tensor(r.logp) - plain_logps(policy, reader, r, r)).abs().max()) for r in generation.rollouts
        ]
        print("gaps after steps", gaps)
        assert max(gaps) < 1e-4
        trainer.engine.close()
