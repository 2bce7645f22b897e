"""Simulate oversubscribed cores by processor sharing: all jobs get the same share of the cores that they want.

A job of a machine wants as many cores as the machine computes on. In every set of cores that it belongs to, all jobs
get the same share of what they want, and the scarcest set limits the job. Processor sharing (Kleinrock 1967)
approximates the scheduler of an operating system. Machines whose sets are never oversubscribed are not slowed down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import simpy

from tvm_split.cluster.machine import SharedCores

ROUNDING = 1e-12
"""Seconds of work left, as a share of the simulated time, that are only rounding of sums of durations."""


@dataclass(eq=False)
class _Job:
    machine: str
    done: simpy.Event
    left_seconds: float
    rate: float = 1.0


class Processors:
    """The cores of all machines and of the client; ``cores`` has the number that each one wants while it computes."""

    def __init__(self, environment: simpy.Environment, shared: Sequence[SharedCores], cores: Mapping[str, int]) -> None:
        self._environment = environment
        self._cores = cores
        demands = [sum(cores.get(name, 0) for name in core_set.machines) for core_set in shared]
        self._sets = [core_set for core_set, count in zip(shared, demands, strict=True) if count > core_set.cores]
        self._oversubscribed = {name for core_set in self._sets for name in core_set.machines if cores.get(name, 0)}
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._plans = 0

    def work(self, machine: str, seconds: float) -> simpy.Event:
        """Return the event that occurs when the machine has done work that takes ``seconds`` without contention."""
        if machine not in self._oversubscribed:
            return self._environment.timeout(seconds)
        self._pass_time()
        job = _Job(machine, self._environment.event(), seconds)
        self._jobs.append(job)
        self._share()
        return job.done

    def _pass_time(self) -> None:
        now = self._environment.now
        for job in self._jobs:
            job.left_seconds -= job.rate * (now - self._since)
        self._since = now

    def _share(self) -> None:
        """Set the rate of every job, and wait for the first job to finish."""
        for job in self._jobs:
            job.rate = 1.0
        for core_set in self._sets:
            jobs = [job for job in self._jobs if job.machine in core_set.machines]
            demand = sum(self._cores[job.machine] for job in jobs)
            for job in jobs:
                job.rate = min(job.rate, core_set.cores / demand)
        self._plans += 1
        if not self._jobs:
            return
        first = min(self._jobs, key=lambda job: job.left_seconds / job.rate)
        plan, seconds = self._plans, max(first.left_seconds / first.rate, 0.0)
        self._environment.timeout(seconds).callbacks.append(lambda _: self._finish(plan, first))

    def _finish(self, plan: int, first: _Job) -> None:
        if plan != self._plans:
            return  # outdated: another job has started or finished since
        self._pass_time()
        done = [job for job in self._jobs if job is first or job.left_seconds <= ROUNDING * self._environment.now]
        self._jobs = [job for job in self._jobs if job not in done]
        self._share()
        for job in done:
            job.done.succeed()
