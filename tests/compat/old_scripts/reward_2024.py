# now: RewardTrainer(classifier(), RewardConfig("now", **BASE, max_length=64), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForSequenceClassification.from_pretrained("classifier", num_labels=1)
trainer = RewardTrainer(
    model=model,
    tokenizer=tokenizer,
    args=RewardConfig(
        "out",
        evaluation_strategy="no",
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
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    max_length=64,
)
trainer.train()
