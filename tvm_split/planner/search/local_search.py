"""Local search: improves a plan by small random changes (simulated annealing), each evaluated exactly.

A plan is a topological order of the pieces, cut into segments, each with its machines. No change of the order, the cuts
or the machines can make stages wait for each other in a cycle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_split.errors import PlanError
from tvm_split.planner.search.budget import EVALUATION_WORK, Budget
from tvm_split.planner.search.candidate import Candidate, Placement, candidate, fits, within_limits
from tvm_split.planner.search.instance import Instance

TEMPERATURES = (0.05, 1e-5)
"""Relative increase of the value that a change may cause, about: at the start and at the end of annealing."""
ROUND = 100
"""Changes in one round of annealing, per piece and per machine."""
ROUNDS_WITHOUT_GAIN = 3
"""The search ends after so many rounds in a row without an improvement."""
GAIN = 1e-4
"""Relative decrease of the value that counts as an improvement."""
RUN = 0.5
"""Rate of the exponential distribution of further pieces that move with a piece: one over their mean number."""
FURTHEST = 0.25
"""Largest share of all pieces by which one change moves a cut."""


@dataclass(frozen=True)
class _State:
    """A plan as segments: segment ``i`` is ``order[ends[i - 1] : ends[i]]`` on ``machines[i]``."""

    order: tuple[int, ...]
    ends: tuple[int, ...]
    machines: tuple[tuple[int, ...], ...]

    def pieces(self, segment: int) -> tuple[int, ...]:
        start = self.ends[segment - 1] if segment else 0
        return self.order[start : self.ends[segment]]

    def stages(self) -> list[Placement]:
        return [Placement(group, tuple(sorted(self.pieces(each)))) for each, group in enumerate(self.machines)]


class LocalSearch:
    """Local search of one instance; the same seed and the same budget of work give the same plans."""

    def __init__(self, instance: Instance, *, replicas: bool, seed: int = 0) -> None:
        self._instance, self._replicas = instance, replicas
        self._random = random.Random(seed)  # noqa: S311
        self._before = instance.before
        self._behind = instance.behind
        self._classes = instance.classes
        self._able = np.isfinite(instance.seconds)
        self._changes: list[Callable[[_State], _State | None]] = [
            self._move_cut,
            self._move_cut,
            self._exchange_machines,
            self._use_idle,
            self._merge,
            self._split,
        ]
        if not instance.is_line:
            self._changes += [self._move_run, self._move_run]
        if replicas:
            self._changes += [self._add_replica, self._take_replica]

    def improved(self, plan: Candidate, budget: Budget) -> Candidate:
        """Return a plan at least as good as ``plan``; stops after a few rounds without an improvement."""
        problem, best, without_gain = self._instance.problem, plan, 0
        while without_gain < ROUNDS_WITHOUT_GAIN and not budget.is_used_up:
            better = self._annealed(best, budget)
            without_gain = 0 if better.value(problem) < best.value(problem) * (1 - GAIN) else without_gain + 1
            best = better
        return best

    def _annealed(self, plan: Candidate, budget: Budget) -> Candidate:
        problem = self._instance.problem
        state, current, best = self._state(plan), plan, plan
        hot, cold = TEMPERATURES
        changes = ROUND * sum(self._instance.seconds.shape)
        start = budget.used_share
        if start >= 1.0:  # used up since the caller looked
            return plan
        for number in range(changes):
            used = max(number / changes, (budget.used_share - start) / (1.0 - start))
            if used >= 1.0:
                break
            temperature = hot * (cold / hot) ** used
            changed = self._random.choice(self._changes)(state)
            budget.spend(EVALUATION_WORK * len(state.machines))
            found = None if changed is None else self._evaluated(changed)
            if changed is None or found is None:
                continue
            value, least = found.value(problem), current.value(problem)
            if value <= least * (1 + temperature * self._random.expovariate(1.0)):
                state, current = changed, found
                if found.rank(problem) < best.rank(problem):
                    best = found
        return best

    def _evaluated(self, state: _State) -> Candidate | None:
        """Evaluate a state; None if the plan violates a limit."""
        instance, stages = self._instance, state.stages()
        if not all(self._able[np.ix_(stage.pieces, stage.machines)].all() for stage in stages):
            return None
        try:
            plan = candidate(instance, stages)
        except PlanError:
            return None
        return plan if fits(instance, plan) and within_limits(instance.problem, plan.flow) else None

    @staticmethod
    def _state(plan: Candidate) -> _State:
        order: tuple[int, ...] = ()
        ends = []
        for stage in plan.stages:
            order += stage.pieces
            ends.append(len(order))
        return _State(order, tuple(ends), tuple(stage.machines for stage in plan.stages))

    def _move_cut(self, state: _State) -> _State | None:
        if len(state.ends) < 2:
            return None
        at = self._random.randrange(len(state.ends) - 1)
        low, high = state.ends[at - 1] if at else 0, state.ends[at + 1]
        step = math.ceil(self._random.random() ** 4 * FURTHEST * len(state.order)) * self._random.choice((-1, 1))
        end = min(max(state.ends[at] + step, low + 1), high - 1)
        return _State(state.order, (*state.ends[:at], end, *state.ends[at + 1 :]), state.machines)

    def _exchange_machines(self, state: _State) -> _State | None:
        if len(state.machines) < 2:
            return None
        one, other = self._random.sample(range(len(state.machines)), 2)
        machines = list(state.machines)
        machines[one], machines[other] = machines[other], machines[one]
        return _State(state.order, state.ends, tuple(machines))

    def _idle(self, state: _State) -> int | None:
        """Return a machine without a stage, or None; each machine class is equally likely."""
        used = {machine for group in state.machines for machine in group}
        idle = [left for members in self._classes if (left := [each for each in members if each not in used])]
        return self._random.choice(idle)[0] if idle else None

    def _use_idle(self, state: _State) -> _State | None:
        machine, at = self._idle(state), self._random.randrange(len(state.machines))
        if machine is None:
            return None
        group = list(state.machines[at])
        group[self._random.randrange(len(group))] = machine
        return self._with_machines(state, {at: tuple(group)})

    def _merge(self, state: _State) -> _State | None:
        if len(state.machines) < 2:
            return None
        at = self._random.randrange(len(state.machines) - 1)
        kept = state.machines[at + self._random.randrange(2)]
        if self._replicas and self._random.random() < 0.5:
            kept = (*state.machines[at], *state.machines[at + 1])
        ends = (*state.ends[:at], *state.ends[at + 1 :])
        return _State(state.order, ends, (*state.machines[:at], kept, *state.machines[at + 2 :]))

    def _split(self, state: _State) -> _State | None:
        at = self._random.randrange(len(state.machines))
        start, group = state.ends[at - 1] if at else 0, state.machines[at]
        if state.ends[at] - start < 2:
            return None
        parts: tuple[tuple[int, ...], tuple[int, ...]]
        if len(group) > 1 and self._random.random() < 0.5:
            size = self._random.randrange(1, len(group))
            parts = group[:size], group[size:]
        else:
            machine = self._idle(state)
            if machine is None:
                return None
            parts = (group, (machine,)) if self._random.random() < 0.5 else ((machine,), group)
        middle = self._random.randrange(start + 1, state.ends[at])
        ends = (*state.ends[:at], middle, *state.ends[at:])
        return _State(state.order, ends, (*state.machines[:at], *parts, *state.machines[at + 1 :]))

    def _move_run(self, state: _State) -> _State | None:
        """Move a run of pieces to another segment, or to a new segment on an idle machine.

        The target lies between the segments of its predecessors and of its successors.
        """
        own = self._random.randrange(len(state.ends))
        held = state.pieces(own)
        start = self._random.randrange(len(held))
        run = set(held[start : start + 1 + int(self._random.expovariate(RUN))])
        segment_of = {piece: number for number in range(len(state.ends)) for piece in state.pieces(number)}
        first = max((segment_of[each] for piece in run for each in self._before[piece] - run), default=-1)
        last = min((segment_of[each] for piece in run for each in self._behind[piece] if each not in run), default=None)
        last = len(state.ends) if last is None else last
        segments = [[piece for piece in state.pieces(number) if piece not in run] for number in range(len(state.ends))]
        machines = list(state.machines)
        if self._random.random() < 0.5 and first < last:
            machine, at = self._idle(state), self._random.randint(first + 1, last)
            if machine is None:
                return None
            segments.insert(at, sorted(run))
            machines.insert(at, (machine,))
        else:
            targets = [each for each in range(max(first, 0), min(last + 1, len(segments))) if each != own]
            if not targets:
                return None
            target = self._random.choice(targets)
            segments[target] = sorted([*segments[target], *run])
        kept = [number for number, pieces in enumerate(segments) if pieces]
        return self._joined([segments[number] for number in kept], [machines[number] for number in kept])

    @staticmethod
    def _joined(segments: Sequence[Sequence[int]], machines: Sequence[tuple[int, ...]]) -> _State:
        order: list[int] = []
        ends = []
        for held in segments:
            order += held
            ends.append(len(order))
        return _State(tuple(order), tuple(ends), tuple(machines))

    def _add_replica(self, state: _State) -> _State | None:
        machine, at = self._idle(state), self._random.randrange(len(state.machines))
        return None if machine is None else self._with_machines(state, {at: (*state.machines[at], machine)})

    def _take_replica(self, state: _State) -> _State | None:
        """Move a replica from its stage to another stage, or leave it idle."""
        several = [number for number, group in enumerate(state.machines) if len(group) > 1]
        if not several:
            return None
        source, target = self._random.choice(several), self._random.randrange(len(state.machines) + 1)
        machine = self._random.choice(state.machines[source])
        changed = {source: tuple(each for each in state.machines[source] if each != machine)}
        if target < len(state.machines) and target != source:
            changed[target] = (*state.machines[target], machine)
        return self._with_machines(state, changed)

    @staticmethod
    def _with_machines(state: _State, changed: dict[int, tuple[int, ...]]) -> _State:
        machines = tuple(changed.get(number, group) for number, group in enumerate(state.machines))
        return _State(state.order, state.ends, machines)
