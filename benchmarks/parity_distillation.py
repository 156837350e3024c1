"""Distillation against the peer: divergences and their gradients on the same tensors, whole and sparse; the loss of IW-OPD; and
steps of GKD and GOLD on the dataset's answers, with one tiny student and teacher. All numbers must agree to 1e-5.

Where the peer is wrong (denominators on policy, tokens of two vocabularies) the tests hold the corrected numbers instead.
"""

from __future__ import annotations

import importlib
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from parity_preference import build

EXACT = 1e-5
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
RUNS = {f"gkd beta {beta}": ("GKD", {"beta": beta}) for beta in (0.0, 0.5, 1.0)}
RUNS |= {"gold": ("GOLD", {"temperature": 1.5, "max_completion_length": 32, "learning_rate": 1e-3})}


def tensors() -> Any:
    """Logits of student and teacher (2, 6, 97), tokens, and log-probs of an older student."""
    import torch

    made = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(2, 6, 97, generator=made) for _ in range(2))
    tokens = torch.randint(97, (2, 6), generator=made)
    return student.requires_grad_(), teacher, tokens, -5 * torch.rand(2, 6, generator=made)


def measured(value: Any, student: Any) -> list[float]:
    """Mean of the values, and a few numbers of its gradient."""
    import torch

    (grad,) = torch.autograd.grad(value.mean(), student, retain_graph=True)
    return [value.mean().item(), grad.norm().item(), *grad.flatten()[:3].tolist()]


def functions(side: str) -> dict[str, list[float]]:
    """Every divergence on the same tensors."""
    import torch

    student, teacher, tokens, old = tensors()
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    top = log_q.detach().topk(7, -1).indices
    q, p = log_q.gather(-1, top), log_p.gather(-1, top)
    actual_q, actual_p = (x.gather(-1, tokens[..., None])[..., 0] for x in (log_q, log_p))
    found = {}
    if side == "ours":
        from posttrain.losses.distillation import divergence, normalized, prefix_weights, with_tail

        for beta in BETAS:
            found[f"whole {beta}"] = divergence(log_q, log_p, beta=beta)
            found[f"tail {beta}"] = divergence(with_tail(q), with_tail(p), beta=beta)
            found[f"renormalised {beta}"] = divergence(normalized(q), normalized(p), beta=beta)
        advantages, mask = (actual_p - old).detach(), torch.ones(2, 6, dtype=torch.bool)
        sequence = torch.arange(2)[:, None].expand(2, 6)
        weights = prefix_weights(advantages, mask, sequence, gamma=0.5, epsilon=1e-8)
        found["iw-opd"] = -weights * advantages * actual_q
    else:
        from trl.experimental.gkd import GKDTrainer
        from trl.experimental.iw_opd import IWOPDTrainer
        from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

        for beta in BETAS:
            whole = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="none")
            found[f"whole {beta}"] = whole.sum(-1)
            found[f"tail {beta}"] = compute_divergence(add_tail_bucket(q), add_tail_bucket(p), beta)
            parts = [x - x.logsumexp(-1, keepdim=True) for x in (q, p)]
            found[f"renormalised {beta}"] = compute_divergence(*parts, beta)
        own = SimpleNamespace(
            temperature=1.0, iw_opd_gamma=0.5, iw_opd_epsilon=1e-8, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        found["iw-opd"] = IWOPDTrainer._compute_iw_opd_loss(own, student, tokens, tokens, actual_p.detach(), old)
    return {name: measured(value, student) for name, value in found.items()}


def trained(side: str, folder: Path, method: str, options: dict[str, Any]) -> dict[str, list[float]]:
    """Losses and gradients of three steps on answers of the dataset."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = importlib.import_module("posttrain" if side == "ours" else f"trl.experimental.{method.lower()}")
    rng = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(rng.choices(harness.WORDS, k=rng.randrange(4, 12)))},
                {"role": "assistant", "content": " ".join(rng.choices(harness.WORDS, k=rng.randrange(3, 9)))},
            ]
        }
        for _ in range(12)
    ]
    more: dict[str, Any] = {"lmbda": 0.0, "per_device_train_batch_size": 12, "gradient_checkpointing": False}
    more |= {"max_length": 256, "max_grad_norm": 1e9, "learning_rate": 1e-3} | options
    shared = harness.settings(3, **more)
    shared.pop("model_init_kwargs")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("policy", "reference")
    )
    trainer = getattr(library, f"{method}Trainer")(
        student,
        teacher,
        args=getattr(library, f"{method}Config")(**shared),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    log = harness.log_of(trainer)
    return {name: [float(entry[name]) for entry in log] for name in ("loss", "grad_norm")}


def side(name: str, folder: Path) -> dict[str, list[float]]:
    """Every number of one side."""
    found = functions(name)
    for run, (method, options) in RUNS.items():
        found |= {f"{run} {metric}": values for metric, values in trained(name, folder, method, options).items()}
    return found


def main() -> None:
    """Both sides, and the largest difference of each case."""
    sides = harness.both_sides(__file__, __doc__, build, side)
    if sides is None:
        return
    ours, peer = sides
    gaps = {
        case: max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(values, peer[case], strict=True))
        for case, values in ours.items()
    }
    print("\n".join(f"{case:24} {gap:.1e}" for case, gap in gaps.items()))
    harness.save("distillation_parity", {"relative_gaps": gaps, "ours": ours, "peer": peer})
    if wrong := {case: gap for case, gap in gaps.items() if not gap <= EXACT}:
        raise SystemExit(f"differences above {EXACT}: {wrong}")


if __name__ == "__main__":
    main()
