# now: ORPOTrainer("model", ORPOConfig("now", **BASE, beta=0.1, max_length=64), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ORPOConfig, ORPOTrainer

orpo_args = ORPOConfig(
    learning_rate=1e-2,
    beta=0.1,
    max_length=64,
    label_pad_token_id=-100,
    per_device_train_batch_size=4,
    max_steps=2,
    evaluation_strategy="no",
    logging_steps=1,
    report_to="none",
    output_dir="out",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    seed=7,
)
trainer = ORPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    args=orpo_args,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
