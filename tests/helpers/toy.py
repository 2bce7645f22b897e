"""Install the toy plug-in for a test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent / "toy_plugin"
"""The folder on a process's path (``PYTHONPATH``) with which the plug-in is installed."""


@contextmanager
def toy_plugin_installed() -> Iterator[None]:
    """Let tvm-split find the plug-in in this context."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in [module for module in sys.modules if module.partition(".")[0] == "toy_plugin"]:
            del sys.modules[name]
