"""`posttrain estimate sft --config x.yaml`: memory by component, time of a step, the batch that fits, what would help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from posttrain.cli import inspect, train
from posttrain.errors import ConfigError, PosttrainError, check_choice

if TYPE_CHECKING:
    from posttrain.checks.memory_plan import Lengths
    from posttrain.models.device_memory import Available
    from posttrain.models.memory_estimate import MemoryEstimate, Workload
    from posttrain.models.step_time import StepTime

__all__ = ["DOES_NOT_FIT", "Answer", "answer", "run"]

DOES_NOT_FIT = 78  # EX_CONFIG of sysexits.h, as a refused preflight.
LONGEST = 48  # Examples that are tokenised.
WIDTH = 34


@dataclass
class Answer:
    """All that the command says."""

    trainer: str
    model: str
    lengths: Lengths
    memory: MemoryEstimate
    available: Available
    batch: int
    accumulation: int
    row_tokens: int
    batches: dict[int, int] = field(default_factory=dict)
    time: StepTime | None = None
    help: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Bytes that are planned with."""
        from posttrain.checks.memory import MOST

        return int(MOST * self.available.free)

    @property
    def fits(self) -> bool:
        """Whether the longest step stays within the limit."""
        return self.memory.peak <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, times in seconds."""
        fitting = [size for size, peak in self.batches.items() if peak <= self.limit]
        return {
            "trainer": self.trainer, "model": self.model, "fits": self.fits, "peak": self.memory.peak,
            "available": self.available.free, "total": self.available.total, "limit": self.limit,
            "device": self.available.where, "components": self.memory.components, "fullest": self.memory.fullest,
            "moments": {name: dict(parts) for name, parts in self.memory.moments.items()},
            "parameters": self.memory.parameters, "trainable": self.memory.trainable, "traced": self.memory.traced,
            "lengths": {"prompt": self.lengths.prompt, "completion": self.lengths.completion, "source": self.lengths.source},
            "batch_size": self.batch, "accumulation": self.accumulation, "largest_batch_size": max(fitting, default=0),
            "batch_sizes": self.batches, "seconds": None if self.time is None else self.time.total,
            "seconds_by_part": {} if self.time is None else self.time.parts,
            "would_help": [{"change": change, "peak": peak} for change, peak in self.help], "notes": self.notes,
        }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    from posttrain.checks.memory_plan import TRAITS

    parser = argparse.ArgumentParser(
        prog="posttrain estimate",
        usage="posttrain estimate TRAINER --config FILE.yaml [--json] [options of TRAINER]",
        description="Say what a run would need, from its config: memory by component at the longest lengths, time of a step on "
        "this device, the largest batch that fits, and what would help. No weight is read and nothing is written. "
        f"Exit code 0 if it fits, {DOES_NOT_FIT} if it does not.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trainer", metavar="TRAINER", help="a training command: " + ", ".join(sorted(set(TRAITS) & set(train.COMMANDS)))
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a screen")
    parser.add_argument(
        "--prompt_tokens", type=int, metavar="N", help="tokens of the longest prompt; the data is not read then"
    )
    parser.add_argument("--completion_tokens", type=int, metavar="N", help="tokens of the longest completion")
    parser.add_argument("--no_timing", action="store_true", help="leave out the products that are timed for a second")
    return parser


def run(argv: list[str]) -> int:
    """Estimate as ``argv`` says.

    Returns:
        0 where the run fits, 78 where it does not.
    """
    from posttrain.checks.memory_plan import TRAITS

    options, rest = _parser().parse_known_args(argv)
    check_choice("trainer", options.trainer, sorted(set(TRAITS) & set(train.COMMANDS)))
    rest, _ = train._accelerate_shortcut(rest)
    *parsed, unknown = train.parser_for(options.trainer).parse_args_and_config(rest, return_remaining_strings=True)
    train._launch_flags(unknown, options.trainer)
    given = (options.prompt_tokens, options.completion_tokens)
    found = answer(options.trainer, parsed, given=given, timing=not options.no_timing)
    sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n" if options.json else screen(found))
    return 0 if found.fits else DOES_NOT_FIT


def answer(
    trainer: str, parsed: Sequence[Any], *, given: tuple[int | None, int | None] = (None, None), timing: bool = True
) -> Answer:
    """What a run would need.

    Args:
        trainer: Name of a training command.
        parsed: What its parser returned: data, config, model and mixture arguments.
        given: Tokens of the longest prompt and completion, where they are known.
        timing: Whether products are timed.

    Raises:
        ConfigError: No model is named. ModelError: It is not found.
    """
    import torch

    from posttrain.checks.memory_plan import plan
    from posttrain.models.device_memory import available_memory, in_use
    from posttrain.models.load import get_peft_config
    from posttrain.models.memory_estimate import estimate_memory

    script_args, args, model_args, _ = parsed
    source = model_args.model_name_or_path or getattr(args, "sft_model_path", None)
    if not source:
        raise ConfigError("--model_name_or_path is missing: which model shall be trained?")
    args.model_init_kwargs = model_args.model_init_kwargs(args.trust_remote_code) | dict(args.model_init_kwargs or {})
    config = _config(source, args, model_args.model_revision)
    notes: list[str] = []
    lengths = _lengths(trainer, parsed, given, notes)
    device = "cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu"
    limit = getattr(args, "memory_limit_gib", None)
    settings = {
        "lengths": lengths, "peft_config": get_peft_config(model_args), "parts": _parts(script_args, args, notes),
        "device": device, "process": in_use("cpu") if device == "cpu" else 0,
        "processes": max(int(args.world_size), 1),
        "bits": 4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else None,
    }  # fmt: skip
    work = plan(trainer, args, config, **settings)
    found = Answer(
        trainer, source, lengths, estimate_memory(work),
        available_memory(device, None if limit is None else int(limit * 2**30)),
        int(args.per_device_train_batch_size), int(args.gradient_accumulation_steps),
        max(batch.input_ids.numel() for batch in work.batches), notes=notes,
    )  # fmt: skip
    found.batches = _batches(trainer, args, config, settings, found)
    if not found.fits:
        found.help = _help(work, found.memory.peak)
    if timing:
        found.time = _time(trainer, args, work, notes)
    if not found.memory.traced:
        notes.append("this model cannot be traced without memory: activations are told from the widths of its layers.")
    return found


def _config(source: str, args: Any, revision: str) -> Any:
    import transformers

    from posttrain.integrations.hub import explained
    from posttrain.models.load import check_model_source

    check_model_source(source, generative=False)
    with explained("model", source):
        return transformers.AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=args.trust_remote_code
        )


def _parts(script_args: Any, args: Any, notes: list[str]) -> dict[str, Any]:
    """Configs of the other models that stay in memory."""
    found = {}
    for part in ("reward_model", "value_model"):
        name = getattr(script_args, f"{part}_name_or_path", None)
        if not name:
            continue
        try:
            found[part] = _config(name, args, "main")
        except (PosttrainError, OSError, ValueError) as error:
            notes.append(f"{part}={name!r} could not be read and is not counted ({_short(error)}).")
    return found


def _lengths(trainer: str, parsed: Sequence[Any], given: tuple[int | None, int | None], notes: list[str]) -> Lengths:
    """As given, as the data has them, or as the config allows."""
    from posttrain.checks.memory_plan import TRAITS, Lengths, assumed_lengths

    prompt, completion = given
    known = assumed_lengths(trainer, parsed[1])
    if prompt is not None or completion is not None:
        return Lengths(prompt or 0, completion or known.completion, "given")
    try:
        rows = _longest_rows(trainer, parsed)
    except (PosttrainError, OSError, ValueError, KeyError) as error:
        notes.append(
            f"the data was not read ({_short(error)}); --prompt_tokens and --completion_tokens say its lengths."
        )
        return known
    longest = max(rows, key=lambda row: len(row.prompt_ids) + sum(map(len, row.completions)))
    if not TRAITS[trainer].answers:
        prompt = max(len(row.prompt_ids) for row in rows)
        return Lengths(prompt, known.completion, "the longest prompt of the data, the config's completions")
    return Lengths(len(longest.prompt_ids), max(map(len, longest.completions)), "the longest row of the data")


def _longest_rows(trainer: str, parsed: Sequence[Any]) -> list[Any]:
    """The longest examples of the training set, tokenised."""
    from posttrain.data.samplers import longest_examples

    script_args, config, model_args, mixture = parsed
    name = "grpo" if trainer == "ppo" else trainer
    with inspect._no_progress_bars():
        data, _ = train._datasets(script_args, mixture, config)
        dataset = data[train._train_split(script_args, mixture)]
        drawn, _, _ = inspect._drawn(_as_dataset(longest_examples(dataset, LONGEST), dataset), LONGEST, config.seed)
        tokenizer = inspect._tokenizer(model_args, config, generative=trainer != "reward")
        made = inspect.ROWS[name](drawn, tokenizer, config)
    return made.rows if isinstance(made, inspect.Prepared) else made


def _as_dataset(examples: list[dict[str, Any]], source: Any) -> Any:
    import datasets

    return datasets.Dataset.from_list(examples, features=source.features)


def _batches(trainer: str, args: Any, config: Any, settings: dict[str, Any], found: Answer) -> dict[int, int]:
    """Peak by batch size, for sizes that keep the effective batch; passes that are equal are estimated once."""
    from posttrain.checks.memory_plan import plan
    from posttrain.models.memory_estimate import estimate_memory

    whole = found.batch * found.accumulation
    known: dict[Any, int] = {}
    peaks: dict[int, int] = {}
    for size in (n for n in range(1, whole + 1) if whole % n == 0):
        work = plan(trainer, args, config, batch_size=size, **settings)
        key = (max((b.input_ids.numel(), int(b.loss_mask.sum())) for b in work.batches), work.passes > 1)
        if key not in known:
            known[key] = found.memory.peak if size == found.batch else estimate_memory(work).peak
        peaks[size] = known[key]
    return peaks


def _help(work: Workload, peak: int) -> list[tuple[str, int]]:
    """Changes that need less memory, the most effective first, and the peak with each."""
    from posttrain.models.memory_estimate import estimate_memory

    tried = []
    if not work.checkpointing:
        tried.append(("gradient_checkpointing: true", replace(work, checkpointing=True)))
    if work.checkpointing and work.kept_layers != 0:
        tried.append(("kept_layers: 0", replace(work, kept_layers=0)))
    if work.policy.peft_config is None:
        tried.append(("use_peft: true (a LoRA adapter of rank 16)", _with_adapter(work)))
        if "adafactor" not in work.optimizer:
            tried.append(("optim: adafactor", replace(work, optimizer="adafactor")))
    if work.reference == "copy":
        frozen = tuple(part for part in work.frozen if part.role != "reference")
        change = "precompute_ref_log_probs: true" if work.generating is None else "beta: 0 (no reference)"
        tried.append((change, replace(work, frozen=frozen, reference="")))
    found = [(change, estimate_memory(changed).peak) for change, changed in tried]
    return sorted([one for one in found if one[1] < peak], key=lambda one: one[1])


def _with_adapter(work: Workload) -> Workload:
    import peft

    task = {"causal": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS"}[work.policy.kind]
    policy = replace(work.policy, peft_config=peft.LoraConfig(r=16, task_type=task))
    frozen = tuple(part for part in work.frozen if part.role != "reference")
    return replace(work, policy=policy, frozen=frozen, reference=work.reference and "adapter")


def _time(trainer: str, args: Any, work: Workload, notes: list[str]) -> StepTime | None:
    from posttrain.errors import ModelError
    from posttrain.models.memory_trace import Shadow
    from posttrain.models.step_time import measure_rates, step_time

    shadow = Shadow(work.policy, checkpointing=work.checkpointing, kept_layers=work.kept_layers)
    accumulation = max(1, round(work.passes / len(work.batches)))
    if trainer == "ppo":
        generations = 1 / args.updates
    else:
        generations = accumulation / (
            (getattr(args, "steps_per_generation", None) or 1) * getattr(args, "num_iterations", 1)
        )
    try:
        return step_time(work, shadow, measure_rates(work, shadow), accumulation=accumulation, generations=generations)
    except ModelError as error:
        notes.append(f"the time of a step cannot be told: {_short(error)}.")
        return None


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")[:160]


def screen(found: Answer) -> str:
    """The answer as lines for a terminal."""
    from posttrain.checks.memory import gib

    memory, peak = found.memory, found.memory.peak
    lines = [
        f"{found.trainer} on {found.model}: {memory.parameters / 1e6:.0f} M weights, {memory.trainable / 1e6:.1f} M trained",
        f"longest: prompt {found.lengths.prompt}, completion {found.lengths.completion} tokens ({found.lengths.source})",
        f"batch: {found.batch} x {found.accumulation} accumulated; the largest pass computes {found.row_tokens} tokens",
        "", f"memory at the fullest moment ({memory.fullest})",
    ]  # fmt: skip
    for name, size in sorted(memory.components.items(), key=lambda item: -item[1]):
        bar = "#" * max(1, round(WIDTH * size / peak))
        lines.append(f"  {name:22}{gib(size):>10}  {bar}")
    verdict = "fits" if found.fits else "does not fit"
    lines += [
        f"  {'together':22}{gib(peak):>10}  {verdict}: {gib(found.available.free)} free for it on {found.available.where}, "
        f"{gib(found.limit)} planned with", "",
    ]  # fmt: skip
    others = {name: sum(parts.values()) + sum(memory.standing.values()) for name, parts in memory.moments.items()}
    lines += [f"  {name + ':':24}{gib(size):>8}" for name, size in others.items() if name != memory.fullest]
    lines += ["", _batch_line(found)]
    if found.time is not None:
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.time.parts.items())
        lines += [
            "",
            f"time of a step at these lengths: about {found.time.total:.3g} s ({parts})",
            f"  {found.time.how}.",
        ]
    if found.help:
        lines += ["", "to fit:"]
        lines += [
            f"  {change:44}{gib(size):>10}{'' if size > found.limit else '  fits'}" for change, size in found.help
        ]
        lines += [f"  max_row_tokens below {found.row_tokens}, shorter rows, or more processes with FSDP or ZeRO"]
    return "\n".join([*lines, *[f"note: {note}" for note in found.notes]]).replace("\n\n\n", "\n\n") + "\n"


def _batch_line(found: Answer) -> str:
    fitting = [size for size, peak in found.batches.items() if peak <= found.limit]
    if not fitting:
        return "no batch size that keeps the effective batch fits"
    best, whole = max(fitting), found.batch * found.accumulation
    if len(set(found.batches.values())) == 1:
        return (
            f"largest batch that fits: {best} (any: passes are bounded by tokens, not by rows; effective batch {whole})"
        )
    return f"largest batch that fits: {best} x {whole // best} accumulated keeps the effective batch of {whole}"
