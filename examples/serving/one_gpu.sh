#!/usr/bin/env bash
# One machine, one GPU or none: a rollout server and a trainer side by side.
# With a GPU, both need their share of it: the trainer then better generates in its own process (leave vllm_mode alone).
set -euo pipefail
model=${1:-HuggingFaceTB/SmolLM2-135M-Instruct}
port=${PORT:-8000}

posttrain serve --model "$model" --port "$port" --max_model_len 2048 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT

posttrain grpo --config examples/configs/grpo.yaml --model_name_or_path "$model" \
  --use_vllm true --vllm_mode server --vllm_server_base_url "http://127.0.0.1:$port" --output_dir runs/grpo-server
