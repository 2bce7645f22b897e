"""Runs a stage, and records the single kernels of some of its micro-batches."""

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from rpc_runtime.errors import InputError
from rpc_runtime.program.events import Recorder

if TYPE_CHECKING:
    from rpc_runtime.execution.loaded_stage import LoadedStage


NVTX_DOMAIN = "tvm-split"


def mark_for_nsight() -> None:
    """Mark the runs of stages in this process by NVTX ranges: a stage's name, with the micro-batch as its payload.

    Raises:
        InputError: the package is missing.
    """
    try:
        ObservedStage.annotate = import_module("nvtx").annotate
    except ImportError as error:
        raise InputError("--nvtx needs the package nvtx: pip install nvtx, where the worker runs") from error


class ObservedStage:
    """A loaded stage. After ``record_next(n)``, it records the kernels of its next ``n`` micro-batches."""

    annotate: ClassVar[Any] = None
    """`nvtx.annotate`, if runs in this process are marked for Nsight."""

    def __init__(self, stage: "LoadedStage", recorder: Recorder) -> None:
        self.loaded = stage
        self._recorder = recorder
        # One thread runs the stage, others ask: each of these is written by one side only.
        self._runs = self._until = 0

    def record_next(self, micro_batches: int) -> None:
        self._until = self._runs + micro_batches

    def run(self, inputs: Sequence[Any], sequence: int) -> list[Any]:
        """Return the outputs for one micro-batch; raises as `LoadedStage.run`."""
        if self.annotate is None:
            return self._run(inputs, sequence)
        with self.annotate(self.loaded.stage.name, domain=NVTX_DOMAIN, payload=sequence):
            return self._run(inputs, sequence)

    def _run(self, inputs: Sequence[Any], sequence: int) -> list[Any]:
        self._runs += 1
        if self._runs > self._until:
            return self.loaded.run(inputs)
        calls: Counter[str] = Counter()

        def record(function: str, start: int, end: int) -> None:
            track = self._recorder.kernel_track(self.loaded.stage.name, function)
            self._recorder.record(track, sequence, start, end, value=calls[function])
            calls[function] += 1

        return self.loaded.run_kernels(inputs, record)
