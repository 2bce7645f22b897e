"""The page of a lab: the deployment that runs there, or its workers while none runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rpc_runtime.client.bystander import Bystander, RunningDeployment, chosen, running_on
from rpc_runtime.errors import TvmSplitError
from tvm_split.cluster.launcher import AskedMachine
from tvm_split.dashboard.live import REFRESH_SECONDS, LivePage
from tvm_split.dashboard.state import ENDED, FAILED, WAITING, Page, ShownMachine, reported
from tvm_split.observing.about import about_in

SEARCH_SECONDS = 2.0
"""Time between two questions for a deployment."""


class LabPage:
    """The page of a deployment that another process runs. When the deployment has ended, the next one is searched for.

    Args:
        ask: asks all workers of the lab.
        deployment: the deployment's name (letters, as ``tvm-split status`` shows them) or model; None for the only one.
    """

    def __init__(self, ask: Callable[[], Sequence[AskedMachine]], deployment: str | None) -> None:
        self._ask, self._deployment = ask, deployment
        self._lock = threading.Lock()
        self._bystander: Bystander | None = None
        self._live: LivePage | None = None
        self._last = Page(deployment or "", WAITING, refresh_seconds=REFRESH_SECONDS)
        self._asked_at = float("-inf")

    def page(self) -> Page:
        with self._lock:
            if self._live is not None:
                self._last = self._live.page()
                if self._live.has_ended:
                    self._leave()
            elif time.monotonic() - self._asked_at > SEARCH_SECONDS:
                self._find()
                self._asked_at = time.monotonic()
            return self._last

    def _find(self) -> None:
        answers: Sequence[AskedMachine] = ()
        running: list[RunningDeployment] = []
        try:
            answers = self._ask()
            running = running_on({answer.name: answer.worker for answer in answers if answer.worker is not None})
            found = chosen(running, self._deployment)
            endpoints = {answer.name: answer.endpoint for answer in answers if answer.name in found.machines}
            self._bystander = Bystander(endpoints, found)
            about = about_in(self._bystander.about().values())
        except TvmSplitError as error:
            self._leave()
            # What ended stays to be seen until the next one runs.
            if self._last.state not in (ENDED, FAILED) or running:
                self._last = _waiting(answers, str(error))
            return
        self._live = LivePage(found.model, self._bystander, about, found.machines, endpoints)
        self._last = self._live.page()

    def _leave(self) -> None:
        if self._bystander is not None:
            self._bystander.close()
        self._bystander = self._live = None


def _waiting(answers: Sequence[AskedMachine], reason: str) -> Page:
    """Return a page without a deployment, which shows the workers and the ``reason`` why there is none."""
    machines = (
        ShownMachine(answer.name, answers=answer.worker is not None, **reported(answer.worker)) for answer in answers
    )
    limit = "Waiting for a deployment."
    return Page("tvm-split", WAITING, reason, limit, machines=tuple(machines), refresh_seconds=SEARCH_SECONDS)
