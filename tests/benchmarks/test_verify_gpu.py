"""The one command for an accelerator: each of its parts runs on a tiny shape, and its table holds what was seen."""

import json

import pytest

from benchmarks import verify_gpu


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    page = folder / "page.md"
    page.write_text(f"before\n{verify_gpu.BEGIN}\nformer row\n{verify_gpu.END}\nafter\n")
    code = verify_gpu.main(["--dry-run", "--out", str(folder / "found.json"), "--page", str(page)])
    return code, json.loads((folder / "found.json").read_text())["parts"], page.read_text()


@pytest.mark.slow
def test_every_part_of_a_dry_run_holds(dry):
    code, parts, page = dry
    assert code == 0 and not [name for name, part in parts.items() if "failed" in part]
    assert set(parts) == set(verify_gpu.parts("tiny", "cpu"))
    assert page.startswith("before") and page.endswith("after\n") and "former row" not in page
    assert all(name in page for name in parts)


@pytest.mark.slow
def test_a_part_that_lacks_something_says_what(dry):
    _, parts, page = dry
    assert {name for name, part in parts.items() if "skipped" in part} >= {"forest beside padded, bf16, flex_attention"}
    assert "not run: FlexAttention is compiled for a GPU" in page
    for name in ("sft, tiny", "rollouts of paged"):
        assert "skipped" not in parts[name]


def test_no_part_begins_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_gpu, "LIMIT", -1.0)
    assert verify_gpu.main(["--dry-run", "--out", str(tmp_path / "found.json")]) == 0
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert all("seconds had passed" in part["skipped"] for part in parts.values())


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(verify_gpu, "parts", lambda *_: {"first": broken, "second": lambda: {"losses": [1.0]}})
    assert verify_gpu.main(["--dry-run", "--out", str(tmp_path / "found.json")]) == 1
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["first"]["failed"] == "RuntimeError: no such kernel" and parts["second"]["losses"] == [1.0]
