"""vLLM in the trainer's process, and the command `posttrain vllm-serve`."""
