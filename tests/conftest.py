"""Fixtures shared by all tests: a tiny tokenizer with a chat template and a two-layer Llama that fits it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import accelerate.utils.memory
import httpcore2
import pytest
import torch

from tests.forks import ROOT, Spawned, open_session

if not torch.cuda.is_available():
    # Triton decides when it is first imported, by whichever library, whether kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # For a GPU that may come, torch keeps every seeding with the stack it came from.
    torch.cuda.random._lazy_call = torch.xpu.random._lazy_call = torch.mtia._lazy_call = lambda *_, **__: None

# Trainers ask for a full collection as each begins to train: a twentieth of the suite. The automatic ones find their garbage too.
accelerate.utils.memory.clear_device_cache = lambda garbage_collection=False: None

# Each client of an address reads the certificates of all authorities, 30 ms of computing; those of tests ask this machine.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# Power stays on while tests run: each waits for the disk a dozen times, and what is killed has written all the same.
os.fsync = lambda _: None


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a session share the templates of `tests.forks`; workers inherit where they are."""
    if not hasattr(config, "workerinput"):
        open_session()


DURATIONS = Path(__file__).with_name("durations.json")  # Seconds of files that take some: `tools/durations.py`.


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list) -> None:
    """Five sixths of each matrix are slow tests; then the longest files begin first, lest others wait for them at the end.

    A matrix is marked as one, or is a test with parameters that takes seconds by `DURATIONS`.
    """
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    begun = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("matrix") or test in seconds:
            # Its name decides, so that each test leaves out other families and engines; the first cell is always run.
            if test in begun and zlib.crc32(item.nodeid.encode()) % 6:
                item.add_marker("slow")
                item.add_marker("matrix")
            begun.add(test)
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


_since_frozen = 0


def _freeze() -> None:
    """Half a million objects of imported libraries are looked at by each full collection, of which trainers ask for some."""
    gc.collect()
    gc.freeze()


def _read_part(index: int, count: int) -> None:
    """Each process reads other files first: what pytest makes of their assertions is made once and there for the rest."""
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[index::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # Said where it is collected.
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Imports and thousands of items are no garbage, and looking for some was a third of this time."""
    gc.disable()
    try:
        if worker := getattr(session.config, "workerinput", None):
            _read_part(int(worker["workerid"][2:]), worker["workercount"])
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """No import of a test's file is garbage."""
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What tests import adds up: it is frozen now and then, between two files, where no test's own objects are alive."""
    global _since_frozen
    yield
    _since_frozen += 1
    if _since_frozen > 300 and nextitem is not None and nextitem.path != item.path:
        _freeze()
        _since_frozen = 0


class BrokenChecks(logging.Handler):
    """What the checks of a run say of themselves where one of them fails, which ends no run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "failed with an error" in message or "cannot be estimated" in message:
            self.told.append(message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A check that breaks fails the test it breaks in, unless that test reads the log."""
    checks, handler = logging.getLogger("posttrain.checks"), BrokenChecks()
    checks.addHandler(handler)
    try:
        yield
    except Exception as error:
        if handler.told:
            raise AssertionError(f"{error}; checks that broke: {handler.told}") from error
        raise
    finally:
        checks.removeHandler(handler)
    if handler.told and "caplog" not in getattr(item, "fixturenames", ()):
        raise AssertionError(f"checks that broke: {handler.told}")


def pytest_sessionfinish() -> None:
    """Libraries look for leaks as the interpreter ends; pytest collects before that, twice."""
    atexit.register(gc.unfreeze)


CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def build_tokenizer():
    """A byte-level BPE trained on a few lines: 300 or so tokens, pad equal to eos (a trap on purpose)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["What is the sum of two numbers? The answer is a number.", "user assistant system tool", "0123456789 + - ="]
    backend.train_from_iterator(text * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def told_of_calls(module, tell):
    """Let ``tell`` be called with each call of a module; not by a hook, for which an output layer makes whole logits."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: (tell(), forward(*args, **kwargs))[1]


def build_model(vocab_size: int, seed: int = 0, **overrides):
    """A two-layer Llama with grouped key-value heads, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()


def build_masked_model(vocab_size: int, head: str = "CausalLM", seed: int = 3, **overrides):
    """A two-layer StableLM: its layers pass a mask on to attention and nothing else, so that it takes no segments."""
    import transformers

    torch.manual_seed(seed)
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": 1}
    settings |= {"eos_token_id": 2, "pad_token_id": 2, "vocab_size": vocab_size}
    config = transformers.StableLmConfig(**(settings | overrides))
    return getattr(transformers, f"StableLmFor{head}")(config).eval()


def scale_logits(model, factor=0.3):
    """Let a model do to its logits what no config names, as code that comes with one may; returns it."""
    plain = model.forward

    def scaled(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * factor
        return out

    model.forward = scaled
    return model


@pytest.fixture(autouse=True, scope="session")
def _proven_once() -> Iterator[None]:
    """Whether an image processor by itself prepares a large picture as its processor does, shown once for equal processors."""
    from posttrain.extensions.images.processors import PictureProcessor

    shown, prove = {}, PictureProcessor._alone.func

    def remembered(self):
        image, made = self.processor.image_processor, self.processor
        key = (self.family, type(made), repr(made.to_dict()), type(image), repr(sorted(vars(image).items(), key=str)))
        if key not in shown:
            shown[key] = prove(self)
        return shown[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PictureProcessor, "_alone", functools.cached_property(remembered))
        PictureProcessor._alone.__set_name__(PictureProcessor, "_alone")
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_commit() -> Iterator[None]:
    """Nobody commits while tests run: each run of a trainer asks git in a process of its own."""
    from posttrain.report import record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_git_commit", functools.cache(record._git_commit))
        yield


@pytest.fixture
def forked_workers(monkeypatch):
    """Processes of multiprocessing's spawn context are forked from one with the imports behind it; their start is not tested."""
    monkeypatch.setattr("multiprocessing.popen_spawn_posix.Popen", Spawned)


@pytest.fixture(scope="session")
def _tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_tokenizer(_tokenizer_folder):
    """A fresh copy each time, so a test may change it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_tokenizer_folder)


@pytest.fixture
def tiny_model(tiny_tokenizer):
    """A two-layer Llama with the vocabulary of `tiny_tokenizer`."""
    return build_model(len(tiny_tokenizer))


@pytest.fixture
def tiny_model_dir(tiny_model, tiny_tokenizer, tmp_path):
    """A folder that `from_pretrained` loads, holding `tiny_model` and `tiny_tokenizer`."""
    folder = tmp_path / "tiny-model"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def made():
    """A list of what a test made; each item is closed at the end, the last one first."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()
