"""Core without `posttrain/extensions/`: every core name is importable, and trainers train."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import build_model

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
import posttrain
from datasets import Dataset

folder = Path(sys.argv[1])
assert Path(posttrain.__file__).is_relative_to(folder), posttrain.__file__
for name, module in posttrain._PUBLIC.items():
    if not module.startswith("extensions."):
        getattr(posttrain, name)
        continue
    try:
        getattr(posttrain, name)
    except posttrain.MissingDependencyError as error:
        assert f"the extension {module.split('.')[1]!r} is not installed" in str(error), error
    else:
        raise AssertionError(f"{name} is importable without its extension")

def settings(kind, **more):
    return kind(str(folder / kind.__name__), max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, **more)

model, texts = str(folder / "model"), ["1 + 1 = 2", "2 + 2 = 4"]
sft = posttrain.SFTTrainer(model, settings(posttrain.SFTConfig), train_dataset=Dataset.from_dict({"text": texts}))
pairs = {"prompt": ["1 + 1 =", "2 + 2 ="], "chosen": [" 2", " 4"], "rejected": [" 3", " 5"]}
dpo = posttrain.DPOTrainer(model, args=settings(posttrain.DPOConfig), train_dataset=Dataset.from_dict(pairs))
grpo = posttrain.GRPOTrainer(
    model, lambda completions, **_: [float(len(text)) for text in completions],
    settings(posttrain.GRPOConfig, num_generations=2, max_completion_length=4),
    train_dataset=Dataset.from_dict({"prompt": pairs["prompt"]}),
)
for trainer in (sft, dpo, grpo):
    trainer.train()
    assert trainer.state.global_step == 1
question, answer = [{"role": "user", "content": "which?"}], [{"role": "assistant", "content": "a"}]
shown = Dataset.from_list([{"prompt": question, "completion": answer, "images": ["a.png"]}] * 2)
try:
    posttrain.SFTTrainer(model, settings(posttrain.SFTConfig), train_dataset=shown)
except posttrain.MissingDependencyError as error:
    assert "the extension 'images' is not installed" in str(error), error
else:
    raise AssertionError("rows with images are accepted without their extension")
print("trained")
"""


def test_core_imports_and_trains_without_the_extensions(tmp_path, tiny_tokenizer):
    shutil.copytree(
        ROOT / "posttrain", tmp_path / "posttrain", ignore=shutil.ignore_patterns("extensions", "__pycache__")
    )
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    build_model(len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert "trained" in done.stdout, done.stderr[-4000:]
