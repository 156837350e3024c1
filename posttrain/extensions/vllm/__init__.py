"""vLLM as engine in the trainer's process, and the command `posttrain vllm-serve`, which starts vLLM's server."""
