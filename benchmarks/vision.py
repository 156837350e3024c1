"""A step of GRPO, DPO and SFT on rows with one image against the peer: same weights, images, tokens, same script.

A LLaVA with random weights, an image of 144 tokens a row, completions of 32. Prediction, with V tokens of image and text
through the model, C of a completion: the peer encodes the image once a sequence (GRPO 8 times, DPO twice, in the policy and in
the reference) and reads it once a sequence; ours once. GRPO's update with G = 8 reads V + 8 C tokens instead of
8 (V + C), 3.4 times fewer at V = 150 and C = 32; DPO V + 2 C instead of 2 (V + C), 1.7 times; SFT the same, so that only
padding, positions without loss and the preparation of images differ.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

SIDE, PATCH = 168, 14  # (168 / 14)^2 = 144 tokens.
GROUP, ANSWER = 8, 32
VOCABULARY = 8192
# Layers and widths of the tower and of the text model; tower and projector of the large one have 115 million parameters.
SIZES = {
    "tiny": {"tower": (4, 128), "text": (4, 128)},
    "large": {"tower": (16, 768), "text": (8, 512)},
}
GOALS = {"grpo": 3.0, "dpo": 1.8, "sft": 1.1}
ROWS = {"grpo": GROUP, "dpo": 4, "sft": 8}  # Sequences of a GRPO step; rows of the others.
# Runs of our side whose memory is compared with the estimate, on both sizes.
MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in ROWS},
    "sft, recomputed": ("sft", {"gradient_checkpointing": True}),
    "dpo, frozen tower": ("dpo", {"freeze_vision": True}),
}
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<user>", "<assistant>"]
TEMPLATE = (
    "<s>{%- for message in messages %}{{- '<' + message['role'] + '>' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for block in message['content'] %}"
    "{%- if block['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- block['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- if message['role'] == 'assistant' %}{{- '</s>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)


def build(folder: Path, size: str) -> None:
    """Write a model with random weights and its processor, which both sides load."""
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = {word: i for i, word in enumerate([*SPECIAL, *harness.WORDS])}
    words |= {f"w{i}": i for i in range(len(words), VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>",
        additional_special_tokens=SPECIAL[3:], extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    (depth, width), (layers, hidden) = SIZES[size]["tower"], SIZES[size]["text"]
    vision = {
        "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, "num_hidden_layers": depth,
        "hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64, "projection_dim": width,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": VOCABULARY, "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = tf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=SPECIAL.index("<image>"),
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    model = tf.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() > 1):
            parameter.normal_(0, parameter[0].numel() ** -0.5)
    model.generation_config.max_length = None
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    tf.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def picture(seed: int) -> Any:
    """Coloured noise in large squares, 640 x 480."""
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((640, 480), Image.Resampling.NEAREST)


def said(rng: random.Random, count: int) -> str:
    """As many words, and as many tokens."""
    return " ".join(rng.choices(harness.WORDS, k=count))


def rows(method: str, count: int) -> Any:
    """Rows with a picture of their own and a question of eight words."""
    from datasets import Dataset

    rng, made = random.Random(0), []
    answers = {"grpo": (), "dpo": ("chosen", "rejected"), "sft": ("completion",)}[method]
    for number in range(count):
        row = {"images": [picture(number)], "prompt": [{"role": "user", "content": " " + said(rng, 8)}]}
        for name in answers:
            row[name] = [{"role": "assistant", "content": " " + said(rng, ANSWER - 1)}]
        made.append(row)
    return Dataset.from_list(made)


def reward(completions: list, **_: Any) -> list[float]:
    """Another number for each completion of a group."""
    return [float(i % GROUP) for i in range(len(completions))]


def trainer_of(side: str, folder: str, method: str, steps: int, **more: Any) -> Any:
    """The trainer of one side; ``more`` are options of its config."""
    import transformers

    library = harness.import_side(side)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    rows_a_step = 1 if method == "grpo" else ROWS[method]
    options: dict[str, Any] = {
        "per_device_train_batch_size": ROWS[method], "gradient_checkpointing": False, "learning_rate": 1e-5,
        "output_dir": str(Path(folder) / "run"), **more,
    }  # fmt: skip
    common = {"train_dataset": rows(method, rows_a_step * steps), "processing_class": processor}
    if method == "grpo":
        options |= {"num_generations": GROUP, "max_completion_length": ANSWER, "beta": 0.0, "shuffle_dataset": False}
        config = library.GRPOConfig(**harness.settings(steps, **options))
        trainer = library.GRPOTrainer(folder, reward_funcs=reward, args=config, **common)
        rng = random.Random(1)
        first = len(SPECIAL)
        fixed = [[rng.randrange(first, VOCABULARY) for _ in range(ANSWER)] for _ in range(GROUP)]
        fix_completions(side, trainer, fixed)
        return trainer
    options |= {"max_length": None, "train_sampling_strategy": "sequential"}
    name = method.upper()
    config = getattr(library, f"{name}Config")(**harness.settings(steps, **options))
    return getattr(library, f"{name}Trainer")(folder, args=config, **common)


def fix_completions(side: str, trainer: Any, tokens: list[list[int]]) -> None:
    """Make both sides train on the same tokens: what is measured is the update."""
    if side == "ours":
        from posttrain import ScriptedEngine

        trainer.engine = ScriptedEngine(tokens)
        return

    def generate(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return [list(line) for line in tokens], None

    trainer._generate_single_turn = generate


def profile(folder: str, method: str, steps: int) -> None:
    """Where the time of our side goes, on the terminal."""
    import cProfile
    import pstats

    trainer = trainer_of("ours", folder, method, steps)
    profiler = cProfile.Profile()
    profiler.runcall(trainer.train)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def memory(folder: Path, case: str, size: str) -> dict[str, Any]:
    """The estimate of a run against the most memory that it held, less what was held before."""
    import ctypes
    import gc

    import estimate
    import transformers

    from posttrain.checks.memory import Lengths, plan, sampled_pictures
    from posttrain.models.memory_estimate import estimate_memory

    method, options = MEMORY[case]
    for name in SIZES:
        build(folder / name, name)
    # Libraries are loaded and their pages touched by a step of the tiny one.
    trainer_of("ours", str(folder / "tiny"), method, 1, **options).train()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = estimate.rss("VmRSS")
    trainer = trainer_of("ours", str(folder / size), method, 2, **options)
    trainer.train()
    measured = estimate.rss("VmHWM") - before
    made = trainer._rows_of([trainer.train_dataset[i] for i in range(2)])
    longest = {"prompt": max(len(row.prompt_ids) for row in made), "completion": ANSWER + 1}
    config = transformers.AutoConfig.from_pretrained(folder / size)
    work = plan(trainer.method, config, lengths=Lengths(**longest), pictures=sampled_pictures(trainer.vision, made))
    found = estimate_memory(work)
    return {
        "model": size, "case": case, "measured_mb": round(measured / 1e6), "estimate_mb": round(found.peak / 1e6),
        "error": round(found.peak / measured - 1, 3), "moment": found.fullest,
        "components_mb": {name: round(size / 1e6) for name, size in found.components.items()},
    }  # fmt: skip


def memories(sizes: list[str]) -> None:
    """Every case of `MEMORY` in a process of its own."""
    rows = []
    for size in sizes:
        for case in MEMORY:
            command = [sys.executable, __file__, "--memory", "--case", case, "--size", size]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{size}, {case}: {rows[-1]['measured_mb']} MB, estimate {rows[-1]['error']:+.1%}", flush=True)
    harness.save("vision_memory", {"worst_error": max(abs(row["error"]) for row in rows), "rows": rows})


def main() -> None:
    """Both sizes and all methods, both sides in turn."""
    options = harness.parser(__doc__)
    options.add_argument("--steps", type=int, default=5, help="optimiser steps of a run; the first is not timed")
    options.add_argument("--size", choices=list(SIZES), help="one of them; both when left out")
    options.add_argument("--method", choices=list(GOALS), help="one of them; all when left out")
    options.add_argument("--profile", action="store_true", help="profile our side and stop")
    options.add_argument("--memory", action="store_true", help="the estimate against what was measured, and stop")
    options.add_argument("--case", choices=list(MEMORY), help="of --memory, in this process; all when left out")
    args = options.parse_args()
    if args.memory and args.case is None:
        memories([args.size] if args.size else list(SIZES))
        return
    if args.memory:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(memory(Path(folder), args.case, args.size or "large")))
        return
    if args.side:
        print(json.dumps(harness.timed(trainer_of(args.side, args.model, args.method, args.steps))))
        return
    result: dict[str, Any] = {"goals": GOALS}
    for size in [args.size] if args.size else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder), size)
            for method in [args.method] if args.method else GOALS:
                if args.profile:
                    profile(folder, method, args.steps)
                    continue
                common = ("--model", folder, "--method", method, "--steps", str(args.steps))
                pairs = harness.alternate(__file__, args.pairs, *common)
                result[f"{method}, {size}"] = harness.compare(f"{method}, {size}", pairs)
    whole = not (args.size or args.method)
    if not args.profile:
        harness.save("vision" if whole else f"vision_{args.method or 'all'}_{args.size or 'all'}", result)


if __name__ == "__main__":
    main()
