"""Preference methods against the peer on one tiny model and the same pairs: step-1 loss, gradient norm and metrics of every
loss type, and 20-step curves of five methods. Differences that are deliberate are named with their reason; any other ends the
run with an error.
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import harness

DPO = {
    "sigmoid": {}, "hinge": {}, "ipo": {}, "exo_pair": {"label_smoothing": 0.1}, "nca_pair": {},
    "robust": {"label_smoothing": 0.1}, "bco_pair": {}, "sppo_hard": {}, "aot": {}, "aot_unpaired": {}, "apo_zero": {},
    "apo_down": {}, "discopop": {}, "sft": {}, "sigmoid_norm": {},
}  # fmt: skip
VARIANTS = {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence"},
    "ld_alpha": {"ld_alpha": 0.5},
    "wpo": {"use_weighting": True},
}
CURVES = {
    "sigmoid": ("DPO", {}), "ipo": ("DPO", {"loss_type": "ipo"}), "kto": ("KTO", {}), "orpo": ("ORPO", {}),
    "simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}),
}  # fmt: skip
# Each method's other losses, one step. The release has no BCO: its golden values are in tests/losses/test_unpaired.py.
STEPS = {
    "kto/apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "cpo/sigmoid": ("CPO", {}), "cpo/hinge": ("CPO", {"loss_type": "hinge"}), "cpo/ipo": ("CPO", {"loss_type": "ipo"}),
    "cpo/cpo-simpo": ("CPO", {"loss_type": "simpo", "beta": 2.0}),
    "cpo/alphapo": ("CPO", {"loss_type": "alphapo", "alpha": 0.25, "beta": 2.0}),
    "tpo/sigmoid": ("TPO", {}), "tpo/hinge": ("TPO", {"loss_type": "hinge"}), "tpo/ipo": ("TPO", {"loss_type": "ipo"}),
    "tpo/tpo-l": ("TPO", {"loss_type": "tpo-l", "beta": 2.0}),
    # Rows on which the two must differ, see DELIBERATE.
    "kto/same prompts": ("KTO", {"_rows": "same prompts"}), "orpo/no bos": ("ORPO", {"_rows": "no bos"}),
    "simpo/no bos": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "_rows": "no bos"}),
}  # fmt: skip
PAIR_METHODS = ("DPO", "CPO", "ORPO")
EXACT, METRIC = 1e-4, 1e-3  # Relative; metrics near 0 are differences of large sums.

# Where the two differ on purpose: what a case begins with, the metrics, and why (sections of the specification).
BOS = (
    "1.4: one pipeline for all methods, with the tokenizer's own rule for special tokens; the peer's older one puts a bos "
    "before every prompt"
)
DELIBERATE: list[tuple[str, tuple[str, ...], str]] = [
    ("kto/same prompts", ("*",), "3.6.3: a partner with the same prompt is no mismatch; the peer takes the neighbour"),
    ("orpo/no bos", ("*",), BOS),
    ("simpo/no bos", ("*",), BOS),
    (
        "cpo",
        ("logits/chosen", "logits/rejected"),
        "T32: over answer tokens; the peer's mean covers prompts and padding",
    ),
    ("orpo", ("logits/chosen", "logits/rejected"), "T32, likewise"),
    ("simpo", ("logits/chosen", "logits/rejected"), "T32, likewise"),
]


def rows(count: int) -> list[dict]:
    """Pairs of uneven lengths; no answer begins inside a token of its prompt."""
    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(harness.WORDS, k=rng.randrange(low, high)))

    return [
        {"prompt": words(6, 20), "chosen": " " + words(2, 12), "rejected": " " + words(2, 12)} for _ in range(count)
    ]


def build(folder: Path, tokenizer_of: str) -> None:
    """Two tiny models, a policy and a reference, with the real tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    for name, seed in (("policy", 0), ("reference", 1)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def examples(method: str, count: int, kind: str, bos: str) -> list[dict]:
    """Rows as a method wants them.

    Args:
        method: Its prefix.
        count: Pairs.
        kind: ``same prompts`` leaves both answers of a prompt side by side for KTO; ``no bos`` begins prompts without one.
        bos: What the legacy pipeline would put before a prompt.
    """
    data = rows(count)
    if method in ("ORPO", "CPO") and kind != "no bos":
        data = [row | {"prompt": bos + row["prompt"]} for row in data]
    if method in PAIR_METHODS:
        return data
    if method == "TPO":
        return [row | {"reference": other["chosen"]} for row, other in zip(data, data[1:] + data[:1], strict=True)]
    if kind == "same prompts":
        sides = [(row, side) for row in data for side in ("chosen", "rejected")]
    else:  # Both labels in every batch, and no prompt twice in one.
        sides = [(row, ("chosen", "rejected")[i % 2]) for i, row in enumerate(data)]
    return [{"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"} for row, side in sides]


def trained(library: object, folder: Path, method: str, steps: int, options: dict) -> dict:
    """The log of a short run: all numbers that are the same in every run."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, kind = library, options.get("_rows", "")
    options = {name: value for name, value in options.items() if name != "_rows"}
    if method not in ("DPO", "KTO") and library.__name__ == "trl":
        where = importlib.import_module(f"trl.experimental.{method.lower()}")
    common = harness.settings(steps, learning_rate=1e-3, gradient_checkpointing=False, per_device_train_batch_size=8)
    del common["model_init_kwargs"]
    config = getattr(where, f"{method}Config")(**common | {"train_sampling_strategy": "sequential"} | options)
    load = {"dtype": torch.float32}
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", **load)
    extra = {}
    if method in ("DPO", "KTO"):
        extra["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "reference", **load)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    data = Dataset.from_list(examples(method, 8 * steps, kind, tokenizer.bos_token))
    trainer = getattr(where, f"{method}Trainer")(
        policy, args=config, train_dataset=data, processing_class=tokenizer, **extra
    )
    trainer.train()
    log = harness.log_of(trainer)
    skipped = ("step_time", "epoch", "learning_rate", "total_flos")
    keys = [key for key, value in log[0].items() if isinstance(value, int | float | str) and key not in skipped]
    return {key: [float(entry[key]) for entry in log if key in entry] for key in keys}


def side(name: str, folder: Path) -> dict:
    """Every case on one side."""
    library = harness.import_side(name)
    found = {
        f"dpo/{loss}": trained(library, folder, "DPO", 1, {"loss_type": [loss], **options})
        for loss, options in DPO.items()
    }
    found |= {f"dpo/{name}": trained(library, folder, "DPO", 1, options) for name, options in VARIANTS.items()}
    found |= {name: trained(library, folder, method, 1, options) for name, (method, options) in STEPS.items()}
    return found | {name: trained(library, folder, method, 20, options) for name, (method, options) in CURVES.items()}


def reason(case: str, metric: str) -> str | None:
    """Why a difference is deliberate, or None."""
    for prefix, metrics, why in DELIBERATE:
        if (case == prefix or case.startswith(f"{prefix}/")) and ("*" in metrics or metric in metrics):
            return why
    return None


def compare(ours: dict, peer: dict) -> tuple[dict, list[dict], list[dict]]:
    """Largest relative difference of each case and metric; the deliberate and the unexplained ones with both values.

    Every number that both log is compared, over all steps of a curve.
    """
    gaps, deliberate, unexplained = {}, [], []
    for case, metrics in ours.items():
        for metric in sorted(set(metrics) & set(peer[case])):
            values, theirs = metrics[metric], peer[case][metric]
            pairs = list(zip(values, theirs, strict=False))
            gap = max(abs(a - b) / max(abs(b), 1e-2) for a, b in pairs)
            gaps[f"{case} {metric}"] = gap
            if len(values) == len(theirs) and gap <= (EXACT if metric in ("loss", "grad_norm") else METRIC):
                continue
            why = reason(case, metric)
            found = {
                "case": case,
                "metric": metric,
                "ours": values[0],
                "peer": theirs[0],
                "largest_gap": gap,
                "why": why,
            }
            (deliberate if why else unexplained).append(found)
    return gaps, deliberate, unexplained


def told(rows: list[dict]) -> str:
    """A table of differences, one a line."""
    return "\n".join(
        f"{r['case']:20} {r['metric']:20} ours {r['ours']:.6g} peer {r['peer']:.6g} gap {r['largest_gap']:.1e}  {r['why']}"
        for r in rows
    )


def main() -> None:
    """Both sides, and the table."""
    sides = harness.both_sides(__file__, __doc__, build, side)
    if sides is None:
        return
    ours, peer = sides
    gaps, deliberate, unexplained = compare(ours, peer)
    one_sided = {case: sorted(set(peer[case]) - set(ours[case])) for case in ours}
    print(f"deliberate:\n{told(deliberate)}")
    print(f"{len(gaps) - len(deliberate) - len(unexplained)} of {len(gaps)} numbers in {len(ours)} cases agree")
    print(f"only the peer logs: { ({case: names for case, names in one_sided.items() if names}) }")
    found = {"deliberate": deliberate, "unexplained": unexplained, "relative_gaps": gaps, "ours": ours, "peer": peer}
    harness.save("preference_parity", found)
    if unexplained:
        raise SystemExit(f"differences without a reason:\n{told(unexplained)}")


if __name__ == "__main__":
    main()
