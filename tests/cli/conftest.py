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
