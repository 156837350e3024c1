"""The one command for an accelerator: each of its parts runs on a tiny shape, and its table holds what was seen."""

import json

import pytest

from benchmarks import verify_gpu
from tests.gpu.scenarios import SCENARIOS


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
    assert set(parts) == set(verify_gpu.questions("tiny", "cpu"))
    assert (
        parts["grpo, tiny"]["engine"]
        and parts["sft, tiny"]["attention"]
        and parts["grpo, tiny"]["seconds_per_step"] > 0
    )
    assert page.startswith("before") and page.endswith("after\n") and "former row" not in page
    assert all(name in page for name in parts)


@pytest.mark.slow
def test_a_part_that_lacks_something_says_what(dry):
    _, parts, page = dry
    assert {name for name, part in parts.items() if "skipped" in part} >= {
        "prefix trees compared with padded rows, bf16, flex_attention"
    }
    assert "not run: FlexAttention is compiled for a GPU" in page
    for name in ("sft, tiny", "rollouts of paged"):
        assert "skipped" not in parts[name]


def answers(**by_name):
    return lambda *_: {name: lambda value=value: dict(value) for name, value in by_name.items()}


def test_every_scenario_belongs_to_one_family_and_sft_dpo_and_grpo_are_asked_first():
    names = [name for family in verify_gpu.FAMILIES.values() for name in family]
    assert sorted(names) == sorted(SCENARIOS)
    asked = list(verify_gpu.questions("tiny", "cpu"))
    assert asked[:4] == ["sft, tiny", "dpo, tiny", "grpo, tiny", "losses compared with the CPU: SFT, DPO, GRPO"]


def test_the_same_command_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch, capsys):
    run = lambda *more: verify_gpu.main(["--dry-run", "--out", str(tmp_path / "found.json"), *more])  # noqa: E731
    parts = lambda: json.loads((tmp_path / "found.json").read_text())["parts"]  # noqa: E731
    monkeypatch.setattr(verify_gpu, "questions", answers(first={"a": 1}, second={"a": 2}))
    assert (
        run("--minutes", "-1") == 0
        and "0 of 2 questions answered. The same command asks: ['first', 'second']" in capsys.readouterr().out
    )

    def killed(*_):
        def end():
            raise KeyboardInterrupt  # As a signal: nothing is written after it.

        return {"first": lambda: {"a": 1}, "second": end, "third": lambda: {"a": 3}}

    monkeypatch.setattr(verify_gpu, "questions", killed)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert parts()["first"]["a"] == 1 and parts()["second"] == {"failed": verify_gpu.UNANSWERED}
    monkeypatch.setattr(verify_gpu, "questions", answers(first={"a": 10}, second={"a": 20}, third={"a": 30}))
    assert run() == 1  # The one that ended the process is not asked again: it would end this one, too.
    assert parts()["first"]["a"] == 1 and "failed" in parts()["second"] and parts()["third"]["a"] == 30
    assert run("--again") == 0 and [part["a"] for part in parts().values()] == [10, 20, 30]


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(verify_gpu, "questions", lambda *_: {"first": broken, "second": lambda: {"losses": [1.0]}})
    assert verify_gpu.main(["--dry-run", "--out", str(tmp_path / "found.json")]) == 1
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["first"]["failed"] == "RuntimeError: no such kernel" and parts["second"]["losses"] == [1.0]
