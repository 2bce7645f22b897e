"""A folder with an aarch64 machine for workers: Debian's Python for it, what a worker needs, and an emulator.

``FOLDER/python`` is a command that runs that Python, emulated by qemu's user mode as a Cortex-A72, the processor of a
Raspberry Pi 4. Nothing is installed outside of the folder, where apt's lists and packages lie as well. It needs Debian,
on any processor, and no root. (Ubuntu has aarch64 in an archive of its own, which its x86-64 machines do not know.)
"""

import argparse
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tvm_split.worker_kit.distributions import needed_versions

ARCHITECTURE = "arm64"
PACKAGES = ("python3", "libstdc++6", "libgomp1", "ca-certificates")
EMULATOR, OF_PACKAGE = "qemu-aarch64-static", "qemu-user-static"
PROCESSOR = "cortex-a72"
CPU_INFORMATION = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3
"""
"""What a Raspberry Pi 4 has as /proc/cpuinfo, for one core; older versions of qemu show the host's."""
NOT_ON_A_WORKER = "tvm/lib/libtvm_compiler.so"
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    root = folder / "root"
    unpack(folder, ARCHITECTURE, PACKAGES, root)
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(CPU_INFORMATION)
    emulator = shutil.which(EMULATOR)
    if emulator is None:
        unpack(folder, None, (OF_PACKAGE,), folder / "emulator", dependencies=False)
        emulator = str(folder / "emulator/usr/bin" / EMULATOR)
    python = write_command(folder, root, emulator)
    shown = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(shown, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    install(folder / "site", version)
    subprocess.run([str(python), "-c", "import tvm_ffi, grpc, numpy"], check=True, timeout=300)
    print(f"{python}: Python {version} for aarch64, emulated as a {PROCESSOR}")


def unpack(
    folder: Path, architecture: str | None, packages: Sequence[str], root: Path, *, dependencies: bool = True
) -> None:
    """Packages for an architecture (None: this host's), below ``root``, from the sources that this host's apt has."""
    state = folder / "apt" / (architecture or "host")
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "APT::Sandbox::User": "",
        **({"APT::Architecture": architecture, "APT::Architectures": architecture} if architecture else {}),
    }
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True, timeout=600)
    if dependencies:
        command = [*apt, "install", "--download-only", "--yes", "--no-install-recommends", *packages]
        subprocess.run(command, check=True, timeout=600)
    else:
        subprocess.run([*apt, "download", *packages], check=True, cwd=state / "archives", timeout=600)
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True, timeout=300)
    shutil.rmtree(state)


def write_command(folder: Path, root: Path, emulator: str) -> Path:
    """The command ``python``, which also is what that Python takes for its own executable when it starts others."""
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'export PYTHONHOME="{root}/usr" PYTHONPATH="{folder}/site${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        f'exec "{emulator}" -cpu {PROCESSOR} -0 "$0" -L "{root}" "{root}/usr/bin/python3" "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return python


def install(site: Path, version: str) -> None:
    """What a worker needs, in the versions that are installed here, as wheels for aarch64."""
    pinned = [f"{name}=={number}" for name, number in needed_versions().items()]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = ["pip", "install", "--quiet", "--target", str(site), "--only-binary=:all:", "--upgrade", *platforms]
    command += ["--python-version", version, "--constraint", "requirements.lock", *pinned]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=900)
    (site / NOT_ON_A_WORKER).unlink()


if __name__ == "__main__":
    main()
