# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=16, dataset_text_field="body", packing=True), train_dataset=texts())
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    "out",
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=4,
    seed=7,
)
trainer = SFTTrainer(
    "model",
    config,
    train_dataset=load_dataset("json", data_files="texts.jsonl", split="train"),
    dataset_text_field="body",
    packing=True,
    max_seq_length=16,
    num_of_sequences=64,
    chars_per_token=3.6,
)
trainer.train()
