"""`posttrain inspect`: the rows it shows are the rows that training makes, from the same file, without a weight read."""

import json

import pytest

from posttrain.cli import train
from posttrain.cli.commands import TRAINING
from posttrain.cli.subject import Prepared, Subject
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.page import inspect_command as command
from posttrain.types import Row

NAMES = ("--rows", "--examples", "--html")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(unread_model, tmp_path, sums):
    """A working directory with data, configs, and a model folder that has no weights to read."""
    write_jsonl(tmp_path / "chats.jsonl", sums)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)])
    shared = f"model_name_or_path: {unread_model}\noutput_dir: out\nbf16: false\nreport_to: none\n"
    (tmp_path / "sft.yaml").write_text(
        shared + "dataset_name: chats.jsonl\nassistant_only_loss: true\nper_device_train_batch_size: 4\n"
    )
    (tmp_path / "grpo.yaml").write_text(
        shared + "dataset_name: prompts.jsonl\nnum_generations: 4\nper_device_train_batch_size: 4\n"
        "reward_funcs: think_format_reward\n"
    )
    return tmp_path


def summary_of(name, argv, **kwargs):
    return command.inspect_rows(Subject(name, argv), **kwargs)


def rows_of(name, dataset, tokenizer, config):
    """Rows of objects, as the command makes them of its arguments."""
    subject, kind = Subject.__new__(Subject), TRAINING[name].trainer
    vars(subject).update(name=name, config=config, tokenizer=tokenizer, kind=kind, source="")
    return subject.rows_of(dataset)[0].rows


def shown_text(shown, *, trained=None):
    return "".join(piece.text for piece in shown.pieces if trained is None or piece.trained == trained)


def test_sft_rows_are_shown_with_what_the_assistant_says_marked(folder, capsys):
    assert command.run(["sft", "--config", "sft.yaml", "--rows", "2", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "sft: all 12 examples of split 'train'" in out
    assert "[[The sum is 1<|im_end|>]]" in out
    assert "row 6" in out and "row 1:" not in out
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "PT-D" not in page


def test_flags_win_over_the_file_as_in_training(folder, capsys):
    assert command.run(["sft", "--config=sft.yaml", "--max_length", "18"]) == 0
    out = capsys.readouterr().out
    assert "PT-D011 12 of 12 rows" in out
    assert "limit of 18 tokens" in out
    packed = ["--packing", "True", "--packing_strategy", "wrapped"]
    assert command.run(["sft", "--config=sft.yaml", "--max_length", "18", *packed]) == 0
    assert "PT-D011" not in capsys.readouterr().out


def test_nothing_is_written_and_no_training_directory_is_made(folder):
    before = {path.relative_to(folder) for path in folder.rglob("*")}
    command.run(["sft", "--config", "sft.yaml"])
    command.run(["grpo", "--config", "grpo.yaml"])
    assert {path.relative_to(folder) for path in folder.rglob("*")} == before


def test_grpo_shows_the_prompts_with_their_generation_prompt(folder):
    summary = summary_of("grpo", ["--config", "grpo.yaml"], show=1)
    assert summary.prompts_only
    assert summary.rows == 8
    assert shown_text(summary.shown[0]) == "<|im_start|>user\n0?<|im_end|>\n<|im_start|>assistant\n"
    assert summary.batch_size == 4


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_only_loss": True},
        {"max_length": 14},
        {"max_length": 20, "truncation_mode": "keep_end"},
        {"max_length": 64, "packing": True},
        {"max_length": 12, "packing": True, "packing_strategy": "bfd_split"},
    ],
)
def test_the_rows_are_those_that_the_trainer_trains_on(tiny_model, tiny_tokenizer, tmp_path, options):
    import datasets

    from posttrain import SFTConfig, SFTTrainer

    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "It is " + "1" * i}]}
        for i in range(6)
    ]
    dataset = datasets.Dataset.from_list(chats)
    config = SFTConfig(str(tmp_path / "o"), report_to="none", bf16=False, **options)
    trainer = SFTTrainer(tiny_model, config, train_dataset=dataset, processing_class=tiny_tokenizer)
    trained = trainer.rows(list(trainer.train_dataset))
    seen = rows_of("sft", dataset, tiny_tokenizer, config)
    key = repr if config.packing else (lambda row: 0)  # Packed rows are shuffled; whole documents are shown in order.
    assert sorted(seen, key=key) == sorted(trained, key=key)
    assert sum(map(sum, (mask for row in trained for mask in row.loss_masks)))


