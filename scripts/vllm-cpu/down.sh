#!/usr/bin/env bash
# down.sh [--kill] PORT ...: stop the replicas that up.sh started on these ports, and wait until they are gone.
#
# With --kill the process dies at once, like one that ran out of memory;
# otherwise SIGTERM, which vLLM answers by aborting what it is doing.
set -euo pipefail

root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}
signal=TERM
if [ "${1:-}" = --kill ]; then
  signal=KILL
  shift
fi

for port in "$@"; do
  if [ -s "$root/$port.pid" ]; then
    kill -s "$signal" "$(cat "$root/$port.pid")" 2>/dev/null || true
  fi
done
for port in "$@"; do
  [ -s "$root/$port.pid" ] || continue
  pid=$(cat "$root/$port.pid")
  for _ in $(seq 1 40); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.25
  done
  kill -9 "$pid" 2>/dev/null || true
  rm -f "$root/$port.pid"
done
