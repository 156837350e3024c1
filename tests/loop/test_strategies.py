"""Code of sequence parallelism, images, NEFTune and longrope does not run in plain text runs."""

import os
import sys

import transformers

import posttrain
from tests.methods.every_trainer import every
from tests.methods.helpers import grpo

HOME = os.path.dirname(posttrain.__file__) + os.sep
FILES = ("models/token_split.py", "extensions/", "loop/media.py", "models/neftune.py")
FUNCTIONS = {"rope_limits", "check_rope", "_by_rope", "picture_encoder", "has_tower", "_encodes_images", "image_token", "_view"}  # fmt: skip
# Functions that still ask in each step whether a strategy applies. A line is deleted with its function, and none is added.
STILL_ASKED = {
    "data/forest.py:_by_rope",
    "models/architecture.py:image_token",
    "models/attention.py:rope_limits",
    "models/forward.py:_view",
    "models/heads.py:_encodes_images",
    "models/heads.py:has_tower",
    "models/heads.py:picture_encoder",
    "models/token_split.py:active",
    "models/token_split.py:turns",
    "rollouts/native/requests.py:check_rope",
}


class SecondStep(transformers.TrainerCallback):
    """Collects the functions of strategies that the second optimizer step calls."""

    def __init__(self):
        self.called = set()

    def look(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            file = code.co_filename[len(HOME) :]
            if file.startswith(FILES) or code.co_name in FUNCTIONS:
                self.called.add(f"{file}:{code.co_qualname}")

    def on_step_end(self, args, state, control, **kwargs):
        sys.setprofile(self.look if state.global_step == 1 else None)


def test_a_plain_text_run_calls_no_strategy_in_its_second_step(tmp_path, tiny_tokenizer):
    called = set()
    for kind in ("sft", "dpo", "grpo"):
        settings = {"max_steps": 3, "logging_steps": 10}
        if kind == "grpo":
            trainer = grpo(tmp_path / kind, tiny_tokenizer, engine="native", **settings)
        else:
            trainer = every(kind, tmp_path / kind, tiny_tokenizer, **settings)
        second = SecondStep()
        trainer.add_callback(second)
        trainer.train()
        called |= second.called
    assert called == STILL_ASKED
