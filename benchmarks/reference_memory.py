"""What DPO's reference costs in memory: full training with its frozen copy, LoRA with a given copy, LoRA with the adapter off.

Prediction: a copy of SmolLM2-135M in float32 is 0.54 GB; with the adapter off there is none.
"""

from __future__ import annotations

import gc
import json
import sys

import harness

KINDS = ("full", "lora, given reference", "lora")


def run(kind: str, model: str) -> dict:
    """Two steps on one pair; bytes of all parameters alive and the process's peak."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from posttrain import DPOConfig, DPOTrainer
    from posttrain.models.load import create_model_from_path

    given = create_model_from_path(model, dtype="float32") if kind == "lora, given reference" else None
    adapter = None if kind == "full" else LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    row = {"prompt": "Name a colour.", "chosen": " Blue is one.", "rejected": " A colour is a name."}
    config = DPOConfig(**harness.settings(2, per_device_train_batch_size=1))
    data = Dataset.from_list([row] * 2)
    trainer = DPOTrainer(model, given, args=config, train_dataset=data, peft_config=adapter)
    trainer.train()
    gc.collect()
    alive = [item for item in gc.get_objects() if isinstance(item, torch.nn.Parameter)]
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in alive}
    return {"parameters_gb": round(sum(sizes.values()) / 1e9, 3), "peak_gb": round(harness.peak_memory(), 3)}


def main() -> None:
    """Each kind in a process of its own."""
    options = harness.parser(__doc__)
    options.add_argument("--kind", choices=KINDS, help="(child) what to measure")
    args = options.parse_args()
    model = args.model or harness.default_model()
    if args.kind:
        print(json.dumps(run(args.kind, model)))
        return
    found = {kind: harness.child(sys.executable, __file__, "--kind", kind, "--model", model) for kind in KINDS}
    for kind, memory in found.items():
        print(f"{kind:24} parameters {memory['parameters_gb']} GB, peak {memory['peak_gb']} GB")
    harness.save("reference_memory", {"memory": found})


if __name__ == "__main__":
    main()
