# now: GRPOTrainer("model", length_reward, GRPOConfig("now", **GROUPS, warmup_steps=0.5, optim="adamw_torch"), train_dataset=prompts())
# %%
!pip install trl vllm
# %%
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

max_prompt_length = 256


def length_reward(completions, **kwargs) -> list[float]:
    return [float(len(completion)) for completion in completions]
# %%
training_args = GRPOConfig(
    learning_rate = 1e-2,
    warmup_ratio = 0.5,
    optim = "adamw_torch",
    logging_steps = 1,
    per_device_train_batch_size = 8,
    num_generations = 4,  # Decrease if out of memory
    max_prompt_length = max_prompt_length,
    max_completion_length = 8,
    max_steps = 2,
    save_strategy = "no",
    report_to = "none",  # Can use Weights & Biases
    output_dir = "out",
    bf16 = False,
    seed = 7,
    disable_tqdm = True,
)
# %%
trainer = GRPOTrainer(
    model = "model",
    reward_funcs = [length_reward],
    args = training_args,
    train_dataset = load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
