"""What the log of a run says: one table of rules, read while training and on the page of a run.

A rule has a code, the metrics that it reads, a window in optimiser steps, a predicate and its texts. `check_log` applies
the rules to the newest row of a log; `review` applies the same rules to every row of a whole log. A row of the log that
speaks of ten steps counts as ten. Thresholds are starting values; those without a source were set here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.checks.registry import REGISTRY, Severity
from posttrain.types import Finding

FLAT_SHARE = 0.8  # Of the groups, without spread.
KL_LARGE, KL_GROWTH = 0.5, 5.0  # Nats a token, and times what it was at first.
ENTROPY_LEFT = 0.1  # Of what the run began with.
CUT_SHARE = 0.5  # Of the completions, at the length limit.
CUT_AT_FIRST = 0.9  # The same in the first generation.
LENGTH_GROWTH = 1.5  # Of the mean length, while the reward moves by less than a tenth of its spread.
MASKED_SHARE, MASKED_MOST = 0.2, 0.9  # Tokens without weight.
REWARD_SHARE = 0.3  # Of the step time.
DRIFT_STEPS = 50  # Optimiser steps.
# Policy mismatch in nats a token: where a rise counts, by how much, and where the size alone does.
DRIFT, DRIFT_GROWTH, DRIFT_ALONE = 0.1, 1.5, 0.5
UNPAIRED = 0.5  # Of the bytes of a step's answers.
DISCARDED = 0.3  # Of the rollouts.
SINKING = 5  # Logs in a row in which both rewards fall.
SATURATED = 10.0  # Margin.
EVALUATIONS, BACKWARDS = 3, 0.45  # Evaluations in a row, and the accuracy below which labels look inverted.
SPIKE = 10.0  # Times the median before it.
ROWS_NEEDED = 6  # Rows below which a whole log says nothing.
MOST_ROWS = 5000  # Rows of a whole log that are looked at.


History = Sequence[Mapping[str, float]]


def training_rows(history: History) -> list[Mapping[str, float]]:
    """The rows that training logged, without those of evaluations and the summary at the end."""
    return list(rows_backwards(history))[::-1]


def rows_backwards(history: History) -> Iterator[Mapping[str, float]]:
    """The same, the newest first: a rule is asked at every row, and looks at a few."""
    return (row for row in reversed(history) if "loss" in row and "step" in row)


def window(history: History, name: str, steps: int) -> list[float] | None:
    """Values of the latest rows that together speak of at least ``steps`` optimiser steps; None where there are fewer.

    >>> rows = [{"loss": 0.0, "step": 5, "kl": 1.0}, {"loss": 0.0, "step": 10, "kl": 2.0}]
    >>> window(rows, "kl", 5), window(rows, "kl", 10), window(rows, "kl", 11)
    ([2.0], [1.0, 2.0], None)
    """
    values: list[float] = []
    newest = None
    for row in reversed(history):
        if "loss" not in row or "step" not in row:
            continue
        newest = row["step"] if newest is None else newest
        if newest - row["step"] >= steps:
            return values[::-1]
        if name not in row:
            return None
        values.append(row[name])
    return values[::-1] if newest is not None and newest >= steps else None


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last fifth."""
    fifth = max(1, len(values) // 5)
    return statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])


def columns(history: History, ending: str) -> list[str]:
    """Names of the reward functions that the newest row has ``rewards/<name>/<ending>`` of."""
    keys = [
        key for key in next(rows_backwards(history), {}) if key.startswith("rewards/") and key.endswith(f"/{ending}")
    ]
    return [key.removeprefix("rewards/").removesuffix(f"/{ending}") for key in keys]


@dataclass(frozen=True)
class View:
    """A log up to one row, as a rule sees it.

    Attributes:
        history: Rows with ``step``, oldest first.
        name: The metric that the rule reads.
        steps: Optimiser steps of the window.
        generations_per_step: Less than 1 where a generation serves several optimiser steps.
    """

    history: History
    name: str
    steps: int
    generations_per_step: float = 1.0

    def values(self, name: str | None = None) -> list[float] | None:
        """Values of a metric in the window; None where the log is shorter, or a row has no value."""
        return window(self.history, name or self.name, self.steps)

    def last(self, name: str, count: int) -> list[float]:
        """Values of a metric in the newest rows of training that have it, at most so many, the newest last."""
        rows = (row for row in reversed(self.history) if name in row and ("loss" in row or name.startswith("eval_")))
        return [float(row[name]) for row in itertools.islice(rows, count)][::-1]

    def mean(self, name: str | None = None) -> float:
        """Mean of a metric in the window; 0 where it has none."""
        values = self.values(name)
        return statistics.fmean(values) if values else 0.0


