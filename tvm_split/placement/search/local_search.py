"""Local search: improves a plan by small random changes (simulated annealing), each evaluated exactly.

A change moves pieces between stages such that no stage reads a later one, so stages never wait for each other in a
cycle.
"""

import math
import random
from collections.abc import Callable

from tvm_split.placement.search.budget import EVALUATION_WORK, Budget
from tvm_split.placement.search.candidate import Candidate, Placement, tried
from tvm_split.placement.search.instance import Instance

TEMPERATURES = (0.05, 1e-5)
"""Relative increase of the value that a change may cause, about: at the start and at the end of annealing."""
CHANGES_PER_ROUND = 100
"""Changes in one round of annealing, times the sum of the numbers of pieces and machines."""
ROUNDS_WITHOUT_GAIN = 3
"""The search ends after this many rounds in a row without an improvement."""
GAIN = 1e-4
"""Relative decrease of the value that counts as an improvement."""
FURTHEST = 0.25
"""Largest share of all pieces by which one change moves a cut."""
State = tuple[Placement, ...]
"""Stages in topological order."""


class LocalSearch:
    """Local search of one instance; the same budget of work gives the same plans."""

    def __init__(self, instance: Instance, *, replicas: bool) -> None:
        self._instance, self._replicas = instance, replicas
        self._random = random.Random(0)  # noqa: S311
        self._changes: list[Callable[[State], State | None]] = [
            self._move_cut,
            self._move_cut,
            self._exchange_machines,
            self._use_idle,
            self._merge,
            self._split,
        ]
        self._branch_of = _branches(instance)
        whole = instance.seconds.sum(axis=0)
        self._classes = sorted(instance.classes, key=lambda members: float(whole[members[0]]))
        if not instance.is_line:
            self._changes += [self._move_run, self._move_run]
        if replicas:
            self._changes += [self._add_replica, self._take_replica]

    def improved(self, plan: Candidate, budget: Budget) -> Candidate:
        """Return a plan at least as good as ``plan``; stops after a few rounds without an improvement."""
        best, without_gain = plan, 0
        while without_gain < ROUNDS_WITHOUT_GAIN and not budget.is_used_up:
            better = self._annealed(best, budget)
            without_gain = 0 if better.value < best.value * (1 - GAIN) else without_gain + 1
            best = better
        return best

    def _annealed(self, plan: Candidate, budget: Budget) -> Candidate:
        current = best = plan
        hot, cold = TEMPERATURES
        changes = CHANGES_PER_ROUND * sum(self._instance.seconds.shape)
        start = budget.used_share
        if start >= 1.0:  # used up since the caller looked
            return plan
        for number in range(changes):
            used = max(number / changes, (budget.used_share - start) / (1.0 - start))
            if used >= 1.0:
                break
            temperature = hot * (cold / hot) ** used
            stages = self._random.choice(self._changes)(current.stages)
            budget.spend(EVALUATION_WORK * len(current.stages))
            changed = None if stages is None else self._evaluated(stages)
            if changed is None:
                continue
            value, least = changed.value, current.value
            if value <= least * (1 + temperature * self._random.expovariate(1.0)):
                current = changed
                if changed.rank < best.rank:
                    best = changed
        return best

    def _evaluated(self, stages: State) -> Candidate | None:
        """Evaluate stages; None if they violate a limit."""
        if not all(self._instance.is_allowed(stage.machines, stage.pieces) for stage in stages):
            return None
        plan = tried(self._instance, stages)
        return plan if plan is not None and plan.is_within_limits else None

    def _idle(self, stages: State) -> int | None:
        """Return a machine without a stage, or None; fast machine classes are likelier than slow ones."""
        used = {machine for stage in stages for machine in stage.machines}
        idle = [unused[0] for members in self._classes if (unused := [m for m in members if m not in used])]
        return idle[int(len(idle) * self._random.random() ** 2)] if idle else None

    def _move_cut(self, stages: State) -> State | None:
        """Move pieces between two neighbouring stages, usually few; each keeps one at least."""
        if len(stages) < 2:
            return None
        at = self._random.randrange(len(stages) - 1)
        first, second = stages[at : at + 2]
        most = math.ceil(self._random.random() ** 4 * FURTHEST * len(self._instance.pieces))
        if self._random.random() < 0.5:
            count = max(len(first.pieces) - most, 1)
            pieces = first.pieces[:count], tuple(sorted((*first.pieces[count:], *second.pieces)))
        else:
            moved = min(len(second.pieces) - 1, most)
            pieces = tuple(sorted((*first.pieces, *second.pieces[:moved]))), second.pieces[moved:]
        changed = Placement(first.machines, pieces[0]), Placement(second.machines, pieces[1])
        return (*stages[:at], *changed, *stages[at + 2 :])

    def _exchange_machines(self, stages: State) -> State | None:
        if len(stages) < 2:
            return None
        first, second = self._random.sample(range(len(stages)), 2)
        return _with_machines(stages, {first: stages[second].machines, second: stages[first].machines})

    def _use_idle(self, stages: State) -> State | None:
        """Replace a machine of a stage by an idle one."""
        machine, at = self._idle(stages), self._random.randrange(len(stages))
        if machine is None:
            return None
        machines = list(stages[at].machines)
        machines[self._random.randrange(len(machines))] = machine
        return _with_machines(stages, {at: tuple(machines)})

    def _merge(self, stages: State) -> State | None:
        """Make one stage of two neighbouring ones, on the machines of either, or as replicas on all of them."""
        if len(stages) < 2:
            return None
        at = self._random.randrange(len(stages) - 1)
        first, second = stages[at : at + 2]
        machines = self._random.choice((first, second)).machines
        if self._replicas and self._random.random() < 0.5:
            machines = (*first.machines, *second.machines)
        return (*stages[:at], Placement(machines, tuple(sorted(first.pieces + second.pieces))), *stages[at + 2 :])

    def _split(self, stages: State) -> State | None:
        """Cut a stage in two; they share its replicas, or an idle machine takes one."""
        at = self._random.randrange(len(stages))
        pieces, machines = stages[at].pieces, stages[at].machines
        if len(pieces) < 2:
            return None
        cut = self._random.randrange(1, len(pieces))
        if len(machines) > 1 and self._random.random() < 0.5:
            size = self._random.randrange(1, len(machines))
            parts = [machines[:size], machines[size:]]
        else:
            machine = self._idle(stages)
            if machine is None:
                return None
            parts = [machines, (machine,)]
            self._random.shuffle(parts)
        return (*stages[:at], Placement(parts[0], pieces[:cut]), Placement(parts[1], pieces[cut:]), *stages[at + 1 :])

    def _move_run(self, stages: State) -> State | None:
        """Move a run of pieces to another stage, or to a new stage on an idle machine.

        The target lies between the stages of its predecessors and of its successors.
        """
        source = self._random.randrange(len(stages))
        held = stages[source].pieces
        start = self._random.randrange(len(held))
        if self._random.random() < 0.5:
            run = set(held) & set(self._branch_of[held[start]])
        else:
            run = set(held[start : start + int(len(held) ** self._random.random())])
        before, behind = self._instance.before, self._instance.behind
        stage_of = {piece: number for number, stage in enumerate(stages) for piece in stage.pieces}
        first = max((stage_of[predecessor] for piece in run for predecessor in before[piece] - run), default=-1)
        last = min(
            (stage_of[successor] for piece in run for successor in behind[piece] if successor not in run),
            default=len(stages),
        )
        if first == last == source:
            return self._part(stages, source, run)
        remaining = [
            Placement(stage.machines, tuple(piece for piece in stage.pieces if piece not in run)) for stage in stages
        ]
        if self._random.random() < 0.5 and first < last:
            machine, at = self._idle(stages), self._random.randint(first + 1, last)
            if machine is None:
                return None
            remaining.insert(at, Placement((machine,), tuple(sorted(run))))
        else:
            targets = [number for number in range(max(first, 0), min(last + 1, len(stages))) if number != source]
            if not targets:
                return None
            at = self._random.choice(targets)
            remaining[at] = Placement(remaining[at].machines, tuple(sorted((*remaining[at].pieces, *run))))
        return tuple(stage for stage in remaining if stage.pieces)

    def _part(self, stages: State, at: int, run: set[int]) -> State | None:
        """Compute a run beside other pieces of its stage: divide the stage into what is before, beside and behind it.

        A stage sends its results when it ends, so all four need machines of their own; the largest keeps the machines.
        """
        before, behind, held = self._instance.before, self._instance.behind, stages[at].pieces
        first, last = set(run), set(run)
        for piece in reversed(held):
            if first.intersection(behind[piece]):
                first.add(piece)
        for piece in held:
            if last & before[piece]:
                last.add(piece)
        divided = [first - run, run, set(held) - first - last, last - run]
        parts = [tuple(sorted(part)) for part in divided if part]
        changed = list(stages)
        changed[at : at + 1] = [Placement(stages[at].machines, part) for part in parts]
        for number in sorted(range(len(parts)), key=lambda number: len(parts[number]))[:-1]:
            machine = self._idle(tuple(changed))
            if machine is None:
                return None
            changed[at + number] = Placement((machine,), parts[number])
        return tuple(changed)

    def _add_replica(self, stages: State) -> State | None:
        machine, at = self._idle(stages), self._random.randrange(len(stages))
        return None if machine is None else _with_machines(stages, {at: (*stages[at].machines, machine)})

    def _take_replica(self, stages: State) -> State | None:
        """Move a replica from its stage to another stage, or leave it idle."""
        several = [number for number, stage in enumerate(stages) if len(stage.machines) > 1]
        if not several:
            return None
        source, target = self._random.choice(several), self._random.randrange(len(stages) + 1)
        machine = self._random.choice(stages[source].machines)
        changed = {source: tuple(replica for replica in stages[source].machines if replica != machine)}
        if target < len(stages) and target != source:
            changed[target] = (*stages[target].machines, machine)
        return _with_machines(stages, changed)


def _branches(instance: Instance) -> list[list[int]]:
    """Return the branch of each piece: the pieces before and behind it up to a fork or a join."""
    branch_of: list[list[int]] = []
    for piece, before in enumerate(instance.before):
        is_joined = len(before) == 1 and len(instance.behind[min(before)]) == 1
        branch_of.append(branch_of[min(before)] if is_joined else [])
        branch_of[piece].append(piece)
    return branch_of


def _with_machines(stages: State, changed: dict[int, tuple[int, ...]]) -> State:
    return tuple(Placement(changed.get(at, stage.machines), stage.pieces) for at, stage in enumerate(stages))
