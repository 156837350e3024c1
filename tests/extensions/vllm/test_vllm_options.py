"""`posttrain vllm-serve`: what is added to vLLM's own options, and what is refused before the start."""

import pytest

from posttrain.errors import ConfigError, MissingDependencyError
from posttrain.extensions.server.replies import API_KEY_VARIABLE
from posttrain.extensions.server.tokens import find_token, write_token
from posttrain.extensions.vllm import engine as vllm
from posttrain.extensions.vllm.engine import EXTENSION, OLD_EXTENSION, vllm_command
from posttrain.integrations.machine import listen
from tests.wordings import raises

BASE = ["--model", "m"]


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def listener_port():
    with listen("127.0.0.1", 0) as bound:
        return bound.getsockname()[1]


def options(words):
    return dict(zip(words[::2], words[1::2], strict=False))


def test_vllm_s_own_options_are_kept_and_those_of_training_are_added():
    found = options(vllm_command([*BASE, "--max-model-len", "512"], cpu=False))
    assert found == {
        "--model": "m", "--max-model-len": "512", "--logprobs-mode": "processed_logprobs", "--max-logprobs": "-1",
        "--generation-config": "vllm", "--worker-extension-cls": EXTENSION, "--host": "127.0.0.1",
        "--weight-transfer-config": '{"backend": "posttrain"}', "--middleware": "posttrain.extensions.server.guard.LoopbackGuard",
    }  # fmt: skip


def test_the_worker_extension_s_old_path_is_still_an_option():
    words = vllm_command([*BASE, "--worker-extension-cls", OLD_EXTENSION], cpu=False)
    assert words.count("--worker-extension-cls") == 1 and options(words)["--worker-extension-cls"] == OLD_EXTENSION


def test_an_option_that_was_given_is_not_given_twice_and_nccl_may_be_chosen():
    words = vllm_command(
        [*BASE, "--weight-transfer-config", '{"backend": "nccl"}', "--generation_config=vllm"], cpu=False
    )
    assert words.count("--weight-transfer-config") == 1 and "--generation-config" not in words


def test_a_vllm_that_knows_the_endpoint_of_pictures_is_told_to_offer_it_once():
    assert vllm_command(BASE, cpu=False, pictures=True).count("--enable-scale-out") == 1
    assert vllm_command([*BASE, "--enable-scale-out"], cpu=False, pictures=True).count("--enable-scale-out") == 1
    assert "--enable-scale-out" not in vllm_command(BASE, cpu=False)


def test_on_a_cpu_prompts_are_read_whole_because_seeds_want_it():
    assert "--no-enable-chunked-prefill" in vllm_command(BASE, cpu=True)
    assert "--no-enable-chunked-prefill" not in vllm_command(BASE, cpu=False)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--logprobs-mode", "raw_logprobs"], "--logprobs-mode raw_logprobs"),
        (["--generation_config", "auto"], "--generation-config auto"),
        (["--worker-extension-cls", "a.B"], "--worker-extension-cls a.B"),
        (["--weight-transfer-config", '{"backend": "ipc"}'], "'ipc'"),
        (["--weight-transfer-config", "nccl"], "must be JSON"),
        (["--enable-chunked-prefill"], "chunked"),
        (["--host", "0.0.0.0"], API_KEY_VARIABLE),
    ],
)
def test_trap_s27_what_cannot_work_is_refused_before_the_start(more, words):
    with pytest.raises(ConfigError, match=words):
        vllm_command([*BASE, *more], cpu=True)
    with pytest.raises(ConfigError, match="--model is missing"):
        vllm_command(more, cpu=True)


@pytest.mark.parametrize("more", [["--po", "1"], ["--po=1"], ["--log", "raw_logprobs"], ["--ho", "0.0.0.0"]])
def test_abbreviated_options_are_refused_because_nothing_here_reads_them(more):
    with raises(ConfigError, more[0].partition("=")[0], "Fix: use --"):
        vllm_command([*BASE, *more], cpu=False)


def test_options_in_a_file_are_refused_because_nothing_here_reads_them():
    for words in (["--config", "vllm.yaml"], ["--config=vllm.yaml"]):
        with raises(ConfigError, "--config vllm.yaml"):
            vllm_command(words, cpu=False)


def test_trap_s52_with_a_token_every_path_is_guarded_and_other_addresses_are_open(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    words = vllm_command([*BASE, "--host", "0.0.0.0"], cpu=False)
    assert words[words.index("--middleware") + 1] == "posttrain.extensions.server.guard.Guard"
    assert "secret" not in words


def test_without_a_token_one_is_made_that_trainers_of_the_same_user_find(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "")  # Restored afterwards.
    port = listener_port()
    vllm._set_token([*BASE, "--port", str(port)])
    assert vllm.os.environ[API_KEY_VARIABLE] == find_token(port)
    write_token(port).unlink()


def test_without_vllm_the_error_says_what_to_install(monkeypatch, capsys):
    assert vllm.run_server(["--help"]) == 0 and "vllm serve" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(MissingDependencyError):
        vllm.run_server(BASE)
