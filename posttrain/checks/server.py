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

# The parity probe compares the log-probs of the trainer with those of the engine. The constants are the number of token
# sequences, the length of a sequence, and the size of the largest sliding window that the probe tests.
SEQUENCES, LENGTH, LONGEST = 4, 64, 2048


# Maximum differences of log-probs in nats per token, as (mean, 99th percentile) for each dtype. The limits are based on
# measurements with 4 x 63 random tokens on SmolLM2-135M. With float32 in trainer and engine, differences were below 1e-3.
# Mean and percentile were 0.054 and 0.31 with bfloat16 and float32, and 0.085 and 0.48 with only bfloat16. For likely
# tokens, differences are ten times smaller.
GAPS = {"float32": (0.02, 0.5), "float16": (0.05, 0.5), "bfloat16": (0.15, 1.0)}


GAPS_QUANTISED, FAR_SHARE = (0.3, 2.0), 0.99


# Maximum differences of log-probs (mean and 99th percentile), as multiples of the measured rounding noise. The check uses
# the larger limit of GAPS and NOISY. In a mixture of experts, rounding can route a token to a different expert. On tiny
# models of six families in bfloat16, the noise was 0.03 to 0.16 nats. After complete pushes, the mean difference was up to
# 1.3 times the noise, and the 99th percentile was up to 14 times the noise.
NOISY = (2.0, 20.0)


# Criteria for a lost weight update. The update is lost if the engine's log-probs lack more than the fraction MISSED of the
# expected change. The missing change must also be above MOVED nats, and above CONCLUSIVE times the rounding noise of trainer
# and engine.
CONCLUSIVE, MISSED, MOVED = 3.0, 0.1, 1e-4


COST_SHARE = 0.01  # Maximum fraction of the run time that comparisons of log-probs may take.


def probe_sequences(vocabulary: int, context: int | None, window: int | None = None) -> list[list[int]]:
    """Return the token ids of the parity probe: 4 sequences of up to 64 tokens. The sequences are the same in every run.

    If the model has a sliding window of up to `LONGEST` tokens, the last sequence is 64 tokens longer than the window, if
    the context is large enough. One token of the context stays unused, because vLLM generates one token when it scores a
    prompt.
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

    There are two tests. First, the difference must be below a limit. The limit depends on the dtypes and on the measured
    rounding noise. Second, log-probs of trainer and engine must have changed equally since the first comparison. The second
    test detects lost weight updates much earlier.

    Args:
        where: Name of the server or worker.
        ours: Log-probs computed by the trainer.
        theirs: Log-probs computed by the engine.
        dtype: Dtype of the engine's weights. If the dtype is None, the largest limit applies.
        version: Version of the weights.
        computed: Dtype of the trainer's forward pass. The less precise of the two dtypes determines the limits.
        first: ``(ours, theirs)`` of the first comparison. None means that this is the first comparison.
        noise: Mean difference that rounding causes. It matters only if it is larger than the difference in the first
            comparison.
    """
    gaps = [abs(a - b) for mine, its in zip(ours, theirs, strict=True) for a, b in zip(mine, its, strict=True)]
    sides = [GAPS.get(str(side).removeprefix("torch."), GAPS_QUANTISED) for side in (dtype, computed)]
    limit, far_limit = (max(a, b * noise) for a, b in zip(max(sides), NOISY, strict=True))
    average = statistics.fmean(gaps)
    far = sorted(gaps)[min(int(FAR_SHARE * len(gaps)), len(gaps) - 1)]
    what = ""
    if not (average <= limit and far <= far_limit):  # This form also detects NaN.
        what = f"the mean difference of log-probs over {len(gaps)} tokens is {average:.3g} (limit {limit:.3g}), the "
        what += f"99th percentile is {far:.3g} (limit {far_limit:.3g})"
    elif first is not None:
        noise, moved = max(noise, mean_gap(*first)), mean_gap(ours, first[0])
        change = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(theirs, first[1], strict=True)]
        followed = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(first[0], change, strict=True)]
        missed = mean_gap(ours, followed)
        if missed > max(MISSED * moved, CONCLUSIVE * noise, MOVED):
            what = f"training changed the trainer's log-probs by {moved:.3g} on average, but the engine's log-probs differ by "
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
        logps: Log-probs of the tokens of each sequence, without the first token.
        computed: Dtype of the trainer's forward pass.
        noise: Mean difference between these log-probs and log-probs with other rounding errors, see `rounded_otherwise`. The
            first comparison underestimates the noise: a new adapter is zero, so merging it does not cause rounding errors.
    """

    sequences: Sequence[Sequence[int]]
    logps: Logps
    computed: str
    noise: float = 0.0


class Parity:
    """Decides when the log-probs of trainer and engines are compared, and stores the first comparison of each engine.

    Args:
        every: Number of weight updates between two comparisons. None: comparisons are as frequent as the fraction
            `COST_SHARE` of the run time allows.
    """

    def __init__(self, every: int | None) -> None:
        self.every, self.first = every, dict[str, tuple[Logps, Logps]]()
        # Whether log-probs have been compared after training changed them.
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
        """Compare an engine's log-probs with the trainer's log-probs. In addition, compare how both have changed since the
        engine's first comparison.
        """
        first = self.first.get(where)
        self.moved = self.moved or (first is not None and mean_gap(probe.logps, first[0]) > 0)
        finding = check_parity(
            where, probe.logps, theirs, dtype=dtype, version=version, computed=probe.computed, first=first,
            noise=probe.noise,
        )  # fmt: skip
        if finding is None:
            # If the engine has other weights, e.g. before the first push of a resumed run, its log-probs are not a valid
            # first comparison.
            self.first.setdefault(where, (probe.logps, theirs))
        return finding


def check_negative_control(where: str, before: Finding | None) -> Finding | None:
    """Return a warning if the server of a resumed run has the trainer's weights before the first push. The comparison then
    does not prove that a push works.
    """
    if before is not None:
        return None
    return finding(
        "PT-S005", "warning", "the server's log-probs equaled the trainer's before the weights of this resumed run were pushed.",
        where, "the server already has these weights, or training hardly changed them. The check does not show that pushes work.",
        "watch the reward and sampling/sampling_logp_difference over the next steps.",
    )  # fmt: skip
