"""Run records written by hand, as good and as broken as a test wants them."""

import math

from posttrain.report.record import RunRecord
from posttrain.types import Finding

EVIL = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\ud800 & 'q' \"d\""


def grpo_record(folder, *, steps=40, lr=0.01, evil=False, sick=True):
    """A run whose rewards collapse, whose KL runs away and whose completions are HTML where asked for."""
    record = RunRecord(folder)
    record.manifest(max_steps=steps, config={"learning_rate": lr, "beta": 0.1, "run_name": str(folder)})
    for step in range(1, steps + 1):
        late = sick and step > steps // 2
        record.metrics(step, {
            "loss": math.nan if late and step == steps else 1 / step,
            "reward": step / steps,
            "reward_std": 0.0 if late else 0.3,
            "frac_reward_zero_std": 1.0 if late else 0.0,
            "kl": 0.01 * step * (10 if late else 1),
            "entropy": 2.0,
            "completions/mean_length": 20.0,
            "grad_norm": 1.0,
            "rewards/<b>r</b>/mean": 0.5,
        })  # fmt: skip
        text = EVIL if evil else f"answer {step}"
        record.add_completions([
            {"step": step, "prompt": f"p {text}", "completion": text, "r": 1.0, "advantage": 0.7, "tokens": ["<b>", "x"], "logps": [-0.1, -3.0]},
            {"step": step, "prompt": f"p {text}", "completion": "bad", "r": 0.0, "advantage": -0.7, "tokens": None, "logps": None},
        ])  # fmt: skip
        record.flush(step)
    record.finding(25, Finding("PT-R004", "warning", f"KL grew {EVIL if evil else ''}", "kl", "why", "raise beta"))
    return folder


def dpo_record(folder, steps=30):
    """Both rewards sink, rejected faster."""
    record = RunRecord(folder)
    for step in range(1, steps + 1):
        record.metrics(
            step,
            {"loss": 0.69, "rewards/chosen": -0.1 * step, "rewards/rejected": -0.2 * step, "rewards/accuracies": 0.9},
        )
    return folder


def break_record(folder):
    """What crashes and strangers leave behind."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": "x"}\n[1]\n\x00\x00garbage\n{"step": 41, "loss": 1e999, "words": "no number"}\n{"step": 42, "lo'
        )
    (folder / "manifest.json").write_text("{")
    (folder / "findings.jsonl").write_text('{"code": 3, "severity": "fatal", "step": null}\nnull\n7\n')
    (folder / "data.json").write_text("[1")
    next(iter(sorted((folder / "completions").iterdir()))).write_bytes(b"no parquet")
    return folder
