"""Loading by name and mixing: fractions, seeds, and files that are broken."""

import json
import logging
import os
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset, load_rows
from posttrain.errors import ConfigError, DataError
from tests import forks
from tests.wordings import raises


@pytest.fixture
def jsonl(tmp_path):
    def write(name, count, start=0):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"q{i}", "answer": i}) + "\n" for i in range(start, start + count))
        )
        return str(path)

    return write


def test_a_jsonl_file_loads_by_its_path(jsonl):
    assert load_rows(jsonl("a", 3), split="train")["answer"] == [0, 1, 2]


def test_a_broken_line_is_named(jsonl):
    path = jsonl("a", 3)
    with open(path, "a") as file:
        file.write('{"prompt": "q3", \n')
    with raises(DataError, "4"):
        load_rows(path)


def test_an_unknown_kind_of_file_is_named(tmp_path):
    path = tmp_path / "m.xlsx"
    path.write_text("x")
    with raises(DataError, "'.xlsx'"):
        load_rows(str(path))


def test_a_saved_dataset_folder_loads(tmp_path):
    datasets.Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "d")
    assert load_rows(str(tmp_path / "d"))[0]["prompt"] == "x"


def test_a_missing_path_is_named():
    with raises(DataError):
        load_rows("/no/such/file")


def test_fractions_take_the_worked_example(jsonl):
    mixture = DatasetMixtureConfig(
        [DatasetConfig(jsonl("a", 17), fraction=0.75), DatasetConfig(jsonl("b", 17, 100), fraction=0.25)]
    )
    rows = get_dataset(mixture)["train"]["answer"]
    assert rows == [*range(17), *range(100, 106)]


def test_a_split_is_the_same_for_the_same_seed(jsonl):
    path = jsonl("a", 20)
    one, two = (
        get_dataset(DatasetMixtureConfig([path], test_split_size=0.2), seed=3)["test"]["answer"][:] for _ in range(2)
    )
    assert one == two
    assert len(one) == 4


@pytest.mark.parametrize(
    ("fractions", "message"),
    [((0.5, None), "only for some datasets"), ((0.0, 0.0), "one must be above 0"), ((-1.0, 2.0), "at least 0")],
)
def test_bad_fractions_are_refused(jsonl, fractions, message):
    members = [DatasetConfig(jsonl(str(i), 4), fraction=f) for i, f in enumerate(fractions)]
    with pytest.raises(ConfigError, match=message):
        get_dataset(DatasetMixtureConfig(members))


def test_members_with_other_columns_are_named(jsonl, tmp_path):
    other = tmp_path / "o.jsonl"
    other.write_text('{"prompt": "x", "solution": "1"}\n')
    with raises(DataError, "'answer'", "'solution'"):
        get_dataset(DatasetMixtureConfig([jsonl("a", 2), str(other)]))


def test_streaming_refuses_what_needs_lengths(jsonl):
    with pytest.raises(ConfigError, match="test_split_size"):
        get_dataset(DatasetMixtureConfig([jsonl("a", 4)], streaming=True, test_split_size=0.5))
    with raises(ConfigError):
        get_dataset(DatasetMixtureConfig())


def test_a_line_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n3\n')
    with raises(DataError, "2"):
        load_rows(str(path))


def test_a_broken_line_in_a_folder_names_file_and_line(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "poor.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with raises(DataError, "3"):
        load_rows(str(tmp_path))


def test_files_of_a_folder_with_other_columns_or_no_rows_are_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 1, "b": 2}\n')
    with raises(DataError, "'test.jsonl': ['a', 'b'], 'train.jsonl': ['a']"):
        load_rows(str(tmp_path))
    (tmp_path / "test.jsonl").write_text("\n")
    with raises(DataError, "['test.jsonl'] have no rows"):
        load_rows(str(tmp_path))


def test_an_empty_file_and_a_broken_array_are_named(tmp_path):
    (tmp_path / "e.jsonl").write_text("")
    with raises(DataError):
        load_rows(str(tmp_path / "e.jsonl"))
    (tmp_path / "b.json").write_text('[{"a": 1},\n {"a": ]')
    with raises(DataError, "1"):
        load_rows(str(tmp_path / "b.json"))


