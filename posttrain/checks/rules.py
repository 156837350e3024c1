"""Rules that find problems in the metrics of a run. During training, they are applied to every log line. For a report, they
are applied to the whole log.

A rule consists of a code, the names of its metrics, a window in optimizer steps, a predicate, and the texts of its finding.
`check_log` applies the rules to the newest row of a log, and `review` applies them to every row. A log row can contain the
means over several steps, e.g. ten. Such a row covers ten steps of a window. Thresholds without a cited source are choices of
this project.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.checks.registry import REGISTRY, Severity
from posttrain.types import Finding

FLAT_SHARE = 0.8  # Maximum share of groups whose rewards are all equal.
# A finding is reported if the KL divergence exceeds KL_LARGE nats per token and has increased by the factor KL_GROWTH.
KL_LARGE, KL_GROWTH = 0.5, 5.0
ENTROPY_LEFT = 0.1  # Minimum entropy, as a fraction of the initial entropy.
CUT_SHARE = 0.5  # Maximum share of completions that reach the length limit.
CUT_AT_FIRST = 0.9  # Maximum share of completions that reach the length limit in the first generation.
# A finding is reported if the mean length increases by more than this factor, and the reward increases by less than a tenth
# of its standard deviation.
LENGTH_GROWTH = 1.5
# Limits for the fraction of tokens with weight 0. If the fraction is above MASKED_SHARE, a warning is logged. If it is above
# MASKED_MOST, the warning advises to stop the run.
MASKED_SHARE, MASKED_MOST = 0.2, 0.9
REWARD_SHARE = 0.3  # Maximum share of the step time that reward functions may take.
DRIFT_STEPS = 50  # Window for measuring the growth of the mismatch, in optimizer steps.
# Policy mismatch in nats per token. A finding is reported if the mismatch exceeds DRIFT and has increased by the factor
# DRIFT_GROWTH. Above DRIFT_ALONE, a finding is reported even without an increase.
DRIFT, DRIFT_GROWTH, DRIFT_ALONE = 0.1, 1.5, 0.5
UNPAIRED = 0.5  # Maximum fraction of answer bytes in tokens that cannot be aligned between two tokenizers.
DISCARDED = 0.3  # Maximum share of discarded rollouts.
SINKING = 5  # Number of consecutive decreases of both rewards that cause a finding.
SATURATED = 10.0  # Reward margin above which the loss is saturated.
# A finding is reported if the accuracy is below BACKWARDS in EVALUATIONS consecutive evaluations.
EVALUATIONS, BACKWARDS = 3, 0.45
SPIKE = 10.0  # Maximum gradient norm, as a multiple of the median of earlier norms.
ROWS_NEEDED = 6  # Minimum number of rows for a review of a whole log.
MOST_ROWS = 5000  # Maximum number of log rows that are checked.


History = Sequence[Mapping[str, float]]


def training_rows(history: History) -> list[Mapping[str, float]]:
    """Return the log rows of training steps, without rows of evaluations and without the final summary."""
    return list(rows_backwards(history))[::-1]


def rows_backwards(history: History) -> Iterator[Mapping[str, float]]:
    """Yield the training rows, newest first. Rows are read lazily, because a rule runs at every row but reads only a few
    rows.
    """
    return (row for row in reversed(history) if "loss" in row and "step" in row)


def window(history: History, name: str, steps: int) -> list[float] | None:
    """Return a metric's values in the newest rows that cover at least ``steps`` optimizer steps. If there are too few rows,
    return None.

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
    """Return the mean of the first fifth and the mean of the last fifth of the values."""
    fifth = max(1, len(values) // 5)
    return statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])


def columns(history: History, ending: str) -> list[str]:
    """Return the names of the reward functions for which the newest row has ``rewards/<name>/<ending>``."""
    keys = [
        key for key in next(rows_backwards(history), {}) if key.startswith("rewards/") and key.endswith(f"/{ending}")
    ]
    return [key.removeprefix("rewards/").removesuffix(f"/{ending}") for key in keys]