def test_a_row_of_exactly_the_limit_is_not_told_as_cut(folder):
    longest = summary_of("sft", ["--config", "sft.yaml"]).lengths["max"]
    for limit, cut in ((longest, False), (longest - 1, True)):
        summary = summary_of("sft", ["--config", "sft.yaml", "--max_length", str(int(limit))])
        assert summary.lengths["max"] == limit
        assert (summary.truncated > 0) == cut == ("PT-D011" in {f.code for f in summary.findings})


def test_packed_rows_come_apart_into_their_documents(folder):
    argv = ["--config", "sft.yaml", "--packing", "True", "--max_length", "200"]
    packed, plain = summary_of("sft", argv), summary_of("sft", argv[:2])
    assert (packed.rows, packed.tokens, packed.trained_tokens) == (plain.rows, plain.tokens, plain.trained_tokens)


def test_the_tokenizer_is_changed_as_training_changes_it(folder):
    """A template file and an eos token of the config, and a tokenizer to clone, all without the model."""
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|endoftext|>"
        "{% endgeneration %}{% else %}Q: {{ m['content'] }} A: {% endif %}{% endfor %}"
    )
    argv = ["--config", "sft.yaml", "--chat_template_path", "t.jinja", "--eos_token", "<|endoftext|>"]
    shown = summary_of("sft", argv).shown[0]
    assert shown_text(shown) == "Q: 0 + 1? A: The sum is 1<|endoftext|>"
    assert shown.eos == 1

    from tests.conftest import build_tokenizer

    other = build_tokenizer()
    other.add_special_tokens({"eos_token": "<|bye|>"})
    other.chat_template = other.chat_template.replace("<|im_end|>", "<|bye|>")
    other.save_pretrained(folder / "other")
    shown = summary_of("sft", ["--config", "sft.yaml", "--chat_template_path", "other"]).shown[0]
    assert shown_text(shown, trained=True) == "The sum is 1<|bye|>"
    assert shown.eos == 2


def test_the_prompts_are_those_that_the_engine_gets(tiny_tokenizer):
    import datasets

    from posttrain import GRPOConfig

    chats = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(3)])
    config = GRPOConfig("o", report_to="none", bf16=False, num_generations=2, per_device_train_batch_size=2)
    rows = rows_of("grpo", chats, tiny_tokenizer, config)
    expected = [
        tiny_tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in chats
    ]
    assert rows == [Row(ids, [], []) for ids in expected]


def test_a_large_dataset_is_sampled_the_same_way_each_time(folder):
    argv = ["--config", "sft.yaml"]
    first, again = (summary_of("sft", argv, examples=5, show=5) for _ in range(2))
    assert first.rows == 5
    assert "5 of 12 examples" in first.title
    assert first.shown == again.shown
    numbers = [int(shown_text(shown).split("user\n")[1].split(" +")[0]) for shown in first.shown]
    assert numbers == sorted(numbers) and numbers != list(range(5)), "drawn from the whole set, in its order"


def test_a_stream_is_inspected_from_its_start(folder):
    summary = summary_of("sft", ["--config", "sft.yaml", "--dataset_streaming", "True", "--max_steps", "1"], examples=3)
    assert "the first 3 examples" in summary.title
    assert summary.rows == 3


def test_rows_that_training_would_leave_out_are_a_finding(folder):
    rows = [{"prompt": "the sum of ", "completion": "x"}, {"prompt": "a number " * 30, "completion": "x"}]
    write_jsonl(folder / "pairs.jsonl", rows)
    argv = ["--config", "sft.yaml", "--dataset_name", "pairs.jsonl", "--assistant_only_loss", "False"]
    summary = summary_of("sft", [*argv, "--max_length", "20"])
    dropped = [finding for finding in summary.findings if finding.code == "PT-D014"]
    assert "1 of 2 rows (50 %)" in dropped[0].what


