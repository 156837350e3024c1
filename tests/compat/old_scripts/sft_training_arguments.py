# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body"), train_dataset=texts())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer

dataset = load_dataset("json", data_files="texts.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
training_arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    save_strategy="no",
    report_to="none",
    seed=7,
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=model,
    train_dataset=dataset,
    dataset_text_field="body",
    max_seq_length=6,
    tokenizer=tokenizer,
    args=training_arguments,
    packing=False,
)
trainer.train()
