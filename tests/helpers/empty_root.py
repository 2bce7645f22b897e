"""A root folder with only the C library and a Python without packages, and no network: a kit must run in it.

It uses user, mount, process and network namespaces, as containers do. The mounts end with the namespaces.
"""

import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

OUTSIDE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Run a command whose only network is an inactive loopback; all processes that it started end with it."""


def can_make_roots() -> bool:
    """Whether this process may create such namespaces."""
    return subprocess.run([*OUTSIDE, "true"], capture_output=True, check=False, timeout=60).returncode == 0


def python_in_root() -> str:
    """Return the Python in the root: the one from which this process's environment was created."""
    return str(Path(sys.executable).resolve())


def command_in_root(root: Path, kit: Path, command: Sequence[str]) -> list[str]:
    """Return a command in ``root``, an empty folder, with a kit at ``/kit``, read-only; it is run in `OUTSIDE`."""
    lines = ["set -e"]
    for path in (*_libraries(), python_in_root()):
        real = Path(path).resolve()
        lines += _bound(real, root / Path(path).relative_to("/"))
    stdlib = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    lines += _bound(Path(stdlib), root / Path(stdlib).relative_to("/"))
    lines += [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in _package_folders(root, Path(stdlib))]
    lines += _bound(kit, root / "kit")
    lines.append(f"mount -o remount,ro,bind {shlex.quote(str(root / 'kit'))}")
    for device in ("null", "urandom"):
        lines += _bound(Path("/dev") / device, root / "dev" / device)
    for folder, kind in (("proc", "proc"), ("tmp", "tmpfs")):
        lines += [
            f"mkdir -p {shlex.quote(str(root / folder))}",
            f"mount -t {kind} none {shlex.quote(str(root / folder))}",
        ]
    lines.append(f"exec chroot {shlex.quote(str(root))} {shlex.join(command)}")
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]


def _bound(source: Path, target: Path) -> list[str]:
    quoted = shlex.quote(str(target))
    make = f"mkdir -p {quoted}" if source.is_dir() else f"mkdir -p {shlex.quote(str(target.parent))}; : >> {quoted}"
    return [make, f"mount --bind {shlex.quote(str(source))} {quoted}"]


def _package_folders(root: Path, stdlib: Path) -> Iterator[Path]:
    """Yield the folders of packages that are installed for the Python, to be hidden by mounts."""
    for name in ("site-packages", "dist-packages"):
        if (stdlib / name).is_dir():
            yield root / stdlib.relative_to("/") / name


def _libraries() -> set[str]:
    """Return the libraries that Python, its modules and the tools are linked with, and those of C++."""
    libraries = set()
    modules = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})) / "lib-dynload"
    for binary in (python_in_root(), *map(str, modules.glob("*.so"))):
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False, timeout=60).stdout
        libraries |= set(re.findall(r"(/\S+\.so\S*)", listed))
    folder = next(Path(library).parent for library in libraries if "/libc.so" in library)
    also = ("libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6")
    return libraries | {str(folder / name) for name in also}
