"""The run record: readable at any moment, whole after a crash, and never two runs in one folder."""

import json
import math
import os
import pickle
import socket
import sys
import time
import types
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from posttrain import GRPOConfig
from posttrain.checks import registry
from posttrain.errors import ConfigError, ServerUnreachable
from posttrain.redaction import hide_secrets
from posttrain.report.lock import LOCK, FolderLock, check_writable
from posttrain.report.record import RunRecord, RunRecordCallback
from posttrain.types import Finding
from tests.forks import PIPE, Forked
from tests.methods.every_trainer import every
from tests.wordings import raises


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def row(step, **extra):
    return {"step": step, "prompt": f"p{step}", "completion": "c", "accuracy": 1.0, **extra, "advantage": 0.5}


# Metrics -------------------------------------------------------------------------------------------------------


def test_a_metrics_line_is_on_disk_before_the_next_one(tmp_path):
    record = RunRecord(tmp_path)
    for step in (1, 2):
        record.metrics(step, {"loss": torch.tensor(0.5), "reward": step / 4})
        assert [line["step"] for line in lines(tmp_path)] == list(range(1, step + 1))
    assert lines(tmp_path)[1]["loss"] == 0.5
    assert abs(lines(tmp_path)[1]["time"] - time.time()) < 60


def test_a_loss_that_is_not_a_number_stays_visible_in_valid_json(tmp_path):
    RunRecord(tmp_path).metrics(1, {"loss": math.nan, "grad_norm": math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(line["loss"]))
    assert math.isinf(float(line["grad_norm"]))


@pytest.mark.parametrize("step", [0, 1])
def test_bytes_that_are_no_text_end_no_run_that_begins_or_resumes(tmp_path, step):
    first = RunRecord(tmp_path)
    for number in (1, 2):
        first.metrics(number, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "name": "\xff\xfe"}\n')
    second = RunRecord(tmp_path)
    second.begin(step)
    second.metrics(step + 1, {"loss": 2.0})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["loss"] == 2.0


def test_a_resumed_run_repeats_no_step_and_drops_a_line_cut_off_by_a_crash(tmp_path):
    first = RunRecord(tmp_path)
    for step in range(1, 6):
        first.metrics(step, {"loss": 1.0})
        first.add_completions([row(step)])
        first.flush(step)
    first.add_completions([row(5)], evaluation=True)
    first.flush(5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    second = RunRecord(tmp_path)
    second.begin(3)
    second.metrics(4, {"loss": 2.0})
    second.add_completions([row(4)])
    second.flush(4)
    second.merge_completions()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert pq.read_table(tmp_path / "completions.parquet")["step"].to_pylist() == [1, 2, 3, 4]
    assert not list((tmp_path / "completions").glob("eval_*"))


def test_a_fresh_run_moves_an_older_record_aside_and_keeps_its_own_first_evaluation(tmp_path):
    old = RunRecord(tmp_path)
    old.begin(0)
    old.metrics(1, {"loss": 1.0})
    old.add_completions([row(1)])
    old.flush(1)
    old.merge_completions()
    old.manifest(seed=1)
    new = RunRecord(tmp_path)
    new.metrics(0, {"eval_reward": 0.25})  # Evaluated before training.
    new.begin(0)
    new.metrics(1, {"loss": 9.0})
    assert [line.get("loss") for line in lines(tmp_path)] == [None, 9.0]
    assert [line["loss"] for line in lines(tmp_path / "record-1")] == [1.0]
    assert (tmp_path / "record-1" / "completions" / "completions_00001.parquet").is_file()
    assert json.loads((tmp_path / "record-1" / "manifest.json").read_text())["seed"] == 1
    assert not (tmp_path / "completions.parquet").exists()
    RunRecord(tmp_path / "empty").begin(0)
    assert not (tmp_path / "empty").exists()


# Completions ---------------------------------------------------------------------------------------------------


def test_completions_have_a_file_a_step_and_evaluation_has_its_own(tmp_path):
    record = RunRecord(tmp_path)
    record.add_completions([row(10), row(10)])
    record.add_completions([row(10)], evaluation=True)
    record.flush(10)
    record.add_completions([row(10)], evaluation=True)  # A second evaluation set at the same step.
    record.flush(10)
    counts = {p.name: pq.read_table(p).num_rows for p in (tmp_path / "completions").iterdir()}
    assert counts == {"completions_00010.parquet": 2, "eval_completions_00010.parquet": 2}
    record.merge_completions()
    assert pq.read_table(tmp_path / "completions.parquet").num_rows == 2
    assert pq.read_table(tmp_path / "eval_completions.parquet").num_rows == 2


def test_a_column_that_only_some_batches_logged_is_padded_and_a_missing_reward_is_none(tmp_path):
    record = RunRecord(tmp_path)
    record.add_completions([row(1), row(1, gold="x")])
    record.flush(1)
    record.add_completions([row(2, accuracy=math.nan, depth=3)])
    record.flush(2)
    record.merge_completions()
    table = pq.read_table(tmp_path / "completions.parquet").to_pylist()
    assert [r["gold"] for r in table] == [None, "x", None]
    assert [r["depth"] for r in table] == [None, None, 3]
    assert [r["accuracy"] for r in table] == [1.0, 1.0, None]


def test_a_column_of_odd_or_changing_types_becomes_text_and_never_stops_training(tmp_path):
    record = RunRecord(tmp_path)
    record.add_completions([row(1, gold=42), row(1, gold="x=5"), row(1, gold=types.SimpleNamespace(a=1))])
    record.flush(1)
    record.add_completions([row(2, gold=7)])
    record.flush(2)
    record.merge_completions()
    gold = pq.read_table(tmp_path / "completions.parquet")["gold"].to_pylist()
    assert gold == ["42", "x=5", "namespace(a=1)", "7"]


def test_integers_and_floats_of_one_column_stay_numbers(tmp_path):
    record = RunRecord(tmp_path)
    for step, value in ((1, 1), (2, 0.5), (3, None)):
        record.add_completions([row(step, score=value)])
        record.flush(step)
    record.merge_completions()
    assert pq.read_table(tmp_path / "completions.parquet")["score"].to_pylist() == [1.0, 0.5, None]


def test_a_table_that_cannot_be_written_is_told_once_and_training_goes_on(tmp_path, caplog):
    record = RunRecord(tmp_path)
    (tmp_path / "completions").write_text("a file where the folder should be")
    for step in (1, 2):
        record.add_completions([row(step)])
        record.flush(step)
    record.merge_completions()
    assert caplog.text.count("could not be written") == 1


def test_a_crash_while_writing_leaves_the_older_file_whole(tmp_path, monkeypatch):
    record = RunRecord(tmp_path)
    record.add_completions([row(1)])
    record.flush(1)
    record.merge_completions()
    record.add_completions([row(2)])
    record.flush(2)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    record.merge_completions()
    assert pq.read_table(tmp_path / "completions.parquet")["step"].to_pylist() == [1]


# Manifest ------------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_ran_and_keeps_no_secret(tmp_path, monkeypatch):
    secret = "hf_" + "x" * 30
    monkeypatch.setattr(
        sys,
        "argv",
        ["/somewhere/train.py", "--hub_token", "no-hash-has-this", "--wandb-api-key=nor-this", "--seed", "3", secret],
    )
    config = {
        "hub_token": "no-hash-has-this",
        "eos_token": "</s>",
        "model_init_kwargs": {"token": secret, "revision": secret},
    }
    RunRecord(tmp_path / "new").manifest(seed=3, config=config)
    text = (tmp_path / "new" / "manifest.json").read_text()
    manifest = json.loads(text)
    assert not any(word in text for word in ("no-hash-has-this", "nor-this", secret))
    assert manifest["config"] == {"eos_token": "</s>", "model_init_kwargs": {"revision": "<hidden>"}}
    assert manifest["command"] == [
        "train.py",
        "--hub_token",
        "<hidden>",
        "--wandb-api-key=<hidden>",
        "--seed",
        "3",
        "<hidden>",
    ]
    assert manifest["versions"]["torch"] == torch.__version__
    assert set(manifest["versions"]) >= {"posttrain", "transformers", "accelerate", "datasets", "peft"}
    assert manifest["hardware"]["cpus"] >= 1


SECRET = "s3cr3tv4lue"
STARTS = (
    "hf_", "sk-", "sk-proj-", "ghp_", "github_pat_", "glpat-", "xoxb-", "AIza", "sk_live_", "rk_test_", "npm_", "gsk_", "r8_",
    "lsv2_pt_", "wandb_v1_", "tgp_v1_", "dop_v1_", "xai-", "pypi-AgE", "nvapi-", "ya29.",
)  # fmt: skip
KEYS = [f"{start}{'aB3' * 12}" for start in STARTS]
KEYS += ["ASIAABCDEFGHIJKLMNOP", f"SG.{'aB3' * 7}.{'aB3' * 7}", f"https://hooks.slack.com/services/T1/B1/{'aB3' * 8}"]
PLACES = [
    f"http://me:{SECRET}@host:8000/v1", f"https://{SECRET}@github.com/a/b", f"http://host/v1?token={SECRET}&top_k=5",
    f"http://host/?a=1&X-Amz-Signature={SECRET}", f"--hf_token {SECRET} --seed 3", f"--wandb-api-key={SECRET}",
    json.dumps({"session_token": SECRET, "revision": "main"}), json.dumps([{"a": {"apikey": SECRET}}]),
    f"got { {'credentials': SECRET, 'n': 1} }", f"HF_TOKEN={SECRET} python train.py", f"Authorization: Bearer {SECRET}",
    ["--hf_token", SECRET], ["--model_init_kwargs", json.dumps({"token": SECRET})], [f"--api_key={SECRET}"],
    *({name: SECRET} for name in ("session_token", "pwd", "credentials", "apikey", "hfToken", "aws_secret_access_key", "client-secret")),
    *([key] for key in KEYS), *(f"failed with {key}." for key in KEYS), f"Authorization: Basic {SECRET}", f"X-Api-Key: {SECRET}",
    f"Cookie: session={SECRET}", f"password: {SECRET}", f"hf_token: {SECRET}", f"http://host/v1?key={SECRET}",
    f"http://host/?sv=1&sig={SECRET}", f"AccountName=a;AccountKey={SECRET}==", f"--password 'a {SECRET}'", f"-token {SECRET}",
    ["-token", SECRET], {f"http://me:{SECRET}@host": 1}, {f"token={SECRET}"},
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
HARMLESS = [
    {"eos_token": "</s>", "pad_token": "x", "max_tokens": 5, "top_p": 0.9, "key": "a", "author": "me"},
    "--max_tokens 5 --eos_token </s>", "http://host:8000/v1?top_k=5", "task-that-is-long-enough-to-be-one", "5 tokens at 3/s",
    "the pad token: set tokenizer.pad_token", "signature: (prompt, completion)", "xai-grok-4-fast-reasoning", "the key=3 of it",
    "the mail me@example.org", "set mask_ids_without_token=True", ["--seed", "3"], '{"a": 1}',
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=range(len(PLACES)))
def test_a_secret_is_hidden_wherever_it_stands(place):
    shown = json.dumps(hide_secrets(place))  # A set becomes a list.
    assert SECRET not in shown and not any(key in shown for key in KEYS)


@pytest.mark.parametrize("place", HARMLESS, ids=range(len(HARMLESS)))
def test_what_is_no_secret_is_kept(place):
    assert hide_secrets(place) == place


@pytest.mark.parametrize(
    "part",
    [
        "a-",
        "--a",
        "--a.",
        "eyJ",
        "eyJa-",
        "tiny_lr1e-3_",
        "a_",
        "a-b_c",
        "-",
        "://a@",
        "?a",
        "token: '",
        "a ",
        "a: ",
        "api_key: ",
        "SG.a",
        "-----BEGIN ",
        '--a "',
        "?",
        '"',
    ],
)
def test_secrets_are_looked_for_in_linear_time(part):
    began = time.process_time()
    hide_secrets(part * (100_000 // len(part)))
    assert time.process_time() - began < 0.5


def test_errors_findings_and_failed_checks_hold_no_secret_whoever_catches_them(monkeypatch, caplog):
    address = f"http://me:{SECRET}@host/?token={SECRET}"
    for error in (
        ConfigError(f"at {address}"),
        ServerUnreachable(f"at {address}", url="u", log_tail=f"api_key={SECRET}"),
    ):
        assert SECRET not in str(error) and "<hidden>" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # Ranks send theirs to each other.
    found = Finding("PT-T002", "warning", f"at {address}", address, f"api_key={SECRET}", "fix")
    assert SECRET not in repr(found) and found.fix == "fix"

    def broken(_):
        raise OSError(f"no answer from {address}")

    monkeypatch.setattr(registry, "PROBES", {"x": registry.Probe("x", "config", ("PT-T002",), broken)})
    preflight = registry.Preflight()
    preflight.run("config", registry.Context("sft", None))
    text = json.dumps(preflight.to_dict())
    assert SECRET not in text + caplog.text and "no answer from http://<hidden>@host" in text


def test_errors_hold_no_control_characters_whoever_prints_them():
    """A reward's or a template's own words may hold data, and a traceback goes to the terminal as it is."""
    error = ConfigError("bad \x1b]0;title\x07 row\n\tof \u202edata", 3)
    assert str(error.args[0]) == "bad \\x1b]0;title\\x07 row\n\tof \\u202edata" and error.args[1] == 3


def test_trackers_get_the_settings_of_a_run_without_secrets(tmp_path):
    settings = {"hub_token": SECRET, "vllm_server_api_key": SECRET, "model_init_kwargs": {"token": SECRET}}
    config = GRPOConfig(str(tmp_path), vllm_server_base_url=f"http://me:{SECRET}@host:8000", **settings)
    assert config.vllm_server_api_key == SECRET
    assert SECRET not in json.dumps(config.to_dict(), default=str) + config.to_json_string()


def test_secrets_are_hidden_wherever_they_are_nested():
    assert hide_secrets([{"a": {"api_key": 1, "b": ["x", {"password": 2}]}}]) == [{"a": {"b": ["x", {}]}}]


# The folder ----------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused_with_the_systems_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "output_dir='"):
        check_writable(str(tmp_path / "file"))
    with raises(ConfigError):
        check_writable(str(tmp_path / "file" / "below"))
    with raises(ConfigError, "output_dir"):
        check_writable("")
    check_writable(str(tmp_path / "new" / "deep"))
    assert not list((tmp_path / "new" / "deep").iterdir())


HOLDS = """
import sys
from posttrain.report.record import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
input()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder; ranks of one run have its environment."""
    process = Forked(["-c", HOLDS, tmp_path], stdin=PIPE, stdout=PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_of_a_live_run_is_refused_and_taken_over_when_it_is_gone(tmp_path, other, caplog):
    with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on {socket.gethostname()} since 20"):
        check_writable(str(tmp_path))
    with raises(ConfigError, "output_dir"):
        FolderLock(tmp_path).acquire()
    other.kill()
    other.wait()
    check_writable(str(tmp_path))
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert "is no longer running. This run now uses the folder" in caplog.text
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("host", [None, "node7"])
def test_a_file_that_names_a_process_without_the_lock_does_not_hold_the_folder(tmp_path, host):
    """The number was given to another process, or the machine is gone: only the system's lock counts."""
    owner = {"pid": os.getppid(), "host": host or socket.gethostname(), "since": "2026-01-02 03:04:05"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    check_writable(str(tmp_path))
    FolderLock(tmp_path).acquire()


def test_the_same_process_and_a_broken_lock_file_do_not_block(tmp_path):
    FolderLock(tmp_path).acquire()
    FolderLock(tmp_path).acquire()
    (tmp_path / LOCK).write_text("{")
    FolderLock(tmp_path).acquire()


def test_ranks_of_one_distributed_run_do_not_refuse_each_other(tmp_path, other, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    owner = json.loads((tmp_path / LOCK).read_text())
    launcher = [os.environ.get("TORCHELASTIC_RUN_ID"), "localhost", "29511"]
    (tmp_path / LOCK).write_text(json.dumps(owner | {"launcher": launcher}))
    check_writable(str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "29512")
    with raises(ConfigError):
        check_writable(str(tmp_path))


# In a trainer --------------------------------------------------------------------------------------------------


def trainer(folder, tokenizer, **options):
    import transformers
    from datasets import Dataset

    from tests.conftest import build_model

    class Fails(transformers.TrainerCallback):
        at = 0

        def on_step_end(self, args, state, control, **_):
            if state.global_step == self.at:
                raise RuntimeError("as asked")

    args = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=1,
        **options,
    )
    ids = Dataset.from_list([{"input_ids": [1, 5, 6, 2], "labels": [1, 5, 6, 2]}] * 8)
    record, fails = RunRecordCallback(args, tokenizer), Fails()
    # Before the one that fails: what it wrote up to then must be there.
    return (
        transformers.Trainer(build_model(len(tokenizer)), args, train_dataset=ids, callbacks=[record, fails]),
        record,
        fails,
    )


def test_a_trainer_leaves_metrics_manifest_and_no_lock(tmp_path, tiny_tokenizer):
    run, record, _ = trainer(tmp_path, tiny_tokenizer, seed=5)
    record.add_completions([row(0)])
    run.train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4]
    assert {"loss", "epoch", "grad_norm", "time"} <= set(lines(tmp_path)[0])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["seed"], manifest["max_steps"], manifest["config"]["save_steps"]) == (5, 4, 2)
    assert len(manifest["chat_template_sha256"]) == 64
    assert "hub_token" not in manifest["config"]
    assert pq.read_table(tmp_path / "completions.parquet").num_rows == 1
    assert not (tmp_path / LOCK).exists()


def test_a_run_that_raised_can_be_resumed_without_doubling_a_step(tmp_path, tiny_tokenizer):
    run, record, fails = trainer(tmp_path, tiny_tokenizer)
    fails.at = 3
    with raises(RuntimeError):
        run.train()
    record.add_completions([row(3)])
    assert (tmp_path / LOCK).exists()
    record.stop()  # What the training loop does in its `finally`.
    record.stop()
    assert not (tmp_path / LOCK).exists()
    assert pq.read_table(tmp_path / "completions.parquet").num_rows == 1
    again, _, _ = trainer(tmp_path, tiny_tokenizer)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 4]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [entry["step"] for entry in manifest["resumed"]] == [2]


def test_a_folder_whose_name_is_no_text_is_refused_before_a_step(tmp_path):
    """In a C locale the bytes of an umlaut become surrogates, and the model card of the first checkpoint failed."""
    with raises(ConfigError, "LC_ALL=C.UTF-8"):
        check_writable(str(tmp_path / os.fsdecode(b"l\xff")))
    assert list(tmp_path.iterdir()) == []


# What is uploaded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_the_run_record_is_uploaded_on_request_alone(asked, tiny_tokenizer, tmp_path, monkeypatch, caplog):
    """The folder of a run holds rows of the data and completions as text, and the hub token in a pickle."""
    sent = {}

    def upload_folder(*, repo_id, folder_path, ignore_patterns=None, **_):
        names = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        sent.setdefault(repo_id, []).append(set(filter_repo_objects(names, ignore_patterns=ignore_patterns)))
        return types.SimpleNamespace(done=lambda: True)

    api = types.SimpleNamespace(create_repo=lambda name, **_: types.SimpleNamespace(repo_id=name))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: api)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload_folder)
    tiny_tokenizer.pad_token = "<|endoftext|>"
    settings = {
        "log_completions": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "push_to_hub": True,
        "hub_model_id": "me/model",
    }
    settings |= {"hub_strategy": "checkpoint", "push_run_record": asked, "hub_token": "hf_0123456789abcdef"}
    with caplog.at_level("INFO", "posttrain.integrations.hub"):
        trainer = every("grpo", tmp_path, tiny_tokenizer, **settings)
        trainer.train()
        for name in ("report.html", "suspect_pairs.jsonl", "record-1/manifest.json", "rollout_failure.json"):
            Path(tmp_path, name).parent.mkdir(exist_ok=True)
            Path(tmp_path, name).write_text("{}")
        trainer.push_to_hub()
    assert "COMPLETE" in sent["me/model"][1] and "COMPLETE.part" not in sent["me/model"][1]
    during, checkpoint, after = sent["me/model"]
    model = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model |= {"chat_template.jinja"}
    record = {
        "manifest.json",
        "data.json",
        "metrics.jsonl",
        "completions.parquet",
        "report.html",
        "record-1/manifest.json",
    }
    assert {name for name in after if asked is False} == (set() if asked else model)
    assert after >= model | (record if asked else set())
    assert not any("training_args.bin" in names for names in sent["me/model"])
    assert (during <= model or asked) and "model.safetensors" in checkpoint
    assert "model.safetensors" in caplog.text and ("data.json" in caplog.text) is asked
