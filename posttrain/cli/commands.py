"""Table of training commands with their trainers, descriptions and data arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Command:
    """Description of a training command in the table `TRAINING`.

    Attributes:
        method: Common prefix of the class names of the command's config and trainer, e.g. "GRPO".
        text: Description that ``posttrain --help`` shows.
        script_args: Name of the class in `posttrain.cli.train` that defines the command's data arguments.
        plugin: Entry point of the trainer class, if another package registers the command.
    """

    method: str
    text: str
    script_args: str = "ScriptArguments"
    plugin: EntryPoint | None = None

    @property
    def trainer(self) -> Any:
        """Trainer class of the command."""
        import posttrain

        return plugins.load(self.plugin) if self.plugin else getattr(posttrain, f"{self.method}Trainer")

    @property
    def config(self) -> Any:
        """Config class of the command's trainer."""
        return self.trainer.config_class

    @property
    def asks_servers(self) -> bool:
        """Whether the command can request completions from rollout servers."""
        return "vllm_server_base_url" in self.config.__dataclass_fields__


REWARDED, EPISODES, JUDGED, VALUED = (f"{name}ScriptArguments" for name in ("GRPO", "Episode", "Judged", "PPO"))
TRAINING: dict[str, Command] = {
    "sft": Command("SFT", "supervised fine-tuning"),
    "reward": Command("Reward", "outcome reward models, from preference pairs"),
    "dpo": Command("DPO", "direct preference optimization, from preference pairs"),
    "kto": Command("KTO", "alignment from answers labeled good or bad"),
    "bco": Command("BCO", "like kto, with the loss of a binary classifier"),
    "cpo": Command("CPO", "preference pairs without a reference model; also SimPO and AlphaPO"),
    "orpo": Command("ORPO", "supervised fine-tuning with an odds-ratio penalty on rejected answers"),
    "tpo": Command("TPO", "preference pairs and a gold answer"),
    "grpo": Command("GRPO", "group-relative policy optimization", EPISODES),
    "gmpo": Command("GMPO", "GRPO with geometric means of clipped ratios", EPISODES),
    "async-grpo": Command("AsyncGRPO", "GRPO with rollouts from other processes, concurrent with training", EPISODES),
    "a2po": Command("A2PO", "regression on optimal advantages, one completion per prompt", REWARDED),
    "rloo": Command(
        "RLOO", "policy gradient with the mean reward of a prompt's other completions as baseline", REWARDED
    ),
    "ppo": Command("PPO", "clipped policy gradients with a value function", VALUED),
    "online-dpo": Command("OnlineDPO", "DPO on pairs of sampled completions, which rewards or a judge compare", JUDGED),
    "distill": Command(
        "Distillation", "distillation of a teacher's next-token distributions on the student's own samples"
    ),
    "distillation": Command("Distillation", "same as distill (TRL's name)"),
    "server-distillation": Command("ServerDistillation", "like distill, with one or several teachers on servers"),
    "async-distillation": Command(
        "AsyncDistillation", "like distill, with rollouts from other processes, concurrent with training"
    ),
    "gkd": Command("GKD", "like distill, on the dataset's answers, the student's samples, or a mixture"),
    "gold": Command("GOLD", "like distill, with a teacher that has a different tokenizer"),
    "minillm": Command(
        "MiniLLM", "distillation with the reverse KL divergence from a teacher as reward of each token", REWARDED
    ),
    "iw-opd": Command("IWOPD", "like distill, with larger weights on early tokens"),
    "sdft": Command("SDFT", "self-distillation: the teacher is the student with a hint in the prompt"),
    "sdpo": Command(
        "SDPO", "self-distillation: the teacher is the student with a successful answer in the prompt", REWARDED
    ),
    "ssd": Command("SSD", "supervised fine-tuning on the model's own samples"),
}
for _name, _entry in plugins.entries("methods").items():
    TRAINING.setdefault(_name, Command(_name, f"trainer of the package {_entry.dist.name}", plugin=_entry))
