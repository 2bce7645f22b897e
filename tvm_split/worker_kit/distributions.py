"""Find packages with their files: installed here, or downloaded by pip for another Python or processor."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag
from packaging.utils import canonicalize_name, parse_wheel_filename

from tvm_split.errors import KitError

NEWEST_GLIBC_MINOR, OLDEST_GLIBC_MINOR = 28, 5
"""Minor versions of glibc 2 for which wheels are accepted, from 2018 and 2006; older wheels run with a newer glibc."""
DOWNLOAD_SECONDS = 1200.0
NEEDED = (
    "apache-tvm",
    "apache-tvm-ffi",
    "grpcio",
    "grpcio-health-checking",
    "prometheus-client",
    "ml_dtypes",
    "numpy",
    "platformdirs",
    "protobuf",
)
IF_HERE = ("lz4", "zstandard")
"""Packages for the codecs of links, included if they are installed here."""


@dataclass(frozen=True)
class Platform:
    """A Python version, such as (3, 12), and a processor as ``platform.machine()`` names it; Linux with glibc."""

    python: tuple[int, int]
    architecture: str

    @property
    def system_tags(self) -> list[str]:
        """The platform tags of wheels that run on this platform, the newest glibc first."""
        minors = range(NEWEST_GLIBC_MINOR, OLDEST_GLIBC_MINOR - 1, -1)
        names = [f"manylinux_2_{minor}" for minor in minors]
        return [f"{name}_{self.architecture}" for name in (*names, "manylinux2014", "manylinux2010", "manylinux1")]

    @property
    def tags(self) -> frozenset[Tag]:
        """The full tags of all wheels that run on this platform."""
        systems = [*self.system_tags, f"linux_{self.architecture}"]
        interpreter = f"cp{self.python[0]}{self.python[1]}"
        return frozenset(
            (*cpython_tags(self.python, platforms=systems), *compatible_tags(self.python, interpreter, systems))
        )


@dataclass(frozen=True)
class Distribution:
    """A package, with its files by their paths in a wheel and the minor version of the oldest glibc 2 it runs with."""

    name: str
    version: str
    files: Mapping[str, Path]
    glibc_minor: int


def needed_versions() -> dict[str, str]:
    """Return the packages that a worker imports, with the versions installed here."""
    here = {distribution.name for name in IF_HERE for distribution in metadata.distributions(name=name)}
    return {name: metadata.version(name) for name in (*NEEDED, *sorted(here))}


def installed_for(name: str, versions: str, platform: Platform) -> Distribution | None:
    """Return an installed package whose version fits ``versions`` (``==1.2.3``) and whose files run on the platform.

    Return None if there is none.
    """
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    lines = (installed.read_text("WHEEL") or "").splitlines()
    tags = {tag for line in lines if line.startswith("Tag: ") for tag in parse_tag(line.removeprefix("Tag: "))}
    files = {str(file): Path(str(file.locate())) for file in installed.files or ()}
    if installed.version not in SpecifierSet(versions) or not files or not tags & platform.tags:
        return None
    return Distribution(name, installed.version, files, _glibc_minor(tags))


def downloaded(requirements: Mapping[str, str], platform: Platform, folder: Path) -> Iterator[Distribution]:
    """Download packages with pip and unpack them in ``folder``; ``requirements`` maps names to versions (``==1.2.3``).

    Raises:
        KitError: pip cannot download them; the message says why.
    """
    version = f"{platform.python[0]}.{platform.python[1]}"
    short = version.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--python-version", version]
    command += ["--implementation", "cp", *_options("--abi", (f"cp{short}", "abi3", "none"))]
    command += _options("--platform", platform.system_tags)
    names = [f"{name}{versions}" for name, versions in requirements.items()]
    what = f"{', '.join(names)} for Python {version} on {platform.architecture}"
    try:
        result = subprocess.run(  # noqa: S603 (our own interpreter)
            [*command, *names], capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise KitError(f"pip did not get {what} within {DOWNLOAD_SECONDS:.0f} s") from None
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise KitError(
            f"pip does not get {what}, which are not installed here in that form: "
            f"{errors[-1] if errors else f'exit code {result.returncode}'}"
        )
    wheels = {canonicalize_name(path.name.partition("-")[0]): path for path in folder.glob("*.whl")}
    for name in requirements:
        path = wheels[canonicalize_name(name)]
        yield _unpacked(name, path, folder / path.stem)


def _unpacked(name: str, wheel: Path, folder: Path) -> Distribution:
    _, version, _, tags = parse_wheel_filename(wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return Distribution(name, str(version), files, _glibc_minor(tags))


def _options(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _glibc_minor(tags: Iterable[Tag]) -> int:
    """Return the minor version of the oldest glibc 2 that a wheel's tags allow; 0 if they require none."""
    older = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
    minors = []
    for tag in tags:
        number = re.match(r"manylinux_2_(\d+)_", tag.platform)
        minors.append(int(number.group(1)) if number else older.get(tag.platform.partition("_")[0], 0))
    return min(minors, default=0)
