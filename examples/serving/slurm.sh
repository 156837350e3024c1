#!/usr/bin/env bash
#SBATCH --job-name=posttrain-grpo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
# Three nodes: two train, the last one serves. The token keeps others of the cluster from replacing the weights; servers
# and trainers read it from the environment. Checkpoints (--save_steps) are what a requeued job goes on from.
set -euo pipefail
: "${SLURM_JOB_ID:?start it with sbatch}" "${SLURM_JOB_NODELIST:?}" "${SLURM_CPUS_PER_TASK:?}"
model=${MODEL:-Qwen/Qwen2.5-7B}
port=${PORT:-8000}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
serving=${nodes[-1]}
training=("${nodes[@]:0:${#nodes[@]}-1}")
POSTTRAIN_API_KEY=$(head -c 32 /dev/urandom | base64 | tr -d '\n=')
export POSTTRAIN_API_KEY
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it over from sbatch by itself.

code=0
trap 'code=75' TERM # Two minutes before the time limit.

srun --nodes=1 --ntasks=1 --nodelist="$serving" --exact \
  posttrain vllm-serve --model "$model" --tensor-parallel-size 8 --host 0.0.0.0 --port "$port" \
  --weight-transfer-config '{"backend": "nccl"}' &
server=$!

# shellcheck disable=SC2016  # Each node puts in its own rank.
srun --nodes="${#training[@]}" --ntasks="${#training[@]}" --nodelist="$(IFS=,; echo "${training[*]}")" --exact \
  bash -c 'posttrain grpo --config examples/configs/grpo.yaml --model_name_or_path "$1" \
    --num_machines "$SLURM_STEP_NUM_NODES" --num_processes "$((8 * SLURM_STEP_NUM_NODES))" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$0" --main_process_port 29500 --mixed_precision bf16 \
    --use_vllm true --vllm_mode server --vllm_server_base_url "http://$2:$3" --vllm_server_timeout 900 \
    --output_dir runs/grpo-slurm --resume_from_checkpoint auto' \
  "${training[0]}" "$model" "$serving" "$port" &
trainer=$!

# The first that ends decides: a trainer that waits for a dead server would hold the nodes for nothing.
wait -n "$server" "$trainer" || {
  ended=$?
  if [[ $code -eq 0 ]]; then code=$ended; fi
}
kill "$server" "$trainer" 2>/dev/null || true
wait || true
# 75 says: temporary, the same job may be started again.
if [[ $code -eq 75 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
