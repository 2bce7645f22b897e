"""Start the worker of this kit: ``python FOLDER --listen HOST:PORT``, with a Python without installed packages.

This file becomes a kit's ``__main__.py``. It runs on any Python from 3.7 on, and says which Python the kit needs.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any


def problem_of(kit: dict[str, Any], python: str, architecture: str, system: str, glibc: str) -> str:
    """Return why a kit does not run here and what to do; empty if it runs. ``glibc`` is empty if unknown."""
    parts = glibc.split(".")
    if python != kit["python"]:
        return (
            f"this kit is for Python {kit['python']}, and {sys.executable} is {python}: start it with "
            f"python{kit['python']}, or make a kit with its --python"
        )
    if system != "linux":
        return f"a worker runs on Linux, and this is {system}"
    if architecture != kit["architecture"]:
        return (
            f"this kit is for {kit['architecture']}, and this machine is {architecture}: pack one with --architecture"
        )
    if len(parts) > 1 and parts[1].isdigit() and int(parts[1]) < kit["glibc_minor"]:
        return f"this kit needs glibc 2.{kit['glibc_minor']} or newer, and this system has {glibc}"
    return ""


def main() -> int:
    """Run the worker and return its exit code; 1 if the kit cannot run here."""
    kit_folder = Path(__file__).resolve().parent
    kit = json.loads((kit_folder / "kit.json").read_text(encoding="utf-8"))
    python = "{}.{}".format(*sys.version_info)
    problem = problem_of(kit, python, platform.machine(), sys.platform, platform.libc_ver()[1])
    if problem:
        sys.stderr.write(f"error: {problem}\n")
        return 1
    # Hide the packages installed for this Python: other versions could be imported instead of the kit's.
    other_paths = [path for path in sys.path[1:] if not path.endswith(("site-packages", "dist-packages"))]
    sys.path[:] = [str(kit_folder / "packages"), *other_paths]
    from rpc_runtime.processes import take_stdout

    results = take_stdout()  # before all imports that may print
    from rpc_runtime.worker.process import main as serve

    return serve(results)


if __name__ == "__main__":
    sys.exit(main())
