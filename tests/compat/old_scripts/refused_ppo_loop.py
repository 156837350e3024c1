# refused: AutoModelForCausalLMWithValueHead.*PPOTrainer, which puts a value head
import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import respond_to_batch

config = PPOConfig(model_name="model", learning_rate=1.41e-5, batch_size=4, mini_batch_size=2, log_with="wandb")
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
ppo_trainer = PPOTrainer(config, model, None, tokenizer, dataset=[])
for batch in ppo_trainer.dataloader:
    response_tensors = respond_to_batch(model, batch["input_ids"])
    stats = ppo_trainer.step(batch["input_ids"], response_tensors, [torch.tensor(1.0)])
