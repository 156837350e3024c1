# now: OnlineDPOTrainer("model", reward_funcs=length_reward, args=OnlineDPOConfig("now", **PAIRED), train_dataset=prompts(), processing_class=tokenizer())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import OnlineDPOConfig, OnlineDPOTrainer


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = OnlineDPOConfig(
    output_dir="out",
    max_new_tokens=8,
    dataset_num_proc=1,
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
trainer = OnlineDPOTrainer(
    model="model",
    reward_model=length_reward,
    args=args,
    tokenizer=AutoTokenizer.from_pretrained("model"),
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
