"""The import rules: what each package may import, and that a worker starts without the compiler."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tvm_split", "relay_passes", "schedules", "rpc_runtime")
FRAMEWORKS = "torch|onnx|onnxruntime|jax|jaxlib|flax|keras|tensorflow|tflite|ai_edge_litert"
FORBIDDEN = {
    "relay_passes": f"tvm_split|schedules|rpc_runtime|{FRAMEWORKS}",
    "schedules": f"tvm_split|relay_passes|rpc_runtime|{FRAMEWORKS}",
    "rpc_runtime": rf"tvm_split|relay_passes|schedules|tvm\.(relax|tirx|s_tir|te|topi|target|driver)|{FRAMEWORKS}",
    # A client has no TVM.
    **dict.fromkeys((f"rpc_runtime/{name}" for name in ("program", "wire", "transports", "client")), "tvm|tvm_ffi"),
    # Shared helpers are in `tests/helpers`: in a test module they are hard to find, and go with its tests.
    "tests": r"tests\.(.*\.)?(test_\w+|conftest)",
    # Benchmarks share models and emulators with tests and nothing else.
    "scripts": r"tests\.(?!models|helpers).*",
}
"""What the files of a folder must not import."""
MUTUAL_TYPES = {
    # A cluster has a launcher, and a launcher finds a cluster.
    "tvm_split.cluster.launcher": ("tvm_split.cluster.cluster",),
    "rpc_runtime.program.codecs": ("rpc_runtime.program.program", "rpc_runtime.program.routes"),
    "rpc_runtime.program.routes": ("rpc_runtime.program.program",),
    "rpc_runtime.program.runner": ("rpc_runtime.program.measurements", "rpc_runtime.program.program"),
    "rpc_runtime.transports.link_end": ("rpc_runtime.transports.nccl",),
    "rpc_runtime.transports.transport": ("rpc_runtime.transports.grpc", "rpc_runtime.transports.link_end"),
}
"""By module, its imports under ``TYPE_CHECKING`` that close a cycle. No entry may be added: move what both need."""


FLOORS = """
    cli
    display
    api demo tuning
    planning
    deployment
    compiling profiling simulation dashboard pictures
    arguments observing
    compiler frontends
    model reached_workers
    placement launchers ssh
    cluster
    parameters
    values worker_kit
    outputs
    units errors progress
"""
"""What lies in `tvm_split`, packages and modules; each imports only what stands on lower lines."""
UPWARD = {
    ("units", "display"): "a value's repr is its view's title",
}
"""Imports against the order of `FLOORS`, with the reason."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, nodes: Iterable[ast.AST] | None = None) -> set[str]:
    """Return every module that a file imports, anywhere in it (or in ``nodes``)."""
    names: set[str] = set()
    for node in nodes if nodes is not None else ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"the package {package} has no files"
    return files


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    forbidden = re.compile(rf"({FORBIDDEN[folder]})\b")
    for path in files_of(folder):
        wrong = {name for name in imports_of(path) if forbidden.match(name)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_packages_of_tvm_split_import_only_lower_ones() -> None:
    floors = {name: floor for floor, line in enumerate(FLOORS.split("\n")) for name in line.split()}
    for path in files_of("tvm_split"):
        home = path.relative_to(ROOT / "tvm_split").with_suffix("").parts[0]
        if home not in ("__init__", "__main__"):
            assert home in floors, f"give tvm_split.{home} a line of FLOORS"
            imported = {name.split(".")[1] for name in imports_of(path) if name.startswith("tvm_split.")} - {home}
            wrong = {name for name in imported if floors[name] <= floors[home] and (home, name) not in UPWARD}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}, which FLOORS has not below {home}"


def test_frameworks_are_named_only_by_frontends_and_the_demo() -> None:
    allowed = (ROOT / "tvm_split" / "frontends", ROOT / "tvm_split" / "demo")
    for path in files_of("tvm_split"):
        wrong = {name for name in imports_of(path, tree_of(path).body) if re.match(rf"({FRAMEWORKS})\b", name)}
        assert not wrong or any(path.is_relative_to(folder) for folder in allowed), path


@pytest.mark.parametrize("name", ["sides", "cases/first", "cases/kernels", "cases/observing", "cases/streams"])
def test_benchmarks_of_other_checkouts_import_only_public_names(name: str) -> None:
    """``--also`` runs them with the packages of another checkout, whose modules may have other names."""
    path = ROOT / "scripts" / f"{name}.py"
    private = re.compile(r"(relay_passes|schedules|rpc_runtime)\b|tvm_split\.[a-z]")
    wrong = {imported for imported in imports_of(path, tree_of(path).body) if private.match(imported)}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def modules() -> dict[str, Path]:
    """Return every module of ours, by the name with which it is imported."""
    paths = {}
    for path in (path for package in PACKAGES for path in files_of(package)):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return paths


def require_no_cycle(needs: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other in a cycle: {' -> '.join(error.args[1])}")


def test_there_are_no_import_cycles_between_modules() -> None:
    ours = modules()
    require_no_cycle({name: modules_needed_by(name, path) & set(ours) for name, path in ours.items()})


def modules_needed_by(name: str, path: Path) -> set[str]:
    """Return what a module imports, with the packages around each, which load first.

    The packages around the module itself are left out: these load their own modules.
    """
    known = MUTUAL_TYPES.get(name, ())
    late = {imported for imported in imports_of(path) if not any(f"{imported}.".startswith(f"{one}.") for one in known)}
    imported = imports_of(path, tree_of(path).body) | late
    with_packages = {full[: dot.start()] for full in imported for dot in re.finditer(r"\.|$", full)}
    return {needed for needed in with_packages if not f"{name}.".startswith(f"{needed}.")}


def test_there_are_no_import_cycles_between_packages() -> None:
    ours = modules()
    packages = {name for name, path in ours.items() if path.name == "__init__.py"} - set(PACKAGES)
    needs: dict[str, set[str]] = {}
    for name, path in ours.items():
        if (home := package_of(name, packages)) is not None:
            imported_packages = {
                package_of(imported, packages) for imported in imports_of(path) if imported in ours
            } - {None}
            # A package and its subpackages count as one: both may use each other.
            needs.setdefault(home, set()).update(
                package
                for package in imported_packages
                if not f"{package}.".startswith(f"{home}.") and not home.startswith(f"{package}.")
            )
    require_no_cycle(needs)


def package_of(name: str, packages: set[str]) -> str | None:
    while name not in packages:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def test_placement_and_references_load_no_tvm() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("placement", "simulation")
        for path in files_of(f"tvm_split/{folder}")
        if path.stem != "__init__"
    ]
    names.append("tvm_split.frontends.onnx.reference")  # in a process of its own, which computes without TVM
    code = f"import sys, importlib; [importlib.import_module(name) for name in {names}]; print('tvm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"
