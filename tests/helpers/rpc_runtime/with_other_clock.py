"""Run a Python module with another monotonic clock: ``with_other_clock.py BASE AHEAD PPM PYTHON -m MODULE …``.

The clock is AHEAD nanoseconds ahead at BASE nanoseconds of the host's clock, and gains PPM microseconds a second.
"""

import runpy
import sys
import time

base, ahead, ppm = map(int, sys.argv[1:4])
module, sys.argv = sys.argv[6], [sys.argv[6], *sys.argv[7:]]
own = time.monotonic_ns
time.monotonic_ns = lambda: own() + ahead + (own() - base) * ppm // 1_000_000
runpy.run_module(module, run_name="__main__", alter_sys=True)
