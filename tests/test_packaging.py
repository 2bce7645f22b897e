"""The content of the wheel, which is installed beside other people's packages."""

import zipfile

import pytest

from scripts.check_install import ROOT, wheel

PACKAGES = ("tvm_split", "relay_passes", "schedules", "rpc_runtime")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel."""
    built = wheel(tmp_path_factory.mktemp("wheel"), "--no-build-isolation")
    with zipfile.ZipFile(built) as file:
        return set(file.namelist())


def test_a_wheel_has_the_four_packages_and_nothing_else(names: set[str]) -> None:
    (about,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {*PACKAGES, about}
    assert about.startswith("tvm_split-")
    for package in PACKAGES:
        files = [path for path in (ROOT / package).rglob("*.*") if path.suffix in (".py", ".html", ".css", ".js")]
        assert {str(path.relative_to(ROOT)) for path in files} <= names


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_read_the_installed_packages(names: set[str], package: str) -> None:
    assert f"{package}/py.typed" in names
