# now: chatml_trainer()
# %%
!pip install -q trl
# %%
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, setup_chat_format

device = "cpu"
# %%
model = AutoModelForCausalLM.from_pretrained("model").to(device)
tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.chat_template = None
model, tokenizer = setup_chat_format(model=model, tokenizer=tokenizer)
# %%
ds = load_dataset("json", data_files="chats.jsonl", split="train")
sft_config = SFTConfig(
    output_dir="out",
    max_steps=2,  # Adjust to the size of the data
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    evaluation_strategy="no",
    use_mps_device=False,  # True on a Mac
    report_to="none",
    bf16=False,
    seed=7,
    disable_tqdm=True,
)
# %%
trainer = SFTTrainer(
    model=model,
    args=sft_config,
    train_dataset=ds,
    tokenizer=tokenizer,
)
trainer.train()
