"""Examples are short, use public names only, and keep working when names change."""

import ast
import importlib
import json
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_and_says_what_it_shows(path):
    text = path.read_text()
    assert text.count("\n") <= 80
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_name_an_example_imports_from_the_package_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "posttrain":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_no_link_into_the_package(path):
    """Python looks for modules beside the target first: there, our `inspect` would be found for the standard library's."""
    assert not path.is_symlink()


def test_the_notebook_for_a_gpu_runs_what_is_there_and_has_no_output():
    root = EXAMPLES[0].parents[1]
    book = json.loads((root / "examples/notebooks/verify_gpu.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in book["cells"])
    command = next(text for text in code if "verify_gpu.py --page" in text)
    _, script, _, page = command[command.index("python ") :].split()
    assert (root / script).exists()
    marks = [mark for mark in ("<!-- gpu -->", "<!-- end of gpu -->") if mark in code[-1]]
    assert all(mark in (root / page).read_text(encoding="utf-8") for mark in marks) and len(marks) == 2
    for text in code:
        if not text.startswith(("!", "%")):
            ast.parse(text)


def test_the_notebook_about_sft_trains_what_its_text_says(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_MODEL", tiny_model_dir)
    book = json.loads((EXAMPLES[0].parent / "notebooks" / "sft_lora.ipynb").read_text(encoding="utf-8"))
    cells = {
        kind: ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == kind] for kind in ("code", "markdown")
    }
    assert any("what the user says is not" in text for text in cells["markdown"])
    names = {}
    for code in cells["code"][:3]:
        exec(compile(code, "sft_lora", "exec"), names)
    report = str(names["trainer"].data_report())
    assert "[[The sum is 20." in report and "user" not in "".join(report.split("[[")[1:]).partition("]]")[0]
