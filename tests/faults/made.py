"""`MADE`, the files and folders that configs in `tests.faults.refusals` name, and `make_named`, which makes those of one config."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Arguments: the folder of the tiny model, and the path to make.
Make = Callable[[Path, Path], object]
FUNCTIONS = '''
"""Functions for configs."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


class Game:
    """An environment without tools."""

    def reset(self, **row):
        return "What is 1?"


def silent(completions, **columns):
    """Score no completion."""
    return [None] * len(completions)
'''
SILENT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
)
BLOCK_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}{{ block['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
TRAIN = [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(8)]


def text(content: str) -> Make:
    """Return a function that writes a file with this text."""
    return lambda _, path: path.write_text(content, encoding="utf-8")


def folder(**files: Any) -> Make:
    """Return a function that makes a folder of JSON files. A double underscore in a name becomes a dot."""

    def make(_: Path, path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("__", ".")).write_text(json.dumps(content), encoding="utf-8")

    return make


def copied(*without: str, **changes: dict[str, Any]) -> Make:
    """Return a function that copies the tiny model.

    Args:
        without: Patterns of file names that are not copied.
        changes: New values in JSON files, by the name of the file without its suffix.
    """

    def make(model: Path, path: Path) -> None:
        shutil.copytree(model, path, ignore=shutil.ignore_patterns(*without))
        for name, values in changes.items():
            file = path / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")

    return make


def with_template(template: str) -> Make:
    """Return a function that copies the tiny model with another chat template."""

    def make(model: Path, path: Path) -> None:
        shutil.copytree(model, path)
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")

    return make


def scorer(model: Path, path: Path) -> None:
    """Save a reward model whose template reads lists of blocks."""
    from transformers import AutoModelForSequenceClassification

    with_template(BLOCK_TEMPLATE)(model, path)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(path)


def with_cut_weights(model: Path, path: Path) -> None:
    """Copy the tiny model and truncate its weight file."""
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def with_id_gap(model: Path, path: Path) -> None:
    """Copy the tiny model and remove one token of its tokenizer, so that its ids have a gap."""
    shutil.copytree(model, path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    last = "".join(merges[-1])
    number = next(i for i in range(len(merges) - 2, 0, -1) if "".join(merges[i]) not in merges[-1])
    unused = "".join(merges[number])
    assert all(unused not in pair for pair in merges) and vocabulary[last] > vocabulary[unused]
    del vocabulary[unused], merges[number]
    file.write_text(json.dumps(content), encoding="utf-8")


def convolutional(model: Path, path: Path) -> None:
    """Save a tiny LFM2, which has convolutions, with the tokenizer of the tiny model."""
    from tests.models.architectures import built

    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    built(
        "lfm2", vocab_size=json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ).save_pretrained(path)


def longrope(length: int) -> Make:
    """Return a function that copies the tiny model with rotary frequencies that change at ``length``."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return copied(config={"rope_parameters": rope | {"original_max_position_embeddings": length, "factor": 4.0}})


def vision(smaller: bool = False) -> Make:
    """Return a function that saves a tiny Qwen2-VL. With ``smaller``, its processor gives images fewer tokens."""

    def make(_: Path, path: Path) -> None:
        from tests.vision_families import build

        model, processor = build("qwen2_vl")
        if smaller:
            processor.image_processor.size = {"shortest_edge": 4 * 14**2, "longest_edge": 8 * 14**2}
        model.save_pretrained(path)
        processor.save_pretrained(path)

    return make


def images(*answers: str, change: Callable[[dict[str, Any]], object] | None = None) -> Make:
    """Return a function that writes rows with images. ``change`` is applied to the last of three different rows."""

    def make(_: Path, path: Path) -> None:
        import datasets

        from tests.methods.test_vision_trainers import rows

        listed = rows(*answers).cast_column("images", datasets.List(datasets.Image(decode=False))).to_list()
        if change is not None:
            change(listed[-1])
        dataset = datasets.Dataset.from_list([listed[0], listed[2], listed[3]] * 4)
        dataset.cast_column("images", datasets.List(datasets.Image())).to_parquet(path)

    return make


def torn(row: dict[str, Any]) -> None:
    """Truncate the bytes of the row's image."""
    row["images"][0]["bytes"] = row["images"][0]["bytes"][:40]


def multiplied(row: dict[str, Any]) -> None:
    """Repeat the row's image 40 times."""
    row["images"] *= 40
    row["prompt"][0]["content"] = row["prompt"][0]["content"][:1] * 40 + row["prompt"][0]["content"][1:]


def moved(row: dict[str, Any]) -> None:
    """Move the row's image from the prompt to the completion."""
    address = "data:image/png;base64," + base64.b64encode(row["images"].pop()["bytes"]).decode()
    del row["prompt"][0]["content"][0]
    row["completion"][0]["content"].insert(0, {"type": "image", "image": address, "text": None})


def arrow(metadata: dict[str, str] | None = None) -> Make:
    """Return a function that writes an Arrow file without rows."""

    def make(_: Path, path: Path) -> None:
        import pyarrow as pa

        schema = pa.schema([("ids", pa.int64())], metadata=metadata)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema):
            pass

    return make


def other_scores(model: Path, path: Path) -> None:
    """Write a file of teacher scores that belongs to other rows. It has 64 ids per token."""
    from posttrain.methods.distillation.teacher import FORMAT

    facts = {"top_k": 64, "batch_size": 8, "dataset": "0", "tokenizer": "0", "template": "0"}
    arrow({"format": FORMAT, "facts": json.dumps(facts)})(model, path)


def scores(model: Path, path: Path) -> None:
    """Write the teacher scores of the training split of ``both``."""
    from posttrain.cli.main import main

    flags = ["--teacher_model_name_or_path", str(model), "--model_name_or_path", str(model), "--dataset_name", "both"]
    assert main(["teacher-scores", *flags, "--output", str(path), "--top_k", "4"]) == 0


def both(_: Path, path: Path) -> None:
    """Write a folder with a training and a test split."""
    path.mkdir()
    for split in ("train", "test"):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAIN), encoding="utf-8")


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
STATE = {"global_step": 1}
MADE: dict[str, Make] = {
    "broken.py": text("raise ValueError('no value')\n"),
    "functions.py": text(FUNCTIONS),
    "template.jinja": text(SILENT_TEMPLATE),
    "both": both,
    "a-file": text(""),
    "headless": copied(config={"architectures": ["LlamaModel"]}),
    "three-layers": copied(config={"num_hidden_layers": 3}),
    "wide": copied(config={"intermediate_size": 128}),
    "cut-weights": with_cut_weights,
    "endless": copied(tokenizer_config={"eos_token": None, "pad_token": None}),
    "no-template": copied("chat_template*"),
    "no-tokenizer": copied("token*", "chat_template*", "special_tokens*"),
    "silent": with_template(SILENT_TEMPLATE),
    "block-scorer": scorer,
    "id-gap": with_id_gap,
    "convolutional": convolutional,
    "longrope-64": longrope(64),
    "longrope-128": longrope(128),
    "adapter": folder(adapter_config__json=LORA),
    "unfinished": folder(trainer_state__json=STATE),
    "of-a-model": folder(trainer_state__json=STATE, model__safetensors=0),
    "of-an-adapter": folder(trainer_state__json=STATE, adapter_model__safetensors=0, adapter_config__json=LORA),
    "cut": folder(
        trainer_state__json=STATE, model__safetensors=0, COMPLETE={"run": "a", "files": {"model.safetensors": 9}}
    ),
    "vision": vision(),
    "vision-smaller": vision(smaller=True),
    "prompts.parquet": images(),
    "torn.parquet": images(change=torn),
    "answers.parquet": images("completion"),
    "many.parquet": images("completion", change=multiplied),
    "shown.parquet": images("completion", change=moved),
    "pairs.parquet": images("chosen", "rejected"),
    "plain.arrow": arrow(),
    "other.arrow": other_scores,
    "scores.arrow": scores,
}  # fmt: skip


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def make_named(options: dict[str, Any], model: Path) -> None:
    """Make the files and folders that a config's options name, in the working directory."""
    words = {
        part for word in _texts(options) for part in (word, word.partition(":")[0], f"{word.partition('.')[0]}.py")
    }
    for name in [name for name in MADE if name in words and not Path(name).exists()]:
        MADE[name](model, Path(name))
