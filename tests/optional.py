"""What tests of optional dependencies skip for."""

import pytest

from kv_transfer.connectors import nixl

needs_nixl = pytest.mark.skipif(
    not nixl.is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12"
)
