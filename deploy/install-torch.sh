#!/usr/bin/env bash
# Installs the release of torch that constraints.txt names, unless it is there.
#   [TORCH_INDEX=URL] deploy/install-torch.sh PIP
# The public package index offers Linux builds with CUDA, gigabytes of them, so the CPU build has to be asked for: from
# where pip is configured to look, if that has it, or else from PyTorch's own index. TORCH_INDEX names another index.
set -euo pipefail
pip=$1
release=$(sed -n 's/^torch==//p' "$(dirname "$0")/../constraints.txt")
if "$(dirname "$pip")/python" - "$release" <<'PYTHON'; then exit 0; fi
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version("torch").split("+")[0] != sys.argv[1])
except PackageNotFoundError:
    sys.exit(1)
PYTHON
echo "== torch $release"
if [ -z "${TORCH_INDEX:-}" ] && "$pip" install --quiet --dry-run --no-deps "torch==$release+cpu" 2>/dev/null; then
  exec "$pip" install "torch==$release+cpu"
fi
exec "$pip" install --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "torch==$release"
