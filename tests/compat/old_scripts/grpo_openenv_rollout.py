# now: GRPOTrainer("model", length_reward, GRPOConfig("now", **GROUPS), train_dataset=prompts(), rollout_func=fixed_rollouts)
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def rollout_func(prompts, trainer):
    tokenizer = trainer.processing_class
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    completion_ids = [[5 + index, 6, 7] for index in range(len(prompts))]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": None,
        "env_reward": [float(i) for i in range(len(prompts))],
    }


def env_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    "out",
    vllm_guided_decoding_regex=None,
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    seed=7,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=8,
)
trainer = GRPOTrainer(
    "model",
    env_reward,
    args,
    load_dataset("json", data_files="prompts.jsonl", split="train"),
    rollout_func=rollout_func,
)
trainer.train()
