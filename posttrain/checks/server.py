"""Checks of a rollout server: its model, its options, and its log-probs before and after a weight push."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from posttrain.checks.registry import finding
from posttrain.types import Finding

if TYPE_CHECKING:
    pass

# The parity probe compares the log-probs of trainer and engine. These are its number of sequences, their length in tokens, and
# the largest sliding window that it tests.
SEQUENCES, LENGTH, LONGEST = 4, 64, 2048


# Maximum differences of log-probs in nats per token: mean and 99th percentile. The limits are based on measurements with 4 x 63
# random tokens on SmolLM2-135M. Differences were below 1e-3 with float32 on both sides, 0.054 and 0.31 with bfloat16 vs.
# float32, and 0.085 and 0.48 with bfloat16 on both sides. For likely tokens, differences are ten times smaller.
GAPS = {"float32": (0.02, 0.5), "float16": (0.05, 0.5), "bfloat16": (0.15, 1.0)}


GAPS_QUANTISED, FAR_SHARE = (0.3, 2.0), 0.99


# Maximum differences of log-probs (mean and 99th percentile), as multiples of the measured rounding noise. The larger one of
# the limits in GAPS and NOISY is used. In a mixture of experts, rounding can route a token to a different expert. On tiny
# models of six families in bfloat16, the noise was 0.03 to 0.16 nats. After complete pushes, the difference was up to 1.3 times
# (mean) and 14 times (99th percentile) the noise.
NOISY = (2.0, 20.0)


# A weight update counts as lost if more than the fraction MISSED of the expected change of log-probs is missing in the engine.
# The missing part must also be above MOVED nats, and above CONCLUSIVE times the rounding noise of trainer and engine.
CONCLUSIVE, MISSED, MOVED = 3.0, 0.1, 1e-4


COST_SHARE = 0.01  # Maximum fraction of the run time that comparisons of log-probs may take.


def probe_sequences(vocabulary: int, context: int | None, window: int | None = None) -> list[list[int]]:
    """Return the token ids of the parity probe: 4 sequences of up to 64 tokens, which are the same in every run.

    If the model has a sliding window of up to `LONGEST` tokens, the last sequence is 64 tokens longer than the window, as far as
    the context allows. One token of the context is left free, because vLLM generates one token when it scores a prompt.
    """
    generator, context = torch.Generator().manual_seed(0), context and context - 1
    length = min(LENGTH, context or LENGTH)
    sequences = torch.randint(0, vocabulary, (SEQUENCES, length), generator=generator).tolist()
    beyond = 0 if window is None or window > LONGEST else window + LENGTH - length
    more = max(0, min(beyond, context - length if context else beyond))
    sequences[-1] += torch.randint(0, vocabulary, (more,), generator=generator).tolist()
    return sequences


Logps = Sequence[Sequence[float]]  # One list of log-probs per sequence.


def mean_gap(left: Logps, right: Logps) -> float:
    """Return the mean absolute difference between two sets of log-probs of the same tokens."""
    return statistics.fmean(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def check_parity(
    where: str, ours: Logps, theirs: Logps, *, dtype: Any, version: int, computed: Any = "float32",
    first: tuple[Logps, Logps] | None = None, noise: float = 0.0,
) -> Finding | None:  # fmt: skip
    """Compare the log-probs of the same tokens in the trainer and in an engine.

    There are two tests. First, the difference must be within a limit, which depends on the dtypes and on the measured rounding
    noise. Second, log-probs of trainer and engine must have changed equally since the first comparison. The second test detects
    a lost weight update much earlier.

    Args:
        where: Name of the server or worker.
        ours: Log-probs computed by the trainer.
        theirs: Log-probs computed by the engine.
        dtype: Dtype of the engine's weights. None uses the largest limit.
        version: Version of the weights.
        computed: Dtype of the trainer's forward pass. The dtype with less precision decides the limits.
        first: ``(ours, theirs)`` of the first comparison, or None if this is the first.
        noise: Mean difference caused by rounding, if it is known to be larger than that of the first comparison.
    """
    gaps = [abs(a - b) for mine, its in zip(ours, theirs, strict=True) for a, b in zip(mine, its, strict=True)]
    sides = [GAPS.get(str(side).removeprefix("torch."), GAPS_QUANTISED) for side in (dtype, computed)]
    limit, far_limit = (max(a, b * noise) for a, b in zip(max(sides), NOISY, strict=True))
    average = statistics.fmean(gaps)
    far = sorted(gaps)[min(int(FAR_SHARE * len(gaps)), len(gaps) - 1)]
    what = ""
    if not (average <= limit and far <= far_limit):  # The negated comparison is also true if a value is NaN.
        what = f"the mean difference of log-probs over {len(gaps)} tokens is {average:.3g} (limit {limit:.3g}), the "
        what += f"99th percentile is {far:.3g} (limit {far_limit:.3g})"
    elif first is not None:
        noise, moved = max(noise, mean_gap(*first)), mean_gap(ours, first[0])
        change = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(theirs, first[1], strict=True)]
        followed = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(first[0], change, strict=True)]
        missed = mean_gap(ours, followed)
        if missed > max(MISSED * moved, CONCLUSIVE * noise, MOVED):
            what = f"training changed the trainer's log-probs by {moved:.3g} on average, but the engine's differ by "
            what += f"{missed:.3g}"
    if not what:
        return None
    return finding(
        "PT-S004", "error", f"the engine's weights differ from the trainer's after the push of version {version}: {what}.", where,
        "rollouts would come from another policy. Possible causes: weights that are reloaded from disk after sleep mode, weight "
        "names that the engine ignores, an adapter that is not merged, or another trainer that pushes to the same server.",
        "restart the server with the trained model, and use one server per trainer.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """Token sequences, and their log-probs under the trainer's current weights.

    Attributes:
        sequences: Token ids.
        logps: Log-probs of all tokens of each sequence except the first token.
        computed: Dtype of the trainer's forward pass.
        noise: Mean difference between these log-probs and log-probs with other rounding errors, see `rounded_otherwise`.
            The first comparison underestimates it: a new adapter is zero, so merging it does not cause rounding errors.
    """

    sequences: Sequence[Sequence[int]]
    logps: Logps
    computed: str
    noise: float = 0.0


class Parity:
    """Decides when the log-probs of trainer and engines are compared, and stores the first comparison of each engine.

    Args:
        every: Number of weight updates between two comparisons. None: as often as possible within the fraction `COST_SHARE` of
            the run time.
    """

    def __init__(self, every: int | None) -> None:
        self.every, self.first = every, dict[str, tuple[Logps, Logps]]()
        # Whether log-probs were compared after training had changed them.
        self.moved = False
        self.ended: float | None = None
        self._cost, self._pushes = 0.0, 0

    def due(self) -> bool:
        """Return whether log-probs are compared after this weight update. Call this method once per update."""
        self._pushes += 1
        if self.ended is None or not self.moved:
            return True
        if self.every is not None:
            return 0 < self.every <= self._pushes
        return time.monotonic() - self.ended >= self._cost / COST_SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of a comparison."""
        began = time.monotonic()
        yield
        self.ended = time.monotonic()
        self._cost, self._pushes = self.ended - began, 0

    def compare(self, probe: Probe, where: str, theirs: Logps, *, dtype: Any, version: int) -> Finding | None:
        """Compare an engine's log-probs with the trainer's, now and at the engine's first comparison (see `check_parity`)."""
        first = self.first.get(where)
        self.moved = self.moved or (first is not None and mean_gap(probe.logps, first[0]) > 0)
        found = check_parity(
            where, probe.logps, theirs, dtype=dtype, version=version, computed=probe.computed, first=first,
            noise=probe.noise,
        )  # fmt: skip
        if found is None:
            # If the engine has other weights (e.g. before the first push of a resumed run), its log-probs are not a valid first
            # comparison.
            self.first.setdefault(where, (probe.logps, theirs))
        return found


def check_negative_control(where: str, before: Finding | None) -> Finding | None:
    """Return a warning if the server of a resumed run already has the trainer's weights before they are sent, because a
    comparison then cannot show that the update works.
    """
    if before is not None:
        return None
    return finding(
        "PT-S005", "warning", "the server's log-probs equaled the trainer's before the weights of this resumed run were pushed.",
        where, "the server already has these weights, or training hardly changed them. The check does not show that pushes work.",
        "watch the reward and sampling/sampling_logp_difference over the next steps.",
    )  # fmt: skip
