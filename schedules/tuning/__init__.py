"""Tuning: pick a template's choices by measurement instead of by the cost rule.

tuner.py      the run: defaults, search, duel           decisions.py    the run's decisions, pure functions
measuring.py  building and timing                     devices.py      this machine, or a tracker's devices
database.py   the folder of measurements
"""
