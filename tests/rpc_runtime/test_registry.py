import sys
from pathlib import Path

import pytest

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.processes import Closing
from rpc_runtime.registry import PluginError, PluginWarning, Registry

PLUGINS = """
from rpc_runtime.processes import Closing

class Circle(Closing):
    def close(self) -> None: ...

class Abstract(Closing): ...

class Other: ...

INSTANCE = Circle()
"""
ENTRIES = """[tvm_split.shapes]
circle = shapes_plugin:Circle
missing = shapes_plugin:Gone
absent = no_such_module_of_shapes:Shape
other = shapes_plugin:Other
abstract = shapes_plugin:Abstract
instance = shapes_plugin:INSTANCE
square = shapes_plugin:Circle
"""


class Shape:
    pass


class Square(Shape):
    pass


class UnknownShapeError(TvmSplitError):
    pass


def shapes(base: type | None = None) -> Registry[object]:
    built_in = {"square": Square, "line": f"{__name__}:Line", "point": "no_such_module_of_shapes:Point"}
    return Registry("tvm_split.shapes", "shape", built_in, base, UnknownShapeError)


class Line(Shape):
    pass


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package ``toy-shapes``; some of its kinds cannot be loaded."""
    package = tmp_path / "toy_shapes-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-shapes\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "shapes_plugin.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shapes_plugin", raising=False)


def test_a_built_in_kind_is_given_or_imported_when_asked_for() -> None:
    registry = shapes(Shape)
    assert registry["square"] is Square
    assert registry["line"] is Line
    assert list(registry) == ["square", "line", "point"]
    assert "line" in registry
    assert "circle" not in registry


def test_an_unknown_name_is_answered_with_what_there_is() -> None:
    with pytest.raises(UnknownShapeError, match=r"no shape 'cube'; there are: square, line, point"):
        shapes()["cube"]


@pytest.mark.usefixtures("plugins")
def test_an_installed_package_adds_kinds_and_replaces_none() -> None:
    registry = shapes()
    assert list(registry) == ["square", "line", "point", "absent", "abstract", "circle", "instance", "missing", "other"]
    assert "circle" in registry
    assert registry["circle"] is sys.modules["shapes_plugin"].Circle  # type: ignore[attr-defined]
    assert registry["square"] is Square


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "no attribute 'Gone'"),
        ("absent", "No module named"),
        ("other", "is not a subclass of Closing"),
        ("instance", "is not a subclass of Closing"),
        ("abstract", "does not define close"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_package(name: str, reason: str) -> None:
    with pytest.raises(PluginError, match=rf"'{name}' of the package 'toy-shapes' .*{reason}"):
        shapes(Closing)[name]


@pytest.mark.usefixtures("plugins")
def test_all_kinds_are_given_but_those_that_cannot_be_loaded() -> None:
    registry: Registry[object] = Registry("tvm_split.shapes", "shape", {"square": Square})
    with pytest.warns(PluginWarning, match="'absent'|'missing'|'abstract'"):
        kinds = dict(registry.items())
    assert list(kinds) == ["square", "circle", "instance", "other"]
