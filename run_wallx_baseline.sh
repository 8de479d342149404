#!/usr/bin/env bash
# Wall-X on this node, with every switch of performance off: the counterpart of run_wallx_optimized.sh, from which it differs by the
# WALLX_PERF_* switches alone. Every variable may be set from outside; arguments go to vla train.
#
#   ./run_wallx_baseline.sh  # all GPUs of this machine; without one, a CPU rank
#   BATCH=20 DATASET=/data/libero ./run_wallx_baseline.sh --stop-at 30
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 ./run_wallx_baseline.sh  # once per node, in any order
#   ./run_wallx_baseline.sh --resume  # go on from the newest checkpoint in SAVE_PATH
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

unset "${!WALLX_PERF@}"

export CONFIG=${CONFIG:-$here/workspace/example/libero_local_perf.yml}
export BATCH=${BATCH:-26}  # samples per GPU
export GPUS=${GPUS:-}  # empty: all of this machine
export NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-}  # port empty: 29500 between nodes, on one node a free one
export DATASET=${DATASET:-../data/libero_all}  # LeRobot data set
export NORM_STATS=${NORM_STATS:-../data/libero_all_norm_stats.json}  # of vla norm-stats
export MODEL_CONFIG=${MODEL_CONFIG:-$here/configs/wall-oss-0.5/config.json}
export PROCESSOR=${PROCESSOR:-../data/Qwen2.5-VL-3B-Instruct}  # tokenizer and image processor
export WEIGHTS=${WEIGHTS:-../data/wall-oss-0.5/model.safetensors}  # a weights file: step 0; a checkpoint: go on
export SAVE_PATH=${SAVE_PATH:-./ckpt/libero_local_perf}
program=${VLA:-}  # the one that was named, else a build with CUDA, without, installed
[ -n "$program" ] || for program in "$here/build-cuda/vla" "$here/build/vla" vla; do
  if command -v "$program" >/dev/null; then break; fi
done
command -v "$program" >/dev/null || { echo "$0: $program is not there: make builds build/vla, VLA=FILE names another" >&2; exit 2; }

exec "$program" launch --gpus="$GPUS" --nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" \
    --master-port="$MASTER_PORT" train --config "$CONFIG" --hyperparams.batch_size_per_gpu="$BATCH" "$@"
