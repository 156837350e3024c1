"""Loading by name and mixing: fractions, seeds, and files that are broken."""

import json

import datasets
import pytest

from posttrain.data.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset, load_rows
from posttrain.errors import ConfigError, DataError


@pytest.fixture
def jsonl(tmp_path):
    def write(name, count, start=0):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": i}) + "\n" for i in range(start, start + count)))
        return str(path)

    return write


def test_a_jsonl_file_loads_by_its_path(jsonl):
    assert load_rows(jsonl("a", 3), split="train")["answer"] == [0, 1, 2]


def test_a_broken_line_is_named(jsonl):
    path = jsonl("a", 3)
    with open(path, "a") as file:
        file.write('{"prompt": "q3", \n')
    with pytest.raises(DataError, match=r"line 4: it is not valid JSON"):
        load_rows(path)


def test_an_unknown_kind_of_file_is_named(tmp_path):
    path = tmp_path / "m.xlsx"
    path.write_text("x")
    with pytest.raises(DataError, match=r"ends in '\.xlsx'; known are \.jsonl"):
        load_rows(str(path))


def test_a_saved_dataset_folder_loads(tmp_path):
    datasets.Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "d")
    assert load_rows(str(tmp_path / "d"))[0]["prompt"] == "x"


def test_a_missing_path_is_named():
    with pytest.raises(DataError, match="/no/such/file"):
        load_rows("/no/such/file")


def test_fractions_take_the_worked_example(jsonl):
    mixture = DatasetMixtureConfig([DatasetConfig(jsonl("a", 17), fraction=0.75), DatasetConfig(jsonl("b", 17, 100), fraction=0.25)])
    rows = get_dataset(mixture)["train"]["answer"]
    assert rows == [*range(17), *range(100, 106)]


def test_a_split_is_the_same_for_the_same_seed(jsonl):
    path = jsonl("a", 20)
    one, two = (get_dataset(DatasetMixtureConfig([path], test_split_size=0.2), seed=3)["test"]["answer"] for _ in range(2))
    assert one == two
    assert len(one) == 4


@pytest.mark.parametrize(
    ("fractions", "message"),
    [((0.5, None), "some datasets only"), ((0.0, 0.0), "at least one"), ((-1.0, 2.0), "must not be negative")],
)
def test_bad_fractions_are_refused(jsonl, fractions, message):
    members = [DatasetConfig(jsonl(str(i), 4), fraction=f) for i, f in enumerate(fractions)]
    with pytest.raises(ConfigError, match=message):
        get_dataset(DatasetMixtureConfig(members))


def test_members_with_other_columns_are_named(jsonl, tmp_path):
    other = tmp_path / "o.jsonl"
    other.write_text('{"prompt": "x", "solution": "1"}\n')
    with pytest.raises(DataError, match=r"differ in \['answer', 'solution'\]"):
        get_dataset(DatasetMixtureConfig([jsonl("a", 2), str(other)]))


def test_streaming_refuses_what_needs_lengths(jsonl):
    with pytest.raises(ConfigError, match="test_split_size"):
        get_dataset(DatasetMixtureConfig([jsonl("a", 4)], streaming=True, test_split_size=0.5))
    with pytest.raises(ConfigError, match="empty"):
        get_dataset(DatasetMixtureConfig())
