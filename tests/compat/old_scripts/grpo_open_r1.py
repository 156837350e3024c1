# now: GRPOTrainer("model", length_reward, GRPOConfig("now", **GROUPS, beta=0.04), train_dataset=prompts())
from dataclasses import dataclass, field
from typing import Optional

import trl
from datasets import load_dataset
from trl import GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


@dataclass
class GRPOConfig(trl.GRPOConfig):
    benchmarks: list[str] = field(default_factory=list)
    system_prompt: Optional[str] = None


@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["length"])


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


REWARDS = {"length": length_reward}


def main(script_args, training_args, model_args):
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[REWARDS[name] for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
    )
    trainer.train()
    return trainer


parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
trainer = main(*parser.parse_args_and_config(["--config", "grpo_open_r1.yaml"]))
