# now: DPOTrainer("model", None, DPOConfig("now", **BASE, beta=0.1, max_length=64), train_dataset=pairs(), peft_config=lora())
# %%
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

# %%
peft_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
training_args = DPOConfig(
    output_dir="out",
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=4,
    seed=7,
    no_cuda=True,
)
# %%
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained("model"),
    args=training_args,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=AutoTokenizer.from_pretrained("model"),
    peft_config=peft_config,
    beta=0.1,
    max_length=64,
)
trainer.train()