def test_json_csv_and_parquet_files_load(tmp_path):
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    (tmp_path / "r.csv").write_text("a,b\n1,x\n2,y\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    for suffix in ("json", "csv", "parquet"):
        # Columns of CSV are text: an answer "007" is no number.
        known = [{"a": str(row["a"]), "b": row["b"]} for row in rows] if suffix == "csv" else rows
        assert load_rows(str(tmp_path / f"r.{suffix}"), split="train").to_list() == known
        assert list(load_rows(str(tmp_path / f"r.{suffix}"), split="train", streaming=True)) == known


DATES = [
    {
        "answer": "2024-01-01",
        "date": "2024-01-01",
        "digits": "07",
        "turns": [{"content": "2024-01-01 10:00:00", "at": None}],
    }
] * 2
BOM = b"\xef\xbb\xbf"


def _as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["lines", "array", "indented", "folder", "marked", "marked array", "marked folder"])
def test_texts_of_json_files_that_look_like_dates_stay_texts_and_byte_order_marks_are_read(tmp_path, kind, streaming):
    file = tmp_path / "data" / ("rows.json" if "array" in kind or kind == "indented" else "rows.jsonl")
    file.parent.mkdir()
    text = (
        _as_lines(DATES)
        if file.suffix == ".jsonl"
        else json.dumps(DATES, indent=1 if kind == "indented" else None).encode()
    )
    if kind == "indented":
        text = b"\n" + text
    file.write_bytes(BOM * ("marked" in kind) + text)
    if "folder" in kind:
        file.with_name("second.jsonl").write_bytes(BOM * ("marked" in kind) + _as_lines(DATES))
    rows = list(load_rows(str(file.parent if "folder" in kind else file), split="train", streaming=streaming))
    assert rows == DATES * (2 if "folder" in kind else 1)


def test_times_that_another_program_left_in_the_cache_are_read_again(tmp_path, monkeypatch):
    from datasets.packaged_modules.json import json as loader

    (tmp_path / "rows.jsonl").write_bytes(_as_lines(DATES))
    with monkeypatch.context() as usual:
        usual.setattr(loader, "paj", pa.json)
        before = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert before[0]["answer"] != "2024-01-01"
    reader = loader.paj
    assert load_rows(str(tmp_path / "rows.jsonl"), split="train")[0] == DATES[0]
    assert loader.paj is reader, "a user's own load_dataset reads as ever"


def test_digits_of_a_folder_of_csv_files_are_text_as_those_of_one_file(tmp_path):
    for name, answer in (("a", "07"), ("b", "8")):
        (tmp_path / f"{name}.csv").write_text(f"prompt,answer,label\n1,{answer},1\n")
    rows = load_rows(str(tmp_path), split="train")[:]
    assert rows == {"prompt": ["1", "1"], "answer": ["07", "8"], "label": [1, 1]}


def test_a_byte_order_mark_does_not_hide_the_first_column_of_a_csv_file(tmp_path):
    (tmp_path / "rows.csv").write_bytes(BOM + b"answer,prompt\n07,a\n")
    assert load_rows(str(tmp_path / "rows.csv"), split="train")[0] == {"answer": "07", "prompt": "a"}


def test_parquet_files_of_mixed_types_name_column_types_and_files(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": ["one"], "b": ["y"]}), tmp_path / "2.parquet")
    with raises(DataError, "'a'", "int64", "1.parquet", "2.parquet"):
        load_rows(str(tmp_path))


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path):
    for name, values in (("a", ["x"]), ("b", [1])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"text": values}), tmp_path / name / "0.parquet")
    with pytest.raises(DataError, match=r"string in a/0.parquet and int64 in b/0.parquet"):
        load_rows(str(tmp_path))


def test_a_split_of_a_file_is_never_another_one(jsonl):
    assert load_rows(jsonl("a", 10), split="train[2:4]")["answer"] == [2, 3]
    with raises(DataError, "'test'"):
        load_rows(jsonl("a", 10), split="test")


def test_splits_of_a_saved_folder(tmp_path):
    rows = datasets.Dataset.from_list([{"i": i} for i in range(10)])
    datasets.DatasetDict({"train": rows, "dev": rows.select(range(3))}).save_to_disk(tmp_path / "d")
    assert set(load_rows(str(tmp_path / "d"))) == {"train", "dev"}
    assert load_rows(str(tmp_path / "d"), split="train[:20%]+dev[1:]")["i"] == [0, 1, 1, 2]
    assert [row["i"] for row in load_rows(str(tmp_path / "d"), split="dev", streaming=True)] == [0, 1, 2]
    with raises(DataError, "'dve'", "'dev'", "'train'"):
        load_rows(str(tmp_path / "d"), split="dve")
    rows.save_to_disk(tmp_path / "one")
    assert len(load_rows(str(tmp_path / "one"), split="train")) == 10


def test_options_without_use_are_refused(jsonl):
    with raises(ConfigError, "data_files"):
        load_rows(jsonl("a", 2), data_files="b.jsonl")


def test_a_mistyped_file_name_gets_its_neighbour(jsonl):
    path = jsonl("prompts", 2)
    with raises(DataError, "'prompts.jsonl'"):
        load_rows(path.replace("prompts", "promps"))