def test_findings_call_rows_by_their_place_in_the_dataset_and_one_of_each_is_shown(folder):
    rows = json.loads("[" + ",".join((folder / "chats.jsonl").read_text().splitlines()) + "]")
    rows[2]["messages"] = rows[2]["messages"][:1]  # Left out: nothing to train.
    rows[9]["messages"][1]["content"] = ""
    write_jsonl(folder / "chats.jsonl", [*rows, rows[7]])
    summary = summary_of("sft", ["--config", "sft.yaml"], show=1)
    found = {finding.code: finding for finding in summary.findings}
    assert found["PT-D014"].where == "row 2"
    assert "1 of 13 rows (7.69 %) were dropped during preparation: 1 without an assistant turn" in found["PT-D014"].what
    assert found["PT-D006"].where == "row 9"
    assert found["PT-D007"].where == "row 12"
    assert {shown.row: shown.codes for shown in summary.shown} == {
        0: (), 9: ("PT-D006",), 12: ("PT-D007",)
    }  # fmt: skip
    part = summary_of("sft", ["--config", "sft.yaml"], examples=12, show=12)
    assert {shown.row for shown in part.shown} < set(range(13))
    assert max(shown.row for shown in part.shown) == 12


@pytest.mark.parametrize(("name", "bad"), [("reward", {"chosen": "b"}), ("dpo", {"chosen": "b"})])
def test_rows_left_out_of_other_methods_are_named_too(folder, name, bad):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [{**good, "prompt": f"q {i}"} for i in range(6)]
    rows[3] |= bad
    write_jsonl(folder / "rows.jsonl", rows)
    summary = summary_of(name, ["--config", "sft.yaml", "--dataset_name", "rows.jsonl"] if name == "sft" else [
        "--model_name_or_path", str(folder / "tiny-model"), "--output_dir", "out", "--bf16", "false", "--report_to", "none",
        "--dataset_name", "rows.jsonl",
    ])  # fmt: skip
    (dropped,) = [finding for finding in summary.findings if finding.code == "PT-D014"]
    assert dropped.where == "row 3"
    assert {shown.row for shown in summary.shown} == {0, 1, 2, 4, 5}


def test_a_prompt_that_its_completion_changes_is_a_finding(folder):
    """'number' is one token: a prompt that ends inside of it and the completion that goes on are joined in training."""
    write_jsonl(
        folder / "pairs.jsonl", [{"prompt": "a num", "completion": "ber"}, {"prompt": "a", "completion": " sum"}]
    )
    argv = ["--config", "sft.yaml", "--dataset_name", "pairs.jsonl", "--assistant_only_loss", "False"]
    findings = {finding.code: finding for finding in summary_of("sft", argv).findings}
    assert "1 of 2 rows (50 %)" in findings["PT-D015"].what


def test_findings_about_broken_rows_reach_the_terminal_and_the_page(folder, capsys):
    row = {"input_ids": [1, 1, 50, 51, 2, 2], "labels": [-100, -100, 50, 51, 2, 2]}
    write_jsonl(folder / "ids.jsonl", [row, row])
    argv = ["--dataset_name", "ids.jsonl", "--dataset_kwargs", '{"skip_prepare_dataset": true}']
    argv += ["--assistant_only_loss", "False", "--html", "page.html"]
    assert command.run(["sft", "--config", "sft.yaml", *argv]) == 0
    for text in (capsys.readouterr().out, (folder / "page.html").read_text(encoding="utf-8")):
        for code in ("PT-D002", "PT-D003", "PT-D007"):
            assert code in text


def test_shifted_labels_are_refused_as_in_training(folder):
    write_jsonl(folder / "ids.jsonl", [{"input_ids": [50, 51, 2], "labels": [51, 2, -100]}])
    argv = ["--config", "sft.yaml", "--dataset_name", "ids.jsonl", "--assistant_only_loss", "False"]
    argv += ["--dataset_kwargs", '{"skip_prepare_dataset": true}']
    with pytest.raises(DataError, match="do not shift the labels"):
        summary_of("sft", argv)


