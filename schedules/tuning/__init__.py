"""Tuning: pick a template's choices by measurement instead of by the cost rule.

tuner.py      the run: defaults, search, duel           decisions.py    the run's decisions, pure functions
measuring.py  building and timing                     devices.py      this machine, or a tracker's devices
database.py   the folder of measurements
"""

from schedules.tuning.database import DatabaseWriter, Record, TuningDatabase
from schedules.tuning.devices import GpuNeeds, Tracker
from schedules.tuning.errors import DatabaseError, DeviceError, TuningError
from schedules.tuning.measuring import Effort, Measurer
from schedules.tuning.tuner import FixedKernel, KernelResult, TunableKernel, Tuner, TuningProgress

__all__ = [
    "DatabaseError",
    "DatabaseWriter",
    "DeviceError",
    "Effort",
    "FixedKernel",
    "GpuNeeds",
    "KernelResult",
    "Measurer",
    "Record",
    "Tracker",
    "TunableKernel",
    "Tuner",
    "TuningDatabase",
    "TuningError",
    "TuningProgress",
]
