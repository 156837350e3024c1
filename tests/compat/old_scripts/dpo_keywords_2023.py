# now: DPOTrainer("model", None, DPOConfig("now", **BASE, beta=0.3, max_length=64), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import DPOTrainer, create_reference_model

model = AutoModelForCausalLM.from_pretrained("model")
model_ref = create_reference_model(model)
tokenizer = AutoTokenizer.from_pretrained("model")
training_args = TrainingArguments(
    per_device_train_batch_size=4,
    max_steps=2,
    remove_unused_columns=False,
    learning_rate=1e-2,
    logging_steps=1,
    output_dir="out",
    report_to="none",
    save_strategy="no",
    seed=7,
    disable_tqdm=True,
)
dpo_trainer = trainer = DPOTrainer(
    model,
    model_ref,
    args=training_args,
    beta=0.3,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=tokenizer,
    max_length=64,
    generate_during_eval=False,
)
dpo_trainer.train()
