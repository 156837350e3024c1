"""What can go wrong while a run generates and learns: rows of its log, or the rewards of a generation, in; findings out.

Thresholds are starting values; those without a source were set here. A row of the log that speaks of ten steps counts as
ten: windows are in optimiser steps, not in rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from posttrain.checks.training import History, check_lag, columns, ends, training_rows, window
from posttrain.thresholds import CLIPPED_TOKENS, CUT, ENTROPY_LEFT, FLAT_SHARE, KL_GROWTH, KL_LARGE
from posttrain.types import Finding

__all__ = [
    "check_correction",
    "check_duplicates",
    "check_entropy",
    "check_gradients",
    "check_kl",
    "check_length_limit",
    "check_length_trend",
    "check_online",
    "check_ratio",
    "check_reward_columns",
    "check_reward_scales",
    "check_reward_signal",
    "check_reward_time",
    "check_stragglers",
]

WINDOW = 10  # Optimiser steps that a state must last.
TREND = 100  # Optimiser steps over which a length may grow.
ZERO_GRADIENTS = 20
CUT_AT_FIRST = 0.9  # Completions of the first generation that end at the length limit.
DUPLICATES = 0.8
GROWTH = 1.5  # Of the mean length, while the reward moves by less than a tenth of its spread.
RATIO_LARGE = 10.0
DROWNS = 400.0  # Ratio of two variances: of 20 between the spreads.
MASKED, MASKED_MOST, MISSING = 0.2, 0.9, 0.001  # Tokens without weight; tokens without a log-prob.
REWARD_SHARE, GENERATION_SHARE, STRAGGLER = 0.3, 0.6, 3.0


def check_reward_signal(history: History) -> Finding | None:
    """Most groups without spread: solved (the reward is at its best), or out of reach."""
    flat = window(history, "frac_reward_zero_std", WINDOW)
    if flat is None or statistics.fmean(flat) <= FLAT_SHARE:
        return None
    share = f"{100 * statistics.fmean(flat):.0f} % of the groups of the last {WINDOW} steps have equal rewards"
    rewards = [row["reward"] for row in training_rows(history) if "reward" in row]
    recent = window(history, "reward", WINDOW) or [math.nan]
    span = max(rewards, default=0.0) - min(rewards, default=0.0)
    if span > 0 and ends(recent)[1] >= max(rewards) - 0.05 * span:
        return Finding(
            "PT-R001",
            "warning",
            f"{share}, at the best reward of the run ({max(rewards):g}).",
            "frac_reward_zero_std",
            "what is always right teaches nothing more: the steps cost time and the policy drifts.",
            "stop here, add harder prompts, or leave out those that are solved.",
        )
    return Finding(
        "PT-R002",
        "warning",
        f"{share}.",
        "frac_reward_zero_std",
        "completions of a group are compared with each other: equal rewards have advantage 0 and move nothing, but they fill "
        "the denominator (and a KL penalty still pulls).",
        "raise temperature or num_generations, take prompts the model solves sometimes, or give partial credit.",
    )


def check_length_trend(history: History) -> Finding | None:
    """Texts that grow by half while the reward stands."""
    lengths, rewards = (window(history, name, TREND) for name in ("completions/mean_length", "reward"))
    spread = window(history, "reward_std", TREND)
    if lengths is None or rewards is None or len(lengths) < 5:
        return None
    (first, last), (before, after) = ends(lengths), ends(rewards)
    scale = statistics.fmean(spread) if spread else abs(before)
    if last <= GROWTH * max(first, 1.0) or after - before >= 0.1 * scale:
        return None
    return Finding(
        "PT-R003",
        "warning",
        f"the mean length grew from {first:.0f} to {last:.0f} tokens in {TREND} steps, and the reward went from {before:.3g} to "
        f"{after:.3g}.",
        "completions/mean_length",
        "a loss that divides by each completion's length punishes long wrong answers less, and rewards can be earned by length.",
        "use loss_type='dapo' or 'dr_grpo', look at rewards/length_corr, or add get_soft_overlong_punishment.",
    )


def check_kl(history: History) -> Finding | None:
    """A policy that runs away from its reference."""
    values = window(history, "kl", 5 * WINDOW)
    if values is None or len(values) < 5:
        return None
    first, last = ends(values)
    if last <= KL_LARGE or last <= KL_GROWTH * first:
        return None
    return Finding(
        "PT-R004",
        "warning",
        f"the KL to the reference grew from {first:.3g} to {last:.3g} nats a token in {5 * WINDOW} steps.",
        "kl",
        "the policy leaves the text it knows; rewards measured there are often wrong.",
        "raise beta, lower learning_rate, or go back to an earlier checkpoint.",
    )


def check_ratio(history: History) -> list[Finding]:
    """Tokens far from the policy that sampled them, and a clip that throws much of the batch away."""
    found = []
    largest = window(history, "ratio/max", 1)
    if largest is not None and largest[-1] > RATIO_LARGE:
        found.append(
            Finding(
                "PT-R005",
                "warning",
                f"a token is {largest[-1]:.3g} times as likely as when it was sampled.",
                "ratio/max",
                "with a negative advantage nothing bounds such a token: one of them can undo the step.",
                "set delta (2 to 4), lower learning_rate, num_iterations or steps_per_generation.",
            )
        )
    for name in ("clip_ratio/region_mean", "cispo_clip_ratio"):
        share = window(history, name, WINDOW)
        if share is not None and statistics.fmean(share) > CLIPPED_TOKENS:
            found.append(
                Finding(
                    "PT-R006",
                    "warning",
                    f"{100 * statistics.fmean(share):.0f} % of the tokens of the last {WINDOW} steps were clipped.",
                    name,
                    "clipped tokens have no gradient: the policy moves further in a window than the clip allows.",
                    "lower learning_rate or num_iterations, generate more often (steps_per_generation), or widen epsilon.",
                )
            )
    return found


def check_entropy(history: History) -> Finding | None:
    """A policy that has become certain of nearly every token."""
    rows = [row["entropy"] for row in training_rows(history) if "entropy" in row]
    recent = window(history, "entropy", WINDOW)
    if recent is None or len(rows) < 2 * len(recent):
        return None
    first, last = statistics.fmean(rows[: len(recent)]), statistics.fmean(recent)
    if last >= ENTROPY_LEFT * first:
        return None
    return Finding(
        "PT-R007",
        "warning",
        f"the entropy fell from {first:.3g} to {last:.3g} nats a token.",
        "entropy",
        "completions of a group become equal: there is nothing left to compare, and no way back.",
        "raise epsilon_high or entropy_coef, use_adaptive_entropy=True, a higher temperature, or an earlier checkpoint.",
    )


def check_length_limit(history: History) -> Finding | None:
    """Completions that end at the limit instead of by themselves."""
    rows = training_rows(history)
    name = "completions/clipped_ratio"
    share = window(history, name, WINDOW)
    cut = statistics.fmean(share) if share is not None else 0.0
    if cut <= CUT:
        cut = rows[0].get(name, 0.0) if len(rows) == 1 else 0.0
        if cut <= CUT_AT_FIRST:
            return None
    return Finding(
        "PT-R008",
        "warning",
        f"{100 * cut:.0f} % of the completions were cut at the length limit.",
        name,
        "an answer that never comes earns nothing, whatever stands before it.",
        "raise max_completion_length, ask for shorter answers, or check that the model's end token is among the stop tokens.",
    )


def check_duplicates(history: History) -> Finding | None:
    """Groups whose completions are copies of each other."""
    name = "completions/duplicate_ratio"
    share = window(history, name, 1)
    if share is None or share[-1] <= DUPLICATES:
        return None
    return Finding(
        "PT-R009",
        "warning",
        f"{100 * share[-1]:.0f} % of the completions repeat another one of their group.",
        name,
        "copies have equal rewards and no advantage, and cost as much as others.",
        "raise temperature, undo top_k, top_p or min_p, and check that the engine draws with a new seed for each completion.",
    )


def check_correction(history: History) -> Iterator[Finding]:
    """A correction for another engine that throws tokens away, or log-probs that engine did not say."""
    masked = window(history, "sampling/frac_masked", WINDOW)
    share = statistics.fmean(masked) if masked else 0.0
    if share > MASKED:
        fix = "set vllm_importance_sampling_mode='geometric' or 'token_truncate', or shorten completions."
        yield Finding(
            "PT-R010",
            "warning",
            f"{100 * share:.0f} % of the tokens of the last {WINDOW} steps have an importance weight of 0.",
            "sampling/frac_masked",
            "the bound is on the product over a whole completion: a gap of 0.012 a token is beyond 3 after 100 tokens, so long "
            "completions are left out by their length alone.",
            f"stop this run; {fix}" if share > MASKED_MOST else fix,
        )
    missing = window(history, "sampling/nan_logprobs", 1)
    if missing is not None and missing[-1] > MISSING:
        yield Finding(
            "PT-R011",
            "error",
            f"the engine gave no log-prob for {100 * missing[-1]:.2g} % of the tokens.",
            "sampling/nan_logprobs",
            "these tokens are trained by nobody, and the others with weights that may be wrong.",
            "look at what the engine or rollout_func returns in logprobs, or turn off vllm_importance_sampling_correction.",
        )


def check_gradients(history: History) -> Finding | None:
    """Steps that move nothing."""
    norms = window(history, "grad_norm", ZERO_GRADIENTS)
    if norms is None or any(norms):
        return None
    return Finding(
        "PT-R012",
        "warning",
        f"the gradient norm was 0 for {ZERO_GRADIENTS} steps.",
        "grad_norm",
        "a loss of 0 is normal here (the ratio is 1), a gradient of 0 is not: nothing is learned.",
        "look at frac_reward_zero_std and completions/masked_ratio, and at what is frozen.",
    )


def check_reward_scales(history: History) -> Finding | None:
    """One reward that decides everything because its numbers are larger."""
    names = columns(history, "variance_share")
    shares = {name: window(history, f"rewards/{name}/variance_share", WINDOW) for name in names}
    means = {name: statistics.fmean(values) for name, values in shares.items() if values}
    top = max(means, key=lambda name: means[name], default=None)
    others = {name: share for name, share in means.items() if name != top and share > 0}
    if top is None or not others or means[top] <= DROWNS * max(others.values()):
        return None
    return Finding(
        "PT-R013",
        "warning",
        f"{100 * means[top]:.3g} % of the rewards' variance is {top}'s; {', '.join(sorted(others))} count for nothing.",
        f"rewards/{top}/variance_share",
        "rewards are summed: the one with the larger numbers decides every advantage.",
        "set reward_weights, a reward_transform ('rank', 'zscore', 'log1p'), or "
        "multi_objective_aggregation='normalize_then_sum'.",
    )


def check_reward_columns(history: History) -> list[Finding]:
    """Functions that never apply, never vary, or return NaN."""
    found = []
    names = columns(history, "applicable")
    for name in names:
        applies = window(history, f"rewards/{name}/applicable", WINDOW)
        spread = window(history, f"rewards/{name}/std", 2 * WINDOW)
        if applies is not None and not any(applies):
            found.append(
                Finding(
                    "PT-R014",
                    "warning",
                    f"{name} returned None for every row of the last {WINDOW} steps.",
                    f"rewards/{name}/applicable",
                    "it takes part in nothing, silently: usually a value it looks for never occurs in a column.",
                    "compare the column's values with those in the function, or leave the function out.",
                )
            )
        elif len(names) > 1 and spread is not None and not any(spread):
            found.append(
                Finding(
                    "PT-R015",
                    "info",
                    f"{name} gave one value to every row of the last {2 * WINDOW} steps.",
                    f"rewards/{name}/std",
                    "a constant cancels in every group: it teaches nothing (any more).",
                    "leave it out where it costs time, or check what it reads.",
                )
            )
    for name in columns(history, "nan"):
        found.append(
            Finding(
                "PT-R016",
                "warning",
                f"{name} returned NaN for {training_rows(history)[-1][f'rewards/{name}/nan']:.0f} rows.",
                f"rewards/{name}/nan",
                "they are treated as None (does not apply); a division by zero is rarely meant so.",
                "return None on purpose, or a number.",
            )
        )
    return found


def check_reward_time(history: History, generations_per_step: float) -> list[Finding]:
    """Reward functions that the whole run waits for.

    Args:
        history: Rows of the log.
        generations_per_step: Generations of one optimiser step (less than 1 where a generation serves several).
    """
    steps = window(history, "step_time", WINDOW)
    if steps is None:
        return []
    found = []
    for name in columns(history, "seconds"):
        spent = window(history, f"rewards/{name}/seconds", WINDOW)
        share = statistics.fmean(spent) * generations_per_step / max(statistics.fmean(steps), 1e-9) if spent else 0.0
        if share > REWARD_SHARE:
            found.append(
                Finding(
                    "PT-R017",
                    "warning",
                    f"{100 * share:.0f} % of the step time is {name} ({statistics.fmean(spent or [0.0]):.2g} s a generation).",
                    f"rewards/{name}/seconds",
                    "the model waits meanwhile.",
                    "make it `async def` where it waits for something, mark it with posttrain.rewards.parallel, or use "
                    "posttrain.rewards.pooled where it computes.",
                )
            )
    return found


def check_stragglers(history: History, generations_per_step: float) -> Finding | None:
    """A few long completions that the others wait for."""
    longest, mean, spent, steps = (
        window(history, name, WINDOW)
        for name in ("completions/max_length", "completions/mean_length", "rollouts/seconds", "step_time")
    )
    if longest is None or mean is None or spent is None or steps is None:
        return None
    ratio = max(longest) / max(statistics.fmean(mean), 1.0)
    share = statistics.fmean(spent) * generations_per_step / max(statistics.fmean(steps), 1e-9)
    if ratio <= STRAGGLER or share <= GENERATION_SHARE:
        return None
    return Finding(
        "PT-R018",
        "info",
        f"the longest completion is {ratio:.1f} times the mean, and generation is {100 * share:.0f} % of the step time.",
        "completions/max_length",
        "an engine with fixed batches waits for the longest completion of each.",
        "use rollout_engine='native' (a finished completion frees its place), or lower max_completion_length.",
    )


def check_online(history: History, *, generations_per_step: float = 1.0) -> Iterator[Finding]:
    """All findings of a log whose newest row has just been written.

    Args:
        history: Rows with ``step``, oldest first; evaluation rows are passed over.
        generations_per_step: Generations of one optimiser step.
    """
    single: tuple[Callable[[History], Finding | None], ...] = (
        check_reward_signal,
        check_length_trend,
        check_kl,
        check_entropy,
        check_length_limit,
        check_duplicates,
        check_gradients,
        check_reward_scales,
    )
    yield from (finding for check in single if (finding := check(history)) is not None)
    yield from check_ratio(history)
    yield from check_correction(history)
    yield from check_lag(history)
    yield from check_reward_columns(history)
    yield from check_reward_time(history, generations_per_step)
    stragglers = check_stragglers(history, generations_per_step)
    if stragglers is not None:
        yield stragglers
