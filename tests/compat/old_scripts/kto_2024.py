# now: KTOTrainer("model", None, KTOConfig("now", **BASE, desirable_weight=1.5, max_length=64), train_dataset=judged())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer, ModelConfig, ScriptArguments

model_args = ModelConfig(model_name_or_path="model", torch_dtype="float32", trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(
    model_args.model_name_or_path, trust_remote_code=model_args.trust_remote_code
)
ref_model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.torch_dtype)
kto_trainer = KTOTrainer(
    model,
    ref_model,
    args=KTOConfig(
        "out",
        desirable_weight=1.5,
        max_length=64,
        is_encoder_decoder=False,
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
    train_dataset=load_dataset("json", data_files="judged.jsonl", split="train"),
    tokenizer=AutoTokenizer.from_pretrained("model"),
)
trainer = kto_trainer
kto_trainer.train()
