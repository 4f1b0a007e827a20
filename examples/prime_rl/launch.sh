#!/usr/bin/env bash
# PRIME-RL's own trainer on GPUs 0 to 3, SGLang on 4 to 7, the buffer between them. Untried on GPUs.
#
#   PRIME_RL=/path/to/prime-rl MODEL=/path/to/Qwen3-4B-Instruct-2507 SGLANG_PYTHON=/path/to/python examples/prime_rl/launch.sh
#
# Started again it goes on: with RESUME=1 from the trainer's newest checkpoint.
set -euo pipefail
: "${PRIME_RL:?a checkout of prime-rl, set up with uv sync}"
: "${MODEL:?a directory that holds the model that trainer.toml names}"
: "${SGLANG_PYTHON:?the interpreter of an environment with SGLang}"
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
out=$(realpath -m "${OUT:-outputs/arithmetic}")
mkdir -p "$out/logs"
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT

rollout-buffer serve --listen 127.0.0.1:50051 --data-dir "$out/service" &> "$out/logs/service.log" &

CUDA_VISIBLE_DEVICES=4,5,6,7 rollout-buffer worker --run arithmetic --launch "$MODEL" --device cuda --engines 4 \
  --gpus-per-engine 1 --sglang-python "$SGLANG_PYTHON" --reward examples.prime_rl.arithmetic:reward \
  --weights-dir "$out/fetched" &> "$out/logs/worker.log" &

rollout-buffer bridge prime-rl --run arithmetic --batch-groups 32 --seq-len 4096 --data-ranks 4 --max-steps 200 \
  --tasks examples.prime_rl.arithmetic:tasks --output-dir "$out" &> "$out/logs/bridge.log" &

cd "$PRIME_RL"
CUDA_VISIBLE_DEVICES=0,1,2,3 uv run torchrun --nproc-per-node 4 --local-ranks-filter 0 -m prime_rl.trainer.rl.train \
  @ "$here/trainer.toml" --output-dir "$out" --model.name "$MODEL" ${RESUME:+--resume}