@dataclass(frozen=True)
class View:
    """Rows of a log that a rule reads, which are all rows up to a given row.

    Attributes:
        history: Rows with ``step``, oldest first.
        name: Name of the metric that the rule reads.
        steps: Window in optimizer steps.
        generations_per_step: Number of generations per optimizer step. It is below 1 if several steps use one generation.
    """

    history: History
    name: str
    steps: int
    generations_per_step: float = 1.0

    def values(self, name: str | None = None) -> list[float] | None:
        """Return a metric's values in the window. If the log is shorter than the window, or a row lacks the metric, return
        None.
        """
        return window(self.history, name or self.name, self.steps)

    def last(self, name: str, count: int) -> list[float]:
        """Return up to ``count`` values of a metric, in order. The values are those of the newest training rows that contain
        the metric.
        """
        rows = (row for row in reversed(self.history) if name in row and ("loss" in row or name.startswith("eval_")))
        return [float(row[name]) for row in itertools.islice(rows, count)][::-1]

    def mean(self, name: str | None = None) -> float:
        """Return the mean of a metric in the window, or 0 if the window has no values."""
        values = self.values(name)
        return statistics.fmean(values) if values else 0.0


@dataclass(frozen=True)
class Sign:
    """Problem that a predicate has found. ``what`` is a sentence with numbers. Other fields override the fields of the rule
    if they are set.
    """

    what: str
    where: str = ""
    fix: str = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """Rule for one kind of problem.

    Attributes:
        code: Code in the registry of checks. The registry contains its name and title.
        metrics: Names of metrics. The rule is applied to each metric separately. If empty, the predicate selects metrics.
        steps: Window in optimizer steps.
        holds: Predicate that takes a `View` and yields a `Sign` for each problem.
        why: Consequence of the problem.
        fix: Advice for the user.
        severity: ``error`` stops a run. ``warning`` and ``info`` are logged.
        live: Whether the rule is applied during training. False if another check finds the problem during training, or if
            the rule needs the whole log.
        title: Title on the page of a run. If empty, the title in the registry is used.
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
        """Return the rule's metrics that a row contains. For evaluation metrics, include the metrics of named evaluation
        sets.
        """
        named = tuple(name.removeprefix("eval") for name in self.metrics if name.startswith("eval_"))
        of_sets = [
            name for name in row if name not in self.metrics and name.startswith("eval_") and name.endswith(named)
        ]
        return [*(name for name in self.metrics if name in row), *of_sets]

    def findings(self, history: History, steps: int, generations_per_step: float = 1.0) -> Iterator[Finding]:
        """Yield the rule's findings at the newest row of a log."""
        newest = next((row for row in reversed(history) if "loss" in row), {})
        # Evaluation metrics are checked only if the last row is the row of an evaluation.
        newest = dict(newest) | {
            name: value for name, value in (history[-1] if history else {}).items() if "eval_" in name
        }
        for name in self.names_in(newest) if self.metrics else [""]:
            for sign in self.holds(View(history, name, steps, generations_per_step)):
                where, fix = sign.where or name, sign.fix or self.fix
                yield Finding(self.code, sign.severity or self.severity, sign.what, where, self.why, fix)


def _above(most: float, what: str, *, newest: bool = False) -> Callable[[View], Iterator[Sign]]:
    """Return a predicate that yields a problem if a metric's mean over the window exceeds ``most``. With ``newest=True``,
    the newest value is used instead of the mean.

    The text ``what`` can contain ``{value}``, ``{percent}`` and ``{steps}``.
    """

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
            f"the mean length increased from {first:.0f} to {last:.0f} tokens in {view.steps} steps, while the reward went from "
            f"{before:.3g} to {after:.3g}."
        )


def _kl_grows(view: View) -> Iterator[Sign]:
    values = view.values()
    if values is None or len(values) < 5:
        return
    first, last = ends(values)
    if last > KL_LARGE and last > KL_GROWTH * first:
        yield Sign(f"the KL to the reference rose from {first:.3g} to {last:.3g} nats per token in {view.steps} steps.")


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
        yield Sign(f"the entropy fell from {first:.3g} to {last:.3g} nats per token.")


def _cut(view: View) -> Iterator[Sign]:
    share = view.mean()
    if share <= CUT_SHARE:
        early = list(itertools.islice((row for row in view.history if "loss" in row and "step" in row), 2))
        share = early[0].get(view.name, 0.0) if len(early) == 1 else 0.0
        if share <= CUT_AT_FIRST:
            return
    yield Sign(f"{100 * share:.0f} % of the completions were truncated at the length limit.")


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


def _constant(view: View) -> Iterator[Sign]:
    spreads = {name: view.values(f"rewards/{name}/std") for name in columns(view.history, "std")}
    if not any(map(any, filter(None, spreads.values()))):
        return  # PT-R002 and PT-R022 already report this problem.
    for name, spread in spreads.items():
        means = view.values(f"rewards/{name}/mean")
        if not spread or not means or any(spread) or len({*means}) > 1:
            continue
        span, where = f"for every completion of the last {view.steps} steps.", f"rewards/{name}/std"
        if means[0] == 0:
            yield Sign(f"{name} was never above 0: its reward was 0 {span}", where)
        else:
            fix = "do nothing if this is its maximum. Otherwise check how the function parses completions."
            yield Sign(f"{name} is constant: its reward was {means[0]:g} {span}", where, fix, "info")


