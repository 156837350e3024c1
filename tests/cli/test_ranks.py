"""What launched processes leave behind: the code of the first that failed, and the end of its stderr."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from transformers import AutoModelForCausalLM

from posttrain.cli import ranks, train
from posttrain.cli.ranks import EXIT_CODES, Failure, first_failure
from posttrain.errors import ConfigError
from posttrain.loop.checkpoint import complete_checkpoints

SLACK = 10  # Seconds beyond the launcher's 30 in which interpreters end.


def launched(folder, rank, code):
    """Run Python code as a process that was launched with this number."""
    env = os.environ | {EXIT_CODES: str(folder), "RANK": str(rank)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_of_a_process_that_fails_the_code_and_the_last_thirty_lines_are_kept_and_all_is_shown(tmp_path):
    code = (
        "import sys; from posttrain.cli import main\n"
        "def command(argv):\n"
        "    for i in range(50): sys.stderr.write(f'line {i}\\n')\n"
        "    sys.stderr.write('10 %\\r100 %\\n')\n"
        "    raise ValueError('rows are missing')\n"
        "main.COMMANDS['sft'] = command\n"
        "sys.exit(main.main(['sft']))\n"
    )
    done = launched(tmp_path, 1, code)
    assert done.returncode == 1 and "line 0\n" in done.stderr and "error: rows are missing" in done.stderr
    found = first_failure(tmp_path, 99)
    assert (found.rank, found.code) == (1, 1)
    lines = found.tail.splitlines()
    assert len(lines) == 30 and lines[0] == "line 22" and lines[-2:] == ["100 %", "error: rows are missing"]
    assert str(found).startswith("process 1 failed first, with exit code 1; the last lines of its stderr:\nline 22\n")


def test_an_exception_of_any_kind_leaves_a_code_and_its_traceback(tmp_path):
    code = "from posttrain.cli import main\nmain.COMMANDS['sft'] = lambda argv: {}['no such key']\nmain.main(['sft'])\n"
    assert launched(tmp_path, 0, code).returncode == 1
    assert first_failure(tmp_path, 7).tail.endswith("KeyError: 'no such key'")


def test_a_crash_of_the_interpreter_leaves_its_trace(tmp_path):
    code = (
        "import faulthandler, os; from posttrain.cli import main\n"
        "main.COMMANDS['sft'] = lambda argv: os.abort()\n"
        "main.main(['sft'])\n"
    )
    assert launched(tmp_path, 3, code).returncode < 0
    found = first_failure(tmp_path, 134)
    assert (found.rank, found.code) == (3, 134) and "Fatal Python error: Aborted" in found.tail


def test_the_first_of_several_is_named_and_success_leaves_nothing(tmp_path):
    assert first_failure(tmp_path, 1) is None
    for rank, age in ((0, 2), (1, 1)):
        path = tmp_path / f"{rank}.code"
        path.write_text("78")
        os.utime(path, ns=(0, age))
    assert first_failure(tmp_path, 1) == Failure(1, 78, "")
    assert "wrote nothing to stderr" in str(first_failure(tmp_path, 1))
    done = launched(
        tmp_path, 5, "from posttrain.cli import main; main.COMMANDS['sft'] = lambda argv: 0; main.main(['sft'])"
    )
    assert done.returncode == 0 and not (tmp_path / "5.code").exists()


def test_one_that_was_killed_is_named_before_those_that_then_lost_it(tmp_path):
    (tmp_path / "0.code").write_text("1")
    (tmp_path / "0.stderr").write_text("Connection closed by peer")
    (tmp_path / "1.signal").write_text("9")
    (tmp_path / "1.stderr").write_text("step 3 of 8")
    assert first_failure(tmp_path, 1) == Failure(1, 137, "step 3 of 8")
    assert "exit code 137 (SIGKILL" in str(first_failure(tmp_path, 1))


def test_a_process_that_is_started_again_forgets_the_code_of_its_first_life(tmp_path):
    code = "import sys; from posttrain.cli import main\nmain.COMMANDS['sft'] = lambda argv: {}\nmain.main(['sft'])\n"
    (tmp_path / "2.code").write_text("1")
    assert launched(tmp_path, 2, code.replace("{}", "0")).returncode == 0
    assert first_failure(tmp_path, 1) is None


def command(name, model, folder, *options, rows=None, timeout=240):
    """``posttrain NAME`` on two processes of this machine's CPU."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [
        name, "--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", str(folder / "run"),
        "--num_processes", "2", "--main_process_port", "0", "--report_to", "none", "--use_cpu", "true", "--bf16", "false",
        "--disable_tqdm", "true", "--per_device_train_batch_size", "2", *options,
    ]  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "posttrain.cli.main", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_a_launcher_that_is_told_to_stop_ends_without_a_traceback(monkeypatch):
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def told():
        raise SignalException("Process 7 got signal: 2", sigval=signal.SIGINT)

    monkeypatch.setattr("accelerate.commands.launch.main", told)
    with pytest.raises(SystemExit) as stop:
        ranks.launch()
    assert stop.value.code == 130


