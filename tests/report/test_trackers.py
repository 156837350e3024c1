"""What is logged reaches TensorBoard, W&B and trackio too, and can be read back from what they keep."""

import importlib.util
import json
import math
import sqlite3
import time

import pytest

from tests.methods.helpers import grpo, sft


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")


def recorded(folder):
    """Numbers of the run record: name, step, value; steps of training as trackers name them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                found[f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", row["step"]] = float(value)
    return found


# What the last line says of the whole run; some trackers keep it as a summary, not as a curve.
SUMMARIES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


def compare(told, folder, least, summaries=SUMMARIES):
    """Every number of the record must be where the tracker keeps its own, equal to single precision."""
    wanted = recorded(folder)
    assert len(wanted) >= least
    missing = sorted(key for key in wanted if key not in told and key[0].removeprefix("train/") not in summaries)
    assert missing == []
    wrong = {
        key: (told[key], value)
        for key, value in wanted.items()
        if key in told and not math.isclose(told[key], value, rel_tol=1e-5, abs_tol=1e-6)
    }
    assert wrong == {}


def leveldb_records(content):
    """Records of a log in LevelDB's format: blocks of 32 KiB, pieces with a checksum, a length and a type."""
    at, parts = 0, b""
    while at + 7 <= len(content):
        left = 32768 - (at + 7) % 32768  # Counted from the beginning of the file.
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0:
            break
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # Whole, or the last piece.
            yield parts
            parts = b""


@needs("tensorboard")
def test_tensorboard_holds_every_metric_of_a_grpo_run(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = grpo(tmp_path / "run", tiny_tokenizer, report_to="tensorboard")
    trainer.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = {}
    for path in {file.parent for file in (tmp_path / "tb").rglob("events.*")}:
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            told |= {(name, event.step): event.value for event in events.Scalars(name)}
    compare(told, tmp_path / "run", 40, summaries=())
    assert ("train/reward", 1) in told and ("train/completions/mean_length", 2) in told


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline_holds_every_metric(tmp_path, tiny_tokenizer, monkeypatch):
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "PROJECT": "tiny"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    trainer = sft(tmp_path / "run", tiny_tokenizer, report_to="wandb")
    trainer.train()
    import wandb

    wandb.finish()
    from wandb.proto import wandb_internal_pb2

    told, ended, until = {}, False, time.monotonic() + 30
    while not ended and time.monotonic() < until:  # Another process writes the file, and may be a moment behind.
        (path,) = tmp_path.rglob("*.wandb")
        for data in leveldb_records(path.read_bytes()[7:]):  # Seven bytes name the format.
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ended = ended or record.WhichOneof("record_type") == "exit"
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = row.get("train/global_step")
            told |= {(name, step): value for name, value in row.items() if isinstance(value, int | float)}
    compare(told, tmp_path / "run", 15)


@pytest.mark.slow
@needs("trackio")
def test_trackio_holds_every_metric(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trainer = sft(tmp_path / "run", tiny_tokenizer, report_to="trackio", project="tiny", run_name="one")
    trainer.train()
    (path,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(metrics) for (metrics,) in database.execute("select metrics from metrics order by step")]
    told = {}
    for row in rows:
        step = row.get("train/global_step")
        told |= {(name, step): value for name, value in row.items() if isinstance(value, int | float)}
    compare(told, tmp_path / "run", 15)
