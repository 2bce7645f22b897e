"""Run tuning: measure the defaults, search each kernel (most time first), and decide with a duel.

measure every default ──▶ divide the trials by time ──▶ per kernel: propose, build, measure, write ──▶ duel ──▶ keep
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

from tvm import tirx
from tvm.target import Target

from schedules import machine_of
from schedules.blocks import last_line
from schedules.template import Choices, Space, Template, choices_from, text_of
from schedules.tuning.database import DatabaseWriter, Record, TuningDatabase
from schedules.tuning.decisions import ROUNDS, divide_trials, judge, propose
from schedules.tuning.measuring import MAIN, Built, Measurer

BATCH = 12
"""The least number of candidates that are built and measured together."""
CONTENDERS = 3
"""The most candidates that are compared with the default in a duel."""


@dataclass(frozen=True)
class TunableKernel:
    """An unscheduled kernel, the template that schedules it, and its number of calls per run of the model."""

    name: str
    function: tirx.PrimFunc
    template: Template[Any]
    count: int


@dataclass(frozen=True)
class FixedKernel:
    """A kernel without choices: as written, as scheduled, and its number of calls per run of the model."""

    function: tirx.PrimFunc
    scheduled: tirx.PrimFunc
    count: int


@dataclass(frozen=True)
class KernelResult:
    """The result of tuning one kernel; seconds are per call, and None if nothing could be measured.

    ``share`` is this kernel's part of the time of all measured kernels of the model, with their default choices and
    counting calls. ``tuned_seconds`` is the default's time if nothing faster is kept.
    """

    name: str
    template: str
    count: int
    share: float
    default_seconds: float | None
    tuned_seconds: float | None
    default_choices: str
    choices: str
    kept: bool
    trials: int
    failures: int

    @property
    def gain(self) -> float:
        """Default time divided by tuned time; 1 if nothing is kept."""
        if not self.default_seconds or not self.tuned_seconds:
            return 1.0
        return self.default_seconds / self.tuned_seconds


@dataclass(frozen=True)
class TuningProgress:
    """The progress of a run; ``trials_done`` of ``trials`` includes what earlier runs measured."""

    doing: str
    kernel: str
    trials_done: int
    trials: int
    failures: int
    devices: int
    default_seconds: float | None
    best_seconds: float | None
    seconds_left: float | None


@dataclass
class _State:
    """A kernel and its records, by choices as text; ``budget`` is its number of trials, earlier runs included.

    ``decided`` says whether the database has a decision that is newer than all records.
    """

    kernel: TunableKernel
    space: Space
    history: dict[str, Record]
    decided: bool
    budget: int = 1

    @property
    def default_text(self) -> str:
        return text_of(self.space.default)

    @property
    def default_seconds(self) -> float | None:
        measured = self.history.get(self.default_text)
        return None if measured is None else measured.seconds

    @property
    def weight(self) -> float:
        return self.kernel.count * (self.default_seconds or 0.0)

    @property
    def failures(self) -> int:
        return sum(measured.seconds is None for measured in self.history.values())

    def ranking(self) -> list[str]:
        """Return the measured choices as text, the fastest first."""
        seconds = {text: measured.seconds for text, measured in self.history.items() if measured.seconds is not None}
        return sorted(seconds, key=lambda text: (seconds[text], text))


@dataclass(frozen=True)
class _Batch:
    state: _State
    texts: tuple[str, ...]
    built: tuple[Built, ...]


class Tuner:
    """A tuning run over the kernels of one target; `run` may be called once.

    ``fixed`` are the model's other kernels. They are measured once, so that shares are of the whole model's time:
    ``fixed_seconds`` is their time in one run of the model, without ``unmeasured`` kernels that could not be timed.
    """

    def __init__(
        self,
        kernels: Sequence[TunableKernel],
        fixed: Sequence[FixedKernel],
        target: Target,
        measurer: Measurer,
        database: DatabaseWriter,
        *,
        seed: int = 0,
        on_progress: Callable[[TuningProgress], None] | None = None,
    ) -> None:
        self._target = target
        self._machine = machine_of(target)
        self._measurer = measurer
        self._database = database
        self._seed = seed
        self._report = on_progress or (lambda progress: None)
        decided = TuningDatabase(database.folder)
        self._states = [self._state(kernel, decided) for kernel in kernels]
        self._fixed = fixed
        self.fixed_seconds = 0.0
        self.unmeasured = len(fixed)
        self._began = time.monotonic()
        self._measured_now = 0

    def run(self, trials: int) -> tuple[KernelResult, ...]:
        """Measure until the kernels together have ``trials`` trials, including those of earlier runs, and decide.

        Every default is measured even if there are fewer trials. Returns the kernels' results, the largest share of the
        time first.
        """
        self._measure_defaults()
        self._measure_fixed()
        self._states.sort(key=lambda state: -state.weight)
        budgets = divide_trials(
            [state.weight for state in self._states],
            trials,
            [prod(map(len, state.space.axes.values())) for state in self._states],  # some may not be allowed
        )
        remaining = max(0, trials - sum(len(state.history) for state in self._states))
        for state, budget in zip(self._states, budgets, strict=True):
            # Measured times vary a little between runs, and so do the shares; the sum still holds.
            more = min(remaining, max(0, budget - len(state.history)))
            state.budget = len(state.history) + more
            remaining -= more
        for state in self._states:
            if trials > 0 and state.default_seconds is not None:
                self._search(state)
                self._duel(state)
        whole = self.fixed_seconds + sum(state.weight for state in self._states) or 1.0
        decided = TuningDatabase(self._database.folder)
        return tuple(self._result(state, whole, decided) for state in self._states)

    def _state(self, kernel: TunableKernel, decided: TuningDatabase) -> _State:
        space = kernel.template.space(kernel.function, self._machine)
        if space is None:
            raise ValueError(f"{kernel.name} is not a kernel of template {kernel.template.name}")
        history = self._database.history(kernel.function, self._target)
        return _State(kernel, space, history, decided.decision(kernel.function, self._target) is not None)

    def _measure_defaults(self) -> None:
        """Measure all defaults that no earlier run measured, in one batch."""
        missing = [state for state in self._states if state.default_text not in state.history]
        if not missing:
            return
        self._show_progress("measuring defaults", missing[0])
        built = self._measurer.build([{MAIN: self._kernel(state, state.space.default)} for state in missing])
        batches = [
            _Batch(state, (state.default_text,), (library,)) for state, library in zip(missing, built, strict=True)
        ]
        started = [self._measurer.start(batch.built, batch.state.kernel.function) for batch in batches]
        for batch, futures in zip(batches, started, strict=True):
            self._finish(batch, futures)
            self._show_progress("measuring defaults", batch.state)

    def _measure_fixed(self) -> None:
        if not self._fixed:
            return
        libraries = self._measurer.build([{MAIN: kernel.scheduled} for kernel in self._fixed])
        try:
            started = [
                self._measurer.start([library], kernel.function)
                for kernel, library in zip(self._fixed, libraries, strict=True)
            ]
            for kernel, library, futures in zip(self._fixed, libraries, started, strict=True):
                (timing,) = self._measurer.finish(futures, [library], kernel.function)
                if timing.rounds is not None:
                    self.fixed_seconds += kernel.count * median(timing.rounds)
                    self.unmeasured -= 1
        finally:
            self._measurer.discard(libraries)

    def _search(self, state: _State) -> None:
        """Measure until the kernel's budget is spent or its space is exhausted.

        Remote devices measure one batch while the next is built here. On this machine building would disturb the
        measurement.
        """
        size = max(BATCH, 2 * self._measurer.devices)
        running: tuple[_Batch, list[Any]] | None = None
        while True:
            history = {text: measured.seconds for text, measured in state.history.items()}
            history.update(dict.fromkeys(running[0].texts if running else ()))
            remaining = max(0, state.budget - len(history))
            batch = self._prepare(state, propose(state.space, history, min(size, remaining), self._seed))
            if running is not None:
                self._finish(*running)
            if not batch.texts:
                return
            running = batch, self._measurer.start(batch.built, state.kernel.function)
            if not self._measurer.is_remote:
                self._finish(*running)
                running = None
            self._show_progress("searching", state)

    def _duel(self, state: _State) -> None:
        """Measure the best candidates against the default on one device; keep one that is faster beyond the noise."""
        challengers = [text for text in state.ranking() if text != state.default_text][:CONTENDERS]
        default = state.default_seconds
        faster = [
            text for text in challengers if default is not None and (state.history[text].seconds or default) < default
        ]
        if state.decided or not any(len(state.history[text].rounds) < ROUNDS for text in faster):
            return
        self._show_progress("comparing with the default", state)
        texts = [state.default_text, *faster]
        functions = [self._kernel(state, choices_from(text)) for text in texts]
        rounds = self._measurer.duel(functions, state.kernel.function, ROUNDS)
        if rounds is None:
            return
        verdicts = {text: judge(rounds[0], times) for text, times in zip(texts[1:], rounds[1:], strict=True)}
        winner = min(verdicts, key=lambda text: verdicts[text].tuned_seconds)
        function, verdict = state.kernel.function, verdicts[winner]
        self._database.add_decision(function, self._target, texts[0], verdict.default_seconds)
        if verdict.is_faster:
            self._database.add_decision(function, self._target, winner, verdict.tuned_seconds)
        for text, times in zip(texts, rounds, strict=True):
            state.history[text] = self._database.add_trial(function, self._target, text, times)

    def _prepare(self, state: _State, proposals: Sequence[Choices]) -> _Batch:
        """Schedule and build candidates; a candidate that cannot be scheduled costs one trial."""
        kernels: list[tirx.PrimFunc] = []
        problems: list[str] = []
        for choices in proposals:
            try:
                kernels.append(self._kernel(state, choices))
                problems.append("")
            except Exception as error:
                problems.append(f"it cannot be scheduled: {last_line(error)}")
        results = iter(self._measurer.build([{MAIN: kernel} for kernel in kernels]))
        built = tuple(Built(None, problem) if problem else next(results) for problem in problems)
        return _Batch(state, tuple(text_of(choices) for choices in proposals), built)

    def _kernel(self, state: _State, choices: Choices) -> tirx.PrimFunc:
        with self._target:
            return state.kernel.template.kernel(state.kernel.function, self._machine, choices)

    def _finish(self, batch: _Batch, started: Sequence[Any]) -> None:
        """Wait for the measurements of a batch, and write them into the database."""
        try:
            timings = self._measurer.finish(started, batch.built, batch.state.kernel.function)
        finally:
            self._measurer.discard(batch.built)
        state = batch.state
        state.decided = False  # a new result may be better than an earlier decision
        for text, timing in zip(batch.texts, timings, strict=True):
            reason = "" if timing.rounds else last_line(timing.error or "no reason given")
            state.history[text] = self._database.add_trial(
                state.kernel.function, self._target, text, timing.rounds or (), reason
            )
            self._measured_now += 1

    def _result(self, state: _State, whole: float, decided: TuningDatabase) -> KernelResult:
        decision = decided.decision(state.kernel.function, self._target)
        is_tuned = decision is not None and decision.choices != state.default_text
        return KernelResult(
            name=state.kernel.name,
            template=state.kernel.template.name,
            count=state.kernel.count,
            share=state.weight / whole,
            default_seconds=state.default_seconds,
            tuned_seconds=decision.seconds if decision is not None and is_tuned else state.default_seconds,
            default_choices=state.default_text,
            choices=decision.choices if decision is not None and is_tuned else state.default_text,
            kept=is_tuned,
            trials=len(state.history),
            failures=state.failures,
        )

    def _show_progress(self, doing: str, state: _State) -> None:
        done = sum(len(kernel_state.history) for kernel_state in self._states)
        trials = sum(max(kernel_state.budget, len(kernel_state.history)) for kernel_state in self._states)
        elapsed = time.monotonic() - self._began
        seconds_left = (trials - done) * elapsed / self._measured_now if self._measured_now else None
        ranking = state.ranking()
        self._report(
            TuningProgress(
                doing=doing,
                kernel=state.kernel.name,
                trials_done=done,
                trials=trials,
                failures=sum(kernel_state.failures for kernel_state in self._states),
                devices=self._measurer.devices,
                default_seconds=state.default_seconds,
                best_seconds=state.history[ranking[0]].seconds if ranking else None,
                seconds_left=seconds_left,
            )
        )