@dataclass(frozen=True)
class Sign:
    """What a predicate saw: a sentence with its numbers; ``where`` and ``fix`` only where they are not the rule's."""

    what: str
    where: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """One way in which a run goes wrong.

    Attributes:
        code: Of the register of checks, which has its name and title.
        metrics: Those of them that a log has are read, each alone. Empty: the rule finds its metrics itself.
        steps: The window, in optimiser steps.
        holds: The predicate: yields what it sees in a `View`.
        why: What comes of it.
        fix: What to do.
        severity: ``error`` stops a run, ``warning`` and ``info`` are logged.
        live: Whether it is applied while a run trains; if not, another check does that, or only a whole curve shows it.
        title: For the page; empty: that of the register.
    """

    code: str
    metrics: tuple[str, ...]
    steps: int
    holds: Callable[[View], Iterable[Sign]]
    why: str
    fix: str
    severity: Severity = "warning"
    live: bool = True
    title: str = ""

    def names_in(self, row: Mapping[str, float]) -> list[str]:
        """Its metrics that a row has; of a metric of evaluations also those of each set that has a name."""
        named = tuple(name.removeprefix("eval") for name in self.metrics if name.startswith("eval_"))
        of_sets = [
            name for name in row if name not in self.metrics and name.startswith("eval_") and name.endswith(named)
        ]
        return [*(name for name in self.metrics if name in row), *of_sets]

    def findings(self, history: History, steps: int, generations_per_step: float = 1.0) -> Iterator[Finding]:
        """What the rule finds at the newest row of a log."""
        newest = next((row for row in reversed(history) if "loss" in row), {})
        # Only the line of an evaluation is read for the metrics of evaluations.
        newest = dict(newest) | {
            name: value for name, value in (history[-1] if history else {}).items() if "eval_" in name
        }
        for name in self.names_in(newest) if self.metrics else [""]:
            for sign in self.holds(View(history, name, steps, generations_per_step)):
                where, fix = sign.where or name, sign.fix or self.fix
                yield Finding(self.code, self.severity, sign.what, where, self.why, fix)


def _above(most: float, what: str, *, newest: bool = False) -> Callable[[View], Iterator[Sign]]:
    """The mean over the window, or the newest value; ``{value}``, ``{percent}`` and ``{steps}`` are filled in."""

    def holds(view: View) -> Iterator[Sign]:
        values = view.values() or [0.0]
        value = values[-1] if newest else statistics.fmean(values)
        if value > most:
            yield Sign(what.format(value=value, percent=100 * value, steps=view.steps))

    return holds


def _length_grows(view: View) -> Iterator[Sign]:
    lengths, rewards, spread = view.values(), view.values("reward"), view.values("reward_std")
    if lengths is None or rewards is None or len(lengths) < 5:
        return
    (first, last), (before, after) = ends(lengths), ends(rewards)
    scale = statistics.fmean(spread) if spread else abs(before)
    if last > LENGTH_GROWTH * max(first, 1.0) and after - before < 0.1 * scale:
        yield Sign(
            f"the mean length grew from {first:.0f} to {last:.0f} tokens in {view.steps} steps, and the reward went from "
            f"{before:.3g} to {after:.3g}."
        )


def _kl_grows(view: View) -> Iterator[Sign]:
    values = view.values()
    if values is None or len(values) < 5:
        return
    first, last = ends(values)
    if last > KL_LARGE and last > KL_GROWTH * first:
        yield Sign(f"the KL to the reference grew from {first:.3g} to {last:.3g} nats a token in {view.steps} steps.")


def _certain(view: View) -> Iterator[Sign]:
    recent = view.values()
    if recent is None:
        return
    rows = (row[view.name] for row in view.history if "loss" in row and "step" in row and view.name in row)
    early = list(itertools.islice(rows, 2 * len(recent)))
    if len(early) < 2 * len(recent):
        return
    first, last = statistics.fmean(early[: len(recent)]), statistics.fmean(recent)
    if last < ENTROPY_LEFT * first:
        yield Sign(f"the entropy fell from {first:.3g} to {last:.3g} nats a token.")


