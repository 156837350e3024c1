"""The fixtures themselves: what every other test relies on."""

import os
import shutil
import signal

import pytest

from tests import forks


def test_tiny_tokenizer_has_the_trap_pad_equals_eos(tiny_tokenizer, tiny_model):
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id == 2
    assert tiny_tokenizer.bos_token == "<|im_start|>"
    ids = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tiny_tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_model.config.vocab_size == len(tiny_tokenizer)


@pytest.mark.matrix
@pytest.mark.slow
def test_programs_can_be_ended_though_their_template_was_started_while_signals_were_blocked(tmp_path, monkeypatch):
    """As multiprocessing blocks them while it starts the process that looks after what others leave behind."""
    folder = tmp_path / f"forks-{os.getpid()}"
    folder.mkdir()
    monkeypatch.setenv(forks.FOLDER, str(folder))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        code = "import time; print('up', flush=True); time.sleep(60)"
        with forks.Forked(["-c", code], stdout=forks.PIPE) as program:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            try:
                assert program.stdout.readline() == "up\n"
                program.terminate()
                assert program.wait(10) == -signal.SIGTERM
            finally:
                program.kill()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore")
def test_a_check_that_breaks_fails_the_test_it_breaks_in(tmp_path):
    test = """
import logging

def test_of_a_run():
    logging.getLogger("posttrain.checks.registry").warning("the checks %s failed with an error: %s", "PT-D001", "odd")
"""
    (tmp_path / "test_it.py").write_text(test)
    command = ["-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = forks.run(command)
    assert done.returncode == 1 and "checks that broke: ['the checks PT-D001 failed with an error: odd']" in done.stdout
