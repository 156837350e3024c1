"""What `posttrain estimate` says against what a run really took, in processes of their own.

Measured is the most memory the process ever held (VmHWM) less what it held before the trainer was made: interpreter,
libraries, tokenizer and data. The estimate leaves these out too (``process=0``).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

LLAMA = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "vocab_size": 6000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 6,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
NEOX = {
    "vocab_size": 20000, "hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 8,
    "num_attention_heads": 10, "tie_word_embeddings": False,
}  # fmt: skip
RANDOM = {"llama-58m": ("llama", LLAMA), "qwen2-95m": ("qwen2", QWEN2), "neox-65m": ("gpt_neox", NEOX)}
PROMPT, ANSWER, SAMPLED = 120, 60, 32
CASES = {
    "sft": ("sft", {}),
    "sft, nothing recomputed": ("sft", {"gradient_checkpointing": False}),
    "sft, one pass a step": ("sft", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}),
    "sft, adafactor": ("sft", {"optim": "adafactor"}),
    "sft, LoRA": ("sft", {"lora": 16}),
    "sft, QLoRA": ("sft", {"lora": 16, "four_bits": True}),  # Where bitsandbytes is.
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "dpo, LoRA": ("dpo", {"lora": 16}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "grpo": ("grpo", {}),
    "ppo": ("ppo", {}),
}
EVERYWHERE = ("sft", "dpo")  # On all models; the others on the default one.


def rss(field: str) -> int:
    """Bytes of this process, ``VmRSS`` or ``VmHWM``."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def build(name: str) -> tuple[Any, Any]:
    """A folder's model, by its path, or one of `RANDOM`; and a tokenizer of whole words for these."""
    import transformers

    if name not in RANDOM:
        return name, transformers.AutoTokenizer.from_pretrained(name)
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind, settings = RANDOM[name]
    words = ["[UNK]", "<s>", "</s>", *harness.WORDS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = transformers.AutoConfig.for_model(kind, **settings, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return config, tokenizer


def rows(method: str, count: int) -> list[dict[str, Any]]:
    """Examples of one length, so that the longest is every one."""
    rng = random.Random(0)

    def words(size: int) -> str:
        return " ".join(rng.choices(harness.WORDS, k=size))

    made = []
    for number in range(count):
        prompt, answer = words(PROMPT), " " + words(ANSWER - 1)
        if method == "sft":
            made.append({"text": prompt + answer})
        elif method == "kto":
            made.append({"prompt": prompt, "completion": answer, "label": number % 2 == 0})
        elif method in ("grpo", "ppo"):
            made.append({"prompt": prompt})
        else:
            made.append({"prompt": prompt, "chosen": answer, "rejected": " " + words(ANSWER - 1)})
    return made


def settings_of(method: str, given: dict[str, Any], folder: str) -> dict[str, Any]:
    """Options of a run of two steps."""
    base = harness.settings(2) | {"output_dir": folder, "per_device_train_batch_size": 4, "learning_rate": 1e-6}
    base |= {"gradient_accumulation_steps": 2}
    if method == "grpo":
        base |= {"per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.04, "max_completion_length": SAMPLED}
        base |= {"gradient_accumulation_steps": 1}
    if method == "ppo":
        base |= {"response_length": SAMPLED, "num_ppo_epochs": 1}
    return base | given


def lengths_of(method: str, args: Any, tokenizer: Any) -> Any:
    """What the data really has."""
    from posttrain.checks.memory import Lengths

    prompt = len(tokenizer(" ".join(harness.WORDS[:1] * PROMPT)).input_ids)
    if method == "sft":
        return Lengths(0, prompt + ANSWER)
    return Lengths(prompt, SAMPLED if method in ("grpo", "ppo") else ANSWER)


def packing(wanted: bool) -> Any:
    """4-bit weights whose products are in float32, as a CPU is fastest with."""
    import torch
    import transformers

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **options) if wanted else None


def prepare(method: str, model: Any, tokenizer: Any, given: dict[str, Any], folder: str) -> tuple[Any, Any, Any]:
    """Config, adapter, and a function that makes the trainer."""
    import datasets
    import peft
    import transformers

    import posttrain

    given = dict(given)
    rank, packed = given.pop("lora", None), packing(given.pop("four_bits", False))
    task = "SEQ_CLS" if method == "reward" else "CAUSAL_LM"
    lora = peft.LoraConfig(r=rank, task_type=task, target_modules="all-linear") if rank else None
    name = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO", "reward": "Reward", "ppo": "PPO", "kto": "KTO", "orpo": "ORPO"}
    args = getattr(posttrain, f"{name[method]}Config")(**settings_of(method, given, folder))
    data = datasets.Dataset.from_list(rows(method, 48))
    kind = transformers.AutoModelForSequenceClassification if method == "reward" else transformers.AutoModelForCausalLM

    def short(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    def make(model: Any = model, args: Any = args) -> Any:
        policy = model
        if not isinstance(model, str):
            policy = kind.from_config(model, **({"num_labels": 1} if method == "reward" else {}))
            args.model_init_kwargs = None
        common = {"args": args, "train_dataset": data, "processing_class": tokenizer}
        common["peft_config"] = copy.deepcopy(lora)  # peft writes the layers of a model into it.
        if packed is not None and isinstance(policy, str):
            common["quantization_config"] = packed
        if method == "grpo":
            common["reward_funcs"] = short
        if method == "ppo":
            common["reward_model"] = short
        return getattr(posttrain, f"{name[method]}Trainer")(model=policy, **common)

    return args, lora, make


def warm_up(model: Any, args: Any, make: Any) -> None:
    """A step of a model of two narrow layers, so that libraries are loaded and their pages touched."""
    import ctypes
    import gc

    import transformers

    config = transformers.AutoConfig.from_pretrained(model) if isinstance(model, str) else copy.deepcopy(model)
    config.update({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2})
    config.update({"num_key_value_heads": 2, "head_dim": 32})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    short = copy.deepcopy(args)
    short.max_steps = 1
    make(config, short).train()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def one(name: str, case: str) -> dict[str, Any]:
    """Measure and estimate one case, in this process."""
    import transformers

    from posttrain.checks.memory import plan
    from posttrain.models.memory_estimate import estimate_memory
    from posttrain.models.quantised import weight_bits

    method, given = CASES[case]
    model, tokenizer = build(name)
    with tempfile.TemporaryDirectory() as folder:
        args, lora, make = prepare(method, model, tokenizer, given, folder)
        warm_up(model, args, make)
        Path("/proc/self/clear_refs").write_text("5")
        before = rss("VmRSS")
        trainer = make()
        built = rss("VmHWM") - before
        trainer.train()
        measured = rss("VmHWM") - before
        config = transformers.AutoConfig.from_pretrained(model) if isinstance(model, str) else model
        bits = weight_bits(packing(given.get("four_bits", False)))
        work = plan(
            trainer.METHOD(args), config, lengths=lengths_of(method, args, tokenizer), peft_config=lora, bits=bits
        )
        found = estimate_memory(work)
    return {
        "model": Path(name).name, "case": case, "measured_mb": round(measured / 1e6), "after_loading_mb": round(built / 1e6),
        "estimate_mb": round(found.peak / 1e6), "error": round(found.peak / measured - 1, 3),
        "moment": found.fullest, "components_mb": {k: round(v / 1e6) for k, v in found.components.items()},
        "moments_mb": {k: round(sum(v.values()) / 1e6) for k, v in found.moments.items()},
    }  # fmt: skip


def main() -> None:
    """A table, and the result file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", help="folder or hub id; by default the model of `posttrain demo`")
    options.add_argument("--only", nargs="*", help="cases, by the end of MODEL/CASE")
    options.add_argument("--one", nargs=2, metavar=("MODEL", "CASE"), help="(child) one case")
    args = options.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    default = args.model or harness.default_model()
    wanted = [(default, case) for case in CASES] + [(name, case) for name in RANDOM for case in EVERYWHERE]
    path = harness.RESULTS / "estimate.json"
    found = {(row["model"], row["case"]): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for name, case in wanted:
        if CASES[case][1].get("four_bits") and importlib.util.find_spec("bitsandbytes") is None:
            continue
        if args.only and not f"{Path(name).name}/{case}".endswith(tuple(args.only)):
            continue
        row = harness.child(sys.executable, __file__, "--one", name, case)
        found[row["model"], row["case"]] = row
        said = f"{row['estimate_mb']:6} MB estimated, {row['measured_mb']:6} MB measured ({100 * row['error']:+.0f} %)"
        print(f"{row['model']:24} {row['case']:26} {said}  {row['components_mb']}", flush=True)
        worst = max(abs(row["error"]) for row in found.values())
        harness.save(
            "estimate", {"worst_error": worst, "rows": list(found.values())}
        )  # Cases may be measured one by one.


if __name__ == "__main__":
    main()