def _cut(view: View) -> Iterator[Sign]:
    share = view.mean()
    if share <= CUT_SHARE:
        early = list(itertools.islice((row for row in view.history if "loss" in row and "step" in row), 2))
        share = early[0].get(view.name, 0.0) if len(early) == 1 else 0.0
        if share <= CUT_AT_FIRST:
            return
    yield Sign(f"{100 * share:.0f} % of the completions were cut at the length limit.")


def _masked(view: View) -> Iterator[Sign]:
    share = view.mean()
    if share > MASKED_SHARE:
        what = f"{100 * share:.0f} % of the tokens of the last {view.steps} steps have an importance weight of 0."
        yield Sign(what, fix=f"stop this run; {MASKED_FIX}" if share > MASKED_MOST else "")


def _no_gradient(view: View) -> Iterator[Sign]:
    norms = view.values()
    if norms is not None and not any(norms):
        yield Sign(f"the gradient norm was 0 for {view.steps} steps.")


def _never_applies(view: View) -> Iterator[Sign]:
    for name in columns(view.history, "applicable"):
        applies = view.values(f"rewards/{name}/applicable")
        if applies is not None and not any(applies):
            what = f"{name} returned None for every row of the last {view.steps} steps."
            yield Sign(what, f"rewards/{name}/applicable")


def _nan_rewards(view: View) -> Iterator[Sign]:
    for name in columns(view.history, "nan"):
        where = f"rewards/{name}/nan"
        yield Sign(f"{name} returned NaN for {next(rows_backwards(view.history))[where]:.0f} rows.", where)


def _slow_reward(view: View) -> Iterator[Sign]:
    for name in columns(view.history, "seconds") if view.values("step_time") else ():
        spent = view.mean(f"rewards/{name}/seconds")
        share = spent * view.generations_per_step / max(view.mean("step_time"), 1e-9)
        if share > REWARD_SHARE:
            what = f"{100 * share:.0f} % of the step time is {name} ({spent:.2g} s a generation)."
            yield Sign(what, f"rewards/{name}/seconds")


def _not_finite(view: View) -> Iterator[Sign]:
    row = view.history[-1]
    if not math.isfinite(row[view.name]):
        yield Sign(f"{view.name} is {row[view.name]} at step {row['step']:.0f}.")


def _sinking(view: View) -> Iterator[Sign]:
    chosen, rejected = view.last("rewards/chosen", SINKING + 1), view.last("rewards/rejected", SINKING + 1)
    falls = all(a > b for values in (chosen, rejected) for a, b in itertools.pairwise(values))
    learns = view.last("rewards/accuracies", 1)[-1:] > [0.5]
    if len(chosen) == len(rejected) == SINKING + 1 and falls and chosen[-1] < 0 and learns:
        yield Sign(
            f"rewards/chosen ({chosen[-1]:.3g}) and rewards/rejected ({rejected[-1]:.3g}) have both fallen for {SINKING} logs."
        )


def _saturated(view: View) -> Iterator[Sign]:
    margins = view.last(view.name, 3)
    if len(margins) == 3 and min(margins) >= SATURATED:
        yield Sign(f"rewards/margins is {margins[-1]:.3g}, where a sigmoid has no gradient left.")


def _backwards(view: View) -> Iterator[Sign]:
    accuracy = view.last(view.name, 10)
    if len(accuracy) == 10 and statistics.fmean(accuracy) < BACKWARDS:
        yield Sign(f"rewards/accuracies has a mean of {statistics.fmean(accuracy):.2f} over the last 10 logs.")


def _still(view: View) -> Iterator[Sign]:
    rows = list(itertools.islice((row for row in rows_backwards(view.history) if view.name in row), 3))
    moved = any(row["rewards/chosen"] or row["rewards/rejected"] for row in rows)
    if len(rows) == 3 and not moved and all(row.get("learning_rate", 1.0) > 0 for row in rows):
        yield Sign("rewards/chosen and rewards/rejected are exactly 0 after 3 logs.")


