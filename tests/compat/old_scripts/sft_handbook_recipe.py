# now: SFTTrainer("model", SFTConfig("now", **BASE, max_length=6, dataset_text_field="body"), train_dataset=texts())
"""Supervised fine-tuning from a recipe, in the style of the handbook."""

from datasets import load_dataset
from transformers import AutoTokenizer, set_seed
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(["--config", "sft_handbook_recipe.yaml"])
    set_seed(training_args.seed)
    quantization_config = get_quantization_config(model_args)
    model_kwargs = dict(
        revision=model_args.model_revision,
        trust_remote_code=model_args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.torch_dtype,
        use_cache=False if training_args.gradient_checkpointing else True,
        device_map=get_kbit_device_map() if quantization_config is not None else None,
    )
    training_args.model_init_kwargs = {
        name: value for name, value in model_kwargs.items() if name in ("dtype", "revision")
    }
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        tokenizer=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    return trainer


trainer = main()
