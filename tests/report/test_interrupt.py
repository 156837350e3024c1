"""The end that loses nothing, on several ranks; that of one process is tested with the trainers."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests.forks import PIPE, Forked
from tests.methods.helpers import chats, sft
from tests.ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.parametrize("within", ["step", "evaluation"])
def test_ranks_end_after_the_same_step_although_one_alone_was_told(within, tmp_path):
    worker = "tests.report.interrupt_worker"
    found = run_ranks(worker, tmp_path / "run", within, processes=2, folder=tmp_path, timeout=100)
    assert found == {"step": 2, "requested": True, "batches": 2}  # Of six an evaluation.
    assert (tmp_path / "run" / "checkpoint-2" / "COMPLETE").is_file()


@pytest.mark.parametrize("kind", ["waiting", "swallowing"])
def test_the_second_signal_ends_a_process_that_would_swallow_it(kind, tmp_path):
    with Forked(["-m", "tests.report.stuck_worker", tmp_path / "run", kind], stdout=PIPE, stderr=PIPE) as child:
        try:
            assert child.stdout.readline().strip() == "stuck"
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert child.poll() is None  # The first one waits for the step.
            child.send_signal(signal.SIGTERM)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 128 + signal.SIGTERM
    assert "stuck_worker.py" in errors  # Where it was.


class RaisesIn(TrainerCallback):
    """Sends this process a signal at an event, once."""

    def __init__(self, event, number, step=0):
        self.number, self.step, self.seen = number, step, 0
        setattr(self, event, self._raise)

    def _raise(self, args, state, control, **_):
        self.seen += 1
        if state.global_step >= self.step and self.number is not None:
            number, self.number = self.number, None
            signal.raise_signal(number)


HEEDED = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="under nohup a closed terminal ends nothing"
)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=HEEDED)])
@pytest.mark.parametrize(("step", "best"), [(2, False), (4, True)])
def test_a_signal_ends_an_evaluation_after_its_batch_and_the_run_at_that_step(
    tiny_tokenizer, tmp_path, number, step, best
):
    """Also the last evaluation, and one that says which checkpoint is the best."""
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    settings |= {"save_strategy": "best", "metric_for_best_model": "loss"} if best else {"save_strategy": "no"}
    told = RaisesIn("on_prediction_step", number, step)
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(12), callbacks=[told], **settings)
    trainer.train()
    assert trainer.interrupt.requested and trainer.state.global_step == step
    assert told.seen == (1 if step == 2 else 7)  # Of six batches an evaluation.
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [2][: step // 2 - 1]
    assert (tmp_path / f"checkpoint-{step}" / "COMPLETE").is_file()
    told.number = None
    whole = trainer.evaluate()  # Holds nothing of the one that was left.
    again = sft(tmp_path / "again", tiny_tokenizer, model=trainer.model, eval_dataset=chats(12), **settings).evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert whole[name] == again[name]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize(("event", "step"), [("on_step_end", 3), ("on_step_end", 6), ("on_prediction_step", 3)])
def test_a_resumed_run_evaluates_the_step_at_which_it_was_interrupted(tiny_tokenizer, tmp_path, strategy, event, step):
    """So that this checkpoint can be the best one; also if no step is left."""
    settings = {"max_steps": 6, "eval_strategy": strategy, "eval_steps": 3, "save_strategy": strategy, "save_steps": 3}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "per_device_train_batch_size": 4}
    settings |= {"learning_rate": 0.5, "data": chats(12), "eval_dataset": chats(12)}  # Three steps an epoch.
    whole = sft(tmp_path / "whole", tiny_tokenizer, **settings)
    whole.train()
    part = tmp_path / "part"
    sft(part, tiny_tokenizer, callbacks=[RaisesIn(event, signal.SIGTERM, step)], **settings).train()
    resumed = sft(part, tiny_tokenizer, **settings)
    resumed.train(resume_from_checkpoint=True)
    losses, expected = (
        [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]
        for trainer in (resumed, whole)
    )
    assert losses == expected and len(expected) == 2
    best, truth = resumed.state.best_model_checkpoint, whole.state.best_model_checkpoint
    assert best is not None and Path(best).name == Path(truth).name
    assert resumed.state.best_metric == whole.state.best_metric == min(loss for _, loss in expected)


def test_a_signal_in_the_evaluation_before_training_ends_the_run_after_its_first_step(tiny_tokenizer, tmp_path):
    told = RaisesIn("on_prediction_step", signal.SIGTERM)
    settings = {"eval_on_start": True, "eval_strategy": "epoch", "per_device_eval_batch_size": 2, "max_steps": 9}
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(12), callbacks=[told], **settings)
    trainer.train()
    assert trainer.state.global_step == 1 and told.seen == 1
    assert (tmp_path / "checkpoint-1" / "COMPLETE").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_model_is_saved_waits_until_it_is_whole_and_a_second_one_does_not(
    tiny_tokenizer, tmp_path, number, monkeypatch
):
    class Ended(Exception):
        pass

    def ends(*_):
        raise Ended

    before = signal.signal(number, ends)
    try:
        trainer = sft(tmp_path, tiny_tokenizer)
        write, times = trainer.model.save_pretrained, 1

        def told(*args, **kwargs):
            for _ in range(times):
                signal.raise_signal(number)
            write(*args, **kwargs)

        monkeypatch.setattr(trainer.model, "save_pretrained", told)
        with pytest.raises(Ended):
            trainer.save_model(str(tmp_path / "out"))
        assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
        times = 2
        with pytest.raises(KeyboardInterrupt):
            trainer.save_model(str(tmp_path / "other"))
        assert signal.getsignal(number) is ends
    finally:
        signal.signal(number, before)


def test_a_signal_while_a_callback_saves_or_evaluates_ends_the_run_after_its_step_and_counts_once(
    tiny_tokenizer, tmp_path
):
    """A second one would end the process some seconds later."""

    class Busy(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                write = trainer.model.save_pretrained
                trainer.model.save_pretrained = lambda *a, **k: (signal.raise_signal(signal.SIGTERM), write(*a, **k))
                trainer.save_model(str(tmp_path / "own"))
                del trainer.model.save_pretrained
                told.append(trainer.interrupt.requested)
                trainer.evaluate()

    told = []
    trainer = sft(tmp_path, tiny_tokenizer, eval_dataset=chats(4), callbacks=[Busy()], max_steps=3, save_strategy="no")
    listener, sender = socket.socketpair()
    with listener, sender:
        sender.setblocking(False)
        install = trainer.interrupt.install

        def counted(accelerator):
            install(accelerator)
            signal.set_wakeup_fd(sender.fileno())

        trainer.interrupt.install = counted
        trainer.train()
        assert told == [True] and len(listener.recv(64)) == 1
    assert trainer.state.global_step == 1 and [row for row in trainer.state.log_history if "eval_loss" in row]


def test_a_process_that_is_to_outlive_its_terminal_still_does(tiny_tokenizer, tmp_path):
    """As `nohup` starts it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = sft(
            tmp_path,
            tiny_tokenizer,
            callbacks=[RaisesIn("on_step_begin", signal.SIGHUP)],
            max_steps=2,
            save_strategy="no",
        )
        trainer.train()
        assert trainer.state.global_step == 2 and not trainer.interrupt.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("step", "whole"), [(1, False), (2, True)])
