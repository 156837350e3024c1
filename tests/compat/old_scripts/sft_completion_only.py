# now: SFTTrainer("model", SFTConfig("now", **BASE), train_dataset=texts().map(lambda row: {"prompt": "Q: " + row["body"] + "\n### Answer:\n", "completion": row["body"]}, remove_columns="body"))
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="texts.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")


def formatting_func(example):
    return "Q: " + example["body"] + "\n### Answer:\n" + example["body"]


response_template_ids = tokenizer.encode("### Answer:\n", add_special_tokens=False)
collator = DataCollatorForCompletionOnlyLM(response_template_ids, tokenizer=tokenizer)
trainer = SFTTrainer(
    model,
    train_dataset=dataset,
    args=SFTConfig(
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
    ),
    formatting_func=formatting_func,
    data_collator=collator,
    tokenizer=tokenizer,
)
trainer.train()
