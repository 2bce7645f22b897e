"""Calls many machines at the same time."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rpc_runtime.errors import DeadlineError, TvmSplitError, WorkerUnavailableError

CALLED_AT_ONCE = 256
"""The number of machines called in parallel, so that hundreds of unreachable ones do not delay the others."""

Answer = TypeVar("Answer")
Key = TypeVar("Key")


def answers_of(
    machines: Iterable[Key], step: Callable[[Key], Answer], tolerated: type[TvmSplitError] = TvmSplitError
) -> tuple[dict[Key, Answer], dict[Key, TvmSplitError]]:
    """Run a step for all machines at the same time; return its results by machine, and its ``tolerated`` errors.

    Raises other errors as `raise_errors`.
    """
    with ThreadPoolExecutor(CALLED_AT_ONCE, thread_name_prefix="machine") as threads:
        futures = {machine: threads.submit(step, machine) for machine in machines}
    raised = {machine: error for machine, future in futures.items() if (error := future.exception()) is not None}
    raise_errors([error for error in raised.values() if not isinstance(error, tolerated)])
    errors = {machine: error for machine, error in raised.items() if isinstance(error, tolerated)}
    return {machine: future.result() for machine, future in futures.items() if machine not in errors}, errors


def on_every_machine(machines: Iterable[Key], step: Callable[[Key], Answer]) -> dict[Key, Answer]:
    """Run a step for all machines at the same time; return its results by machine. Raises as `raise_errors`."""
    answers, errors = answers_of(machines, step)
    raise_errors(list(errors.values()))
    return answers


def raise_errors(errors: Sequence[BaseException]) -> None:
    """Raise the first error, if any; if it is of an unreachable machine, raise one error for all of these."""
    unreachable = [error for error in errors if isinstance(error, WorkerUnavailableError | DeadlineError)]
    if len(unreachable) > 1 and errors[0] is unreachable[0]:
        listed = "".join(f"\n  {text}" for text in dict.fromkeys(map(str, unreachable)))
        raise WorkerUnavailableError(f"{len(unreachable)} machines cannot be reached:{listed}") from errors[0]
    for error in errors:
        raise error
