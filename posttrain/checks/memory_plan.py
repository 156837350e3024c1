"""From a trainer's name, its config and the lengths of its data to what one process of the run holds in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.types import Row

if TYPE_CHECKING:
    from posttrain.data.forest import Layout
    from posttrain.models.memory_estimate import Shards, Workload

__all__ = ["TRAITS", "Lengths", "Traits", "assumed_lengths", "layout_of", "plan", "worst_rows"]

ASSUMED = 1024  # Tokens of a row where neither the data nor the config says.
ASSUMED_PROMPT = 256


@dataclass(frozen=True)
class Traits:
    """What a method asks of memory.

    Attributes:
        kind: ``causal``, ``sequence`` or ``token``.
        answers: Completions of a row that is given; 0: they are sampled.
        group: Sampled completions a prompt; 0: ``num_generations``.
        reference: Whether a frozen reference scores the rows: never, always, or where ``beta`` is not 0.
        needs: As `posttrain.models.forward.forward`.
        doubled: Whether batch sizes count prompts with two completions each.
        elsewhere: Whether completions are sampled by other processes.
    """

    kind: str = "causal"
    answers: int = 0
    group: int = 0
    reference: str = "never"
    needs: frozenset[str] = frozenset({"logp", "entropy"})
    doubled: bool = False
    elsewhere: bool = False


_TOLD = frozenset({"logp", "entropy", "correct", "mean_logit"})
_GROUPS = Traits(reference="beta")
_PAIRS = Traits(answers=2, reference="always", needs=_TOLD)
_SAMPLED_PAIRS = Traits(group=2, reference="always", doubled=True)
TRAITS: dict[str, Traits] = {
    "sft": Traits(answers=1, needs=frozenset({"logp", "entropy", "correct"})),
    "reward": Traits(kind="sequence", answers=2),
    "dpo": _PAIRS,
    "kto": replace(_PAIRS, answers=1),
    "bco": replace(_PAIRS, answers=1),
    "cpo": replace(_PAIRS, reference="never"),
    "orpo": replace(_PAIRS, reference="never"),
    "tpo": replace(_PAIRS, answers=3, reference="never"),
    "grpo": _GROUPS,
    "gmpo": _GROUPS,
    "async-grpo": replace(_GROUPS, elsewhere=True),
    "rloo": _GROUPS,
    "a2po": Traits(group=1, reference="always"),
    "ppo": Traits(group=1, reference="always", needs=frozenset({"logp", "values", "entropy"})),
    "online-dpo": _SAMPLED_PAIRS,
    "nash-md": _SAMPLED_PAIRS,
    "xpo": _SAMPLED_PAIRS,
}


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and completion, and where that is known from."""

    prompt: int
    completion: int
    source: str = "given"