def _inverted(view: View) -> Iterator[Sign]:
    latest = view.last(view.name, EVALUATIONS)
    if len(latest) == EVALUATIONS and max(latest) < BACKWARDS:
        values = ", ".join(f"{value:.2f}" for value in latest)
        yield Sign(f"{view.name} was {values} in the last {EVALUATIONS} evaluations.")


def _spikes(view: View) -> Iterator[Sign]:
    norms = view.values()
    usual = statistics.median(norms[:-1]) if norms is not None and len(norms) > 1 else 0.0
    if norms is not None and usual > 0 and norms[-1] > SPIKE * usual:
        yield Sign(f"the gradient norm was {norms[-1]:.3g}, {norms[-1] / usual:.0f} times the median before.")


def _mismatch(view: View) -> Iterator[Sign]:
    newest = next(rows_backwards(view.history))
    # Without a sampler's log-probs, and where rollouts have no age, "kl" is the distance to the reference.
    if view.name == "kl" and ("sampling/kl" in newest or "sample/staleness_mean" not in newest):
        return
    recent, trend = view.values(), window(view.history, view.name, DRIFT_STEPS)
    if recent is None:
        return
    now = statistics.fmean(recent)
    first, last = ends(trend) if trend is not None and len(trend) >= 5 else (now, now)
    rising = last > DRIFT and last > DRIFT_GROWTH * first
    if now > DRIFT_ALONE or rising:
        trail = f", rising for {DRIFT_STEPS} steps (from {first:.2g})" if rising else f" over {view.steps} steps"
        yield Sign(f"policy mismatch KL {now:.2g} nats a token{trail}.")


def _discarded(view: View) -> Iterator[Sign]:
    dropped, produced = view.values(), view.values("async/produced")
    if dropped is None or produced is None or len(dropped) < 2:
        return
    # Both count from the start of the run.
    old, new = dropped[-1] - dropped[0], produced[-1] - produced[0]
    if new > 0 and old > DISCARDED * new:
        yield Sign(
            f"{100 * old / new:.0f} % of the rollouts of the last {view.steps} steps ({old:.0f} of {new:.0f}) were discarded as "
            "too old."
        )


MASKED_FIX = "set vllm_importance_sampling_mode='geometric' or 'token_truncate', or shorten completions."

