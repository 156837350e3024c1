# now: DPOTrainer("model", None, DPOConfig("now", **BASE, beta=0.05, max_length=64, loss_type=["hinge"]), train_dataset=pairs())
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser
from trl.commands.cli_utils import DPOScriptArguments

parser = TrlParser((DPOScriptArguments, DPOConfig, ModelConfig))
args, training_args, model_config = parser.parse_args_and_config(
    ["--config", "dpo_handbook_recipe.yaml", "--beta", "0.05"]
)
model = AutoModelForCausalLM.from_pretrained(model_config.model_name_or_path, dtype=model_config.torch_dtype)
tokenizer = AutoTokenizer.from_pretrained(model_config.model_name_or_path)
trainer = DPOTrainer(
    model,
    None,
    args=training_args,
    train_dataset=load_dataset("json", data_files=args.dataset_name)["train"],
    tokenizer=tokenizer,
)
trainer.train()
