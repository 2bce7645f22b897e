"""The client's ends of the links of one placement, and the results that arrive on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rpc_runtime.client.result_queue import ResultQueue, array_slot
from rpc_runtime.program.events import FLIGHT, PAUSE, REPLAY, SEND, WINDOW, Recorder, now
from rpc_runtime.program.inputs import flat_bytes
from rpc_runtime.program.program import Program
from rpc_runtime.program.routes import CLIENT, Route
from rpc_runtime.program.specs import Array
from rpc_runtime.transports.links import IncomingLink, OutgoingLink
from rpc_runtime.transports.liveness import USUAL_TIMEOUTS, LinkTimeouts


class Feeder(Protocol):
    """What feeds the links and takes their results; it has one lock for all its links."""

    lock: threading.Lock

    def moved(self) -> None:
        """Record that a tensor or a part of one was sent or received."""

    def arrived(self, links: ClientLinks, tensor: str, sequence: int, value: Any, release: Callable[[], None]) -> None:
        """Take a received output tensor; call ``release`` once, with the lock held, when it is consumed."""

    def room_locked(self) -> None:
        """Use the room for one more micro-batch of a tensor."""

    def wake(self) -> None:
        """Wake the threads that can go on after `room_locked`, without the lock."""


class ClientLinks:
    """The client's links of a program, as their `LinkOwner`; sequence numbers count from 0.

    ``recorder`` has the client's events since these links were made.
    """

    device = None

    def __init__(self, feeder: Feeder, program: Program, timeouts: LinkTimeouts = USUAL_TIMEOUTS) -> None:
        self.program = program
        self.results = ResultQueue(program)
        self.recorder = Recorder()
        self.flights, self.replays = self.recorder.track(FLIGHT), self.recorder.track(REPLAY)
        for machine in program.machines:  # counters exist before they count
            self.recorder.track(PAUSE, peer=machine)
        self.lock = feeder.lock
        self.moved, self.room_locked, self.wake = feeder.moved, feeder.room_locked, feeder.wake
        self._arrived = feeder.arrived
        own = program.on(CLIENT)
        self.outgoing = {
            machine: OutgoingLink(self, routes, flat_bytes, array_slot, timeouts=timeouts)
            for machine, routes in own.by_destination.items()
        }
        self.incoming = {
            machine: IncomingLink(self, routes, array_slot, timeouts=timeouts, reuse=False)
            for machine, routes in own.by_source.items()
        }
        self._sends = own.sends(program.client_tensors)
        self.is_closed = False

    @property
    def under_way(self) -> int:
        """How many micro-batches were fed and have no complete result."""
        return self.results.submitted - self.results.taken

    def has_room_locked(self) -> bool:
        """Return whether there is room for all tensors of the next micro-batch."""
        sends = self._sends[self.results.submitted % len(self._sends)]
        return all(self.outgoing[machine].has_room_locked(tensor) for tensor, _, machine in sends)

    def feed_locked(self, inputs: Sequence[Array], tensors: Sequence[Array]) -> int:
        """Queue the values of the program's ``client_tensors`` to be sent; return the micro-batch's sequence number."""
        sequence = self.results.submit(inputs)
        for tensor, position, machine in self._sends[sequence % len(self._sends)]:
            self.outgoing[machine].put_locked(tensor, sequence, tensors[position])
        return sequence

    def flush(self, wake: Callable[[], None]) -> None:
        """Send credits, call ``wake``, then send inputs, which may copy them. Call it without the lock."""
        for incoming in self.incoming.values():
            incoming.flush()
        wake()
        for outgoing in self.outgoing.values():
            outgoing.flush()

    def close_locked(self) -> None:
        self.is_closed = True
        self.results.clear()
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close_locked()

    def transferred(
        self, kind: str, route: Route, sequence: int, start: int, end: int, size_bytes: int, under_way: int
    ) -> None:
        """Record a transfer of an input or output."""
        peer = route.destination if kind == SEND else route.source
        track = self.recorder.track(kind, "", peer, route.tensor.name)
        self.recorder.record(track, sequence, start, end, size_bytes, under_way)

    def widened(self, route: Route, sequence: int, depth: int) -> None:
        """Record that the client allows more micro-batches of an output under way."""
        moment = now()
        self.transferred(WINDOW, route, sequence, moment, moment, 0, depth)

    def deliver(self, route: Route, sequence: int, value: Any, release: Callable[[], None]) -> None:
        self._arrived(self, route.tensor.name, sequence, value, release)

    def starves_locked(self, route: Route, sequence: int) -> bool:
        """Return True: results are returned at once, so the client always waits for the next tensor."""
        return True