RULES: tuple[Rule, ...] = (
    Rule(
        "PT-R002", ("frac_reward_zero_std",), 10,
        _above(FLAT_SHARE, "{percent:.0f} % of the groups of the last {steps} steps have equal rewards."),
        "completions of a group are compared with each other: equal rewards have advantage 0 and move nothing, but they fill "
        "the denominator (and a KL penalty still pulls).",
        "raise temperature or num_generations, take prompts the model solves sometimes (harder ones where the reward is at its "
        "best), or give partial credit.",
    ),
    Rule(
        "PT-R003", ("completions/mean_length",), 100, _length_grows,
        "a loss that divides by each completion's length punishes long wrong answers less, and rewards can be earned by length.",
        "use loss_type='dapo' or 'dr_grpo', look at rewards/length_corr, or add get_soft_overlong_punishment.",
    ),
    Rule(
        "PT-R004", ("kl",), 50, _kl_grows,
        "the policy leaves the text it knows; rewards measured there are often wrong.",
        "raise beta, lower learning_rate, or go back to an earlier checkpoint.",
    ),
    Rule(
        "PT-R007", ("entropy", "policy/entropy_avg", "objective/entropy"), 10, _certain,
        "completions of a group become equal: there is nothing left to compare, and no way back.",
        "raise epsilon_high or entropy_coef, use_adaptive_entropy=True, a higher temperature, or an earlier checkpoint.",
    ),
    Rule(
        "PT-R008", ("completions/clipped_ratio",), 10, _cut,
        "the model is not shown how to end, and an answer that never comes earns no reward.",
        "raise max_completion_length, ask for shorter answers, or check that the model's end token is among the stop tokens.",
    ),
    Rule(
        "PT-R009", ("completions/duplicate_ratio",), 1,
        _above(0.8, "{percent:.0f} % of the completions repeat another one of their group.", newest=True),
        "copies have equal rewards and no advantage, and cost as much as others.",
        "raise temperature, undo top_k, top_p or min_p, and check that the engine draws with a new seed for each completion.",
    ),
    Rule(
        "PT-R032", ("completions/no_token_ratio",), 1,
        _above(0.0, "{percent:.2g} % of the sampled ids have no token in the tokenizer.", newest=True),
        "the model's embedding has more rows than the tokenizer has tokens; reward functions see nothing of such ids.",
        "set mask_ids_without_token=True, which never samples them.",
    ),
    Rule(
        "PT-R012", ("grad_norm",), 20, _no_gradient,
        "a loss of 0 is normal here (the ratio is 1), a gradient of 0 is not: nothing is learned.",
        "look at frac_reward_zero_std and completions/masked_ratio, and at what is frozen.",
    ),
    Rule(
        "PT-R005", ("ratio/max",), 1,
        _above(10.0, "a token is {value:.3g} times as likely as when it was sampled.", newest=True),
        "with a negative advantage nothing bounds such a token: one of them can undo the step.",
        "set delta (2 to 4), lower learning_rate, num_iterations or steps_per_generation.",
    ),
    Rule(
        "PT-R006", ("clip_ratio/region_mean", "cispo_clip_ratio", "policy/clipfrac_avg"), 10,
        _above(0.3, "{percent:.0f} % of the tokens of the last {steps} steps were clipped."),
        "clipped tokens have no gradient: the policy moves further in a window than the clip allows.",
        "lower learning_rate or num_iterations, generate more often (steps_per_generation), or widen epsilon.",
    ),
    Rule(
        "PT-R010", ("sampling/frac_masked",), 10, _masked,
        "the bound is on the product over a whole completion: a gap of 0.012 a token is beyond 3 after 100 tokens, so long "
        "completions are left out by their length alone.",
        MASKED_FIX,
    ),
    Rule(
        "PT-R011", ("sampling/nan_logprobs",), 1,
        _above(0.001, "the engine gave no log-prob for {percent:.2g} % of the tokens.", newest=True),
        "these tokens are trained by nobody, and the others with weights that may be wrong.",
        "look at what the engine or rollout_func returns in logprobs, or turn off vllm_importance_sampling_correction.",
        severity="error",
    ),
    Rule(
        "PT-R014", (), 10, _never_applies,
        "it takes part in nothing, silently: usually a value it looks for never occurs in a column.",
        "compare the column's values with those in the function, or leave the function out.",
    ),
    Rule(
        "PT-R016", (), 1, _nan_rewards,
        "they are treated as None (does not apply); a division by zero is rarely meant so.",
        "return None on purpose, or a number.",
    ),
    Rule(
        "PT-R017", (), 10, _slow_reward,
        "the model waits meanwhile.",
        "make it `async def` where it waits for something, or mark it with posttrain.rewards.parallel.",
    ),
    Rule(
        "PT-R031", ("align/dropped_bytes_fraction",), 1,
        _above(UNPAIRED, "{percent:.0f} % of the text has no group of tokens in common with the teacher's.", newest=True),
        "the loss is the mean over what is left: with no group it is 0, and nothing is learned.",
        "look at how both tokenizers spell an answer; a teacher whose tokenizer keeps the text as it is, or more rows a step.",
    ),
    Rule(
        "PT-B002", ("loss", "grad_norm"), 1, _not_finite,
        "a gap in the curve is NaN or infinity: one skipped step is harmless, several in a row end a run.",
        "lower learning_rate, try bf16 instead of fp16, look at the rows of these steps.",
        live=False, title="loss or gradient is not a number",
    ),
    Rule(
        "PT-P003", ("rewards/chosen",), 1, _sinking,
        "the margin grows while the chosen answers become less likely too: the model unlearns both, and its samples get worse at "
        "a rising accuracy.",
        "raise the weight of a likelihood term ('sft' in DPO's loss_type, cpo_alpha, tpo_alpha), try apo_zero, a larger beta or "
        "a lower learning rate.",
    ),
    Rule(
        "PT-P004", ("rewards/margins",), 1, _saturated,
        "every further step only moves pairs that are already apart, or noise.",
        "stop here, or lower the learning rate or the number of epochs; a larger beta makes the margin reach this sooner.",
    ),
    Rule(
        "PT-P005", ("rewards/accuracies",), 1, _backwards,
        "the policy moves towards the rejected answers: labels are flipped, or the batches contradict each other.",
        "look at chosen and rejected of some rows with posttrain inspect; lower the learning rate.",
    ),
    Rule(
        "PT-P006", ("rewards/margins",), 1, _still,
        "policy and reference share their weights, or nothing that is trained changes the output.",
        "check that ref_model is another object, that some parameter requires a gradient, and beta > 0.",
    ),
    Rule(
        "PT-P007", ("eval_rewards/accuracies",), 1, _inverted,
        "labels may be inverted: on pairs it never saw, the policy prefers the answer that was rejected.",
        "look at chosen and rejected of some rows with posttrain inspect; swap the columns if they are swapped.",
    ),
    Rule(
        "PT-T005", ("grad_norm",), 25, _spikes,
        "single steps with ten times the usual gradient norm: clipping bounds them, and they still point somewhere else.",
        "look at the rows of these steps (very long, broken or mislabelled ones); a longer warm-up; a lower max_grad_norm.",
        live=False,
    ),
    Rule(
        "PT-R024", ("sampling/kl", "kl"), 10, _mismatch,
        "mean(rho - 1 - log rho) of policy to sampler: what is trained was written by another policy, and importance weights "
        "throw more and more of it away.",
        "lower learning_rate, max_staleness, num_iterations or steps_per_generation; push weights more often; check that the "
        "engine really samples from the weights that were pushed, at this temperature.",
    ),
    Rule(
        "PT-R025", ("async/stale_dropped",), 10, _discarded,
        "generation outpaces training: that part of its time is spent on nothing.",
        "lower max_inflight_tasks, raise max_staleness, or raise weight_sync_steps so that versions pass more slowly.",
    ),
    Rule(
        "PT-R026", ("async/at_staleness_bound",), 10,
        _above(
            0.8, "{percent:.0f} % of the rollouts of the last {steps} steps are as old as max_staleness_hard allows."
        ),
        "every step trains on what old weights wrote: more bias for no more speed, and the next delay discards them.",
        "lower max_inflight_tasks, set staleness_policy='pace', or give generation more devices.",
    ),
)  # fmt: skip


