"""The committed gRPC stubs are those that `proto/` gives."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stubs_are_fresh(tmp_path: Path) -> None:
    protos = [str(path.relative_to(ROOT)) for path in (ROOT / "proto/services/rpc").glob("*.proto")]
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *out, *protos], cwd=ROOT, check=True)
    fresh = sorted((tmp_path / "services/rpc").iterdir())
    assert len(fresh) == 3 * len(protos)
    for path in fresh:
        assert (ROOT / "services/rpc" / path.name).read_text() == path.read_text(), f"{path.name}: run `make proto`"
