# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body"), train_dataset=texts())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


class LoggingTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


trainer = LoggingTrainer(
    model="model",
    tokenizer=AutoTokenizer.from_pretrained("model"),
    args=SFTConfig(
        "out",
        max_seq_length=6,
        dataset_text_field="body",
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
    train_dataset=load_dataset("json", data_files="texts.jsonl", split="train"),
)
trainer.train()
