"""Write a kit: a folder or tar file with everything that a worker needs on a machine with a plain Python.

__main__.py     starts the worker: ``python FOLDER``
kit.json        the kit's Python, processor and device, and the versions of its packages
packages/       the worker's own files, and the needed files of every package that it imports
"""

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import rpc_runtime
from rpc_runtime.scratch import ScratchFolder
from tvm_split.errors import KitError
from tvm_split.outputs import written
from tvm_split.progress import StepProgress
from tvm_split.worker_kit import start
from tvm_split.worker_kit.distributions import Distribution, Platform, downloaded, installed_for, needed_versions

TVM_RUNTIME = "libtvm_runtime.so", "libtvm_runtime_extra.so"
"""TVM's runtime libraries; the second one is for tuning (`rpc_runtime.worker.tuning_process`)."""
TVM_CUDA_RUNTIME = "libtvm_runtime_cuda.so"
CUDA_RUNTIME = "libcudart.so"

_LICENCE = r"[^/]+\.dist-info/(METADATA|licenses/.*|LICEN[SC]E.*|NOTICE.*)"
_NOBODYS = r"(^|/)(tests?|testing|include)/|\.(pyi|pxd|pyx|pxi|h|hpp|a|pyc|typed)$"
"""Files that are used only to compile or test a package."""

_ONLY: dict[str, Sequence[str]] = {
    # The modules that `runtime_alone` imports, and their parent packages, whose code it does not run.
    "apache-tvm": (
        r"tvm/(__init__|_version|base|error|libinfo)\.py",
        r"tvm/(runtime|rpc)/.*\.py",
        r"tvm/support/(__init__|libinfo|utils)\.py",
        r"tvm/(LICENSE|NOTICE|licenses/.*)",
    ),
    "nvidia-cuda-runtime": (rf"nvidia/cu\d+/lib/{re.escape(CUDA_RUNTIME)}\.\d+",),
}
_NOT: dict[str, Sequence[str]] = {
    "apache-tvm-ffi": (r"tvm_ffi/(3rdparty|cython|share|src|stub)/.*",),
    "numpy": (r"numpy/(doc|f2py|typing|_pyinstaller)/.*", r"numpy/_core/_(\w+_tests|simd)\..*"),
    "zstandard": (r"zstandard/_cffi\..*",),  # only for interpreters other than CPython
}

FORMAT = "tvm-split worker kit"
OWN = "tvm-split"
ALSO = ("typing_extensions",)
"""Packages that a worker imports only indirectly, through its other packages."""
CUDA_PACKAGE, CUDA_VERSIONS = "nvidia-cuda-runtime", "==13.0.*"
"""The CUDA runtime: TVM's library requires its major version; this minor version supports the oldest drivers."""
GZIP_LEVEL = 6
"""The default of ``gzip``; 9, tarfile's default, takes three times as long for files that are 0.7 % smaller."""
COMPRESSIONS = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.bz2": "bz2", ".tar.xz": "xz", ".txz": "xz"}


@dataclass(frozen=True)
class KitPart:
    """A package in a kit, with the size of its files there."""

    name: str
    version: str
    files: int
    size_bytes: int


@dataclass(frozen=True)
class WorkerKit:
    """A kit at ``path``: a folder, or a tar file of ``packed_bytes`` that contains it as ``folder``.

    ``packed_bytes`` is None for a folder. ``device`` is ``"cpu"`` or ``"cuda"``. The machine needs glibc
    2.``glibc_minor`` or later. ``parts`` are the packages in the kit.
    """

    path: Path
    folder: str
    device: str
    platform: Platform
    glibc_minor: int
    parts: tuple[KitPart, ...]
    packed_bytes: int | None

    @property
    def size_bytes(self) -> int:
        """The size of all files, unpacked."""
        return sum(part.size_bytes for part in self.parts)


def write_kit(output: Path, device: str, platform: Platform, on_progress: StepProgress | None = None) -> WorkerKit:
    """Write a kit for a device (``"cpu"`` or ``"cuda"``) to a new folder or, by the suffix of ``output``, tar file.

    Packages installed here are copied if they fit the platform; otherwise pip downloads them. If this fails, it leaves
    no files behind.

    Raises:
        KitError: the output exists, a package cannot be downloaded, or it lacks a library.
        OutputError: the output cannot be written.
    """
    report = on_progress or (lambda what, done, steps: None)
    name, compression = _form(output)
    exists = os.path.lexists(output)
    if exists or not output.absolute().parent.is_dir():
        raise KitError(f"{output} {'exists already; give a new name' if exists else 'is in no folder that exists'}")
    installed_versions = {**needed_versions(), **{name: metadata.version(name) for name in ALSO}}
    requirements = {name: f"=={version}" for name, version in installed_versions.items()}
    if device == "cuda":
        requirements[CUDA_PACKAGE] = CUDA_VERSIONS
    with ScratchFolder("kit") as scratch, written(output) as beside:
        report("finding packages", 0, len(requirements) + 2)
        distributions = list(_distributions(requirements, platform, scratch.path))
        folder = beside if compression is None else beside.with_name(f"{name}.folder")
        for directory in (folder, folder / "packages"):
            directory.mkdir()
        parts = []
        for number, distribution in enumerate(distributions):
            report(f"copying {distribution.name}", number + 1, len(requirements) + 2)
            parts.append(_copied(distribution, folder, device))
        glibc_minor = max(distribution.glibc_minor for distribution in distributions)
        parts.append(_with_own_files(folder, device, platform, glibc_minor, parts))
        _require_libraries(folder, device, platform)
        packed_bytes = None
        if compression is not None:
            report("packing", len(requirements) + 1, len(requirements) + 2)
            content = {f"{name}/{path.relative_to(folder)}": path for path in folder.rglob("*") if path.is_file()}
            pack(content, beside, compression)
            packed_bytes = beside.stat().st_size
        report("done", len(requirements) + 2, len(requirements) + 2)
    return WorkerKit(output, name, device, platform, glibc_minor, tuple(parts), packed_bytes)


