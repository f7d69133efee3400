#!/usr/bin/env bash
# Tests engine and KV transfers on CUDA devices, with the Python that has torch and Triton there. Nothing has to be installed but
# msgspec, xxhash, safetensors and pytest; for KV transfers structlog, for their benchmark also typer, rich and pyzmq.
# With pytest-xdist, JOBS=8 runs so many tests at once (first those that can share a device, then one by
# one those that measure its memory or use several).
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
run() { python3 -m pytest -m gpu -p no:cacheprovider -o addopts= -o asyncio_mode= --import-mode=importlib -q "$@"; }
alone=(tests/engine/test_gpu_memory.py tests/engine/test_gpu_parallel.py tests/kv_transfer/test_gpu_nccl.py tests/kv_transfer/test_gpu_bench.py)
together=(tests/engine/test_gpu*.py tests/kv_transfer/test_gpu*.py)
for file in "${alone[@]}"; do together=("${together[@]/$file/}"); done
failed=0
run ${JOBS:+-n "$JOBS" --dist worksteal} ${together[@]} "$@" || failed=1
run "${alone[@]}" "$@" || failed=1
exit $failed