def _nan_rewards(view: View) -> Iterator[Sign]:
    for name in columns(view.history, "nan"):
        where = f"rewards/{name}/nan"
        yield Sign(f"{name} returned NaN for {next(rows_backwards(view.history))[where]:.0f} rows.", where)


def _slow_reward(view: View) -> Iterator[Sign]:
    for name in columns(view.history, "seconds") if view.values("step_time") else ():
        spent = view.mean(f"rewards/{name}/seconds")
        share = spent * view.generations_per_step / max(view.mean("step_time"), 1e-9)
        if share > REWARD_SHARE:
            what = f"{name} takes {100 * share:.0f} % of the step time ({spent:.2g} s per generation)."
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
        yield Sign(f"rewards/margins is {margins[-1]:.3g}, where the gradient of a sigmoid is almost 0.")


def _backwards(view: View) -> Iterator[Sign]:
    accuracy = view.last(view.name, 10)
    if len(accuracy) == 10 and statistics.fmean(accuracy) < BACKWARDS:
        yield Sign(f"rewards/accuracies has a mean of {statistics.fmean(accuracy):.2f} over the last 10 logs.")


def _still(view: View) -> Iterator[Sign]:
    rows = list(itertools.islice((row for row in rows_backwards(view.history) if view.name in row), 3))
    moved = any(row["rewards/chosen"] or row["rewards/rejected"] for row in rows)
    if len(rows) == 3 and not moved and all(row.get("learning_rate", 1.0) > 0 for row in rows):
        yield Sign("rewards/chosen and rewards/rejected are still exactly 0 after 3 logs.")


def _inverted(view: View) -> Iterator[Sign]:
    latest = view.last(view.name, EVALUATIONS)
    if len(latest) == EVALUATIONS and max(latest) < BACKWARDS:
        values = ", ".join(f"{value:.2f}" for value in latest)
        yield Sign(f"{view.name} was {values} in the last {EVALUATIONS} evaluations.")


def _spikes(view: View) -> Iterator[Sign]:
    norms = view.values()
    usual = statistics.median(norms[:-1]) if norms is not None and len(norms) > 1 else 0.0
    if norms is not None and usual > 0 and norms[-1] > SPIKE * usual:
        yield Sign(f"the gradient norm was {norms[-1]:.3g}, {norms[-1] / usual:.0f} times the median before it.")


def _mismatch(view: View) -> Iterator[Sign]:
    newest = next(rows_backwards(view.history))
    # If the row has "sampling/kl" or no staleness metric, "kl" is the KL divergence from the reference.
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
        yield Sign(f"the policy mismatch KL is {now:.2g} nats per token{trail}.")


