"""The live view and the curves: they show what was logged, anywhere, and never outlive a run."""

import io

import torch
from rich.console import Console

from posttrain.extensions.page.build import write_page
from posttrain.extensions.page.run import read_run
from posttrain.report import progress
from posttrain.report.progress import RichProgressCallback, learned, resume_command, use_rich_progress
from tests.methods.every_trainer import every
from tests.methods.helpers import chats, count_a, grpo, sft
from tests.wordings import raises


def watched(tmp_path, tokenizer, *, terminal, **settings):
    out = io.StringIO()
    trainer = sft(tmp_path, tokenizer, max_steps=3, **({"eval_dataset": chats(3)} | settings))
    view = use_rich_progress(trainer)
    view.console = Console(file=out, force_terminal=terminal, width=140)
    return trainer, view, out


def test_plain_lines_tell_step_numbers_and_time_left(tiny_tokenizer, tmp_path):
    trainer, _, out = watched(tmp_path, tiny_tokenizer, terminal=False)
    trainer.train()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    first = trainer.state.log_history[0]
    assert f"loss {first['loss']:.4g}" in lines[0]
    assert lines[-1].endswith("left 0 s")


def shown_by(trainer):
    """Labels and texts of the last line of metrics."""
    view = use_rich_progress(trainer)
    view.console = Console(file=(out := io.StringIO()), force_terminal=False)
    trainer.train()
    return [line for line in out.getvalue().splitlines() if line.startswith("step")][-1].split("  ")[1:-1]


def never(completions, **_):
    return [0.0] * len(completions)


def test_each_method_shows_what_its_page_says_to_watch(tiny_tokenizer, tmp_path):
    def shown(trainer, *names):
        logged = [line for line in trainer.state.log_history if "loss" in line][-1]
        return [f"{label} {logged[name]:.4g}" for label, name in names]

    trainer = grpo(tmp_path / "grpo", tiny_tokenizer, rewards=[count_a, never], beta=0.1)
    assert shown_by(trainer) == shown(
        trainer, ("loss", "loss"), ("reward", "reward"), ("count_a", "rewards/count_a/mean"), ("never", "rewards/never/mean"),
        ("groups with equal rewards", "frac_reward_zero_std"), ("gradient norm", "grad_norm"),
        ("mean length", "completions/mean_length"), ("KL (nats)", "kl"), ("truncated", "completions/clipped_ratio"),
    )  # fmt: skip
    trainer = every("reward", tmp_path / "reward", tiny_tokenizer)
    assert shown_by(trainer)[:3] == shown(trainer, ("loss", "loss"), ("accuracy", "accuracy"), ("margin", "margin"))
    trainer = every("dpo", tmp_path / "dpo", tiny_tokenizer)
    assert shown_by(trainer)[:5] == shown(
        trainer, ("loss", "loss"), ("preference accuracy", "rewards/accuracies"), ("margin", "rewards/margins"),
        ("reward of chosen", "rewards/chosen"), ("reward of rejected", "rewards/rejected"),
    )  # fmt: skip
    trainer = every("sft", tmp_path / "sft", tiny_tokenizer)
    assert shown_by(trainer)[:3] == shown(
        trainer, ("loss", "loss"), ("token accuracy", "mean_token_accuracy"), ("gradient norm", "grad_norm")
    )