def test_the_command_saves_the_model_of_a_run_that_was_interrupted_in_its_last_step_alone(
    tiny_model_dir, tmp_path, monkeypatch, step, whole
):
    from posttrain.cli.main import main
    from posttrain.loop.checkpoint import GracefulInterrupt

    steps = GracefulInterrupt.on_step_end

    def told(self, args, state, control, **kwargs):
        if state.global_step == step:
            signal.raise_signal(signal.SIGTERM)
        return steps(self, args, state, control, **kwargs)

    monkeypatch.setattr(GracefulInterrupt, "on_step_end", told)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    words = f"--model_name_or_path {tiny_model_dir} --dataset_name {rows} --output_dir {tmp_path / 'out'} --max_steps 2"
    assert main(["sft", *words.split(), "--report_to", "none", "--bf16", "false", "--save_strategy", "no"]) == 130
    assert (tmp_path / "out" / f"checkpoint-{step}" / "COMPLETE").is_file()
    assert (tmp_path / "out" / "model.safetensors").is_file() == whole


@HEEDED
def test_a_run_whose_terminal_is_closed_saves_and_ends(tiny_model_dir, tmp_path):
    """What it writes to a terminal that is gone is an error of the system's, which would end it unsaved."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    words = f"sft --model_name_or_path {tiny_model_dir} --dataset_name {rows} --output_dir {tmp_path / 'out'} --max_steps 9999"
    words += " --report_to none --bf16 false --save_strategy no --logging_steps 1"
    terminal, shown = os.openpty()
    with Forked(["-m", "posttrain", *words.split()], stdout=shown, stderr=shown) as child:
        os.close(shown)
        try:
            text = b""
            while b"step 3/" not in text:
                text += os.read(terminal, 4096)
            os.close(terminal)
            child.send_signal(signal.SIGHUP)
            assert child.wait(timeout=60) == 130
        finally:
            child.kill()
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert (saved / "COMPLETE").is_file()