def test_rows_of_two_equal_answers_are_shown_with_their_finding(folder, monkeypatch, capsys):
    def pairs(subject, examples):
        return Prepared([Row([50], [[51, 2], [51, 2]], [[1, 1], [1, 1]]) for _ in examples]), None

    monkeypatch.setattr(Subject, "rows_of", pairs)
    assert command.run(["sft", "--config", "sft.yaml"]) == 0
    out = capsys.readouterr().out
    assert "PT-D013 12 of 12 rows" in out
    assert "completion 2 of 2" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sfd", "--config", "sft.yaml"], r"command='sfd' is not known \(did you mean 'sft'\?\)"),
        (["sft", "--config", "sft.yaml", "--rows", "0"], "--rows 0 must be at least 1"),
        (["sft", "--config", "sft.yaml", "--examples", "-3"], "--examples -3"),
        (["sft", "--config", "sft.yaml", "--html", "no/such/page.html"], "folder 'no/such' does not exist"),
        (["sft", "--config", "sft.yaml", "--max_lenght", "9"], r"did you mean 'max_length'"),
        (["sft", "--dataset_name", "chats.jsonl"], "--model_name_or_path is missing"),
    ],
)
def test_wrong_usage_is_told_with_the_way_out(folder, argv, message):
    with pytest.raises(ConfigError, match=message):
        command.run(argv)


def test_launcher_flags_of_a_config_are_accepted_and_change_nothing(folder, capsys):
    assert command.run(["sft", "--config", "sft.yaml", "--num_processes", "2", "--accelerate_config", "fsdp2"]) == 0
    assert "all 12 examples" in capsys.readouterr().out


def test_no_command_is_wrong_usage_and_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        command.run([])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        command.run(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    unwrapped = "".join(out.split())  # Help breaks lines at hyphens, too.
    assert all(name in unwrapped for name in (*command.ROWS, *NAMES))


def test_no_training_option_has_the_name_of_an_inspect_option():
    for name in TRAINING:
        fields = train.parser_for(name).fields
        assert not {option.lstrip("-") for option in NAMES} & set(fields)


def test_progress_bars_are_off_while_rows_are_made_and_on_again_after(folder, monkeypatch):
    import datasets

    seen = []
    real = Subject._answers
    monkeypatch.setattr(
        Subject, "_answers", lambda *a: (seen.append(datasets.are_progress_bars_disabled()), real(*a))[1]
    )
    datasets.enable_progress_bars()
    summary_of("sft", ["--config", "sft.yaml"])
    assert seen == [True]
    assert not datasets.are_progress_bars_disabled()


# Images --------------------------------------------------------------------------------------------------------------


FLAGS = ("--output_dir", "o", "--model_name_or_path", "model", "--report_to", "none", "--bf16", "False")


@pytest.mark.parametrize(("name", "file"), [("sft", "answers"), ("dpo", "pairs"), ("grpo", "answers")])
def test_a_picture_is_one_piece_and_drawn_as_the_model_sees_it(pictured, name, file, capsys):
    from PIL import Image

    more = ["--reward_funcs", "think_format_reward"] if name == "grpo" else []
    argv = [name, *FLAGS, *more, "--dataset_name", f"{file}.parquet", "--html", "page.html", "--pictures", "seen.png"]
    assert command.run(argv) == 0
    out, page = capsys.readouterr().out, (pictured / "page.html").read_text(encoding="utf-8")
    # Idefics3 cuts 84x56 into a row of two tiles of 32x32 and a small whole, four placeholders each.
    assert "[image 1: 84×56, 20 tokens, " in out and "<image>" not in out.split("special tokens")[0]
    assert "4 in 4 rows" in out and page.count("data:image/jpeg;base64,") == 4 * (2 if name == "dpo" else 1)
    with Image.open("seen.png") as sheet:
        assert sheet.size == (240, 4 * (32 + command.CAPTION))


def test_a_file_of_pictures_is_refused_where_rows_are_text(folder):
    with pytest.raises(DataError, match="--pictures"):
        command.run(["sft", "--config", "sft.yaml", "--pictures", "seen.png"])
