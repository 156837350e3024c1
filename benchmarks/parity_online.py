"""Loss, gradient and metrics of RLOO, GMPO, A*-PO and online DPO against the peer's formulas, on the same fixed tensors.

As `parity_grpo`: both sides get log-probs, advantages and masks and no model, and the peer's own loss functions run on objects
that were never constructed. PPO is not in the peer's release; loops and hand numbers in the tests pin it.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import harness
import torch
from parity_grpo import CLOSE, ROWS, TOKENS, gaps_of, micro_batches, numbers_of, told

Tensors = dict[str, torch.Tensor]

# Method and case -> settings; ``x2`` cases have two micro-batches of different lengths.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "rloo": {
        "plain": {},
        "uneven clip": {"epsilon": 0.1, "epsilon_high": 0.5},
        "all masked": {"masked": True},
        "far": {"far_old": True},
    },
    "gmpo": {
        "plain": {},
        "fresh": {"fresh": True},
        "uneven clip": {"epsilon": 0.1, "epsilon_high": 0.3},
        "kl": {"beta": 0.1},
        "entropy filter": {"top_entropy_quantile": 0.4},
        "all masked": {"masked": True},
    },
    "a2po": {"plain": {}, "strong": {"beta2": 0.5}},
    "online_dpo": {"sigmoid": {}, "ipo": {"loss_type": "ipo"}, "ties": {"ties": True}},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "rloo": {"epsilon": 0.2, "epsilon_high": 0.2},
    "gmpo": {"epsilon": 0.4, "epsilon_high": 0.4, "beta": 0.0, "top_entropy_quantile": 1.0},
    "a2po": {"beta2": 1e-3},
    "online_dpo": {"beta": 0.1, "loss_type": "sigmoid"},
}
TRAPS = ("masked", "fresh", "far_old", "ties")  # What a case does to the tensors; the rest goes to the config.
DELIBERATE: dict[str, tuple[tuple[str, ...], str]] = {  # Case -> what differs, and why.
    "rloo/far": (
        ("loss", "logp_grad"),
        "the logarithm of a ratio stops at 20 here: one sequence would decide the whole loss",
    ),
    "gmpo/all masked": (("loss",), "a completion without tokens adds a constant there, and no gradient; here nothing"),
    "online_dpo/ties": (
        ("loss", "logp_grad", "rewards/", "logps/"),
        "equal rewards train nothing here, nor are they averaged; there the first completion wins",
    ),
}


def cases() -> dict[str, tuple[str, dict[str, Any], int]]:
    """Method, settings and micro-batches of every comparison."""
    return {
        f"{method}/{name}{'' if count == 1 else ' x2'}": (method, DEFAULTS[method] | changes, count)
        for method, variants in VARIANTS.items()
        for name, changes in variants.items()
        for count in (1, 2)
    }


def inputs(method: str, settings: dict[str, Any], count: int) -> list[Tensors]:
    """The tensors of one optimiser step, with what a method has beside GRPO's."""
    batches = micro_batches({"masked": settings.get("masked")}, count)
    for number, batch in enumerate(batches):
        batch["tool"] = torch.ones_like(batch["tool"])
        if settings.get("far_old"):
            batch["old"][1] -= 6.0  # Of four tokens, with a negative advantage, which nothing clips.
        if method != "rloo" and not settings.get("masked"):  # A completion has a token, if only its end.
            batch["mask"][:, 0] = 1.0
        batch["rewards"] = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, -0.5])
        if settings.get("ties"):
            batch["rewards"][2 + number] = batch["rewards"][3 - number]
    return batches


# The peer -----------------------------------------------------------------------------------------------------------


