"""Processes that run a module of this package, from wherever it was imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str) -> list[str]:
    """Return the command that runs ``rpc_runtime.MODULE`` without importing from the current folder."""
    return [sys.executable, "-P", "-m", f"rpc_runtime.{module}"]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with ``variables`` and this package's folder first in PYTHONPATH."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, **variables}
