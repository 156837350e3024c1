"""Loss, gradients and metrics of every GRPO loss type against the peer's formulas, on the same fixed tensors.

Both sides get log-probs, entropies, advantages and masks, no model: the peer's ``_compute_loss`` runs on an object that was
never constructed. Every loss type meets every level, clip, KL, filter, mask and weight, with one micro-batch a step and with
two of different lengths. Differences that are deliberate are computed too, and named with their reason.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import torch

ROWS, TOKENS, LIMIT, CLOSE = 6, 9, 16, 2e-6
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
BASE = {
    "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.28, "delta": None, "beta": 0.0,
    "use_bias_correction_kl": False, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "off_policy_mask_threshold": None,
    "vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_truncate",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fresh": {"fresh": True},  # No old log-probs: the ratio is 1 and its gradient is not.
    "delta": {"delta": 1.5},
    "kl": {"beta": 0.1},
    "kl corrected": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy filter": {"top_entropy_quantile": 0.4},
    "entropy bonus": {"entropy_coef": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "engine weights": {"vllm_importance_sampling_correction": True},
    "all masked": {"masked": True},
    "everything": {
        "delta": 1.5, "beta": 0.1, "use_bias_correction_kl": True, "top_entropy_quantile": 0.6,
        "off_policy_mask_threshold": 0.05, "vllm_importance_sampling_correction": True,
    },
}  # fmt: skip
FAR_REFERENCE = "a reference further than e^20 away counts as e^20 here: one token would decide the loss"
UNEVEN_SLICES = (
    "tokens of this step divide here, a share of the generation's there: slices of different lengths weigh apart"
)
BONUS_OF_STEP = "the bonus is the mean entropy of the step's tokens here, the mean of micro-batch means there"
TOKEN_METHOD = "VESPO's ratios are tokens' here, whatever importance_sampling_level says; there the KL's are not"
DELIBERATE = {  # Case -> why it differs.
    "dapo/token/far reference": FAR_REFERENCE,
    "dapo/token/uneven slices": UNEVEN_SLICES,
} | {f"{kind}/{level}/entropy bonus x2": BONUS_OF_STEP for kind in TYPES for level in ("token", "sequence")}
DELIBERATE |= {
    f"vespo/sequence/{name}{x}": TOKEN_METHOD for name in ("kl corrected", "everything") for x in ("", " x2")
}
REFUSED = {  # What the peer computes and the config refuses here -> why.
    "luspo/token/plain": "a token's ratio weighed by its sequence's length is no LUSPO",
    "luspo/sequence/kl": "the KL would be summed, and so weighed by length",
    "cispo/token/default cap": "epsilon_high unset caps every ratio at 0.2",
}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """One micro-batch: uneven lengths, a tool's tokens inside, an empty row, advantages of both signs and zero."""
    made = torch.Generator().manual_seed(seed)
    logp = -torch.rand(ROWS, TOKENS, generator=made) * 3
    lengths = torch.tensor([TOKENS, 4, 7, 1, 0, 6]) if seed % 2 else torch.tensor([2, TOKENS, 3, 3, 5, TOKENS])
    inside = torch.arange(TOKENS) < lengths[:, None]
    tool = torch.ones(ROWS, TOKENS)
    tool[2, 2:4] = 0
    noise = torch.randn(ROWS, TOKENS, generator=made)
    return {
        "logp": logp,
        "old": logp + 0.3 * noise,
        "ref": logp + 0.2 * torch.randn(ROWS, TOKENS, generator=made),
        "sampled": logp + 0.3 * noise + 0.1 * torch.randn(ROWS, TOKENS, generator=made),
        "entropy": torch.rand(ROWS, TOKENS, generator=made) * 2,
        "mask": inside.float(),
        "tool": tool,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, 0.0]),
    }


def cases() -> dict[str, tuple[dict[str, Any], int]]:
    """Settings and number of micro-batches of every comparison."""
    found = {}
    for kind in TYPES:
        for level in ("token", "sequence"):
            for name, changes in VARIANTS.items():
                settings = BASE | {"loss_type": kind, "importance_sampling_level": level} | changes
                if kind == "cispo":
                    settings["epsilon_high"] = 1.2
                if kind == "luspo" and (
                    level == "token" or name in ("kl", "kl corrected", "entropy filter", "everything")
                ):
                    continue
                if kind == "luspo" and settings["vllm_importance_sampling_correction"]:
                    settings["vllm_importance_sampling_mode"] = "sequence_truncate"
                found[f"{kind}/{level}/{name}"] = settings, 1
                found[f"{kind}/{level}/{name} x2"] = settings, 2
    dapo = BASE | {"loss_type": "dapo"}
    found["dapo/token/far reference"] = dapo | {"beta": 0.1, "far": True}, 1
    found["dapo/token/uneven slices"] = dapo | {"slices": 2}, 1
    return found