def check_log(history: History, area: str = "R", *, generations_per_step: float = 1.0) -> Iterator[Finding]:
    """All findings of a log whose newest row has just been written.

    Args:
        history: Rows with ``step``, oldest first.
        area: Letter of the codes: ``R`` for rollouts, ``P`` for preferences.
        generations_per_step: Generations of one optimiser step (less than 1 where a generation serves several).
    """
    for rule in RULES:
        if rule.live and rule.code[3] == area:
            yield from rule.findings(history, rule.steps, generations_per_step)


@dataclass(frozen=True)
class Verdict:
    """One rule and a whole log.

    Attributes:
        rule: The rule.
        status: ``seen``, ``clear``, or ``unknown`` where the log has too little to tell.
        evidence: What was seen the last time; "" unless seen.
        spans: Steps ``(first, last)`` of the rows at which the rule holds, oldest first.
    """

    rule: Rule
    status: str
    evidence: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What is wrong when the rule holds."""
        return self.rule.title or REGISTRY[self.rule.code].title


def review(history: History) -> list[Verdict]:
    """Apply every rule with named metrics to every row of a log; rules that hold somewhere come first.

    A window is at most a quarter of the log, so that short runs are judged too.

    Args:
        history: Rows with ``step``, oldest first.
    """
    rows = training_rows(history)
    verdicts = [_verdict(rule, rows) for rule in RULES if rule.metrics]
    return sorted(verdicts, key=lambda verdict: ("seen", "clear", "unknown").index(verdict.status))


def _verdict(rule: Rule, rows: History) -> Verdict:
    known = sum(any(name in row for name in rule.metrics) for row in rows)
    if known < ROWS_NEEDED:
        return Verdict(rule, "unknown")
    total = int(rows[-1]["step"])
    steps = min(rule.steps, max(ROWS_NEEDED * math.ceil(total / len(rows)), total // 4))
    spans: list[tuple[int, int]] = []
    evidence, before = "", -1
    places = range(0, len(rows), math.ceil(len(rows) / MOST_ROWS))
    for number, at in enumerate(places):
        finding = next(rule.findings(rows[: at + 1], steps), None) if at else None
        if finding is None:
            continue
        step = int(rows[at]["step"])
        spans = [*spans[:-1], (spans[-1][0], step)] if before == number - 1 and spans else [*spans, (step, step)]
        evidence, before = finding.what, number
    return Verdict(rule, "seen" if spans else "clear", evidence, spans)
