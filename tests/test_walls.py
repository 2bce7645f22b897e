"""The walls between the rooms: what each may import, and that a worker starts without the compiler's world."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("tvm_split", "relay_passes", "schedules", "rpc_runtime")
MAY_IMPORT = {
    "tvm_split": {"relay_passes", "schedules", "rpc_runtime"},
    "relay_passes": set(),
    "schedules": set(),
    "rpc_runtime": set(),
}
NOT_IN_THE_RUNTIME = ("tvm.relax", "tvm.tirx", "tvm.s_tir", "tvm.te", "tvm.topi", "tvm.target", "tvm.driver")
FRAMEWORKS = ("torch", "onnx", "onnxruntime")


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files_of(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"the room {room} is empty"
    return files


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    forbidden = set(ROOMS) - MAY_IMPORT[room] - {room}
    for path in files_of(room):
        wrong = {name for name in imports_of(path) if name.partition(".")[0] in forbidden}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_runtime_does_not_name_the_compiler_or_a_framework() -> None:
    for path in files_of("rpc_runtime"):
        wrong = {
            name
            for name in imports_of(path)
            if name.startswith(NOT_IN_THE_RUNTIME) or name.partition(".")[0] in FRAMEWORKS
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("room", ["relay_passes", "schedules"])
def test_the_middle_rooms_do_not_name_a_framework(room: str) -> None:
    for path in files_of(room):
        wrong = {name for name in imports_of(path) if name.partition(".")[0] in FRAMEWORKS}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_frameworks_are_named_only_by_frontends_and_the_demo() -> None:
    allowed = (ROOT / "tvm_split" / "frontends", ROOT / "tvm_split" / "demo")
    for path in files_of("tvm_split"):
        module_level = {
            name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            )
        }
        wrong = {name for name in module_level if name.partition(".")[0] in FRAMEWORKS}
        assert not wrong or path.is_relative_to(allowed[0]) or path.is_relative_to(allowed[1]), path


def test_there_are_no_circles_between_modules() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for room in ROOMS
        for path in files_of(room)
    }
    needs = {}
    for name, path in modules.items():
        body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        named: set[str] = set()
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        # A package that re-exports from its own modules is no circle.
        needs[name] = {each for each in named & set(modules) if each != name and not name.startswith(f"{each}.")}
    while needs:
        free = [name for name, wanted in needs.items() if not wanted & set(needs)]
        assert free, f"these modules import each other in a circle: {sorted(needs)}"
        for name in free:
            del needs[name]


def test_importing_the_front_door_loads_nothing_heavy() -> None:
    code = "import sys, tvm_split; print([m for m in ('tvm', 'torch', 'onnx', 'grpc') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
