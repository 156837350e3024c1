"""How runs go wrong: what each illness looks like, what to do, and where this run's curves show it.

The checks that run during training see windows; here the whole curve is known, and the steps it concerns are marked.
Thresholds that the checks use too are in `posttrain.thresholds`; the others are starting values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from posttrain.report.page.run import Series
from posttrain.thresholds import CLIPPED_TOKENS, CUT, ENTROPY_LEFT, FLAT_SHARE, KL_GROWTH, KL_LARGE

__all__ = ["PATHOLOGIES", "Verdict", "diagnose"]

Curves = Mapping[str, Series]
Span = tuple[int, int]
Points = list[tuple[int, float]]

LEAST = 6  # Points below which a curve says nothing.
SPREAD_LEFT = 0.1
GROWTH, STANDS = 1.3, 0.1  # Of the length, while the reward moves less than this share of its spread.
STALE, APART = 4.0, 0.1  # Updates; nats between trainer and engine.
SPIKE = 10.0  # Times the median before it.


@dataclass(frozen=True)
class Verdict:
    """One illness and this run.

    Attributes:
        key, title: Which.
        looks, do: What its curves look like, and what helps.
        metrics: Where it shows; their panels are shaded.
        status: ``seen``, ``clear``, or ``unknown`` where the run logged too little to tell.
        evidence: In numbers; "" unless seen.
        spans: Steps ``(first, last)`` that show it.
    """

    key: str
    title: str
    looks: str
    do: str
    metrics: tuple[str, ...]
    status: str = "unknown"
    evidence: str = ""
    spans: list[Span] = field(default_factory=list)


Found = tuple[list[Span], str] | None  # None: not enough was logged.


def diagnose(curves: Curves) -> list[Verdict]:
    """Every illness with what this run shows of it: those seen first, then those ruled out."""
    verdicts = []
    for verdict, detect in PATHOLOGIES:
        found = detect(curves)
        if found is None:
            verdicts.append(verdict)
            continue
        spans, evidence = found
        status = "seen" if spans else "clear"
        verdicts.append(replace(verdict, status=status, evidence=evidence if spans else "", spans=spans))
    return sorted(verdicts, key=lambda verdict: ("seen", "clear", "unknown").index(verdict.status))


def _points(curves: Curves, *names: str) -> Points | None:
    """Of the first of these metrics that has enough finite points."""
    for name in names:
        points = curves[name].finite if name in curves else []
        if len(points) >= LEAST:
            return points
    return None


def _smooth(points: Points, width: int = 5) -> Points:
    """Means of the latest ``width`` points."""
    values = [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, at - width + 1) : at + 1])) for at, (step, _) in enumerate(points)]


def _spans(points: Points, holds: Callable[[int], bool], least: int = 1) -> list[Span]:
    """Stretches of at least ``least`` neighbouring points for which ``holds``."""
    spans: list[Span] = []
    start: int | None = None
    for at in range(len(points) + 1):
        if at < len(points) and holds(at):
            start = at if start is None else start
        elif start is not None:
            if at - start >= least:
                spans.append((points[start][0], points[at - 1][0]))
            start = None
    return spans


def _reward_spread(curves: Curves) -> Found:
    share, spread = _points(curves, "frac_reward_zero_std"), _points(curves, "reward_std")
    if share is None and spread is None:
        return None
    if share is not None:
        smooth = _smooth(share)
        spans = _spans(smooth, lambda at: at >= 2 and smooth[at][1] > FLAT_SHARE)
        evidence = f"up to {100 * max(v for _, v in smooth):.0f} % of the groups had equal rewards"
    else:
        assert spread is not None
        smooth, first = _smooth(spread), statistics.fmean(v for _, v in spread[: max(2, len(spread) // 5)])
        spans = _spans(smooth, lambda at: smooth[at][1] < SPREAD_LEFT * first, 3)
        evidence = f"reward_std fell from {first:.3g} to {min(v for _, v in smooth):.3g}"
    reward = _points(curves, "reward")
    if spans and reward:
        evidence += (
            f"; the reward was {_near(_smooth(reward), spans[-1][1]):.3g} then, {max(v for _, v in reward):.3g} at best"
        )
    return spans, evidence + "."


def _near(points: Points, step: int) -> float:
    return min(points, key=lambda point: abs(point[0] - step))[1]


def _length_creep(curves: Curves) -> Found:
    lengths, rewards = _points(curves, "completions/mean_length"), _points(curves, "reward")
    if lengths is None or rewards is None:
        return None
    spread = curves["reward_std"].finite if "reward_std" in curves else []
    values = [v for _, v in rewards]
    scale = statistics.fmean(v for _, v in spread) if spread else statistics.pstdev(values)
    long, reward = _smooth(lengths), _smooth(rewards)
    back = max(4, len(long) // 4)
    spans: list[Span] = []
    most = (0.0, 0.0)
    for at in range(back, len(long)):
        (start, before), (end, after) = long[at - back], long[at]
        gain = _near(reward, end) - _near(reward, start)
        if after > GROWTH * max(before, 1.0) and gain < STANDS * scale:
            spans = _joined(spans, (start, end))
            most = max(most, (after - before, gain))
    return spans, f"up to {most[0]:.0f} tokens longer within {back} logs, while the reward moved by {most[1]:+.3g}."


def _joined(spans: list[Span], new: Span) -> list[Span]:
    if spans and new[0] <= spans[-1][1]:
        return [*spans[:-1], (spans[-1][0], new[1])]
    return [*spans, new]


def _kl_runaway(curves: Curves) -> Found:
    points = _points(curves, "kl", "objective/kl")
    if points is None:
        return None
    smooth = _smooth(points)
    first = abs(statistics.fmean(v for _, v in points[: max(2, len(points) // 5)]))
    spans = _spans(smooth, lambda at: smooth[at][1] > max(KL_LARGE, KL_GROWTH * min(first, KL_LARGE)), 2)
    return spans, f"from {first:.3g} at the start to {max(v for _, v in smooth):.3g} nats."


def _both_sinking(curves: Curves) -> Found:
    chosen, rejected = _points(curves, "rewards/chosen"), _points(curves, "rewards/rejected")
    if chosen is None or rejected is None or len(chosen) != len(rejected):
        return None
    good, bad = _smooth(chosen), _smooth(rejected)
    back = max(3, len(good) // 5)

    def sinks(at: int) -> bool:
        at = max(at, back)
        falls = good[at][1] < good[at - back][1] and bad[at][1] < bad[at - back][1]
        return falls and good[at][1] < 0 and abs(good[at][1]) > 0.05

    spans = _spans(good, sinks, back)
    return spans, (
        f"chosen went from {good[0][1]:.3g} to {good[-1][1]:.3g} and rejected from {bad[0][1]:.3g} to {bad[-1][1]:.3g}: "
        "the margin grows because rejected sinks faster."
    )


def _above(names: Sequence[str], bound: float, text: str, least: int = 3) -> Callable[[Curves], Found]:
    """Detect a curve that stays above a bound."""

    def detect(curves: Curves) -> Found:
        points = _points(curves, *names)
        if points is None:
            return None
        smooth = _smooth(points)
        spans = _spans(smooth, lambda at: smooth[at][1] > bound, least)
        return spans, text.format(most=max(v for _, v in smooth))

    return detect


def _stale(curves: Curves) -> Found:
    age = _above(("staleness/mean_updates",), STALE, "rollouts were up to {most:.3g} updates old.")(curves)
    name = "sampling/sampling_logp_difference/mean"
    apart = _above((name,), APART, "trainer and engine differ by up to {most:.3g} nats a token.")(curves)
    found = [item for item in (age, apart) if item is not None]
    return next((item for item in found if item[0]), found[0] if found else None)


def _entropy(curves: Curves) -> Found:
    points = _points(curves, "entropy", "objective/entropy", "policy/entropy_avg")
    if points is None:
        return None
    smooth, first = _smooth(points), statistics.fmean(v for _, v in points[: max(2, len(points) // 5)])
    spans = _spans(smooth, lambda at: smooth[at][1] < ENTROPY_LEFT * first, 2)
    return spans, f"from {first:.3g} at the start to {min(v for _, v in smooth):.3g} nats a token."


def _not_finite(curves: Curves) -> Found:
    names = [name for name in ("loss", "grad_norm") if name in curves]
    if not names:
        return None
    steps = sorted(
        {s for n in names for s, v in zip(curves[n].steps, curves[n].values, strict=True) if not math.isfinite(v)}
    )
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return [(step, step) for step in steps], f"at step{'s' if len(steps) > 1 else ''} {shown}."


def _spikes(curves: Curves) -> Found:
    points = _points(curves, "grad_norm")
    if points is None:
        return None
    found: list[Span] = []
    most, whole = 0.0, statistics.median(v for _, v in points)  # After a stretch of almost 0, any step would stick out.
    for at in range(LEAST - 1, len(points)):
        usual = max(statistics.median(v for _, v in points[max(0, at - 25) : at]), whole)
        times = points[at][1] / usual if usual > 0 else 0.0
        if times > SPIKE:
            found.append((points[at][0], points[at][0]))
            most = max(most, times)
    return found, f"{len(found)} step{'s' if len(found) > 1 else ''}, up to {most:.0f} times the median before."


PATHOLOGIES: list[tuple[Verdict, Callable[[Curves], Found]]] = [
    (
        Verdict(
            "not-finite",
            "Loss or gradient is not a number",
            "A gap in the curve: NaN or infinity. One skipped step is harmless; several in a row end a run.",
            "Lower learning_rate, try bf16 instead of fp16, look at the rows of these steps.",
            ("loss", "grad_norm"),
        ),
        _not_finite,
    ),
    (
        Verdict(
            "reward-spread",
            "Rewards of a group are all equal",
            "reward_std falls to nothing, frac_reward_zero_std rises towards 1, the gradient with them. At the best reward the "
            "task is solved; at the worst it is out of reach.",
            "Solved: stop, or add harder prompts. Out of reach: easier prompts, partial credit, more generations, a higher "
            "temperature.",
            ("reward_std", "frac_reward_zero_std"),
        ),
        _reward_spread,
    ),
    (
        Verdict(
            "length-creep",
            "Completions grow, the reward does not",
            "The mean length climbs step by step beside a flat reward: words are cheap, or the loss rewards length.",
            "loss_type='dapo' or 'dr_grpo'; get_soft_overlong_punishment; look at rewards/length_corr and read the completions.",
            ("completions/mean_length", "reward"),
        ),
        _length_creep,
    ),
    (
        Verdict(
            "kl-runaway",
            "The policy runs away from its reference",
            "KL climbs faster and faster, past half a nat a token. Rewards still rise: they are being gamed where they were "
            "never meant to hold.",
            "Raise beta, lower learning_rate, return to a checkpoint from before the climb; read its completions.",
            ("kl", "objective/kl"),
        ),
        _kl_runaway,
    ),
    (
        Verdict(
            "both-sinking",
            "Chosen and rejected sink together",
            "rewards/chosen and rewards/rejected both fall below 0 while the margin grows: good answers become unlikely too.",
            "Lower learning_rate or raise beta; add 'sft' to loss_type; train on the "
            "chosen answers first; compare pairs that differ in few tokens.",
            ("rewards/chosen", "rewards/rejected"),
        ),
        _both_sinking,
    ),
    (
        Verdict(
            "clip-share",
            "Much of the batch is clipped",
            "Three tokens of ten or more lie outside the clip range and have no gradient: the policy moves too far between "
            "generations.",
            "Lower learning_rate, num_iterations or steps_per_generation; widen epsilon_high.",
            ("clip_ratio/region_mean", "cispo_clip_ratio", "policy/clipfrac_avg"),
        ),
        _above(
            ("clip_ratio/region_mean", "cispo_clip_ratio", "policy/clipfrac_avg"),
            CLIPPED_TOKENS,
            "up to {most:.0%} of the tokens.",
        ),
    ),
    (
        Verdict(
            "stale-rollouts",
            "Rollouts are stale",
            "Completions come from weights of many updates ago, or the engine's log-probs part from the trainer's: weights that "
            "never arrived look like this.",
            "Lower steps_per_generation, num_iterations or max_staleness; check that pushes of weights succeed; correct with "
            "importance sampling.",
            ("staleness/mean_updates", "sampling/sampling_logp_difference/mean"),
        ),
        _stale,
    ),
    (
        Verdict(
            "entropy",
            "The policy has become certain",
            "Entropy falls below a tenth of its start: completions of a group are copies, and there is no way back.",
            "Raise epsilon_high, entropy_coef or temperature; return to an earlier checkpoint.",
            ("entropy", "objective/entropy", "policy/entropy_avg"),
        ),
        _entropy,
    ),
    (
        Verdict(
            "cut",
            "Completions end at the limit",
            "More than half of the completions are cut: an answer that never comes earns nothing, whatever stands before it.",
            "Raise max_completion_length, ask for shorter answers, check the stop tokens.",
            ("completions/clipped_ratio",),
        ),
        _above(("completions/clipped_ratio",), CUT, "up to {most:.0%} of the completions."),
    ),
    (
        Verdict(
            "spikes",
            "Gradient spikes",
            "Single steps with ten times the usual gradient norm. Clipping bounds them, and they still point somewhere else.",
            "Look at the rows of these steps (very long, broken or mislabelled ones); a longer warm-up; a lower max_grad_norm.",
            ("grad_norm",),
        ),
        _spikes,
    ),
]
