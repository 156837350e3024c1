# now: GKDTrainer("model", "teacher", GKDConfig("now", **BASE, lmbda=0.0, max_length=64), train_dataset=chats())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GKDConfig, GKDTrainer

args = GKDConfig(
    output_dir="out",
    lmbda=0.0,
    max_seq_length=64,
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
trainer = GKDTrainer(
    model="model",
    teacher_model="teacher",
    args=args,
    tokenizer=AutoTokenizer.from_pretrained("model"),
    train_dataset=load_dataset("json", data_files="chats.jsonl", split="train"),
)
trainer.train()
