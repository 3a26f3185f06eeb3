#!/usr/bin/env bash
# down.sh [--kill] PORT ...: stop the replicas that up.sh started on these ports, and wait until they have exited.
#
# With --kill all processes of a replica are killed at once, as by the kernel when
# memory runs out; otherwise they get SIGTERM, and vLLM aborts its requests.
set -euo pipefail

root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}
kill_at_once=false
if [ "${1:-}" = --kill ]; then
  kill_at_once=true
  shift
fi

# alive PID: a zombie has exited.
alive() {
  grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status"
}

for port in "$@"; do
  [ -s "$root/$port.pid" ] || continue
  pid=$(cat "$root/$port.pid")
  if "$kill_at_once"; then
    kill -9 -- "-$pid" 2>/dev/null || true
  else
    kill "$pid" 2>/dev/null || true
  fi
done

for port in "$@"; do
  [ -s "$root/$port.pid" ] || continue
  pid=$(cat "$root/$port.pid")
  for _ in $(seq 1 40); do
    alive "$pid" || break
    sleep 0.25
  done
  # Kill remaining processes: an engine that outlives the server keeps its events port.
  kill -9 -- "-$pid" 2>/dev/null || true
  rm -f "$root/$port.pid"
done
