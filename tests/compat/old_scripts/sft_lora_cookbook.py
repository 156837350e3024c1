# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body", gradient_checkpointing=True), train_dataset=texts(), peft_config=lora())
# Fine-tune with LoRA, as blog posts on Gemma and Llama do.
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("model", device_map=None)
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.padding_side = "right"
peft_config = LoraConfig(
    lora_alpha=8, lora_dropout=0.0, r=4, bias="none", target_modules="all-linear", task_type="CAUSAL_LM"
)
args = SFTConfig(
    output_dir="out",
    max_seq_length=6,
    packing=False,
    max_steps=2,
    per_device_train_batch_size=4,
    gradient_checkpointing=True,
    logging_steps=1,
    save_strategy="no",
    learning_rate=1e-2,
    bf16=False,
    max_grad_norm=1.0,
    push_to_hub=False,
    report_to="none",
    seed=7,
    disable_tqdm=True,
    dataset_text_field="body",
    dataset_kwargs={"skip_prepare_dataset": False},
)
args.remove_unused_columns = True
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files="texts.jsonl", split="train"),
    peft_config=peft_config,
    tokenizer=tokenizer,
)
trainer.train()
