"""Flags and YAML: the same converter, clear words for every mistake."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from posttrain import GRPOConfig, ModelConfig, ScriptArguments, SFTConfig
from posttrain.cli.commands import TRAINING
from posttrain.cli.parser import TrlParser, load_config
from posttrain.cli.train import parser_for
from posttrain.errors import ConfigError
from tests.wordings import raises

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/configs/*.yaml"))


@dataclass
class Args:
    learning_rate: float = field(default=0.1, metadata={"help": "100% of it"})
    dtype: Literal["float32", "bfloat16"] = "float32"
    reward_funcs: list[str] | None = None
    bf16: bool = True
    steps: int | None = 5
    extra: dict | str | None = None
    weights: list[float] | None = None


@pytest.fixture
def parse(tmp_path):
    def run(yaml="", *flags, **kwargs):
        path = tmp_path / "c.yaml"
        path.write_text(yaml)
        return TrlParser(Args).parse_args_and_config(["--config", str(path), *flags], **kwargs)

    return run


def test_command_line_beats_file_beats_default(parse):
    (args,) = parse("learning_rate: 0.5\nsteps: 7", "--learning_rate", "0.9")
    assert (args.learning_rate, args.steps, args.dtype) == (0.9, 7, "float32")


def test_keys_of_the_file_may_have_dashes_as_on_the_command_line(parse):
    assert parse("learning-rate: 0.5")[0].learning_rate == 0.5


def test_null_means_not_given_unless_none_is_a_value(parse):
    (args,) = parse("learning_rate: null\ndtype: null\nbf16: null\nsteps: null")
    assert (args.learning_rate, args.dtype, args.bf16, args.steps) == (0.1, "float32", True, None)
    assert parse("num_processes: null", return_remaining_strings=True)[1:] == ([],)


def test_a_scientific_number_without_a_dot_is_a_number(parse):
    assert parse("learning_rate: 2e-5")[0].learning_rate == 2e-5


def test_trap_s39_a_scalar_for_a_list_field_is_a_list_of_one(parse):
    assert parse("reward_funcs: accuracy_reward")[0].reward_funcs == ["accuracy_reward"]
    assert parse("reward_funcs: [a, b]")[0].reward_funcs == ["a", "b"]


def test_an_empty_list_is_one_and_the_command_line_beats_it(parse):
    assert parse("reward_funcs: []")[0].reward_funcs == []
    assert parse("reward_funcs: []", "--reward_funcs", "a")[0].reward_funcs == ["a"]


@pytest.mark.parametrize("value", ["-?[0-9]+", "---", "-1e-05", ""])
def test_a_value_of_the_file_that_begins_like_an_option_is_a_value(parse, value):
    assert parse(f"extra: '{value}'")[0].extra == value


@pytest.mark.parametrize("number", ["-1e-05", "-2E+3", "-.5", "-3", "-0.25e2"])
def test_a_negative_number_is_a_value_however_it_is_written(parse, number):
    assert parse(f"weights: [1, {number}]")[0].weights == [1.0, float(number)]
    assert parse("", "--weights", "1", number, "--learning_rate", number)[0].weights == [1.0, float(number)]


def test_a_list_with_an_empty_item_is_refused(parse):
    with raises(ConfigError, "reward_funcs"):
        parse("reward_funcs:\n  - a\n  -\n")


@pytest.mark.parametrize("word", ["no", "off", "false"])
def test_yamls_no_is_the_word_where_no_is_a_choice(tmp_path, word):
    path = tmp_path / "c.yaml"
    path.write_text(f"output_dir: out\nsave_strategy: {word}\neval_strategy: {word}\n")
    config = parser_for("sft").parse_args_and_config(["--config", str(path)])[1]
    assert (config.save_strategy, config.eval_strategy) == ("no", "no")


def test_choices_are_checked_in_the_file_too(parse, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("dtype: bf16")
    assert stop.value.code == 2
    assert "float32" in capsys.readouterr().err


def test_a_wrong_choice_of_a_config_is_refused_alike_in_every_spelling(tmp_path):
    (tmp_path / "c.yaml").write_text("output_dir: out\nloss_type: gspo\n")
    parse = parser_for("grpo").parse_args_and_config
    file, line = ["--config", str(tmp_path / "c.yaml")], ["--output_dir", "out", "--loss_type", "gspo"]
    for given in (lambda: parse(file), lambda: parse(line), lambda: GRPOConfig("out", loss_type="gspo")):
        with raises(ConfigError, "gspo", "loss_type='grpo' and importance_sampling_level='sequence'"):
            given()
    with raises(ConfigError, "packing_strategy='wraped'", "did you mean 'wrapped'", "'bfd', 'bfd_split', 'wrapped'"):
        parser_for("sft").parse_args_and_config(["--output_dir", "out", "--packing_strategy", "wraped"])


def test_yamls_off_is_the_word_where_off_is_a_choice(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("output_dir: out\npreflight: off\n")
    assert parser_for("sft").parse_args_and_config(["--config", str(path)])[1].preflight == "off"


def test_null_is_none_and_booleans_are_booleans(parse):
    (args,) = parse("steps: null\nbf16: false")
    assert args.steps is None
    assert args.bf16 is False
    assert parse("", "--no_bf16")[0].bf16 is False


def test_trap_s39_an_unknown_key_names_the_closest(parse):
    with raises(ConfigError, "'learning_rat'", "'learning_rate'"):
        parse("learning_rat: 1.0")
    with raises(ConfigError, "'--learning_rat'"):
        parse("", "--learning_rat", "1")


@pytest.mark.parametrize("name", TRAINING)
def test_every_boolean_option_has_a_flag_that_turns_it_off(name, tmp_path):
    parser = parser_for(name)
    booleans = {n for n, item in parser.fields.items() if item.type in (bool, "bool", bool | None, "bool | None")}
    assert len(booleans) > 20
    for option in booleans:
        for flag in (f"--no_{option}", f"--no-{option.replace('_', '-')}"):
            assert getattr(parser.parse_known_args([flag])[0], option) is False, flag
    plain = parser.parse_known_args([])[0]
    assert plain.gradient_checkpointing is not False


def test_defaults_may_come_from_a_mapping():
    parser = TrlParser(Args)
    assert parser.set_defaults_with_config(steps=9, other="x") == ["--other", "x"]
    assert parser.parse_args_into_dataclasses(args=[])[0].steps == 9


def test_prefixes_are_not_accepted(parse):
    assert parse("", "--learning", "1", return_remaining_strings=True)[-1] == ["--learning", "1"]


def test_what_no_field_took_comes_apart_by_where_it_stood(parse):
    both = {"return_remaining_strings": True, "separate_remaining_strings": True}
    assert parse("color: red", "--shape", "round", **both)[-2:] == (["--color", "red"], ["--shape", "round"])


def test_config_path_may_follow_an_equals_sign_and_the_last_one_wins(tmp_path):
    for name, steps in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}")
    tokens = ["--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}"]
    assert TrlParser(Args).parse_args_and_config(tokens)[0].steps == 2


def test_config_mistakes_are_told(tmp_path):
    with raises(ConfigError):
        TrlParser(Args).parse_args_and_config(["--config"])
    with raises(ConfigError):
        load_config(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with raises(ConfigError):
        load_config(str(tmp_path / "list.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [1")
    with raises(ConfigError):
        load_config(str(tmp_path / "bad.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    with raises(ConfigError, "bytes.yaml", "is not valid YAML", "utf-8"):
        load_config(str(tmp_path / "bytes.yaml"))
    (tmp_path / "twice.yaml").write_text("seed: 1\nlearning_rate: 1.0e-3\nseed: 2\n")
    with raises(ConfigError, "twice.yaml", "seed"):
        load_config(str(tmp_path / "twice.yaml"))
    assert load_config(str(tmp_path / "empty.yaml")) == {}


def test_env_is_set_and_must_be_a_mapping(parse, monkeypatch):
    monkeypatch.delenv("POSTTRAIN_TEST_VALUE", raising=False)
    parse("env: {POSTTRAIN_TEST_VALUE: 3}")
    import os

    assert os.environ.pop("POSTTRAIN_TEST_VALUE") == "3"
    with raises(ConfigError, "'env'"):
        parse("env: 3")


def test_a_nested_mapping_reaches_a_dict_field(parse):
    assert parse("extra: {a: 1}")[0].extra == '{"a": 1}'


def test_a_mapping_reaches_fields_of_every_kind_of_mapping(tmp_path, capsys):
    @dataclass
    class Recipe:
        dataset_mixture: dict = field(default_factory=dict)
        weights: dict[str, float] | None = None
        parts: list[dict[str, Any]] = field(default_factory=list)

    mixture = {"datasets": [{"id": "a", "weight": 0.5}], "seed": 1}
    whole = {"dataset_mixture": mixture, "weights": {"a": 0.5}, "parts": [{"id": "a"}, {}]}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    (recipe,) = TrlParser(Recipe).parse_args_and_config(["--config", str(path)])
    assert asdict(recipe) == whole
    (recipe,) = TrlParser(Recipe).parse_args_and_config(["--weights", '{"b": 1}'])
    assert recipe.weights == {"b": 1}
    with pytest.raises(SystemExit):
        TrlParser(Recipe).parse_args_and_config(["--weights", "[1]"])
    assert "--weights: invalid JSON mapping value: '[1]'" in capsys.readouterr().err


def test_a_field_called_config_is_refused():
    @dataclass
    class Bad:
        config: str = ""

    with raises(ConfigError, "'config'"):
        TrlParser(Bad)


@pytest.mark.parametrize("name", TRAINING)
def test_help_of_every_training_command_prints(name, capsys):
    with pytest.raises(SystemExit) as stop:
        parser_for(name).parse_args(["--help"])
    assert stop.value.code == 0
    assert "--learning_rate" in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_shipped_config_parses(path):
    script, config, model, _ = parser_for(path.stem.partition("_")[0]).parse_args_and_config(["--config", str(path)])
    assert config.output_dir.startswith("runs/")
    assert script.dataset_name
    assert model.model_name_or_path


@pytest.mark.parametrize(
    "name", ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
)
def test_a_batch_of_nothing_is_refused_before_anything_is_loaded(name, tmp_path):
    with raises(ConfigError, name, "0", "1"):
        SFTConfig(output_dir=str(tmp_path), **{name: 0})


OLDER = [
    ("max_seq_length: 6", "max_length", 6),
    ("evaluation_strategy: no", "eval_strategy", "no"),
    ("use_liger: false", "use_liger_kernel", False),
    ("group_by_length: true", "train_sampling_strategy", "group_by_length"),
    ("overwrite_output_dir: true", "overwrite_output_dir", None),
    ("torch_dtype: bfloat16", "dtype", "bfloat16"),
    ("warmup_ratio: 0.1", "warmup_steps", 0.1),
]


def parsed(tmp_path, yaml, *flags):
    path = tmp_path / "old.yaml"
    path.write_text(f"output_dir: {tmp_path}\nreport_to: none\n{yaml}")
    instances = parser_for("sft").parse_args_and_config(["--config", str(path), *flags])
    return {name: value for instance in instances for name, value in vars(instance).items()}


@pytest.mark.parametrize("form", ["file", "flag", "flag="])
@pytest.mark.parametrize(("line", "name", "value"), OLDER)
def test_an_option_of_an_older_release_is_read_from_a_file_and_from_the_command_line(tmp_path, line, name, value, form):
    flag = ["--" + line.split(": ")[0], line.split(": ")[1]]
    with pytest.warns(FutureWarning, match="of older releases is ") as caught:
        if form == "file":
            options = parsed(tmp_path, line)
        else:
            options = parsed(tmp_path, "", *(flag if form == "flag" else ["=".join(flag)]))
    assert options.get(name) == value and sum("older releases" in str(one.message) for one in caught) == 1


@pytest.mark.filterwarnings("ignore:.*older releases")
def test_two_spellings_in_one_file_are_refused_and_the_command_line_beats_the_file(tmp_path):
    with pytest.raises(TypeError, match="max_length=4 and max_seq_length=3, the older name of max_length"):
        parsed(tmp_path, "max_length: 4\nmax_seq_length: 3")
    assert parsed(tmp_path, "max_seq_length: 3", "--max_length", "8")["max_length"] == 8
    assert parsed(tmp_path, "max_length: 3", "--max_seq_length", "8")["max_length"] == 8
    with pytest.raises(ConfigError, match=r"no argument 'tpu_num_cores'. Fix: start processes with accelerate"):
        parsed(tmp_path, "tpu_num_cores: 8")


def test_a_script_reads_trust_remote_code_from_its_model_config(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--report_to", "none", "--trust_remote_code"]
    config, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config(flags)
    assert config.trust_remote_code is True and model.trust_remote_code is True
    (model,) = TrlParser(ModelConfig).parse_args_and_config(["--trust_remote_code"])
    assert model.trust_remote_code is True and ModelConfig().trust_remote_code is False
    (script,) = TrlParser(ScriptArguments).parse_args_and_config(["--dataset_name", "a"])
    assert script.gradient_checkpointing_use_reentrant is False