def bare(kind: Any, **attributes: Any) -> Any:
    """A trainer that nothing constructed."""
    trainer = kind.__new__(kind)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x, backward=lambda loss: None,
    )  # fmt: skip
    common = {"accelerator": accelerator, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    for name, value in (common | {"_metrics": {"train": defaultdict(list)}} | attributes).items():
        setattr(trainer, name, value)
    return trainer


def peer_policy(method: str, settings: dict[str, Any], count: int) -> Any:
    """A function from a batch to loss and metrics, of RLOO or GMPO."""
    from trl import RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    more = {"epsilon_low": settings["epsilon"], "epsilon_high": settings["epsilon_high"]}
    if method == "gmpo":
        more |= {name: settings[name] for name in ("beta", "top_entropy_quantile")}
    trainer = bare(RLOOTrainer if method == "rloo" else GMPOTrainer, current_gradient_accumulation_steps=count, **more)

    def loss(batch: Tensors) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch["logp"], batch["entropy"], None)
        given = {
            "prompt_ids": torch.zeros(ROWS, 1).long(), "prompt_mask": torch.ones(ROWS, 1).long(),
            "completion_ids": torch.zeros(ROWS, TOKENS).long(), "completion_mask": batch["mask"],
            "advantages": batch["advantages"], "ref_per_token_logps": batch["ref"],
            "old_logps": (batch["old"] * batch["mask"]).sum(1),
        }  # fmt: skip
        if not settings.get("fresh"):
            given["old_per_token_logps"] = batch["old"]
        found = trainer._compute_loss(None, given)
        return found / count if method == "rloo" else found  # transformers divides RLOO's.

    return loss, trainer._metrics["train"]


def peer_regression(settings: dict[str, Any], count: int) -> Any:
    """Of A*-PO."""
    from trl.experimental.a2po import A2POTrainer

    trainer = bare(A2POTrainer, args=SimpleNamespace(beta2=settings["beta2"]))

    def loss(batch: Tensors) -> torch.Tensor:
        trainer._get_sequence_logps = lambda *_: (batch["logp"] * batch["mask"]).sum(1)
        given = {
            "input_ids": None, "attention_mask": None, "logits_to_keep": TOKENS,
            "ref_logps": (batch["ref"] * batch["mask"]).sum(1), "rewards": batch["advantages"], "v_star": 0.0,
        }  # fmt: skip
        return trainer.compute_loss(None, given) / count

    return loss, trainer._metrics["train"]


def peer_pairs(settings: dict[str, Any], count: int) -> Any:
    """Of online DPO, whose loss is in the middle of its step; the first completions of all pairs come first."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    losses: list[torch.Tensor] = []
    arguments = {
        "use_vllm": False, "missing_eos_penalty": None, "loss_type": settings["loss_type"], "optim": "adamw_torch",
        "torch_empty_cache_steps": None, "n_gpu": 1, "gradient_accumulation_steps": count,
    }  # fmt: skip
    # The trainer's beta is a property of its own schedule.
    kind = type("Peer", (OnlineDPOTrainer,), {"beta": settings["beta"]})
    trainer = bare(
        kind, args=SimpleNamespace(**arguments), ref_model=object(), eos_token_ids=[1], reward_funcs=[None],
        stats=defaultdict(list), processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
    )  # fmt: skip
    trainer.accelerator.backward = losses.append
    halves = torch.tensor([*range(0, ROWS, 2), *range(1, ROWS, 2)])

    def loss(batch: Tensors) -> torch.Tensor:
        logp, ref, mask = (batch[name][halves] for name in ("logp", "ref", "mask"))
        ids = torch.zeros(ROWS, TOKENS).long()
        trainer._generate = lambda *_: (ids[:, :1], ids[:, :1] + 1, ids, mask.long(), None)
        answers = iter([logp, ref])
        trainer._forward = lambda *_: next(answers)
        trainer._calculate_rewards_from_functions = lambda **_: batch["rewards"][halves].clone()
        model = SimpleNamespace(train=lambda: None)
        trainer.training_step(model, {"prompt": ["p"] * (ROWS // 2)})
        return losses.pop() / count

    return loss, trainer.stats


def peer_case(method: str, settings: dict[str, Any], count: int) -> dict[str, Any]:
    """The peer's loss summed over the micro-batches of a step."""
    if method == "a2po":
        loss, metrics = peer_regression(settings, count)
    elif method == "online_dpo":
        loss, metrics = peer_pairs(settings, count)
    else:
        loss, metrics = peer_policy(method, settings, count)
    batches = inputs(method, settings, count)
    total = torch.stack([loss(batch) for batch in batches]).sum()
    return told(total, batches, {k: float(v[0]) for k, v in metrics.items() if len(v) == 1})


# Ours ---------------------------------------------------------------------------------------------------------------


