# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body", warmup_steps=0.5), train_dataset=texts())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
args = SFTConfig(
    output_dir="out",
    max_seq_length=6,
    dataset_text_field="body",
    evaluation_strategy="no",
    overwrite_output_dir=True,
    logging_dir="logs",
    warmup_ratio=0.5,  # half of the steps
    use_liger=False,
    save_safetensors=True,
    bf16=False,
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
    "model", args=args, train_dataset=load_dataset("json", data_files="texts.jsonl", split="train"), tokenizer=tokenizer
)
trainer.train()
