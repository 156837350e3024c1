# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body"), train_dataset=texts())
import trl
from datasets import load_dataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.commands.cli_utils import TrlParser
from trl.import_utils import is_peft_available
from trl.core import set_seed

set_seed(7)
assert is_peft_available() and TrlParser is not None
args = SFTConfig(
    output_dir="out",
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
)
trainer: trl.SFTTrainer = SFTTrainer(
    model="model", args=args, train_dataset=load_dataset("json", data_files="texts.jsonl", split="train")
)
trainer.train()
