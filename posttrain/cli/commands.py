"""The training commands, each once: which trainer, what it is for, and what says on which data it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """One training command.

    Attributes:
        method: What the public names of its config and its trainer begin with.
        text: What it is for, in ``posttrain --help``.
        script_args: Name of its arguments' class in `posttrain.cli.train`.
    """

    method: str
    text: str
    script_args: str = "ScriptArguments"

    @property
    def trainer(self) -> Any:
        """The class of its trainer."""
        import posttrain

        return getattr(posttrain, f"{self.method}Trainer")

    @property
    def config(self) -> Any:
        """The class of its config."""
        import posttrain

        return getattr(posttrain, f"{self.method}Config")

    @property
    def asks_servers(self) -> bool:
        """Whether rollout servers can generate for it."""
        return "vllm_server_base_url" in self.config.__dataclass_fields__


REWARDED, EPISODES, JUDGED, VALUED = (f"{name}ScriptArguments" for name in ("GRPO", "Episode", "Judged", "PPO"))
TRAINING: dict[str, Command] = {
    "sft": Command("SFT", "supervised fine-tuning"),
    "reward": Command("Reward", "outcome reward models, from preference pairs"),
    "dpo": Command("DPO", "direct preference optimisation, from preference pairs"),
    "kto": Command("KTO", "from answers judged good or bad"),
    "bco": Command("BCO", "the same, by a binary classifier's loss"),
    "cpo": Command("CPO", "pairs without a reference model; SimPO and AlphaPO too"),
    "orpo": Command("ORPO", "supervised fine-tuning with an odds-ratio penalty on rejected answers"),
    "tpo": Command("TPO", "pairs and a gold answer"),
    "grpo": Command("GRPO", "group-relative policy optimisation", EPISODES),
    "gmpo": Command("GMPO", "GRPO with geometric means of clipped ratios", EPISODES),
    "async-grpo": Command("AsyncGRPO", "GRPO on rollouts that other processes write while it trains", EPISODES),
    "a2po": Command("A2PO", "regression on optimal advantages, one completion a prompt", REWARDED),
    "rloo": Command("RLOO", "policy gradients against the mean of a prompt's other completions", REWARDED),
    "ppo": Command("PPO", "clipped policy gradients with a value function", VALUED),
    "online-dpo": Command("OnlineDPO", "DPO on pairs of the policy's own completions, by rewards or a judge", JUDGED),
    "distill": Command("Distillation", "learn a teacher's next-token distributions, on the student's own samples"),
    "distillation": Command("Distillation", "the same command by TRL's name"),
    "server-distillation": Command("ServerDistillation", "the same from teachers that servers hold, one or several"),
    "async-distillation": Command(
        "AsyncDistillation", "the same on rollouts that other processes write while it trains"
    ),
    "gkd": Command("GKD", "the same on the dataset's answers, or a mixture of both"),
    "gold": Command("GOLD", "the same from a teacher with another tokenizer"),
    "minillm": Command("MiniLLM", "the reverse KL to a teacher as a reward of each token", REWARDED),
    "iw-opd": Command("IWOPD", "the same with more weight on early tokens"),
    "sdft": Command("SDFT", "the student with a hint is its own teacher"),
    "sdpo": Command("SDPO", "the student that saw a success is its own teacher", REWARDED),
    "ssd": Command("SSD", "supervised fine-tuning on the model's own samples"),
}
