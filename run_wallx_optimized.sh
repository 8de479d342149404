#!/usr/bin/env bash
# Wall-X on this node, with every switch of performance on: the counterpart of run_wallx_baseline.sh, from which it differs by the
# WALLX_PERF_* switches alone. Every variable may be set from outside; arguments go to vla train.
#
#   ./run_wallx_optimized.sh  # all GPUs of this machine; without one, a CPU rank
#   BATCH=20 DATASET=/data/libero ./run_wallx_optimized.sh --stop-at 30
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 ./run_wallx_optimized.sh  # once per node, in any order
#   ./run_wallx_optimized.sh --resume  # go on from the newest checkpoint in SAVE_PATH
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export WALLX_PERF_ATTN=${WALLX_PERF_ATTN:-1}  # cuDNN's attention where it is faster than own kernels: not on Hopper
export WALLX_PERF_ALLOC=${WALLX_PERF_ALLOC:-1}  # buffers planned by lifetime, cheap values made again in the backward pass
export WALLX_PERF_DDP=${WALLX_PERF_DDP:-1}  # static gradient buckets, reduced while the backward pass runs
export WALLX_PERF_BUCKET=${WALLX_PERF_BUCKET:-100}  # of so many MB
export WALLX_PERF_COMPILE=${WALLX_PERF_COMPILE:-1}  # fusion and replay, decoder
export WALLX_PERF_COMPILE_VISUAL=${WALLX_PERF_COMPILE_VISUAL:-1}  # the same, vision tower
export WALLX_PERF_COMPILE_RECOMP_LIMIT=${WALLX_PERF_COMPILE_RECOMP_LIMIT:-64}  # most plans kept
export WALLX_PERF_NO_TIMER_BARRIER=${WALLX_PERF_NO_TIMER_BARRIER:-1}  # timers never wait
export WALLX_PERF_LOG=${WALLX_PERF_LOG:-1}  # one line per switch that took effect

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