def micro_batches(settings: dict[str, Any], count: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of one optimiser step."""
    found = [tensors(seed) for seed in range(1, count + 1)]
    for batch in found:
        if settings.get("masked"):
            batch["mask"] = torch.zeros_like(batch["mask"])
        if settings.get("far"):
            batch["ref"][0, 0] = batch["logp"][0, 0] + 21.0
        batch["logp"].requires_grad_()
        batch["entropy"].requires_grad_()
    return found


def engine_weights(batch: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """The correction as the peer hands it to its loss: token by token, or one value a sequence, at most 1.1."""
    gap = (batch["old"] - batch["sampled"]) * batch["mask"] * batch["tool"]
    gap = gap if mode.startswith("token") else gap.sum(1, keepdim=True)
    return gap.exp().clamp(max=1.1).detach()


def told(loss: torch.Tensor, batches: list[dict[str, torch.Tensor]], metrics: dict[str, float]) -> dict[str, Any]:
    """What is compared."""
    loss.backward()

    def flat(name: str) -> list[float]:
        grads = [b[name].grad if b[name].grad is not None else torch.zeros_like(b[name]) for b in batches]
        return [float(x) for g in grads for x in g.flatten()]

    return {"loss": float(loss), "logp_grad": flat("logp"), "entropy_grad": flat("entropy"), "metrics": metrics}


# The peer -----------------------------------------------------------------------------------------------------------


def peer_case(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """The peer's loss summed over the micro-batches of a step."""
    from trl import GRPOTrainer

    batches = micro_batches(settings, count)
    items = sum(float((b["mask"] * b["tool"]).sum()) for b in batches)
    slices = settings.get("slices", count)
    if settings.get("slices"):  # The generation's other slice is longer than this one.
        items += float((tensors(2)["mask"] * tensors(2)["tool"]).sum())
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    names = ("beta", "loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold")
    for name in (*names, "entropy_coef", "vllm_importance_sampling_correction", "epsilon_high"):
        setattr(trainer, name, settings[name])
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )  # fmt: skip
    constants = {
        "use_bias_correction_kl": settings["use_bias_correction_kl"], "delta": settings["delta"],
        "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "steps_per_generation": slices,
    }  # fmt: skip
    more = {
        "epsilon_low": settings["epsilon"], "use_vllm": settings["vllm_importance_sampling_correction"],
        "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": count,
        "max_completion_length": LIMIT, "accelerator": accelerator, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": settings["entropy_coef"] != 0, "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)}, "args": SimpleNamespace(**constants),
    }  # fmt: skip
    for name, value in more.items():
        setattr(trainer, name, value)
    total = torch.zeros(())
    for batch in batches:
        trainer._get_per_token_logps_and_entropies = lambda *_, b=batch, **__: (b["logp"], b["entropy"], None)
        inputs = {
            "prompt_ids": torch.zeros(ROWS, 1).long(), "prompt_mask": torch.ones(ROWS, 1).long(),
            "completion_ids": torch.zeros(ROWS, TOKENS).long(), "completion_mask": batch["mask"],
            "tool_mask": batch["tool"], "advantages": batch["advantages"], "ref_per_token_logps": batch["ref"],
            "num_items_in_batch": torch.tensor(items),
        }  # fmt: skip
        if not settings.get("fresh"):
            inputs["old_per_token_logps"] = batch["old"]
        if settings["vllm_importance_sampling_correction"]:
            inputs["sampling_per_token_logps"] = batch["sampled"]
            inputs["importance_sampling_ratio"] = engine_weights(batch, settings["vllm_importance_sampling_mode"])
        total = total + trainer._compute_loss(None, inputs)
    metrics = {k: v[0] for k, v in trainer._metrics["train"].items() if len(v) == 1}
    return told(total, batches, metrics)


# Ours ---------------------------------------------------------------------------------------------------------------


