"""What tests of commands that load no weights begin with."""

from pathlib import Path

import pytest


@pytest.fixture
def unread_model(tiny_model_dir, tmp_path, monkeypatch):
    """A model's folder without weights to read; the working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    (Path(tiny_model_dir) / "model.safetensors").unlink()
    return tiny_model_dir


@pytest.fixture
def sums():
    """Twelve conversations of one question and one answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i} + 1?"},
                {"role": "assistant", "content": f"The sum is {i + 1}"},
            ]
        }
        for i in range(12)
    ]


@pytest.fixture
def pictured(tmp_path, monkeypatch):
    """A model folder with a processor, and rows of which one in three has no image."""
    import datasets

    from tests.methods.test_vision_trainers import assistant, png, user
    from tests.vision_families import build, noise

    model, processor = build("idefics3")
    model.config.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    images = [[png(noise(84, 56, i))] if i % 3 else [] for i in range(6)]
    rows = [
        {"prompt": user(f"which {i}?", len(held)), "images": held, **{n: assistant(n) for n in ("chosen", "rejected")}}
        for i, held in enumerate(images)
    ]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    dataset.to_parquet(tmp_path / "pairs.parquet")
    dataset.rename_column("chosen", "completion").remove_columns("rejected").to_parquet(tmp_path / "answers.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path