def _form(output: Path) -> tuple[str, str | None]:
    """Return the folder's name and the tar file's compression; None for a plain folder."""
    for ending, compression in COMPRESSIONS.items():
        if output.name == ending:
            raise KitError(f"{output}: a kit has a name before {ending}")
        if output.name.endswith(ending):
            return output.name.removesuffix(ending), compression
    if ".tar." in output.name or output.suffix == ".zip":
        raise KitError(f"{output}: a kit is a folder, or ends with {', '.join(COMPRESSIONS)}")
    return output.name, None


def _distributions(requirements: Mapping[str, str], platform: Platform, scratch: Path) -> Iterator[Distribution]:
    missing = {}
    for name, versions in requirements.items():
        installed = installed_for(name, versions, platform)
        if installed is None:
            missing[name] = versions
        else:
            yield installed
    if missing:
        yield from downloaded(missing, platform, scratch)


def _copied(distribution: Distribution, folder: Path, device: str) -> KitPart:
    files = {
        place_of(distribution.name, name): path
        for name, path in distribution.files.items()
        if is_needed(distribution.name, name, device)
    }
    return _copy(distribution.name, distribution.version, files, folder / "packages")


def _copy(name: str, version: str, files: Mapping[str, Path], folder: Path) -> KitPart:
    size_bytes = 0
    for place, path in sorted(files.items()):
        target = folder / place
        for parent in reversed(target.relative_to(folder).parents):
            (folder / parent).mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        size_bytes += target.stat().st_size
    return KitPart(name, version, len(files), size_bytes)


def _with_own_files(
    folder: Path, device: str, platform: Platform, glibc_minor: int, parts: Iterable[KitPart]
) -> KitPart:
    version = metadata.version(OWN)
    python = f"{platform.python[0]}.{platform.python[1]}"
    own_part = _copy(OWN, version, own_files(), folder / "packages")
    described = {
        "format": FORMAT,
        "device": device,
        "python": python,
        "architecture": platform.architecture,
        "glibc_minor": glibc_minor,
        "packages": {part.name: part.version for part in (*parts, own_part)},
    }
    texts = {
        "kit.json": json.dumps(described, indent=1) + "\n",
        "__main__.py": Path(start.__file__).read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return KitPart(
        OWN,
        version,
        own_part.files + len(texts),
        own_part.size_bytes + sum(len(text.encode()) for text in texts.values()),
    )


def _require_libraries(folder: Path, device: str, platform: Platform) -> None:
    libraries = {path.name for path in (folder / "packages/tvm/lib").glob("*.so*")}
    needed = [*TVM_RUNTIME, *((TVM_CUDA_RUNTIME, CUDA_RUNTIME) if device == "cuda" else ())]
    lacking = [name for name in needed if not any(library.startswith(name) for library in libraries)]
    if lacking:
        raise KitError(
            f"apache-tvm and what it needs have no {', '.join(lacking)} for {platform.architecture}: a kit for the "
            f"device {device!r} cannot be made of them"
        )


def pack(files: Mapping[str, Path], packed: Path, compression: str = "gz") -> None:
    """Write a tar file of files by their paths in it; its uncompressed bytes depend only on their contents."""
    level = {"compresslevel": GZIP_LEVEL} if compression == "gz" else {}
    with tarfile.open(packed, f"w:{compression}", **level) as written:  # type: ignore[call-overload]
        for name, path in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            written.addfile(entry, io.BytesIO(content))


def is_needed(package: str, name: str, device: str) -> bool:
    """Whether a worker for a device (``"cpu"`` or ``"cuda"``) needs a file of a package.

    ``name`` is relative to the folder of all packages, with slashes, as in a wheel.
    """
    if name.startswith("../") or ".data/" in name:
        return False
    if ".dist-info/" in name:
        return re.fullmatch(_LICENCE, name) is not None
    if package == "apache-tvm" and name.startswith("tvm/lib/"):
        libraries = (*TVM_RUNTIME, TVM_CUDA_RUNTIME) if device == "cuda" else TVM_RUNTIME
        return name.removeprefix("tvm/lib/") in libraries
    if package in _ONLY:
        return any(re.fullmatch(pattern, name) for pattern in _ONLY[package])
    if re.search(_NOBODYS, name):
        return False
    return not any(re.fullmatch(pattern, name) for pattern in _NOT.get(package, ()))


def place_of(package: str, name: str) -> str:
    """Return a file's path in the kit's ``packages``: as in a wheel, but CUDA's library where TVM looks for it."""
    if package == "nvidia-cuda-runtime" and name.startswith("nvidia/"):
        return f"tvm/lib/{name.rpartition('/')[2]}"
    return name


def own_files() -> dict[str, Path]:
    """Return the worker's own files by their paths relative to the folder that it is imported from."""
    root = Path(rpc_runtime.__file__).parent.parent
    return {str(path.relative_to(root)): path for path in (root / "rpc_runtime").rglob("*.py")}