def test_offline_mode_is_said(tmp_path):
    code = (
        "from posttrain.data.mixture import load_rows\n"
        "try: load_rows('nobody/nothing')\n"
        "except ValueError as error: print(error)\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert "dataset 'nobody/nothing' was not found" in out.stdout
    assert f"({tmp_path / 'hub'}), and it cannot be downloaded in offline mode (HF_HUB_OFFLINE=1" in out.stdout


def test_zero_weight_takes_nothing_and_does_not_limit_the_others(jsonl):
    members = [DatasetConfig(jsonl("a", 4), fraction=1.0), DatasetConfig(jsonl("b", 1, 100), fraction=0.0)]
    assert get_dataset(DatasetMixtureConfig(members))["train"]["answer"] == [0, 1, 2, 3]


def test_trap_s33_head_warns_and_random_is_a_seeded_choice(jsonl, caplog):
    members = [DatasetConfig(jsonl("a", 40), fraction=0.5), DatasetConfig(jsonl("b", 10, 100), fraction=0.5)]
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        assert get_dataset(DatasetMixtureConfig(members))["train"]["answer"] == [*range(10), *range(100, 110)]
    assert "first 10 of 40 rows" in caplog.text
    caplog.clear()
    one, two, other = (
        get_dataset(DatasetMixtureConfig(members, sample="random"), seed=s)["train"]["answer"][:] for s in (1, 1, 2)
    )
    assert one == two != other
    assert one[:10] != list(range(10))
    assert set(one[:10]) < set(range(40))
    assert caplog.text == ""


def test_train_and_test_part_the_rows(jsonl):
    parts = get_dataset(DatasetMixtureConfig([jsonl("a", 20)], test_split_size=0.25))
    assert sorted([*parts["train"]["answer"], *parts["test"]["answer"]]) == list(range(20))
    with raises(DataError, "1"):
        get_dataset(DatasetMixtureConfig([jsonl("b", 1)], test_split_size=0.5))


def test_trap_s32_two_processes_draw_the_same_split(jsonl):
    path = jsonl("a", 30)
    code = (
        "import sys\nfrom posttrain.data.mixture import DatasetMixtureConfig, get_dataset\n"
        "d = get_dataset(DatasetMixtureConfig([sys.argv[1]], test_split_size=0.3), seed=7)\nprint(d['test']['answer'][:])\n"
    )
    # Each rank's template has a hash seed of its own.
    runs = [forks.run(["-c", code, path], rank=i, check=True).stdout for i in range(2)]
    assert runs[0] == runs[1] != ""


def test_members_with_other_types_are_named(jsonl, tmp_path):
    other = tmp_path / "o.jsonl"
    other.write_text('{"prompt": "x", "answer": "1"}\n')
    with raises(DataError, "'answer'", "'int64'", "'string'"):
        get_dataset(DatasetMixtureConfig([jsonl("a", 2), str(other)]))


def test_columns_make_members_agree_and_a_wrong_one_is_named(jsonl, tmp_path):
    other = tmp_path / "o.jsonl"
    other.write_text('{"prompt": "x", "solution": "1"}\n')
    members = [{"path": jsonl("a", 1), "columns": ["prompt"]}, {"path": str(other), "columns": ["prompt"]}]
    assert get_dataset(DatasetMixtureConfig(members))["train"].to_list() == [{"prompt": "q0"}, {"prompt": "x"}]
    members[0]["columns"] = ["promt"]
    with raises(DataError, "'promt'", "'prompt'"):
        get_dataset(DatasetMixtureConfig(members))


def test_streaming_gives_a_stream_of_all_members_in_order(jsonl):
    parts = get_dataset(DatasetMixtureConfig([jsonl("a", 2), jsonl("b", 2, 10)], streaming=True))
    assert isinstance(parts, datasets.IterableDatasetDict)
    assert [row["answer"] for row in parts["train"]] == [0, 1, 10, 11]
    members = [{"path": jsonl("a", 2), "fraction": 1.0}]
    with raises(ConfigError):
        get_dataset(DatasetMixtureConfig(members, streaming=True))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"path": "a", "splt": "x"}, r"unknown key 'splt' \(did you mean 'split'\?\)"),
        ({"split": "x"}, "has no 'path'"),
        (3, "not int"),
        ("{broken", "begins with a brace"),
    ],
)
def test_a_member_that_cannot_be_read_is_named(item, message):
    with pytest.raises(ConfigError, match=message):
        DatasetMixtureConfig([item])


@pytest.mark.parametrize("size", [0, 1, 2.0, -0.5])
def test_a_test_split_that_is_no_share_is_refused(size):
    with pytest.raises(ConfigError, match="test_split_size"):
        DatasetMixtureConfig(["a"], test_split_size=size)
    with raises(ConfigError, "sample='haed'", "'head'"):
        DatasetMixtureConfig(["a"], sample="haed")


def test_members_come_from_the_command_line_as_paths_or_json():
    from transformers import HfArgumentParser

    parser = HfArgumentParser(DatasetMixtureConfig)
    (mixture,) = parser.parse_args_into_dataclasses(
        ["--datasets", "a", '{"path": "b", "fraction": 0.5}', "--streaming"]
    )
    assert mixture.datasets == [DatasetConfig("a"), DatasetConfig("b", fraction=0.5)]
    assert mixture.streaming
    assert parser.parse_args_into_dataclasses([])[0].datasets == []
    assert "--test_split_size" in parser.format_help()
