# now: DPOTrainer("model", None, DPOConfig("now", **BASE, beta=0.2, max_length=64, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

args = DPOConfig(
    output_dir="out",
    beta=0.2,
    rpo_alpha=0.5,  # Iterative reasoning preference optimization
    max_length=64,
    max_prompt_length=None,
    reference_free=False,
    label_pad_token_id=-100,
    is_encoder_decoder=False,
    force_use_ref_model=False,
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
)
trainer = DPOTrainer(
    "model",
    ref_model=None,
    args=args,
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    tokenizer=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