def our_case(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Our objective over the same micro-batches, one sequence a row."""
    from posttrain import Batch, GRPOConfig, ModelOutputs
    from posttrain.losses.reduce import Denominators, reduce
    from posttrain.methods.grpo import grpo_objective

    batches = micro_batches(settings, count)
    known = {k: v for k, v in settings.items() if k not in ("fresh", "masked", "far", "slices")}
    config = GRPOConfig(
        tempfile.mkdtemp(), max_completion_length=LIMIT, bf16=False, report_to="none",
        vllm_importance_sampling_clip_max=1.1, **known,
    )  # fmt: skip
    masks = [(b["mask"] * b["tool"]).bool() for b in batches]
    counts = Denominators(sum(int(m.sum()) for m in masks), ROWS * count, count)
    total, metrics = torch.zeros(()), {}
    for batch, mask in zip(batches, masks, strict=True):
        grid = torch.zeros(ROWS, TOKENS).long()
        forest = Batch(
            input_ids=grid, position_ids=grid, seen_until=grid + 1, predictor=grid, loss_mask=mask,
            sequence=torch.arange(ROWS)[:, None].expand(ROWS, TOKENS), num_sequences=ROWS,
            advantages=batch["advantages"], old_logp=None if settings.get("fresh") else batch["old"],
            ref_logp=batch["ref"] if settings["beta"] else None,
            rollout_logp=batch["sampled"] if settings["vllm_importance_sampling_correction"] else None,
        )  # fmt: skip
        terms = grpo_objective(ModelOutputs(logp=batch["logp"], entropy=batch["entropy"]), forest, config)
        total = total + reduce(terms, counts)
        metrics = numbers_of(terms)
    return told(total, batches, metrics if count == 1 else {})


def numbers_of(terms: Any) -> dict[str, float]:
    """Metrics of one micro-batch; a mean over nothing is none."""
    known = {k: m for k, m in terms.metrics.items() if m.reduction != "mean" or float(m.weight)}
    return {k: float(m.value) / (float(m.weight) if m.reduction == "mean" else 1.0) for k, m in known.items()}


def gap(ours: list[float], peer: list[float]) -> float:
    """The largest difference against the largest number."""
    scale = max([abs(x) for x in peer if math.isfinite(x)] + [1e-6])
    return max((abs(a - b) for a, b in zip(ours, peer, strict=True)), default=0.0) / scale


def compare(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Relative gaps of every case."""
    found = {}
    for name, mine in ours.items():
        theirs = peer[name]
        found[name] = {
            "loss": abs(mine["loss"] - theirs["loss"]) / max(abs(theirs["loss"]), 0.1),
            "logp_grad": gap(mine["logp_grad"], theirs["logp_grad"]),
            "entropy_grad": gap(mine["entropy_grad"], theirs["entropy_grad"]),
        }
        # Ratios of sequences without a token count there and not here.
        shared = [k for k in mine["metrics"] if k in theirs["metrics"] and "sequence" not in name]
        for key in shared:
            if math.isfinite(theirs["metrics"][key]):
                found[name][key] = abs(mine["metrics"][key] - theirs["metrics"][key])
    return found


def gaps_of(script: str, about: str, cases: dict[str, tuple], ours: Callable, peer: Callable) -> dict | None:
    """Relative gaps of every case, from a process a side; None in such a process, which has printed its numbers.

    Args:
        script: The file that is run.
        about: For ``--help``.
        cases: Arguments by name.
        ours: Makes the numbers of a case here.
        peer: Makes the peer's.
    """
    args = harness.parser(about).parse_args()
    if args.side:
        run = ours if args.side == "ours" else peer
        print(json.dumps({name: run(*case) for name, case in cases.items()}))
        return None
    theirs = harness.child(harness.peer_python(), script, "--side", "peer")
    return compare(harness.child(sys.executable, script, "--side", "ours"), theirs)


def main() -> None:
    """Both sides, the gaps, and what was not expected."""
    gaps = gaps_of(__file__, __doc__, cases(), our_case, peer_case)
    if gaps is None:
        return
    apart = {name: found for name, found in gaps.items() if max(found.values()) > CLOSE}
    for name, found in apart.items():
        worst = max(found, key=found.__getitem__)
        print(f"{name:44} {worst:22} {found[worst]:.1e}  {DELIBERATE.get(name, 'NOT EXPLAINED')}")
    for name, why in REFUSED.items():
        print(f"{name:44} refused here: {why}")
    equal = [max(found.values()) for name, found in gaps.items() if name not in apart]
    print(f"{len(equal)} of {len(gaps)} cases agree to {max(equal):.1e} in loss, both gradients and metrics")
    worst_of = {name: round(max(found.values()), 10) for name, found in gaps.items()}
    harness.save("grpo_loss_parity", {"largest_gap": worst_of, "deliberate": DELIBERATE, "refused": REFUSED})
    if unexplained := sorted(set(apart) - set(DELIBERATE)):
        raise SystemExit(f"not explained: {unexplained}")


if __name__ == "__main__":
    main()
