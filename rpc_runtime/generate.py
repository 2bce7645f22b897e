"""Writes ``worker_pb2.py`` and ``worker_pb2.pyi`` anew from ``worker.proto``: ``python -m rpc_runtime.generate``.

Needs the development dependency ``grpcio-tools``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    from grpc_tools import protoc  # type: ignore[import-untyped, unused-ignore]

    package = Path(__file__).resolve().parent
    root = package.parent
    return int(
        protoc.main(["protoc", f"-I{root}", f"--python_out={root}", f"--pyi_out={root}", str(package / "worker.proto")])
    )


if __name__ == "__main__":
    sys.exit(main())
