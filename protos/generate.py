"""Generate the Python stubs of the contract: `python protos/generate.py <source root>`.

Knows grpcio-tools; `make protos` writes them into services/, a test compares them with fresh ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent


def generate(source_root: Path) -> int:
    """Write one `_pb2.py`, `_pb2.pyi` and `_pb2_grpc.py` per proto file; return protoc's status."""
    files = sorted(str(path) for path in PROTOS.glob("specserve/**/*.proto"))
    return int(
        protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                f"--python_out={source_root}",
                f"--pyi_out={source_root}",
                f"--grpc_python_out={source_root}",
                *files,
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(generate(Path(sys.argv[1])))