def our_terms(method: str, settings: dict[str, Any]) -> Any:
    """A function from outputs and a batch to loss terms."""
    import posttrain
    from posttrain.extensions.experimental.a2po_method import a2po_objective
    from posttrain.extensions.experimental.online_dpo_method import pair_terms, sequence_sums
    from posttrain.methods.grpo.objective import grpo_objective
    from posttrain.methods.rloo import rloo_objective

    if method == "online_dpo":

        def pairs(out: Any, batch: Any) -> Any:
            logp, ratio = sequence_sums(out, batch)
            terms, metrics = pair_terms(batch, logp, ratio, beta=settings["beta"], loss_type=settings["loss_type"])
            terms = batch.spread_rows(terms, 2)
            return posttrain.LossTerms(
                terms, torch.ones_like(terms, dtype=torch.bool), "sequence", num_sequences=ROWS, metrics=metrics
            )

        return pairs
    name, objective = {
        "rloo": ("RLOOConfig", rloo_objective),
        "gmpo": ("GMPOConfig", grpo_objective),
        "a2po": ("A2POConfig", a2po_objective),
    }[method]
    known = {k: v for k, v in settings.items() if k not in TRAPS}
    config = getattr(posttrain, name)(tempfile.mkdtemp(), bf16=False, report_to="none", **known)
    return lambda out, batch: objective(out, batch, config)


def our_case(method: str, settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Our objective over the same micro-batches, one sequence a row."""
    from posttrain import Batch, ModelOutputs
    from posttrain.losses.reduce import Denominators, reduce

    batches, terms_of = inputs(method, settings, count), our_terms(method, settings)
    masks = [(b["mask"] * b["tool"]).bool() for b in batches]
    counts = Denominators(sum(int(m.sum()) for m in masks), ROWS * count, count, named={"judged": float(ROWS * count)})
    total, metrics = torch.zeros(()), {}
    for batch, mask in zip(batches, masks, strict=True):
        grid = torch.zeros(ROWS, TOKENS).long()
        advantages = batch["advantages"]
        if method == "online_dpo":
            better = (batch["rewards"][::2] - batch["rewards"][1::2]).sign()
            advantages = torch.stack([better, -better], 1).flatten()
        forest = Batch(
            input_ids=grid, position_ids=grid, seen_until=grid + 1, predictor=grid, loss_mask=mask,
            sequence=torch.arange(ROWS)[:, None].expand(ROWS, TOKENS), num_sequences=ROWS, origin=list(range(ROWS)),
            advantages=advantages, old_logp=None if settings.get("fresh") else batch["old"], ref_logp=batch["ref"],
        )  # fmt: skip
        terms = terms_of(ModelOutputs(logp=batch["logp"], entropy=batch["entropy"]), forest)
        total = total + reduce(terms, counts)
        metrics = numbers_of(terms)
    return told(total, batches, metrics if count == 1 else {})


def main() -> None:
    """Both sides, the gaps, and what was not expected."""
    gaps = gaps_of(__file__, __doc__, cases(), our_case, peer_case)
    if gaps is None:
        return
    equal, strange, used = [], [], set()
    for name, found in gaps.items():
        allowed, why = DELIBERATE.get(name.removesuffix(" x2"), ((), ""))
        apart = {what: size for what, size in found.items() if size > CLOSE}
        meant = {what: size for what, size in apart.items() if what.startswith(allowed)}
        if meant:
            used.add(name.removesuffix(" x2"))
            print(f"{name:24} {', '.join(f'{what} {size:.1e}' for what, size in meant.items())}: {why}")
        strange += [f"{name} {what} {size:.1e}" for what, size in apart.items() if what not in meant]
        equal += [size for what, size in found.items() if what not in apart]
    print(f"{len(equal)} numbers of {len(gaps)} cases agree to {max(equal):.1e}: losses, gradients and metrics")
    worst_of = {name: round(max(found.values()), 10) for name, found in gaps.items()}
    reasons = {name: why for name, (_, why) in DELIBERATE.items()}
    harness.save("online_loss_parity", {"largest_gap": worst_of, "deliberate": reasons})
    strange += [f"{name} is said to differ, and agrees" for name in set(DELIBERATE) - used]
    if strange:
        raise SystemExit("not explained: " + "; ".join(strange))


if __name__ == "__main__":
    main()