def _discarded(view: View) -> Iterator[Sign]:
    dropped, produced = view.values(), view.values("async/produced")
    if dropped is None or produced is None or len(dropped) < 2:
        return
    # Compare the increases of the two metrics within the window, because both metrics are totals since the start of the run.
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
        "the completions of a group are compared with each other. With equal rewards, they have advantage 0 and no gradient, but "
        "they still count in the denominator of the loss, and in a KL penalty.",
        "increase temperature or num_generations, use prompts that the model sometimes solves (harder prompts if rewards are "
        "always at their maximum), or give partial credit.",
    ),
    Rule(
        "PT-R003", ("completions/mean_length",), 100, _length_grows,
        "a loss that divides by each completion's length penalizes long wrong answers less. Or the rewards depend on length.",
        "use loss_type='dapo' or 'dr_grpo', check rewards/length_corr, or add get_soft_overlong_punishment.",
    ),
    Rule(
        "PT-R004", ("kl",), 50, _kl_grows,
        "the policy's text becomes very different from the reference's text, and rewards are often wrong for such text.",
        "increase beta, decrease learning_rate, or resume from an earlier checkpoint.",
    ),
    Rule(
        "PT-R007", ("entropy", "policy/entropy_avg", "objective/entropy"), 10, _certain,
        "the completions of a group become equal and cannot be compared. The policy does not recover from this.",
        "increase epsilon_high, entropy_coef or temperature, set use_adaptive_entropy=True, or resume from a checkpoint.",
    ),
    Rule(
        "PT-R008", ("completions/clipped_ratio",), 10, _cut,
        "truncated completions have no end token, and usually get no reward because they do not reach the answer.",
        "increase max_completion_length, ask for shorter answers, or check that the model's eos token is among the stop tokens.",
    ),
    Rule(
        "PT-R009", ("completions/duplicate_ratio",), 1,
        _above(0.8, "{percent:.0f} % of the completions are identical to another completion of their group.", newest=True),
        "identical completions have equal rewards and no advantage, but take as much time as different ones.",
        "increase temperature, remove top_k, top_p or min_p, and check that completions are sampled with different seeds.",
    ),
    Rule(
        "PT-R032", ("completions/no_token_ratio",), 1,
        _above(0.0, "{percent:.2g} % of the sampled ids have no token in the tokenizer.", newest=True),
        "the model's embedding has more rows than the tokenizer has tokens. Reward functions do not receive these ids as text.",
        "set mask_ids_without_token=True, so that these ids are never sampled.",
    ),
    Rule(
        "PT-R012", ("grad_norm",), 20, _no_gradient,
        "a loss of 0 is normal here (the ratio is 1), but a gradient of 0 means that the policy does not learn.",
        "check frac_reward_zero_std, completions/masked_ratio, and which parameters are frozen.",
    ),
    Rule(
        "PT-R005", ("ratio/max",), 1,
        _above(10.0, "a token is {value:.3g} times as likely as when it was sampled.", newest=True),
        "if its advantage is negative, the loss of this token is unbounded, so that one token can dominate the step.",
        "set delta (2 to 4), or decrease learning_rate, num_iterations or steps_per_generation.",
    ),
    Rule(
        "PT-R006", ("clip_ratio/region_mean", "cispo_clip_ratio", "policy/clipfrac_avg"), 10,
        _above(0.3, "{percent:.0f} % of the tokens of the last {steps} steps were clipped."),
        "clipped tokens have no gradient. The policy changes more per generation than the clip range allows.",
        "decrease learning_rate or num_iterations, generate more often (steps_per_generation), or increase epsilon.",
    ),
    Rule(
        "PT-R010", ("sampling/frac_masked",), 10, _masked,
        "the bound applies to the product of all token ratios of a completion. A difference of 0.012 nats per token exceeds a "
        "bound of 3 after 100 tokens, so completions are masked only because they are long.",
        MASKED_FIX,
    ),
    Rule(
        "PT-R011", ("sampling/nan_logprobs",), 1,
        _above(0.001, "the engine returned no log-prob for {percent:.2g} % of the tokens.", newest=True),
        "these tokens are not trained, and the weights of the other tokens may be wrong.",
        "check the logprobs that the engine or rollout_func returns, or set vllm_importance_sampling_correction=False.",
        severity="error",
    ),
    Rule(
        "PT-R014", (), 10, _never_applies,
        "the function has no effect. Usually it compares a column with a value that does not occur in the data.",
        "compare the column's values with the values in the function, or remove the function.",
    ),
    Rule(
        "PT-R033", (), 20, _constant,
        "the function has 0 % of the variance of the rewards, so it does not affect what the policy learns.",
        "give partial credit, sample more diverse completions (num_generations, temperature), use easier prompts, or check how "
        "the function parses completions (posttrain report shows the latest ones).",
    ),
    Rule(
        "PT-R016", (), 1, _nan_rewards,
        "NaN counts as None (not scored), but usually it comes from an unintended division by zero.",
        "return a number, or None for completions that the function cannot score.",
    ),
    Rule(
        "PT-R017", (), 10, _slow_reward,
        "generation and training wait for this function.",
        "make it `async def` if it waits for something, or decorate it with posttrain.rewards.parallel.",
    ),
    Rule(
        "PT-R031", ("align/dropped_bytes_fraction",), 1,
        _above(UNPAIRED, "{percent:.0f} % of the text cannot be aligned with the teacher's tokens.", newest=True),
        "the loss is the mean over the aligned text. If no text can be aligned, the loss is 0 and the student does not learn.",
        "compare how both tokenizers split an answer. Use a teacher whose tokenizer preserves the text, or more rows per step.",
    ),
    Rule(
        "PT-B002", ("loss", "grad_norm"), 1, _not_finite,
        "the gap in the curve is NaN or infinity. A single skipped step is harmless, but several consecutive ones stop a run.",
        "decrease learning_rate, use bf16 instead of fp16, and check the rows of these steps.",
        live=False, title="loss or gradient is not a number",
    ),
    Rule(
        "PT-P003", ("rewards/chosen",), 1, _sinking,
        "the margin increases although chosen answers become less likely too. The model unlearns both answers, so its samples "
        "get worse while the accuracy increases.",
        "increase the weight of a likelihood term ('sft' in DPO's loss_type, cpo_alpha, tpo_alpha), or try apo_zero, a larger "
        "beta or a smaller learning rate.",
    ),
    Rule(
        "PT-P004", ("rewards/margins",), 1, _saturated,
        "further steps only change pairs that are already separated, or fit noise.",
        "stop training, or decrease the learning rate or the number of epochs. With a larger beta, margins get large sooner.",
    ),
    Rule(
        "PT-P005", ("rewards/accuracies",), 1, _backwards,
        "the policy becomes more likely to give the rejected answers. Labels may be flipped, or batches contradict each other.",
        "look at chosen and rejected answers of some rows with posttrain inspect, or decrease the learning rate.",
    ),
    Rule(
        "PT-P006", ("rewards/margins",), 1, _still,
        "policy and reference share their weights, or the trained parameters do not affect the output.",
        "check that ref_model is another object, that some parameter requires a gradient, and that beta > 0.",
    ),
    Rule(
        "PT-P007", ("eval_rewards/accuracies",), 1, _inverted,
        "labels may be inverted: the policy prefers the rejected answer on held-out pairs.",
        "look at chosen and rejected answers of some rows with posttrain inspect. If the columns are swapped, rename them.",
    ),
    Rule(
        "PT-T005", ("grad_norm",), 25, _spikes,
        "some steps have ten times the usual gradient norm. Clipping limits the size of such a step, but not its direction.",
        "check the rows of these steps for very long, broken or mislabeled texts, use a longer warmup, or a lower max_grad_norm.",
        live=False,
    ),
    Rule(
        "PT-R024", ("sampling/kl", "kl"), 10, _mismatch,
        "the value is mean(rho - 1 - log rho), where rho is the ratio between policy and sampler. Rollouts come from a policy "
        "that is increasingly different from the trained one, so importance weights mask more and more tokens.",
        "decrease learning_rate, max_staleness, num_iterations or steps_per_generation, or push weights more often. Check that "
        "the engine uses the pushed weights and the same temperature.",
    ),
    Rule(
        "PT-R025", ("async/stale_dropped",), 10, _discarded,
        "generation is faster than training, so the time for discarded rollouts is wasted.",
        "decrease max_inflight_tasks, increase max_staleness, or increase weight_sync_steps so that weights change less often.",
    ),
    Rule(
        "PT-R026", ("async/at_staleness_bound",), 10,
        _above(
            0.8, "{percent:.0f} % of the rollouts of the last {steps} steps are as old as max_staleness_hard allows."
        ),
        "all steps train on rollouts from old weights, which adds bias without speed. With any delay, rollouts are discarded.",
        "decrease max_inflight_tasks, set staleness_policy='pace', or use more devices for generation.",
    ),
)  # fmt: skip


