#!/usr/bin/env bash
# Tests engine and KV transfers on CUDA devices, with the Python that has torch and Triton there. Nothing has to be installed but
# msgspec, xxhash, safetensors and pytest; for KV transfers structlog, too.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec python3 -m pytest -m gpu -p no:cacheprovider -o addopts= -o asyncio_mode= --import-mode=importlib -q tests/engine/test_gpu*.py tests/kv_transfer/test_gpu*.py "$@"
