"""Generate the Python code of the protobuf messages, `PROTOCOLS`, whenever the packages are built.

All else about the build is in pyproject.toml.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROTOCOLS = {
    ROOT / "rpc_runtime/wire/worker.proto": ["python", "pyi", "grpc_python"],
    ROOT / "tvm_split/observing/xplane.proto": ["python", "pyi"],
}
"""The kinds of code that each file is compiled to."""
ENDINGS = {"python": "_pb2.py", "pyi": "_pb2.pyi", "grpc_python": "_pb2_grpc.py"}


def generate() -> None:
    """Generate code beside the protocols, where an editable installation finds it, unless it is newer than they are.

    pip installs the generator for a build, but not with --no-build-isolation.
    """
    for protocol, kinds in PROTOCOLS.items():
        changed = protocol.stat().st_mtime_ns
        generated = [protocol.with_name(protocol.stem + ENDINGS[kind]) for kind in kinds]
        if all(path.exists() and path.stat().st_mtime_ns >= changed for path in generated):
            continue
        if find_spec("grpc_tools") is None:
            raise SystemExit(
                f"{generated[0]} is missing or older than {protocol.name}, and the environment has no grpcio-tools to "
                "generate it; build without --no-build-isolation, or run `make setup` first"
            )
        from grpc_tools import protoc

        options = [f"--{kind}_out={ROOT}" for kind in kinds]
        if protoc.main(["protoc", f"-I{ROOT}", *options, str(protocol)]):
            raise SystemExit(f"{protocol} cannot be compiled; the lines above say where")


class BuildWithProtocol(build_py):
    """Generates the protocol's code before Python files are collected, for editable installations too."""

    def run(self) -> None:
        generate()
        super().run()


setup(cmdclass={"build_py": BuildWithProtocol})
