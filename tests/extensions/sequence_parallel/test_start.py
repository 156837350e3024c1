"""``sp_size``: what is refused before training, and what accelerate hears of it."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig

from posttrain import BCOTrainer, PPOTrainer, SFTConfig
from posttrain.data.forest import Layout
from posttrain.errors import ConfigError, ModelError
from posttrain.extensions.images.processors import Family
from posttrain.extensions.sequence_parallel.split import TokenSplit
from posttrain.extensions.sequence_parallel.start import begin_split, check_heads, parallel_sizes, without_accelerate
from posttrain.models import token_split
from tests.conftest import build_model
from tests.methods.helpers import chats, sft
from tests.ranks import run_ranks
from tests.wordings import raises

TREE = Layout("tree", row_tokens=64)


def config(tmp_path, **settings):
    base = {"report_to": "none", "use_cpu": True, "bf16": False, "parallelism_config": {"sp_size": 2}}
    return SFTConfig(str(tmp_path), **(base | settings))


def accelerator(processes=4, kind="MULTI_CPU"):
    return SimpleNamespace(num_processes=processes, process_index=0, distributed_type=kind, device="cpu")


def begin(args, *, layout=TREE, processes=4, kind="MULTI_CPU", supported=True, **model):
    about = {"supported": supported, "name": "SFTTrainer"}
    return begin_split(args, accelerator(processes, kind), build_model(97, **model), layout, **about)


def test_a_dict_and_accelerates_object_ask_for_the_same(tmp_path):
    for given in ({"sp_size": 2}, '{"sp_size": 2}', ParallelismConfig(sp_size=2)):
        assert parallel_sizes(config(tmp_path, parallelism_config=given))["sp_size"] == 2
    with raises(ConfigError, "sp_sise"):
        config(tmp_path, parallelism_config={"sp_sise": 2})


def test_the_launcher_asks_by_variables_and_accelerate_hears_of_neither(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for args, size in ((config(tmp_path, parallelism_config=None), 4), (config(tmp_path), 2)):
        assert parallel_sizes(args)["sp_size"] == size
        given = args.parallelism_config
        with without_accelerate(args):
            assert args.parallelism_config is None and "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ
        assert args.parallelism_config is given and os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"


def test_a_trainer_without_a_group_leaves_the_group_of_an_earlier_one(tmp_path, tiny_tokenizer):
    token_split.activate(TokenSplit(None, [0, 1], 0, torch.device("cpu")))
    assert sft(tmp_path, tiny_tokenizer, data=chats(4)).split_size == 1


def test_groups_that_are_not_even_are_refused(tmp_path):
    for processes in (1, 3):
        with raises(ConfigError, f"sp_size=2 does not divide {processes}"):
            begin(config(tmp_path), processes=processes)
    with raises(ConfigError, "= 4"):
        begin(config(tmp_path, parallelism_config={"sp_size": 2, "dp_shard_size": 4}))


def test_heads_that_processes_cannot_share_are_refused_with_sizes_that_fit(tmp_path):
    with raises(ConfigError, "[2, 4]"):
        begin(config(tmp_path, parallelism_config={"sp_size": 3}), processes=3)
    model = build_model(97)
    model.config._attn_implementation = "flash_attention_2"
    with raises(ConfigError, "flash_attention_2"):
        check_heads(model.config, 2)


def test_padded_rows_other_methods_images_beside_the_text_and_deepspeed_are_refused(tmp_path, monkeypatch):
    with raises(ConfigError, "padded rows"):
        begin(config(tmp_path), layout=Layout("padded"))
    with raises(ConfigError, "was not tested"):
        begin(config(tmp_path), supported=False)
    beside = SimpleNamespace(processor=SimpleNamespace(family=Family((), cross=True)))
    monkeypatch.setattr("posttrain.extensions.sequence_parallel.start.picture_encoder", lambda model: beside)
    with raises(ConfigError, "Mllama"):
        begin(config(tmp_path))
    monkeypatch.undo()
    with raises(ConfigError, "DeepSpeed"):
        begin(config(tmp_path), kind="DEEPSPEED")
    assert not PPOTrainer.METHOD.traits.splits_tokens and not BCOTrainer.METHOD.traits.splits_tokens


@pytest.mark.parametrize(
    "option", [{"neftune_noise_alpha": 5.0}, {"label_smoothing_factor": 0.1}, {"dry_step": True}], ids=str
)
def test_options_that_read_whole_rows_are_refused(option, tmp_path):
    with raises(ConfigError, next(iter(option))):
        begin(config(tmp_path, **option))
    with raises(ConfigError, "predict"):
        TokenSplit(None, [0, 1], 0, torch.device("cpu")).refuse_predict()


def test_the_command_that_checks_knows_which_sizes_fit(tiny_model_dir, tmp_path, capsys):
    from posttrain.cli.check import run

    data, settings = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text(json.dumps({"prompt": "2 + 2 =", "completion": " 4"}), encoding="utf-8")
    command = ["sft", "--config", str(settings), "--model_name_or_path", tiny_model_dir, "--dataset_name", str(data)]
    for size, refused in ((3, True), (2, False)):
        text = f"output_dir: {tmp_path}/out\nuse_cpu: true\nparallelism_config: {{sp_size: {size}}}\n"
        settings.write_text(text, encoding="utf-8")
        code = run([*command, "--num_processes", str(size)])
        said = " ".join(capsys.readouterr().out.split())
        assert ("sp_size=3 does not divide the 4 attention heads" in said) == refused
        assert code == (78 if refused else 0), said


def test_the_command_that_checks_knows_which_methods_and_options_are_divided(tiny_model_dir, tmp_path, capsys):
    from posttrain.cli.check import run

    data, settings = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text(json.dumps({"prompt": "2 + 2 =", "completion": " 4", "label": True}), encoding="utf-8")
    for command, more, said in (
        ("bco", "", "sp_size=2 was not tested with BCOTrainer"),
        ("sft", "neftune_noise_alpha: 5\n", "sp_size=2 with neftune_noise_alpha=5"),
    ):
        text = f"output_dir: {tmp_path}/out\nuse_cpu: true\nparallelism_config: {{sp_size: 2}}\n{more}"
        settings.write_text(text, encoding="utf-8")
        given = ["--config", str(settings), "--model_name_or_path", tiny_model_dir, "--dataset_name", str(data)]
        assert run([command, *given]) == 78
        assert said in " ".join(capsys.readouterr().out.split())


CELLS = ["sft/plain", "grpo/plain"]


def cells_of(way, folder):
    from tests.matrix import WAYS

    arguments = ("--worker", way, folder / way, ",".join(CELLS))
    return run_ranks("tests.matrix", *arguments, processes=WAYS[way][0], folder=folder / way)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return cells_of("one", folder), folder


@pytest.mark.matrix
@pytest.mark.distributed
@pytest.mark.parametrize("way", ["sp2", "sp2x2-FSDP2"])
def test_losses_norms_and_weights_are_those_of_one_process(way, of_one, tmp_path):
    from tests.matrix import compared

    one, folder = of_one
    found = {"one": one, way: cells_of(way, folder)}
    for cell in CELLS:
        assert max(compared(found, folder, way, cell).values()) < 1e-5, cell


@pytest.mark.distributed
def test_a_model_whose_layers_do_not_hand_the_forest_on_is_refused(tmp_path):
    said = run_ranks("tests.extensions.sequence_parallel.test_start", tmp_path, processes=2, folder=tmp_path)
    assert (
        "StableLmForCausalLM does not run with sequence parallelism" in said["error"]
        and "Fix: set sp_size=1" in said["error"]
    )


if __name__ == "__main__":
    import sys

    from tests.conftest import build_masked_model, build_tokenizer
    from tests.ranks import leave, part

    tokenizer = build_tokenizer()
    tokenizer.pad_token = "<|endoftext|>"
    try:
        model = build_masked_model(len(tokenizer))
        sft(sys.argv[1], tokenizer, data=chats(8), model=model, use_cpu=True, parallelism_config={"sp_size": 2})
        message = "none"
    except ModelError as error:
        message = str(error)
    if int(os.environ["RANK"]) == 0:
        leave({"error": message})
    part()
