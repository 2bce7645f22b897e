"""Tuning: pick a template's choices by measurement instead of by the cost rule.

tuner.py      the run: defaults, search, duel           decisions.py    the run's decisions, pure functions
measuring.py  building, and MetaSchedule's runners      devices.py      this machine, or a tracker's devices
database.py   the folder of measurements                record_file.py  reading its files
"""

from __future__ import annotations

from schedules.tuning.database import DatabaseWriter, Decision, TuningDatabase
from schedules.tuning.devices import GpuNeeds, Tracker
from schedules.tuning.errors import DatabaseError, DeviceError, TuningError
from schedules.tuning.measuring import Effort, Measurer
from schedules.tuning.tuner import FixedKernel, KernelResult, TunableKernel, Tuner, TuningProgress

__all__ = [
    "DatabaseError",
    "DatabaseWriter",
    "Decision",
    "DeviceError",
    "Effort",
    "FixedKernel",
    "GpuNeeds",
    "KernelResult",
    "Measurer",
    "Tracker",
    "TunableKernel",
    "Tuner",
    "TuningDatabase",
    "TuningError",
    "TuningProgress",
]
