"""Processes that run a module of this package, from wherever it was imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str) -> list[str]:
    """``module`` as in ``python -m rpc_runtime.MODULE``."""
    return [sys.executable, "-m", f"rpc_runtime.{module}"]


def environment(**variables: str) -> dict[str, str]:
    """This process's own, with ``variables``; the new process finds the package where this one did."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, **variables}