def check_log(history: History, area: str = "R", *, generations_per_step: float = 1.0) -> Iterator[Finding]:
    """Yield all findings at the newest row of a log.

    Args:
        history: Rows with ``step``, oldest first.
        area: First letter of the codes: ``R`` for rollouts, ``P`` for preferences.
        generations_per_step: Number of generations per optimizer step. It is below 1 if several steps use one generation.
    """
    for rule in RULES:
        if rule.live and rule.code[3] == area:
            yield from rule.findings(history, rule.steps, generations_per_step)


@dataclass(frozen=True)
class Verdict:
    """Result of applying one rule to a whole log.

    Attributes:
        rule: The rule.
        status: ``seen``: the rule has found the problem. ``clear``: the rule has not found it. ``unknown``: the log is too
            short.
        evidence: Text of the last finding. Empty unless the status is ``seen``.
        spans: Ranges ``(first, last)`` of steps with the problem, in order.
    """

    rule: Rule
    status: str
    evidence: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Title of the problem."""
        return self.rule.title or REGISTRY[self.rule.code].title


def review(history: History) -> list[Verdict]:
    """Apply all rules with named metrics to every row of a log. In the result, rules that have found a problem come first.

    The window of a rule is at most a quarter of the log. Therefore, short runs can be checked as well.

    Args:
        history: Rows with ``step``, oldest first.
    """
    rows = training_rows(history)
    verdicts = [_verdict(rule, rows) for rule in RULES if rule.metrics]
    return sorted(verdicts, key=lambda verdict: ("seen", "clear", "unknown").index(verdict.status))


def _verdict(rule: Rule, rows: History) -> Verdict:
    count = sum(any(name in row for name in rule.metrics) for row in rows)
    if count < ROWS_NEEDED:
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
