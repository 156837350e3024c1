"""The README: its code runs, and its names, commands, links and faults exist."""

import ast
import re
from pathlib import Path

from transformers import AutoModelForCausalLM

import posttrain
from posttrain.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_python_examples_compile_and_import_only_public_names():
    examples = blocks("python")
    assert examples
    for code in examples:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "posttrain":
                for name in node.names:
                    assert name.name in posttrain.__all__


def test_the_example_trains_a_model_that_can_be_loaded(tmp_path, monkeypatch, tiny_model_dir):
    monkeypatch.chdir(tmp_path)
    train, use = blocks("python")
    exec(compile(train.replace("HuggingFaceTB/SmolLM2-135M-Instruct", tiny_model_dir), "README.md", "exec"), {})
    assert len((tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines()) > 0
    AutoModelForCausalLM.from_pretrained("runs/grpo")
    exec(compile(use, "README.md", "exec"), {})


def test_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [line.strip() for block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert any(line.startswith("make demo") for line in lines)
    assert any(line.startswith("make test") for line in lines)
    for line in lines:
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "posttrain":
            assert words[1] in COMMANDS, line
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), line


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target


def test_detected_faults_are_those_of_the_page():
    shares = re.findall(r"\b\d+ of \d+\b", TEXT)
    assert shares and all(share in (ROOT / "docs/faults.md").read_text() for share in shares)
