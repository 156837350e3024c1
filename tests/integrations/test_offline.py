"""Names that nothing answers to: one error of ours, with what was looked for, where, and what is there instead."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from posttrain import DataError, ModelError, create_model_from_path
from posttrain.cli.main import main
from posttrain.data.mixture import load_rows
from posttrain.integrations import hub
from posttrain.integrations.hub import explained
from posttrain.models.load import check_model_source, clone_chat_template, load_tokenizer
from posttrain.rollouts.native import layers
from tests.wordings import raises


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    (tmp_path / "SmolLM2-135M").mkdir()
    (tmp_path / "capybara").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["SmolLM2-135", "HuggingFaceTB/SmolLM2-135"])
def test_a_mistyped_model_names_the_folder_the_cache_both_variables_and_the_nearest(name, here):
    for load, kind in ((create_model_from_path, "model"), (load_tokenizer, "tokenizer")):
        with pytest.raises(ModelError) as caught:
            load(name)
        said = str(caught.value)
        assert f"{kind} '{name}' was not found (did you mean 'SmolLM2-135M'?)" in said
        assert f"there is no folder '{here / name}'" in said and "hub's cache (" in said
        assert "HF_HUB_OFFLINE=1, TRANSFORMERS_OFFLINE=(not set)" in said


def test_a_missing_path_is_not_looked_for_on_the_hub(here):
    with raises(ModelError, "'./SmolLM2-13'", "'SmolLM2-135M'"):
        check_model_source("./SmolLM2-13")
    with raises(ModelError):
        load_tokenizer("runs/sft/checkpoint-7")


def test_a_mistyped_dataset_names_the_nearest_folder():
    with pytest.raises(DataError) as caught:
        load_rows("trl-lib/capybra")
    said = str(caught.value)
    assert "dataset 'trl-lib/capybra' was not found (did you mean 'capybara'?)" in said
    assert "HF_HUB_OFFLINE=1, HF_DATASETS_OFFLINE=" in said
    with raises(DataError, "'./capybra'", "'capybara'"):
        load_rows("./capybra")


def test_a_template_to_clone_is_looked_for_like_a_tokenizer(tiny_model, tiny_tokenizer):
    with raises(ModelError, "'no/such'"):
        clone_chat_template(tiny_model, tiny_tokenizer, "no/such")


def test_the_command_line_says_the_same_without_a_traceback(capsys, here):
    (here / "rows.jsonl").write_text('{"text": "a"}\n')
    argv = ["sft", "--model_name_or_path", "SmolLM2-135", "--dataset_name", "rows.jsonl", "--output_dir", "out"]
    assert main(argv) != 0
    said = capsys.readouterr().err
    assert "'SmolLM2-135' was not found" in said and "TRANSFORMERS_OFFLINE" in said and "Traceback" not in said
    argv[argv.index("rows.jsonl")] = "no/such"
    assert main(argv) != 0
    assert "dataset 'no/such' was not found" in capsys.readouterr().err


def test_an_error_inside_a_folder_that_is_there_is_not_covered_up(here):
    with raises(OSError), explained("tokenizer", "capybara"):
        raise OSError("disk on fire")


def test_a_hub_that_does_not_answer_is_told_at_once_with_the_copy_that_is_there(here, monkeypatch):
    import httpx2
    import huggingface_hub

    asked = []

    class Session:
        def head(self, url, timeout):
            asked.append(url)
            raise httpx2.ConnectError("name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(hub, "MADE", here)
    (here / "SmolLM2-135M" / "config.json").write_text("{}")
    with raises(ModelError, "'HuggingFaceTB/SmolLM2-135M'", "name or service not known", str(here / "SmolLM2-135M")):
        check_model_source("HuggingFaceTB/SmolLM2-135M")
    check_model_source("./SmolLM2-135M", generative=False)
    assert len(asked) == 1


def test_a_user_without_a_home_can_import_and_compile(monkeypatch):
    """`Path.home` raises for such a user, as in a container that runs under a bare number."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert not layers.folder().is_absolute()
    code = compile(Path(hub.__file__).read_text(encoding="utf-8"), hub.__file__, "exec")
    exec(code, names := {"__name__": hub.__name__})
    assert not names["MADE"].is_absolute()
