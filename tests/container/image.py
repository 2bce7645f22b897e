"""The worker's image of ``deploy/Containerfile``, built and run by podman in a folder of its own.

FOLDER has all of podman's storage. No registry of images is asked: Debian's Python stands for the one that the
Containerfile names, and what pip installs in the build it has got here before. It needs root, Debian, podman, crun and
debootstrap.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGE, BASE = "localhost/tvm-split-worker", "localhost/debian-python"
SUITE = "bookworm"
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
"""A container gets no more than what a host may give that cannot raise its own."""
_ALONE = (
    "umount --recursive /sys/fs/cgroup 2>/dev/null || umount --lazy /sys/fs/cgroup; "
    'mount -t cgroup2 none /sys/fs/cgroup; exec podman "$@"'
)


def podman(folder: Path) -> list[str]:
    """The command for podman with its storage in ``folder``.

    crun refuses a host that has both kinds of control groups, so there it sees the newer kind alone, in a namespace of
    its own.
    """
    storage = [
        f"--root={folder}/storage",
        f"--runroot={folder}/run",
        f"--tmpdir={folder}/tmp",
        "--cgroup-manager=cgroupfs",
    ]
    has_both = Path("/sys/fs/cgroup/unified").is_dir()
    return [*(["unshare", "--mount", "sh", "-c", _ALONE, "sh"] if has_both else ["podman"]), *storage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    version = make_base(folder)
    wheels = download(folder / "wheels", version)
    settings = folder / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    build = ["build", *LIMITS, "--isolation=chroot", "--network=host", f"--build-arg=PYTHON_IMAGE={BASE}"]
    build += [f"--volume={wheels}:/wheels:ro", f"--volume={settings}:/etc/pip.conf:ro"]
    command = [*podman(folder), *build, f"--file={ROOT}/deploy/Containerfile", f"--tag={IMAGE}", str(ROOT)]
    subprocess.run(command, check=True, timeout=1800)
    shutil.rmtree(wheels)
    print(f"{IMAGE} with Debian's Python {version}, in {folder}")


def make_base(folder: Path) -> str:
    """Debian with its Python as an image; the version of that Python."""
    root = folder / "root"
    packages = "--include=python3,python3-venv"
    log = folder / "debootstrap.log"
    with log.open("w") as file:
        command = ["debootstrap", "--variant=minbase", packages, SUITE, str(root)]
        subprocess.run(command, check=True, stdout=file, timeout=1200)
    (root / "usr/bin/python").symlink_to("python3")
    shown = ["chroot", str(root), "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(shown, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([*podman(folder), "import", "--quiet", "-", BASE], check=True, stdin=packed.stdout, timeout=600)
    shutil.rmtree(root)
    return version


def download(wheels: Path, version: str) -> Path:
    """What the Containerfile lets pip install, as wheels for the image's Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["codecs"]]
    command = ["pip", "download", "--quiet", "--only-binary=:all:", "--python-version", version, "--dest", str(wheels)]
    constrained = ["--constraint", str(ROOT / "requirements.lock"), *needed]
    for packages in (constrained, project["build-system"]["requires"]):  # a build has an environment of its own
        subprocess.run([sys.executable, "-m", *command, *packages], check=True, timeout=1800)
    return wheels


if __name__ == "__main__":
    main()
