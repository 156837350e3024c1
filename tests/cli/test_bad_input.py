"""Bad input through the command line: one line that says where, what and how to mend it, and nothing half-written."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.cli.main import main

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LONG = "word " * 60
PAIR = {"prompt": LONG, "chosen": "a", "rejected": "b"}


def lines(*rows):
    """Rows as JSON lines; a string is a line as it is."""
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()


CASES = {
    "a broken line": ("sft", lines(CHAT, CHAT, '{"messages": [{"role"'), [], "rows.jsonl, line 3: the line is not valid JSON"),
    "a broken line of a stream": (
        "sft", lines(CHAT, CHAT, '{"messages": [{"role"'), ["--dataset_streaming", "true"], "rows.jsonl, line 3: the line is not valid JSON",
    ),
    "a line that is no object": ("sft", lines(CHAT, "[1]"), [], "line 2: a row must be a JSON object, not list"),
    "a lone surrogate": ("sft", lines({"text": "a"}, '{"text": "b \\ud800"}'), [], "line 2: the text is not valid Unicode"),
    "a lone surrogate of a stream": (
        "sft", lines({"text": "a"}, '{"text": "b \\ud800"}'), ["--dataset_streaming", "true"], "line 2: the text is not valid Unicode",
    ),
    "a lone surrogate in a pair": (
        "reward", lines('{"chosen": "a \\udc00", "rejected": "b"}'), [], "line 1: the text is not valid Unicode",
    ),
    "bytes that are no UTF-8": ("sft", b'{"text": "a"}\n{"text": "b \xff"}', [], "line 2: the line is not valid UTF-8 (byte 12"),
    "types that differ from row to row": ("sft", lines({"text": "a"}, {"text": 3}), [], "row 1: column 'text' must be a string, not int"),
    "a number in the place of a text": (
        "sft", lines({"prompt": "a", "completion": 0}), [], "row 0: prompt and completion must both be strings or both be lists of messages",
    ),
    "a number in the place of an answer": (
        "kto", lines({"prompt": "a", "completion": 7, "label": True}), [], "row 0: 'prompt' is text, 'completion' is int.",
    ),
    "every row left out": (
        "sft", lines(*[{"prompt": LONG, "completion": "a"}] * 3), ["--max_length", "16"],
        "all 3 rows of the train dataset are dropped: 3 truncated at max_length before their first trained token",
    ),
    "every row of a stream left out": (
        "sft", lines(*[{"prompt": LONG, "completion": "a"}] * 3), ["--max_length", "16", "--dataset_streaming", "true"],
        "the first 3 rows of the train dataset are all dropped: 3 truncated at max_length before their first trained token",
    ),
    "every pair left out": (
        "reward", lines(PAIR, {"chosen": "a", "rejected": "a"}), ["--max_length", "16"],
        "are dropped: 1 longer than max_length=16, 1 with two equal answers",
    ),
    "columns of another method": ("reward", lines(CHAT), [], "the train rows need 'chosen' and 'rejected', but have columns ['messages']"),
    "a split that is not there": ("sft", lines(CHAT), ["--eval_strategy", "steps"], "eval_strategy='steps' needs a split 'test'"),
    "a missing package": ("sft", lines(CHAT), ["--use_liger_kernel", "true"], "liger-kernel"),
    "offloading without a device": ("sft", lines(CHAT), ["--activation_offloading", "true"], "this run is on a CPU"),
}  # fmt: skip


def run(tmp_path, model, command, data, *more):
    common = ["--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", str(tmp_path / "out")]
    common += ["--max_steps", "1", "--report_to", "none", "--bf16", "false", "--disable_tqdm", "true"]
    return main([command, *common, *more])


def told(capsys):
    """The one line of the error."""
    found = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(found) == 1
    return found[0]


def nothing_written(tmp_path):
    return not list((tmp_path / "out").rglob("*.safetensors")) and not list((tmp_path / "out").rglob("metrics.jsonl"))


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tiny_model_dir, tmp_path, capsys, case):
    command, content, more, said = CASES[case]
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused = 78 if case == "a missing package" else 1  # By preflight, before anything is loaded.
    assert run(tmp_path, tiny_model_dir, command, tmp_path / "rows.jsonl", *more) == refused
    assert said in told(capsys)
    assert nothing_written(tmp_path)


RAISES = "{% for m in messages %}{% if m.content == 'b' %}{{ raise_exception('no b') }}{% endif %}{{ m.content }}{% endfor %}"
MARKED = RAISES.replace("{{ m.content }}", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")


@pytest.mark.parametrize(
    ("template", "only", "said"),
    [
        (RAISES, "false", "row 1: the chat template rejected the messages"),
        (MARKED, "true", "row 1: the chat template rejected the messages"),
        ("{% for m in messages %}", "false", "the chat template is not valid Jinja (line 1: "),
        ("{% for m in messages %}", "true", "the chat template is not valid Jinja (line 1: "),
    ],
)
def test_a_template_that_raises_is_told_with_the_row(tiny_model_dir, tmp_path, capsys, template, only, said):
    bad = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_bytes(lines(CHAT, bad))
    (tmp_path / "t.jinja").write_text(template)
    options = ["--chat_template_path", str(tmp_path / "t.jinja"), "--assistant_only_loss", only]
    assert run(tmp_path, tiny_model_dir, "sft", tmp_path / "rows.jsonl", *options) == 1
    assert said in told(capsys)
    assert nothing_written(tmp_path)


def test_parquet_files_of_mixed_types_are_refused_and_never_cast_in_silence(tiny_model_dir, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), folder / "0.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), folder / "1.parquet")
    assert run(tmp_path, tiny_model_dir, "sft", folder) == 1
    assert "column 'text' is string in 0.parquet and int64 in 1.parquet" in told(capsys)
    pq.write_table(pa.table({"text": pa.array(["c"], pa.large_string())}), folder / "1.parquet")
    assert run(tmp_path, tiny_model_dir, "sft", folder) == 0  # Another width of one kind is no conflict.


def test_a_row_of_two_hundred_thousand_tokens_is_cut_and_told_once(tiny_model_dir, tmp_path, capsys, caplog):
    (tmp_path / "rows.jsonl").write_bytes(
        lines(CHAT, {"text": None} | CHAT, {"messages": [{"role": "user", "content": "0 " * 100_000}]})
    )
    assert run(tmp_path, tiny_model_dir, "sft", tmp_path / "rows.jsonl", "--max_length", "64") == 0
    assert "1 of 3 rows were truncated to max_length=64" in caplog.text
    assert "indexing errors" not in caplog.text + capsys.readouterr().err


def test_wrong_usage_is_short(capsys):
    assert main(["sft", "--max_steps", "many"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) < 5
    assert "--config FILE.yaml" in err
    assert main(["sft", "--output_dir", "o", "--loss_type", "nlll"]) == 1
    assert "loss_type='nlll' is not known (did you mean 'nll'?). Choose one of: " in capsys.readouterr().err


CODE = {
    "an import that ends with sys.exit": ("import sys\nsys.exit(0)\n", "raised an error during import: SystemExit(0) ({file}:2)"),
    "an import that fails": ("\n\n1 / 0\n", "raised an error during import: ZeroDivisionError('division by zero') ({file}:3)"),
    "sys.exit in a reward": (
        "import sys\ndef f(completions, **_):\n    sys.exit()\n", "reward function 'f' raised SystemExit at {file}:3",
    ),
    "sys.exit in an asynchronous reward": (
        "import sys\nasync def f(completions, **_):\n    sys.exit('done')\n", "reward function 'f' raised SystemExit at {file}:3: done",
    ),
    "sys.exit in a reward on a thread": (
        "import sys\nfrom posttrain.rewards import parallel\n@parallel\ndef f(completions, **_):\n    sys.exit(3)\n",
        "reward function 'f' raised SystemExit at {file}:5: 3",
    ),
    "sys.exit in what a reward awaits": (
        "import sys\nasync def g():\n    sys.exit(3)\ndef f(completions, **_):\n    return g()\n",
        "reward function 'f' raised SystemExit at {file}:3: 3",
    ),
    "a class in the place of a reward": (
        "class f:\n    def __call__(self, completions, **_):\n        return [0.0] * len(completions)\n",
        "reward_funcs contains the class 'f', but calling a class creates an instance",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("case", CODE)
def test_what_a_file_of_rewards_does_wrong_is_told_with_file_and_line_and_never_ends_a_run_as_if_it_were_done(
    tiny_model_dir, tmp_path, capsys, monkeypatch, case, dotted
):
    code, said = CODE[case]
    name = f"rewards_{list(CODE).index(case)}_{int(dotted)}"
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "rows.jsonl").write_bytes(lines(*[{"prompt": "a"}] * 4))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    named = f"{name}.f" if dotted else f"{tmp_path / name}.py:f"
    options = ["--reward_funcs", named, "--num_generations", "2", "--max_completion_length", "4"]
    options += ["--per_device_train_batch_size", "4"]
    assert run(tmp_path, tiny_model_dir, "grpo", tmp_path / "rows.jsonl", *options) == 1
    assert said.format(file=tmp_path / f"{name}.py") in told(capsys)
    assert nothing_written(tmp_path) or "raised" in said
    if "import" in case:
        assert name not in sys.modules  # Half of it would be what a second try gets.


def test_sys_exit_in_other_code_that_a_run_calls_is_an_error_with_its_place(
    tiny_model_dir, tmp_path, capsys, monkeypatch
):
    (tmp_path / "own_tools.py").write_text("import sys\ndef rolls(prompts, trainer):\n    sys.exit(0)\n")
    (tmp_path / "rows.jsonl").write_bytes(lines(*[{"prompt": "a"}] * 4))
    options = ["--rollout_func", f"{tmp_path}/own_tools.py:rolls", "--reward_funcs", "think_format_reward"]
    options += ["--num_generations", "2", "--max_completion_length", "4", "--per_device_train_batch_size", "4"]
    assert run(tmp_path, tiny_model_dir, "grpo", tmp_path / "rows.jsonl", *options) == 1
    assert f"sys.exit(0) at {tmp_path}/own_tools.py:3 ended the run at step 0" in told(capsys)


WORDS = {
    "a word behind the options": (
        ["--max_steps", "1", "more"],
        "unknown argument 'more': it is neither an option nor the value of an option",
    ),
    "a word before them": (["learning_rate", "--max_steps", "1"], "did you mean 'learning_rate'?"),
    "a word behind options of the launcher": (["--num_processes", "2", "more"], "unknown argument 'more'"),
    "a number that is none": (
        ["--num_processes", "two"],
        "argument --num_processes/--num-processes: invalid int value: 'two'",
    ),
    "an option of the launcher without its value": (["--num_processes"], "--num-processes: invalid int value: ''"),
    "no process": (["--num_processes", "0"], "num_processes=0 must be at least 1"),
}


@pytest.mark.parametrize("command", ["sft", "check sft", "estimate sft"])
@pytest.mark.parametrize("case", WORDS)
def test_words_that_nothing_asked_for_are_errors(tiny_model_dir, tmp_path, capsys, case, command):
    words, said = WORDS[case]
    (tmp_path / "rows.jsonl").write_bytes(lines(CHAT))
    whole = ["--model_name_or_path", tiny_model_dir, "--dataset_name", str(tmp_path / "rows.jsonl"), "--bf16", "false"]
    first = words[:1] if case == "a word before them" else []
    assert main([*command.split(), *first, *whole, "--output_dir", str(tmp_path / "out"), *words[len(first) :]]) != 0
    captured = capsys.readouterr()
    assert said in " ".join((captured.err + captured.out).split()) and nothing_written(tmp_path)


@pytest.mark.parametrize("command", ["env", "recipes dapo"])
def test_other_commands_refuse_words_too(capsys, command):
    assert main([*command.split(), "more"]) == 2
    assert "more" in capsys.readouterr().err


def test_options_of_an_adapter_that_is_not_trained_are_told(tiny_model_dir, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_bytes(lines(CHAT))
    assert run(tmp_path, tiny_model_dir, "sft", tmp_path / "rows.jsonl", "--lora_r", "8", "--use_dora") == 0
    assert "Ignored without use_peft: lora_r=8, use_dora=True. The whole model is trained" in caplog.text
