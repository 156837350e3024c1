"""`Media`: runs on text import no code for images, and rows or processors with images load the extension."""

import os
import subprocess
import sys
from types import SimpleNamespace

import datasets

from posttrain import RewardConfig, SFTConfig
from posttrain.loop.media import Media, media_of

PROGRAM = """
import sys
import posttrain
from datasets import Dataset

folder, model = sys.argv[1:]
common = {"max_steps": 2, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
posttrain.SFTTrainer(
    model, posttrain.SFTConfig(folder + "/sft", **common), train_dataset=Dataset.from_dict({"text": ["1 + 1 = 2"] * 4})
).train()
posttrain.GRPOTrainer(
    model, lambda completions, **_: [float(len(text)) for text in completions],
    posttrain.GRPOConfig(folder + "/grpo", num_generations=2, max_completion_length=4, **common),
    train_dataset=Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 ="]}),
).train()
print([name for name in sys.modules if name.startswith("posttrain.extensions.images")])
"""


def test_runs_on_text_import_no_code_for_images(tmp_path, tiny_model_dir):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), tiny_model_dir],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr[-4000:]


def test_the_object_depends_on_rows_and_processor(tmp_path, tiny_tokenizer):
    from posttrain.extensions.images.vision import Vision
    from tests.vision_families import build

    _, processor = build("llava")
    text = datasets.Dataset.from_dict({"text": ["a"]})
    shown = datasets.Dataset.from_dict({"text": ["a"], "images": [["a.png"]]})
    args = SFTConfig(str(tmp_path), report_to="none", bf16=False)
    assert type(media_of(args, tiny_tokenizer, "", (text, None), takes=True)) is Media
    alone = media_of(args, processor, "", (text,), takes=True)
    assert isinstance(alone, Vision) and not alone.images and alone.tokenizer is processor.tokenizer
    seeing = media_of(args, processor, "", (None, shown), takes=True)
    assert seeing.images and seeing.reader is not None
    # A method that reads only text has a check of its own, which rejects the rows.
    other = RewardConfig(str(tmp_path), report_to="none", bf16=False)
    assert type(media_of(other, None, "", (shown,), takes=False)) is Media


def test_a_text_model_is_not_changed(tiny_model):
    media = Media(SimpleNamespace(should_save=False), None, "", takes=True)
    config = object()
    assert media.prepare(tiny_model, config) is config
    rows = [object()]
    assert media.placed(rows, [{}]) is rows and media.prompt_rows([{}]) == [] and media.pixels(rows) is None
