"""The workers that hold one deployment: what is asked of all of them at the same time, and what they answer."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rpc_runtime.client.client import MEASUREMENT_SECONDS, WorkerConnection
from rpc_runtime.errors import ProtocolError, TvmSplitError
from rpc_runtime.program.machine_plan import machine_plan
from rpc_runtime.program.measurements import LinkStatistics, StageStatistics, TraceEvent
from rpc_runtime.program.program import Program
from rpc_runtime.transports.transport import DEFAULT, LinkSettings
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.foreign_text import cleaned
from rpc_runtime.wire.messages import LINK_SECRET_BYTES

TransferProgress = Callable[[str, int, int], None]
"""Called while blobs are sent: machine, bytes sent, of bytes."""

Answer = TypeVar("Answer")

UNLOAD_SECONDS = 5.0
LAST_WORD_SECONDS = 2.0
"""One that hangs keeps nobody longer who only wants to know what the others did."""
LONGEST_CONNECT_SECONDS = 600.0


class DeployedWorkers:
    """The workers of a program's machines. Connects to nothing before it is asked to."""

    def __init__(
        self,
        program: Program,
        endpoints: Mapping[str, WorkerEndpoint],
        links: LinkSettings,
    ) -> None:
        self.deployment = secrets.token_hex(16)
        self.endpoints = {machine: endpoints[machine] for machine in program.machines}
        self.connections = {machine: WorkerConnection(endpoint) for machine, endpoint in self.endpoints.items()}
        self.blob_bytes_sent = 0
        self.weight_bytes: dict[str, int] = {}
        """What each worker says that it holds of weights, once all have loaded their stages."""
        self._program = program
        self._plans = {machine: machine_plan(program, machine) for machine in program.machines}
        # Each end of a link gets its secret, and no worker gets another's token.
        self._link_secrets = {
            link: secrets.token_bytes(LINK_SECRET_BYTES) for plan in self._plans.values() for link in plan.links
        }
        self._links = links
        self._clock_offsets: dict[str, int] = {}

    def describe(self, timeout_seconds: float) -> None:
        """Finds out whether all are there, and how their clocks differ from this one."""

        def describe(machine: str) -> None:
            description = self.connections[machine].describe(timeout_seconds)
            self._clock_offsets[machine] = description.clock_offset_nanoseconds

        self._on_every_machine(describe)

    def load(
        self, blob_path: Callable[[str], Path], timeout_seconds: float, on_progress: TransferProgress | None
    ) -> None:
        """Sends what the workers lack, and loads the stages; ``on_progress`` is called from one thread at a time."""
        progress_lock = threading.Lock()

        def load(machine: str) -> int:
            def progress(sent: int, total: int) -> None:
                if on_progress is not None:
                    with progress_lock:
                        on_progress(machine, sent, total)

            connection, plan = self.connections[machine], self._plans[machine]
            blobs = [blob for stage in plan.stages for blob in stage.blobs]
            sent = connection.send_blobs(self.deployment, blobs, blob_path, timeout_seconds, progress)
            with progress_lock:
                self.blob_bytes_sent += sent
            own = {link: self._link_secrets[link] for link in plan.links}
            return connection.load(self.deployment, plan, own, timeout_seconds)

        self.weight_bytes = self._on_every_machine(load)

    def connect(self, timeout_seconds: float) -> tuple[LinkStatistics, ...]:
        """Lets the workers connect to each other; what carries the links between them."""

        def connect(machine: str) -> tuple[LinkStatistics, ...]:
            peers = {}
            for name, peer in self.endpoints.items():
                setting = self._links.get((machine, name), DEFAULT)
                peers[name] = replace(peer, address=setting.address or peer.address, transport=setting.wanted)
            seconds = min(timeout_seconds, LONGEST_CONNECT_SECONDS)
            return self.connections[machine].connect(self.deployment, peers, seconds)

        return tuple(chain.from_iterable(self._on_every_machine(connect).values()))

    def statistics(self) -> tuple[StageStatistics, ...]:
        """Of each stage, and each replica of one, in the program's order.

        Raises:
            ProtocolError: a worker says nothing of a stage that it holds.
        """
        answers = self._on_every_machine(lambda machine: self._statistics_of(machine, MEASUREMENT_SECONDS))
        for stage in self._program.stages:
            if cleaned(stage.name) not in answers[stage.machine]:
                raise ProtocolError(f"{self.endpoints[stage.machine]} has no figures of the stage {stage.name!r}")
        return self._in_order(answers)

    def last_statistics(self) -> tuple[StageStatistics, ...]:
        """The same after a failure: of the stages whose machines still answer."""

        def if_it_answers(machine: str) -> dict[str, StageStatistics]:
            try:
                return self._statistics_of(machine, LAST_WORD_SECONDS)
            except TvmSplitError:
                return {}

        return self._in_order(self._on_every_machine(if_it_answers))

    def _statistics_of(self, machine: str, timeout_seconds: float) -> dict[str, StageStatistics]:
        """By the names of its stages."""
        found = self.connections[machine].statistics(self.deployment, timeout_seconds)
        return {stage.name: stage for stage in found}

    def _in_order(self, answers: Mapping[str, Mapping[str, StageStatistics]]) -> tuple[StageStatistics, ...]:
        found = (answers[stage.machine].get(cleaned(stage.name)) for stage in self._program.stages)
        return tuple(stage for stage in found if stage is not None)

    def processor_seconds(self) -> dict[str, float]:
        """By machine, what its worker has used of its cores since it started."""
        return self._on_every_machine(lambda machine: self.connections[machine].processor_seconds(self.deployment))

    def trace(self) -> tuple[TraceEvent, ...]:
        """The last events of every machine, by their start, in this process's monotonic clock."""
        answers = self._on_every_machine(
            lambda machine: self.connections[machine].trace(self.deployment, self._clock_offsets[machine])
        )
        return tuple(sorted(chain.from_iterable(answers.values()), key=lambda event: event.start_nanoseconds))

    def unload(self) -> None:
        """Ends the deployment on all that still answer."""
        with contextlib.suppress(TvmSplitError):
            self._on_every_machine(lambda machine: self.connections[machine].unload(self.deployment, UNLOAD_SECONDS))

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()

    def _on_every_machine(self, step: Callable[[str], Answer]) -> dict[str, Answer]:
        """Takes a step on all machines at once; raises the first error in the machines' order."""
        if not self.connections:
            return {}
        with ThreadPoolExecutor(len(self.connections), thread_name_prefix="machine") as threads:
            futures = {machine: threads.submit(step, machine) for machine in self.connections}
            return {machine: future.result() for machine, future in futures.items()}
