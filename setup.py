"""Generate the Python code of the protocol, `rpc_runtime/wire/worker.proto`, whenever the packages are built.

All else about the build is in pyproject.toml.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROTOCOL = ROOT / "rpc_runtime/wire/worker.proto"
GENERATED = [PROTOCOL.with_name(f"worker_{ending}") for ending in ("pb2.py", "pb2.pyi", "pb2_grpc.py")]


def generate() -> None:
    """Generate code beside the protocol, where an editable installation finds it, unless it is newer than the protocol.

    pip installs the generator for a build, but not with --no-build-isolation.
    """
    changed = PROTOCOL.stat().st_mtime_ns
    if all(path.exists() and path.stat().st_mtime_ns >= changed for path in GENERATED):
        return
    if find_spec("grpc_tools") is None:
        raise SystemExit(
            f"{GENERATED[0]} is missing or older than {PROTOCOL.name}, and the environment has no grpcio-tools to "
            "generate it; build without --no-build-isolation, or run `make setup` first"
        )
    from grpc_tools import protoc

    options = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *options, str(PROTOCOL)]):
        raise SystemExit(f"{PROTOCOL} cannot be compiled; the lines above say where")


class BuildWithProtocol(build_py):
    """Generates the protocol's code before Python files are collected, for editable installations too."""

    def run(self) -> None:
        generate()
        super().run()


setup(cmdclass={"build_py": BuildWithProtocol})
