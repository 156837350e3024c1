# now: CPOTrainer("model", CPOConfig("now", **BASE, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.3, max_length=64), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl.trainer.cpo_config import CPOConfig
from trl.trainer.cpo_trainer import CPOTrainer

config = CPOConfig(
    "out",
    loss_type="simpo",
    cpo_alpha=0.0,
    simpo_gamma=0.3,
    max_length=64,
    max_prompt_length=None,
    max_target_length=None,
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
trainer = CPOTrainer(
    "model",
    config,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
