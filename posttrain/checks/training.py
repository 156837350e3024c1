"""What a run assumes of precision, special tokens, devices and batches: plain numbers in, findings out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from posttrain.checks.registry import Context, finding, probe, register
from posttrain.types import Finding

__all__ = [
    "History",
    "check_dense_masks",
    "check_devices",
    "check_first_gradients",
    "check_idle_memory",
    "check_lag",
    "check_padding",
    "check_positions",
    "check_precision",
    "check_special_tokens",
    "check_trained_tokens",
    "columns",
    "ends",
    "nothing_trained",
    "training_rows",
    "window",
]


# Weights of transformers are about this large: the usual standard deviation of their initialisation.
TYPICAL_WEIGHT = 0.02
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
LARGE_MODEL = 1_000_000_000  # Parameters from which a second copy of the weights in float32 is worth a thought.
EMPTY_STEPS = 3
PADDING_MOST = 0.4
ECONOMY_STEPS = 10  # Steps after which time and memory that are wasted can be told.
MEMORY_LEAST = 0.5
LONG_ROW = 4096  # Tokens from which a dense T x T mask costs more than it is worth.


def smallest_update(dtype: str, weight: float = TYPICAL_WEIGHT) -> float:
    """The least change that a weight stored in 16 bits can show: half the gap to its neighbour.

    >>> round(smallest_update("bfloat16"), 6)
    6.1e-05
    """
    return math.ldexp(0.5, math.frexp(weight)[1] - 1 - MANTISSA_BITS[dtype])


def check_precision(
    trainable: Mapping[str, int], *, learning_rate: float, autocast: str | None = None, master_copy: bool = False
) -> Finding | None:
    """Trained weights in 16 bits that a small learning rate cannot move, or float32 ones that 16 bits would do for.

    Args:
        trainable: Parameters that are trained, counted by dtype (``{"bfloat16": 134_000_000}``).
        learning_rate: Peak of the schedule; about the size of one step of Adam.
        autocast: Dtype of the computation where it differs from that of the weights.
        master_copy: Whether the optimiser keeps float32 weights of its own.
    """
    half = {dtype: count for dtype, count in trainable.items() if dtype in MANTISSA_BITS and count}
    if half and not master_copy:
        dtype = max(half, key=lambda name: smallest_update(name))
        least = smallest_update(dtype)
        if learning_rate < least:
            return Finding(
                "PT-C001",
                "warning",
                f"{sum(half.values())} trained parameters are stored in {dtype}, and learning_rate={learning_rate:g}.",
                "the model's parameters",
                f"a step of Adam is about as large as the learning rate, and a {dtype} weight of {TYPICAL_WEIGHT} cannot move by "
                f"less than {least:.1g}: most updates are rounded away while the loss looks alive.",
                "load the model with dtype='float32' and set bf16=True (the computation stays fast), train an adapter, or use "
                "an optimiser that keeps float32 weights.",
            )
    if autocast in MANTISSA_BITS and trainable.get("float32", 0) > LARGE_MODEL:
        return Finding(
            "PT-C002",
            "info",
            f"{trainable['float32']} trained parameters are stored in float32 and computed in {autocast}.",
            "the model's parameters",
            "that is exact, and costs 16 bytes a parameter with Adam.",
            "nothing, if it fits; else train an adapter on a 16-bit model, or shard the optimiser.",
        )
    return None


def check_special_tokens(
    *,
    pad: int | None,
    eos: int | None,
    generation_pad: int | None = None,
    generation_eos: int | Collection[int] | None = None,
    turn_end: int | None = None,
) -> list[Finding]:
    """Pad, eos and what the generation config says of them: a model must stop where training ended, and only there.

    Args:
        pad: Of the tokenizer.
        eos: Of the tokenizer.
        generation_pad: Of the model's generation config.
        generation_eos: Of the model's generation config: one id, several, or None.
        turn_end: The token that the chat template ends a turn with.
    """
    stops = {generation_eos} if isinstance(generation_eos, int) else set(generation_eos or ())
    found = []
    if generation_pad is not None and generation_pad in stops:
        found.append(
            Finding(
                "PT-K101",
                "warning",
                f"the generation config pads with token {generation_pad}, which is also one that ends a text ({sorted(stops)}).",
                "generation_config",
                "programs that tell padding by its id take the end of a text for padding: they cut it off, or never see it and "
                "generate on. Training here is not affected: masks are positional.",
                "set tokenizer.pad_token to a token that nothing else uses before the model is saved.",
            )
        )
    if pad is None:
        found.append(
            Finding(
                "PT-K102",
                "warning",
                "the tokenizer has no pad token.",
                "the tokenizer",
                "batches of different lengths cannot be made by programs that load this model.",
                "set tokenizer.pad_token to a token that nothing else uses.",
            )
        )
    missing = (
        {name: token for name, token in (("eos", eos), ("end of turn", turn_end)) if token is not None} if stops else {}
    )
    missing = {name: token for name, token in missing.items() if token not in stops}
    if missing:
        named = ", ".join(f"{name} {token}" for name, token in missing.items())
        found.append(
            Finding(
                "PT-K103",
                "warning",
                f"training ends texts with {named}, and the generation config stops at {sorted(stops)} only.",
                "generation_config.eos_token_id",
                "the model learns to end with a token at which generation does not stop, so it runs on to the length limit.",
                f"set model.generation_config.eos_token_id = {sorted(stops | set(missing.values()))}.",
            )
        )
    return found


def check_devices(*, visible: int, processes: int = 1, placed: Collection[str] = ()) -> Finding | None:
    """Several GPUs and one process: replicas that would be wrong, or layers that wait for each other.

    Args:
        visible: GPUs that this process sees.
        processes: Processes of the run.
        placed: Devices that ``device_map`` put layers of the model on.
    """
    launch = f"accelerate launch --num_processes {visible} your_script.py"
    devices = sorted({str(device) for device in placed})
    if len(devices) > 1:
        return Finding(
            "PT-C003",
            "warning",
            f"the model's layers lie on {len(devices)} devices ({', '.join(devices)}).",
            "device_map",
            "layers on different devices run one after the other: one device works, the others wait.",
            f"leave device_map out and start one process a GPU: {launch}. Keep it only where the model fits no other way.",
        )
    if visible > 1 and processes == 1:
        return Finding(
            "PT-C004",
            "error",
            f"{visible} GPUs are visible to one process.",
            "this process",
            "torch.nn.DataParallel would copy the model for each and call the forward of the original: the gradient is wrong.",
            f"start one process a GPU: {launch}; or show this one a single GPU with CUDA_VISIBLE_DEVICES=0.",
        )
    return None


def check_first_gradients(norms: Mapping[str, float | None]) -> Finding | None:
    """Trained parameters after the first backward pass: at least one must have a gradient, and each a finite one.

    Args:
        norms: Norm of the gradient of each parameter that requires one; None where there is no gradient.
    """
    if not norms:
        return Finding(
            "PT-B001",
            "error",
            "no parameter of the model requires a gradient.",
            "the model",
            "the run would cost time and change nothing.",
            "check what froze it: a reference that shares all layers, a loaded adapter without is_trainable=True, or "
            "target_modules that match nothing.",
        )
    odd = sorted(name for name, norm in norms.items() if norm is not None and not math.isfinite(norm))
    if odd:
        return Finding(
            "PT-B002",
            "error",
            f"{len(odd)} of {len(norms)} gradients are not finite, {odd[0]!r} among them.",
            "the first step",
            "one such step makes every weight not a number.",
            "look for rows without a trained token, lower learning_rate, or compute in float32 (bf16=False, fp16=False).",
        )
    if not any(norms.values()):
        return Finding(
            "PT-B003",
            "error",
            f"none of the {len(norms)} trained parameters got a gradient.",
            "the first step",
            "frozen embeddings cut the graph before the first checkpointed layer, or no token of the batch is trained: the loss "
            "stays flat.",
            "call model.enable_input_require_grads() or set gradient_checkpointing=False; check the labels of the first rows.",
        )
    return None


def check_trained_tokens(trained: Sequence[int], *, limit: int = EMPTY_STEPS) -> Finding | None:
    """Optimiser steps in a row without one trained token.

    Args:
        trained: Tokens (or sequences) that carried loss, of the latest steps, the newest last.
        limit: Steps in a row that are too many.
    """
    empty = next((index for index, count in enumerate(reversed(trained)) if count), len(trained))
    if empty < limit:
        return None
    return Finding(
        "PT-T001",
        "error",
        f"{empty} steps in a row held no trained token.",
        "the latest steps",
        "their loss is 0 and nothing is learnt, while the log looks as if the run had converged.",
        "raise max_length, or check completion_mask, assistant_masks and labels: posttrain inspect shows them.",
    )


def check_padding(real: int, computed: int) -> Finding | None:
    """A batch that is mostly padding.

    Args:
        real: Tokens of sequences.
        computed: Tokens that went through the model, padding included.
    """
    share = 1 - real / computed if computed else 0.0
    if share <= PADDING_MOST:
        return None
    return Finding(
        "PT-T002",
        "warning",
        f"{100 * share:.0f} % of the tokens that were computed are padding.",
        "the latest steps",
        "that part of the time is spent on nothing.",
        "set packing=True (or use an attention backend that takes packed rows), or group_by_length=True.",
    )


def check_positions(longest: int, known: int | None, *, rotary: bool) -> Finding | None:
    """A sequence longer than the model has seen, or than it has position embeddings for.

    Args:
        longest: Tokens of the longest sequence of a step.
        known: Positions of the model (``max_position_embeddings``); None where it has no such number.
        rotary: Whether positions are computed, so that later ones exist, untrained; else they are rows of a table.
    """
    if known is None or longest <= known:
        return None
    return Finding(
        "PT-T003",
        "warning" if rotary else "error",
        f"a sequence has {longest} tokens, and the model knows {known} positions (max_position_embeddings).",
        "the latest step",
        "the model never saw positions beyond that, so what stands there is read badly and teaches little; time and memory "
        "grow with the length."
        if rotary
        else "there is no embedding for later positions: the forward pass would fail.",
        f"set max_length={known} or less, or split long rows.",
    )


def check_idle_memory(*, peak: int, total: int, checkpointing: bool, steps: int) -> Finding | None:
    """Activations that are computed twice although there is room to keep them.

    Args:
        peak: Most bytes of the device that were in use.
        total: Bytes of the device.
        checkpointing: Whether activations are computed again in backward.
        steps: Optimiser steps that ``peak`` is about.
    """
    if not checkpointing or steps < ECONOMY_STEPS or not total or peak >= MEMORY_LEAST * total:
        return None
    return Finding(
        "PT-T004",
        "warning",
        f"{steps} steps needed at most {100 * peak / total:.0f} % of the device's memory, with gradient checkpointing on.",
        "the device",
        "checkpointing computes every layer's forward pass twice: a fifth to a third of the time.",
        "set gradient_checkpointing=False, or a larger per_device_train_batch_size.",
    )


def check_dense_masks(
    implementation: str, *, packed: bool, row_tokens: int, installed: Collection[str] = ()
) -> Finding | None:
    """Packed rows whose attention builds a T x T mask: right, and slow where rows are long.

    Args:
        implementation: Attention backend of the model.
        packed: Whether a row holds several documents.
        row_tokens: Tokens of a row.
        installed: Backends without dense masks that this machine has.
    """
    if not packed or implementation not in ("sdpa", "eager") or row_tokens < LONG_ROW:
        return None
    choice = (
        f"attn_implementation={sorted(installed)[0]!r}"
        if installed
        else "attn_implementation='flex_attention' on a GPU"
    )
    return Finding(
        "PT-C005",
        "warning",
        f"rows of {row_tokens} tokens hold several documents, and attn_implementation={implementation!r} keeps them apart with "
        "a mask of that size squared.",
        "the attention backend",
        "documents are isolated, but time and memory grow with the square of the row.",
        f"load the model with {choice}, or lower max_row_tokens.",
    )


@probe("data", "PT-B001")
def nothing_trained(context: Context) -> list[Finding | None]:
    """A model none of whose parameters requires a gradient."""
    parameters = getattr(context.model, "parameters", None)
    if parameters is None or any(parameter.requires_grad for parameter in parameters()):
        return []
    return [check_first_gradients({})]


History = Sequence[Mapping[str, float]]


def training_rows(history: History) -> list[Mapping[str, float]]:
    """The rows that training logged, without those of evaluations and the summary at the end."""
    return [row for row in history if "loss" in row and "step" in row]


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
    rows = training_rows(history)
    keys = [key for key in (rows[-1] if rows else {}) if key.startswith("rewards/") and key.endswith(f"/{ending}")]
    return [key.removeprefix("rewards/").removesuffix(f"/{ending}") for key in keys]


register("PT-R024", "policy-mismatch", moment="log_step", title="the policy moves away from what samples", page="c")
register("PT-R025", "rollouts-discarded", moment="log_step", title="many rollouts are thrown away as too old", page="c")
register(
    "PT-R026", "rollouts-at-the-bound", moment="log_step", title="most rollouts are as old as they may be", page="c"
)

WINDOW, RISING = 10, 50  # Optimiser steps.
APART, GROWTH, FAR = 0.1, 1.5, 0.5  # Nats a token: where a rise counts, by how much, and where the size alone does.
DISCARDED, BOUND = 0.3, 0.8


def check_lag(history: History) -> Iterator[Finding]:
    """Staleness of rollouts, and what it costs, over the latest steps of a log."""
    yield from _mismatch(history)
    yield from _discarded(history)
    share = window(history, "async/at_staleness_bound", WINDOW)
    if share is not None and statistics.fmean(share) > BOUND:
        yield finding(
            "PT-R026",
            "warning",
            f"{100 * statistics.fmean(share):.0f} % of the rollouts of the last {WINDOW} steps are as old as "
            "max_staleness_hard allows.",
            "async/at_staleness_bound",
            "every step trains on what old weights wrote: more bias for no more speed, and the next delay discards them.",
            "lower max_inflight_tasks, set staleness_policy='pace', or give generation more devices.",
        )


def _mismatch(history: History) -> Iterator[Finding]:
    rows = training_rows(history)
    name = "sampling/kl" if rows and "sampling/kl" in rows[-1] else "kl"
    if name == "kl" and not (rows and "async/staleness_mean" in rows[-1]):
        return  # That is the distance to the reference.
    recent, trend = window(history, name, WINDOW), window(history, name, RISING)
    if recent is None:
        return
    now = statistics.fmean(recent)
    first, last = ends(trend) if trend is not None and len(trend) >= 5 else (now, now)
    rising = last > APART and last > GROWTH * first
    if now <= FAR and not rising:
        return
    trail = f", rising for {RISING} steps (from {first:.2g})" if rising else f" over {WINDOW} steps"
    yield finding(
        "PT-R024",
        "warning",
        f"policy mismatch KL {now:.2g} nats a token{trail}.",
        name,
        "mean(rho - 1 - log rho) of policy to sampler: what is trained was written by another policy, and importance weights "
        "throw more and more of it away.",
        "lower learning_rate, max_staleness, num_iterations or steps_per_generation; push weights more often; check that the "
        "engine really samples from the weights that were pushed, at this temperature.",
    )


def _discarded(history: History) -> Iterator[Finding]:
    dropped, made = (window(history, f"async/{what}", WINDOW) for what in ("stale_dropped", "produced"))
    if dropped is None or made is None or len(dropped) < 2:
        return
    old, new = dropped[-1] - dropped[0], made[-1] - made[0]  # Both count from the start of the run.
    if new <= 0 or old <= DISCARDED * new:
        return
    yield finding(
        "PT-R025",
        "warning",
        f"{100 * old / new:.0f} % of the rollouts of the last {WINDOW} steps ({old:.0f} of {new:.0f}) were discarded as too old.",
        "async/stale_dropped",
        "generation outpaces training: that part of its time is spent on nothing.",
        "lower max_inflight_tasks, raise max_staleness, or raise weight_sync_steps so that versions pass more slowly.",
    )