def test_the_end_names_the_best_checkpoint_its_metric_and_whether_it_was_loaded(tiny_tokenizer, tmp_path):
    for load in (True, False):
        settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        folder = tmp_path / str(load)
        trainer, _, out = watched(
            folder,
            tiny_tokenizer,
            terminal=False,
            metric_for_best_model="loss",
            load_best_model_at_end=load,
            **settings,
        )
        trainer.train()
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        path, end = folder / f"checkpoint-{1 + losses.index(min(losses))}", "loaded." if load else "not loaded (load_b"
        assert f"Best checkpoint: {path} (eval_loss {min(losses):.4g}), {end}" in out.getvalue()
    trainer, _, out = watched(
        tmp_path / "none",
        tiny_tokenizer,
        terminal=False,
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert f"Best evaluation: eval_loss {min(losses):.4g}. No checkpoint was saved" in out.getvalue()


def test_a_long_step_tells_the_time_left_though_no_log_is_due(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    trainer, _, out = watched(tmp_path, tiny_tokenizer, terminal=False, logging_steps=9)
    trainer.train()
    lines = [line.split() for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [(line[1], line[2]) for line in lines] == [("1/3", "left"), ("2/3", "left"), ("3/3", "left")]
    trainer, _, out = watched(tmp_path / "logged", tiny_tokenizer, terminal=False)
    trainer.train()
    assert [line[2] for line in map(str.split, out.getvalue().splitlines()) if line[:1] == ["step"]] == ["loss"] * 3


def test_a_terminal_sees_a_bar_and_lines_that_end_with_the_run(tiny_tokenizer, tmp_path):
    trainer, view, out = watched(tmp_path, tiny_tokenizer, terminal=True)
    trainer.train()
    assert view.progress is None
    text = out.getvalue()
    assert "3/3" in text
    assert f"{trainer.state.log_history[2]['entropy']:.4g}" in text


def test_the_display_stops_when_training_raises_and_survives_evaluation_outside_of_it(tiny_tokenizer, tmp_path):
    def fail(outputs, labels, num_items_in_batch=None):
        if torch.is_grad_enabled():
            raise RuntimeError("broken on purpose")
        return outputs.logits.sum() * 0.0

    trainer, view, _ = watched(tmp_path, tiny_tokenizer, terminal=True, compute_loss_func=fail)
    trainer.evaluate()
    with raises(RuntimeError):
        trainer.train()
    assert view.progress is None


def test_the_callback_can_be_made_without_a_run():
    RichProgressCallback(headline={"loss": "loss"}).stop()


def test_a_run_ends_with_what_it_came_to_and_an_interrupted_one_says_how_to_go_on(
    tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["train.py"])  # Not a command of ours, though pytest may have been started as one.
    trainer, _, out = watched(tmp_path, tiny_tokenizer, terminal=False)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    tail = out.getvalue().split("Finished after ")[1]
    assert f"loss {losses[0]:.3g} -> {losses[-1]:.3g}" in tail and f"report {tmp_path}" in tail
    assert "resume" not in tail and read_run(tmp_path).end == "finished"
    trainer, view, out = watched(tmp_path / "again", tiny_tokenizer, terminal=False)
    view.on_step_begin = lambda *_, **__: setattr(trainer.interrupt, "requested", True)
    trainer.train()
    assert "Interrupted at step 1 of 3" in out.getvalue()
    assert "To continue:  trainer.train(resume_from_checkpoint=True)" in out.getvalue()
    assert (read_run(tmp_path / "again").end, read_run(tmp_path / "again").manifest["interrupted"]) == (
        "interrupted",
        1,
    )


def test_a_run_shorter_than_a_logging_interval_says_its_mean_loss():
    told = ["loss 3.02 (mean over all steps: no step was logged, see logging_steps)"]
    assert learned([{"step": 6, "train_loss": 3.023}]) == told
    assert learned([{"step": 4, "eval_loss": 2.0}, {"step": 6, "train_loss": 3.023}]) == [*told, "held-out loss 2 -> 2"]
    assert learned([{"reward": 1.0}, {"train_loss": 3.023}]) == ["reward 1 -> 1"]


def test_numbers_of_evaluation_sets_with_names_are_shown_on_the_line_and_at_the_end(tiny_tokenizer, tmp_path):
    sets = {"easy": chats(2), "hard": chats(3)}
    trainer, _, out = watched(
        tmp_path, tiny_tokenizer, terminal=False, eval_dataset=sets, eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    losses = [line["eval_hard_loss"] for line in trainer.state.log_history if "eval_hard_loss" in line]
    assert all(f"held-out loss of hard {loss:.4g}" in out.getvalue() for loss in losses) and len(losses) == 3
    assert f"held-out loss of hard {losses[0]:.3g} -> {losses[-1]:.3g}" in out.getvalue()
    assert "held-out loss of hard" in write_page([read_run(tmp_path)], tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


def test_what_was_learned_is_judged_by_the_reward_where_there_is_one():
    steps = [{"reward": float(r), "loss": 1.0, "frac_reward_zero_std": 0.5} for r in range(20)]
    assert learned(steps) == ["reward 0.5 -> 18.5"]
    assert learned(steps[::-1]) == ["reward 18.5 -> 0.5: it decreased"]
    assert "all groups had equal rewards" in learned([{"reward": 0.0, "frac_reward_zero_std": 1.0}])[0]
    lost = [line | {"step": n, "rewards/a/applicable": 1.0} for n, line in enumerate(steps)]
    lost += [{"loss": 0.0, "step": 20 + n, "rewards/a/applicable": 0.0} for n in range(4)]
    assert "has been scored since step 20" in learned(lost)[0] and learned(lost[:20]) == ["reward 0.5 -> 18.5"]
    assert learned([{"loss": 1.0}, {"loss": float("nan")}])[0].endswith("it is now NaN")
    noise = [{"loss": 1e-7}, {"loss": 3e-7}]
    assert learned(noise) == ["loss 1e-07 -> 3e-07"] and learned([{"loss": 2.0}, {"loss": 2.0001}]) == ["loss 2 -> 2"]


def test_the_command_that_goes_on_says_once_from_where(monkeypatch):
    for given in ("--resume_from_checkpoint auto", "--resume_from_checkpoint=runs/checkpoint-2", ""):
        monkeypatch.setattr("sys.argv", ["/bin/posttrain", "sft", *given.split(), "--num_processes", "2"])
        assert resume_command().endswith("sft --num_processes 2 --resume_from_checkpoint true")
    arguments = [
        "--hub_token",
        "abc",
        "--api-key=abc",
        "--reward_funcs",
        "a",
        "http://me:abc@host",
        "--model_init_kwargs",
    ]
    monkeypatch.setattr("sys.argv", ["/bin/posttrain", "sft", *arguments, '{"token": "abc"}', "--seed", "1"])
    assert "abc" not in resume_command()
    assert "# Fill in --hub_token, --api-key, --reward_funcs, --model_init_kwargs:" in resume_command()
    monkeypatch.setattr("sys.argv", ["/bin/posttrain", "demo", "--resume"])
    assert resume_command().endswith("posttrain demo --resume")
