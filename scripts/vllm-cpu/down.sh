#!/usr/bin/env bash
# down.sh [--kill] PORT ...: stop the replicas that up.sh started on these ports, and wait until they are gone.
#
# With --kill all processes of a replica die at once, as when the machine runs
# out of memory; otherwise SIGTERM, which vLLM answers by aborting what it does.
set -euo pipefail

root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}
kill_at_once=false
if [ "${1:-}" = --kill ]; then
  kill_at_once=true
  shift
fi

# A process that ended but has no parent to collect it is gone for our purposes.
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
  # Whatever the server left behind: an engine that outlives it keeps its events port.
  kill -9 -- "-$pid" 2>/dev/null || true
  rm -f "$root/$port.pid"
done
