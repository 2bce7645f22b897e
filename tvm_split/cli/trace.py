"""``tvm-split trace``: record what a running deployment does, from beside it."""

import time
from pathlib import Path

from rpc_runtime.client.bystander import Bystander, chosen, running_on
from rpc_runtime.option import option
from tvm_split.cli import options
from tvm_split.cli.source import MachineOptions
from tvm_split.cli.status import asked
from tvm_split.display.console import print_note
from tvm_split.display.view import write
from tvm_split.errors import ClusterError
from tvm_split.observing.about import about_in
from tvm_split.observing.recording import Recording
from tvm_split.progress import step_progress

STEP_SECONDS = 0.1


def trace(
    machines: MachineOptions,
    deployment: str | None = options.DEPLOYMENT,
    seconds: float = option(5.0, "How long to record.", minimum=0.1),
    output: Path | None = options.TRACE,
    kernels: int = options.KERNELS,
    timeout: float = option(5.0, "The longest wait for a worker.", metavar="SECONDS", minimum=0.1),
    json: bool = options.JSON,
) -> None:
    """Record what a running deployment does, and show how busy machines and links are and what limits.

    The deployment goes on as it is. What its client does is in its own trace: `tvm-split run --trace FILE`.

    Example: tvm-split trace --cluster lab.yaml --seconds 5 --output run.pftrace
    """
    answers, _ = asked(machines, timeout)
    workers = {answer.name: answer.worker for answer in answers if answer.worker is not None}
    if not workers:
        reasons = "; ".join(f"{answer.endpoint}: {answer.reason}" for answer in answers)
        raise ClusterError(f"no worker at {machines.location} answers{f': {reasons}' if reasons else ''}")
    found = chosen(running_on(workers), deployment)
    with Bystander({answer.name: answer.endpoint for answer in answers}, found) as bystander:
        recording = Recording(found.model, bystander, about_in(bystander.about().values()), kernels)
        recording.start()
        try:
            with step_progress("recording") as report:
                begun = time.monotonic()
                while (passed := time.monotonic() - begun) < seconds:
                    report("recording", int(passed * 10), max(1, int(seconds * 10)))
                    time.sleep(min(STEP_SECONDS, seconds - passed))
        finally:
            recording.stop()
        result = recording.trace
    if output is not None:
        result.save(output)
        print_note(f"trace written to {output}")
    write(result, json=json)
