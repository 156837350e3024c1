# now: RLOOTrainer("model", length_reward, RLOOConfig("now", **GROUPS, beta=0.1, epsilon=0.3, num_iterations=1, run_name="old"), train_dataset=prompts())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


config = RLOOConfig(
    exp_name="old",
    output_dir="out",
    rloo_k=4,
    kl_coef=0.1,
    cliprange=0.3,
    num_ppo_epochs=1,
    response_length=8,
    token_level_kl=False,
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=8,
    seed=7,
)
policy = AutoModelForCausalLM.from_pretrained("model")
ref_policy = AutoModelForCausalLM.from_pretrained("model")
trainer = RLOOTrainer(
    config=config,
    tokenizer=AutoTokenizer.from_pretrained("model"),
    policy=policy,
    ref_policy=ref_policy,
    reward_model=length_reward,
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
