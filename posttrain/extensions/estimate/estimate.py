"""`posttrain estimate sft --config x.yaml`: estimate memory by component, the largest batch, and changes that reduce memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.cli.commands import TRAINING
from posttrain.cli.subject import Subject, model_config
from posttrain.cli.train import launched
from posttrain.errors import DataError, PosttrainError

if TYPE_CHECKING:
    from posttrain.checks.memory import Lengths
    from posttrain.models.memory_estimate import Workload


# Exit code EX_CONFIG of sysexits.h. A run that fails a check before training has the same exit code.
DOES_NOT_FIT = 78
# Maximum batch size that is tried, as a multiple of the configured batch size.
MOST_TIMES = 16
# Number of examples that are tokenized. The examples with the largest number of characters are used.
EXAMPLES = 48


def run(argv: list[str]) -> int:
    """Run `posttrain estimate` with the command-line arguments ``argv``.

    Returns:
        0 if the run fits into memory, else 78.
    """
    parser = argparse.ArgumentParser(
        prog="posttrain estimate",
        usage="posttrain estimate TRAINER --config FILE.yaml [--json] [options of TRAINER]",
        description="Estimate the memory of a run from its config: by component at the longest lengths, the largest batch "
        "that fits, and changes that reduce memory. Weights are not read, and no files are written. "
        f"The exit code is 0 if the run fits, and {DOES_NOT_FIT} if it does not.",
        allow_abbrev=False,
    )
    parser.add_argument("trainer", metavar="TRAINER", help="a training command: " + ", ".join(sorted(TRAINING)))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--prompt_tokens", type=_length, metavar="N", help="length of the longest prompt in tokens; data is not read"
    )
    parser.add_argument("--completion_tokens", type=_length, metavar="N", help="length of the longest completion")
    options, rest = parser.parse_known_args(argv)
    plan = estimate(Subject(options.trainer, rest), given=(options.prompt_tokens, options.completion_tokens))
    sys.stdout.write(json.dumps(plan, indent=1) + "\n" if options.json else screen(plan))
    return 0 if plan["fits"] else DOES_NOT_FIT


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of tokens")
    return int(text)


def estimate(subject: Subject, *, given: tuple[int | None, int | None] = (None, None)) -> dict[str, Any]:
    """Estimate the memory of a run. Return a dict for JSON, with sizes in bytes.

    ``batch_sizes`` contains the peak memory for each per-device batch size that keeps the effective batch size.
    ``larger_batch`` is the maximum batch size per process without accumulation that fits. It is None if every size fits.
    ``would_help`` contains the peak memory after a change of one setting, for several changes.

    Args:
        subject: Training command with its arguments.
        given: Number of tokens of the longest prompt and of the longest completion. None: computed from the dataset.

    Raises:
        ConfigError: The arguments contain no model.
        ModelError: The model does not exist, or its memory cannot be estimated.
    """
    import torch

    from posttrain.checks.machine import memory_limit
    from posttrain.checks.memory import PLANNED_SHARE, batch_sizes, plan
    from posttrain.models.load import get_peft_config
    from posttrain.models.memory import available_memory, in_use
    from posttrain.models.memory_estimate import estimate_memory

    args, model_args, config = subject.config, subject.model_args, subject.model_config
    processes, stage = launched(subject.launch) if subject.launch else (1, 0)
    notes = [f"this is one of {processes} processes."] if processes > 1 else []
    lengths, pixels = _lengths(subject, given, notes)
    device = "cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu"
    settings = {
        "lengths": lengths, "peft_config": get_peft_config(model_args), "parts": _parts(subject, notes),
        "device": device, "process": in_use("cpu") if device == "cpu" else 0, "pixels": pixels,
        "processes": max(processes, int(args.world_size)), "zero_stage": stage,
    }  # fmt: skip
    work = plan(subject.method, config, **settings)
    memory = estimate_memory(work)
    available = available_memory(device, memory_limit(args))
    size, accumulation = int(args.per_device_train_batch_size), int(args.gradient_accumulation_steps)
    # Estimate the peak memory of every batch size that keeps the effective batch size. Sizes with the same largest forward
    # pass share one estimate.
    cached, peaks, limit = {_largest(work): memory.peak}, {}, int(PLANNED_SHARE * available.free)
    for other in batch_sizes(size, accumulation):
        changed = plan(subject.method, config, batch_size=other, **settings)
        key = _largest(changed)
        cached[key] = cached[key] if key in cached else estimate_memory(changed).peak
        peaks[other] = cached[key]
    fits, changes, whole = memory.peak <= limit, {}, size * accumulation
    larger, bound = 0, False
    if peaks[whole] <= limit:

        def make(rows: int) -> Workload:
            changed = plan(subject.method, config, batch_size=rows, **settings)
            calls = changed.generating
            # The number of generated sequences is proportional to the batch size.
            if calls is not None:
                grown = {name: getattr(calls, name) * rows // whole for name in ("prompts", "sequences")}
                calls = replace(calls, **grown)
            return replace(changed, passes=len(changed.batches), generating=calls)

        step = int(args.num_generations) if subject.method.traits.samples else 1
        larger, bound = _larger(whole, peaks[whole], limit, step, make)
    if not fits:
        changes = {change: estimate_memory(changed).peak for change, changed in _changes(work).items()}
    return {
        "trainer": subject.name, "model": subject.source, "fits": fits, "peak": memory.peak,
        "available": available.free, "total": available.total, "limit": limit, "device": available.where,
        "components": memory.components, "standing": sum(memory.standing.values()), "fullest": memory.fullest,
        "moments": {name: dict(parts) for name, parts in memory.moments.items()},
        "parameters": memory.parameters, "trainable": memory.trainable, "lengths": vars(lengths),
        "batch_size": size, "accumulation": accumulation,
        "largest_pass": max(batch.input_ids.numel() for batch in work.batches),
        "largest_batch_size": max((n for n, peak in peaks.items() if peak <= limit), default=0), "batch_sizes": peaks,
        "larger_batch": larger, "larger_batch_is_bound": bound,
        "would_help": {c: p for c, p in sorted(changes.items(), key=lambda item: item[1]) if p < memory.peak},
        "notes": notes,
    }  # fmt: skip


def _larger(whole: int, peak: int, limit: int, step: int, make: Callable[[int], Workload]) -> tuple[int | None, bool]:
    """Return the maximum batch size of one process without accumulation that fits. Also return whether larger sizes,
    which were not tried, may fit too.

    The maximum is None if every batch size fits, because the size of forward passes does not grow with the batch.

    Args:
        whole: Batch size that fits.
        peak: Peak memory with batch size ``whole``, in bytes.
        limit: Maximum memory in bytes.
        step: Only multiples of this number are tried as batch sizes.
        make: Function that maps a batch size to the workload with this batch size.
    """
    from posttrain.models.memory_estimate import estimate_memory

    most = MOST_TIMES * whole
    low, high = (whole, peak), (most, estimate_memory(make(most)).peak)
    if high[1] <= limit:
        works = [make(most), make(2 * most)]
        grows = _largest(works[0]) != _largest(works[1]) or works[0].generating != works[1].generating
        return (most, True) if grows else (None, False)
    # Two steps of the secant method are enough, because the peak grows almost linearly with the batch size.
    for _ in range(2):
        size = int(low[0] + (limit - low[1]) / (high[1] - low[1]) * (high[0] - low[0])) // step * step
        if low[0] < size < high[0]:
            tried = size, estimate_memory(make(size)).peak
            low, high = (tried, high) if tried[1] <= limit else (low, tried)
    return low[0], False


def _largest(work: Workload) -> tuple[int, int, bool]:
    sizes = max((batch.input_ids.numel(), batch.num_loss_tokens) for batch in work.batches)
    return (*sizes, work.passes > 1)


def _parts(subject: Subject, notes: list[str]) -> dict[str, Any]:
    """Return the configs of further models in memory, such as the teacher or the reward model."""
    configs, args, script_args = {}, subject.config, subject.script_args
    names = {part: getattr(script_args, f"{part}_name_or_path", None) for part in ("reward_model", "value_model")}
    teacher = None if args.teacher_model_server_url else args.teacher_model_name_or_path
    names |= {f"teacher {k}": v for k, v in teacher.items()} if isinstance(teacher, dict) else {"teacher": teacher}
    for part, name in names.items():
        try:
            configs |= {part: model_config(name, args.trust_remote_code)} if name else {}
        except (PosttrainError, OSError, ValueError) as error:
            notes.append(f"{part}={name!r} cannot be read, so its memory is not included ({_short(error)}).")
    return configs


def _lengths(subject: Subject, given: tuple[int | None, int | None], notes: list[str]) -> tuple[Lengths, Any]:
    """Return the maximum lengths, from the arguments, the dataset or the config. Also return a function that prepares the
    images of the row with the largest number of image tokens. See `posttrain.checks.memory.plan`.
    """
    from posttrain.checks.memory import Lengths, assumed_lengths, longest_of

    prompt, completion = given
    assumed = assumed_lengths(subject.method.traits, subject.config)
    if prompt is not None or completion is not None:
        return Lengths(assumed.prompt if prompt is None else prompt, completion or assumed.completion, "given"), None
    try:
        rows, vision = _longest_rows(subject)
    except (PosttrainError, OSError, ValueError, KeyError) as error:
        notes.append(
            f"the data was not read ({_short(error)}). Fix: pass the lengths with --prompt_tokens and --completion_tokens."
        )
        return assumed, None
    if vision:
        from posttrain.extensions.images.vision import largest_pictures

        if sizes := ", ".join(f"{picture.size[0]}x{picture.size[1]}" for picture in largest_pictures(rows)):
            notes.append(
                f"images of the row with the most image tokens: {sizes}; freeze_vision={subject.config.freeze_vision}."
            )
    return longest_of(rows, subject.method.traits, subject.config), vision and vision.pixels(rows)


def _longest_rows(subject: Subject) -> tuple[list[Any], Any]:
    """Tokenize the longest examples of the training set. Return their rows, and the object for images (None without images)."""
    import datasets

    from posttrain.data.formats import undecoded
    from posttrain.data.samplers import longest_examples

    if subject.data is None:
        raise DataError("the environment produces prompts during training")
    dataset = undecoded(subject.data)
    longest = longest_examples(dataset, EXAMPLES, subject.method.traits.id_columns)
    examples = datasets.Dataset.from_list(longest, features=dataset.features)
    drawn, _, _ = subject.drawn(examples, EXAMPLES)
    prepared, vision = subject.rows_of(drawn)
    return prepared.rows, vision


def _changes(work: Workload) -> dict[str, Workload]:
    """Return variants of a workload by the change that they make. Each variant changes one setting to reduce memory."""
    import peft

    own = tuple(part for part in work.frozen if part.role != "reference")
    changes = {}
    if not work.checkpointing:
        changes["gradient_checkpointing: true"] = replace(work, checkpointing=True)
    elif work.kept_layers != 0:
        changes["kept_layers: 0"] = replace(work, kept_layers=0)
    if work.policy.peft_config is None:
        lora = peft.LoraConfig(r=16, task_type="CAUSAL_LM" if work.policy.kind == "causal" else "SEQ_CLS")
        policy, reference = replace(work.policy, peft_config=lora), work.reference and "adapter"
        adapter = replace(work, policy=policy, frozen=own, reference=reference)
        changes["use_peft: true (a LoRA adapter of rank 16)"] = adapter
        if "adafactor" not in work.optimizer:
            changes["optim: adafactor"] = replace(work, optimizer="adafactor")
    if work.reference == "copy":
        change = "precompute_ref_log_probs: true" if work.generating is None else "beta: 0 (no reference)"
        changes[change] = replace(work, frozen=own, reference="")
    return changes


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")[:160]


def screen(plan: dict[str, Any]) -> str:
    """Format the result of `estimate` as lines for a terminal."""
    from posttrain.values import gib

    peak, lengths, limit, tokens = (plan[name] for name in ("peak", "lengths", "limit", "largest_pass"))
    sizes = sorted(plan["components"].items(), key=lambda item: -item[1])
    others = {n: plan["standing"] + sum(parts.values()) for n, parts in plan["moments"].items() if n != plan["fullest"]}
    lines = [
        f"{plan['trainer']} on {plan['model']}: {plan['parameters'] / 1e6:.0f} M weights, {plan['trainable'] / 1e6:.1f} M "
        "trained",
        f"longest: prompt {lengths['prompt']}, completion {lengths['completion']} tokens ({lengths['source']})",
        f"batch: {plan['batch_size']} x {plan['accumulation']} accumulated; the largest forward pass has {tokens} tokens",
        f"\nmemory at the peak ({plan['fullest']})",
        *[f"  {name:22}{gib(size):>10}  {'#' * max(1, round(34 * size / peak))}" for name, size in sizes],
        f"  {'total':22}{gib(peak):>10}  {'fits' if plan['fits'] else 'does not fit'}: {gib(plan['available'])} available "
        f"on {plan['device']}, {gib(limit)} planned for use\n",
        *[f"  {name + ':':24}{gib(size):>8}" for name, size in others.items()],
    ]
    best, whole = plan["largest_batch_size"], plan["batch_size"] * plan["accumulation"]
    larger, now = plan["larger_batch"], f"now {plan['batch_size']} x {plan['accumulation']}"
    if not best:
        lines.append("\nno batch size that keeps the effective batch size fits")
    elif larger is None:
        lines.append(f"\nlargest batch that fits: any, because passes are limited by tokens, not by rows ({now})")
    elif larger > whole:
        bound = "at least " if plan["larger_batch_is_bound"] else ""
        lines.append(f"\nlargest batch that fits: {bound}{larger} ({now})")
    else:
        lines.append(f"\nlargest batch that fits: {best} x {whole // best} accumulated, effective batch size {whole}")
    if not plan["fits"]:
        lines += ["\nto fit:"]
        lines += [f"  {c:44}{gib(p):>10}{'  fits' if p <= limit else ''}" for c, p in plan["would_help"].items()]
        lines += [f"  max_row_tokens below {tokens}, shorter rows, or more processes with FSDP or ZeRO"]
    return "\n".join([*lines, *[f"note: {note}" for note in plan["notes"]]]) + "\n"
