"""Packages that register commands, methods, engines and checks: the example of docs/extend.md, and a broken package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import build_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")


def register(folder, name, points):
    """Write the metadata of an installed package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def installed(tmp_path):
    """A folder with the package of the page and a package whose modules cannot be imported."""
    for module, code in re.findall(r"```python\n# (bestof/\w+\.py)\n(.*?)```", PAGE, re.S):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text(code, encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    register(tmp_path, "bestof", tomllib.loads(toml)["project"]["entry-points"])
    groups = ("commands", "methods", "engines", "checks")
    register(tmp_path, "brittle", {f"posttrain.{group}": {"brittle": "brittle.nowhere:run"} for group in groups})
    return tmp_path


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import posttrain
from posttrain.cli.main import main

TRAIN = ["best-of", "--model_name_or_path", sys.argv[1] + "/model", "--dataset_name", sys.argv[1] + "/rows.jsonl",
    "--output_dir", sys.argv[1] + "/out", "--max_steps", "1", "--num_generations", "2", "--max_completion_length", "4",
    "--per_device_train_batch_size", "4", "--report_to", "none", "--save_strategy", "no", "--use_cpu", "true",
    "--reward_funcs", sys.argv[1] + "/rewards.py:short", "--rollout_engine"]
for words in (["--help"], ["hello", "world"], ["brittle"], [*TRAIN, "announced"], [*TRAIN, "brittle"],
        ["check", *TRAIN, "announced"]):
    print("#", words[0], words[-1], flush=True)
    print("# code", main(words), flush=True)
"""


def test_an_installed_package_adds_a_command_a_method_an_engine_and_a_check_and_a_broken_one_is_named(
    installed, tiny_tokenizer
):
    tiny_tokenizer.save_pretrained(installed / "model")
    build_model(len(tiny_tokenizer)).save_pretrained(installed / "model")
    (installed / "rows.jsonl").write_text('{"prompt": "abc"}\n' * 8, encoding="utf-8")
    (installed / "rewards.py").write_text("def short(completions, **_):\n    return [-len(c) for c in completions]\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(installed)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    parts = re.split(r"^# (?!code)(.*)\n", done.stdout, flags=re.M)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    broken = r"the entry point 'brittle' \(posttrain.{}\) of the package 'brittle' cannot be loaded"

    def shows(words, pattern, code=0):
        assert re.search(pattern, said[words]) and f"# code {code}" in said[words], done.stdout[-4000:]

    shows("--help --help", r"hello +greet the arguments\n")
    shows("--help --help", r"best-of +trainer of the package bestof\n")
    shows("--help --help", broken.format("commands"))
    shows("hello world", "hello world\n")
    shows("brittle brittle", broken.format("methods"), 1)
    shows("best-of announced", "announced engine\n")
    assert re.search(broken.format("checks"), done.stdout)
    shows("best-of announced", "PT-R900")
    shows("best-of brittle", broken.format("engines"), 1)
    shows("check announced", "PT-R900")
