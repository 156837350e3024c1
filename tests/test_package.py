"""The package as a whole: public names, lazy imports, and no mention of anything but itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    "matplotlib",
    "wandb",
    "trackio",
    "liger_kernel",
    "bitsandbytes",
    "vllm",
    "deepspeed",
    "math_verify",
    "gguf",
    "fastapi",
    "uvicorn",
    "mergekit",
    "weave",
    "comet_ml",
    "psutil",
    "scipy",
)


def python(code, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )


def test_all_is_sorted_and_every_name_is_there():
    assert posttrain.__all__ == sorted(posttrain.__all__)
    assert len(set(posttrain.__all__)) == len(posttrain.__all__)
    for name in posttrain.__all__:
        assert getattr(posttrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'GPROTrainer'"):
        posttrain.GPROTrainer  # noqa: B018


def test_importing_the_package_is_fast_and_loads_no_torch():
    code = "import time; t=time.perf_counter(); import posttrain; d=time.perf_counter()-t; import sys; print(d, 'torch' in sys.modules)"
    best = min(float(python(code).stdout.split()[0]) for _ in range(3))
    assert python(code).stdout.split()[1] == "False"
    assert best < 0.3


def test_every_public_name_imports_without_any_optional_package():
    blocked = f"import sys; [sys.modules.__setitem__(n, None) for n in {OPTIONAL!r}]; import posttrain; "
    done = python(blocked + "[getattr(posttrain, n) for n in posttrain.__all__]; print('fine')")
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_every_public_class_and_function_says_what_it_is():
    missing = [n for n in posttrain.__all__ if not (getattr(posttrain, n).__doc__ or "").strip()]
    assert not missing


def tracked():
    out = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False).stdout.split()
    return [ROOT / name for name in out if (ROOT / name).is_file()]


def test_the_project_speaks_of_itself_only():
    words = re.compile(
        r"/work/main|/work/shared|/opt/dev|/opt/peer|/tmp/setup|\.library\b|helper session|files\.pythonhosted"
    )
    imports = re.compile(r"^\s*(import trl\b|from trl\b)", re.M)
    for path in tracked():
        if path.suffix in (".png", ".parquet") or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not words.search(text), f"{path}: {words.search(text)}"
        if path.parts[len(ROOT.parts)] in ("posttrain", "tests"):
            assert not imports.search(text), path


def test_every_choice_of_the_config_is_a_row_of_its_table():
    import typing

    from posttrain.algorithms.grpo.config import GRPOConfig
    from posttrain.algorithms.sft import LOSSES, SFTConfig
    from posttrain.losses.policy import LOSS_TYPES

    hints = typing.get_type_hints(GRPOConfig)
    assert typing.get_args(hints["loss_type"]) == tuple(LOSS_TYPES)
    assert set(typing.get_args(typing.get_args(typing.get_type_hints(SFTConfig)["loss_type"])[0])) == set(LOSSES)
