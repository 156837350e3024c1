#!/usr/bin/env bash
# One node with eight GPUs: two serve, six train.
set -euo pipefail
model=${1:-Qwen/Qwen2.5-7B}
port=${PORT:-8000}

CUDA_VISIBLE_DEVICES=6,7 posttrain vllm-serve --model "$model" --tensor-parallel-size 2 --port "$port" --max-model-len 4096 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 posttrain grpo --num_processes 6 --mixed_precision bf16 \
  --config examples/configs/grpo.yaml --model_name_or_path "$model" \
  --use_vllm true --vllm_mode server --vllm_server_base_url "http://127.0.0.1:$port" --output_dir runs/grpo-node