def assumed_lengths(trainer: str, args: Any) -> Lengths:
    """Lengths by the config alone, where the data was not read: the longest that it allows."""
    traits = TRAITS[trainer]
    longest = getattr(args, "max_length", None)
    if traits.answers:
        total = longest or ASSUMED
        source = f"max_length={total}" if longest else f"assumed, as max_length is not set: {ASSUMED}"
        if traits.answers == 1 and traits.reference == "never":
            return Lengths(0, total, source)
        return Lengths(total // 2, total - total // 2, f"{source}, half of it prompt (assumed)")
    completion = getattr(args, "max_completion_length", None) or ASSUMED_PROMPT
    given = getattr(args, "max_prompt_length", None)
    prompt = given or (min(ASSUMED_PROMPT, longest - completion) if longest else ASSUMED_PROMPT)
    return Lengths(prompt, completion, f"the config's limits, prompts of {prompt}" + ("" if given else " (assumed)"))


def worst_rows(trainer: str, args: Any, lengths: Lengths, *, batch_size: int | None = None) -> list[Row]:
    """A micro-batch of one process in which every row is as long as the longest; the tokens are zeros."""
    traits = TRAITS[trainer]
    size = batch_size or int(args.per_device_train_batch_size)
    counts = [traits.answers] * size
    if not traits.answers:
        group = traits.group or int(args.num_generations)
        size *= 2 if traits.doubled else 1
        counts = [group] * (size // group) + ([size % group] if size % group else [])
    answer = [0] * max(lengths.completion, 1)
    return [Row([0] * lengths.prompt, [answer] * count, [[1] * len(answer)] * count) for count in counts]


def layout_of(args: Any, config: Any, device: str, implementation: str | None = None) -> Layout:
    """How rows will be laid out, as the trainer chooses it; that the model takes forests is taken for granted."""
    import types

    import torch

    from posttrain.models.attention import layout_for

    text = types.SimpleNamespace(_attn_implementation=implementation or getattr(config, "_attn_implementation", None))
    stand_in = types.SimpleNamespace(
        config=types.SimpleNamespace(get_text_config=lambda: text),
        parameters=lambda: iter([types.SimpleNamespace(device=torch.device(device))]),
    )
    layout = layout_for(stand_in)  # type: ignore[arg-type]
    if getattr(args, "max_row_tokens", None) is not None:
        layout = replace(layout, row_tokens=args.max_row_tokens)
    multiple = getattr(args, "pad_to_multiple_of", None)
    return replace(layout, pad_to_multiple_of=multiple) if multiple else layout


def _together(trainer: str, args: Any) -> bool:
    """Whether a micro-batch is one pass, whatever its size."""
    losses = getattr(args, "loss_type", None)
    if trainer == "dpo":
        from posttrain.losses.preference import DPO_LOSSES

        return any(DPO_LOSSES[name].kind == "sorted" for name in losses or () if name in DPO_LOSSES)
    return losses == "bnpo" or getattr(args, "top_entropy_quantile", 1.0) < 1.0


def plan(
    trainer: str,
    args: Any,
    model_config: Any,
    *,
    lengths: Lengths | None = None,
    peft_config: Any = None,
    parts: Mapping[str, Any] | None = None,
    device: str = "cpu",
    process: int = 0,
    processes: int = 1,
    batch_size: int | None = None,
    bits: int | None = None,
) -> Workload:
    """What one process of this run holds.

    Args:
        trainer: Name of the training command.
        args: Its config.
        model_config: Configuration of the policy.
        lengths: Of the longest prompt and completion; None: what the config allows.
        peft_config: Of an adapter that is trained.
        parts: Configurations of other models, by ``reward_model`` and ``value_model``.
        device: ``cpu`` or ``cuda``.
        process: Bytes of the interpreter and its libraries.
        processes: Ranks.
        batch_size: Instead of the config's.
        bits: Of quantised weights.
    """
    from posttrain.data.forest import collate
    from posttrain.models.memory_estimate import Workload
    from posttrain.models.memory_trace import Part

    traits, parts = TRAITS[trainer], dict(parts or {})
    lengths = lengths or assumed_lengths(trainer, args)
    policy = Part("policy", model_config, traits.kind, _dtype(args, model_config), peft_config, bits=bits)  # type: ignore[arg-type]
    layout = layout_of(args, model_config, device, (_init(args)).get("attn_implementation"))
    whole = traits.answers > 1 or trainer in ("online-dpo", "xpo")
    rows = worst_rows(trainer, args, lengths, batch_size=batch_size)
    batches = collate(rows, pad_token_id=0, layout=layout, whole_rows=whole, together=_together(trainer, args))
    reference = _reference(trainer, args, peft_config)
    frozen = [replace(policy, role="reference", trained=False, peft_config=None)] if reference == "copy" else []
    if parts.get("reward_model") is not None:
        frozen.append(Part("reward model", parts["reward_model"], "sequence", policy.dtype, trained=False))
    critic = parts.get("value_model")
    share = batch_size / args.per_device_train_batch_size if batch_size else 1.0
    return Workload(
        policy=policy,
        batches=batches,
        passes=max(1, round(len(batches) * _accumulation(trainer, args) / share)),
        critic=None if critic is None else Part("value model", critic, "sequence", policy.dtype),
        value_head=trainer == "ppo" and critic is None,
        frozen=tuple(frozen),
        reference=reference,
        needs=traits.needs | _more_needs(args),
        checkpointing=bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing),
        kept_layers=args.kept_layers,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        autocast=_autocast(args, policy.dtype),
        generating=None if traits.answers or traits.elsewhere else _generating(trainer, args, lengths, device),
        shards=_shards(args, processes),
        device=device,
        process=process,
    )


def _init(args: Any) -> dict[str, Any]:
    given = getattr(args, "model_init_kwargs", None)
    return dict(given) if isinstance(given, Mapping) else {}


def _dtype(args: Any, config: Any) -> Any:
    import torch

    name = _init(args).get("dtype", "float32")
    if name in ("auto", None):
        name = getattr(config, "dtype", None) or torch.float32
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))


def _autocast(args: Any, dtype: Any) -> Any:
    """Dtype of the computation where it is not that of the weights."""
    import torch

    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return half if half is not dtype else None


def _reference(trainer: str, args: Any, peft_config: Any) -> str:
    wanted = TRAITS[trainer].reference
    needed = wanted == "always" or (wanted == "beta" and bool(getattr(args, "beta", 0)))
    if not needed or getattr(args, "precompute_ref_log_probs", False):
        return ""
    return "adapter" if peft_config is not None else "copy"


def _more_needs(args: Any) -> frozenset[str]:
    return frozenset({"logits"}) if getattr(args, "label_smoothing_factor", 0) else frozenset()


def _accumulation(trainer: str, args: Any) -> int:
    if trainer == "ppo":  # A mini-batch is an optimiser step.
        return max(1, -(-args.local_mini_batch_size // args.per_device_train_batch_size))
    return int(args.gradient_accumulation_steps)


def _generating(trainer: str, args: Any, lengths: Lengths, device: str) -> Any:
    from posttrain.models.memory_estimate import Generating

    group = TRAITS[trainer].group or int(args.num_generations)
    world = max(int(getattr(args, "world_size", 1)), 1)
    sequences = max(1, int(args.generation_batch_size or args.per_device_train_batch_size) // world)
    return Generating(
        prompts=-(-sequences // group),
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        sequences=sequences,
        slots=64 if device == "cpu" else 256,
        shares_prompts=getattr(args, "rollout_engine", "auto") != "hf",
        models=2 if trainer == "nash-md" else 1,
    )


def _shards(args: Any, processes: int) -> Shards:
    """How FSDP or ZeRO divides the model, from the config or from what `accelerate launch` exported."""
    from posttrain.models.memory_estimate import Shards

    stage = _zero_stage(args)
    fsdp = " ".join(str(getattr(option, "value", option)) for option in _listed(getattr(args, "fsdp", None)))
    if not fsdp and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        fsdp = os.environ.get("FSDP_SHARDING_STRATEGY", "full_shard").lower()
    if fsdp and fsdp != "no_shard":
        stage = 2 if "grad_op" in fsdp else 3
    divided = [processes if stage >= least else 1 for least in (3, 2, 1)]
    return Shards(*divided, processes=processes)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [] if value in (None, "", False) else [value]


def _zero_stage(args: Any) -> int:
    given = getattr(args, "deepspeed", None)
    if isinstance(given, str) and Path(given).is_file():
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    if isinstance(given, Mapping):
        return int(given.get("zero_optimization", {}).get("stage", 0))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return 0
