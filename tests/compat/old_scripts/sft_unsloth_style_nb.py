# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body", warmup_steps=1, weight_decay=0.01, lr_scheduler_type="linear"), train_dataset=texts(), peft_config=lora())
# %%
%%capture
!pip install trl
# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model

max_seq_length = 6  # Choose any
model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
# %%
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))
# %%
from datasets import load_dataset
dataset = load_dataset("json", data_files="texts.jsonl", split="train")
# %%
from trl import SFTTrainer
from transformers import TrainingArguments
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = dataset,
    dataset_text_field = "body",
    max_seq_length = max_seq_length,
    packing = False,  # Can make training faster for short sequences.
    args = TrainingArguments(
        per_device_train_batch_size = 4,
        warmup_steps = 1,
        max_steps = 2,
        learning_rate = 1e-2,
        logging_steps = 1,
        weight_decay = 0.01,
        lr_scheduler_type = "linear",
        seed = 7,
        output_dir = "out",
        report_to = "none",  # Use this for WandB etc
        save_strategy = "no",
        disable_tqdm = True,
    ),
)
# %%
trainer_stats = trainer.train()
