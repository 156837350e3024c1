"""The cache of reference log-probs: named by everything that moves them, whole or not there, computed once."""

import threading
import types

import datasets
import filelock
import numpy as np
import peft
import pytest

from posttrain.loop import precompute
from tests.conftest import build_model


class Stub:
    """What `precomputed_logps` asks of a run."""

    def __init__(self, tokenizer, **options):
        self.model = build_model(len(tokenizer))
        self.tokenizer = tokenizer
        self.accelerator = types.SimpleNamespace(mixed_precision="no", num_processes=1, is_main_process=True)
        self.layout = types.SimpleNamespace(kind="tree")
        self.options = {"max_length": 64, "truncation_mode": "keep_start", "ld_alpha": None} | options
        self.method = types.SimpleNamespace(reference_key=lambda: self.options)


def batches_of(examples):
    raise AssertionError("replaced in these tests")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder, and a computation that counts itself."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    calls = []

    def compute(trainer, dataset, reference, branches, batches_of):
        calls.append(1)
        return np.arange(len(dataset) * branches, dtype=np.float32).reshape(len(dataset), branches)

    monkeypatch.setattr(precompute, "_compute", compute)
    return types.SimpleNamespace(folder=tmp_path / "posttrain_reference", calls=calls)


DATA = datasets.Dataset.from_dict({"x": [1, 2, 3]})


def run(trainer, data=DATA):
    return precompute.precomputed_logps(trainer, data, None, ["a", "b"], name="train", batches_of=batches_of)


def test_the_second_run_reads_what_the_first_computed_and_leaves_no_part(cache, tiny_tokenizer):
    first, second = run(Stub(tiny_tokenizer)), run(Stub(tiny_tokenizer))
    assert first["a"] == second["a"] == [0.0, 2.0, 4.0] and second["b"] == [1.0, 3.0, 5.0]
    assert len(cache.calls) == 1
    assert sorted({path.suffix for path in cache.folder.iterdir()}) == [".lock", ".npy"]


@pytest.mark.parametrize(
    "change",
    ["weights", "template", "vocabulary", "max_length", "truncation_mode", "ld_alpha", "library", "data", "precision"],
)
def test_whatever_moves_the_numbers_names_another_file(cache, tiny_tokenizer, monkeypatch, change):
    run(Stub(tiny_tokenizer))
    options = {"max_length": 32} if change == "max_length" else {}
    options |= {"truncation_mode": "keep_end"} if change == "truncation_mode" else {}
    options |= {"ld_alpha": 0.5} if change == "ld_alpha" else {}
    trainer = Stub(tiny_tokenizer, **options)
    if change == "weights":
        next(trainer.model.parameters()).data[0, 0] += 1e-3
    elif change == "template":
        tiny_tokenizer.chat_template += " "
    elif change == "vocabulary":
        tiny_tokenizer.add_tokens(["<new>"])
    elif change == "library":
        monkeypatch.setattr(precompute, "__version__", "9.9.9")
    elif change == "precision":
        trainer.accelerator.mixed_precision = "bf16"
    run(trainer, datasets.Dataset.from_dict({"x": [1, 2, 4]}) if change == "data" else DATA)
    assert len(cache.calls) == 2


@pytest.mark.parametrize("change", ["active adapter", "lora_alpha", "scale", "rope_theta"])
def test_equal_weights_with_another_forward_pass_name_another_file(cache, tiny_tokenizer, change):
    """The log-probs of one adapter were read as those of the other, because both models hold both adapters."""

    def trainer(changed):
        made = Stub(tiny_tokenizer)
        alpha = 16 if changed and change == "lora_alpha" else 8
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
        made.model = peft.get_peft_model(made.model, config)
        made.model.add_adapter("two", config)
        for name, parameter in made.model.named_parameters():
            if "lora_" in name:
                parameter.data.fill_(0.1 if ".two." in name else 0.2)
        if changed and change == "active adapter":
            made.model.set_adapter("two")
        if changed and change == "scale":
            made.model.get_base_model().model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
        if changed and change == "rope_theta":
            made.model.config.rope_parameters["rope_theta"] = 500.0
        return made

    run(trainer(False))
    run(trainer(False))
    assert len(cache.calls) == 1
    run(trainer(True))
    assert len(cache.calls) == 2


def test_a_torn_file_is_computed_again_and_replaced(cache, tiny_tokenizer, caplog):
    run(Stub(tiny_tokenizer))
    (path,) = cache.folder.glob("*.npy")
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert run(Stub(tiny_tokenizer))["a"] == [0.0, 2.0, 4.0]
        assert path.read_bytes() == whole
    assert len(cache.calls) == 5 and "computed again" in caplog.text


def test_a_run_waits_for_another_that_computes_the_same(cache, tiny_tokenizer):
    run(Stub(tiny_tokenizer))
    (path,) = cache.folder.glob("*.npy")
    kept = path.read_bytes()
    path.unlink()
    lock = filelock.FileLock(path.with_suffix(".lock"), thread_local=False)
    lock.acquire()

    def finish():
        path.write_bytes(kept)
        lock.release()

    timer = threading.Timer(0.3, finish)
    timer.start()
    assert run(Stub(tiny_tokenizer))["a"] == [0.0, 2.0, 4.0]
    timer.join()
    assert len(cache.calls) == 1


def test_who_waits_too_long_computes_for_itself(cache, tiny_tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(precompute, "LOCK_WAIT", 0.05)
    run(Stub(tiny_tokenizer))
    (path,) = cache.folder.glob("*.npy")
    path.unlink()
    with filelock.FileLock(path.with_suffix(".lock")):
        run(Stub(tiny_tokenizer))
    assert len(cache.calls) == 2 and "may compute the same" in caplog.text


def test_a_full_disk_loses_the_cache_and_nothing_else(cache, tiny_tokenizer, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert run(Stub(tiny_tokenizer))["a"] == [0.0, 2.0, 4.0]
    assert "No space left on device" in caplog.text
    assert not [path for path in cache.folder.iterdir() if path.suffix != ".lock"]
