# now: PPOTrainer(PPOConfig("now", **PPO, run_name="old"), padded_tokenizer(), causal(), causal(), classifier(), prompts(), classifier())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.ppov2_trainer import PPOv2Config, PPOv2Trainer

config = PPOv2Config(
    exp_name="old",
    output_dir="out",
    total_episodes=16,
    response_length=8,
    num_ppo_epochs=1,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=8,
    seed=7,
)
tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")
tokenizer.pad_token = "<|endoftext|>"
trainer = PPOv2Trainer(
    config=config,
    tokenizer=tokenizer,
    policy=AutoModelForCausalLM.from_pretrained("model"),
    ref_policy=AutoModelForCausalLM.from_pretrained("model"),
    reward_model=AutoModelForSequenceClassification.from_pretrained("classifier"),
    value_model=AutoModelForSequenceClassification.from_pretrained("classifier"),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
