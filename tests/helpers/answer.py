"""Ask another Python process: its answer is the last line that it writes, as JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.helpers.rpc_runtime.worker_process import ROOT


def answer(*arguments: str, environment: Mapping[str, str], seconds: float = 100.0) -> Any:
    """Return the answer of Python with these arguments, run in the repository; ``environment`` is added."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])