def test_a_scheduler_that_ends_the_command_lets_its_processes_save(monkeypatch, tmp_path):
    """SIGTERM reaches the command alone: on a cluster nobody tells the processes that it launched."""
    saving = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal(signal.SIGINT, lambda *_: (pathlib.Path({str(tmp_path / 'saved')!r}).touch(), sys.exit(1)))\n"
        f"pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(60)\n"
    )
    start, commands, before = subprocess.Popen, [], signal.getsignal(signal.SIGTERM)

    def launched(command, env):
        commands.append(command)
        return start([sys.executable, "-c", saving], env=env)

    def scheduler():
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.subprocess, "Popen", launched)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    threading.Thread(target=scheduler, daemon=True).start()
    assert train._launch("sft", ["--accelerate_config", "ddp"], ["--num_processes", "2"]) == 130
    # Without the last words they would be two runs of one process each, of which one finds its folder taken.
    assert commands[0][-5:] == ["sft", "--accelerate_config", "ddp", "--use_cpu", "true"]
    assert (tmp_path / "saved").exists() and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_each_packaged_config_trains_on_two_processes(name, tiny_model_dir, tmp_path, sums):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    own = ["--accelerate_config", name, "--mixed_precision", "no", "--max_steps", "2", "--save_steps", "2"]
    done = command("sft", tiny_model_dir, tmp_path, *own, rows=sums)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = {path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()}
    # What only this way of sharding writes.
    own = {"ddp": "optimizer.pt", "zero2": "global_step2", "zero3": "global_step2"}
    assert {"rng_state_0.pth", "rng_state_1.pth", own[name]} <= saved
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0


def test_processes_are_started_without_a_config_too(monkeypatch, tmp_path):
    """Accelerate runs one on a machine without GPUs, and says nothing."""
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "none"))
    assert train.with_multi_gpu(["--num_processes", "2"]) == ["--multi_gpu", "--num_processes", "2"]
    for said in (["--num_processes", "1"], ["--num_processes", "2", "--use_fsdp"], ["--config_file", "x.yaml"], []):
        assert train.with_multi_gpu(said) == said
    with pytest.raises(ConfigError, match=r"one process.*num_processes=2.*Fix: "):
        train.with_multi_gpu(["--cpu", "--num_processes", "2"])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_without_a_config(tiny_model_dir, tmp_path, sums):
    done = command("sft", tiny_model_dir, tmp_path, "--max_steps", "1", "--save_steps", "1", rows=sums)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint-1" / "rng_state_1.pth").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_packaged_fsdp2_is_refused_on_processors_which_accelerate_does_not_shard_over(
    tiny_model_dir, tmp_path, sums
):
    own = ["--accelerate_config", "fsdp2", "--mixed_precision", "no", "--max_steps", "1"]
    done = command("sft", tiny_model_dir, tmp_path, *own, rows=sums)
    assert done.returncode == 1 and "accelerate uses MULTI_CPU on 'cpu'" in done.stderr


DYING = """
import os, signal, sys
from pathlib import Path

SEEN = Path(__file__).with_suffix(".seen")


def reward(completions, trainer_state, **_):
    rank, step = os.environ["RANK"], trainer_state.global_step
    with SEEN.open("a") as file:
        file.write(f"{rank} {step}\\n")
    if rank == "1" and step == 2 and SEEN.read_text().split("\\n").count("1 2") == 1:
        sys.stderr.write("these are my last words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(one) % 3) for one in completions]
"""


def dying(model, folder, *options):
    """GRPO whose rank 1 kills itself once, in its third step."""
    (folder / "dying.py").write_text(DYING)
    own = ["--reward_funcs", f"{folder / 'dying.py'}:reward", "--num_generations", "2", "--max_completion_length", "4"]
    own += ["--accelerate_config", "ddp", "--mixed_precision", "no", "--max_steps", "4", "--save_steps", "1"]
    return command("grpo", model, folder, *own, *options, rows=[{"prompt": f"{i}?"} for i in range(16)])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_killed_ends_the_others_and_is_named_with_its_last_lines(tiny_model_dir, tmp_path):
    done = dying(tiny_model_dir, tmp_path)
    ended = time.time()
    said = done.stderr[done.stderr.rindex("failed first") - 20 :]
    assert done.returncode == 137
    assert "process 1 failed first, with exit code 137 (SIGKILL" in said
    assert said.strip().endswith("these are my last words")
    assert ended - (tmp_path / "dying.seen").stat().st_mtime < 30 + SLACK
    assert complete_checkpoints(tmp_path / "run")[-1].name == "checkpoint-2"


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_the_launcher_starts_again_go_on_from_the_last_whole_checkpoint(tiny_model_dir, tmp_path):
    done = dying(tiny_model_dir, tmp_path, "--max_restarts", "1", "--resume_from_checkpoint", "auto")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [line.split() for line in (tmp_path / "dying.seen").read_text().splitlines()]
    # Both lives begin with a look at the rewards.
    assert [int(step) for rank, step in steps if rank == "1" and step != "0"] == [1, 2, 2, 3]
    assert json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_two_launched_processes_that_fail_end_the_command_with_their_code_and_words(tiny_model_dir, tmp_path):
    own = ["--accelerate_config", "ddp", "--mixed_precision", "no"]
    done = command("sft", tiny_model_dir, tmp_path, *own, rows=[{"messages": []}] * 8)
    said = done.stderr[done.stderr.rindex("failed first") :]
    assert done.returncode == 78
    assert "with exit code 78; the last lines of its stderr:" in said and "PT-D030: 8 of 8 rows" in said
