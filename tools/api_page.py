"""Write docs/api/: one page per method with its trainer and config, one page per other part, and an index of all public names."""

from __future__ import annotations

from pathlib import Path

import posttrain

FOLDER = Path(__file__).parents[1] / "docs" / "api"
METHODS = {
    "sft": ("SFT", "SFT"), "reward": ("Reward models", "Reward"), "dpo": ("DPO", "DPO"), "kto": ("KTO", "KTO"), "bco": ("BCO", "BCO"),
    "cpo": ("CPO and SimPO", "CPO"), "orpo": ("ORPO", "ORPO"), "tpo": ("TPO", "TPO"), "grpo": ("GRPO", "GRPO"), "gmpo": ("GMPO", "GMPO"),
    "async_grpo": ("Asynchronous GRPO", "AsyncGRPO"), "rloo": ("RLOO", "RLOO"), "ppo": ("PPO", "PPO"),
    "online_dpo": ("Online DPO", "OnlineDPO"), "a2po": ("A*-PO", "A2PO"), "distillation": ("Distillation", "Distillation"),
    "server_distillation": ("Distillation from servers", "ServerDistillation"), "gkd": ("GKD", "GKD"),
    "async_distillation": ("Asynchronous distillation", "AsyncDistillation"), "gold": ("GOLD", "GOLD"), "minillm": ("MiniLLM", "MiniLLM"), "iw_opd": ("IW-OPD", "IWOPD"),
    "sdft": ("SDFT", "SDFT"), "sdpo": ("SDPO", "SDPO"), "ssd": ("SSD", "SSD"),
}  # fmt: skip
PARTS = {
    "shared": ("Shared by all trainers", ("loop", "methods", "trainers", "fields", "values")),
    "types": ("Types, errors, metrics", ("types", "errors", "metrics")),
    "data": ("Data", ("data",)),
    "models": ("Models", ("models",)),
    "losses": ("Losses", ("losses",)),
    "rollouts": (
        "Rollouts and servers",
        (
            "rollouts",
            "extensions.agents",
            "extensions.asynchronous",
            "extensions.serve",
            "extensions.server",
            "extensions.vllm",
        ),
    ),
    "rewards": ("Rewards", ("rewards", "extensions.rewards")),
    "checks": ("Checks and reports", ("checks", "report", "cli")),
    "helpers": ("Helpers", ("extensions.trl_helpers", "integrations")),
}
OPTIONS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
# Only the constructor. Inherited methods are on the page of shared parts.
TRAINER = "    options:\n      members: []\n      heading_level: 2"
CONFIG = (
    "    options:\n      heading_level: 2\n      show_signature: false\n      show_if_no_docstring: false\n"
    "      inherited_members: true\n      filters: ['!^_']"
)
SHOWN = "    options:\n      heading_level: 2"


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    public, taken, found = posttrain._PUBLIC, set(), {}
    for file, (title, stem) in METHODS.items():
        parts = [f"# {title}"]
        for name, options in ((f"{stem}Trainer", TRAINER), (f"{stem}Config", CONFIG)):
            parts.append(f"::: posttrain.{public[name]}.{name}\n{options}")
            taken.add(name)
        parts.insert(
            2,
            f"All options of the config, including the options shared by all trainers. The config also accepts the [options of transformers]({OPTIONS}).",
        )
        found[f"{file}.md"] = "\n\n".join(parts) + "\n"
    for file, (title, layers) in PARTS.items():
        names = sorted(
            (m, n)
            for n, m in public.items()
            if n not in taken and f"{m}.".startswith(tuple(f"{layer}." for layer in layers))
        )
        taken |= {name for _, name in names}
        parts = [
            f"# {title}",
            *(f"::: posttrain.{m}.{n}\n{CONFIG if n.endswith('Config') else SHOWN}" for m, n in names),
        ]
        found[f"{file}.md"] = "\n\n".join(parts) + "\n"
    assert not set(public) - taken, set(public) - taken
    lines = [f"| [{title}]({file}.md) | `{stem}Trainer`, `{stem}Config` |" for file, (title, stem) in METHODS.items()]
    lines += [f"| [{title}]({file}.md) | {', '.join(layers)} |" for file, (title, layers) in PARTS.items()]
    intro = "# API\n\nAll public names can be imported from `posttrain`. They are loaded on first use.\n\n| page | contents |\n|---|---|\n"
    return {"index.md": intro + "\n".join(lines) + "\n", **found}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
